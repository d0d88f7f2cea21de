# Sourced behind the procedures of Redis' own test suite, in place of some of them. The suite then runs against a
# server that has part of Redis' commands, every test of a unit is tried, and each result is written to a file.
#
#   CYCLONE_SUITE_RESULTS  the file: a line for each result, "ok|err|skip|ignore TAB unit TAB test"
#   CYCLONE_SUITE_SKIP     a file of tests that are not started: "unit TAB test"

set ::suite_results [open $::env(CYCLONE_SUITE_RESULTS) a]
fconfigure $::suite_results -buffering line -encoding utf-8
set ::suite_skip {}
set suite_skip_file [open $::env(CYCLONE_SUITE_SKIP) r]
fconfigure $suite_skip_file -encoding utf-8
foreach line [split [read $suite_skip_file] "\n"] {
    dict set ::suite_skip $line 1
}
close $suite_skip_file

proc suite_unit {} {
    regsub {^tests/(.*)\.tcl$} $::curfile {\1}
}

# One line, however the name is written.
proc suite_line {text} {
    string trim [regsub -all {\s+} $text " "]
}

proc suite_record {status name} {
    puts $::suite_results "$status\t[suite_unit]\t[suite_line $name]"
}

rename test suite_test
proc test {name code {okpattern undefined} {tags {}}} {
    if {[dict exists $::suite_skip "[suite_unit]\t[suite_line $name]"]} {
        suite_record skip $name
        return
    }
    set failed $::num_failed
    set passed $::num_passed
    # The two levels between are this procedure's and the original's.
    uplevel 1 [list suite_test $name $code $okpattern $tags]
    if {$::num_failed > $failed} {
        suite_record err $name
        suite_reset
    } elseif {$::num_passed > $passed} {
        suite_record ok $name
    } else {
        suite_record ignore $name
    }
}

# A test that failed may have left its connection anywhere, in a transaction for instance: the next one begins anew.
proc suite_reset {} {
    if {[llength $::servers] == 0} return
    catch {r readraw 0}
    catch {r deferred 0}
    if {[catch {r reset} reply] || $reply ne "RESET"} {
        catch {reconnect}
    }
}

# The commands of a script.
proc suite_commands {script} {
    set commands {}
    set command ""
    foreach line [split $script "\n"] {
        append command $line "\n"
        if {[string index $line end] ne "\\" && [info complete $command]} {
            if {[string trim $command] ne ""} {
                lappend commands $command
            }
            set command ""
        }
    }
    if {[string trim $command] ne ""} {
        lappend commands $command
    }
    return $commands
}

# Runs a script command by command at a level: one that fails outside a test is recorded, and the next ones run.
proc suite_run {level script} {
    foreach command [suite_commands $script] {
        set status [catch {uplevel $level $command} result]
        if {$status == 1} {
            incr ::num_failed
            set first [lindex [split [string trim $command] "\n"] 0]
            suite_record err "outside a test: $first"
            send_data_packet $::test_server_fd err "outside a test: $first\n$result\n$::errorInfo"
        } elseif {$status != 0} {
            return
        }
    }
}

proc execute_test_file {name} {
    set ::curfile "tests/$name.tcl"
    set file [open $::curfile r]
    set script [read $file]
    close $file
    suite_run #0 $script
    send_data_packet $::test_server_fd done $name
}

proc run_external_server_test {code overrides} {
    set srv {}
    dict set srv host $::host
    dict set srv port $::port
    dict set srv client [redis $::host $::port 0 $::tls]
    # What some tests ask of the server's files.
    dict set srv config [dict create port $::port dir .]
    dict set srv stdout /dev/null
    lappend ::servers $srv
    r flushall
    # Settings do not change at run time; a test that needs one fails.
    suite_run 3 $code
    set srv [lpop ::servers]
    if {[dict exists $srv client]} {
        [dict get $srv client] close
    }
}

proc tags {tags code} {
    set tags [string map { \" "" } $tags]
    set ::tags [concat $::tags $tags]
    if {[tags_acceptable $::tags err]} {
        suite_run 2 $code
    } else {
        incr ::num_aborted
        send_data_packet $::test_server_fd ignore $err
    }
    set ::tags [lrange $::tags 0 end-[llength $tags]]
}

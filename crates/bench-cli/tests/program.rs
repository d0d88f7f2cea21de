//! `cyclone bench` with the real `cyclone-bench`: help, errors and the end of a reader as if both
//! were one program. `crates/server/tests/bench_program.rs` has what is passed on.

use std::io::Read as _;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use cyclone::program;

fn cyclone() -> PathBuf {
    program::find(program::CYCLONE).expect("built: cargo build")
}

fn run(program: PathBuf, arguments: &[&str]) -> Output {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null());
    command.output().expect("run")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn help_shows_the_command_that_was_typed() {
    let bench = PathBuf::from(env!("CARGO_BIN_EXE_cyclone-bench"));
    for (arguments, usage) in [
        (&["--help"][..], " <COMMAND>"),
        (&["put", "--help"], " put [OPTIONS]"),
        (&["help", "put"], " put [OPTIONS]"),
        (&["run", "--help"], " run [OPTIONS] <PLAN>"),
    ] {
        let direct = run(bench.clone(), arguments);
        let through = run(cyclone(), &[&["bench"], arguments].concat());
        assert!(direct.status.success() && through.status.success());
        let help = text(&through.stdout);
        assert!(
            help.contains(&format!("Usage: cyclone bench{usage}\n")),
            "{help}"
        );
        let same = help.replace("cyclone bench", "cyclone-bench");
        let direct = text(&direct.stdout).replace("cyclone bench", "cyclone-bench");
        assert_eq!(same, direct);
    }
    let help = text(&run(cyclone(), &["--help"]).stdout);
    assert!(help.contains("  bench "), "{help}");
}

#[test]
fn wrong_commands_have_the_status_of_usage_errors() {
    for arguments in [
        &["bench"][..],
        &["bench", "no-such"],
        &["bench", "put", "--no-such"],
    ] {
        let output = run(cyclone(), arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(
            text(&output.stderr).contains("Usage: cyclone bench"),
            "{arguments:?}"
        );
    }
    // An error of a benchmark itself.
    let output = run(cyclone(), &["bench", "run", "no-such-plan"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("no-such-plan"));
}

/// As in `cyclone bench figures --list | head -1`.
#[test]
fn benchmarks_end_quietly_when_nobody_reads_on() {
    let mut child = Command::new(cyclone())
        .args(["bench", "figures", "--list"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("run");
    drop(child.stdout.take());
    let mut told = String::new();
    let mut stderr = child.stderr.take().expect("piped");
    stderr.read_to_string(&mut told).expect("read");
    let status = child.wait().expect("ended");
    assert_eq!((status.code(), told.as_str()), (Some(128 + 13), ""));
}

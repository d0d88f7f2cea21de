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

/// Of names the error lists those that there are.
#[test]
fn unknown_names_are_refused_with_those_that_are_known() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let plan = directory.path().join("plan.toml");
    let names = "figure = \"f\"\ntitle = \"t\"\npaper = \"p\"\nmachine = \"m\"\n";
    std::fs::write(&plan, format!("{names}[workload]\nkees = 5\n")).expect("written");
    let unknown_value = directory.path().join("value.toml");
    let variant = "[[variant]]\nname = \"v\"\nsystem = \"cyclon\"\n";
    std::fs::write(&unknown_value, format!("{names}{variant}")).expect("written");
    let (plan, unknown_value) = (plan.display(), unknown_value.display());
    let cases: &[(&str, &[&str])] = &[
        ("bench nosuch", &["put", "net", "run", "tenants"]),
        ("bench run nosuch", &["nosuch", "fig01", "ycsb-f"]),
        (
            "bench run fig15 --only nosuch",
            &["nosuch", "there are", "Cyclone"],
        ),
        (
            "bench figures --figure nosuch",
            &["nosuch", "fig01", "ycsb-f"],
        ),
        ("bench figures --only nosuch", &["nosuch", "there are"]),
        ("bench net --part nosuch", &["nosuch", "pinned", "steps"]),
        (
            "bench net --only nosuch",
            &["nosuch", "AF_XDP + bursts", "TCP"],
        ),
        (
            "bench pmkv --part nosuch",
            &["nosuch", "throughput", "media"],
        ),
        ("bench pmkv --only nosuch", &["nosuch", "rowan", "tailwind"]),
        ("bench tenants --protocol nosuch", &["nosuch", "rowan"]),
        ("bench tenants --provider nosuch", &["nosuch", "shm"]),
        ("bench put --engine nosuch", &["nosuch", "rocksdb"]),
        ("bench put --polling nosuch", &["nosuch", "adaptive"]),
        ("bench put --transport nosuch", &["nosuch", "udp"]),
        ("bench put --security nosuch", &["nosuch", "encrypted"]),
        ("bench overload --engine nosuch", &["nosuch", "rocksdb"]),
        (&format!("bench run {plan}"), &["kees", "key_bytes"]),
        (
            &format!("bench run {unknown_value}"),
            &["cyclon", "dragonboat"],
        ),
    ];
    for (arguments, words) in cases {
        let arguments: Vec<&str> = arguments.split(' ').collect();
        let output = run(cyclone(), &arguments);
        let error = text(&output.stderr);
        assert!(!output.status.success(), "{arguments:?} should have failed");
        assert!(!error.contains("panicked"), "{error}");
        for word in *words {
            assert!(error.contains(word), "{word:?} is missing in: {error}");
        }
    }
}

/// As in `cyclone bench figures --list | head -1`.
#[test]
fn benchmarks_end_quietly_when_their_reader_is_gone() {
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

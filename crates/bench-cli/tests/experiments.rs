//! Every experiment, for a blink, as a user runs it: that it ends, that it leaves no process and no
//! memory behind, and that its files have the form that others read. Nothing here checks times.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde_json::Value;

/// One experiment at a time: they pin their processes to the same CPUs.
static TURN: Mutex<()> = Mutex::new(());

const PROGRAM: &str = env!("CARGO_BIN_EXE_cyclone-bench");

/// Runs it with JSON output and its own seed; returns the document.
fn run(arguments: &[&str], out: &Path) -> Value {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let child = Command::new(PROGRAM)
        .args(arguments)
        .args(["--json", "--seed", "7", "--out"])
        .arg(out)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("starts");
    let pid = child.id();
    let output = child.wait_with_output().expect("ends");
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{arguments:?}: {errors}");
    // One document, and nothing before or behind it.
    let document: Value = serde_json::from_slice(&output.stdout).expect("one JSON document");
    assert_eq!(document["name"], arguments[0]);
    assert_eq!(
        (&document["seed"], &document["quick"]),
        (&7.into(), &true.into())
    );
    assert!(document["machine"]["cpus"].is_number());
    assert!(document["kept"].is_number() && document["elapsed_s"].is_number());
    assert!(
        document["results"]
            .as_object()
            .is_some_and(|it| !it.is_empty())
    );
    assert_nothing_left(pid);
    document
}

/// No memory files, and no process that works in their directory.
fn assert_nothing_left(pid: u32) {
    let name = format!("cyclone-bench-{pid}");
    assert!(!Path::new("/dev/shm").join(&name).exists(), "{name} stays");
    let processes = std::fs::read_dir("/proc").expect("/proc").flatten();
    for process in processes {
        let line = std::fs::read(process.path().join("cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).into_owned();
        assert!(!line.contains(&name), "left over: {line}");
    }
}

fn csv(out: &Path, name: &str) -> (Vec<String>, Vec<Vec<String>>) {
    let text = std::fs::read_to_string(out.join(name)).expect(name);
    let mut lines = text.lines().map(|line| {
        let cells = line.split(',').map(str::to_owned);
        cells.collect::<Vec<String>>()
    });
    let heading = lines.next().expect("a heading");
    (heading, lines.collect())
}

fn assert_svg(out: &Path, name: &str) {
    let text = std::fs::read_to_string(out.join(name)).expect(name);
    assert!(
        text.starts_with("<svg") && text.trim_end().ends_with("</svg>"),
        "{name}"
    );
}

fn verdicts(document: &Value) -> Vec<&str> {
    let verdicts = document["verdicts"].as_array().expect("verdicts");
    let what = verdicts.iter().map(|it| it["what"].as_str());
    what.map(|it| it.expect("a text")).collect()
}

#[test]
fn streams() {
    let out = tempfile::tempdir().expect("directory");
    let document = run(&["streams", "--quick"], out.path());
    let (heading, rows) = csv(out.path(), "streams.csv");
    assert_eq!(
        heading[..4],
        ["write_bytes", "local_writers", "remote_writers", "protocol"]
    );
    let paper = heading.iter().position(|of| of == "paper").expect("paper");
    let compared: Vec<_> = rows.iter().filter(|row| !row[paper].is_empty()).collect();
    assert_eq!(compared.len(), 4, "the paper's four figures");
    assert_svg(out.path(), "streams-amplification.svg");
    assert_svg(out.path(), "streams-bandwidth.svg");
    // A model with a fixed seed: the same everywhere.
    let verdicts = document["verdicts"].as_array().expect("verdicts");
    assert!(verdicts.len() >= 14 && verdicts.iter().all(|it| it["kept"] == true));
    assert_eq!(
        document["results"]["streams"].as_array().map(Vec::len),
        Some(rows.len())
    );
}

#[test]
fn replication() {
    let out = tempfile::tempdir().expect("directory");
    let arguments = "replication --quick --repetitions 1 --measure-ms 20 --provider shm --protocol rpc,rowan,hyperloop";
    let arguments: Vec<&str> = arguments.split(' ').collect();
    let document = run(&arguments, out.path());
    let (_, rows) = csv(out.path(), "replication.csv");
    let protocols: Vec<&str> = rows.iter().map(|row| row[1].as_str()).collect();
    assert_eq!(protocols, ["rpc", "rowan", "hyperloop"]);
    assert!(
        rows.iter()
            .all(|row| row.len() == 16 && row[5].parse::<f64>().expect("speed") > 0.0)
    );
    let (_, rows) = csv(out.path(), "replication-streams.csv");
    assert_eq!(rows.len(), 4 * 3);
    assert!(
        verdicts(&document)
            .iter()
            .any(|what| what.contains("rowan's modelled amplification"))
    );
    let notes = document["notes"].as_array().expect("notes");
    let says = |it: &Value, what| it.as_str().is_some_and(|it| it.contains(what));
    assert!(
        notes
            .iter()
            .any(|note| says(note, "rwrite's modelled amplification: not measured"))
    );
    assert_svg(out.path(), "replication.svg");
    assert_svg(out.path(), "replication-streams.svg");
}

#[test]
fn chain() {
    let out = tempfile::tempdir().expect("directory");
    let arguments = "chain --quick --repetitions 1 --measure-ms 10 --members 1,2";
    let arguments: Vec<&str> = arguments.split(' ').collect();
    let document = run(&arguments, out.path());
    let (_, rows) = csv(out.path(), "chain.csv");
    assert_eq!(rows.len(), 2 * 2 * 3, "loads, sizes, carriers");
    assert!(
        rows.iter()
            .all(|row| row.len() == 11 && row[3].parse::<f64>().expect("p50") > 0.0)
    );
    assert_eq!(verdicts(&document).len(), 4);
    assert_svg(out.path(), "chain.svg");
}

#[test]
fn tenants() {
    let out = tempfile::tempdir().expect("directory");
    let arguments = "tenants --quick --repetitions 1 --measure-ms 50 --protocol rpc,rowan --copies 2 --processes 3";
    let arguments: Vec<&str> = arguments.split(' ').collect();
    let document = run(&arguments, out.path());
    let (_, rows) = csv(out.path(), "tenants.csv");
    let names: Vec<&str> = rows.iter().map(|row| row[1].as_str()).collect();
    assert_eq!(
        names,
        [
            "rpc-event",
            "rpc-event",
            "rpc-polling",
            "rpc-polling",
            "rowan",
            "rowan"
        ]
    );
    assert_eq!(verdicts(&document).len(), 1);
    assert_svg(out.path(), "tenants.svg");
}

#[test]
fn a_signal_ends_the_children_too() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let mut child = Command::new(PROGRAM)
        .args(["tenants", "--measure-ms", "20000", "--protocol", "rowan"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("starts");
    let (pid, directory) = (child.id(), format!("/dev/shm/cyclone-bench-{}", child.id()));
    // Until its backups have memory.
    for _ in 0..1000 {
        if std::fs::read_dir(&directory).is_ok_and(|mut files| files.next().is_some()) {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let number = rustix::process::Pid::from_raw(pid as i32).expect("a number");
    rustix::process::kill_process(number, rustix::process::Signal::INT).expect("signal");
    assert!(!child.wait().expect("ends").success());
    assert_nothing_left(pid);
}

#[test]
fn nonsense_is_refused() {
    for arguments in [
        "replication --protocol smoke-signals",
        "replication --provider pigeons",
        "replication --window 0",
        "replication --quick --full",
        "chain --members 0",
        "chain --members 17",
        "tenants --rate 0",
        "child not-json",
    ] {
        let output = Command::new(PROGRAM)
            .args(arguments.split(' '))
            .stdin(Stdio::null())
            .output()
            .expect("runs");
        assert!(!output.status.success(), "{arguments}");
        assert!(!output.stderr.is_empty(), "{arguments}");
    }
}

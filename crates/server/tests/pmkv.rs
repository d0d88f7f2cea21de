//! The log-structured store as its users meet it: real processes, a real Redis port, a server that is killed.

use std::process::Command;

fn demo(replication: &str) {
    let directory = tempfile::tempdir().expect("a directory");
    let output = Command::new(env!("CARGO_BIN_EXE_cyclone"))
        .args([
            "demo",
            "--engine",
            "pmkv",
            "--json",
            "--replication",
            replication,
            // The machine may be busy with other tests: a server that is only slow shall not be taken for failed.
            "--lease-ms",
            "300",
        ])
        .arg("--directory")
        .arg(directory.path())
        .output()
        .expect("the demo");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{replication}: {said}");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one JSON line");
    assert_eq!(report["lost"], 0, "{said}");
    assert_eq!(report["wrong"], 0, "{said}");
    let committed = report["configuration_ms"].as_f64().expect("a number");
    let served = report["failover_ms"].as_f64().expect("a number");
    assert!(0.0 < committed && committed <= served, "{said}");
    assert!(report["acked"].as_u64().expect("a number") > 100, "{said}");
}

#[test]
fn a_killed_server_costs_nothing_that_was_acknowledged() {
    demo("rowan");
    demo("tailwind");
}

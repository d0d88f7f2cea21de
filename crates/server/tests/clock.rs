//! `cyclone ctl clock reset` on a cluster of real processes.

mod common;

use std::process::Command;
use std::time::Duration;

use cyclone::cluster::Options;

#[test]
fn clock_is_reset_through_any_node() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let options = Options {
        engine: "memory".into(),
        first_port: common::first_port(26_000, 0),
        ..Options::default()
    };
    let mut cluster = common::cluster(directory.path(), options);
    cluster.start_all(true).expect("started");
    cluster
        .wait_for_leader(Duration::from_secs(30))
        .expect("a leader");
    for node in &cluster.nodes {
        let mut connection =
            cyclone::resp::connect(node.redis, Duration::from_secs(30)).expect("connected");
        let reply = redis::cmd("CYCLONE")
            .arg("CLOCK")
            .query::<()>(&mut connection);
        let error = reply.expect_err("an argument is missing").to_string();
        assert!(error.contains("wrong number of arguments"), "{error}");
        let output = Command::new(env!("CARGO_BIN_EXE_cyclone"))
            .args([
                "ctl",
                "clock",
                "reset",
                "--connect",
                &node.redis.to_string(),
            ])
            .output()
            .expect("cyclone runs");
        let (out, error) = (&output.stdout, String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{error}");
        assert!(String::from_utf8_lossy(out).contains("the state's clock is set"));
    }
}

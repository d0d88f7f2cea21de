//! The cluster's format version, with real processes: it is recorded when all members support it,
//! in the store, in `ENGINE` and in what `ctl` and INFO show. A program that does not support it is
//! refused.

mod common;

use std::fs;
use std::time::{Duration, Instant};

use common::{ask, cluster, first_port, refused, said, text};
use cyclone::cluster::{LocalCluster, Options};
use cyclone::resp;
use cyclone_wire::format_version::FormatVersion;

const PATIENCE: Duration = Duration::from_secs(30);

fn options(engine: &str, test: u16) -> Options {
    Options {
        engine: engine.into(),
        logs: 2,
        first_port: first_port(28_000, test),
        ..Options::default()
    }
}

/// What each node says is recorded, once all say the same as `expected`.
fn wait_for_version(cluster: &LocalCluster, expected: FormatVersion) {
    let until = Instant::now() + PATIENCE;
    loop {
        let of = |node: &cyclone::cluster::Process| {
            let info = resp::info(node.redis, PATIENCE).ok()?;
            let version = |name| info.get(&format!("cyclone_format_version_{name}")).cloned();
            Some((version("recorded")?, version("supported")?))
        };
        let told: Vec<_> = cluster.nodes.iter().map(of).collect();
        let wanted = Some((expected.to_string(), FormatVersion::CURRENT.to_string()));
        if told.iter().all(|node| *node == wanted) {
            return;
        }
        assert!(Instant::now() < until, "{told:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Data directories as programs of version 1 make them.
fn as_version_1(cluster: &LocalCluster, engine: &str) {
    for node in &cluster.nodes {
        let data = cluster.directory.join(format!("node{}", node.id));
        fs::create_dir_all(&data).expect("a directory");
        let words = format!("cyclone engine 1\n{engine}\n");
        fs::write(data.join("ENGINE"), words).expect("written");
    }
}

fn finalize(address: &str) -> [&str; 4] {
    ["ctl", "finalize-upgrade", "--connect", address]
}

#[test]
fn format_version_is_recorded_once_all_members_answer() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let mut cluster = cluster(directory.path(), options("rocksdb", 0));
    as_version_1(&cluster, "rocksdb");
    cluster.start_all(true).expect("started");
    let leader = cluster.wait_for_leader(PATIENCE).expect("a leader");
    wait_for_version(&cluster, FormatVersion::V1);
    let silent = (leader + 1) % 3;
    cluster.kill(silent).expect("killed");
    let connect = cluster.nodes[leader].redis.to_string();
    let (id, packet) = (cluster.nodes[silent].id, cluster.nodes[silent].packet);
    refused(
        &finalize(&connect),
        &[&format!("member {id} at {packet}"), "format version 2"],
    );
    let mut connection = resp::connect(cluster.nodes[leader].redis, PATIENCE).expect("connected");
    let mut request = redis::cmd("CYCLONE");
    request.arg("UPGRADE").arg("FINALIZE");
    let error = request.query::<(u32, u32)>(&mut connection);
    assert_eq!(error.expect_err("refused").code(), Some("NOANSWER"));
    cluster.start(silent, false).expect("started");
    wait_for_version(&cluster, FormatVersion::V1);
    // Through any node.
    let connect = cluster.nodes[silent].redis.to_string();
    let words = said(&finalize(&connect));
    assert!(
        words.contains("format version 2 is recorded (before: 1)"),
        "{words}"
    );
    let words = said(&finalize(&connect));
    assert!(
        words.contains("format version 2 is recorded already"),
        "{words}"
    );
    let leader = cluster.wait_for_leader(PATIENCE).expect("a leader");
    let mut connection = resp::connect(cluster.nodes[leader].redis, PATIENCE).expect("connected");
    assert_eq!(ask::<(u32, u32)>(&mut connection, &request), (2, 2));
    wait_for_version(&cluster, FormatVersion::V2);
    let shown = said(&["ctl", "status", "--connect", &connect]);
    assert!(shown.contains("format version 2\n"), "{shown}");
    check_refusals(&mut cluster);
}

/// The version is there after a restart and at a new member; a data directory of a later one is not
/// opened.
fn check_refusals(cluster: &mut LocalCluster) {
    for node in 0..3 {
        cluster.terminate(node).expect("stopped");
    }
    let data = |id: u64, cluster: &LocalCluster| cluster.directory.join(format!("node{id}"));
    let marker = |id: u64, cluster: &LocalCluster| data(id, cluster).join("ENGINE");
    for node in &cluster.nodes {
        let written = fs::read_to_string(marker(node.id, cluster)).expect("ENGINE");
        assert_eq!(written, "cyclone engine 2\nrocksdb\nformat 2\n");
    }
    let (path, config) = (marker(1, cluster), cluster.nodes[0].config.clone());
    let known = fs::read_to_string(&path).expect("ENGINE");
    fs::write(&path, known.replace("format 2", "format 3")).expect("written");
    let words = ["recorded format version 3", "supports up to 2"];
    refused(&["serve", "--config", text(&config)], &words);
    fs::write(&path, known).expect("written");
    cluster.start_all(false).expect("started");
    let leader = cluster.wait_for_leader(PATIENCE).expect("a leader");
    wait_for_version(cluster, FormatVersion::V2);
    let connect = cluster.nodes[leader].redis.to_string();
    let new = cluster.prepare().expect("a new node");
    let (id, packet) = (cluster.nodes[new].id, cluster.nodes[new].packet);
    let (id, packet) = (id.to_string(), packet.to_string());
    let redis = cluster.nodes[new].redis.to_string();
    cluster.join(new).expect("started");
    let add = ["ctl", "member", "add", &id, "--packet", &packet];
    said(&[&add[..], &["--redis", &redis, "--connect", &connect]].concat());
    wait_for_version(cluster, FormatVersion::V2);
}

#[test]
fn new_cluster_begins_with_the_current_version_and_its_snapshot_keeps_it() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let mut old = cluster(&directory.path().join("old"), options("memory", 1));
    old.start_all(true).expect("started");
    let leader = old.wait_for_leader(PATIENCE).expect("a leader");
    let connect = old.nodes[leader].redis.to_string();
    // A new cluster needs no operator to finalize it.
    wait_for_version(&old, FormatVersion::CURRENT);
    let snapshot = directory.path().join("saved");
    said(&[
        "ctl",
        "snapshot",
        "save",
        text(&snapshot),
        "--connect",
        &connect,
    ]);
    let shown = said(&["ctl", "snapshot", "show", text(&snapshot), "--json"]);
    let shown: serde_json::Value = serde_json::from_str(&shown).expect("JSON");
    let origin = shown["snapshot"].as_str().expect("an id");
    let mut new = cluster(&directory.path().join("new"), options("memory", 2));
    common::configure(&new, "cluster", &format!("restored_from = {origin:?}"));
    for node in &new.nodes {
        let config = text(&node.config);
        said(&[
            "ctl",
            "snapshot",
            "restore",
            text(&snapshot),
            "--config",
            config,
        ]);
        let marker = new.directory.join(format!("node{}/ENGINE", node.id));
        let written = fs::read_to_string(marker).expect("ENGINE");
        assert_eq!(written, "cyclone engine 2\nmemory\nformat 2\n");
    }
    new.start_all(true).expect("started");
    new.wait_for_leader(PATIENCE).expect("a leader");
    wait_for_version(&new, FormatVersion::V2);
}

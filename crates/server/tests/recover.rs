//! The majority of a cluster is gone for good: `cyclone recover` makes a new one from one replica's
//! data, with real processes.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::{ask, cluster, cyclone, first_port, refused, said, text};
use cyclone::cluster::{LocalCluster, Options};
use cyclone::resp;

const PATIENCE: Duration = Duration::from_secs(60);

fn options(test: u16, engine: &str, logs: u16) -> Options {
    Options {
        engine: engine.to_owned(),
        logs,
        nvm_bytes: 32 << 20,
        // One leader throughout, also on a busy machine.
        election_ms: Some(1500),
        first_port: first_port(31_000, test),
        ..Options::default()
    }
}

fn connect(cluster: &LocalCluster, node: usize) -> redis::Connection {
    let until = Instant::now() + PATIENCE;
    loop {
        match resp::connect(cluster.nodes[node].redis, Duration::from_secs(10)) {
            Ok(connection) => return connection,
            Err(error) => assert!(Instant::now() < until, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn info(cluster: &LocalCluster, node: usize, name: &str) -> Option<String> {
    let info = resp::info(cluster.nodes[node].redis, Duration::from_secs(2)).ok()?;
    info.get(name).cloned()
}

fn number(cluster: &LocalCluster, node: usize, name: &str) -> u64 {
    let found = info(cluster, node, name).expect(name);
    found.parse().expect(name)
}

fn set(connection: &mut redis::Connection, key: u64) {
    ask::<()>(
        connection,
        redis::cmd("SET").arg(format!("{{s}}{key}")).arg(key),
    );
}

fn get(connection: &mut redis::Connection, key: u64) -> Option<u64> {
    ask(connection, redis::cmd("GET").arg(format!("{{s}}{key}")))
}

/// A leader that is not the first node.
fn led_by_another(cluster: &mut LocalCluster) -> usize {
    let until = Instant::now() + PATIENCE;
    loop {
        let leader = cluster.wait_for_leader(PATIENCE).expect("a leader");
        if leader != 0 {
            return leader;
        }
        assert!(
            Instant::now() < until,
            "the first node leads again and again"
        );
        cluster.terminate(0).expect("ended");
        let other = cluster.wait_for_leader(PATIENCE).expect("a leader");
        cluster.start(0, false).expect("started");
        cluster.wait_until_open(PATIENCE).expect("open");
        assert_ne!(other, 0);
    }
}

fn recover<'a>(data: &'a Path, more: &[&'a str]) -> Vec<&'a str> {
    [&["recover", "--data", text(data), "--json"][..], more].concat()
}

fn json(line: &str) -> serde_json::Value {
    serde_json::from_str(line).expect(line)
}

/// What a command that fails prints on standard output.
fn surveyed(data: &Path, nvm: &str) -> serde_json::Value {
    let output = cyclone(&recover(data, &["--nvm", nvm]));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "it needs --accept-loss");
    assert!(
        error.contains("nothing was changed") && error.contains("--accept-loss"),
        "{error}"
    );
    json(&String::from_utf8_lossy(&output.stdout))
}

/// What recover has printed goes into the first node's configuration.
fn adopt(cluster: &LocalCluster, recovered: &serde_json::Value) {
    let path = &cluster.nodes[0].config;
    let mut file = cyclone::config::File::read(path).expect("configuration");
    file.cluster.id = recovered["cluster"].as_str().expect("an id").to_owned();
    file.cluster.members.retain(|member| member.id == 1);
    fs::write(path, toml::to_string(&file).expect("text")).expect("written");
}

fn add_member(cluster: &mut LocalCluster) -> usize {
    let node = cluster.prepare().expect("prepared");
    let (id, packet, redis) = {
        let node = &cluster.nodes[node];
        (
            node.id.to_string(),
            node.packet.to_string(),
            node.redis.to_string(),
        )
    };
    let connect = cluster.nodes[0].redis.to_string();
    let rest = ["--connect", &connect, "--wait", "60"];
    let add = [
        "ctl", "member", "add", &id, "--packet", &packet, "--redis", &redis,
    ];
    said(&[&add[..], &rest].concat());
    cluster.join(node).expect("joins");
    said(&[&["ctl", "member", "promote", &id][..], &rest].concat());
    node
}

#[test]
fn one_replica_of_three_becomes_a_cluster_that_grows_again() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let mut cluster = cluster(directory.path(), options(0, "rocksdb", 2));
    cluster.start_all(true).expect("started");
    let leader = led_by_another(&mut cluster);
    let mut connection = connect(&cluster, leader);
    for key in 0..300 {
        set(&mut connection, key);
    }
    let log = ask::<u64>(
        &mut connection,
        redis::cmd("CLUSTER").arg("KEYSLOT").arg("{s}"),
    );
    let log = if log * 2 / 16384 == 0 { 0 } else { 1 };
    let last = format!("cyclone_log{log}_last");
    let until = Instant::now() + PATIENCE;
    // A new cluster's leader writes an entry that records the format version.
    let version = |what: &str| number(&cluster, leader, &format!("cyclone_format_version_{what}"));
    while version("recorded") != version("supported")
        || number(&cluster, 0, &last) != number(&cluster, leader, &last)
    {
        assert!(Instant::now() < until, "the follower lags");
        std::thread::sleep(Duration::from_millis(20));
    }
    let before = number(&cluster, 0, &last);
    // Under load the other two are destroyed, and the first one is killed.
    let stop = Arc::new(AtomicBool::new(false));
    let acked = Arc::new(AtomicU64::new(300));
    let load = {
        let (stop, acked) = (Arc::clone(&stop), Arc::clone(&acked));
        std::thread::spawn(move || {
            for key in 300.. {
                let written = redis::cmd("SET")
                    .arg(format!("{{s}}{key}"))
                    .arg(key)
                    .query::<()>(&mut connection);
                if written.is_err() || stop.load(Ordering::Relaxed) {
                    return;
                }
                acked.store(key + 1, Ordering::Relaxed);
            }
        })
    };
    while acked.load(Ordering::Relaxed) < 600 {
        std::thread::sleep(Duration::from_millis(5));
    }
    let data = directory.path().join("node1");
    let region = cluster.regions.join("node1.nvm");
    let nvm = text(&region);
    refused(
        &recover(&data, &["--nvm", nvm, "--accept-loss"]),
        &["in use"],
    );
    refused(&recover(&data, &["--accept-loss"]), &["in use"]);
    for node in [leader, 3 - leader] {
        cluster.kill(node).expect("killed");
    }
    stop.store(true, Ordering::Relaxed);
    load.join().expect("the load ends");
    cluster.kill(0).expect("killed");
    // One is destroyed. What the other left comes back later, against what the documents say.
    fs::remove_dir_all(directory.path().join("node2")).expect("removed");
    fs::remove_file(cluster.regions.join("node2.nvm")).expect("removed");

    let found = surveyed(&data, nvm);
    let held = found["logs"][log]["last"].as_u64().expect("an index");
    assert!(held > before, "{found}");
    assert_eq!(surveyed(&data, nvm), found, "looking changes nothing");
    let recovered = json(&said(&recover(&data, &["--nvm", nvm, "--accept-loss"])));
    assert_eq!(recovered["logs"], found["logs"]);
    let again = json(&said(&recover(&data, &["--nvm", nvm, "--accept-loss"])));
    assert_eq!(again["cluster"], recovered["cluster"], "it can be repeated");
    // The old configuration is refused, with what to write instead.
    let id = recovered["cluster"].as_str().expect("an id").to_owned();
    let config = cluster.nodes[0].config.clone();
    refused(
        &["serve", "--config", text(&config)],
        &["was recovered", &id],
    );

    adopt(&cluster, &recovered);
    cluster.start(0, false).expect("started");
    assert_eq!(cluster.wait_for_leader(PATIENCE).expect("a leader"), 0);
    let mut connection = connect(&cluster, 0);
    // One entry for each key, so the count is exact.
    let keys = 300 + held - before;
    for key in 0..keys {
        assert_eq!(get(&mut connection, key), Some(key), "of {keys}");
    }
    assert_eq!(get(&mut connection, keys), None);
    let acked = acked.load(Ordering::Relaxed);
    assert!(keys >= 300 && keys <= acked + 1, "{keys} of {acked}");

    // A replica of the lost cluster that comes back finds a stranger.
    let term = number(&cluster, 0, "cyclone_log0_term");
    cluster.start(2, false).expect("started");
    std::thread::sleep(Duration::from_secs(4));
    for key in 0..50 {
        set(&mut connection, 1_000_000 + key);
    }
    assert_eq!(number(&cluster, 0, "cyclone_log0_term"), term);
    assert_ne!(info(&cluster, 2, "cyclone_role").as_deref(), Some("leader"));
    cluster.kill(2).expect("killed");

    let (one, two) = (add_member(&mut cluster), add_member(&mut cluster));
    for node in [one, two] {
        let until = Instant::now() + PATIENCE;
        let digest = |node: usize| {
            let mut connection = connect(&cluster, node);
            let digest = redis::cmd("DEBUG").arg("DIGEST").query(&mut connection);
            digest.ok() as Option<String>
        };
        while digest(0).is_none() || digest(node) != digest(0) {
            assert!(Instant::now() < until, "node {node} differs");
            std::thread::sleep(Duration::from_millis(200));
        }
    }
    // Two of three serve without the one that was recovered.
    cluster.kill(0).expect("killed");
    let leader = cluster.wait_for_leader(PATIENCE).expect("a leader");
    let mut connection = connect(&cluster, leader);
    for key in [0, 299, keys - 1, 1_000_049] {
        assert_eq!(get(&mut connection, key), Some(key));
    }
}

fn without_region(test: u16, engine: &str) {
    let directory = tempfile::tempdir().expect("temporary directory");
    let mut cluster = cluster(directory.path(), options(test, engine, 1));
    cluster.start_all(true).expect("started");
    let leader = cluster.wait_for_leader(PATIENCE).expect("a leader");
    let mut connection = connect(&cluster, leader);
    for key in 0..100 {
        set(&mut connection, key);
    }
    let applied = |node| number(&cluster, node, "cyclone_log0_applied");
    let until = Instant::now() + PATIENCE;
    while applied(0) != applied(leader) {
        assert!(Instant::now() < until, "the first node lags");
        std::thread::sleep(Duration::from_millis(20));
    }
    // An orderly end flushes the store. All regions are gone, and the other nodes.
    for node in 0..3 {
        cluster.terminate(node).expect("ended");
    }
    for node in 1..=3 {
        fs::remove_file(cluster.regions.join(format!("node{node}.nvm"))).expect("removed");
    }
    let config = cluster.nodes[0].config.clone();
    refused(&["serve", "--config", text(&config)], &["is gone"]);
    let data = directory.path().join("node1");
    let recovered = json(&said(&recover(&data, &["--accept-loss"])));
    assert!(recovered["logs"][0]["commit"].is_null(), "{recovered}");
    adopt(&cluster, &recovered);
    cluster.start(0, false).expect("started");
    cluster.wait_for_leader(PATIENCE).expect("a leader");
    let mut connection = connect(&cluster, 0);
    for key in 0..100 {
        assert_eq!(get(&mut connection, key), Some(key));
    }
    set(&mut connection, 100);
    // It is a member like any other: it comes back with its log.
    cluster.kill(0).expect("killed");
    cluster.start(0, false).expect("started");
    cluster.wait_for_leader(PATIENCE).expect("a leader");
    assert_eq!(get(&mut connect(&cluster, 0), 100), Some(100));
    assert!(!data.join("RECOVERED").exists());
}

#[test]
fn store_alone_is_recovered_with_rocksdb() {
    without_region(2, "rocksdb");
}

#[test]
fn store_alone_is_recovered_with_memory() {
    without_region(3, "memory");
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("made");
    for entry in fs::read_dir(from).expect("read") {
        let entry = entry.expect("entry");
        let target = to.join(entry.file_name());
        match entry.file_type().expect("type").is_dir() {
            true => copy(&entry.path(), &target),
            false => drop(fs::copy(entry.path(), target).expect("copied")),
        }
    }
}

/// Killed at any point, a recovery leaves the old member's data, from which the same can be
/// recovered, or the new one's.
fn killed_in_the_middle(test: u16, engine: &str, durability: Option<&str>) {
    let directory = tempfile::tempdir().expect("temporary directory");
    let options = Options {
        replicas: 1,
        durability: durability.map(str::to_owned),
        ..options(test, engine, 2)
    };
    let mut cluster = cluster(directory.path(), options);
    cluster.start_all(true).expect("started");
    cluster.wait_for_leader(PATIENCE).expect("a leader");
    let mut connection = connect(&cluster, 0);
    for key in 0..200 {
        set(&mut connection, key);
        // Over both logs.
        let pairs: Vec<String> = (0..4).map(|n| format!("k{n}")).collect();
        let pairs: Vec<(&str, u64)> = pairs.iter().map(|name| (&name[..], key)).collect();
        ask::<()>(&mut connection, redis::cmd("MSET").arg(&pairs));
    }
    cluster.kill(0).expect("killed");
    let data = directory.path().join("node1");
    let saved: PathBuf = directory.path().join("saved");
    copy(&data, &saved);
    let region = cluster.regions.join("node1.nvm");
    let image = fs::read(&region).expect("region");
    let flash = data.join("flash");
    let mut places = vec!["--nvm", text(&region)];
    if durability.is_some() {
        places.extend(["--flash", text(&flash)]);
    }
    let survey = |data: &Path| {
        let output = cyclone(&recover(data, &places));
        json(&String::from_utf8_lossy(&output.stdout))
    };
    let found = survey(&data);
    let (mut old, mut new) = (0, 0);
    for round in 0_u64.. {
        fs::remove_dir_all(&data).expect("removed");
        copy(&saved, &data);
        let lossy = [&places[..], &["--accept-loss"]].concat();
        let mut child = Command::new(common::BINARY)
            .args(recover(&data, &lossy))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("run");
        std::thread::sleep(Duration::from_millis(5 * round * round));
        let ended = child.try_wait().expect("asked").is_some();
        child.kill().expect("killed");
        child.wait().expect("ended");
        assert!(
            fs::read(&region).expect("region") == image,
            "the region is only read"
        );
        let is_new = data.join("RECOVERED").exists();
        let now = survey(&data);
        match is_new {
            true => assert_eq!(now["recovered"], true, "{now}"),
            false => assert_eq!(now, found),
        }
        (old, new) = (old + u64::from(!is_new), new + u64::from(is_new));
        if ended && is_new {
            break;
        }
        assert!(round < 60, "it does not end");
    }
    assert!(old > 0 && new > 0, "{old} old, {new} new");
    let lossy = [&places[..], &["--accept-loss"]].concat();
    let recovered = json(&said(&recover(&data, &lossy)));
    adopt(&cluster, &recovered);
    cluster.start(0, false).expect("started");
    cluster.wait_for_leader(PATIENCE).expect("a leader");
    let mut connection = connect(&cluster, 0);
    for key in 0..200 {
        assert_eq!(get(&mut connection, key), Some(key));
    }
    for name in ["k0", "k1", "k2", "k3"] {
        let value: Option<u64> = ask(&mut connection, redis::cmd("GET").arg(name));
        assert_eq!(value, Some(199), "{name}");
    }
}

#[test]
fn recovery_that_is_killed_is_the_old_or_the_new_member_with_rocksdb() {
    killed_in_the_middle(4, "rocksdb", None);
}

#[test]
fn recovery_that_is_killed_is_the_old_or_the_new_member_with_memory() {
    killed_in_the_middle(5, "memory", None);
}

#[test]
fn recovery_reads_a_log_that_lives_on_flash() {
    killed_in_the_middle(6, "memory", Some("flash"));
}

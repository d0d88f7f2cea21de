//! A block of a store rots, with real processes: the read is refused, the node goes on, another one
//! leads, and `member replace` heals it.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use common::{BINARY, ask, cluster, cyclone, first_port, said};
use cyclone::cluster::{LocalCluster, Options};
use cyclone::resp;

const PATIENCE: Duration = Duration::from_secs(10);
/// Until what has to happen happens, on a busy machine.
const AT_LAST: Duration = Duration::from_secs(120);
const KEYS: u64 = 3000;
const VALUE_BYTES: usize = 2000;

fn value(number: u64) -> Vec<u8> {
    let mut state = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let bytes = (0..VALUE_BYTES).map(|_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    });
    bytes.collect()
}

fn key(number: u64) -> String {
    format!("key:{number:08}")
}

fn info(cluster: &LocalCluster, node: usize, name: &str) -> String {
    let mut connection = resp::connect(cluster.nodes[node].redis, PATIENCE).expect("alive");
    let info = resp::info_of(&mut connection).expect("INFO");
    info.get(name).cloned().unwrap_or_default()
}

fn number(cluster: &LocalCluster, node: usize, name: &str) -> u64 {
    info(cluster, node, name).parse().unwrap_or(0)
}

#[track_caller]
fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let until = Instant::now() + AT_LAST;
    while !done() {
        assert!(Instant::now() < until, "waited for {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The tables of a node's store.
fn tables(cluster: &LocalCluster, node: usize) -> Vec<PathBuf> {
    fn walk(directory: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                walk(&path, found);
            } else if path.extension().is_some_and(|kind| kind == "sst") {
                found.push(path);
            }
        }
    }
    let text = fs::read_to_string(&cluster.nodes[node].config).expect("configuration");
    let line = text.lines().find(|line| line.starts_with("data = "));
    let data = line.and_then(|line| line.split('"').nth(1)).expect("data");
    let mut found = Vec::new();
    walk(Path::new(data), &mut found);
    found
}

/// Flips a byte in each block of user data of the tables: values that do not compress lie there as
/// they are.
fn rot(paths: &[PathBuf], numbers: &[u64]) {
    for number in numbers {
        let needle = &value(*number)[100..140];
        let mut flipped = 0;
        for path in paths {
            let mut bytes = fs::read(path).expect("a table");
            let at = bytes.windows(needle.len()).position(|part| part == needle);
            if let Some(at) = at {
                bytes[at] ^= 0x40;
                fs::write(path, bytes).expect("written");
                flipped += 1;
            }
        }
        assert!(flipped > 0, "value {number} is in no table");
    }
}

#[test]
fn a_damaged_block_costs_leadership_and_not_the_process() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut cluster = cluster(
        &directory.path().join("cluster"),
        Options {
            replicas: 3,
            nvm_bytes: 16 << 20,
            first_port: first_port(21_000, 0),
            ..Options::default()
        },
    );
    // Blocks are read from the files, not from the cache.
    for node in &cluster.nodes {
        let text = fs::read_to_string(&node.config).expect("configuration");
        let lines = text
            .lines()
            .map(|line| match line.starts_with("block_cache_bytes") {
                true => "block_cache_bytes = 1048576",
                false => line,
            });
        let lines: Vec<&str> = lines.collect();
        fs::write(
            &node.config,
            lines.join(
                "
",
            ) + "
",
        )
        .expect("written");
    }
    cluster.start_all(true).expect("started");
    let leader = cluster.wait_for_leader(AT_LAST).expect("a leader");
    let mut connection = resp::connect(cluster.nodes[leader].redis, PATIENCE).expect("connected");
    for number in 0..KEYS {
        let mut command = redis::cmd("SET");
        command.arg(key(number)).arg(value(number));
        ask::<()>(&mut connection, &command);
    }
    // A stop flushes: the values are in tables then.
    drop(connection);
    for node in 0..3 {
        cluster.terminate(node).expect("stopped");
    }
    cluster.start_all(false).expect("started");
    let leader = cluster.wait_for_leader(AT_LAST).expect("a leader");
    rot(&tables(&cluster, leader), &[1000, 2000]);

    let mut connection = resp::connect(cluster.nodes[leader].redis, PATIENCE).expect("connected");
    let read: redis::RedisResult<Vec<u8>> = redis::cmd("GET").arg(key(1000)).query(&mut connection);
    let error = read.expect_err("the block is damaged");
    assert_eq!(error.code(), Some("TRYAGAIN"), "{error}");
    assert!(error.to_string().contains("damaged"), "{error}");
    wait_for("the mark", || {
        info(&cluster, leader, "cyclone_store_state") == "damaged"
    });
    assert!(number(&cluster, leader, "cyclone_store_damaged") > 0);
    assert_eq!(number(&cluster, leader, "cyclone_refused_damaged"), 1);
    wait_for("another leader", || {
        let leads = cluster.leader();
        leads.is_some_and(|leads| leads != leader)
    });
    assert!(number(&cluster, leader, "cyclone_handovers") > 0);
    let next = cluster.wait_for_leader(AT_LAST).expect("a leader");
    assert_ne!(next, leader);
    let mut connection = resp::connect(cluster.nodes[next].redis, PATIENCE).expect("connected");
    for at in [999, 1000, 2000] {
        let read: Vec<u8> = ask(&mut connection, redis::cmd("GET").arg(key(at)));
        assert_eq!(read, value(at), "{at:?}");
    }

    // A command that has to read the damaged block is not applied there, and ends nothing.
    let mut command = redis::cmd("APPEND");
    command.arg(key(2000)).arg("tail");
    let length: usize = ask(&mut connection, &command);
    assert_eq!(length, VALUE_BYTES + 4);
    let id = cluster.nodes[leader].id;
    wait_for("the stall", || {
        number(&cluster, leader, "cyclone_store_waits_ms") > 1000
    });
    assert!(cluster.is_running(leader));
    let address = cluster.nodes[next].redis.to_string();
    let status = said(&["ctl", "status", "--connect", &address]);
    let warning = format!("the store of node {id} is damaged");
    assert!(status.contains(&warning), "{status}");

    // Replaced by a new one, the cluster is whole again.
    cluster.terminate(leader).expect("stopped");
    let spare = cluster.prepare().expect("a spare");
    cluster.join(spare).expect("started");
    let new = &cluster.nodes[spare];
    let (packet, redis) = (new.packet.to_string(), new.redis.to_string());
    let (old, new) = (id.to_string(), new.id.to_string());
    let replaced = cyclone(&[
        "ctl",
        "member",
        "replace",
        &old,
        &new,
        "--packet",
        &packet,
        "--redis",
        &redis,
        "--connect",
        &address,
    ]);
    let error = String::from_utf8_lossy(&replaced.stderr).into_owned();
    assert!(replaced.status.success(), "{BINARY}: {error}");
    let length: usize = {
        let mut command = redis::cmd("STRLEN");
        command.arg(key(2000));
        ask(&mut connection, &command)
    };
    assert_eq!(length, VALUE_BYTES + 4);
    let last = |node| number(&cluster, node, "cyclone_log0_applied");
    wait_for("the new one to have everything", || {
        last(spare) >= last(next)
    });
    assert_eq!(info(&cluster, spare, "cyclone_store_state"), "ok");
}

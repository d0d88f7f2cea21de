//! What followers answer to commands that name no key, with real processes.

mod common;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use common::{cluster, first_port};
use cyclone::cluster::{LocalCluster, Options};
use redis::Connection;

fn connect(address: SocketAddr) -> Connection {
    cyclone::resp::connect(address, Duration::from_secs(60)).expect("connected")
}

fn three(directory: &std::path::Path, test: u16) -> LocalCluster {
    cluster(
        directory,
        Options {
            engine: "memory".into(),
            nvm_bytes: 64 << 20,
            first_port: first_port(16_000, test),
            logs: 2,
            election_ms: Some(1000),
            ..Options::default()
        },
    )
}

/// The two nodes that do not lead.
fn followers(cluster: &mut LocalCluster) -> (usize, Vec<usize>) {
    let leader = cluster
        .wait_for_leader(Duration::from_secs(30))
        .expect("led");
    (leader, (0..3).filter(|node| *node != leader).collect())
}

/// Waits until a node counts so many keys: a follower applies what is committed a little later.
fn wait_for_keys(connection: &mut Connection, keys: i64) {
    let began = Instant::now();
    loop {
        match redis::cmd("DBSIZE").query::<i64>(connection) {
            Ok(found) if found == keys => return,
            other => assert!(began.elapsed() < Duration::from_secs(30), "{other:?}"),
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn followers_answer_reads_of_all_keys_and_refuse_to_remove_them() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let mut cluster = three(directory.path(), 0);
    cluster.start_all(true).expect("started");
    let (leader, followers) = followers(&mut cluster);
    let mut writer = connect(cluster.nodes[leader].redis);
    for key in 0..100 {
        let set = redis::cmd("SET").arg(format!("key:{key}")).arg(key).clone();
        let () = set.query(&mut writer).expect("set");
    }
    for node in followers {
        let mut reader = connect(cluster.nodes[node].redis);
        for mode in ["READWRITE", "READONLY"] {
            let () = redis::cmd(mode).query(&mut reader).expect("mode");
            wait_for_keys(&mut reader, 100);
            let keys: Vec<String> = redis::cmd("KEYS")
                .arg("key:1*")
                .query(&mut reader)
                .expect("KEYS");
            assert_eq!(keys.len(), 11);
            let (mut cursor, mut seen) = (0u64, Vec::new());
            loop {
                let mut scan = redis::cmd("SCAN");
                let page = scan.arg(cursor).arg("COUNT").arg(17).query(&mut reader);
                let (next, page): (u64, Vec<String>) = page.expect("SCAN");
                seen.extend(page);
                cursor = next;
                if cursor == 0 {
                    break;
                }
            }
            seen.sort();
            seen.dedup();
            assert_eq!(seen.len(), 100);
            // No bound is configured: values are not shown.
            let refused = redis::cmd("GET").arg("key:1").query::<String>(&mut reader);
            assert_eq!(refused.expect_err("moved").code(), Some("MOVED"));
        }
        let refused = redis::cmd("FLUSHALL").query::<String>(&mut reader);
        assert_eq!(refused.expect_err("read-only").code(), Some("READONLY"));
    }
    wait_for_keys(&mut writer, 100);
}

/// With a bound, a follower that has no leader any more stops to answer once its data is older.
#[test]
fn followers_answer_within_the_bound_of_staleness() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let mut cluster = three(directory.path(), 1);
    for node in &cluster.nodes {
        let text = std::fs::read_to_string(&node.config).expect("configuration");
        let (from, to) = ("follower_staleness_ms = 0", "follower_staleness_ms = 5000");
        assert!(text.contains(from), "{text}");
        std::fs::write(&node.config, text.replacen(from, to, 1)).expect("written");
    }
    cluster.start_all(true).expect("started");
    let (leader, followers) = followers(&mut cluster);
    let mut writer = connect(cluster.nodes[leader].redis);
    let () = redis::cmd("SET")
        .arg("key")
        .arg("value")
        .query(&mut writer)
        .expect("set");
    let mut reader = connect(cluster.nodes[followers[0]].redis);
    wait_for_keys(&mut reader, 1);
    cluster.kill(leader).expect("killed");
    cluster.kill(followers[1]).expect("killed");
    let began = Instant::now();
    let refused = loop {
        match redis::cmd("DBSIZE").query::<i64>(&mut reader) {
            Ok(keys) => assert_eq!(keys, 1),
            Err(error) => break error,
        }
        assert!(
            began.elapsed() < Duration::from_secs(60),
            "it goes on to answer"
        );
        std::thread::sleep(Duration::from_millis(50));
    };
    assert_eq!(refused.code(), Some("MASTERDOWN"), "{refused}");
}

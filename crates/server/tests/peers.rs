//! What nodes say of each other: which members answer, and which peers are refused, and why.

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use common::{cluster, first_port};
use cyclone::cluster::{LocalCluster, Options};
use cyclone::config::File;
use cyclone::resp;

const PATIENCE: Duration = Duration::from_secs(60);

fn options(test: u16) -> Options {
    Options {
        engine: "memory".into(),
        nvm_bytes: 32 << 20,
        first_port: first_port(35_000, test),
        ..Options::default()
    }
}

/// Asks until it is so.
#[track_caller]
fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn change(path: &Path, edit: impl FnOnce(&mut File)) {
    let mut file = File::read(path).expect("configuration");
    edit(&mut file);
    fs::write(path, toml::to_string(&file).expect("text")).expect("written");
}

fn log(cluster: &LocalCluster, node: usize) -> String {
    let name = format!("node{}.log", cluster.nodes[node].id);
    fs::read_to_string(cluster.directory.join(name)).expect("log")
}

/// Lines of a node's log at level WARN about a peer that is refused.
fn refusals(cluster: &LocalCluster, node: usize) -> Vec<String> {
    let log = log(cluster, node);
    let lines = log.lines();
    let refused = lines.filter(|line| line.contains("WARN") && line.contains("a peer is refused"));
    refused.map(str::to_owned).collect()
}

fn counter(cluster: &LocalCluster, node: usize, name: &str) -> u64 {
    let info = resp::info(cluster.nodes[node].redis, Duration::from_secs(5)).expect("INFO");
    info[name].parse().expect(name)
}

/// Each of these is said by the nodes that work, with the peer's address and the reason, and not
/// again and again.
#[test]
fn peer_that_is_set_up_wrongly_is_named_with_its_address_and_the_reason() {
    type Edit = fn(&mut File);
    let cases: [(u16, Edit, &str, &str); 3] = [
        (
            0,
            |file| file.cluster.node_key = "7".repeat(64),
            "cluster.node_key",
            "packet_forged",
        ),
        (
            1,
            |file| file.cluster.security = "encrypted".into(),
            "its cluster.security is \"encrypted\", this node's is \"authenticated\"",
            "packet_mode_mismatch",
        ),
        (
            2,
            |file| file.cluster.id = "7".repeat(32),
            "it belongs to another cluster",
            "packet_cluster_mismatch",
        ),
    ];
    for (test, edit, reason, name) in cases {
        let directory = tempfile::tempdir().expect("temporary directory");
        let mut cluster = cluster(directory.path(), options(test));
        // A new cluster waits for all of its founders: the third is set up wrongly when it comes
        // back.
        cluster.start_all(true).expect("started");
        cluster.wait_for_leader(PATIENCE).expect("a leader");
        cluster.kill(2).expect("killed");
        let file = File::read(&cluster.nodes[2].config).expect("configuration");
        fs::remove_dir_all(file.node.data).expect("removed");
        fs::remove_file(file.node.nvm).expect("removed");
        change(&cluster.nodes[2].config, edit);
        cluster.start(2, true).expect("started");
        let leader = cluster.wait_for_leader(PATIENCE).expect("a leader");
        assert!(leader < 2, "the third takes no part: {reason:?}");
        let peer = cluster.nodes[2].packet.to_string();
        until(reason, || {
            let mut said = refusals(&cluster, leader).into_iter();
            said.any(|line| line.contains(&peer) && line.contains(reason))
        });
        // It goes on knocking, and nothing more is said of it for a while.
        let before = counter(&cluster, leader, name);
        until("it goes on", || {
            counter(&cluster, leader, name) > before + 20
        });
        let about_it = refusals(&cluster, leader);
        let about_it = about_it.iter().filter(|line| line.contains(reason));
        assert_eq!(about_it.count(), 1, "{:?}", refusals(&cluster, leader));
        // It says the same of the others.
        until("it says so, too", || !refusals(&cluster, 2).is_empty());
    }
}

#[test]
fn two_nodes_with_one_id_are_both_named() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let mut cluster = cluster(directory.path(), options(3));
    cluster.start_all(true).expect("started");
    let leader = cluster.wait_for_leader(PATIENCE).expect("a leader");
    let original = (0..3).find(|node| *node != leader).expect("a follower");
    // A copy of a follower's configuration, with other places and ports.
    let twin = cluster.prepare().expect("prepared");
    let id = cluster.nodes[original].id;
    let packet = cluster.nodes[twin].packet;
    change(&cluster.nodes[twin].config, |file| {
        file.cluster.members.retain(|member| member.id <= 3);
        for member in &mut file.cluster.members {
            if member.id == id {
                member.packet = packet;
                member.redis = None;
            }
        }
        file.node.id = id;
    });
    cluster.start(twin, true).expect("started");
    let words = format!("two nodes with the id {id}");
    let said = |cluster: &LocalCluster| {
        let all: Vec<String> = (0..3).flat_map(|node| refusals(cluster, node)).collect();
        all.into_iter().find(|line| line.contains(&words))
    };
    until(&words, || said(&cluster).is_some());
    let line = said(&cluster).expect("said");
    for address in [cluster.nodes[original].packet, packet] {
        assert!(line.contains(&address.to_string()), "{address}: {line}");
    }
    let named: u64 = (0..3)
        .filter(|node| *node != original)
        .map(|node| counter(&cluster, node, "packet_duplicate_ids"))
        .sum();
    assert!(named > 0);
}

/// Ports that a node shows as alive in CLUSTER SLOTS, SHARDS and NODES.
fn alive(cluster: &LocalCluster, node: usize) -> Option<[BTreeSet<u16>; 3]> {
    let mut connection = resp::connect(cluster.nodes[node].redis, Duration::from_secs(5)).ok()?;
    let mut ask = |what: &str| redis::cmd("CLUSTER").arg(what).query(&mut connection).ok();
    let slots: redis::Value = ask("SLOTS")?;
    let shards: redis::Value = ask("SHARDS")?;
    let nodes: redis::Value = ask("NODES")?;
    let text = |value: &redis::Value| match value {
        redis::Value::BulkString(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        redis::Value::VerbatimString { text, .. } => text.clone(),
        _ => String::new(),
    };
    let list = |value: &redis::Value| match value {
        redis::Value::Array(items) => items.clone(),
        _ => Vec::new(),
    };
    let port = |value: &redis::Value| match value {
        redis::Value::Int(port) => *port as u16,
        _ => 0,
    };
    let in_slots = list(&slots)
        .into_iter()
        .flat_map(|range| list(&range).split_off(2))
        .map(|node| port(&list(&node)[1]));
    let of_shard = list(&shards);
    let nodes_of_shard = list(&list(of_shard.first()?)[3]);
    let in_shards = nodes_of_shard.iter().map(list).filter(|fields| {
        let health = fields.iter().position(|it| text(it) == "health");
        health.is_some_and(|at| text(&fields[at + 1]) == "online")
    });
    let in_shards = in_shards.filter_map(|fields| {
        let at = fields.iter().position(|it| text(it) == "port")?;
        Some(port(&fields[at + 1]))
    });
    let nodes = text(&nodes);
    let in_nodes = nodes.lines().filter(|line| !line.contains("fail"));
    let in_nodes = in_nodes.filter_map(|line| {
        let (_, rest) = line.split(' ').nth(1)?.split_once(':')?;
        rest.split('@').next()?.parse().ok()
    });
    Some([in_slots.collect(), in_shards.collect(), in_nodes.collect()])
}

fn all_say(cluster: &LocalCluster, who: &[usize], of: &[usize]) -> bool {
    let ports: BTreeSet<u16> = of
        .iter()
        .map(|at| cluster.nodes[*at].redis.port())
        .collect();
    let says = |node: &usize| alive(cluster, *node);
    who.iter()
        .all(|node| says(node) == Some([ports.clone(), ports.clone(), ports.clone()]))
}

fn members_agree_about_the_dead(options: Options) {
    let directory = tempfile::tempdir().expect("temporary directory");
    let mut cluster = cluster(directory.path(), options);
    cluster.start_all(true).expect("started");
    let leader = cluster.wait_for_leader(PATIENCE).expect("a leader");
    cluster.wait_until_open(PATIENCE).expect("open");
    until("all are there", || {
        all_say(&cluster, &[0, 1, 2], &[0, 1, 2])
    });
    let dead = (0..3).find(|node| *node != leader).expect("a follower");
    let others: Vec<usize> = (0..3).filter(|node| *node != dead).collect();
    cluster.kill(dead).expect("killed");
    until("one is dead", || all_say(&cluster, &others, &others));
    cluster.start(dead, false).expect("started");
    until("it is back", || all_say(&cluster, &[0, 1, 2], &[0, 1, 2]));
    // The leader as well.
    let leader = cluster.wait_for_leader(PATIENCE).expect("a leader");
    let others: Vec<usize> = (0..3).filter(|node| *node != leader).collect();
    cluster.kill(leader).expect("killed");
    until("the leader is dead", || all_say(&cluster, &others, &others));
}

#[test]
fn every_node_says_the_same_about_dead_members() {
    members_agree_about_the_dead(options(4));
}

#[test]
fn every_node_says_the_same_with_a_loop_per_log() {
    members_agree_about_the_dead(Options {
        logs: 2,
        log_threads: 2,
        ..options(5)
    });
}

/// All nodes are kept from their CPUs for seconds: no node takes another one for dead in the
/// commands that follow.
#[test]
fn busy_members_are_not_dead() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let mut cluster = cluster(directory.path(), options(6));
    cluster.start_all(true).expect("started");
    cluster.wait_for_leader(PATIENCE).expect("a leader");
    until("all are there", || {
        all_say(&cluster, &[0, 1, 2], &[0, 1, 2])
    });
    let pids: Vec<u32> = (0..3).filter_map(|node| cluster.pid(node)).collect();
    let signal = |signal| {
        for pid in &pids {
            let pid = rustix::process::Pid::from_raw(*pid as i32).expect("a pid");
            rustix::process::kill_process(pid, signal).expect("signalled");
        }
    };
    signal(rustix::process::Signal::STOP);
    std::thread::sleep(Duration::from_secs(3));
    signal(rustix::process::Signal::CONT);
    for _ in 0..20 {
        for node in 0..3 {
            let Some([_, shards, nodes]) = alive(&cluster, node) else {
                continue;
            };
            assert_eq!((shards.len(), nodes.len()), (3, 3), "node {node}");
        }
    }
}

//! Real processes that come back with less than they have acknowledged: with empty storage or with
//! an older copy of it, with and without a leader that remembers. Nothing that a majority still
//! holds is lost, and what has happened is logged on both sides.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use cyclone::cluster::{LocalCluster, Options};
use cyclone::config::File;
use cyclone::resp;

const KEYS: usize = 100;
const PATIENCE: Duration = Duration::from_secs(60);
/// For so long something must not happen.
const NEVER: Duration = Duration::from_secs(3);

struct Nodes {
    cluster: LocalCluster,
    _directory: tempfile::TempDir,
}

fn new_cluster(test: u16, replicas: usize) -> Nodes {
    let directory = tempfile::tempdir().expect("a directory");
    let options = Options {
        replicas,
        nvm_bytes: 16 << 20,
        election_ms: Some(300),
        first_port: common::first_port(24_300, test),
        executable: Some(common::BINARY.into()),
        ..Options::default()
    };
    let cluster = LocalCluster::create(directory.path(), &options).expect("configurations");
    Nodes {
        cluster,
        _directory: directory,
    }
}

fn copy(from: &Path, to: &Path) {
    if from.is_dir() {
        fs::create_dir_all(to).expect("a directory");
        for entry in fs::read_dir(from).expect("listed") {
            let name = entry.expect("an entry").file_name();
            copy(&from.join(&name), &to.join(&name));
        }
    } else {
        fs::copy(from, to).expect("copied");
    }
}

impl Nodes {
    fn started(test: u16, replicas: usize) -> Nodes {
        let mut nodes = new_cluster(test, replicas);
        nodes.cluster.start_all(true).expect("started");
        nodes.leader();
        nodes
    }

    /// The directory and the region of a node.
    fn storage(&self, node: usize) -> [PathBuf; 2] {
        let file = File::read(&self.cluster.nodes[node].config).expect("its configuration");
        [file.node.data, file.node.nvm]
    }

    fn empty(&self, node: usize) {
        let [data, region] = self.storage(node);
        fs::remove_dir_all(data).expect("removed");
        fs::remove_file(region).expect("removed");
    }

    fn save(&self, node: usize, name: &str) {
        for (part, place) in self.storage(node).iter().zip(["data", "region"]) {
            copy(
                part,
                &self.cluster.directory.join(format!("{name}-{place}")),
            );
        }
    }

    fn put_back(&self, node: usize, name: &str) {
        self.empty(node);
        for (part, place) in self.storage(node).iter().zip(["data", "region"]) {
            copy(
                &self.cluster.directory.join(format!("{name}-{place}")),
                part,
            );
        }
    }

    fn info(&self, node: usize, name: &str) -> Option<String> {
        let info = resp::info(self.cluster.nodes[node].redis, Duration::from_secs(2)).ok()?;
        info.get(name).cloned()
    }

    fn number(&self, node: usize, name: &str) -> u64 {
        let text = self.info(node, name).unwrap_or_default();
        text.parse().unwrap_or(0)
    }

    fn leader(&mut self) -> usize {
        self.cluster.wait_for_leader(PATIENCE).expect("a leader")
    }

    fn wait(&self, what: &str, holds: impl Fn(&Nodes) -> bool) {
        let until = Instant::now() + PATIENCE;
        while !holds(self) {
            assert!(Instant::now() < until, "{what}: {}", self.logs());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn assert_no_leader(&self) {
        let until = Instant::now() + NEVER;
        while Instant::now() < until {
            assert_eq!(self.cluster.leader(), None, "{}", self.logs());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn log(&self, node: usize) -> String {
        let path = self.cluster.directory.join(format!("node{}.log", node + 1));
        fs::read_to_string(path).unwrap_or_default()
    }

    fn logs(&self) -> String {
        let logs = (0..self.cluster.nodes.len())
            .map(|node| format!("node {}:\n{}", node + 1, self.log(node)));
        logs.collect()
    }

    /// Waits for a line of level ERROR with these words in a node's log.
    fn wait_for_error(&self, node: usize, words: &[&str]) {
        self.wait(&format!("node {} says {words:?}", node + 1), |nodes| {
            let says =
                |line: &str| line.contains("ERROR") && words.iter().all(|word| line.contains(word));
            nodes.log(node).lines().any(says)
        });
    }

    fn write(&self, leader: usize, name: &str) {
        let mut open =
            resp::connect(self.cluster.nodes[leader].redis, PATIENCE).expect("a connection");
        for key in 0..KEYS {
            let key = format!("{name}:{key}");
            let done: String = redis::cmd("SET")
                .arg(&key)
                .arg(&key)
                .query(&mut open)
                .expect("SET");
            assert_eq!(done, "OK");
        }
    }

    /// How many of the keys are there.
    fn count(&self, leader: usize, name: &str) -> usize {
        let mut open =
            resp::connect(self.cluster.nodes[leader].redis, PATIENCE).expect("a connection");
        let mut has = |key: &usize| {
            let key = format!("{name}:{key}");
            let value: Option<String> = redis::cmd("GET").arg(&key).query(&mut open).expect("GET");
            value.as_deref() == Some(&key)
        };
        (0..KEYS).filter(|key| has(key)).count()
    }

    /// Waits until a replica is an ordinary follower that holds what the leader holds, by its own
    /// word and by the leader's.
    fn wait_until_follows(&self, node: usize, leader: usize) {
        self.wait(&format!("node {} follows", node + 1), |nodes| {
            let last = nodes.number(leader, "cyclone_log0_last");
            let peer = nodes.info(leader, &format!("cyclone_peer{}", node + 1));
            nodes.info(node, "cyclone_role").as_deref() == Some("follower")
                && nodes.number(node, "cyclone_log0_last") == last
                && peer.is_some_and(|peer| peer.starts_with(&format!("matched={last},")))
        });
    }
}

/// The third node is down while 100 writes are acknowledged by the first and the second; the second
/// loses its storage, the first is killed; second and third start. They must not go on without the
/// first.
#[test]
fn an_emptied_replica_and_one_that_was_down_do_not_form_a_majority() {
    let mut nodes = Nodes::started(0, 3);
    let first = nodes.leader();
    let (second, third) = ((first + 1) % 3, (first + 2) % 3);
    nodes.cluster.kill(third).expect("killed");
    nodes.write(first, "a");
    nodes.cluster.kill(second).expect("killed");
    nodes.empty(second);
    nodes.cluster.kill(first).expect("killed");
    nodes.cluster.start(second, true).expect("started");
    nodes.cluster.start(third, true).expect("started");
    nodes.wait_for_error(second, &["has lost its storage"]);
    nodes.assert_no_leader();
    assert_eq!(
        nodes.info(second, "cyclone_role").as_deref(),
        Some("recovering")
    );
    nodes.cluster.start(first, false).expect("started");
    let leader = nodes.leader();
    assert_ne!(leader, second);
    assert_eq!(nodes.count(leader, "a"), KEYS);
    // Once it has caught up it counts again: without the first, second and third are a majority
    // that has everything.
    nodes.wait_until_follows(second, leader);
    nodes.cluster.kill(first).expect("killed");
    let leader = nodes.leader();
    assert_eq!(nodes.count(leader, "a"), KEYS);
    assert!(nodes.log(third).contains("--bootstrap is superfluous"));
}

/// A leader that goes on remembers what the emptied replica has acknowledged; the replica is sent
/// everything without any writes.
#[test]
fn a_leader_notices_an_emptied_replica_and_fills_it_again() {
    let mut nodes = Nodes::started(1, 3);
    let leader = nodes.leader();
    let lost = (leader + 1) % 3;
    nodes.write(leader, "a");
    nodes.wait_until_follows(lost, leader);
    let last = nodes.number(leader, "cyclone_log0_last").to_string();
    nodes.cluster.kill(lost).expect("killed");
    nodes.empty(lost);
    nodes.cluster.start(lost, true).expect("started");
    let acknowledged = format!("acknowledged entry {last}");
    nodes.wait_for_error(leader, &[&acknowledged, "holds entries up to 0"]);
    nodes.wait_for_error(lost, &["has lost its storage"]);
    nodes.wait_for_error(lost, &[&acknowledged, "holds entries up to 0"]);
    nodes.wait_until_follows(lost, leader);
    assert_eq!(nodes.leader(), leader, "no other replica was elected");
    let list = Command::new(common::BINARY)
        .args(["ctl", "member", "list", "--json", "--connect"])
        .arg(nodes.cluster.nodes[leader].redis.to_string())
        .output()
        .expect("ctl");
    let list: serde_json::Value = serde_json::from_slice(&list.stdout).expect("JSON");
    let own = &list["members"][lost]["logs"][0];
    assert_eq!(own["matched"], own["last"], "{list}");
    assert_eq!(own["role"], "follower", "{list}");
}

/// An older copy of a replica's storage looks whole to the replica. Its leader knows better.
#[test]
fn a_leader_notices_an_older_copy() {
    let mut nodes = Nodes::started(2, 3);
    let leader = nodes.leader();
    let lost = (leader + 1) % 3;
    nodes.write(leader, "a");
    nodes.wait_until_follows(lost, leader);
    let copied = nodes.number(leader, "cyclone_log0_last").to_string();
    nodes.cluster.kill(lost).expect("killed");
    nodes.save(lost, "older");
    nodes.cluster.start(lost, false).expect("started");
    nodes.write(leader, "b");
    nodes.wait_until_follows(lost, leader);
    let last = nodes.number(leader, "cyclone_log0_last").to_string();
    nodes.cluster.kill(lost).expect("killed");
    nodes.put_back(lost, "older");
    nodes.cluster.start(lost, false).expect("started");
    let acknowledged = format!("acknowledged entry {last}");
    let holds = format!("holds entries up to {copied}");
    nodes.wait_for_error(lost, &[&acknowledged, &holds, "older copy"]);
    nodes.wait_for_error(leader, &[&acknowledged, &holds]);
    nodes.wait_until_follows(lost, leader);
    nodes.cluster.kill(leader).expect("killed");
    let next = nodes.leader();
    assert_eq!(
        (nodes.count(next, "a"), nodes.count(next, "b")),
        (KEYS, KEYS)
    );
}

/// A majority comes back with an older copy and goes on: no replica that remembers was there. The
/// replica that remembers says so.
#[test]
fn a_replica_whose_committed_entries_differ_takes_no_part() {
    let mut nodes = Nodes::started(3, 3);
    let witness = nodes.leader();
    let others = [(witness + 1) % 3, (witness + 2) % 3];
    for node in others {
        nodes.wait_until_follows(node, witness);
        nodes.cluster.kill(node).expect("killed");
        nodes.save(node, &format!("older{node}"));
        nodes.cluster.start(node, false).expect("started");
        nodes.wait_until_follows(node, witness);
    }
    assert_eq!(nodes.leader(), witness);
    nodes.write(witness, "a");
    nodes.wait("the commit index to be known", |nodes| {
        let commit = nodes.number(witness, "cyclone_log0_commit");
        commit == nodes.number(witness, "cyclone_log0_last")
    });
    // It is written with a tick.
    std::thread::sleep(Duration::from_millis(500));
    for node in [witness, others[0], others[1]] {
        nodes.cluster.kill(node).expect("killed");
    }
    for node in others {
        nodes.put_back(node, &format!("older{node}"));
        nodes.cluster.start(node, false).expect("started");
    }
    let leader = nodes.leader();
    nodes.write(leader, "b");
    nodes.cluster.start(witness, false).expect("started");
    let diverged = |node: usize| {
        move |nodes: &Nodes| nodes.info(node, "cyclone_role").as_deref() == Some("diverged")
    };
    nodes.wait("the difference to be noticed", diverged(witness));
    nodes.wait_for_error(witness, &["is committed here with term", "takes no part"]);
    assert_eq!(
        nodes.info(witness, "cyclone_log0_role").as_deref(),
        Some("diverged")
    );
    let status = Command::new(common::BINARY)
        .args(["ctl", "status", "--connect"])
        .arg(nodes.cluster.nodes[witness].redis.to_string())
        .output()
        .expect("ctl");
    let status = String::from_utf8_lossy(&status.stdout).into_owned();
    assert!(status.contains("diverged"), "{status}");
    let leader = nodes.leader();
    assert_ne!(leader, witness);
    assert_eq!(nodes.count(leader, "b"), KEYS);
}

/// A new cluster starts when every founder has said that it is new, however late the last one
/// comes, and whichever is killed meanwhile.
#[test]
fn a_new_cluster_waits_for_every_founder() {
    for replicas in [2, 3] {
        let mut nodes = new_cluster(4, replicas);
        let late = replicas - 1;
        for node in 0..late {
            nodes.cluster.start(node, true).expect("started");
        }
        nodes.cluster.wait_until_open(PATIENCE).expect("open");
        nodes.assert_no_leader();
        assert_eq!(nodes.info(0, "cyclone_role").as_deref(), Some("founding"));
        nodes.cluster.kill(0).expect("killed");
        nodes.cluster.start(late, true).expect("started");
        nodes.cluster.start(0, true).expect("started");
        let leader = nodes.leader();
        nodes.write(leader, "a");
        assert_eq!(nodes.count(leader, "a"), KEYS);
        for node in (0..replicas).filter(|node| *node != leader) {
            nodes.wait_until_follows(node, leader);
        }
    }
}

/// A single replica founds its cluster alone.
#[test]
fn a_single_founder_needs_no_other() {
    let mut nodes = Nodes::started(5, 1);
    let leader = nodes.leader();
    nodes.write(leader, "a");
    nodes.cluster.kill(0).expect("killed");
    nodes.cluster.start(0, true).expect("started");
    let leader = nodes.leader();
    assert_eq!(nodes.count(leader, "a"), KEYS);
    assert!(nodes.log(0).contains("--bootstrap is superfluous"));
}

impl Nodes {
    /// `ctl member …` by way of the first node.
    fn member(&self, words: &[&str]) {
        let done = Command::new(common::BINARY)
            .args(["ctl", "member"])
            .args(words)
            .args(["--wait", "60", "--connect"])
            .arg(self.cluster.nodes[0].redis.to_string())
            .output()
            .expect("ctl");
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(done.status.success(), "{words:?}: {said}");
    }

    /// Rewrites the configuration of a node so that it lists only these nodes.
    fn list_only(&self, node: usize, listed: &[usize]) {
        let path = &self.cluster.nodes[node].config;
        let mut file = File::read(path).expect("its configuration");
        let ids: Vec<u64> = listed.iter().map(|at| *at as u64 + 1).collect();
        file.cluster.members.retain(|it| ids.contains(&it.id));
        assert_eq!(file.cluster.members.len(), listed.len());
        let text = toml::to_string(&file).expect("a file");
        fs::write(path, text).expect("written");
    }
}

/// A cluster has grown from one node. While the third one is down 100 writes are acknowledged by
/// the first and the second; the first loses its storage and founds, by its file, its own cluster.
/// It must not elect the third.
#[test]
fn a_sole_founder_that_was_emptied_does_not_vote_for_members_it_does_not_know() {
    let mut nodes = Nodes::started(6, 1);
    for node in [1, 2] {
        assert_eq!(nodes.cluster.prepare().expect("a configuration"), node);
        nodes.cluster.join(node).expect("started");
        let process = &nodes.cluster.nodes[node];
        let (packet, redis) = (process.packet.to_string(), process.redis.to_string());
        let id = process.id.to_string();
        nodes.member(&["add", &id, "--packet", &packet, "--redis", &redis]);
        nodes.member(&["promote", &id]);
    }
    nodes.cluster.kill(2).expect("killed");
    let leader = nodes.leader();
    nodes.write(leader, "a");
    nodes.cluster.kill(0).expect("killed");
    nodes.empty(0);
    nodes.cluster.kill(1).expect("killed");
    nodes.cluster.start(2, false).expect("started");
    nodes.cluster.start(0, true).expect("started");
    let is_diverged = |nodes: &Nodes| nodes.info(0, "cyclone_role").as_deref() == Some("diverged");
    nodes.wait("the first node to notice", is_diverged);
    nodes.wait_for_error(0, &["has founded its cluster alone", "member replace"]);
    nodes.assert_no_leader();
    // It stays so, from its start on.
    nodes.cluster.kill(0).expect("killed");
    nodes.cluster.start(0, true).expect("started");
    nodes.wait("the first node to remember", is_diverged);
    nodes.assert_no_leader();
    nodes.cluster.start(1, false).expect("started");
    let leader = nodes.leader();
    assert_ne!(leader, 0);
    assert_eq!(nodes.count(leader, "a"), KEYS);
    assert!(is_diverged(&nodes));
}

/// A node that has lost its storage learns from its file whom to ask. One that lists a node too few
/// must not vote before that one has told its term.
#[test]
fn a_recovering_replica_whose_file_leaves_a_founder_out_waits() {
    let mut nodes = Nodes::started(7, 3);
    let first = nodes.leader();
    let (second, third) = ((first + 1) % 3, (first + 2) % 3);
    nodes.cluster.kill(third).expect("killed");
    nodes.write(first, "a");
    nodes.cluster.kill(second).expect("killed");
    nodes.empty(second);
    nodes.cluster.kill(first).expect("killed");
    let before = fs::read(&nodes.cluster.nodes[second].config).expect("its configuration");
    nodes.list_only(second, &[second, third]);
    nodes.cluster.start(second, true).expect("started");
    nodes.cluster.start(third, true).expect("started");
    nodes.wait_for_error(second, &["has lost its storage"]);
    nodes.wait_for_error(second, &["founders", "[[members]]"]);
    nodes.assert_no_leader();
    // As the message says.
    nodes.cluster.kill(second).expect("killed");
    nodes.empty(second);
    fs::write(&nodes.cluster.nodes[second].config, before).expect("written");
    nodes.cluster.start(second, true).expect("started");
    nodes.assert_no_leader();
    nodes.cluster.start(first, false).expect("started");
    let leader = nodes.leader();
    assert_eq!(nodes.count(leader, "a"), KEYS);
    nodes.wait_until_follows(second, leader);
}

/// Founders whose files list different founders found nothing: two lists have two majorities.
#[test]
fn founders_with_different_lists_do_not_found_a_cluster() {
    let mut nodes = new_cluster(8, 3);
    nodes.list_only(0, &[0, 1]);
    nodes.cluster.start_all(true).expect("started");
    nodes.wait_for_error(1, &["founders [1, 2, 3]", "replica 1 names [1, 2]"]);
    nodes.assert_no_leader();
}

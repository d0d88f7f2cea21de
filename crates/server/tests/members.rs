//! A cluster of real processes that grows and shrinks under load, 1 → 3 → 5 → 3, while nodes are
//! killed in the middle of changes, the leader included; at the end one that has lost its memory is
//! replaced. Nothing acknowledged is lost, every key's history is linearizable, the members agree
//! byte for byte, and who was removed knows it.

mod common;

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use cyclone::cluster::{LocalCluster, Options};
use cyclone::resp;
use cyclone_client::{Client, ClientConfig, ClientError};
use cyclone_sim::history::{Answer, History, Op, Operation, Outcome};
use cyclone_sim::linear;
use cyclone_sim::random::Random;
use cyclone_wire::command::{self, Condition, Query};
use cyclone_wire::reply::Reply;

const CLIENTS: u64 = 4;
const KEYS: u64 = 20;
const PAUSE: Duration = Duration::from_millis(2);
const PATIENCE: Duration = Duration::from_secs(60);

/// One client: one request at a time, its outcome recorded.
fn load(
    mut client: Client,
    number: u64,
    epoch: Instant,
    stop: &AtomicBool,
    acked: &AtomicU64,
) -> History {
    let mut history = History::new();
    let mut choice = Random::new(7 ^ (number << 40));
    let mut value = 0u64;
    while !stop.load(Ordering::Relaxed) {
        let key = format!("key:{}", choice.draw() % KEYS).into_bytes();
        value += 1;
        let text = format!("{number}-{value}").into_bytes();
        let (op, result) = match choice.draw() % 2 {
            0 => (Op::Get, None),
            _ => (Op::Set(text.clone()), Some(text)),
        };
        let invoke_us = epoch.elapsed().as_micros() as u64;
        let result = match &result {
            None => client.query(&Query::Get { key: &key }),
            Some(value) => client.call(&command::Operation::Set {
                key: &key,
                value,
                condition: Condition::Always,
                get: false,
            }),
        };
        let outcome = match result {
            Ok(reply) => {
                acked.fetch_add(1, Ordering::Relaxed);
                let answer = match reply {
                    Reply::Ok => Answer::Ok,
                    Reply::Nil => Answer::Nil,
                    Reply::Bytes(bytes) => Answer::Bytes(bytes),
                    other => panic!("{op:?} was answered with {other:?}"),
                };
                Outcome::Done {
                    return_us: epoch.elapsed().as_micros() as u64,
                    answer,
                }
            }
            Err(ClientError::NotDone(_)) => Outcome::NotDone,
            Err(ClientError::Unknown) => Outcome::Unknown,
            Err(error) => panic!("client {number}: {op:?}: {error}"),
        };
        history.push(Operation {
            client: number,
            key,
            op,
            invoke_us,
            outcome,
        });
        std::thread::sleep(PAUSE);
    }
    history
}

/// `ctl member …` by way of one of the nodes, in the background.
fn ctl(cluster: &LocalCluster, through: usize, words: &[String]) -> Child {
    Command::new(common::BINARY)
        .args(["ctl", "member"])
        .args(words)
        .args(["--connect", &cluster.nodes[through].redis.to_string()])
        .args(["--wait", &PATIENCE.as_secs().to_string()])
        .stdin(Stdio::null())
        .spawn()
        .expect("ctl")
}

/// The command succeeds; it may be given several times, as an operator would whose terminal died.
fn done(cluster: &LocalCluster, through: usize, words: &[String]) {
    for _ in 0..2 {
        let status = ctl(cluster, through, words).wait().expect("ended");
        assert!(status.success(), "{words:?} failed");
    }
}

fn words(verb: &str, ids: &[u64]) -> Vec<String> {
    let ids = ids.iter().map(u64::to_string);
    std::iter::once(verb.to_owned()).chain(ids).collect()
}

fn addresses(cluster: &LocalCluster, node: usize) -> Vec<String> {
    let node = &cluster.nodes[node];
    let (packet, redis) = (node.packet.to_string(), node.redis.to_string());
    ["--packet".into(), packet, "--redis".into(), redis].to_vec()
}

fn add(cluster: &LocalCluster, node: usize) -> Vec<String> {
    let add = words("add", &[cluster.nodes[node].id]);
    [add, addresses(cluster, node)].concat()
}

fn info(cluster: &LocalCluster, node: usize, name: &str) -> Option<String> {
    let info = resp::info(cluster.nodes[node].redis, Duration::from_secs(2)).ok()?;
    info.get(name).cloned()
}

fn leader(cluster: &LocalCluster, among: &[usize]) -> usize {
    let until = Instant::now() + PATIENCE;
    loop {
        let leads =
            |node: &usize| info(cluster, *node, "cyclone_role").as_deref() == Some("leader");
        if let Some(node) = among.iter().copied().find(leads) {
            return node;
        }
        assert!(Instant::now() < until, "no node leads");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Gives a command, kills a node while it is in progress, starts it again, and sees the command
/// through.
fn done_despite(cluster: &mut LocalCluster, through: usize, victim: usize, words: &[String]) {
    let mut child = ctl(cluster, through, words);
    std::thread::sleep(Duration::from_millis(60));
    cluster.kill(victim).expect("killed");
    cluster.start(victim, false).expect("started");
    // It may have talked to the victim; the next one finds out what it came to.
    let _ = child.wait().expect("ended");
    done(cluster, through, words);
}

fn progress(acked: &AtomicU64, story: &str) {
    let (before, until) = (acked.load(Ordering::Relaxed), Instant::now() + PATIENCE);
    while acked.load(Ordering::Relaxed) < before + 20 {
        assert!(
            Instant::now() < until,
            "nothing is acknowledged after {story}"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn digest(cluster: &LocalCluster, node: usize) -> Option<String> {
    let mut connection = resp::connect(cluster.nodes[node].redis, Duration::from_secs(5)).ok()?;
    let mut command = redis::cmd("DEBUG");
    command.arg("DIGEST").query(&mut connection).ok()
}

fn agree(cluster: &LocalCluster, members: &[usize]) {
    let until = Instant::now() + PATIENCE;
    loop {
        let digests: Vec<_> = members.iter().map(|node| digest(cluster, *node)).collect();
        if digests[0].is_some() && digests.iter().all(|digest| *digest == digests[0]) {
            return;
        }
        assert!(Instant::now() < until, "{members:?} differ: {digests:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn is_removed(cluster: &LocalCluster, node: usize) {
    let until = Instant::now() + PATIENCE;
    while info(cluster, node, "cyclone_removed").as_deref() != Some("1") {
        assert!(
            Instant::now() < until,
            "node {node} does not know that it was removed"
        );
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn set(connection: &mut redis::Connection, key: &str) {
    let mut command = redis::cmd("SET");
    command.arg(key).arg("x");
    command.query::<()>(connection).expect("SET");
}

/// Three nodes that run, and a fourth one's configuration.
fn three_and_a_fourth(directory: &Path, test: u16) -> LocalCluster {
    let options = Options {
        replicas: 3,
        logs: 2,
        first_port: common::first_port(14_000, test),
        election_ms: Some(500),
        ..Options::default()
    };
    let mut cluster = common::cluster(directory, options);
    cluster.prepare().expect("a configuration");
    for node in [0, 1, 2] {
        cluster.start(node, true).expect("started");
    }
    cluster
}

/// A node loses everything.
fn wipe(cluster: &mut LocalCluster, node: usize) {
    cluster.kill(node).expect("killed");
    let files = cluster.directory.join(format!("node{}", node + 1));
    fs::remove_dir_all(files).expect("removed");
    fs::remove_file(cluster.regions.join(format!("node{}.nvm", node + 1))).expect("removed");
}

#[test]
fn one_three_five_three_under_load() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let options = Options {
        replicas: 1,
        logs: 2,
        first_port: common::first_port(14_000, 1),
        nvm_bytes: 64 << 20,
        ..Options::default()
    };
    let mut cluster = common::cluster(directory.path(), options);
    for _ in 0..5 {
        cluster.prepare().expect("a configuration");
    }
    cluster.start(0, true).expect("started");
    leader(&cluster, &[0]);
    let epoch = Instant::now();
    let stop = Arc::new(AtomicBool::new(false));
    let acked = Arc::new(AtomicU64::new(0));
    let nodes = cluster.nodes.iter().map(|node| (node.id, node.packet));
    let nodes: Vec<_> = nodes.collect();
    let start = |number| {
        let config = ClientConfig::new(nodes.clone(), cluster.client_key);
        let client = Client::connect(config).expect("client");
        let (stop, acked) = (Arc::clone(&stop), Arc::clone(&acked));
        std::thread::spawn(move || load(client, number, epoch, &stop, &acked))
    };
    let clients: Vec<_> = (0..CLIENTS).map(start).collect();
    progress(&acked, "the start");

    // One becomes three; a learner dies while it catches up, and the leader while it lets one vote.
    for node in [1, 2] {
        cluster.join(node).expect("started");
        done(&cluster, 0, &add(&cluster, node));
        if node == 1 {
            cluster.kill(node).expect("killed");
            cluster.start(node, false).expect("started");
        }
        done(&cluster, 0, &words("promote", &[node as u64 + 1]));
        progress(&acked, "a node more");
    }
    // Three become five.
    for node in [3, 4] {
        // An earlier one may lead as well.
        let voters: Vec<usize> = (0..node).collect();
        cluster.join(node).expect("started");
        let at = leader(&cluster, &voters);
        let other = (at + 1) % node;
        let adding = add(&cluster, node);
        done_despite(&mut cluster, other, at, &adding);
        let at = leader(&cluster, &voters);
        let other = (at + 1) % node;
        done_despite(
            &mut cluster,
            other,
            at,
            &words("promote", &[node as u64 + 1]),
        );
        progress(&acked, "a node more");
    }
    // Five become three: the leader goes, and the first.
    let mut members: Vec<usize> = (0..5).collect();
    let mut gone = Vec::new();
    for _ in 0..2 {
        let at = leader(&cluster, &members);
        members.retain(|node| *node != at);
        gone.push(at);
        let victim = members[1];
        let through = members[0];
        let leaving = words("remove", &[at as u64 + 1]);
        done_despite(&mut cluster, through, victim, &leaving);
        progress(&acked, "a node less");
    }
    for node in &gone {
        is_removed(&cluster, *node);
    }
    // One that has lost everything comes back as another.
    let lost = members.pop().expect("three");
    wipe(&mut cluster, lost);
    cluster.join(5).expect("started");
    let replace = words("replace", &[lost as u64 + 1, 6]);
    let replace = [replace, addresses(&cluster, 5)].concat();
    done(&cluster, members[0], &replace);
    members.push(5);
    progress(&acked, "a node replaced");

    stop.store(true, Ordering::Relaxed);
    let mut history = History::new();
    for client in clients {
        history.merge(client.join().expect("client"));
    }
    agree(&cluster, &members);
    linear::check(&history).expect("linearizable");
    let list = common::said(&[
        "ctl",
        "member",
        "list",
        "--connect",
        &cluster.nodes[members[0]].redis.to_string(),
    ]);
    for node in 0..6 {
        let voters = list.lines().filter(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            words.first() == Some(&&*(node + 1).to_string()) && words.get(3) == Some(&"voter")
        });
        let logs = if members.contains(&node) { 2 } else { 0 };
        assert_eq!(voters.count(), logs, "{list}");
    }
}

/// A member is stopped, its files stay, its addresses change: it comes back there, the others are
/// notified, and it is one of them.
#[test]
fn a_member_moves_to_another_address() {
    let directory = tempfile::tempdir().expect("temporary directory");
    // The fourth one's ports are unused ones.
    let mut cluster = three_and_a_fourth(directory.path(), 2);
    let at = leader(&cluster, &[0, 1, 2]);
    let (moved, through) = ((at + 1) % 3, (at + 2) % 3);
    let id = moved as u64 + 1;
    let old = (cluster.nodes[moved].packet, cluster.nodes[moved].redis);
    let new = (cluster.nodes[3].packet, cluster.nodes[3].redis);
    cluster.kill(moved).expect("killed");
    let redis_of = |address: std::net::SocketAddr| address.to_string();
    let to = |packet: String, redis: String| -> Vec<String> {
        [
            "move",
            &id.to_string(),
            "--packet",
            &packet,
            "--redis",
            &redis,
        ]
        .map(str::to_owned)
        .to_vec()
    };
    // Not to where another one is, and no replica that is not a member.
    let taken = cluster.nodes[at].packet.to_string();
    let asked = cluster.nodes[through].redis.to_string();
    let refuse = |id: &str, packet: &str, word: &str| {
        common::refused(
            &[
                "ctl",
                "member",
                "move",
                id,
                "--packet",
                packet,
                "--connect",
                &asked,
            ],
            &[word],
        );
    };
    let holder = format!("is member {}'s: give another address", at + 1);
    refuse(&id.to_string(), &taken, &holder);
    let known = "77 is no member: give one of 1, 2, 3 (`ctl member list`)";
    refuse("77", &new.0.to_string(), known);
    for verb in ["promote", "remove"] {
        common::refused(
            &["ctl", "member", verb, "77", "--connect", &asked],
            &[known],
        );
    }
    for nobodys in ["127.0.0.1:0", "0.0.0.0:7300", "[::]:7300", "224.0.0.1:7300"] {
        refuse(&id.to_string(), nobodys, "no machine can be reached at");
    }
    let add = ["ctl", "member", "add", "9", "--packet", "127.0.0.1:9"];
    let add = [&add[..], &["--redis", &asked, "--connect", &asked]].concat();
    let holder = format!("is member {}'s: give another address", through + 1);
    common::refused(&add, &[&holder]);
    let add = ["ctl", "member", "add", "2", "--packet", "127.0.0.1:9"];
    let add = [&add[..], &["--connect", &asked]].concat();
    common::refused(
        &add,
        &["id 2 has been used before; the next free one is 4: give that"],
    );
    let members = ["ctl", "members", "--connect", &asked];
    common::refused(
        &members,
        &["engine pmkv", "--config", "`cyclone ctl member list`"],
    );
    // Nor to where it is not yet.
    refuse(&id.to_string(), &new.0.to_string(), "does not answer at");
    let file = cluster.nodes[moved].config.clone();
    let text = fs::read_to_string(&file).expect("configuration");
    let text = text
        .replace(&old.0.to_string(), &new.0.to_string())
        .replace(&old.1.to_string(), &new.1.to_string());
    fs::write(&file, text).expect("written");
    (cluster.nodes[moved].packet, cluster.nodes[moved].redis) = new;
    cluster.start(moved, false).expect("started");
    // Given twice, as after anything.
    done(&cluster, through, &to(new.0.to_string(), redis_of(new.1)));
    // It takes part there: with the other follower gone, nothing commits without it.
    let mut connection = resp::connect(cluster.nodes[at].redis, PATIENCE).expect("connected");
    let other = through;
    set(&mut connection, "before");
    agree(&cluster, &[0, 1, 2]);
    cluster.kill(other).expect("killed");
    set(&mut connection, "after");
    agree(&cluster, &[at, moved]);
    // Clients are sent to its new Redis port, and a restart of the others forgets nothing.
    let said = |cluster: &LocalCluster| {
        let mut connection = resp::connect(cluster.nodes[at].redis, PATIENCE).expect("connected");
        let nodes: String = redis::cmd("CLUSTER")
            .arg("NODES")
            .query(&mut connection)
            .expect("CLUSTER NODES");
        nodes
    };
    let nodes = said(&cluster);
    assert!(
        nodes.contains(&new.1.to_string()) && !nodes.contains(&format!("{} ", old.1)),
        "{nodes}"
    );
    cluster.kill(at).expect("killed");
    for node in [at, other] {
        cluster.start(node, false).expect("started");
    }
    leader(&cluster, &[0, 1, 2]);
    agree(&cluster, &[0, 1, 2]);
    assert!(said(&cluster).contains(&new.1.to_string()));
}

/// The first node that is asked wants a password that the operator does not have. The others let
/// the operator in.
#[test]
fn a_node_that_refuses_the_operator_hinders_no_change() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let mut cluster = three_and_a_fourth(directory.path(), 4);
    leader(&cluster, &[0, 1, 2]);
    let users = directory.path().join("users");
    fs::write(&users, common::guards::hash("default", "secret")).expect("written");
    cluster.kill(0).expect("killed");
    let line = format!("users = {:?}", common::text(&users));
    common::configure_one(&cluster.nodes[0].config, "redis", &line);
    let at = leader(&cluster, &[1, 2]);
    cluster.start(0, false).expect("started");
    let until = Instant::now() + PATIENCE;
    let address = cluster.nodes[0].redis;
    while !resp::info(address, Duration::from_secs(2)).is_err_and(|error| {
        let denied = error.downcast_ref::<cyclone::error_text::AccessDenied>();
        denied.is_some()
    }) {
        assert!(Instant::now() < until, "it lets us in, or never came");
        std::thread::sleep(Duration::from_millis(50));
    }
    done(&cluster, at, &words("remove", &[1]));
    let mut connection = resp::connect(cluster.nodes[at].redis, PATIENCE).expect("connected");
    set(&mut connection, "after");
}

/// A voter whose machine was wiped, and a learner that was: started with --join under the old id
/// they learn that they are known, say so, and end. The cluster goes on.
#[test]
fn one_that_lost_its_memory_does_not_join_under_its_old_id() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let mut cluster = three_and_a_fourth(directory.path(), 3);
    let at = leader(&cluster, &[0, 1, 2]);
    let mut connection = resp::connect(cluster.nodes[at].redis, PATIENCE).expect("connected");
    for number in 0..50 {
        set(&mut connection, &format!("key:{number}"));
    }
    cluster.join(3).expect("started");
    done(&cluster, at, &add(&cluster, 3));
    agree(&cluster, &[0, 1, 2, 3]);
    for (lost, words) in [
        ((at + 1) % 3, "it votes in log"),
        (3, "it has acknowledged log"),
    ] {
        wipe(&mut cluster, lost);
        common::refused(
            &[
                "serve",
                "--config",
                common::text(&cluster.nodes[lost].config),
                "--join",
            ],
            &[
                words,
                "must not come back under its old id",
                "ctl member replace",
            ],
        );
        // What it began then does not make it another one.
        common::refused(
            &[
                "serve",
                "--config",
                common::text(&cluster.nodes[lost].config),
            ],
            &[words, "must not come back under its old id"],
        );
    }
    set(&mut connection, "after");
}

//! Wrong numbers and addresses in the procedure for moving a member, on clusters of real processes:
//! refused, or undone.

mod common;

use std::fs;
use std::net::{SocketAddr, UdpSocket};
use std::path::Path;
use std::time::{Duration, Instant};

use cyclone::cluster::{LocalCluster, Options};
use cyclone::resp;

const PATIENCE: Duration = Duration::from_secs(60);

fn three(directory: &Path, test: u16) -> LocalCluster {
    let options = Options {
        replicas: 3,
        first_port: common::first_port(25_000, test),
        engine: "memory".into(),
        election_ms: Some(500),
        ..Options::default()
    };
    let mut cluster = common::cluster(directory, options);
    for node in 0..3 {
        cluster.start(node, true).expect("started");
    }
    cluster
}

fn leader(cluster: &LocalCluster, among: &[usize]) -> usize {
    let until = Instant::now() + PATIENCE;
    loop {
        let leads = |node: &usize| {
            let info = resp::info(cluster.nodes[*node].redis, Duration::from_secs(2));
            info.is_ok_and(|info| info.get("cyclone_role").is_some_and(|it| it == "leader"))
        };
        if let Some(node) = among.iter().copied().find(leads) {
            return node;
        }
        assert!(Instant::now() < until, "no node leads");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Asks a node for something; its error, if it refuses.
fn ask(cluster: &LocalCluster, node: usize, words: &[&str]) -> Result<redis::Value, String> {
    let mut connection = resp::connect(cluster.nodes[node].redis, PATIENCE).expect("connected");
    let mut command = redis::cmd(words[0]);
    command.arg(&words[1..]);
    command
        .query(&mut connection)
        .map_err(|error: redis::RedisError| error.to_string())
}

/// Writes until it is taken: the leader may change meanwhile.
fn write(cluster: &LocalCluster, among: &[usize], key: &str) {
    let until = Instant::now() + PATIENCE;
    while ask(cluster, leader(cluster, among), &["SET", key, "x"]).is_err() {
        assert!(Instant::now() < until, "{key} is not taken");
    }
}

/// The port of no node: it is taken, and nothing answers.
fn silent() -> (UdpSocket, SocketAddr) {
    let socket = UdpSocket::bind("127.0.0.1:0").expect("bound");
    let address = socket.local_addr().expect("bound");
    (socket, address)
}

fn ctl_move(cluster: &LocalCluster, node: usize, to: &str, through: usize) -> [String; 8] {
    let id = cluster.nodes[node].id.to_string();
    let connect = cluster.nodes[through].redis.to_string();
    [
        "ctl",
        "member",
        "move",
        &id,
        "--packet",
        to,
        "--connect",
        &connect,
    ]
    .map(str::to_owned)
}

/// The third node is down and comes back elsewhere. A wrong id would have moved the second one, and
/// no node would have led any more.
#[test]
fn a_wrong_id_in_a_move_ends_no_cluster() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let mut cluster = three(directory.path(), 0);
    let at = leader(&cluster, &[0, 1, 2]);
    let (other, down) = ((at + 1) % 3, (at + 2) % 3);
    cluster.kill(down).expect("killed");
    let (_socket, nowhere) = silent();
    for wrong in [other, at, down] {
        let words = ctl_move(&cluster, wrong, &nowhere.to_string(), at);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        common::refused(&words, &["does not answer at", "--force"]);
    }
    // It runs there by now, and is asked for under another id.
    let old = cluster.nodes[down].packet;
    let new = SocketAddr::from(([127, 0, 0, 1], common::first_port(25_000, 0) + 9));
    let file = cluster.nodes[down].config.clone();
    let text = fs::read_to_string(&file).expect("configuration");
    fs::write(&file, text.replace(&old.to_string(), &new.to_string())).expect("written");
    cluster.nodes[down].packet = new;
    cluster.start(down, false).expect("started");
    let words = ctl_move(&cluster, other, &new.to_string(), at);
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    common::refused(&words, &["does not answer at"]);
    write(&cluster, &[at, other], "before");
    // Under its own it is taken: with the other one gone nothing commits without it.
    let words = ctl_move(&cluster, down, &new.to_string(), at);
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    common::said(&words);
    cluster.kill(other).expect("killed");
    write(&cluster, &[at, down], "after");
    // Ids that would use up all others are refused as well.
    let asked = cluster.nodes[at].redis.to_string();
    let add = [
        "ctl",
        "member",
        "add",
        "7104",
        "--packet",
        "127.0.0.1:9",
        "--connect",
        &asked,
    ];
    common::refused(&add, &["7104", "1004"]);
}

/// A forced move to a wrong address leaves no majority, so no command can take it back; the nodes'
/// own settings can.
#[test]
fn a_forced_move_to_a_wrong_address_is_undone() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let mut cluster = three(directory.path(), 1);
    let at = leader(&cluster, &[0, 1, 2]);
    let (other, down) = ((at + 1) % 3, (at + 2) % 3);
    write(&cluster, &[0, 1, 2], "before");
    cluster.kill(down).expect("killed");
    let (_socket, nowhere) = silent();
    let (id, right) = (cluster.nodes[other].id, cluster.nodes[other].packet);
    let wrong = nowhere.to_string();
    let force = [
        "CYCLONE",
        "MEMBER",
        "MOVE",
        &id.to_string(),
        &wrong,
        "FORCE",
    ];
    ask(&cluster, at, &force).expect("taken");
    let until = Instant::now() + PATIENCE;
    while ask(&cluster, at, &["SET", "during", "x"]).is_ok() {
        assert!(Instant::now() < until, "the members still reach each other");
        std::thread::sleep(Duration::from_millis(50));
    }
    cluster.kill(at).expect("killed");
    let file = cluster.nodes[at].config.clone();
    let before = fs::read_to_string(&file).expect("configuration");
    let line = format!("member_addresses = [\"{id}={right}\"]");
    common::configure_one(&file, "node", &line);
    cluster.start(at, false).expect("started");
    write(&cluster, &[at, other], "after");
    // Now it can be written down as it is, and everybody starts without the setting.
    let now = leader(&cluster, &[at, other]);
    let words = ctl_move(&cluster, other, &right.to_string(), now);
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    common::said(&words);
    fs::write(&file, before).expect("written");
    for node in [at, other] {
        cluster.kill(node).expect("killed");
    }
    for node in [at, other] {
        cluster.start(node, false).expect("started");
    }
    write(&cluster, &[at, other], "at last");
    for key in ["before", "after", "at last"] {
        let found = ask(&cluster, leader(&cluster, &[at, other]), &["EXISTS", key]);
        assert_eq!(found, Ok(redis::Value::Int(1)), "{key}");
    }
}

/// The flag and the setting are the same, and what is wrong with them is reported before anything
/// starts.
#[test]
fn addresses_of_members_are_checked() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let options = Options {
        replicas: 3,
        first_port: common::first_port(25_000, 2),
        engine: "memory".into(),
        ..Options::default()
    };
    let cluster = common::cluster(directory.path(), options);
    let config = common::text(&cluster.nodes[0].config).to_owned();
    let check = |address: &'static str| {
        let serve = [
            "serve",
            "--config",
            &config,
            "--check",
            "--member-address",
            address,
        ];
        serve.map(str::to_owned)
    };
    let good = check("2=127.0.0.1:7");
    let good: Vec<&str> = good.iter().map(String::as_str).collect();
    assert!(common::said(&good).contains("valid"));
    for (address, told) in [
        ("2", "is not ID=IP:PORT"),
        ("x=127.0.0.1:7", "is not ID=IP:PORT"),
        ("2=127.0.0.1:0", "no machine can be reached there"),
        ("1=127.0.0.1:7", "this node's own"),
    ] {
        let bad = check(address);
        let bad: Vec<&str> = bad.iter().map(String::as_str).collect();
        common::refused(&bad, &[told]);
    }
}

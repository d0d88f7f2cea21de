//! Snapshots for users, with real processes: saved from a cluster under load, restored into a new
//! cluster. What was acknowledged before the save is there, batches over several logs are there
//! whole or not at all, all replicas begin with the same state; and whatever does not fit is
//! refused.

mod common;

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::{ask, cluster, configure, configure_one, cyclone, first_port, refused, said, text};
use cyclone::cluster::{LocalCluster, Options};
use cyclone::resp;

const PATIENCE: Duration = Duration::from_secs(10);
const LOGS: u16 = 3;
const ACCOUNTS: u64 = 12;

fn options(engine: &str, durability: Option<&str>, test: u16) -> Options {
    Options {
        durability: durability.map(str::to_owned),
        engine: engine.into(),
        logs: LOGS,
        // Calm: one leader throughout, also on a busy machine.
        election_ms: Some(2000),
        nvm_bytes: (24 << 20) * u64::from(LOGS),
        first_port: first_port(24_000, test),
        ..Options::default()
    }
}

fn leader(cluster: &mut LocalCluster) -> SocketAddr {
    let leader = cluster
        .wait_for_leader(Duration::from_secs(30))
        .expect("a leader");
    cluster.nodes[leader].redis
}

fn accounts() -> Vec<String> {
    (0..ACCOUNTS).map(|n| format!("account:{n}")).collect()
}

fn sum(connection: &mut redis::Connection) -> i64 {
    let balances: Vec<Option<i64>> = ask(connection, redis::cmd("MGET").arg(accounts()));
    balances.into_iter().flatten().sum()
}

/// Moves money between accounts in several logs, each time by one batch, until told to stop.
fn transfer(address: SocketAddr, stop: &AtomicBool, done: &AtomicU64) {
    let mut connection = resp::connect(address, PATIENCE).expect("connected");
    let mut round = 0_u64;
    while !stop.load(Ordering::Relaxed) {
        let (from, to) = (round % ACCOUNTS, (round * 7 + 1) % ACCOUNTS);
        round += 1;
        if from == to {
            continue;
        }
        let result = redis::pipe()
            .atomic()
            .cmd("DECRBY")
            .arg(format!("account:{from}"))
            .arg(5)
            .cmd("INCRBY")
            .arg(format!("account:{to}"))
            .arg(5)
            .query::<(i64, i64)>(&mut connection);
        if result.is_ok() {
            done.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// The state's hash at every node; waits until all are the same.
fn digest(cluster: &LocalCluster) -> String {
    let until = Instant::now() + Duration::from_secs(30);
    loop {
        let digests: Vec<Option<String>> = cluster
            .nodes
            .iter()
            .map(|node| {
                let mut connection = resp::connect(node.redis, PATIENCE).ok()?;
                redis::cmd("DEBUG")
                    .arg("DIGEST")
                    .query(&mut connection)
                    .ok()
            })
            .collect();
        if let Some(first) = &digests[0]
            && digests.iter().all(|other| other.as_ref() == Some(first))
        {
            return first.clone();
        }
        assert!(Instant::now() < until, "the replicas differ: {digests:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn restore_words<'a>(snapshot: &'a Path, config: &'a Path) -> [&'a str; 6] {
    let (snapshot, config) = (text(snapshot), text(config));
    ["ctl", "snapshot", "restore", snapshot, "--config", config]
}

fn restore(snapshot: &Path, cluster: &LocalCluster) {
    for node in &cluster.nodes {
        let said = said(&restore_words(snapshot, &node.config));
        assert!(said.contains("--bootstrap"), "{said}");
    }
}

fn restored_from(snapshot: &Path) -> String {
    let shown = said(&["ctl", "snapshot", "show", text(snapshot), "--json"]);
    let shown: serde_json::Value = serde_json::from_str(&shown).expect("JSON");
    format!(
        "restored_from = {:?}",
        shown["snapshot"].as_str().expect("an id")
    )
}

fn round_trip(engine: &str, durability: Option<&str>, test: u16) {
    let directory = tempfile::tempdir().expect("temporary directory");
    let mut old = cluster(
        &directory.path().join("old"),
        options(engine, durability, test),
    );
    old.start_all(true).expect("started");
    let address = leader(&mut old);
    let mut connection = resp::connect(address, PATIENCE).expect("connected");
    for number in 0..500 {
        ask::<()>(
            &mut connection,
            redis::cmd("SET")
                .arg(format!("key:{number}"))
                .arg("v".repeat(1 + number * 7 % 3000)),
        );
    }
    ask::<()>(
        &mut connection,
        redis::cmd("SET")
            .arg("timed")
            .arg("x")
            .arg("EX")
            .arg(100_000),
    );
    let (stop, done) = (AtomicBool::new(false), AtomicU64::new(0));
    let snapshot = directory.path().join("saved");
    let before = std::thread::scope(|scope| {
        scope.spawn(|| transfer(address, &stop, &done));
        while done.load(Ordering::Relaxed) < 50 {
            std::thread::sleep(Duration::from_millis(5));
        }
        // Acknowledged before the save begins.
        ask::<()>(
            &mut connection,
            redis::cmd("SET").arg("last").arg("acknowledged"),
        );
        let before = done.load(Ordering::Relaxed);
        // Any node will do: the leader is found.
        let any = old.nodes[0].redis.to_string();
        let saved = said(&[
            "ctl",
            "snapshot",
            "save",
            text(&snapshot),
            "--connect",
            &any,
        ]);
        assert!(saved.contains("restored_from = "), "{saved}");
        let at_end = done.load(Ordering::Relaxed);
        while done.load(Ordering::Relaxed) < at_end + 20 {
            std::thread::sleep(Duration::from_millis(5));
        }
        stop.store(true, Ordering::Relaxed);
        before
    });
    assert!(before >= 50);
    assert_eq!(sum(&mut connection), 0);
    // Later than the snapshot: must not be in the new cluster.
    ask::<()>(&mut connection, redis::cmd("SET").arg("later").arg("x"));
    let address = old.nodes[0].redis.to_string();
    refused(
        &[
            "ctl",
            "snapshot",
            "save",
            text(&snapshot),
            "--connect",
            &address,
        ],
        &["is there already"],
    );
    drop(old);

    let mut new = cluster(
        &directory.path().join("new"),
        options(engine, durability, test),
    );
    configure(&new, "cluster", &restored_from(&snapshot));
    restore(&snapshot, &new);
    new.start_all(true).expect("started");
    let address = leader(&mut new);
    let first = digest(&new);
    let mut connection = resp::connect(address, PATIENCE).expect("connected");
    let get = |connection: &mut redis::Connection, key: &str| -> Option<String> {
        ask(connection, redis::cmd("GET").arg(key))
    };
    for number in 0..500 {
        let value = get(&mut connection, &format!("key:{number}"));
        assert_eq!(value, Some("v".repeat(1 + number * 7 % 3000)), "{number}");
    }
    assert_eq!(
        get(&mut connection, "last").as_deref(),
        Some("acknowledged")
    );
    assert_eq!(get(&mut connection, "later"), None);
    let left: i64 = ask(&mut connection, redis::cmd("TTL").arg("timed"));
    assert!((90_000..=100_000).contains(&left), "{left}");
    assert_eq!(sum(&mut connection), 0, "half a transfer was saved");
    // It is a cluster like any other: it takes writes, and every replica comes back without help.
    ask::<()>(
        &mut connection,
        redis::cmd("MSET").arg(&["key:1", "new", "key:2", "new", "key:3", "new"]),
    );
    let after = digest(&new);
    assert_ne!(after, first);
    for node in 0..new.nodes.len() {
        new.kill(node).expect("killed");
    }
    new.start_all(false).expect("started");
    let address = leader(&mut new);
    // The hash covers the applied indexes, which the new leader's term has moved; the number of
    // keys is the second part.
    let keys = |digest: &str| digest.split('-').nth(1).map(str::to_owned);
    assert_eq!(keys(&digest(&new)), keys(&after));
    let mut connection = resp::connect(address, PATIENCE).expect("connected");
    assert_eq!(get(&mut connection, "key:2").as_deref(), Some("new"));
    // A snapshot of the restored cluster is a separate one.
    let again = directory.path().join("again");
    let address = address.to_string();
    said(&[
        "ctl",
        "snapshot",
        "save",
        text(&again),
        "--connect",
        &address,
    ]);
    assert_ne!(restored_from(&again), restored_from(&snapshot));
}

#[test]
fn a_snapshot_under_load_becomes_a_new_cluster() {
    round_trip("rocksdb", None, 0);
}

#[test]
fn the_same_in_memory() {
    round_trip("memory", None, 1);
}

#[test]
fn the_same_with_a_second_level() {
    round_trip("rocksdb", Some("nvm"), 4);
}

#[test]
fn the_same_with_flash_as_the_only_level() {
    round_trip("rocksdb", Some("flash"), 5);
}

/// A small cluster's snapshot.
fn saved(directory: &Path, test: u16) -> (PathBuf, LocalCluster) {
    let mut old = cluster(
        &directory.join("old"),
        Options {
            replicas: 1,
            ..options("rocksdb", None, test)
        },
    );
    old.start_all(true).expect("started");
    let address = leader(&mut old);
    let mut connection = resp::connect(address, PATIENCE).expect("connected");
    ask::<()>(&mut connection, redis::cmd("SET").arg("k").arg("v"));
    let snapshot = directory.join("saved");
    let address = address.to_string();
    said(&[
        "ctl",
        "snapshot",
        "save",
        text(&snapshot),
        "--connect",
        &address,
    ]);
    (snapshot, old)
}

#[test]
fn snapshot_says_what_goes_into_the_configuration() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let (snapshot, _old) = saved(directory.path(), 6);
    let shown = said(&["ctl", "snapshot", "show", text(&snapshot)]);
    assert!(shown.contains(&restored_from(&snapshot)), "{shown}");
    let shown = said(&["ctl", "snapshot", "show", text(&snapshot), "--json"]);
    let shown: serde_json::Value = serde_json::from_str(&shown).expect("JSON");
    assert_eq!(shown["restored_from"], shown["snapshot"]);
}

#[test]
fn save_that_is_interrupted_says_so_and_what_to_do() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let (_snapshot, mut old) = saved(directory.path(), 7);
    let address = old.nodes[0].redis.to_string();
    let mut connection = resp::connect(old.nodes[0].redis, PATIENCE).expect("connected");
    fill(&mut connection);
    let file = directory.path().join("again");
    let child = Command::new(common::BINARY)
        .args(["ctl", "snapshot", "save", text(&file)])
        .args(["--connect", &address, "--mib-per-second", "1"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("run");
    let draft = directory.path().join("again.part");
    let until = Instant::now() + PATIENCE;
    while fs::metadata(&draft).map_or(0, |it| it.len()) == 0 {
        assert!(Instant::now() < until, "it does not begin");
        std::thread::sleep(Duration::from_millis(20));
    }
    old.kill(0).expect("killed");
    let output = child.wait_with_output().expect("ended");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    for words in [
        "connection to the leader ended",
        "Nothing was saved",
        "again",
    ] {
        assert!(error.contains(words), "{words:?} is missing in: {error}");
    }
    assert!(!file.exists() && !draft.exists());
}

/// Puts values into a node that do not compress, each of nearly 1 MB.
fn fill(connection: &mut redis::Connection) {
    let mut random = 7_u64;
    for key in 0..12 {
        let value: Vec<u8> = (0..900_000)
            .map(|_| {
                random = random
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                (random >> 33) as u8
            })
            .collect();
        ask::<()>(connection, redis::cmd("SET").arg(key).arg(value));
    }
}

/// Files that a node keeps for saves.
fn kept(directory: &Path) -> Vec<PathBuf> {
    let backup = directory.join("old/node1/backup");
    let Ok(entries) = fs::read_dir(backup) else {
        return Vec::new();
    };
    entries.flatten().map(|entry| entry.path()).collect()
}

#[track_caller]
fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < until, "waited for {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A save whose process is killed in the middle: the node releases the snapshot when the connection
/// closes, long before the time after which an unused one is removed.
#[test]
fn snapshot_of_a_killed_save_is_released_when_its_connection_closes() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let (_snapshot, old) = saved(directory.path(), 8);
    let redis = old.nodes[0].redis;
    let address = redis.to_string();
    let mut connection = resp::connect(redis, PATIENCE).expect("connected");
    fill(&mut connection);
    let held = |connection: &mut redis::Connection| {
        resp::info_of(connection).expect("INFO")["cyclone_save_snapshots"].clone()
    };
    assert_eq!(held(&mut connection), "0");
    let file = directory.path().join("again");
    for round in 0..2 {
        let mut child = Command::new(common::BINARY)
            .args(["ctl", "snapshot", "save", text(&file)])
            .args(["--connect", &address, "--mib-per-second", "1"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("run");
        let draft = directory.path().join("again.part");
        wait_for("the save to begin", || {
            fs::metadata(&draft).is_ok_and(|it| it.len() > 0)
        });
        assert_eq!(held(&mut connection), "1");
        assert!(!kept(directory.path()).is_empty());
        // Another one is refused while the connection is open.
        let other = directory.path().join("other");
        refused(
            &[
                "ctl",
                "snapshot",
                "save",
                text(&other),
                "--connect",
                &address,
            ],
            &["another snapshot is being saved"],
        );
        child.kill().expect("killed");
        child.wait().expect("ended");
        fs::remove_file(&draft).expect("removed");
        if round == 0 {
            wait_for("the release", || held(&mut connection) == "0");
            wait_for("the removal", || kept(directory.path()).is_empty());
            continue;
        }
        // At once, without waiting for anything.
        said(&[
            "ctl",
            "snapshot",
            "save",
            text(&file),
            "--connect",
            &address,
        ]);
    }
    assert_eq!(held(&mut connection), "0");
    wait_for("the removal", || kept(directory.path()).is_empty());
}

/// A connection that closes while its snapshot is being made, and one that only stops sending.
#[test]
fn snapshot_is_released_whenever_its_connection_closes() {
    use std::io::{Read as _, Write as _};
    use std::net::{Shutdown, TcpStream};

    let directory = tempfile::tempdir().expect("temporary directory");
    let (_snapshot, old) = saved(directory.path(), 9);
    let redis = old.nodes[0].redis;
    let mut connection = resp::connect(redis, PATIENCE).expect("connected");
    fill(&mut connection);
    let begin = b"*3\r\n$7\r\nCYCLONE\r\n$8\r\nSNAPSHOT\r\n$5\r\nBEGIN\r\n";
    for halves in [false, true, false, true] {
        let mut stream = TcpStream::connect(redis).expect("connected");
        stream.write_all(begin).expect("sent");
        if halves {
            stream.shutdown(Shutdown::Write).expect("shut");
            let mut reply = String::new();
            stream.read_to_string(&mut reply).expect("read");
            assert!(!reply.is_empty());
        }
        drop(stream);
        wait_for("the release", || {
            let info = resp::info_of(&mut connection).expect("INFO");
            info["cyclone_save_snapshots"] == "0"
        });
        wait_for("the removal", || kept(directory.path()).is_empty());
    }
    let file = directory.path().join("again");
    let address = redis.to_string();
    said(&[
        "ctl",
        "snapshot",
        "save",
        text(&file),
        "--connect",
        &address,
    ]);
}

#[test]
fn what_does_not_fit_is_refused() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let (snapshot, old) = saved(directory.path(), 2);
    let line = restored_from(&snapshot);
    let new = |name: &str, options: Options| {
        let new = cluster(
            &directory.path().join(name),
            Options {
                replicas: 1,
                ..options
            },
        );
        let config = new.nodes[0].config.clone();
        (new, config)
    };
    let restore = |config: &Path, snapshot: &Path, words: &[&str]| {
        refused(&restore_words(snapshot, config), words);
    };
    // The configuration must say so.
    let (_one, config) = new("one", options("rocksdb", None, 2));
    restore(&config, &snapshot, &["restored_from", "[cluster]"]);
    configure_one(
        &config,
        "cluster",
        &format!("restored_from = \"{}\"", "0".repeat(32)),
    );
    restore(&config, &snapshot, &["but this is snapshot"]);
    // Another number of logs, another engine.
    let (_two, config) = new(
        "two",
        Options {
            logs: 2,
            ..options("rocksdb", None, 2)
        },
    );
    configure_one(&config, "cluster", &line);
    restore(&config, &snapshot, &["3 logs", "cluster.logs = 2"]);
    let (_three, config) = new("three", options("memory", None, 2));
    configure_one(&config, "cluster", &line);
    restore(&config, &snapshot, &["engine rocksdb", "memory"]);
    // The very cluster it is of: its nodes have run.
    let own = old.nodes[0].config.clone();
    configure_one(&own, "cluster", &line);
    restore(
        &own,
        &snapshot,
        &["is of cluster", "choose another cluster.id"],
    );
    // Damaged, cut off, something else: nothing is made.
    let (four, config) = new("four", options("rocksdb", None, 2));
    configure_one(&config, "cluster", &line);
    let bytes = fs::read(&snapshot).expect("snapshot");
    let bad = directory.path().join("bad");
    let mut damaged = bytes.clone();
    let middle = damaged.len() / 2;
    damaged[middle] ^= 1;
    for (bytes, words) in [
        (&damaged[..], &["damaged"][..]),
        (&bytes[..bytes.len() - 1], &["cut off"]),
        (b"something else", &["not a snapshot"]),
    ] {
        fs::write(&bad, bytes).expect("written");
        restore(&config, &bad, words);
        refused(&["ctl", "snapshot", "show", text(&bad)], words);
    }
    let data = four.directory.join("node1");
    assert!(!data.exists(), "a refused restore leaves nothing");
    // A directory with something in it.
    fs::create_dir_all(&data).expect("directory");
    fs::write(data.join("precious"), "x").expect("written");
    restore(&config, &snapshot, &["not empty", "precious"]);
    fs::remove_file(data.join("precious")).expect("removed");
    // A region with something in it.
    let region = four.regions.join("node1.nvm");
    fs::write(&region, [1; 8192]).expect("written");
    restore(&config, &snapshot, &["log region", "not new"]);
    fs::remove_file(&region).expect("removed");
    // A restore that was cut off is neither started nor in the way.
    fs::create_dir_all(data.join("restoring/files")).expect("directory");
    fs::create_dir_all(data.join("store/gen-1")).expect("directory");
    // Nor one that had come almost to its end, nor what a crash leaves of a file that was being
    // replaced.
    let marker = format!("cyclone restored 1\nsnapshot {}\n", "0".repeat(32));
    for (name, holds) in [
        ("RESTORED", &marker[..]),
        ("RESTORED.new", "cyclone"),
        ("ENGINE", "cyclone engine 1\nrocksdb\n"),
        ("ENGINE.new", "cyclone"),
    ] {
        fs::write(data.join(name), holds).expect("written");
    }
    refused(
        &["serve", "--config", text(&config), "--bootstrap"],
        &["restore was cut off"],
    );
    let arguments = restore_words(&snapshot, &config);
    said(&arguments);
    refused(&arguments, &["restored already"]);
}

/// A node that was not restored does not start in a restored cluster; with a configuration that
/// hides it, it is not understood by the others, and they do not found a cluster together.
#[test]
fn a_node_that_was_not_restored_takes_no_part() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let (snapshot, old) = saved(directory.path(), 3);
    drop(old);
    let line = restored_from(&snapshot);
    let mut new = cluster(
        &directory.path().join("new"),
        Options {
            first_port: first_port(24_000, 3) + 3,
            ..options("rocksdb", None, 3)
        },
    );
    // The first two hide it and begin with nothing: they would be a majority.
    for node in [0, 1] {
        let config = text(&new.nodes[node].config).to_owned();
        let check = cyclone(&["serve", "--config", &config, "--check"]);
        assert!(check.status.success());
    }
    let third = new.nodes[2].config.clone();
    configure_one(&third, "cluster", &line);
    refused(
        &["serve", "--config", text(&third), "--bootstrap"],
        &["was not restored"],
    );
    said(&restore_words(&snapshot, &third));
    new.start_all(true).expect("started");
    new.wait_until_open(PATIENCE).expect("open");
    // No founder hears the other kind, so neither founds a cluster.
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(new.leader(), None);
    for node in &new.nodes {
        let info = resp::info(node.redis, PATIENCE).expect("INFO");
        assert_eq!(info["cyclone_role"], "founding", "{info:?}");
    }
    // The restored one still has exactly what the snapshot had, and knows no leader.
    let info = resp::info(new.nodes[2].redis, PATIENCE).expect("INFO");
    assert_eq!(info["cyclone_log0_leader"], "0", "{info:?}");
    let shown = said(&["ctl", "snapshot", "show", text(&snapshot), "--json"]);
    let shown: serde_json::Value = serde_json::from_str(&shown).expect("JSON");
    for log in 0..usize::from(LOGS) {
        let applied = shown["logs"][log]["applied"].to_string();
        assert_eq!(info[&format!("cyclone_log{log}_applied")], applied);
    }
    // Without the line it does not start again as if nothing had been.
    new.kill(2).expect("killed");
    let file = fs::read_to_string(&third).expect("configuration");
    fs::write(&third, file.replace(&line, "")).expect("written");
    refused(
        &["serve", "--config", text(&third)],
        &["was restored from", "on every node"],
    );
}

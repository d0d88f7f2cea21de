//! What the program refuses at once: with the field's name and what is expected, without a panic,
//! and without a word of what is secret.

mod common;

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use common::{BINARY, cluster, cyclone, edited, first_port, refused, said, text};
use cyclone::cluster::{LocalCluster, Options};
use cyclone_wire::ring::{Superblock, crc32c_of};

fn single(directory: &Path, test: u16) -> LocalCluster {
    let options = Options {
        replicas: 1,
        engine: "memory".into(),
        nvm_bytes: 32 << 20,
        first_port: first_port(24_000, test),
        ..Options::default()
    };
    cluster(directory, options)
}

/// A line of the configuration, and the value in its quotes.
fn line(cluster: &LocalCluster, name: &str) -> (String, String) {
    let text = fs::read_to_string(&cluster.nodes[0].config).expect("configuration");
    let line = text.lines().find(|line| line.starts_with(name));
    let line = line.expect("a line that begins so").to_owned();
    let value = line.split('"').nth(1).unwrap_or_default().to_owned();
    (line, value)
}

#[test]
fn errors_do_not_show_keys() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let cluster = single(directory.path(), 0);
    for name in ["node_key", "client_key"] {
        let (line, key) = line(&cluster, name);
        let half = line.trim_end_matches('"');
        for wrong in [half.to_owned(), line.replacen('"', "", 1)] {
            let path = edited(&cluster, &line, &wrong);
            for arguments in [
                &["serve", "--config", text(&path), "--check"][..],
                &["log", "stat", "--config", text(&path)],
                &["log", "repair", "--config", text(&path)],
            ] {
                refused(arguments, &["line ", "column ", name]);
                let told = String::from_utf8_lossy(&cyclone(arguments).stderr).into_owned();
                assert!(!told.contains(&key[8..20]), "{arguments:?}: {told}");
            }
        }
    }
    let config = directory.path().join("cluster.toml");
    for token in ["\"0123456789abcdef", "1234567890123456"] {
        let file = format!("directory = \"/x\"\ntoken = {token}\nservers = []\n");
        fs::write(&config, file).expect("written");
        let arguments = [
            "serve",
            "--engine",
            "pmkv",
            "--id",
            "0",
            "--config",
            text(&config),
            "--check",
        ];
        refused(&arguments, &["line 2", "token"]);
        let told = String::from_utf8_lossy(&cyclone(&arguments).stderr).into_owned();
        assert!(!told.contains("56789"), "{told}");
    }
}

#[test]
fn check_and_serve_refuse_the_same() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let cluster = single(directory.path(), 1);
    let (packet, _) = line(&cluster, "packet = ");
    let (redis, address) = line(&cluster, "redis = ");
    let (data, _) = line(&cluster, "data = ");
    let (key, digits) = line(&cluster, "node_key");
    let file = directory.path().join("a file");
    fs::write(&file, "").expect("written");
    let data_is_a_file = format!("data = {:?}", text(&file));
    let second = format!(
        "redis = \"{address}\"\n[[cluster.members]]\nid = 2\npacket = \"127.0.0.1:9\"\nredis = \"{address}\""
    );
    let signed = key.replace(&digits, &format!("+{}", &digits[1..]));
    let (_, client_digits) = line(&cluster, "client_key");
    // The same bytes, written otherwise.
    let same = key.replace(&digits, &client_digits.to_uppercase());
    let data_at = line(&cluster, "data = ").1;
    let in_own = |field: &str, below: &str| format!("[node]\n{field} = \"{data_at}/{below}\"");
    // Only RocksDB has a block cache: from the engine's line to that of the cache.
    let whole = fs::read_to_string(&cluster.nodes[0].config).expect("configuration");
    let (engine, cache) = ("engine = \"memory\"", "block_cache_bytes = 67108864");
    let begins = whole.find(engine).expect("an engine");
    let ends = whole.find(cache).expect("a cache") + cache.len();
    let cached = &whole[begins..ends];
    let with_cache = |bytes: &str| {
        let rocks = cached.replace(engine, "engine = \"rocksdb\"");
        rocks.replace(cache, &format!("block_cache_bytes = {bytes}"))
    };
    let (no_cache, huge_cache) = (with_cache("0"), with_cache("1152921504606846976"));
    let cases: &[(&str, &str, &[&str])] = &[
        (
            "mode = \"index\"",
            "mode = \"bogus\"",
            &["reads.mode", "bogus"],
        ),
        (
            "mode = \"index\"",
            "mode = \"lease\"",
            &["reads.mode", "reads.lease = true"],
        ),
        (
            "max_clients = 20000",
            "max_clients = 0",
            &["limits", "max_clients = 0"],
        ),
        (
            "election_ms = 50",
            "election_ms = 9223372036854775807",
            &["timing.election_ms = 9223372036854775807", "3600000"],
        ),
        (
            "heartbeat_ms = 10",
            "heartbeat_ms = 9223372036854775807",
            &["timing.heartbeat_ms"],
        ),
        ("[node]", "[node]\npin_cpu = 999", &["node.pin_cpu = 999"]),
        ("[node]", "[node]\npin_cpu = 5000", &["node.pin_cpu = 5000"]),
        (
            &packet,
            "packet = \"0.0.0.0:7104\"",
            &["packet = \"0.0.0.0:7104\"", "member 1"],
        ),
        (
            &packet,
            "packet = \"[::]:7104\"",
            &["packet = \"[::]:7104\""],
        ),
        (
            &packet,
            "packet = \"127.0.0.1:0\"",
            &["packet = \"127.0.0.1:0\""],
        ),
        (
            &redis,
            "redis = \"0.0.0.0:6379\"",
            &["redis = \"0.0.0.0:6379\"", "node.redis_listen"],
        ),
        (
            &redis,
            "redis = \"127.0.0.1:0\"",
            &["redis = \"127.0.0.1:0\""],
        ),
        (&redis, &second, &["given twice", "members 1 and 2"]),
        (&data, &data_is_a_file, &["node.data", "is a file"]),
        (&key, &signed, &["node_key", "hexadecimal"]),
        (&key, &same, &["node_key", "client_key", "the same"]),
        (
            "[node]",
            &in_own("archive", "snapshots"),
            &["archive = ", "snapshots is the node's own"],
        ),
        (
            "[node]",
            &in_own("archive", "x/../backup/./deep"),
            &["archive = ", "backup is the node's own"],
        ),
        (
            "[node]",
            &in_own("flash", "snapshots"),
            &["flash = ", "snapshots is the node's own"],
        ),
        (
            cached,
            &no_cache,
            &["block_cache_bytes = 0 is outside 1048576..="],
        ),
        (
            cached,
            &huge_cache,
            &["block_cache_bytes = 1152921504606846976 is outside 1048576..="],
        ),
    ];
    for (from, to, words) in cases {
        let path = edited(&cluster, from, to);
        refused(&["serve", "--config", text(&path), "--check"], words);
        refused(&["serve", "--config", text(&path), "--bootstrap"], words);
    }
    assert!(
        !cluster.regions.join("node1.nvm").exists(),
        "a refused start leaves nothing behind"
    );
    let whole = &cluster.nodes[0].config;
    said(&["serve", "--config", text(whole), "--check"]);
    let listening = "[node]\nredis_listen = \"0.0.0.0:6379\"";
    let path = edited(&cluster, "[node]", listening);
    said(&["serve", "--config", text(&path), "--check"]);
}

#[test]
fn the_same_for_servers_of_pmkv() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let config = directory.path().join("cluster.toml");
    let base = [
        "serve",
        "--engine",
        "pmkv",
        "--id",
        "0",
        "--config",
        text(&config),
    ];
    let write = |line: &str| {
        let file = format!(
            "directory = {:?}\ntoken = \"0123456789abcdef\"\n{line}\n[[servers]]\nid = 0\nredis = \"127.0.0.1:1\"\n",
            directory.path().join("made")
        );
        fs::write(&config, file).expect("written");
    };
    let check = |more: &[&str], words: &[&str]| {
        refused(&[&base[..], more, &["--check"]].concat(), words);
        refused(&[&base[..], more].concat(), words);
    };
    for (line, words) in [
        ("copies = 1\nsegment_bytes = 0", "segment_bytes = 0"),
        ("copies = 1\nlease_ms = 9223372036854775807", "lease_ms"),
        ("copies = 0", "copies = 0"),
        ("copies = 2", "copies = 2"),
        ("copies = 1\nshards_per_server = 0", "shards_per_server"),
        ("copies = 1\nmax_clients = 0", "max_clients"),
        ("copies = 1\nreplication = \"foo\"", "foo"),
        ("copies = 1\nstore = \"foo\"", "store = \"foo\""),
    ] {
        write(line);
        check(&[], &[words]);
    }
    write("copies = 1");
    said(&[&base[..], &["--check"]].concat());
    check(&["--replication", "foo"], &["foo"]);
    check(&["--store", "foo"], &["store = \"foo\""]);
    check(
        &["--bootstrap", "--transport", "tcp"],
        &["--bootstrap, --transport"],
    );
    assert!(!directory.path().join("made").exists());
}

#[test]
fn flags_that_would_be_ignored_are_refused() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let cluster = single(directory.path(), 2);
    let config = text(&cluster.nodes[0].config);
    refused(
        &[
            "serve",
            "--config",
            config,
            "--id",
            "2",
            "--cluster-id",
            "zz",
            "--node-key",
            "q",
        ],
        &["--id, --cluster-id, --node-key", "--config"],
    );
    refused(
        &["serve", "--config", config, "--check", "--store", "etcd"],
        &["--store", "pmkv"],
    );
    let output = Command::new(BINARY)
        .args(["serve", "--config", config, "--check"])
        .env("CYCLONE_LOG", "info,cyclone=loud")
        .output()
        .expect("run");
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        !output.status.success() && told.contains("CYCLONE_LOG"),
        "{told}"
    );
    refused(
        &["ctl", "member", "add", "0", "--packet", "127.0.0.1:1"],
        &["id 0 is outside 1..=65535"],
    );
    let demo = directory.path().join("demo");
    for (arguments, words) in [
        (&["--engine", "echo"][..], "keeps nothing"),
        (&["--engine", "foo"], "foo"),
        (&["--logs", "65"], "logs = 65"),
        (&["--replication", "rowan"], "--replication"),
        (&["--engine", "pmkv", "--keep"], "--keep"),
        (&["--engine", "pmkv", "--logs", "2"], "--logs"),
        (&["--engine", "pmkv", "--replication", "foo"], "foo"),
        (&["--engine", "pmkv", "--lease-ms", "0"], "lease_ms"),
    ] {
        let place = ["demo", "--directory", text(&demo)];
        refused(&[&place[..], arguments].concat(), &[words]);
        assert!(!demo.exists(), "{arguments:?} made a directory");
    }
}

/// Of names the error lists those that there are.
#[test]
fn unknown_names_are_refused_with_those_that_are_known() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let cluster = single(directory.path(), 4);
    let cases: &[(&str, &[&str])] = &[
        ("nosuch", &["serve", "demo", "ctl", "bench"]),
        ("ctl nosuch", &["status", "member", "snapshot"]),
        ("ctl member nosuch", &["list", "add", "promote"]),
    ];
    for (arguments, words) in cases {
        let arguments: Vec<&str> = arguments.split(' ').collect();
        refused(&arguments, words);
    }
    let pin = "[node]\n";
    for (from, to, words) in [
        (pin, "[node]\npin_cup = 1\n", &["pin_cup", "pin_cpu"][..]),
        (pin, "[nod]\nid = 1\n[node]\n", &["nod", "limits"]),
        (
            "engine = \"memory\"",
            "engine = \"nosuch\"",
            &["nosuch", "rocksdb"],
        ),
        (
            "polling = \"adaptive\"",
            "polling = \"nosuch\"",
            &["nosuch", "event"],
        ),
        (
            "transport = \"udp\"",
            "transport = \"nosuch\"",
            &["nosuch", "dpdk"],
        ),
        (
            "security = \"authenticated\"",
            "security = \"nosuch\"",
            &["nosuch", "encrypted"],
        ),
        (
            "durability = \"nvm\"",
            "durability = \"nosuch\"",
            &["nosuch", "flash"],
        ),
        (
            "mode = \"index\"",
            "mode = \"nosuch\"",
            &["nosuch", "lease"],
        ),
        (
            pin,
            "[log]\nfilter = \"nosuch=debug\"\n[node]\n",
            &["nosuch", "trace", "cyclone_replica"],
        ),
        (
            pin,
            "[log]\nfilter = \"cyclone=loud\"\n[node]\n",
            &["loud", "trace", "cyclone_replica"],
        ),
    ] {
        let path = edited(&cluster, from, to);
        refused(&["serve", "--config", text(&path), "--check"], words);
    }
    let config = text(&cluster.nodes[0].config);
    refused(
        &["serve", "--config", config, "--flash-bytes", "64MiB"],
        &["flash-bytes", "67108864 for 64 MiB"],
    );
}

/// Replaces the head of a region.
fn put(region: &Path, head: &[u8]) {
    let mut bytes = fs::read(region).expect("region");
    bytes[..head.len()].copy_from_slice(head);
    fs::write(region, bytes).expect("written");
}

/// A head as a newer program would write it.
fn of_version(head: &[u8], version: u32) -> Vec<u8> {
    let mut head = head.to_vec();
    head[8..12].copy_from_slice(&version.to_le_bytes());
    let sum = crc32c_of(&[&head[..12], &head[16..]].concat());
    head[12..16].copy_from_slice(&sum.to_le_bytes());
    head
}

#[test]
fn regions_of_others_are_named_and_not_given_up() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let mut cluster = single(directory.path(), 3);
    cluster.start(0, true).expect("started");
    cluster
        .wait_for_leader(Duration::from_secs(20))
        .expect("a leader");
    cluster.terminate(0).expect("ended");
    let config = cluster.nodes[0].config.clone();
    let region = cluster.regions.join("node1.nvm");
    let whole = fs::read(&region).expect("region");
    let ours = Superblock::decode(&whole[..4096]).expect("a region");
    let sound = ours.encode();
    let commands = |config: &Path, words: &[&str], more: &str| {
        let config = text(config);
        for arguments in [
            &["serve", "--config", config][..],
            &["log", "stat", "--config", config],
            &["log", "verify", "--config", config],
            &["log", "repair", "--config", config],
        ] {
            refused(arguments, words);
            let told = String::from_utf8_lossy(&cyclone(arguments).stderr).into_owned();
            assert!(
                !told.contains("must not come back"),
                "{arguments:?}: {told}"
            );
            assert!(!told.contains("Version("), "{arguments:?}: {told}");
            let twice = told.matches(more).count();
            assert_eq!(twice, 1, "{more:?} in {arguments:?}: {told}");
        }
        assert!(fs::read(&region).expect("region")[80..] == whole[80..]);
    };
    put(&region, &of_version(&sound, 2));
    let version = "format version 2, this program knows 1";
    commands(&config, &[version, "newer"], version);
    for frame_bytes in [u32::MAX, u32::MAX - 63, 64] {
        let head = Superblock {
            frame_bytes,
            ..ours
        };
        put(&region, &head.encode());
        let frames = format!("frames of {frame_bytes} bytes");
        commands(&config, &["multiple of 64"], &frames);
    }
    put(&region, &sound);

    let (id, digits) = line(&cluster, "id = \"");
    let other = "00000000000000000000000000000007";
    let path = edited(&cluster, &id, &format!("id = \"{other}\""));
    let (path, words) = (text(&path), [digits.as_str(), other]);
    refused(&["log", "verify", "--config", path], &words);
    refused(&["log", "repair", "--config", path], &words);
    refused(&["serve", "--config", path], &words);
    let stat = said(&["log", "stat", "--config", path]);
    assert!(stat.contains("PROBLEM") && stat.contains(other), "{stat}");
    said(&["log", "verify", "--config", text(&config)]);

    // The same region beside the directory of another life.
    let identity = directory.path().join("node1/IDENTITY");
    let before = fs::read_to_string(&identity).expect("identity");
    let incarnation = format!("incarnation {:x}", ours.incarnation);
    let after = before.replace(&incarnation, "incarnation 5");
    assert_ne!(before, after);
    fs::write(&identity, after).expect("written");
    let words = [digits.as_str(), "(incarnation 0000000000000005)"];
    refused(&["serve", "--config", text(&config)], &words);
    refused(&["log", "repair", "--config", text(&config)], &words);
    fs::write(&identity, before).expect("written");

    let path = edited(&cluster, "engine = \"memory\"", "engine = \"rocksdb\"");
    let words = ["node.engine = \"rocksdb\"", "\"memory\""];
    refused(&["serve", "--config", text(&path)], &words);
    refused(&["log", "repair", "--config", text(&path)], &words);

    // What is damaged is named by what only prints entries as well.
    let mut torn = whole.clone();
    torn[4096..4096 + 12288].fill(0xaa);
    fs::write(&region, &torn).expect("written");
    refused(
        &["log", "dump", "--config", text(&config)],
        &["1 problem found: log 0: nvm:"],
    );
    fs::write(&region, &whole).expect("written");
    cluster.start(0, false).expect("started");
    cluster
        .wait_for_leader(Duration::from_secs(20))
        .expect("a leader");
}

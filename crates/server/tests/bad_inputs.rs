//! Wrong configurations, regions, packets and connections: each has a clear error or is counted and dropped, and the
//! node goes on.

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpStream, UdpSocket};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use cyclone::cluster::{LocalCluster, Options};
use cyclone::resp;

const BINARY: &str = env!("CARGO_BIN_EXE_cyclone");

/// Ports of this process and test, below the ephemeral ones: test programs may run side by side.
fn first_port(test: u16) -> u16 {
    20_000 + (std::process::id() % 600) as u16 * 20 + test * 5
}

/// A cluster of one, configured but not started.
fn single(directory: &Path, first_port: u16) -> LocalCluster {
    let options = Options {
        replicas: 1,
        engine: "memory".into(),
        nvm_bytes: 32 << 20,
        first_port,
        executable: Some(PathBuf::from(BINARY)),
        ..Options::default()
    };
    LocalCluster::create(directory, &options).expect("cluster")
}

/// Runs a node that is expected to refuse; answers what it said.
fn refusal(config: &Path, arguments: &[&str]) -> String {
    let Output { status, stderr, .. } = Command::new(BINARY)
        .arg("serve")
        .arg("--config")
        .arg(config)
        .args(arguments)
        .output()
        .expect("run");
    let said = String::from_utf8_lossy(&stderr).into_owned();
    assert!(!status.success(), "it should have refused: {said}");
    assert!(!said.contains("panicked"), "{said}");
    said
}

fn assert_says(said: &str, words: &[&str]) {
    for word in words {
        assert!(said.contains(word), "{word:?} is missing in: {said}");
    }
}

fn region_of(cluster: &LocalCluster) -> PathBuf {
    cluster.regions.join("node1.nvm")
}

fn edited(cluster: &LocalCluster, from: &str, to: &str) -> PathBuf {
    let text = fs::read_to_string(&cluster.nodes[0].config).expect("configuration");
    assert!(text.contains(from), "{from:?} is not in {text}");
    let path = cluster.directory.join("edited.toml");
    fs::write(&path, text.replacen(from, to, 1)).expect("written");
    path
}

#[test]
fn configurations_that_are_wrong_name_the_field() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let cluster = single(directory.path(), first_port(0));
    let cases: &[(&str, &str, &[&str])] = &[
        ("[node]", "[node]\ncolour = 1", &["colour"]),
        (
            "nvm_bytes = 33554432",
            "nvm_bytes = 1000",
            &["nvm_bytes", "1000"],
        ),
        (
            "engine = \"memory\"",
            "engine = \"paper\"",
            &["paper", "rocksdb"],
        ),
        ("node_key = \"", "node_key = \"zz", &["node_key", "64"]),
        ("logs = 1", "logs = 3", &["logs = 3"]),
        ("id = 1", "id = 0", &["id"]),
        ("election_ms = 50", "election_ms = 1", &["election"]),
    ];
    for (from, to, words) in cases {
        assert_says(
            &refusal(&edited(&cluster, from, to), &["--bootstrap"]),
            words,
        );
    }
    let data = fs::read_to_string(&cluster.nodes[0].config).expect("configuration");
    let line = data
        .lines()
        .find(|line| line.starts_with("data"))
        .expect("a data line")
        .to_owned();
    assert_says(
        &refusal(&edited(&cluster, &line, ""), &["--bootstrap"]),
        &["missing field", "data"],
    );
    assert_says(
        &refusal(Path::new("/nonexistent/node.toml"), &[]),
        &["cannot read", "/nonexistent/node.toml"],
    );
    assert!(
        !region_of(&cluster).exists(),
        "a refused start leaves nothing behind"
    );
}

#[test]
fn regions_that_are_not_this_replicas_memory_are_refused() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let mut cluster = single(directory.path(), first_port(1));
    let config = cluster.nodes[0].config.clone();
    assert_says(&refusal(&config, &[]), &["--bootstrap"]);
    cluster.start(0, true).expect("started");
    cluster
        .wait_for_leader(Duration::from_secs(10))
        .expect("a leader");
    assert_says(&refusal(&config, &[]), &["in use"]);
    cluster.kill(0).expect("killed");

    let id = fs::read_to_string(&config).expect("configuration");
    let id = id
        .lines()
        .find(|line| line.starts_with("id = \""))
        .expect("cluster id")
        .to_owned();
    let other = edited(&cluster, &id, &format!("id = \"{:032x}\"", 7));
    assert_says(&refusal(&other, &[]), &["belongs to cluster"]);
    assert_says(
        &refusal(
            &edited(&cluster, "nvm_bytes = 33554432", "nvm_bytes = 67108864"),
            &[],
        ),
        &["33554432", "67108864"],
    );

    let region = fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(region_of(&cluster))
        .expect("region");
    let mut head = [0; 4096];
    region.read_exact_at(&mut head, 0).expect("read");
    region.write_all_at(&[0xff; 8], 20).expect("damaged");
    assert_says(
        &refusal(&config, &[]),
        &["header is damaged", "must not come back"],
    );
    region.write_all_at(&head, 0).expect("mended");
    // Another boot id: the machine was rebooted, and tmpfs does not survive that.
    drop(region);

    fs::rename(
        directory.path().join("node1"),
        directory.path().join("elsewhere"),
    )
    .expect("moved");
    assert_says(&refusal(&config, &[]), &["data directory", "empty"]);
    fs::remove_dir_all(directory.path().join("node1")).expect("removed");
    fs::rename(
        directory.path().join("elsewhere"),
        directory.path().join("node1"),
    )
    .expect("moved back");

    fs::remove_file(region_of(&cluster)).expect("removed");
    assert_says(&refusal(&config, &[]), &["is gone", "must not come back"]);
    // Not even by mistake.
    assert_says(&refusal(&config, &["--bootstrap"]), &["is gone"]);
}

#[test]
fn garbage_is_counted_and_dropped_while_the_node_serves() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let mut cluster = single(directory.path(), first_port(2));
    cluster.start(0, true).expect("started");
    cluster
        .wait_for_leader(Duration::from_secs(10))
        .expect("a leader");
    let (redis_port, packet_port) = (cluster.nodes[0].redis, cluster.nodes[0].packet);
    let mut connection = resp::connect(redis_port, Duration::from_secs(5)).expect("connection");
    redis::cmd("SET")
        .arg("k")
        .arg("v")
        .query::<()>(&mut connection)
        .expect("SET");

    let socket = UdpSocket::bind("127.0.0.1:0").expect("socket");
    for length in [0usize, 1, 2, 11, 12, 47, 48, 49, 200, 1400, 8000] {
        for first in [0u8, 0xc9] {
            let mut packet: Vec<u8> = (0..length).map(|at| (at * 31 + length) as u8).collect();
            for kind in 0..6 {
                if length > 1 {
                    (packet[0], packet[1]) = (first, kind);
                }
                // Twice: the second one is a replay of the first.
                socket.send_to(&packet, packet_port).expect("sent");
                socket.send_to(&packet, packet_port).expect("sent");
            }
        }
    }
    let until = Instant::now() + Duration::from_secs(5);
    loop {
        let info = resp::info_of(&mut connection).expect("INFO");
        if info["packet_malformed"].parse::<u64>().expect("a number") > 50 {
            break;
        }
        assert!(Instant::now() < until, "garbage was not counted: {info:?}");
    }

    let talk = |request: &[u8]| {
        let mut stream = TcpStream::connect(redis_port).expect("connection");
        stream
            .set_read_timeout(Some(Duration::from_secs(5)))
            .expect("time limit");
        stream.write_all(request).expect("written");
        stream
            .shutdown(std::net::Shutdown::Write)
            .expect("half-closed");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("read");
        answer
    };
    assert_says(
        &talk(b"*1\r\n$abc\r\n"),
        &["-ERR Protocol error: invalid bulk length"],
    );
    assert_says(
        &talk(b"*99999999\r\n"),
        &["-ERR Protocol error: invalid multibulk length"],
    );
    assert_says(&talk(b"PING\r\n"), &["+PONG"]);
    assert_says(&talk(b"*2\r\n$4\r\nPING\r\n"), &[]);
    let oversize = format!(
        "*3\r\n$3\r\nSET\r\n$1\r\nk\r\n${}\r\n{}\r\nPING\r\n",
        (1 << 20) + 1,
        "x".repeat((1 << 20) + 1)
    );
    assert_says(&talk(oversize.as_bytes()), &["-ERR", "+PONG"]);
    let long_key = format!("*2\r\n$3\r\nGET\r\n$20000\r\n{}\r\n", "k".repeat(20_000));
    assert_says(&talk(long_key.as_bytes()), &["-ERR", "16384"]);

    let idle: Vec<TcpStream> = (0..2000)
        .map(|_| TcpStream::connect(redis_port).expect("idle"))
        .collect();
    let value: String = redis::cmd("GET")
        .arg("k")
        .query(&mut connection)
        .expect("served beside idle connections");
    assert_eq!(value, "v");
    drop(idle);

    // A clean end, and the data is there again.
    cluster.terminate(0).expect("ended");
    cluster.start(0, false).expect("started again");
    cluster
        .wait_for_leader(Duration::from_secs(10))
        .expect("a leader");
    let mut connection = resp::connect(redis_port, Duration::from_secs(5)).expect("connection");
    let value: String = redis::cmd("GET")
        .arg("k")
        .query(&mut connection)
        .expect("GET");
    assert_eq!(value, "v");
}

#[test]
fn a_port_in_use_and_a_full_device_are_named() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let cluster = single(directory.path(), first_port(3));
    let taken = std::net::TcpListener::bind(cluster.nodes[0].redis).expect("bound");
    assert_says(
        &refusal(&cluster.nodes[0].config, &["--bootstrap"]),
        &["Redis port", "in use"],
    );
    drop(taken);

    let small = directory.path().join("small");
    fs::create_dir(&small).expect("created");
    let mounted = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=1m", "tmpfs"])
        .arg(&small)
        .status();
    if !mounted.is_ok_and(|status| status.success()) {
        println!("skipped: a full device needs the right to mount a tmpfs");
        return;
    }
    let nvm = small.join("node1.nvm").display().to_string();
    let said = refusal(&cluster.nodes[0].config, &["--bootstrap", "--nvm", &nvm]);
    let left = fs::read_dir(&small).expect("listed").count();
    let unmounted = Command::new("umount").arg(&small).status().expect("umount");
    assert!(unmounted.success());
    assert_says(&said, &["reserve space", "No space left"]);
    assert_eq!(left, 0, "no half-made region is left behind");
}

//! Replies that are not read take much memory: each of many small values is its own block. When
//! their connections have ended, the node gives it back to the system.

mod common;

use std::io::Write as _;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use cyclone::cluster::Options;
use cyclone::resp;

const PATIENCE: Duration = Duration::from_secs(60);
const CONNECTIONS: usize = 160;
const KEYS: usize = 60_000;
const MIB: u64 = 1 << 20;

/// Memory of a process that is in RAM, bytes.
fn resident(process: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).expect("it runs");
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    kib.expect("VmRSS") * 1024
}

#[test]
fn memory_of_unread_replies_is_given_back() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let options = Options {
        replicas: 1,
        first_port: common::first_port(26_500, 0),
        engine: "memory".into(),
        ..Options::default()
    };
    let mut cluster = common::cluster(directory.path(), options);
    cluster.start(0, true).expect("started");
    let address = cluster.nodes[0].redis;
    let number = |name: &str| -> Option<u64> {
        let info = resp::info(address, Duration::from_secs(5)).ok()?;
        info.get(name)?.parse().ok()
    };
    let until = Instant::now() + PATIENCE;
    let mut connection = loop {
        match resp::connect(address, PATIENCE) {
            Ok(connection) => break connection,
            Err(error) => assert!(Instant::now() < until, "{error:#}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    while redis::cmd("SET")
        .arg("k")
        .arg("x")
        .query::<()>(&mut connection)
        .is_err()
    {
        assert!(Instant::now() < until, "no node leads");
    }
    let process = number("process_id").expect("process_id") as u32;
    let request = {
        let mut request = format!("*{}\r\n$4\r\nMGET\r\n", KEYS + 1).into_bytes();
        request.extend(b"$1\r\nk\r\n".repeat(KEYS));
        request
    };
    let before = resident(process);
    // More of them for each connection than the kernel takes, and nothing is read.
    let requests = request.repeat(30);
    let mut clients = Vec::new();
    for _ in 0..CONNECTIONS {
        let client = TcpStream::connect(address).expect("connected");
        client.set_nonblocking(true).expect("set");
        clients.push((client, 0));
    }
    let until = Instant::now() + PATIENCE;
    let (mut most, mut idle_since) = (0, Instant::now());
    while idle_since.elapsed() < Duration::from_secs(2) && Instant::now() < until {
        for (client, sent) in &mut clients {
            let piece = &requests[*sent..requests.len().min(*sent + (256 << 10))];
            if let Ok(count @ 1..) = client.write(piece) {
                *sent += count;
                idle_since = Instant::now();
            }
        }
        most = most.max(resident(process));
    }
    println!("{} MiB are taken", most.saturating_sub(before) / MIB);
    assert!(most > before + 128 * MIB, "{most} bytes, {before} before");
    drop(clients);
    let until = Instant::now() + PATIENCE;
    let mut now = resident(process);
    while now > before + 64 * MIB {
        assert!(Instant::now() < until, "{} MiB stay", (now - before) / MIB);
        std::thread::sleep(Duration::from_millis(200));
        now = resident(process);
    }
    println!("{} MiB stay", now.saturating_sub(before) / MIB);
}

//! The disk of the stores is full, with real processes: nobody ends, nothing acknowledged is lost, and all go on when there is room again.
//! Needs root, for a file system that is small.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use common::{cluster, first_port};
use cyclone::cluster::{LocalCluster, Options};
use cyclone::resp;

/// For one command: the store answers nothing while it waits for room.
const PATIENCE: Duration = Duration::from_secs(3);
/// Until what has to happen happens, on a busy machine.
const AT_LAST: Duration = Duration::from_secs(120);
const DISK_MIB: u64 = 256;
const VALUE_BYTES: usize = 8000;

/// A small file system, mounted until this is dropped.
struct Disk(PathBuf);

impl Disk {
    fn mount(at: &Path) -> Option<Disk> {
        fs::create_dir_all(at).expect("a directory");
        let size = format!("size={DISK_MIB}m");
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &size, "cyclone-test"])
            .arg(at)
            .status();
        let is_mounted = mounted.is_ok_and(|status| status.success());
        is_mounted.then(|| Disk(at.to_owned()))
    }

    /// Leaves so much of it free.
    fn fill(&self, free_mib: u64) -> PathBuf {
        let system = rustix::fs::statvfs(&self.0).expect("a file system");
        let free = system.f_bavail * system.f_frsize;
        let path = self.0.join("filler");
        let bytes = free.saturating_sub(free_mib << 20);
        fs::write(&path, vec![1u8; bytes as usize]).expect("room");
        path
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // Whoever had files there has been killed.
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

/// Bytes that do not compress.
fn value(number: u64) -> Vec<u8> {
    let mut state = number;
    let words = (0..VALUE_BYTES / 8).map(|_| {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed ^ mixed >> 27).to_le_bytes()
    });
    words.flatten().collect()
}

fn set(cluster: &LocalCluster, at: usize, number: u64) -> redis::RedisResult<()> {
    let mut connection = resp::connect(cluster.nodes[at].redis, PATIENCE).expect("connected");
    let mut command = redis::cmd("SET");
    command.arg(number).arg(value(number));
    command.query(&mut connection)
}

#[test]
fn a_full_disk_ends_nobody_and_loses_nothing() {
    let directory = tempfile::tempdir().expect("a directory");
    let Some(disk) = Disk::mount(&directory.path().join("disk")) else {
        println!("skipped: a file system cannot be mounted here (not root?)");
        return;
    };
    let mut cluster = cluster(
        &disk.0.join("cluster"),
        Options {
            nvm_bytes: 32 << 20,
            // Calm: one leader throughout, also on a busy machine.
            election_ms: Some(2000),
            first_port: first_port(17_000, 0),
            ..Options::default()
        },
    );
    cluster.start_all(true).expect("started");
    let leader = cluster.wait_for_leader(AT_LAST).expect("a leader");
    for number in 0..100 {
        set(&cluster, leader, number).expect("there is room");
    }
    let filler = disk.fill(24);

    let (mut acknowledged, mut refused) = (100, 0);
    let mut connection = resp::connect(cluster.nodes[leader].redis, PATIENCE).expect("connected");
    // What memory, log and disk hold together is far less.
    let most = (DISK_MIB << 20) / VALUE_BYTES as u64 * 4;
    while refused < 4 {
        assert!(acknowledged < most, "the disk is never full");
        let mut command = redis::cmd("SET");
        let stored = command
            .arg(acknowledged)
            .arg(value(acknowledged))
            .query::<()>(&mut connection);
        match stored {
            Ok(()) => (acknowledged, refused) = (acknowledged + 1, 0),
            Err(_) => {
                refused += 1;
                // A connection that has timed out is not at a beginning any more.
                connection =
                    resp::connect(cluster.nodes[leader].redis, PATIENCE).expect("connected");
            }
        }
    }
    println!("{acknowledged} values acknowledged until the disk was full");

    for node in &cluster.nodes {
        let mut connection = resp::connect(node.redis, PATIENCE).expect("alive");
        let pong: String = redis::cmd("PING").query(&mut connection).expect("alive");
        assert_eq!(pong, "PONG");
    }
    // Nobody is told of a state before what is committed.
    let leader = cluster.wait_for_leader(AT_LAST).expect("a leader");
    let mut connection = resp::connect(cluster.nodes[leader].redis, PATIENCE).expect("alive");
    let read: redis::RedisResult<Vec<u8>> = redis::cmd("GET").arg(7).query(&mut connection);
    assert!(read.is_err() || read.is_ok_and(|read| read == value(7)));
    assert!((0..3).all(|node| cluster.is_running(node)));

    fs::remove_file(filler).expect("removed");
    let until = Instant::now() + AT_LAST;
    loop {
        let leader = cluster.wait_for_leader(AT_LAST).expect("a leader");
        match set(&cluster, leader, u64::MAX) {
            Ok(()) => break,
            Err(error) => assert!(Instant::now() < until, "still refused: {error}"),
        }
    }
    let leader = cluster.wait_for_leader(AT_LAST).expect("a leader");
    let mut connection = resp::connect(cluster.nodes[leader].redis, AT_LAST).expect("connected");
    for number in (0..acknowledged).step_by(97).chain([acknowledged - 1]) {
        let read: Vec<u8> = redis::cmd("GET")
            .arg(number)
            .query(&mut connection)
            .expect("read");
        assert_eq!(read, value(number), "value {number}");
    }
    drop(connection);
    drop(cluster);
}

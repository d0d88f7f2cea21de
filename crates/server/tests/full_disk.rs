//! The disk of the stores is full, with real processes: no node ends, nothing acknowledged is lost,
//! a leader whose disk alone is full hands over, and all go on when there is room again. Needs
//! root, for a file system that is small.

mod common;

use std::fs;
use std::io::Write as _;
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
    fn mount(at: &Path, mib: u64) -> Option<Disk> {
        fs::create_dir_all(at).expect("a directory");
        let size = format!("size={mib}m");
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
        let mut left = free.saturating_sub(free_mib << 20) as usize;
        let mut file = fs::File::create(&path).expect("a file");
        let chunk = vec![1u8; 1 << 20];
        while left > 0 {
            // Others may have taken some of it meanwhile.
            match file.write(&chunk[..left.min(chunk.len())]) {
                Ok(written) => left -= written,
                Err(error) => {
                    assert_eq!(error.kind(), std::io::ErrorKind::StorageFull, "{error}");
                    break;
                }
            }
        }
        path
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // The processes with files there were killed.
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

/// Bytes that do not compress.
fn value(number: u64) -> Vec<u8> {
    bytes(number, VALUE_BYTES)
}

/// So many bytes that do not compress.
fn bytes(number: u64, length: usize) -> Vec<u8> {
    let mut state = number;
    let words = (0..length / 8).map(|_| {
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
fn a_full_disk_ends_no_node_and_loses_nothing() {
    let directory = tempfile::tempdir().expect("a directory");
    let Some(disk) = Disk::mount(&directory.path().join("disk"), DISK_MIB) else {
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
    // No reply shows a state before what is committed.
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

/// As in a log that fills up with large values.
const LARGE_BYTES: usize = 20_000;
const NODE_DISK_MIB: u64 = 192;

/// A cluster whose nodes have a disk each.
fn with_disks(directory: &Path, port: u16) -> Option<(LocalCluster, Vec<Disk>)> {
    let mut cluster = cluster(
        &directory.join("cluster"),
        Options {
            nvm_bytes: 32 << 20,
            first_port: first_port(17_000, port),
            ..Options::default()
        },
    );
    let mount = |node: &cyclone::cluster::Process| {
        let data = cluster.directory.join(format!("node{}", node.id));
        Disk::mount(&data, NODE_DISK_MIB)
    };
    let disks: Option<Vec<Disk>> = cluster.nodes.iter().map(mount).collect();
    if disks.is_none() {
        println!("skipped: a file system cannot be mounted here (not root?)");
    }
    let disks = disks?;
    cluster.start_all(true).expect("started");
    Some((cluster, disks))
}

/// Writes one large value at a node; every request is answered.
fn set_large(cluster: &LocalCluster, at: usize, number: u64) -> Result<(), String> {
    // A write that was taken in and cannot be carried out is answered after five seconds.
    let patience = Duration::from_secs(20);
    let mut connection = resp::connect(cluster.nodes[at].redis, patience).expect("connected");
    let mut command = redis::cmd("SET");
    command.arg(number).arg(bytes(number, LARGE_BYTES));
    match command.query::<()>(&mut connection) {
        Ok(()) => Ok(()),
        Err(error) => {
            assert!(!error.is_io_error(), "write {number} hangs: {error}");
            let known = [Some("TRYAGAIN"), Some("MOVED"), Some("CLUSTERDOWN")];
            let is_unknown = error.to_string().contains("outcome unknown");
            assert!(known.contains(&error.code()) || is_unknown, "{error}");
            Err(error.to_string())
        }
    }
}

fn fact(cluster: &LocalCluster, node: usize, name: &str) -> String {
    let mut connection = resp::connect(cluster.nodes[node].redis, AT_LAST).expect("alive");
    let info = resp::info_of(&mut connection).expect("INFO");
    info.get(name).cloned().unwrap_or_default()
}

fn count(cluster: &LocalCluster, node: usize, name: &str) -> u64 {
    fact(cluster, node, name).parse().unwrap_or(0)
}

#[track_caller]
fn holds_all(cluster: &mut LocalCluster, acknowledged: &[u64]) {
    let leader = cluster.wait_for_leader(AT_LAST).expect("a leader");
    let mut connection = resp::connect(cluster.nodes[leader].redis, AT_LAST).expect("alive");
    let last = acknowledged.len() - 1;
    for at in (0..last).step_by(61).chain([last]) {
        let number = acknowledged[at];
        let read: Vec<u8> = common::ask(&mut connection, redis::cmd("GET").arg(number));
        assert!(read == bytes(number, LARGE_BYTES), "value {number}");
    }
}

#[test]
fn a_leader_whose_disk_alone_is_full_hands_over_and_starts_and_stops_on_it() {
    let directory = tempfile::tempdir().expect("a directory");
    let Some((mut cluster, disks)) = with_disks(directory.path(), 1) else {
        return;
    };
    let full = cluster.wait_for_leader(AT_LAST).expect("a leader");
    let (mut acknowledged, mut number) = (Vec::new(), 0);
    while acknowledged.len() < 100 {
        if set_large(&cluster, full, number).is_ok() {
            acknowledged.push(number);
        }
        number += 1;
    }
    let filler = disks[full].fill(8);

    // What memory, log and disk hold together is far less.
    let most = number + (NODE_DISK_MIB << 20) / LARGE_BYTES as u64 * 2;
    let (mut at, mut elsewhere) = (full, 0);
    while elsewhere < 100 {
        assert!(number < most, "the leader's disk is never full");
        match set_large(&cluster, at, number) {
            Ok(()) => {
                acknowledged.push(number);
                elsewhere += u64::from(at != full);
            }
            Err(error) => {
                println!("write {number}: {error}");
                std::thread::sleep(Duration::from_millis(20));
                at = cluster.wait_for_leader(AT_LAST).expect("a leader");
            }
        }
        number += 1;
    }
    assert!(cluster.is_running(full));
    assert!(count(&cluster, full, "cyclone_handovers") > 0);
    assert!(count(&cluster, full, "cyclone_store_timeouts") > 0);
    let refused = count(&cluster, full, "cyclone_refused_busy")
        + count(&cluster, full, "cyclone_outcome_unknown");
    println!("{refused} requests refused or unknown at the old leader");
    assert_ne!(fact(&cluster, full, "cyclone_store_state"), "ok");
    holds_all(&mut cluster, &acknowledged);

    // It stops in order on its full disk, and waits for room to start: nothing is changed by
    // trying.
    let ended = cluster.terminate(full).expect("stopped");
    assert!(ended.is_some_and(|status| status.success()), "{ended:?}");
    // Whatever stopping has freed.
    let rest = disks[full].0.join("filler2");
    let mut file = fs::File::create(&rest).expect("a file");
    while file.write_all(&[1u8; 4096]).is_ok() {}
    drop(file);
    for _ in 0..2 {
        cluster.start(full, false).expect("started");
        let until = Instant::now() + Duration::from_secs(5);
        while Instant::now() < until && cluster.is_running(full) {
            std::thread::sleep(Duration::from_millis(50));
        }
        let log = cluster.directory.join(format!("node{}.log", full + 1));
        let log = fs::read_to_string(log).expect("a log");
        let runs = cluster.is_running(full);
        println!(
            "on a full disk it {}",
            if runs { "runs" } else { "does not start" }
        );
        assert!(runs || log.contains("No space left on device"), "{log}");
        cluster.kill(full).expect("killed");
    }
    fs::remove_file(rest).expect("removed");
    fs::remove_file(filler).expect("removed");
    cluster.start(full, false).expect("started");
    let leader = cluster.wait_for_leader(AT_LAST).expect("a leader");
    let until = Instant::now() + AT_LAST;
    let applied = |node| count(&cluster, node, "cyclone_log0_applied");
    cluster.wait_until_open(AT_LAST).expect("open");
    while applied(full) < applied(leader) {
        assert!(Instant::now() < until, "it does not catch up");
        std::thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(fact(&cluster, full, "cyclone_store_state"), "ok");
    holds_all(&mut cluster, &acknowledged);
    drop(cluster);
}

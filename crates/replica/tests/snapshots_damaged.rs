//! A table of the leader's store has rotted, and a follower needs a checkpoint: it fetches what is
//! of no use, lives on, and takes what is whole when there is such a thing.
#![cfg(feature = "rocksdb")]

mod common;

use std::fs;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cyclone_replica::{Config, Embedded, EmbeddedError, Engine};
use cyclone_wire::command::{Condition, Operation, Query};

const PATIENCE: Duration = Duration::from_secs(60);
const VALUE_BYTES: usize = 32 << 10;
const NVM_BYTES: u64 = 16 << 20;

/// The first of three ports in a row that are not in use, below the ephemeral ones.
fn free_ports(test: u16) -> u16 {
    let first = 19_000 + (std::process::id() % 90) as u16 * 10 + test * 5;
    let free = |port: u16| UdpSocket::bind((Ipv4Addr::LOCALHOST, port)).is_ok();
    (first..60_000)
        .find(|first| (*first..first + 3).all(free))
        .expect("free ports")
}

fn config(id: u64, first_port: u16, directory: &Path, bootstrap: bool) -> Config {
    Config {
        bootstrap,
        nvm_bytes: NVM_BYTES,
        engine: Engine::RocksDb,
        heartbeat: Duration::from_millis(50),
        // Calm: one leader throughout, also on a busy machine.
        election: Duration::from_millis(2000),
        ..common::config(id, 3, (first_port, 1), directory)
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

fn write(leader: &Embedded, numbers: std::ops::Range<u64>) {
    let until = Instant::now() + PATIENCE;
    for number in numbers {
        let (key, value) = (number.to_le_bytes(), value(number));
        let set = Operation::Set {
            key: &key,
            value: &value,
            condition: Condition::Always,
            get: false,
        };
        while let Err(error) = leader.write(&set) {
            assert!(
                error == EmbeddedError::Busy && Instant::now() < until,
                "{error}"
            );
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// The tables of a store, longest first.
fn tables(data: &Path) -> Vec<PathBuf> {
    let files = fs::read_dir(data.join("store/gen-0")).expect("a store");
    let mut tables: Vec<(u64, PathBuf)> = files
        .flatten()
        .filter(|file| file.path().extension().is_some_and(|kind| kind == "sst"))
        .filter_map(|file| Some((file.metadata().ok()?.len(), file.path())))
        .collect();
    tables.sort_unstable_by(|one, other| other.cmp(one));
    tables.into_iter().map(|(_, path)| path).collect()
}

/// How many fetches a replica has begun, as far as what it has on its disk tells.
fn fetches(data: &Path) -> u32 {
    let entries = fs::read_dir(data.join("snapshots")).into_iter().flatten();
    let number = |entry: fs::DirEntry| -> Option<u32> {
        let name = entry.file_name().into_string().ok()?;
        let number = name.strip_prefix("fetched-")?;
        number.split('.').next()?.parse().ok()
    };
    entries.flatten().filter_map(number).max().unwrap_or(0)
}

fn is_alive(replica: &Embedded) -> bool {
    !matches!(
        replica.read(&Query::Get { key: b"any" }),
        Err(EmbeddedError::Stopped)
    )
}

/// A follower that needs a checkpoint, and the leader's longest table with `damage` done to it.
/// `heal` undoes it.
fn lives_on(test: u16, damage: fn(&fs::File), heal: Option<fn(&fs::File)>) {
    let directory = tempfile::tempdir().expect("temporary directory");
    let (directory, port) = (directory.path(), free_ports(test));
    let start =
        |id, bootstrap| Embedded::start(config(id, port, directory, bootstrap)).expect("started");
    let data = |id: u64| directory.join(format!("data-{id}"));
    let mut replicas: Vec<Embedded> = (1..=3).map(|id| start(id, true)).collect();
    let until = Instant::now() + PATIENCE;
    let at = loop {
        if let Some(at) = replicas.iter().position(Embedded::leads) {
            break at;
        }
        assert!(Instant::now() < until, "no replica leads");
        std::thread::sleep(Duration::from_millis(5));
    };
    write(&replicas[at], 0..20);
    let behind = if at == 2 { 1 } else { 2 };
    drop(replicas.remove(behind));
    let (leader, leads) = (&replicas[at.min(1)], data(at as u64 + 1));
    // More than the log holds. With few tables left no compaction is near, which would find out.
    let mut written = 20;
    let table = loop {
        write(leader, written..written + 100);
        written += 100;
        if written * (VALUE_BYTES as u64) < 2 * NVM_BYTES {
            continue;
        }
        std::thread::sleep(Duration::from_millis(500));
        let tables = tables(&leads);
        if let [longest] | [longest, _] = &tables[..] {
            break longest.clone();
        }
        assert!(written < 20_000, "{} tables", tables.len());
    };
    let mut options = fs::OpenOptions::new();
    let file = options.read(true).write(true).open(table).expect("a table");
    damage(&file);

    let id = behind as u64 + 1;
    let follower = start(id, false);
    let pointer = data(id).join("store/CURRENT_GENERATION");
    let until = Instant::now() + PATIENCE;
    while fetches(&data(id)) < 2 {
        assert!(is_alive(&follower), "the follower has ended");
        assert!(!pointer.exists(), "the follower has installed it");
        assert!(Instant::now() < until, "it was not fetched twice");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(
        leader.leads(),
        "somebody else's checkpoint may have been fetched"
    );
    let Some(heal) = heal else { return };
    heal(&file);
    let until = Instant::now() + PATIENCE;
    while !pointer.exists() {
        assert!(is_alive(&follower), "the follower has ended");
        assert!(Instant::now() < until, "it was not installed");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn flip(file: &fs::File) {
    let (mut byte, middle) = ([0], file.metadata().expect("a file").len() / 2);
    file.read_exact_at(&mut byte, middle).expect("read");
    file.write_all_at(&[!byte[0]], middle).expect("written");
}

#[test]
fn a_follower_outlives_a_rotten_block() {
    lives_on(0, flip, Some(flip));
}

#[test]
fn a_follower_outlives_a_cut_table() {
    let cut = |file: &fs::File| {
        let length = file.metadata().expect("a file").len();
        file.set_len(length / 2).expect("cut");
    };
    lives_on(1, cut, None);
}

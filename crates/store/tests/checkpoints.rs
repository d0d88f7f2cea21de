//! Checkpoints that are not whole, and directories that are not: nothing that is sound gives way to
//! them.
#![cfg(feature = "rocksdb")]

mod support;

use std::fs;
use std::path::{Path, PathBuf};

use cyclone_store::{ApplyError, Mode, RocksKv, RocksOptions, StateMachine};
use support::{Engine, entry, operations, set};

fn apply(machine: &dyn StateMachine, index: u64, keys: std::ops::Range<u32>) {
    let keys: Vec<Vec<u8>> = keys.map(|n| format!("key:{n}").into_bytes()).collect();
    let value = |key: &[u8]| -> Vec<u8> {
        // Of many bytes, so that tables do not shrink to nothing.
        let sum = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, key);
        sum.to_le_bytes().repeat(6)
    };
    let values: Vec<Vec<u8>> = keys.iter().map(|key| value(key)).collect();
    let sets: Vec<_> = keys
        .iter()
        .zip(&values)
        .map(|(key, value)| set(key, value))
        .collect();
    machine
        .apply(0, &[entry(index, &operations(&sets))], Mode::Blocking)
        .unwrap();
}

/// The longest file whose name begins or ends so.
fn longest(directory: &Path, named: impl Fn(&str) -> bool) -> PathBuf {
    let files = fs::read_dir(directory).unwrap().flatten();
    let named = files.filter(|file| named(&file.file_name().to_string_lossy()));
    named
        .max_by_key(|file| file.metadata().unwrap().len())
        .expect("a file")
        .path()
}

type Damage<'a> = &'a dyn Fn(&Path);

fn cut(path: &Path) {
    let file = fs::OpenOptions::new().write(true).open(path).unwrap();
    let length = file.metadata().unwrap().len();
    file.set_len(length / 2).unwrap();
}

fn flip(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(path, bytes).unwrap();
}

/// A table had rotted at the leader. The follower that fetched the checkpoint ended, came back,
/// fetched it again, and so on; or took it.
#[test]
fn a_damaged_checkpoint_replaces_nothing_and_ends_no_node() {
    let root = tempfile::tempdir().unwrap();
    let source = Engine::Rocks.open(&root.path().join("source"), 1);
    (1..=4).for_each(|index| apply(&*source, index, 0..1000 * index as u32));
    let files = root.path().join("files");
    let meta = source.checkpoint(&files).unwrap();

    let home = root.path().join("home");
    let machine = Engine::Rocks.open(&home, 1);
    apply(&*machine, 1, 0..10);
    let mut before = machine.digest().unwrap();
    let is_table = |name: &str| name.ends_with(".sst");
    let is_manifest = |name: &str| name.starts_with("MANIFEST");
    let cut_table = |files: &Path| cut(&longest(files, is_table));
    let rotten_block = |files: &Path| flip(&longest(files, is_table));
    let no_table = |files: &Path| fs::remove_file(longest(files, is_table)).unwrap();
    let cut_manifest = |files: &Path| cut(&longest(files, is_manifest));
    let damages: [(&str, Damage); 4] = [
        ("a cut table", &cut_table),
        ("a rotten block", &rotten_block),
        ("a missing table", &no_table),
        ("a cut manifest", &cut_manifest),
    ];
    for (number, (what, damage)) in (2..).zip(damages) {
        let damaged = root.path().join(what);
        support::crash_copy(&files, &damaged);
        damage(&damaged);
        let refused = machine.install(&damaged);
        assert!(
            matches!(refused, Err(ApplyError::NotInstalled(_))),
            "{what}: {refused:?}"
        );
        assert_eq!(machine.digest().unwrap(), before, "{what}");
        let left = fs::read_dir(&home).unwrap().flatten();
        let left: Vec<_> = left.map(|entry| entry.file_name()).collect();
        assert_eq!(left, ["gen-0"], "{what}");
        apply(&*machine, number, 0..10);
        before = machine.digest().unwrap();
    }
    assert_eq!(machine.install(&files).unwrap(), meta);
    assert_eq!(machine.digest().unwrap(), source.digest().unwrap());
}

/// The pointer was lost, in a backup of files say. An empty database was made in place of the one
/// that it had named, which was removed.
#[test]
fn a_lost_pointer_removes_nothing() {
    let root = tempfile::tempdir().unwrap();
    let home = root.path().join("home");
    let machine = Engine::Rocks.open(&home, 1);
    apply(&*machine, 1, 0..10);
    let files = root.path().join("files");
    machine.checkpoint(&files).unwrap();
    machine.install(&files).unwrap();
    let digest = machine.digest().unwrap();
    drop(machine);
    let pointer = home.join("CURRENT_GENERATION");
    fs::remove_file(&pointer).unwrap();
    let refused = RocksKv::open(&home, &RocksOptions::default());
    let error = refused.err().expect("refused").to_string();
    assert!(
        error.contains("CURRENT_GENERATION") && error.contains("gen-1"),
        "{error}"
    );
    assert!(home.join("gen-1/CURRENT").exists() && !home.join("gen-0").exists());
    // As the error says.
    fs::write(&pointer, "1").unwrap();
    assert_eq!(Engine::Rocks.open(&home, 1).digest().unwrap(), digest);
}

/// The same of the memory engine's one file.
#[test]
fn a_damaged_file_replaces_no_memory() {
    let root = tempfile::tempdir().unwrap();
    let source = Engine::Memory.open(&root.path().join("source"), 1);
    apply(&*source, 1, 0..100);
    let files = root.path().join("files");
    source.checkpoint(&files).unwrap();
    let machine = Engine::Memory.open(&root.path().join("home"), 1);
    apply(&*machine, 1, 0..10);
    let before = machine.digest().unwrap();
    for damage in [flip as fn(&Path), cut] {
        damage(&longest(&files, |_| true));
        let refused = machine.install(&files).unwrap_err();
        assert!(
            matches!(refused, ApplyError::NotInstalled(_)),
            "{refused:?}"
        );
        assert_eq!(machine.digest().unwrap(), before);
    }
}

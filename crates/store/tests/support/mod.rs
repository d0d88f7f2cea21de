//! What the store's tests share: engines by name, entries, a crash.
#![allow(dead_code)] // each test file uses its part

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use cyclone_store::{EntryInput, KvMachine, Limits, MemoryKv, Mode, StateMachine};
#[cfg(feature = "rocksdb")]
use cyclone_store::{RocksKv, RocksOptions};
use cyclone_wire::batch::{self, Allowed};
use cyclone_wire::command::{Command, Condition, Operation, SessionTag};
use cyclone_wire::reply::Reply;

/// Small, so that tests reach it.
pub const MAX_VALUE_BYTES: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    Memory,
    #[cfg(feature = "rocksdb")]
    Rocks,
}

pub const ENGINES: &[Engine] = &[
    Engine::Memory,
    #[cfg(feature = "rocksdb")]
    Engine::Rocks,
];

impl Engine {
    pub fn open(self, directory: &Path, logs: u16) -> Box<dyn StateMachine> {
        self.open_with(directory, logs, MAX_VALUE_BYTES)
    }

    pub fn open_with(
        self,
        directory: &Path,
        logs: u16,
        max_value_bytes: usize,
    ) -> Box<dyn StateMachine> {
        // Most tests run on every engine: the output of one that fails ends with the engine.
        println!("engine {self:?}");
        let limits = Limits {
            max_value_bytes,
            max_sessions: Limits::MAX_SESSIONS,
        };
        match self {
            Engine::Memory => Box::new(
                KvMachine::open(MemoryKv::open(Some(directory)).unwrap(), logs, limits).unwrap(),
            ),
            #[cfg(feature = "rocksdb")]
            Engine::Rocks => {
                let options = RocksOptions {
                    block_cache_bytes: 1 << 20,
                    // Small, so that changes are at all stages of their way at once.
                    write_buffer_bytes: 512,
                };
                Box::new(
                    KvMachine::open(RocksKv::open(directory, &options).unwrap(), logs, limits)
                        .unwrap(),
                )
            }
        }
    }
}

/// What a crash leaves of `from`, as `to`: its files as they are, none of the memory. Closing the
/// database instead would flush it. Copied again until nothing has moved meanwhile: a compaction in
/// between would mix two moments, which no crash does.
pub fn crash_copy(from: &Path, to: &Path) {
    for _ in 0..1000 {
        let before = listing(from);
        let copied = copy(from, to);
        if copied.is_ok() && listing(from) == before {
            return;
        }
        fs::remove_dir_all(to).unwrap();
    }
    panic!("{} does not come to rest", from.display());
}

/// Names and sizes, without RocksDB's text log.
fn listing(directory: &Path) -> Option<BTreeMap<PathBuf, u64>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(directory).ok()? {
        let path = entry.ok()?.path();
        if path.is_dir() {
            found.extend(listing(&path)?);
        } else if !path.ends_with("LOG") {
            let len = fs::metadata(&path).ok()?.len();
            found.insert(path, len);
        }
    }
    Some(found)
}

fn copy(from: &Path, to: &Path) -> std::io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}

pub fn tag(session: u64, seq: u64, acked_below: u64) -> Option<SessionTag> {
    Some(SessionTag {
        session,
        seq,
        acked_below,
    })
}

pub fn command(session: Option<SessionTag>, operation: Operation<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    Command { session, operation }.encode(&mut bytes);
    bytes
}

pub fn set<'a>(key: &'a [u8], value: &'a [u8]) -> Operation<'a> {
    Operation::Set {
        key,
        value,
        condition: Condition::Always,
        get: false,
    }
}

pub fn incr(key: &[u8]) -> Operation<'_> {
    Operation::IncrBy { key, delta: 1 }
}

pub fn payload(commands: &[Vec<u8>]) -> Vec<u8> {
    let mut writer = batch::Writer::new();
    for command in commands {
        writer.push(|out| out.extend_from_slice(command));
    }
    writer.finish(0)
}

/// An entry of a leader that allows so much.
pub fn allowed(commands: &[Vec<u8>], allowed: Allowed) -> Vec<u8> {
    let mut bytes = batch::header(commands.len() as u32, 0, allowed).to_vec();
    for command in commands {
        bytes.extend_from_slice(&(command.len() as u32).to_le_bytes());
        bytes.extend_from_slice(command);
    }
    bytes
}

/// Applies entries to their end, in as many calls as that takes. Answers the replies per entry, and
/// the calls.
pub fn apply_all(
    machine: &dyn StateMachine,
    mut entries: &[EntryInput<'_>],
) -> (Vec<Vec<Reply>>, usize) {
    let (mut replies, mut calls) = (Vec::new(), 0);
    let mut part = Vec::new();
    while !entries.is_empty() {
        let mut applied = machine.apply(0, entries, Mode::Blocking).unwrap();
        calls += 1;
        let whole = applied.whole();
        for (place, some) in applied.replies.drain(..).enumerate() {
            part.extend(some);
            if place < whole {
                replies.push(std::mem::take(&mut part));
            }
        }
        entries = &entries[whole..];
    }
    (replies, calls)
}

pub fn operations(operations: &[Operation<'_>]) -> Vec<u8> {
    payload(
        &operations
            .iter()
            .map(|operation| command(None, operation.clone()))
            .collect::<Vec<_>>(),
    )
}

pub fn entry(index: u64, payload: &[u8]) -> EntryInput<'_> {
    EntryInput {
        index,
        term: 1,
        payload,
        wants_replies: true,
    }
}

/// How many records the machine has stored.
pub fn records(machine: &dyn StateMachine) -> u64 {
    let digest = machine.digest().unwrap();
    digest.split('-').nth(1).unwrap().parse().unwrap()
}

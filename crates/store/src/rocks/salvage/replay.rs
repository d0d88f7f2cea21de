//! Entries of the log, applied to what was salvaged.
//!
//! An entry that reads a lost key computes with nothing in its place, and finds other conditions
//! than it found before. All keys that it names or writes are lost, too, until an entry that reads
//! no lost key writes them. In the end sessions are removed: the replies that they keep may come
//! from lost keys.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cyclone_wire::batch;
use cyclone_wire::command::{Command, Operation, Query};
use cyclone_wire::reply::Reply;
use rocksdb::DB;

use super::{RocksSalvage, get};
use crate::damage::StoreDamage;
use crate::kv::{Change, Found, Kv, View, data_key, space};
use crate::kv_machine::{KvMachine, Limits};
use crate::machine::{Applied, ApplyError, CheckpointMeta, EntryInput, Mode, StateMachine};
use crate::rocks::{RocksKv, RocksOptions};

/// A copy of what was readable, to which entries of the log are applied. All keys that a call
/// writes are lost where it reads a lost one: one entry in each call loses the fewest.
pub struct SalvagedStore {
    machine: KvMachine<SalvagedKv>,
    copy: Arc<Copy>,
    target: PathBuf,
    damage: StoreDamage,
    options: RocksOptions,
}

/// The copy, and what is known of it.
struct Copy {
    kv: RocksKv,
    source: Arc<DB>,
    replay: Mutex<Replay>,
}

/// Which keys are known while entries are applied.
#[derive(Default)]
struct Replay {
    /// All keys were removed: what the damaged blocks held counts for nothing.
    is_cleared: bool,
    /// Whether all keys were removed depends on a lost key: all are lost.
    is_all_lost: bool,
    /// The present call has read a lost key.
    has_read_lost: bool,
    /// The last call had.
    has_lost: bool,
    /// Keys that were written by what had read a lost key.
    lost: BTreeSet<Vec<u8>>,
    /// Keys that were removed by what had not.
    removed: BTreeSet<Vec<u8>>,
    /// Keys that were lost together.
    lost_together: u64,
}

fn is_data(key: &[u8]) -> bool {
    key.first() == Some(&space::DATA)
}

/// What removes all keys.
fn clear() -> [Change<'static>; 2] {
    [
        Change::DeleteRange(&[space::DATA], &[space::DATA_END]),
        Change::DeleteRange(&[space::DEADLINE], &[space::DEADLINE_END]),
    ]
}

impl Replay {
    /// Notes a change of a call that has read no lost key.
    fn note(&mut self, change: &Change<'_>) {
        match *change {
            Change::Put(key, _) if is_data(key) => {
                self.lost.remove(key);
                self.removed.remove(key);
            }
            Change::Delete(key) if is_data(key) => {
                self.lost.remove(key);
                if !self.is_cleared {
                    self.removed.insert(key.to_vec());
                }
            }
            Change::DeleteRange(from, _) if is_data(from) => {
                *self = Replay {
                    is_cleared: true,
                    ..Replay::default()
                };
            }
            _ => {}
        }
    }

    /// What becomes of a change of a call that has read a lost key.
    fn lose<'c>(&mut self, change: Change<'c>) -> Option<Change<'c>> {
        match change {
            Change::Put(key, _) | Change::Delete(key) if is_data(key) => {
                self.removed.remove(key);
                self.lost.insert(key.to_vec());
                Some(Change::Delete(key))
            }
            Change::Put(key, _) if key.first() == Some(&space::DEADLINE) => None,
            other => {
                self.note(&other);
                Some(other)
            }
        }
    }
}

impl Copy {
    fn lock(&self) -> MutexGuard<'_, Replay> {
        self.replay.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a damaged block may hold a stored data key, perhaps as the first format stored it.
    fn is_unreadable(&self, key: &[u8]) -> bool {
        let mut old = key.to_vec();
        old[0] = space::OLD_DATA;
        get(&self.source, key).is_err() || get(&self.source, &old).is_err()
    }

    /// Notes whether a key that is not there is a lost one.
    fn note_missing(&self, key: &[u8]) {
        let mut replay = self.lock();
        if !is_data(key) || replay.has_read_lost || replay.removed.contains(key) {
            return;
        }
        replay.has_read_lost = replay.is_all_lost
            || replay.lost.contains(key)
            || !replay.is_cleared && self.is_unreadable(key);
    }

    /// The keys that an entry names are lost if it has read a lost one.
    fn lose_named(&self, payload: &[u8]) -> Result<(), ApplyError> {
        if !std::mem::take(&mut self.lock().has_lost) {
            return Ok(());
        }
        let Ok(commands) = batch::iter(payload) else {
            return Ok(());
        };
        for command in commands.filter_map(|bytes| Command::decode(bytes).ok()) {
            let operation = &command.operation;
            let is_conditional = matches!(operation, Operation::Batch { .. });
            if is_conditional && operation.concerns_all_keys() {
                self.lose_all()?;
            }
            for key in operation.keys().iter() {
                let stored = data_key(key);
                let change = self.lock().lose(Change::Delete(&stored));
                self.kv.write(&mut change.into_iter(), Mode::Blocking)?;
            }
        }
        Ok(())
    }

    fn lose_all(&self) -> Result<(), ApplyError> {
        let mut count = 0;
        self.kv.scan(&[space::DATA], &mut |key, _| {
            count += u64::from(is_data(key));
            is_data(key)
        })?;
        let mut replay = self.lock();
        *replay = Replay {
            is_all_lost: true,
            lost_together: replay.lost_together + count,
            ..Replay::default()
        };
        self.kv.write(&mut clear().into_iter(), Mode::Blocking)
    }
}

impl SalvagedStore {
    pub(super) fn new(
        from: RocksSalvage,
        kv: RocksKv,
        target: &Path,
        limits: Limits,
    ) -> Result<SalvagedStore, ApplyError> {
        let logs = from.applied.len() as u16;
        let copy = Arc::new(Copy {
            kv,
            source: from.source,
            replay: Mutex::default(),
        });
        Ok(SalvagedStore {
            machine: KvMachine::open(SalvagedKv(Arc::clone(&copy)), logs, limits)?,
            copy,
            target: target.to_owned(),
            damage: from.damage,
            options: from.options,
        })
    }

    /// Ends the replay: the copy is durable. Answers what is lost.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn finish(self) -> Result<StoreDamage, ApplyError> {
        self.machine.flush()?;
        let mut damage = self.damage;
        let replay = std::mem::take(&mut *self.copy.lock());
        // The others are counted already.
        let known = replay.lost.iter();
        let known = known.filter(|key| replay.is_cleared || !self.copy.is_unreadable(key));
        damage.dependent_keys = known.count() as u64 + replay.lost_together;
        drop((self.machine, self.copy));
        let kv = RocksKv::open(&self.target, &self.options)?;
        let sessions = Change::DeleteRange(&[space::SESSION], &[space::SESSION + 1]);
        kv.write(&mut [sessions].into_iter(), Mode::Blocking)?;
        kv.flush()?;
        Ok(damage)
    }
}

impl StateMachine for SalvagedStore {
    fn apply(
        &self,
        log: u16,
        entries: &[EntryInput<'_>],
        mode: Mode,
    ) -> Result<Applied, ApplyError> {
        let one = &entries[..entries.len().min(1)];
        let applied = self.machine.apply(log, one, mode)?;
        for entry in one {
            self.copy.lose_named(entry.payload)?;
        }
        Ok(applied)
    }

    fn apply_gang(
        &self,
        parts: &[(u16, EntryInput<'_>)],
        mode: Mode,
    ) -> Result<Vec<Reply>, ApplyError> {
        let replies = self.machine.apply_gang(parts, mode)?;
        // The first one's payload holds the commands.
        for (_, entry) in parts.iter().take(1) {
            self.copy.lose_named(entry.payload)?;
        }
        Ok(replies)
    }

    fn query(&self, query: &Query<'_>, mode: Mode) -> Result<Reply, ApplyError> {
        self.machine.query(query, mode)
    }

    fn clock_ms(&self, log: u16) -> u64 {
        self.machine.clock_ms(log)
    }

    fn applied(&self, log: u16) -> (u64, u64) {
        self.machine.applied(log)
    }

    fn flushed(&self, log: u16) -> u64 {
        self.machine.flushed(log)
    }

    fn flush(&self) -> Result<(), ApplyError> {
        self.machine.flush()
    }

    fn checkpoint(&self, directory: &Path) -> Result<CheckpointMeta, ApplyError> {
        self.machine.checkpoint(directory)
    }

    fn install(&self, directory: &Path) -> Result<CheckpointMeta, ApplyError> {
        self.machine.install(directory)
    }

    fn digest(&self) -> Result<String, ApplyError> {
        self.machine.digest()
    }
}

/// The copy, as entries of the log find it.
struct SalvagedKv(Arc<Copy>);

impl Kv for SalvagedKv {
    fn get(&self, key: &[u8], mode: Mode) -> Result<Option<Vec<u8>>, ApplyError> {
        let found = self.0.kv.get(key, mode)?;
        if found.is_none() {
            self.0.note_missing(key);
        }
        Ok(found)
    }

    /// One thread applies entries: nothing changes between two keys.
    fn get_many(
        &self,
        keys: &[Vec<u8>],
        mode: Mode,
        visit: &mut Found<'_>,
    ) -> Result<(), ApplyError> {
        for key in keys {
            if !visit(self.get(key, mode)?.map(Into::into)) {
                break;
            }
        }
        Ok(())
    }

    fn write(
        &self,
        changes: &mut dyn Iterator<Item = Change<'_>>,
        mode: Mode,
    ) -> Result<(), ApplyError> {
        let mut replay = self.0.lock();
        let has_lost = std::mem::take(&mut replay.has_read_lost);
        let mut kept = Vec::new();
        for change in changes {
            match has_lost {
                true => kept.extend(replay.lose(change)),
                false => {
                    replay.note(&change);
                    kept.push(change);
                }
            }
        }
        replay.has_lost = has_lost;
        self.0.kv.write(&mut kept.into_iter(), mode)
    }

    fn scan(
        &self,
        from: &[u8],
        visit: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<(), ApplyError> {
        self.0.kv.scan(from, visit)
    }

    fn scans_without_blocking(&self) -> bool {
        self.0.kv.scans_without_blocking()
    }

    fn flush(&self) -> Result<bool, ApplyError> {
        self.0.kv.flush()
    }

    fn hold(&self) -> Result<Box<dyn View>, ApplyError> {
        self.0.kv.hold()
    }

    fn checkpoint(&self, directory: &Path) -> Result<(), ApplyError> {
        self.0.kv.checkpoint(directory)
    }

    fn install(&self, directory: &Path) -> Result<(), ApplyError> {
        self.0.kv.install(directory)
    }
}

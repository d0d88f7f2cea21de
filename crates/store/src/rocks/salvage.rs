//! What can be read of a database with damaged blocks, for `cyclone recover`.
//!
//! The keys come from the tables' intact blocks ([`super::sst`]), the values from RocksDB's point
//! lookups. A lookup fails where a damaged block may hold a newer value than the intact ones. Hence
//! no overwritten value and no removed key comes back:
//!
//! | lookup of a key   | the key                                                          |
//! |-------------------|------------------------------------------------------------------|
//! | a value           | has it                                                           |
//! | nothing           | was removed                                                      |
//! | error             | is lost: a damaged block may hold its last value                 |
//!
//! Deadlines are made anew from the values. Entries of the log are applied to the copy
//! ([`replay`]).

mod replay;

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::path::Path;
use std::sync::Arc;

use rocksdb::DB;

use super::sst::Table;
use super::{RocksKv, RocksOptions, current, fatal, options, path_of, read_options};
use crate::damage::{DamagedFile, StoreDamage};
use crate::deadlines;
use crate::kv::{Change, Kv, read_item, space, stored_place};
use crate::kv_machine::{Limits, place_key, read_place};
use crate::machine::{ApplyError, Mode};
use crate::membership::MembershipStore;

pub use replay::SalvagedStore;

/// Bytes written to the copy at once.
const BATCH_BYTES: usize = 4 << 20;

/// Keys between which something is damaged, both included.
type KeyRange = (Vec<u8>, Vec<u8>);

/// What a key and its value are shown to.
type VisitValue<'v> = dyn FnMut(&[u8], &[u8]) -> Result<(), ApplyError> + 'v;

/// Keys of intact blocks whose last value a damaged block may hold.
#[derive(Default)]
struct LostKeys {
    /// Of users.
    keys: u64,
    /// Records of sessions are among them.
    has_sessions: bool,
}

impl LostKeys {
    fn note(&mut self, key: &[u8]) {
        match key.first() {
            Some(&(space::DATA | space::OLD_DATA)) => self.keys += 1,
            Some(&space::SESSION) => self.has_sessions = true,
            _ => {}
        }
    }
}

/// A damaged database, opened to be read.
pub struct RocksSalvage {
    source: Arc<DB>,
    tables: Vec<Table>,
    ranges: Vec<KeyRange>,
    damage: StoreDamage,
    applied: Vec<(u64, u64)>,
    options: RocksOptions,
}

impl RocksSalvage {
    /// Reads all of the database below `directory`, and changes nothing. `None`: no block is
    /// damaged.
    ///
    /// # Errors
    /// What else keeps the database from being read; a damaged block that holds the place of one of
    /// the `logs`, or its members.
    pub fn find(
        directory: &Path,
        logs: u16,
        tuning: &RocksOptions,
    ) -> Result<Option<RocksSalvage>, ApplyError> {
        let path = path_of(directory, current(directory)?.unwrap_or(0));
        if !path.exists() {
            return Err(ApplyError::Fatal(format!(
                "{} is missing: this replica has lost its store, and its log alone does not replace it; recover from another \
                 replica, or restore a backup",
                path.display()
            )));
        }
        let mut reading = options(tuning, false);
        // A table that does not open fails the lookups in it, and not the database.
        reading.set_paranoid_checks(false);
        let source = DB::open_for_read_only(&reading, &path, false).map_err(|error| {
            ApplyError::Damaged(format!(
                "rocksdb: {error}. The list of the store's files (CURRENT, MANIFEST) does not read: recover from another \
                 replica, or restore a backup"
            ))
        })?;
        let mut found = RocksSalvage {
            source: Arc::new(source),
            tables: Vec::new(),
            ranges: Vec::new(),
            damage: StoreDamage {
                keys: Some(0),
                ..StoreDamage::default()
            },
            applied: Vec::new(),
            options: tuning.clone(),
        };
        found.check_tables(&path)?;
        if found.damage.files.is_empty() {
            return Ok(None);
        }
        found.ranges = merged(std::mem::take(&mut found.ranges));
        found.read_places(logs)?;
        let lost = found.visit(|key| found.is_in_range(key), &mut |_, _| Ok(()))?;
        found.damage.keys = found.damage.keys.map(|keys| keys + lost.keys);
        found.damage.has_lost_sessions |= lost.has_sessions;
        Ok(Some(found))
    }

    /// What is damaged.
    pub fn damage(&self) -> &StoreDamage {
        &self.damage
    }

    /// Per log, the applied index and its term.
    pub fn applied(&self) -> &[(u64, u64)] {
        &self.applied
    }

    fn check_tables(&mut self, path: &Path) -> Result<(), ApplyError> {
        for live in self.source.live_files().map_err(fatal)? {
            let name = live.name.trim_start_matches('/').to_owned();
            let smallest = live.start_key.unwrap_or_default();
            let largest = live.end_key.unwrap_or_default();
            let table = match Table::open(&path.join(&name)) {
                Ok(table) => table,
                Err(what) => {
                    self.note_range(smallest, largest);
                    self.note(name, 0, None, what);
                    continue;
                }
            };
            let (mut blocks, first) = table.meta_damage.clone();
            let (mut read, mut what) = (0, first);
            if blocks > 0 {
                // RocksDB may read the table without them, or refuse all of it.
                self.ranges.push((smallest.clone(), largest));
            }
            for block in 0..table.block_count() {
                match table.keys(block) {
                    Ok(keys) => read += keys.len() as u64,
                    Err(error) => {
                        let (from, to) = table.bounds(block);
                        let from = from.map_or_else(|| smallest.clone(), <[u8]>::to_vec);
                        self.note_range(from, to.to_vec());
                        blocks += 1;
                        what.get_or_insert(error);
                    }
                }
            }
            if let Some(what) = what {
                let entries = table.entries.saturating_sub(read);
                self.note(name, blocks, Some(entries), what);
            }
            self.tables.push(table);
        }
        Ok(())
    }

    /// Notes between which keys a damaged block, or file, lies.
    fn note_range(&mut self, from: Vec<u8>, to: Vec<u8>) {
        self.damage.has_lost_sessions |=
            from[..] < [space::SESSION + 1][..] && to[..] >= [space::SESSION][..];
        self.ranges.push((from, to));
    }

    fn note(&mut self, name: String, blocks: u64, entries: Option<u64>, what: String) {
        self.damage.keys = (self.damage.keys.zip(entries)).map(|(all, more)| all + more);
        self.damage.files.push(DamagedFile {
            name,
            blocks,
            entries,
            what,
        });
    }

    /// Without the places of all logs nothing says which entries the values come from.
    fn read_places(&mut self, logs: u16) -> Result<(), ApplyError> {
        let get = |key: &[u8]| get(&self.source, key);
        let lost = |error: rocksdb::Error| {
            let files = self.damage.files.iter();
            let names: Vec<&str> = files.map(|file| &file.name[..]).collect();
            ApplyError::Damaged(format!(
                "rocksdb: {error}. A damaged block of {} holds up to which entry the store has the log, or its members: nothing \
                 can be recovered from this replica",
                names.join(", ")
            ))
        };
        let mut applied = Vec::new();
        for log in 0..logs {
            let place = get(&place_key(log)).map_err(lost)?;
            applied.push(read_place(log, place.as_deref())?);
        }
        for key in MembershipStore::keys(logs) {
            get(&key).map_err(lost)?;
        }
        self.applied = applied;
        Ok(())
    }

    fn is_in_range(&self, key: &[u8]) -> bool {
        let after = self.ranges.partition_point(|(from, _)| from[..] <= *key);
        after > 0 && *key <= self.ranges[after - 1].1[..]
    }

    /// Looks up all `wanted` keys of intact blocks, in order. Answers how many are lost.
    fn visit(
        &self,
        wanted: impl Fn(&[u8]) -> bool,
        visit: &mut VisitValue<'_>,
    ) -> Result<LostKeys, ApplyError> {
        let mut cursors: Vec<Cursor<'_>> = self.tables.iter().map(Cursor::new).collect();
        let mut heads = BinaryHeap::new();
        for (at, cursor) in cursors.iter_mut().enumerate() {
            heads.extend(cursor.next().map(|key| Reverse((key, at))));
        }
        let (mut last, mut lost) = (None, LostKeys::default());
        while let Some(Reverse((key, at))) = heads.pop() {
            heads.extend(cursors[at].next().map(|key| Reverse((key, at))));
            if last.as_ref() == Some(&key) || !wanted(&key) {
                continue;
            }
            match get(&self.source, &key) {
                Ok(Some(value)) => visit(&key, &value)?,
                Ok(None) => {}
                Err(_) if self.is_in_range(&key) => lost.note(&key),
                Err(error) => return Err(super::read_error(error, Mode::Blocking)),
            }
            last = Some(key);
        }
        Ok(lost)
    }

    /// Copies what is readable into a new database below `target`.
    ///
    /// # Errors
    /// When the target cannot be written; a read that fails for another reason than damage.
    pub fn copy_to(self, target: &Path, limits: Limits) -> Result<SalvagedStore, ApplyError> {
        let kv = RocksKv::open(target, &self.options)?;
        let logs = self.applied.len() as u16;
        let mut batch = Batch::default();
        // Records of deadlines may be lost while their keys are not.
        let is_kept = |key: &[u8]| key.first() != Some(&space::DEADLINE);
        self.visit(is_kept, &mut |key, value| {
            batch.put(key.to_vec(), value.to_vec());
            if key.first() == Some(&space::DATA)
                && let Some(deadline) = read_item(value.into())?.deadline
            {
                let slot = (stored_place(key) >> 32) as u16;
                let record = deadlines::record(slot % logs.max(1), deadline, key);
                batch.put(record, Vec::new());
            }
            match batch.bytes >= BATCH_BYTES {
                true => batch.write(&kv),
                false => Ok(()),
            }
        })?;
        batch.write(&kv)?;
        kv.flush()?;
        SalvagedStore::new(self, kv, target, limits)
    }
}

fn get(source: &DB, key: &[u8]) -> Result<Option<Vec<u8>>, rocksdb::Error> {
    source.get_opt(key, &read_options(Mode::Blocking))
}

/// Ranges in order that do not overlap.
fn merged(mut ranges: Vec<KeyRange>) -> Vec<KeyRange> {
    ranges.sort();
    let mut merged: Vec<KeyRange> = Vec::new();
    for (from, to) in ranges {
        match merged.last_mut() {
            Some(last) if from <= last.1 => last.1 = to.max(std::mem::take(&mut last.1)),
            _ => merged.push((from, to)),
        }
    }
    merged
}

/// The keys of a table's intact blocks, in order.
struct Cursor<'t> {
    table: &'t Table,
    next_block: usize,
    keys: std::vec::IntoIter<Vec<u8>>,
}

impl<'t> Cursor<'t> {
    fn new(table: &'t Table) -> Cursor<'t> {
        Cursor {
            table,
            next_block: 0,
            keys: Vec::new().into_iter(),
        }
    }

    fn next(&mut self) -> Option<Vec<u8>> {
        loop {
            if let Some(key) = self.keys.next() {
                return Some(key);
            }
            if self.next_block == self.table.block_count() {
                return None;
            }
            // A damaged block is passed over.
            let keys = self.table.keys(self.next_block).unwrap_or_default();
            self.keys = keys.into_iter();
            self.next_block += 1;
        }
    }
}

/// Pairs that are written together.
#[derive(Default)]
struct Batch {
    pairs: Vec<(Vec<u8>, Vec<u8>)>,
    bytes: usize,
}

impl Batch {
    fn put(&mut self, key: Vec<u8>, value: Vec<u8>) {
        self.bytes += key.len() + value.len();
        self.pairs.push((key, value));
    }

    fn write(&mut self, kv: &RocksKv) -> Result<(), ApplyError> {
        let pairs = std::mem::take(&mut self.pairs);
        self.bytes = 0;
        let mut changes = pairs.iter().map(|(key, value)| Change::Put(key, value));
        kv.write(&mut changes, Mode::Blocking)
    }
}

#[cfg(test)]
mod tests;

//! One moment's state: a snapshot of the database, and above it the tables that had not reached it.

use std::borrow::Cow;
use std::sync::Arc;

use rocksdb::{DB, ErrorKind, ReadOptions};

use super::read_error;
use super::table::FrozenTable;
use super::write_buffer::WriteBuffer;
use crate::kv::{Found, View};
use crate::machine::{ApplyError, Mode};

type DbSnapshot<'db> = rocksdb::Snapshot<'db>;

self_cell::self_cell!(
    /// A snapshot, and the database that it is of.
    struct HeldDb {
        owner: Arc<DB>,
        #[covariant]
        dependent: DbSnapshot,
    }
);

/// The state as of one moment.
pub(super) struct SnapshotView {
    below: HeldDb,
    /// Newest first.
    write_buffer: Vec<Arc<FrozenTable>>,
}

impl SnapshotView {
    /// This moment.
    pub(super) fn new(db: &Arc<DB>, write_buffer: &WriteBuffer) -> SnapshotView {
        let snapshot = || HeldDb::new(Arc::clone(db), |db| db.snapshot());
        let (write_buffer, below) = write_buffer.freeze_and_snapshot(snapshot);
        SnapshotView {
            below,
            write_buffer,
        }
    }

    /// As [`Kv::get_many`](crate::kv::Kv::get_many).
    pub(super) fn get_many(
        &self,
        keys: &[Vec<u8>],
        visit: &mut Found<'_>,
    ) -> Result<(), ApplyError> {
        let below = self.below.borrow_dependent();
        for key in keys {
            let goes_on = match self.write_buffer.iter().find_map(|table| table.get(key)) {
                Some(value) => visit(value.map(Cow::Borrowed)),
                None => {
                    let stored = below.get_pinned(key);
                    let stored = stored.map_err(|error| read_error(error, Mode::Blocking))?;
                    visit(stored.as_deref().map(Cow::Borrowed))
                }
            };
            if !goes_on {
                break;
            }
        }
        Ok(())
    }
}

impl View for SnapshotView {
    fn scan(
        &self,
        from: &[u8],
        visit: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<(), ApplyError> {
        self.walk(from, None, ReadOptions::default(), visit)
            .map(|_| ())
    }
}

impl SnapshotView {
    /// As [`Kv::scan_some`](crate::kv::Kv::scan_some).
    pub(super) fn scan_some(
        &self,
        from: &[u8],
        to: &[u8],
        most_gone: Option<u64>,
        visit: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<bool, ApplyError> {
        let mut options = ReadOptions::default();
        options.set_iterate_upper_bound(to);
        options.set_max_skippable_internal_keys(most_gone.unwrap_or(0));
        self.walk(from, Some(to), options, visit)
    }

    /// Visits keys in order; returns whether it got as far as was wanted.
    fn walk(
        &self,
        from: &[u8],
        to: Option<&[u8]>,
        mut options: ReadOptions,
        visit: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<bool, ApplyError> {
        options.fill_cache(false);
        let mut below = self.below.borrow_dependent().raw_iterator_opt(options);
        below.seek(from);
        let mut write_buffer: Vec<_> = self
            .write_buffer
            .iter()
            .map(|table| table.walk(from))
            .collect();
        loop {
            let firsts = write_buffer.iter_mut().filter_map(|walk| walk.peek());
            let first = firsts.map(|(key, _)| *key).min();
            let stored = below.item();
            if stored.is_none() {
                // Its end, or it has passed over too much, or it could not be read.
                match below.status() {
                    Err(error) if error.kind() == ErrorKind::Incomplete => return Ok(false),
                    status => status.map_err(|error| read_error(error, Mode::Blocking))?,
                }
            }
            let key = match (first, stored) {
                (Some(first), Some((key, _))) => first.min(key),
                (Some(first), None) => first,
                (None, Some((key, _))) => key,
                (None, None) => break,
            };
            if to.is_some_and(|to| key >= to) {
                break;
            }
            let is_stored = stored.is_some_and(|(other, _)| other == key);
            // The newest that says anything counts.
            let mut newest = None;
            for walk in &mut write_buffer {
                if let Some((_, change)) = walk.next_if(|(other, _)| *other == key) {
                    newest.get_or_insert(change);
                }
            }
            let value = match newest {
                Some(change) => change,
                None => stored.map(|(_, value)| value),
            };
            if value.is_some_and(|value| !visit(key, value)) {
                return Ok(true);
            }
            if is_stored {
                below.next();
            }
        }
        Ok(true)
    }
}

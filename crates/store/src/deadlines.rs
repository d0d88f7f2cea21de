//! Which keys expire when: an index beside the data, so that expired keys are found without a scan
//! of all keys.
//!
//! A record is written with every value that has a deadline. It goes when the deadline is changed
//! by a command that reads the key; a SET without a deadline must not read, and leaves the old
//! record behind. A sweep takes the records that are due and removes the keys whose deadline still
//! is the record's. Reads never depend on it: what has expired by the state's clock is invisible.

use std::collections::BTreeMap;

use crate::kv::{DATA_PREFIX, Kv, data_key, space};
use crate::machine::{ApplyError, Mode};

/// Bytes before the data key: space, log, deadline.
const PREFIX: usize = 11;
/// Records that are gone, of deadlines that were changed before they came, which a sweep passes
/// over to find what is due next.
const MAX_STALE_RECORDS: u64 = 10_000;
/// Where that is not enough: how far it looks, and says then when to look again.
const RESUME_MS: u64 = 1_000;

/// Where the record of a key lies.
pub(crate) fn record(log: u16, deadline: u64, stored_key: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(PREFIX + stored_key.len());
    bytes.push(space::DEADLINE);
    bytes.extend_from_slice(&log.to_be_bytes());
    bytes.extend_from_slice(&deadline.to_be_bytes());
    bytes.extend_from_slice(stored_key);
    bytes
}

/// Behind the last record of a log.
fn end(log: u16) -> Vec<u8> {
    match log.checked_add(1) {
        Some(next) => record(next, 0, &[]),
        None => vec![space::DEADLINE_END],
    }
}

/// Deadline and user's key of a record of this log; `None` for anything else.
fn parse(log: u16, record: &[u8]) -> Option<(u64, &[u8])> {
    let (head, rest) = record.split_first_chunk::<PREFIX>()?;
    let of_log = head[0] == space::DEADLINE && head[1..3] == log.to_be_bytes();
    let mut deadline = [0; 8];
    deadline.copy_from_slice(&head[3..]);
    let key = rest.get(DATA_PREFIX..)?;
    of_log.then_some((u64::from_be_bytes(deadline), key))
}

/// The first deadline on record.
pub(crate) fn first(kv: &dyn Kv, log: u16) -> Result<Option<u64>, ApplyError> {
    let mut found = None;
    kv.scan(&record(log, 0, &[]), &mut |key, _| {
        found = parse(log, key).map(|(deadline, _)| deadline);
        false
    })?;
    Ok(found)
}

/// A record that is due.
pub(crate) struct Due {
    pub(crate) deadline: u64,
    /// The user's.
    pub(crate) key: Vec<u8>,
    /// Whether the call has written it: the map does not have it.
    is_written: bool,
}

/// The records a call has written (`true`) or removed.
#[derive(Default)]
pub(crate) struct Records {
    pub(crate) changes: BTreeMap<Vec<u8>, bool>,
    /// The first deadline written in this call.
    pub(crate) earliest: Option<u64>,
    /// After a sweep: the first deadline left below this call's, if any, or a time before it.
    pub(crate) swept: Option<Option<u64>>,
    /// What is stored counts for nothing.
    pub(crate) cleared: bool,
    /// No stored record of the call's log is of before: what earlier sweeps have removed need not
    /// be passed over again.
    pub(crate) lowest: u64,
    /// How to take back what the current command does.
    undo: Option<Box<RecordsUndo>>,
}

/// What the records were when a command began.
#[derive(Default)]
struct RecordsUndo {
    /// Changes as they were before, newest last.
    changes: Vec<(Vec<u8>, Option<bool>)>,
    /// All of them, from before the command removed every key.
    cleared: Option<Records>,
    earliest: Option<u64>,
    swept: Option<Option<u64>>,
}

impl Records {
    /// What is done from here on may be taken back.
    pub(crate) fn begin_undo(&mut self) {
        self.undo = Some(Box::new(RecordsUndo {
            earliest: self.earliest,
            swept: self.swept,
            ..RecordsUndo::default()
        }));
    }

    /// What was done since then stands, or is taken back.
    pub(crate) fn end_undo(&mut self, takes_back: bool) {
        let Some(undo) = self.undo.take().filter(|_| takes_back) else {
            return;
        };
        let mut undo = *undo;
        if let Some(before) = undo.cleared.take() {
            *self = before;
        }
        for (record, before) in undo.changes.into_iter().rev() {
            match before {
                Some(written) => self.changes.insert(record, written),
                None => self.changes.remove(&record),
            };
        }
        (self.earliest, self.swept) = (undo.earliest, undo.swept);
    }

    fn change(&mut self, record: Vec<u8>, written: bool) {
        match &mut self.undo {
            // What comes after everything was removed goes with that.
            Some(undo) if undo.cleared.is_none() => {
                let before = self.changes.insert(record.clone(), written);
                undo.changes.push((record, before));
            }
            _ => {
                self.changes.insert(record, written);
            }
        }
    }

    pub(crate) fn write(&mut self, log: u16, deadline: u64, stored_key: &[u8]) {
        self.change(record(log, deadline, stored_key), true);
        self.earliest = Some(self.earliest.map_or(deadline, |first| first.min(deadline)));
    }

    /// Of a deadline that its key has no more.
    pub(crate) fn remove(&mut self, log: u16, deadline: u64, stored_key: &[u8]) {
        self.change(record(log, deadline, stored_key), false);
    }

    pub(crate) fn clear(&mut self) {
        let undo = self.undo.take();
        let before = std::mem::replace(
            self,
            Records {
                cleared: true,
                swept: Some(None),
                ..Records::default()
            },
        );
        self.undo = undo;
        if let Some(undo) = &mut self.undo {
            undo.cleared.get_or_insert(before);
        }
    }

    /// Takes the first `limit` records that are due, oldest first.
    ///
    /// # Errors
    /// [`ApplyError::WouldBlock`], and what the map says.
    pub(crate) fn take_due(
        &mut self,
        kv: &dyn Kv,
        mode: Mode,
        log: u16,
        now_ms: u64,
        limit: usize,
    ) -> Result<Vec<Due>, ApplyError> {
        if mode == Mode::NonBlocking && !kv.scans_without_blocking() {
            return Err(ApplyError::WouldBlock);
        }
        let (mut due, mut left) = (Vec::new(), None);
        if !self.cleared {
            let beyond = record(log, now_ms.saturating_add(1), &[]);
            kv.scan_some(
                &record(log, self.lowest, &[]),
                &beyond,
                None,
                &mut |key, _| {
                    let Some((deadline, user_key)) = parse(log, key) else {
                        return false;
                    };
                    if self.changes.contains_key(key) {
                        return true;
                    }
                    if due.len() >= limit {
                        left = Some(deadline);
                        return false;
                    }
                    due.push(Due {
                        deadline,
                        key: user_key.to_vec(),
                        is_written: false,
                    });
                    true
                },
            )?;
            if left.is_none() {
                left = self.next(kv, log, now_ms.saturating_add(1))?;
            }
        }
        for (key, _) in self.changes.iter().filter(|(_, written)| **written) {
            if let Some((deadline, user_key)) = parse(log, key)
                && deadline <= now_ms
            {
                due.push(Due {
                    deadline,
                    key: user_key.to_vec(),
                    is_written: true,
                });
            }
        }
        due.sort_by_cached_key(|due| (due.deadline, data_key(&due.key)));
        if let Some(beyond) = due.get(limit).map(|due| due.deadline) {
            left = Some(left.map_or(beyond, |left: u64| left.min(beyond)));
        }
        due.truncate(limit);
        for Due { deadline, key, .. } in &due {
            self.changes
                .insert(record(log, *deadline, &data_key(key)), false);
        }
        self.swept = Some(left);
        Ok(due)
    }

    /// Puts those back that the sweep has not come to.
    pub(crate) fn put_back(&mut self, log: u16, rest: &[Due]) {
        for due in rest {
            let record = record(log, due.deadline, &data_key(&due.key));
            match due.is_written {
                true => self.changes.insert(record, true),
                false => self.changes.remove(&record),
            };
            let left = self.swept.flatten().unwrap_or(u64::MAX);
            self.swept = Some(Some(left.min(due.deadline)));
        }
    }

    /// The first deadline from a time on that this call has not touched, or a time before it.
    fn next(&self, kv: &dyn Kv, log: u16, from_ms: u64) -> Result<Option<u64>, ApplyError> {
        let mut found = None;
        let mut note = |key: &[u8], _: &[u8]| {
            if self.changes.contains_key(key) {
                return true;
            }
            found = parse(log, key).map(|(deadline, _)| deadline);
            false
        };
        let from = record(log, from_ms, &[]);
        if kv.scan_some(&from, &end(log), Some(MAX_STALE_RECORDS), &mut note)? {
            return Ok(found);
        }
        let until_ms = from_ms.saturating_add(RESUME_MS);
        kv.scan_some(&from, &record(log, until_ms, &[]), None, &mut note)?;
        Ok(Some(found.unwrap_or(until_ms)))
    }
}

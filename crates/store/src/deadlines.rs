//! Which keys expire when: an index beside the data, so that expired keys are found without looking at all.
//!
//! A record is written with every value that has a deadline. It goes when the deadline is changed by a command that reads the key;
//! a SET without a deadline must not read, and leaves the old record behind. A sweep takes the records that are due and removes the keys whose
//! deadline still is the record's. Reads never depend on it: what has expired by the state's clock is invisible.

use std::collections::BTreeMap;

use crate::kv::{DATA_PREFIX, Kv, data_key, space};
use crate::machine::{ApplyError, Mode};

/// Bytes before the data key: space, log, deadline.
const PREFIX: usize = 11;
/// Records that are gone, of deadlines that were changed before they came, which a sweep passes over to find what is due next.
const MOST_GONE: u64 = 10_000;
/// Where that is not enough: how far it looks, and says then when to look again.
const NEXT_MS: u64 = 1_000;

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
    /// No stored record of the call's log is of before: what earlier sweeps have removed need not be passed over again.
    pub(crate) lowest: u64,
}

impl Records {
    pub(crate) fn write(&mut self, log: u16, deadline: u64, stored_key: &[u8]) {
        self.changes.insert(record(log, deadline, stored_key), true);
        self.earliest = Some(self.earliest.map_or(deadline, |first| first.min(deadline)));
    }

    /// Of a deadline that its key has no more.
    pub(crate) fn remove(&mut self, log: u16, deadline: u64, stored_key: &[u8]) {
        self.changes
            .insert(record(log, deadline, stored_key), false);
    }

    pub(crate) fn clear(&mut self) {
        *self = Records {
            cleared: true,
            swept: Some(None),
            ..Records::default()
        };
    }

    /// Takes the first `limit` records that are due, oldest first: deadline and user's key.
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
    ) -> Result<Vec<(u64, Vec<u8>)>, ApplyError> {
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
                    due.push((deadline, user_key.to_vec()));
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
                due.push((deadline, user_key.to_vec()));
            }
        }
        due.sort_by_cached_key(|(deadline, key)| (*deadline, data_key(key)));
        if let Some((beyond, _)) = due.get(limit) {
            left = Some(left.map_or(*beyond, |left: u64| left.min(*beyond)));
        }
        due.truncate(limit);
        for (deadline, key) in &due {
            self.changes
                .insert(record(log, *deadline, &data_key(key)), false);
        }
        self.swept = Some(left);
        Ok(due)
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
        if kv.scan_some(&from, &end(log), Some(MOST_GONE), &mut note)? {
            return Ok(found);
        }
        let until_ms = from_ms.saturating_add(NEXT_MS);
        kv.scan_some(&from, &record(log, until_ms, &[]), None, &mut note)?;
        Ok(Some(found.unwrap_or(until_ms)))
    }
}

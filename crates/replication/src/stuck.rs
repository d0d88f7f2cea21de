//! Revocations that failed: a process is in the middle of an operation and does not get on. What it
//! may write stays granted, and is revoked again periodically.

use std::collections::BTreeSet;
use std::ops::Bound;

/// Between two attempts, in microseconds: each may hold up the backup for as long as the provider
/// waits.
pub(crate) const RETRY_US: u64 = 2_000_000;

/// What could not be revoked.
pub(crate) struct PendingRevocations<T> {
    all: BTreeSet<T>,
    /// The one that was tried last.
    tried: Option<T>,
    next_us: u64,
}

impl<T> Default for PendingRevocations<T> {
    fn default() -> PendingRevocations<T> {
        PendingRevocations {
            all: BTreeSet::new(),
            tried: None,
            next_us: 0,
        }
    }
}

impl<T: Copy + Ord> PendingRevocations<T> {
    pub fn insert(&mut self, one: T) {
        self.all.insert(one);
    }

    pub fn remove(&mut self, one: T) {
        self.all.remove(&one);
    }

    pub fn contains(&self, one: T) -> bool {
        self.all.contains(&one)
    }

    /// One to try again now, if it is time; each in its turn, or one that stays stuck would keep
    /// the others waiting.
    pub fn due(&mut self, now_us: u64) -> Option<T> {
        let first = *self.all.first()?;
        if now_us < self.next_us {
            return None;
        }
        self.next_us = now_us + RETRY_US;
        let after = self.tried.map_or(Bound::Unbounded, Bound::Excluded);
        let mut greater = self.all.range((after, Bound::Unbounded));
        self.tried = Some(greater.next().copied().unwrap_or(first));
        self.tried
    }
}

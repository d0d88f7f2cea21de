//! Payloads on their way to the ring. The queue mirrors raft-rs's unstable entries one to one, behind them the
//! proposals that have not been handed to raft-rs yet. An entry needs no other handle than its index: (index, term)
//! names one payload for ever, and both sides drop the same suffix when a new leader overwrites it.

use std::collections::VecDeque;

use cyclone_pmem::Payload;

pub(crate) struct Staged {
    pub(crate) term: u64,
    pub(crate) payload: Payload,
}

#[derive(Default)]
pub(crate) struct Staging {
    /// Index of the front.
    first: u64,
    queue: VecDeque<Staged>,
    bytes: u64,
    longest: u64,
}

impl Staging {
    /// Entries that wait.
    pub(crate) fn len(&self) -> usize {
        self.queue.len()
    }

    /// Payload bytes held.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Length of the longest payload since the queue was last empty.
    pub(crate) fn longest(&self) -> u64 {
        self.longest
    }

    /// Index of the front; meaningless when empty.
    pub(crate) fn first(&self) -> u64 {
        self.first
    }

    /// Adds the entry at `index`, which must follow the last one.
    pub(crate) fn push(&mut self, index: u64, term: u64, payload: Payload) {
        if self.queue.is_empty() {
            self.first = index;
        }
        debug_assert_eq!(index, self.first + self.queue.len() as u64);
        self.bytes += payload.len() as u64;
        self.longest = self.longest.max(payload.len() as u64);
        self.queue.push_back(Staged { term, payload });
    }

    /// Drops the entries at `index` and behind it.
    pub(crate) fn truncate(&mut self, index: u64) {
        while !self.queue.is_empty() && self.first + self.queue.len() as u64 > index {
            if let Some(dropped) = self.queue.pop_back() {
                self.bytes -= dropped.payload.len() as u64;
            }
        }
        if self.queue.is_empty() {
            self.clear();
        }
    }

    /// Drops everything.
    pub(crate) fn clear(&mut self) {
        self.queue.clear();
        self.bytes = 0;
        self.longest = 0;
    }

    pub(crate) fn iter(&self) -> impl ExactSizeIterator<Item = &Staged> {
        self.queue.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_truncated_suffix_is_released() {
        let mut staging = Staging::default();
        for index in 5..9 {
            staging.push(index, 1, Payload::from_vec(vec![0; 10]));
        }
        staging.truncate(7);
        assert_eq!((staging.first(), staging.len(), staging.bytes()), (5, 2, 20));
        staging.push(7, 2, Payload::from_vec(vec![0; 30]));
        assert_eq!((staging.len(), staging.bytes(), staging.longest()), (3, 50, 30));
        staging.truncate(3);
        assert_eq!((staging.len(), staging.bytes(), staging.longest()), (0, 0, 0));
        staging.push(20, 3, Payload::new());
        assert_eq!(staging.first(), 20);
    }
}

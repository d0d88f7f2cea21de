//! Payloads on their way to the ring. The queue mirrors raft-rs's unstable entries one to one,
//! behind them the proposals that have not been handed to raft-rs yet. An entry needs no other
//! handle than its index: (index, term) names one payload permanently, and both sides drop the same
//! suffix when a new leader overwrites it.

use std::collections::VecDeque;

use cyclone_pmem::Payload;
use cyclone_wire::ring::{RECORD_HEADER_BYTES, RECORD_UNIT, SEGMENT_BYTES};

/// Bytes of the ring that an entry takes at most: header, an entry of the segment table per piece
/// of the payload, the payload as if all of it were copied, alignment.
pub(crate) fn record_bound(payload_bytes: u64, pieces: usize) -> u64 {
    RECORD_HEADER_BYTES as u64 + (SEGMENT_BYTES * pieces) as u64 + payload_bytes + RECORD_UNIT
}

pub(crate) struct Staged {
    pub(crate) term: u64,
    pub(crate) kind: u8,
    pub(crate) payload: Payload,
}

#[derive(Default)]
pub(crate) struct Staging {
    /// Index of the front.
    first: u64,
    queue: VecDeque<Staged>,
    bytes: u64,
    /// Ring bytes the entries will take at most, and the most that one of them takes.
    cost: u64,
    max_entry_cost: u64,
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

    /// Ring bytes that all entries will take at most.
    pub(crate) fn cost(&self) -> u64 {
        self.cost
    }

    /// Ring bytes that one entry will take at most, over the entries since the queue was last
    /// empty.
    pub(crate) fn max_entry_cost(&self) -> u64 {
        self.max_entry_cost
    }

    /// Index of the front; meaningless when empty.
    pub(crate) fn first(&self) -> u64 {
        self.first
    }

    /// Adds an entry of commands at `index`, which must follow the last one.
    pub(crate) fn push(&mut self, index: u64, term: u64, payload: Payload) {
        self.push_kind(index, term, crate::KIND_COMMANDS, payload);
    }

    /// Adds the entry at `index`, which must follow the last one.
    pub(crate) fn push_kind(&mut self, index: u64, term: u64, kind: u8, payload: Payload) {
        if self.queue.is_empty() {
            self.first = index;
        }
        debug_assert_eq!(index, self.first + self.queue.len() as u64);
        self.bytes += payload.len() as u64;
        let cost = cost(&payload);
        self.cost += cost;
        self.max_entry_cost = self.max_entry_cost.max(cost);
        self.queue.push_back(Staged {
            term,
            kind,
            payload,
        });
    }

    /// Drops the entries at `index` and behind it.
    pub(crate) fn truncate(&mut self, index: u64) {
        while !self.queue.is_empty() && self.first + self.queue.len() as u64 > index {
            if let Some(dropped) = self.queue.pop_back() {
                self.bytes -= dropped.payload.len() as u64;
                self.cost -= cost(&dropped.payload);
            }
        }
        if self.queue.is_empty() {
            self.clear();
        }
    }

    /// Drops everything.
    pub(crate) fn clear(&mut self) {
        self.queue.clear();
        (self.bytes, self.cost, self.max_entry_cost) = (0, 0, 0);
    }

    pub(crate) fn iter(&self) -> impl ExactSizeIterator<Item = &Staged> {
        self.queue.iter()
    }
}

/// Ring bytes that an entry with this payload takes at most.
pub(crate) fn cost(payload: &Payload) -> u64 {
    record_bound(payload.len() as u64, payload.parts().len())
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
        assert_eq!(
            (staging.first(), staging.len(), staging.bytes()),
            (5, 2, 20)
        );
        staging.push(7, 2, Payload::from_vec(vec![0; 30]));
        assert_eq!((staging.len(), staging.bytes()), (3, 50));
        assert!(staging.cost() > 50 && staging.max_entry_cost() > 30);
        staging.truncate(3);
        assert_eq!(
            (
                staging.len(),
                staging.bytes(),
                staging.cost(),
                staging.max_entry_cost()
            ),
            (0, 0, 0, 0)
        );
        staging.push(20, 3, Payload::new());
        assert_eq!(staging.first(), 20);
    }
}

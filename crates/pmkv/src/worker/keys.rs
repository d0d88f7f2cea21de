//! Who works on which key, and who waits for it: reads and read-modify-writes wait for the key's
//! writes in flight, blind writes join them. Keys are known by their hashes; two that share one
//! wait for each other. Pure.

use std::collections::VecDeque;
use std::ops::Deref;

use crate::words::WordMap;

/// The keys of a request, by their hashes, each once. Nearly all have one.
pub(super) enum KeySet {
    One([u64; 1]),
    Many(Vec<u64>),
}

impl KeySet {
    pub fn many(mut hashes: Vec<u64>) -> KeySet {
        hashes.sort_unstable();
        hashes.dedup();
        KeySet::Many(hashes)
    }
}

impl Deref for KeySet {
    type Target = [u64];

    fn deref(&self) -> &[u64] {
        match self {
            KeySet::One(one) => one,
            KeySet::Many(many) => many,
        }
    }
}

#[derive(Default)]
struct Queue {
    running: u32,
    parked: VecDeque<u64>,
}

/// Keys with writes in flight or requests that wait.
#[derive(Default)]
pub(super) struct Keys(WordMap<u64, Queue>);

impl Keys {
    /// Whether nothing is in flight and no request waits.
    pub fn are_clear(&self, keys: &[u64]) -> bool {
        keys.iter().all(|key| !self.0.contains_key(key))
    }

    /// Whether no request waits.
    pub fn have_no_queue(&self, keys: &[u64]) -> bool {
        let no_queue = |queue: &Queue| queue.parked.is_empty();
        keys.iter().all(|key| self.0.get(key).is_none_or(no_queue))
    }

    /// A write begins.
    pub fn enter(&mut self, keys: &[u64]) {
        for &key in keys {
            self.0.entry(key).or_default().running += 1;
        }
    }

    /// A write has ended; returns whether anybody waits for one of its keys.
    pub fn leave(&mut self, keys: &[u64]) -> bool {
        let mut is_awaited = false;
        for key in keys {
            if let Some(queue) = self.0.get_mut(key) {
                queue.running = queue.running.saturating_sub(1);
                is_awaited |= !queue.parked.is_empty();
                if queue.running == 0 && queue.parked.is_empty() {
                    self.0.remove(key);
                }
            }
        }
        is_awaited
    }

    /// A request waits.
    pub fn park(&mut self, request: u64, keys: &[u64]) {
        for &key in keys {
            self.0.entry(key).or_default().parked.push_back(request);
        }
    }

    /// Who waits longest for this key.
    pub fn first(&self, key: u64) -> Option<u64> {
        self.0.get(&key)?.parked.front().copied()
    }

    /// Whether a request is the first to wait for each of its keys and, unless it may join them, no
    /// write is in flight.
    pub fn may_go(&self, request: u64, keys: &[u64], joins: bool) -> bool {
        keys.iter().all(|key| {
            self.0.get(key).is_some_and(|queue| {
                queue.parked.front() == Some(&request) && (joins || queue.running == 0)
            })
        })
    }

    /// A request waits no longer.
    pub fn unpark(&mut self, request: u64, keys: &[u64]) {
        for key in keys {
            if let Some(queue) = self.0.get_mut(key) {
                queue.parked.retain(|&parked| parked != request);
                if queue.running == 0 && queue.parked.is_empty() {
                    self.0.remove(key);
                }
            }
        }
    }
}

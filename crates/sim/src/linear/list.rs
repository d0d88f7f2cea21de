//! The order of calls and returns, and the hashing of sets of operations.

use super::item::Item;
use std::hash::Hasher;

/// Calls and returns in time order; call of item i is entry 2i, its return 2i + 1, the anchor comes
/// last.
pub(super) struct List {
    pub(super) next: Vec<usize>,
    previous: Vec<usize>,
}

impl List {
    pub(super) fn new(items: &[Item<'_>]) -> Self {
        let anchor = 2 * items.len();
        let mut entries: Vec<usize> = (0..anchor).collect();
        // At the same time, calls come before returns: then the operations overlap, which is the
        // lenient reading.
        entries.sort_by_key(|&entry| {
            let item = &items[entry / 2];
            (
                if entry % 2 == 0 {
                    item.invoke_us
                } else {
                    item.return_us
                },
                entry % 2,
                entry,
            )
        });
        let mut list = Self {
            next: vec![anchor; anchor + 1],
            previous: vec![anchor; anchor + 1],
        };
        let mut last = anchor;
        for entry in entries {
            list.next[last] = entry;
            list.previous[entry] = last;
            last = entry;
        }
        list.next[last] = anchor;
        list.previous[anchor] = last;
        list
    }

    pub(super) fn anchor(&self) -> usize {
        self.next.len() - 1
    }

    pub(super) fn first(&self) -> usize {
        self.next[self.anchor()]
    }

    /// The item whose call is at this entry; `None` at a return and at the end.
    pub(super) fn call_at(&self, entry: usize) -> Option<usize> {
        (entry != self.anchor() && entry.is_multiple_of(2)).then_some(entry / 2)
    }

    pub(super) fn return_at(&self, entry: usize) -> Option<usize> {
        (entry != self.anchor() && !entry.is_multiple_of(2)).then_some(entry / 2)
    }

    pub(super) fn return_of(index: usize) -> usize {
        2 * index + 1
    }

    pub(super) fn take_out(&mut self, index: usize) {
        for entry in [2 * index, 2 * index + 1] {
            let (before, after) = (self.previous[entry], self.next[entry]);
            self.next[before] = after;
            self.previous[after] = before;
        }
    }

    /// Reverses the latest `take_out` not reversed yet: the entries still know their neighbours.
    pub(super) fn put_back(&mut self, index: usize) {
        for entry in [2 * index + 1, 2 * index] {
            let (before, after) = (self.previous[entry], self.next[entry]);
            self.next[before] = entry;
            self.previous[after] = entry;
        }
    }
}

/// A hasher for keys that are random already.
#[derive(Default)]
pub(super) struct Mixed(u64);

impl Hasher for Mixed {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u8(&mut self, n: u8) {
        self.write_u64(u64::from(n));
    }

    fn write_u32(&mut self, n: u32) {
        self.write_u64(u64::from(n));
    }

    fn write_u64(&mut self, n: u64) {
        self.0 = (self.0.rotate_left(29) ^ n).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }

    fn write_u128(&mut self, n: u128) {
        self.0 ^= (n as u64) ^ ((n >> 64) as u64).rotate_left(32);
    }
}

/// The pseudo-random word that stands for an operation in a set (splitmix64, twice).
pub(super) fn word(index: usize) -> u128 {
    let mix = |seed: u64| {
        let mut z = (index as u64)
            .wrapping_add(1)
            .wrapping_mul(0x9E37_79B9_7F4A_7C15)
            ^ seed;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    };
    u128::from(mix(0x243F_6A88_85A3_08D3)) << 64 | u128::from(mix(0x1319_8A2E_0370_7344))
}

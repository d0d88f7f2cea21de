//! The bytes of keys and values.

use std::sync::OnceLock;

use super::random::{Random, mixed};
use super::sizes::LONGEST;

/// Bytes of the longest key.
pub const LONGEST_KEY: usize = 64;
/// Bytes of the shortest key: a number.
pub const SHORTEST_KEY: usize = 8;

/// A key's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    bytes: [u8; LONGEST_KEY],
    len: u8,
}

impl Key {
    /// Key number `number` of `len` bytes (8 to 64): eight bytes that scatter, and dots. Different
    /// numbers have different keys, and neighbours lie far apart.
    pub fn new(number: u64, len: usize) -> Key {
        let len = len.clamp(SHORTEST_KEY, LONGEST_KEY);
        let mut bytes = [b'.'; LONGEST_KEY];
        bytes[..SHORTEST_KEY].copy_from_slice(&mixed(number).to_be_bytes());
        Key {
            bytes,
            len: len as u8,
        }
    }
}

impl std::ops::Deref for Key {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

/// A key and its value.
#[derive(Clone, Copy, Debug)]
pub struct Pair {
    /// The key.
    pub key: Key,
    /// The value; empty for a read.
    pub value: &'static [u8],
}

/// Values differ in where they begin.
const SLACK: usize = 1 << 16;

/// `len` bytes, [`LONGEST`] at most, that do not compress, others for each `salt` below 65,536.
pub fn value(len: u32, salt: u64) -> &'static [u8] {
    static BYTES: OnceLock<Vec<u8>> = OnceLock::new();
    let bytes = BYTES.get_or_init(|| {
        let mut random = Random::new(0x7661_6c75_6573);
        let words = (LONGEST as usize + SLACK).div_ceil(8);
        (0..words)
            .flat_map(|_| random.draw().to_le_bytes())
            .collect()
    });
    let from = salt as usize % SLACK;
    &bytes[from..from + len as usize]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_as_long_as_asked_and_all_different() {
        let keys: std::collections::HashSet<Key> = (0..10_000).map(|n| Key::new(n, 8)).collect();
        assert_eq!(keys.len(), 10_000);
        assert_eq!(Key::new(5, 16).len(), 16);
        assert_eq!(Key::new(5, 1000).len(), LONGEST_KEY);
        assert_eq!(Key::new(5, 0).len(), SHORTEST_KEY);
    }

    /// The load generators in Go have the same test.
    #[test]
    fn keys_are_those_of_the_other_side() {
        for (number, expected) in [
            (0, 0xe220_a839_7b1d_cdaf_u64),
            (1, 0x910a_2dec_8902_5cc1),
            (1_000_000, 0x680d_1cce_9cff_45e7),
        ] {
            assert_eq!(*Key::new(number, 8), expected.to_be_bytes());
        }
        assert_eq!(Key::new(0, 12)[8..], *b"....");
    }

    #[test]
    fn values_have_their_length_at_every_place() {
        for (len, salt) in [(0, 0), (1, u64::MAX), (LONGEST, 65_535), (100, 65_536)] {
            assert_eq!(value(len, salt).len(), len as usize);
        }
        assert_ne!(value(100, 0), value(100, 1));
    }
}

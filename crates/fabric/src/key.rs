//! Names of endpoints and of their memory, as they travel between machines.

use std::fmt;

/// Where an endpoint is reached; opaque bytes of its provider.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Address(pub Vec<u8>);

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Address({})", self.0.escape_ascii())
    }
}

/// A tenant's secret. Memory registered under one token answers only to keys that carry it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Token(pub u64);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

/// Rights to a piece of registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access(u8);

impl Access {
    /// Reads.
    pub const READ: Access = Access(1);
    /// Writes and flushes.
    pub const WRITE: Access = Access(2);
    /// Compare-swap and fetch-add.
    pub const ATOMIC: Access = Access(4);
    /// Everything.
    pub const ALL: Access = Access(7);

    /// Both sets of rights.
    pub const fn and(self, other: Access) -> Access {
        Access(self.0 | other.0)
    }

    /// Whether these rights contain `wanted`.
    pub const fn allows(self, wanted: Access) -> bool {
        self.0 & wanted.0 == wanted.0
    }

    /// As one byte.
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// From one byte; `None` for bits that mean nothing.
    pub const fn from_bits(bits: u8) -> Option<Access> {
        if bits <= 7 { Some(Access(bits)) } else { None }
    }
}

/// What a peer needs to name registered memory. Offsets in operations count from the registration's
/// first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryKey {
    /// The registration, unique for the life of its endpoint: never reused after a revocation.
    pub id: u64,
    /// The tenant's secret.
    pub token: Token,
    /// Bytes registered.
    pub len: u64,
}

/// Bytes of an encoded [`MemoryKey`] or [`AppendKey`].
pub const KEY_BYTES: usize = 24;

impl MemoryKey {
    /// As bytes: id, token and length, little-endian.
    pub fn encode(&self) -> [u8; KEY_BYTES] {
        let mut bytes = [0; KEY_BYTES];
        bytes[..8].copy_from_slice(&self.id.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.token.0.to_le_bytes());
        bytes[16..].copy_from_slice(&self.len.to_le_bytes());
        bytes
    }

    /// From bytes; the target checks what they claim at every operation.
    pub fn decode(bytes: &[u8; KEY_BYTES]) -> MemoryKey {
        let word = |n: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[n * 8..n * 8 + 8]);
            u64::from_le_bytes(word)
        };
        MemoryKey {
            id: word(0),
            token: Token(word(1)),
            len: word(2),
        }
    }
}

/// What a sender needs to append to a receiver's queue (rowan §3). Encoded like the [`MemoryKey`]
/// inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AppendKey(pub MemoryKey);

//! Log entries: an object or its deletion, several of them in one, or what is committed. Pure.
//! Drawn in docs/formats.md.
//!
//! ```text
//!   0     4      5       6         8                        16          20      24
//!   | crc | kind | zero  | key len | version 48 | shard 16  | value len | count | key | value
//!     u32   u8     u8      u16       u64: version << 16 | shard   u32     u32
//! ```
//!
//! The checksum covers everything behind it. An entry stands alone in a block of
//! `replication::frame`, whose checksum is seeded with the segment's epoch: that one tells an entry
//! from bytes of a segment's earlier life, this one guards the object for as long as the index
//! points at it. Blocks of entries beyond the MTU carry count and number there too.

use cyclone_wire::codec::{DecodeError, Reader};
use cyclone_wire::ring::crc32c_of;

/// Bytes before the key.
pub const HEADER_BYTES: usize = 24;

/// The longest key.
pub const MAX_KEY_BYTES: usize = u16::MAX as usize;

/// The most bytes of a whole entry: bounds what is read for a length that lies.
pub const MAX_ENTRY_BYTES: usize = (1 << 20) - 64;

/// Versions have this many bits.
//= rowan §4.2.2
pub const VERSION_BITS: u32 = 48;

/// The largest version.
pub const MAX_VERSION: u64 = (1 << VERSION_BITS) - 1;

const MEMBER_ALIGN: usize = 8;

/// What an entry says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The key has this value.
    Put,
    /// The key has no value. On clean-up its value may hold the epoch before which older versions
    /// may lie.
    Delete,
    /// Several entries that count together or not at all: whole entries behind each other, at
    /// multiples of 8.
    Batch,
    /// Up to which version each shard's entries are on every replica (rowan §4.4): 8 bytes per
    /// shard.
    Commit,
}

impl Kind {
    const fn code(self) -> u8 {
        match self {
            Kind::Put => 1,
            Kind::Delete => 2,
            Kind::Batch => 3,
            Kind::Commit => 4,
        }
    }

    const fn from_code(code: u8) -> Option<Kind> {
        Some(match code {
            1 => Kind::Put,
            2 => Kind::Delete,
            3 => Kind::Batch,
            4 => Kind::Commit,
            _ => return None,
        })
    }
}

/// A shard's number and a version of it, as one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stamp {
    /// The version, at most [`MAX_VERSION`].
    pub version: u64,
    /// The shard.
    pub shard: u16,
}

impl Stamp {
    /// As one word.
    pub const fn bits(self) -> u64 {
        (self.version & MAX_VERSION) << 16 | self.shard as u64
    }

    /// From one word.
    pub const fn from_bits(bits: u64) -> Stamp {
        Stamp {
            version: bits >> 16,
            shard: bits as u16,
        }
    }
}

/// What stands before an entry's key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The checksum as found.
    pub crc: u32,
    /// What the entry says.
    pub kind: Kind,
    /// Bytes of its key.
    pub key_len: usize,
    /// Bytes of its value.
    pub value_len: usize,
    /// Its version and shard.
    pub stamp: Stamp,
    /// Of a batch: how many entries. Of a batch's member: its number, from 1. Otherwise 0.
    pub count: u32,
}

impl Header {
    /// Reads a header and checks its lengths, not its checksum.
    ///
    /// # Errors
    /// A kind or a length that makes no sense.
    pub fn decode(bytes: &[u8]) -> Result<Header, DecodeError> {
        let Some(head) = bytes.first_chunk::<HEADER_BYTES>() else {
            return Err(DecodeError::Contradiction(
                "an entry shorter than its header",
            ));
        };
        let word = |at: usize| {
            let eight = head[at..].first_chunk::<8>();
            eight.map_or(0, |it| u64::from_le_bytes(*it))
        };
        let (first, stamp, last) = (word(0), Stamp::from_bits(word(8)), word(16));
        let (crc, code, zero) = (first as u32, (first >> 32) as u8, (first >> 40) as u8);
        let key_len = (first >> 48) as usize;
        let (value_len, count) = (last as u32 as usize, (last >> 32) as u32);
        let kind = Kind::from_code(code).ok_or(DecodeError::Unknown {
            what: "entry kind",
            value: u64::from(code),
        })?;
        let header = Header {
            crc,
            kind,
            key_len,
            value_len,
            stamp,
            count,
        };
        if zero != 0 || value_len > MAX_ENTRY_BYTES || header.len() > MAX_ENTRY_BYTES {
            return Err(DecodeError::Contradiction("an entry's lengths"));
        }
        Ok(header)
    }

    /// Bytes of the whole entry.
    pub fn len(&self) -> usize {
        HEADER_BYTES + self.key_len + self.value_len
    }

    /// Never: an entry has a header.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The version of the first entry of the batch that it was written in; its own if it stands
    /// alone.
    pub fn batch(&self) -> u64 {
        let before = u64::from(self.count.saturating_sub(1));
        match self.kind {
            Kind::Put | Kind::Delete => self.stamp.version.saturating_sub(before),
            Kind::Batch | Kind::Commit => self.stamp.version,
        }
    }
}

/// An entry found whole; borrows its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry<'a> {
    /// Its header.
    pub header: Header,
    /// The key.
    pub key: &'a [u8],
    /// The value.
    pub value: &'a [u8],
}

impl<'a> Entry<'a> {
    /// Reads the entry at the front of bytes that are known to be whole by another checksum, or
    /// were never away: its own checksum is not verified.
    ///
    /// # Errors
    /// What is wrong with its lengths.
    pub fn parse(bytes: &'a [u8]) -> Result<Entry<'a>, DecodeError> {
        let header = Header::decode(bytes)?;
        let whole = Reader::new(bytes).take(header.len())?;
        let (key, value) = whole[HEADER_BYTES..].split_at(header.key_len);
        Ok(Entry { header, key, value })
    }

    /// Reads the entry at the front of `bytes`, checksum and all.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn decode(bytes: &'a [u8]) -> Result<Entry<'a>, DecodeError> {
        let header = Header::decode(bytes)?;
        let mut reader = Reader::new(bytes);
        let whole = reader.take(header.len())?;
        let computed = crc32c_of(&whole[4..]);
        if computed != header.crc {
            return Err(DecodeError::Checksum {
                found: header.crc,
                computed,
            });
        }
        let (key, value) = whole[HEADER_BYTES..].split_at(header.key_len);
        Ok(Entry { header, key, value })
    }

    /// The entries that this one says, with where each begins in its bytes: itself, or a batch's
    /// members. A member that is not whole ends the walk: it cannot happen below a checksum that
    /// fits.
    pub fn members(&self) -> impl Iterator<Item = (usize, Entry<'a>)> + use<'a> {
        let (own, batch) = match self.header.kind {
            Kind::Batch => (None, self.value),
            _ => (Some((0, *self)), &[][..]),
        };
        let first = HEADER_BYTES + self.header.key_len;
        let mut at = 0;
        own.into_iter().chain(std::iter::from_fn(move || {
            let entry = Entry::decode(batch.get(at..)?).ok()?;
            let here = first + at;
            at += entry.header.len().next_multiple_of(MEMBER_ALIGN);
            Some((here, entry))
        }))
    }

    /// A tombstone anew, without the epoch that cleaning has noted in it, if it has: epochs count
    /// the segments of the memory that it lies in, and mean nothing in another.
    pub fn without_note(&self) -> Option<Vec<u8>> {
        let is_noted = self.header.kind == Kind::Delete && !self.value.is_empty();
        is_noted.then(|| {
            let mut bytes = Vec::with_capacity(HEADER_BYTES + self.key.len());
            let header = &self.header;
            encode(
                Kind::Delete,
                header.stamp,
                header.count,
                self.key,
                &[],
                &mut bytes,
            );
            bytes
        })
    }

    /// What a [`Kind::Commit`] entry says.
    pub fn commits(&self) -> impl Iterator<Item = Stamp> + use<'a> {
        let words = self.value.chunks_exact(8);
        words.filter_map(|word| Some(Stamp::from_bits(u64::from_le_bytes(word.try_into().ok()?))))
    }
}

/// Writes an entry behind what `into` holds. The caller keeps to [`MAX_KEY_BYTES`] and
/// [`MAX_ENTRY_BYTES`].
pub fn encode(kind: Kind, stamp: Stamp, count: u32, key: &[u8], value: &[u8], into: &mut Vec<u8>) {
    debug_assert!(key.len() <= MAX_KEY_BYTES);
    let start = into.len();
    into.extend_from_slice(&[0; 4]);
    into.extend_from_slice(&[kind.code(), 0]);
    into.extend_from_slice(&(key.len() as u16).to_le_bytes());
    into.extend_from_slice(&stamp.bits().to_le_bytes());
    into.extend_from_slice(&(value.len() as u32).to_le_bytes());
    into.extend_from_slice(&count.to_le_bytes());
    into.extend_from_slice(key);
    into.extend_from_slice(value);
    let crc = crc32c_of(&into[start + 4..]);
    into[start..start + 4].copy_from_slice(&crc.to_le_bytes());
}

/// One member of a batch: `None` deletes the key.
pub type Member<'a> = (&'a [u8], Option<&'a [u8]>);

/// Writes a batch whose members have the versions from `first` on; answers where each member
/// begins.
pub fn encode_batch(first: Stamp, members: &[Member<'_>], into: &mut Vec<u8>) -> Vec<usize> {
    let mut body = Vec::new();
    let mut places = Vec::with_capacity(members.len());
    for (&(key, value), number) in members.iter().zip(0u32..) {
        body.resize(body.len().next_multiple_of(MEMBER_ALIGN), 0);
        places.push(HEADER_BYTES + body.len());
        let stamp = Stamp {
            version: first.version + u64::from(number),
            ..first
        };
        let kind = value.map_or(Kind::Delete, |_| Kind::Put);
        let value = value.unwrap_or_default();
        encode(kind, stamp, number + 1, key, value, &mut body);
    }
    encode(Kind::Batch, first, members.len() as u32, &[], &body, into);
    places
}

/// Writes a batch of entries as they are.
pub fn encode_whole(first: Stamp, entries: &[Vec<u8>], into: &mut Vec<u8>) {
    let mut body = Vec::new();
    for entry in entries {
        body.resize(body.len().next_multiple_of(MEMBER_ALIGN), 0);
        body.extend_from_slice(entry);
    }
    encode(Kind::Batch, first, entries.len() as u32, &[], &body, into);
}

/// Bytes of a batch of these members.
pub fn batch_bytes(members: &[Member<'_>]) -> usize {
    members.iter().fold(HEADER_BYTES, |sum, (key, value)| {
        let len = HEADER_BYTES + key.len() + value.map_or(0, <[u8]>::len);
        sum.next_multiple_of(MEMBER_ALIGN) + len
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn stamp(version: u64, shard: u16) -> Stamp {
        Stamp { version, shard }
    }

    #[test]
    fn an_entry_comes_back_and_no_changed_bit_passes() {
        let mut bytes = Vec::new();
        encode(
            Kind::Put,
            stamp(MAX_VERSION, 7),
            0,
            b"key",
            b"some value",
            &mut bytes,
        );
        bytes.extend_from_slice(&[0; 5]);
        let entry = Entry::decode(&bytes).expect("whole");
        assert_eq!((entry.key, entry.value), (&b"key"[..], &b"some value"[..]));
        assert_eq!(entry.header.stamp, stamp(MAX_VERSION, 7));
        for bit in 0..(bytes.len() - 5) * 8 {
            let mut broken = bytes.clone();
            broken[bit / 8] ^= 1 << (bit % 8);
            assert!(Entry::decode(&broken).is_err(), "bit {bit}");
        }
    }

    proptest! {
        #[test]
        fn batches_come_back(members in proptest::collection::vec(
            (proptest::collection::vec(any::<u8>(), 0..40),
             proptest::option::of(proptest::collection::vec(any::<u8>(), 0..90))), 0..20)) {
            let members: Vec<Member<'_>> = members.iter().map(|(k, v)| (&k[..], v.as_deref())).collect();
            let mut bytes = Vec::new();
            let places = encode_batch(stamp(100, 3), &members, &mut bytes);
            prop_assert_eq!(bytes.len(), batch_bytes(&members));
            let batch = Entry::decode(&bytes).expect("whole");
            let found: Vec<(usize, Entry<'_>)> = batch.members().collect();
            prop_assert_eq!(found.len(), members.len());
            for (n, (at, entry)) in found.iter().enumerate() {
                prop_assert_eq!(*at, places[n]);
                prop_assert_eq!(entry.key, members[n].0);
                prop_assert_eq!(entry.header.stamp, stamp(100 + n as u64, 3));
                match members[n].1 {
                    Some(value) => prop_assert_eq!((entry.header.kind, entry.value), (Kind::Put, value)),
                    None => prop_assert_eq!(entry.header.kind, Kind::Delete),
                }
                prop_assert_eq!(Entry::decode(&bytes[*at..]).expect("whole"), *entry);
            }
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(entry) = Entry::decode(&bytes) {
                let _ = entry.members().count() + entry.commits().count();
            }
        }
    }
}

//! Redo records: every byte a transaction changes, in one piece of a client's log. Pure.
//!
//! ```text
//!   0       4        8          16      24     28      30     31    32
//!   | magic | crc32c | position | epoch | len  | count | kind | 0  | count × (to u64, len u32, from u32) | bytes |
//!     u32     u32      u64        u64     u32    u16     u8    u8
//! ```
//!
//! The checksum covers the log's seed and everything else of the record. `position` counts the
//! log's bytes since it was formatted; a record lies at `position mod log bytes`, a multiple of 64,
//! and never across the log's end: there a pad fills the rest. `from` counts from the record's
//! first byte, `to` from the data area's.

use cyclone_wire::ring::crc32c;

use super::operation::GroupError;

/// The most updates of one record.
pub const MAX_UPDATES: usize = 256;
/// Records begin on multiples of this.
pub const ALIGN_BYTES: u64 = 64;

const HEADER_BYTES: usize = 32;
const ENTRY_BYTES: usize = 16;
const MAGIC: u32 = 0x4345_5247;
const UPDATES: u8 = 1;
const PAD: u8 = 2;

/// Bytes to store in the data area.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Update {
    /// First byte, from the data area's beginning.
    pub offset: u64,
    /// What to store.
    pub bytes: Vec<u8>,
}

/// One copy that executes a part of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// First byte of the source, from the log's beginning.
    pub from: u64,
    /// First byte of the destination, from the data area's beginning.
    pub to: u64,
    /// How many bytes.
    pub len: u64,
}

/// A record found whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Its position.
    pub position: u64,
    /// The position behind it.
    pub end: u64,
    /// What it changes; nothing for a pad.
    pub moves: Vec<Move>,
    /// Its checksum.
    pub checksum: u32,
}

/// Bytes that a record of these updates takes in the log.
pub fn padded_len(updates: &[Update]) -> Result<u64, GroupError> {
    if updates.len() > MAX_UPDATES {
        return Err(GroupError::TooManyUpdates {
            count: updates.len(),
            max: MAX_UPDATES,
        });
    }
    let payload: u64 = updates.iter().map(|u| u.bytes.len() as u64).sum();
    let bytes = (HEADER_BYTES + updates.len() * ENTRY_BYTES) as u64 + payload;
    if bytes > u64::from(u32::MAX / 2) {
        return Err(GroupError::RecordTooLarge {
            len: bytes,
            max: u64::from(u32::MAX / 2),
        });
    }
    Ok(bytes.next_multiple_of(ALIGN_BYTES))
}

/// A log's identity: what its records' checksums are seeded with, and which epoch may write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogName {
    /// The log's secret.
    pub seed: u64,
    /// Its writer's epoch.
    pub epoch: u64,
}

/// A record's bytes, padded to a multiple of 64, and the copies that execute it when it lies at
/// `at` of the log. The updates must have passed [`padded_len`].
pub fn encode(name: LogName, position: u64, at: u64, updates: &[Update]) -> (Vec<u8>, Vec<Move>) {
    let payload_at = HEADER_BYTES + updates.len() * ENTRY_BYTES;
    let len = payload_at + updates.iter().map(|u| u.bytes.len()).sum::<usize>();
    let mut bytes = Vec::with_capacity(len.next_multiple_of(ALIGN_BYTES as usize));
    header(
        &mut bytes,
        name,
        position,
        len,
        updates.len() as u16,
        UPDATES,
    );
    let mut moves = Vec::with_capacity(updates.len());
    let mut from = payload_at;
    for update in updates {
        bytes.extend_from_slice(&update.offset.to_le_bytes());
        bytes.extend_from_slice(&(update.bytes.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&(from as u32).to_le_bytes());
        moves.push(Move {
            from: at + from as u64,
            to: update.offset,
            len: update.bytes.len() as u64,
        });
        from += update.bytes.len();
    }
    for update in updates {
        bytes.extend_from_slice(&update.bytes);
    }
    seal(name, &mut bytes);
    bytes.resize(len.next_multiple_of(ALIGN_BYTES as usize), 0);
    (bytes, moves)
}

/// The pad that fills `len` bytes before the log's end; only its header is stored.
pub fn encode_pad(name: LogName, position: u64, len: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER_BYTES);
    header(&mut bytes, name, position, len as usize, 0, PAD);
    seal(name, &mut bytes);
    bytes
}

fn header(bytes: &mut Vec<u8>, name: LogName, position: u64, len: usize, count: u16, kind: u8) {
    bytes.extend_from_slice(&MAGIC.to_le_bytes());
    bytes.extend_from_slice(&[0; 4]);
    bytes.extend_from_slice(&position.to_le_bytes());
    bytes.extend_from_slice(&name.epoch.to_le_bytes());
    // At most half of u32::MAX by `padded_len`; pads are shorter than a log, which is at most 4
    // GiB.
    bytes.extend_from_slice(&(len as u32).to_le_bytes());
    bytes.extend_from_slice(&count.to_le_bytes());
    bytes.extend_from_slice(&[kind, 0]);
}

fn seal(name: LogName, bytes: &mut [u8]) {
    let checksum = checksum(name.seed, bytes);
    bytes[4..8].copy_from_slice(&checksum.to_le_bytes());
}

fn checksum(seed: u64, bytes: &[u8]) -> u32 {
    crc32c([&seed.to_le_bytes()[..], &bytes[..4], &bytes[8..]].into_iter())
}

fn take<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk::<N>().copied()
}

/// Reads the record at `position` of a log whose bytes are `ring`, if one is whole there.
pub fn decode(name: LogName, ring: &[u8], position: u64) -> Option<Found> {
    let at = position.checked_rem(ring.len() as u64)?;
    let rest = ring.get(at as usize..)?;
    if u32::from_le_bytes(take(rest, 0)?) != MAGIC
        || u64::from_le_bytes(take(rest, 8)?) != position
        || u64::from_le_bytes(take(rest, 16)?) != name.epoch
    {
        return None;
    }
    let stored = u32::from_le_bytes(take(rest, 4)?);
    let len = u32::from_le_bytes(take(rest, 24)?) as usize;
    let count = usize::from(u16::from_le_bytes(take(rest, 28)?));
    let end = position.checked_add((len as u64).checked_next_multiple_of(ALIGN_BYTES)?)?;
    match take(rest, 30)? {
        [PAD, 0] => {
            let header = rest.get(..HEADER_BYTES)?;
            let whole = count == 0 && len == rest.len() && stored == checksum(name.seed, header);
            whole.then(|| Found {
                position,
                end,
                moves: Vec::new(),
                checksum: stored,
            })
        }
        [UPDATES, 0] => {
            let record = rest.get(..len)?;
            if len < HEADER_BYTES || count > MAX_UPDATES || stored != checksum(name.seed, record) {
                return None;
            }
            Some(Found {
                position,
                end,
                moves: moves(record, at, count)?,
                checksum: stored,
            })
        }
        _ => None,
    }
}

fn moves(record: &[u8], at: u64, count: usize) -> Option<Vec<Move>> {
    let table = record.get(HEADER_BYTES..HEADER_BYTES + count * ENTRY_BYTES)?;
    let mut moves = Vec::with_capacity(count);
    for entry in table.chunks_exact(ENTRY_BYTES) {
        let to = u64::from_le_bytes(take(entry, 0)?);
        let len = u64::from(u32::from_le_bytes(take(entry, 8)?));
        let from = u64::from(u32::from_le_bytes(take(entry, 12)?));
        if from + len > record.len() as u64 {
            return None;
        }
        moves.push(Move {
            from: at + from,
            to,
            len,
        });
    }
    Some(moves)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const NAME: LogName = LogName {
        seed: 0x1234_5678_9abc,
        epoch: 3,
    };

    fn updates() -> Vec<Update> {
        vec![
            Update {
                offset: 100,
                bytes: b"one".to_vec(),
            },
            Update {
                offset: 7,
                bytes: vec![9; 50],
            },
        ]
    }

    fn ring_with(position: u64) -> (Vec<u8>, Vec<Move>) {
        let mut ring = vec![0xee; 512];
        let at = position % 512;
        let (bytes, moves) = encode(NAME, position, at, &updates());
        assert_eq!(bytes.len() as u64, padded_len(&updates()).expect("fits"));
        ring[at as usize..at as usize + bytes.len()].copy_from_slice(&bytes);
        (ring, moves)
    }

    #[test]
    fn records_come_back_with_their_moves() {
        let (ring, moves) = ring_with(512 * 9 + 192);
        let found = decode(NAME, &ring, 512 * 9 + 192).expect("whole");
        assert_eq!(found.moves, moves);
        assert_eq!(found.end, 512 * 9 + 192 + 128);
        for (found, update) in found.moves.iter().zip(updates()) {
            assert_eq!(found.to, update.offset);
            let from = found.from as usize;
            assert_eq!(&ring[from..from + found.len as usize], &update.bytes[..]);
        }
    }

    #[test]
    fn another_lap_epoch_seed_or_a_torn_bit_is_no_record() {
        let (ring, _) = ring_with(192);
        assert!(decode(NAME, &ring, 192).is_some());
        assert!(decode(NAME, &ring, 192 + 512).is_none());
        assert!(decode(LogName { epoch: 4, ..NAME }, &ring, 192).is_none());
        assert!(decode(LogName { seed: 4, ..NAME }, &ring, 192).is_none());
        for bit in 0..(32 + 32 + 53) * 8 {
            let mut torn = ring.clone();
            torn[192 + bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode(NAME, &torn, 192), None, "bit {bit}");
        }
    }

    #[test]
    fn pads_reach_the_end_and_no_further() {
        let mut ring = vec![0; 512];
        let pad = encode_pad(NAME, 320, 192);
        ring[320..320 + pad.len()].copy_from_slice(&pad);
        assert_eq!(decode(NAME, &ring, 320).expect("pad").end, 512);
        ring.extend_from_slice(&[0; 64]);
        assert_eq!(decode(NAME, &ring, 320), None);
    }

    #[test]
    fn too_many_or_too_large_updates_are_refused() {
        let empty = Update {
            offset: 0,
            bytes: Vec::new(),
        };
        assert!(padded_len(&vec![empty.clone(); MAX_UPDATES]).is_ok());
        assert!(padded_len(&vec![empty; MAX_UPDATES + 1]).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(bytes in proptest::collection::vec(any::<u8>(), 0..300), position: u64) {
            prop_assert_eq!(decode(NAME, &bytes, position), None);
        }

        #[test]
        fn a_well_sealed_lie_is_survived(
            to: u64, len: u32, from: u32, count: u16, record_len: u32, kind in 0u8..4,
        ) {
            let mut bytes = Vec::new();
            header(&mut bytes, NAME, 0, record_len as usize, count, kind);
            bytes.extend_from_slice(&to.to_le_bytes());
            bytes.extend_from_slice(&len.to_le_bytes());
            bytes.extend_from_slice(&from.to_le_bytes());
            bytes.resize(256, 0);
            let sealed = (record_len as usize).clamp(32, 256);
            seal(NAME, &mut bytes[..sealed]);
            if let Some(found) = decode(NAME, &bytes, 0) {
                for found in found.moves {
                    prop_assert!(found.from + found.len <= 256);
                }
            }
        }
    }
}

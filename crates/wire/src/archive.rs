//! Archive files: committed entries of one log, kept beside the node for a restore to a point in
//! time.
//!
//! ```text
//! file    | head, 96 B | entry | entry | ... | end, 64 B |
//!
//! head     0          8         12     14     16        32        40      48          56         64         72         80     92
//!         | CYARCH\r\n | version | log  | logs | cluster | replica | first | prev term | gap from | clock ms | begun ms | zero | crc32c |
//!
//! entry    0        4        8       16     24     25     32
//!         | crc32c | length | index | term | kind | zero | payload
//!
//! end      0        4            8      16          24        32       40         48
//!         | crc32c | 0xffffffff | last | last term | entries | bytes  | clock ms | zero ...
//! ```
//! A checksum of an entry or the end covers the head's checksum first, so that nothing can be mixed
//! between files.

use crc_fast::{CrcAlgorithm, Digest};

use crate::batch;
use crate::codec::{DecodeError, Reader, Write};
use crate::command::{Command, Operation};
use crate::gang::{FIXED_BYTES, Head as GangHead};
use crate::ring::crc32c_of;

const MAGIC: [u8; 8] = *b"CYARCH\r\n";
const VERSION: u32 = 1;
/// Bytes of a head.
pub const HEAD_BYTES: usize = 96;
/// Bytes before an entry's payload.
pub const ENTRY_BYTES: usize = 32;
/// Bytes of an end.
pub const END_BYTES: usize = 64;
/// Longest payload that a reader believes.
pub const MAX_PAYLOAD: u32 = 1 << 30;
/// In place of an entry's length: the end.
const END_MARK: u32 = u32::MAX;

/// What a file begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// The physical log.
    pub log: u16,
    /// How many the cluster has.
    pub logs: u16,
    /// The cluster.
    pub cluster: u128,
    /// Who wrote it.
    pub replica: u64,
    /// Index of the first entry.
    pub first: u64,
    /// Term of the entry before it.
    pub prev_term: u64,
    /// Entries from this one to `first - 1` have left the writer's log before they were archived;
    /// 0: none have.
    pub gap_from: u64,
    /// The latest stamp among the entries before, as far as the writer knows, in milliseconds
    /// since 1970.
    pub clock_ms: u64,
    /// When the file was begun, by the writer's clock, in milliseconds since 1970.
    pub begun_ms: u64,
}

impl Head {
    /// The head's bytes; the last four are its checksum.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEAD_BYTES);
        out.extend_from_slice(&MAGIC);
        out.put_u32(VERSION);
        out.extend_from_slice(&self.log.to_le_bytes());
        out.extend_from_slice(&self.logs.to_le_bytes());
        out.extend_from_slice(&self.cluster.to_le_bytes());
        for word in [
            self.replica,
            self.first,
            self.prev_term,
            self.gap_from,
            self.clock_ms,
            self.begun_ms,
        ] {
            out.put_u64(word);
        }
        out.resize(HEAD_BYTES - 4, 0);
        let sum = crc32c_of(&out);
        out.put_u32(sum);
        out
    }

    /// Reads a head; answers it and its checksum, which seeds those of the entries.
    ///
    /// # Errors
    /// Anything that [`Head::encode`] would not write.
    pub fn decode(bytes: &[u8; HEAD_BYTES]) -> Result<(Head, u32), DecodeError> {
        let mut reader = Reader::new(bytes);
        if reader.array::<8>()? != MAGIC {
            return Err(DecodeError::Contradiction("this is no archive file"));
        }
        let version = reader.u32()?;
        if version != VERSION {
            return Err(DecodeError::Unknown {
                what: "archive format",
                value: u64::from(version),
            });
        }
        let sum = crc32c_of(&bytes[..HEAD_BYTES - 4]);
        if bytes[HEAD_BYTES - 4..] != sum.to_le_bytes() {
            return Err(DecodeError::Contradiction("the head's checksum"));
        }
        let head = Head {
            log: u16::from_le_bytes(reader.array()?),
            logs: u16::from_le_bytes(reader.array()?),
            cluster: u128::from_le_bytes(reader.array()?),
            replica: reader.u64()?,
            first: reader.u64()?,
            prev_term: reader.u64()?,
            gap_from: reader.u64()?,
            clock_ms: reader.u64()?,
            begun_ms: reader.u64()?,
        };
        if head.first == 0 || head.log >= head.logs || head.gap_from >= head.first {
            return Err(DecodeError::Contradiction("the head's numbers"));
        }
        Ok((head, sum))
    }
}

/// What stands before an entry's payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryHead {
    /// Payload bytes.
    pub length: u32,
    /// The entry's index.
    pub index: u64,
    /// Its term.
    pub term: u64,
    /// What the payload is.
    pub kind: u8,
}

/// Appends an entry without its checksum, which [`seal_entry`] adds: the one who has the payload
/// need not compute it.
pub fn put_entry(out: &mut Vec<u8>, head: &EntryHead) {
    out.put_u32(0);
    out.put_u32(head.length);
    out.put_u64(head.index);
    out.put_u64(head.term);
    out.put_u8(head.kind);
    out.extend_from_slice(&[0; 7]);
}

fn sum_of(seed: u32, bytes: &[u8]) -> u32 {
    let mut digest = Digest::new(CrcAlgorithm::Crc32Iscsi);
    digest.update(&seed.to_le_bytes());
    digest.update(bytes);
    digest.finalize() as u32
}

/// Computes the checksum of a whole entry, head and payload, and puts it in its place. `seed` is
/// that of the file's head.
pub fn seal_entry(seed: u32, entry: &mut [u8]) {
    let sum = sum_of(seed, &entry[4..]);
    entry[..4].copy_from_slice(&sum.to_le_bytes());
}

/// Whether a whole entry's or end's checksum is right.
pub fn is_whole(seed: u32, bytes: &[u8]) -> bool {
    bytes.len() > 4 && bytes[..4] == sum_of(seed, &bytes[4..]).to_le_bytes()
}

/// What comes next in a file, by its first 32 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// An entry whose payload follows.
    Entry(EntryHead),
    /// The end, of [`END_BYTES`].
    End,
}

/// Reads what stands before a payload, or says that the end begins here. Checksums are checked once
/// all bytes are there.
///
/// # Errors
/// Nothing that a writer would have put here.
pub fn next(bytes: &[u8; ENTRY_BYTES]) -> Result<Next, DecodeError> {
    let mut reader = Reader::new(bytes);
    let _sum = reader.u32()?;
    let length = reader.u32()?;
    if length == END_MARK {
        return Ok(Next::End);
    }
    if length > MAX_PAYLOAD {
        return Err(DecodeError::OutOfRange {
            what: "payload of an archived entry",
            value: u64::from(length),
        });
    }
    let head = EntryHead {
        length,
        index: reader.u64()?,
        term: reader.u64()?,
        kind: reader.u8()?,
    };
    match reader.array::<7>()? {
        [0, 0, 0, 0, 0, 0, 0] => Ok(Next::Entry(head)),
        _ => Err(DecodeError::Contradiction("an archived entry's zeros")),
    }
}

/// What a sealed file ends with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    /// Index of the last entry.
    pub last: u64,
    /// Its term.
    pub last_term: u64,
    /// How many entries the file has.
    pub entries: u64,
    /// Bytes before the end.
    pub bytes: u64,
    /// The latest stamp among the entries up to the last, in milliseconds since 1970.
    pub clock_ms: u64,
}

impl End {
    /// The end's bytes.
    pub fn encode(&self, seed: u32) -> Vec<u8> {
        let mut out = Vec::with_capacity(END_BYTES);
        out.put_u32(0);
        out.put_u32(END_MARK);
        for word in [
            self.last,
            self.last_term,
            self.entries,
            self.bytes,
            self.clock_ms,
        ] {
            out.put_u64(word);
        }
        out.resize(END_BYTES, 0);
        seal_entry(seed, &mut out);
        out
    }

    /// Reads an end and checks its checksum.
    ///
    /// # Errors
    /// Anything that [`End::encode`] would not write.
    pub fn decode(seed: u32, bytes: &[u8; END_BYTES]) -> Result<End, DecodeError> {
        let mut reader = Reader::new(bytes);
        let _sum = reader.u32()?;
        if reader.u32()? != END_MARK || !is_whole(seed, bytes) {
            return Err(DecodeError::Contradiction("the end's checksum"));
        }
        Ok(End {
            last: reader.u64()?,
            last_term: reader.u64()?,
            entries: reader.u64()?,
            bytes: reader.u64()?,
            clock_ms: reader.u64()?,
        })
    }
}

/// The leader's stamp of an entry, in milliseconds since 1970; `None` for one that carries none:
/// what a term begins with, and a gang's share without its commands.
pub fn stamp_ms(payload: &[u8]) -> Option<u64> {
    let fixed = payload.first_chunk::<FIXED_BYTES>();
    let at = fixed.and_then(GangHead::length).unwrap_or(0);
    let head = batch::Head::decode(payload.get(at..)?).ok()?;
    Some(head.stamp_ms).filter(|stamp| *stamp > 0)
}

/// Longest payload of an entry that sets a log's clock: it stands in its own entry.
const SET_CLOCK_BYTES: usize = 64;

/// A log's clock after an entry, from the clock before it: the entry's stamp if that is later, or
/// the time that the entry sets.
pub fn clock_after(clock_ms: u64, payload: &[u8]) -> u64 {
    let stamped = || stamp_ms(payload).map_or(clock_ms, |stamp| stamp.max(clock_ms));
    clock_set(payload).unwrap_or_else(stamped)
}

/// The time to which an entry sets its log's clock ([`Operation::SetClock`]), if it does.
pub fn clock_set(payload: &[u8]) -> Option<u64> {
    if payload.len() > SET_CLOCK_BYTES {
        return None;
    }
    let commands = batch::iter(payload).into_iter().flatten();
    let set = commands.filter_map(|bytes| match Command::decode(bytes).ok()?.operation {
        Operation::SetClock { time_ms } => Some(time_ms),
        _ => None,
    });
    set.last()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    fn head() -> Head {
        Head {
            log: 2,
            logs: 3,
            cluster: 7 << 99,
            replica: 4,
            first: 100,
            prev_term: 6,
            gap_from: 90,
            clock_ms: 5,
            begun_ms: 1_700_000_000_000,
        }
    }

    #[test]
    fn heads_and_ends_come_back_and_every_flip_is_noticed() {
        let bytes: [u8; HEAD_BYTES] = head().encode().try_into().unwrap();
        let (back, seed) = Head::decode(&bytes).unwrap();
        assert_eq!(back, head());
        let end = End {
            last: 120,
            last_term: 8,
            entries: 21,
            bytes: 4711,
            clock_ms: 99,
        };
        let ending: [u8; END_BYTES] = end.encode(seed).try_into().unwrap();
        assert_eq!(End::decode(seed, &ending), Ok(end));
        assert!(End::decode(seed ^ 1, &ending).is_err(), "of another file");
        for at in 0..HEAD_BYTES {
            let mut bad = bytes;
            bad[at] ^= 1;
            assert!(Head::decode(&bad).is_err(), "head byte {at}");
        }
        for at in 0..END_BYTES {
            let mut bad = ending;
            bad[at] ^= 1;
            assert!(End::decode(seed, &bad).is_err(), "end byte {at}");
        }
    }

    proptest! {
        #[test]
        fn entries_come_back(payload in vec(any::<u8>(), 0..200), index: u64, term: u64, kind: u8, seed: u32, flip: prop::sample::Index) {
            let entry = EntryHead { length: payload.len() as u32, index, term, kind };
            let mut bytes = Vec::new();
            put_entry(&mut bytes, &entry);
            bytes.extend_from_slice(&payload);
            seal_entry(seed, &mut bytes);
            prop_assert!(is_whole(seed, &bytes));
            prop_assert!(!is_whole(seed ^ 1, &bytes));
            let first: &[u8; ENTRY_BYTES] = bytes.first_chunk().unwrap();
            prop_assert_eq!(next(first), Ok(Next::Entry(entry)));
            let at = flip.index(bytes.len());
            bytes[at] ^= 0x10;
            prop_assert!(!is_whole(seed, &bytes));
        }

        #[test]
        fn garbage_has_no_end_and_no_panic(bytes: [u8; 32], payload in vec(any::<u8>(), 0..80)) {
            let _ = next(&bytes);
            let _ = stamp_ms(&payload);
            let _ = clock_after(0, &payload);
        }
    }

    #[test]
    fn clock_follows_stamps_and_what_sets_it() {
        let stamped = batch::Writer::new().finish(77);
        assert_eq!(clock_after(50, &stamped), 77);
        assert_eq!(clock_after(90, &stamped), 90);
        assert_eq!(clock_after(90, &[]), 90);
        let mut set = batch::Writer::new();
        let command = Command {
            session: None,
            operation: Operation::SetClock { time_ms: 60 },
        };
        set.push(|out| command.encode(out));
        assert_eq!(clock_after(90, &set.finish(60)), 60);
    }

    #[test]
    fn stamps_are_found() {
        use crate::gang::{Kind, Nonce};
        let batch = batch::Writer::new().finish(77);
        assert_eq!(stamp_ms(&batch), Some(77));
        assert_eq!(stamp_ms(&[]), None);
        let mut share = Vec::new();
        GangHead {
            kind: Kind::Part,
            nonce: Nonce {
                replica: 1,
                boot: 2,
                counter: 3,
            },
            view: vec![(0, 1), (2, 5)],
        }
        .encode(&mut share);
        assert_eq!(stamp_ms(&share), None, "a share without the commands");
        share.extend_from_slice(&batch);
        assert_eq!(stamp_ms(&share), Some(77));
    }
}

//! How records stand in segments: blocks at multiples of 64, each with a header and a checksum.
//! Pure.
//!
//! ```text
//!   0       2     4     8     12       14       16       20     24     32
//!   | magic | cnt | crc | len | number | worker | server | term | name | payload … | zeros to a multiple of 64
//!     u16     u16   u32   u32   u16      u16      u32      u32    u64
//! ```
//!
//! **What tells a block from other bytes.** The checksum runs over a seed, the header, and the
//! payload. The seed belongs to one allocation of one segment
//! ([`BackupMemory::seed`](crate::memory::BackupMemory::seed)); so bytes of the segment's earlier
//! life fail it, and so do payloads that imitate a block, because their authors do not know it. The
//! term is in the header, under the checksum; who scans a log of one writer also compares it with
//! the segment's.
//!
//! A record larger than a block is cut into `cnt` blocks, numbered from 0, which need not lie
//! together (rowan §4.2.2). `name` is one number per record: the stream that its sender was given
//! when it opened its log, and a counter.

use std::ops::Range;

use cyclone_wire::ring::crc32c;

use crate::memory::STREAM_BITS;
use crate::protocol::SenderId;

/// Blocks begin on multiples of this.
//= rowan §3.2.2
pub const ALIGN_BYTES: usize = 64;

/// Bytes of a block before its payload.
pub const HEADER_BYTES: usize = 32;

/// The largest block, header and padding included: bounds what a scan reads for a length that lies.
pub const MAX_BLOCK_BYTES: usize = 1 << 20;

/// The most blocks of a record: bounds what an [`Assembler`](crate::assemble::Assembler) holds for
/// a count that lies.
pub const MAX_BLOCKS: u16 = 1024;

const MAGIC: u16 = 0x4243;
const COUNTER_BITS: u32 = 64 - STREAM_BITS;

/// A record's name, unique among the records of its sender in one memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RecordName(u64);

impl RecordName {
    /// The `counter`-th record of a stream.
    pub fn new(stream: u32, counter: u64) -> RecordName {
        let counter = counter & ((1 << COUNTER_BITS) - 1);
        RecordName(u64::from(stream) << COUNTER_BITS | counter)
    }

    /// From one number.
    pub const fn from_bits(bits: u64) -> RecordName {
        RecordName(bits)
    }

    /// As one number.
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Its stream.
    pub const fn stream(self) -> u32 {
        (self.0 >> COUNTER_BITS) as u32
    }

    /// Its number within the stream.
    pub const fn counter(self) -> u64 {
        self.0 & ((1 << COUNTER_BITS) - 1)
    }
}

/// Whose record it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Origin {
    /// Who sent it. Worker numbers beyond `u16::MAX` do not fit a header; senders of that kind are
    /// refused.
    pub sender: SenderId,
    /// In which term.
    pub term: u32,
    /// Its name.
    pub name: RecordName,
}

/// One block found whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// Whose block.
    pub origin: Origin,
    /// How many blocks the record has.
    pub count: u16,
    /// Which of them this is.
    pub number: u16,
    /// Where in the scanned bytes its payload is.
    pub payload: Range<usize>,
}

impl Block {
    /// Where the next block can begin.
    pub fn end(&self) -> usize {
        self.payload.end.next_multiple_of(ALIGN_BYTES)
    }
}

/// How records are cut into blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    payload_bytes: usize,
}

impl Cut {
    /// Into blocks of at most `max_block` bytes; `None` if not even one byte fits beside a header.
    pub fn new(max_block: usize) -> Option<Cut> {
        let block = max_block.min(MAX_BLOCK_BYTES) / ALIGN_BYTES * ALIGN_BYTES;
        (block > HEADER_BYTES).then(|| Cut {
            payload_bytes: block - HEADER_BYTES,
        })
    }

    /// The most bytes a record may have.
    pub fn max_record(&self) -> usize {
        self.payload_bytes * usize::from(MAX_BLOCKS)
    }

    /// How many blocks a record of `len` bytes has; an empty one has one too.
    pub fn count(&self, len: usize) -> usize {
        len.div_ceil(self.payload_bytes).max(1)
    }

    /// The parts of a record, one per block.
    //= rowan §4.2.2
    pub fn parts<'a>(&self, record: &'a [u8]) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        let payload_bytes = self.payload_bytes;
        (0..self.count(record.len())).map(move |number| {
            let from = number * payload_bytes;
            &record[from..record.len().min(from + payload_bytes)]
        })
    }
}

/// Bytes of a block with a payload of `len` bytes, padding included.
pub const fn block_bytes(len: usize) -> usize {
    (HEADER_BYTES + len).next_multiple_of(ALIGN_BYTES)
}

/// Writes a block behind what `into` holds. `cut` is (count, number).
pub fn encode_block(
    seed: u64,
    origin: &Origin,
    cut: (u16, u16),
    payload: &[u8],
    into: &mut Vec<u8>,
) {
    debug_assert!(payload.len() <= MAX_BLOCK_BYTES - HEADER_BYTES);
    debug_assert!(origin.sender.worker <= u32::from(u16::MAX));
    let start = into.len();
    into.extend_from_slice(&MAGIC.to_le_bytes());
    into.extend_from_slice(&cut.0.to_le_bytes());
    into.extend_from_slice(&[0; 4]);
    into.extend_from_slice(&(payload.len() as u32).to_le_bytes());
    into.extend_from_slice(&cut.1.to_le_bytes());
    into.extend_from_slice(&(origin.sender.worker as u16).to_le_bytes());
    into.extend_from_slice(&origin.sender.server.to_le_bytes());
    into.extend_from_slice(&origin.term.to_le_bytes());
    into.extend_from_slice(&origin.name.bits().to_le_bytes());
    into.extend_from_slice(payload);
    let crc = checksum(seed, &into[start..]);
    into[start + 4..start + 8].copy_from_slice(&crc.to_le_bytes());
    into.resize(start + block_bytes(payload.len()), 0);
}

/// Gives a block that was written with another seed this one; `block` is what [`encode_block`]
/// wrote.
pub fn reseed_block(seed: u64, block: &mut [u8]) {
    let Some(len) = word(block, 8).map(u32::from_le_bytes) else {
        return;
    };
    if let Some(sealed) = block.get(..HEADER_BYTES + len as usize) {
        let crc = checksum(seed, sealed);
        block[4..8].copy_from_slice(&crc.to_le_bytes());
    }
}

/// Over the seed and everything but the checksum itself.
fn checksum(seed: u64, block: &[u8]) -> u32 {
    crc32c([&seed.to_le_bytes()[..], &block[..4], &block[8..]].into_iter())
}

fn word<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk::<N>().copied()
}

/// Reads the block at `start`, if one is there.
pub fn decode_block(seed: u64, bytes: &[u8], start: usize) -> Option<Block> {
    let header = bytes.get(start..start.checked_add(HEADER_BYTES)?)?;
    if word(header, 0).map(u16::from_le_bytes) != Some(MAGIC) {
        return None;
    }
    let count = u16::from_le_bytes(word(header, 2)?);
    let number = u16::from_le_bytes(word(header, 12)?);
    let len = u32::from_le_bytes(word(header, 8)?) as usize;
    if number >= count || count > MAX_BLOCKS || len > MAX_BLOCK_BYTES - HEADER_BYTES {
        return None;
    }
    let end = start + HEADER_BYTES + len;
    let block = bytes.get(start..end)?;
    if u32::from_le_bytes(word(header, 4)?) != checksum(seed, block) {
        return None;
    }
    Some(Block {
        origin: Origin {
            sender: SenderId {
                worker: u32::from(u16::from_le_bytes(word(header, 14)?)),
                server: u32::from_le_bytes(word(header, 16)?),
            },
            term: u32::from_le_bytes(word(header, 20)?),
            name: RecordName::from_bits(u64::from_le_bytes(word(header, 24)?)),
        },
        count,
        number,
        payload: start + HEADER_BYTES..end,
    })
}

/// Where blocks may stand in a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// One behind the other from the front: the first place without a block is the end.
    Contiguous,
    /// At any multiple of 64: writers reserve places and may die before they write.
    WithHoles,
}

/// Finds a segment's blocks in order of address. Whatever is none ends a contiguous log and is
/// skipped in one with holes; a block that was found is never looked into.
pub fn scan_blocks(shape: Shape, seed: u64, segment: &[u8], mut found: impl FnMut(&Block, &[u8])) {
    let mut at = 0;
    while at < segment.len() {
        match decode_block(seed, segment, at) {
            Some(block) => {
                at = block.end();
                found(&block, &segment[block.payload.clone()]);
            }
            None if shape == Shape::Contiguous => return,
            None => at += ALIGN_BYTES,
        }
    }
}

#[cfg(test)]
#[path = "frame_tests.rs"]
mod tests;

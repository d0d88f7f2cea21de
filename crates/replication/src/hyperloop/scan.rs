//! Finds a chain's records in one backup's segment.

use crate::assemble::Assembler;
use crate::frame::{
    ALIGN_BYTES, Block, Origin, RecordName, Shape, decode_block, encode_block, scan_blocks,
};
use crate::memory::{BackupMemory, Owner, SegmentState};
use crate::protocol::{ReplicationError, SenderId};
use crate::scan::ScannedRecord;

/// Bytes of the mark at a segment's beginning.
pub const MARK_BYTES: u64 = ALIGN_BYTES as u64;

/// A mark: which seed the blocks behind it have, and which stream their names. `seed` is the
/// member's own.
pub(super) fn encode_mark(seed: u64, origin: &Origin, chain_seed: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(MARK_BYTES as usize);
    encode_block(seed, origin, (1, 0), &chain_seed.to_le_bytes(), &mut bytes);
    bytes
}

/// Reads a segment's mark.
fn decode_mark(seed: u64, bytes: &[u8]) -> Option<(Origin, u64)> {
    let block = decode_block(seed, bytes, 0)?;
    let payload = bytes.get(block.payload.clone())?;
    let chain_seed = u64::from_le_bytes(payload.try_into().ok()?);
    Some((block.origin, chain_seed))
}

/// Finds the blocks of one segment, in order.
///
/// # Errors
/// [`ReplicationError::Segment`] if it is free or not in the table.
pub fn scan_blocks_of(
    memory: &BackupMemory,
    segment: u32,
    mut found: impl FnMut(&Block, &[u8]),
) -> Result<(), ReplicationError> {
    let entry = memory
        .entry(segment)
        .filter(|entry| entry.state != SegmentState::Free);
    let entry = entry.ok_or_else(|| ReplicationError::Segment {
        segment,
        state: "free, or beyond the table".to_owned(),
        wanted: "allocated",
    })?;
    let at = memory.segment_offset(segment);
    let bytes = memory.area().read_vec(at, memory.segment_bytes());
    let Some((mark, chain_seed)) = decode_mark(memory.seed(entry.epoch), &bytes) else {
        return Ok(());
    };
    let owner: Option<SenderId> = match entry.owner {
        Owner::Sender(owner) => Some(owner),
        _ => None,
    };
    let same = |origin: &Origin| Some(origin.sender) == owner && origin.term == entry.term;
    if !same(&mark) {
        return Ok(());
    }
    let behind = MARK_BYTES as usize;
    let mut newest = 0;
    scan_blocks(
        Shape::Contiguous,
        chain_seed,
        &bytes[behind..],
        |block, payload| {
            let counter = block.origin.name.counter();
            // A worker's counter never goes back.
            if !same(&block.origin) || block.origin.name.stream() != 0 || counter < newest {
                return;
            }
            newest = counter;
            let named = Block {
                origin: Origin {
                    name: RecordName::new(mark.name.stream(), counter),
                    ..block.origin
                },
                payload: block.payload.start + behind..block.payload.end + behind,
                ..*block
            };
            found(&named, payload);
        },
    );
    Ok(())
}

/// Finds the records of one segment; see [`scan_segment`](crate::scan::scan_segment), which comes
/// here for this protocol's memories.
///
/// # Errors
/// [`ReplicationError::Segment`] if it is free or not in the table.
pub fn scan_segment(
    memory: &BackupMemory,
    segment: u32,
    assembler: &mut Assembler,
    mut found: impl FnMut(ScannedRecord),
) -> Result<(), ReplicationError> {
    scan_blocks_of(memory, segment, |block, payload| {
        if let Some(bytes) = assembler.block(block, payload) {
            found(ScannedRecord {
                sender: block.origin.sender,
                term: block.origin.term,
                name: block.origin.name,
                segment,
                offset: block.payload.start as u64,
                bytes,
            });
        }
    })
}

#[cfg(test)]
mod tests {
    use cyclone_pmem::Region;

    use super::*;
    use crate::memory::{Content, FormatOptions};
    use crate::protocol::Protocol;

    const SENDER: SenderId = SenderId {
        server: 3,
        worker: 1,
    };

    fn origin(stream: u32, counter: u64) -> Origin {
        Origin {
            sender: SENDER,
            term: 2,
            name: RecordName::new(stream, counter),
        }
    }

    fn memory() -> (BackupMemory, u32) {
        let region = Region::anonymous(64 << 10).expect("region");
        let area = region.take(0, 64 << 10).expect("area").share();
        let options = FormatOptions {
            protocol: Protocol::Hyperloop,
            segment_bytes: 4096,
            secret: 0x5eed,
        };
        let mut memory = BackupMemory::format(area, &options).expect("format");
        let owner = Owner::Sender(SENDER);
        let segment = memory.allocate(owner, 2, 0, Content::Stale).expect("free");
        (memory, segment)
    }

    fn records(memory: &BackupMemory, segment: u32) -> Vec<(RecordName, Vec<u8>)> {
        let mut found = Vec::new();
        let mut assembler = Assembler::default();
        scan_segment(memory, segment, &mut assembler, |record| {
            found.push((record.name, record.bytes));
        })
        .expect("scan");
        found
    }

    #[test]
    fn blocks_count_only_behind_a_mark_of_this_allocation() {
        let (memory, segment) = memory();
        let at = memory.segment_offset(segment);
        let mut blocks = Vec::new();
        encode_block(99, &origin(0, 7), (1, 0), b"one", &mut blocks);
        encode_block(99, &origin(0, 8), (1, 0), b"two", &mut blocks);
        memory.area().write(at + MARK_BYTES, &blocks);
        assert_eq!(records(&memory, segment), []);
        let epoch = memory.entry(segment).expect("entry").epoch;
        let stale = encode_mark(memory.seed(epoch + 1), &origin(5, 0), 99);
        memory.area().write(at, &stale);
        assert_eq!(records(&memory, segment), []);
        let mark = encode_mark(memory.seed(epoch), &origin(5, 0), 99);
        assert_eq!(mark.len() as u64, MARK_BYTES);
        memory.area().write(at, &mark);
        let expected = [
            (RecordName::new(5, 7), b"one".to_vec()),
            (RecordName::new(5, 8), b"two".to_vec()),
        ];
        assert_eq!(records(&memory, segment), expected);
    }

    #[test]
    fn a_scan_of_garbage_ends_where_it_begins() {
        let (memory, segment) = memory();
        let at = memory.segment_offset(segment);
        let epoch = memory.entry(segment).expect("entry").epoch;
        let mark = encode_mark(memory.seed(epoch), &origin(5, 0), 99);
        memory.area().write(at, &mark);
        for seed in 0..200u64 {
            let mut word = seed;
            for place in (MARK_BYTES..4096).step_by(8) {
                word = word.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23) ^ place;
                memory.area().store_u64(at + place, word);
            }
            assert_eq!(records(&memory, segment), [], "seed {seed}");
        }
    }
}

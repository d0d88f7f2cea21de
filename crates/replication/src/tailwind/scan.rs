//! Finds a Tailwind log's records: after a crash in the whole memory, for digestion in one used
//! buffer.

use super::chain::{Found, PREFIX_BYTES, scan_buffer};
use crate::frame::RecordName;
use crate::memory::{BackupMemory, Entry, Owner, SegmentState};
use crate::protocol::{Protocol, ReplicationError, SenderId};
use crate::scan::ScannedRecord;

/// How a buffer ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TailwindScan {
    /// The buffer's segment.
    pub segment: u32,
    /// Bytes of whole records.
    pub end: u64,
    /// What stands behind them.
    pub tail: Found,
}

fn owner(entry: &Entry) -> Option<SenderId> {
    match entry.owner {
        Owner::Sender(sender) if entry.state != SegmentState::Free => Some(sender),
        _ => None,
    }
}

/// Finds the records of every buffer that is not free, in the order in which buffers were granted.
/// Answers how each buffer ends.
///
/// A record has no separate name in this protocol: it is called by its buffer's epoch, cut to the
/// bits of a stream, and its place in the buffer.
///
/// # Errors
/// [`ReplicationError::Damaged`] for another protocol's memory.
pub fn scan(
    memory: &BackupMemory,
    mut found: impl FnMut(ScannedRecord),
) -> Result<Vec<TailwindScan>, ReplicationError> {
    memory
        .in_order(|entry| owner(entry).is_some())
        .into_iter()
        .map(|segment| scan_segment(memory, segment, &mut found))
        .collect()
}

/// Finds the records of one buffer.
///
/// # Errors
/// [`ReplicationError::Segment`] if it is no buffer, [`ReplicationError::Damaged`] for another
/// protocol's memory.
pub fn scan_segment(
    memory: &BackupMemory,
    segment: u32,
    mut found: impl FnMut(ScannedRecord),
) -> Result<TailwindScan, ReplicationError> {
    if memory.protocol() != Protocol::Tailwind {
        return Err(ReplicationError::Damaged(format!(
            "holds a log of {}, not of {}",
            memory.protocol(),
            Protocol::Tailwind
        )));
    }
    let buffer = memory
        .entry(segment)
        .and_then(|entry| Some((entry, owner(entry)?)));
    let (entry, sender) = buffer.ok_or_else(|| ReplicationError::Segment {
        segment,
        state: "free, not a buffer, or beyond the table".to_owned(),
        wanted: "a buffer",
    })?;
    let bytes = memory
        .area()
        .read_vec(memory.segment_offset(segment), memory.segment_bytes());
    let scan = scan_buffer(memory.seed(entry.epoch), &bytes);
    for at in scan.records {
        let stream = (entry.epoch & ((1 << crate::memory::STREAM_BITS) - 1)) as u32;
        found(ScannedRecord {
            sender,
            term: entry.term,
            name: RecordName::new(stream, (at.start - PREFIX_BYTES) as u64),
            segment,
            offset: at.start as u64,
            bytes: bytes[at].to_vec(),
        });
    }
    Ok(TailwindScan {
        segment,
        end: scan.end as u64,
        tail: scan.tail,
    })
}

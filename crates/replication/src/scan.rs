//! Finds the records in a backup's memory: after a crash in all of it, for digestion in one used
//! segment.
//!
//! Never delivers a part of a record, nor one that was not sent; a record that was retried may come
//! twice.

use crate::assemble::Assembler;
use crate::frame::{Block, RecordName, Shape, scan_blocks};
use crate::memory::{BackupMemory, Entry, Owner, SegmentState};
use crate::protocol::{Protocol, ReplicationError, SenderId};

/// A record found whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScannedRecord {
    /// Who sent it.
    pub sender: SenderId,
    /// In which term.
    pub term: u32,
    /// Its name.
    pub name: RecordName,
    /// The segment that holds its last-found block.
    pub segment: u32,
    /// Where in that segment the block's payload begins.
    pub offset: u64,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

/// A record while it is found: its bytes are borrowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FoundRecord<'a> {
    /// Who sent it.
    pub sender: SenderId,
    /// In which term.
    pub term: u32,
    /// Its name.
    pub name: RecordName,
    /// The segment that holds its last-found block.
    pub segment: u32,
    /// Where in that segment the block's payload begins.
    pub offset: u64,
    /// Its bytes.
    pub bytes: &'a [u8],
    /// Whether they are known to lie at `offset` one behind the other.
    pub is_in_one: bool,
}

impl FoundRecord<'_> {
    fn to_owned(self) -> ScannedRecord {
        ScannedRecord {
            sender: self.sender,
            term: self.term,
            name: self.name,
            segment: self.segment,
            offset: self.offset,
            bytes: self.bytes.to_vec(),
        }
    }
}

impl ScannedRecord {
    fn as_found(&self) -> FoundRecord<'_> {
        FoundRecord {
            sender: self.sender,
            term: self.term,
            name: self.name,
            segment: self.segment,
            offset: self.offset,
            bytes: &self.bytes,
            is_in_one: false,
        }
    }
}

/// How a protocol's blocks stand in its segments; `None` where its records are no blocks of
/// `frame`.
fn shape(protocol: Protocol) -> Option<Shape> {
    match protocol {
        Protocol::Rpc | Protocol::Rwrite | Protocol::Batch => Some(Shape::Contiguous),
        Protocol::Share | Protocol::Faa | Protocol::Rowan => Some(Shape::WithHoles),
        Protocol::Tailwind | Protocol::Hyperloop => None,
    }
}

/// Whether a block may stand in a segment with this entry.
fn belongs(entry: &Entry, block: &Block) -> bool {
    let origin = &block.origin;
    match entry.owner {
        Owner::Sender(owner) => origin.sender == owner && origin.term == entry.term,
        Owner::Server(server) => origin.sender.server == server && origin.term == entry.term,
        Owner::BackupLog => true,
        Owner::None | Owner::Worker(_) | Owner::Cleaner(_) => false,
    }
}

/// Finds the records of every segment that is not free, in order of allocation. Answers how many
/// records were begun and are not whole.
///
/// # Errors
/// [`ReplicationError::Damaged`] for a memory of a protocol that is scanned by its own module.
pub fn scan(
    memory: &BackupMemory,
    mut found: impl FnMut(ScannedRecord),
) -> Result<u64, ReplicationError> {
    let mut assembler = Assembler::default();
    let remote = |entry: &Entry| entry.state != SegmentState::Free && entry.owner.is_remote();
    for segment in memory.in_order(remote) {
        scan_segment(memory, segment, &mut assembler, &mut found)?;
    }
    Ok(assembler.incomplete())
}

/// Finds the records of one segment. A record whose blocks lie in several segments comes with the
/// last of them: feed one assembler with a memory's segments, in the order in which they were
/// handed over.
///
/// # Errors
/// [`ReplicationError::Segment`] if it is free or not in the table, [`ReplicationError::Damaged`]
/// for a memory of a protocol that is scanned by its own module.
pub fn scan_segment(
    memory: &BackupMemory,
    segment: u32,
    assembler: &mut Assembler,
    mut found: impl FnMut(ScannedRecord),
) -> Result<(), ReplicationError> {
    let mut copy = Vec::new();
    scan_records(memory, segment, assembler, &mut copy, |record| {
        found(record.to_owned());
    })
}

/// As [`scan_segment`], without a copy of each record. `copy` is where the segment is copied to:
/// what it holds before and after does not matter.
///
/// # Errors
/// As those of [`scan_segment`].
pub fn scan_records(
    memory: &BackupMemory,
    segment: u32,
    assembler: &mut Assembler,
    copy: &mut Vec<u8>,
    mut found: impl FnMut(FoundRecord<'_>),
) -> Result<(), ReplicationError> {
    let entry = memory
        .entry(segment)
        .filter(|entry| entry.state != SegmentState::Free)
        .ok_or_else(|| ReplicationError::Segment {
            segment,
            state: "free, or beyond the table".to_owned(),
            wanted: "allocated",
        })?;
    if memory.protocol() == Protocol::Tailwind {
        let found = |record: ScannedRecord| found(record.as_found());
        let buffer = crate::tailwind::scan_segment(memory, segment, found)?;
        if buffer.tail != crate::tailwind::Found::Nothing {
            assembler.note_incomplete();
        }
        return Ok(());
    }
    if memory.protocol() == Protocol::Hyperloop {
        let found = |record: ScannedRecord| found(record.as_found());
        return crate::hyperloop::scan_segment(memory, segment, assembler, found);
    }
    let shape = shape(memory.protocol()).ok_or_else(|| {
        ReplicationError::Damaged(format!(
            "records of {} are found by its own scanner",
            memory.protocol()
        ))
    })?;
    let area = memory.area();
    area.read_into(memory.segment_offset(segment), memory.segment_bytes(), copy);
    let seed = memory.seed_of(entry);
    scan_blocks(shape, seed, copy, |block, payload| {
        if !belongs(entry, block) {
            return;
        }
        let mut hand_over = |bytes: &[u8], is_in_one| {
            found(FoundRecord {
                sender: block.origin.sender,
                term: block.origin.term,
                name: block.origin.name,
                segment,
                offset: block.payload.start as u64,
                bytes,
                is_in_one,
            });
        };
        if block.count == 1 {
            hand_over(payload, true);
        } else if let Some(bytes) = assembler.block(block, payload) {
            hand_over(&bytes, false);
        }
    });
    Ok(())
}

//! Puts records together whose blocks lie apart, in one segment or in several. Pure.

use std::collections::{BTreeMap, HashMap};

use crate::frame::{Block, Origin};
use crate::protocol::SenderId;

/// How far the records that a sender has in flight may lie apart in its stream. Sets of blocks that
/// a stream has left this far behind will never be complete. Senders keep their windows below.
pub const WINDOW: u64 = 4096;

/// The most streams whose unfinished sets are kept: a bound for memory. Streams are dropped oldest
/// first.
pub const MAX_STREAMS: usize = 1 << 16;

type StreamId = (SenderId, u32, u32);

/// Blocks of one record, as far as they were found.
#[derive(Clone)]
struct Set {
    blocks: Vec<Option<Vec<u8>>>,
    missing: usize,
}

#[derive(Clone, Default)]
struct Stream {
    /// When a block of it was last seen, in blocks.
    touched: u64,
    newest: u64,
    sets: BTreeMap<u64, Set>,
}

/// Feed it a memory's segments in order of their epochs.
///
/// Holds only streams that have unfinished sets, at most [`WINDOW`] sets each.
#[derive(Clone, Default)]
pub struct Assembler {
    streams: HashMap<StreamId, Stream>,
    blocks: u64,
    abandoned: u64,
}

impl Assembler {
    /// Takes one block; answers its record if that is whole now.
    pub fn block(&mut self, block: &Block, payload: &[u8]) -> Option<Vec<u8>> {
        if block.count == 1 {
            return Some(payload.to_vec());
        }
        self.blocks += 1;
        let Origin { sender, term, name } = block.origin;
        let id = (sender, term, name.stream());
        if !self.streams.contains_key(&id) && self.streams.len() >= MAX_STREAMS {
            self.drop_oldest();
        }
        let stream = self.streams.entry(id).or_default();
        stream.touched = self.blocks;
        stream.newest = stream.newest.max(name.counter());
        let oldest_open = stream.newest.saturating_sub(WINDOW - 1);
        while let Some(entry) = stream.sets.first_entry()
            && *entry.key() < oldest_open
        {
            entry.remove();
            self.abandoned += 1;
        }
        if name.counter() < oldest_open {
            return None;
        }
        let count = usize::from(block.count);
        let set = stream.sets.entry(name.counter()).or_insert_with(|| Set {
            blocks: vec![None; count],
            missing: count,
        });
        // A record has one count; a block that says otherwise belongs to no record.
        if set.blocks.len() != count {
            return None;
        }
        let place = set.blocks.get_mut(usize::from(block.number))?;
        if place.is_none() {
            *place = Some(payload.to_vec());
            set.missing -= 1;
        }
        if set.missing > 0 {
            return None;
        }
        let set = stream.sets.remove(&name.counter())?;
        if stream.sets.is_empty() {
            self.streams.remove(&id);
        }
        Some(set.blocks.into_iter().flatten().flatten().collect())
    }

    /// Records of which blocks are missing, given up or not. After a crash none of them was
    /// acknowledged.
    pub fn incomplete(&self) -> u64 {
        let open: usize = self.streams.values().map(|stream| stream.sets.len()).sum();
        self.abandoned + open as u64
    }

    /// Records of which blocks are missing and may still come.
    pub fn unfinished(&self) -> u64 {
        self.streams.values().map(|it| it.sets.len() as u64).sum()
    }

    /// Counts a record that was found incomplete by other means than its blocks.
    pub(crate) fn note_incomplete(&mut self) {
        self.abandoned += 1;
    }

    fn drop_oldest(&mut self) {
        let oldest = self.streams.iter().min_by_key(|(_, stream)| stream.touched);
        if let Some((&id, stream)) = oldest {
            self.abandoned += stream.sets.len() as u64;
            self.streams.remove(&id);
        }
    }
}

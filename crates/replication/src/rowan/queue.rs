//! An append queue as its backup sees it, and what becomes of its segments when it has ended.
//!
//! A queue's number seeds the checksums of what is appended to it, so bytes that other queues left
//! in a segment are nothing to it: a segment is posted to a queue as it is, but for its first line,
//! once. When no free segment is left that the queue has not had, another queue is opened, and the
//! senders are notified to go on there. The old queue is closed when all of them have (or after
//! [`MOVE_US`]), and its untouched segments are posted to the new one.

use std::collections::{HashSet, VecDeque};

use cyclone_fabric::{AppendKey, Endpoint, FabricError};

use super::detect::FirstWords;
use crate::frame::{Shape, scan_blocks};
use crate::memory::{BackupMemory, Owner, SegmentState};
use crate::protocol::ReplicationError;

/// How long senders may take to go on to another queue, in microseconds. Who is later loses the
/// backup, and opens its log again. Used segments pile up meanwhile, so it is less than the second
/// that the others wait for one.
pub(super) const MOVE_US: u64 = 500_000;

/// One queue, from its opening to the next one's, a fencing, or a restart.
pub(super) struct Queue {
    pub(super) key: AppendKey,
    /// Its number, which seeds its records' checksums.
    pub(super) number: u64,
    /// Marked in use, but not yet taken by the fabric.
    pub(super) ready: VecDeque<u32>,
    /// In the fabric's hands, in order.
    pub(super) posted: VecDeque<u32>,
    pub(super) words: FirstWords,
    /// Every segment that was ever made ready for it.
    pub(super) had: HashSet<u32>,
    /// The most that were in `ready` and `posted` at once.
    peak: usize,
}

impl Queue {
    pub(super) fn new(key: AppendKey, number: u64) -> Queue {
        Queue {
            key,
            number,
            ready: VecDeque::new(),
            posted: VecDeque::new(),
            words: FirstWords::default(),
            had: HashSet::new(),
            peak: 0,
        }
    }

    pub(super) fn add(&mut self, segment: u32) {
        self.had.insert(segment);
        self.ready.push_back(segment);
        self.peak = self.peak.max(self.unused());
    }

    /// How many segments have been given to it and are not used.
    pub(super) fn unused(&self) -> usize {
        self.ready.len() + self.posted.len()
    }

    /// Whether at most one part in so many is left of the segments that it once had ready.
    pub(super) fn is_down_to(&self, part: usize) -> bool {
        self.unused() * part <= self.peak
    }

    /// Gives what is ready to the fabric, a batch at a time; answers how many segments it took.
    //= rowan §4.3
    pub(super) fn post(
        &mut self,
        endpoint: &mut dyn Endpoint,
        memory: &BackupMemory,
        batch: usize,
    ) -> Result<u64, ReplicationError> {
        let mut posted = 0;
        while !self.ready.is_empty() {
            let count = self.ready.len().min(batch.max(1));
            let ready = self.ready.range(..count);
            let offsets: Vec<u64> = ready.map(|&it| memory.segment_offset(it)).collect();
            match endpoint.post_segments(&self.key, &offsets) {
                Ok(()) => {}
                Err(FabricError::Busy) => break,
                Err(error) => return Err(error.into()),
            }
            for segment in self.ready.drain(..count) {
                self.posted.push_back(segment);
                self.words.posted(segment);
            }
            posted += count as u64;
        }
        Ok(posted)
    }

    /// Takes the segments that no append will touch again: those that the provider names, or, with
    /// the time of the look, those that first words tell.
    pub(super) fn used(
        &mut self,
        endpoint: &mut dyn Endpoint,
        memory: &BackupMemory,
        by_words: Option<u64>,
    ) -> Result<Vec<u32>, ReplicationError> {
        let (mut used, mut offsets) = (Vec::new(), Vec::new());
        // Also where the provider cannot really tell: it may count what it has posted.
        endpoint.used_segments(&self.key, &mut offsets)?;
        match by_words {
            Some(now_us) => {
                let word = |segment| first_word(memory, segment);
                self.words.look(now_us, word, &mut used);
            }
            None => used.extend(offsets.iter().filter_map(|&at| memory.segment_at(at))),
        }
        used.retain(|segment| self.posted.contains(segment));
        self.posted.retain(|segment| !used.contains(segment));
        Ok(used)
    }

    /// Ends the use of its segments after it was closed: the last ones, as many as are known to be
    /// untouched and what else holds nothing, become free, the others used. Answers those.
    pub(super) fn end(
        mut self,
        memory: &mut BackupMemory,
        untouched: u64,
    ) -> Result<VecDeque<u32>, ReplicationError> {
        let mut touched = self.posted.len().saturating_sub(untouched as usize);
        while touched > 0 && !holds_anything(memory, self.posted[touched - 1]) {
            touched -= 1;
        }
        let mut free = self.posted.split_off(touched);
        free.append(&mut self.ready);
        for &segment in self.posted.iter().chain(&free) {
            memory.transition(segment, SegmentState::Used)?;
        }
        for segment in free {
            memory.transition(segment, SegmentState::Free)?;
        }
        Ok(self.posted)
    }
}

/// Ends the use of what queues of an earlier life left in use. Of each queue's segments, those
/// behind the last one that holds data of the queue become free; the others become used.
pub(super) fn retire_all(memory: &mut BackupMemory) -> Result<(), ReplicationError> {
    let in_use = in_use(memory);
    // Filled in order, but not from the front of each: a sender that died, or a loss of power,
    // leaves holes.
    let mut touched_queues = HashSet::new();
    let mut free = Vec::new();
    for &segment in in_use.iter().rev() {
        let tag = memory.entry(segment).map(|entry| entry.tag);
        if touched_queues.contains(&tag) {
            continue;
        }
        if holds_anything(memory, segment) {
            touched_queues.insert(tag);
        } else {
            free.push(segment);
        }
    }
    for &segment in &in_use {
        memory.transition(segment, SegmentState::Used)?;
    }
    for segment in free {
        memory.transition(segment, SegmentState::Free)?;
    }
    Ok(())
}

/// Which posted segments certainly hold nothing: records that land there are newer than anything
/// that is now anywhere. `memory` must be one of Rowan's, in use or not.
pub fn posted_and_empty(memory: &BackupMemory) -> HashSet<u32> {
    let posted = in_use(memory);
    let tag = |segment: u32| memory.entry(segment).map(|entry| entry.tag);
    let mut empty = HashSet::new();
    let tags: HashSet<_> = posted.iter().map(|&segment| tag(segment)).collect();
    for queue in tags {
        let segments: Vec<u32> = posted
            .iter()
            .copied()
            .filter(|&segment| tag(segment) == queue)
            .collect();
        let is_begun = |&segment: &u32| first_word(memory, segment) != 0;
        let begun = segments.iter().rposition(is_begun).map_or(0, |at| at + 1);
        // A sender that died may have left a hole in front, so those that look empty are looked
        // through.
        let holds = |&&segment: &&u32| holds_anything(memory, segment);
        let holes = segments[begun..].iter().take_while(holds).count();
        empty.extend(&segments[begun + holes..]);
    }
    empty
}

/// Every queue's segments, queue by queue.
fn in_use(memory: &BackupMemory) -> Vec<u32> {
    memory.in_order(|entry| entry.state == SegmentState::Using && entry.owner == Owner::BackupLog)
}

fn first_word(memory: &BackupMemory, segment: u32) -> u64 {
    memory.area().load_u64(memory.segment_offset(segment))
}

/// Whether a block of the queue's own stands in a segment. Its first word is zero until something
/// is written there.
fn holds_anything(memory: &BackupMemory, segment: u32) -> bool {
    if first_word(memory, segment) != 0 {
        return true;
    }
    let Some(entry) = memory.entry(segment) else {
        return false;
    };
    let (start, len) = (memory.segment_offset(segment), memory.segment_bytes());
    let bytes = memory.area().read_vec(start, len);
    let mut holds = false;
    scan_blocks(Shape::WithHoles, memory.seed_of(entry), &bytes, |_, _| {
        holds = true;
    });
    holds
}

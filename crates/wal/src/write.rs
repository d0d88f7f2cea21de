//! Changing the ring: records and slots, truncating, trimming, resetting, hard state; in which
//! order they become durable says `persist.rs`. //= cyclone §4.2
//!
//! Anchor and hard state have two slots each. A new one goes to slot `seq % 2`; once it is durable
//! there, a copy goes over the old one in the other slot, flushed but not waited for. So one slot
//! is whole and newest at any moment, and when one of them rots later, what was acknowledged still
//! stands in the other.

use std::ops::Range;

use cyclone_pmem::{Payload, Pool, Segment};
use cyclone_wire::planted::{self, Bug};
use cyclone_wire::ring::{
    ANCHOR_AT, ANCHOR_STRIDE, Anchor, HARD_STATE_AT, HARD_STATE_BYTES, HardState, Piece,
    RECORD_UNIT, RecordHeader, SEGMENT_BYTES, SLOTS_AT, crc32c, slot,
};

use crate::ring::{Meta, NewEntry, Part, Ring, RingError};

/// Pieces of one record's payload; a payload with more is copied inline. A record whose payload is
/// all inline has no segment table.
const MAX_PIECES: usize = 4096;

/// Payloads that fill less of their frames than this share are copied out of them: entries of a few
/// bytes each would take all frames, and have the store flush for want of them, while the ring is
/// almost empty.
const FRAMES_FILLED: u64 = 8;

/// Where a ring ended at some moment.
pub(crate) struct Savepoint {
    entries: usize,
    tail: u64,
    used: u64,
}

impl Ring {
    pub(crate) fn check(&self, entries: &[NewEntry<'_>]) -> Result<(), RingError> {
        let (first, last) = (self.first_index(), self.last_index());
        let Some(start) = entries.first().map(|entry| entry.index) else {
            return Ok(());
        };
        let limit = self.max_payload();
        // Within the log or right behind it, so the entry before it has a term.
        let mut previous = match start.checked_sub(1).and_then(|before| self.term(before)) {
            Some(term) if start >= first => term,
            _ => {
                return Err(RingError::NotConsecutive {
                    index: start,
                    last,
                    first,
                });
            }
        };
        for (place, entry) in entries.iter().enumerate() {
            let (index, term) = (entry.index, entry.term);
            if index != start + place as u64 {
                return Err(RingError::NotConsecutive { index, last, first });
            }
            if term < previous {
                return Err(RingError::TermBackwards {
                    index,
                    term,
                    previous,
                });
            }
            let len = entry.payload.len() as u64;
            if len > limit {
                return Err(RingError::TooLarge { len, limit });
            }
            previous = term;
        }
        let commit = self.hard_state.commit;
        if start <= commit {
            return Err(RingError::TruncatesCommitted {
                index: start,
                commit,
            });
        }
        Ok(())
    }

    /// Where the ring ends.
    pub(crate) fn mark(&self) -> Savepoint {
        Savepoint {
            entries: self.metas.len(),
            tail: self.tail,
            used: self.used,
        }
    }

    /// Forgets the records written since. No slot points at them, so that is enough.
    pub(crate) fn rollback_to(&mut self, since: Savepoint) {
        self.metas.truncate(since.entries);
        (self.tail, self.used) = (since.tail, since.used);
    }

    /// Stores and flushes the slots of these entries, whose records are durable; the caller fences.
    pub(crate) fn store_slots(&mut self, entries: Range<u64>) {
        for index in entries.clone() {
            let at = self.slot_at(index);
            // Written before, so it is there.
            let offset = self.meta(index).map_or(0, |meta| meta.offset);
            self.area.store_u64(at, slot(offset, index));
        }
        if !planted::has(Bug::SlotsNotFlushed) {
            self.flush_slots(entries.start, entries.end - entries.start);
        }
    }

    /// Writes and flushes a record; the caller fences.
    pub(crate) fn write_record(&mut self, entry: &NewEntry<'_>) -> Result<(), RingError> {
        let pieces = self.pieces(entry.payload);
        let header = RecordHeader {
            log: self.spec.log,
            kind: entry.kind,
            segments: pieces.len() as u16,
            len: entry.payload.len() as u32,
            term: entry.term,
            prev_term: self.term(self.last_index()).unwrap_or(0),
            index: entry.index,
            payload_crc: crc32c(entry.payload.segments()),
        };
        let mut head = std::mem::take(&mut self.scratch);
        head.clear();
        header.encode(&pieces, &mut head);
        let inline = if pieces.is_empty() {
            u64::from(header.len)
        } else {
            inline_bytes(&pieces)
        };
        let bytes = (head.len() as u64 + inline).next_multiple_of(RECORD_UNIT);
        let Some((offset, skipped)) = self.place(bytes) else {
            self.scratch = head;
            return Err(RingError::Full {
                needed: bytes,
                free: self.records_bytes - self.used,
            });
        };
        let mut at = self.records_at + offset;
        self.area.write(at, &head);
        at += head.len() as u64;
        self.scratch = head;
        let mut parts = Vec::with_capacity(pieces.len());
        for (place, part) in entry.payload.parts().iter().enumerate() {
            match (part, pieces.get(place)) {
                (Segment::Frame(frame), Some(Piece::Extent { .. })) => {
                    if !planted::has(Bug::FramesNotFlushed) {
                        frame.flush();
                    }
                    self.kept_bytes += frame.len() as u64;
                    parts.push(Part::Extent(frame.clone()));
                }
                (part, piece) => {
                    let slice = part.as_slice();
                    self.area.write(at, slice);
                    self.copied_bytes += slice.len() as u64;
                    if piece.is_some() {
                        let (from, len) = (at - self.records_at, slice.len() as u32);
                        parts.push(Part::Inline { from, len });
                    }
                    at += slice.len() as u64;
                }
            }
        }
        if !planted::has(Bug::RecordsNotFlushed) {
            self.area
                .flush(self.records_at + offset, at - self.records_at - offset);
        }
        self.tail = offset + bytes;
        self.used += bytes + skipped;
        self.metas.push_back(Meta {
            offset,
            bytes,
            skipped,
            term: entry.term,
            kind: entry.kind,
            len: header.len,
            payload_crc: header.payload_crc,
            parts: (!pieces.is_empty()).then(|| parts.into_boxed_slice()),
        });
        Ok(())
    }

    /// Which pieces stay in their frames; none at all, so no table, where copying takes no more
    /// room than the table.
    fn pieces(&self, payload: &Payload) -> Vec<Piece> {
        let stays = |part: &Segment| match (part, &self.pool) {
            (Segment::Frame(frame), Some(pool)) => {
                frame.len() >= SEGMENT_BYTES * 4 && frame.belongs_to(pool)
            }
            _ => false,
        };
        let parts = payload.parts();
        // The second check spares most small entries an allocation.
        if parts.len() > MAX_PIECES
            || !self.fills_frames(payload, parts.iter().filter(|part| stays(part)))
        {
            return Vec::new();
        }
        let table = parts.len() * SEGMENT_BYTES;
        let pieces: Vec<Piece> = parts
            .iter()
            .map(|part| match part {
                Segment::Frame(frame) if stays(part) => Piece::Extent {
                    frame: frame.number(),
                    offset: frame.offset(),
                    len: frame.len() as u32,
                },
                part => Piece::Inline {
                    len: part.as_slice().len() as u32,
                },
            })
            .collect();
        // Keeps every record within header and payload length, which `fits` and `max_payload` count
        // on.
        if table as u64 + inline_bytes(&pieces) < payload.len() as u64 {
            pieces
        } else {
            Vec::new()
        }
    }

    /// Whether a payload may keep the frames that these parts of it lie in; `false` if there are
    /// none.
    fn fills_frames<'p>(
        &self,
        payload: &Payload,
        parts: impl Iterator<Item = &'p Segment>,
    ) -> bool {
        let (mut frames, mut last) = (0, None);
        for part in parts {
            if let Segment::Frame(frame) = part
                && last.replace(frame.number()) != Some(frame.number())
            {
                frames += 1;
            }
        }
        let frame_bytes = self.pool.as_ref().map_or(0, Pool::frame_bytes);
        frames > 0 && payload.len() as u64 * FRAMES_FILLED >= frames * u64::from(frame_bytes)
    }

    /// Where a record of this size goes, and the bytes skipped before it at the wrap.
    fn place(&mut self, bytes: u64) -> Option<(u64, u64)> {
        if self.free_slots() == 0 {
            return None;
        }
        let Some(front) = self.metas.front() else {
            self.tail = 0;
            self.used = 0;
            return (bytes <= self.records_bytes).then_some((0, 0));
        };
        let head = front.offset;
        if self.tail > head {
            if self.tail + bytes <= self.records_bytes {
                return Some((self.tail, 0));
            }
            // Strictly below the head, so that tail == head never happens while there are records.
            return (bytes < head).then(|| (0, self.records_bytes - self.tail));
        }
        (self.tail + bytes < head).then_some((self.tail, 0))
    }

    fn slot_at(&self, index: u64) -> u64 {
        SLOTS_AT + (index & u64::from(self.spec.slots - 1)) * 8
    }

    fn flush_slots(&self, from: u64, count: u64) {
        let slots = u64::from(self.spec.slots);
        let start = from & (slots - 1);
        let straight = count.min(slots - start);
        self.area.flush(SLOTS_AT + start * 8, straight * 8);
        self.area.flush(SLOTS_AT, (count - straight) * 8);
    }

    /// Nulls the slots of `count` indexes and makes that durable.
    pub(crate) fn null_slots(&mut self, from: u64, count: u64) {
        for index in from..from + count {
            let at = self.slot_at(index);
            self.area.store_u64(at, 0);
        }
        self.flush_slots(from, count);
        self.area.fence();
    }

    /// Removes a conflicting suffix durably, before its indexes are used again: the first slot is
    /// nulled first, so that a crash in between leaves a log that ends there.
    pub(crate) fn truncate(&mut self, from: u64) {
        let count = self.last_index() + 1 - from;
        if planted::has(Bug::SuffixNotNulled) {
            // Nothing.
        } else if count == 1 {
            self.null_slots(from, 1);
        } else {
            self.null_slots(from, 1);
            self.null_slots(from + 1, count - 1);
        }
        let keep = (from - self.anchor.first) as usize;
        let removed: u64 = self
            .metas
            .iter()
            .skip(keep)
            .map(|meta| meta.bytes + meta.skipped)
            .sum();
        // Dropping the metas frees the frames: nothing durable names them any more.
        self.metas.truncate(keep);
        self.used -= removed;
        self.tail = self.metas.back().map_or(0, |meta| meta.offset + meta.bytes);
    }

    /// Forgets every entry up to and including `through`. The new head is durable before their
    /// space is used again.
    ///
    /// # Errors
    /// [`RingError::TrimBeyondEnd`].
    pub fn trim(&mut self, through: u64) -> Result<(), RingError> {
        let (first, last) = (self.first_index(), self.last_index());
        if through < first {
            return Ok(());
        }
        if through > last {
            return Err(RingError::TrimBeyondEnd { through, last });
        }
        let prev_term = self.term(through).unwrap_or(0);
        let count = through + 1 - first;
        if planted::has(Bug::TrimNotWritten) {
            self.anchor = self.anchor_at(through + 1, prev_term, false);
        } else {
            self.write_anchor(self.anchor_at(through + 1, prev_term, false));
        }
        self.null_slots(first, count);
        let freed: u64 = self
            .metas
            .drain(..count as usize)
            .map(|meta| meta.bytes + meta.skipped)
            .sum();
        self.used -= freed;
        if let Some(front) = self.metas.front_mut() {
            self.used -= std::mem::take(&mut front.skipped);
        }
        Ok(())
    }

    /// Empties the log; the next entry is `index + 1`. For a state that came by another way than
    /// the log.
    pub fn reset(&mut self, index: u64, term: u64) {
        // While `resetting` stands, recovery finishes the job; the slots' old content counts for
        // nothing.
        self.write_anchor(self.anchor_at(index + 1, term, true));
        self.finish_reset();
    }

    pub(crate) fn finish_reset(&mut self) {
        self.null_slots(0, u64::from(self.spec.slots));
        self.metas.clear();
        (self.tail, self.used) = (0, 0);
        self.write_anchor(self.anchor_at(self.anchor.first, self.anchor.prev_term, false));
        // Until the copy is durable too, rot in the slot just written would bring `resetting` back.
        self.area.fence();
    }

    pub(crate) fn anchor_at(&self, first: u64, prev_term: u64, resetting: bool) -> Anchor {
        Anchor {
            seq: self.anchor.seq + 1,
            first,
            prev_term,
            resetting,
            ..self.anchor
        }
    }

    /// Makes the anchor durable; its copy is on the way.
    pub(crate) fn write_anchor(&mut self, anchor: Anchor) {
        let bytes = anchor.encode();
        for turn in 0..2 {
            let at = ANCHOR_AT + ((anchor.seq + turn) % 2) * ANCHOR_STRIDE;
            self.area.write(at, &bytes);
            self.area.flush(at, bytes.len() as u64);
            if turn == 0 {
                self.area.fence();
            }
        }
        self.anchor = anchor;
    }

    /// Writes and flushes the hard state, which has been checked; the caller fences.
    pub(crate) fn write_hard_state(&mut self, state: HardState) {
        self.hard_seq += 1;
        self.hard_state = state;
        self.put_hard_state(match planted::has(Bug::HardStateInPlace) {
            true => 0,
            false => self.hard_seq % 2,
        });
    }

    /// Copies the hard state, durable in its own slot, into the other; the next fence waits for it.
    pub(crate) fn copy_hard_state(&mut self) {
        if !planted::has(Bug::HardStateInPlace) {
            self.put_hard_state((self.hard_seq + 1) % 2);
        }
    }

    pub(crate) fn put_hard_state(&mut self, slot: u64) {
        let mut bytes = std::mem::take(&mut self.scratch);
        self.hard_state.encode(self.hard_seq, &mut bytes);
        let at = HARD_STATE_AT + slot * HARD_STATE_BYTES;
        self.area.write(at, &bytes);
        self.area.flush(at, bytes.len() as u64);
        self.scratch = bytes;
    }
}

fn inline_bytes(pieces: &[Piece]) -> u64 {
    pieces
        .iter()
        .map(|piece| match piece {
            Piece::Inline { len } => u64::from(*len),
            Piece::Extent { .. } => 0,
        })
        .sum()
}

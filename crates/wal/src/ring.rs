//! The ring: appending, truncating, trimming, hard state. //= cyclone §4.2
//!
//! Order of every append: records (and the frames they name) are flushed and fenced; only then are the slots that point at them
//! stored, flushed and fenced. So the first null slot is the log's end, and whatever a non-null slot points at
//! before it was durable once: if it does not read back, memory has rotted, and the log says so instead of
//! shortening itself.

use std::collections::VecDeque;

use cyclone_pmem::{Area, Frame, Payload, Pool, Segment};
use cyclone_wire::ring::{
    ANCHOR_AT, ANCHOR_STRIDE, Anchor, HARD_STATE_AT, HARD_STATE_BYTES, HardState, MAX_MEMBERS,
    Piece, RECORD_HEADER_BYTES, RECORD_UNIT, RecordHeader, SEGMENT_BYTES, SLOTS_AT, crc32c, slot,
};

/// Pieces of one record's payload; a payload with more is copied inline. A record whose payload is all inline has no
/// segment table.
const MAX_PIECES: usize = 4096;

/// The shape of a ring, fixed when its area is formatted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingSpec {
    /// The log's number.
    pub log: u16,
    /// Pointer slots, a power of two; one fewer entries fit.
    pub slots: u32,
}

/// An entry to append.
#[derive(Clone, Copy, Debug)]
pub struct NewEntry<'a> {
    /// Its index.
    pub index: u64,
    /// Its term.
    pub term: u64,
    /// What the payload is; the ring only keeps it.
    pub kind: u8,
    /// The bytes. Frames of the ring's pool stay where they are; everything else is copied.
    pub payload: &'a Payload,
}

/// What becomes durable together.
#[derive(Clone, Debug, Default)]
pub struct Batch<'a> {
    /// Consecutive entries. The first may lie at or below the last index: then the suffix from there on is truncated
    /// durably first.
    pub entries: &'a [NewEntry<'a>],
    /// The hard state, if it changed.
    pub hard_state: Option<HardState>,
}

/// Proof that everything in a [`Batch`] is durable. Only the ring makes it.
#[derive(Debug)]
#[must_use]
pub struct Persisted {
    last: u64,
    _only_the_ring: (),
}

impl Persisted {
    /// The last index of the log at that moment.
    pub fn last(&self) -> u64 {
        self.last
    }
}

/// Why the ring refuses.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// No room now; trimming makes some. Nothing was appended.
    #[error("the log is full: {needed} bytes needed, {free} free")]
    Full {
        /// Bytes the entries need.
        needed: u64,
        /// Bytes free, not necessarily in one piece.
        free: u64,
    },
    /// An entry that would not even fit an empty ring's quarter.
    #[error("an entry of {len} bytes; this log takes {limit}")]
    TooLarge {
        /// The entry's payload.
        len: u64,
        /// The largest payload.
        limit: u64,
    },
    /// The entries do not follow each other, or would leave a gap, or lie before the log's beginning.
    #[error("entry {index} cannot follow {last} in a log that begins at {first}")]
    NotConsecutive {
        /// The entry's index.
        index: u64,
        /// The last index.
        last: u64,
        /// The first index.
        first: u64,
    },
    /// More members than a hard state holds.
    #[error("{0} members of one kind; at most {MAX_MEMBERS} are possible")]
    TooManyMembers(usize),
    /// Trimming beyond the end.
    #[error("cannot trim through {through}, the last index is {last}")]
    TrimBeyondEnd {
        /// The index asked for.
        through: u64,
        /// The last index.
        last: u64,
    },
    /// Something that was durable does not read back. The replica has lost memory and must not vote.
    #[error("the log is corrupt at index {index}: {what}")]
    Corrupt {
        /// Where.
        index: u64,
        /// What does not fit.
        what: &'static str,
    },
    /// The area cannot hold a ring of this shape.
    #[error("an area of {area} bytes cannot hold {slots} slots and their records")]
    AreaTooSmall {
        /// Bytes of the area.
        area: u64,
        /// Slots asked for.
        slots: u32,
    },
}

/// What DRAM remembers of a record.
pub(crate) struct Meta {
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
    pub(crate) term: u64,
    pub(crate) kind: u8,
    pub(crate) len: u32,
    /// `None`: the whole payload is inline.
    pub(crate) parts: Option<Box<[Part]>>,
}

pub(crate) enum Part {
    Inline { from: u64, len: u32 },
    Extent(Frame),
}

/// The log of one Raft group.
pub struct Ring {
    pub(crate) area: Area,
    pub(crate) spec: RingSpec,
    pub(crate) pool: Option<Pool>,
    pub(crate) records_at: u64,
    pub(crate) records_bytes: u64,
    pub(crate) anchor: Anchor,
    pub(crate) hard_state: HardState,
    pub(crate) hard_seq: u64,
    /// One per entry, from the first index on.
    pub(crate) metas: VecDeque<Meta>,
    /// Where the next record goes.
    pub(crate) tail: u64,
    pub(crate) used: u64,
    pub(crate) scratch: Vec<u8>,
}

/// One entry, borrowed from the ring.
pub struct EntryView<'a> {
    /// Its index.
    pub index: u64,
    /// Its term.
    pub term: u64,
    /// What the payload is.
    pub kind: u8,
    /// Payload bytes.
    pub len: u32,
    ring: &'a Ring,
    meta: &'a Meta,
}

impl<'a> EntryView<'a> {
    /// The payload, piece by piece.
    pub fn segments(&self) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        let (ring, meta) = (self.ring, self.meta);
        let whole = (meta.parts.is_none() && meta.len > 0).then(|| {
            ring.area.bytes(
                ring.records_at + meta.offset + RECORD_HEADER_BYTES as u64,
                u64::from(meta.len),
            )
        });
        let parts = meta
            .parts
            .iter()
            .flat_map(|parts| parts.iter())
            .map(move |part| match part {
                Part::Inline { from, len } => {
                    ring.area.bytes(ring.records_at + from, u64::from(*len))
                }
                Part::Extent(frame) => &**frame,
            });
        whole.into_iter().chain(parts)
    }
}

impl Ring {
    /// Formats an area. `hard_state` is where the replica starts from: term 0 and the first membership.
    ///
    /// # Errors
    /// When the area is too small for the shape.
    pub fn create(
        area: Area,
        spec: RingSpec,
        pool: Option<&Pool>,
        hard_state: &HardState,
    ) -> Result<Ring, RingError> {
        let mut ring = Ring::empty(area, spec, pool)?;
        ring.area.zero(0, ring.records_at);
        ring.area.persist(0, ring.records_at);
        ring.write_anchor(Anchor {
            seq: 1,
            first: 1,
            prev_term: 0,
            resetting: false,
        });
        // Both slots, so that each is valid from the start.
        for _ in 0..2 {
            ring.write_hard_state(hard_state.clone())?;
            ring.area.fence();
        }
        Ok(ring)
    }

    pub(crate) fn empty(
        area: Area,
        spec: RingSpec,
        pool: Option<&Pool>,
    ) -> Result<Ring, RingError> {
        let too_small = RingError::AreaTooSmall {
            area: area.len(),
            slots: spec.slots,
        };
        let records_at = SLOTS_AT + u64::from(spec.slots) * 8;
        if !spec.slots.is_power_of_two()
            || spec.slots < 8
            || area.len() < records_at + 64 * RECORD_UNIT
        {
            return Err(too_small);
        }
        let records_bytes =
            ((area.len() - records_at) / RECORD_UNIT * RECORD_UNIT).min(RECORD_UNIT << 31);
        Ok(Ring {
            area,
            spec,
            pool: pool.cloned(),
            records_at,
            records_bytes,
            anchor: Anchor {
                seq: 0,
                first: 1,
                prev_term: 0,
                resetting: false,
            },
            hard_state: HardState::default(),
            hard_seq: 0,
            metas: VecDeque::new(),
            tail: 0,
            used: 0,
            scratch: Vec::new(),
        })
    }

    /// Gives the area back; what is durable in it stays.
    pub fn into_area(self) -> Area {
        self.area
    }

    /// Index of the first entry, present or to come.
    pub fn first_index(&self) -> u64 {
        self.anchor.first
    }

    /// Index of the last entry; one before the first when there is none.
    pub fn last_index(&self) -> u64 {
        self.anchor.first + self.metas.len() as u64 - 1
    }

    /// The term of an entry, or of the one before the first.
    pub fn term(&self, index: u64) -> Option<u64> {
        if index + 1 == self.anchor.first {
            return Some(self.anchor.prev_term);
        }
        self.meta(index).map(|meta| meta.term)
    }

    /// Payload bytes of an entry.
    pub fn payload_len(&self, index: u64) -> Option<u32> {
        self.meta(index).map(|meta| meta.len)
    }

    /// An entry.
    pub fn entry(&self, index: u64) -> Option<EntryView<'_>> {
        self.meta(index).map(|meta| EntryView {
            index,
            term: meta.term,
            kind: meta.kind,
            len: meta.len,
            ring: self,
            meta,
        })
    }

    fn meta(&self, index: u64) -> Option<&Meta> {
        self.metas
            .get(usize::try_from(index.checked_sub(self.anchor.first)?).ok()?)
    }

    /// The hard state as last made durable.
    pub fn hard_state(&self) -> &HardState {
        &self.hard_state
    }

    /// Bytes of the record area.
    pub fn capacity_bytes(&self) -> u64 {
        self.records_bytes
    }

    /// Bytes of the record area in use, gaps at the wrap included.
    pub fn used_bytes(&self) -> u64 {
        self.used
    }

    /// Entries that still fit by their number.
    pub fn free_slots(&self) -> u64 {
        u64::from(self.spec.slots) - 1 - self.metas.len() as u64
    }

    /// How full the ring is, by bytes or by slots, whichever is fuller: 0 to 1.
    pub fn fill(&self) -> f64 {
        let bytes = self.used as f64 / self.records_bytes as f64;
        let slots = self.metas.len() as f64 / f64::from(self.spec.slots - 1);
        bytes.max(slots)
    }

    /// The largest payload of an entry.
    pub fn max_payload(&self) -> u64 {
        self.records_bytes / 4 - RECORD_HEADER_BYTES as u64 - RECORD_UNIT
    }

    /// Whether entries with these payload sizes certainly fit now, were they all copied inline.
    pub fn fits(&self, entries: u64, payload_bytes: u64) -> bool {
        let each = RECORD_HEADER_BYTES as u64 + RECORD_UNIT;
        // Placing a record can waste the space before the wrap, at most the largest record's size.
        let waste = self.records_bytes / 4;
        let needed = payload_bytes
            .saturating_add(entries.saturating_mul(each))
            .saturating_add(waste.min(payload_bytes + each));
        entries <= self.free_slots() && needed <= self.records_bytes - self.used
    }

    /// Makes entries and hard state durable, in that order where it matters. After `Ok` nothing in the batch is lost by
    /// a crash; after an error nothing was appended (a conflicting suffix may be gone, as it would be anyway).
    ///
    /// # Errors
    /// [`RingError::Full`], [`RingError::TooLarge`], [`RingError::NotConsecutive`], [`RingError::TooManyMembers`].
    pub fn persist(&mut self, batch: Batch<'_>) -> Result<Persisted, RingError> {
        let durable_last = match batch.entries.first() {
            Some(entry) => {
                self.check(batch.entries)?;
                if entry.index <= self.last_index() {
                    self.truncate(entry.index);
                }
                let last = self.last_index();
                self.append(batch.entries)?;
                last
            }
            None => self.last_index(),
        };
        if let Some(state) = batch.hard_state {
            // A commit index must not become durable before the entries that it covers.
            if state.commit > durable_last && !batch.entries.is_empty() {
                self.area.fence();
            }
            self.write_hard_state(state)?;
            self.area.fence();
        } else if !batch.entries.is_empty() {
            self.area.fence();
        }
        Ok(Persisted {
            last: self.last_index(),
            _only_the_ring: (),
        })
    }

    fn check(&self, entries: &[NewEntry<'_>]) -> Result<(), RingError> {
        let (first, last) = (self.first_index(), self.last_index());
        let mut expected = entries.first().map_or(0, |entry| entry.index);
        for entry in entries {
            if entry.index != expected
                || entry.index < first
                || expected > last + 1 + entries.len() as u64
            {
                return Err(RingError::NotConsecutive {
                    index: entry.index,
                    last,
                    first,
                });
            }
            let limit = self.max_payload();
            if entry.payload.len() as u64 > limit {
                return Err(RingError::TooLarge {
                    len: entry.payload.len() as u64,
                    limit,
                });
            }
            expected += 1;
        }
        if entries.first().is_some_and(|entry| entry.index > last + 1) {
            return Err(RingError::NotConsecutive {
                index: entries[0].index,
                last,
                first,
            });
        }
        Ok(())
    }

    /// Writes records and stores slots; the slots are flushed but not yet fenced.
    fn append(&mut self, entries: &[NewEntry<'_>]) -> Result<(), RingError> {
        let before = (self.metas.len(), self.tail, self.used);
        for entry in entries {
            if let Err(error) = self.write_record(entry) {
                // No slot points at the records written so far: forgetting them is enough.
                self.metas.truncate(before.0);
                (self.tail, self.used) = (before.1, before.2);
                return Err(error);
            }
        }
        self.area.fence();
        for entry in entries {
            let at = self.slot_at(entry.index);
            // Just written, so it is there.
            let offset = self.meta(entry.index).map_or(0, |meta| meta.offset);
            self.area.store_u64(at, slot(offset, entry.index));
        }
        self.flush_slots(entries[0].index, entries.len() as u64);
        Ok(())
    }

    fn write_record(&mut self, entry: &NewEntry<'_>) -> Result<(), RingError> {
        let prev_term = self.term(self.last_index()).unwrap_or(0);
        let pieces = self.pieces(entry.payload);
        let all_inline = !pieces
            .iter()
            .any(|piece| matches!(piece, Piece::Extent { .. }));
        let header = RecordHeader {
            log: self.spec.log,
            kind: entry.kind,
            segments: if all_inline { 0 } else { pieces.len() as u16 },
            len: entry.payload.len() as u32,
            term: entry.term,
            prev_term,
            index: entry.index,
            payload_crc: crc32c(entry.payload.segments()),
        };
        let mut head = std::mem::take(&mut self.scratch);
        head.clear();
        header.encode(if all_inline { &[] } else { &pieces }, &mut head);
        let inline: u64 = match all_inline {
            true => u64::from(header.len),
            false => pieces
                .iter()
                .map(|p| {
                    if let Piece::Inline { len } = p {
                        u64::from(*len)
                    } else {
                        0
                    }
                })
                .sum(),
        };
        let bytes = (head.len() as u64 + inline).next_multiple_of(RECORD_UNIT);
        let placed = self.place(bytes);
        let Some((offset, skipped)) = placed else {
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
        let mut parts = Vec::new();
        if all_inline {
            for part in entry.payload.segments() {
                self.area.write(at, part);
                at += part.len() as u64;
            }
        } else {
            for (part, piece) in entry.payload.parts().iter().zip(&pieces) {
                match (part, piece) {
                    (Segment::Frame(frame), Piece::Extent { .. }) => {
                        frame.flush();
                        parts.push(Part::Extent(frame.clone()));
                    }
                    (part, _) => {
                        let slice = part.as_slice();
                        self.area.write(at, slice);
                        parts.push(Part::Inline {
                            from: at - self.records_at,
                            len: slice.len() as u32,
                        });
                        at += slice.len() as u64;
                    }
                }
            }
        }
        self.area
            .flush(self.records_at + offset, at - self.records_at - offset);
        self.tail = offset + bytes;
        self.used += bytes + skipped;
        self.metas.push_back(Meta {
            offset,
            bytes: bytes + skipped,
            term: entry.term,
            kind: entry.kind,
            len: header.len,
            parts: (!all_inline).then(|| parts.into_boxed_slice()),
        });
        Ok(())
    }

    /// Which pieces stay in their frames.
    fn pieces(&self, payload: &Payload) -> Vec<Piece> {
        let ours = |frame: &Frame| {
            self.pool
                .as_ref()
                .is_some_and(|pool| frame.belongs_to(pool))
        };
        if payload.parts().len() > MAX_PIECES {
            return Vec::new();
        }
        payload
            .parts()
            .iter()
            .map(|part| match part {
                Segment::Frame(frame) if ours(frame) && frame.len() >= SEGMENT_BYTES * 4 => {
                    Piece::Extent {
                        frame: frame.number(),
                        offset: frame.offset(),
                        len: frame.len() as u32,
                    }
                }
                part => Piece::Inline {
                    len: part.as_slice().len() as u32,
                },
            })
            .collect()
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
            // Strictly below the head, so that tail == head always means "full".
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

    /// Removes a conflicting suffix durably, before its indexes are used again: the first slot is nulled first, so that a
    /// crash in between leaves a log that ends there.
    fn truncate(&mut self, from: u64) {
        let count = self.last_index() + 1 - from;
        self.null_slots(from, 1);
        if count > 1 {
            self.null_slots(from + 1, count - 1);
        }
        let keep = (from - self.anchor.first) as usize;
        let removed: u64 = self.metas.iter().skip(keep).map(|meta| meta.bytes).sum();
        // Dropping the metas lets go of the frames: nothing durable names them any more.
        self.metas.truncate(keep);
        self.used -= removed;
        self.tail = self.metas.back().map_or(0, |meta| self.end_of(meta));
    }

    /// Where the record after this one would begin.
    fn end_of(&self, meta: &Meta) -> u64 {
        let table = meta
            .parts
            .as_ref()
            .map_or(0, |parts| parts.len() * SEGMENT_BYTES);
        let inline: u64 = match &meta.parts {
            None => u64::from(meta.len),
            Some(parts) => parts
                .iter()
                .map(|part| {
                    if let Part::Inline { len, .. } = part {
                        u64::from(*len)
                    } else {
                        0
                    }
                })
                .sum(),
        };
        meta.offset
            + (RECORD_HEADER_BYTES as u64 + table as u64 + inline).next_multiple_of(RECORD_UNIT)
    }

    /// Forgets every entry up to and including `through`. The new head is durable before their space is used again.
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
        self.write_anchor(Anchor {
            seq: self.anchor.seq + 1,
            first: through + 1,
            prev_term,
            resetting: false,
        });
        self.null_slots(first, count);
        let freed: u64 = self
            .metas
            .drain(..count as usize)
            .map(|meta| meta.bytes)
            .sum();
        self.used -= freed;
        Ok(())
    }

    /// Empties the log; the next entry is `index + 1`. For a state that came by another way than the log.
    pub fn reset(&mut self, index: u64, term: u64) {
        let next = Anchor {
            seq: self.anchor.seq + 1,
            first: index + 1,
            prev_term: term,
            resetting: true,
        };
        // While `resetting` stands, recovery finishes the job; the slots' old content counts for nothing.
        self.write_anchor(next);
        self.null_slots(0, u64::from(self.spec.slots));
        self.metas.clear();
        (self.tail, self.used) = (0, 0);
        self.write_anchor(Anchor {
            seq: next.seq + 1,
            resetting: false,
            ..next
        });
    }

    pub(crate) fn write_anchor(&mut self, anchor: Anchor) {
        let at = ANCHOR_AT + (anchor.seq % 2) * ANCHOR_STRIDE;
        let bytes = anchor.encode();
        self.area.write(at, &bytes);
        self.area.persist(at, bytes.len() as u64);
        self.anchor = anchor;
    }

    /// Writes and flushes the hard state; the caller fences.
    fn write_hard_state(&mut self, state: HardState) -> Result<(), RingError> {
        for list in [
            &state.voters,
            &state.voters_outgoing,
            &state.learners,
            &state.learners_next,
        ] {
            if list.len() > MAX_MEMBERS {
                return Err(RingError::TooManyMembers(list.len()));
            }
        }
        self.hard_seq += 1;
        let mut bytes = std::mem::take(&mut self.scratch);
        state.encode(self.hard_seq, &mut bytes);
        let at = HARD_STATE_AT + (self.hard_seq % 2) * HARD_STATE_BYTES;
        self.area.write(at, &bytes);
        self.area.flush(at, bytes.len() as u64);
        self.scratch = bytes;
        self.hard_state = state;
        Ok(())
    }
}

//! The ring: its shape, its refusals, and reading it. What changes it is in `write.rs` and
//! `persist.rs`, opening it in `recover.rs`. //= cyclone §4.2

use std::collections::VecDeque;

use cyclone_pmem::{Area, Frame, Payload, Pool};
use cyclone_wire::ring::{
    Anchor, HardState, MAX_MEMBERS, RECORD_HEADER_BYTES, RECORD_UNIT, SLOTS_AT,
};

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
    /// Consecutive entries. The first may lie at or below the last index: then the suffix from
    /// there on is truncated durably first.
    pub entries: &'a [NewEntry<'a>],
    /// The hard state, if it changed.
    pub hard_state: Option<HardState>,
}

/// Proof that everything in a [`Batch`] is durable. Only the ring makes it.
#[derive(Debug)]
#[must_use]
pub struct Persisted {
    last: u64,
    _private: (),
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
    /// The entries do not follow each other, or would leave a gap, or lie before the log's
    /// beginning.
    #[error("entry {index} cannot follow {last} in a log that begins at {first}")]
    NotConsecutive {
        /// The entry's index.
        index: u64,
        /// The last index.
        last: u64,
        /// The first index.
        first: u64,
    },
    /// A commit index that the log would not reach: it would read as corrupt at the next start.
    #[error("commit index {commit} is beyond the log's last index {last}")]
    CommitBeyondEnd {
        /// The commit index given.
        commit: u64,
        /// The last index after the batch.
        last: u64,
    },
    /// Entries that are durably committed would be overwritten.
    #[error("entry {index} would overwrite what is committed up to {commit}")]
    TruncatesCommitted {
        /// First index given.
        index: u64,
        /// Durable commit index.
        commit: u64,
    },
    /// An entry's term lies below its predecessor's: recovery would take that for corruption.
    #[error("entry {index} has term {term}, its predecessor has {previous}")]
    TermBackwards {
        /// The entry's index.
        index: u64,
        /// Its term.
        term: u64,
        /// The predecessor's.
        previous: u64,
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
    /// Something that was durable does not read back. The replica has lost memory and must not
    /// vote.
    #[error("the log is corrupt at index {index}: {what}")]
    Corrupt {
        /// Where.
        index: u64,
        /// What does not fit.
        what: &'static str,
    },
    /// The area was formatted for a ring of another shape. Nothing has been touched.
    #[error("the area holds log {log} with {slots} slots in {area} bytes")]
    WrongShape {
        /// The log found.
        log: u16,
        /// Pointer slots found.
        slots: u32,
        /// Bytes of the area when it was formatted.
        area: u64,
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

pub(crate) fn check_members(state: &HardState) -> Result<(), RingError> {
    let lists = [
        &state.voters,
        &state.voters_outgoing,
        &state.learners,
        &state.learners_next,
    ];
    match lists.into_iter().find(|list| list.len() > MAX_MEMBERS) {
        Some(list) => Err(RingError::TooManyMembers(list.len())),
        None => Ok(()),
    }
}

/// What DRAM remembers of a record.
pub(crate) struct Meta {
    pub(crate) offset: u64,
    /// Bytes of the record, a multiple of the unit.
    pub(crate) bytes: u64,
    /// Bytes left unused before it at the wrap; they are free once it is the first.
    pub(crate) skipped: u64,
    pub(crate) term: u64,
    pub(crate) kind: u8,
    pub(crate) len: u32,
    /// CRC32C of the payload, as it was when the entry came.
    pub(crate) payload_crc: u32,
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
    /// Sum of the records' bytes and of what they skip.
    pub(crate) used: u64,
    pub(crate) scratch: Vec<u8>,
    pub(crate) kept_bytes: u64,
    pub(crate) copied_bytes: u64,
    /// A batch has been written and is not durable yet.
    pub(crate) is_open: bool,
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

impl Persisted {
    /// For `persist.rs` alone, after its last fence.
    pub(crate) fn after_fence(last: u64) -> Persisted {
        Persisted { last, _private: () }
    }
}

impl<'a> EntryView<'a> {
    /// CRC32C of the payload, as it was when the entry came.
    pub fn payload_crc(&self) -> u32 {
        self.meta.payload_crc
    }

    /// The payload, piece by piece.
    #[inline]
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
    /// Payload bytes appended since the start: those that stayed in the frames they were received
    /// in, and those copied into records.
    pub fn payload_bytes(&self) -> (u64, u64) {
        (self.kept_bytes, self.copied_bytes)
    }

    /// How many frames of the pool the log holds.
    pub fn frames_held(&self) -> usize {
        let parts = self.metas.iter().filter_map(|meta| meta.parts.as_deref());
        let frames = parts.flatten().filter_map(|part| match part {
            Part::Extent(frame) => Some(frame.number()),
            Part::Inline { .. } => None,
        });
        frames.collect::<std::collections::BTreeSet<_>>().len()
    }

    /// Formats an area. `hard_state` is where the replica starts from: term 0 and the first
    /// membership.
    ///
    /// # Errors
    /// When the area is too small for the shape.
    pub fn create(
        area: Area,
        spec: RingSpec,
        pool: Option<&Pool>,
        hard_state: &HardState,
    ) -> Result<Ring, RingError> {
        check_members(hard_state)?;
        let mut ring = Ring::empty(area, spec, pool)?;
        ring.area.zero(0, ring.records_at);
        ring.area.persist(0, ring.records_at);
        ring.write_anchor(ring.anchor_at(1, 0, false));
        ring.write_hard_state(hard_state.clone());
        ring.area.fence();
        ring.copy_hard_state();
        ring.area.fence();
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
        let anchor = Anchor {
            seq: 0,
            first: 1,
            prev_term: 0,
            resetting: false,
            log: spec.log,
            slots: spec.slots,
            area_bytes: area.len(),
        };
        Ok(Ring {
            area,
            spec,
            pool: pool.cloned(),
            records_at,
            records_bytes,
            anchor,
            hard_state: HardState::default(),
            hard_seq: 0,
            metas: VecDeque::new(),
            tail: 0,
            used: 0,
            scratch: Vec::new(),
            kept_bytes: 0,
            copied_bytes: 0,
            is_open: false,
        })
    }

    /// Gives the area back; what is durable in it stays.
    pub fn into_area(self) -> Area {
        self.area
    }

    /// Index of the first entry, present or to come.
    #[inline]
    pub fn first_index(&self) -> u64 {
        self.anchor.first
    }

    /// Index of the last entry; one before the first when there is none.
    #[inline]
    pub fn last_index(&self) -> u64 {
        self.anchor.first + self.metas.len() as u64 - 1
    }

    /// The term of an entry, or of the one before the first.
    #[inline]
    pub fn term(&self, index: u64) -> Option<u64> {
        if index.checked_add(1) == Some(self.anchor.first) {
            return Some(self.anchor.prev_term);
        }
        self.meta(index).map(|meta| meta.term)
    }

    /// Payload bytes of an entry.
    #[inline]
    pub fn payload_len(&self, index: u64) -> Option<u32> {
        self.meta(index).map(|meta| meta.len)
    }

    /// Bytes that an entry's record takes in the ring, without what stays in frames.
    #[inline]
    pub fn record_bytes(&self, index: u64) -> Option<u64> {
        self.meta(index).map(|meta| meta.bytes)
    }

    /// An entry.
    #[inline]
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

    #[inline]
    pub(crate) fn meta(&self, index: u64) -> Option<&Meta> {
        self.metas
            .get(usize::try_from(index.checked_sub(self.anchor.first)?).ok()?)
    }

    /// The hard state as last made durable.
    #[inline]
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

    /// How many entries it can hold at most.
    pub fn slots(&self) -> u64 {
        u64::from(self.spec.slots)
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
        let quarter = self.records_bytes / 4 - RECORD_HEADER_BYTES as u64 - RECORD_UNIT;
        quarter.min(u64::from(u32::MAX))
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
}

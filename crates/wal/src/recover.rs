//! Opening a ring after a restart or a crash: what is durable is read back and checked, half-made
//! things outside the log are wiped, and anything that does not add up is corruption, never a
//! reason to shorten the log.

use cyclone_pmem::{Area, Pool};
use cyclone_wire::planted::{self, Bug};
use cyclone_wire::ring::{
    ANCHOR_AT, ANCHOR_STRIDE, Anchor, HARD_STATE_AT, HARD_STATE_BYTES, HardState, Piece,
    RECORD_HEADER_BYTES, RECORD_UNIT, RecordHeader, SEGMENT_BYTES, SLOTS_AT, crc32c, slot_offset,
};

use crate::recovery_cases::{Decision, Facts, Header, Segments, Slot, decide};
use crate::ring::{Meta, Part, Ring, RingError, RingSpec};

/// What recovery found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recovered {
    /// Index of the first entry, present or to come.
    pub first: u64,
    /// Index of the last entry; one before the first when there is none.
    pub last: u64,
    /// Slots outside the log that still pointed somewhere and were nulled.
    pub nulled: u64,
}

impl Ring {
    /// Opens a formatted area. Frames that records name are adopted from `pool`.
    ///
    /// # Errors
    /// [`RingError::Corrupt`] when something that was durable does not read back: then nothing has
    /// been changed. [`RingError::WrongShape`] and [`RingError::AreaTooSmall`].
    pub fn open(
        area: Area,
        spec: RingSpec,
        pool: Option<&Pool>,
    ) -> Result<(Ring, Recovered), RingError> {
        let mut ring = Ring::empty(area, spec, pool)?;
        ring.read_all()?;
        let last = ring.last_index();
        ring.restore_mirrors();
        let nulled = if ring.anchor.resetting {
            ring.finish_reset();
            0
        } else {
            ring.wipe_outside()
        };
        let recovered = Recovered {
            first: ring.first_index(),
            last,
            nulled,
        };
        Ok((ring, recovered))
    }

    /// Reads everything that is durable and checks it; changes nothing in the area.
    pub(crate) fn read_all(&mut self) -> Result<(), RingError> {
        let corrupt = |what| RingError::Corrupt { index: 0, what };
        // After the death of a process memory may show stores that have not left the caches; what
        // is believed now must not be gone after a loss of power. Records need no flush: a slot is
        // stored after they are durable.
        self.area.persist(0, self.records_at);
        self.anchor = (0..2)
            .filter_map(|slot| self.read_anchor(slot))
            .max_by_key(|anchor| anchor.seq)
            .ok_or(corrupt("no anchor is whole"))?;
        let Anchor {
            log,
            slots,
            area_bytes,
            ..
        } = self.anchor;
        let spec = self.spec;
        if (log, slots, area_bytes) != (spec.log, spec.slots, self.area.len()) {
            return Err(RingError::WrongShape {
                log,
                slots,
                area: area_bytes,
            });
        }
        (self.hard_seq, self.hard_state) = (0..2)
            .filter_map(|slot| self.read_hard_state(slot))
            .max_by_key(|(seq, _)| *seq)
            .ok_or(corrupt("no hard state is whole"))?;
        if !self.anchor.resetting {
            self.read_records()?;
        }
        let last = self.last_index();
        // Before anything is wiped or mended: what is corrupt stays as it was found.
        if last < self.hard_state.commit {
            return Err(RingError::Corrupt {
                index: last + 1,
                what: "the log ends below the durable commit index",
            });
        }
        Ok(())
    }

    fn read_anchor(&self, slot: u64) -> Option<Anchor> {
        let at = ANCHOR_AT + slot * ANCHOR_STRIDE;
        Anchor::decode(self.area.bytes(at, ANCHOR_STRIDE))
    }

    fn read_hard_state(&self, slot: u64) -> Option<(u64, HardState)> {
        let at = HARD_STATE_AT + slot * HARD_STATE_BYTES;
        HardState::decode(self.area.bytes(at, HARD_STATE_BYTES))
    }

    /// Makes both slots of anchor and hard state the newest, its own slot first: that is the one
    /// which the next change does not overwrite. Until then the only whole copy may lie in the
    /// other one.
    pub(crate) fn restore_mirrors(&mut self) {
        if (0..2).any(|slot| self.read_anchor(slot) != Some(self.anchor)) {
            self.write_anchor(self.anchor);
            self.area.fence();
        }
        for slot in [self.hard_seq % 2, (self.hard_seq + 1) % 2] {
            let whole = self.read_hard_state(slot);
            if whole.is_none_or(|(seq, _)| seq != self.hard_seq) {
                self.put_hard_state(slot);
                self.area.fence();
            }
        }
    }

    pub(crate) fn read_records(&mut self) -> Result<(), RingError> {
        let mut index = self.anchor.first;
        let mut prev_term = self.anchor.prev_term;
        while self.free_slots() > 0 {
            let (facts, meta) = self.examine_index(index, prev_term);
            let meta = match (decide(&facts), meta) {
                (Decision::End, _) => break,
                (Decision::Corrupt(_), _) if planted::has(Bug::RotTruncates) => break,
                (Decision::Corrupt(what), _) => return Err(RingError::Corrupt { index, what }),
                (Decision::Keep, meta) => meta.ok_or(RingError::Corrupt {
                    index,
                    what: "the record was not read",
                })?,
            };
            self.tail = meta.offset + meta.bytes;
            self.used += meta.bytes + meta.skipped;
            prev_term = meta.term;
            self.metas.push_back(meta);
            index += 1;
        }
        Ok(())
    }

    /// Reads the facts about an index, up to the first that decides, and the record.
    fn examine_index(&self, index: u64, prev_term: u64) -> (Facts, Option<Meta>) {
        let value = self
            .area
            .load_u64(SLOTS_AT + (index & u64::from(self.spec.slots - 1)) * 8);
        let offset = slot_offset(value, index);
        let slot = match offset {
            _ if value == 0 => Slot::Null,
            None => Slot::OtherIndex,
            Some(offset) if offset + RECORD_HEADER_BYTES as u64 > self.records_bytes => {
                Slot::Outside
            }
            Some(_) => Slot::Inside,
        };
        let mut facts = Facts::of(slot, index <= self.hard_state.commit);
        let (Slot::Inside, Some(offset)) = (slot, offset) else {
            return (facts, None);
        };
        let rest = self
            .area
            .bytes(self.records_at + offset, self.records_bytes - offset);
        let decoded = RecordHeader::decode(rest);
        let header = match &decoded {
            None => Header::Damaged,
            Some((it, _)) if it.log != self.spec.log || it.index != index => Header::OtherPlace,
            Some((it, _)) if it.prev_term != prev_term || it.term < prev_term => Header::OtherTerm,
            Some(_) => Header::Matches,
        };
        facts.header = Some(header);
        let (Header::Matches, Some((header, pieces))) = (header, decoded) else {
            return (facts, None);
        };
        let mut meta = match self.locate_payload(offset, &header, &pieces) {
            Ok(meta) => meta,
            Err(segments) => {
                facts.segments = Some(segments);
                return (facts, None);
            }
        };
        facts.segments = Some(Segments::Inside);
        let is_whole = self.payload_crc(&meta) == header.payload_crc;
        facts.is_payload_whole = Some(is_whole);
        if !is_whole {
            return (facts, None);
        }
        if !self.metas.is_empty() && offset != self.tail {
            // Only at the wrap is there a gap.
            meta.skipped = self.records_bytes - self.tail;
        }
        let follows = self.metas.is_empty() || offset == self.tail || offset == 0;
        let fits = self.used + meta.bytes + meta.skipped <= self.records_bytes;
        facts.is_adjacent = Some(follows && fits);
        (facts, Some(meta))
    }

    /// Where a record's payload lies.
    fn locate_payload(
        &self,
        offset: u64,
        header: &RecordHeader,
        pieces: &[Piece],
    ) -> Result<Meta, Segments> {
        let table = pieces.len() * SEGMENT_BYTES;
        let mut at = offset + (RECORD_HEADER_BYTES + table) as u64;
        let inline = |at: &mut u64, len: u32| {
            let from = *at;
            *at += u64::from(len);
            (*at <= self.records_bytes)
                .then_some(from)
                .ok_or(Segments::Outside)
        };
        let mut parts = Vec::with_capacity(pieces.len());
        if pieces.is_empty() {
            inline(&mut at, header.len)?;
        }
        for piece in pieces {
            parts.push(match *piece {
                Piece::Inline { len } => Part::Inline {
                    from: inline(&mut at, len)?,
                    len,
                },
                Piece::Extent { frame, offset, len } => {
                    let pool = self.pool.as_ref().ok_or(Segments::NoPool)?;
                    let frame = pool.adopt(frame, offset, len);
                    Part::Extent(frame.map_err(|_| Segments::NoFrame)?)
                }
            });
        }
        Ok(Meta {
            offset,
            bytes: (at - offset).next_multiple_of(RECORD_UNIT),
            skipped: 0,
            term: header.term,
            kind: header.kind,
            len: header.len,
            payload_crc: header.payload_crc,
            parts: (!parts.is_empty()).then(|| parts.into_boxed_slice()),
        })
    }

    fn payload_crc(&self, meta: &Meta) -> u32 {
        match &meta.parts {
            None => {
                let at = self.records_at + meta.offset + RECORD_HEADER_BYTES as u64;
                crc32c(std::iter::once(self.area.bytes(at, u64::from(meta.len))))
            }
            Some(parts) => crc32c(parts.iter().map(|part| match part {
                Part::Inline { from, len } => {
                    self.area.bytes(self.records_at + from, u64::from(*len))
                }
                Part::Extent(frame) => frame,
            })),
        }
    }

    /// Nulls every slot outside the log, so that nothing half-made or half-removed ever comes back.
    fn wipe_outside(&mut self) -> u64 {
        let count = self.metas.len() as u64;
        let slots = u64::from(self.spec.slots);
        let first = self.anchor.first;
        let stale: Vec<u64> = (first + count..first + slots)
            .filter(|index| self.area.load_u64(SLOTS_AT + (index & (slots - 1)) * 8) != 0)
            .collect();
        for &index in stale.iter().filter(|_| !planted::has(Bug::StaleSlotsKept)) {
            self.null_slots(index, 1);
        }
        stale.len() as u64
    }
}

//! Objects into pages: whole entries where the open page has room, else part by part.

use super::*;
use crate::flash::log::HardPlaced;
use crate::ring::EntryView;

impl FlashLog {
    /// The usual case, without detours: entries that the open page has room for as a whole. Returns
    /// whether there was one.
    pub(super) fn place_whole_entries(&mut self, ring: Option<&Ring>, upto: u64) -> bool {
        let Some(ring) = ring else {
            return false;
        };
        if self.current.is_some() || self.reset_due.is_some() || self.block.mode == FlashMode::Only
        {
            return false;
        }
        let mut moved = false;
        while self.terms.next() <= upto
            && let Some(filling) = self.filling.as_mut().filter(|filling| filling.open)
            && let Some(entry) = ring.entry(self.terms.next())
        {
            let (page, at) = filling.cursor();
            let len = ENTRY_HEAD_BYTES + entry.len as usize;
            if at + RECORD_HEAD_BYTES + len > PAGE_BYTES {
                break;
            }
            let index = self.terms.next();
            let head = entry_head(&entry, index, self.terms.get(index - 1).unwrap_or(0));
            let place = page * PAGE_BYTES + at;
            let out = &mut filling.buffer[place..place + RECORD_HEAD_BYTES + len];
            let (record, rest) = out.split_at_mut(RECORD_HEAD_BYTES);
            record.copy_from_slice(&record_head(len as u16, true, true, ObjectKind::Entry));
            let (bytes, mut payload) = rest.split_at_mut(ENTRY_HEAD_BYTES);
            bytes.copy_from_slice(&head.encode());
            for segment in entry.segments() {
                let (now, later) = payload.split_at_mut(segment.len());
                now.copy_from_slice(segment);
                payload = later;
            }
            debug_assert!(payload.is_empty());
            filling.used[page] += (RECORD_HEAD_BYTES + len) as u16;
            self.stats.record_bytes += (RECORD_HEAD_BYTES + len) as u64;
            self.records_end = self.tail;
            self.note_begin(index);
            self.note_end(self.tail - 1, index, head.term);
            moved = true;
        }
        moved
    }

    /// Puts as much of an object into pages as there is room for.
    pub(super) fn place(
        &mut self,
        current: &mut Current,
        ring: Option<&Ring>,
        now_us: u64,
    ) -> Placed {
        loop {
            let left = current.total - current.done;
            // An entry's head is not taken apart.
            let least = if current.done == 0 {
                left.min(ENTRY_HEAD_BYTES)
            } else {
                1
            };
            if !self.ensure_page_space(
                RECORD_HEAD_BYTES + least,
                self.reserve_for(current.kind),
                now_us,
            ) {
                return Placed::Blocked;
            }
            if current.done == 0 {
                current.began = self.tail - 1;
                if current.kind == ObjectKind::Entry {
                    self.note_begin(current.entry.0);
                }
            }
            let Some(filling) = &mut self.filling else {
                return Placed::Blocked;
            };
            let (page, at) = filling.cursor();
            let part = left.min(PAGE_BYTES - at - RECORD_HEAD_BYTES);
            let (first, last) = (current.done == 0, part == left);
            let out = &mut filling.buffer[page * PAGE_BYTES..(page + 1) * PAGE_BYTES];
            let head = record_head(part as u16, first, last, current.kind);
            out[at..at + RECORD_HEAD_BYTES].copy_from_slice(&head);
            let at = at + RECORD_HEAD_BYTES;
            if !copy_from(current, ring, &mut out[at..at + part]) {
                return Placed::GivenUp;
            }
            filling.used[page] += (RECORD_HEAD_BYTES + part) as u16;
            self.stats.record_bytes += (RECORD_HEAD_BYTES + part) as u64;
            self.records_end = self.tail;
            current.done += part;
            if last {
                return Placed::Whole;
            }
        }
    }

    fn reserve_for(&self, kind: ObjectKind) -> Reserve {
        let is_new = match kind {
            ObjectKind::Reset => true,
            ObjectKind::HardState => self.reset_page.is_some() && self.hard_due,
            ObjectKind::Entry => false,
        };
        if is_new {
            Reserve::Half
        } else {
            Reserve::Untouched
        }
    }

    pub(super) fn finish(&mut self, current: &Current) {
        let page = self.tail - 1;
        match current.kind {
            ObjectKind::Entry => self.note_end(page, current.entry.0, current.entry.1),
            ObjectKind::HardState => {
                // One that began in the segment before goes with it.
                let segment = self.segment_pages();
                self.hard_due &= current.began / segment < page / segment;
                let (version, commit) = current.entry;
                self.hard_written = version;
                self.hard_owed = commit < self.hard_state.commit;
                self.hard_states.push_back(HardPlaced {
                    began: current.began,
                    ended: page,
                    commit,
                });
                self.hard_told = (self.hard_state.term, self.hard_state.vote);
            }
            ObjectKind::Reset => {
                self.reset_due = None;
                self.reset_page = Some(page);
                self.hard_due |= self.block.mode == FlashMode::Only;
                self.drop_before_reset();
            }
        }
    }
}

pub(super) fn entry_head(entry: &EntryView<'_>, index: u64, prev_term: u64) -> EntryHead {
    EntryHead {
        index,
        term: entry.term,
        prev_term,
        len: entry.len,
        // Not computed anew: what has changed in memory since must not look right here.
        payload_crc: entry.payload_crc(),
        kind: entry.kind,
    }
}

/// Copies an object's next bytes.
fn copy_from(current: &Current, ring: Option<&Ring>, mut out: &mut [u8]) -> bool {
    let mut skip = current.done;
    let take = |bytes: &[u8], skip: &mut usize, out: &mut &mut [u8]| {
        let passed = bytes.len().min(*skip);
        *skip -= passed;
        let count = (bytes.len() - passed).min(out.len());
        let (now, later) = std::mem::take(out).split_at_mut(count);
        now.copy_from_slice(&bytes[passed..passed + count]);
        *out = later;
    };
    take(&current.head, &mut skip, &mut out);
    if current.kind == ObjectKind::Entry && !out.is_empty() {
        let (index, term) = current.entry;
        let entry = ring.and_then(|ring| ring.entry(index));
        let Some(entry) = entry.filter(|entry| entry.term == term) else {
            return false;
        };
        for segment in entry.segments() {
            if out.is_empty() {
                break;
            }
            take(segment, &mut skip, &mut out);
        }
    }
    out.is_empty()
}

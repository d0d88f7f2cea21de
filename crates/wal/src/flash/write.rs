//! Writing: objects into pages, pages into segments, segments to the device; durability counted in
//! order, whatever order the device works in.

mod grow;
mod place;

use cyclone_wire::flash::{
    ENTRY_HEAD_BYTES, EntryHead, FlashMode, ObjectKind, PAGE_BYTES, PAGE_HEADER_BYTES, PageHeader,
    RECORD_HEAD_BYTES, encode_reset, record_head,
};
use cyclone_wire::planted::{self, Bug};
use cyclone_wire::ring::HardState;

use self::place::entry_head;
use super::buffer::Buffer;
use super::device::{Action, Completion, DeviceError, Request};
use super::log::{Blocked, FlashLog};
use crate::ring::Ring;

/// Time between polls of a device that cannot wake its owner.
const POLL_US: u64 = 200;
/// Tokens of writes that prepare space.
const GROW: u64 = 1 << 62;

/// Pages in the making, at most to the segment's end.
pub(crate) struct OpenPage {
    buffer: Buffer,
    from: u64,
    /// Bytes of records of each page.
    used: Vec<u16>,
    /// The last page takes more.
    open: bool,
    opened_us: u64,
}

enum Step {
    /// To be handed to the device, not before the time.
    Waits(Buffer, u64),
    Flies,
    Done,
}

/// A write that is not known to be durable, or whose predecessors are not.
pub(crate) struct Write {
    token: u64,
    from: u64,
    pages: u64,
    /// What its pages say about the first one needed.
    first: u64,
    since_us: u64,
    /// Its last attempt did not succeed.
    failed: bool,
    step: Step,
}

/// How far an object got.
#[derive(PartialEq, Eq)]
enum Placed {
    Whole,
    Blocked,
    /// The ring has freed it, which it does only with entries that were replaced.
    GivenUp,
}

/// How far into the segment that is kept back a page may go.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reserve {
    Untouched,
    /// For the log's new beginning, and the hard state that belongs to it: it gives up all that
    /// fills the area.
    Half,
    /// For pages without records: they tell what has been given up.
    All,
}

/// An object of which a part stands in pages, perhaps nothing yet.
pub(crate) struct Current {
    kind: ObjectKind,
    /// The object's bytes; of an entry only its head.
    head: Vec<u8>,
    /// Of an entry: index and term. Of a hard state: number of the change, and the commit index
    /// that it says.
    entry: (u64, u64),
    total: usize,
    done: usize,
    /// The page in which it begins.
    began: u64,
}

impl FlashLog {
    /// Takes entries from the ring, up to and including `upto`, as far as there is room. What is
    /// incomplete goes on with the next call. Returns whether anything moved.
    pub fn pump(&mut self, ring: &Ring, upto: u64, now_us: u64) -> bool {
        self.pump_from(Some(ring), upto, now_us)
    }

    /// Without a ring there are no entries.
    pub(crate) fn pump_from(&mut self, ring: Option<&Ring>, upto: u64, now_us: u64) -> bool {
        let mut moved = false;
        loop {
            moved |= self.place_whole_entries(ring, upto);
            if self.current.is_none() && !self.next_object(ring, upto) {
                break;
            }
            let Some(mut current) = self.current.take() else {
                break;
            };
            match self.place(&mut current, ring, now_us) {
                Placed::Whole => self.finish(&current),
                Placed::Blocked => {
                    self.current = Some(current);
                    break;
                }
                Placed::GivenUp => break,
            }
            moved = true;
        }
        if self.current.is_none() {
            self.blocked = None;
        }
        self.flush_groups();
        self.submit_queued(now_us);
        moved
    }

    /// Entries from `index` on are going to be replaced by others: they no longer count.
    pub fn rewind(&mut self, index: u64) {
        let voids =
            |current: &Current| current.kind == ObjectKind::Entry && current.entry.0 >= index;
        if self.current.as_ref().is_some_and(voids) {
            self.current = None;
        }
        self.terms.truncate(index);
        let last = self.terms.next() - 1;
        for (_, end) in self.ends.iter_mut().rev() {
            if *end <= last {
                break;
            }
            *end = last;
        }
        self.durable_index = self.durable_index.min(last);
    }

    /// The log begins anew behind an index, for a state that came by another way than the log.
    pub fn reset(&mut self, index: u64, term: u64) {
        self.current = None;
        self.reset_due = Some((index, term));
        // Until the reset stands in a page, nothing is to be read that it voids.
        self.note_reset(index, term);
    }

    /// As the only level: a new hard state, to be written before any further entry. Answers the
    /// number of this change.
    pub fn set_hard_state(&mut self, state: HardState) -> u64 {
        if self.hard_state != state {
            self.hard_state = state;
            self.hard_version += 1;
        }
        self.hard_version
    }

    /// Whether entries up to `last` and hard state change `version` stand in pages below
    /// [`FlashLog::position`].
    pub fn has(&self, last: u64, version: u64) -> bool {
        self.terms.next() > last && self.hard_written >= version && self.reset_due.is_none()
    }

    fn next_object(&mut self, ring: Option<&Ring>, upto: u64) -> bool {
        let simple = |kind, head: Vec<u8>| Current {
            kind,
            entry: (0, 0),
            total: head.len(),
            done: 0,
            began: 0,
            head,
        };
        if let Some((index, term)) = self.reset_due {
            let head = encode_reset(index, term).to_vec();
            self.current = Some(simple(ObjectKind::Reset, head));
            return true;
        }
        let available = self.terms.next() <= upto;
        if self.block.mode == FlashMode::Only && self.hard_state_first(available) {
            let mut state = self.hard_state.clone();
            // What stands before it in the log is what it may speak about.
            state.commit = state.commit.min(self.terms.next() - 1);
            let mut head = Vec::new();
            state.encode(self.hard_version, &mut head);
            self.current = Some(Current {
                entry: (self.hard_version, state.commit),
                ..simple(ObjectKind::HardState, head)
            });
            return true;
        }
        let index = self.terms.next();
        if index > upto {
            return false;
        }
        let Some(entry) = ring.and_then(|ring| ring.entry(index)) else {
            return false;
        };
        let head = entry_head(&entry, index, self.terms.get(index - 1).unwrap_or(0));
        self.current = Some(Current {
            kind: ObjectKind::Entry,
            head: head.encode().to_vec(),
            entry: (index, entry.term),
            total: ENTRY_HEAD_BYTES + entry.len as usize,
            done: 0,
            began: 0,
        });
        true
    }

    /// Whether the hard state is to be written before the next entry. One that only commits more
    /// goes behind the entries that it commits.
    fn hard_state_first(&self, available: bool) -> bool {
        let state = &self.hard_state;
        let commits_later = available
            && state.commit >= self.terms.next()
            && self.hard_told == (state.term, state.vote);
        let owed = self.hard_owed && self.terms.next() > state.commit;
        self.hard_due || owed || (self.hard_version > self.hard_written && !commits_later)
    }

    /// Sees to it that the open page takes this many more bytes.
    fn ensure_page_space(&mut self, bytes: usize, reserve: Reserve, now_us: u64) -> bool {
        if let Some(filling) = &self.filling
            && filling.open
        {
            if filling.cursor().1 + bytes <= PAGE_BYTES {
                return true;
            }
            self.close_page();
        }
        self.open_page(reserve, now_us)
    }

    fn open_page(&mut self, reserve: Reserve, now_us: u64) -> bool {
        let (page, pages, segment) = (self.tail, self.block.pages, self.segment_pages());
        let kept_back = match reserve {
            Reserve::Untouched => segment,
            Reserve::Half => segment / 2,
            Reserve::All => 0,
        };
        let reason = if page + kept_back >= self.first_durable + pages {
            Some(Blocked::Budget)
        } else if page % pages >= self.grown {
            Some(Blocked::Growth)
        } else if self.filling.is_none() {
            match self.buffers.take() {
                Some(buffer) => {
                    self.filling = Some(OpenPage {
                        buffer,
                        from: page,
                        used: Vec::with_capacity(segment as usize),
                        open: false,
                        opened_us: now_us,
                    });
                    None
                }
                None => Some(Blocked::Buffers),
            }
        } else {
            None
        };
        if let Some(reason) = reason {
            if self.blocked.is_none_or(|(was, _)| was != reason) {
                self.blocked = Some((reason, now_us));
            }
            return false;
        }
        let Some(filling) = &mut self.filling else {
            return false;
        };
        filling.used.push(0);
        filling.open = true;
        self.tail += 1;
        self.page_start_indexes.push_back(self.next_begin);
        self.hard_due |= page.is_multiple_of(segment) && self.block.mode == FlashMode::Only;
        true
    }

    fn close_page(&mut self) {
        let segment = self.segment_pages();
        if let Some(filling) = &mut self.filling {
            filling.open = false;
            if (filling.from + filling.used.len() as u64).is_multiple_of(segment) {
                self.seal();
            }
        }
    }

    /// Makes a write of the pages so far.
    fn seal(&mut self) {
        let Some(mut filling) = self.filling.take() else {
            return;
        };
        if self.durable >= self.first_proven {
            self.first_published = self.first;
        }
        for (place, used) in filling.used.iter().enumerate() {
            let header = PageHeader {
                log: self.block.log,
                sequence: filling.from + place as u64,
                durable: self.durable,
                first: self.first_published,
                tag: self.block.tag,
                life: self.life,
                used: *used,
            };
            header.seal(&mut filling.buffer[place * PAGE_BYTES..(place + 1) * PAGE_BYTES]);
        }
        self.vouched = self.durable;
        self.mark_due &= self.first_published < self.first;
        let token = self.token();
        let pages = filling.used.len() as u64;
        self.stats.writes += 1;
        self.stats.pages += pages;
        self.writes.push_back(Write {
            token,
            from: filling.from,
            pages,
            first: self.first_published,
            failed: false,
            since_us: filling.opened_us,
            step: Step::Waits(filling.buffer, 0),
        });
    }

    /// Writes what has been gathered, full or not.
    pub fn flush(&mut self, now_us: u64) {
        if self.filling.is_some() {
            self.close_page();
            self.seal();
            self.submit_queued(now_us);
        }
    }

    /// As the only level: no caller waits longer than for a write's turn.
    fn flush_groups(&mut self) {
        if self.block.mode == FlashMode::Only
            && self.filling.is_some()
            && self.writes.len() < self.spec.groups
        {
            self.close_page();
            self.seal();
        }
    }

    fn submit_queued(&mut self, now_us: u64) {
        for write in &mut self.writes {
            if !matches!(write.step, Step::Waits(_, due) if due <= now_us) {
                continue;
            }
            let Step::Waits(buffer, _) = std::mem::replace(&mut write.step, Step::Flies) else {
                continue;
            };
            let request = Request {
                token: write.token,
                action: Action::Write,
                offset: self.block.page_at(write.from),
                buffer,
                len: write.pages as usize * PAGE_BYTES,
            };
            match self.device.submit(now_us, request) {
                Ok(()) => write.since_us = now_us,
                Err(request) => {
                    write.step = Step::Waits(request.buffer, 0);
                    break;
                }
            }
        }
    }

    pub(crate) fn oldest_write_us(&self) -> Option<u64> {
        let flying = self.writes.iter();
        let flying = flying.filter(|write| matches!(write.step, Step::Flies));
        flying.map(|write| write.since_us).min()
    }

    /// Takes in what the device has done, and does what has become due. Answers how much was done.
    pub fn poll(&mut self, now_us: u64) -> usize {
        let mut done = std::mem::take(&mut self.done);
        self.device.poll(now_us, &mut done);
        let work = done.len();
        self.polled_us = now_us;
        for completion in done.drain(..) {
            self.completed(completion, now_us);
        }
        self.done = done;
        if work > 0 {
            self.flush_groups();
        }
        let late = |filling: &OpenPage| {
            now_us.saturating_sub(filling.opened_us) >= self.spec.flush_after_us
        };
        if self.filling.as_ref().is_some_and(late) {
            self.flush(now_us);
        }
        self.write_mark(now_us);
        self.grow(now_us);
        self.submit_queued(now_us);
        self.pump_fetches(now_us);
        work
    }

    /// When [`FlashLog::poll`] has something to do without new input.
    pub fn deadline_us(&self) -> u64 {
        let flush = self.filling.as_ref();
        let flush = flush.map_or(u64::MAX, |filling| {
            filling.opened_us + self.spec.flush_after_us
        });
        let retries = self.writes.iter().filter_map(|write| match write.step {
            Step::Waits(_, due) if due > 0 => Some(due),
            _ => None,
        });
        let mark = match self.needs_commit_mark() {
            true => self.idle_since_us + self.spec.flush_after_us,
            false => u64::MAX,
        };
        let grow = match self.grow_failed {
            Some(failed) if !self.growing && self.buffers.free() > 0 => failed.due_us,
            None if self.wants_to_grow() && self.buffers.free() > 0 => self.grow_due_us,
            _ => u64::MAX,
        };
        let retries = retries.min().unwrap_or(u64::MAX);
        // A device that cannot wake its owner is polled often.
        let poll = match self.device.descriptor() {
            None if self.device.outstanding() > 0 => self.polled_us + POLL_US,
            _ => u64::MAX,
        };
        retries.min(flush).min(mark).min(grow).min(poll)
    }

    pub(crate) fn completed(&mut self, completion: Completion, now_us: u64) {
        if completion.action == Action::Read {
            return self.fetched(completion, now_us);
        }
        if completion.token & GROW != 0 {
            return self.has_grown(completion, now_us);
        }
        let place = self
            .writes
            .iter()
            .position(|write| write.token == completion.token);
        let Some(write) = place.and_then(|place| self.writes.get_mut(place)) else {
            return;
        };
        let result = match completion.result {
            Err(_) if planted::has(Bug::FlashErrorIgnored) => Ok(()),
            result => result,
        };
        match result {
            Ok(()) => (write.step, write.failed) = (Step::Done, false),
            Err(error) => {
                // Pages are whole or not there, and only what comes back without an error counts:
                // the same bytes once more, for as long as it takes.
                write.step = Step::Waits(completion.buffer, now_us + self.spec.retry_after_us);
                write.failed = true;
                self.stats.write_errors += 1;
                self.failed_since = Some((self.failed_since.map_or(now_us, |(at, _)| at), error));
            }
        }
        while let Some(Write {
            step: Step::Done,
            from,
            pages,
            first,
            ..
        }) = self.writes.front()
        {
            self.durable = from + pages;
            self.first_durable = self.first_durable.max(*first);
            self.writes.pop_front();
            self.idle_since_us = now_us;
        }
        if !self.writes.iter().any(|write| write.failed) {
            self.failed_since = None;
        }
        self.settle_ends();
    }

    /// A page without records is worth writing: there was trimming that no page records while room
    /// is short, or no later page vouches that the last pages were durable.
    fn needs_commit_mark(&self) -> bool {
        let quiet = self.filling.is_none() && self.writes.is_empty() && !self.read_only;
        let short = self.tail + 2 * self.segment_pages() >= self.first_durable + self.block.pages;
        let told = self.vouched >= self.records_end;
        quiet && ((self.mark_due && short) || (self.mode() == FlashMode::Only && !told))
    }

    fn write_mark(&mut self, now_us: u64) {
        if !self.needs_commit_mark() {
            return;
        }
        let urgent = self.mark_due && self.blocked.is_some();
        if !urgent && now_us < self.idle_since_us + self.spec.flush_after_us {
            return;
        }
        let blocked = self.blocked;
        if self.open_page(Reserve::All, now_us) {
            self.close_page();
            self.seal();
        } else {
            self.idle_since_us = now_us;
        }
        self.blocked = blocked;
    }
}

impl OpenPage {
    /// The open page and the byte of it that is next.
    fn cursor(&self) -> (usize, usize) {
        let page = self.used.len() - 1;
        (page, PAGE_HEADER_BYTES + usize::from(self.used[page]))
    }
}

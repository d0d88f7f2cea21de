//! The flash log: what it knows, what it tells, trimming. Writing is in `write.rs`, reading back in
//! `fetch.rs`, starting in `recover.rs`.

use std::collections::VecDeque;
use std::os::fd::RawFd;

use cyclone_wire::flash::{FlashMode, FlashSuperblock, PAGE_BYTES};
use cyclone_wire::planted::{self, Bug};
use cyclone_wire::ring::HardState;

use super::buffer::Buffers;
use super::device::{Completion, DeviceError, FlashDevice};
use super::fetch::Fetches;
use super::spec::FlashSpec;
use super::terms::Terms;
use super::write::{Current, OpenPage, Write};

/// How the log is doing. Nothing that it holds is lost in any of these; it goes on automatically
/// once the reason is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlashState {
    /// Everything handed over is durable, or on its way.
    Ready,
    /// A write has not come back for long.
    Stalled {
        /// When it was handed over.
        since_us: u64,
    },
    /// A write failed and is tried again and again.
    Failing {
        /// When it failed first.
        since_us: u64,
        /// With what.
        error: DeviceError,
    },
    /// The budget is used up; trimming makes room.
    Full {
        /// Since when something waits for room.
        since_us: u64,
    },
    /// The file system has no room for what the budget promises.
    DeviceFull {
        /// Since when.
        since_us: u64,
    },
}

impl FlashState {
    /// While writes fail with this error.
    fn after(error: DeviceError, since_us: u64) -> FlashState {
        match error {
            DeviceError::NoSpace => FlashState::DeviceFull { since_us },
            error => FlashState::Failing { since_us, error },
        }
    }

    /// Its name, for status and metrics.
    pub fn name(&self) -> &'static str {
        match self {
            FlashState::Ready => "ready",
            FlashState::Stalled { .. } => "stalled",
            FlashState::Failing { .. } => "failing",
            FlashState::Full { .. } => "full",
            FlashState::DeviceFull { .. } => "device-full",
        }
    }

    /// Since when it makes no progress, in microseconds of the caller's clock.
    pub fn since_us(&self) -> Option<u64> {
        match *self {
            FlashState::Ready => None,
            FlashState::Stalled { since_us }
            | FlashState::Failing { since_us, .. }
            | FlashState::Full { since_us }
            | FlashState::DeviceFull { since_us } => Some(since_us),
        }
    }
}

/// Counters since the start, and the present fill.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlashStats {
    /// Writes handed to the device, retries not counted.
    pub writes: u64,
    /// Pages in them.
    pub pages: u64,
    /// Bytes of records in those pages; the rest is headers and space left empty.
    pub record_bytes: u64,
    /// Writes that failed and were tried again.
    pub write_errors: u64,
    /// Reads handed to the device since the log was opened.
    pub reads: u64,
    /// Segment writes that prepared space.
    pub grown_segments: u64,
}

/// Proof that everything handed over before a position is durable. Only the flash log makes it.
#[derive(Debug)]
#[must_use]
pub struct Durable {
    _private: (),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Blocked {
    Budget,
    Growth,
    Buffers,
}

/// Growth does not succeed at present.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GrowFailed {
    /// When it failed first.
    pub(crate) since_us: u64,
    /// When it is tried again.
    pub(crate) due_us: u64,
    /// With what it failed last.
    pub(crate) error: DeviceError,
}

/// Where a hard state stands.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HardPlaced {
    pub(crate) began: u64,
    pub(crate) ended: u64,
    pub(crate) commit: u64,
}

/// One physical log's second (or only) level. See the module's text.
pub struct FlashLog {
    pub(crate) device: Box<dyn FlashDevice>,
    pub(crate) block: FlashSuperblock,
    pub(crate) spec: FlashSpec,
    pub(crate) buffers: Buffers,
    pub(crate) life: u32,
    /// Opened for inspection: nothing is written without a request.
    pub(crate) read_only: bool,
    /// First page that is needed: a segment's first.
    pub(crate) first: u64,
    /// The same as it stands in a durable page: only what lies a lap behind may be overwritten.
    pub(crate) first_durable: u64,
    /// What new pages say about it: only what is proven by then.
    pub(crate) first_published: u64,
    /// `first` may be reported once all pages below this are durable.
    pub(crate) first_proven: u64,
    /// All pages below are durable.
    pub(crate) durable: u64,
    /// The next page to be opened.
    pub(crate) tail: u64,
    /// Behind the last page with records.
    pub(crate) records_end: u64,
    /// The highest `durable` that a page on its way carries.
    pub(crate) vouched: u64,
    /// Pages that have been written once, by place.
    pub(crate) grown: u64,
    /// A segment of zeros is on its way.
    pub(crate) growing: bool,
    /// When to go on growing while no caller waits for it.
    pub(crate) grow_due_us: u64,
    pub(crate) grow_failed: Option<GrowFailed>,
    pub(crate) writes: VecDeque<Write>,
    pub(crate) filling: Option<OpenPage>,
    pub(crate) current: Option<Current>,
    /// Per page from `first` on: the index of the entry that was next to begin when the page was
    /// opened.
    pub(crate) page_start_indexes: VecDeque<u64>,
    /// The entry that begins next.
    pub(crate) next_begin: u64,
    /// Terms of the entries that are complete in pages, durable or not.
    pub(crate) terms: Terms,
    /// The log began anew behind this index.
    pub(crate) base: u64,
    /// Page in which an entry ended, and its index.
    pub(crate) ends: VecDeque<(u64, u64)>,
    pub(crate) durable_index: u64,
    /// As the only level: the hard state, how often it was changed, and which change stands in a
    /// page.
    pub(crate) hard_state: HardState,
    pub(crate) hard_version: u64,
    pub(crate) hard_written: u64,
    /// Term and vote that stand in a page.
    pub(crate) hard_told: (u64, u64),
    /// The hard state in a page commits less than it should: the entries were not there yet.
    pub(crate) hard_owed: bool,
    /// Hard states in pages that are not known to be durable.
    pub(crate) hard_states: VecDeque<HardPlaced>,
    pub(crate) durable_commit: u64,
    /// The page in which the last durable hard state begins: the log may not begin behind it.
    pub(crate) durable_hard: u64,
    /// A segment has begun that has no copy of the hard state yet.
    pub(crate) hard_due: bool,
    pub(crate) reset_due: Option<(u64, u64)>,
    /// Where the last reset stands, until the log begins with its segment.
    pub(crate) reset_page: Option<u64>,
    pub(crate) mark_due: bool,
    pub(crate) idle_since_us: u64,
    pub(crate) polled_us: u64,
    pub(crate) blocked: Option<(Blocked, u64)>,
    pub(crate) failed_since: Option<(u64, DeviceError)>,
    pub(crate) next_token: u64,
    pub(crate) fetches: Fetches,
    pub(crate) done: Vec<Completion>,
    pub(crate) stats: FlashStats,
}

impl FlashLog {
    /// What the area is for.
    pub fn mode(&self) -> FlashMode {
        self.block.mode
    }

    /// Index of the first entry it has, present or to come.
    pub fn first_index(&self) -> u64 {
        self.terms.first()
    }

    /// Index of the last entry handed over whole, durable or not; one before the first when there
    /// is none.
    pub fn last_index(&self) -> u64 {
        self.terms.next() - 1
    }

    /// Every entry up to this one is durable.
    pub fn durable_index(&self) -> u64 {
        self.durable_index
    }

    /// As the only level: the commit index that a crash now would leave.
    pub fn durable_commit(&self) -> u64 {
        self.durable_commit
    }

    /// The term of an entry handed over, or of the one before the first.
    pub fn term(&self, index: u64) -> Option<u64> {
        self.terms.get(index)
    }

    /// As the only level: the hard state last handed over.
    pub fn hard_state(&self) -> &HardState {
        &self.hard_state
    }

    /// Share of the budget in use, 0 to 1.
    pub fn fill(&self) -> f64 {
        (self.tail - self.first) as f64 / (self.block.pages - self.segment_pages()) as f64
    }

    /// Bytes in use, and bytes of the budget.
    pub fn used_bytes(&self) -> (u64, u64) {
        let page = PAGE_BYTES as u64;
        ((self.tail - self.first) * page, self.block.pages * page)
    }

    /// Everything handed over lies below this page; it is durable once [`FlashLog::durable_page`]
    /// has got there.
    pub fn position(&self) -> u64 {
        self.tail
    }

    /// All pages below are durable.
    pub fn durable_page(&self) -> u64 {
        self.durable
    }

    /// The proof that everything below `position` is durable, once it is.
    pub fn witness(&self, position: u64) -> Option<Durable> {
        let durable = self.durable >= position || planted::has(Bug::FlashAckEarly);
        durable.then_some(Durable { _private: () })
    }

    /// Whether entries up to `last` and everything else handed over are durable.
    pub fn is_settled(&self, last: u64) -> bool {
        let hard = self.mode() == FlashMode::Second || self.hard_written >= self.hard_version;
        hard && self.reset_due.is_none() && self.durable == self.tail && self.durable_index >= last
    }

    /// Counters.
    pub fn stats(&self) -> FlashStats {
        self.stats
    }

    /// The superblock.
    pub fn superblock(&self) -> &FlashSuperblock {
        &self.block
    }

    /// Readable when the device has something to tell.
    pub fn descriptor(&self) -> Option<RawFd> {
        self.device.descriptor()
    }

    /// Whether the device lies in the machine's memory, and goes with it.
    pub fn is_in_memory(&self) -> bool {
        self.device.is_in_memory()
    }

    /// The device, for people.
    pub fn describe(&self) -> String {
        self.device.describe()
    }

    /// Writes and reads that have not come back.
    pub fn outstanding(&self) -> usize {
        self.device.outstanding()
    }

    /// How it is doing at `now_us`.
    pub fn state(&self, now_us: u64) -> FlashState {
        if let Some((since_us, error)) = self.failed_since {
            return FlashState::after(error, since_us);
        }
        if let Some(since_us) = self.oldest_write_us()
            && now_us.saturating_sub(since_us) > self.spec.stall_after_us
        {
            return FlashState::Stalled { since_us };
        }
        match (self.blocked, self.grow_failed) {
            (Some((Blocked::Budget, since_us)), _) => FlashState::Full { since_us },
            (Some((Blocked::Growth, _)), Some(failed)) => {
                FlashState::after(failed.error, failed.since_us)
            }
            _ => FlashState::Ready,
        }
    }

    pub(crate) fn segment_pages(&self) -> u64 {
        u64::from(self.block.segment_bytes) / PAGE_BYTES as u64
    }

    pub(crate) fn token(&mut self) -> u64 {
        self.next_token += 1;
        self.next_token
    }

    /// The page in which an entry begins.
    pub(crate) fn page_of(&self, index: u64) -> Option<u64> {
        let place = self.page_start_indexes.partition_point(|low| *low <= index);
        Some(self.first + place.checked_sub(1)? as u64)
    }

    /// An entry begins in the last page opened; if it is not the next, those from it on are void.
    pub(crate) fn note_begin(&mut self, index: u64) {
        for low in self.page_start_indexes.iter_mut().rev() {
            if *low <= index {
                break;
            }
            *low = index;
        }
        self.next_begin = index + 1;
    }

    /// An entry is complete in a page.
    pub(crate) fn note_end(&mut self, page: u64, index: u64, term: u64) {
        self.terms.truncate(index);
        self.terms.push(term);
        match self.ends.back_mut() {
            Some((last, end)) if *last == page => *end = index,
            _ => self.ends.push_back((page, index)),
        }
    }

    /// The log begins anew behind an index: nothing that was handed over before counts any more.
    pub(crate) fn note_reset(&mut self, index: u64, term: u64) {
        self.terms = Terms::after(index, term);
        self.base = index;
        self.ends.clear();
        self.durable_index = index;
        self.note_begin(index + 1);
        self.next_begin = index + 1;
    }

    /// Moves `durable_index` along with the durable pages.
    pub(crate) fn settle_ends(&mut self) {
        while let Some((page, index)) = self.ends.front().copied() {
            if page >= self.durable {
                break;
            }
            self.durable_index = index;
            self.ends.pop_front();
        }
        while let Some(placed) = self.hard_states.front() {
            if placed.ended >= self.durable {
                break;
            }
            (self.durable_commit, self.durable_hard) = (placed.commit, placed.began);
            self.hard_states.pop_front();
        }
        self.drop_before_reset();
    }

    /// What stands before a reset is no longer needed, except for the hard state until another is
    /// durable.
    pub(crate) fn drop_before_reset(&mut self) {
        let Some(page) = self.reset_page else {
            return;
        };
        let kept = self.segment_kept(page);
        self.drop_before(kept, page);
        let segment = self.segment_pages();
        if kept / segment == page / segment {
            self.reset_page = None;
        }
    }

    /// Forgets entries up to and including `through`, as far as whole segments go; the last entry
    /// stays. Answers the new first index.
    pub fn trim(&mut self, through: u64) -> u64 {
        let keep = (through.saturating_add(1)).min(self.durable_index);
        if keep <= self.terms.first() || self.reset_due.is_some() {
            return self.terms.first();
        }
        let Some(page) = self.page_of(keep) else {
            return self.terms.first();
        };
        self.drop_before(self.segment_kept(page), page);
        let last = self.last_index();
        if through >= last && self.durable_index == last && self.fill() > 0.5 {
            // Nothing is needed any more, and yet it fills: with hard states. The log begins anew.
            let term = self.terms.get(last).unwrap_or(0);
            self.reset(last, term);
        }
        self.terms.first()
    }

    /// The first page of the segment with which the log may begin when it needs only what lies from
    /// `page` on. As the only level it needs a hard state, too.
    pub(crate) fn segment_kept(&self, page: u64) -> u64 {
        let page = match self.mode() {
            FlashMode::Second => page,
            FlashMode::Only => page.min(self.durable_hard),
        };
        page / self.segment_pages() * self.segment_pages()
    }

    /// Whether nothing depends on a page any more, not even a start after a crash now.
    pub fn has_left(&self, page: u64) -> bool {
        self.first_durable > page
    }

    /// Whether trimming up to and including `through` leaves a page behind.
    pub fn trim_leaves(&self, page: u64, through: u64) -> bool {
        let keep = through.saturating_add(1).min(self.durable_index);
        self.page_of(keep)
            .is_some_and(|at| self.segment_kept(at) > page)
    }

    /// Leaves a page behind that does not read back, by beginning anew behind an index
    /// ([`FlashLog::reset`]). Space is given up by segments: nothing happens while the log's end
    /// lies in the page's own.
    pub fn leave(&mut self, page: u64, index: u64, term: u64) {
        let segment = self.segment_pages();
        let past = self.tail.saturating_sub(1) / segment > page / segment;
        // It is written like all else: while there is no room, nothing could be trimmed any more.
        let room = self.tail + 2 * segment < self.first_durable + self.block.pages;
        if past && room && self.first <= page && self.reset_due.is_none() {
            self.reset(index, term);
        }
    }

    /// Pages before `first` are no longer needed, once page `proof` is durable.
    pub(crate) fn drop_before(&mut self, first: u64, proof: u64) {
        if first <= self.first {
            return;
        }
        self.first_proven = proof + 1;
        let count = (first - self.first) as usize;
        self.page_start_indexes
            .drain(..count.min(self.page_start_indexes.len()));
        self.first = first;
        self.mark_due = true;
        let low = self
            .page_start_indexes
            .front()
            .copied()
            .unwrap_or(self.next_begin);
        self.terms
            .trim(low.max(self.base + 1).min(self.terms.next()));
    }
}

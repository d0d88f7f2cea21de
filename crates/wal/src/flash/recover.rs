//! Formatting an area, and opening it after a restart or a crash.
//!
//! All pages are read, once. The log goes from the first page that is still needed to the last one
//! that follows without a gap; a page that is missing, torn, stale or misplaced ends it. If any
//! page found says that the missing one had been durable, that is damage and not a write cut short,
//! and the log says so instead of shortening itself. So it does where it may go on with a page that
//! cannot be read.

use std::collections::VecDeque;

use cyclone_wire::flash::{FlashMode, FlashSuperblock, PAGE_BYTES};
use cyclone_wire::planted::{self, Bug};
use cyclone_wire::ring::HardState;

use super::buffer::Buffers;
use super::device::{Action, Completion, DeviceError, FlashDevice, Request};
use super::fetch::Fetches;
use super::log::{FlashLog, FlashStats};
use super::read::{Unreadable, WAITED_FOR, blocking, one_page, superblock};
use super::spec::{FlashError, FlashIdentity, FlashSpec};
use super::survey::{AreaScan, PageState};
use super::terms::Terms;

/// What opening found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlashRecovered {
    /// Index of the first entry, present or to come.
    pub first: u64,
    /// Index of the last entry; one before the first when there is none.
    pub last: u64,
    /// Pages of the log.
    pub pages: u64,
    /// Whole pages behind the log's end: of writes that had overtaken one that was cut short.
    pub beyond: u64,
}

impl FlashLog {
    /// Formats an area: `after` is index and term of the entry before the first one that it will
    /// take, `hard_state` what an only level starts from, `tag` random. Blocks; the superblock is
    /// written last.
    ///
    /// # Errors
    /// A shape that makes no sense, no room, a device that fails.
    pub fn create(
        mut device: Box<dyn FlashDevice>,
        spec: FlashSpec,
        who: &FlashIdentity,
        tag: u64,
        after: (u64, u64),
        hard_state: &HardState,
    ) -> Result<FlashLog, FlashError> {
        spec.check(device.bytes())?;
        let bytes = spec.bytes.min(device.bytes());
        let spec = FlashSpec { bytes, ..spec };
        set_aside(&mut *device, bytes)?;
        let block = FlashSuperblock {
            cluster: who.cluster,
            replica: who.replica,
            incarnation: who.incarnation,
            tag,
            log: spec.log,
            mode: spec.mode,
            segment_bytes: spec.segment_bytes,
            pages: spec.pages(),
        };
        let mut page = one_page()?;
        page.fill(0);
        for copy in 0..2 {
            let at = copy * PAGE_BYTES as u64;
            page = blocking(&mut *device, Action::Write, at, page, PAGE_BYTES)?;
        }
        let mut log = FlashLog::empty(device, block, spec);
        log.terms = Terms::after(after.0, after.1);
        (log.base, log.next_begin, log.durable_index) = (after.0, after.0 + 1, after.0);
        log.reset_due = (after.0 > 0).then_some(after);
        if spec.mode == FlashMode::Only {
            log.set_hard_state(hard_state.clone());
            // One that says nothing yet is written as well: the log has a first page from the
            // beginning.
            log.hard_version = log.hard_version.max(1);
        }
        log.life = 1;
        log.first_words()?;
        block.encode(&mut page[..PAGE_BYTES]);
        for copy in [1, 0] {
            let at = copy * PAGE_BYTES as u64;
            page = log.write_and_wait(at, page)?;
        }
        Ok(log)
    }

    /// Writes a page and waits for it, while other requests may be in flight.
    fn write_and_wait(
        &mut self,
        offset: u64,
        buffer: super::buffer::Buffer,
    ) -> Result<super::buffer::Buffer, FlashError> {
        let mut request = Request {
            token: WAITED_FOR,
            action: Action::Write,
            offset,
            buffer,
            len: PAGE_BYTES,
        };
        while let Err(refused) = self.device.submit(0, request) {
            request = refused;
            self.device.wait();
            self.poll(0);
        }
        let mut done: Vec<Completion> = Vec::new();
        loop {
            self.device.wait();
            self.device.poll(0, &mut done);
            let mut ours = None;
            for completion in done.drain(..) {
                match completion.token {
                    WAITED_FOR => ours = Some(completion),
                    _ => self.completed(completion, 0),
                }
            }
            if let Some(ours) = ours {
                ours.result?;
                return Ok(ours.buffer);
            }
        }
    }

    /// Makes durable what a new log begins with.
    fn first_words(&mut self) -> Result<(), FlashError> {
        // Without a ring there are no entries: only hard state and reset can be written.
        let due = |log: &FlashLog| log.reset_due.is_some() || log.hard_version > log.hard_written;
        let mut now_us = 0;
        while due(self) || self.durable < self.tail {
            now_us += 1;
            if due(self) {
                self.pump_from(None, 0, now_us);
                self.flush(now_us);
            }
            self.device.wait();
            self.poll(now_us);
            if let Some((_, error)) = self.failed_since {
                return Err(error.into());
            }
            if let Some(failed) = self.grow_failed {
                return Err(failed.error.into());
            }
        }
        Ok(())
    }

    fn empty(device: Box<dyn FlashDevice>, block: FlashSuperblock, spec: FlashSpec) -> FlashLog {
        let segment = block.segment_bytes as usize;
        // What lies before the log's pages in the file has been written, or will be in one go with
        // the first growth.
        let grown = device.grown_bytes().saturating_sub(segment as u64) / PAGE_BYTES as u64;
        let segment_pages = (segment / PAGE_BYTES) as u64;
        let buffers = Buffers::new(spec.outstanding.max(2) + 2, segment);
        let mut device = device;
        device.register(&buffers);
        FlashLog {
            buffers,
            life: 0,
            read_only: false,
            first: 0,
            first_durable: 0,
            first_published: 0,
            first_proven: 0,
            durable: 0,
            tail: 0,
            records_end: 0,
            vouched: 0,
            grown: grown.min(block.pages) / segment_pages * segment_pages,
            growing: false,
            grow_due_us: 0,
            grow_failed: None,
            writes: VecDeque::new(),
            filling: None,
            current: None,
            page_start_indexes: VecDeque::new(),
            next_begin: 1,
            terms: Terms::after(0, 0),
            base: 0,
            ends: VecDeque::new(),
            durable_index: 0,
            hard_state: HardState::default(),
            hard_version: 0,
            hard_written: 0,
            hard_told: (0, 0),
            hard_owed: false,
            hard_states: VecDeque::new(),
            durable_commit: 0,
            durable_hard: 0,
            hard_due: false,
            reset_due: None,
            reset_page: None,
            mark_due: false,
            idle_since_us: 0,
            polled_us: 0,
            blocked: None,
            failed_since: None,
            next_token: 0,
            fetches: Fetches::new(segment),
            done: Vec::new(),
            stats: FlashStats::default(),
            device,
            block,
            spec,
        }
    }

    /// Opens an area after a restart. Blocks while it is read. Nothing is written; what was made
    /// without its space gets it, if there is room.
    ///
    /// # Errors
    /// [`FlashError::Corrupt`] when something that was durable does not read back; whatever says
    /// that the area is not this replica's.
    pub fn open(
        device: Box<dyn FlashDevice>,
        spec: FlashSpec,
        who: &FlashIdentity,
    ) -> Result<(FlashLog, FlashRecovered), FlashError> {
        spec.check(device.bytes())?;
        let (mut log, recovered) = FlashLog::open_checked(device, spec, |block| {
            let found = FlashIdentity {
                cluster: block.cluster,
                replica: block.replica,
                incarnation: block.incarnation,
            };
            if found != *who {
                let expected = *who;
                return Err(FlashError::Foreign { found, expected });
            }
            Ok(())
        })?;
        let bytes = log.block.area_bytes();
        set_aside(&mut *log.device, bytes)?;
        Ok((log, recovered))
    }

    /// Opens whatever area is there, for inspection. Nothing is written, not by [`FlashLog::poll`]
    /// either.
    ///
    /// # Errors
    /// As [`FlashLog::open`].
    pub fn inspect(device: Box<dyn FlashDevice>) -> Result<(FlashLog, FlashRecovered), FlashError> {
        let mut device = device;
        let block = superblock(&mut *device)?;
        let spec = FlashSpec {
            segment_bytes: block.segment_bytes,
            ..FlashSpec::new(block.log, block.mode, block.area_bytes())
        };
        let (mut log, recovered) = FlashLog::open_checked(device, spec, |_| Ok(()))?;
        log.read_only = true;
        Ok((log, recovered))
    }

    /// Whose area it is, by its superblock alone.
    ///
    /// # Errors
    /// An area without one, a device that fails.
    pub fn owner(mut device: Box<dyn FlashDevice>) -> Result<FlashIdentity, FlashError> {
        let block = superblock(&mut *device)?;
        Ok(FlashIdentity {
            cluster: block.cluster,
            replica: block.replica,
            incarnation: block.incarnation,
        })
    }

    fn open_checked(
        mut device: Box<dyn FlashDevice>,
        spec: FlashSpec,
        check: impl FnOnce(&FlashSuperblock) -> Result<(), FlashError>,
    ) -> Result<(FlashLog, FlashRecovered), FlashError> {
        let block = superblock(&mut *device)?;
        check(&block)?;
        let asked = (spec.log, spec.mode, spec.segment_bytes, spec.pages());
        let made = (block.log, block.mode, block.segment_bytes, block.pages);
        if asked != made || block.area_bytes() > device.bytes() {
            return Err(FlashError::WrongShape(Box::new(block)));
        }
        let mut log = FlashLog::empty(device, block, spec);
        let (survey, unreadable) = log.survey()?;
        let beyond = log.find(&survey, &unreadable)?;
        log.scan_pages(&survey)?;
        let recovered = FlashRecovered {
            first: log.terms.first(),
            last: log.terms.next() - 1,
            pages: log.tail - log.first,
            beyond,
        };
        Ok((log, recovered))
    }

    /// Reads all pages and keeps what matters of those that are whole and in their place.
    fn survey(&mut self) -> Result<(AreaScan, Unreadable), FlashError> {
        let segment = self.segment_pages();
        let mut survey = AreaScan::new(self.block, self.grown);
        let unreadable = self.read_segments(0..self.grown / segment, |bytes| {
            for page in bytes.chunks_exact(PAGE_BYTES) {
                survey.take(page);
            }
        })?;
        let mut again = 0;
        while survey.may_wrap() {
            let page = survey.next();
            let mut alike = true;
            self.read_segments(again..again + 1, |bytes| {
                for page in bytes.chunks_exact(PAGE_BYTES) {
                    alike &= !survey.may_wrap() || survey.reread_page(page);
                }
            })?;
            if !alike {
                let what = "it reads differently the second time";
                return Err(FlashError::Corrupt { page, what });
            }
            again += 1;
        }
        Ok((survey, unreadable))
    }

    /// Finds where the log begins and ends. Answers how many whole pages lie behind its end.
    fn find(&mut self, survey: &AreaScan, unreadable: &Unreadable) -> Result<u64, FlashError> {
        let pages = self.block.pages;
        let (first, durable) = (survey.first, survey.durable);
        let mut tail = first;
        let mut previous = 0;
        while tail < first + pages
            && let Some(life) = survey.life_of(tail)
        {
            // Left over from before a crash: the page before it was written by a later life.
            if life < previous {
                break;
            }
            previous = life;
            tail += 1;
        }
        // Where the log ends or seems to, a page that cannot be read may be of the log; elsewhere
        // it does not matter.
        if let Some(error) = unreadable.get(&(tail % pages)) {
            return Err((*error).into());
        }
        if tail < durable && !planted::has(Bug::FlashGapIsEnd) {
            let what = "it was durable, and is not there";
            return Err(FlashError::Corrupt { page: tail, what });
        }
        if tail == first && (first > 0 || self.block.mode == FlashMode::Only) {
            let what = "the log's first page is not there";
            return Err(FlashError::Corrupt { page: tail, what });
        }
        let beyond = survey.behind(tail);
        (self.first, self.first_published) = (first, first);
        // A page behind the log's end may have told where the log begins, and is written over with
        // the next pages: until one of those tells so durably, what the log's own pages still count
        // on stays.
        self.first_durable = survey.first_published(first, tail);
        self.mark_due = self.first_durable < first;
        (self.tail, self.durable) = (tail, tail);
        (self.records_end, self.vouched) = (survey.records_end(first, tail), durable);
        self.life = survey.life.checked_add(1).ok_or(FlashError::Damaged)?;
        Ok(beyond)
    }

    /// Goes through the log's pages: which entries begin where, of which terms, and the hard state.
    fn scan_pages(&mut self, survey: &AreaScan) -> Result<(), FlashError> {
        let (first, tail) = (self.first, self.tail);
        let mut walker = Walker::default();
        for page in first..tail {
            self.page_start_indexes.push_back(self.next_begin);
            for fact in survey.facts(page) {
                self.scan_fact(&mut walker, survey, page, fact)
                    .map_err(|what| FlashError::Corrupt { page, what })?;
            }
        }
        if self.block.mode == FlashMode::Only && !walker.hard {
            let (page, what) = (first, "no hard state is there");
            return Err(FlashError::Corrupt { page, what });
        }
        walker.give_up(self);
        self.settle_ends();
        self.durable_index = self.terms.next() - 1;
        let state = &self.hard_state;
        (self.hard_told, self.durable_commit) = ((state.term, state.vote), state.commit);
        (self.hard_written, self.hard_due) =
            (self.hard_version, self.block.mode == FlashMode::Only);
        Ok(())
    }

    /// Takes the next fact of a page. An object that began before the log's first page is not of
    /// the log.
    fn scan_fact(
        &mut self,
        walker: &mut Walker,
        survey: &AreaScan,
        page: u64,
        fact: PageState,
    ) -> Result<(), &'static str> {
        let ours = |began: u64| began >= self.first;
        match fact {
            PageState::Run { index, term, count } => {
                for index in index..index + u64::from(count) {
                    self.scan_begin(walker, index, term, term)?;
                    walker.pending = None;
                    self.note_end(page, index, term);
                }
            }
            PageState::Begun {
                index,
                term,
                prev_term,
            } => self.scan_begin(walker, index, term, prev_term)?,
            PageState::Ended { index, term, began } if ours(began) => {
                walker.pending = None;
                self.note_end(page, index, term);
            }
            PageState::HardState { number, began } if ours(began) => {
                walker.give_up(self);
                (walker.hard, self.durable_hard) = (true, began);
                let state = survey.hard_state(number);
                self.hard_state = state.ok_or("a hard state that was not noted")?.clone();
            }
            PageState::Reset { index, term, began } if ours(began) => {
                walker.give_up(self);
                (walker.anchored, walker.reset) = (true, true);
                self.note_reset(index, term);
                self.reset_page = Some(page);
            }
            PageState::MalformedPage { what, began } if ours(began) => return Err(what),
            _ => {}
        }
        Ok(())
    }

    fn scan_begin(
        &mut self,
        walker: &mut Walker,
        index: u64,
        term: u64,
        prev_term: u64,
    ) -> Result<(), &'static str> {
        walker.give_up(self);
        let before = index.checked_sub(1).ok_or("an entry with index 0")?;
        if !walker.anchored || (!walker.reset && before < self.base) {
            // The first of all: what stands before it is known from it. Those that it replaces may
            // come first.
            self.terms = Terms::after(before, prev_term);
            (self.next_begin, self.base) = (index, before);
            self.ends.clear();
        }
        walker.anchored = true;
        if index > self.terms.next() {
            return Err("an entry is missing before this one");
        }
        if index <= self.base || index < self.terms.first() {
            return Err("an entry from before the log's beginning");
        }
        if self.terms.get(before) != Some(prev_term) || term < prev_term {
            return Err("an entry that does not follow its predecessor");
        }
        walker.pending = Some(Pending {
            pages: self.page_start_indexes.len(),
            changed: (0..self.page_start_indexes.len())
                .rev()
                .map(|place| (place, self.page_start_indexes[place]))
                .take_while(|(_, low)| *low > index)
                .collect(),
            next_begin: self.next_begin,
        });
        self.note_begin(index);
        Ok(())
    }
}

/// Has an area's space set aside, so that a disk that others fill does not stop the log. One that
/// was there before is used as it is if there is no room.
fn set_aside(device: &mut dyn FlashDevice, bytes: u64) -> Result<(), FlashError> {
    match device.reserve(bytes) {
        Ok(()) => Ok(()),
        Err(DeviceError::NoSpace) if device.grown_bytes() == 0 => Err(FlashError::NoRoom { bytes }),
        Err(error) => {
            let device = device.describe();
            tracing::warn!(%error, device, bytes, "the flash area does not get all of its space: should the disk fill, the log waits");
            Ok(())
        }
    }
}

#[derive(Default)]
struct Walker {
    /// An entry or a reset has been met.
    anchored: bool,
    reset: bool,
    /// A hard state has been met.
    hard: bool,
    pending: Option<Pending>,
}

/// An entry whose end has not been met: until then it replaces nothing.
struct Pending {
    /// Pages known when it began, and what was known of those that it changed.
    pages: usize,
    changed: Vec<(usize, u64)>,
    next_begin: u64,
}

impl Walker {
    /// The pending entry never ended: what it would have replaced counts.
    fn give_up(&mut self, log: &mut FlashLog) {
        let Some(pending) = self.pending.take() else {
            return;
        };
        for (place, low) in pending.changed {
            log.page_start_indexes[place] = low;
        }
        for low in log.page_start_indexes.iter_mut().skip(pending.pages) {
            *low = pending.next_begin;
        }
        log.next_begin = pending.next_begin;
    }
}

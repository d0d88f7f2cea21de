//! What memory may hold after a crash.
//!
//! The tracker sees every store, flush and fence. A store that was not flushed and fenced may be
//! lost, or may have reached memory on its own: each aligned 8-byte word of such a line holds,
//! independently, any value that it had between what is known durable and the newest store. That is
//! weaker than what CPUs do, so code that survives here survives there, with one exception: on a
//! real CPU a fence waits for its own thread's flushes only, while here it waits for everybody's.

mod line;

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use self::line::Line;
use crate::flush::LINE_BYTES;
use crate::memory::{Memory, PAGE_BYTES};

/// Bytes that reach memory whole.
pub const WORD_BYTES: u64 = 8;
const WORDS: usize = LINE_BYTES / WORD_BYTES as usize;
/// No open line.
const NONE: u32 = u32::MAX;

#[derive(Default)]
struct State {
    durable: Vec<u8>,
    /// Per line of memory: its place in `open`, or [`NONE`].
    place: Vec<u32>,
    open: Vec<Line>,
    /// Lines that the next fence writes back.
    flushing: Vec<u32>,
    /// Lines that became durable last, newest first.
    recent: VecDeque<u32>,
    /// Per page of memory: whether it may hold something else than is durable. All others need not
    /// be checked when the memory is handed to its next user.
    touched: Vec<bool>,
    events: u64,
    stop_after: Option<u64>,
    /// Fences of at least so many lines, of which so many still take effect before the power fails
    /// right before one.
    fences_left: Option<(usize, u64)>,
    in_use: bool,
}

/// How many of the lines that became durable last are remembered.
const RECENT: usize = 64;

impl State {
    /// Counts an event; `false` when the simulated machine has crashed already.
    fn event(&mut self) -> bool {
        self.events += 1;
        self.stop_after.is_none_or(|stop| self.events <= stop)
    }

    fn touch(&mut self, offset: u64, len: usize) {
        let first = offset as usize / PAGE_BYTES;
        let end = (offset as usize + len).div_ceil(PAGE_BYTES);
        self.touched[first..end].fill(true);
    }

    fn open_line(&mut self, number: u32) -> &mut Line {
        if self.place[number as usize] == NONE {
            self.place[number as usize] = self.open.len() as u32;
            let mut newest = [0; LINE_BYTES];
            let at = number as usize * LINE_BYTES;
            let end = self.durable.len().min(at + LINE_BYTES);
            newest[..end - at].copy_from_slice(&self.durable[at..end]);
            self.open.push(Line::new(number, newest));
        }
        &mut self.open[self.place[number as usize] as usize]
    }

    /// A line that is not open is stored whole.
    fn open_whole(&mut self, number: u32, newest: &[u8; LINE_BYTES]) {
        let at = number as usize * LINE_BYTES;
        let durable = &self.durable[at..at + LINE_BYTES];
        if let Some(line) = Line::whole(number, durable, newest) {
            self.place[number as usize] = self.open.len() as u32;
            self.open.push(line);
        }
    }

    /// Forgets a line that has no open word any more.
    fn close(&mut self, number: u32) {
        let place = self.place[number as usize];
        self.place[number as usize] = NONE;
        self.open.swap_remove(place as usize);
        if let Some(moved) = self.open.get(place as usize) {
            self.place[moved.number as usize] = place;
        }
    }

    /// Where a crash leaves something else than the durable value, and what, each open word decided
    /// by `choose(ways)`.
    fn chosen(&self, choose: &mut dyn FnMut(usize) -> usize) -> Vec<(usize, Vec<u8>)> {
        let mut kept = Vec::new();
        for (at, values) in self.words() {
            let chosen = choose(values.len() + 1);
            if chosen > 0 {
                kept.push((at as usize, values[chosen - 1].to_vec()));
            }
        }
        kept
    }

    /// The values each open word may hold besides the durable one, by offset, oldest first.
    fn words(&self) -> Vec<(u64, Vec<[u8; 8]>)> {
        let mut lines: Vec<&Line> = self.open.iter().collect();
        lines.sort_unstable_by_key(|line| line.number);
        let mut words = Vec::new();
        for line in lines {
            for word in 0..WORDS as u8 {
                let values = line.values(word);
                if !values.is_empty() {
                    let at = u64::from(line.number) * LINE_BYTES as u64;
                    words.push((at + u64::from(word) * WORD_BYTES, values));
                }
            }
        }
        words
    }
}

/// Per page whether something else than zeros is there.
pub(crate) fn used_pages(image: &[u8]) -> Vec<bool> {
    const ZEROS: [u8; PAGE_BYTES] = [0; PAGE_BYTES];
    let pages = image.chunks(PAGE_BYTES);
    pages.map(|page| page != &ZEROS[..page.len()]).collect()
}

/// Copies page by page what is not zero: fresh zeroed memory costs nothing until it is touched.
pub(crate) fn sparse_copy(image: &[u8]) -> Vec<u8> {
    let mut copy = vec![0; image.len()];
    let pages = copy.chunks_mut(PAGE_BYTES).zip(image.chunks(PAGE_BYTES));
    for ((place, page), _) in pages.zip(used_pages(image)).filter(|(_, used)| *used) {
        place.copy_from_slice(page);
    }
    copy
}

/// The side of the memory's user; there is one at a time.
pub(crate) struct Tracker(Arc<Mutex<State>>);

impl Drop for Tracker {
    fn drop(&mut self) {
        lock(&self.0).in_use = false;
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Tracker {
    /// Over memory that holds `durable` already.
    pub(crate) fn new(durable: Vec<u8>, memory: Arc<Memory>) -> (Tracker, CrashSim) {
        let state = Arc::new(Mutex::new(State {
            place: vec![NONE; durable.len().div_ceil(LINE_BYTES)],
            touched: vec![false; durable.len().div_ceil(PAGE_BYTES)],
            durable,
            in_use: true,
            ..State::default()
        }));
        (Tracker(Arc::clone(&state)), CrashSim { state, memory })
    }

    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) {
        self.store(offset, bytes, false);
    }

    /// A store whose intermediate values do not matter: the filling of a buffer.
    pub(crate) fn fill(&self, offset: u64, bytes: &[u8]) {
        self.store(offset, bytes, true);
    }

    /// Somebody may write there without saying so.
    pub(crate) fn touch(&self, offset: u64, len: u64) {
        lock(&self.0).touch(offset, len as usize);
    }

    fn store(&self, offset: u64, bytes: &[u8], last_only: bool) {
        let mut state = lock(&self.0);
        // Memory holds it, even if it comes after the crash.
        state.touch(offset, bytes.len());
        if bytes.is_empty() || !state.event() {
            return;
        }
        let (mut at, mut rest) = (offset as usize, bytes);
        while !rest.is_empty() {
            let from = at % LINE_BYTES;
            let (part, after) = rest.split_at(rest.len().min(LINE_BYTES - from));
            let line = (at / LINE_BYTES) as u32;
            let known = state.place[line as usize] != NONE;
            // Most stores of what is there already are seen without opening the line.
            if known {
                state.open_line(line).store(from, part, last_only);
            } else if let Ok(whole) = <&[u8; LINE_BYTES]>::try_from(part) {
                state.open_whole(line, whole);
            } else if state.durable[at..at + part.len()] != *part {
                state.open_line(line).store(from, part, last_only);
            }
            (at, rest) = (at + part.len(), after);
        }
    }

    /// A flush of whole lines.
    pub(crate) fn flush_lines(&self, offset: u64, len: u64) {
        self.flush(offset, len, LINE_BYTES as u64);
    }

    /// The write-back that comes with a streaming store: only what was stored.
    pub(crate) fn flush_words(&self, offset: u64, len: u64) {
        self.flush(offset, len, WORD_BYTES);
    }

    fn flush(&self, offset: u64, len: u64, unit: u64) {
        let mut state = lock(&self.0);
        if len == 0 || !state.event() {
            return;
        }
        let first = offset & !(unit - 1);
        let end = (offset + len).next_multiple_of(unit);
        for number in first / LINE_BYTES as u64..end.div_ceil(LINE_BYTES as u64) {
            let State {
                place,
                open,
                flushing,
                ..
            } = &mut *state;
            let Some(line) = open.get_mut(place[number as usize] as usize) else {
                continue;
            };
            let at = number * LINE_BYTES as u64;
            let from = first.saturating_sub(at) / WORD_BYTES;
            let until = (end - at).div_ceil(WORD_BYTES).min(WORDS as u64);
            line.flush(((1u16 << until) - (1 << from)) as u8);
            if !std::mem::replace(&mut line.flushing, true) {
                flushing.push(number as u32);
            }
        }
    }

    pub(crate) fn fence(&self) {
        let mut state = lock(&self.0);
        let flushing = state.flushing.len();
        match &mut state.fences_left {
            Some((lines, 0)) if flushing >= *lines => {
                state.fences_left = None;
                state.stop_after = Some(state.events);
            }
            Some((lines, left)) if flushing >= *lines => *left -= 1,
            _ => {}
        }
        if !state.event() {
            return;
        }
        for number in std::mem::take(&mut state.flushing) {
            let State {
                durable,
                place,
                open,
                recent,
                ..
            } = &mut *state;
            if recent.front() != Some(&number) {
                recent.truncate(RECENT - 1);
                recent.push_front(number);
            }
            let line = &mut open[place[number as usize] as usize];
            line.flushing = false;
            let at = number as usize * LINE_BYTES;
            let end = durable.len().min(at + LINE_BYTES);
            if line.fence(&mut durable[at..end]) {
                state.close(number);
            }
        }
    }
}

/// What a crash makes of stores that were not flushed and fenced.
#[derive(Clone, Copy, Debug)]
pub enum Outcome {
    /// All have reached memory: the process died, the machine did not.
    Newest,
    /// Each aligned word on its own, decided by a seed.
    Words(u64),
    /// Each line whole, decided by a seed: where much must have happened for something to show,
    /// word by word it hardly ever does.
    Lines(u64),
}

/// The tester's side: where to crash, and what memory then holds. Clones watch the same memory.
#[derive(Clone)]
pub struct CrashSim {
    state: Arc<Mutex<State>>,
    memory: Arc<Memory>,
}

impl CrashSim {
    /// Stores, flushes and fences so far.
    pub fn events(&self) -> u64 {
        lock(&self.state).events
    }

    /// Crashes after the given number of events: later stores, flushes and fences do not reach
    /// memory.
    pub fn crash_after(&self, events: u64) {
        lock(&self.state).stop_after = Some(events);
    }

    /// Crashes right before a fence, when most is open; only fences that wait for at least `lines`
    /// lines count, and `fences` of them still take effect.
    pub fn crash_before_fence(&self, lines: usize, fences: u64) {
        lock(&self.state).fences_left = Some((lines, fences));
    }

    /// Whether something was stored, flushed or fenced after the crash set by
    /// [`CrashSim::crash_after`] or
    /// [`CrashSim::crash_before_fence`].
    pub fn has_crashed(&self) -> bool {
        let state = lock(&self.state);
        state.stop_after.is_some_and(|stop| state.events > stop)
    }

    /// The memory if every store has reached it: what a dead process leaves on a living machine.
    pub fn newest(&self) -> Vec<u8> {
        self.image(|ways| ways - 1)
    }

    /// Where the lines begin that became durable last, newest first.
    pub fn recent_lines(&self) -> Vec<u64> {
        let state = lock(&self.state);
        let lines = state
            .recent
            .iter()
            .map(|&line| u64::from(line) * LINE_BYTES as u64);
        lines.collect()
    }

    /// Words whose content after a crash is open, by offset, with the number of values each may
    /// hold.
    pub fn open_words(&self) -> Vec<(u64, usize)> {
        let words = lock(&self.state).words().into_iter();
        words.map(|(at, values)| (at, values.len() + 1)).collect()
    }

    /// In how many ways a crash now can end; saturates.
    pub fn outcomes(&self) -> u64 {
        lock(&self.state)
            .words()
            .iter()
            .fold(1u64, |ways, (_, values)| {
                ways.saturating_mul(values.len() as u64 + 1)
            })
    }

    /// The memory after a crash, each open word decided by `choose(ways)`, which answers less than
    /// `ways`: 0 is the durable value, `ways - 1` the newest.
    pub fn image(&self, mut choose: impl FnMut(usize) -> usize) -> Vec<u8> {
        let state = lock(&self.state);
        let mut image = sparse_copy(&state.durable);
        for (at, value) in state.chosen(&mut choose) {
            image[at..at + value.len()].copy_from_slice(&value);
        }
        image
    }

    /// The memory after a crash, decided by a seed.
    pub fn sampled(&self, seed: u64) -> Vec<u8> {
        let mut state = seed;
        self.image(|ways| (split_mix(&mut state) % ways as u64) as usize)
    }

    /// Crashes: what is open is decided as `outcome` says, and the memory waits for its next user,
    /// whom
    /// [`Region::after_crash`](crate::Region::after_crash) lets in.
    ///
    /// # Panics
    /// When the region is still in use: a user that outlives the crash would write on.
    pub fn crash(&self, outcome: Outcome) {
        let mut state = lock(&self.state);
        assert!(!state.in_use, "the memory is still in use");
        let kept: Vec<(usize, Vec<u8>)> = match outcome {
            Outcome::Newest => state.chosen(&mut |ways| ways - 1),
            Outcome::Words(mut seed) => {
                let mut choose = |ways| (split_mix(&mut seed) % ways as u64) as usize;
                state.chosen(&mut choose)
            }
            Outcome::Lines(mut seed) => {
                let open = state.open.iter();
                let kept = open.filter(|_| split_mix(&mut seed).is_multiple_of(2));
                kept.map(|line| (line.number as usize * LINE_BYTES, line.newest.to_vec()))
                    .collect()
            }
        };
        for (at, value) in kept {
            let end = state.durable.len().min(at + value.len());
            state.durable[at..end].copy_from_slice(&value[..end - at]);
        }
        for line in std::mem::take(&mut state.open) {
            state.place[line.number as usize] = NONE;
        }
        *state = State {
            durable: std::mem::take(&mut state.durable),
            place: std::mem::take(&mut state.place),
            touched: std::mem::take(&mut state.touched),
            ..State::default()
        };
    }

    /// Damages one byte of what is durable, unless it is zero. Returns whether it was not.
    ///
    /// # Panics
    /// When the memory is not as long.
    pub fn flip(&self, at: u64, mask: &mut dyn FnMut() -> u8) -> bool {
        let mut state = lock(&self.state);
        let byte = &mut state.durable[at as usize];
        let used = *byte != 0;
        if used {
            *byte ^= mask();
            state.touch(at, 1);
        }
        used
    }

    /// Length in bytes.
    #[allow(clippy::len_without_is_empty, reason = "memory is never empty")]
    pub fn len(&self) -> u64 {
        lock(&self.state).durable.len() as u64
    }

    /// A user for the memory as the crash has left it.
    pub(crate) fn next_user(&self) -> (Tracker, Arc<Memory>) {
        let mut state = lock(&self.state);
        assert!(!state.in_use, "the memory is still in use");
        assert!(state.open.is_empty(), "no crash has decided what it holds");
        state.in_use = true;
        // SAFETY: the region that used it is gone, and the next one comes of this call.
        unsafe { self.memory.assign(&state.durable, &state.touched) };
        state.touched.fill(false);
        (Tracker(Arc::clone(&self.state)), Arc::clone(&self.memory))
    }

    /// Every outcome, if there are at most `limit`.
    pub fn exhaustive(&self, limit: u64) -> Option<Vec<Vec<u8>>> {
        let outcomes = self.outcomes();
        (outcomes <= limit).then(|| {
            (0..outcomes)
                .map(|number| {
                    let mut rest = number;
                    self.image(|ways| {
                        let digit = rest % ways as u64;
                        rest /= ways as u64;
                        digit as usize
                    })
                })
                .collect()
        })
    }
}

impl fmt::Debug for CrashSim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = lock(&self.state);
        let (events, open) = (state.events, state.open.len());
        write!(f, "CrashSim({events} events, {open} open words)")
    }
}

fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = *state;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

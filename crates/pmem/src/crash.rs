//! What memory may hold after a crash.
//!
//! The tracker sees every store, flush and fence. A store that was not flushed and fenced may be lost, or may have
//! reached memory on its own: each aligned 8-byte word of such a line holds, independently, any value that
//! it had between what is known durable and the newest store. That is weaker than what CPUs do, so code that survives
//! here survives there, with one exception: on a real CPU a fence waits for its own thread's flushes only, while here it
//! waits for everybody's.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::flush::LINE_BYTES;

/// Bytes that reach memory whole.
pub const WORD_BYTES: u64 = 8;

#[derive(Default)]
struct State {
    durable: Vec<u8>,
    /// Per word: the values since the durable one, oldest first, with how many of them the last flush covers.
    open: BTreeMap<u64, Word>,
    events: u64,
    stop_after: Option<u64>,
}

#[derive(Default, Clone)]
struct Word {
    values: Vec<[u8; 8]>,
    flushed: usize,
}

impl State {
    /// Counts an event; `false` when the simulated machine has crashed already.
    fn event(&mut self) -> bool {
        self.events += 1;
        self.stop_after.is_none_or(|stop| self.events <= stop)
    }
}

pub(crate) struct Tracker(Arc<Mutex<State>>);

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Tracker {
    pub(crate) fn new(image: &[u8]) -> (Tracker, CrashSim) {
        let state = Arc::new(Mutex::new(State {
            durable: image.to_vec(),
            ..State::default()
        }));
        (Tracker(Arc::clone(&state)), CrashSim(state))
    }

    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) {
        let mut state = lock(&self.0);
        if bytes.is_empty() || !state.event() {
            return;
        }
        let end = offset + bytes.len() as u64;
        let mut word = offset & !(WORD_BYTES - 1);
        while word < end {
            let State { durable, open, .. } = &mut *state;
            let mut old = [0; 8];
            match open.get(&word).and_then(|history| history.values.last()) {
                Some(newest) => old = *newest,
                None => old.copy_from_slice(&durable[word as usize..word as usize + 8]),
            }
            let mut value = old;
            for at in word.max(offset)..(word + WORD_BYTES).min(end) {
                value[(at - word) as usize] = bytes[(at - offset) as usize];
            }
            // Storing what is there already opens no new outcome.
            if value != old {
                open.entry(word).or_default().values.push(value);
            }
            word += WORD_BYTES;
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
        for (_, word) in state.open.range_mut(first..end) {
            word.flushed = word.values.len();
        }
    }

    pub(crate) fn fence(&self) {
        let mut state = lock(&self.0);
        if !state.event() {
            return;
        }
        let State { durable, open, .. } = &mut *state;
        open.retain(|&at, word| {
            if word.flushed > 0 {
                let value = word.values[word.flushed - 1];
                durable[at as usize..at as usize + 8].copy_from_slice(&value);
                word.values.drain(..word.flushed);
                word.flushed = 0;
            }
            !word.values.is_empty()
        });
    }
}

/// The tester's side: where to crash, and what memory then holds.
pub struct CrashSim(Arc<Mutex<State>>);

impl CrashSim {
    /// Stores, flushes and fences so far.
    pub fn events(&self) -> u64 {
        lock(&self.0).events
    }

    /// Crashes after the given number of events: later stores, flushes and fences do not reach memory.
    pub fn crash_after(&self, events: u64) {
        lock(&self.0).stop_after = Some(events);
    }

    /// Words whose content after a crash is open, by offset, with the number of values each may hold.
    pub fn open_words(&self) -> Vec<(u64, usize)> {
        lock(&self.0)
            .open
            .iter()
            .map(|(&at, word)| (at, word.values.len() + 1))
            .collect()
    }

    /// In how many ways a crash now can end; saturates.
    pub fn outcomes(&self) -> u64 {
        lock(&self.0).open.values().fold(1u64, |ways, word| {
            ways.saturating_mul(word.values.len() as u64 + 1)
        })
    }

    /// The memory after a crash, each open word decided by `choose(ways)`, which answers less than `ways`: 0 is the
    /// durable value, `ways - 1` the newest.
    pub fn image(&self, mut choose: impl FnMut(usize) -> usize) -> Vec<u8> {
        let state = lock(&self.0);
        let mut image = state.durable.clone();
        for (&at, word) in &state.open {
            let chosen = choose(word.values.len() + 1);
            if chosen > 0 {
                image[at as usize..at as usize + 8].copy_from_slice(&word.values[chosen - 1]);
            }
        }
        image
    }

    /// The memory after a crash, decided by a seed.
    pub fn sampled(&self, seed: u64) -> Vec<u8> {
        let mut state = seed;
        self.image(|ways| (split_mix(&mut state) % ways as u64) as usize)
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
        let state = lock(&self.0);
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

//! The workers of a server share one remote log per backup: a local atomic gives the addresses
//! (rowan §6.1).
//!
//! A worker that fails between taking an address and writing leaves a hole, which scanners skip. A
//! segment is given back by the worker that ends the last write to it; the backup revokes its
//! registration before it counts as used, so a write that was given up cannot land later.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::build::SenderConfig;
use crate::control::{Grant, ToBackup};
use crate::frame::{Origin, block_bytes, encode_block};
use crate::links::{Link, Log};
use crate::protocol::{BackupId, ReplicationError};
use crate::rwrite::{count_blocks, cut_for};

/// Epochs remembered to tell the backup what became of them.
const MAX_SEEN: usize = 1024;

/// The remote logs of one server's workers: one value per server and term, cloned into every
/// worker's
/// [`SenderConfig::shared`](crate::SenderConfig::shared).
#[derive(Default)]
pub struct SharedLogs(Mutex<HashMap<BackupId, Arc<SharedLog>>>);

impl SharedLogs {
    fn log(&self, backup: BackupId) -> Arc<SharedLog> {
        let mut logs = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(logs.entry(backup).or_default())
    }
}

impl std::fmt::Debug for SharedLogs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SharedLogs")
    }
}

/// A segment that all workers write.
struct SharedSegment {
    grant: Grant,
    /// The local atomic: where the next block goes; beyond the segment's end once it is full.
    tail: AtomicU64,
    /// Reservations and writes in flight, and one more until the first that found no room: no
    /// worker finds any after that.
    writers: AtomicU64,
    /// Whether it is on its way back to the backup.
    told: AtomicBool,
}

impl SharedSegment {
    fn new(grant: Grant) -> SharedSegment {
        SharedSegment {
            grant,
            tail: AtomicU64::new(0),
            writers: AtomicU64::new(1),
            told: AtomicBool::new(false),
        }
    }
}

#[derive(Default)]
struct LogState {
    current: Option<Arc<SharedSegment>>,
    next: VecDeque<Grant>,
    /// Segments asked for by any worker and not granted yet.
    wanted: usize,
    /// Segments to be given back by whichever worker polls first.
    done: Vec<(u32, u64)>,
    /// The newest [`MAX_SEEN`].
    seen: VecDeque<Seen>,
}

/// What became of a segment.
#[derive(Clone, Copy)]
struct Seen {
    epoch: u64,
    /// `None` if its grant never came.
    seed: Option<u64>,
    given_back: bool,
}

impl LogState {
    fn note(&mut self, seen: Seen) {
        if self.seen.len() >= MAX_SEEN {
            self.seen.pop_front();
        }
        self.seen.push_back(seen);
    }
}

#[derive(Default)]
struct SharedLog {
    state: Mutex<LogState>,
    has_done: AtomicBool,
}

impl SharedLog {
    fn lock(&self) -> MutexGuard<'_, LogState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes an address for a block; `None` beyond the segment's end. Who has one leaves after its
    /// write.
    fn enter(&self, segment: &SharedSegment, len: u64) -> Option<u64> {
        segment.writers.fetch_add(1, Ordering::SeqCst);
        //= rowan §6.1
        let at = segment.tail.fetch_add(len, Ordering::SeqCst);
        let most = segment.grant.key.len;
        if at.checked_add(len).is_some_and(|end| end <= most) {
            return Some(at);
        }
        // The tail only grows: just one finds it within the segment and leaves it beyond.
        if at <= most {
            self.leave(segment);
        }
        self.leave(segment);
        None
    }

    /// Ends a reservation or a write. The last one out of a full segment gives it back; those that
    /// come later find no room, and may be last once more.
    fn leave(&self, segment: &SharedSegment) {
        let last = segment.writers.fetch_sub(1, Ordering::SeqCst) == 1;
        if last && !segment.told.swap(true, Ordering::SeqCst) {
            let Grant { segment, epoch, .. } = segment.grant;
            self.give_back(&mut self.lock(), segment, epoch);
        }
    }

    fn give_back(&self, state: &mut LogState, segment: u32, epoch: u64) {
        state.done.push((segment, epoch));
        if let Some(seen) = state.seen.iter_mut().find(|seen| seen.epoch == epoch) {
            seen.given_back = true;
        }
        self.has_done.store(true, Ordering::SeqCst);
    }

    fn granted(&self, grant: Grant) {
        let mut state = self.lock();
        // The same epoch under another seed is another memory's: the backup has lost the old one.
        let Grant { epoch, seed, .. } = grant;
        state
            .seen
            .retain(|seen| seen.epoch != epoch || seen.seed.is_none_or(|known| known == seed));
        if state.seen.iter().any(|seen| seen.epoch == epoch) {
            self.give_back(&mut state, grant.segment, epoch);
        } else {
            state.note(Seen {
                epoch,
                seed: Some(seed),
                given_back: false,
            });
            state.next.push_back(grant);
        }
    }

    /// The backup asks whether a segment is still wanted. One that is not known here was granted
    /// over a connection that ended, or to an earlier life of this server; should its grant come
    /// after all, it is not taken.
    fn asked(&self, segment: u32, epoch: u64) {
        let mut state = self.lock();
        let seen = state.seen.iter().find(|seen| seen.epoch == epoch);
        let (known, given_back) = (seen.is_some(), seen.is_none_or(|seen| seen.given_back));
        if given_back {
            if !known {
                state.note(Seen {
                    epoch,
                    seed: None,
                    given_back,
                });
            }
            self.give_back(&mut state, segment, epoch);
        }
    }

    /// Nothing more is placed in what this log has: a connection broke, and the backup may have
    /// forgotten the grants.
    fn seal(&self) {
        let mut state = self.lock();
        for grant in std::mem::take(&mut state.next) {
            self.give_back(&mut state, grant.segment, grant.epoch);
        }
        let current = state.current.take();
        drop(state);
        if let Some(segment) = current {
            // As a block that is too large for any place.
            let none = self.enter(&segment, segment.grant.key.len + 1);
            debug_assert!(none.is_none());
        }
    }
}

/// A block that found no place yet.
struct Waiting {
    item: u64,
    origin: Origin,
    /// Count and number.
    cut: (u16, u16),
    payload: Vec<u8>,
}

/// A worker's view of the shared log at one backup.
pub(crate) struct ShareLog {
    log: Arc<SharedLog>,
    ahead: usize,
    /// Asked for over this link and not granted yet.
    wanted: usize,
    segment: Option<Arc<SharedSegment>>,
    /// Segments with writes of this worker in flight, and how many.
    writing: Vec<(Arc<SharedSegment>, u64)>,
    waiting: VecDeque<Waiting>,
}

impl ShareLog {
    fn want(&mut self, link: &mut Link, state: &mut LogState) {
        let missing = self.ahead.saturating_sub(state.next.len() + state.wanted);
        // `ahead` is at most MAX_WANTED.
        if missing > 0 {
            self.wanted += missing;
            state.wanted += missing;
            let count = missing as u8;
            link.send(&ToBackup::Want { count, after: 0 });
        }
    }

    /// Takes the current segment, or the next one in place of a full one.
    fn switch(&mut self, link: &mut Link) -> bool {
        let log = Arc::clone(&self.log);
        let mut state = log.lock();
        let full = match (&state.current, &self.segment) {
            (Some(current), Some(mine)) => Arc::ptr_eq(current, mine),
            (current, _) => current.is_none(),
        };
        if full {
            let next = state.next.pop_front().map(SharedSegment::new);
            state.current = next.map(Arc::new);
            self.want(link, &mut state);
        }
        self.segment.clone_from(&state.current);
        self.segment.is_some()
    }

    /// Writes a block at its own address; `false` when there is no segment to have one in.
    fn place(
        &mut self,
        link: &mut Link,
        item: u64,
        origin: &Origin,
        cut: (u16, u16),
        payload: &[u8],
    ) -> bool {
        let len = block_bytes(payload.len()) as u64;
        loop {
            let Some(segment) = &self.segment else {
                if self.switch(link) {
                    continue;
                }
                return false;
            };
            let Some(at) = self.log.enter(segment, len) else {
                if self.switch(link) {
                    continue;
                }
                return false;
            };
            let grant = segment.grant;
            let place = self
                .writing
                .iter_mut()
                .find(|(writing, _)| writing.grant.epoch == grant.epoch);
            match place {
                Some((_, writes)) => *writes += 1,
                None => self.writing.push((Arc::clone(segment), 1)),
            }
            let mut bytes = link.buffer();
            encode_block(grant.seed, origin, cut, payload, &mut bytes);
            link.write(&grant, at, bytes, (item, item));
            if cut.1 + 1 == cut.0 {
                link.release(item);
            }
            return true;
        }
    }

    fn place_waiting(&mut self, link: &mut Link) {
        while let Some(block) = self.waiting.pop_front() {
            let Waiting {
                item,
                origin,
                cut,
                payload,
            } = &block;
            if !self.place(link, *item, origin, *cut, payload) {
                self.waiting.push_front(block);
                return;
            }
        }
    }
}

impl Log for ShareLog {
    const IN_ORDER: bool = false;

    fn new(config: &SenderConfig, backup: BackupId) -> ShareLog {
        ShareLog {
            log: config.shared.log(backup),
            ahead: usize::from(config.ahead_segments.clamp(1, crate::control::MAX_WANTED)),
            wanted: 0,
            segment: None,
            writing: Vec::new(),
            waiting: VecDeque::new(),
        }
    }

    fn opened(&mut self, link: &mut Link) {
        let log = Arc::clone(&self.log);
        self.want(link, &mut log.lock());
    }

    fn granted(&mut self, link: &mut Link, grant: Grant) {
        if self.wanted > 0 {
            self.wanted -= 1;
            let mut state = self.log.lock();
            state.wanted = state.wanted.saturating_sub(1);
        }
        self.log.granted(grant);
        self.place_waiting(link);
    }

    fn asked(&mut self, segment: u32, epoch: u64) {
        self.log.asked(segment, epoch);
    }

    fn room(&mut self, link: &mut Link, len: usize) -> Result<bool, ReplicationError> {
        if !self.waiting.is_empty() || (self.segment.is_none() && !self.switch(link)) {
            return Ok(false);
        }
        let cut = self.segment.as_ref();
        let cut = cut.and_then(|segment| cut_for(segment.grant.key.len));
        match cut {
            Some(cut) => count_blocks(&cut, len).map(|_| true),
            None => Ok(false),
        }
    }

    fn append(&mut self, link: &mut Link, item: u64, record: &[u8]) {
        let origin = link.next_origin();
        let cut = self.segment.as_ref();
        let Some(cut) = cut.and_then(|segment| cut_for(segment.grant.key.len)) else {
            return;
        };
        let count = cut.count(record.len()) as u16;
        for (payload, number) in cut.parts(record).zip(0u16..) {
            let cut = (count, number);
            if !self.waiting.is_empty() || !self.place(link, item, &origin, cut, payload) {
                self.waiting.push_back(Waiting {
                    item,
                    origin,
                    cut,
                    payload: payload.to_vec(),
                });
            }
        }
    }

    fn written(&mut self, _link: &mut Link, epoch: u64) {
        let mut writing = self.writing.iter();
        let Some(place) = writing.position(|(segment, _)| segment.grant.epoch == epoch) else {
            return;
        };
        self.writing[place].1 -= 1;
        self.log.leave(&self.writing[place].0);
        if self.writing[place].1 == 0 {
            self.writing.swap_remove(place);
        }
    }

    fn tick(&mut self, link: &mut Link) {
        if self.log.has_done.swap(false, Ordering::SeqCst) {
            let done = std::mem::take(&mut self.log.lock().done);
            for (segment, epoch) in done {
                link.send(&ToBackup::Done { segment, epoch });
            }
        }
        if !self.waiting.is_empty() {
            self.place_waiting(link);
        }
    }

    fn lost(&mut self) {
        for (segment, writes) in std::mem::take(&mut self.writing) {
            for _ in 0..writes {
                self.log.leave(&segment);
            }
        }
        self.segment = None;
        self.waiting.clear();
        let mut state = self.log.lock();
        state.wanted = state
            .wanted
            .saturating_sub(std::mem::take(&mut self.wanted));
        drop(state);
        self.log.seal();
    }
}

#[cfg(test)]
mod tests {
    use cyclone_fabric::{MemoryKey, Token};

    use super::*;

    const BLOCK: u64 = 64;

    /// Room for two blocks.
    fn segment() -> SharedSegment {
        let (id, token, len) = (1, Token(2), 2 * BLOCK);
        SharedSegment::new(Grant {
            segment: 5,
            epoch: 6,
            seed: 7,
            key: MemoryKey { id, token, len },
            tail: None,
        })
    }

    fn given_back(log: &SharedLog) -> usize {
        log.lock().done.len()
    }

    #[test]
    fn a_full_segment_is_given_back_with_its_last_write() {
        let (log, segment) = (SharedLog::default(), segment());
        assert_eq!(log.enter(&segment, BLOCK), Some(0));
        log.leave(&segment);
        assert_eq!(log.enter(&segment, BLOCK), Some(BLOCK));
        // Full to the last byte, which no worker knows yet.
        assert_eq!(log.enter(&segment, BLOCK), None);
        assert_eq!(log.enter(&segment, BLOCK), None);
        assert_eq!(given_back(&log), 0);
        log.leave(&segment);
        assert_eq!(given_back(&log), 1);
        assert_eq!(log.enter(&segment, BLOCK), None);
        assert_eq!(given_back(&log), 1);
    }

    #[test]
    fn a_sealed_segment_is_given_back_with_its_last_write() {
        let (log, segment) = (SharedLog::default(), Arc::new(segment()));
        log.lock().current = Some(Arc::clone(&segment));
        assert_eq!(log.enter(&segment, BLOCK), Some(0));
        log.seal();
        assert_eq!(log.enter(&segment, BLOCK), None);
        assert_eq!(given_back(&log), 0);
        log.leave(&segment);
        assert_eq!(given_back(&log), 1);
    }

    /// Takes every place that is left, then ends the writes; returns whether none was too late.
    fn fill(log: &SharedLog, segment: &SharedSegment) -> bool {
        let mut writes = 0;
        while log.enter(segment, BLOCK).is_some() {
            writes += 1;
        }
        let mut is_ours = true;
        for _ in 0..writes {
            is_ours &= !segment.told.load(Ordering::SeqCst);
            log.leave(segment);
        }
        is_ours
    }

    /// One worker's only write ends while the other takes the last place and then finds the segment
    /// full.
    #[test]
    fn no_segment_is_given_back_while_another_worker_writes() {
        let all: Vec<_> = (0..200_000)
            .map(|_| (SharedLog::default(), segment(), AtomicU64::new(0)))
            .collect();
        let work = |leaves_first: bool| {
            let filled = all.iter().filter(|(log, segment, there)| {
                there.fetch_add(1, Ordering::SeqCst);
                let mut turns = 0;
                while there.load(Ordering::SeqCst) < 2 {
                    // At the same time if there are two processors, without much waiting if there
                    // are not.
                    turns += 1;
                    match turns % 1000 {
                        0 => std::thread::yield_now(),
                        _ => std::hint::spin_loop(),
                    }
                }
                if leaves_first && log.enter(segment, BLOCK).is_some() {
                    log.leave(segment);
                }
                fill(log, segment)
            });
            filled.count()
        };
        let filled = std::thread::scope(|scope| {
            let other = scope.spawn(|| work(true));
            (work(false), other.join().expect("it does not panic"))
        });
        assert_eq!(filled, (all.len(), all.len()), "given back too early");
        assert!(all.iter().all(|(log, ..)| given_back(log) == 1));
    }
}

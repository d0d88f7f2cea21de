//! Segments for a server's own logs: asked for and given back by workers and cleaners, allocated
//! and moved by the control thread alone, because the segment table has one writer.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use cyclone_replication::Owner;

/// A segment given to a local log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Granted {
    /// Its number.
    pub segment: u32,
    /// What the checksums of its blocks are seeded with.
    pub seed: u64,
}

#[derive(Default)]
struct State {
    ready: Vec<(Owner, Granted)>,
    wanted: VecDeque<Owner>,
    full: VecDeque<u32>,
    committed: VecDeque<u32>,
}

/// What local logs and the control thread tell each other.
#[derive(Default)]
pub struct Space {
    state: Mutex<State>,
    has_news: AtomicBool,
    free: AtomicU32,
    is_full: AtomicBool,
}

/// What local logs have asked for and told since the last look.
#[derive(Default)]
pub struct SegmentRequests {
    /// Who wants a segment, in order.
    pub wanted: Vec<Owner>,
    /// Segments that have no room left.
    pub full: Vec<u32>,
    /// Segments all of whose entries are on every replica.
    pub committed: Vec<u32>,
}

impl Space {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a segment allocated for this owner, and sees to it that another one comes.
    pub fn take(&self, owner: Owner) -> Option<Granted> {
        let mut state = self.lock();
        if !state.wanted.contains(&owner) {
            state.wanted.push_back(owner);
            self.has_news.store(true, Ordering::SeqCst);
        }
        let at = state.ready.iter().position(|(of, _)| *of == owner)?;
        Some(state.ready.swap_remove(at).1)
    }

    /// A segment is full.
    pub fn seal(&self, segment: u32) {
        self.lock().full.push_back(segment);
        self.has_news.store(true, Ordering::SeqCst);
    }

    /// A full segment's entries are on every replica.
    pub fn commit(&self, segment: u32) {
        self.lock().committed.push_back(segment);
        self.has_news.store(true, Ordering::SeqCst);
    }

    /// The control thread's look.
    pub fn take_news(&self) -> Option<SegmentRequests> {
        if !self.has_news.swap(false, Ordering::SeqCst) {
            return None;
        }
        let mut state = self.lock();
        Some(SegmentRequests {
            wanted: state.wanted.drain(..).collect(),
            full: state.full.drain(..).collect(),
            committed: state.committed.drain(..).collect(),
        })
    }

    /// The control thread gives a segment.
    pub fn give(&self, owner: Owner, granted: Granted) {
        self.lock().ready.push((owner, granted));
    }

    /// The control thread could not give one: it stays wanted.
    pub fn still_wanted(&self, owner: Owner) {
        let mut state = self.lock();
        if !state.wanted.contains(&owner) {
            state.wanted.push_back(owner);
        }
        self.has_news.store(true, Ordering::SeqCst);
    }

    /// Whether a segment is ready for this owner.
    pub fn has_ready(&self, owner: Owner) -> bool {
        self.lock().ready.iter().any(|(of, _)| *of == owner)
    }

    /// The control thread reports the state.
    pub fn tell(&self, free: u32, is_full: bool) {
        self.free.store(free, Ordering::SeqCst);
        self.is_full.store(is_full, Ordering::SeqCst);
    }

    /// Free segments.
    pub fn free(&self) -> u32 {
        self.free.load(Ordering::SeqCst)
    }

    /// Whether new values are refused, here and at primaries whose backup this server is.
    pub fn is_full(&self) -> bool {
        self.is_full.load(Ordering::SeqCst)
    }
}

//! Scans that hold a snapshot: every page shows the moment of the first (cyclone §2, reads over
//! several logs). A view is taken behind a linearizable read of all logs, and what a gang writes is
//! in it as a whole or not at all.
//!
//! Views live in this process only. A cursor names its view in the bits above a place, so that one
//! whose view is gone gets an error, and never continues in another's: a view answers only for the
//! places that it has handed out last.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cyclone_wire::reply::{Failure, Reply};

use crate::kv::View;
use crate::machine::ApplyError;
use crate::queries::{self, QueryTime};

/// Views at once: each keeps what has been overwritten since from being removed.
pub(crate) const MAX_SNAPSHOTS: usize = 16;
/// How long a view waits for the next page, in µs.
const IDLE_US: u64 = 60_000_000;
/// How long it waits after the last page, for a client that has not got the answer and asks again.
const FINISHED_US: u64 = 2_000_000;
/// Bits of a cursor that name a place.
const PLACE_BITS: u32 = 48;
/// Names of views: the lower bits of a replica's number, a term and a count. Cursors so stay
/// positive as signed numbers too.
const REPLICAS: u64 = 1 << 3;
const TERMS: u64 = 1 << 5;
const COUNTS: u64 = 1 << 7;
const _: () = assert!(REPLICAS * TERMS * COUNTS == 1 << (63 - PLACE_BITS));

/// Whether a cursor belongs to a view.
pub(crate) fn has_snapshot_id(cursor: u64) -> bool {
    cursor >> PLACE_BITS != 0
}

/// What one scan holds.
struct HeldSnapshot {
    /// None after it was dropped.
    view: Option<Box<dyn View>>,
    /// The state's clock per log at that moment.
    clocks: Vec<u64>,
    /// Places that may be asked for: the last page again, or the next.
    applied_positions: [u64; 2],
}

struct Entry {
    held: Arc<Mutex<HeldSnapshot>>,
    used_us: u64,
    finished: bool,
}

/// The views of a store.
#[derive(Default)]
pub(crate) struct ScanSnapshots {
    snapshots: Mutex<BTreeMap<u64, Entry>>,
    replica: AtomicU64,
    begun: AtomicU64,
    now_us: AtomicU64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes a view: the logs' clocks, and what there is.
pub(crate) type Begin<'b> = dyn Fn() -> Result<(Vec<u64>, Box<dyn View>), ApplyError> + 'b;

/// One page: from a place on, as of this moment. `None`: a reply has no room for it.
pub(crate) type Page<'p> = dyn Fn(&dyn View, u64, &dyn Fn(u16) -> QueryTime) -> Result<Option<queries::Page>, ApplyError>
    + 'p;

impl ScanSnapshots {
    /// Answers a page. A cursor that names no view begins one. Blocks.
    ///
    /// # Errors
    /// What the view's scan says.
    pub(crate) fn page(
        &self,
        cursor: u64,
        term: u64,
        begin: &Begin<'_>,
        page: &Page<'_>,
    ) -> Result<Reply, ApplyError> {
        let is_new = cursor >> PLACE_BITS == 0;
        let (mut name, place) = (cursor >> PLACE_BITS, cursor & ((1 << PLACE_BITS) - 1));
        if name == 0 {
            match self.begin(term, place, begin)? {
                Some(begun) => name = begun,
                None => return Ok(Reply::Failed(Failure::TooManySnapshots)),
            }
        }
        let gone = Ok(Reply::Failed(Failure::SnapshotGone));
        let held = lock(&self.snapshots)
            .get(&name)
            .map(|entry| Arc::clone(&entry.held));
        let Some(held) = held else {
            return gone;
        };
        let mut held = lock(&held);
        if !held.applied_positions.contains(&place) {
            return gone;
        }
        let Some(view) = &held.view else {
            return gone;
        };
        let logs = held.clocks.len().max(1);
        //= cyclone §5
        let at = |slot: u16| {
            QueryTime::clock(
                held.clocks
                    .get(usize::from(slot) % logs)
                    .copied()
                    .unwrap_or(0),
            )
        };
        let Some((next, keys)) = page(&**view, place, &at)? else {
            drop(held);
            // No client knows its name.
            if is_new {
                lock(&self.snapshots).remove(&name);
            }
            return Ok(Reply::Failed(Failure::ReplyTooLong));
        };
        held.applied_positions = [place, if next == 0 { place } else { next }];
        drop(held);
        if let Some(entry) = lock(&self.snapshots).get_mut(&name) {
            entry.used_us = self.now_us.load(Ordering::Acquire);
            entry.finished = next == 0;
        }
        let cursor = if next == 0 {
            0
        } else {
            name << PLACE_BITS | next
        };
        Ok(Reply::Array(vec![
            Reply::Bytes(cursor.to_string().into_bytes()),
            Reply::Array(keys),
        ]))
    }

    /// Takes a view, unless there are too many.
    fn begin(&self, term: u64, place: u64, begin: &Begin<'_>) -> Result<Option<u64>, ApplyError> {
        // Locked while the view is taken: none may come from a state that is being replaced.
        let mut snapshots = lock(&self.snapshots);
        if snapshots.len() >= MAX_SNAPSHOTS {
            snapshots.retain(|_, entry| !entry.finished);
        }
        if snapshots.len() >= MAX_SNAPSHOTS {
            return Ok(None);
        }
        let name = loop {
            let replica = self.replica.load(Ordering::Acquire) % REPLICAS;
            let count = self.begun.fetch_add(1, Ordering::AcqRel) % COUNTS;
            let name = (replica * TERMS + term % TERMS) * COUNTS + count;
            if name != 0 && !snapshots.contains_key(&name) {
                break name;
            }
        };
        let (clocks, view) = begin()?;
        let held = HeldSnapshot {
            view: Some(view),
            clocks,
            applied_positions: [place; 2],
        };
        let entry = Entry {
            held: Arc::new(Mutex::new(held)),
            used_us: self.now_us.load(Ordering::Acquire),
            finished: false,
        };
        snapshots.insert(name, entry);
        Ok(Some(name))
    }

    /// Whose views these are.
    pub(crate) fn set_replica_id(&self, replica: u64) {
        self.replica.store(replica, Ordering::Release);
    }

    /// Drops views that clients no longer use. Does not wait.
    pub(crate) fn tick(&self, now_us: u64) {
        self.now_us.store(now_us, Ordering::Release);
        let Ok(mut snapshots) = self.snapshots.try_lock() else {
            return;
        };
        let late = |_: &u64, entry: &mut Entry| {
            let most = if entry.finished { FINISHED_US } else { IDLE_US };
            now_us.saturating_sub(entry.used_us) >= most
        };
        let gone: Vec<Arc<Mutex<HeldSnapshot>>> = snapshots
            .extract_if(.., late)
            .map(|(_, entry)| entry.held)
            .collect();
        let is_slow = |held: &Arc<Mutex<HeldSnapshot>>| {
            let held = held.try_lock();
            held.is_ok_and(|held| held.view.as_ref().is_some_and(|it| it.is_freed_slowly()))
        };
        let (slow, others): (Vec<_>, Vec<_>) = gone.into_iter().partition(is_slow);
        // Before the lock goes: who replaces the state counts on it that no view is left.
        drop(others);
        drop(snapshots);
        if !slow.is_empty() {
            let thread = std::thread::Builder::new().name("views".to_owned());
            // Where there is no thread to be had, they were dropped with the closure, here.
            let _ = thread.spawn(move || drop(slow));
        }
    }

    /// Lets all views go, waits for pages in progress, and lets none begin while `replace` replaces
    /// the state.
    pub(crate) fn without<T>(&self, replace: impl FnOnce() -> T) -> T {
        let mut snapshots = lock(&self.snapshots);
        for entry in std::mem::take(&mut *snapshots).into_values() {
            lock(&entry.held).view = None;
        }
        replace()
    }

    /// How many there are, finished ones left out.
    pub(crate) fn count(&self) -> usize {
        let snapshots = self.snapshots.try_lock();
        snapshots.map_or(0, |snapshots| {
            snapshots.values().filter(|entry| !entry.finished).count()
        })
    }
}

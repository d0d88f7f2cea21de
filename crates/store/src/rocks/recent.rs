//! What has been written and is not in RocksDB yet (docs/adr/0051): one table that takes changes, and full ones that a thread hands
//! over, each as one atomic batch, in order. So RocksDB always holds a prefix of what was written.

use std::collections::VecDeque;
use std::sync::{
    Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
};
use std::thread;
use std::time::{Duration, Instant};

use super::pace::Pace;
use super::table::{Frozen, Table};
use crate::kv::Change;
use crate::machine::{ApplyError, Mode};

/// Tables that may wait for the thread; with one more, writers do.
const MOST_FROZEN: u64 = 8;
/// With as many, those who look at a moment wait before they freeze another, however little is in it.
const MOST_SMALL: u64 = 16;

/// While the disk is full, who waits for the thread is told so after this time, and it tries again after as much.
pub(super) const FULL_PATIENCE: Duration = Duration::from_millis(200);
/// A thread that has handed nothing over for so long hangs in RocksDB: it waits there for a compaction that has no room.
const STUCK: Duration = Duration::from_secs(30);
/// The same when all is to end.
const END_PATIENCE: Duration = Duration::from_secs(5);

/// The tables.
pub(super) struct Tables {
    active: Table,
    /// Oldest first.
    frozen: VecDeque<Arc<Frozen>>,
    /// Memory to be used again.
    spare: Option<Table>,
}

impl Tables {
    /// The newest change of a key, as in [`Table::get`].
    pub(super) fn get(&self, key: &[u8]) -> Option<Option<&[u8]>> {
        self.active
            .get(key)
            .or_else(|| self.frozen.iter().rev().find_map(|table| table.get(key)))
    }
}

/// How far the thread is.
struct Progress {
    /// Tables frozen so far, and of those in RocksDB.
    frozen: u64,
    stored: u64,
    pace: Pace,
    failed: Option<String>,
    /// The disk is full: why the thread tries the same table again and again.
    full: Option<String>,
    stopping: bool,
}

impl Progress {
    /// Tables that wait for the thread, or that it is handing over.
    fn waiting(&self) -> u64 {
        self.frozen - self.stored
    }

    /// A part of a table is written.
    fn took(&mut self, part: f64) {
        self.pace.took(part, self.waiting(), Instant::now());
    }
}

/// Locks are taken in the order of the fields; the database's stands between the first and the second, and is not held while waiting.
pub(super) struct Recent {
    writers: Mutex<()>,
    tables: RwLock<Tables>,
    progress: Mutex<Progress>,
    changed: Condvar,
    /// Bytes after which a table is full.
    limit: usize,
}

/// Nobody else writes meanwhile.
pub(super) type Writing<'a> = MutexGuard<'a, ()>;

impl Recent {
    pub(super) fn new(limit: usize) -> Recent {
        Recent {
            writers: Mutex::new(()),
            tables: RwLock::new(Tables {
                active: Table::new(limit, 0),
                frozen: VecDeque::new(),
                spare: None,
            }),
            progress: Mutex::new(Progress {
                frozen: 0,
                stored: 0,
                pace: Pace::new(),
                failed: None,
                full: None,
                stopping: false,
            }),
            changed: Condvar::new(),
            limit,
        }
    }

    fn tables_mut(&self) -> RwLockWriteGuard<'_, Tables> {
        self.tables.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// For reading: nothing leaves the tables meanwhile, so what they lack RocksDB has.
    pub(super) fn tables(&self) -> RwLockReadGuard<'_, Tables> {
        self.tables.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps others from writing.
    ///
    /// # Errors
    /// [`ApplyError::WouldBlock`]: somebody writes.
    pub(super) fn begin(&self, mode: Mode) -> Result<Writing<'_>, ApplyError> {
        mode.lock(self.writers.try_lock(), || self.writers.lock())
    }

    /// Takes changes in, all or none of them. They are puts and deletes of single keys.
    ///
    /// # Errors
    /// [`ApplyError::WouldBlock`] while the thread is behind, and why it cannot go on.
    pub(super) fn write(
        &self,
        _writing: &Writing<'_>,
        changes: &[Change<'_>],
        mode: Mode,
    ) -> Result<(), ApplyError> {
        let bytes: usize = changes.iter().map(size).sum();
        let is_full = {
            let active = &self.tables().active;
            !active.is_empty() && active.size() + bytes > self.limit
        };
        if is_full {
            self.make_room(MOST_FROZEN, mode)?;
            self.freeze(&mut self.tables_mut());
        }
        check(&self.progress())?;
        let active = &mut self.tables_mut().active;
        let before = active.size();
        for change in changes {
            match *change {
                Change::Put(key, value) => active.set(key, Some(value)),
                Change::Delete(key) => active.set(key, None),
                Change::DeleteRange(..) => debug_assert!(false, "ranges go to the database"),
            }
        }
        let grown = active.size() - before;
        self.progress().took(grown as f64 / self.limit as f64);
        Ok(())
    }

    /// Waits until the next write is due.
    ///
    /// # Errors
    /// [`ApplyError::WouldBlock`] while it is not, and why the thread cannot go on.
    pub(super) fn await_turn(&self, mode: Mode) -> Result<(), ApplyError> {
        let progress = self.progress();
        check(&progress)?;
        let Some(wait) = progress.pace.wait(Instant::now()) else {
            return Ok(());
        };
        if mode == Mode::NonBlocking {
            return Err(ApplyError::WouldBlock);
        }
        drop(progress);
        thread::sleep(wait);
        check(&self.progress())
    }

    /// Waits until fewer tables wait for the thread.
    fn make_room(&self, most: u64, mode: Mode) -> Result<(), ApplyError> {
        let mut progress = self.progress();
        while progress.waiting() >= most {
            check(&progress)?;
            if mode == Mode::NonBlocking {
                return Err(ApplyError::WouldBlock);
            }
            progress = self.wait(progress)?;
        }
        Ok(())
    }

    /// Waits until another table may be frozen for looking at a moment.
    ///
    /// # Errors
    /// Why the thread cannot go on.
    pub(super) fn await_room(&self) -> Result<(), ApplyError> {
        self.make_room(MOST_SMALL, Mode::Blocking)
    }

    fn wait_long<'a>(&self, progress: MutexGuard<'a, Progress>) -> MutexGuard<'a, Progress> {
        self.changed
            .wait(progress)
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the thread to get on. Not for ever: on a full disk nobody knows how long that is, and RocksDB may not come back to say so.
    fn wait<'a>(
        &self,
        progress: MutexGuard<'a, Progress>,
    ) -> Result<MutexGuard<'a, Progress>, ApplyError> {
        let (stored, full) = (progress.stored, progress.full.clone());
        let (patience, reason) = match full {
            Some(full) => (FULL_PATIENCE, full),
            None => (
                STUCK,
                "rocksdb has taken nothing for a long time".to_owned(),
            ),
        };
        let is_full = progress.full.is_some();
        let same = |now: &mut Progress| {
            now.stored == stored && now.failed.is_none() && now.full.is_some() == is_full
        };
        let (progress, waited) = (self.changed)
            .wait_timeout_while(progress, patience, same)
            .unwrap_or_else(PoisonError::into_inner);
        match waited.timed_out() {
            true => Err(ApplyError::NoSpace(reason)),
            false => Ok(progress),
        }
    }

    /// Waits for the thread's end after [`Recent::stop`]; `false`: it does not get on, and is not to be waited for. The log has what it has
    /// not handed over.
    pub(super) fn await_end(&self) -> bool {
        let mut progress = self.progress();
        while progress.failed.is_none() {
            let stored = progress.stored;
            let same = |now: &mut Progress| now.stored == stored && now.failed.is_none();
            let (now, waited) = (self.changed)
                .wait_timeout_while(progress, END_PATIENCE, same)
                .unwrap_or_else(PoisonError::into_inner);
            if waited.timed_out() {
                return false;
            }
            progress = now;
        }
        true
    }

    /// Begins another table. Answers the number of the last one frozen.
    fn freeze(&self, tables: &mut Tables) -> u64 {
        let mut progress = self.progress();
        if !tables.active.is_empty() {
            let slots = tables.active.len();
            let spare = tables.spare.take();
            let next = spare.unwrap_or_else(|| Table::new(self.limit, slots));
            let full = std::mem::replace(&mut tables.active, next);
            progress.frozen += 1;
            let frozen = Frozen::new(full, progress.frozen);
            tables.frozen.push_back(Arc::new(frozen));
            self.changed.notify_all();
        }
        progress.frozen
    }

    /// What the database may lack at this moment, newest first, and what `look` finds at the same moment. For one who holds the database: a
    /// state that takes its place takes the tables too.
    pub(super) fn moment<T>(&self, look: impl FnOnce() -> T) -> (Vec<Arc<Frozen>>, T) {
        let mut tables = self.tables_mut();
        self.freeze(&mut tables);
        (tables.frozen.iter().rev().cloned().collect(), look())
    }

    /// Waits until everything written so far is in the database.
    ///
    /// # Errors
    /// Why the thread cannot go on.
    pub(super) fn drain(&self) -> Result<(), ApplyError> {
        let last = self.freeze(&mut self.tables_mut());
        self.await_stored(last)
    }

    /// Waits until the tables up to this one are in the database.
    ///
    /// # Errors
    /// Why the thread cannot go on.
    fn await_stored(&self, number: u64) -> Result<(), ApplyError> {
        let mut progress = self.progress();
        while progress.stored < number {
            check(&progress)?;
            progress = self.wait(progress)?;
        }
        Ok(())
    }

    /// Forgets everything: another state takes its place. Nobody hands a table over meanwhile.
    pub(super) fn discard(&self, _writing: &Writing<'_>) {
        let mut tables = self.tables_mut();
        tables.active.clear();
        tables.frozen.clear();
        let mut progress = self.progress();
        progress.stored = progress.frozen;
        progress.full = None;
        self.changed.notify_all();
    }

    /// For the thread: waits for a table. `false`: there will be none.
    pub(super) fn await_frozen(&self) -> bool {
        let mut progress = self.progress();
        while progress.waiting() == 0 {
            if progress.stopping {
                return false;
            }
            progress = self.wait_long(progress);
        }
        true
    }

    /// For the thread: the next table to be handed over.
    pub(super) fn oldest(&self) -> Option<Arc<Frozen>> {
        let oldest = self.tables().frozen.front().cloned();
        if oldest.is_some() {
            self.progress().pace.begin(Instant::now());
        }
        oldest
    }

    /// For the thread: the oldest table is in the database.
    pub(super) fn stored(&self, table: Arc<Frozen>) {
        self.tables_mut().frozen.pop_front();
        let mut progress = self.progress();
        progress.stored = table.number;
        progress.full = None;
        progress.pace.end(Instant::now());
        drop(progress);
        self.changed.notify_all();
        // Nobody waits while its memory is made ready again.
        if let Some(frozen) = Arc::into_inner(table) {
            let mut spare = frozen.into_table();
            // One that a large value has made larger is not kept.
            if spare.capacity() <= 2 * self.limit {
                spare.clear();
                // The one before it, should there be one, goes after the lock.
                let _before = self.tables_mut().spare.replace(spare);
            }
        }
    }

    /// For the thread: the disk is full. Whether to try again.
    pub(super) fn try_again(&self, reason: &str) -> bool {
        let mut progress = self.progress();
        if progress.stopping {
            return false;
        }
        progress.full.get_or_insert_with(|| reason.to_owned());
        self.changed.notify_all();
        let _ended = self.changed.wait_timeout(progress, FULL_PATIENCE);
        true
    }

    /// For the thread: it cannot go on.
    pub(super) fn fail(&self, reason: String) {
        self.progress().failed.get_or_insert(reason);
        self.changed.notify_all();
    }

    /// The thread is to end when everything is in the database.
    pub(super) fn stop(&self) {
        self.freeze(&mut self.tables_mut());
        self.progress().stopping = true;
        self.changed.notify_all();
    }
}

/// Bytes that a change takes, about.
fn size(change: &Change<'_>) -> usize {
    match change {
        Change::Put(key, value) | Change::DeleteRange(key, value) => key.len() + value.len(),
        Change::Delete(key) => key.len(),
    }
}

fn check(progress: &Progress) -> Result<(), ApplyError> {
    match &progress.failed {
        Some(reason) => Err(ApplyError::Fatal(reason.clone())),
        None => Ok(()),
    }
}

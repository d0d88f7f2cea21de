//! What has been written and is not in RocksDB yet (docs/adr/0051): one table that takes changes, and full ones that a thread hands
//! over, each as one atomic batch, in order. So RocksDB always holds a prefix of what was written.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{
    Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
    TryLockError,
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

/// With one that takes changes and one that the thread hands over, nobody asks for memory while the thread keeps up.
const MOST_SPARE: usize = 2;

/// So often the event loop tries a lock that somebody has for a moment, in some ten microseconds. Whoever has it for longer has been
/// interrupted, and gets the CPU back when others have had it.
const TRIES: u32 = 300;

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
    /// Memory to be used next, [`MOST_SPARE`] tables at most.
    spare: Vec<Table>,
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
    /// The event loop has tried a lock in vain, and does not try long until it gets one: of a thousand reads one finds out.
    in_vain: AtomicBool,
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
                spare: Vec::new(),
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
            in_vain: AtomicBool::new(false),
            limit,
        }
    }

    fn tables_mut(&self) -> RwLockWriteGuard<'_, Tables> {
        self.tables.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tables(&self) -> RwLockReadGuard<'_, Tables> {
        self.tables.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// For reading: nothing leaves the tables meanwhile, so what they lack RocksDB has.
    ///
    /// # Errors
    /// [`ApplyError::WouldBlock`]: somebody who changes them does not get on.
    pub(super) fn tables_for(&self, mode: Mode) -> Result<RwLockReadGuard<'_, Tables>, ApplyError> {
        let tried = self.again(mode, || self.tables.try_read());
        mode.lock(tried, || self.tables.read())
    }

    fn tables_mut_for(&self, mode: Mode) -> Result<RwLockWriteGuard<'_, Tables>, ApplyError> {
        let tried = self.again(mode, || self.tables.try_write());
        mode.lock(tried, || self.tables.write())
    }

    fn progress_for(&self, mode: Mode) -> Result<MutexGuard<'_, Progress>, ApplyError> {
        let tried = self.again(mode, || self.progress.try_lock());
        mode.lock(tried, || self.progress.lock())
    }

    /// Tries a lock, for a while where this mode does not wait.
    fn again<G>(
        &self,
        mode: Mode,
        mut attempt: impl FnMut() -> Result<G, TryLockError<G>>,
    ) -> Result<G, TryLockError<G>> {
        if mode == Mode::Blocking {
            return attempt();
        }
        let was_in_vain = self.in_vain.load(Ordering::Relaxed);
        let mut tried = attempt();
        for _ in 0..if was_in_vain { 0 } else { TRIES } {
            if !matches!(tried, Err(TryLockError::WouldBlock)) {
                break;
            }
            std::hint::spin_loop();
            tried = attempt();
        }
        let is_in_vain = matches!(tried, Err(TryLockError::WouldBlock));
        if is_in_vain != was_in_vain {
            self.in_vain.store(is_in_vain, Ordering::Relaxed);
        }
        tried
    }

    /// Whether a write that must not block waits for more than another writer: for the thread, or for memory.
    pub(super) fn is_behind(&self) -> bool {
        let tables = self.tables_for(Mode::NonBlocking);
        if tables.is_ok_and(|tables| tables.spare.is_empty()) {
            return true;
        }
        let progress = self.progress_for(Mode::NonBlocking);
        progress.is_ok_and(|progress| progress.pace.wait(Instant::now()).is_some())
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
        let is_full = |tables: &Tables| {
            let active = &tables.active;
            !active.is_empty() && active.size() + bytes > self.limit
        };
        if is_full(&*self.tables_for(mode)?) {
            self.make_room(MOST_FROZEN, mode)?;
            if mode == Mode::Blocking {
                self.set_aside();
            }
        }
        let mut tables = self.tables_mut_for(mode)?;
        let mut progress = self.progress_for(mode)?;
        check(&progress)?;
        if is_full(&tables) {
            if mode == Mode::NonBlocking && tables.spare.is_empty() {
                return Err(ApplyError::WouldBlock);
            }
            self.freeze(&mut tables, &mut progress);
        }
        let active = &mut tables.active;
        let before = active.size();
        for change in changes {
            match *change {
                Change::Put(key, value) => active.set(key, Some(value)),
                Change::Delete(key) => active.set(key, None),
                Change::DeleteRange(..) => debug_assert!(false, "ranges go to the database"),
            }
        }
        let grown = active.size() - before;
        progress.took(grown as f64 / self.limit as f64);
        Ok(())
    }

    /// Waits until the next write is due.
    ///
    /// # Errors
    /// [`ApplyError::WouldBlock`] while it is not, and why the thread cannot go on.
    pub(super) fn await_turn(&self, mode: Mode) -> Result<(), ApplyError> {
        let progress = self.progress_for(mode)?;
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
        let mut progress = self.progress_for(mode)?;
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

    /// Sees to memory for another table before anybody has to wait for who asks the system for it: that takes milliseconds. Blocks.
    pub(super) fn set_aside(&self) {
        let slots = {
            let tables = self.tables();
            if !tables.spare.is_empty() {
                return;
            }
            tables.active.len()
        };
        self.keep(Table::new(self.limit, slots));
    }

    /// Memory for another table, unless there is enough; what is not kept goes after the lock.
    fn keep(&self, table: Table) {
        let mut table = Some(table);
        let mut tables = self.tables_mut();
        if tables.spare.len() < MOST_SPARE {
            tables.spare.extend(table.take());
        }
        drop(tables);
    }

    /// Begins another table.
    fn freeze(&self, tables: &mut Tables, progress: &mut Progress) {
        if tables.active.is_empty() {
            return;
        }
        let slots = tables.active.len();
        let spare = tables.spare.pop();
        let next = spare.unwrap_or_else(|| Table::new(self.limit, slots));
        let full = std::mem::replace(&mut tables.active, next);
        progress.frozen += 1;
        let frozen = Frozen::new(full, progress.frozen);
        tables.frozen.push_back(Arc::new(frozen));
        self.changed.notify_all();
    }

    /// What the database may lack at this moment, newest first, and what `look` finds at the same moment. For one who holds the database: a
    /// state that takes its place takes the tables too.
    pub(super) fn moment<T>(&self, look: impl FnOnce() -> T) -> (Vec<Arc<Frozen>>, T) {
        self.set_aside();
        let mut tables = self.tables_mut();
        self.freeze(&mut tables, &mut self.progress());
        (tables.frozen.iter().rev().cloned().collect(), look())
    }

    /// Waits until everything written so far is in the database.
    ///
    /// # Errors
    /// Why the thread cannot go on.
    pub(super) fn drain(&self) -> Result<(), ApplyError> {
        self.set_aside();
        let last = {
            let mut tables = self.tables_mut();
            let mut progress = self.progress();
            self.freeze(&mut tables, &mut progress);
            progress.frozen
        };
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
                self.keep(spare);
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
        let mut tables = self.tables_mut();
        let mut progress = self.progress();
        self.freeze(&mut tables, &mut progress);
        progress.stopping = true;
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

#[cfg(test)]
mod tests {
    use super::*;

    fn write(recent: &Recent, key: &[u8], mode: Mode) -> Result<(), ApplyError> {
        recent.await_turn(mode)?;
        let writing = recent.begin(mode)?;
        recent.write(&writing, &[Change::Put(key, &[7; 600])], mode)
    }

    fn would_block<T>(result: Result<T, ApplyError>) -> bool {
        matches!(result, Err(ApplyError::WouldBlock))
    }

    #[test]
    fn who_does_not_wait_waits_for_nobody_who_has_a_lock() {
        let recent = Recent::new(1000);
        let holder = recent.progress();
        assert!(!recent.in_vain.load(Ordering::Relaxed));
        assert!(would_block(recent.await_turn(Mode::NonBlocking)));
        assert!(would_block(recent.make_room(1, Mode::NonBlocking)));
        let writing = recent.writers.lock().unwrap();
        let changes = [Change::Put(b"a", b"1")];
        assert!(would_block(recent.write(
            &writing,
            &changes,
            Mode::NonBlocking
        )));
        // Who has tried in vain does not try long.
        assert!(recent.in_vain.load(Ordering::Relaxed));
        drop(holder);
        assert!(would_block(recent.begin(Mode::NonBlocking)));
        let reader = recent.tables();
        assert!(would_block(recent.write(
            &writing,
            &changes,
            Mode::NonBlocking
        )));
        drop((reader, writing));
        let writer = recent.tables_mut();
        assert!(would_block(recent.tables_for(Mode::NonBlocking)));
        drop(writer);
        // Nothing was done so far.
        assert_eq!(recent.tables().get(b"a"), None);
        write(&recent, b"a", Mode::NonBlocking).unwrap();
        assert!(recent.tables().get(b"a").is_some());
        assert!(!recent.in_vain.load(Ordering::Relaxed));
    }

    #[test]
    fn who_does_not_wait_asks_for_no_memory() {
        let recent = Recent::new(1000);
        write(&recent, b"a", Mode::NonBlocking).unwrap();
        assert!(would_block(write(&recent, b"b", Mode::NonBlocking)));
        write(&recent, b"b", Mode::Blocking).unwrap();
        assert_eq!(recent.tables().frozen.len(), 1);
        assert!(recent.is_behind());
        // What has been handed over leaves its memory.
        let oldest = recent.oldest().unwrap();
        recent.stored(oldest);
        assert!(!recent.is_behind());
        write(&recent, b"c", Mode::NonBlocking).unwrap();
        assert_eq!(recent.tables().frozen.len(), 1);
        // No more than is of use, however it comes.
        for _ in 0..3 {
            recent.keep(Table::new(1000, 1));
        }
        assert_eq!(recent.tables().spare.len(), MOST_SPARE);
    }
}

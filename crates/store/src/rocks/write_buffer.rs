//! What has been written and is not in RocksDB yet (docs/adr/0051): one table that takes changes,
//! and full ones that a thread hands over, each as one atomic batch, in order. So RocksDB always
//! holds a prefix of what was written.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{
    Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
    TryLockError,
};
use std::thread;
use std::time::{Duration, Instant};

use super::table::{FrozenTable, Table};
use super::write_throttle::WriteThrottle;
use crate::kv::Change;
use crate::machine::{ApplyError, Mode};

/// Tables that may wait for the thread; with one more, writers do. So they do when those that wait
/// have as many bytes together, in fewer tables that long values have made larger.
const MAX_FROZEN: u64 = 8;
/// With as many, readers of a snapshot wait before they freeze another, however little is in it.
const MAX_SMALL_FROZEN: u64 = 16;

/// With one that takes changes and one that the thread hands over, no thread allocates memory while
/// the thread keeps up.
const MAX_SPARE: usize = 2;

/// So often the event loop tries a lock that another thread holds briefly, in some ten
/// microseconds. A thread that holds it longer has been interrupted, and gets the CPU back when
/// others have had it.
const LOCK_TRIES: u32 = 300;

/// While the disk is full, callers that wait for the thread get an error after this time, and it
/// tries again after as much.
pub(super) const DISK_FULL_WAIT: Duration = Duration::from_millis(200);
/// A thread that has handed nothing over for so long hangs in RocksDB: it waits there for a
/// compaction that has no room.
const STALLED_AFTER: Duration = Duration::from_secs(30);
/// The same when all is to end.
const SHUTDOWN_WAIT: Duration = Duration::from_secs(5);

/// The tables.
pub(super) struct Tables {
    active: Table,
    /// Oldest first.
    frozen: VecDeque<Arc<FrozenTable>>,
    /// Memory to be used next, [`MAX_SPARE`] tables at most.
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

/// Why the thread cannot go on.
struct Failure {
    reason: String,
    /// Whether bytes of the database do not read back.
    is_damage: bool,
}

/// How far the thread is.
struct Progress {
    /// Tables frozen so far, and of those in RocksDB.
    frozen: u64,
    stored: u64,
    /// Bytes in tables that are frozen and not in RocksDB.
    waiting_bytes: usize,
    throttle: WriteThrottle,
    failed: Option<Failure>,
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
        self.throttle.took(part, self.waiting(), Instant::now());
    }
}

/// Locks are taken in the order of the fields; the database's stands between the first and the
/// second, and is not held while waiting.
pub(super) struct WriteBuffer {
    writers: Mutex<()>,
    tables: RwLock<Tables>,
    progress: Mutex<Progress>,
    changed: Condvar,
    /// The event loop has failed to get a lock, and does not try long until it gets one: of a
    /// thousand reads one finds out.
    lock_contended: AtomicBool,
    /// Bytes after which a table is full.
    limit: usize,
}

/// No other thread writes meanwhile.
pub(super) type Writing<'a> = MutexGuard<'a, ()>;

impl WriteBuffer {
    pub(super) fn new(limit: usize) -> WriteBuffer {
        WriteBuffer {
            writers: Mutex::new(()),
            tables: RwLock::new(Tables {
                active: Table::new(limit, 0),
                frozen: VecDeque::new(),
                spare: Vec::new(),
            }),
            progress: Mutex::new(Progress {
                frozen: 0,
                stored: 0,
                waiting_bytes: 0,
                throttle: WriteThrottle::new(),
                failed: None,
                full: None,
                stopping: false,
            }),
            changed: Condvar::new(),
            lock_contended: AtomicBool::new(false),
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
        let tried = self.try_lock_spinning(mode, || self.tables.try_read());
        mode.lock(tried, || self.tables.read())
    }

    fn tables_mut_for(&self, mode: Mode) -> Result<RwLockWriteGuard<'_, Tables>, ApplyError> {
        let tried = self.try_lock_spinning(mode, || self.tables.try_write());
        mode.lock(tried, || self.tables.write())
    }

    fn progress_for(&self, mode: Mode) -> Result<MutexGuard<'_, Progress>, ApplyError> {
        let tried = self.try_lock_spinning(mode, || self.progress.try_lock());
        mode.lock(tried, || self.progress.lock())
    }

    /// Tries a lock, for a while where this mode does not wait.
    fn try_lock_spinning<G>(
        &self,
        mode: Mode,
        mut attempt: impl FnMut() -> Result<G, TryLockError<G>>,
    ) -> Result<G, TryLockError<G>> {
        if mode == Mode::Blocking {
            return attempt();
        }
        let was_contended = self.lock_contended.load(Ordering::Relaxed);
        let mut tried = attempt();
        for _ in 0..if was_contended { 0 } else { LOCK_TRIES } {
            if !matches!(tried, Err(TryLockError::WouldBlock)) {
                break;
            }
            std::hint::spin_loop();
            tried = attempt();
        }
        let is_contended = matches!(tried, Err(TryLockError::WouldBlock));
        if is_contended != was_contended {
            self.lock_contended.store(is_contended, Ordering::Relaxed);
        }
        tried
    }

    /// Whether a write that must not block waits for more than another writer: for the thread, or
    /// for memory.
    pub(super) fn is_behind(&self) -> bool {
        let tables = self.tables_for(Mode::NonBlocking);
        if tables.is_ok_and(|tables| tables.spare.is_empty()) {
            return true;
        }
        let progress = self.progress_for(Mode::NonBlocking);
        progress.is_ok_and(|progress| progress.throttle.wait(Instant::now()).is_some())
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
        if bytes > self.max_frozen_bytes() && mode == Mode::Blocking {
            // They are large alone: nothing else waits beside them.
            self.drain()?;
        }
        let is_full = |tables: &Tables| {
            let active = &tables.active;
            !active.is_empty() && active.size() + bytes > self.limit
        };
        if is_full(&*self.tables_for(mode)?) {
            self.wait_for_room(MAX_FROZEN, mode)?;
            if mode == Mode::Blocking {
                self.preallocate_table();
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
        if bytes > self.limit {
            active.reserve(bytes);
        }
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
    pub(super) fn wait_for_throttle(&self, mode: Mode) -> Result<(), ApplyError> {
        let progress = self.progress_for(mode)?;
        check(&progress)?;
        let Some(wait) = progress.throttle.wait(Instant::now()) else {
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
    fn wait_for_room(&self, most: u64, mode: Mode) -> Result<(), ApplyError> {
        let mut progress = self.progress_for(mode)?;
        while progress.waiting() >= most || self.is_over_memory_limit(&progress) {
            check(&progress)?;
            if mode == Mode::NonBlocking {
                return Err(ApplyError::WouldBlock);
            }
            progress = self.wait(progress)?;
        }
        Ok(())
    }

    /// Whether what waits for the thread takes as much memory as it may.
    fn is_over_memory_limit(&self, progress: &Progress) -> bool {
        progress.waiting_bytes >= self.max_frozen_bytes()
    }

    fn max_frozen_bytes(&self) -> usize {
        self.limit.saturating_mul(MAX_FROZEN as usize)
    }

    /// Waits until another table may be frozen for a snapshot.
    ///
    /// # Errors
    /// Why the thread cannot go on.
    pub(super) fn wait_for_frozen_slot(&self) -> Result<(), ApplyError> {
        self.wait_for_room(MAX_SMALL_FROZEN, Mode::Blocking)
    }

    fn wait_indefinitely<'a>(
        &self,
        progress: MutexGuard<'a, Progress>,
    ) -> MutexGuard<'a, Progress> {
        self.changed
            .wait(progress)
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the thread to get on. Not without limit: on a full disk the length of the wait is
    /// unknown, and RocksDB may not come back to say so.
    fn wait<'a>(
        &self,
        progress: MutexGuard<'a, Progress>,
    ) -> Result<MutexGuard<'a, Progress>, ApplyError> {
        let (stored, full) = (progress.stored, progress.full.clone());
        let (patience, reason) = match full {
            Some(full) => (DISK_FULL_WAIT, full),
            None => (
                STALLED_AFTER,
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

    /// Waits for the thread's end after [`WriteBuffer::stop`]; `false`: it does not get on, and is
    /// not to be waited for. The log has what it has not handed over.
    pub(super) fn wait_for_thread_end(&self) -> bool {
        let mut progress = self.progress();
        while progress.failed.is_none() {
            let stored = progress.stored;
            let same = |now: &mut Progress| now.stored == stored && now.failed.is_none();
            let (now, waited) = (self.changed)
                .wait_timeout_while(progress, SHUTDOWN_WAIT, same)
                .unwrap_or_else(PoisonError::into_inner);
            if waited.timed_out() {
                return false;
            }
            progress = now;
        }
        true
    }

    /// Sees to memory for another table before anybody has to wait for who asks the system for it:
    /// that takes milliseconds. Blocks.
    pub(super) fn preallocate_table(&self) {
        let slots = {
            let tables = self.tables();
            if !tables.spare.is_empty() {
                return;
            }
            tables.active.len()
        };
        self.keep_spare(Table::new(self.limit, slots));
    }

    /// Memory for another table, unless there is enough; what is not kept goes after the lock.
    fn keep_spare(&self, table: Table) {
        let mut table = Some(table);
        let mut tables = self.tables_mut();
        if tables.spare.len() < MAX_SPARE {
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
        progress.waiting_bytes += full.size();
        let frozen = FrozenTable::new(full, progress.frozen);
        tables.frozen.push_back(Arc::new(frozen));
        self.changed.notify_all();
    }

    /// What the database may lack at this moment, newest first, and what `look` finds at the same
    /// moment. For one who holds the database: a state that takes its place takes the tables too.
    pub(super) fn freeze_and_snapshot<T>(
        &self,
        look: impl FnOnce() -> T,
    ) -> (Vec<Arc<FrozenTable>>, T) {
        self.preallocate_table();
        let mut tables = self.tables_mut();
        self.freeze(&mut tables, &mut self.progress());
        (tables.frozen.iter().rev().cloned().collect(), look())
    }

    /// Waits until everything written so far is in the database.
    ///
    /// # Errors
    /// Why the thread cannot go on.
    pub(super) fn drain(&self) -> Result<(), ApplyError> {
        self.preallocate_table();
        let last = {
            let mut tables = self.tables_mut();
            let mut progress = self.progress();
            self.freeze(&mut tables, &mut progress);
            progress.frozen
        };
        self.wait_until_stored(last)
    }

    /// Waits until the tables up to this one are in the database.
    ///
    /// # Errors
    /// Why the thread cannot go on.
    fn wait_until_stored(&self, number: u64) -> Result<(), ApplyError> {
        let mut progress = self.progress();
        while progress.stored < number {
            check(&progress)?;
            progress = self.wait(progress)?;
        }
        Ok(())
    }

    /// Forgets everything: another state takes its place. No thread hands a table over meanwhile.
    pub(super) fn discard(&self, _writing: &Writing<'_>) {
        let mut tables = self.tables_mut();
        tables.active.clear();
        tables.frozen.clear();
        let mut progress = self.progress();
        progress.stored = progress.frozen;
        progress.waiting_bytes = 0;
        progress.full = None;
        self.changed.notify_all();
    }

    /// For the thread: waits for a table. `false`: there will be none.
    pub(super) fn wait_for_frozen_table(&self) -> bool {
        let mut progress = self.progress();
        while progress.waiting() == 0 {
            if progress.stopping {
                return false;
            }
            progress = self.wait_indefinitely(progress);
        }
        true
    }

    /// For the thread: the next table to be handed over.
    pub(super) fn oldest(&self) -> Option<Arc<FrozenTable>> {
        let oldest = self.tables().frozen.front().cloned();
        if oldest.is_some() {
            self.progress().throttle.begin(Instant::now());
        }
        oldest
    }

    /// For the thread: the oldest table is in the database.
    pub(super) fn stored(&self, table: Arc<FrozenTable>) {
        self.tables_mut().frozen.pop_front();
        let mut progress = self.progress();
        progress.stored = table.number;
        progress.waiting_bytes = progress.waiting_bytes.saturating_sub(table.size());
        progress.full = None;
        progress.throttle.end(Instant::now());
        drop(progress);
        self.changed.notify_all();
        // No thread waits while its memory is made ready again.
        if let Some(frozen) = Arc::into_inner(table) {
            let mut spare = frozen.into_inner();
            // One that a large value has made larger is not kept.
            if spare.capacity() <= 2 * self.limit {
                spare.clear();
                self.keep_spare(spare);
            }
        }
    }

    /// For the thread: the disk is full. Whether to try again.
    pub(super) fn wait_for_disk_space(&self, reason: &str) -> bool {
        let mut progress = self.progress();
        if progress.stopping {
            return false;
        }
        progress.full.get_or_insert_with(|| reason.to_owned());
        self.changed.notify_all();
        let _ended = self.changed.wait_timeout(progress, DISK_FULL_WAIT);
        true
    }

    /// For the thread: it cannot go on.
    pub(super) fn fail(&self, error: ApplyError) {
        let failure = Failure {
            reason: error.to_string(),
            is_damage: matches!(error, ApplyError::Damaged(_)),
        };
        self.progress().failed.get_or_insert(failure);
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
        Some(failure) if failure.is_damage => Err(ApplyError::Damaged(failure.reason.clone())),
        Some(failure) => Err(ApplyError::Fatal(failure.reason.clone())),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(write_buffer: &WriteBuffer, key: &[u8], mode: Mode) -> Result<(), ApplyError> {
        write_buffer.wait_for_throttle(mode)?;
        let writing = write_buffer.begin(mode)?;
        write_buffer.write(&writing, &[Change::Put(key, &[7; 600])], mode)
    }

    fn would_block<T>(result: Result<T, ApplyError>) -> bool {
        matches!(result, Err(ApplyError::WouldBlock))
    }

    #[test]
    fn a_non_blocking_caller_does_not_wait_for_a_lock() {
        let write_buffer = WriteBuffer::new(1000);
        let holder = write_buffer.progress();
        assert!(!write_buffer.lock_contended.load(Ordering::Relaxed));
        assert!(would_block(
            write_buffer.wait_for_throttle(Mode::NonBlocking)
        ));
        assert!(would_block(
            write_buffer.wait_for_room(1, Mode::NonBlocking)
        ));
        let writing = write_buffer.writers.lock().unwrap();
        let changes = [Change::Put(b"a", b"1")];
        assert!(would_block(write_buffer.write(
            &writing,
            &changes,
            Mode::NonBlocking
        )));
        // After a failed try the next one is short.
        assert!(write_buffer.lock_contended.load(Ordering::Relaxed));
        drop(holder);
        assert!(would_block(write_buffer.begin(Mode::NonBlocking)));
        let reader = write_buffer.tables();
        assert!(would_block(write_buffer.write(
            &writing,
            &changes,
            Mode::NonBlocking
        )));
        drop((reader, writing));
        let writer = write_buffer.tables_mut();
        assert!(would_block(write_buffer.tables_for(Mode::NonBlocking)));
        drop(writer);
        // Nothing was done so far.
        assert_eq!(write_buffer.tables().get(b"a"), None);
        write(&write_buffer, b"a", Mode::NonBlocking).unwrap();
        assert!(write_buffer.tables().get(b"a").is_some());
        assert!(!write_buffer.lock_contended.load(Ordering::Relaxed));
    }

    /// Tables that a long value has made large are bounded in bytes, whatever their number.
    #[test]
    fn tables_that_wait_are_bounded_in_bytes() {
        let write_buffer = WriteBuffer::new(1000);
        let put = |key: &[u8], bytes: usize| {
            let writing = write_buffer.begin(Mode::NonBlocking)?;
            let value = vec![7; bytes];
            write_buffer.write(&writing, &[Change::Put(key, &value)], Mode::NonBlocking)
        };
        write_buffer.preallocate_table();
        put(b"long", 8000).unwrap();
        put(b"a", 600).unwrap();
        write_buffer.preallocate_table();
        assert_eq!(write_buffer.progress().waiting(), 1);
        assert!(would_block(put(b"b", 600)), "8000 bytes wait");
        let oldest = write_buffer.oldest().unwrap();
        write_buffer.stored(oldest);
        assert_eq!(write_buffer.progress().waiting_bytes, 0);
        put(b"b", 600).unwrap();
    }

    #[test]
    fn who_does_not_wait_asks_for_no_memory() {
        let write_buffer = WriteBuffer::new(1000);
        write(&write_buffer, b"a", Mode::NonBlocking).unwrap();
        assert!(would_block(write(&write_buffer, b"b", Mode::NonBlocking)));
        write(&write_buffer, b"b", Mode::Blocking).unwrap();
        assert_eq!(write_buffer.tables().frozen.len(), 1);
        assert!(write_buffer.is_behind());
        // What has been handed over leaves its memory.
        let oldest = write_buffer.oldest().unwrap();
        write_buffer.stored(oldest);
        assert!(!write_buffer.is_behind());
        write(&write_buffer, b"c", Mode::NonBlocking).unwrap();
        assert_eq!(write_buffer.tables().frozen.len(), 1);
        // No more than is of use, however it comes.
        for _ in 0..3 {
            write_buffer.keep_spare(Table::new(1000, 1));
        }
        assert_eq!(write_buffer.tables().spare.len(), MAX_SPARE);
    }
}

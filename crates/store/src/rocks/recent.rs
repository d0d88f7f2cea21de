//! What has been written and is not in RocksDB yet (docs/adr/0051): one table that takes changes, and full ones that a thread hands
//! over, each as one atomic batch, in order. So RocksDB always holds a prefix of what was written.

use std::collections::VecDeque;
use std::sync::{
    Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
    TryLockError,
};

use super::table::{Frozen, Table};
use crate::kv::Change;
use crate::machine::{ApplyError, Mode};

/// Full tables that may wait; with one more, writers do.
const MOST_FROZEN: usize = 2;

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

    /// The tables that change no more, newest first.
    pub(super) fn frozen(&self) -> Vec<Arc<Frozen>> {
        self.frozen.iter().rev().cloned().collect()
    }
}

/// How far the thread is.
#[derive(Default)]
struct Progress {
    /// Tables frozen so far, and of those in RocksDB.
    frozen: u64,
    stored: u64,
    failed: Option<String>,
    stopping: bool,
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
                active: Table::new(limit),
                frozen: VecDeque::new(),
                spare: None,
            }),
            progress: Mutex::new(Progress::default()),
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
        match (mode, self.writers.try_lock()) {
            (_, Ok(guard)) => Ok(guard),
            (_, Err(TryLockError::Poisoned(poisoned))) => Ok(poisoned.into_inner()),
            (Mode::NonBlocking, Err(TryLockError::WouldBlock)) => Err(ApplyError::WouldBlock),
            (Mode::Blocking, Err(TryLockError::WouldBlock)) => {
                Ok(self.writers.lock().unwrap_or_else(PoisonError::into_inner))
            }
        }
    }

    /// Takes changes in, all or none of them. They are puts and deletes of single keys.
    ///
    /// # Errors
    /// [`ApplyError::WouldBlock`] while the thread is behind, and why it cannot go on.
    pub(super) fn write(
        &self,
        writing: &Writing<'_>,
        changes: &[Change<'_>],
        mode: Mode,
    ) -> Result<(), ApplyError> {
        if self.tables().active.size() >= self.limit {
            self.make_room(mode)?;
            self.freeze(writing);
        }
        check(&self.progress())?;
        let active = &mut self.tables_mut().active;
        for change in changes {
            match *change {
                Change::Put(key, value) => active.set(key, Some(value)),
                Change::Delete(key) => active.set(key, None),
                Change::DeleteRange(..) => debug_assert!(false, "ranges go to the database"),
            }
        }
        Ok(())
    }

    fn make_room(&self, mode: Mode) -> Result<(), ApplyError> {
        let mut progress = self.progress();
        while progress.frozen - progress.stored >= MOST_FROZEN as u64 {
            check(&progress)?;
            if mode == Mode::NonBlocking {
                return Err(ApplyError::WouldBlock);
            }
            progress = self.wait(progress);
        }
        Ok(())
    }

    fn wait<'a>(&self, progress: MutexGuard<'a, Progress>) -> MutexGuard<'a, Progress> {
        self.changed
            .wait(progress)
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins another table. Answers the number of the last one frozen.
    pub(super) fn freeze(&self, _writing: &Writing<'_>) -> u64 {
        let mut tables = self.tables_mut();
        let mut progress = self.progress();
        if !tables.active.is_empty() {
            let next = tables
                .spare
                .take()
                .unwrap_or_else(|| Table::new(self.limit));
            let full = std::mem::replace(&mut tables.active, next);
            progress.frozen += 1;
            let frozen = Frozen::new(full, progress.frozen);
            tables.frozen.push_back(Arc::new(frozen));
            self.changed.notify_all();
        }
        progress.frozen
    }

    /// Waits until everything written is in the database.
    ///
    /// # Errors
    /// Why the thread cannot go on.
    pub(super) fn drain(&self, writing: &Writing<'_>) -> Result<(), ApplyError> {
        let last = self.freeze(writing);
        self.await_stored(last)
    }

    /// Waits until the tables up to this one are in the database.
    ///
    /// # Errors
    /// Why the thread cannot go on.
    pub(super) fn await_stored(&self, number: u64) -> Result<(), ApplyError> {
        let mut progress = self.progress();
        while progress.stored < number {
            check(&progress)?;
            progress = self.wait(progress);
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
        self.changed.notify_all();
    }

    /// For the thread: waits for a table. `false`: there will be none.
    pub(super) fn await_frozen(&self) -> bool {
        let mut progress = self.progress();
        while progress.stored == progress.frozen {
            if progress.stopping {
                return false;
            }
            progress = self.wait(progress);
        }
        true
    }

    /// For the thread: the next table to be handed over.
    pub(super) fn oldest(&self) -> Option<Arc<Frozen>> {
        self.tables().frozen.front().cloned()
    }

    /// For the thread: the oldest table is in the database.
    pub(super) fn stored(&self, table: Arc<Frozen>) {
        let number = table.number;
        let mut tables = self.tables_mut();
        tables.frozen.pop_front();
        if let Some(frozen) = Arc::into_inner(table) {
            let mut spare = frozen.into_table();
            spare.clear();
            tables.spare = Some(spare);
        }
        self.progress().stored = number;
        self.changed.notify_all();
    }

    /// For the thread: it cannot go on.
    pub(super) fn fail(&self, reason: &ApplyError) {
        self.progress().failed = Some(reason.to_string());
        self.changed.notify_all();
    }

    /// The thread is to end when everything is in the database.
    pub(super) fn stop(&self) {
        if let Ok(writing) = self.begin(Mode::Blocking) {
            self.freeze(&writing);
        }
        self.progress().stopping = true;
        self.changed.notify_all();
    }
}

fn check(progress: &Progress) -> Result<(), ApplyError> {
    match &progress.failed {
        Some(reason) => Err(ApplyError::Fatal(reason.clone())),
        None => Ok(()),
    }
}

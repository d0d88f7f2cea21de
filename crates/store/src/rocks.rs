//! RocksDB without its own log: the replicated log is the log. Data, sessions and applied index lie in one column family, so
//! that a memtable flush carries all of them or none.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, TryLockError};

use rocksdb::checkpoint::Checkpoint;
use rocksdb::{
    BlockBasedOptions, Cache, DB, DBCompressionType, Direction, ErrorKind, FlushOptions,
    IteratorMode, Options, ReadOptions, ReadTier, WriteBatch, WriteOptions,
};
use rustix::process::{Pid, setpriority_process};

use crate::kv::{Change, Kv, View};
use crate::machine::{ApplyError, Mode};

/// What RocksDB's threads for compactions are called; those for flushes are `rocksdb:high`.
const COMPACTION_THREADS: &str = "rocksdb:low";

/// What can be tuned.
#[derive(Clone, Debug)]
pub struct RocksOptions {
    /// Block cache in bytes.
    pub block_cache_bytes: usize,
    /// Memtable size in bytes; a flush begins when one is full.
    pub write_buffer_bytes: usize,
}

impl Default for RocksOptions {
    fn default() -> Self {
        // A memtable that fits the CPU's cache takes random keys twice as fast as one of 64 MiB.
        RocksOptions {
            block_cache_bytes: 64 << 20,
            write_buffer_bytes: 16 << 20,
        }
    }
}

/// A database, and the number of its generation.
type Generation = (Arc<DB>, u64);

/// The database and the directory of its generations: an installed checkpoint becomes a new generation, and the file `CURRENT_GENERATION`,
/// replaced atomically, says which one counts.
pub struct RocksKv {
    db: RwLock<Option<Generation>>,
    directory: PathBuf,
    options: RocksOptions,
}

fn fatal(error: impl std::fmt::Display) -> ApplyError {
    ApplyError::Fatal(format!("rocksdb: {error}"))
}

fn store_error(error: rocksdb::Error, mode: Mode) -> ApplyError {
    match (mode, error.kind()) {
        (Mode::NonBlocking, ErrorKind::Incomplete | ErrorKind::Busy | ErrorKind::TryAgain) => {
            ApplyError::WouldBlock
        }
        _ => fatal(error),
    }
}

impl RocksKv {
    /// Opens or creates the database below `directory`.
    ///
    /// # Errors
    /// What RocksDB or the file system says.
    pub fn open(directory: &Path, options: &RocksOptions) -> Result<RocksKv, ApplyError> {
        fs::create_dir_all(directory).map_err(fatal)?;
        let named = current(directory)?;
        let generation = named.unwrap_or(0);
        // A generation that is named but gone is a loss; an empty database in its place would hide it.
        let db = open_db(&path_of(directory, generation), options, named.is_none())?;
        remove_others(directory, generation);
        Ok(RocksKv {
            db: RwLock::new(Some((Arc::new(db), generation))),
            directory: directory.to_owned(),
            options: options.clone(),
        })
    }

    /// The database; the event loop does not wait for an installation that has it.
    fn guard(&self, mode: Mode) -> Result<RwLockReadGuard<'_, Option<Generation>>, ApplyError> {
        match (mode, self.db.try_read()) {
            (_, Ok(guard)) => Ok(guard),
            (_, Err(TryLockError::Poisoned(poisoned))) => Ok(poisoned.into_inner()),
            (Mode::NonBlocking, Err(TryLockError::WouldBlock)) => Err(ApplyError::WouldBlock),
            (Mode::Blocking, Err(TryLockError::WouldBlock)) => {
                Ok(self.db.read().unwrap_or_else(PoisonError::into_inner))
            }
        }
    }

    fn with<T>(
        &self,
        mode: Mode,
        call: impl FnOnce(&Arc<DB>) -> Result<T, ApplyError>,
    ) -> Result<T, ApplyError> {
        match &*self.guard(mode)? {
            Some((db, _)) => call(db),
            None => Err(fatal(
                "the database is closed: installing a checkpoint failed",
            )),
        }
    }
}

fn path_of(directory: &Path, generation: u64) -> PathBuf {
    directory.join(format!("gen-{generation}"))
}

fn current(directory: &Path) -> Result<Option<u64>, ApplyError> {
    match fs::read_to_string(directory.join("CURRENT_GENERATION")) {
        Ok(text) => text
            .trim()
            .parse()
            .map(Some)
            .map_err(|_| fatal(format!("CURRENT_GENERATION reads {text:?}"))),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(fatal(error)),
    }
}

/// What an interrupted installation left behind is only in the way.
fn remove_others(directory: &Path, generation: u64) {
    let Ok(entries) = fs::read_dir(directory) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with("gen-") && entry.path() != path_of(directory, generation) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

fn open_db(path: &Path, tuning: &RocksOptions, create: bool) -> Result<DB, ApplyError> {
    let mut table = BlockBasedOptions::default();
    table.set_block_cache(&Cache::new_lru_cache(tuning.block_cache_bytes));
    table.set_bloom_filter(10.0, false);
    table.set_format_version(5);
    let mut options = Options::default();
    options.create_if_missing(create);
    options.set_block_based_table_factory(&table);
    options.set_compression_type(DBCompressionType::Lz4);
    options.set_write_buffer_size(tuning.write_buffer_bytes);
    options.set_max_write_buffer_number(4);
    options.set_max_background_jobs(2);
    options.set_max_open_files(-1);
    options.set_atomic_flush(true);
    options.set_keep_log_file_num(2);
    options.set_stats_dump_period_sec(0);
    let db = DB::open(&options, path).map_err(fatal)?;
    give_way();
    Ok(db)
}

/// How much compactions give way to the event loops: a third of what those get. Flushes do not: a memtable that waits for one delays the
/// writes behind it and the trimming of the log (docs/adr/0046).
const COMPACTION_NICE: i32 = 5;

/// Sets the priority of the threads that compact. RocksDB itself knows only the lowest, at which they starve while an event loop has
/// work, until level 0 is so full that writes stop.
fn give_way() {
    let Ok(tasks) = fs::read_dir("/proc/self/task") else {
        return;
    };
    for task in tasks.flatten() {
        let compacts = fs::read(task.path().join("comm"))
            .is_ok_and(|name| name.starts_with(COMPACTION_THREADS.as_bytes()));
        let id = task.file_name().to_str().and_then(|id| id.parse().ok());
        if let Some(id) = id.and_then(Pid::from_raw).filter(|_| compacts) {
            // At the default priority they do no harm but to latencies.
            let _ = setpriority_process(Some(id), COMPACTION_NICE);
        }
    }
}

type DbSnapshot<'db> = rocksdb::Snapshot<'db>;

self_cell::self_cell!(
    /// A snapshot, and the database that it is of.
    struct HeldDb {
        owner: Arc<DB>,
        #[covariant]
        dependent: DbSnapshot,
    }
);

impl View for HeldDb {
    fn scan(
        &self,
        from: &[u8],
        visit: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<(), ApplyError> {
        let (start, options) = walk_from(from);
        visit_all(self.borrow_dependent().iterator_opt(start, options), visit)
    }
}

/// Where a walk begins, and that it leaves the cache to others.
fn walk_from(from: &[u8]) -> (IteratorMode<'_>, ReadOptions) {
    let mut options = ReadOptions::default();
    options.fill_cache(false);
    (IteratorMode::From(from, Direction::Forward), options)
}

type Stored = Result<(Box<[u8]>, Box<[u8]>), rocksdb::Error>;

fn visit_all(
    items: impl Iterator<Item = Stored>,
    visit: &mut dyn FnMut(&[u8], &[u8]) -> bool,
) -> Result<(), ApplyError> {
    for item in items {
        let (key, value) = item.map_err(fatal)?;
        if !visit(&key, &value) {
            break;
        }
    }
    Ok(())
}

impl Kv for RocksKv {
    fn get(&self, key: &[u8], mode: Mode) -> Result<Option<Vec<u8>>, ApplyError> {
        self.with(mode, |db| {
            let mut options = ReadOptions::default();
            if mode == Mode::NonBlocking {
                options.set_read_tier(ReadTier::BlockCache);
            }
            db.get_opt(key, &options)
                .map_err(|error| store_error(error, mode))
        })
    }

    fn get_many(&self, keys: &[Vec<u8>], mode: Mode) -> Result<Vec<Option<Vec<u8>>>, ApplyError> {
        self.with(mode, |db| {
            let snapshot = db.snapshot();
            let read = |key| {
                let mut options = ReadOptions::default();
                if mode == Mode::NonBlocking {
                    options.set_read_tier(ReadTier::BlockCache);
                }
                snapshot
                    .get_opt(key, options)
                    .map_err(|error| store_error(error, mode))
            };
            keys.iter().map(read).collect()
        })
    }

    fn write(
        &self,
        changes: &mut dyn Iterator<Item = Change<'_>>,
        mode: Mode,
    ) -> Result<(), ApplyError> {
        let mut batch = WriteBatch::default();
        for change in changes {
            match change {
                Change::Put(key, value) => batch.put(key, value),
                Change::Delete(key) => batch.delete(key),
                Change::DeleteRange(from, to) => batch.delete_range(from, to),
            }
        }
        let mut options = WriteOptions::default();
        options.disable_wal(true);
        options.set_no_slowdown(mode == Mode::NonBlocking);
        self.with(mode, |db| {
            db.write_opt(batch, &options)
                .map_err(|error| store_error(error, mode))
        })
    }

    fn scan(
        &self,
        from: &[u8],
        visit: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<(), ApplyError> {
        self.with(Mode::Blocking, |db| {
            let (start, options) = walk_from(from);
            visit_all(db.iterator_opt(start, options), visit)
        })
    }

    fn scans_without_blocking(&self) -> bool {
        false
    }

    fn flush(&self) -> Result<bool, ApplyError> {
        let mut options = FlushOptions::default();
        options.set_wait(true);
        self.with(Mode::Blocking, |db| db.flush_opt(&options).map_err(fatal))?;
        Ok(true)
    }

    fn hold(&self) -> Result<Box<dyn View>, ApplyError> {
        self.with(Mode::Blocking, |db| {
            let held = HeldDb::new(Arc::clone(db), |db| db.snapshot());
            Ok(Box::new(held) as Box<dyn View>)
        })
    }

    fn checkpoint(&self, directory: &Path) -> Result<(), ApplyError> {
        self.with(Mode::Blocking, |db| {
            Checkpoint::new(&**db)
                .and_then(|checkpoint| checkpoint.create_checkpoint(directory))
                .map_err(fatal)
        })
    }

    fn install(&self, directory: &Path) -> Result<(), ApplyError> {
        let mut guard = self.db.write().unwrap_or_else(PoisonError::into_inner);
        let generation = guard.as_ref().map_or(0, |(_, generation)| *generation);
        let next = generation + 1;
        let target = path_of(&self.directory, next);
        let _ = fs::remove_dir_all(&target);
        copy_directory(directory, &target).map_err(fatal)?;
        // Opened before it counts: a checkpoint that does not open replaces nothing.
        // Nor is an empty one made of it.
        let db = open_db(&target, &self.options, false)?;
        let draft = self.directory.join("CURRENT_GENERATION.new");
        let switch = || -> std::io::Result<()> {
            // The new generation's name is durable before anything points at it.
            fs::File::open(&self.directory)?.sync_all()?;
            fs::write(&draft, next.to_string())?;
            fs::File::open(&draft)?.sync_all()?;
            fs::rename(&draft, self.directory.join("CURRENT_GENERATION"))?;
            fs::File::open(&self.directory)?.sync_all()
        };
        switch().map_err(fatal)?;
        *guard = Some((Arc::new(db), next));
        remove_others(&self.directory, next);
        Ok(())
    }
}

/// Copies a checkpoint's files, synced: links would tie the database to the transfer directory's fate.
fn copy_directory(from: &Path, to: &Path) -> std::io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        fs::copy(entry.path(), &target)?;
        fs::File::open(&target)?.sync_all()?;
    }
    fs::File::open(to)?.sync_all()
}

#[cfg(test)]
mod tests {
    use rustix::process::getpriority_process;

    use super::*;

    #[test]
    fn compactions_give_way_and_flushes_do_not() {
        let place = tempfile::tempdir().unwrap();
        let _kv = RocksKv::open(place.path(), &RocksOptions::default()).unwrap();
        let (mut compacting, mut flushing) = (0, 0);
        for task in fs::read_dir("/proc/self/task").unwrap().flatten() {
            let name = fs::read_to_string(task.path().join("comm")).unwrap_or_default();
            let id = task.file_name().to_str().unwrap().parse().unwrap();
            let nice = || getpriority_process(Pid::from_raw(id)).unwrap();
            if name.starts_with(COMPACTION_THREADS) {
                assert_eq!(nice(), COMPACTION_NICE);
                compacting += 1;
            } else if name.starts_with("rocksdb:high") {
                assert_eq!(nice(), 0);
                flushing += 1;
            }
        }
        assert!(compacting > 0 && flushing > 0);
    }
}

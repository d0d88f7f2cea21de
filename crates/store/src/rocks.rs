//! RocksDB without its own log: the replicated log is the log. Data, sessions and applied index lie
//! in one column family, so that a memtable flush carries all of them or none. Changes gather in a
//! hash table before they reach it, many at a time and in order (docs/adr/0051).

mod generations;
mod salvage;
mod sst;
mod table;
mod view;
mod write_buffer;
mod write_throttle;

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use std::thread::{self, JoinHandle};

use rocksdb::checkpoint::Checkpoint;
use rocksdb::{
    BlockBasedOptions, Cache, DB, DBCompressionType, ErrorKind, FlushOptions, Options, ReadOptions,
    ReadTier, WriteBatch, WriteOptions,
};
use rustix::process::{Pid, setpriority_process};

use self::generations::{
    current, discard_draft, path_of, refuse_lost, remove_others, switch, tables, take_files,
    write_draft,
};
pub use self::salvage::{RocksSalvage, SalvagedStore};
use self::table::FrozenTable;
use self::view::SnapshotView;
use self::write_buffer::WriteBuffer;

use crate::kv::{Change, Found, Kv, View};
use crate::machine::{ApplyError, Mode};
use crate::reply_budget::LOOP_BYTES;

/// Tables of changes that fill a memtable.
const TABLES_OF_MEMTABLE: usize = 4;

/// What RocksDB's threads for compactions are called; those for flushes are `rocksdb:high`.
const COMPACTION_THREADS: &str = "rocksdb:low";

/// Bytes that are read at once where all of a database is.
const READAHEAD_BYTES: usize = 2 << 20;

/// What can be tuned.
#[derive(Clone, Debug)]
pub struct RocksOptions {
    /// Block cache in bytes.
    pub block_cache_bytes: usize,
    /// Bytes of RocksDB's memtable, whose flush begins when it is full. Changes gather in tables of
    /// a quarter of that before they go there.
    pub write_buffer_bytes: usize,
}

impl Default for RocksOptions {
    fn default() -> Self {
        RocksOptions {
            block_cache_bytes: 64 << 20,
            write_buffer_bytes: 16 << 20,
        }
    }
}

/// A database, and the number of its generation.
type Generation = (Arc<DB>, u64);

/// Per key what the tables say of it, if anything, and a snapshot of the database for the others.
type TableLookup<'db> = (Vec<Option<Option<Vec<u8>>>>, rocksdb::Snapshot<'db>);

/// The database and the directory of its generations: an installed checkpoint becomes a new
/// generation, and the file `CURRENT_GENERATION`, replaced atomically, says which one counts.
pub struct RocksKv {
    shared: Arc<Shared>,
    /// Hands full tables over.
    thread: Option<JoinHandle<()>>,
    directory: PathBuf,
    options: RocksOptions,
}

/// What the thread needs.
struct Shared {
    db: RwLock<Option<Generation>>,
    write_buffer: WriteBuffer,
}

fn fatal(error: impl std::fmt::Display) -> ApplyError {
    ApplyError::Fatal(format!("rocksdb: {error}"))
}

fn closed() -> ApplyError {
    fatal("the database is closed: installing a checkpoint failed")
}

/// RocksDB has no kind for it. What it says is the C library's word, which does not depend on the
/// language unless a program asks for that.
fn is_no_space(error: &rocksdb::Error) -> bool {
    error.kind() == ErrorKind::IOError && error.as_ref().contains("No space left on device")
}

/// While the disk is full RocksDB refuses whatever writes, looks for room without a call, and goes
/// on when there is some. It refuses writes, too, once a flush or a compaction has read a damaged
/// block.
fn write_error(error: rocksdb::Error) -> ApplyError {
    match error.kind() {
        _ if is_no_space(&error) => ApplyError::NoSpace(format!("rocksdb: {error}")),
        ErrorKind::Corruption => ApplyError::Damaged(format!("rocksdb: {error}")),
        _ => fatal(error),
    }
}

/// A read fails because a block's checksum is wrong, or because the device does not return the
/// block.
fn read_error(error: rocksdb::Error, mode: Mode) -> ApplyError {
    match error.kind() {
        ErrorKind::IOError if !is_no_space(&error) => {
            ApplyError::Damaged(format!("rocksdb: {error}"))
        }
        _ => store_error(error, mode),
    }
}

fn file_error(error: std::io::Error) -> ApplyError {
    ApplyError::of_file("rocksdb", &error)
}

fn store_error(error: rocksdb::Error, mode: Mode) -> ApplyError {
    match (mode, error.kind()) {
        (Mode::NonBlocking, ErrorKind::Incomplete | ErrorKind::Busy | ErrorKind::TryAgain) => {
            ApplyError::WouldBlock
        }
        (Mode::NonBlocking, _) if is_no_space(&error) => ApplyError::WouldBlock,
        _ => write_error(error),
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
        let path = path_of(directory, generation);
        if named.is_none() {
            refuse_lost(directory)?;
        }
        // Before anything is written: a checkpoint that was not installed to its end may be what
        // fills the disk.
        if named.is_none() || path.exists() {
            remove_others(directory, generation);
        }
        // A generation that is named but gone is a loss; an empty database in its place would hide
        // it.
        let db = open_db(&path, options, named.is_none())?;
        let shared = Arc::new(Shared {
            db: RwLock::new(Some((Arc::new(db), generation))),
            write_buffer: WriteBuffer::new(
                (options.write_buffer_bytes / TABLES_OF_MEMTABLE).max(1),
            ),
        });
        let of_thread = Arc::clone(&shared);
        let thread = thread::Builder::new()
            .name("store-writer".to_owned())
            .spawn(move || of_thread.flush_loop())
            .map_err(fatal)?;
        Ok(RocksKv {
            shared,
            thread: Some(thread),
            directory: directory.to_owned(),
            options: options.clone(),
        })
    }

    fn write_buffer(&self) -> &WriteBuffer {
        &self.shared.write_buffer
    }

    /// What the tables say of keys, and what has left them. `None`: that is too much to be copied
    /// while writers wait for them.
    ///
    /// # Errors
    /// As [`WriteBuffer::tables_for`].
    fn lookup_in_tables<'db>(
        &self,
        keys: &[Vec<u8>],
        db: &'db DB,
        mode: Mode,
    ) -> Result<Option<TableLookup<'db>>, ApplyError> {
        let tables = self.write_buffer().tables_for(mode)?;
        let mut left = LOOP_BYTES;
        let find = |key: &Vec<u8>| {
            let found = tables.get(key);
            let length = found.flatten().map_or(0, <[u8]>::len);
            left = left.checked_sub(length)?;
            Some(found.map(|value| value.map(<[u8]>::to_vec)))
        };
        let found: Option<_> = keys.iter().map(find).collect();
        Ok(found.map(|found| (found, db.snapshot())))
    }

    /// Reads the current state while no other takes its place.
    fn with_snapshot<T>(
        &self,
        look: impl FnOnce(SnapshotView) -> Result<T, ApplyError>,
    ) -> Result<T, ApplyError> {
        self.write_buffer().wait_for_frozen_slot()?;
        self.shared.with(Mode::Blocking, |db| {
            look(SnapshotView::new(db, self.write_buffer()))
        })
    }
}

impl Drop for RocksKv {
    fn drop(&mut self) {
        self.write_buffer().stop();
        if let Some(thread) = self.thread.take()
            && self.write_buffer().wait_for_thread_end()
        {
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// The database; the event loop does not wait for an installation that has it.
    fn guard(&self, mode: Mode) -> Result<RwLockReadGuard<'_, Option<Generation>>, ApplyError> {
        mode.lock(self.db.try_read(), || self.db.read())
    }

    fn with<T>(
        &self,
        mode: Mode,
        call: impl FnOnce(&Arc<DB>) -> Result<T, ApplyError>,
    ) -> Result<T, ApplyError> {
        match &*self.guard(mode)? {
            Some((db, _)) => call(db),
            None => Err(closed()),
        }
    }

    /// The thread: hands full tables over, oldest first.
    fn flush_loop(&self) {
        let _ended = FailOnDrop(&self.write_buffer);
        self.write_buffer.preallocate_table();
        while self.write_buffer.wait_for_frozen_table() {
            // There is memory for the next table before anybody wants it.
            self.write_buffer.preallocate_table();
            // While the database is held no thread installs another, and discards the tables.
            let stored = self.with(Mode::Blocking, |db| {
                if let Some(table) = self.write_buffer.oldest() {
                    write(db, batch_of(&table), Mode::Blocking)?;
                    self.write_buffer.stored(table);
                }
                Ok(())
            });
            match stored {
                // What it holds is in the log still, should it have to stop.
                Err(ApplyError::NoSpace(error))
                    if self.write_buffer.wait_for_disk_space(&error) => {}
                Err(error) => return self.write_buffer.fail(error),
                Ok(()) => {}
            }
        }
    }
}

/// No caller waits for a thread that has ended, however it did.
struct FailOnDrop<'a>(&'a WriteBuffer);

impl Drop for FailOnDrop<'_> {
    fn drop(&mut self) {
        self.0.fail(fatal("the thread that feeds it has ended"));
    }
}

/// A table's changes. In the order of keys the memtable takes each without a search.
fn batch_of(table: &FrozenTable) -> WriteBatch {
    let mut batch = WriteBatch::with_capacity_bytes(table.size());
    table.visit(|key, value| match value {
        Some(value) => batch.put(key, value),
        None => batch.delete(key),
    });
    batch
}

fn write(db: &DB, batch: WriteBatch, mode: Mode) -> Result<(), ApplyError> {
    let mut options = WriteOptions::default();
    options.disable_wal(true);
    options.set_no_slowdown(mode == Mode::NonBlocking);
    db.write_opt(batch, &options)
        .map_err(|error| store_error(error, mode))
}

/// What RocksDB writes of itself into one file.
const INFO_LOG_BYTES: usize = 4 << 20;

/// The filter of a memtable's keys, as a share of its size.
const MEMTABLE_FILTER: f64 = 0.05;

fn options(tuning: &RocksOptions, create: bool) -> Options {
    let mut table = BlockBasedOptions::default();
    // Its lookups take no lock; the sizes of what it holds it finds out for itself.
    table.set_block_cache(&Cache::new_hyper_clock_cache(tuning.block_cache_bytes, 0));
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
    // Most reads are of keys that no memtable has: without a filter each searches all of them
    // first.
    options.set_memtable_whole_key_filtering(true);
    options.set_memtable_prefix_bloom_ratio(MEMTABLE_FILTER);
    options.set_keep_log_file_num(2);
    // Without a limit the first of them grows for as long as the store is open.
    options.set_max_log_file_size(INFO_LOG_BYTES);
    options.set_stats_dump_period_sec(0);
    options
}

fn open_db(path: &Path, tuning: &RocksOptions, create: bool) -> Result<DB, ApplyError> {
    let db = DB::open(&options(tuning, create), path).map_err(write_error)?;
    lower_compaction_priority();
    Ok(db)
}

/// Looks whether a checkpoint's files are whole, before anything is written to them: what has
/// rotted must not replace what has not.
fn verify(path: &Path, tuning: &RocksOptions) -> Result<(), ApplyError> {
    let db = DB::open_for_read_only(&options(tuning, false), path, false).map_err(write_error)?;
    // RocksDB takes a manifest that ends early for one whose end a crash has torn off, and goes
    // back to what was before.
    let live = db.live_files().map_err(fatal)?;
    let live: BTreeSet<String> = live.into_iter().map(|file| file.name).collect();
    for table in tables(path).map_err(file_error)? {
        if !live.contains(&format!("/{table}")) {
            return Err(fatal(format!("the manifest does not know {table}")));
        }
    }
    let mut reading = ReadOptions::default();
    reading.set_verify_checksums(true);
    reading.fill_cache(false);
    reading.set_readahead_size(READAHEAD_BYTES);
    // Blocks whose keys a range removes would be passed over.
    #[expect(
        deprecated,
        reason = "for speed it is of no use any more, and that is not what it is for here"
    )]
    reading.set_ignore_range_deletions(true);
    let mut entries = db.raw_iterator_opt(reading);
    entries.seek_to_first();
    while entries.valid() {
        entries.next();
    }
    entries.status().map_err(fatal)
}

/// How much compactions give way to the event loops: a third of what those get. Flushes do not: a
/// memtable that waits for one delays the writes behind it and the trimming of the log
/// (docs/adr/0046).
const COMPACTION_NICE: i32 = 5;

/// Sets the priority of the threads that compact. RocksDB itself knows only the lowest, at which
/// they starve while an event loop has work, until level 0 is so full that writes stop.
fn lower_compaction_priority() {
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

/// A read's options: the event loop does not wait for a disk.
fn read_options(mode: Mode) -> ReadOptions {
    let mut options = ReadOptions::default();
    if mode == Mode::NonBlocking {
        options.set_read_tier(ReadTier::BlockCache);
    }
    options
}

impl Kv for RocksKv {
    fn get(&self, key: &[u8], mode: Mode) -> Result<Option<Vec<u8>>, ApplyError> {
        self.shared.with(mode, |db| {
            if let Some(found) = self.write_buffer().tables_for(mode)?.get(key) {
                return Ok(found.map(<[u8]>::to_vec));
            }
            // What leaves the tables from here on is in the database.
            db.get_opt(key, &read_options(mode))
                .map_err(|error| read_error(error, mode))
        })
    }

    fn get_many(
        &self,
        keys: &[Vec<u8>],
        mode: Mode,
        visit: &mut Found<'_>,
    ) -> Result<(), ApplyError> {
        let is_over = self.shared.with(mode, |db| {
            let Some((found, snapshot)) = self.lookup_in_tables(keys, db, mode)? else {
                return Ok(false);
            };
            for (key, found) in keys.iter().zip(found) {
                let goes_on = match found {
                    Some(value) => visit(value.map(Cow::Owned)),
                    None => {
                        let stored = snapshot.get_pinned_opt(key, read_options(mode));
                        let stored = stored.map_err(|error| read_error(error, mode))?;
                        visit(stored.as_deref().map(Cow::Borrowed))
                    }
                };
                if !goes_on {
                    break;
                }
            }
            Ok(true)
        })?;
        match mode {
            _ if is_over => Ok(()),
            Mode::NonBlocking => Err(ApplyError::WouldBlock),
            Mode::Blocking => self.with_snapshot(|snapshot| snapshot.get_many(keys, visit)),
        }
    }

    fn write(
        &self,
        changes: &mut dyn Iterator<Item = Change<'_>>,
        mode: Mode,
    ) -> Result<(), ApplyError> {
        let changes: Vec<Change<'_>> = changes.collect();
        let ranged = |change: &Change<'_>| matches!(change, Change::DeleteRange(..));
        self.write_buffer().wait_for_throttle(mode)?;
        let writing = self.write_buffer().begin(mode)?;
        if !changes.iter().any(ranged) {
            return self.write_buffer().write(&writing, &changes, mode);
        }
        // A hash table knows no ranges.
        if mode == Mode::NonBlocking {
            return Err(ApplyError::WouldBlock);
        }
        self.write_buffer().drain()?;
        let mut batch = WriteBatch::default();
        for change in changes {
            match change {
                Change::Put(key, value) => batch.put(key, value),
                Change::Delete(key) => batch.delete(key),
                Change::DeleteRange(from, to) => batch.delete_range(from, to),
            }
        }
        self.shared
            .with(mode, |db| write(db, batch, mode))
            .inspect_err(|error| {
                // The caller tries again at once.
                if matches!(error, ApplyError::NoSpace(_)) {
                    drop(writing);
                    std::thread::sleep(write_buffer::DISK_FULL_WAIT);
                }
            })
    }

    fn is_behind(&self) -> bool {
        self.write_buffer().is_behind()
    }

    fn scan(
        &self,
        from: &[u8],
        visit: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<(), ApplyError> {
        self.with_snapshot(|snapshot| snapshot.scan(from, visit))
    }

    fn scan_some(
        &self,
        from: &[u8],
        to: &[u8],
        most_gone: Option<u64>,
        visit: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<bool, ApplyError> {
        self.with_snapshot(|snapshot| snapshot.scan_some(from, to, most_gone, visit))
    }

    fn scans_without_blocking(&self) -> bool {
        false
    }

    fn flush(&self) -> Result<bool, ApplyError> {
        self.write_buffer().drain()?;
        let mut options = FlushOptions::default();
        options.set_wait(true);
        self.shared.with(Mode::Blocking, |db| {
            db.flush_opt(&options).map_err(write_error)
        })?;
        Ok(true)
    }

    fn hold(&self) -> Result<Box<dyn View>, ApplyError> {
        self.with_snapshot(|snapshot| Ok(Box::new(snapshot) as Box<dyn View>))
    }

    fn checkpoint(&self, directory: &Path) -> Result<(), ApplyError> {
        let _writing = self.write_buffer().begin(Mode::Blocking)?;
        self.write_buffer().drain()?;
        self.shared.with(Mode::Blocking, |db| {
            Checkpoint::new(&**db)
                .and_then(|checkpoint| checkpoint.create_checkpoint(directory))
                .map_err(fatal)
        })
    }

    fn install(&self, directory: &Path) -> Result<(), ApplyError> {
        let writing = self.write_buffer().begin(Mode::Blocking)?;
        let Some(generation) = (self.shared.guard(Mode::Blocking)?)
            .as_ref()
            .map(|(_, generation)| *generation)
        else {
            return Err(closed());
        };
        let next = generation + 1;
        let target = path_of(&self.directory, next);
        let _ = fs::remove_dir_all(&target);
        let prepare = || -> Result<DB, ApplyError> {
            take_files(directory, &target).map_err(file_error)?;
            verify(&target, &self.options)?;
            // Opened before it counts: a checkpoint that does not open replaces nothing.
            // Nor is an empty one made of it.
            let db = open_db(&target, &self.options, false)?;
            write_draft(&self.directory, next).map_err(file_error)?;
            Ok(db)
        };
        // Reads go on meanwhile.
        let db = prepare().map_err(|error| {
            // Whatever was written of it is in the way.
            discard_draft(&self.directory, next);
            error.into_not_installed()
        })?;
        let mut guard = (self.shared.db.write()).unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = switch(&self.directory) {
            // It is unknown which one a crash would leave: neither is used any more.
            *guard = None;
            return Err(fatal(error));
        }
        self.write_buffer().discard(&writing);
        *guard = Some((Arc::new(db), next));
        remove_others(&self.directory, next);
        Ok(())
    }
}

#[cfg(test)]
mod tests;

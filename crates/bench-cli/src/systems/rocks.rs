//! RocksDB alone, called from the load's own threads. Where its log is synced there is one per
//! operation in flight, as its group commit wants it. Else there is nothing to wait for: a thread
//! per CPU shares the operations, since more only get into each other's way. So many are in flight
//! then, whatever the plan says.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use cyclone_bench::drive::{Done, Job, Lane, Lanes, Outcome, Request, lanes};
use cyclone_bench::plan::{Log, Store, Variant};
use cyclone_bench::system::{Filling, Measured, Running, Scene, Started, System};
use cyclone_bench::workload::{Key, Workload, bytes};
use rocksdb::{
    BlockBasedOptions, Cache, DB, DBCompressionType, Direction, FlushOptions, IteratorMode,
    Options, WriteBatch, WriteOptions,
};

/// A variant of it.
pub struct Rocks {
    log: Log,
    store: Store,
    /// At most.
    threads: usize,
}

impl Rocks {
    /// As the variant says.
    pub fn new(variant: &Variant) -> Rocks {
        let log = variant.log.unwrap_or(Log::None);
        let most = match log {
            Log::None | Log::Wal => std::thread::available_parallelism().map_or(1, usize::from),
            Log::Sync => usize::MAX,
        };
        Rocks {
            log,
            store: variant.store.unwrap_or_default(),
            threads: variant.clients.unwrap_or(most),
        }
    }
}

/// Tuned as the store behind our log is.
pub(crate) fn open(directory: &Path, wal: &Path) -> Result<DB> {
    let mut table = BlockBasedOptions::default();
    table.set_block_cache(&Cache::new_lru_cache(64 << 20));
    table.set_bloom_filter(10.0, false);
    table.set_format_version(5);
    let mut options = Options::default();
    options.create_if_missing(true);
    options.set_block_based_table_factory(&table);
    options.set_compression_type(DBCompressionType::Lz4);
    options.set_write_buffer_size(16 << 20);
    options.set_max_write_buffer_number(4);
    options.set_max_background_jobs(2);
    options.set_max_open_files(-1);
    options.set_wal_dir(wal);
    Ok(DB::open(&options, directory)?)
}

impl System for Rocks {
    fn guarantee(&self) -> String {
        match self.log {
            Log::None => "none: a crash loses it",
            Log::Wal => "written to the kernel: a crash of the machine loses it; one copy",
            Log::Sync => "durable on this disk; one copy",
        }
        .to_owned()
    }

    fn concurrency(&self, inflight: usize) -> usize {
        inflight.min(self.threads)
    }

    fn start(&self, scene: &Scene<'_>) -> Result<Started> {
        let directory = match self.store {
            Store::Disk => &scene.disk,
            Store::Memory => &scene.memory,
        };
        Ok(Started::Running(Box::new(Open {
            db: Arc::new(open(&directory.join("db"), &scene.disk.join("wal"))?),
            log: self.log,
            threads: self.threads,
        })))
    }
}

struct Open {
    db: Arc<DB>,
    log: Log,
    threads: usize,
}

/// Keys per batch while filling.
const FILL: u64 = 100;

impl Running for Open {
    fn preload(&mut self, workload: &Workload, seed: u64, live: &mut Filling<'_>) -> Result<()> {
        let mut sizes = lanes::sizes_to_fill(workload, seed);
        let mut write = WriteOptions::default();
        write.disable_wal(true);
        for first in (0..workload.keys).step_by(FILL as usize) {
            let mut batch = WriteBatch::default();
            for number in first..(first + FILL).min(workload.keys) {
                let key = Key::new(number, workload.key_bytes);
                batch.put(&*key, bytes::value(sizes.length(), number));
            }
            self.db.write_opt(batch, &write)?;
            live(first)?;
        }
        let mut flush = FlushOptions::default();
        flush.set_wait(true);
        Ok(self.db.flush_opt(&flush)?)
    }

    fn measure(&mut self, job: &mut Job<'_>) -> Result<Measured> {
        let mut measured = lanes::run(self, job, &[])?;
        measured.usage.name_own("store and clients");
        Ok(measured)
    }
}

impl Lanes for Open {
    fn lanes(&self, inflight: usize) -> usize {
        inflight.min(self.threads)
    }

    fn open(&self, _number: usize, _share: usize) -> Result<Box<dyn Lane>> {
        let mut write = WriteOptions::default();
        match self.log {
            Log::None => write.disable_wal(true),
            Log::Wal => {}
            Log::Sync => write.set_sync(true),
        }
        Ok(Box::new(Calls {
            db: Arc::clone(&self.db),
            write,
            ended: Vec::new(),
        }))
    }
}

/// Calls wait for their answers, so each is over when it was submitted.
struct Calls {
    db: Arc<DB>,
    write: WriteOptions,
    ended: Vec<u64>,
}

impl Lane for Calls {
    fn submit(&mut self, token: u64, request: Request<'_>) -> Result<()> {
        match request {
            Request::Read(key) => {
                std::hint::black_box(self.db.get_pinned(&*key)?);
            }
            Request::Write([pair]) => self.db.put_opt(&*pair.key, pair.value, &self.write)?,
            Request::Write(pairs) => {
                let mut batch = WriteBatch::default();
                for pair in pairs {
                    batch.put(&*pair.key, pair.value);
                }
                self.db.write_opt(batch, &self.write)?;
            }
            Request::Scan(key, keys) => {
                let from = IteratorMode::From(&key, Direction::Forward);
                for item in self.db.iterator(from).take(keys as usize) {
                    std::hint::black_box(item?);
                }
            }
        }
        self.ended.push(token);
        Ok(())
    }

    fn is_blocking(&self) -> bool {
        true
    }

    fn poll(&mut self, patience: Duration, done: &mut Vec<Done>) -> Result<()> {
        if self.ended.is_empty() {
            std::thread::sleep(patience);
        }
        done.extend(self.ended.drain(..).map(|token| Done {
            token,
            outcome: Outcome::Done,
        }));
        Ok(())
    }
}

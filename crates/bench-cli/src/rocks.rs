//! RocksDB alone in this process, on the same keys and values: what the log costs is the distance
//! to it.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::Result;
use cyclone::signals;

use super::systems::rocks::open;
use super::{Load, Measured, Sequence, histogram};

/// What RocksDB does for durability.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Log {
    /// No write-ahead log.
    None,
    /// A write-ahead log, synced for each group of writes.
    Synced,
}

/// Runs the load with one thread per operation in flight; without a log with a thread per CPU at
/// most: there is nothing to wait for, and more only get into each other's way.
pub fn run(directory: &Path, log: Log, load: &Load) -> Result<Measured> {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = match log {
        Log::None => load.inflight.min(cpus),
        Log::Synced => load.inflight,
    };
    let db = open(directory, directory)?;
    let stop = AtomicBool::new(false);
    let measuring = AtomicBool::new(false);
    let results = std::thread::scope(|scope| -> Result<Vec<_>> {
        let threads: Vec<_> = (0..threads)
            .map(|thread| {
                let (db, stop, measuring) = (&db, &stop, &measuring);
                scope.spawn(move || -> Result<_> {
                    let mut write = rocksdb::WriteOptions::default();
                    match log {
                        Log::None => write.disable_wal(true),
                        Log::Synced => write.set_sync(true),
                    }
                    let mut sequence = Sequence(load.seed ^ ((thread as u64) << 32));
                    let value = load.value();
                    let mut latency_ns = histogram()?;
                    let mut operations = 0u64;
                    while !stop.load(Ordering::Relaxed) {
                        let begun = Instant::now();
                        db.put_opt(sequence.key(), &value, &write)?;
                        if measuring.load(Ordering::Relaxed) {
                            operations += 1;
                            latency_ns.saturating_record(begun.elapsed().as_nanos() as u64);
                        }
                    }
                    Ok((operations, latency_ns))
                })
            })
            .collect();
        let slept = signals::sleep(load.warm_up).and_then(|()| {
            measuring.store(true, Ordering::Relaxed);
            signals::sleep(load.measure)
        });
        stop.store(true, Ordering::Relaxed);
        slept?;
        threads
            .into_iter()
            .map(|thread| {
                thread
                    .join()
                    .map_err(|_| anyhow::anyhow!("a writer panicked"))?
            })
            .collect()
    })?;
    let mut measured = Measured {
        operations: 0,
        elapsed: load.measure,
        latency_ns: histogram()?,
        lost: 0,
    };
    for (operations, latency) in results {
        measured.operations += operations;
        measured.latency_ns.add(&latency)?;
    }
    drop(db);
    std::fs::remove_dir_all(directory)?;
    Ok(measured)
}

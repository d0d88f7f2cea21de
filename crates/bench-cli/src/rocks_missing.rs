//! In place of `rocks.rs` in a program that was built without RocksDB.

use std::path::Path;

use anyhow::{Result, bail};

use super::{Load, Measured};

/// What RocksDB does for durability.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Log {
    /// No write-ahead log.
    None,
    /// A write-ahead log, synced for each group of writes.
    Synced,
}

/// Refuses.
///
/// # Errors
/// Always: there is no RocksDB in this program.
pub fn run(_directory: &Path, _log: Log, _load: &Load) -> Result<Measured> {
    bail!("this program was built without RocksDB (cargo's feature `rocksdb`)")
}

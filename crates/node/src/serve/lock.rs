//! The lock on a data directory: one process uses it at a time, whatever becomes of the log region.

use std::fs::File;
use std::path::Path;

use anyhow::{Context, Result, bail};
use cyclone_pmem::create_private_dir_all;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

/// Locks a data directory for as long as the answer lives.
///
/// # Errors
/// A directory that cannot be opened, or that another process has locked.
pub(crate) fn take(data: &Path) -> Result<File> {
    let open = File::open(data).with_context(|| format!("cannot open {}", data.display()))?;
    match flock(&open, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(open),
        Err(Errno::WOULDBLOCK) => {
            bail!("{} is in use: stop the node first", data.display())
        }
        // Not every file system has locks. The region has another one.
        Err(error) => {
            tracing::warn!(data = %data.display(), %error, "the data directory cannot be locked");
            Ok(open)
        }
    }
}

/// The same for a node that starts, whose directory need not be there yet.
///
/// # Errors
/// As [`take`]; a directory that cannot be made.
pub(crate) fn make_and_take(data: &Path) -> Result<File> {
    create_private_dir_all(data).with_context(|| format!("cannot create {}", data.display()))?;
    take(data)
}

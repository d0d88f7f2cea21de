//! `cyclone bench restart` and `cyclone bench soak-log`: what becomes of a log that is longer than
//! memory, over a restart and over many minutes.

mod restart;
mod soak;

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use anyhow::Result;
use clap::Args;
use cyclone_bench::output::{Common, Report};

/// `cyclone bench restart`.
#[derive(Args, Clone, Debug)]
pub struct Restart {
    /// MiB of log behind the replica.
    #[arg(long, default_value_t = 1024)]
    pub mib: u64,
    /// Bytes of each value.
    #[arg(long, default_value_t = 4096)]
    pub value_bytes: usize,
    /// Where flash and stores lie: on the disk in question.
    #[arg(long, default_value = ".")]
    pub directory: PathBuf,
    /// Shared options.
    #[command(flatten)]
    pub common: Common,
}

/// `cyclone bench soak-log`.
#[derive(Args, Clone, Debug)]
pub struct Soak {
    /// How many minutes: 30 if left out. With --quick a minute is 10 s, and there are 3 if this is
    /// left out.
    #[arg(long)]
    pub minutes: Option<u64>,
    /// Bytes of each value.
    #[arg(long, default_value_t = 512)]
    pub value_bytes: usize,
    /// Writes in flight.
    #[arg(long, default_value_t = 256)]
    pub inflight: usize,
    /// Where flash and stores lie: on the disk in question.
    #[arg(long, default_value = ".")]
    pub directory: PathBuf,
    /// Shared options.
    #[command(flatten)]
    pub common: Common,
}

/// Runs the restarts.
///
/// # Errors
/// When a cluster does not start, or a node does not come back.
pub fn restart(arguments: &Restart, stop: &AtomicBool) -> Result<()> {
    let mut report = Report::new("restart", &arguments.common)?;
    restart::run(arguments, &mut report, stop)?;
    report.finish();
    Ok(())
}

/// Runs the soak.
///
/// # Errors
/// When a cluster does not start, or a write fails.
pub fn soak(arguments: &Soak, stop: &AtomicBool) -> Result<()> {
    let mut report = Report::new("soak-log", &arguments.common)?;
    soak::run(arguments, &mut report, stop)?;
    report.finish();
    Ok(())
}

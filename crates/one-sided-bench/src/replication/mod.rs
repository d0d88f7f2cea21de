//! `replication`: throughput, latency, the backups' CPU time and the modelled write amplification
//! of every protocol; and the promises that compare them.
//!
//! ```text
//!   Options, Case   what is measured                               mod.rs
//!   Stand           one run: backups, senders, metering            runs.rs
//!   grid            every protocol at many sizes                   grid.rs
//!   streams         24 workers × 6 servers, the media charged      streams.rs
//!   pair            two servers that replicate to each other       pair.rs
//! ```
//!
//! Initiators are one pinned thread that drives all workers' senders, as coroutines would; backups
//! are processes on the other CPU. Amplification comes from its own run, so that the model's time
//! is in no figure of speed.

mod grid;
mod pair;
mod runs;
mod streams;

use std::time::Duration;

use anyhow::Result;
use clap::Args;
use cyclone_bench::children::Launcher;
use cyclone_bench::output::{Common, Report};
use cyclone_bench::verdict::Verdict;
use cyclone_replication::Protocol;

use crate::provider::Provider;
use crate::stage::Stage;

/// Options of `replication`.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Shared ones.
    #[command(flatten)]
    pub common: Common,
    /// Only these protocols (default: all).
    #[arg(long, value_delimiter = ',')]
    pub protocol: Vec<Protocol>,
    /// Only these providers (default: shm and libfabric-tcp).
    #[arg(long, value_delimiter = ',')]
    pub provider: Vec<Provider>,
    /// Records in flight per worker.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub window: u16,
    /// Every combination of record size, workers and backups instead of one varied at a time; takes
    /// an hour.
    #[arg(long, conflicts_with = "quick")]
    pub full: bool,
    /// Give initiators a real-time priority, so that other programs do not disturb them; needs the
    /// right to.
    #[arg(long)]
    pub real_time: bool,
    /// Repetitions of every point (default: 3).
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=99))]
    pub repetitions: Option<u16>,
    /// Milliseconds measured per repetition (default: 300; quick 150).
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=60_000))]
    pub measure_ms: Option<u64>,
}

/// One point of the experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Case {
    provider: Provider,
    protocol: Protocol,
    record_bytes: usize,
    workers: u32,
    copies: usize,
}

impl Case {
    /// The point around which the others vary one thing.
    fn is_base(&self) -> bool {
        (self.record_bytes, self.workers, self.copies) == (64, 8, 1)
    }
}

/// The times of a run.
#[derive(Clone, Copy, Debug)]
struct Times {
    warm_up: Duration,
    measure: Duration,
}

struct Experiment<'a> {
    options: &'a Options,
    stage: Stage,
    report: Report,
    times: Times,
}

/// Runs all points, writes CSV and SVG, judges.
pub fn run(options: &Options, launcher: Launcher) -> Result<()> {
    let quick = options.common.quick;
    let measure_ms = options.measure_ms.unwrap_or(if quick { 150 } else { 300 });
    let mut experiment = Experiment {
        options,
        stage: Stage::new(launcher)?,
        report: Report::new("replication", &options.common)?,
        times: Times {
            warm_up: Duration::from_millis(measure_ms.min(100)),
            measure: Duration::from_millis(measure_ms),
        },
    };
    experiment.grid()?;
    if experiment.providers().contains(&Provider::Shm) {
        experiment.many_streams()?;
        experiment.same_cores()?;
    }
    experiment.report.finish();
    Ok(())
}

impl Experiment<'_> {
    fn providers(&self) -> Vec<Provider> {
        let asked = &self.options.provider;
        let wanted = if asked.is_empty() {
            vec![Provider::Shm, Provider::LibfabricTcp]
        } else {
            asked.clone()
        };
        wanted
            .into_iter()
            .filter(|provider| provider.missing().is_none())
            .collect()
    }

    fn protocols(&self) -> Vec<Protocol> {
        let asked = &self.options.protocol;
        let wanted = |protocol: &Protocol| asked.is_empty() || asked.contains(protocol);
        Protocol::ALL.into_iter().filter(wanted).collect()
    }

    fn repetitions(&self) -> usize {
        self.options.repetitions.map_or(3, usize::from)
    }

    /// What becomes of a point that cannot be measured: it is said, and the others go on.
    fn left_out(&self, what: &str, error: &anyhow::Error) -> Result<()> {
        self.stage.launcher().check()?;
        self.report.say(&format!("{what}: left out: {error:#}"));
        Ok(())
    }

    /// A promise about the ratio of two protocols' figures.
    fn ratio(
        &mut self,
        what: &str,
        speeds: &[(Protocol, f64)],
        above: Protocol,
        below: Protocol,
        limit: f64,
    ) {
        match quotient(speeds, above, below) {
            Some(ratio) => self.report.verdict(Verdict::at_least(what, ratio, limit)),
            None => self.report.say(&format!("{what}: not measured")),
        }
    }
}

fn quotient(speeds: &[(Protocol, f64)], above: Protocol, below: Protocol) -> Option<f64> {
    let of = |wanted| speeds.iter().find(|(protocol, _)| *protocol == wanted);
    let ((_, above), (_, below)) = (of(above)?, of(below)?);
    (*below > 0.0).then_some(above / below)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quotient_needs_both_and_something_below() {
        let speeds = [
            (Protocol::Rowan, 3.0),
            (Protocol::Rpc, 2.0),
            (Protocol::Faa, 0.0),
        ];
        let of = |above, below| quotient(&speeds, above, below);
        assert_eq!(of(Protocol::Rowan, Protocol::Rpc), Some(1.5));
        assert_eq!(of(Protocol::Rowan, Protocol::Faa), None);
        assert_eq!(of(Protocol::Rowan, Protocol::Batch), None);
    }
}

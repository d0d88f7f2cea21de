//! What is measured: one trait for Cyclone and all that stands beside it.

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::Result;
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use crate::cpu::Usage;
use crate::drive::Job;
use crate::measure::histogram;
use crate::workload::Workload;

/// A system that can be started, afresh each time.
pub trait System {
    /// What an acknowledged write is, in words, for the table.
    fn guarantee(&self) -> String;

    /// Operations that are in flight at once where so many are asked for.
    fn concurrency(&self, inflight: usize) -> usize {
        inflight
    }

    /// Its version; empty for what comes with this program, or if it cannot be found out.
    fn version(&self) -> String {
        String::new()
    }

    /// Starts it.
    ///
    /// # Errors
    /// When it is there and does not start.
    fn start(&self, scene: &Scene<'_>) -> Result<Started>;
}

/// Where a system is started.
pub struct Scene<'a> {
    /// An empty directory on the disk for its data.
    pub disk: PathBuf,
    /// An empty directory in memory.
    pub memory: PathBuf,
    /// What it will be asked.
    pub workload: &'a Workload,
    /// Ends everything early.
    pub stop: &'a AtomicBool,
}

/// What became of a start.
pub enum Started {
    /// It runs.
    Running(Box<dyn Running>),
    /// It cannot be measured here.
    Skipped {
        /// Why.
        why: String,
        /// The command that changes this; empty if none does.
        install: String,
    },
}

/// A system that runs; dropping it ends it.
pub trait Running {
    /// Writes every key of the workload once; `live` hears often how many are there.
    ///
    /// # Errors
    /// What the system says, and what `live` answers.
    fn preload(&mut self, workload: &Workload, seed: u64, live: &mut Filling<'_>) -> Result<()>;

    /// Puts load on it.
    ///
    /// # Errors
    /// What the system says.
    fn measure(&mut self, job: &mut Job<'_>) -> Result<Measured>;

    /// Something that kills the process that leads, with SIGKILL; `None` where nothing leads.
    fn assassin(&self) -> Option<Assassin> {
        None
    }

    /// After an assassination: starts what was killed again and waits until all is well.
    ///
    /// # Errors
    /// When it does not come back.
    fn revive(&mut self) -> Result<()> {
        Ok(())
    }
}

/// Hears how many keys have been written; an error ends the filling.
pub type Filling<'a> = dyn FnMut(u64) -> Result<()> + 'a;

/// Kills the leader when it is called.
pub type Assassin = Box<dyn FnMut() -> Result<()>>;

/// What a measurement saw.
#[derive(Clone, Debug)]
pub struct Measured {
    /// Operations that ended within the measured time.
    pub operations: u64,
    /// Operations that began, or were due, within the measured time and were refused.
    pub refused: u64,
    /// Those that never ended, or whose fate is unknown.
    pub unfinished: u64,
    /// The measured time.
    pub elapsed: Duration,
    /// Latency of operations that began, or were due, within the measured time; not of refused
    /// ones.
    pub latency_ns: Histogram<u64>,
    /// In the open loop, how long after it was due an operation began, as the median, µs: what the
    /// load's own side adds.
    pub late_us: f64,
    /// CPU time of the measured time.
    pub usage: Usage,
    /// When each operation ended, ns since the beginning (warm-up included), ascending; if asked
    /// for.
    pub ends_ns: Vec<u64>,
}

impl Measured {
    /// Operations per second.
    pub fn per_second(&self) -> f64 {
        self.operations as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }
}

/// What a measurement counted, on its way from another process.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Counted {
    operations: u64,
    refused: u64,
    unfinished: u64,
    /// Latencies in nanoseconds, and how often each.
    latencies: Vec<(u64, u64)>,
    /// Operations of a trace that were begun, before and after the measured time too; from programs
    /// that do a trace.
    pub begun: u64,
    /// As [`Measured::late_us`].
    late_us: f64,
}

impl Counted {
    /// Of a measurement in this process.
    pub fn of(measured: &Measured) -> Counted {
        let latencies = measured.latency_ns.iter_recorded();
        Counted {
            operations: measured.operations,
            refused: measured.refused,
            unfinished: measured.unfinished,
            latencies: latencies
                .map(|value| (value.value_iterated_to(), value.count_at_value()))
                .collect(),
            begun: 0,
            late_us: measured.late_us,
        }
    }

    /// As if it had been measured here.
    pub fn measured(self, elapsed: Duration, usage: Usage) -> Result<Measured> {
        let mut latency_ns = histogram()?;
        for (ns, times) in self.latencies {
            latency_ns.saturating_record_n(ns.max(1), times);
        }
        Ok(Measured {
            operations: self.operations,
            refused: self.refused,
            unfinished: self.unfinished,
            elapsed,
            latency_ns,
            late_us: self.late_us,
            usage,
            ends_ns: Vec::new(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_measurement_comes_over_whole() {
        let mut latency_ns = histogram().expect("a histogram");
        for ns in (1..2000u64).map(|step| step * step) {
            latency_ns.record(ns).expect("in range");
        }
        let measured = Measured {
            operations: 1999,
            refused: 2,
            unfinished: 3,
            elapsed: Duration::from_secs(1),
            latency_ns,
            late_us: 4.5,
            usage: Usage::default(),
            ends_ns: Vec::new(),
        };
        let text = serde_json::to_string(&Counted::of(&measured)).expect("text");
        let counted: Counted = serde_json::from_str(&text).expect("the same");
        let again = counted
            .measured(measured.elapsed, Usage::default())
            .expect("a measurement");
        assert_eq!(again.latency_ns, measured.latency_ns);
        assert_eq!(again.late_us, measured.late_us);
        assert_eq!(
            (again.operations, again.refused, again.unfinished),
            (1999, 2, 3)
        );
    }
}

//! A plan's load on one of the lab's machines: a whole measurement in its own process there, which
//! says as JSON, a line each, how it goes and what came out.

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::Result;
use cyclone_bench::cpu::{Process, Usage};
use cyclone_bench::drive::{Job, Lane, Lanes, Pace, lanes};
use cyclone_bench::system::Counted;
use cyclone_bench::workload::{Inserts, Workload};
use cyclone_wire::client::ReadMode;
use serde::{Deserialize, Serialize};

use super::child::{Reach, answer, client};
use crate::systems::native::NativeLane;

/// A measurement.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Drive {
    /// The cluster.
    pub reach: Reach,
    /// What is done.
    pub workload: Workload,
    /// When operations begin.
    pub pace: Pace,
    /// Operations in flight.
    pub inflight: usize,
    /// Time before measuring, ms.
    pub warm_up_ms: u64,
    /// Time measured, ms.
    pub measure_ms: u64,
    /// Time to wait for the last ones, ms.
    pub drain_ms: u64,
    /// Of the operations.
    pub seed: u64,
    /// Whose CPU time counts; the process's own is added as the clients'.
    pub processes: Vec<Process>,
}

/// What it says.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Said {
    /// Operations so far, and ms since the beginning.
    Live(u64, u64),
    /// The end.
    Measured(Counted, Usage),
}

/// One client.
struct Client<'a>(&'a Reach);

impl Lanes for Client<'_> {
    fn lanes(&self, _inflight: usize) -> usize {
        1
    }

    fn open(&self, _number: usize, share: usize) -> Result<Box<dyn Lane>> {
        let mut client = client(self.0, share)?;
        // The first answer comes when there is a leader.
        client.put(b"hello", b"there")?;
        Ok(Box::new(NativeLane::new(client, ReadMode::Index)))
    }
}

/// Runs it.
pub(super) fn run(drive: &Drive) -> Result<()> {
    let stop = AtomicBool::new(false);
    let mut job = Job {
        workload: &drive.workload,
        pace: drive.pace,
        inflight: drive.inflight,
        warm_up: Duration::from_millis(drive.warm_up_ms),
        measure: Duration::from_millis(drive.measure_ms),
        drain: Duration::from_millis(drive.drain_ms),
        seed: drive.seed,
        inserts: &Inserts::after(drive.workload.keys),
        track: false,
        event: None,
        stop: &stop,
        live: &mut |done, elapsed| {
            // The parent may be gone; then this process is killed.
            let _ = answer(&Said::Live(done, elapsed.as_millis() as u64));
        },
    };
    let measured = lanes::run(&Client(&drive.reach), &mut job, &drive.processes)?;
    let usage = measured.usage.clone();
    answer(&Said::Measured(Counted::of(&measured), usage))
}

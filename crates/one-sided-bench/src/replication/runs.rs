//! One run: backups in separate processes, all workers of some servers in this one.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use cyclone_bench::children::Initiator;
use cyclone_bench::measure::Percentiles;
use cyclone_pmem::media::{MediaParameters, MediaStats};
use cyclone_replication::{BackupId, Protocol};

use super::{Case, Experiment, Times};
use crate::child::senders;
use crate::load::{self, Load, Measured, RunEvent};
use crate::metered::{Devices, LocalStores, Metered};
use crate::stage::INITIATOR_CPU;

/// What one run of a case gave.
pub(super) struct Outcome {
    pub(super) records_s: f64,
    pub(super) latency: Percentiles,
    /// CPU seconds of all backups in the measured time, and that time in seconds.
    pub(super) cpu_s: f64,
    pub(super) elapsed_s: f64,
    pub(super) records: u64,
    /// Part of the time in which others had the initiator's CPU.
    pub(super) disturbed: f64,
}

impl Outcome {
    fn of(measured: &Measured, cpu_s: f64) -> Outcome {
        Outcome {
            records_s: measured.records_s(),
            latency: Percentiles::of(&measured.latency_ns),
            cpu_s,
            elapsed_s: measured.elapsed.as_secs_f64(),
            records: measured.records,
            disturbed: measured.disturbed,
        }
    }

    /// The backups' CPU seconds per million records.
    pub(super) fn cpu_per_million(&self) -> f64 {
        self.cpu_s / self.records.max(1) as f64 * 1e6
    }

    /// The backups' CPU time as a part of the run's, in per cent; of all together.
    pub(super) fn cpu_percent(&self) -> f64 {
        self.cpu_s / self.elapsed_s * 100.0
    }
}

/// How a run shows its stores to the model.
#[derive(Clone, Copy, Debug)]
pub(super) struct Metering {
    pub(super) parameters: MediaParameters,
    pub(super) charged: bool,
    pub(super) local: LocalStores,
}

impl Metering {
    /// The default device, no time charged, no other load.
    pub(super) fn plain() -> Metering {
        Metering {
            parameters: MediaParameters::default(),
            charged: false,
            local: LocalStores::NONE,
        }
    }
}

/// Which senders there are: workers of how many servers, with how much in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct Crowd {
    pub(super) servers: u32,
    pub(super) window: usize,
}

impl Experiment<'_> {
    /// The crowd of most points: one server's workers.
    pub(super) fn crowd(&self) -> Crowd {
        Crowd {
            servers: 1,
            window: usize::from(self.options.window),
        }
    }

    pub(super) fn run_case(
        &mut self,
        case: Case,
        crowd: Crowd,
        times: Times,
        metering: Option<Metering>,
    ) -> Result<(Outcome, MediaStats)> {
        let outcome = self.run_once(case, crowd, times, metering);
        self.stage.clear();
        outcome
    }

    fn run_once(
        &mut self,
        case: Case,
        crowd: Crowd,
        times: Times,
        metering: Option<Metering>,
    ) -> Result<(Outcome, MediaStats)> {
        let (provider, protocol) = (case.provider, case.protocol);
        let lanes = case.workers * crowd.servers;
        let stage = &mut self.stage;
        let backups = stage.backups(provider, protocol, case.copies, lanes, false)?;
        let place = stage.place(provider, INITIATOR_CPU);
        let addresses = backups.iter().map(|(_, address)| address.clone());
        let load = Load {
            record_bytes: case.record_bytes,
            window: crowd.window,
            warm_up: times.warm_up,
            measure: times.measure,
            pace: None,
            seed: self.options.common.seed,
            backups: (0..).map(BackupId).zip(addresses).collect(),
        };
        let devices = metering.map(|metering| devices(protocol, &metering));
        let devices = devices.transpose()?;
        let stats = || devices.as_ref().map_or(Default::default(), |of| of.stats());
        let cpu = || -> Duration { backups.iter().map(|(kid, _)| kid.cpu()).sum() };
        let stop = Arc::clone(stage.launcher().stop());
        let _initiator = Initiator::on(INITIATOR_CPU, self.options.real_time)?;
        let servers: Vec<u32> = (0..crowd.servers).collect();
        let senders = senders(
            protocol,
            &place,
            &servers,
            case.workers,
            crowd.window,
            |inner| match &devices {
                Some(devices) => Box::new(Metered::new(inner, Arc::clone(devices))),
                None => inner,
            },
        )?;
        let mut spent = [Duration::ZERO; 2];
        let mut media = [MediaStats::default(); 2];
        let measured = load::run(senders, &load, &stop, &mut |moment| {
            let at = match moment {
                RunEvent::Begin => 0,
                RunEvent::End => 1,
                RunEvent::Round => return,
            };
            (spent[at], media[at]) = (cpu(), stats());
        })?;
        let cpu_s = spent[1].saturating_sub(spent[0]).as_secs_f64();
        Ok((Outcome::of(&measured, cpu_s), media[1].since(&media[0])))
    }
}

fn devices(protocol: Protocol, metering: &Metering) -> Result<Arc<Devices>> {
    Devices::new(
        metering.parameters,
        protocol,
        metering.charged,
        metering.local,
    )
}

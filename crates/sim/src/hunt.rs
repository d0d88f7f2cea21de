//! Many runs: fresh seeds one after the other, totals, and for a failure the smallest plan that still shows it.

use std::path::Path;
use std::time::{Duration, Instant};

use cyclone_replica::Durability;

use crate::plan::{Kind, Plan, Struck};
use crate::run::run;
use crate::world::{Failure, Report};

/// What a run may be changed in, so that a failure can be repeated and made smaller.
#[derive(Clone, Debug, Default)]
pub struct Changes {
    /// Faults switched off.
    pub without: Vec<Kind>,
    /// Shorter rough times, in ms of simulated time.
    pub duration_ms: Option<u64>,
    /// Fewer clients.
    pub clients: Option<u64>,
    /// Another number of logs.
    pub logs: Option<u16>,
    /// Flash in every plan.
    pub flash: Option<Durability>,
    /// Members that change in every plan.
    pub members: bool,
}

impl Changes {
    /// The seed's plan, changed.
    pub fn plan(&self, seed: u64) -> Plan {
        let mut plan = Plan::draw(seed);
        if let Some(logs) = self.logs {
            // The images are of one log.
            plan.old_format &= logs == 1;
            plan.with_logs(logs);
        }
        if let Some(durability) = self.flash {
            plan = plan.with_flash(durability);
        }
        if self.members {
            plan = plan.with_members();
        }
        let without = self.without.iter();
        let mut plan = without.fold(plan, |plan, &kind| plan.without(kind));
        if let Some(duration_ms) = self.duration_ms {
            plan.duration_us = plan.duration_us.min(duration_ms * 1000);
        }
        if let Some(clients) = self.clients {
            plan.clients = plan.clients.min(clients);
        }
        plan
    }

    /// The command line that repeats a run.
    pub fn command(&self, seed: u64, planted: Option<&str>) -> String {
        // As this program was called: it is not where a shell looks for programs.
        let program = std::env::args().next();
        let program = program.as_deref().unwrap_or("cyclone-sim");
        let mut words = vec![format!("{program} run --seed {seed}")];
        if !self.without.is_empty() {
            let names: Vec<_> = self.without.iter().map(|kind| kind.name()).collect();
            words.push(format!("--without {}", names.join(",")));
        }
        words.extend(self.duration_ms.map(|ms| format!("--duration-ms {ms}")));
        words.extend(self.clients.map(|clients| format!("--clients {clients}")));
        words.extend(self.logs.map(|logs| format!("--logs {logs}")));
        let flash = self.flash.map(Durability::name);
        words.extend(flash.map(|flash| format!("--flash {flash}")));
        words.extend(self.members.then(|| "--members".to_owned()));
        words.extend(planted.map(|bug| format!("--planted {bug}")));
        words.join(" ")
    }
}

/// Totals over runs.
#[derive(Clone, Debug, Default)]
pub struct Totals {
    /// Runs.
    pub runs: u64,
    /// Sums of the runs' reports.
    pub report: Report,
    /// CPU time of this thread, s.
    pub cpu_s: f64,
}

impl Totals {
    fn add(&mut self, report: &Report) {
        self.runs += 1;
        let sum = &mut self.report;
        sum.simulated_us += report.simulated_us;
        sum.answered += report.answered;
        sum.operations += report.operations;
        sum.committed += report.committed;
        sum.checks += report.checks;
        sum.datagrams += report.datagrams;
        sum.undecided += report.undecided;
        sum.struck.merge(&report.struck);
    }

    /// Simulated time over CPU time.
    pub fn speed(&self) -> f64 {
        self.report.simulated_us as f64 / 1e6 / self.cpu_s.max(1e-9)
    }

    /// Faults by kind.
    pub fn struck(&self) -> &Struck {
        &self.report.struck
    }
}

/// CPU time that this thread has used, in seconds.
pub fn cpu_s() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Which seeds to run.
#[derive(Clone, Copy, Debug)]
pub struct Range {
    /// The first seed.
    pub first: u64,
    /// How many at most.
    pub count: u64,
    /// How long at most.
    pub time: Option<Duration>,
}

/// Runs seeds until one fails, all are done, or the time is over.
pub fn hunt(
    range: Range,
    changes: &Changes,
    root: &Path,
    mut progress: impl FnMut(&Totals),
) -> (Totals, Option<(u64, Failure)>) {
    let mut totals = Totals::default();
    let (begun, cpu) = (Instant::now(), cpu_s());
    for seed in (0..range.count).map(|step| range.first.wrapping_add(step)) {
        if range.time.is_some_and(|time| begun.elapsed() >= time) {
            break;
        }
        let outcome = run(&changes.plan(seed), root, false);
        totals.cpu_s = cpu_s() - cpu;
        match outcome {
            Ok(report) => totals.add(&report),
            Err(failure) => {
                totals.runs += 1;
                return (totals, Some((seed, failure)));
            }
        }
        progress(&totals);
    }
    (totals, None)
}

/// Makes a failing run smaller: ends it where it failed, then leaves out one thing after another as long as it still
/// fails.
pub fn minimise(seed: u64, failure: &Failure, from: &Changes, root: &Path) -> (Changes, Failure) {
    let mut best = from.clone();
    let mut shown = Failure {
        at_us: failure.at_us,
        what: failure.what.clone(),
    };
    let attempt = |changes: Changes, best: &mut Changes, shown: &mut Failure| {
        let fails = run(&changes.plan(seed), root, false).err();
        if let Some(failure) = fails {
            (*best, *shown) = (changes, failure);
            return true;
        }
        false
    };
    let mut shorter = best.clone();
    shorter.duration_ms = Some(failure.at_us / 1000 + 1);
    attempt(shorter, &mut best, &mut shown);
    for &kind in Kind::ALL {
        if best.plan(seed).has(kind) {
            let mut without = best.clone();
            without.without.push(kind);
            attempt(without, &mut best, &mut shown);
        }
    }
    for clients in [1, 2, 4] {
        let mut fewer = best.clone();
        fewer.clients = Some(clients);
        if best.plan(seed).clients > clients && attempt(fewer, &mut best, &mut shown) {
            break;
        }
    }
    for _ in 0..12 {
        let mut shorter = best.clone();
        let now_ms = best.plan(seed).duration_us / 1000;
        shorter.duration_ms = Some(now_ms * 3 / 4);
        if !attempt(shorter, &mut best, &mut shown) {
            break;
        }
    }
    (best, shown)
}

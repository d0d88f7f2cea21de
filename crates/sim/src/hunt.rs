//! Many runs: fresh seeds one after the other, totals, and for a failure the smallest plan that
//! still shows it.

use std::path::Path;
use std::time::{Duration, Instant};

use cyclone_replica::Durability;

use crate::ddmin::ddmin;
use crate::plan::{FaultCounts, FaultSchedule, Kind, Plan};
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
    /// A loop for each log in every plan.
    pub own_loops: bool,
    /// Lulls in every plan.
    pub lulls: bool,
    /// Storage that is replaced in every plan.
    pub storage_faults: bool,
    /// Only these strikes.
    pub strikes: Option<FaultSchedule>,
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
        if self.storage_faults {
            plan = plan.with_storage_faults();
        }
        plan.own_loops |= self.own_loops;
        if self.lulls {
            plan.draw_lull();
        }
        let without = self.without.iter();
        let mut plan = without.fold(plan, |plan, &kind| plan.without(kind));
        if let Some(duration_ms) = self.duration_ms {
            plan.duration_us = plan.duration_us.min(duration_ms * 1000);
        }
        if let Some(clients) = self.clients {
            plan.clients = plan.clients.min(clients);
        }
        plan.strikes.clone_from(&self.strikes);
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
        words.extend(self.own_loops.then(|| "--own-loops".to_owned()));
        words.extend(self.lulls.then(|| "--lulls".to_owned()));
        words.extend(self.storage_faults.then(|| "--storage-faults".to_owned()));
        let strikes = self.strikes.iter();
        words.extend(strikes.map(|strikes| format!("--strikes {strikes}")));
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
    pub fn struck(&self) -> &FaultCounts {
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

/// A failing run, smaller and smaller.
struct Smallest<'a> {
    seed: u64,
    root: &'a Path,
    until: Instant,
    best: Changes,
    shown: Failure,
}

impl Smallest<'_> {
    /// Runs with other changes, and keeps them if it still fails.
    fn attempt(&mut self, changes: Changes) -> bool {
        if Instant::now() >= self.until {
            return false;
        }
        match run(&changes.plan(self.seed), self.root, false) {
            Err(failure) => {
                (self.best, self.shown) = (changes, failure);
                true
            }
            Ok(_) => false,
        }
    }

    fn plan(&self) -> Plan {
        self.best.plan(self.seed)
    }

    /// Ends the rough times where it failed.
    fn end_there(&mut self) {
        let mut shorter = self.best.clone();
        shorter.duration_ms = Some(self.shown.at_us / 1000 + 1);
        self.attempt(shorter);
    }

    fn fewer_kinds(&mut self) {
        for &kind in Kind::ALL {
            if self.plan().has(kind) {
                let mut without = self.best.clone();
                without.without.push(kind);
                self.attempt(without);
            }
        }
    }

    fn fewer_clients(&mut self) {
        for clients in [1, 2, 4] {
            let mut fewer = self.best.clone();
            fewer.clients = Some(clients);
            if self.plan().clients > clients && self.attempt(fewer) {
                break;
            }
        }
    }

    fn shorter(&mut self) {
        for _ in 0..12 {
            let mut shorter = self.best.clone();
            shorter.duration_ms = Some(self.plan().duration_us / 1000 * 3 / 4);
            if !self.attempt(shorter) {
                break;
            }
        }
    }

    fn fewer_strikes(&mut self) {
        let all: Vec<u64> = (0..self.shown.strikes).collect();
        ddmin(&all, |kept| {
            let mut fewer = self.best.clone();
            fewer.strikes = Some(FaultSchedule(kept.iter().copied().collect()));
            self.attempt(fewer)
        });
    }
}

/// Makes a failing run smaller: ends it where it failed, then leaves out one thing after another as
/// long as it still fails, kinds of faults first and single strikes last. Begins nothing any more
/// after `time`.
pub fn minimise(
    seed: u64,
    failure: Failure,
    from: &Changes,
    root: &Path,
    time: Duration,
) -> (Changes, Failure) {
    let mut smallest = Smallest {
        seed,
        root,
        until: Instant::now() + time,
        best: from.clone(),
        shown: failure,
    };
    smallest.end_there();
    smallest.fewer_kinds();
    smallest.fewer_clients();
    smallest.shorter();
    smallest.fewer_strikes();
    smallest.end_there();
    (smallest.best, smallest.shown)
}

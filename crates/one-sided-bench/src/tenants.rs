//! `tenants`: replication while other tenants' processes burn the backups' CPU, ten processes per
//! core.
//!
//! The setting is that of hyperloop §6.2, what is replicated is not: these are raw records, without
//! a store. HyperLoop's figure 11 shows YCSB A on replicated RocksDB, which nothing here measures.
//!
//! Records arrive at a fixed rate whatever has become of the earlier ones, and latency counts from
//! their arrival: a backup that sleeps through its turn delays all that arrive meanwhile, not only
//! the one that waits for it.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;
use cyclone_bench::children::{Initiator, Launcher};
use cyclone_bench::measure::{Percentiles, Spread, interleaved, tries, undisturbed};
use cyclone_bench::output::{Common, Report};
use cyclone_bench::plot::{self, Bars};
use cyclone_bench::table::{Table, rounded};
use cyclone_bench::verdict::Verdict;
use cyclone_replication::{BackupId, Protocol};

use crate::child::senders;
use crate::load::{self, Load};
use crate::provider::Provider;
use crate::stage::{INITIATOR_CPU, Stage, backup_cpu};

/// Records that may be in flight at once.
const WINDOW: usize = 256;
/// How much lower p99 must be than that of backups that sleep until a message comes.
const LOWER: f64 = 5.0;

/// Options of `tenants`.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Shared ones.
    #[command(flatten)]
    pub common: Common,
    /// Only these protocols (default: all).
    #[arg(long, value_delimiter = ',')]
    pub protocol: Vec<Protocol>,
    /// What carries the operations.
    #[arg(long, default_value = "shm")]
    pub provider: Provider,
    /// Backups, all on one CPU.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=8))]
    pub copies: u16,
    /// Processes on that CPU, the backups included.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub processes: u16,
    /// Bytes of each record.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=16_384))]
    pub bytes: u16,
    /// Records per second.
    #[arg(long, default_value_t = 5000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub rate: u32,
    /// Give initiators a real-time priority, so that other programs do not disturb them; needs the
    /// right to.
    #[arg(long)]
    pub real_time: bool,
    /// Repetitions of every point (default: 3).
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=99))]
    pub repetitions: Option<u16>,
    /// Milliseconds measured per repetition (default: 2000; quick 500).
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=60_000))]
    pub measure_ms: Option<u64>,
}

/// A protocol, and how its backups' programs wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Variant {
    protocol: Protocol,
    polling: bool,
}

impl Variant {
    fn name(self) -> String {
        match (self.protocol, self.polling) {
            (Protocol::Rpc, false) => "rpc-event".to_owned(),
            (Protocol::Rpc, true) => "rpc-polling".to_owned(),
            (protocol, _) => protocol.name().to_owned(),
        }
    }
}

fn variants(options: &Options) -> Vec<Variant> {
    let asked = &options.protocol;
    let wanted = |protocol: &Protocol| asked.is_empty() || asked.contains(protocol);
    let mut variants = Vec::new();
    for protocol in Protocol::ALL.into_iter().filter(wanted) {
        variants.push(Variant {
            protocol,
            polling: false,
        });
        if protocol == Protocol::Rpc {
            variants.push(Variant {
                protocol,
                polling: true,
            });
        }
    }
    variants
}

/// What one run gave.
struct Found {
    latency: Percentiles,
    records_s: f64,
    /// Part of the time in which others had the initiator's CPU.
    disturbed: f64,
}

/// The columns of `tenants.csv`.
pub(crate) const COLUMNS: [&str; 11] = [
    "load",
    "protocol",
    "p50_us",
    "p95_us",
    "p99_us",
    "p99_least",
    "p99_most",
    "p999_us",
    "records_s",
    "repetitions",
    "disturbed_percent",
];

/// One point: with hogs or without.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Point {
    variant: Variant,
    hogs: usize,
}

/// Runs all points, writes CSV and SVG, judges.
pub fn run(options: &Options, launcher: Launcher) -> Result<()> {
    let mut report = Report::new("tenants", &options.common)?;
    if let Some(why) = options.provider.missing() {
        bail!("{}: {why}", options.provider.name());
    }
    if backup_cpu() == INITIATOR_CPU {
        report.say(
            "this machine has one CPU: initiators share it with the hogs, and figures mean little",
        );
    }
    let hogs = usize::from(options.processes.saturating_sub(options.copies));
    report.say(&format!(
        "initiator on CPU {INITIATOR_CPU}; {} backups and {hogs} hogs on CPU {}; {} B records arrive {} times a second",
        options.copies,
        backup_cpu(),
        options.bytes,
        options.rate
    ));
    let mut stage = Stage::new(launcher)?;
    let mut points = Vec::new();
    for variant in variants(options) {
        points.extend([0, hogs].map(|hogs| Point { variant, hogs }));
    }
    let repetitions = options.repetitions.map_or(3, usize::from);
    report.expect(points.len() * repetitions);
    let budget = report.budget();
    let is_over = |_| budget.is_over();
    let name = |point: &Point| format!("{}, {} hogs", point.variant.name(), point.hogs);
    let results = interleaved(&points, repetitions, is_over, |point, _| {
        let what = name(point);
        report.progress(&what);
        match undisturbed(
            tries(options.common.quick),
            |found: &Found| found.disturbed,
            || measure(&mut stage, options, *point),
        ) {
            Ok(found) => Ok(Some(found)),
            Err(error) => {
                stage.launcher().check()?;
                report.say(&format!("{what}: left out: {error:#}"));
                Ok(None)
            }
        }
    })?;
    report.names_left_out(&points, &results, name);
    let rows: Vec<(Point, Vec<Found>)> = points
        .into_iter()
        .zip(results)
        .map(|(point, runs)| (point, runs.into_iter().flatten().collect()))
        .filter(|(_, runs): &(_, Vec<Found>)| !runs.is_empty())
        .collect();
    tell(&report, &rows)?;
    if options.copies > 1 {
        report.say(
            "rpc-polling's backups spin as separate processes on one CPU: they wait for each \
             other's time slices even without hogs, as polling tenants that share a core do",
        );
    }
    judge(&mut report, &rows);
    report.finish();
    Ok(())
}

fn measure(stage: &mut Stage, options: &Options, point: Point) -> Result<Found> {
    let measured = measure_once(stage, options, point);
    stage.clear();
    measured
}

fn measure_once(stage: &mut Stage, options: &Options, point: Point) -> Result<Found> {
    let Variant { protocol, polling } = point.variant;
    let copies = usize::from(options.copies);
    let backups = stage.backups(options.provider, protocol, copies, 1, polling)?;
    let _hogs = stage.hogs(backup_cpu(), point.hogs)?;
    let place = stage.place(options.provider, INITIATOR_CPU);
    let quick = options.common.quick;
    let ms = options.measure_ms.unwrap_or(if quick { 500 } else { 2000 });
    let addresses = backups.iter().map(|(_, address)| address.clone());
    let load = Load {
        record_bytes: usize::from(options.bytes),
        window: WINDOW,
        warm_up: Duration::from_millis(ms.min(200)),
        measure: Duration::from_millis(ms),
        pace: Some(Duration::from_secs(1) / options.rate.max(1)),
        seed: options.common.seed,
        backups: (0..).map(BackupId).zip(addresses).collect(),
    };
    let stop = Arc::clone(stage.launcher().stop());
    let _initiator = Initiator::on(INITIATOR_CPU, options.real_time)?;
    let senders = senders(protocol, &place, &[0], 1, WINDOW, |inner| inner)?;
    let measured = load::run(senders, &load, &stop, &mut |_| {})?;
    Ok(Found {
        latency: Percentiles::of(&measured.latency_ns),
        records_s: measured.records_s(),
        disturbed: measured.disturbed,
    })
}

fn load_name(hogs: usize) -> &'static str {
    if hogs > 0 { "hogs" } else { "idle" }
}

fn spread(runs: &[Found], of: impl Fn(&Percentiles) -> f64) -> Spread {
    Spread::of(runs.iter().map(|run| of(&run.latency)))
}

fn tell(report: &Report, rows: &[(Point, Vec<Found>)]) -> Result<()> {
    let mut table = Table::new(&COLUMNS);
    for (point, runs) in rows {
        let p99 = spread(runs, |of| of.p99_us);
        let speed = Spread::of(runs.iter().map(|run| run.records_s));
        table.add(vec![
            load_name(point.hogs).into(),
            point.variant.name().into(),
            rounded(spread(runs, |of| of.p50_us).median, 2),
            rounded(spread(runs, |of| of.p95_us).median, 2),
            rounded(p99.median, 2),
            rounded(p99.least, 2),
            rounded(p99.most, 2),
            rounded(spread(runs, |of| of.p999_us).median, 2),
            rounded(speed.median, 0),
            runs.len().into(),
            rounded(
                100.0 * Spread::of(runs.iter().map(|run| run.disturbed)).median,
                2,
            ),
        ]);
    }
    report.table("tenants", &table)?;
    let panels = [panel(rows, false), panel(rows, true)];
    report.file("tenants.svg", |path| {
        let title = "Latency beside other tenants on the backups' CPU";
        plot::bars(path, title, 1, &panels)
    })
}

/// A percentile and its name.
type View = (&'static str, fn(&Percentiles) -> f64);

fn panel(rows: &[(Point, Vec<Found>)], has_hogs: bool) -> Bars {
    let rows = || {
        rows.iter()
            .filter(move |(point, _)| (point.hogs > 0) == has_hogs)
    };
    let views: [View; 4] = [
        ("p50", |of| of.p50_us),
        ("p95", |of| of.p95_us),
        ("p99", |of| of.p99_us),
        ("p99.9", |of| of.p999_us),
    ];
    Bars {
        title: match has_hogs {
            true => "with hogs",
            false => "backups alone on their CPU",
        }
        .to_owned(),
        y: "µs".to_owned(),
        log_y: true,
        names: rows().map(|(point, _)| point.variant.name()).collect(),
        groups: views
            .iter()
            .map(|(name, of)| {
                let values = rows().map(|(_, runs)| Some(spread(runs, of).median));
                ((*name).to_owned(), values.collect())
            })
            .collect(),
    }
}

fn judge(report: &mut Report, rows: &[(Point, Vec<Found>)]) {
    let loaded = rows.iter().filter(|(point, _)| point.hogs > 0);
    let p99: Vec<(Variant, f64)> = loaded
        .map(|(point, runs)| (point.variant, spread(runs, |of| of.p99_us).median))
        .collect();
    let verdicts = verdicts(&p99);
    if verdicts.is_empty() {
        report.say("p99 against rpc-event's: not measured");
    }
    for verdict in verdicts {
        report.verdict(verdict);
    }
}

fn verdicts(p99: &[(Variant, f64)]) -> Vec<Verdict> {
    let is_event = |variant: &Variant| variant.protocol == Protocol::Rpc && !variant.polling;
    let Some((_, event)) = p99.iter().find(|(variant, _)| is_event(variant)) else {
        return Vec::new();
    };
    let one_sided = p99
        .iter()
        .filter(|(variant, _)| variant.protocol != Protocol::Rpc);
    one_sided
        .map(|(variant, p99)| {
            let what = format!("beside hogs: rpc-event's p99 ÷ {}'s", variant.name());
            Verdict::at_least(what, event / p99.max(0.001), LOWER)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(protocol: Protocol, polling: bool, p99_us: f64) -> (Variant, f64) {
        (Variant { protocol, polling }, p99_us)
    }

    #[test]
    fn one_sided_protocols_are_judged_against_rpc_that_sleeps() {
        let polling = of(Protocol::Rpc, true, 9.0);
        let rowan = of(Protocol::Rowan, false, 10.0);
        assert!(verdicts(&[polling, rowan]).is_empty());
        let all = [
            polling,
            of(Protocol::Rpc, false, 60.0),
            rowan,
            of(Protocol::Faa, false, 20.0),
        ];
        let verdicts = verdicts(&all);
        let kept: Vec<bool> = verdicts.iter().map(|verdict| verdict.kept).collect();
        assert_eq!(kept, [true, false]);
        assert_eq!(verdicts[0].value, 6.0);
    }
}

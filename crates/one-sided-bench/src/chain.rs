//! `chain`: one write made durable at every member of groups of growing size, by HyperLoop's chains
//! and by chains of programs that take messages, event-driven and polling (hyperloop §6.1, fig.
//! 10).
//!
//! The client is one pinned thread that polls; members are on the other CPU. Polling members share
//! one thread that polls each in turn: they have a CPU to themselves, as far as this machine can
//! give them one.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::Args;
use cyclone_bench::children::{Initiator, Kid, Launcher, kept_waiting};
use cyclone_bench::measure::{Percentiles, Spread, histogram, interleaved, tries, undisturbed};
use cyclone_bench::output::{Common, Report};
use cyclone_bench::plot::{self, Mark, Panel, Series};
use cyclone_bench::table::{Table, rounded};
use cyclone_bench::verdict::Verdict;
use cyclone_bench::workload::Random;
use cyclone_fabric::{Address, ChainBy};
use cyclone_replication::group::{
    Answer, Group, GroupError, GroupEvent, GroupMemory, GroupOp, GroupOptions,
};
use cyclone_replication::naive::NaiveGroup;

use crate::child::{Role, TOKEN};
use crate::provider::{self, Provider, Side};
use crate::stage::{INITIATOR_CPU, START, Stage, backup_cpu, member_key};

/// Bytes of group memory.
const MEMORY_BYTES: u64 = 1 << 20;
/// Members of the largest group.
const MOST_MEMBERS: u16 = 16;
/// How long one operation may take.
const PATIENCE: Duration = Duration::from_secs(20);
/// Processes on the members' CPU under load, members included (hyperloop §6.2: ten per core).
const PROCESSES: usize = 10;

/// Options of `chain`.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Shared ones.
    #[command(flatten)]
    pub common: Common,
    /// Group sizes (default: 1,2,3,5,7; quick 1,3,7).
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..=i64::from(MOST_MEMBERS)))]
    pub members: Vec<u16>,
    /// Bytes of each write.
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u64).range(1..=65_536))]
    pub bytes: u64,
    /// What carries the operations.
    #[arg(long, default_value = "shm")]
    pub provider: Provider,
    /// Repetitions of every point (default: 3).
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=99))]
    pub repetitions: Option<u16>,
    /// Milliseconds measured per repetition (default: 400; quick 100).
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=60_000))]
    pub measure_ms: Option<u64>,
    /// Give initiators a real-time priority, so that other programs do not disturb them; needs the
    /// right to.
    #[arg(long)]
    pub real_time: bool,
    /// Leave out the runs in which the members' CPU is shared with processes that burn it.
    #[arg(long)]
    pub idle_only: bool,
}

/// Who carries a group's operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Carrier {
    Hyperloop,
    NaiveEvent,
    NaivePolling,
}

const CARRIERS: [Carrier; 3] = [
    Carrier::Hyperloop,
    Carrier::NaiveEvent,
    Carrier::NaivePolling,
];

impl Carrier {
    const fn name(self) -> &'static str {
        match self {
            Carrier::Hyperloop => "hyperloop",
            Carrier::NaiveEvent => "naive-event",
            Carrier::NaivePolling => "naive-polling",
        }
    }
}

/// One point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Point {
    is_loaded: bool,
    members: usize,
    carrier: Carrier,
}

impl Point {
    fn name(&self) -> String {
        let (carrier, load) = (self.carrier.name(), load_name(self.is_loaded));
        format!("{carrier} of {}, {load}", self.members)
    }
}

/// What a point's repetitions gave.
struct Found {
    point: Point,
    runs: Vec<Run>,
}

impl Found {
    fn spread(&self, of: impl Fn(&Percentiles) -> f64) -> Spread {
        Spread::of(self.runs.iter().map(|run| of(&run.latency)))
    }
}

/// One repetition.
#[derive(Clone, Copy, Debug, Default)]
struct Run {
    latency: Percentiles,
    operations: u64,
    /// Part of the time in which others had the client's CPU.
    disturbed: f64,
    /// Who carries operations from hop to hop, where it is the fabric.
    carried_by: Option<ChainBy>,
}

/// The columns of `chain.csv`.
pub(crate) const COLUMNS: [&str; 11] = [
    "load",
    "members",
    "carrier",
    "p50_us",
    "p95_us",
    "p99_us",
    "p99_least",
    "p99_most",
    "p999_us",
    "operations",
    "disturbed_percent",
];

/// Runs all points, writes CSV and SVG, judges.
pub fn run(options: &Options, launcher: Launcher) -> Result<()> {
    let mut report = Report::new("chain", &options.common)?;
    if let Some(why) = options.provider.missing() {
        bail!("{}: {why}", options.provider.name());
    }
    let mut stage = Stage::new(launcher)?;
    let repetitions = options.repetitions.map_or(3, usize::from);
    let points = points(options);
    report.expect(points.len() * repetitions);
    let budget = report.budget();
    let is_over = |_| budget.is_over();
    let results = interleaved(&points, repetitions, is_over, |point, _| {
        report.progress(&point.name());
        undisturbed(
            tries(options.common.quick),
            |run: &Run| run.disturbed,
            || measure(&mut stage, options, *point),
        )
    })?;
    report.names_left_out(&points, &results, |point: &Point| point.name());
    let carried_by = results.iter().flatten().find_map(|run| run.carried_by);
    let found: Vec<Found> = points
        .iter()
        .zip(results)
        .map(|(point, runs)| Found {
            point: *point,
            runs,
        })
        .filter(|found| !found.runs.is_empty())
        .collect();
    tell(&mut report, &found)?;
    say_what_cannot_be_shown(&report, options, carried_by);
    judge(&mut report, &found);
    report.finish();
    Ok(())
}

fn points(options: &Options) -> Vec<Point> {
    let mut sizes: Vec<usize> = options.members.iter().map(|of| usize::from(*of)).collect();
    if sizes.is_empty() {
        sizes = match options.common.quick {
            true => vec![1, 3, 7],
            false => vec![1, 2, 3, 5, 7],
        };
    }
    sizes.sort_unstable();
    sizes.dedup();
    let loads: &[bool] = if options.idle_only {
        &[false]
    } else {
        &[false, true]
    };
    let mut points = Vec::new();
    for &is_loaded in loads {
        for &members in &sizes {
            points.extend(CARRIERS.map(|carrier| Point {
                is_loaded,
                members,
                carrier,
            }));
        }
    }
    points
}

const fn load_name(is_loaded: bool) -> &'static str {
    if is_loaded { "10 per core" } else { "idle" }
}

fn measure(stage: &mut Stage, options: &Options, point: Point) -> Result<Run> {
    let run = measure_once(stage, options, point);
    stage.clear();
    run
}

fn measure_once(stage: &mut Stage, options: &Options, point: Point) -> Result<Run> {
    let (mut group, kids, carried_by) = open(stage, options, point)?;
    let _hogs = match point.is_loaded {
        true => stage.hogs(backup_cpu(), PROCESSES.saturating_sub(kids.len()))?,
        false => Vec::new(),
    };
    let quick = options.common.quick;
    let ms = options.measure_ms.unwrap_or(if quick { 100 } else { 400 });
    // Under load a single operation may take tens of milliseconds.
    let ms = if point.is_loaded { 4 * ms } else { ms };
    let stop = stage.launcher().stop();
    let _initiator = Initiator::on(INITIATOR_CPU, options.real_time)?;
    let (waited, begun) = (kept_waiting(), Instant::now());
    let time = Duration::from_millis(ms);
    let latency_ns = drive(&mut *group, options.bytes, time, options.common.seed, stop)?;
    let waited = kept_waiting().saturating_sub(waited);
    Ok(Run {
        latency: Percentiles::of(&latency_ns),
        operations: latency_ns.len(),
        disturbed: waited.as_secs_f64() / begun.elapsed().as_secs_f64().max(1e-9),
        carried_by,
    })
}

type Opened = (Box<dyn GroupMemory>, Vec<Kid>, Option<ChainBy>);

fn open(stage: &mut Stage, options: &Options, point: Point) -> Result<Opened> {
    let cpu = backup_cpu();
    let provider = options.provider;
    let mut kids = Vec::new();
    let place = stage.place(provider, INITIATOR_CPU);
    let (directory, name) = (&place.directory, &place.name);
    let endpoint = || provider::open(provider, Side::Initiator, directory, name, MEMORY_BYTES);
    if point.carrier == Carrier::Hyperloop {
        let mut members = Vec::new();
        for number in 0..point.members {
            let role = Role::GroupMember {
                place: stage.place(provider, cpu),
                memory_bytes: MEMORY_BYTES,
            };
            let (kid, ready) = stage.start(&format!("member {number}"), &role)?;
            members.push((Address(ready.address.clone()), member_key(&ready)?));
            kids.push(kid);
        }
        let endpoint = endpoint()?;
        let by = endpoint.capabilities().chain;
        let group = Group::open(endpoint, &members, GroupOptions::default())?;
        return Ok((Box::new(group), kids, Some(by)));
    }
    let polling = point.carrier == Carrier::NaivePolling;
    let count = if polling { point.members } else { 1 };
    let mut members = Vec::new();
    while members.len() < point.members {
        let role = Role::NaiveMembers {
            place: stage.place(provider, cpu),
            count,
            memory_bytes: MEMORY_BYTES,
            polling,
        };
        let (mut kid, ready) = stage.start(&format!("member {}", members.len()), &role)?;
        members.push(Address(ready.address));
        for _ in 1..count {
            members.push(Address(kid.hear::<crate::child::Ready>(START)?.address));
        }
        kids.push(kid);
    }
    let group = NaiveGroup::open(endpoint()?, &members, MEMORY_BYTES, TOKEN, 1, 64)?;
    Ok((Box::new(group), kids, None))
}

/// One write and flush after the other, for so long, at places drawn from the seed; the first tenth
/// is not counted.
fn drive(
    group: &mut dyn GroupMemory,
    bytes: u64,
    time: Duration,
    seed: u64,
    stop: &AtomicBool,
) -> Result<hdrhistogram::Histogram<u64>> {
    let mut latency_ns = histogram()?;
    let mut events = Vec::new();
    let mut random = Random::new(seed);
    let value = random.bytes(bytes as usize);
    let places = (MEMORY_BYTES / bytes).max(1);
    let begun = Instant::now();
    loop {
        let started = Instant::now();
        if started - begun > time && !latency_ns.is_empty() {
            return Ok(latency_ns);
        }
        let write = GroupOp::Write {
            offset: random.below(places) * bytes,
            bytes: value.clone(),
        };
        let posted = Instant::now();
        submit(group, &write, &mut events, posted, stop)?;
        submit(group, &GroupOp::Flush, &mut events, posted, stop)?;
        // The write's answer and the flush's; the first may have come while the second was
        // submitted.
        while events.len() < 2 {
            take(group, &mut events, posted, stop)?;
        }
        events.clear();
        if posted - begun > time / 10 {
            latency_ns.saturating_record(posted.elapsed().as_nanos() as u64);
        }
    }
}

fn submit(
    group: &mut dyn GroupMemory,
    operation: &GroupOp,
    events: &mut Vec<GroupEvent>,
    since: Instant,
    stop: &AtomicBool,
) -> Result<()> {
    loop {
        match group.submit(operation, 0) {
            Ok(()) => return Ok(()),
            Err(GroupError::Busy) => take(group, events, since, stop)?,
            Err(error) => return Err(error.into()),
        }
    }
}

fn take(
    group: &mut dyn GroupMemory,
    events: &mut Vec<GroupEvent>,
    since: Instant,
    stop: &AtomicBool,
) -> Result<()> {
    group.poll(events);
    for event in events.iter() {
        match event {
            GroupEvent::Done {
                answer: Answer::Done,
                ..
            } => {}
            other => bail!("the group answered {other:?}"),
        }
    }
    if stop.load(Ordering::Relaxed) {
        bail!("ended by a signal");
    }
    if since.elapsed() > PATIENCE {
        bail!("an operation was not done after {PATIENCE:?}");
    }
    Ok(())
}

fn tell(report: &mut Report, found: &[Found]) -> Result<()> {
    let mut table = Table::new(&COLUMNS);
    for of in found {
        let p99 = of.spread(|latency| latency.p99_us);
        table.add(vec![
            load_name(of.point.is_loaded).into(),
            of.point.members.into(),
            of.point.carrier.name().into(),
            rounded(of.spread(|latency| latency.p50_us).median, 2),
            rounded(of.spread(|latency| latency.p95_us).median, 2),
            rounded(p99.median, 2),
            rounded(p99.least, 2),
            rounded(p99.most, 2),
            rounded(of.spread(|latency| latency.p999_us).median, 2),
            of.runs.iter().map(|run| run.operations).sum::<u64>().into(),
            rounded(
                100.0 * Spread::of(of.runs.iter().map(|run| run.disturbed)).median,
                2,
            ),
        ]);
    }
    report.table("chain", &table)?;
    let panels = panels(found);
    report.file("chain.svg", |path| {
        let title = "A durable write at every member of a group";
        plot::lines(path, title, 2, &panels)
    })
}

/// A percentile and its name.
type View = (&'static str, fn(&Percentiles) -> f64);

fn panels(found: &[Found]) -> Vec<Panel> {
    let mut loads: Vec<bool> = found.iter().map(|of| of.point.is_loaded).collect();
    loads.dedup();
    let views: [View; 2] = [
        ("median", |of| of.p50_us),
        ("99th percentile", |of| of.p99_us),
    ];
    let mut panels = Vec::new();
    for is_loaded in loads {
        for (name, of) in views {
            let series = CARRIERS.map(|carrier| Series {
                name: carrier.name().to_owned(),
                mark: Mark::Line,
                points: found
                    .iter()
                    .filter(|at| (at.point.is_loaded, at.point.carrier) == (is_loaded, carrier))
                    .map(|at| (at.point.members as f64, at.spread(of).median))
                    .collect(),
            });
            panels.push(Panel {
                title: format!("{name}, members' CPU {}", load_name(is_loaded)),
                x: "members".to_owned(),
                y: "µs".to_owned(),
                log_y: true,
                series: series.into(),
            });
        }
    }
    panels
}

fn say_what_cannot_be_shown(report: &Report, options: &Options, by: Option<ChainBy>) {
    match by {
        Some(ChainBy::Initiator) => report.say(&format!(
            "over {} the client's CPU does every hop's work itself, one hop after the other; a chain of NICs does them with \
             a few µs of network between client and first hop, which is most of its time. So the ratio between a large and \
             a small group says less here than the µs that each member adds",
            options.provider.name()
        )),
        Some(ChainBy::ProgressThread) => report.say(&format!(
            "over {} a thread of each member's program carries the operation on: the members' CPUs are in its way, as with \
             the naive chains; a provider that triggers hops is needed to show HyperLoop",
            options.provider.name()
        )),
        _ => {}
    }
    report.say(
        "the polling members share one thread on one CPU, which polls each in turn: that flatters \
         them, for pollers that share a CPU as processes wait for each other's time slices",
    );
}

//= hyperloop §6.1, fig. 10: the chain stays flat while the naive chain's p99 rises by up to 2.97 times
fn judge(report: &mut Report, found: &[Found]) {
    for is_loaded in [false, true] {
        let growth = |carrier| growth(found, is_loaded, carrier);
        let (Some(hyperloop), Some(naive)) =
            (growth(Carrier::Hyperloop), growth(Carrier::NaiveEvent))
        else {
            continue;
        };
        let load = load_name(is_loaded);
        report.say(&format!(
            "{load}, p99 from {} to {} members: hyperloop {:.1} → {:.1} µs ({:.2} times), naive-event {:.1} → {:.1} µs ({:.2} \
             times; in the paper up to 2.97)",
            hyperloop.members.0,
            hyperloop.members.1,
            hyperloop.p99_us.0,
            hyperloop.p99_us.1,
            hyperloop.ratio(),
            naive.p99_us.0,
            naive.p99_us.1,
            naive.ratio(),
        ));
        report.verdict(Verdict::at_most(
            format!(
                "{load}: µs of p99 that hyperloop adds per member ÷ those that naive-event adds"
            ),
            hyperloop.per_member_us().max(0.0) / naive.per_member_us().max(0.001),
            0.1,
        ));
        report.verdict(Verdict::at_least(
            format!("{load}: naive-event's p99 ÷ hyperloop's, largest group"),
            naive.p99_us.1 / hyperloop.p99_us.1.max(0.001),
            5.0,
        ));
    }
}

/// What becomes of a carrier's p99 from the smallest to the largest group.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Growth {
    members: (usize, usize),
    p99_us: (f64, f64),
}

impl Growth {
    fn ratio(&self) -> f64 {
        self.p99_us.1 / self.p99_us.0.max(0.001)
    }

    fn per_member_us(&self) -> f64 {
        (self.p99_us.1 - self.p99_us.0) / (self.members.1 - self.members.0).max(1) as f64
    }
}

fn growth(found: &[Found], is_loaded: bool, carrier: Carrier) -> Option<Growth> {
    let wanted = |of: &&Found| (of.point.is_loaded, of.point.carrier) == (is_loaded, carrier);
    let p99 = |of: &Found| of.spread(|latency| latency.p99_us).median;
    let first = found.iter().find(wanted)?;
    let last = found.iter().rfind(wanted)?;
    (first.point.members < last.point.members).then(|| Growth {
        members: (first.point.members, last.point.members),
        p99_us: (p99(first), p99(last)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(members: usize, carrier: Carrier, p99_us: &[f64]) -> Found {
        let run = |&p99_us| Run {
            latency: Percentiles {
                p99_us,
                ..Percentiles::default()
            },
            ..Run::default()
        };
        Found {
            point: Point {
                is_loaded: false,
                members,
                carrier,
            },
            runs: p99_us.iter().map(run).collect(),
        }
    }

    #[test]
    fn growth_is_between_the_medians_of_the_smallest_and_the_largest_group() {
        let all = [
            found(1, Carrier::Hyperloop, &[1.0, 2.0, 90.0]),
            found(1, Carrier::NaiveEvent, &[50.0]),
            found(3, Carrier::Hyperloop, &[3.0]),
            found(7, Carrier::Hyperloop, &[5.0]),
        ];
        let growth = |carrier| growth(&all, false, carrier);
        let hyperloop = growth(Carrier::Hyperloop).expect("two sizes");
        assert_eq!(hyperloop.members, (1, 7));
        assert_eq!(hyperloop.ratio(), 2.5);
        assert_eq!(hyperloop.per_member_us(), 0.5);
        assert_eq!(growth(Carrier::NaiveEvent), None, "one size alone");
        assert_eq!(growth(Carrier::NaivePolling), None);
    }
}

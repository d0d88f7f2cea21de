//! `cyclone bench pmkv`: the log-structured store with every replication.
//!
//! Most of it runs in one process over shared memory: one thread steps all servers in turn, so
//! throughput is what the work costs altogether, and the share of the keeping side's thread can be
//! measured. Nothing there is a network: what differs is what the protocols do. Servers that are
//! processes, under Redis cluster clients, show their throughput over load, takeovers and
//! resharding.

mod cluster;
mod compare;
mod fan_in;
mod load;
mod media;
mod sensitivity;
mod servers;
mod soak;
mod stories;
mod timelines;
mod traffic;

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::Result;
use clap::{Args, ValueEnum};
use cyclone_bench::measure::Percentiles;
use cyclone_bench::output::{Common, Report};
use cyclone_bench::plot::{self, Bars};
use cyclone_bench::table::Table;
use cyclone_bench::verdict::Verdict;
use cyclone_replication::Protocol;
use rustix::time::{ClockId, clock_gettime};
use serde_json::json;

use cluster::{Cluster, Setting};
use load::{IN_FLIGHT, Load, Mix, Seen, Sizes, Until};

/// Keys of a throughput run.
const KEYS: u64 = 100_000;

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// YCSB, with every replication.
    Throughput,
    /// The same on real servers, over load.
    Servers,
    /// Write amplification by the model, and how many streams meet at a server.
    Media,
    /// Six servers' throughput, computed: size of entries, copies, workers, DIMMs.
    Sensitivity,
    /// A takeover and a cold start, in process.
    Timelines,
    /// Real servers, of which one is killed.
    Failover,
    /// Real servers, of which one has a shard that becomes hot.
    Resharding,
    /// Overwrites at 80% full, minute after minute; only when asked for.
    Soak,
}

impl Part {
    /// In the order in which they run. A short run has most need of the first ones.
    const ALL: [Part; 8] = [
        Part::Throughput,
        Part::Timelines,
        Part::Servers,
        Part::Failover,
        Part::Resharding,
        Part::Media,
        Part::Sensitivity,
        Part::Soak,
    ];
}

/// What `cyclone bench pmkv` takes beside the options of all benchmarks.
#[derive(Args, Clone, Debug, Default)]
pub struct Choice {
    /// Only these replications, separated by commas.
    #[arg(long, value_delimiter = ',')]
    pub only: Vec<Protocol>,
    /// Only this part.
    #[arg(long, value_enum)]
    pub part: Option<Part>,
    /// How many minutes the soak takes: 30 if left out. With --quick a minute is 10 s, and there
    /// are 3 if this is left out.
    #[arg(long)]
    pub minutes: Option<u64>,
}

impl Choice {
    fn protocols(&self) -> Vec<Protocol> {
        let asked = |it: &Protocol| match self.only.is_empty() {
            true => *it != Protocol::Faa,
            false => self.only.contains(it),
        };
        Protocol::ALL.into_iter().filter(asked).collect()
    }
}

/// Runs it until `stop`, the flag of [`cyclone::signals::stop_flag`].
///
/// # Errors
/// No shared memory, nowhere to write to, or a signal.
pub fn run(common: &Common, choice: &Choice, stop: &AtomicBool) -> Result<()> {
    let mut report = Report::new("pmkv", common)?;
    let is_real = matches!(
        choice.part,
        Some(Part::Servers | Part::Failover | Part::Resharding)
    );
    if !is_real {
        report.say(
            "one process, one thread for all servers: costs of the protocols, not of a network",
        );
    }
    let protocols = choice.protocols();
    for part in Part::ALL {
        let is_wanted = match part {
            Part::Soak => choice.part == Some(part),
            _ => choice.part.is_none_or(|only| only == part),
        };
        if !is_wanted || report.leaves_out(&format!("the part {part:?}")) {
            continue;
        }
        cyclone::signals::check()?;
        match part {
            Part::Throughput => throughput(common, choice, &mut report)?,
            Part::Timelines => timelines::run(common, &mut report)?,
            Part::Servers => servers::run(common, &protocols, &mut report, stop)?,
            Part::Failover => stories::failover(common, &mut report)?,
            Part::Resharding => stories::resharding(common, &mut report)?,
            Part::Media => media::run(common, &protocols, &mut report)?,
            Part::Sensitivity => sensitivity::run(common, &protocols, &mut report)?,
            Part::Soak => soak::run(common, choice.minutes, &mut report)?,
        }
    }
    report.finish();
    Ok(())
}

/// How long this thread has had a CPU.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

fn throughput(common: &Common, choice: &Choice, report: &mut Report) -> Result<()> {
    let mut table = Table::new(&[
        "replication",
        "workload",
        "keys",
        "objects",
        "ops_s",
        "ops_cpu_s",
        "put_p50_us",
        "put_p99_us",
        "get_p50_us",
        "get_p99_us",
        "keeping_share",
    ]);
    let quick = common.quick;
    let sizes = &Sizes::ALL[..if quick { 1 } else { Sizes::ALL.len() }];
    let skews: &[bool] = if quick { &[true] } else { &[true, false] };
    let lasts = Duration::from_millis(if quick { 100 } else { 2_000 });
    let mut panel = Bars {
        title: "YCSB, zipfian 0.99, ZippyDB's objects".into(),
        y: "operations/s, one thread".into(),
        names: Mix::ALL.iter().map(|it| it.name.to_owned()).collect(),
        ..Bars::default()
    };
    report.expect(choice.protocols().len() * sizes.len() * skews.len());
    for protocol in choice.protocols() {
        let mut bars = Vec::new();
        for &sizes in sizes {
            for &is_skewed in skews {
                let what = format!("{protocol}, {}", sizes.name);
                if report.leaves_out(&what) {
                    continue;
                }
                report.progress(&what);
                let mut cluster = Cluster::start(Setting::small(protocol))?;
                for mix in Mix::ALL {
                    let load = Load {
                        mix,
                        sizes,
                        is_skewed,
                        keys: KEYS,
                        until: Until::After(lasts),
                        in_flight: IN_FLIGHT,
                        seed: common.seed,
                    };
                    let seen = load::run(&mut cluster, load)?;
                    table.add(row(protocol, &load, &seen));
                    if sizes.name != Sizes::ALL[0].name || !is_skewed {
                        continue;
                    }
                    bars.push(Some(seen.ops_s));
                    if mix.writes == 0 && protocol == Protocol::Rowan {
                        let what = "GET/s of a core, in process";
                        report.verdict(Verdict::at_least(what, seen.ops_cpu_s, 1e6));
                    }
                }
            }
        }
        panel.groups.push((protocol.to_string(), bars));
    }
    report.table("pmkv", &table)?;
    report.file("pmkv.svg", |path| {
        plot::bars(path, "The store over its replications", 1, &[panel])
    })?;
    let chosen = choice.protocols();
    let both = [Protocol::Rowan, Protocol::Rpc];
    if both.iter().all(|it| chosen.contains(it)) {
        compare::run(common, report)?;
    }
    Ok(())
}

fn row(protocol: Protocol, load: &Load, seen: &Seen) -> Vec<serde_json::Value> {
    let (puts, gets) = (Percentiles::of(&seen.puts), Percentiles::of(&seen.gets));
    vec![
        json!(protocol.to_string()),
        json!(load.mix.name),
        json!(if load.is_skewed { "zipfian" } else { "uniform" }),
        json!(load.sizes.name),
        json!(seen.ops_s.round()),
        json!(seen.ops_cpu_s.round()),
        json!(puts.p50_us),
        json!(puts.p99_us),
        json!(gets.p50_us),
        json!(gets.p99_us),
        json!((seen.keeping_share * 1000.0).round() / 1000.0),
    ]
}

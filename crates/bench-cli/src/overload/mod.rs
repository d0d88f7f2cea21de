//! `cyclone bench overload`: writes that arrive whether or not the earlier ones have ended, from
//! half to three times what the cluster can take. Promised: throughput stays within a tenth of its
//! peak, as it is acknowledged and with what is left for later paid for; callers get an error to
//! retry or are slowed down by their connection instead of waiting without end, and no replica
//! stands for election because of load alone. (In cyclone fig. 12 throughput collapses there.)
//!
//! ```text
//! native   packets to the port that carries the heartbeats as well; these clients pause when they are refused
//! redis    commands in pipelines over many connections, which pause for nothing
//! ```
//! Levels are of the greatest throughput seen so far, and each past saturation is judged by
//! saturation in turn with it. The nodes run on CPU 0, the load on the others, so that making load
//! takes nothing from them.

mod arguments;
mod native;
mod redis;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use cyclone::cluster::{LocalCluster, Options};
use cyclone::config::Timing;
use cyclone_bench::cpu::{Meter, Process};
use cyclone_bench::noise::Noise;
use cyclone_bench::output::Report;
use cyclone_bench::stolen::Stolen;
use cyclone_bench::table::{Table, rounded};
use cyclone_bench::verdict::Verdict;
use hdrhistogram::Histogram;

pub use self::arguments::Arguments;
use crate::{Sequence, node_options};

/// For an answer behind a queue of commands.
const PATIENCE: Duration = Duration::from_secs(20);
/// For the nodes to apply and compact what a time of load has left.
const CATCH_UP: Duration = Duration::from_secs(120);
/// Nodes rest when all of them together use less than this share of a CPU for so long.
const REST: Duration = Duration::from_millis(100);
const RESTING: f64 = 0.3;
/// CPU of all nodes.
const NODES_CPU: usize = 0;
/// Bytes of each value.
const VALUE_BYTES: usize = 100;

/// What became of the operations that arrived within a time.
pub(crate) struct Seen {
    /// Arrived.
    pub(crate) offered: u64,
    /// Done.
    pub(crate) done: u64,
    /// Told to retry: certainly not done.
    pub(crate) refused: u64,
    /// Never sent: the load generator holds no more than so many at once, each for so long.
    pub(crate) held: u64,
    /// Anything else: mostly sent, and no outcome within the client's patience.
    pub(crate) unclear: u64,
    /// Of those done, from arrival, ns.
    pub(crate) latency_ns: Histogram<u64>,
    pub(crate) elapsed: Duration,
    /// Done after the end, of what was in progress by then, and how long that took. At saturation
    /// that is little, in overload all that queues and sockets hold.
    pub(crate) done_late: u64,
    pub(crate) late: Duration,
    /// From then on until every node's store had what is done, and rested.
    caught_up: Duration,
    /// Elections, and those of them that the host accounts for: one for each stretch in the same
    /// turn for which it took the nodes' CPU, of half the time-out and more.
    elections: u64,
    excused: u64,
    /// The longest time for which a loop stood still, where it was its longest so far, ms.
    gap_ms: f64,
    /// The longest stretch for which the host took the nodes' CPU.
    stolen: Duration,
}

impl Seen {
    pub(crate) fn new() -> Result<Seen> {
        Ok(Seen {
            offered: 0,
            done: 0,
            refused: 0,
            held: 0,
            unclear: 0,
            latency_ns: super::histogram()?,
            elapsed: Duration::ZERO,
            done_late: 0,
            late: Duration::ZERO,
            caught_up: Duration::ZERO,
            elections: 0,
            excused: 0,
            gap_ms: 0.0,
            stolen: Duration::ZERO,
        })
    }

    /// Adds what was seen at another time.
    fn add(&mut self, other: &Seen) -> Result<()> {
        self.offered += other.offered;
        self.done += other.done;
        self.refused += other.refused;
        self.held += other.held;
        self.unclear += other.unclear;
        self.latency_ns.add(&other.latency_ns)?;
        self.elapsed += other.elapsed;
        self.done_late += other.done_late;
        self.late += other.late;
        self.caught_up += other.caught_up;
        self.elections += other.elections;
        self.excused += other.excused;
        self.gap_ms = self.gap_ms.max(other.gap_ms);
        self.stolen = self.stolen.max(other.stolen);
        Ok(())
    }

    fn done_s(&self) -> f64 {
        self.done as f64 / self.elapsed.as_secs_f64().max(0.001)
    }

    /// As [`Seen::done_s`], but what is left for later (commands in progress, entries that
    /// followers have not applied, compactions) is paid for: how much of the CPU goes to it while
    /// the CPU is short differs from time to time.
    fn paid_s(&self) -> f64 {
        let took = self.elapsed + self.late + self.caught_up;
        (self.done + self.done_late) as f64 / took.as_secs_f64().max(0.001)
    }
}

/// A source of load.
pub(crate) trait Source {
    /// Lets `rate` operations per second arrive for a time, or until `stop`; `None`: as many as the
    /// clients' windows allow.
    fn run(&mut self, rate: Option<f64>, time: Duration, stop: &AtomicBool) -> Result<Seen>;

    /// From now on this node leads. Sources that find out for themselves need no notification.
    fn follow(&mut self, _leader: SocketAddr) -> Result<()> {
        Ok(())
    }
}

/// Moments at which operations arrive, evenly.
pub(crate) struct Arrivals {
    begun: Instant,
    rate: Option<f64>,
    count: u64,
}

impl Arrivals {
    pub(crate) fn new(rate: Option<f64>) -> Arrivals {
        Arrivals {
            begun: Instant::now(),
            rate,
            count: 0,
        }
    }

    /// The next arrival, if it is due; without a rate one always is.
    pub(crate) fn due(&mut self, now: Instant) -> Option<Instant> {
        let at = match self.rate {
            None => now,
            Some(rate) => self.begun + Duration::from_secs_f64(self.count as f64 / rate),
        };
        (at <= now).then(|| {
            self.count += 1;
            at
        })
    }
}

struct Run<'a> {
    arguments: &'a Arguments,
    report: Report,
    table: Table,
    stop: &'a AtomicBool,
    /// Whose load it is just now.
    clients: &'static str,
    noise: Noise,
    stolen: Stolen,
    /// The least of overload over saturation: as acknowledged, and paid.
    worst: [f64; 2],
    elections: u64,
    excused: u64,
    refused: u64,
    held: u64,
}

/// Runs both kinds of load.
///
/// # Errors
/// When the cluster does not start, or breaks.
pub fn run(arguments: &Arguments, stop: &AtomicBool) -> Result<()> {
    let mut run = Run {
        arguments,
        report: Report::new("overload", &arguments.common)?,
        table: Table::new(&[
            "by",
            "percent",
            "offered_s",
            "done_s",
            "paid_s",
            "refused_s",
            "not_sent_s",
            "unclear",
            "p50_us",
            "p99_us",
            "elections",
            "excused",
            "gap_ms",
            "stolen_ms",
        ]),
        stop,
        clients: "",
        noise: Noise::default(),
        stolen: Stolen::watch(NODES_CPU)?,
        worst: [f64::INFINITY; 2],
        elections: 0,
        excused: 0,
        refused: 0,
        held: 0,
    };
    let directory = std::env::temp_dir().join(format!("cyclone-overload-{}", std::process::id()));
    let outcome = ["native", "redis"]
        .iter()
        .try_for_each(|kind| run.kind(kind, &directory.join(kind)));
    // The data was only for measuring.
    let _ = std::fs::remove_dir_all(&directory);
    outcome?;
    run.report.table("overload", &run.table)?;
    let note = "nodes on CPU 0, load on the others";
    let what = "throughput past saturation / at saturation";
    for (how, worst) in ["acknowledged", "paid"].into_iter().zip(run.worst) {
        let kept = Verdict::at_least(format!("{what}, {how}"), worst, 0.9);
        run.report.verdict(kept.note(note));
    }
    let unexcused = run.elections - run.excused;
    let terms = Verdict::at_most("elections under load", unexcused as f64, 0.0);
    run.report.verdict(terms.note(format!(
        "{note}; {} more in turns in which the host took that CPU as often for half the time-out and more at a stretch",
        run.excused
    )));
    let told = "operations told to retry, or left on their connection";
    let told = Verdict::at_least(told, (run.refused + run.held) as f64, 1.0);
    run.report.verdict(told.note(note));
    run.report.doubts(&run.noise);
    run.report.finish();
    Ok(())
}

impl Run<'_> {
    fn kind(&mut self, kind: &'static str, directory: &Path) -> Result<()> {
        self.clients = kind;
        self.report.expect(self.arguments.loads());
        std::fs::create_dir_all(directory)?;
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let options = Options {
            engine: self.arguments.engine.clone(),
            election_ms: self.arguments.election_ms,
            logs: self.arguments.logs,
            log_threads: self.arguments.log_threads,
            pin: if cpus > 1 {
                vec![NODES_CPU; 3]
            } else {
                Vec::new()
            },
            ..node_options()?
        };
        cyclone::cluster::check(&options)?;
        let mut cluster = LocalCluster::create(directory, &options)?;
        cluster.start_all(true)?;
        let leader = cluster.wait_for_leader(Duration::from_secs(30))?;
        let seed = self.arguments.common.seed;
        let mut source: Box<dyn Source> = match kind {
            "native" => Box::new(native::Native::new(&cluster, options.log_ports(), seed)?),
            _ => Box::new(redis::Redis::new(cluster.nodes[leader].redis, seed)?),
        };
        let quick = self.arguments.common.quick;
        let time = Duration::from_secs(if quick { 1 } else { 8 });
        let mut looks = look(&cluster, options.logs)?;
        // The first time warms up.
        self.load(&mut *source, &mut cluster, None, time / 2, &mut looks)?;
        let saturated = self.load(&mut *source, &mut cluster, None, time, &mut looks)?;
        if saturated.done == 0 {
            bail!("{kind}: the cluster did nothing in {time:?}");
        }
        self.add(kind, 0, &saturated);
        let levels = self.arguments.levels();
        let (below, beyond): (Vec<u64>, Vec<u64>) = levels.iter().partition(|level| **level <= 100);
        // A level is of the greatest throughput so far: where a host gives less at one time than at
        // another, what is past saturation now might not be later.
        let mut peak = saturated.done_s();
        for level in below {
            let rate = Some(share(peak, level));
            let seen = self.load(&mut *source, &mut cluster, rate, time, &mut looks)?;
            self.add(kind, level, &seen);
        }
        let (mut seen, mut beside) = (Seen::new()?, Seen::new()?);
        for level in &beyond {
            let turns = self.arguments.turns();
            let both = self.pair(
                &mut *source,
                &mut cluster,
                (*level, &mut peak),
                turns,
                &mut looks,
            )?;
            seen.add(&both[0])?;
            beside.add(&both[1])?;
            self.judge(kind, *level, &both);
        }
        self.worst_paid(&seen, &beside);
        let minutes = Duration::from_secs(60 * self.arguments.minutes);
        if let (false, Some(level)) = (minutes.is_zero(), beyond.last()) {
            let turns = self.arguments.long_turns();
            let both = self.pair(
                &mut *source,
                &mut cluster,
                (*level, &mut peak),
                (minutes / turns, turns),
                &mut looks,
            )?;
            self.judge(kind, *level, &both);
            self.worst_paid(&both[0], &both[1]);
        }
        Ok(())
    }

    /// Overload and saturation in turn. Which is first changes each time: a store compacts after so
    /// many flushes, which would else fall to the same of the two again and again.
    fn pair(
        &mut self,
        source: &mut dyn Source,
        cluster: &mut LocalCluster,
        (level, peak): (u64, &mut f64),
        (turn, turns): (Duration, u32),
        looks: &mut Look,
    ) -> Result<[Seen; 2]> {
        let mut both = [Seen::new()?, Seen::new()?];
        for number in 0..turns {
            let first = number as usize % 2;
            for which in [first, 1 - first] {
                let rate = [Some(share(*peak, level)), None][which];
                let one = self.load(source, cluster, rate, turn, looks)?;
                both[which].add(&one)?;
                *peak = peak.max(one.done_s());
            }
        }
        Ok(both)
    }

    /// Adds two lines, and what they say of the promises.
    fn judge(&mut self, kind: &'static str, level: u64, [seen, beside]: &[Seen; 2]) {
        let ratio = seen.done_s() / beside.done_s().max(1.0);
        self.worst[0] = self.worst[0].min(ratio);
        self.refused += seen.refused;
        self.held += seen.held;
        self.add(kind, level, seen);
        self.add(kind, 0, beside);
    }

    /// What is paid is judged over all levels together: one level's turns are as long as a few
    /// flushes, of which now one and now the other ends with a compaction of all.
    fn worst_paid(&mut self, seen: &Seen, beside: &Seen) {
        let ratio = seen.paid_s() / beside.paid_s().max(1.0);
        self.worst[1] = self.worst[1].min(ratio);
    }

    /// One time of load at the current leader. `looks`: what was seen when the one before ended,
    /// and then when this one has.
    fn load(
        &mut self,
        source: &mut dyn Source,
        cluster: &mut LocalCluster,
        rate: Option<f64>,
        time: Duration,
        looks: &mut Look,
    ) -> Result<Seen> {
        let leader = cluster.wait_for_leader(Duration::from_secs(30))?;
        source.follow(cluster.nodes[leader].redis)?;
        self.noise.calibrate();
        let what = rate.map_or("saturation".to_owned(), |rate| format!("{rate:.0}/s"));
        self.report.progress(&format!(
            "{}: {what}, for {:.0} s",
            self.clients,
            time.as_secs_f64()
        ));
        let nodes = (0..cluster.nodes.len()).filter_map(|node| {
            Some(Process {
                role: "nodes".to_owned(),
                pid: cluster.pid(node)?,
            })
        });
        let mut meter = Meter::new(&nodes.collect::<Vec<_>>());
        let before = meter.read();
        let mut seen = source.run(rate, time, self.stop)?;
        let usage = meter.read().since(&before);
        let (foreign, stolen) = (usage.foreign_share(), usage.stolen_share());
        self.noise.shares(&what, foreign, stolen);
        seen.caught_up = self.catch_up(cluster)?;
        if self.stop.load(Ordering::Relaxed) {
            bail!("stopped");
        }
        let now = look(cluster, self.arguments.logs)?;
        let stretches = self.stolen.stretches();
        seen.stolen = stretches.iter().max().copied().unwrap_or_default();
        let election_ms = self.arguments.election_ms;
        let patience = Duration::from_millis(election_ms.unwrap_or(Timing::default().election_ms));
        seen.elections = looks.elections_until(&now);
        seen.gap_ms = looks.gap_until(&now);
        let long = stretches.iter().filter(|taken| **taken >= patience / 2);
        // One stretch can make each log elect.
        let most = long.count() as u64 * u64::from(self.arguments.logs);
        seen.excused = seen.elections.min(most);
        *looks = now;
        Ok(seen)
    }

    /// Waits until every node's store has what is committed, and the nodes have nothing left to do;
    /// answers how long that took.
    fn catch_up(&self, cluster: &LocalCluster) -> Result<Duration> {
        let begun = Instant::now();
        while !self.stop.load(Ordering::Relaxed) {
            let (looked, used_s) = (begun.elapsed(), cluster.cpu_seconds());
            let agreed = agree(cluster, self.arguments.logs)?;
            std::thread::sleep(REST);
            if agreed && cluster.cpu_seconds() - used_s < REST.as_secs_f64() * RESTING {
                return Ok(looked);
            }
            if looked > CATCH_UP {
                bail!("{CATCH_UP:?} after the load the nodes are still busy, or do not agree");
            }
        }
        Ok(begun.elapsed())
    }

    /// Adds a line.
    fn add(&mut self, kind: &'static str, percent: u64, seen: &Seen) {
        self.elections += seen.elections;
        self.excused += seen.excused;
        let per_second = |count: u64| count as f64 / seen.elapsed.as_secs_f64().max(0.001);
        let micros = |q: f64| seen.latency_ns.value_at_quantile(q) as f64 / 1000.0;
        self.table.add(vec![
            kind.into(),
            // 0: no rate but the clients' windows.
            percent.into(),
            rounded(per_second(seen.offered), 0),
            rounded(seen.done_s(), 0),
            rounded(seen.paid_s(), 0),
            rounded(per_second(seen.refused), 0),
            rounded(per_second(seen.held), 0),
            seen.unclear.into(),
            rounded(micros(0.5), 1),
            rounded(micros(0.99), 1),
            seen.elections.into(),
            seen.excused.into(),
            rounded(seen.gap_ms, 1),
            rounded(seen.stolen.as_secs_f64() * 1000.0, 1),
        ]);
    }
}

/// So many percent of a throughput.
fn share(peak: f64, level: u64) -> f64 {
    peak * level as f64 / 100.0
}

/// What nodes say of themselves.
struct Look {
    /// Of each log the highest term that one knows.
    terms: Vec<u64>,
    /// The longest time for which each one's event loop has stood still so far, ms.
    gaps_ms: Vec<f64>,
}

impl Look {
    /// Terms that began since, of all logs together.
    fn elections_until(&self, later: &Look) -> u64 {
        let logs = self.terms.iter().zip(&later.terms);
        logs.map(|(before, after)| after.saturating_sub(*before))
            .sum()
    }

    /// The longest time for which a loop stood still since, ms; 0 where no node's is longer than
    /// its longest before, which alone is known.
    fn gap_until(&self, later: &Look) -> f64 {
        let nodes = self.gaps_ms.iter().zip(&later.gaps_ms);
        let grown = nodes.filter(|(before, after)| after > before);
        grown.map(|(_, after)| *after).fold(0.0, f64::max)
    }
}

fn look(cluster: &LocalCluster, logs: u16) -> Result<Look> {
    let (mut terms, mut gaps_ms) = (vec![0; usize::from(logs)], Vec::new());
    for node in &cluster.nodes {
        // Behind a queue of commands an answer takes its time.
        let info = cyclone::resp::info(node.redis, PATIENCE)
            .context("a node does not answer under load")?;
        let number = |name: &str| info.get(name).and_then(|value| value.parse().ok());
        for (log, term) in terms.iter_mut().enumerate() {
            *term = number(&format!("cyclone_log{log}_term"))
                .unwrap_or(0)
                .max(*term);
        }
        let gap_us: u64 = number("cyclone_longest_gap_us").unwrap_or(0);
        gaps_ms.push(gap_us as f64 / 1000.0);
    }
    Ok(Look { terms, gaps_ms })
}

/// Whether every node has applied what the logs hold, and the same.
fn agree(cluster: &LocalCluster, logs: u16) -> Result<bool> {
    let mut indexes = Vec::new();
    for node in &cluster.nodes {
        let info = cyclone::resp::info(node.redis, PATIENCE)?;
        indexes.push(
            (0..logs)
                .map(|log| {
                    ["last", "commit", "applied"]
                        .map(|name| info.get(&format!("cyclone_log{log}_{name}")).cloned())
                })
                .collect::<Vec<_>>(),
        );
    }
    let all_of_a_log =
        |of_log: &[Option<String>; 3]| of_log.iter().all(|index| *index == of_log[0]);
    Ok(indexes
        .iter()
        .all(|of_node| *of_node == indexes[0] && of_node.iter().all(all_of_a_log)))
}

/// The value that all writes have.
pub(crate) fn value(seed: u64) -> Vec<u8> {
    Sequence(!seed).value(VALUE_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elections_of_all_logs_count() {
        let look = |terms: [u64; 3]| Look {
            terms: terms.to_vec(),
            gaps_ms: Vec::new(),
        };
        assert_eq!(look([1, 4, 2]).elections_until(&look([1, 4, 2])), 0);
        assert_eq!(look([1, 4, 2]).elections_until(&look([2, 4, 5])), 4);
        // A node that knows of the last term did not answer.
        assert_eq!(look([2, 4, 2]).elections_until(&look([1, 4, 2])), 0);
    }

    #[test]
    fn only_a_gap_that_grew_was_within_a_turn() {
        let look = |gaps_ms: [f64; 3]| Look {
            terms: vec![1],
            gaps_ms: gaps_ms.to_vec(),
        };
        let before = look([40.0, 10.0, 0.0]);
        assert_eq!(before.gap_until(&look([40.0, 10.0, 0.0])), 0.0);
        assert_eq!(before.gap_until(&look([40.0, 26.0, 12.0])), 26.0);
        assert_eq!(before.gap_until(&look([41.0, 26.0, 12.0])), 41.0);
    }

    #[test]
    fn arrivals_keep_their_rate_however_late_they_are_asked_for() {
        let mut arrivals = Arrivals::new(Some(1000.0));
        let later = arrivals.begun + Duration::from_millis(100);
        let mut count = 0;
        while let Some(at) = arrivals.due(later) {
            assert!(at <= later);
            count += 1;
        }
        assert_eq!(count, 101, "one at once, then one each millisecond");
        assert_eq!(arrivals.due(later), None);
        assert!(Arrivals::new(None).due(later).is_some());
    }
}

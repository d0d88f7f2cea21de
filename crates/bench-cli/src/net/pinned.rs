//! Driver against driver where nothing waits for a scheduler: the leader's loop is a thread on CPU
//! 0; a thread on CPU 1 moves the followers and the client in turn; neither ever blocks.
//!
//! Requests come one to a datagram, as from clients that know nothing of each other, except where
//! the name says "packed". Drivers take turns, and a ratio is that of their medians. Turns in which
//! the host took much of the machine are repeated.

use anyhow::{Context, Result};
use cyclone_bench::cpu::Usage;
use cyclone_bench::measure::Spread;
use cyclone_bench::noise::STOLEN;
use cyclone_bench::table::{Table, rounded};
use cyclone_bench::verdict::Verdict;

use super::{Point, Run, STEPS, Step, Waiting, step};
use crate::netlab::{Lab, NodeOptions, RunAs};

const UDP: Step = bursts("UDP + bursts", "udp");
const XDP: Step = bursts("AF_XDP + bursts", "xdp");

/// What is compared: the single requests of both drivers one after the other, and the packed ones.
const DRIVERS: [Step; 7] = [
    STEPS[0],
    STEPS[1],
    STEPS[3],
    UDP,
    XDP,
    step("UDP + bursts, packed", "udp", 32),
    step("AF_XDP + bursts, packed", "xdp", 32),
];

/// The same over shared memory, in programs that have it.
const DPDK: [Step; 2] = [
    bursts("DPDK (memif) + bursts", "dpdk"),
    step("DPDK (memif) + bursts, packed", "dpdk", 32),
];

/// Rounds of the two whose peaks are nearest to their goal, beyond those of all.
const MORE_ROUNDS: usize = 6;
/// How often a point is measured at most, where the host takes more than [`STOLEN`] each time.
const ATTEMPTS: usize = 3;
/// Of each value in RocksDB.
const VALUE_BYTES: usize = 100;
/// What three replicas may take beside two packets, µs.
const LOG_US: f64 = 10.0;

/// Bursts of datagrams with one request each.
const fn bursts(name: &'static str, transport: &'static str) -> Step {
    Step {
        pack: 1,
        ..step(name, transport, 32)
    }
}

/// All drivers that this program can compare.
pub(super) fn drivers() -> impl Iterator<Item = Step> {
    let extra = DPDK.into_iter().filter(|_| cfg!(feature = "dpdk"));
    DRIVERS.into_iter().chain(extra)
}

impl Run<'_> {
    /// Measures, and says what was promised. `hops`: the time of one packet, µs, by driver.
    pub(super) fn pinned(&mut self, lab: &Lab, hops: &[(&str, f64)]) -> Result<Vec<Point>> {
        self.duel(lab)?;
        let points = self.drivers(lab)?;
        self.fronts(lab, hops)?;
        Ok(points)
    }

    /// One write at a time over UDP and over AF_XDP, a second of each in turn: what disturbs the
    /// machine disturbs both.
    fn duel(&mut self, lab: &Lab) -> Result<()> {
        let drivers = [UDP, XDP];
        if !drivers.iter().all(|driver| self.is_wanted(driver)) {
            return Ok(());
        }
        let mut table = Table::new(&["round", "driver", "p50_us", "p99_us"]);
        let mut p50_us: [Vec<f64>; 2] = Default::default();
        let rounds = if self.common.quick { 5 } else { 21 };
        self.report.expect(rounds * drivers.len());
        for round in 0..rounds {
            for (driver, p50_us) in drivers.into_iter().zip(&mut p50_us) {
                let options = self.alternating(driver);
                let point = self.left_alone(lab, &options, driver, 0, 1)?;
                p50_us.push(point.seen.p50_us);
                table.add(vec![
                    (round + 1).into(),
                    driver.name.into(),
                    rounded(point.seen.p50_us, 1),
                    rounded(point.seen.p99_us, 1),
                ]);
            }
        }
        self.report.table("net-unloaded", &table)?;
        let (ratio, rounds) = of_medians(&p50_us[1], &p50_us[0]);
        let what = "pinned, unloaded p50, AF_XDP / UDP";
        let verdict = Verdict::at_most(what, ratio, 0.6);
        self.report.verdict(verdict.note(range(rounds)));
        Ok(())
    }

    /// Starts a cluster and measures a point: again while the host takes much of the machine
    /// meanwhile, and what it disturbed least counts. A quotient is to be of two points that it
    /// left alone.
    fn left_alone(
        &mut self,
        lab: &Lab,
        options: &NodeOptions,
        driver: Step,
        value_bytes: usize,
        inflight: usize,
    ) -> Result<Point> {
        let mut quietest: Option<(Point, Usage)> = None;
        let attempts = if self.common.quick { 1 } else { ATTEMPTS };
        for _ in 0..attempts {
            let cluster = self.start(lab, options)?;
            let (point, usage) =
                self.attempt(lab, &cluster, driver, value_bytes, inflight, Waiting::Never)?;
            let stolen = usage.stolen_share();
            if quietest
                .as_ref()
                .is_none_or(|(_, least)| stolen < least.stolen_share())
            {
                quietest = Some((point, usage));
            }
            if stolen <= STOLEN {
                break;
            }
        }
        let (point, usage) = quietest.context("one attempt at least")?;
        self.believe(&point, &usage);
        Ok(point)
    }

    fn is_wanted(&self, driver: &Step) -> bool {
        driver.name.contains(&self.choice.only)
    }

    fn alternating(&self, driver: Step) -> NodeOptions {
        NodeOptions {
            polling: "busy".to_owned(),
            run: RunAs::Alternating,
            ..Self::options(driver, 3)
        }
    }

    fn drivers(&mut self, lab: &Lab) -> Result<Vec<Point>> {
        let (rounds, more, loads): (usize, usize, &[usize]) = match self.common.quick {
            true => (1, 0, &[256]),
            false => (5, MORE_ROUNDS, &[1, 64, 256, 1024]),
        };
        let wanted = drivers().filter(|driver| self.is_wanted(driver));
        let drivers: Vec<Step> = wanted.collect();
        let mut table = Table::new(&[
            "round", "driver", "inflight", "ops_s", "p50_us", "p99_us", "lost",
        ]);
        // By driver, by round.
        let mut peaks: Vec<Vec<f64>> = vec![Vec::new(); drivers.len()];
        let mut points = Vec::new();
        // In further rounds two drivers, without one at a time.
        let further = more * 2 * (loads.len() - 1);
        self.report
            .expect(rounds * drivers.len() * loads.len() + further);
        for round in 0..rounds + more {
            for (driver, peaks) in drivers.iter().zip(&mut peaks) {
                let all = round < rounds;
                if !all && ![UDP.name, XDP.name].contains(&driver.name) {
                    continue;
                }
                let options = self.alternating(*driver);
                let mut peak = 0_f64;
                // One at a time is no peak.
                let loads = loads.iter().filter(|&&inflight| all || inflight > 64);
                for &inflight in loads {
                    let point = self.left_alone(lab, &options, *driver, 0, inflight)?;
                    peak = peak.max(point.seen.ops_s);
                    table.add(vec![
                        (round + 1).into(),
                        driver.name.into(),
                        inflight.into(),
                        rounded(point.seen.ops_s, 0),
                        rounded(point.seen.p50_us, 1),
                        rounded(point.seen.p99_us, 1),
                        point.seen.lost.into(),
                    ]);
                    points.push(point);
                }
                peaks.push(peak);
            }
        }
        self.report.say(
            "leader on CPU 0; followers and client in turn on CPU 1; no thread blocks; engine echo",
        );
        self.report.table("net-pinned", &table)?;
        for (driver, peaks) in drivers.iter().zip(&peaks) {
            let spread = Spread::of(peaks.iter().copied());
            self.noise
                .repeated(&format!("{}, peak", driver.name), &spread);
        }
        self.judge_peaks(&drivers, &peaks);
        Ok(points)
    }

    /// What a log, and two more copies of it, add to a write of RocksDB behind the same port. With
    /// two replicas the same four packets follow each other as with three; what three take beyond
    /// is the leader's send to the second follower, and that one's turn on the CPU that the client
    /// waits for.
    fn fronts(&mut self, lab: &Lab, hops: &[(&str, f64)]) -> Result<()> {
        if !cfg!(feature = "rocksdb") {
            self.report
                .say("this program was built without RocksDB: not measured behind the port");
            return Ok(());
        }
        if self.report.leaves_out("RocksDB behind the port") {
            return Ok(());
        }
        let rounds = if self.common.quick { 1 } else { 5 };
        let kinds = [
            ("no log", 1, RunAs::Bare),
            ("1 replica", 1, RunAs::OneLoop),
            ("2 replicas", 2, RunAs::Alternating),
            ("3 replicas", 3, RunAs::Alternating),
        ];
        let mut table = Table::new(&["round", "driver", "log", "p50_us", "p99_us"]);
        self.report.expect(2 * rounds * kinds.len());
        for driver in [UDP, XDP] {
            let hop = hops.iter().find(|(name, _)| *name == driver.transport);
            let Some((_, hop_us)) = hop.filter(|_| self.is_wanted(&driver)) else {
                continue;
            };
            let (mut added, mut second) = (Vec::new(), Vec::new());
            for round in 0..rounds {
                let mut p50_us = Vec::new();
                for (name, replicas, run) in kinds {
                    let options = NodeOptions {
                        polling: "busy".to_owned(),
                        engine: "rocksdb".to_owned(),
                        run,
                        ..Self::options(driver, replicas)
                    };
                    let point = self.left_alone(lab, &options, driver, VALUE_BYTES, 1)?;
                    p50_us.push(point.seen.p50_us);
                    table.add(vec![
                        (round + 1).into(),
                        driver.name.into(),
                        name.into(),
                        rounded(point.seen.p50_us, 1),
                        rounded(point.seen.p99_us, 1),
                    ]);
                }
                added.push(p50_us[3] - p50_us[0]);
                second.push(p50_us[3] - p50_us[2]);
            }
            let (added, second) = (Spread::of(added), Spread::of(second));
            self.report.say(&format!(
                "{}: 3 replicas less 2, the leader's send to the second follower and its turn before the client's: {:.1} µs; {}",
                driver.name,
                second.median,
                range(second)
            ));
            let what = format!("pinned, 3 replicas less no log, {}, µs", driver.name);
            let two_us = 2.0 * hop_us;
            let most_us = (10.0 * (two_us + LOG_US)).round() / 10.0;
            let verdict = Verdict::at_most(what, added.median, most_us);
            let note = format!("{}; two hops are {two_us:.1} µs", range(added));
            self.report.verdict(verdict.note(note));
        }
        self.report
            .say("RocksDB behind the same port; one write of 100 bytes at a time");
        self.report.table("net-fronts", &table)
    }

    fn judge_peaks(&mut self, drivers: &[Step], peaks: &[Vec<f64>]) {
        let of = |name: &str| {
            let place = drivers.iter().position(|driver| driver.name == name);
            place.map_or(&[][..], |place| &peaks[place])
        };
        // Goals: single requests over both; the last step of fig. 8 over its first. The other two
        // pairs are beside them, so that the two are not confused.
        for (one, other, goal) in [
            ("AF_XDP + bursts", "UDP + bursts", Some(2.0)),
            ("AF_XDP + bursts, packed", "UDP + bursts, packed", None),
            ("AF_XDP + bursts, packed", "TCP", Some(8.0)),
            ("AF_XDP + bursts", "TCP", None),
        ] {
            let (peaks, others) = (of(one), of(other));
            if peaks.is_empty() || others.is_empty() {
                continue;
            }
            let (ratio, rounds) = of_medians(peaks, others);
            let what = format!("pinned, peak, {one} / {other}");
            match goal {
                Some(least) => {
                    let verdict = Verdict::at_least(what, ratio, least);
                    let note = format!("the goal's; {}", range(rounds));
                    self.report.verdict(verdict.note(note));
                }
                None => self.report.say(&format!(
                    "     {what}: {ratio:.3} (no goal) – {}",
                    range(rounds)
                )),
            }
        }
    }
}

/// The quotient of two drivers' medians, and the rounds' own: a host that moves its guests' CPUs
/// between two points of a round is in the quotient of such a round, and less in that of all
/// rounds' medians.
fn of_medians(ones: &[f64], others: &[f64]) -> (f64, Spread) {
    let median = |of: &[f64]| Spread::of(of.iter().copied()).median;
    let quotients = ones.iter().zip(others).map(|(one, other)| one / other);
    (median(ones) / median(others), Spread::of(quotients))
}

fn range(of_rounds: Spread) -> String {
    let Spread { least, most, .. } = of_rounds;
    format!("rounds from {least:.2} to {most:.2}")
}

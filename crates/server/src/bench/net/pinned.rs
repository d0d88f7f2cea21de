//! Driver against driver where nothing waits for a scheduler: the replicas' loops are one thread on one CPU, the client is another
//! on another, and neither ever blocks.
//!
//! Requests come one to a datagram, as from clients that know nothing of each other, except where the name says "packed". Drivers
//! take turns, and a ratio is the median of the rounds' quotients.

use anyhow::Result;
use cyclone_bench::table::{Table, rounded};
use cyclone_bench::verdict::Verdict;

use super::{Run, STEPS, Step, step};
use crate::netlab::{Lab, NodeOptions, RunAs};

/// What is compared.
const DRIVERS: [Step; 7] = [
    STEPS[0],
    STEPS[1],
    bursts("UDP + bursts", "udp"),
    STEPS[3],
    bursts("AF_XDP + bursts", "xdp"),
    step("UDP + bursts, packed", "udp", 32),
    step("AF_XDP + bursts, packed", "xdp", 32),
];

/// The same over shared memory, in programs that have it.
const DPDK: [Step; 2] = [
    bursts("DPDK (memif) + bursts", "dpdk"),
    step("DPDK (memif) + bursts, packed", "dpdk", 32),
];

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

/// What a driver did in one round.
#[derive(Clone, Copy, Debug)]
struct Seen {
    unloaded_us: f64,
    peak: f64,
}

impl Run<'_> {
    /// Measures, and says what was promised. `hops`: the time of one packet, µs, by driver.
    pub(super) fn pinned(&mut self, lab: &Lab, hops: &[(&str, f64)]) -> Result<()> {
        self.drivers(lab)?;
        self.fronts(lab, hops)
    }

    fn drivers(&mut self, lab: &Lab) -> Result<()> {
        let (rounds, loads): (usize, &[usize]) = match self.common.quick {
            true => (2, &[1, 256]),
            false => (5, &[1, 16, 64, 256, 1024]),
        };
        let extra = DPDK.into_iter().filter(|_| cfg!(feature = "dpdk"));
        let wanted = |driver: &Step| driver.name.contains(&self.choice.only);
        let drivers: Vec<Step> = DRIVERS.into_iter().chain(extra).filter(wanted).collect();
        let mut table = Table::new(&["round", "driver", "inflight", "ops_s", "p50_us", "p99_us"]);
        // By driver, by round.
        let mut seen: Vec<Vec<Seen>> = vec![Vec::new(); drivers.len()];
        for round in 0..rounds {
            for (driver, seen) in drivers.iter().zip(&mut seen) {
                let options = NodeOptions {
                    polling: "busy".to_owned(),
                    run: RunAs::Alternating,
                    ..Self::options(*driver, 3)
                };
                let (mut unloaded_us, mut peak) = (f64::NAN, 0_f64);
                for &inflight in loads {
                    let cluster = self.start(lab, &options)?;
                    let point = self.load(lab, &cluster, *driver, 0, inflight, true)?;
                    if inflight == 1 {
                        unloaded_us = point.seen.p50_us;
                    }
                    peak = peak.max(point.seen.ops_s);
                    table.add(vec![
                        (round + 1).into(),
                        driver.name.into(),
                        inflight.into(),
                        rounded(point.seen.ops_s, 0),
                        rounded(point.seen.p50_us, 1),
                        rounded(point.seen.p99_us, 1),
                    ]);
                    self.report.row(&table);
                }
                seen.push(Seen { unloaded_us, peak });
            }
        }
        self.report
            .say("three replicas in one thread on CPU 0, the client on CPU 1; engine echo");
        self.report.table("net-pinned", &table)?;
        self.judge_pinned(&drivers, &seen);
        Ok(())
    }

    /// What a log, and two more copies of it, add to a write of RocksDB behind the same port.
    fn fronts(&mut self, lab: &Lab, hops: &[(&str, f64)]) -> Result<()> {
        let rounds = if self.common.quick { 2 } else { 5 };
        let kinds = [
            ("no log", 1, RunAs::Bare),
            ("1 replica", 1, RunAs::OneLoop),
            ("3 replicas", 3, RunAs::Alternating),
        ];
        let mut table = Table::new(&["round", "driver", "log", "p50_us", "p99_us"]);
        for (driver, hop_us) in [DRIVERS[2], DRIVERS[4]].into_iter().filter_map(|driver| {
            let wanted = driver.name.contains(&self.choice.only);
            let hop = hops.iter().find(|(name, _)| *name == driver.transport)?;
            wanted.then_some((driver, hop.1))
        }) {
            let mut added = Vec::new();
            for round in 0..rounds {
                let mut p50_us = Vec::new();
                for (name, replicas, run) in kinds {
                    let options = NodeOptions {
                        polling: "busy".to_owned(),
                        engine: "rocksdb".to_owned(),
                        run,
                        ..Self::options(driver, replicas)
                    };
                    let cluster = self.start(lab, &options)?;
                    let point = self.load(lab, &cluster, driver, VALUE_BYTES, 1, true)?;
                    p50_us.push(point.seen.p50_us);
                    table.add(vec![
                        (round + 1).into(),
                        driver.name.into(),
                        name.into(),
                        rounded(point.seen.p50_us, 1),
                        rounded(point.seen.p99_us, 1),
                    ]);
                    self.report.row(&table);
                }
                added.push(p50_us[2] - p50_us[0]);
            }
            let added = Spread::of(added.into_iter());
            let what = format!("pinned, 3 replicas less no log, {}, µs", driver.name);
            self.report.verdict(
                Verdict::at_most(what, added.middle, 2.0 * hop_us + LOG_US)
                    .note(format!("{}; two hops are {:.1} µs", added.range(), 2.0 * hop_us)),
            );
        }
        self.report
            .say("RocksDB behind the same port; one write of 100 bytes at a time");
        self.report.table("net-fronts", &table)
    }

    fn judge_pinned(&mut self, drivers: &[Step], seen: &[Vec<Seen>]) {
        let of = |name: &str| {
            let place = drivers.iter().position(|driver| driver.name == name);
            place.map_or(&[][..], |place| &seen[place])
        };
        let ratios = |one: &str, other: &str, measure: fn(&Seen) -> f64| {
            let pairs = of(one).iter().zip(of(other));
            Spread::of(pairs.map(|(one, other)| measure(one) / measure(other)))
        };
        let unloaded = ratios("AF_XDP + bursts", "UDP + bursts", |seen| seen.unloaded_us);
        if unloaded.middle.is_nan() {
            return;
        }
        self.report.verdict(
            Verdict::at_most("pinned, unloaded p50, AF_XDP / UDP", unloaded.middle, 0.6)
                .note(unloaded.range()),
        );
        for (over, least) in [("UDP", 2.0), ("UDP + bursts", 2.0), ("TCP", 8.0)] {
            let peak = ratios("AF_XDP + bursts", over, |seen| seen.peak);
            let what = format!("pinned, peak, AF_XDP + bursts / {over}");
            self.report
                .verdict(Verdict::at_least(what, peak.middle, least).note(peak.range()));
        }
    }
}

/// Quotients of rounds.
struct Spread {
    least: f64,
    middle: f64,
    most: f64,
}

impl Spread {
    fn of(values: impl Iterator<Item = f64>) -> Spread {
        let mut values: Vec<f64> = values.collect();
        values.sort_by(f64::total_cmp);
        let at = |place: usize| values.get(place).copied().unwrap_or(f64::NAN);
        Spread {
            least: at(0),
            middle: at(values.len() / 2),
            most: at(values.len().saturating_sub(1)),
        }
    }

    fn range(&self) -> String {
        format!("rounds from {:.2} to {:.2}", self.least, self.most)
    }
}

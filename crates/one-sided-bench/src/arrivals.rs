//! In which order what was posted arrives: a network keeps order within a connection, not across
//! connections.
//!
//! Time is the model's. A store is issued each `gap_ns`; how long it takes is drawn from a
//! log-normal distribution with the median and the 99th percentile that were measured under load.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use cyclone_bench::workload::Random;

/// A network under load, as one receiver sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    /// Between two stores that are issued to the receiver, in nanoseconds.
    pub gap_ns: u64,
    /// Half of the stores take less, in nanoseconds.
    pub median_ns: u64,
    /// 99 of 100 take less.
    pub p99_ns: u64,
}

impl Network {
    /// Share-KV at its peak: 56 M operations/s, half of them writes to two backups each, over 6
    /// servers (rowan table 2); remote persistence as in fig. 11.
    //= rowan §6.3
    pub const PAPER: Network = Network {
        gap_ns: 107,
        median_ns: 11_500,
        p99_ns: 24_000,
    };
}

/// Standard deviations between the median and the 99th percentile.
const TO_P99: f64 = 2.326;

/// What was issued and has not arrived.
pub(crate) struct Arrivals<T> {
    network: Network,
    random: Random,
    now_ns: u64,
    issued: u64,
    /// When the last store of a connection arrives.
    last_ns: HashMap<u64, u64>,
    /// By arrival, and by number where two arrive at once.
    order: BTreeSet<(u64, u64)>,
    stores: BTreeMap<u64, T>,
}

impl<T> Arrivals<T> {
    pub fn new(network: Network, seed: u64) -> Arrivals<T> {
        Arrivals {
            network,
            random: Random::new(seed),
            now_ns: 0,
            issued: 0,
            last_ns: HashMap::new(),
            order: BTreeSet::new(),
            stores: BTreeMap::new(),
        }
    }

    /// Normally distributed, by Box and Muller.
    fn normal(&mut self) -> f64 {
        let (one, other) = (1.0 - self.random.unit(), self.random.unit());
        (-2.0 * one.ln()).sqrt() * (std::f64::consts::TAU * other).cos()
    }

    /// A store is issued on a connection; `arrived` gets what has arrived by now.
    pub fn issue(&mut self, connection: u64, store: T, mut arrived: impl FnMut(T)) {
        let Network {
            gap_ns,
            median_ns,
            p99_ns,
        } = self.network;
        self.now_ns += gap_ns;
        let spread = (p99_ns as f64 / median_ns.max(1) as f64).ln() / TO_P99;
        let takes = (median_ns as f64 * (self.normal() * spread).exp()) as u64;
        let last = self.last_ns.entry(connection).or_default();
        *last = (self.now_ns + takes).max(*last + 1);
        self.issued += 1;
        self.order.insert((*last, self.issued));
        self.stores.insert(self.issued, store);
        while let Some(&(at, number)) = self.order.first()
            && at <= self.now_ns
        {
            self.order.pop_first();
            if let Some(store) = self.stores.remove(&number) {
                arrived(store);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_keep_their_order_and_overtake_each_other() {
        let mut arrivals = Arrivals::new(Network::PAPER, 7);
        let mut seen = Vec::new();
        for number in 0..20_000u64 {
            arrivals.issue(number % 24, number, |it| seen.push(it));
        }
        // What takes 11.5 µs, at 107 ns each, is about 107 stores in flight.
        assert!((19_800..19_950).contains(&seen.len()), "{}", seen.len());
        for connection in 0..24 {
            let of: Vec<u64> = seen
                .iter()
                .copied()
                .filter(|it| it % 24 == connection)
                .collect();
            assert!(of.is_sorted(), "{connection}");
        }
        assert!(!seen.is_sorted());
        let late = seen.windows(2).filter(|it| it[0] > it[1]).count();
        assert!(late > seen.len() / 10, "{late}");
    }
}

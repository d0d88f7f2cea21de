//! What the `cyclone-bench` program is made of; a library so that tests can use its machines and
//! clients.
//!
//! `cyclone bench NAME` runs `cyclone-bench NAME`. Every benchmark takes `--json`,
//! `--quick` and `--seed`: those of [`cyclone_bench::output::Common`], or of [`plans::Common`] for
//! what runs plans.

#![forbid(unsafe_code)]

pub mod builtin;
pub mod etcd;
pub mod flashlog;
pub mod life;
pub mod native;
pub mod net;
pub mod netlab;
pub mod overload;
pub mod plans;
pub mod pmkv;
pub mod put;
pub mod resp;
#[cfg_attr(not(feature = "rocksdb"), path = "rocks_missing.rs")]
pub mod rocks;
pub mod systems;
pub mod wires;

use std::time::Duration;

use cyclone::cluster::Options;
use cyclone::program;
use hdrhistogram::Histogram;

/// A cluster on this machine as [`Options::default`] has it, whose nodes run the program `cyclone`.
///
/// # Errors
/// When that program is not installed.
pub fn node_options() -> anyhow::Result<Options> {
    Ok(Options {
        executable: Some(program::find(program::CYCLONE)?),
        ..Options::default()
    })
}

/// What one load generator is asked to do.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Bytes of each value.
    pub value_bytes: usize,
    /// Operations outstanding at once.
    pub inflight: usize,
    /// Time before measuring.
    pub warm_up: Duration,
    /// Time measured.
    pub measure: Duration,
    /// Seed of the key sequence and of the value.
    pub seed: u64,
}

impl Load {
    /// The value that all writes have.
    pub fn value(&self) -> Vec<u8> {
        // Another sequence than the keys'.
        Sequence(!self.seed).value(self.value_bytes)
    }
}

/// What a load generator saw.
pub struct Measured {
    /// Operations that ended within the measured time.
    pub operations: u64,
    /// The measured time.
    pub elapsed: Duration,
    /// Latency in nanoseconds.
    pub latency_ns: Histogram<u64>,
    /// Operations that had no answer in the end: a datagram of theirs is gone. Until then each
    /// holds a place in flight.
    pub lost: u64,
}

/// A row of results.
#[derive(Clone, Debug)]
pub struct Point {
    /// What was measured.
    pub system: String,
    /// Bytes of each value.
    pub value_bytes: usize,
    /// Operations outstanding at once.
    pub inflight: usize,
    /// Operations per second.
    pub ops_s: f64,
    /// Median latency in microseconds.
    pub p50_us: f64,
    /// 99th percentile of latency in microseconds.
    pub p99_us: f64,
    /// Operations without an answer.
    pub lost: u64,
    /// What the system promises for an acknowledged write.
    pub guarantee: &'static str,
    /// CPU time of the servers per operation, in microseconds, where known.
    pub server_cpu_us: Option<f64>,
}

impl Point {
    /// Makes the line from what was seen.
    pub fn new(system: &str, guarantee: &'static str, load: &Load, measured: &Measured) -> Point {
        let micros =
            |quantile: f64| measured.latency_ns.value_at_quantile(quantile) as f64 / 1000.0;
        Point {
            system: system.to_owned(),
            value_bytes: load.value_bytes,
            inflight: load.inflight,
            ops_s: (measured.operations as f64 / measured.elapsed.as_secs_f64()).round(),
            p50_us: micros(0.5),
            p99_us: micros(0.99),
            lost: measured.lost,
            guarantee,
            server_cpu_us: None,
        }
    }
}

/// A histogram for latencies from 1 ns to 60 s.
pub fn histogram() -> anyhow::Result<Histogram<u64>> {
    Ok(Histogram::new_with_bounds(1, 60_000_000_000, 3)?)
}

/// SplitMix64: a fixed sequence for each seed.
pub struct Sequence(pub u64);

impl Sequence {
    /// The next 64 bits.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A value's bytes, which do not compress.
    pub fn value(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.draw() as u8).collect()
    }

    /// A 16-byte key out of a million.
    pub fn key(&mut self) -> [u8; 16] {
        let mut key = *b"key:000000000000";
        let mut number = self.draw() % 1_000_000;
        for digit in key.iter_mut().rev() {
            if number == 0 {
                break;
            }
            *digit = b'0' + (number % 10) as u8;
            number /= 10;
        }
        key
    }
}

//! The fields of a plan, as written.

use std::fmt;

use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer};

use crate::workload::ycsb::Letter;
use crate::workload::{Keys, Mix, Sizes, THETA, Workload};

/// Keys that `--quick` leaves of many.
pub(super) const QUICK_KEYS: u64 = 20_000;

pub(super) fn one() -> u64 {
    1
}

pub(super) fn listed(points: &[f64]) -> String {
    let points: Vec<String> = points.iter().map(f64::to_string).collect();
    points.join(", ")
}

/// What clients do.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct WorkloadText {
    /// Keys that exist before.
    pub keys: u64,
    /// Bytes of each key, 8 to 64.
    pub key_bytes: usize,
    /// `uniform` or `zipfian`.
    pub choice: Choice,
    /// Bytes of each value, or `etc`, or `var`.
    pub value: Value,
    /// Share of reads, 0 to 1; the rest are writes.
    pub reads: f64,
    /// One of YCSB's workloads, `a` to `f`; decides reads and the choice of keys.
    pub ycsb: Option<Letter>,
    /// Keys per write; more than one is an atomic batch.
    pub batch: usize,
    /// Whether all keys are written before.
    pub preload: bool,
}

impl Default for WorkloadText {
    fn default() -> Self {
        WorkloadText {
            keys: 1_000_000,
            key_bytes: 16,
            choice: Choice::Uniform,
            value: Value(Sizes::Fixed(100)),
            reads: 0.0,
            ycsb: None,
            batch: 1,
            preload: true,
        }
    }
}

impl WorkloadText {
    /// As the generators want it.
    pub(super) fn resolve(&self) -> Workload {
        let choice = match (self.ycsb, self.choice) {
            (Some(letter), _) => letter.keys(),
            (None, Choice::Uniform) => Keys::Uniform,
            (None, Choice::Zipfian) => Keys::Zipfian(THETA),
        };
        Workload {
            keys: self.keys,
            key_bytes: self.key_bytes,
            choice,
            sizes: self.value.0,
            mix: self.ycsb.map_or(Mix::reads(self.reads), Mix::ycsb),
            batch: self.batch,
            spread: 0,
        }
    }

    /// What is done, for people.
    pub(super) fn mix_words(&self) -> String {
        let choice = match self.choice {
            Choice::Uniform => "uniform",
            Choice::Zipfian => "zipfian 0.99",
        };
        match (self.ycsb, self.reads) {
            (Some(letter), _) => format!("YCSB {letter:?}"),
            (None, 0.0) => format!("writes, {choice}"),
            (None, reads) => format!("{:.0}% reads, {choice}", 100.0 * reads),
        }
    }
}

/// Which keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Choice {
    /// Each as often as any other.
    Uniform,
    /// Some much more often than others: 0.99.
    Zipfian,
}

/// Lengths of values: a number, `"etc"` or `"var"`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Value(pub Sizes);

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Value, D::Error> {
        struct Seen;
        impl Visitor<'_> for Seen {
            type Value = Value;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a number of bytes, \"etc\" or \"var\"")
            }

            fn visit_i64<E: de::Error>(self, bytes: i64) -> Result<Value, E> {
                let bytes = u32::try_from(bytes)
                    .map_err(|_| E::invalid_value(de::Unexpected::Signed(bytes), &self))?;
                Ok(Value(Sizes::Fixed(bytes)))
            }

            fn visit_u64<E: de::Error>(self, bytes: u64) -> Result<Value, E> {
                let bytes = u32::try_from(bytes)
                    .map_err(|_| E::invalid_value(de::Unexpected::Unsigned(bytes), &self))?;
                Ok(Value(Sizes::Fixed(bytes)))
            }

            fn visit_str<E: de::Error>(self, name: &str) -> Result<Value, E> {
                match name {
                    "etc" => Ok(Value(Sizes::Etc)),
                    "var" => Ok(Value(Sizes::Var)),
                    _ => Err(E::invalid_value(de::Unexpected::Str(name), &self)),
                }
            }
        }
        from.deserialize_any(Seen)
    }
}

/// How much load, and for how long.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Load {
    /// Operations in flight; in the open loop, the most that may be.
    pub inflight: usize,
    /// Open loop: operations a second.
    pub rate: Option<f64>,
    /// Time before measuring, ms.
    pub warm_up_ms: u64,
    /// Time measured, ms.
    pub measure_ms: u64,
    /// How often each variant is started and measured, in turn.
    pub repetitions: usize,
    /// All variants run side by side and take turns at every point: a slow second meets both sides
    /// of a ratio.
    pub together: bool,
}

impl Default for Load {
    fn default() -> Self {
        Load {
            inflight: 1,
            rate: None,
            warm_up_ms: 1000,
            measure_ms: 4000,
            repetitions: 3,
            together: false,
        }
    }
}

/// What changes from point to point.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sweep {
    /// What.
    pub over: Axis,
    /// Its values, ascending.
    pub points: Vec<f64>,
}

/// What a sweep changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Axis {
    /// Operations in flight, closed loop.
    Inflight,
    /// Operations a second, open loop.
    Rate,
    /// Keys per batch.
    Batch,
    /// Bytes of each value.
    ValueBytes,
    /// Physical logs that each batch touches, with one key in each.
    Logs,
}

impl Axis {
    /// Along x.
    pub fn label(self) -> &'static str {
        match self {
            Axis::Inflight => "operations in flight",
            Axis::Rate => "operations/s asked for",
            Axis::Batch => "keys per batch",
            Axis::ValueBytes => "bytes of each value",
            Axis::Logs => "physical logs per operation",
        }
    }
}

/// How the points are drawn.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Picture {
    /// Along x; if left out, throughput for sweeps over load and the sweep's values for others.
    pub x: Option<X>,
    /// Along y.
    pub y: Y,
    /// Whether x is logarithmic; if left out, where x is the sweep's values and the largest is 16
    /// times the smallest or more.
    pub log_x: Option<bool>,
    /// Whether y is logarithmic.
    pub log_y: bool,
}

/// What lies along x.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum X {
    /// Operations per second.
    Throughput,
    /// The sweep's values.
    Sweep,
}

/// What lies along y.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Y {
    /// Median latency.
    #[default]
    P50,
    /// 99th percentile of latency.
    P99,
    /// Operations per second.
    Throughput,
    /// CPU time of all processes per operation.
    Cpu,
}

/// A kill on the way.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Failover {
    /// When, in the measured time, ms.
    pub kill_at_ms: u64,
    /// Width of a step of the timeline, ms.
    pub bucket_ms: u64,
    /// How often; the picture shows the first.
    pub kills: usize,
}

impl Default for Failover {
    fn default() -> Self {
        Failover {
            kill_at_ms: 500,
            bucket_ms: 10,
            kills: 5,
        }
    }
}

/// What `--quick` changes; what is left out becomes short automatically.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Quick {
    /// The sweep's values.
    pub points: Option<Vec<f64>>,
    /// Keys that exist before.
    pub keys: Option<u64>,
    /// Time before measuring, ms.
    pub warm_up_ms: Option<u64>,
    /// Time measured, ms.
    pub measure_ms: Option<u64>,
    /// How often each variant is started and measured.
    pub repetitions: Option<usize>,
    /// How often the leader is killed.
    pub kills: Option<usize>,
}

/// Of what a ratio is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Measure {
    /// The highest throughput of all points.
    Peak,
    /// Median latency at the first point.
    Unloaded,
    /// Median latency at the last point.
    Last,
    /// Median latency at the point `at`.
    Latency,
    /// Throughput at the point `at`: both sides under the same load.
    Throughput,
    /// Median latency at the last point over that at the first, of one variant.
    Growth,
    /// Throughput at the last point over that at the first, of one variant.
    GrowthThroughput,
    /// Milliseconds without an answer after the kill, the median: no ratio.
    Outage,
    /// The same for 99 kills of 100.
    OutageP99,
}

/// A system by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SystemKind {
    /// Ours.
    Cyclone,
    /// RocksDB alone, in the load generator's process.
    Rocksdb,
    /// Three members.
    Etcd,
    /// One primary, one replica.
    Redis,
    /// Three replicas, the client inside the leader.
    Dragonboat,
    /// Our log-structured store.
    Pmkv,
}

/// How Cyclone is reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Client {
    /// Its own client, over datagrams.
    #[default]
    Native,
    /// The Redis protocol.
    Resp,
    /// From within the leader's process.
    Embedded,
    /// From within the threads that move the leader's logs: each asks its own log for the next
    /// operation when it was notified of one.
    Driver,
}

/// RocksDB's own log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Log {
    /// None.
    None,
    /// Written, not synced.
    Wal,
    /// Synced.
    Sync,
}

/// What Redis does for durability.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RedisMode {
    /// Append-only file synced before each answer, and WAIT 1.
    Always,
    /// Append-only file synced each second, no WAIT: may lose what it acknowledged.
    Everysec,
}

/// Where a store's files lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Store {
    /// On the disk.
    #[default]
    Disk,
    /// In memory; its logs still on the disk.
    Memory,
}

/// One curve. Which fields fit which system: docs/benchmarks.md.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Variant {
    /// In the legend.
    pub name: String,
    /// Who.
    pub system: SystemKind,
    /// What an acknowledged write is, where the system's own words do not fit.
    pub guarantee: Option<String>,
    /// cyclone: how it is reached.
    pub client: Option<Client>,
    /// cyclone: replicas; pmkv: copies of every object.
    pub replicas: Option<usize>,
    /// pmkv: `rowan`, `tailwind`, `hyperloop`, `rpc`, `rwrite`, `batch` or `share`.
    pub replication: Option<String>,
    /// pmkv: servers; as many as copies if left out.
    pub servers: Option<u32>,
    /// cyclone: physical logs.
    pub logs: Option<u16>,
    /// cyclone: threads per node that run a loop for each log; one loop for all if left out.
    pub log_threads: Option<u16>,
    /// cyclone: `rocksdb`, `memory` or `echo`.
    pub engine: Option<String>,
    /// cyclone: `udp`, `tcp` or `xdp`.
    pub transport: Option<String>,
    /// cyclone: commands per entry and datagrams per call.
    pub burst: Option<usize>,
    /// cyclone: `adaptive`, `busy` or `event`.
    pub polling: Option<String>,
    /// cyclone: `authenticated`, `encrypted` or `off`.
    pub security: Option<String>,
    /// cyclone: `index`, `log`, `weak` or `lease`.
    pub reads: Option<String>,
    /// cyclone: bytes of each log region, MiB; pmkv: of each server's memory.
    pub region_mib: Option<u64>,
    /// cyclone: a second level of the log, on the disk: `nvm` (behind the region) or `flash` (what
    /// acknowledgements wait for).
    pub durability: Option<String>,
    /// cyclone: shortest silence before an election, ms.
    pub election_ms: Option<u64>,
    /// cyclone, native: batches by two-phase commit from the client instead of ganged operations.
    pub two_phase: Option<bool>,
    /// cyclone: the leader has CPU 0, the other replicas and the load CPU 1, where there are two.
    pub pinned: Option<bool>,
    /// cyclone, in network namespaces with a cable between each two; needs root.
    pub namespaces: Option<bool>,
    /// cyclone over RESP, redis: operations that follow each other on a connection without waiting.
    pub pipeline: Option<usize>,
    /// cyclone, redis: clients, each a thread. rocksdb: at most so many threads share the
    /// operations in flight; without its own log as many as there are CPUs, with one as many as
    /// operations, if left out.
    pub clients: Option<usize>,
    /// rocksdb: its own log.
    pub log: Option<Log>,
    /// redis: durability.
    pub mode: Option<RedisMode>,
    /// cyclone, rocksdb: where the store lies.
    pub store: Option<Store>,
}

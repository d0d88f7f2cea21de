//! YCSB's load phase and workloads A, B, C over an in-process cluster.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use cyclone_bench::measure::histogram;
use cyclone_bench::workload::zipf::Zipf;
use cyclone_bench::workload::{Key, Random, THETA, bytes};
use cyclone_pmkv::{Answer, KeyHash};
use cyclone_wire::command::{Condition, Operation, Query};
use hdrhistogram::Histogram;

use super::cluster::Cluster;

/// Requests in flight, where that is not varied.
pub(super) const IN_FLIGHT: usize = 64;
/// Bytes of every key.
pub(super) const KEY_BYTES: usize = 16;

/// What is asked for.
#[derive(Clone, Copy)]
pub struct Mix {
    /// load, A, B, C.
    pub name: &'static str,
    /// Of a hundred requests, how many write.
    pub writes: u64,
}

impl Mix {
    /// Each key in turn is written.
    pub const LOAD: Mix = Mix {
        name: "load",
        writes: 100,
    };
    /// In YCSB's order.
    pub const ALL: [Mix; 4] = [
        Mix::LOAD,
        Mix {
            name: "A",
            writes: 50,
        },
        Mix {
            name: "B",
            writes: 5,
        },
        Mix {
            name: "C",
            writes: 0,
        },
    ];
}

/// Sizes of objects, keys included: all from one size to another equally often.
#[derive(Clone, Copy)]
pub struct Sizes {
    /// Whose.
    pub name: &'static str,
    least: u64,
    /// How many different ones.
    count: u64,
}

impl Sizes {
    /// Those of rowan §6.1: from half the mean to one and a half.
    pub const ALL: [Sizes; 3] = [
        Sizes::around("zippydb", 908),
        Sizes::around("up2x", 572),
        Sizes::around("udb", 1538),
    ];

    const fn around(name: &'static str, mean_tenths: u64) -> Sizes {
        Sizes {
            name,
            least: mean_tenths / 20,
            count: mean_tenths / 10,
        }
    }

    /// One size only.
    pub const fn only(name: &'static str, bytes: u64) -> Sizes {
        Sizes {
            name,
            least: bytes,
            count: 1,
        }
    }

    /// Bytes of a value.
    pub(super) fn draw(self, random: &mut Random) -> u32 {
        let object = self.least + random.below(self.count);
        object.saturating_sub(KEY_BYTES as u64).max(1) as u32
    }
}

/// When a load ends.
#[derive(Clone, Copy)]
pub enum Until {
    /// After so long.
    After(Duration),
    /// After so many requests.
    Done(u64),
}

/// A load.
#[derive(Clone, Copy)]
pub struct Load {
    pub mix: Mix,
    pub sizes: Sizes,
    /// Zipfian, or each key as often as any other.
    pub is_skewed: bool,
    pub keys: u64,
    pub until: Until,
    /// Requests in flight.
    pub in_flight: usize,
    pub seed: u64,
}

/// What a run saw.
pub struct Seen {
    pub ops_s: f64,
    /// By the time that this thread had a CPU: what other programs on the machine do changes it
    /// little.
    pub ops_cpu_s: f64,
    pub puts: Histogram<u64>,
    pub gets: Histogram<u64>,
    /// Of all time, what the keeping side's thread took.
    pub keeping_share: f64,
    /// Requests refused because memory was full.
    pub refused: u64,
}

/// Which requests there are, one after the other.
struct Requests {
    load: Load,
    random: Random,
    zipf: Zipf,
    next_key: u64,
}

impl Requests {
    fn new(load: Load) -> Requests {
        Requests {
            random: Random::new(load.seed ^ load.mix.writes),
            zipf: Zipf::new(load.keys, THETA),
            // Loads one after the other begin at different keys.
            next_key: load.seed.wrapping_mul(0x9e37_79b9) % load.keys,
            load,
        }
    }

    /// The next key, and the length of what is written to it.
    fn next(&mut self) -> (u64, Option<u32>) {
        let key = if self.load.mix.name == Mix::LOAD.name {
            self.next_key = (self.next_key + 1) % self.load.keys;
            self.next_key
        } else if self.load.is_skewed {
            self.zipf.rank(&mut self.random)
        } else {
            self.random.below(self.load.keys)
        };
        let is_put = self.random.below(100) < self.load.mix.writes;
        (key, is_put.then(|| self.load.sizes.draw(&mut self.random)))
    }
}

/// Sends the next request; returns whether it writes.
fn send(cluster: &mut Cluster, requests: &mut Requests, ticket: u64) -> Result<bool> {
    let (number, len) = requests.next();
    let key = Key::new(number, KEY_BYTES);
    let key = key.as_ref();
    let operation = match len {
        Some(len) => Operation::Set {
            key,
            value: bytes::value(len, number),
            condition: Condition::Always,
            get: false,
        },
        None => Operation::Read(Query::Get { key }),
    };
    let shard = cluster.configuration.shard_of_slot(KeyHash::of(key).slot);
    let primary = cluster.configuration.shards[usize::from(shard)].primary;
    let Some(node) = cluster.nodes[primary as usize].as_mut() else {
        bail!("server {primary} does not run");
    };
    node.worker_of(shard).submit(ticket, &[operation]);
    Ok(len.is_some())
}

/// Runs a load, so many requests at once.
pub(super) fn run(cluster: &mut Cluster, load: Load) -> Result<Seen> {
    let mut requests = Requests::new(load);
    let mut seen = Seen {
        ops_s: 0.0,
        ops_cpu_s: 0.0,
        puts: histogram()?,
        gets: histogram()?,
        keeping_share: 0.0,
        refused: 0,
    };
    // A request's ticket is its place here.
    let mut pending = vec![(Instant::now(), false); load.in_flight];
    let mut free: Vec<u64> = (0..load.in_flight as u64).collect();
    let (mut sent, mut done) = (0u64, 0u64);
    // A cluster that stood still while another one ran must know what time it is before it takes
    // requests.
    cluster.step();
    cluster.keeping = Duration::ZERO;
    let (begun, cpu) = (Instant::now(), super::cpu_time());
    let mut answers = Vec::new();
    loop {
        let goes_on = match load.until {
            Until::After(lasts) => begun.elapsed() < lasts,
            Until::Done(count) => sent < count,
        };
        if !goes_on && free.len() == load.in_flight {
            break;
        }
        while let Some(ticket) = free.pop_if(|_| goes_on) {
            let since = Instant::now();
            let is_put = send(cluster, &mut requests, ticket)?;
            pending[ticket as usize] = (since, is_put);
            sent += 1;
        }
        cyclone::signals::check()?;
        cluster.step();
        take_answers(cluster, &mut answers);
        for (ticket, answer) in answers.drain(..) {
            let (since, is_put) = pending[ticket as usize];
            free.push(ticket);
            match answer {
                Answer::Done(_) | Answer::Read(_) => done += 1,
                Answer::Full | Answer::Busy => {
                    seen.refused += 1;
                    continue;
                }
                other => bail!("a request ended with {other:?}"),
            }
            let ns = since.elapsed().as_nanos() as u64;
            let all = if is_put {
                &mut seen.puts
            } else {
                &mut seen.gets
            };
            all.saturating_record(ns.max(1));
        }
    }
    if seen.refused > done {
        let refused = seen.refused;
        bail!("{refused} requests were refused, {done} done: the memory is too small");
    }
    let took = begun.elapsed().as_secs_f64();
    let cpu_s = super::cpu_time().saturating_sub(cpu).as_secs_f64();
    seen.ops_s = done as f64 / took;
    seen.ops_cpu_s = done as f64 / cpu_s.max(1e-9);
    seen.keeping_share = cluster.keeping.as_secs_f64() / took;
    Ok(seen)
}

fn take_answers(cluster: &mut Cluster, answers: &mut Vec<(u64, Answer)>) {
    for node in cluster.nodes.iter_mut().flatten() {
        let mut number = 0;
        while let Some(worker) = node.worker(number) {
            worker.take_answers(answers);
            number += 1;
        }
    }
}

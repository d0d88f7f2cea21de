//! YCSB's load phase and workloads A, B, C over an in-process cluster.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use cyclone_bench::measure::histogram;
use cyclone_pmkv::{Answer, KeyHash};
use cyclone_wire::command::{Condition, Operation, Query};
use hdrhistogram::Histogram;

use super::Cluster;

/// Keys of a run.
const KEYS: u64 = 100_000;
/// Requests under way.
const IN_FLIGHT: usize = 64;
const KEY_BYTES: usize = 16;

/// What is asked for.
#[derive(Clone, Copy)]
pub struct Mix {
    /// load, A, B, C.
    pub name: &'static str,
    /// Of a hundred requests, how many write.
    pub writes: u64,
}

impl Mix {
    /// In YCSB's order.
    pub const ALL: [Mix; 4] = [
        Mix {
            name: "load",
            writes: 100,
        },
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

/// Sizes of objects, keys included: evenly from half the mean to one and a half.
#[derive(Clone, Copy)]
pub struct Sizes {
    /// Whose.
    pub name: &'static str,
    mean_tenths: u64,
}

impl Sizes {
    /// Those of rowan §6.1.
    pub const ALL: [Sizes; 3] = [
        Sizes {
            name: "zippydb",
            mean_tenths: 908,
        },
        Sizes {
            name: "up2x",
            mean_tenths: 572,
        },
        Sizes {
            name: "udb",
            mean_tenths: 1538,
        },
    ];
}

/// What a run saw.
pub struct Seen {
    pub ops_s: f64,
    pub puts: Histogram<u64>,
    pub gets: Histogram<u64>,
    /// Of all time, what the keeping side's thread took.
    pub keeping_share: f64,
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// In [0, 1).
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Ranks by Zipf's law with exponent 0.99 (Gray et al., as YCSB has it), scattered over the keys.
struct Zipfian {
    zeta: f64,
    alpha: f64,
    eta: f64,
}

const THETA: f64 = 0.99;

impl Zipfian {
    fn new() -> Zipfian {
        let zeta = |n: u64| (1..=n).map(|it| (it as f64).powf(-THETA)).sum::<f64>();
        let (all, two) = (zeta(KEYS), zeta(2));
        let eta = (1.0 - (2.0 / KEYS as f64).powf(1.0 - THETA)) / (1.0 - two / all);
        Zipfian {
            zeta: all,
            alpha: 1.0 / (1.0 - THETA),
            eta,
        }
    }

    fn key(&self, random: &mut Random) -> u64 {
        let unit = random.unit();
        let scaled = unit * self.zeta;
        let rank = if scaled < 1.0 {
            0
        } else if scaled < 1.0 + 0.5f64.powf(THETA) {
            1
        } else {
            (KEYS as f64 * (self.eta * unit - self.eta + 1.0).powf(self.alpha)) as u64
        };
        rank.wrapping_mul(0x9e37_79b9_7f4a_7c15) % KEYS
    }
}

fn name(key: u64) -> String {
    format!("{key:0KEY_BYTES$x}")
}

/// Asks for `lasts`, so many requests at once.
pub(super) fn run(
    cluster: &mut Cluster,
    mix: Mix,
    sizes: Sizes,
    skewed: bool,
    lasts: Duration,
    seed: u64,
) -> Result<Seen> {
    let mut random = Random(seed ^ mix.writes);
    let zipfian = Zipfian::new();
    let mut seen = Seen {
        ops_s: 0.0,
        puts: histogram()?,
        gets: histogram()?,
        keeping_share: 0.0,
    };
    let mut under_way: HashMap<u64, (Instant, bool)> = HashMap::new();
    let value = [b'v'; 512];
    let (mut ticket, mut done, mut refused) = (0u64, 0u64, 0u64);
    let mut next_key = 0;
    cluster.keeping = Duration::ZERO;
    let begun = Instant::now();
    let mut answers = Vec::new();
    while begun.elapsed() < lasts || !under_way.is_empty() {
        while under_way.len() < IN_FLIGHT && begun.elapsed() < lasts {
            let key = match (mix.name, skewed) {
                ("load", _) => {
                    next_key = (next_key + 1) % KEYS;
                    next_key
                }
                (_, true) => zipfian.key(&mut random),
                (_, false) => random.next() % KEYS,
            };
            let key = name(key);
            let is_put = random.next() % 100 < mix.writes;
            let len = sizes.mean_tenths / 20 + random.next() % (sizes.mean_tenths / 10);
            let len = (len as usize)
                .saturating_sub(KEY_BYTES)
                .clamp(1, value.len());
            let operation = match is_put {
                true => Operation::Set {
                    key: key.as_bytes(),
                    value: &value[..len],
                    condition: Condition::Always,
                    get: false,
                },
                false => Operation::Read(Query::Get {
                    key: key.as_bytes(),
                }),
            };
            let shard = cluster
                .configuration
                .shard_of_slot(KeyHash::of(key.as_bytes()).slot);
            let primary = cluster.configuration.shards[usize::from(shard)].primary;
            let Some(node) = cluster.nodes[primary as usize].as_mut() else {
                bail!("server {primary} does not run");
            };
            ticket += 1;
            under_way.insert(ticket, (Instant::now(), is_put));
            node.worker_of(shard).submit(ticket, &[operation]);
        }
        cluster.step();
        for node in cluster.nodes.iter_mut().flatten() {
            let mut number = 0;
            while let Some(worker) = node.worker(number) {
                worker.take_answers(&mut answers);
                number += 1;
            }
        }
        for (ticket, answer) in answers.drain(..) {
            let Some((since, is_put)) = under_way.remove(&ticket) else {
                continue;
            };
            match answer {
                Answer::Done(_) | Answer::Read(_) => done += 1,
                Answer::Full | Answer::Busy => {
                    refused += 1;
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
    if refused > done {
        bail!("{refused} requests were refused, {done} done: the memory is too small");
    }
    let took = begun.elapsed().as_secs_f64();
    seen.ops_s = done as f64 / took;
    seen.keeping_share = cluster.keeping.as_secs_f64() / took;
    Ok(seen)
}

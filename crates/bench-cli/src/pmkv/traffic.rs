//! Load on real servers, as Redis cluster clients put it, while something happens to them.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use cyclone_bench::drive::{Done, Lane, Outcome, Request};
use cyclone_bench::workload::{Key, Pair, Random, bytes};
use cyclone_pmkv::configuration::shard_of_slot;
use cyclone_wire::slot;

use super::load::{KEY_BYTES, Sizes};
use crate::wires::ShardLane;

/// Requests in flight.
const IN_FLIGHT: usize = 64;
/// Of a hundred requests, how many go to the hot shard that would have gone to the server that
/// loses them. //= rowan §6.6
const MOVED_PERCENT: u64 = 80;

/// A shard that becomes hot.
pub(super) struct Hot {
    /// Its keys.
    pub keys: Vec<u64>,
    /// The shards whose requests move there.
    pub instead_of: Vec<u16>,
}

/// What all its threads share.
pub(super) struct Traffic {
    pub addresses: Vec<SocketAddr>,
    pub keys: u64,
    /// Of a hundred requests, how many write.
    pub writes: u64,
    pub shards: u16,
    pub stop: AtomicBool,
    pub hot: Mutex<Option<Hot>>,
    begun: Instant,
}

impl Traffic {
    pub fn new(addresses: Vec<SocketAddr>, keys: u64, writes: u64, shards: u16) -> Traffic {
        Traffic {
            addresses,
            keys,
            writes,
            shards,
            stop: AtomicBool::new(false),
            hot: Mutex::new(None),
            begun: Instant::now(),
        }
    }

    /// Since the traffic was made: what its ends are counted from.
    pub fn elapsed(&self) -> Duration {
        self.begun.elapsed()
    }

    pub fn shard_of(&self, key: u64) -> u16 {
        let key = Key::new(key, KEY_BYTES);
        shard_of_slot(slot::slot(&key), self.shards)
    }

    /// Writes every key once.
    pub fn fill(&self, seed: u64) -> Result<()> {
        let mut random = Random::new(seed);
        let mut lane = ShardLane::open(&self.addresses, 1, IN_FLIGHT)?;
        let (mut next, mut flying, mut refused) = (0, 0, 0u64);
        let (mut again, mut done) = (Vec::new(), Vec::new());
        while next < self.keys || flying > 0 || !again.is_empty() {
            while flying < IN_FLIGHT && (next < self.keys || !again.is_empty()) {
                let key = again.pop().unwrap_or(next);
                next += u64::from(key == next);
                submit_write(&mut lane, key, key, &mut random)?;
                flying += 1;
            }
            cyclone::signals::check()?;
            lane.poll(Duration::from_millis(100), &mut done)?;
            for Done { token, outcome } in done.drain(..) {
                flying -= 1;
                if outcome != Outcome::Done {
                    again.push(token);
                    refused += 1;
                }
            }
            if refused > 100_000 + self.keys {
                bail!("the servers refuse to be filled: {refused} refusals");
            }
        }
        Ok(())
    }

    /// Keeps requests in flight until it is stopped; returns when each of those that were answered
    /// ended, in nanoseconds.
    pub fn flow(&self, seed: u64) -> Result<Vec<u64>> {
        let mut random = Random::new(seed);
        let mut lane = ShardLane::open(&self.addresses, 1, IN_FLIGHT)?;
        let (mut ends, mut done) = (Vec::new(), Vec::new());
        let mut free: Vec<u64> = (0..IN_FLIGHT as u64).collect();
        while !self.stop.load(Ordering::Relaxed) {
            while let Some(token) = free.pop() {
                let key = self.choose(&mut random);
                if random.below(100) < self.writes {
                    submit_write(&mut lane, token, key, &mut random)?;
                } else {
                    lane.submit(token, Request::Read(Key::new(key, KEY_BYTES)))?;
                }
            }
            lane.poll(Duration::from_millis(10), &mut done)?;
            let now = self.begun.elapsed().as_nanos() as u64;
            for Done { token, outcome } in done.drain(..) {
                free.push(token);
                if outcome == Outcome::Done {
                    ends.push(now);
                }
            }
        }
        Ok(ends)
    }

    fn choose(&self, random: &mut Random) -> u64 {
        let key = random.below(self.keys);
        let hot = self.hot.lock().unwrap_or_else(PoisonError::into_inner);
        match &*hot {
            Some(hot)
                if hot.instead_of.contains(&self.shard_of(key))
                    && random.below(100) < MOVED_PERCENT =>
            {
                hot.keys[random.below(hot.keys.len() as u64) as usize]
            }
            _ => key,
        }
    }
}

fn submit_write(lane: &mut ShardLane, token: u64, key: u64, random: &mut Random) -> Result<()> {
    let pair = Pair {
        key: Key::new(key, KEY_BYTES),
        value: bytes::value(Sizes::ALL[0].draw(random), key),
    };
    lane.submit(token, Request::Write(&[pair]))
}

/// Answers per second in steps of so many milliseconds, from `from` to `until`; a step's time
/// counts from `zero`. All in milliseconds since the traffic was made.
pub(super) fn timeline(
    ends_ns: &[u64],
    step_ms: f64,
    (from, zero, until): (f64, f64, f64),
) -> Vec<(f64, f64)> {
    let steps = ((until - from) / step_ms).floor().max(0.0) as usize;
    let mut counts = vec![0u64; steps];
    for end in ends_ns {
        let place = (*end as f64 / 1e6 - from) / step_ms;
        if place >= 0.0
            && let Some(count) = counts.get_mut(place as usize)
        {
            *count += 1;
        }
    }
    let at = |step: usize| from - zero + step as f64 * step_ms;
    (0..steps)
        .map(|step| (at(step), counts[step] as f64 * 1e3 / step_ms))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeline_counts_each_step_and_nothing_outside() {
        let ms = |ms: f64| (ms * 1e6) as u64;
        let ends = [ms(9.9), ms(10.0), ms(11.9), ms(12.0), ms(15.9), ms(16.0)];
        let seen = timeline(&ends, 2.0, (10.0, 12.0, 16.0));
        assert_eq!(seen, [(-2.0, 1000.0), (0.0, 500.0), (2.0, 500.0)]);
    }
}

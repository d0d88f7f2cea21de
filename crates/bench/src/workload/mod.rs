//! What clients ask for: which keys, how large values, how many reads. A sequence is a function of
//! its seed alone, so that every system gets the same operations; but for which keys have been
//! inserted by then, which lanes tell each other.
//!
//! ```text
//!   keys    uniform | zipfian (YCSB's 0.99) | latest            zipf.rs
//!   sizes   fixed | ETC | VAR                                   sizes.rs
//!   mix     reads, writes, inserts, scans, read-modify-writes   ycsb.rs
//!   bytes   a number's key, a length's value                    bytes.rs
//!   trace   the operations as a file, for load generators in other languages   trace.rs
//! ```

pub mod bytes;
mod random;
pub mod sizes;
pub mod trace;
pub mod ycsb;
pub mod zipf;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

pub use self::bytes::{Key, Pair};
pub use self::random::Random;
pub use self::sizes::Sizes;
pub use self::ycsb::Mix;
use self::zipf::Zipf;

/// Which of the keys an operation takes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Keys {
    /// Each as often as any other.
    Uniform,
    /// The n-th most popular one 1/n^theta as often as the first.
    Zipfian(f64),
    /// Zipfian from the newest to the oldest.
    Latest(f64),
}

/// YCSB's skew.
pub const THETA: f64 = 0.99;

/// What one operation does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// Writes a key that exists.
    Write,
    /// Reads a key.
    Read,
    /// Reads a key, then writes it.
    ReadWrite,
    /// Writes a key that does not exist yet.
    Insert,
    /// Reads so many keys from one on.
    Scan,
}

/// One operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Op {
    /// What it does.
    pub act: Act,
    /// Number of its key.
    pub key: u64,
    /// Bytes of the value; for a scan, how many keys.
    pub len: u32,
}

/// A workload.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Workload {
    /// Keys that exist before.
    pub keys: u64,
    /// Bytes of each key, 8 to 64.
    pub key_bytes: usize,
    /// Which keys are taken.
    pub choice: Keys,
    /// Bytes of values.
    pub sizes: Sizes,
    /// What is done.
    pub mix: Mix,
    /// Keys per write: more than one is an atomic batch.
    pub batch: usize,
    /// Physical logs among which a batch's keys lie, one after the other; 0: wherever they fall.
    pub spread: usize,
}

/// Which keys exist: those from before, and one more with each insert of any lane, for as long as
/// what was started runs.
#[derive(Clone, Debug)]
pub struct Inserts {
    next: Arc<AtomicU64>,
    /// Of what was inserted last so much may still be in flight.
    in_flight: u64,
}

impl Inserts {
    /// After so many keys.
    pub fn after(keys: u64) -> Inserts {
        Inserts {
            next: Arc::new(AtomicU64::new(keys)),
            in_flight: 0,
        }
    }

    /// The same, seen by those who have so many operations in flight, all together.
    pub fn with_in_flight(&self, operations: usize) -> Inserts {
        Inserts {
            next: Arc::clone(&self.next),
            in_flight: operations as u64,
        }
    }

    /// Number of the next key to be inserted.
    pub fn next(&self) -> u64 {
        self.next.load(Ordering::Relaxed)
    }

    /// Takes so many numbers, of which the first is answered.
    pub fn take(&self, count: u64) -> u64 {
        self.next.fetch_add(count, Ordering::Relaxed)
    }

    /// How many keys there are, `keys` of them from before.
    fn there(&self, keys: u64) -> u64 {
        self.next().saturating_sub(self.in_flight).max(keys)
    }
}

/// An endless sequence of operations.
pub struct Source {
    workload: Workload,
    random: Random,
    zipf: Option<Zipf>,
    inserts: Inserts,
}

impl Source {
    /// The sequence of a lane.
    pub fn new(workload: &Workload, seed: u64, lane: usize, inserts: &Inserts) -> Source {
        let theta = match workload.choice {
            Keys::Uniform => None,
            Keys::Zipfian(theta) | Keys::Latest(theta) => Some(theta),
        };
        Source {
            zipf: theta.map(|theta| Zipf::new(workload.keys.max(1), theta)),
            workload: workload.clone(),
            random: Random::new(seed ^ (lane as u64).wrapping_mul(0xa076_1d64_78bd_642f)),
            inserts: inserts.clone(),
        }
    }

    /// What it is made of.
    pub fn workload(&self) -> &Workload {
        &self.workload
    }

    /// The next operation.
    pub fn draw(&mut self) -> Op {
        let act = self.workload.mix.act(self.random.unit());
        let key = match act {
            Act::Insert => self.inserts.take(1),
            _ => self.key(),
        };
        let len = match act {
            Act::Scan => {
                1 + self
                    .random
                    .below(u64::from(self.workload.mix.scan_keys.max(1))) as u32
            }
            _ => self.workload.sizes.draw(&mut self.random),
        };
        Op { act, key, len }
    }

    /// A key of those that exist.
    pub fn key(&mut self) -> u64 {
        match (&self.zipf, self.workload.choice) {
            (Some(zipf), Keys::Zipfian(_)) => zipf.rank(&mut self.random),
            (Some(zipf), _) => {
                let newest = self.inserts.there(self.workload.keys.max(1)) - 1;
                newest - zipf.rank(&mut self.random).min(newest)
            }
            (None, _) => self.random.below(self.workload.keys.max(1)),
        }
    }

    /// The length of one more value.
    pub fn length(&mut self) -> u32 {
        self.workload.sizes.draw(&mut self.random)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workload(choice: Keys, mix: Mix) -> Workload {
        Workload {
            keys: 1000,
            key_bytes: 16,
            choice,
            sizes: Sizes::Fixed(100),
            mix,
            batch: 1,
            spread: 0,
        }
    }

    #[test]
    fn a_sequence_is_a_function_of_its_seed() {
        let workload = workload(Keys::Zipfian(THETA), Mix::reads(0.5));
        let take = |seed, lane| -> Vec<Op> {
            let mut source = Source::new(&workload, seed, lane, &Inserts::after(1000));
            (0..100).map(|_| source.draw()).collect()
        };
        assert_eq!(take(1, 0), take(1, 0));
        assert_ne!(take(1, 0), take(2, 0));
        assert_ne!(take(1, 0), take(1, 1));
    }

    #[test]
    fn uniform_keys_are_all_taken_alike() {
        let workload = workload(Keys::Uniform, Mix::reads(0.0));
        let mut source = Source::new(&workload, 7, 0, &Inserts::after(1000));
        let mut taken = vec![0u32; 1000];
        for _ in 0..200_000 {
            taken[source.draw().key as usize] += 1;
        }
        // 200 expected each, deviation 14: seven deviations.
        assert!(taken.iter().all(|&count| (100..300).contains(&count)));
    }

    #[test]
    fn lanes_insert_different_keys_and_read_what_any_of_them_has_inserted() {
        let workload = workload(Keys::Latest(THETA), Mix::ycsb(ycsb::Letter::D));
        let inserts = Inserts::after(1000);
        let mut inserted: Vec<bool> = vec![true; 1000];
        let (mut flying, mut read_new) = (std::collections::VecDeque::new(), 0);
        // Two measurements one after the other, of different seeds.
        for seed in 0..2 {
            let flying_at_most = 64;
            let seen = inserts.with_in_flight(flying_at_most);
            let lane = |lane| Source::new(&workload, seed, lane, &seen);
            let mut lanes: Vec<Source> = (0..8).map(lane).collect();
            for step in 0..20_000 {
                let op = lanes[step % 8].draw();
                match op.act {
                    Act::Insert => {
                        assert_eq!(op.key, inserts.next() - 1);
                        inserted.push(false);
                    }
                    _ => assert!(inserted[op.key as usize], "{op:?}"),
                }
                read_new += u64::from(op.act == Act::Read && op.key >= 1000);
                // An operation ends when so many have begun after it.
                flying.push_back(op);
                if flying.len() >= flying_at_most {
                    let ended: Option<Op> = flying.pop_front();
                    inserted[ended.expect("flying").key as usize] = true;
                }
            }
        }
        assert!(inserted.len() > 2500 && read_new > 1000);
    }
}

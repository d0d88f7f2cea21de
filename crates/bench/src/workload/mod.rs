//! What clients ask for: which keys, how large values, how many reads. A sequence is a function of its seed alone, so that
//! every system gets the same operations.
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

/// An endless sequence of operations.
pub struct Source {
    workload: Workload,
    random: Random,
    zipf: Option<Zipf>,
    /// Numbers of the next inserted key, and from one to the next: lanes share the numbers among themselves.
    next: u64,
    stride: u64,
    /// Keys that this source knows to exist.
    known: u64,
}

impl Source {
    /// The sequence of lane `lane` of `lanes`.
    pub fn new(workload: &Workload, seed: u64, lane: usize, lanes: usize) -> Source {
        let theta = match workload.choice {
            Keys::Uniform => None,
            Keys::Zipfian(theta) | Keys::Latest(theta) => Some(theta),
        };
        Source {
            zipf: theta.map(|theta| Zipf::new(workload.keys.max(1), theta)),
            workload: workload.clone(),
            random: Random::new(seed ^ (lane as u64).wrapping_mul(0xa076_1d64_78bd_642f)),
            next: workload.keys + lane as u64,
            stride: lanes.max(1) as u64,
            known: workload.keys.max(1),
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
            Act::Insert => {
                let key = self.next;
                self.next += self.stride;
                self.known = key + 1;
                key
            }
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
                let age = zipf.rank(&mut self.random);
                self.known - 1 - age.min(self.known - 1)
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
            let mut source = Source::new(&workload, seed, lane, 2);
            (0..100).map(|_| source.draw()).collect()
        };
        assert_eq!(take(1, 0), take(1, 0));
        assert_ne!(take(1, 0), take(2, 0));
        assert_ne!(take(1, 0), take(1, 1));
    }

    #[test]
    fn uniform_keys_are_all_taken_alike() {
        let mut source = Source::new(&workload(Keys::Uniform, Mix::reads(0.0)), 7, 0, 1);
        let mut taken = vec![0u32; 1000];
        for _ in 0..200_000 {
            taken[source.draw().key as usize] += 1;
        }
        // 200 expected each, deviation 14: seven deviations.
        assert!(taken.iter().all(|&count| (100..300).contains(&count)));
    }

    #[test]
    fn lanes_insert_different_keys_and_read_what_they_inserted() {
        let workload = workload(Keys::Latest(THETA), Mix::ycsb(ycsb::Letter::D));
        let mut inserted = std::collections::HashSet::new();
        for lane in 0..3 {
            let mut source = Source::new(&workload, 1, lane, 3);
            let mut newest = 0;
            for _ in 0..20_000 {
                let op = source.draw();
                match op.act {
                    Act::Insert => {
                        assert!(op.key >= 1000 && inserted.insert(op.key));
                        newest = op.key;
                    }
                    _ => assert!(op.key <= newest.max(1000)),
                }
            }
        }
        assert!(inserted.len() > 2000);
    }
}

//! Turns numbers of operations into the bytes that a system gets.

use super::Request;
use crate::workload::{Act, Key, Pair, Source, bytes};

/// Makes one request after the other.
pub struct Maker<'a> {
    source: Source,
    /// Number of the physical log a key lies in.
    place: &'a dyn Fn(&[u8]) -> usize,
    pairs: Vec<Pair>,
    /// The key of the operation made last, for those that do two things with it.
    last: Pair,
    salt: u64,
}

/// So many keys are tried to find one in a wanted log: with 64 logs the chance that none is there
/// is below 10^-68.
const TRIES: usize = 10_000;

impl<'a> Maker<'a> {
    /// Of a source; `place` is asked when a batch's keys are to lie in certain logs.
    pub fn new(source: Source, place: &'a dyn Fn(&[u8]) -> usize) -> Maker<'a> {
        Maker {
            source,
            place,
            pairs: Vec::new(),
            last: Pair {
                key: Key::new(0, bytes::SHORTEST_KEY),
                value: &[],
            },
            salt: 0,
        }
    }

    /// The next operation. Of a read-modify-write only the key, to be had from [`Maker::pair`].
    pub fn make(&mut self) -> (Act, Request<'_>) {
        let op = self.source.draw();
        let key_bytes = self.source.workload().key_bytes;
        let key = Key::new(op.key, key_bytes);
        self.salt = self.salt.wrapping_add(1);
        match op.act {
            Act::Read => (op.act, Request::Read(key)),
            Act::Scan => (op.act, Request::Scan(key, op.len)),
            Act::Write | Act::Insert | Act::ReadWrite => {
                self.last = Pair {
                    key,
                    value: bytes::value(op.len, self.salt),
                };
                self.pairs.clear();
                self.pairs.push(self.last);
                if op.act == Act::Write {
                    self.fill();
                }
                (op.act, Request::Write(&self.pairs))
            }
        }
    }

    /// Key and value of the write made last.
    pub fn pair(&self) -> Pair {
        self.last
    }

    /// A batch's other keys.
    fn fill(&mut self) {
        let (batch, spread) = {
            let workload = self.source.workload();
            (workload.batch.max(1), workload.spread)
        };
        if spread > 0 {
            self.pairs.clear();
        }
        while self.pairs.len() < batch {
            let number = self.pairs.len();
            let pair = self.another(number, spread);
            self.pairs.push(pair);
        }
    }

    fn another(&mut self, number: usize, spread: usize) -> Pair {
        let key_bytes = self.source.workload().key_bytes;
        let mut key = Key::new(self.source.key(), key_bytes);
        if spread > 0 {
            for _ in 0..TRIES {
                if (self.place)(&key) == number % spread {
                    break;
                }
                key = Key::new(self.source.key(), key_bytes);
            }
        }
        Pair {
            key,
            value: bytes::value(self.source.length(), self.salt.wrapping_add(number as u64)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::{Inserts, Keys, Mix, Sizes, Workload};

    fn source(batch: usize, spread: usize) -> Source {
        let workload = Workload {
            keys: 1000,
            key_bytes: 8,
            choice: Keys::Uniform,
            sizes: Sizes::Fixed(8),
            mix: Mix::reads(0.0),
            batch,
            spread,
        };
        Source::new(&workload, 1, 0, &Inserts::after(1000))
    }

    #[test]
    fn the_keys_of_a_batch_lie_in_as_many_logs_as_asked() {
        let place = |key: &[u8]| usize::from(key[0] % 8);
        for spread in 1..=8 {
            let mut maker = Maker::new(source(spread, spread), &place);
            for _ in 0..100 {
                let (act, Request::Write(pairs)) = maker.make() else {
                    panic!("a write");
                };
                assert_eq!(act, Act::Write);
                let logs: Vec<usize> = pairs.iter().map(|pair| place(&pair.key)).collect();
                assert_eq!(logs, (0..spread).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn a_batch_has_as_many_pairs_as_asked() {
        let mut maker = Maker::new(source(5, 0), &|_| 0);
        let (_, Request::Write(pairs)) = maker.make() else {
            panic!("a write");
        };
        assert_eq!(pairs.len(), 5);
        assert!(pairs.iter().all(|pair| pair.value.len() == 8));
    }
}

//! What transactions read and wrote, as their clients saw it; and whether one order explains it
//! all.
//!
//! Every transaction has a number, and stores it in every cell that it writes, of which it has read
//! what was there before. So the final cells tell, number by number, who wrote them in which order.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};

/// One transaction, as far as it got.
#[derive(Debug)]
struct Entry {
    begin: u64,
    /// When the commit was reported to its client.
    acknowledged: Option<u64>,
    /// Cell to the number found there.
    reads: BTreeMap<usize, u64>,
    writes: BTreeSet<usize>,
}

#[derive(Default)]
pub struct History {
    clock: Cell<u64>,
    entries: RefCell<Vec<Entry>>,
}

impl History {
    /// A time later than all that were returned before.
    pub fn now(&self) -> u64 {
        self.clock.set(self.clock.get() + 1);
        self.clock.get()
    }

    /// A transaction is about to commit; answers its number, from 1.
    pub fn tries(&self, begin: u64, reads: BTreeMap<usize, u64>, writes: BTreeSet<usize>) -> u64 {
        let mut entries = self.entries.borrow_mut();
        entries.push(Entry {
            begin,
            acknowledged: None,
            reads,
            writes,
        });
        entries.len() as u64
    }

    pub fn acknowledged(&self, number: u64) {
        let now = self.now();
        self.entries.borrow_mut()[number as usize - 1].acknowledged = Some(now);
    }

    pub fn is_empty(&self) -> bool {
        self.entries.borrow().is_empty()
    }

    pub fn count(&self) -> usize {
        let entries = self.entries.borrow();
        entries.iter().filter(|e| e.acknowledged.is_some()).count()
    }

    /// Whether there is an order of all transactions that took effect, each at a time between its
    /// begin and its acknowledgement, in which each found what it read; that all acknowledged ones
    /// are in it, and none in part.
    pub fn check(&self, cells: &[u64]) -> Result<(), String> {
        let entries = self.entries.borrow();
        let chains = self.chains(cells)?;
        let wrote: BTreeSet<u64> = chains.iter().flatten().copied().collect();
        for (entry, number) in entries.iter().zip(1..) {
            for (cell, chain) in chains.iter().enumerate() {
                let there = chain.contains(&number);
                let writes = entry.writes.contains(&cell);
                if there && !writes {
                    return Err(format!(
                        "{number} is in cell {cell}, which it did not write"
                    ));
                }
                if writes && !there && wrote.contains(&number) {
                    return Err(format!("{number} took effect, but not in cell {cell}"));
                }
                if writes && !there && entry.acknowledged.is_some() {
                    return Err(format!(
                        "{number} was acknowledged and is not in cell {cell}"
                    ));
                }
            }
        }
        self.one_order(&chains, &wrote)
    }

    /// For every cell who wrote it, the first first.
    fn chains(&self, cells: &[u64]) -> Result<Vec<Vec<u64>>, String> {
        let entries = self.entries.borrow();
        let mut chains = Vec::new();
        for (cell, &last) in cells.iter().enumerate() {
            let (mut chain, mut number) = (Vec::new(), last);
            while number != 0 {
                let entry = entries.get(number as usize - 1);
                let entry = entry.ok_or(format!(
                    "cell {cell} holds {number}, which no transaction wrote"
                ))?;
                if chain.contains(&number) {
                    return Err(format!("cell {cell}: {number} follows itself"));
                }
                chain.push(number);
                let before = entry.reads.get(&cell);
                number = *before.ok_or(format!("{number} did not write cell {cell}"))?;
            }
            chain.reverse();
            chains.push(chain);
        }
        Ok(chains)
    }

    fn one_order(&self, chains: &[Vec<u64>], wrote: &BTreeSet<u64>) -> Result<(), String> {
        let entries = self.entries.borrow();
        let counts = |n: u64| entries[n as usize - 1].acknowledged.is_some() || wrote.contains(&n);
        let numbers: Vec<u64> = (1..=entries.len() as u64).filter(|&n| counts(n)).collect();
        let mut after: BTreeMap<u64, BTreeSet<u64>> = BTreeMap::new();
        for &number in &numbers {
            let entry = &entries[number as usize - 1];
            for (&cell, &read) in &entry.reads {
                let chain = &chains[cell];
                let place = chain.iter().position(|&n| n == read);
                if read != 0 && place.is_none() {
                    return Err(format!(
                        "{number} read {read} in cell {cell}: not committed"
                    ));
                }
                if read != 0 {
                    after.entry(read).or_default().insert(number);
                }
                let next = chain.get(place.map_or(0, |place| place + 1)).copied();
                if let Some(next) = next.filter(|&next| next != number) {
                    after.entry(number).or_default().insert(next);
                }
            }
            let end = entry.acknowledged.unwrap_or(u64::MAX);
            let later = |&&n: &&u64| entries[n as usize - 1].begin > end;
            let later = numbers.iter().filter(later).copied();
            after.entry(number).or_default().extend(later);
        }
        acyclic(&numbers, &after)
    }
}

fn acyclic(numbers: &[u64], after: &BTreeMap<u64, BTreeSet<u64>>) -> Result<(), String> {
    let mut before: BTreeMap<u64, usize> = numbers.iter().map(|&n| (n, 0)).collect();
    for next in after.values().flatten() {
        *before.entry(*next).or_default() += 1;
    }
    let free = |(&n, &count): (&u64, &usize)| (count == 0).then_some(n);
    let mut ready: Vec<u64> = before.iter().filter_map(free).collect();
    let mut left = before.len();
    while let Some(number) = ready.pop() {
        left -= 1;
        for next in after.get(&number).into_iter().flatten() {
            let count = before.entry(*next).or_default();
            *count -= 1;
            if *count == 0 {
                ready.push(*next);
            }
        }
    }
    if left == 0 {
        return Ok(());
    }
    let circle: Vec<u64> = before
        .into_iter()
        .filter(|(_, c)| *c > 0)
        .map(|(n, _)| n)
        .collect();
    Err(format!("no order explains {circle:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tries(history: &History, reads: &[(usize, u64)], writes: &[usize]) -> u64 {
        let begin = history.now();
        let reads = reads.iter().copied().collect();
        let number = history.tries(begin, reads, writes.iter().copied().collect());
        history.acknowledged(number);
        number
    }

    #[test]
    fn what_no_order_explains_is_noticed() {
        let good = History::default();
        tries(&good, &[(0, 0), (1, 0)], &[0, 1]);
        tries(&good, &[(0, 1)], &[0]);
        tries(&good, &[(0, 2), (1, 1)], &[]);
        assert_eq!(good.check(&[2, 1]), Ok(()));
        assert!(good.check(&[1, 1]).is_err(), "lost");
        assert!(good.check(&[2, 0]).is_err(), "half");
        assert!(good.check(&[9, 1]).is_err(), "unknown");

        let lost_update = History::default();
        tries(&lost_update, &[(0, 0)], &[0]);
        tries(&lost_update, &[(0, 0)], &[0]);
        assert!(lost_update.check(&[2]).is_err());

        let stale_read = History::default();
        tries(&stale_read, &[(0, 0)], &[0]);
        tries(&stale_read, &[(0, 0)], &[]);
        assert!(stale_read.check(&[1]).is_err());

        let skew = History::default();
        let (first, second) = (skew.now(), skew.now());
        let both = || BTreeMap::from([(0, 0), (1, 0)]);
        let one = skew.tries(first, both(), BTreeSet::from([0]));
        let two = skew.tries(second, both(), BTreeSet::from([1]));
        skew.acknowledged(one);
        skew.acknowledged(two);
        assert!(skew.check(&[1, 2]).is_err());
    }
}

//! What clients know, and what servers may therefore answer. Every value written is like no other.

use std::collections::HashMap;

/// A write of one key.
#[derive(Clone, Debug)]
pub struct Write {
    pub start: u64,
    /// `None` while, or if it never ends, its outcome is not known.
    pub end: Option<u64>,
    pub value: Option<Vec<u8>>,
    /// Refused: certainly not done.
    pub refused: bool,
}

#[derive(Default)]
pub struct Model {
    writes: HashMap<Vec<u8>, Vec<Write>>,
    pub acknowledged: usize,
    pub unknown: usize,
    pub reads: usize,
    /// Counters: increments acknowledged, unknown, and what was answered.
    counters: HashMap<Vec<u8>, Counter>,
}

#[derive(Default)]
struct Counter {
    answers: Vec<i64>,
    begun: usize,
    refused: usize,
}

impl Model {
    pub fn begin(&mut self, key: &[u8], value: Option<Vec<u8>>, start: u64) -> usize {
        let writes = self.writes.entry(key.to_vec()).or_default();
        writes.push(Write {
            start,
            end: None,
            value,
            refused: false,
        });
        writes.len() - 1
    }

    pub fn done(&mut self, key: &[u8], number: usize, end: u64) {
        self.writes.get_mut(key).expect("begun")[number].end = Some(end);
        self.acknowledged += 1;
    }

    pub fn refused(&mut self, key: &[u8], number: usize) {
        self.writes.get_mut(key).expect("begun")[number].refused = true;
    }

    /// A read between two moments answered this.
    pub fn check_read(
        &mut self,
        seed: u64,
        key: &[u8],
        value: Option<&[u8]>,
        start: u64,
        end: u64,
    ) {
        self.reads += 1;
        let writes = self.writes.get(key).map_or(&[][..], |it| it);
        // Who was surely followed by another write before the read began must not be seen.
        let is_over = |write_end: u64| {
            writes
                .iter()
                .any(|it| it.start > write_end && it.end.is_some_and(|end| end < start))
        };
        let may = |write: &Write| {
            !write.refused
                && write.value.as_deref() == value
                && write.start < end
                && !write.end.is_some_and(is_over)
        };
        let never_written = value.is_none() && !is_over(0);
        assert!(
            never_written || writes.iter().any(may),
            "seed {seed}: {:?} read as {:?} between {start} and {end}; writes {writes:?}",
            key.escape_ascii().to_string(),
            value.map(|it| it.escape_ascii().to_string()),
        );
    }

    pub fn keys(&self) -> Vec<Vec<u8>> {
        let mut keys: Vec<_> = self.writes.keys().cloned().collect();
        keys.sort();
        keys
    }

    pub fn counters(&self) -> Vec<Vec<u8>> {
        let mut keys: Vec<_> = self.counters.keys().cloned().collect();
        keys.sort();
        keys
    }

    pub fn increment(&mut self, key: &[u8]) {
        self.counters.entry(key.to_vec()).or_default().begun += 1;
    }

    pub fn incremented(&mut self, seed: u64, key: &[u8], answer: i64) {
        let counter = self.counters.get_mut(key).expect("begun");
        assert!(
            !counter.answers.contains(&answer),
            "seed {seed}: {answer} was answered twice"
        );
        counter.answers.push(answer);
        self.acknowledged += 1;
    }

    pub fn increment_refused(&mut self, key: &[u8]) {
        self.counters.get_mut(key).expect("begun").refused += 1;
    }

    pub fn check_counter(&self, seed: u64, key: &[u8], value: i64) {
        let counter = &self.counters[key];
        let least = counter.answers.len() as i64;
        let most = (counter.begun - counter.refused) as i64;
        assert!(
            (least..=most).contains(&value) && counter.answers.iter().all(|&it| it <= value),
            "seed {seed}: {value} after {least} to {most} increments, answers {:?}",
            counter.answers
        );
    }
}

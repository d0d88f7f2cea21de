//! One thread that drives many senders, each with some records in flight, and measures them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use cyclone_bench::children::kept_waiting;
use cyclone_bench::measure::histogram;
use cyclone_bench::workload::Random;
use cyclone_fabric::Address;
use cyclone_replication::{BackupId, Outcome, ReplicationError, Sender};
use hdrhistogram::Histogram;

/// How long logs may take to open, and records to finish at the end.
const PATIENCE: Duration = Duration::from_secs(60);

/// What to do.
#[derive(Clone, Debug)]
pub struct Load {
    /// Bytes of each record.
    pub record_bytes: usize,
    /// Records in flight per sender.
    pub window: usize,
    /// Time before measuring.
    pub warm_up: Duration,
    /// Time measured.
    pub measure: Duration,
    /// Between two arrivals of records at one sender, whatever has become of the earlier ones;
    /// latency then counts from the arrival, so that a stalled backup delays all that arrive
    /// meanwhile. `None`: the next record arrives when there is room for it.
    pub pace: Option<Duration>,
    /// Of the records' bytes.
    pub seed: u64,
    /// The backups, each of which gets every record.
    pub backups: Vec<(BackupId, Address)>,
}

/// What came of it.
pub struct Measured {
    /// Records that became durable within the measured time.
    pub records: u64,
    /// The measured time.
    pub elapsed: Duration,
    /// From the record's arrival to the news that it is durable, in nanoseconds.
    pub latency_ns: Histogram<u64>,
    /// Part of the time in which this thread could have run and other programs had its CPU.
    pub disturbed: f64,
}

impl Measured {
    /// Records per second.
    pub fn records_s(&self) -> f64 {
        self.records as f64 / self.elapsed.as_secs_f64()
    }
}

/// Moments that callers may want to know of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunEvent {
    /// Nothing is due: do something else for a while. Comes once per round.
    Round,
    /// Measuring begins.
    Begin,
    /// Measuring ends; records in flight are waited for.
    End,
}

/// A sender and its records in flight.
struct Lane {
    sender: Box<dyn Sender>,
    begun: Vec<Instant>,
    idle: Vec<usize>,
    /// When the next record arrives, if arrivals are paced.
    due: Instant,
    /// Whether any record has become durable.
    works: bool,
}

/// Drives senders; see [`run`].
struct Driver<'a> {
    load: &'a Load,
    lanes: Vec<Lane>,
    ids: Vec<BackupId>,
    record: Vec<u8>,
    outcomes: Vec<Outcome>,
    origin: Instant,
    latency_ns: Histogram<u64>,
    records: u64,
    /// Records count that become durable (paced: that arrive) from the first of these moments to
    /// the second.
    counted: (Instant, Instant),
}

impl Driver<'_> {
    fn now_us(&self) -> u64 {
        self.origin.elapsed().as_micros() as u64
    }

    /// Takes what has finished on one lane. Answers how many logs were opened.
    fn take(&mut self, number: usize) -> Result<usize> {
        let now_us = self.now_us();
        let lane = &mut self.lanes[number];
        let mut outcomes = std::mem::take(&mut self.outcomes);
        lane.sender.poll(now_us, &mut outcomes);
        let mut opened = 0;
        let now = if outcomes.is_empty() {
            self.origin
        } else {
            Instant::now()
        };
        for outcome in outcomes.drain(..) {
            match outcome {
                Outcome::Opened { .. } => opened += 1,
                Outcome::Durable { context } => {
                    let slot = context as usize;
                    lane.idle.push(slot);
                    lane.works = true;
                    let begun = lane.begun[slot];
                    let moment = if self.load.pace.is_some() { begun } else { now };
                    if (self.counted.0..self.counted.1).contains(&moment) {
                        self.records += 1;
                        let nanos = now.saturating_duration_since(begun).as_nanos() as u64;
                        self.latency_ns.saturating_record(nanos);
                    }
                }
                Outcome::Failed { backup, why, .. } => {
                    bail!("a record failed at {backup:?}: {why}")
                }
                Outcome::Lost { backup, why } => bail!("{backup:?} was lost: {why}"),
            }
        }
        self.outcomes = outcomes;
        Ok(opened)
    }

    /// Appends what one lane has room for.
    fn give(&mut self, number: usize) -> Result<()> {
        while !self.lanes[number].idle.is_empty() {
            let (now, due) = (Instant::now(), self.lanes[number].due);
            let arrived = match self.load.pace {
                Some(_) if due > now.min(self.counted.1) => break,
                Some(_) => due,
                None => now,
            };
            if !self.give_one(number, arrived)? {
                break;
            }
            self.lanes[number].due += self.load.pace.unwrap_or_default();
        }
        Ok(())
    }

    /// Appends one record that arrived at some moment; returns whether there was room for it.
    fn give_one(&mut self, number: usize, arrived: Instant) -> Result<bool> {
        let lane = &mut self.lanes[number];
        let Some(&slot) = lane.idle.last() else {
            return Ok(false);
        };
        lane.begun[slot] = arrived;
        match lane.sender.append(&self.ids, &self.record, slot as u64) {
            Ok(()) => {
                lane.idle.pop();
                Ok(true)
            }
            Err(ReplicationError::Busy) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether something is in flight, or has arrived and still waits.
    fn is_busy(&self) -> bool {
        self.lanes.iter().any(|lane| {
            lane.idle.len() < self.load.window
                || self.load.pace.is_some() && lane.due <= self.counted.1
        })
    }

    /// Gets one record of every sender through: from then on each has all it needs of its backups.
    fn prime(&mut self, stop: &AtomicBool, at: &mut dyn FnMut(RunEvent)) -> Result<()> {
        let until = Instant::now() + PATIENCE;
        let mut waiting: Vec<usize> = (0..self.lanes.len()).collect();
        while !waiting.is_empty() {
            for &number in &waiting {
                if self.lanes[number].idle.len() == self.load.window {
                    self.give_one(number, Instant::now())?;
                }
                self.take(number)?;
            }
            waiting.retain(|number| !self.lanes[*number].works);
            at(RunEvent::Round);
            check(stop)?;
            if Instant::now() > until {
                let (left, all) = (waiting.len(), self.lanes.len());
                bail!("{left} of {all} senders got no record through within {PATIENCE:?}");
            }
        }
        Ok(())
    }

    /// Waits for what is in flight; arrivals before the end that still wait are appended.
    fn finish(&mut self, stop: &AtomicBool, at: &mut dyn FnMut(RunEvent)) -> Result<()> {
        let until = Instant::now() + PATIENCE;
        while self.is_busy() {
            for number in 0..self.lanes.len() {
                self.take(number)?;
                if self.load.pace.is_some() {
                    self.give(number)?;
                }
            }
            at(RunEvent::Round);
            check(stop)?;
            if Instant::now() > until {
                bail!("records were still in flight after {PATIENCE:?}");
            }
        }
        Ok(())
    }

    /// Sets the arrivals going, each sender's shifted against the others'.
    fn begin(&mut self) {
        let now = Instant::now();
        let count = self.lanes.len() as u32;
        let pace = self.load.pace.unwrap_or_default();
        for (number, lane) in (0..).zip(&mut self.lanes) {
            lane.due = now + pace * number / count.max(1);
        }
        let from = now + self.load.warm_up;
        self.counted = (from, from + self.load.measure);
    }

    fn open(&mut self, stop: &AtomicBool, at: &mut dyn FnMut(RunEvent)) -> Result<()> {
        let until = Instant::now() + PATIENCE;
        for number in 0..self.lanes.len() {
            // One after the other: a backup need not hold all openings at once.
            for (id, address) in &self.load.backups {
                self.lanes[number].sender.open(*id, address)?;
            }
            let mut opened = 0;
            while opened < self.load.backups.len() {
                opened += self.take(number)?;
                at(RunEvent::Round);
                check(stop)?;
                if Instant::now() > until {
                    bail!("the backups' logs did not open within {PATIENCE:?}");
                }
            }
        }
        Ok(())
    }
}

fn check(stop: &AtomicBool) -> Result<()> {
    if stop.load(Ordering::Relaxed) {
        bail!("ended by a signal");
    }
    Ok(())
}

/// Opens every sender's logs, appends for the warm-up and the measured time, waits for what is in
/// flight.
///
/// # Errors
/// When a log does not open, a record fails, a sender gets nothing through, or `stop` is set.
pub fn run(
    senders: Vec<Box<dyn Sender>>,
    load: &Load,
    stop: &AtomicBool,
    at: &mut dyn FnMut(RunEvent),
) -> Result<Measured> {
    let origin = Instant::now();
    let lanes = senders.into_iter().map(|sender| Lane {
        sender,
        begun: vec![origin; load.window],
        idle: (0..load.window).collect(),
        due: origin,
        works: false,
    });
    let mut driver = Driver {
        load,
        lanes: lanes.collect(),
        ids: load.backups.iter().map(|(id, _)| *id).collect(),
        record: Random::new(load.seed).bytes(load.record_bytes),
        outcomes: Vec::new(),
        origin,
        latency_ns: histogram()?,
        records: 0,
        counted: (origin, origin),
    };
    driver.open(stop, at)?;
    driver.prime(stop, at)?;
    driver.begin();
    let from = driver.counted.0;
    let last = Instant::now() + PATIENCE;
    let mut has_begun = false;
    let waited = kept_waiting();
    let started = Instant::now();
    loop {
        for number in 0..driver.lanes.len() {
            driver.take(number)?;
            driver.give(number)?;
        }
        at(RunEvent::Round);
        check(stop)?;
        let now = Instant::now();
        if !has_begun && now >= from {
            at(RunEvent::Begin);
            has_begun = true;
        }
        if now < driver.counted.1 {
            continue;
        }
        if driver.records > 0 || now >= last {
            break;
        }
        // On a busy machine no record may end within a short time: it goes on until one does.
        driver.counted.1 = now + load.measure;
    }
    at(RunEvent::End);
    let waited = kept_waiting().saturating_sub(waited);
    let disturbed = waited.as_secs_f64() / started.elapsed().as_secs_f64().max(1e-9);
    driver.finish(stop, at)?;
    Ok(Measured {
        records: driver.records,
        elapsed: (driver.counted.1 - from).max(Duration::from_nanos(1)),
        latency_ns: driver.latency_ns,
        disturbed,
    })
}

//! Putting load on a system through lanes: closed loop (so many in flight) or open loop (so many a
//! second, whatever happens).
//!
//! **No coordinated omission.** In the open loop an operation's latency counts from the moment at
//! which it was *due*, not from when it could be sent: a system that stalls for a second shows up
//! as all the operations that were due in that second. Every operation that began (or was due) in
//! the measured time is waited for, within bounds, beyond its end; those that never come are
//! recorded with the time waited and counted as unfinished.
//!
//! **What was not done does not vanish.** It counts by when it began (or was due), whenever it
//! ends. One that its client gave up is unfinished like those that never come: its client waited
//! that long without an answer. A refusal is counted, but not recorded: most come at once and would
//! make the percentiles better. Percentiles are those of all others, and are published beside the
//! refusals.

pub mod lanes;
pub mod maker;

use std::time::{Duration, Instant};

use anyhow::Result;
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

pub use self::lanes::{Job, Lanes, Live};
pub use self::maker::Maker;
use crate::measure::histogram;
use crate::workload::{Act, Key, Pair};

/// Where the time comes from.
pub trait Clock {
    /// Nanoseconds since some moment.
    fn now_ns(&self) -> u64;
}

/// The machine's clock.
pub struct Steady(Instant);

impl Steady {
    /// Counts from now.
    pub fn new() -> Steady {
        Steady(Instant::now())
    }
}

impl Default for Steady {
    fn default() -> Self {
        Steady::new()
    }
}

impl Clock for Steady {
    fn now_ns(&self) -> u64 {
        self.0.elapsed().as_nanos() as u64
    }
}

/// What a lane is asked.
#[derive(Clone, Copy, Debug)]
pub enum Request<'a> {
    /// The value of a key.
    Read(Key),
    /// One write, or an atomic batch of several.
    Write(&'a [Pair]),
    /// So many keys in order, from one on.
    Scan(Key, u32),
}

/// How an operation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// As asked.
    Done,
    /// It was answered, and nothing was done.
    Refused,
    /// The client got no answer: its fate is unknown, or no server took it in time.
    Unfinished,
}

/// An operation that ended.
#[derive(Clone, Copy, Debug)]
pub struct Done {
    /// The number it was submitted under.
    pub token: u64,
    /// How it ended.
    pub outcome: Outcome,
}

/// One client's way to a system; for one thread.
pub trait Lane {
    /// Begins an operation; it may wait until the next poll to be sent. A lane that can do only one
    /// thing at a time carries it out here, and says so ([`Lane::is_blocking`]).
    ///
    /// # Errors
    /// When nothing more can be measured.
    fn submit(&mut self, token: u64, request: Request<'_>) -> Result<()>;

    /// Whether an operation is over when it has been submitted. Then its end is taken note of at
    /// once, not after what else is due.
    fn is_blocking(&self) -> bool {
        false
    }

    /// Appends what has ended; waits for the first for at most `patience`.
    ///
    /// # Errors
    /// When nothing more can be measured.
    fn poll(&mut self, patience: Duration, done: &mut Vec<Done>) -> Result<()>;
}

/// When operations begin.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Pace {
    /// When one ends.
    Closed,
    /// So many a second, at even distances.
    Open(f64),
}

/// One lane's part of a measurement.
#[derive(Clone, Copy, Debug)]
pub struct Turn {
    /// Operations in flight at most.
    pub inflight: usize,
    /// When they begin.
    pub pace: Pace,
    /// In the open loop, when the first is due: lanes take turns, they do not send together.
    pub first_due_ns: u64,
    /// Time before measuring, ns.
    pub warm_up_ns: u64,
    /// Time measured, ns.
    pub measure_ns: u64,
    /// How long to wait for the last ones, ns.
    pub drain_ns: u64,
    /// Whether to keep the time of every end.
    pub track: bool,
}

/// What one lane saw.
#[derive(Clone, Debug)]
pub struct Seen {
    /// Operations that were done within the measured time.
    pub operations: u64,
    /// Operations that began, or were due, within the measured time and were refused.
    pub refused: u64,
    /// Operations that began, or were due, within the measured time and did not end, or with an
    /// unknown outcome.
    pub unfinished: u64,
    /// Of operations that began, or were due, within the measured time; without those that were
    /// refused.
    pub latency_ns: Histogram<u64>,
    /// In the open loop, how long after they were due those of the measured time began for which
    /// there was room: what the load's own side adds.
    pub late_ns: Histogram<u64>,
    /// When each operation ended, ns since the beginning, if asked for.
    pub ends_ns: Vec<u64>,
}

struct Slot {
    generation: u32,
    /// When it began or was due; `None`: free.
    began_ns: Option<u64>,
    /// What is still to be written.
    second: Option<Pair>,
}

struct Driver<'a> {
    turn: &'a Turn,
    clock: &'a dyn Clock,
    begun_ns: u64,
    slots: Vec<Slot>,
    free: Vec<usize>,
    /// In the open loop, when the next one is due, as a number of nanoseconds since the beginning.
    due: f64,
    /// Until then everything that may be in flight was: what was due waited for the system.
    full_until_ns: u64,
    seen: Seen,
}

/// Waiting longer than this only delays noticing the end.
const PATIENCE_NS: u64 = 100_000_000;

/// Puts a turn's load on a lane, from `begun_ns` on.
///
/// # Errors
/// What the lane says.
pub fn drive(
    lane: &mut dyn Lane,
    clock: &dyn Clock,
    maker: &mut Maker<'_>,
    turn: &Turn,
    begun_ns: u64,
    live: &Live,
) -> Result<Seen> {
    let mut driver = Driver {
        turn,
        clock,
        begun_ns,
        slots: (0..turn.inflight.max(1))
            .map(|_| Slot {
                generation: 0,
                began_ns: None,
                second: None,
            })
            .collect(),
        free: (0..turn.inflight.max(1)).rev().collect(),
        due: turn.first_due_ns as f64,
        full_until_ns: 0,
        seen: Seen {
            operations: 0,
            refused: 0,
            unfinished: 0,
            latency_ns: histogram()?,
            late_ns: histogram()?,
            ends_ns: Vec::new(),
        },
    };
    let until = begun_ns + turn.warm_up_ns + turn.measure_ns;
    let mut done = Vec::new();
    while clock.now_ns() < until && !live.stopped() {
        driver.begin_what_is_due(lane, maker, live, &mut done)?;
        let now = clock.now_ns();
        let patience = driver.patience_ns(now).min(until.saturating_sub(now));
        driver.collect(lane, live, patience, &mut done)?;
    }
    while clock.now_ns() < driver.over_ns() && !live.stopped() {
        // Of the open loop, what was due before the end is still sent.
        driver.begin_what_is_due(lane, maker, live, &mut done)?;
        if driver.is_idle() {
            break;
        }
        driver.collect(lane, live, PATIENCE_NS.min(turn.drain_ns), &mut done)?;
    }
    driver.give_up(live);
    Ok(driver.seen)
}

impl Driver<'_> {
    fn measured_ns(&self) -> std::ops::Range<u64> {
        let from = self.begun_ns + self.turn.warm_up_ns;
        from..from + self.turn.measure_ns
    }

    /// When nothing is waited for any more.
    fn over_ns(&self) -> u64 {
        self.measured_ns().end + self.turn.drain_ns
    }

    /// The moment at which the next operation is due; none after the end.
    fn due_ns(&self) -> Option<u64> {
        let due = self.begun_ns + self.due as u64;
        (due < self.measured_ns().end).then_some(due)
    }

    fn begin_what_is_due(
        &mut self,
        lane: &mut dyn Lane,
        maker: &mut Maker<'_>,
        live: &Live,
        done: &mut Vec<Done>,
    ) -> Result<()> {
        while !live.stopped() {
            let now = self.clock.now_ns();
            let began = match self.turn.pace {
                Pace::Closed if now < self.measured_ns().end => now,
                Pace::Closed => return Ok(()),
                Pace::Open(_) => match self.due_ns() {
                    // The caller may be behind by more than there is time for.
                    Some(due) if due <= now && now < self.over_ns() => due,
                    _ => return Ok(()),
                },
            };
            let Some(place) = self.free.pop() else {
                return Ok(());
            };
            if let Pace::Open(per_second) = self.turn.pace {
                self.due += 1e9 / per_second.max(1e-3);
                if self.measured_ns().contains(&began) && began >= self.full_until_ns {
                    self.seen.late_ns.saturating_record(now - began);
                }
            }
            let slot = &mut self.slots[place];
            slot.began_ns = Some(began);
            let token = u64::from(slot.generation) << 32 | place as u64;
            let (act, request) = maker.make();
            match act {
                Act::ReadWrite => {
                    let pair = maker.pair();
                    slot.second = Some(pair);
                    lane.submit(token, Request::Read(pair.key))?;
                }
                _ => lane.submit(token, request)?,
            }
            // What reads and then writes takes two looks.
            while lane.is_blocking() && self.slots[place].began_ns.is_some() {
                self.collect(lane, live, 0, done)?;
            }
        }
        Ok(())
    }

    fn patience_ns(&self, now: u64) -> u64 {
        match self.turn.pace {
            Pace::Closed => PATIENCE_NS,
            // Without a free slot only an end can change anything.
            Pace::Open(_) if self.free.is_empty() => PATIENCE_NS,
            Pace::Open(_) => self
                .due_ns()
                .map_or(PATIENCE_NS, |due| due.saturating_sub(now).min(PATIENCE_NS)),
        }
    }

    fn collect(
        &mut self,
        lane: &mut dyn Lane,
        live: &Live,
        patience_ns: u64,
        done: &mut Vec<Done>,
    ) -> Result<()> {
        lane.poll(Duration::from_nanos(patience_ns), done)?;
        let now = self.clock.now_ns();
        let mut ended = 0;
        for Done { token, outcome } in done.drain(..) {
            let place = (token & u64::from(u32::MAX)) as usize;
            let Some(slot) = self.slots.get_mut(place) else {
                continue;
            };
            // An answer that comes twice counts once.
            if u64::from(slot.generation) != token >> 32 {
                continue;
            }
            if let (Some(pair), Outcome::Done) = (slot.second.take(), outcome) {
                lane.submit(token, Request::Write(&[pair]))?;
                continue;
            }
            let Some(began) = slot.began_ns.take() else {
                continue;
            };
            slot.generation = slot.generation.wrapping_add(1);
            if self.free.is_empty() {
                self.full_until_ns = now;
            }
            self.free.push(place);
            ended += 1;
            self.end(began, now, outcome);
        }
        live.add(ended);
        Ok(())
    }

    fn end(&mut self, began: u64, now: u64, outcome: Outcome) {
        let measured = self.measured_ns();
        match outcome {
            Outcome::Done => {}
            Outcome::Refused => {
                self.seen.refused += u64::from(measured.contains(&began));
                return;
            }
            Outcome::Unfinished => return self.never_ended(began, now, &measured),
        }
        self.seen.operations += u64::from(measured.contains(&now));
        if measured.contains(&began) {
            self.seen.latency_ns.saturating_record(now - began);
        }
        if self.turn.track {
            self.seen.ends_ns.push(now.saturating_sub(self.begun_ns));
        }
    }

    fn is_idle(&self) -> bool {
        let waiting = matches!(self.turn.pace, Pace::Open(_)) && self.due_ns().is_some();
        self.free.len() == self.slots.len() && !waiting
    }

    /// What has not ended by now took at least this long.
    fn give_up(&mut self, live: &Live) {
        let now = self.clock.now_ns();
        let measured = self.measured_ns();
        let flying: Vec<u64> = self.slots.iter().filter_map(|slot| slot.began_ns).collect();
        for began in flying {
            self.never_ended(began, now, &measured);
        }
        if let Pace::Open(per_second) = self.turn.pace {
            while let Some(due) = self.due_ns().filter(|due| *due <= now && !live.stopped()) {
                self.due += 1e9 / per_second.max(1e-3);
                self.never_ended(due, now, &measured);
            }
        }
    }

    fn never_ended(&mut self, began: u64, now: u64, measured: &std::ops::Range<u64>) {
        if measured.contains(&began) {
            self.seen.unfinished += 1;
            self.seen
                .latency_ns
                .saturating_record(now.saturating_sub(began));
        }
    }
}

#[cfg(test)]
mod tests;

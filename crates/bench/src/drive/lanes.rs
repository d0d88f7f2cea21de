//! A measurement over several lanes, one thread each, while this thread watches: live numbers, CPU
//! time, and whatever is to happen on the way.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Barrier, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail};

use super::{Clock, Done, Lane, Maker, Outcome, Pace, Request, Seen, Steady, Turn, drive};
use crate::cpu::{Meter, Process, Usage};
use crate::measure::histogram;
use crate::system::{Filling, Measured};
use crate::workload::{Inserts, Key, Pair, Source, Workload, bytes};

/// How often those look who look on.
const LOOK: Duration = Duration::from_millis(2);

/// A system that is reached through lanes.
pub trait Lanes: Sync {
    /// How many lanes to open for so many operations in flight; not more than those.
    fn lanes(&self, inflight: usize) -> usize;

    /// Opens one, in the thread that will use it; `share` operations in flight are its own.
    ///
    /// # Errors
    /// When the system cannot be reached.
    fn open(&self, number: usize, share: usize) -> Result<Box<dyn Lane>>;

    /// Number of the physical log that a key lies in.
    fn place(&self, _key: &[u8]) -> usize {
        0
    }
}

/// What all lanes and the watcher share.
pub struct Live<'a> {
    done: AtomicU64,
    stop: &'a AtomicBool,
    failed: AtomicBool,
}

impl<'a> Live<'a> {
    /// Ends early once `stop` is set.
    pub fn new(stop: &'a AtomicBool) -> Live<'a> {
        Live {
            done: AtomicU64::new(0),
            stop,
            failed: AtomicBool::new(false),
        }
    }

    /// Counts operations that ended.
    pub fn add(&self, ended: u64) {
        self.done.fetch_add(ended, Ordering::Relaxed);
    }

    /// Operations that have ended so far.
    pub fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// Whether to end early.
    pub fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed) || self.failed.load(Ordering::Relaxed)
    }
}

/// What happens at a point of the measured time, such as a kill.
pub type Event<'a> = (Duration, Box<dyn FnMut() -> Result<()> + 'a>);

/// One measurement.
pub struct Job<'a> {
    /// What is done.
    pub workload: &'a Workload,
    /// When operations begin; for all lanes together.
    pub pace: Pace,
    /// Operations in flight, all lanes together.
    pub inflight: usize,
    /// Time before measuring.
    pub warm_up: Duration,
    /// Time measured.
    pub measure: Duration,
    /// How long to wait for the last ones.
    pub drain: Duration,
    /// Of the operations.
    pub seed: u64,
    /// Which keys exist.
    pub inserts: &'a Inserts,
    /// Whether to keep the time of every end.
    pub track: bool,
    /// What is to happen in the measured time.
    pub event: Option<Event<'a>>,
    /// Ends it early.
    pub stop: &'a AtomicBool,
    /// Called periodically: operations so far, and the time since the beginning.
    pub live: &'a mut dyn FnMut(u64, Duration),
}

/// Runs it. `processes`: whose CPU time counts; this program's own is added as the clients'.
///
/// # Errors
/// What a lane says, or when it was ended early.
pub fn run(lanes: &dyn Lanes, job: &mut Job<'_>, processes: &[Process]) -> Result<Measured> {
    let count = lanes.lanes(job.inflight).clamp(1, job.inflight.max(1));
    let live = Live::new(job.stop);
    let clock = Steady::new();
    let ready = Barrier::new(count + 1);
    let begun = std::sync::OnceLock::new();
    let place = |key: &[u8]| lanes.place(key);
    let turn = |number: usize| Turn {
        inflight: share(job.inflight, count, number),
        pace: match job.pace {
            Pace::Closed => Pace::Closed,
            Pace::Open(per_second) => Pace::Open(per_second / count as f64),
        },
        first_due_ns: match job.pace {
            Pace::Closed => 0,
            Pace::Open(per_second) => (number as f64 * 1e9 / per_second.max(1e-3)) as u64,
        },
        warm_up_ns: job.warm_up.as_nanos() as u64,
        measure_ns: job.measure.as_nanos() as u64,
        drain_ns: job.drain.as_nanos() as u64,
        track: job.track,
    };
    let turns: Vec<Turn> = (0..count).map(turn).collect();
    let (workload, seed) = (job.workload, job.seed);
    let inserts = &job.inserts.with_in_flight(job.inflight);
    std::thread::scope(|scope| {
        let workers: Vec<_> = turns
            .iter()
            .enumerate()
            .map(|(number, turn)| {
                let (live, clock, ready, begun, place) = (&live, &clock, &ready, &begun, &place);
                scope.spawn(move || -> Result<Seen> {
                    let lane = lanes.open(number, turn.inflight);
                    if lane.is_err() {
                        live.failed.store(true, Ordering::Relaxed);
                    }
                    // No thread waits for a lane that did not open.
                    ready.wait();
                    let mut lane = lane?;
                    let source = Source::new(workload, seed, number, inserts);
                    let mut maker = Maker::new(source, place);
                    let from = *begun.get_or_init(|| clock.now_ns());
                    let seen = drive(&mut *lane, clock, &mut maker, turn, from, live);
                    if seen.is_err() {
                        live.failed.store(true, Ordering::Relaxed);
                    }
                    seen
                })
            })
            .collect();
        ready.wait();
        let watched = watch(job, &live, &clock, processes, || {
            workers.iter().all(|worker| worker.is_finished())
        });
        let mut seen = Vec::new();
        let mut fault = None;
        for worker in workers {
            match worker.join().map_err(|_| anyhow!("a lane panicked"))? {
                Ok(one) => seen.push(one),
                Err(error) => fault = fault.or(Some(error)),
            }
        }
        if let Some(error) = fault {
            return Err(error);
        }
        let usage = watched?;
        if job.stop.load(Ordering::Relaxed) {
            bail!("stopped");
        }
        merged(seen, job.measure, usage)
    })
}

fn share(whole: usize, parts: usize, number: usize) -> usize {
    whole / parts + usize::from(number < whole % parts)
}

/// Looks on until all lanes have ended; answers what the measured time cost.
fn watch(
    job: &mut Job<'_>,
    live: &Live<'_>,
    clock: &Steady,
    processes: &[Process],
    ended: impl Fn() -> bool + Sync,
) -> Result<Usage> {
    let begun = clock.now_ns();
    let from = begun + job.warm_up.as_nanos() as u64;
    let until = from + job.measure.as_nanos() as u64;
    let meter = Mutex::new(Meter::new(processes));
    let read = || meter.lock().unwrap_or_else(PoisonError::into_inner).read();
    let first = (begun, read());
    std::thread::scope(|scope| {
        // In a separate thread: showing how far it is may wait for a disk that is measured.
        let usage = scope.spawn(|| usage_within(from..until, first, clock, &read, &ended));
        let mut event = job.event.take();
        let mut told = Instant::now();
        let mut outcome = Ok(());
        while !ended() {
            let now = clock.now_ns();
            if let Some((at, act)) = &mut event
                && now >= from + at.as_nanos() as u64
            {
                // Whom it kills has used CPU time until now.
                read();
                outcome = act();
                event = None;
                if outcome.is_err() {
                    live.failed.store(true, Ordering::Relaxed);
                }
            }
            if told.elapsed() >= Duration::from_millis(200) {
                told = Instant::now();
                (job.live)(live.done(), Duration::from_nanos(now - begun));
            }
            std::thread::sleep(LOOK);
        }
        outcome?;
        usage.join().map_err(|_| anyhow!("the meter panicked"))
    })
}

/// CPU time used within a time. Among hundreds of threads that want a CPU this one may get it half
/// a second late: what it has seen is then that of another time, at worst from before (`first`:
/// when, and what had been used), and is taken for as much as that of the whole.
fn usage_within(
    time: Range<u64>,
    first: (u64, Usage),
    clock: &impl Clock,
    read: &impl Fn() -> Usage,
    ended: &impl Fn() -> bool,
) -> Usage {
    let (mut before, mut has_begun) = (first, false);
    loop {
        let (now, is_over) = (clock.now_ns(), ended());
        if now >= time.end || is_over {
            let seen = now.min(time.end).saturating_sub(before.0);
            let whole = time.end - time.start;
            return read()
                .since(&before.1)
                .scaled(whole as f64 / seen.max(1) as f64);
        }
        if now >= time.start && !has_begun {
            (before, has_begun) = ((now, read()), true);
        }
        std::thread::sleep(LOOK);
    }
}

fn merged(seen: Vec<Seen>, elapsed: Duration, usage: Usage) -> Result<Measured> {
    let mut measured = Measured {
        operations: 0,
        refused: 0,
        unfinished: 0,
        elapsed,
        latency_ns: histogram()?,
        late_us: 0.0,
        usage,
        ends_ns: Vec::new(),
    };
    let mut late_ns = histogram()?;
    for one in seen {
        late_ns.add(&one.late_ns)?;
        measured.operations += one.operations;
        measured.refused += one.refused;
        measured.unfinished += one.unfinished;
        measured.latency_ns.add(&one.latency_ns)?;
        measured.ends_ns.extend(one.ends_ns);
    }
    measured.late_us = late_ns.value_at_quantile(0.5) as f64 / 1000.0;
    measured.ends_ns.sort_unstable();
    Ok(measured)
}

/// The values' lengths that a system is filled with, in the order of the keys.
pub fn sizes_to_fill(workload: &Workload, seed: u64) -> Source {
    let inserts = Inserts::after(workload.keys);
    Source::new(workload, seed ^ 0x7072_656c, 0, &inserts)
}

/// Writes every key once, many in flight.
///
/// # Errors
/// What a lane says, and `live`; also when a write is refused again and again.
pub fn preload(
    lanes: &dyn Lanes,
    workload: &Workload,
    seed: u64,
    inflight: usize,
    live: &mut Filling<'_>,
) -> Result<()> {
    let mut lane = lanes.open(0, inflight)?;
    let mut sizes = sizes_to_fill(workload, seed);
    let (mut next, mut flying, mut refused) = (0u64, 0usize, 0u64);
    let mut again = Vec::new();
    let mut done: Vec<Done> = Vec::new();
    while next < workload.keys || flying > 0 || !again.is_empty() {
        while flying < inflight && (next < workload.keys || !again.is_empty()) {
            let number = again.pop().unwrap_or(next);
            next += u64::from(number == next);
            let pair = Pair {
                key: Key::new(number, workload.key_bytes),
                value: bytes::value(sizes.length(), number),
            };
            lane.submit(number, Request::Write(&[pair]))?;
            flying += 1;
        }
        lane.poll(Duration::from_millis(100), &mut done)?;
        for Done { token, outcome } in done.drain(..) {
            flying -= 1;
            if outcome != Outcome::Done {
                refused += 1;
                again.push(token);
                // A full log says so until the store has caught up.
                std::thread::sleep(Duration::from_micros(100));
            }
        }
        if refused > 100_000 + workload.keys {
            bail!("the system refuses to be filled: {refused} refusals");
        }
        live(next)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goes on by so much each time that it is read.
    struct Stepping {
        now_ns: AtomicU64,
        step_ns: u64,
    }

    impl Clock for Stepping {
        fn now_ns(&self) -> u64 {
            self.now_ns.fetch_add(self.step_ns, Ordering::Relaxed) + self.step_ns
        }
    }

    #[test]
    fn late_readings_count_only_the_measured_time() {
        const BEGUN: u64 = 1_000;
        const END: u64 = 10_000;
        // On time; after the beginning, by half; for the first time after the end.
        for step_ns in [100, 5_500, 30_000] {
            let clock = Stepping {
                now_ns: AtomicU64::new(0),
                step_ns,
            };
            // Two CPUs' worth until the end, nothing afterwards.
            let spent = |now_ns: u64| Usage {
                by_role: vec![("clients".into(), 2.0 * now_ns.min(END) as f64)],
                ..Usage::default()
            };
            let read = || spent(clock.now_ns.load(Ordering::Relaxed));
            let usage = usage_within(BEGUN..END, (0, spent(0)), &clock, &read, &|| false);
            let (counted, all) = (usage.counted(), 2.0 * (END - BEGUN) as f64);
            assert!((counted / all - 1.0).abs() < 1e-9, "{step_ns}: {counted}");
        }
    }
}

//! Accounting, with a clock and a system that are not there.

use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use super::*;
use crate::workload::{Inserts, Keys, Mix, Sizes, Source, Workload};

#[derive(Clone)]
struct Fake(Rc<Cell<u64>>);

impl Clock for Fake {
    fn now_ns(&self) -> u64 {
        self.0.get()
    }
}

/// Answers after `service_ns`, except between `stall.start` and `stall.end`: then nothing is
/// answered before the end.
struct Stalling {
    clock: Fake,
    service_ns: u64,
    stall: std::ops::Range<u64>,
    /// How what is answered at a given time ends.
    ending: fn(u64) -> Outcome,
    flying: VecDeque<(u64, u64)>,
    answered: u64,
    requests: Vec<&'static str>,
}

impl Lane for Stalling {
    fn submit(&mut self, token: u64, request: Request<'_>) -> Result<()> {
        let mut ends = self.clock.now_ns() + self.service_ns;
        if ends >= self.stall.start && ends < self.stall.end {
            ends = self.stall.end;
        }
        self.flying.push_back((ends, token));
        self.requests.push(match request {
            Request::Read(_) => "read",
            Request::Write(_) => "write",
            Request::Scan(..) => "scan",
        });
        Ok(())
    }

    fn poll(&mut self, patience: Duration, done: &mut Vec<Done>) -> Result<()> {
        let deadline = self.clock.now_ns() + patience.as_nanos() as u64;
        let wake = self
            .flying
            .front()
            .map_or(deadline, |(ends, _)| deadline.min(*ends));
        // Time passes only here.
        self.clock.0.set(wake.max(self.clock.now_ns() + 1));
        while let Some((_, token)) = self
            .flying
            .pop_front_if(|(ends, _)| *ends <= self.clock.now_ns())
        {
            self.answered += 1;
            done.push(Done {
                token,
                outcome: (self.ending)(self.clock.now_ns()),
            });
        }
        Ok(())
    }
}

const US: u64 = 1000;
const MS: u64 = 1_000_000;

fn run(turn: &Turn, stall: std::ops::Range<u64>, mix: Mix) -> (Seen, Stalling) {
    run_ending(turn, stall, mix, |_| Outcome::Done)
}

fn run_ending(
    turn: &Turn,
    stall: std::ops::Range<u64>,
    mix: Mix,
    ending: fn(u64) -> Outcome,
) -> (Seen, Stalling) {
    let clock = Fake(Rc::new(Cell::new(0)));
    let mut lane = Stalling {
        clock: clock.clone(),
        service_ns: 10 * US,
        stall,
        ending,
        flying: VecDeque::new(),
        answered: 0,
        requests: Vec::new(),
    };
    let mut maker = Maker::new(
        Source::new(&workload(mix), 1, 0, &Inserts::after(10)),
        &|_| 0,
    );
    let stop = AtomicBool::new(false);
    let live = Live::new(&stop);
    let seen = drive(&mut lane, &clock, &mut maker, turn, 0, &live).expect("driven");
    assert_eq!(
        live.done(),
        lane.answered
            - lane.requests.iter().filter(|r| **r == "read").count() as u64
                * u64::from(mix.read_write > 0.0)
    );
    (seen, lane)
}

fn workload(mix: Mix) -> Workload {
    Workload {
        keys: 10,
        key_bytes: 8,
        choice: Keys::Uniform,
        sizes: Sizes::Fixed(8),
        mix,
        batch: 1,
        spread: 0,
    }
}

fn turn(pace: Pace, inflight: usize) -> Turn {
    Turn {
        inflight,
        pace,
        first_due_ns: 0,
        warm_up_ns: 100 * MS,
        measure_ns: 1000 * MS,
        drain_ns: 1000 * MS,
        track: false,
    }
}

#[test]
fn a_stall_of_the_system_appears_in_the_tail_of_the_open_loop() {
    // 10,000 a second; for 200 ms nothing is answered: 2000 of 10,000 operations were due then, and
    // waited 100 ms on average.
    let (seen, _) = run(
        &turn(Pace::Open(10_000.0), 64),
        300 * MS..500 * MS,
        Mix::reads(0.0),
    );
    assert_eq!(seen.latency_ns.len(), 10_000);
    assert_eq!((seen.operations, seen.unfinished), (10_000, 0));
    let at = |quantile| seen.latency_ns.value_at_quantile(quantile);
    assert!(at(0.5) < 20 * US);
    assert!(at(0.79) < MS, "before the stall's share: {}", at(0.79));
    assert!(at(0.90) > 90 * MS, "p90 {}", at(0.90));
    assert!(at(0.99) > 180 * MS, "p99 {}", at(0.99));
    assert!(seen.latency_ns.max() > 195 * MS);
}

#[test]
fn a_closed_loop_shows_the_stall_once_per_operation_in_flight() {
    let (seen, _) = run(&turn(Pace::Closed, 4), 300 * MS..500 * MS, Mix::reads(0.0));
    let slow = seen.latency_ns.count_between(100 * MS, 1000 * MS);
    assert_eq!(slow, 4, "which is why the open loop exists");
}

#[test]
fn what_never_ends_is_counted_and_recorded_with_the_time_waited() {
    // It stops for good halfway.
    let (seen, _) = run(
        &turn(Pace::Open(1000.0), 8),
        600 * MS..u64::MAX,
        Mix::reads(0.0),
    );
    assert_eq!(seen.operations + seen.unfinished, 1000);
    assert_eq!(seen.latency_ns.len(), 1000);
    assert_eq!(seen.unfinished, 500);
    // The last one was due right before the end of the measured time and was waited for for another
    // second.
    let median_of_lost = seen.latency_ns.value_at_quantile(0.75);
    assert!(median_of_lost > 1000 * MS, "{median_of_lost}");
    assert!(seen.latency_ns.max() > 1400 * MS);
}

/// All is done, but what is answered at one moment.
fn ending_at(moment: u64, now: u64, then: Outcome) -> Outcome {
    match now == moment {
        true => then,
        false => Outcome::Done,
    }
}

/// Nothing is answered from 50 ms before the end of the measured time on, and then, while draining,
/// as `ending` says.
fn ends_while_draining(pace: Pace, inflight: usize, ending: fn(u64) -> Outcome) -> Seen {
    let stall = 1050 * MS..1200 * MS;
    run_ending(&turn(pace, inflight), stall, Mix::reads(0.0), ending).0
}

#[test]
fn what_is_refused_after_the_measured_time_counts_if_it_began_or_was_due_within() {
    let ending = |now| match now < 1100 * MS {
        true => Outcome::Done,
        false => Outcome::Refused,
    };
    // One is due each millisecond; some of the last 50 are sent only once the first are answered.
    let seen = ends_while_draining(Pace::Open(1000.0), 16, ending);
    assert_eq!(
        (seen.operations, seen.refused, seen.unfinished),
        (950, 50, 0)
    );
    assert_eq!(seen.latency_ns.len(), 950);
    let seen = ends_while_draining(Pace::Closed, 4, ending);
    assert_eq!((seen.refused, seen.unfinished), (4, 0));
    // The last done may end as the stall begins.
    assert!(seen.latency_ns.len().abs_diff(seen.operations) <= 4);
    assert!(seen.latency_ns.max() < MS);
}

#[test]
fn what_was_given_up_is_unfinished_and_recorded_with_the_time_waited() {
    let ending = |now| match now < 1100 * MS {
        true => Outcome::Done,
        false => Outcome::Unfinished,
    };
    let seen = ends_while_draining(Pace::Open(1000.0), 16, ending);
    assert_eq!(
        (seen.operations, seen.refused, seen.unfinished),
        (950, 0, 50)
    );
    assert_eq!(seen.latency_ns.len(), 1000);
    // Due in the last 50 ms, answered 100 ms after them.
    assert_eq!(seen.latency_ns.count_between(100 * MS, 151 * MS), 50);
    let seen = ends_while_draining(Pace::Closed, 4, ending);
    assert_eq!((seen.refused, seen.unfinished), (0, 4));
    assert_eq!(seen.latency_ns.count_between(149 * MS, 151 * MS), 4);
    // The same within the measured time.
    let ending = |now| ending_at(500 * MS, now, Outcome::Unfinished);
    let stall = 300 * MS..500 * MS;
    for pace in [Pace::Closed, Pace::Open(1000.0)] {
        let (seen, _) = run_ending(&turn(pace, 4), stall.clone(), Mix::reads(0.0), ending);
        assert_eq!((seen.refused, seen.unfinished), (0, 4));
        assert_eq!(seen.latency_ns.len(), seen.operations + 4);
        assert!(seen.latency_ns.count_between(196 * MS, 201 * MS) >= 4);
    }
}

#[test]
fn what_began_or_was_due_in_the_warm_up_is_none_of_the_measured_time() {
    // Four wait from the middle of the warm-up on until half as long after it.
    let endings: [fn(u64) -> Outcome; 2] = [
        |now| ending_at(150 * MS, now, Outcome::Refused),
        |now| ending_at(150 * MS, now, Outcome::Unfinished),
    ];
    for ending in endings {
        for pace in [Pace::Closed, Pace::Open(1000.0)] {
            let stall = 50 * MS..150 * MS;
            let (seen, lane) = run_ending(&turn(pace, 4), stall, Mix::reads(0.0), ending);
            assert_eq!((seen.refused, seen.unfinished), (0, 0));
            assert!(lane.answered > seen.operations);
        }
    }
}

/// Gives up each key's first write and refuses the second.
#[derive(Default)]
struct Reluctant(Arc<Mutex<BTreeMap<u64, u32>>>);

/// What has been submitted since the last poll, and how often each key was before.
struct ReluctantLane(Vec<u64>, Arc<Mutex<BTreeMap<u64, u32>>>);

impl Lanes for Reluctant {
    fn lanes(&self, _inflight: usize) -> usize {
        1
    }

    fn open(&self, _number: usize, _share: usize) -> Result<Box<dyn Lane>> {
        Ok(Box::new(ReluctantLane(Vec::new(), Arc::clone(&self.0))))
    }
}

impl Lane for ReluctantLane {
    fn submit(&mut self, token: u64, _request: Request<'_>) -> Result<()> {
        self.0.push(token);
        Ok(())
    }

    fn poll(&mut self, _patience: Duration, done: &mut Vec<Done>) -> Result<()> {
        let mut times = self.1.lock().expect("one thread");
        for token in self.0.drain(..) {
            let times = times.entry(token).or_default();
            *times += 1;
            let outcome = match *times {
                1 => Outcome::Unfinished,
                2 => Outcome::Refused,
                _ => Outcome::Done,
            };
            done.push(Done { token, outcome });
        }
        Ok(())
    }
}

#[test]
fn keys_are_written_until_each_is_there() {
    let system = Reluctant::default();
    lanes::preload(&system, &workload(Mix::reads(0.0)), 1, 4, &mut |_| Ok(())).expect("filled");
    let times = system.0.lock().expect("one thread");
    assert_eq!(times.len(), 10);
    assert!(times.values().all(|times| *times == 3), "{times:?}");
}

#[test]
fn filling_ends_when_its_listener_fails() {
    let system = Reluctant::default();
    let stopped = |_| anyhow::bail!("stopped");
    let error = lanes::preload(&system, &workload(Mix::reads(0.0)), 1, 4, &mut { stopped });
    assert_eq!(error.expect_err("stopped").to_string(), "stopped");
}

/// Whatever is submitted has been done, 10 µs later.
struct Calls(Fake, Vec<u64>);

impl Lane for Calls {
    fn submit(&mut self, token: u64, _request: Request<'_>) -> Result<()> {
        self.0.0.set(self.0.0.get() + 10 * US);
        self.1.push(token);
        Ok(())
    }

    fn is_blocking(&self) -> bool {
        true
    }

    fn poll(&mut self, patience: Duration, done: &mut Vec<Done>) -> Result<()> {
        if self.1.is_empty() {
            self.0.0.set(self.0.0.get() + patience.as_nanos() as u64);
        }
        let outcome = Outcome::Done;
        done.extend(self.1.drain(..).map(|token| Done { token, outcome }));
        Ok(())
    }
}

#[test]
fn a_call_is_over_when_it_returns_however_many_could_be_in_flight() {
    for (mix, calls) in [
        (Mix::reads(0.5), 1),
        (
            Mix {
                read_write: 1.0,
                ..Mix::reads(0.0)
            },
            2,
        ),
    ] {
        let clock = Fake(Rc::new(Cell::new(0)));
        let mut lane = Calls(clock.clone(), Vec::new());
        let source = Source::new(&workload(mix), 1, 0, &Inserts::after(10));
        let stop = AtomicBool::new(false);
        let (turn, mut maker) = (turn(Pace::Closed, 64), Maker::new(source, &|_| 0));
        let seen = drive(&mut lane, &clock, &mut maker, &turn, 0, &Live::new(&stop));
        let seen = seen.expect("driven");
        let expected = 100_000 / calls;
        assert!((expected - 10..=expected).contains(&seen.operations));
        assert!(seen.latency_ns.max() < calls * 11 * US, "{mix:?}");
    }
}

#[test]
fn calls_that_cannot_keep_up_end_in_time_and_what_was_not_begun_is_unfinished() {
    let clock = Fake(Rc::new(Cell::new(0)));
    let mut lane = Calls(clock.clone(), Vec::new());
    let source = Source::new(&workload(Mix::reads(0.0)), 1, 0, &Inserts::after(10));
    let stop = AtomicBool::new(false);
    // Eight times what it can do: 10 us each.
    let (turn, mut maker) = (turn(Pace::Open(8e5), 64), Maker::new(source, &|_| 0));
    let seen = drive(&mut lane, &clock, &mut maker, &turn, 0, &Live::new(&stop));
    let seen = seen.expect("driven");
    let over = turn.warm_up_ns + turn.measure_ns + turn.drain_ns;
    assert!(clock.now_ns() <= over + 20 * US, "{}", clock.now_ns());
    let due = turn.measure_ns / (1_000_000_000 / 800_000);
    assert_eq!(seen.latency_ns.len() + seen.refused, due);
    assert!(seen.unfinished > due / 2, "{}", seen.unfinished);
}

#[test]
fn the_warm_up_counts_for_nothing() {
    // Everything in the warm-up takes 50 ms and more.
    let (seen, _) = run(&turn(Pace::Closed, 1), 0..90 * MS, Mix::reads(0.0));
    assert!(seen.latency_ns.max() < 20 * US);
    // One at a time, 10 µs each.
    assert!(
        (99_000..=100_000).contains(&seen.operations),
        "{}",
        seen.operations
    );
}

#[test]
fn a_read_modify_write_is_a_read_and_then_a_write_and_counts_once() {
    let mix = Mix {
        read_write: 1.0,
        ..Mix::reads(0.0)
    };
    let (seen, lane) = run(&turn(Pace::Closed, 1), u64::MAX..u64::MAX, mix);
    assert!(
        lane.requests
            .chunks_exact(2)
            .all(|two| two == ["read", "write"])
    );
    assert!((49_000..=50_000).contains(&seen.operations));
    assert!(seen.latency_ns.min() >= 19 * US, "both count");
}

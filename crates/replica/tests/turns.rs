//! Turns that are left out, over a driver that is polled, and ticks that are: the node does what it
//! would have done.

mod common;

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::path::Path;
use std::sync::{Arc, Mutex};

use cyclone_packet::{Datagram, Driver, DriverStats};
use cyclone_pmem::{Payload, Pool, Region};
use cyclone_replica::{
    BusyPoller, Config, JobRunner, LogLoop, Node, Now, Platform, Reactor, StartError, open_store,
};
use cyclone_store::StateMachine;
use cyclone_wire::command::{Condition, Expiry, Operation};

/// What has come, and how often the node asked for it: once in each step that finds nothing.
#[derive(Default)]
struct Wire {
    waiting: VecDeque<Vec<u8>>,
    asked: u64,
}

struct Looked {
    wire: Arc<Mutex<Wire>>,
    address: SocketAddr,
}

impl Driver for Looked {
    fn send(&mut self, datagrams: &[Datagram<'_>]) -> io::Result<usize> {
        Ok(datagrams.len())
    }

    fn recv(
        &mut self,
        _pool: &Pool,
        out: &mut Vec<(SocketAddr, Payload)>,
        _max: usize,
    ) -> io::Result<usize> {
        let mut wire = self.wire.lock().unwrap();
        wire.asked += 1;
        let received = wire.waiting.len();
        let from = self.address;
        let bytes = wire.waiting.drain(..);
        out.extend(bytes.map(|bytes| (from, Payload::from_vec(bytes))));
        Ok(received)
    }

    fn rx_is_empty(&mut self) -> bool {
        self.wire.lock().unwrap().waiting.is_empty()
    }

    fn fds(&self) -> Vec<RawFd> {
        Vec::new()
    }

    fn max_datagram(&self) -> usize {
        1400
    }

    fn describe(&self) -> String {
        "polled".to_owned()
    }

    fn local_addr(&self) -> SocketAddr {
        self.address
    }

    fn stats(&self) -> DriverStats {
        DriverStats::default()
    }
}

struct TestPlatform {
    reactor: Reactor,
    wire: Arc<Mutex<Wire>>,
    /// Whether jobs wait for [`Node::run_job`].
    by_hand: bool,
}

impl Platform for TestPlatform {
    fn has_region(&self, _config: &Config) -> bool {
        false
    }

    fn region(&mut self, config: &Config, _create: bool) -> Result<Region, StartError> {
        Ok(Region::anonymous(config.nvm_bytes)?)
    }

    fn store(&mut self, config: &Config) -> Result<Arc<dyn StateMachine>, StartError> {
        open_store(config, &config.data.join("store"))
    }

    fn driver(&mut self, config: &Config, _pool: &Pool) -> Result<Box<dyn Driver>, StartError> {
        Ok(Box::new(Looked {
            wire: Arc::clone(&self.wire),
            address: config.members[0].packet,
        }))
    }

    fn log_driver(
        &mut self,
        config: &Config,
        _log: u16,
        pool: &Pool,
    ) -> Result<Box<dyn Driver>, StartError> {
        self.driver(config, pool)
    }

    fn random(&mut self) -> Result<u64, StartError> {
        Ok(7)
    }

    fn boot_id(&mut self) -> Result<[u8; 16], StartError> {
        Ok([7; 16])
    }

    fn workers(&mut self) -> io::Result<JobRunner> {
        match self.by_hand {
            true => Ok(JobRunner::manual()),
            false => JobRunner::threads(1, self.reactor.waker()),
        }
    }
}

/// A node, and turns of a microsecond each.
struct Bench {
    node: Node,
    turns: BusyPoller,
    now_us: u64,
    wire: Arc<Mutex<Wire>>,
}

impl Bench {
    fn start(directory: &Path, log_threads: u16) -> Bench {
        Bench::start_with(directory, log_threads, false)
    }

    fn start_with(directory: &Path, log_threads: u16, by_hand: bool) -> Bench {
        let wire = Arc::default();
        let mut platform = TestPlatform {
            reactor: Reactor::new().unwrap(),
            wire: Arc::clone(&wire),
            by_hand,
        };
        let config = Config {
            log_threads,
            ..common::config(1, 1, (7101, 1), directory)
        };
        Bench {
            node: Node::start_on(config, &mut platform).unwrap(),
            turns: BusyPoller::default(),
            now_us: 1_000_000,
            wire,
        }
    }

    fn now(&self) -> Now {
        Now {
            steady_us: self.now_us,
            wall_ms: self.now_us / 1000,
        }
    }

    /// Whether the node made a step in this turn.
    fn turn(&mut self) -> bool {
        let before = self.asked();
        self.now_us += 1;
        self.turns.turn(self.now(), &mut self.node).unwrap();
        self.asked() > before
    }

    fn turns(&mut self, count: u64) -> u64 {
        (0..count).map(|_| u64::from(self.turn())).sum()
    }

    fn asked(&self) -> u64 {
        self.wire.lock().unwrap().asked
    }
}

#[test]
fn deadlines_packets_and_a_clock_that_goes_back_end_looking() {
    let directory = tempfile::tempdir().unwrap();
    let mut bench = Bench::start(directory.path(), 0);
    // Only its timers make it stand for election.
    while !bench.node.leads() {
        assert!(bench.now_us < 3_000_000, "no leader");
        bench.turn();
    }
    bench.turns(100_000);

    // One in twenty, and one for each tick.
    let steps = bench.turns(100_000);
    assert!((5_000 - 250..10_000).contains(&steps), "{steps} steps");

    for _ in 0..100 {
        bench.turns(7);
        bench.wire.lock().unwrap().waiting.push_back(vec![9; 40]);
        assert!(bench.turn(), "a packet is there");
    }

    bench.turns(1000);
    bench.now_us -= 500_000;
    assert!(bench.turn(), "the clock went back");
    bench.turns(1_000_000);
    assert!(bench.node.leads());

    // It goes on with what it was asked for in its own turn.
    let operation = Operation::IncrBy {
        key: b"counter",
        delta: 1,
    };
    bench.node.write(1, &operation);
    bench.turns = BusyPoller::default();
    let since_us = bench.now_us;
    while bench.node.take_completions().count() == 0 {
        assert!(bench.now_us < since_us + 1000, "not answered");
        bench.turn();
    }
}

#[test]
fn a_replica_whose_logs_have_loops_skips_ticks_until_one_of_them_has_work() {
    const TICK_US: u64 = 5_000;
    let directory = tempfile::tempdir().unwrap();
    let mut bench = Bench::start(directory.path(), 1);
    let mut lanes = bench.node.take_log_loops();
    let lane = &mut lanes[0];
    // Each loop's turn, and how long the replica's may sleep then.
    let turn = |bench: &mut Bench, lane: &mut LogLoop| {
        bench.now_us += 10;
        let now = bench.now();
        bench.node.step(now).unwrap();
        bench.node.lend_logs();
        lane.step(&|| now).unwrap();
        bench.node.take_logs().unwrap();
        bench.node.deadline_us().saturating_sub(bench.now_us)
    };
    while !bench.node.leads() {
        assert!(bench.now_us < 3_000_000, "no leader");
        turn(&mut bench, lane);
    }
    let longest = |bench: &mut Bench, lane: &mut LogLoop, turns: u64| {
        let sleeps = (0..turns).map(|_| turn(bench, lane));
        sleeps.max().unwrap_or(0)
    };
    longest(&mut bench, lane, 10_000);
    assert!(longest(&mut bench, lane, 10_000) > TICK_US, "it rests");

    let operation = Operation::IncrBy {
        key: b"counter",
        delta: 1,
    };
    let mut answered = 0;
    for ticket in 0..20 {
        lane.submit(ticket, &operation);
        longest(&mut bench, lane, 2);
        let awake = longest(&mut bench, lane, 4_000);
        assert!(awake <= TICK_US, "{awake} us after a write");
        answered += lane.take_completions().count();
    }
    assert_eq!(answered, 20);
    longest(&mut bench, lane, 10_000);
    assert!(
        longest(&mut bench, lane, 10_000) > TICK_US,
        "it rests again"
    );
}

/// Sweeps follow one another as long as they leave something behind: upkeep alone would be called
/// fifty times a second.
#[test]
fn many_keys_that_expire_at_once_are_removed_soon() {
    const KEYS: u32 = 100_000;
    let directory = tempfile::tempdir().unwrap();
    let mut bench = Bench::start_with(directory.path(), 0, true);
    let step = |bench: &mut Bench| {
        bench.now_us += 500;
        bench.node.step(bench.now()).unwrap();
        while bench.node.waiting_jobs() > 0 {
            bench.node.run_job(0);
        }
        bench.node.take_completions().count()
    };
    while !bench.node.leads() {
        assert!(bench.now_us < 3_000_000, "no leader");
        step(&mut bench);
    }
    let deadline_ms = 60_000;
    let (mut next, mut answered) = (0, 0);
    while answered < KEYS as usize {
        assert!(bench.now_us < 1000 * deadline_ms, "{answered} answered");
        for _ in 0..100.min(KEYS - next) {
            bench.node.write(
                u64::from(next),
                &Operation::SetExpiring {
                    key: &next.to_be_bytes(),
                    value: b"",
                    condition: Condition::Always,
                    get: false,
                    expiry: Expiry::At(deadline_ms),
                },
            );
            next += 1;
        }
        answered += step(&mut bench);
    }
    bench.now_us = 1000 * deadline_ms;
    let last = |bench: &Bench| bench.node.group(0).last_index();
    let before = last(&bench);
    let (mut moved_us, mut at) = (bench.now_us, before);
    while bench.now_us < moved_us + 200_000 {
        step(&mut bench);
        if last(&bench) > at {
            (moved_us, at) = (bench.now_us, last(&bench));
        }
    }
    let sweeps = at - before;
    assert!(sweeps >= u64::from(KEYS) / 1024, "{sweeps} sweeps");
    assert!(
        moved_us < 1000 * (deadline_ms + 1000),
        "{sweeps} sweeps, the last one after {} ms",
        moved_us / 1000 - deadline_ms
    );
}

//! Turns that are left out, over a driver that is looked at: the node does what it would have done.

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
    Config, JobRunner, Node, Now, Platform, Reactor, StartError, Turns, open_store,
};
use cyclone_store::StateMachine;
use cyclone_wire::command::Operation;

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

    fn finds_nothing(&mut self) -> bool {
        self.wire.lock().unwrap().waiting.is_empty()
    }

    fn fds(&self) -> Vec<RawFd> {
        Vec::new()
    }

    fn max_datagram(&self) -> usize {
        1400
    }

    fn describe(&self) -> String {
        "looked at".to_owned()
    }

    fn local_addr(&self) -> SocketAddr {
        self.address
    }

    fn stats(&self) -> DriverStats {
        DriverStats::default()
    }
}

struct Desk {
    reactor: Reactor,
    wire: Arc<Mutex<Wire>>,
}

impl Platform for Desk {
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

    fn random(&mut self) -> Result<u64, StartError> {
        Ok(7)
    }

    fn boot_id(&mut self) -> Result<[u8; 16], StartError> {
        Ok([7; 16])
    }

    fn workers(&mut self) -> io::Result<JobRunner> {
        JobRunner::threads(1, self.reactor.waker())
    }
}

/// A node, and turns of a microsecond each.
struct Bench {
    node: Node,
    turns: Turns,
    now_us: u64,
    wire: Arc<Mutex<Wire>>,
}

impl Bench {
    fn start(directory: &Path) -> Bench {
        let wire = Arc::default();
        let mut desk = Desk {
            reactor: Reactor::new().unwrap(),
            wire: Arc::clone(&wire),
        };
        let config = common::config(1, 1, (7101, 1), directory);
        Bench {
            node: Node::start_on(config, &mut desk).unwrap(),
            turns: Turns::default(),
            now_us: 1_000_000,
            wire,
        }
    }

    /// Whether the node made a step in this turn.
    fn turn(&mut self) -> bool {
        let before = self.asked();
        self.now_us += 1;
        let now = Now {
            steady_us: self.now_us,
            wall_ms: self.now_us / 1000,
        };
        self.turns.turn(now, &mut self.node).unwrap();
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
    let mut bench = Bench::start(directory.path());
    // Nobody but its timers makes it stand for election.
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

    // It goes on with what it was asked for in a turn of its own.
    let operation = Operation::IncrBy {
        key: b"counter",
        delta: 1,
    };
    bench.node.write(1, &operation);
    bench.turns = Turns::default();
    let since_us = bench.now_us;
    while bench.node.take_completions().count() == 0 {
        assert!(bench.now_us < since_us + 1000, "not answered");
        bench.turn();
    }
}

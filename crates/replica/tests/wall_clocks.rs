//! Three replicas whose wall clocks differ, in simulated time: what is done to keys that expire
//! (docs/adr/0079).

mod common;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::path::Path;
use std::sync::{Arc, Mutex};

use cyclone_packet::{Datagram, Driver, DriverStats};
use cyclone_pmem::{Payload, Pool, Region};
use cyclone_replica::{Config, JobRunner, Node, Now, Outcome, Platform, StartError, open_store};
use cyclone_store::StateMachine;
use cyclone_wire::command::{Condition, Expiry, Operation, Query};
use cyclone_wire::reply::Reply;

const TRUE_MS: u64 = 1_700_000_000_000;
const DAY_MS: i64 = 86_400_000;
const STEP_US: u64 = 500;

/// Datagrams on their way, by receiver.
type Network = Arc<Mutex<HashMap<SocketAddr, VecDeque<(SocketAddr, Vec<u8>)>>>>;

struct Cable {
    network: Network,
    address: SocketAddr,
}

impl Driver for Cable {
    fn send(&mut self, datagrams: &[Datagram<'_>]) -> io::Result<usize> {
        let mut network = self.network.lock().unwrap();
        for datagram in datagrams {
            let bytes = datagram.parts.concat();
            let waiting = network.entry(datagram.to).or_default();
            waiting.push_back((self.address, bytes));
        }
        Ok(datagrams.len())
    }

    fn recv(
        &mut self,
        _pool: &Pool,
        out: &mut Vec<(SocketAddr, Payload)>,
        _max: usize,
    ) -> io::Result<usize> {
        let mut network = self.network.lock().unwrap();
        let waiting = network.entry(self.address).or_default();
        let received = waiting.len();
        let datagrams = waiting.drain(..);
        out.extend(datagrams.map(|(from, bytes)| (from, Payload::from_vec(bytes))));
        Ok(received)
    }

    fn fds(&self) -> Vec<RawFd> {
        Vec::new()
    }

    fn max_datagram(&self) -> usize {
        1400
    }

    fn describe(&self) -> String {
        "a cable".to_owned()
    }

    fn local_addr(&self) -> SocketAddr {
        self.address
    }

    fn stats(&self) -> DriverStats {
        DriverStats::default()
    }
}

struct Machine {
    network: Network,
    address: SocketAddr,
    random: u64,
}

impl Platform for Machine {
    fn has_region(&self, _config: &Config) -> bool {
        false
    }

    fn region(&mut self, config: &Config, _create: bool) -> Result<Region, StartError> {
        Ok(Region::anonymous(config.nvm_bytes)?)
    }

    fn store(&mut self, config: &Config) -> Result<Arc<dyn StateMachine>, StartError> {
        open_store(config, &config.data.join("store"))
    }

    fn driver(&mut self, _config: &Config, _pool: &Pool) -> Result<Box<dyn Driver>, StartError> {
        Ok(Box::new(Cable {
            network: Arc::clone(&self.network),
            address: self.address,
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
        self.random = self.random.wrapping_mul(0x5851_f42d_4c95_7f2d) + 1;
        Ok(self.random)
    }

    fn boot_id(&mut self) -> Result<[u8; 16], StartError> {
        Ok([7; 16])
    }

    fn workers(&mut self) -> io::Result<JobRunner> {
        Ok(JobRunner::manual())
    }
}

struct Cluster {
    nodes: Vec<Node>,
    steady_us: u64,
    /// What each wall clock is off by.
    off_ms: [i64; 3],
    tickets: u64,
    answers: HashMap<u64, Outcome>,
}

impl Cluster {
    fn start(directory: &Path, logs: u16) -> Cluster {
        let network = Network::default();
        let node = |id: u64| {
            let config = Config {
                logs,
                ..common::config(id, 3, (7_101, 1), directory)
            };
            let mut machine = Machine {
                network: Arc::clone(&network),
                address: config.members[id as usize - 1].packet,
                random: id * 77,
            };
            Node::start_on(config, &mut machine).unwrap()
        };
        Cluster {
            nodes: (1..=3).map(node).collect(),
            steady_us: 1_000_000,
            off_ms: [0; 3],
            tickets: 0,
            answers: HashMap::new(),
        }
    }

    fn true_ms(&self) -> u64 {
        TRUE_MS + self.steady_us / 1_000
    }

    fn turn(&mut self) {
        self.steady_us += STEP_US;
        let true_ms = self.true_ms();
        for (node, off_ms) in self.nodes.iter_mut().zip(self.off_ms) {
            let now = Now {
                steady_us: self.steady_us,
                wall_ms: true_ms.saturating_add_signed(off_ms),
            };
            node.step(now).unwrap();
            while node.waiting_jobs() > 0 {
                node.run_job(0);
            }
            self.answers.extend(node.take_completions());
        }
    }

    fn pass(&mut self, ms: u64) {
        (0..ms * 1_000 / STEP_US).for_each(|_| self.turn());
    }

    /// The place of the node that leads.
    fn leader(&mut self) -> usize {
        for _ in 0..20_000 {
            if let Some(leader) = self.nodes.iter().position(Node::leads) {
                return leader;
            }
            self.turn();
        }
        panic!("no leader");
    }

    /// Lets the leader do something until it is done.
    fn ask(&mut self, what: impl Fn(&mut Node, u64)) -> Reply {
        for _ in 0..50 {
            let leader = self.leader();
            self.tickets += 1;
            what(&mut self.nodes[leader], self.tickets);
            for _ in 0..2_000 {
                self.turn();
                match self.answers.remove(&self.tickets) {
                    Some(Outcome::Done(reply)) => return reply,
                    Some(_) => break,
                    None => {}
                }
            }
        }
        panic!("not done");
    }

    fn set(&mut self, key: &[u8], ttl_ms: u64) {
        let reply = self.ask(|node, ticket| {
            let operation = Operation::SetExpiring {
                key,
                value: b"value",
                condition: Condition::Always,
                get: false,
                expiry: Expiry::After(ttl_ms),
            };
            node.write(ticket, &operation);
        });
        assert_eq!(reply, Reply::Ok);
    }

    fn is_there(&mut self, key: &[u8]) -> bool {
        let reply = self.ask(|node, ticket| node.read(ticket, &Query::Get { key }));
        reply != Reply::Nil
    }

    /// The clock of every log's state at every node less the true time.
    fn state_off_ms(&self) -> Vec<i64> {
        let logs = self.nodes[0].config().logs;
        let clocks = (self.nodes.iter())
            .flat_map(|node| (0..logs).map(|log| node.store().clock_ms(log) as i64));
        clocks.map(|clock| clock - self.true_ms() as i64).collect()
    }

    /// A key with a time to live of 3 s is there after 2 s, and gone after 4 s.
    #[track_caller]
    fn check_expiry(&mut self, key: &[u8]) {
        self.set(key, 3_000);
        self.pass(2_000);
        assert!(self.is_there(key), "gone early: {:?}", self.state_off_ms());
        self.pass(2_000);
        assert!(!self.is_there(key), "stays: {:?}", self.state_off_ms());
    }
}

#[test]
fn leader_whose_clock_is_a_day_off_moves_no_state_clock() {
    for off_ms in [DAY_MS, -DAY_MS] {
        let directory = tempfile::tempdir().unwrap();
        let mut cluster = Cluster::start(directory.path(), 1);
        let leader = cluster.leader();
        cluster.set(b"first", 3_600_000);
        cluster.pass(100);
        cluster.off_ms[leader] = off_ms;
        cluster.check_expiry(b"while it is off");
        assert_eq!(cluster.leader(), leader, "{off_ms:?}");
        let shown = cluster.nodes[leader].clock_offset_ms();
        assert!(
            shown.is_some_and(|ms| (ms - off_ms).abs() < 1_000),
            "{shown:?}"
        );
        let state = cluster.state_off_ms();
        assert!(state.iter().all(|off| *off <= 1_000), "{off_ms}: {state:?}");
        cluster.off_ms[leader] = 0;
        cluster.check_expiry(b"afterwards");
        assert!(cluster.is_there(b"first"), "{off_ms:?}");
    }
}

#[test]
fn follower_reports_that_its_clock_is_off() {
    let directory = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::start(directory.path(), 1);
    let follower = (cluster.leader() + 1) % 3;
    cluster.off_ms[follower] = -DAY_MS;
    cluster.pass(500);
    for (place, node) in cluster.nodes.iter().enumerate() {
        let off_ms = node.clock_offset_ms().unwrap();
        let wanted = if place == follower { -DAY_MS } else { 0 };
        assert!((off_ms - wanted).abs() < 1_000, "{place}: {off_ms}");
    }
}

#[test]
fn clock_jumps_to_the_true_time_after_all_have_slept() {
    let directory = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::start(directory.path(), 1);
    cluster.set(b"old", 60_000);
    cluster.steady_us += 7_200_000_000;
    assert!(!cluster.is_there(b"old"));
    cluster.check_expiry(b"new");
}

#[test]
fn operator_sets_a_state_clock_that_is_ahead() {
    for logs in [1, 2] {
        let directory = tempfile::tempdir().unwrap();
        let mut cluster = Cluster::start(directory.path(), logs);
        cluster.set(b"first", 60_000);
        cluster.off_ms = [DAY_MS; 3];
        cluster.pass(500);
        for key in [b"a", b"b", b"c", b"d"] {
            cluster.set(key, 60_000);
        }
        cluster.off_ms = [0; 3];
        cluster.pass(500);
        assert!(cluster.state_off_ms().iter().any(|off| *off > DAY_MS / 2));
        // Relative times are doubled at most.
        cluster.set(b"short", 2_000);
        cluster.pass(5_000);
        assert!(!cluster.is_there(b"short"));
        assert_eq!(cluster.ask(Node::reset_clock), Reply::Ok);
        cluster.pass(500);
        let state = cluster.state_off_ms();
        assert!(state.iter().all(|off| off.abs() <= 1_000), "{state:?}");
        cluster.check_expiry(b"new");
        let state = cluster.state_off_ms();
        assert!(state.iter().all(|off| *off <= 1_000), "{state:?}");
        assert!(cluster.is_there(b"a"), "set while it was ahead");
    }
}

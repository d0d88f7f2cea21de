//! A single server on the simulated fabric, for unit tests of states that clusters reach by
//! accident only.

use cyclone_fabric::sim::{SimConfig, SimFabric};
use cyclone_fabric::{Address, Endpoint, FabricError, Token};
use cyclone_replication::Protocol;
use cyclone_wire::command::{Condition, Operation, Query};
use cyclone_wire::reply::Reply;

use crate::configuration::{Configuration, KeyHash, Placement, Server, ServerId, ShardId};
use crate::entry::{self, Kind, Stamp};
use crate::node::{Endpoints, Node, NodeConfig};
use crate::worker::Answer;

struct Machines(SimFabric, u32);

impl Endpoints for Machines {
    fn open(&mut self, name: &str, memory_bytes: u64) -> Result<Box<dyn Endpoint>, FabricError> {
        self.1 += 1;
        let name = format!("{name} {}", self.1);
        Ok(Box::new(self.0.endpoint_with(&name, memory_bytes)))
    }
}

/// Server 0, and a server 1 that says nothing.
pub(crate) struct Alone {
    pub(crate) fabric: SimFabric,
    pub(crate) node: Node,
    other: Address,
    _other: Box<dyn Endpoint>,
    now_us: u64,
    life: u32,
    ticket: u64,
}

fn config(segment_bytes: u64) -> NodeConfig {
    let mut config = NodeConfig::new(0, Protocol::Rowan, 2, Token(1), 99);
    config.backup.segment_bytes = segment_bytes;
    config.backup.max_posted = 4;
    config.backup.batch = 2;
    config.worker.commit_us = 1_000;
    config.worker.max_entry_bytes = 2_000;
    config.clean_from_used_percent = 1;
    config
}

impl Alone {
    pub(crate) fn new(memory_bytes: u64, segment_bytes: u64) -> Alone {
        Alone::with(memory_bytes, config(segment_bytes))
    }

    /// A node whose log entries may be longer than those of the other tests.
    pub(crate) fn with_entries(
        memory_bytes: u64,
        segment_bytes: u64,
        max_entry_bytes: usize,
    ) -> Alone {
        let mut config = config(segment_bytes);
        config.worker.max_entry_bytes = max_entry_bytes;
        Alone::with(memory_bytes, config)
    }

    fn with(memory_bytes: u64, config: NodeConfig) -> Alone {
        let fabric = SimFabric::new(7, SimConfig::calm());
        let data = fabric.endpoint_with("data", memory_bytes);
        let other = fabric.endpoint_with("other", 4096);
        let peers = Box::new(fabric.endpoint_with("peers 0", 4096));
        let machines = Box::new(Machines(fabric.clone(), 0));
        let node = Node::open(config, Box::new(data), peers, machines);
        Alone {
            node: node.expect("a node"),
            other: other.address(),
            _other: Box::new(other),
            fabric,
            now_us: 0,
            life: 0,
            ticket: 0,
        }
    }

    /// The program ends, and opens its memory again.
    pub(crate) fn restart(&mut self, segment_bytes: u64) {
        self.life += 1;
        self.fabric.kill_process("data");
        let data = Box::new(self.fabric.restart("data"));
        let peers = format!("peers {}", self.life);
        let peers = Box::new(self.fabric.endpoint_with(&peers, 4096));
        let machines = Box::new(Machines(self.fabric.clone(), 1000 * self.life));
        let node = Node::open(config(segment_bytes), data, peers, machines);
        self.node = node.expect("a node");
    }

    pub(crate) fn placed(&self, term: u32, placements: [Placement; 2]) -> Configuration {
        let own = Server {
            id: 0,
            log: self.node.log_address(),
            peer: self.node.peer_address(),
        };
        let other = Server {
            id: 1,
            log: self.other.clone(),
            peer: self.other.clone(),
        };
        Configuration {
            term,
            servers: vec![own, other],
            shards: placements.to_vec(),
        }
    }

    /// Both shards are served here, with these backups.
    pub(crate) fn serve(&mut self, term: u32, backups: &[ServerId]) {
        let mine = Placement {
            primary: 0,
            backups: backups.to_vec(),
            joining: Vec::new(),
            source: None,
        };
        let configuration = self.placed(term, [mine.clone(), mine]);
        self.node.prepare(&configuration).expect("prepared");
        self.node.commit().expect("committed");
        self.steps(20);
    }

    pub(crate) fn step(&mut self) {
        self.now_us += 200;
        self.node.step(self.now_us);
        self.node.step_control(self.now_us);
        self.fabric.run_for(10_000);
    }

    pub(crate) fn steps(&mut self, count: usize) {
        for _ in 0..count {
            self.step();
        }
    }

    pub(crate) fn submit(&mut self, operations: &[Operation<'_>]) {
        self.ticket += 1;
        let ticket = self.ticket;
        self.node.worker(0).expect("one").submit(ticket, operations);
    }

    pub(crate) fn answers(&mut self) -> Vec<Answer> {
        let mut answers = Vec::new();
        let worker = self.node.worker(0).expect("one");
        worker.take_answers(&mut answers);
        answers.into_iter().map(|it| it.1).collect()
    }

    pub(crate) fn ask(&mut self, operation: Operation<'_>) -> Answer {
        self.submit(&[operation]);
        for _ in 0..1_000 {
            if let Some(answer) = self.answers().pop() {
                return answer;
            }
            self.step();
        }
        panic!("no answer");
    }

    pub(crate) fn set(&mut self, key: &str, value: &str) {
        let answer = self.ask(set(key, value));
        assert_eq!(answer, Answer::Done(vec![Reply::Ok]), "{key}");
    }

    pub(crate) fn get(&mut self, key: &str) -> Answer {
        let key = key.as_bytes();
        self.ask(Operation::Read(Query::Get { key }))
    }

    pub(crate) fn version_of(&self, key: &str) -> u64 {
        let (shard, hash) = self.place_of(key);
        let found = self.node.store().find(shard, hash, key.as_bytes());
        found.expect("there").stamp().version
    }

    pub(crate) fn place_of(&self, key: &str) -> (ShardId, u64) {
        let KeyHash { slot, hash } = KeyHash::of(key.as_bytes());
        (self.node.store().shard_of(slot), hash)
    }
}

pub(crate) fn set<'a>(key: &'a str, value: &'a str) -> Operation<'a> {
    Operation::Set {
        key: key.as_bytes(),
        value: value.as_bytes(),
        condition: Condition::Always,
        get: false,
    }
}

pub(crate) fn put(shard: ShardId, version: u64, key: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    let stamp = Stamp { version, shard };
    entry::encode(Kind::Put, stamp, 0, key.as_bytes(), b"v", &mut bytes);
    bytes
}

/// Keys of a shard.
pub(crate) fn keys_of(alone: &Alone, shard: ShardId) -> impl Iterator<Item = String> + '_ {
    let keys = (0..).map(|n| format!("key {n}"));
    keys.filter(move |key| alone.place_of(key).0 == shard)
}

impl Alone {
    /// Steps until there are so many answers.
    pub(crate) fn wait_for(&mut self, count: usize) -> Vec<Answer> {
        let mut answers = self.answers();
        for _ in 0..10_000 {
            if answers.len() >= count {
                return answers;
            }
            self.step();
            answers.extend(self.answers());
        }
        panic!("{} of {count} answers", answers.len());
    }

    /// Where a key's entry lies.
    pub(crate) fn address_of(&self, key: &str) -> u64 {
        let (shard, hash) = self.place_of(key);
        let shard = self.node.store().shard(shard).expect("a shard");
        let heap = self.node.store().heap();
        let is_it = |at| heap.header_of(at, key.as_bytes()).map(|_| at);
        shard.index.lookup(hash, is_it).expect("there")
    }

    /// Turns a bit of a byte of memory.
    pub(crate) fn damage(&self, at: u64) {
        let memory = self.fabric.memory("data");
        let mut byte = [0];
        memory.read(at, &mut byte);
        memory.write(at, &[byte[0] ^ 4]);
    }
}

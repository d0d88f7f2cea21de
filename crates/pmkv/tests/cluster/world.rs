//! A cluster on the simulated fabric, its clients, and the one that decides configurations.
//! Everything follows from a seed.

mod check;
mod fill;
mod joins;
mod kept;
mod moves;

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use cyclone_fabric::sim::{SimConfig, SimFabric};
use cyclone_fabric::{Endpoint, FabricError, Token};
use cyclone_pmkv::{
    Answer, Checkpoint, Configuration, DiscardedCopy, Endpoints, KeyHash, Node, NodeConfig,
    NodeError, Role, Server, ServerId, Sink,
};
use cyclone_replication::Protocol;
use cyclone_wire::command::{Condition, Operation, Query};
use cyclone_wire::reply::Reply;

use crate::model::Model;

pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

#[derive(Clone)]
pub struct Plan {
    pub protocol: Protocol,
    pub servers: u32,
    pub copies: usize,
    pub shards: u16,
    pub keys: u64,
    pub max_value: u64,
    pub memory_bytes: u64,
    pub segment_bytes: u64,
    pub sim: SimConfig,
    /// Whether a full memory is a matter of course.
    pub may_be_full: bool,
}

impl Plan {
    pub fn new(protocol: Protocol) -> Plan {
        Plan {
            protocol,
            servers: 3,
            copies: 3,
            shards: 6,
            keys: 60,
            max_value: 120,
            memory_bytes: 768 << 10,
            segment_bytes: 8192,
            sim: SimConfig::default(),
            may_be_full: false,
        }
    }
}

struct Machines {
    fabric: SimFabric,
    server: ServerId,
    life: u32,
    names: Arc<Mutex<Vec<String>>>,
    failing: Arc<AtomicU32>,
}

impl Endpoints for Machines {
    fn open(&mut self, name: &str, memory_bytes: u64) -> Result<Box<dyn Endpoint>, FabricError> {
        let failing = self.failing.load(Ordering::Relaxed);
        if failing > 0 {
            self.failing.store(failing - 1, Ordering::Relaxed);
            let (what, limit) = ("file", 0);
            return Err(FabricError::Limit { what, limit });
        }
        let name = format!("s{}.{}.{name}", self.server, self.life);
        self.names.lock().expect("names").push(name.clone());
        Ok(Box::new(self.fabric.endpoint_with(&name, memory_bytes)))
    }
}

enum Asked {
    Write { key: Vec<u8>, number: usize },
    Batch { writes: Vec<(Vec<u8>, usize)> },
    Read { keys: Vec<Vec<u8>>, start: u64 },
    Increment { key: Vec<u8> },
}

struct Host {
    node: Option<Node>,
    life: u32,
    names: Arc<Mutex<Vec<String>>>,
    asked: HashMap<u64, Asked>,
    /// What the server's program would have written down: what does not count in its memory.
    voids: BTreeMap<u16, DiscardedCopy>,
    /// The memory's number, and the newest whole checkpoint of its indexes.
    memory: u64,
    checkpoint: Arc<Mutex<Vec<u8>>>,
}

pub struct World {
    pub fabric: SimFabric,
    plan: Plan,
    seed: u64,
    pub random: Random,
    choices: Random, // for what was added later: seeds keep what they do otherwise
    hosts: Vec<Host>,
    pub configuration: Configuration,
    pub model: Model,
    /// Orders what clients see.
    clock: u64,
    ticket: u64,
    pub full: usize,
    pub not_served: usize,
    /// So many endpoints cannot be opened.
    pub failing: Arc<AtomicU32>,
}

impl World {
    pub fn new(plan: &Plan, seed: u64) -> World {
        let fabric = SimFabric::new(seed, plan.sim.clone());
        let hosts = (0..plan.servers).map(|_| Host {
            node: None,
            life: 0,
            names: Arc::default(),
            asked: HashMap::new(),
            voids: BTreeMap::new(),
            memory: 1,
            checkpoint: Arc::default(),
        });
        let mut world = World {
            fabric,
            seed,
            random: Random(seed ^ 0x5eed),
            choices: Random(seed ^ 0xc4ec),
            hosts: hosts.collect(),
            configuration: Configuration {
                term: 0,
                servers: Vec::new(),
                shards: Vec::new(),
            },
            model: Model::default(),
            clock: 1,
            ticket: 0,
            full: 0,
            not_served: 0,
            failing: Arc::default(),
            plan: plan.clone(),
        };
        for n in 0..plan.servers {
            world.start(n, true);
        }
        let servers = (0..plan.servers).map(|id| world.server(id)).collect();
        world.configuration =
            Configuration::spread(1, servers, plan.shards, plan.copies).expect("a configuration");
        world.reconfigure();
        world
    }

    fn server(&self, id: ServerId) -> Server {
        let node = self.hosts[id as usize].node.as_ref().expect("it runs");
        Server {
            id,
            log: node.log_address(),
            peer: node.peer_address(),
        }
    }

    fn start(&mut self, n: ServerId, is_new: bool) {
        let host = &mut self.hosts[n as usize];
        host.life += 1;
        let data = format!("s{n}");
        let endpoint = if is_new {
            self.fabric.endpoint_with(&data, self.plan.memory_bytes)
        } else {
            self.fabric.restart(&data)
        };
        let mut machines = Machines {
            fabric: self.fabric.clone(),
            server: n,
            life: host.life,
            names: Arc::clone(&host.names),
            failing: Arc::clone(&self.failing),
        };
        let peers = machines.open("peers", 4096).expect("an endpoint");
        let mut config = NodeConfig::new(
            n,
            self.plan.protocol,
            self.plan.shards,
            Token(77),
            0x1234_5678 + self.seed,
        );
        if !self.seed.is_multiple_of(4) {
            // Much is cleaned, however much memory is free.
            config.clean_from_used_percent = 1;
        }
        let voids = self.hosts[n as usize].voids.iter();
        config.voids = voids.map(|(&shard, void)| (shard, void.clone())).collect();
        let host = &self.hosts[n as usize];
        let bytes = host.checkpoint.lock().expect("bytes").clone();
        if !bytes.is_empty() && self.choices.below(4) != 0 {
            let checkpoint = Checkpoint::decode(&bytes).expect("a checkpoint");
            config.start.checkpoint = Some(Arc::new(checkpoint));
        }
        config.start.memory = host.memory;
        config.window = 16;
        config.rebuild_threads = 1 + self.random.below(2) as usize;
        config.backup.segment_bytes = self.plan.segment_bytes;
        config.backup.max_posted = 8;
        config.backup.batch = 2;
        config.worker.max_in_flight = 200;
        config.worker.max_value_bytes = 1200;
        config.worker.max_entry_bytes = 2400;
        config.worker.commit_us = 1_500;
        let node = Node::open(config, Box::new(endpoint), peers, Box::new(machines));
        self.hosts[n as usize].node = Some(node.expect("a node"));
    }

    /// All live members go over to the configuration.
    pub fn reconfigure(&mut self) {
        self.reconfigure_and_void(&[]);
    }

    /// The same; these copies begin anew, or are given up.
    fn reconfigure_and_void(&mut self, voids: &[(ServerId, u16)]) {
        let configuration = self.configuration.clone();
        let members: Vec<ServerId> = configuration.servers.iter().map(|it| it.id).collect();
        for &id in &members {
            let seed = self.seed;
            let node = self.node(id);
            node.prepare(&configuration)
                .unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            for &(_, shard) in voids.iter().filter(|it| it.0 == id) {
                let void = self.node(id).void(&[shard]).expect("void");
                self.hosts[id as usize].voids.insert(shard, void);
            }
            if self.random.below(2) == 0 {
                self.steps(20);
            }
        }
        for &id in &members {
            while let Err(error) = self.node(id).commit() {
                let is_meant = matches!(error, NodeError::Fabric(FabricError::Limit { .. }));
                assert!(is_meant, "seed {}: {error}", self.seed);
                self.steps(20);
            }
            if self.random.below(2) == 0 {
                self.steps(20);
            }
        }
    }

    pub fn node(&mut self, id: ServerId) -> &mut Node {
        self.hosts[id as usize].node.as_mut().expect("it runs")
    }

    pub fn now_us(&self) -> u64 {
        self.fabric.now_ns() / 1000
    }

    pub fn live(&self) -> Vec<ServerId> {
        let members = self.configuration.servers.iter().map(|it| it.id);
        members
            .filter(|&id| self.hosts[id as usize].node.is_some())
            .collect()
    }

    /// Steps of servers picked at random, and of the network.
    pub fn steps(&mut self, count: usize) {
        for _ in 0..count {
            let live = self.live();
            if !live.is_empty() {
                let id = live[self.random.below(live.len() as u64) as usize];
                self.step(id);
            }
            for _ in 0..self.random.below(4) {
                self.fabric.advance();
            }
        }
    }

    pub fn step(&mut self, id: ServerId) {
        let now_us = self.now_us();
        let host = &mut self.hosts[id as usize];
        let whole = &host.checkpoint;
        let node = host.node.as_mut().expect("it runs");
        if self.random.below(3) != 0 {
            node.step(now_us);
        }
        if self.random.below(3) != 0 {
            node.step_control(now_us);
        }
        if self.choices.below(60) == 0 {
            let sink = || Ok(Box::new(kept::Kept::new(whole)) as Box<dyn Sink>);
            let begun = node.control_handle().begin_checkpoint(sink);
            begun.expect("a checkpoint");
        }
        let mut answers = Vec::new();
        node.worker(0)
            .expect("one worker")
            .take_answers(&mut answers);
        for (ticket, answer) in answers {
            self.answered(id, ticket, answer);
        }
    }

    /// Runs without new requests until every shard is served and every request answered.
    pub fn settle(&mut self) {
        for round in 0..4_000 {
            for id in self.live() {
                self.step(id);
                self.step(id);
            }
            // What was lost is asked for again after a while, and after a longer one.
            self.fabric
                .run_for(if round < 1_000 { 30_000 } else { 1_000_000 });
            let idle = self
                .hosts
                .iter()
                .all(|it| it.node.is_none() || it.asked.is_empty());
            if round > 20 && idle && self.is_served() {
                return;
            }
        }
        let mut state = BTreeMap::new();
        for id in self.live() {
            let asked = self.hosts[id as usize].asked.len();
            let node = self.node(id);
            let drained = node.control().is_drained();
            let free = node.control().table().free_segments();
            let stats = node.control().stats();
            let worker = node.worker(0).expect("one");
            let closed = worker.closed_links();
            state.insert(id, format!(
                "asked {asked} drained {drained} free {free} closed {closed:?} in flight {} {stats:?}", worker.in_flight()));
        }
        panic!("seed {}: it does not come to rest: {state:#?}", self.seed);
    }

    fn is_served(&mut self) -> bool {
        let placed = self.configuration.shards.clone();
        placed
            .iter()
            .zip(0..)
            .all(|(placement, shard)| self.node(placement.primary).role(shard) == Role::Serving)
    }

    fn key(&mut self) -> Vec<u8> {
        format!("key {}", self.random.below(self.plan.keys)).into_bytes()
    }

    fn value(&mut self) -> Vec<u8> {
        self.clock += 1;
        let mut value = format!("{} ", self.clock).into_bytes();
        let len = self.random.below(self.plan.max_value) as usize;
        value.resize(value.len() + len, b'.');
        value
    }

    fn primary_of(&self, key: &[u8]) -> ServerId {
        let shard = self.configuration.shard_of_slot(KeyHash::of(key).slot);
        self.configuration.shards[usize::from(shard)].primary
    }

    fn submit(&mut self, id: ServerId, asked: Asked, operations: &[Operation<'_>]) {
        self.ticket += 1;
        let ticket = self.ticket;
        let host = &mut self.hosts[id as usize];
        let Some(node) = host.node.as_mut() else {
            return;
        };
        host.asked.insert(ticket, asked);
        node.worker(0)
            .expect("one worker")
            .submit(ticket, operations);
    }

    /// A client has a server set a key; it asked at `start`.
    fn ask_set(&mut self, id: ServerId, key: &[u8], value: &[u8], start: u64) {
        let number = self.model.begin(key, Some(value.to_vec()), start);
        let operation = Operation::Set {
            key,
            value,
            condition: Condition::Always,
            get: false,
        };
        let key = key.to_vec();
        self.submit(id, Asked::Write { key, number }, &[operation]);
    }

    /// A client asks for something.
    pub fn ask(&mut self) {
        let key = self.key();
        let id = self.primary_of(&key);
        if self.hosts[id as usize].node.is_none() {
            return;
        }
        self.clock += 1;
        let start = self.clock;
        match self.random.below(20) {
            0..9 => {
                let value = self.value();
                self.ask_set(id, &key, &value, start);
            }
            9..11 => {
                let number = self.model.begin(&key, None, start);
                let asked = Asked::Write {
                    key: key.clone(),
                    number,
                };
                self.submit(id, asked, &[Operation::Del { keys: vec![&key] }]);
            }
            11..13 => self.ask_batch(id, &key, start),
            13..16 => {
                let key = format!("counter {}", self.random.below(4)).into_bytes();
                let id = self.primary_of(&key);
                if self.hosts[id as usize].node.is_none() {
                    return;
                }
                self.model.increment(&key);
                let operation = Operation::IncrBy {
                    key: &key,
                    delta: 1,
                };
                let asked = Asked::Increment { key: key.clone() };
                self.submit(id, asked, &[operation]);
            }
            _ => self.ask_read(id, key, start),
        }
    }

    fn ask_read(&mut self, id: ServerId, key: Vec<u8>, start: u64) {
        let asked = Asked::Read {
            keys: vec![key.clone()],
            start,
        };
        self.submit(id, asked, &[Operation::Read(Query::Get { key: &key })]);
    }

    /// Several writes as one: keys of one tag are of one shard.
    fn ask_batch(&mut self, _id: ServerId, key: &[u8], start: u64) {
        let tag = self.random.below(8);
        let keys: Vec<Vec<u8>> = (0..3)
            .map(|n| format!("{{{tag}}}{n}").into_bytes())
            .collect();
        let id = self.primary_of(&keys[0]);
        let _ = key;
        if self.hosts[id as usize].node.is_none() {
            return;
        }
        let value = self.value();
        let writes: Vec<(Vec<u8>, usize)> = keys
            .iter()
            .map(|key| {
                (
                    key.clone(),
                    self.model.begin(key, Some(value.clone()), start),
                )
            })
            .collect();
        let operations: Vec<Operation<'_>> = keys
            .iter()
            .map(|key| Operation::Set {
                key,
                value: &value,
                condition: Condition::Always,
                get: false,
            })
            .collect();
        self.submit(id, Asked::Batch { writes }, &operations);
    }

    fn answered(&mut self, id: ServerId, ticket: u64, answer: Answer) {
        let asked = self.hosts[id as usize].asked.remove(&ticket);
        let asked = asked.expect("one answer for each question");
        self.clock += 1;
        let end = self.clock;
        self.full += usize::from(answer == Answer::Full);
        self.not_served += usize::from(answer == Answer::NotServed);
        let refused = matches!(
            answer,
            Answer::Busy
                | Answer::Full
                | Answer::NotServed
                | Answer::TooLarge
                | Answer::EntryTooLarge { .. }
        );
        if answer == Answer::Unknown {
            self.model.unknown += 1;
        }
        if answer == Answer::Full {
            assert!(self.plan.may_be_full, "seed {}: full", self.seed);
        }
        match (asked, answer) {
            (Asked::Write { key, number }, Answer::Done(_) | Answer::Read(_)) => {
                self.model.done(&key, number, end)
            }
            (Asked::Write { key, number }, _) if refused => self.model.refused(&key, number),
            (Asked::Batch { writes }, Answer::Done(replies)) => {
                assert_eq!(replies, vec![Reply::Ok; 3]);
                for (key, number) in writes {
                    self.model.done(&key, number, end);
                }
            }
            (Asked::Batch { writes }, _) if refused => {
                for (key, number) in writes {
                    self.model.refused(&key, number);
                }
            }
            (Asked::Read { keys, start }, Answer::Read(replies)) => {
                for (key, reply) in keys.iter().zip(replies) {
                    let value = match reply {
                        Reply::Bytes(bytes) => Some(bytes),
                        Reply::Nil => None,
                        other => panic!("seed {}: {other:?}", self.seed),
                    };
                    self.model
                        .check_read(self.seed, key, value.as_deref(), start, end);
                }
            }
            (Asked::Increment { key }, Answer::Done(replies)) => match replies[..] {
                [Reply::Int(n)] => self.model.incremented(self.seed, &key, n),
                ref other => panic!("seed {}: {other:?}", self.seed),
            },
            (Asked::Increment { key }, _) if refused => self.model.increment_refused(&key),
            (_, answer) => assert!(
                refused || answer == Answer::Unknown,
                "seed {}: {answer:?}",
                self.seed
            ),
        }
    }

    /// Requests and steps at random.
    pub fn run(&mut self, steps: usize) {
        for _ in 0..steps {
            if self.random.below(3) == 0 {
                self.ask();
            }
            self.steps(1);
        }
    }

    /// A server's machine loses power, or its processes end.
    pub fn end(&mut self, n: ServerId, power: bool) {
        let host = &mut self.hosts[n as usize];
        host.node = None;
        host.asked.clear();
        let mut names = std::mem::take(&mut *host.names.lock().expect("names"));
        names.push(format!("s{n}"));
        for name in names {
            if power {
                let seed = self.random.next();
                self.fabric.crash(&name, seed);
            } else {
                self.fabric.kill_process(&name);
            }
        }
    }

    /// A server fails; a backup is promoted for each of its shards.
    pub fn fail_over(&mut self, n: ServerId, power: bool) {
        self.end(n, power);
        let (next, lost) = self.configuration.without(n);
        assert!(lost.is_empty());
        self.steps(30);
        self.configuration = next;
        self.reconfigure();
    }

    /// Every machine loses power; all come back.
    pub fn cold_start(&mut self) {
        let members: Vec<ServerId> = self.configuration.servers.iter().map(|it| it.id).collect();
        for &id in &members {
            self.end(id, true);
        }
        self.fabric.run_for(10_000_000);
        for &id in &members {
            self.start(id, false);
        }
        self.configuration.term += 1;
        let servers = members.iter().map(|&id| self.server(id)).collect();
        self.configuration.servers = servers;
        self.reconfigure();
    }
}

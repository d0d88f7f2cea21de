//! One server that loses power between any two stores, flushes and fences: of each line that was in
//! flight, any part may have reached memory. What was answered before is there; what comes back was
//! written; batches are whole.
//!
//! `CYCLONE_LINE_RUNS=n`: n seeds in place of three, of which `CYCLONE_SEED` is the first.

use std::collections::HashMap;

use cyclone_fabric::sim::{SimConfig, SimFabric};
use cyclone_fabric::{Endpoint, FabricError, Token};
use cyclone_pmkv::{Answer, Configuration, Endpoints, Node, NodeConfig, Role, Server};
use cyclone_replication::Protocol;
use cyclone_wire::command::{Condition, Operation};

const MEMORY_BYTES: u64 = 160 << 10;

struct Machines(SimFabric, u32);

impl Endpoints for Machines {
    fn open(&mut self, name: &str, memory_bytes: u64) -> Result<Box<dyn Endpoint>, FabricError> {
        self.1 += 1;
        let name = format!("{name} {}", self.1);
        Ok(Box::new(self.0.endpoint_with(&name, memory_bytes)))
    }
}

fn open(fabric: &SimFabric, data: Box<dyn Endpoint>, term: u32) -> Node {
    let mut config = NodeConfig::new(0, Protocol::Rowan, 2, Token(1), 99);
    config.backup.segment_bytes = 4096;
    config.backup.max_posted = 4;
    config.backup.batch = 2;
    config.worker.commit_us = 50;
    config.worker.max_entry_bytes = 2000;
    // Much is cleaned, however much memory is free.
    config.clean_from_used_percent = 1;
    let peers = Box::new(fabric.endpoint_with("peers", 4096));
    let machines = Box::new(Machines(fabric.clone(), 0));
    let mut node = Node::open(config, data, peers, machines).expect("a node");
    let own = Server {
        id: 0,
        log: node.log_address(),
        peer: node.peer_address(),
    };
    let configuration = Configuration::spread(term, vec![own], 2, 1).expect("valid");
    node.prepare(&configuration).expect("prepared");
    node.commit().expect("committed");
    node
}

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed ^ (mixed >> 29)) % bound
    }
}

/// A key's values in order, the first not counting; and how many of them were answered before the
/// crash.
#[derive(Default)]
struct History {
    values: Vec<Option<Vec<u8>>>,
    answered: usize,
}

const BATCH: [&[u8]; 3] = [b"{b}1", b"{b}2", b"{b}3"];

struct Run {
    fabric: SimFabric,
    node: Node,
    random: Random,
    histories: HashMap<Vec<u8>, History>,
    now_us: u64,
}

impl Run {
    fn new(seed: u64) -> Run {
        let fabric = SimFabric::new(seed, SimConfig::calm());
        let data = Box::new(fabric.endpoint_with("data", MEMORY_BYTES));
        Run {
            node: open(&fabric, data, 1),
            fabric,
            random: Random(seed),
            histories: HashMap::new(),
            now_us: 0,
        }
    }

    fn step(&mut self) {
        self.now_us += 20;
        self.node.step(self.now_us);
        self.node.step_control(self.now_us);
    }

    /// Writes with distinct values, until the power is gone; answers come in order here.
    fn work(&mut self, writes: u64, crash_after: Option<u64>) {
        let crash = self.fabric.crash_sim("data");
        while self.node.role(0) != Role::Serving || self.node.role(1) != Role::Serving {
            self.step();
        }
        for n in 0..writes {
            let text = format!("{n} {}", "x".repeat(self.random.below(200) as usize));
            let value = text.as_bytes();
            let single = format!("k{}", self.random.below(12)).into_bytes();
            let (keys, kept): (Vec<&[u8]>, bool) = match self.random.below(8) {
                0 => (BATCH.to_vec(), true),
                1 | 2 => (vec![&single], false),
                _ => (vec![&single], true),
            };
            let operations: Vec<Operation<'_>> = match kept {
                true => keys.iter().map(|key| set(key, value)).collect(),
                false => vec![Operation::Del { keys: keys.clone() }],
            };
            for &key in &keys {
                let history = self.histories.entry(key.to_vec()).or_default();
                history.values.push(kept.then(|| value.to_vec()));
            }
            self.node.worker(0).expect("one").submit(n, &operations);
            let mut answers = Vec::new();
            for _ in 0..200 {
                self.step();
                self.node.worker(0).expect("one").take_answers(&mut answers);
                if !answers.is_empty() {
                    break;
                }
            }
            let in_time = crash_after.is_none_or(|stop| crash.events() <= stop);
            for &key in &keys {
                let history = self.histories.get_mut(key).expect("begun");
                match answers[..] {
                    [(_, Answer::Done(_) | Answer::Read(_))] if in_time => {
                        history.answered = history.values.len()
                    }
                    [(_, Answer::Done(_) | Answer::Read(_))] => {}
                    [(_, Answer::Full)] => {
                        history.values.pop();
                    }
                    ref other => panic!("{other:?}"),
                }
            }
            if !in_time {
                return;
            }
        }
    }
}

fn set<'a>(key: &'a [u8], value: &'a [u8]) -> Operation<'a> {
    Operation::Set {
        key,
        value,
        condition: Condition::Always,
        get: false,
    }
}

fn check(run: &Run, image: &[u8], what: &str) {
    let fabric = SimFabric::new(5, SimConfig::calm());
    let data = fabric.endpoint_with("data", MEMORY_BYTES);
    data.memory().write(0, image);
    data.memory().persist(0, MEMORY_BYTES);
    let mut node = open(&fabric, Box::new(data), 2);
    for n in 0..200 {
        node.step(n * 20);
        node.step_control(n * 20);
    }
    assert_eq!(node.role(0), Role::Serving, "{what}");
    for (key, history) in &run.histories {
        let value = node.store().get(key);
        let from = history.answered.saturating_sub(1);
        let may =
            history.values[from..].contains(&value) || (history.answered == 0 && value.is_none());
        assert!(
            may,
            "{what}: {} is {value:?}, answered {} of {:?}",
            key.escape_ascii(),
            history.answered,
            history.values
        );
    }
    let values: Vec<_> = BATCH.iter().map(|key| node.store().get(key)).collect();
    assert!(
        values[0] == values[1] && values[1] == values[2],
        "{what}: torn: {values:?}"
    );
    assert_eq!(node.control().stats().refused, 0, "{what}");
}

#[test]
fn power_may_fail_anywhere() {
    const WRITES: u64 = 900;
    let number = |name: &str| {
        let text = std::env::var(name).ok();
        text.map(|it| it.parse::<u64>().expect("a number"))
    };
    let from = number("CYCLONE_SEED").unwrap_or(0);
    for seed in from..from + number("CYCLONE_LINE_RUNS").unwrap_or(3) {
        let mut run = Run::new(seed);
        let first = run.fabric.crash_sim("data").events();
        run.work(WRITES, None);
        let last = run.fabric.crash_sim("data").events();
        let stats = run.node.control().stats();
        assert!(
            stats.cleaned > 10 && stats.tombstones_dropped > 0,
            "{stats:?}"
        );
        let mut places = Random(seed ^ 0xface);
        for _ in 0..120 {
            let stop = first + places.below(last - first);
            let mut run = Run::new(seed);
            let crash = run.fabric.crash_sim("data");
            crash.crash_after(stop);
            run.work(WRITES, Some(stop));
            let image = crash.sampled(places.below(1 << 40));
            check(&run, &image, &format!("seed {seed}, crash after {stop}"));
        }
    }
}

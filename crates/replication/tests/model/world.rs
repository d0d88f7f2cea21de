//! Senders and backups of one protocol on a simulated fabric, and a seeded hand that disturbs them.

#[path = "faults.rs"]
mod faults;

use std::collections::HashMap;
use std::sync::Arc;

use cyclone_fabric::Token;
use cyclone_fabric::sim::{Faults, SimConfig, SimFabric};
use cyclone_replication::{
    Backup, BackupConfig, BackupId, Outcome, Protocol, ReplicationError, Sender, SenderConfig,
    SenderId, SharedLogs, backup, sender,
};

use crate::model::{Attempt, Digest, Model, Record, SEGMENT_BYTES, content};

const TOKEN: Token = Token(77);
const BACKUP_BYTES: u64 = 192 << 10;
/// A record lies in one buffer, with eight additional bytes.
const TAILWIND_MAX: usize = SEGMENT_BYTES as usize - 8;

pub struct Plan {
    pub servers: u32,
    pub workers: u32,
    pub backups: u32,
    pub steps: usize,
    pub faults: bool,
    /// Used segments found by first words, slow writes made again (`rowan`).
    pub first_words: bool,
    pub sim: SimConfig,
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

struct Worker {
    id: SenderId,
    term: u32,
    /// Which of all senders' lives this is.
    life: usize,
    paused: bool,
    sender: Option<Box<dyn Sender>>,
    open: Vec<bool>,
    opening: Vec<bool>,
    /// Records in flight, by context.
    in_flight: HashMap<u64, u64>,
    failed: Vec<u64>,
}

impl Worker {
    fn name(&self) -> String {
        format!("s{}w{}", self.id.server, self.id.worker)
    }
}

struct BackupProtocol {
    name: String,
    backup: Option<Box<dyn Backup>>,
    paused: bool,
    used: Vec<u32>,
}

pub struct World {
    protocol: Protocol,
    fabric: SimFabric,
    random: Random,
    plan_steps: usize,
    faults: bool,
    model: Model,
    workers: Vec<Worker>,
    keepers: Vec<BackupProtocol>,
    shared: HashMap<u32, Arc<SharedLogs>>,
    /// Per server: the lowest term that backups let in.
    terms: Vec<u32>,
    term: u32,
    next_context: u64,
    cut: Vec<(String, String)>,
    failed: usize,
    durable: usize,
    too_large: usize,
    max_transfer: usize,
}

impl World {
    pub fn new(protocol: Protocol, seed: u64, plan: &Plan) -> World {
        let fabric = SimFabric::new(seed, plan.sim.clone());
        let mut world = World {
            protocol,
            fabric,
            random: Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1),
            plan_steps: plan.steps,
            faults: plan.faults,
            model: Model {
                protocol,
                first_words: plan.first_words,
                records: Vec::new(),
                digests: (0..plan.backups).map(|_| Digest::default()).collect(),
                opens: Vec::new(),
            },
            workers: Vec::new(),
            keepers: Vec::new(),
            shared: HashMap::new(),
            terms: vec![1; plan.servers as usize],
            term: 1,
            next_context: 0,
            cut: Vec::new(),
            failed: 0,
            durable: 0,
            too_large: 0,
            max_transfer: plan.sim.max_transfer,
        };
        for n in 0..plan.backups {
            let name = format!("b{n}");
            let endpoint = world.fabric.endpoint_with(&name, BACKUP_BYTES);
            let backup = backup(protocol, Box::new(endpoint), world.backup_config());
            world.keepers.push(BackupProtocol {
                name,
                backup: Some(backup.expect("a backup")),
                paused: false,
                used: Vec::new(),
            });
        }
        for server in 0..plan.servers {
            for worker in 0..plan.workers {
                let mut worker = Worker {
                    id: SenderId { server, worker },
                    term: 1,
                    life: 0,
                    paused: false,
                    sender: None,
                    open: vec![false; plan.backups as usize],
                    opening: vec![false; plan.backups as usize],
                    in_flight: HashMap::new(),
                    failed: Vec::new(),
                };
                let endpoint = world.fabric.endpoint_with(&worker.name(), 4096);
                let config = world.sender_config(worker.id, 1);
                let sender = sender(protocol, Box::new(endpoint), config);
                worker.sender = Some(sender.expect("a sender"));
                worker.life = world.new_life();
                world.workers.push(worker);
            }
        }
        world
    }

    pub fn failed(&self) -> usize {
        self.failed
    }

    pub fn durable(&self) -> usize {
        self.durable
    }

    /// Records refused because they do not fit a buffer.
    pub fn too_large(&self) -> usize {
        self.too_large
    }

    pub fn faults(&self) -> Faults {
        self.fabric.faults()
    }

    fn new_life(&mut self) -> usize {
        self.model.opens.push(vec![0; self.keepers.len()]);
        self.model.opens.len() - 1
    }

    fn backup_config(&self) -> BackupConfig {
        BackupConfig {
            first_words: self.model.first_words,
            segment_bytes: SEGMENT_BYTES,
            max_posted: 8,
            batch: 2,
            ..BackupConfig::new(TOKEN, 0xfeed_beef_0123_4567)
        }
    }

    fn sender_config(&mut self, id: SenderId, term: u32) -> SenderConfig {
        let shared = self.shared.entry(id.server).or_default();
        SenderConfig {
            window: 16,
            shared: Arc::clone(shared),
            first_words: self.model.first_words,
            ..SenderConfig::new(id, term, TOKEN)
        }
    }

    fn now_us(&self) -> u64 {
        self.fabric.now_ns() / 1000
    }

    pub fn run(&mut self) {
        for _ in 0..self.plan_steps {
            for _ in 0..self.random.below(12) {
                self.fabric.advance();
            }
            if self.random.one_in(2) {
                let ns = self.random.below(10_000);
                self.fabric.run_for(ns);
            }
            match self.random.below(10) {
                0..4 => self.append(),
                4..7 => self.poll_sender(),
                7..9 => self.step_backup(),
                _ => self.digest_one(),
            }
            if self.faults && self.random.one_in(60) {
                self.disturb();
            }
        }
    }

    fn any(&mut self, of: usize) -> usize {
        self.random.below(of as u64) as usize
    }

    fn append(&mut self) {
        let place = self.any(self.workers.len());
        let id = match self.workers[place].failed.pop() {
            Some(id) => id,
            None => self.new_record(place),
        };
        let worker = &mut self.workers[place];
        let Some(sender) = &mut worker.sender else {
            worker.failed.push(id);
            return;
        };
        let record = &mut self.model.records[id as usize];
        let backups: Vec<BackupId> = record.backups.iter().map(|&n| BackupId(n)).collect();
        let bytes = content(id, record.len);
        let context = self.next_context;
        self.next_context += 1;
        match sender.append(&backups, &bytes, context) {
            Ok(()) => {
                let fits = record.len <= TAILWIND_MAX;
                assert!(fits || self.protocol != Protocol::Tailwind, "too large");
                record.attempts.push(Attempt {
                    term: worker.term,
                    life: worker.life,
                    opens: self.model.opens[worker.life].clone(),
                });
                worker.in_flight.insert(context, id);
            }
            Err(ReplicationError::Busy | ReplicationError::NotOpen(_)) => worker.failed.push(id),
            // Records that are never cut have a limit, and it is reported.
            Err(ReplicationError::TooLarge { len, max }) => {
                let limit = match self.protocol {
                    Protocol::Tailwind => TAILWIND_MAX,
                    Protocol::Rpc => self.max_transfer - 12,
                    other => panic!("{other} cuts records of {len} bytes"),
                };
                assert_eq!((len, max), (record.len, limit));
                assert!(len > max);
                record.len = max;
                worker.failed.push(id);
                self.too_large += 1;
            }
            Err(error) => panic!("append: {error}"),
        }
    }

    fn new_record(&mut self, place: usize) -> u64 {
        let len = match self.random.below(4) {
            0 => 8 + self.random.below(56),
            1 => 8 + self.random.below(300),
            2 => 8 + self.random.below(4064),
            _ if self.protocol != Protocol::Hyperloop && self.random.one_in(8) => {
                8 + self.random.below(20_000)
            }
            _ => 8 + self.random.below(8192 - 16),
        };
        // Every block begins with the record's number.
        let len = len + if len % 4064 < 8 { 8 } else { 0 };
        let mut backups: Vec<u32> = (0..self.keepers.len() as u32).collect();
        let keep = 1 + self.random.below(backups.len() as u64) as usize;
        while backups.len() > keep {
            let out = self.any(backups.len());
            backups.remove(out);
        }
        let SenderId { server, worker } = self.workers[place].id;
        self.model.records.push(Record {
            len: len as usize,
            server,
            worker,
            backups,
            durable: false,
            attempts: Vec::new(),
        });
        self.model.records.len() as u64 - 1
    }

    fn poll_sender(&mut self) {
        let place = self.any(self.workers.len());
        self.poll(place);
    }

    fn poll(&mut self, place: usize) {
        let now_us = self.now_us();
        let worker = &mut self.workers[place];
        let Some(sender) = &mut worker.sender else {
            return;
        };
        let mut outcomes = Vec::new();
        sender.poll(now_us, &mut outcomes);
        let mut durable = Vec::new();
        for outcome in outcomes {
            match outcome {
                Outcome::Opened { backup } => {
                    worker.open[backup.0 as usize] = true;
                    worker.opening[backup.0 as usize] = false;
                }
                Outcome::Lost { backup, .. } => {
                    worker.open[backup.0 as usize] = false;
                    worker.opening[backup.0 as usize] = false;
                }
                Outcome::Durable { context } => {
                    let id = worker.in_flight.remove(&context).expect("in flight");
                    self.model.records[id as usize].durable = true;
                    self.durable += 1;
                    durable.push(id);
                }
                Outcome::Failed { context, .. } => {
                    let id = worker.in_flight.remove(&context).expect("in flight");
                    worker.failed.push(id);
                    self.failed += 1;
                }
            }
        }
        for n in 0..self.keepers.len() {
            if worker.open[n] || worker.opening[n] || !self.random.one_in(4) {
                continue;
            }
            let name = self.keepers[n].name.clone().into_bytes();
            let opened = sender.open(BackupId(n as u32), &cyclone_fabric::Address(name));
            worker.opening[n] = opened.is_ok();
            self.model.opens[worker.life][n] += 1;
        }
        // The worst moment: power fails just after the promise.
        for id in durable {
            if self.faults && self.random.one_in(3) {
                let backups = &self.model.records[id as usize].backups;
                let chosen = backups[self.random.below(backups.len() as u64) as usize];
                self.check_what_a_crash_would_leave(chosen as usize);
            }
        }
    }

    fn step_backup(&mut self) {
        let place = self.any(self.keepers.len());
        self.step(place);
    }

    fn step(&mut self, place: usize) {
        let now_us = self.now_us();
        let keeper = &mut self.keepers[place];
        let Some(backup) = keeper.backup.as_mut().filter(|_| !keeper.paused) else {
            return;
        };
        backup.step(now_us);
        let mut used = Vec::new();
        backup.take_used(&mut used);
        keeper.used.extend(used.iter().map(|used| used.segment));
    }

    fn digest_one(&mut self) {
        let place = self.any(self.keepers.len());
        // A few stay, for crashes to find.
        while self.keepers[place].used.len() > 4 {
            self.digest(place);
        }
    }

    fn digest(&mut self, place: usize) {
        let keeper = &mut self.keepers[place];
        let Some(backup) = &mut keeper.backup else {
            return;
        };
        if keeper.used.is_empty() {
            return;
        }
        let segment = keeper.used.remove(0);
        self.model.digest(place as u32, backup.memory(), segment);
        backup.release(segment).expect("release");
    }

    /// All faults end; then everything must work again, and everything promised must be there.
    pub fn heal_and_check(&mut self) {
        for (a, b) in std::mem::take(&mut self.cut) {
            self.fabric.partition(&a, &b, false);
        }
        for keeper in &mut self.keepers {
            if std::mem::take(&mut keeper.paused) {
                self.fabric.pause(&keeper.name, false);
            }
        }
        for worker in &mut self.workers {
            if std::mem::take(&mut worker.paused) {
                self.fabric.pause(&worker.name(), false);
            }
        }
        let zombies: Vec<u32> = self
            .workers
            .iter()
            .filter(|worker| worker.term < self.terms[worker.id.server as usize])
            .map(|worker| worker.id.server)
            .collect();
        for server in zombies {
            self.end_server(server);
        }
        self.revive();
        let wanted = self.model.records.len() + 3 * self.workers.len();
        let mut rounds = 0;
        while self.model.records.iter().filter(|r| r.durable).count() < wanted {
            rounds += 1;
            assert!(rounds < 30_000, "stuck: {}", self.what_is_missing());
            self.fabric.run_for(2000);
            for place in 0..self.keepers.len() {
                self.step(place);
                if self.keepers[place].used.len() > 2 {
                    self.digest(place);
                }
            }
            for place in 0..self.workers.len() {
                self.poll(place);
            }
            if self.model.records.len() < wanted
                || self.workers.iter().any(|worker| !worker.failed.is_empty())
            {
                let place = self.any(self.workers.len());
                if self.model.records.len() < wanted || !self.workers[place].failed.is_empty() {
                    self.append();
                }
            }
        }
        for place in 0..self.keepers.len() {
            let memory = self.fabric.memory(&self.keepers[place].name);
            self.model.check(place as u32, &memory);
        }
    }

    fn what_is_missing(&self) -> String {
        let workers: Vec<String> = self
            .workers
            .iter()
            .map(|worker| {
                format!(
                    "{} term {} open {:?} opening {:?}: {} in flight, {} failed",
                    worker.name(),
                    worker.term,
                    worker.open,
                    worker.opening,
                    worker.in_flight.len(),
                    worker.failed.len()
                )
            })
            .collect();
        let keepers: Vec<String> = self
            .keepers
            .iter()
            .map(|keeper| {
                let stats = keeper.backup.as_ref().map(|backup| backup.stats());
                format!("{} used {:?} {stats:?}", keeper.name, keeper.used)
            })
            .collect();
        format!("{}\n{}", workers.join("\n"), keepers.join("\n"))
    }
}

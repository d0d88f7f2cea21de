//! A world of senders and backups on the simulated fabric, compared with what completed. Everything
//! follows from a seed.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use cyclone_fabric::Token;
use cyclone_fabric::sim::{SimConfig, SimEndpoint, SimFabric};
use cyclone_pmem::{Region, SharedArea};
use cyclone_replication::rowan::{RowanBackup, RowanBackupConfig, RowanSender, RowanSenderConfig};
use cyclone_replication::tailwind::{
    Placement, TailwindBackup, TailwindBackupConfig, TailwindSender, TailwindSenderConfig,
};
use cyclone_replication::{
    Assembler, Backup, BackupId, BackupMemory, Outcome, Protocol, ReplicationError, Sender,
    SenderId, scan, scan_segment,
};

pub const TOKEN: Token = Token(0x70_6b_65_6e);
pub const SEGMENT_BYTES: u64 = 4096;

/// SplitMix64.
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

/// What a world is made of and what happens to it.
#[derive(Clone)]
pub struct Plan {
    pub protocol: Protocol,
    pub sim: SimConfig,
    pub senders: usize,
    pub backups: usize,
    pub steps: usize,
    pub max_record: u64,
    /// Of a thousand steps, how many are faults.
    pub faults_per_mille: u64,
    /// Used segments found by first words, slow writes made again.
    pub first_words: bool,
    /// Whether lost and full buffers move to candidates (tailwind).
    pub rotate: bool,
}

impl Plan {
    pub fn new(protocol: Protocol) -> Plan {
        Plan {
            protocol,
            sim: SimConfig {
                memory_bytes: 128 << 10,
                max_append: 256,
                ..SimConfig::default()
            },
            senders: 4,
            backups: 2,
            steps: 3_000,
            max_record: 160,
            faults_per_mille: 8,
            first_words: false,
            rotate: false,
        }
    }
}

fn sender_name(n: usize) -> String {
    format!("sender {n}")
}

fn backup_name(n: usize) -> String {
    format!("backup {n}")
}

struct Writer {
    sender: Option<Box<dyn Sender>>,
    open: BTreeSet<BackupId>,
    asked: BTreeSet<BackupId>,
    term: u32,
    /// Records in flight: their bytes and where they are meant to be.
    pending: HashMap<u64, (Vec<u8>, Vec<BackupId>)>,
    paused: bool,
}

struct BackupProtocol {
    backup: Option<Box<dyn Backup>>,
    /// Records of segments that were digested and given back.
    digested: HashSet<Vec<u8>>,
    assembler: Assembler,
    /// Used segments that hold blocks of records that were not whole, and what else was found
    /// there.
    kept: Vec<u32>,
    found: Vec<Vec<u8>>,
}

pub struct World {
    pub fabric: SimFabric,
    plan: Plan,
    seed: u64,
    random: Random,
    writers: Vec<Writer>,
    keepers: Vec<BackupProtocol>,
    issued: HashSet<Vec<u8>>,
    durable: Vec<(Vec<u8>, Vec<BackupId>)>,
    counter: u64,
    term: u32,
    pub reused: u64,
}

impl World {
    pub fn new(plan: &Plan, seed: u64) -> World {
        let fabric = SimFabric::new(seed, plan.sim.clone());
        let keepers = (0..plan.backups)
            .map(|n| BackupProtocol {
                backup: Some(start_backup(plan, fabric.endpoint(&backup_name(n)), seed)),
                digested: HashSet::new(),
                assembler: Assembler::default(),
                kept: Vec::new(),
                found: Vec::new(),
            })
            .collect();
        let mut world = World {
            fabric,
            plan: plan.clone(),
            seed,
            random: Random(seed ^ 0xabcd),
            writers: Vec::new(),
            keepers,
            issued: HashSet::new(),
            durable: Vec::new(),
            counter: 0,
            term: 1,
            reused: 0,
        };
        for n in 0..plan.senders {
            let endpoint = world.fabric.endpoint(&sender_name(n));
            let sender = world.start_sender(n, endpoint);
            world.writers.push(Writer {
                sender: Some(sender),
                open: BTreeSet::new(),
                asked: BTreeSet::new(),
                term: 1,
                pending: HashMap::new(),
                paused: false,
            });
        }
        world
    }

    fn start_sender(&self, n: usize, endpoint: SimEndpoint) -> Box<dyn Sender> {
        let id = SenderId {
            server: n as u32,
            worker: 0,
        };
        match self.plan.protocol {
            Protocol::Rowan => {
                let config = RowanSenderConfig {
                    retry_slow: self.plan.first_words,
                    ..RowanSenderConfig::new(id, self.term, TOKEN)
                };
                Box::new(RowanSender::new(Box::new(endpoint), config).expect("sender"))
            }
            _ => {
                let mut config = TailwindSenderConfig::new(id, self.term, TOKEN);
                if self.plan.rotate {
                    let candidates = (0..self.plan.backups)
                        .map(|n| {
                            let name = backup_name(n).into_bytes();
                            (BackupId(n as u32), cyclone_fabric::Address(name))
                        })
                        .collect();
                    config.placement = Placement::Rotate(candidates);
                }
                Box::new(TailwindSender::new(Box::new(endpoint), config))
            }
        }
    }

    fn now_us(&self) -> u64 {
        self.fabric.now_ns() / 1000
    }

    /// Runs the plan, then lets everything come to rest, and checks.
    pub fn run(&mut self) {
        for _ in 0..self.plan.steps {
            if self.random.below(1000) < self.plan.faults_per_mille {
                self.fault();
            }
            match self.random.below(8) {
                0..3 => self.append(),
                3..5 => {
                    let n = self.random.below(self.plan.senders as u64) as usize;
                    self.poll(n);
                }
                5..7 => {
                    let n = self.random.below(self.plan.backups as u64) as usize;
                    self.step(n);
                }
                _ => {}
            }
            for _ in 0..self.random.below(4) {
                self.fabric.advance();
            }
        }
        self.heal();
        self.rest(400);
        for n in 0..self.plan.backups {
            self.check(n);
        }
    }

    fn rest(&mut self, rounds: usize) {
        for _ in 0..rounds {
            (0..self.plan.senders).for_each(|n| self.poll(n));
            (0..self.plan.backups).for_each(|n| self.step(n));
            self.fabric.run_for(20_000);
        }
    }

    fn append(&mut self) {
        let n = self.random.below(self.plan.senders as u64) as usize;
        let record = self.record();
        let writer = &mut self.writers[n];
        let Some(sender) = &mut writer.sender else {
            return;
        };
        let mut backups: Vec<BackupId> = writer.open.iter().copied().collect();
        if backups.is_empty() {
            return;
        }
        if self.random.below(3) == 0 && backups.len() > 1 {
            backups.remove(0);
        }
        if self.plan.rotate {
            // A replica may be anywhere: one each, so that there is room to move.
            backups = vec![BackupId(n as u32 % self.plan.backups as u32)];
            if !writer.open.contains(&backups[0]) {
                return;
            }
        }
        self.counter += 1;
        let context = self.counter;
        match sender.append(&backups, &record, context) {
            Ok(()) => {
                self.issued.insert(record.clone());
                writer.pending.insert(context, (record, backups));
            }
            Err(ReplicationError::Busy) => {}
            Err(ReplicationError::NotOpen(backup)) => {
                // Its loss is reported at the next poll.
                writer.open.remove(&backup);
            }
            Err(error) => panic!("seed {}: append: {error}", self.seed),
        }
    }

    /// A record like no other, of any length; some imitate blocks.
    fn record(&mut self) -> Vec<u8> {
        self.counter += 1;
        let len = 8 + self.random.below(self.plan.max_record);
        let mut record = self.counter.to_le_bytes().to_vec();
        let fill = self.random.next();
        while (record.len() as u64) < len {
            let word = match fill % 4 {
                0 => fill,
                1 => 0,
                2 => 0x0001_0043_4200_0100 ^ (fill << 40),
                _ => self.random.next(),
            };
            record.extend(word.to_le_bytes());
        }
        record.truncate(len as usize);
        record
    }

    fn poll(&mut self, n: usize) {
        let now_us = self.now_us();
        let writer = &mut self.writers[n];
        let Some(sender) = &mut writer.sender else {
            return;
        };
        let mut outcomes = Vec::new();
        sender.poll(now_us, &mut outcomes);
        for outcome in outcomes {
            match outcome {
                Outcome::Opened { backup } => {
                    writer.asked.remove(&backup);
                    writer.open.insert(backup);
                }
                Outcome::Durable { context } => {
                    let pending = writer.pending.remove(&context);
                    self.durable.push(pending.expect("one answer per record"));
                }
                Outcome::Failed { context, .. } => {
                    let pending = writer.pending.remove(&context);
                    assert!(pending.is_some(), "seed {}: failed twice", self.seed);
                }
                Outcome::Lost { backup, .. } => {
                    writer.open.remove(&backup);
                    writer.asked.remove(&backup);
                }
            }
        }
        for backup in 0..self.plan.backups {
            let id = BackupId(backup as u32);
            if self.plan.rotate && backup != n % self.plan.backups {
                continue;
            }
            if !writer.open.contains(&id) && !writer.asked.contains(&id) {
                let name = backup_name(backup).into_bytes();
                if sender.open(id, &cyclone_fabric::Address(name)).is_ok() {
                    writer.asked.insert(id);
                }
            }
        }
    }

    fn step(&mut self, n: usize) {
        let now_us = self.now_us();
        let keeper = &mut self.keepers[n];
        let Some(backup) = &mut keeper.backup else {
            return;
        };
        backup.step(now_us);
        let mut used = Vec::new();
        backup.take_used(&mut used);
        for used in used {
            let memory = copy(backup.memory());
            let segment = used.segment;
            let (assembler, found) = (&mut keeper.assembler, &mut keeper.found);
            scan_segment(&memory, segment, assembler, |record| {
                found.push(record.bytes)
            })
            .expect("scan");
            keeper.kept.push(segment);
            // Blocks of a record that is not whole yet are in one of these segments, perhaps: they
            // are kept.
            if self.plan.protocol != Protocol::Rowan || keeper.assembler.incomplete() == 0 {
                keeper.digested.extend(keeper.found.drain(..));
                for segment in keeper.kept.drain(..) {
                    backup.release(segment).expect("release");
                    self.reused += 1;
                }
            }
        }
    }

    fn fault(&mut self) {
        let sender = self.random.below(self.plan.senders as u64) as usize;
        let backup = self.random.below(self.plan.backups as u64) as usize;
        let (from, to) = (sender_name(sender), backup_name(backup));
        match self.random.below(9) {
            0 | 1 => self.kill_sender(sender),
            2 => {
                let on = !self.writers[sender].paused;
                if self.writers[sender].sender.is_some() {
                    self.writers[sender].paused = on;
                    self.fabric.pause(&from, on);
                }
            }
            3 => self.fabric.partition(&from, &to, self.random.below(2) == 0),
            4 => self.end_backup(backup, true),
            5 => self.end_backup(backup, false),
            6 => self.fence(sender),
            _ => {
                self.start_senders();
                self.start_backups();
            }
        }
    }

    fn kill_sender(&mut self, n: usize) {
        let writer = &mut self.writers[n];
        if writer.sender.take().is_none() {
            return;
        }
        self.fabric.kill_process(&sender_name(n));
        writer.paused = false;
        writer.open.clear();
        writer.asked.clear();
        // Records in flight may or may not be there; no outcome was reported.
        writer.pending.clear();
    }

    fn start_senders(&mut self) {
        for n in 0..self.plan.senders {
            if self.writers[n].sender.is_none() {
                let endpoint = self.fabric.restart(&sender_name(n));
                self.writers[n].sender = Some(self.start_sender(n, endpoint));
                self.writers[n].term = self.term;
            }
        }
    }

    /// Power failure or death of a backup's process. What completed is in its memory at once.
    fn end_backup(&mut self, n: usize, power: bool) {
        if self.keepers[n].backup.take().is_none() {
            return;
        }
        let name = backup_name(n);
        if power {
            let seed = self.random.next();
            self.fabric.crash(&name, seed);
        } else {
            self.fabric.kill_process(&name);
        }
        self.check(n);
    }

    fn start_backups(&mut self) {
        for n in 0..self.plan.backups {
            let keeper = &mut self.keepers[n];
            if keeper.backup.is_none() {
                let endpoint = self.fabric.restart(&backup_name(n));
                keeper.backup = Some(start_backup(&self.plan, endpoint, self.random.next()));
                keeper.assembler = Assembler::default();
                keeper.kept.clear();
                keeper.found.clear();
            }
        }
    }

    /// A server is fenced off everywhere: what it still sends must have no effect. The others come
    /// back in a new term.
    fn fence(&mut self, n: usize) {
        self.term += 1;
        self.start_backups();
        let mut before = Vec::new();
        for keeper in &mut self.keepers {
            let backup = keeper.backup.as_mut().expect("all run");
            backup.fence_off(n as u32, self.term).expect("fence");
            before.push(backup.memory().clone());
        }
        let count = |memories: &[SharedArea]| -> Vec<usize> {
            memories
                .iter()
                .map(|memory| {
                    let of_server = |record: &(SenderId, Vec<u8>)| record.0.server == n as u32;
                    scan_all(memory).into_iter().filter(of_server).count()
                })
                .collect()
        };
        let then = count(&before);
        // Its packets may still be in flight.
        self.fabric.run_for(200_000);
        assert_eq!(
            then,
            count(&before),
            "seed {}: a fenced server wrote",
            self.seed
        );
        // No other sender may go on in the old term either.
        (0..self.plan.senders).for_each(|n| self.kill_sender(n));
        self.start_senders();
    }

    fn heal(&mut self) {
        for n in 0..self.plan.senders {
            if self.writers[n].paused {
                self.writers[n].paused = false;
                self.fabric.pause(&sender_name(n), false);
            }
            for backup in 0..self.plan.backups {
                self.fabric
                    .partition(&sender_name(n), &backup_name(backup), false);
            }
        }
        self.start_senders();
        self.start_backups();
    }

    /// Every record that completed is on every backup it was meant for; nothing is there that was
    /// not sent.
    fn check(&self, n: usize) {
        let id = BackupId(n as u32);
        let memory = self.fabric.memory(&backup_name(n));
        let mut there = self.keepers[n].digested.clone();
        for (_, record) in scan_all(&memory) {
            there.insert(record);
        }
        for record in &there {
            assert!(
                self.issued.contains(record),
                "seed {}: backup {n} holds {record:x?}, which no sender sent",
                self.seed
            );
        }
        for (record, backups) in &self.durable {
            let here = backups.contains(&id) && !self.plan.rotate;
            assert!(
                !here || there.contains(record),
                "seed {}: backup {n} lost {record:x?}",
                self.seed
            );
        }
        if self.plan.rotate {
            self.check_anywhere();
        }
    }

    /// With candidates a record is on some backup; none of their memories is ever lost here.
    fn check_anywhere(&self) {
        let mut there: HashSet<Vec<u8>> = HashSet::new();
        for (n, keeper) in self.keepers.iter().enumerate() {
            there.extend(keeper.digested.iter().cloned());
            let memory = self.fabric.memory(&backup_name(n));
            there.extend(scan_all(&memory).into_iter().map(|it| it.1));
        }
        for (record, _) in &self.durable {
            assert!(
                there.contains(record),
                "seed {}: {record:x?} is nowhere",
                self.seed
            );
        }
    }

    pub fn durable(&self) -> usize {
        self.durable.len()
    }

    /// Records in flight without an outcome.
    pub fn pending(&self) -> usize {
        self.writers.iter().map(|writer| writer.pending.len()).sum()
    }

    pub fn stats(&self) -> BTreeMap<usize, u64> {
        let posted =
            |keeper: &BackupProtocol| keeper.backup.as_ref().map(|it| it.stats().segments_posted);
        self.keepers
            .iter()
            .map(|keeper| posted(keeper).unwrap_or(0))
            .enumerate()
            .collect()
    }
}

fn start_backup(plan: &Plan, endpoint: SimEndpoint, secret: u64) -> Box<dyn Backup> {
    match plan.protocol {
        Protocol::Rowan => {
            let config = RowanBackupConfig {
                segment_bytes: SEGMENT_BYTES,
                max_posted: 6,
                batch: 3,
                first_words: plan.first_words,
                ..RowanBackupConfig::new(TOKEN, secret)
            };
            Box::new(RowanBackup::open(Box::new(endpoint), config).expect("backup"))
        }
        _ => {
            let config = TailwindBackupConfig {
                segment_bytes: SEGMENT_BYTES,
                token: TOKEN,
                secret,
                archive: None,
            };
            Box::new(TailwindBackup::open(Box::new(endpoint), config).expect("backup"))
        }
    }
}

/// A copy, so that opening it for a scan changes nothing.
fn copy(memory: &SharedArea) -> BackupMemory {
    let bytes = memory.read_vec(0, memory.len());
    let region = Region::anonymous(memory.len()).expect("region");
    let area = region.take(0, memory.len()).expect("area").share();
    area.write(0, &bytes);
    BackupMemory::open(area).expect("memory")
}

/// Everything found in a memory.
fn scan_all(memory: &SharedArea) -> Vec<(SenderId, Vec<u8>)> {
    let mut found = Vec::new();
    scan(&copy(memory), |record| {
        found.push((record.sender, record.bytes))
    })
    .expect("scan");
    found
}

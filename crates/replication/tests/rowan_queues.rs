//! Rowan's queues take turns: segments are used again as they are, and nothing of an earlier life
//! is ever found.

use std::collections::BTreeSet;

use cyclone_fabric::sim::{SimConfig, SimEndpoint, SimFabric};
use cyclone_fabric::{Address, AppendBy, Token};
use cyclone_replication::rowan::{RowanBackup, RowanBackupConfig, RowanSender, RowanSenderConfig};
use cyclone_replication::{
    Assembler, Backup, BackupId, BackupMemory, Outcome, Sender, SenderId, scan, scan_segment,
};

const TOKEN: Token = Token(5);
const BACKUP: BackupId = BackupId(0);
const SENDERS: u32 = 3;

fn open_backup(endpoint: SimEndpoint, secret: u64) -> RowanBackup {
    let config = RowanBackupConfig {
        segment_bytes: 4096,
        max_posted: 16,
        batch: 4,
        ..RowanBackupConfig::new(TOKEN, secret)
    };
    RowanBackup::open(Box::new(endpoint), config).expect("backup")
}

fn open_sender(fabric: &SimFabric, server: u32) -> RowanSender {
    let id = SenderId { server, worker: 0 };
    let endpoint = fabric.endpoint_with(&format!("sender {server}"), 4096);
    let config = RowanSenderConfig::new(id, 1, TOKEN);
    let mut sender = RowanSender::new(Box::new(endpoint), config).expect("sender");
    let to = Address(b"backup".to_vec());
    sender.open(BACKUP, &to).expect("open");
    sender
}

/// Different for every number, and sometimes longer than a block.
fn record(number: u64, max_block: usize) -> Vec<u8> {
    let len = if number.is_multiple_of(7) {
        max_block + 200
    } else {
        40 + (number % 90) as usize
    };
    let mut bytes = vec![number as u8; len];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    bytes
}

struct World {
    fabric: SimFabric,
    senders: Vec<(RowanSender, bool)>,
    backup: RowanBackup,
    sent: u64,
    /// Completed, by number.
    durable: BTreeSet<u64>,
    /// Of segments that were given back.
    digested: BTreeSet<Vec<u8>>,
    kept: Vec<u32>,
    found: Vec<Vec<u8>>,
    assembler: Assembler,
    max_block: usize,
}

impl World {
    fn new(seed: u64) -> World {
        let config = SimConfig {
            append: Some(AppendBy::Reservation),
            ..SimConfig::calm()
        };
        let max_block = config.max_append;
        let fabric = SimFabric::new(seed, config);
        let backup = open_backup(fabric.endpoint_with("backup", 128 << 10), seed);
        let senders = (0..SENDERS)
            .map(|n| (open_sender(&fabric, n), false))
            .collect();
        World {
            fabric,
            senders,
            backup,
            sent: 0,
            durable: BTreeSet::new(),
            digested: BTreeSet::new(),
            kept: Vec::new(),
            found: Vec::new(),
            assembler: Assembler::default(),
            max_block,
        }
    }

    /// A round of everybody's; `idle` appends nothing and only polls.
    fn round(&mut self, idle: Option<usize>) {
        let now_us = self.fabric.now_ns() / 1000;
        for (n, (sender, open)) in self.senders.iter_mut().enumerate() {
            let bytes = record(self.sent, self.max_block);
            if *open && idle != Some(n) && sender.append(&[BACKUP], &bytes, self.sent).is_ok() {
                self.sent += 1;
            }
            let mut outcomes = Vec::new();
            sender.poll(now_us, &mut outcomes);
            for outcome in outcomes {
                match outcome {
                    Outcome::Opened { .. } => *open = true,
                    Outcome::Durable { context } => assert!(self.durable.insert(context)),
                    other => panic!("{other:?}"),
                }
            }
        }
        self.backup.step(now_us);
        if let Some(trouble) = self.backup.take_error() {
            panic!("{trouble}");
        }
        let mut taken = Vec::new();
        self.backup.take_used(&mut taken);
        let memory = BackupMemory::view(self.backup.memory().clone()).expect("memory");
        for used in taken {
            let found = &mut self.found;
            scan_segment(&memory, used.segment, &mut self.assembler, |record| {
                found.push(record.bytes);
            })
            .expect("scan");
            self.kept.push(used.segment);
            if self.assembler.incomplete() == 0 {
                for bytes in self.found.drain(..) {
                    assert!(self.digested.insert(bytes), "found in a second life");
                }
                for segment in self.kept.drain(..) {
                    self.backup.release(segment).expect("release");
                }
            }
        }
        self.fabric.run_for(3_000);
    }

    /// What is in the memory now is whole, sent, and not what was digested; and with that it is all
    /// that completed.
    fn check(&self) {
        let memory = BackupMemory::view(self.backup.memory().clone()).expect("memory");
        let mut found = BTreeSet::new();
        scan(&memory, |record| {
            assert!(!self.digested.contains(&record.bytes), "it came back");
            assert!(found.insert(record.bytes), "twice");
        })
        .expect("scan");
        for &number in &self.durable {
            let bytes = record(number, self.max_block);
            assert!(
                found.contains(&bytes) || self.digested.contains(&bytes),
                "{number} is lost"
            );
        }
        let sent: BTreeSet<_> = (0..self.sent).map(|n| record(n, self.max_block)).collect();
        assert!(found.is_subset(&sent));
    }
}

/// Two megabytes through 30 segments of 4 KiB, and a power failure at the end, at another moment of
/// a queue's life for each seed.
#[test]
fn segments_are_used_again_without_being_zeroed() {
    let mut opened = 0;
    for seed in 0..30 {
        let mut world = World::new(seed);
        for _ in 0..1_500 + 11 * seed {
            world.round(None);
        }
        let stats = world.backup.stats();
        assert!(
            stats.queues_opened >= 8 && stats.segments_used > 150,
            "{stats:?}"
        );
        assert!(
            stats.segments_zeroed * 20 <= stats.segments_posted,
            "{stats:?}"
        );
        opened += stats.queues_opened;
        world.check();
        world.fabric.crash("backup", seed);
        world.check();
        world.backup = open_backup(world.fabric.restart("backup"), seed + 100);
        world.check();
    }
    assert!(opened > 300, "{opened}");
}

/// Power fails within a change of queue: right after the new one was opened, and in each of the
/// next rounds, until the old one has been closed and its segments are in use again.
#[test]
fn power_fails_while_the_queue_changes() {
    for seed in 0..5 {
        for rounds in 0..12 {
            let mut world = World::new(100 + seed);
            for _ in 0..300 + 40 * seed {
                world.round(None);
            }
            let before = world.backup.stats().queues_opened;
            while world.backup.stats().queues_opened == before {
                world.round(None);
            }
            (0..rounds).for_each(|_| world.round(None));
            world.check();
            world.fabric.crash("backup", 17 * seed + rounds);
            world.check();
            world.backup = open_backup(world.fabric.restart("backup"), seed + 100);
            world.check();
        }
    }
}

/// A sender that has nothing to send is notified of every queue all the same, and appends to the
/// newest when it has.
#[test]
fn an_idle_sender_goes_along() {
    let mut world = World::new(1);
    for _ in 0..1_500 {
        world.round(Some(0));
    }
    let before = world.backup.stats();
    assert!(before.queues_opened >= 8, "{before:?}");
    for _ in 0..100 {
        world.round(None);
    }
    world.check();
}

/// A sender that does not even poll holds the others up for half a second at most. Then it loses
/// the backup, and opens its log again.
#[test]
fn a_sender_that_sleeps_is_left_behind() {
    let mut world = World::new(2);
    while !world.senders.iter().all(|(_, open)| *open) {
        world.round(None);
    }
    let (mut sleeper, _) = world.senders.remove(0);
    while world.backup.stats().queues_opened < 3 {
        world.round(None);
        assert!(world.fabric.now_ns() < 600_000_000);
    }
    assert!(world.fabric.now_ns() > 500_000_000);
    let append = sleeper.append(&[BACKUP], b"late", 1);
    append.expect("it has not heard of anything");
    let (mut outcomes, mut lost, mut is_open) = (Vec::new(), 0, false);
    for _ in 0..300 {
        sleeper.poll(world.fabric.now_ns() / 1000, &mut outcomes);
        for outcome in outcomes.drain(..) {
            match outcome {
                Outcome::Lost { .. } => {
                    lost += 1;
                    let to = Address(b"backup".to_vec());
                    sleeper.open(BACKUP, &to).expect("open");
                }
                Outcome::Failed { context, .. } => assert_eq!(context, 1),
                Outcome::Opened { .. } => is_open = true,
                Outcome::Durable { .. } => panic!("that queue is closed"),
            }
        }
        world.round(None);
    }
    assert_eq!((lost, is_open), (1, true));
    world.check();
    sleeper.append(&[BACKUP], b"in time", 2).expect("append");
}

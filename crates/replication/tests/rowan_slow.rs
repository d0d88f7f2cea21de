//! Rowan over a NIC that tells nothing: writes that took too long are made again, and the sender's
//! clock is not believed beyond what it can know.

use cyclone_fabric::sim::{SimConfig, SimFabric};
use cyclone_fabric::{Address, Token};
use cyclone_replication::rowan::{RowanBackup, RowanBackupConfig, RowanSender, RowanSenderConfig};
use cyclone_replication::{Backup, BackupId, BackupMemory, Outcome, Sender, SenderId, scan};

const TOKEN: Token = Token(5);
const BACKUP: BackupId = BackupId(0);
const ME: SenderId = SenderId {
    server: 1,
    worker: 2,
};

fn start() -> (SimFabric, RowanSender, RowanBackup) {
    let fabric = SimFabric::new(3, SimConfig::calm());
    let config = RowanBackupConfig {
        segment_bytes: 4096,
        max_posted: 8,
        batch: 4,
        first_words: true,
        ..RowanBackupConfig::new(TOKEN, 9)
    };
    let endpoint = fabric.endpoint_with("backup", 128 << 10);
    let backup = RowanBackup::open(Box::new(endpoint), config).expect("backup");
    let config = RowanSenderConfig {
        retry_slow: true,
        ..RowanSenderConfig::new(ME, 1, TOKEN)
    };
    let endpoint = fabric.endpoint_with("sender", 4096);
    let mut sender = RowanSender::new(Box::new(endpoint), config).expect("sender");
    sender
        .open(BACKUP, &Address(b"backup".to_vec()))
        .expect("open");
    (fabric, sender, backup)
}

fn poll(sender: &mut RowanSender, now_us: u64) -> Vec<Outcome> {
    let mut outcomes = Vec::new();
    sender.poll(now_us, &mut outcomes);
    outcomes
}

/// Lets everybody do what they can until something is reported.
fn until_told(fabric: &SimFabric, sender: &mut RowanSender, backup: &mut RowanBackup) -> Outcome {
    for _ in 0..1_000 {
        let now_us = fabric.now_ns() / 1000;
        backup.step(now_us);
        if let Some(outcome) = poll(sender, now_us).pop() {
            return outcome;
        }
        fabric.run_for(5_000);
    }
    panic!("nothing was reported");
}

fn copies(backup: &RowanBackup) -> usize {
    let memory = BackupMemory::view(backup.memory().clone()).expect("memory");
    let mut count = 0;
    scan(&memory, |record| {
        assert_eq!(record.bytes, b"slow");
        count += 1;
    })
    .expect("scan");
    count
}

/// The thread reads its clock, sleeps for five milliseconds, and only then sees the completion. By
/// the clock it read, the write was fast; it may as well have landed just now, in a segment that
/// the receiver has given up.
#[test]
fn a_completion_is_judged_by_a_clock_read_after_it() {
    let (fabric, mut sender, mut backup) = start();
    let opened = until_told(&fabric, &mut sender, &mut backup);
    assert_eq!(opened, Outcome::Opened { backup: BACKUP });
    let read_us = fabric.now_ns() / 1000;
    assert_eq!(poll(&mut sender, read_us), []);
    sender.append(&[BACKUP], b"slow", 1).expect("append");
    sender.post();
    fabric.run_for(5_000_000);
    assert_eq!(poll(&mut sender, read_us + 1), []);
    // Judged: made again, and durable once that is fast.
    assert_eq!(poll(&mut sender, fabric.now_ns() / 1000), []);
    let durable = until_told(&fabric, &mut sender, &mut backup);
    assert_eq!(durable, Outcome::Durable { context: 1 });
    assert_eq!(copies(&backup), 2);
}

#[test]
fn a_fast_write_is_made_once() {
    let (fabric, mut sender, mut backup) = start();
    until_told(&fabric, &mut sender, &mut backup);
    sender.append(&[BACKUP], b"slow", 1).expect("append");
    let durable = until_told(&fabric, &mut sender, &mut backup);
    assert_eq!(durable, Outcome::Durable { context: 1 });
    assert_eq!(copies(&backup), 1);
}

/// A machine that has been up for a year: the first clock that a sender sees says so. No time has
/// passed since it opened its log.
#[test]
fn patience_begins_with_the_first_clock() {
    let (fabric, mut sender, mut backup) = start();
    let year_us = 31_536_000_000_000;
    assert_eq!(poll(&mut sender, year_us), []);
    fabric.run_for(50_000);
    backup.step(0);
    fabric.run_for(50_000);
    let opened = [Outcome::Opened { backup: BACKUP }];
    assert_eq!(poll(&mut sender, year_us + 100), opened);
}

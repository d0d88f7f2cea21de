//! Tailwind's buffers: full ones, lost ones, archived ones.

use std::path::Path;

use cyclone_fabric::sim::{SimConfig, SimEndpoint, SimFabric};
use cyclone_fabric::{Address, Token};
use cyclone_pmem::SharedArea;
use cyclone_replication::tailwind::{
    Archive, ArchiveConfig, Placement, TailwindBackup, TailwindBackupConfig, TailwindSender,
    TailwindSenderConfig, scan, scan_buffer,
};
use cyclone_replication::{
    Backup, BackupId, BackupMemory, Outcome, ReplicationError, Sender, SenderId,
};

const TOKEN: Token = Token(5);
const ME: SenderId = SenderId {
    server: 1,
    worker: 2,
};

fn fabric() -> SimFabric {
    SimFabric::new(
        7,
        SimConfig {
            memory_bytes: 64 << 10,
            ..SimConfig::calm()
        },
    )
}

fn backup(endpoint: SimEndpoint, archive: Option<(&Path, usize)>) -> TailwindBackup {
    backup_of(endpoint, archive, 4096)
}

fn backup_of(
    endpoint: SimEndpoint,
    archive: Option<(&Path, usize)>,
    segment_bytes: u64,
) -> TailwindBackup {
    let config = TailwindBackupConfig {
        segment_bytes,
        token: TOKEN,
        secret: 99,
        archive: archive.map(|(directory, max_files)| ArchiveConfig {
            directory: directory.to_owned(),
            max_files,
        }),
    };
    TailwindBackup::open(Box::new(endpoint), config).expect("backup")
}

fn address(name: &str) -> Address {
    Address(name.as_bytes().to_vec())
}

fn records(memory: &SharedArea) -> Vec<Vec<u8>> {
    let mut found = Vec::new();
    let memory = BackupMemory::open(memory.clone()).expect("memory");
    scan(&memory, |record| found.push(record.bytes)).expect("scan");
    found
}

/// Lets everybody do what they can for a while.
/// A sender whose log at the first backup may move to the second.
fn rotating_sender(fabric: &SimFabric) -> TailwindSender {
    let config = TailwindSenderConfig {
        placement: Placement::Rotate(vec![
            (BackupId(0), address("first")),
            (BackupId(1), address("second")),
        ]),
        ..TailwindSenderConfig::new(ME, 1, TOKEN)
    };
    let mut sender = TailwindSender::new(Box::new(fabric.endpoint("sender")), config);
    sender.open(BackupId(0), &address("first")).expect("open");
    sender
}

fn turn(
    fabric: &SimFabric,
    sender: &mut TailwindSender,
    backups: &mut [&mut TailwindBackup],
) -> Vec<Outcome> {
    let mut outcomes = Vec::new();
    for _ in 0..200 {
        sender.poll(fabric.now_ns() / 1000, &mut outcomes);
        for backup in backups.iter_mut() {
            backup.step(0);
        }
        fabric.run_for(5_000);
    }
    outcomes
}

fn durable(outcomes: &[Outcome]) -> Vec<u64> {
    outcomes
        .iter()
        .filter_map(|outcome| match outcome {
            Outcome::Durable { context } => Some(*context),
            _ => None,
        })
        .collect()
}

fn record(n: u64) -> Vec<u8> {
    let mut record = vec![n as u8; 100];
    record[..8].copy_from_slice(&n.to_le_bytes());
    record
}

/// A backup's machine is lost for good. The caller opens the replica elsewhere: the open buffer's
/// records are there before anything else is said to be durable, and before the replica is said to
/// be open.
#[test]
fn a_replacement_is_given_the_lost_buffer() {
    let fabric = fabric();
    let mut first = backup(fabric.endpoint("first"), None);
    let config = TailwindSenderConfig::new(ME, 1, TOKEN);
    let mut sender = TailwindSender::new(Box::new(fabric.endpoint("sender")), config);
    sender.open(BackupId(0), &address("first")).expect("open");
    turn(&fabric, &mut sender, &mut [&mut first]);
    for n in 0..10 {
        sender
            .append(&[BackupId(0)], &record(n), n)
            .expect("append");
    }
    let outcomes = turn(&fabric, &mut sender, &mut [&mut first]);
    assert_eq!(durable(&outcomes), (0..10).collect::<Vec<_>>());

    drop(first);
    fabric.crash("first", 3);
    fabric.run_for(5_000_000);
    let outcomes = turn(&fabric, &mut sender, &mut []);
    assert!(matches!(outcomes[..], [Outcome::Lost { .. }]));

    let mut second = backup(fabric.endpoint("second"), None);
    sender.open(BackupId(0), &address("second")).expect("open");
    for _ in 0..2_000 {
        let mut outcomes = Vec::new();
        sender.poll(fabric.now_ns() / 1000, &mut outcomes);
        second.step(0);
        if outcomes.contains(&Outcome::Opened {
            backup: BackupId(0),
        }) {
            // What is durable now, not only visible.
            for seed in 0..10 {
                let image = fabric.crash_sim("second").sampled(seed);
                let region = cyclone_pmem::Region::anonymous(64 << 10).expect("region");
                let area = region.take(0, 64 << 10).expect("area").share();
                area.write(0, &image);
                assert_eq!(records(&area), (0..10).map(record).collect::<Vec<_>>());
            }
            return;
        }
        fabric.run_for(1_000);
    }
    panic!("the replacement never opened");
}

/// With a candidate the loss is not reported: records in flight become durable at the candidate,
/// behind the old ones.
#[test]
fn a_candidate_takes_a_lost_backups_place() {
    let fabric = fabric();
    let mut first = backup(fabric.endpoint("first"), None);
    let mut second = backup(fabric.endpoint("second"), None);
    let mut sender = rotating_sender(&fabric);
    turn(&fabric, &mut sender, &mut [&mut first, &mut second]);
    for n in 0..5 {
        sender
            .append(&[BackupId(0)], &record(n), n)
            .expect("append");
    }
    turn(&fabric, &mut sender, &mut [&mut first, &mut second]);
    drop(first);
    fabric.crash("first", 3);
    for n in 5..10 {
        sender
            .append(&[BackupId(0)], &record(n), n)
            .expect("append");
    }
    fabric.run_for(5_000_000);
    let outcomes = turn(&fabric, &mut sender, &mut [&mut second]);
    assert_eq!(durable(&outcomes), (5..10).collect::<Vec<_>>());
    assert_eq!(outcomes.len(), 5, "{outcomes:?}");
    assert_eq!(sender.host(BackupId(0)), Some(BackupId(1)));
    assert_eq!(
        records(second.memory()),
        (0..10).map(record).collect::<Vec<_>>()
    );
}

/// Full buffers reach files; the machine that held them in memory is lost; the files alone hold
/// every record of them.
#[test]
fn full_buffers_are_archived_and_read_back() {
    let directory = tempfile::tempdir().expect("directory");
    let fabric = fabric();
    let mut keeper = backup(fabric.endpoint("keeper"), Some((directory.path(), 100)));
    let config = TailwindSenderConfig::new(ME, 1, TOKEN);
    let mut sender = TailwindSender::new(Box::new(fabric.endpoint("sender")), config);
    sender.open(BackupId(0), &address("keeper")).expect("open");
    turn(&fabric, &mut sender, &mut [&mut keeper]);
    for n in 0..200 {
        sender
            .append(&[BackupId(0)], &record(n), n)
            .expect("append");
        turn_once(&fabric, &mut sender, &mut keeper);
    }
    turn(&fabric, &mut sender, &mut [&mut keeper]);
    let mut used = Vec::new();
    keeper.take_used(&mut used);
    assert!(used.iter().all(|used| used.owner == Some(ME)));
    // 37 records of 108 bytes fill 4096.
    assert_eq!(used.len(), 5);
    assert_eq!(archived(directory.path()), (0..185).collect::<Vec<_>>());

    // Half-way through a restart: open buffers are closed and archived too.
    drop(keeper);
    fabric.crash("keeper", 4);
    fabric.run_for(5_000_000);
    let mut keeper = backup(fabric.restart("keeper"), Some((directory.path(), 100)));
    for _ in 0..20 {
        keeper.step(0);
    }
    assert_eq!(archived(directory.path()), (0..200).collect::<Vec<_>>());
    let mut used = Vec::new();
    keeper.take_used(&mut used);
    assert_eq!(used.len(), 6);
    for used in &used {
        keeper.release(used.segment).expect("release");
    }
    assert_eq!(records(keeper.memory()), Vec::<Vec<u8>>::new());
    assert_eq!(archived(directory.path()).len(), 200);
}

/// What was released before a restart needs no file after it: buffers are granted as before.
#[test]
fn an_archive_has_room_again_after_a_restart() {
    let directory = tempfile::tempdir().expect("directory");
    let archive = Some((directory.path(), 3));
    let fabric = fabric();
    let mut keeper = backup(fabric.endpoint("keeper"), archive);
    let config = TailwindSenderConfig::new(ME, 1, TOKEN);
    let mut sender = TailwindSender::new(Box::new(fabric.endpoint("sender")), config);
    sender.open(BackupId(0), &address("keeper")).expect("open");
    turn(&fabric, &mut sender, &mut [&mut keeper]);
    for n in 0..200 {
        let taken = sender.append(&[BackupId(0)], &record(n), n);
        taken.expect("append");
        turn_once(&fabric, &mut sender, &mut keeper);
        release_used(&mut keeper);
    }
    assert_eq!(archived(directory.path()), (74..185).collect::<Vec<_>>());

    drop(keeper);
    fabric.crash("keeper", 4);
    fabric.run_for(5_000_000);
    turn(&fabric, &mut sender, &mut []);
    let mut keeper = backup(fabric.restart("keeper"), archive);
    // The buffer that was open is the only one that still needs a file.
    keeper.step(0);
    assert_eq!(archived(directory.path()), (111..200).collect::<Vec<_>>());
    release_used(&mut keeper);
    sender.open(BackupId(0), &address("keeper")).expect("open");
    turn(&fabric, &mut sender, &mut [&mut keeper]);
    let taken = sender.append(&[BackupId(0)], &record(200), 200);
    taken.expect("a buffer was granted");
    let outcomes = turn(&fabric, &mut sender, &mut [&mut keeper]);
    assert_eq!(durable(&outcomes), [200]);
}

fn release_used(keeper: &mut TailwindBackup) {
    let mut used = Vec::new();
    keeper.take_used(&mut used);
    for used in used {
        keeper.release(used.segment).expect("release");
    }
}

fn turn_once(fabric: &SimFabric, sender: &mut TailwindSender, keeper: &mut TailwindBackup) {
    for _ in 0..5 {
        sender.poll(fabric.now_ns() / 1000, &mut Vec::new());
        keeper.step(0);
        fabric.run_for(5_000);
    }
}

/// Numbers of the records in a directory's files.
fn archived(directory: &Path) -> Vec<u64> {
    let archive = Archive::open(directory, 100).expect("archive");
    let mut numbers = Vec::new();
    for epoch in archive.epochs() {
        let buffer = archive.read(epoch).expect("read");
        assert_eq!(buffer.owner, ME);
        let scan = scan_buffer(buffer.seed, &buffer.content);
        assert_eq!(scan.end, buffer.content.len());
        for at in scan.records {
            let mut word = [0; 8];
            word.copy_from_slice(&buffer.content[at][..8]);
            numbers.push(u64::from_le_bytes(word));
        }
    }
    numbers
}

/// The archive is full of buffers that were not released: no more are granted, senders are held
/// back, nothing is lost; and all goes on once one is released.
#[test]
fn a_full_archive_holds_senders_back() {
    let directory = tempfile::tempdir().expect("directory");
    let fabric = fabric();
    let mut keeper = backup(fabric.endpoint("keeper"), Some((directory.path(), 2)));
    let config = TailwindSenderConfig {
        max_records: 8,
        ..TailwindSenderConfig::new(ME, 1, TOKEN)
    };
    let mut sender = TailwindSender::new(Box::new(fabric.endpoint("sender")), config);
    sender.open(BackupId(0), &address("keeper")).expect("open");
    turn(&fabric, &mut sender, &mut [&mut keeper]);
    let mut taken = 0;
    for _ in 0..300 {
        if sender.append(&[BackupId(0)], &record(taken), taken).is_ok() {
            taken += 1;
        }
        turn_once(&fabric, &mut sender, &mut keeper);
    }
    assert!(taken < 3 * 37 + 9, "{taken}");
    let mut used = Vec::new();
    keeper.take_used(&mut used);
    keeper.release(used[0].segment).expect("release");
    let outcomes = turn(&fabric, &mut sender, &mut [&mut keeper]);
    assert_eq!(durable(&outcomes).last(), Some(&(taken - 1)));
}

/// Fresh memory under an old archive would give its buffers the names of old ones.
#[test]
fn an_archive_of_another_memory_is_refused() {
    let directory = tempfile::tempdir().expect("directory");
    let mut archive = Archive::open(directory.path(), 4).expect("archive");
    archive.store(9, 1, ME, b"").expect("store");
    let endpoint = fabric().endpoint("keeper");
    let config = TailwindBackupConfig {
        segment_bytes: 4096,
        token: TOKEN,
        secret: 99,
        archive: Some(ArchiveConfig {
            directory: directory.path().to_owned(),
            max_files: 4,
        }),
    };
    assert!(TailwindBackup::open(Box::new(endpoint), config).is_err());
}

/// A record is durable at one backup and not at the other, when the first is lost and replaced.
/// Written again at the replacement it must not count for the backup that still lacks it.
#[test]
fn a_record_written_again_counts_once() {
    let fabric = fabric();
    let mut first = backup(fabric.endpoint("first"), None);
    let mut slow = backup(fabric.endpoint("slow"), None);
    let mut second = backup(fabric.endpoint("second"), None);
    let config = TailwindSenderConfig {
        placement: Placement::Rotate(vec![(BackupId(7), address("second"))]),
        ..TailwindSenderConfig::new(ME, 1, TOKEN)
    };
    let mut sender = TailwindSender::new(Box::new(fabric.endpoint("sender")), config);
    sender.open(BackupId(0), &address("first")).expect("open");
    sender.open(BackupId(1), &address("slow")).expect("open");
    let outcomes = turn(&fabric, &mut sender, &mut [&mut first, &mut slow]);
    assert_eq!(outcomes.len(), 2, "{outcomes:?}");
    fabric.partition("sender", "slow", true);
    sender
        .append(&[BackupId(0), BackupId(1)], &record(1), 1)
        .expect("append");
    // Durable at the first, not at the slow one.
    fabric.run_for(50_000);
    let mut outcomes = Vec::new();
    sender.poll(fabric.now_ns() / 1000, &mut outcomes);
    drop(first);
    fabric.crash("first", 3);
    for _ in 0..100 {
        sender.poll(fabric.now_ns() / 1000, &mut outcomes);
        second.step(0);
        let there = records(slow.memory()).contains(&record(1));
        assert!(there || durable(&outcomes).is_empty(), "{outcomes:?}");
        fabric.run_for(8_000);
    }
}

/// The replacement's buffers are too small for some of what the lost one held. It keeps what it has
/// taken, in a closed buffer; the next candidate takes the rest.
#[test]
fn a_candidate_with_small_buffers_is_passed_over() {
    let fabric = fabric();
    let mut first = backup_of(fabric.endpoint("first"), None, 8192);
    let mut small = backup(fabric.endpoint("small"), None);
    let mut third = backup_of(fabric.endpoint("third"), None, 8192);
    let config = TailwindSenderConfig {
        placement: Placement::Rotate(vec![
            (BackupId(1), address("small")),
            (BackupId(2), address("third")),
        ]),
        ..TailwindSenderConfig::new(ME, 1, TOKEN)
    };
    let mut sender = TailwindSender::new(Box::new(fabric.endpoint("sender")), config);
    sender.open(BackupId(0), &address("first")).expect("open");
    turn(&fabric, &mut sender, &mut [&mut first]);
    let large = vec![7; 5000];
    sender
        .append(&[BackupId(0)], &record(1), 1)
        .expect("append");
    sender.append(&[BackupId(0)], &large, 2).expect("append");
    let outcomes = turn(&fabric, &mut sender, &mut [&mut first]);
    assert_eq!(durable(&outcomes), [1, 2]);
    drop(first);
    fabric.crash("first", 3);
    fabric.run_for(5_000_000);
    let mut outcomes = turn(&fabric, &mut sender, &mut [&mut small, &mut third]);
    outcomes.extend(turn(&fabric, &mut sender, &mut [&mut small, &mut third]));
    assert_eq!(outcomes, []);
    assert_eq!(sender.host(BackupId(0)), Some(BackupId(2)));
    assert!(records(small.memory()) == [record(1)]);
    assert!(records(third.memory()) == [large]);
}

/// A record that fits no buffer is refused at once, with the most that fits; one that just fits is
/// taken.
#[test]
fn a_record_larger_than_a_buffer_is_refused() {
    let fabric = fabric();
    let mut keeper = backup(fabric.endpoint("keeper"), None);
    let config = TailwindSenderConfig::new(ME, 1, TOKEN);
    let mut sender = TailwindSender::new(Box::new(fabric.endpoint("sender")), config);
    sender.open(BackupId(0), &address("keeper")).expect("open");
    turn(&fabric, &mut sender, &mut [&mut keeper]);
    let most = 4096 - 8;
    for n in 0..4 {
        let error = sender.append(&[BackupId(0)], &vec![1; most + 1], n);
        assert!(
            matches!(error, Err(ReplicationError::TooLarge { len, max }) if (len, max) == (most + 1, most)),
            "{error:?}"
        );
        // Also while there is no buffer, because the last one is full.
        sender
            .append(&[BackupId(0)], &vec![1; most], n)
            .expect("append");
        fabric.run_for(20_000);
        sender.poll(fabric.now_ns() / 1000, &mut Vec::new());
    }
    turn(&fabric, &mut sender, &mut [&mut keeper]);
    assert!(records(keeper.memory()) == vec![vec![1; most]; 4]);
}

/// A candidate that was lost may take over again after a while: a machine that comes back is not
/// shunned permanently.
#[test]
fn a_candidate_that_came_back_is_tried_again() {
    let fabric = fabric();
    let mut first = backup(fabric.endpoint("first"), None);
    let mut second = backup(fabric.endpoint("second"), None);
    let mut sender = rotating_sender(&fabric);
    turn(&fabric, &mut sender, &mut [&mut first, &mut second]);
    sender
        .append(&[BackupId(0)], &record(1), 1)
        .expect("append");
    turn(&fabric, &mut sender, &mut [&mut first, &mut second]);
    drop(first);
    fabric.crash("first", 3);
    for _ in 0..4 {
        turn(&fabric, &mut sender, &mut [&mut second]);
    }
    assert_eq!(sender.host(BackupId(0)), Some(BackupId(1)));
    let mut first = backup(fabric.restart("first"), None);
    fabric.run_for(11_000_000_000);
    turn(&fabric, &mut sender, &mut [&mut first, &mut second]);
    drop(second);
    fabric.crash("second", 4);
    for _ in 0..4 {
        assert_eq!(turn(&fabric, &mut sender, &mut [&mut first]), []);
    }
    assert_eq!(sender.host(BackupId(0)), Some(BackupId(0)));
    // In the buffer that was open then, and in the new one.
    assert_eq!(records(first.memory()), [record(1), record(1)]);
}

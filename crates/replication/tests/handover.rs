//! Used segments change hands: every protocol's backup hands each over once, its records are read
//! from it alone, and it is used again only after its release.

use std::collections::BTreeSet;

use cyclone_fabric::sim::{SimConfig, SimFabric};
use cyclone_fabric::{Address, Token};
use cyclone_replication::{
    Assembler, BackupConfig, BackupId, BackupMemory, Outcome, Owner, Protocol, ReplicationError,
    SegmentState, SenderConfig, SenderId, backup, scan_segment, sender,
};

const TOKEN: Token = Token(77);
const ME: SenderId = SenderId {
    server: 3,
    worker: 1,
};

fn record(n: u64) -> Vec<u8> {
    [n.to_le_bytes(); 60].concat()
}

fn hand_over(protocol: Protocol) {
    let fabric = SimFabric::new(5, SimConfig::calm());
    let config = BackupConfig {
        segment_bytes: 4096,
        max_posted: 4,
        batch: 2,
        ..BackupConfig::new(TOKEN, 0xfeed_beef)
    };
    let endpoint = Box::new(fabric.endpoint_with("backup", 96 << 10));
    let mut keeper = backup(protocol, endpoint, config).expect("backup");
    let endpoint = Box::new(fabric.endpoint_with("sender", 4096));
    let mut me = sender(protocol, endpoint, SenderConfig::new(ME, 1, TOKEN)).expect("sender");
    me.open(BackupId(0), &Address(b"backup".to_vec()))
        .expect("open");
    let (mut open, mut next, mut durable) = (false, 0, 0);
    let (mut digested, mut segments) = (BTreeSet::new(), Vec::new());
    let mut assembler = Assembler::default();
    // Some 40 segments' worth of records through 20 segments of memory.
    for _ in 0..20_000 {
        if open && next < 320 && me.append(&[BackupId(0)], &record(next), next).is_ok() {
            next += 1;
        }
        let mut outcomes = Vec::new();
        me.poll(fabric.now_ns() / 1000, &mut outcomes);
        for outcome in outcomes {
            match outcome {
                Outcome::Opened { .. } => open = true,
                Outcome::Durable { .. } => durable += 1,
                other => panic!("{protocol}: {other:?}"),
            }
        }
        keeper.step(fabric.now_ns() / 1000);
        let memory = BackupMemory::view(keeper.memory().clone()).expect("memory");
        let used = memory.in_order(|entry| entry.state == SegmentState::Used);
        let mut taken = Vec::new();
        for &segment in &used {
            assert!(keeper.release(segment).is_err(), "{protocol}: not taken");
        }
        keeper.take_used(&mut taken);
        for used in taken {
            let entry = memory.entry(used.segment).expect("entry");
            assert_eq!(entry.state, SegmentState::Used, "{protocol}");
            let owner = match entry.owner {
                Owner::Sender(owner) => Some(owner),
                _ => None,
            };
            assert_eq!(used.owner, owner, "{protocol}");
            scan_segment(&memory, used.segment, &mut assembler, |found| {
                assert!(digested.insert(found.bytes), "{protocol}: twice");
            })
            .expect("scan");
            keeper.release(used.segment).expect("release");
            let again = keeper.release(used.segment);
            assert!(matches!(again, Err(ReplicationError::Segment { .. })));
            segments.push(used.segment);
        }
        if durable == 320 {
            break;
        }
        fabric.run_for(2_000);
    }
    assert_eq!(durable, 320, "{protocol}");
    let reused = segments.len() - segments.iter().collect::<BTreeSet<_>>().len();
    assert!(reused > 5, "{protocol}: {segments:?}");
    let sent: BTreeSet<_> = (0..320).map(record).collect();
    assert!(digested.is_subset(&sent), "{protocol}");
    assert!(digested.len() > 250, "{protocol}: {}", digested.len());
}

#[test]
fn used_segments_are_handed_over_once_and_used_again() {
    for protocol in Protocol::ALL {
        if protocol != Protocol::Hyperloop {
            hand_over(protocol);
        }
    }
}

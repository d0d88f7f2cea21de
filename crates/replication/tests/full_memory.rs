//! A memory without a free segment: senders wait, and are served when one is free again, whosever
//! it was.

use cyclone_fabric::sim::{SimConfig, SimFabric};
use cyclone_fabric::{Address, Token};
use cyclone_replication::{
    Backup, BackupConfig, BackupId, BackupMemory, Content, Outcome, Owner, Protocol, SegmentState,
    Sender, SenderConfig, SenderId, backup, scan, sender,
};

const TOKEN: Token = Token(77);
const HERE: [BackupId; 1] = [BackupId(0)];
const SEGMENT_BYTES: u64 = 4096;

struct World {
    fabric: SimFabric,
    protocol: Protocol,
    keeper: Box<dyn Backup>,
    senders: Vec<Box<dyn Sender>>,
}

impl World {
    fn new(protocol: Protocol, sim: SimConfig, memory_bytes: u64) -> World {
        let fabric = SimFabric::new(1, sim);
        let config = BackupConfig {
            segment_bytes: SEGMENT_BYTES,
            ..BackupConfig::new(TOKEN, 0xfeed_beef)
        };
        let endpoint = Box::new(fabric.endpoint_with("backup", memory_bytes));
        let keeper = backup(protocol, endpoint, config).expect("a backup");
        World {
            fabric,
            protocol,
            keeper,
            senders: Vec::new(),
        }
    }

    /// Another sender whose log is to be opened; answers its place.
    fn open(&mut self, server: u32, worker: u32, term: u32) -> usize {
        let place = self.senders.len();
        let config = SenderConfig {
            max_record_bytes: 8 << 20,
            ..SenderConfig::new(SenderId { server, worker }, term, TOKEN)
        };
        let endpoint = self.fabric.endpoint_with(&format!("sender {place}"), 4096);
        let mut sender = sender(self.protocol, Box::new(endpoint), config).expect("a sender");
        let to = Address(b"backup".to_vec());
        sender.open(BackupId(0), &to).expect("open");
        self.senders.push(sender);
        place
    }

    /// Lets everybody do what they can for a while; answers what one sender has to tell.
    fn run(&mut self, teller: usize) -> Vec<Outcome> {
        let mut told = Vec::new();
        for _ in 0..100 {
            let now_us = self.fabric.now_ns() / 1000;
            self.keeper.step(now_us);
            for (place, sender) in self.senders.iter_mut().enumerate() {
                let mut outcomes = Vec::new();
                sender.poll(now_us, &mut outcomes);
                if place == teller {
                    told.extend(outcomes);
                }
            }
            self.fabric.run_for(3_000);
        }
        told
    }

    /// Takes segments for the server's own log, all but so many.
    fn take_all_but(&mut self, left: u32) -> Vec<u32> {
        let table = self.keeper.table_mut();
        let mut taken = Vec::new();
        while table.free_segments() > left {
            let own = table.allocate(Owner::Worker(0), 1, 0, Content::Stale);
            taken.push(own.expect("some are free"));
        }
        taken
    }

    /// Gives segments of the server's own log back.
    fn give_back(&mut self, segments: &[u32]) {
        let table = self.keeper.table_mut();
        for &segment in segments {
            for state in [SegmentState::Used, SegmentState::Free] {
                table.transition(segment, state).expect("a transition");
            }
        }
    }

    fn holds(&self, record: &[u8]) -> bool {
        let memory = BackupMemory::view(self.keeper.memory().clone()).expect("memory");
        let mut is_there = false;
        scan(&memory, |found| is_there |= found.bytes == record).expect("scan");
        is_there
    }
}

fn is_durable(outcomes: &[Outcome]) -> bool {
    outcomes
        .iter()
        .any(|it| matches!(it, Outcome::Durable { .. }))
}

/// Appends once it can be done; returns whether the record became durable.
fn append(world: &mut World, sender: usize, is_taken: &mut bool) -> bool {
    let mut outcomes = Vec::new();
    for _ in 0..10 {
        *is_taken |= !*is_taken && world.senders[sender].append(&HERE, &[7; 500], 1).is_ok();
        outcomes.extend(world.run(sender));
    }
    is_durable(&outcomes)
}

#[test]
fn who_waits_is_served_when_a_segment_of_the_servers_own_is_free() {
    // Rowan's backup has posted all there are before anybody asks.
    let asked_for = |protocol: &Protocol| *protocol != Protocol::Rowan;
    for protocol in Protocol::ALL.into_iter().filter(asked_for) {
        let mut world = World::new(protocol, SimConfig::default(), 128 << 10);
        let taken = world.take_all_but(0);
        let sender = world.open(3, 0, 1);
        let mut is_taken = false;
        assert!(!append(&mut world, sender, &mut is_taken), "{protocol}");
        world.give_back(&taken);
        assert!(append(&mut world, sender, &mut is_taken), "{protocol}");
        assert!(world.holds(&[7; 500]), "{protocol}");
    }
}

/// The record at the front, of which a block is stored, goes with its session and another's at
/// once.
#[test]
fn a_record_behind_one_that_was_given_up_half_way_is_stored_whole() {
    let mut world = World::new(Protocol::Rpc, SimConfig::calm(), 128 << 10);
    let taken = world.take_all_but(1);
    let (first, second) = (world.open(3, 0, 1), world.open(3, 1, 1));
    let other = world.open(4, 0, 2);
    let told = world.run(other);
    assert_eq!(told.len(), 1, "{told:?}");
    let record = |n| vec![n; 6000];
    for (sender, n) in [(first, 1), (other, 2)] {
        let taken = world.senders[sender].append(&HERE, &record(n), 1);
        taken.expect("a record by message waits at the backup");
        assert!(!is_durable(&world.run(sender)));
    }
    world.keeper.fence_off(3, 2).expect("fenced off");
    world.give_back(&taken);
    assert!(is_durable(&world.run(other)));
    assert!(world.holds(&record(2)), "acknowledged, and not stored");
    assert!(!world.holds(&record(1)));
    assert!(matches!(world.run(second)[..], []));
}

/// A scan believes no block of a record with too many.
#[test]
fn a_record_of_too_many_blocks_is_refused() {
    let sim = SimConfig {
        max_transfer: 8 << 20,
        ..SimConfig::calm()
    };
    let mut world = World::new(Protocol::Rpc, sim, 16 << 20);
    let sender = world.open(3, 0, 1);
    world.run(sender);
    let most = (SEGMENT_BYTES as usize - 32) * 1024;
    for (len, is_stored) in [(most, true), (most + 1, false)] {
        let record = vec![7; len];
        let taken = world.senders[sender].append(&HERE, &record, 1);
        taken.expect("as large as a message may be");
        let told = world.run(sender);
        assert_eq!(is_durable(&told), is_stored, "{told:?}");
        assert_eq!(world.holds(&record), is_stored);
        let is_reported =
            |it: &Outcome| matches!(it, Outcome::Lost { why, .. } if why.contains("the most"));
        assert_eq!(told.iter().any(is_reported), !is_stored, "{told:?}");
    }
}

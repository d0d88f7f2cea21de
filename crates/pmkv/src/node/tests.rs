//! Servers in states that clusters reach by accident only.

use cyclone_replication::{Content, Owner, SegmentState};
use cyclone_wire::command::Operation;
use cyclone_wire::reply::Reply;

use super::*;
use crate::configuration::Placement;
use crate::entry::{self, Entry, Kind, Stamp};
use crate::testing::{Alone, keys_of, put, set};
use crate::worker::Answer;

/// All of a shard has been gathered, and waits to be written down, when another shard's copy is
/// given up: the gathered entries are thrown away, and the shard is not here.
#[test]
fn what_was_gathered_and_dropped_is_asked_for_again() {
    let mut alone = Alone::new(1 << 20, 8192);
    let joins = Placement {
        primary: 1,
        backups: Vec::new(),
        joining: vec![0],
        source: None,
    };
    let mut configuration = alone.placed(1, [joins.clone(), joins]);
    alone.node.prepare(&configuration).expect("prepared");
    alone.node.commit().expect("committed");
    alone.steps(5);
    let keys: Vec<String> = keys_of(&alone, 0).take(600).collect();
    let gift = |term, attempt| Message {
        from: 1,
        term,
        body: Body::Gathered {
            shard: 0,
            attempt: attempt | joining::OF_A_JOIN,
            part: 0,
            parts: 1,
            commit: 600,
            newest: 600,
            entries: keys
                .iter()
                .zip(1..)
                .map(|(key, version)| put(0, version, key))
                .collect(),
        },
    };
    alone.node.hear(gift(1, 1));
    alone.step();
    assert!(!alone.node.unadopted.is_empty());
    assert_eq!(alone.node.joined(), []);

    configuration.term = 2;
    alone.node.prepare(&configuration).expect("prepared");
    alone.node.void(&[1]).expect("void");
    alone.step();
    assert_eq!(alone.node.joined(), []);
    alone.node.commit().expect("committed");
    // Copies are paced.
    alone.steps(60);
    assert_eq!(alone.node.joined(), []);

    alone.node.hear(gift(2, 1));
    alone.steps(5);
    assert_eq!(alone.node.joined(), [0]);
    for key in &keys {
        assert!(alone.node.store().get(key.as_bytes()).is_some(), "{key}");
    }
}

/// Cleaning notes in a tombstone which segments of its memory may hold older versions. Another
/// server's segments have other epochs: by theirs it would be dropped at once, and the key be back
/// after a restart, or never.
#[test]
fn what_cleaning_noted_in_a_tombstone_does_not_leave_its_memory() {
    let mut alone = Alone::new(1 << 20, 8192);
    alone.serve(1, &[]);
    let key = keys_of(&alone, 0).next().expect("one");
    let mut noted = Vec::new();
    let stamp = Stamp {
        version: 7,
        shard: 0,
    };
    entry::encode(
        Kind::Delete,
        stamp,
        0,
        key.as_bytes(),
        &1u64.to_le_bytes(),
        &mut noted,
    );
    assert!(alone.node.control().adopt_if_newer(&put(0, 6, &key)));
    assert!(alone.node.control().adopt_if_newer(&noted));
    let (shard, hash) = alone.place_of(&key);
    let found = alone.node.store().look(shard, hash, key.as_bytes());
    let found = found.expect("whole").expect("a tombstone");
    assert_eq!((found.stamp(), found.kind()), (stamp, Kind::Delete));
    assert_eq!(found.into_value(), b"");
}

/// The entries with the highest versions were cleaned away as overwritten or deleted ones, the
/// CommitVer has stayed: new versions begin above it.
#[test]
fn versions_go_on_above_what_was_committed() {
    let mut alone = Alone::new(1 << 20, 8192);
    alone.serve(1, &[]);
    let key = keys_of(&alone, 0).next().expect("one");
    let commit = 3 << 20;
    {
        let mut control = alone.node.control();
        let mut notice = Vec::new();
        let (none, word) = (
            Stamp {
                version: 0,
                shard: 0,
            },
            Stamp {
                version: commit,
                shard: 0,
            },
        );
        entry::encode(
            Kind::Commit,
            none,
            0,
            &[],
            &word.bits().to_le_bytes(),
            &mut notice,
        );
        assert!(control.adopt_if_newer(&put(0, 5, &key)));
        control.log.append(0, &notice).expect("room");
        control.log.fence();
    }
    alone.restart(8192);
    assert_eq!(alone.version_of(&key), 5);
    alone.serve(2, &[]);
    alone.set(&key, "new");
    assert!(alone.version_of(&key) > commit);
}

/// A copy is given up while a write is in flight: it must not be sent again, with its old version,
/// by the same server's next copy.
#[test]
fn writes_in_flight_for_a_discarded_copy_are_given_up() {
    let mut alone = Alone::new(1 << 20, 8192);
    alone.serve(1, &[]);
    let keys: Vec<String> = (0..2)
        .map(|shard| keys_of(&alone, shard).next().expect("one"))
        .collect();
    // Server 1 has no log that could be opened: writes stay in flight.
    alone.serve(2, &[1]);
    for key in &keys {
        alone.submit(&[set(key, "value")]);
    }
    alone.steps(5);
    assert_eq!(alone.answers(), []);
    let mut configuration = alone.node.configuration().expect("one").clone();
    configuration.term = 3;
    alone.node.prepare(&configuration).expect("prepared");
    alone.node.void(&[0]).expect("void");
    assert_eq!(alone.answers(), [Answer::Unknown]);
    for placement in &mut configuration.shards {
        placement.backups.clear();
    }
    configuration.term = 4;
    alone.node.prepare(&configuration).expect("prepared");
    alone.node.commit().expect("committed");
    alone.steps(20);
    assert_eq!(alone.answers(), [Answer::Done(vec![Reply::Ok])]);
    assert_eq!(alone.get(&keys[0]), Answer::Read(vec![Reply::Nil]));
    let value = Reply::Bytes(b"value".to_vec());
    assert_eq!(alone.get(&keys[1]), Answer::Read(vec![value]));
}

/// A segment has room for five of these.
fn large(version: u64, key: &str) -> Vec<u8> {
    let (mut bytes, stamp) = (Vec::new(), Stamp { version, shard: 0 });
    entry::encode(Kind::Put, stamp, 0, key.as_bytes(), &[7; 1500], &mut bytes);
    bytes
}

/// A copy larger than what is free: the servers that replicate to this memory must still find
/// segments, or no client could write any more, nor delete anything.
#[test]
fn a_copy_leaves_the_segments_that_backups_need() {
    let mut alone = Alone::new(1 << 20, 8192);
    let placed = |primary, joining| Placement {
        primary,
        backups: Vec::new(),
        joining,
        source: None,
    };
    alone.serve(1, &[]);
    let reserved = alone.node.control().config.remote_reserve;
    let free = |alone: &Alone| alone.node.control().table().free_segments();
    let mine: Vec<String> = keys_of(&alone, 1).take(1_000).collect();
    let value = "v".repeat(1_500);
    let mut written = 0;
    while free(&alone) > reserved + 2 {
        alone.set(&mine[written], &value);
        written += 1;
    }

    let configuration = alone.placed(2, [placed(1, vec![0]), placed(0, Vec::new())]);
    alone.node.prepare(&configuration).expect("prepared");
    alone.node.commit().expect("committed");
    alone.steps(5);
    let keys: Vec<String> = keys_of(&alone, 0).take(256).collect();
    let entries = keys.iter().zip(1..);
    alone.node.hear(Message {
        from: 1,
        term: 2,
        body: Body::Gathered {
            shard: 0,
            attempt: 1 | joining::OF_A_JOIN,
            part: 0,
            parts: 1,
            commit: 256,
            newest: 256,
            entries: entries.map(|(key, version)| large(version, key)).collect(),
        },
    });
    for _ in 0..300 {
        alone.step();
        let free = free(&alone);
        assert!(free > reserved, "{free} segments are free");
    }
    assert!(!alone.node.unadopted.is_empty());

    // There is room again: the copy goes on.
    for key in &mine[..written] {
        let keys = vec![key.as_bytes()];
        assert_eq!(
            alone.ask(Operation::Del { keys }),
            Answer::Done(vec![Reply::Int(1)])
        );
    }
    alone.steps(300);
    assert_eq!(alone.node.joined(), [0]);
    for key in &keys {
        assert!(alone.node.store().get(key.as_bytes()).is_some(), "{key}");
    }
}

/// Cleaning has noted an epoch in a tombstone that is not on every replica yet: what goes to the
/// others has none.
#[test]
fn what_goes_to_other_replicas_has_no_notes_of_this_memory() {
    let mut alone = Alone::new(1 << 20, 8192);
    alone.serve(1, &[]);
    let keys: Vec<String> = keys_of(&alone, 0).take(12).collect();
    let deleted = Stamp {
        version: 1_000,
        shard: 0,
    };
    let mut tombstone = Vec::new();
    let key = keys[0].as_bytes();
    entry::encode(Kind::Delete, deleted, 0, key, &[], &mut tombstone);
    {
        let mut control = alone.node.control();
        control.keep_tombstones(true);
        assert!(control.adopt_if_newer(&tombstone));
        // Whatever else lies in its segment is of no use by now: cleaning takes it.
        for version in 1..=12 {
            assert!(control.adopt_if_newer(&large(2_000 + version, &keys[1])));
        }
    }
    let (shard, hash) = alone.place_of(&keys[0]);
    let noted = |alone: &Alone| {
        let found = alone.node.store().find(shard, hash, key).expect("there");
        !found.value().is_empty()
    };
    for _ in 0..1_000 {
        if noted(&alone) {
            break;
        }
        alone.step();
    }
    assert!(noted(&alone), "it was not cleaned");

    let (newer, damaged) = alone.node.store().newer(0, 0);
    assert_eq!(damaged, None);
    let found = newer.iter().find_map(|bytes| {
        let entry = Entry::decode(bytes).expect("whole");
        (entry.header.stamp == deleted).then_some(entry)
    });
    assert_eq!(found.expect("the tombstone").value, b"");
}

/// There is no segment for it at the moment: it is written down as soon as there is one.
#[test]
fn a_commit_version_that_found_no_room_is_written_later() {
    let mut alone = Alone::new(1 << 20, 8192);
    alone.serve(1, &[]);
    let key = keys_of(&alone, 0).next().expect("one");
    alone.set(&key, "value");
    alone.steps(20);
    let mut taken = Vec::new();
    {
        let mut control = alone.node.control();
        // It would write it down as well.
        control.config.clean_below_percent = 0;
        let table = control.backup.table_mut();
        let owner = Owner::Worker(7);
        while let Some(segment) = table.allocate(owner, 1, 0, Content::Stale) {
            taken.push(segment);
        }
    }
    alone.node.worker(0).expect("one").fill_log();
    let commit = alone.version_of(&key) + 500;
    let shard = alone.node.store().shard(0).expect("one");
    shard.committed(commit);
    // The control thread would win some room.
    let later_us = 30_000;
    alone.node.step(later_us);
    for segment in taken {
        let mut control = alone.node.control();
        control.transition(segment, SegmentState::Used);
        control.transition(segment, SegmentState::Free);
    }
    alone.steps(300);
    alone.restart(8192);
    let shard = alone.node.store().shard(0).expect("one");
    assert_eq!(shard.commit(), commit);
}

impl Node {
    /// Whether all of a shard is sent to who asks for it.
    pub(crate) fn is_given(&mut self, shard: ShardId) -> bool {
        let failed = self.failed_gifts;
        self.give(1, shard, 1 | joining::OF_A_JOIN);
        while !self.gifts.is_empty() {
            self.gift_due_us = 0;
            self.step_gifts();
        }
        self.failed_gifts == failed
    }
}

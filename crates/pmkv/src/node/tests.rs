//! Servers in states that clusters reach by accident only.

use cyclone_wire::reply::Reply;

use super::*;
use crate::configuration::Placement;
use crate::entry::{self, Kind, Stamp};
use crate::testing::{Alone, keys_of, put, set};
use crate::worker::Answer;

/// All of a shard has been gathered, and waits to be written down, when another shard's copy is given up: the gathered
/// entries are thrown away, and the shard is not here.
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

/// Cleaning notes in a tombstone which segments of its own memory may hold older versions. Another server's segments have other
/// epochs: by theirs it would be dropped at once, and the key be back after a restart, or never.
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

/// The entries with the highest versions were cleaned away as overwritten or deleted ones, the CommitVer has stayed: new
/// versions begin above it.
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

/// A copy is given up while a write is under way: it must not be sent again, with its old version, by the same server's
/// next copy.
#[test]
fn what_is_under_way_for_a_void_copy_is_given_up() {
    let mut alone = Alone::new(1 << 20, 8192);
    alone.serve(1, &[]);
    let keys: Vec<String> = (0..2)
        .map(|shard| keys_of(&alone, shard).next().expect("one"))
        .collect();
    // Server 1 has no log that could be opened: writes stay under way.
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

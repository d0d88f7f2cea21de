//! Flash that does not read back while a group runs: followers get a checkpoint, a replay says so,
//! and the log mends itself as soon as the store does without what is bad.

mod support;

use cyclone_consensus::{ConsensusError, ReadBack};
use cyclone_wal::flash::FlashMode;
use support::{Cluster, elect, payload};

/// Pages of the superblock's segment.
const BEFORE_LOG: u64 = 4;

/// Two of three get on until so many entries are applied, and free them in memory.
fn go_on_without(cluster: &mut Cluster, leader: usize, absent: usize, entries: u64) {
    let gone = cluster.nodes[absent].id;
    let until = cluster.nodes[leader].applied + entries;
    for round in 0..20 * entries {
        let node = &mut cluster.nodes[leader];
        if node.applied >= until {
            return;
        }
        let _ = node.group.propose(payload(round, 400));
        (0..3).for_each(|at| cluster.drain(at));
        for (to, bytes) in std::mem::take(&mut cluster.network) {
            if to != gone {
                cluster.deliver(to, &bytes);
            }
        }
        for node in cluster.nodes.iter_mut().filter(|node| node.id != gone) {
            if round % 20 == 0 {
                node.group.tick(1);
            }
            let unreadable = node
                .group
                .flash_status(0)
                .is_some_and(|flash| flash.unreadable);
            let through = if unreadable {
                node.flushed
            } else {
                node.applied
            };
            node.group.release(through).unwrap();
        }
    }
    panic!("{until} entries are not applied");
}

/// A leader whose ring begins far behind the log's first entry, and a follower that has next to
/// nothing.
fn lagging(mode: FlashMode) -> (Cluster, usize, usize) {
    let mut cluster = Cluster::with_flash(3, 6, Some(mode));
    let leader = elect(&mut cluster);
    let behind = (leader + 1) % 3;
    go_on_without(&mut cluster, leader, behind, 130);
    let group = &cluster.nodes[leader].group;
    assert!(group.replay_through() > 90, "{}", group.replay_through());
    (cluster, leader, behind)
}

/// The follower speaks up, until the leader has said that it wants a checkpoint.
fn asks_for_a_checkpoint(cluster: &mut Cluster, leader: usize) -> bool {
    (0..400).any(|round| {
        (0..3).for_each(|at| cluster.drain(at));
        for (to, bytes) in std::mem::take(&mut cluster.network) {
            cluster.deliver(to, &bytes);
        }
        if round % 10 == 0 {
            cluster.nodes.iter_mut().for_each(|node| node.group.tick(1));
        }
        cluster.nodes[leader]
            .group
            .flash_status(0)
            .unwrap()
            .unreadable
    })
}

#[test]
fn a_follower_behind_a_bad_page_gets_a_checkpoint() {
    for mode in [FlashMode::Second, FlashMode::Only] {
        let (mut cluster, leader, behind) = lagging(mode);
        let disk = cluster.nodes[leader].disk.clone().unwrap();
        let pages = cluster.nodes[leader].group.flash().unwrap().position();
        let bad = BEFORE_LOG..BEFORE_LOG + pages.min(30);
        disk.faults(|faults| faults.read_error = bad.collect());
        assert!(asks_for_a_checkpoint(&mut cluster, leader), "{mode:?}");
        let group = &mut cluster.nodes[leader].group;
        assert!(group.take_unreadable().is_some(), "{mode:?}");
        assert!(group.take_unreadable().is_none(), "told once, {mode:?}");
        // An archive gets the error, too, instead of being asked to wait.
        let ring = group.replay_through() + 1;
        let outcome = group.read_back(1, &mut |_| true);
        assert_eq!(outcome, ReadBack::Gone(ring), "{mode:?}");
        let applied = cluster.nodes[leader].applied;
        for _ in 0..20 {
            if cluster.nodes[behind].applied >= applied {
                break;
            }
            asks_for_a_checkpoint(&mut cluster, leader);
        }
        // The harness offers one as soon as the leader says that it wants it.
        for _ in 0..400 {
            (0..3).for_each(|at| cluster.drain(at));
            for (to, bytes) in std::mem::take(&mut cluster.network) {
                cluster.deliver(to, &bytes);
            }
            cluster.nodes.iter_mut().for_each(|node| node.group.tick(1));
        }
        assert!(cluster.snapshots > 0, "{mode:?}");
        assert!(cluster.nodes[behind].applied >= applied, "{mode:?}");
    }
}

/// An error that goes away does not count.
#[test]
fn a_read_that_fails_temporarily_is_repeated() {
    let (mut cluster, leader, behind) = lagging(FlashMode::Second);
    let applied = cluster.nodes[leader].applied;
    let disk = cluster.nodes[leader].disk.clone().unwrap();
    disk.faults(|faults| faults.read_error = (0..200).collect());
    for round in 0..3_000 {
        (0..3).for_each(|at| cluster.drain(at));
        for (to, bytes) in std::mem::take(&mut cluster.network) {
            cluster.deliver(to, &bytes);
        }
        if round % 20 == 0 {
            cluster.nodes.iter_mut().for_each(|node| node.group.tick(1));
        }
        let flash = cluster.nodes[leader].group.flash_status(0).unwrap();
        assert!(!flash.unreadable, "round {round}");
        if flash.stats.reads > 0 {
            disk.faults(|faults| faults.read_error.clear());
        }
        if cluster.nodes[behind].applied > applied {
            break;
        }
    }
    assert_eq!(cluster.snapshots, 0);
    assert!(cluster.nodes[behind].applied >= applied);
}

/// A start has to replay what the ring does not have, and cannot: it says so instead of trying
/// without end.
#[test]
fn a_replay_from_a_bad_page_fails() {
    for mode in [FlashMode::Second, FlashMode::Only] {
        let (mut cluster, leader, _) = lagging(mode);
        let node = &mut cluster.nodes[leader];
        let disk = node.disk.clone().unwrap();
        disk.faults(|faults| faults.read_error = (BEFORE_LOG..BEFORE_LOG + 8).collect());
        let through = node.group.replay_through();
        let failed = (0..2_000u64).find_map(|_| {
            cluster.now_us += 50;
            let group = &mut cluster.nodes[leader].group;
            let replayed = group.replay(1, through);
            let _ = group.poll_flash(cluster.now_us).unwrap();
            replayed.err()
        });
        assert!(
            matches!(failed, Some(ConsensusError::Flash(_))),
            "{mode:?}: {failed:?}"
        );
    }
}

/// A durable page rots, and is found out by reading. What the store lacks stays in memory from then
/// on; once it has the rest, flash begins anew with what memory has, or is trimmed, and opens again
/// after a crash.
#[test]
fn a_page_that_rotted_is_left_behind() {
    for mode in [FlashMode::Second, FlashMode::Only] {
        let (mut cluster, leader, behind) = lagging(mode);
        let disk = cluster.nodes[leader].disk.clone().unwrap();
        // As the only level nearly every entry takes a page, and the follower has the first ones.
        let page = if mode == FlashMode::Only { 40 } else { 5 };
        disk.rot(BEFORE_LOG + page, 12_345);
        assert!(asks_for_a_checkpoint(&mut cluster, leader), "{mode:?}");
        let node = &mut cluster.nodes[leader];
        let through = node.group.replay_through();
        if mode == FlashMode::Second {
            node.flushed = through - 1;
            assert!(
                node.group.discard_unreadable(node.flushed),
                "a flush would help"
            );
            go_on_without(&mut cluster, leader, behind, 20);
            let still = cluster.nodes[leader].group.replay_through();
            assert_eq!(still, through, "what the store lacks stays");
        }
        for _ in 0..20 {
            let node = &mut cluster.nodes[leader];
            node.flushed = node.applied;
            assert!(!node.group.discard_unreadable(node.flushed), "{mode:?}");
            if !node.group.flash_status(0).unwrap().unreadable {
                break;
            }
            go_on_without(&mut cluster, leader, behind, 8);
        }
        let group = &cluster.nodes[leader].group;
        assert!(!group.flash_status(0).unwrap().unreadable, "{mode:?}");
        // Rot in the log, had it stayed there, is refused when the area is opened.
        cluster.crash(leader);
        cluster.quiesce();
    }
}

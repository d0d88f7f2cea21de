//! Heartbeats further apart while there are no requests: when they may be, when not, and what
//! followers make of it.

mod support;

use cyclone_wire::raftmsg::{RaftKind, RaftMessage};
use support::Cluster;

/// Heartbeats that a leader's peers get in so many ticks, one after the other.
struct HeartbeatCounts {
    heartbeats: usize,
    /// Ticks without any, at most.
    longest: u32,
    elections: usize,
}

/// Lets time pass for all nodes, or all but one; delivers what `passes` lets pass.
fn live(
    cluster: &mut Cluster,
    ticks: u32,
    dead: Option<usize>,
    mut passes: impl FnMut(&RaftMessage) -> bool,
) -> HeartbeatCounts {
    let (mut heartbeats, mut elections) = (0, 0);
    let (mut longest, mut since) = (0, 0);
    for _ in 0..ticks {
        for at in 0..cluster.nodes.len() {
            if dead != Some(at) {
                cluster.nodes[at].group.tick(1);
            }
        }
        since += 1;
        loop {
            for at in 0..cluster.nodes.len() {
                cluster.drain(at);
            }
            let network = std::mem::take(&mut cluster.network);
            if network.is_empty() {
                break;
            }
            for (to, bytes) in network {
                let (message, _) = RaftMessage::decode(&bytes).unwrap();
                let vote = matches!(message.kind, RaftKind::PreVote | RaftKind::Vote);
                elections += usize::from(vote);
                if message.kind == RaftKind::Heartbeat {
                    heartbeats += 1;
                    longest = longest.max(since);
                    since = 0;
                }
                let alive = dead != Some(to as usize - 1);
                if alive && passes(&message) {
                    cluster.deliver(to, &bytes);
                }
            }
        }
    }
    HeartbeatCounts {
        heartbeats,
        longest: longest.max(since),
        elections,
    }
}

/// A cluster in which nothing has happened for a while.
fn idle(seed: u64) -> (Cluster, usize) {
    let mut cluster = Cluster::new(3, seed);
    cluster.quiesce();
    let leader = cluster.leader().expect("a leader");
    for node in &mut cluster.nodes {
        node.group.set_idle(true);
    }
    (cluster, leader)
}

#[test]
fn an_idle_leader_sends_a_sixth_of_the_heartbeats_without_elections() {
    for seed in 0..10 {
        let (mut cluster, leader) = idle(seed);
        let before = cluster.nodes[leader].group.term();
        live(&mut cluster, 20, None, |_| true);
        let told = live(&mut cluster, 1200, None, |_| true);
        assert_eq!(told.heartbeats, 2 * 100, "seed {seed}");
        assert_eq!((told.longest, told.elections), (12, 0), "seed {seed}");
        assert_eq!(cluster.nodes[leader].group.term(), before);
    }
}

#[test]
fn one_heartbeat_may_be_lost_at_a_time() {
    for seed in 0..10 {
        let (mut cluster, leader) = idle(seed);
        live(&mut cluster, 20, None, |_| true);
        let mut count = 0;
        let told = live(&mut cluster, 2000, None, |message| {
            count += usize::from(message.kind == RaftKind::Heartbeat);
            message.kind != RaftKind::Heartbeat || !(count / 2).is_multiple_of(2)
        });
        assert_eq!(told.elections, 0, "seed {seed}");
        assert!(cluster.nodes[leader].group.is_leader());
    }
}

#[test]
fn while_one_is_silent_heartbeats_come_as_always() {
    let (mut cluster, leader) = idle(3);
    live(&mut cluster, 20, None, |_| true);
    let dead = (leader + 1) % 3;
    // The last ones that it has answered count.
    live(&mut cluster, 20, Some(dead), |_| true);
    let told = live(&mut cluster, 80, Some(dead), |_| true);
    assert_eq!((told.heartbeats, told.longest), (2 * 40, 2));
    // One that starts again knows of no rest; it hears of it with the next heartbeat.
    cluster.crash(dead);
    let told = live(&mut cluster, 100, None, |_| true);
    assert_eq!(told.elections, 0);
    assert_eq!(told.longest, 12);
}

#[test]
fn work_ends_the_rest_at_once() {
    let (mut cluster, leader) = idle(5);
    live(&mut cluster, 23, None, |_| true);
    assert!(cluster.nodes[leader].group.quiesced_ticks_left() > 0);
    assert_eq!(
        cluster.nodes[leader].group.idle_ticks(),
        cluster.nodes[leader].group.quiesced_ticks_left() + 2
    );
    let all = |cluster: &Cluster| cluster.nodes.iter().all(|node| node.group.is_resting());
    assert!(all(&cluster));
    live(&mut cluster, 30, None, |_| true);
    assert!(all(&cluster), "between two heartbeats as well");
    for node in &mut cluster.nodes {
        node.group.set_idle(false);
    }
    assert_eq!(cluster.nodes[leader].group.quiesced_ticks_left(), 0);
    assert!(!cluster.nodes[leader].group.is_resting());
    let told = live(&mut cluster, 80, None, |_| true);
    assert_eq!((told.heartbeats, told.longest), (2 * 40, 2));
    assert!(!cluster.nodes.iter().any(|node| node.group.is_resting()));
    let follower = (leader + 1) % 3;
    assert_eq!(cluster.nodes[follower].group.quiesced_ticks_left(), 0);
}

#[test]
fn one_alone_rests_as_soon_as_it_is_quiet() {
    let mut cluster = Cluster::new(1, 2);
    cluster.quiesce();
    assert!(!cluster.nodes[0].group.is_resting());
    cluster.nodes[0].group.set_idle(true);
    assert!(cluster.nodes[0].group.is_resting());
    cluster.nodes[0].group.set_idle(false);
    assert!(!cluster.nodes[0].group.is_resting());
}

#[test]
fn an_unapplied_or_missing_entry_is_no_time_to_rest() {
    let (mut cluster, leader) = idle(4);
    live(&mut cluster, 20, None, |_| true);
    let group = &mut cluster.nodes[leader].group;
    group
        .propose(cyclone_pmem::Payload::from_vec(vec![7; 8]))
        .unwrap();
    let behind = (leader + 1) as u64 % 3 + 1;
    let close = (leader + 2) % 3;
    assert!(cluster.nodes[close].group.is_resting());
    cluster.drain(leader);
    for (to, bytes) in std::mem::take(&mut cluster.network) {
        if to != behind {
            cluster.deliver(to, &bytes);
        }
    }
    let resting = cluster.nodes[close].group.is_resting();
    assert!(!resting, "what comes once may come again");
    let told = live(&mut cluster, 80, None, |message| {
        message.to != behind || message.kind != RaftKind::Append
    });
    assert!(told.heartbeats >= 2 * 30, "{}", told.heartbeats);
    assert_eq!(told.elections, 0);
}

#[test]
fn a_leader_that_dies_at_rest_is_missed_and_its_term_ends_the_rest() {
    for seed in 0..20 {
        let (mut cluster, leader) = idle(seed);
        // The last heartbeat has just been.
        live(&mut cluster, 28, None, |_| true);
        let term = cluster.nodes[leader].group.term();
        // Twenty ticks of rest, then an election time-out of six to twelve, and as much again where
        // votes were split.
        let told = live(&mut cluster, 25, Some(leader), |_| true);
        assert_eq!(told.elections, 0, "seed {seed}: it might live");
        live(&mut cluster, 60, Some(leader), |_| true);
        let next = cluster.leader().expect("another leader");
        assert!(next != leader && cluster.nodes[next].group.term() > term);
        assert_eq!(cluster.nodes[next].group.quiesced_ticks_left(), 0);
        let told = live(&mut cluster, 40, Some(leader), |_| true);
        assert_eq!(told.longest, 2, "with one dead no replica is quiescent");
    }
}

#[test]
fn ticks_of_a_rest_say_nothing_of_what_was_heard_before_them() {
    let (mut cluster, leader) = idle(1);
    live(&mut cluster, 20, None, |_| true);
    let follower = (leader + 1) % 3;
    let mut heard = 0;
    live(&mut cluster, 12, None, |message| {
        heard += usize::from(message.kind == RaftKind::Heartbeat);
        true
    });
    assert_eq!(heard, 2);
    let group = &mut cluster.nodes[follower].group;
    group.tick(1);
    assert!(!group.has_leader_contact(), "not since the last tick");
}

/// A follower's store cannot go on, or goes on again: its next answers say so, and nothing else of
/// Raft changes.
#[test]
fn answers_tell_the_leader_who_is_impaired() {
    let (mut cluster, leader) = idle(3);
    let follower = (leader + 1) % 3;
    let id = follower as u64 + 1;
    let term = cluster.nodes[leader].group.term();
    for impaired in [true, false] {
        cluster.nodes[follower].group.set_impaired(impaired);
        live(&mut cluster, 40, None, |message| {
            let answers = matches!(
                message.kind,
                RaftKind::AppendResponse | RaftKind::HeartbeatResponse
            );
            assert_eq!(message.impaired, impaired && answers && message.from == id);
            true
        });
        let group = &cluster.nodes[leader].group;
        assert_eq!(group.is_impaired(id), impaired);
        assert_eq!(group.term(), term);
    }
}

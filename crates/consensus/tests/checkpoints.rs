//! Checkpoints and the log: what a store has been given at once is neither delivered again nor left
//! out, and nothing else passes for it.

mod support;

use cyclone_consensus::PeerState;
use support::{Cluster, elect, payload};

/// The crash comes between the installation of a checkpoint in the store and the ring's reset.
#[test]
fn a_checkpoint_installed_before_the_crash_counts() {
    let mut cluster = Cluster::new(3, 5);
    let leader = elect(&mut cluster);
    for round in 0..20 {
        cluster.nodes[leader]
            .group
            .propose(payload(round, 50))
            .unwrap();
    }
    cluster.quiesce();
    let behind = (leader + 1) % 3;
    for _ in 0..50 {
        let _ = cluster.nodes[leader].group.propose(payload(0, 50));
        for at in 0..3 {
            cluster.drain(at);
        }
        for (to, bytes) in std::mem::take(&mut cluster.network) {
            if to != cluster.nodes[behind].id {
                cluster.deliver(to, &bytes);
            }
        }
    }
    let node = &mut cluster.nodes[leader];
    let index = node.applied;
    node.flushed = index;
    node.group.trim(index).unwrap();
    cluster.nodes[behind].flushed = index;
    cluster.crash(behind);
    assert_eq!(cluster.nodes[behind].group.status().first, index + 1);
    cluster.quiesce();
    let peers = cluster.nodes[cluster.leader().unwrap()]
        .group
        .status()
        .peers;
    let last = cluster.nodes[leader].applied;
    assert!(
        peers
            .iter()
            .all(|peer| peer.state != PeerState::Snapshot && peer.matched == last),
        "{peers:?}"
    );
}

/// Proposes at one node, and lets two of the three get on with it.
fn commit_without(cluster: &mut Cluster, proposer: usize, absent: usize, entries: u64) {
    for number in 0..entries {
        let _ = cluster.nodes[proposer].group.propose(payload(number, 50));
        for at in 0..3 {
            if at != absent {
                cluster.drain(at);
            }
        }
        for (to, bytes) in std::mem::take(&mut cluster.network) {
            if to != cluster.nodes[absent].id {
                cluster.deliver(to, &bytes);
            }
        }
    }
}

/// What it had before reaches as far as the checkpoint, and was never committed: it is no part of
/// what the store has.
#[test]
fn a_deposed_leaders_entries_do_not_pass_for_what_a_checkpoint_holds() {
    let mut cluster = Cluster::new(3, 5);
    let old = elect(&mut cluster);
    commit_without(&mut cluster, old, (old + 1) % 3, 10);
    cluster.quiesce();
    // It goes on alone, with more than the others will commit.
    for number in 0..30 {
        let _ = cluster.nodes[old].group.propose(payload(number, 50));
    }
    cluster.drain(old);
    cluster.network.clear();
    let new = (old + 1) % 3;
    for _ in 0..400 {
        for at in [new, (old + 2) % 3] {
            cluster.nodes[at].group.tick(1);
            cluster.drain(at);
        }
        for (to, bytes) in std::mem::take(&mut cluster.network) {
            if to != cluster.nodes[old].id {
                cluster.deliver(to, &bytes);
            }
        }
    }
    let leads = |at: &usize| *at != old && cluster.nodes[*at].group.is_leader();
    let new = (0..3).find(leads).expect("another leads");
    commit_without(&mut cluster, new, old, 12);
    let index = cluster.nodes[new].applied;
    let status = cluster.nodes[old].group.status();
    assert!(
        index < status.last,
        "{index} is within what it holds: {status:?}"
    );
    // The checkpoint is installed, then the power goes.
    cluster.nodes[old].flushed = index;
    cluster.crash(old);
    let status = cluster.nodes[old].group.status();
    assert_eq!((status.first, status.last), (index + 1, index));
    for number in 0..5 {
        let _ = cluster.nodes[new].group.propose(payload(number, 50));
    }
    cluster.quiesce();
    assert_eq!(cluster.nodes[old].applied, cluster.nodes[new].applied);
}

/// A second checkpoint holds less of a log than the first: what lies between comes from the log.
#[test]
fn a_checkpoint_that_holds_less_than_the_one_before_leaves_no_gap() {
    let mut cluster = Cluster::new(3, 5);
    let leader = elect(&mut cluster);
    let behind = (leader + 1) % 3;
    cluster.quiesce();
    let from = cluster.nodes[behind].applied;
    commit_without(&mut cluster, leader, behind, 20);
    for more in [15, 5] {
        let node = &mut cluster.nodes[behind];
        node.applied = from + more;
        node.group.skip_to(node.applied);
    }
    // Whatever is delivered follows what was applied.
    cluster.quiesce();
    assert_eq!(cluster.nodes[behind].applied, cluster.nodes[leader].applied);
}

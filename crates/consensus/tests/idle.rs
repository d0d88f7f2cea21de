//! What hosts that skip ticks rest on: how many of them pass without anything coming of it.

mod support;

use support::Cluster;

/// What a node has to send once so many ticks have passed.
fn sent_after(cluster: &mut Cluster, at: usize, ticks: u64) -> usize {
    cluster.nodes[at].group.tick(ticks as u32);
    cluster.drain(at);
    cluster.network.len()
}

#[test]
fn ticks_before_the_reported_one_send_nothing() {
    for seed in 0..20 {
        let mut cluster = Cluster::new(3, seed);
        cluster.quiesce();
        cluster.network.clear();
        let leader = cluster.leader().expect("a leader");
        let follower = (leader + 1) % 3;
        for at in [leader, follower] {
            // From anywhere between two heartbeats or elections.
            for passed in 0..3 {
                let due = cluster.nodes[at].group.idle_ticks();
                assert!(due >= 1);
                let sent = sent_after(&mut cluster, at, due - 1);
                assert_eq!(sent, 0, "seed {seed}, node {at}: before tick {due}");
                assert_eq!(cluster.nodes[at].group.idle_ticks(), 1);
                let sent = sent_after(&mut cluster, at, 1);
                assert!(sent > 0, "seed {seed}, node {at}: nothing at tick {due}");
                cluster.network.clear();
                if at == follower {
                    // It stands for election: until there is a leader every tick may matter.
                    assert_eq!(cluster.nodes[at].group.idle_ticks(), 1);
                    break;
                }
                assert_eq!(sent_after(&mut cluster, at, passed % 2), 0);
            }
        }
    }
}

#[test]
fn a_heartbeat_is_heard_until_the_next_tick() {
    let mut cluster = Cluster::new(3, 1);
    cluster.quiesce();
    let leader = cluster.leader().expect("a leader");
    let follower = (leader + 1) % 3;
    let id = cluster.nodes[follower].id;
    cluster.nodes[follower].group.tick(2);
    assert!(!cluster.nodes[follower].group.has_leader_contact());
    let due = cluster.nodes[leader].group.idle_ticks();
    cluster.nodes[leader].group.tick(due as u32);
    cluster.drain(leader);
    for (to, bytes) in std::mem::take(&mut cluster.network) {
        if to == id {
            cluster.deliver(to, &bytes);
        }
    }
    assert!(cluster.nodes[follower].group.has_leader_contact());
    assert!(!cluster.nodes[leader].group.has_leader_contact());
    cluster.nodes[follower].group.tick(1);
    assert!(!cluster.nodes[follower].group.has_leader_contact());
}

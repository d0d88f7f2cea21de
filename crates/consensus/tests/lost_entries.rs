//! Replicas that hold less than they have acknowledged, or something else: what tells them so, and
//! how they come back.

mod support;

use cyclone_consensus::{Diverged, Participation, RequestError, StepError};
use cyclone_pmem::Payload;
use cyclone_wire::raftmsg::{EntryHeader, RaftKind, RaftMessage};
use support::{Cluster, payload};

fn propose(cluster: &mut Cluster, leader: usize, count: u64) {
    for number in 0..count {
        let proposed = cluster.nodes[leader].group.propose(payload(number, 20));
        proposed.expect("proposed");
    }
    cluster.quiesce();
}

/// Lets time pass and delivers everything.
fn live(cluster: &mut Cluster, ticks: usize) {
    for _ in 0..ticks {
        for node in &mut cluster.nodes {
            node.group.tick(1);
        }
        for _ in 0..4 {
            for at in 0..cluster.nodes.len() {
                cluster.drain(at);
            }
            for (to, bytes) in std::mem::take(&mut cluster.network) {
                cluster.deliver(to, &bytes);
            }
        }
    }
}

/// A follower whose memory is an older copy; the cluster, its leader, the follower, what it holds
/// and what it has acknowledged.
fn with_older_copy(seed: u64) -> (Cluster, usize, usize, u64, u64) {
    let mut cluster = Cluster::new(3, seed);
    cluster.quiesce();
    let leader = cluster.leader().expect("a leader");
    let lost = (leader + 1) % 3;
    propose(&mut cluster, leader, 10);
    let sim = cluster.nodes[lost].sim.as_ref().expect("memory");
    let image = sim.sampled(seed);
    let held = cluster.nodes[lost].group.last_index();
    propose(&mut cluster, leader, 10);
    assert_eq!(cluster.leader(), Some(leader));
    let acknowledged = cluster.nodes[lost].group.last_index();
    // Its store is as old.
    cluster.nodes[lost].flushed = 0;
    cluster.crash_leaving(lost, Some(image));
    assert_eq!(cluster.nodes[lost].group.last_index(), held);
    (cluster, leader, lost, held, acknowledged)
}

#[test]
fn a_heartbeat_tells_a_follower_what_it_has_lost() {
    for seed in 0..10 {
        let (mut cluster, leader, lost, held, acknowledged) = with_older_copy(seed);
        let term = cluster.nodes[leader].group.term();
        live(&mut cluster, 40);
        let group = &mut cluster.nodes[lost].group;
        assert_eq!(group.participation(), Participation::None);
        let found = group.take_lost().expect("a loss");
        assert_eq!(
            (found.leader, found.term, found.acknowledged, found.last),
            (leader as u64 + 1, term, acknowledged, held)
        );
        assert_eq!(group.take_lost(), None);
        // It neither campaigns nor votes nor acknowledges.
        assert_eq!(group.campaign(), Err(RequestError::NotYet));
        live(&mut cluster, 200);
        assert_eq!(cluster.nodes[lost].group.last_index(), held);
        assert_eq!(cluster.leader(), Some(leader), "seed {seed}");
    }
}

#[test]
fn a_follower_without_a_vote_is_filled_again_without_proposals() {
    for seed in 0..10 {
        let (mut cluster, leader, lost, held, acknowledged) = with_older_copy(seed);
        live(&mut cluster, 40);
        let term = cluster.nodes[leader].group.term();
        let id = lost as u64 + 1;
        let group = &mut cluster.nodes[leader].group;
        assert_eq!(group.forget_acknowledged(id, held), Some(acknowledged));
        assert_eq!(group.forget_acknowledged(id, held), None, "once");
        let matched = |cluster: &Cluster| {
            let peers = cluster.nodes[leader].group.status().peers;
            let peer = peers.into_iter().find(|peer| peer.id == id);
            peer.expect("a peer").matched
        };
        assert_eq!(matched(&cluster), 0);
        let group = &mut cluster.nodes[lost].group;
        group.abstain_through(term);
        group.set_participation(Participation::Follower);
        live(&mut cluster, 40);
        let group = &mut cluster.nodes[lost].group;
        assert_eq!(
            (group.last_index(), group.commit()),
            (acknowledged, acknowledged)
        );
        assert!(group.is_vote_durable() && group.persisted() == acknowledged);
        assert_eq!(group.term(), term);
        assert_ne!(group.vote(), 0, "its vote is used up");
        assert_eq!(group.campaign(), Err(RequestError::NotYet));
        assert_eq!(matched(&cluster), acknowledged);
        assert_eq!(cluster.leader(), Some(leader));
        // It grants no vote, so only the leader can be elected by it; then it counts again.
        let other = 3 - leader - lost;
        let from = other as u64 + 1;
        let mut vote = RaftMessage::new(support::SPEC.log, RaftKind::Vote, from, id, term + 5);
        (vote.index, vote.log_term) = (1000, term + 4);
        let asked = cluster.nodes[lost].group.step(vote, Payload::new());
        asked.expect("ignored");
        assert_eq!(cluster.nodes[lost].group.term(), term);
        cluster.nodes[lost]
            .group
            .set_participation(Participation::Full);
        cluster.quiesce();
    }
}

#[test]
fn a_committed_entry_of_another_term_is_reported_and_ends_the_replicas_part() {
    let mut cluster = Cluster::new(3, 4);
    cluster.quiesce();
    let leader = cluster.leader().expect("a leader");
    propose(&mut cluster, leader, 10);
    let (at, term) = ((leader + 1) % 3, cluster.nodes[leader].group.term());
    let group = &mut cluster.nodes[at].group;
    let (commit, own_term) = (group.commit(), group.entry_term(3).expect("an entry"));
    let append = |index: u64, log_term: u64, entries: &[u64]| {
        let (from, to) = (leader as u64 + 1, at as u64 + 1);
        let mut append = RaftMessage::new(support::SPEC.log, RaftKind::Append, from, to, term);
        (append.index, append.log_term) = (index, log_term);
        let entry = |(term, index): (&u64, u64)| EntryHeader {
            index,
            term: *term,
            kind: 0,
            len: 0,
        };
        append.entries = entries.iter().zip(index + 1..).map(entry).collect();
        append
    };
    // What agrees is no contradiction, however old.
    let known = append(2, group.entry_term(2).expect("an entry"), &[own_term]);
    group.step(known, Payload::new()).expect("taken");
    assert_eq!(group.diverged(), None);
    let mut before = append(2, group.entry_term(2).expect("an entry"), &[own_term + 1]);
    // Of a later leader.
    before.term = term + 1;
    let before_from = before.from;
    let refused = group.step(before, Payload::new());
    assert_eq!(
        refused,
        Err(StepError::ContradictsCommitted {
            index: 3,
            commit,
            own_term,
            leader_term: own_term + 1
        })
    );
    assert_eq!(
        group.diverged(),
        Some(Diverged::Entry {
            index: 3,
            own_term,
            leader_term: own_term + 1,
            leader: before_from,
        })
    );
    assert_eq!(group.participation(), Participation::None);
    assert_eq!(group.commit(), commit);
}

/// The storage that held the entries of the others is lost, and the first member has founded the
/// cluster alone once more: its terms and indexes may be those of the cluster by chance.
#[test]
fn an_only_member_that_hears_from_another_takes_no_part() {
    let kinds = [
        RaftKind::PreVote,
        RaftKind::Vote,
        RaftKind::Append,
        RaftKind::Heartbeat,
        RaftKind::TimeoutNow,
    ];
    for (kind, seed) in kinds.into_iter().zip(0..) {
        let mut cluster = Cluster::new(1, seed);
        cluster.quiesce();
        assert_eq!(cluster.leader(), Some(0));
        propose(&mut cluster, 0, 10);
        let group = &mut cluster.nodes[0].group;
        let (term, last) = (group.term(), group.last_index());
        let mut message = RaftMessage::new(support::SPEC.log, kind, 3, 1, term + 5);
        (message.index, message.log_term) = (last, term);
        group.step(message, Payload::new()).expect("ignored");
        assert_eq!(group.diverged(), Some(Diverged::OnlyMember { other: 3 }));
        assert_eq!(group.participation(), Participation::None);
        assert!(!group.is_leader());
        assert_eq!((group.term(), group.last_index()), (term, last));
        cluster.drain(0);
        assert_eq!(cluster.network, [], "it answers nothing");
    }
}

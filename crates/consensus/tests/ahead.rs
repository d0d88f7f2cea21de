//! A leader tells its followers of entries while its own copy is on its way to memory: what a loss
//! of power leaves then, and what no replica may say before it is durable.

mod support;

use cyclone_consensus::{EarlyAppends, OutMessage, Outbox, StepError, persist_all_pipelined};
use cyclone_pmem::{CrashSim, Payload, Region};
use cyclone_wal::ring::Ring;
use cyclone_wire::raftmsg::RaftMessage;
use support::{AREA_BYTES, Cluster, Node, SPEC, bytes_of, encoded};

fn payload(number: u8) -> Payload {
    Payload::from_vec(vec![number; 100])
}

/// A cluster of three that has a leader, and where that is.
fn three(seed: u64) -> (Cluster, usize) {
    let mut cluster = Cluster::new(3, seed);
    cluster.quiesce();
    let leader = cluster.leader().unwrap();
    (cluster, leader)
}

/// The log that a loss of power would have left.
fn left(image: &[u8]) -> Ring {
    let (region, _) = Region::from_image(image).unwrap();
    let area = region.take(0, AREA_BYTES).unwrap();
    Ring::open(area, SPEC, None).unwrap().0
}

/// What is in memory for certain.
fn durable(memory: &CrashSim) -> Ring {
    left(&memory.image(|_| 0))
}

/// One step of a node. `sending` is called when it sends ahead, with the messages and their
/// receivers.
fn step(node: &mut Node, mut sending: impl FnMut(Vec<(u64, Vec<u8>)>)) -> Outbox {
    let ready = node.group.take_ready().unwrap();
    let send = |ahead: &[EarlyAppends<'_>]| sending(bytes_of(ahead));
    let mut outboxes = persist_all_pipelined(std::iter::once(((), ready)), send);
    outboxes.pop().unwrap().1.unwrap()
}

fn receivers(messages: &[OutMessage]) -> Vec<u64> {
    messages.iter().map(|message| message.to).collect()
}

#[test]
fn only_a_leader_speaks_before_its_own_copy_is_durable() {
    let (mut cluster, leader) = three(7);
    let leading = &mut cluster.nodes[leader];
    let memory = leading.sim.clone().unwrap();
    let index = durable(&memory).last_index() + 1;
    leading.group.propose(payload(1)).unwrap();
    let mut ahead = Vec::new();
    let outbox = step(leading, |sent| {
        assert_eq!(durable(&memory).last_index(), index - 1);
        ahead = sent;
    });
    assert_eq!(durable(&memory).last_index(), index);
    let told: Vec<u64> = ahead.iter().map(|(to, _)| *to).collect();
    let others = (1..=3).filter(|id| *id != leader as u64 + 1);
    assert_eq!(told, others.collect::<Vec<_>>());
    assert!(ahead.iter().all(|(_, bytes)| bytes.len() > 100));
    assert!(outbox.messages.is_empty(), "nothing is said twice");

    // Where no leader sends ahead, nothing is missing behind.
    leading.group.propose(payload(2)).unwrap();
    let outbox = leading.group.take_ready().unwrap().persist().unwrap();
    assert_eq!(receivers(&outbox.messages), told);

    // A follower's answer says what is durable.
    let (to, bytes) = &ahead[0];
    cluster.deliver(*to, bytes);
    let mut went_ahead = false;
    let outbox = step(&mut cluster.nodes[*to as usize - 1], |_| went_ahead = true);
    assert!(!went_ahead);
    assert_eq!(receivers(&outbox.messages), [leader as u64 + 1]);
}

/// The power goes right after a leader has sent, before any fence; its messages reach no follower,
/// one, or both, and what these answer comes late. Then the cluster agrees, on the entry if both
/// have it, and goes on.
#[test]
fn a_leader_may_forget_what_it_has_sent() {
    let mut remembered = 0;
    for reached in 0..4usize {
        for way in 0..20 {
            let (mut cluster, leader) = three(11 + way);
            let leading = &mut cluster.nodes[leader];
            let memory = leading.sim.clone().unwrap();
            let index = durable(&memory).last_index() + 1;
            leading.group.propose(payload(1)).unwrap();
            let (mut ahead, mut image) = (Vec::new(), None);
            step(leading, |sent| {
                ahead = sent;
                image = Some(match way {
                    0 => memory.image(|_| 0),
                    1 => memory.image(|ways| ways - 1),
                    way => memory.sampled(way),
                });
            });
            let image = image.expect("it sends ahead");
            // Without slots there is no entry, whatever has been kept of its record.
            assert_eq!(left(&image).last_index(), index - 1);
            cluster.crash_leaving(leader, Some(image));

            let reach = |place: &usize| reached & 1 << place != 0;
            for place in (0..2).filter(reach) {
                let (to, bytes) = &ahead[place];
                cluster.deliver(*to, bytes);
                let following = &mut cluster.nodes[*to as usize - 1];
                let outbox = step(following, |_| {
                    panic!("a follower has nothing to send ahead")
                });
                let late = encoded(&following.group, &outbox.messages[0]);
                // It acknowledges what its receiver has no more.
                let (message, _) = RaftMessage::decode(&late).unwrap();
                assert_eq!((message.index, message.reject), (index, false));
                let refused = cluster.nodes[leader].group.step(message, Payload::new());
                assert!(
                    matches!(refused, Err(StepError::BeyondLog { .. })),
                    "{refused:?}"
                );
            }
            cluster.quiesce();
            let kept = |(_, bytes): &(u64, Vec<u8>)| bytes[..] == vec![1; 100][..];
            let is_kept = cluster.committed.get(&index).is_some_and(kept);
            assert!(is_kept || reached != 3, "both followers had it");
            assert!(!is_kept || reached != 0, "no follower had it");
            remembered += usize::from(is_kept && (1..3).contains(&reached));

            let leader = cluster.leader().unwrap();
            cluster.nodes[leader].group.propose(payload(2)).unwrap();
            cluster.quiesce();
            let last = cluster.committed.values().next_back().unwrap();
            assert_eq!(last.1, vec![2; 100]);
        }
    }
    assert!(
        (1..40).contains(&remembered),
        "by one follower alone: {remembered} of 40"
    );
}

/// A cluster's only voter leads in the step in which it stands. If it spoke before its term is
/// durable, it would lead that term again after a loss of power, with other entries than those that
/// its learner has.
#[test]
fn an_only_voter_says_nothing_before_its_term_is_durable() {
    let mut cluster = Cluster::new(1, 3);
    cluster.quiesce();
    let learner = cluster.join();
    let group = &mut cluster.nodes[0].group;
    group.propose_members(&[1], &[learner]).unwrap();
    cluster.quiesce();
    cluster.nodes[0].flushed = cluster.nodes[0].applied;
    cluster.crash(0);

    let voter = &mut cluster.nodes[0];
    let memory = voter.sim.clone().unwrap();
    let before = voter.group.term();
    let (mut told, mut ahead) = (0, 0);
    for round in 0..1000 {
        voter.group.tick(1);
        if voter.group.is_leader() && round % 50 == 0 {
            let _ = voter.group.propose(payload(1));
        }
        let term = voter.group.term();
        while let Some(ready) = voter.group.take_ready() {
            let mut outboxes = persist_all_pipelined(std::iter::once(((), ready)), |from| {
                let messages = from.iter().map(|from| from.messages.len());
                ahead += messages.sum::<usize>();
                assert_eq!(durable(&memory).hard_state().term, term);
            });
            told += outboxes.pop().unwrap().1.unwrap().messages.len();
            assert_eq!(durable(&memory).hard_state().term, term);
        }
    }
    assert!(voter.group.is_leader() && voter.group.term() > before);
    // It does say things, and later entries before they are durable.
    assert!(told > 0 && ahead > 0, "{told} messages, {ahead} ahead");
}

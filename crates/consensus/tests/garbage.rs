//! Messages that decode but lie: no field of any of them may bring a replica down, whatever state
//! it is in.

mod support;

use cyclone_pmem::Payload;
use cyclone_wire::raftmsg::{Context, EntryHeader, Members, RaftKind, RaftMessage, SnapshotMeta};
use proptest::collection::vec;
use proptest::prelude::*;
use support::{Cluster, SPEC};

const KINDS: [RaftKind; 10] = [
    RaftKind::Append,
    RaftKind::AppendResponse,
    RaftKind::Vote,
    RaftKind::VoteResponse,
    RaftKind::PreVote,
    RaftKind::PreVoteResponse,
    RaftKind::Heartbeat,
    RaftKind::HeartbeatResponse,
    RaftKind::Snapshot,
    RaftKind::TimeoutNow,
];

/// Numbers near those that matter: around the log's ends, and extremes.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![8 => 0u64..8, 4 => 0u64..40, 1 => any::<u64>(), 1 => Just((1 << 56) - 1)]
}

#[derive(Debug, Clone)]
enum Act {
    Message(Box<RaftMessage>, bool),
    Tick(u32),
    Campaign,
    Propose(usize),
    Drain,
    Deliver,
    Trim(u64),
    Transfer(u64),
    Read(u64),
    Report(u64, bool),
    Crash,
}

fn message() -> impl Strategy<Value = RaftMessage> {
    let entries = vec((number(), 0u8..20, 0u32..50), 0..4);
    let fields = (number(), number(), number(), number(), number(), number());
    (
        0..KINDS.len(),
        1u64..5,
        fields,
        any::<(bool, u8, u64)>(),
        entries,
        0u64..4,
    )
        .prop_map(
            |(
                kind,
                from,
                (term, log_term, index, commit, commit_term, hint),
                (reject, context, id),
                entries,
                shape,
            )| {
                let kind = KINDS[kind];
                let mut message = RaftMessage::new(SPEC.log, kind, from, 1, term.max(1));
                (message.log_term, message.index) = (log_term, index);
                (message.commit, message.commit_term) = (commit, commit_term);
                // Most messages are consistent in themselves, so that they get past the decoder.
                if shape > 0 {
                    message.log_term = if index == 0 {
                        0
                    } else {
                        log_term.clamp(1, message.term)
                    };
                }
                if matches!(kind, RaftKind::Vote | RaftKind::PreVote) && shape > 0 {
                    message.commit = commit.min(index);
                    message.commit_term = commit_term.min(message.log_term);
                }
                if matches!(
                    kind,
                    RaftKind::AppendResponse | RaftKind::VoteResponse | RaftKind::PreVoteResponse
                ) {
                    (message.reject, message.reject_hint) = (reject, hint);
                }
                if context < 128 {
                    message.context = match kind {
                        RaftKind::Heartbeat | RaftKind::HeartbeatResponse => Context::Read(id % 4),
                        RaftKind::Vote => Context::Transfer,
                        _ => Context::None,
                    };
                }
                if kind == RaftKind::Snapshot {
                    let members = Members::of_voters(&[1, 2, 3]);
                    message.snapshot = Some(SnapshotMeta {
                        id,
                        index: hint.max(1),
                        term: log_term.max(1),
                        members,
                    });
                }
                if kind == RaftKind::Append {
                    let mut last = message.log_term.max(1);
                    for (place, (term, kind, len)) in entries.into_iter().enumerate() {
                        last = term.clamp(last, message.term.max(last));
                        let index = message.index.wrapping_add(1 + place as u64);
                        message.entries.push(EntryHeader {
                            index,
                            term: last,
                            kind: kind / 19,
                            len,
                        });
                    }
                }
                message
            },
        )
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        10 => (message(), prop::bool::weighted(0.95)).prop_map(|(m, honest)| Act::Message(Box::new(m), honest)),
        2 => (1u32..30).prop_map(Act::Tick),
        2 => Just(Act::Campaign),
        3 => (0usize..100).prop_map(Act::Propose),
        4 => Just(Act::Drain),
        4 => Just(Act::Deliver),
        1 => number().prop_map(Act::Trim),
        1 => (0u64..5).prop_map(Act::Transfer),
        1 => (0u64..4).prop_map(Act::Read),
        1 => (0u64..5, any::<bool>()).prop_map(|(to, ok)| Act::Report(to, ok)),
        1 => Just(Act::Crash),
    ]
}

/// Node 1 under test; the lies come as from nodes 1 to 4. Nodes 2 and 3 are honest and only vote
/// and append.
fn run(acts: Vec<Act>) {
    let mut cluster = Cluster::new(3, 1);
    for act in acts {
        let node = &mut cluster.nodes[0];
        match act {
            Act::Message(message, honest) => {
                let len = message
                    .entries
                    .iter()
                    .map(|entry| entry.len as usize)
                    .sum::<usize>();
                let payload = Payload::from_vec(vec![7; if honest { len } else { len + 1 }]);
                if message.kind == RaftKind::Snapshot {
                    if node.group.install_snapshot(&message).is_ok() {
                        let index = message.snapshot.as_ref().unwrap().index;
                        (node.applied, node.flushed) =
                            (node.applied.max(index), node.flushed.max(index));
                    }
                } else {
                    let _ = node.group.step(*message, payload);
                }
            }
            Act::Tick(ticks) => {
                node.group.set_idle(ticks % 2 == 0);
                node.group.tick(ticks);
            }
            Act::Campaign => {
                let _ = node.group.campaign();
            }
            Act::Propose(len) => {
                let _ = node.group.propose(Payload::from_vec(vec![1; len]));
            }
            Act::Drain => drain(&mut cluster),
            Act::Deliver => {
                drain(&mut cluster);
                for (to, bytes) in std::mem::take(&mut cluster.network) {
                    let Some(peer) = cluster.nodes.get_mut((to - 1) as usize) else {
                        continue;
                    };
                    let (message, at) = RaftMessage::decode(&bytes).unwrap();
                    if message.kind != RaftKind::Snapshot {
                        let _ = peer
                            .group
                            .step(message, Payload::from_vec(bytes[at..].to_vec()));
                    }
                }
            }
            Act::Trim(through) => {
                node.flushed = node.flushed.max(through.min(node.applied));
                node.group.trim(node.flushed.min(through)).unwrap();
            }
            Act::Transfer(to) => {
                let _ = node.group.transfer_leader(to);
            }
            Act::Read(context) => {
                let _ = node.group.read_index(context);
            }
            Act::Report(to, ok) => {
                node.group.report_snapshot(to, ok);
                node.group.report_unreachable(to);
            }
            Act::Crash => {
                drain(&mut cluster);
                let node = &mut cluster.nodes[0];
                node.flushed = node.flushed.max(node.applied);
                let applied_term = node.group.entry_term(node.applied).unwrap_or(1);
                let image = node.sim.take().unwrap().sampled(3);
                let (region, sim) = cyclone_pmem::Region::from_image(&image).unwrap();
                let area = region.take(0, support::AREA_BYTES).unwrap();
                let (ring, _) = cyclone_wal::Ring::open(area, SPEC, None).unwrap();
                let mut config = support::config(1, &[1, 2, 3], 1);
                (config.applied, config.applied_term) = (node.applied, applied_term);
                node.group = cyclone_consensus::Group::open(config, ring).unwrap();
                node.sim = Some(sim);
            }
        }
    }
    drain(&mut cluster);
    for node in &cluster.nodes {
        assert_eq!(node.group.status().staged, (0, 0));
    }
}

/// Like [`Cluster::drain`] without its checks of agreement: liars may well make replicas disagree.
fn drain(cluster: &mut Cluster) {
    for node in &mut cluster.nodes {
        while let Some(ready) = node.group.take_ready() {
            let outbox = ready.persist().unwrap();
            for message in &outbox.messages {
                let encoded = node.group.encode(message);
                let mut bytes = encoded.prefix;
                encoded
                    .payloads
                    .iter()
                    .for_each(|part| bytes.extend_from_slice(part));
                cluster.network.push((message.to, bytes.split_off(5)));
            }
            for entry in &outbox.committed {
                assert_eq!(entry.index, node.applied + 1);
                node.applied = entry.index;
            }
            node.group.applied_to(node.applied);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases * 12, max_shrink_iters: 20000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_message_brings_a_replica_down(acts in vec(act(), 1..60)) {
        run(acts);
    }
}

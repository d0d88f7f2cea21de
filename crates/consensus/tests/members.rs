//! Changes of the membership, seeded: at any step, with losses, crashes and replicas that come and
//! go for good, what is committed stays, and no term has two leaders.

mod support;

use std::collections::BTreeSet;

use cyclone_consensus::{ProposeError, Role, StepError};
use cyclone_pmem::Payload;
use cyclone_wal::flash::FlashMode;
use cyclone_wire::membership::members_entry;
use cyclone_wire::raftmsg::{EntryHeader, Members, RaftKind, RaftMessage};
use support::Cluster;

/// A cluster whose membership changes, and who was thrown out of it.
struct Changing {
    cluster: Cluster,
    gone: BTreeSet<u64>,
    begun: u64,
    proposed: u64,
}

impl Changing {
    fn new(seed: u64, mode: Option<FlashMode>) -> Changing {
        Changing {
            cluster: Cluster::with_flash(1 + seed % 4, seed, mode),
            gone: BTreeSet::new(),
            begun: 0,
            proposed: 0,
        }
    }

    /// Proposes some other membership to the leader; some of its replicas may have just started.
    fn change(&mut self) {
        let Some(at) = self.cluster.leader() else {
            return;
        };
        let (mut voters, mut learners) = (Vec::new(), Vec::new());
        let members = self.cluster.nodes[at].group.members();
        for id in 1..=self.cluster.nodes.len() as u64 {
            if !members.contains(id) {
                continue;
            }
            match self.cluster.dice.below(10) {
                0 => {}
                1..3 => learners.push(id),
                _ => voters.push(id),
            }
        }
        if self.cluster.nodes.len() < 7 && self.cluster.dice.chance(40) {
            let id = self.cluster.nodes.len() as u64 + 1;
            learners.push(id);
        }
        let group = &mut self.cluster.nodes[at].group;
        if let Ok(Some(_)) = group.propose_members(&voters, &learners) {
            self.begun += 1;
            let next = self.cluster.nodes.len() as u64 + 1;
            if voters.contains(&next) || learners.contains(&next) {
                self.cluster.join();
            }
        }
    }

    fn note_gone(&mut self) {
        for at in 0..self.cluster.nodes.len() {
            let members = self.cluster.nodes[at].group.members();
            if !members.is_joint() && !members.voters.is_empty() {
                let all = 1..=self.cluster.nodes.len() as u64;
                let highest = members.highest();
                self.gone
                    .extend(all.filter(|id| *id < highest && !members.contains(*id)));
            }
        }
    }

    fn run(&mut self, steps: u64) {
        for _ in 0..steps {
            let count = self.cluster.nodes.len() as u64;
            let cluster = &mut self.cluster;
            let at = cluster.dice.below(count) as usize;
            match cluster.dice.below(100) {
                0..30 if !cluster.network.is_empty() => {
                    let pick = cluster.dice.below(cluster.network.len() as u64) as usize;
                    let (to, bytes) = cluster.network.swap_remove(pick);
                    if cluster.dice.chance(10) {
                        continue;
                    }
                    if cluster.dice.chance(10) {
                        cluster.network.push((to, bytes.clone()));
                    }
                    self.deliver(to, &bytes);
                }
                30..52 if !cluster.network.is_empty() => {
                    let (to, bytes) = cluster.network.remove(0);
                    self.deliver(to, &bytes);
                }
                52..60 => {
                    let quiet = cluster.dice.chance(50);
                    cluster.nodes[at].group.set_idle(quiet);
                    cluster.nodes[at].group.tick(1);
                }
                60..68 => {
                    if let Some(leader) = cluster.leader() {
                        self.proposed += 1;
                        let payload = Payload::from_vec(self.proposed.to_le_bytes().to_vec());
                        let _ = cluster.nodes[leader].group.propose(payload);
                    }
                }
                68..71 => self.change(),
                71..73 => self.cluster.hand_over(),
                73..97 => {
                    cluster.drain(at);
                    let node = &mut cluster.nodes[at];
                    node.group.release(node.applied).unwrap();
                }
                97 if cluster.dice.chance(50) => {
                    // Flash that was never written to is no replica's memory yet.
                    let flash = cluster.nodes[at].group.flash();
                    if flash.is_none_or(|flash| flash.durable_page() > 0) {
                        cluster.crash(at);
                    }
                }
                98 => {
                    let node = &mut cluster.nodes[at];
                    node.flushed = node.applied;
                    node.group.trim(node.flushed.saturating_sub(5)).unwrap();
                    node.group.release(node.applied).unwrap();
                }
                _ => {}
            }
            if self.cluster.network.len() > 300 {
                self.cluster.network.truncate(150);
            }
            self.note_gone();
        }
    }

    /// To replicas that have not been started, nothing comes.
    fn deliver(&mut self, to: u64, bytes: &[u8]) {
        if to <= self.cluster.nodes.len() as u64 {
            self.cluster.deliver(to, bytes);
        }
    }

    /// Everything comes to rest: the leader is among the voters, all agree, and no removed replica
    /// takes part.
    fn finish(mut self, seed: u64) -> (u64, usize) {
        self.cluster.quiesce();
        let at = self.cluster.leader().expect("a leader");
        let members = self.cluster.nodes[at].group.members();
        assert!(!members.is_joint(), "seed {seed}");
        for node in &self.cluster.nodes {
            assert_eq!(node.group.diverged(), None, "seed {seed}, node {}", node.id);
            if members.contains(node.id) {
                assert_eq!(
                    node.group.members(),
                    members,
                    "seed {seed}, node {}",
                    node.id
                );
                let leads = node.group.role() == Role::Leader;
                assert!(!leads || members.voters.contains(&node.id), "seed {seed}");
            }
        }
        (self.begun, self.cluster.committed.len())
    }
}

fn runs(mode: Option<FlashMode>, seeds: std::ops::Range<u64>) {
    let (mut changes, mut committed) = (0, 0);
    for seed in seeds {
        println!("seed {seed}");
        let mut changing = Changing::new(seed, mode);
        changing.run(4000);
        let (begun, entries) = changing.finish(seed);
        changes += begun;
        committed += entries;
    }
    assert!(changes > 60, "the runs did too little: {changes} changes");
    assert!(committed > 1000, "the runs did too little: {committed}");
}

#[test]
fn what_is_committed_stays_while_members_change() {
    runs(None, 0..40);
}

#[test]
fn also_with_a_second_level() {
    runs(Some(FlashMode::Second), 100..120);
}

/// Flash is the only durable level: every crash takes the memory with it.
#[test]
fn also_where_the_memory_is_only_a_cache() {
    runs(Some(FlashMode::Only), 200..220);
}

fn settle(cluster: &mut Cluster, done: impl Fn(&Cluster) -> bool) {
    for _ in 0..300 {
        for at in 0..cluster.nodes.len() {
            cluster.drain(at);
        }
        for (to, bytes) in std::mem::take(&mut cluster.network) {
            cluster.deliver(to, &bytes);
        }
        if done(cluster) {
            return;
        }
        cluster.nodes.iter_mut().for_each(|node| node.group.tick(1));
    }
    panic!("it did not come about");
}

/// A cluster of three with a leader that has committed something.
fn three() -> Cluster {
    let mut cluster = Cluster::new(3, 5);
    cluster.quiesce();
    cluster
}

/// One more replica takes part, as a learner; the leader stays.
fn learn(cluster: &mut Cluster) -> u64 {
    let id = cluster.join();
    let leader = cluster.leader().expect("a leader");
    let group = &mut cluster.nodes[leader].group;
    let members = group.members();
    let learners = [members.learners, vec![id]].concat();
    group.propose_members(&members.voters, &learners).unwrap();
    settle(cluster, |cluster| {
        let knows = |at: usize| {
            let members = cluster.nodes[at].group.members();
            members.learners == learners && !members.is_joint()
        };
        let status = cluster.nodes[leader].group.status();
        let has_all = status.peers.iter().all(|peer| peer.matched == status.last);
        (0..cluster.nodes.len()).all(knows) && has_all
    });
    id
}

/// A crash of the leader, or of everybody, after each message of a change, and after each persisted
/// step: the next leader ends it, in the old membership or in the new one.
#[test]
fn a_crash_at_every_step_of_a_change() {
    for everybody in [false, true] {
        let mut through = false;
        for crash_after in 0.. {
            let mut cluster = three();
            let old: BTreeSet<u64> = (1..=3).collect();
            let leader = cluster.leader().expect("a leader");
            let id = cluster.nodes[leader].id;
            let stays: Vec<u64> = (1..=3).filter(|other| *other != 1 + id % 3).collect();
            let new = learn(&mut cluster);
            let target = [stays.clone(), vec![new]].concat();
            let group = &mut cluster.nodes[leader].group;
            group
                .propose_members(&target, &[])
                .unwrap()
                .expect("a change");
            let mut steps = 0;
            'change: for _ in 0..60 {
                for at in 0..cluster.nodes.len() {
                    cluster.drain(at);
                    steps += 1;
                    if steps > crash_after {
                        break 'change;
                    }
                }
                for (to, bytes) in std::mem::take(&mut cluster.network) {
                    cluster.deliver(to, &bytes);
                    steps += 1;
                    if steps > crash_after {
                        break 'change;
                    }
                }
                cluster.nodes.iter_mut().for_each(|node| node.group.tick(1));
            }
            let ended = steps <= crash_after;
            for at in 0..cluster.nodes.len() {
                if everybody || at == leader {
                    cluster.crash(at);
                }
            }
            cluster.quiesce();
            let at = cluster.leader().expect("a leader");
            let voters: BTreeSet<u64> = cluster.nodes[at]
                .group
                .members()
                .voters
                .into_iter()
                .collect();
            let new: BTreeSet<u64> = target.into_iter().collect();
            assert!(
                voters == new || (voters == old && !ended),
                "crash after {crash_after}: {voters:?}"
            );
            through |= voters == new;
            if ended {
                break;
            }
        }
        assert!(through);
    }
}

/// Majorities of both halves are needed while a change is in progress.
#[test]
fn a_joint_membership_needs_both_majorities() {
    let mut cluster = three();
    let leader = cluster.leader().expect("a leader");
    let id = cluster.nodes[leader].id;
    let group = &mut cluster.nodes[leader].group;
    assert_eq!(
        group.propose_members(&[id, 4], &[]),
        Err(ProposeError::Behind { id: 4 }),
        "a learner first"
    );
    let (four, five) = (learn(&mut cluster), learn(&mut cluster));
    let group = &mut cluster.nodes[leader].group;
    group.propose_members(&[id, four, five], &[]).unwrap();
    assert_eq!(
        group.propose_members(&[id], &[]),
        Err(ProposeError::Changing),
        "one at a time"
    );
    // The new ones do not answer: the joint configuration is committed by the old voters, and
    // nothing after it.
    let lost = |cluster: &mut Cluster| {
        cluster.network.retain(|(to, _)| *to < four);
    };
    let mut joint = 0;
    for _ in 0..40 {
        for at in 0..cluster.nodes.len() {
            cluster.drain(at);
        }
        lost(&mut cluster);
        for (to, bytes) in std::mem::take(&mut cluster.network) {
            cluster.deliver(to, &bytes);
        }
        let group = &mut cluster.nodes[leader].group;
        if joint == 0 && group.members().is_joint() {
            joint = group.propose(Payload::from_vec(vec![9; 20])).unwrap();
        }
        cluster.nodes[leader].group.tick(1);
    }
    assert!(joint > 0, "the joint configuration never took effect");
    let commit = cluster.nodes[leader].group.commit();
    assert!(commit < joint, "{commit}: committed by one half only");
    // With them it is.
    settle(&mut cluster, |cluster| {
        let settled = |id: u64| {
            let group = &cluster.nodes[id as usize - 1].group;
            group.commit() > joint && !group.members().is_joint()
        };
        settled(id) && settled(four) && settled(five)
    });
}

/// A learner is sent everything and is asked for nothing: neither its acknowledgement nor its vote
/// counts.
#[test]
fn a_learner_does_not_count() {
    let mut cluster = Cluster::new(1, 3);
    cluster.quiesce();
    let learner = cluster.join();
    let group = &mut cluster.nodes[0].group;
    group.propose_members(&[1], &[learner]).unwrap();
    cluster.quiesce();
    assert_eq!(cluster.nodes[1].group.members().learners, [learner]);
    assert_eq!(cluster.nodes[1].applied, cluster.nodes[0].applied);
    // Alone, the voter goes on, and the learner never campaigns.
    let before = cluster.nodes[0].group.commit();
    cluster.nodes[0]
        .group
        .propose(Payload::from_vec(vec![1; 8]))
        .unwrap();
    cluster.drain(0);
    assert!(cluster.nodes[0].group.commit() > before);
    for _ in 0..100 {
        cluster.nodes[1].group.tick(1);
        assert_eq!(cluster.nodes[1].group.role(), Role::Follower);
    }
    assert_eq!(
        cluster.nodes[0].group.transfer_leader(learner),
        Err(cyclone_consensus::RequestError::NotVoter { id: learner })
    );
    let group = &mut cluster.nodes[0].group;
    assert_eq!(
        group.propose_members(&[], &[1, learner]),
        Err(ProposeError::BadMembers),
        "somebody must vote"
    );
}

/// One that joins could have lost what it knew: it votes for no candidate until a leader has told
/// it who takes part.
#[test]
fn who_joins_does_not_vote() {
    let mut cluster = Cluster::new(1, 3);
    cluster.join();
    let group = &mut cluster.nodes[1].group;
    for kind in [RaftKind::Vote, RaftKind::PreVote] {
        let mut message = RaftMessage::new(support::SPEC.log, kind, 1, 2, 9);
        (message.index, message.log_term) = (50, 8);
        let stepped = group.step(message, Payload::new());
        assert!(matches!(stepped, Err(StepError::Misdirected { .. })));
    }
    assert_eq!((group.vote(), group.role()), (0, Role::Follower));
}

/// Membership entries that do not read, or are another cluster's, never get into a log.
#[test]
fn membership_entries_are_checked() {
    let mut cluster = three();
    let members = Members::of_voters(&[1, 2]);
    let follower = (0..3).find(|at| Some(*at) != cluster.leader()).unwrap();
    let (term, last) = {
        let status = cluster.nodes[follower].group.status();
        (status.term, status.last)
    };
    let leader = cluster.nodes[follower].group.leader().unwrap();
    let mut torn = members_entry(0, &members);
    torn.pop();
    for payload in [members_entry(1, &members), torn, vec![0; 40]] {
        let (log, to) = (support::SPEC.log, follower as u64 + 1);
        let mut message = RaftMessage::new(log, RaftKind::Append, leader, to, term);
        (message.index, message.log_term) = (last, term);
        message.entries = vec![EntryHeader {
            index: last + 1,
            term,
            kind: cyclone_consensus::KIND_MEMBERS,
            len: payload.len() as u32,
        }];
        let group = &mut cluster.nodes[follower].group;
        assert_eq!(
            group.step(message, Payload::from_vec(payload)),
            Err(StepError::BadMembers { index: last + 1 })
        );
    }
}

//! Who takes part, and changing it by joint consensus: the entry that brings a membership takes
//! effect when it commits.
//!
//! A change is two entries: the joint configuration, which needs majorities of the old and of the
//! new voters, and, once that is committed, the new one alone. Each carries the whole membership,
//! so a replica that joins can take it up at any of them.
//!
//! raft-rs is notified of a change when it is made, and sees nothing but ordinary entries before:
//! what it would check of membership entries is checked here. A leader appends one only when none
//! is in progress and its own term has a committed entry. So of two membership entries in a log the
//! earlier one is committed, whatever the commit index says, and no replica campaigns with a
//! configuration that is two behind its log.

use cyclone_wal::ring::Ring;
use cyclone_wire::membership::{members_entry, read_members_entry};
use cyclone_wire::raftmsg::EntryHeader;
use cyclone_wire::ring::HardState;
use raft::Changer;
use raft::eraftpb::{ConfChangeSingle, ConfChangeTransition, ConfChangeType, ConfChangeV2};

use super::*;

/// The membership after an entry of this payload.
fn decode(cluster: u128, index: u64, payload: &[u8]) -> Result<Members, ConsensusError> {
    match read_members_entry(payload) {
        Ok((of, members)) if of == cluster => Ok(members),
        _ => Err(ConsensusError::Members { index }),
    }
}

fn payload_of(ring: &Ring, index: u64) -> Option<Vec<u8>> {
    let entry = ring.entry(index)?;
    let mut payload = Vec::with_capacity(entry.len as usize);
    let segments = entry.segments();
    segments.for_each(|segment| payload.extend_from_slice(segment));
    Some(payload)
}

/// Brings the membership of a state that was read back up to what the store and the log say of it.
/// Answers the membership entries whose commitment is not known.
pub(super) fn recover(
    config: &Config,
    ring: &Ring,
    state: &mut HardState,
) -> Result<Vec<u64>, ConsensusError> {
    if let Some((index, members)) = &config.members
        && *index > state.conf_index
    {
        view::set_members(state, members, *index);
    }
    let from = ring.first_index().max(state.conf_index + 1);
    let is_change = |index: &u64| {
        let entry = ring.entry(*index);
        entry.is_some_and(|entry| entry.kind == crate::KIND_MEMBERS)
    };
    let mut changes: Vec<u64> = (from..=ring.last_index()).filter(is_change).collect();
    let known = changes.partition_point(|index| *index <= state.commit);
    let known = known.max(changes.len().saturating_sub(1));
    if let Some(index) = changes.drain(..known).next_back() {
        let payload = payload_of(ring, index).unwrap_or_default();
        let members = decode(config.cluster, index, &payload)?;
        view::set_members(state, &members, index);
        state.commit = state.commit.max(index);
    }
    let is_first = state.conf_index == 0;
    if state.voters.is_empty() && is_first {
        view::set_members(state, &Members::of_voters(&config.voters), 0);
    }
    let members = view::members_of(state);
    // One that joins has none yet; one that was removed from this log may still be needed by
    // others.
    let joins = is_first && members == Members::default();
    let left_out = is_first && !members.contains(config.id);
    match joins || members.is_sane() && !left_out {
        true => Ok(changes),
        false => Err(ConsensusError::NotMember { id: config.id }),
    }
}

fn change(kind: ConfChangeType, id: &u64) -> ConfChangeSingle {
    let mut single = ConfChangeSingle::default();
    single.set_change_type(kind);
    single.node_id = *id;
    single
}

/// What leads from one membership to another, as raft-rs wants to hear it; `None` if no single step
/// does.
fn step_between(from: &Members, to: &Members) -> Option<ConfChangeV2> {
    let mut step = ConfChangeV2::default();
    if from.is_joint() {
        // Nothing but its end.
        return (!to.is_joint()).then_some(step);
    }
    if !to.is_joint() {
        return None;
    }
    step.set_transition(ConfChangeTransition::Explicit);
    let mut changes = Vec::new();
    let new_voters = to.voters.iter().filter(|id| !from.voters.contains(id));
    changes.extend(new_voters.map(|id| change(ConfChangeType::AddNode, id)));
    let learners = to.learners.iter().chain(&to.learners_next);
    let new_learners = learners.filter(|id| !from.learners.contains(id));
    changes.extend(new_learners.map(|id| change(ConfChangeType::AddLearnerNode, id)));
    let stays =
        |id: &u64| [&to.voters, &to.learners, &to.learners_next].map(|list| list.contains(id));
    let gone = from.voters.iter().chain(&from.learners);
    let gone = gone.filter(|id| !stays(id).contains(&true));
    changes.extend(gone.map(|id| change(ConfChangeType::RemoveNode, id)));
    step.set_changes(changes.into());
    Some(step)
}

fn sorted(members: &Members) -> Members {
    let mut members = members.clone();
    members.voters.sort_unstable();
    members.voters_outgoing.sort_unstable();
    members.learners.sort_unstable();
    members.learners_next.sort_unstable();
    members
}

/// The joint membership on the way from one to another, whose lists of voters and learners are
/// given.
fn joint(from: &Members, voters: &[u64], learners: &[u64]) -> Members {
    let voted = |id: &&u64| from.voters.contains(id);
    Members {
        voters: voters.to_vec(),
        voters_outgoing: from.voters.clone(),
        learners: learners.iter().filter(|id| !voted(id)).copied().collect(),
        learners_next: learners.iter().filter(voted).copied().collect(),
        auto_leave: false,
    }
}

impl Group {
    /// Who takes part, by the last membership entry known to be committed.
    pub fn members(&self) -> Members {
        view::members_of(self.raw.store().ring.hard_state())
    }

    /// Index of the entry that made the membership what it is; 0 for the first one.
    pub fn members_since(&self) -> u64 {
        self.raw.store().ring.hard_state().conf_index
    }

    /// Whether a membership entry is in the log that has not taken effect.
    pub fn is_changing(&self) -> bool {
        !self.changes.is_empty()
    }

    /// Begins a change to these voters and learners; [`Group::leave_joint`], called by the leader
    /// at that time, ends it. Returns the entry's index, or `None` if that is the membership
    /// already.
    ///
    /// # Errors
    /// Nothing was done: as [`Group::propose`], [`ProposeError::Changing`],
    /// [`ProposeError::BadMembers`],
    /// [`ProposeError::Behind`].
    pub fn propose_members(
        &mut self,
        voters: &[u64],
        learners: &[u64],
    ) -> Result<Option<u64>, ProposeError> {
        let members = self.members();
        let target = Members {
            voters: voters.to_vec(),
            learners: learners.to_vec(),
            ..Members::default()
        };
        if !target.is_sane() {
            return Err(ProposeError::BadMembers);
        }
        if self.is_leader() && !self.may_change() {
            return Err(ProposeError::Changing);
        }
        if sorted(&members) == sorted(&target) {
            return Ok(None);
        }
        if members.is_joint() {
            return Err(ProposeError::Changing);
        }
        // Its vote may be needed at once, and it votes for no candidate before it knows of a
        // membership.
        let (since, own, prs) = (self.members_since(), self.config.id, self.raw.raft.prs());
        let takes_part = |id: u64| prs.get(id).is_some_and(|it| it.matched >= since);
        let new = |id: &&u64| !members.voters.contains(id) && **id != own;
        if let Some(id) = voters.iter().filter(new).find(|id| !takes_part(**id)) {
            return Err(match self.is_leader() {
                true => ProposeError::Behind { id: *id },
                false => ProposeError::NotLeader {
                    leader: self.leader(),
                },
            });
        }
        self.propose_change(&joint(&members, voters, learners))
            .map(Some)
    }

    fn may_change(&self) -> bool {
        self.changes.is_empty() && self.raw.raft.commit_to_current_term()
    }

    fn propose_change(&mut self, members: &Members) -> Result<u64, ProposeError> {
        if !members.is_sane() {
            return Err(ProposeError::BadMembers);
        }
        let payload = Payload::from_vec(members_entry(self.config.cluster, members));
        let index = self.propose_kind(crate::KIND_MEMBERS, payload)?;
        self.changes.push(index);
        Ok(index)
    }

    /// Leader: leaves a joint configuration, if there is one and it is committed. A leader that is
    /// not among the new voters does not: it has to hand over. Call it periodically.
    pub fn leave_joint(&mut self) {
        let state = self.raw.store().ring.hard_state();
        if state.voters_outgoing.is_empty() || !self.is_leader() || !self.may_change() {
            return;
        }
        let mut members = self.members();
        if !members.voters.contains(&self.config.id) {
            return;
        }
        members.learners.append(&mut members.learners_next);
        members.voters_outgoing.clear();
        // What is refused now is tried again with the next call.
        let _ = self.propose_change(&members);
    }

    /// Whether a membership entry is known to be committed and has not taken effect.
    pub(super) fn has_change_to_make(&self) -> bool {
        let committed = self.raw.raft.raft_log.committed;
        self.changes
            .first()
            .is_some_and(|index| *index <= committed)
    }

    /// Entries from another replica are about to be staged; the first may replace some.
    pub(super) fn note_changes(&mut self, entries: &[EntryHeader]) {
        if let Some(first) = entries.first() {
            self.changes.retain(|index| *index < first.index);
        }
        let new = entries
            .iter()
            .filter(|entry| entry.kind == crate::KIND_MEMBERS);
        self.changes.extend(new.map(|entry| entry.index));
    }

    /// A membership entry of a message: it must read, and be of this cluster.
    pub(crate) fn check_change(
        &self,
        entry: &EntryHeader,
        payload: &Payload,
    ) -> Result<(), StepError> {
        let index = entry.index;
        match decode(self.config.cluster, index, &payload.to_vec()) {
            Ok(_) => Ok(()),
            Err(_) => Err(StepError::BadMembers { index }),
        }
    }

    /// Whether a message of this kind may be from this replica. One that is not known here may be
    /// newer than what is known here, for ids only grow; then its word as a leader or candidate
    /// counts, as Raft has it. A replica that joins listens to every leader, and votes for no
    /// candidate before it has a membership entry: it could have lost what it knew.
    pub(crate) fn accepts_sender(&self, from: u64, kind: RaftKind) -> bool {
        if self.raw.raft.prs().get(from).is_some() {
            return true;
        }
        if self.is_only_member() {
            return false;
        }
        let highest = self.members().highest();
        match kind {
            RaftKind::Append | RaftKind::Heartbeat | RaftKind::Snapshot => from > highest,
            RaftKind::Vote | RaftKind::PreVote | RaftKind::TimeoutNow => {
                (highest > 0 || self.is_changing()) && from > highest
            }
            _ => false,
        }
    }

    /// Carries out the membership entries up to `through`, all of which are committed and in the
    /// ring. Each becomes part of the durable state, with a commit index that covers it, before
    /// raft-rs hears of it.
    pub(crate) fn apply_member_changes(&mut self, through: u64) -> Result<(), ConsensusError> {
        while let Some(index) = self.changes.first().copied().filter(|at| *at <= through) {
            let ring = &self.raw.store().ring;
            let payload = payload_of(ring, index).unwrap_or_default();
            let to = decode(self.config.cluster, index, &payload)?;
            let from = self.members();
            let mut state = ring.hard_state().clone();
            state.commit = state.commit.max(index);
            view::set_members(&mut state, &to, index);
            // What the group says under the new membership leaves with a later step, after this
            // one.
            let _durable = self.raw.mut_store().ring.persist(Batch {
                entries: &[],
                hard_state: Some(state),
            })?;
            self.changes.remove(0);
            // A checkpoint from before leaves out who comes with this entry.
            self.raw.mut_store().available = None;
            self.apply_to_raft(&from, &to)
                .filter(|told| sorted(told) == sorted(&to))
                .ok_or(ConsensusError::Members { index })?;
        }
        Ok(())
    }

    /// Answers what raft-rs makes of it.
    fn apply_to_raft(&mut self, from: &Members, to: &Members) -> Option<Members> {
        let conf = match *from == Members::default() {
            true => self.first_configuration(to)?,
            false => self.raw.apply_conf_change(&step_between(from, to)?).ok()?,
        };
        let raft = &mut self.raw.raft;
        let votes = to.voters.contains(&raft.id) || to.voters_outgoing.contains(&raft.id);
        if !votes {
            // raft-rs leaves a leader in office that no longer counts.
            self.step_down();
        }
        Some(Members {
            voters: conf.voters,
            voters_outgoing: conf.voters_outgoing,
            learners: conf.learners,
            learners_next: conf.learners_next,
            auto_leave: conf.auto_leave,
        })
    }

    /// Leads no longer, and asks for no votes: this replica takes part no more.
    pub fn retire(&mut self) {
        // raft-rs takes them from a leader only.
        self.flush_proposals();
        self.step_down();
    }

    fn step_down(&mut self) {
        let raft = &mut self.raw.raft;
        if raft.state != StateRole::Follower {
            let term = raft.term;
            raft.become_follower(term, raft::INVALID_ID);
        }
    }

    /// A replica that joins learns of the membership by an entry: raft-rs gets there from nothing.
    fn first_configuration(&mut self, to: &Members) -> Option<raft::eraftpb::ConfState> {
        let raft = &mut self.raw.raft;
        let next = raft.raft_log.last_index();
        let begin = match to.is_joint() {
            true => &to.voters_outgoing,
            false => &to.voters,
        };
        let mut steps: Vec<ConfChangeSingle> = begin
            .iter()
            .map(|id| change(ConfChangeType::AddNode, id))
            .collect();
        if !to.is_joint() {
            let learners = to.learners.iter();
            steps.extend(learners.map(|id| change(ConfChangeType::AddLearnerNode, id)));
        }
        for step in steps {
            let (conf, changes) = Changer::new(raft.prs()).simple(&[step]).ok()?;
            raft.mut_prs().apply_conf(conf, changes, next);
        }
        if to.is_joint() {
            let before = Members::of_voters(begin);
            let step = step_between(&before, to)?;
            let changer = Changer::new(raft.prs());
            let (conf, changes) = changer.enter_joint(false, step.get_changes()).ok()?;
            raft.mut_prs().apply_conf(conf, changes, next);
        }
        Some(raft.post_conf_change())
    }
}

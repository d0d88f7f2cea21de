//! The group: raft-rs behind a guarded door.

mod checkpoint;
mod clocks;
mod encode;
mod failpoints;
mod impairment;
mod members;
mod participation;
mod readback;
mod status;

use cyclone_pmem::Payload;
use cyclone_wal::flash::{FlashLog, FlashMode};
use cyclone_wal::ring::{Batch, Ring};
use cyclone_wire::planted::{self, Bug};
use cyclone_wire::raftmsg::{Members, RaftKind, RaftMessage, SnapshotMeta};
use raft::eraftpb::{Entry, Message, MessageType};
use raft::{RawNode, SnapshotStatus, StateRole};

use crate::config::Config;
use crate::error::{ConsensusError, ProposeError, RequestError, StepError};
use crate::flash::FlashTier;
use crate::message::{self, OutMessage};
use crate::outbox::Ready;
use crate::quiescence::Quiescence;
use crate::staging::{self, Staging, record_bound};
use crate::status::Role;
use crate::view::{self, RaftStorage};
use crate::window::Windows;

use clocks::WallClocks;
pub use encode::EncodedMessage;
use impairment::Impairment;
pub use participation::{Diverged, LostEntries, Participation};
pub(crate) use readback::Part;
pub use readback::{EntryFragment, Pieces, ReadBack};

/// Reads that may wait for confirmation at once.
const MAX_READS: usize = 4096;
/// Ring bytes and slots that proposals leave free, for the entries that new leaders begin their
/// terms with.
const RESERVE_BYTES: u64 = 8 << 10;
const RESERVE_SLOTS: u64 = 8;

/// One replica of one physical log's Raft group.
pub struct Group {
    pub(crate) config: Config,
    pub(crate) raw: RawNode<RaftStorage>,
    pub(crate) staging: Staging,
    /// Proposals that have an index and are handed to raft-rs all at once.
    pending: Vec<Entry>,
    pub(crate) uncommitted_bytes: u64,
    /// Commit index that `uncommitted_bytes` was counted from.
    pub(crate) uncommitted_from: u64,
    /// Last index delivered as committed.
    pub(crate) delivered: u64,
    /// Committed entries up to here are in an installed checkpoint and are not delivered.
    pub(crate) skip_through: u64,
    /// Membership entries in the log that have not changed the membership yet, by index.
    pub(crate) changes: Vec<u64>,
    /// The commit index is to be written with the next step.
    pub(crate) commit_due: bool,
    /// Campaigns begun; varies the election time-out.
    attempts: u64,
    pub(crate) failed: bool,
    pub(crate) windows: Windows,
    pub(crate) quiescence: Quiescence,
    pub(crate) impairment: Impairment,
    pub(crate) wall_clocks: WallClocks,
    /// Its leader has been heard since [`Group::take_leader_contact`].
    pub(crate) heard: bool,
    participation: Participation,
    lost: Option<LostEntries>,
    diverged: Option<Diverged>,
}

impl Group {
    /// Starts the replica over a ring that has been opened or created.
    ///
    /// # Errors
    /// Settings that make no sense; a store that does not fit the log; a ring that fails.
    pub fn open(config: Config, ring: Ring) -> Result<Group, ConsensusError> {
        Group::open_with(config, ring, None)
    }

    /// Starts the replica over a ring and a second level that have been opened or created, and fit
    /// each other.
    ///
    /// # Errors
    /// As [`Group::open`].
    pub fn open_with(
        config: Config,
        mut ring: Ring,
        mut flash: Option<FlashLog>,
    ) -> Result<Group, ConsensusError> {
        config.check()?;
        let mut state = ring.hard_state().clone();
        let (applied, term) = (config.applied, config.applied_term);
        // Entries of another history, which will never be committed, may reach as far as the store.
        let is_foreign = term != 0 && ring.term(applied).is_some_and(|known| known != term);
        if applied > ring.last_index() || is_foreign {
            // A checkpoint was installed and the crash came before the ring was reset to it.
            if term == 0 {
                return Err(ConsensusError::AppliedBeyondLog {
                    applied,
                    last: ring.last_index(),
                });
            }
            ring.reset(applied, term);
            if let Some(flash) = &mut flash {
                flash.reset(applied, term);
            }
            if term > state.term {
                (state.term, state.vote) = (term, 0);
            }
        }
        let first = match &flash {
            Some(flash) if flash.last_index() + 1 >= ring.first_index() => {
                flash.first_index().min(ring.first_index())
            }
            _ => ring.first_index(),
        };
        if config.applied + 1 < first {
            return Err(ConsensusError::AppliedBelowLog {
                applied: config.applied,
                first,
            });
        }
        // raft-rs may answer in the current term, and refuses to send a vote without one.
        state.term = state.term.max(1);
        state.commit = state.commit.max(config.applied).max(ring.first_index() - 1);
        let changes = members::recover(&config, &ring, &mut state)?;
        if state != *ring.hard_state() {
            // Opening sends nothing, so nothing waits for this witness.
            let _durable = ring.persist(Batch {
                entries: &[],
                hard_state: Some(state),
            })?;
        }
        if let Some(flash) = flash
            .as_mut()
            .filter(|flash| flash.mode() == FlashMode::Only)
        {
            flash.set_hard_state(ring.hard_state().clone());
        }
        let max_append_bytes = config.max_append_bytes;
        // What lies between the store's state and the ring is replayed from flash, without raft-rs.
        let applied = config.applied.max(ring.first_index() - 1);
        let commit = ring.hard_state().commit;
        let view = RaftStorage {
            ring,
            flash: flash.map(FlashTier::new),
            available: None,
            wants_snapshot: false.into(),
            max_append_bytes,
        };
        let logger = slog::Logger::root(slog::Discard, slog::o!());
        let raw = RawNode::new(&config.raft(applied), view, &logger)
            .map_err(|error| ConsensusError::Raft(error.to_string()))?;
        let mut group = Group {
            config,
            raw,
            staging: Staging::default(),
            pending: Vec::new(),
            uncommitted_bytes: 0,
            uncommitted_from: commit,
            delivered: applied,
            skip_through: 0,
            changes,
            commit_due: false,
            attempts: 0,
            failed: false,
            windows: Windows::default(),
            quiescence: Quiescence::default(),
            impairment: Impairment::default(),
            wall_clocks: WallClocks::default(),
            heard: false,
            participation: Participation::Full,
            lost: None,
            diverged: None,
        };
        group.settle();
        Ok(group)
    }

    /// What this replica is.
    pub fn role(&self) -> Role {
        match self.raw.raft.state {
            StateRole::Follower => Role::Follower,
            StateRole::PreCandidate => Role::PreCandidate,
            StateRole::Candidate => Role::Candidate,
            StateRole::Leader => Role::Leader,
        }
    }

    /// Whether this replica takes proposals.
    pub fn is_leader(&self) -> bool {
        self.raw.raft.state == StateRole::Leader
    }

    /// Whether this replica asks for votes.
    pub fn is_candidate(&self) -> bool {
        let state = self.raw.raft.state;
        matches!(state, StateRole::Candidate | StateRole::PreCandidate)
    }

    /// The leader, if known.
    pub fn leader(&self) -> Option<u64> {
        Some(self.raw.raft.leader_id).filter(|id| *id != raft::INVALID_ID)
    }

    /// The current term.
    pub fn term(&self) -> u64 {
        self.raw.raft.term
    }

    /// Whom this replica voted for in the current term; 0: none.
    pub fn vote(&self) -> u64 {
        self.raw.raft.vote
    }

    /// Commit index.
    pub fn commit(&self) -> u64 {
        self.raw.raft.raft_log.committed
    }

    /// First index still in the log, in either level.
    pub fn first_index(&self) -> u64 {
        self.raw.store().first()
    }

    /// Last index, proposals that are not persisted yet included.
    pub fn last_index(&self) -> u64 {
        self.raw.raft.raft_log.last_index() + self.pending.len() as u64
    }

    /// Payload bytes appended since the start: left in the frames they were received in, and
    /// copied.
    pub fn payload_bytes(&self) -> (u64, u64) {
        self.raw.store().ring.payload_bytes()
    }

    /// How many frames of the pool the log holds.
    pub fn frames_held(&self) -> usize {
        self.raw.store().ring.frames_held()
    }

    /// The term of the entry at `index`, if the log knows it.
    pub fn entry_term(&self, index: u64) -> Option<u64> {
        self.raw.store().term_of(index)
    }

    /// Bytes that an entry's payload may have.
    pub fn max_entry_bytes(&self) -> u64 {
        self.config
            .max_entry_bytes
            .min(self.raw.store().ring.max_payload())
    }

    /// Takes an entry; answers its index. It is committed when an [`crate::Outbox`] delivers that
    /// index with the current term, and lost when one delivers it with another term.
    ///
    /// # Errors
    /// Nothing was done: not the leader, no room, too large.
    pub fn propose(&mut self, payload: Payload) -> Result<u64, ProposeError> {
        self.propose_kind(crate::KIND_COMMANDS, payload)
    }

    fn propose_kind(&mut self, kind: u8, payload: Payload) -> Result<u64, ProposeError> {
        self.may_propose(&payload)?;
        let index = self.last_index() + 1;
        self.uncommitted_bytes += payload.len() as u64;
        self.staging.push_kind(index, self.term(), kind, payload);
        self.pending.push(Entry::default());
        Ok(index)
    }

    /// Whether [`Group::propose`] would take this entry now. Several logs can so be asked before
    /// the first is given its part of something that concerns all.
    ///
    /// # Errors
    /// Why it would not.
    pub fn may_propose(&self, payload: &Payload) -> Result<(), ProposeError> {
        let raft = &self.raw.raft;
        if !self.is_leader() || self.failed {
            return Err(ProposeError::NotLeader {
                leader: self.leader(),
            });
        }
        if let Some(to) = raft.lead_transferee {
            return Err(ProposeError::Transferring { to });
        }
        let (len, limit) = (payload.len() as u64, self.max_entry_bytes());
        if len > limit {
            return Err(ProposeError::TooLarge { len, limit });
        }
        let (bytes, limit) = (
            self.uncommitted_bytes + len,
            self.config.max_uncommitted_bytes,
        );
        if bytes > limit && self.uncommitted_bytes > 0 {
            return Err(ProposeError::Uncommitted { bytes, limit });
        }
        let index = self.last_index() + 1;
        self.check_uncommitted(index, bytes)?;
        let cost = staging::cost(payload);
        self.check_capacity(cost + RESERVE_BYTES, 1 + RESERVE_SLOTS, cost, index)
            .map_err(|(needed, free)| ProposeError::Full { needed, free })
    }

    /// What is not committed must fit into half of any replica's log, even where every payload is
    /// copied: a new leader can commit none of it before a majority holds all of it and the entry
    /// that its term begins with, and nothing that is not committed can be trimmed to make room.
    fn check_uncommitted(&self, index: u64, payload_bytes: u64) -> Result<(), ProposeError> {
        let ring = &self.raw.store().ring;
        let entries = index - self.commit();
        let bytes = payload_bytes + entries * record_bound(0, 1);
        let limit = ring.capacity_bytes() / 2;
        // A single entry is bounded by the ring's own limit.
        if planted::has(Bug::UncommittedUnbounded) {
            return Ok(());
        }
        if entries > 1 && (bytes > limit || entries > ring.slots() / 2) {
            return Err(ProposeError::Uncommitted { bytes, limit });
        }
        Ok(())
    }

    /// Hands the proposals to raft-rs in one message. Nothing else may reach raft-rs before: their
    /// indexes are promised.
    pub(crate) fn flush_proposals(&mut self) {
        if self.pending.is_empty() {
            return;
        }
        let mut message = Message::default();
        message.set_msg_type(MessageType::MsgPropose);
        message.from = self.config.id;
        message.set_entries(std::mem::take(&mut self.pending).into());
        // All reasons for a refusal were ruled out when the proposals were taken.
        self.failed |= self.raw.raft.step(message).is_err();
    }

    /// Takes a message from another replica; `payloads` is what followed its header. Frames of
    /// entries that are not needed are released at once.
    ///
    /// # Errors
    /// The message was dropped; the group is unchanged.
    pub fn step(
        &mut self,
        mut message: RaftMessage,
        mut payloads: Payload,
    ) -> Result<(), StepError> {
        self.flush_proposals();
        self.planted_step(&mut message, &payloads);
        if self.contradicts_only_member(&message) || self.is_to_be_ignored(&message) {
            return Ok(());
        }
        let new = loop {
            match self.admit(&message, &payloads) {
                // As many entries as there is room for: were all refused, a leader that has filled
                // its log while this one was away would send all of them again, without end.
                Err(StepError::Full { .. }) if message.entries.len() > 1 => {
                    message.entries.truncate(message.entries.len() / 2);
                    payloads = payloads.slice(0..message.payload_bytes() as usize);
                }
                Err(error) => {
                    self.note_divergence(&message, &error);
                    return Err(error);
                }
                Ok(new) => break new,
            }
        };
        let peer_progress = self.peer_progress(&message);
        self.raw
            .step(message::to_raft(&message))
            .map_err(|_| StepError::Refused)?;
        self.heard |= self.leader() == Some(message.from);
        self.on_append_response(&message, peer_progress);
        self.note_quiescence(&message);
        self.note_impairment(&message);
        if let Some(new) = new {
            self.stage(&message, new, payloads);
        }
        self.settle();
        Ok(())
    }

    /// Keeps the payloads of the entries that raft-rs has just appended.
    fn stage(&mut self, message: &RaftMessage, new: usize, payloads: Payload) {
        let entries = &message.entries[new..];
        self.staging.truncate(entries[0].index);
        self.note_changes(entries);
        if let [only] = &message.entries[..] {
            return self
                .staging
                .push_kind(only.index, only.term, only.kind, payloads);
        }
        let mut at: usize = message.entries[..new]
            .iter()
            .map(|entry| entry.len as usize)
            .sum();
        for entry in entries {
            let (end, kind) = (at + entry.len as usize, entry.kind);
            let payload = payloads.slice(at..end);
            self.staging
                .push_kind(entry.index, entry.term, kind, payload);
            at = end;
        }
    }

    /// Whether everything in the log is durable.
    pub(crate) fn is_settled(&self) -> bool {
        let log = &self.raw.raft.raft_log;
        log.persisted == log.last_index() && log.unstable_snapshot().is_none()
    }

    /// Whether an election may begin: everything is durable and a new leader's first entry has
    /// room.
    pub(crate) fn may_campaign(&self) -> bool {
        self.is_settled()
            && !self.failed
            && self.participation == Participation::Full
            && !self.has_change_to_make()
            && self
                .check_capacity(record_bound(0, 0), 1, 0, u64::MAX)
                .is_ok()
    }

    /// Lets time pass.
    pub fn tick(&mut self, ticks: u32) {
        self.flush_proposals();
        self.on_window_tick();
        for _ in 0..self.consume_quiesced_ticks(ticks) {
            if !self.is_leader() && !self.may_campaign() {
                // It still hears nothing from a leader, and is free to vote for another.
                let raft = &mut self.raw.raft;
                raft.election_elapsed = raft.election_timeout().min(raft.election_elapsed + 1);
                continue;
            }
            let electing = !self.is_leader();
            if self.raw.tick() && electing {
                self.attempts += 1;
            }
            self.settle();
        }
        self.planted_tick();
        let raft = &self.raw.raft;
        self.commit_due = raft.raft_log.committed > raft.store().ring.hard_state().commit;
    }

    /// Follows up on actions that raft-rs took without a call. The entry a new leader begins its
    /// term with needs its (empty) place in the staging queue. And raft-rs draws election time-outs
    /// from the thread's generator; they are replaced by a function of seed, term and attempts, so
    /// that a run can be repeated.
    fn settle(&mut self) {
        let raft = &mut self.raw.raft;
        let unstable = raft.raft_log.unstable_entries();
        if let Some(own) = unstable.get(self.staging.len()..) {
            own.iter()
                .for_each(|entry| self.staging.push(entry.index, entry.term, Payload::new()));
        }
        let base = u64::from(self.config.election_ticks);
        let mut mixed =
            self.config.seed ^ raft.term.rotate_left(32) ^ self.attempts.rotate_left(48);
        for factor in [0xbf58_476d_1ce4_e5b9u64, 0x94d0_49bb_1331_11eb] {
            mixed = mixed.wrapping_add(0x9e37_79b9_7f4a_7c15);
            mixed = (mixed ^ (mixed >> 30)).wrapping_mul(factor);
        }
        let delay = u64::from(self.config.election_delay_ticks);
        let wanted = (delay + base + (mixed >> 20) % base) as usize;
        if raft.randomized_election_timeout() != wanted {
            raft.set_randomized_election_timeout(wanted);
        }
    }

    /// Begins an election without waiting for the time-out.
    ///
    /// # Errors
    /// [`RequestError::NotYet`] when something is not persisted yet or the ring is full.
    pub fn campaign(&mut self) -> Result<(), RequestError> {
        self.flush_proposals();
        if self.is_leader() {
            return Ok(());
        }
        if !self.may_campaign() || !self.raw.raft.promotable() {
            return Err(RequestError::NotYet);
        }
        self.attempts += 1;
        let begun = self.raw.campaign().map_err(|_| RequestError::NotYet);
        self.settle();
        begun
    }

    /// Asks for the index that a linearizable read must see. `context` names the read in
    /// [`crate::Outbox::read_states`]; it must not have been used before. The answer may fail to
    /// come: ask again.
    ///
    /// # Errors
    /// Not the leader, no entry of this term committed yet, too many reads waiting.
    pub fn read_index(&mut self, context: u64) -> Result<(), RequestError> {
        self.flush_proposals();
        if !self.is_leader() {
            return Err(RequestError::NotLeader {
                leader: self.leader(),
            });
        }
        let waiting = self.raw.raft.pending_read_count();
        if waiting >= MAX_READS {
            return Err(RequestError::Busy { waiting });
        }
        if !self.raw.raft.commit_to_current_term() {
            return Err(RequestError::NotYet);
        }
        self.raw.read_index(context.to_le_bytes().to_vec());
        Ok(())
    }

    /// Hands leadership to another voter; proposals are refused until it is done or an election
    /// time-out has passed.
    ///
    /// # Errors
    /// Not the leader, no such voter.
    pub fn transfer_leader(&mut self, to: u64) -> Result<(), RequestError> {
        self.flush_proposals();
        if !self.is_leader() {
            return Err(RequestError::NotLeader {
                leader: self.leader(),
            });
        }
        if !self.members().voters.contains(&to) {
            return Err(RequestError::NotVoter { id: to });
        }
        self.raw.transfer_leader(to);
        Ok(())
    }

    /// What is to be persisted, sent or delivered, if anything. Call until it gives `None`.
    pub fn take_ready(&mut self) -> Option<Ready<'_>> {
        self.flush_proposals();
        let commit_due =
            self.commit_due && self.commit() > self.raw.store().ring.hard_state().commit;
        (self.failed || commit_due || self.raw.has_ready()).then_some(Ready { group: self })
    }

    /// Appends the payload of the entry at `index` to `out`; `false` if the log does not hold it.
    pub fn copy_payload(&self, index: u64, out: &mut Vec<u8>) -> bool {
        match self.raw.store().ring.entry(index) {
            Some(view) => {
                view.segments()
                    .for_each(|segment| out.extend_from_slice(segment));
                true
            }
            None => match self.replayed(index) {
                Some(stored) => {
                    out.extend_from_slice(&stored.payload);
                    true
                }
                None => false,
            },
        }
    }

    /// How full the log is, by bytes or by slots, whichever is fuller: 0 to 1.
    pub fn fill_ratio(&self) -> f64 {
        self.raw.store().ring.fill()
    }

    /// The store has applied everything up to `index`.
    pub fn applied_to(&mut self, index: u64) {
        let log = &self.raw.raft.raft_log;
        let index = index
            .min(log.committed)
            .min(log.persisted)
            .min(self.delivered);
        if index > log.applied {
            self.raw.advance_apply_to(index);
        }
    }

    /// Drops entries up to `through`, as far as they are applied; where there is a second level,
    /// from that one, and
    /// [`Group::release`] frees the ring. Answers the new first index.
    ///
    /// # Errors
    /// The ring failed; the group is of no further use.
    pub fn trim(&mut self, through: u64) -> Result<u64, ConsensusError> {
        let through = through.min(self.raw.raft.raft_log.applied);
        if let Some(first) = self.trim_flash(through) {
            return Ok(first);
        }
        let ring = &mut self.raw.mut_store().ring;
        if through >= ring.first_index() {
            let trimmed = ring.trim(through);
            let first = ring.first_index();
            self.failed |= trimmed.is_err();
            trimmed?;
            return Ok(first);
        }
        Ok(ring.first_index())
    }

    /// Messages to this peer are known to be lost: send one at a time until it answers.
    pub fn report_unreachable(&mut self, to: u64) {
        self.flush_proposals();
        self.raw.report_unreachable(to);
    }
}

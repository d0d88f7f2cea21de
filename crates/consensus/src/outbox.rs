//! From what raft-rs has ready to what may leave. The types keep the order: a [`Ready`] shows
//! nothing of its messages, and an [`Outbox`] is made from the ring's witness that everything they
//! say is durable. Only a leader's appends, which assert nothing about its memory, may leave before
//! ([`EarlyAppends`]).

use cyclone_pmem::Payload;
use cyclone_wal::flash::Durable;
use cyclone_wal::ring::{Batch, NewEntry, Persisted, Ring};
use cyclone_wal::{PendingBatch, persist_all as persist_all_rings};
use cyclone_wire::planted::{self, Bug};
use cyclone_wire::raftmsg::SnapshotMeta;
use cyclone_wire::ring::HardState;
use raft::eraftpb::{Entry, Message, MessageType};
use raft::{Ready as RaftReady, StateRole};
use smallvec::SmallVec;

use crate::error::ConsensusError;
use crate::flash::PendingFlashStep;
use crate::group::Group;
use crate::message::{self, OutMessage};
use crate::status::Role;
use crate::view;

/// A committed entry. Its payload is in the ring: [`Group::copy_payload`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Committed {
    /// The entry's index; each is delivered once, in order.
    pub index: u64,
    /// The entry's term.
    pub term: u64,
    /// [`crate::KIND_COMMANDS`] or [`crate::KIND_MEMBERS`].
    pub kind: u8,
    /// Payload bytes; 0 for the entry a new leader begins its term with.
    pub len: u32,
}

/// Who leads, as far as this replica knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaderChange {
    /// The leader, if known.
    pub leader: Option<u64>,
    /// The term.
    pub term: u64,
    /// What this replica is.
    pub role: Role,
}

/// What may leave the replica now.
#[derive(Debug, Default)]
pub struct Outbox {
    /// Messages to send, in order.
    pub messages: Vec<OutMessage>,
    /// Newly committed entries, in order.
    pub committed: Vec<Committed>,
    /// Confirmed reads: the context given to [`Group::read_index`], and the index that must be
    /// applied first.
    pub read_states: Vec<(u64, u64)>,
    /// Set when the leader or this replica's role has changed.
    pub leader_change: Option<LeaderChange>,
}

impl Outbox {
    /// Only the ring can make the witness.
    pub(crate) fn open(_durable: Persisted) -> Outbox {
        Outbox::default()
    }

    /// Adds messages whose step is durable on flash.
    pub(crate) fn release(&mut self, _durable: &Durable, mut messages: Vec<OutMessage>) {
        self.messages.append(&mut messages);
    }
}

/// Something is ready to be persisted and then sent or delivered. Dropping it loses nothing: ask
/// again.
#[must_use]
pub struct Ready<'a> {
    pub(crate) group: &'a mut Group,
}

impl Ready<'_> {
    /// Makes entries and hard state durable, and gives what may leave after that.
    ///
    /// # Errors
    /// The ring failed or raft-rs contradicts the group's books: the group is of no further use.
    //= cyclone §4.2
    pub fn persist(self) -> Result<Outbox, ConsensusError> {
        let mut outboxes = persist_all(std::iter::once(((), self)));
        outboxes
            .pop()
            .map_or(Err(ConsensusError::Failed), |(_, outbox)| outbox)
    }
}

/// [`Ready::persist`] for several groups, whose rings wait for their memory together. Answers in
/// their order, each under its caller's name; one's failure is its own.
pub fn persist_all<'g, N>(readies: impl Iterator<Item = (N, Ready<'g>)>) -> Outboxes<N> {
    StepBatch::begin(readies).settle()
}

/// The same for a host that sends at once what a leader says to its followers: `send` is called
/// with it while the leader's own copy is on its way to memory, if all of these groups lead and
/// have new entries to send. A leader's appends assert nothing about its memory, and it counts
/// itself among those that have an entry only after this call (Ongaro's thesis, §10.2.1).
pub fn persist_all_pipelined<'g, N>(
    readies: impl Iterator<Item = (N, Ready<'g>)>,
    send: impl FnOnce(&[EarlyAppends<'_>]),
) -> Outboxes<N> {
    let mut several = StepBatch::begin(readies);
    several.send_early_appends(send);
    several.settle()
}

/// What each group gave, under its caller's name; most hosts have one.
pub type Outboxes<N> = SmallVec<[(N, Result<Outbox, ConsensusError>); 1]>;

/// Groups in the middle of a step, under their caller's names.
struct StepBatch<'g, N>(SmallVec<[(N, PendingStep<'g>); 1]>);

impl<'g, N> StepBatch<'g, N> {
    /// Writes what is to be persisted.
    fn begin(readies: impl Iterator<Item = (N, Ready<'g>)>) -> StepBatch<'g, N> {
        StepBatch(
            readies
                .map(|(name, ready)| (name, PendingStep::new(ready)))
                .collect(),
        )
    }

    fn send_early_appends(&mut self, send: impl FnOnce(&[EarlyAppends<'_>])) {
        if !self.0.is_empty()
            && self
                .0
                .iter()
                .all(|(_, begun)| begun.may_send_before_persist())
        {
            let begun = self.0.iter_mut();
            let ahead: SmallVec<[EarlyAppends<'_>; 1]> =
                begun.map(|(_, begun)| begun.ahead()).collect();
            send(&ahead);
        }
    }

    /// Waits for the memory, and gives what may leave after that.
    fn settle(mut self) -> Outboxes<N> {
        if self.0.is_empty() {
            return Outboxes::new();
        }
        let open = self.0.iter_mut().map(|(_, begun)| begun.open());
        let open: SmallVec<[_; 1]> = open.collect();
        let durable: SmallVec<[_; 1]> = persist_all_rings(open).collect();
        let groups = self.0.into_iter().zip(durable);
        groups
            .map(|((name, begun), durable)| (name, begun.finish(durable)))
            .collect()
    }
}

/// What a leader may send before its own copy is durable.
pub struct EarlyAppends<'a> {
    /// For [`Group::encode_into`].
    pub group: &'a Group,
    /// Appends and heartbeats.
    pub messages: Vec<OutMessage>,
}

/// A group in the middle of a step: raft-rs has said what is to be persisted.
struct PendingStep<'g> {
    group: &'g mut Group,
    /// None: the group has failed before.
    step: Option<Box<Step>>,
    /// What has been written for it and is not durable yet.
    written: Result<PendingBatch, ConsensusError>,
}

impl<'g> PendingStep<'g> {
    fn new(ready: Ready<'g>) -> PendingStep<'g> {
        let group = ready.group;
        let mut step = (!group.failed).then(|| group.begin_step());
        let begun = step.as_mut().ok_or(ConsensusError::Failed);
        let written = begun.and_then(|step| group.write_step(step));
        PendingStep {
            group,
            step,
            written,
        }
    }

    /// Whether there is something that need not wait, and nothing that does.
    fn may_send_before_persist(&self) -> bool {
        let (Some(step), Ok(_)) = (&self.step, &self.written) else {
            return false;
        };
        let plain = |message: &Message| {
            let kind = message.get_msg_type();
            matches!(kind, MessageType::MsgAppend | MessageType::MsgHeartbeat)
        };
        // What raft-rs shows here needs no durability of entries: it is a leader's. But a cluster's
        // only voter leads before its term is durable, and would begin the same one again.
        let (raft, messages) = (&self.group.raw.raft, step.ready.messages());
        let durable = raft.store().ring.hard_state();
        let is_settled = (raft.term, raft.vote) == (durable.term, durable.vote);
        let is_ordinary = step.behind.is_none() && step.snapshot.is_none();
        is_settled
            && is_ordinary
            && !step.entries.is_empty()
            && !messages.is_empty()
            && messages.iter().all(plain)
    }

    fn ahead(&mut self) -> EarlyAppends<'_> {
        let ready = self.step.as_mut().map(|step| &mut step.ready);
        let messages = ready.map(RaftReady::take_messages).unwrap_or_default();
        let mut out = Vec::with_capacity(messages.len());
        self.group.convert_messages(messages, &mut out);
        EarlyAppends {
            group: self.group,
            messages: out,
        }
    }

    /// The ring and what is written to it.
    fn open(&mut self) -> Result<(&mut Ring, PendingBatch), ConsensusError> {
        let written = std::mem::replace(&mut self.written, Err(ConsensusError::Failed))?;
        Ok((&mut self.group.raw.mut_store().ring, written))
    }

    fn finish(self, durable: Result<Persisted, ConsensusError>) -> Result<Outbox, ConsensusError> {
        let step = self.step.ok_or(ConsensusError::Failed);
        let outbox = step.and_then(|step| self.group.finish_step(step, durable?));
        self.group.failed |= outbox.is_err();
        outbox
    }
}

/// One step of a group, from what raft-rs has ready to its outbox.
struct Step {
    ready: RaftReady,
    snapshot: Option<SnapshotMeta>,
    entries: Vec<Entry>,
    hard_state: Option<HardState>,
    /// What waits for flash, where that is the only durable level.
    behind: Option<PendingFlashStep>,
}

impl Group {
    fn begin_step(&mut self) -> Box<Step> {
        let mut ready = self.raw.ready();
        let snapshot = view::snapshot_meta(ready.snapshot()).filter(|meta| meta.index > 0);
        if let Some(meta) = &snapshot {
            self.raw.mut_store().ring.reset(meta.index, meta.term);
            self.changes.clear();
            self.reset_flash(meta.index, meta.term);
        }
        let hard_state = self.next_hard_state(snapshot.as_ref());
        let entries = ready.take_entries();
        let behind = self
            .is_behind_flash()
            .then(|| self.stage_flash_step(&entries, hard_state.as_ref(), snapshot.is_some()));
        Box::new(Step {
            ready,
            snapshot,
            entries,
            hard_state,
            behind,
        })
    }

    fn finish_step(
        &mut self,
        step: Box<Step>,
        durable: Persisted,
    ) -> Result<Outbox, ConsensusError> {
        if !step.entries.is_empty() {
            self.staging.clear();
        }
        self.commit_due = false;
        let Step {
            mut ready,
            snapshot,
            behind,
            ..
        } = *step;
        if let Some(behind) = behind {
            return self.finish_flash_step(ready, snapshot.as_ref(), behind, durable);
        }
        let mut messages = ready.take_messages();
        messages.append(&mut ready.take_persisted_messages());
        let mut committed = ready.take_committed_entries();
        let reads = ready.take_read_states();
        let role_changed = ready.ss().is_some();
        let mut light = self.raw.advance_append(ready);
        messages.append(&mut light.take_messages());
        committed.append(&mut light.take_committed_entries());
        if let Some(meta) = &snapshot {
            // Before anything can campaign: raft-rs reads the log from its applied index on.
            self.raw.advance_apply_to(meta.index);
            self.delivered = self.delivered.max(meta.index);
        }
        let mut outbox = Outbox::open(durable);
        self.update_uncommitted_bytes(role_changed);
        self.collect_committed(&mut outbox, messages, committed)?;
        self.complete(&mut outbox, reads, role_changed);
        Ok(outbox)
    }

    /// Adds confirmed reads and a change of roles.
    pub(crate) fn complete(
        &self,
        outbox: &mut Outbox,
        reads: Vec<raft::ReadState>,
        role_changed: bool,
    ) {
        for read in reads {
            if let Ok(context) = read.request_ctx.as_slice().try_into() {
                outbox
                    .read_states
                    .push((u64::from_le_bytes(context), read.index));
            }
        }
        if role_changed {
            outbox.leader_change = Some(LeaderChange {
                leader: self.leader(),
                term: self.term(),
                role: self.role(),
            });
        }
    }

    /// Writes the entries, whose payloads are the front of the staging queue; with the hard state
    /// they are durable when the ring says so.
    fn write_step(&mut self, step: &mut Step) -> Result<PendingBatch, ConsensusError> {
        let entries = &step.entries[..];
        let staged = if entries.is_empty() {
            0
        } else {
            self.staging.len()
        };
        let aligned = entries
            .first()
            .is_none_or(|entry| entry.index == self.staging.first());
        if staged != entries.len() || !aligned {
            return Err(ConsensusError::Internal(
                "staged payloads do not match the entries",
            ));
        }
        let mut new: SmallVec<[NewEntry<'_>; 4]> = SmallVec::with_capacity(entries.len());
        for (entry, staged) in entries.iter().zip(self.staging.iter()) {
            if entry.term != staged.term {
                return Err(ConsensusError::Internal(
                    "a staged payload is of another term",
                ));
            }
            let payload: &Payload = &staged.payload;
            new.push(NewEntry {
                index: entry.index,
                term: entry.term,
                kind: staged.kind,
                payload,
            });
        }
        let batch = Batch {
            entries: &new,
            hard_state: step.hard_state.take(),
        };
        Ok(self.raw.mut_store().ring.write(batch)?)
    }

    /// The hard state to write now, if any: at once when term, vote or membership changed, and
    /// otherwise the commit index once per tick: the next leader would find it again, so it need
    /// not be written with every entry. It is not written beyond a membership entry before the
    /// membership itself is: a restart takes both from one state.
    pub(crate) fn next_hard_state(&self, snapshot: Option<&SnapshotMeta>) -> Option<HardState> {
        let raft = &self.raw.raft;
        let old = raft.store().ring.hard_state();
        let moved = raft.term != old.term || raft.vote != old.vote;
        if !moved
            && snapshot.is_none()
            && !(self.commit_due && raft.raft_log.committed > old.commit)
        {
            return None;
        }
        let mut state = old.clone();
        (state.term, state.vote) = (raft.term, raft.vote);
        if planted::has(Bug::VoteNotWritten) {
            state.vote = 0;
        }
        state.commit = match self.changes.first() {
            Some(change) => raft.raft_log.committed.min(change - 1).max(old.commit),
            None => raft.raft_log.committed.max(old.commit),
        };
        if let Some(meta) = snapshot {
            view::set_members(&mut state, &meta.members, meta.index);
        }
        Some(state)
    }

    /// Our form of raft-rs's messages, cut to what the ways to their receivers carry.
    fn convert_messages(&mut self, messages: Vec<Message>, out: &mut Vec<OutMessage>) {
        let first = out.len();
        out.reserve(messages.len());
        self.open_windows();
        for mut message in messages {
            if let Some(limit) = self.narrow(&mut message) {
                let (log, view) = (self.config.log, self.raw.store());
                message::from_raft(log, message, limit, view, out);
            }
        }
        self.stamp_quiescence(&mut out[first..]);
        self.stamp_impairment(&mut out[first..]);
        self.stamp_wall_clocks(&mut out[first..]);
        self.stamp_acknowledged(&mut out[first..]);
    }

    pub(crate) fn collect_committed(
        &mut self,
        outbox: &mut Outbox,
        messages: Vec<Message>,
        committed: Vec<Entry>,
    ) -> Result<(), ConsensusError> {
        self.apply_member_changes(committed.last().map_or(0, |entry| entry.index))?;
        self.convert_messages(messages, &mut outbox.messages);
        let view = self.raw.store();
        outbox.committed.reserve(committed.len());
        for entry in committed {
            if entry.index <= self.skip_through {
                self.delivered = self.delivered.max(entry.index);
                continue;
            }
            if entry.index != self.delivered + 1 {
                return Err(ConsensusError::Internal(
                    "a committed entry was skipped or came twice",
                ));
            }
            self.delivered = entry.index;
            let len = view
                .payload_len(entry.index, entry.term)
                .ok_or(ConsensusError::Internal(
                    "a committed entry is not in the ring",
                ))?;
            let (index, term) = (entry.index, entry.term);
            outbox.committed.push(Committed {
                index,
                term,
                kind: view.kind_of(index, term),
                len,
            });
        }
        Ok(())
    }

    /// Keeps count of the payload bytes that the leader has proposed and not seen committed.
    pub(crate) fn update_uncommitted_bytes(&mut self, role_changed: bool) {
        let was = self.uncommitted_from;
        let log = &self.raw.raft.raft_log;
        let (committed, last) = (log.committed, log.store.ring.last_index());
        let ring = &log.store.ring;
        let bytes = |from: u64, to: u64| -> u64 {
            (from..=to)
                .map(|index| u64::from(ring.payload_len(index).unwrap_or(0)))
                .sum()
        };
        if self.raw.raft.state != StateRole::Leader {
            self.uncommitted_bytes = 0;
        } else if role_changed {
            self.uncommitted_bytes = bytes(committed + 1, last);
        } else if committed > was {
            self.uncommitted_bytes = self
                .uncommitted_bytes
                .saturating_sub(bytes(was + 1, committed));
        }
        self.uncommitted_from = committed;
    }
}

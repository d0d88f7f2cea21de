//! One physical log: its Raft group, the entry in the making, what waits for commit, and the apply pipeline.

use std::collections::VecDeque;

use cyclone_consensus::{Committed, ConsensusError, Group, Outbox, ProposeError};
use cyclone_pmem::Payload;
use cyclone_store::{Applied, ApplyError, EntryInput, Mode, StateMachine};

use cyclone_wire::planted::{self, Bug};

use crate::reads::Reads;
use crate::requests::{BatchBuilder, Origin, Outcome};

/// Entries handed to the state machine in one call.
const APPLY_ENTRIES: usize = 64;
/// Payload bytes handed to the state machine in one call.
const APPLY_BYTES: usize = 1 << 20;
/// A command whose entry has neither been committed nor overwritten after this long is answered "unknown".
const OUTCOME_TIMEOUT_US: u64 = 5_000_000;
/// Sealed entries that may wait to be proposed.
const SEALED_LIMIT: usize = 256;

/// An entry of ours on its way to commitment.
struct InFlight {
    index: u64,
    term: u64,
    origins: Vec<Origin>,
    since_us: u64,
}

/// A committed entry with what is needed to answer its commands.
pub(crate) struct ToApply {
    pub(crate) entry: Committed,
    origins: Vec<Origin>,
}

/// Committed entries for a worker: index, term, payload.
pub(crate) struct ApplyJob {
    entries: Vec<(u64, u64, Vec<u8>)>,
}

impl ApplyJob {
    /// Applies them, waiting as long as it takes.
    pub(crate) fn apply(&self, store: &dyn StateMachine, log: u16) -> Result<Applied, ApplyError> {
        let entries: Vec<EntryInput<'_>> = self
            .entries
            .iter()
            .map(|(index, term, payload)| EntryInput {
                index: *index,
                term: *term,
                payload,
            })
            .collect();
        store.apply(log, &entries, Mode::Blocking)
    }
}

pub(crate) struct PhysicalLog {
    pub(crate) id: u16,
    pub(crate) group: Group,
    open: BatchBuilder,
    sealed: VecDeque<(Payload, Vec<Origin>)>,
    /// By index; entries of several terms may claim the same one.
    in_flight: VecDeque<InFlight>,
    apply_queue: VecDeque<ToApply>,
    /// Entries up to here come from flash, before any that are committed now; those wait in `behind`.
    replay_to: u64,
    behind: VecDeque<ToApply>,
    /// The entries at the front of `apply_queue` that a worker is applying.
    applying: usize,
    pub(crate) applied: u64,
    pub(crate) applied_term: u64,
    pub(crate) reads: Reads,
    pending: usize,
    /// The log had no room for the front of `sealed`.
    starved: bool,
    scratch: Vec<u8>,
}

impl PhysicalLog {
    pub(crate) fn new(id: u16, group: Group, applied: u64, applied_term: u64, salt: u64) -> Self {
        PhysicalLog {
            id,
            replay_to: group.replay_through(),
            behind: VecDeque::new(),
            group,
            open: BatchBuilder::new(),
            sealed: VecDeque::new(),
            in_flight: VecDeque::new(),
            apply_queue: VecDeque::new(),
            applying: 0,
            applied,
            applied_term,
            reads: Reads::new(salt),
            pending: 0,
            starved: false,
            scratch: Vec::new(),
        }
    }

    /// Commands and reads that wait for an answer.
    pub(crate) fn pending(&self) -> usize {
        self.pending + self.reads.len()
    }

    /// Whether another entry can be taken in at all.
    pub(crate) fn has_room(&self) -> bool {
        self.sealed.len() < SEALED_LIMIT
    }

    /// Whether an entry waits because the log has no room for it.
    pub(crate) fn is_starved(&self) -> bool {
        self.starved
    }

    /// Index of the last entry that holds a write submitted so far.
    pub(crate) fn barrier(&self) -> u64 {
        self.group.last_index() + self.sealed.len() as u64 + u64::from(!self.open.is_empty())
    }

    /// Adds a command whose bytes are to be copied into the entry.
    pub(crate) fn write_bytes(
        &mut self,
        now_ms: u64,
        origin: Origin,
        encode: impl FnOnce(&mut Vec<u8>),
    ) {
        self.open.push_bytes(origin, encode);
        self.added(now_ms);
    }

    /// Adds a command that may stay in the frames it came in.
    pub(crate) fn write_payload(&mut self, now_ms: u64, origin: Origin, command: &Payload) {
        self.open.push_payload(origin, command);
        self.added(now_ms);
    }

    fn added(&mut self, now_ms: u64) {
        self.pending += 1;
        if self.open.is_full() {
            self.seal(now_ms);
        }
    }

    fn seal(&mut self, now_ms: u64) {
        if !self.open.is_empty() {
            self.sealed.push_back(self.open.seal(now_ms));
        }
    }

    /// Proposes what has been taken in. Batching never waits: an entry is closed by every step.
    //= cyclone §4.2
    pub(crate) fn propose(
        &mut self,
        now_us: u64,
        now_ms: u64,
        answers: &mut Vec<(Origin, Outcome)>,
    ) {
        self.seal(now_ms);
        self.starved = false;
        while let Some((payload, origins)) = self.sealed.pop_front() {
            match self.group.propose(payload.clone()) {
                Ok(index) => {
                    self.await_fate(index, origins, now_us);
                }
                // The log is full for the moment: what was accepted waits, new requests are refused at the door.
                Err(error @ (ProposeError::Full { .. } | ProposeError::Uncommitted { .. }))
                    if self.group.is_leader() =>
                {
                    self.starved = matches!(error, ProposeError::Full { .. });
                    self.sealed.push_front((payload, origins));
                    return;
                }
                Err(error) => {
                    let outcome = match error {
                        ProposeError::NotLeader { leader } => Outcome::NotLeader(leader),
                        ProposeError::TooLarge { .. } => Outcome::TooLarge,
                        _ => Outcome::Busy,
                    };
                    self.pending -= origins.len();
                    answers.extend(origins.into_iter().map(|origin| (origin, outcome.clone())));
                }
            }
        }
    }

    /// Notes an entry of ours, by its index. Those of an earlier time as leader that lie beyond it may still be there:
    /// until something is committed in their place, another leader may commit them.
    fn await_fate(&mut self, index: u64, origins: Vec<Origin>, since_us: u64) {
        let ours = InFlight {
            index,
            term: self.group.term(),
            origins,
            since_us,
        };
        let at = match planted::has(Bug::EarlierTermForgotten) {
            true => self.in_flight.len(),
            false => self.in_flight.partition_point(|other| other.index <= index),
        };
        self.in_flight.insert(at, ours);
    }

    /// Takes in what a persisted step committed; finds out which of our entries a new leader has overwritten.
    pub(crate) fn committed(&mut self, outbox: &mut Outbox, answers: &mut Vec<(Origin, Outcome)>) {
        for entry in outbox.committed.drain(..) {
            let mut origins = Vec::new();
            while self
                .in_flight
                .front()
                .is_some_and(|ours| ours.index <= entry.index)
            {
                // The loop's condition has just seen it.
                let Some(ours) = self.in_flight.pop_front() else {
                    break;
                };
                if ours.index == entry.index && ours.term == entry.term {
                    origins = ours.origins;
                } else {
                    self.pending -= ours.origins.len();
                    answers.extend(
                        ours.origins
                            .into_iter()
                            .map(|origin| (origin, Outcome::Lost)),
                    );
                }
            }
            // Behind those that wait already, even when what they waited for has just been applied.
            let waits = self.applied < self.replay_to || !self.behind.is_empty();
            let queue = match waits {
                true => &mut self.behind,
                false => &mut self.apply_queue,
            };
            queue.push_back(ToApply { entry, origins });
        }
    }

    /// Takes the next part of what the store lacks and the ring does not have.
    ///
    /// # Errors
    /// Flash does not read back.
    pub(crate) fn replay(&mut self) -> Result<(), ConsensusError> {
        if self.applied >= self.replay_to {
            self.apply_queue.append(&mut self.behind);
        } else if self.applying == 0 && self.apply_queue.is_empty() {
            let entries = self.group.replay(self.applied + 1, self.replay_to)?;
            self.apply_queue
                .extend(entries.into_iter().map(|entry| ToApply {
                    entry,
                    origins: Vec::new(),
                }));
        }
        Ok(())
    }

    /// Answers commands whose fate stays open for too long, and reads that can no longer be confirmed.
    pub(crate) fn expire(&mut self, now_us: u64, answers: &mut Vec<(Origin, Outcome)>) {
        if self.group.is_leader() {
            return;
        }
        if planted::has(Bug::WaitersForgotten) {
            return;
        }
        let leader = self.group.leader();
        for read in self.reads.fail() {
            answers.push((read.origin, Outcome::NotLeader(leader)));
        }
        while let Some((_, origins)) = self.sealed.pop_front() {
            self.pending -= origins.len();
            answers.extend(
                origins
                    .into_iter()
                    .map(|origin| (origin, Outcome::NotLeader(leader))),
            );
        }
        if planted::has(Bug::InFlightIsLost) {
            for ours in self.in_flight.drain(..) {
                self.pending -= ours.origins.len();
                let lost = ours
                    .origins
                    .into_iter()
                    .map(|origin| (origin, Outcome::Lost));
                answers.extend(lost);
            }
        }
        let pending = &mut self.pending;
        self.in_flight.retain_mut(|ours| {
            let late = now_us.saturating_sub(ours.since_us) > OUTCOME_TIMEOUT_US;
            if late {
                *pending -= ours.origins.len();
                let unknown = ours.origins.drain(..);
                answers.extend(unknown.map(|origin| (origin, Outcome::Unknown)));
            }
            !late
        });
    }

    /// Whether committed entries wait and no worker holds them.
    pub(crate) fn can_apply(&self) -> bool {
        self.applying == 0 && !self.apply_queue.is_empty()
    }

    /// Whether a worker is applying entries of this log.
    pub(crate) fn is_applying(&self) -> bool {
        self.applying > 0
    }

    /// How many entries one call of the state machine takes from the queue's front.
    fn portion(&self) -> usize {
        let mut bytes = 0;
        self.apply_queue
            .iter()
            .take(APPLY_ENTRIES)
            .take_while(|next| {
                let fits = bytes < APPLY_BYTES;
                bytes += next.entry.len as usize;
                fits
            })
            .count()
    }

    /// Applies what is committed without ever blocking. `Some` is work for a thread that may block.
    ///
    /// # Errors
    /// A store that cannot go on.
    pub(crate) fn apply(
        &mut self,
        store: &dyn StateMachine,
        answers: &mut Vec<(Origin, Outcome)>,
    ) -> Result<Option<ApplyJob>, ApplyError> {
        while self.can_apply() {
            let count = self.portion();
            self.scratch.clear();
            let mut spans = Vec::with_capacity(count);
            for next in self.apply_queue.iter().take(count) {
                let start = self.scratch.len();
                self.group.copy_payload(next.entry.index, &mut self.scratch);
                spans.push(start..self.scratch.len());
            }
            let entries: Vec<EntryInput<'_>> = self
                .apply_queue
                .iter()
                .zip(&spans)
                .map(|(next, span)| EntryInput {
                    index: next.entry.index,
                    term: next.entry.term,
                    payload: &self.scratch[span.clone()],
                })
                .collect();
            match store.apply(self.id, &entries, Mode::NonBlocking) {
                Ok(applied) => self.finish(count, applied, answers),
                Err(ApplyError::WouldBlock) => {
                    self.applying = count;
                    let entries = entries
                        .iter()
                        .map(|entry| (entry.index, entry.term, entry.payload.to_vec()))
                        .collect();
                    return Ok(Some(ApplyJob { entries }));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    /// A worker has applied the entries it was given.
    pub(crate) fn finish_job(&mut self, applied: Applied, answers: &mut Vec<(Origin, Outcome)>) {
        let count = std::mem::take(&mut self.applying);
        self.finish(count, applied, answers);
    }

    fn finish(&mut self, count: usize, applied: Applied, answers: &mut Vec<(Origin, Outcome)>) {
        let mut replies = applied.into_iter();
        for done in self.apply_queue.drain(..count) {
            self.applied = done.entry.index;
            self.applied_term = done.entry.term;
            let mut entry_replies = replies.next().unwrap_or_default();
            if planted::has(Bug::RepliesReversed) {
                entry_replies.reverse();
            }
            self.pending -= done.origins.len();
            let answered = done.origins.into_iter().zip(entry_replies);
            answers.extend(answered.map(|(origin, reply)| (origin, Outcome::Done(reply))));
        }
        self.group.applied_to(self.applied);
    }

    /// A checkpoint has replaced the state up to `index`: what waited below it is settled, its replies are not known.
    pub(crate) fn skip_to(&mut self, index: u64, term: u64, answers: &mut Vec<(Origin, Outcome)>) {
        if index >= self.replay_to {
            self.replay_to = 0;
            self.apply_queue.append(&mut self.behind);
        }
        while self
            .apply_queue
            .front()
            .is_some_and(|next| next.entry.index <= index)
        {
            if let Some(skipped) = self.apply_queue.pop_front() {
                self.pending -= skipped.origins.len();
                answers.extend(
                    skipped
                        .origins
                        .into_iter()
                        .map(|origin| (origin, Outcome::Unknown)),
                );
            }
        }
        while self
            .in_flight
            .front()
            .is_some_and(|ours| ours.index <= index)
        {
            if let Some(ours) = self.in_flight.pop_front() {
                self.pending -= ours.origins.len();
                answers.extend(
                    ours.origins
                        .into_iter()
                        .map(|origin| (origin, Outcome::Unknown)),
                );
            }
        }
        self.applied = index;
        self.applied_term = term;
    }
}

//! Operations that concern several logs (cyclone §5.1): the coordinator, which hands every log its
//! share, and what becomes of the shares once they are committed. Whether a gang has its effect is
//! decided by
//! [`cyclone_consensus::GangTable`], from the logs alone.
//!
//! All gangs go through one queue, and each log keeps a place for its share in its own: so every
//! log sees the gangs in one order, no logs wait for each other in a circle, and what a client
//! sends after a gang comes after it. A gang is handed out once its share is next in every log
//! *and* every log has room for it; all shares are then proposed in one go, so that either all are
//! or none is.
//= cyclone §5.1

use std::collections::VecDeque;
use std::sync::Arc;

use cyclone_consensus::{Decision, GangTable, ProposeError};
use cyclone_pmem::Payload;
use cyclone_store::{ApplyError, EntryInput, Mode, StateMachine};
use cyclone_wire::gang::{Head, Kind, Nonce};
use cyclone_wire::planted::{self, Bug};
use cyclone_wire::reply::Reply;

use crate::logset::LogSet;
use crate::node::{Done, Node, NodeError};
use crate::requests::{BatchBuilder, Origin, Outcome};

/// A gang whose shares have not been proposed.
struct Queued {
    number: u64,
    logs: LogSet,
    batch: Payload,
    origins: Vec<Origin>,
}

/// An abort entry that a log had no room for yet.
struct PendingAbort {
    log: usize,
    term: u64,
    head: Head,
}

/// The coordinator's queue, and the book of what is committed.
pub(crate) struct Gangs {
    pub(crate) gang_table: GangTable,
    queue: VecDeque<Queued>,
    pending_aborts: Vec<PendingAbort>,
    replica: u64,
    boot: u64,
    counter: u64,
    /// Shares to be refused, for tests.
    refuse: Option<usize>,
}

impl Gangs {
    /// `boot` is drawn at random; `applied_terms` by log.
    pub(crate) fn new(replica: u64, boot: u64, applied_terms: &[u64]) -> Gangs {
        Gangs {
            gang_table: GangTable::new(applied_terms),
            queue: VecDeque::new(),
            pending_aborts: Vec::new(),
            replica,
            boot,
            counter: 0,
            refuse: None,
        }
    }
}

/// Entries of one gang for a worker, ascending by log: log, index, term, payload.
pub(crate) struct GangJob {
    parts: Vec<(u16, u64, u64, Vec<u8>)>,
    wants_replies: bool,
}

impl GangJob {
    fn apply(&self, store: &dyn StateMachine, mode: Mode) -> Result<Vec<Reply>, ApplyError> {
        let inputs: Vec<(u16, EntryInput<'_>)> = self
            .parts
            .iter()
            .map(|(log, index, term, payload)| {
                let input = EntryInput {
                    index: *index,
                    term: *term,
                    payload,
                    wants_replies: self.wants_replies,
                };
                (*log, input)
            })
            .collect();
        store.apply_gang(&inputs, mode)
    }
}

impl Node {
    /// Takes in an operation over several logs. The caller has been admitted to all of them.
    pub(crate) fn begin_gang(&mut self, logs: LogSet, mut command: BatchBuilder) {
        self.drain_requests(logs);
        // One moment for all of its logs.
        let times = logs.iter().map(|log| self.logs[log].time_ms());
        let time_ms = times.max().unwrap_or(0);
        let (batch, origins) = command.seal(time_ms);
        self.gangs.counter += 1;
        self.counters.gangs += 1;
        let number = self.gangs.counter;
        for log in logs.iter() {
            let waiting = if log == logs.lowest() {
                origins.len()
            } else {
                0
            };
            self.logs[log].queue_gang(number, waiting);
            self.logs[log].clock.advance_to_ms(time_ms);
        }
        self.gangs.queue.push_back(Queued {
            number,
            logs,
            batch,
            origins,
        });
    }

    /// Proposes what has been taken in, by all logs, in the order in which each was given it.
    pub(crate) fn propose(&mut self) {
        let now_us = self.now.steady_us;
        self.propose_pending_aborts();
        for log in &mut self.logs {
            log.propose(now_us, &mut self.answers);
        }
        while let Some(front) = self.gangs.queue.front() {
            let (logs, number) = (front.logs, front.number);
            let next = |log: usize| self.logs[log].next_gang() == Some(number);
            if !logs.iter().all(next) || !self.propose_next_gang() {
                break;
            }
            for log in logs.iter() {
                self.logs[log].propose(now_us, &mut self.answers);
            }
        }
    }

    /// Proposes the first gang's shares, or refuses it. `false`: it has to wait.
    fn propose_next_gang(&mut self) -> bool {
        let Some(front) = self.gangs.queue.front() else {
            return false;
        };
        let (number, logs) = (front.number, front.logs);
        // An abort entry that came behind a later gang would let logs wait for each other in a
        // circle.
        if self
            .gangs
            .pending_aborts
            .iter()
            .any(|pending_aborts| logs.contains(pending_aborts.log))
        {
            return false;
        }
        let head = Head {
            kind: Kind::Part,
            nonce: Nonce {
                replica: self.gangs.replica,
                boot: self.gangs.boot,
                counter: number,
            },
            view: logs
                .iter()
                .map(|log| (log as u16, self.logs[log].group.term()))
                .collect(),
        };
        let mut bytes = Vec::with_capacity(Head::bytes(logs.len()));
        head.encode(&mut bytes);
        let encoded = Payload::from_vec(bytes);
        let share = |log: usize| {
            let mut share = encoded.clone();
            if log == logs.lowest() {
                share.append(front.batch.clone());
            }
            share
        };
        let shares: Vec<(usize, Payload)> = logs.iter().map(|log| (log, share(log))).collect();
        for (log, share) in &shares {
            match self.logs[*log].group.may_propose(share) {
                Ok(()) => {}
                Err(error @ (ProposeError::Full { .. } | ProposeError::Uncommitted { .. })) => {
                    if matches!(error, ProposeError::Full { .. }) {
                        self.logs[*log].set_log_full();
                    }
                    return false;
                }
                Err(ProposeError::TooLarge { .. }) => {
                    self.refuse_gang(number, &Outcome::TooLarge);
                    return true;
                }
                Err(ProposeError::NotLeader { .. }) => {
                    let leader = self.logs[0].group.leader();
                    self.refuse_gang(number, &Outcome::NotLeader(leader));
                    return true;
                }
                Err(
                    ProposeError::Transferring { .. }
                    | ProposeError::Changing
                    | ProposeError::BadMembers
                    | ProposeError::Behind { .. },
                ) => {
                    self.refuse_gang(number, &Outcome::Busy);
                    return true;
                }
            }
        }
        let mut origins = match self.gangs.queue.pop_front() {
            Some(queued) => queued.origins,
            None => return false,
        };
        for (log, share) in shares {
            let now_us = self.now.steady_us;
            // Only the lowest log's share has somebody waiting for it.
            let waiting = std::mem::take(&mut origins);
            let refused = self.gangs.refuse.take_if(|refuse| *refuse == log).is_some();
            let proposed = match refused {
                true => None,
                false => self.logs[log].group.propose(share).ok(),
            };
            match proposed {
                Some(index) => self.logs[log].gang_proposed(index, waiting, now_us),
                None => self.abort_share(log, &head, number, waiting),
            }
        }
        true
    }

    /// A log did not take its share although it said that it would: the others must learn that from
    /// its log.
    fn abort_share(&mut self, log: usize, head: &Head, number: u64, waiting: Vec<Origin>) {
        let physical = &mut self.logs[log];
        physical.drop_gang(number, waiting.len());
        for origin in waiting {
            self.answers.push((origin, Outcome::Lost));
        }
        let head = Head {
            kind: Kind::Abort,
            ..head.clone()
        };
        self.counters.gangs_aborted += 1;
        let term = physical.group.term();
        self.gangs
            .pending_aborts
            .push(PendingAbort { log, term, head });
        self.propose_pending_aborts();
    }

    /// Proposes the abort entries that are due; gangs that come later wait for them. One that never
    /// gets there is made good for by the log's next term.
    fn propose_pending_aborts(&mut self) {
        let logs = &mut self.logs;
        self.gangs.pending_aborts.retain(|pending_aborts| {
            let group = &mut logs[pending_aborts.log].group;
            if !group.is_leader() || group.term() != pending_aborts.term {
                return false;
            }
            let mut bytes = Vec::with_capacity(Head::bytes(pending_aborts.head.view.len()));
            pending_aborts.head.encode(&mut bytes);
            group.propose(Payload::from_vec(bytes)).is_err()
        });
    }

    /// The next gang finds this log unable to take its share although it had room: for tests of
    /// abort entries.
    pub fn refuse_share(&mut self, log: usize) {
        self.gangs.refuse = Some(log);
    }

    /// Nothing of this gang was proposed: its client may try again.
    pub(crate) fn refuse_gang(&mut self, number: u64, outcome: &Outcome) {
        let position = self
            .gangs
            .queue
            .iter()
            .position(|gang| gang.number == number);
        let Some(gang) = position.and_then(|position| self.gangs.queue.remove(position)) else {
            return;
        };
        for log in gang.logs.iter() {
            let waiting = match log == gang.logs.lowest() {
                true => gang.origins.len(),
                false => 0,
            };
            self.logs[log].drop_gang(number, waiting);
        }
        for origin in gang.origins {
            self.answers.push((origin, outcome.clone()));
        }
    }

    /// Whether committed entries wait that nothing but the length of a step keeps from being
    /// applied.
    pub(crate) fn may_apply_more(&self) -> bool {
        let mut logs = self.logs.iter().enumerate();
        !self.snapshots.is_installing()
            && logs.any(|(log, physical)| physical.can_apply(self.gangs.gang_table.stop(log)))
    }

    /// Applies what is committed in all logs, as far as it is decided and one step takes.
    pub(crate) fn apply(&mut self) -> Result<(), NodeError> {
        loop {
            let mut moved = false;
            for log in 0..self.logs.len() {
                let stop = self.gangs.gang_table.stop(log);
                if self.logs[log].can_apply(stop) {
                    self.apply_log(log, stop)?;
                }
                if stop.is_some() && self.logs[log].front() == stop {
                    moved |= self.settle_gang(log)?;
                }
            }
            if !moved {
                return Ok(());
            }
        }
    }

    fn apply_log(&mut self, log: usize, stop: Option<u64>) -> Result<(), NodeError> {
        let physical = &mut self.logs[log];
        let job = physical.apply(&*self.store, stop, 0, &mut self.answers)?;
        if let Some(job) = job {
            self.apply_elsewhere(log, job);
        }
        Ok(())
    }

    /// A log stands at a gang's entry: goes on if it may. Returns whether anything moved.
    fn settle_gang(&mut self, log: usize) -> Result<bool, NodeError> {
        let mut decision = self.gangs.gang_table.decide(log);
        if planted::has(Bug::GangTimedOut) && decision == Decision::Wait {
            let since_us = self.logs[log].front_since_us();
            if since_us > 0 && self.now.steady_us - since_us > 20_000 {
                decision = Decision::Skip;
            }
        }
        match decision {
            Decision::Wait => Ok(false),
            Decision::Skip => {
                self.logs[log].skip_front();
                if let Some(index) = self.logs[log].front() {
                    self.gangs.gang_table.passed(log, index);
                }
                Ok(true)
            }
            Decision::Together { apply, entries } => self.try_apply_gang(apply, &entries),
        }
    }

    fn try_apply_gang(&mut self, apply: bool, entries: &[(u16, u64)]) -> Result<bool, NodeError> {
        let there =
            |(log, index): &(u16, u64)| self.logs[usize::from(*log)].front() == Some(*index);
        if !entries.iter().all(there) {
            return Ok(false);
        }
        let mut parts = Vec::with_capacity(entries.len());
        for &(log, _) in entries {
            let Some((index, term, payload)) = self.logs[usize::from(log)].front_share() else {
                return Ok(false);
            };
            let payload = if apply { payload } else { Vec::new() };
            parts.push((log, index, term, payload));
        }
        let lowest = entries.first().map(|(log, _)| usize::from(*log));
        let job = GangJob {
            parts,
            wants_replies: lowest.is_some_and(|log| self.logs[log].has_waiter()),
        };
        match job.apply(&*self.store, Mode::NonBlocking) {
            Ok(replies) => self.gang_applied(entries, apply, replies),
            Err(ApplyError::WouldBlock) => {
                for &(log, _) in entries {
                    self.logs[usize::from(log)].hold_front();
                }
                self.counters.store_stalls += 1;
                let (store, entries) = (Arc::clone(&self.store), entries.to_vec());
                self.workers.run(move || Done::GangApplied {
                    result: job.apply(&*store, Mode::Blocking),
                    entries,
                    apply,
                });
            }
            Err(error @ (ApplyError::NoSpace(_) | ApplyError::Damaged(_))) => {
                self.halt_gang(entries, error);
            }
            Err(error) => return Err(error.into()),
        }
        Ok(true)
    }

    /// The store has refused a gang; it is asked again after a pause.
    pub(crate) fn halt_gang(&mut self, entries: &[(u16, u64)], error: ApplyError) {
        let mut error = Some(error);
        for &(log, _) in entries {
            self.logs[usize::from(log)].halt_apply(error.take());
        }
    }

    /// All of a gang's logs have gone on.
    pub(crate) fn gang_applied(
        &mut self,
        entries: &[(u16, u64)],
        apply: bool,
        replies: Vec<Reply>,
    ) {
        let mut replies = replies.into_iter();
        for &(log, index) in entries {
            let log = usize::from(log);
            let origins = self.logs[log].pass_front();
            self.gangs.gang_table.passed(log, index);
            for origin in origins {
                let outcome = match (apply, replies.next()) {
                    (true, Some(reply)) => Outcome::Done(reply),
                    (true, None) => Outcome::Unknown,
                    (false, _) => Outcome::Lost,
                };
                self.answers.push((origin, outcome));
            }
        }
    }

    /// A checkpoint was installed: what waits in the logs is examined anew.
    pub(crate) fn reregister_pending_gangs(&mut self) {
        for log in &mut self.logs {
            log.reregister_gangs(&mut self.gangs.gang_table);
        }
    }
}

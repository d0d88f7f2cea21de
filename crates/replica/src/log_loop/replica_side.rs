//! The replica's side of its logs' own loops: it lends the logs between its steps, and takes them
//! back for each.

use std::sync::Arc;

use cyclone_wire::client::Status;
use cyclone_wire::command::{Command, Query};

use crate::clients::ClientReplies;
use crate::config::Member;
use crate::intake::Intake;
use crate::log_loop::handoff::{
    FairHandoff, LoanedLog, LogOwner, LoopChannel, PendingGangCommits, Request, ToLogLoop,
    ToReplicaLoop,
};
use crate::log_loop::{HOSTS, LogLoop};
use crate::logset::LogSet;
use crate::node::{Done, Node, NodeError};
use crate::physical::{ApplyJob, PhysicalLog};
use crate::requests::{Origin, Outcome, Ticket};
use crate::status::Counters;

/// Where a log is lent, and the letters about it.
pub(crate) struct LogHandle {
    pub(crate) log_handoff: Arc<FairHandoff<Box<LoanedLog>>>,
    pub(crate) mailbox: Arc<LoopChannel>,
    /// Answers were sent down in this step.
    rings: bool,
    /// Requests lay in the mailbox when it was last checked.
    waited: bool,
}

/// The replica ends, however: neither the thread of the log's loop waits for the log, nor a caller
/// for an answer.
impl Drop for LogHandle {
    fn drop(&mut self) {
        self.log_handoff.abandon();
        self.mailbox.close();
    }
}

impl LogHandle {
    /// For so many calls of other threads at once, at most.
    pub(crate) fn new(max_waiting: usize) -> LogHandle {
        LogHandle {
            log_handoff: Arc::new(FairHandoff::new()),
            mailbox: Arc::new(LoopChannel::new(max_waiting)),
            rings: false,
            waited: false,
        }
    }

    fn send_to_log_loop(&mut self, answer: ToLogLoop) {
        self.mailbox.send_to_log_loop(answer);
        self.rings = true;
    }
}

/// What all logs are lent with.
pub(crate) struct LoanedLogs {
    pub(crate) log_handles: Vec<LogHandle>,
    members: Arc<[Member]>,
    led: Arc<[u64]>,
    /// A log that was lent has come back with another leader.
    elected: bool,
    /// When a loop of a log last had work for a client. The replica's own need not look for more
    /// because of that.
    pub(crate) active_us: u64,
    /// Encoded messages to replicas that do not answer at their logs' ports.
    pub(crate) forwarded: Vec<(u64, Vec<u8>)>,
}

impl LoanedLogs {
    pub(crate) fn new(log_handles: Vec<LogHandle>) -> LoanedLogs {
        LoanedLogs {
            log_handles,
            members: Arc::new([]),
            led: Arc::new([]),
            elected: false,
            active_us: 0,
            forwarded: Vec::new(),
        }
    }
}

impl Node {
    /// The logs' own loops, for the threads that run them; each only once. None unless the
    /// configuration wants them.
    pub fn take_log_loops(&mut self) -> Vec<LogLoop> {
        std::mem::take(&mut self.lanes)
    }

    /// The logs' letter boxes, for other threads of this process.
    pub(crate) fn mailboxes(&self) -> Vec<Arc<LoopChannel>> {
        let log_handles = self.loaned_logs.log_handles.iter();
        log_handles.map(|post| Arc::clone(&post.mailbox)).collect()
    }

    /// Lets the logs' own loops move them until [`Node::take_logs`]. Nothing else may be asked of
    /// the replica meanwhile. Without such loops nothing happens.
    pub fn lend_logs(&mut self) {
        if self.loaned_logs.log_handles.is_empty() {
            return;
        }
        // A log may have been won since its reads were checked.
        for (led, log) in self.led.iter_mut().zip(&self.logs) {
            if log.group.is_leader() {
                *led = log.group.term();
            }
        }
        let refusal = self.check_leadership().err();
        if *self.loaned_logs.members != *self.membership.list() {
            self.loaned_logs.members = self.membership.list().into();
        }
        if *self.loaned_logs.led != *self.led {
            self.loaned_logs.led = self.led.as_slice().into();
        }
        let stays: Vec<bool> = (0..self.logs.len())
            .map(|log| self.is_pinned_to_replica_loop(log))
            .collect();
        let is_quiet = self.ticking.skips();
        let loaned_logs = &mut self.loaned_logs;
        let logs = self.logs.drain(..).zip(stays);
        for ((log, paused), post) in logs.zip(&mut loaned_logs.log_handles) {
            let turn = LoanedLog {
                pending_commits: PendingGangCommits::new(
                    self.gangs.gang_table.stop(usize::from(log.id)),
                ),
                paused,
                refusal: refusal.clone(),
                led: Arc::clone(&loaned_logs.led),
                members: Arc::clone(&loaned_logs.members),
                counters: Counters::default(),
                elected: false,
                steady: self.steady.clone(),
                active_us: 0,
                is_quiet,
                log,
            };
            post.log_handoff.put(Box::new(turn));
            if std::mem::take(&mut post.rings) {
                post.mailbox.wake_log_loop();
            }
        }
    }

    /// Takes the logs back, each when its own loop has put it down.
    ///
    /// # Errors
    /// One of the loops has ended.
    pub fn take_logs(&mut self) -> Result<(), NodeError> {
        let before = self.steady.clone();
        for log in self.logs.len()..self.loaned_logs.log_handles.len() {
            let post = &self.loaned_logs.log_handles[log];
            if let Some(error) = post.mailbox.failure() {
                return Err(error);
            }
            let Some(turn) = post.log_handoff.take(LogOwner::ReplicaLoop) else {
                return Err(NodeError::LoopEnded(log));
            };
            turn.pending_commits.tell(log, &mut self.gangs.gang_table);
            self.counters.add(&turn.counters);
            self.loaned_logs.elected |= turn.elected;
            self.loaned_logs.active_us = self.loaned_logs.active_us.max(turn.active_us);
            self.steady.learn(&turn.steady);
            self.logs.push(turn.log);
        }
        if self.steady.has_stepped_back_since(&before) {
            self.logs.iter_mut().for_each(PhysicalLog::revoke_lease);
        }
        Ok(())
    }

    /// Reads the logs' letters.
    pub(crate) fn drain_mailboxes(&mut self) -> Result<usize, NodeError> {
        let mut work = 0;
        for log in 0..self.loaned_logs.log_handles.len() {
            for item in self.loaned_logs.log_handles[log]
                .mailbox
                .take_for_replica_loop()
            {
                work += 1;
                self.handle_message(log, item)?;
            }
        }
        for log in 0..self.loaned_logs.log_handles.len() {
            if self.is_pinned_to_replica_loop(log) {
                self.drain_requests(LogSet::one(log));
            }
        }
        if std::mem::take(&mut self.loaned_logs.elected) {
            self.colocate_leaders(0);
        }
        Ok(work)
    }

    fn handle_message(&mut self, log: usize, item: ToReplicaLoop) -> Result<(), NodeError> {
        match item {
            ToReplicaLoop::Message(message) => self.dispatch(log as u16 + 1, message),
            ToReplicaLoop::Write(origin, payload) => {
                // It was read by the log's loop already.
                let gathered = match payload.contiguous() {
                    Some(bytes) => bytes.into(),
                    None => std::borrow::Cow::Owned(payload.to_vec()),
                };
                if let Ok(command) = Command::decode(&gathered) {
                    let logs = LogSet::of(&command.operation, self.logs.len());
                    self.take_write(logs, origin, &payload);
                }
            }
            ToReplicaLoop::Query {
                origin,
                query,
                mode,
                terms,
            } => {
                if let Ok(decoded) = Query::decode(&query) {
                    self.submit_read_as(origin, &decoded, query.clone(), mode, &terms);
                }
            }
            // It may be executed; where that is done it is taken again.
            ToReplicaLoop::Read(index, read) => self.logs[log].reads.wait_for(index, read),
            ToReplicaLoop::Outcome(origin, outcome) => self.answers.push((origin, outcome)),
            ToReplicaLoop::Apply(job) => self.apply_elsewhere(log, job),
            ToReplicaLoop::Send(message) => self.post(vec![message]),
            ToReplicaLoop::SendEncoded(to, bytes) => self.loaned_logs.forwarded.push((to, bytes)),
        }
        Ok(())
    }

    /// Whether only the replica's loop may move this log.
    fn is_pinned_to_replica_loop(&self, log: usize) -> bool {
        let removed = self.membership.is_removed(self.config.id);
        let left = |post: &LogHandle| post.mailbox.has_ended();
        if self.loaned_logs.log_handles.get(log).is_some_and(left) {
            return true;
        }
        removed || self.snapshots.is_installing() || self.logs[log].is_behind()
    }

    /// Leaves a request for one log to that log's loop; gives it back where there is none, or it
    /// does not move the log.
    pub(crate) fn delegate(&mut self, log: usize, request: Request) -> Option<Request> {
        let stays = self.is_pinned_to_replica_loop(log);
        let Some(post) = self.loaned_logs.log_handles.get_mut(log).filter(|_| !stays) else {
            return Some(request);
        };
        post.mailbox.ask(request);
        post.rings = true;
        None
    }

    /// Takes in what was left to these logs' loops and not begun: what comes now comes after it.
    pub(crate) fn drain_requests(&mut self, logs: LogSet) {
        for log in logs.iter().take(self.loaned_logs.log_handles.len()) {
            for request in self.loaned_logs.log_handles[log].mailbox.take_requests() {
                // Threads of this process leave theirs unasked; and what was admitted may wait for
                // longer than this replica leads.
                let admitted = match request {
                    Request::Write(..) => self.admit_write(LogSet::one(log)),
                    Request::Read { .. } => self.admit(LogSet::one(log)),
                };
                match admitted {
                    Ok(()) => self.logs[log].take_in(request),
                    Err(outcome) => self.answers.push((request.origin(), outcome)),
                }
            }
        }
    }

    /// Requests that wait for a log's loop.
    pub(crate) fn delegated(&self, log: usize) -> usize {
        let post = self.loaned_logs.log_handles.get(log);
        post.map_or(0, |post| post.mailbox.asked())
    }

    /// Has a worker apply entries that the store does not take without waiting.
    pub(crate) fn apply_elsewhere(&mut self, log: usize, job: ApplyJob) {
        self.counters.store_stalls += 1;
        let (store, id) = (Arc::clone(&self.store), self.logs[log].id);
        self.workers.run(move || {
            let result = job.apply(&*store, id);
            Done::Applied { log, result }
        });
    }

    /// Tells a native client how its request has ended, through the port it came by.
    pub(crate) fn tell(&mut self, origin: Origin, status: Status) {
        let Origin::Native { door, .. } = origin else {
            return;
        };
        match usize::from(door).checked_sub(1) {
            None => self.clients.add(origin, &status),
            Some(log) => {
                self.loaned_logs.log_handles[log]
                    .send_to_log_loop(ToLogLoop::Client(origin, status));
            }
        }
    }

    /// Completes a request to a log's own loop: its host through that loop, other threads at once.
    pub(crate) fn complete_direct(&mut self, log: u16, ticket: Ticket, outcome: Outcome) {
        match self.loaned_logs.log_handles.get_mut(usize::from(log)) {
            Some(post) if ticket & HOSTS > 0 => {
                post.send_to_log_loop(ToLogLoop::Host(ticket, outcome))
            }
            Some(post) => post.mailbox.reply(&mut vec![(ticket, outcome)]),
            None => {}
        }
    }

    /// Takes in what has waited in a box since the last upkeep: the thread of the log's loop is
    /// busy elsewhere, and perhaps waits for just that.
    pub(crate) fn drain_stale_mailboxes(&mut self) {
        for log in 0..self.loaned_logs.log_handles.len() {
            let refused = self.loaned_logs.log_handles[log].mailbox.take_refused();
            self.note_refused_elsewhere(refused);
            let waits = self.delegated(log) > 0;
            if std::mem::replace(&mut self.loaned_logs.log_handles[log].waited, waits) && waits {
                self.drain_requests(LogSet::one(log));
            }
        }
    }

    /// Tells a native client what has become of its request.
    pub(crate) fn send_outcome(&mut self, origin: Origin, outcome: Outcome) {
        let status = ClientReplies::status(outcome, self.membership.list());
        self.tell(origin, status);
    }
}

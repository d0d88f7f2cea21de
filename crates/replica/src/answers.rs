//! Reads from the door to their answers: which way they take, what the store says, what is checked
//! before the reply.
//!
//! | way | confirmed by | sees |
//! |---|---|---|
//! | index | a majority, after the read came (ReadIndex) | everything done before |
//! | log | being an entry (cyclone §2, quorum read) | everything done before |
//! | lease | the lease, when the read begins and again when it has been answered | everything done before |
//! | weak | nothing; waits for what is in the log (cyclone §2) | what was reported to its client, if the client's terms are no later |
//! | stale | nothing; on followers | what was done up to a stated time ago |
//! | own | nothing; on followers, of all keys | what this replica has applied; with a bound, up to a stated time ago |

use std::time::Duration;

use cyclone_store::{ApplyError, Mode};
use cyclone_wire::client::ReadMode;
use cyclone_wire::command::{Command, Operation, Query};
use cyclone_wire::planted::{self, Bug};
use cyclone_wire::reply::Reply;

use crate::logset::LogSet;
use crate::node::{Node, NodeError};
use crate::reads::{Read, ReadBasis};
use crate::requests::{Origin, Outcome, Ticket, refuse_excess};
use crate::slow::{LeadershipEpoch, SlowRead};

/// How long a weak read waits for the entries it must see, in microseconds; then it is refused as
/// "busy".
pub(crate) const WEAK_WAIT_US: u64 = 500_000;
/// Expired keys removed by one entry: twice as many as by the last one while it has left some
/// behind.
const LEAST_SWEEP: u32 = 256;
const MOST_SWEEP: u32 = 1024;
/// Between two of them: what clients write has its turn.
const SWEEP_US: u64 = 2_000;

/// What a leader writes into a log about time, one entry after the other.
#[derive(Clone, Default)]
pub(crate) struct OwnWork {
    /// The last such entry's index.
    last: u64,
    /// Most keys that it removes, if it is a sweep.
    sweep: u32,
    /// The next sweep is not due before.
    next_us: u64,
}

/// Whether a read sees keys expire by the wall clock, which the log's clock has to reach first.
/// Others use the log's time: a key may show slightly longer than it should, on all replicas alike.
/// What walks through all keys does: some key or other expires at each moment, and the log's clock
/// would be behind each time.
pub(crate) fn needs_wall_clock(query: &Query<'_>, how: ReadBasis) -> bool {
    !matches!(how, ReadBasis::Weak { .. }) && cyclone_store::is_point_query(query)
}

/// A read under a lease that was answered by the store and is not told yet.
pub(crate) struct LeaseReadReply {
    log: usize,
    term: u64,
    read: Read,
    reply: Reply,
}

/// Whether a replica shows what it has of all keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeysShown {
    /// It does.
    Yes,
    /// What it has is older than configured.
    TooOld,
    /// It installs a checkpoint.
    Installing,
}

impl Node {
    /// Submits a read from this process. `Weak` reads see what this replica answered before; for
    /// what another one answered, see [`ReadMode`].
    pub fn read_as(&mut self, ticket: Ticket, query: &Query<'_>, mode: ReadMode) {
        let mut bytes = Vec::with_capacity(64);
        query.encode(&mut bytes);
        self.submit_read_as(Origin::Local(ticket), query, bytes, mode, &[]);
    }

    /// Whether a read on this replica shows what was done up to the configured staleness ago, by
    /// this machine's clock.
    pub fn is_fresh_enough(&self) -> bool {
        let Some(staleness) = self.config.follower_staleness else {
            return false;
        };
        self.satisfies_staleness(staleness) && !self.snapshots.is_installing()
    }

    fn satisfies_staleness(&self, staleness: Duration) -> bool {
        let staleness_ms = staleness.as_millis() as u64;
        // A log's clock that is ahead, as a leader's was, says nothing about what has reached this
        // replica.
        let fresh = |log: u16| self.store.clock_ms(log).abs_diff(self.now.wall_ms) <= staleness_ms;
        (0..self.config.logs).all(fresh)
    }

    /// Whether [`Node::read_own`] answers.
    pub fn own_keys(&self) -> KeysShown {
        let is_fresh = |staleness| self.satisfies_staleness(staleness);
        if self.snapshots.is_installing() {
            KeysShown::Installing
        } else if self.config.follower_staleness.is_none_or(is_fresh) {
            KeysShown::Yes
        } else {
            KeysShown::TooOld
        }
    }

    /// Submits a read of all keys (DBSIZE, KEYS, SCAN) of what this replica has applied, leader or
    /// not: as old as it may be, without a bound where none is configured.
    pub fn read_own(&mut self, ticket: Ticket, query: &Query<'_>) {
        if self.own_keys() != KeysShown::Yes {
            let leader = self.logs[0].group.leader();
            let origin = Origin::Local(ticket);
            self.answers.push((origin, Outcome::NotLeader(leader)));
            return;
        }
        self.read_applied(ticket, query);
    }

    /// Submits a read of what this replica has applied, leader or not; refused if that is older
    /// than the configured staleness.
    pub fn read_stale(&mut self, ticket: Ticket, query: &Query<'_>) {
        let origin = Origin::Local(ticket);
        if !self.is_fresh_enough() {
            let leader = self.logs[0].group.leader();
            self.answers.push((origin, Outcome::NotLeader(leader)));
            return;
        }
        self.read_applied(ticket, query);
    }

    fn read_applied(&mut self, ticket: Ticket, query: &Query<'_>) {
        let origin = Origin::Local(ticket);
        let mut bytes = Vec::with_capacity(64);
        query.encode(&mut bytes);
        let read = Read::new(origin, bytes, 0, ReadBasis::Weak { until_us: 0 });
        if self.ask_store(None, read).is_err() {
            self.answers.push((origin, Outcome::Busy));
        }
    }

    pub(crate) fn submit_read_as(
        &mut self,
        origin: Origin,
        query: &Query<'_>,
        bytes: Vec<u8>,
        mode: ReadMode,
        terms: &[u64],
    ) {
        let logs = LogSet::of_query(query, self.logs.len());
        let how = match mode {
            // What walks through all keys is not for an entry, which every replica would carry out.
            ReadMode::Log if !cyclone_store::is_point_query(query) => ReadBasis::Index,
            ReadMode::Log => {
                let command = Command {
                    session: None,
                    operation: Operation::Read(query.clone()),
                };
                if let Some(refusal) = refuse_excess(&command.operation, self.config.allowed()) {
                    self.counters.refused_work += 1;
                    let refusal = self.check_leadership().err().unwrap_or(refusal);
                    return self.answers.push((origin, refusal));
                }
                return self.submit_write(logs, origin, &command);
            }
            ReadMode::Index => ReadBasis::Index,
            ReadMode::Lease => ReadBasis::Lease,
            ReadMode::Weak => ReadBasis::Weak {
                until_us: self.now.steady_us + WEAK_WAIT_US,
            },
        };
        // A leader that the client knows to have been replaced may not know it.
        //= cyclone §2
        let older = |log: usize| {
            let known = terms.get(log).copied().unwrap_or(0);
            self.logs[log].group.term() < known
        };
        if mode == ReadMode::Weak && logs.iter().any(older) {
            self.answers.push((origin, Outcome::NotLeader(None)));
            return;
        }
        self.submit_read(logs, origin, bytes, how);
    }

    /// Asks the store. `log` is the one log that the query is about, if it is one.
    pub(crate) fn ask_store(
        &mut self,
        log: Option<usize>,
        mut read: Read,
    ) -> Result<(), NodeError> {
        // Most were decoded when they were taken in; those written to a log's own mailbox were not.
        let Ok(query) = Query::decode(&read.query) else {
            self.answers.push((read.origin, Outcome::TooLarge));
            return Ok(());
        };
        let is_bound = !matches!(read.how, ReadBasis::Weak { .. });
        if let Some(only) = log
            && read.now_ms == 0
            && needs_wall_clock(&query, read.how)
        {
            read.now_ms = self.logs[only].time_ms();
        }
        let answer = match self.slow.read_budget(self.now.steady_us).is_exhausted() {
            true => Err(ApplyError::WouldBlock),
            false => (self.store).query_at(&query, read.now_ms, Mode::NonBlocking),
        };
        match answer {
            Ok(reply) => {
                self.slow.read_budget(self.now.steady_us).consume(&reply);
                self.answered(log, read, reply, false);
            }
            Err(ApplyError::WouldBlock) => {
                // It may take so long that another leader's checkpoint is there, which holds less
                // of one of the logs.
                let leadership_epoch = is_bound.then(|| self.leadership_epoch());
                self.defer_to_worker(SlowRead {
                    log,
                    read,
                    leadership_epoch,
                });
            }
            Err(ApplyError::ClockBehind) => self.advance_log_clock(log, read),
            Err(error) => self.read_refused(read.origin, error)?,
        }
        Ok(())
    }

    pub(crate) fn leadership_epoch(&self) -> LeadershipEpoch {
        LeadershipEpoch {
            terms: self.logs.iter().map(|log| log.group.term()).collect(),
            installed: self.counters.snapshots_installed,
        }
    }

    /// Whether this replica is what it was then, for a read of this log alone or of all.
    pub(crate) fn is_current(
        &self,
        leadership_epoch: &LeadershipEpoch,
        log: Option<usize>,
    ) -> bool {
        let now = self.leadership_epoch();
        let leads = match log {
            Some(log) => {
                self.logs[log].group.is_leader()
                    && now.terms.get(log) == leadership_epoch.terms.get(log)
            }
            None => self.leads() && now.terms == leadership_epoch.terms,
        };
        leads && now.installed == leadership_epoch.installed && !self.snapshots.is_installing()
    }

    /// Takes back a read that a worker has carried out. If this replica has led since it was asked,
    /// no other leader's entry has been applied that the worker may have seen: in one log, without
    /// what was acknowledged before it in another.
    pub(crate) fn read_done(
        &mut self,
        log: Option<usize>,
        read: Read,
        leadership_epoch: Option<&LeadershipEpoch>,
        result: Result<Reply, ApplyError>,
    ) -> Result<(), NodeError> {
        self.slow_read_done();
        if leadership_epoch.is_some_and(|leadership_epoch| !self.is_current(leadership_epoch, log))
        {
            let refusal = self.check_leadership().err().unwrap_or(Outcome::Busy);
            self.answers.push((read.origin, refusal));
            return Ok(());
        }
        match result {
            Err(ApplyError::ClockBehind) => self.advance_log_clock(log, read),
            Err(error) => self.read_refused(read.origin, error)?,
            Ok(reply) => self.answered(log, read, reply, true),
        }
        Ok(())
    }

    /// The store could not answer a read.
    ///
    /// # Errors
    /// It cannot go on.
    pub(crate) fn read_refused(
        &mut self,
        origin: Origin,
        error: ApplyError,
    ) -> Result<(), NodeError> {
        let outcome = match error {
            ApplyError::Damaged(_) => Outcome::Damaged,
            _ => Outcome::Busy,
        };
        self.note_refusal(error)?;
        self.answers.push((origin, outcome));
        Ok(())
    }

    /// The store has answered. `now_is_later`: this step's time lies behind the answer.
    fn answered(&mut self, log: Option<usize>, read: Read, reply: Reply, now_is_later: bool) {
        match log {
            Some(log)
                if read.how == ReadBasis::Lease && !planted::has(Bug::LeaseNotCheckedAfter) =>
            {
                let unchecked = LeaseReadReply {
                    log,
                    term: self.logs[log].group.term(),
                    read,
                    reply,
                };
                match now_is_later {
                    true => self.check_lease(unchecked),
                    // The clock is read once per step: the next one's time is behind the answer.
                    false => self.unchecked_lease_reads.push(unchecked),
                }
            }
            _ => self.answers.push((read.origin, Outcome::Done(reply))),
        }
    }

    /// Tells what was read under leases that still hold; reads the rest again.
    pub(crate) fn check_leases(&mut self) {
        for unchecked in std::mem::take(&mut self.unchecked_lease_reads) {
            self.check_lease(unchecked);
        }
    }

    fn check_lease(&mut self, unchecked: LeaseReadReply) {
        let LeaseReadReply {
            log,
            term,
            mut read,
            reply,
        } = unchecked;
        let physical = &mut self.logs[log];
        if physical.reads.lease.holds(self.now.steady_us, term) {
            self.answers.push((read.origin, Outcome::Done(reply)));
        } else if physical.group.is_leader() {
            read.how = ReadBasis::Index;
            physical.reads.submit(read);
        } else {
            let leader = physical.group.leader();
            self.answers.push((read.origin, Outcome::NotLeader(leader)));
        }
    }

    /// A key's time has come by the clock, and the log does not know: an empty command brings it
    /// the time, and the read waits for it.
    fn advance_log_clock(&mut self, log: Option<usize>, mut read: Read) {
        let Some(log) = log.filter(|log| self.logs[*log].group.is_leader()) else {
            let leader = self.logs[0].group.leader();
            self.answers.push((read.origin, Outcome::NotLeader(leader)));
            return;
        };
        self.write_own(log, Operation::Noop);
        let physical = &mut self.logs[log];
        let barrier = physical.barrier();
        // It takes the time anew: should the clock be set back before the command is stamped, the
        // log would never come to this one.
        read.now_ms = 0;
        physical.reads.wait_for(barrier, read);
    }

    /// Writes a command of the replica's own, which no client waits for.
    fn write_own(&mut self, log: usize, operation: Operation<'_>) {
        let command = Command {
            session: None,
            operation,
        };
        self.logs[log].write_bytes(Origin::Internal, |out| command.encode(out));
    }

    /// What leaders do about time: expired keys are removed, and the log's clock follows where
    /// followers are read.
    pub(crate) fn tick_store(&mut self) {
        if self.leads() {
            (0..self.logs.len()).for_each(|log| self.propose_log_time(log));
        }
    }

    /// Removes what the last sweeps have left, without waiting for upkeep: that comes too rarely
    /// where many keys expire.
    pub(crate) fn expire_due_keys(&mut self) {
        let now_us = self.now.steady_us;
        for log in 0..self.logs.len() {
            let own = &self.own_work[log];
            if own.sweep > 0 && own.next_us <= now_us && self.leads() {
                self.propose_log_time(log);
            }
        }
    }

    fn propose_log_time(&mut self, log: usize) {
        let clock_ms = self.store.clock_ms(self.logs[log].id);
        let now_ms = self.logs[log].time_ms().max(clock_ms);
        let staleness_ms = self.config.follower_staleness.map(|s| s.as_millis() as u64);
        let (physical, own) = (&self.logs[log], &mut self.own_work[log]);
        // One at a time.
        // The last one may have been refused, or be gone with what was not committed.
        let is_there = !physical.has_proposed_all() || own.last <= physical.group.last_index();
        let waits = physical.applied < own.last && is_there;
        if waits || !physical.has_room() {
            return;
        }
        let due = self.store.next_deadline(physical.id);
        let lags = staleness_ms.is_some_and(|most_ms| clock_ms + most_ms / 4 < now_ms);
        if due.is_some_and(|deadline| deadline <= now_ms) {
            let limit = (2 * own.sweep).clamp(LEAST_SWEEP, MOST_SWEEP);
            (own.sweep, own.next_us) = (limit, self.now.steady_us + SWEEP_US);
            self.write_own(log, Operation::Sweep { limit });
        } else {
            own.sweep = 0;
            if !lags {
                return;
            }
            self.write_own(log, Operation::Noop);
        }
        self.own_work[log].last = self.logs[log].barrier();
    }

    /// Refuses weak reads that have waited for too long.
    pub(crate) fn end_weak_reads(&mut self) {
        for log in 0..self.logs.len() {
            for read in self.logs[log].reads.late(self.now.steady_us) {
                self.answers.push((read.origin, Outcome::Busy));
            }
        }
    }

    /// With leases, a replica that has just started votes for no candidate until a lease that it
    /// may have promised is over.
    pub(crate) fn may_vote(&self) -> bool {
        let election_us = self.config.election.as_micros() as u64;
        !self.config.lease_reads || self.now.steady_us >= self.started_us + election_us
    }
}

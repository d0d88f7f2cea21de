//! Reads from the door to their answers: which way they take, what the store says, what is checked before it is told.
//!
//! | way | confirmed by | sees |
//! |---|---|---|
//! | index | a majority, after the read came (ReadIndex) | everything done before |
//! | log | being an entry (cyclone §2, quorum read) | everything done before |
//! | lease | the lease, when the read begins and again when it has been answered | everything done before |
//! | weak | nothing; waits for what is in the log (cyclone §2) | what its client was told, if the client's terms are no later |
//! | stale | nothing; on followers | what was done up to a stated time ago |

use cyclone_store::{ApplyError, Mode};
use cyclone_wire::client::ReadMode;
use cyclone_wire::command::{Command, Operation, Query};
use cyclone_wire::planted::{self, Bug};
use cyclone_wire::reply::Reply;

use crate::logset::LogSet;
use crate::node::{Node, NodeError};
use crate::reads::{How, Read};
use crate::requests::{Origin, Outcome, Ticket};
use crate::slow::{Reign, SlowRead};

/// How long a weak read waits for the entries it must see, in microseconds; then it is refused as "busy".
pub(crate) const WEAK_WAIT_US: u64 = 500_000;
/// Expired keys removed by one entry: twice as many as by the last one while it has left some behind.
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

/// Whether a read sees keys expire by the wall clock, which the log's clock has to reach first. Others go by the log's time: a key may show a
/// moment longer than it should, on all replicas alike. What walks through all keys does: some key or other expires at each moment, and
/// the log's clock would be behind each time.
pub(crate) fn goes_by_the_clock(query: &Query<'_>, how: How) -> bool {
    !matches!(how, How::Weak { .. }) && cyclone_store::names_its_keys(query)
}

/// A read under a lease that was answered by the store and is not told yet.
pub(crate) struct Unchecked {
    log: usize,
    term: u64,
    read: Read,
    reply: Reply,
}

impl Node {
    /// Submits a read from this process. `Weak` reads see what this replica answered before; for what another one answered,
    /// see [`ReadMode`].
    pub fn read_as(&mut self, ticket: Ticket, query: &Query<'_>, mode: ReadMode) {
        let mut bytes = Vec::with_capacity(64);
        query.encode(&mut bytes);
        self.submit_read_as(Origin::Local(ticket), query, bytes, mode, &[]);
    }

    /// Whether a read on this replica shows what was done up to the configured staleness ago, by this machine's clock.
    pub fn is_fresh_enough(&self) -> bool {
        let Some(staleness) = self.config.follower_staleness else {
            return false;
        };
        let staleness_ms = staleness.as_millis() as u64;
        // A log's clock that is ahead, as a leader's was, says nothing about what has reached this replica.
        let fresh = |log: u16| self.store.clock_ms(log).abs_diff(self.now.wall_ms) <= staleness_ms;
        (0..self.config.logs).all(fresh) && !self.snapshots.is_installing()
    }

    /// Submits a read of what this replica has applied, leader or not; refused if that is older than the configured staleness.
    pub fn read_stale(&mut self, ticket: Ticket, query: &Query<'_>) {
        let origin = Origin::Local(ticket);
        if !self.is_fresh_enough() {
            let leader = self.logs[0].group.leader();
            self.answers.push((origin, Outcome::NotLeader(leader)));
            return;
        }
        let mut bytes = Vec::with_capacity(64);
        query.encode(&mut bytes);
        let read = Read::new(origin, bytes, 0, How::Weak { until_us: 0 });
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
            ReadMode::Log if !cyclone_store::names_its_keys(query) => How::Index,
            ReadMode::Log => {
                let command = Command {
                    session: None,
                    operation: Operation::Read(query.clone()),
                };
                return self.submit_write(logs, origin, &command);
            }
            ReadMode::Index => How::Index,
            ReadMode::Lease => How::Lease,
            ReadMode::Weak => How::Weak {
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
        // Most were decoded when they were taken in; whoever writes to a log's own letter box has not.
        let Ok(query) = Query::decode(&read.query) else {
            self.answers.push((read.origin, Outcome::TooLarge));
            return Ok(());
        };
        let is_bound = !matches!(read.how, How::Weak { .. });
        if log.is_some() && read.now_ms == 0 && goes_by_the_clock(&query, read.how) {
            read.now_ms = self.now.wall_ms;
        }
        let answer = match self.slow.portion(self.now.steady_us).is_spent() {
            true => Err(ApplyError::WouldBlock),
            false => (self.store).query_at(&query, read.now_ms, Mode::NonBlocking),
        };
        match answer {
            Ok(reply) => {
                self.slow.portion(self.now.steady_us).spend(&reply);
                self.answered(log, read, reply, false);
            }
            Err(ApplyError::WouldBlock) => {
                // It may take so long that another leader's checkpoint is there, which holds less of one of the logs.
                let reign = is_bound.then(|| self.reign());
                self.read_slowly(SlowRead { log, read, reign });
            }
            Err(ApplyError::ClockBehind) => self.move_clock(log, read),
            Err(ApplyError::NoSpace(_)) => self.answers.push((read.origin, Outcome::Busy)),
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    pub(crate) fn reign(&self) -> Reign {
        Reign {
            terms: self.logs.iter().map(|log| log.group.term()).collect(),
            installed: self.counters.snapshots_installed,
        }
    }

    /// Whether this replica is what it was then, for a read of this log alone or of all.
    pub(crate) fn is_still(&self, reign: &Reign, log: Option<usize>) -> bool {
        let now = self.reign();
        let leads = match log {
            Some(log) => {
                self.logs[log].group.is_leader() && now.terms.get(log) == reign.terms.get(log)
            }
            None => self.leads() && now.terms == reign.terms,
        };
        leads && now.installed == reign.installed && !self.snapshots.is_installing()
    }

    /// Takes back a read that a worker has carried out. If this replica has led since it was asked, no other leader's entry has been applied that
    /// the worker may have seen: in one log, without what was acknowledged before it in another.
    pub(crate) fn read_done(
        &mut self,
        log: Option<usize>,
        read: Read,
        reign: Option<&Reign>,
        result: Result<Reply, ApplyError>,
    ) -> Result<(), NodeError> {
        self.slow_read_done();
        if reign.is_some_and(|reign| !self.is_still(reign, log)) {
            let refusal = self.check_leadership().err().unwrap_or(Outcome::Busy);
            self.answers.push((read.origin, refusal));
            return Ok(());
        }
        match result {
            Err(ApplyError::ClockBehind) => self.move_clock(log, read),
            Err(ApplyError::NoSpace(_)) => self.answers.push((read.origin, Outcome::Busy)),
            result => self.answered(log, read, result?, true),
        }
        Ok(())
    }

    /// The store has answered. `now_is_later`: this step's time lies behind the answer.
    fn answered(&mut self, log: Option<usize>, read: Read, reply: Reply, now_is_later: bool) {
        match log {
            Some(log) if read.how == How::Lease && !planted::has(Bug::LeaseNotCheckedAfter) => {
                let unchecked = Unchecked {
                    log,
                    term: self.logs[log].group.term(),
                    read,
                    reply,
                };
                match now_is_later {
                    true => self.check_lease(unchecked),
                    // The clock is looked at once per step: the next one's time is behind the answer.
                    false => self.unchecked.push(unchecked),
                }
            }
            _ => self.answers.push((read.origin, Outcome::Done(reply))),
        }
    }

    /// Tells what was read under leases that still hold; reads the rest again.
    pub(crate) fn check_leases(&mut self) {
        for unchecked in std::mem::take(&mut self.unchecked) {
            self.check_lease(unchecked);
        }
    }

    fn check_lease(&mut self, unchecked: Unchecked) {
        let Unchecked {
            log,
            term,
            mut read,
            reply,
        } = unchecked;
        let physical = &mut self.logs[log];
        if physical.reads.lease.holds(self.now.steady_us, term) {
            self.answers.push((read.origin, Outcome::Done(reply)));
        } else if physical.group.is_leader() {
            read.how = How::Index;
            physical.reads.submit(read);
        } else {
            let leader = physical.group.leader();
            self.answers.push((read.origin, Outcome::NotLeader(leader)));
        }
    }

    /// A key's time has come by the clock, and the log does not know: an empty command brings it the time, and the read waits for it.
    fn move_clock(&mut self, log: Option<usize>, mut read: Read) {
        let Some(log) = log.filter(|log| self.logs[*log].group.is_leader()) else {
            let leader = self.logs[0].group.leader();
            self.answers.push((read.origin, Outcome::NotLeader(leader)));
            return;
        };
        self.write_own(log, Operation::Noop);
        let physical = &mut self.logs[log];
        let barrier = physical.barrier();
        // It takes the time anew: should the clock be set back before the command is stamped, the log would never come to this one.
        read.now_ms = 0;
        physical.reads.wait_for(barrier, read);
    }

    /// Writes a command of the replica's own, which nobody waits for.
    fn write_own(&mut self, log: usize, operation: Operation<'_>) {
        let command = Command {
            session: None,
            operation,
        };
        self.logs[log].write_bytes(self.now.wall_ms, Origin::Nobody, |out| command.encode(out));
    }

    /// What leaders do about time: expired keys are removed, and the log's clock follows where followers are read.
    pub(crate) fn keep_time(&mut self) {
        if self.leads() {
            (0..self.logs.len()).for_each(|log| self.keep_time_of(log));
        }
    }

    /// Removes what the last sweeps have left, without waiting for upkeep: that comes too rarely where many keys expire.
    pub(crate) fn sweep_on(&mut self) {
        let now_us = self.now.steady_us;
        for log in 0..self.logs.len() {
            let own = &self.own_work[log];
            if own.sweep > 0 && own.next_us <= now_us && self.leads() {
                self.keep_time_of(log);
            }
        }
    }

    fn keep_time_of(&mut self, log: usize) {
        let now_ms = self.now.wall_ms;
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
        let lags = staleness_ms
            .is_some_and(|most_ms| self.store.clock_ms(physical.id) + most_ms / 4 < now_ms);
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

    /// With leases, a replica that has just started votes for nobody until a lease that it may have promised is over.
    pub(crate) fn may_vote(&self) -> bool {
        let election_us = self.config.election.as_micros() as u64;
        !self.config.lease_reads || self.now.steady_us >= self.started_us + election_us
    }
}

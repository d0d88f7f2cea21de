//! The replica as a step function. [`Node::step`] does everything that is ready: packets, timers,
//! finished work of threads, proposals, persistence, sending, applying, answering. It never blocks
//! and reads no clock.

mod error;
mod incoming;
mod intake;

use std::collections::VecDeque;
use std::sync::Arc;

use cyclone_consensus::{
    Colocation, EarlyAppends, OutMessage, Outbox, StepError, persist_all, persist_all_pipelined,
};
use cyclone_packet::{Message, Peer, Port};
use cyclone_pmem::{Payload, Pool, Survives};
use cyclone_store::{Applied, ApplyError, StateMachine};
use cyclone_wire::client::ReadMode;
use cyclone_wire::command::{Command, Operation, Query};
use cyclone_wire::planted::{self, Bug};
use cyclone_wire::raftmsg::RaftKind;
use cyclone_wire::reply::Reply;

use crate::answers::{LeaseReadReply, OwnWork};
use crate::archive::Archive;
use crate::backup::{BACKUP, Backups};
use crate::bootstrap::Bootstrap;
use crate::clients::ClientReplies;
use crate::clock::MonotonicClock;
use crate::config::Config;
use crate::contacts::Contacts;
use crate::gang::Gangs;
use crate::health::Health;
use crate::joined::JoinedReads;
use crate::log_loop::{LoanedLogs, LogLoop, Request};
use crate::logset::LogSet;
use crate::membership::Membership;
use crate::physical::PhysicalLog;
use crate::reads::{Read, ReadBasis};
use crate::requests::{BatchBuilder, Origin, Outcome, Ticket, refuse_excess};
use crate::send::{self, drop_superseded};
use crate::slow::{LeadershipEpoch, SlowReads};
use crate::snapshot::{SNAPSHOTS, Snapshots};
use crate::status::Counters;
use crate::ticking::TickTimer;
use crate::wall_clocks::ClockReports;
use crate::workers::Workers;

pub use error::NodeError;
pub(crate) use incoming::{BACKLOG, FEW, RECEIVE_BURST, RECEIVE_BYTES, STEP_REQUESTS};

/// Wall clock and steady clock of one step.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// Microseconds of a clock that never goes back and runs on while the machine sleeps.
    pub steady_us: u64,
    /// Milliseconds since 1970.
    pub wall_ms: u64,
}

/// What a worker thread brings back.
pub(crate) enum Done {
    Applied {
        log: usize,
        result: Result<Applied, ApplyError>,
    },
    GangApplied {
        entries: Vec<(u16, u64)>,
        apply: bool,
        result: Result<Vec<Reply>, ApplyError>,
    },
    Read {
        log: Option<usize>,
        read: Read,
        /// What this replica was when it was asked, where that matters.
        leadership_epoch: Option<LeadershipEpoch>,
        result: Result<Reply, ApplyError>,
    },
    /// A directory that is not needed any more is gone.
    Discarded,
    Digest {
        ticket: Ticket,
        result: Result<String, ApplyError>,
    },
    Flushed(Result<(), ApplyError>),
    Snapshot(crate::snapshot::Done),
    Backup(crate::backup::Done),
}

/// What is found out at a start and does not change.
pub(crate) struct BootInfo {
    pub(crate) tick_us: u64,
    /// Differs from boot to boot.
    pub(crate) salt: u64,
    /// Ticks of an election time-out.
    pub(crate) election_ticks: u32,
    pub(crate) survives: Survives,
    /// What the region is, for people.
    pub(crate) region: String,
    /// Where received packets lie.
    pub(crate) pool: Pool,
    pub(crate) bootstrap: Bootstrap,
}

/// One replica of a cluster.
pub struct Node {
    pub(crate) config: Config,
    pub(crate) port: Port,
    pub(crate) logs: Vec<PhysicalLog>,
    pub(crate) gangs: Gangs,
    pub(crate) colocation: Colocation,
    /// To whom a replica that stops hands over.
    pub(crate) successor: Option<u64>,
    pub(crate) joined: JoinedReads,
    /// Where the logs ended, noted periodically: the sum of their last indexes, and each.
    pub(crate) marks: VecDeque<(u64, Vec<u64>)>,
    /// The logs' terms then, added up.
    pub(crate) marks_terms: u64,
    /// Messages of this step.
    pub(crate) outgoing: Vec<OutMessage>,
    pub(crate) store: Arc<dyn StateMachine>,
    pub(crate) workers: Workers<Done>,
    pub(crate) snapshots: Snapshots,
    pub(crate) backups: Backups,
    pub(crate) archive: Option<Archive>,
    pub(crate) membership: Membership,
    pub(crate) contacts: Contacts,
    pub(crate) bootstrap: Bootstrap,
    /// Reports that have come and were not read yet, and who has sent them.
    pub(crate) bootstrap_inbox: Vec<(u64, Vec<u8>)>,
    /// Per log its last entry at the start.
    pub(crate) began_at: Vec<u64>,
    /// Whether everything that was committed at the start has been applied.
    pub(crate) caught_up: bool,
    /// Who knows this replica although it knows nothing, and what.
    pub(crate) rejoin_conflict: Option<(u64, cyclone_wire::membership::Known)>,
    pub(crate) counters: Counters,
    pub(crate) survives: Survives,
    pub(crate) region_description: String,
    pub(crate) pool: Pool,
    /// Reads under leases whose answers are to be checked by the next step's clock.
    pub(crate) unchecked_lease_reads: Vec<LeaseReadReply>,
    pub(crate) slow: SlowReads,
    /// Per log the last term in which this replica led.
    pub(crate) led: Vec<u64>,
    /// Per log what the replica writes without a client.
    pub(crate) own_work: Vec<OwnWork>,
    /// The first step's time.
    pub(crate) started_us: u64,
    pub(crate) clients: ClientReplies,
    /// The logs' own loops, if they have any.
    pub(crate) loaned_logs: LoanedLogs,
    /// Those loops, until somebody runs them.
    pub(crate) lanes: Vec<LogLoop>,
    inbox: Vec<Message>,
    /// Clients' requests that were received and not processed yet.
    backlog: VecDeque<(u16, Peer, Payload)>,
    pub(crate) answers: Vec<(Origin, Outcome)>,
    pub(crate) flushing: bool,
    /// The store is not asked to flush before.
    pub(crate) flush_not_before_us: u64,
    pub(crate) completions: Vec<(Ticket, Outcome)>,
    pub(crate) health: Health,
    pub(crate) next_handover_us: u64,
    pub(crate) ticking: TickTimer,
    pub(crate) next_housekeeping_us: u64,
    pub(crate) next_touch_us: u64,
    pub(crate) active_us: u64,
    /// A client of this process has had work since the last step.
    pub(crate) has_client: bool,
    pub(crate) steady: MonotonicClock,
    pub(crate) clock_reports: ClockReports,
    pub(crate) now: Now,
}

/// How often trimming, time-outs and snapshot deadlines are looked after.
const UPKEEP_US: u64 = 20_000;
impl Node {
    pub(crate) fn assemble(
        config: Config,
        port: Port,
        logs: Vec<PhysicalLog>,
        store: Arc<dyn StateMachine>,
        workers: Workers<Done>,
        boot: BootInfo,
    ) -> std::io::Result<Node> {
        let BootInfo {
            tick_us,
            salt,
            election_ticks,
            survives,
            region,
            pool,
            bootstrap,
        } = boot;
        let clients = ClientReplies::new(config.network.burst, port.max_message(), config.logs);
        let snapshots = Snapshots::new(config.data.join(SNAPSHOTS), salt & 0xffff_ffff)?;
        let backups = Backups::new(config.data.join(BACKUP), salt)?;
        let terms: Vec<u64> = logs.iter().map(|log| log.applied_term).collect();
        store.set_replica_id(config.id);
        Ok(Node {
            membership: Membership::new(&config),
            contacts: Contacts::default(),
            bootstrap,
            bootstrap_inbox: Vec::new(),
            began_at: logs.iter().map(|log| log.group.last_index()).collect(),
            caught_up: false,
            rejoin_conflict: None,
            unchecked_lease_reads: Vec::new(),
            slow: SlowReads::default(),
            led: vec![0; logs.len()],
            own_work: vec![OwnWork::default(); logs.len()],
            started_us: 0,
            health: Health::new(logs.len()),
            next_handover_us: 0,
            gangs: Gangs::new(config.id, salt, &terms),
            colocation: Colocation::new(config.id, logs.len(), election_ticks),
            successor: None,
            joined: JoinedReads::default(),
            marks: VecDeque::new(),
            marks_terms: 0,
            outgoing: Vec::new(),
            config,
            port,
            logs,
            store,
            workers,
            snapshots,
            backups,
            archive: None,
            counters: Counters::default(),
            survives,
            region_description: region,
            pool,
            flushing: false,
            flush_not_before_us: 0,
            clients,
            loaned_logs: LoanedLogs::new(Vec::new()),
            lanes: Vec::new(),
            inbox: Vec::new(),
            backlog: VecDeque::new(),
            answers: Vec::new(),
            completions: Vec::new(),
            ticking: TickTimer::new(tick_us),
            next_housekeeping_us: 0,
            next_touch_us: 0,
            active_us: 0,
            has_client: false,
            steady: MonotonicClock::default(),
            clock_reports: ClockReports::default(),
            now: Now {
                steady_us: 0,
                wall_ms: 0,
            },
        })
    }

    /// Submits a write from this process. Its outcome comes back by [`Node::take_completions`]
    /// under `ticket`.
    pub fn write(&mut self, ticket: Ticket, operation: &Operation<'_>) {
        self.counters.writes += 1;
        if let Some(refusal) = refuse_excess(operation, self.config.allowed()) {
            self.counters.refused_work += 1;
            let refusal = self.check_leadership().err().unwrap_or(refusal);
            return self.answers.push((Origin::Local(ticket), refusal));
        }
        let logs = LogSet::of(operation, self.logs.len());
        let command = Command {
            session: None,
            operation: operation.clone(),
        };
        self.submit_write(logs, Origin::Local(ticket), &command);
    }

    /// Takes in a command whose bytes are copied.
    pub(crate) fn submit_write(&mut self, logs: LogSet, origin: Origin, command: &Command<'_>) {
        match (self.admit_write(logs), logs.single()) {
            (Err(outcome), _) => self.answers.push((origin, outcome)),
            (Ok(()), Some(log)) if self.loaned_logs.log_handles.is_empty() => {
                self.logs[log].write_bytes(origin, |out| command.encode(out));
            }
            (Ok(()), Some(log)) => {
                let mut bytes = Vec::new();
                command.encode(&mut bytes);
                self.submit(log, Request::Write(origin, Payload::from_vec(bytes)));
            }
            (Ok(()), None) => {
                let mut builder = BatchBuilder::new(&self.config);
                let mut bytes = Vec::new();
                command.encode(&mut bytes);
                builder.push_payload(origin, &Payload::from_vec(bytes));
                self.begin_gang(logs, builder);
            }
        }
    }

    /// Submits a linearizable read from this process.
    pub fn read(&mut self, ticket: Ticket, query: &Query<'_>) {
        self.read_as(ticket, query, ReadMode::Index);
    }

    /// Takes the outcomes of what this process submitted.
    pub fn take_completions(&mut self) -> std::vec::Drain<'_, (Ticket, Outcome)> {
        self.completions.drain(..)
    }

    pub(crate) fn submit_read(
        &mut self,
        logs: LogSet,
        origin: Origin,
        query: Vec<u8>,
        how: ReadBasis,
    ) {
        self.counters.reads += 1;
        match (self.admit(logs), logs.single()) {
            (Err(outcome), _) => self.answers.push((origin, outcome)),
            (Ok(()), Some(log)) => self.submit(log, Request::Read { origin, query, how }),
            (Ok(()), None) => self.join_read(logs, origin, query, how),
        }
    }

    /// A request for one log, which has been admitted.
    pub(crate) fn submit(&mut self, log: usize, request: Request) {
        if let Some(request) = self.delegate(log, request) {
            // What was left to the log's loop before came before.
            self.drain_requests(LogSet::one(log));
            self.logs[log].take_in(request);
        }
    }

    /// Whether the logs take another request; otherwise the refusal.
    pub(crate) fn admit(&mut self, logs: LogSet) -> Result<(), Outcome> {
        self.check_leadership()?;
        let full = |log: usize| {
            let physical = &self.logs[log];
            let pending = physical.pending() + self.delegated(log);
            pending >= self.config.max_pending || !physical.has_room()
        };
        match logs.iter().any(full) {
            true => Err(Outcome::Busy),
            false => Ok(()),
        }
    }

    /// The same for writes: none is taken in while the store or flash makes no progress.
    pub(crate) fn admit_write(&mut self, logs: LogSet) -> Result<(), Outcome> {
        self.admit(logs)?;
        match logs.iter().any(|log| self.logs[log].is_stalled()) {
            true => Err(Outcome::Busy),
            false => Ok(()),
        }
    }

    /// Whether some log takes little more: a caller that can hold its work back should.
    pub fn is_backpressured(&self) -> bool {
        let most = self.config.max_pending / 4 * 3;
        let pressed = |log: &PhysicalLog| {
            log.pending() + self.delegated(usize::from(log.id)) > most || log.is_backpressured()
        };
        self.logs.iter().any(pressed)
    }

    /// Does everything that is ready at `now`. Answers how much was done; 0 means that the loop may
    /// wait until a descriptor is ready or [`Node::deadline_us`] has come.
    ///
    /// # Errors
    /// What the replica cannot live on with.
    pub fn step(&mut self, now: Now) -> Result<usize, NodeError> {
        let (before, last_us) = (self.steady.clone(), self.now.steady_us);
        self.now = Now {
            steady_us: self.steady.read(now.steady_us),
            wall_ms: now.wall_ms,
        };
        // It goes back, also by what a log's own loop has read since: what it says of a lease
        // cannot be believed either.
        if now.steady_us < before.machine_us(last_us) || self.steady.has_stepped_back_since(&before)
        {
            self.logs.iter_mut().for_each(PhysicalLog::revoke_lease);
        }
        let now = self.now;
        for log in &mut self.logs {
            log.begin_step(now, &*self.store);
        }
        if std::mem::take(&mut self.has_client) {
            self.active_us = now.steady_us;
        }
        if self.started_us == 0 {
            self.started_us = now.steady_us.max(1);
        }
        self.check_leases();
        let mut work = self.drain_mailboxes()?;
        work += self.receive()?;
        for (from, report) in std::mem::take(&mut self.bootstrap_inbox) {
            self.take_report(from, &report)?;
        }
        work += self.collect()?;
        self.tick();
        work += self.advance()?;
        work += self.feed_archive();
        self.expire_due_keys();
        if now.steady_us >= self.next_housekeeping_us {
            self.next_housekeeping_us = now.steady_us + UPKEEP_US;
            self.housekeeping()?;
        }
        work += self.answer()?;
        // Now that everybody has what they wait for.
        for log in &mut self.logs {
            work += usize::from(log.group.drain_flash(now.steady_us));
        }
        self.skip_ticks();
        Ok(work)
    }

    /// Whether something waits for the port's queue and goes on soon.
    pub(crate) fn has_deferred_sends(&self) -> bool {
        self.port.has_deferred_sends(self.now.steady_us)
    }

    /// When [`Node::step`] wants to be called again at the latest, in microseconds of the steady
    /// clock.
    pub fn deadline_us(&self) -> u64 {
        let behind = !self.backlog.is_empty() || self.may_apply_more();
        if behind || !self.unchecked_lease_reads.is_empty() {
            return self.steady.machine_us(self.now.steady_us);
        }
        let pending = self.logs.iter().any(|log| log.reads.is_waiting_to_ask());
        let retry = if pending {
            self.now.steady_us + 1000
        } else {
            u64::MAX
        };
        let timers = self.ticking.deadline_us().min(retry);
        let timers = timers.min(self.flash_deadline_us());
        let first = self
            .port
            .next_timeout()
            .map_or(timers, |port| timers.min(port));
        self.steady.machine_us(first)
    }

    /// When a client last had work for this replica; the polling policy looks again at once only
    /// near it.
    pub fn active_us(&self) -> u64 {
        self.steady.machine_us(self.active_us)
    }

    /// How often the loops had to be helped to their CPU so far.
    pub(crate) fn note_boosts(&mut self, times: u64) {
        self.counters.helped = times;
    }

    /// Moves the logs forward: proposals, persistence, sending, commitment, apply, reads.
    pub(crate) fn advance(&mut self) -> Result<usize, NodeError> {
        self.propose();
        let mut work = 0;
        for log in 0..self.logs.len() {
            self.ask_reads(log);
        }
        work += self.persist()?;
        self.send()?;
        if self.snapshots.is_installing() && !planted::has(Bug::AppliesWhileInstalling) {
            return Ok(work);
        }
        for log in &mut self.logs {
            work += log.replay(&mut self.gangs.gang_table)?;
        }
        self.apply()?;
        for log in 0..self.logs.len() {
            self.execute_reads(log)?;
        }
        Ok(work + usize::from(self.may_apply_more()))
    }

    fn ask_reads(&mut self, log: usize) {
        let physical = &mut self.logs[log];
        if physical.group.is_leader() {
            self.led[log] = physical.group.term();
        }
        physical.ask_reads(self.now.steady_us);
    }

    /// Makes a step of all logs durable, with the fences of one, and takes in what it gives.
    //= cyclone §4.2
    fn persist(&mut self) -> Result<usize, NodeError> {
        let mut work = self.poll_flash()?;
        loop {
            // Behind what is to be sent already nothing goes ahead, so that appends keep their
            // order.
            let may_send = self.outgoing.is_empty() && self.loaned_logs.forwarded.is_empty();
            let (port, now_us) = (&mut self.port, self.now.steady_us);
            let mut sent = Ok(());
            let send = |ahead: &[EarlyAppends<'_>]| sent = send::ahead(port, now_us, ahead);
            let logs = self.logs.iter_mut().enumerate();
            let ready = logs.filter_map(|(log, of)| Some((log, of.group.take_ready()?)));
            // Typestate: all other messages exist only once their entries and hard state are
            // durable.
            let outboxes = match may_send {
                true => persist_all_pipelined(ready, send),
                false => persist_all(ready),
            };
            sent.map_err(NodeError::Port)?;
            if outboxes.is_empty() {
                break;
            }
            work += outboxes.len();
            let mut elected = false;
            for (log, outbox) in outboxes {
                let outbox = outbox?;
                elected |= outbox.leader_change.is_some();
                self.persisted(log, outbox);
            }
            if elected {
                self.colocate_leaders(0);
            }
        }
        Ok(work + self.poll_flash()?)
    }

    /// Takes in what a log's step gave, which is durable.
    fn persisted(&mut self, log: usize, mut outbox: Outbox) {
        for &(context, index) in &outbox.read_states {
            self.logs[log].reads.confirm(context, index);
        }
        self.post(std::mem::take(&mut outbox.messages));
        let gang_table = &mut self.gangs.gang_table;
        self.logs[log].committed(&mut outbox, gang_table, &mut self.answers);
    }

    fn execute_reads(&mut self, log: usize) -> Result<(), NodeError> {
        while let Some(read) = self.logs[log].next_read() {
            self.execute_read(log, read)?;
        }
        Ok(())
    }

    /// Keeps one log's messages for the end of the step.
    pub(crate) fn post(&mut self, mut messages: Vec<OutMessage>) {
        drop_superseded(&mut messages);
        let offers = |message: &&OutMessage| message.header.kind == RaftKind::Snapshot;
        for offer in messages.iter().filter(offers) {
            self.offering(offer.to);
        }
        self.outgoing.append(&mut messages);
    }

    /// Takes back what the worker threads have finished.
    fn collect(&mut self) -> Result<usize, NodeError> {
        let mut work = 0;
        while let Some(done) = self.workers.poll() {
            work += 1;
            match done {
                Done::Applied { .. } if planted::has(Bug::WorkerForgotten) => {}
                // They are still at the front, and will be given to a worker again.
                Done::Applied {
                    log,
                    result: Err(error @ (ApplyError::NoSpace(_) | ApplyError::Damaged(_))),
                } => self.logs[log].halt_apply(Some(error)),
                Done::GangApplied {
                    entries,
                    result: Err(error @ (ApplyError::NoSpace(_) | ApplyError::Damaged(_))),
                    ..
                } => self.halt_gang(&entries, error),
                Done::Applied { log, result } => {
                    self.logs[log].finish_job(result?, &mut self.answers)
                }
                Done::GangApplied {
                    entries,
                    apply,
                    result,
                } => self.gang_applied(&entries, apply, result?),
                Done::Read {
                    log,
                    read,
                    leadership_epoch,
                    result,
                } => self.read_done(log, read, leadership_epoch.as_ref(), result)?,
                Done::Digest { ticket, result } => self.digest_done(ticket, result)?,
                Done::Flushed(result) => self.flushed(result)?,
                Done::Snapshot(done) => self.snapshot_done(done)?,
                Done::Backup(done) => self.backup_done(done),
                Done::Discarded => {}
            }
        }
        Ok(work)
    }

    pub(crate) fn now_us(&self) -> u64 {
        self.now.steady_us
    }

    /// Hands out answers: to this process as completions, to native clients as one message each.
    fn answer(&mut self) -> Result<usize, NodeError> {
        let mut work = self.answers.len();
        let leads = self.leads();
        // With the terms: a client tells by them that this is news.
        let up_to_date = |(log, led): (&PhysicalLog, &u64)| log.group.term() == *led;
        if leads && self.logs.iter().zip(&self.led).all(up_to_date) {
            work += self.clients.announce();
        }
        let mut answers = std::mem::take(&mut self.answers);
        for (origin, outcome) in answers.drain(..) {
            let origin = self.answers_for(origin);
            if !matches!(origin, None | Some(Origin::Joined(_) | Origin::Internal)) {
                self.counters.note_outcome(&outcome);
            }
            match origin {
                Some(Origin::Local(ticket)) => self.completions.push((ticket, outcome)),
                Some(origin @ Origin::Native { door, .. }) => {
                    if !leads && door == 0 && !matches!(outcome, Outcome::Done(_)) {
                        self.clients.note_redirected(origin);
                    }
                    self.send_outcome(origin, outcome);
                }
                Some(Origin::Direct { log, ticket }) => self.complete_direct(log, ticket, outcome),
                Some(Origin::Joined(_) | Origin::Internal) | None => {}
            }
        }
        self.answers = answers;
        self.clients
            .flush(self.now.steady_us, &self.led, &mut self.port)
            .map_err(NodeError::Port)?;
        Ok(work)
    }
}

//! The replica as a step function. [`Node::step`] does everything that is ready: packets, timers, finished work of
//! threads, proposals, persistence, sending, applying, answering. It never blocks and reads no clock.

use std::sync::Arc;

use cyclone_consensus::{Outbox, StepError};
use cyclone_packet::{Message, Outgoing, Peer, Port};
use cyclone_pmem::{Payload, Pool, Survives};
use cyclone_store::{Applied, ApplyError, Mode, StateMachine};
use cyclone_wire::client::Status;
use cyclone_wire::command::{Command, Operation, Query};
use cyclone_wire::envelope;
use cyclone_wire::planted::{self, Bug};
use cyclone_wire::raftmsg::{RaftKind, RaftMessage};
use cyclone_wire::reply::Reply;

use crate::clients::ClientReplies;
use crate::clock::Steady;
use crate::config::Config;
use crate::physical::PhysicalLog;
use crate::reads::Read;
use crate::requests::{Origin, Outcome, Ticket};
use crate::snapshot::Snapshots;
use crate::status::Counters;
use crate::workers::Workers;

/// Wall clock and steady clock of one step.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// Microseconds of a clock that never goes back and runs on while the machine sleeps.
    pub steady_us: u64,
    /// Milliseconds since 1970; stamped into entries.
    pub wall_ms: u64,
}

/// Why a replica cannot go on. The process should end; a restart recovers.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// The store failed in a way that a retry cannot mend.
    #[error("the store failed: {0}")]
    Store(#[from] ApplyError),
    /// The log or Raft failed.
    #[error("the log failed: {0}")]
    Consensus(#[from] cyclone_consensus::ConsensusError),
    /// The packet port failed.
    #[error("the packet port failed: {0}")]
    Port(std::io::Error),
}

/// What a worker thread brings back.
pub(crate) enum Done {
    Applied {
        log: usize,
        result: Result<Applied, ApplyError>,
    },
    Read {
        origin: Origin,
        result: Result<Reply, ApplyError>,
    },
    Digest {
        ticket: Ticket,
        result: Result<String, ApplyError>,
    },
    Flushed(Result<(), ApplyError>),
    Snapshot(crate::snapshot::Done),
}

/// What is found out at a start and does not change.
pub(crate) struct Boot {
    pub(crate) tick_us: u64,
    /// Differs from boot to boot.
    pub(crate) salt: u64,
    pub(crate) survives: Survives,
    /// What the region is, for people.
    pub(crate) region: String,
    /// Where received packets lie.
    pub(crate) pool: Pool,
}

/// One replica of a cluster.
pub struct Node {
    pub(crate) config: Config,
    pub(crate) port: Port,
    pub(crate) logs: Vec<PhysicalLog>,
    pub(crate) store: Arc<dyn StateMachine>,
    pub(crate) workers: Workers<Done>,
    pub(crate) snapshots: Snapshots,
    pub(crate) counters: Counters,
    pub(crate) survives: Survives,
    pub(crate) region_description: String,
    pub(crate) pool: Pool,
    clients: ClientReplies,
    inbox: Vec<Message>,
    pub(crate) answers: Vec<(Origin, Outcome)>,
    pub(crate) flushing: bool,
    pub(crate) completions: Vec<(Ticket, Outcome)>,
    pub(crate) next_handover_us: u64,
    next_tick_us: u64,
    next_upkeep_us: u64,
    pub(crate) next_touch_us: u64,
    tick_us: u64,
    pub(crate) active_us: u64,
    steady: Steady,
    pub(crate) now: Now,
}

/// How often trimming, time-outs and snapshot deadlines are looked after.
const UPKEEP_US: u64 = 20_000;
/// Messages taken from the port in one step.
const RECEIVE_BURST: usize = 64;

impl Node {
    pub(crate) fn assemble(
        config: Config,
        port: Port,
        logs: Vec<PhysicalLog>,
        store: Arc<dyn StateMachine>,
        workers: Workers<Done>,
        boot: Boot,
    ) -> std::io::Result<Node> {
        let Boot {
            tick_us,
            salt,
            survives,
            region,
            pool,
        } = boot;
        let snapshots = Snapshots::new(config.data.join("snapshots"), salt)?;
        Ok(Node {
            config,
            port,
            logs,
            store,
            workers,
            snapshots,
            counters: Counters::default(),
            survives,
            region_description: region,
            pool,
            flushing: false,
            clients: ClientReplies::default(),
            inbox: Vec::new(),
            answers: Vec::new(),
            completions: Vec::new(),
            next_handover_us: 0,
            next_tick_us: 0,
            next_upkeep_us: 0,
            next_touch_us: 0,
            tick_us,
            active_us: 0,
            steady: Steady::default(),
            now: Now {
                steady_us: 0,
                wall_ms: 0,
            },
        })
    }

    /// Submits a write from this process. Its outcome comes back by [`Node::take_completions`] under `ticket`.
    pub fn write(&mut self, ticket: Ticket, operation: &Operation<'_>) {
        self.counters.writes += 1;
        let origin = Origin::Local(ticket);
        let log = self.log_of(operation.key());
        match self.admit(log) {
            Ok(()) => {
                let command = Command {
                    session: None,
                    operation: operation.clone(),
                };
                self.logs[log].write_bytes(self.now.wall_ms, origin, |out| command.encode(out));
            }
            Err(outcome) => self.answers.push((origin, outcome)),
        }
    }

    /// Submits a linearizable read from this process.
    pub fn read(&mut self, ticket: Ticket, query: &Query<'_>) {
        let mut bytes = Vec::with_capacity(64);
        query.encode(&mut bytes);
        let log = self.log_of(query.key());
        self.submit_read(log, Origin::Local(ticket), bytes);
    }

    /// Takes the outcomes of what this process submitted.
    pub fn take_completions(&mut self) -> std::vec::Drain<'_, (Ticket, Outcome)> {
        self.completions.drain(..)
    }

    /// The physical log that a key lives in: its Redis slot modulo the number of logs.
    //= cyclone §5
    fn log_of(&self, key: Option<&[u8]>) -> usize {
        key.map_or(0, |key| {
            usize::from(cyclone_wire::slot::slot(key)) % self.logs.len()
        })
    }

    fn submit_read(&mut self, log: usize, origin: Origin, query: Vec<u8>) {
        self.counters.reads += 1;
        match self.admit(log) {
            Ok(()) => {
                let barrier = self.logs[log].barrier();
                self.logs[log].reads.submit(Read {
                    origin,
                    query,
                    barrier,
                });
            }
            Err(outcome) => self.answers.push((origin, outcome)),
        }
    }

    /// Whether a log takes another request; otherwise the refusal.
    fn admit(&mut self, log: usize) -> Result<(), Outcome> {
        let physical = &self.logs[log];
        if !physical.group.is_leader() {
            return Err(Outcome::NotLeader(physical.group.leader()));
        }
        if physical.pending() >= self.config.max_pending || !physical.has_room() {
            self.counters.refused_busy += 1;
            return Err(Outcome::Busy);
        }
        Ok(())
    }

    /// Does everything that is ready at `now`. Answers how much was done; 0 means that the loop may wait until a
    /// descriptor is ready or [`Node::deadline_us`] has come.
    ///
    /// # Errors
    /// What the replica cannot live on with.
    pub fn step(&mut self, now: Now) -> Result<usize, NodeError> {
        self.now = Now {
            steady_us: self.steady.read(now.steady_us),
            wall_ms: now.wall_ms,
        };
        let now = self.now;
        let mut work = self.receive()?;
        work += self.collect()?;
        self.tick();
        for log in 0..self.logs.len() {
            work += self.advance(log)?;
        }
        if now.steady_us >= self.next_upkeep_us {
            self.next_upkeep_us = now.steady_us + UPKEEP_US;
            self.upkeep()?;
        }
        work += self.answer()?;
        Ok(work)
    }

    /// When [`Node::step`] wants to be called again at the latest, in microseconds of the steady clock.
    pub fn deadline_us(&self) -> u64 {
        let pending = self.logs.iter().any(|log| log.reads.is_waiting_to_ask());
        let retry = if pending {
            self.now.steady_us + 1000
        } else {
            u64::MAX
        };
        let timers = self.next_tick_us.min(retry).min(self.flash_deadline_us());
        let first = self
            .port
            .next_timeout()
            .map_or(timers, |port| timers.min(port));
        self.steady.machine_us(first)
    }

    /// When a client last had work for this replica; the polling policy spins only near it.
    pub fn active_us(&self) -> u64 {
        self.steady.machine_us(self.active_us)
    }

    fn receive(&mut self) -> Result<usize, NodeError> {
        let mut inbox = std::mem::take(&mut self.inbox);
        let mut received = 0;
        while received < RECEIVE_BURST {
            let count = self
                .port
                .poll(self.now.steady_us, &mut inbox)
                .map_err(NodeError::Port)?;
            if count == 0 {
                break;
            }
            received += count;
            for message in inbox.drain(..) {
                self.dispatch(message);
            }
        }
        self.inbox = inbox;
        Ok(received)
    }

    fn dispatch(&mut self, message: Message) {
        let Message { from, body } = message;
        let mut class = [0u8; 1];
        if !body.read_at(0, &mut class) {
            self.counters.malformed += 1;
            return;
        }
        let rest = body.slice(1..body.len());
        match (from, class[0]) {
            (Peer::Node(node), envelope::RAFT) => self.raft_messages(node, &rest),
            (Peer::Node(node), envelope::SNAPSHOT_FETCH) => self.snapshot_fetch(node, &rest),
            (Peer::Node(node), envelope::SNAPSHOT_CHUNK) => self.snapshot_chunk(node, &rest),
            (Peer::Client(_), envelope::CLIENT_REQUEST) => self.client_requests(from, &rest),
            _ => self.counters.malformed += 1,
        }
    }

    fn raft_messages(&mut self, from: u64, body: &Payload) {
        let mut at = 0;
        while at + 4 <= body.len() {
            let mut length = [0; 4];
            body.read_at(at, &mut length);
            let length = u32::from_le_bytes(length) as usize;
            at += 4;
            if length > body.len() - at {
                self.counters.malformed += 1;
                return;
            }
            let message = body.slice(at..at + length);
            at += length;
            self.raft_message(from, &message);
        }
    }

    fn raft_message(&mut self, from: u64, bytes: &Payload) {
        // Headers of a burst lie in the first segment nearly always; otherwise they are gathered.
        let decoded = match bytes.contiguous() {
            Some(bytes) => RaftMessage::decode(bytes),
            None => RaftMessage::decode(&bytes.to_vec()),
        };
        let Ok((message, payload_at)) = decoded else {
            self.counters.malformed += 1;
            return;
        };
        let Some(log) = self.logs.get_mut(usize::from(message.log)) else {
            self.counters.malformed += 1;
            return;
        };
        if message.from != from {
            self.counters.malformed += 1;
            return;
        }
        if !message.entries.is_empty() {
            self.active_us = self.now.steady_us;
        }
        if message.kind == RaftKind::Snapshot {
            self.offered_snapshot(message);
            return;
        }
        let payloads = bytes.slice(payload_at..bytes.len());
        match log.group.step(message, payloads) {
            Ok(()) => {}
            Err(StepError::Full { .. }) => self.counters.dropped_full += 1,
            Err(_) => self.counters.malformed += 1,
        }
    }

    fn client_requests(&mut self, peer: Peer, body: &Payload) {
        self.active_us = self.now.steady_us;
        let mut requests = cyclone_wire::client::requests(body.len());
        let mut gathered = None;
        let bytes: &[u8] = match body.contiguous() {
            Some(bytes) => bytes,
            None => gathered.insert(body.to_vec()),
        };
        loop {
            let (id, request) = match requests.next(bytes) {
                None => break,
                Some(Err(_)) => {
                    self.counters.malformed += 1;
                    break;
                }
                Some(Ok(request)) => request,
            };
            let origin = Origin::Native { peer, id };
            match request {
                cyclone_wire::client::Request::Command(range) => {
                    self.native_write(origin, body, range, bytes);
                }
                cyclone_wire::client::Request::Query { query, through_log } => {
                    self.native_read(origin, &bytes[query], through_log);
                }
                cyclone_wire::client::Request::Ping => {
                    let outcome = match self.logs[0].group.is_leader() {
                        true => Outcome::Done(Reply::Ok),
                        false => Outcome::NotLeader(self.logs[0].group.leader()),
                    };
                    self.answers.push((origin, outcome));
                }
            }
        }
    }

    fn native_write(
        &mut self,
        origin: Origin,
        body: &Payload,
        range: std::ops::Range<usize>,
        bytes: &[u8],
    ) {
        self.counters.writes += 1;
        let Ok(command) = Command::decode(&bytes[range.clone()]) else {
            self.counters.malformed += 1;
            self.clients.refuse(origin, &Status::Malformed);
            return;
        };
        if !self.within_limits(&command.operation) {
            self.answers.push((origin, Outcome::TooLarge));
            return;
        }
        let log = self.log_of(command.operation.key());
        match self.admit(log) {
            Ok(()) => self.logs[log].write_payload(self.now.wall_ms, origin, &body.slice(range)),
            Err(outcome) => self.answers.push((origin, outcome)),
        }
    }

    fn native_read(&mut self, origin: Origin, query: &[u8], through_log: bool) {
        let Ok(decoded) = Query::decode(query) else {
            self.counters.malformed += 1;
            self.clients.refuse(origin, &Status::Malformed);
            return;
        };
        let log = self.log_of(decoded.key());
        if !through_log {
            return self.submit_read(log, origin, query.to_vec());
        }
        match self.admit(log) {
            Ok(()) => {
                let command = Command {
                    session: None,
                    operation: Operation::Read(decoded),
                };
                self.logs[log].write_bytes(self.now.wall_ms, origin, |out| command.encode(out));
            }
            Err(outcome) => self.answers.push((origin, outcome)),
        }
    }

    /// The configured limits, checked where a command enters so that all replicas need not agree on them.
    fn within_limits(&self, operation: &Operation<'_>) -> bool {
        let keys_fit = operation
            .keys()
            .iter()
            .all(|key| key.len() <= self.config.max_key_bytes);
        keys_fit
            && operation
                .value()
                .is_none_or(|value| value.len() <= self.config.max_value_bytes)
    }

    fn tick(&mut self) {
        let now_us = self.now.steady_us;
        if self.next_tick_us == 0 {
            self.next_tick_us = now_us + self.tick_us;
        }
        if now_us < self.next_tick_us {
            return;
        }
        // A pause of the whole process is no evidence against the leader: it counts as one heartbeat's time at most.
        let missed = (now_us - self.next_tick_us) / self.tick_us;
        self.counters.longest_gap_us = self.counters.longest_gap_us.max(missed * self.tick_us);
        self.next_tick_us = now_us + self.tick_us;
        let ticks = 1 + missed.min(4);
        for log in &mut self.logs {
            log.group.tick(ticks as u32);
        }
    }

    /// Moves one log forward: proposals, persistence, sending, commitment, reads, apply.
    fn advance(&mut self, log: usize) -> Result<usize, NodeError> {
        let now = self.now;
        let physical = &mut self.logs[log];
        physical.propose(now.steady_us, now.wall_ms, &mut self.answers);
        if physical.group.is_leader() {
            let (group, reads) = (&mut physical.group, &mut physical.reads);
            let mut confirmed = None;
            reads.ask(now.steady_us, |context| {
                confirmed = planted::has(Bug::ReadsNotConfirmed).then_some(context);
                confirmed.is_some() || group.read_index(context).is_ok()
            });
            if let Some(context) = confirmed {
                reads.confirm(context, group.commit());
            }
        }
        let mut work = self.poll_flash(log)?;
        while let Some(ready) = self.logs[log].group.take_ready() {
            // Typestate: the messages exist only once their entries and hard state are durable.
            let mut outbox = ready.persist()?;
            work += 1;
            for &(context, index) in &outbox.read_states {
                self.logs[log].reads.confirm(context, index);
            }
            for message in &outbox.messages {
                if message.header.kind == RaftKind::Snapshot {
                    self.offering(message.to);
                }
            }
            self.send(log, &outbox)?;
            self.logs[log].committed(&mut outbox, &mut self.answers);
        }
        work += self.poll_flash(log)?;
        if self.snapshots.is_installing() && !planted::has(Bug::AppliesWhileInstalling) {
            return Ok(work);
        }
        self.logs[log].replay()?;
        let store = Arc::clone(&self.store);
        let job = self.logs[log].apply(&*store, &mut self.answers)?;
        if let Some(job) = job {
            self.counters.store_stalls += 1;
            let id = self.logs[log].id;
            self.workers.run(move || {
                let result = job.apply(&*store, id);
                Done::Applied { log, result }
            });
        }
        self.execute_reads(log)?;
        Ok(work)
    }

    fn execute_reads(&mut self, log: usize) -> Result<(), NodeError> {
        let applied = match planted::has(Bug::ReadsNotWaiting) {
            true => u64::MAX,
            false => self.logs[log].applied,
        };
        while let Some(read) = self.logs[log].reads.take(applied) {
            // It was decoded when it was taken in.
            let Ok(query) = Query::decode(&read.query) else {
                continue;
            };
            match self.store.query(&query, Mode::NonBlocking) {
                Ok(reply) => self.answers.push((read.origin, Outcome::Done(reply))),
                Err(ApplyError::WouldBlock) => {
                    let store = Arc::clone(&self.store);
                    self.counters.slow_reads += 1;
                    self.workers.run(move || {
                        let result = match Query::decode(&read.query) {
                            Ok(query) => store.query(&query, Mode::Blocking),
                            Err(_) => Err(ApplyError::WouldBlock),
                        };
                        Done::Read {
                            origin: read.origin,
                            result,
                        }
                    });
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Sends a persisted step's messages as one burst. Of several acknowledgements to one peer only the last is sent: it
    /// says all that the others say.
    //= cyclone §4.2
    pub(crate) fn send(&mut self, log: usize, outbox: &Outbox) -> Result<(), NodeError> {
        if outbox.messages.is_empty() {
            return Ok(());
        }
        let group = &self.logs[log].group;
        let mut encoded = Vec::with_capacity(outbox.messages.len());
        for (position, message) in outbox.messages.iter().enumerate() {
            if message.is_superseded_by(&outbox.messages[position + 1..]) {
                continue;
            }
            encoded.push((message.to, group.encode(message)));
        }
        let mut parts: Vec<Vec<&[u8]>> = Vec::with_capacity(encoded.len());
        for (_, message) in &encoded {
            let mut slices: Vec<&[u8]> = Vec::with_capacity(2 + message.payloads.len());
            slices.push(&message.prefix);
            slices.extend(message.payloads.iter().copied());
            parts.push(slices);
        }
        let burst: Vec<Outgoing<'_>> = encoded
            .iter()
            .zip(&parts)
            .map(|((to, _), parts)| Outgoing {
                to: Peer::Node(*to),
                parts,
            })
            .collect();
        self.port
            .send(self.now.steady_us, &burst)
            .map_err(NodeError::Port)?;
        Ok(())
    }

    /// Takes back what the worker threads have finished.
    fn collect(&mut self) -> Result<usize, NodeError> {
        let mut work = 0;
        while let Some(done) = self.workers.poll() {
            work += 1;
            match done {
                Done::Applied { .. } if planted::has(Bug::WorkerForgotten) => {}
                Done::Applied { log, result } => {
                    self.logs[log].finish_job(result?, &mut self.answers)
                }
                Done::Read { origin, result } => {
                    self.answers.push((origin, Outcome::Done(result?)))
                }
                Done::Digest { ticket, result } => {
                    let reply = Reply::Bytes(result?.into_bytes());
                    self.completions.push((ticket, Outcome::Done(reply)));
                }
                Done::Flushed(result) => {
                    self.flushing = false;
                    result?;
                }
                Done::Snapshot(done) => self.snapshot_done(done)?,
            }
        }
        Ok(work)
    }

    fn upkeep(&mut self) -> Result<(), NodeError> {
        for log in &mut self.logs {
            log.expire(self.now.steady_us, &mut self.answers);
        }
        self.keep_in_touch()?;
        self.trim()?;
        self.snapshot_upkeep();
        Ok(())
    }

    pub(crate) fn now_us(&self) -> u64 {
        self.now.steady_us
    }

    /// Hands out answers: to this process as completions, to native clients as one message each.
    fn answer(&mut self) -> Result<usize, NodeError> {
        let work = self.answers.len();
        for (origin, outcome) in self.answers.drain(..) {
            match origin {
                Origin::Local(ticket) => self.completions.push((ticket, outcome)),
                Origin::Native { .. } => self.clients.add(origin, outcome, &self.config.members),
            }
        }
        self.clients
            .flush(self.now.steady_us, &mut self.port)
            .map_err(NodeError::Port)?;
        Ok(work)
    }
}

//! What a log's loop does with its log while it has it: what the replica's loop does with every
//! log.

use cyclone_consensus::{OutMessage, StepError};
use cyclone_packet::door::{node_of, port_of};
use cyclone_packet::{Message, Peer};
use cyclone_pmem::Payload;
use cyclone_store::{ApplyError, Mode};
use cyclone_wire::batch::Allowed;
use cyclone_wire::client::{ReadMode, Status};
use cyclone_wire::command::Query;
use cyclone_wire::envelope;
use cyclone_wire::raftmsg::RaftKind;

use super::{LoanedLog, LogLoop, Request, ToReplicaLoop};
use crate::answers::{WEAK_WAIT_US, needs_wall_clock};
use crate::fragmented::{each_message, raft_message};
use crate::intake::{Intake, SizeLimits};
use crate::logset::LogSet;
use crate::node::{BACKLOG, NodeError, Now, STEP_REQUESTS};
use crate::physical::PhysicalLog;
use crate::reads::{Read, ReadBasis};
use crate::requests::{Origin, Outcome};
use crate::send;
use crate::slow::ReadBudget;
use crate::status::Counters;

/// How often a log's loop asks the store again that another one has: for some tens of microseconds.
const STORE_TRIES: u32 = 100;

/// A log's loop with its log in hand.
struct LogStep<'a> {
    log_loop: &'a mut LogLoop,
    turn: &'a mut LoanedLog,
    now: Now,
}

impl LogLoop {
    /// The log's turn. Answers how much was done.
    pub(super) fn with(&mut self, turn: &mut LoanedLog, now: Now) -> Result<usize, NodeError> {
        let machine_us = now.steady_us;
        let before = turn.steady.clone();
        let now = Now {
            steady_us: turn.steady.read(machine_us),
            ..now
        };
        if turn.steady.has_stepped_back_since(&before) {
            turn.log.revoke_lease();
        }
        self.connect_members(&turn.members);
        turn.log.begin_step(now, &*self.store);
        let mut moving = LogStep {
            log_loop: self,
            turn,
            now,
        };
        let work = match moving.turn.paused {
            true => moving.hand_over(),
            false => moving.step()?,
        };
        let (behind, deadline_us) = (moving.is_behind(), moving.deadline_us());
        self.deadline_us = turn.steady.machine_us(deadline_us);
        if turn.active_us > 0 {
            self.active_us = turn.steady.machine_us(turn.active_us);
        }
        Ok(work + usize::from(behind))
    }
}

impl LogStep<'_> {
    fn log(&mut self) -> &mut PhysicalLog {
        &mut self.turn.log
    }

    /// The log is to be left alone: whatever has come is for the replica's loop.
    fn hand_over(&mut self) -> usize {
        let log_loop = &mut *self.log_loop;
        let class = Payload::from_vec(vec![envelope::CLIENT_REQUEST]);
        let waiting = log_loop.backlog.drain(..).map(|(from, rest)| {
            let mut body = class.clone();
            body.append(rest);
            Message { from, body }
        });
        log_loop
            .to_replica_loop
            .extend(waiting.map(ToReplicaLoop::Message));
        // Requests that were left to this loop stay where they are: the replica's takes them in.
        if log_loop.mailbox.asked() > 0 {
            log_loop.mailbox.ring();
        }
        let arrived = log_loop.inbox.drain(..).map(|message| Message {
            from: match message.from {
                Peer::Node(port) => Peer::Node(node_of(port)),
                client => client,
            },
            ..message
        });
        log_loop
            .to_replica_loop
            .extend(arrived.map(ToReplicaLoop::Message));
        log_loop.to_replica_loop.len()
    }

    fn step(&mut self) -> Result<usize, NodeError> {
        let mut work = self.log_loop.inbox.len();
        let mut inbox = std::mem::take(&mut self.log_loop.inbox);
        for message in inbox.drain(..) {
            self.dispatch(message);
        }
        self.log_loop.inbox = inbox;
        self.requests();
        let now_us = self.now.steady_us;
        self.turn.log.propose(now_us, &mut self.log_loop.answers);
        self.turn.log.ask_reads(now_us);
        work += self.persist()?;
        self.send()?;
        self.apply()?;
        self.execute_reads()?;
        work += self.route_answers();
        work += usize::from(self.log().group.drain_flash(now_us));
        Ok(work)
    }

    fn dispatch(&mut self, mut message: Message) {
        if let Peer::Node(port) = &mut message.from {
            *port = node_of(*port);
        }
        let mut class = [0u8; 1];
        let whole = message.body.read_at(0, &mut class);
        let len = message.body.len();
        match (message.from, class[0]) {
            (Peer::Node(node), envelope::RAFT) if whole && self.is_member(node) => {
                self.raft_messages(node, &message.body.slice(1..len));
            }
            (Peer::Client(_), envelope::CLIENT_REQUEST) if whole => {
                let rest = message.body.slice(1..len);
                self.log_loop.backlog.push_back((message.from, rest));
            }
            _ => self
                .log_loop
                .to_replica_loop
                .push(ToReplicaLoop::Message(message)),
        }
    }

    fn is_member(&self, node: u64) -> bool {
        self.turn.members.iter().any(|member| member.id == node)
    }

    fn raft_messages(&mut self, from: u64, body: &Payload) {
        for place in each_message(body) {
            let Some(place) = place else {
                self.turn.counters.malformed += 1;
                return;
            };
            self.raft_message(from, body, place);
        }
    }

    /// `place` is a message with its length before it.
    fn raft_message(&mut self, from: u64, body: &Payload, place: std::ops::Range<usize>) {
        let bytes = body.slice(place.start + 4..place.end);
        let Ok((message, payload_at)) = raft_message(&bytes) else {
            self.turn.counters.malformed += 1;
            return;
        };
        // What moves terms and leaders about concerns all logs.
        let ours = matches!(
            message.kind,
            RaftKind::Append
                | RaftKind::AppendResponse
                | RaftKind::Heartbeat
                | RaftKind::HeartbeatResponse
        );
        if !ours || usize::from(message.log) != self.log_loop.log || message.from != from {
            let mut whole = Payload::from_vec(vec![envelope::RAFT]);
            whole.append(body.slice(place));
            self.log_loop
                .to_replica_loop
                .push(ToReplicaLoop::Message(Message {
                    from: Peer::Node(from),
                    body: whole,
                }));
            return;
        }
        if !message.entries.is_empty() {
            self.turn.active_us = self.now.steady_us;
        }
        let payloads = bytes.tail(payload_at);
        let (kind, wall_ms) = (message.kind, message.wall_ms);
        match self.log().group.step(message, payloads) {
            Ok(()) => self.log().note_wall_clock(from, kind, wall_ms),
            Err(StepError::Full { .. }) => self.turn.counters.dropped_full += 1,
            Err(error) => {
                self.log().log_refusal(&error);
                self.turn.counters.malformed += 1;
            }
        }
    }

    /// As many of the clients' requests as a step takes.
    fn requests(&mut self) {
        for request in self.log_loop.mailbox.take_requests() {
            if let Origin::Direct { .. } = request.origin() {
                self.turn.active_us = self.now.steady_us;
                match request {
                    Request::Write(..) => self.turn.counters.writes += 1,
                    Request::Read { .. } => self.turn.counters.reads += 1,
                }
            }
            let admitted = match request {
                Request::Write(..) => self.admit_write(),
                Request::Read { .. } => self.admit(),
            };
            match admitted {
                Ok(()) => self.turn.log.take_in(request),
                Err(outcome) => self.log_loop.answers.push((request.origin(), outcome)),
            }
        }
        let door = self.log_loop.log as u16 + 1;
        let before = self.turn.counters.writes + self.turn.counters.reads;
        while let Some((peer, body)) = self.log_loop.backlog.pop_front() {
            self.turn.active_us = self.now.steady_us;
            self.client_requests(door, peer, &body);
            let checked = self.turn.counters.writes + self.turn.counters.reads - before;
            if checked >= STEP_REQUESTS && self.log_loop.backlog.len() <= BACKLOG {
                break;
            }
        }
    }

    /// Makes the log's step durable and takes in what it gives.
    fn persist(&mut self) -> Result<usize, NodeError> {
        let mut work = self.poll_flash()?;
        while let Some(ready) = self.turn.log.group.take_ready() {
            // Typestate: the messages exist only once their entries and hard state are durable.
            // Nothing goes ahead (docs/adr/0060).
            let mut outbox = ready.persist()?;
            work += 1;
            for &(context, index) in &outbox.read_states {
                self.log().reads.confirm(context, index);
            }
            self.turn.elected |= outbox.leader_change.is_some();
            self.post(std::mem::take(&mut outbox.messages));
            let (log, pending_commits) = (&mut self.turn.log, &mut self.turn.pending_commits);
            log.committed(&mut outbox, pending_commits, &mut self.log_loop.answers);
        }
        work += self.poll_flash()?;
        Ok(work)
    }

    fn poll_flash(&mut self) -> Result<usize, NodeError> {
        let now_us = self.now.steady_us;
        let group = &mut self.turn.log.group;
        if group.flash().is_none() {
            return Ok(0);
        }
        let (work, outbox) = group.poll_flash(now_us)?;
        let sent = outbox.messages.len();
        self.post(outbox.messages);
        Ok(work + sent)
    }

    fn post(&mut self, mut messages: Vec<OutMessage>) {
        send::drop_superseded(&mut messages);
        for message in messages {
            match message.header.kind {
                RaftKind::Snapshot => self
                    .log_loop
                    .to_replica_loop
                    .push(ToReplicaLoop::Send(message)),
                _ => self.log_loop.outgoing.push(message),
            }
        }
    }

    /// Sends the persisted messages of this step as one burst. To a replica whose port for this log
    /// does not answer they go through the replica's own.
    fn send(&mut self) -> Result<(), NodeError> {
        if self.log_loop.outgoing.is_empty() {
            return Ok(());
        }
        let mut outgoing = std::mem::take(&mut self.log_loop.outgoing);
        let (log_loop, group) = (&mut *self.log_loop, &self.turn.log.group);
        outgoing.retain(|message| {
            let reached = log_loop.reaches(message.to);
            if !reached {
                let encoded = group.encode(message);
                let pieces = std::iter::once(&encoded.prefix[..]).chain(encoded.payloads);
                let bytes = pieces.flatten().copied().collect();
                log_loop
                    .to_replica_loop
                    .push(ToReplicaLoop::SendEncoded(message.to, bytes));
            }
            reached
        });
        let door = log_loop.log as u16 + 1;
        let messages = outgoing.iter();
        let messages = messages.map(|message| (port_of(message.to, door), group, message));
        send::burst(&mut log_loop.port, log_loop.port_us, messages).map_err(NodeError::Port)?;
        outgoing.clear();
        log_loop.outgoing = outgoing;
        Ok(())
    }

    fn apply(&mut self) -> Result<(), NodeError> {
        let stop = self.turn.pending_commits.stop();
        let LogLoop {
            store,
            answers,
            to_replica_loop,
            ..
        } = &mut *self.log_loop;
        let job = self.turn.log.apply(&**store, stop, STORE_TRIES, answers)?;
        to_replica_loop.extend(job.map(ToReplicaLoop::Apply));
        Ok(())
    }

    /// Answers reads of this log that rest on a round or on nothing; the others are not its
    /// business alone.
    fn execute_reads(&mut self) -> Result<(), NodeError> {
        let mut read_budget = ReadBudget::default();
        while let Some(mut read) = self.log().next_read() {
            let answers_here =
                !matches!(read.origin, Origin::Joined(_)) && read.how != ReadBasis::Lease;
            let query = Query::decode(&read.query);
            let (true, Ok(query)) = (answers_here && !read_budget.is_exhausted(), query) else {
                self.log_loop
                    .to_replica_loop
                    .push(ToReplicaLoop::Read(self.turn.log.applied, read));
                continue;
            };
            if read.now_ms == 0 && needs_wall_clock(&query, read.how) {
                read.now_ms = self.log().time_ms();
            }
            match self
                .log_loop
                .store
                .query_at(&query, read.now_ms, Mode::NonBlocking)
            {
                Ok(reply) => {
                    read_budget.consume(&reply);
                    self.end(read.origin, Outcome::Done(reply));
                }
                // What the store refuses is reported by the replica's loop, which asks it again.
                Err(
                    ApplyError::WouldBlock
                    | ApplyError::ClockBehind
                    | ApplyError::NoSpace(_)
                    | ApplyError::Damaged(_),
                ) => {
                    self.log_loop
                        .to_replica_loop
                        .push(ToReplicaLoop::Read(self.turn.log.applied, read));
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// A request that came through another port is answered there.
    fn route_answers(&mut self) -> usize {
        let door_here = self.log_loop.log as u16 + 1;
        let refuses = self.readiness().is_err();
        let LogLoop {
            answers,
            clients,
            to_replica_loop,
            host_outcomes,
            ..
        } = &mut *self.log_loop;
        let count = answers.len();
        let counters = &mut self.turn.counters;
        for (origin, outcome) in answers.drain(..) {
            match origin {
                Origin::Internal => {}
                Origin::Direct { log, ticket }
                    if usize::from(log) + 1 == usize::from(door_here) =>
                {
                    counters.note_outcome(&outcome);
                    host_outcomes.push((ticket, outcome));
                }
                Origin::Native { door, .. } if door == door_here => {
                    counters.note_outcome(&outcome);
                    if refuses && !matches!(outcome, Outcome::Done(_)) {
                        clients.note_redirected(origin);
                    }
                    let status = super::ClientReplies::status(outcome, &self.turn.members);
                    clients.add(origin, &status);
                }
                _ => to_replica_loop.push(ToReplicaLoop::Outcome(origin, outcome)),
            }
        }
        match refuses {
            true => count,
            false => count + clients.announce(),
        }
    }

    /// Whether there is more to be done at once.
    fn is_behind(&self) -> bool {
        let may_apply = || self.turn.log.can_apply(self.turn.pending_commits.stop());
        !self.log_loop.backlog.is_empty() || (!self.turn.paused && may_apply())
    }

    fn deadline_us(&self) -> u64 {
        let log = &self.turn.log;
        let retry = match log.reads.is_waiting_to_ask() {
            true => self.now.steady_us + 1000,
            false => u64::MAX,
        };
        retry.min(log.group.flash_deadline_us())
    }
}

impl Intake for LogStep<'_> {
    fn counters_mut(&mut self) -> &mut Counters {
        &mut self.turn.counters
    }

    fn size_limits(&self) -> SizeLimits {
        self.log_loop.settings.size_limits
    }

    fn allowed(&self) -> Allowed {
        self.log_loop.settings.allowed
    }

    fn log_count(&self) -> usize {
        self.log_loop.settings.logs
    }

    fn readiness(&self) -> Result<(), Outcome> {
        match (&self.turn.refusal, self.turn.log.group.is_leader()) {
            (Some(refusal), _) => Err(refusal.clone()),
            // The logs are on their way to another replica.
            (None, false) => Err(Outcome::Busy),
            (None, true) => Ok(()),
        }
    }

    fn end(&mut self, origin: Origin, outcome: Outcome) {
        self.log_loop.answers.push((origin, outcome));
    }

    fn refuse_malformed(&mut self, origin: Origin) {
        self.log_loop.clients.add(origin, &Status::Malformed);
    }

    fn take_write(&mut self, logs: LogSet, origin: Origin, command: &Payload) {
        if logs.single() != Some(self.log_loop.log) {
            let command = command.clone();
            return self
                .log_loop
                .to_replica_loop
                .push(ToReplicaLoop::Write(origin, command));
        }
        match self.admit_write() {
            Ok(()) => {
                self.log().write_payload(origin, command);
            }
            Err(outcome) => self.end(origin, outcome),
        }
    }

    fn take_read(
        &mut self,
        origin: Origin,
        query: &Query<'_>,
        bytes: Vec<u8>,
        mode: ReadMode,
        terms: Vec<u64>,
    ) {
        let logs = LogSet::of_query(query, self.log_count());
        let how = match mode {
            ReadMode::Index => ReadBasis::Index,
            ReadMode::Lease => ReadBasis::Lease,
            ReadMode::Weak => ReadBasis::Weak {
                until_us: self.now.steady_us + WEAK_WAIT_US,
            },
            // As an entry: by the replica's loop.
            ReadMode::Log => return self.forward_query(origin, bytes, mode, terms),
        };
        if logs.single() != Some(self.log_loop.log) {
            return self.forward_query(origin, bytes, mode, terms);
        }
        // A leader that the client knows to have been replaced may not know it.
        //= cyclone §2
        let known = terms.get(self.log_loop.log).copied().unwrap_or(0);
        if mode == ReadMode::Weak && self.turn.log.group.term() < known {
            return self.end(origin, Outcome::NotLeader(None));
        }
        self.turn.counters.reads += 1;
        match self.admit() {
            Ok(()) => {
                let barrier = self.turn.log.barrier();
                let read = Read::new(origin, bytes, barrier, how);
                self.log().reads.submit(read);
            }
            Err(outcome) => self.end(origin, outcome),
        }
    }
}

impl LogStep<'_> {
    fn forward_query(&mut self, origin: Origin, query: Vec<u8>, mode: ReadMode, terms: Vec<u64>) {
        self.log_loop.to_replica_loop.push(ToReplicaLoop::Query {
            origin,
            query,
            mode,
            terms,
        });
    }

    /// Whether the log takes another request; otherwise the refusal.
    fn admit(&mut self) -> Result<(), Outcome> {
        self.readiness()?;
        let log = &self.turn.log;
        if log.pending() >= self.log_loop.settings.max_pending || !log.has_room() {
            return Err(Outcome::Busy);
        }
        Ok(())
    }

    /// The same for writes: none is taken in while the store or flash makes no progress.
    fn admit_write(&mut self) -> Result<(), Outcome> {
        self.admit()?;
        match self.turn.log.is_stalled() {
            true => Err(Outcome::Busy),
            false => Ok(()),
        }
    }
}

//! A log's own loop: its packet port, and a step function that moves this one log (cyclone §5: a
//! log per core, each with its queue). //= cyclone §5
//!
//! ```text
//!   replica's loop   take all logs → step → lend them        gangs, elections, checkpoints, members, timers, the Redis protocol
//!   log's loop       take its log  → step → put it down      entries, acknowledgements and commands of this log alone
//! ```
//! A log is moved by the loop that has taken it; both loops do the same things with it, in the same
//! order, by the same code. What concerns more than its log, the log's loop hands over. So a gang,
//! a vote or a checkpoint never meets a log that is moving, and what an own loop adds is nothing
//! but a way around the other one.

mod handoff;
mod replica_side;
mod run;
mod step;

use std::collections::{HashMap, VecDeque};
use std::os::fd::RawFd;
use std::sync::Arc;

use cyclone_consensus::OutMessage;
use cyclone_packet::door::{node_of, port_of};
use cyclone_packet::{Message, Outgoing, Peer, Port};
use cyclone_pmem::Payload;
use cyclone_store::StateMachine;
use cyclone_wal::flash::FlashLog;
use cyclone_wire::batch::Allowed;
use cyclone_wire::command::{Command, Operation};
use cyclone_wire::envelope;

use crate::clients::ClientReplies;
use crate::clock::MonotonicClock;
use crate::config::{Config, Member};
use crate::housekeeping::log_refused_peers;
use crate::intake::SizeLimits;
use crate::logset::LogSet;
use crate::node::{FEW, NodeError, Now, RECEIVE_BURST, RECEIVE_BYTES};
use crate::physical::PhysicalLog;
use crate::requests::{Origin, Outcome, Ticket, refuse_excess};

pub(crate) use handoff::LoopChannel;
pub(crate) use handoff::{CommitObserver, Request};
use handoff::{FairHandoff, LoanedLog, LogOwner, ToLogLoop, ToReplicaLoop};
pub(crate) use replica_side::{LoanedLogs, LogHandle};
pub use run::LogThread;
pub(crate) use run::LogThreads;

/// How often the other replicas' ports for a log are spoken to.
const TOUCH_US: u64 = 500_000;
/// A port that says nothing for so long is taken for none.
const SILENCE_US: u64 = 3 * TOUCH_US;

/// Tickets of the thread that runs the loop.
pub(crate) const HOSTS: Ticket = 1 << 63;

/// What a log's loop receives once.
struct Settings {
    own: u64,
    logs: usize,
    size_limits: SizeLimits,
    allowed: Allowed,
    max_pending: usize,
    /// Datagrams per call.
    burst: usize,
}

/// A log's own loop, but for the thread.
pub struct LogLoop {
    log: usize,
    log_handoff: Arc<FairHandoff<Box<LoanedLog>>>,
    mailbox: Arc<LoopChannel>,
    port: Port,
    /// Readable when the log's flash has something to tell.
    flash: Option<RawFd>,
    store: Arc<dyn StateMachine>,
    settings: Settings,
    /// The clock as the port sees it.
    steady: MonotonicClock,
    inbox: Vec<Message>,
    backlog: VecDeque<(Peer, Payload)>,
    outgoing: Vec<OutMessage>,
    answers: Vec<(Origin, Outcome)>,
    to_replica_loop: Vec<ToReplicaLoop>,
    /// Outcomes for the host and for other threads.
    host_outcomes: Vec<(Ticket, Outcome)>,
    /// The host's own.
    completions: Vec<(Ticket, Outcome)>,
    clients: ClientReplies,
    members: Arc<[Member]>,
    /// The port's time in this step.
    port_us: u64,
    /// When each replica was last heard at this port.
    heard_us: HashMap<u64, u64>,
    next_touch_us: u64,
    /// The log is in hand.
    holds: bool,
    /// When it wants to be stepped again, by the machine's clock.
    deadline_us: u64,
    active_us: u64,
}

impl LogLoop {
    pub(crate) fn new(
        config: &Config,
        log: &PhysicalLog,
        post: &LogHandle,
        port: Port,
        store: Arc<dyn StateMachine>,
    ) -> LogLoop {
        let clients = ClientReplies::new(config.network.burst, port.max_message(), config.logs);
        LogLoop {
            log: usize::from(log.id),
            flash: log.group.flash().and_then(FlashLog::descriptor),
            log_handoff: Arc::clone(&post.log_handoff),
            mailbox: Arc::clone(&post.mailbox),
            port,
            store,
            settings: Settings {
                own: config.id,
                logs: usize::from(config.logs),
                size_limits: SizeLimits {
                    key: config.max_key_bytes,
                    value: config.max_value_bytes,
                },
                allowed: config.allowed(),
                max_pending: config.max_pending,
                burst: config.network.burst,
            },
            steady: MonotonicClock::default(),
            inbox: Vec::new(),
            backlog: VecDeque::new(),
            outgoing: Vec::new(),
            answers: Vec::new(),
            to_replica_loop: Vec::new(),
            host_outcomes: Vec::new(),
            completions: Vec::new(),
            clients,
            members: Arc::new([]),
            port_us: 0,
            heard_us: HashMap::new(),
            next_touch_us: 0,
            holds: false,
            deadline_us: 0,
            active_us: 0,
        }
    }

    /// Does everything that is ready for this log, once the replica's loop has lent it. Answers how
    /// much was done.
    ///
    /// # Errors
    /// What the replica cannot live on with.
    pub fn step(&mut self, clock: &dyn Fn() -> Now) -> Result<usize, NodeError> {
        self.port_us = self.steady.read(clock().steady_us);
        let mut work = self.receive()?;
        let Some(mut turn) = self.log_handoff.take(LogOwner::LogLoop) else {
            return Err(NodeError::LoopEnded(self.log));
        };
        self.holds = true;
        // No loop may have seen a later time than the log's current owner.
        let now = clock();
        let moved = self.with(&mut turn, now);
        let led = Arc::clone(&turn.led);
        let term = turn.log.group.term();
        let ring = turn.elected
            || turn.pending_commits.has_gangs()
            || turn.log.next_gang().is_some()
            || (turn.is_quiet && turn.active_us > 0);
        let leads = turn.log.group.is_leader();
        self.log_handoff.put(turn);
        self.holds = false;
        self.mailbox.send_to_replica_loop(&mut self.to_replica_loop);
        if ring {
            self.mailbox.ring();
        }
        work += moved?;
        work += self.answer_clients(&led, leads.then_some(term))?;
        self.greet()?;
        Ok(work)
    }

    /// Takes what has arrived, as much as a step of the replica's loop does.
    fn receive(&mut self) -> Result<usize, NodeError> {
        let (mut received, few) = (0, FEW.min(self.settings.burst));
        let mut bytes = 0;
        while received < RECEIVE_BURST && bytes < RECEIVE_BYTES {
            let before = self.inbox.len();
            let count = self
                .port
                .poll(self.port_us, &mut self.inbox)
                .map_err(NodeError::Port)?;
            received += count;
            for message in &self.inbox[before..] {
                bytes += message.body.len();
                if let Peer::Node(port) = message.from {
                    self.heard_us.insert(node_of(port), self.port_us);
                }
            }
            if count < few {
                break;
            }
        }
        Ok(received)
    }

    /// Sends what was answered to this port's clients, here and by the replica's loop.
    fn answer_clients(
        &mut self,
        led: &[u64],
        leading_term: Option<u64>,
    ) -> Result<usize, NodeError> {
        let down = self.mailbox.take_for_log_loop();
        let work = down.len();
        for answer in down {
            match answer {
                ToLogLoop::Client(origin, answer) => self.clients.add(origin, &answer),
                ToLogLoop::Host(ticket, outcome) => self.host_outcomes.push((ticket, outcome)),
            }
        }
        let hosts = |(ticket, _): &mut (Ticket, Outcome)| *ticket & HOSTS > 0;
        let own = self.host_outcomes.extract_if(.., hosts);
        self.completions
            .extend(own.map(|(ticket, outcome)| (ticket & !HOSTS, outcome)));
        self.mailbox.reply(&mut self.host_outcomes);
        let mut led = led.to_vec();
        if let (Some(term), Some(own)) = (leading_term, led.get_mut(self.log)) {
            *own = term;
        }
        self.clients
            .flush(self.port_us, &led, &mut self.port)
            .map_err(NodeError::Port)?;
        Ok(work)
    }

    /// The port learns where everybody is, and makes itself known where no member has answered yet.
    fn connect_members(&mut self, members: &Arc<[Member]>) {
        if Arc::ptr_eq(&self.members, members) {
            return;
        }
        let (own, door) = (self.settings.own, self.log as u16 + 1);
        for known in members.iter().filter(|known| known.id != own) {
            if !self.members.contains(known)
                && let Some(at) = known.log_address(self.log as u16)
            {
                self.port.add_node(port_of(known.id, door), at);
            }
        }
        for old in self.members.iter().filter(|old| old.id != own) {
            if !members.iter().any(|known| known.id == old.id) {
                self.port.remove_node(self.port_us, port_of(old.id, door));
                self.heard_us.remove(&old.id);
            }
        }
        self.members = Arc::clone(members);
    }

    /// Whether a replica answers at its port for this log. One that has been silent there for a
    /// while may have no such port any more.
    fn reaches(&self, node: u64) -> bool {
        let heard_us = self.heard_us.get(&node).copied().unwrap_or(0);
        let there = Peer::Node(port_of(node, self.log as u16 + 1));
        self.port.is_connected(there) && self.port_us < heard_us + SILENCE_US
    }

    /// Speaks to the others' ports for this log, so that each side knows that the other's is there.
    fn greet(&mut self) -> Result<(), NodeError> {
        if self.port_us < self.next_touch_us {
            return Ok(());
        }
        self.next_touch_us = self.port_us + TOUCH_US;
        log_refused_peers(&mut self.port);
        let port = &self.port;
        self.mailbox.note_figures(port.stats(), port.driver_stats());
        let parts: [&[u8]; 1] = [&[envelope::RAFT]];
        let (own, door) = (self.settings.own, self.log as u16 + 1);
        let members = self.members.iter().map(|member| member.id);
        let others = members.filter(|id| *id != own);
        let burst: Vec<Outgoing<'_>> = others
            .map(|id| Peer::Node(port_of(id, door)))
            .map(|to| Outgoing { to, parts: &parts })
            .collect();
        if !burst.is_empty() {
            self.port
                .send(self.port_us, &burst)
                .map_err(NodeError::Port)?;
        }
        Ok(())
    }

    /// Submits an operation on keys of this log alone; its outcome comes back by
    /// [`LogLoop::take_completions`] under `ticket`, which is below 2^63. Others are refused as too
    /// large for one log.
    pub fn submit(&mut self, ticket: Ticket, operation: &Operation<'_>) {
        let logs = LogSet::of(operation, self.settings.logs);
        if logs.single() != Some(self.log) {
            return self.completions.push((ticket, Outcome::TooLarge));
        }
        if let Some(refusal) = refuse_excess(operation, self.settings.allowed) {
            return self.completions.push((ticket, refusal));
        }
        let mut bytes = Vec::with_capacity(64);
        let command = Command {
            session: None,
            operation: operation.clone(),
        };
        command.encode(&mut bytes);
        let origin = Origin::Direct {
            log: self.log as u16,
            ticket: ticket | HOSTS,
        };
        let request = Request::Write(origin, Payload::from_vec(bytes));
        self.mailbox.ask(request);
    }

    /// Takes the outcomes of what was submitted here.
    pub fn take_completions(&mut self) -> std::vec::Drain<'_, (Ticket, Outcome)> {
        self.completions.drain(..)
    }

    /// How many logs the replica has.
    pub fn logs(&self) -> u16 {
        self.settings.logs as u16
    }

    /// The log's number.
    pub fn log(&self) -> u16 {
        self.log as u16
    }

    /// Whether something waits for its port's queue and goes on soon.
    pub(crate) fn has_deferred_sends(&self) -> bool {
        self.port.has_deferred_sends(self.port_us)
    }

    /// When [`LogLoop::step`] wants to be called again at the latest, by the machine's steady
    /// clock.
    pub fn deadline_us(&self) -> u64 {
        let port = self.port.next_timeout().unwrap_or(u64::MAX);
        self.deadline_us
            .min(self.steady.machine_us(port.min(self.next_touch_us)))
    }

    /// When a client last had work for this log.
    pub(crate) fn active_us(&self) -> u64 {
        self.active_us
    }

    /// Descriptors that are readable when packets wait, or when flash has something to tell.
    pub(crate) fn descriptors(&self) -> Vec<RawFd> {
        let mut descriptors = self.port.fds();
        descriptors.extend(self.flash);
        descriptors
    }

    /// One of them is readable.
    fn on_readable(&mut self, descriptor: RawFd) {
        self.port.on_readable(descriptor);
    }
}

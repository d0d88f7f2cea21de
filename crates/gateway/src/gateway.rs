//! The step object: accepting, completing, flushing, closing. Reading and running commands:
//! `pump.rs`.

mod accept;
mod evict;
mod farewell;
mod pressure;
mod upkeep;
mod waits;

use std::collections::VecDeque;
use std::net::SocketAddr;

use mio::event::Event;
use mio::net::TcpListener;
use mio::{Interest, Registry, Token};

use crate::backend::{Backend, Outcome};
use crate::config::{GatewayConfig, GatewayError, clients_allowed, listen};
use crate::connection::{Connection, Flushed, KEPT_BUFFER, Session};
use crate::login::{Logins, Users};
use crate::memory::{HeldBytes, Totals};
use crate::reply_encoder::ReplyEncoder;
use crate::slab::{MAX_CONNECTIONS, Slab};
use crate::stream::Tls;
use farewell::RejectedConnections;
use pressure::Pressure;
use waits::Waits;

/// Connections accepted per step, so that a storm of them does not hold up the loop.
const ACCEPTS_PER_STEP: usize = 256;
/// Times a step runs commands that the step itself has unblocked.
const ROUNDS_PER_STEP: usize = 16;
/// Offset of the login thread's token, behind those of connections.
const LOGINS: usize = MAX_CONNECTIONS + 1;
const SPARE_BUFFERS: usize = 64;
/// Read from one connection at a time. All of it is run at once, so one read brings no more than
/// about [`COMMANDS_PER_STEP`] commands of 100 bytes; twice as much cost up to a quarter of the
/// throughput under overload.
const SCRATCH_BYTES: usize = 32 * 1024;
/// Commands after which a step reads from no further connection: a step is short, however much is
/// asked, because heartbeats and acknowledgements wait for its end.
const COMMANDS_PER_STEP: u64 = 256;
/// Bytes of replies after which a step encodes no further long ones, for the same reason.
const ENCODED_PER_STEP: usize = 4 * 1024 * 1024;
/// Bytes of discarded replies, whose memory a step gives back.
const DISCARDED_PER_STEP: usize = 16 * 1024 * 1024;
const ACCEPT_RETRY_US: u64 = 100_000;
const LINGER_US: u64 = 1_000_000;
/// Time for agreeing on keys.
const HANDSHAKE_US: u64 = 10_000_000;
/// Handshakes moved per step: each may cost a signature, up to milliseconds, and heartbeats must
/// not wait for many.
const HANDSHAKES_PER_STEP: usize = 4;

/// Counters since the gateway was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Connections accepted and kept.
    pub connections: u64,
    /// Connections turned away because there were too many.
    pub rejected: u64,
    /// Connections turned away because they were not from this machine, in protected mode.
    pub denied: u64,
    /// Requests understood, errors included.
    pub commands: u64,
    /// Bytes read.
    pub input_bytes: u64,
    /// Bytes written.
    pub output_bytes: u64,
    /// Connections closed because what they sent was not the Redis protocol.
    pub protocol_errors: u64,
    /// Connections dropped because they did not take their replies.
    pub slow_readers: u64,
    /// Connections dropped because nothing came from them.
    pub idle: u64,
    /// Connections dropped because all together held too much, and they the most.
    pub evicted: u64,
    /// Connections dropped because they did not log in in time.
    pub login_timeouts: u64,
    /// Connections dropped because no keys were agreed on: no TLS, no common version, no acceptable
    /// certificate, no answer.
    pub tls_failed: u64,
    /// Logins that were right.
    pub logins: u64,
    /// Logins that were wrong.
    pub logins_refused: u64,
    /// Logins refused because too many were being checked; answered with `-TRYAGAIN`.
    pub logins_busy: u64,
}

impl Stats {
    /// What was added since `earlier`.
    pub(crate) fn since(&self, earlier: &Stats) -> Stats {
        Stats {
            connections: self.connections - earlier.connections,
            rejected: self.rejected - earlier.rejected,
            denied: self.denied - earlier.denied,
            commands: self.commands - earlier.commands,
            input_bytes: self.input_bytes - earlier.input_bytes,
            output_bytes: self.output_bytes - earlier.output_bytes,
            protocol_errors: self.protocol_errors - earlier.protocol_errors,
            slow_readers: self.slow_readers - earlier.slow_readers,
            idle: self.idle - earlier.idle,
            evicted: self.evicted - earlier.evicted,
            login_timeouts: self.login_timeouts - earlier.login_timeouts,
            tls_failed: self.tls_failed - earlier.tls_failed,
            logins: self.logins - earlier.logins,
            logins_refused: self.logins_refused - earlier.logins_refused,
            logins_busy: self.logins_busy - earlier.logins_busy,
        }
    }
}

/// What commands see of the gateway.
pub(crate) struct Shared {
    pub(crate) config: GatewayConfig,
    pub(crate) stats: Stats,
    /// What the counters were at the last CONFIG RESETSTAT: INFO shows what was added since.
    pub(crate) reset: Stats,
    pub(crate) local: SocketAddr,
    pub(crate) started_us: u64,
    pub(crate) connected: usize,
    pub(crate) max_clients: usize,
    /// What the connections hold together.
    pub(crate) totals: Totals,
    /// Connections in WAIT.
    pub(crate) waits: Waits,
    /// Where there are hashed passwords: who checks them.
    pub(crate) logins: Option<Logins>,
}

/// What may change while a gateway serves. Whether there are users, and whether the port speaks
/// TLS, may not.
#[derive(Clone, Debug)]
pub struct Renewal {
    /// Certificate and key.
    pub tls: Option<Tls>,
    /// Users with hashed passwords.
    pub users: Users,
}

/// Serves Redis clients; see the crate's documentation for how to drive it.
pub struct Gateway {
    pub(crate) shared: Shared,
    registry: Registry,
    listener: TcpListener,
    token_base: usize,
    pub(crate) slab: Slab<Connection>,
    /// Places of connections with something to read or run.
    pub(crate) ready: Vec<u32>,
    /// The same, for the next step.
    pub(crate) next_ready: Vec<u32>,
    /// Places of connections with something to settle or write.
    dirty: Vec<u32>,
    pub(crate) scratch: Vec<u8>,
    /// Empty output buffers: idle connections hold none.
    pub(crate) spare_buffers: Vec<Vec<u8>>,
    /// Places of connections whose handshakes wait for a later step, in order.
    pub(crate) handshaking: VecDeque<u32>,
    /// How many handshakes this step may still move.
    pub(crate) handshakes_left: usize,
    /// How many bytes of replies this step may still encode.
    encode_budget: usize,
    /// How many of `dirty` had their turn before that was nothing; 0 while there is some.
    encoded_dirty: usize,
    /// Tickets of reads that no client waits for any more.
    cancelled_reads: Vec<u64>,
    /// Closed connections (CLIENT ID) whose snapshots the backend still holds.
    unreleased_snapshots: Vec<u64>,
    /// Replies that no client takes any more.
    discarded_replies: Vec<ReplyEncoder>,
    drained: Vec<(u64, Outcome)>,
    /// Connections that were turned away with a reply.
    rejected_connections: RejectedConnections,
    accept_ready: bool,
    accept_retry_us: Option<u64>,
    next_id: u64,
    next_sweep_us: u64,
    pressure: Pressure,
}

impl Gateway {
    /// Listens, and registers with the event queue under tokens from `token_base` on: its own and
    /// one per connection, and one more, at most 2^20 + 2. Raises the limit on open files as far as
    /// it may.
    pub fn new(
        config: GatewayConfig,
        registry: &Registry,
        token_base: usize,
    ) -> Result<Gateway, GatewayError> {
        config.check()?;
        let failed = |source| GatewayError::Listen {
            addr: config.listen,
            source,
        };
        let mut listener = listen(config.listen).map_err(failed)?;
        let local = listener.local_addr().map_err(failed)?;
        let registry = registry.try_clone().map_err(GatewayError::Poll)?;
        registry
            .register(&mut listener, Token(token_base), Interest::READABLE)
            .map_err(GatewayError::Poll)?;
        let max_clients = clients_allowed(config.max_clients);
        let logins = match config.users.is_empty() {
            true => None,
            false => Some(
                Logins::start(config.users.clone(), &registry, Token(token_base + LOGINS))
                    .map_err(GatewayError::Logins)?,
            ),
        };
        let shared = Shared {
            stats: Stats::default(),
            reset: Stats::default(),
            local,
            started_us: 0,
            connected: 0,
            max_clients,
            totals: Totals::default(),
            waits: Waits::default(),
            logins,
            config,
        };
        Ok(Gateway {
            shared,
            registry,
            listener,
            token_base,
            slab: Slab::default(),
            ready: Vec::new(),
            next_ready: Vec::new(),
            dirty: Vec::new(),
            scratch: vec![0; SCRATCH_BYTES],
            spare_buffers: Vec::new(),
            handshaking: VecDeque::new(),
            handshakes_left: 0,
            encode_budget: ENCODED_PER_STEP,
            encoded_dirty: 0,
            cancelled_reads: Vec::new(),
            unreleased_snapshots: Vec::new(),
            discarded_replies: Vec::new(),
            drained: Vec::new(),
            rejected_connections: RejectedConnections::default(),
            accept_ready: true,
            accept_retry_us: None,
            next_id: 1,
            next_sweep_us: 0,
            pressure: Pressure::default(),
        })
    }

    /// Takes other certificates and users, for connections and logins from now on. Those that are
    /// open stay.
    pub fn renew(&mut self, renewal: Renewal) {
        let config = &mut self.shared.config;
        if config.tls.is_some() && renewal.tls.is_some() {
            config.tls = renewal.tls;
        }
        if let Some(logins) = &mut self.shared.logins
            && !renewal.users.is_empty()
        {
            logins.renew(renewal.users.clone());
            config.users = renewal.users;
        }
    }

    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.shared.local
    }

    /// Connections open now.
    pub fn connections(&self) -> usize {
        self.slab.len()
    }

    /// Most connections at a time: as configured, or fewer if the system allows fewer open files.
    pub fn max_clients(&self) -> usize {
        self.shared.max_clients
    }

    /// Counters.
    pub fn stats(&self) -> Stats {
        self.shared.stats
    }

    /// Notes an event. Answers false if the token is not one of the gateway's.
    pub fn handle(&mut self, event: &Event) -> bool {
        let Some(offset) = event.token().0.checked_sub(self.token_base) else {
            return false;
        };
        if offset == 0 {
            self.accept_ready = true;
            return true;
        }
        if offset == LOGINS
            && let Some(logins) = &mut self.shared.logins
        {
            logins.drain_completions();
            return true;
        }
        if offset > MAX_CONNECTIONS {
            return false;
        }
        let index = (offset - 1) as u32;
        // A connection closed earlier in this round may still have events.
        let Some(connection) = self.slab.get_mut(index) else {
            return true;
        };
        connection.ending |= event.is_read_closed() || event.is_error();
        if event.is_readable() || connection.ending {
            connection.readable = true;
            self.list_ready(index);
        }
        if event.is_writable()
            && let Some(connection) = self.slab.get_mut(index)
        {
            connection.writable = true;
            if connection.has_output() {
                self.list_dirty(index);
            }
        }
        true
    }

    /// Whether a step would do something though no event comes: the loop must not block.
    pub fn has_work(&self) -> bool {
        let may_read = !self.ready.is_empty() && !self.pressure.is_active();
        self.accept_ready
            || may_read
            || !self.dirty.is_empty()
            || !self.handshaking.is_empty()
            || !self.discarded_replies.is_empty()
            || !self.unreleased_snapshots.is_empty()
            || self.shared.totals.excess(&self.shared.config).is_some()
            || self.shared.logins.as_ref().is_some_and(Logins::has_answers)
    }

    /// Microseconds from `now_us` until [`Gateway::step`] is due even without events.
    pub fn next_timeout_us(&mut self, now_us: u64) -> Option<u64> {
        let mut due = self.accept_retry_us;
        let mut sooner = |at: u64| due = Some(due.map_or(at, |due| due.min(at)));
        if self.slab.len() > 0 {
            sooner(self.next_sweep_us);
        }
        if let Some(at) = self.pressure.next_check_us(now_us) {
            sooner(at);
        }
        if let Some(at) = self.rejected_connections.next_us() {
            sooner(at);
        }
        if let Some(at) = self.shared.waits.next_check_us() {
            sooner(at);
        }
        due.map(|due| due.saturating_sub(now_us))
    }

    /// One round: accepts, reads, runs commands, writes replies. `now_us` is a monotonic clock in
    /// microseconds. Answers how many connections and requests it dealt with.
    pub fn step(&mut self, now_us: u64, backend: &mut dyn Backend) -> usize {
        if self.shared.started_us == 0 {
            self.shared.started_us = now_us;
        }
        let commands_before = self.shared.stats.commands;
        self.handshakes_left = HANDSHAKES_PER_STEP;
        self.encode_budget = ENCODED_PER_STEP;
        if !self.cancelled_reads.is_empty() {
            backend.forget_reads(&self.cancelled_reads);
            self.cancelled_reads.clear();
        }
        for client in self.unreleased_snapshots.drain(..) {
            backend.release_snapshots(client);
        }
        self.free_discarded_replies();
        self.rejected_connections.close_expired(now_us);
        let mut work = self.accept(now_us) + self.answer_logins(backend);
        for _ in 0..HANDSHAKES_PER_STEP {
            if let Some(index) = self.handshaking.pop_front() {
                self.pump(index, true, now_us, backend);
                work += 1;
            }
        }
        for round in 0..ROUNDS_PER_STEP {
            if round > 0 && self.ready.is_empty() {
                break;
            }
            let mut ready = std::mem::take(&mut self.ready);
            let mut checked = 0;
            for index in &ready {
                let ran = self.shared.stats.commands - commands_before;
                let (pressed, open) = (backend.is_backpressured(), self.slab.len());
                if ran >= COMMANDS_PER_STEP || self.pressure.must_wait(now_us, pressed, open) {
                    break;
                }
                self.pump(*index, round == 0, now_us, backend);
                checked += 1;
            }
            work += checked;
            // The others are first in the next step.
            drop(self.next_ready.splice(..0, ready.drain(checked..)));
            self.recycle_ready(ready);
            let mut drained = std::mem::take(&mut self.drained);
            backend.drain(&mut |ticket, outcome| drained.push((ticket, outcome)));
            work += drained.len();
            for (ticket, outcome) in drained.drain(..) {
                self.complete(ticket, outcome);
            }
            self.drained = drained;
            self.encode_due_replies(backend);
        }
        if self.ready.is_empty() {
            std::mem::swap(&mut self.ready, &mut self.next_ready);
        } else {
            self.ready.append(&mut self.next_ready);
        }
        if self.ready.is_empty() {
            self.pressure.end();
        }
        self.answer_waits(now_us, backend);
        work += self.flush(now_us, backend);
        self.evict();
        if now_us >= self.next_sweep_us {
            self.sweep(now_us);
        }
        // Work is at most what fits in memory.
        work + (self.shared.stats.commands - commands_before) as usize
    }

    /// Keeps the list's memory.
    fn recycle_ready(&mut self, mut list: Vec<u32>) {
        if self.ready.is_empty() {
            list.clear();
            self.ready = list;
        }
    }

    /// Notes the outcome of a submitted command. Tickets of connections that are gone, and second
    /// outcomes, are ignored. The reply leaves with the next [`Gateway::flush`] or
    /// [`Gateway::step`].
    pub fn complete(&mut self, ticket: u64, outcome: Outcome) {
        let Some((index, seq, connection)) = self.slab.by_ticket(ticket) else {
            return self
                .discarded_replies
                .extend(ReplyEncoder::from_discarded(outcome));
        };
        let is_due = connection.session.complete(seq, outcome);
        let held = connection.held();
        let totals = &mut self.shared.totals;
        totals.recount(&mut connection.counted, held);
        // Who does not take the replies before this one is to be found out before there are many.
        let is_much = connection.session.unsent() > self.shared.config.output_limit_bytes;
        if is_due || is_much || connection.stalled.is_some() {
            self.list_dirty(index);
        }
    }

    /// Gives some memory back.
    fn free_discarded_replies(&mut self) {
        let mut most = DISCARDED_PER_STEP;
        while let Some(rest) = self.discarded_replies.last_mut()
            && rest.discard(&mut most)
        {
            self.discarded_replies.pop();
        }
    }

    /// Encodes the replies that are due and lists the connections that may now go on.
    fn encode_due_replies(&mut self, backend: &dyn Backend) {
        for at in 0..self.dirty.len() {
            let index = self.dirty[at];
            if let Some(connection) = self.slab.get_mut(index) {
                let left = self.encode_budget;
                connection
                    .session
                    .encode_due_replies(backend, &mut self.encode_budget);
                if left > 0 && self.encode_budget == 0 {
                    self.encoded_dirty = at + 1;
                }
                let held = connection.held();
                let totals = &mut self.shared.totals;
                totals.recount(&mut connection.counted, held);
                if connection.may_resume(&self.shared.config) {
                    self.list_ready(index);
                }
            }
        }
    }

    /// Writes the replies that are due, one write per connection. Answers how many connections had
    /// some.
    pub fn flush(&mut self, now_us: u64, backend: &dyn Backend) -> usize {
        self.encode_due_replies(backend);
        let mut dirty = std::mem::take(&mut self.dirty);
        // Those that had no turn are the first to be listed for the next step.
        dirty.rotate_left(std::mem::take(&mut self.encoded_dirty));
        let flushed = dirty.len();
        for index in dirty.drain(..) {
            let Some(mut connection) = self.slab.take(index) else {
                continue;
            };
            connection.in_dirty = false;
            let lives = self.write(&mut connection, now_us);
            if lives {
                self.recount(&mut connection);
                self.slab.put(index, connection);
            } else {
                self.close(connection);
            }
        }
        if self.dirty.is_empty() {
            self.dirty = dirty;
        }
        flushed
    }

    /// Writes what a connection is owed; returns whether it lives on.
    fn write(&mut self, connection: &mut Connection, now_us: u64) -> bool {
        let before = connection.session.out.len() - connection.session.sent();
        let flushed = connection.write(now_us);
        let after = connection.session.out.len() - connection.session.sent();
        self.shared.stats.output_bytes += (before - after) as u64;
        match flushed {
            Flushed::Gone => return false,
            Flushed::Part => {
                if connection.session.unsent() > self.shared.config.output_limit_bytes {
                    self.shared.stats.slow_readers += 1;
                    return false;
                }
            }
            Flushed::All => {
                let out = std::mem::take(&mut connection.session.out);
                if (1..=KEPT_BUFFER).contains(&out.capacity())
                    && self.spare_buffers.len() < SPARE_BUFFERS
                {
                    self.spare_buffers.push(out);
                }
                let finished = connection.session.in_flight() == 0 && !connection.session.waits();
                if finished && connection.ended && connection.stalled.is_none() {
                    return false;
                }
                if finished && connection.session.closing && connection.linger_until_us.is_none() {
                    if connection.stream.shutdown().is_err() {
                        return false;
                    }
                    connection.linger_until_us = Some(now_us + LINGER_US);
                    connection.readable = true;
                    self.list_ready_taken(connection);
                }
            }
        }
        // A blocked socket says when it takes more.
        if flushed == Flushed::All && connection.session.is_due() {
            self.list_dirty_taken(connection);
        }
        if connection.may_resume(&self.shared.config) {
            self.list_ready_taken(connection);
        }
        true
    }

    pub(crate) fn list_ready(&mut self, index: u32) {
        if let Some(connection) = self.slab.get_mut(index)
            && !connection.in_ready
        {
            connection.in_ready = true;
            self.ready.push(index);
        }
    }

    fn list_ready_taken(&mut self, connection: &mut Connection) {
        if !connection.in_ready {
            connection.in_ready = true;
            self.ready.push(connection.session.index);
        }
    }

    pub(crate) fn list_dirty(&mut self, index: u32) {
        if let Some(connection) = self.slab.get_mut(index)
            && !connection.in_dirty
        {
            connection.in_dirty = true;
            self.dirty.push(index);
        }
    }

    pub(crate) fn list_dirty_taken(&mut self, connection: &mut Connection) {
        if !connection.in_dirty {
            connection.in_dirty = true;
            self.dirty.push(connection.session.index);
        }
    }

    /// Lets the backend release, in the next step, the snapshots that a connection has begun.
    pub(crate) fn release_snapshots(&mut self, session: &mut Session) {
        if std::mem::take(&mut session.holds_snapshots) {
            self.unreleased_snapshots.push(session.id);
        }
    }

    /// Ends a connection that has been taken out of the slab.
    pub(crate) fn close(&mut self, mut connection: Box<Connection>) {
        // It may fail only if it was never registered; closing the socket takes it off the queue
        // anyway.
        let _ = self.registry.deregister(&mut connection.stream);
        let index = connection.session.index;
        if connection.session.waiting.is_some() {
            self.shared.waits.remove(index);
        }
        if let (Some(logins), Some(pending_login)) =
            (&mut self.shared.logins, &connection.session.pending_login)
        {
            logins.forget(pending_login.ticket, connection.session.peer.ip());
        }
        let totals = &mut self.shared.totals;
        totals.recount(&mut connection.counted, HeldBytes::default());
        self.cancelled_reads
            .extend(connection.session.unanswered_reads());
        self.discarded_replies
            .extend(connection.session.discarded_replies());
        self.release_snapshots(&mut connection.session);
        self.slab.free(index);
        self.shared.connected = self.slab.len();
    }
}

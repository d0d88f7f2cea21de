//! One client: its socket, what it sent, what it is owed.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;

use cyclone_wire::client::ReadMode;
use cyclone_wire::reply::{Failure, Reply};
use cyclone_wire::resp::{Protocol, RequestParser, encode};

use crate::backend::{Backend, Outcome, Route};
use crate::command::transaction::{Extra, Multi, Watches, encode_parts};
use crate::config::GatewayConfig;
use crate::login::PendingLogin;
use crate::memory::HeldBytes;
use crate::reply::{Shape, encode_reply, refuse_route, route_to};
use crate::reply_encoder::ReplyEncoder;
use crate::slab::{SEQ_MASK, ticket};
use crate::stream::Stream;

/// A buffer that grew beyond this is given back once empty.
pub(crate) const KEPT_BUFFER: usize = 64 * 1024;
const KEPT_PENDING: usize = 64;
/// A reply longer than this is encoded a portion at a time.
const PORTION: usize = 64 * 1024;
/// Encoded bytes that wait for the socket, at which no further reply is encoded.
const ENCODED_AHEAD: usize = 256 * 1024;

/// The user of a connection that has not logged in.
pub(crate) const DEFAULT_USER: &[u8] = b"default";

/// Where a command stands.
#[derive(Debug)]
enum State {
    /// With the backend.
    Waiting,
    /// Answered, but an earlier one is not.
    Done(Outcome),
    /// Answered by the gateway itself; the encoded reply.
    Local(Vec<u8>),
    /// A part of the reply is encoded.
    PartlyEncoded(ReplyEncoder),
}

/// A command whose reply has not been handed to the socket's buffer.
#[derive(Debug)]
pub(crate) struct Pending {
    state: State,
    shape: Shape,
    protocol: Protocol,
    is_read: bool,
    quiet: bool,
    slot: u16,
    /// Bytes of the request, counted against the connection's limit.
    bytes: usize,
    /// Bytes that the answer occupies, as far as it is there.
    held: usize,
    extra: Option<Extra>,
}

impl Pending {
    /// Whether the reply is there, and longer than a portion.
    fn is_long(&self) -> bool {
        match &self.state {
            State::PartlyEncoded(_) => true,
            State::Done(Outcome::Done(Reply::Failed(_))) => false,
            State::Done(Outcome::Done(_)) | State::Local(_) => self.held > PORTION,
            State::Waiting | State::Done(_) => false,
        }
    }
}

/// CLIENT REPLY.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReplyMode {
    On,
    Off,
    /// Not for the next command.
    SkipNext,
}

/// Why a connection's next command may not begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stall {
    /// Too much is in flight or unsent, or WAIT or AUTH is not over.
    Full,
    /// A write behind unanswered reads.
    BehindReads,
    /// A command that waits for all before it.
    BehindAll,
}

/// A WAIT that is not satisfied yet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Waiting {
    pub(crate) mark: u64,
    pub(crate) replicas: usize,
    /// `u64::MAX`: no deadline.
    pub(crate) deadline_us: u64,
    /// The client wants no reply.
    pub(crate) quiet: bool,
}

/// What commands see of a connection.
pub(crate) struct Session {
    /// CLIENT ID: never reused.
    pub(crate) id: u64,
    pub(crate) index: u32,
    generation: u32,
    /// Number of the oldest pending command.
    head: u32,
    pending: VecDeque<Pending>,
    /// Reads the backend has not answered.
    pub(crate) reads: usize,
    /// Bytes of pending requests.
    pub(crate) request_bytes: usize,
    /// Bytes of those that the backend has not answered.
    unanswered_bytes: usize,
    /// Bytes of answers that wait for an earlier one, and of what an EXEC has answered already.
    held_bytes: usize,
    pub(crate) out: Vec<u8>,
    sent: usize,
    pub(crate) protocol: Protocol,
    pub(crate) authenticated: bool,
    /// Since when it may, and must, log in.
    pub(crate) unauthenticated_since_us: u64,
    pub(crate) name: Vec<u8>,
    pub(crate) lib_name: Vec<u8>,
    pub(crate) lib_version: Vec<u8>,
    pub(crate) reply_mode: ReplyMode,
    /// What the command that runs has made of it.
    pub(crate) reply_set: Option<ReplyMode>,
    pub(crate) readonly: bool,
    /// CLIENT READMODE; `None`: as configured.
    pub(crate) read_mode: Option<ReadMode>,
    /// CLIENT SCANMODE SNAPSHOT.
    pub(crate) holds_scans: bool,
    /// It has begun a snapshot (CYCLONE SNAPSHOT BEGIN).
    pub(crate) holds_snapshots: bool,
    pub(crate) no_evict: bool,
    pub(crate) no_touch: bool,
    /// Answer what is pending, then hang up.
    pub(crate) closing: bool,
    pub(crate) waiting: Option<Waiting>,
    /// An AUTH that the login thread checks.
    pub(crate) pending_login: Option<PendingLogin>,
    /// Between MULTI and EXEC.
    pub(crate) multi: Option<Box<Multi>>,
    pub(crate) watches: Watches,
    /// Goes with the next command submitted.
    pub(crate) extra: Option<Extra>,
    pub(crate) created_us: u64,
    pub(crate) active_us: u64,
    pub(crate) peer: SocketAddr,
    pub(crate) local: SocketAddr,
    /// The socket's number in this process.
    pub(crate) fd: i32,
    /// Who has logged in.
    pub(crate) user: Vec<u8>,
    pub(crate) last_command: &'static str,
}

/// What CLIENT LIST reports about a connection's replies, in bytes but for `waiting`.
pub(crate) struct Buffers {
    pub(crate) allocated: usize,
    /// Encoded and not sent.
    pub(crate) encoded: usize,
    /// Replies that are not encoded, or not there.
    pub(crate) waiting: usize,
    /// What those hold.
    pub(crate) held: usize,
}

impl Session {
    pub(crate) fn new(
        id: u64,
        place: (u32, u32),
        addrs: (SocketAddr, SocketAddr),
        trusted: bool,
        now_us: u64,
    ) -> Session {
        Session {
            id,
            index: place.0,
            generation: place.1,
            head: 0,
            pending: VecDeque::new(),
            reads: 0,
            request_bytes: 0,
            unanswered_bytes: 0,
            held_bytes: 0,
            out: Vec::new(),
            sent: 0,
            protocol: Protocol::Resp2,
            authenticated: trusted,
            unauthenticated_since_us: now_us,
            name: Vec::new(),
            lib_name: Vec::new(),
            lib_version: Vec::new(),
            reply_mode: ReplyMode::On,
            reply_set: None,
            readonly: false,
            read_mode: None,
            holds_scans: false,
            holds_snapshots: false,
            no_evict: false,
            no_touch: false,
            closing: false,
            waiting: None,
            pending_login: None,
            multi: None,
            watches: Watches::default(),
            extra: None,
            created_us: now_us,
            active_us: now_us,
            peer: addrs.0,
            local: addrs.1,
            fd: -1,
            user: DEFAULT_USER.to_vec(),
            last_command: "NULL",
        }
    }

    pub(crate) fn buffers(&self) -> Buffers {
        Buffers {
            allocated: self.out.capacity(),
            encoded: self.out.len() - self.sent,
            waiting: self.pending.len(),
            held: self.held_bytes,
        }
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.pending.len()
    }

    /// Pending commands that there is memory for, beyond what is kept in any case.
    fn pending_capacity(&self) -> usize {
        match self.pending.capacity() {
            ..=KEPT_PENDING => self.pending.len(),
            many => many,
        }
    }

    /// The ticket of the command that would be submitted next.
    pub(crate) fn next_ticket(&self) -> u64 {
        // The queue is bounded far below SEQ_MASK.
        ticket(
            self.generation,
            self.index,
            self.head + self.pending.len() as u32,
        )
    }

    /// Notes a command that was submitted under [`Session::next_ticket`]; `bytes` are those of its
    /// request.
    pub(crate) fn push_submitted(
        &mut self,
        is_read: bool,
        shape: Shape,
        slot: u16,
        bytes: usize,
        quiet: bool,
    ) {
        self.reads += usize::from(is_read);
        let extra = self.extra.take();
        let held = extra.as_ref().map_or(0, Extra::held);
        self.held_bytes += held;
        let bytes = bytes + extra.as_ref().map_or(0, Extra::batch_bytes);
        self.unanswered_bytes += bytes;
        self.push(Pending {
            extra,
            state: State::Waiting,
            shape,
            protocol: self.protocol,
            is_read,
            quiet,
            slot,
            bytes,
            held,
        });
    }

    /// Notes a reply that must wait for earlier ones.
    pub(crate) fn push_local(&mut self, reply: Vec<u8>) {
        let held = reply.len();
        self.held_bytes += held;
        let bytes = 0;
        let (shape, protocol) = (Shape::Plain, self.protocol);
        self.push(Pending {
            extra: None,
            state: State::Local(reply),
            shape,
            protocol,
            is_read: false,
            quiet: false,
            slot: 0,
            bytes,
            held,
        });
    }

    fn push(&mut self, pending: Pending) {
        self.request_bytes += pending.bytes;
        self.pending.push_back(pending);
    }

    /// Notes an outcome; returns whether the oldest command is now answered. A second outcome is
    /// ignored.
    pub(crate) fn complete(&mut self, seq: u32, outcome: Outcome) -> bool {
        let offset = seq.wrapping_sub(self.head) & SEQ_MASK;
        let Some(pending) = self.pending.get_mut(offset as usize) else {
            return false;
        };
        if !matches!(pending.state, State::Waiting) {
            return false;
        }
        self.reads -= usize::from(pending.is_read);
        self.unanswered_bytes -= pending.bytes;
        let outcome = match &mut pending.extra {
            Some(Extra::Watch { keys, epoch }) => self.watches.learn(keys, *epoch, outcome),
            _ => outcome,
        };
        let held = held(&outcome);
        pending.held += held;
        self.held_bytes += held;
        pending.state = State::Done(outcome);
        offset == 0
    }

    /// Whether the oldest command is answered and its reply not encoded.
    pub(crate) fn is_due(&self) -> bool {
        let front = self.pending.front();
        front.is_some_and(|front| !matches!(front.state, State::Waiting))
    }

    /// The long replies that the client takes no more.
    pub(crate) fn discarded_replies(&mut self) -> impl Iterator<Item = ReplyEncoder> + '_ {
        self.pending.drain(..).filter_map(|it| match it.state {
            State::PartlyEncoded(rest) => Some(rest),
            State::Done(outcome) if it.held > PORTION => ReplyEncoder::from_discarded(outcome),
            _ => None,
        })
    }

    /// Tickets of the reads that the backend has not answered.
    pub(crate) fn unanswered_reads(&self) -> impl Iterator<Item = u64> + '_ {
        let waiting = |(_, it): &(u32, &Pending)| it.is_read && matches!(it.state, State::Waiting);
        let pending = (0..).zip(&self.pending).filter(waiting);
        pending.map(|(at, _)| ticket(self.generation, self.index, self.head + at))
    }

    /// Whether the reply of the oldest command is a long one.
    fn is_long(&self) -> bool {
        self.pending.front().is_some_and(Pending::is_long)
    }

    /// Encodes the replies that are due, in order: so much that the socket has something to take,
    /// and of long ones no more than about `most` bytes, which become fewer. Short ones do not wait
    /// for what long ones of other connections leave.
    pub(crate) fn encode_due_replies(&mut self, backend: &dyn Backend, most: &mut usize) {
        while self.out.len() - self.sent < ENCODED_AHEAD
            && self.is_due()
            && (*most > 0 || !self.is_long())
            && let Some(mut front) = self.pending.pop_front()
        {
            let before = self.out.len();
            let is_long = front.is_long();
            let state = std::mem::replace(&mut front.state, State::Waiting);
            let rest = match state {
                State::Waiting => None,
                State::Local(reply) => {
                    self.out.extend_from_slice(&reply);
                    None
                }
                State::Done(Outcome::Done(reply)) if is_long => {
                    let (shape, protocol) = (front.shape, front.protocol);
                    Some(match (front.extra.take(), reply) {
                        (Some(Extra::Exec { parts, .. }), Reply::Array(replies)) => {
                            ReplyEncoder::of_parts(&mut self.out, parts, replies, protocol)
                        }
                        (_, reply) => ReplyEncoder::new(reply, shape, protocol),
                    })
                }
                State::Done(outcome) => {
                    if !front.quiet {
                        encode_outcome(&mut self.out, &outcome, &front, backend);
                    }
                    None
                }
                State::PartlyEncoded(rest) => Some(rest),
            };
            let left = rest.and_then(|mut rest| {
                let is_whole = rest.encode(&mut self.out, PORTION);
                (!is_whole).then_some(rest)
            });
            *most = most.saturating_sub(self.out.len() - before);
            if front.quiet {
                self.out.truncate(before);
            }
            if let Some(rest) = left {
                front.state = State::PartlyEncoded(rest);
                self.pending.push_front(front);
                continue;
            }
            self.held_bytes -= front.held;
            self.request_bytes -= front.bytes;
            self.head = (self.head + 1) & SEQ_MASK;
        }
        if self.pending.is_empty() && self.pending.capacity() > KEPT_PENDING {
            self.pending = VecDeque::new();
        }
    }

    /// Whether the connection may not begin another command for now.
    pub(crate) fn is_full(&self, config: &GatewayConfig) -> bool {
        self.in_flight() >= config.max_in_flight
            || self.request_bytes >= config.max_query_buffer
            || self.unsent() >= config.output_pause_bytes
            || self.waits()
    }

    /// Whether a command of the gateway's own is not over.
    pub(crate) fn waits(&self) -> bool {
        self.waiting.is_some() || self.pending_login.is_some()
    }

    /// Bytes of replies that the client has not taken.
    pub(crate) fn unsent(&self) -> usize {
        self.out.len() - self.sent + self.held_bytes
    }

    /// How much of `out` the socket has taken.
    pub(crate) fn sent(&self) -> usize {
        self.sent
    }

    pub(crate) fn has_output(&self) -> bool {
        self.out.len() > self.sent
    }
}

/// What an outcome occupies: its own place, and the blocks of memory that it refers to.
fn held(outcome: &Outcome) -> usize {
    /// What the allocator adds to a block, roughly.
    const BLOCK: usize = 16;
    fn behind(reply: &Reply) -> usize {
        match reply {
            Reply::Bytes(bytes) => bytes.capacity() + BLOCK,
            Reply::Array(items) => {
                let pending_capacity = items.capacity() * size_of::<Reply>() + BLOCK;
                pending_capacity + items.iter().map(behind).sum::<usize>()
            }
            _ => 0,
        }
    }
    let behind = match outcome {
        Outcome::Done(reply) => behind(reply),
        Outcome::Refused(reason) | Outcome::NoQuorum(reason) => reason.capacity() + BLOCK,
        _ => 0,
    };
    size_of::<Outcome>() + behind
}

fn encode_outcome(out: &mut Vec<u8>, outcome: &Outcome, pending: &Pending, backend: &dyn Backend) {
    match outcome {
        Outcome::Done(reply) => match (&pending.extra, reply) {
            (Some(Extra::Exec { parts, .. }), Reply::Array(replies)) => {
                encode_parts(out, parts, replies, pending.protocol);
            }
            (Some(Extra::Exec { .. }), Reply::Failed(Failure::ConditionFailed)) => {
                encode::null_array(out, pending.protocol);
            }
            _ => encode_reply(out, reply, pending.shape, pending.protocol),
        },
        Outcome::NotLeader => match route_to(backend, pending.slot) {
            Route::Local => encode::error(out, "TRYAGAIN not done: leadership changed, retry"),
            elsewhere => refuse_route(out, pending.slot, &elsewhere),
        },
        Outcome::Busy => encode::error(out, "TRYAGAIN overloaded, retry later"),
        Outcome::Damaged => encode::error(
            out,
            "TRYAGAIN not done: the store of this node is damaged, retry when another node leads",
        ),
        Outcome::Unknown if pending.shape == Shape::Repeatable => encode::error(
            out,
            "UNKNOWN outcome: leadership changed before the change was confirmed; give the command again",
        ),
        Outcome::Unknown if !pending.is_read => encode::error(
            out,
            "ERR outcome unknown: leadership changed before the write was confirmed; it may or may not have been done",
        ),
        Outcome::Lost | Outcome::Unknown => {
            encode::error(out, "TRYAGAIN not done: leadership changed, retry")
        }
        Outcome::Full => encode::error(out, "OOM memory is full: only deletions are taken"),
        Outcome::Refused(reason) => encode::error(out, format!("ERR {reason}")),
        Outcome::NoQuorum(reason) => encode::error(out, format!("NOQUORUM {reason}")),
        Outcome::TooLarge => encode::error(out, "ERR command is longer than the node's limit"),
    }
}

/// How writing went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flushed {
    /// Everything is with the kernel.
    All,
    /// The socket takes no more for now.
    Part,
    /// The connection is gone.
    Gone,
}

/// A connection and its socket.
pub(crate) struct Connection {
    pub(crate) stream: Stream,
    pub(crate) parser: RequestParser,
    /// Bytes received and not yet executed, from `input_at` on.
    pub(crate) input: Vec<u8>,
    pub(crate) input_at: usize,
    pub(crate) session: Session,
    /// The socket may have bytes.
    pub(crate) readable: bool,
    pub(crate) writable: bool,
    /// The peer has sent its last byte, or is about to: read until the end shows.
    pub(crate) ending: bool,
    /// The peer has sent its last byte.
    pub(crate) ended: bool,
    /// Why `input` may hold commands that could not run yet.
    pub(crate) stalled: Option<Stall>,
    /// Listed for the next round, for settling and flushing.
    pub(crate) in_ready: bool,
    pub(crate) in_dirty: bool,
    /// Since when the socket takes no replies.
    pub(crate) blocked_since_us: Option<u64>,
    /// Our side is shut; until when the peer's rest is read and dropped, lest a reset destroy our
    /// last reply.
    pub(crate) linger_until_us: Option<u64>,
    /// What the sums over all connections count for this one.
    pub(crate) counted: HeldBytes,
    /// Until when keys must be agreed on.
    pub(crate) handshake_until_us: Option<u64>,
}

impl Connection {
    /// Whether commands were held back and may go on.
    pub(crate) fn may_resume(&self, config: &GatewayConfig) -> bool {
        match self.stalled {
            None => false,
            Some(_) if self.session.is_full(config) => false,
            Some(Stall::Full) => true,
            Some(Stall::BehindReads) => self.session.reads == 0,
            Some(Stall::BehindAll) => self.session.in_flight() == 0,
        }
    }

    /// What it holds.
    pub(crate) fn held(&self) -> HeldBytes {
        let session = &self.session;
        // Short buffers go from one connection to the next, and are few.
        let out = match session.out.capacity() {
            ..=KEPT_BUFFER => session.out.len(),
            long => long,
        };
        let queued = session.multi.as_ref().map_or(0, |multi| multi.held());
        let stream = self.stream.held();
        HeldBytes {
            input_bytes: stream.input_bytes
                + self.input.capacity()
                + self.parser.held()
                + queued
                + session.watches.held()
                + session.unanswered_bytes,
            output_bytes: stream.output_bytes
                + out
                + session.held_bytes
                + session.pending_capacity() * size_of::<Pending>(),
        }
    }

    /// Whether something waits for the socket.
    pub(crate) fn has_output(&self) -> bool {
        self.session.has_output() || self.stream.wants_write()
    }

    pub(crate) fn write(&mut self, now_us: u64) -> Flushed {
        let session = &mut self.session;
        while session.has_output() {
            if !self.writable {
                return Flushed::Part;
            }
            match self.stream.write(&session.out[session.sent..]) {
                Ok(0) => return Flushed::Gone,
                Ok(written) => {
                    session.sent += written;
                    session.active_us = now_us;
                    self.blocked_since_us = None;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.writable = false;
                    self.blocked_since_us.get_or_insert(now_us);
                    // What is sent is given back, or a slow reader's buffer would only grow.
                    if session.sent * 2 >= session.out.len() {
                        session.out.drain(..session.sent);
                        session.sent = 0;
                    }
                    return Flushed::Part;
                }
                Err(_) => return Flushed::Gone,
            }
        }
        session.out.clear();
        session.sent = 0;
        match self.stream.flush() {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.writable = false;
                self.blocked_since_us.get_or_insert(now_us);
                return Flushed::Part;
            }
            Err(_) => return Flushed::Gone,
        }
        self.blocked_since_us = None;
        Flushed::All
    }
}

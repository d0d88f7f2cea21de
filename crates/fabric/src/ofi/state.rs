//! What an endpoint knows: connections, operations, grants, registrations.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::{Duration, Instant};

use super::buffers::Buffer;
use super::port::{Port, Registered};
use super::turns::Turns;
use super::wire::Kind;
use crate::event::FailureKind;
use crate::key::{Access, Address, Token};

/// Answers that one connection may have waiting before it is ended: a peer that does not take them
/// is no peer.
pub const MAX_CONTROL: usize = 4096;

/// What stands in a slot.
pub enum Work {
    /// A one-sided operation, an append or the program's message.
    Operation {
        connection: u64,
        operation: u64,
        buffer: Buffer,
    },
    /// A message of the provider's own.
    Message { connection: u64, buffer: Buffer },
    /// A buffer for one message.
    Receive { buffer: Buffer },
    /// A segment of an append queue, which holds many.
    Segment { queue: u64, offset: u64 },
}

/// What an operation does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    Write,
    Read,
    Flush,
    CompareSwap,
    FetchAdd,
    Append,
    Send,
}

impl Ask {
    /// Its name for people.
    pub fn name(self) -> &'static str {
        match self {
            Ask::Write => "write",
            Ask::Read => "read",
            Ask::Flush => "flush",
            Ask::CompareSwap => "compare-swap",
            Ask::FetchAdd => "fetch-add",
            Ask::Append => "append",
            Ask::Send => "send",
        }
    }

    /// The right it needs.
    pub fn needs(self) -> Access {
        match self {
            Ask::Write | Ask::Flush => Access::WRITE,
            Ask::Read => Access::READ,
            _ => Access::ATOMIC,
        }
    }

    /// Whether it works on a peer's memory without the peer's program.
    pub fn one_sided(self) -> bool {
        matches!(
            self,
            Ask::Write | Ask::Read | Ask::CompareSwap | Ask::FetchAdd
        )
    }
}

/// An operation posted and not completed.
pub struct Pending {
    pub context: u64,
    pub ask: Ask,
    /// Key: id, token and the length that it claims.
    pub id: u64,
    pub token: Token,
    pub claimed: u64,
    pub offset: u64,
    pub len: u64,
    pub posted: Instant,
    /// The bytes, until the provider has them.
    pub buffer: Option<Buffer>,
}

impl Pending {
    /// For people.
    pub fn describe(&self) -> String {
        match self.ask {
            Ask::Append | Ask::Send => format!("{} of {} bytes", self.ask.name(), self.len),
            ask => format!(
                "{} of {}+{} in registration {}",
                ask.name(),
                self.offset,
                self.len,
                self.id
            ),
        }
    }
}

/// The means to use a key, as its owner gave them.
#[derive(Clone, Debug)]
pub enum Grant {
    /// Asked for.
    Asked,
    Memory {
        base: u64,
        key: u64,
        len: u64,
        access: Access,
    },
    Queue {
        peer: u64,
        max: u64,
    },
    Denied(FailureKind),
}

/// A connection, opened by either side.
pub struct Connection {
    pub peer: u64,
    pub raw: Vec<u8>,
    pub address: Address,
    /// The peer's incarnation, and its id for this connection once it has answered.
    pub incarnation: u64,
    pub theirs: Option<u64>,
    /// The link of a chain's member to the next: its events are not the program's.
    pub inner: bool,
    /// The peer's thread answers at any time: silence means that it is gone.
    pub answers: bool,
    pub control: VecDeque<(Kind, [u64; 5], Vec<u8>)>,
    /// The next message's number.
    pub sent: u16,
    /// The peer's messages, put into their order.
    pub turns: Turns,
    pub pending: BTreeMap<u64, Pending>,
    pub next: u64,
    /// The first operation that the provider does not have yet.
    pub issue: u64,
    /// One-sided operations with the provider.
    pub flying: usize,
    /// The next operation waits for room, and messages behind it, or small ones could starve a
    /// large one.
    pub starved: bool,
    /// Atomics took effect that no commit covers.
    pub uncommitted: bool,
    pub grants: HashMap<(u64, u64), Grant>,
    /// Keys that ended; the owner waits until nothing is in flight.
    pub draining: Vec<u64>,
    pub opened: Instant,
    pub heard: Instant,
    pub pinged: Instant,
}

impl Connection {
    /// `largest`: the most bytes of a message.
    pub fn new(
        peer: u64,
        raw: Vec<u8>,
        address: Address,
        incarnation: u64,
        now: Instant,
        largest: usize,
    ) -> Self {
        Connection {
            peer,
            raw,
            address,
            incarnation,
            theirs: None,
            inner: false,
            answers: false,
            control: VecDeque::new(),
            sent: 0,
            turns: Turns::new(largest),
            pending: BTreeMap::new(),
            next: 1,
            issue: 1,
            flying: 0,
            starved: false,
            uncommitted: false,
            grants: HashMap::new(),
            draining: Vec::new(),
            opened: now,
            heard: now,
            pinged: now,
        }
    }

    /// Whether the peer was silent for half the time and has not been asked since. Only providers
    /// that keep connections notice a death without it.
    pub fn wants_ping(&self, now: Instant, idle: Duration) -> bool {
        self.theirs.is_some()
            && self.pinged <= self.heard
            && now.duration_since(self.heard) > idle / 2
    }

    /// Whether a peer that answers at any time was asked and did not, half the time long. Time in
    /// which this process stood still counts only since the question.
    pub fn is_silent(&self, now: Instant, idle: Duration) -> bool {
        self.answers && self.pinged > self.heard && now.duration_since(self.pinged) > idle / 2
    }

    /// Whether there is anything to hand to the provider.
    pub fn has_work(&self) -> bool {
        !self.control.is_empty() || self.issue < self.next || !self.draining.is_empty()
    }

    /// Whether the provider holds one-sided operations under this key.
    pub fn uses(&self, id: u64) -> bool {
        self.pending
            .range(..self.issue)
            .any(|(_, pending)| pending.id == id && pending.ask.one_sided())
    }
}

/// Memory that peers may use.
pub struct Registration {
    /// Dropping it ends remote access.
    pub memory: Registered,
    pub base: u64,
    pub offset: u64,
    pub len: u64,
    pub access: Access,
    pub token: Token,
    /// Connections that were given the means to use it, but for those that ended with nothing in
    /// flight.
    pub granted: BTreeSet<u64>,
}

/// A registration that is ending.
pub struct Revoking {
    pub key: u64,
    /// Dropping it ends remote access.
    pub memory: Registered,
    /// Connections that were given the means to use it and did not say yet that nothing is in
    /// flight.
    pub waiting: BTreeSet<u64>,
    /// Some ended without saying so: their operations in flight can only be cut off.
    pub lost: bool,
}

/// An append queue of this endpoint.
pub struct Queue {
    /// `None` once closed.
    pub port: Option<Port>,
    pub address: Vec<u8>,
    pub segment_bytes: u64,
    pub max_posted: u32,
    pub token: Token,
    /// Segments in order of posting, and whether the provider is done with each.
    pub posted: VecDeque<(u64, bool)>,
    /// Segments that the provider did not take yet, last in `posted`.
    pub unsent: VecDeque<u64>,
    pub granted: BTreeSet<u64>,
}

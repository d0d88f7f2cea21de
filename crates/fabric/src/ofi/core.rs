//! The endpoint behind its lock: completions in, messages in, operations out.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::{Duration, Instant};

use cyclone_pmem::SharedArea;

use super::buffers::{Buffer, Buffers, Slots};
use super::chain::Chain;
use super::hop::Hop;
use super::names::fresh_name;
use super::port::{Completion, Port, Refusal, Registered};
use super::provider::{Provider, Terms};
use super::state::{Connection, MAX_CONTROL, Pending, Queue, Registration, Revoking, Work};
use super::sys;
use super::wire::{HEADER_BYTES, Header, Kind};
use super::{OfiOptions, Progress};
use crate::endpoint::FabricError;
use crate::event::{Event, Failure, FailureKind};
use crate::key::Address;
use crate::operation::ConnectionId;

/// Room for a chain operation's fields beside its data.
pub const CHAIN_ROOM: usize = 1024;

/// Operations with the providers at once, over all connections; those of dead peers count until the
/// provider releases them.
const MAX_SLOTS: usize = 16 * 1024;

/// How often time-outs are looked for.
const TIMER: Duration = Duration::from_millis(5);

/// All of an endpoint. The order of fields is the order in which they end: ports before what they
/// use.
pub struct Core {
    pub port: Port,
    pub queues: BTreeMap<u64, Queue>,
    pub registrations: BTreeMap<u64, Registration>,
    pub revoking: Option<Revoking>,
    /// Keys that were revoked while the port could not be opened anew: what came in by it may still
    /// be in flight.
    pub not_cut_off: BTreeSet<u64>,
    pub slots: Slots<Work>,
    pub buffers: Buffers,
    /// The endpoint's own memory for receives into it, where the provider wants it registered.
    pub local: Option<Registered>,
    pub provider: Provider,
    pub terms: Terms,
    pub area: SharedArea,
    pub options: OfiOptions,
    pub incarnation: u64,
    pub raw_address: Vec<u8>,
    pub connections: BTreeMap<u64, Connection>,
    pub peers: HashMap<Vec<u8>, u64>,
    pub chains: BTreeMap<u64, Chain>,
    pub hops: BTreeMap<u64, Hop>,
    pub events: VecDeque<Event>,
    pub next_connection: u64,
    pub next_chain: u64,
    pub next_key: u64,
    /// Connections with something to hand out.
    pub busy: BTreeSet<u64>,
    /// Messages that wait until the program has taken earlier ones.
    parked: VecDeque<(Buffer, usize)>,
    /// Receive buffers that the provider did not take yet.
    unposted: Vec<Buffer>,
    /// Messages of the program's among `events`.
    received: usize,
    batch: Vec<Completion>,
    next_timer: Instant,
}

/// What a fresh core is made of.
pub struct Parts {
    pub port: Port,
    pub local: Option<Registered>,
    pub provider: Provider,
    pub area: SharedArea,
    pub options: OfiOptions,
    pub incarnation: u64,
    pub raw_address: Vec<u8>,
}

impl Core {
    pub fn new(parts: Parts) -> Result<Core, FabricError> {
        let terms = parts.provider.terms().clone();
        let mut core = Core {
            port: parts.port,
            queues: BTreeMap::new(),
            registrations: BTreeMap::new(),
            revoking: None,
            not_cut_off: BTreeSet::new(),
            slots: Slots::new(MAX_SLOTS),
            buffers: Buffers::default(),
            local: parts.local,
            provider: parts.provider,
            terms,
            area: parts.area,
            options: parts.options,
            incarnation: parts.incarnation,
            raw_address: parts.raw_address,
            connections: BTreeMap::new(),
            peers: HashMap::new(),
            chains: BTreeMap::new(),
            hops: BTreeMap::new(),
            events: VecDeque::new(),
            next_connection: 1,
            next_chain: 1,
            next_key: 1,
            busy: BTreeSet::new(),
            parked: VecDeque::new(),
            unposted: Vec::new(),
            received: 0,
            batch: Vec::new(),
            next_timer: Instant::now() + TIMER,
        };
        core.fill_receives()?;
        Ok(core)
    }

    /// The most bytes of a message with its header.
    pub fn message_bytes(&self) -> usize {
        HEADER_BYTES + CHAIN_ROOM + self.terms.max_transfer
    }

    /// A buffer with room for `bytes`.
    pub fn buffer(&mut self, bytes: usize) -> Result<Buffer, FabricError> {
        let most = self.message_bytes();
        self.buffers.take(&self.provider, &self.port, bytes, most)
    }

    pub fn fill_receives(&mut self) -> Result<(), FabricError> {
        for _ in 0..self.options.receive_buffers.max(2) {
            let buffer = self.buffer(self.message_bytes())?;
            self.post_receive(buffer);
        }
        Ok(())
    }

    fn post_receive(&mut self, mut buffer: Buffer) {
        buffer.len = self.message_bytes();
        let piece = buffer.piece();
        match self.slots.enter(Work::Receive { buffer }) {
            Ok(index) => {
                // SAFETY: the slot holds buffer and context until its completion or the port's end.
                let posted = unsafe { self.port.receive(piece, 0, self.slots.context(index)) };
                if posted.is_err()
                    && let Some(Work::Receive { buffer }) = self.slots.leave(index)
                {
                    self.unposted.push(buffer);
                }
            }
            Err(Work::Receive { buffer }) => self.unposted.push(buffer),
            Err(_) => {}
        }
    }

    /// One round; returns whether anything happened.
    pub fn progress(&mut self) -> bool {
        let mut batch = std::mem::take(&mut self.batch);
        self.port.poll(&mut batch);
        for queue in self.queues.values() {
            if let Some(port) = &queue.port {
                port.poll(&mut batch);
            }
        }
        let mut did = !batch.is_empty();
        let now = Instant::now();
        let mut durable = Vec::new();
        for completion in batch.drain(..) {
            self.completed(completion, now, &mut durable);
        }
        self.batch = batch;
        self.acknowledge(durable);
        for buffer in std::mem::take(&mut self.unposted) {
            self.post_receive(buffer);
        }
        self.post_unsent_segments();
        for id in self.busy.clone() {
            did |= self.pump(id);
        }
        if now >= self.next_timer {
            self.next_timer = now + TIMER;
            self.expire(now);
        }
        did
    }

    fn completed(&mut self, completion: Completion, now: Instant, durable: &mut Vec<(u64, u64)>) {
        let Some(index) = self.slots.index(completion.context) else {
            return;
        };
        if let Some(&Work::Segment { queue, offset }) = self.slots.get(index) {
            return self.segment_completed(index, (queue, offset), &completion, durable);
        }
        match self.slots.leave(index) {
            Some(Work::Receive { buffer }) => {
                if completion.error.is_some() {
                    self.unposted.push(buffer);
                } else if self.parked.is_empty() && self.received < self.options.max_received {
                    self.take_message(buffer, completion.len, now);
                } else {
                    self.parked.push_back((buffer, completion.len));
                }
            }
            Some(Work::Message { connection, buffer }) => {
                self.buffers.give(buffer);
                if let Some((number, words)) = completion.error
                    && self.connections.contains_key(&connection)
                {
                    self.break_connection(connection, None, provider_failure(number, words));
                }
            }
            Some(Work::Operation {
                connection,
                operation,
                buffer,
            }) => {
                self.operation_done(connection, operation, &buffer, completion.error);
                self.buffers.give(buffer);
            }
            Some(Work::Segment { .. }) | None => {}
        }
    }

    fn take_message(&mut self, buffer: Buffer, len: usize, now: Instant) {
        if let Some((header, payload)) = Header::decode(buffer.bytes(len)) {
            self.handle(header, payload, now);
        }
        self.post_receive(buffer);
    }

    /// Hands events to the program.
    pub fn take_events(&mut self, into: &mut Vec<Event>) -> usize {
        let count = self.events.len();
        into.extend(self.events.drain(..));
        self.received = 0;
        let now = Instant::now();
        while self.received < self.options.max_received {
            let Some((buffer, len)) = self.parked.pop_front() else {
                break;
            };
            self.take_message(buffer, len, now);
        }
        count
    }

    /// A message of the program's for the program.
    pub fn received(&mut self, connection: u64, bytes: &[u8]) {
        self.received += 1;
        self.events.push_back(Event::Received {
            connection: ConnectionId(connection),
            bytes: bytes.to_vec(),
        });
    }

    /// Queues a message of the provider's own.
    pub fn tell(&mut self, connection: u64, kind: Kind, words: [u64; 5], payload: Vec<u8>) {
        let Some(peer) = self.connections.get_mut(&connection) else {
            return;
        };
        if peer.control.len() >= MAX_CONTROL {
            return self.break_connection(connection, None, FailureKind::PeerGone);
        }
        peer.control.push_back((kind, words, payload));
        self.busy.insert(connection);
    }

    /// Sends one message now.
    pub fn send_message(
        &mut self,
        connection: u64,
        peer: u64,
        header: Header,
        payload: &[u8],
    ) -> Result<(), Refusal> {
        let len = HEADER_BYTES + payload.len();
        let Ok(mut buffer) = self.buffer(len) else {
            return Err(Refusal::Again);
        };
        buffer.fill(&[&header.encode(payload.len()), payload], len);
        let piece = buffer.piece();
        match self.slots.enter(Work::Message { connection, buffer }) {
            Ok(index) => {
                // SAFETY: the slot holds buffer and context until the completion.
                let sent = unsafe {
                    self.port
                        .send(peer, piece, None, 0, self.slots.context(index))
                };
                if sent.is_err()
                    && let Some(Work::Message { buffer, .. }) = self.slots.leave(index)
                {
                    self.buffers.give(buffer);
                }
                sent
            }
            Err(_) => Err(Refusal::Again),
        }
    }

    /// The provider took a message: the next one has the next number.
    pub fn message_sent(&mut self, id: u64) {
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.sent = connection.sent.wrapping_add(1);
        }
    }

    /// The provider's handle for a peer.
    pub fn peer(&mut self, raw: &[u8]) -> Result<u64, FabricError> {
        if let Some(&peer) = self.peers.get(raw) {
            return Ok(peer);
        }
        // Ended processes' addresses are forgotten here; the provider keeps its small entries,
        // because operations to them may linger.
        if self.peers.len() >= 4 * self.options.max_connections {
            let used: BTreeSet<&[u8]> = self.connections.values().map(|c| &c.raw[..]).collect();
            self.peers.retain(|raw, _| used.contains(&raw[..]));
        }
        let peer = self.port.insert(raw)?;
        self.peers.insert(raw.to_vec(), peer);
        Ok(peer)
    }

    /// Opens a connection; `inner` for a chain's link.
    pub fn connect(&mut self, to: &Address, inner: bool) -> Result<u64, FabricError> {
        let (incarnation, raw) = split_address(to, &self.terms.name)
            .ok_or_else(|| FabricError::BadAddress(to.clone()))?;
        let id = self.new_connection(raw, to.clone(), incarnation)?;
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.inner = inner;
        }
        let own = self.address().0;
        let words = [self.incarnation, id, self.answers(), 0, 0];
        self.tell(id, Kind::Hello, words, own);
        self.pump(id);
        Ok(id)
    }

    /// For Hello and Welcome: whether this endpoint answers without its program's help.
    pub fn answers(&self) -> u64 {
        u64::from(self.options.progress == Progress::Thread)
    }

    pub fn new_connection(
        &mut self,
        raw: &[u8],
        address: Address,
        incarnation: u64,
    ) -> Result<u64, FabricError> {
        // Appends carry the connection's number in 32 bits.
        let limit = self.options.max_connections;
        if self.connections.len() >= limit || self.next_connection > u64::from(u32::MAX) {
            return Err(FabricError::Limit {
                what: "connection",
                limit: limit as u64,
            });
        }
        let peer = self.peer(raw)?;
        let id = self.next_connection;
        self.next_connection += 1;
        let now = Instant::now();
        let largest = self.message_bytes();
        let raw = raw.to_vec();
        let connection = Connection::new(peer, raw, address, incarnation, now, largest);
        self.connections.insert(id, connection);
        Ok(id)
    }

    /// This endpoint's address.
    pub fn address(&self) -> Address {
        join_address(&self.terms.name, self.incarnation, &self.raw_address)
    }

    /// Ends a connection because of `culprit` (or no operation in particular); everything posted
    /// fails.
    pub fn break_connection(&mut self, id: u64, culprit: Option<u64>, kind: FailureKind) {
        if kind != FailureKind::PeerGone
            && let Some(connection) = self.connections.get(&id)
            && let Some(theirs) = connection.theirs
        {
            let header = Header {
                kind: Kind::Bye,
                number: connection.sent,
                incarnation: connection.incarnation,
                connection: theirs,
                words: [u64::from(connection.flying == 0), 0, 0, 0, 0],
            };
            // A courtesy: the peer notices without it too.
            let peer = connection.peer;
            let _ = self.send_message(id, peer, header, &[]);
        }
        let Some(mut connection) = self.connections.remove(&id) else {
            return;
        };
        self.busy.remove(&id);
        if let Some(revoking) = &mut self.revoking
            && revoking.waiting.remove(&id)
        {
            revoking.lost = true;
        }
        // No operation in particular: the oldest operation is the first that notices.
        let first = culprit.or_else(|| connection.pending.keys().next().copied());
        if let Some(first) = first.and_then(|first| connection.pending.remove(&first)) {
            self.failed(id, first, kind.clone());
        } else if !connection.inner && connection.theirs.is_some() {
            self.events.push_back(Event::Disconnected {
                connection: ConnectionId(id),
            });
        }
        for (_, pending) in std::mem::take(&mut connection.pending) {
            self.failed(id, pending, FailureKind::Broken);
        }
        self.chains_lost(id, kind);
    }

    /// Ends a connection at the program's wish: operations in flight fail, and nothing else is
    /// reported.
    pub fn end_connection(&mut self, id: u64) {
        let events = self.events.len();
        self.break_connection(id, None, FailureKind::Broken);
        let gone = Event::Disconnected {
            connection: ConnectionId(id),
        };
        if self.events.get(events) == Some(&gone) {
            self.events.remove(events);
        }
    }

    /// Reports an operation's failure.
    pub fn failed(&mut self, connection: u64, pending: Pending, kind: FailureKind) {
        let operation = pending.describe();
        if let Some(buffer) = pending.buffer {
            self.buffers.give(buffer);
        }
        self.events.push_back(Event::Failed {
            connection: ConnectionId(connection),
            context: pending.context,
            failure: Failure { operation, kind },
        });
    }

    fn expire(&mut self, now: Instant) {
        let limit = self.options.operation_timeout;
        for id in self.connections.keys().copied().collect::<Vec<_>>() {
            let Some(connection) = self.connections.get_mut(&id) else {
                continue;
            };
            if connection.theirs.is_none() && now.duration_since(connection.opened) > limit {
                self.break_connection(id, None, FailureKind::PeerGone);
                continue;
            }
            if connection.is_silent(now, self.options.idle_timeout) {
                self.break_connection(id, None, FailureKind::PeerGone);
                continue;
            }
            if connection.wants_ping(now, self.options.idle_timeout) {
                connection.pinged = now;
                self.tell(id, Kind::Ping, [0; 5], Vec::new());
                continue;
            }
            let Some((&oldest, pending)) = connection.pending.first_key_value() else {
                continue;
            };
            let age = now.duration_since(pending.posted);
            if age > limit {
                self.operation_expired(id, oldest, now);
            } else if age > limit / 4 && now.duration_since(connection.pinged) > limit / 4 {
                connection.pinged = now;
                self.tell(id, Kind::Ping, [0; 5], Vec::new());
            }
        }
        self.expire_chains(now);
    }

    /// Closes the port and opens it again at the same address: operations that peers had in flight
    /// are lost. Connections with operations in flight break; the others live on.
    pub fn reopen(&mut self) -> Result<(), FabricError> {
        let broken: Vec<u64> = self
            .connections
            .iter()
            .filter(|(_, connection)| !connection.pending.is_empty())
            .map(|(&id, _)| id)
            .collect();
        for id in broken {
            self.break_connection(id, None, FailureKind::Broken);
        }
        // Two ports cannot have one address, so the old one goes first.
        let queue = self.options.completion_queue;
        let spare = Port::open(&self.provider, None, Some(&fresh_name()), queue)?;
        drop(std::mem::replace(&mut self.port, spare));
        let gone = self
            .slots
            .leave_all(|work| !matches!(work, Work::Segment { .. }));
        drop(gone);
        self.unposted.clear();
        self.port = Port::open(&self.provider, Some(&self.raw_address), None, queue)?;
        self.peers.clear();
        // Operations that ended connections had in flight are cut off under every key.
        for registration in self.registrations.values_mut() {
            let connections = &self.connections;
            registration
                .granted
                .retain(|id| connections.contains_key(id));
        }
        for id in self.connections.keys().copied().collect::<Vec<_>>() {
            let raw = self.connections.get(&id).map(|c| c.raw.clone());
            let peer = self.peer(&raw.unwrap_or_default())?;
            if let Some(connection) = self.connections.get_mut(&id) {
                connection.peer = peer;
                connection.grants.clear();
            }
        }
        self.fill_receives()?;
        self.not_cut_off.clear();
        Ok(())
    }
}

/// How the provider's error number counts for programs.
pub fn provider_failure(number: i32, words: String) -> FailureKind {
    // libfabric's own numbers begin at 256: FI_ENOKEY's family stands among errno's.
    match number {
        libc::ECONNRESET
        | libc::ECONNREFUSED
        | libc::ECONNABORTED
        | libc::ENOTCONN
        | libc::EHOSTUNREACH
        | libc::ENETUNREACH
        | libc::ETIMEDOUT
        | libc::EPIPE
        | libc::ESHUTDOWN
        | libc::ECANCELED => FailureKind::PeerGone,
        libc::EACCES | libc::EPERM | libc::ENOKEY | libc::EKEYREJECTED => {
            FailureKind::NotRegistered
        }
        _ => FailureKind::Provider(words),
    }
}

/// `name length, name, incarnation, the provider's address`.
fn join_address(name: &str, incarnation: u64, raw: &[u8]) -> Address {
    let mut bytes = vec![u8::try_from(name.len()).unwrap_or(u8::MAX)];
    bytes.extend(name.bytes().take(usize::from(u8::MAX)));
    bytes.extend(incarnation.to_le_bytes());
    bytes.extend(raw);
    Address(bytes)
}

/// Incarnation and the provider's address, if they are this provider's.
pub fn split_address<'a>(address: &'a Address, name: &str) -> Option<(u64, &'a [u8])> {
    let (&len, rest) = address.0.split_first()?;
    let (theirs, rest) = rest.split_at_checked(usize::from(len))?;
    let (incarnation, raw) = rest.split_first_chunk::<8>()?;
    (theirs == name.as_bytes() && !raw.is_empty() && raw.len() <= 512)
        .then(|| (u64::from_le_bytes(*incarnation), raw))
}

/// The segments' registration, where one is needed.
pub fn local_access() -> u64 {
    sys::SEND | sys::RECV | sys::READ | sys::WRITE
}

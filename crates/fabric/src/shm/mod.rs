//! The provider `shm`: other processes' regions on one machine. The initiator's CPU does what a NIC
//! would do; the target's does nothing.
//!
//! ```text
//!   ShmEndpoint   the endpoint: operations out                              mod.rs
//!                 messages and ends in; what waits; dead processes          serve.rs
//!                 how it comes to be, after the life before it              create.rs, config.rs
//!   Control       the control file                                          layout.rs
//!   Initiators    the target's side: who is in the middle of something      owner.rs
//!                 registrations and append queues                           owner.rs, queues.rs
//!   Link          the initiator's side: what a NIC would check, then do     link.rs
//!   Connection    a link and two message rings                              connection.rs, ring.rs
//!   Chain         every hop's work, by the initiator                        chain.rs
//!   Peer          another endpoint's files, mapped                          peer.rs
//!                 processes, and the doorbell                               process.rs
//! ```
//!
//! An operation is done when `post` returns; its event waits for `poll`. Nothing on that way enters
//! the kernel, and nothing is allocated but what a read or an exchange at many members answers.
//! Files and the order of stores: docs/formats.md, "Shared-memory fabric"; why it is so:
//! docs/adr/0007-shared-memory-fabric.md.

mod chain;
mod config;
mod connection;
mod create;
mod layout;
mod link;
mod owner;
mod peer;
mod process;
mod queues;
mod ring;
mod serve;
#[cfg(test)]
mod tests;

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cyclone_pmem::{SharedArea, Survives};

pub use self::config::{Memory, ShmConfig, Stalled};

use self::chain::{Chain, MAX_MEMBERS};
use self::connection::{Connection, Pending};
use self::layout::{Control, RETIRED, header};
use self::link::{Link, NotAppended};
use self::owner::{Initiators, Registrations};
use self::peer::Peers;
use self::process::Identity;
use self::queues::Queues;
use crate::capabilities::{AppendBy, Capabilities, ChainBy, FlushBy, WriteOrder};
use crate::endpoint::{AppendSpec, Endpoint, FabricError};
use crate::event::{Event, Failure, FailureKind};
use crate::key::{Access, Address, AppendKey, MemoryKey, Token};
use crate::operation::{ChainId, ChainOperation, ChainShape, ConnectionId, Operation};

/// A key's id: index (15 bits), whether it is a queue's, serial number (48 bits).
const QUEUE_BIT: u64 = 1 << 15;
const SERIALS: u64 = (1 << 48) - 1;

fn index_of(id: u64) -> u64 {
    id & (QUEUE_BIT - 1)
}

fn epoch_of(id: u64) -> u64 {
    id >> 16
}

/// A connection's or chain's name: place in the table (16 bits), then a number that is never given
/// twice.
fn place_of(name: u64) -> usize {
    (name & 0xffff) as usize
}

/// An endpoint over memory that processes of one machine share.
pub struct ShmEndpoint {
    capabilities: Capabilities,
    config: ShmConfig,
    address: Address,
    control: Control,
    memory: SharedArea,
    memory_path: PathBuf,
    description: String,
    survives: Survives,
    kept: bool,
    own: Identity,
    serial: u64,
    initiators: Initiators,
    registrations: Registrations,
    queues: Queues,
    peers: Peers,
    connections: Vec<Option<Connection>>,
    /// By slot of this endpoint's control file: the place of the connection that a peer opened with
    /// it.
    accepted: Vec<Option<usize>>,
    chains: Vec<Option<(ChainId, Chain)>>,
    /// Connections and chains named so far.
    names: u64,
    events: Vec<Event>,
    /// Operations that wait for room or for a segment.
    waiting: usize,
    /// The doorbell's count before the last check of what it announces.
    seen: u64,
    /// Something was left for the next look.
    is_behind: bool,
    polls: u32,
    checked: Instant,
}

impl ShmEndpoint {
    /// Opens the endpoint called `name` below `directory`, which is created if it is not there. Its
    /// address is the path of its control file, `NAME.ctl`.
    ///
    /// # Errors
    /// `System` when a live process has the endpoint or its memory, when an initiator of the life
    /// before makes no progress ([`ShmConfig::stalled`]), or when the system refuses a file;
    /// `Limit` for a configuration beyond its bounds; `BadAddress` for a name that is no plain file
    /// name; `TooLarge` for a path that is too long.
    pub fn open(
        directory: &Path,
        name: &str,
        config: ShmConfig,
    ) -> Result<ShmEndpoint, FabricError> {
        let made = create::make(directory, name, &config)?;
        let control = made.control;
        let capabilities = Capabilities {
            provider: "shm".to_owned(),
            write_order: WriteOrder::Posted,
            flush: FlushBy::Initiator,
            atomics: true,
            append: Some(AppendBy::Reservation),
            chain: ChainBy::Initiator,
            target_polls: false,
            max_append: config.max_append,
            max_transfer: config.max_transfer,
        };
        Ok(ShmEndpoint {
            capabilities,
            address: Address(made.control_path.as_os_str().as_bytes().to_vec()),
            memory: made.memory,
            memory_path: made.memory_path,
            description: made.description,
            survives: made.survives,
            kept: made.kept,
            own: made.own,
            serial: made.serial,
            initiators: Initiators::new(control.clone(), made.own, &config),
            registrations: Registrations::new(control.clone(), config.memory_bytes),
            queues: Queues::new(control.clone(), &config),
            peers: Peers::new(made.own),
            connections: Vec::new(),
            accepted: vec![None; config.max_peers as usize],
            chains: Vec::new(),
            names: 0,
            events: Vec::with_capacity(config.max_events),
            waiting: 0,
            seen: 0,
            is_behind: false,
            polls: 0,
            checked: Instant::now(),
            control,
            config,
        })
    }

    /// Whether the memory holds what a life before has left in it. Otherwise it was zeroed.
    pub fn kept_memory(&self) -> bool {
        self.kept
    }

    /// The file or device that holds the memory.
    pub fn memory_path(&self) -> &Path {
        &self.memory_path
    }

    /// What the memory's persisted bytes survive.
    pub fn survives(&self) -> Survives {
        self.survives
    }

    /// What the memory is made of and what it survives, for people.
    pub fn description(&self) -> &str {
        &self.description
    }

    /// The next serial number, noted where the next life looks for it.
    fn next_serial(&mut self) -> u64 {
        self.serial = (self.serial + 1) & SERIALS;
        self.control.store(header::SERIAL, self.serial);
        self.serial
    }

    fn is_full(&self) -> bool {
        self.events.len() >= self.config.max_events
    }

    /// A free place in the table of connections, and a name for who takes it.
    fn place(&mut self) -> (usize, ConnectionId) {
        let free = self.connections.iter().position(Option::is_none);
        let place = free.unwrap_or_else(|| {
            self.connections.push(None);
            self.connections.len() - 1
        });
        self.names += 1;
        (place, ConnectionId(self.names << 16 | place as u64))
    }

    fn check_size(&self, operation: &Operation<'_>) -> Result<(), FabricError> {
        let transfer = self.config.max_transfer;
        let (len, max) = match *operation {
            Operation::Write { bytes, .. } | Operation::Send { bytes } => (bytes.len(), transfer),
            Operation::Read { len, .. } => (usize::try_from(len).unwrap_or(usize::MAX), transfer),
            Operation::Append { bytes, .. } => (bytes.len(), self.config.max_append),
            _ => return Ok(()),
        };
        if len > max {
            return Err(FabricError::TooLarge { len, max });
        }
        Ok(())
    }

    fn complete(&mut self, connection: ConnectionId, context: u64, value: u64, bytes: Vec<u8>) {
        self.events.push(Event::Completed {
            connection,
            context,
            value,
            bytes,
        });
    }

    /// Reports a failure, and ends the connection.
    fn fail(&mut self, place: usize, context: u64, operation: String, kind: FailureKind) {
        if let Some(connection) = &self.connections[place] {
            self.events.push(Event::Failed {
                connection: connection.id,
                context,
                failure: Failure { operation, kind },
            });
        }
        self.remove(place);
    }

    fn wait_with(&mut self, place: usize, pending: Pending) {
        if let Some(connection) = &mut self.connections[place] {
            connection.pending = Some(pending);
            self.waiting += 1;
        }
    }
}

/// What came of the first try of an operation.
enum Tried {
    Done(u64, Vec<u8>),
    /// It waits: for room, or for a segment.
    Waits(Pending),
    /// Nothing was done, and it is too short to be worth keeping.
    Busy,
}

fn try_now(
    connection: &mut Connection,
    own: Identity,
    address: &Address,
    operation: &Operation<'_>,
    context: u64,
) -> Result<Tried, FailureKind> {
    match *operation {
        Operation::Send { bytes } => match connection.push(bytes, 0)? {
            (_, true) => Ok(Tried::Done(0, Vec::new())),
            (_, false) if connection.fits(bytes.len()) => Ok(Tried::Busy),
            (sent, false) => Ok(Tried::Waits(Pending::Message {
                bytes: bytes.to_vec(),
                sent,
                context,
            })),
        },
        _ => {
            let (value, bytes) = connection.perform(own, address, operation)?;
            Ok(Tried::Done(value, bytes))
        }
    }
}

fn find(
    connections: &mut [Option<Connection>],
    id: ConnectionId,
) -> Result<&mut Connection, FabricError> {
    let there = connections.get_mut(place_of(id.0)).and_then(Option::as_mut);
    let there = there.filter(|connection| connection.id == id);
    there.ok_or(FabricError::Unknown("connection"))
}

impl Endpoint for ShmEndpoint {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn address(&self) -> Address {
        self.address.clone()
    }

    fn memory(&self) -> &SharedArea {
        &self.memory
    }

    fn register(
        &mut self,
        offset: u64,
        len: u64,
        access: Access,
        token: Token,
    ) -> Result<MemoryKey, FabricError> {
        let serial = self.next_serial();
        self.registrations
            .register(serial, offset, len, access, token)
    }

    fn revoke(&mut self, key: &MemoryKey) -> Result<(), FabricError> {
        if key.id & QUEUE_BIT != 0 {
            self.queues.close(key.id, &mut self.initiators, true)?;
            return Ok(());
        }
        self.registrations.revoke(key, &mut self.initiators)
    }

    fn open_append(&mut self, spec: AppendSpec) -> Result<AppendKey, FabricError> {
        let serial = self.next_serial();
        self.queues.open(serial, spec, self.config.memory_bytes)
    }

    fn post_segments(&mut self, queue: &AppendKey, offsets: &[u64]) -> Result<(), FabricError> {
        self.queues.post(queue.0.id, offsets, &self.memory)
    }

    fn used_segments(&mut self, queue: &AppendKey, used: &mut Vec<u64>) -> Result<(), FabricError> {
        self.queues.used(queue.0.id, &mut self.initiators, used)
    }

    fn has_append_in_flight(&mut self, queue: &AppendKey) -> bool {
        self.queues.is_marked(queue.0.id, &mut self.initiators)
    }

    fn close_append(&mut self, queue: &AppendKey) -> Result<u64, FabricError> {
        self.queues.close(queue.0.id, &mut self.initiators, false)
    }

    fn connect(&mut self, to: &Address) -> Result<ConnectionId, FabricError> {
        let open = self.connections.iter().flatten();
        let opened = open.filter(|connection| !connection.is_accepted()).count();
        if opened >= self.config.max_connections as usize {
            return Err(FabricError::Limit {
                what: "connection",
                limit: self.config.max_connections.into(),
            });
        }
        let peer = self.peers.find(to)?;
        let link = Link::open(peer, self.own, &self.address)?;
        let (place, id) = self.place();
        self.connections[place] = Some(Connection::opened(id, link));
        Ok(id)
    }

    fn disconnect(&mut self, connection: ConnectionId) {
        let Ok(there) = find(&mut self.connections, connection) else {
            return;
        };
        match there.pending.take() {
            Some(pending) => {
                self.waiting -= 1;
                let (context, operation) = (pending.context(), pending.name().describe());
                let place = place_of(connection.0);
                self.fail(place, context, operation, FailureKind::Broken);
            }
            None => self.remove(place_of(connection.0)),
        }
    }

    fn post(
        &mut self,
        connection: ConnectionId,
        operation: Operation<'_>,
        context: u64,
    ) -> Result<(), FabricError> {
        if let Operation::Append { queue, bytes } = operation {
            return match self.post_appends(connection, queue, &[(bytes, context)])? {
                0 => Err(FabricError::Busy),
                _ => Ok(()),
            };
        }
        self.check_size(&operation)?;
        let is_full = self.is_full();
        let there = find(&mut self.connections, connection)?;
        if is_full || there.pending.is_some() {
            return Err(FabricError::Busy);
        }
        let tried = try_now(there, self.own, &self.address, &operation, context);
        let place = place_of(connection.0);
        match tried {
            Ok(Tried::Done(value, bytes)) => self.complete(connection, context, value, bytes),
            Ok(Tried::Waits(pending)) => self.wait_with(place, pending),
            Ok(Tried::Busy) => return Err(FabricError::Busy),
            Err(kind) => self.fail(place, context, connection::describe(&operation), kind),
        }
        Ok(())
    }

    fn post_appends(
        &mut self,
        connection: ConnectionId,
        queue: &AppendKey,
        appends: &[(&[u8], u64)],
    ) -> Result<usize, FabricError> {
        for &(bytes, _) in appends {
            self.check_size(&Operation::Append { queue, bytes })?;
        }
        let room = self.config.max_events.saturating_sub(self.events.len());
        let appends = &appends[..appends.len().min(room)];
        let there = find(&mut self.connections, connection)?;
        if appends.is_empty() || there.pending.is_some() {
            return Ok(0);
        }
        let (appended, end) = match there.link(self.own, &self.address) {
            Ok(link) => link.append(queue, appends.iter().map(|&(bytes, _)| bytes)),
            Err(kind) => (0, Err(kind.into())),
        };
        for &(_, context) in &appends[..appended] {
            self.complete(connection, context, 0, Vec::new());
        }
        let (Err(why), Some(&(bytes, context))) = (end, appends.get(appended)) else {
            return Ok(appended);
        };
        let place = place_of(connection.0);
        match why {
            NotAppended::NoSegment => {
                let pending = Pending::Append {
                    queue: *queue,
                    bytes: bytes.to_vec(),
                    context,
                    until: Instant::now() + self.config.no_segment_wait,
                };
                self.wait_with(place, pending);
            }
            NotAppended::Failed(kind) => {
                let append = Operation::Append { queue, bytes };
                self.fail(place, context, connection::describe(&append), kind);
            }
        }
        Ok(appended + 1)
    }

    fn open_chain(
        &mut self,
        shape: ChainShape,
        members: &[(ConnectionId, MemoryKey)],
    ) -> Result<ChainId, FabricError> {
        let limit = |what, limit: usize| FabricError::Limit {
            what,
            limit: limit as u64,
        };
        let Some((_, first)) = members.first() else {
            return Err(FabricError::Unknown("chain member"));
        };
        if members.len() > MAX_MEMBERS {
            return Err(limit("chain member", MAX_MEMBERS));
        }
        for (connection, key) in members {
            find(&mut self.connections, *connection)?;
            if key.len != first.len {
                return Err(FabricError::OutOfBounds {
                    offset: 0,
                    len: key.len,
                    memory: first.len,
                });
            }
        }
        let free = self.chains.iter().position(Option::is_none);
        let place = free.unwrap_or(self.chains.len());
        let max = self.config.max_connections as usize;
        if place >= max {
            return Err(limit("chain", max));
        }
        if place == self.chains.len() {
            self.chains.push(None);
        }
        self.names += 1;
        let id = ChainId(self.names << 16 | place as u64);
        self.chains[place] = Some((id, Chain::new(shape, members)));
        Ok(id)
    }

    fn close_chain(&mut self, chain: ChainId) {
        if let Some(place) = self.chains.get_mut(place_of(chain.0)) {
            place.take_if(|(id, _)| *id == chain);
        }
    }

    fn post_chain(
        &mut self,
        chain: ChainId,
        operation: ChainOperation<'_>,
        context: u64,
    ) -> Result<(), FabricError> {
        let is_full = self.is_full();
        let there = self.chains.get_mut(place_of(chain.0));
        let there = there
            .and_then(Option::as_mut)
            .filter(|(id, _)| *id == chain);
        let (_, members) = there.ok_or(FabricError::Unknown("chain"))?;
        let max = self.config.max_transfer;
        match operation {
            ChainOperation::Write { bytes, .. } if bytes.len() > max => {
                let len = bytes.len();
                return Err(FabricError::TooLarge { len, max });
            }
            _ if is_full => return Err(FabricError::Busy),
            _ => {}
        }
        let (connections, own, address) = (&mut self.connections, self.own, &self.address);
        let done = members.perform(&operation, |member, act| {
            let connection = find(connections, member).map_err(|_| FailureKind::Broken)?;
            act(connection.link(own, address)?)
        });
        match done {
            Ok(values) => self.events.push(Event::ChainCompleted {
                chain,
                context,
                values,
            }),
            Err(failure) => {
                self.chains[place_of(chain.0)] = None;
                self.events.push(Event::ChainFailed {
                    chain,
                    context,
                    failure,
                });
            }
        }
        Ok(())
    }

    #[inline]
    fn poll(&mut self, events: &mut Vec<Event>) -> usize {
        self.serve();
        let count = self.events.len();
        events.append(&mut self.events);
        count
    }

    fn wait(&mut self, timeout: Duration) {
        if !self.events.is_empty() || self.is_behind {
            return;
        }
        let mut at_most = timeout.min(self.config.peer_check);
        if self.waiting > 0 {
            // No doorbell is rung when a segment is posted.
            at_most = at_most.min(Duration::from_micros(100));
        }
        process::sleep(&self.control, self.seen, at_most);
    }
}

impl Drop for ShmEndpoint {
    fn drop(&mut self) {
        for place in 0..self.connections.len() {
            self.remove(place);
        }
        self.control.store(header::STATE, RETIRED);
        if self.config.leaves_nothing {
            // Still locked by this life: owned by no other process. First the one that is an
            // address; who has mapped them keeps them.
            let control = Path::new(OsStr::from_bytes(&self.address.0));
            for path in [control, &self.memory_path] {
                // What cannot be removed now only takes space on the disk.
                let _ = std::fs::remove_file(path);
            }
        }
    }
}

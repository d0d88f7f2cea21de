//! An endpoint around another one that shows every store to a model of the targets' media, and can
//! make completions wait until the model's media has taken them.
//!
//! What is shown: one-sided writes at their addresses; appends at the tail of their queue, in order
//! of posting; chains' writes at every member; and, for `rpc`, messages as the stores that the
//! backup's one log will get. Tails and other words that atomics change are not: protocols may keep
//! them in DRAM.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::arrivals::{Arrivals, Network};
use anyhow::Result;
use cyclone_fabric::{
    Access, Address, AppendKey, AppendSpec, Capabilities, ChainId, ChainOperation, ChainShape,
    ConnectionId, Endpoint, Event, FabricError, MemoryKey, Operation, Token,
};
use cyclone_pmem::SharedArea;
use cyclone_pmem::media::{Media, MediaParameters, MediaStats};
use cyclone_replication::Protocol;

/// Address space of each registration, and of what has no address at the sender's side.
const SPACE_BYTES: u64 = 1 << 34;
/// Where appended bytes and messages go: beyond any registration's space that is used here.
const APPENDED: u64 = 1 << 62;
/// Where local cores write.
const LOCAL: u64 = 1 << 61;
/// A stream that is not among so many stores is at its end.
const RECENT_STORES: u64 = 1024;
/// Messages smaller than this carry no record.
const LEAST_RECORD_BYTES: usize = 64;

/// Cores of the target that write separate logs beside the senders: modelled, nothing is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalStores {
    /// How many.
    pub cores: u32,
    /// Bytes of each store.
    pub store_bytes: u64,
    /// Remote stores between two local ones of any core.
    pub every: u32,
}

impl LocalStores {
    /// None.
    pub const NONE: LocalStores = LocalStores {
        cores: 0,
        store_bytes: 128,
        every: 4,
    };
    /// Those of rowan §2.4: 18 cores, 128 bytes at a time, two stores in flight each beside 144
    /// remote writers.
    pub const PAPER: LocalStores = LocalStores {
        cores: 18,
        ..LocalStores::NONE
    };
}

/// The modelled media of one target.
struct Device {
    media: Media,
    tails: HashMap<u64, u64>,
    local: LocalStores,
    stores: u64,
    /// Appended so far by the local cores together, each in turn.
    local_stores: u64,
    /// What is on its way, where a network is modelled.
    arrivals: Option<Arrivals<Store>>,
    /// Segments and queues that others have written, and when last, in stores.
    streams: HashMap<u64, u64>,
}

/// The modelled media of all targets, shared by all endpoints that write there.
pub struct Devices {
    parameters: MediaParameters,
    /// Whether messages are records for the target's log.
    messages: bool,
    /// Whether all registrations at a target are of the same memory: every sender has a separate
    /// one for a log that they share.
    is_one_log: bool,
    /// Whether completions wait for the media.
    charged: bool,
    local: LocalStores,
    /// Stores arrive as over this network; never where completions wait.
    network: Option<Network>,
    begun: Instant,
    by_target: Mutex<HashMap<Address, Arc<Mutex<Device>>>>,
}

impl Devices {
    /// No target yet. `charged` says whether completions wait.
    ///
    /// # Errors
    /// For parameters that do not fit together.
    pub fn new(
        parameters: MediaParameters,
        protocol: Protocol,
        charged: bool,
        local: LocalStores,
    ) -> Result<Arc<Devices>> {
        Devices::over(None, parameters, protocol, charged, local)
    }

    /// As [`Devices::new`], no time charged, with stores that overtake each other as in a network.
    ///
    /// # Errors
    /// For parameters that do not fit together.
    pub fn behind(
        network: Network,
        parameters: MediaParameters,
        protocol: Protocol,
        local: LocalStores,
    ) -> Result<Arc<Devices>> {
        Devices::over(Some(network), parameters, protocol, false, local)
    }

    fn over(
        network: Option<Network>,
        parameters: MediaParameters,
        protocol: Protocol,
        charged: bool,
        local: LocalStores,
    ) -> Result<Arc<Devices>> {
        Media::new(parameters)?;
        Ok(Arc::new(Devices {
            network,
            parameters,
            messages: protocol == Protocol::Rpc,
            is_one_log: protocol == Protocol::Faa,
            charged,
            local,
            begun: Instant::now(),
            by_target: Mutex::default(),
        }))
    }

    fn device(&self, target: &Address) -> Result<Arc<Mutex<Device>>, FabricError> {
        let mut targets = self
            .by_target
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = targets.get(target) {
            return Ok(Arc::clone(device));
        }
        let media = Media::new(self.parameters).map_err(|_| FabricError::Unknown("media"))?;
        let device = Arc::new(Mutex::new(Device {
            media,
            tails: HashMap::new(),
            local: self.local,
            stores: 0,
            local_stores: 0,
            streams: HashMap::new(),
            arrivals: self
                .network
                .map(|network| Arrivals::new(network, targets.len() as u64)),
        }));
        targets.insert(target.clone(), Arc::clone(&device));
        Ok(device)
    }

    /// Bytes and lines of all targets together.
    pub fn stats(&self) -> MediaStats {
        let targets = self
            .by_target
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let mut sum = MediaStats::default();
        for device in targets.values() {
            let stats = device
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .media
                .stats();
            sum.request_bytes += stats.request_bytes;
            sum.media_bytes += stats.media_bytes;
            sum.full_lines += stats.full_lines;
            sum.partial_lines += stats.partial_lines;
        }
        sum
    }

    /// How many streams others write at a target at the same time, on average of those that were
    /// written to at all.
    pub fn remote_streams(&self) -> f64 {
        let targets = self
            .by_target
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let streams = targets.values().map(|device| {
            let device = device.lock().unwrap_or_else(PoisonError::into_inner);
            let since = device.stores.saturating_sub(RECENT_STORES);
            device.streams.values().filter(|at| **at > since).count()
        });
        let written: Vec<usize> = streams.filter(|count| *count > 0).collect();
        written.iter().sum::<usize>() as f64 / written.len().max(1) as f64
    }

    fn now_ns(&self) -> u64 {
        if self.charged {
            self.begun.elapsed().as_nanos() as u64
        } else {
            0
        }
    }
}

/// One store as the media sees it.
enum Store {
    At { id: u64, offset: u64, len: u64 },
    Appended { queue: u64, len: u64 },
}

impl Store {
    fn of(operation: &Operation<'_>, devices: &Devices) -> Option<Store> {
        match operation {
            Operation::Write { key, offset, bytes } => Some(Store::At {
                id: if devices.is_one_log { 0 } else { key.id },
                offset: *offset,
                len: bytes.len() as u64,
            }),
            Operation::Append { queue, bytes } => Some(Store::Appended {
                queue: queue.0.id,
                len: bytes.len() as u64,
            }),
            // All senders' records go to one log: that is what the backup's thread makes of them.
            Operation::Send { bytes } if devices.messages && bytes.len() >= LEAST_RECORD_BYTES => {
                Some(Store::Appended {
                    queue: 0,
                    len: bytes.len() as u64,
                })
            }
            _ => None,
        }
    }
}

impl Device {
    /// One more store of a local core, when it is time for it.
    fn local_store(&mut self, now_ns: u64) {
        self.stores += 1;
        let cores = u64::from(self.local.cores);
        if cores == 0
            || !self
                .stores
                .is_multiple_of(u64::from(self.local.every.max(1)))
        {
            return;
        }
        let (core, round) = (self.local_stores % cores, self.local_stores / cores);
        self.local_stores += 1;
        let base = LOCAL + core * SPACE_BYTES + core * 4096;
        let at = round * self.local.store_bytes % (SPACE_BYTES / 2);
        self.media
            .store_at(base + at, self.local.store_bytes, now_ns);
    }

    /// A store that was posted on a connection: at once, or when the modelled network has brought
    /// it.
    fn arrive(&mut self, lane: u64, store: Store, now_ns: u64) -> u64 {
        let Some(mut arrivals) = self.arrivals.take() else {
            return self.store(&store, now_ns);
        };
        arrivals.issue(lane, store, |it| {
            self.store(&it, now_ns);
        });
        self.arrivals = Some(arrivals);
        now_ns
    }

    /// When the media has taken it.
    fn store(&mut self, store: &Store, now_ns: u64) -> u64 {
        self.local_store(now_ns);
        match *store {
            Store::At { id, offset, len } => {
                self.streams.insert(id, self.stores);
                let address = (id % (LOCAL / SPACE_BYTES)) * SPACE_BYTES + offset % SPACE_BYTES;
                self.media.store_at(address, len, now_ns)
            }
            Store::Appended { queue, len } => {
                let base = APPENDED + (queue % 64) * SPACE_BYTES;
                self.streams.insert(base, self.stores);
                let tail = self.tails.entry(queue).or_insert(0);
                let at = *tail;
                *tail = (at + len.next_multiple_of(64)) % SPACE_BYTES;
                self.media.store_at(base + at, len, now_ns)
            }
        }
    }
}

/// An event that waits for the media.
struct Held {
    due_ns: u64,
    event: Event,
}

/// A chain's member: its media, and its registration's number.
type Member = (Arc<Mutex<Device>>, u64);

/// The endpoint around another one.
pub struct Metered {
    inner: Box<dyn Endpoint>,
    devices: Arc<Devices>,
    targets: HashMap<ConnectionId, Arc<Mutex<Device>>>,
    chains: HashMap<ChainId, Vec<Member>>,
    /// When the media will have taken what was posted on a connection or chain.
    taken_ns: HashMap<ConnectionId, u64>,
    chain_taken_ns: HashMap<ChainId, u64>,
    held: VecDeque<Held>,
    fresh: Vec<Event>,
}

impl Metered {
    /// Around `inner`, showing its stores to `devices`.
    pub fn new(inner: Box<dyn Endpoint>, devices: Arc<Devices>) -> Metered {
        Metered {
            inner,
            devices,
            targets: HashMap::new(),
            chains: HashMap::new(),
            taken_ns: HashMap::new(),
            chain_taken_ns: HashMap::new(),
            held: VecDeque::new(),
            fresh: Vec::new(),
        }
    }

    fn due_ns(&self, event: &Event) -> u64 {
        let due = match event {
            Event::Completed { connection, .. } => self.taken_ns.get(connection),
            // For `rpc` the answer is a message.
            Event::Received { connection, .. } if self.devices.messages => {
                self.taken_ns.get(connection)
            }
            Event::ChainCompleted { chain, .. } => self.chain_taken_ns.get(chain),
            _ => None,
        };
        due.copied().unwrap_or(0)
    }
}

impl Endpoint for Metered {
    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }

    fn address(&self) -> Address {
        self.inner.address()
    }

    fn memory(&self) -> &SharedArea {
        self.inner.memory()
    }

    fn register(
        &mut self,
        offset: u64,
        len: u64,
        access: Access,
        token: Token,
    ) -> Result<MemoryKey, FabricError> {
        self.inner.register(offset, len, access, token)
    }

    fn revoke(&mut self, key: &MemoryKey) -> Result<(), FabricError> {
        self.inner.revoke(key)
    }

    fn open_append(&mut self, spec: AppendSpec) -> Result<AppendKey, FabricError> {
        self.inner.open_append(spec)
    }

    fn post_segments(&mut self, queue: &AppendKey, offsets: &[u64]) -> Result<(), FabricError> {
        self.inner.post_segments(queue, offsets)
    }

    fn used_segments(&mut self, queue: &AppendKey, used: &mut Vec<u64>) -> Result<(), FabricError> {
        self.inner.used_segments(queue, used)
    }

    fn has_append_in_flight(&mut self, queue: &AppendKey) -> bool {
        self.inner.has_append_in_flight(queue)
    }

    fn close_append(&mut self, queue: &AppendKey) -> Result<u64, FabricError> {
        self.inner.close_append(queue)
    }

    fn connect(&mut self, to: &Address) -> Result<ConnectionId, FabricError> {
        let connection = self.inner.connect(to)?;
        self.targets.insert(connection, self.devices.device(to)?);
        Ok(connection)
    }

    fn disconnect(&mut self, connection: ConnectionId) {
        self.targets.remove(&connection);
        self.taken_ns.remove(&connection);
        self.inner.disconnect(connection);
    }

    fn post(
        &mut self,
        connection: ConnectionId,
        operation: Operation<'_>,
        context: u64,
    ) -> Result<(), FabricError> {
        self.inner.post(connection, operation, context)?;
        if let Some(store) = Store::of(&operation, &self.devices)
            && let Some(device) = self.targets.get(&connection)
        {
            let now_ns = self.devices.now_ns();
            let mut device = device.lock().unwrap_or_else(PoisonError::into_inner);
            // A connection's number is one endpoint's: its first byte's address tells endpoints
            // apart.
            let lane = (self.inner.memory().as_ptr() as u64) ^ connection.0;
            let taken_ns = device.arrive(lane, store, now_ns);
            if self.devices.charged {
                self.taken_ns.insert(connection, taken_ns);
            }
        }
        Ok(())
    }

    fn open_chain(
        &mut self,
        shape: ChainShape,
        members: &[(ConnectionId, MemoryKey)],
    ) -> Result<ChainId, FabricError> {
        let chain = self.inner.open_chain(shape, members)?;
        let devices = members.iter().filter_map(|(connection, key)| {
            let device = self.targets.get(connection)?;
            Some((Arc::clone(device), key.id))
        });
        self.chains.insert(chain, devices.collect());
        Ok(chain)
    }

    fn post_chain(
        &mut self,
        chain: ChainId,
        operation: ChainOperation<'_>,
        context: u64,
    ) -> Result<(), FabricError> {
        self.inner.post_chain(chain, operation, context)?;
        let (offset, len) = match operation {
            ChainOperation::Write { offset, bytes } => (offset, bytes.len() as u64),
            ChainOperation::Copy { to, len, .. } => (to, len),
            _ => return Ok(()),
        };
        let now_ns = self.devices.now_ns();
        for (device, id) in self.chains.get(&chain).into_iter().flatten() {
            let mut device = device.lock().unwrap_or_else(PoisonError::into_inner);
            let taken_ns = device.store(
                &Store::At {
                    id: *id,
                    offset,
                    len,
                },
                now_ns,
            );
            if self.devices.charged {
                let taken = self.chain_taken_ns.entry(chain).or_insert(0);
                *taken = taken_ns.max(*taken);
            }
        }
        Ok(())
    }

    fn poll(&mut self, events: &mut Vec<Event>) -> usize {
        if !self.devices.charged {
            return self.inner.poll(events);
        }
        let mut fresh = std::mem::take(&mut self.fresh);
        self.inner.poll(&mut fresh);
        for event in fresh.drain(..) {
            let due_ns = self.due_ns(&event);
            self.held.push_back(Held { due_ns, event });
        }
        self.fresh = fresh;
        let before = events.len();
        let now_ns = self.devices.now_ns();
        while let Some(held) = self.held.pop_front_if(|held| held.due_ns <= now_ns) {
            events.push(held.event);
        }
        events.len() - before
    }

    fn wait(&mut self, timeout: Duration) {
        match self.held.front() {
            Some(held) => {
                let rest = held.due_ns.saturating_sub(self.devices.now_ns());
                std::thread::sleep(timeout.min(Duration::from_nanos(rest)));
            }
            None => self.inner.wait(timeout),
        }
    }
}

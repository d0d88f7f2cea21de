//! A server: its control part, its workers, its messages, and the way from one configuration to the
//! next (rowan §4.5).
//!
//! ```text
//!   prepare(C)   nothing is served; servers that are not in C lose their access; what was under way is digested
//!   commit(C)    shards that were served here go on; the others of this primary are prepared:
//!                  gather   each replica sends what it has above the highest version known to be committed
//!                  scatter  what is newest here goes to every replica
//!                  serve    versions go on above all that were seen
//! ```
//!
//! The same way leads from a cold start to the first request: every replica then has the same
//! entries of a shard, wherever the crash caught them.

mod joining;
mod promotion;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cyclone_fabric::{Address, Endpoint, FabricError, Token};
use cyclone_replication::{
    BackupConfig, Protocol, ReplicationError, SenderConfig, SenderId, SharedLogs, backup, sender,
};

use crate::checkpoint::{Sink, Start};
use crate::configuration::{Configuration, ServerId, ShardId};
use crate::control::{CLEAN_FROM_USED_PERCENT, Control, ControlConfig};
use crate::discarded_copy::DiscardedCopy;
use crate::message::{Body, Message};
use crate::peers::Peers;
use crate::store::Store;
use crate::worker::{Role, Worker, WorkerConfig};

use joining::{Join, OutgoingCopy, PendingImport};
use promotion::Promotion;

/// Messages of a term to come that are kept; who sent more asks again.
const MAX_EARLY: usize = 1024;

/// How often servers tell each other how they are, in microseconds.
const STATUS_US: u64 = 10_000;

/// Makes endpoints: each sender has one for itself.
pub trait Endpoints: Send {
    /// An endpoint of this name with so many bytes of memory.
    ///
    /// # Errors
    /// What the provider says.
    fn open(&mut self, name: &str, memory_bytes: u64) -> Result<Box<dyn Endpoint>, FabricError>;
}

/// The control part, between the thread that steps it and the one that steps the rest. The latter
/// needs it at changes of configuration only, and comes first then.
pub struct SharedControl {
    control: Mutex<Control>,
    wanted: AtomicU32,
}

impl SharedControl {
    fn lock(&self) -> MutexGuard<'_, Control> {
        self.wanted.fetch_add(1, Ordering::SeqCst);
        let control = self.control.lock().unwrap_or_else(PoisonError::into_inner);
        self.wanted.fetch_sub(1, Ordering::SeqCst);
        control
    }

    /// Begins to write a checkpoint of the indexes into what `open` returns, unless one is in
    /// progress.
    ///
    /// # Errors
    /// The sink's, or that there is none.
    pub fn begin_checkpoint(
        &self,
        open: impl FnOnce() -> std::io::Result<Box<dyn Sink>>,
    ) -> std::io::Result<()> {
        if self.lock().writes_checkpoint() {
            return Ok(());
        }
        let sink = open()?;
        self.lock().begin_checkpoint(sink)
    }

    /// One step of the control thread; with nothing to do it sleeps until there may be, at most
    /// `timeout`.
    pub fn turn(&self, now_us: u64, timeout: Duration) -> bool {
        while self.wanted.load(Ordering::SeqCst) > 0 {
            std::thread::yield_now();
        }
        let mut control = self.control.lock().unwrap_or_else(PoisonError::into_inner);
        let busy = control.step(now_us);
        if !busy {
            control.wait(timeout);
        }
        busy
    }
}

/// What a server is made of.
#[derive(Clone, Debug)]
pub struct NodeConfig {
    /// Its number.
    pub server: ServerId,
    /// How it replicates.
    pub protocol: Protocol,
    /// Shards of the whole cluster.
    pub shards: u16,
    /// Workers, at most 65536.
    pub workers: u32,
    /// Threads of a cold start.
    pub rebuild_threads: usize,
    /// Records in flight per worker and backup.
    pub window: usize,
    /// What all workers share; server and number are set for each.
    pub worker: WorkerConfig,
    /// The keeping side; `reserved_segments` is set from the number of workers.
    pub backup: BackupConfig,
    /// Below so many free segments new values are refused; `None`: one in 32.
    pub full_below: Option<u32>,
    /// From which part of the memory in use on cleaning keeps to its usual measure: see
    /// [`ControlConfig::clean_from_used_percent`](crate::control::ControlConfig::clean_from_used_percent).
    pub clean_from_used_percent: u32,
    /// What [`Node::void`] has answered for this memory, the last by shard.
    pub voids: Vec<(ShardId, DiscardedCopy)>,
    /// Bytes per second that it takes, on average, of shards that it joins, and that it sends to
    /// others that join.
    pub join_bytes_per_s: u64,
    /// The memory's number, and the newest checkpoint of its indexes.
    pub start: Start,
}

impl NodeConfig {
    /// The defaults.
    pub fn new(
        server: ServerId,
        protocol: Protocol,
        shards: u16,
        token: Token,
        secret: u64,
    ) -> Self {
        NodeConfig {
            server,
            protocol,
            shards,
            workers: 1,
            rebuild_threads: 1,
            window: 1024,
            worker: WorkerConfig::new(server, 0),
            backup: BackupConfig::new(token, secret),
            full_below: None,
            clean_from_used_percent: CLEAN_FROM_USED_PERCENT,
            voids: Vec::new(),
            join_bytes_per_s: 32 << 20,
            start: Start::default(),
        }
    }
}

/// Why a server cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// The replication refused.
    #[error(transparent)]
    Replication(#[from] ReplicationError),
    /// The fabric refused.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// A configuration of another number of shards, or an older one.
    #[error(
        "configuration of term {term} with {shards} shards; here term {own_term}, {own_shards} shards"
    )]
    Configuration {
        /// Its term.
        term: u32,
        /// Its shards.
        shards: usize,
        /// The term here.
        own_term: u32,
        /// The shards here.
        own_shards: u16,
    },
}

/// A server.
pub struct Node {
    config: NodeConfig,
    control: Arc<SharedControl>,
    store: Arc<Store>,
    workers: Vec<Worker>,
    peers: Peers,
    endpoints: Box<dyn Endpoints>,
    configuration: Option<Configuration>,
    prepared: Option<Configuration>,
    /// Shards that are served in the committed configuration, by what this life has prepared.
    serving: BTreeSet<ShardId>,
    promotions: BTreeMap<ShardId, Promotion>,
    joins: BTreeMap<ShardId, Join>,
    unadopted: PendingImport,
    gifts: VecDeque<OutgoingCopy>,
    /// Gifts that a damaged entry has ended.
    failed_gifts: u64,
    messages: Vec<Message>,
    /// Of a term that is not committed here yet: its senders are slightly ahead.
    early: Vec<Message>,
    /// When the next shard may be asked for, to join it.
    join_due_us: u64,
    /// When more may be sent to who joins.
    gift_due_us: u64,
    status_due_us: u64,
    now_us: u64,
}

impl Node {
    /// Opens a server on the endpoint whose memory holds its data, or shall.
    ///
    /// # Errors
    /// A memory of another protocol or a damaged one; what the fabric says.
    pub fn open(
        mut config: NodeConfig,
        data: Box<dyn Endpoint>,
        peers: Box<dyn Endpoint>,
        endpoints: Box<dyn Endpoints>,
    ) -> Result<Node, NodeError> {
        let reserved = 2 + 2 * config.workers + 1;
        let backup = backup(
            config.protocol,
            data,
            BackupConfig {
                reserved_segments: reserved,
                ..config.backup.clone()
            },
        )?;
        let mut control_config = ControlConfig::new(config.server, backup.table().segments());
        control_config.full_below = config
            .full_below
            .unwrap_or(control_config.full_below)
            .max(reserved + 1);
        control_config.remote_reserve = reserved;
        control_config.clean_from_used_percent = config.clean_from_used_percent;
        let control = Control::open(
            backup,
            control_config,
            config.shards,
            &config.voids,
            config.rebuild_threads,
            &config.start,
        )?;
        // It is not needed any more, and large.
        config.start = Start::default();
        let store = Arc::clone(control.store());
        let worker = |number| {
            let config = WorkerConfig {
                server: config.server,
                worker: number,
                ..config.worker
            };
            Worker::new(config, Arc::clone(&store))
        };
        Ok(Node {
            workers: (0..config.workers.max(1)).map(worker).collect(),
            peers: Peers::new(peers, config.server),
            config,
            control: Arc::new(SharedControl {
                control: Mutex::new(control),
                wanted: AtomicU32::new(0),
            }),
            store,
            endpoints,
            configuration: None,
            prepared: None,
            serving: BTreeSet::new(),
            promotions: BTreeMap::new(),
            joins: BTreeMap::new(),
            unadopted: PendingImport::default(),
            gifts: VecDeque::new(),
            failed_gifts: 0,
            messages: Vec::new(),
            early: Vec::new(),
            join_due_us: 0,
            gift_due_us: 0,
            status_due_us: 0,
            now_us: 0,
        })
    }

    /// Where senders reach its backup log.
    pub fn log_address(&self) -> Address {
        self.control().backup().address()
    }

    /// Where servers send it messages.
    pub fn peer_address(&self) -> Address {
        self.peers.address()
    }

    /// What its threads share.
    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// The control part, for a thread that steps it beside this one.
    pub fn control_handle(&self) -> Arc<SharedControl> {
        Arc::clone(&self.control)
    }

    /// The control part.
    pub fn control(&self) -> MutexGuard<'_, Control> {
        self.control.lock()
    }

    /// A worker.
    pub fn worker(&mut self, number: usize) -> Option<&mut Worker> {
        self.workers.get_mut(number)
    }

    /// The worker that a shard's requests go to.
    pub fn worker_of(&mut self, shard: ShardId) -> &mut Worker {
        let number = self.number_of(shard);
        &mut self.workers[number]
    }

    /// Neighbouring shards have the same worker: a server's shards are often those with one
    /// remainder, which would leave workers idle if they went by remainders too.
    fn number_of(&self, shard: ShardId) -> usize {
        let shards = usize::from(self.config.shards).max(1);
        (usize::from(shard) * self.workers.len() / shards).min(self.workers.len() - 1)
    }

    /// What this server does for a shard.
    pub fn role(&self, shard: ShardId) -> Role {
        self.workers[self.number_of(shard)].role(shard)
    }

    /// How often a shard could not be sent to who joins it because an entry of it is damaged here.
    pub fn failed_gifts(&self) -> u64 {
        self.failed_gifts
    }

    /// The configuration that is committed here.
    pub fn configuration(&self) -> Option<&Configuration> {
        self.configuration.as_ref()
    }

    /// Term of the configuration that was prepared or committed last.
    pub fn term(&self) -> u32 {
        let newest = self.prepared.as_ref().or(self.configuration.as_ref());
        newest.map_or(0, |it| it.term)
    }

    /// Takes a configuration: from here on nothing is served, and servers that are not in it have
    /// no access. Once this has returned at all its members, no server serves by an older one; then
    /// it may be committed.
    ///
    /// # Errors
    /// What the fabric says; the call can be repeated. An older configuration.
    //= rowan §4.5
    pub fn prepare(&mut self, configuration: &Configuration) -> Result<(), NodeError> {
        let is_same = self.prepared.as_ref() == Some(configuration);
        let is_older = configuration.term <= self.term() && !is_same;
        if is_older || configuration.shards.len() != usize::from(self.config.shards) {
            return Err(NodeError::Configuration {
                term: configuration.term,
                shards: configuration.shards.len(),
                own_term: self.term(),
                own_shards: self.config.shards,
            });
        }
        for shard in 0..self.config.shards {
            let worker = self.worker_of(shard);
            if worker.role(shard) == Role::Serving {
                worker.set_role(shard, Role::Preparing);
            }
        }
        self.promotions.clear();
        self.prepared = Some(configuration.clone());
        let before = self.configuration.iter().flat_map(|it| &it.servers);
        let gone: Vec<ServerId> = before
            .map(|server| server.id)
            .filter(|&id| configuration.server(id).is_none())
            .collect();
        self.control().fence(configuration.term, &gone)?;
        Ok(())
    }

    /// Drops everything that is here of these shards: their copies were given up, or begin anew. To
    /// be written down, and given back with [`NodeConfig::voids`] when this memory is opened again.
    /// Between [`Node::prepare`] and
    /// [`Node::commit`].
    ///
    /// # Errors
    /// A memory that cannot be scanned.
    pub fn void(&mut self, shards: &[ShardId]) -> Result<DiscardedCopy, NodeError> {
        for shard in shards {
            self.joins.remove(shard);
            self.serving.remove(shard);
        }
        self.join_anew();
        for worker in &mut self.workers {
            worker.void(shards);
        }
        Ok(self.control().void(shards)?)
    }

    /// These shards were served by another server since, or may have been: they are prepared anew.
    pub fn serve_anew(&mut self, shards: &[ShardId]) {
        for shard in shards {
            self.serving.remove(shard);
        }
    }

    /// Goes over to the configuration that was prepared.
    ///
    /// # Errors
    /// What the fabric says about new endpoints; the call can be repeated.
    pub fn commit(&mut self) -> Result<(), NodeError> {
        let Some(configuration) = self.prepared.clone() else {
            return Ok(());
        };
        let shared: Arc<SharedLogs> = Arc::default();
        let mut senders = Vec::new();
        for number in 0..self.workers.len() {
            let name = format!("w{number}t{}", configuration.term);
            let endpoint = self.endpoints.open(&name, 4096)?;
            let id = SenderId {
                server: self.config.server,
                worker: number as u32,
            };
            let token = self.config.backup.token;
            let settings = SenderConfig {
                window: self.config.window,
                max_record_bytes: self.config.worker.max_entry_bytes,
                shared: Arc::clone(&shared),
                ..SenderConfig::new(id, configuration.term, token)
            };
            senders.push(sender(self.config.protocol, endpoint, settings)?);
        }
        // All of them or none: a call that is repeated opens them under the same names.
        for (worker, sender) in self.workers.iter_mut().zip(senders) {
            worker.install(&configuration, sender);
        }
        self.peers.install(&configuration);
        let own = self.config.server;
        let mut serving = BTreeSet::new();
        for (placement, shard) in configuration.shards.iter().zip(0u16..) {
            if placement.primary != own {
                continue;
            }
            if self.serving.contains(&shard) {
                serving.insert(shard);
                self.worker_of(shard).set_role(shard, Role::Serving);
                continue;
            }
            self.worker_of(shard).set_role(shard, Role::Preparing);
            let promotion = Promotion::new(placement.receivers(), placement.source.is_some());
            self.promotions.insert(shard, promotion);
        }
        self.serving = serving;
        self.join(&configuration);
        self.prepared = None;
        self.configuration = Some(configuration);
        for message in std::mem::take(&mut self.early) {
            self.hear(message);
        }
        Ok(())
    }

    /// Makes progress in everything but the control part, which may have its own thread; returns
    /// whether there was anything to do. Never waits.
    pub fn step(&mut self, now_us: u64) -> bool {
        self.now_us = now_us;
        let mut busy = false;
        for worker in &mut self.workers {
            busy |= worker.step(now_us);
        }
        let mut messages = std::mem::take(&mut self.messages);
        busy |= self.peers.step(now_us, &mut messages);
        for message in messages.drain(..) {
            self.hear(message);
        }
        self.messages = messages;
        busy |= self.promote();
        self.step_joins();
        self.fetch();
        if now_us >= self.status_due_us {
            self.status_due_us = now_us + STATUS_US;
            let is_full = self.store.space().is_full();
            let members = self.configuration.iter().flat_map(|it| &it.servers);
            let others: Vec<ServerId> = members
                .map(|it| it.id)
                .filter(|&id| id != self.config.server)
                .collect();
            for id in others {
                self.say(id, Body::Status { is_full });
            }
        }
        busy
    }

    /// The control part's progress, for a server whose control part has no separate thread.
    pub fn step_control(&mut self, now_us: u64) -> bool {
        self.control().step(now_us)
    }

    fn say(&mut self, to: ServerId, body: Body) {
        let message = Message {
            from: self.config.server,
            term: self.configuration.as_ref().map_or(0, |it| it.term),
            body,
        };
        self.peers.send(to, &message);
    }

    fn hear(&mut self, message: Message) {
        // Who has not committed this configuration yet asks again when it has.
        let term = self.configuration.as_ref().map(|it| it.term);
        if Some(message.term) > term && self.early.len() < MAX_EARLY {
            return self.early.push(message);
        }
        if term != Some(message.term) || self.prepared.is_some() {
            return;
        }
        match message.body {
            Body::Status { is_full } => {
                for worker in &mut self.workers {
                    worker.set_full(message.from, is_full);
                }
            }
            Body::Gather {
                shard,
                attempt,
                above,
            } => self.tell_entries(message.from, shard, attempt, above),
            Body::Gathered { .. } => self.gathered(message),
            Body::Fetch { shard, key } => self.tell_entry(message.from, shard, key),
            Body::Fetched { shard, key, entry } => self.fetched(message.from, shard, &key, entry),
        }
    }
}

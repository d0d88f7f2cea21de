//! A server: its control part, its workers, its messages, and the way from one configuration to the next (rowan §4.5).
//!
//! ```text
//!   prepare(C)   nothing is served; servers that are not in C lose their access; what was under way is digested
//!   commit(C)    shards that were served here go on; the others of this primary are prepared:
//!                  gather   each replica sends what it has above the highest version known to be committed
//!                  scatter  what is newest here goes to every replica
//!                  serve    versions go on above all that were seen
//! ```
//!
//! The same way leads from a cold start to the first request: every replica then has the same entries of a shard,
//! wherever the crash caught them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cyclone_fabric::{Address, Endpoint, FabricError, Token};
use cyclone_replication::{
    BackupConfig, Protocol, ReplicationError, SenderConfig, SenderId, SharedLogs, backup, sender,
};

use crate::configuration::{Configuration, ServerId, ShardId};
use crate::control::{Control, ControlConfig};
use crate::message::{Body, MAX_ENTRIES_BYTES, Message};
use crate::peers::Peers;
use crate::store::{Store, VERSION_GAP};
use crate::worker::{Role, Worker, WorkerConfig};

/// How often servers tell each other how they are, in microseconds.
const STATUS_US: u64 = 10_000;

/// After how long a silent replica is asked again the first time, in microseconds; then twice as long each time: asking
/// for what is on its way already would only make it later.
const ASK_AGAIN_US: u64 = 50_000;

/// Shards that a server asks for at once while it joins.
const JOINS_AT_ONCE: usize = 4;

fn patience_us(attempt: u32) -> u64 {
    ASK_AGAIN_US << attempt.saturating_sub(1).min(6)
}

/// Gathered entries that wait for room, in bytes; more are asked for again.
const MAX_UNADOPTED_BYTES: usize = 16 << 20;

/// Makes endpoints: each sender has one for itself.
pub trait Endpoints: Send {
    /// An endpoint of this name with so many bytes of memory.
    ///
    /// # Errors
    /// What the provider says.
    fn open(&mut self, name: &str, memory_bytes: u64) -> Result<Box<dyn Endpoint>, FabricError>;
}

/// The control part, between the thread that steps it and the one that steps the rest. The latter needs it at changes of
/// configuration only, and comes first then.
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

    /// One step of the control thread; with nothing to do it sleeps until there may be, at most `timeout`.
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
    /// Records under way per worker and backup.
    pub window: usize,
    /// What all workers share; server and number are set for each.
    pub worker: WorkerConfig,
    /// The keeping side; `reserved_segments` is set from the number of workers.
    pub backup: BackupConfig,
    /// Below so many free segments new values are refused; `None`: a sixteenth.
    pub full_below: Option<u32>,
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

/// A shard on its way to be served.
struct Promotion {
    attempt: u32,
    above: u64,
    asked_us: u64,
    /// Per replica that has not answered yet: the parts that came.
    missing: BTreeMap<ServerId, BTreeSet<u32>>,
    newest: u64,
    is_scattering: bool,
}

/// A shard whose entries this server asks for, to be one of its backups.
#[derive(Default)]
struct Join {
    primary: ServerId,
    attempt: u32,
    asked_us: u64,
    came: BTreeSet<u32>,
    is_whole: bool,
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
    unadopted: Vec<Vec<u8>>,
    messages: Vec<Message>,
    status_due_us: u64,
    now_us: u64,
}

impl Node {
    /// Opens a server on the endpoint whose memory holds its data, or shall.
    ///
    /// # Errors
    /// A memory of another protocol or a damaged one; what the fabric says.
    pub fn open(
        config: NodeConfig,
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
        let control = Control::open(
            backup,
            control_config,
            config.shards,
            config.rebuild_threads,
        )?;
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
            unadopted: Vec::new(),
            messages: Vec::new(),
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
        let number = usize::from(shard) % self.workers.len();
        &mut self.workers[number]
    }

    /// What this server does for a shard.
    pub fn role(&self, shard: ShardId) -> Role {
        self.workers[usize::from(shard) % self.workers.len()].role(shard)
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

    /// Takes a configuration: from here on nothing is served, and servers that are not in it have no access. Once this has
    /// returned at all its members, nobody serves by an older one; then it may be committed.
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

    /// Goes over to the configuration that was prepared.
    ///
    /// # Errors
    /// What the fabric says about new endpoints; the call can be repeated.
    pub fn commit(&mut self) -> Result<(), NodeError> {
        let Some(configuration) = self.prepared.clone() else {
            return Ok(());
        };
        let shared: Arc<SharedLogs> = Arc::default();
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
            let sender = sender(self.config.protocol, endpoint, settings)?;
            self.workers[number].install(&configuration, sender);
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
            let missing = placement.backups.iter().map(|&id| (id, BTreeSet::new()));
            self.promotions.insert(
                shard,
                Promotion {
                    attempt: 0,
                    above: 0,
                    asked_us: 0,
                    missing: missing.collect(),
                    newest: 0,
                    is_scattering: false,
                },
            );
        }
        self.serving = serving;
        self.unadopted.clear();
        self.join(&configuration);
        self.prepared = None;
        self.configuration = Some(configuration);
        Ok(())
    }

    /// Asks for the shards that this server joins. What came in an earlier term is asked for again.
    //= rowan §4.5
    fn join(&mut self, configuration: &Configuration) {
        let own = self.config.server;
        self.joins = configuration
            .shards
            .iter()
            .zip(0u16..)
            .filter(|(placement, _)| placement.joining.contains(&own))
            .map(|(placement, shard)| {
                let primary = placement.primary;
                (
                    shard,
                    Join {
                        primary,
                        ..Join::default()
                    },
                )
            })
            .collect();
        let is_joining = !self.joins.is_empty();
        self.control().keep_tombstones(is_joining);
    }

    /// Shards that this server has joined: it has everything that the primary had, and all that came since.
    pub fn joined(&self) -> Vec<ShardId> {
        let whole = self.joins.iter().filter(|(_, join)| join.is_whole);
        let all_written = self.unadopted.is_empty();
        whole
            .filter(|_| all_written)
            .map(|(&shard, _)| shard)
            .collect()
    }

    fn step_joins(&mut self) {
        let now_us = self.now_us;
        let mut ask = Vec::new();
        let unfinished = self.joins.iter_mut().filter(|(_, join)| !join.is_whole);
        for (&shard, join) in unfinished.take(JOINS_AT_ONCE) {
            let is_late = now_us.saturating_sub(join.asked_us) >= patience_us(join.attempt);
            if join.attempt == 0 || is_late {
                join.attempt += 1;
                join.asked_us = now_us;
                join.came.clear();
                ask.push((join.primary, shard, join.attempt));
            }
        }
        for (primary, shard, attempt) in ask {
            let body = Body::Gather {
                shard,
                attempt,
                above: 0,
            };
            self.say(primary, body);
        }
    }

    /// Makes progress in everything but the control part, which may have a thread of its own; answers whether there was
    /// anything to do. Never waits.
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

    /// The control part's progress, for a server whose control part has no thread of its own.
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
        }
    }

    /// Sends a replica's newest entries of a shard above a version.
    fn tell_entries(&mut self, to: ServerId, shard: ShardId, attempt: u32, above: u64) {
        let Some(it) = self.store.shard(shard) else {
            return;
        };
        if !self.control().is_drained() {
            return;
        }
        let (commit, newest) = (it.commit(), it.newest());
        let mut parts: Vec<Vec<Vec<u8>>> = vec![Vec::new()];
        let mut bytes = 0;
        for record in self.store.newer(shard, above) {
            bytes += record.len();
            if bytes > MAX_ENTRIES_BYTES {
                bytes = record.len();
                parts.push(Vec::new());
            }
            if let Some(last) = parts.last_mut() {
                last.push(record);
            }
        }
        let count = parts.len() as u32;
        for (entries, part) in parts.into_iter().zip(0..) {
            let body = Body::Gathered {
                shard,
                attempt,
                part,
                parts: count,
                commit,
                newest,
                entries,
            };
            self.say(to, body);
        }
    }

    /// Takes a part of an answer.
    fn gathered(&mut self, message: Message) {
        let Body::Gathered {
            shard,
            attempt,
            part,
            parts,
            newest,
            entries,
            ..
        } = message.body
        else {
            return;
        };
        let waiting: usize = self.unadopted.iter().map(Vec::len).sum();
        if part >= parts || waiting > MAX_UNADOPTED_BYTES {
            return;
        }
        let is_asked = |join: &&mut Join| join.primary == message.from && join.attempt == attempt;
        if let Some(join) = self.joins.get_mut(&shard).filter(is_asked) {
            join.came.insert(part);
            join.asked_us = self.now_us;
            join.is_whole |= join.came.len() as u32 == parts;
            self.unadopted.extend(entries);
            return;
        }
        let Some(promotion) = self.promotions.get_mut(&shard) else {
            return;
        };
        let Some(came) = promotion.missing.get_mut(&message.from) else {
            return;
        };
        if attempt != promotion.attempt {
            return;
        }
        came.insert(part);
        // Parts still come: that is no silence.
        promotion.asked_us = self.now_us;
        promotion.newest = promotion.newest.max(newest);
        let is_whole = came.len() as u32 == parts;
        self.unadopted.extend(entries);
        if is_whole {
            promotion.missing.remove(&message.from);
        }
    }

    /// Brings shards on their way to be served.
    fn promote(&mut self) -> bool {
        let mut busy = self.adopt();
        // Everything that any of the old term's servers wrote here must be indexed first.
        if !self.promotions.is_empty() && self.control().is_drained() {
            let shards: Vec<ShardId> = self.promotions.keys().copied().collect();
            for shard in shards {
                busy |= self.promote_one(shard);
            }
        }
        let scattered: Vec<ShardId> = self
            .workers
            .iter_mut()
            .flat_map(Worker::take_scattered)
            .collect();
        for shard in scattered {
            self.serve(shard);
            busy = true;
        }
        busy
    }

    /// Writes gathered entries down.
    fn adopt(&mut self) -> bool {
        if self.unadopted.is_empty() {
            return false;
        }
        let unadopted = std::mem::take(&mut self.unadopted);
        let mut entries = unadopted.into_iter();
        let mut control = self.control();
        let mut left = Vec::new();
        for entry in entries.by_ref() {
            if !control.adopt_if_newer(&entry) {
                left.push(entry);
                break;
            }
        }
        drop(control);
        left.extend(entries);
        self.unadopted = left;
        true
    }

    fn promote_one(&mut self, shard: ShardId) -> bool {
        let commit = self.store.shard(shard).map_or(0, |it| it.commit());
        let now_us = self.now_us;
        let Some(promotion) = self.promotions.get_mut(&shard) else {
            return false;
        };
        if promotion.is_scattering {
            return false;
        }
        if promotion.missing.is_empty() {
            if !self.unadopted.is_empty() {
                return false;
            }
            promotion.is_scattering = true;
            let (newest, above) = (promotion.newest, promotion.above);
            if let Some(it) = self.store.shard(shard) {
                it.saw(newest);
            }
            let records = self.store.newer(shard, above);
            self.worker_of(shard).scatter(shard, records);
            return true;
        }
        let is_first = promotion.attempt == 0;
        let waited_us = now_us.saturating_sub(promotion.asked_us);
        if !is_first && waited_us < patience_us(promotion.attempt) {
            return false;
        }
        if is_first {
            promotion.above = commit;
        }
        promotion.attempt += 1;
        promotion.asked_us = now_us;
        let (attempt, above) = (promotion.attempt, promotion.above);
        let ask: Vec<ServerId> = promotion.missing.keys().copied().collect();
        for came in promotion.missing.values_mut() {
            came.clear();
        }
        for id in ask {
            let body = Body::Gather {
                shard,
                attempt,
                above,
            };
            self.say(id, body);
        }
        true
    }

    /// All replicas have the same entries of a shard.
    fn serve(&mut self, shard: ShardId) {
        if self.promotions.remove(&shard).is_none() {
            return;
        }
        if let Some(it) = self.store.shard(shard) {
            let newest = it.newest();
            it.committed(newest);
            //= rowan §4.5
            it.saw(newest.saturating_add(VERSION_GAP));
        }
        self.serving.insert(shard);
        self.worker_of(shard).set_role(shard, Role::Serving);
    }
}

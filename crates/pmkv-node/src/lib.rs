//! `cyclone serve --engine pmkv`: one server of the log-structured store and its Redis port.
//!
//! Its threads: one polls Redis connections, executes requests and replicates; one is the control
//! thread; one, the agent, renews the lease and hears of configurations; and on the first servers
//! one is a configuration manager. The first two share no lock on the way of a request.

mod agent;
mod backend;
mod checkpoint;
mod clock;
pub mod ctl;
pub mod demo;
mod figures;
pub mod file;
mod files;
mod founded;
pub mod local;
mod manager;
mod memory;
pub mod operator;
mod orders;
mod post;
mod replica;
#[cfg(test)]
mod tests;
mod threads;
mod translate;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use cyclone_fabric::Token;
use cyclone_fabric::shm::{Memory, ShmConfig, ShmEndpoint, Stalled};
use cyclone_gateway::{Gateway, GatewayConfig, TopologyNode};
use cyclone_pmkv::{Endpoints, Node, NodeConfig, ServerId, ShardId};
use cyclone_pmkv_cm as cm;
use cyclone_pmkv_cm::holder::Event;

use agent::{Order, Shared};
use backend::{Listening, NodeBackend};
use cyclone_node::access;
use cyclone_node::metrics::{MetricsExchange, MetricsSnapshot};
use cyclone_node::reload::Renewals;
use cyclone_node::trim::Trimmer;
use file::ClusterFile;
use files::Files;
use memory::OwnMemory;
use orders::{Orders, Trouble};
pub use threads::run;

/// How long the loop sleeps at most while it is idle.
const IDLE: Duration = Duration::from_millis(1);

/// How long a finished copy waits for others to be reported together, in microseconds.
const COPIES_TOGETHER_US: u64 = 500_000;

/// The most threads of a start.
const MAX_REBUILD_THREADS: usize = 16;

/// What the command line says.
pub struct Arguments {
    /// The cluster's file.
    pub config: PathBuf,
    /// Which of its servers this is.
    pub id: ServerId,
    /// Overrides the file's replication.
    pub replication: Option<String>,
    /// Overrides where configurations are kept.
    pub store: Option<String>,
    /// Overrides whether the Redis port is protected.
    pub protected_mode: Option<bool>,
}

/// A server, its Redis port, and the configuration that it follows.
struct Serving {
    id: ServerId,
    node: Node,
    memory: OwnMemory,
    gateway: Gateway,
    trimmer: Trimmer,
    /// What was read again for it.
    renewals: Arc<Renewals>,
    /// Where readers of figures ask.
    desk: Option<Arc<MetricsExchange>>,
    listening: Listening,
    orders: Orders,
    reports: Sender<Event>,
    shared: Arc<Shared>,
    /// The configuration that was prepared last, as the manager says it.
    newest: Option<Arc<cm::Configuration>>,
    /// Reports of finished copies that were given to the agent, which repeats them.
    copied: BTreeMap<ShardId, u64>,
    /// When there was last none to report.
    copies_told_us: u64,
    period_us: u64,
    period_ends_us: u64,
}

/// Reads the cluster's file with what the command line replaces, and checks what can be found wrong
/// before anything is opened.
///
/// # Errors
/// The field that is wrong, and what is expected.
pub fn check(arguments: &Arguments) -> Result<ClusterFile> {
    let mut file = ClusterFile::parse(&arguments.config)?;
    if let Some(replication) = &arguments.replication {
        file.replication.clone_from(replication);
    }
    if let Some(store) = &arguments.store {
        file.store.clone_from(store);
    }
    if let Some(protected_mode) = arguments.protected_mode {
        file.redis.protected_mode = protected_mode;
    }
    file.check()?;
    let entry = file.server(arguments.id)?;
    let settings = gateway_settings(&file, entry)?;
    settings.check()?;
    access::warn_if_open_to_others("the configuration", &arguments.config);
    for (field, path) in file.redis.secret_files() {
        access::warn_if_open_to_others(field, path);
    }
    for path in [file.sockets(), file.fabric()] {
        access::warn_if_open_to_others("directory", &path);
    }
    access::warn_of_redis_port(&settings);
    Ok(file)
}

/// Opens a server's own memory: kept if it is a member that has data, otherwise new.
fn open_memory(file: &ClusterFile, id: ServerId, keep: bool) -> Result<ShmEndpoint> {
    let config = ShmConfig {
        memory: if keep { Memory::Kept } else { Memory::Zeroed },
        described_by: Some(memory::path(&file.fabric(), id)),
        // A server that is out of the configuration and in the middle of a write must not hold up
        // its successors.
        stalled: Stalled::Kill,
        max_peers: 1024,
        ..ShmConfig::new(file.memory_bytes)
    };
    ShmEndpoint::open(&file.fabric(), &format!("s{id}"), config)
        .with_context(|| format!("cannot open the memory of server {id}"))
}

fn listening(file: &ClusterFile, id: ServerId, survives: &str, region: &str) -> Listening {
    Listening {
        own: id,
        names: BTreeMap::new(),
        copies: file.copies,
        replication: file.replication.clone(),
        survives: survives.to_owned(),
        region: region.to_owned(),
    }
}

/// A member as CLUSTER commands present it.
fn name_of(member: &cm::Member, own: ServerId) -> Option<(ServerId, TopologyNode)> {
    let id = ServerId::try_from(member.id.0).ok()?;
    let (host, port) = member.client.rsplit_once(':')?;
    let name = TopologyNode {
        id: format!("{:040x}", u64::from(id) + 1),
        host: host.to_owned(),
        port: port.parse().ok()?,
        is_leader: false,
        alive: member.standing != cm::Standing::Down,
        myself: id == own,
    };
    Some((id, name))
}

impl Serving {
    fn open(
        file: &ClusterFile,
        id: ServerId,
        registry: &mio::Registry,
        (orders, reports): (Receiver<Order>, Sender<Event>),
        shared: Arc<Shared>,
        renewals: Arc<Renewals>,
    ) -> Result<(Serving, agent::Settings)> {
        let entry = file.server(id)?.clone();
        files::private_directory(&file.sockets())?;
        files::private_directory(&file.fabric())?;
        let own_path = memory::path(&file.fabric(), id);
        let known = OwnMemory::read(own_path.clone())?;
        let data = open_memory(file, id, known.is_some())?;
        let (kept, region) = (data.kept_memory(), data.description().to_owned());
        let survives = data.survives().to_string();
        let mut memory = match known {
            Some(known) if kept => known,
            lost => {
                if let Some(lost) = lost {
                    tracing::error!(
                        server = id,
                        incarnation = lost.incarnation(),
                        region,
                        "this server's memory is gone, or may have lost writes because the machine was started again \
                         since: nothing of it counts, and the server begins anew with an empty one"
                    );
                }
                OwnMemory::new(own_path, secret()?)
            }
        };
        let session = memory.begin(clock::calendar_us())?;
        let node_config = node_config(file, id, &memory)?;
        let servers = u32::try_from(file.servers.len()).unwrap_or(64);
        let mut files = Files::new(file.fabric(), id, servers)
            .with_context(|| format!("cannot tidy up {}", file.fabric().display()))?;
        let peers = files
            .open("peers", 4096)
            .context("messages between servers")?;
        let gateway = gateway(file, &entry, &node_config, registry)?;
        let desk = desk(&entry)?;
        let node = Node::open(node_config, Box::new(data), peers, Box::new(files))?;
        let rules = file.rules();
        tracing::info!(
            server = id,
            replication = file.replication,
            region,
            kept,
            lease_ms = rules.lease_us / 1000,
            "open"
        );
        let settings = agent::Settings {
            hello: cm::Hello {
                server: cm::ServerId(u64::from(id)),
                incarnation: memory.incarnation(),
                session,
                client: entry.redis.to_string(),
                peer: file.peer(id)?,
            },
            rules: rules.clone(),
            socket: file.server_socket(u64::from(id)),
            managers: (1..=file.managers())
                .map(|it| file.manager_socket(it))
                .collect(),
        };
        let serving = Serving {
            listening: listening(file, id, &survives, &region),
            id,
            node,
            memory,
            gateway,
            trimmer: Trimmer::start().context("cannot start the thread that gives memory back")?,
            renewals,
            desk,
            orders: Orders::new(id, orders),
            reports,
            shared,
            newest: None,
            copied: BTreeMap::new(),
            copies_told_us: 0,
            period_us: rules.period_us,
            period_ends_us: 0,
        };
        Ok((serving, settings))
    }

    fn run(&mut self, poll: &mut mio::Poll, is_over: impl Fn() -> bool) -> Result<()> {
        let begun = Instant::now();
        let now_us = || begun.elapsed().as_micros() as u64 + 1;
        let mut events = mio::Events::with_capacity(1024);
        let mut busy = true;
        while !is_over() {
            let timeout = match self.gateway.next_timeout_us(now_us()) {
                _ if busy || self.gateway.has_work() => Duration::ZERO,
                Some(us) => Duration::from_micros(us).min(IDLE),
                None => IDLE,
            };
            if let Err(error) = poll.poll(&mut events, Some(timeout))
                && error.kind() != std::io::ErrorKind::Interrupted
            {
                return Err(error).context("epoll");
            }
            for event in &events {
                self.gateway.handle(event);
            }
            self.shared.beat();
            busy = self.step(now_us())?;
        }
        Ok(())
    }

    fn step(&mut self, now_us: u64) -> Result<bool> {
        let mut behind = NodeBackend {
            node: &mut self.node,
            listening: &self.listening,
            holds_lease: self.shared.holds_lease(),
        };
        self.renewals.apply(&mut self.gateway);
        let mut busy = self.gateway.step(now_us, &mut behind) > 0;
        cyclone_node::serve::report_evictions(&mut self.gateway);
        let held = self.gateway.held();
        self.trimmer.note(held.input_bytes + held.output_bytes);
        // Twice: what is sent by the first is often done by the second.
        busy |= self.node.step(now_us);
        busy |= self.node.step(now_us);
        let mut answers = Vec::new();
        if let Some(worker) = self.node.worker(0) {
            worker.take_answers(&mut answers);
            busy |= worker.in_flight() > 0;
        }
        if !answers.is_empty() || busy {
            // After the values were read: the current holder of the lease held it then.
            let holds_lease = self.shared.holds_lease();
            for (ticket, answer) in answers {
                self.gateway
                    .complete(ticket, backend::outcome(answer, holds_lease));
            }
            let behind = NodeBackend {
                node: &mut self.node,
                listening: &self.listening,
                holds_lease,
            };
            self.gateway.flush(now_us, &behind);
        }
        self.follow(now_us)?;
        self.report(now_us);
        if let Some(desk) = self.desk.as_ref().filter(|desk| desk.is_asked()) {
            let mut sheet = MetricsSnapshot::default();
            let holds_lease = self.shared.holds_lease();
            figures::of_node(&mut sheet, &mut self.node, &self.listening, holds_lease);
            cyclone_node::metrics::figures::of_gateway(&mut sheet, &self.gateway);
            desk.answer(sheet);
        }
        Ok(busy)
    }

    /// Does what the manager says.
    //= rowan §4.5
    fn follow(&mut self, now_us: u64) -> Result<()> {
        while let Some(order) = self.orders.next(now_us)? {
            let outcome = match &order {
                Order::Adopt(config) => self.adopt(config),
                Order::Commit { config, serve } => self.commit(config, serve),
                // Not handed on by the queue.
                Order::Refused(_) | Order::Left => Ok(()),
            };
            if !self.orders.tried(now_us, order, outcome)? {
                break;
            }
        }
        Ok(())
    }

    /// Only the configuration's members reach this memory from here on, and no request is served.
    fn adopt(&mut self, config: &Arc<cm::Configuration>) -> Result<(), Trouble> {
        let started = Instant::now();
        self.check_shards(config).map_err(Trouble::Lasting)?;
        let translated = translate::configuration(config).map_err(Trouble::Lasting)?;
        self.node.prepare(&translated)?;
        let own = cm::ServerId(u64::from(self.id));
        let begun = self.memory.begun(config, own);
        if !begun.is_empty() {
            let shards: Vec<ShardId> = begun.keys().copied().collect();
            let void = self.node.void(&shards)?;
            // Before the manager hears of it, and before anything else is written to these copies.
            self.memory.note(&begun, &void).map_err(Trouble::Passing)?;
        }
        tracing::info!(
            server = self.id,
            term = config.term,
            begun = begun.len(),
            took_us = started.elapsed().as_micros() as u64,
            "configuration prepared"
        );
        let term = config.term;
        self.newest = Some(Arc::clone(config));
        self.tell(Event::Adopted { term });
        Ok(())
    }

    /// The cluster may have been founded with another number, by a version that did not write it
    /// down.
    fn check_shards(&self, config: &cm::Configuration) -> Result<()> {
        let (there, here) = (config.shards.len(), self.node.store().shards());
        ensure!(
            there == usize::from(here),
            "the cluster was founded with {there} shards; shards_per_server and the servers of the file make {here}, and \
             must be as they were then"
        );
        Ok(())
    }

    fn commit(&mut self, config: &cm::Configuration, serve: &[ShardId]) -> Result<(), Trouble> {
        let started = Instant::now();
        if self.newest.as_ref().map(|it| it.term) != Some(config.term) {
            return Ok(());
        }
        self.node.serve_anew(serve);
        // Whatever is here and is not wanted here: an earlier process may have held it, while
        // others took it over.
        let own = cm::ServerId(u64::from(self.id));
        let release = self.memory.given_up(config, own);
        if !release.is_empty() {
            let void = self.node.void(&release)?;
            let noted = self.memory.note_released(&release, &void);
            noted.map_err(Trouble::Passing)?;
        }
        self.node.commit()?;
        let names = config.members.iter();
        self.listening.names = names.filter_map(|it| name_of(it, self.id)).collect();
        tracing::info!(
            server = self.id,
            term = config.term,
            newly_served = serve.len(),
            released = release.len(),
            took_us = started.elapsed().as_micros() as u64,
            "configuration committed"
        );
        Ok(())
    }

    /// Tells the agent what is new: finished copies, and the last period's counts.
    //= rowan §4.6
    fn report(&mut self, now_us: u64) {
        let joined = self.node.joined();
        let own = cm::ServerId(u64::from(self.id));
        let newest = self.newest.clone();
        let mut finished = BTreeMap::new();
        for shard in joined {
            let placed = newest
                .iter()
                .flat_map(|it| it.shards.get(usize::from(shard)));
            let copy = placed
                .flat_map(|it| &it.joining)
                .find(|it| it.server == own);
            let Some(since) = copy.map(|it| it.since) else {
                continue;
            };
            if self.copied.get(&shard) != Some(&since) {
                finished.insert(shard, since);
            }
        }
        // Together, as each report makes a configuration, and each configuration is a short pause.
        let waited_us = now_us.saturating_sub(self.copies_told_us);
        if finished.is_empty() {
            self.copies_told_us = now_us;
        } else if waited_us >= COPIES_TOGETHER_US || self.node.joining() == self.node.joined().len()
        {
            for (shard, since) in finished {
                self.copied.insert(shard, since);
                self.tell(Event::Copied { shard, since });
            }
        }
        if now_us < self.period_ends_us {
            return;
        }
        self.period_ends_us = now_us + self.period_us;
        let mut counted = Vec::new();
        if let Some(worker) = self.node.worker(0) {
            worker.take_loads(&mut counted);
        }
        let loads = counted
            .into_iter()
            .map(|(shard, requests, writes)| cm::Load {
                shard,
                requests,
                writes,
            });
        self.tell(Event::Loads(loads.collect()));
    }

    fn tell(&self, event: Event) {
        // Without an agent the next check of its orders ends the loop.
        let _ = self.reports.send(event);
    }
}

fn node_config(file: &ClusterFile, id: ServerId, memory: &OwnMemory) -> Result<NodeConfig> {
    let mut config = NodeConfig::new(
        id,
        file.protocol()?,
        file.shards()?,
        Token(file.secret()?),
        secret()?,
    );
    config.voids = memory.voids();
    config.join_bytes_per_s = u64::from(file.copy_mib_s) << 20;
    config.rebuild_threads = std::thread::available_parallelism()
        .map_or(1, std::num::NonZero::get)
        .min(MAX_REBUILD_THREADS);
    config.start = checkpoint::start(&file.fabric(), id, memory.incarnation());
    let segments = u32::try_from(file.memory_bytes / file.segment_bytes)
        .context("memory_bytes has too many segments")?;
    config.backup.segment_bytes = file.segment_bytes;
    config.backup.max_posted = (segments / 32).clamp(4, 512);
    config.backup.batch = config.backup.max_posted.div_ceil(4);
    Ok(config)
}

fn gateway_settings(file: &ClusterFile, entry: &file::ServerEntry) -> Result<GatewayConfig> {
    let mut settings = GatewayConfig::new(entry.redis);
    settings.users = file.redis.users()?;
    settings.tls = file.redis.tls()?;
    settings.protected_mode = file.redis.protected_mode;
    settings.max_clients = file.max_clients;
    Ok(settings)
}

fn gateway(
    file: &ClusterFile,
    entry: &file::ServerEntry,
    config: &NodeConfig,
    registry: &mio::Registry,
) -> Result<Gateway> {
    let mut settings = gateway_settings(file, entry)?;
    cyclone_node::serve::warn_of_few_files(&settings, "max_clients");
    settings.max_key_bytes = config.worker.max_key_bytes;
    settings.max_value_bytes = config.worker.max_value_bytes;
    settings.node_id = format!("{:040x}", u64::from(entry.id) + 1);
    settings.settings = vec![
        ("appendonly".to_owned(), "no".to_owned()),
        ("save".to_owned(), String::new()),
    ];
    Gateway::new(settings, registry, 0)
        .with_context(|| format!("cannot open the Redis port {}", entry.redis))
}

/// Where figures are served, if they are.
fn desk(entry: &file::ServerEntry) -> Result<Option<Arc<MetricsExchange>>> {
    let Some(listen) = entry.metrics else {
        return Ok(None);
    };
    // The loop polls every millisecond.
    let desk = Arc::new(MetricsExchange::waking(|| {}));
    let address = cyclone_node::metrics::serve(listen, Arc::clone(&desk))
        .with_context(|| format!("cannot serve metrics at {listen}"))?;
    tracing::info!(%address, "metrics");
    Ok(Some(desk))
}

/// A random number from the kernel.
fn secret() -> Result<u64> {
    let key = cyclone_node::cluster::random_key()?;
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&key[..8]);
    Ok(u64::from_le_bytes(bytes))
}

/// Removes what a cluster has left in its directory.
pub fn remove(directory: &Path) {
    // What is left behind is only in the way.
    let _ = std::fs::remove_dir_all(directory);
}

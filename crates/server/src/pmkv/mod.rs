//! `cyclone serve --engine pmkv`: one server of the log-structured store and its Redis port.
//!
//! Two threads: one polls Redis connections, executes requests and replicates; the other is the control thread. They
//! share no lock on the way of a request.

mod backend;
pub mod demo;
pub mod file;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use cyclone_fabric::shm::{Memory, ShmConfig, ShmEndpoint, Stalled};
use cyclone_fabric::{Endpoint, FabricError, Token};
use cyclone_gateway::{Gateway, GatewayConfig, Outcome, TopologyNode};
use cyclone_pmkv::{Configuration, Endpoints, Node, NodeConfig, ServerId, SharedControl};
use cyclone_wire::reply::Reply;

use backend::{Behind, Listening};
use file::{ClusterFile, Joined, Written};

/// How often the configuration is looked at.
const LOOK_US: u64 = 2_000;

/// How long the loop sleeps at most while it is idle.
const IDLE: Duration = Duration::from_millis(1);

/// What the command line says.
pub struct Arguments {
    /// The cluster's file.
    pub config: PathBuf,
    /// Which of its servers this is.
    pub id: ServerId,
    /// Overrides the file's replication.
    pub replication: Option<String>,
}

struct Files {
    directory: PathBuf,
    server: ServerId,
}

impl Endpoints for Files {
    fn open(&mut self, name: &str, memory_bytes: u64) -> Result<Box<dyn Endpoint>, FabricError> {
        let name = format!("s{}.{name}", self.server);
        let endpoint = ShmEndpoint::open(&self.directory, &name, ShmConfig::new(memory_bytes))?;
        Ok(Box::new(endpoint))
    }
}

/// A server, its Redis port, and the configuration that it follows.
struct Serving {
    file: ClusterFile,
    id: ServerId,
    node: Node,
    gateway: Gateway,
    listening: Listening,
    digests: Vec<u64>,
    looked_us: u64,
    seen: Option<Written>,
    told: Joined,
}

/// Runs a server until `stop`.
pub fn run(arguments: &Arguments, stop: &AtomicBool) -> Result<()> {
    let mut file = ClusterFile::read(&arguments.config)?;
    if let Some(replication) = &arguments.replication {
        file.replication.clone_from(replication);
        file.protocol()?;
    }
    let mut poll = mio::Poll::new().context("epoll")?;
    let mut serving = Serving::open(file, arguments.id, poll.registry())?;
    let ended = AtomicBool::new(false);
    let control = serving.node.control_handle();
    std::thread::scope(|scope| {
        scope.spawn(|| control_thread(&control, &ended));
        let outcome = serving.run(&mut poll, stop);
        ended.store(true, Ordering::SeqCst);
        outcome
    })
}

fn control_thread(control: &SharedControl, ended: &AtomicBool) {
    let begun = Instant::now();
    while !ended.load(Ordering::SeqCst) {
        control.turn(
            begun.elapsed().as_micros() as u64 + 1,
            Duration::from_micros(500),
        );
    }
}

/// Opens a server's own memory: kept if it is a member that has data, otherwise new.
fn open_memory(file: &ClusterFile, id: ServerId, keep: bool) -> Result<ShmEndpoint> {
    let config = ShmConfig {
        memory: if keep { Memory::Kept } else { Memory::Zeroed },
        // A server that is out of the configuration and in the middle of a write must not hold up its successors.
        stalled: Stalled::Kill,
        max_peers: 1024,
        ..ShmConfig::new(file.memory_bytes)
    };
    ShmEndpoint::open(&file.fabric(), &format!("s{id}"), config)
        .with_context(|| format!("cannot open the memory of server {id}"))
}

fn listening(file: &ClusterFile, id: ServerId, survives: &str, region: &str) -> Listening {
    let names = file.servers.iter().map(|entry| {
        let name = TopologyNode {
            id: format!("{:040x}", u64::from(entry.id) + 1),
            host: entry.redis.ip().to_string(),
            port: entry.redis.port(),
            is_leader: false,
            alive: true,
            myself: entry.id == id,
        };
        (entry.id, name)
    });
    Listening {
        own: id,
        names: names.collect(),
        replication: file.replication.clone(),
        survives: survives.to_owned(),
        region: region.to_owned(),
    }
}

impl Serving {
    fn open(file: ClusterFile, id: ServerId, registry: &mio::Registry) -> Result<Serving> {
        let entry = file.server(id)?.clone();
        std::fs::create_dir_all(file.fabric())
            .with_context(|| format!("cannot create {}", file.fabric().display()))?;
        let written: Option<Written> = file::get(&file::configuration_path(&file))?;
        let has_data = written.as_ref().is_none_or(|written| {
            let holds =
                |at: usize| written.primaries[at] == id || written.backups[at].contains(&id);
            written.members.contains(&id) && (0..written.primaries.len()).any(holds)
        });
        let memory = open_memory(&file, id, has_data)?;
        let (kept, region) = (memory.kept_memory(), memory.description().to_owned());
        if written.is_some() && has_data && !kept {
            bail!(
                "the memory of server {id} is gone, and the configuration counts on it: take the server out of the \
                 configuration first, then let it join again"
            );
        }
        let mut config = NodeConfig::new(
            id,
            file.protocol()?,
            file.shards()?,
            Token(file.secret()?),
            secret()?,
        );
        let segments = (file.memory_bytes / file.segment_bytes) as u32;
        config.backup.segment_bytes = file.segment_bytes;
        config.backup.max_posted = (segments / 8).clamp(2, 512);
        config.backup.batch = config.backup.max_posted.div_ceil(4);
        let mut files = Files {
            directory: file.fabric(),
            server: id,
        };
        let peers = files
            .open("peers", 4096)
            .context("messages between servers")?;
        let node = Node::open(config.clone(), Box::new(memory), peers, Box::new(files))?;
        let mut settings = GatewayConfig::new(entry.redis);
        settings.max_key_bytes = config.worker.max_key_bytes;
        settings.max_value_bytes = config.worker.max_value_bytes;
        settings.node_id = format!("{:040x}", u64::from(id) + 1);
        settings.settings = vec![
            ("appendonly".to_owned(), "no".to_owned()),
            ("save".to_owned(), String::new()),
        ];
        let gateway = Gateway::new(settings, registry, 0)
            .with_context(|| format!("cannot open the Redis port {}", entry.redis))?;
        tracing::info!(server = id, replication = file.replication, region, "open");
        Ok(Serving {
            // Files of a tmpfs or a disk: the provider says which.
            listening: listening(&file, id, "process-crash", &region),
            file,
            id,
            node,
            gateway,
            digests: Vec::new(),
            looked_us: 0,
            seen: None,
            told: Joined::default(),
        })
    }

    fn run(&mut self, poll: &mut mio::Poll, stop: &AtomicBool) -> Result<()> {
        let begun = Instant::now();
        let now_us = || begun.elapsed().as_micros() as u64 + 1;
        let mut events = mio::Events::with_capacity(1024);
        let mut busy = true;
        while !stop.load(Ordering::Relaxed) {
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
            busy = self.step(now_us())?;
        }
        Ok(())
    }

    fn step(&mut self, now_us: u64) -> Result<bool> {
        let mut behind = Behind {
            node: &mut self.node,
            listening: &self.listening,
            digests: &mut self.digests,
        };
        let mut busy = self.gateway.step(now_us, &mut behind) > 0;
        // Twice: what is sent by the first is often done by the second.
        busy |= self.node.step(now_us);
        busy |= self.node.step(now_us);
        let mut answers = Vec::new();
        if let Some(worker) = self.node.worker(0) {
            worker.take_answers(&mut answers);
            busy |= worker.in_flight() > 0;
        }
        for ticket in self.digests.drain(..) {
            let digest = Reply::Bytes(backend::digest(&self.node));
            self.gateway.complete(ticket, Outcome::Done(digest));
            busy = true;
        }
        if !answers.is_empty() || busy {
            for (ticket, answer) in answers {
                self.gateway.complete(ticket, backend::outcome(answer));
            }
            let behind = Behind {
                node: &mut self.node,
                listening: &self.listening,
                digests: &mut self.digests,
            };
            self.gateway.flush(now_us, &behind);
        }
        if now_us.saturating_sub(self.looked_us) >= LOOK_US {
            self.looked_us = now_us;
            self.follow()?;
        }
        Ok(busy)
    }

    /// Follows the configuration that is written down; without one the cluster is what its file says.
    //= rowan §4.5
    fn follow(&mut self) -> Result<()> {
        let written: Option<Written> = file::get(&file::configuration_path(&self.file))?;
        let Some(written) = written else {
            if self.node.configuration().is_none() {
                let first = self.file.first()?;
                self.prepare(&first)?;
                self.node.commit()?;
            }
            return Ok(());
        };
        if !written.members.contains(&self.id) {
            if self.node.configuration().is_some() {
                bail!(
                    "server {} is no longer a member: start it again to join",
                    self.id
                );
            }
            return Ok(());
        }
        if self.seen.as_ref() != Some(&written) {
            self.adopt(&written)?;
            self.seen = Some(written);
        }
        let joined = Joined {
            term: self.node.term(),
            shards: self.node.joined(),
        };
        if joined != self.told {
            file::put(&file::joined_path(&self.file, self.id), &joined)?;
            self.told = joined;
        }
        Ok(())
    }

    fn adopt(&mut self, written: &Written) -> Result<()> {
        let configuration = written.read(&self.file)?;
        if written.term > self.node.term() {
            self.prepare(&configuration)?;
        }
        if written.committed && written.term == self.node.term() {
            self.node.commit()?;
            tracing::info!(
                server = self.id,
                term = written.term,
                "configuration committed"
            );
        }
        Ok(())
    }

    fn prepare(&mut self, configuration: &Configuration) -> Result<()> {
        self.node.prepare(configuration)?;
        let path = file::prepared_path(&self.file, self.id);
        file::put(&path, &configuration.term)?;
        tracing::info!(
            server = self.id,
            term = configuration.term,
            "configuration prepared"
        );
        Ok(())
    }
}

/// A random number from the kernel.
fn secret() -> Result<u64> {
    let key = crate::cluster::random_key()?;
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&key[..8]);
    Ok(u64::from_le_bytes(bytes))
}

/// Removes what a cluster has left in its directory.
pub fn remove(directory: &Path) {
    // What is left behind is only in the way.
    let _ = std::fs::remove_dir_all(directory);
}

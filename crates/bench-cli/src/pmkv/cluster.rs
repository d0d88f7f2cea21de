//! All servers of a cluster in one process, stepped by one thread.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use cyclone_fabric::shm::{Memory, ShmConfig, ShmEndpoint};
use cyclone_fabric::{Endpoint, FabricError, Token};
use cyclone_one_sided_bench::metered::{Devices, Metered};
use cyclone_pmkv::{Configuration, Endpoints, Node, NodeConfig, Role, Server, Start};
use cyclone_replication::Protocol;

/// How long a configuration may take, on a machine that others use too.
const SERVED_WITHIN: Duration = Duration::from_secs(600);

/// Modelled media of all servers, or none.
pub(super) type Media = Option<Arc<Devices>>;

/// What a cluster is made of.
#[derive(Clone)]
pub(super) struct Setting {
    pub protocol: Protocol,
    pub servers: u32,
    /// Of everything, as far as there are servers.
    pub copies: usize,
    /// Of each server.
    pub workers: u32,
    pub shards: u16,
    /// Of each server.
    pub memory_bytes: u64,
    pub segment_bytes: u64,
    pub media: Media,
    /// What a server that is opened again begins with.
    pub start: Start,
}

impl Setting {
    /// Three servers with a worker each.
    pub fn small(protocol: Protocol) -> Setting {
        Setting {
            protocol,
            servers: 3,
            copies: 3,
            workers: 1,
            shards: 24,
            memory_bytes: 256 << 20,
            segment_bytes: 1 << 20,
            media: None,
            start: Start::default(),
        }
    }
}

/// Where a server's further endpoints are.
struct Files {
    directory: PathBuf,
    server: u32,
    connections: u32,
    media: Media,
}

impl Endpoints for Files {
    fn open(&mut self, name: &str, memory_bytes: u64) -> Result<Box<dyn Endpoint>, FabricError> {
        let config = ShmConfig {
            max_connections: self.connections,
            max_registrations: 64,
            ..ShmConfig::new(memory_bytes)
        };
        let name = format!("s{}.{name}", self.server);
        let endpoint = Box::new(ShmEndpoint::open(&self.directory, &name, config)?);
        Ok(match &self.media {
            Some(media) => Box::new(Metered::new(endpoint, Arc::clone(media))),
            None => endpoint,
        })
    }
}

/// A running cluster.
pub(super) struct Cluster {
    pub setting: Setting,
    directory: PathBuf,
    pub nodes: Vec<Option<Node>>,
    pub configuration: Configuration,
    begun: Instant,
    /// Time spent on the keeping side.
    pub keeping: Duration,
}

/// Opens a server over new memory, or over that of its last life.
fn open(directory: &Path, id: u32, setting: &Setting, kept: bool) -> Result<Node> {
    let config = ShmConfig {
        memory: if kept { Memory::Kept } else { Memory::Zeroed },
        // Each costs memory that is new at every start; there are two configurations at most.
        max_peers: setting.servers * (setting.workers + 1) * 2 + 64,
        max_connections: setting.servers * (setting.workers + 1) * 2 + 64,
        max_registrations: 1024,
        ..ShmConfig::new(setting.memory_bytes)
    };
    let data = ShmEndpoint::open(directory, &format!("s{id}"), config)?;
    if !kept {
        // So that no request pays for the first touch of a page while something is measured.
        data.memory().zero(0, setting.memory_bytes);
    }
    let mut files = Files {
        directory: directory.to_owned(),
        server: id,
        connections: 16,
        media: setting.media.clone(),
    };
    let peers = files.open("peers", 4096)?;
    let mut config = NodeConfig::new(id, setting.protocol, setting.shards, Token(7), 99);
    config.workers = setting.workers;
    config.start = setting.start.clone();
    config.backup.segment_bytes = setting.segment_bytes;
    let segments = setting.memory_bytes / setting.segment_bytes;
    config.backup.max_posted = (segments / 32).clamp(4, 32) as u32;
    config.backup.batch = config.backup.max_posted / 2;
    Ok(Node::open(config, Box::new(data), peers, Box::new(files))?)
}

impl Cluster {
    /// Starts one; every shard is served.
    pub fn start(setting: Setting) -> Result<Cluster> {
        let name = format!(
            "cyclone-bench-pmkv-{}-{}",
            std::process::id(),
            setting.protocol
        );
        let directory = Path::new("/dev/shm").join(name);
        std::fs::create_dir_all(&directory)
            .with_context(|| format!("making {}", directory.display()))?;
        let mut cluster = Cluster {
            directory,
            nodes: Vec::new(),
            configuration: Configuration {
                term: 0,
                servers: Vec::new(),
                shards: Vec::new(),
            },
            begun: Instant::now(),
            keeping: Duration::ZERO,
            setting,
        };
        for id in 0..cluster.setting.servers {
            let node = open(&cluster.directory, id, &cluster.setting, false)?;
            cluster.nodes.push(Some(node));
        }
        let servers = cluster.servers();
        let copies = cluster.setting.copies.min(servers.len());
        cluster.configuration = Configuration::spread(1, servers, cluster.setting.shards, copies)?;
        cluster.go_over()?;
        Ok(cluster)
    }

    fn servers(&self) -> Vec<Server> {
        let there = self.nodes.iter().zip(0..);
        let there = there.filter_map(|(node, id)| Some((node.as_ref()?, id)));
        there
            .map(|(node, id)| Server {
                id,
                log: node.log_address(),
                peer: node.peer_address(),
            })
            .collect()
    }

    /// Opens a server that was ended over its memory, without taking it into the configuration.
    pub fn open_again(&self, id: u32) -> Result<Node> {
        open(&self.directory, id, &self.setting, true)
    }

    /// All go over to the configuration; answers when every shard is served.
    pub fn go_over(&mut self) -> Result<()> {
        for node in self.nodes.iter_mut().flatten() {
            node.prepare(&self.configuration)?;
        }
        for node in self.nodes.iter_mut().flatten() {
            node.commit()?;
        }
        let until = Instant::now() + SERVED_WITHIN;
        while !self.is_served() {
            cyclone::signals::check()?;
            self.step();
            if Instant::now() > until {
                bail!("the shards are not served after {SERVED_WITHIN:?}");
            }
        }
        Ok(())
    }

    fn is_served(&self) -> bool {
        let placed = self.configuration.shards.iter().zip(0u16..);
        placed.into_iter().all(|(placement, shard)| {
            let node = self.nodes[placement.primary as usize].as_ref();
            node.is_some_and(|node| node.role(shard) == Role::Serving)
        })
    }

    /// One step of everybody.
    pub fn step(&mut self) {
        let now_us = self.begun.elapsed().as_micros() as u64 + 1;
        for node in self.nodes.iter_mut().flatten() {
            node.step(now_us);
        }
        let begun = Instant::now();
        for node in self.nodes.iter_mut().flatten() {
            node.step_control(now_us);
        }
        self.keeping += begun.elapsed();
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.nodes.clear();
        // What is left behind is only in the way.
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

//! A cluster whose nodes run on a lab's machines.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use cyclone::cluster::random_key;
use cyclone::config::{
    Cluster, File, Limits, Log, MemberEntry, Metrics, Node, Reads, RedisPort, Timing, hex,
};

use super::{Lab, PACKET_PORT, REDIS_PORT};
use crate::net::Place;
use crate::net::child::{self, Role};

/// How the nodes of a lab's cluster run.
#[derive(Clone, Debug)]
pub struct NodeOptions {
    /// How many, on the lab's first machines.
    pub replicas: usize,
    /// `udp`, `tcp`, `xdp` or `dpdk`.
    pub transport: String,
    /// 1 to 32.
    pub burst: usize,
    /// `rocksdb`, `memory` or `echo`.
    pub engine: String,
    /// `adaptive`, `busy` or `event`.
    pub polling: String,
    /// CPU per node, in order; empty for none.
    pub pin: Vec<usize>,
    /// Bytes of each region.
    pub nvm_bytes: u64,
    /// Where the regions lie, if not in memory that cards can write to.
    pub regions: Option<PathBuf>,
    /// Physical logs.
    pub logs: u16,
    /// Threads per node that run a loop for each log; 0: one loop for all.
    pub log_threads: u16,
    /// Heartbeats and elections as by default, in place of the longer times that a busy lab wants.
    pub default_timing: bool,
    /// In which processes.
    pub run: RunAs,
}

/// In which processes the nodes of a lab run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunAs {
    /// One each, as in production.
    Nodes,
    /// All loops in one thread that never waits, on the first of `pin`'s CPUs.
    OneLoop,
    /// The first one's loop in a thread that never waits; the others alternate with the load, in
    /// its thread.
    Alternating,
    /// All loops in one thread that naps where there is nothing to do, under callgrind.
    Counted,
    /// One store in a thread that never waits, behind a port, without a log.
    Bare,
}

/// A cluster on a lab's machines.
pub struct LabCluster<'a> {
    lab: &'a Lab,
    directory: PathBuf,
    regions: PathBuf,
    /// Replica ids and packet addresses.
    pub nodes: Vec<(u64, std::net::SocketAddr)>,
    /// For clients.
    pub client_key: [u8; 32],
    options: NodeOptions,
    running: Vec<Option<Child>>,
}

impl<'a> LabCluster<'a> {
    /// Logs that have separate ports.
    pub fn log_ports(&self) -> u16 {
        match self.options.log_threads {
            0 => 0,
            _ => self.options.logs,
        }
    }

    /// Writes the configurations of a new cluster and starts it. The first node is the quickest to
    /// stand for election, so that it leads wherever nothing fails.
    ///
    /// # Errors
    /// When a file cannot be written or a process not started.
    pub fn start(lab: &'a Lab, directory: &Path, options: &NodeOptions) -> Result<LabCluster<'a>> {
        std::fs::create_dir_all(directory)?;
        let regions = options.regions.as_deref();
        let regions = regions.unwrap_or(Path::new("/dev/shm")).join(format!(
            "cyclone-{}-{}",
            std::process::id(),
            hex(&random_key()?[..4])
        ));
        std::fs::create_dir_all(&regions)?;
        let client_key = random_key()?;
        let nodes: Vec<_> = (0..options.replicas)
            .map(|n| (n as u64 + 1, (lab.address(n), PACKET_PORT).into()))
            .collect();
        let member = |(id, packet): &(u64, std::net::SocketAddr)| MemberEntry {
            id: *id,
            packet: *packet,
            redis: Some((packet.ip(), REDIS_PORT).into()),
        };
        let shared = Cluster {
            id: hex(&random_key()?[..16]),
            logs: options.logs,
            log_threads: options.log_threads,
            node_key: hex(&random_key()?),
            client_key: hex(&client_key),
            security: "authenticated".into(),
            transport: options.transport.clone(),
            restored_from: None,
            members: nodes.iter().map(member).collect(),
        };
        let mut cluster = LabCluster {
            lab,
            directory: directory.to_owned(),
            regions,
            nodes,
            client_key,
            options: options.clone(),
            running: (0..options.replicas).map(|_| None).collect(),
        };
        for node in 0..options.replicas {
            let file = cluster.file(node, &shared);
            cyclone::durable::write_private(&cluster.config(node), &toml::to_string(&file)?)?;
        }
        match options.run {
            RunAs::Nodes => {
                (0..options.replicas).try_for_each(|node| cluster.start_node(node, true))?;
            }
            _ => cluster.start_host()?,
        }
        Ok(cluster)
    }

    /// Starts the one process that runs all nodes; it counts as the first node's.
    fn start_host(&mut self) -> Result<()> {
        let all = (0..self.options.replicas).map(|node| self.place(node));
        let role = match self.options.run {
            RunAs::Bare => Role::Bare {
                place: self.place(0),
                transport: self.options.transport.clone(),
                interface: self.ports(0),
            },
            RunAs::Alternating => Role::Host {
                places: vec![self.place(0)],
                naps: false,
            },
            run => Role::Host {
                places: all.collect(),
                naps: run == RunAs::Counted,
            },
        };
        let cpu = self.options.pin.first().copied();
        let mut under = Vec::new();
        if self.options.run == RunAs::Counted {
            let to = format!("--callgrind-out-file={}", self.counts().display());
            // Nothing of the start.
            let within = "--toggle-collect=cyclone_replica::node::Node::step";
            under = [
                "valgrind",
                "--tool=callgrind",
                &to,
                "--collect-atstart=no",
                within,
            ]
            .map(str::to_owned)
            .to_vec();
        }
        let command = self.lab.child_under(0, cpu, &under);
        self.spawn(0, command, |command| child::start(command, &role))
    }

    fn place(&self, node: usize) -> Place {
        Place {
            namespace: self.lab.namespace(Some(node)),
            config: self.config(node),
        }
    }

    /// Nodes that the load runs in its own thread.
    pub fn beside_the_load(&self) -> Vec<Place> {
        match self.options.run {
            RunAs::Alternating => (1..self.options.replicas)
                .map(|node| self.place(node))
                .collect(),
            _ => Vec::new(),
        }
    }

    fn spawn(
        &mut self,
        node: usize,
        mut command: Command,
        start: impl FnOnce(&mut Command) -> Result<Child>,
    ) -> Result<()> {
        let log = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.directory.join(format!("node{}.log", node + 1)))?;
        command
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        self.running[node] = Some(start(&mut command)?);
        Ok(())
    }

    fn config(&self, node: usize) -> PathBuf {
        self.directory.join(format!("node{}.toml", node + 1))
    }

    fn file(&self, node: usize, shared: &Cluster) -> File {
        let options = &self.options;
        let named = matches!(options.transport.as_str(), "xdp" | "dpdk");
        File {
            cluster: shared.clone(),
            node: Node {
                id: node as u64 + 1,
                data: self.directory.join(format!("node{}", node + 1)),
                nvm: self.regions.join(format!("node{}.nvm", node + 1)),
                nvm_bytes: options.nvm_bytes,
                flash: None,
                flash_bytes: 0,
                durability: "nvm".into(),
                engine: options.engine.clone(),
                polling: options.polling.clone(),
                interface: named.then(|| self.ports(node)),
                queues: 1,
                archive: None,
                archive_seal_ms: cyclone::config::ARCHIVE_SEAL_MS,
                burst: options.burst,
                pin_cpu: options.pin.get(node).copied(),
                priority_boost: false,
                password: None,
                redis_listen: None,
                member_addresses: Vec::new(),
            },
            limits: Limits::default(),
            reads: Reads::default(),
            // The namespaces reach only each other.
            redis: RedisPort {
                protected_mode: false,
                ..RedisPort::default()
            },
            metrics: Metrics::default(),
            log: Log::default(),
            timing: self.timing(node),
        }
    }

    /// The first node stands for election first.
    fn timing(&self, node: usize) -> Timing {
        let timing = match self.options.default_timing {
            true => Timing::default(),
            false => Timing {
                heartbeat_ms: 20,
                election_ms: 100,
            },
        };
        Timing {
            election_ms: timing.election_ms * if node == 0 { 1 } else { 4 },
            ..timing
        }
    }

    /// By which a node reaches the others, and the client on the last machine.
    fn ports(&self, node: usize) -> String {
        let others = (0..self.options.replicas).chain([self.lab.machines - 1]);
        self.lab.ports(&self.options.transport, node, others)
    }

    /// Starts a node; its words go to `nodeN.log`.
    ///
    /// # Errors
    /// When the process cannot be started.
    pub fn start_node(&mut self, node: usize, bootstrap: bool) -> Result<()> {
        let config = self.config(node).display().to_string();
        let mut arguments = vec!["--config", &config, "--end-with-parent"];
        if bootstrap {
            arguments.push("--bootstrap");
        }
        let command = self.lab.serve(node, &arguments);
        self.spawn(node, command, |command| {
            command.spawn().context("cannot start a node")
        })
    }

    /// Kills a node with SIGKILL and waits for its end.
    ///
    /// # Errors
    /// When that is refused.
    pub fn kill(&mut self, node: usize) -> Result<()> {
        // `ip` has become the node: same process.
        if let Some(mut child) = self.running[node].take() {
            child.kill().context("kill")?;
            child.wait().context("wait")?;
        }
        Ok(())
    }

    /// Ends a node with SIGTERM and waits for its end.
    ///
    /// # Errors
    /// When that is refused.
    pub fn end(&mut self, node: usize) -> Result<()> {
        if let Some(mut child) = self.running[node].take() {
            let pid = rustix::process::Pid::from_child(&child);
            rustix::process::kill_process(pid, rustix::process::Signal::TERM).context("kill")?;
            child.wait().context("wait")?;
        }
        Ok(())
    }

    /// Where callgrind puts what it has counted, when it ends.
    pub fn counts(&self) -> PathBuf {
        self.directory.join("callgrind.out")
    }

    /// Waits until every node has been set up and opened its packet port.
    ///
    /// # Errors
    /// When one has not in time.
    pub fn wait_up(&self, patience: Duration) -> Result<()> {
        let until = Instant::now() + patience;
        while (0..self.running.len()).any(|node| !self.log(node).contains("packets by")) {
            if Instant::now() > until {
                bail!("a node does not start:\n{}", self.log(0));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// What a node has said.
    pub fn log(&self, node: usize) -> String {
        std::fs::read_to_string(self.directory.join(format!("node{}.log", node + 1)))
            .unwrap_or_default()
    }

    /// A node's process.
    pub fn pid(&self, node: usize) -> Option<u32> {
        self.running[node].as_ref().map(Child::id)
    }
}

impl Drop for LabCluster<'_> {
    fn drop(&mut self) {
        for node in 0..self.running.len() {
            // Nothing more can be done about a process that cannot be killed.
            let _ = self.kill(node);
        }
        let _ = std::fs::remove_dir_all(&self.regions);
    }
}

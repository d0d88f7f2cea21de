//! A whole cluster of real processes on this machine, for the demo, the benchmarks and the kill
//! tests: writes the configurations, starts, kills and restarts nodes, and leaves nothing behind.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use cyclone_pmem::create_private_dir_all;

use crate::config::{
    Cluster, File, Limits, Log, MemberEntry, Metrics, Node, Reads, RedisPort, Timing, hex,
};
use crate::durable;

/// What kind of cluster to start.
#[derive(Clone, Debug)]
pub struct Options {
    /// Number of replicas.
    pub replicas: usize,
    /// `rocksdb`, `memory` or `echo`.
    pub engine: String,
    /// Size of each region.
    pub nvm_bytes: u64,
    /// `nvm` or `flash`: with a second level of this kind in the node's directory; none if not
    /// given.
    pub durability: Option<String>,
    /// Bytes of each second level.
    pub flash_bytes: u64,
    /// Where second levels lie, if not in the nodes' directories.
    pub flash_directory: Option<PathBuf>,
    /// `udp` or `tcp`.
    pub transport: String,
    /// `authenticated`, `encrypted` or `off`.
    pub security: String,
    /// First of a run of ports to try.
    pub first_port: u16,
    /// CPU per node, in order; empty for no pinning.
    pub pin: Vec<usize>,
    /// How the loops wait.
    pub polling: String,
    /// Physical logs.
    pub logs: u16,
    /// Threads per node that run a loop for each log; 0: one loop for all.
    pub log_threads: u16,
    /// Commands per log entry and datagrams per call.
    pub burst: usize,
    /// Whether reads may rest on the leader's lease.
    pub lease_reads: bool,
    /// Shortest silence before an election, in milliseconds; the default if not given.
    pub election_ms: Option<u64>,
    /// The program `cyclone` to run; this one if not given.
    pub executable: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            replicas: 3,
            engine: "rocksdb".into(),
            nvm_bytes: 128 << 20,
            durability: None,
            flash_bytes: 256 << 20,
            flash_directory: None,
            transport: "udp".into(),
            security: "authenticated".into(),
            first_port: 7101,
            pin: Vec::new(),
            polling: "adaptive".into(),
            logs: 1,
            log_threads: 0,
            burst: 32,
            lease_reads: false,
            election_ms: None,
            executable: None,
        }
    }
}

impl Options {
    /// Logs with their own packet port: all, if they have separate loops, or none.
    pub fn log_ports(&self) -> u16 {
        match self.log_threads {
            0 => 0,
            _ => self.logs,
        }
    }
}

/// One node's process.
pub struct Process {
    /// Replica number.
    pub id: u64,
    /// Its configuration file.
    pub config: PathBuf,
    /// Its Redis port.
    pub redis: SocketAddr,
    /// Its packet port.
    pub packet: SocketAddr,
    child: Option<Child>,
}

/// The cluster. Dropping it kills its processes and removes its regions; the directory stays unless
/// it was temporary.
pub struct LocalCluster {
    /// Where data and logs lie.
    pub directory: PathBuf,
    /// Where the regions lie.
    pub regions: PathBuf,
    /// The nodes.
    pub nodes: Vec<Process>,
    /// For native clients.
    pub client_key: [u8; 32],
    executable: PathBuf,
    keep: bool,
    /// Whether the nodes end when this program is killed. Off for clusters that may outlive it.
    pub end_with_us: bool,
}

/// 32 random bytes from the kernel.
pub fn random_key() -> Result<[u8; 32]> {
    let mut key = [0; 32];
    let filled = rustix::rand::getrandom(&mut key, rustix::rand::GetRandomFlags::empty())
        .context("getrandom")?;
    if filled != key.len() {
        bail!(
            "the kernel gave {filled} random bytes instead of {}",
            key.len()
        );
    }
    Ok(key)
}

/// Where to look for free ports, by chance: clusters that start at the same time should not find
/// the same ones. The kernel's own range lies above.
pub fn any_first_port() -> Result<u16> {
    let random = random_key()?;
    Ok(7301 + u16::from_le_bytes([random[0], random[1]]) % 20_000)
}

/// Finds `count` ports, from `first` on, that are free for both TCP and UDP on loopback.
pub fn free_ports(first: u16, count: usize) -> Result<Vec<u16>> {
    let mut found = Vec::with_capacity(count);
    for port in first..u16::MAX {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        if TcpListener::bind(address).is_ok() && UdpSocket::bind(address).is_ok() {
            found.push(port);
            if found.len() == count {
                return Ok(found);
            }
        }
    }
    bail!("no {count} free ports from {first} on")
}

/// Finds so many ports in a row, from `first` on, that are free for both TCP and UDP on loopback.
fn free_run(mut first: u16, count: usize) -> Result<Vec<u16>> {
    loop {
        let ports = free_ports(first, count)?;
        let gap = ports.windows(2).find(|pair| pair[1] != pair[0] + 1);
        match gap {
            None => return Ok(ports),
            Some(pair) => first = pair[1],
        }
    }
}

/// Where the regions of a new cluster go: in memory where the machine has it. Nothing is made yet.
pub fn region_directory(directory: &Path) -> Result<PathBuf> {
    let shm = Path::new("/dev/shm");
    Ok(match shm.is_dir() {
        true => shm.join(format!(
            "cyclone-{}-{}",
            std::process::id(),
            hex(&random_key()?[..4])
        )),
        false => directory.join("nvm"),
    })
}

/// Makes a directory of that name.
pub fn make_directory(path: &Path) -> Result<()> {
    create_private_dir_all(path).with_context(|| format!("cannot create {}", path.display()))
}

/// Whether nodes with these options would start, as far as is known beforehand. Nothing is made.
///
/// # Errors
/// What they would refuse.
pub fn check(options: &Options) -> Result<()> {
    let nowhere = Path::new("nowhere");
    for file in files(nowhere, nowhere, options)? {
        file.to_config(true)?;
    }
    Ok(())
}

/// The configurations of a new cluster, with new keys and ports.
fn files(directory: &Path, regions: &Path, options: &Options) -> Result<Vec<File>> {
    // Behind each packet port those of the logs.
    let behind = usize::from(options.log_ports());
    let ports = free_run(options.first_port, (2 + behind) * options.replicas)?;
    let loopback = |port: u16| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let members: Vec<MemberEntry> = (0..options.replicas)
        .map(|n| MemberEntry {
            id: n as u64 + 1,
            redis: Some(loopback(ports[n])),
            packet: loopback(ports[options.replicas + n * (1 + behind)]),
        })
        .collect();
    let cluster = Cluster {
        id: hex(&random_key()?[..16]),
        logs: options.logs,
        log_threads: options.log_threads,
        node_key: hex(&random_key()?),
        client_key: hex(&random_key()?),
        security: options.security.clone(),
        transport: options.transport.clone(),
        restored_from: None,
        members: members.clone(),
    };
    let file = |(position, member): (usize, &MemberEntry)| File {
        cluster: cluster.clone(),
        node: Node {
            id: member.id,
            data: directory.join(format!("node{}", member.id)),
            nvm: regions.join(format!("node{}.nvm", member.id)),
            nvm_bytes: options.nvm_bytes,
            flash: options.durability.as_ref().map(|_| {
                let below = options.flash_directory.as_deref().unwrap_or(directory);
                below.join(format!("node{}", member.id)).join("flash")
            }),
            flash_bytes: options.flash_bytes,
            archive: None,
            archive_seal_ms: crate::config::ARCHIVE_SEAL_MS,
            durability: options.durability.clone().unwrap_or_else(|| "nvm".into()),
            engine: options.engine.clone(),
            polling: options.polling.clone(),
            interface: None,
            queues: 1,
            burst: options.burst,
            pin_cpu: options.pin.get(position).copied(),
            priority_boost: false,
            password: None,
            redis_listen: None,
            member_addresses: Vec::new(),
        },
        limits: Limits::default(),
        timing: Timing {
            election_ms: options.election_ms.unwrap_or(Timing::default().election_ms),
            ..Timing::default()
        },
        reads: Reads {
            lease: options.lease_reads,
            ..Reads::default()
        },
        redis: RedisPort::default(),
        metrics: Metrics::default(),
        log: Log::default(),
    };
    Ok(members.iter().enumerate().map(file).collect())
}

/// Writes the configurations; answers the nodes, which do not run yet.
fn write(directory: &Path, files: &[File]) -> Result<Vec<Process>> {
    let mut nodes = Vec::new();
    for file in files {
        let members = &file.cluster.members;
        let own = members.iter().find(|member| member.id == file.node.id);
        let member = own.context("a node is a member")?;
        let config = directory.join(format!("node{}.toml", member.id));
        durable::write_private(&config, &toml::to_string(file)?)
            .with_context(|| format!("cannot write {}", config.display()))?;
        nodes.push(Process {
            id: member.id,
            config,
            redis: member.redis.context("just set")?,
            packet: member.packet,
            child: None,
        });
    }
    Ok(nodes)
}

impl LocalCluster {
    /// Writes the configurations of a new cluster; starts nothing.
    pub fn create(directory: &Path, options: &Options) -> Result<LocalCluster> {
        make_directory(directory)?;
        let regions = region_directory(directory)?;
        make_directory(&regions)?;
        let written = files(directory, &regions, options)
            .and_then(|files| Ok((write(directory, &files)?, files)));
        let (nodes, files) = written.inspect_err(|_| {
            // What is left behind is only in the way.
            let _ = fs::remove_dir_all(&regions);
        })?;
        let first = files.first().context("a cluster has nodes")?;
        let client_key = crate::config::parse_key("client_key", &first.cluster.client_key)?;
        let executable = match &options.executable {
            Some(path) => path.clone(),
            None => std::env::current_exe().context("own executable")?,
        };
        Ok(LocalCluster {
            directory: directory.to_owned(),
            regions,
            nodes,
            client_key,
            executable,
            keep: false,
            end_with_us: true,
        })
    }

    /// Writes the configuration of one more node, with the first one's settings, which is to join;
    /// starts nothing. Answers its place.
    pub fn prepare(&mut self) -> Result<usize> {
        let mut file = File::read(&self.nodes[0].config)?;
        let id = self.nodes.iter().map(|node| node.id).max().unwrap_or(0) + 1;
        let ports = free_ports(
            self.nodes
                .last()
                .map_or(7301, |node| node.packet.port() + 1),
            2,
        )?;
        let loopback = |port: u16| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let (redis, packet) = (loopback(ports[0]), loopback(ports[1]));
        file.cluster.members.push(MemberEntry {
            id,
            redis: Some(redis),
            packet,
        });
        file.node.id = id;
        file.node.data = self.directory.join(format!("node{id}"));
        file.node.nvm = self.regions.join(format!("node{id}.nvm"));
        file.node.flash = file.node.flash.map(|_| file.node.data.join("flash"));
        let config = self.directory.join(format!("node{id}.toml"));
        durable::write_private(&config, &toml::to_string(&file)?)
            .with_context(|| format!("cannot write {}", config.display()))?;
        self.nodes.push(Process {
            id,
            config,
            redis,
            packet,
            child: None,
        });
        Ok(self.nodes.len() - 1)
    }

    /// Starts a prepared node for the first time: it joins.
    pub fn join(&mut self, node: usize) -> Result<()> {
        self.start_as(node, Some("--join"))
    }

    /// Starts one node (0-based). Its standard error goes to `nodeN.log` in the directory.
    pub fn start(&mut self, node: usize, bootstrap: bool) -> Result<()> {
        self.start_as(node, bootstrap.then_some("--bootstrap"))
    }

    fn start_as(&mut self, node: usize, beginning: Option<&str>) -> Result<()> {
        let process = &mut self.nodes[node];
        let log_path = self.directory.join(format!("node{}.log", process.id));
        let log = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(&log_path)?;
        let mut command = Command::new(&self.executable);
        command.arg("serve").arg("--config").arg(&process.config);
        command.args(beginning);
        // A separate process group: Ctrl-C reaches only this program, which then ends its nodes in
        // order.
        command
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .process_group(0);
        if self.end_with_us {
            command.arg("--end-with-parent");
        }
        process.child = Some(
            command
                .spawn()
                .with_context(|| format!("cannot start {}", self.executable.display()))?,
        );
        Ok(())
    }

    /// Starts all nodes of a new cluster.
    pub fn start_all(&mut self, bootstrap: bool) -> Result<()> {
        for node in 0..self.nodes.len() {
            self.start(node, bootstrap)?;
        }
        Ok(())
    }

    /// Kills one node with SIGKILL and waits for its end.
    pub fn kill(&mut self, node: usize) -> Result<()> {
        if let Some(mut child) = self.nodes[node].child.take() {
            child.kill().context("kill")?;
            child.wait().context("wait")?;
        }
        Ok(())
    }

    /// Asks one node to end and waits, for at most ten seconds; then kills it. Returns how it
    /// ended, if it was running and was not killed.
    pub fn terminate(&mut self, node: usize) -> Result<Option<ExitStatus>> {
        let Some(child) = self.nodes[node].child.as_mut() else {
            return Ok(None);
        };
        let pid = rustix::process::Pid::from_child(child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).context("kill")?;
        let until = Instant::now() + Duration::from_secs(10);
        loop {
            if let Some(status) = child.try_wait()? {
                self.nodes[node].child = None;
                return Ok(Some(status));
            }
            if Instant::now() > until {
                self.kill(node)?;
                return Ok(None);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Whether a node's process lives.
    pub fn is_running(&mut self, node: usize) -> bool {
        match self.nodes[node].child.as_mut() {
            Some(child) => matches!(child.try_wait(), Ok(None)),
            None => false,
        }
    }

    /// The process id of a running node.
    pub fn pid(&self, node: usize) -> Option<u32> {
        self.nodes[node].child.as_ref().map(Child::id)
    }

    /// CPU time the nodes have used so far, in seconds.
    pub fn cpu_seconds(&self) -> f64 {
        let ticks: u64 = (0..self.nodes.len())
            .filter_map(|node| {
                let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid(node)?)).ok()?;
                let fields: Vec<&str> = stat.rsplit_once(") ")?.1.split(' ').collect();
                Some(fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?)
            })
            .sum();
        ticks as f64 / rustix::param::clock_ticks_per_second() as f64
    }

    /// The node (0-based) that says it leads.
    pub fn leader(&self) -> Option<usize> {
        (0..self.nodes.len()).find(|&node| {
            crate::resp::info(self.nodes[node].redis, Duration::from_millis(200)).is_ok_and(
                |info| {
                    info.get("cyclone_role")
                        .is_some_and(|role| role == "leader")
                },
            )
        })
    }

    /// Waits until a node leads and serves.
    pub fn wait_for_leader(&mut self, patience: Duration) -> Result<usize> {
        let until = Instant::now() + patience;
        loop {
            if let Some(leader) = self.leader() {
                return Ok(leader);
            }
            for node in 0..self.nodes.len() {
                let ended = self.nodes[node]
                    .child
                    .as_mut()
                    .and_then(|child| child.try_wait().ok().flatten());
                if let Some(status) = ended {
                    let path = self
                        .directory
                        .join(format!("node{}.log", self.nodes[node].id));
                    let log = fs::read_to_string(&path).unwrap_or_default();
                    let tail: Vec<&str> = log.lines().rev().take(5).collect();
                    let tail: Vec<&str> = tail.into_iter().rev().collect();
                    bail!(
                        "node {} ended with {status}:\n{}",
                        self.nodes[node].id,
                        tail.join("\n")
                    );
                }
            }
            if Instant::now() > until {
                bail!(
                    "no leader within {patience:?}; see the logs in {}",
                    self.directory.display()
                );
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until every node that runs lets clients in, which it does once it has recovered.
    pub fn wait_until_open(&self, patience: Duration) -> Result<()> {
        let until = Instant::now() + patience;
        for node in self.nodes.iter().filter(|node| node.child.is_some()) {
            while TcpStream::connect(node.redis).is_err() {
                if Instant::now() > until {
                    bail!(
                        "node {} accepts no client at {} within {patience:?}; see the logs in {}",
                        node.id,
                        node.redis,
                        self.directory.display()
                    );
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        Ok(())
    }

    /// Lets the processes outlive this program.
    pub fn keep(mut self) {
        self.keep = true;
        for node in &mut self.nodes {
            node.child = None;
        }
    }
}

impl Drop for LocalCluster {
    fn drop(&mut self) {
        if self.keep {
            return;
        }
        for node in 0..self.nodes.len() {
            // Nothing more can be done about a process that cannot be killed.
            let _ = self.kill(node);
        }
        let _ = fs::remove_dir_all(&self.regions);
    }
}

/// `cyclone cluster start`: for scripts.
pub fn start_and_describe(directory: &Path, options: &Options) -> Result<()> {
    let mut cluster = LocalCluster::create(directory, options)?;
    cluster.end_with_us = false;
    cluster.start_all(true)?;
    let leader = cluster.wait_for_leader(Duration::from_secs(20))?;
    cluster.wait_until_open(Duration::from_secs(20))?;
    let nodes: Vec<_> = (0..cluster.nodes.len())
        .map(|node| {
            let process = &cluster.nodes[node];
            serde_json::json!({
                "id": process.id,
                "pid": cluster.pid(node),
                "redis": process.redis.to_string(),
                "packet": process.packet.to_string(),
                "leads": node == leader,
            })
        })
        .collect();
    println!(
        "{}",
        serde_json::json!({ "regions": cluster.regions, "nodes": nodes, "client_key": hex(&cluster.client_key) })
    );
    cluster.keep();
    Ok(())
}

//! Machines that are not there: network namespaces, for measuring and testing what needs real interfaces.
//!
//! ```text
//!   bridge                                                mesh
//!   machine 0    machine 1    machine 2                   machine 0 ── net2 ─── net1 ── machine 1
//!     net0         net0         net0     10.77.1.1, .2, …     └─ net3 ─── net1 ── machine 2 ─ …
//!      └──────────── br0 ────────┘       in its own           every two joined by a cable, named after
//!                                        namespace            the other's number; 10.77.1.1, .2, …
//! ```
//! Needs root and iproute2. Nothing outside these namespaces is touched; they go when the lab is dropped, or, if that
//! never happens, when the next lab is made.

use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::bench::net::Place;
use crate::bench::net::child::Role;
use crate::cluster::random_key;
use crate::config::{
    Cluster, File, Limits, MemberEntry, Metrics, Node, Reads, RedisPort, Timing, hex,
};

/// How machines are joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cabling {
    /// One interface each, on one bridge; cables can be pulled.
    Bridge,
    /// An interface for every other machine: no bridge on the way.
    Mesh,
}

/// Port of every node's packets.
const PACKET_PORT: u16 = 7101;
/// Port of every node's Redis clients.
pub const REDIS_PORT: u16 = 7001;

/// Machines on a bridge.
pub struct Lab {
    prefix: String,
    machines: usize,
    mtu: usize,
    cabling: Cabling,
    executable: PathBuf,
}

fn ip(arguments: &str) -> Result<()> {
    let output = Command::new("ip")
        .args(arguments.split_whitespace())
        .output()
        .context("cannot run ip: is iproute2 installed?")?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        bail!("ip {arguments}: {}", text.trim());
    }
    Ok(())
}

/// Namespaces of labs whose programs are gone.
fn remove_leftovers() {
    let Ok(names) = std::fs::read_dir("/run/netns") else {
        return;
    };
    for name in names
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
    {
        let pid = name
            .strip_prefix("cyclone-")
            .and_then(|rest| rest.split('-').next());
        if let Some(pid) = pid
            && pid.bytes().all(|byte| byte.is_ascii_digit())
            && !Path::new("/proc").join(pid).exists()
        {
            // Another lab may be doing the same.
            let _ = ip(&format!("netns del {name}"));
        }
    }
}

impl Lab {
    /// Whether this process may make one.
    pub fn allowed() -> bool {
        rustix::process::geteuid().is_root() && Path::new("/proc/self/ns/net").exists()
    }

    /// Machines whose packets have `mtu` bytes at most. `executable`: what runs on them.
    ///
    /// # Errors
    /// Without the right to, or without iproute2.
    pub fn new(machines: usize, mtu: usize, cabling: Cabling, executable: PathBuf) -> Result<Lab> {
        remove_leftovers();
        let tag = hex(&random_key()?[..2]);
        // Dropped, and so removed, also when the rest fails.
        let lab = Lab {
            prefix: format!("cyclone-{}-{tag}", std::process::id()),
            machines,
            mtu,
            cabling,
            executable,
        };
        for machine in 0..machines {
            let here = lab.namespace(Some(machine));
            ip(&format!("netns add {here}"))?;
            ip(&format!("-n {here} link set lo up"))?;
        }
        match cabling {
            Cabling::Bridge => lab.bridge(mtu)?,
            Cabling::Mesh => lab.mesh(mtu)?,
        }
        Ok(lab)
    }

    fn bridge(&self, mtu: usize) -> Result<()> {
        let switch = self.namespace(None);
        ip(&format!("netns add {switch}"))?;
        ip(&format!(
            "-n {switch} link add br0 mtu {mtu} type bridge mcast_snooping 0"
        ))?;
        ip(&format!("-n {switch} link set br0 up"))?;
        for machine in 0..self.machines {
            let here = self.namespace(Some(machine));
            let number = machine + 1;
            ip(&format!(
                "-n {here} link add net0 mtu {mtu} type veth peer name p{number} mtu {mtu} netns {switch}"
            ))?;
            ip(&format!("-n {switch} link set p{number} master br0"))?;
            ip(&format!("-n {switch} link set p{number} up"))?;
            ip(&format!("-n {here} addr add 10.77.1.{number}/24 dev net0"))?;
            ip(&format!("-n {here} link set net0 up"))?;
        }
        Ok(())
    }

    fn mesh(&self, mtu: usize) -> Result<()> {
        for one in 1..=self.machines {
            for other in one + 1..=self.machines {
                let (here, there) = (
                    self.namespace(Some(one - 1)),
                    self.namespace(Some(other - 1)),
                );
                ip(&format!(
                    "-n {here} link add net{other} mtu {mtu} type veth peer name net{one} mtu {mtu} netns {there}"
                ))?;
                for (space, own, peer) in [(&here, one, other), (&there, other, one)] {
                    ip(&format!(
                        "-n {space} addr add 10.77.1.{own}/32 dev net{peer}"
                    ))?;
                    ip(&format!("-n {space} link set net{peer} up"))?;
                    ip(&format!(
                        "-n {space} route add 10.77.1.{peer}/32 dev net{peer}"
                    ))?;
                }
            }
        }
        Ok(())
    }

    /// What a driver is told to reach these others by: interfaces, or for `dpdk` its ports.
    pub fn ports(
        &self,
        transport: &str,
        machine: usize,
        others: impl IntoIterator<Item = usize>,
    ) -> String {
        if transport != "dpdk" {
            return self.interfaces(machine, others);
        }
        let settings = format!("mtu={};address={}", self.mtu, self.address(machine));
        match self.cabling {
            Cabling::Bridge => format!("net_af_packet0,iface=net0;{settings}"),
            Cabling::Mesh => {
                let others = others.into_iter().filter(|other| *other != machine);
                let ports: Vec<String> = others
                    .map(|other| self.shared_memory(machine, other))
                    .collect();
                format!("{};{settings}", ports.join(";"))
            }
        }
    }

    /// One end of a cable of shared memory between two machines.
    fn shared_memory(&self, machine: usize, other: usize) -> String {
        let (low, high) = (machine.min(other), machine.max(other));
        let role = if machine == low { "server" } else { "client" };
        let socket = self.socket(low, high);
        // Several machines may share a process, where names are told apart.
        let name = 100 * machine + other;
        format!(
            "net_memif{name},role={role},id=0,socket={}",
            socket.display()
        )
    }

    fn socket(&self, low: usize, high: usize) -> PathBuf {
        std::env::temp_dir().join(format!("{}-{low}-{high}.sock", self.prefix))
    }

    /// The interfaces by which a machine reaches these others, between commas.
    pub fn interfaces(&self, machine: usize, others: impl IntoIterator<Item = usize>) -> String {
        match self.cabling {
            Cabling::Bridge => "net0".to_owned(),
            Cabling::Mesh => {
                let others = others.into_iter().filter(|other| *other != machine);
                let names: Vec<String> = others.map(|other| format!("net{}", other + 1)).collect();
                names.join(",")
            }
        }
    }

    fn namespace(&self, machine: Option<usize>) -> String {
        match machine {
            Some(number) => format!("{}-{number}", self.prefix),
            None => format!("{}-sw", self.prefix),
        }
    }

    /// How many machines there are.
    pub fn machines(&self) -> usize {
        self.machines
    }

    /// A machine's address.
    pub fn address(&self, machine: usize) -> IpAddr {
        Ipv4Addr::new(10, 77, 1, machine as u8 + 1).into()
    }

    /// This program on a machine, with these arguments; on one CPU if told.
    pub fn command(&self, machine: usize, cpu: Option<usize>, arguments: &[&str]) -> Command {
        self.command_under(machine, cpu, &[], arguments)
    }

    /// The same, run by another program.
    fn command_under(
        &self,
        machine: usize,
        cpu: Option<usize>,
        under: &[String],
        arguments: &[&str],
    ) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.namespace(Some(machine))]);
        if let Some(cpu) = cpu {
            command.args(["taskset", "-c", &cpu.to_string()]);
        }
        command.args(under).arg(&self.executable).args(arguments);
        command
    }

    /// Switches a machine's cable to the bridge off or on.
    ///
    /// # Errors
    /// When `ip` fails.
    pub fn set_cable(&self, machine: usize, plugged: bool) -> Result<()> {
        let state = if plugged { "up" } else { "down" };
        let switch = self.namespace(None);
        ip(&format!("-n {switch} link set p{} {state}", machine + 1))
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        for machine in (0..self.machines).map(Some).chain([None]) {
            // What was not made cannot be removed.
            let _ = ip(&format!("netns del {}", self.namespace(machine)));
        }
        for high in 0..self.machines {
            for low in 0..high {
                // Of programs that were killed; most are not there.
                let _ = std::fs::remove_file(self.socket(low, high));
            }
        }
    }
}

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
    /// The first one's loop in a thread that never waits; the others alternate with the load, in its thread.
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
    /// Logs that have ports of their own.
    pub fn log_ports(&self) -> u16 {
        match self.options.log_threads {
            0 => 0,
            _ => self.options.logs,
        }
    }

    /// Writes the configurations of a new cluster and starts it. The first node is the quickest to stand for election,
    /// so that it leads wherever nothing fails.
    ///
    /// # Errors
    /// When a file cannot be written or a process not started.
    pub fn start(lab: &'a Lab, directory: &Path, options: &NodeOptions) -> Result<LabCluster<'a>> {
        std::fs::create_dir_all(directory)?;
        let regions = Path::new("/dev/shm").join(format!(
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
            std::fs::write(cluster.config(node), toml::to_string(&file)?)?;
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
        let role = serde_json::to_string(&role)?;
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
        let arguments = ["bench", "net-child", &role];
        let command = self.lab.command_under(0, cpu, &under, &arguments);
        self.spawn(0, command)
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

    fn spawn(&mut self, node: usize, mut command: Command) -> Result<()> {
        let log = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.directory.join(format!("node{}.log", node + 1)))?;
        let child = command
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("cannot start a node")?;
        self.running[node] = Some(child);
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
                archive_seal_ms: crate::config::ARCHIVE_SEAL_MS,
                burst: options.burst,
                pin_cpu: options.pin.get(node).copied(),
                password: None,
                redis_listen: None,
            },
            limits: Limits::default(),
            reads: Reads::default(),
            redis: RedisPort::default(),
            metrics: Metrics::default(),
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
        let mut arguments = vec!["serve", "--config", &config, "--end-with-parent"];
        if bootstrap {
            arguments.push("--bootstrap");
        }
        let command = self.lab.command(node, None, &arguments);
        self.spawn(node, command)
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

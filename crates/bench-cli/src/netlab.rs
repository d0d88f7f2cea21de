//! Machines that are not there: network namespaces, for measuring and testing what needs real
//! interfaces.
//!
//! ```text
//!   bridge                                                mesh
//!   machine 0    machine 1    machine 2                   machine 0 ── net2 ─── net1 ── machine 1
//!     net0         net0         net0     10.77.1.1, .2, …     └─ net3 ─── net1 ── machine 2 ─ …
//!      └──────────── br0 ────────┘       in its own           every two joined by a cable, named after
//!                                        namespace            the other's number; 10.77.1.1, .2, …
//! ```
//! Needs root and iproute2. Nothing outside these namespaces is touched; they go when the lab is
//! dropped, or, if that never happens, when the next lab is made.

use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

mod cluster;

use cyclone::cluster::random_key;
use cyclone::config::hex;
use cyclone::program;

pub use cluster::{LabCluster, NodeOptions, RunAs};

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
    programs: Programs,
}

/// What runs on the machines.
#[derive(Clone, Debug)]
pub struct Programs {
    /// `cyclone`: nodes.
    pub node: PathBuf,
    /// `cyclone-bench`: load, and nodes that share a process.
    pub bench: PathBuf,
}

impl Programs {
    /// This program, and the `cyclone` that is installed with it.
    ///
    /// # Errors
    /// When there is none.
    pub fn installed() -> Result<Programs> {
        Ok(Programs {
            node: program::find(program::CYCLONE)?,
            bench: std::env::current_exe().context("own executable")?,
        })
    }
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

    /// Machines whose packets have `mtu` bytes at most.
    ///
    /// # Errors
    /// Without the right to, or without iproute2.
    pub fn new(machines: usize, mtu: usize, cabling: Cabling, programs: Programs) -> Result<Lab> {
        remove_leftovers();
        let tag = hex(&random_key()?[..2]);
        // Dropped, and so removed, also when the rest fails.
        let lab = Lab {
            prefix: format!("cyclone-{}-{tag}", std::process::id()),
            machines,
            mtu,
            cabling,
            programs,
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

    /// How a driver is configured to reach these others: interfaces, or for `dpdk` its ports.
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
        // Several machines may share a process, where names must differ.
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

    /// `cyclone-bench net-child` on a machine, restricted to one CPU if given; `net::child::start`
    /// starts it in a role.
    pub fn child(&self, machine: usize, cpu: Option<usize>) -> Command {
        self.child_under(machine, cpu, &[])
    }

    /// The same, run by another program.
    fn child_under(&self, machine: usize, cpu: Option<usize>, under: &[String]) -> Command {
        let mut command = self.on(machine, cpu);
        command.args(under).arg(&self.programs.bench);
        command.arg("net-child");
        command
    }

    /// `cyclone serve` on a machine.
    fn serve(&self, machine: usize, arguments: &[&str]) -> Command {
        let mut command = self.on(machine, None);
        command
            .arg(&self.programs.node)
            .arg("serve")
            .args(arguments);
        command
    }

    /// What runs the program that is appended on a machine.
    fn on(&self, machine: usize, cpu: Option<usize>) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.namespace(Some(machine))]);
        if let Some(cpu) = cpu {
            command.args(["taskset", "-c", &cpu.to_string()]);
        }
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

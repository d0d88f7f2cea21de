//! Two machines joined by a cable: network namespaces without names and a veth pair, gone with the
//! thread that made them and the sockets in them.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::process::Command;

/// One machine: a network namespace.
pub struct Machine(File);

/// A cable between two machines, `va` in one, `vb` in the other: 10.77.0.1 and fd77::1, 10.77.0.2
/// and fd77::2.
pub struct Cable {
    pub a: Machine,
    pub b: Machine,
}

fn own_namespace() -> File {
    File::open("/proc/thread-self/ns/net").expect("own network namespace")
}

fn fresh_namespace() -> bool {
    // SAFETY: a plain system call that concerns this thread.
    unsafe { libc::unshare(libc::CLONE_NEWNET) == 0 }
}

impl Machine {
    /// `None`, and why on standard output, where this is not allowed.
    pub fn new() -> Option<Machine> {
        if !fresh_namespace() {
            println!("skipped: network namespaces need root");
            return None;
        }
        let machine = Machine(own_namespace());
        machine.ip("link set lo up");
        Some(machine)
    }

    /// A cable from here to another machine; each end has an address of its machine's, the same on
    /// all its cables.
    pub fn connect(&self, own: (&str, u8), other: &Machine, others: (&str, u8)) {
        self.ip(&format!(
            "link add {} type veth peer name {} netns {}",
            own.0,
            others.0,
            other.path()
        ));
        for (machine, (name, number), (_, peer)) in [(self, own, others), (other, others, own)] {
            machine.ip(&format!("addr add 10.77.0.{number}/32 dev {name}"));
            machine.ip(&format!("link set {name} up"));
            machine.ip(&format!("route add 10.77.0.{peer}/32 dev {name}"));
        }
    }

    /// Where `ip` finds this namespace.
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd())
    }

    /// From now on this thread's sockets and programs are on this machine.
    pub fn enter(&self) {
        // SAFETY: a plain system call with an open descriptor.
        let rc = unsafe { libc::setns(self.0.as_raw_fd(), libc::CLONE_NEWNET) };
        assert_eq!(rc, 0, "setns: {}", std::io::Error::last_os_error());
    }

    /// Runs `ip` here; whether it succeeded.
    pub fn try_ip(&self, arguments: &str) -> bool {
        self.enter();
        let output = Command::new("ip")
            .args(arguments.split_whitespace())
            .output()
            .expect("ip");
        if !output.status.success() {
            let text = String::from_utf8_lossy(&output.stderr);
            println!("ip {arguments}: {}", text.trim());
        }
        output.status.success()
    }

    pub fn ip(&self, arguments: &str) {
        assert!(self.try_ip(arguments), "ip {arguments}");
    }
}

impl Cable {
    /// `None`, and why on standard output, where this is not allowed.
    pub fn new(mtu: usize, queues: u32) -> Option<Cable> {
        let (a, b) = (Machine::new()?, Machine::new()?);
        b.enter();
        let queues = format!("numrxqueues {queues} numtxqueues {queues}");
        if !b.try_ip(&format!(
            "link add vb mtu {mtu} {queues} type veth peer name va mtu {mtu} {queues}"
        )) {
            println!("skipped: no veth interfaces here");
            return None;
        }
        b.ip(&format!("link set va netns {}", a.path()));
        for (machine, name, number) in [(&a, "va", 1), (&b, "vb", 2)] {
            machine.ip(&format!("addr add 10.77.0.{number}/24 dev {name}"));
            machine.ip(&format!("addr add fd77::{number}/64 dev {name} nodad"));
            machine.ip(&format!("link set {name} up"));
        }
        Some(Cable { a, b })
    }
}

//! Three etcd members on this machine, synced, loaded through etcd's own client.

use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use cyclone::cluster::{any_first_port, free_ports};
use cyclone_bench::cpu::Process;
use cyclone_bench::drive::Job;
use cyclone_bench::system::{Filling, Measured, Running, Scene, Started, System};
use cyclone_bench::workload::Workload;

use super::gopeer::GoPeer;
use super::{Owned, not_installed, program, version_of};

/// etcd with its defaults.
pub struct Etcd;

impl System for Etcd {
    fn version(&self) -> String {
        version_of("etcd")
    }

    fn guarantee(&self) -> String {
        "durable on the disks of 2 of 3 members, and applied".to_owned()
    }

    fn start(&self, scene: &Scene<'_>) -> Result<Started> {
        let (Some(server), Some(load)) = (program("etcd"), program("etcdload")) else {
            return Ok(not_installed("etcd"));
        };
        let ports = free_ports(any_first_port()?, 6)?;
        let (clients, peers) = ports.split_at(3);
        let at = |port: u16| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let url = |port: u16| format!("http://{}", at(port));
        let cluster: Vec<String> = peers
            .iter()
            .enumerate()
            .map(|(n, port)| format!("m{n}={}", url(*port)))
            .collect();
        let mut members = Vec::new();
        for n in 0..3 {
            let mut command = Command::new(&server);
            command
                .args(["--name", &format!("m{n}"), "--data-dir"])
                .arg(scene.disk.join(format!("etcd{n}")))
                .args(["--listen-client-urls", &url(clients[n])])
                .args(["--advertise-client-urls", &url(clients[n])])
                .args(["--listen-peer-urls", &url(peers[n])])
                .args(["--initial-advertise-peer-urls", &url(peers[n])])
                .args(["--initial-cluster", &cluster.join(",")])
                .args(["--initial-cluster-state", "new", "--log-level", "error"]);
            members.push(Owned::start(
                &mut command,
                &scene.disk.join(format!("etcd{n}.log")),
            )?);
        }
        let until = Instant::now() + Duration::from_secs(20);
        for port in clients {
            while TcpStream::connect(at(*port)).is_err() {
                if Instant::now() > until {
                    bail!("etcd does not come up");
                }
                std::thread::sleep(Duration::from_millis(50));
            }
        }
        let endpoints: Vec<String> = clients.iter().map(|port| at(*port).to_string()).collect();
        let mut command = Command::new(load);
        // Only what matters: its retries while electing are no news.
        command.env("ETCD_CLIENT_DEBUG", "error").args([
            "-serve",
            "-endpoints",
            &endpoints.join(","),
        ]);
        let load = GoPeer::start(&mut command, &scene.memory)?;
        Ok(Started::Running(Box::new(Members { load, members })))
    }
}

struct Members {
    load: GoPeer,
    members: Vec<Owned>,
}

impl Running for Members {
    fn preload(&mut self, workload: &Workload, seed: u64, live: &mut Filling<'_>) -> Result<()> {
        self.load.preload(workload, seed, live)
    }

    fn measure(&mut self, job: &mut Job<'_>) -> Result<Measured> {
        let mut processes: Vec<Process> = self
            .members
            .iter()
            .map(|member| Process {
                role: "members".to_owned(),
                pid: member.pid(),
            })
            .collect();
        processes.push(Process {
            role: "clients".to_owned(),
            pid: self.load.pid(),
        });
        self.load.measure(job, &processes)
    }
}

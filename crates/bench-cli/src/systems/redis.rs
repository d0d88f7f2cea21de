//! Redis: a primary and a replica, both with an append-only file.

use std::net::{Ipv4Addr, SocketAddr};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use cyclone::cluster::{any_first_port, free_ports};
use cyclone_bench::cpu::Process;
use cyclone_bench::drive::{Job, Lane, Lanes, lanes};
use cyclone_bench::plan::{RedisMode, Variant};
use cyclone_bench::system::{Filling, Measured, Running, Scene, Started, System};
use cyclone_bench::workload::Workload;

use super::{Owned, not_installed, program, version_of};
use crate::wires::{Waits, WireLane, Wires};

/// A variant of it.
pub struct Redis {
    mode: RedisMode,
    pipeline: usize,
    clients: usize,
}

impl Redis {
    /// As the variant says.
    pub fn new(variant: &Variant) -> Redis {
        Redis {
            mode: variant.mode.unwrap_or(RedisMode::Always),
            pipeline: variant.pipeline.unwrap_or(1),
            clients: variant.clients.unwrap_or(1),
        }
    }
}

impl System for Redis {
    fn version(&self) -> String {
        version_of("redis-server")
    }

    fn guarantee(&self) -> String {
        match self.mode {
            RedisMode::Always => {
                "durable on the primary's disk and received by one replica (AOF always, WAIT 1); a failover may still choose a replica without it"
            }
            RedisMode::Everysec => {
                "weaker: in the primary's memory; synced within a second, replicated sometime (AOF everysec, no WAIT)"
            }
        }
        .to_owned()
    }

    fn start(&self, scene: &Scene<'_>) -> Result<Started> {
        let Some(server) = program("redis-server") else {
            return Ok(not_installed("Redis"));
        };
        if scene.workload.mix.scan > 0.0 {
            return Ok(Started::Skipped {
                why: "keys lie in no order: there are no range scans".into(),
                install: String::new(),
            });
        }
        let ports = free_ports(any_first_port()?, 2)?;
        let sync = match self.mode {
            RedisMode::Always => "always",
            RedisMode::Everysec => "everysec",
        };
        let mut servers = Vec::new();
        for (number, port) in ports.iter().enumerate() {
            let directory = scene.disk.join(format!("redis{number}"));
            std::fs::create_dir_all(&directory)?;
            let mut command = Command::new(&server);
            command
                .args(["--port", &port.to_string(), "--bind", "127.0.0.1"])
                .args(["--appendonly", "yes", "--appendfsync", sync])
                .args(["--save", "", "--daemonize", "no", "--dir"])
                .arg(&directory);
            if number > 0 {
                command.args(["--replicaof", "127.0.0.1", &ports[0].to_string()]);
            }
            servers.push(Owned::start(&mut command, &directory.join("log"))?);
        }
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, ports[0]));
        await_replica(address)?;
        Ok(Started::Running(Box::new(Servers {
            servers,
            wires: Wires {
                address,
                pipeline: self.pipeline,
                waits: match self.mode {
                    RedisMode::Always => Waits::OneReplica,
                    RedisMode::Everysec => Waits::Never,
                },
                greeting: Vec::new(),
            },
            clients: self.clients,
        })))
    }
}

/// Waits until the replica has all that the primary has.
fn await_replica(primary: SocketAddr) -> Result<()> {
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        let info = cyclone::resp::info(primary, Duration::from_secs(1)).unwrap_or_default();
        if info
            .get("slave0")
            .is_some_and(|replica| replica.contains("state=online"))
        {
            return Ok(());
        }
        if Instant::now() > until {
            bail!("Redis's replica does not come up");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

struct Servers {
    /// The primary first.
    servers: Vec<Owned>,
    wires: Wires,
    clients: usize,
}

impl Lanes for Servers {
    fn lanes(&self, inflight: usize) -> usize {
        self.clients.min(inflight)
    }

    fn open(&self, _number: usize, share: usize) -> Result<Box<dyn Lane>> {
        Ok(Box::new(WireLane::open(&self.wires, share)?))
    }
}

impl Running for Servers {
    fn preload(&mut self, workload: &Workload, seed: u64, live: &mut Filling<'_>) -> Result<()> {
        lanes::preload(self, workload, seed, 256, live)
    }

    fn measure(&mut self, job: &mut Job<'_>) -> Result<Measured> {
        let roles = ["leader", "followers"];
        let processes: Vec<Process> = self
            .servers
            .iter()
            .zip(roles)
            .map(|(server, role)| Process {
                role: role.to_owned(),
                pid: server.pid(),
            })
            .collect();
        lanes::run(self, job, &processes)
    }
}

//! Servers of the log-structured store, reached over the Redis protocol as cluster clients do it.

use anyhow::Result;
use cyclone::pmkv::local::{Servers, Shape};
use cyclone::program;
use cyclone_bench::cpu::Process;
use cyclone_bench::drive::{Job, Lane, Lanes, lanes};
use cyclone_bench::plan::Variant;
use cyclone_bench::system::{Filling, Measured, Running, Scene, Started, System};
use cyclone_bench::workload::Workload;

use crate::wires::ShardLane;

/// A variant of it.
pub struct Pmkv {
    shape: Shape,
    pipeline: usize,
    clients: usize,
}

impl Pmkv {
    /// As the variant says.
    pub fn new(variant: &Variant) -> Pmkv {
        let copies = variant.replicas.unwrap_or(3);
        let region_mib = variant.region_mib.unwrap_or(256);
        Pmkv {
            shape: Shape {
                servers: variant.servers.unwrap_or(copies as u32),
                copies,
                replication: variant
                    .replication
                    .clone()
                    .unwrap_or_else(|| "rowan".into()),
                memory_bytes: region_mib << 20,
                lease_ms: None,
                executable: None,
            },
            pipeline: variant.pipeline.unwrap_or(1),
            clients: variant.clients.unwrap_or(1),
        }
    }
}

impl System for Pmkv {
    fn guarantee(&self) -> String {
        let Shape {
            servers, copies, ..
        } = self.shape;
        format!(
            "durable in the memories of all {copies} replicas of its shard, of {servers} servers"
        )
    }

    fn start(&self, scene: &Scene<'_>) -> Result<Started> {
        if scene.workload.mix.scan > 0.0 {
            return Ok(Started::Skipped {
                why: "keys lie in the order of their hashes: there are no range scans".into(),
                install: String::new(),
            });
        }
        let shape = Shape {
            executable: Some(program::find(program::CYCLONE)?),
            ..self.shape.clone()
        };
        let mut servers = Servers::create(&scene.disk, &shape)?;
        for id in servers.ids() {
            servers.start(id)?;
        }
        servers.wait_until_served(0)?;
        Ok(Started::Running(Box::new(Cluster {
            servers,
            pipeline: self.pipeline,
            clients: self.clients,
        })))
    }
}

struct Cluster {
    servers: Servers,
    pipeline: usize,
    clients: usize,
}

impl Lanes for Cluster {
    fn lanes(&self, inflight: usize) -> usize {
        self.clients.min(inflight)
    }

    fn open(&self, _number: usize, share: usize) -> Result<Box<dyn Lane>> {
        let addresses = self.servers.addresses();
        Ok(Box::new(ShardLane::open(&addresses, self.pipeline, share)?))
    }
}

impl Running for Cluster {
    fn preload(&mut self, workload: &Workload, seed: u64, live: &mut Filling<'_>) -> Result<()> {
        lanes::preload(self, workload, seed, 256, live)
    }

    fn measure(&mut self, job: &mut Job<'_>) -> Result<Measured> {
        let processes: Vec<Process> = self
            .servers
            .ids()
            .filter_map(|id| {
                Some(Process {
                    role: "servers".to_owned(),
                    pid: self.servers.pid(id)?,
                })
            })
            .collect();
        lanes::run(self, job, &processes)
    }
}

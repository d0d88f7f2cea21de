//! Cyclone between network namespaces, with the driver that a variant names: what `cyclone bench
//! net` compares, as a system of plans. Every measurement has separate machines and nodes.

use std::io::Read;
use std::process::{Child, Stdio};
use std::sync::atomic::Ordering;
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use cyclone::config::hex;
use cyclone_bench::cpu::Process;
use cyclone_bench::drive::Job;
use cyclone_bench::plan::Variant;
use cyclone_bench::system::{Filling, Measured, Running, Scene, Started, System};
use cyclone_bench::workload::{Sizes, Workload};

use super::lines_of;
use crate::net::child::{self, Reach, Role};
use crate::net::drive::{Drive, Said};
use crate::netlab::{Cabling, Lab, LabCluster, NodeOptions, Programs, RunAs};

/// A variant of it.
pub struct Spaces {
    options: NodeOptions,
}

/// Values above this need jumbo frames.
const STANDARD_VALUE: u32 = 1400;

impl Spaces {
    /// As the variant says.
    pub fn new(variant: &Variant) -> Spaces {
        let replicas = variant.replicas.unwrap_or(3);
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        Spaces {
            options: NodeOptions {
                replicas,
                transport: variant.transport.clone().unwrap_or_else(|| "udp".into()),
                burst: variant.burst.unwrap_or(32),
                engine: variant.engine.clone().unwrap_or_else(|| "echo".into()),
                polling: variant.polling.clone().unwrap_or_else(|| "adaptive".into()),
                // The leader alone on one CPU, as `bench net` has it.
                pin: match cpus {
                    1 => Vec::new(),
                    _ => (0..replicas).map(|node| usize::from(node > 0)).collect(),
                },
                nvm_bytes: variant.region_mib.unwrap_or(64) << 20,
                regions: None,
                logs: variant.logs.unwrap_or(1),
                log_threads: variant.log_threads.unwrap_or(0),
                default_timing: false,
                run: RunAs::Nodes,
            },
        }
    }
}

impl System for Spaces {
    fn guarantee(&self) -> String {
        let replicas = self.options.replicas;
        let store = match self.options.engine.as_str() {
            "echo" => "the store does nothing",
            _ => "applied",
        };
        format!(
            "durable in the log regions of {} of {replicas} replicas; {store}",
            replicas / 2 + 1
        )
    }

    fn start(&self, scene: &Scene<'_>) -> Result<Started> {
        let skipped = |why: &str| {
            Ok(Started::Skipped {
                why: why.to_owned(),
                install: String::new(),
            })
        };
        if !Lab::allowed() {
            return skipped("it makes network namespaces, which needs root");
        }
        if scene.workload.mix.read > 0.0 || scene.workload.batch > 1 {
            return skipped("only single writes are measured between namespaces");
        }
        Ok(Started::Running(Box::new(Between {
            options: self.options.clone(),
            programs: Programs::installed()?,
            directory: scene.disk.clone(),
        })))
    }
}

struct Between {
    options: NodeOptions,
    programs: Programs,
    directory: std::path::PathBuf,
}

impl Running for Between {
    fn preload(&mut self, _: &Workload, _: u64, _: &mut Filling<'_>) -> Result<()> {
        bail!("workload.preload: nothing is kept between namespaces; set it to false")
    }

    fn measure(&mut self, job: &mut Job<'_>) -> Result<Measured> {
        let large = matches!(job.workload.sizes, Sizes::Fixed(bytes) if bytes > STANDARD_VALUE);
        let mtu = if large { 9000 } else { 1500 };
        let replicas = self.options.replicas;
        let lab = Lab::new(replicas + 1, mtu, Cabling::Mesh, self.programs.clone())?;
        let directory = self.directory.join("nodes");
        let _ = std::fs::remove_dir_all(&directory);
        let cluster = LabCluster::start(&lab, &directory, &self.options)?;
        let processes = (0..replicas).filter_map(|node| {
            Some(Process {
                role: if node == 0 { "leader" } else { "followers" }.to_owned(),
                pid: cluster.pid(node)?,
            })
        });
        let role = Role::Drive(Drive {
            reach: Reach {
                nodes: cluster.nodes.clone(),
                client_key: hex(&cluster.client_key),
                transport: self.options.transport.clone(),
                interface: lab.interfaces(replicas, 0..replicas),
                burst: self.options.burst,
                pack: self.options.burst,
                spin: false,
                log_ports: cluster.log_ports(),
            },
            workload: job.workload.clone(),
            pace: job.pace,
            inflight: job.inflight,
            warm_up_ms: job.warm_up.as_millis() as u64,
            measure_ms: job.measure.as_millis() as u64,
            drain_ms: job.drain.as_millis() as u64,
            seed: job.seed,
            processes: processes.collect(),
        });
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let mut command = lab.child(replicas, (cpus > 1).then_some(1));
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = child::start(&mut command, &role)?;
        let seen = attend(&mut child, job);
        if seen.is_err() {
            // It may still be at work.
            let _ = child.kill();
        }
        child.wait()?;
        seen.map_err(|error| {
            let words: Vec<String> = (0..replicas).map(|node| cluster.log(node)).collect();
            anyhow!("the load: {error:#}; the nodes say:\n{}", words.join("\n"))
        })
    }
}

/// Listens to the load until it has said all.
fn attend(child: &mut Child, job: &mut Job<'_>) -> Result<Measured> {
    let (Some(stdout), Some(mut stderr)) = (child.stdout.take(), child.stderr.take()) else {
        bail!("it has no output");
    };
    let said = lines_of(stdout);
    loop {
        let line = match said.recv_timeout(Duration::from_millis(100)) {
            Ok(line) => line,
            Err(RecvTimeoutError::Timeout) if job.stop.load(Ordering::Relaxed) => bail!("stopped"),
            Err(RecvTimeoutError::Timeout) => continue,
            Err(RecvTimeoutError::Disconnected) => {
                let mut words = String::new();
                stderr.read_to_string(&mut words)?;
                bail!("{}", words.trim());
            }
        };
        match serde_json::from_str(&line).with_context(|| format!("it says {line:?}"))? {
            Said::Live(done, ms) => (job.live)(done, Duration::from_millis(ms)),
            Said::Measured(counted, usage) => return counted.measured(job.measure, usage),
        }
    }
}

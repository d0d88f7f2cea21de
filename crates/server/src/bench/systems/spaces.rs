//! Cyclone between network namespaces, with the driver that a variant names: what `cyclone bench net` compares, as a system of
//! plans. Every measurement has machines and nodes of its own.

use std::process::Stdio;

use anyhow::{Context, Result, bail};
use cyclone_bench::cpu::{Process, Usage};
use cyclone_bench::drive::{Job, Pace};
use cyclone_bench::measure::histogram;
use cyclone_bench::plan::Variant;
use cyclone_bench::system::{Measured, Running, Scene, Started, System};
use cyclone_bench::workload::{Sizes, Workload};

use crate::bench::net::child::{Loaded, Reach, Role};
use crate::config::hex;
use crate::netlab::{Cabling, Lab, LabCluster, NodeOptions, RunAs};

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
                logs: 1,
                run: RunAs::Nodes,
            },
        }
    }
}

impl System for Spaces {
    fn guarantee(&self) -> String {
        let replicas = self.options.replicas;
        format!(
            "durable in the log regions of {} of {replicas} replicas; the store does nothing",
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
            executable: std::env::current_exe().context("own executable")?,
            directory: scene.disk.clone(),
        })))
    }
}

struct Between {
    options: NodeOptions,
    executable: std::path::PathBuf,
    directory: std::path::PathBuf,
}

impl Running for Between {
    fn preload(&mut self, _: &Workload, _: u64, _: &mut dyn FnMut(u64)) -> Result<()> {
        bail!("workload.preload: nothing is kept between namespaces; set it to false")
    }

    fn measure(&mut self, job: &mut Job<'_>) -> Result<Measured> {
        let Sizes::Fixed(value_bytes) = job.workload.sizes else {
            bail!("workload.value: only fixed sizes are measured between namespaces");
        };
        if job.pace != Pace::Closed {
            bail!("load.rate: only closed loops are measured between namespaces");
        }
        let mtu = if value_bytes > STANDARD_VALUE {
            9000
        } else {
            1500
        };
        let replicas = self.options.replicas;
        let lab = Lab::new(replicas + 1, mtu, Cabling::Mesh, self.executable.clone())?;
        let directory = self.directory.join("nodes");
        let _ = std::fs::remove_dir_all(&directory);
        let cluster = LabCluster::start(&lab, &directory, &self.options)?;
        let role = Role::Load {
            reach: Reach {
                nodes: cluster.nodes.clone(),
                client_key: hex(&cluster.client_key),
                transport: self.options.transport.clone(),
                interface: lab.interfaces(replicas, 0..replicas),
                burst: self.options.burst,
                pack: self.options.burst,
                spin: false,
            },
            beside: Vec::new(),
            value_bytes: value_bytes as usize,
            inflight: job.inflight,
            warm_up_ms: job.warm_up.as_millis() as u64,
            measure_ms: job.measure.as_millis() as u64,
            seed: job.seed,
        };
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let child = lab
            .command(
                replicas,
                (cpus > 1).then_some(1),
                &["bench", "net-child", &serde_json::to_string(&role)?],
            )
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("cannot start the load")?;
        let mut processes: Vec<Process> = (0..replicas)
            .filter_map(|node| {
                Some(Process {
                    role: if node == 0 { "leader" } else { "followers" }.to_owned(),
                    pid: cluster.pid(node)?,
                })
            })
            .collect();
        processes.push(Process {
            role: "clients".to_owned(),
            pid: child.id(),
        });
        let (usage, output) = watched(child, job, &processes)?;
        if !output.status.success() {
            let words: Vec<String> = (0..replicas).map(|node| cluster.log(node)).collect();
            bail!(
                "the load: {}; the nodes say:\n{}",
                String::from_utf8_lossy(&output.stderr).trim(),
                words.join("\n")
            );
        }
        let seen: Loaded = serde_json::from_slice(&output.stdout).context("the load's answer")?;
        // Only the percentiles come over: they are recorded so that they read back as such.
        let mut latency_ns = histogram()?;
        latency_ns.record_n((seen.p50_us * 1000.0) as u64, 98)?;
        latency_ns.record_n((seen.p99_us * 1000.0) as u64, 2)?;
        Ok(Measured {
            operations: (seen.ops_s * job.measure.as_secs_f64()).round() as u64,
            refused: 0,
            unfinished: 0,
            elapsed: job.measure,
            latency_ns,
            usage,
            ends_ns: Vec::new(),
        })
    }
}

/// Waits for the load; answers the CPU time of as long a time as is measured, in the midst of it.
fn watched(
    mut child: std::process::Child,
    job: &mut Job<'_>,
    processes: &[Process],
) -> Result<(Usage, std::process::Output)> {
    let begun = std::time::Instant::now();
    let mut before = None;
    let mut usage = None;
    while child.try_wait()?.is_none() {
        if job.stop.load(std::sync::atomic::Ordering::Relaxed) {
            child.kill()?;
            child.wait()?;
            bail!("stopped");
        }
        let elapsed = begun.elapsed();
        // It begins when there is a leader, which takes a few hundred milliseconds.
        if before.is_none() && elapsed >= job.warm_up {
            before = Some(Usage::now(processes));
        }
        if let (Some(before), true) = (&before, elapsed >= job.warm_up + job.measure) {
            usage.get_or_insert_with(|| Usage::now(processes).since(before));
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    Ok((usage.unwrap_or_default(), child.wait_with_output()?))
}

//! Cyclone: real nodes as separate processes.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use cyclone::cluster::{LocalCluster, Options, any_first_port, check};
use cyclone::config::{File, Reads, parse_security};
use cyclone::program;
use cyclone_bench::children::{pin, unpin};
use cyclone_bench::cpu::Process;
use cyclone_bench::drive::{Job, Lane, Lanes, lanes};
use cyclone_bench::plan::{Client, Store, Variant};
use cyclone_bench::system::{Assassin, Filling, Measured, Running, Scene, Started, System};
use cyclone_bench::workload::Workload;
use cyclone_wire::client::ReadMode;

use super::embedded::Inside;
use super::native::{self, NativeLane, TwoPhase};
use crate::wires::{Waits, WireLane, Wires};

/// A variant of it.
pub struct Cyclone {
    variant: Variant,
    options: Options,
    mode: ReadMode,
}

/// How long the others wait where the first node is to lead.
const OTHERS_ELECTION_MS: u64 = 400;
/// How long a new cluster may take to elect.
const PATIENCE: Duration = Duration::from_secs(20);

impl Cyclone {
    /// As the variant says.
    ///
    /// # Errors
    /// When it names a way of reading that there is not, or nodes would refuse it.
    pub fn new(variant: &Variant) -> Result<Cyclone> {
        let reads = Reads {
            mode: variant.reads.clone().unwrap_or_else(|| "index".into()),
            ..Reads::default()
        };
        let defaults = Options::default();
        let made = Cyclone {
            mode: reads.mode()?,
            options: Options {
                replicas: variant.replicas.unwrap_or(defaults.replicas),
                engine: variant.engine.clone().unwrap_or(defaults.engine),
                nvm_bytes: variant.region_mib.unwrap_or(128) << 20,
                transport: variant.transport.clone().unwrap_or(defaults.transport),
                security: variant.security.clone().unwrap_or(defaults.security),
                polling: variant.polling.clone().unwrap_or(defaults.polling),
                logs: variant.logs.unwrap_or(defaults.logs),
                log_threads: match variant.client {
                    // As many as there are logs, unless it says otherwise.
                    Some(Client::Driver) => variant.log_threads.or(variant.logs).unwrap_or(1),
                    _ => variant.log_threads.unwrap_or(defaults.log_threads),
                },
                burst: variant.burst.unwrap_or(defaults.burst),
                lease_reads: variant.reads.as_deref() == Some("lease"),
                durability: variant.durability.clone(),
                election_ms: variant.election_ms,
                pin: match variant.pinned.unwrap_or(false) && cpus() > 1 {
                    true => (0..variant.replicas.unwrap_or(defaults.replicas))
                        .map(|node| usize::from(node > 0))
                        .collect(),
                    false => Vec::new(),
                },
                first_port: any_first_port()?,
                ..Options::default()
            },
            variant: variant.clone(),
        };
        // Before anything is started, not after minutes of filling.
        check(&made.options)?;
        Ok(made)
    }

    fn client(&self) -> Client {
        self.variant.client.unwrap_or_default()
    }
}

impl System for Cyclone {
    fn guarantee(&self) -> String {
        let level = match self.options.durability.as_deref() {
            Some("flash") => "on the flash",
            _ => "in the log regions",
        };
        let replicas = self.options.replicas;
        let place = format!(
            "durable {level} of {} of {replicas} replicas",
            replicas / 2 + 1
        );
        match self.options.engine.as_str() {
            "echo" => format!("{place}; the store does nothing"),
            _ => format!("{place}, and applied"),
        }
    }

    fn start(&self, scene: &Scene<'_>) -> Result<Started> {
        if scene.workload.mix.scan > 0.0 {
            return Ok(Started::Skipped {
                why: "keys lie in the order of slot and hash: there are no range scans".into(),
                install: String::new(),
            });
        }
        let directory = match self.variant.store.unwrap_or_default() {
            Store::Disk => &scene.disk,
            Store::Memory => &scene.memory,
        };
        // The second level is for a disk, wherever the store is.
        let options = Options {
            flash_directory: Some(scene.disk.join("second-level")),
            executable: Some(program::find(program::CYCLONE)?),
            ..self.options.clone()
        };
        let cluster = LocalCluster::create(directory, &options)?;
        let running: Box<dyn Running> = match self.client() {
            Client::Embedded => Box::new(Inside::start(cluster, self.mode, false)?),
            Client::Driver => Box::new(Inside::start(cluster, self.mode, true)?),
            _ => Box::new(Nodes::start(self, cluster)?),
        };
        Ok(Started::Running(running))
    }
}

/// Running nodes.
struct Nodes {
    variant: Variant,
    options: Options,
    mode: ReadMode,
    cluster: Arc<Mutex<LocalCluster>>,
    killed: Arc<Mutex<Option<usize>>>,
    leader: usize,
}

impl Nodes {
    fn start(system: &Cyclone, mut cluster: LocalCluster) -> Result<Nodes> {
        if !system.options.pin.is_empty() {
            others_wait_longer(&cluster)?;
        }
        cluster.start_all(true)?;
        let leader = cluster.wait_for_leader(PATIENCE)?;
        Ok(Nodes {
            variant: system.variant.clone(),
            options: system.options.clone(),
            mode: system.mode,
            cluster: Arc::new(Mutex::new(cluster)),
            killed: Arc::new(Mutex::new(None)),
            leader,
        })
    }

    fn processes(&self) -> Vec<Process> {
        let cluster = self.cluster.lock().unwrap_or_else(PoisonError::into_inner);
        // The leader first.
        let others = (0..cluster.nodes.len()).filter(|node| *node != self.leader);
        std::iter::once(self.leader)
            .chain(others)
            .filter_map(|node| {
                let role = if node == self.leader {
                    "leader"
                } else {
                    "followers"
                };
                Some(Process {
                    role: role.to_owned(),
                    pid: cluster.pid(node)?,
                })
            })
            .collect()
    }
}

impl Lanes for Nodes {
    fn lanes(&self, inflight: usize) -> usize {
        self.variant.clients.unwrap_or(1).min(inflight)
    }

    fn open(&self, _number: usize, share: usize) -> Result<Box<dyn Lane>> {
        let cluster = self.cluster.lock().unwrap_or_else(PoisonError::into_inner);
        if self.variant.client == Some(Client::Resp) {
            let wires = Wires {
                address: cluster.nodes[self.leader].redis,
                pipeline: self.variant.pipeline.unwrap_or(1),
                waits: Waits::Never,
                greeting: match self.variant.reads.as_deref() {
                    None => Vec::new(),
                    Some(mode) => vec![b"CLIENT".to_vec(), b"READMODE".to_vec(), mode.into()],
                },
            };
            return Ok(Box::new(WireLane::open(&wires, share)?));
        }
        let client = native::connect(
            &cluster,
            self.options.log_ports(),
            &self.options.transport,
            parse_security(&self.options.security)?,
            self.options.burst,
            share,
        )?;
        Ok(match self.variant.two_phase {
            Some(true) => Box::new(TwoPhase::new(client)),
            _ => Box::new(NativeLane::new(client, self.mode)),
        })
    }

    fn place(&self, key: &[u8]) -> usize {
        usize::from(cyclone_wire::slot::slot(key) % self.options.logs.max(1))
    }
}

impl Running for Nodes {
    fn preload(&mut self, workload: &Workload, seed: u64, live: &mut Filling<'_>) -> Result<()> {
        // Plain writes, also where a variant commits in two phases.
        let two_phase = self.variant.two_phase.take();
        let filled = lanes::preload(self, workload, seed, 256, live);
        self.variant.two_phase = two_phase;
        filled
    }

    fn measure(&mut self, job: &mut Job<'_>) -> Result<Measured> {
        {
            // It may have moved since.
            let mut cluster = self.cluster.lock().unwrap_or_else(PoisonError::into_inner);
            self.leader = cluster.wait_for_leader(PATIENCE)?;
        }
        let processes = self.processes();
        let pinned = !self.options.pin.is_empty();
        if pinned && self.leader != 0 {
            bail!("the leader is to be the first node, which has a separate CPU");
        }
        // The threads of the load inherit it.
        let _on_one = pinned.then(|| OnCpu::new(1));
        lanes::run(self, job, &processes)
    }

    fn assassin(&self) -> Option<Assassin> {
        let cluster = Arc::clone(&self.cluster);
        let killed = Arc::clone(&self.killed);
        let leader = self.leader;
        Some(Box::new(move || {
            let mut cluster = cluster.lock().unwrap_or_else(PoisonError::into_inner);
            // The leader at the beginning of the measurement. Asking anew would take time, and it
            // seldom changes.
            let victim = match cluster.is_running(leader) {
                true => leader,
                false => cluster.leader().context("no node leads")?,
            };
            cluster.kill(victim)?;
            *killed.lock().unwrap_or_else(PoisonError::into_inner) = Some(victim);
            Ok(())
        }))
    }

    fn revive(&mut self) -> Result<()> {
        let mut cluster = self.cluster.lock().unwrap_or_else(PoisonError::into_inner);
        let victim = self
            .killed
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        let Some(victim) = victim else {
            return Ok(());
        };
        cluster.start(victim, false)?;
        self.leader = cluster.wait_for_leader(PATIENCE)?;
        caught_up(&cluster, self.leader, self.options.logs)
    }
}

/// Waits until every node has applied what the leader had, in every log.
fn caught_up(cluster: &LocalCluster, leader: usize, logs: u16) -> Result<()> {
    // There are no writes meanwhile: only when all logs are there does the sum reach the leader's.
    let applied = |node: usize| -> Option<u64> {
        let info =
            cyclone::resp::info(cluster.nodes[node].redis, Duration::from_millis(500)).ok()?;
        let of = |log: u16| -> Option<u64> {
            info.get(&format!("cyclone_log{log}_applied"))?.parse().ok()
        };
        (0..logs).map(of).sum()
    };
    let goal = applied(leader).context("the leader does not say what it has applied")?;
    let until = std::time::Instant::now() + PATIENCE;
    for node in 0..cluster.nodes.len() {
        while applied(node).is_none_or(|index| index < goal) {
            if std::time::Instant::now() > until {
                bail!("node {} does not catch up", cluster.nodes[node].id);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    Ok(())
}

fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The other nodes wait longer before they stand for election, so that the first one leads.
pub(super) fn others_wait_longer(cluster: &LocalCluster) -> Result<()> {
    for node in 1..cluster.nodes.len() {
        let path = config_of(cluster, node);
        let mut file = File::read(&path)?;
        file.timing.election_ms = OTHERS_ELECTION_MS;
        std::fs::write(&path, toml::to_string(&file)?)?;
    }
    Ok(())
}

/// Keeps this thread, and those that it starts, on a CPU.
struct OnCpu;

impl OnCpu {
    fn new(cpu: usize) -> OnCpu {
        pin(cpu);
        OnCpu
    }
}

impl Drop for OnCpu {
    fn drop(&mut self) {
        unpin();
    }
}

/// Where a node's configuration lies.
pub(super) fn config_of(cluster: &LocalCluster, node: usize) -> PathBuf {
    cluster.nodes[node].config.clone()
}

//! `cyclone bench net`: replicated writes between network namespaces, driver by driver: TCP, UDP,
//! AF_XDP, without and with bursts. //= cyclone §6.1
//!
//! ```text
//! pinned     driver against driver: all replicas in one thread, the client in another, both never wait
//! steps      latency against throughput, step by step       fig. 8
//! replicas   one, three, five                               fig. 9
//! payload    0 to 1400 bytes, and 8000 in jumbo frames      fig. 10
//! hop        one way of one datagram, by driver
//! polling    how loops wait: latency, and what idleness costs
//! instructions  of one write, by stage (callgrind); only when asked for
//! ```
//! The store echoes. But for `pinned` the leader runs on CPU 0, followers and the client share the
//! others: only the proportions mean anything, and only on a machine with nothing else to do.

mod bare;
pub mod child;
pub mod drive;
mod figures;
mod hop;
mod host;
mod instructions;
mod pinned;
mod polling;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail};
use cyclone::config::{self, hex};
use cyclone_bench::cpu::{Meter, Process, Usage};
use cyclone_bench::noise::{Noise, STOLEN};
use cyclone_bench::output::{Common, Report};
use cyclone_bench::table::{Table, rounded};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use self::child::{Loaded, Reach, Role};
use crate::netlab::{Cabling, Lab, LabCluster, NodeOptions, Programs, RunAs};

/// CPU of the leader, and of everything else.
const LEADER_CPU: usize = 0;
const OTHERS_CPU: usize = 1;
/// Longest packets; and jumbo frames, for the payload that needs them.
const MTU: usize = 1500;
const JUMBO_MTU: usize = 9000;

/// Where a node lives that shares its process with others.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Place {
    /// Its network namespace, by name.
    pub namespace: String,
    /// Its configuration's file.
    pub config: PathBuf,
}

/// A new node's configuration.
fn config_of(place: &Place) -> Result<cyclone_replica::Config> {
    config::File::read(&place.config)?.to_config(true)
}

/// One way of carrying packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// In the legend.
    pub name: &'static str,
    /// `udp`, `tcp`, `xdp` or `dpdk`.
    pub transport: &'static str,
    /// Commands per entry and datagrams per call.
    pub burst: usize,
    /// Requests per message of the client.
    pub pack: usize,
    /// Physical logs.
    pub logs: u16,
    /// Threads of each node that run a loop for each log; one loop for all if 0.
    pub log_threads: u16,
}

const fn step(name: &'static str, transport: &'static str, burst: usize) -> Step {
    Step {
        name,
        transport,
        burst,
        pack: burst,
        logs: 1,
        log_threads: 0,
    }
}

/// The steps of fig. 8.
pub const STEPS: [Step; 7] = [
    step("TCP", "tcp", 1),
    step("UDP", "udp", 1),
    step("UDP + bursts", "udp", 32),
    step("AF_XDP", "xdp", 1),
    step("AF_XDP + bursts", "xdp", 32),
    Step {
        logs: 4,
        ..step("AF_XDP + bursts, 4 logs", "xdp", 32)
    },
    Step {
        logs: 4,
        log_threads: 4,
        ..step("AF_XDP + bursts, 4 logs, a loop each", "xdp", 32)
    },
];

/// What can be measured alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// One way of one datagram.
    Hop,
    /// Driver against driver, on a CPU for the replicas and one for the client.
    Pinned,
    /// Fig. 8.
    Steps,
    /// Fig. 9.
    Replicas,
    /// How loops wait.
    Polling,
    /// Fig. 10.
    Payload,
    /// Instructions per write by stage, under callgrind; only when asked for.
    Instructions,
}

/// DPDK over shared memory between each two machines, in programs that have it.
const DPDK_STEPS: [Step; 2] = [
    step("DPDK (memif)", "dpdk", 1),
    step("DPDK (memif) + bursts", "dpdk", 32),
];

/// How the load waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Waiting {
    /// It looks again for a little while others run, then it blocks.
    Blocks,
    /// It only spins.
    Never,
    /// As `Blocks`, for long.
    Counting,
}

/// What of it is to be run.
#[derive(Clone, Debug, Default)]
pub struct Choice {
    /// Parts; all if there are none.
    pub part: Vec<Part>,
    /// Part of drivers' names.
    pub only: String,
}

impl Choice {
    /// Whether a driver has the part of a name that is given.
    fn check(&self) -> Result<()> {
        let names: BTreeSet<&str> = steps().chain(pinned::drivers()).map(|it| it.name).collect();
        if !names.iter().any(|name| name.contains(&self.only)) {
            let names: Vec<&str> = names.into_iter().collect();
            bail!(
                "--only {:?}: no driver has such a name: there are {}",
                self.only,
                names.join("; ")
            );
        }
        Ok(())
    }
}

/// All steps that this program can take.
fn steps() -> impl Iterator<Item = Step> + Clone {
    let dpdk = DPDK_STEPS.into_iter().filter(|_| cfg!(feature = "dpdk"));
    STEPS.into_iter().chain(dpdk)
}

/// One measured point.
#[derive(Clone, Debug)]
pub struct Point {
    step: Step,
    replicas: usize,
    value_bytes: usize,
    inflight: usize,
    seen: Loaded,
}

impl Point {
    fn name(&self) -> String {
        format!(
            "{}, {} replicas, {} B, {} in flight",
            self.step.name, self.replicas, self.value_bytes, self.inflight
        )
    }
}

/// What is drawn.
#[derive(Default)]
struct Measured {
    steps: Vec<Point>,
    replicas: Vec<Point>,
    /// In packets of [`MTU`] and of [`JUMBO_MTU`].
    payload: [Vec<Point>; 2],
    /// By driver, operations in flight and round.
    pinned: Vec<Point>,
}

/// What a run is made of.
struct Run<'a> {
    common: &'a Common,
    choice: &'a Choice,
    stop: &'a AtomicBool,
    directory: PathBuf,
    report: Report,
    noise: Noise,
}

/// Runs all of it.
///
/// # Errors
/// Without root, or when a process fails.
pub fn run(common: &Common, choice: &Choice, stop: &AtomicBool) -> Result<()> {
    choice.check()?;
    if !Lab::allowed() {
        bail!("cyclone bench net makes network namespaces, which needs root");
    }
    let directory = std::env::temp_dir().join(format!("cyclone-net-{}", std::process::id()));
    let mut run = Run {
        common,
        choice,
        stop,
        directory: directory.clone(),
        report: Report::new("net", common)?,
        noise: Noise::default(),
    };
    let outcome = run.all();
    let _ = std::fs::remove_dir_all(directory);
    outcome
}

impl Run<'_> {
    fn all(&mut self) -> Result<()> {
        let programs = Programs::installed()?;
        let mut measured = Measured::default();
        let lab = Lab::new(6, MTU, Cabling::Mesh, programs.clone())?;
        let hops = match self.wants(Part::Hop) || self.wants(Part::Pinned) {
            true => self.hops(&lab)?,
            false => Vec::new(),
        };
        if self.choice.part.contains(&Part::Instructions) {
            self.instructions(&lab)?;
        }
        if self.wants(Part::Pinned) {
            let spinning = hops.iter().filter(|(_, block, _)| !block);
            let spinning = spinning.map(|(name, _, pinged)| (*name, pinged.hop_p50_us));
            let spinning: Vec<(&str, f64)> = spinning.collect();
            measured.pinned = self.pinned(&lab, &spinning)?;
        }
        measured.steps = self.part(Part::Steps, |run| run.steps(&lab))?;
        measured.replicas = self.part(Part::Replicas, |run| run.replicas(&lab))?;
        let polling = self.part(Part::Polling, |run| run.polling(&lab))?;
        let sizes: &[usize] = match self.common.quick {
            true => &[0, 1400],
            false => &[0, 64, 256, 512, 1024, 1400],
        };
        measured.payload[0] = self.part(Part::Payload, |run| run.payload(&lab, sizes))?;
        drop(lab);
        if self.wants(Part::Payload) && !self.report.leaves_out("payload in jumbo frames") {
            let jumbo = Lab::new(4, JUMBO_MTU, Cabling::Mesh, programs)?;
            let sizes: &[usize] = if self.common.quick {
                &[8000]
            } else {
                &[1400, 8000]
            };
            measured.payload[1] = self.payload(&jumbo, sizes)?;
        }
        let is_whole = self.choice.part.is_empty() && self.choice.only.is_empty();
        figures::draw(&self.report, &measured, is_whole)?;
        figures::judge(&mut self.report, &hops, &polling);
        self.report.doubts(&self.noise);
        self.report.finish();
        Ok(())
    }

    fn wants(&self, part: Part) -> bool {
        self.choice.part.is_empty() || self.choice.part.contains(&part)
    }

    /// A part, if it is wanted.
    fn part<T>(
        &mut self,
        part: Part,
        measure: impl FnOnce(&mut Self) -> Result<Vec<T>>,
    ) -> Result<Vec<T>> {
        if !self.wants(part) || self.report.leaves_out(&format!("the part {part:?}")) {
            return Ok(Vec::new());
        }
        measure(self)
    }

    fn inflights(&self) -> &'static [usize] {
        match self.common.quick {
            true => &[1, 64],
            false => &[1, 4, 16, 64, 256],
        }
    }

    fn go_on(&self) -> Result<()> {
        if self.stop.load(Ordering::Relaxed) {
            bail!("stopped");
        }
        Ok(())
    }

    /// Starts its own cluster for each call: nothing is inherited.
    fn cluster<'l>(&mut self, lab: &'l Lab, step: Step, replicas: usize) -> Result<LabCluster<'l>> {
        self.start(lab, &Self::options(step, replicas))
    }

    fn start<'l>(&mut self, lab: &'l Lab, options: &NodeOptions) -> Result<LabCluster<'l>> {
        self.go_on()?;
        self.noise.calibrate();
        let _ = std::fs::remove_dir_all(&self.directory);
        LabCluster::start(lab, &self.directory, options)
    }

    fn options(step: Step, replicas: usize) -> NodeOptions {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let pin = match cpus {
            1 => Vec::new(),
            _ => (0..replicas)
                .map(|n| if n == 0 { LEADER_CPU } else { OTHERS_CPU })
                .collect(),
        };
        NodeOptions {
            replicas,
            transport: step.transport.to_owned(),
            burst: step.burst,
            engine: "echo".to_owned(),
            polling: "adaptive".to_owned(),
            pin,
            nvm_bytes: 64 << 20,
            regions: None,
            logs: step.logs,
            log_threads: step.log_threads,
            default_timing: false,
            run: RunAs::Nodes,
        }
    }

    /// Runs a child on a machine and reads its answer.
    fn child<T: DeserializeOwned>(lab: &Lab, machine: usize, cpu: usize, role: &Role) -> Result<T> {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let cpu = (cpu < cpus).then_some(cpu);
        let mut command = lab.child(machine, cpu);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let output = child::start(&mut command, role)?.wait_with_output()?;
        if !output.status.success() {
            bail!("{}", child::failure(role, &output));
        }
        serde_json::from_slice(&output.stdout).context("a child's answer")
    }

    /// Measures a point.
    fn load(
        &mut self,
        lab: &Lab,
        cluster: &LabCluster<'_>,
        step: Step,
        value_bytes: usize,
        inflight: usize,
        waiting: Waiting,
    ) -> Result<Point> {
        let (point, usage) = self.attempt(lab, cluster, step, value_bytes, inflight, waiting)?;
        self.believe(&point, &usage);
        Ok(point)
    }

    /// Notes what disturbed a point that is kept.
    fn believe(&mut self, point: &Point, usage: &Usage) {
        let (foreign, stolen) = (usage.foreign_share(), usage.stolen_share());
        self.noise.shares(&point.name(), foreign, stolen);
    }

    /// Measures a point, which is perhaps not kept.
    fn attempt(
        &mut self,
        lab: &Lab,
        cluster: &LabCluster<'_>,
        step: Step,
        value_bytes: usize,
        inflight: usize,
        waiting: Waiting,
    ) -> Result<(Point, Usage)> {
        self.go_on()?;
        let machine = lab.machines() - 1;
        let role = Role::Load {
            reach: Reach {
                nodes: cluster.nodes.clone(),
                client_key: hex(&cluster.client_key),
                transport: step.transport.to_owned(),
                interface: lab.ports(step.transport, machine, 0..cluster.nodes.len()),
                burst: step.burst,
                pack: step.pack,
                spin: waiting == Waiting::Never,
                log_ports: cluster.log_ports(),
            },
            beside: cluster.beside_the_load(),
            value_bytes,
            inflight,
            warm_up_ms: if self.common.quick { 100 } else { 300 },
            measure_ms: match (self.common.quick, waiting) {
                // A program under callgrind is slow.
                (true, Waiting::Counting) => 3000,
                (false, Waiting::Counting) => 8000,
                (true, _) => 300,
                // More rounds instead.
                (false, Waiting::Never) => 1000,
                (false, Waiting::Blocks) => 3000,
            },
            seed: self.common.seed,
        };
        let replicas = cluster.nodes.len();
        self.report.progress(&format!(
            "{}, {replicas} replicas, {value_bytes} B, {inflight} in flight",
            step.name
        ));
        let everything = Process {
            role: "nodes and load".to_owned(),
            pid: std::process::id(),
        };
        let mut meter = Meter::new(&[everything]);
        let before = meter.read();
        let seen: Loaded = Self::child(lab, machine, OTHERS_CPU, &role).with_context(|| {
            let words: Vec<String> = (0..replicas).map(|node| cluster.log(node)).collect();
            format!("{}; the nodes say:\n{}", step.name, words.join("\n"))
        })?;
        let usage = meter.read().since(&before);
        let point = Point {
            step,
            replicas,
            value_bytes,
            inflight,
            seen,
        };
        let stolen = match usage.stolen_share() {
            share if share > STOLEN => {
                format!("; the host took {:.0}% of the machine", 100.0 * share)
            }
            _ => String::new(),
        };
        self.report.live(&format!(
            "{:.0}/s, p50 {:.1} µs{lost}{stolen}",
            point.seen.ops_s,
            point.seen.p50_us,
            lost = match point.seen.lost {
                0 => String::new(),
                lost => format!("; {lost} lost"),
            },
        ));
        Ok((point, usage))
    }

    fn steps(&mut self, lab: &Lab) -> Result<Vec<Point>> {
        let mut points = Vec::new();
        let wanted = steps().filter(|step| step.name.contains(&self.choice.only));
        let wanted: Vec<Step> = wanted.collect();
        self.report.expect(wanted.len() * self.inflights().len());
        for step in wanted {
            if self.report.leaves_out(&format!("the step {}", step.name)) {
                continue;
            }
            let cluster = self.cluster(lab, step, 3)?;
            for &inflight in self.inflights() {
                points.push(self.load(lab, &cluster, step, 0, inflight, Waiting::Blocks)?);
            }
        }
        self.table("net-steps", &points)?;
        Ok(points)
    }

    fn replicas(&mut self, lab: &Lab) -> Result<Vec<Point>> {
        let mut points = Vec::new();
        let step = STEPS[4];
        self.report.expect(3 * self.inflights().len());
        for replicas in [1, 3, 5] {
            if self.report.leaves_out(&format!("{replicas} replicas")) {
                continue;
            }
            let cluster = self.cluster(lab, step, replicas)?;
            for &inflight in self.inflights() {
                points.push(self.load(lab, &cluster, step, 0, inflight, Waiting::Blocks)?);
            }
        }
        self.table("net-replicas", &points)?;
        Ok(points)
    }

    fn payload(&mut self, lab: &Lab, sizes: &[usize]) -> Result<Vec<Point>> {
        let mut points = Vec::new();
        self.report.expect(2 * sizes.len());
        for step in [STEPS[2], STEPS[4]] {
            let cluster = self.cluster(lab, step, 3)?;
            for &value_bytes in sizes {
                let inflight = if value_bytes > 1400 { 32 } else { 64 };
                points.push(self.load(
                    lab,
                    &cluster,
                    step,
                    value_bytes,
                    inflight,
                    Waiting::Blocks,
                )?);
            }
        }
        let jumbo = sizes.contains(&8000);
        self.table(
            if jumbo {
                "net-payload-jumbo"
            } else {
                "net-payload"
            },
            &points,
        )?;
        Ok(points)
    }

    fn table(&self, stem: &str, points: &[Point]) -> Result<()> {
        let mut table = Table::new(&[
            "step",
            "replicas",
            "value_bytes",
            "inflight",
            "ops_s",
            "p50_us",
            "p99_us",
            "lost",
        ]);
        for point in points {
            table.add(vec![
                point.step.name.into(),
                point.replicas.into(),
                point.value_bytes.into(),
                point.inflight.into(),
                rounded(point.seen.ops_s, 0),
                rounded(point.seen.p50_us, 1),
                rounded(point.seen.p99_us, 1),
                point.seen.lost.into(),
            ]);
        }
        self.report.table(stem, &table)
    }
}

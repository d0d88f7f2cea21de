//! One machine: memory and disk that outlive its process, the process with the real replica in it,
//! and its clocks.

mod damage;

use std::net::{Ipv4Addr, SocketAddr};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use cyclone_packet::{Driver, Security};
use cyclone_pmem::{CrashSim, Outcome, Pool, Region, RegionError};
use cyclone_replica::identity::{Identity, IdentityError};
use cyclone_replica::{
    Config, Durability, Engine, FlashConfig, JobRunner, LogLoop, Member, Network, Node, Now,
    Platform, Polling, StartError, StateFile, Transport,
};
use cyclone_store::{FakeDisk, KvMachine, Limits, StateMachine};
use cyclone_wal::flash::{FlashDevice, SimDisk};

use crate::net::Net;
use crate::plan::Plan;
use crate::random::Random;
use crate::storage::StandingFile;

/// The key that nodes share; a simulated cluster has no secrets.
const NODE_KEY: [u8; 32] = [0x4e; 32];
/// The key that nodes and clients share.
pub const CLIENT_KEY: [u8; 32] = [0x43; 32];
/// The simulated cluster's identity.
const CLUSTER: u128 = 0x51_4d43_1753_7465_7200;
/// Length of one clock's life before the simulation begins.
const BOOTED_US: u64 = 1_000_000_000_000;

/// What wall clocks show when their steady clock shows 0.
const BEGINNING_MS: i64 = 1_700_000_000_000;

/// What a wall clock shows that is right, in milliseconds since 1970.
pub(crate) fn true_ms(sim_us: u64) -> u64 {
    BEGINNING_MS as u64 + (BOOTED_US + sim_us) / 1_000
}

/// Where a replica's packets go.
pub fn address(id: u64) -> SocketAddr {
    (Ipv4Addr::new(10, 77, 0, id as u8), 7104).into()
}

/// Where a log of a machine is reached that has its own loop.
fn log_address(id: u64, log: u16) -> SocketAddr {
    let replica = address(id);
    (replica.ip(), replica.port() + 1 + log).into()
}

/// A machine's clocks as functions of simulated time.
#[derive(Clone, Debug)]
pub struct Clock {
    rate: f64,
    offset_us: i64,
    wall_skew_ms: i64,
}

impl Clock {
    fn draw(plan: &Plan, random: &mut Random) -> Clock {
        let drift = (random.unit() * 2.0 - 1.0) * plan.drift_ppm as f64 / 1e6;
        let skew = random.within(0, 2 * plan.skew_ms) as i64 - plan.skew_ms as i64;
        Clock {
            rate: 1.0 + drift,
            offset_us: 0,
            wall_skew_ms: skew,
        }
    }

    fn steady_us(&self, sim_us: u64) -> u64 {
        let local = BOOTED_US as f64 + sim_us as f64 * self.rate;
        (local as i64 + self.offset_us).max(1) as u64
    }

    /// Both clocks at a point of simulated time.
    pub fn now(&self, sim_us: u64) -> Now {
        let steady_us = self.steady_us(sim_us);
        let wall = BEGINNING_MS + (steady_us / 1000) as i64 + self.wall_skew_ms;
        Now {
            steady_us,
            wall_ms: wall as u64,
        }
    }

    /// The first moment of simulated time at which the steady clock shows at least this.
    pub fn when(&self, steady_us: u64) -> u64 {
        let local = steady_us as i64 - self.offset_us - BOOTED_US as i64;
        (local.max(0) as f64 / self.rate).ceil() as u64 + 1
    }

    /// Sets what the wall clock is off by.
    pub(crate) fn set_wall_skew(&mut self, skew_ms: i64) {
        self.wall_skew_ms = skew_ms;
    }

    /// What the wall clock is off by, in milliseconds.
    pub(crate) fn wall_skew(&self) -> i64 {
        self.wall_skew_ms
    }

    /// Lets both clocks jump.
    pub fn jump(&mut self, steady_us: i64, wall_ms: i64) {
        self.offset_us += steady_us;
        self.wall_skew_ms += wall_ms;
    }
}

/// A running replica.
pub struct Process {
    /// The replica.
    pub node: Node,
    /// Its logs' own loops, where the plan has them.
    pub lanes: Vec<LogLoop>,
    /// Its log region's memory.
    pub memory: CrashSim,
}

/// What a machine is doing.
pub enum Power {
    /// The process runs.
    On(Box<Process>),
    /// The process is down and will be started.
    Off,
    /// The replica refused to start, as it must after losing its memory.
    Refused(String),
}

/// How a process ended that was not told to.
#[derive(Debug)]
pub enum Fault {
    /// The machine lost power within the step, as planned.
    PowerLost,
    /// The replica said that it cannot go on.
    Error(String),
    /// The program panicked.
    Panic(String),
}

/// A machine with one replica.
pub struct Machine {
    /// The replica's number.
    pub id: u64,
    /// What it is doing.
    pub power: Power,
    /// Its clocks.
    pub clock: Clock,
    /// The store's disk.
    pub disk: FakeDisk,
    /// The logs' flash, where the plan has it: an area for each.
    flash: Vec<SimDisk>,
    /// Counts processes; events for an earlier one are stale.
    pub life: u64,
    /// Whether it is a spare that is not in use yet.
    pub spare: bool,
    /// Whether memory or disk was damaged since the last successful start: a refusal to start is
    /// then right.
    pub damaged: bool,
    /// How far its replica has come.
    pub(crate) standing: StandingFile,
    /// Whether it has lost storage and does not count again yet.
    pub(crate) forgot: bool,
    /// Whether that is so because its storage is an older copy.
    pub(crate) is_older: bool,
    /// Whether it went down within a step since the last successful start.
    pub interrupted: bool,
    /// Starts in a row that a loss of power has interrupted.
    pub interruptions: u32,
    /// Until when it stands still.
    pub paused_until_us: u64,
    /// When it read the clock for its next step, if that was not just now.
    pub clock_read_us: Option<u64>,
    /// Until when its workers get nothing done.
    pub busy_until_us: u64,
    /// Longest delay of its jobs. Machines differ: one that flushes late keeps a longer log than
    /// the others.
    pub job_us: u64,
    /// Whether it was seen installing a checkpoint.
    pub installing: bool,
    /// The log region, while no process uses it.
    pub(crate) region: Option<CrashSim>,
    /// Its lines that were made durable last.
    recent: Vec<u64>,
    pub(crate) identity: Option<Identity>,
    pub(crate) directory: PathBuf,
    pub(crate) config: Config,
    max_sessions: usize,
    random: Random,
    /// Whose turn it is, of the loops.
    turns: Random,
}

/// What a start draws on.
struct Parts<'a> {
    machine: &'a Machine,
    net: &'a Net,
    random: Random,
    crash_after: Option<u64>,
    memory: Option<CrashSim>,
    identity: Option<Identity>,
}

impl Machine {
    /// A machine that has never run.
    pub fn new(plan: &Plan, id: u64, root: &std::path::Path, mut random: Random) -> Machine {
        let member = |id| Member {
            id,
            packet: address(id),
            redis: None,
        };
        let directory = root.join(format!("machine-{id}"));
        let config = Config {
            id,
            cluster_id: CLUSTER,
            members: (1..=plan.nodes)
                .chain((id > plan.nodes).then_some(id))
                .map(member)
                .collect(),
            bootstrap: id <= plan.nodes,
            join: id > plan.nodes,
            logs: plan.logs,
            data: directory.clone(),
            nvm: PathBuf::from("simulated"),
            nvm_bytes: plan.nvm_bytes,
            engine: Engine::Memory,
            transport: Transport::Udp,
            network: Network::default(),
            security: Security::Authenticated,
            node_key: NODE_KEY,
            client_key: CLIENT_KEY,
            polling: Polling::Event,
            pin_cpu: None,
            log_cpus: Vec::new(),
            priority_boost: false,
            log_threads: u16::from(plan.own_loops),
            heartbeat: Duration::from_micros(plan.heartbeat_us),
            election: Duration::from_micros(plan.election_us),
            max_key_bytes: 256,
            max_value_bytes: plan.max_value_bytes,
            max_work_bytes: plan.work_bytes,
            max_pending: 4096,
            block_cache_bytes: 0,
            flash: plan.flash.map(|durability| FlashConfig {
                directory: PathBuf::from("simulated"),
                bytes: FlashConfig::MIN_BYTES * u64::from(plan.logs),
                durability,
            }),
            // A lease rests on clocks that keep to what is said of them.
            lease_reads: plan.rates.jump_us == 0 && plan.drift_ppm <= 100_000,
            clock_drift_ppm: plan.drift_ppm.min(100_000) as u32,
            follower_staleness: None,
            archive: None,
            member_addresses: Vec::new(),
        };
        let areas = plan.flash.map_or(0, |_| u64::from(plan.logs));
        let flash = (0..areas)
            .map(|log| {
                let area = SimDisk::new(FlashConfig::MIN_BYTES, plan.seed ^ id ^ log << 32);
                area.faults(|faults| faults.torn_pages = true);
                area
            })
            .collect();
        Machine {
            id,
            power: Power::Off,
            clock: Clock::draw(plan, &mut random),
            disk: FakeDisk::default(),
            flash,
            life: 0,
            spare: id > plan.nodes,
            damaged: false,
            standing: StandingFile::new(plan.founding),
            forgot: false,
            is_older: false,
            interrupted: false,
            interruptions: 0,
            paused_until_us: 0,
            clock_read_us: None,
            busy_until_us: 0,
            job_us: match random.chance(0.5) {
                true => plan.job_us,
                false => plan.job_us.min(2_000),
            },
            installing: false,
            region: None,
            recent: Vec::new(),
            identity: None,
            directory,
            config,
            max_sessions: plan.max_sessions,
            random,
            turns: Random::new(plan.seed ^ id << 32 ^ 0x7475_726e),
        }
    }

    /// Puts an earlier life's memory and identity in place.
    ///
    /// # Errors
    /// When the system has no memory left.
    pub fn restore(&mut self, image: &[u8], identity: Identity) -> Result<(), RegionError> {
        self.region = Some(Region::from_image(image)?.1);
        self.identity = Some(identity);
        Ok(())
    }

    /// The region's bytes while the machine is off, and its identity: what [`Machine::restore`]
    /// takes.
    pub fn remains(&self) -> Option<(Vec<u8>, Identity)> {
        let region = self.region.as_ref()?;
        Some((region.image(|_| 0), self.identity?))
    }

    /// The replica, while it runs.
    pub fn node(&self) -> Option<&Node> {
        match &self.power {
            Power::On(process) => Some(&process.node),
            _ => None,
        }
    }

    /// The replica, for asking it something.
    pub(crate) fn node_mut(&mut self) -> Option<&mut Node> {
        match &mut self.power {
            Power::On(process) => Some(&mut process.node),
            _ => None,
        }
    }

    /// Whether it is off and will come back.
    pub fn is_off(&self) -> bool {
        matches!(self.power, Power::Off)
    }

    /// Whether it will never come back.
    pub fn is_refused(&self) -> bool {
        matches!(self.power, Power::Refused(_))
    }

    /// Whether it counts as lost for good, now or at its next start.
    pub fn is_lost(&self) -> bool {
        self.damaged || self.is_refused() || self.has_unreadable_flash()
    }

    /// Whether a page of its flash cannot be read. One that no start so far had to read may be
    /// where the log ends at a later one.
    fn has_unreadable_flash(&self) -> bool {
        self.flash.iter().any(SimDisk::has_unreadable)
    }

    /// Starts the process. `crash_after`: loses power after so many stores, flushes and fences.
    pub fn start(&mut self, net: &Net, crash_after: Option<u64>) -> Result<(), Fault> {
        self.life += 1;
        let random = self.random.fork(self.life);
        let mut parts = Parts {
            machine: self,
            net,
            random,
            crash_after,
            memory: None,
            identity: self.identity,
        };
        let config = parts.machine.config.clone();
        let started = catch_unwind(AssertUnwindSafe(|| Node::start_on(config, &mut parts)));
        let memory = parts.memory;
        self.identity = parts.identity;
        let lost_power = memory.as_ref().is_some_and(CrashSim::has_crashed);
        match (started, memory) {
            (Err(panic), _) => Err(Fault::Panic(panic_text(&panic))),
            (Ok(Ok(mut node)), Some(memory)) => {
                let lanes = node.take_log_loops();
                let process = Process {
                    node,
                    lanes,
                    memory,
                };
                self.power = Power::On(Box::new(process));
                if lost_power {
                    return Err(Fault::PowerLost);
                }
                // What was damaged was not in use.
                self.damaged = false;
                Ok(())
            }
            (Ok(Err(_)), Some(memory)) if lost_power => {
                let seed = self.random.draw();
                memory.crash(Outcome::Words(seed));
                self.region = Some(memory);
                Err(Fault::PowerLost)
            }
            (Ok(Err(error)), memory) => {
                if let Some(memory) = memory {
                    memory.crash(Outcome::Newest);
                    self.region = Some(memory);
                }
                let unreadable =
                    matches!(error, StartError::Flash { .. }) && self.has_unreadable_flash();
                if unreadable || (self.damaged && is_refusal(&error)) {
                    self.power = Power::Refused(error.to_string());
                    return Ok(());
                }
                Err(Fault::Error(error.to_string()))
            }
            (Ok(Ok(_)), None) => Err(Fault::Error("started without memory".into())),
        }
    }

    /// Runs the replica once, or one of its waiting jobs.
    pub fn run(&mut self, sim_us: u64, job: Option<usize>) -> Result<usize, Fault> {
        let now = self.clock.now(self.clock_read_us.take().unwrap_or(sim_us));
        let Power::On(process) = &mut self.power else {
            return Ok(0);
        };
        let (node, turns) = (&mut process.node, &mut self.turns);
        let unseen = job.is_some() && self.random.chance(0.4);
        let stepped = catch_unwind(AssertUnwindSafe(|| {
            match job {
                Some(which) if unseen => node.run_job_unseen(which),
                Some(which) => node.run_job(which),
                None => {}
            }
            let mut left = usize::from(unseen);
            for lane in &mut process.lanes {
                // Each thread gets the CPU when it does.
                if turns.chance(0.3) {
                    left += 1;
                    continue;
                }
                node.lend_logs();
                let moved = lane.step(&|| now);
                node.take_logs()?;
                left += moved?;
            }
            match job.is_none() && !process.lanes.is_empty() && turns.chance(0.3) {
                true => Ok(left + 1),
                false => node.step(now).map(|work| work + left),
            }
        }));
        if process.memory.has_crashed() {
            return Err(Fault::PowerLost);
        }
        match stepped {
            Err(panic) => Err(Fault::Panic(panic_text(&panic))),
            Ok(Err(error)) => Err(Fault::Error(error.to_string())),
            Ok(Ok(work)) => Ok(work),
        }
    }

    /// When its replica, or one of its logs' loops, wants to be stepped, by its clock.
    pub(crate) fn deadline_us(&self) -> Option<u64> {
        let Power::On(process) = &self.power else {
            return None;
        };
        let lanes = process.lanes.iter().map(LogLoop::deadline_us).min();
        Some(process.node.deadline_us().min(lanes.unwrap_or(u64::MAX)))
    }

    /// Lets the power fail after so many more stores, flushes and fences.
    pub fn lose_power_after(&mut self, events: u64) {
        if let Power::On(process) = &self.power {
            process.memory.crash_after(process.memory.events() + events);
        }
    }

    /// Lets the power fail right before a fence of so many lines, after so many more of them.
    pub fn lose_power_before_fence(&mut self, lines: usize, fences: u64) {
        if let Power::On(process) = &self.power {
            process.memory.crash_before_fence(lines, fences);
        }
    }

    /// The process ends. With `power_lost` each line that was not flushed and fenced is kept or
    /// lost by chance, without, all stores have reached memory. The store keeps some of what it had
    /// not flushed.
    pub fn stop(&mut self, net: &Net, power_lost: bool) {
        let running = std::mem::replace(&mut self.power, Power::Off);
        if let Power::On(process) = running {
            let keep = self.random.below(self.disk.unflushed() as u64 + 1) as usize;
            let keep = if self.random.chance(0.5) { 0 } else { keep };
            let seed = self.random.draw();
            let memory = process.memory.clone();
            self.recent = memory.recent_lines();
            // What a process does while it is torn down, a killed one does not do.
            memory.crash_after(memory.events());
            self.disk.crash(keep);
            drop(process);
            memory.crash(match (power_lost, seed % 2) {
                (true, 0) => Outcome::Words(seed),
                (true, _) => Outcome::Lines(seed),
                (false, _) => Outcome::Newest,
            });
            self.region = Some(memory);
            self.stop_flash(power_lost, seed);
        }
        self.life += 1;
        self.clock_read_us = None;
        net.remove(address(self.id));
        (0..self.config.logs).for_each(|log| net.remove(log_address(self.id, log)));
    }

    fn stop_flash(&mut self, power_lost: bool, seed: u64) {
        for (area, log) in self.flash.iter().zip(0u64..) {
            match power_lost {
                true => {
                    area.crash(seed.rotate_left(log as u32));
                }
                false => area.settle(),
            }
        }
        self.calm_flash();
        let only = self.config.flash.as_ref();
        if power_lost && only.is_some_and(|flash| flash.durability == Durability::Flash) {
            // Memory that keeps its bytes is what this mode does without.
            self.region = None;
        }
    }
}

/// What the text of a panic was.
/// What a panic said.
pub(crate) fn panic_text(panic: &Box<dyn std::any::Any + Send>) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("a panic without text").to_owned()
}

/// Whether a replica says by this that it has lost memory.
fn is_refusal(error: &StartError) -> bool {
    matches!(
        error,
        StartError::RegionLost { .. }
            | StartError::NotBootstrapped { .. }
            | StartError::DataLost { .. }
            | StartError::Mismatch { .. }
            | StartError::Ring { .. }
            | StartError::Superblock { .. }
            | StartError::StoreBehind { .. }
            | StartError::Flash { .. }
            | StartError::FlashLost { .. }
    )
}

impl Platform for Parts<'_> {
    fn has_region(&self, _: &Config) -> bool {
        self.machine.region.is_some()
    }

    fn identity(&self, _: &Config) -> Result<Option<Identity>, IdentityError> {
        Ok(self.identity)
    }

    fn write_identity(&mut self, _: &Config, ours: &Identity) -> Result<(), IdentityError> {
        // A machine without power writes nothing.
        if !self.memory.as_ref().is_some_and(CrashSim::has_crashed) {
            self.identity = Some(*ours);
        }
        Ok(())
    }

    fn bootstrap_file(&mut self, _: &Config) -> Box<dyn StateFile> {
        self.machine.standing.open(self.memory.clone())
    }

    fn region(&mut self, config: &Config, create: bool) -> Result<Region, StartError> {
        let (region, memory) = match &self.machine.region {
            Some(memory) => (Region::after_crash(memory), memory.clone()),
            None => {
                assert!(create, "a region that does not exist is opened");
                Region::simulated(config.nvm_bytes)?
            }
        };
        if let Some(events) = self.crash_after {
            memory.crash_after(events);
        }
        self.memory = Some(memory);
        Ok(region)
    }

    fn store(&mut self, config: &Config) -> Result<Arc<dyn StateMachine>, StartError> {
        let limits = Limits {
            max_value_bytes: config.max_value_bytes,
            max_sessions: self.machine.max_sessions,
        };
        let memory = self.memory.clone();
        let kv = self
            .machine
            .disk
            .open(move || memory.as_ref().is_some_and(CrashSim::has_crashed));
        Ok(Arc::new(KvMachine::open(kv, config.logs, limits)?))
    }

    fn flash(&mut self, _: &Config, log: u16) -> Result<Box<dyn FlashDevice>, StartError> {
        let memory = self.memory.clone();
        let lost = move || memory.as_ref().is_some_and(CrashSim::has_crashed);
        Ok(Box::new(
            self.machine.flash[usize::from(log)].device_of(lost),
        ))
    }

    fn driver(&mut self, config: &Config, _: &Pool) -> Result<Box<dyn Driver>, StartError> {
        Ok(Box::new(
            self.net.driver(address(config.id), self.memory.clone()),
        ))
    }

    fn log_driver(
        &mut self,
        config: &Config,
        log: u16,
        _: &Pool,
    ) -> Result<Box<dyn Driver>, StartError> {
        let address = log_address(config.id, log);
        Ok(Box::new(self.net.driver(address, self.memory.clone())))
    }

    fn random(&mut self) -> Result<u64, StartError> {
        Ok(self.random.draw())
    }

    fn boot_id(&mut self) -> Result<[u8; 16], StartError> {
        // Simulated memory survives power loss: another boot must not matter.
        Ok(u128::from(self.machine.life).to_le_bytes())
    }

    fn workers(&mut self) -> std::io::Result<JobRunner> {
        Ok(JobRunner::manual())
    }
}

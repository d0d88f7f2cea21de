//! What a run is made of: the cluster, the load, and how often each fault strikes. Drawn from the
//! seed, so that runs differ in kind and not only in detail: a fault that is always there hides
//! what only its absence shows.

mod kind;

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use cyclone_replica::Durability;

use crate::random::Random;
pub use kind::{FaultCounts, Kind};

/// Probabilities per datagram.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PacketFaults {
    /// Lost.
    pub loss: f64,
    /// Delivered twice.
    pub duplicate: f64,
    /// Held back behind later ones.
    pub reorder: f64,
    /// Delayed by up to a second.
    pub tail: f64,
    /// One bit flipped.
    pub corrupt: f64,
    /// Cut short.
    pub truncate: f64,
}

/// Mean times between faults in µs of simulated time; 0: never.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rates {
    /// Two parts that do not hear each other.
    pub partition_us: u64,
    /// One direction of one link.
    pub one_way_us: u64,
    /// A link that holds everything back.
    pub clog_us: u64,
    /// A leader that is cut off, and the next one after it.
    pub flutter_us: u64,
    /// A process killed between steps.
    pub kill_us: u64,
    /// A machine losing power within a step.
    pub power_us: u64,
    /// All machines losing power.
    pub blackout_us: u64,
    /// A process standing still.
    pub pause_us: u64,
    /// A disk that refuses a write.
    pub store_error_us: u64,
    /// Stores without room.
    pub store_full_us: u64,
    /// A store that is damaged.
    pub store_damage_us: u64,
    /// A store that would make the loop wait.
    pub store_stall_us: u64,
    /// A steady clock that jumps.
    pub jump_us: u64,
    /// Flash that answers nothing.
    pub flash_stall_us: u64,
    /// Flash whose writes fail.
    pub flash_error_us: u64,
    /// Flash that is full.
    pub flash_full_us: u64,
    /// Flash that loses or misplaces a write.
    pub flash_astray_us: u64,
    /// A page of the flash that goes bad while the process runs.
    pub flash_rot_us: u64,
    /// An operator who wants other members.
    pub members_us: u64,
    /// One machine's wall clock that is put elsewhere.
    pub wall_us: u64,
    /// Storage that is replaced by an empty one.
    pub emptied_us: u64,
    /// Storage that is replaced by an older copy.
    pub older_us: u64,
}

/// Which strikes of a run take place, counted from 0 in the order in which they are due. A strike
/// is a fault with its own time; what befalls single datagrams, values or restarts is none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FaultSchedule(pub BTreeSet<u64>);

impl fmt::Display for FaultSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("none");
        }
        let numbers: Vec<String> = self.0.iter().map(u64::to_string).collect();
        f.write_str(&numbers.join(","))
    }
}

impl FromStr for FaultSchedule {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<FaultSchedule, Self::Err> {
        if text == "none" {
            return Ok(FaultSchedule::default());
        }
        text.split(',')
            .map(str::parse)
            .collect::<Result<_, _>>()
            .map(FaultSchedule)
    }
}

/// A run.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Everything is drawn from it.
    pub seed: u64,
    /// Replicas: 1, 3 or 5.
    pub nodes: u64,
    /// How long faults strike, in µs of simulated time.
    pub duration_us: u64,
    /// Time between heartbeats.
    pub heartbeat_us: u64,
    /// Shortest election time-out.
    pub election_us: u64,
    /// Physical logs.
    pub logs: u16,
    /// Bytes of each log region.
    pub nvm_bytes: u64,
    /// Longest value.
    pub max_value_bytes: usize,
    /// Sessions that the state machine remembers.
    pub max_sessions: usize,
    /// Largest datagram: small ones make fragments of nearly everything.
    pub datagram_bytes: usize,
    /// Clients.
    pub clients: u64,
    /// A client's mean pause between operations.
    pub think_us: u64,
    /// Operations that a client has in flight at most.
    pub most_pending: usize,
    /// The mean pause of callers within each replica's process; 0: there are none.
    pub callers_us: u64,
    /// Keys.
    pub keys: u64,
    /// Share of operations that only read.
    pub reads: f64,
    /// Per datagram.
    pub packets: PacketFaults,
    /// Per time.
    pub rates: Rates,
    /// Chance per restart to lose power again while recovering.
    pub recovery: f64,
    /// Chance per killed process that a bit rots.
    pub rot: f64,
    /// Chance per power failure that the region is gone.
    pub amnesia: f64,
    /// Chance per power failure that the data directory is gone.
    pub data_loss: f64,
    /// Chance per operation that the client gives up afterwards.
    pub quit: f64,
    /// Chance per operation of a value of any length up to the limit.
    pub large: f64,
    /// Longest delay of a job.
    pub job_us: u64,
    /// The machine, by place, whose jobs all take about so long: it flushes late and keeps a longer
    /// log than the others.
    pub hoarder: Option<(usize, u64)>,
    /// Largest difference of wall clocks, ms.
    pub skew_ms: u64,
    /// Largest difference of steady clocks' rates, parts per million.
    pub drift_ppm: u64,
    /// Longest time until a process sees a datagram; 0: none.
    pub late_us: u64,
    /// Whether nearly all operations go to two keys.
    pub hot: bool,
    /// Whether to start from checked-in images.
    pub old_format: bool,
    /// The log's second level, or its only durable one. Faults of flash strike only there.
    pub flash: Option<Durability>,
    /// Chance per process that ends that a page of its flash rots or becomes unreadable.
    pub flash_rot: f64,
    /// Machines that may join.
    pub spares: u64,
    /// With several logs, whether clients move money between them.
    pub gangs: bool,
    /// Whether some client's keys expire.
    pub expiry: bool,
    /// The most work of a command, bytes, where some client's commands do much; 0: as much as
    /// usual.
    pub work_bytes: u32,
    /// Whether each log has its own loop.
    pub own_loops: bool,
    /// Each time of this length begins with work, and ends in a lull; 0: there are none.
    pub lull_us: u64,
    /// Whether the replicas found their cluster; otherwise it is there already.
    pub founding: bool,
    /// Only these strikes take place.
    pub strikes: Option<FaultSchedule>,
}

const SECOND: u64 = 1_000_000;
/// For what is drawn apart. They leave the seeds that are tested the runs that they were found in.
const GANGS: u64 = 0x0067_6e6c;
const EXPIRY: u64 = 0x6578_710a;
const AMPLIFY: u64 = 0x0061_6d70;
const OWN_LOOPS: u64 = 0x6f77_71e0;
const LULL: u64 = 0x6c75_6c6c;
const WALL: u64 = 0x7761_6c6c;
const EAGER: u64 = 0x6561_6769;
const FLUTTER: u64 = 0x666c_7574;
const STORAGE: u64 = 0x7374_6fdc;
const MEMBERS_FLUTTER: u64 = 0x666c_7526;
/// The most work of a command where that matters: enough for what other clients ask.
const WORK_BYTES: u32 = 128 << 10;
// Chosen so that no seed with a story draws these faults.
const CANNOT_STORE: u64 = 0x6675_6c01;
/// What may keep a leader from being replaced, or the new one from serving, for as long as it
/// likes.
const DISTURBANCES: [Kind; 19] = [
    Kind::Partition,
    Kind::OneWay,
    Kind::Clog,
    Kind::Flutter,
    Kind::Kill,
    Kind::Power,
    Kind::Recovery,
    Kind::Blackout,
    Kind::Pause,
    Kind::Amnesia,
    Kind::DataLoss,
    Kind::StoreError,
    Kind::StoreStall,
    Kind::SlowJob,
    Kind::Drift,
    Kind::Jump,
    Kind::Late,
    Kind::Lull,
    Kind::Members,
];
/// Operations that most clients have in flight at most.
const MOST_PENDING: usize = 4;

impl Plan {
    /// The plan of a seed. Each fault is in about half of the plans; members change in one of ten.
    pub fn draw(seed: u64) -> Plan {
        let plan = Plan::draw_steady(seed);
        let mut apart = Random::new(seed ^ 0x006d_656d_6265);
        let plan = match !plan.old_format && plan.clients <= 100 && apart.chance(0.1) {
            true => plan.with_members(),
            false => plan,
        };
        match !plan.old_format && plan.spares == 0 && Random::new(seed ^ STORAGE).chance(0.08) {
            true => plan.with_storage_faults(),
            false => plan,
        }
    }

    /// The plan of a seed, without changes of the members.
    fn draw_steady(seed: u64) -> Plan {
        let mut random = Random::new(seed ^ 0x706c_616e);
        let heartbeat_us = *random.pick(&[50_000, 100_000, 200_000, 400_000]);
        // Intervals are counted in election time-outs: a cluster that never finds a leader tests
        // nothing else.
        let election_us = heartbeat_us * random.within(4, 8);
        let duration_us = random.within(300, 900) * heartbeat_us;
        let rate = |random: &mut Random, least: u64| {
            let every = election_us * random.within(least, least * 12);
            if random.chance(0.5) { every } else { 0 }
        };
        let some = |random: &mut Random, most: f64| {
            if random.chance(0.5) {
                random.unit() * most
            } else {
                0.0
            }
        };
        let calm = random.chance(0.15);
        let crowd = random.chance(0.02);
        let mut plan = Plan {
            seed,
            nodes: *random.pick(&[1, 3, 3, 3, 3, 3, 3, 5]),
            duration_us,
            heartbeat_us,
            election_us,
            logs: 1,
            nvm_bytes: *random.pick(&[1 << 20, 1 << 20, 2 << 20, 4 << 20]),
            max_value_bytes: 0,
            max_sessions: *random.pick(&[3, 10_000, 10_000, 10_000]),
            datagram_bytes: *random.pick(&[1472, 8972]),
            clients: if crowd {
                *random.pick(&[150, 300, 500, 2000])
            } else {
                random.within(1, 8)
            },
            // In election time-outs: what is done while leaders change is what may go wrong.
            think_us: election_us * *random.pick(&[1, 3, 8]) / 8,
            most_pending: MOST_PENDING,
            callers_us: election_us * *random.pick(&[0, 0, 8]) / 8,
            keys: *random.pick(&[1, 3, 10, 40]),
            reads: *random.pick(&[0.4, 0.4, 0.9]),
            packets: PacketFaults {
                loss: some(&mut random, 0.3),
                duplicate: some(&mut random, 0.2),
                reorder: some(&mut random, 0.3),
                tail: some(&mut random, 0.1),
                corrupt: some(&mut random, 0.05),
                truncate: some(&mut random, 0.05),
            },
            rates: Rates {
                partition_us: rate(&mut random, 6),
                one_way_us: rate(&mut random, 8),
                clog_us: rate(&mut random, 8),
                kill_us: rate(&mut random, 5),
                power_us: rate(&mut random, 3),
                blackout_us: rate(&mut random, 20),
                pause_us: rate(&mut random, 12),
                store_error_us: rate(&mut random, 40),
                store_stall_us: rate(&mut random, 10),
                jump_us: rate(&mut random, 20),
                ..Rates::default()
            },
            recovery: some(&mut random, 1.0),
            rot: some(&mut random, 0.6),
            amnesia: some(&mut random, 0.3),
            data_loss: some(&mut random, 0.2),
            quit: some(&mut random, 0.1),
            large: *random.pick(&[0.0, 0.0, 0.0, 0.01, 0.05, 0.2]),
            job_us: if random.chance(0.4) {
                3 * SECOND
            } else {
                2_000
            },
            skew_ms: if random.chance(0.5) { 100_000 } else { 0 },
            drift_ppm: *random.pick(&[0, 0, 1_000, 50_000, 300_000]),
            late_us: *random.pick(&[0, 0, heartbeat_us / 8, heartbeat_us / 2]),
            hot: random.chance(0.3),
            old_format: random.chance(0.1),
            flash: None,
            flash_rot: 0.0,
            spares: 0,
            gangs: Random::new(seed ^ GANGS).chance(0.7),
            expiry: Random::new(seed ^ EXPIRY).chance(0.25),
            work_bytes: match Random::new(seed ^ AMPLIFY).chance(0.25) {
                true => WORK_BYTES,
                false => 0,
            },
            own_loops: Random::new(seed ^ OWN_LOOPS).chance(0.15),
            lull_us: 0,
            founding: false,
            strikes: None,
            hoarder: None,
        };
        // Drawn apart: what else is drawn does not depend on it.
        plan.with_logs(*Random::new(seed ^ 0x6c6f_6773).pick(&[1, 1, 1, 1, 2, 4]));
        let mut apart = Random::new(seed ^ 0x0066_6c61_7368);
        if !plan.old_format && apart.chance(0.1) {
            plan.flash = Some(*apart.pick(&[Durability::Nvm, Durability::Flash]));
        }
        plan.rates.flash_stall_us = rate(&mut apart, 6);
        plan.rates.flash_error_us = rate(&mut apart, 6);
        plan.rates.flash_full_us = rate(&mut apart, 6);
        plan.rates.flash_astray_us = rate(&mut apart, 10);
        plan.flash_rot = some(&mut apart, 0.6);
        plan.rates.flash_rot_us = rate(&mut apart, 6);
        let mut apart = Random::new(seed ^ 0x686f_6172_6465);
        if plan.job_us > 2_000 && apart.chance(0.5) {
            let longest_us = *apart.pick(&[SECOND, 4 * SECOND, 10 * SECOND]);
            plan.hoarder = Some((apart.below(plan.nodes) as usize, longest_us));
        }
        if !crowd && Random::new(seed ^ EAGER).chance(0.06) {
            plan.most_pending = 6 * MOST_PENDING;
            plan.think_us = plan.think_us.min(election_us / 16);
            // What matters is that the log fills; in half the time it has done as much as others.
            plan.large = plan.large.max(0.6);
            plan.duration_us /= 2;
            plan.nvm_bytes = u64::from(plan.logs) << 20;
            plan.fit();
        }
        plan.draw_cannot_store();
        plan.flutter(0.12, FLUTTER);
        if Random::new(!seed ^ LULL).chance(0.15) {
            plan.draw_lull();
        }
        if crowd {
            plan.duration_us = plan.duration_us.min(10 * election_us);
            (plan.think_us, plan.callers_us) = (plan.duration_us / 2, 0);
            plan.keys = 200;
        }
        if calm {
            plan.packets = PacketFaults::default();
        }
        if plan.old_format {
            (plan.nodes, plan.logs, plan.nvm_bytes) = (3, 1, 2 << 20);
            plan.fit();
        }
        plan.draw_wall();
        plan
    }

    /// Lets stores be full, or damaged. In half of these plans nothing else keeps a leader from
    /// being replaced: then it must be ([`Plan::is_undisturbed`]).
    fn draw_cannot_store(&mut self) {
        let mut apart = Random::new(self.seed ^ CANNOT_STORE);
        if self.old_format || self.clients > 100 || !apart.chance(0.12) {
            return;
        }
        let every_us = self.longest_without_store_us() * apart.within(2, 4);
        if apart.chance(0.6) {
            self.rates.store_full_us = every_us;
        } else {
            self.rates.store_damage_us = every_us;
        }
        if apart.chance(0.5) {
            *self = DISTURBANCES
                .iter()
                .fold(self.clone(), |plan, kind| plan.without(*kind));
            self.packets = PacketFaults::default();
            (self.nodes, self.flash) = (self.nodes.max(3), None);
            self.duration_us = self.duration_us.max(3 * every_us);
            self.fit();
        }
    }

    /// How long a leader that cannot store may lead while another replica can: the time after which
    /// it hands over, and some elections.
    pub(crate) fn longest_without_store_us(&self) -> u64 {
        4 * SECOND + 10 * self.election_us
    }

    /// Whether nothing but stores that are full or damaged keeps leaders from being replaced.
    pub(crate) fn is_undisturbed(&self) -> bool {
        let is_calm = self.packets == PacketFaults::default() && self.nodes > 1;
        is_calm && !DISTURBANCES.iter().any(|kind| self.has(*kind))
    }

    /// Lets leaders be cut off one after the other, with this chance. The operations in flight when
    /// the lead was lost matter, and there should be many of them.
    fn flutter(&mut self, chance: f64, drawn: u64) {
        let mut apart = Random::new(self.seed ^ drawn);
        if self.nodes > 1 && self.clients <= 100 && apart.chance(chance) {
            self.rates.flutter_us = self.election_us * apart.within(8, 30);
            self.callers_us = self.election_us / 16;
        }
    }

    /// Lets one machine's wall clock be off, where the others are a majority whose clocks are
    /// right.
    fn draw_wall(&mut self) {
        let mut apart = Random::new(self.seed ^ WALL);
        let others = [Kind::Skew, Kind::Drift, Kind::Jump, Kind::OldFormat];
        let are_right = !others.into_iter().any(|kind| self.has(kind));
        if self.nodes > 1 && are_right && apart.chance(0.7) {
            self.rates.wall_us = self.election_us * apart.within(3, 30);
        }
    }

    /// Lets there be lulls.
    pub(crate) fn draw_lull(&mut self) {
        // Replicas rest after fifty heartbeats' time.
        self.lull_us = self.heartbeat_us * Random::new(self.seed ^ LULL).within(100, 200);
    }

    /// How long a client pauses that would pause so long, and began to at `now_us`: a pause that
    /// would end in a lull lasts until the lull's end.
    pub(crate) fn with_lull(&self, now_us: u64, pause_us: u64) -> Option<u64> {
        let place_us = (now_us + pause_us).checked_rem(self.lull_us)?;
        let is_lull = place_us > self.lull_us / 4;
        is_lull.then(|| pause_us + self.lull_us - place_us)
    }

    /// The same plan with flash, and the faults that were drawn for it.
    pub fn with_flash(self, durability: Durability) -> Plan {
        Plan {
            flash: Some(durability),
            old_format: false,
            ..self
        }
    }

    /// The same plan with an operator who changes the members all the time. No machine loses its
    /// memory then: how many may, depends on who takes part.
    pub fn with_members(mut self) -> Plan {
        let mut random = Random::new(self.seed ^ 0x6d65_6d62);
        self.spares = random.within(2, 5);
        self.rates.members_us = self.election_us * random.within(2, 10);
        self.flutter(0.3, MEMBERS_FLUTTER);
        let lost = [
            Kind::Rot,
            Kind::Amnesia,
            Kind::DataLoss,
            Kind::OldFormat,
            // The machine whose clock is off might be the only voter that is left.
            Kind::Wall,
            Kind::Founding,
        ];
        let plan = lost.into_iter().fold(self, Plan::without);
        plan.without(Kind::FlashAstray).without(Kind::FlashRot)
    }

    /// The same plan with replicas that found their cluster, and storage that is replaced by an
    /// empty one or by an older copy. Nothing else takes memory away: how many machines may,
    /// depends on who recovers. Of an older copy only the leader that has the acknowledgements
    /// knows, so in such a plan nothing else deposes leaders.
    pub fn with_storage_faults(self) -> Plan {
        let mut random = Random::new(self.seed ^ STORAGE.rotate_left(32));
        let lost = [
            Kind::Rot,
            Kind::Amnesia,
            Kind::DataLoss,
            Kind::OldFormat,
            Kind::FlashAstray,
            Kind::FlashRot,
            Kind::Members,
            // The machine whose clock is off might be the only voter that is left.
            Kind::Wall,
        ];
        let mut plan = lost.into_iter().fold(self, Plan::without);
        plan.founding = true;
        plan.nodes = *random.pick(&[1, 3, 3, 3, 5]);
        plan.hoarder = plan
            .hoarder
            .filter(|(place, _)| *place < plan.nodes as usize);
        if plan.nodes == 1 {
            return plan;
        }
        if random.chance(0.7) {
            plan.rates.emptied_us = plan.election_us * random.within(10, 30);
            return plan;
        }
        let unfit = [
            Kind::Partition,
            Kind::OneWay,
            Kind::Clog,
            Kind::Flutter,
            Kind::Power,
            Kind::Recovery,
            Kind::Blackout,
            Kind::Pause,
            Kind::StoreError,
            Kind::StoreFull,
            Kind::StoreDamage,
            Kind::Jump,
            Kind::Flash,
        ];
        let mut plan = unfit.into_iter().fold(plan, Plan::without);
        plan.packets = PacketFaults::default();
        plan.rates.older_us = plan.election_us * random.within(10, 20);
        plan
    }

    /// The same plan with a loop for each log.
    pub fn with_own_loops(self) -> Plan {
        Plan {
            own_loops: true,
            ..self
        }
    }

    /// Gives the cluster so many logs, and each of them a region of the size one would have had.
    pub fn with_logs(&mut self, logs: u16) {
        self.nvm_bytes = self.nvm_bytes / u64::from(self.logs) * u64::from(logs);
        self.logs = logs;
        self.fit();
    }

    /// The region that datagrams need, and the longest value that both allow.
    pub(crate) fn fit(&mut self) {
        let logs = u64::from(self.logs);
        if self.datagram_bytes < 8000 {
            // An entry takes many frames then, and there is one per datagram.
            self.nvm_bytes = self.nvm_bytes.max(logs * (2 << 20));
            self.max_value_bytes = 8 << 10;
        } else {
            self.max_value_bytes = (self.nvm_bytes / logs) as usize / 16;
        }
    }

    /// Whether a fault is part of the plan.
    pub fn has(&self, kind: Kind) -> bool {
        let (packets, rates) = (&self.packets, &self.rates);
        match kind {
            Kind::Loss => packets.loss > 0.0,
            Kind::Duplicate => packets.duplicate > 0.0,
            Kind::Reorder => packets.reorder > 0.0,
            Kind::Tail => packets.tail > 0.0,
            Kind::Corrupt => packets.corrupt > 0.0,
            Kind::Truncate => packets.truncate > 0.0,
            Kind::Partition => rates.partition_us > 0,
            Kind::OneWay => rates.one_way_us > 0,
            Kind::Clog => rates.clog_us > 0,
            Kind::Flutter => rates.flutter_us > 0,
            Kind::Kill => rates.kill_us > 0,
            Kind::Power => rates.power_us > 0,
            Kind::Recovery => self.recovery > 0.0,
            Kind::Blackout => rates.blackout_us > 0,
            Kind::Pause => rates.pause_us > 0,
            Kind::Rot => self.rot > 0.0,
            Kind::Amnesia => self.amnesia > 0.0,
            Kind::DataLoss => self.data_loss > 0.0,
            Kind::OldFormat => self.old_format,
            Kind::StoreError => rates.store_error_us > 0,
            Kind::StoreFull => rates.store_full_us > 0,
            Kind::StoreDamage => rates.store_damage_us > 0,
            Kind::StoreStall => rates.store_stall_us > 0,
            Kind::SlowJob => self.job_us > 2_000,
            Kind::Skew => self.skew_ms > 0,
            Kind::Drift => self.drift_ppm > 0,
            Kind::Jump => rates.jump_us > 0,
            Kind::Late => self.late_us > 0,
            Kind::Quit => self.quit > 0.0,
            Kind::Crowd => self.clients > 100,
            Kind::Eager => self.most_pending > MOST_PENDING,
            Kind::Hot => self.hot,
            Kind::Large => self.large > 0.0,
            Kind::Forget => self.max_sessions < 10_000,
            Kind::Logs => self.logs > 1,
            Kind::Flash => self.flash.is_some(),
            Kind::FlashStall => self.flash.is_some() && rates.flash_stall_us > 0,
            Kind::FlashError => self.flash.is_some() && rates.flash_error_us > 0,
            Kind::FlashFull => self.flash.is_some() && rates.flash_full_us > 0,
            // As the only durable level, flash that loses what it said was written breaks every
            // promise.
            Kind::FlashAstray => self.flash == Some(Durability::Nvm) && rates.flash_astray_us > 0,
            Kind::FlashRot => {
                self.flash.is_some() && (self.flash_rot > 0.0 || rates.flash_rot_us > 0)
            }
            Kind::Gangs => self.logs > 1 && self.gangs,
            Kind::Expiry => self.expiry,
            Kind::Amplify => self.work_bytes > 0,
            Kind::Members => rates.members_us > 0,
            Kind::Wall => rates.wall_us > 0,
            Kind::OwnLoops => self.own_loops,
            Kind::Lull => self.lull_us > 0,
            Kind::Founding => self.founding,
            Kind::Emptied => rates.emptied_us > 0,
            // The copy is one of memory and disk.
            Kind::OlderStorage => rates.older_us > 0 && self.flash.is_none(),
        }
    }

    /// Switches a fault off.
    pub fn without(mut self, kind: Kind) -> Plan {
        let (packets, rates) = (&mut self.packets, &mut self.rates);
        match kind {
            Kind::Loss => packets.loss = 0.0,
            Kind::Duplicate => packets.duplicate = 0.0,
            Kind::Reorder => packets.reorder = 0.0,
            Kind::Tail => packets.tail = 0.0,
            Kind::Corrupt => packets.corrupt = 0.0,
            Kind::Truncate => packets.truncate = 0.0,
            Kind::Partition => rates.partition_us = 0,
            Kind::OneWay => rates.one_way_us = 0,
            Kind::Clog => rates.clog_us = 0,
            Kind::Flutter => rates.flutter_us = 0,
            Kind::Kill => rates.kill_us = 0,
            Kind::Power => rates.power_us = 0,
            Kind::Recovery => self.recovery = 0.0,
            Kind::Blackout => rates.blackout_us = 0,
            Kind::Pause => rates.pause_us = 0,
            Kind::Rot => self.rot = 0.0,
            Kind::Amnesia => self.amnesia = 0.0,
            Kind::DataLoss => self.data_loss = 0.0,
            Kind::OldFormat => self.old_format = false,
            Kind::StoreError => rates.store_error_us = 0,
            Kind::StoreFull => rates.store_full_us = 0,
            Kind::StoreDamage => rates.store_damage_us = 0,
            Kind::StoreStall => rates.store_stall_us = 0,
            Kind::SlowJob => (self.job_us, self.hoarder) = (2_000, None),
            Kind::Skew => self.skew_ms = 0,
            Kind::Drift => self.drift_ppm = 0,
            Kind::Jump => rates.jump_us = 0,
            Kind::Late => self.late_us = 0,
            Kind::Quit => self.quit = 0.0,
            Kind::Crowd => self.clients = self.clients.min(8),
            Kind::Eager => self.most_pending = MOST_PENDING,
            Kind::Hot => self.hot = false,
            Kind::Large => self.large = 0.0,
            Kind::Forget => self.max_sessions = 10_000,
            Kind::Logs => self.with_logs(1),
            Kind::Flash => self.flash = None,
            Kind::FlashStall => rates.flash_stall_us = 0,
            Kind::FlashError => rates.flash_error_us = 0,
            Kind::FlashFull => rates.flash_full_us = 0,
            Kind::Gangs => self.gangs = false,
            Kind::Expiry => self.expiry = false,
            Kind::Amplify => self.work_bytes = 0,
            Kind::OwnLoops => self.own_loops = false,
            Kind::Lull => self.lull_us = 0,
            Kind::Members => (rates.members_us, self.spares) = (0, 0),
            Kind::Wall => rates.wall_us = 0,
            Kind::FlashAstray => rates.flash_astray_us = 0,
            Kind::FlashRot => (self.flash_rot, rates.flash_rot_us) = (0.0, 0),
            // Empty storage is a new replica's only where replicas are founders.
            Kind::Founding => (self.founding, rates.emptied_us, rates.older_us) = (false, 0, 0),
            Kind::Emptied => rates.emptied_us = 0,
            Kind::OlderStorage => rates.older_us = 0,
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fault_occurs_in_some_plans_and_can_be_switched_off() {
        let plans: Vec<Plan> = (0..500).map(Plan::draw).collect();
        for &kind in Kind::ALL {
            let with = plans.iter().filter(|plan| plan.has(kind)).count();
            assert!((5..=450).contains(&with), "{kind}: in {with} plans");
            assert!(
                plans
                    .iter()
                    .all(|plan| !plan.clone().without(kind).has(kind))
            );
            assert_eq!(kind.name().parse(), Ok(kind));
        }
        assert!("flood".parse::<Kind>().is_err());
        let table = include_str!("../../../docs/testing.md");
        for &kind in Kind::ALL {
            let told = table.contains(&format!("`{kind}`"));
            assert!(told, "docs/testing.md does not describe {kind}");
        }
        assert_eq!(Plan::draw(7), Plan::draw(7));
    }
}

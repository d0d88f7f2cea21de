//! What a replica tells about itself: counters for INFO and metrics, and the status that `ctl`
//! shows.

use cyclone_consensus::{FlashStatus, Role};
use cyclone_store::WorkDone;

use crate::archive::ArchiveStatus;
use crate::flash::Durability;
use crate::health::StoreState;
use crate::node::Node;
use crate::requests::Outcome;

/// Events since the start. Each only grows.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counters {
    /// Write commands that arrived, refused ones included.
    pub writes: u64,
    /// Reads that arrived, refused ones included.
    pub reads: u64,
    /// Requests refused as "busy", for whatever reason: a full queue or log, logs on their way to
    /// another replica, a store or flash without progress.
    pub refused_busy: u64,
    /// Commands refused because they need more work than one may do.
    pub refused_work: u64,
    /// Requests answered "outcome unknown".
    pub outcome_unknown: u64,
    /// Reads that were refused because the store is damaged.
    pub refused_damaged: u64,
    /// Requests refused because this replica does not lead.
    pub refused_not_leader: u64,
    /// Requests that a new leader discarded: certainly not executed.
    pub discarded: u64,
    /// Operations over several logs that were taken in.
    pub gangs: u64,
    /// Of those, the ones that a log did not take its share of.
    pub gangs_aborted: u64,
    /// Packets that did not parse or said nonsense.
    pub malformed: u64,
    /// Appends dropped because this replica's log was full; the leader sends them again.
    pub dropped_full: u64,
    /// Times the store would have blocked the loop and a worker took over.
    pub store_stalls: u64,
    /// Times the store began to make no progress for a second although something waited for it.
    pub store_timeouts: u64,
    /// The same of flash.
    pub flash_timeouts: u64,
    /// Times the store refused something for want of room.
    pub store_no_space: u64,
    /// Times the store could not read something back.
    pub store_damaged: u64,
    /// Times this replica, as leader, handed leadership over because its store or flash made no
    /// progress or was damaged.
    pub handovers: u64,
    /// Reads that a worker had to do.
    pub slow_reads: u64,
    /// Checkpoints installed from another replica.
    pub snapshots_installed: u64,
    /// Checkpoints made for others.
    pub snapshots_made: u64,
    /// Bytes of requests gathered to be read, because they lay in several frames.
    pub gathered_bytes: u64,
    /// Longest time between two steps beyond a tick, in microseconds: how long this machine kept
    /// the loop waiting.
    pub longest_gap_us: u64,
    /// Times the loop was lent the highest priority because others kept it from its CPU.
    pub helped: u64,
}

impl Counters {
    /// Counts an answer that says that something was not done, or may not have been.
    pub(crate) fn note_outcome(&mut self, outcome: &Outcome) {
        match outcome {
            Outcome::Busy => self.refused_busy += 1,
            Outcome::Unknown => self.outcome_unknown += 1,
            Outcome::Damaged => self.refused_damaged += 1,
            Outcome::NotLeader(_) => self.refused_not_leader += 1,
            Outcome::Lost => self.discarded += 1,
            Outcome::Done(_) | Outcome::TooLarge => {}
        }
    }

    /// Adds what was counted elsewhere.
    pub(crate) fn add(&mut self, other: &Counters) {
        let Counters {
            writes,
            reads,
            refused_busy,
            refused_work,
            outcome_unknown,
            refused_damaged,
            refused_not_leader,
            discarded,
            gangs,
            gangs_aborted,
            malformed,
            dropped_full,
            store_stalls,
            store_timeouts,
            flash_timeouts,
            store_no_space,
            store_damaged,
            handovers,
            slow_reads,
            snapshots_installed,
            snapshots_made,
            gathered_bytes,
            longest_gap_us,
            helped,
        } = other;
        self.writes += writes;
        self.reads += reads;
        self.refused_busy += refused_busy;
        self.refused_work += refused_work;
        self.outcome_unknown += outcome_unknown;
        self.refused_damaged += refused_damaged;
        self.refused_not_leader += refused_not_leader;
        self.discarded += discarded;
        self.gangs += gangs;
        self.gangs_aborted += gangs_aborted;
        self.malformed += malformed;
        self.dropped_full += dropped_full;
        self.store_stalls += store_stalls;
        self.store_timeouts += store_timeouts;
        self.flash_timeouts += flash_timeouts;
        self.store_no_space += store_no_space;
        self.store_damaged += store_damaged;
        self.handovers += handovers;
        self.slow_reads += slow_reads;
        self.snapshots_installed += snapshots_installed;
        self.snapshots_made += snapshots_made;
        self.gathered_bytes += gathered_bytes;
        self.longest_gap_us = self.longest_gap_us.max(*longest_gap_us);
        self.helped += helped;
    }
}

/// One physical log as this replica sees it.
#[derive(Clone, Debug)]
pub struct LogStatus {
    /// The log's number.
    pub log: u16,
    /// `leader`, `follower`, `candidate`, `pre-candidate`; `founding`, `recovering` or `diverged`
    /// where the replica is no ordinary member.
    pub role: &'static str,
    /// The current term.
    pub term: u64,
    /// The leader, if known.
    pub leader: Option<u64>,
    /// First index still in the ring.
    pub first: u64,
    /// Last index in the ring.
    pub last: u64,
    /// Commit index.
    pub commit: u64,
    /// Applied index.
    pub applied: u64,
    /// Index up to which the store survives a crash without the log.
    pub flushed: u64,
    /// The state's clock less this machine's wall clock, in milliseconds.
    pub clock_offset_ms: i64,
    /// Bytes of the ring in use.
    pub used_bytes: u64,
    /// Size of the ring's record area.
    pub capacity_bytes: u64,
    /// The second level, if there is one.
    pub flash: Option<FlashStatus>,
    /// The archive, if there is one.
    pub archive: Option<ArchiveStatus>,
    /// Leader only: (replica, index it is known to hold, heard from lately).
    pub peers: Vec<(u64, u64, bool)>,
}

/// A replica's whole status.
#[derive(Clone, Debug)]
pub struct Status {
    /// The replica's number.
    pub id: u64,
    /// The cluster.
    pub cluster_id: u128,
    /// What an acknowledgement waits for: `nvm` or `flash`.
    pub durability: &'static str,
    /// `power-loss`, `process-crash` or `nothing`.
    pub survives: String,
    /// What the region is, for people.
    pub region: String,
    /// Per physical log.
    pub logs: Vec<LogStatus>,
    /// What is known of the store.
    pub store: StoreState,
    /// What the store said, where it is damaged or its disk full.
    pub store_error: Option<String>,
    /// How long the store has made no progress although something waits for it, in microseconds.
    pub store_waits_us: u64,
    /// The same of flash.
    pub flash_waits_us: u64,
    /// This machine's wall clock less the time that a majority of the voters' clocks agree on, in
    /// milliseconds, where that is known.
    pub clock_offset_ms: Option<i64>,
    /// Scans that hold a snapshot now.
    pub held_snapshots: u64,
    /// Snapshots held for `ctl snapshot save`, also while they are made: 0 or 1.
    pub held_backups: u64,
    /// How much work calls of the store have done.
    pub work_done: WorkDone,
    /// Events since the start.
    pub counters: Counters,
}

impl LogStatus {
    /// How many entries a peer is not known to hold.
    pub fn behind(&self, matched: u64) -> u64 {
        self.last.saturating_sub(matched)
    }
}

impl Status {
    /// What the replica is: what it is in log 0, unless it is no ordinary member in any of them.
    pub fn role(&self) -> &'static str {
        let mut roles = self.logs.iter().map(|log| log.role);
        let special = ["diverged", "recovering", "founding"];
        let found = roles.clone().find(|role| special.contains(role));
        found.or(roles.next()).unwrap_or("follower")
    }
}

pub(crate) fn role_name(role: Role) -> &'static str {
    match role {
        Role::Leader => "leader",
        Role::Follower => "follower",
        Role::Candidate => "candidate",
        Role::PreCandidate => "pre-candidate",
    }
}

impl Node {
    /// Events since the start.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The status at this moment.
    pub fn status(&self) -> Status {
        let logs = self.logs.iter().enumerate().map(|(at, log)| {
            let status = log.group.status();
            LogStatus {
                log: log.id,
                role: self.bootstrap_status(at).unwrap_or(role_name(status.role)),
                term: status.term,
                leader: status.leader,
                first: status.first,
                last: status.last,
                commit: status.commit,
                applied: log.applied,
                flushed: self.store.flushed(log.id),
                clock_offset_ms: self.state_clock_offset_ms(usize::from(log.id)),
                used_bytes: status.used_bytes,
                capacity_bytes: status.capacity_bytes,
                flash: log.group.flash_status(self.now_us()),
                archive: self.archive.as_ref().map(|archive| archive.status(log)),
                peers: status
                    .peers
                    .iter()
                    .map(|peer| (peer.id, peer.matched, self.is_alive(peer.id)))
                    .collect(),
            }
        });
        Status {
            id: self.config.id,
            cluster_id: self.config.cluster_id,
            durability: self
                .config
                .flash
                .as_ref()
                .map_or(Durability::Nvm, |flash| flash.durability)
                .name(),
            survives: self.survives.to_string(),
            region: self.region_description.clone(),
            logs: logs.collect(),
            store: self.store_state(),
            store_error: self.store_error().map(str::to_owned),
            store_waits_us: self.without_progress_us().0,
            flash_waits_us: self.without_progress_us().1,
            clock_offset_ms: self.clock_offset_ms(),
            held_snapshots: self.store.held_snapshots() as u64,
            held_backups: self.held_backups(),
            work_done: self.store.work_done(),
            counters: self.counters,
        }
    }
}

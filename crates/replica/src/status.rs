//! What a replica tells about itself: counters for INFO and metrics, and the status that `ctl` shows.

use cyclone_consensus::{FlashStatus, Role};

use crate::archive::ArchiveStatus;
use crate::flash::Durability;
use crate::node::Node;

/// Events since the start. Each only grows.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counters {
    /// Write commands that arrived, refused ones included.
    pub writes: u64,
    /// Reads that arrived, refused ones included.
    pub reads: u64,
    /// Requests refused because a queue or the log was full.
    pub refused_busy: u64,
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
    /// Reads that a worker had to do.
    pub slow_reads: u64,
    /// Checkpoints installed from another replica.
    pub snapshots_installed: u64,
    /// Checkpoints made for others.
    pub snapshots_made: u64,
    /// Bytes of requests gathered to be read, because they lay in several frames.
    pub gathered_bytes: u64,
    /// Longest time between two steps beyond a tick, in microseconds: how long this machine kept the loop waiting.
    pub longest_gap_us: u64,
    /// Times the loop was lent the highest priority because others kept it from its CPU.
    pub helped: u64,
}

impl Counters {
    /// Adds what was counted elsewhere.
    pub(crate) fn add(&mut self, other: &Counters) {
        let Counters {
            writes,
            reads,
            refused_busy,
            gangs,
            gangs_aborted,
            malformed,
            dropped_full,
            store_stalls,
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
        self.gangs += gangs;
        self.gangs_aborted += gangs_aborted;
        self.malformed += malformed;
        self.dropped_full += dropped_full;
        self.store_stalls += store_stalls;
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
    /// `leader`, `follower`, `candidate`, `pre-candidate`.
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
    /// Index up to which the store survives a crash by itself.
    pub flushed: u64,
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
    /// Scans that hold a snapshot now.
    pub held_snapshots: u64,
    /// Events since the start.
    pub counters: Counters,
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
        let logs = self.logs.iter().map(|log| {
            let status = log.group.status();
            LogStatus {
                log: log.id,
                role: role_name(status.role),
                term: status.term,
                leader: status.leader,
                first: status.first,
                last: status.last,
                commit: status.commit,
                applied: log.applied,
                flushed: self.store.flushed(log.id),
                used_bytes: status.used_bytes,
                capacity_bytes: status.capacity_bytes,
                flash: log.group.flash_status(self.now_us()),
                archive: self.archive.as_ref().map(|archive| archive.status(log)),
                peers: status
                    .peers
                    .iter()
                    .map(|peer| (peer.id, peer.matched, peer.recent_active))
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
            held_snapshots: self.store.held_snapshots() as u64,
            counters: self.counters,
        }
    }
}

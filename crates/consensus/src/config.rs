//! The configuration of a group.

use cyclone_wire::raftmsg::Members;

use crate::error::ConsensusError;

/// Settings of one replica of one group.
#[derive(Clone, Debug)]
pub struct Config {
    /// The physical log's number; messages of other logs are refused.
    pub log: u16,
    /// This replica; not 0.
    pub id: u64,
    /// The first configuration's voters. A ring that already knows its membership uses that. Empty:
    /// a replica that joins; it neither votes nor campaigns until a leader has told it of a
    /// membership.
    pub voters: Vec<u64>,
    /// The cluster, which membership entries name.
    pub cluster: u128,
    /// The membership that the store knows, with the index of the entry that brought it. It counts
    /// where the ring knows less: a crash came between the installation of a checkpoint and the
    /// ring's reset.
    pub members: Option<(u64, Members)>,
    /// Last index that the store has applied; entries behind it are delivered.
    pub applied: u64,
    /// Term of the entry at `applied`; needed only when the store is ahead of the ring (a crash
    /// between the installation of a checkpoint and the ring's reset). 0 if not known.
    pub applied_term: u64,
    /// Ticks without a leader before an election; the real time-out lies between this and twice as
    /// much.
    pub election_ticks: u32,
    /// Ticks that this replica waits longer before an election than others are sure to be free to
    /// vote: where several logs want one leader, one of them is to decide and the others to follow.
    pub election_delay_ticks: u32,
    /// Ticks between heartbeats.
    pub heartbeat_ticks: u32,
    /// Ask before campaigning, so that a replica that comes back does not disturb a working leader.
    pub pre_vote: bool,
    /// A leader that hears from no majority for an election time-out steps down.
    pub check_quorum: bool,
    /// One append per peer and burst instead of one per proposal.
    pub batch_append: bool,
    /// Tell followers of every commitment at once, instead of with the next append or heartbeat.
    /// Costs two messages per peer and burst; only useful where followers answer reads.
    pub eager_commit: bool,
    /// Appends to one peer that may be unacknowledged.
    pub max_inflight_msgs: usize,
    /// Payload bytes of those; one entry always goes.
    pub max_inflight_bytes: u64,
    /// Payload bytes in one message on the wire; longer appends are split. An entry that is longer
    /// goes alone.
    pub max_message_bytes: u64,
    /// Payload bytes read from the log at once for one peer that is behind.
    pub max_append_bytes: u64,
    /// Payload bytes that may be proposed and not yet committed.
    pub max_uncommitted_bytes: u64,
    /// Payload bytes of one entry; the ring's own limit may be lower.
    pub max_entry_bytes: u64,
    /// Of two equally good candidates the one of higher priority wins.
    pub priority: i64,
    /// Where election time-outs come from; differs between replicas.
    pub seed: u64,
}

impl Config {
    /// The default settings: 10 ticks per election, 2 per heartbeat, pre-vote, check-quorum,
    /// batched appends.
    pub fn new(log: u16, id: u64, voters: &[u64]) -> Self {
        Config {
            log,
            id,
            voters: voters.to_vec(),
            cluster: 0,
            members: None,
            applied: 0,
            applied_term: 0,
            election_ticks: 10,
            election_delay_ticks: 0,
            heartbeat_ticks: 2,
            pre_vote: true,
            check_quorum: true,
            batch_append: true,
            eager_commit: false,
            max_inflight_msgs: 256,
            max_inflight_bytes: 1 << 20,
            max_message_bytes: 256 << 10,
            max_append_bytes: 1 << 20,
            max_uncommitted_bytes: 64 << 20,
            max_entry_bytes: 8 << 20,
            priority: 0,
            seed: id,
        }
    }

    pub(crate) fn check(&self) -> Result<(), ConsensusError> {
        let require = |holds: bool, what| {
            if holds {
                Ok(())
            } else {
                Err(ConsensusError::Config(what))
            }
        };
        require(self.id != 0, "replica id 0")?;
        let joins = self.voters.is_empty();
        require(
            joins || Members::of_voters(&self.voters).is_sane(),
            "voters",
        )?;
        require(self.heartbeat_ticks > 0, "heartbeat ticks")?;
        require(
            self.election_ticks > self.heartbeat_ticks,
            "election ticks must exceed heartbeat ticks",
        )?;
        require(self.election_ticks < 1 << 20, "election ticks")?;
        require(self.election_delay_ticks < 1 << 20, "election delay")?;
        require(self.max_inflight_msgs > 0, "inflight messages")?;
        require(self.max_entry_bytes <= u64::from(u32::MAX), "entry bytes")
    }

    pub(crate) fn raft(&self, applied: u64) -> raft::Config {
        raft::Config {
            id: self.id,
            election_tick: self.election_ticks as usize,
            heartbeat_tick: self.heartbeat_ticks as usize,
            applied,
            // raft-rs would count the bytes of its encoding; our limits count payloads and are kept
            // elsewhere.
            max_size_per_msg: raft::NO_LIMIT,
            max_uncommitted_size: raft::NO_LIMIT,
            max_committed_size_per_ready: raft::NO_LIMIT,
            max_inflight_msgs: self.max_inflight_msgs,
            check_quorum: self.check_quorum,
            pre_vote: self.pre_vote,
            min_election_tick: 0,
            max_election_tick: (2 * self.election_ticks + self.election_delay_ticks) as usize,
            read_only_option: raft::ReadOnlyOption::Safe,
            skip_bcast_commit: !self.eager_commit,
            batch_append: self.batch_append,
            priority: self.priority,
        }
    }
}

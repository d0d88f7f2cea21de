//! What a group tells about itself.

/// What a replica is in its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Takes entries from the leader.
    Follower,
    /// Asks whether it would be elected.
    PreCandidate,
    /// Asks for votes.
    Candidate,
    /// Takes proposals.
    Leader,
}

/// How the leader sends to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerState {
    /// Looking for the last common entry.
    Probe,
    /// Streaming.
    Replicate,
    /// Waiting for a checkpoint to be installed.
    Snapshot,
}

/// A peer as the leader sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerStatus {
    /// The peer.
    pub id: u64,
    /// The last entry it is known to hold.
    pub matched: u64,
    /// The next entry to send.
    pub next: u64,
    /// How it is sent to.
    pub state: PeerState,
    /// Whether it was heard from in the last election time-out.
    pub recent_active: bool,
}

/// The group at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// What this replica is.
    pub role: Role,
    /// The current term.
    pub term: u64,
    /// The leader, if known.
    pub leader: Option<u64>,
    /// First index in the log, in either level.
    pub first: u64,
    /// Last index, proposals that are not persisted yet included.
    pub last: u64,
    /// Commit index.
    pub commit: u64,
    /// Index that the store is known to have applied.
    pub applied: u64,
    /// Bytes of the ring's record area in use.
    pub used_bytes: u64,
    /// Size of the ring's record area in bytes.
    pub capacity_bytes: u64,
    /// Entries and payload bytes that are staged and not persisted yet.
    pub staged: (usize, u64),
    /// Payload bytes proposed and not committed yet; 0 unless leader.
    pub uncommitted_bytes: u64,
    /// The peers; empty unless leader.
    pub peers: Vec<PeerStatus>,
}

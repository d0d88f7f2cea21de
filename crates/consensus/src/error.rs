//! What can go wrong, and what the caller may do about it.

use cyclone_wal::ring::RingError;
use cyclone_wire::codec::DecodeError;
use cyclone_wire::raftmsg::RaftKind;

/// The group cannot go on, or cannot begin. The process should end; a restart recovers.
#[derive(Debug, thiserror::Error)]
pub enum ConsensusError {
    /// A setting that makes no sense.
    #[error("bad setting: {0}")]
    Config(&'static str),
    /// The membership kept with the log makes no sense or leaves this replica out.
    #[error("replica {id} is no member of this log, or the membership kept with it is damaged")]
    NotMember {
        /// This replica.
        id: u64,
    },
    /// The store lacks entries that the log no longer has.
    #[error("the store has applied up to {applied}, but the log begins at {first}")]
    AppliedBelowLog {
        /// The store's applied index.
        applied: u64,
        /// The log's first index.
        first: u64,
    },
    /// The store is ahead of the log and does not know the term it is at.
    #[error("the store has applied up to {applied}, but the log ends at {last}")]
    AppliedBeyondLog {
        /// The store's applied index.
        applied: u64,
        /// The log's last index.
        last: u64,
    },
    /// The ring failed.
    #[error("ring: {0}")]
    Ring(#[from] RingError),
    /// What the store lacks cannot be read from flash.
    #[error("flash: {0}")]
    Flash(cyclone_wal::flash::FetchError),
    /// raft-rs refused what it must not refuse.
    #[error("raft: {0}")]
    Raft(String),
    /// A membership entry that does not follow from the membership before it, or does not read
    /// back.
    #[error("the membership entry {index} cannot be carried out")]
    Members {
        /// The entry.
        index: u64,
    },
    /// The group's own books do not agree with raft-rs.
    #[error("contradiction within the group: {0}")]
    Internal(&'static str),
    /// An earlier call failed.
    #[error("the group failed before")]
    Failed,
}

/// Why a proposal was not taken. Nothing was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProposeError {
    /// Only the leader takes proposals.
    #[error("not the leader (that is {leader:?})")]
    NotLeader {
        /// The leader, if known.
        leader: Option<u64>,
    },
    /// Leadership is being handed over.
    #[error("leadership is being handed to {to}")]
    Transferring {
        /// The next leader.
        to: u64,
    },
    /// The ring has no room for the moment.
    #[error("{needed} bytes or slots needed in the log, {free} free")]
    Full {
        /// What the entry takes, as far as known.
        needed: u64,
        /// What is left.
        free: u64,
    },
    /// Too much is waiting for commitment.
    #[error("{bytes} bytes wait for commitment, the limit is {limit}")]
    Uncommitted {
        /// Payload bytes waiting, this entry included.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// The entry will never fit.
    #[error("an entry of {len} bytes, the limit is {limit}")]
    TooLarge {
        /// Payload bytes.
        len: u64,
        /// The limit.
        limit: u64,
    },
    /// A change of the membership is in progress, or this leader has not committed an entry of its
    /// term yet.
    #[error("another change of the membership may be in progress")]
    Changing,
    /// A membership that makes no sense.
    #[error("the membership makes no sense")]
    BadMembers,
    /// A replica that is to vote does not have the entry yet by which it takes part: it must be a
    /// learner first.
    #[error("{id} is not known to take part yet, so it cannot vote")]
    Behind {
        /// The replica.
        id: u64,
    },
}

/// Why a read, a transfer or a campaign could not begin. Nothing was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// Only the leader can do it.
    #[error("not the leader (that is {leader:?})")]
    NotLeader {
        /// The leader, if known.
        leader: Option<u64>,
    },
    /// The leader has not committed an entry of its term yet, or the log is not persisted: try
    /// again.
    #[error("not yet")]
    NotYet,
    /// Too many reads wait for confirmation.
    #[error("{waiting} reads wait already")]
    Busy {
        /// How many.
        waiting: usize,
    },
    /// No such voter.
    #[error("{id} is no voter")]
    NotVoter {
        /// The replica named.
        id: u64,
    },
}

/// Why a message was dropped. The group is unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StepError {
    /// The message contradicts itself.
    #[error("{0}")]
    Malformed(#[from] DecodeError),
    /// The payloads' length is not what the entries say.
    #[error("{found} payload bytes, the entries say {said}")]
    PayloadLength {
        /// Bytes handed over.
        found: u64,
        /// Bytes promised.
        said: u64,
    },
    /// Of another log, for another replica, or from an unknown sender.
    #[error("from {from} to {to} in log {log}: not for this group")]
    Misdirected {
        /// The log.
        log: u16,
        /// The sender.
        from: u64,
        /// The receiver.
        to: u64,
    },
    /// A term so far ahead that no election got there.
    #[error("term {term} is far beyond {current}")]
    TermTooFar {
        /// The message's term.
        term: u64,
        /// This replica's term.
        current: u64,
    },
    /// Claims leadership in a term that has another leader.
    #[error("{from} claims term {term}, which has another leader")]
    TwoLeaders {
        /// The sender.
        from: u64,
        /// The term.
        term: u64,
    },
    /// An entry at or below the commit index differs from the committed one.
    #[error(
        "entry {index} is committed here with term {own_term}, the leader has one of term {leader_term} there (committed up to {commit})"
    )]
    ContradictsCommitted {
        /// The entry.
        index: u64,
        /// This replica's commit index.
        commit: u64,
        /// The entry's term here.
        own_term: u64,
        /// The term of the leader's entry.
        leader_term: u64,
    },
    /// An index beyond the end of this replica's log, where the sender must know better.
    #[error("index {index} is beyond the last index {last}")]
    BeyondLog {
        /// The index.
        index: u64,
        /// This replica's last index.
        last: u64,
    },
    /// An entry of a kind this version does not know.
    #[error("entry {index} is of unknown kind {kind}")]
    UnknownEntry {
        /// The entry.
        index: u64,
        /// Its kind.
        kind: u8,
    },
    /// A membership entry that does not read, or is of another cluster.
    #[error("the membership entry {index} makes no sense")]
    BadMembers {
        /// The entry.
        index: u64,
    },
    /// An entry that this replica's ring can never hold.
    #[error("entry {index} has {len} bytes, the limit is {limit}")]
    TooLarge {
        /// The entry.
        index: u64,
        /// Payload bytes.
        len: u64,
        /// The limit.
        limit: u64,
    },
    /// The ring has no room for the moment; the leader will send again.
    #[error("{needed} bytes or slots needed in the log, {free} free")]
    Full {
        /// What the entries take, as far as known.
        needed: u64,
        /// What is left.
        free: u64,
    },
    /// An answer that cannot be: what it answers has not been sent yet.
    #[error("{kind:?} before the question was sent")]
    Early {
        /// The message.
        kind: RaftKind,
    },
    /// Snapshots do not go through `step`: fetch the checkpoint, then call `install_snapshot`.
    #[error("{kind:?} is not for step")]
    NotForStep {
        /// The message.
        kind: RaftKind,
    },
    /// raft-rs would not have it.
    #[error("refused")]
    Refused,
}

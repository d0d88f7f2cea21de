//! What came of operations, and what arrived.

use crate::operation::{ChainId, ConnectionId};

/// Something an endpoint has to tell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// An operation's effect is in the target's memory.
    Completed {
        /// On which connection.
        connection: ConnectionId,
        /// The caller's context.
        context: u64,
        /// The word before, for atomics; otherwise 0.
        value: u64,
        /// The bytes, for reads; otherwise empty.
        bytes: Vec<u8>,
    },
    /// A chain's operation has taken effect at every member.
    ChainCompleted {
        /// On which chain.
        chain: ChainId,
        /// The caller's context.
        context: u64,
        /// One word per member, for compare-swap; otherwise empty.
        values: Vec<u64>,
    },
    /// An operation failed, and its connection with it. Its effect is unknown: none, some, or all
    /// of it.
    Failed {
        /// On which connection.
        connection: ConnectionId,
        /// The operation's context.
        context: u64,
        /// Why.
        failure: Failure,
    },
    /// A chain's operation failed, and the chain with it.
    ChainFailed {
        /// On which chain.
        chain: ChainId,
        /// The operation's context.
        context: u64,
        /// Why.
        failure: Failure,
    },
    /// A message from a peer. Answers go to the same connection.
    Received {
        /// From whom; a connection that the peer opened has an id here too.
        connection: ConnectionId,
        /// What it sent.
        bytes: Vec<u8>,
    },
    /// A connection ended without an operation to blame: the peer closed it, or is gone.
    Disconnected {
        /// Which.
        connection: ConnectionId,
    },
}

/// Why an operation failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{operation}: {kind}")]
pub struct Failure {
    /// The operation, for people: its name, offset and length.
    pub operation: String,
    /// The kind of failure, for programs.
    pub kind: FailureKind,
}

/// The kinds of failure.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FailureKind {
    /// The key's token is not the registration's.
    #[error("the token is not this memory's")]
    WrongToken,
    /// There is no such registration, or no longer.
    #[error("the memory is not registered, or was revoked")]
    NotRegistered,
    /// The range leaves the registration.
    #[error("the range is outside the registered memory")]
    OutOfBounds,
    /// The registration does not allow this operation.
    #[error("the registration does not allow it")]
    NotAllowed,
    /// An atomic's offset is no multiple of 8.
    #[error("the word is not aligned to 8 bytes")]
    Misaligned,
    /// An append found no posted segment within its bound of waiting; later ones may. The
    /// connection lives on.
    #[error("the receiver has no segment posted")]
    NoSegment,
    /// The append queue was closed by its receiver.
    #[error("the receiver has closed the queue")]
    Closed,
    /// The peer does not answer, or its process ended.
    #[error("the peer is gone")]
    PeerGone,
    /// An earlier operation of this connection failed.
    #[error("the connection broke before")]
    Broken,
    /// The provider refused, in its own words.
    #[error("{0}")]
    Provider(String),
}

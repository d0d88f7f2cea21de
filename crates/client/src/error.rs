//! How a request can end other than well.

use cyclone_wire::reply::Failure;

/// Why a request has no answer. What matters most is whether it may have been executed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ClientError {
    /// Certainly not executed: every attempt was refused by a replica that had done nothing.
    #[error("not done: {0}")]
    NotDone(NotDone),
    /// Some attempt may have been executed, now or later.
    #[error("outcome unknown: no replica answered in time")]
    Unknown,
    /// A write was executed, and its answer is longer than a message.
    #[error("done, but its answer is longer than a message")]
    AnswerTooLong,
    /// The state machine refused it; it changed nothing.
    #[error("{0}")]
    Refused(#[from] Failure),
    /// The replica answered something that this request cannot be answered with.
    #[error("unexpected answer")]
    Unexpected,
    /// The system refused a call.
    #[error("{0}")]
    Io(String),
}

/// Why a request was certainly not executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotDone {
    /// No replica leads, or none that answers.
    #[error("no leader was found in time")]
    NoLeader,
    /// The leader was overloaded until the deadline.
    #[error("overloaded")]
    Busy,
    /// It exceeds the cluster's limits.
    #[error("too large")]
    TooLarge,
    /// The replica could not read it.
    #[error("malformed")]
    Malformed,
    /// It was never sent.
    #[error("not sent in time")]
    NotSent,
    /// Too many requests wait in this client.
    #[error("too many requests wait")]
    QueueFull,
}

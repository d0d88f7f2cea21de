//! What the state machine answers.

/// The answer to a command or a query.
#[derive(Clone, Debug, PartialEq)]
pub enum Reply {
    /// Done.
    Ok,
    /// No such key, or a condition was not met.
    Nil,
    /// A number.
    Int(i64),
    /// A byte string.
    Bytes(Vec<u8>),
    /// Several answers.
    Array(Vec<Reply>),
    /// The command was applied and refused; it changed nothing.
    Failed(Failure),
}

/// Why the state machine refused a command. Every replica refuses alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The value (or the argument) is not a 64-bit signed integer.
    #[error("value is not an integer or out of range")]
    NotInteger,
    /// The value is not a float.
    #[error("value is not a valid float")]
    NotFloat,
    /// The sum leaves the range of 64-bit signed integers.
    #[error("increment or decrement would overflow")]
    Overflow,
    /// The sum is not a finite number.
    #[error("increment would produce NaN or Infinity")]
    NotFinite,
    /// The result would be longer than the configured largest value.
    #[error("string exceeds maximum allowed size")]
    TooLong,
    /// The session has expired or never existed: whether the command was executed before is not
    /// known, and it was not executed now.
    #[error("session expired")]
    SessionExpired,
    /// The session's seq lies below what the client itself has acknowledged.
    #[error("sequence already acknowledged")]
    StaleSequence,
    /// The engine does not offer this command.
    #[error("not supported by this engine")]
    Unsupported,
    /// An expectation of the batch does not hold; nothing was done.
    #[error("condition failed")]
    ConditionFailed,
    /// The cursor's snapshot is not held here: it was not used for a minute, the leader or its
    /// state has changed, or the scan is over.
    #[error(
        "the snapshot of this cursor is gone (another leader, or not used for 60 s): begin again with cursor 0"
    )]
    SnapshotGone,
    /// As many scans hold a snapshot as may.
    #[error("too many scans hold a snapshot: finish one, or wait 60 s after it was used last")]
    TooManySnapshots,
    /// The reply, or what a transaction's commands answer together, would take too much memory. Of
    /// a transaction the command that did not fit changed nothing; the others count.
    #[error(
        "the reply would be longer than 64 MiB (of a transaction, or a read through the log: 16 MiB): ask for less at a time"
    )]
    ReplyTooLong,
    /// The command would do more work than its entry allows ([`crate::work`]); it changed nothing,
    /// nor did any part of it.
    #[error(
        "the command needs {bytes} bytes or more (keys looked up, values read and stored, replies) and may need {limit}: do less at a time"
    )]
    TooMuchWork {
        /// What it needed when it was given up, or what it needs at least.
        bytes: u64,
        /// The entry's limit.
        limit: u64,
    },
}

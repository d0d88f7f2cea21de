//! What a replica cannot live on with.

use cyclone_store::ApplyError;

/// Why a replica cannot go on. The process should end; a restart recovers.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// The store failed in a way that a retry cannot mend.
    #[error("the store failed: {0}")]
    Store(#[from] ApplyError),
    /// The log or Raft failed.
    #[error("the log failed: {0}")]
    Consensus(#[from] cyclone_consensus::ConsensusError),
    /// It was started as a new replica, and others know it as one that has lost its memory.
    #[error(
        "replica {id} knows nothing, and replica {by} knows it: {what}. A replica that has lost its memory must not come back under its \
         old id: give it a new one and use `ctl member replace`; if it has never run, it belongs to the cluster's founders and is \
         started with --bootstrap"
    )]
    Wiped {
        /// This replica.
        id: u64,
        /// Who knows it.
        by: u64,
        /// What is known.
        what: String,
    },
    /// The state of founding and recovering could not be written.
    #[error("the file BOOTSTRAP of the data directory: {0}")]
    BootstrapFile(std::io::Error),
    /// The thread that moved a log has ended, and has taken the log along.
    #[error("the loop of log {0} has ended")]
    LoopEnded(usize),
    /// The packet port failed.
    #[error("the packet port failed: {0}")]
    Port(std::io::Error),
}

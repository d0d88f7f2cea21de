//! What a log reports about itself in the node's log, each thing once.

use cyclone_consensus::{LeaderChange, StepError};

use super::PhysicalLog;

/// What was reported.
#[derive(Default)]
pub(super) struct LogOnce {
    /// The last entry of a leader's that was said to be too long for this replica.
    too_large: u64,
    /// The term and the leader that were reported last.
    leader: (u64, Option<u64>),
}

impl LogOnce {
    pub(super) fn leader(&mut self, log: u16, LeaderChange { leader, term, .. }: LeaderChange) {
        // Also who only asks for votes has another role.
        if self.leader == (term, leader) {
            return;
        }
        self.leader = (term, leader);
        match leader {
            Some(leader) => tracing::info!(log, term, "replica {leader} leads"),
            None => tracing::info!(log, term, "no replica is known to lead"),
        }
    }
}

impl PhysicalLog {
    /// Says so where a leader's entry can never be taken in: the leader sends it again and again,
    /// and commits nothing behind it without another majority.
    pub(crate) fn log_refusal(&mut self, error: &StepError) {
        if let StepError::TooLarge { index, len, limit } = error
            && self.told.too_large != *index
        {
            self.told.too_large = *index;
            tracing::error!(
                log = self.id,
                index,
                "the leader's entry of {len} bytes is longer than this node takes ({limit}): nvm_bytes or limits differ between \
                 the nodes; give this one what the leader has"
            );
        }
    }
}

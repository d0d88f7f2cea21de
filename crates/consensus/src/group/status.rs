//! What a group reports about itself.

use raft::ProgressState;

use super::Group;
use crate::status::{PeerState, PeerStatus, Status};

impl Group {
    /// The group at this moment.
    pub fn status(&self) -> Status {
        let raft = &self.raw.raft;
        let ring = &self.raw.store().ring;
        let mut peers = Vec::new();
        if self.is_leader() {
            peers.extend(raft.prs().iter().filter(|(id, _)| **id != raft.id).map(
                |(id, progress)| PeerStatus {
                    id: *id,
                    matched: progress.matched,
                    next: progress.next_idx,
                    state: match progress.state {
                        ProgressState::Probe => PeerState::Probe,
                        ProgressState::Replicate => PeerState::Replicate,
                        ProgressState::Snapshot => PeerState::Snapshot,
                    },
                    recent_active: progress.recent_active,
                },
            ));
            peers.sort_by_key(|peer| peer.id);
        }
        Status {
            role: self.role(),
            term: self.term(),
            leader: self.leader(),
            first: self.raw.store().first(),
            last: self.last_index(),
            commit: self.commit(),
            applied: raft.raft_log.applied,
            used_bytes: ring.used_bytes(),
            capacity_bytes: ring.capacity_bytes(),
            staged: (self.staging.len(), self.staging.bytes()),
            uncommitted_bytes: self.uncommitted_bytes,
            peers,
        }
    }
}

//! The planted bugs of a group: nothing in programs that are built without them.

use cyclone_wire::planted::planted;

use super::*;

impl Group {
    /// Those of an arriving message.
    pub(super) fn planted_step(&mut self, message: &mut RaftMessage, payloads: &Payload) {
        let raft = &mut self.raw.raft;
        let append = message.kind == RaftKind::Append;
        if planted!(OldTermAccepted) && append && message.term < raft.term {
            message.term = raft.term;
            raft.leader_id = message.from;
        }
        if planted!(VoteTwice) && message.kind == RaftKind::Vote && message.term == raft.term {
            (raft.vote, raft.leader_id) = (0, 0);
        }
        if planted!(FramesLeaked) && append && message.index < raft.raft_log.committed {
            std::mem::forget(payloads.clone());
        }
    }

    /// Those of time that passes.
    pub(super) fn planted_tick(&mut self) {
        if !planted!(AckInvented) || !self.is_leader() {
            return;
        }
        let (own, raft) = (self.config.id, &mut self.raw.raft);
        let peer = raft.prs().iter().map(|(id, _)| *id).find(|id| *id != own);
        let persisted = raft.raft_log.persisted;
        if let Some(progress) = peer.and_then(|peer| raft.mut_prs().get_mut(peer)) {
            progress.maybe_update(persisted);
        }
    }
}

//! Which replicas of a group are impaired: their store or flash makes no progress, has no room or
//! is damaged. Followers say so in their answers (docs/formats.md, "Raft messages"), and a leader
//! does not hand leadership to them. Raft itself ignores it: an impaired replica votes, holds
//! entries and may be elected.

use cyclone_wire::raftmsg::{RaftKind, RaftMessage};

use super::Group;
use crate::message::OutMessage;

/// What one group knows about impaired replicas.
#[derive(Default)]
pub(crate) struct Impairment {
    /// This replica is impaired.
    own: bool,
    /// The peers whose last answer said that they are.
    peers: Vec<u64>,
}

impl Group {
    /// Sets whether this replica is impaired; the next answers to the leader say so.
    pub fn set_impaired(&mut self, impaired: bool) {
        self.impairment.own = impaired;
    }

    /// Whether a peer's last answer said that it is impaired. A peer that has not answered in this
    /// term is not known to be.
    pub fn is_impaired(&self, peer: u64) -> bool {
        self.impairment.peers.contains(&peer)
    }

    /// Reads what a message that raft-rs has taken says about its sender.
    pub(crate) fn note_impairment(&mut self, message: &RaftMessage) {
        let peers = &mut self.impairment.peers;
        match message.kind {
            RaftKind::AppendResponse | RaftKind::HeartbeatResponse => {}
            _ => return,
        }
        let known = peers.iter().position(|peer| *peer == message.from);
        match (message.impaired, known) {
            (true, None) => peers.push(message.from),
            (false, Some(position)) => drop(peers.swap_remove(position)),
            _ => {}
        }
    }

    /// Writes it into the answers that leave.
    pub(crate) fn stamp_impairment(&self, messages: &mut [OutMessage]) {
        if !self.impairment.own {
            return;
        }
        for message in messages {
            let kind = message.header.kind;
            message.header.impaired =
                matches!(kind, RaftKind::AppendResponse | RaftKind::HeartbeatResponse);
        }
    }
}

//! What the owner of a group may look up in it, beside its status.

use crate::group::Group;
use crate::outbox::Committed;

impl Group {
    /// Whether the leader, if one is known, has been silent for so long that the others would vote
    /// for another.
    pub fn leader_is_silent(&self) -> bool {
        let raft = &self.raw.raft;
        !self.is_leader() && raft.election_elapsed >= raft.election_timeout()
    }

    /// Ticks until time alone makes this group do something, a heartbeat or an election; at least
    /// one.
    pub fn idle_ticks(&self) -> u64 {
        let raft = &self.raw.raft;
        let (due, elapsed) = match (self.is_leader(), self.leader()) {
            (true, _) => (raft.heartbeat_timeout(), raft.heartbeat_elapsed()),
            (false, Some(_)) => (raft.randomized_election_timeout(), raft.election_elapsed),
            (false, None) => return 1,
        };
        (due.saturating_sub(elapsed) as u64).max(1) + self.quiesced_ticks_left()
    }

    /// Whether it has heard from its leader since the last tick.
    pub fn has_leader_contact(&self) -> bool {
        !self.is_leader() && self.raw.raft.election_elapsed == 0 && !self.has_skipped_tick()
    }

    /// Whether its leader has said something since this was asked last.
    pub fn take_leader_contact(&mut self) -> bool {
        std::mem::take(&mut self.heard)
    }

    /// Whether leadership is being handed over: proposals are refused meanwhile.
    pub fn is_transferring(&self) -> bool {
        self.raw.raft.lead_transferee.is_some()
    }

    /// The last entry that an [`crate::Outbox`] has delivered as committed, or that a checkpoint
    /// stands for.
    pub fn delivered(&self) -> u64 {
        self.delivered
    }

    /// Index that the store is known to have applied.
    pub fn applied(&self) -> u64 {
        self.raw.raft.raft_log.applied
    }

    /// An entry that was delivered before, once more; `None` if the log no longer holds it.
    pub fn delivered_entry(&self, index: u64) -> Option<Committed> {
        let ring = &self.raw.store().ring;
        (index <= self.delivered && index >= ring.first_index()).then_some(())?;
        Some(Committed {
            index,
            term: ring.term(index)?,
            kind: ring.entry(index)?.kind,
            len: ring.payload_len(index)?,
        })
    }

    /// The store holds everything up to `index` by a checkpoint, and nothing behind it: entries up
    /// to there are not delivered. The log itself is brought up by its leader. It may be less than
    /// an earlier checkpoint held: what lies between was skipped for that one's sake, and is to
    /// come.
    pub fn skip_to(&mut self, index: u64) {
        self.skip_through = index;
    }

    /// The first bytes of a payload, as many as `bytes` takes; `false` if the log does not hold so
    /// many.
    pub fn peek_payload(&self, index: u64, bytes: &mut [u8]) -> bool {
        let Some(view) = self.raw.store().ring.entry(index) else {
            let stored = self.replayed(index);
            let whole = stored.filter(|stored| stored.payload.len() >= bytes.len());
            if let Some(stored) = whole {
                bytes.copy_from_slice(&stored.payload[..bytes.len()]);
            }
            return whole.is_some();
        };
        let mut at = 0;
        for segment in view.segments() {
            let take = segment.len().min(bytes.len() - at);
            bytes[at..at + take].copy_from_slice(&segment[..take]);
            at += take;
            if at == bytes.len() {
                break;
            }
        }
        at == bytes.len()
    }
}

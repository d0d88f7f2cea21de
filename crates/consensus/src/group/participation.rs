//! How much a replica takes part in its group: not at all while it is not known whether it has lost
//! storage, as a follower without a vote while it recovers, and fully (docs/adr/0075).
//!
//! | [`Participation`] | appends, heartbeats, snapshots | votes, campaigns |
//! |---|---|---|
//! | `None` | ignored: an acknowledgement could count for a leader that has been replaced | no |
//! | `Follower` | as Raft has it | no |
//! | `Full` | as Raft has it | as Raft has it |

use super::*;

/// How much a replica takes part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Participation {
    /// Every message is ignored.
    None,
    /// Follows a leader; grants no vote and begins no election.
    Follower,
    /// As Raft has it.
    #[default]
    Full,
}

/// A leader's claim that this replica has acknowledged what it does not hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LostEntries {
    /// The leader.
    pub leader: u64,
    /// Its term.
    pub term: u64,
    /// Up to which entry this replica has acknowledged the log in that term.
    pub acknowledged: u64,
    /// The last entry that this replica holds.
    pub last: u64,
    /// The term that this replica knew.
    pub known_term: u64,
}

/// What shows that this replica's history is not its cluster's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Diverged {
    /// An entry that this replica has committed, and that its leader has another one for.
    Entry {
        /// The entry.
        index: u64,
        /// Its term here.
        own_term: u64,
        /// The term of the leader's entry.
        leader_term: u64,
        /// The leader.
        leader: u64,
    },
    /// By its own log, this replica is the only member that its cluster has ever had, and another
    /// one takes part in the cluster.
    OnlyMember {
        /// The other one.
        other: u64,
    },
}

impl Group {
    /// How much this replica takes part.
    pub fn participation(&self) -> Participation {
        self.participation
    }

    /// Sets how much this replica takes part. One that does not take part fully leads no longer.
    pub fn set_participation(&mut self, participation: Participation) {
        self.participation = participation;
        if participation != Participation::Full {
            self.retire();
        }
    }

    /// Whether this replica does not take part enough to handle a message. A heartbeat may be what
    /// shows it.
    pub(super) fn is_to_be_ignored(&mut self, message: &RaftMessage) -> bool {
        let acknowledged = match message.kind {
            RaftKind::Heartbeat => message.index,
            RaftKind::Append => message.reject_hint,
            _ => 0,
        };
        if acknowledged > 0 && self.participation == Participation::Full {
            self.check_claim(message, acknowledged);
        }
        match self.participation {
            Participation::Full => false,
            Participation::None => true,
            Participation::Follower => matches!(
                message.kind,
                RaftKind::Vote | RaftKind::PreVote | RaftKind::TimeoutNow
            ),
        }
    }

    /// What shows that this replica's history is not its cluster's. Such a replica takes no part in
    /// its group: neither its acknowledgements nor its votes can be relied on.
    pub fn diverged(&self) -> Option<Diverged> {
        self.diverged
    }

    pub(super) fn note_divergence(&mut self, message: &RaftMessage, error: &StepError) {
        if let StepError::ContradictsCommitted {
            index,
            own_term,
            leader_term,
            ..
        } = *error
        {
            self.diverged = Some(Diverged::Entry {
                index,
                own_term,
                leader_term,
                leader: message.from,
            });
            self.set_participation(Participation::None);
        }
    }

    /// Whether this replica has founded the cluster alone and no entry of its log has added
    /// another: no other replica takes part in this log.
    pub(super) fn is_only_member(&self) -> bool {
        self.members_since() == 0
            && !self.is_changing()
            && self.members() == Members::of_voters(&[self.config.id])
    }

    /// Whether the message shows that there are other members, although this replica is the only
    /// one by its log: the entries that added them are lost here. What this log holds may have the
    /// cluster's terms and indexes by chance, so none of it can be trusted.
    pub(super) fn contradicts_only_member(&mut self, message: &RaftMessage) -> bool {
        let own = self.config.id;
        let is_for_us = message.to == own && message.log == self.config.log;
        if !is_for_us || message.from == own || !self.is_only_member() {
            return false;
        }
        if self.diverged.is_none() {
            self.diverged = Some(Diverged::OnlyMember {
                other: message.from,
            });
            self.set_participation(Participation::None);
        }
        true
    }

    /// Moves to at least this term, and uses up the vote of the term that results: in it, and in
    /// all earlier ones, this replica votes for no other replica. Persist what
    /// [`Group::take_ready`] gives.
    pub fn abstain_through(&mut self, term: u64) {
        self.flush_proposals();
        let raft = &mut self.raw.raft;
        let term = term.max(raft.term);
        raft.become_follower(term, raft::INVALID_ID);
        if raft.vote == raft::INVALID_ID {
            raft.vote = raft.id;
        }
        self.settle();
    }

    /// Whether the term and the vote in it are durable.
    pub fn is_vote_durable(&self) -> bool {
        let (raft, view) = (&self.raw.raft, self.raw.store());
        let durable = view.ring.hard_state();
        let only = self.flash().filter(|flash| flash.mode() == FlashMode::Only);
        (durable.term, durable.vote) == (raft.term, raft.vote)
            && only.is_none_or(|flash| flash.is_settled(raft.raft_log.last_index()))
    }

    /// The last entry that is durable here.
    pub fn persisted(&self) -> u64 {
        self.raw.raft.raft_log.persisted
    }

    /// Leader: a peer says that it holds no more than `last`. If it has acknowledged more, the
    /// acknowledgements are forgotten, it is sent what it lacks, and the answer is what it had
    /// acknowledged.
    pub fn forget_acknowledged(&mut self, peer: u64, last: u64) -> Option<u64> {
        self.flush_proposals();
        if !self.is_leader() || planted::has(Bug::LostKeepsCounting) {
            return None;
        }
        let own_last = self.raw.raft.raft_log.last_index();
        let progress = self.raw.raft.mut_prs().get_mut(peer)?;
        let acknowledged = progress.matched;
        if acknowledged <= last {
            return None;
        }
        progress.matched = 0;
        progress.pending_snapshot = 0;
        progress.become_probe();
        progress.next_idx = last.min(own_last) + 1;
        self.forget_window(peer);
        self.end_quiescence();
        Some(acknowledged)
    }

    /// Leader: each heartbeat and each append says what its receiver has acknowledged in this term,
    /// in fields that they do not use otherwise.
    pub(crate) fn stamp_acknowledged(&self, messages: &mut [OutMessage]) {
        if !self.is_leader() {
            return;
        }
        let prs = self.raw.raft.prs();
        for message in messages {
            let header = &mut message.header;
            let claim = match header.kind {
                RaftKind::Heartbeat => &mut header.index,
                RaftKind::Append => &mut header.reject_hint,
                _ => continue,
            };
            *claim = prs.get(message.to).map_or(0, |progress| progress.matched);
        }
    }

    /// A message has come: whether its leader has acknowledgements of this replica that the
    /// replica cannot have given with the storage that it has. An acknowledgement leaves when its
    /// term and its entries are durable, and within a term a follower's log does not shrink.
    fn check_claim(&mut self, message: &RaftMessage, acknowledged: u64) {
        let (term, last) = (self.raw.raft.term, self.raw.raft.raft_log.last_index());
        let is_possible = message.term == term && acknowledged <= last;
        if is_possible || message.term < term || planted::has(Bug::ClaimIgnored) {
            return;
        }
        let is_for_us = message.to == self.config.id && message.log == self.config.log;
        if !is_for_us || !self.accepts_sender(message.from, message.kind) {
            return;
        }
        self.lost = Some(LostEntries {
            leader: message.from,
            term: message.term,
            acknowledged,
            last,
            known_term: term,
        });
        self.set_participation(Participation::None);
    }

    /// What a leader has claimed since this was asked last, if this replica cannot hold it.
    pub fn take_lost(&mut self) -> Option<LostEntries> {
        self.lost.take()
    }
}

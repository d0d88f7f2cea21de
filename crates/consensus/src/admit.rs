//! The checks a message passes before raft-rs sees it. raft-rs trusts its peers: a commit index
//! beyond the log, entries that contradict committed ones, a vote that was never asked for, or a
//! gap between entries make it panic.

use cyclone_pmem::Payload;
use cyclone_wire::planted::{self, Bug};
use cyclone_wire::raftmsg::{RaftKind, RaftMessage};
use raft::StateRole;

use crate::error::StepError;
use crate::group::Group;
use crate::staging::record_bound;

/// How far a message's term may lie beyond ours. Each election adds one, so honest replicas never
/// drift so far apart.
const MAX_TERM_JUMP: u64 = 1 << 32;

impl Group {
    /// Decides whether raft-rs may see the message. For appends: the place in `entries` from which
    /// on raft-rs will append, if it will.
    pub(crate) fn admit(
        &self,
        message: &RaftMessage,
        payloads: &Payload,
    ) -> Result<Option<usize>, StepError> {
        message.check()?;
        let (found, said) = (payloads.len() as u64, message.payload_bytes());
        if said != found {
            return Err(StepError::PayloadLength { found, said });
        }
        let raft = &self.raw.raft;
        let (from, to, log) = (message.from, message.to, message.log);
        if to != raft.id || log != self.config.log || !self.accepts_sender(from, message.kind) {
            return Err(StepError::Misdirected { log, from, to });
        }
        self.check_term(message.term)?;
        let last = raft.raft_log.last_index();
        let beyond = |index| Err(StepError::BeyondLog { index, last });
        // raft-rs answers or ignores these without looking further.
        let stale = message.term < raft.term;
        match message.kind {
            RaftKind::Append => {
                self.check_leadership(message)?;
                if !stale {
                    return self.admit_append(message, payloads);
                }
            }
            RaftKind::Heartbeat => {
                self.check_leadership(message)?;
                if !stale && message.commit > last {
                    return beyond(message.commit);
                }
            }
            RaftKind::AppendResponse => {
                let highest = message.index.max(message.reject_hint);
                if message.term == raft.term && highest > last {
                    return beyond(highest);
                }
            }
            RaftKind::VoteResponse | RaftKind::PreVoteResponse => {
                // A request leaves only after everything before it is durable.
                let asked = matches!(raft.state, StateRole::Candidate | StateRole::PreCandidate);
                if asked && !self.is_settled() {
                    return Err(StepError::Early { kind: message.kind });
                }
            }
            RaftKind::TimeoutNow => {
                let from_leader = message.term == raft.term && raft.leader_id == from;
                if !from_leader || !self.may_campaign() {
                    return Err(StepError::Early { kind: message.kind });
                }
            }
            RaftKind::Snapshot => return Err(StepError::NotForStep { kind: message.kind }),
            RaftKind::Vote | RaftKind::PreVote | RaftKind::HeartbeatResponse => {}
        }
        Ok(None)
    }

    /// The term is one that elections may have reached.
    pub(crate) fn check_term(&self, term: u64) -> Result<(), StepError> {
        let current = self.raw.raft.term;
        if term > current.saturating_add(MAX_TERM_JUMP) {
            return Err(StepError::TermTooFar { term, current });
        }
        Ok(())
    }

    /// No other replica leads the message's term.
    fn check_leadership(&self, message: &RaftMessage) -> Result<(), StepError> {
        let raft = &self.raw.raft;
        let other = raft.leader_id != raft::INVALID_ID && raft.leader_id != message.from;
        if planted::has(Bug::OldTermAccepted) && raft.state != StateRole::Leader {
            return Ok(());
        }
        if message.term == raft.term && (raft.state == StateRole::Leader || other) {
            return Err(StepError::TwoLeaders {
                from: message.from,
                term: message.term,
            });
        }
        Ok(())
    }

    /// What a leader's append says of committed entries is what this replica has committed.
    fn check_committed(&self, message: &RaftMessage) -> Result<(), StepError> {
        let log = &self.raw.raft.raft_log;
        let (commit, first) = (log.committed, log.first_index());
        let told = message
            .entries
            .iter()
            .map(|entry| (entry.index, entry.term));
        let told = std::iter::once((message.index, message.log_term)).chain(told);
        for (index, leader_term) in told.take_while(|(index, _)| *index <= commit) {
            // What the log no longer holds, its checkpoint does; its terms are not known.
            if index + 1 < first {
                continue;
            }
            // Entries that are about to replace others are not in the ring yet.
            if let Ok(own_term) = log.term(index)
                && own_term != leader_term
            {
                return Err(StepError::ContradictsCommitted {
                    index,
                    commit,
                    own_term,
                    leader_term,
                });
            }
        }
        Ok(())
    }

    fn admit_append(
        &self,
        message: &RaftMessage,
        payloads: &Payload,
    ) -> Result<Option<usize>, StepError> {
        let log = &self.raw.raft.raft_log;
        let pieces = payloads.parts().len();
        let mut at = 0;
        for entry in &message.entries {
            let bytes = at..at + entry.len as usize;
            at = bytes.end;
            match entry.kind {
                crate::KIND_COMMANDS => {}
                crate::KIND_MEMBERS => self.check_change(entry, &payloads.slice(bytes))?,
                kind => {
                    let index = entry.index;
                    return Err(StepError::UnknownEntry { index, kind });
                }
            }
            let (len, limit) = (u64::from(entry.len), self.max_entry_bytes());
            if len > limit {
                return Err(StepError::TooLarge {
                    index: entry.index,
                    len,
                    limit,
                });
            }
        }
        if message.index <= log.committed {
            self.check_committed(message)?;
        }
        // raft-rs answers these with its commit index, or with a rejection.
        if message.index < log.committed || !log.match_term(message.index, message.log_term) {
            return Ok(None);
        }
        let new = message
            .entries
            .iter()
            .position(|entry| !log.match_term(entry.index, entry.term));
        let Some(new) = new else { return Ok(None) };
        let first = message.entries[new].index;
        let entries = &message.entries[new..];
        // Which pieces belong to which entry is not known yet; each cut between entries adds one at
        // most.
        let cost = |len: u32| record_bound(u64::from(len), 1);
        let pieces = record_bound(0, pieces);
        let max_entry_cost = entries
            .iter()
            .map(|entry| cost(entry.len))
            .max()
            .unwrap_or(0)
            + pieces;
        let needed = entries.iter().map(|entry| cost(entry.len)).sum::<u64>() + pieces;
        self.check_capacity(needed, entries.len() as u64, max_entry_cost, first)
            .map_err(|(needed, free)| StepError::Full { needed, free })?;
        Ok(Some(new))
    }

    /// Whether `slots` entries with records of `needed` bytes in all, the largest being
    /// `max_entry_cost`, fit into the ring behind what is staged already. `first` is the first new
    /// entry's index: what it overwrites makes room.
    pub(crate) fn check_capacity(
        &self,
        needed: u64,
        slots: u64,
        max_entry_cost: u64,
        first: u64,
    ) -> Result<(), (u64, u64)> {
        let view = self.raw.store();
        let (mut free, mut free_slots) = view.free();
        let last = view.ring.last_index();
        if first <= last {
            free_slots += last - first + 1;
            free += (first..=last)
                .filter_map(|index| view.ring.record_bytes(index))
                .sum::<u64>();
        }
        let staged = self.staging.len() as u64;
        // A record does not wrap around the ring's end: up to one record's length is lost there.
        let needed =
            needed + self.staging.cost() + max_entry_cost.max(self.staging.max_entry_cost());
        if needed > free {
            return Err((needed, free));
        }
        if slots + staged > free_slots {
            return Err((slots + staged, free_slots));
        }
        Ok(())
    }
}

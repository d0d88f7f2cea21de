//! Heartbeats further apart while there are no requests: what an idle cluster costs is mostly its
//! heartbeats (docs/adr/0063).
//!
//! A leader that has nothing to do says in its heartbeats that the next one may be long in coming.
//! A follower that hears it lets ticks pass unnoticed before it begins to wait for the next, and
//! says so in its answer. Once all others have answered so, the leader lets ticks pass too. What it
//! says is a promise only to itself: a follower that waits longer votes for another later, never
//! earlier.

use cyclone_wire::raftmsg::{RaftKind, RaftMessage};
use raft::Progress;

use crate::group::Group;
use crate::message::OutMessage;

/// Ticks that a leader lets pass before it begins to count to its next heartbeat.
const LEADER_TICKS: u32 = 10;
/// Ticks that its followers let pass before they begin to wait for it. With the shortest election
/// time-out they are enough for one heartbeat to be lost.
const FOLLOWER_TICKS: u32 = 20;

/// What one group knows about resting. Belongs to a term: an election ends it.
#[derive(Default)]
pub(crate) struct Quiescence {
    quiet: bool,
    term: u64,
    /// The next heartbeat is far away, as this replica knows it.
    far: bool,
    /// Ticks that are still to pass unnoticed.
    ticks_left: u32,
    /// Some have passed since the leader was last heard.
    passed: bool,
    /// Follower: what the last heartbeat allowed, to be answered.
    allowed: u32,
    /// Leader: who has answered since the last heartbeats that allowed it.
    answered: Vec<u64>,
}

impl Group {
    /// Says whether there is nothing to do for clients, and has not been for a while. To be said
    /// again before each tick.
    pub fn set_idle(&mut self, quiet: bool) {
        self.quiescence.quiet = quiet;
        if !quiet && self.is_leader() {
            self.end_quiescence();
        }
    }

    /// Leader: the next heartbeat comes after the usual time.
    pub(crate) fn end_quiescence(&mut self) {
        (self.quiescence.ticks_left, self.quiescence.far) = (0, false);
    }

    /// Whether heartbeats come further apart at present, or there are none, and nothing else comes.
    pub fn is_resting(&self) -> bool {
        let is_alone = self.can_quiesce() && self.all_peers(|_, _| false);
        is_alone || (self.quiescence.far && !self.is_quiescence_over())
    }

    /// Ticks that will pass unnoticed, if nothing comes.
    pub fn quiesced_ticks_left(&self) -> u64 {
        match self.is_quiescence_over() {
            true => 0,
            false => u64::from(self.quiescence.ticks_left),
        }
    }

    fn is_quiescence_over(&self) -> bool {
        self.quiescence.term != self.raw.raft.term || self.leader().is_none()
    }

    fn renew_quiescence(&mut self) {
        if self.is_quiescence_over() {
            self.quiescence = Quiescence {
                quiet: self.quiescence.quiet,
                term: self.raw.raft.term,
                ..Quiescence::default()
            };
        }
    }

    /// Lets ticks pass unnoticed; answers how many are left to be noticed.
    pub(crate) fn consume_quiesced_ticks(&mut self, ticks: u32) -> u32 {
        self.renew_quiescence();
        let passed = ticks.min(self.quiescence.ticks_left);
        self.quiescence.ticks_left -= passed;
        self.quiescence.passed |= passed > 0;
        ticks - passed
    }

    /// Whether a tick has passed unnoticed since the leader was heard.
    pub(crate) fn has_skipped_tick(&self) -> bool {
        self.quiescence.passed && !self.is_quiescence_over()
    }

    /// What a message that raft-rs has taken says about it.
    pub(crate) fn note_quiescence(&mut self, message: &RaftMessage) {
        self.renew_quiescence();
        if message.term != self.raw.raft.term {
            return;
        }
        let from_leader = self.leader() == Some(message.from);
        let quiescence = &mut self.quiescence;
        match message.kind {
            RaftKind::Append if from_leader => (quiescence.passed, quiescence.far) = (false, false),
            RaftKind::Heartbeat if from_leader => {
                quiescence.allowed = message.reject_hint.min(FOLLOWER_TICKS.into()) as u32;
                (quiescence.ticks_left, quiescence.passed) = (quiescence.allowed, false);
                quiescence.far = quiescence.allowed > 0;
            }
            RaftKind::HeartbeatResponse
                // One of an older program may allow itself less.
                if message.reject_hint >= FOLLOWER_TICKS.into()
                    && !quiescence.answered.contains(&message.from) =>
            {
                quiescence.answered.push(message.from);
            }
            _ => {}
        }
    }

    /// Leader: no follower is behind, and nothing is in flight.
    fn can_quiesce(&self) -> bool {
        let last = self.raw.raft.raft_log.last_index();
        self.quiescence.quiet
            && self.is_leader()
            && !self.is_transferring()
            && self.all_peers(|_, progress| progress.matched == last)
    }

    /// Whether something holds for all members but this one.
    fn all_peers(&self, holds: impl Fn(u64, &Progress) -> bool) -> bool {
        let raft = &self.raw.raft;
        let mut peers = raft.prs().iter().filter(|(id, _)| **id != raft.id);
        peers.all(|(id, progress)| holds(*id, progress))
    }

    /// Puts it into the messages that leave.
    pub(crate) fn stamp_quiescence(&mut self, messages: &mut [OutMessage]) {
        self.renew_quiescence();
        let allowed = match self.can_quiesce() {
            true => FOLLOWER_TICKS,
            false => 0,
        };
        let mut is_round = false;
        for message in messages {
            match message.header.kind {
                RaftKind::Heartbeat => {
                    message.header.reject_hint = allowed.into();
                    is_round = true;
                }
                RaftKind::HeartbeatResponse => {
                    message.header.reject_hint = self.quiescence.allowed.into();
                }
                _ => {}
            }
        }
        if is_round {
            let agreed = self.all_peers(|id, _| self.quiescence.answered.contains(&id));
            self.quiescence.ticks_left = if allowed > 0 && agreed {
                LEADER_TICKS
            } else {
                0
            };
            self.quiescence.far = self.quiescence.ticks_left > 0;
            self.quiescence.answered.clear();
        }
    }
}

//! A log's time: by what its leader stamps entries, and what messages say of wall clocks
//! (docs/adr/0079).

use cyclone_store::StateMachine;
use cyclone_wire::command::{Command, Operation};
use cyclone_wire::raftmsg::RaftKind;

use super::PhysicalLog;
use crate::node::Now;
use crate::requests::Origin;

impl PhysicalLog {
    /// Takes in the clocks at the beginning of a step.
    pub(crate) fn begin_step(&mut self, now: Now, store: &dyn StateMachine) {
        let (term, group) = (self.leading_term(), &self.group);
        self.clock.begin_step(now, term, || group.members());
        if self.clock.wants_state(self.applied_term) {
            self.clock.follow_state(store.clock_ms(self.id));
        }
        let agreed_ms = self.clock.agreed_ms().unwrap_or(0);
        self.group.set_wall_clocks(now.wall_ms, agreed_ms);
    }

    /// The term in which this replica leads the log; 0: it does not.
    fn leading_term(&self) -> u64 {
        match self.group.is_leader() {
            true => self.group.term(),
            false => 0,
        }
    }

    /// What the next entry is stamped with, and by when keys have expired for reads, in
    /// milliseconds since 1970.
    pub(crate) fn time_ms(&mut self) -> u64 {
        let (term, group) = (self.leading_term(), &self.group);
        self.clock.time_ms(term, || group.members())
    }

    /// Takes in the wall clock that a message carried which the group has taken.
    pub(crate) fn note_wall_clock(&mut self, from: u64, kind: RaftKind, wall_ms: u64) {
        match kind {
            _ if wall_ms == 0 => {}
            RaftKind::Heartbeat => self.clock.note_majority(from, wall_ms),
            _ => self.clock.note_report(from, wall_ms),
        }
    }

    /// Writes an entry that sets the state's clock, also back. What is taken in from now on is
    /// stamped from there.
    pub(crate) fn set_clock(&mut self, time_ms: u64, origin: Origin) {
        self.seal();
        self.clock.set_ms(time_ms);
        let command = Command {
            session: None,
            operation: Operation::SetClock { time_ms },
        };
        self.write_bytes(origin, |out| command.encode(out));
        self.seal();
    }
}

//! The wall clocks that messages carry. The group reads no clock: its host says what the clocks
//! show, and takes what other replicas report from the messages that it hands over (docs/adr/0079).

use cyclone_wire::raftmsg::RaftKind;

use super::Group;
use crate::message::OutMessage;

/// What the next messages say, in milliseconds since 1970; 0: nothing.
#[derive(Default)]
pub(crate) struct WallClocks {
    own_ms: u64,
    agreed_ms: u64,
}

impl Group {
    /// Sets this machine's wall clock and, on a leader, the time that a majority of the voters'
    /// wall clocks agree on, both in milliseconds since 1970; 0: not known.
    pub fn set_wall_clocks(&mut self, own_ms: u64, agreed_ms: u64) {
        self.wall_clocks = WallClocks { own_ms, agreed_ms };
    }

    /// Puts them into the messages that leave.
    pub(crate) fn stamp_wall_clocks(&self, messages: &mut [OutMessage]) {
        for message in messages {
            let header = &mut message.header;
            header.wall_ms = match header.kind {
                RaftKind::Heartbeat => self.wall_clocks.agreed_ms,
                kind if kind.answers_with_clock() => self.wall_clocks.own_ms,
                _ => continue,
            };
        }
    }
}

//! The session that makes retried writes count once: its number, the seqs given out, those
//! answered.

use std::collections::VecDeque;

use cyclone_wire::codec::Write;
use cyclone_wire::command::{Command, Operation, SessionTag};

/// Seqs given out beyond the oldest unanswered one. Replicas keep 4096 replies per session and
/// forget the oldest first: a command whose answer was lost must still find its reply there when it
/// is sent again.
pub(crate) const MAX_SPAN: usize = 2048;
/// A node that has not answered the request for a session is not asked again for so long at most,
/// in microseconds: short enough for a request that gets lost again and again to come through
/// within a write's deadline.
const HELD_MOST_US: u64 = 1_000_000;
/// Bytes of a command's tag: flag, session, seq, acked_below.
const TAG_BYTES: usize = 25;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// None; to be opened before the next write.
    Closed,
    /// Asked for.
    Opening,
    /// This one.
    Open(u64),
    /// The engine keeps none: writes go out bare, and once only.
    Unsupported,
}

/// The request for a session, which is no request of the user's. Each copy that a leader takes
/// opens another session, and a leader under load answers late: the longer a node says nothing, the
/// less often it is asked.
#[derive(Default)]
pub(crate) struct Opening {
    /// Counts sessions asked for.
    pub(crate) number: u64,
    pub(crate) queued: bool,
    pub(crate) sent_us: u64,
    /// When an answer is missing; the end of time while no write wants the session.
    pub(crate) due_us: u64,
    /// It is queued, and all it could be sent to was asked too recently: until then.
    pub(crate) wake_us: Option<u64>,
    /// Who may have taken it.
    asked: Vec<Asked>,
}

/// A node that was asked for a session and has not answered.
struct Asked {
    node: u64,
    times: u32,
    /// Not asked again before.
    held_until_us: u64,
}

impl Opening {
    /// A session is wanted, and none asked for yet.
    pub(crate) fn begin(&mut self) {
        self.number += 1;
        self.queued = true;
        self.asked.clear();
    }

    /// No write wants it any more. Should an answer come, the session is there for later writes.
    pub(crate) fn rest(&mut self) {
        self.queued = false;
        (self.due_us, self.wake_us) = (u64::MAX, None);
        self.asked.clear();
    }

    pub(crate) fn is_at_rest(&self) -> bool {
        !self.queued && self.due_us == u64::MAX
    }

    /// This node is asked, and an answer is missing after `patience_us`.
    pub(crate) fn asks(&mut self, now_us: u64, node: u64, patience_us: u64) {
        self.queued = false;
        self.sent_us = now_us;
        (self.due_us, self.wake_us) = (now_us + patience_us, None);
        let known = self.asked.iter().position(|asked| asked.node == node);
        let place = known.unwrap_or(self.asked.len());
        if known.is_none() {
            self.asked.push(Asked {
                node,
                times: 0,
                held_until_us: 0,
            });
        }
        let asked = &mut self.asked[place];
        let doubled_us = patience_us.saturating_mul(1 << asked.times.min(16));
        asked.held_until_us = now_us + doubled_us.min(HELD_MOST_US.max(patience_us));
        asked.times += 1;
    }

    /// This node has answered: whatever that was, nothing keeps it from being asked.
    pub(crate) fn answered(&mut self, node: u64) {
        self.asked.retain(|asked| asked.node != node);
    }

    /// Until when this node is not asked again; 0 if it was not asked.
    pub(crate) fn held_until_us(&self, node: u64) -> u64 {
        let asked = self.asked.iter().find(|asked| asked.node == node);
        asked.map_or(0, |asked| asked.held_until_us)
    }

    /// When the first of those that were asked may be asked again.
    pub(crate) fn soonest_us(&self) -> Option<u64> {
        self.asked.iter().map(|asked| asked.held_until_us).min()
    }
}

/// The current session.
pub(crate) struct Session {
    pub(crate) state: State,
    /// Every seq below is answered.
    below: u64,
    /// From `below` on: which seqs are answered.
    done: VecDeque<bool>,
}

impl Session {
    pub(crate) fn new() -> Session {
        Session {
            state: State::Closed,
            below: 1,
            done: VecDeque::new(),
        }
    }

    pub(crate) fn opened(&mut self, number: u64) {
        *self = Session {
            state: State::Open(number),
            ..Session::new()
        };
    }

    /// The session's number, if it is open.
    pub(crate) fn number(&self) -> Option<u64> {
        match self.state {
            State::Open(number) => Some(number),
            _ => None,
        }
    }

    /// Session and seq for a new write; `None` while there is no session or too many seqs are in
    /// use.
    pub(crate) fn next(&mut self) -> Option<(u64, u64)> {
        let number = self.number()?;
        if self.done.len() >= MAX_SPAN {
            return None;
        }
        self.done.push_back(false);
        Some((number, self.below + self.done.len() as u64 - 1))
    }

    /// A write has ended, however: it will not be sent again.
    pub(crate) fn answered(&mut self, session: u64, seq: u64) {
        if self.number() != Some(session) {
            return;
        }
        let place = seq
            .checked_sub(self.below)
            .and_then(|place| usize::try_from(place).ok());
        if let Some(done) = place.and_then(|place| self.done.get_mut(place)) {
            *done = true;
        }
        while self.done.front() == Some(&true) {
            self.done.pop_front();
            self.below += 1;
        }
    }

    /// Appends a command that was encoded by [`encode`], under this tag.
    pub(crate) fn put_tagged(&self, out: &mut Vec<u8>, session: u64, seq: u64, body: &[u8]) {
        if session == 0 {
            out.put_u8(0);
        } else {
            out.put_u8(1);
            out.put_u64(session);
            out.put_u64(seq);
            // An expired session's seqs say nothing about this one's.
            out.put_u64(if self.number() == Some(session) {
                self.below
            } else {
                0
            });
        }
        out.extend_from_slice(&body[TAG_BYTES..]);
    }
}

/// Appends a command with room for its tag, which is known only when it is sent.
pub(crate) fn encode(operation: &Operation<'_>, out: &mut Vec<u8>) {
    let session = Some(SessionTag {
        session: 0,
        seq: 0,
        acked_below: 0,
    });
    Command {
        session,
        operation: operation.clone(),
    }
    .encode(out);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tagged_command_reads_back() {
        let mut session = Session::new();
        session.opened(9);
        assert_eq!(
            (session.next(), session.next(), session.next()),
            (Some((9, 1)), Some((9, 2)), Some((9, 3)))
        );
        session.answered(9, 1);
        let operation = Operation::IncrBy {
            key: b"k",
            delta: -4,
        };
        let mut body = Vec::new();
        encode(&operation, &mut body);
        let mut out = Vec::new();
        session.put_tagged(&mut out, 9, 3, &body);
        let tag = SessionTag {
            session: 9,
            seq: 3,
            acked_below: 2,
        };
        assert_eq!(
            Command::decode(&out),
            Ok(Command {
                session: Some(tag),
                operation: operation.clone()
            })
        );
        out.clear();
        session.put_tagged(&mut out, 0, 0, &body);
        assert_eq!(
            Command::decode(&out),
            Ok(Command {
                session: None,
                operation
            })
        );
    }

    #[test]
    fn who_does_not_answer_is_asked_less_and_less_often() {
        let mut opening = Opening::default();
        opening.begin();
        opening.asks(0, 1, 25_000);
        assert_eq!(
            opening.held_until_us(1),
            25_000,
            "what got lost is soon repeated"
        );
        opening.asks(25_000, 1, 25_000);
        assert_eq!(opening.held_until_us(1), 75_000);
        assert_eq!(opening.due_us, 50_000, "silence is noticed as soon as ever");
        // Others have nothing to do with it.
        assert_eq!(opening.held_until_us(2), 0);
        opening.asks(75_000, 2, 25_000);
        assert_eq!(opening.held_until_us(2), 100_000);
        assert_eq!(opening.soonest_us(), Some(75_000));
        (0..40).for_each(|_| opening.asks(100_000, 1, 25_000));
        assert_eq!(opening.held_until_us(1), 100_000 + HELD_MOST_US);
        opening.answered(1);
        assert_eq!(opening.held_until_us(1), 0);
        assert_eq!(opening.held_until_us(2), 100_000);
        opening.rest();
        assert!(opening.is_at_rest());
        assert_eq!(opening.soonest_us(), None);
    }

    #[test]
    fn acknowledgement_stops_at_the_oldest_unanswered() {
        let mut session = Session::new();
        session.opened(5);
        (0..4).for_each(|_| assert!(session.next().is_some()));
        session.answered(5, 3);
        session.answered(5, 2);
        session.answered(4, 1);
        assert_eq!(session.below, 1, "1 is unanswered in this session");
        session.answered(5, 1);
        assert_eq!(session.below, 4);
    }

    #[test]
    fn the_span_is_bounded() {
        let mut session = Session::new();
        session.opened(5);
        (0..MAX_SPAN).for_each(|_| assert!(session.next().is_some()));
        assert_eq!(session.next(), None);
        session.answered(5, 1);
        assert!(session.next().is_some());
    }
}

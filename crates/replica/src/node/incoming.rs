//! Messages from other replicas to this one's logs.

use super::*;

impl Node {
    pub(super) fn raft_messages(&mut self, from: u64, body: &Payload) {
        if self.membership.is_removed(from) {
            return self.membership.note_stranger(from);
        }
        let mut at = 0;
        while at + 4 <= body.len() {
            let mut length = [0; 4];
            body.read_at(at, &mut length);
            let length = u32::from_le_bytes(length) as usize;
            at += 4;
            if length > body.len() - at {
                self.counters.malformed += 1;
                return;
            }
            let message = body.slice(at..at + length);
            at += length;
            self.raft_message(from, &message);
        }
    }

    fn raft_message(&mut self, from: u64, bytes: &Payload) {
        let Ok((message, payload_at)) = scattered::raft_message(bytes) else {
            self.counters.malformed += 1;
            return;
        };
        let may_vote = self.may_vote();
        let Some(log) = self.logs.get_mut(usize::from(message.log)) else {
            self.counters.malformed += 1;
            return;
        };
        if message.from != from {
            self.counters.malformed += 1;
            return;
        }
        if self.membership.is_removed(self.config.id) {
            return;
        }
        if !message.entries.is_empty() {
            self.active_us = self.now.steady_us;
        }
        if matches!(message.kind, RaftKind::Vote | RaftKind::PreVote) && !may_vote {
            return;
        }
        if message.kind == RaftKind::Snapshot {
            self.offered_snapshot(message);
            return;
        }
        let payloads = bytes.slice(payload_at..bytes.len());
        match log.group.step(message, payloads) {
            Ok(()) => {}
            Err(StepError::Full { .. }) => self.counters.dropped_full += 1,
            Err(_) => self.counters.malformed += 1,
        }
    }
}

//! What arrives: clients' requests, which wait their turn, and other replicas' messages, which do
//! not.

use cyclone_wire::envelope;

use super::*;
use crate::fragmented::{each_message, raft_message};
use crate::intake::Intake;

/// Messages taken from a port in one step.
pub(crate) const RECEIVE_BURST: usize = 256;
/// Bytes of them; the last call may bring more.
pub(crate) const RECEIVE_BYTES: usize = 1 << 20;
/// Fewer datagrams than this, and the port is taken to be empty: another poll of it would be one
/// more system call before what came is answered. What has come since is for the next step.
pub(crate) const FEW: usize = 8;
/// Commands and reads of native clients that one step processes. A step is short, however much is
/// asked: heartbeats and acknowledgements wait for its end.
pub(crate) const STEP_REQUESTS: u64 = 256;
/// Messages of clients that may wait to be processed. Beyond, a step processes more requests, and
/// refuses what the logs do not take.
pub(crate) const BACKLOG: usize = 256;

impl Node {
    /// Takes what has arrived: the other replicas' messages at once, so that no load of clients is
    /// in their way, and then as many of the clients' as a step takes.
    pub(super) fn receive(&mut self) -> Result<usize, NodeError> {
        let mut inbox = std::mem::take(&mut self.inbox);
        let (mut received, few) = (0, FEW.min(self.config.network.burst));
        let mut bytes = 0;
        while received < RECEIVE_BURST && bytes < RECEIVE_BYTES {
            let count = self
                .port
                .poll(self.now.steady_us, &mut inbox)
                .map_err(NodeError::Port)?;
            received += count;
            for message in inbox.drain(..) {
                bytes += message.body.len();
                self.dispatch(0, message);
            }
            if count < few {
                break;
            }
        }
        self.inbox = inbox;
        let before = self.counters.writes + self.counters.reads;
        while let Some((door, peer, body)) = self.backlog.pop_front() {
            self.active_us = self.now.steady_us;
            self.client_requests(door, peer, &body);
            let checked = self.counters.writes + self.counters.reads - before;
            if checked >= STEP_REQUESTS && self.backlog.len() <= BACKLOG {
                break;
            }
        }
        // What is left is work for the next step.
        Ok(received + self.backlog.len())
    }

    /// A message that came through this door.
    pub(crate) fn dispatch(&mut self, door: u16, message: Message) {
        let Message { from, body } = message;
        let mut class = [0u8; 1];
        if !body.read_at(0, &mut class) {
            self.counters.malformed += 1;
            return;
        }
        let rest = body.tail(1);
        match (from, class[0]) {
            (Peer::Node(node), envelope::RAFT) => self.raft_messages(node, &rest),
            (Peer::Node(node), envelope::SNAPSHOT_FETCH) => self.snapshot_fetch(node, &rest),
            (Peer::Node(node), envelope::SNAPSHOT_CHUNK) => self.snapshot_chunk(node, &rest),
            (Peer::Node(node), envelope::BOOTSTRAP) => {
                self.bootstrap_inbox.push((node, rest.to_vec()))
            }
            (Peer::Node(_), envelope::RECORD) => self.on_membership_record(&rest.to_vec()),
            (Peer::Node(node), envelope::LIVENESS) => {
                self.on_live_peers_report(node, &rest.to_vec())
            }
            (Peer::Node(node), envelope::JOINING) => self.answer_join_query(node),
            (Peer::Node(node), envelope::KNOWN) => {
                let malformed = self.on_known_report(node, &rest.to_vec()).is_err();
                self.counters.malformed += u64::from(malformed);
            }
            (Peer::Client(_), envelope::CLIENT_REQUEST) => {
                self.backlog.push_back((door, from, rest))
            }
            _ => self.counters.malformed += 1,
        }
    }

    fn raft_messages(&mut self, from: u64, body: &Payload) {
        if self.membership.is_removed(from) {
            return self.membership.note_removed_sender(from);
        }
        for place in each_message(body) {
            let Some(place) = place else {
                self.counters.malformed += 1;
                return;
            };
            self.raft_message(from, body.slice(place.start + 4..place.end));
        }
    }

    fn raft_message(&mut self, from: u64, bytes: Payload) {
        let Ok((message, payload_at)) = raft_message(&bytes) else {
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
        let (kind, wall_ms) = (message.kind, message.wall_ms);
        match log.group.step(message, bytes.tail(payload_at)) {
            Ok(()) => log.note_wall_clock(from, kind, wall_ms),
            Err(StepError::Full { .. }) => self.counters.dropped_full += 1,
            Err(error) => {
                log.log_refusal(&error);
                self.counters.malformed += 1;
            }
        }
    }
}

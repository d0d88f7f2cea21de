//! What an endpoint does when it is polled: messages and ends come in, what waited is tried again,
//! and periodically processes are checked.

use std::iter::once;
use std::sync::Arc;
use std::time::Instant;

use super::ShmEndpoint;
use super::connection::{Connection, Pending};
use super::layout::{connection, header, split_state, state_word};
use super::link::NotAppended;
use super::peer::Peer;
use super::process::Identity;
use crate::event::{Event, Failure, FailureKind};
use crate::key::Address;

/// Where nothing was polled for in between, the clock is asked at every so many polls.
const POLLS_PER_CHECK: u32 = 64;

impl ShmEndpoint {
    #[inline]
    pub(super) fn serve(&mut self) {
        if self.is_behind || self.control.load(header::DOORBELL) != self.seen {
            self.look();
        }
        if self.waiting > 0 {
            self.retry();
        }
        self.polls = self.polls.wrapping_add(1);
        if self.events.is_empty() || self.polls.is_multiple_of(POLLS_PER_CHECK) {
            self.check_processes();
        }
    }

    /// Checks everything that the doorbell may have been rung for.
    fn look(&mut self) {
        self.seen = self.control.load(header::DOORBELL);
        self.is_behind = false;
        for slot in 0..self.control.claimed() {
            if self.accepted[slot as usize].is_none() {
                self.accept(slot);
            }
        }
        for place in 0..self.connections.len() {
            self.receive(place, false);
        }
    }

    /// Meets the peer of a slot that holds messages, or frees a slot that was closed.
    fn accept(&mut self, slot: u64) {
        let word = self.control.slot_state(slot);
        let (pid, state) = split_state(word);
        if !(connection::OPEN..=connection::CLOSED).contains(&state) {
            return;
        }
        if !self.initiators.has_messages(slot) {
            return self.initiators.free_closed(slot);
        }
        let Some(peer) = self.initiator(slot, pid) else {
            // Answers could not reach it.
            let ended = state_word(pid, connection::ENDED);
            if state != connection::CLOSED {
                self.control.change_slot(slot, word, ended);
            }
            return self.initiators.free_closed(slot);
        };
        if state == connection::OPEN {
            let accepted = state_word(pid, connection::ACCEPTED);
            if !self.control.change_slot(slot, word, accepted) {
                // It was closed just now.
                self.is_behind = true;
                return;
            }
        }
        let (place, id) = self.place();
        let control = self.control.clone();
        self.connections[place] = Some(Connection::accepted(id, peer, control, slot));
        self.accepted[slot as usize] = Some(place);
    }

    /// The endpoint that a slot names, if it is the process's that claimed the slot.
    fn initiator(&mut self, slot: u64, pid: u32) -> Option<Arc<Peer>> {
        let address = Address(self.control.slot_address(slot)?);
        let start = self.control.slot_start(slot);
        let peer = self.peers.find_any(&address).ok()?;
        (peer.owner == Identity { pid, start }).then_some(peer)
    }

    /// Takes a connection's messages, and notices its end.
    fn receive(&mut self, place: usize, is_gone: bool) {
        let (max, max_events) = (self.config.max_transfer, self.config.max_events);
        let Some(there) = &mut self.connections[place] else {
            return;
        };
        // Before the messages: whatever came before the end is in the ring by then.
        let mut is_ended = is_gone || there.is_ended();
        let connection = there.id;
        loop {
            if self.events.len() >= max_events {
                self.is_behind = true;
                return;
            }
            match there.receive(max) {
                Ok(Some(bytes)) => self.events.push(Event::Received { connection, bytes }),
                Ok(None) => break,
                Err(_) => {
                    is_ended = true;
                    break;
                }
            }
        }
        if !is_ended {
            return;
        }
        match there.pending.take() {
            Some(pending) => {
                self.waiting -= 1;
                let (context, operation) = (pending.context(), pending.name().describe());
                self.fail(place, context, operation, FailureKind::PeerGone);
            }
            None => {
                self.events.push(Event::Disconnected { connection });
                self.remove(place);
            }
        }
    }

    /// Drops a connection.
    pub(super) fn remove(&mut self, place: usize) {
        let Some(there) = self.connections[place].take() else {
            return;
        };
        self.waiting -= usize::from(there.pending.is_some());
        there.end();
        if there.is_accepted() {
            self.accepted[there.slot as usize] = None;
            self.initiators.free_closed(there.slot);
        }
    }

    /// Tries again what waits for room or for a segment.
    fn retry(&mut self) {
        for place in 0..self.connections.len() {
            if self.is_full() {
                return;
            }
            let Some(there) = &mut self.connections[place] else {
                continue;
            };
            let Some(pending) = there.pending.take() else {
                continue;
            };
            self.waiting -= 1;
            let (id, context) = (there.id, pending.context());
            let name = pending.name();
            match there.resume(self.own, &self.address, pending) {
                Ok(Resumed::Done) => self.complete(id, context, 0, Vec::new()),
                Ok(Resumed::Waits(pending)) => self.wait_with(place, pending),
                Ok(Resumed::NoSegment) => self.events.push(Event::Failed {
                    connection: id,
                    context,
                    failure: Failure {
                        operation: name.describe(),
                        kind: FailureKind::NoSegment,
                    },
                }),
                Err(kind) => self.fail(place, context, name.describe(), kind),
            }
        }
    }

    /// Periodically: notices processes that ended without a word.
    fn check_processes(&mut self) {
        let now = Instant::now();
        if now.duration_since(self.checked) < self.config.peer_check {
            return;
        }
        self.checked = now;
        self.is_behind |= self.initiators.clear_all_dead();
        for place in 0..self.connections.len() {
            let opened = self.connections[place].as_ref();
            let opened = opened.filter(|connection| !connection.is_accepted());
            if opened.is_some_and(|connection| connection.peer.is_gone()) {
                self.receive(place, true);
            }
        }
    }
}

/// What came of another try.
pub(super) enum Resumed {
    Done,
    Waits(Pending),
    /// Waited long enough for a segment; the connection lives on.
    NoSegment,
}

impl Connection {
    fn resume(
        &mut self,
        own: Identity,
        address: &Address,
        pending: Pending,
    ) -> Result<Resumed, FailureKind> {
        match pending {
            Pending::Message {
                bytes,
                sent,
                context,
            } => {
                let (sent, is_whole) = self.push(&bytes, sent)?;
                if is_whole {
                    return Ok(Resumed::Done);
                }
                Ok(Resumed::Waits(Pending::Message {
                    bytes,
                    sent,
                    context,
                }))
            }
            Pending::Append {
                queue,
                bytes,
                context,
                until,
            } => {
                let (_, done) = (self.link(own, address)?).append(&queue, once(&bytes[..]));
                match done {
                    Ok(()) => Ok(Resumed::Done),
                    Err(NotAppended::NoSegment) if Instant::now() >= until => {
                        Ok(Resumed::NoSegment)
                    }
                    Err(NotAppended::NoSegment) => Ok(Resumed::Waits(Pending::Append {
                        queue,
                        bytes,
                        context,
                        until,
                    })),
                    Err(NotAppended::Failed(kind)) => Err(kind),
                }
            }
        }
    }
}

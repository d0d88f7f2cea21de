//! What goes to the provider and when: a connection's messages of the provider's own, then its
//! operations, no more at once than the provider can take.

use super::core::{Core, provider_failure};
use super::operations::Turn;
use super::port::Refusal;
use super::state::Work;
use super::sys;
use super::wire::{HEADER_BYTES, Header, Kind};

/// What a transfer counts for beside its bytes where the bytes in flight are bounded: heads, and
/// what the kernel charges for a small packet.
const FLYING_HEAD: usize = 768;

impl Core {
    /// Hands a connection's messages and operations to the provider, as far as it takes them.
    /// Messages of the provider's own go first: operations may wait for their answers.
    pub fn pump(&mut self, id: u64) -> bool {
        let mut did = false;
        loop {
            self.tell_drained(id);
            match self.send_control(id) {
                Ok(sent) => did |= sent,
                Err(()) => return did,
            }
            let Some(connection) = self.connections.get(&id) else {
                return did;
            };
            if connection.theirs.is_none() || connection.issue >= connection.next {
                break;
            }
            let number = connection.issue;
            match self.issue(id, number) {
                Turn::Next => {
                    did = true;
                    if let Some(connection) = self.connections.get_mut(&id) {
                        connection.issue = number + 1;
                    }
                }
                Turn::Wait => {
                    let control = self.connections.get(&id).map(|c| c.control.len());
                    if control == Some(0) {
                        return did;
                    }
                    // The turn asked for something: send that.
                    let _ = self.send_control(id);
                    return did;
                }
                Turn::Fail(kind) => {
                    self.break_connection(id, Some(number), kind);
                    return true;
                }
            }
        }
        if self.connections.get(&id).is_some_and(|c| !c.has_work()) {
            self.busy.remove(&id);
        }
        did
    }

    /// Sends the messages that wait, unless an operation must go first; whether there were any.
    /// `Err`: the provider takes none before something has completed, or the connection ended.
    fn send_control(&mut self, id: u64) -> Result<bool, ()> {
        let mut did = false;
        loop {
            let Some(connection) = self.connections.get_mut(&id) else {
                return Err(());
            };
            if connection.starved && connection.issue < connection.next {
                return Ok(did);
            }
            let Some((kind, _, payload)) = connection.control.front() else {
                return Ok(did);
            };
            let unanswered = connection.theirs.is_none() && *kind != Kind::Hello;
            let len = HEADER_BYTES + payload.len();
            if unanswered || !self.may_fly(id, len) {
                return Err(());
            }
            let Some(connection) = self.connections.get_mut(&id) else {
                return Err(());
            };
            let Some((kind, words, payload)) = connection.control.pop_front() else {
                return Ok(did);
            };
            let header = Header {
                kind,
                number: connection.sent,
                incarnation: connection.incarnation,
                connection: connection.theirs.unwrap_or(0),
                words,
            };
            let peer = connection.peer;
            match self.send_message(id, peer, header, &payload) {
                Ok(()) => {
                    did = true;
                    if kind != Kind::Hello {
                        self.message_sent(id);
                    }
                }
                Err(Refusal::Again) => {
                    if let Some(connection) = self.connections.get_mut(&id) {
                        connection.control.push_front((kind, words, payload));
                    }
                    return Err(());
                }
                Err(Refusal::Error(code)) => {
                    let number = i32::try_from(-code).unwrap_or(0);
                    let kind = provider_failure(number, sys::text(code));
                    self.break_connection(id, None, kind);
                    return Err(());
                }
            }
        }
    }

    fn tell_drained(&mut self, id: u64) {
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        let draining = std::mem::take(&mut connection.draining);
        let (still, done): (Vec<u64>, Vec<u64>) =
            draining.into_iter().partition(|&key| connection.uses(key));
        connection.draining = still;
        for key in done {
            self.tell(id, Kind::Drained, [key, 0, 0, 0, 0], Vec::new());
        }
    }

    /// Whether the provider may be given `len` more bytes for a connection. See
    /// [`Terms::max_flying`]; messages count until they complete, which with `sockets` is when the
    /// peer has them.
    pub fn may_fly(&self, id: u64, len: usize) -> bool {
        let Some(most) = self.terms.max_flying else {
            return true;
        };
        let flying = self.slots.all().filter_map(|work| match work {
            Work::Operation {
                connection, buffer, ..
            }
            | Work::Message { connection, buffer } => {
                (*connection == id).then_some(buffer.len + FLYING_HEAD)
            }
            Work::Receive { .. } | Work::Segment { .. } => None,
        });
        let flying: usize = flying.sum();
        flying == 0 || flying + len + FLYING_HEAD <= most
    }
}

//! Connections of an endpoint, no matter which side opened them, and their messages.

use std::sync::Arc;
use std::time::Instant;

use super::layout::{Control, connection, split_state, state_word};
use super::link::{Link, Wanted};
use super::peer::Peer;
use super::process::{Identity, ring};
use super::ring::{Direction, Garbage, Ring};
use crate::endpoint::FabricError;
use crate::event::FailureKind;
use crate::key::{Access, Address, AppendKey};
use crate::operation::{ConnectionId, Operation};

/// An operation that is not complete yet. While there is one, its connection takes no other.
pub(super) enum Pending {
    /// A message of which so many bytes are in the ring.
    Message {
        bytes: Vec<u8>,
        sent: usize,
        context: u64,
    },
    /// An append that waits for a segment.
    Append {
        queue: AppendKey,
        bytes: Vec<u8>,
        context: u64,
        until: Instant,
    },
}

/// What waits, and its length.
#[derive(Clone, Copy)]
pub(super) struct Name(&'static str, usize);

impl Name {
    pub(super) fn describe(self) -> String {
        format!("{} of {}", self.0, self.1)
    }
}

impl Pending {
    pub(super) fn context(&self) -> u64 {
        match self {
            Pending::Message { context, .. } | Pending::Append { context, .. } => *context,
        }
    }

    pub(super) fn name(&self) -> Name {
        match self {
            Pending::Message { bytes, .. } => Name("message", bytes.len()),
            Pending::Append { bytes, .. } => Name("append", bytes.len()),
        }
    }
}

/// A connection that has not ended.
pub(super) struct Connection {
    pub id: ConnectionId,
    pub peer: Arc<Peer>,
    /// Where the messages go: the peer's control file, or this endpoint's own if the peer opened
    /// the connection.
    control: Control,
    pub slot: u64,
    outward: Direction,
    /// This endpoint's slot at the peer; made at the first use where the peer opened the
    /// connection.
    link: Option<Link>,
    /// What has arrived of a message in pieces.
    assembly: Vec<u8>,
    pub pending: Option<Pending>,
}

impl Connection {
    /// One that this endpoint opened.
    pub(super) fn opened(id: ConnectionId, link: Link) -> Connection {
        Connection {
            id,
            peer: Arc::clone(&link.peer),
            control: link.peer.control.clone(),
            slot: link.slot,
            outward: Direction::ToOwner,
            link: Some(link),
            assembly: Vec::new(),
            pending: None,
        }
    }

    /// One that the peer opened, by a slot of this endpoint's control file.
    pub(super) fn accepted(
        id: ConnectionId,
        peer: Arc<Peer>,
        control: Control,
        slot: u64,
    ) -> Connection {
        Connection {
            id,
            peer,
            control,
            slot,
            outward: Direction::ToInitiator,
            link: None,
            assembly: Vec::new(),
            pending: None,
        }
    }

    pub(super) fn is_accepted(&self) -> bool {
        self.outward == Direction::ToInitiator
    }

    /// This endpoint's slot at the peer.
    #[inline]
    pub(super) fn link(
        &mut self,
        own: Identity,
        address: &Address,
    ) -> Result<&mut Link, FailureKind> {
        if self.link.is_none() {
            let link = Link::open(Arc::clone(&self.peer), own, address);
            let link = link.map_err(|error| match error {
                FabricError::BadAddress(_) => FailureKind::PeerGone,
                error => FailureKind::Provider(error.to_string()),
            })?;
            self.link = Some(link);
        }
        // Made just above if it was not there.
        self.link.as_mut().ok_or(FailureKind::PeerGone)
    }

    fn out(&self) -> Ring<'_> {
        Ring::new(&self.control, self.slot, self.outward)
    }

    fn inward(&self) -> Ring<'_> {
        let direction = match self.outward {
            Direction::ToOwner => Direction::ToInitiator,
            Direction::ToInitiator => Direction::ToOwner,
        };
        Ring::new(&self.control, self.slot, direction)
    }

    /// Whether the other side has ended it. Messages may still lie in the ring.
    pub(super) fn is_ended(&self) -> bool {
        if self.is_accepted() {
            let (_, state) = split_state(self.control.slot_state(self.slot));
            state != connection::ACCEPTED
        } else {
            !self.control.is_live() || self.link.as_ref().is_none_or(Link::is_ended)
        }
    }

    /// Whether a message of this length goes into the ring at once, if it has room.
    pub(super) fn fits(&self, len: usize) -> bool {
        len <= self.out().max_piece()
    }

    /// Puts as many pieces as there is room for into the ring; answers how many bytes are in it
    /// now.
    pub(super) fn push(&self, bytes: &[u8], mut sent: usize) -> Result<(usize, bool), FailureKind> {
        if self.is_ended() {
            return Err(FailureKind::PeerGone);
        }
        let out = self.out();
        let before = sent;
        let mut is_whole = false;
        while !is_whole {
            let piece = (bytes.len() - sent).min(out.max_piece());
            let more = sent + piece < bytes.len();
            let pushed = out.push(&bytes[sent..sent + piece], more);
            if !pushed.map_err(|Garbage| FailureKind::Provider("a bad message ring".into()))? {
                break;
            }
            sent += piece;
            is_whole = !more;
        }
        if is_whole || sent > before {
            ring(&self.peer.control);
        }
        Ok((sent, is_whole))
    }

    /// Takes the next whole message, if it is there.
    pub(super) fn receive(&mut self, max: usize) -> Result<Option<Vec<u8>>, Garbage> {
        loop {
            let Some((piece, starved)) = self.inward().pop()? else {
                return Ok(None);
            };
            if starved {
                ring(&self.peer.control);
            }
            if self.assembly.len() + piece.bytes.len() > max {
                return Err(Garbage);
            }
            if self.assembly.is_empty() && !piece.more {
                return Ok(Some(piece.bytes));
            }
            self.assembly.extend_from_slice(&piece.bytes);
            if !piece.more {
                return Ok(Some(std::mem::take(&mut self.assembly)));
            }
        }
    }

    /// Notifies the other side, and releases the slots.
    pub(super) fn end(&self) {
        if let Some(link) = &self.link {
            link.close();
        }
        if self.is_accepted() {
            let word = self.control.slot_state(self.slot);
            let (pid, state) = split_state(word);
            let ended = state_word(pid, connection::ENDED);
            if state == connection::ACCEPTED && self.control.change_slot(self.slot, word, ended) {
                ring(&self.peer.control);
            }
            // One that the initiator has closed is freed by who looks through the slots.
        }
    }

    /// Performs an operation on memory; answers the word before and the bytes read.
    #[inline]
    pub(super) fn perform(
        &mut self,
        own: Identity,
        address: &Address,
        operation: &Operation<'_>,
    ) -> Result<(u64, Vec<u8>), FailureKind> {
        let link = self.link(own, address)?;
        let wanted = |key, offset, len, access| Wanted {
            key,
            offset,
            len,
            access,
        };
        match *operation {
            Operation::Write { key, offset, bytes } => {
                let wanted = wanted(key, offset, bytes.len() as u64, Access::WRITE);
                link.perform(wanted, |memory, at| memory.write(at, bytes))?;
            }
            Operation::Read { key, offset, len } => {
                let wanted = wanted(key, offset, len, Access::READ);
                let bytes = link.perform(wanted, |memory, at| memory.read_vec(at, len))?;
                return Ok((0, bytes));
            }
            Operation::Flush { key, offset, len } => {
                let wanted = wanted(key, offset, len, Access::WRITE);
                link.perform(wanted, |memory, at| memory.persist(at, len))?;
            }
            Operation::CompareSwap {
                key,
                offset,
                old,
                new,
            } => {
                let wanted = wanted(key, offset, 8, Access::ATOMIC);
                let swap =
                    |memory: &cyclone_pmem::SharedArea, at| memory.compare_swap(at, old, new);
                return Ok((link.perform(wanted, swap)?, Vec::new()));
            }
            Operation::FetchAdd { key, offset, value } => {
                let wanted = wanted(key, offset, 8, Access::ATOMIC);
                let before = link.perform(wanted, |memory, at| memory.fetch_add(at, value))?;
                return Ok((before, Vec::new()));
            }
            Operation::Append { .. } | Operation::Send { .. } => {
                return Err(FailureKind::Provider("no operation on memory".into()));
            }
        }
        Ok((0, Vec::new()))
    }
}

/// An operation, for people.
pub(super) fn describe(operation: &Operation<'_>) -> String {
    match operation {
        Operation::Write { offset, bytes, .. } => format!("write {offset}+{}", bytes.len()),
        Operation::Read { offset, len, .. } => format!("read {offset}+{len}"),
        Operation::Flush { offset, len, .. } => format!("flush {offset}+{len}"),
        Operation::CompareSwap { offset, .. } => format!("compare-swap {offset}"),
        Operation::FetchAdd { offset, .. } => format!("fetch-add {offset}"),
        Operation::Append { bytes, .. } => format!("append of {}", bytes.len()),
        Operation::Send { bytes } => format!("message of {}", bytes.len()),
    }
}

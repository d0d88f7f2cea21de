//! The initiator's side: operations wait for their grant and their turn, go to the provider, and
//! complete.

use std::time::Instant;

use super::buffers::Buffer;
use super::core::{Core, provider_failure};
use super::port::{Piece, Refusal, Remote};
use super::state::{Ask, Grant, Pending, Work};
use super::sys;
use super::wire::{HEADER_BYTES, Header, Kind};
use crate::endpoint::FabricError;
use crate::event::{Event, FailureKind};
use crate::key::{MemoryKey, Token};
use crate::operation::{ConnectionId, Operation};

/// What became of the operation whose turn it was.
pub enum Turn {
    /// The next one's turn.
    Next,
    /// Not yet.
    Wait,
    /// It fails.
    Fail(FailureKind),
}

/// An operation's parts, whatever it does.
struct Shape<'a> {
    ask: Ask,
    key: MemoryKey,
    offset: u64,
    len: u64,
    bytes: &'a [u8],
    words: [u64; 2],
}

fn shape<'a>(operation: &Operation<'a>) -> Shape<'a> {
    let none = MemoryKey {
        id: 0,
        token: Token(0),
        len: 0,
    };
    let shape = |ask, key: &MemoryKey, offset, len| Shape {
        ask,
        key: *key,
        offset,
        len,
        bytes: &[],
        words: [0; 2],
    };
    match *operation {
        Operation::Write { key, offset, bytes } => Shape {
            bytes,
            ..shape(Ask::Write, key, offset, bytes.len() as u64)
        },
        Operation::Read { key, offset, len } => shape(Ask::Read, key, offset, len),
        Operation::Flush { key, offset, len } => shape(Ask::Flush, key, offset, len),
        Operation::CompareSwap {
            key,
            offset,
            old,
            new,
        } => Shape {
            words: [new, old],
            ..shape(Ask::CompareSwap, key, offset, 8)
        },
        Operation::FetchAdd { key, offset, value } => Shape {
            words: [value, 0],
            ..shape(Ask::FetchAdd, key, offset, 8)
        },
        Operation::Append { queue, bytes } => Shape {
            bytes,
            ..shape(Ask::Append, &queue.0, 0, bytes.len() as u64)
        },
        Operation::Send { bytes } => Shape {
            bytes,
            ..shape(Ask::Send, &none, 0, bytes.len() as u64)
        },
    }
}

impl Core {
    /// Posts an operation of the program's.
    pub fn post(
        &mut self,
        connection: u64,
        operation: &Operation<'_>,
        context: u64,
    ) -> Result<(), FabricError> {
        let shape = shape(operation);
        let max = match shape.ask {
            Ask::Append => self.options.max_append,
            _ => self.terms.max_transfer,
        };
        let len = usize::try_from(shape.len).unwrap_or(usize::MAX);
        if shape.ask != Ask::Flush && len > max {
            return Err(FabricError::TooLarge { len, max });
        }
        self.refuse_unsupported(shape.ask)?;
        let most = self.options.max_operations;
        let known = self.connections.get(&connection).filter(|c| !c.inner);
        let pending = known.ok_or(FabricError::Unknown("connection"))?;
        if pending.pending.len() >= most || !self.slots.has_room() {
            return Err(FabricError::Busy);
        }
        let buffer = self.fill_buffer(&shape)?;
        let Some(known) = self.connections.get_mut(&connection) else {
            return Err(FabricError::Unknown("connection"));
        };
        let number = known.next;
        known.next += 1;
        known.pending.insert(
            number,
            Pending {
                context,
                ask: shape.ask,
                id: shape.key.id,
                token: shape.key.token,
                claimed: shape.key.len,
                offset: shape.offset,
                len: shape.len,
                posted: Instant::now(),
                buffer,
            },
        );
        self.busy.insert(connection);
        self.pump(connection);
        Ok(())
    }

    fn refuse_unsupported(&self, ask: Ask) -> Result<(), FabricError> {
        let what = match ask {
            Ask::Append if !self.terms.multi_receive => "append",
            _ => return Ok(()),
        };
        Err(FabricError::Unsupported {
            provider: self.terms.name.clone(),
            what,
        })
    }

    fn fill_buffer(&mut self, shape: &Shape<'_>) -> Result<Option<Buffer>, FabricError> {
        let bytes = shape.bytes.len();
        let len = match shape.ask {
            Ask::Flush => return Ok(None),
            Ask::Read => shape.len as usize,
            Ask::CompareSwap | Ask::FetchAdd => 24,
            Ask::Append => bytes.next_multiple_of(64),
            Ask::Send => HEADER_BYTES + bytes,
            Ask::Write => bytes,
        };
        let mut buffer = self.buffer(len)?;
        match shape.ask {
            Ask::Read => buffer.len = len,
            Ask::CompareSwap | Ask::FetchAdd => {
                let [first, second] = shape.words.map(u64::to_ne_bytes);
                buffer.fill(&[&first, &second], len);
            }
            Ask::Send => buffer.fill(&[&[0; HEADER_BYTES], shape.bytes], len),
            _ => buffer.fill(&[shape.bytes], len),
        }
        Ok(Some(buffer))
    }

    /// The means for an operation's key; asks for them the first time.
    fn grant(&mut self, id: u64, key: (u64, u64)) -> Option<Grant> {
        let connection = self.connections.get_mut(&id)?;
        match connection.grants.get(&key) {
            Some(Grant::Asked) => None,
            Some(grant) => Some(grant.clone()),
            None => {
                connection.grants.insert(key, Grant::Asked);
                self.tell(id, Kind::Resolve, [key.0, key.1, 0, 0, 0], Vec::new());
                None
            }
        }
    }

    /// Hands an operation to the provider, if it may go.
    pub fn issue(&mut self, id: u64, number: u64) -> Turn {
        let Some((ask, key)) = self.connections.get(&id).and_then(|connection| {
            let pending = connection.pending.get(&number)?;
            Some((pending.ask, (pending.id, pending.token.0)))
        }) else {
            // It failed before its turn.
            return Turn::Next;
        };
        if ask == Ask::Send {
            return self.issue_send(id, number);
        }
        match self.grant(id, key) {
            None => Turn::Wait,
            // Where not all goes out at once: operations in flight end first, as if there were no
            // others.
            Some(Grant::Denied(_)) if self.terms.max_flying.is_some() && self.has_flying(id) => {
                Turn::Wait
            }
            Some(Grant::Denied(kind)) => Turn::Fail(kind),
            Some(Grant::Queue { peer, max }) if ask == Ask::Append => {
                self.issue_append(id, number, peer, max)
            }
            Some(Grant::Memory {
                base,
                key,
                len,
                access,
            }) if ask != Ask::Append => {
                let Some(pending) = self
                    .connections
                    .get(&id)
                    .and_then(|c| c.pending.get(&number))
                else {
                    return Turn::Next;
                };
                if !access.allows(ask.needs()) {
                    return Turn::Fail(FailureKind::NotAllowed);
                }
                let end = pending.offset.checked_add(pending.len);
                if end.is_none_or(|end| end > len.min(pending.claimed)) {
                    return Turn::Fail(FailureKind::OutOfBounds);
                }
                let address = base.wrapping_add(pending.offset);
                if matches!(ask, Ask::CompareSwap | Ask::FetchAdd)
                    && !pending.offset.is_multiple_of(8)
                {
                    return Turn::Fail(FailureKind::Misaligned);
                }
                if ask == Ask::Flush {
                    return self.issue_flush(id, number);
                }
                if pending.len == 0 {
                    self.complete(id, number, 0, Vec::new());
                    return Turn::Next;
                }
                if matches!(ask, Ask::CompareSwap | Ask::FetchAdd) && !self.terms.atomics {
                    return self.issue_emulated(id, number);
                }
                self.issue_one_sided(id, number, address, key)
            }
            Some(_) => Turn::Fail(FailureKind::NotRegistered),
        }
    }

    /// Whether the provider holds one-sided operations of a connection's.
    fn has_flying(&self, id: u64) -> bool {
        self.connections.get(&id).is_some_and(|it| it.flying > 0)
    }

    /// Takes the operation's buffer into a slot and lets `call` hand it to the provider.
    fn fly(
        &mut self,
        id: u64,
        number: u64,
        call: impl FnOnce(&Core, Piece, *mut std::ffi::c_void) -> Result<(), Refusal>,
    ) -> Turn {
        let connection = self.connections.get(&id);
        let pending = connection.and_then(|it| it.pending.get(&number));
        let Some(len) = pending.and_then(|it| it.buffer.as_ref()).map(|it| it.len) else {
            return Turn::Next;
        };
        let has_room = self.may_fly(id, len);
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.starved = !has_room;
        }
        if !has_room {
            return Turn::Wait;
        }
        let buffer = self
            .connections
            .get_mut(&id)
            .and_then(|connection| connection.pending.get_mut(&number)?.buffer.take());
        let Some(buffer) = buffer else {
            return Turn::Next;
        };
        let piece = buffer.piece();
        let entered = self.slots.enter(Work::Operation {
            connection: id,
            operation: number,
            buffer,
        });
        let (refusal, work) = match entered {
            Ok(index) => match call(self, piece, self.slots.context(index)) {
                Ok(()) => return Turn::Next,
                Err(refusal) => (refusal, self.slots.leave(index)),
            },
            Err(work) => (Refusal::Again, Some(work)),
        };
        if let Some(Work::Operation { buffer, .. }) = work
            && let Some(connection) = self.connections.get_mut(&id)
            && let Some(pending) = connection.pending.get_mut(&number)
        {
            pending.buffer = Some(buffer);
        }
        match refusal {
            Refusal::Again => Turn::Wait,
            Refusal::Error(code) => {
                let error = i32::try_from(-code).unwrap_or(0);
                Turn::Fail(provider_failure(error, sys::text(code)))
            }
        }
    }

    fn issue_one_sided(&mut self, id: u64, number: u64, address: u64, key: u64) -> Turn {
        let Some(connection) = self.connections.get(&id) else {
            return Turn::Next;
        };
        let Some(pending) = connection.pending.get(&number) else {
            return Turn::Next;
        };
        let ask = pending.ask;
        let remote = Remote {
            peer: connection.peer,
            address,
            key,
        };
        let commits = self.terms.commit;
        let turn = self.fly(id, number, |core, piece, context| {
            // SAFETY: the slot holds buffer and context until the completion; atomics have 24
            // bytes, aligned to 64.
            unsafe {
                match ask {
                    Ask::CompareSwap => core.port.atomic(true, piece, remote, context),
                    Ask::FetchAdd => core.port.atomic(false, piece, remote, context),
                    Ask::Read => core.port.transfer(true, piece, remote, 0, context),
                    _ => {
                        let flags = if commits {
                            sys::COMMIT_COMPLETE
                        } else {
                            sys::DELIVERY_COMPLETE
                        };
                        core.port.transfer(false, piece, remote, flags, context)
                    }
                }
            }
        });
        if matches!(turn, Turn::Next)
            && let Some(connection) = self.connections.get_mut(&id)
        {
            connection.flying += 1;
            connection.uncommitted |= matches!(ask, Ask::CompareSwap | Ask::FetchAdd);
        }
        turn
    }

    fn issue_send(&mut self, id: u64, number: u64) -> Turn {
        let Some(connection) = self.connections.get_mut(&id) else {
            return Turn::Next;
        };
        let header = Header {
            kind: Kind::User,
            number: connection.sent,
            incarnation: connection.incarnation,
            connection: connection.theirs.unwrap_or(0),
            words: [0; 5],
        };
        let peer = connection.peer;
        if let Some(pending) = connection.pending.get_mut(&number)
            && let Some(buffer) = &mut pending.buffer
        {
            buffer.set_head(&header.encode(pending.len as usize));
        }
        let mut sent = false;
        let turn = self.fly(id, number, |core, piece, context| {
            // SAFETY: the slot holds buffer and context until the completion.
            let posted = unsafe {
                core.port
                    .send(peer, piece, None, sys::DELIVERY_COMPLETE, context)
            };
            sent = posted.is_ok();
            posted
        });
        if sent {
            self.message_sent(id);
        }
        turn
    }

    fn issue_append(&mut self, id: u64, number: u64, peer: u64, max: u64) -> Turn {
        let Some(connection) = self.connections.get(&id) else {
            return Turn::Next;
        };
        let Some(pending) = connection.pending.get(&number) else {
            return Turn::Next;
        };
        if pending.len > max {
            return Turn::Fail(FailureKind::OutOfBounds);
        }
        if pending.len == 0 {
            self.complete(id, number, 0, Vec::new());
            return Turn::Next;
        }
        // The receiver's thread answers with the operation's number, in 32 bits, when the bytes are
        // durable.
        let data = connection.theirs.unwrap_or(0) << 32 | (number & 0xffff_ffff);
        self.fly(id, number, |core, piece, context| {
            // SAFETY: the slot holds buffer and context until the completion.
            unsafe { core.port.send(peer, piece, Some(data), 0, context) }
        })
    }

    /// A flush covers what was written before: it goes out when that is in the target's memory, or
    /// at once where the provider keeps messages behind writes. Where writes complete when they are
    /// durable, nothing is left to do.
    fn issue_flush(&mut self, id: u64, number: u64) -> Turn {
        let commits = self.terms.commit;
        let in_order = self.terms.send_after_write;
        let Some(connection) = self.connections.get_mut(&id) else {
            return Turn::Next;
        };
        if commits && !connection.uncommitted {
            if connection.flying > 0 {
                return Turn::Wait;
            }
            self.complete(id, number, 0, Vec::new());
            return Turn::Next;
        }
        if connection.flying > 0 && (commits || !in_order) {
            return Turn::Wait;
        }
        connection.uncommitted = false;
        let Some(pending) = connection.pending.get(&number) else {
            return Turn::Next;
        };
        let words = [
            number,
            pending.id,
            pending.token.0,
            pending.offset,
            pending.len,
        ];
        self.tell(id, Kind::Flush, words, Vec::new());
        Turn::Next
    }

    /// The provider is done with an operation's buffer.
    pub fn operation_done(
        &mut self,
        id: u64,
        number: u64,
        buffer: &Buffer,
        error: Option<(i32, String)>,
    ) {
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        let Some(pending) = connection.pending.get(&number) else {
            // An append given up while the provider still held it.
            return;
        };
        let ask = pending.ask;
        if ask.one_sided() {
            connection.flying = connection.flying.saturating_sub(1);
        }
        if let Some((code, words)) = error {
            let mut kind = provider_failure(code, words);
            // Providers end their connection when they refuse a key: what the owner told us of it
            // is more precise.
            let key = (pending.id, pending.token.0);
            if let Some(Grant::Denied(why)) = connection.grants.get(&key) {
                kind = why.clone();
            }
            return self.break_connection(id, Some(number), kind);
        }
        let len = pending.len as usize;
        match ask {
            // Complete when the receiver says that it is durable.
            Ask::Append => {}
            Ask::Read => self.complete(id, number, 0, buffer.bytes(len).to_vec()),
            Ask::CompareSwap | Ask::FetchAdd => {
                self.complete(id, number, buffer.word(2), Vec::new());
            }
            _ => self.complete(id, number, 0, Vec::new()),
        }
    }

    /// Reports an operation's completion.
    pub fn complete(&mut self, id: u64, number: u64, value: u64, bytes: Vec<u8>) {
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        let Some(pending) = connection.pending.remove(&number) else {
            return;
        };
        if let Some(buffer) = pending.buffer {
            self.buffers.give(buffer);
        }
        // A flush may have waited for it, or the owner of a revoked key.
        if connection.has_work() {
            self.busy.insert(id);
        }
        self.events.push_back(Event::Completed {
            connection: ConnectionId(id),
            context: pending.context,
            value,
            bytes,
        });
    }

    /// The bound of waiting has passed. An append that found no room while its receiver lives is
    /// not the connection's end.
    pub fn operation_expired(&mut self, id: u64, number: u64, now: Instant) {
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        let heard = connection.heard;
        // It was asked every quarter of the time: what it said long ago says nothing.
        let heard_lately = now.duration_since(heard) < self.options.operation_timeout / 2;
        let lives = |pending: &Pending| {
            pending.ask == Ask::Append && heard > pending.posted && heard_lately
        };
        if number < connection.issue && connection.pending.get(&number).is_some_and(lives) {
            if let Some(pending) = connection.pending.remove(&number) {
                self.failed(id, pending, FailureKind::NoSegment);
            }
            return;
        }
        self.break_connection(id, Some(number), FailureKind::PeerGone);
    }
}

//! The target's side: messages of peers, grants, flushes; registering memory and ending access to
//! it.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::core::{Core, split_address};
use super::port::Registered;
use super::state::{Grant, Registration, Revoking};
use super::sys;
use super::turns::Arrival;
use super::wire::{Header, Kind, failure, reason};
use crate::endpoint::FabricError;
use crate::event::FailureKind;
use crate::key::{Access, Address, MemoryKey, Token};

/// The remote key that a token selects: for one registration, different tokens give different keys,
/// and a key of one process is none of another's. The provider compares all its bits at every
/// operation.
pub fn remote_key(incarnation: u64, id: u64, token: Token) -> u64 {
    // SplitMix64's finaliser, a bijection.
    let mix = |word: u64| {
        let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    };
    mix(token.0 ^ mix(id ^ mix(incarnation)))
}

impl Core {
    /// A peer's message, handled when its turn comes. Whatever does not make sense is dropped.
    pub fn handle(&mut self, header: Header, payload: &[u8], now: Instant) {
        if header.incarnation != self.incarnation {
            return;
        }
        if header.kind == Kind::Hello {
            return self.hello(header.words, payload);
        }
        let id = header.connection;
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        match connection.turns.arrived(header, payload) {
            Arrival::InTurn => {}
            Arrival::Early | Arrival::Late => return,
            Arrival::TooMany => {
                let why = "too many messages overtook one".to_owned();
                return self.break_connection(id, None, FailureKind::Provider(why));
            }
        }
        self.handle_in_turn(header, payload, now);
        while let Some(connection) = self.connections.get_mut(&id)
            && let Some((header, payload)) = connection.turns.next()
        {
            self.handle_in_turn(header, &payload, now);
        }
    }

    fn handle_in_turn(&mut self, header: Header, payload: &[u8], now: Instant) {
        let id = header.connection;
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        // A peer whose messages wait for one that never comes is as good as silent.
        connection.heard = now;
        let [a, b, c, d, e] = header.words;
        match header.kind {
            Kind::Hello => {}
            Kind::Welcome => {
                if connection.theirs.is_none() && connection.incarnation == a {
                    connection.theirs = Some(b);
                    connection.answers = c == 1;
                    self.busy.insert(id);
                    self.link_ready(id);
                }
            }
            Kind::Bye => self.bye(id, a == 1),
            Kind::User => self.received(id, payload),
            Kind::Resolve => self.resolve(id, a, Token(b)),
            Kind::Granted => self.granted(id, (a, b), [c, d, e], payload),
            Kind::Denied => {
                let why = failure(c).unwrap_or(FailureKind::NotRegistered);
                connection.grants.insert((a, b), Grant::Denied(why));
                self.busy.insert(id);
            }
            Kind::Flush => {
                let why = self
                    .flush(b, Token(c), d, e)
                    .map_or_else(|why| reason(&why), |()| 0);
                self.tell(id, Kind::Flushed, [a, why, 0, 0, 0], Vec::new());
            }
            Kind::Flushed => match failure(b) {
                None => self.complete(id, a, 0, Vec::new()),
                Some(why) if connection.pending.contains_key(&a) => {
                    self.break_connection(id, Some(a), why);
                }
                Some(_) => {}
            },
            Kind::Appended => self.appended(id, payload),
            Kind::Revoked => self.revoked(id, a, b == 1),
            Kind::Drained => {
                if let Some(revoking) = &mut self.revoking
                    && revoking.key == a
                {
                    revoking.waiting.remove(&id);
                }
            }
            Kind::Ping => self.tell(id, Kind::Pong, [0; 5], Vec::new()),
            Kind::Pong => {}
            Kind::ChainOpen => self.chain_open(id, a, b, payload),
            Kind::ChainReady => self.chain_ready(id, a, b, c),
            Kind::ChainRun => self.chain_run(a, b, c, payload),
            Kind::ChainDone => self.chain_done(id, [a, b, c, d], payload),
            Kind::ChainClose => self.chain_close(a),
            Kind::Atomic => self.atomic(id, header.words, payload),
            Kind::AtomicDone => self.atomic_done(id, header.words),
        }
    }

    fn hello(&mut self, [incarnation, theirs, answers, ..]: [u64; 5], payload: &[u8]) {
        let address = Address(payload.to_vec());
        let Some((claimed, raw)) = split_address(&address, &self.terms.name) else {
            return;
        };
        if claimed != incarnation {
            return;
        }
        // Refused for want of room: the initiator's bound of waiting ends it.
        let Ok(id) = self.new_connection(raw, address.clone(), incarnation) else {
            return;
        };
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.theirs = Some(theirs);
            connection.answers = answers == 1;
        }
        self.tell(
            id,
            Kind::Welcome,
            [self.incarnation, id, self.answers(), 0, 0],
            Vec::new(),
        );
    }

    /// A peer ends a connection; `idle` if nothing of it is in flight.
    fn bye(&mut self, id: u64, idle: bool) {
        if idle {
            for registration in self.registrations.values_mut() {
                registration.granted.remove(&id);
            }
            if let Some(revoking) = &mut self.revoking {
                revoking.waiting.remove(&id);
            }
        }
        self.break_connection(id, None, FailureKind::PeerGone);
    }

    /// Gives a peer the means to use a key, if it knows the token.
    fn resolve(&mut self, id: u64, key: u64, token: Token) {
        let words = |rest: [u64; 3]| [key, token.0, rest[0], rest[1], rest[2]];
        let answer = if let Some(memory) = self.registrations.get_mut(&key) {
            if memory.token == token {
                memory.granted.insert(id);
                // Where applications choose keys, the initiator derives the key from the token
                // itself.
                let chosen = if self.terms.application_keys {
                    0
                } else {
                    memory.memory.key()
                };
                let rights = vec![memory.access.bits()];
                Ok((words([memory.base, chosen, memory.len]), rights))
            } else {
                Err(FailureKind::WrongToken)
            }
        } else if let Some(queue) = self.queues.get_mut(&key) {
            if queue.token != token {
                Err(FailureKind::WrongToken)
            } else if queue.port.is_none() {
                Err(FailureKind::Closed)
            } else {
                queue.granted.insert(id);
                let mut payload = vec![u8::MAX];
                payload.extend(&queue.address);
                Ok((words([0, 0, self.options.max_append as u64]), payload))
            }
        } else {
            Err(FailureKind::NotRegistered)
        };
        match answer {
            Ok((words, payload)) => self.tell(id, Kind::Granted, words, payload),
            Err(why) => self.tell(id, Kind::Denied, words([reason(&why), 0, 0]), Vec::new()),
        }
    }

    fn granted(&mut self, id: u64, name: (u64, u64), [base, key, len]: [u64; 3], payload: &[u8]) {
        let Some((&rights, address)) = payload.split_first() else {
            return;
        };
        let grant = match Access::from_bits(rights) {
            Some(access) => {
                let incarnation = self.connections.get(&id).map_or(0, |c| c.incarnation);
                let derived = remote_key(incarnation, name.0, Token(name.1)) & self.terms.key_mask;
                let chosen = self.terms.application_keys;
                Grant::Memory {
                    base,
                    key: if chosen { derived } else { key },
                    len,
                    access,
                }
            }
            None => match self.peer(address) {
                Ok(peer) => Grant::Queue { peer, max: len },
                Err(why) => Grant::Denied(FailureKind::Provider(why.to_string())),
            },
        };
        if let Some(connection) = self.connections.get_mut(&id)
            && let Some(asked @ Grant::Asked) = connection.grants.get_mut(&name)
        {
            *asked = grant;
            self.busy.insert(id);
        }
    }

    /// Where a range of a registration lies in the endpoint's memory, if the key and the rights
    /// allow it.
    pub fn own_range(
        &self,
        id: u64,
        token: Token,
        (offset, len): (u64, u64),
        needs: Access,
    ) -> Result<u64, FailureKind> {
        let memory = self
            .registrations
            .get(&id)
            .ok_or(FailureKind::NotRegistered)?;
        if memory.token != token {
            return Err(FailureKind::WrongToken);
        }
        if !memory.access.allows(needs) {
            return Err(FailureKind::NotAllowed);
        }
        match offset.checked_add(len) {
            Some(end) if end <= memory.len => Ok(memory.offset + offset),
            _ => Err(FailureKind::OutOfBounds),
        }
    }

    fn flush(&self, id: u64, token: Token, offset: u64, len: u64) -> Result<(), FailureKind> {
        let start = self.own_range(id, token, (offset, len), Access::WRITE)?;
        self.area.persist(start, len);
        Ok(())
    }

    /// The owner ended a key.
    fn revoked(&mut self, id: u64, key: u64, queue: bool) {
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        let why = if queue {
            FailureKind::Closed
        } else {
            FailureKind::NotRegistered
        };
        for (name, grant) in &mut connection.grants {
            if name.0 == key {
                *grant = Grant::Denied(why.clone());
            }
        }
        connection.draining.push(key);
        self.busy.insert(id);
        let connection = self.connections.get(&id);
        let lost = connection.and_then(|connection| {
            let mut flying = connection.pending.range(..connection.issue);
            flying
                .find(|(_, pending)| queue && pending.id == key)
                .map(|(&number, _)| number)
        });
        if let Some(number) = lost {
            self.break_connection(id, Some(number), why);
        }
    }

    /// Registers a part of the endpoint's memory.
    pub fn register(
        &mut self,
        offset: u64,
        len: u64,
        access: Access,
        token: Token,
    ) -> Result<MemoryKey, FabricError> {
        let memory = self.area.len();
        if !offset.is_multiple_of(64) || len == 0 || !self.area.contains(offset, len) {
            return Err(FabricError::OutOfBounds {
                offset,
                len,
                memory,
            });
        }
        let id = self.next_key;
        self.next_key += 1;
        let start = self.area.part(offset, len).as_ptr();
        let mut rights = 0;
        if access.allows(Access::READ) || access.allows(Access::ATOMIC) {
            rights |= sys::REMOTE_READ;
        }
        if access.allows(Access::WRITE) || access.allows(Access::ATOMIC) {
            rights |= sys::REMOTE_WRITE;
        }
        let key = remote_key(self.incarnation, id, token) & self.terms.key_mask;
        let flags = if self.terms.commit { sys::RMA_PMEM } else { 0 };
        let len_bytes = usize::try_from(len).unwrap_or(usize::MAX);
        // SAFETY: `area` keeps the bytes mapped for the core's life and never borrows them;
        // registrations end before.
        let registered = unsafe {
            Registered::new(
                &self.provider,
                &self.port,
                (start, len_bytes),
                rights,
                key,
                flags,
            )?
        };
        let base = if self.terms.virtual_addresses {
            start as u64
        } else {
            0
        };
        self.registrations.insert(
            id,
            Registration {
                memory: registered,
                base,
                offset,
                len,
                access,
                token,
                granted: BTreeSet::new(),
            },
        );
        Ok(MemoryKey { id, token, len })
    }

    /// The first half of a revocation: no peer is given the means any more, and peers that were are
    /// asked to say when they have nothing in flight. The provider refuses them only in the second
    /// half: libfabric 1.17's shm never answers an operation that it refuses, and all that its
    /// initiator posts behind it waits for that answer.
    pub fn begin_revoke(&mut self, key: &MemoryKey) -> Result<(), FabricError> {
        let known = self
            .registrations
            .get(&key.id)
            .filter(|r| r.token == key.token);
        known.ok_or(FabricError::Unknown("registration"))?;
        let Some(registration) = self.registrations.remove(&key.id) else {
            return Err(FabricError::Unknown("registration"));
        };
        let granted = registration.granted;
        for &id in &granted {
            self.tell(id, Kind::Revoked, [key.id, 0, 0, 0, 0], Vec::new());
        }
        let (waiting, ended): (BTreeSet<u64>, BTreeSet<u64>) = granted
            .into_iter()
            .partition(|id| self.connections.contains_key(id));
        self.revoking = Some(Revoking {
            key: key.id,
            memory: registration.memory,
            waiting,
            lost: !ended.is_empty(),
        });
        Ok(())
    }

    /// Whether every peer has answered.
    pub fn revoke_is_done(&self) -> bool {
        self.revoking
            .as_ref()
            .is_none_or(|revoking| revoking.waiting.is_empty())
    }

    /// The second half: peers that did not answer in time, or whose connection ended with
    /// operations in flight, lose the port that these come in by.
    pub fn finish_revoke(&mut self) -> Result<(), FabricError> {
        let Some(revoking) = self.revoking.take() else {
            return Ok(());
        };
        let key = revoking.key;
        drop(revoking.memory);
        if revoking.waiting.is_empty() && !revoking.lost {
            return Ok(());
        }
        for id in revoking.waiting {
            self.break_connection(id, None, FailureKind::PeerGone);
        }
        // With named endpoints (shm) an operation that the target's thread has not begun finds no
        // registration, and one that it has begun was finished under the same lock.
        if self.provider.named() {
            return Ok(());
        }
        // What other peers are owed goes out first.
        let until = Instant::now() + Duration::from_millis(5);
        while Instant::now() < until {
            self.progress();
        }
        self.not_cut_off.insert(key);
        self.reopen()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_belongs_to_one_token_of_one_registration_of_one_process() {
        let mut keys = BTreeSet::new();
        for incarnation in 0..8 {
            for id in 0..8 {
                for token in 0..8 {
                    keys.insert(remote_key(incarnation, id, Token(token)));
                }
            }
        }
        assert_eq!(keys.len(), 512);
    }
}

//! Chains: one operation on every member's memory, carried from hop to hop by the members' provider
//! threads.
//!
//! A chain is opened at every member by the initiator itself: each learns its key, its place and
//! the next member's address, and says when its link to that one stands. An operation runs at a
//! member before it goes on, so that the last member's answer to the initiator speaks for all.
//! Messages of one connection are handled in order (turns.rs), and every member checks the
//! operations' numbers.
//!
//! libfabric's deferred work (`FI_TRIGGER`, only on `sockets`) does not do this: what it sends is
//! fixed when it is queued, while a chain's operation brings its own offset and length
//! (docs/adr/0008-libfabric.md).
//!
//= hyperloop §4: gWRITE, gCAS with execute and result maps, gMEMCPY, gFLUSH

use std::collections::{BTreeSet, VecDeque};
use std::time::Instant;

use super::core::{CHAIN_ROOM, Core};
use super::wire::{Kind, failure, reason, word_at};
use crate::endpoint::FabricError;
use crate::event::{Event, Failure, FailureKind};
use crate::key::{Access, Address, MemoryKey};
use crate::operation::{ChainId, ChainOperation, ChainShape, ConnectionId};

/// The most members: one bit each.
pub const MAX_MEMBERS: usize = 64;

/// A chain of this endpoint's.
pub struct Chain {
    shape: ChainShape,
    members: Vec<u64>,
    len: u64,
    /// Members whose link stands.
    ready: BTreeSet<u64>,
    opened: Instant,
    /// In order of posting; the first `sent` of them are on their way.
    pub(super) running: VecDeque<Running>,
    pub(super) sent: usize,
    next: u64,
    pub(super) name: u64,
}

pub(super) struct Running {
    number: u64,
    context: u64,
    what: String,
    posted: Instant,
    payload: Vec<u8>,
    swaps: bool,
    done: BTreeSet<u64>,
    values: Vec<u64>,
}

/// Fields of an operation before its data: kind, three words, number of results, results.
pub const FIXED: usize = 40;

fn encode(operation: &ChainOperation<'_>, members: usize) -> Vec<u8> {
    let (words, results, data): ([u64; 4], usize, &[u8]) = match *operation {
        ChainOperation::Write { offset, bytes } => ([1, offset, 0, 0], 0, bytes),
        ChainOperation::CompareSwap {
            offset,
            old,
            new,
            execute,
        } => {
            let mut data = vec![0; 8 * members + 8];
            data[8 * members..].copy_from_slice(&execute.to_le_bytes());
            return join([2, offset, old, new], members, &data);
        }
        ChainOperation::Copy { from, to, len } => ([3, from, to, len], 0, &[]),
        ChainOperation::Flush => ([4, 0, 0, 0], 0, &[]),
    };
    join(words, results, data)
}

fn join(words: [u64; 4], results: usize, rest: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(FIXED + rest.len());
    for word in words.into_iter().chain([results as u64]) {
        bytes.extend(word.to_le_bytes());
    }
    bytes.extend(rest);
    bytes
}

fn describe(operation: &ChainOperation<'_>) -> String {
    match *operation {
        ChainOperation::Write { offset, bytes } => format!("gWRITE {offset}+{}", bytes.len()),
        ChainOperation::CompareSwap { offset, .. } => format!("gCAS {offset}"),
        ChainOperation::Copy { from, to, len } => format!("gMEMCPY {from}+{len} to {to}"),
        ChainOperation::Flush => "gFLUSH".into(),
    }
}

/// A range in the members' memory, with the rights it needs.
type Needs = (u64, u64, Access);

/// What an operation touches.
fn needs(operation: &ChainOperation<'_>) -> Vec<Needs> {
    match *operation {
        ChainOperation::Write { offset, bytes } => {
            vec![(offset, bytes.len() as u64, Access::WRITE)]
        }
        ChainOperation::CompareSwap { offset, .. } => vec![(offset, 8, Access::ATOMIC)],
        ChainOperation::Copy { from, to, len } => {
            vec![(from, len, Access::READ), (to, len, Access::WRITE)]
        }
        ChainOperation::Flush => Vec::new(),
    }
}

/// Whether a copy's ranges overlap.
pub fn overlap(from: u64, to: u64, len: u64) -> bool {
    from.abs_diff(to) < len
}

impl Core {
    /// Opens a chain.
    pub fn open_chain(
        &mut self,
        shape: ChainShape,
        members: &[(ConnectionId, MemoryKey)],
    ) -> Result<ChainId, FabricError> {
        if members.is_empty() || members.len() > MAX_MEMBERS {
            return Err(FabricError::Limit {
                what: "chain member",
                limit: MAX_MEMBERS as u64,
            });
        }
        let addresses: Option<Vec<Address>> = members
            .iter()
            .map(|(id, _)| Some(self.connections.get(&id.0)?.address.clone()))
            .collect();
        let addresses = addresses.ok_or(FabricError::Unknown("connection"))?;
        let id = self.next_chain;
        self.next_chain += 1;
        // Members know chains of many initiators by this name.
        let name = super::random();
        for (place, (connection, key)) in members.iter().enumerate() {
            let mut payload = key.encode().to_vec();
            if shape == ChainShape::Chain
                && let Some(next) = addresses.get(place + 1)
            {
                payload.extend(&next.0);
            }
            let member = [name ^ place as u64, place as u64, 0, 0, 0];
            let words = if shape == ChainShape::Chain {
                [name, place as u64, 0, 0, 0]
            } else {
                member
            };
            self.tell(connection.0, Kind::ChainOpen, words, payload);
            self.pump(connection.0);
        }
        self.chains.insert(
            id,
            Chain {
                shape,
                members: members.iter().map(|(id, _)| id.0).collect(),
                len: members.iter().map(|(_, key)| key.len).min().unwrap_or(0),
                ready: BTreeSet::new(),
                opened: Instant::now(),
                running: VecDeque::new(),
                sent: 0,
                next: 0,
                name,
            },
        );
        Ok(ChainId(id))
    }

    /// Posts an operation on a chain.
    pub fn post_chain(
        &mut self,
        id: u64,
        operation: &ChainOperation<'_>,
        context: u64,
    ) -> Result<(), FabricError> {
        let most = self.options.max_operations;
        let max = self.terms.max_transfer;
        let chain = self
            .chains
            .get_mut(&id)
            .ok_or(FabricError::Unknown("chain"))?;
        if chain.running.len() >= most {
            return Err(FabricError::Busy);
        }
        if let ChainOperation::Write { bytes, .. } = operation
            && bytes.len() > max
        {
            let len = bytes.len();
            return Err(FabricError::TooLarge { len, max });
        }
        let fits =
            |&(offset, len, _): &Needs| offset.checked_add(len).is_some_and(|end| end <= chain.len);
        let wrong = if !needs(operation).iter().all(fits) {
            Some(FailureKind::OutOfBounds)
        } else {
            match *operation {
                ChainOperation::CompareSwap { offset, .. } if !offset.is_multiple_of(8) => {
                    Some(FailureKind::Misaligned)
                }
                ChainOperation::Copy { from, to, len } if overlap(from, to, len) => {
                    Some(FailureKind::OutOfBounds)
                }
                _ => None,
            }
        };
        let members = chain.members.len();
        chain.running.push_back(Running {
            number: chain.next,
            context,
            what: describe(operation),
            posted: Instant::now(),
            payload: encode(operation, members),
            swaps: matches!(operation, ChainOperation::CompareSwap { .. }),
            done: BTreeSet::new(),
            values: vec![0; members],
        });
        chain.next += 1;
        let number = chain.next - 1;
        match wrong {
            Some(kind) => self.break_chain(id, Some(number), kind),
            None => self.run_chain(id),
        }
        Ok(())
    }

    /// Sends what waits, once every link stands.
    fn run_chain(&mut self, id: u64) {
        let Some(chain) = self.chains.get_mut(&id) else {
            return;
        };
        if chain.ready.len() < chain.members.len() {
            return;
        }
        let (name, shape) = (chain.name, chain.shape);
        let to: Vec<u64> = match shape {
            ChainShape::Chain => chain.members[..1].to_vec(),
            ChainShape::FanOut => chain.members.clone(),
        };
        let mut messages = Vec::new();
        for running in chain.running.iter_mut().skip(chain.sent) {
            messages.push((running.number, std::mem::take(&mut running.payload)));
        }
        chain.sent = chain.running.len();
        for (number, payload) in messages {
            for (place, &member) in to.iter().enumerate() {
                let words = [name ^ place as u64, number, place as u64, 0, 0];
                self.tell(member, Kind::ChainRun, words, payload.clone());
            }
        }
        for member in to {
            self.pump(member);
        }
    }

    fn chain_named(&self, name: u64, member: u64) -> Option<u64> {
        let found = self
            .chains
            .iter()
            .find(|(_, chain)| chain.name == name || chain.name == name ^ member);
        found.map(|(&id, _)| id)
    }

    /// A member's link stands, or cannot.
    pub fn chain_ready(&mut self, connection: u64, name: u64, member: u64, why: u64) {
        let Some(id) = self.chain_named(name, member) else {
            return;
        };
        if let Some(kind) = failure(why) {
            return self.break_chain(id, None, kind);
        }
        if let Some(chain) = self.chains.get_mut(&id)
            && chain.members.get(member as usize) == Some(&connection)
        {
            chain.ready.insert(member);
            self.run_chain(id);
        }
    }

    /// An operation has run at the last member, or failed somewhere.
    pub fn chain_done(
        &mut self,
        connection: u64,
        [name, number, member, why]: [u64; 4],
        results: &[u8],
    ) {
        let Some(id) = self.chain_named(name, member) else {
            return;
        };
        let Some(chain) = self.chains.get_mut(&id) else {
            return;
        };
        if chain.members.get(member as usize) != Some(&connection) {
            return;
        }
        if let Some(kind) = failure(why) {
            return self.break_chain(id, Some(number), kind);
        }
        let all = match chain.shape {
            ChainShape::Chain => 1,
            ChainShape::FanOut => chain.members.len(),
        };
        let fan_out = chain.shape == ChainShape::FanOut;
        // Operations that were not sent yet cannot have run.
        let mut sent = chain.running.iter_mut().take(chain.sent);
        let Some(running) = sent.find(|it| it.number == number) else {
            return;
        };
        running.done.insert(member);
        for (place, value) in running.values.iter_mut().enumerate() {
            if !fan_out || place as u64 == member {
                *value = word_at(results, place * 8).unwrap_or(0);
            }
        }
        while chain
            .running
            .front()
            .is_some_and(|first| first.done.len() >= all)
        {
            let Some(first) = chain.running.pop_front() else {
                break;
            };
            chain.sent -= 1;
            self.events.push_back(Event::ChainCompleted {
                chain: ChainId(id),
                context: first.context,
                values: if first.swaps {
                    first.values
                } else {
                    Vec::new()
                },
            });
        }
    }

    /// Ends a chain at its initiator and its members; nothing is reported.
    pub fn close_chain(&mut self, id: u64) -> Option<Chain> {
        let chain = self.chains.remove(&id)?;
        for (place, &member) in chain.members.iter().enumerate() {
            let name = match chain.shape {
                ChainShape::Chain => chain.name,
                ChainShape::FanOut => chain.name ^ place as u64,
            };
            self.tell(member, Kind::ChainClose, [name, 0, 0, 0, 0], Vec::new());
        }
        Some(chain)
    }

    /// Ends a chain: the culprit fails with `kind`, the others because of it.
    fn break_chain(&mut self, id: u64, culprit: Option<u64>, kind: FailureKind) {
        let Some(mut chain) = self.close_chain(id) else {
            return;
        };
        let first = culprit.or_else(|| chain.running.front().map(|r| r.number));
        let running = chain.running.make_contiguous();
        running.sort_by_key(|running| Some(running.number) != first);
        for (place, running) in chain.running.into_iter().enumerate() {
            let own = if place == 0 {
                kind.clone()
            } else {
                FailureKind::Broken
            };
            self.events.push_back(Event::ChainFailed {
                chain: ChainId(id),
                context: running.context,
                failure: Failure {
                    operation: running.what,
                    kind: own,
                },
            });
        }
    }

    /// A connection ended: so do the chains over it, and the memberships.
    pub fn chains_lost(&mut self, connection: u64, kind: FailureKind) {
        let lost: Vec<u64> = self
            .chains
            .iter()
            .filter(|(_, chain)| chain.members.contains(&connection))
            .map(|(&id, _)| id)
            .collect();
        for id in lost {
            self.break_chain(id, None, kind.clone());
        }
        let hops: Vec<u64> = self
            .hops
            .iter()
            .filter(|(_, hop)| hop.origin == connection || hop.next == Some(connection))
            .map(|(&name, _)| name)
            .collect();
        for name in hops {
            if let Some(hop) = self.hops.get(&name)
                && hop.next == Some(connection)
            {
                let gone = reason(&FailureKind::PeerGone);
                let words = [name, hop.member, gone, 0, 0];
                self.tell(hop.origin, Kind::ChainReady, words, Vec::new());
            }
            self.chain_close(name);
        }
    }

    /// Chains whose operations take too long, or whose links never stand.
    pub fn expire_chains(&mut self, now: Instant) {
        let limit = self.options.operation_timeout;
        let late: Vec<u64> = self
            .chains
            .iter()
            .filter(|(_, chain)| {
                let since = chain.running.front().map(|running| running.posted);
                let unready = chain.ready.len() < chain.members.len();
                since
                    .or(unready.then_some(chain.opened))
                    .is_some_and(|since| now.duration_since(since) > limit)
            })
            .map(|(&id, _)| id)
            .collect();
        for id in late {
            self.break_chain(id, None, FailureKind::PeerGone);
        }
    }
}

// What a chain's operation carries beside its data fits into a message.
const _: () = assert!(FIXED + 8 * MAX_MEMBERS + 8 <= CHAIN_ROOM);

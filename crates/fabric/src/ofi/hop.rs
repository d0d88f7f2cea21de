//! A member's side of chains: run an operation here, then hand it on or answer the initiator
//! (chain.rs).

use super::chain::{FIXED, MAX_MEMBERS, overlap};
use super::core::Core;
use super::wire::{Kind, reason, word_at};
use crate::event::FailureKind;
use crate::key::{Access, Address, KEY_BYTES, MemoryKey};

/// Ranges that a member remembers for the next flush; more become one.
const MAX_DIRTY: usize = 256;

/// This endpoint's membership in a peer's chain.
pub struct Hop {
    pub origin: u64,
    pub member: u64,
    pub key: MemoryKey,
    pub next: Option<u64>,
    pub expected: u64,
    pub dirty: Vec<(u64, u64)>,
}

impl Core {
    /// A peer makes this endpoint a member of its chain.
    pub fn chain_open(&mut self, origin: u64, name: u64, member: u64, payload: &[u8]) {
        let Some((key, next)) = payload.split_first_chunk::<KEY_BYTES>() else {
            return;
        };
        let key = MemoryKey::decode(key);
        let limit = self.options.max_connections;
        let opened = if self.hops.len() >= limit || self.hops.contains_key(&name) {
            Err(FailureKind::Provider("no room for another chain".into()))
        } else if member >= MAX_MEMBERS as u64 {
            Err(FailureKind::Provider("no chain is that long".into()))
        } else {
            self.own_range(key.id, key.token, (0, key.len), Access::WRITE)
                .and_then(|_| match next {
                    [] => Ok(None),
                    next => self
                        .connect(&Address(next.to_vec()), true)
                        .map(Some)
                        .map_err(|why| FailureKind::Provider(why.to_string())),
                })
        };
        match opened {
            Ok(next) => {
                let hop = Hop {
                    origin,
                    member,
                    key,
                    next,
                    expected: 0,
                    dirty: Vec::new(),
                };
                self.hops.insert(name, hop);
                if next.is_none() {
                    self.tell(
                        origin,
                        Kind::ChainReady,
                        [name, member, 0, 0, 0],
                        Vec::new(),
                    );
                }
            }
            Err(why) => {
                let words = [name, member, reason(&why), 0, 0];
                self.tell(origin, Kind::ChainReady, words, Vec::new());
            }
        }
    }

    /// A connection that this endpoint opened stands: perhaps a chain's link.
    pub fn link_ready(&mut self, connection: u64) {
        let found = self
            .hops
            .iter()
            .find(|(_, hop)| hop.next == Some(connection));
        if let Some((&name, hop)) = found {
            let (origin, member) = (hop.origin, hop.member);
            self.tell(
                origin,
                Kind::ChainReady,
                [name, member, 0, 0, 0],
                Vec::new(),
            );
        }
    }

    /// Ends this endpoint's membership.
    pub fn chain_close(&mut self, name: u64) {
        if let Some(hop) = self.hops.remove(&name)
            && let Some(next) = hop.next
        {
            self.break_connection(next, None, FailureKind::Closed);
        }
    }

    /// Runs an operation here, then hands it on or answers the initiator.
    pub fn chain_run(&mut self, name: u64, number: u64, _place: u64, payload: &[u8]) {
        let Some(mut hop) = self.hops.remove(&name) else {
            return;
        };
        let mut payload = payload.to_vec();
        let ran = if hop.expected == number {
            hop.expected += 1;
            self.run_here(&mut hop, &mut payload)
        } else {
            Err(FailureKind::Provider(
                "an operation came out of order".into(),
            ))
        };
        let (origin, member, next) = (hop.origin, hop.member, hop.next);
        self.hops.insert(name, hop);
        match (ran, next) {
            (Ok(_), Some(next)) => {
                self.tell(
                    next,
                    Kind::ChainRun,
                    [name, number, member + 1, 0, 0],
                    payload,
                );
                self.pump(next);
            }
            (Ok(results), None) => {
                let values = payload
                    .get(FIXED..FIXED + 8 * results)
                    .unwrap_or(&[])
                    .to_vec();
                self.tell(
                    origin,
                    Kind::ChainDone,
                    [name, number, member, 0, 0],
                    values,
                );
                self.pump(origin);
            }
            (Err(why), _) => {
                let words = [name, number, member, reason(&why), 0];
                self.tell(origin, Kind::ChainDone, words, Vec::new());
            }
        }
    }

    /// Answers how many results the payload holds.
    fn run_here(&self, hop: &mut Hop, payload: &mut [u8]) -> Result<usize, FailureKind> {
        let bad = || FailureKind::Provider("not a chain operation".into());
        let word = |index: usize| word_at(payload, index * 8).ok_or_else(bad);
        let (kind, x, y, z) = (word(0)?, word(1)?, word(2)?, word(3)?);
        let results = usize::try_from(word(4)?).unwrap_or(usize::MAX);
        if results > MAX_MEMBERS || FIXED + 8 * results > payload.len() {
            return Err(bad());
        }
        let range = |offset, len, needs| {
            if offset > hop.key.len || len > hop.key.len - offset {
                return Err(FailureKind::OutOfBounds);
            }
            self.own_range(hop.key.id, hop.key.token, (offset, len), needs)
        };
        match kind {
            1 => {
                let data = &payload[FIXED..];
                let at = range(x, data.len() as u64, Access::WRITE)?;
                self.area.write(at, data);
                hop.dirty.push((at, data.len() as u64));
            }
            2 => {
                let execute = word_at(payload, FIXED + 8 * results).ok_or_else(bad)?;
                let at = range(x, 8, Access::ATOMIC)?;
                if !x.is_multiple_of(8) {
                    return Err(FailureKind::Misaligned);
                }
                let member = usize::try_from(hop.member).unwrap_or(usize::MAX);
                if member < results && execute >> member & 1 == 1 {
                    let before = self.area.compare_swap(at, y, z);
                    let place = FIXED + 8 * member;
                    payload[place..place + 8].copy_from_slice(&before.to_le_bytes());
                    hop.dirty.push((at, 8));
                }
            }
            3 => {
                let from = range(x, z, Access::READ)?;
                let to = range(y, z, Access::WRITE)?;
                if overlap(from, to, z) {
                    return Err(FailureKind::OutOfBounds);
                }
                for step in (0..z).step_by(64 * 1024) {
                    let bytes = self.area.read_vec(from + step, (z - step).min(64 * 1024));
                    self.area.write(to + step, &bytes);
                }
                hop.dirty.push((to, z));
            }
            4 => {
                for (at, len) in hop.dirty.drain(..) {
                    self.area.flush(at, len);
                }
                self.area.fence();
            }
            _ => return Err(bad()),
        }
        if hop.dirty.len() > MAX_DIRTY {
            let start = hop.dirty.iter().map(|range| range.0).min().unwrap_or(0);
            let end = hop
                .dirty
                .iter()
                .map(|range| range.0 + range.1)
                .max()
                .unwrap_or(0);
            hop.dirty.clear();
            hop.dirty.push((start, end - start));
        }
        Ok(results)
    }
}

//! Reassembly of messages that were cut into several datagrams.
//!
//! Pieces stay in their frames; the whole message is a rope of them. What is held is bounded: bytes in all,
//! messages per association, time. When there is no room, the oldest partial message of a client goes first;
//! clients cannot push out what nodes send.

use std::collections::BTreeMap;

use cyclone_pmem::payload::{Payload, Segment};
use cyclone_wire::planted::{self, Bug};

use crate::header::DataHeader;

/// Smallest size of a fragment that is not the last, in bytes: bounds a message's bookkeeping.
pub const MIN_FRAGMENT: usize = 256;

/// Bounds of what is held.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Largest message, bytes.
    pub max_message: usize,
    /// Memory held by partial messages in all (whole frames count), bytes.
    pub held_bytes: usize,
    /// Partial messages of one association.
    pub per_association: usize,
    /// How long a partial message is kept, µs.
    pub timeout_us: u64,
}

/// Memory that a piece keeps from others: whole frames, or its own bytes.
fn cost(piece: &Payload, frame_bytes: usize) -> usize {
    let of = |part: &Segment| match part {
        Segment::Frame(_) => frame_bytes,
        Segment::Bytes { .. } => part.as_slice().len(),
    };
    piece.parts().iter().map(of).sum()
}

struct Partial {
    total: u32,
    got: u16,
    got_bytes: usize,
    held_bytes: usize,
    since_us: u64,
    from_node: bool,
    pieces: Vec<Option<Payload>>,
}

/// What became of a fragment.
pub enum Outcome {
    /// The message is whole.
    Whole(Payload),
    /// More is needed.
    Kept,
    /// It contradicts the other fragments or the limits.
    Refused,
}

/// Messages partly received, of all associations.
pub struct Reassembler {
    limits: Limits,
    frame_bytes: usize,
    held_bytes: usize,
    /// By association and first sequence number, and in that order, so that what expires gives its frames back in the same
    /// order whenever a run is repeated.
    partials: BTreeMap<(u64, u64), Partial>,
    dropped: u64,
}

impl Reassembler {
    /// Nothing held. `frame_bytes`: what a piece in a frame costs.
    pub fn new(limits: Limits, frame_bytes: usize) -> Reassembler {
        Reassembler {
            limits,
            frame_bytes,
            held_bytes: 0,
            partials: BTreeMap::new(),
            dropped: 0,
        }
    }

    /// Partial messages given up so far.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Partial messages held.
    pub fn len(&self) -> usize {
        self.partials.len()
    }

    /// Whether none is held.
    pub fn is_empty(&self) -> bool {
        self.partials.is_empty()
    }

    /// Takes a fragment (`header.count > 1`) whose tag and sequence number are good.
    pub fn add(
        &mut self,
        now_us: u64,
        header: &DataHeader,
        from_node: bool,
        piece: Payload,
    ) -> Outcome {
        let total = header.total as usize;
        let last = header.index + 1 == header.count;
        if total > self.limits.max_message
            || usize::from(header.count) > total / MIN_FRAGMENT + 1
            || (!last && piece.len() < MIN_FRAGMENT)
        {
            return Outcome::Refused;
        }
        let mut key = (header.assoc, header.seq - u64::from(header.index));
        if planted::has(Bug::FragmentsMixed) {
            key.1 = 0;
        }
        let cost = cost(&piece, self.frame_bytes);
        if !self.partials.contains_key(&key) {
            if !self.make_room(key.0, from_node, cost) {
                return Outcome::Refused;
            }
            let pieces = std::iter::repeat_with(|| None)
                .take(header.count.into())
                .collect();
            let fresh = Partial {
                total: header.total,
                got: 0,
                got_bytes: 0,
                held_bytes: 0,
                since_us: now_us,
                from_node,
                pieces,
            };
            self.partials.insert(key, fresh);
        } else if self.held_bytes + cost > self.limits.held_bytes
            && !self.make_room(u64::MAX, from_node, cost)
        {
            return Outcome::Refused;
        }
        // Making room may have dropped this very message.
        let Some(partial) = self.partials.get_mut(&key) else {
            return Outcome::Refused;
        };
        let slot = usize::from(header.index);
        if partial.total != header.total
            || partial.pieces.len() != usize::from(header.count)
            || partial.pieces[slot].is_some()
            || partial.got_bytes + piece.len() > total
        {
            return Outcome::Refused;
        }
        partial.got += 1;
        partial.got_bytes += piece.len();
        partial.held_bytes += cost;
        self.held_bytes += cost;
        partial.pieces[slot] = Some(piece);
        if partial.got < header.count {
            return Outcome::Kept;
        }
        let Some(partial) = self.remove(key) else {
            return Outcome::Refused;
        };
        if partial.got_bytes != total {
            return Outcome::Refused;
        }
        let mut payload = Payload::new();
        for piece in partial.pieces.into_iter().flatten() {
            payload.append(piece);
        }
        Outcome::Whole(payload)
    }

    fn remove(&mut self, key: (u64, u64)) -> Option<Partial> {
        let partial = self.partials.remove(&key)?;
        self.held_bytes -= partial.held_bytes;
        Some(partial)
    }

    /// Drops the oldest until one more message of `assoc` and `cost` more bytes fit.
    fn make_room(&mut self, assoc: u64, from_node: bool, cost: usize) -> bool {
        let mine = || self.partials.range((assoc, 0)..=(assoc, u64::MAX));
        if mine().count() >= self.limits.per_association
            && let Some(key) = mine()
                .min_by_key(|(key, p)| (p.since_us, key.1))
                .map(|(key, _)| *key)
        {
            self.remove(key);
            self.dropped += 1;
        }
        while self.held_bytes + cost > self.limits.held_bytes {
            let evictable = self
                .partials
                .iter()
                .filter(|(_, p)| from_node || !p.from_node);
            let victim = evictable.min_by_key(|(key, p)| (p.from_node, p.since_us, **key));
            let Some(key) = victim.map(|(key, _)| *key) else {
                return false;
            };
            self.remove(key);
            self.dropped += 1;
        }
        true
    }

    /// Drops what is too old.
    pub fn expire(&mut self, now_us: u64) {
        let timeout_us = self.limits.timeout_us;
        let (mut freed, mut dropped) = (0, 0);
        self.partials.retain(|_, p| {
            let keep = now_us.saturating_sub(p.since_us) < timeout_us;
            if !keep {
                freed += p.held_bytes;
                dropped += 1;
            }
            keep
        });
        self.held_bytes -= freed;
        self.dropped += dropped;
    }

    /// Forgets an association's messages.
    pub fn forget(&mut self, assoc: u64) {
        let mut freed = 0;
        self.partials.retain(|key, p| {
            if key.0 == assoc {
                freed += p.held_bytes;
            }
            key.0 != assoc
        });
        self.held_bytes -= freed;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits() -> Limits {
        Limits {
            max_message: 4096,
            held_bytes: 8192,
            per_association: 4,
            timeout_us: 1000,
        }
    }

    fn header(assoc: u64, first: u64, index: u16, count: u16, total: u32) -> DataHeader {
        DataHeader {
            assoc,
            seq: first + u64::from(index),
            total,
            index,
            count,
        }
    }

    fn piece(byte: u8, len: usize) -> Payload {
        Payload::from_vec(vec![byte; len])
    }

    #[test]
    fn pieces_in_any_order_make_the_message() {
        let mut r = Reassembler::new(limits(), 2048);
        for index in [2u16, 0] {
            let kept = r.add(
                0,
                &header(1, 7, index, 3, 700),
                true,
                piece(index as u8, if index == 2 { 100 } else { 300 }),
            );
            assert!(matches!(kept, Outcome::Kept));
        }
        let Outcome::Whole(payload) = r.add(0, &header(1, 7, 1, 3, 700), true, piece(1, 300))
        else {
            panic!("not whole")
        };
        assert_eq!(
            payload.to_vec(),
            [vec![0; 300], vec![1; 300], vec![2; 100]].concat()
        );
        assert!(r.is_empty() && r.held_bytes == 0);
    }

    #[test]
    fn fragments_that_contradict_each_other_are_refused() {
        let mut r = Reassembler::new(limits(), 2048);
        assert!(matches!(
            r.add(0, &header(1, 7, 0, 3, 700), true, piece(0, 300)),
            Outcome::Kept
        ));
        for bad in [
            header(1, 7, 1, 3, 800),
            header(1, 7, 1, 2, 700),
            header(1, 7, 0, 3, 700),
        ] {
            assert!(matches!(
                r.add(0, &bad, true, piece(0, 300)),
                Outcome::Refused
            ));
        }
        let too_long = piece(0, 600);
        assert!(matches!(
            r.add(0, &header(1, 7, 1, 3, 700), true, too_long),
            Outcome::Refused
        ));
        // Lengths that do not add up are noticed at the end.
        assert!(matches!(
            r.add(0, &header(1, 7, 1, 3, 700), true, piece(0, 300)),
            Outcome::Kept
        ));
        assert!(matches!(
            r.add(0, &header(1, 7, 2, 3, 700), true, piece(0, 50)),
            Outcome::Refused
        ));
        assert!(r.is_empty() && r.held_bytes == 0);
        // More than the largest message, or absurdly many pieces.
        assert!(matches!(
            r.add(0, &header(1, 9, 0, 3, 5000), true, piece(0, 300)),
            Outcome::Refused
        ));
        assert!(matches!(
            r.add(0, &header(1, 9, 0, 900, 4000), true, piece(0, 300)),
            Outcome::Refused
        ));
    }

    #[test]
    fn memory_is_bounded_and_clients_cannot_push_out_nodes() {
        let mut r = Reassembler::new(limits(), 2048);
        assert!(matches!(
            r.add(0, &header(1, 0, 0, 2, 4000), true, piece(0, 3000)),
            Outcome::Kept
        ));
        for i in 0..100 {
            let _ = r.add(1 + i, &header(2, i * 10, 0, 2, 4000), false, piece(0, 3000));
            assert!(r.held_bytes <= 8192 && r.len() <= 5);
        }
        assert!(matches!(
            r.add(200, &header(1, 0, 1, 2, 4000), true, piece(0, 1000)),
            Outcome::Whole(_)
        ));
        r.expire(5000);
        assert!(r.is_empty() && r.held_bytes == 0 && r.dropped() > 90);
    }
}

//! Reassembly of messages that were cut into several datagrams.
//!
//! Pieces stay in their frames; the whole message is a rope of them. What is held is bounded: bytes in all, with what
//! the bookkeeping takes, messages per association, time. Only pieces that have come take room, whatever number was
//! announced. When there is no room, the oldest partial message of a client goes first; clients cannot push out what
//! nodes send.

use std::collections::{BTreeMap, BTreeSet};

use cyclone_pmem::payload::{Payload, Segment};
use cyclone_wire::planted::{self, Bug};

use crate::header::DataHeader;

/// Smallest size of a fragment that is not the last, in bytes: bounds a message's bookkeeping.
pub const MIN_FRAGMENT: usize = 256;

/// Pieces that a new partial message has places for.
const FIRST_PLACES: usize = 4;
/// Memory of a partial message without its pieces, at most, bytes: entries in two trees, whose nodes may be less than half
/// full, and the first places.
const PARTIAL_BYTES: usize = 3 * size_of::<(Key, Partial)>()
    + 3 * size_of::<Age>()
    + FIRST_PLACES * size_of::<(u16, Payload)>();
/// The same of a piece: its place, of which there may be twice as many as are used.
const PIECE_BYTES: usize = 2 * size_of::<(u16, Payload)>();
/// The same of each part of a piece: likewise, and what a buffer has beside its bytes.
const PART_BYTES: usize = 2 * size_of::<Segment>() + 64;

/// Bounds of what is held.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Largest message, bytes.
    pub max_message: usize,
    /// Memory held by partial messages in all (whole frames and the bookkeeping count), bytes.
    pub held_bytes: usize,
    /// Partial messages of one association.
    pub per_association: usize,
    /// How long a partial message is kept of which nothing more comes, µs. One that goes on coming may take [`LONGEST`] times as long:
    /// a narrow way needs seconds for a large one.
    pub timeout_us: u64,
}

/// How many times [`Limits::timeout_us`] a message may take, however steadily it comes.
pub const LONGEST: u64 = 30;

/// Memory that a piece takes or keeps from others: whole frames, or its own bytes, and the bookkeeping.
fn cost(piece: &Payload, frame_bytes: usize) -> usize {
    let of = |part: &Segment| match part {
        Segment::Frame(_) => PART_BYTES + frame_bytes,
        Segment::Bytes { buffer, .. } => PART_BYTES + buffer.capacity(),
    };
    PIECE_BYTES + piece.parts().iter().map(of).sum::<usize>()
}

/// Bytes of every fragment but the last of the message that this one of `len` bytes is from; `None` if there is no such
/// message.
fn fragment_bytes(header: &DataHeader, len: usize) -> Option<usize> {
    let (total, count) = (header.total as usize, usize::from(header.count));
    let before_last = count.checked_sub(1)?;
    let each = match usize::from(header.index) == before_last {
        true => total.checked_sub(len)?.checked_div(before_last)?,
        false => len,
    };
    let fits = each >= MIN_FRAGMENT
        && total.div_ceil(each) == count
        && (usize::from(header.index) < before_last || len == total - each * before_last);
    fits.then_some(each)
}

/// Association and first sequence number.
type Key = (u64, u64);

/// Whether it is from a node, since when it is held, and which: clients' oldest is the least.
type Age = (bool, u64, Key);

struct Partial {
    total: u32,
    count: u16,
    /// Of every fragment but the last.
    fragment_bytes: usize,
    held_bytes: usize,
    since_us: u64,
    /// When its last piece came.
    heard_us: u64,
    from_node: bool,
    /// By fragment a bit: whether it has come.
    seen: Vec<u64>,
    /// With their numbers, in the order in which they came.
    pieces: Vec<(u16, Payload)>,
}

impl Partial {
    /// Notes that a fragment has come. False: it had before.
    fn see(&mut self, index: u16) -> bool {
        let (word, bit) = (usize::from(index / 64), 1 << (index % 64));
        let seen = self.seen[word] & bit != 0;
        self.seen[word] |= bit;
        !seen
    }

    fn age(&self, key: Key) -> Age {
        (self.from_node, self.since_us, key)
    }

    fn into_payload(mut self) -> Payload {
        self.pieces.sort_unstable_by_key(|(index, _)| *index);
        let mut payload = Payload::new();
        for (_, piece) in self.pieces {
            payload.append(piece);
        }
        payload
    }
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
    partials: BTreeMap<Key, Partial>,
    /// The same in the order in which they have to go, which is the same whenever a run is repeated.
    ages: BTreeSet<Age>,
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
            ages: BTreeSet::new(),
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

    /// Memory that partial messages take or keep from others, bytes.
    pub fn held_bytes(&self) -> usize {
        self.held_bytes
    }

    /// Takes a fragment (`header.count > 1`) whose tag and sequence number are good.
    pub fn add(
        &mut self,
        now_us: u64,
        header: &DataHeader,
        from_node: bool,
        piece: Payload,
    ) -> Outcome {
        let Some(fragment_bytes) = fragment_bytes(header, piece.len()) else {
            return Outcome::Refused;
        };
        if header.total as usize > self.limits.max_message {
            return Outcome::Refused;
        }
        let mut key = (header.assoc, header.seq - u64::from(header.index));
        if planted::has(Bug::FragmentsMixed) {
            key.1 = 0;
        }
        let mut cost = cost(&piece, self.frame_bytes);
        match self.partials.get(&key) {
            Some(partial)
                if partial.total != header.total
                    || partial.count != header.count
                    || partial.fragment_bytes != fragment_bytes =>
            {
                return Outcome::Refused;
            }
            Some(_) => {
                if !self.make_room(from_node, cost) {
                    return Outcome::Refused;
                }
            }
            None => {
                let words = usize::from(header.count).div_ceil(64);
                cost += PARTIAL_BYTES + words * size_of::<u64>();
                self.limit_association(header.assoc);
                if !self.make_room(from_node, cost) {
                    return Outcome::Refused;
                }
                let fresh = Partial {
                    total: header.total,
                    count: header.count,
                    fragment_bytes,
                    held_bytes: 0,
                    since_us: now_us,
                    heard_us: now_us,
                    from_node,
                    seen: vec![0; words],
                    pieces: Vec::with_capacity(FIRST_PLACES),
                };
                self.ages.insert(fresh.age(key));
                self.partials.insert(key, fresh);
            }
        }
        // Making room may have dropped this very message.
        let Some(partial) = self.partials.get_mut(&key) else {
            return Outcome::Refused;
        };
        if !partial.see(header.index) {
            return Outcome::Refused;
        }
        partial.heard_us = now_us;
        partial.held_bytes += cost;
        self.held_bytes += cost;
        partial.pieces.push((header.index, piece));
        if partial.pieces.len() < usize::from(header.count) {
            return Outcome::Kept;
        }
        match self.remove(key) {
            Some(partial) => Outcome::Whole(partial.into_payload()),
            None => Outcome::Refused,
        }
    }

    fn remove(&mut self, key: Key) -> Option<Partial> {
        let partial = self.partials.remove(&key)?;
        self.ages.remove(&partial.age(key));
        self.held_bytes -= partial.held_bytes;
        Some(partial)
    }

    fn give_up(&mut self, key: Key) {
        self.dropped += u64::from(self.remove(key).is_some());
    }

    /// Drops the oldest message of an association that has as many as it may.
    fn limit_association(&mut self, assoc: u64) {
        let mine = || self.partials.range((assoc, 0)..=(assoc, u64::MAX));
        if mine().count() >= self.limits.per_association
            && let Some((key, _)) = mine().min_by_key(|(key, p)| (p.since_us, key.1))
        {
            self.give_up(*key);
        }
    }

    /// Drops the oldest until `cost` more bytes fit.
    fn make_room(&mut self, from_node: bool, cost: usize) -> bool {
        while self.held_bytes + cost > self.limits.held_bytes {
            match self.ages.first() {
                Some(&(of_node, _, key)) if from_node || !of_node => self.give_up(key),
                _ => return false,
            }
        }
        true
    }

    /// Drops what nothing more comes of, and what takes too long.
    pub fn expire(&mut self, now_us: u64) {
        let age_us = |since_us: u64| now_us.saturating_sub(since_us);
        let timeout_us = self.limits.timeout_us;
        let mut over = Vec::new();
        for of_node in [false, true] {
            let ages = self
                .ages
                .range((of_node, 0, (0, 0))..=(of_node, u64::MAX, (u64::MAX, u64::MAX)));
            let old = ages.take_while(|(_, since_us, _)| age_us(*since_us) >= timeout_us);
            for &(_, since_us, key) in old {
                let heard_us = self.partials.get(&key).map_or(0, |it| it.heard_us);
                if age_us(heard_us) >= timeout_us || age_us(since_us) >= LONGEST * timeout_us {
                    over.push(key);
                }
            }
        }
        for key in over {
            self.give_up(key);
        }
    }

    /// Forgets an association's messages.
    pub fn forget(&mut self, assoc: u64) {
        let next = |all: &BTreeMap<Key, Partial>| {
            let mut mine = all.range((assoc, 0)..=(assoc, u64::MAX));
            mine.next().map(|(key, _)| *key)
        };
        while let Some(key) = next(&self.partials) {
            self.remove(key);
        }
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
        // Lengths that do not add up.
        for (bad, len) in [
            (header(1, 7, 1, 3, 700), 290),
            (header(1, 7, 2, 3, 700), 50),
            (header(1, 8, 1, 4, 900), 300),
            (header(1, 8, 3, 4, 900), 200),
            (header(1, 8, 1, 2, 900), 900),
            (header(1, 8, 0, 1, 900), 900),
        ] {
            let refused = r.add(0, &bad, true, piece(0, len));
            assert!(matches!(refused, Outcome::Refused), "{bad:?} {len}");
        }
        for (index, len) in [(2, 100), (1, 300)] {
            let _ = r.add(0, &header(1, 7, index, 3, 700), true, piece(0, len));
        }
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

    #[test]
    fn the_oldest_go_first_and_an_association_takes_its_messages_along() {
        let mut r = Reassembler::new(limits(), 2048);
        let mut begin = |now_us, assoc, first| {
            let kept = r.add(
                now_us,
                &header(assoc, first, 0, 2, 600),
                false,
                piece(0, 300),
            );
            assert!(matches!(kept, Outcome::Kept));
            let held: Vec<Key> = r.partials.keys().copied().collect();
            assert_eq!(r.ages.len(), held.len());
            held
        };
        for first in 0..4 {
            begin(10 - first, 1, 10 * first);
        }
        // The fifth of one association.
        assert_eq!(begin(20, 1, 40), [(1, 0), (1, 10), (1, 20), (1, 40)]);
        // The fifth and later of others: no room for so many.
        let mut gone = Vec::new();
        for assoc in 2..8 {
            let held = begin(20 + assoc, assoc, 0);
            for key in [(1, 20), (1, 10), (1, 0), (1, 40)] {
                if !held.contains(&key) && !gone.contains(&key) {
                    gone.push(key);
                }
            }
        }
        assert_eq!(gone[..3], [(1, 20), (1, 10), (1, 0)]);
        let left = r.len();
        r.forget(7);
        assert_eq!((r.len(), r.ages.len()), (left - 1, left - 1));
        r.expire(1025);
        assert!(r.partials.keys().all(|key| *key == (6, 0)) && r.len() == 1);
        r.forget(6);
        assert!(r.ages.is_empty() && r.held_bytes == 0);
    }

    /// A message over a narrow way needs longer than a silent one is kept: it was dropped, sent again, and dropped again.
    #[test]
    fn a_message_that_goes_on_coming_is_kept_and_not_for_ever() {
        let mut r = Reassembler::new(limits(), 2048);
        for index in 0..4u16 {
            let now_us = 600 * u64::from(index);
            let kept = r.add(now_us, &header(1, 0, index, 5, 1500), true, piece(0, 300));
            assert!(matches!(kept, Outcome::Kept));
            r.expire(now_us + 599);
        }
        let whole = r.add(2400, &header(1, 0, 4, 5, 1500), true, piece(0, 300));
        assert!(matches!(whole, Outcome::Whole(_)));

        // One that has stopped goes, before others that began earlier and go on.
        let mut add = |now_us, assoc, index| {
            let header = header(assoc, 0, index, 13, 3900);
            assert!(matches!(
                r.add(now_us, &header, true, piece(0, 300)),
                Outcome::Kept
            ));
            r.expire(now_us);
            r.partials.keys().map(|key| key.0).collect::<Vec<u64>>()
        };
        add(0, 1, 0);
        add(100, 2, 0);
        add(900, 1, 1);
        assert_eq!(add(1100, 1, 2), [1]);
        // However steadily it comes, there is an end.
        let steadily = |r: &mut Reassembler, index: u16| {
            let now_us = 999 * u64::from(index);
            r.expire(now_us);
            r.add(
                now_us,
                &header(4, 0, index, 40, 12_000),
                true,
                piece(0, 300),
            )
        };
        let mut r = Reassembler::new(
            Limits {
                max_message: 1 << 20,
                held_bytes: 1 << 20,
                ..limits()
            },
            2048,
        );
        for index in 0..30 {
            assert!(matches!(steadily(&mut r, index), Outcome::Kept));
        }
        assert_eq!((r.len(), r.dropped()), (1, 0));
        r.expire(LONGEST * 1000);
        assert_eq!((r.len(), r.dropped()), (0, 1));
    }
}

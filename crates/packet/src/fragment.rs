//! Reassembly of messages that were cut into several datagrams.
//!
//! Pieces stay in their frames; the whole message is a rope of them. What is held is bounded: bytes
//! in all, with what the bookkeeping takes, messages per association, time. Only pieces that have
//! come take room, whatever number was announced.
//!
//! When there is no room, clients' messages go first of which hardly more will come (their
//! association has begun a later one, their beginning is missing, or they are silent while others
//! become whole), then the one of a client that was begun last: who came first gets through, where
//! many that begin at once would only push each other out. Clients cannot push out what nodes send.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound::{Excluded, Included};

use cyclone_pmem::payload::{Payload, Segment};
use cyclone_wire::planted::{self, Bug};

use crate::header::DataHeader;

/// Smallest size of a fragment that is not the last, in bytes: bounds a message's bookkeeping.
pub const MIN_FRAGMENT: usize = 256;

/// Pieces that a new partial message has places for.
const INITIAL_PIECES: usize = 4;
/// Memory of a partial message without its pieces, at most, bytes: entries in two trees, whose
/// nodes may be less than half full, and the first places.
const PARTIAL_BYTES: usize = 3 * size_of::<(Key, Partial)>()
    + 3 * size_of::<Age>()
    + INITIAL_PIECES * size_of::<(u16, Payload)>();
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
    /// How long a partial message is kept of which nothing more comes, µs. One that goes on coming
    /// may take [`MAX_AGE_FACTOR`] times as long: a narrow way needs seconds for a large one.
    pub timeout_us: u64,
}

/// How many times [`Limits::timeout_us`] a message may take, however steadily it comes.
pub const MAX_AGE_FACTOR: u64 = 30;

/// After a part of [`Limits::timeout_us`] a client's message counts as silent where there is no
/// room, if those of others that have become whole meanwhile would have filled the room so many
/// times: of many that take turns, none is before its next one, however long that takes.
const SILENCE_DIVISOR: u64 = 10;
const SILENT_ROOMS: u64 = 2;

/// Memory that a piece takes or keeps from others: whole frames, or its own bytes, and the
/// bookkeeping.
fn cost(piece: &Payload, frame_bytes: usize) -> usize {
    let of = |part: &Segment| match part {
        Segment::Frame(_) => PART_BYTES + frame_bytes,
        Segment::Bytes { buffer, .. } => PART_BYTES + buffer.capacity(),
    };
    PIECE_BYTES + piece.parts().iter().map(of).sum::<usize>()
}

/// Bytes of every fragment but the last of the message that this one of `len` bytes is from; `None`
/// if there is no such message.
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

/// Whose go first where there is no room: the least.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    /// A client's of which hardly more will come, or the beginning is missing.
    Idle,
    Client,
    Node,
}

/// Its rank, since when it is held, and which.
type Age = (Rank, u64, Key);

/// All of a rank.
fn all_of(rank: Rank) -> std::ops::RangeInclusive<Age> {
    (rank, 0, (0, 0))..=(rank, u64::MAX, (u64::MAX, u64::MAX))
}

struct Partial {
    total: u32,
    count: u16,
    /// Of every fragment but the last.
    fragment_bytes: usize,
    held_bytes: usize,
    since_us: u64,
    /// When its last piece came, and how much of clients had become whole by then.
    last_piece_us: u64,
    whole_bytes_at_last_piece: u64,
    rank: Rank,
    /// By fragment a bit: whether it has come.
    seen: Vec<u64>,
    /// With their numbers, in the order in which they came.
    pieces: Vec<(u16, Payload)>,
}

impl Partial {
    fn new(now_us: u64, header: &DataHeader, fragment_bytes: usize, rank: Rank) -> Partial {
        Partial {
            total: header.total,
            count: header.count,
            fragment_bytes,
            held_bytes: 0,
            since_us: now_us,
            last_piece_us: now_us,
            whole_bytes_at_last_piece: 0,
            rank,
            seen: vec![0; usize::from(header.count).div_ceil(64)],
            pieces: Vec::with_capacity(INITIAL_PIECES),
        }
    }

    fn contradicts(&self, header: &DataHeader, fragment_bytes: usize) -> bool {
        self.total != header.total
            || self.count != header.count
            || self.fragment_bytes != fragment_bytes
    }

    /// Notes that a fragment has come. False: it had before.
    fn mark_received(&mut self, index: u16) -> bool {
        let (word, bit) = (usize::from(index / 64), 1 << (index % 64));
        let seen = self.seen[word] & bit != 0;
        self.seen[word] |= bit;
        !seen
    }

    fn has_first(&self) -> bool {
        self.seen.first().is_some_and(|word| word & 1 != 0)
    }

    fn age(&self, key: Key) -> Age {
        (self.rank, self.since_us, key)
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
    /// There is no room for it, nor for its message.
    NoRoom,
}

/// Messages partly received, of all associations.
pub struct Reassembler {
    limits: Limits,
    frame_bytes: usize,
    held_bytes: usize,
    partials: BTreeMap<Key, Partial>,
    /// The same by rank and age: who has to go is the same whenever a run is repeated.
    ages: BTreeSet<Age>,
    /// What the messages of clients took that have become whole, bytes.
    whole_bytes: u64,
    /// When to look for silent messages again.
    next_scan_us: u64,
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
            whole_bytes: 0,
            next_scan_us: 0,
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
        let has_room = match self.partials.get(&key) {
            Some(partial) if partial.contradicts(header, fragment_bytes) => {
                return Outcome::Refused;
            }
            Some(_) => {
                let own = self.on_fragment(now_us, key, header.index);
                self.make_room(now_us, own, cost)
            }
            None => {
                let rank = match from_node {
                    true => Rank::Node,
                    false if header.index > 0 || self.has_later_message(key) => Rank::Idle,
                    false => Rank::Client,
                };
                let fresh = Partial::new(now_us, header, fragment_bytes, rank);
                cost += PARTIAL_BYTES + size_of_val(&fresh.seen[..]);
                self.begin(now_us, key, header.index, fresh, cost)
            }
        };
        if !has_room {
            // Without this fragment it is never whole.
            self.give_up(key);
            return Outcome::NoRoom;
        }
        // Making room may have dropped this very message.
        let Some(partial) = self.partials.get_mut(&key) else {
            return Outcome::NoRoom;
        };
        if !partial.mark_received(header.index) {
            return Outcome::Refused;
        }
        partial.last_piece_us = now_us;
        partial.whole_bytes_at_last_piece = self.whole_bytes;
        partial.held_bytes += cost;
        self.held_bytes += cost;
        partial.pieces.push((header.index, piece));
        if partial.pieces.len() < usize::from(header.count) {
            return Outcome::Kept;
        }
        match self.remove(key) {
            Some(partial) => {
                if partial.rank != Rank::Node {
                    self.whole_bytes += partial.held_bytes as u64;
                }
                Outcome::Whole(partial.into_payload())
            }
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

    /// Drops others until `cost` more bytes fit, or what is of this age itself. False: they do not.
    fn make_room(&mut self, now_us: u64, own: Age, cost: usize) -> bool {
        while self.held_bytes + cost > self.limits.held_bytes {
            let Some(next) = self.eviction_candidate(now_us) else {
                return false;
            };
            // Among those of clients the older ones stay.
            let goes = match own.0 {
                Rank::Idle => false,
                Rank::Client => next.0 == Rank::Idle || (next.0 == Rank::Client && next >= own),
                Rank::Node => true,
            };
            if !goes {
                return false;
            }
            self.give_up(next.2);
        }
        true
    }

    /// Who goes next: the oldest idle one, the newest of a client, the oldest of a node.
    fn eviction_candidate(&mut self, now_us: u64) -> Option<Age> {
        if self.ages.first()?.0 == Rank::Client {
            self.demote_silent(now_us);
        }
        let first = *self.ages.first()?;
        match first.0 {
            Rank::Client => self.ages.range(all_of(Rank::Client)).next_back().copied(),
            Rank::Idle | Rank::Node => Some(first),
        }
    }

    /// Notes clients' messages that are silent while others go on; not at every call, since it
    /// checks all messages.
    fn demote_silent(&mut self, now_us: u64) {
        let silent_us = self.limits.timeout_us / SILENCE_DIVISOR;
        if now_us < self.next_scan_us {
            return;
        }
        self.next_scan_us = now_us + silent_us / 4;
        let others = SILENT_ROOMS * self.limits.held_bytes as u64;
        let is_silent = |it: &Partial| {
            now_us.saturating_sub(it.last_piece_us) >= silent_us
                && self.whole_bytes - it.whole_bytes_at_last_piece >= others
        };
        let clients = self.ages.range(all_of(Rank::Client));
        let silent = clients.filter(|(.., key)| self.partials.get(key).is_some_and(is_silent));
        for (.., key) in silent.copied().collect::<Vec<Age>>() {
            self.set_rank(key, Rank::Idle);
        }
    }

    fn set_rank(&mut self, key: Key, rank: Rank) {
        if let Some(partial) = self.partials.get_mut(&key) {
            self.ages.remove(&partial.age(key));
            partial.rank = rank;
            self.ages.insert(partial.age(key));
        }
    }

    /// A message goes on with this fragment: it counts again, if its beginning is there. Its age.
    fn on_fragment(&mut self, now_us: u64, key: Key, index: u16) -> Age {
        let Some(partial) = self.partials.get_mut(&key) else {
            return (Rank::Idle, now_us, key);
        };
        (partial.last_piece_us, partial.whole_bytes_at_last_piece) = (now_us, self.whole_bytes);
        let is_begun = index == 0 || partial.has_first();
        let mut age = partial.age(key);
        if age.0 == Rank::Idle && is_begun && !self.has_later_message(key) {
            self.set_rank(key, Rank::Client);
            age.0 = Rank::Client;
        }
        age
    }

    /// Whether its association has begun a later message.
    fn has_later_message(&self, (assoc, first): Key) -> bool {
        let later = (Excluded((assoc, first)), Included((assoc, u64::MAX)));
        self.partials.range(later).next().is_some()
    }

    /// Holds a new message of which so much has come as `cost` says. False: there is no room for
    /// it.
    fn begin(&mut self, now_us: u64, key: Key, index: u16, fresh: Partial, cost: usize) -> bool {
        let of_client = fresh.rank != Rank::Node;
        self.limit_association(key.0);
        if !self.make_room(now_us, fresh.age(key), cost) {
            self.dropped += u64::from(index == 0);
            return false;
        }
        let before = self.partials.range((key.0, 0)..key).next_back();
        if of_client && let Some((&before, _)) = before {
            self.set_rank(before, Rank::Idle);
        }
        self.ages.insert(fresh.age(key));
        self.partials.insert(key, fresh);
        true
    }

    /// Drops what nothing more comes of, and what takes too long.
    pub fn expire(&mut self, now_us: u64) {
        let age_us = |since_us: u64| now_us.saturating_sub(since_us);
        let timeout_us = self.limits.timeout_us;
        let mut over = Vec::new();
        for rank in [Rank::Idle, Rank::Client, Rank::Node] {
            let ages = self.ages.range(all_of(rank));
            let old = ages.take_while(|(_, since_us, _)| age_us(*since_us) >= timeout_us);
            for &(_, since_us, key) in old {
                let last_piece_us = self.partials.get(&key).map_or(0, |it| it.last_piece_us);
                if age_us(last_piece_us) >= timeout_us
                    || age_us(since_us) >= MAX_AGE_FACTOR * timeout_us
                {
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
mod tests;

//! One request and what became of its attempts; a slab of requests whose numbers never repeat.

use cyclone_wire::client::ReadMode;
use cyclone_wire::planted::{self, Bug};
use cyclone_wire::reply::Reply;

use crate::error::{ClientError, NotDone};

/// The client's own number for a request; never 0, never used twice.
pub type Ticket = u64;

/// Completed requests.
pub type Completion = (Ticket, Result<Reply, ClientError>);

/// A request's number on the wire names the attempt, so that each answer settles exactly one:
/// ```text
///  63        36 35        16 15       0
/// | generation | slot       | attempt  |
/// ```
const ATTEMPT_BITS: u32 = 16;
const SLOT_BITS: u32 = 20;
/// Slots of a slab; the last number is kept for the request that opens a session.
pub(crate) const MAX_SLOTS: usize = (1 << SLOT_BITS) - 1;
/// After this many attempts only the deadline remains.
pub(crate) const MAX_ATTEMPTS: u16 = u16::MAX;
/// Attempts tracked one by one; with more outstanding, the oldest stays in doubt for good.
const TRACKED: usize = 4;
/// A finished request's buffer is kept for the next one up to this size, bytes.
const KEPT_BYTES: usize = 16 << 10;

pub(crate) fn wire_id(ticket: Ticket, attempt: u16) -> u64 {
    (ticket << ATTEMPT_BITS) | u64::from(attempt)
}

pub(crate) fn split_id(id: u64) -> (Ticket, u16) {
    (id >> ATTEMPT_BITS, id as u16)
}

/// Which attempts may have been executed.
#[derive(Clone, Copy, Default)]
pub(crate) struct Attempts {
    /// Number of the newest; 0: none was made.
    pub(crate) last: u16,
    /// Attempts without an answer, oldest first; 0: free.
    open: [u16; TRACKED],
    /// When each of these was sent.
    sent_us: [u64; TRACKED],
    /// Some attempt can never be settled any more.
    lost_track: bool,
}

impl Attempts {
    /// Begins another attempt and gives its number.
    pub(crate) fn begin(&mut self, now_us: u64) -> u16 {
        self.last += 1;
        let free = self.open.iter().position(|&open| open == 0);
        let place = free.unwrap_or_else(|| {
            self.lost_track = true;
            self.open.rotate_left(1);
            self.sent_us.rotate_left(1);
            TRACKED - 1
        });
        (self.open[place], self.sent_us[place]) = (self.last, now_us);
        self.last
    }

    /// When this attempt was sent; of one that is no longer tracked, before when.
    pub(crate) fn sent_us(&self, attempt: u16) -> Option<u64> {
        let mut open = self.open.iter().zip(self.sent_us);
        let (_, sent_us) = open.find(|(open, _)| **open >= attempt)?;
        Some(sent_us)
    }

    /// This attempt was certainly not executed. `false` if that was known or can no longer be
    /// determined: then the answer is a repetition and means nothing.
    pub(crate) fn refused(&mut self, attempt: u16) -> bool {
        let Some(place) = self
            .open
            .iter()
            .position(|&open| open == attempt && attempt != 0)
        else {
            return false;
        };
        self.open[place..].rotate_left(1);
        self.sent_us[place..].rotate_left(1);
        self.open[TRACKED - 1] = 0;
        true
    }

    /// The fate of this attempt will never be known. `false` as for [`Attempts::refused`].
    pub(crate) fn unknown(&mut self, attempt: u16) -> bool {
        let news = self.refused(attempt);
        self.lost_track |= news;
        news
    }

    /// Whether some attempt may have been executed.
    pub(crate) fn in_doubt(&self) -> bool {
        self.lost_track || self.open[0] != 0
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Write,
    Read { mode: ReadMode },
}

/// Where a request stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Free slot.
    Free,
    /// Never sent.
    Fresh,
    /// Sent; waiting for an answer.
    Flying,
    /// Sent before; waiting to be sent again.
    Again,
}

/// A slot of the slab.
pub(crate) struct Request {
    generation: u64,
    pub(crate) stage: Stage,
    pub(crate) kind: Kind,
    /// The port it is for: 0 is a replica's own, beyond it those of the logs.
    pub(crate) door: u16,
    /// The port it was last sent to.
    pub(crate) sent_to: u16,
    /// A command (with a tag of zeros) or a query in wire form.
    pub(crate) body: Vec<u8>,
    /// Session that `seq` belongs to; 0: none.
    pub(crate) session: u64,
    pub(crate) seq: u64,
    pub(crate) attempts: Attempts,
    /// Attempts that had no answer in time; each doubles the patience.
    pub(crate) timeouts: u32,
    pub(crate) last_refusal: NotDone,
    pub(crate) sent_us: u64,
    /// When to send it again if there is no answer.
    pub(crate) due_us: u64,
    pub(crate) deadline_us: u64,
    /// Its place in the list of requests that were ever sent.
    pub(crate) place: usize,
}

impl Request {
    /// Whether it is to have a session and has none.
    pub(crate) fn lacks_session(&self) -> bool {
        self.kind == Kind::Write && (self.session == 0 || planted::has(Bug::RetryRenumbered))
    }
}

/// Requests by number.
#[derive(Default)]
pub(crate) struct Slab {
    slots: Vec<Request>,
    free: Vec<u32>,
    used: usize,
}

impl Slab {
    /// The number of a slot's occupant.
    pub(crate) fn ticket(generation: u64, slot: usize) -> Ticket {
        (generation << SLOT_BITS) | slot as u64
    }

    /// What [`split_id`] gives for it.
    pub(crate) fn wire_ticket(generation: u64, slot: usize) -> Ticket {
        split_id(wire_id(Slab::ticket(generation, slot), 0)).0
    }

    pub(crate) fn len(&self) -> usize {
        self.used
    }

    /// A new request, fresh and with an empty body.
    pub(crate) fn insert(&mut self, kind: Kind, deadline_us: u64) -> Option<Ticket> {
        let slot = match self.free.pop() {
            Some(slot) => slot as usize,
            None if self.slots.len() < MAX_SLOTS => {
                self.slots.push(Request {
                    generation: 0,
                    stage: Stage::Free,
                    kind,
                    door: 0,
                    sent_to: 0,
                    body: Vec::new(),
                    session: 0,
                    seq: 0,
                    attempts: Attempts::default(),
                    timeouts: 0,
                    last_refusal: NotDone::NotSent,
                    sent_us: 0,
                    due_us: u64::MAX,
                    deadline_us,
                    place: usize::MAX,
                });
                self.slots.len() - 1
            }
            None => return None,
        };
        let request = &mut self.slots[slot];
        request.generation += 1;
        request.stage = Stage::Fresh;
        request.kind = kind;
        (request.session, request.seq) = (0, 0);
        request.attempts = Attempts::default();
        request.timeouts = 0;
        request.last_refusal = NotDone::NotSent;
        request.due_us = u64::MAX;
        request.deadline_us = deadline_us;
        request.place = usize::MAX;
        self.used += 1;
        Some(Slab::ticket(request.generation, slot))
    }

    /// The request, unless it has ended.
    pub(crate) fn get(&mut self, ticket: Ticket) -> Option<&mut Request> {
        let slot = (ticket as usize) & MAX_SLOTS;
        let request = self.slots.get_mut(slot)?;
        // Numbers on the wire carry 28 bits of the generation: a repeat needs 2^28 requests in one
        // slot meanwhile.
        let same = (request.generation ^ (ticket >> SLOT_BITS)) << (ATTEMPT_BITS + SLOT_BITS) == 0;
        (same && request.stage != Stage::Free).then_some(request)
    }

    /// The user's number of a request, given the one from the wire.
    pub(crate) fn full(&mut self, ticket: Ticket) -> Option<Ticket> {
        let slot = (ticket as usize) & MAX_SLOTS;
        self.get(ticket)
            .map(|request| Slab::ticket(request.generation, slot))
    }

    pub(crate) fn remove(&mut self, ticket: Ticket) {
        if let Some(request) = self.get(ticket) {
            request.stage = Stage::Free;
            request.body.clear();
            request.body.shrink_to(KEPT_BYTES);
            self.used -= 1;
            self.free.push((ticket & MAX_SLOTS as u64) as u32);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repeated_refusal_settles_nothing_else() {
        let mut attempts = Attempts::default();
        let (first, second) = (attempts.begin(10), attempts.begin(20));
        assert_eq!(
            (attempts.sent_us(first), attempts.sent_us(second)),
            (Some(10), Some(20))
        );
        assert!(attempts.refused(second));
        assert_eq!(
            (attempts.sent_us(first), attempts.sent_us(second)),
            (Some(10), None)
        );
        assert!(!attempts.refused(second), "heard already");
        assert!(attempts.in_doubt(), "the first may have been executed");
        assert!(attempts.refused(first));
        assert!(!attempts.in_doubt());
    }

    #[test]
    fn attempts_beyond_those_tracked_stay_in_doubt() {
        let mut attempts = Attempts::default();
        let all: Vec<u16> = (0..=TRACKED).map(|n| attempts.begin(n as u64)).collect();
        assert_eq!(attempts.sent_us(all[0]), Some(1), "before the second");
        assert!(!attempts.refused(all[0]), "no longer tracked");
        for &attempt in &all[1..] {
            assert!(attempts.refused(attempt));
        }
        assert!(attempts.in_doubt());
    }

    #[test]
    fn an_unknown_attempt_stays_in_doubt() {
        let mut attempts = Attempts::default();
        let only = attempts.begin(0);
        assert!(attempts.unknown(only));
        assert!(!attempts.refused(only));
        assert!(attempts.in_doubt());
    }

    #[test]
    fn numbers_of_reused_slots_differ() {
        let mut slab = Slab::default();
        let old = slab.insert(Kind::Write, 1).unwrap();
        slab.remove(old);
        let new = slab.insert(Kind::Write, 1).unwrap();
        assert_ne!(old, new);
        assert!(slab.get(old).is_none());
        assert_eq!(slab.full(split_id(wire_id(new, 7)).0), Some(new));
        assert_eq!(slab.len(), 1);
    }
}

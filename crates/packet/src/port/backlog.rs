//! What found the driver's queue full and goes later: a message of more datagrams than a queue has room for would lose the same rest with
//! every repetition.
//!
//! Messages of an association keep their order, but for short ones (heartbeats, votes, acknowledgements), which overtake. One queue that
//! takes nothing does not keep the others' messages back.

use super::*;
use crate::replay::WINDOW;

/// Messages up to this length overtake those that wait, bytes.
const OVERTAKES_BYTES: usize = 256;
/// Datagrams of one attempt at most, so that whatever else is to be done has its turn.
const ATTEMPT: usize = 256;
/// A full queue is tried again after this time, µs.
const RETRY_US: u64 = 100;
/// What nothing was taken of for so long is given up, µs: whoever wants it has repeated it. And where something else was: one queue may be
/// full of that.
const STALE_US: u64 = 100_000;
const BEHIND_US: u64 = 1_000_000;

/// A message, or what is left of one.
#[derive(Clone, Copy)]
pub(super) struct Piece<'a> {
    pub(super) assoc: u64,
    /// Its bytes, from those of the first datagram to go on.
    pub(super) parts: &'a [&'a [u8]],
    /// Bytes of the whole message.
    pub(super) total: usize,
    /// The sequence number of the message's first datagram, if one has been sealed.
    pub(super) base: Option<u64>,
    /// The first datagram to go, and how many at most.
    pub(super) first: usize,
    pub(super) most: usize,
}

impl<'a> Piece<'a> {
    pub(super) fn whole(assoc: u64, parts: &'a [&'a [u8]], total: usize) -> Piece<'a> {
        Piece {
            assoc,
            parts,
            total,
            base: None,
            first: 0,
            most: usize::MAX,
        }
    }
}

/// What is left of a piece after a burst: the first datagram that did not go.
#[derive(Clone, Copy)]
pub(super) struct Left {
    pub(super) piece: usize,
    pub(super) first: usize,
}

/// What is left of a message, in memory of its own.
struct Rest {
    assoc: u64,
    total: usize,
    base: Option<u64>,
    first: usize,
    /// Its bytes, and how many of them have gone.
    bytes: Vec<u8>,
    gone: usize,
    /// When something of it was last taken.
    moved_us: u64,
}

/// All that waits.
#[derive(Default)]
pub(super) struct Backlog {
    rests: VecDeque<Rest>,
    bytes: usize,
    /// When to try again; nothing waits without it.
    pub(super) retry_us: Option<u64>,
}

impl Backlog {
    pub(super) fn is_empty(&self) -> bool {
        self.rests.is_empty()
    }

    /// Of the oldest that waits on an association: the sequence number of its next datagram, if it has one.
    fn oldest(&self, assoc: u64) -> Option<Option<u64>> {
        let rest = self.rests.iter().find(|rest| rest.assoc == assoc)?;
        Some(rest.base.map(|base| base + rest.first as u64))
    }
}

impl Port {
    /// Whether a message has to wait behind others of its association.
    pub(super) fn waits_behind(&self, piece: &Piece<'_>) -> bool {
        let Some(oldest) = self.backlog.oldest(piece.assoc) else {
            return false;
        };
        let next = self
            .assocs
            .get(&piece.assoc)
            .map_or(0, |assoc| assoc.next_seq);
        // What it overtakes must not become too old for the receiver to tell from a replay.
        let too_old = oldest.is_some_and(|seq| next - seq > WINDOW / 2);
        piece.total > OVERTAKES_BYTES || too_old
    }

    /// Keeps a piece from one of its datagrams on for later, if there is room. `base`: as in [`Piece::base`]. Answers whether it does.
    pub(super) fn keep(
        &mut self,
        now_us: u64,
        piece: &Piece<'_>,
        base: Option<u64>,
        first: usize,
    ) -> bool {
        let Some(assoc) = self.assocs.get(&piece.assoc) else {
            self.stats.no_association += 1;
            return false;
        };
        let done = (first - piece.first) * assoc.chunk;
        let count = datagrams(piece.total, assoc.chunk) - first;
        let len: usize = piece.parts.iter().map(|part| part.len()).sum();
        let bytes = len.saturating_sub(done);
        if self.backlog.bytes + bytes > self.backlog_bytes {
            self.stats.send_dropped += count as u64;
            return false;
        }
        let mut tail = Vec::with_capacity(bytes);
        let mut skip = done;
        for part in piece.parts {
            tail.extend_from_slice(&part[skip.min(part.len())..]);
            skip = skip.saturating_sub(part.len());
        }
        self.stats.send_deferred += count as u64;
        self.backlog.bytes += bytes;
        self.backlog.rests.push_back(Rest {
            assoc: piece.assoc,
            total: piece.total,
            base,
            first,
            bytes: tail,
            gone: 0,
            moved_us: now_us,
        });
        self.backlog.retry_us.get_or_insert(now_us + RETRY_US);
        true
    }

    /// Notes whether the driver has to be called again.
    pub(super) fn note_unsent(&mut self, now_us: u64) {
        let has_unsent = self.driver.has_unsent();
        if !has_unsent {
            self.unsent_wait_us = UNSENT_US;
        }
        self.unsent_us = has_unsent.then_some(now_us + self.unsent_wait_us);
    }

    /// Tries again, if it is time.
    pub(super) fn send_backlog(&mut self, now_us: u64) -> io::Result<()> {
        if self.backlog.retry_us.is_none_or(|retry| now_us < retry) {
            return Ok(());
        }
        let mut budget = ATTEMPT;
        // What nothing is taken of goes behind the others', and what stands behind it on its association with it.
        let (mut moving, mut stuck) = (VecDeque::new(), VecDeque::<Rest>::new());
        for mut rest in std::mem::take(&mut self.backlog.rests) {
            let Some(assoc) = self.assocs.get(&rest.assoc) else {
                self.stats.send_dropped += 1;
                continue;
            };
            let chunk = assoc.chunk;
            let most = budget.min(datagrams(rest.total, chunk) - rest.first);
            if stuck.iter().any(|before| before.assoc == rest.assoc) {
                stuck.push_back(rest);
                continue;
            }
            if most == 0 {
                moving.push_back(rest);
                continue;
            }
            let parts = [&rest.bytes[rest.gone..]];
            let piece = Piece {
                base: rest.base,
                first: rest.first,
                most,
                ..Piece::whole(rest.assoc, &parts, rest.total)
            };
            let burst = self.burst(now_us, &[piece])?;
            let next = burst.left.first();
            let moved = next.map_or(most, |left| left.first - rest.first);
            budget -= moved;
            rest.base = burst.bases[0];
            rest.first += moved;
            rest.gone = (rest.gone + moved * chunk).min(rest.bytes.len());
            if moved > 0 {
                rest.moved_us = now_us;
            }
            match (rest.first == datagrams(rest.total, chunk), moved) {
                (true, _) => {}
                (_, 0) => stuck.push_back(rest),
                _ => moving.push_back(rest),
            }
        }
        let is_full = budget > 0;
        moving.append(&mut stuck);
        let most_us = if budget < ATTEMPT {
            BEHIND_US
        } else {
            STALE_US
        };
        let all = moving.len();
        moving.retain(|rest| now_us.saturating_sub(rest.moved_us) <= most_us);
        self.stats.send_dropped += (all - moving.len()) as u64;
        self.backlog.bytes = moving.iter().map(|rest| rest.bytes.len()).sum();
        self.backlog.retry_us = match (moving.is_empty(), is_full) {
            (true, _) => None,
            (_, true) => Some(now_us + RETRY_US),
            (_, false) => Some(now_us),
        };
        self.backlog.rests = moving;
        Ok(())
    }
}

/// Datagrams of a message: of one that is empty, one.
pub(super) fn datagrams(bytes: usize, chunk: usize) -> usize {
    bytes.div_ceil(chunk).max(1)
}

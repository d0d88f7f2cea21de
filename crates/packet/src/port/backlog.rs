//! What found the driver's queue full and goes later: a message of more datagrams than a queue has room for would lose the same rest with
//! every repetition.
//!
//! Messages of an association keep their order, but for short ones (heartbeats, votes, acknowledgements), which overtake. Of several queues
//! one that takes nothing does not keep the others' messages back.

use std::collections::HashSet;

use super::send::{Piece, datagrams};
use super::*;
use crate::replay::WINDOW;

/// Messages up to this length overtake those that wait, bytes.
const OVERTAKES_BYTES: usize = 256;
/// Datagrams of one attempt at most, so that whatever else is to be done has its turn; and of the first attempt after a queue was full.
const ATTEMPT: usize = 256;
const PROBE: usize = 16;
/// A full queue is tried again after this time, µs.
const RETRY_US: u64 = 100;
/// Where nothing at all was taken for so long, what waits is given up, µs: whoever wants it has repeated it.
const STALE_US: u64 = 100_000;
/// The same of one message, where others' were taken meanwhile.
const SHUT_US: u64 = 1_000_000;
/// What a message takes besides its bytes.
const OVERHEAD_BYTES: usize = 128;

/// What is left of a message, in memory of its own.
struct Rest {
    assoc: u64,
    total: usize,
    base: Option<u64>,
    first: usize,
    /// Its bytes, and how many of them have gone.
    bytes: Vec<u8>,
    gone: usize,
    /// Until when it had no reason to be anywhere else: something of it was taken, or it was not its turn.
    fresh_us: u64,
}

impl Rest {
    fn held_bytes(&self) -> usize {
        self.bytes.len() + OVERHEAD_BYTES
    }
}

/// All that waits.
#[derive(Default)]
pub(super) struct Backlog {
    /// Messages of one short datagram, which go first.
    short: VecDeque<Rest>,
    long: VecDeque<Rest>,
    bytes: usize,
    /// When to try again; nothing waits without it.
    pub(super) retry_us: Option<u64>,
    /// When something was last taken.
    moved_us: u64,
    /// Datagrams to try next time.
    probe: usize,
}

impl Backlog {
    pub(super) fn is_empty(&self) -> bool {
        self.short.is_empty() && self.long.is_empty()
    }

    /// Whether something waits and goes on.
    pub(super) fn is_moving(&self, now_us: u64) -> bool {
        !self.is_empty() && now_us.saturating_sub(self.moved_us) < STALE_US / 10
    }

    /// For each association on which a long message waits, the sequence number of the oldest one's next datagram, if it has one.
    pub(super) fn oldest(&self) -> HashMap<u64, Option<u64>> {
        let mut oldest = HashMap::new();
        for rest in &self.long {
            let seq = rest.base.map(|base| base + rest.first as u64);
            oldest.entry(rest.assoc).or_insert(seq);
        }
        oldest
    }
}

/// How an attempt went.
struct Attempt {
    /// Datagrams that may still be tried.
    budget: usize,
    moved: bool,
    /// A queue was full, or the only one was.
    was_full: bool,
    is_over: bool,
    /// Associations whose next message has to wait for the one before.
    held: HashSet<u64>,
}

impl Port {
    /// Whether something waits for the driver and goes on soon: the host had better not sleep for long.
    pub fn sends_soon(&self, now_us: u64) -> bool {
        self.backlog.is_moving(now_us) || self.unsent_us.is_some() && self.unsent_wait_us < 1_000
    }

    /// Whether a message has to wait behind others of its association; `oldest`: [`Backlog::oldest`].
    pub(super) fn waits_behind(
        &self,
        piece: &Piece<'_>,
        oldest: &HashMap<u64, Option<u64>>,
    ) -> bool {
        let Some(oldest) = oldest.get(&piece.assoc) else {
            return false;
        };
        let assoc = self.assocs.get(&piece.assoc);
        let next = assoc.map_or(0, |assoc| assoc.next_seq);
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
        if self.backlog.bytes + bytes + OVERHEAD_BYTES > self.backlog_bytes {
            self.stats.send_dropped += count as u64;
            return false;
        }
        let mut tail = Vec::with_capacity(bytes);
        let mut skip = done;
        for part in piece.parts {
            tail.extend_from_slice(&part[skip.min(part.len())..]);
            skip = skip.saturating_sub(part.len());
        }
        let rest = Rest {
            assoc: piece.assoc,
            total: piece.total,
            base,
            first,
            bytes: tail,
            gone: 0,
            fresh_us: now_us,
        };
        self.stats.send_deferred += count as u64;
        self.backlog.bytes += rest.held_bytes();
        // One that has no number yet was to stay behind the others.
        match base.is_some() && piece.total <= OVERTAKES_BYTES {
            true => self.backlog.short.push_back(rest),
            false => self.backlog.long.push_back(rest),
        }
        self.backlog.retry_us.get_or_insert(now_us + RETRY_US);
        true
    }

    /// Notes whether the driver has to be called again.
    pub(super) fn note_unsent(&mut self, now_us: u64) {
        if !self.driver.has_unsent() {
            (self.unsent_us, self.unsent_wait_us) = (None, UNSENT_US);
        } else if self.unsent_us.is_none_or(|due| now_us >= due) {
            if self.unsent_us.is_some() {
                self.unsent_wait_us = (2 * self.unsent_wait_us).min(MOST_UNSENT_US);
            }
            self.unsent_us = Some(now_us + self.unsent_wait_us);
        }
    }

    /// Tries again, if it is time.
    pub(super) fn send_backlog(&mut self, now_us: u64) -> io::Result<()> {
        if self.backlog.retry_us.is_none_or(|retry| now_us < retry) {
            return Ok(());
        }
        self.backlog.retry_us = None;
        let mut attempt = Attempt {
            budget: self.backlog.probe.clamp(PROBE, ATTEMPT),
            moved: false,
            was_full: false,
            is_over: false,
            held: HashSet::new(),
        };
        let short = std::mem::take(&mut self.backlog.short);
        self.backlog.short = self.try_in_turn(now_us, short, &mut attempt)?;
        attempt.held.clear();
        let long = std::mem::take(&mut self.backlog.long);
        self.backlog.long = self.try_in_turn(now_us, long, &mut attempt)?;
        let backlog = &mut self.backlog;
        if attempt.moved {
            backlog.moved_us = now_us;
        }
        backlog.probe = match attempt.was_full {
            true => PROBE,
            false => (2 * backlog.probe).clamp(PROBE, ATTEMPT),
        };
        let still_us = now_us.saturating_sub(backlog.moved_us);
        let mut given_up = 0;
        for rests in [&mut backlog.short, &mut backlog.long] {
            rests.retain(|rest| {
                let waited_us = now_us.saturating_sub(rest.fresh_us);
                let goes_on = waited_us <= STALE_US || still_us <= STALE_US;
                let keeps = waited_us <= SHUT_US && goes_on;
                given_up += u64::from(!keeps);
                keeps
            });
        }
        self.stats.send_dropped += given_up;
        let rests = backlog.short.iter().chain(&backlog.long);
        backlog.bytes = rests.map(Rest::held_bytes).sum();
        if !backlog.is_empty() {
            let wait_us = if attempt.was_full { RETRY_US } else { 0 };
            backlog.retry_us = Some(now_us + wait_us);
        }
        Ok(())
    }

    /// Tries some of these in turn. Answers what is left of them, in the order of the next attempt: those of which nothing was taken, and
    /// what stands behind them, after the others.
    fn try_in_turn(
        &mut self,
        now_us: u64,
        rests: VecDeque<Rest>,
        attempt: &mut Attempt,
    ) -> io::Result<VecDeque<Rest>> {
        let (mut left, mut stuck) = (VecDeque::new(), VecDeque::new());
        let mut stuck_on = HashSet::new();
        for mut rest in rests {
            let Some(assoc) = self.assocs.get(&rest.assoc) else {
                self.stats.send_dropped += 1;
                continue;
            };
            let chunk = assoc.chunk;
            if stuck_on.contains(&rest.assoc) && !attempt.is_over {
                stuck.push_back(rest);
                continue;
            }
            if attempt.is_over || attempt.budget == 0 || attempt.held.contains(&rest.assoc) {
                if attempt.moved {
                    rest.fresh_us = now_us;
                }
                left.push_back(rest);
                continue;
            }
            let most = attempt
                .budget
                .min(datagrams(rest.total, chunk) - rest.first);
            let parts = [&rest.bytes[rest.gone..]];
            let piece = Piece {
                base: rest.base,
                first: rest.first,
                most,
                ..Piece::whole(rest.assoc, &parts, rest.total)
            };
            let burst = self.burst(now_us, &[piece])?;
            let refused = burst.left.first();
            let moved = refused.map_or(most, |left| left.first - rest.first);
            attempt.was_full |= refused.is_some();
            // Where there is but one queue, the others' datagrams would find it full as well.
            attempt.is_over |= refused.is_some() && !self.driver.has_queues_apart();
            attempt.moved |= moved > 0;
            attempt.budget -= moved;
            rest.base = burst.bases[0];
            rest.first += moved;
            rest.gone = (rest.gone + moved * chunk).min(rest.bytes.len());
            if rest.first == datagrams(rest.total, chunk) {
                continue;
            }
            if moved > 0 {
                rest.fresh_us = now_us;
                attempt.held.insert(rest.assoc);
                left.push_back(rest);
            } else {
                stuck_on.insert(rest.assoc);
                stuck.push_back(rest);
            }
        }
        // With one queue nobody else could have gone instead.
        match self.driver.has_queues_apart() {
            true => left.append(&mut stuck),
            false => {
                stuck.append(&mut left);
                left = stuck;
            }
        }
        Ok(left)
    }
}

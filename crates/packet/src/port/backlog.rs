//! What found the driver's queue full and goes later: a message of more datagrams than a queue has room for would lose the same rest with
//! every repetition.
//!
//! Messages of an association keep their order, but for short ones (heartbeats, votes, acknowledgements), which overtake. Of several queues
//! one that takes nothing does not keep the others' messages back. What is short and goes to replicas goes before all else, and a part of the
//! room is theirs alone: however many answers wait, a heartbeat finds a place and is the next to go.

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
/// What goes to clients has all of the room but this part of it.
const KEPT_FOR_NODES: usize = 4;

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

    /// The sequence number of its next datagram, if it has one.
    fn seq(&self) -> Option<u64> {
        self.base.map(|base| base + self.first as u64)
    }
}

/// Whether what has this sequence number must not go before what has the other one: that would become too old for the receiver to tell from
/// a replay.
fn is_too_far_before(seq: u64, oldest: Option<&Option<u64>>) -> bool {
    let oldest = oldest.copied().flatten();
    oldest.is_some_and(|oldest| seq.saturating_sub(oldest) > WINDOW / 2)
}

/// Who waits.
#[derive(Clone, Copy)]
enum Whose {
    Nodes,
    Clients,
}

impl From<Peer> for Whose {
    fn from(peer: Peer) -> Whose {
        match peer {
            Peer::Node(_) => Whose::Nodes,
            Peer::Client(_) => Whose::Clients,
        }
    }
}

/// What waits for one kind of peers.
#[derive(Default)]
struct Rests {
    /// Messages of one short datagram, which go first.
    short: VecDeque<Rest>,
    long: VecDeque<Rest>,
    bytes: usize,
    /// For each association on which a long message waits, the sequence number of the oldest one's next datagram, if it has one.
    oldest: HashMap<u64, Option<u64>>,
}

impl Rests {
    fn is_empty(&self) -> bool {
        self.short.is_empty() && self.long.is_empty()
    }

    /// Drops what nobody waits for any more; answers how many.
    fn give_up(&mut self, now_us: u64, still_us: u64) -> u64 {
        let before = self.short.len() + self.long.len();
        for rests in [&mut self.short, &mut self.long] {
            rests.retain(|rest| {
                let waited_us = now_us.saturating_sub(rest.fresh_us);
                waited_us <= SHUT_US && (waited_us <= STALE_US || still_us <= STALE_US)
            });
        }
        let rests = self.short.iter().chain(&self.long);
        self.bytes = rests.map(Rest::held_bytes).sum();
        self.oldest.clear();
        for rest in &self.long {
            self.oldest.entry(rest.assoc).or_insert(rest.seq());
        }
        (before - self.short.len() - self.long.len()) as u64
    }
}

/// All that waits.
#[derive(Default)]
pub(super) struct Backlog {
    nodes: Rests,
    clients: Rests,
    /// Whether clients have their turn before what is long and goes to replicas: every other time.
    clients_begin: bool,
    /// When to try again; nothing waits without it.
    pub(super) retry_us: Option<u64>,
    /// When something was last taken.
    moved_us: u64,
    /// Datagrams to try next time.
    probe: usize,
}

impl Backlog {
    pub(super) fn is_empty(&self) -> bool {
        self.nodes.is_empty() && self.clients.is_empty()
    }

    /// Whether something waits and goes on.
    pub(super) fn is_moving(&self, now_us: u64) -> bool {
        !self.is_empty() && now_us.saturating_sub(self.moved_us) < STALE_US / 10
    }

    fn with(&self, whose: Whose) -> &Rests {
        match whose {
            Whose::Nodes => &self.nodes,
            Whose::Clients => &self.clients,
        }
    }

    fn of(&mut self, whose: Whose) -> &mut Rests {
        match whose {
            Whose::Nodes => &mut self.nodes,
            Whose::Clients => &mut self.clients,
        }
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

    /// Whether a message has to wait behind others of its association.
    pub(super) fn waits_behind(&self, piece: &Piece<'_>) -> bool {
        let Some(assoc) = self.assocs.get(&piece.assoc) else {
            return false;
        };
        let oldest = &self.backlog.with(assoc.peer.into()).oldest;
        let oldest = oldest.get(&piece.assoc);
        oldest.is_some()
            && (piece.total > OVERTAKES_BYTES || is_too_far_before(assoc.next_seq, oldest))
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
        let peer = assoc.peer;
        if !self.has_room(peer, bytes + OVERHEAD_BYTES) {
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
        let rests = self.backlog.of(peer.into());
        rests.bytes += rest.held_bytes();
        // One that has no number yet was to stay behind the others.
        let overtakes = piece.total <= OVERTAKES_BYTES
            && base.is_some_and(|seq| !is_too_far_before(seq, rests.oldest.get(&piece.assoc)));
        match overtakes {
            true => rests.short.push_back(rest),
            false => {
                rests.oldest.entry(rest.assoc).or_insert(rest.seq());
                rests.long.push_back(rest);
            }
        }
        self.backlog.retry_us.get_or_insert(now_us + RETRY_US);
        true
    }

    /// Whether so many bytes more may wait for a peer.
    fn has_room(&self, peer: Peer, bytes: usize) -> bool {
        let (nodes, clients) = (self.backlog.nodes.bytes, self.backlog.clients.bytes);
        let theirs = self.backlog_bytes - self.backlog_bytes / KEPT_FOR_NODES;
        nodes + clients + bytes <= self.backlog_bytes
            && (matches!(peer, Peer::Node(_)) || clients + bytes <= theirs)
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
        self.try_short(now_us, Whose::Nodes, &mut attempt)?;
        self.backlog.clients_begin ^= true;
        match self.backlog.clients_begin {
            true => {
                self.try_short(now_us, Whose::Clients, &mut attempt)?;
                self.try_long(now_us, Whose::Clients, &mut attempt)?;
                self.try_long(now_us, Whose::Nodes, &mut attempt)?;
            }
            false => {
                self.try_long(now_us, Whose::Nodes, &mut attempt)?;
                self.try_short(now_us, Whose::Clients, &mut attempt)?;
                self.try_long(now_us, Whose::Clients, &mut attempt)?;
            }
        }
        let backlog = &mut self.backlog;
        if attempt.moved {
            backlog.moved_us = now_us;
        }
        backlog.probe = match attempt.was_full {
            true => PROBE,
            false => (2 * backlog.probe).clamp(PROBE, ATTEMPT),
        };
        let still_us = now_us.saturating_sub(backlog.moved_us);
        let rests = [&mut backlog.nodes, &mut backlog.clients];
        self.stats.send_dropped += rests
            .into_iter()
            .map(|rests| rests.give_up(now_us, still_us))
            .sum::<u64>();
        if !backlog.is_empty() {
            let wait_us = if attempt.was_full { RETRY_US } else { 0 };
            backlog.retry_us = Some(now_us + wait_us);
        }
        Ok(())
    }

    fn try_short(&mut self, now_us: u64, whose: Whose, attempt: &mut Attempt) -> io::Result<()> {
        let short = std::mem::take(&mut self.backlog.of(whose).short);
        self.backlog.of(whose).short = self.try_in_turn(now_us, short, attempt)?;
        attempt.held.clear();
        Ok(())
    }

    fn try_long(&mut self, now_us: u64, whose: Whose, attempt: &mut Attempt) -> io::Result<()> {
        let long = std::mem::take(&mut self.backlog.of(whose).long);
        self.backlog.of(whose).long = self.try_in_turn(now_us, long, attempt)?;
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

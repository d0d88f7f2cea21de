//! What found the driver's queue full and goes later: a message of more datagrams than a queue has
//! room for would lose the same rest with every repetition.
//!
//! Messages of an association keep their order, but for short ones (heartbeats, votes,
//! acknowledgements), which overtake. Of several queues one that takes nothing does not keep the
//! others' messages back. What is short and goes to replicas goes before all else, and a part of
//! the room is theirs alone: however many answers wait, a heartbeat finds a place and is the next
//! to go.

use std::collections::HashSet;

use super::send::{Piece, datagrams};
use super::*;
use crate::replay::WINDOW;

/// Messages up to this length overtake those that wait, bytes.
const SHORT_MESSAGE_BYTES: usize = 256;
/// Datagrams of one attempt at most, so that whatever else is to be done has its turn; and of the
/// first attempt after a queue was full.
const MAX_ATTEMPT: usize = 256;
const MIN_ATTEMPT: usize = 16;
/// A full queue is tried again after this time, µs.
const RETRY_US: u64 = 100;
/// Where nothing at all was taken for so long, what waits is given up, µs: the peer that needs it
/// has requested it again.
const STALE_US: u64 = 100_000;
/// The same of one message, where others' were taken meanwhile.
const MESSAGE_STALE_US: u64 = 1_000_000;
/// What a message takes besides its bytes.
const OVERHEAD_BYTES: usize = 128;
/// What goes to clients has all of the room but this part of it.
const NODE_RESERVE_DIVISOR: usize = 4;

/// What is left of a message, in separate memory.
struct UnsentMessage {
    assoc: u64,
    total: usize,
    base: Option<u64>,
    first: usize,
    /// Its bytes, and how many of them have gone.
    bytes: Vec<u8>,
    sent_bytes: usize,
    /// Until when it had no reason to be anywhere else: something of it was taken, or it was not
    /// its turn.
    progress_us: u64,
}

impl UnsentMessage {
    fn held_bytes(&self) -> usize {
        self.bytes.len() + OVERHEAD_BYTES
    }

    /// The sequence number of its next datagram, if it has one.
    fn seq(&self) -> Option<u64> {
        self.base.map(|base| base + self.first as u64)
    }
}

/// Whether what has this sequence number must not go before what has the other one: that would
/// become too old for the receiver to tell from a replay.
fn exceeds_replay_window(seq: u64, oldest: Option<&Option<u64>>) -> bool {
    let oldest = oldest.copied().flatten();
    oldest.is_some_and(|oldest| seq.saturating_sub(oldest) > WINDOW / 2)
}

/// Who waits.
#[derive(Clone, Copy)]
enum PeerClass {
    Nodes,
    Clients,
}

impl From<Peer> for PeerClass {
    fn from(peer: Peer) -> PeerClass {
        match peer {
            Peer::Node(_) => PeerClass::Nodes,
            Peer::Client(_) => PeerClass::Clients,
        }
    }
}

/// What waits for one kind of peers.
#[derive(Default)]
struct SendQueue {
    /// Messages of one short datagram, which go first.
    short: VecDeque<UnsentMessage>,
    long: VecDeque<UnsentMessage>,
    bytes: usize,
    /// For each association on which a long message waits, the sequence number of the oldest one's
    /// next datagram, if it has one.
    oldest: HashMap<u64, Option<u64>>,
}

impl SendQueue {
    fn is_empty(&self) -> bool {
        self.short.is_empty() && self.long.is_empty()
    }

    /// Drops messages that are no longer needed; returns how many.
    fn drop_stale(&mut self, now_us: u64, still_us: u64) -> u64 {
        let before = self.short.len() + self.long.len();
        for queue in [&mut self.short, &mut self.long] {
            queue.retain(|message| {
                let waited_us = now_us.saturating_sub(message.progress_us);
                waited_us <= MESSAGE_STALE_US && (waited_us <= STALE_US || still_us <= STALE_US)
            });
        }
        let queue = self.short.iter().chain(&self.long);
        self.bytes = queue.map(UnsentMessage::held_bytes).sum();
        self.oldest.clear();
        for message in &self.long {
            self.oldest.entry(message.assoc).or_insert(message.seq());
        }
        (before - self.short.len() - self.long.len()) as u64
    }
}

/// All that waits.
#[derive(Default)]
pub(super) struct Backlog {
    nodes: SendQueue,
    clients: SendQueue,
    /// Whether clients have their turn before what is long and goes to replicas: every other time.
    clients_first: bool,
    /// When to try again; nothing waits without it.
    pub(super) retry_us: Option<u64>,
    /// When something was last taken.
    last_progress_us: u64,
    /// Datagrams to try next time.
    probe: usize,
}

impl Backlog {
    pub(super) fn is_empty(&self) -> bool {
        self.nodes.is_empty() && self.clients.is_empty()
    }

    /// Whether something waits and goes on.
    pub(super) fn is_draining(&self, now_us: u64) -> bool {
        !self.is_empty() && now_us.saturating_sub(self.last_progress_us) < STALE_US / 10
    }

    fn with(&self, class: PeerClass) -> &SendQueue {
        match class {
            PeerClass::Nodes => &self.nodes,
            PeerClass::Clients => &self.clients,
        }
    }

    fn of(&mut self, class: PeerClass) -> &mut SendQueue {
        match class {
            PeerClass::Nodes => &mut self.nodes,
            PeerClass::Clients => &mut self.clients,
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
    /// Whether something waits for the driver and goes on soon: the host had better not sleep for
    /// long.
    pub fn has_deferred_sends(&self, now_us: u64) -> bool {
        self.backlog.is_draining(now_us) || self.unsent_us.is_some() && self.unsent_wait_us < 1_000
    }

    /// Whether a message has to wait behind others of its association.
    pub(super) fn must_queue_behind(&self, piece: &Piece<'_>) -> bool {
        let Some(assoc) = self.assocs.get(&piece.assoc) else {
            return false;
        };
        let oldest = &self.backlog.with(assoc.peer.into()).oldest;
        let oldest = oldest.get(&piece.assoc);
        oldest.is_some()
            && (piece.total > SHORT_MESSAGE_BYTES || exceeds_replay_window(assoc.next_seq, oldest))
    }

    /// Keeps a piece from one of its datagrams on for later, if there is room. `base`: as in
    /// [`Piece::base`]. Returns whether it does.
    pub(super) fn defer(
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
        let message = UnsentMessage {
            assoc: piece.assoc,
            total: piece.total,
            base,
            first,
            bytes: tail,
            sent_bytes: 0,
            progress_us: now_us,
        };
        self.stats.send_deferred += count as u64;
        let queue = self.backlog.of(peer.into());
        queue.bytes += message.held_bytes();
        // One that has no number yet was to stay behind the others.
        let overtakes = piece.total <= SHORT_MESSAGE_BYTES
            && base.is_some_and(|seq| !exceeds_replay_window(seq, queue.oldest.get(&piece.assoc)));
        match overtakes {
            true => queue.short.push_back(message),
            false => {
                queue.oldest.entry(message.assoc).or_insert(message.seq());
                queue.long.push_back(message);
            }
        }
        self.backlog.retry_us.get_or_insert(now_us + RETRY_US);
        true
    }

    /// Whether so many bytes more may wait for a peer.
    fn has_room(&self, peer: Peer, bytes: usize) -> bool {
        let (nodes, clients) = (self.backlog.nodes.bytes, self.backlog.clients.bytes);
        let theirs = self.backlog_bytes - self.backlog_bytes / NODE_RESERVE_DIVISOR;
        nodes + clients + bytes <= self.backlog_bytes
            && (matches!(peer, Peer::Node(_)) || clients + bytes <= theirs)
    }

    /// Notes whether the driver has to be called again.
    pub(super) fn note_unsent(&mut self, now_us: u64) {
        if !self.driver.has_unsent() {
            (self.unsent_us, self.unsent_wait_us) = (None, UNSENT_US);
        } else if self.unsent_us.is_none_or(|due| now_us >= due) {
            if self.unsent_us.is_some() {
                self.unsent_wait_us = (2 * self.unsent_wait_us).min(MAX_UNSENT_US);
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
            budget: self.backlog.probe.clamp(MIN_ATTEMPT, MAX_ATTEMPT),
            moved: false,
            was_full: false,
            is_over: false,
            held: HashSet::new(),
        };
        self.send_short(now_us, PeerClass::Nodes, &mut attempt)?;
        self.backlog.clients_first ^= true;
        match self.backlog.clients_first {
            true => {
                self.send_short(now_us, PeerClass::Clients, &mut attempt)?;
                self.send_long(now_us, PeerClass::Clients, &mut attempt)?;
                self.send_long(now_us, PeerClass::Nodes, &mut attempt)?;
            }
            false => {
                self.send_long(now_us, PeerClass::Nodes, &mut attempt)?;
                self.send_short(now_us, PeerClass::Clients, &mut attempt)?;
                self.send_long(now_us, PeerClass::Clients, &mut attempt)?;
            }
        }
        let backlog = &mut self.backlog;
        if attempt.moved {
            backlog.last_progress_us = now_us;
        }
        backlog.probe = match attempt.was_full {
            true => MIN_ATTEMPT,
            false => (2 * backlog.probe).clamp(MIN_ATTEMPT, MAX_ATTEMPT),
        };
        let still_us = now_us.saturating_sub(backlog.last_progress_us);
        let queue = [&mut backlog.nodes, &mut backlog.clients];
        self.stats.send_dropped += queue
            .into_iter()
            .map(|queue| queue.drop_stale(now_us, still_us))
            .sum::<u64>();
        if !backlog.is_empty() {
            let wait_us = if attempt.was_full { RETRY_US } else { 0 };
            backlog.retry_us = Some(now_us + wait_us);
        }
        Ok(())
    }

    fn send_short(
        &mut self,
        now_us: u64,
        class: PeerClass,
        attempt: &mut Attempt,
    ) -> io::Result<()> {
        let short = std::mem::take(&mut self.backlog.of(class).short);
        self.backlog.of(class).short = self.send_messages(now_us, short, attempt)?;
        attempt.held.clear();
        Ok(())
    }

    fn send_long(
        &mut self,
        now_us: u64,
        class: PeerClass,
        attempt: &mut Attempt,
    ) -> io::Result<()> {
        let long = std::mem::take(&mut self.backlog.of(class).long);
        self.backlog.of(class).long = self.send_messages(now_us, long, attempt)?;
        Ok(())
    }

    /// Tries some of these in turn. Answers what is left of them, in the order of the next attempt:
    /// those of which nothing was taken, and what stands behind them, after the others.
    fn send_messages(
        &mut self,
        now_us: u64,
        queue: VecDeque<UnsentMessage>,
        attempt: &mut Attempt,
    ) -> io::Result<VecDeque<UnsentMessage>> {
        let (mut left, mut stuck) = (VecDeque::new(), VecDeque::new());
        let mut stuck_on = HashSet::new();
        for mut message in queue {
            let Some(assoc) = self.assocs.get(&message.assoc) else {
                self.stats.send_dropped += 1;
                continue;
            };
            let chunk = assoc.chunk;
            if stuck_on.contains(&message.assoc) && !attempt.is_over {
                stuck.push_back(message);
                continue;
            }
            if attempt.is_over || attempt.budget == 0 || attempt.held.contains(&message.assoc) {
                if attempt.moved {
                    message.progress_us = now_us;
                }
                left.push_back(message);
                continue;
            }
            let most = attempt
                .budget
                .min(datagrams(message.total, chunk) - message.first);
            let parts = [&message.bytes[message.sent_bytes..]];
            let piece = Piece {
                base: message.base,
                first: message.first,
                most,
                ..Piece::whole(message.assoc, &parts, message.total)
            };
            let burst = self.burst(now_us, &[piece])?;
            let refused = burst.left.first();
            let moved = refused.map_or(most, |left| left.first - message.first);
            attempt.was_full |= refused.is_some();
            // Where there is but one queue, the others' datagrams would find it full as well.
            attempt.is_over |= refused.is_some() && !self.driver.is_multiqueue();
            attempt.moved |= moved > 0;
            attempt.budget -= moved;
            message.base = burst.bases[0];
            message.first += moved;
            message.sent_bytes = (message.sent_bytes + moved * chunk).min(message.bytes.len());
            if message.first == datagrams(message.total, chunk) {
                continue;
            }
            if moved > 0 {
                message.progress_us = now_us;
                attempt.held.insert(message.assoc);
                left.push_back(message);
            } else {
                stuck_on.insert(message.assoc);
                stuck.push_back(message);
            }
        }
        // With one queue no other message could have gone instead.
        match self.driver.is_multiqueue() {
            true => left.append(&mut stuck),
            false => {
                stuck.append(&mut left);
                left = stuck;
            }
        }
        Ok(left)
    }
}

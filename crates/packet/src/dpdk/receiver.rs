//! What one driver of a process receives from the cards, for itself and for the others.

use std::net::SocketAddr;
use std::os::fd::RawFd;

use cyclone_pmem::payload::Payload;
use cyclone_pmem::pool::FrameMut;

use super::error::DpdkError;
use super::ffi::Piece;
use super::inbox::{InboxSender, RxDatagram};
use super::neighbours::OutgoingPacket;
use super::network::{Network, system};
use super::timer::Timer;
use crate::driver::DriverStats;
use crate::headers;

/// Pieces of a received packet at most, and room for those of a burst.
const MOST_PIECES: usize = 40;
/// Datagrams received with one call at most.
pub(super) const MAX_BURST: usize = 32;
/// The cards' links are checked once in so many calls, and no sooner than after this time, µs.
const LINK_CHECK_CALLS: u32 = 256;
const LINK_CHECK_US: u64 = 500_000;
/// Bursts of nothing but other drivers' datagrams that one call passes on.
const MAX_FORWARDED_BURSTS: usize = 8;

/// What is polled first: each queue of each card in turn, so that none starves behind one that is
/// always full.
#[derive(Default)]
struct Rotation {
    first: usize,
}

impl Rotation {
    /// All cards and queues, in the order of the next look.
    fn next(&mut self, cards: usize, queues: u16) -> impl Iterator<Item = (usize, u16)> + use<> {
        let count = cards * usize::from(queues);
        self.first = (self.first + 1) % count.max(1);
        let first = self.first;
        (0..count).map(move |turn| {
            let place = (first + turn) % count;
            // Next to each other in time are queues of different cards.
            (place % cards, (place / cards) as u16)
        })
    }
}

/// The end of the cards at which packets come out: one driver's, who passes on what is for the
/// others. So the node's own loop sees to the heartbeats whatever the loops of its logs do.
pub(super) struct Receiver {
    timer: Timer,
    /// The first of the ports, ours; the others' are right behind it.
    local: SocketAddr,
    inboxes: Vec<InboxSender>,
    pieces: Vec<Piece>,
    rotation: Rotation,
    poll_count: u32,
    links_checked_us: u64,
    /// Packets received by each card, of whatever kind.
    pub(super) received: Vec<u64>,
}

/// What one poll of a queue has brought.
#[derive(Clone, Copy, Default)]
struct PollCounts {
    own: usize,
    forwarded: usize,
}

impl Receiver {
    /// # Errors
    /// When the system grants no timer.
    pub(super) fn new(
        local: SocketAddr,
        inboxes: Vec<InboxSender>,
        network: &Network,
    ) -> Result<Receiver, DpdkError> {
        Ok(Receiver {
            timer: Timer::new().map_err(system("make a timer"))?,
            local,
            inboxes,
            pieces: vec![Piece::default(); MAX_BURST * MOST_PIECES],
            rotation: Rotation::default(),
            poll_count: 0,
            links_checked_us: 0,
            received: vec![0; network.cards.len()],
        })
    }

    pub(super) fn fd(&self) -> RawFd {
        self.timer.fd()
    }

    /// Packets have left: answers will come.
    pub(super) fn note_sent(&mut self, now_us: u64) {
        self.timer.busy(now_us);
    }

    /// What comes may wait for so long.
    pub(super) fn set_idle_poll_interval(&mut self, now_us: u64, look_us: Option<u64>) {
        self.timer.set_idle_interval(now_us, look_us);
    }

    fn check_links(&mut self, network: &Network, now_us: u64, calls: &mut Vec<OutgoingPacket>) {
        if now_us < self.links_checked_us + LINK_CHECK_US {
            return;
        }
        self.links_checked_us = now_us;
        for (number, card) in network.cards.iter().enumerate() {
            if card.check_link() {
                network.lock_neighbours().forget(number);
            }
        }
        // By those that are left too, when one has gone.
        for (number, card) in network.cards.iter().enumerate() {
            let is_up = card.is_up();
            network
                .lock_neighbours()
                .announce(now_us, number, is_up, calls);
        }
    }

    /// Appends up to `most` datagrams; what is to be said to neighbours goes to `calls`.
    pub(super) fn receive(
        &mut self,
        network: &Network,
        most: usize,
        out: &mut Vec<RxDatagram>,
        calls: &mut Vec<OutgoingPacket>,
        stats: &mut DriverStats,
    ) -> usize {
        let now_us = network.now_us();
        self.poll_count = self.poll_count.wrapping_add(1);
        if self.poll_count.is_multiple_of(LINK_CHECK_CALLS) || !network.is_connected() {
            self.check_links(network, now_us, calls);
        }
        let most = most.min(MAX_BURST);
        let mut all = PollCounts::default();
        for _ in 0..MAX_FORWARDED_BURSTS {
            let counts = self.poll_queues(network, now_us, most, out, calls, stats);
            all.own += counts.own;
            all.forwarded += counts.forwarded;
            // Who has got something will come again. Others' datagrams may be followed by ours.
            if counts.own > 0 || counts.forwarded == 0 {
                break;
            }
        }
        if all.own + all.forwarded > 0 {
            self.timer.busy(now_us);
        }
        if all.own == 0 {
            self.timer.idle(now_us);
        }
        all.own
    }

    /// One poll of every queue of every card.
    fn poll_queues(
        &mut self,
        network: &Network,
        now_us: u64,
        most: usize,
        out: &mut Vec<RxDatagram>,
        calls: &mut Vec<OutgoingPacket>,
        stats: &mut DriverStats,
    ) -> PollCounts {
        let queues = network.cards.first().map_or(0, |card| card.queues());
        let mut all = PollCounts::default();
        for (number, queue) in self.rotation.next(network.cards.len(), queues) {
            let left = most - all.own;
            if left == 0 {
                break;
            }
            let card = &network.cards[number];
            let frames = &network.frames;
            let filled = card.receive(queue, frames, &mut self.pieces, left, &mut stats.malformed);
            let mut begin = 0;
            for at in 0..filled {
                if self.pieces[at].last == 0 {
                    continue;
                }
                let pieces = &self.pieces[begin..=at];
                begin = at + 1;
                self.received[number] += 1;
                let mut packet: Vec<(FrameMut, Piece)> = Vec::with_capacity(pieces.len());
                for piece in pieces {
                    // SAFETY: the card has just named it, and it is asked for once.
                    if let Some(frame) = unsafe { frames.received(piece.frame) } {
                        packet.push((frame, *piece));
                    }
                }
                match datagram(&packet, self.local, 1 + self.inboxes.len()) {
                    Some(found) if found.driver == 0 => {
                        out.push(found.cut(packet));
                        all.own += 1;
                    }
                    Some(found) => {
                        all.forwarded += 1;
                        let is_there = self.inboxes[found.driver - 1].put(found.cut(packet));
                        stats.malformed += u64::from(!is_there);
                    }
                    None => {
                        let first = packet.first().map_or(&[][..], |(frame, p)| bytes(frame, p));
                        let mut neighbours = network.lock_neighbours();
                        let heard = neighbours.on_packet(now_us, number, first, calls);
                        stats.malformed += u64::from(!heard);
                    }
                }
            }
        }
        stats.received += all.own as u64;
        stats.receive_calls += u64::from(all.own > 0);
        all
    }
}

/// A piece's bytes.
fn bytes<'a>(frame: &'a FrameMut, piece: &Piece) -> &'a [u8] {
    let (at, end) = (
        usize::from(piece.at),
        usize::from(piece.at) + usize::from(piece.len),
    );
    frame.get(at..end).unwrap_or(&[])
}

/// A datagram for us in a packet.
struct Found {
    /// Whose it is.
    driver: usize,
    from: SocketAddr,
    skip: usize,
    len: usize,
}

/// Finds the datagram in a packet, if it holds one for so many drivers, whose ports begin at
/// `local`.
fn datagram(packet: &[(FrameMut, Piece)], local: SocketAddr, drivers: usize) -> Option<Found> {
    let total = packet.iter().map(|(_, piece)| usize::from(piece.len)).sum();
    let (frame, piece) = packet.first()?;
    let first = bytes(frame, piece);
    let port = headers::destination_port(first)?;
    let driver = usize::from(port.checked_sub(local.port())?);
    let parsed = headers::parse(first, total, port, 0)?;
    (driver < drivers && headers::destination(first)? == local.ip()).then_some(Found {
        driver,
        from: parsed.from,
        skip: parsed.at,
        len: parsed.len,
    })
}

impl Found {
    /// The datagram alone, in the frames where it lies.
    fn cut(self, packet: Vec<(FrameMut, Piece)>) -> RxDatagram {
        let (mut skip, mut left) = (self.skip, self.len);
        let mut datagram = Payload::new();
        for (frame, piece) in packet {
            let len = usize::from(piece.len);
            let take = len.saturating_sub(skip).min(left);
            if take > 0 {
                let at = usize::from(piece.at) + skip;
                datagram.push_frame(frame.freeze(at..at + take));
            }
            skip = skip.saturating_sub(len);
            left -= take;
        }
        (self.from, datagram)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A queue that is always full takes all of a call that begins with it: every other one has to
    /// come first as often.
    #[test]
    fn each_queue_of_each_card_comes_first_in_turn() {
        for (cards, queues) in [(1, 1), (1, 4), (2, 1), (2, 4), (3, 2)] {
            let count = cards * usize::from(queues);
            let mut rotation = Rotation::default();
            let mut first = Vec::new();
            for _ in 0..count {
                let order: Vec<(usize, u16)> = rotation.next(cards, queues).collect();
                let mut sorted = order.clone();
                sorted.sort_unstable();
                sorted.dedup();
                assert_eq!((order.len(), sorted.len()), (count, count));
                assert!(order.iter().all(|&(n, queue)| n < cards && queue < queues));
                first.push(order[0]);
            }
            first.sort_unstable();
            first.dedup();
            assert_eq!(first.len(), count, "{cards} cards, {queues} queues");
        }
        assert_eq!(Rotation::default().next(0, 0).count(), 0);
    }
}

//! Datagrams by DPDK (feature `dpdk`): from a card's queues into the pool's frames and back, without the kernel.
//!
//! ```text
//! DpdkDriver    what is sent and received, by which port           mod.rs
//!   Card        a port: its queues, what is on its way out         card.rs, outgoing.rs, pace.rs
//!   Frames      the pool's frames as DPDK's packet buffers         frames.rs
//!   Neighbours  ports and Ethernet addresses by destination        neighbours.rs, discovery.rs (ARP, ND)
//!   Timer       wakes who waits: cards are polled                  timer.rs
//! headers       Ethernet, IP, UDP                                  ../headers.rs
//! eal           DPDK's environment, once per process               eal.rs
//! shim          DPDK's inline functions for us to call             shim.c, gate.c, ffi.rs
//! ```
//! The card is ours alone: there is no kernel behind it that would take other packets, so these are counted and dropped.
//! //= cyclone §4.1, §4.2

mod card;
mod discovery;
mod eal;
mod error;
mod ffi;
mod frames;
mod neighbours;
mod options;
mod outgoing;
mod pace;
#[cfg(test)]
mod tests;
mod timer;

use std::io;
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::time::Instant;

use cyclone_pmem::Region;
use cyclone_pmem::payload::Payload;
use cyclone_pmem::pool::{FrameMut, Pool};

pub use self::error::DpdkError;
pub use self::options::DpdkOptions;

use self::card::Card;
use self::ffi::Piece;
use self::frames::Frames;
use self::neighbours::{Call, Neighbours, share, spread};
use self::pace::Patience;
use self::timer::Timer;
use crate::driver::{Datagram, Driver, DriverStats};
use crate::headers::{self, Template};

/// Pieces of a received packet at most, and room for those of a burst.
const MOST_PIECES: usize = 40;
/// Datagrams received with one call at most.
const MOST_BURST: usize = 32;
/// Frames of a pool of the driver's own.
const OWN_POOL_FRAMES: u64 = 8192;
/// Bytes of a datagram in each frame at least, as [`Driver::scatters`] promises.
const LEAST_PIECE: usize = 512;
/// Longest datagram over IP, bytes, whatever a port says.
const MOST_DATAGRAM: usize = 65_000;
/// Ports are looked at once in so many calls.
const LOOK_EVERY: u32 = 256;

/// Who is looked at first: each queue of each card in turn, so that none starves behind one that is always full.
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

/// Ports under DPDK as a [`Driver`].
pub struct DpdkDriver {
    cards: Vec<Card>,
    /// Always there but during `drop`.
    frames: Option<Frames>,
    neighbours: Neighbours,
    timer: Timer,
    pool: Pool,
    /// Whether it is not the caller's, because cards cannot reach that one.
    own_pool: bool,
    local: SocketAddr,
    max_datagram: usize,
    burst: usize,
    epoch: Instant,
    pieces: Vec<Piece>,
    calls: Vec<Call>,
    rotation: Rotation,
    turns: u32,
    stats: DriverStats,
}

fn system(what: &'static str) -> impl FnOnce(io::Error) -> DpdkError {
    move |error| DpdkError::System {
        what,
        why: error.to_string(),
    }
}

/// Our address and port: an unspecified port becomes one of those that nobody has by name.
fn local_address(address: SocketAddr, options: &DpdkOptions) -> Result<SocketAddr, DpdkError> {
    let mut local = address;
    if local.ip().is_unspecified() {
        match options.address {
            Some(ip) if ip.is_ipv4() == local.is_ipv4() => local.set_ip(ip),
            _ => return Err(DpdkError::NoAddress(address)),
        }
    }
    if local.port() == 0 {
        let mut random = [0u8; 2];
        // SAFETY: the buffer is ours and as long as said.
        let got = unsafe { libc::getrandom(random.as_mut_ptr().cast(), random.len(), 0) };
        if got != random.len() as isize {
            return Err(system("draw a port number")(io::Error::last_os_error()));
        }
        local.set_port(0xc000 | u16::from_ne_bytes(random));
    }
    Ok(local)
}

/// A pool of ordinary memory, for where cards cannot reach the caller's.
fn own_pool(frame_bytes: u32) -> Result<Pool, DpdkError> {
    let len = OWN_POOL_FRAMES * u64::from(frame_bytes);
    let area = Region::anonymous(len).and_then(|region| region.take(0, len));
    match area {
        Ok(area) => Ok(Pool::new(area, frame_bytes)),
        Err(error) => Err(DpdkError::Memory(error.to_string())),
    }
}

/// Finds the ports and sets them up; those that were found are in `cards` whatever becomes of the others.
fn add_cards(
    options: &DpdkOptions,
    pool: &Pool,
    frames: &mut Frames,
    cards: &mut Vec<Card>,
) -> Result<(), DpdkError> {
    let rings = options.ports.len() as u32 * options.queues.max(1);
    let slots = card::receive_slots(pool.count(), pool.free(), rings);
    for port in &options.ports {
        let mut card = Card::find(port, options)?;
        let done = card.set_up(options, pool, frames, slots, rings);
        cards.push(card);
        done?;
    }
    let send_slots = cards.iter().map(|card| card.send_slots).sum();
    frames.prepare_sending(send_slots, options.packet_bytes())
}

fn open_cards(options: &DpdkOptions, pool: &Pool) -> Result<(Vec<Card>, Frames), DpdkError> {
    let mut frames = Frames::new(pool)?;
    let mut cards: Vec<Card> = Vec::new();
    match add_cards(options, pool, &mut frames, &mut cards) {
        Ok(()) => Ok((cards, frames)),
        Err(error) => {
            close_cards(cards, &frames);
            Err(error)
        }
    }
}

fn close_cards(mut cards: Vec<Card>, frames: &Frames) {
    let _one_at_a_time = eal::CREATION.lock();
    for card in &mut cards {
        card.stop();
    }
    for card in cards {
        card.close(frames);
    }
}

impl DpdkDriver {
    /// Takes ports for datagrams to `address`, which becomes ours on their networks: nothing has to be configured in the
    /// kernel. Datagrams are received into frames of `pool`; if cards cannot reach its memory, into frames of a pool of
    /// the driver's own ([`Driver::pool`]).
    ///
    /// # Errors
    /// See [`DpdkError`].
    pub fn open(
        address: SocketAddr,
        pool: &Pool,
        options: &DpdkOptions,
    ) -> Result<DpdkDriver, DpdkError> {
        let local = local_address(address, options)?;
        eal::start(options, pool.count())?;
        let mut pool = pool.clone();
        let mut outside = false;
        let (cards, frames) = match open_cards(options, &pool) {
            // Memory that cannot be pinned (fs-DAX), or frames of an odd size.
            Err(DpdkError::Memory(_) | DpdkError::Frames { .. }) => {
                pool = own_pool(options.frame_bytes())?;
                outside = true;
                open_cards(options, &pool)?
            }
            opened => opened?,
        };
        let timer = match Timer::new() {
            Ok(timer) => timer,
            Err(error) => {
                close_cards(cards, &frames);
                return Err(system("make a timer")(error));
            }
        };
        let mtu = cards.iter().map(|card| card.mtu).min().unwrap_or(0);
        let macs = cards.iter().map(|card| card.mac).collect();
        Ok(DpdkDriver {
            neighbours: Neighbours::new(local, options.gateway, macs),
            cards,
            frames: Some(frames),
            timer,
            pool,
            own_pool: outside,
            local,
            max_datagram: usize::from(mtu)
                .saturating_sub(headers::ip_udp_bytes(local.ip()))
                .min(MOST_DATAGRAM),
            burst: options.burst.clamp(1, MOST_BURST),
            epoch: Instant::now(),
            pieces: vec![Piece::default(); MOST_BURST * MOST_PIECES],
            calls: Vec::new(),
            rotation: Rotation::default(),
            turns: 0,
            stats: DriverStats::default(),
        })
    }

    /// Packets received by each port, of whatever kind, in the order of the ports.
    pub fn received_by_port(&self) -> Vec<u64> {
        self.cards.iter().map(|card| card.received).collect()
    }

    /// Whether all ports have somebody at their other end.
    pub fn is_connected(&self) -> bool {
        self.cards.iter().all(|card| card.up)
    }

    fn now_us(&self) -> u64 {
        self.epoch.elapsed().as_micros() as u64
    }

    fn look(&mut self, now_us: u64) {
        for (number, card) in self.cards.iter_mut().enumerate() {
            if card.look(now_us) {
                self.neighbours.forget(number);
            }
        }
    }

    /// Sends questions and answers about neighbours, which are no datagrams and are not counted. What is ready goes first.
    fn call(&mut self, patience: &mut Patience) {
        if self.calls.is_empty() {
            return;
        }
        self.flush(patience);
        let epoch = self.epoch;
        let Some(frames) = &self.frames else { return };
        for (number, packet) in self.calls.drain(..) {
            let card = &mut self.cards[number];
            if let Some(place) = card.copy(0, frames, packet.len()) {
                place.copy_from_slice(&packet);
                card.ready(0);
                card.send(0, patience, || epoch.elapsed().as_micros() as u64);
            }
        }
    }

    fn flush(&mut self, patience: &mut Patience) {
        let epoch = self.epoch;
        let now_us = || epoch.elapsed().as_micros() as u64;
        for card in &mut self.cards {
            for queue in 0..card.queues() {
                let (sent, dropped, calls) = card.send(queue, patience, now_us);
                self.stats.sent += sent;
                self.stats.send_calls += calls;
                self.stats.send_full += u64::from(dropped > 0);
                self.stats.send_errors += dropped;
            }
        }
    }

    /// Puts a datagram together in a card's queue. False: no buffer is free.
    fn put(&mut self, number: usize, queue: u16, template: &Template, parts: &[&[u8]]) -> bool {
        let Some(frames) = &self.frames else {
            return false;
        };
        let card = &mut self.cards[number];
        let bytes = outgoing::put(card, queue, frames, template, parts);
        if let Some((copied, lent)) = bytes {
            self.stats.copied_bytes += copied;
            self.stats.lent_bytes += lent;
        }
        bytes.is_some()
    }

    /// Gets back what buffers the cards can do without, of those that they all share.
    fn reclaim(&mut self, patience: &mut Patience) {
        self.flush(patience);
        for card in &mut self.cards {
            card.reclaim();
        }
    }

    /// Receives up to `most` packets from one queue and appends the datagrams in them.
    fn receive(
        &mut self,
        now_us: u64,
        number: usize,
        queue: u16,
        most: usize,
        out: &mut Vec<(SocketAddr, Payload)>,
    ) -> usize {
        let Some(frames) = &mut self.frames else {
            return 0;
        };
        let (card, dropped) = (&mut self.cards[number], &mut self.stats.malformed);
        let filled = card.receive(queue, frames, &mut self.pieces, most, dropped);
        let (mut begin, mut count) = (0, 0);
        for at in 0..filled {
            if self.pieces[at].last == 0 {
                continue;
            }
            let pieces = &self.pieces[begin..=at];
            begin = at + 1;
            let mut packet: Vec<(FrameMut, Piece)> = Vec::with_capacity(pieces.len());
            for piece in pieces {
                if let Some(frame) = frames.received(piece.frame) {
                    packet.push((frame, *piece));
                }
            }
            match datagram(&packet, self.local) {
                Some(found) => {
                    out.push(found.cut(packet));
                    count += 1;
                }
                None => {
                    let first = packet.first().map_or(&[][..], |(frame, p)| bytes(frame, p));
                    let heard = self.neighbours.hear(now_us, number, first, &mut self.calls);
                    self.stats.malformed += u64::from(!heard);
                }
            }
        }
        self.stats.received += count;
        self.stats.receive_calls += u64::from(count > 0);
        count as usize
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
    from: SocketAddr,
    skip: usize,
    len: usize,
}

/// Finds the datagram in a packet, if it holds one for `local`.
fn datagram(packet: &[(FrameMut, Piece)], local: SocketAddr) -> Option<Found> {
    let total = packet.iter().map(|(_, piece)| usize::from(piece.len)).sum();
    let (frame, piece) = packet.first()?;
    let first = bytes(frame, piece);
    let parsed = headers::parse(first, total, local.port(), 0)?;
    (headers::destination(first)? == local.ip()).then_some(Found {
        from: parsed.from,
        skip: parsed.at,
        len: parsed.len,
    })
}

impl Found {
    /// The datagram alone, in the frames where it lies.
    fn cut(self, packet: Vec<(FrameMut, Piece)>) -> (SocketAddr, Payload) {
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

impl Driver for DpdkDriver {
    fn send(&mut self, datagrams: &[Datagram<'_>]) -> io::Result<usize> {
        let now_us = self.now_us();
        let mut patience = Patience::default();
        let mut taken: usize = 0;
        for datagram in datagrams {
            if datagram.len() > self.max_datagram {
                self.stats.send_errors += 1;
                taken += 1;
                continue;
            }
            let found = self.neighbours.find(now_us, datagram.to, &mut self.calls);
            let Some((number, template)) = found else {
                // Its neighbour has just been asked for; whoever wants an answer sends again.
                self.stats.send_errors += 1;
                taken += 1;
                continue;
            };
            // Datagrams of one destination keep their order: always the same queue.
            let (_, place) = share(spread(datagram.to), self.cards.len());
            let (queue, _) = share(place, self.cards[number].queues().into());
            let queue = queue as u16;
            if !self.put(number, queue, &template, datagram.parts) {
                self.reclaim(&mut patience);
                if !self.put(number, queue, &template, datagram.parts) {
                    self.stats.send_full += 1;
                    break;
                }
            }
            taken += 1;
            if self.cards[number].ready(queue) || taken.is_multiple_of(self.burst) {
                self.flush(&mut patience);
            }
        }
        self.flush(&mut patience);
        self.call(&mut patience);
        if taken > 0 {
            self.timer.busy(now_us);
        }
        Ok(taken)
    }

    fn recv(
        &mut self,
        _pool: &Pool,
        out: &mut Vec<(SocketAddr, Payload)>,
        max: usize,
    ) -> io::Result<usize> {
        let before = out.len();
        let now_us = self.now_us();
        self.turns = self.turns.wrapping_add(1);
        if self.turns.is_multiple_of(LOOK_EVERY) || !self.is_connected() {
            self.look(now_us);
        }
        let max = max.min(self.burst);
        let queues = self.cards.first().map_or(0, Card::queues);
        for (number, queue) in self.rotation.next(self.cards.len(), queues) {
            let left = max - (out.len() - before);
            if left > 0 {
                self.receive(now_us, number, queue, left, out);
            }
        }
        self.call(&mut Patience::default());
        if out.len() > before {
            self.timer.busy(now_us);
        } else {
            self.timer.idle(now_us);
        }
        Ok(out.len() - before)
    }

    fn fds(&self) -> Vec<RawFd> {
        vec![self.timer.fd()]
    }

    fn max_datagram(&self) -> usize {
        self.max_datagram
    }

    fn scatters(&self) -> Option<usize> {
        // Behind DPDK's headroom, and in the first of them the headers.
        let room = self.cards.iter().map(|card| card.room).min()?;
        Some(room.saturating_sub(headers::MOST_BYTES).max(LEAST_PIECE))
    }

    fn pool(&self) -> Option<Pool> {
        self.own_pool.then(|| self.pool.clone())
    }

    fn frames_kept(&self) -> u32 {
        self.cards.iter().map(|card| card.slots).sum()
    }

    fn describe(&self) -> String {
        let ports: Vec<&str> = self.cards.iter().map(|card| card.device.as_str()).collect();
        let queues = self.cards.first().map_or(0, Card::queues);
        format!(
            "DPDK on {}, {queues} queues{}",
            ports.join("; "),
            if self.own_pool {
                ", frames outside the region"
            } else {
                ""
            }
        )
    }

    fn local_addr(&self) -> SocketAddr {
        self.local
    }

    fn stats(&self) -> DriverStats {
        let mut stats = self.stats;
        for card in &self.cards {
            let (missed, damaged) = card.dropped();
            stats.pool_empty += missed;
            stats.malformed += damaged;
        }
        stats
    }
}

impl Drop for DpdkDriver {
    fn drop(&mut self) {
        // First the ports go, then the descriptors, then the frames.
        if let Some(frames) = self.frames.take() {
            close_cards(std::mem::take(&mut self.cards), &frames);
        }
    }
}

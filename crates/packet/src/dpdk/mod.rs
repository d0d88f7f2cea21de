//! Datagrams by DPDK (feature `dpdk`): from a card's queues into the pool's frames and back, without the kernel.
//!
//! ```text
//! DpdkDriver    what is sent and received, by which port           mod.rs
//!   Card        a port: its queues, what is on its way out         card.rs
//!   Frames      the pool's frames as DPDK's packet buffers         frames.rs
//!   Neighbours  ports and Ethernet addresses by destination        neighbours.rs, discovery.rs (ARP, ND)
//!   Timer       wakes who waits: cards are polled                  timer.rs
//! headers       Ethernet, IP, UDP                                  ../headers.rs
//! eal           DPDK's environment, once per process               eal.rs
//! shim          DPDK's inline functions for us to call             shim.c, ffi.rs
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
use self::neighbours::{Call, Neighbours};
use self::timer::Timer;
use crate::driver::{Datagram, Driver, DriverStats};
use crate::headers::{self, Template};

/// Parts shorter than this are copied behind the headers: a descriptor of their own costs more.
const LEND_BYTES: usize = 256;
/// Pieces of a received packet at most, and room for those of a burst.
const MOST_PIECES: usize = 40;
/// Datagrams received with one call at most.
const MOST_BURST: usize = 32;
/// Frames of a pool of the driver's own.
const OWN_POOL_FRAMES: u64 = 8192;
/// Longest datagram over IP, bytes, whatever a port says.
const MOST_DATAGRAM: usize = 65_000;
/// Ports are looked at once in so many calls.
const LOOK_EVERY: u32 = 256;

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
    /// Port that is looked at first, so that none starves.
    first: usize,
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

fn open_cards(options: &DpdkOptions, pool: &Pool) -> Result<(Vec<Card>, Frames), DpdkError> {
    let frames = Frames::new(pool, options.packet_bytes())?;
    let share = pool.count() / options.ports.len() as u32;
    let mut cards: Vec<Card> = Vec::new();
    for port in &options.ports {
        match Card::open(port, options, &frames, share) {
            Ok(card) => cards.push(card),
            Err(error) => {
                close_cards(cards, &frames);
                return Err(error);
            }
        }
    }
    Ok((cards, frames))
}

fn close_cards(cards: Vec<Card>, frames: &Frames) {
    let _one_at_a_time = eal::CREATION.lock();
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
            first: 0,
            turns: 0,
            stats: DriverStats::default(),
        })
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
    fn call(&mut self) {
        if self.calls.is_empty() {
            return;
        }
        self.flush();
        let Some(frames) = &self.frames else { return };
        for (number, packet) in self.calls.drain(..) {
            let card = &mut self.cards[number];
            if let Some(place) = card.copy(0, frames, packet.len()) {
                place.copy_from_slice(&packet);
                card.ready(0);
                card.send(0);
            }
        }
    }

    fn flush(&mut self) {
        for card in &mut self.cards {
            for queue in 0..card.queues() {
                let (sent, dropped, calls) = card.send(queue);
                self.stats.sent += sent;
                self.stats.send_calls += calls;
                self.stats.send_full += u64::from(dropped > 0);
                self.stats.send_errors += dropped;
            }
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

/// Puts a datagram together: headers and what lies elsewhere in buffers of DPDK's, what lies in the pool from there.
/// False: no buffer is free.
fn put(
    card: &mut Card,
    queue: u16,
    frames: &Frames,
    template: &Template,
    parts: &[&[u8]],
    stats: &mut DriverStats,
) -> bool {
    let (mut at, mut pieces) = (0, 0);
    let mut with_headers = template.len();
    let mut good = true;
    while good && (at < parts.len() || with_headers > 0) {
        let begin = at;
        let mut lent = None;
        while at < parts.len() && lent.is_none() {
            // Its own piece, what is to be copied before it, and all that follows it.
            let before = usize::from(with_headers > 0 || at > begin);
            let after = usize::from(at + 1 < parts.len());
            let room = pieces + before + 1 + after <= card.most_pieces;
            if room && parts[at].len() >= LEND_BYTES {
                lent = frames.share(parts[at]);
            }
            at += usize::from(lent.is_none());
        }
        let copied: usize = parts[begin..at].iter().map(|part| part.len()).sum();
        if copied + with_headers > 0 {
            match card.copy(queue, frames, copied + with_headers) {
                Some(place) => {
                    if with_headers > 0 {
                        template.write(parts, place);
                    }
                    let mut to = with_headers;
                    for part in &parts[begin..at] {
                        place[to..to + part.len()].copy_from_slice(part);
                        to += part.len();
                    }
                    stats.copied_bytes += copied as u64;
                    pieces += 1;
                    with_headers = 0;
                }
                None => good = false,
            }
        }
        if let Some(frame) = lent.filter(|_| good) {
            stats.lent_bytes += frame.len() as u64;
            good = card.lend(queue, frames, frame);
            pieces += 1;
            at += 1;
        }
    }
    if !good {
        card.discard(queue);
    }
    good
}

impl Driver for DpdkDriver {
    fn send(&mut self, datagrams: &[Datagram<'_>]) -> io::Result<usize> {
        let now_us = self.now_us();
        let mut taken: usize = 0;
        for datagram in datagrams {
            if datagram.len() > self.max_datagram {
                self.stats.send_errors += 1;
                taken += 1;
                continue;
            }
            let found = self.neighbours.find(now_us, datagram.to, &mut self.calls);
            let (Some((number, template)), Some(frames)) = (found, &self.frames) else {
                // Its neighbour has just been asked for; whoever wants an answer sends again.
                self.stats.send_errors += 1;
                taken += 1;
                continue;
            };
            let card = &mut self.cards[number];
            // Datagrams of one destination keep their order: always the same queue.
            let queue = datagram.to.port() % card.queues();
            if !put(
                card,
                queue,
                frames,
                &template,
                datagram.parts,
                &mut self.stats,
            ) {
                self.stats.send_full += 1;
                break;
            }
            taken += 1;
            if card.ready(queue) || taken.is_multiple_of(self.burst) {
                self.flush();
            }
        }
        self.flush();
        self.call();
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
        let count = self.cards.len();
        self.first = (self.first + 1) % count;
        for turn in 0..count {
            let number = (self.first + turn) % count;
            for queue in 0..self.cards[number].queues() {
                let left = max - (out.len() - before);
                if left > 0 {
                    self.receive(now_us, number, queue, left, out);
                }
            }
        }
        self.call();
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

    fn scatters(&self) -> bool {
        true
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

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

    #[test]
    fn clients_need_an_address() {
        let options = DpdkOptions::parse("net_null0").unwrap();
        let any = SocketAddr::from(([0, 0, 0, 0], 0));
        assert_eq!(local_address(any, &options), Err(DpdkError::NoAddress(any)));
        let options = DpdkOptions::parse("net_null0;address=10.0.0.3").unwrap();
        let local = local_address(any, &options).unwrap();
        assert_eq!(local.ip(), IpAddr::from([10, 0, 0, 3]));
        assert!(local.port() >= 0xc000);
        let six = SocketAddr::from((std::net::Ipv6Addr::UNSPECIFIED, 0));
        assert_eq!(local_address(six, &options), Err(DpdkError::NoAddress(six)));
    }
}

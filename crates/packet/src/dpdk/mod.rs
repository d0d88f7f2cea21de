//! Datagrams by DPDK (feature `dpdk`): from a card's queues into the pool's frames and back,
//! without the kernel.
//!
//! ```text
//! DpdkDriver    what is sent and received, by which port           mod.rs
//!   Receiver    what comes from the cards, for all drivers         receiver.rs, inbox.rs
//!   Outlet      what a driver has on its way to a card             outlet.rs, tx_backoff.rs
//!   RouteCache  headers by destination                             route_cache.rs
//! Network       what the drivers of one process share              network.rs
//!   Card        a port, and its queues                             card.rs
//!   Frames      the pool's frames as DPDK's packet buffers         frames.rs
//!   Neighbours  ports and Ethernet addresses by destination        neighbours.rs, discovery.rs (ARP, ND)
//!   Timer       wakes who waits: cards are polled                  timer.rs
//! headers       Ethernet, IP, UDP                                  ../headers.rs
//! eal           DPDK's environment, once per process               eal.rs
//! shim          DPDK's inline functions for us to call             shim.c, frames.c, gate.c, ffi.rs
//! ```
//! The card is ours alone: there is no kernel behind it that would take other packets, so these are
//! counted and dropped.
//!
//! A process may have several drivers, one behind the other by their port numbers: the first one
//! receives for all, each sends by separate queues where the cards have enough. //= cyclone §4.1,
//! §4.2

mod card;
mod discovery;
mod eal;
mod error;
mod ffi;
mod frames;
mod inbox;
mod neighbours;
mod network;
mod options;
mod outlet;
mod receiver;
mod route_cache;
#[cfg(test)]
mod tests;
mod timer;
mod tx_backoff;

use std::io;
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::Arc;

use cyclone_pmem::payload::Payload;
use cyclone_pmem::pool::Pool;

pub use self::error::DpdkError;
pub use self::options::DpdkOptions;

use self::inbox::{Inbox, RxDatagram, inbox};
use self::neighbours::{OutgoingPacket, flow_hash, share};
use self::network::{Network, local_address, system};
use self::outlet::Outlet;
use self::receiver::{MAX_BURST, Receiver};
use self::route_cache::RouteCache;
use self::tx_backoff::TxBackoff;
use crate::driver::{Datagram, Driver, DriverStats};
use crate::headers::{self, Template};

/// Bytes of a datagram in each frame at least, as [`Driver::supports_multi_slice`] promises.
const LEAST_PIECE: usize = 512;
/// Datagrams that wait for one driver while another receives for it, at least and at most.
const LEAST_WAITING: usize = 64;
const MOST_WAITING: usize = 1024;

/// Where a driver's datagrams come from.
enum Source {
    /// From the cards: the first driver's, which receives for all.
    Cards(Receiver),
    /// From the first driver.
    Inbox(Inbox),
}

/// Ports under DPDK as a [`Driver`].
pub struct DpdkDriver {
    // These go first: they hold buffers of the network's.
    outlets: Vec<Outlet>,
    source: Source,
    network: Arc<Network>,
    ways: RouteCache,
    local: SocketAddr,
    burst: usize,
    /// Found by [`Driver::rx_is_empty`], and not taken yet.
    early: Vec<RxDatagram>,
    calls: Vec<OutgoingPacket>,
    stats: DriverStats,
}

impl DpdkDriver {
    /// Takes ports for datagrams to `address`, which becomes ours on their networks: nothing has to
    /// be configured in the kernel. Datagrams are received into frames of `pool`; if cards cannot
    /// reach its memory, into frames of a pool of the driver's own ([`Driver::pool`]).
    ///
    /// # Errors
    /// See [`DpdkError`].
    pub fn open(
        address: SocketAddr,
        pool: &Pool,
        options: &DpdkOptions,
    ) -> Result<DpdkDriver, DpdkError> {
        let mut one = DpdkDriver::open_ports(address, pool, options, 1)?;
        Ok(one.swap_remove(0))
    }

    /// The same for `count` drivers, at `address` and at the ports right behind it, which may be
    /// used by separate threads. The first one receives for all of them: while it is not called,
    /// nothing arrives.
    ///
    /// # Errors
    /// See [`DpdkError`].
    pub fn open_ports(
        address: SocketAddr,
        pool: &Pool,
        options: &DpdkOptions,
        count: u16,
    ) -> Result<Vec<DpdkDriver>, DpdkError> {
        let local = local_address(address, options)?;
        let count = count.max(1);
        if local.port().checked_add(count - 1).is_none() {
            return Err(DpdkError::NoPorts(local, count));
        }
        let network = Arc::new(Network::open(local, pool, options, count)?);
        let waiting = network.receive_slots() as usize / usize::from(count);
        let mut inboxes = Vec::new();
        let mut sources = Vec::new();
        for _ in 1..count {
            let (door, inbox) = inbox(waiting.clamp(LEAST_WAITING, MOST_WAITING))
                .map_err(system("make an event descriptor"))?;
            inboxes.push(door);
            sources.push(Source::Inbox(inbox));
        }
        let receiver = Receiver::new(local, inboxes, &network)?;
        sources.insert(0, Source::Cards(receiver));
        let numbered = (0..count).zip(sources);
        let drivers = numbered.map(|(number, source)| {
            let local = SocketAddr::new(local.ip(), local.port() + number);
            let outlets = network.cards.iter().map(|card| Outlet::new(card, number));
            Ok(DpdkDriver {
                outlets: outlets.collect::<Result<_, DpdkError>>()?,
                source,
                ways: RouteCache::new(local, &network.lock_neighbours()),
                network: Arc::clone(&network),
                local,
                burst: options.burst.clamp(1, MAX_BURST),
                early: Vec::new(),
                calls: Vec::new(),
                stats: DriverStats::default(),
            })
        });
        drivers.collect()
    }

    /// Packets received by each port, of whatever kind, in the order of the ports; by the first
    /// driver, who receives.
    pub fn received_by_port(&self) -> Vec<u64> {
        match &self.source {
            Source::Cards(receiver) => receiver.received.clone(),
            Source::Inbox(_) => vec![0; self.network.cards.len()],
        }
    }

    /// Whether all ports have somebody at their other end.
    pub fn is_connected(&self) -> bool {
        self.network.is_connected()
    }

    /// Sends questions and answers about neighbours, which are no datagrams and are not counted.
    /// What is ready goes first.
    fn call(&mut self, patience: &mut TxBackoff) {
        if self.calls.is_empty() {
            return;
        }
        self.flush(patience);
        let network = &self.network;
        for (number, packet) in self.calls.drain(..) {
            let (card, outlet) = (&network.cards[number], &mut self.outlets[number]);
            if let Some(place) = outlet.copy(0, &network.frames, packet.len()) {
                place.copy_from_slice(&packet);
                outlet.ready(0);
                outlet.send(card, 0, patience, || network.now_us());
            }
        }
    }

    fn flush(&mut self, patience: &mut TxBackoff) {
        let network = &self.network;
        for (card, outlet) in network.cards.iter().zip(&mut self.outlets) {
            for queue in 0..outlet.queues() {
                let sent = outlet.send(card, queue, patience, || network.now_us());
                let (sent, dropped, calls) = sent;
                self.stats.sent += sent;
                self.stats.send_calls += calls;
                self.stats.send_full += u64::from(dropped > 0);
                self.stats.send_errors += dropped;
            }
        }
    }

    /// Puts a datagram together in a card's queue. False: no buffer is free.
    fn put(&mut self, number: usize, queue: u16, template: &Template, parts: &[&[u8]]) -> bool {
        let frames = &self.network.frames;
        let bytes = self.outlets[number].put(queue, frames, template, parts);
        if let Some((copied, lent)) = bytes {
            self.stats.copied_bytes += copied;
            self.stats.lent_bytes += lent;
        }
        bytes.is_some()
    }

    /// Gets back what buffers the cards can do without, of those that they all share.
    fn reclaim(&mut self, patience: &mut TxBackoff) {
        self.flush(patience);
        for (card, outlet) in self.network.cards.iter().zip(&self.outlets) {
            outlet.reclaim(card);
        }
    }
}

impl Driver for DpdkDriver {
    fn send(&mut self, datagrams: &[Datagram<'_>]) -> io::Result<usize> {
        let now_us = self.network.now_us();
        let mut patience = TxBackoff::default();
        let mut taken: usize = 0;
        for datagram in datagrams {
            if datagram.len() > self.network.max_datagram {
                self.stats.send_errors += 1;
                taken += 1;
                continue;
            }
            let neighbours = self.network.neighbours();
            let found = self
                .ways
                .find(now_us, datagram.to, neighbours, &mut self.calls);
            let Some((number, template)) = found else {
                // Its neighbour has just been asked for; a sender that wants an answer sends again.
                self.stats.send_errors += 1;
                taken += 1;
                continue;
            };
            // Datagrams of one destination keep their order: always the same queue.
            let (_, place) = share(flow_hash(datagram.to), self.outlets.len());
            let (queue, _) = share(place, self.outlets[number].queues().into());
            let queue = queue as u16;
            if !self.put(number, queue, &template, datagram.parts) {
                self.reclaim(&mut patience);
                if !self.put(number, queue, &template, datagram.parts) {
                    self.stats.send_full += 1;
                    break;
                }
            }
            taken += 1;
            if self.outlets[number].ready(queue) || taken.is_multiple_of(self.burst) {
                self.flush(&mut patience);
            }
        }
        self.flush(&mut patience);
        self.call(&mut patience);
        if let Source::Cards(receiver) = &mut self.source
            && taken > 0
        {
            receiver.note_sent(now_us);
        }
        Ok(taken)
    }

    fn set_idle_poll_interval(&mut self, look_us: Option<u64>) {
        if let Source::Cards(receiver) = &mut self.source {
            receiver.set_idle_poll_interval(self.network.now_us(), look_us);
        }
    }

    fn recv(
        &mut self,
        _pool: &Pool,
        out: &mut Vec<(SocketAddr, Payload)>,
        max: usize,
    ) -> io::Result<usize> {
        let most = max.min(self.burst);
        if !self.early.is_empty() {
            let count = most.min(self.early.len());
            out.extend(self.early.drain(..count));
            return Ok(count);
        }
        match &mut self.source {
            Source::Cards(receiver) => {
                let (network, calls) = (&self.network, &mut self.calls);
                let count = receiver.receive(network, most, out, calls, &mut self.stats);
                self.call(&mut TxBackoff::default());
                Ok(count)
            }
            Source::Inbox(inbox) => {
                let count = inbox.take(out, most);
                self.stats.received += count as u64;
                self.stats.receive_calls += u64::from(count > 0);
                Ok(count)
            }
        }
    }

    fn rx_is_empty(&mut self) -> bool {
        let Source::Cards(receiver) = &mut self.source else {
            // The first driver notifies it of what has come.
            return false;
        };
        if self.early.is_empty() {
            let (network, calls, out) = (&self.network, &mut self.calls, &mut self.early);
            receiver.receive(network, self.burst, out, calls, &mut self.stats);
            self.call(&mut TxBackoff::default());
        }
        self.early.is_empty()
    }

    fn fds(&self) -> Vec<RawFd> {
        match &self.source {
            Source::Cards(receiver) => vec![receiver.fd()],
            Source::Inbox(inbox) => vec![inbox.fd()],
        }
    }

    fn on_readable(&mut self, _fd: RawFd) {
        if let Source::Inbox(inbox) = &self.source {
            inbox.on_readable();
        }
    }

    fn max_datagram(&self) -> usize {
        self.network.max_datagram
    }

    fn supports_multi_slice(&self) -> Option<usize> {
        // Behind DPDK's headroom, and in the first of them the headers.
        let room = self.network.cards.iter().map(|card| card.room).min()?;
        Some(room.saturating_sub(headers::MOST_BYTES).max(LEAST_PIECE))
    }

    fn pool(&self) -> Option<Pool> {
        self.network.own_pool.then(|| self.network.pool.clone())
    }

    fn frames_kept(&self) -> u32 {
        match &self.source {
            Source::Cards(_) => self.network.receive_slots(),
            Source::Inbox(_) => 0,
        }
    }

    fn describe(&self) -> String {
        let cards = &self.network.cards;
        let ports: Vec<&str> = cards.iter().map(|card| card.device.as_str()).collect();
        let queues = cards.first().map_or(0, |card| card.queues());
        format!(
            "DPDK on {}, {queues} queues{}",
            ports.join("; "),
            if self.network.own_pool {
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
        match &self.source {
            Source::Cards(_) => {
                for card in &self.network.cards {
                    let (missed, damaged) = card.dropped();
                    stats.pool_empty += missed;
                    stats.malformed += damaged;
                }
            }
            Source::Inbox(inbox) => stats.pool_empty += inbox.dropped(),
        }
        stats
    }
}

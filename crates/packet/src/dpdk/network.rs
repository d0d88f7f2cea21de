//! What the drivers of one process have in common: cards, frames, and what is known of the network.

use std::io;
use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use cyclone_pmem::Region;
use cyclone_pmem::pool::Pool;

use super::card::{self, Card};
use super::eal;
use super::error::DpdkError;
use super::frames::Frames;
use super::neighbours::Neighbours;
use super::options::DpdkOptions;
use crate::headers;

/// Frames of a pool of the drivers' own.
const OWN_POOL_FRAMES: u64 = 8192;
/// Longest datagram over IP, bytes, whatever a port says.
const MOST_DATAGRAM: usize = 65_000;

pub(super) struct Network {
    pub(super) cards: Vec<Card>,
    pub(super) frames: Frames,
    neighbours: Mutex<Neighbours>,
    pub(super) pool: Pool,
    /// Whether it is not the caller's, because cards cannot reach that one.
    pub(super) own_pool: bool,
    pub(super) max_datagram: usize,
    epoch: Instant,
}

pub(super) fn system(what: &'static str) -> impl FnOnce(io::Error) -> DpdkError {
    move |error| DpdkError::System {
        what,
        why: error.to_string(),
    }
}

/// Our address and port: an unspecified port becomes one of those that are not requested by number.
pub(super) fn local_address(
    address: SocketAddr,
    options: &DpdkOptions,
) -> Result<SocketAddr, DpdkError> {
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
pub(super) fn own_pool(frame_bytes: u32) -> Result<Pool, DpdkError> {
    let len = OWN_POOL_FRAMES * u64::from(frame_bytes);
    let area = Region::anonymous(len).and_then(|region| region.take(0, len));
    match area {
        Ok(area) => Ok(Pool::new(area, frame_bytes)),
        Err(error) => Err(DpdkError::Memory(error.to_string())),
    }
}

/// Finds the ports and sets them up; those that were found are in `cards` whatever becomes of the
/// others.
fn add_cards(
    options: &DpdkOptions,
    drivers: u16,
    pool: &Pool,
    frames: &mut Frames,
    cards: &mut Vec<Card>,
) -> Result<(), DpdkError> {
    let rings = options.ports.len() as u32 * options.queues.max(1);
    let slots = card::receive_slots(pool.count(), pool.free(), rings);
    for port in &options.ports {
        let mut card = Card::find(port, options)?;
        let done = card.set_up(options, pool, frames, slots, drivers);
        cards.push(card);
        done?;
    }
    let send_slots = cards.iter().map(|card| card.send_slots).sum();
    frames.prepare_sending(send_slots, drivers, options.packet_bytes())
}

fn open_cards(
    options: &DpdkOptions,
    drivers: u16,
    pool: &Pool,
) -> Result<(Vec<Card>, Frames), DpdkError> {
    let mut frames = Frames::new(pool)?;
    let mut cards: Vec<Card> = Vec::new();
    match add_cards(options, drivers, pool, &mut frames, &mut cards) {
        Ok(()) => Ok((cards, frames)),
        Err(error) => {
            close_cards(cards, &frames);
            Err(error)
        }
    }
}

fn close_cards(cards: Vec<Card>, frames: &Frames) {
    let _one_at_a_time = eal::CREATION.lock();
    for card in &cards {
        card.stop();
    }
    for card in cards {
        card.close(frames);
    }
}

impl Network {
    /// Takes the ports for so many drivers, whose first one is at `local`.
    ///
    /// # Errors
    /// See [`DpdkError`].
    pub(super) fn open(
        local: SocketAddr,
        pool: &Pool,
        options: &DpdkOptions,
        drivers: u16,
    ) -> Result<Network, DpdkError> {
        eal::start(options, drivers, pool.count())?;
        let mut pool = pool.clone();
        let mut outside = false;
        let (cards, frames) = match open_cards(options, drivers, &pool) {
            // Memory that cannot be pinned (fs-DAX), or frames of an odd size.
            Err(DpdkError::Memory(_) | DpdkError::Frames { .. }) => {
                pool = own_pool(options.frame_bytes())?;
                outside = true;
                open_cards(options, drivers, &pool)?
            }
            opened => opened?,
        };
        let mtu = cards.iter().map(|card| card.mtu).min().unwrap_or(0);
        let macs = cards.iter().map(|card| card.mac).collect();
        let neighbours = Neighbours::new(local.ip(), options.gateway, macs);
        Ok(Network {
            cards,
            frames,
            neighbours: Mutex::new(neighbours),
            pool,
            own_pool: outside,
            max_datagram: usize::from(mtu)
                .saturating_sub(headers::ip_udp_bytes(local.ip()))
                .min(MOST_DATAGRAM),
            epoch: Instant::now(),
        })
    }

    pub(super) fn neighbours(&self) -> &Mutex<Neighbours> {
        &self.neighbours
    }

    pub(super) fn lock_neighbours(&self) -> MutexGuard<'_, Neighbours> {
        self.neighbours
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether all cards have somebody at their other end.
    pub(super) fn is_connected(&self) -> bool {
        self.cards.iter().all(Card::is_up)
    }

    /// Microseconds since it was opened.
    pub(super) fn now_us(&self) -> u64 {
        self.epoch.elapsed().as_micros() as u64
    }

    /// Frames that the cards keep to receive into.
    pub(super) fn receive_slots(&self) -> u32 {
        self.cards.iter().map(|card| card.slots).sum()
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        // First the ports go, then the descriptors, then the frames.
        close_cards(std::mem::take(&mut self.cards), &self.frames);
    }
}

//! Datagrams straight between an interface's queues and the pool's frames, past the kernel's
//! network stack (AF_XDP).
//!
//! ```text
//! XdpDriver   what is sent and received, by which way                    mod.rs, open.rs, interface.rs
//!   Queue     one port's part in a receive queue                         queue.rs
//!     Packet  one to send, in the making                                 packet.rs
//!     bind    the ways to bind a socket, and the frames it gets          bind.rs, version.rs
//!     UmemFrames  frames lent to the kernel and taken back               umem_frames.rs
//!     Socket  its rings and the registered memory; where the kernel
//!             copies, one to receive by and one to send by               socket.rs, ring.rs
//!   Routes    headers by destination, from the kernel's tables           routes.rs, netlink.rs
//!   headers   Ethernet, IP, UDP                                          ../headers.rs
//! program     takes our ports' datagrams, leaves the rest to the kernel  program.rs, bpf.rs
//! kernel      its own socket on the same port: for destinations beyond other interfaces, for neighbours not known
//!             yet, for fragments, and so that nobody else has the port
//! ```
//! //= cyclone §4.1, §4.2

mod bind;
mod bpf;
mod error;
mod interface;
mod kernel;
mod netlink;
mod open;
mod packet;
mod program;
mod queue;
mod ring;
mod routes;
mod socket;
#[cfg(test)]
mod tests;
mod umem_frames;
mod version;

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Instant;

use cyclone_pmem::payload::Payload;
use cyclone_pmem::pool::Pool;

pub use self::error::XdpError;
pub use self::open::XdpOptions;
pub use self::program::MAX_ADDRESSES;

use self::kernel::KernelSocket;
use self::queue::{Pushed, Queue};
use self::routes::Routes;
use crate::driver::{Datagram, Driver, DriverStats};
use crate::sys;

/// The kernel's own socket is polled when it is known to be readable, and once in so many calls: a
/// system call each.
const KERNEL_EVERY: u32 = 64;
/// The same while a loop does nothing but look, at most: the rarer the longer it has had nothing.
const KERNEL_SELDOM: u32 = 1024;
/// Datagrams taken from it at once.
const KERNEL_BURST: usize = 8;

/// Our program on one interface.
struct Card {
    _attached: OwnedFd,
    _program: OwnedFd,
    map: OwnedFd,
    /// Its first among each driver's queues.
    first_queue: usize,
}

/// A port on queues of one or several interfaces as a [`Driver`]. One process has an interface, for
/// one port or several in a row ([`XdpDriver::open_ports`]); when it ends, however it ends, the
/// kernel takes the program off the interface.
pub struct XdpDriver {
    // Off the interfaces first (where it is the last of several ports), then the sockets, then the
    // frames.
    cards: Arc<Vec<Card>>,
    queues: Vec<Queue>,
    kernel: KernelSocket,
    routes: Routes,
    /// The frames that packets are received into and sent from.
    pool: Pool,
    /// Whether they are not the caller's, because those cannot be pinned.
    own_pool: bool,
    local: SocketAddr,
    max_datagram: usize,
    /// Bytes of a received datagram that its first frame holds; the others hold more.
    frame_room: usize,
    burst: usize,
    description: String,
    /// Queue that is polled first, so that none starves.
    first: usize,
    calls: u32,
    /// Unsuccessful polls since the kernel's own socket was asked, and how many there are to be
    /// before it is asked again.
    looks: u32,
    looks_wanted: u32,
    /// The kernel's own socket may have something.
    kernel_is_readable: bool,
    /// Queues that are full in this burst; the last is the kernel's socket.
    full: Vec<bool>,
    /// Datagrams of the last burst that found theirs full.
    skipped: Vec<usize>,
    stats: DriverStats,
}

impl XdpDriver {
    /// Whether the card reads and writes frames itself.
    pub fn is_zero_copy(&self) -> bool {
        self.queues
            .iter()
            .all(|queue| queue.socket().is_zero_copy())
    }

    /// Datagrams that each queue has received.
    pub fn received_by_queue(&self) -> Vec<u64> {
        self.queues.iter().map(Queue::received).collect()
    }

    /// Frames that wait to have been sent.
    pub fn frames_sending(&self) -> usize {
        self.queues
            .iter()
            .map(|queue| {
                queue.complete();
                queue.sending()
            })
            .sum()
    }

    fn flush(&mut self) -> io::Result<()> {
        for queue in &mut self.queues {
            queue.flush(&mut self.stats)?;
        }
        Ok(())
    }

    /// Sends one datagram; false when the queue on its way is full.
    fn send_one(&mut self, now: Instant, datagram: Datagram<'_>) -> io::Result<bool> {
        let straight = self.routes.find(now, datagram.to, datagram.len());
        // Datagrams of one destination keep their order: always the same queue.
        let each = self.queues.len() / self.cards.len();
        let turn = usize::from(datagram.to.port()) % each;
        let way = match &straight {
            Some((card, _)) => self.cards[*card].first_queue + turn,
            None => self.queues.len(),
        };
        if self.full[way] {
            return Ok(false);
        }
        let Some((_, template)) = straight else {
            let went = self.kernel.send(datagram, &mut self.stats);
            self.full[way] = !went;
            return Ok(went);
        };
        let (queue, stats) = (&mut self.queues[way], &mut self.stats);
        let mut pushed = queue.push(&self.pool, template, datagram.parts, stats);
        if pushed == Pushed::Full {
            // The kernel may take what is there and give its frames back.
            queue.flush(stats)?;
            pushed = queue.push(&self.pool, template, datagram.parts, stats);
        }
        match pushed {
            Pushed::Queued => stats.sent += 1,
            Pushed::TooLong => stats.send_errors += 1,
            Pushed::Full => self.full[way] = true,
        }
        Ok(pushed != Pushed::Full)
    }
}

impl Drop for XdpDriver {
    /// Where other ports go on, no packet comes to this one's sockets any more when their rings are
    /// polled for the last time.
    fn drop(&mut self) {
        if Arc::strong_count(&self.cards) == 1 {
            return;
        }
        let each = (self.queues.len() / self.cards.len()).max(1);
        for (card, queues) in self.cards.iter().zip(self.queues.chunks(each)) {
            for queue in queues {
                bpf::clear_socket(&card.map, queue.place());
            }
        }
        bpf::wait_for_programs();
    }
}

impl Driver for XdpDriver {
    /// One full queue does not keep the others' datagrams back: what finds its queue full is
    /// counted and skipped ([`Driver::skipped`]). Only those skipped at the end are not among the
    /// taken.
    fn send(&mut self, datagrams: &[Datagram<'_>]) -> io::Result<usize> {
        let now = Instant::now();
        self.routes.drain_answers(now);
        self.full.fill(false);
        self.skipped.clear();
        let mut taken: usize = 0;
        for (at, datagram) in datagrams.iter().enumerate() {
            if datagram.len() > self.max_datagram {
                self.stats.send_errors += 1;
                taken = at + 1;
            } else if self.send_one(now, *datagram)? {
                taken = at + 1;
            } else {
                self.stats.send_full += 1;
                self.skipped.push(at);
            }
            if (at + 1).is_multiple_of(self.burst) {
                self.flush()?;
            }
        }
        self.flush()?;
        self.skipped.retain(|at| *at < taken);
        Ok(taken)
    }

    fn skipped(&self) -> &[usize] {
        &self.skipped
    }

    fn is_multiqueue(&self) -> bool {
        true
    }

    fn has_unsent(&mut self) -> bool {
        self.queues.iter_mut().any(Queue::has_unsent)
    }

    fn recv(
        &mut self,
        _pool: &Pool,
        out: &mut Vec<(SocketAddr, Payload)>,
        max: usize,
    ) -> io::Result<usize> {
        let before = out.len();
        let max = max.min(self.burst);
        self.calls = self.calls.wrapping_add(1);
        let asks = self.calls.is_multiple_of(KERNEL_EVERY) || self.kernel_is_readable;
        // Full queues leave the kernel's socket a part of its burst. Of one datagram there are no
        // parts: then it has its turn when they have nothing.
        let kept = match asks && max > 1 {
            true => KERNEL_BURST.min(max.div_ceil(4)),
            false => 0,
        };
        self.first += 1;
        if self.first >= self.queues.len() {
            self.first = 0;
        }
        // From that one on, round to it again.
        let (after, ahead) = self.queues.split_at_mut(self.first);
        for queue in ahead.iter_mut().chain(after) {
            let left = max - kept - (out.len() - before);
            let frames = &self.pool;
            let received = queue.receive(frames, out, left, &mut self.stats);
            self.stats.received += received as u64;
            queue.complete();
            if queue.has_unsent() {
                queue.flush(&mut self.stats)?;
            }
        }
        // After many looks too, but not when that would hold up what they have found.
        if asks || (self.looks >= self.looks_wanted && out.len() == before) {
            let found = out.len();
            let left = (max - (found - before)).min(KERNEL_BURST);
            self.kernel_is_readable = self.kernel.receive(out, left, &mut self.stats);
            self.looks = 0;
            self.looks_wanted = match out.len() > found {
                true => KERNEL_EVERY,
                false => (2 * self.looks_wanted).min(KERNEL_SELDOM),
            };
        }
        Ok(out.len() - before)
    }

    fn rx_is_empty(&mut self) -> bool {
        self.looks = self.looks.saturating_add(1);
        let pool = &self.pool;
        let mut queues = self.queues.iter_mut();
        !self.kernel_is_readable && queues.all(|queue| queue.rx_is_empty(pool))
    }

    fn fds(&self) -> Vec<RawFd> {
        let sockets = self.queues.iter().map(|queue| queue.socket().fd());
        let mut fds: Vec<RawFd> = sockets.map(AsRawFd::as_raw_fd).collect();
        fds.push(self.kernel.fd());
        fds
    }

    fn on_readable(&mut self, fd: RawFd) {
        self.kernel_is_readable |= fd == self.kernel.fd();
    }

    fn max_datagram(&self) -> usize {
        self.max_datagram
    }

    fn max_datagram_to(&self, to: SocketAddr) -> usize {
        // Without an answer, what every Ethernet carries.
        sys::path_payload(to)
            .unwrap_or(1452)
            .max(512)
            .min(self.max_datagram)
    }

    fn supports_multi_slice(&self) -> Option<usize> {
        Some(self.frame_room)
    }

    fn pool(&self) -> Option<Pool> {
        self.own_pool.then(|| self.pool.clone())
    }

    fn frames_kept(&self) -> u32 {
        self.queues.iter().map(Queue::frames_kept).sum()
    }

    fn deferred_frames(&self) -> u32 {
        self.queues.iter().map(Queue::deferred_frames).sum()
    }

    fn describe(&self) -> String {
        self.description.clone()
    }

    fn local_addr(&self) -> SocketAddr {
        self.local
    }

    fn stats(&self) -> DriverStats {
        let mut stats = self.stats;
        for queue in &self.queues {
            let counts = queue.socket().statistics();
            // What found no frame is among them.
            stats.truncated += counts.rx_dropped.saturating_sub(counts.rx_fill_empty);
            stats.malformed += counts.rx_invalid;
            stats.send_errors += counts.tx_invalid;
            stats.pool_empty += counts.rx_fill_empty + counts.rx_ring_full;
        }
        stats
    }
}

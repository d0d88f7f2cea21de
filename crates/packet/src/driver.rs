//! The driver trait: bursts of datagrams in and out.
//!
//! A driver neither orders, nor repeats, nor checks anything. What it cannot send or receive it
//! counts.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::os::fd::RawFd;

use cyclone_pmem::payload::Payload;
use cyclone_pmem::pool::Pool;

/// Room left free before a received datagram in its frame, in bytes.
///
/// With the 48-byte data header behind it, a payload begins on a cache line:
/// ```text
/// frame  0          16                64                    frame_bytes
///        | headroom | data header 48 | payload ...          |
/// ```
pub const HEADROOM: usize = 16;

/// One datagram to send: the concatenation of `parts`.
#[derive(Debug, Clone, Copy)]
pub struct Datagram<'a> {
    /// Destination.
    pub to: SocketAddr,
    /// The bytes, in order; at most 1024 parts.
    pub parts: &'a [&'a [u8]],
}

impl Datagram<'_> {
    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.parts.iter().map(|p| p.len()).sum()
    }

    /// Whether there is nothing in it.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// What a driver had to drop or do without. Counters only grow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DriverStats {
    /// Datagrams handed to the network.
    pub sent: u64,
    /// Datagrams received into frames.
    pub received: u64,
    /// System calls that sent at least one datagram.
    pub send_calls: u64,
    /// System calls that received at least one datagram.
    pub receive_calls: u64,
    /// Datagrams refused by the network layer (no route, too large, connection failed).
    pub send_errors: u64,
    /// Times the send queue was full; the datagrams left over were not sent.
    pub send_full: u64,
    /// Datagrams longer than a frame, dropped.
    pub truncated: u64,
    /// Receive calls that found no free frame: the datagrams wait in the kernel.
    pub pool_empty: u64,
    /// Packets of ours that no datagram could be read from, dropped (AF_XDP and DPDK only).
    pub malformed: u64,
    /// Datagrams that took the kernel's way, in either direction (AF_XDP only): no neighbour known
    /// yet, another interface, fragments of IP.
    pub by_kernel: u64,
    /// Bytes sent from where they lay in the pool, uncopied (AF_XDP and DPDK only).
    pub lent_bytes: u64,
    /// Bytes copied into frames, or buffers of the driver's, to be sent (AF_XDP and DPDK only).
    pub copied_bytes: u64,
    /// Connections closed for a bad length prefix, an error, or to make room (TCP only).
    pub connections_dropped: u64,
    /// Frames that the driver keeps now; see [`Driver::frames_kept`].
    pub frames_kept: u64,
}

/// Moves up to `max` datagrams that wait in memory into frames: how drivers without a kernel
/// receive. Those longer than `max_datagram` or a frame are dropped.
pub fn receive_waiting(
    inbox: &mut VecDeque<(SocketAddr, Vec<u8>)>,
    pool: &Pool,
    out: &mut Vec<(SocketAddr, Payload)>,
    max: usize,
    max_datagram: usize,
    stats: &mut DriverStats,
) -> usize {
    let mut count = 0;
    while count < max && !inbox.is_empty() {
        let Some(mut frame) = pool.alloc() else {
            stats.pool_empty += 1;
            break;
        };
        let Some((from, bytes)) = inbox.pop_front() else {
            break;
        };
        let end = HEADROOM + bytes.len();
        if bytes.len() > max_datagram || end > frame.len() {
            stats.truncated += 1;
            continue;
        }
        frame[HEADROOM..end].copy_from_slice(&bytes);
        out.push((from, frame.freeze(HEADROOM..end).into()));
        count += 1;
    }
    stats.received += count as u64;
    stats.receive_calls += u64::from(count > 0);
    count
}

/// Who is behind an address, as far as it has been proven.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum PeerClass {
    /// Nothing has been proven.
    Unauthenticated,
    /// A client: it holds the client key.
    Client,
    /// A node: it holds the node key, or this port was given its address.
    Node,
}

/// A source and sink of datagrams. Never blocks.
pub trait Driver: Send {
    /// Sends datagrams in order, as few system calls as possible. Returns how many were taken
    /// (sent, or refused by the network and counted in [`DriverStats::send_errors`]); fewer than
    /// given means that the send queue is full.
    ///
    /// # Errors
    /// Only when the driver as a whole is unusable.
    fn send(&mut self, datagrams: &[Datagram<'_>]) -> io::Result<usize>;

    /// Positions, in ascending order, of those that the last [`Driver::send`] passed over before
    /// the end of what it took: their own queue was full.
    fn skipped(&self) -> &[usize] {
        &[]
    }

    /// Whether it has several queues, of which one may be full while others are not.
    fn is_multiqueue(&self) -> bool {
        false
    }

    /// Whether something that was taken has not been handed to the network yet, and goes only when
    /// the driver is called again.
    fn has_unsent(&mut self) -> bool {
        false
    }

    /// Receives up to `max` datagrams that are there into frames of `pool` and appends them to
    /// `out`. Returns how many; 0 when there are none or no frame is free. A datagram begins in a
    /// frame, with [`HEADROOM`] bytes or more before it; only that of a driver that
    /// [`Driver::supports_multi_slice`] goes on in others.
    ///
    /// # Errors
    /// Only when the driver as a whole is unusable.
    fn recv(
        &mut self,
        pool: &Pool,
        out: &mut Vec<(SocketAddr, Payload)>,
        max: usize,
    ) -> io::Result<usize>;

    /// Whether the last `recv` may have left something there that no descriptor reports again: no
    /// frame was free, say. The host calls again soon without a notification.
    fn has_unreceived(&self) -> bool {
        false
    }

    /// Descriptors that become readable when `recv` may have something.
    fn fds(&self) -> Vec<RawFd>;

    /// The host has seen that one of [`Driver::fds`] is readable, in case the driver does not look
    /// there at every `recv`.
    fn on_readable(&mut self, _fd: RawFd) {}

    /// Whether a look, as a rule without a system call, finds nothing: a host that one of
    /// [`Driver::fds`] has woken may sleep on, and one that spins may leave its turn out. What is
    /// found comes with the next `recv`. What only [`Driver::on_readable`] reports is not looked
    /// for. False where a look is not that cheap.
    fn rx_is_empty(&mut self) -> bool {
        false
    }

    /// Little is expected, and it may wait for so many microseconds; `None`: as little as possible.
    /// For drivers whose devices wake no thread.
    fn set_idle_poll_interval(&mut self, _look_us: Option<u64>) {}

    /// The largest datagram that can be sent or received, in bytes.
    fn max_datagram(&self) -> usize;

    /// Bytes that each frame holds at least, the last excepted, where a received datagram may be
    /// longer than one and then lies in several; 512 or more. `None`: it lies in one.
    fn supports_multi_slice(&self) -> Option<usize> {
        None
    }

    /// The pool that this driver receives into, if it is not the one it was given: memory of a kind
    /// that the device cannot use.
    fn pool(&self) -> Option<Pool> {
        None
    }

    /// Frames that this driver keeps now of the pool it was given; over DPDK at most, as its device
    /// takes them.
    fn frames_kept(&self) -> u32 {
        0
    }

    /// Frames of those that it does without for a time. A caller that can avoid it does not take
    /// them: the driver will want them when it has most to do.
    fn deferred_frames(&self) -> u32 {
        0
    }

    /// Whether the driver keeps state per address, so that it needs [`Driver::note_authenticated`].
    fn needs_authentication(&self) -> bool {
        false
    }

    /// A datagram from this address was authenticated.
    fn note_authenticated(&mut self, _from: SocketAddr, _class: PeerClass) {}

    /// The address of a node that this port may contact without a message from it, until
    /// [`Driver::forget_node`].
    fn add_node(&mut self, _address: SocketAddr) {}

    /// It is not the address of a node any more.
    fn forget_node(&mut self, _address: SocketAddr) {}

    /// What this driver is, in a few words for people.
    fn describe(&self) -> String;

    /// The largest datagram for this destination, in bytes; asked once per association.
    fn max_datagram_to(&self, _to: SocketAddr) -> usize {
        self.max_datagram()
    }

    /// Where this driver receives.
    fn local_addr(&self) -> SocketAddr;

    /// Counters since the start.
    fn stats(&self) -> DriverStats;
}

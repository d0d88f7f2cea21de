//! One port's part in a receive queue: packets in, packets out.
//!
//! ```text
//! receive   frame offered to the kernel (fill ring) -> packet in it (rx ring) -> datagram, a slice of the frame
//! send      headers, and parts that lie elsewhere, in a frame of the queue's own; then parts that lie in the pool,
//!           from where they are: one descriptor each (tx ring) -> done (completion ring)
//! ```
//! A port may go before the others of its queue do (its thread has ended): then it brings back what
//! lies in its rings.
//!
//! A frame's handle stays in the queue's books while the kernel has it, so that its memory is not
//! reused. //= cyclone §4.1

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use cyclone_pmem::payload::Payload;
use cyclone_pmem::pool::Pool;
use cyclone_pmem::{LINE_BYTES, prefetch_line};

use super::packet::Packet;
use super::socket::{CONTINUED, Descriptor, QueueRings, Socket};
use super::umem_frames::{FrameState, Piece, Shared, UmemFrames};
use crate::driver::DriverStats;
use crate::headers::{self, Template};

/// Parts shorter than this are copied behind the headers: their own descriptor costs more.
const LEND_BYTES: usize = 256;
/// Calls to the kernel for one burst, at most; each sends 32 packets or more.
const MOST_WAKEUPS: usize = 64;
/// Descriptors of a packet where the kernel copies it.
const MOST_PIECES: usize = 16;
/// Where the card reads the memory itself: what all such drivers take.
const MOST_PIECES_ZERO_COPY: usize = 4;

/// Lines of a packet that are fetched before it is there: most have no more, and the sender has to
/// fetch them back should it be writing still.
const LINES_AHEAD: usize = 3;

/// Descriptors that the kernel takes with one call where it copies.
const CALL_PIECES: u32 = 32;
/// Calls to the kernel for what a port has left, when it goes; where the card reads the memory
/// itself, checks of its progress.
const DRAIN_CALLS: u32 = 8192;
const DRAIN_POLLS: u32 = 100;
const DRAIN_PAUSE: Duration = Duration::from_micros(100);

/// What became of a datagram to send.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Pushed {
    /// Handed to the kernel with the next [`Queue::flush`].
    Queued,
    /// No descriptor or frame was free.
    Full,
    /// More descriptors than the kernel takes of one packet.
    TooLong,
}

/// What the kernel has made of a call to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WakeOutcome {
    /// It has taken all that was there, or the card will.
    Accepted,
    /// There may be more than it takes with one call.
    MayHaveMore,
    /// The card, or a queue, is busy, or a packet was refused.
    Busy,
    /// It has not looked: the interface is down.
    Down,
}

/// A socket, and the frames that go through it.
pub(crate) struct Queue {
    // First the socket goes, then the frames that the kernel has.
    socket: Socket,
    shared: Arc<Shared>,
    chunk_bytes: usize,
    most_pieces: usize,
    /// Whether the card reads the memory itself.
    zero_copy: bool,
    /// The kernel's counter of the send ring is as far as the kernel is. Not so if its last call
    /// ended early: it may have taken more than it says.
    is_tx_index_exact: bool,
    /// Descriptors put into the send ring since the last flush.
    unflushed: u32,
    /// Where the next packet will begin, from the first frame on.
    predicted_offset: u64,
    /// The first of its queue.
    is_first: bool,
    /// Datagrams received so far.
    received: u64,
    /// The packet being received, and the one being sent.
    pieces: Vec<Piece>,
    descriptors: Vec<Descriptor>,
    port: u16,
    interface: u32,
    place: u32,
}

/// How a queue uses its socket and the pool.
pub(crate) struct QueueOptions {
    /// Bytes that the kernel takes a frame for.
    pub(crate) chunk_bytes: u32,
    /// The socket takes packets in several descriptors; without, everything is copied behind the
    /// headers.
    pub(crate) multi_buffer: bool,
    /// Frames to take for headers.
    pub(crate) own: u32,
    /// Frames to offer to the kernel, and the fewest while all goes quickly.
    pub(crate) offer: u32,
    pub(crate) least_offer: u32,
    /// Most of them: where packets were lost.
    pub(crate) most_offer: u32,
    /// Frames to begin with at most, of both; the rest when the pool has them.
    pub(crate) first: u32,
    /// Our UDP port.
    pub(crate) port: u16,
    /// The interface's number.
    pub(crate) interface: u32,
    /// Where the program's map has the socket.
    pub(crate) place: u32,
}

impl Queue {
    /// The first of its queue: takes frames of the pool for headers, and offers some to the kernel.
    pub(crate) fn new(
        socket: Socket,
        rings: QueueRings,
        pool: &Pool,
        options: &QueueOptions,
    ) -> Queue {
        let shared = Shared::new(UmemFrames::new(rings, pool, options));
        shared.refill_up_to(&mut shared.lock(), pool, &socket, options.first);
        let mut queue = Queue::with_shared(socket, Arc::new(shared), options);
        queue.is_first = true;
        queue
    }

    /// Another port's part in the same queue, by its own socket.
    pub(crate) fn beside(&self, socket: Socket, options: &QueueOptions) -> Queue {
        Queue::with_shared(socket, Arc::clone(&self.shared), options)
    }

    fn with_shared(socket: Socket, shared: Arc<Shared>, options: &QueueOptions) -> Queue {
        let zero_copy = socket.is_zero_copy();
        let most_pieces = match (options.multi_buffer, zero_copy) {
            (false, _) => 1,
            (true, true) => MOST_PIECES_ZERO_COPY,
            (true, false) => MOST_PIECES,
        };
        Queue {
            socket,
            shared,
            chunk_bytes: options.chunk_bytes as usize,
            most_pieces,
            zero_copy,
            is_tx_index_exact: !zero_copy,
            unflushed: 0,
            predicted_offset: 0,
            is_first: false,
            received: 0,
            pieces: Vec::new(),
            descriptors: Vec::with_capacity(MOST_PIECES),
            port: options.port,
            interface: options.interface,
            place: options.place,
        }
    }

    /// Where the program's map has the socket.
    pub(crate) fn place(&self) -> u32 {
        self.place
    }

    pub(crate) fn socket(&self) -> &Socket {
        &self.socket
    }

    /// Bytes of a packet to send, headers and all, at most.
    pub(crate) fn max_packet_bytes(&self) -> usize {
        self.most_pieces * self.chunk_bytes
    }

    /// Appends up to `max` datagrams to `out`.
    pub(crate) fn receive(
        &mut self,
        pool: &Pool,
        out: &mut Vec<(SocketAddr, Payload)>,
        max: usize,
        stats: &mut DriverStats,
    ) -> usize {
        // Polled again: a poll has perhaps seen less than a descriptor that is readable now
        // reports.
        let mut there = self.socket.rx.usable(u32::MAX);
        if (there == 0 || max == 0) && !self.shared.needs_frames() {
            if self.zero_copy {
                self.shared.wake_fill_ring(&self.socket);
            }
            return 0;
        }
        let mut umem_frames = self.shared.lock();
        // They come from the sender's caches, or from memory: all at once, not one line after the
        // other as each is read.
        for ahead in 0..there.min(max as u32) {
            umem_frames.prefetch(self.socket.rx.peek(ahead));
        }
        umem_frames.on_packets_found(there, &self.socket);
        let is_idle = there == 0;
        let mut count = 0;
        while there > 0 && count < max {
            there -= 1;
            let piece = self.socket.rx.take();
            umem_frames.collect_piece(piece, &mut self.pieces, stats);
            self.predicted_offset = umem_frames.predicted_offset(piece);
            if piece.options & CONTINUED == 0 {
                match datagram(&mut self.pieces, self.port, self.interface) {
                    Some(datagram) => {
                        out.push(datagram);
                        count += 1;
                    }
                    None => stats.malformed += 1,
                }
            }
        }
        self.socket.rx.publish();
        let is_due = is_idle || count == 0 || umem_frames.is_refill_due();
        let shared = &self.shared;
        if !shared.refill_or_defer(is_due, &mut umem_frames, pool, &self.socket) {
            stats.pool_empty += 1;
        }
        stats.receive_calls += u64::from(count > 0);
        self.received += count as u64;
        count
    }

    /// No packet is there, the kernel lacks no frames, and nothing waits to be sent.
    pub(crate) fn rx_is_empty(&mut self, pool: &Pool) -> bool {
        self.prefetch_next(pool);
        self.socket.rx.usable(1) == 0 && !self.shared.needs_frames() && !self.has_unsent()
    }

    /// Has the CPU fetch what the next packet will be read from. Another one writes the packet, the
    /// descriptor, and some time later the counter that announces both. Were they fetched only
    /// then, one would be waited for after the other.
    #[inline]
    fn prefetch_next(&self, pool: &Pool) {
        self.socket.rx.prefetch();
        let packet = pool.span().0.wrapping_add(self.predicted_offset as usize);
        for line in 0..LINES_AHEAD {
            prefetch_line(packet.wrapping_add(line * LINE_BYTES));
        }
    }

    /// Whether the next packet was expected where it is; for tests.
    #[cfg(test)]
    pub(crate) fn has_predicted_next(&self) -> bool {
        super::socket::offset_of(self.socket.rx.peek(0).address) == self.predicted_offset
    }

    /// Takes back the frames that have been sent.
    pub(crate) fn complete(&self) {
        self.shared.complete();
    }

    /// Puts a datagram into the send ring. It goes with the next [`Queue::flush`].
    pub(crate) fn push(
        &mut self,
        pool: &Pool,
        template: &Template,
        parts: &[&[u8]],
        stats: &mut DriverStats,
    ) -> Pushed {
        let total: usize = parts.iter().map(|part| part.len()).sum();
        let is_short = parts.iter().all(|part| part.len() < LEND_BYTES);
        if is_short && template.len() + total <= self.chunk_bytes {
            return self.push_copied(template, parts, total, stats);
        }
        // If everything had to be copied.
        let most_own = (total + template.len()).div_ceil(self.chunk_bytes) + 1;
        let mut umem_frames = self.shared.lock();
        if self.socket.tx.usable(64) as usize >= self.most_pieces
            && umem_frames.own.len() < most_own
        {
            umem_frames.complete();
        }
        if (self.socket.tx.usable(64) as usize) < self.most_pieces
            || umem_frames.own.len() < most_own
        {
            return Pushed::Full;
        }
        let chunk_bytes = self.chunk_bytes;
        let mut packet = Packet::new(&mut umem_frames, &mut self.descriptors, chunk_bytes);
        packet.headers(template, parts);
        let mut left = total;
        for part in parts {
            left -= part.len();
            // Room for this part, for what was copied before it, and for a copy of all that follows
            // it.
            let pieces = part.len().div_ceil(chunk_bytes) + 2 + left.div_ceil(chunk_bytes);
            let room = packet.pieces() + pieces <= self.most_pieces;
            let lent = match room && part.len() >= LEND_BYTES {
                true => pool.share(part),
                false => None,
            };
            match lent {
                Some(frame) => {
                    stats.lent_bytes += part.len() as u64;
                    packet.lend(frame);
                }
                None => {
                    stats.copied_bytes += part.len() as u64;
                    packet.copy(part);
                }
            }
        }
        packet.close();
        if self.descriptors.len() > self.most_pieces {
            // The kernel would neither send them nor give their frames back.
            while let Some(piece) = self.descriptors.pop() {
                umem_frames.release(piece.address);
            }
            return Pushed::TooLong;
        }
        self.shared
            .note_sending(&mut umem_frames, self.descriptors.len());
        self.unflushed += self.descriptors.len() as u32;
        let last = self.descriptors.len() - 1;
        for (at, mut piece) in self.descriptors.drain(..).enumerate() {
            piece.options = if at < last { CONTINUED } else { 0 };
            self.socket.tx.put(piece);
        }
        Pushed::Queued
    }

    /// The same of a datagram that is copied behind its headers, and fits there: most are.
    fn push_copied(
        &mut self,
        template: &Template,
        parts: &[&[u8]],
        total: usize,
        stats: &mut DriverStats,
    ) -> Pushed {
        let mut umem_frames = self.shared.lock();
        if self.socket.tx.usable(1) == 0 || umem_frames.own.is_empty() {
            umem_frames.complete();
        }
        if self.socket.tx.usable(1) == 0 {
            return Pushed::Full;
        }
        let Some(mut frame) = umem_frames.own.pop() else {
            return Pushed::Full;
        };
        let into = &mut frame[..template.len() + total];
        template.write(parts, into);
        let mut at = template.len();
        for part in parts {
            into[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        }
        let number = frame.number();
        umem_frames.held[number as usize] = FrameState::Headers(frame, 1);
        stats.copied_bytes += total as u64;
        self.shared.note_sending(&mut umem_frames, 1);
        self.unflushed += 1;
        self.socket.tx.put(Descriptor {
            address: u64::from(number) * umem_frames.frame_bytes,
            len: at as u32,
            options: 0,
        });
        Pushed::Queued
    }

    /// Sends what was pushed: one system call for a burst, as far as the kernel takes it.
    ///
    /// # Errors
    /// When the socket is unusable.
    pub(crate) fn flush(&mut self, stats: &mut DriverStats) -> io::Result<()> {
        if !self.has_unsent() {
            return Ok(());
        }
        self.socket.tx.publish();
        let mut pending = self.socket.tx.pending();
        let mut tries = 0;
        // Kernels from 6.6 to 6.16 take a call's worth and do not say so before they have taken all
        // that was there.
        let mut patience = std::mem::take(&mut self.unflushed)
            .div_ceil(CALL_PIECES)
            .max(1);
        while pending > 0 && self.socket.tx.needs_wakeup() && tries < MOST_WAKEUPS {
            tries += 1;
            let woken = self.wake(stats)?;
            self.complete();
            let now = self.socket.tx.pending();
            if now == pending {
                if woken != WakeOutcome::MayHaveMore || patience == 0 {
                    break;
                }
                patience -= 1;
            }
            pending = now;
        }
        Ok(())
    }

    /// Has the kernel process the send ring.
    fn wake(&mut self, stats: &mut DriverStats) -> io::Result<WakeOutcome> {
        stats.send_calls += 1;
        let is_tx_index_exact = std::mem::replace(&mut self.is_tx_index_exact, false);
        let Err(error) = self.socket.wake_send() else {
            self.is_tx_index_exact = !self.zero_copy;
            return Ok(WakeOutcome::Accepted);
        };
        match error.raw_os_error() {
            Some(libc::EAGAIN) => Ok(WakeOutcome::MayHaveMore),
            Some(libc::EBUSY | libc::ENOBUFS | libc::ENOMEM | libc::EINTR) => Ok(WakeOutcome::Busy),
            // A packet that the kernel refused; it has gone on behind it.
            Some(libc::EOVERFLOW | libc::EINVAL) => {
                stats.send_errors += 1;
                Ok(WakeOutcome::Busy)
            }
            Some(libc::ENETDOWN | libc::ENXIO) => {
                self.is_tx_index_exact = is_tx_index_exact;
                Ok(WakeOutcome::Down)
            }
            _ => Err(error),
        }
    }

    /// Sends what was pushed, as far as that goes without waiting for others.
    fn drain_tx(&mut self) {
        self.socket.tx.publish();
        let most = match self.zero_copy {
            true => DRAIN_POLLS,
            false => DRAIN_CALLS,
        };
        for _ in 0..most {
            if self.socket.tx.pending() == 0 {
                break;
            }
            if self.zero_copy {
                std::thread::sleep(DRAIN_PAUSE);
            }
            let woken = self.wake(&mut DriverStats::default());
            self.complete();
            if !matches!(
                woken,
                Ok(WakeOutcome::Accepted | WakeOutcome::MayHaveMore | WakeOutcome::Busy)
            ) {
                break;
            }
        }
    }

    /// Frames for headers, and to receive into; counted once for all that share them.
    pub(crate) fn frames_kept(&self) -> u32 {
        match self.is_first {
            true => self.shared.lock().kept(),
            false => 0,
        }
    }

    /// Frames that it does without for a time; counted as often.
    pub(crate) fn deferred_frames(&self) -> u32 {
        match self.is_first {
            true => self.shared.deferred_frames(),
            false => 0,
        }
    }

    /// Datagrams received since the start.
    pub(crate) fn received(&self) -> u64 {
        self.received
    }

    /// Whether packets still wait for a system call.
    pub(crate) fn has_unsent(&mut self) -> bool {
        self.socket.tx.pending() > 0
    }

    /// Frames that the kernel has to send from; for tests and statistics.
    pub(crate) fn sending(&self) -> usize {
        self.shared.lock().sending()
    }
}

impl Drop for Queue {
    /// The others of the queue go on, with the frames that this one's rings hold. The owner that
    /// drops it has seen to it that no packet comes any more. It is done before anything is closed:
    /// the rings' mappings keep the socket, and those of the fill and completion rings, which the
    /// books have, keep the first one's until the last port goes.
    fn drop(&mut self) {
        if Arc::strong_count(&self.shared) == 1 {
            // The last one: all frames go with the books.
            return;
        }
        self.drain_tx();
        let mut umem_frames = self.shared.lock();
        while self.socket.rx.usable(1) > 0 {
            let piece = self.socket.rx.take();
            umem_frames.collect_piece(piece, &mut self.pieces, &mut DriverStats::default());
            self.pieces.clear();
        }
        self.socket.rx.publish();
        umem_frames.complete();
        // Where it is not known how far the kernel is, it gives back what it has taken; the rest
        // stays with it for as long as the books do, rather than be sent from by one and written to
        // by another.
        while self.is_tx_index_exact && self.socket.tx.pending() > 0 {
            let piece = self.socket.tx.retract();
            umem_frames.reclaim_unsent(piece.address);
        }
        self.socket.tx.publish();
        self.shared.on_socket_closed(&umem_frames);
    }
}

/// The datagram in the pieces, if it is one.
fn datagram(pieces: &mut Vec<Piece>, port: u16, interface: u32) -> Option<(SocketAddr, Payload)> {
    let total = pieces.iter().map(|(_, _, len)| len).sum();
    let (first, at, len) = pieces.first()?;
    let Some(parsed) = headers::parse(&first[*at..*at + *len], total, port, interface) else {
        pieces.clear();
        return None;
    };
    let (mut skip, mut left) = (parsed.at, parsed.len);
    let mut datagram = Payload::new();
    for (frame, at, len) in pieces.drain(..) {
        let take = len.saturating_sub(skip).min(left);
        if take > 0 {
            datagram.push_frame(frame.freeze(at + skip..at + skip + take));
        }
        skip = skip.saturating_sub(len);
        left -= take;
    }
    Some((parsed.from, datagram))
}

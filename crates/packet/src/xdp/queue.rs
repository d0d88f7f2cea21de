//! One queue: which frames the kernel has, packets in, packets out.
//!
//! ```text
//! receive   frame offered to the kernel (fill ring) -> packet in it (rx ring) -> datagram, a slice of the frame
//! send      headers, and parts that lie elsewhere, in a frame of the queue's own; then parts that lie in the pool,
//!           from where they are: one descriptor each (tx ring) -> done (completion ring)
//! ```
//! A frame's handle stays in `held` while the kernel has it, so that nobody else gets its memory. //= cyclone §4.1

use std::io;
use std::net::SocketAddr;

use cyclone_pmem::payload::Payload;
use cyclone_pmem::pool::{Frame, FrameMut, Pool};

use super::socket::{CONTINUED, Descriptor, Socket, offset_of};
use crate::driver::DriverStats;
use crate::headers::{self, Template};

/// Parts shorter than this are copied behind the headers: a descriptor of their own costs more.
const LEND_BYTES: usize = 256;
/// Calls to the kernel for one burst, at most; each sends 32 packets or more.
const MOST_WAKEUPS: usize = 64;
/// Descriptors of a packet where the kernel copies it.
const MOST_PIECES: usize = 16;
/// Where the card reads the memory itself: what all such drivers take.
const MOST_PIECES_ZERO_COPY: usize = 4;

/// Why the kernel has a frame.
enum Held {
    Not,
    /// To receive into.
    Receiving(FrameMut),
    /// Headers being sent, in so many descriptors.
    Own(FrameMut, u32),
    /// Somebody's payload being sent, in so many descriptors.
    Lent(#[allow(dead_code, reason = "held, not read")] Frame, u32),
}

/// What became of a datagram to send.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Pushed {
    /// Handed to the kernel with the next [`Queue::flush`].
    Yes,
    /// No descriptor or frame was free.
    Full,
    /// More descriptors than the kernel takes of one packet.
    TooLong,
}

/// A socket and the frames that go through it.
pub(crate) struct Queue {
    // First the socket goes, then the frames that the kernel has.
    socket: Socket,
    held: Vec<Held>,
    /// Frames for headers, not in use; and how many there are in all.
    own: Vec<FrameMut>,
    own_frames: u32,
    frame_bytes: u64,
    chunk_bytes: usize,
    most_pieces: usize,
    /// Frames to keep with the kernel to receive into.
    offer: u32,
    offered: u32,
    /// Datagrams received so far.
    received: u64,
    /// The packet being received, and the one being sent.
    pieces: Vec<(FrameMut, usize, usize)>,
    descriptors: Vec<Descriptor>,
    port: u16,
    interface: u32,
}

/// How a queue uses its socket and the pool.
pub(crate) struct QueueOptions {
    /// Bytes that the kernel takes a frame for.
    pub(crate) chunk_bytes: u32,
    /// The socket takes packets in several descriptors; without, everything is copied behind the headers.
    pub(crate) multi_buffer: bool,
    /// Frames to take for headers.
    pub(crate) own: u32,
    /// Frames to offer to the kernel.
    pub(crate) offer: u32,
    /// Our UDP port.
    pub(crate) port: u16,
    /// The interface's number.
    pub(crate) interface: u32,
}

impl Queue {
    /// Takes frames of the pool for headers, and offers some to the kernel.
    pub(crate) fn new(socket: Socket, pool: &Pool, options: &QueueOptions) -> Queue {
        let most_pieces = match (options.multi_buffer, socket.is_zero_copy()) {
            (false, _) => 1,
            (true, true) => MOST_PIECES_ZERO_COPY,
            (true, false) => MOST_PIECES,
        };
        let mut queue = Queue {
            socket,
            held: (0..pool.count()).map(|_| Held::Not).collect(),
            own: (0..options.own).map_while(|_| pool.alloc()).collect(),
            own_frames: options.own,
            frame_bytes: u64::from(pool.frame_bytes()),
            chunk_bytes: options.chunk_bytes as usize,
            most_pieces,
            offer: options.offer,
            offered: 0,
            received: 0,
            pieces: Vec::new(),
            descriptors: Vec::with_capacity(MOST_PIECES),
            port: options.port,
            interface: options.interface,
        };
        queue.refill(pool);
        queue
    }

    pub(crate) fn socket(&self) -> &Socket {
        &self.socket
    }

    /// Bytes of a packet to send, headers and all, at most.
    pub(crate) fn longest_packet(&self) -> usize {
        self.most_pieces * self.chunk_bytes
    }

    /// Offers frames to the kernel until it has enough; false when the pool had too few.
    fn refill(&mut self, pool: &Pool) -> bool {
        let wanted = self.offer.saturating_sub(self.offered);
        let room = wanted.min(self.socket.fill.usable(wanted));
        let mut given = 0;
        while given < room {
            let Some(frame) = pool.alloc() else { break };
            let number = frame.number();
            self.socket.fill.put(u64::from(number) * self.frame_bytes);
            self.held[number as usize] = Held::Receiving(frame);
            given += 1;
        }
        if given > 0 {
            self.offered += given;
            self.socket.fill.publish();
        }
        if self.socket.fill.needs_wakeup() {
            self.socket.wake_fill();
        }
        given == room
    }

    /// Appends up to `max` datagrams to `out`.
    pub(crate) fn receive(
        &mut self,
        pool: &Pool,
        out: &mut Vec<(SocketAddr, Payload)>,
        max: usize,
        stats: &mut DriverStats,
    ) -> usize {
        let mut count = 0;
        let mut there = self.socket.rx.usable(1);
        while there > 0 && count < max {
            there -= 1;
            let piece = self.socket.rx.take();
            self.gather(piece, stats);
            if piece.options & CONTINUED == 0 {
                match self.datagram() {
                    Some(datagram) => {
                        out.push(datagram);
                        count += 1;
                    }
                    None => stats.malformed += 1,
                }
            }
        }
        if count > 0 || self.offered < self.offer {
            self.socket.rx.publish();
            if !self.refill(pool) {
                stats.pool_empty += 1;
            }
        }
        stats.receive_calls += u64::from(count > 0);
        self.received += count as u64;
        count
    }

    /// Adds a piece to the packet being received.
    fn gather(&mut self, piece: Descriptor, stats: &mut DriverStats) {
        let offset = offset_of(piece.address);
        let (number, within) = (offset / self.frame_bytes, offset % self.frame_bytes);
        let Some(held) = self.held.get_mut(number as usize) else {
            stats.malformed += 1;
            return;
        };
        match std::mem::replace(held, Held::Not) {
            Held::Receiving(frame) => {
                self.offered -= 1;
                if within + u64::from(piece.len) <= self.frame_bytes {
                    self.pieces
                        .push((frame, within as usize, piece.len as usize));
                } else {
                    // Chunks are no longer than frames, so this cannot be. The kernel does not have the frame any more.
                    stats.malformed += 1;
                }
            }
            // The kernel names only what it was offered.
            other => {
                *held = other;
                stats.malformed += 1;
            }
        }
    }

    /// The datagram in the pieces, if it is one.
    fn datagram(&mut self) -> Option<(SocketAddr, Payload)> {
        let total = self.pieces.iter().map(|(_, _, len)| len).sum();
        let (first, at, len) = self.pieces.first()?;
        let parsed = headers::parse(&first[*at..*at + *len], total, self.port, self.interface);
        let Some(parsed) = parsed else {
            self.pieces.clear();
            return None;
        };
        let (mut skip, mut left) = (parsed.at, parsed.len);
        let mut datagram = Payload::new();
        for (frame, at, len) in self.pieces.drain(..) {
            let take = len.saturating_sub(skip).min(left);
            if take > 0 {
                datagram.push_frame(frame.freeze(at + skip..at + skip + take));
            }
            skip = skip.saturating_sub(len);
            left -= take;
        }
        Some((parsed.from, datagram))
    }

    /// Takes back the frames that have been sent.
    pub(crate) fn complete(&mut self) {
        let done = self.socket.completion.usable(1);
        for _ in 0..done {
            let address = self.socket.completion.take();
            self.release(address);
        }
        if done > 0 {
            self.socket.completion.publish();
        }
    }

    /// One descriptor's part in its frame is over.
    fn release(&mut self, address: u64) {
        let number = offset_of(address) / self.frame_bytes;
        let Some(held) = self.held.get_mut(number as usize) else {
            return;
        };
        let last = match held {
            Held::Own(_, count) | Held::Lent(_, count) => {
                *count -= 1;
                *count == 0
            }
            _ => false,
        };
        if last && let Held::Own(frame, _) = std::mem::replace(held, Held::Not) {
            self.own.push(frame);
        }
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
        // If everything had to be copied.
        let most_own = (total + template.len()).div_ceil(self.chunk_bytes) + 1;
        if !self.has_room(most_own) {
            self.complete();
            if !self.has_room(most_own) {
                return Pushed::Full;
            }
        }
        let mut packet = Packet {
            queue: self,
            open: None,
        };
        packet.headers(template, parts);
        let mut left = total;
        for part in parts {
            left -= part.len();
            // Room for this part, for what was copied before it, and for a copy of all that follows it.
            let pieces = part.len().div_ceil(packet.queue.chunk_bytes)
                + 2
                + left.div_ceil(packet.queue.chunk_bytes);
            let room = packet.queue.descriptors.len() + pieces <= packet.queue.most_pieces;
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
                self.release(piece.address);
            }
            return Pushed::TooLong;
        }
        let last = self.descriptors.len() - 1;
        for (at, mut piece) in self.descriptors.drain(..).enumerate() {
            piece.options = if at < last { CONTINUED } else { 0 };
            self.socket.tx.put(piece);
        }
        Pushed::Yes
    }

    /// Whether there are so many own frames, and descriptors for any packet.
    fn has_room(&mut self, own: usize) -> bool {
        self.own.len() >= own && self.socket.tx.usable(64) as usize >= self.most_pieces
    }

    /// Sends what was pushed: one system call for a burst, as far as the kernel takes it.
    ///
    /// # Errors
    /// When the socket is unusable.
    pub(crate) fn flush(&mut self, stats: &mut DriverStats) -> io::Result<()> {
        self.socket.tx.publish();
        let mut pending = self.socket.tx.pending();
        let mut tries = 0;
        while pending > 0 && self.socket.tx.needs_wakeup() && tries < MOST_WAKEUPS {
            stats.send_calls += 1;
            tries += 1;
            match self.socket.wake_send() {
                Ok(()) => {}
                Err(error) => match error.raw_os_error() {
                    // More than one call's worth; the card or its queue is busy; the interface is down.
                    Some(
                        libc::EAGAIN
                        | libc::EBUSY
                        | libc::ENOBUFS
                        | libc::EINTR
                        | libc::ENETDOWN
                        | libc::ENXIO,
                    ) => {}
                    // A packet that the kernel refused; it has gone on behind it.
                    Some(libc::EOVERFLOW | libc::EINVAL) => stats.send_errors += 1,
                    _ => return Err(error),
                },
            }
            self.complete();
            let now = self.socket.tx.pending();
            if now == pending {
                break;
            }
            pending = now;
        }
        Ok(())
    }

    /// Frames for headers, and offered to receive into.
    pub(crate) fn frames_kept(&self) -> u32 {
        self.own_frames + self.offer
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
        let sending = |held: &&Held| matches!(held, Held::Own(..) | Held::Lent(..));
        self.held.iter().filter(sending).count()
    }
}

/// A packet in the making.
struct Packet<'a> {
    queue: &'a mut Queue,
    /// Own frame that is being filled: it, where its open piece begins, and where it ends; descriptors made of it.
    open: Option<(FrameMut, usize, usize, u32)>,
}

impl Packet<'_> {
    /// A fresh own frame. The caller of [`Queue::push`] has seen to it that there are enough.
    fn fresh(&mut self) -> (FrameMut, usize, usize, u32) {
        match self.queue.own.pop() {
            Some(frame) => (frame, 0, 0, 0),
            None => unreachable!("counted before the packet was begun"),
        }
    }

    fn headers(&mut self, template: &Template, parts: &[&[u8]]) {
        let mut open = self.fresh();
        template.write(parts, &mut open.0[..]);
        open.2 = template.len();
        self.open = Some(open);
    }

    fn copy(&mut self, mut part: &[u8]) {
        while !part.is_empty() {
            let mut open = match self.open.take() {
                Some(open) => open,
                None => self.fresh(),
            };
            let room = self.queue.chunk_bytes - open.2;
            if room == 0 {
                self.open = Some(open);
                self.close();
                continue;
            }
            let take = room.min(part.len());
            open.0[open.2..open.2 + take].copy_from_slice(&part[..take]);
            open.2 += take;
            part = &part[take..];
            self.open = Some(open);
        }
    }

    /// Ends the open piece with a descriptor; its frame may take another piece.
    fn cut(&mut self) {
        if let Some((frame, start, end, count)) = &mut self.open
            && end > start
        {
            let at = u64::from(frame.number()) * self.queue.frame_bytes + *start as u64;
            self.queue.descriptors.push(Descriptor {
                address: at,
                len: (*end - *start) as u32,
                options: 0,
            });
            *start = *end;
            *count += 1;
        }
    }

    /// Ends the open frame.
    fn close(&mut self) {
        self.cut();
        if let Some((frame, _, _, count)) = self.open.take() {
            if count == 0 {
                self.queue.own.push(frame);
            } else {
                let number = frame.number() as usize;
                self.queue.held[number] = Held::Own(frame, count);
            }
        }
    }

    /// Adds somebody's frame, from where it is.
    fn lend(&mut self, frame: Frame) {
        self.cut();
        let number = frame.number() as usize;
        let mut at = number as u64 * self.queue.frame_bytes + u64::from(frame.offset());
        let mut left = frame.len();
        let mut count = 0;
        while left > 0 {
            let take = left.min(self.queue.chunk_bytes);
            self.queue.descriptors.push(Descriptor {
                address: at,
                len: take as u32,
                options: 0,
            });
            at += take as u64;
            left -= take;
            count += 1;
        }
        match &mut self.queue.held[number] {
            Held::Lent(_, lent) => *lent += count,
            held => *held = Held::Lent(frame, count),
        }
    }
}

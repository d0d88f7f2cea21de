//! Which frames the kernel has of a receive queue, and why. The queue's sockets share its fill and
//! completion rings, and so these books: a frame that one of them has sent may come back to
//! another.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use cyclone_pmem::pool::{Frame, FrameMut, Pool};
use cyclone_pmem::{LINE_BYTES, prefetch};

use super::queue::QueueOptions;
use super::socket::{Descriptor, QueueRings, Socket, offset_of};
use crate::driver::DriverStats;

/// Why the kernel has a frame.
pub(super) enum FrameState {
    NotInKernel,
    /// To receive into.
    Receiving(FrameMut),
    /// Headers being sent, in so many descriptors.
    Headers(FrameMut, u32),
    /// Somebody's payload being sent, in so many descriptors.
    Lent(#[allow(dead_code, reason = "held, not read")] Frame, u32),
}

/// Frames that a queue is to have, however few there are.
const MIN_SHARE: u32 = 32;
/// Of few frames this part is for headers.
const HEADER_SHARE: u32 = 3;

/// Frames that may be missing of those to receive into before some are offered.
const REFILL_SLACK: u32 = 32;

/// Of a received piece, what is fetched ahead: most messages are not longer, and what is, the CPU
/// sees being read in order.
const FETCHED_BYTES: usize = 320;

/// A piece of a received packet: its frame, where it begins there, its length.
pub(super) type Piece = (FrameMut, usize, usize);

/// How many frames are offered to receive into. While they go round quickly a thousand stay in the
/// CPUs' caches, where all of them do not; when a look finds many packets the loop has been away,
/// and all are offered again. Where packets were lost for want of frames twice as many are offered
/// from then on.
struct FillTarget {
    now: u32,
    /// As many as are offered while nothing is known.
    default_target: u32,
    least: u32,
    /// As many as there may be where even more come at once.
    most: u32,
    /// Packets that the kernel had no frame for, so far.
    lost: u64,
    /// Packets since it was last thought about, and the most that a look found among them.
    seen: u32,
    largest_batch: u32,
}

/// Packets after which fewer frames may be offered.
const ADJUST_AFTER_PACKETS: u32 = 8192;

impl FillTarget {
    fn new(options: &QueueOptions) -> FillTarget {
        FillTarget {
            now: options.offer,
            default_target: options.offer,
            least: options.least_offer,
            most: options.most_offer,
            lost: 0,
            seen: 0,
            largest_batch: 0,
        }
    }

    /// A look has found so many packets. `lost` returns how many the kernel had no frame for, since
    /// the queue was made.
    fn note(&mut self, found: u32, lost: impl FnOnce() -> u64) {
        self.seen += found;
        self.largest_batch = self.largest_batch.max(found);
        let was_away = found > self.now / 2;
        if !was_away && self.seen < ADJUST_AFTER_PACKETS {
            return;
        }
        let lost = if self.least < self.most { lost() } else { 0 };
        if lost > self.lost {
            self.lost = lost;
            self.least = (2 * self.now).min(self.most);
            self.default_target = self.default_target.max(self.least);
            self.now = self.default_target;
        } else if was_away {
            self.now = self.default_target;
        } else if self.largest_batch <= self.now / 4 {
            // At a quarter a look's find has room four times over.
            self.now = (4 * self.largest_batch).clamp(self.least, self.now);
        }
        (self.seen, self.largest_batch) = (0, 0);
    }

    /// Frames that are done without, where so many are offered.
    fn deferred_frames(&self, offered: u32) -> u32 {
        self.default_target.saturating_sub(offered.max(self.now))
    }
}

/// The books of one receive queue.
pub(super) struct UmemFrames {
    rings: QueueRings,
    pub(super) held: Vec<FrameState>,
    /// Frames for headers, not in use.
    pub(super) own: Vec<FrameMut>,
    /// Frames for headers to have, and those there are, in use or not.
    header_frames_wanted: u32,
    header_frames_taken: u32,
    pub(super) frame_bytes: u64,
    /// Frames that it has whatever the others do, of both kinds; more while the pool has as many.
    share: u32,
    /// Frames to keep with the kernel to receive into, and those that it has.
    offer: FillTarget,
    offered: u32,
    /// Frames that have come back with packets, in all.
    filled: u32,
    /// Pieces of packets that the kernel has to send.
    pieces: u32,
}

/// The same, for all sockets of the queue.
pub(super) struct Shared {
    umem_frames: Mutex<UmemFrames>,
    /// Frames are to be taken from the pool as soon as there is nothing else to do.
    needs_frames: AtomicBool,
    /// Frames that the queue does without while it goes quickly, and will want again.
    deferred_frames: AtomicU32,
    /// It has frames to send from.
    is_sending: AtomicBool,
}

impl Shared {
    pub(super) fn new(umem_frames: UmemFrames) -> Shared {
        Shared {
            umem_frames: Mutex::new(umem_frames),
            needs_frames: AtomicBool::new(false),
            deferred_frames: AtomicU32::new(0),
            is_sending: AtomicBool::new(false),
        }
    }

    /// Takes back the frames that have been sent.
    pub(super) fn complete(&self) {
        // The thread that pushed last has seen its own mark; others look again at their next turn.
        if self.is_sending.load(Ordering::Relaxed) {
            let mut umem_frames = self.lock();
            umem_frames.complete();
            self.is_sending
                .store(umem_frames.pieces > 0, Ordering::Relaxed);
        }
    }

    /// So many more pieces are in the kernel's hands.
    pub(super) fn note_sending(&self, umem_frames: &mut UmemFrames, pieces: usize) {
        // Rings are shorter than that.
        umem_frames.pieces += pieces as u32;
        self.is_sending.store(true, Ordering::Relaxed);
    }

    /// The books, while one of the sockets is at them.
    pub(super) fn lock(&self) -> MutexGuard<'_, UmemFrames> {
        self.umem_frames
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the kernel lacks frames that there may be.
    pub(super) fn needs_frames(&self) -> bool {
        self.needs_frames.load(Ordering::Relaxed)
    }

    pub(super) fn deferred_frames(&self) -> u32 {
        self.deferred_frames.load(Ordering::Relaxed)
    }

    /// One of the sockets goes, and has brought what it had: somebody else is to offer the frames
    /// that are missing now.
    pub(super) fn on_socket_closed(&self, umem_frames: &UmemFrames) {
        self.needs_frames.store(true, Ordering::Relaxed);
        self.is_sending
            .store(umem_frames.pieces > 0, Ordering::Relaxed);
    }

    /// Offers the kernel as many frames as it should have, and takes some for headers if any are
    /// missing; false when the pool had too few for its share. `socket`: any of the queue's. If it
    /// is not `due`, later.
    pub(super) fn refill_or_defer(
        &self,
        due: bool,
        umem_frames: &mut UmemFrames,
        pool: &Pool,
        socket: &Socket,
    ) -> bool {
        let full = match due {
            true => self.refill_up_to(umem_frames, pool, socket, u32::MAX),
            false => {
                self.needs_frames.store(true, Ordering::Relaxed);
                true
            }
        };
        self.deferred_frames.store(
            umem_frames.offer.deferred_frames(umem_frames.offered),
            Ordering::Relaxed,
        );
        full
    }

    /// The same, with so many frames at most.
    pub(super) fn refill_up_to(
        &self,
        umem_frames: &mut UmemFrames,
        pool: &Pool,
        socket: &Socket,
        most: u32,
    ) -> bool {
        let full = umem_frames.refill(pool, socket, most);
        self.needs_frames.store(!full, Ordering::Relaxed);
        full
    }

    /// Wakes a card that serves the fill ring itself, if it waits for that: it had no frames when
    /// it looked last, or could not look.
    pub(super) fn wake_fill_ring(&self, socket: &Socket) {
        if self.lock().rings.fill.needs_wakeup() {
            socket.wake_fill();
        }
    }
}

impl UmemFrames {
    /// Of a queue that has no frames yet.
    pub(super) fn new(rings: QueueRings, pool: &Pool, options: &QueueOptions) -> UmemFrames {
        UmemFrames {
            rings,
            held: (0..pool.count()).map(|_| FrameState::NotInKernel).collect(),
            own: Vec::with_capacity(options.own as usize),
            header_frames_wanted: options.own,
            header_frames_taken: 0,
            share: options.first.max(MIN_SHARE),
            frame_bytes: u64::from(pool.frame_bytes()),
            offer: FillTarget::new(options),
            offered: 0,
            filled: 0,
            pieces: 0,
        }
    }

    /// Frames that it has, or the kernel.
    pub(super) fn kept(&self) -> u32 {
        self.header_frames_taken + self.offered
    }

    /// Whether frames are to be offered although there is something to do. Where many are, a few at
    /// once cost little more than one.
    pub(super) fn is_refill_due(&self) -> bool {
        let FillTarget {
            now,
            default_target,
            least,
            ..
        } = self.offer;
        let few = if least < default_target {
            REFILL_SLACK
        } else {
            0
        };
        now.saturating_sub(self.offered) > few
            || self.header_frames_taken < self.header_frames_wanted
    }

    /// So many packets were found at once, in a socket of the queue.
    pub(super) fn on_packets_found(&mut self, packets: u32, socket: &Socket) {
        (self.offer).note(packets, || socket.statistics().rx_fill_empty);
    }

    fn refill(&mut self, pool: &Pool, socket: &Socket, most: u32) -> bool {
        // Where frames are few those that come back go to the queue that has given them away, not
        // to the queue that looks first.
        let has_room =
            self.share >= self.header_frames_wanted + self.offer.most || pool.free() > self.share;
        let most = match has_room {
            true => most,
            false => most.min(
                self.share
                    .saturating_sub(self.header_frames_taken + self.offered),
            ),
        };
        let most = most - self.take_header_frames(pool, most);
        let fill = &mut self.rings.fill;
        let wanted = self.offer.now.saturating_sub(self.offered);
        let room = wanted.min(fill.usable(wanted));
        let mut given = 0;
        while given < room.min(most) {
            let Some(frame) = pool.alloc() else { break };
            let number = frame.number();
            fill.put(u64::from(number) * self.frame_bytes);
            self.held[number as usize] = FrameState::Receiving(frame);
            given += 1;
        }
        if given > 0 {
            self.offered += given;
            fill.publish();
        }
        if fill.needs_wakeup() {
            socket.wake_fill();
        }
        given == room || self.header_frames_taken + self.offered >= self.share
    }

    /// Takes frames of the pool for headers, if some are missing, `most` at most. Answers how many.
    fn take_header_frames(&mut self, pool: &Pool, most: u32) -> u32 {
        let missing = self.header_frames_wanted - self.header_frames_taken;
        if missing == 0 {
            return 0;
        }
        let part = header_share(
            self.header_frames_taken,
            self.offered,
            pool.free().min(most),
        );
        let before = self.own.len();
        self.own
            .extend((0..missing.min(part)).map_while(|_| pool.alloc()));
        let taken = (self.own.len() - before) as u32;
        self.header_frames_taken += taken;
        taken
    }

    /// Where the next packet will begin, from the first frame on, if it lies in its frame as this
    /// piece does: the kernel fills frames in the order in which they were offered. A guess.
    pub(super) fn predicted_offset(&self, piece: Descriptor) -> u64 {
        self.rings.fill.entry(self.filled) + offset_of(piece.address) % self.frame_bytes
    }

    /// Has the CPU fetch the first lines of a piece that was received.
    pub(super) fn prefetch(&self, piece: Descriptor) {
        let offset = offset_of(piece.address);
        let (number, within) = (offset / self.frame_bytes, offset % self.frame_bytes);
        if let Some(FrameState::Receiving(frame)) = self.held.get(number as usize) {
            let bytes = frame.get(within as usize..).unwrap_or_default();
            let first = bytes.len().min(piece.len as usize).min(FETCHED_BYTES);
            bytes[..first].iter().step_by(LINE_BYTES).for_each(prefetch);
        }
    }

    /// Adds a piece to the packet being received.
    pub(super) fn collect_piece(
        &mut self,
        piece: Descriptor,
        pieces: &mut Vec<Piece>,
        stats: &mut DriverStats,
    ) {
        let offset = offset_of(piece.address);
        let (number, within) = (offset / self.frame_bytes, offset % self.frame_bytes);
        let Some(held) = self.held.get_mut(number as usize) else {
            stats.malformed += 1;
            return;
        };
        match std::mem::replace(held, FrameState::NotInKernel) {
            FrameState::Receiving(frame) => {
                self.offered -= 1;
                self.filled = self.filled.wrapping_add(1);
                if within + u64::from(piece.len) <= self.frame_bytes {
                    pieces.push((frame, within as usize, piece.len as usize));
                } else {
                    // Chunks are no longer than frames, so this cannot be. The kernel does not have
                    // the frame any more.
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

    /// Takes back the frames that have been sent.
    pub(super) fn complete(&mut self) {
        let done = self.rings.completion.usable(1);
        for _ in 0..done {
            let address = self.rings.completion.take();
            self.release(address);
        }
        if done > 0 {
            self.rings.completion.publish();
            self.pieces -= done.min(self.pieces);
        }
    }

    /// The kernel was given this piece to send and will never take it.
    pub(super) fn reclaim_unsent(&mut self, address: u64) {
        self.release(address);
        self.pieces = self.pieces.saturating_sub(1);
    }

    /// One descriptor's part in its frame is over.
    pub(super) fn release(&mut self, address: u64) {
        let number = offset_of(address) / self.frame_bytes;
        let Some(held) = self.held.get_mut(number as usize) else {
            return;
        };
        let last = match held {
            FrameState::Headers(_, count) | FrameState::Lent(_, count) => {
                *count -= 1;
                *count == 0
            }
            _ => false,
        };
        if last
            && let FrameState::Headers(frame, _) = std::mem::replace(held, FrameState::NotInKernel)
        {
            self.own.push(frame);
        }
    }

    /// Frames that the kernel has to send from.
    pub(super) fn sending(&self) -> usize {
        let sending =
            |held: &&FrameState| matches!(held, FrameState::Headers(..) | FrameState::Lent(..));
        self.held.iter().filter(sending).count()
    }
}

/// How many of the frames that there are to have go to headers: where a queue has few, a part of
/// all of them, so that most are left to receive into. `taken`, `offered`: those it has already.
fn header_share(taken: u32, offered: u32, to_have: u32) -> u32 {
    let all = to_have + taken + offered;
    (all / HEADER_SHARE).saturating_sub(taken).min(to_have)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn depth(least: u32, default_target: u32, most: u32) -> FillTarget {
        FillTarget {
            now: default_target,
            default_target,
            least,
            most,
            lost: 0,
            seen: 0,
            largest_batch: 0,
        }
    }

    #[test]
    fn fewer_frames_are_offered_while_all_goes_quickly() {
        let mut depth = depth(512, 2048, 4096);
        let calm = |depth: &mut FillTarget, found: u32| {
            (0..ADJUST_AFTER_PACKETS.div_ceil(found)).for_each(|_| depth.note(found, || 0));
            depth.now
        };
        assert_eq!(calm(&mut depth, 1), 512);
        assert_eq!(calm(&mut depth, 1), 512);
        // Those that the kernel still has are not done without, nor those that are missing just
        // now.
        assert_eq!(
            [2048, 600, 512, 480].map(|it| depth.deferred_frames(it)),
            [0, 1448, 1536, 1536]
        );
        // More than half of them at once: the loop was away.
        depth.note(256, || 0);
        assert_eq!(depth.now, 512);
        depth.note(257, || 0);
        assert_eq!(depth.now, 2048);
        assert_eq!(depth.deferred_frames(512), 0);
        // As many as what is found four times over.
        assert_eq!(calm(&mut depth, 300), 1200);
        assert_eq!(calm(&mut depth, 301), 1200);
        depth.note(601, || 0);
        assert_eq!(depth.now, 2048);
        assert_eq!(calm(&mut depth, 513), 2048);
        // A single such look is enough to stay.
        depth.note(600, || 0);
        assert_eq!(calm(&mut depth, 1), 2048);
        assert_eq!(calm(&mut depth, 1), 512);
    }

    #[test]
    fn a_queue_that_is_to_have_all_its_frames_has_them() {
        let mut depth = depth(300, 300, 300);
        (0..3 * ADJUST_AFTER_PACKETS).for_each(|_| depth.note(1, || 1));
        assert_eq!(depth.now, 300);
    }

    #[test]
    fn where_packets_were_lost_twice_as_many_frames_are_offered() {
        let mut depth = depth(512, 682, 1365);
        let calm = |depth: &mut FillTarget, lost: u64| {
            (0..ADJUST_AFTER_PACKETS).for_each(|_| depth.note(1, || lost));
            (depth.now, depth.deferred_frames(0))
        };
        assert_eq!(calm(&mut depth, 0), (512, 170));
        // A look finds many: it is asked at once, and those it has lost already do not count again.
        depth.note(400, || 100);
        assert_eq!(depth.now, 1024);
        assert_eq!(calm(&mut depth, 100), (1024, 0));
        depth.note(600, || 100);
        assert_eq!(depth.now, 1024);
        // Lost while few were found at a time.
        assert_eq!(calm(&mut depth, 101), (1365, 0));
        assert_eq!(calm(&mut depth, 5000), (1365, 0));
    }

    #[test]
    fn headers_get_a_part_of_what_there_is_and_no_more() {
        assert_eq!(header_share(0, 0, 300), 100);
        assert_eq!(header_share(100, 200, 300), 100);
        assert_eq!(header_share(100, 100, 30), 0);
        // What is offered came by frames that others gave back meanwhile: there is nothing left to
        // take.
        assert_eq!(header_share(10, 500, 0), 0);
        assert_eq!(header_share(10, 500, 7), 7);
    }
}

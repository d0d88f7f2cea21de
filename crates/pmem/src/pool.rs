//! Fixed-size frames in an area of a region: what packets are received into and what large log
//! payloads stay in.
//!
//! A frame has one writer ([`FrameMut`]) or any number of readers ([`Frame`]). Its memory goes back
//! to the pool with the last reader. Ownership is counted in DRAM only: after a restart the log's
//! records say which frames are in use ([`Pool::adopt`]). //= cyclone §4.2

use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use crate::area::Area;
pub use crate::frame::{Frame, FrameMut};

/// The smallest size of frames that is believed where it was read: a packet's headers and some of
/// its content.
const LEAST_FRAME_BYTES: u32 = 256;

/// What is wrong with a frame's name, or a pool's frames.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PoolError {
    /// The number is beyond the pool's frames.
    #[error("frame {number} of a pool of {count}")]
    NoSuchFrame {
        /// The number.
        number: u32,
        /// Frames in the pool.
        count: u32,
    },
    /// The bytes leave the frame.
    #[error("bytes {offset}+{len} of a frame of {frame_bytes}")]
    OutOfFrame {
        /// First byte.
        offset: u32,
        /// Number of bytes.
        len: u32,
        /// Size of a frame.
        frame_bytes: u32,
    },
    /// A writer holds the frame.
    #[error("frame {0} is being written")]
    Busy(u32),
    /// Frames of a size that no pool has.
    #[error(
        "frames of {frame_bytes} bytes in {area_bytes}: expected a multiple of 64 from {LEAST_FRAME_BYTES} on that fits in"
    )]
    FrameBytes {
        /// The size.
        frame_bytes: u32,
        /// Bytes to divide.
        area_bytes: u64,
    },
}

/// State of a frame: bit 31 says that it is on the free list (or about to be put there), the rest
/// counts readers.
///
/// ```text
///   LISTED      free                      alloc -> WRITING      adopt -> LISTED + 1
///   WRITING     one writer                freeze -> 1           drop -> LISTED, pushed
///   n           n readers                 last drop -> LISTED, pushed
///   LISTED + n  adopted at a restart while still on the list: popping it only clears LISTED,
///               its last drop leaves it where it is
/// ```
///
/// So a frame is pushed by exactly the one who set LISTED, and adopting never searches the list.
pub(crate) const LISTED: u32 = 1 << 31;
const WRITING: u32 = LISTED - 1;
/// More live readers than any program has; reached only by leaking them, and counting on would free
/// a used frame.
const MAX_READERS: u32 = WRITING / 2;

/// End of the free list.
const NIL: u32 = u32::MAX;
/// In place of the list's head: the last handle is gone, and frames that come back are only
/// counted.
const CLOSED: u32 = u32::MAX - 1;

pub(crate) struct Slot {
    pub(crate) state: AtomicU32,
    /// While listed: the frame below on the list.
    next: AtomicU32,
    /// While listed: frames on the list from here down.
    depth: AtomicU32,
}

/// Alone on its cache line, since every allocation and release writes it.
#[repr(align(64))]
struct Head(AtomicU64);

pub(crate) struct Inner {
    pub(crate) area: Area,
    base: *mut u8,
    pub(crate) frame_bytes: u32,
    slots: Box<[Slot]>,
    /// Number of live [`Pool`] handles.
    handles: AtomicUsize,
    /// Frames in state LISTED + n, n > 0: on the list, but not free.
    pub(crate) claimed: AtomicU32,
    /// Frames not yet accounted for after closing, and 1 for the closer; at 0 the pool's memory
    /// goes.
    remaining: AtomicU32,
    /// Top of the free list in the low half; in the high half a count of changes, so that a list
    /// that is the same again is not mistaken for an unchanged one.
    head: Head,
}

// SAFETY: `base` points into `area`, which is Send and Sync; who may touch which frame is decided
// by its state.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

fn top(head: u64) -> u32 {
    head as u32
}

fn changed(head: u64, top: u32) -> u64 {
    ((head >> 32).wrapping_add(1) << 32) | u64::from(top)
}

impl Inner {
    #[inline]
    pub(crate) fn slot(&self, number: u32) -> &Slot {
        &self.slots[number as usize]
    }

    #[inline]
    pub(crate) fn address(&self, number: u32) -> *mut u8 {
        // SAFETY: frame numbers are below the count, so the address is within the area.
        unsafe { self.base.add(number as usize * self.frame_bytes as usize) }
    }

    /// The top of the list; its state has LISTED set, and the caller is the one to clear it.
    fn pop(&self) -> Option<u32> {
        let mut head = self.head.0.load(Ordering::Acquire);
        loop {
            let number = top(head);
            if number == NIL {
                return None;
            }
            // If the frame has left the list meanwhile, `next` means nothing, and the exchange
            // fails by the count.
            let next = self.slot(number).next.load(Ordering::Relaxed);
            match self.head.0.compare_exchange_weak(
                head,
                changed(head, next),
                Ordering::Acquire,
                Ordering::Acquire,
            ) {
                Ok(_) => return Some(number),
                Err(_) => {
                    // Another thread is at it. Trying again at once would keep the line from it as
                    // well.
                    std::hint::spin_loop();
                    head = self.head.0.load(Ordering::Acquire);
                }
            }
        }
    }
}

/// Clears LISTED of a frame that is on the list no more: `true` if it was free and is in state
/// `taken` now, `false` if it stays with the readers that have adopted it.
fn unlist(state: &AtomicU32, taken: u32) -> bool {
    let mut seen = LISTED;
    loop {
        let to = if seen == LISTED {
            taken
        } else {
            seen & !LISTED
        };
        match state.compare_exchange_weak(seen, to, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => return seen == LISTED,
            Err(now) => seen = now,
        }
    }
}

/// Puts a frame whose LISTED the caller has just set on the list. The pool may be gone afterwards.
///
/// # Safety
/// `inner` is alive until the frame is accounted for, which this does.
pub(crate) unsafe fn push(inner: NonNull<Inner>, number: u32) {
    {
        // SAFETY: the pool lives while this frame is not accounted for. The borrow ends with the
        // block's last use.
        let pool = unsafe { inner.as_ref() };
        let slot = pool.slot(number);
        let mut head = pool.head.0.load(Ordering::Acquire);
        while top(head) != CLOSED {
            let below = top(head);
            let depth = if below == NIL {
                0
            } else {
                pool.slot(below).depth.load(Ordering::Relaxed)
            };
            slot.next.store(below, Ordering::Relaxed);
            slot.depth.store(depth.wrapping_add(1), Ordering::Relaxed);
            match pool.head.0.compare_exchange_weak(
                head,
                changed(head, number),
                Ordering::Release,
                Ordering::Acquire,
            ) {
                Ok(_) => return,
                Err(_) => {
                    // Another thread is at it. Trying again at once would keep the line from it as
                    // well.
                    std::hint::spin_loop();
                    head = pool.head.0.load(Ordering::Acquire);
                }
            }
        }
        if !unlist(&slot.state, LISTED) {
            // Adopted since; its last reader comes here again.
            return;
        }
    }
    // SAFETY: one frame is accounted for, and not touched any more.
    unsafe { account(inner, 1) }
}

/// Counts frames (and the closer) that a closed pool waits for no longer; frees it with the last.
///
/// # Safety
/// Each frame is accounted for once, after the pool has been closed, and `inner` is not used
/// afterwards.
unsafe fn account(inner: NonNull<Inner>, count: u32) {
    // SAFETY: what is accounted for here keeps the pool alive until now.
    if unsafe { inner.as_ref() }
        .remaining
        .fetch_sub(count, Ordering::AcqRel)
        == count
    {
        // SAFETY: the pool came from a box, all handles and frames are gone, and only one call
        // reaches 0.
        drop(unsafe { Box::from_raw(inner.as_ptr()) });
    }
}

/// The frames of one area. Clones share them.
pub struct Pool(pub(crate) NonNull<Inner>);

// SAFETY: a handle only reaches `Inner`, which is Send and Sync.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

impl Pool {
    /// The same as [`Pool::new`] for a size that was read somewhere.
    ///
    /// # Errors
    /// A size that no packet fits into, no multiple of 64, or more than there is.
    pub fn checked(area: Area, frame_bytes: u32) -> Result<Pool, PoolError> {
        let area_bytes = area.len();
        let is_sane = frame_bytes >= LEAST_FRAME_BYTES && frame_bytes.is_multiple_of(64);
        if !is_sane || u64::from(frame_bytes) > area_bytes {
            return Err(PoolError::FrameBytes {
                frame_bytes,
                area_bytes,
            });
        }
        Ok(Pool::new(area, frame_bytes))
    }

    /// Divides `area` into frames of `frame_bytes` (a multiple of 64); a rest too short for a frame
    /// stays unused.
    ///
    /// # Panics
    /// When `frame_bytes` is 0 or no multiple of 64.
    pub fn new(area: Area, frame_bytes: u32) -> Pool {
        assert!(
            frame_bytes > 0 && frame_bytes.is_multiple_of(64),
            "frames of {frame_bytes} bytes"
        );
        let count = (area.len() / u64::from(frame_bytes)).min(u64::from(MAX_READERS)) as u32;
        // Frame 0 is on top, the last frame at the bottom.
        let slots = (0..count)
            .map(|number| Slot {
                state: AtomicU32::new(LISTED),
                next: AtomicU32::new(if number + 1 < count { number + 1 } else { NIL }),
                depth: AtomicU32::new(count - number),
            })
            .collect();
        let inner = Inner {
            base: area.pointer(0),
            area,
            frame_bytes,
            slots,
            handles: AtomicUsize::new(1),
            claimed: AtomicU32::new(0),
            remaining: AtomicU32::new(count + 1),
            head: Head(AtomicU64::new(u64::from(if count == 0 { NIL } else { 0 }))),
        };
        Pool(NonNull::from(Box::leak(Box::new(inner))))
    }

    fn inner(&self) -> &Inner {
        // SAFETY: the pool is freed only after its last handle is gone.
        unsafe { self.0.as_ref() }
    }

    /// Bytes of each frame.
    pub fn frame_bytes(&self) -> u32 {
        self.inner().frame_bytes
    }

    /// Frames in all.
    pub fn count(&self) -> u32 {
        self.inner().slots.len() as u32
    }

    /// Free frames; a snapshot while other threads take and return frames.
    pub fn free(&self) -> u32 {
        let inner = self.inner();
        let number = top(inner.head.0.load(Ordering::Acquire));
        let listed = if number == NIL {
            0
        } else {
            inner.slot(number).depth.load(Ordering::Relaxed)
        };
        // Two threads that count the same frame down may be seen before one of them takes it back.
        let claimed = (inner.claimed.load(Ordering::Relaxed) as i32).max(0) as u32;
        listed.saturating_sub(claimed)
    }

    /// A free frame to write into.
    #[inline]
    pub fn alloc(&self) -> Option<FrameMut> {
        let inner = self.inner();
        loop {
            let number = inner.pop()?;
            if unlist(&inner.slot(number).state, WRITING) {
                let bytes = u64::from(inner.frame_bytes);
                inner.area.note_lent(u64::from(number) * bytes, bytes);
                return Some(FrameMut {
                    pool: self.0,
                    number,
                });
            }
            inner.claimed.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Takes part of a frame that a log record names, at a restart. A frame may be named several
    /// times.
    ///
    /// # Errors
    /// When the frame or the bytes do not exist, or a writer holds the frame.
    pub fn adopt(&self, number: u32, offset: u32, len: u32) -> Result<Frame, PoolError> {
        let inner = self.inner();
        let Some(slot) = inner.slots.get(number as usize) else {
            return Err(PoolError::NoSuchFrame {
                number,
                count: self.count(),
            });
        };
        if offset
            .checked_add(len)
            .is_none_or(|end| end > inner.frame_bytes)
        {
            return Err(PoolError::OutOfFrame {
                offset,
                len,
                frame_bytes: inner.frame_bytes,
            });
        }
        let mut seen = slot.state.load(Ordering::Relaxed);
        loop {
            if seen == WRITING {
                return Err(PoolError::Busy(number));
            }
            check_readers(seen);
            if seen == LISTED {
                // Counted first: the thread that takes the frame off the list counts down.
                inner.claimed.fetch_add(1, Ordering::Relaxed);
            }
            match slot
                .state
                .compare_exchange(seen, seen + 1, Ordering::Acquire, Ordering::Relaxed)
            {
                Ok(_) => {
                    return Ok(Frame {
                        pool: self.0,
                        number,
                        offset,
                        len,
                    });
                }
                Err(now) => {
                    if seen == LISTED {
                        inner.claimed.fetch_sub(1, Ordering::Relaxed);
                    }
                    seen = now;
                }
            }
        }
    }

    /// One more reader of the frame that these bytes are part of: for a device that goes on reading
    /// them after the caller's borrow ends. `None` where they are not of this pool, or where a
    /// writer holds the frame.
    #[inline]
    pub fn share(&self, bytes: &[u8]) -> Option<Frame> {
        let inner = self.inner();
        let frame_bytes = inner.frame_bytes as usize;
        let offset = (bytes.as_ptr() as usize).checked_sub(inner.base as usize)?;
        let (number, within) = (offset / frame_bytes, offset % frame_bytes);
        if number >= inner.slots.len() || within + bytes.len() > frame_bytes {
            return None;
        }
        let number = number as u32;
        let state = &inner.slot(number).state;
        let mut seen = state.load(Ordering::Relaxed);
        loop {
            // A borrow of a frame's bytes comes from a reader or a writer; only beside a reader may
            // another one stand.
            if seen == WRITING || seen & !LISTED == 0 {
                return None;
            }
            check_readers(seen);
            match state.compare_exchange_weak(seen, seen + 1, Ordering::Relaxed, Ordering::Relaxed)
            {
                Ok(_) => {
                    return Some(Frame {
                        pool: self.0,
                        number,
                        offset: within as u32,
                        len: bytes.len() as u32,
                    });
                }
                Err(now) => seen = now,
            }
        }
    }

    /// Where the frames lie, for a device that registers their memory: the first frame's address,
    /// and the bytes of all of them. Valid while a handle on the pool or one of its frames lives.
    /// Who may touch which bytes is for the frames' handles to say.
    #[inline]
    pub fn span(&self) -> (*mut u8, usize) {
        let inner = self.inner();
        (inner.base, inner.slots.len() * inner.frame_bytes as usize)
    }

    /// Waits until the lines that this thread has flushed are durable.
    #[inline]
    pub fn fence(&self) {
        self.inner().area.fence();
    }
}

impl Clone for Pool {
    fn clone(&self) -> Pool {
        let handles = self.inner().handles.fetch_add(1, Ordering::Relaxed);
        if handles > usize::MAX / 2 {
            std::process::abort();
        }
        Pool(self.0)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let inner = self.inner();
        if inner.handles.fetch_sub(1, Ordering::AcqRel) != 1 {
            return;
        }
        // No thread can pop or adopt any more. Frames held elsewhere keep the memory until they are
        // dropped.
        let mut number = top(inner.head.0.swap(u64::from(CLOSED), Ordering::AcqRel));
        let mut gone = 1;
        while number != NIL {
            // Read before the frame is given up: a reader's last drop may list it again.
            let next = inner.slot(number).next.load(Ordering::Relaxed);
            gone += u32::from(unlist(&inner.slot(number).state, LISTED));
            number = next;
        }
        // SAFETY: the closer and the free frames, all off the list now, are accounted for once.
        unsafe { account(self.0, gone) }
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Pool({} of {} frames of {} bytes free)",
            self.free(),
            self.count(),
            self.frame_bytes()
        )
    }
}

/// Leaked readers (`mem::forget` in a loop) end the process before their count can wrap round to
/// "free".
#[inline]
pub(crate) fn check_readers(state: u32) {
    if state & !LISTED >= MAX_READERS {
        std::process::abort();
    }
}

//! Handles on a pool's frames: one writer, or any number of readers.

use std::fmt;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::sync::atomic::Ordering;

use crate::pool::{Inner, LISTED, Pool, check_readers, push};

/// A frame with one writer.
pub struct FrameMut {
    pub(crate) pool: NonNull<Inner>,
    pub(crate) number: u32,
}

// SAFETY: the frame's bytes have this one owner, and the pool's bookkeeping is atomic.
unsafe impl Send for FrameMut {}
// SAFETY: a shared reference only reads.
unsafe impl Sync for FrameMut {}

impl FrameMut {
    #[inline]
    fn inner(&self) -> &Inner {
        // SAFETY: a pool lives while one of its frames is held.
        unsafe { self.pool.as_ref() }
    }

    /// Which frame of the pool this is.
    #[inline]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Ends writing; the given bytes can then be shared.
    ///
    /// # Panics
    /// When the range leaves the frame.
    #[inline]
    pub fn freeze(self, range: Range<usize>) -> Frame {
        let inner = self.inner();
        let bytes = inner.frame_bytes as usize;
        assert!(
            range.start <= range.end && range.end <= bytes,
            "{range:?} of a frame of {bytes} bytes"
        );
        let from = u64::from(self.number) * bytes as u64 + range.start as u64;
        inner.area.note_external_write(from, range.len() as u64);
        inner.slot(self.number).state.store(1, Ordering::Release);
        let frame = Frame {
            pool: self.pool,
            number: self.number,
            offset: range.start as u32,
            len: range.len() as u32,
        };
        // The frame goes on as what it is now.
        std::mem::forget(self);
        frame
    }
}

impl Deref for FrameMut {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        let inner = self.inner();
        // SAFETY: the frame lies within the pool's area (its number came from the pool), the area's
        // memory is initialised (mapped pages), and while the state is WRITING no other code reads
        // or writes these bytes.
        unsafe {
            std::slice::from_raw_parts(inner.address(self.number), inner.frame_bytes as usize)
        }
    }
}

impl DerefMut for FrameMut {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        let inner = self.inner();
        // SAFETY: as for `deref`; `&mut self` makes this the only view.
        unsafe {
            std::slice::from_raw_parts_mut(inner.address(self.number), inner.frame_bytes as usize)
        }
    }
}

impl Drop for FrameMut {
    #[inline]
    fn drop(&mut self) {
        self.inner()
            .slot(self.number)
            .state
            .store(LISTED, Ordering::Release);
        // SAFETY: the frame was this writer's, and LISTED has just been set here.
        unsafe { push(self.pool, self.number) }
    }
}

impl fmt::Debug for FrameMut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FrameMut({})", self.number)
    }
}

/// Part of a frame, to read and share.
pub struct Frame {
    pub(crate) pool: NonNull<Inner>,
    pub(crate) number: u32,
    pub(crate) offset: u32,
    pub(crate) len: u32,
}

// SAFETY: readers only read, and the pool's bookkeeping is atomic.
unsafe impl Send for Frame {}
// SAFETY: as above.
unsafe impl Sync for Frame {}

impl Frame {
    #[inline]
    fn inner(&self) -> &Inner {
        // SAFETY: a pool lives while one of its frames is held.
        unsafe { self.pool.as_ref() }
    }

    /// Which frame of the pool this is.
    #[inline]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// First byte within the frame.
    #[inline]
    pub fn offset(&self) -> u32 {
        self.offset
    }

    /// Whether it is a frame of this pool.
    #[inline]
    pub fn belongs_to(&self, pool: &Pool) -> bool {
        self.pool == pool.0
    }

    /// A part of this part.
    ///
    /// # Panics
    /// When the range leaves it.
    #[inline]
    pub fn slice(&self, range: Range<usize>) -> Frame {
        assert!(
            range.start <= range.end && range.end <= self.len as usize,
            "{range:?} of {} bytes",
            self.len
        );
        let mut part = self.clone();
        part.offset += range.start as u32;
        part.len = range.len() as u32;
        part
    }

    /// Drops the first bytes of the frame.
    #[inline]
    pub(crate) fn skip(&mut self, count: usize) {
        debug_assert!(count <= self.len as usize);
        self.offset += count as u32;
        self.len -= count as u32;
    }

    /// Starts writing the bytes back to memory; durable after the same thread's [`Pool::fence`].
    #[inline]
    pub fn flush(&self) {
        let inner = self.inner();
        let start = u64::from(self.number) * u64::from(inner.frame_bytes) + u64::from(self.offset);
        inner.area.flush(start, u64::from(self.len));
    }
}

impl Clone for Frame {
    #[inline]
    fn clone(&self) -> Frame {
        // This reader exists, so the frame cannot be freed meanwhile.
        check_readers(
            self.inner()
                .slot(self.number)
                .state
                .fetch_add(1, Ordering::Relaxed),
        );
        Frame { ..*self }
    }
}

impl Drop for Frame {
    #[inline]
    fn drop(&mut self) {
        let inner = self.inner();
        let state = &inner.slot(self.number).state;
        let mut seen = state.load(Ordering::Relaxed);
        loop {
            // Counted down before, because the pool may be gone as soon as the frame is given up.
            let last_claim = seen == LISTED + 1;
            if last_claim {
                inner.claimed.fetch_sub(1, Ordering::Relaxed);
            }
            // The last reader sees all others' reads done before the memory goes to the next
            // writer.
            let to = if seen == 1 { LISTED } else { seen - 1 };
            match state.compare_exchange_weak(seen, to, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => break,
                Err(now) => {
                    if last_claim {
                        inner.claimed.fetch_add(1, Ordering::Relaxed);
                    }
                    seen = now;
                }
            }
        }
        if seen == 1 {
            // SAFETY: LISTED has just been set here.
            unsafe { push(self.pool, self.number) }
        }
    }
}

impl Deref for Frame {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: the bytes lie within the frame (checked where the part was made), and while
        // readers exist no code writes them.
        unsafe {
            std::slice::from_raw_parts(
                self.inner().address(self.number).add(self.offset as usize),
                self.len as usize,
            )
        }
    }
}

impl fmt::Debug for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Frame({}: {}+{})", self.number, self.offset, self.len)
    }
}

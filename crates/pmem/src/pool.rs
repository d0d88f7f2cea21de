//! Fixed-size frames in an area of a region: what packets are received into and what large log payloads stay in.
//!
//! A frame has one writer ([`FrameMut`]) or any number of readers ([`Frame`]). Its memory goes back to the pool with
//! the last reader. Ownership is counted in DRAM only: after a restart the log's records say which frames are in use
//! ([`Pool::adopt`]). //= cyclone §4.2

use std::fmt;
use std::ops::{Deref, DerefMut, Range};
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};

use crate::area::Area;

/// What is wrong with a frame's name.
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
}

/// Count of a frame that a writer holds.
const WRITING: u32 = u32::MAX;

struct Inner {
    area: Area,
    frame_bytes: u32,
    /// 0: free; [`WRITING`]: one writer; otherwise the number of readers.
    counts: Box<[AtomicU32]>,
    free: Mutex<Vec<u32>>,
}

/// The frames of one area. Clones share them.
#[derive(Clone)]
pub struct Pool(Arc<Inner>);

impl Pool {
    /// Divides `area` into frames of `frame_bytes` (a multiple of 64); a rest too short for a frame stays unused.
    ///
    /// # Panics
    /// When `frame_bytes` is 0 or no multiple of 64.
    pub fn new(area: Area, frame_bytes: u32) -> Pool {
        assert!(
            frame_bytes > 0 && frame_bytes.is_multiple_of(64),
            "frames of {frame_bytes} bytes"
        );
        let count = (area.len() / u64::from(frame_bytes)).min(u64::from(u32::MAX - 1)) as u32;
        let counts = (0..count).map(|_| AtomicU32::new(0)).collect();
        let free = Mutex::new((0..count).rev().collect());
        Pool(Arc::new(Inner {
            area,
            frame_bytes,
            counts,
            free,
        }))
    }

    /// Bytes of each frame.
    pub fn frame_bytes(&self) -> u32 {
        self.0.frame_bytes
    }

    /// Frames in all.
    pub fn count(&self) -> u32 {
        self.0.counts.len() as u32
    }

    /// Frames that nobody holds.
    pub fn free(&self) -> u32 {
        self.0
            .free
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .len() as u32
    }

    /// A free frame to write into.
    pub fn alloc(&self) -> Option<FrameMut> {
        let number = self
            .0
            .free
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .pop()?;
        self.0.counts[number as usize].store(WRITING, Ordering::Relaxed);
        Some(FrameMut {
            pool: Some(self.clone()),
            number,
        })
    }

    /// Takes part of a frame that a log record names, at a restart. A frame may be named several times.
    ///
    /// # Errors
    /// When the frame or the bytes do not exist, or a writer holds the frame.
    pub fn adopt(&self, number: u32, offset: u32, len: u32) -> Result<Frame, PoolError> {
        let inner = &*self.0;
        let Some(count) = inner.counts.get(number as usize) else {
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
        let mut free = inner.free.lock().unwrap_or_else(PoisonError::into_inner);
        match count.load(Ordering::Acquire) {
            WRITING => return Err(PoolError::Busy(number)),
            0 => {
                // Restarts adopt while the free list is still in order, so that it is found near its place.
                free.retain(|&other| other != number);
                count.store(1, Ordering::Relaxed);
            }
            readers => count.store(readers + 1, Ordering::Relaxed),
        }
        Ok(Frame {
            pool: self.clone(),
            number,
            offset,
            len,
        })
    }

    /// Waits until flushed lines are durable.
    pub fn fence(&self) {
        self.0.area.fence();
    }

    fn address(&self, number: u32) -> *mut u8 {
        self.0
            .area
            .pointer(u64::from(number) * u64::from(self.0.frame_bytes))
    }

    fn release(&self, number: u32) {
        self.0.counts[number as usize].store(0, Ordering::Relaxed);
        self.0
            .free
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(number);
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

/// A frame with one writer.
pub struct FrameMut {
    /// `None` only after [`FrameMut::freeze`].
    pool: Option<Pool>,
    number: u32,
}

impl FrameMut {
    fn pool(&self) -> &Pool {
        // Only `freeze` takes the pool, and it consumes the frame.
        self.pool
            .as_ref()
            .unwrap_or_else(|| unreachable!("a frozen frame is gone"))
    }

    /// Which frame of the pool this is.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Ends writing; the given bytes can then be shared.
    ///
    /// # Panics
    /// When the range leaves the frame.
    pub fn freeze(mut self, range: Range<usize>) -> Frame {
        let bytes = self.pool().frame_bytes() as usize;
        assert!(
            range.start <= range.end && range.end <= bytes,
            "{range:?} of a frame of {bytes} bytes"
        );
        let pool = self
            .pool
            .take()
            .unwrap_or_else(|| unreachable!("a frozen frame is gone"));
        let from = u64::from(self.number) * u64::from(pool.frame_bytes()) + range.start as u64;
        pool.0.area.note_external_write(from, range.len() as u64);
        pool.0.counts[self.number as usize].store(1, Ordering::Release);
        Frame {
            pool,
            number: self.number,
            offset: range.start as u32,
            len: range.len() as u32,
        }
    }
}

impl Deref for FrameMut {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        let pool = self.pool();
        // SAFETY: the frame lies within the pool's area (its number came from the pool), the area's memory is
        // initialised (mapped pages), and while the count is WRITING nobody else reads or writes these bytes.
        unsafe {
            std::slice::from_raw_parts(pool.address(self.number), pool.frame_bytes() as usize)
        }
    }
}

impl DerefMut for FrameMut {
    fn deref_mut(&mut self) -> &mut [u8] {
        let pool = self.pool();
        // SAFETY: as for `deref`; `&mut self` makes this the only view.
        unsafe {
            std::slice::from_raw_parts_mut(pool.address(self.number), pool.frame_bytes() as usize)
        }
    }
}

impl Drop for FrameMut {
    fn drop(&mut self) {
        if let Some(pool) = self.pool.take() {
            pool.release(self.number);
        }
    }
}

/// Part of a frame, to read and share.
pub struct Frame {
    pool: Pool,
    number: u32,
    offset: u32,
    len: u32,
}

impl Frame {
    /// Which frame of the pool this is.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// First byte within the frame.
    pub fn offset(&self) -> u32 {
        self.offset
    }

    /// Whether it is a frame of this pool.
    pub fn belongs_to(&self, pool: &Pool) -> bool {
        Arc::ptr_eq(&self.pool.0, &pool.0)
    }

    /// A part of this part.
    ///
    /// # Panics
    /// When the range leaves it.
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

    /// Starts writing the bytes back to memory; durable after [`Pool::fence`].
    pub fn flush(&self) {
        let start =
            u64::from(self.number) * u64::from(self.pool.frame_bytes()) + u64::from(self.offset);
        self.pool.0.area.flush(start, u64::from(self.len));
    }
}

impl Clone for Frame {
    fn clone(&self) -> Frame {
        // A reader exists, so the frame cannot be freed meanwhile; overflow would take 2^32 live clones.
        self.pool.0.counts[self.number as usize].fetch_add(1, Ordering::Relaxed);
        Frame {
            pool: self.pool.clone(),
            ..*self
        }
    }
}

impl Drop for Frame {
    fn drop(&mut self) {
        if self.pool.0.counts[self.number as usize].fetch_sub(1, Ordering::Release) == 1 {
            // All reads by other holders happened before the memory is given to the next writer.
            fence(Ordering::Acquire);
            self.pool.release(self.number);
        }
    }
}

impl Deref for Frame {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the bytes lie within the frame (checked where the part was made), and while readers exist nobody
        // writes them.
        unsafe {
            std::slice::from_raw_parts(
                self.pool.address(self.number).add(self.offset as usize),
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

//! Buffers for direct I/O: page-aligned, all alike, from one block that a device may register with
//! the kernel. How many there are bounds what can be outstanding.
#![allow(unsafe_code, reason = "aligned memory that a kernel may write to")]

use std::alloc::{Layout, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, PoisonError};

use cyclone_wire::flash::PAGE_BYTES;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

struct Block {
    start: NonNull<u8>,
    bytes: usize,
    buffer_bytes: usize,
    count: usize,
    free: Mutex<Vec<usize>>,
}

// SAFETY: the block is plain memory; each buffer's part is reached only through the one `Buffer`
// that holds its number.
unsafe impl Send for Block {}
// SAFETY: as above; the list of free numbers is behind a lock.
unsafe impl Sync for Block {}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: mapped in `Buffers::new` with this very length; no buffer is left, they hold
        // references.
        let gone = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) };
        debug_assert!(gone.is_ok(), "{gone:?}");
    }
}

/// A fixed number of buffers of one size.
#[derive(Clone)]
pub struct Buffers {
    block: Arc<Block>,
}

/// One of them; it goes back when dropped.
pub struct Buffer {
    block: Arc<Block>,
    number: usize,
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({})", self.number)
    }
}

impl Buffers {
    /// `count` buffers of `buffer_bytes`, rounded up to pages; at least one of one page.
    pub fn new(count: usize, buffer_bytes: usize) -> Buffers {
        let count = count.max(1);
        let buffer_bytes = buffer_bytes.max(1).next_multiple_of(PAGE_BYTES);
        let bytes = count.saturating_mul(buffer_bytes);
        // Mapped rather than allocated: zeros that cost nothing until they are used.
        // SAFETY: a fresh private mapping.
        let mapped = unsafe {
            mmap_anonymous(
                ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        };
        let Some(start) = mapped.ok().and_then(|start| NonNull::new(start.cast())) else {
            handle_alloc_error(
                Layout::from_size_align(bytes, PAGE_BYTES).unwrap_or(Layout::new::<u8>()),
            )
        };
        Buffers {
            block: Arc::new(Block {
                start,
                bytes,
                buffer_bytes,
                count,
                free: Mutex::new((0..count).rev().collect()),
            }),
        }
    }

    /// Takes a buffer, if one is free. Its content is whatever stood there.
    pub fn take(&self) -> Option<Buffer> {
        let mut free = self
            .block
            .free
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let number = free.pop()?;
        Some(Buffer {
            block: Arc::clone(&self.block),
            number,
        })
    }

    /// How many are free.
    pub fn free(&self) -> usize {
        let free = self
            .block
            .free
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        free.len()
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.block.count
    }

    /// Bytes of each.
    pub fn buffer_bytes(&self) -> usize {
        self.block.buffer_bytes
    }

    /// Where each buffer lies, for registering them with the kernel.
    pub(crate) fn iovecs(&self) -> Vec<libc::iovec> {
        (0..self.block.count)
            .map(|number| libc::iovec {
                iov_base: self
                    .block
                    .start
                    .as_ptr()
                    .wrapping_add(number * self.block.buffer_bytes)
                    .cast(),
                iov_len: self.block.buffer_bytes,
            })
            .collect()
    }

    /// Whether a buffer is one of these.
    pub(crate) fn owns(&self, buffer: &Buffer) -> bool {
        Arc::ptr_eq(&self.block, &buffer.block)
    }
}

impl Buffer {
    /// Its number among its like.
    pub(crate) fn number(&self) -> usize {
        self.number
    }

    /// Its first byte, for the kernel.
    pub(crate) fn pointer(&mut self) -> *mut u8 {
        let at = self.number * self.block.buffer_bytes;
        self.block.start.as_ptr().wrapping_add(at)
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let at = self.number * self.block.buffer_bytes;
        let start = self.block.start.as_ptr().wrapping_add(at);
        // SAFETY: within the block, zeroed by the kernel, and this buffer's number has no other
        // holder.
        unsafe { std::slice::from_raw_parts(start, self.block.buffer_bytes) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        let (start, len) = (self.pointer(), self.block.buffer_bytes);
        // SAFETY: as above, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(start, len) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let mut free = self
            .block
            .free
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        free.push(self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_apart_and_come_back() {
        let buffers = Buffers::new(2, 5000);
        assert_eq!((buffers.count(), buffers.buffer_bytes()), (2, 8192));
        let mut one = buffers.take().expect("two are free");
        let mut two = buffers.take().expect("one is free");
        assert!(buffers.take().is_none());
        assert!((one.pointer() as usize).is_multiple_of(PAGE_BYTES));
        one.fill(1);
        two.fill(2);
        assert!(one.iter().all(|byte| *byte == 1));
        drop(one);
        assert_eq!(buffers.free(), 1);
        drop(buffers);
        assert!(two.iter().all(|byte| *byte == 2));
    }
}

//! Memory that is unmapped with its last user.

use std::{io, ptr, slice};

/// Mapped bytes. How they are used is decided by the areas and pools over them.
pub(crate) struct Memory {
    start: *mut u8,
    len: usize,
}

// SAFETY: only an address and a length; see `Mapping` for who may read or write which bytes.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Zeroed memory of this process.
    pub(crate) fn anonymous(len: usize) -> io::Result<Memory> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a fresh private mapping; the result is checked.
        let start = unsafe {
            libc::mmap(
                ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                flags,
                -1,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: mapped just above, and no other code knows of it.
        Ok(unsafe { Memory::owned(start.cast(), len) })
    }

    /// Takes a mapping over.
    ///
    /// # Safety
    /// The bytes are mapped, and no other code unmaps them.
    pub(crate) unsafe fn owned(start: *mut u8, len: usize) -> Memory {
        Memory { start, len }
    }

    pub(crate) fn start(&self) -> *mut u8 {
        self.start
    }

    /// Makes it hold `image`, which the pages that are not `touched` do already.
    ///
    /// # Safety
    /// No other code uses the memory meanwhile.
    pub(crate) unsafe fn assign(&self, image: &[u8], touched: &[bool]) {
        assert_eq!(image.len(), self.len);
        // SAFETY: mapped for reading and writing as long as `self` lives, and the caller keeps
        // everybody else away.
        let bytes = unsafe { slice::from_raw_parts_mut(self.start, self.len) };
        let pages = bytes.chunks_mut(PAGE_BYTES).zip(image.chunks(PAGE_BYTES));
        for ((place, page), _) in pages.zip(touched).filter(|(_, touched)| **touched) {
            place.copy_from_slice(page);
        }
    }
}

/// Bytes that the system maps together.
pub(crate) const PAGE_BYTES: usize = 4096;

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping that was made or taken over, and its last user is gone.
        unsafe { libc::munmap(self.start.cast(), self.len) };
    }
}

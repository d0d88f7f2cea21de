//! One ring shared with the kernel: a producer's and a consumer's counter, flags, and entries.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering, fence};

use cyclone_pmem::prefetch_line;

/// Where the parts of a ring lie in its mapping, as the kernel says.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Offsets {
    pub(crate) producer: u64,
    pub(crate) consumer: u64,
    pub(crate) entries: u64,
    pub(crate) flags: u64,
}

/// The other side sleeps and wants a system call.
const NEED_WAKEUP: u32 = 1;

/// A ring of `T`, of which this side is either the producer or the consumer.
///
/// The counters run freely and are taken modulo the size. `mine` is what this side has produced or
/// consumed, published with [`Ring::publish`]; `theirs` is the other side's counter as last seen.
pub(crate) struct Ring<T> {
    map: *mut u8,
    map_len: usize,
    offsets: Offsets,
    size: u32,
    local_index: u32,
    remote_index: u32,
    is_producer: bool,
    entries: *mut T,
}

// SAFETY: the mapping belongs to this value alone; the kernel's side is reached through atomics.
unsafe impl<T: Send> Send for Ring<T> {}

impl<T: Copy> Ring<T> {
    /// Maps a ring of `size` entries (a power of two) of a socket, where its page offset says.
    ///
    /// # Errors
    /// When the system refuses, or the layout does not fit `T`.
    pub(crate) fn map(
        socket: &OwnedFd,
        page_offset: i64,
        offsets: Offsets,
        size: u32,
        is_producer: bool,
    ) -> io::Result<Ring<T>> {
        let aligned = |at: u64, to: usize| at.is_multiple_of(to as u64);
        if !size.is_power_of_two()
            || !aligned(offsets.entries, align_of::<T>())
            || ![offsets.producer, offsets.consumer, offsets.flags]
                .iter()
                .all(|&at| aligned(at, 4) && at < offsets.entries)
        {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let map_len = offsets.entries as usize + size as usize * size_of::<T>();
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let map = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                map_len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_POPULATE,
                socket.as_raw_fd(),
                page_offset,
            )
        };
        if map == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let map: *mut u8 = map.cast();
        // SAFETY: the entries begin within the mapping, aligned (checked above; mappings begin on
        // pages).
        let entries = unsafe { map.add(offsets.entries as usize) }.cast();
        Ok(Ring {
            map,
            map_len,
            offsets,
            size,
            local_index: 0,
            remote_index: 0,
            is_producer,
            entries,
        })
    }

    fn word(&self, at: u64) -> &AtomicU32 {
        // SAFETY: within the mapping and aligned, checked when it was made; both sides use it
        // atomically.
        unsafe { AtomicU32::from_ptr(self.map.add(at as usize).cast()) }
    }

    /// Entries that this side may use now: free ones for a producer, filled ones for a consumer.
    /// `enough`: reads the other side's counter only if fewer than this are known of.
    #[inline]
    pub(crate) fn usable(&mut self, enough: u32) -> u32 {
        let known_usable = self.known_usable();
        if known_usable >= enough {
            return known_usable;
        }
        let theirs = if self.is_producer {
            self.offsets.consumer
        } else {
            self.offsets.producer
        };
        self.remote_index = self.word(theirs).load(Ordering::Acquire);
        self.known_usable()
    }

    fn known_usable(&self) -> u32 {
        let usable = if self.is_producer {
            self.size
                .wrapping_sub(self.local_index.wrapping_sub(self.remote_index))
        } else {
            self.remote_index.wrapping_sub(self.local_index)
        };
        usable.min(self.size)
    }

    /// Entries handed over and not yet taken by the other side (producer).
    #[inline]
    pub(crate) fn pending(&mut self) -> u32 {
        // What it is known to have taken it has not given back.
        match self.local_index == self.remote_index {
            true => 0,
            false => self.size - self.usable(self.size),
        }
    }

    /// The next entry; the caller knows that one is usable.
    #[inline]
    pub(crate) fn take(&mut self) -> T {
        let at = self.local_index & (self.size - 1);
        self.local_index = self.local_index.wrapping_add(1);
        // SAFETY: masked, so within the entries; the other side leaves usable entries alone.
        // Volatile, since the memory is shared with the kernel.
        unsafe { self.entries.add(at as usize).read_volatile() }
    }

    /// The entry that is so many behind the next one; the caller knows that it is usable.
    #[inline]
    pub(crate) fn peek(&self, behind: u32) -> T {
        let at = self.local_index.wrapping_add(behind) & (self.size - 1);
        // SAFETY: as for `take`.
        unsafe { self.entries.add(at as usize).read_volatile() }
    }

    /// Has the CPU fetch the next entry, be it there already or not.
    #[inline]
    pub(crate) fn prefetch(&self) {
        let at = self.local_index & (self.size - 1);
        prefetch_line(self.entries.wrapping_add(at as usize).cast());
    }

    /// What this side has put as its entry of this number, from the first one on; of entries whose
    /// place has been taken since, what is there now (producer).
    #[inline]
    pub(crate) fn entry(&self, number: u32) -> T {
        let at = number & (self.size - 1);
        // SAFETY: as for `take`; only this side writes to its entries.
        unsafe { self.entries.add(at as usize).read_volatile() }
    }

    /// Fills the next entry; the caller knows that one is usable.
    #[inline]
    pub(crate) fn put(&mut self, entry: T) {
        let at = self.local_index & (self.size - 1);
        self.local_index = self.local_index.wrapping_add(1);
        // SAFETY: as for `take`.
        unsafe { self.entries.add(at as usize).write_volatile(entry) }
    }

    /// Takes the last entry back (producer). The caller knows that there is one which the other
    /// side has not taken, and will not take any more.
    pub(crate) fn retract(&mut self) -> T {
        self.local_index = self.local_index.wrapping_sub(1);
        let at = self.local_index & (self.size - 1);
        // SAFETY: as for `take`.
        unsafe { self.entries.add(at as usize).read_volatile() }
    }

    /// Hands what was put or taken to the other side.
    #[inline]
    pub(crate) fn publish(&mut self) {
        let mine = if self.is_producer {
            self.offsets.producer
        } else {
            self.offsets.consumer
        };
        self.word(mine).store(self.local_index, Ordering::Release);
    }

    /// Whether the kernel wants a system call to go on with this ring.
    #[inline]
    pub(crate) fn needs_wakeup(&self) -> bool {
        // What was published has to be seen before the flag is read: the other side sets it and
        // then checks the ring once more.
        fence(Ordering::SeqCst);
        self.word(self.offsets.flags).load(Ordering::Relaxed) & NEED_WAKEUP != 0
    }
}

impl<T> Drop for Ring<T> {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and not used any more.
        unsafe { libc::munmap(self.map.cast(), self.map_len) };
    }
}

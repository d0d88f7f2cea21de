//! Buffers that the provider reads and writes, and the slots that stand for operations in flight.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ffi::c_void;
use std::ptr::{self, NonNull};

use super::port::{Piece, Port, Registered};
use super::provider::Provider;
use super::sys;
use crate::endpoint::FabricError;

/// Small buffers' bytes: a header and a page.
const SMALL_BYTES: usize = 4096 + 64;

/// Buffers of each class that are kept for reuse.
const KEPT: usize = 256;

/// Memory that only the provider and its owner touch; not even the owner holds references while an
/// operation uses it.
pub struct Buffer {
    start: NonNull<u8>,
    layout: Layout,
    /// Bytes in use.
    pub len: usize,
    registered: Option<Registered>,
}

// SAFETY: the memory belongs to the buffer alone.
unsafe impl Send for Buffer {}

impl Buffer {
    fn new(bytes: usize) -> Buffer {
        let layout =
            Layout::from_size_align(bytes.max(64), 64).unwrap_or(Layout::new::<[u64; 8]>());
        // SAFETY: the layout is not of size zero.
        let Some(start) = NonNull::new(unsafe { alloc_zeroed(layout) }) else {
            handle_alloc_error(layout);
        };
        Buffer {
            start,
            layout,
            len: 0,
            registered: None,
        }
    }

    /// Bytes there are.
    pub fn room(&self) -> usize {
        self.layout.size()
    }

    /// For the provider.
    pub fn piece(&self) -> Piece {
        Piece {
            start: self.start.as_ptr(),
            len: self.len,
            descriptor: self
                .registered
                .as_ref()
                .map_or(ptr::null_mut(), Registered::descriptor),
        }
    }

    /// The first `len` bytes. Only for buffers that the provider does not hold.
    pub fn bytes(&self, len: usize) -> &[u8] {
        // SAFETY: allocated and initialised, and the provider has given it back.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), len.min(self.room())) }
    }

    /// Sets the contents: the parts one after the other, then zeros up to `len`.
    pub fn fill(&mut self, parts: &[&[u8]], len: usize) {
        assert!(parts.iter().map(|part| part.len()).sum::<usize>() <= len && len <= self.room());
        // SAFETY: allocated, initialised, and not with the provider.
        let mut rest = unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), len) };
        for part in parts {
            let (head, tail) = rest.split_at_mut(part.len());
            head.copy_from_slice(part);
            rest = tail;
        }
        rest.fill(0);
        self.len = len;
    }

    /// Overwrites the first bytes.
    pub fn set_head(&mut self, head: &[u8]) {
        assert!(head.len() <= self.room());
        // SAFETY: allocated, and not with the provider.
        unsafe { ptr::copy_nonoverlapping(head.as_ptr(), self.start.as_ptr(), head.len()) }
    }

    /// The word at `index`.
    pub fn word(&self, index: usize) -> u64 {
        let mut word = [0; 8];
        word.copy_from_slice(&self.bytes(index * 8 + 8)[index * 8..]);
        u64::from_ne_bytes(word)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.registered = None;
        // SAFETY: allocated with this layout; the provider no longer holds it.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}

/// Buffers for reuse, registered where the provider wants that.
#[derive(Default)]
pub struct Buffers {
    small: Vec<Buffer>,
    large: Vec<Buffer>,
}

impl Buffers {
    /// A buffer with room for `bytes`; `most` is the most that is ever asked for.
    pub fn take(
        &mut self,
        provider: &Provider,
        port: &Port,
        bytes: usize,
        most: usize,
    ) -> Result<Buffer, FabricError> {
        let small = bytes <= SMALL_BYTES;
        let kept = if small {
            &mut self.small
        } else {
            &mut self.large
        };
        if let Some(buffer) = kept.pop() {
            return Ok(buffer);
        }
        let mut buffer = Buffer::new(if small { SMALL_BYTES } else { most.max(bytes) });
        if provider.terms().local_registration {
            let access = sys::SEND | sys::RECV | sys::READ | sys::WRITE;
            let key = buffer.start.as_ptr() as u64 & provider.terms().key_mask;
            // SAFETY: the registration is dropped before the memory.
            buffer.registered = Some(unsafe {
                Registered::new(
                    provider,
                    port,
                    (buffer.start.as_ptr(), buffer.room()),
                    access,
                    key,
                    0,
                )?
            });
        }
        Ok(buffer)
    }

    /// Gives a buffer back.
    pub fn give(&mut self, buffer: Buffer) {
        let kept = if buffer.room() <= SMALL_BYTES {
            &mut self.small
        } else {
            &mut self.large
        };
        if kept.len() < KEPT {
            kept.push(buffer);
        }
    }
}

/// What libfabric may scribble on while an operation is in flight (`struct fi_context2`), and whose
/// it is.
#[repr(C, align(64))]
struct Slot {
    scratch: [u64; 8],
    index: usize,
}

/// Operations in flight, each in a slot whose address is its context.
pub struct Slots<W> {
    slots: Vec<NonNull<Slot>>,
    work: Vec<Option<W>>,
    free: Vec<usize>,
    limit: usize,
}

// SAFETY: the slots belong to this table alone.
unsafe impl<W: Send> Send for Slots<W> {}

impl<W> Slots<W> {
    /// At most `limit` at once.
    pub fn new(limit: usize) -> Slots<W> {
        Slots {
            slots: Vec::new(),
            work: Vec::new(),
            free: Vec::new(),
            limit,
        }
    }

    /// Whether another operation has room.
    pub fn has_room(&self) -> bool {
        !self.free.is_empty() || self.slots.len() < self.limit
    }

    /// Enters an operation; gives it back if there is no room.
    pub fn enter(&mut self, work: W) -> Result<usize, W> {
        let index = match self.free.pop() {
            Some(index) => index,
            None if self.slots.len() < self.limit => {
                let index = self.slots.len();
                let slot = Box::new(Slot {
                    scratch: [0; 8],
                    index,
                });
                self.slots.push(NonNull::from(Box::leak(slot)));
                self.work.push(None);
                index
            }
            None => return Err(work),
        };
        self.work[index] = Some(work);
        Ok(index)
    }

    /// The pointer to give with the operation.
    pub fn context(&self, index: usize) -> *mut c_void {
        self.slots[index].as_ptr().cast()
    }

    /// The slot behind a completion's pointer.
    pub fn index(&self, context: *mut c_void) -> Option<usize> {
        let slot = NonNull::new(context.cast::<Slot>())?;
        // SAFETY: contexts come back as they were given, and slots live as long as this table; a
        // foreign pointer would be the provider's bug. `index` lies beyond what the provider may
        // change.
        let index = unsafe { (&raw const (*slot.as_ptr()).index).read() };
        (self.slots.get(index) == Some(&slot)).then_some(index)
    }

    /// Every operation in flight.
    pub fn all(&self) -> impl Iterator<Item = &W> {
        self.work.iter().flatten()
    }

    /// The operation in a slot.
    pub fn get(&self, index: usize) -> Option<&W> {
        self.work.get(index)?.as_ref()
    }

    /// Takes an operation out; its slot is free.
    pub fn leave(&mut self, index: usize) -> Option<W> {
        let work = self.work.get_mut(index)?.take()?;
        self.free.push(index);
        Some(work)
    }

    /// Takes every operation out that `which` picks.
    pub fn leave_all(&mut self, which: impl Fn(&W) -> bool) -> Vec<W> {
        let picked: Vec<usize> = (0..self.work.len())
            .filter(|&index| self.work[index].as_ref().is_some_and(&which))
            .collect();
        picked
            .into_iter()
            .filter_map(|index| self.leave(index))
            .collect()
    }
}

impl<W> Drop for Slots<W> {
    fn drop(&mut self) {
        for slot in self.slots.drain(..) {
            // SAFETY: leaked by `enter`; the ports were dropped before (field order of Core).
            drop(unsafe { Box::from_raw(slot.as_ptr()) });
        }
    }
}

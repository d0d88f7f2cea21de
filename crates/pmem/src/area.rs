//! A part of a region that one owner writes.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::flush;
use crate::region::Mapping;

/// Exclusive bytes of a region. Each byte of a region belongs to at most one area, so that the
/// borrow rules hold: writing takes `&mut self`.
///
/// Every method panics when its range leaves the area: offsets come from the program, never from
/// outside.
pub struct Area {
    mapping: Arc<Mapping>,
    base: u64,
    len: u64,
}

impl Area {
    pub(crate) fn new(mapping: Arc<Mapping>, base: u64, len: u64) -> Area {
        Area { mapping, base, len }
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the area has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes' range, if they are part of this mapping.
    pub(crate) fn range_in(&self, mapping: &Arc<Mapping>) -> Option<(u64, u64)> {
        Arc::ptr_eq(&self.mapping, mapping).then_some((self.base, self.base + self.len))
    }

    #[inline]
    fn check(&self, offset: u64, len: u64) {
        let fits = offset.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(fits, "{offset}+{len} outside an area of {} bytes", self.len);
    }

    #[inline]
    pub(crate) fn pointer(&self, offset: u64) -> *mut u8 {
        self.check(offset, 0);
        self.mapping.pointer(self.base + offset)
    }

    /// A view of the bytes.
    #[inline]
    pub fn bytes(&self, offset: u64, len: u64) -> &[u8] {
        self.check(offset, len);
        // SAFETY: the range is mapped and initialised, and writers of this area need `&mut self`.
        unsafe { std::slice::from_raw_parts(self.pointer(offset), len as usize) }
    }

    /// Stores bytes; durable after [`Area::flush`] and [`Area::fence`].
    #[inline]
    pub fn write(&mut self, offset: u64, bytes: &[u8]) {
        self.check(offset, bytes.len() as u64);
        // SAFETY: the range is mapped and `&mut self` excludes other views; `bytes` cannot overlap
        // it for that reason.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.pointer(offset), bytes.len()) }
        self.mapping
            .note_write(self.base + offset, bytes.len() as u64);
    }

    /// Stores bytes past the caches: durable after [`Area::fence`] alone. For copies that are not
    /// read soon.
    #[inline]
    pub fn write_streaming(&mut self, offset: u64, bytes: &[u8]) {
        self.check(offset, bytes.len() as u64);
        // SAFETY: as for `write`.
        unsafe { flush::copy_streaming(self.pointer(offset), bytes, self.mapping.method()) }
        self.mapping
            .note_streamed(self.base + offset, bytes.len() as u64);
    }

    /// Stores zeros.
    pub fn zero(&mut self, offset: u64, len: u64) {
        self.check(offset, len);
        // SAFETY: as for `write`.
        unsafe { std::ptr::write_bytes(self.pointer(offset), 0, len as usize) }
        self.mapping.note_write(self.base + offset, len);
    }

    #[inline]
    fn word(&self, offset: u64) -> &AtomicU64 {
        self.check(offset, 8);
        assert!(offset.is_multiple_of(8), "word at {offset}");
        // SAFETY: mapped, 8-byte aligned (areas begin on cache lines), and only accessed atomically
        // through here or exclusively through `&mut self`.
        unsafe { AtomicU64::from_ptr(self.pointer(offset).cast()) }
    }

    /// Loads 8 bytes atomically.
    #[inline]
    pub fn load_u64(&self, offset: u64) -> u64 {
        self.word(offset).load(Ordering::Acquire)
    }

    /// Stores 8 bytes atomically: a crash leaves the old value or the new one.
    #[inline]
    pub fn store_u64(&mut self, offset: u64, value: u64) {
        self.word(offset).store(value, Ordering::Release);
        self.mapping.note_write(self.base + offset, 8);
    }

    /// Starts writing the bytes back; they are durable after the next [`Area::fence`].
    #[inline]
    pub fn flush(&self, offset: u64, len: u64) {
        self.check(offset, len);
        self.mapping
            .method()
            .flush(self.pointer(offset), len as usize);
        self.mapping.note_flush(self.base + offset, len);
    }

    /// Waits until everything that this thread has flushed or streamed before is durable.
    #[inline]
    pub fn fence(&self) {
        flush::fence();
        self.mapping.note_fence();
    }

    /// [`Area::fence`] for several areas: the CPU waits once for all.
    pub fn fence_all<'a>(areas: impl Iterator<Item = &'a Area>) {
        flush::fence();
        let mut noted: Option<&Arc<Mapping>> = None;
        for area in areas {
            // Once for neighbours in one mapping.
            if noted.is_none_or(|mapping| !Arc::ptr_eq(mapping, &area.mapping)) {
                area.mapping.note_fence();
                noted = Some(&area.mapping);
            }
        }
    }

    /// Flush and fence.
    #[inline]
    pub fn persist(&self, offset: u64, len: u64) {
        self.flush(offset, len);
        self.fence();
    }

    /// The mapping with this area's length, and where in the mapping it begins.
    pub(crate) fn into_parts(self) -> ((Arc<Mapping>, u64), u64) {
        ((self.mapping, self.len), self.base)
    }

    /// Divides the area in two.
    ///
    /// # Panics
    /// When `middle` is no multiple of 64 or outside the area.
    pub fn split_at(self, middle: u64) -> (Area, Area) {
        self.check(middle, 0);
        assert!(
            middle.is_multiple_of(64),
            "areas begin on cache lines, not at {middle}"
        );
        let rest = Area {
            mapping: Arc::clone(&self.mapping),
            base: self.base + middle,
            len: self.len - middle,
        };
        (
            Area {
                len: middle,
                ..self
            },
            rest,
        )
    }

    /// A part that is about to be written to without further notes, until
    /// [`Area::note_external_write`].
    #[inline]
    pub(crate) fn note_lent(&self, offset: u64, len: u64) {
        self.mapping.note_lent(self.base + offset, len);
    }

    /// Tells the crash simulator of bytes stored through a frame's pointer.
    #[inline]
    pub(crate) fn note_external_write(&self, offset: u64, len: u64) {
        self.mapping.note_fill(self.base + offset, len);
    }
}

impl fmt::Debug for Area {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Area({}+{})", self.base, self.len)
    }
}

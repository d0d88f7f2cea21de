//! A part of a region that others write too: remote initiators, other processes, devices.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use crate::Area;
use crate::flush;
use crate::region::Mapping;

/// Bytes of a region with many writers. Nothing is ever borrowed from it: bytes are copied in and
/// out, and a copy may mix old and new bytes where somebody writes at the same time. Only aligned
/// 8-byte words are whole.
///
/// Clones name the same bytes. Every method panics when its range leaves the area: who takes
/// offsets from outside checks them with [`SharedArea::contains`] first.
#[derive(Clone)]
pub struct SharedArea {
    mapping: Arc<Mapping>,
    base: u64,
    len: u64,
}

impl Area {
    /// Gives up exclusiveness: from here on the bytes may be written from several places at once.
    pub fn share(self) -> SharedArea {
        let (mapping, base) = self.into_parts();
        SharedArea {
            len: mapping.1,
            mapping: mapping.0,
            base,
        }
    }
}

impl SharedArea {
    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the area has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether the range lies in the area.
    #[inline]
    pub fn contains(&self, offset: u64, len: u64) -> bool {
        offset.checked_add(len).is_some_and(|end| end <= self.len)
    }

    /// A part of it, by the same rules.
    pub fn part(&self, offset: u64, len: u64) -> SharedArea {
        self.check(offset, len);
        SharedArea {
            mapping: Arc::clone(&self.mapping),
            base: self.base + offset,
            len,
        }
    }

    #[inline]
    fn check(&self, offset: u64, len: u64) {
        assert!(
            self.contains(offset, len),
            "{offset}+{len} outside a shared area of {} bytes",
            self.len
        );
    }

    /// The first byte, for libraries that register memory by pointer. Reading or writing through it
    /// follows the same rules as the methods here: no references, only copies.
    pub fn as_ptr(&self) -> *mut u8 {
        self.mapping.pointer(self.base)
    }

    #[inline]
    fn word(&self, offset: u64) -> &AtomicU64 {
        self.check(offset, 8);
        assert!((self.base + offset).is_multiple_of(8), "word at {offset}");
        // SAFETY: mapped for the life of `self`, 8-byte aligned (checked), and only accessed
        // atomically.
        unsafe { AtomicU64::from_ptr(self.mapping.pointer(self.base + offset).cast()) }
    }

    /// Copies bytes out.
    #[inline]
    pub fn read(&self, offset: u64, into: &mut [u8]) {
        self.check(offset, into.len() as u64);
        // SAFETY: the range is checked and mapped for the life of `self`; `into` is writable and
        // not part of it.
        unsafe {
            copy_out(
                self.mapping.pointer(self.base + offset),
                into.as_mut_ptr(),
                into.len(),
            );
        }
        std::sync::atomic::fence(Ordering::Acquire);
    }

    /// Copies bytes out into a new buffer.
    pub fn read_vec(&self, offset: u64, len: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.read_into(offset, len, &mut bytes);
        bytes
    }

    /// Copies bytes out into a buffer that is used again: it holds them and nothing else
    /// afterwards.
    #[inline]
    pub fn read_into(&self, offset: u64, len: u64, into: &mut Vec<u8>) {
        self.check(offset, len);
        let len = len as usize;
        into.clear();
        into.reserve(len);
        // SAFETY: the range is checked and mapped for the life of `self`; the vector has room for
        // `len` bytes, and all of them are written before they count.
        unsafe {
            copy_out(
                self.mapping.pointer(self.base + offset),
                into.as_mut_ptr(),
                len,
            );
            into.set_len(len);
        }
        std::sync::atomic::fence(Ordering::Acquire);
    }

    /// Asks the CPU to have the first `len` bytes from `offset` on in its caches soon. Outside the
    /// area: nothing.
    #[inline]
    pub fn prefetch(&self, offset: u64, len: u64) {
        if !self.contains(offset, len) {
            return;
        }
        let start = self.mapping.pointer(self.base + offset);
        for line in (0..len as usize).step_by(flush::LINE_BYTES) {
            flush::prefetch_line(start.wrapping_add(line));
        }
    }

    /// Copies bytes in, in order of address; durable after [`SharedArea::flush`] and
    /// [`SharedArea::fence`].
    #[inline]
    pub fn write(&self, offset: u64, bytes: &[u8]) {
        self.check(offset, bytes.len() as u64);
        std::sync::atomic::fence(Ordering::Release);
        // SAFETY: the range is checked and mapped for the life of `self`.
        unsafe { copy_in(self.mapping.pointer(self.base + offset), bytes) }
        self.note(offset, bytes);
    }

    /// Stores zeros.
    pub fn zero(&self, offset: u64, len: u64) {
        self.check(offset, len);
        const ZEROS: [u8; 4096] = [0; 4096];
        let mut at = offset;
        while at < offset + len {
            let step = (offset + len - at).min(ZEROS.len() as u64);
            self.write(at, &ZEROS[..step as usize]);
            at += step;
        }
    }

    /// Stores zeros past the caches, for ranges too large to be of use in them; durable after the
    /// next
    /// [`SharedArea::fence`].
    pub fn zero_streaming(&self, offset: u64, len: u64) {
        self.check(offset, len);
        std::sync::atomic::fence(Ordering::Release);
        let (to, method) = (
            self.mapping.pointer(self.base + offset),
            self.mapping.method(),
        );
        // SAFETY: the range was checked, and is mapped for the life of `self`.
        unsafe { flush::zero_streaming(to, len as usize, method) };
        const ZEROS: [u8; 4096] = [0; 4096];
        for at in (0..len).step_by(ZEROS.len()) {
            let step = (len - at).min(ZEROS.len() as u64);
            self.note(offset + at, &ZEROS[..step as usize]);
        }
        self.mapping.note_flush(self.base + offset, len);
    }

    /// Loads 8 bytes atomically.
    #[inline]
    pub fn load_u64(&self, offset: u64) -> u64 {
        self.word(offset).load(Ordering::SeqCst)
    }

    /// Stores 8 bytes atomically: a crash leaves the old value or the new one.
    #[inline]
    pub fn store_u64(&self, offset: u64, value: u64) {
        self.word(offset).store(value, Ordering::SeqCst);
        self.note(offset, &value.to_ne_bytes());
    }

    /// Exchanges 8 bytes if they hold `old`; answers what they held before.
    #[inline]
    pub fn compare_swap(&self, offset: u64, old: u64, new: u64) -> u64 {
        match self
            .word(offset)
            .compare_exchange(old, new, Ordering::SeqCst, Ordering::SeqCst)
        {
            Ok(before) => {
                self.note(offset, &new.to_ne_bytes());
                before
            }
            Err(before) => before,
        }
    }

    /// Adds to 8 bytes, wrapping; answers what they held before.
    #[inline]
    pub fn fetch_add(&self, offset: u64, value: u64) -> u64 {
        let before = self.word(offset).fetch_add(value, Ordering::SeqCst);
        self.note(offset, &before.wrapping_add(value).to_ne_bytes());
        before
    }

    /// Starts writing the bytes back; they are durable after the next [`SharedArea::fence`].
    #[inline]
    pub fn flush(&self, offset: u64, len: u64) {
        self.check(offset, len);
        self.mapping
            .method()
            .flush(self.mapping.pointer(self.base + offset), len as usize);
        self.mapping.note_flush(self.base + offset, len);
    }

    /// Waits until everything that this thread has flushed before is durable.
    #[inline]
    pub fn fence(&self) {
        flush::fence();
        self.mapping.note_fence();
    }

    /// Flush and fence.
    #[inline]
    pub fn persist(&self, offset: u64, len: u64) {
        self.flush(offset, len);
        self.fence();
    }

    #[inline]
    fn note(&self, offset: u64, bytes: &[u8]) {
        self.mapping.note_bytes(self.base + offset, bytes);
    }
}

/// How many bytes there are before the first aligned word.
#[inline]
fn before_words(at: *const u8) -> usize {
    (at as usize).wrapping_neg() & 7
}

/// Copies out word by word where the source is aligned.
///
/// # Safety
/// `len` bytes are mapped at `from`, others access them only atomically; `len` bytes are writable
/// at `into`, and apart.
#[inline]
unsafe fn copy_out(from: *mut u8, into: *mut u8, len: usize) {
    let head = before_words(from).min(len);
    let words = (len - head) / 8;
    // SAFETY: every index is below `len`; words are aligned by the choice of `head`; unaligned
    // stores are used.
    unsafe {
        for at in 0..head {
            *into.add(at) = AtomicU8::from_ptr(from.add(at)).load(Ordering::Relaxed);
        }
        let (source, target) = (from.add(head).cast::<u64>(), into.add(head).cast::<u64>());
        for word in 0..words {
            let value = AtomicU64::from_ptr(source.add(word)).load(Ordering::Relaxed);
            target.add(word).write_unaligned(value);
        }
        for at in head + words * 8..len {
            *into.add(at) = AtomicU8::from_ptr(from.add(at)).load(Ordering::Relaxed);
        }
    }
}

/// Copies in, in order of address, word by word where the target is aligned.
///
/// # Safety
/// `from.len()` bytes are mapped at `to`, and others access them only atomically.
#[inline]
unsafe fn copy_in(to: *mut u8, from: &[u8]) {
    let head = before_words(to).min(from.len());
    let (bytes, rest) = from.split_at(head);
    let words = rest.chunks_exact(8);
    let tail = words.remainder();
    // SAFETY: every index is below `from.len()`; words are aligned by the choice of `head`.
    unsafe {
        for (at, byte) in bytes.iter().enumerate() {
            AtomicU8::from_ptr(to.add(at)).store(*byte, Ordering::Relaxed);
        }
        let mut target = to.add(head);
        for word in words {
            // `chunks_exact` gives eight bytes each time.
            let word = word
                .first_chunk::<8>()
                .map_or(0, |it| u64::from_ne_bytes(*it));
            AtomicU64::from_ptr(target.cast()).store(word, Ordering::Relaxed);
            target = target.add(8);
        }
        for (at, byte) in tail.iter().enumerate() {
            AtomicU8::from_ptr(target.add(at)).store(*byte, Ordering::Relaxed);
        }
    }
}

impl fmt::Debug for SharedArea {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedArea({}+{})", self.base, self.len)
    }
}

#[cfg(test)]
mod tests {
    use crate::Region;

    #[test]
    fn bytes_at_any_alignment_come_back() {
        let region = Region::anonymous(4096).expect("region");
        let area = region.take(0, 4096).expect("area").share();
        let part = area.part(64, 512);
        for offset in 0..17 {
            for len in 0..40 {
                let bytes: Vec<u8> = (0..len as u8).map(|n| n ^ 0x5a).collect();
                part.zero(0, 512);
                part.write(offset, &bytes);
                assert_eq!(part.read_vec(offset, len), bytes);
                assert_eq!(area.read_vec(64 + offset, len), bytes);
                assert_eq!(part.read_vec(offset + len, 8), [0; 8]);
                part.zero_streaming(offset, len);
                part.fence();
                assert_eq!(part.read_vec(0, 80), [0; 80]);
            }
        }
        assert!(!part.contains(u64::MAX, 2));
        assert_eq!(part.compare_swap(8, 0, 7), 0);
        assert_eq!(part.fetch_add(8, 3), 7);
        assert_eq!(part.load_u64(8), 10);
    }

    #[test]
    fn what_was_flushed_and_fenced_survives_a_simulated_crash() {
        let (region, sim) = Region::simulated(4096).expect("region");
        let area = region.take(0, 4096).expect("area").share();
        area.write(128, b"kept, and for good");
        area.persist(128, 64);
        area.store_u64(256, 9);
        area.write(512, &[7; 100]);
        area.persist(512, 100);
        area.zero_streaming(520, 80);
        assert!((0..50).any(|seed| sim.sampled(seed)[576] == 7));
        area.fence();
        for seed in 0..20 {
            let image = sim.sampled(seed);
            assert_eq!(&image[128..146], b"kept, and for good");
            assert_eq!(&image[519..521], [7, 0]);
            assert_eq!(&image[599..601], [0, 7]);
        }
        assert!((0..50).any(|seed| sim.sampled(seed)[256] == 0));
    }
}

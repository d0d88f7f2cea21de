//! The programs' allocator: mimalloc, called the way it is fast.
//!
//! Its functions for aligned memory find a block at once only where one of just this size is free
//! already, and otherwise take a larger one, aligned by hand; so most sizes never get separate
//! blocks. What needs no more than everything has asks for memory without saying so
//! (docs/adr/0059).

use std::alloc::{GlobalAlloc, Layout};

use libmimalloc_sys as mi;

/// Every block of at least so many bytes begins on a multiple of them.
const NATURAL: usize = 16;

// SAFETY: mimalloc has a function of this name and type (`mi_collect` in mimalloc.h), which may be
// called at any time.
unsafe extern "C" {
    /// Of mimalloc: takes back what other threads have freed of this thread's, and gives free
    /// memory to the system.
    safe fn mi_collect(force: bool);
}

/// Gives the memory that the process has freed back to the system. Mimalloc does so automatically a
/// second after memory was freed, but only as the process goes on allocating. It takes some
/// milliseconds for every 100 MiB, so it is nothing for a thread that others wait for. A process
/// with another allocator has nothing to give.
pub fn release_free_memory() {
    mi_collect(true);
}

/// For `#[global_allocator]`.
pub struct Allocator;

/// Whether a block of this size is aligned enough without a request: blocks shorter than
/// [`NATURAL`] are aligned to their size.
fn is_natural(size: usize, align: usize) -> bool {
    align <= NATURAL && align <= size
}

// SAFETY: mimalloc's functions are an allocator's: the blocks they return are large enough, not in
// use elsewhere, and aligned as asked for, or as every block is, which `is_natural` compares with
// what is asked for.
unsafe impl GlobalAlloc for Allocator {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let (size, align) = (layout.size(), layout.align());
        // SAFETY: the caller asks for a size that is not 0.
        unsafe {
            match is_natural(size, align) {
                true => mi::mi_malloc(size).cast(),
                false => mi::mi_malloc_aligned(size, align).cast(),
            }
        }
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let (size, align) = (layout.size(), layout.align());
        // SAFETY: as above.
        unsafe {
            match is_natural(size, align) {
                true => mi::mi_zalloc(size).cast(),
                false => mi::mi_zalloc_aligned(size, align).cast(),
            }
        }
    }

    #[inline]
    unsafe fn dealloc(&self, block: *mut u8, _: Layout) {
        // SAFETY: the caller gives back what one of these functions gave.
        unsafe { mi::mi_free(block.cast()) }
    }

    #[inline]
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller gives back what one of these functions gave; the block that takes its
        // place is aligned like a new one.
        unsafe {
            match is_natural(size, layout.align()) {
                true => mi::mi_realloc(block.cast(), size).cast(),
                false => mi::mi_realloc_aligned(block.cast(), size, layout.align()).cast(),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every size and alignment: aligned, zeroed if asked for, contents kept when it grows and
    /// shrinks.
    #[test]
    fn blocks_are_aligned_and_keep_their_bytes() {
        for align in [1, 2, 4, 8, 16, 32, 64, 4096] {
            for size in (1..200).chain([1000, 1024, 1025, 4096, 70_000, 1 << 20]) {
                let layout = Layout::from_size_align(size, align).expect("a layout");
                let mut blocks = Vec::new();
                // Several of each, so that not only a page's first block is checked.
                for round in 0..4 {
                    // SAFETY: sizes are not 0; each block is written within its size, and given
                    // back once with its own layout.
                    unsafe {
                        let block = Allocator.alloc_zeroed(layout);
                        assert!(!block.is_null());
                        assert_eq!(block as usize % align, 0, "{size} bytes by {align}");
                        assert!((0..size).all(|at| *block.add(at) == 0));
                        block.write_bytes(7, size);
                        let other = if round % 2 == 0 {
                            2 * size
                        } else {
                            size.div_ceil(2)
                        };
                        let block = Allocator.realloc(block, layout, other);
                        assert_eq!(block as usize % align, 0, "{size} to {other} by {align}");
                        assert!((0..size.min(other)).all(|at| *block.add(at) == 7));
                        blocks.push((
                            block,
                            Layout::from_size_align(other, align).expect("a layout"),
                        ));
                        let plain = Allocator.alloc(layout);
                        assert_eq!(plain as usize % align, 0, "{size} bytes by {align}");
                        blocks.push((plain, layout));
                    }
                }
                for (block, layout) in blocks {
                    // SAFETY: as above.
                    unsafe { Allocator.dealloc(block, layout) };
                }
            }
        }
    }
}

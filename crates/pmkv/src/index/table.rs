//! Buckets and their chains. Items are words; nothing here knows keys.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Items of a bucket: with its link they fill a cache line.
pub(super) const ITEMS: usize = 7;

const LOCKED: u64 = 1 << 63;
const MOVED: u64 = 1 << 62;
const NEXT: u64 = u32::MAX as u64;

/// Chained buckets come in chunks, each twice the one before.
const FIRST_CHUNK: u32 = 16;
const CHUNKS: usize = 26;

/// The smallest table has 2^this buckets.
pub(super) const MIN_BITS: u32 = 3;

#[derive(Default)]
#[repr(align(64))]
pub(super) struct Bucket {
    pub items: [AtomicU64; ITEMS],
    /// Of a chain's first bucket also: locked, moved. All: number of the next chained bucket,
    /// from 1.
    link: AtomicU64,
}

impl Bucket {
    pub fn is_moved(&self) -> bool {
        self.link.load(Ordering::SeqCst) & MOVED != 0
    }

    /// Takes the chain's lock; `false` if its items have moved to the next table.
    pub fn lock(&self) -> bool {
        let mut spins = 0u32;
        loop {
            let link = self.link.load(Ordering::SeqCst);
            if link & MOVED != 0 {
                return false;
            }
            if link & LOCKED == 0 {
                let taken = self.link.compare_exchange_weak(
                    link,
                    link | LOCKED,
                    Ordering::SeqCst,
                    Ordering::SeqCst,
                );
                if taken.is_ok() {
                    return true;
                }
            }
            spins += 1;
            if spins.is_multiple_of(64) {
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
        }
    }

    pub fn unlock(&self) {
        self.link.fetch_and(!LOCKED, Ordering::SeqCst);
    }

    /// Marks the locked chain as moved, and unlocks it.
    pub fn leave(&self) {
        self.link.fetch_or(MOVED, Ordering::SeqCst);
        self.link.fetch_and(!LOCKED, Ordering::SeqCst);
    }

    fn next(&self) -> u64 {
        self.link.load(Ordering::SeqCst) & NEXT
    }

    fn set_next(&self, number: u32) {
        self.link.fetch_or(u64::from(number), Ordering::SeqCst);
    }
}

fn buckets(count: usize) -> Box<[Bucket]> {
    (0..count).map(|_| Bucket::default()).collect()
}

/// A bucket array of a power of two, and the buckets chained to it.
pub(super) struct Table {
    bits: u32,
    heads: Box<[Bucket]>,
    chunks: [OnceLock<Box<[Bucket]>>; CHUNKS],
    chained: AtomicU32,
}

impl Table {
    pub fn new(bits: u32) -> Table {
        Table {
            bits,
            heads: buckets(1 << bits),
            chunks: [const { OnceLock::new() }; CHUNKS],
            chained: AtomicU32::new(0),
        }
    }

    pub fn bits(&self) -> u32 {
        self.bits
    }

    pub fn heads(&self) -> usize {
        self.heads.len()
    }

    /// The bucket of a hash, by its highest bits: so buckets are in the order of hashes, and a
    /// bucket's items go to two neighbours when the table doubles.
    pub fn place(&self, hash: u64) -> usize {
        (hash >> (64 - self.bits)) as usize
    }

    pub fn head(&self, place: usize) -> &Bucket {
        &self.heads[place]
    }

    /// Buckets of a chain, the first one included.
    pub fn chain(&self, place: usize) -> impl Iterator<Item = &Bucket> {
        let mut bucket = Some(&self.heads[place]);
        std::iter::from_fn(move || {
            let here = bucket?;
            bucket = self.by_number(here.next());
            Some(here)
        })
    }

    fn by_number(&self, number: u64) -> Option<&Bucket> {
        let index = u32::try_from(number).ok()?.checked_sub(1)?;
        let chunk = (index / FIRST_CHUNK + 1).ilog2();
        let first = FIRST_CHUNK * ((1 << chunk) - 1);
        self.chunks[chunk as usize]
            .get()?
            .get((index - first) as usize)
    }

    /// Puts an item into a free place of a locked chain, a new bucket if need be.
    pub fn insert(&self, place: usize, item: u64) {
        let mut last = &self.heads[place];
        for bucket in self.chain(place) {
            for free in &bucket.items {
                if free.load(Ordering::SeqCst) == 0 {
                    free.store(item, Ordering::SeqCst);
                    return;
                }
            }
            last = bucket;
        }
        let index = self.chained.fetch_add(1, Ordering::SeqCst);
        let chunk = (index / FIRST_CHUNK + 1).ilog2();
        // 26 chunks hold 2^30 buckets; a table doubles long before one in eight of its buckets is a
        // chained one.
        let chunk = &self.chunks[chunk as usize];
        let size = FIRST_CHUNK << (index / FIRST_CHUNK + 1).ilog2();
        chunk.get_or_init(|| buckets(size as usize));
        if let Some(bucket) = self.by_number(u64::from(index) + 1) {
            bucket.items[0].store(item, Ordering::SeqCst);
            last.set_next(index + 1);
        }
    }
}

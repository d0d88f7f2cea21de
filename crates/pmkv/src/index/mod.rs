//! A shard's index in DRAM: where the newest entry of each key lies (rowan §5.3).
//!
//! An item is one word: 16 bits of the key's hash and the entry's address. Keys are not kept: who
//! asks brings a function that reads an address and returns whether the entry there is the key's.
//! Buckets are chained; readers take no lock, writers lock one chain. The table doubles while it is
//! used: every update moves a few chains, in their order.
//!
//! **Readers.** An entry may be moved by cleaning and its segment be used again while a reader
//! reads it. So what was read counts only if the item is still the same word after the entry was
//! read whole, and entries have checksums. A chain that moved meanwhile is read again in the next
//! table.

mod table;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use cyclone_pmem::prefetch;
use table::{ITEMS, MIN_BITS, Table};

/// Addresses have this many bits; 0 is none.
//= rowan §5.3
pub const ADDRESS_BITS: u32 = 48;
const ADDRESS: u64 = (1 << ADDRESS_BITS) - 1;

/// Chains moved with each update while the table doubles: two would do, since one update adds one
/// item at most.
const MOVES: usize = 4;

/// The most buckets are 2^this.
const MAX_BITS: u32 = 30;

fn item(hash: u64, address: u64) -> u64 {
    hash << ADDRESS_BITS | (address & ADDRESS)
}

fn same_tag(item: u64, hash: u64) -> bool {
    item != 0 && item >> ADDRESS_BITS == hash & 0xffff
}

/// What became of an update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Updated {
    /// The key was not there.
    Inserted,
    /// It was, at this address.
    Replaced(u64),
    /// What is there is as new or newer: nothing was done. Its address.
    Omitted(u64),
}

/// The result of reading an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Looked<T> {
    /// It is another key's.
    Other,
    /// It is the key's.
    Mine(T),
    /// It is not whole. If it still counts after it was read it is damaged, and may be the key's.
    Damaged,
}

struct Tables {
    current: Arc<Table>,
    /// Twice as large, while items move there.
    next: Option<Arc<Table>>,
}

/// Where the newest entry of each key of a shard lies.
pub struct Index {
    tables: RwLock<Tables>,
    items: AtomicU64,
    /// The first chain that is not being moved yet, and how many have moved.
    to_move: AtomicUsize,
    moved: AtomicUsize,
}

impl Default for Index {
    fn default() -> Index {
        Index {
            tables: RwLock::new(Tables {
                current: Arc::new(Table::new(MIN_BITS)),
                next: None,
            }),
            items: AtomicU64::new(0),
            to_move: AtomicUsize::new(0),
            moved: AtomicUsize::new(0),
        }
    }
}

impl Index {
    /// How many keys there are, deleted ones that are still remembered included.
    pub fn len(&self) -> u64 {
        self.items.load(Ordering::SeqCst)
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn read(&self) -> RwLockReadGuard<'_, Tables> {
        self.tables.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Finds a key. `look` reads the entry at an address and answers something if it is the key's
    /// and whole.
    pub fn lookup<T>(&self, hash: u64, mut look: impl FnMut(u64) -> Option<T>) -> Option<T> {
        let looked = self.lookup_whole(hash, |address| {
            look(address).map_or(Looked::Other, Looked::Mine)
        });
        looked.ok().flatten()
    }

    /// Finds a key whose entry `look` reads.
    ///
    /// # Errors
    /// It was not found, and the entry at this address, which is damaged, may be its.
    pub fn lookup_whole<T>(
        &self,
        hash: u64,
        mut look: impl FnMut(u64) -> Looked<T>,
    ) -> Result<Option<T>, u64> {
        let tables = self.read();
        let mut table = &tables.current;
        'again: loop {
            let mut damaged = None;
            let place = table.place(hash);
            let head = table.head(place);
            if head.is_moved()
                && let Some(next) = &tables.next
            {
                table = next;
                continue;
            }
            for bucket in table.chain(place) {
                for word in &bucket.items {
                    let found = word.load(Ordering::SeqCst);
                    if !same_tag(found, hash) {
                        continue;
                    }
                    let looked = look(found & ADDRESS);
                    if word.load(Ordering::SeqCst) != found {
                        continue 'again;
                    }
                    match looked {
                        Looked::Mine(mine) if !head.is_moved() => return Ok(Some(mine)),
                        Looked::Damaged => damaged = Some(found & ADDRESS),
                        _ => {}
                    }
                }
            }
            if !head.is_moved() {
                return damaged.map_or(Ok(None), Err);
            }
        }
    }

    /// Asks for the bucket of a hash to be brought into the caches.
    pub fn prefetch(&self, hash: u64) {
        let tables = self.read();
        prefetch(tables.current.head(tables.current.place(hash)));
    }

    /// Where the entry of a key with this hash may lie, by what its first bucket says; it may miss
    /// some and name others.
    pub fn guess(&self, hash: u64, mut guessed: impl FnMut(u64)) {
        let tables = self.read();
        let bucket = tables.current.head(tables.current.place(hash));
        let words = bucket.items.iter().map(|word| word.load(Ordering::Relaxed));
        for word in words.filter(|word| same_tag(*word, hash)) {
            guessed(word & ADDRESS);
        }
    }

    /// Runs `work` on the locked chain of a hash.
    fn locked<T>(&self, hash: u64, work: impl FnOnce(&Table, usize) -> T) -> T {
        let tables = self.read();
        let mut table = &tables.current;
        loop {
            let place = table.place(hash);
            if table.head(place).lock() {
                let answer = work(table, place);
                table.head(place).unlock();
                return answer;
            }
            // Moved: there is a next table for as long as this one is the current.
            if let Some(next) = &tables.next {
                table = next;
            }
        }
    }

    /// Points a key at a new entry, unless it points at one whose version is as high already.
    /// `version_at` tells the version of the entry at an address if it is the key's; `hash_at` the
    /// hash of the key of the entry at an address.
    //= rowan §5.3
    pub fn update(
        &self,
        hash: u64,
        address: u64,
        version: u64,
        version_at: impl Fn(u64) -> Option<u64>,
        hash_at: impl Fn(u64) -> Option<u64>,
    ) -> Updated {
        let updated = self.locked(hash, |table, place| {
            for word in table.chain(place).flat_map(|bucket| &bucket.items) {
                let found = word.load(Ordering::SeqCst);
                if !same_tag(found, hash) {
                    continue;
                }
                let Some(there) = version_at(found & ADDRESS) else {
                    continue;
                };
                if there >= version {
                    return Updated::Omitted(found & ADDRESS);
                }
                word.store(item(hash, address), Ordering::SeqCst);
                return Updated::Replaced(found & ADDRESS);
            }
            table.insert(place, item(hash, address));
            Updated::Inserted
        });
        if updated == Updated::Inserted {
            self.items.fetch_add(1, Ordering::SeqCst);
        }
        self.grow(hash_at);
        updated
    }

    /// Fills an index that is not in use yet: `count` keys, each once, best in order of their
    /// hashes.
    pub fn fill(&self, count: usize, items: impl Iterator<Item = (u64, u64)>) {
        let mut bits = MIN_BITS;
        while (count > (1 << bits) * ITEMS / 4 * 3) && bits < MAX_BITS {
            bits += 1;
        }
        let table = Table::new(bits);
        let mut filled = 0;
        for (hash, address) in items {
            table.insert(table.place(hash), item(hash, address));
            filled += 1;
        }
        let mut tables = self.tables.write().unwrap_or_else(PoisonError::into_inner);
        *tables = Tables {
            current: Arc::new(table),
            next: None,
        };
        self.items.store(filled, Ordering::SeqCst);
    }

    /// Points the key that points at `old` at `new`; `false` if none does any more.
    pub fn relocate(&self, hash: u64, old: u64, new: u64) -> bool {
        self.exchange(hash, old, item(hash, new))
    }

    /// Forgets the key that points at `address`; `false` if none does any more.
    pub fn remove(&self, hash: u64, address: u64) -> bool {
        let removed = self.exchange(hash, address, 0);
        if removed {
            self.items.fetch_sub(1, Ordering::SeqCst);
        }
        removed
    }

    fn exchange(&self, hash: u64, old: u64, new: u64) -> bool {
        self.locked(hash, |table, place| {
            let mut words = table.chain(place).flat_map(|bucket| &bucket.items);
            let word = words.find(|word| word.load(Ordering::SeqCst) == item(hash, old));
            if let Some(word) = word {
                word.store(new, Ordering::SeqCst);
            }
            word.is_some()
        })
    }

    /// Adds the addresses of the chain where `from` belongs to `addresses`; answers the lowest hash
    /// of the next chain, `None` after the last one. Hashes of one chain are below it, in no order.
    /// What is moved meanwhile is not missed.
    pub fn collect(&self, from: u64, addresses: &mut Vec<u64>) -> Option<u64> {
        let tables = self.read();
        let mut table = &tables.current;
        let before = addresses.len();
        loop {
            let place = table.place(from);
            let head = table.head(place);
            if !head.is_moved() {
                for word in table.chain(place).flat_map(|bucket| &bucket.items) {
                    let found = word.load(Ordering::SeqCst);
                    if found != 0 {
                        addresses.push(found & ADDRESS);
                    }
                }
            }
            if !head.is_moved() {
                let next = (place as u64 + 1) << (63 - (table.bits() - 1));
                return (place + 1 < table.heads()).then_some(next);
            }
            addresses.truncate(before);
            if let Some(next) = &tables.next {
                table = next;
            }
        }
    }

    /// Begins to double where it is due, and moves some chains where it has begun.
    fn grow(&self, hash_at: impl Fn(u64) -> Option<u64>) {
        let finished = {
            let tables = self.read();
            let Some(next) = &tables.next else {
                let current = &tables.current;
                let full = (current.heads() * ITEMS / 4 * 3) as u64;
                if self.len() <= full || current.bits() >= MAX_BITS {
                    return;
                }
                drop(tables);
                return self.begin();
            };
            (0..MOVES).any(|_| self.move_one(&tables.current, next, &hash_at))
        };
        if finished {
            self.finish();
        }
    }

    fn begin(&self) {
        let mut tables = self.tables.write().unwrap_or_else(PoisonError::into_inner);
        if tables.next.is_none() {
            self.to_move.store(0, Ordering::SeqCst);
            self.moved.store(0, Ordering::SeqCst);
            tables.next = Some(Arc::new(Table::new(tables.current.bits() + 1)));
        }
    }

    /// Moves the next chain; returns whether it was the last that was missing.
    fn move_one(&self, from: &Table, to: &Table, hash_at: impl Fn(u64) -> Option<u64>) -> bool {
        let place = self.to_move.fetch_add(1, Ordering::SeqCst);
        if place >= from.heads() {
            return false;
        }
        let head = from.head(place);
        if head.lock() {
            for word in from.chain(place).flat_map(|bucket| &bucket.items) {
                let found = word.load(Ordering::SeqCst);
                if found == 0 {
                    continue;
                }
                // An entry that cannot be read goes to both: nothing that may be needed is lost.
                let places = match hash_at(found & ADDRESS) {
                    Some(hash) => to.place(hash)..=to.place(hash),
                    None => place * 2..=place * 2 + 1,
                };
                for place in places {
                    // No other thread comes here before the chain is marked as moved.
                    to.insert(place, found);
                }
            }
            head.leave();
        }
        self.moved.fetch_add(1, Ordering::SeqCst) + 1 == from.heads()
    }

    fn finish(&self) {
        let mut tables = self.tables.write().unwrap_or_else(PoisonError::into_inner);
        if self.moved.load(Ordering::SeqCst) == tables.current.heads()
            && let Some(next) = tables.next.take()
        {
            tables.current = next;
        }
    }
}

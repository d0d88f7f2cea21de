//! What all threads of a server share: memory, the shards' indexes, the space.

use std::cell::Cell;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use cyclone_replication::BackupMemory;

use crate::configuration::{KeyHash, ShardId, shard_of_slot};
use crate::entry::{Entry, Header, Kind, MAX_VERSION};
use crate::heap::{Heap, Object};
use crate::index::{Index, Updated};
use crate::rebuild::Restored;
use crate::space::Space;

/// A promoted primary's versions begin so far above all that it has seen: what a deposed primary
/// has in flight, and no other replica has ever seen, stays below.
pub const VERSION_GAP: u64 = 1 << 20;

/// A shard, as a server knows it.
#[derive(Default)]
pub struct Shard {
    /// Where its objects lie.
    pub index: Index,
    objects: AtomicI64,
    newest: AtomicU64,
    commit: AtomicU64,
}

impl Shard {
    /// Keys that have a value.
    pub fn objects(&self) -> u64 {
        self.objects.load(Ordering::SeqCst).max(0) as u64
    }

    /// The highest version seen.
    pub fn newest(&self) -> u64 {
        self.newest.load(Ordering::SeqCst)
    }

    /// Takes note of a version.
    pub fn saw(&self, version: u64) {
        self.newest
            .fetch_max(version.min(MAX_VERSION), Ordering::SeqCst);
    }

    /// Entries up to this version are on every replica (CommitVer).
    //= rowan §4.4
    pub fn commit(&self) -> u64 {
        self.commit.load(Ordering::SeqCst)
    }

    /// Takes note of a CommitVer: that version was given, even if no entry that has it is left.
    pub fn committed(&self, version: u64) {
        self.saw(version);
        self.commit.fetch_max(version, Ordering::SeqCst);
    }
}

/// An entry that the index points at and that is not whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the entry at {address:#x} of shard {shard} is damaged")]
pub struct Damaged {
    /// The shard.
    pub shard: ShardId,
    /// Where it lies.
    pub address: u64,
}

/// What all threads of a server share.
pub struct Store {
    heap: Heap,
    shards: Vec<Shard>,
    space: Space,
    damaged: AtomicU64,
}

impl Store {
    /// Over a table's segments, with empty indexes.
    pub fn new(table: &BackupMemory, shards: u16) -> Store {
        Store {
            heap: Heap::new(table),
            shards: (0..shards).map(|_| Shard::default()).collect(),
            space: Space::default(),
            damaged: AtomicU64::new(0),
        }
    }

    /// How often a damaged entry was met.
    pub fn damaged(&self) -> u64 {
        self.damaged.load(Ordering::Relaxed)
    }

    pub(crate) fn met(&self, shard: ShardId, address: u64) -> Damaged {
        self.damaged.fetch_add(1, Ordering::Relaxed);
        Damaged { shard, address }
    }

    /// The memory.
    pub fn heap(&self) -> &Heap {
        &self.heap
    }

    /// The space.
    pub fn space(&self) -> &Space {
        &self.space
    }

    /// A shard; `None` for a number that there is not.
    pub fn shard(&self, id: ShardId) -> Option<&Shard> {
        self.shards.get(usize::from(id))
    }

    /// How many shards there are.
    pub fn shards(&self) -> u16 {
        self.shards.len() as u16
    }

    /// The shard of a slot.
    pub fn shard_of(&self, slot: u16) -> ShardId {
        shard_of_slot(slot, self.shards())
    }

    /// The newest entry of a key, a tombstone too.
    ///
    /// # Errors
    /// It may be a damaged one.
    pub fn look(&self, id: ShardId, hash: u64, key: &[u8]) -> Result<Option<Object>, Damaged> {
        let Some(shard) = self.shard(id) else {
            return Ok(None);
        };
        let look = || {
            let whole = |address| self.heap.look(address, key);
            shard.index.lookup_whole(hash, whole)
        };
        // Once more: its place may have been given away, and to the same key again, while it was
        // read.
        look()
            .or_else(|_| look())
            .map_err(|address| self.met(id, address))
    }

    /// As [`Store::look`], for tools and tests: a damaged entry is none.
    pub fn find(&self, shard: ShardId, hash: u64, key: &[u8]) -> Option<Object> {
        self.look(shard, hash, key).ok().flatten()
    }

    /// A key's value, for tools and tests: a damaged one is none.
    pub fn get(&self, key: &[u8]) -> Option<Vec<u8>> {
        let KeyHash { slot, hash } = KeyHash::of(key);
        self.value(self.shard_of(slot), hash, key).ok().flatten()
    }

    /// The value of a key whose shard and hash are known.
    ///
    /// # Errors
    /// It may be a damaged one.
    pub fn value(&self, shard: ShardId, hash: u64, key: &[u8]) -> Result<Option<Vec<u8>>, Damaged> {
        let object = self.look(shard, hash, key)?;
        let value = object.filter(|it| it.kind() == Kind::Put);
        Ok(value.map(Object::into_value))
    }

    /// Brings what is read to publish these keys, or to find their entries, into the caches: all
    /// side by side, where one key after the other would wait for each. By shard and hash.
    pub fn bring(&self, keys: impl Iterator<Item = (ShardId, u64)> + Clone) {
        for (shard, hash) in keys.clone() {
            if let Some(shard) = self.shard(shard) {
                shard.index.prefetch(hash);
            }
        }
        for (shard, hash) in keys {
            if let Some(shard) = self.shard(shard) {
                shard
                    .index
                    .guess(hash, |address| self.heap.prefetch(address));
            }
        }
    }

    /// Points a key at an entry, unless a newer one is known. Returns whether it does now.
    pub fn publish(&self, address: u64, header: &Header, key: &[u8]) -> bool {
        let Some(shard) = self.shard(header.stamp.shard) else {
            return false;
        };
        let hash = KeyHash::hash_of(key);
        shard.saw(header.stamp.version);
        let old: Cell<Option<Header>> = Cell::new(None);
        let version = header.stamp.version;
        let version_at = |at: u64| {
            old.set(self.heap.header_of(at, key));
            let known = old.get()?.stamp.version;
            // A damaged entry hides no whole one, whatever its version is now.
            let hides = known < version || self.heap.object(at).is_some();
            Some(if hides { known } else { 0 })
        };
        let updated = shard
            .index
            .update(hash, address, version, version_at, |at| {
                self.heap.hash_at(at)
            });
        let had = match updated {
            Updated::Omitted(_) => return false,
            Updated::Inserted => false,
            Updated::Replaced(at) => {
                let old = old.get();
                if let Some(old) = old {
                    self.heap.count(at, old.len(), false);
                }
                old.is_some_and(|old| old.kind == Kind::Put)
            }
        };
        self.heap.count(address, header.len(), true);
        let change = i64::from(header.kind == Kind::Put) - i64::from(had);
        shard.objects.fetch_add(change, Ordering::SeqCst);
        true
    }

    /// Publishes every entry of a record that is known to be whole and lies at an address.
    pub fn publish_record(&self, address: u64, record: &[u8]) {
        if let Ok(entry) = Entry::parse(record) {
            for (at, member) in entry.members() {
                self.publish(address + at as u64, &member.header, member.key);
            }
        }
    }

    /// Points a key that points at `old` at a copy of the same entry.
    pub fn relocate(&self, old: u64, new: u64, header: &Header, key: &[u8]) -> bool {
        let Some(shard) = self.shard(header.stamp.shard) else {
            return false;
        };
        let moved = shard.index.relocate(KeyHash::hash_of(key), old, new);
        if moved {
            self.heap.count(old, header.len(), false);
            let len = self.heap.header(new).map_or(header.len(), |it| it.len());
            self.heap.count(new, len, true);
        }
        moved
    }

    /// Whether the index points at this entry.
    pub fn is_live(&self, address: u64, header: &Header, key: &[u8]) -> bool {
        let shard = self.shard(header.stamp.shard);
        let here = |at| (at == address).then_some(());
        shard.is_some_and(|it| it.index.lookup(KeyHash::hash_of(key), here).is_some())
    }

    /// Forgets a key whose tombstone is no longer needed.
    pub fn forget(&self, address: u64, header: &Header, key: &[u8]) -> bool {
        let shard = self.shard(header.stamp.shard);
        let gone = shard.is_some_and(|it| it.index.remove(KeyHash::hash_of(key), address));
        if gone {
            self.heap.count(address, header.len(), false);
        }
        gone
    }

    /// Gives a shard that has nothing what a rebuild has found: by key its newest entry, in order
    /// of hashes.
    pub(crate) fn fill(&self, id: ShardId, entries: &[Restored]) {
        let Some(shard) = self.shard(id) else {
            return;
        };
        let items = entries.iter().map(|it| (it.hash, it.address()));
        shard.index.fill(entries.len(), items);
        let mut objects = 0;
        for entry in entries {
            self.heap
                .count_bytes(entry.address(), entry.block_bytes(), true);
            objects += i64::from(entry.is_put());
        }
        shard.objects.store(objects, Ordering::SeqCst);
    }

    /// Forgets everything of a shard.
    pub fn clear(&self, id: ShardId) {
        let Some(shard) = self.shard(id) else {
            return;
        };
        let (mut addresses, mut at) = (Vec::new(), Some(0));
        while let Some(hash) = at {
            addresses.clear();
            at = shard.index.collect(hash, &mut addresses);
            for &address in &addresses {
                let (Some(hash), Some(header)) =
                    (self.heap.hash_at(address), self.heap.header(address))
                else {
                    continue;
                };
                if shard.index.remove(hash, address) {
                    self.heap.count(address, header.len(), false);
                }
            }
        }
        // What is damaged names no key that it could be removed by.
        shard.index.fill(0, std::iter::empty());
        shard.objects.store(0, Ordering::SeqCst);
        shard.commit.store(0, Ordering::SeqCst);
    }
}

//! What all threads of a server share: memory, the shards' indexes, the space.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use cyclone_replication::BackupMemory;

use crate::configuration::{KeyHash, ShardId, shard_of_slot};
use crate::entry::{self, Entry, Header, Kind, MAX_VERSION, Stamp};
use crate::heap::{Heap, Object};
use crate::index::{Index, Updated};
use crate::rebuild::Restored;
use crate::space::Space;

/// A promoted primary's versions begin so far above all that it has seen: what a deposed primary has under way, and no
/// other replica has ever seen, stays below.
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

    /// Takes note of a CommitVer.
    pub fn committed(&self, version: u64) {
        self.commit.fetch_max(version, Ordering::SeqCst);
    }
}

/// A page of a walk.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Page {
    /// Keys that have a value.
    pub keys: Vec<Vec<u8>>,
    /// Where the next page begins, a hash; `None` after the last.
    pub next: Option<u64>,
}

/// What all threads of a server share.
pub struct Store {
    heap: Heap,
    shards: Vec<Shard>,
    space: Space,
}

impl Store {
    /// Over a table's segments, with empty indexes.
    pub fn new(table: &BackupMemory, shards: u16) -> Store {
        Store {
            heap: Heap::new(table),
            shards: (0..shards).map(|_| Shard::default()).collect(),
            space: Space::default(),
        }
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
    pub fn find(&self, shard: ShardId, hash: u64, key: &[u8]) -> Option<Object> {
        let shard = self.shard(shard)?;
        shard
            .index
            .lookup(hash, |address| self.heap.object_of(address, key))
    }

    /// A key's value.
    pub fn get(&self, key: &[u8]) -> Option<Vec<u8>> {
        let KeyHash { slot, hash } = KeyHash::of(key);
        self.value(self.shard_of(slot), hash, key)
    }

    /// The value of a key whose shard and hash are known.
    pub fn value(&self, shard: ShardId, hash: u64, key: &[u8]) -> Option<Vec<u8>> {
        let object = self.find(shard, hash, key)?;
        (object.kind() == Kind::Put).then(|| object.into_value())
    }

    /// Brings what is looked at to publish these keys, or to find their entries, into the caches: all side by side, where one key after the
    /// other would wait for each. By shard and hash.
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

    /// Points a key at an entry, unless a newer one is known. Answers whether it does now.
    pub fn publish(&self, address: u64, header: &Header, key: &[u8]) -> bool {
        let Some(shard) = self.shard(header.stamp.shard) else {
            return false;
        };
        let hash = KeyHash::hash_of(key);
        shard.saw(header.stamp.version);
        let old: Cell<Option<Header>> = Cell::new(None);
        let version_at = |at: u64| {
            old.set(self.heap.header_of(at, key));
            old.get().map(|it| it.stamp.version)
        };
        let updated = shard
            .index
            .update(hash, address, header.stamp.version, version_at, |at| {
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

    /// Gives a shard that has nothing what a rebuild has found: by key its newest entry, in order of hashes.
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
        shard.objects.store(0, Ordering::SeqCst);
        shard.commit.store(0, Ordering::SeqCst);
    }

    /// Keys of a shard that have a value, from a hash on: whole chains, until there are `count`.
    pub fn page(&self, shard: ShardId, from: u64, count: usize) -> Page {
        let mut page = Page::default();
        let Some(shard) = self.shard(shard) else {
            return page;
        };
        let mut objects = Vec::new();
        let mut at = Some(from);
        while let Some(hash) = at.filter(|_| page.keys.len() < count.max(1)) {
            at = self.chain(shard, hash, |_| true, |_| true, &mut objects);
            let wanted = objects.iter().filter(|object| {
                let here = KeyHash::hash_of(object.key());
                object.kind() == Kind::Put && here >= from
            });
            page.keys.extend(wanted.map(|object| object.key().to_vec()));
        }
        page.next = at;
        page
    }

    /// The entries of one chain, and where the next begins; not those that their addresses rule out. Entries that are moved while they
    /// are read are looked for again.
    fn chain(
        &self,
        shard: &Shard,
        hash: u64,
        is_there: impl Fn(u64) -> bool,
        is_wanted: impl Fn(Stamp) -> bool,
        objects: &mut Vec<Object>,
    ) -> Option<u64> {
        let (mut addresses, mut again, mut there) = (Vec::new(), Vec::new(), Vec::new());
        loop {
            objects.clear();
            addresses.clear();
            let next = shard.index.collect(hash, &mut addresses);
            there.clear();
            there.extend(addresses.iter().copied().filter(|&it| is_there(it)));
            there.iter().for_each(|&it| self.heap.prefetch(it));
            // Most are not wanted where few are new: their headers say so.
            let is_wanted = |&&address: &&u64| {
                let header = self.heap.header(address);
                header.is_some_and(|it| is_wanted(it.stamp))
            };
            let wanted = there.iter().filter(is_wanted);
            objects.extend(wanted.filter_map(|&address| self.heap.object(address)));
            again.clear();
            shard.index.collect(hash, &mut again);
            // An entry that stays unreadable is not moved, it is damaged: the walk goes on without it.
            if again == addresses {
                return next;
            }
        }
    }

    /// Entries of a shard up to a version, each by itself, from a hash on: whole chains, until there are so many bytes. And the hash that is
    /// next; `None` after the last.
    pub fn stretch(
        &self,
        shard: ShardId,
        from: u64,
        version: u64,
        most_bytes: usize,
    ) -> (Vec<Vec<u8>>, Option<u64>) {
        let (mut entries, mut bytes) = (Vec::new(), 0);
        let Some(it) = self.shard(shard) else {
            return (entries, None);
        };
        let mut objects = Vec::new();
        let mut at = Some(from);
        while let Some(hash) = at.filter(|_| bytes < most_bytes) {
            let is_wanted = |stamp: Stamp| stamp.shard == shard && stamp.version <= version;
            at = self.chain(it, hash, |_| true, is_wanted, &mut objects);
            for object in objects.iter().filter(|it| is_wanted(it.stamp())) {
                bytes += object.bytes().len();
                entries.push(object.bytes().to_vec());
            }
        }
        (entries, at)
    }

    /// What a shard has above a version and is not known to be on every replica, as records: what was written as one and is the newest of
    /// its keys still stays one, so that a replica that takes over has all of it or nothing. In order of versions.
    pub fn newer(&self, shard: ShardId, version: u64) -> Vec<Vec<u8>> {
        let is_there = |address| !self.heap.is_settled(address);
        let Some(it) = self.shard(shard) else {
            return Vec::new();
        };
        let mut batches: BTreeMap<u64, BTreeMap<u64, Vec<u8>>> = BTreeMap::new();
        let mut objects = Vec::new();
        let mut at = Some(0);
        while let Some(hash) = at {
            let is_newer = |stamp: Stamp| stamp.shard == shard && stamp.version > version;
            at = self.chain(it, hash, is_there, is_newer, &mut objects);
            // What was read may have been another entry by then.
            for object in objects.iter().filter(|it| is_newer(it.stamp())) {
                let batch = batches.entry(object.header().batch()).or_default();
                batch.insert(object.stamp().version, object.bytes().to_vec());
            }
        }
        let record = |(first, entries): (u64, BTreeMap<u64, Vec<u8>>)| {
            let mut entries: Vec<Vec<u8>> = entries.into_values().collect();
            if entries.len() == 1 {
                return entries.pop().unwrap_or_default();
            }
            let first = Stamp {
                version: first,
                shard,
            };
            let mut record = Vec::new();
            entry::encode_whole(first, &entries, &mut record);
            record
        };
        batches.into_iter().map(record).collect()
    }
}

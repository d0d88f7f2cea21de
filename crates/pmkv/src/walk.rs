//! Walks over a shard's entries in order of hashes, chain after chain of its index: a few at a
//! time, so that no request waits for long. What is moved meanwhile is not missed.

use std::collections::BTreeMap;

use crate::configuration::{KeyHash, ShardId};
use crate::entry::{self, Kind, Stamp};
use crate::heap::Object;
use crate::store::{Damaged, Shard, Store};

/// How far a page of a walk goes; the chain that it ends with is in it as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Keys.
    pub keys: usize,
    /// Bytes of keys, or of what else is read.
    pub bytes: usize,
    /// Chains visited.
    pub chains: usize,
}

/// A page of a walk.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Page {
    /// Keys that have a value.
    pub keys: Vec<Vec<u8>>,
    /// Where the next page begins, a hash; `None` after the last.
    pub next: Option<u64>,
    /// Chains visited.
    pub chains: usize,
    /// Bytes of the keys.
    pub bytes: usize,
}

/// How far values were visited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Visited {
    /// Where it goes on, a hash; `None` after the last.
    pub next: Option<u64>,
    /// Chains visited.
    pub chains: usize,
    /// Bytes of the entries.
    pub bytes: usize,
}

/// Which entries of a chain are read.
struct Wanted<A, S> {
    /// By their addresses.
    is_there: A,
    /// By what their headers say, which are not checked.
    is_wanted: S,
}

impl Store {
    /// Keys of a shard that have a value, from a hash on. Their values are not read.
    pub fn page(&self, shard: ShardId, from: u64, bounds: Bounds) -> Page {
        let mut page = Page::default();
        let Some(shard) = self.shard(shard) else {
            return page;
        };
        let mut keys = Vec::new();
        page.next = Some(from);
        while let Some(hash) = page.next
            && page.keys.len() < bounds.keys.max(1)
            && page.bytes < bounds.bytes.max(1)
            && page.chains < bounds.chains.max(1)
        {
            let next = self.keys_of_chain(shard, hash, &mut keys);
            page.next = next;
            page.chains += 1;
            for key in keys.drain(..) {
                let here = KeyHash::hash_of(&key);
                // A key that does not belong here is damaged.
                if here >= from && next.is_none_or(|next| here < next) {
                    page.bytes += key.len();
                    page.keys.push(key);
                }
            }
        }
        page
    }

    /// The keys of one chain, and where the next begins.
    fn keys_of_chain(&self, shard: &Shard, hash: u64, keys: &mut Vec<Vec<u8>>) -> Option<u64> {
        let heap = self.heap();
        let (mut addresses, mut again) = (Vec::new(), Vec::new());
        loop {
            keys.clear();
            addresses.clear();
            let next = shard.index.collect(hash, &mut addresses);
            addresses.iter().for_each(|&it| heap.prefetch(it));
            keys.extend(addresses.iter().filter_map(|&it| heap.key_of_value(it)));
            again.clear();
            shard.index.collect(hash, &mut again);
            if again == addresses {
                return next;
            }
        }
    }

    /// Shows the values of a shard from a hash on, until so many chains were visited or bytes read.
    ///
    /// # Errors
    /// The first damaged entry.
    pub fn visit(
        &self,
        id: ShardId,
        from: u64,
        bounds: Bounds,
        mut found: impl FnMut(&Object),
    ) -> Result<Visited, Damaged> {
        let mut visited = Visited {
            next: None,
            chains: 0,
            bytes: 0,
        };
        let Some(shard) = self.shard(id) else {
            return Ok(visited);
        };
        let (mut objects, mut damaged) = (Vec::new(), None);
        visited.next = Some(from);
        let all = Wanted {
            is_there: |_| true,
            is_wanted: |_| true,
        };
        while let Some(hash) = visited.next
            && visited.chains < bounds.chains.max(1)
            && visited.bytes < bounds.bytes.max(1)
        {
            visited.next = self.chain(shard, hash, &all, &mut objects, &mut damaged);
            visited.chains += 1;
            if let Some(address) = damaged {
                return Err(self.met(id, address));
            }
            for object in objects.iter().filter(|it| it.kind() == Kind::Put) {
                visited.bytes += object.bytes().len();
                found(object);
            }
        }
        Ok(visited)
    }

    /// The wanted entries of one chain, and where the next begins; the address of one that is
    /// damaged. Entries that are moved while they are read are looked for again.
    fn chain(
        &self,
        shard: &Shard,
        hash: u64,
        wanted: &Wanted<impl Fn(u64) -> bool, impl Fn(Stamp) -> bool>,
        objects: &mut Vec<Object>,
        damaged: &mut Option<u64>,
    ) -> Option<u64> {
        let heap = self.heap();
        let (mut addresses, mut again, mut there) = (Vec::new(), Vec::new(), Vec::new());
        loop {
            objects.clear();
            addresses.clear();
            let mut unread = None;
            let next = shard.index.collect(hash, &mut addresses);
            there.clear();
            there.extend(
                addresses
                    .iter()
                    .copied()
                    .filter(|&it| (wanted.is_there)(it)),
            );
            there.iter().for_each(|&it| heap.prefetch(it));
            for &address in &there {
                // Most are not wanted where few are new: their headers say so.
                let header = heap.header(address);
                if header.is_some_and(|it| !(wanted.is_wanted)(it.stamp)) {
                    continue;
                }
                match heap.object(address) {
                    Some(object) => objects.push(object),
                    None => unread = Some(address),
                }
            }
            again.clear();
            shard.index.collect(hash, &mut again);
            // An entry that stays unreadable is not moved, it is damaged.
            if again == addresses {
                *damaged = damaged.or(unread);
                return next;
            }
        }
    }

    /// Entries of a shard up to a version, each separately, from a hash on: whole chains, until
    /// there are so many bytes. And the hash that is next; `None` after the last.
    ///
    /// # Errors
    /// One of them is damaged: what a copy is made of must be whole.
    pub fn stretch(
        &self,
        id: ShardId,
        from: u64,
        version: u64,
        most_bytes: usize,
    ) -> Result<(Vec<Vec<u8>>, Option<u64>), Damaged> {
        let (mut entries, mut bytes) = (Vec::new(), 0);
        let Some(shard) = self.shard(id) else {
            return Ok((entries, None));
        };
        let (mut objects, mut damaged) = (Vec::new(), None);
        let mut at = Some(from);
        // Nearly all are wanted: they are checked before it is believed that one is not.
        let all = Wanted {
            is_there: |_| true,
            is_wanted: |_| true,
        };
        while let Some(hash) = at.filter(|_| bytes < most_bytes) {
            at = self.chain(shard, hash, &all, &mut objects, &mut damaged);
            if let Some(address) = damaged {
                return Err(self.met(id, address));
            }
            let is_wanted = |stamp: Stamp| stamp.shard == id && stamp.version <= version;
            for object in objects.iter().filter(|it| is_wanted(it.stamp())) {
                bytes += object.bytes().len();
                entries.push(object.bytes().to_vec());
            }
        }
        Ok((entries, at))
    }

    /// What a shard has above a version and is not known to be on every replica, as records: what
    /// was written as one and is the newest of its keys still stays one, so that a replica that
    /// takes over has all of it or nothing. In order of versions. And a damaged entry that may have
    /// been one of them: other replicas have it too if its client was answered.
    pub fn newer(&self, id: ShardId, version: u64) -> (Vec<Vec<u8>>, Option<Damaged>) {
        let Some(shard) = self.shard(id) else {
            return (Vec::new(), None);
        };
        let is_newer = |stamp: Stamp| stamp.shard == id && stamp.version > version;
        let wanted = Wanted {
            is_there: |address| !self.heap().is_settled(address),
            is_wanted: is_newer,
        };
        let mut batches: BTreeMap<u64, BTreeMap<u64, Vec<u8>>> = BTreeMap::new();
        let (mut objects, mut damaged) = (Vec::new(), None);
        let mut at = Some(0);
        while let Some(hash) = at {
            at = self.chain(shard, hash, &wanted, &mut objects, &mut damaged);
            // What was read may have been another entry by then.
            for object in objects.iter().filter(|it| is_newer(it.stamp())) {
                let batch = batches.entry(object.header().batch()).or_default();
                batch.insert(object.stamp().version, object.without_note());
            }
        }
        let record = |(first, entries): (u64, BTreeMap<u64, Vec<u8>>)| {
            let mut entries: Vec<Vec<u8>> = entries.into_values().collect();
            if entries.len() == 1 {
                return entries.pop().unwrap_or_default();
            }
            let first = Stamp {
                version: first,
                shard: id,
            };
            let mut record = Vec::new();
            entry::encode_whole(first, &entries, &mut record);
            record
        };
        let damaged = damaged.map(|address| self.met(id, address));
        (batches.into_iter().map(record).collect(), damaged)
    }
}

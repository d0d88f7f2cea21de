//! The indexes of a server that starts over the memory of its last life (rowan §4.7).
//!
//! Every segment is read once, in order of address, and nothing is looked up meanwhile: what is
//! found becomes 24 bytes by shard. Each shard's findings are then sorted by hash; the newest of
//! each key goes into a table of the right size, bucket after bucket. So a core waits for memory
//! only where a key has several versions. The price is 24 bytes for each entry that lies in the
//! memory, dead ones too, until the shards are filled.

use std::sync::{Mutex, PoisonError};

use cyclone_replication::frame::{ALIGN_BYTES, block_bytes};
use cyclone_replication::{BackupMemory, ReplicationError, SegmentState};

use crate::checkpoint::Start;
use crate::configuration::{KeyHash, ShardId};
use crate::digest::{Digested, note_commits, records_of};
use crate::discarded_copy::Voids;
use crate::entry::{Entry, Kind, MAX_VERSION};
use crate::store::Store;
use crate::words::WordMap;

/// How many entries ahead keys are asked for.
const AHEAD: usize = 24;

/// An entry that lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Restored {
    /// Its key's hash.
    pub hash: u64,
    /// Its address, 48 bits; its length with a block's header, in units of a block's alignment, 16
    /// bits.
    place: u64,
    /// Its version, 48 bits; whether it is a value.
    version: u64,
}

impl Restored {
    pub fn new(hash: u64, address: u64, len: usize, version: u64, is_put: bool) -> Restored {
        // Entries are below 1 MiB, which is 2^14 such units.
        let units = (block_bytes(len) / ALIGN_BYTES) as u64 & 0xffff;
        Restored {
            hash,
            place: address << 16 | units,
            version: (version & MAX_VERSION) << 16 | u64::from(is_put),
        }
    }

    /// Bytes of it in a checkpoint.
    pub const BYTES: usize = 24;

    pub fn to_bytes(self) -> [u8; Restored::BYTES] {
        let mut bytes = [0; Restored::BYTES];
        let words = [self.hash, self.place, self.version];
        for (eight, word) in bytes.chunks_exact_mut(8).zip(words) {
            eight.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    pub fn from_bytes(bytes: &[u8; Restored::BYTES]) -> Restored {
        let (words, _) = bytes.as_chunks::<8>();
        let word = |at: usize| words.get(at).map_or(0, |it| u64::from_le_bytes(*it));
        Restored {
            hash: word(0),
            place: word(1),
            version: word(2),
        }
    }

    pub fn address(&self) -> u64 {
        self.place >> 16
    }

    pub fn block_bytes(&self) -> u64 {
        (self.place & 0xffff) * ALIGN_BYTES as u64
    }

    pub fn version(&self) -> u64 {
        self.version >> 16
    }

    pub fn is_put(&self) -> bool {
        self.version & 1 != 0
    }
}

/// A segment to be read.
#[derive(Clone, Copy)]
struct Wanted {
    segment: u32,
    state: SegmentState,
}

/// What one thread has found.
#[derive(Default)]
struct Findings {
    by_shard: Vec<Vec<Restored>>,
    digested: Vec<Digested>,
}

/// Fills the indexes of `store` from what was committed in `table`, and from the server's own logs;
/// what a checkpoint covers is not read again. Answers the segments that are not known to be
/// committed, with the highest versions in them.
pub(crate) fn rebuild(
    table: &BackupMemory,
    store: &Store,
    voids: &Voids,
    threads: usize,
    start: &Start,
) -> Result<Vec<Digested>, ReplicationError> {
    let checkpoint = start.checkpoint.as_deref();
    let covered = checkpoint.map(|it| it.covered(start.memory, table));
    let covered = covered.unwrap_or_default();
    let is_wanted = |entry: &cyclone_replication::Entry| {
        let local = !entry.owner.is_remote() && entry.state != SegmentState::Free;
        local || entry.state == SegmentState::Committed
    };
    let wanted: Vec<Wanted> = table
        .entries()
        .filter(|(segment, entry)| is_wanted(entry) && !covered.contains(segment))
        .map(|(segment, entry)| Wanted {
            segment,
            state: entry.state,
        })
        .collect();
    let found = in_parallel(threads, |thread| {
        find(
            table,
            store,
            voids,
            wanted.iter().skip(thread).step_by(threads),
        )
    });
    let mut digested = Vec::new();
    let mut by_thread = Vec::new();
    for found in found {
        let found = found??;
        digested.extend(found.digested);
        by_thread.push(found.by_shard);
    }
    if let Some(checkpoint) = checkpoint {
        let mut known = vec![Vec::new(); usize::from(store.shards())];
        checkpoint.take(&covered, store, voids, |shard, entry| {
            if let Some(known) = known.get_mut(usize::from(shard)) {
                known.push(entry);
            }
        });
        by_thread.push(known);
    }
    // What the first has found is sorted where it is.
    let mut parts = by_thread.into_iter();
    let first = parts.next().unwrap_or_default();
    let others: Vec<Vec<Vec<Restored>>> = parts.collect();
    let first: Vec<Mutex<Vec<Restored>>> = first.into_iter().map(Mutex::new).collect();
    let filled = in_parallel(threads, |thread| {
        for shard in (0..store.shards()).skip(thread).step_by(threads) {
            let place = usize::from(shard);
            let mut found = first.get(place).map_or_else(Vec::new, |it| {
                std::mem::take(&mut *it.lock().unwrap_or_else(PoisonError::into_inner))
            });
            for part in others.iter().filter_map(|it| it.get(place)) {
                found.extend_from_slice(part);
            }
            fill(store, shard, found);
        }
    });
    filled.into_iter().collect::<Result<(), _>>()?;
    Ok(digested)
}

fn in_parallel<T: Send>(
    threads: usize,
    work: impl Fn(usize) -> T + Sync,
) -> Vec<Result<T, ReplicationError>> {
    if threads == 1 {
        return vec![Ok(work(0))];
    }
    std::thread::scope(|scope| {
        let work = &work;
        let spawned: Vec<_> = (0..threads)
            .map(|thread| scope.spawn(move || work(thread)))
            .collect();
        let died = |_| ReplicationError::Damaged("a thread of the rebuild died".into());
        let joined = spawned.into_iter().map(|it| it.join().map_err(died));
        joined.collect()
    })
}

/// Reads segments.
fn find<'a>(
    table: &BackupMemory,
    store: &Store,
    voids: &Voids,
    wanted: impl Iterator<Item = &'a Wanted>,
) -> Result<Findings, ReplicationError> {
    let mut findings = Findings {
        by_shard: vec![Vec::new(); usize::from(store.shards())],
        digested: Vec::new(),
    };
    let mut copy = Vec::new();
    for &Wanted { segment, state } in wanted {
        let base = table.segment_offset(segment);
        let epoch = table.entry(segment).map_or(0, |it| it.epoch);
        let mut max: WordMap<ShardId, u64> = WordMap::default();
        records_of(table, segment, &mut copy, |at, bytes, is_in_one| {
            let is_void = |shard| voids.covers(shard, epoch, at - base);
            // Whole below its block's checksum. What lies apart was copied into a log of the
            // server's own.
            let Ok(entry) = Entry::parse(bytes) else {
                return;
            };
            note_commits(store, is_void, &entry);
            if entry.header.kind == Kind::Commit || is_void(entry.header.stamp.shard) {
                return;
            }
            let is_there = is_in_one || store.heap().has(at, bytes);
            for (offset, member) in entry.members() {
                let (stamp, header) = (member.header.stamp, &member.header);
                if state != SegmentState::Committed {
                    let highest = max.entry(stamp.shard).or_default();
                    *highest = stamp.version.max(*highest);
                }
                let shard = findings.by_shard.get_mut(usize::from(stamp.shard));
                if let Some(shard) = shard.filter(|_| is_there) {
                    shard.push(Restored::new(
                        KeyHash::hash_of(member.key),
                        at + offset as u64,
                        header.len(),
                        stamp.version,
                        header.kind == Kind::Put,
                    ));
                }
            }
        })?;
        if state != SegmentState::Committed {
            findings.digested.push(Digested { segment, max });
        }
    }
    Ok(findings)
}

/// Fills a shard's index with the newest entry of each key.
fn fill(store: &Store, id: ShardId, mut found: Vec<Restored>) {
    let newest = found.iter().map(Restored::version).max();
    if let (Some(shard), Some(newest)) = (store.shard(id), newest) {
        shard.saw(newest);
    }
    found.sort_unstable_by(|one, other| {
        (one.hash, other.version()).cmp(&(other.hash, one.version()))
    });
    keep_newest(store, &mut found);
    store.fill(id, &found);
}

/// Leaves one entry of each key, the newest. Entries of a hash lie together, newest first; nearly
/// always they are of one key.
fn keep_newest(store: &Store, found: &mut Vec<Restored>) {
    let heap = store.heap();
    let (mut kept, mut at) = (0, 0);
    let mut keys: Vec<Option<Vec<u8>>> = Vec::new();
    while at < found.len() {
        let hash = found[at].hash;
        let group = found[at..].iter().take_while(|it| it.hash == hash).count();
        for next in at + AHEAD..(at + AHEAD + group).min(found.len().saturating_sub(1)) {
            // Where two of one hash meet, their keys will be read.
            if found[next].hash == found[next + 1].hash {
                heap.prefetch(found[next].address());
                heap.prefetch(found[next + 1].address());
            }
        }
        keys.clear();
        for next in at..at + group {
            // A key that cannot be read hides nothing.
            let key = match group {
                1 => None,
                _ => heap.key_at(found[next].address()),
            };
            if key.is_some() && keys.contains(&key) {
                continue;
            }
            keys.push(key);
            found[kept] = found[next];
            kept += 1;
        }
        at += group;
    }
    found.truncate(kept);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_packed_comes_back() {
        for (address, len, version, is_put) in [
            (1 << 47, 24, MAX_VERSION, true),
            (64, crate::entry::MAX_ENTRY_BYTES, 0, false),
        ] {
            let packed = Restored::new(7, address, len, version, is_put);
            assert_eq!(packed.address(), address);
            assert_eq!(packed.block_bytes(), block_bytes(len) as u64);
            assert_eq!((packed.version(), packed.is_put()), (version, is_put));
        }
    }
}

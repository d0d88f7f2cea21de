//! Records on their way from segments into the indexes (rowan §4.4).

use cyclone_replication::frame::{Shape, scan_blocks};
use cyclone_replication::{Assembler, BackupMemory, ReplicationError, scan_records};

use crate::configuration::{KeyHash, ShardId};
use crate::entry::{Entry, Kind};
use crate::store::Store;
use crate::words::WordMap;

/// A full segment and the highest versions in it (MaxVerArray).
pub(crate) struct Digested {
    pub segment: u32,
    pub max: WordMap<ShardId, u64>,
}

/// Records whose keys are looked up side by side.
pub(crate) const AHEAD: usize = 16;

/// Records of a segment: address, bytes, and whether these are known to lie there in one piece.
#[derive(Default)]
pub(crate) struct Found {
    bytes: Vec<u8>,
    /// Address, where the bytes end, whether they lie in one piece.
    records: Vec<(u64, usize, bool)>,
}

impl Found {
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.records.clear();
    }

    pub fn push(&mut self, at: u64, bytes: &[u8], is_in_one: bool) {
        self.bytes.extend_from_slice(bytes);
        self.records.push((at, self.bytes.len(), is_in_one));
    }

    /// The records in parts; before a part is given, what the store knows of its keys is brought
    /// into the caches.
    pub fn parts<'a>(
        &'a self,
        store: &'a Store,
    ) -> impl Iterator<Item = impl Iterator<Item = (u64, &'a [u8], bool)>> {
        let mut begin = 0;
        self.records.chunks(AHEAD).map(move |part| {
            let mut at = begin;
            let records = part.iter().map(move |&(address, end, is_in_one)| {
                let bytes = &self.bytes[at..end];
                at = end;
                (address, bytes, is_in_one)
            });
            begin = part.last().map_or(begin, |last| last.1);
            store.bring(records.clone().filter_map(|(_, bytes, _)| key_of(bytes)));
            records
        })
    }
}

/// Shard and hash of the key of an entry that is no batch.
pub(crate) fn key_of(bytes: &[u8]) -> Option<(ShardId, u64)> {
    let entry = Entry::parse(bytes).ok()?;
    let is_of_key = matches!(entry.header.kind, Kind::Put | Kind::Delete);
    is_of_key.then(|| (entry.header.stamp.shard, KeyHash::hash_of(entry.key)))
}

/// Indexes a record that lies at an address; `false` if it does not lie there in one piece. `bytes`
/// are whole: another checksum says so, or no other code has had them. Bytes that are no entry are
/// skipped, and what is void is passed over.
pub(crate) fn index(
    store: &Store,
    is_void: impl Fn(ShardId) -> bool,
    (at, bytes, is_in_one): (u64, &[u8], bool),
    max: &mut WordMap<ShardId, u64>,
) -> bool {
    let Ok(entry) = Entry::parse(bytes) else {
        return true;
    };
    note_commits(store, &is_void, &entry);
    if entry.header.kind == Kind::Commit || is_void(entry.header.stamp.shard) {
        return true;
    }
    let is_there = is_in_one || store.heap().has(at, bytes);
    for (offset, member) in entry.members() {
        let stamp = member.header.stamp;
        let highest = max.entry(stamp.shard).or_default();
        *highest = stamp.version.max(*highest);
        if is_there {
            store.publish(at + offset as u64, &member.header, member.key);
        }
    }
    is_there
}

/// Takes note of what an entry says is committed, if that is what it says.
pub(crate) fn note_commits(store: &Store, is_void: impl Fn(ShardId) -> bool, entry: &Entry<'_>) {
    if entry.header.kind != Kind::Commit {
        return;
    }
    for stamp in entry.commits().filter(|it| !is_void(it.shard)) {
        if let Some(shard) = store.shard(stamp.shard) {
            shard.committed(stamp.version);
        }
    }
}

/// The records of a segment of any log: address, bytes, and whether these are known to lie there in
/// one piece. `copy` is where the segment is copied to. The server's own logs have no holes, but
/// what lies behind a damaged block counts: the index points at it, and after a crash it is a write
/// that was not reported yet.
pub(crate) fn records_of(
    table: &BackupMemory,
    segment: u32,
    copy: &mut Vec<u8>,
    mut found: impl FnMut(u64, &[u8], bool),
) -> Result<(), ReplicationError> {
    let Some(entry) = table.entry(segment) else {
        return Ok(());
    };
    let base = table.segment_offset(segment);
    if entry.owner.is_remote() {
        let assembler = &mut Assembler::default();
        return scan_records(table, segment, assembler, copy, |record| {
            found(base + record.offset, record.bytes, record.is_in_one);
        });
    }
    table.area().read_into(base, table.segment_bytes(), copy);
    let seed = table.seed(entry.epoch);
    scan_blocks(Shape::WithHoles, seed, copy, |block, payload| {
        found(base + block.payload.start as u64, payload, true);
    });
    Ok(())
}

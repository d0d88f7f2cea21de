//! Checkpoints of the indexes: a cold start reads one, and then only segments that are not in it
//! (rowan §4.7).
//!
//! A checkpoint names the segments that were committed when it was begun, with their epochs, and
//! says where the index pointed into them. It is taken while the store is used, a few chains at a
//! time. That is enough:
//!
//! - A committed segment's bytes never change, and its epoch changes when it is given away. Those
//!   of another epoch, or in another state, are read as if there was no checkpoint; entries of a
//!   checkpoint that lie there do not count.
//! - An entry that is a key's newest now, in a segment that was committed then, was its newest
//!   then: it is in the checkpoint. What was moved by cleaning meanwhile, or written later, lies in
//!   segments that are read.
//! - Of two entries of a key the newer one counts, wherever it was found. A tombstone goes only
//!   when every older segment has gone (`clean`): no checkpoint has the value that it deleted, in a
//!   segment that is still what it was.
//! - What was void before is left out; a shard that was declared void later is left out whole.
//!
//! ```text
//!   0         8         16        24       28        32       36
//!   | magic   | memory  | epoch   | shards | segments | zero  | per shard: newest u64, commit u64, void u64
//!   | per segment: number u32, zero u32, epoch u64 | crc u32
//!   then blocks:  shard u16, zero u16, count u32, entries of 24 bytes: hash, address and length, version and kind; crc u32
//!   the last one: shard ffff, count = entries in all
//! ```

use std::collections::HashSet;
use std::io;
use std::sync::Arc;

use cyclone_replication::{BackupMemory, SegmentState};
use cyclone_wire::codec::{DecodeError, Reader};
use cyclone_wire::ring::crc32c_of;

use crate::configuration::ShardId;
use crate::discarded_copy::Voids;
use crate::entry::Kind;
use crate::rebuild::Restored;
use crate::store::Store;
use crate::words::WordMap;

const MAGIC: u64 = 0x3154_5049_4b43_4350;
const END: u16 = u16::MAX;
/// Entries that are asked for before the first of them is read, a chain more or less.
const AT_ONCE: usize = 32;
/// So many times in one step.
const ROUNDS: usize = 4;
/// A block is written when it has so many entries.
const BLOCK: usize = 2048;
const MAX_SEGMENTS: usize = 1 << 26;

/// Where a checkpoint is written to.
pub trait Sink: Send {
    /// Takes the next bytes.
    ///
    /// # Errors
    /// The checkpoint is given up.
    fn put(&mut self, bytes: &[u8]) -> io::Result<()>;

    /// That was all. Returns whether this checkpoint is the newest from here on; if not yet, it is
    /// asked again. Must not wait for a disk: the control thread asks.
    ///
    /// # Errors
    /// It is not the newest, and will not be.
    fn finish(&mut self) -> io::Result<bool>;
}

/// A checkpoint that was read.
pub struct Checkpoint {
    memory: u64,
    next_epoch: u64,
    /// By shard: the newest version, CommitVer, and what was void.
    shards: Vec<(u64, u64, u64)>,
    segments: WordMap<u32, u64>,
    entries: Vec<(ShardId, Vec<Restored>)>,
}

impl std::fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (segments, epoch) = (self.segments.len(), self.next_epoch);
        write!(f, "Checkpoint({segments} segments before epoch {epoch})")
    }
}

fn checked(bytes: &[u8]) -> Result<&[u8], DecodeError> {
    let (body, crc) = bytes
        .split_last_chunk::<4>()
        .ok_or(DecodeError::Contradiction("a checkpoint's end"))?;
    let (found, computed) = (u32::from_le_bytes(*crc), crc32c_of(body));
    match found == computed {
        true => Ok(body),
        false => Err(DecodeError::Checksum { found, computed }),
    }
}

impl Checkpoint {
    /// Reads one.
    ///
    /// # Errors
    /// What is wrong with it; the server starts without.
    pub fn decode(bytes: &[u8]) -> Result<Checkpoint, DecodeError> {
        let mut reader = Reader::new(bytes);
        let magic = reader.u64()?;
        if magic != MAGIC {
            return Err(DecodeError::Unknown {
                what: "checkpoint magic",
                value: magic,
            });
        }
        let (memory, next_epoch) = (reader.u64()?, reader.u64()?);
        let (shards, segments) = (reader.u32()? as usize, reader.u32()? as usize);
        reader.u32()?;
        if shards > usize::from(u16::MAX) || segments > MAX_SEGMENTS {
            return Err(DecodeError::Contradiction("a checkpoint's sizes"));
        }
        let head = 36 + shards * 24 + segments * 16 + 4;
        let whole = bytes
            .get(..head)
            .ok_or(DecodeError::Contradiction("a checkpoint cut short"))?;
        checked(whole)?;
        let mut checkpoint = Checkpoint {
            memory,
            next_epoch,
            shards: Vec::with_capacity(shards),
            segments: WordMap::default(),
            entries: Vec::new(),
        };
        for _ in 0..shards {
            let shard = (reader.u64()?, reader.u64()?, reader.u64()?);
            checkpoint.shards.push(shard);
        }
        for _ in 0..segments {
            let segment = reader.u32()?;
            reader.u32()?;
            checkpoint.segments.insert(segment, reader.u64()?);
        }
        checkpoint.read_blocks(&bytes[head..])?;
        Ok(checkpoint)
    }

    fn read_blocks(&mut self, mut rest: &[u8]) -> Result<(), DecodeError> {
        let mut sum = 0;
        loop {
            let mut reader = Reader::new(rest);
            let (shard, _, count) = (reader.u16()?, reader.u16()?, reader.u32()? as usize);
            let entries = if shard == END { 0 } else { count };
            let len = 8 + entries.min(BLOCK * 2) * Restored::BYTES + 4;
            let whole = rest
                .get(..len)
                .ok_or(DecodeError::Contradiction("a checkpoint cut short"))?;
            let body = checked(whole)?;
            if shard == END {
                return match count == sum as u32 as usize {
                    true => Ok(()),
                    false => Err(DecodeError::Contradiction("entries of a checkpoint")),
                };
            }
            let (chunks, _) = body[8..].as_chunks::<{ Restored::BYTES }>();
            if chunks.len() != count {
                return Err(DecodeError::Contradiction("a checkpoint's block"));
            }
            let entries = chunks.iter().map(Restored::from_bytes).collect();
            self.entries.push((shard, entries));
            sum += count;
            rest = &rest[len..];
        }
    }

    /// Segments that need not be read.
    pub(crate) fn covered(&self, memory: u64, table: &BackupMemory) -> HashSet<u32> {
        if memory != self.memory || self.next_epoch > table.next_epoch() {
            return HashSet::new();
        }
        let is_same = |(&segment, &epoch): (&u32, &u64)| {
            let entry = table.entry(segment)?;
            let same = entry.epoch == epoch && entry.state == SegmentState::Committed;
            same.then_some(segment)
        };
        self.segments.iter().filter_map(is_same).collect()
    }

    /// What counts of it: versions that were known are noted in `store`, entries are handed over by
    /// shard.
    pub(crate) fn take(
        &self,
        covered: &HashSet<u32>,
        store: &Store,
        voids: &Voids,
        mut found: impl FnMut(ShardId, Restored),
    ) {
        if covered.is_empty() {
            return;
        }
        let is_void = |shard: ShardId| {
            let known = self.shards.get(usize::from(shard));
            known.is_none_or(|known| known.2 != voids.mark(shard))
        };
        for (&(newest, commit, _), id) in self.shards.iter().zip(0u16..) {
            if let Some(shard) = store.shard(id).filter(|_| !is_void(id)) {
                shard.saw(newest);
                shard.committed(commit);
            }
        }
        let heap = store.heap();
        for (shard, entries) in self.entries.iter().filter(|it| !is_void(it.0)) {
            for entry in entries {
                let segment = heap.segment_of(entry.address());
                let Some(segment) = segment.filter(|it| covered.contains(it)) else {
                    continue;
                };
                let epoch = self.segments.get(&segment).copied().unwrap_or(0);
                let offset = entry.address() - heap.offset_of(segment);
                if !voids.covers(*shard, epoch, offset) {
                    found(*shard, *entry);
                }
            }
        }
    }
}

/// How far a checkpoint is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Progress {
    /// There is more to be written.
    Writes,
    /// The sink has everything, and is not done with it.
    Waits,
    /// It is the newest.
    Done,
}

/// A checkpoint in progress.
pub(crate) struct Writing {
    sink: Box<dyn Sink>,
    /// The sink has everything.
    is_whole: bool,
    covered: HashSet<u32>,
    shard: ShardId,
    /// Where the walk of the shard goes on.
    at: Option<u64>,
    entries: Vec<Restored>,
    sum: u64,
    bytes: Vec<u8>,
}

impl Writing {
    /// Begins one of a memory with this number.
    ///
    /// # Errors
    /// The sink's.
    pub fn begin(
        mut sink: Box<dyn Sink>,
        memory: u64,
        table: &BackupMemory,
        store: &Store,
        voids: &Voids,
    ) -> io::Result<Writing> {
        let committed: Vec<(u32, u64)> = table
            .entries()
            .filter(|(_, entry)| entry.state == SegmentState::Committed)
            .map(|(segment, entry)| (segment, entry.epoch))
            .collect();
        let mut bytes = Vec::new();
        for word in [MAGIC, memory, table.next_epoch()] {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        for word in [u32::from(store.shards()), committed.len() as u32, 0] {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        for id in 0..store.shards() {
            let known = store.shard(id).map(|it| (it.newest(), it.commit()));
            let (newest, commit) = known.unwrap_or_default();
            for word in [newest, commit, voids.mark(id)] {
                bytes.extend_from_slice(&word.to_le_bytes());
            }
        }
        for (segment, epoch) in &committed {
            bytes.extend_from_slice(&segment.to_le_bytes());
            bytes.extend_from_slice(&[0; 4]);
            bytes.extend_from_slice(&epoch.to_le_bytes());
        }
        seal(&mut bytes);
        sink.put(&bytes)?;
        Ok(Writing {
            sink,
            is_whole: false,
            covered: committed.into_iter().map(|it| it.0).collect(),
            shard: 0,
            at: Some(0),
            entries: Vec::with_capacity(BLOCK),
            sum: 0,
            bytes,
        })
    }

    /// Walks on.
    ///
    /// # Errors
    /// The sink's.
    pub fn step(&mut self, store: &Store) -> io::Result<Progress> {
        if self.is_whole {
            return self.finish();
        }
        let (heap, mut addresses) = (store.heap(), Vec::new());
        for _ in 0..ROUNDS {
            let Some(shard) = store.shard(self.shard) else {
                self.bytes.clear();
                self.bytes.extend_from_slice(&END.to_le_bytes());
                self.bytes.extend_from_slice(&[0; 2]);
                self.bytes
                    .extend_from_slice(&(self.sum as u32).to_le_bytes());
                seal(&mut self.bytes);
                self.sink.put(&self.bytes)?;
                self.is_whole = true;
                return self.finish();
            };
            addresses.clear();
            // As many as are worth asking for ahead.
            while addresses.len() < AT_ONCE
                && let Some(at) = self.at
            {
                self.at = shard.index.collect(at, &mut addresses);
            }
            for &address in &addresses {
                heap.prefetch(address);
            }
            for &address in &addresses {
                let segment = heap.segment_of(address);
                if !segment.is_some_and(|it| self.covered.contains(&it)) {
                    continue;
                }
                // Of a committed segment that is not cleaned meanwhile: this thread is the one that
                // cleans.
                if let (Some(header), Some(hash)) = (heap.header(address), heap.hash_at(address)) {
                    let is_put = header.kind == Kind::Put;
                    let (len, version) = (header.len(), header.stamp.version);
                    self.entries
                        .push(Restored::new(hash, address, len, version, is_put));
                }
            }
            if self.at.is_none() || self.entries.len() >= BLOCK {
                self.write_block()?;
            }
            if self.at.is_none() {
                self.shard += 1;
                self.at = Some(0);
            }
        }
        Ok(Progress::Writes)
    }

    fn finish(&mut self) -> io::Result<Progress> {
        let is_done = self.sink.finish()?;
        Ok(if is_done {
            Progress::Done
        } else {
            Progress::Waits
        })
    }

    fn write_block(&mut self) -> io::Result<()> {
        for entries in self.entries.chunks(BLOCK) {
            self.bytes.clear();
            self.bytes.extend_from_slice(&self.shard.to_le_bytes());
            self.bytes.extend_from_slice(&[0; 2]);
            self.bytes
                .extend_from_slice(&(entries.len() as u32).to_le_bytes());
            for entry in entries {
                self.bytes.extend_from_slice(&entry.to_bytes());
            }
            seal(&mut self.bytes);
            self.sink.put(&self.bytes)?;
            self.sum += entries.len() as u64;
        }
        self.entries.clear();
        Ok(())
    }
}

fn seal(bytes: &mut Vec<u8>) {
    let crc = crc32c_of(bytes);
    bytes.extend_from_slice(&crc.to_le_bytes());
}

/// What a start takes from a checkpoint.
#[derive(Clone, Debug, Default)]
pub struct Start {
    /// Number of the memory, drawn when it was formatted: a checkpoint of another one does not
    /// count.
    pub memory: u64,
    /// The checkpoint, if there is one.
    pub checkpoint: Option<Arc<Checkpoint>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_bytes_make_it_panic_and_no_changed_byte_passes() {
        let mut bytes = Vec::new();
        for word in [MAGIC, 7, 100] {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        for word in [1u32, 1, 0] {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        for word in [9u64, 8, 0, 3, 55] {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        seal(&mut bytes);
        let entry = Restored::new(1, 4096, 100, 9, true);
        let mut block = vec![0, 0, 0, 0, 1, 0, 0, 0];
        block.extend_from_slice(&entry.to_bytes());
        seal(&mut block);
        let mut end = vec![0xff, 0xff, 0, 0, 1, 0, 0, 0];
        seal(&mut end);
        bytes.extend(block);
        bytes.extend(end);
        let read = Checkpoint::decode(&bytes).expect("whole");
        assert_eq!(read.entries, [(0, vec![entry])]);
        assert_eq!(read.segments.get(&3), Some(&55));
        for at in 0..bytes.len() {
            assert!(Checkpoint::decode(&bytes[..at]).is_err(), "{at} bytes");
            let mut broken = bytes.clone();
            broken[at] ^= 0x40;
            assert!(Checkpoint::decode(&broken).is_err(), "byte {at}");
        }
    }
}

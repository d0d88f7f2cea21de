//! Cleaning: live entries of a committed segment are copied, the segment is free again (rowan
//! §4.4).
//!
//! **Tombstones.** The index points at a tombstone for as long as an older version of its key may
//! lie anywhere in this memory: a rebuild would find that one. Older versions can only lie in
//! segments that were allocated before the tombstone was committed. So the first time that a
//! tombstone is cleaned, its copy notes the next epoch; it is dropped when every segment in use has
//! that epoch or a later one.
//!
//! **CommitVers.** A replica must not forget how far a shard was committed while it forgets
//! tombstones below: the newest CommitVers are written down again before a segment with such is
//! freed.

use std::collections::HashSet;
use std::sync::Arc;

use cyclone_replication::rowan::posted_and_empty;
use cyclone_replication::{BackupMemory, Owner, Protocol, SegmentState};

use crate::control::Control;
use crate::digest::{Found, records_of};
use crate::entry::{self, Entry, HEADER_BYTES, Kind, Stamp};

/// When values are refused, segments that are less live than this are cleaned too, in percent.
const CLEAN_BELOW_WHEN_FULL_PERCENT: u64 = 97;

/// Before that, up to so much. What a segment's end has no room for is dead in every copy too:
/// taking nearly full segments without need would go on without end.
const CLEAN_BELOW_AT_MOST_PERCENT: u64 = 90;

/// Cleaning begins to take fuller segments when less than so many times as many are free as when
/// values are refused: a memory that is mostly live would else be refused to its writers before
/// anything is won back.
const EARLY: u32 = 3;

/// How long nothing is looked for to be cleaned after nothing was found, unless another segment is
/// committed meanwhile.
const LOOK_AGAIN_US: u64 = 1_000;

/// The segment that is cleaned.
struct Victim {
    segment: u32,
    /// The oldest epoch of the others, once it was asked for.
    floor: Option<u64>,
}

/// An entry and its copy.
struct Move<'a> {
    from: u64,
    to: u64,
    entry: Entry<'a>,
}

/// Segments in use that have received nothing so far.
pub(crate) fn empty_segments(table: &BackupMemory) -> HashSet<u32> {
    match table.protocol() {
        Protocol::Rowan => posted_and_empty(table),
        _ => HashSet::new(),
    }
}

impl Control {
    /// Cleans one segment, if one is worth it. Where none was, some time passes before the next
    /// search.
    pub(crate) fn clean_one(&mut self, now_us: u64) -> bool {
        if now_us < self.clean_due_us {
            return false;
        }
        let Some(segment) = self.victim() else {
            self.clean_due_us = now_us + LOOK_AGAIN_US;
            return false;
        };
        if !self.copy_live(segment) {
            return false;
        }
        self.log.fence();
        let live = self.store.heap().live_bytes(segment);
        if live > 0 {
            // The index points at what the scan did not find whole. When some of it is overwritten
            // the segment is scanned again.
            self.kept.insert(segment, live);
            self.stats.kept = self.kept.len() as u64;
            return true;
        }
        self.free(segment);
        self.stats.cleaned += 1;
        true
    }

    /// Segments less live than this are cleaned, in percent: the more, the fewer are free. Those
    /// that may wait will have fewer live entries to be copied.
    fn clean_below_percent(&self) -> u64 {
        if self.store.space().is_full() {
            return CLEAN_BELOW_WHEN_FULL_PERCENT;
        }
        let usual = u64::from(self.config.clean_below_percent);
        let more = CLEAN_BELOW_AT_MOST_PERCENT.saturating_sub(usual);
        let (free, full) = (self.table().free_segments(), self.config.full_below.max(1));
        let early = full.saturating_mul(EARLY);
        if free < early {
            let missing = u64::from(early - free.max(full));
            return usual + more * missing / u64::from(early - full);
        }
        let all = u64::from(self.table().segments()).max(1);
        let used_percent = (all - u64::from(free).min(all)) * 100 / all;
        let from = u64::from(self.config.clean_from_used_percent.max(1));
        usual * used_percent.min(from) / from
    }

    /// The committed segment with the fewest live bytes, if they are few enough.
    fn victim(&self) -> Option<u32> {
        let heap = self.store.heap();
        let percent = self.clean_below_percent();
        let limit = heap.segment_bytes() * percent / 100;
        self.table()
            .entries()
            .filter(|(_, entry)| entry.state == SegmentState::Committed)
            .map(|(segment, _)| (heap.live_bytes(segment), segment))
            .filter(|(live, segment)| *live < limit && self.kept.get(segment) != Some(live))
            .min()
            .map(|(_, segment)| segment)
            // Copying needs a segment to copy to.
            .filter(|_| self.store.space().has_ready(Owner::Cleaner(0)) || self.log.is_begun())
    }

    /// Copies what is live in a segment; `false` if there was no room for all of it.
    fn copy_live(&mut self, segment: u32) -> bool {
        let mut found = std::mem::take(&mut self.found);
        found.clear();
        let table = self.backup.table();
        let scanned = records_of(table, segment, &mut self.copy, |at, bytes, is_in_one| {
            found.push(at, bytes, is_in_one);
        });
        let copied = match scanned {
            Ok(()) => self.copy_found(segment, &found),
            Err(_) => {
                self.stats.refused += 1;
                false
            }
        };
        self.found = found;
        copied
    }

    fn copy_found(&mut self, segment: u32, found: &Found) -> bool {
        let store = Arc::clone(&self.store);
        let mut victim = Victim {
            segment,
            floor: None,
        };
        let (mut commits, mut moves) = (Vec::new(), Vec::new());
        for part in found.parts(&store) {
            let mut has_room = true;
            for (at, bytes, _) in part {
                // Whole below its block's checksum; what is no entry is skipped.
                let Ok(entry) = Entry::parse(bytes) else {
                    continue;
                };
                if entry.header.kind == Kind::Commit {
                    commits.extend(entry.commits().map(|it| it.shard));
                }
                for (offset, member) in entry.members() {
                    let bytes = &bytes[offset..offset + member.header.len()];
                    let from = at + offset as u64;
                    has_room &= self.copy_one(&mut victim, (from, member), bytes, &mut moves);
                }
            }
            // One fence for all of them; only then are the copies the ones that count.
            self.log.fence();
            for Move { from, to, entry } in moves.drain(..) {
                self.store.relocate(from, to, &entry.header, entry.key);
                self.log.settle(to);
            }
            if !has_room {
                return false;
            }
        }
        self.copy_commits(commits)
    }

    /// The lowest epoch of a segment in use, another one than this. Segments that are posted to an
    /// append queue and have received nothing do not count: they had not when a tombstone was noted
    /// either, and nothing older than a committed tombstone comes later.
    fn oldest_epoch_but(&self, segment: u32) -> u64 {
        let table = self.table();
        let empty = empty_segments(table);
        let others = table.entries().filter(|(number, entry)| {
            *number != segment && entry.state != SegmentState::Free && !empty.contains(number)
        });
        let oldest = others.map(|(_, entry)| entry.epoch).min();
        oldest.unwrap_or(u64::MAX)
    }

    /// Copies one entry of a segment if it is live; `false` if there was no room.
    fn copy_one<'a>(
        &mut self,
        victim: &mut Victim,
        (from, member): (u64, Entry<'a>),
        bytes: &[u8],
        moves: &mut Vec<Move<'a>>,
    ) -> bool {
        let header = &member.header;
        if !self.store.is_live(from, header, member.key) {
            return true;
        }
        let mut tombstone = Vec::new();
        let mut copy = bytes;
        if header.kind == Kind::Delete {
            let noted = member.value.try_into().ok().map(u64::from_le_bytes);
            let floor = || self.oldest_epoch_but(victim.segment);
            let is_oldest = |epoch| *victim.floor.get_or_insert_with(floor) >= epoch;
            if !self.keeps_tombstones && noted.is_some_and(is_oldest) {
                self.store.forget(from, header, member.key);
                self.stats.tombstones_dropped += 1;
                return true;
            }
            let epoch = noted.unwrap_or(self.table().next_epoch()).to_le_bytes();
            entry::encode(
                Kind::Delete,
                header.stamp,
                0,
                member.key,
                &epoch,
                &mut tombstone,
            );
            copy = &tombstone;
        }
        let Some(to) = self.log.append(header.stamp.bits(), copy) else {
            return false;
        };
        let shard = self.store.shard(header.stamp.shard);
        let commit = shard.map_or(0, |it| it.commit());
        if header.stamp.version > commit {
            self.unsettle(to);
        }
        self.stats.copied_bytes += copy.len() as u64;
        let entry = member;
        moves.push(Move { from, to, entry });
        true
    }

    /// Writes down how far these shards are committed.
    fn copy_commits(&mut self, mut shards: Vec<u16>) -> bool {
        shards.sort_unstable();
        shards.dedup();
        if shards.is_empty() {
            return true;
        }
        let words: Vec<u8> = shards
            .into_iter()
            .filter_map(|shard| {
                let version = self.store.shard(shard)?.commit();
                Some(Stamp { version, shard }.bits().to_le_bytes())
            })
            .flatten()
            .collect();
        let none = Stamp {
            version: 0,
            shard: 0,
        };
        // As many words as surely fit a segment's blocks.
        let most = (self.store.heap().segment_bytes() as usize / 2 - HEADER_BYTES) / 8 * 8;
        for words in words.chunks(most.max(8)) {
            let mut record = Vec::new();
            entry::encode(Kind::Commit, none, 0, &[], words, &mut record);
            let Some(at) = self.log.append(0, &record) else {
                return false;
            };
            self.log.settle(at);
        }
        true
    }
}

//! The control thread (rowan §4.3): posts segments and finds used ones through the replication
//! protocol, gives segments to the server's own logs, digests, and cleans. It alone changes the
//! segment table.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use cyclone_replication::{
    Assembler, Backup, BackupMemory, Owner, ReplicationError, SegmentState, UsedSegment,
    scan_records, scan_segment,
};

use crate::checkpoint::{Progress, Sink, Start, Writing};
use crate::clean::empty_segments;
use crate::configuration::{KeyHash, ServerId, ShardId};
use crate::digest::{Digested, Found, index, records_of};
use crate::discarded_copy::{DiscardedCopy, Voids};
use crate::entry::{Entry, Kind};
use crate::log::Log;
use crate::rebuild::rebuild;
use crate::space::Granted;
use crate::store::Store;
use crate::words::WordMap;

/// See [`ControlConfig::clean_from_used_percent`].
pub(crate) const CLEAN_FROM_USED_PERCENT: u32 = 75;

/// The settings of a control thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControlConfig {
    /// Its server.
    pub server: ServerId,
    /// Below so many free segments new values are refused.
    pub full_below: u32,
    /// So many free segments are for cleaning alone.
    pub cleaning_reserve: u32,
    /// With no more free segments than these, those who replicate to this memory get none.
    pub remote_reserve: u32,
    /// Segments less live than this are cleaned, in percent; fuller ones, when few are free.
    pub clean_below_percent: u32,
    /// That is so once this part of the segments is in use, in percent; before that, less live ones
    /// in proportion: what may wait will have less to be copied.
    pub clean_from_used_percent: u32,
}

impl ControlConfig {
    /// The defaults for a memory of so many segments.
    //= rowan §4.4
    pub fn new(server: ServerId, segments: u32) -> ControlConfig {
        ControlConfig {
            server,
            full_below: (segments / 32).max(5),
            cleaning_reserve: 2,
            remote_reserve: 0,
            clean_below_percent: 75,
            clean_from_used_percent: CLEAN_FROM_USED_PERCENT,
        }
    }
}

/// Plain counters of a control thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ControlStats {
    /// Segments digested.
    pub digested: u64,
    /// Segments found committed.
    pub committed: u64,
    /// Segments cleaned.
    pub cleaned: u64,
    /// Bytes of entries copied by cleaning.
    pub copied_bytes: u64,
    /// Tombstones dropped.
    pub tombstones_dropped: u64,
    /// Checkpoints of the indexes written.
    pub checkpoints: u64,
    /// Checkpoints that could not be written.
    pub checkpoints_failed: u64,
    /// Segments that are not freed now because entries in them that are needed are damaged.
    pub kept: u64,
    /// Segment operations that the table refused: bugs.
    pub refused: u64,
}

/// The control thread's part of a server.
pub struct Control {
    pub(crate) config: ControlConfig,
    pub(crate) backup: Box<dyn Backup>,
    pub(crate) store: Arc<Store>,
    term: u32,
    assembler: Assembler,
    used: VecDeque<UsedSegment>,
    /// Records whose blocks lie apart and that found no room yet for a whole copy.
    pub(crate) to_copy: VecDeque<Vec<u8>>,
    digested: Vec<Digested>,
    pub(crate) log: Log,
    pub(crate) stats: ControlStats,
    /// Which shards' last check of commits found nothing to do: their CommitVers then.
    looked: Vec<u64>,
    look_again: bool,
    /// Whether tombstones stay: older versions of their keys may still be sent by a shard's
    /// primary.
    pub(crate) keeps_tombstones: bool,
    voids: Voids,
    /// Where segments are copied to, to be read.
    pub(crate) copy: Vec<u8>,
    pub(crate) found: Found,
    /// Segments that could not be cleaned because of damaged entries, and how many of their bytes
    /// were needed then.
    pub(crate) kept: BTreeMap<u32, u64>,
    /// When something to be cleaned is looked for again.
    pub(crate) clean_due_us: u64,
    memory: u64,
    checkpoint: Option<Writing>,
}

impl Control {
    /// Takes over a backup's memory: everything in it that was committed is indexed, what was not
    /// is digested by the steps that follow; see [`Control::is_drained`].
    ///
    /// # Errors
    /// When the table does not allow what must be done.
    //= rowan §4.7
    pub fn open(
        backup: Box<dyn Backup>,
        config: ControlConfig,
        shards: u16,
        voids: &[(ShardId, DiscardedCopy)],
        threads: usize,
        start: &Start,
    ) -> Result<Control, ReplicationError> {
        let store = Arc::new(Store::new(backup.table(), shards));
        let log = Log::new(Arc::clone(&store), Owner::Cleaner(0), config.server);
        let mut control = Control {
            config,
            backup,
            store,
            term: 0,
            assembler: Assembler::default(),
            used: VecDeque::new(),
            to_copy: VecDeque::new(),
            digested: Vec::new(),
            log,
            stats: ControlStats::default(),
            looked: vec![u64::MAX; usize::from(shards)],
            look_again: true,
            keeps_tombstones: true,
            voids: Voids::new(shards, voids),
            copy: Vec::new(),
            found: Found::default(),
            kept: BTreeMap::new(),
            clean_due_us: 0,
            memory: start.memory,
            checkpoint: None,
        };
        control.rebuild(threads.max(1), start)?;
        control.tell();
        Ok(control)
    }

    /// What all threads share.
    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// What it has done so far.
    pub fn stats(&self) -> ControlStats {
        self.stats
    }

    /// The segment table.
    pub fn table(&self) -> &BackupMemory {
        self.backup.table()
    }

    /// The replication's keeping side.
    pub fn backup(&self) -> &dyn Backup {
        &*self.backup
    }

    /// Goes over to a term: servers that are no longer members have no access from here on, nor has
    /// anybody in an older term. What they wrote is handed over for digestion.
    ///
    /// # Errors
    /// What the fabric says; the call can be repeated.
    //= rowan §4.5
    pub fn fence(&mut self, term: u32, gone: &[ServerId]) -> Result<(), ReplicationError> {
        self.term = term;
        // Without a server that is gone there is still the term to be raised.
        let no_server = [ServerId::MAX];
        for &server in if gone.is_empty() {
            &no_server[..]
        } else {
            gone
        } {
            self.backup.fence_off(server, term)?;
        }
        self.drain();
        self.index_open()?;
        // Blocks of records that were in flight come no more.
        self.assembler = Assembler::default();
        Ok(())
    }

    /// Indexes what lies in segments that are still written, or not handed over yet: protocols
    /// whose segments outlive a term keep older terms' records there. Digested they will be again,
    /// when they are full.
    fn index_open(&mut self) -> Result<(), ReplicationError> {
        let table = self.backup.table();
        // Protocols may also keep closed ones back for a while before they hand them over.
        let digested: HashSet<u32> = self.digested.iter().map(|it| it.segment).collect();
        let open = table.in_order(|entry| {
            let unread = matches!(entry.state, SegmentState::Using | SegmentState::Used);
            unread && entry.owner.is_remote()
        });
        let open = open.into_iter().filter(|it| !digested.contains(it));
        let mut apart = Vec::new();
        for segment in open {
            let base = table.segment_offset(segment);
            let epoch = table.entry(segment).map_or(0, |it| it.epoch);
            let (assembler, copy) = (&mut self.assembler, &mut self.copy);
            let mut max = WordMap::default();
            scan_records(table, segment, assembler, copy, |record| {
                let there = (base + record.offset, record.bytes, record.is_in_one);
                let is_void = |shard| self.voids.covers(shard, epoch, record.offset);
                if !index(&self.store, is_void, there, &mut max) {
                    apart.push(record.bytes.to_vec());
                }
            })?;
        }
        self.to_copy.extend(apart);
        Ok(())
    }

    /// Drops everything that is here of these shards; returns what to pass to [`Control::open`]
    /// from now on, so that it stays dropped. For shards without writers here at this time: after
    /// [`Control::fence`], before the commitment.
    ///
    /// # Errors
    /// A memory that cannot be scanned.
    pub fn void(&mut self, shards: &[ShardId]) -> Result<DiscardedCopy, ReplicationError> {
        let table = self.backup.table();
        let mut open = BTreeMap::new();
        // Hundreds may be posted: they need not be read.
        let empty = empty_segments(table);
        for segment in table.in_order(|entry| entry.state == SegmentState::Using) {
            let (base, mut written) = (table.segment_offset(segment), 0);
            if !empty.contains(&segment) {
                records_of(table, segment, &mut self.copy, |at, bytes, _| {
                    written = written.max(at - base + bytes.len() as u64);
                })?;
            }
            let epoch = table.entry(segment).map_or(0, |it| it.epoch);
            open.insert(epoch, written);
        }
        let void = DiscardedCopy {
            before_epoch: table.next_epoch(),
            open: Arc::new(open),
        };
        let is_meant = |bytes: &[u8]| {
            Entry::decode(bytes).is_ok_and(|entry| shards.contains(&entry.header.stamp.shard))
        };
        self.to_copy.retain(|bytes| !is_meant(bytes));
        for &shard in shards {
            self.voids.set(shard, void.clone());
            self.store.clear(shard);
            for digested in &mut self.digested {
                digested.max.remove(&shard);
            }
        }
        self.look_again = true;
        Ok(void)
    }

    /// Says whether tombstones must stay for now.
    pub fn keep_tombstones(&mut self, keep: bool) {
        self.keeps_tombstones = keep;
    }

    /// Digests everything that is used by now.
    fn drain(&mut self) {
        self.take_used();
        while self.digest_one() {}
    }

    /// Whether everything that was used is digested, and every record found whole has its place.
    pub fn is_drained(&self) -> bool {
        self.used.is_empty() && self.to_copy.is_empty()
    }

    fn take_used(&mut self) {
        let mut used = Vec::new();
        self.backup.take_used(&mut used);
        self.used.extend(used);
    }

    /// Makes progress; returns whether there was anything to do. Never waits.
    pub fn step(&mut self, now_us: u64) -> bool {
        let mut busy = self.backup.step(now_us);
        busy |= self.serve_logs();
        self.take_used();
        busy |= self.copy_apart();
        busy |= self.digest_one();
        self.find_committed();
        busy |= self.clean_one(now_us);
        busy |= self.write_checkpoint();
        self.tell();
        busy
    }

    /// Begins to write a checkpoint of the indexes, a little with each step; one that is in
    /// progress is given up.
    ///
    /// # Errors
    /// The sink's.
    //= rowan §4.7
    pub fn begin_checkpoint(&mut self, sink: Box<dyn Sink>) -> std::io::Result<()> {
        self.checkpoint = None;
        let table = self.backup.table();
        self.checkpoint = Some(Writing::begin(
            sink,
            self.memory,
            table,
            &self.store,
            &self.voids,
        )?);
        Ok(())
    }

    /// Whether a checkpoint is in progress.
    pub fn writes_checkpoint(&self) -> bool {
        self.checkpoint.is_some()
    }

    fn write_checkpoint(&mut self) -> bool {
        let Some(writing) = &mut self.checkpoint else {
            return false;
        };
        match writing.step(&self.store) {
            Ok(Progress::Writes) => return true,
            Ok(Progress::Waits) => return false,
            Ok(Progress::Done) => self.stats.checkpoints += 1,
            Err(_) => self.stats.checkpoints_failed += 1,
        }
        self.checkpoint = None;
        true
    }

    /// Sleeps until there may be something to do, at most `timeout`.
    pub fn wait(&mut self, timeout: Duration) {
        self.backup.wait(timeout);
    }

    fn tell(&mut self) {
        let free = self.backup.table().free_segments();
        let space = self.store.space();
        // A little apart, so that it does not flicker.
        let below = self.config.full_below + if space.is_full() { 1 } else { 0 };
        space.tell(free, free < below);
    }

    /// Allocates what local logs ask for, and moves what they have filled.
    fn serve_logs(&mut self) -> bool {
        let Some(news) = self.store.space().take_news() else {
            return false;
        };
        for segment in news.full {
            self.transition(segment, SegmentState::Used);
        }
        for segment in news.committed {
            self.transition(segment, SegmentState::Committed);
        }
        let mut served = false;
        for owner in news.wanted {
            let reserve = match owner {
                Owner::Cleaner(_) => 0,
                _ => self.config.cleaning_reserve,
            };
            let table = self.backup.table_mut();
            let granted = (table.free_segments() > reserve)
                .then(|| table.allocate(owner, self.term, 0, cyclone_replication::Content::Stale));
            let Some(segment) = granted.flatten() else {
                self.store.space().still_wanted(owner);
                continue;
            };
            let epoch = table.entry(segment).map_or(0, |entry| entry.epoch);
            let seed = table.seed(epoch);
            self.store.heap().forget(segment);
            // Nothing is in it yet; what cleaning puts there says so if it is not on every replica.
            let is_cleaned = matches!(owner, Owner::Cleaner(_));
            self.store.heap().settle(segment, is_cleaned);
            self.store.space().give(owner, Granted { segment, seed });
            served = true;
        }
        served
    }

    pub(crate) fn transition(&mut self, segment: u32, to: SegmentState) {
        if to == SegmentState::Committed {
            self.clean_due_us = 0;
        }
        if self.backup.table_mut().transition(segment, to).is_err() {
            self.stats.refused += 1;
        }
    }

    /// Whether a segment can be spared: cleaning, the log that notes deletions, and those who
    /// replicate to this memory go on without it.
    pub(crate) fn has_room_to_spare(&self) -> bool {
        let needed = self.config.cleaning_reserve.max(self.config.remote_reserve);
        self.backup.table().free_segments() > needed + 1
    }

    /// Gives a segment back.
    pub(crate) fn free(&mut self, segment: u32) {
        let remote = self
            .backup
            .table()
            .entry(segment)
            .map(|it| it.owner.is_remote());
        self.store.heap().forget(segment);
        self.kept.remove(&segment);
        self.stats.kept = self.kept.len() as u64;
        if remote == Some(true) {
            if self.backup.release(segment).is_err() {
                self.stats.refused += 1;
            }
        } else {
            self.transition(segment, SegmentState::Free);
        }
    }

    /// Digests one used segment: its entries go into the indexes, its CommitVers are noted.
    //= rowan §4.4
    fn digest_one(&mut self) -> bool {
        let Some(used) = self.used.pop_front() else {
            return false;
        };
        let table = self.backup.table();
        let base = self.store.heap().offset_of(used.segment);
        let epoch = table.entry(used.segment).map_or(0, |it| it.epoch);
        let mut max = WordMap::default();
        let (found, copy) = (&mut self.found, &mut self.copy);
        found.clear();
        // It is used, and of this memory's protocol: the scan refuses nothing.
        let assembler = &mut self.assembler;
        let scanned = scan_records(table, used.segment, assembler, copy, |record| {
            found.push(base + record.offset, record.bytes, record.is_in_one);
        });
        for there in self.found.parts(&self.store).flatten() {
            let is_void = |shard| self.voids.covers(shard, epoch, there.0 - base);
            if !index(&self.store, is_void, there, &mut max) {
                self.to_copy.push_back(there.1.to_vec());
            }
        }
        if scanned.is_err() {
            self.stats.refused += 1;
        }
        self.digested.push(Digested {
            segment: used.segment,
            max,
        });
        self.look_again = true;
        self.stats.digested += 1;
        true
    }

    /// Writes records whose blocks lie apart down in one piece: the index points at whole entries.
    fn copy_apart(&mut self) -> bool {
        let mut copied = false;
        while let Some(bytes) = self.to_copy.pop_front() {
            let Some(address) = self.log.append(0, &bytes) else {
                self.to_copy.push_front(bytes);
                break;
            };
            self.log.fence();
            self.unsettle(address);
            let there = (address, &bytes[..], true);
            index(&self.store, |_| false, there, &mut WordMap::default());
            self.log.settle(address);
            copied = true;
        }
        copied
    }

    /// What was written to an address may not be on every replica.
    pub(crate) fn unsettle(&self, address: u64) {
        let heap = self.store.heap();
        if let Some(segment) = heap.segment_of(address) {
            heap.settle(segment, false);
        }
    }

    /// Takes an entry from another replica, unless what is known is as new: written down, then
    /// indexed. `false` if there is no room now.
    pub fn adopt_if_newer(&mut self, bytes: &[u8]) -> bool {
        let Ok(entry) = Entry::decode(bytes) else {
            return true;
        };
        let stamp = entry.header.stamp;
        let is_news = |(_, member): (usize, Entry<'_>)| {
            let stamp = member.header.stamp;
            let hash = KeyHash::hash_of(member.key);
            let known = self.store.look(stamp.shard, hash, member.key);
            known.map_or(true, |known| {
                known.is_none_or(|known| known.stamp().version < stamp.version)
            })
        };
        if !entry.members().any(is_news) {
            return true;
        }
        let plain = entry.without_note();
        let bytes = plain.as_deref().unwrap_or(bytes);
        self.serve_logs();
        let Some(address) = self.log.append(stamp.bits(), bytes) else {
            return false;
        };
        self.log.fence();
        self.unsettle(address);
        let there = (address, bytes, true);
        index(&self.store, |_| false, there, &mut WordMap::default());
        self.log.settle(address);
        true
    }

    /// Full segments whose highest versions are on every replica become committed.
    //= rowan §4.4
    fn find_committed(&mut self) {
        let commits = |shard: ShardId| self.store.shard(shard).map_or(0, |it| it.commit());
        let mut changed = std::mem::take(&mut self.look_again);
        for (shard, looked) in self.looked.iter_mut().enumerate() {
            let commit = commits(shard as u16);
            changed |= std::mem::replace(looked, commit) != commit;
        }
        // A record that is not whole yet may have blocks in any of them.
        if !changed || !self.to_copy.is_empty() || self.assembler.unfinished() > 0 {
            self.look_again |= changed;
            return;
        }
        let is_committed = |it: &Digested| it.max.iter().all(|(&id, &max)| max <= commits(id));
        let (committed, digested): (Vec<Digested>, Vec<Digested>) =
            std::mem::take(&mut self.digested)
                .into_iter()
                .partition(is_committed);
        self.digested = digested;
        for it in committed {
            self.transition(it.segment, SegmentState::Committed);
            self.store.heap().settle(it.segment, true);
            self.stats.committed += 1;
        }
    }

    /// Indexes what is there, in parallel; used segments of the backup log are left to digestion.
    //= rowan §4.7
    fn rebuild(&mut self, threads: usize, start: &Start) -> Result<(), ReplicationError> {
        self.take_used();
        let table = self.backup.table();
        self.digested = rebuild(table, &self.store, &self.voids, threads, start)?;
        let committed =
            table.in_order(|it| it.owner.is_remote() && it.state == SegmentState::Committed);
        for segment in committed {
            self.store.heap().settle(segment, true);
        }
        let written = table.in_order(|it| !it.owner.is_remote() && it.state == SegmentState::Using);
        for segment in written {
            self.transition(segment, SegmentState::Used);
        }
        Ok(())
    }
}

impl Control {
    /// What a key would be if everything that lies in this memory counted: what is digested, and
    /// what is not yet. For tests and tools: it reads the whole backup log.
    pub fn newest_value(&self, key: &[u8]) -> Option<Vec<u8>> {
        let KeyHash { slot, hash } = KeyHash::of(key);
        let known = self.store.find(self.store.shard_of(slot), hash, key);
        let mut newest = known.map(|it| (it.stamp().version, it.kind(), it.into_value()));
        let mut look = |bytes: &[u8]| {
            let Ok(entry) = Entry::decode(bytes) else {
                return;
            };
            for (_, member) in entry.members().filter(|(_, member)| member.key == key) {
                let version = member.header.stamp.version;
                if newest.as_ref().is_none_or(|it| it.0 < version) {
                    newest = Some((version, member.header.kind, member.value.to_vec()));
                }
            }
        };
        let table = self.backup.table();
        let shard = self.store.shard_of(KeyHash::of(key).slot);
        let mut assembler = Assembler::default();
        let remote = |entry: &cyclone_replication::Entry| {
            entry.state != SegmentState::Free && entry.owner.is_remote()
        };
        for segment in table.in_order(remote) {
            let epoch = table.entry(segment).map_or(0, |it| it.epoch);
            // Fails only for memories that other modules scan.
            let _ = scan_segment(table, segment, &mut assembler, |record| {
                if !self.voids.covers(shard, epoch, record.offset) {
                    look(&record.bytes);
                }
            });
        }
        newest.filter(|it| it.1 == Kind::Put).map(|it| it.2)
    }
}

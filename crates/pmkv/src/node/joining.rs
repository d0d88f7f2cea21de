//! Becoming a shard's backup: the server that has it sends all of it, a little at a time, while it
//! serves (docs/adr/0018-primary-promotion.md).
//!
//! What may not be on every replica yet comes first, as the records that it was written as; then
//! everything else, entry by entry, in order of hashes. What is written meanwhile comes to the
//! joining server as replication.

use std::collections::{BTreeSet, VecDeque};

use super::Node;
use super::promotion::patience_us;
use crate::configuration::{Configuration, Placement, ServerId, ShardId};
use crate::message::{Body, MAX_ENTRIES_BYTES};

/// Shards that a server asks for at once while it joins.
const JOINS_AT_ONCE: usize = 4;

/// A giver's other gifts may take so many turns before the next part comes.
const GIFTS_BEFORE: u64 = 32;

/// An entry counts as so many bytes at least where copies are paced.
const LEAST_COST: usize = 512;

/// A server may ask another one for a shard as who joins it, and as who will serve it: their
/// attempts differ by this.
pub(super) const OF_A_JOIN: u32 = 1 << 31;

/// Gathered entries that wait for room, in bytes; more are asked for again.
const MAX_UNADOPTED_BYTES: usize = 16 << 20;

/// A shard whose entries this server asks for, to be one of its backups.
#[derive(Default)]
pub(super) struct Join {
    primary: ServerId,
    attempt: u32,
    asked_us: u64,
    came: BTreeSet<u32>,
    /// How long a part takes at the pace that copies are made at, the longest that came.
    part_us: u64,
    is_whole: bool,
    /// All of it is written down, too.
    is_here: bool,
}

/// A shard that is sent to who joins it.
pub(super) struct OutgoingCopy {
    to: ServerId,
    shard: ShardId,
    attempt: u32,
    /// Up to this version entries were on every replica when it began.
    commit: u64,
    /// The hash that is next.
    next: u64,
    /// So many parts are sent.
    parts: u32,
}

/// Entries that were gathered and are not written down.
#[derive(Default)]
pub(super) struct PendingImport {
    entries: VecDeque<Vec<u8>>,
    bytes: usize,
}

impl PendingImport {
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub fn has_room(&self) -> bool {
        self.bytes <= MAX_UNADOPTED_BYTES
    }

    pub fn extend(&mut self, entries: Vec<Vec<u8>>) {
        self.bytes += entries.iter().map(Vec::len).sum::<usize>();
        self.entries.extend(entries);
    }

    pub fn pop(&mut self) -> Option<Vec<u8>> {
        let entry = self.entries.pop_front()?;
        self.bytes -= entry.len();
        Some(entry)
    }

    pub fn put_back(&mut self, entry: Vec<u8>) {
        self.bytes += entry.len();
        self.entries.push_front(entry);
    }

    pub fn clear(&mut self) {
        self.entries.clear();
        self.bytes = 0;
    }
}

/// Records in parts that fit a message each; one part at least.
pub(super) fn parted(records: Vec<Vec<u8>>) -> Vec<Vec<Vec<u8>>> {
    let mut parts: Vec<Vec<Vec<u8>>> = vec![Vec::new()];
    let mut bytes = 0;
    for record in records {
        bytes += record.len();
        if bytes > MAX_ENTRIES_BYTES {
            bytes = record.len();
            parts.push(Vec::new());
        }
        if let Some(last) = parts.last_mut() {
            last.push(record);
        }
    }
    parts
}

/// What copies cost, in bytes: small entries cost time rather than bytes.
fn cost(entries: &[Vec<u8>]) -> u64 {
    entries
        .iter()
        .map(|it| it.len().max(LEAST_COST) as u64)
        .sum()
}

impl Node {
    /// Asks for the shards that this server joins. What came in an earlier term is asked for again,
    /// unless all of it came: whatever was written since has come by replication.
    //= rowan §4.5
    pub(super) fn join(&mut self, configuration: &Configuration) {
        let own = self.config.server;
        let joins = |(placement, shard): (&Placement, u16)| {
            let is_mover = placement.primary == own && placement.source.is_some();
            (is_mover || placement.joining.contains(&own)).then_some((shard, placement.giver()))
        };
        let wanted: Vec<(ShardId, ServerId)> = configuration
            .shards
            .iter()
            .zip(0u16..)
            .filter_map(joins)
            .collect();
        self.unadopted.clear();
        self.gifts.clear();
        let mut before = std::mem::take(&mut self.joins);
        for &(shard, primary) in &wanted {
            let whole = before.remove(&shard);
            let whole = whole.filter(|join| join.is_here);
            let fresh = Join {
                primary,
                ..Join::default()
            };
            self.joins.insert(shard, whole.unwrap_or(fresh));
        }
        for (placement, shard) in configuration.shards.iter().zip(0u16..) {
            let moves = placement.primary == own && placement.source.is_some();
            let is_here = self.joins.get(&shard).is_some_and(|join| join.is_here);
            self.worker_of(shard).set_lacking(shard, moves && !is_here);
        }
        let is_joining = !self.joins.is_empty();
        self.control().keep_tombstones(is_joining);
    }

    /// Drops what was gathered and is not written down: shards that are not here yet are asked for
    /// again, from the beginning.
    pub(super) fn join_anew(&mut self) {
        self.unadopted.clear();
        for join in self.joins.values_mut().filter(|join| !join.is_here) {
            *join = Join {
                primary: join.primary,
                ..Join::default()
            };
        }
    }

    /// Shards that this server has joined: it has everything that the primary had, and all that
    /// came since.
    pub fn joined(&self) -> Vec<ShardId> {
        let here = self.joins.iter().filter(|(_, join)| join.is_here);
        here.map(|(&shard, _)| shard).collect()
    }

    /// How many shards this server joins, finished ones included.
    pub fn joining(&self) -> usize {
        self.joins.len()
    }

    pub(super) fn step_joins(&mut self) {
        let now_us = self.now_us;
        if self.unadopted.is_empty() {
            let came = self
                .joins
                .iter_mut()
                .filter(|(_, it)| it.is_whole && !it.is_here);
            let came: Vec<ShardId> = came
                .map(|(&shard, join)| {
                    join.is_here = true;
                    shard
                })
                .collect();
            for shard in came {
                self.worker_of(shard).set_lacking(shard, false);
            }
        }
        // What is to be served comes first: copies take as long as they take.
        if !self.promotions.is_empty() {
            return;
        }
        self.step_gifts();
        // What comes would not be taken: each new attempt has everything sent from the beginning.
        if !self.unadopted.has_room() {
            return;
        }
        let mut ask = Vec::new();
        let unfinished = self.joins.iter_mut().filter(|(_, join)| !join.is_whole);
        for (&shard, join) in unfinished.take(JOINS_AT_ONCE) {
            if join.attempt == 0 && now_us < self.join_due_us {
                break;
            }
            let patience_us = patience_us(join.attempt).max(GIFTS_BEFORE * join.part_us);
            let is_late = now_us.saturating_sub(join.asked_us) >= patience_us;
            if join.attempt == 0 || is_late {
                join.attempt += 1;
                join.asked_us = now_us;
                join.came.clear();
                ask.push((join.primary, shard, join.attempt | OF_A_JOIN));
            }
        }
        for (primary, shard, attempt) in ask {
            let body = Body::Gather {
                shard,
                attempt,
                above: 0,
            };
            self.say(primary, body);
        }
    }

    /// Begins to send a shard to who joins it; an earlier attempt in progress ends.
    pub(super) fn give(&mut self, to: ServerId, shard: ShardId, attempt: u32) {
        let is_same = |gift: &OutgoingCopy| gift.to == to && gift.shard == shard;
        if self
            .gifts
            .iter()
            .any(|it| is_same(it) && it.attempt == attempt)
        {
            return;
        }
        let before = self.gifts.iter().position(is_same);
        let before = before.and_then(|at| Some((at, self.gifts.remove(at)?)));
        let Some(it) = self.store.shard(shard) else {
            return;
        };
        if !self.control().is_drained() {
            return;
        }
        let mut gift = OutgoingCopy {
            to,
            shard,
            attempt,
            commit: it.commit(),
            next: 0,
            parts: 0,
        };
        let (first, damaged) = self.store.newer(shard, gift.commit);
        // A copy without it would count as a whole one. Who joins asks again: the key may be
        // written meanwhile.
        if damaged.is_some() {
            self.failed_gifts += 1;
            return;
        }
        self.send_parts(&mut gift, first, false);
        // Who asks again before its turn came keeps its place: it would never be at the front.
        let waits = before.filter(|(_, before)| before.next == 0);
        let at = waits.map_or(self.gifts.len(), |(at, _)| at);
        self.gifts.insert(at, gift);
    }

    /// Sends the next stretch of a shard.
    pub(super) fn step_gifts(&mut self) {
        if self.now_us < self.gift_due_us {
            return;
        }
        let Some(mut gift) = self.gifts.pop_front() else {
            return;
        };
        let stretch = self
            .store
            .stretch(gift.shard, gift.next, gift.commit, MAX_ENTRIES_BYTES);
        // As in `give`.
        let Ok((entries, next)) = stretch else {
            self.failed_gifts += 1;
            return;
        };
        self.send_parts(&mut gift, entries, next.is_none());
        if let Some(next) = next {
            gift.next = next;
            // Several shards take turns.
            self.gifts.push_back(gift);
        }
    }

    fn send_parts(&mut self, gift: &mut OutgoingCopy, entries: Vec<Vec<u8>>, is_end: bool) {
        if entries.is_empty() && !is_end {
            return;
        }
        self.gift_due_us = self.gift_due_us.max(self.now_us) + self.takes_us(cost(&entries));
        let (commit, newest) = match self.store.shard(gift.shard) {
            Some(it) => (it.commit(), it.newest()),
            None => return,
        };
        let mut parts = parted(entries).into_iter().peekable();
        while let Some(entries) = parts.next() {
            let part = gift.parts;
            gift.parts += 1;
            let is_last = is_end && parts.peek().is_none();
            let body = Body::Gathered {
                shard: gift.shard,
                attempt: gift.attempt,
                part,
                parts: if is_last { gift.parts } else { 0 },
                commit,
                newest,
                entries,
            };
            self.say(gift.to, body);
        }
    }

    /// How long so many bytes of copies take at the pace that they are made at.
    fn takes_us(&self, bytes: u64) -> u64 {
        bytes.saturating_mul(1_000_000) / self.config.join_bytes_per_s.max(1)
    }

    /// Takes a part of a shard that this server joins.
    pub(super) fn given(
        &mut self,
        from: ServerId,
        (shard, attempt): (ShardId, u32),
        (part, parts): (u32, u32),
        entries: Vec<Vec<u8>>,
    ) {
        let takes_us = self.takes_us(cost(&entries));
        let Some(join) = self.joins.get_mut(&shard) else {
            return;
        };
        if join.primary != from || join.attempt | OF_A_JOIN != attempt {
            return;
        }
        join.came.insert(part);
        join.asked_us = self.now_us;
        join.part_us = join.part_us.max(takes_us);
        // The last part is the one that knows how many there are. They come in order, or not at
        // all.
        join.is_whole |= parts > 0 && join.came.len() as u32 == parts;
        self.join_due_us = self.join_due_us.max(self.now_us) + takes_us;
        self.unadopted.extend(entries);
    }
}

//! Becoming primary of a shard: gather, scatter, serve; and becoming its backup: gather (docs/adr/0018-becoming-primary.md).

use std::collections::{BTreeMap, BTreeSet};

use super::Node;
use crate::configuration::{Configuration, KeyHash, ServerId, ShardId};
use crate::message::{ABOVE_COMMIT, Body, MAX_ENTRIES_BYTES, Message};
use crate::store::VERSION_GAP;
use crate::worker::{Role, Worker};

/// After how long a silent replica is asked again the first time, in microseconds; then twice as long each time: asking
/// for what is on its way already would only make it later.
const ASK_AGAIN_US: u64 = 50_000;

/// Shards that a server asks for at once while it joins.
const JOINS_AT_ONCE: usize = 4;

/// A server may ask another one for a shard as who joins it, and as who will serve it: their attempts differ by this.
const OF_A_JOIN: u32 = 1 << 31;

fn patience_us(attempt: u32) -> u64 {
    ASK_AGAIN_US << attempt.saturating_sub(1).min(6)
}

/// Gathered entries that wait for room, in bytes; more are asked for again.
const MAX_UNADOPTED_BYTES: usize = 16 << 20;

/// A shard on its way to be served.
pub(super) struct Promotion {
    attempt: u32,
    above: u64,
    asked_us: u64,
    /// Per replica that has not answered yet: the parts that came.
    missing: BTreeMap<ServerId, BTreeSet<u32>>,
    newest: u64,
    is_scattering: bool,
    /// The shard moves here: this server knows of no commits, the replicas do.
    is_move: bool,
}

/// A shard whose entries this server asks for, to be one of its backups.
#[derive(Default)]
pub(super) struct Join {
    primary: ServerId,
    attempt: u32,
    asked_us: u64,
    came: BTreeSet<u32>,
    is_whole: bool,
    /// All of it is written down, too.
    is_here: bool,
}

impl Promotion {
    /// Of a shard with these other replicas: those that join it, too. What the last primary had under way may lie at one of
    /// them and nowhere else; left there alone it would count once that copy is a full one.
    pub(super) fn new(replicas: impl Iterator<Item = ServerId>, is_move: bool) -> Promotion {
        Promotion {
            attempt: 0,
            above: 0,
            asked_us: 0,
            missing: replicas.map(|id| (id, BTreeSet::new())).collect(),
            newest: 0,
            is_scattering: false,
            is_move,
        }
    }
}

impl Node {
    /// Asks for the shards that this server joins. What came in an earlier term is asked for again, unless all of it came:
    /// whatever was written since has come by itself.
    //= rowan §4.5
    pub(super) fn join(&mut self, configuration: &Configuration) {
        let own = self.config.server;
        let joins = |(placement, shard): (&crate::configuration::Placement, u16)| {
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

    /// Shards that this server has joined: it has everything that the primary had, and all that came since.
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
        let mut ask = Vec::new();
        let unfinished = self.joins.iter_mut().filter(|(_, join)| !join.is_whole);
        for (&shard, join) in unfinished.take(JOINS_AT_ONCE) {
            if join.attempt == 0 && now_us < self.join_due_us {
                break;
            }
            let is_late = now_us.saturating_sub(join.asked_us) >= patience_us(join.attempt);
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

    /// Sends a replica's newest entries of a shard above a version.
    pub(super) fn tell_entries(&mut self, to: ServerId, shard: ShardId, attempt: u32, above: u64) {
        let Some(it) = self.store.shard(shard) else {
            return;
        };
        if !self.control().is_drained() {
            return;
        }
        let (commit, newest) = (it.commit(), it.newest());
        let above = if above == ABOVE_COMMIT { commit } else { above };
        let mut parts: Vec<Vec<Vec<u8>>> = vec![Vec::new()];
        let mut bytes = 0;
        for record in self.store.newer(shard, above) {
            bytes += record.len();
            if bytes > MAX_ENTRIES_BYTES {
                bytes = record.len();
                parts.push(Vec::new());
            }
            if let Some(last) = parts.last_mut() {
                last.push(record);
            }
        }
        let count = parts.len() as u32;
        for (entries, part) in parts.into_iter().zip(0..) {
            let body = Body::Gathered {
                shard,
                attempt,
                part,
                parts: count,
                commit,
                newest,
                entries,
            };
            self.say(to, body);
        }
    }

    /// Takes a part of an answer.
    pub(super) fn gathered(&mut self, message: Message) {
        let Body::Gathered {
            shard,
            attempt,
            part,
            parts,
            commit,
            newest,
            entries,
        } = message.body
        else {
            return;
        };
        let waiting: usize = self.unadopted.iter().map(Vec::len).sum();
        if part >= parts || waiting > MAX_UNADOPTED_BYTES {
            return;
        }
        let is_asked =
            |join: &&mut Join| join.primary == message.from && join.attempt | OF_A_JOIN == attempt;
        if let Some(join) = self.joins.get_mut(&shard).filter(is_asked) {
            join.came.insert(part);
            join.asked_us = self.now_us;
            join.is_whole |= join.came.len() as u32 == parts;
            let bytes: usize = entries.iter().map(Vec::len).sum();
            let takes_us =
                (bytes as u64).saturating_mul(1_000_000) / self.config.join_bytes_per_s.max(1);
            self.join_due_us = self.join_due_us.max(self.now_us) + takes_us;
            self.unadopted.extend(entries);
            return;
        }
        let Some(promotion) = self.promotions.get_mut(&shard) else {
            return;
        };
        let Some(came) = promotion.missing.get_mut(&message.from) else {
            return;
        };
        if attempt != promotion.attempt {
            return;
        }
        came.insert(part);
        // Parts still come: that is no silence.
        promotion.asked_us = self.now_us;
        promotion.newest = promotion.newest.max(newest);
        if promotion.is_move {
            promotion.above = promotion.above.max(commit);
        }
        let is_whole = came.len() as u32 == parts;
        self.unadopted.extend(entries);
        if is_whole {
            promotion.missing.remove(&message.from);
        }
    }

    /// Brings shards on their way to be served.
    pub(super) fn promote(&mut self) -> bool {
        let mut busy = self.adopt();
        // Everything that any of the old term's servers wrote here must be indexed first.
        if !self.promotions.is_empty() && self.control().is_drained() {
            let shards: Vec<ShardId> = self.promotions.keys().copied().collect();
            for shard in shards {
                busy |= self.promote_one(shard);
            }
        }
        let scattered: Vec<ShardId> = self
            .workers
            .iter_mut()
            .flat_map(Worker::take_scattered)
            .collect();
        for shard in scattered {
            self.serve(shard);
            busy = true;
        }
        busy
    }

    /// Writes gathered entries down.
    fn adopt(&mut self) -> bool {
        if self.unadopted.is_empty() {
            return false;
        }
        let unadopted = std::mem::take(&mut self.unadopted);
        let mut entries = unadopted.into_iter();
        let mut control = self.control();
        let mut left = Vec::new();
        for entry in entries.by_ref() {
            if !control.adopt_if_newer(&entry) {
                left.push(entry);
                break;
            }
        }
        drop(control);
        left.extend(entries);
        self.unadopted = left;
        true
    }

    fn promote_one(&mut self, shard: ShardId) -> bool {
        let commit = self.store.shard(shard).map_or(0, |it| it.commit());
        let now_us = self.now_us;
        let Some(promotion) = self.promotions.get_mut(&shard) else {
            return false;
        };
        if promotion.is_scattering {
            return false;
        }
        if promotion.missing.is_empty() {
            if !self.unadopted.is_empty() {
                return false;
            }
            promotion.is_scattering = true;
            let (newest, above) = (promotion.newest, promotion.above);
            if let Some(it) = self.store.shard(shard) {
                it.saw(newest);
            }
            let records = self.store.newer(shard, above);
            self.worker_of(shard).scatter(shard, records);
            return true;
        }
        let is_first = promotion.attempt == 0;
        let waited_us = now_us.saturating_sub(promotion.asked_us);
        if !is_first && waited_us < patience_us(promotion.attempt) {
            return false;
        }
        if is_first && !promotion.is_move {
            promotion.above = commit;
        }
        promotion.attempt += 1;
        promotion.asked_us = now_us;
        let above = match promotion.is_move {
            true => ABOVE_COMMIT,
            false => promotion.above,
        };
        let attempt = promotion.attempt;
        let ask: Vec<ServerId> = promotion.missing.keys().copied().collect();
        for came in promotion.missing.values_mut() {
            came.clear();
        }
        for id in ask {
            let body = Body::Gather {
                shard,
                attempt,
                above,
            };
            self.say(id, body);
        }
        true
    }

    /// Asks for keys that are not here yet of shards that move here.
    //= rowan §4.6
    pub(super) fn fetch(&mut self) {
        let mut fetches = Vec::new();
        for worker in &mut self.workers {
            worker.take_fetches(&mut fetches);
        }
        for (shard, key) in fetches {
            let placed = self.configuration.as_ref();
            let placed = placed.and_then(|it| it.shards.get(usize::from(shard)));
            if let Some(giver) = placed.map(|it| it.giver()) {
                self.say(giver, Body::Fetch { shard, key });
            }
        }
    }

    pub(super) fn tell_entry(&mut self, to: ServerId, shard: ShardId, key: Vec<u8>) {
        if !self.control().is_drained() {
            return;
        }
        let hash = KeyHash::of(&key).hash;
        let found = self.store.find(shard, hash, &key);
        let entry = found.map(|it| it.bytes().to_vec());
        self.say(to, Body::Fetched { shard, key, entry });
    }

    pub(super) fn fetched(
        &mut self,
        from: ServerId,
        shard: ShardId,
        key: &[u8],
        entry: Option<Vec<u8>>,
    ) {
        let placed = self.configuration.as_ref();
        let placed = placed.and_then(|it| it.shards.get(usize::from(shard)));
        if placed.is_none_or(|it| it.source != Some(from)) {
            return;
        }
        // Without room it is asked for again.
        if entry.is_none_or(|entry| self.control().adopt_if_newer(&entry)) {
            self.worker_of(shard).fetched(shard, key);
        }
    }

    /// All replicas have the same entries of a shard.
    fn serve(&mut self, shard: ShardId) {
        if self.promotions.remove(&shard).is_none() {
            return;
        }
        if let Some(it) = self.store.shard(shard) {
            let newest = it.newest();
            it.committed(newest);
            //= rowan §4.5
            it.saw(newest.saturating_add(VERSION_GAP));
        }
        self.serving.insert(shard);
        self.worker_of(shard).set_role(shard, Role::Serving);
    }
}

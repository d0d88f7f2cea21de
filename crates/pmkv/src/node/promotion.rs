//! Becoming primary of a shard: gather, scatter, serve (docs/adr/0018-primary-promotion.md).

use std::collections::{BTreeMap, BTreeSet};

use super::Node;
use super::joining::{OF_A_JOIN, parted};
use crate::configuration::{KeyHash, ServerId, ShardId};
use crate::message::{ABOVE_COMMIT, Body, Message};
use crate::store::VERSION_GAP;
use crate::worker::{Role, Worker};

/// After how long a silent replica is asked again the first time, in microseconds; then twice as
/// long each time: asking for what is on its way already would only make it later.
const ASK_AGAIN_US: u64 = 50_000;

/// Gathered entries that are written down in one step: what is served waits meanwhile.
const ADOPTED_AT_ONCE: usize = 256;

pub(super) fn patience_us(attempt: u32) -> u64 {
    ASK_AGAIN_US << attempt.saturating_sub(1).min(6)
}

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

impl Promotion {
    /// Of a shard with these other replicas: those that join it, too. What the last primary had in
    /// flight may lie at one of them and nowhere else; left there alone it would count once that
    /// copy is a full one.
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
    /// Sends a primary-to-be what is here of a shard above a version.
    pub(super) fn tell_entries(&mut self, to: ServerId, shard: ShardId, attempt: u32, above: u64) {
        if attempt & OF_A_JOIN != 0 {
            return self.give(to, shard, attempt);
        }
        let Some(it) = self.store.shard(shard) else {
            return;
        };
        if !self.control().is_drained() {
            return;
        }
        let (commit, newest) = (it.commit(), it.newest());
        let above = if above == ABOVE_COMMIT { commit } else { above };
        // What is damaged here the other replicas have, if it counts.
        let (newer, _) = self.store.newer(shard, above);
        let parts = parted(newer);
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
        if !self.unadopted.has_room() {
            return;
        }
        if attempt & OF_A_JOIN != 0 {
            return self.given(message.from, (shard, attempt), (part, parts), entries);
        }
        let Some(promotion) = self.promotions.get_mut(&shard) else {
            return;
        };
        let Some(came) = promotion.missing.get_mut(&message.from) else {
            return;
        };
        if attempt != promotion.attempt || part >= parts {
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
        let (is_copy, mut adopted) = (self.promotions.is_empty(), false);
        let mut unadopted = std::mem::take(&mut self.unadopted);
        {
            let mut control = self.control();
            for _ in 0..ADOPTED_AT_ONCE {
                // A copy that is made leaves what everything else needs; what is on its way to be
                // served may take that.
                if is_copy && !control.has_room_to_spare() {
                    break;
                }
                let Some(entry) = unadopted.pop() else { break };
                if !control.adopt_if_newer(&entry) {
                    unadopted.put_back(entry);
                    break;
                }
                adopted = true;
            }
        }
        self.unadopted = unadopted;
        adopted
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
            let (records, _) = self.store.newer(shard, above);
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
        // Who asks must not take a damaged entry for none: it gives up after a while.
        let Ok(found) = self.store.look(shard, hash, &key) else {
            return;
        };
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

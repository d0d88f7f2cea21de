//! Becoming primary of a shard: gather, scatter, serve; and becoming its backup: gather (docs/adr/0018-becoming-primary.md).

use std::collections::{BTreeMap, BTreeSet};

use super::Node;
use crate::configuration::{Configuration, ServerId, ShardId};
use crate::message::{Body, MAX_ENTRIES_BYTES, Message};
use crate::store::VERSION_GAP;
use crate::worker::{Role, Worker};

/// After how long a silent replica is asked again the first time, in microseconds; then twice as long each time: asking
/// for what is on its way already would only make it later.
const ASK_AGAIN_US: u64 = 50_000;

/// Shards that a server asks for at once while it joins.
const JOINS_AT_ONCE: usize = 4;

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
}

/// A shard whose entries this server asks for, to be one of its backups.
#[derive(Default)]
pub(super) struct Join {
    primary: ServerId,
    attempt: u32,
    asked_us: u64,
    came: BTreeSet<u32>,
    is_whole: bool,
}

impl Promotion {
    /// Of a shard with these other full replicas.
    pub(super) fn new(replicas: &[ServerId]) -> Promotion {
        Promotion {
            attempt: 0,
            above: 0,
            asked_us: 0,
            missing: replicas.iter().map(|&id| (id, BTreeSet::new())).collect(),
            newest: 0,
            is_scattering: false,
        }
    }
}

impl Node {
    /// Asks for the shards that this server joins. What came in an earlier term is asked for again.
    //= rowan §4.5
    pub(super) fn join(&mut self, configuration: &Configuration) {
        let own = self.config.server;
        self.joins = configuration
            .shards
            .iter()
            .zip(0u16..)
            .filter(|(placement, _)| placement.joining.contains(&own))
            .map(|(placement, shard)| {
                let primary = placement.primary;
                (
                    shard,
                    Join {
                        primary,
                        ..Join::default()
                    },
                )
            })
            .collect();
        let is_joining = !self.joins.is_empty();
        self.control().keep_tombstones(is_joining);
    }

    /// Shards that this server has joined: it has everything that the primary had, and all that came since.
    pub fn joined(&self) -> Vec<ShardId> {
        let whole = self.joins.iter().filter(|(_, join)| join.is_whole);
        let all_written = self.unadopted.is_empty();
        whole
            .filter(|_| all_written)
            .map(|(&shard, _)| shard)
            .collect()
    }

    pub(super) fn step_joins(&mut self) {
        let now_us = self.now_us;
        let mut ask = Vec::new();
        let unfinished = self.joins.iter_mut().filter(|(_, join)| !join.is_whole);
        for (&shard, join) in unfinished.take(JOINS_AT_ONCE) {
            let is_late = now_us.saturating_sub(join.asked_us) >= patience_us(join.attempt);
            if join.attempt == 0 || is_late {
                join.attempt += 1;
                join.asked_us = now_us;
                join.came.clear();
                ask.push((join.primary, shard, join.attempt));
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
            newest,
            entries,
            ..
        } = message.body
        else {
            return;
        };
        let waiting: usize = self.unadopted.iter().map(Vec::len).sum();
        if part >= parts || waiting > MAX_UNADOPTED_BYTES {
            return;
        }
        let is_asked = |join: &&mut Join| join.primary == message.from && join.attempt == attempt;
        if let Some(join) = self.joins.get_mut(&shard).filter(is_asked) {
            join.came.insert(part);
            join.asked_us = self.now_us;
            join.is_whole |= join.came.len() as u32 == parts;
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
        if is_first {
            promotion.above = commit;
        }
        promotion.attempt += 1;
        promotion.asked_us = now_us;
        let (attempt, above) = (promotion.attempt, promotion.above);
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

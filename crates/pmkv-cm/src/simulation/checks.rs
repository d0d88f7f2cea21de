//! What must hold.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::world::World;
use crate::config::{Configuration, ServerId, ShardId};

/// What is known over a whole run.
#[derive(Default)]
pub(crate) struct Known {
    /// One term, one content.
    pub terms: BTreeMap<u64, Vec<u8>>,
    /// Acknowledged writes by shard.
    pub acked: BTreeMap<ShardId, BTreeSet<u64>>,
    pub highest_written: u64,
    pub broken: Option<String>,
}

impl World {
    pub fn break_if(&mut self, broken: bool, what: impl FnOnce() -> String) {
        if broken && self.known.broken.is_none() {
            self.known.broken = Some(format!("at {} us: {}", self.now_us, what()));
        }
    }

    /// At most one server would serve a shard now, those that are paused included: they might be
    /// past their check.
    pub fn check_primaries(&mut self) {
        let now_us = self.now_us;
        for shard in 0..self.shards {
            let serves = |server: &&super::engine::Server| {
                let now_us = server.clock.read(now_us);
                let process = server.process.as_ref();
                process.is_some_and(|p| p.holder.may_serve(shard, now_us).is_ok())
            };
            let all: Vec<ServerId> = self.servers.iter().filter(serves).map(|s| s.id).collect();
            self.break_if(all.len() > 1, || format!("{all:?} all serve shard {shard}"));
        }
    }

    /// A configuration was written: sound, new, and everybody listed as a full copy holds every
    /// acknowledged write.
    pub fn check_written(&mut self, config: &Arc<Configuration>) {
        let (sound, highest) = (config.check(), self.known.highest_written);
        self.break_if(sound.is_err(), || format!("{sound:?}"));
        self.break_if(config.term <= highest, || {
            format!("term {} after {highest}", config.term)
        });
        self.known.highest_written = config.term;
        self.check_term(config);
        self.check_copies(config);
    }

    pub fn check_term(&mut self, config: &Configuration) {
        let bytes = config.encode();
        let decoded = Configuration::decode(&bytes);
        self.break_if(decoded.as_ref() != Ok(config), || format!("{decoded:?}"));
        let known = self
            .known
            .terms
            .entry(config.term)
            .or_insert_with(|| bytes.clone());
        let same = *known == bytes;
        self.break_if(!same, || format!("term {} has two contents", config.term));
    }

    pub fn check_copies(&mut self, config: &Configuration) {
        let mut lost = None;
        for (number, shard) in config.numbered() {
            let Some(acked) = self.known.acked.get(&number) else {
                continue;
            };
            for copy in &shard.full {
                let server = self.servers.iter().find(|server| server.id == copy.server);
                let data = server.and_then(|s| s.data.get(&number));
                let whole =
                    data.is_some_and(|d| d.since == copy.since && d.writes.is_superset(acked));
                if !whole {
                    let held =
                        data.map(|d| (d.since, acked.difference(&d.writes).collect::<Vec<_>>()));
                    lost = Some(format!(
                        "shard {number} {copy:?} in {}: {held:?}",
                        config.term
                    ));
                }
            }
        }
        self.break_if(lost.is_some(), || {
            format!("acknowledged writes are missing: {lost:?}")
        });
    }

    /// After everything has healed: all is served, whole, and quiet.
    pub fn check_healed(&mut self) {
        let now_us = self.now_us;
        let newest = self
            .managers
            .iter()
            .filter_map(|m| m.process.as_ref())
            .find(|p| p.manager.in_office(p.clock.read(now_us)));
        let Some((config, committed)) = newest.and_then(|p| p.manager.configuration()) else {
            return self.break_if(true, || "no manager is in office".into());
        };
        let config = config.clone();
        let (term, moving) = (config.term, config.migrations.len());
        self.break_if(committed != term, || {
            format!("{committed} of {term} committed")
        });
        self.break_if(moving > 0, || {
            format!("{:?} have not ended", config.migrations)
        });
        let live = config.up().count().min(config.replication.into());
        for (number, shard) in config.numbered() {
            self.break_if(shard.full.len() < live || !shard.joining.is_empty(), || {
                format!("shard {number} has not its copies: {shard:?}")
            });
            let server = self.servers.iter().find(|s| s.id == shard.primary);
            let serves = server.is_some_and(|s| {
                let local_us = s.clock.read(now_us);
                s.process.as_ref().is_some_and(|p| {
                    p.promoted.contains_key(&number) && p.holder.may_serve(number, local_us).is_ok()
                })
            });
            self.break_if(!serves, || {
                format!("shard {number} is not served: {shard:?}")
            });
        }
        self.check_copies(&config);
    }
}

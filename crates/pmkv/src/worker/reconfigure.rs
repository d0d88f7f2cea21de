//! From one configuration to the next: what is in flight is sent again, or given up.

use std::sync::Arc;

use cyclone_fabric::Address;
use cyclone_replication::{BackupId, Sender};

use super::held::Held;
use super::links::Links;
use super::versions::Versions;
use super::{Answer, Purpose, Role, Worker};
use crate::configuration::{Configuration, ServerId, ShardId};

impl Worker {
    /// Goes over to a configuration, with a sender of its term. Shards that this worker served and
    /// shall serve are served on; other shards must be prepared first. What was in flight is sent
    /// again.
    //= rowan §4.5
    pub fn install(&mut self, configuration: &Configuration, sender: Box<dyn Sender>) {
        let own = self.config.server;
        let others = configuration.servers.iter().filter(|it| it.id != own);
        let others: Vec<(ServerId, Address)> = others.map(|it| (it.id, it.log.clone())).collect();
        self.links = Some(Links::new(sender, others));
        self.full_servers
            .retain(|&id| configuration.server(id).is_some());
        for (mine, placement) in self.shards.iter_mut().zip(&configuration.shards) {
            mine.backups = placement.receivers().map(BackupId).collect();
            if placement.primary != own {
                mine.role = Role::Elsewhere;
                self.moving -= usize::from(mine.lacking.take().is_some());
            }
            // A joining server has heard of none.
            (mine.told, mine.noted) = (0, 0);
            // What is prepared is prepared anew.
            mine.scattering = 0;
        }
        self.staged.clear();
        self.held = Held::default();
        let mut contexts: Vec<u64> = self.ops.keys().copied().collect();
        contexts.sort_unstable();
        for context in contexts {
            let shard = self.ops.get(&context).map_or(0, |op| usize::from(op.shard));
            let placement = configuration.shards.get(shard);
            if placement.is_some_and(|it| it.primary != own && it.holds(own)) {
                self.keep(context);
            }
            self.stage_again(context);
        }
        self.fetch_anew();
    }

    /// This server is a backup from now on of a shard that it served: what it had in flight is here
    /// like any backup's, and the new primary asks for it.
    fn keep(&self, context: u64) {
        if let Some(op) = self.ops.get(&context)
            && matches!(op.purpose, Purpose::Write { .. })
        {
            self.store.publish_record(op.address, &op.record);
        }
    }

    pub(super) fn stage_again(&mut self, context: u64) {
        let Some(op) = self.ops.get_mut(&context) else {
            return;
        };
        let mine = &self.shards[usize::from(op.shard)];
        let is_lost = match op.purpose {
            Purpose::Notice => true,
            Purpose::Scatter => mine.scattering == 0,
            Purpose::Write { .. } => mine.role == Role::Elsewhere,
        };
        if is_lost {
            self.give_up(context);
        } else {
            op.backups = Arc::clone(&mine.backups);
            self.staged.push_back(context);
            self.stats.resent += 1;
        }
    }

    /// Ends an op whose shard is no longer this worker's.
    fn give_up(&mut self, context: u64) {
        let Some(op) = self.ops.remove(&context) else {
            return;
        };
        if let Purpose::Write { ticket, keys, .. } = op.purpose {
            self.answers.extend(ticket.map(|it| (it, Answer::Unknown)));
            self.log.settle(op.address);
            self.shards[usize::from(op.shard)].versions = Versions::default();
            self.leave(&keys);
        }
    }

    /// Copies of these shards begin anew here, or are given up: what is in flight for them is not
    /// sent again, its versions may be given to other entries.
    pub fn void(&mut self, shards: &[ShardId]) {
        let mut contexts: Vec<u64> = self
            .ops
            .iter()
            .filter(|(_, op)| shards.contains(&op.shard) && !matches!(op.purpose, Purpose::Notice))
            .map(|(&context, _)| context)
            .collect();
        contexts.sort_unstable();
        for context in contexts {
            self.give_up(context);
        }
        for &shard in shards {
            self.scattered.retain(|&it| it != shard);
            if let Some(mine) = self.shards.get_mut(usize::from(shard)) {
                mine.scattering = 0;
            }
        }
    }
}

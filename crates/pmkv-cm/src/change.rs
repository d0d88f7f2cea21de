//! From one configuration to the next: pure functions over a draft. What can go wrong in a cluster
//! is decided here, and in [`Draft::settle`] it is made good. //= rowan §4.5, §4.6

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use crate::config::{
    Configuration, Copy, ManagerId, Member, Migration, MigrationKind, ServerId, Shard, ShardId,
    Standing,
};
use crate::message::Hello;
use crate::planted::{planted, unless_planted};

/// How much each shard weighs when primaries are chosen; shards not named weigh 1.
pub(crate) type Weights = BTreeMap<ShardId, u64>;

/// The next configuration in the making.
pub(crate) struct Draft<'a> {
    config: Configuration,
    weights: &'a Weights,
    changed: bool,
    /// Shards that servers serve, by weight, and how many.
    serving: BTreeMap<ServerId, (u64, usize)>,
}

/// Whether a shard may take part in another change: nothing of it is on the move.
pub(crate) fn at_rest(config: &Configuration, number: ShardId) -> bool {
    config.migration(number).is_none()
        && config.shards[usize::from(number)].joining.is_empty()
        && config.is_up(config.shards[usize::from(number)].primary)
}

impl<'a> Draft<'a> {
    /// Begins with a copy under the next term.
    pub(crate) fn new(
        base: &Configuration,
        manager: ManagerId,
        epoch: u64,
        weights: &'a Weights,
    ) -> Draft<'a> {
        let mut config = base.clone();
        // 64 bits of changes are never used up.
        config.term += 1;
        (config.manager, config.epoch) = (manager, epoch);
        let mut draft = Draft {
            config,
            weights,
            changed: false,
            serving: BTreeMap::new(),
        };
        for (number, shard) in base.numbered() {
            draft.count_primary(shard.primary, number);
        }
        draft
    }

    /// The configuration so far.
    pub(crate) fn config(&self) -> &Configuration {
        &self.config
    }

    /// The new configuration, or `None` when nothing has changed.
    pub(crate) fn finish(mut self, even_unchanged: bool) -> Option<Configuration> {
        unless_planted!(MovedWithoutCopy, self.settle());
        (self.changed || even_unchanged).then_some(self.config)
    }

    fn weight(&self, shard: ShardId) -> u64 {
        self.weights.get(&shard).copied().unwrap_or(0) + 1
    }

    fn count_primary(&mut self, server: ServerId, shard: ShardId) {
        let weight = self.weight(shard);
        let serving = self.serving.entry(server).or_default();
        *serving = (serving.0.saturating_add(weight), serving.1 + 1);
    }

    fn member_mut(&mut self, id: ServerId) -> Option<&mut Member> {
        self.config.members.iter_mut().find(|m| m.id == id)
    }

    /// These have failed. One that was drained and holds nothing any more has just left.
    pub(crate) fn fail(&mut self, failed: &BTreeSet<ServerId>) {
        let held = held(&self.config);
        for member in &mut self.config.members {
            if failed.contains(&member.id) && member.standing != Standing::Down {
                let drains = member.standing == Standing::Draining;
                member.drains = drains && held.contains_key(&member.id);
                member.standing = Standing::Down;
                self.changed = true;
            }
        }
    }

    /// A process of this server is there and is not yet a member: a new server, one that comes
    /// back, or one that was restarted before anybody took it for failed. The memory is the
    /// member's own, if it is one that holds anything.
    pub(crate) fn welcome(&mut self, hello: &Hello) {
        let term = self.config.term;
        self.changed = true;
        let fresh = Member {
            id: hello.server,
            incarnation: hello.incarnation,
            session: hello.session,
            since: term,
            standing: Standing::Live,
            drains: false,
            client: hello.client.clone(),
            peer: hello.peer.clone(),
        };
        let Some(member) = self.member_mut(hello.server) else {
            let at = self.config.members.partition_point(|m| m.id < hello.server);
            return self.config.members.insert(at, fresh);
        };
        let standing = match member.standing {
            Standing::Draining => Standing::Draining,
            // An operator's word holds until it is taken back.
            Standing::Down if member.drains => Standing::Draining,
            Standing::Live | Standing::Down => Standing::Live,
        };
        *member = Member { standing, ..fresh };
        // What it serves must be recovered before it is served again.
        for shard in &mut self.config.shards {
            if shard.primary == hello.server {
                shard.since = term;
            }
        }
    }

    /// A copy has become full; `false` if that is no news.
    pub(crate) fn copied(&mut self, server: ServerId, number: ShardId, since: u64) -> bool {
        let migration = self.config.migration(number).copied();
        // What has just failed is not made the only full copy.
        let up = self.config.is_up(server);
        let shard = self.config.shards.get_mut(usize::from(number));
        let Some(shard) = shard.filter(|_| up) else {
            return false;
        };
        let fits = |copy: &Copy| {
            copy.server == server && (copy.since == since || planted!(OldReportCounts))
        };
        let Some(place) = shard.joining.iter().position(fits) else {
            return false;
        };
        let copy = shard.joining.remove(place);
        shard.full.push(copy);
        self.changed = true;
        if let Some(migration) = migration.filter(|m| m.target == server) {
            if migration.source != shard.primary {
                shard.full.retain(|copy| copy.server != migration.source);
            }
            self.config.migrations.retain(|m| m.shard != number);
        }
        true
    }

    /// The server is to hold nothing any more.
    pub(crate) fn drain(&mut self, id: ServerId) {
        let Some(member) = self.member_mut(id) else {
            return;
        };
        let before = (member.standing, member.drains);
        match member.standing {
            Standing::Live => member.standing = Standing::Draining,
            Standing::Draining => {}
            Standing::Down => member.drains = true,
        }
        let is_new = before != (member.standing, member.drains);
        self.changed |= is_new;
    }

    /// Takes back [`Draft::drain`].
    pub(crate) fn undrain(&mut self, id: ServerId) {
        let Some(member) = self.member_mut(id) else {
            return;
        };
        let drained = member.standing == Standing::Draining || member.drains;
        if member.standing == Standing::Draining {
            member.standing = Standing::Live;
        }
        member.drains = false;
        self.changed |= drained;
    }

    /// Gives up a failed server's copies, the last ones of shards included: their content is lost,
    /// and they begin anew, empty, elsewhere. Only on an operator's word.
    pub(crate) fn forget(&mut self, id: ServerId) {
        let term = self.config.term;
        let Some(heir) = self.emptiest(|_| true) else {
            return;
        };
        if self.config.is_up(id) {
            return;
        }
        self.undrain(id);
        for shard in &mut self.config.shards {
            if !shard.has_full(id) {
                continue;
            }
            shard.full.retain(|copy| copy.server != id);
            if shard.full.is_empty() {
                shard.full.push(Copy {
                    server: heir,
                    since: term,
                });
            }
            if shard.primary == id {
                (shard.primary, shard.since) = (shard.full[0].server, term);
            }
            self.changed = true;
        }
    }

    /// Begins to move a shard's primary, or exchanges it with a backup that stands at the target
    /// already.
    pub(crate) fn move_primary(&mut self, number: ShardId, target: ServerId) {
        let term = self.config.term;
        if !at_rest(&self.config, number) || !self.is_live(target) {
            return;
        }
        let shard = &mut self.config.shards[usize::from(number)];
        let source = shard.primary;
        if source == target {
            return;
        }
        if !shard.has_full(target) && !planted!(MovedWithoutCopy) {
            shard.joining.push(Copy {
                server: target,
                since: term,
            });
            self.begin(Migration {
                shard: number,
                kind: MigrationKind::Primary,
                source,
                target,
            });
        }
        let shard = &mut self.config.shards[usize::from(number)];
        (shard.primary, shard.since) = (target, term);
        self.changed = true;
    }

    /// Begins to move a backup's copy.
    pub(crate) fn move_backup(&mut self, number: ShardId, source: ServerId, target: ServerId) {
        let term = self.config.term;
        let shard = &self.config.shards[usize::from(number)];
        let fits = shard.primary != source && shard.has_full(source) && !shard.has(target);
        if !fits || !at_rest(&self.config, number) || !self.is_live(target) {
            return;
        }
        let copy = Copy {
            server: target,
            since: term,
        };
        self.config.shards[usize::from(number)].joining.push(copy);
        self.begin(Migration {
            shard: number,
            kind: MigrationKind::Backup,
            source,
            target,
        });
        self.changed = true;
    }

    fn begin(&mut self, migration: Migration) {
        let migrations = &mut self.config.migrations;
        let at = migrations.partition_point(|m| m.shard < migration.shard);
        migrations.insert(at, migration);
    }

    fn is_live(&self, id: ServerId) -> bool {
        let member = self.config.member(id);
        member.is_some_and(|member| member.standing == Standing::Live)
    }

    /// Copies that each server gives or takes at present.
    fn busy(&self) -> BTreeMap<ServerId, usize> {
        let mut busy = BTreeMap::new();
        for task in self.config.copy_tasks() {
            *busy.entry(task.from).or_insert(0) += 1;
            *busy.entry(task.to).or_insert(0) += 1;
        }
        busy
    }

    /// The live server with the fewest copies of those that may be.
    fn emptiest(&self, may: impl Fn(ServerId) -> bool) -> Option<ServerId> {
        let held = held(&self.config);
        let live = self
            .config
            .members
            .iter()
            .filter(|m| m.standing == Standing::Live && may(m.id));
        live.map(|m| m.id)
            .min_by_key(|id| (held.get(id).copied().unwrap_or(0), *id))
    }

    /// Begins new copies where shards have too few, `limit` per server at once. //= rowan §4.5
    pub(crate) fn repair(&mut self, limit: usize) {
        let (term, mut busy) = (self.config.term, self.busy());
        let live = self
            .config
            .members
            .iter()
            .filter(|m| m.standing == Standing::Live);
        let wanted = live.count().min(usize::from(self.config.replication));
        for number in (0..).take(self.config.shards.len()) {
            let shard = &self.config.shards[usize::from(number)];
            let from = shard.primary;
            let too_few = shard.copies().count() < wanted && self.config.is_up(from);
            let given = |id: ServerId| busy.get(&id).copied().unwrap_or(0);
            if !too_few || self.config.migration(number).is_some() || given(from) >= limit {
                continue;
            }
            let Some(to) = self.emptiest(|id| given(id) < limit && !shard.has(id)) else {
                continue;
            };
            for id in [from, to] {
                *busy.entry(id).or_insert(0) += 1;
            }
            self.config.shards[usize::from(number)].joining.push(Copy {
                server: to,
                since: term,
            });
            self.changed = true;
        }
    }

    /// Moves what draining servers hold, `limit` copies per server at once: primaries go to a
    /// backup where there is one, which costs no copy.
    pub(crate) fn empty_draining(&mut self, limit: usize) {
        let draining: BTreeSet<ServerId> = self
            .config
            .members
            .iter()
            .filter(|m| m.standing == Standing::Draining)
            .map(|m| m.id)
            .collect();
        if draining.is_empty() {
            return;
        }
        let mut busy = self.busy();
        for number in (0..).take(self.config.shards.len()) {
            let shard = &self.config.shards[usize::from(number)];
            if !at_rest(&self.config, number) {
                continue;
            }
            if draining.contains(&shard.primary)
                && let Some(heir) = self.heir(number, false)
            {
                self.move_primary(number, heir);
                continue;
            }
            let held = shard.full.iter().map(|copy| copy.server);
            let Some(source) = held.clone().find(|id| draining.contains(id)) else {
                continue;
            };
            let given = |id: ServerId| busy.get(&id).copied().unwrap_or(0);
            let from = shard.primary;
            let to = self.emptiest(|id| given(id) < limit && !shard.has(id));
            let Some(to) = to.filter(|_| given(from) < limit) else {
                continue;
            };
            for id in [from, to] {
                *busy.entry(id).or_insert(0) += 1;
            }
            if from == source {
                self.move_primary(number, to);
            } else {
                self.move_backup(number, source, to);
            }
        }
    }

    /// Who is to serve a shard, of those with full copies: a live server before a draining one, the
    /// one with the least to serve. `draining`: whether draining servers may.
    fn heir(&self, number: ShardId, draining: bool) -> Option<ServerId> {
        let shard = &self.config.shards[usize::from(number)];
        let joining = shard.joining.iter().filter(|_| planted!(JoiningPromoted));
        let up = joining
            .chain(&shard.full)
            .filter_map(|copy| self.config.member(copy.server));
        up.filter(|m| {
            m.standing == Standing::Live || (draining && m.standing == Standing::Draining)
        })
        .min_by_key(|m| {
            let serving = self.serving.get(&m.id).copied().unwrap_or((0, 0));
            (m.standing != Standing::Live, serving, m.id)
        })
        .map(|m| m.id)
    }

    /// Makes good what failures have broken: migrations with a dead side are rolled back, dead
    /// copies dropped where a full one lives, primaries named where they are missing, members
    /// without copies forgotten when they are down and need not be remembered as draining.
    pub(crate) fn settle(&mut self) {
        let down: BTreeSet<ServerId> = self
            .config
            .members
            .iter()
            .filter(|m| m.standing == Standing::Down)
            .map(|m| m.id)
            .collect();
        self.roll_back(&down);
        // Heavy shards choose first, so that the weights come out even.
        let mut order: Vec<ShardId> = self.config.numbered().map(|(number, _)| number).collect();
        order.sort_by_key(|number| std::cmp::Reverse(self.weight(*number)));
        for number in order {
            self.settle_shard(number, &down);
        }
        let shards = &self.config.shards;
        let named: BTreeSet<ServerId> = shards
            .iter()
            .flat_map(|shard| shard.copies().map(|copy| copy.server))
            .collect();
        let before = self.config.members.len();
        self.config
            .members
            .retain(|m| m.standing != Standing::Down || m.drains || named.contains(&m.id));
        self.changed |= self.config.members.len() != before;
    }

    fn settle_shard(&mut self, number: ShardId, down: &BTreeSet<ServerId>) {
        let moving = self.config.migration(number).is_some();
        let shard = &mut self.config.shards[usize::from(number)];
        let before = shard.copies().count();
        shard.joining.retain(|copy| !down.contains(&copy.server));
        if shard.full.iter().any(|copy| !down.contains(&copy.server)) {
            shard.full.retain(|copy| !down.contains(&copy.server));
        } else {
            // What was being copied from the dead is of no use.
            shard.joining.clear();
            if planted!(LastCopyDropped) {
                self.drop_last(number);
                return;
            }
        }
        let shard = &self.config.shards[usize::from(number)];
        self.changed |= shard.copies().count() != before;
        let served = shard.has_full(shard.primary) || (moving && shard.has(shard.primary));
        if served && !down.contains(&shard.primary) {
            return self.trim(number);
        }
        let Some(heir) = self.heir(number, true) else {
            return;
        };
        if planted!(JoiningPromoted) && !shard.has_full(heir) {
            let shard = &mut self.config.shards[usize::from(number)];
            shard.full.append(&mut shard.joining);
        }
        self.count_primary(heir, number);
        let term = self.config.term;
        let shard = &mut self.config.shards[usize::from(number)];
        (shard.primary, shard.since) = (heir, term);
        self.changed = true;
    }

    /// The planted mistake of this place.
    fn drop_last(&mut self, number: ShardId) {
        let term = self.config.term;
        if let Some(heir) = self.emptiest(|_| true) {
            let shard = &mut self.config.shards[usize::from(number)];
            shard.full = vec![Copy {
                server: heir,
                since: term,
            }];
            (shard.primary, shard.since) = (heir, term);
            self.changed = true;
        }
    }

    /// More full copies than wanted, and nothing on the move: one backup goes, a draining one
    /// first.
    fn trim(&mut self, number: ShardId) {
        let wanted = usize::from(self.config.replication);
        let shard = &self.config.shards[usize::from(number)];
        if shard.full.len() <= wanted || !at_rest(&self.config, number) {
            return;
        }
        let held = held(&self.config);
        let surplus = shard
            .full
            .iter()
            .filter(|copy| copy.server != shard.primary);
        let surplus = surplus.max_by_key(|copy| {
            let drains = !self.is_live(copy.server);
            (drains, held.get(&copy.server).copied().unwrap_or(0))
        });
        if let Some(server) = surplus.map(|copy| copy.server) {
            let shard = &mut self.config.shards[usize::from(number)];
            shard.full.retain(|copy| copy.server != server);
            self.changed = true;
        }
    }

    fn roll_back(&mut self, down: &BTreeSet<ServerId>) {
        let (term, mut changed) = (self.config.term, false);
        let shards = &mut self.config.shards;
        self.config.migrations.retain(|migration| {
            let (source, target) = (migration.source, migration.target);
            if !down.contains(&source) && !down.contains(&target) {
                return true;
            }
            changed = true;
            let shard: &mut Shard = &mut shards[usize::from(migration.shard)];
            if planted!(RollbackKeepsTarget) && !down.contains(&target) {
                shard.full.append(&mut shard.joining);
                return false;
            }
            if migration.kind == MigrationKind::Primary {
                (shard.primary, shard.since) = (source, term);
                shard.joining.retain(|copy| copy.server != target);
            }
            // A backup's copy whose source died goes on: the primary feeds it.
            false
        });
        self.changed |= changed;
    }
}

/// How many copies each server holds or makes.
pub(crate) fn held(config: &Configuration) -> BTreeMap<ServerId, usize> {
    let mut held = BTreeMap::new();
    for copy in config.shards.iter().flat_map(Shard::copies) {
        *held.entry(copy.server).or_insert(0) += 1;
    }
    held
}

//! Shards that move to another server (rowan §4.6), and what happens when either side ends
//! meanwhile.

use cyclone_pmkv::ServerId;

use super::World;

/// A shard on its way.
#[derive(Clone, Copy, Debug)]
pub struct Move {
    pub shard: u16,
    pub source: ServerId,
    pub target: ServerId,
}

impl World {
    /// Keys that servers have fetched from others so far.
    pub fn fetched(&mut self) -> u64 {
        let live = self.live();
        let mut sum = 0;
        for id in live {
            sum += self.node(id).worker(0).expect("one").stats().fetched;
        }
        sum
    }

    /// A shard that can move, and where to: to a server that has nothing of it.
    pub fn some_move(&mut self) -> Option<Move> {
        let count = self.configuration.shards.len() as u64;
        let shard = self.random.below(count) as u16;
        let placement = &self.configuration.shards[usize::from(shard)];
        let source = placement.primary;
        let targets: Vec<ServerId> = self
            .live()
            .into_iter()
            .filter(|&id| !placement.holds(id))
            .collect();
        let target = *targets.first()?;
        Some(Move {
            shard,
            source,
            target,
        })
    }

    /// The target is the primary from now on, and fetches what it lacks.
    pub fn begin_move(&mut self, it: Move) {
        self.configuration.term += 1;
        let placement = &mut self.configuration.shards[usize::from(it.shard)];
        placement.backups.push(it.source);
        placement.primary = it.target;
        placement.source = Some(it.source);
        self.reconfigure_and_void(&[(it.target, it.shard)]);
    }

    /// Requests go on until the target has everything; then the source gives its copy up.
    pub fn finish_move(&mut self, it: Move) {
        for _ in 0..400 {
            if self.node(it.target).joined().contains(&it.shard) {
                break;
            }
            self.run(100);
            self.fabric.run_for(10_000);
        }
        let joined = self.node(it.target).joined();
        if !joined.contains(&it.shard) {
            for id in self.live() {
                let node = self.node(id);
                let control = node.control();
                let (drained, free, stats) = (
                    control.is_drained(),
                    control.table().free_segments(),
                    control.stats(),
                );
                drop(control);
                let roles: Vec<_> = (0..6).map(|shard| node.role(shard)).collect();
                println!("{id}: drained {drained} free {free} {roles:?} {stats:?}");
            }
            panic!("seed {}: {it:?}", self.seed);
        }
        self.configuration.term += 1;
        let placement = &mut self.configuration.shards[usize::from(it.shard)];
        placement.source = None;
        placement.backups.retain(|&id| id != it.source);
        self.reconfigure_and_void(&[(it.source, it.shard)]);
    }

    /// One side ends before that: the shard goes to the source, or to another full backup.
    pub fn roll_back(&mut self, it: Move, is_targets_end: bool, power: bool) {
        let failed = if is_targets_end { it.target } else { it.source };
        self.end(failed, power);
        self.steps(30);
        let (mut next, _) = self.configuration.without(failed);
        let placement = &mut next.shards[usize::from(it.shard)];
        if is_targets_end {
            placement.primary = it.source;
            placement.backups.retain(|&id| id != it.source);
        } else {
            placement.primary = placement.backups.remove(0);
        }
        placement.source = None;
        self.configuration = next;
        let given_up = [(it.target, it.shard)];
        self.reconfigure_and_void(if is_targets_end { &[] } else { &given_up });
    }
}

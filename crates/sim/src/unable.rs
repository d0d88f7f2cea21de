//! Replicas whose stores cannot take anything, or cannot read it back, and what must follow:
//! another replica leads before long (docs/adr/0077).

use cyclone_replica::StoreState;

use crate::check::Broken;
use crate::event::{Ending, Event};
use crate::plan::Kind;
use crate::world::{World, trace};

impl World {
    /// Fills the disks of some stores or damages some, the leader's among them, but never all.
    pub(crate) fn spoil_stores(&mut self, kind: Kind) -> Result<(), Broken> {
        let count = self.machines.len();
        let is_leader = |position: &usize| {
            let node = self.machines[*position].node();
            node.is_some_and(|node| node.leads())
        };
        let mut wanted: Vec<usize> = (0..count).filter(is_leader).collect();
        for _ in 0..self.random.below(count as u64) {
            wanted.push(self.random.below(count as u64) as usize);
        }
        let is_sound = |position: &usize| {
            let disk = &self.machines[*position].disk;
            !disk.is_full() && !disk.is_damaged()
        };
        let mut sound = (0..count).filter(is_sound).count();
        let mut victims = Vec::new();
        for position in wanted {
            if sound > 1 && is_sound(&position) && !victims.contains(&position) {
                victims.push(position);
                sound -= 1;
            }
        }
        let seed = self.random.draw() as u32;
        let least_us = self.plan.longest_without_store_us();
        let span_us = self.random.within(least_us / 8, 2 * least_us);
        for &victim in &victims {
            let (id, disk) = (self.machines[victim].id, &self.machines[victim].disk);
            trace!(self, "{kind} at replica {id} for {span_us} µs");
            match kind {
                Kind::StoreFull => disk.fill(true),
                _ => disk.damage(seed),
            }
        }
        if !victims.is_empty() {
            self.struck.note(kind);
            self.after(span_us, Event::End(Ending::MendStores(victims)));
        }
        Ok(())
    }

    /// There is room again; a damaged store is replaced, and its process with it.
    pub(crate) fn mend_stores(&mut self, victims: &[usize]) -> Result<(), Broken> {
        for &victim in victims {
            self.machines[victim].disk.fill(false);
            if self.machines[victim].disk.is_damaged() {
                let id = self.machines[victim].id;
                trace!(self, "an operator replaces the store of replica {id}");
                self.machines[victim].disk.replace();
                self.stop(victim, false);
            }
        }
        Ok(())
    }

    /// Where nothing else keeps the cluster from it, a leader that cannot store is replaced by a
    /// replica that can.
    pub(crate) fn watch_leader(&mut self) -> Result<(), Broken> {
        if !self.rough || !self.plan.is_undisturbed() {
            self.unable_since_us = None;
            return Ok(());
        }
        let nodes = self.machines.iter().enumerate();
        let leaders = nodes.filter_map(|(position, machine)| {
            let node = machine.node().filter(|node| node.leads())?;
            Some((node.group(0).term(), position))
        });
        let Some((_, position)) = leaders.max() else {
            return Ok(());
        };
        let machine = &self.machines[position];
        let Some(node) = machine.node() else {
            return Ok(());
        };
        let logs = 0..usize::from(self.plan.logs);
        let mut behind = logs.filter(|&log| node.applied(log).0 < node.group(log).commit());
        let is_full = machine.disk.is_full() && behind.next().is_some();
        if !is_full && node.store_state() != StoreState::Damaged {
            self.unable_since_us = None;
            return Ok(());
        }
        let since_us = *self.unable_since_us.get_or_insert(self.now_us);
        let unable_us = self.now_us - since_us;
        match unable_us > self.plan.longest_without_store_us() {
            false => Ok(()),
            true => Err(Broken(format!(
                "for {unable_us} µs replicas have led whose stores are full or damaged, the last one replica {}, although \
                 another could",
                machine.id
            ))),
        }
    }
}

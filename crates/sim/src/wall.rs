//! A machine whose wall clock is a day ahead or behind, always the same one, so that the others are
//! a majority; and what the state's clock promises then (docs/adr/0079). The simulation's own time
//! is the true one.

use crate::check::Broken;
use crate::history::Op;
use crate::machine::{Machine, true_ms};
use crate::plan::Kind;
use crate::world::{World, trace};

const DAY_MS: i64 = 86_400_000;
/// What clocks that agree may differ by, and as much for reports in flight.
const BOUND_MS: u64 = 2_000;

impl World {
    /// The machine whose wall clock is off in this run.
    fn off_machine(&self) -> usize {
        (self.plan.seed % self.plan.nodes) as usize
    }

    /// Puts the wall clock elsewhere, or right.
    pub(crate) fn strike_wall(&mut self) {
        let skew_ms = [-DAY_MS, 0, DAY_MS][self.random.below(3) as usize];
        let machine = self.off_machine();
        let id = self.machines[machine].id;
        trace!(
            self,
            "the wall clock of replica {id} is off by {skew_ms} ms"
        );
        self.machines[machine].clock.set_wall_skew(skew_ms);
        self.struck.note(Kind::Wall);
    }

    /// No state's clock is ahead of the true time.
    pub(crate) fn check_clocks(&self, position: usize) -> Result<(), Broken> {
        if !self.plan.has(Kind::Wall) || self.majority_is_off {
            return Ok(());
        }
        let (id, true_ms) = (self.machines[position].id, true_ms(self.now_us));
        let Some(node) = self.machines[position].node() else {
            return Ok(());
        };
        for log in 0..self.plan.logs {
            let clock_ms = node.store().clock_ms(log);
            if clock_ms > true_ms + BOUND_MS {
                return Err(Broken(format!(
                    "replica {id}: the clock of log {log} is {} ms ahead, as no majority's was",
                    clock_ms - true_ms
                )));
            }
        }
        Ok(())
    }

    /// After the faults: the leader's time is right; and when a majority was wrong, an operator
    /// puts it right.
    pub(crate) fn reckon_clocks(&mut self, client: u64, bound_us: u64) -> Result<(), Broken> {
        if !self.plan.has(Kind::Wall) || self.machines.iter().any(Machine::is_refused) {
            return Ok(());
        }
        // The leader's own clock is the one that is off.
        if let Some(leader) = self.leading() {
            for (position, machine) in self.machines.iter_mut().enumerate() {
                let skew_ms = if position == leader { -DAY_MS } else { 0 };
                machine.clock.set_wall_skew(skew_ms);
            }
            self.run_until(self.now_us + 4 * self.plan.election_us)?;
        }
        self.wait(
            bound_us,
            "the leader's time to be right",
            World::is_time_right,
        )?;
        self.majority_is_off = true;
        let off_us = (0..self.machines.len()).map(|at| self.machines[at].clock.wall_skew());
        let off_us: Vec<i64> = off_us.collect();
        for machine in &mut self.machines {
            machine.clock.set_wall_skew(DAY_MS);
        }
        let key = || b"register:last".to_vec();
        self.wait(
            bound_us,
            "the leader's time to follow a majority",
            |world| {
                let Some(leader) = world.leading() else {
                    return false;
                };
                let node = world.machines[leader].node();
                node.is_some_and(|node| {
                    node.log_time_ms(0) > true_ms(world.now_us) + DAY_MS as u64 / 2
                })
            },
        )?;
        self.insist(client, key(), Op::Set(b"ahead".to_vec()), bound_us)?;
        for (machine, skew_ms) in self.machines.iter_mut().zip(off_us) {
            machine.clock.set_wall_skew(skew_ms);
        }
        // The others' clocks are reported with the next heartbeats.
        self.run_until(self.now_us + 4 * self.plan.election_us)?;
        let until_us = self.now_us + bound_us;
        while !self.is_time_right() {
            if self.now_us > until_us {
                return Err(Broken("the state's clock cannot be set back".into()));
            }
            if let Some(leader) = self.leading()
                && let Some(node) = self.machines[leader].node_mut()
            {
                self.callers[leader].reset_clock(node);
                self.step(leader, None)?;
            }
            self.run_until(self.now_us + self.plan.election_us)?;
        }
        self.insist(client, key(), Op::Set(b"right".to_vec()), bound_us)?;
        self.wait(bound_us, "all replicas to apply the same", World::agree)?;
        self.majority_is_off = false;
        (0..self.machines.len()).try_for_each(|position| self.check_clocks(position))
    }

    fn leading(&self) -> Option<usize> {
        let leads = |machine: &Machine| machine.node().is_some_and(|node| node.leads());
        self.machines.iter().position(leads)
    }

    /// Whether the leader's time is the true one.
    fn is_time_right(&self) -> bool {
        let true_ms = true_ms(self.now_us);
        let is_right = |time_ms: u64| time_ms.abs_diff(true_ms) <= BOUND_MS;
        let node = self
            .leading()
            .and_then(|leader| self.machines[leader].node());
        node.is_some_and(|node| {
            (0..usize::from(self.plan.logs)).all(|log| {
                let clock_ms = node.store().clock_ms(log as u16);
                is_right(node.log_time_ms(log)) && clock_ms <= true_ms + BOUND_MS
            })
        })
    }
}

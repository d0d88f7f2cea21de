//! Faults that strike machines and links at times of their own.

use std::net::IpAddr;

use crate::check::Broken;
use crate::machine::address;
use crate::plan::Kind;
use crate::world::{Ending, Event, World, trace};

fn ip(id: u64) -> IpAddr {
    address(id).ip()
}

impl World {
    fn mean_us(&self, kind: Kind) -> u64 {
        let rates = &self.plan.rates;
        match kind {
            Kind::Partition => rates.partition_us,
            Kind::OneWay => rates.one_way_us,
            Kind::Clog => rates.clog_us,
            Kind::Kill => rates.kill_us,
            Kind::Power => rates.power_us,
            Kind::Blackout => rates.blackout_us,
            Kind::Pause => rates.pause_us,
            Kind::StoreError => rates.store_error_us,
            Kind::StoreStall => rates.store_stall_us,
            Kind::Jump => rates.jump_us,
            _ => 0,
        }
    }

    pub(crate) fn first_strikes(&mut self) {
        for &kind in Kind::ALL {
            self.next_strike(kind);
        }
    }

    fn next_strike(&mut self, kind: Kind) {
        let mean_us = self.mean_us(kind);
        if mean_us > 0 {
            let delay_us = self.random.wait(mean_us);
            self.after(delay_us, Event::Strike(kind));
        }
    }

    /// How long a fault lasts: often short, sometimes many election time-outs.
    fn span_us(&mut self) -> u64 {
        self.random
            .tail(self.plan.election_us / 4, 20 * self.plan.election_us)
    }

    pub(crate) fn strike(&mut self, kind: Kind) -> Result<(), Broken> {
        if !self.rough {
            return Ok(());
        }
        self.next_strike(kind);
        let victim = self.random.below(self.machines.len() as u64) as usize;
        let id = self.machines[victim].id;
        self.mix(&[4, kind as u64, id]);
        let runs = self.machines[victim].node().is_some();
        match kind {
            Kind::Partition | Kind::OneWay | Kind::Clog => return self.links(kind),
            Kind::Blackout => {
                trace!(self, "all machines lose power");
                self.struck.note(kind);
                for position in 0..self.machines.len() {
                    self.stop(position, true);
                }
                return Ok(());
            }
            _ if !runs => return Ok(()),
            Kind::Kill => {
                trace!(self, "replica {id} is killed");
                self.finish_some_jobs(victim);
                self.stop(victim, false);
                self.rot(victim);
            }
            Kind::Power => {
                let events = self.random.below(60);
                trace!(
                    self,
                    "replica {id} will lose power after {events} more stores, flushes and fences"
                );
                self.machines[victim].lose_power_after(events);
            }
            Kind::Pause => {
                let span_us = self.span_us();
                trace!(self, "replica {id} stands still for {span_us} µs");
                let until_us = self.now_us + span_us;
                self.machines[victim].paused_until_us = until_us;
                self.at(until_us, Event::End(Ending::Resume(victim)));
            }
            Kind::StoreError => {
                let calls = self.random.below(20);
                trace!(
                    self,
                    "the store of replica {id} fails after {calls} more writes"
                );
                self.machines[victim].disk.fail_after(calls);
            }
            Kind::StoreStall => {
                let span_us = self.span_us();
                trace!(self, "the store of replica {id} stalls for {span_us} µs");
                self.machines[victim].disk.stall(true);
                self.after(span_us, Event::End(Ending::Unstall(victim)));
            }
            Kind::Jump => {
                let far = self.plan.election_us as i64 * 3;
                let steady_us = self.random.within(0, 2 * far as u64) as i64 - far / 2;
                let wall_ms = self.random.within(0, 20_000) as i64 - 10_000;
                trace!(
                    self,
                    "the clocks of replica {id} jump by {steady_us} µs and {wall_ms} ms"
                );
                self.machines[victim].clock.jump(steady_us, wall_ms);
                self.struck.note(kind);
                return self.step(victim, None);
            }
            _ => return Ok(()),
        }
        self.struck.note(kind);
        Ok(())
    }

    /// A worker thread may have come further than the loop.
    fn finish_some_jobs(&mut self, victim: usize) {
        if self.random.chance(0.5)
            && let crate::machine::Power::On(process) = &mut self.machines[victim].power
            && process.node.waiting_jobs() > 0
        {
            process.node.run_job(0);
        }
    }

    fn links(&mut self, kind: Kind) -> Result<(), Broken> {
        let nodes = self.plan.nodes;
        let span_us = self.span_us();
        let mut cut = Vec::new();
        match kind {
            Kind::Partition => {
                // A side for every replica and for half of the clients each.
                let sides = self.random.draw();
                let side = |id: u64| (sides >> id) & 1;
                for from in 1..=nodes {
                    for to in 1..=nodes {
                        if side(from) != side(to) {
                            cut.push((from, to));
                        }
                    }
                }
                trace!(self, "partition for {span_us} µs: {cut:?} are cut");
            }
            _ => {
                let from = self.random.within(1, nodes);
                let to = self.random.within(1, nodes);
                if from == to {
                    return Ok(());
                }
                if kind == Kind::Clog {
                    trace!(self, "the link {from} -> {to} clogs for {span_us} µs");
                    self.net.clog(ip(from), ip(to), self.now_us + span_us);
                    self.struck.note(kind);
                    return Ok(());
                }
                trace!(self, "the link {from} -> {to} is cut for {span_us} µs");
                cut.push((from, to));
            }
        }
        if cut.is_empty() {
            return Ok(());
        }
        self.struck.note(kind);
        for &(from, to) in &cut {
            self.net.cut(ip(from), ip(to));
        }
        self.after(span_us, Event::End(Ending::Mend(cut)));
        Ok(())
    }

    pub(crate) fn end(&mut self, ending: Ending) -> Result<(), Broken> {
        match ending {
            Ending::Mend(links) => {
                for (from, to) in links {
                    self.net.mend(ip(from), ip(to));
                }
                Ok(())
            }
            Ending::Unstall(victim) => {
                self.machines[victim].disk.stall(false);
                Ok(())
            }
            Ending::Resume(victim) => self.step(victim, None),
        }
    }

    /// A process ends now and comes back later.
    pub(crate) fn stop(&mut self, position: usize, power_lost: bool) {
        if self.machines[position].node().is_none() {
            return;
        }
        let net = self.net.clone();
        self.machines[position].stop(&net, power_lost);
        if power_lost {
            self.damage(position);
        }
        let delay_us = self.random.tail(1_000, 4 * self.plan.election_us);
        self.after(delay_us, Event::Start(position));
    }

    /// A bit rots while the machine is off. Only after the death of a process, when all of memory is settled: one fault at
    /// a time is what two copies can survive.
    fn rot(&mut self, position: usize) {
        let lost = self
            .machines
            .iter()
            .filter(|machine| machine.is_lost())
            .count();
        if 2 * (lost + 1) < self.machines.len()
            && self.random.chance(self.plan.rot)
            && self.machines[position].rot()
        {
            trace!(
                self,
                "a bit of replica {}'s memory rots", self.machines[position].id
            );
            self.struck.note(Kind::Rot);
        }
    }

    /// What a power failure does to memory and disk beyond losing lines. Never to so many machines that a majority's
    /// memory is gone: that is reported, not survived.
    pub(crate) fn damage(&mut self, position: usize) {
        let lost = self
            .machines
            .iter()
            .filter(|machine| machine.is_lost())
            .count();
        if !self.rough || 2 * (lost + 1) >= self.machines.len() {
            return;
        }
        let id = self.machines[position].id;
        let machine = &mut self.machines[position];
        let kind = if self.random.chance(self.plan.amnesia) {
            machine.lose_region();
            Kind::Amnesia
        } else if self.random.chance(self.plan.data_loss) {
            machine.lose_data();
            Kind::DataLoss
        } else {
            return;
        };
        trace!(self, "replica {id} suffers {kind}");
        self.struck.note(kind);
    }
}

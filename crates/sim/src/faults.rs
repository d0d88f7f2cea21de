//! Faults that strike machines and links at times drawn for them.

use std::net::IpAddr;

use crate::check::Broken;
use crate::event::{Ending, Event};
use crate::load::address_of as client_address;
use crate::machine::{Machine, address};
use crate::plan::Kind;
use crate::world::{World, trace};

/// Clients that a partition puts on a side; of a crowd, the others reach everybody.
const MOST_CLIENTS_CUT: usize = 16;
/// The most that a clock goes back at once.
const HOUR_US: u64 = 3_600_000_000;

fn ip(id: u64) -> IpAddr {
    address(id).ip()
}

impl World {
    fn mean_us(&self, kind: Kind) -> u64 {
        let rates = &self.plan.rates;
        match kind {
            _ if !self.plan.has(kind) => 0,
            Kind::Partition => rates.partition_us,
            Kind::OneWay => rates.one_way_us,
            Kind::Clog => rates.clog_us,
            Kind::Flutter => rates.flutter_us,
            Kind::Kill => rates.kill_us,
            Kind::Power => rates.power_us,
            Kind::Blackout => rates.blackout_us,
            Kind::Pause => rates.pause_us,
            Kind::StoreError => rates.store_error_us,
            Kind::StoreFull => rates.store_full_us,
            Kind::StoreDamage => rates.store_damage_us,
            Kind::StoreStall => rates.store_stall_us,
            Kind::Jump => rates.jump_us,
            Kind::FlashStall => rates.flash_stall_us,
            Kind::FlashError => rates.flash_error_us,
            Kind::FlashFull => rates.flash_full_us,
            Kind::FlashAstray => rates.flash_astray_us,
            Kind::FlashRot => rates.flash_rot_us,
            Kind::Members => rates.members_us,
            Kind::Wall => rates.wall_us,
            Kind::Emptied => rates.emptied_us,
            Kind::OlderStorage => rates.older_us,
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

    /// How long a fault lasts: shorter than an election, about as long as some, or much longer.
    fn span_us(&mut self) -> u64 {
        let election_us = self.plan.election_us;
        match self.random.below(10) {
            0..4 => self.random.within(election_us / 8, election_us),
            4..9 => self.random.within(election_us, 6 * election_us),
            _ => self.random.within(6 * election_us, 20 * election_us),
        }
    }

    pub(crate) fn strike(&mut self, kind: Kind) -> Result<(), Broken> {
        if !self.rough {
            return Ok(());
        }
        self.next_strike(kind);
        let victim = self.victim();
        let id = self.machines[victim].id;
        self.mix(&[4, kind as u64, id]);
        let takes_place = self.takes_place(kind);
        let runs = self.machines[victim].node().is_some();
        match kind {
            Kind::Partition | Kind::OneWay | Kind::Clog => return self.links(kind, takes_place),
            _ if !takes_place => {
                self.draw_unused(kind);
                return Ok(());
            }
            Kind::Members => return self.change_members(),
            Kind::StoreFull | Kind::StoreDamage => return self.spoil_stores(kind),
            Kind::Wall => {
                self.strike_wall();
                return Ok(());
            }
            Kind::Blackout => {
                trace!(self, "all machines lose power");
                self.struck.note(kind);
                for position in 0..self.machines.len() {
                    self.stop(position, true);
                }
                return Ok(());
            }
            Kind::Flutter => {
                let times = self.random.within(2, 5);
                self.flutter(times);
            }
            _ if !runs || self.now_us < self.calm_until_us => return Ok(()),
            Kind::Emptied => {
                if !self.strike_emptied(victim) {
                    return Ok(());
                }
            }
            Kind::OlderStorage => {
                self.strike_copied(victim);
                // Counted when the copy is put in place.
                return Ok(());
            }
            Kind::Kill => {
                trace!(self, "replica {id} is killed");
                self.finish_some_jobs(victim);
                self.stop(victim, false);
                self.rot(victim);
                self.rot_flash(victim);
            }
            Kind::Power => {
                if self.random.chance(0.5) {
                    let events = self.random.below(60);
                    trace!(
                        self,
                        "replica {id} will lose power after {events} more stores, flushes and fences"
                    );
                    self.machines[victim].lose_power_after(events);
                } else {
                    let (lines, fences) = (self.random.within(1, 8), self.random.below(6));
                    trace!(
                        self,
                        "replica {id} will lose power before a fence of {lines} lines, after {fences} more"
                    );
                    self.machines[victim].lose_power_before_fence(lines as usize, fences);
                }
            }
            Kind::Pause => {
                let span_us = self.span_us();
                trace!(self, "replica {id} stands still for {span_us} µs");
                let until_us = self.now_us + span_us;
                self.machines[victim].paused_until_us = until_us;
                // It may have read the clock right before.
                let looked = self.random.chance(0.5);
                self.machines[victim].clock_read_us = looked.then_some(self.now_us);
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
            Kind::FlashStall | Kind::FlashError | Kind::FlashFull => {
                let span_us = self.span_us();
                trace!(self, "{kind} at replica {id} for {span_us} µs");
                self.machines[victim].strike_flash(kind);
                self.after(span_us, Event::End(Ending::CalmFlash(victim)));
            }
            Kind::FlashAstray => {
                if !self.may_lose_one() {
                    return Ok(());
                }
                trace!(self, "replica {id}'s flash loses or misplaces a write");
                self.machines[victim].misplace_flash_write();
            }
            Kind::FlashRot => {
                if !self.may_lose_one() || !self.machines[victim].rot_flash() {
                    return Ok(());
                }
                trace!(self, "a page of replica {id}'s flash goes bad as it runs");
            }
            Kind::Jump => {
                let far = self.plan.election_us as i64 * 3;
                let steady_us = match self.random.chance(0.25) {
                    true => -(self.random.below(HOUR_US) as i64),
                    false => self.random.within(0, 2 * far as u64) as i64 - far / 2,
                };
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

    /// Counts a strike; returns whether the plan lets it take place.
    fn takes_place(&mut self, kind: Kind) -> bool {
        let number = self.strikes;
        self.strikes += 1;
        let only = self.plan.strikes.as_ref();
        let takes_place = only.is_none_or(|only| only.0.contains(&number));
        if takes_place {
            trace!(self, "strike {number}: {kind}");
        }
        takes_place
    }

    /// Draws what a strike that is left out would have drawn, where that is always the same: what
    /// comes later is then drawn alike, and a smaller run resembles the larger one.
    fn draw_unused(&mut self, kind: Kind) {
        let ways = match kind {
            Kind::Kill => 2,
            Kind::StoreError => 20,
            Kind::Pause
            | Kind::StoreStall
            | Kind::FlashStall
            | Kind::FlashError
            | Kind::FlashFull => {
                self.span_us();
                if kind != Kind::Pause {
                    return;
                }
                2
            }
            _ => return,
        };
        self.random.below(ways);
    }

    /// A leader that falls while a replica installs its checkpoint leaves the replica to another,
    /// whose log may begin earlier. That takes an election, and so may the installation.
    pub(crate) fn while_installing(&mut self, position: usize, installing: bool) {
        if !installing {
            return;
        }
        if self.plan.has(Kind::SlowJob) && self.rough && self.random.chance(0.8) {
            self.machines[position].busy_until_us = self.now_us + self.span_us();
        }
        if self.plan.has(Kind::Kill) && self.random.chance(0.3) {
            // Soon, most of the time: a new leader has to be there before the installation ends.
            let delay_us = self.random.tail(50, self.plan.job_us);
            self.after(delay_us, Event::Depose);
        }
    }

    /// Kills the leader.
    pub(crate) fn depose(&mut self) {
        if self.now_us < self.calm_until_us {
            return;
        }
        let leads = |machine: &Machine| machine.node().is_some_and(|node| node.leads());
        let Some(leader) = self.machines.iter().position(leads) else {
            return;
        };
        if !self.rough {
            return;
        }
        trace!(self, "leader {} is killed", self.machines[leader].id);
        self.struck.note(Kind::Kill);
        self.finish_some_jobs(leader);
        self.stop(leader, false);
    }

    /// Cuts the leader off from the other replicas, until another one leads; soon after that it is
    /// that one's turn. Who led before may lead again, then, while the fate of what it was asked
    /// for is open.
    pub(crate) fn flutter(&mut self, times: u64) {
        if !self.rough || times == 0 {
            return;
        }
        let election_us = self.plan.election_us;
        let leads = |machine: &Machine| machine.node().is_some_and(|node| node.leads());
        let Some(leader) = self.machines.iter().position(leads) else {
            return self.after(election_us / 2, Event::Flutter(times - 1));
        };
        let id = self.machines[leader].id;
        let span_us = self.random.within(election_us, 3 * election_us);
        trace!(self, "leader {id} is cut off for {span_us} µs");
        let others = self.machines.iter().filter(|machine| machine.id != id);
        let cut: Vec<_> = others
            .flat_map(|other| [(ip(id), ip(other.id)), (ip(other.id), ip(id))])
            .collect();
        for &(from, to) in &cut {
            self.net.cut(from, to);
        }
        self.after(span_us, Event::End(Ending::Mend(cut)));
        let pause_us = self.random.within(election_us / 16, election_us / 2);
        self.after(span_us + pause_us, Event::Flutter(times - 1));
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

    /// A machine; more often one that leads, or believes to: its failures move the most.
    fn victim(&mut self) -> usize {
        let leads =
            |machine: &Machine| machine.node().is_some_and(|node| node.group(0).is_leader());
        let leader = self.machines.iter().position(leads);
        let any = self.random.below(self.machines.len() as u64) as usize;
        match leader {
            Some(leader) if self.random.chance(0.3) => leader,
            _ => any,
        }
    }

    /// Two sides that do not hear each other, for half of the clients too: often a single machine
    /// on one of them.
    fn partition(&mut self, span_us: u64) -> Vec<(IpAddr, IpAddr)> {
        let mut sides = self.random.draw();
        if self.random.chance(0.5) {
            let victim = self.victim();
            let alone = self.machines[victim].id;
            sides = 1 << alone;
        }
        let side = |id: u64| (sides >> id) & 1;
        let nodes = 1..=self.machines.len() as u64;
        let left: Vec<u64> = nodes.clone().filter(|&id| side(id) == 0).collect();
        trace!(self, "partition for {span_us} µs: {left:?} and the others");
        let odd = self.random.draw() & 1;
        let clients = self.clients.keys().take(MOST_CLIENTS_CUT);
        let ends = nodes.clone().map(|id| (ip(id), side(id)));
        let clients = clients.map(|&number| (client_address(number).ip(), (number ^ odd) & 1));
        let mut cut = Vec::new();
        for (end, one) in ends.chain(clients) {
            for id in nodes.clone().filter(|&id| side(id) != one) {
                cut.extend([(end, ip(id)), (ip(id), end)]);
            }
        }
        cut
    }

    fn links(&mut self, kind: Kind, takes_place: bool) -> Result<(), Broken> {
        let nodes = self.machines.len() as u64;
        let span_us = self.span_us();
        let mut cut = Vec::new();
        match kind {
            Kind::Partition => cut = self.partition(span_us),
            _ => {
                let from = self.random.within(1, nodes);
                let to = self.random.within(1, nodes);
                if from == to {
                    return Ok(());
                }
                if kind == Kind::Clog {
                    // One link, or a machine's uplink: what a leader sent then arrives when there
                    // is another leader.
                    let all = self.random.chance(0.5);
                    let held: Vec<u64> = (1..=nodes)
                        .filter(|&id| id != from && (all || id == to))
                        .collect();
                    if !takes_place {
                        return Ok(());
                    }
                    trace!(self, "the links {from} -> {held:?} clog for {span_us} µs");
                    for to in held {
                        self.net.clog(ip(from), ip(to), self.now_us + span_us);
                    }
                    self.struck.note(kind);
                    return Ok(());
                }
                if takes_place {
                    trace!(self, "the link {from} -> {to} is cut for {span_us} µs");
                }
                cut.push((ip(from), ip(to)));
            }
        }
        if cut.is_empty() || !takes_place {
            return Ok(());
        }
        self.struck.note(kind);
        for &(from, to) in &cut {
            self.net.cut(from, to);
        }
        self.after(span_us, Event::End(Ending::Mend(cut)));
        Ok(())
    }

    pub(crate) fn end(&mut self, ending: Ending) -> Result<(), Broken> {
        match ending {
            Ending::Mend(links) => {
                for (from, to) in links {
                    self.net.mend(from, to);
                }
                Ok(())
            }
            Ending::Unstall(victim) => {
                self.machines[victim].disk.stall(false);
                Ok(())
            }
            Ending::MendStores(victims) => self.mend_stores(&victims),
            Ending::CalmFlash(victim) => {
                self.machines[victim].calm_flash();
                Ok(())
            }
            Ending::Resume(victim) => {
                // What came meanwhile is taken in by the step for which the clock was read before.
                if self.rough
                    && self.machines[victim].clock_read_us.is_some()
                    && let Some(node) = self.machines[victim].node_mut()
                {
                    self.callers[victim].read_under_lease(&self.plan, node, self.now_us);
                }
                self.step(victim, None)
            }
        }
    }

    /// A process ends now and comes back later.
    pub(crate) fn stop(&mut self, position: usize, power_lost: bool) {
        if self.machines[position].node().is_none() {
            return;
        }
        let net = self.net.clone();
        self.callers[position].bury(&mut self.load);
        self.machines[position].stop(&net, power_lost);
        if power_lost {
            self.damage(position);
        }
        let delay_us = self.random.tail(1_000, 4 * self.plan.election_us);
        self.after(delay_us, Event::Start(position));
    }

    /// A bit rots while the machine is off. Only after the death of a process, when all of memory
    /// is settled: one fault at a time is what two copies can survive.
    fn rot(&mut self, position: usize) {
        if self.may_lose_one() && self.random.chance(self.plan.rot) && self.machines[position].rot()
        {
            trace!(
                self,
                "a bit of replica {}'s memory rots", self.machines[position].id
            );
            self.struck.note(Kind::Rot);
        }
    }

    /// A page of its flash goes bad while it is down.
    fn rot_flash(&mut self, position: usize) {
        let id = self.machines[position].id;
        if self.plan.has(Kind::FlashRot)
            && self.may_lose_one()
            && self.random.chance(self.plan.flash_rot)
            && self.machines[position].rot_flash()
        {
            trace!(self, "a page of replica {id}'s flash goes bad");
            self.struck.note(Kind::FlashRot);
        }
    }

    /// Whether a majority remains when one more machine is lost.
    pub(crate) fn may_lose_one(&self) -> bool {
        let machines = self.machines.iter();
        let lost = machines.filter(|machine| machine.is_lost() || machine.recovers());
        let lost = lost.count();
        2 * (lost + 1) < self.machines.len()
    }

    /// What a power failure does to memory and disk beyond losing lines. Never to so many machines
    /// that a majority's memory is gone: that is reported, not survived.
    pub(crate) fn damage(&mut self, position: usize) {
        if !self.rough || !self.may_lose_one() {
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
            return self.rot_flash(position);
        };
        trace!(self, "replica {id} suffers {kind}");
        self.struck.note(kind);
    }
}

//! A run: one queue of events in simulated time, the machines and clients they happen to, the
//! checks after each.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use anyhow::Context;

use crate::amplify::within_bounds;
use crate::bank::BankInvariant;
use crate::callers::Callers;
use crate::check::{Broken, Checks};
use crate::event::{Event, Scheduled};
use crate::load::{Client, Load};
use crate::machine::{Fault, Machine, Power, address};
use crate::net::{Flight, Net};
use crate::plan::{FaultCounts, Kind, Plan};
use crate::random::Random;
use crate::storage::StorageCopy;

/// What a run came to.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Simulated time, µs.
    pub simulated_us: u64,
    /// Operations that clients were answered.
    pub answered: u64,
    /// Operations in the history, unanswered ones included.
    pub operations: u64,
    /// Committed entries.
    pub committed: u64,
    /// Invariants evaluated.
    pub checks: u64,
    /// Datagrams sent.
    pub datagrams: u64,
    /// Runs whose history was too hard to check.
    pub undecided: u64,
    /// Faults by kind.
    pub struck: FaultCounts,
    /// A hash over everything that happened, to compare two runs.
    pub fingerprint: u64,
}

/// Why a run failed.
#[derive(Debug)]
pub struct Failure {
    /// When, µs.
    pub at_us: u64,
    /// Strikes that were due until then.
    pub strikes: u64,
    /// What happened.
    pub what: String,
}

/// A cluster in one process.
pub struct World {
    pub(crate) plan: Plan,
    pub(crate) now_us: u64,
    pub(crate) random: Random,
    pub(crate) machines: Vec<Machine>,
    pub(crate) clients: BTreeMap<u64, Client>,
    pub(crate) callers: Vec<Callers>,
    pub(crate) load: Load,
    pub(crate) net: Net,
    pub(crate) checks: Checks,
    pub(crate) inspector: BankInvariant,
    pub(crate) struck: FaultCounts,
    /// Strikes that were due so far.
    pub(crate) strikes: u64,
    queue: BinaryHeap<Reverse<Scheduled>>,
    order: u64,
    flights: Vec<Flight>,
    /// When each machine is already going to be woken.
    wake_us: Vec<u64>,
    client_wake_us: BTreeMap<u64, u64>,
    jobs: Vec<usize>,
    fingerprint: u64,
    /// Prints what happens.
    pub trace: bool,
    roles: BTreeMap<u64, (cyclone_consensus::Role, u64)>,
    /// Whether faults strike and clients begin operations.
    pub(crate) rough: bool,
    /// A majority's wall clocks are off, on purpose.
    pub(crate) majority_is_off: bool,
    /// A copy of some machine's storage, which is to be put in its place.
    pub(crate) copy: Option<StorageCopy>,
    /// Until when nothing strikes.
    pub(crate) calm_until_us: u64,
    /// The checker gave up on a key.
    pub(crate) undecided: bool,
    /// Since when only replicas lead that cannot store.
    pub(crate) unable_since_us: Option<u64>,
}

/// Starts in a row that a loss of power interrupts.
const MOST_INTERRUPTIONS: u32 = 6;
/// Steps of one replica without time passing; more would be an endless loop in the product.
const STEPS_AT_ONCE: usize = 1_000;

macro_rules! trace {
    ($world:expr, $($text:tt)*) => {
        if $world.trace {
            println!("{:>12.6}s  {}", $world.now_us as f64 / 1e6, format_args!($($text)*));
        }
    };
}
pub(crate) use trace;

impl World {
    /// A cluster that is about to be started for the first time. Files go below `root`.
    pub fn new(plan: Plan, root: &std::path::Path) -> anyhow::Result<World> {
        let mut random = Random::new(plan.seed);
        let net = Net::new(random.fork(1), plan.packets, plan.datagram_bytes);
        let machines: Vec<Machine> = (1..=plan.nodes + plan.spares)
            .map(|id| Machine::new(&plan, id, root, random.fork(100 + id)))
            .collect();
        let load = Load::new(&plan, &net, random.fork(2))?;
        let count = machines.len();
        let callers = (0..count)
            .map(|position| Callers::new(position, random.fork(200 + position as u64)))
            .collect();
        let mut world = World {
            now_us: 0,
            random,
            clients: BTreeMap::new(),
            callers,
            load,
            net,
            checks: Checks::new(usize::from(plan.logs)),
            inspector: BankInvariant::default(),
            struck: FaultCounts::default(),
            strikes: 0,
            queue: BinaryHeap::new(),
            order: 0,
            flights: Vec::new(),
            wake_us: vec![u64::MAX; count],
            client_wake_us: BTreeMap::new(),
            jobs: vec![0; count],
            fingerprint: plan.seed,
            trace: false,
            roles: BTreeMap::new(),
            rough: true,
            majority_is_off: false,
            undecided: false,
            unable_since_us: None,
            copy: None,
            calm_until_us: 0,
            machines,
            plan,
        };
        if world.plan.old_format {
            crate::images::restore(&mut world)?;
            world.struck.note(Kind::OldFormat);
        }
        for machine in 0..count {
            let at_us = world.random.within(0, 2_000);
            world.at(at_us, Event::Start(machine));
            if world.plan.callers_us > 0 {
                let delay_us = world.callers[machine].pause_us(&world.plan);
                world.at(delay_us, Event::Callers(machine));
            }
        }
        for _ in 0..world.plan.clients {
            world.new_client()?;
        }
        world.first_strikes();
        for kind in [
            Kind::Skew,
            Kind::Drift,
            Kind::Crowd,
            Kind::Eager,
            Kind::Hot,
            Kind::Large,
            Kind::SlowJob,
            Kind::Late,
            Kind::Forget,
            Kind::Logs,
            Kind::Gangs,
            Kind::OwnLoops,
            Kind::Expiry,
            Kind::Amplify,
            Kind::Flash,
            Kind::Founding,
        ] {
            if world.plan.has(kind) {
                world.struck.note(kind);
            }
        }
        Ok(world)
    }

    pub(crate) fn at(&mut self, at_us: u64, event: Event) {
        self.order += 1;
        let (at_us, order) = (at_us.max(self.now_us), self.order);
        self.queue.push(Reverse(Scheduled {
            at_us,
            order,
            event,
        }));
    }

    pub(crate) fn after(&mut self, delay_us: u64, event: Event) {
        self.at(self.now_us + delay_us, event);
    }

    /// Runs until `until_us` of simulated time has passed.
    ///
    /// # Errors
    /// A promise that was broken.
    pub fn run_until(&mut self, until_us: u64) -> Result<(), Broken> {
        while let Some(Reverse(next)) = self.queue.peek() {
            if next.at_us > until_us {
                break;
            }
            if let Some(Reverse(next)) = self.queue.pop() {
                self.now_us = next.at_us;
                self.net.set_now(self.now_us);
                self.handle_event(next.event)?;
            }
        }
        self.now_us = self.now_us.max(until_us);
        Ok(())
    }

    pub(crate) fn mix(&mut self, words: &[u64]) {
        for word in std::iter::once(&self.now_us).chain(words) {
            self.fingerprint = (self.fingerprint ^ word)
                .wrapping_mul(0x0000_0100_0000_01b3)
                .rotate_left(23);
        }
    }

    fn handle_event(&mut self, event: Event) -> Result<(), Broken> {
        match event {
            Event::Arrive(flight) => {
                self.mix(&[1, flight.bytes.len() as u64]);
                let to = flight.to;
                if !self.net.arrive(flight) {
                    return Ok(());
                }
                match self
                    .machines
                    .iter()
                    .position(|machine| address(machine.id).ip() == to.ip())
                {
                    Some(machine) if self.rough && self.plan.late_us > 0 => {
                        let at_us = self.now_us + self.random.below(self.plan.late_us) + 1;
                        self.wake_at(machine, at_us);
                        Ok(())
                    }
                    Some(machine) => self.step(machine, None),
                    None => self.client_at(to),
                }
            }
            Event::Timer(machine, life) => {
                if self.machines[machine].life == life && self.wake_us[machine] <= self.now_us {
                    self.wake_us[machine] = u64::MAX;
                    return self.step(machine, None);
                }
                Ok(())
            }
            Event::Job(machine, life) => {
                if self.machines[machine].life != life {
                    return Ok(());
                }
                if self.is_paused(machine) {
                    let until_us = self.machines[machine].paused_until_us;
                    self.at(until_us, Event::Job(machine, life));
                    return Ok(());
                }
                if self.now_us < self.machines[machine].busy_until_us {
                    let until_us = self.machines[machine].busy_until_us;
                    self.at(until_us, Event::Job(machine, life));
                    return Ok(());
                }
                if self.machines[machine].disk.is_stalled() {
                    let pause_us = self.plan.election_us / 4;
                    self.after(pause_us, Event::Job(machine, life));
                    return Ok(());
                }
                self.jobs[machine] = self.jobs[machine].saturating_sub(1);
                let waiting = self.machines[machine]
                    .node()
                    .map_or(0, |node| node.waiting_jobs());
                if waiting == 0 {
                    return Ok(());
                }
                let which = self.random.below(waiting.min(2) as u64) as usize;
                self.step(machine, Some(which))
            }
            Event::Start(machine) => self.start(machine),
            Event::Client(number) => self.client_acts(number),
            Event::ClientTimer(number) => {
                if self
                    .client_wake_us
                    .get(&number)
                    .is_some_and(|&at| at <= self.now_us)
                {
                    self.client_wake_us.remove(&number);
                    return self.client_step(number);
                }
                Ok(())
            }
            Event::Callers(position) => self.callers_act(position),
            Event::Strike(kind) => self.strike(kind),
            Event::Operator if self.rough => self.change_members(),
            Event::Operator => Ok(()),
            Event::Flutter(times) => {
                self.flutter(times);
                Ok(())
            }
            Event::Depose => {
                self.depose();
                Ok(())
            }
            Event::PutCopy(victim, tries) => self.put_copy(victim, tries),
            Event::CopyNoticed(victim) => self.copy_noticed(victim),
            Event::End(ending) => self.end(ending),
        }
    }

    fn is_paused(&self, machine: usize) -> bool {
        self.machines[machine].paused_until_us > self.now_us
    }

    pub(crate) fn start(&mut self, position: usize) -> Result<(), Broken> {
        if !self.machines[position].is_off() || self.machines[position].spare {
            return Ok(());
        }
        self.machines[position].disk.replace();
        let recovery = self.rough && self.random.chance(self.plan.recovery);
        // Where nearly every start is interrupted, nothing else would happen.
        let recovery = recovery && self.machines[position].interruptions < MOST_INTERRUPTIONS;
        let crash_after = recovery.then(|| self.random.below(120));
        let net = self.net.clone();
        let machine = &mut self.machines[position];
        let (id, result) = (machine.id, machine.start(&net, crash_after));
        self.jobs[position] = 0;
        self.wake_us[position] = u64::MAX;
        self.mix(&[2, id, u64::from(result.is_ok())]);
        match result {
            Ok(()) => {
                let machine = &self.machines[position];
                if let Power::Refused(reason) = &machine.power {
                    trace!(self, "replica {id} refuses to start: {reason}");
                    return Ok(());
                }
                if let Some(node) = machine.node() {
                    trace!(
                        self,
                        "replica {id} starts in term {} with entries {}..={}, applied {}",
                        node.group(0).term(),
                        node.group(0).first_index(),
                        node.group(0).last_index(),
                        node.applied(0).0
                    );
                    self.checks.started(node, machine.interrupted)?;
                }
                self.machines[position].interrupted = false;
                self.machines[position].interruptions = 0;
                self.step(position, None)
            }
            Err(fault) => {
                if recovery && matches!(fault, Fault::PowerLost) {
                    self.struck.note(Kind::Recovery);
                    self.machines[position].interruptions += 1;
                }
                self.went_down(position, fault)
            }
        }
    }

    /// A process ended on its own, or its machine did.
    fn went_down(&mut self, position: usize, fault: Fault) -> Result<(), Broken> {
        let id = self.machines[position].id;
        trace!(self, "replica {id} goes down: {fault:?}");
        let net = self.net.clone();
        self.callers[position].bury(&mut self.load);
        match fault {
            Fault::Panic(text) => return Err(Broken(format!("replica {id} panicked: {text}"))),
            Fault::Error(text) if text.contains("simulated write error") => {
                self.machines[position].interrupted = true;
                self.machines[position].stop(&net, false);
            }
            // What is to be replayed went bad after the start had checked it; the next start says
            // so.
            Fault::Error(text) if text.contains("flash") && self.machines[position].is_lost() => {
                self.machines[position].stop(&net, false);
            }
            Fault::Error(text) => return Err(Broken(format!("replica {id} gave up: {text}"))),
            Fault::PowerLost => {
                self.machines[position].interrupted = true;
                self.machines[position].stop(&net, true);
                self.damage(position);
            }
        }
        let delay_us = self.random.tail(1_000, 3 * self.plan.election_us);
        self.after(delay_us, Event::Start(position));
        Ok(())
    }

    /// Steps a replica until it has nothing to do, and checks it.
    pub(crate) fn step(&mut self, position: usize, mut job: Option<usize>) -> Result<(), Broken> {
        if self.is_paused(position) {
            return Ok(());
        }
        for round in 0.. {
            let id = self.machines[position].id;
            if round == STEPS_AT_ONCE {
                return Err(Broken(format!("replica {id} never comes to rest")));
            }
            let outcome = self.machines[position].run(self.now_us, job.take());
            self.send();
            match outcome {
                Err(fault) => return self.went_down(position, fault),
                Ok(work) => {
                    if let Some(node) = self.machines[position].node_mut() {
                        self.callers[position].collect(&mut self.load, node, self.now_us)?;
                    }
                    if let Some(node) = self.machines[position].node() {
                        if self.trace {
                            let group = node.group(0);
                            let now = (group.role(), group.term());
                            if self.roles.insert(id, now) != Some(now) {
                                trace!(
                                    self,
                                    "replica {id} is {:?} in term {}, entries {}..={}, commit {}",
                                    now.0,
                                    now.1,
                                    group.first_index(),
                                    group.last_index(),
                                    group.commit()
                                );
                            }
                        }
                        self.checks.stepped(node)?;
                        within_bounds(node)?;
                        self.check_clocks(position)?;
                        let recovers = self.machines[position].recovers();
                        if self.plan.logs > 1 && !self.machines[position].disk.is_damaged() {
                            self.inspector
                                .look(node, self.plan.logs, &self.load.books)?;
                        }
                        let installing = node.is_installing();
                        if installing != self.machines[position].installing {
                            self.machines[position].installing = installing;
                            self.while_installing(position, installing);
                        }
                        if recovers {
                            self.machines[position].note_recovered();
                        }
                    }
                    if work == 0 {
                        break;
                    }
                }
            }
        }
        self.schedule(position);
        self.watch_leader()
    }

    /// What was sent is on its way.
    fn send(&mut self) {
        let mut flights = std::mem::take(&mut self.flights);
        self.net.take_sent(&mut flights);
        for flight in flights.drain(..) {
            self.at(flight.at_us, Event::Arrive(flight));
        }
        self.flights = flights;
    }

    fn wake_at(&mut self, position: usize, at_us: u64) {
        if at_us < self.wake_us[position] {
            self.wake_us[position] = at_us;
            let life = self.machines[position].life;
            self.at(at_us, Event::Timer(position, life));
        }
    }

    fn schedule(&mut self, position: usize) {
        let machine = &self.machines[position];
        let (life, Some(node)) = (machine.life, machine.node()) else {
            return;
        };
        let waiting = node.waiting_jobs();
        let deadline_us = machine.deadline_us().unwrap_or(u64::MAX);
        let due_us = machine.clock.when(deadline_us).max(self.now_us + 1);
        self.wake_at(position, due_us);
        while self.jobs[position] < waiting {
            self.jobs[position] += 1;
            let delay_us = match self.plan.hoarder {
                Some((hoarder, longest_us)) if hoarder == position && self.rough => {
                    self.random.within(longest_us / 8, longest_us)
                }
                _ => self.random.tail(50, self.machines[position].job_us),
            };
            self.after(delay_us, Event::Job(position, life));
        }
    }

    /// After a pause, and after the lull that it would end in.
    fn after_lull(&mut self, pause_us: u64, event: Event) {
        let longer_us = self.plan.with_lull(self.now_us, pause_us);
        if longer_us.is_some() {
            self.struck.note(Kind::Lull);
        }
        self.after(longer_us.unwrap_or(pause_us), event);
    }

    pub(crate) fn new_client(&mut self) -> anyhow::Result<()> {
        let mut client = self.load.client()?;
        let delay_us = client.pause_us(&self.plan);
        let number = client.number;
        self.clients.insert(number, client);
        self.after(delay_us, Event::Client(number));
        Ok(())
    }

    fn client_acts(&mut self, number: u64) -> Result<(), Broken> {
        let Some(mut client) = self.clients.remove(&number) else {
            return Ok(());
        };
        if !self.rough {
            self.clients.insert(number, client);
            return self.client_step(number);
        }
        if client.quits(&self.plan) {
            self.struck.note(Kind::Quit);
            self.client_wake_us.remove(&number);
            self.load.bury(client);
            return self.new_client().map_err(|error| Broken(error.to_string()));
        }
        if client.is_teller() && self.random.chance(0.02) {
            let log = self.random.below(u64::from(self.plan.logs)) as usize;
            let machine = self.random.below(self.machines.len() as u64) as usize;
            if let Some(node) = self.machines[machine].node_mut() {
                node.refuse_share(log);
            }
        }
        if client.pending() < self.plan.most_pending {
            self.load.submit(&mut client, self.now_us);
        }
        let pause_us = client.pause_us(&self.plan);
        self.clients.insert(number, client);
        self.after_lull(pause_us, Event::Client(number));
        self.client_step(number)
    }

    fn callers_act(&mut self, position: usize) -> Result<(), Broken> {
        if !self.rough {
            return Ok(());
        }
        let pause_us = self.callers[position].pause_us(&self.plan);
        self.after_lull(pause_us, Event::Callers(position));
        if self.is_paused(position) {
            return Ok(());
        }
        let Some(node) = self.machines[position].node_mut() else {
            return Ok(());
        };
        self.callers[position].submit(&self.load, node, self.now_us);
        self.step(position, None)
    }

    fn client_at(&mut self, to: std::net::SocketAddr) -> Result<(), Broken> {
        self.client_step(crate::load::number_of(to))
    }

    pub(crate) fn client_step(&mut self, number: u64) -> Result<(), Broken> {
        let Some(client) = self.clients.get_mut(&number) else {
            return Ok(());
        };
        let ended = self
            .load
            .step(client, self.now_us)
            .with_context(|| format!("client {number}"))
            .map_err(|error| Broken(format!("{error:#}")))?;
        // What it wants to send in answer to that goes out with the next turn, as in the blocking
        // client.
        let due_us = client
            .next_timeout_us()
            .map(|due_us| due_us.max(self.now_us + 1));
        self.mix(&[3, number, ended as u64]);
        self.send();
        if let Some(due_us) = due_us
            && self
                .client_wake_us
                .get(&number)
                .is_none_or(|&at| due_us < at)
        {
            self.client_wake_us.insert(number, due_us);
            self.at(due_us, Event::ClientTimer(number));
        }
        Ok(())
    }

    /// What it came to so far.
    pub fn report(&self) -> Report {
        let (mut struck, datagrams) = self.net.struck();
        struck.merge(&self.struck);
        Report {
            simulated_us: self.now_us,
            answered: self.load.answered,
            operations: self.load.history.len() as u64,
            committed: self.checks.committed(),
            checks: self.checks.made,
            datagrams,
            undecided: u64::from(self.undecided),
            struck,
            fingerprint: self.fingerprint,
        }
    }
}

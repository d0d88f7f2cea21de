//! The world: time, machines, deliveries.

use std::collections::BTreeMap;

use super::checks::Known;
use super::engine::{InFlight, Server};
use super::net::{Net, Packet};
use super::{Clock, Dice};
use crate::config::{ManagerId, ServerId, ShardId};
use crate::holder::{self, Action as HolderAction};
use crate::manager::{Action, Event, Founding, Manager, Notice};
use crate::message::{FromServer, Load, ToServer};
use crate::rules::Timing;
use crate::store::memory::Records;
use crate::store::{Answer, Key, Report};

/// Length of a step.
pub(crate) const STEP_US: u64 = 100;

pub(crate) struct ManagerProcess {
    pub manager: Manager,
    pub clock: Clock,
    pub number: u64,
}

pub(crate) struct ManagerNode {
    pub process: Option<ManagerProcess>,
    pub clock: Clock,
    pub paused_until_us: u64,
    pub down_until_us: u64,
    pub started: u64,
}

pub(crate) struct World {
    pub dice: Dice,
    pub now_us: u64,
    pub rules: Timing,
    /// Each manager that begins has other leases: the cluster's file is changed all the time.
    pub leases_differ: bool,
    pub founding: Founding,
    pub shards: ShardId,
    pub net: Net,
    pub records: Records,
    /// Replicas of the embedded store, one per manager, instead of `records`.
    pub replicas: Vec<super::replicas::Replica>,
    pub newest_stored: u64,
    pub managers: Vec<ManagerNode>,
    pub servers: Vec<Server>,
    pub known: Known,
    pub next_write: u64,
    /// Writes begin once in so many steps per server; 0: never.
    pub write_every: u64,
    /// Draws more requests than the others.
    pub hot: Option<ShardId>,
    pub trace: Vec<String>,
    pub tally: BTreeMap<&'static str, u64>,
}

/// The lease that servers and, unless they differ, managers use.
const LEASE_US: u64 = 10_000;

fn rules(lease_us: u64) -> Timing {
    Timing {
        drift_ppm: 20_000,
        return_wait_us: 300_000,
        adopt_wait_us: 150_000,
        period_us: 40_000,
        min_requests: 20,
        ..Timing::with_lease(lease_us)
    }
}

impl World {
    pub fn new(seed: u64, managers: usize, servers: u64, shards: u16, replication: u8) -> World {
        let mut dice = Dice(seed);
        let rules = rules(LEASE_US);
        let founding = Founding {
            cluster: 77,
            servers: servers as usize,
            shards,
            replication,
        };
        let managers = (0..managers)
            .map(|_| ManagerNode {
                process: None,
                clock: Clock::new(&mut dice, rules.drift_ppm),
                paused_until_us: 0,
                down_until_us: 0,
                started: 0,
            })
            .collect();
        let mut world = World {
            now_us: 0,
            rules,
            leases_differ: false,
            founding,
            shards,
            net: Net {
                delay_us: 200,
                ..Net::default()
            },
            records: Records::default(),
            replicas: Vec::new(),
            newest_stored: 0,
            managers,
            servers: Vec::new(),
            known: Known::default(),
            next_write: 0,
            write_every: 4,
            hot: None,
            trace: Vec::new(),
            tally: BTreeMap::new(),
            dice,
        };
        (1..=servers).for_each(|id| world.add_server(id));
        world
    }

    pub fn add_server(&mut self, id: u64) {
        let clock = Clock::new(&mut self.dice, self.rules.drift_ppm);
        self.servers.push(Server {
            id: ServerId(id),
            incarnation: 1000 + id,
            clock,
            data: BTreeMap::new(),
            process: None,
            sessions: 0,
            paused_until_us: 0,
            down_until_us: 0,
            highest: 0,
        });
    }

    pub fn count(&mut self, what: &'static str) {
        *self.tally.entry(what).or_insert(0) += 1;
    }

    pub fn note(&mut self, what: impl FnOnce() -> String) {
        if self.trace.len() > 4000 {
            self.trace.drain(..2000);
        }
        let line = format!("{:>9} {}", self.now_us, what());
        self.trace.push(line);
    }

    pub fn at(&mut self, id: ServerId) -> Option<usize> {
        self.servers.iter().position(|server| server.id == id)
    }

    /// Runs for some time, or until something is broken.
    pub fn run(&mut self, for_us: u64) {
        let end = self.now_us + for_us;
        while self.now_us < end && self.known.broken.is_none() {
            self.step();
        }
    }

    fn step(&mut self) {
        self.now_us += STEP_US;
        while let Some(packet) = self.net.take_due(self.now_us) {
            self.deliver(packet);
        }
        for at in 0..self.managers.len() {
            self.replica_turn(at);
            self.manager_turn(at);
        }
        for at in 0..self.servers.len() {
            self.server_turn(at);
        }
        self.check_primaries();
    }

    // ---- managers ----

    fn manager_turn(&mut self, at: usize) {
        let node = &self.managers[at];
        if self.now_us < node.down_until_us || self.now_us < node.paused_until_us {
            return;
        }
        if node.process.is_none() {
            let rules = match self.leases_differ {
                true => rules((LEASE_US / 4) << self.dice.below(5)),
                false => self.rules.clone(),
            };
            let node = &mut self.managers[at];
            node.started += 1;
            let (clock, id) = (node.clock, ManagerId(at as u64 + 1));
            let now_us = clock.read(self.now_us);
            node.process = Some(ManagerProcess {
                manager: Manager::new(id, rules, self.founding, now_us).unwrap(),
                clock,
                number: node.started,
            });
        }
        self.manager_step(at, Event::Tick);
    }

    pub fn manager_step(&mut self, at: usize, event: Event) {
        let now_us = self.now_us;
        let Some(process) = &mut self.managers[at].process else {
            return;
        };
        let mut actions = Vec::new();
        let (from, clock) = ((at, process.number), process.clock);
        process
            .manager
            .step(clock.read(now_us), event, &mut actions);
        for action in actions {
            match action {
                Action::Send(to, message) => {
                    let cut = self.net.cut.contains(&(to, at));
                    if !cut {
                        let packet = Packet::ToServer { to, message };
                        self.net.put(&mut self.dice, now_us, packet);
                    }
                }
                Action::Store(ticket, request) => {
                    let ask = Packet::Ask {
                        from,
                        ticket,
                        request,
                    };
                    self.net.put(&mut self.dice, now_us, ask);
                }
                Action::Tell(notice) => self.noticed(at, notice),
            }
        }
    }

    fn noticed(&mut self, at: usize, notice: Notice) {
        match &notice {
            Notice::InOffice { .. } => self.count("in office"),
            Notice::Committed { .. } => self.count("committed"),
            Notice::Patient { .. } => self.count("patient"),
            Notice::Contradiction { error, .. } => {
                self.break_if(true, || format!("drafted: {error}"));
            }
            _ => {}
        }
        if !matches!(notice, Notice::Written(_)) {
            self.note(|| format!("m{at} {notice:?}"));
        }
    }

    /// A configuration has come into the store.
    pub fn stored(&mut self, value: &[u8]) {
        let config = match crate::Configuration::decode(value) {
            Ok(config) => std::sync::Arc::new(config),
            Err(error) => return self.break_if(true, || format!("written: {error}")),
        };
        self.count("written");
        if !config.migrations.is_empty() {
            self.count("migrating");
        }
        self.note(|| {
            let ids = |copies: &[crate::Copy]| {
                let of = |c: &crate::Copy| format!("{}@{}", c.server.0, c.since);
                copies.iter().map(of).collect::<Vec<_>>().join(" ")
            };
            let shard = |s: &crate::Shard| {
                let (full, joining) = (ids(&s.full), ids(&s.joining));
                format!("{}@{}:[{full}|{joining}]", s.primary.0, s.since)
            };
            let shards: Vec<String> = config.shards.iter().map(shard).collect();
            let up: Vec<u64> = config.up().map(|m| m.id.0).collect();
            let moves: Vec<_> = config
                .migrations
                .iter()
                .map(|m| format!("{:?} {} {}>{}", m.kind, m.shard, m.source.0, m.target.0))
                .collect();
            let by = config.manager.0 - 1;
            format!(
                "m{by} writes {} up {up:?} {shards:?} {moves:?}",
                config.term
            )
        });
        self.check_written(&config);
    }

    // ---- deliveries ----

    fn later(&mut self, at_us: u64, packet: Packet) {
        self.net.put_at(at_us.max(self.now_us + 1), packet);
    }

    fn deliver(&mut self, packet: Packet) {
        match packet {
            Packet::ToManager { to, ref message } => {
                let paused = self.managers[to].paused_until_us;
                if paused > self.now_us {
                    return self.later(paused, packet);
                }
                if !self.net.cut.contains(&(message.server(), to)) {
                    let decoded = FromServer::decode(&message.encode()).unwrap();
                    self.manager_step(to, Event::Message(decoded));
                }
            }
            Packet::ToServer { to, ref message } => {
                let Some(at) = self.at(to) else { return };
                let paused = self.servers[at].paused_until_us;
                if paused > self.now_us {
                    return self.later(paused, packet);
                }
                if let Ok(decoded) = ToServer::decode(&message.encode()) {
                    self.holder_step(at, holder::Event::Message(decoded));
                }
            }
            Packet::Raft { to, bytes } => self.deliver_raft(to, &bytes),
            Packet::Ask {
                from,
                ticket,
                request,
            } if self.replicas.is_empty() => self.ask_store(from, ticket, request),
            Packet::Ask {
                from,
                ticket,
                request,
            } => self.ask_replica(from, ticket, request),
            Packet::Report { to, ref report } => {
                let node = &self.managers[to.0];
                if node.paused_until_us > self.now_us {
                    let until = node.paused_until_us;
                    return self.later(until, packet);
                }
                if node.process.as_ref().is_some_and(|p| p.number == to.1) {
                    let report = report.clone();
                    self.manager_step(to.0, Event::Store(report));
                }
            }
            Packet::Adopted { at, term } => {
                let Some(place) = self.at(at.0) else { return };
                let server = &self.servers[place];
                if server.paused_until_us > self.now_us {
                    let until = server.paused_until_us;
                    return self.later(until, packet);
                }
                if server.process.as_ref().is_some_and(|p| p.session == at.1) {
                    self.adopt(place, term);
                }
            }
            Packet::Write { .. } | Packet::Acked { .. } | Packet::Content { .. } => {
                self.deliver_data(packet);
            }
        }
    }

    fn ask_store(&mut self, from: (usize, u64), ticket: u64, request: crate::store::Request) {
        let troubled = self.net.loss > 0;
        let mut answer = Answer::Unavailable;
        let lost = troubled && self.dice.once_in(60);
        if !lost {
            let swap = matches!(request, crate::store::Request::Swap { .. });
            if troubled && swap && self.dice.once_in(60) {
                // Told as unknown first, done later.
                self.count("done later");
                let at_us = self.now_us + self.dice.below(30_000);
                let never = u64::MAX;
                self.net.put_at(
                    at_us,
                    Packet::Ask {
                        from: (from.0, never),
                        ticket,
                        request,
                    },
                );
                answer = Answer::Unknown;
            } else {
                answer = self.records.apply(&request);
                if let Answer::Swapped(_) = answer {
                    self.changed(&request);
                }
                if troubled && swap && self.dice.once_in(60) {
                    answer = Answer::Unknown;
                }
            }
        }
        let report = Report::Answer(ticket, answer);
        self.net.put(
            &mut self.dice,
            self.now_us,
            Packet::Report { to: from, report },
        );
    }

    fn changed(&mut self, request: &crate::store::Request) {
        let crate::store::Request::Swap { key, .. } = request else {
            return;
        };
        let record = self.records.get(*key);
        if *key == Key::Configuration {
            self.stored(&record.value);
        }
        // Watching may miss anything; managers then ask.
        if *key == Key::LeaderRecord && self.dice.once_in(4) {
            return;
        }
        for at in 0..self.managers.len() {
            let to = (at, self.managers[at].started);
            let report = Report::Changed(*key, record.clone());
            self.net
                .put(&mut self.dice, self.now_us, Packet::Report { to, report });
        }
    }

    // ---- servers ----

    fn server_turn(&mut self, at: usize) {
        let (now_us, rules) = (self.now_us, self.rules.clone());
        let server = &mut self.servers[at];
        if now_us < server.down_until_us || now_us < server.paused_until_us {
            return;
        }
        if server.process.is_none() {
            server.start(&rules, now_us);
        }
        if server.process.as_ref().is_some_and(|p| p.left) {
            return;
        }
        self.holder_step(at, holder::Event::Tick);
        self.promote(at);
        self.copy(at);
        self.write(at);
        self.tell_loads(at);
    }

    fn tell_loads(&mut self, at: usize) {
        let (now_us, period_us) = (self.now_us, self.rules.period_us);
        let Some(process) = &mut self.servers[at].process else {
            return;
        };
        if now_us >= process.next_loads_us {
            process.next_loads_us = now_us + period_us;
            let requests = std::mem::take(&mut process.requests);
            let load = |(shard, requests): (ShardId, u32)| Load {
                shard,
                requests,
                writes: requests,
            };
            let loads = requests.into_iter().map(load).collect();
            self.holder_step(at, holder::Event::Loads(loads));
        }
    }

    pub fn holder_step(&mut self, at: usize, event: holder::Event) {
        let now_us = self.now_us;
        let local_us = self.servers[at].clock.read(now_us);
        let Some(process) = &mut self.servers[at].process else {
            return;
        };
        let mut actions = Vec::new();
        process.holder.step(local_us, event, &mut actions);
        let session = process.session;
        for action in actions {
            let id = self.servers[at].id;
            match action {
                HolderAction::Send(message) => {
                    for to in 0..self.managers.len() {
                        let message = message.clone();
                        let packet = Packet::ToManager { to, message };
                        self.net.put(&mut self.dice, now_us, packet);
                    }
                }
                HolderAction::Adopt { config, stop, .. } => {
                    let term = config.term;
                    let highest = self.servers[at].highest;
                    self.break_if(term < highest, || format!("{id}: {term} after {highest}"));
                    self.servers[at].highest = term;
                    self.check_term(&config);
                    if let Some(process) = &mut self.servers[at].process {
                        // The engine takes its time; a later configuration takes the place of an
                        // earlier one.
                        let mut all = stop;
                        if let Some((_, earlier)) = process.adopting.take() {
                            all.extend(earlier);
                        }
                        process.adopting = Some((config, all));
                    }
                    let at = (id, session);
                    let delay = self.dice.below(1500);
                    self.net
                        .put_at(now_us + delay, Packet::Adopted { at, term });
                }
                HolderAction::Committed {
                    config,
                    serve,
                    copy,
                    release,
                } => self.committed(at, config, serve, copy, release),
                HolderAction::Refused(_) => self.count("refused"),
                HolderAction::Left => {
                    self.count("left");
                    if let Some(process) = &mut self.servers[at].process {
                        process.left = true;
                    }
                }
            }
        }
    }

    /// A write begins.
    fn write(&mut self, at: usize) {
        if self.write_every == 0 || !self.dice.once_in(self.write_every) {
            return;
        }
        let now_us = self.now_us;
        let mut shard = self.dice.below(u64::from(self.shards)) as ShardId;
        if self.dice.once_in(2) {
            shard = self.hot.unwrap_or(shard);
        }
        let server = &mut self.servers[at];
        let (id, local_us) = (server.id, server.clock.read(now_us));
        let Some(process) = &mut server.process else {
            return;
        };
        let fit = process.promoted.contains_key(&shard)
            && process.holder.may_serve(shard, local_us).is_ok()
            && process.in_flight.len() < 32;
        if !fit {
            return;
        }
        *process.requests.entry(shard).or_insert(0) += 1;
        self.next_write += 1;
        let (write, membership) = (self.next_write, process.membership);
        let waits = process.targets(id, shard);
        process.in_flight.push(InFlight {
            shard,
            write,
            waits: waits.clone(),
            resend_us: now_us + 3000,
        });
        server.data.entry(shard).or_default().writes.insert(write);
        for to in waits {
            self.send_write((id, membership), to, shard, write);
        }
        self.finish_writes(at);
    }

    pub fn send_write(&mut self, from: (ServerId, u64), to: ServerId, shard: ShardId, write: u64) {
        let packet = Packet::Write {
            from,
            to,
            shard,
            write,
        };
        self.net.put(&mut self.dice, self.now_us, packet);
    }
}

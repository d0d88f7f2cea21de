//! The engine's doings over the network, and what goes wrong.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::net::Packet;
use super::world::World;
use crate::config::{Configuration, CopyTask, ServerId, ShardId};
use crate::holder;
use crate::manager::Command;

impl World {
    // ---- the engine ----

    /// The engine has shut out strangers and stopped what it is to stop.
    pub fn adopt(&mut self, at: usize, term: u64) {
        let server = &mut self.servers[at];
        let Some(process) = &mut server.process else {
            return;
        };
        let Some((config, stop)) = process.adopting.take_if(|(config, _)| config.term == term)
        else {
            return;
        };
        process.allowed = config.up().map(|m| (m.id, m.since)).collect();
        let own = config.member(server.id);
        process.membership = own.map_or(0, |m| m.since);
        for shard in &stop {
            process.promoted.remove(shard);
            process.promoting.remove(shard);
        }
        let (promoted, promoting) = (&process.promoted, &process.promoting);
        process
            .in_flight
            .retain(|f| promoted.contains_key(&f.shard) || promoting.contains_key(&f.shard));
        process.adopted = Some(config.clone());
        let id = server.id;
        for flight in &mut process.in_flight {
            let shard = &config.shards[usize::from(flight.shard)];
            flight.waits.retain(|other| shard.has(*other));
        }
        server.lay_out(&config);
        self.finish_writes(at);
        self.note(|| format!("{id} adopts {term}"));
        self.holder_step(at, holder::Event::Adopted { term });
    }

    pub fn committed(
        &mut self,
        at: usize,
        config: Arc<Configuration>,
        serve: Vec<ShardId>,
        copy: Vec<CopyTask>,
        release: Vec<ShardId>,
    ) {
        let now_us = self.now_us;
        let server = &mut self.servers[at];
        let (id, Some(process)) = (server.id, &mut server.process) else {
            return;
        };
        process.committed = Some(config.clone());
        for shard in serve {
            let since = config.shards[usize::from(shard)].since;
            process.promoting.insert(shard, since);
        }
        for shard in release {
            server.data.remove(&shard);
        }
        let mut copying = Vec::new();
        for task in copy {
            let known = process.copying.iter().find(|(known, _)| *known == task);
            copying.push(known.copied().unwrap_or((task, now_us + 2000)));
        }
        process.copying = copying;
        // Writes in flight go to copies that have joined, too: what is copied are finished writes
        // only.
        let membership = process.membership;
        let mut more = Vec::new();
        for place in 0..process.in_flight.len() {
            let shard = process.in_flight[place].shard;
            let targets = process.targets(id, shard);
            let flight = &mut process.in_flight[place];
            let joined = &config.shards[usize::from(shard)].joining;
            for to in targets {
                if joined.iter().any(|c| c.server == to) && flight.waits.insert(to) {
                    more.push((to, shard, flight.write));
                }
            }
        }
        for (to, shard, write) in more {
            self.send_write((id, membership), to, shard, write);
        }
    }

    /// Reconciles the copies of shards that this server serves from now on, when it can reach all
    /// of them.
    pub fn promote(&mut self, at: usize) {
        let server = &self.servers[at];
        let (id, Some(process)) = (server.id, &server.process) else {
            return;
        };
        let Some(config) = process.adopted.clone() else {
            return;
        };
        let own = (id, process.membership);
        let promoting: Vec<(ShardId, u64)> = process
            .promoting
            .iter()
            .map(|(s, since)| (*s, *since))
            .collect();
        for (number, since) in promoting {
            let server = &self.servers[at];
            let Some(process) = &server.process else {
                return;
            };
            let shard = &config.shards[usize::from(number)];
            // Without a lease it is perhaps not the primary any more, and what it finds means
            // nothing.
            let local_us = server.clock.read(self.now_us);
            let serves = process.holder.may_serve(number, local_us).is_ok();
            if shard.primary != id || shard.since != since || !serves {
                continue;
            }
            let full: Vec<ServerId> = shard.full.iter().map(|copy| copy.server).collect();
            // Those who have shut this process out do not answer it.
            let lives = |id: &ServerId| {
                self.servers.iter().any(|s| {
                    let process = s.process.as_ref();
                    s.id == *id
                        && s.paused_until_us <= self.now_us
                        && process.is_some_and(|p| p.allowed.contains(&own))
                })
            };
            if !full.iter().all(lives) {
                continue;
            }
            let mut all = BTreeSet::new();
            for server in self.servers.iter().filter(|s| full.contains(&s.id)) {
                all.extend(
                    server
                        .data
                        .get(&number)
                        .iter()
                        .flat_map(|d| d.writes.iter().copied()),
                );
            }
            let acked = self.known.acked.get(&number).cloned().unwrap_or_default();
            let lost: Vec<u64> = acked.difference(&all).copied().collect();
            self.break_if(!lost.is_empty(), || {
                format!("shard {number} is promoted at {id} without acknowledged writes {lost:?}")
            });
            for server in self.servers.iter_mut().filter(|s| full.contains(&s.id)) {
                server
                    .data
                    .entry(number)
                    .or_default()
                    .writes
                    .extend(all.iter().copied());
            }
            if let Some(process) = &mut self.servers[at].process {
                process.promoting.remove(&number);
                process.promoted.insert(number, since);
            }
            self.note(|| format!("{id} promotes shard {number}@{since}"));
            self.count("promoted");
        }
    }

    pub fn finish_writes(&mut self, at: usize) {
        let Some(process) = &mut self.servers[at].process else {
            return;
        };
        let done: Vec<(ShardId, u64)> = process
            .in_flight
            .iter()
            .filter(|flight| flight.waits.is_empty())
            .map(|flight| (flight.shard, flight.write))
            .collect();
        process.in_flight.retain(|flight| !flight.waits.is_empty());
        for (shard, write) in done {
            self.count("acknowledged");
            let id = self.servers[at].id;
            self.note(|| format!("{id} acknowledges {write} of shard {shard}"));
            self.known.acked.entry(shard).or_default().insert(write);
        }
    }

    /// Copies of shards go out, and writes without an answer again.
    pub fn copy(&mut self, at: usize) {
        let now_us = self.now_us;
        let server = &mut self.servers[at];
        let (id, Some(process)) = (server.id, &mut server.process) else {
            return;
        };
        let membership = process.membership;
        let mut out = Vec::new();
        for (task, next_us) in &mut process.copying {
            if now_us < *next_us || process.promoting.contains_key(&task.shard) {
                continue;
            }
            *next_us = now_us + 20_000;
            let finished = |write: &&u64| !process.in_flight.iter().any(|f| f.write == **write);
            let data = server.data.get(&task.shard);
            let writes = data.iter().flat_map(|d| d.writes.iter()).filter(finished);
            let writes = writes.copied().collect();
            out.push(Packet::Content {
                from: (id, membership),
                task: *task,
                writes,
            });
        }
        for flight in &mut process.in_flight {
            if now_us >= flight.resend_us {
                flight.resend_us = now_us + 3000;
                out.extend(flight.waits.iter().map(|to| Packet::Write {
                    from: (id, membership),
                    to: *to,
                    shard: flight.shard,
                    write: flight.write,
                }));
            }
        }
        for packet in out {
            let slow = self.dice.below(8000);
            match packet {
                Packet::Content { .. } => self.net.put_at(now_us + slow, packet),
                _ => self.net.put(&mut self.dice, now_us, packet),
            }
        }
    }

    pub fn deliver_data(&mut self, packet: Packet) {
        let now_us = self.now_us;
        match packet {
            Packet::Write {
                from,
                to,
                shard,
                write,
            } => {
                let Some(at) = self.at(to) else { return };
                let server = &mut self.servers[at];
                // No processor takes part; whether the process runs or is paused does not matter,
                // but it must live.
                let open = server
                    .process
                    .as_ref()
                    .is_some_and(|p| p.allowed.contains(&from));
                if let Some(data) = server.data.get_mut(&shard).filter(|_| open) {
                    data.writes.insert(write);
                    let acked = Packet::Acked {
                        to: from,
                        from: to,
                        write,
                    };
                    self.net.put(&mut self.dice, now_us, acked);
                }
            }
            Packet::Acked { to, from, write } => {
                let Some(at) = self.at(to.0) else { return };
                let server = &mut self.servers[at];
                if server.paused_until_us > now_us {
                    let until = server.paused_until_us;
                    return self.net.put_at(until, packet);
                }
                let Some(process) = &mut server.process else {
                    return;
                };
                if process.membership == to.1 {
                    for flight in process.in_flight.iter_mut().filter(|f| f.write == write) {
                        flight.waits.remove(&from);
                    }
                    self.finish_writes(at);
                }
            }
            Packet::Content { from, task, writes } => {
                let Some(at) = self.at(task.to) else { return };
                let server = &mut self.servers[at];
                let open = server.process.as_ref().is_some_and(|p| {
                    p.allowed.contains(&from)
                        && p.committed
                            .as_ref()
                            .is_some_and(|c| c.copy_tasks().any(|t| t == task))
                });
                let data = server.data.get_mut(&task.shard);
                if let Some(data) = data.filter(|d| open && d.since == task.since) {
                    data.writes.extend(writes);
                    self.count("copied");
                    let (shard, since) = (task.shard, task.since);
                    self.note(|| format!("{} has shard {shard}@{since} from {}", task.to, from.0));
                    self.holder_step(at, holder::Event::Copied { shard, since });
                }
            }
            _ => {}
        }
    }

    // ---- what goes wrong ----

    /// Something happens, perhaps.
    pub fn trouble(&mut self) {
        let (now_us, some) = (self.now_us, self.dice.below(40_000));
        let at = self.dice.below(self.servers.len() as u64) as usize;
        let manager = self.dice.below(self.managers.len() as u64) as usize;
        let id = self.servers[at].id;
        match self.dice.below(14) {
            0..=2 => {
                self.note(|| format!("{id} crashes for {some}"));
                self.crash_server(at, some);
            }
            3..=5 => {
                self.note(|| format!("{id} pauses for {some}"));
                self.servers[at].paused_until_us = now_us + some;
            }
            6 => {
                self.note(|| format!("m{manager} crashes for {some}"));
                self.crash_manager(manager, some);
            }
            7 | 8 => {
                self.note(|| format!("m{manager} pauses for {some}"));
                self.managers[manager].paused_until_us = now_us + some;
            }
            9 => {
                self.note(|| format!("{id} and m{manager} do not hear each other"));
                self.net.cut.push((id, manager));
            }
            10 => self.net.cut.clear(),
            11 => {
                self.note(|| "power fails".into());
                (0..self.servers.len()).for_each(|at| {
                    let some = self.dice.below(60_000);
                    self.crash_server(at, some);
                });
                if self.dice.once_in(2) {
                    (0..self.managers.len()).for_each(|at| self.crash_manager(at, some));
                }
            }
            12 => self.hot = Some(self.dice.below(u64::from(self.shards)) as ShardId),
            _ => {
                let shard = self.dice.below(u64::from(self.shards)) as ShardId;
                let command = match self.dice.below(4) {
                    0 => Command::Drain(id),
                    1 => Command::Undrain(id),
                    _ => Command::Move { shard, target: id },
                };
                self.command(command);
            }
        }
    }

    pub fn command(&mut self, command: Command) -> bool {
        let taken = self.managers.iter_mut().any(|node| {
            let process = node.process.as_mut();
            process.is_some_and(|p| p.manager.command(command).is_ok())
        });
        self.note(|| format!("{command:?}: {taken}"));
        taken
    }

    pub fn crash_server(&mut self, at: usize, for_us: u64) {
        let server = &mut self.servers[at];
        server.process = None;
        server.paused_until_us = 0;
        server.down_until_us = self.now_us + for_us;
    }

    pub fn crash_manager(&mut self, at: usize, for_us: u64) {
        self.crash_replica(at);
        let node = &mut self.managers[at];
        node.process = None;
        node.paused_until_us = 0;
        node.down_until_us = self.now_us + for_us;
    }

    /// Everything works again. Those who left come back; no server drains.
    pub fn heal(&mut self) {
        self.note(|| "healed".into());
        (self.net.loss, self.net.rare_us) = (0, 0);
        self.net.cut.clear();
        self.hot = None;
        for server in &mut self.servers {
            (server.paused_until_us, server.down_until_us) = (0, 0);
            if server.process.as_ref().is_some_and(|p| p.left) {
                server.process = None;
            }
        }
        for node in &mut self.managers {
            (node.paused_until_us, node.down_until_us) = (0, 0);
        }
    }
}

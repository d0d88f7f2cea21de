//! A whole run: rough times, then quiet ones, then the reckoning.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use cyclone_store::Limits;
use cyclone_wire::raftmsg::Members;

use crate::bank::adds_up;
use crate::check::Broken;
use crate::history::{Answer, Op, Outcome};
use crate::images;
use crate::linear;
use crate::machine::{Machine, panic_text};
use crate::plan::Plan;
use crate::world::{Failure, Report, World, trace};

/// Election time-outs within which a healed cluster must have answered everything.
const PATIENCE: u64 = 60;

/// Runs a plan. Files go to their own directory below `root`, which is removed.
pub fn run(plan: &Plan, root: &Path, trace: bool) -> Result<Report, Failure> {
    let place = root.join(format!("run-{}", plan.seed));
    let _ = std::fs::remove_dir_all(&place);
    let outcome = run_in(plan, &place, trace);
    // Left-overs are removed before the next run of this seed.
    let _ = std::fs::remove_dir_all(&place);
    outcome
}

fn run_in(plan: &Plan, place: &Path, trace: bool) -> Result<Report, Failure> {
    let setting_up = |error: &dyn std::fmt::Display| Failure {
        at_us: 0,
        strikes: 0,
        what: format!("setting up: {error}"),
    };
    let mut world = World::new(plan.clone(), place).map_err(|error| setting_up(&error))?;
    world.trace = trace;
    let lived = catch_unwind(AssertUnwindSafe(|| {
        world
            .run_until(plan.duration_us)
            .and_then(|()| world.quiet())
            .and_then(|()| world.reckon())
    }));
    // What outlives its process panics outside of every replica's step.
    let lived = lived.unwrap_or_else(|panic| Err(Broken(format!("panic: {}", panic_text(&panic)))));
    match lived {
        Ok(()) => Ok(world.report()),
        Err(Broken(what)) => {
            if trace {
                world.counted();
            }
            Err(Failure {
                at_us: world.now_us,
                strikes: world.strikes,
                what,
            })
        }
    }
}

/// Who takes part in a log, for people.
fn names(members: &Members) -> String {
    let lists = [
        ("", &members.voters),
        (" was ", &members.voters_outgoing),
        (" learners ", &members.learners),
        (" next ", &members.learners_next),
    ];
    let lists = lists.iter().filter(|(_, list)| !list.is_empty());
    lists
        .map(|(name, list)| format!("{name}{list:?}"))
        .collect()
}

impl World {
    /// Heals everything and waits until all that was begun has ended, then sees whether the cluster
    /// serves.
    fn quiet(&mut self) -> Result<(), Broken> {
        self.rough = false;
        self.net.heal();
        let bound_us = PATIENCE * self.plan.election_us + 20_000_000;
        for position in 0..self.machines.len() {
            self.machines[position].paused_until_us = 0;
            self.machines[position].job_us = 2_000;
            self.machines[position].busy_until_us = 0;
            self.machines[position].disk.stall(false);
            self.mend_stores(&[position])?;
            self.machines[position].calm_flash();
            self.start(position)?;
            self.step(position, None)?;
        }
        self.wait(bound_us, "every operation to end", |world| {
            world.clients.values().all(|client| client.pending() == 0)
                && world.callers.iter().all(|callers| callers.pending() == 0)
        })?;
        self.wait(bound_us, "a change of the members to end", |world| {
            !world.is_changing_members()
        })?;
        self.wait(bound_us, "every replica to recover", |world| {
            let running = world.machines.iter().filter_map(|machine| machine.node());
            running.into_iter().all(|node| node.is_full_member())
        })?;
        // Every key is read once more, and something is written: the first by one client, the
        // second by another.
        let keys: std::collections::BTreeSet<Vec<u8>> = self
            .load
            .history
            .operations()
            .iter()
            .map(|operation| operation.key.clone())
            .collect();
        let last = self
            .load
            .client()
            .map_err(|error| Broken(error.to_string()))?;
        let number = last.number;
        self.clients.insert(number, last);
        self.insist(
            number,
            b"register:last".to_vec(),
            Op::Set(b"last".to_vec()),
            bound_us,
        )?;
        for key in keys {
            self.insist(number, key, Op::Get, bound_us)?;
        }
        self.reckon_clocks(number, bound_us)?;
        if self.plan.old_format {
            self.old_keys(number, bound_us)?;
        }
        // A deposed leader answers what will never be committed only when it has waited for its
        // fate long enough.
        let at_rest = |world: &World| {
            let mut nodes = world.machines.iter().filter_map(|machine| machine.node());
            nodes.all(|node| node.leak().is_none())
        };
        let until_us = self.now_us + bound_us;
        while !at_rest(self) && self.now_us < until_us {
            self.run_until(self.now_us + self.plan.heartbeat_us)?;
        }
        // A world that never comes to rest is reported in the end. One that does may begin anew
        // without input: keys still expire.
        let rests = at_rest(self);
        self.wait(bound_us, "all replicas to apply the same", |world| {
            world.agree() && (!rests || at_rest(world))
        })
    }

    /// What the cluster's earlier life wrote is there.
    fn old_keys(&mut self, number: u64, bound_us: u64) -> Result<(), Broken> {
        for key in 0..images::OLD_KEYS {
            self.insist(number, images::old_key(key), Op::Get, bound_us)?;
            // Judged here: the checker believes that keys start absent.
            let last = self.load.history.pop();
            let found = last.map(|operation| operation.outcome);
            let value = images::old_value(key);
            let right = matches!(&found, Some(Outcome::Done { answer: Answer::Bytes(bytes), .. }) if *bytes == value);
            if !right {
                return Err(Broken(format!("old key {key} reads {found:?}")));
            }
        }
        Ok(())
    }

    /// Lets a client ask until it is answered. A cluster without faults does so within the bound.
    pub(crate) fn insist(
        &mut self,
        number: u64,
        key: Vec<u8>,
        op: Op,
        bound_us: u64,
    ) -> Result<(), Broken> {
        let until_us = self.now_us + bound_us;
        loop {
            let (before, now_us) = (self.load.answered, self.now_us);
            if let Some(client) = self.clients.get_mut(&number) {
                client.submit(key.clone(), op.clone(), now_us);
            }
            self.client_step(number)?;
            self.wait(bound_us, "an operation to end", |world| {
                world.clients[&number].pending() == 0
            })?;
            if self.load.answered > before {
                return Ok(());
            }
            if self.now_us > until_us {
                return Err(Broken(format!(
                    "without faults, {op} was not done within {bound_us} µs: {}",
                    self.standing()
                )));
            }
        }
    }

    /// Whether all replicas that run have applied the same entries.
    pub(crate) fn agree(&self) -> bool {
        let members = self.members();
        let takes_part = |machine: &&Machine| members.contains(&machine.id);
        let part = || self.machines.iter().filter(takes_part);
        let nodes = || part().filter_map(|machine| machine.node());
        let alike = |log: usize| {
            let mut applied = nodes().map(|node| node.applied(log));
            let first = applied.next();
            first.is_some_and(|first| {
                first.0 >= self.checks.committed_in(log) && applied.all(|other| other == first)
            })
        };
        let running = part().all(|machine| machine.node().is_some() || machine.is_refused());
        running && (0..usize::from(self.plan.logs)).all(alike)
    }

    pub(crate) fn wait(
        &mut self,
        bound_us: u64,
        what: &str,
        done: impl Fn(&World) -> bool,
    ) -> Result<(), Broken> {
        let until_us = self.now_us + bound_us;
        while !done(self) {
            if self.now_us >= until_us {
                return Err(Broken(format!(
                    "waited {bound_us} µs without faults for {what}: {}",
                    self.standing()
                )));
            }
            let next_us = (self.now_us + self.plan.heartbeat_us / 2).min(until_us);
            self.run_until(next_us)?;
        }
        Ok(())
    }

    /// What the replicas have counted, for people.
    pub(crate) fn counted(&self) {
        for node in self.machines.iter().filter_map(|machine| machine.node()) {
            let status = node.status();
            let stats: Vec<String> = node
                .packet_stats()
                .iter()
                .filter(|(_, count)| *count > 0)
                .map(|(name, count)| format!("{name} {count}"))
                .collect();
            println!("replica {}: {:?}", status.id, status.counters);
            for log in &status.logs {
                println!("  log {log:?}");
            }
            println!("  packets {}", stats.join(", "));
        }
    }

    /// Who stands where, for people.
    fn standing(&self) -> String {
        let machines = self.machines.iter().map(|machine| match machine.node() {
            None if machine.is_refused() => format!("{} refused", machine.id),
            None => format!("{} off", machine.id),
            Some(node) => {
                let logs = (0..usize::from(self.plan.logs)).map(|log| {
                    let group = node.group(log);
                    format!(
                        "{:?} term {} entries {}..={} commit {} applied {} members {}",
                        group.role(),
                        group.term(),
                        group.first_index(),
                        group.last_index(),
                        group.commit(),
                        node.applied(log).0,
                        names(&group.members())
                    )
                });
                format!("{} {}", machine.id, logs.collect::<Vec<_>>().join(" | "))
            }
        });
        let machines: Vec<String> = machines.collect();
        let clients = self.clients.iter();
        let clients =
            clients.map(|(number, client)| (format!("client {number}"), client.pending()));
        let callers = self.machines.iter().zip(&self.callers);
        let callers = callers.map(|(at, callers)| {
            (
                format!("the callers in replica {}", at.id),
                callers.pending(),
            )
        });
        let waiting: Vec<(String, usize)> =
            clients.chain(callers).filter(|(_, n)| *n > 0).collect();
        let pending: usize = waiting.iter().map(|(_, count)| count).sum();
        let who: Vec<&str> = waiting
            .iter()
            .take(3)
            .map(|(who, _)| who.as_str())
            .collect();
        let who = match who.is_empty() {
            true => String::new(),
            false => format!(", of {}", who.join(", ")),
        };
        format!("{}; {pending} operations pending{who}", machines.join("; "))
    }

    /// Replicas agree byte for byte with each other and with a replay of the committed log; nothing
    /// has leaked; every client's answers can be explained.
    fn reckon(&mut self) -> Result<(), Broken> {
        let limits = Limits {
            max_value_bytes: self.plan.max_value_bytes,
            max_sessions: self.plan.max_sessions,
        };
        if self.checks.unproven() > 0 {
            return Err(Broken(
                "entries were applied that were never committed".into(),
            ));
        }
        let applied = self.checks.committed();
        let broken = |error: anyhow::Error| Broken(error.to_string());
        let mut replayed = self.checks.replayed(limits).map_err(broken)?;
        let members = self.members();
        for machine in &self.machines {
            let Some(node) = machine.node() else { continue };
            if !members.contains(&machine.id) {
                continue;
            }
            (0..=self.load.books.current()).try_for_each(|book| adds_up(node, book))?;
            let digest = node
                .store()
                .digest()
                .map_err(|error| Broken(error.to_string()))?;
            // Where no model could be made, the first replica is the others'.
            let right = replayed.get_or_insert_with(|| digest.clone());
            if digest != *right {
                return Err(Broken(format!(
                    "replica {} ends with state {digest}; replaying the {applied} committed entries gives {right}",
                    machine.id
                )));
            }
            if let Some(leak) = node.leak() {
                return Err(Broken(format!("replica {}: {leak}", machine.id)));
            }
        }
        let limits = linear::Limits {
            steps_per_key: 500_000,
        };
        match linear::check_with(&self.load.history, limits) {
            Ok(_) => Ok(()),
            // Too many operations of unknown outcome on one key at once: counted, and no evidence
            // of anything.
            Err(error @ linear::CheckError::Undecided { .. }) => {
                trace!(self, "the checker gave up: {error}");
                self.undecided = true;
                Ok(())
            }
            Err(error) => {
                if let Some(path) = std::env::var_os("CYCLONE_HISTORY") {
                    let lines = crate::interchange::lines(&self.load.history);
                    let text: String = lines.iter().map(|(_, line)| format!("{line}\n")).collect();
                    std::fs::write(path, text).map_err(|error| Broken(error.to_string()))?;
                }
                Err(Broken(error.to_string()))
            }
        }
    }
}

//! Storage that is replaced while a machine is off: by an empty one, or by an older copy of itself.
//! Such a replica has forgotten acknowledgements and votes; it has to recover before it counts
//! again (docs/adr/0075).

use std::fs;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cyclone_pmem::{CrashSim, Region};
use cyclone_replica::identity::Identity;
use cyclone_replica::{BootstrapState, StateFile};
use cyclone_store::FakeDisk;

use crate::check::Broken;
use crate::event::Event;
use crate::machine::Machine;
use crate::plan::Kind;
use crate::world::{World, trace};

/// Times that a copy waits for a time at which its use must be noticed.
const TRIES: u32 = 20;

/// The file in which a machine's replica keeps its standing.
#[derive(Clone, Default)]
pub(crate) struct StandingFile {
    /// Everything that was written, the last at the end.
    written: Arc<Mutex<Vec<String>>>,
    /// The replica is a member from the beginning: what it writes is not kept.
    fixed: bool,
}

/// The same in the hands of one process, whose machine may have lost power.
pub(crate) struct OpenStanding {
    file: StandingFile,
    memory: Option<CrashSim>,
}

impl StandingFile {
    /// For a replica that founds its cluster, or one of a cluster that is there already.
    pub(crate) fn new(founds: bool) -> StandingFile {
        let file = StandingFile {
            fixed: !founds,
            ..StandingFile::default()
        };
        if !founds {
            file.lock().push(BootstrapState::Member.text());
        }
        file
    }

    fn lock(&self) -> MutexGuard<'_, Vec<String>> {
        self.written.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn open(&self, memory: Option<CrashSim>) -> Box<dyn StateFile> {
        Box::new(OpenStanding {
            file: self.clone(),
            memory,
        })
    }

    /// The file is gone.
    pub(crate) fn lose(&self) {
        if !self.fixed {
            self.lock().clear();
        }
    }

    fn last(&self) -> Option<String> {
        self.lock().last().cloned()
    }

    fn put(&self, text: Option<String>) {
        let mut written = self.lock();
        written.clear();
        written.extend(text);
    }

    /// Whether the replica has known since the file was replaced that it has lost storage.
    fn has_noticed(&self) -> bool {
        let recovering = BootstrapState::Recovering.text();
        self.lock().contains(&recovering)
    }
}

impl StateFile for OpenStanding {
    fn read(&self) -> io::Result<Option<String>> {
        Ok(self.file.last())
    }

    fn write(&mut self, text: &str) -> io::Result<()> {
        // A machine without power writes nothing.
        let has_power = !self.memory.as_ref().is_some_and(CrashSim::has_crashed);
        if has_power && !self.file.fixed {
            self.file.lock().push(text.to_owned());
        }
        Ok(())
    }
}

/// A copy of everything that a machine keeps.
pub(crate) struct StorageCopy {
    region: Vec<u8>,
    identity: Option<Identity>,
    standing: Option<String>,
    disk: FakeDisk,
    /// Per log the last entry in it.
    pub(crate) lasts: Vec<u64>,
}

impl Machine {
    /// While the machine is off its storage is replaced by an empty one.
    pub(crate) fn empty_storage(&mut self) {
        self.region = None;
        self.identity = None;
        self.disk.lose();
        self.standing.lose();
        self.lose_flash();
        let _ = fs::remove_dir_all(&self.directory);
        (self.forgot, self.is_older) = (true, false);
    }

    /// From the next start on it is not said any more that the cluster is new.
    pub(crate) fn forbid_bootstrap(&mut self) {
        self.config.bootstrap = false;
        self.damaged = true;
    }

    /// A copy of its storage while it is off.
    fn copy_storage(&self, lasts: Vec<u64>) -> Option<StorageCopy> {
        Some(StorageCopy {
            region: self.region.as_ref()?.image(|_| 0),
            identity: self.identity,
            standing: self.standing.last(),
            disk: self.disk.copy(),
            lasts,
        })
    }

    /// While the machine is off its storage is replaced by an older copy.
    fn put_copy(&mut self, copy: &StorageCopy) -> Result<(), Broken> {
        let region = Region::from_image(&copy.region);
        let region = region.map_err(|error| Broken(error.to_string()))?;
        self.region = Some(region.1);
        self.identity = copy.identity;
        self.standing.put(copy.standing.clone());
        self.disk.become_copy_of(&copy.disk);
        (self.forgot, self.is_older) = (true, true);
        Ok(())
    }

    /// Whether it has lost storage and does not count again yet.
    pub(crate) fn recovers(&self) -> bool {
        self.forgot
    }

    /// It may count again.
    pub(crate) fn note_recovered(&mut self) {
        let noticed = !self.is_older || self.standing.has_noticed();
        if self.forgot && noticed && self.node().is_some_and(|node| node.is_full_member()) {
            self.forgot = false;
        }
    }
}

impl World {
    /// Whether a majority remains that has lost nothing when one more machine loses its storage.
    /// One that never comes back would keep those that recover waiting for its word.
    fn may_replace_storage(&self) -> bool {
        let refused = self.machines.iter().any(Machine::is_refused);
        !refused && self.may_lose_one()
    }

    /// A machine's storage is replaced by an empty one. Returns whether it was.
    pub(crate) fn strike_emptied(&mut self, victim: usize) -> bool {
        if !self.may_replace_storage() || self.now_us < self.calm_until_us {
            return false;
        }
        let id = self.machines[victim].id;
        let others_recover = self.machines.iter().any(Machine::recovers);
        self.stop(victim, false);
        self.machines[victim].empty_storage();
        self.checks.forget(id);
        // A machine that is never started again as a new one stays away.
        let without = !others_recover && self.random.chance(0.1);
        if without {
            self.machines[victim].forbid_bootstrap();
        }
        let flag = if without { "without" } else { "with" };
        trace!(
            self,
            "replica {id} loses all storage and is started {flag} --bootstrap"
        );
        true
    }

    /// A machine's storage is copied, to be put in place of what it has some time later. Returns
    /// whether it was.
    pub(crate) fn strike_copied(&mut self, victim: usize) -> bool {
        if self.copy.is_some() || self.now_us < self.calm_until_us {
            return false;
        }
        let machine = &self.machines[victim];
        if machine.recovers() || !machine.node().is_some_and(|node| node.is_full_member()) {
            return false;
        }
        let lasts = self.lasts(victim);
        self.stop(victim, false);
        self.copy = self.machines[victim].copy_storage(lasts);
        let id = self.machines[victim].id;
        trace!(self, "replica {id}'s storage is copied");
        let delay_us = self.random.within(2, 12) * self.plan.election_us;
        self.after(delay_us, Event::PutCopy(victim, TRIES));
        true
    }

    fn lasts(&self, position: usize) -> Vec<u64> {
        let node = self.machines[position].node();
        let logs = 0..usize::from(self.plan.logs);
        logs.map(|log| node.map_or(0, |node| node.group(log).last_index()))
            .collect()
    }

    /// Whether the victim has acknowledged everything to a leader that goes on, and more than the
    /// copy has: the leader knows that it cannot hold less.
    fn must_be_noticed(&self, victim: usize, copy: &StorageCopy) -> bool {
        let id = self.machines[victim].id;
        let has_leader = self.machines.iter().any(|machine| {
            let Some(node) = machine.node().filter(|node| node.leads()) else {
                return false;
            };
            let acknowledged = |(log, last): (usize, &u64)| {
                let status = node.group(log).status();
                let peers = status.peers.iter();
                let peer = peers.clone().find(|peer| peer.id == id);
                let all_hear = peers.clone().all(|peer| peer.recent_active);
                all_hear
                    && peer.is_some_and(|peer| peer.matched == status.last && status.last > *last)
            };
            machine.paused_until_us <= self.now_us
                && copy.lasts.iter().enumerate().all(acknowledged)
        });
        has_leader && self.machines[victim].node().is_some() && self.may_replace_storage()
    }

    /// Puts an older copy of its storage in place of a machine's.
    pub(crate) fn put_copy(&mut self, victim: usize, tries: u32) -> Result<(), Broken> {
        let Some(copy) = self.copy.take().filter(|_| self.rough && tries > 0) else {
            return Ok(());
        };
        if !self.must_be_noticed(victim, &copy) {
            self.copy = Some(copy);
            let delay_us = self.random.within(1, 2) * self.plan.election_us;
            self.after(delay_us, Event::PutCopy(victim, tries - 1));
            return Ok(());
        }
        let id = self.machines[victim].id;
        trace!(self, "replica {id}'s storage is replaced by its copy");
        self.struck.note(Kind::OlderStorage);
        self.stop(victim, false);
        self.machines[victim].put_copy(&copy)?;
        self.checks.forget(id);
        // Only a leader that lives on can notice.
        let span_us = 4 * self.plan.election_us;
        self.calm_until_us = self.now_us + span_us;
        self.after(span_us, Event::CopyNoticed(victim));
        self.start(victim)
    }

    /// By now it must be known that the storage is an older copy.
    pub(crate) fn copy_noticed(&self, victim: usize) -> Result<(), Broken> {
        let machine = &self.machines[victim];
        match machine.standing.has_noticed() {
            true => Ok(()),
            false => Err(Broken(format!(
                "replica {} runs on an older copy of its storage, and this was not noticed",
                machine.id
            ))),
        }
    }
}

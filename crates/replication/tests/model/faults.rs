//! What the seeded hand does: crashes, deaths, partitions, pauses, fences; and checks in between.

use cyclone_pmem::Region;
use cyclone_replication::{backup, sender};

use super::World;

impl World {
    pub(super) fn disturb(&mut self) {
        match self.random.below(24) {
            0..3 => self.crash_backup(),
            3..5 => self.kill_backup(),
            5..8 => self.kill_server(),
            8..11 => self.cut_or_join(),
            11..14 => self.pause_backup(),
            14..17 => self.pause_sender(),
            17 => self.fence(),
            18..20 => self.check_one(),
            20 => {
                let place = self.any(self.keepers.len());
                self.check_what_a_crash_would_leave(place);
            }
            _ => self.revive(),
        }
    }

    fn crash_backup(&mut self) {
        let place = self.any(self.keepers.len());
        let name = self.keepers[place].name.clone();
        if self.keepers[place].backup.take().is_none() {
            return;
        }
        let seed = self.random.next();
        self.fabric.crash(&name, seed);
        self.after_death(place);
    }

    fn kill_backup(&mut self) {
        let place = self.any(self.keepers.len());
        if self.keepers[place].backup.take().is_none() {
            return;
        }
        self.fabric.kill_process(&self.keepers[place].name);
        self.after_death(place);
    }

    fn after_death(&mut self, place: usize) {
        self.keepers[place].used.clear();
        if self.keepers[place].paused {
            self.fabric.pause(&self.keepers[place].name, false);
            self.keepers[place].paused = false;
        }
        let memory = self.fabric.memory(&self.keepers[place].name);
        self.model.check(place as u32, &memory);
        self.model.restarted(place as u32);
    }

    pub(super) fn revive(&mut self) {
        for place in 0..self.keepers.len() {
            if self.keepers[place].backup.is_some() {
                continue;
            }
            let endpoint = self.fabric.restart(&self.keepers[place].name);
            let config = self.backup_config();
            let mut revived = backup(self.protocol, Box::new(endpoint), config).expect("restart");
            // Fences that went up meanwhile go up here before anybody is let in.
            for (server, term) in (0..).zip(self.terms.clone()) {
                revived.fence_off(server, term).expect("fence");
                let memory = self.fabric.memory(&self.keepers[place].name);
                self.model.fenced(place as u32, &memory, server, term);
            }
            self.model
                .check(place as u32, &self.fabric.memory(&self.keepers[place].name));
            self.keepers[place].backup = Some(revived);
        }
        for place in 0..self.workers.len() {
            if self.workers[place].sender.is_none() {
                self.restart_worker(place);
            }
        }
    }

    fn restart_worker(&mut self, place: usize) {
        let endpoint = self.fabric.restart(&self.workers[place].name());
        let term = self.term;
        self.workers[place].term = term;
        let config = self.sender_config(self.workers[place].id, term);
        let sender = sender(self.protocol, Box::new(endpoint), config).expect("a sender");
        self.workers[place].sender = Some(sender);
        self.workers[place].life = self.new_life();
    }

    /// The process of a server dies, with all its workers.
    fn kill_server(&mut self) {
        let server = self.any(self.terms.len()) as u32;
        self.end_server(server);
    }

    pub(super) fn end_server(&mut self, server: u32) {
        for worker in self.workers.iter_mut().filter(|w| w.id.server == server) {
            if worker.sender.take().is_none() {
                continue;
            }
            self.fabric.kill_process(&worker.name());
            if std::mem::take(&mut worker.paused) {
                self.fabric.pause(&worker.name(), false);
            }
            worker.open.fill(false);
            worker.opening.fill(false);
            worker
                .failed
                .extend(worker.in_flight.drain().map(|(_, id)| id));
        }
        self.shared.remove(&server);
    }

    fn cut_or_join(&mut self) {
        if let Some((a, b)) = self.cut.pop() {
            self.fabric.partition(&a, &b, false);
        }
        if self.random.one_in(2) {
            let worker = self.any(self.workers.len());
            let keeper = self.any(self.keepers.len());
            let pair = (
                self.workers[worker].name(),
                self.keepers[keeper].name.clone(),
            );
            self.fabric.partition(&pair.0, &pair.1, true);
            self.cut.push(pair);
        }
    }

    /// A paused sender may stand between getting an address and writing there.
    fn pause_sender(&mut self) {
        let place = self.any(self.workers.len());
        let worker = &mut self.workers[place];
        if worker.sender.is_some() {
            worker.paused = !worker.paused;
            self.fabric.pause(&worker.name(), worker.paused);
        }
    }

    fn pause_backup(&mut self) {
        let place = self.any(self.keepers.len());
        let keeper = &mut self.keepers[place];
        if keeper.backup.is_some() {
            keeper.paused = !keeper.paused;
            self.fabric.pause(&keeper.name, keeper.paused);
        }
    }

    /// A new configuration without a server that may be alive: its accesses end, others go on in
    /// the new term.
    fn fence(&mut self) {
        let fenced = self.any(self.terms.len()) as u32;
        self.term += 1;
        let term = self.term;
        for server in 0..self.terms.len() as u32 {
            self.terms[server as usize] = term;
            if server != fenced {
                self.end_server(server);
            }
        }
        for place in 0..self.keepers.len() {
            let keeper = &mut self.keepers[place];
            if keeper.paused {
                self.fabric.pause(&keeper.name, false);
                keeper.paused = false;
            }
            let Some(backup) = &mut keeper.backup else {
                continue;
            };
            backup.fence_off(fenced, term).expect("fence");
            let memory = self.fabric.memory(&keeper.name);
            for server in 0..self.terms.len() as u32 {
                self.model.fenced(place as u32, &memory, server, term);
            }
        }
    }

    fn check_one(&mut self) {
        let place = self.any(self.keepers.len());
        let memory = self.fabric.memory(&self.keepers[place].name);
        self.model.check(place as u32, &memory);
    }

    /// What was promised holds for every image that a power failure might leave now.
    pub(super) fn check_what_a_crash_would_leave(&mut self, place: usize) {
        let crash = self.fabric.crash_sim(&self.keepers[place].name);
        for _ in 0..2 {
            let image = crash.sampled(self.random.next());
            let region = Region::anonymous(image.len() as u64).expect("memory");
            let area = region
                .take(0, image.len() as u64)
                .expect("all of it")
                .share();
            area.write(0, &image);
            self.model.check(place as u32, &area);
        }
    }
}

//! The embedded store in the simulated world: one replica beside each manager, in simulated memory.

use cyclone_pmem::{CrashSim, Region};

use super::net::Packet;
use super::world::World;
use crate::manager::Event;
use crate::store::raft::{MIN_AREA_BYTES, RaftOptions, RaftStore};
use crate::store::{Key, Report, Request, Store};

pub(crate) struct Replica {
    pub store: Option<RaftStore>,
    pub memory: CrashSim,
    pub options: RaftOptions,
}

impl World {
    /// Embedded replicas instead of the ideal store.
    pub fn embed(&mut self) {
        let all: Vec<u64> = (1..=self.managers.len() as u64).collect();
        for id in &all {
            let options = RaftOptions {
                id: *id,
                replicas: all.clone(),
                tick_us: 1000,
                patience_us: 40_000,
                seed: self.random.draw(),
            };
            let (region, memory) = Region::simulated(MIN_AREA_BYTES).unwrap();
            let area = region.take(0, MIN_AREA_BYTES).unwrap();
            let store = Some(RaftStore::create(area, options.clone()).unwrap());
            self.replicas.push(Replica {
                store,
                memory,
                options,
            });
        }
    }

    pub fn crash_replica(&mut self, at: usize) {
        if let Some(replica) = self.replicas.get_mut(at) {
            replica.store = None;
        }
    }

    fn running(&self, at: usize) -> bool {
        let node = &self.managers[at];
        self.now_us >= node.down_until_us && self.now_us >= node.paused_until_us
    }

    pub fn replica_turn(&mut self, at: usize) {
        if self.replicas.is_empty() || !self.running(at) {
            return;
        }
        let replica = &mut self.replicas[at];
        if replica.store.is_none() {
            let image = replica.memory.sampled(self.random.draw());
            let (region, memory) = Region::from_image(&image).unwrap();
            let area = region.take(0, MIN_AREA_BYTES).unwrap();
            replica.store = Some(RaftStore::open(area, replica.options.clone()).unwrap());
            replica.memory = memory;
            self.count("replica reopened");
        }
        let mut reports = Vec::new();
        let local_us = self.managers[at].clock.read(self.now_us);
        if let Some(store) = &mut self.replicas[at].store {
            store.poll(local_us, &mut reports);
        }
        for report in reports {
            if let Report::Changed(Key::Configuration, record) = &report
                && record.revision > self.newest_stored
            {
                self.newest_stored = record.revision;
                self.stored(&record.value.clone());
            }
            self.manager_step(at, Event::Store(report));
        }
        self.send_raft(at);
    }

    fn send_raft(&mut self, at: usize) {
        let Some(store) = &mut self.replicas[at].store else {
            return;
        };
        let failed = store.has_failed();
        let messages: Vec<(u64, Vec<u8>)> = store.take_messages().collect();
        self.break_if(failed, || format!("replica {at} has failed"));
        for (to, bytes) in messages {
            let to = to as usize - 1;
            self.net
                .put(&mut self.random, self.now_us, Packet::Raft { to, bytes });
        }
    }

    pub fn deliver_raft(&mut self, to: usize, bytes: &[u8]) {
        if self.running(to) {
            if let Some(store) = &mut self.replicas[to].store {
                store.receive(bytes);
            }
            self.send_raft(to);
        }
    }

    pub fn ask_replica(&mut self, from: (usize, u64), ticket: u64, request: Request) {
        let at = from.0;
        let node = &self.managers[at];
        if node.process.as_ref().is_none_or(|p| p.number != from.1) {
            return;
        }
        if node.paused_until_us > self.now_us {
            // Manager and replica are one process.
            let packet = Packet::Ask {
                from,
                ticket,
                request,
            };
            return self.net.put_at(node.paused_until_us, packet);
        }
        let local_us = self.managers[at].clock.read(self.now_us);
        let taken = self.replicas[at]
            .store
            .as_mut()
            .map(|store| store.submit(local_us, ticket, request));
        if !matches!(taken, Some(Ok(()))) {
            self.manager_step(at, Event::StoreRefused(ticket));
        }
        self.send_raft(at);
    }
}

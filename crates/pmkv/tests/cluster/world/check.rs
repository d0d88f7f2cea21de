//! What must hold when everything has come to rest.

use std::sync::Arc;

use cyclone_pmkv::{KeyHash, ServerId};

use super::World;

impl World {
    /// Everything that was acknowledged is there, at every replica alike, and batches are whole.
    pub fn check(&mut self) {
        self.settle();
        let (seed, configuration) = (self.seed, self.configuration.clone());
        for id in self.live() {
            let kept = self.node(id).control().stats().kept;
            let damaged = self.node(id).store().damaged();
            assert_eq!((kept, damaged), (0, 0), "seed {seed}: nothing is damaged");
        }
        for key in self.model.keys() {
            let value = self.node(self.primary_of(&key)).store().get(&key);
            self.clock += 2;
            let now = self.clock;
            self.model
                .check_read(seed, &key, value.as_deref(), now - 1, now);
        }
        for key in self.model.counters() {
            let value = self.node(self.primary_of(&key)).store().get(&key);
            let text = value.map_or("0".to_owned(), |it| String::from_utf8(it).expect("digits"));
            let number = text.parse().expect("a number");
            self.model.check_counter(seed, &key, number);
        }
        for tag in 0..8 {
            let of = |n| format!("{{{tag}}}{n}").into_bytes();
            let store = Arc::clone(self.node(self.primary_of(&of(0))).store());
            let values: Vec<_> = (0..3).map(|n| store.get(&of(n))).collect();
            assert!(
                values[0] == values[1] && values[1] == values[2],
                "seed {seed}: a batch is torn: {values:?}"
            );
        }
        let mut keys = self.model.keys();
        keys.extend(self.model.counters());
        self.wait_for_digests();
        for key in keys {
            let shard = configuration.shard_of_slot(KeyHash::of(&key).slot);
            let placement = &configuration.shards[usize::from(shard)];
            let value = self.node(placement.primary).store().get(&key);
            for &backup in &placement.backups {
                let there = self.replica_value(backup, &key);
                assert_eq!(
                    there,
                    value,
                    "seed {seed}: {} at {backup} and at {}",
                    key.escape_ascii(),
                    placement.primary
                );
            }
        }
    }

    fn wait_for_digests(&mut self) {
        for _ in 0..50 {
            for id in self.live() {
                self.step(id);
            }
            self.fabric.run_for(100_000);
        }
    }

    /// What a replica would have if it were promoted: its index, and what is in its log and not
    /// digested yet.
    fn replica_value(&mut self, id: ServerId, key: &[u8]) -> Option<Vec<u8>> {
        self.node(id).control().newest_value(key)
    }
}

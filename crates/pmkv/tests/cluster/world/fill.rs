//! Filling memories, and emptying them.

use cyclone_wire::command::Operation;

use super::{Asked, World};

fn numbered(n: usize) -> Vec<u8> {
    format!("filler {n}").into_bytes()
}

impl World {
    /// Writes new keys until values are refused for good; answers how many were tried.
    pub fn fill(&mut self) -> usize {
        let mut n = 0;
        loop {
            let before = self.full;
            for _ in 0..10 {
                self.write_filler(n);
                n += 1;
            }
            self.settle();
            if self.full - before == 10 {
                return n;
            }
            assert!(n < 5_000, "seed {}: it never gets full", self.seed);
        }
    }

    fn write_filler(&mut self, n: usize) {
        let key = numbered(n);
        let mut value = self.value();
        value.resize(600, b'+');
        self.clock += 1;
        let id = self.primary_of(&key);
        self.ask_set(id, &key, &value, self.clock);
    }

    /// Writes more at once than a log has segments for, while the control threads do nothing.
    pub fn burst(&mut self, count: usize) {
        for n in 0..count {
            self.write_filler(n);
        }
        for _ in 0..100 {
            for id in self.live() {
                let now_us = self.now_us();
                self.node(id).step(now_us);
            }
            self.fabric.advance();
        }
    }

    /// Deletes what [`World::fill`] has written: none may be refused for want of memory.
    pub fn delete(&mut self, numbers: std::ops::Range<usize>) {
        let before = self.full;
        for n in numbers {
            let key = numbered(n);
            self.clock += 1;
            let number = self.model.begin(&key, None, self.clock);
            let asked = Asked::Write {
                key: key.clone(),
                number,
            };
            self.submit(
                self.primary_of(&key),
                asked,
                &[Operation::Del { keys: vec![&key] }],
            );
            if n % 10 == 9 {
                self.settle();
            }
        }
        assert_eq!(
            self.full, before,
            "seed {}: a deletion was refused",
            self.seed
        );
    }
}

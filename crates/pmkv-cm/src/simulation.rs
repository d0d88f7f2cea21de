//! Whole clusters in one thread: managers over a store, servers with the smallest engine that can
//! lose a write, a network that loses, delays and reorders, clocks that drift, processes that
//! pause, crash and return. Everything follows from the seed. What must hold is checked at every
//! step (`checks.rs`).

use cyclone_test_support::Random;

mod checks;
mod engine;
mod faults;
mod net;
mod replicas;
mod scenarios;
mod stories;
mod world;

/// A machine's clock: some offset, and a rate off by up to the drift.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    pub offset_us: u64,
    pub off_ppm: i64,
}

impl Clock {
    pub fn new(random: &mut Random, drift_ppm: u32) -> Clock {
        let drift = i64::from(drift_ppm);
        // Most at an end of what is allowed.
        let off_ppm = match random.below(3) {
            0 => drift,
            1 => -drift,
            _ => random.below(2 * drift as u64) as i64 - drift,
        };
        Clock {
            offset_us: random.below(1 << 40),
            off_ppm,
        }
    }

    pub fn read(&self, now_us: u64) -> u64 {
        let now = i128::from(now_us);
        (i128::from(self.offset_us) + now + now * i128::from(self.off_ppm) / 1_000_000) as u64
    }
}

//! Whole clusters in one thread: managers over a store, servers with the smallest engine that can
//! lose a write, a network that loses, delays and reorders, clocks that drift, processes that
//! pause, crash and return. Everything follows from the seed. What must hold is checked at every
//! step (`checks.rs`).

mod checks;
mod engine;
mod faults;
mod net;
mod replicas;
mod scenarios;
mod stories;
mod world;

/// A small generator: runs are repeated from the seed.
#[derive(Clone, Debug)]
pub(crate) struct Dice(pub u64);

impl Dice {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n.max(1)
    }

    /// Once in `n` times.
    pub fn once_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

/// A machine's clock: some offset, and a rate off by up to the drift.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    pub offset_us: u64,
    pub off_ppm: i64,
}

impl Clock {
    pub fn new(dice: &mut Dice, drift_ppm: u32) -> Clock {
        let drift = i64::from(drift_ppm);
        // Most at an end of what is allowed.
        let off_ppm = match dice.below(3) {
            0 => drift,
            1 => -drift,
            _ => dice.below(2 * drift as u64) as i64 - drift,
        };
        Clock {
            offset_us: dice.below(1 << 40),
            off_ppm,
        }
    }

    pub fn read(&self, now_us: u64) -> u64 {
        let now = i128::from(now_us);
        (i128::from(self.offset_us) + now + now * i128::from(self.off_ppm) / 1_000_000) as u64
    }
}

//! How much load, for how long.

use std::time::Duration;

use cyclone_bench::output::Common;

/// Load as percentages of the greatest throughput seen.
const LEVELS: &[u64] = &[50, 80, 100, 150, 200, 300];
const QUICK_LEVELS: &[u64] = &[80, 300];
/// Overload and saturation take turns of the same length, so many for each level: a store's own
/// work (flushes, compactions) comes and goes, and is to be in both alike.
const TURN: Duration = Duration::from_secs(2);
const TURNS: u32 = 8;
const QUICK_TURN: Duration = Duration::from_secs(1);
const QUICK_TURNS: u32 = 4;
/// In the minutes at the end.
const LONGEST_TURN: Duration = Duration::from_secs(30);

/// What the command line says.
#[derive(Clone, Debug)]
pub struct Arguments {
    /// Shared options.
    pub common: Common,
    /// `rocksdb`, `memory` or `echo`.
    pub engine: String,
    /// Minutes at the highest level at the end, in turn with as many at saturation; 0 for none.
    pub minutes: u64,
    /// Shortest silence before an election, ms; the default if not given. Where others use the
    /// machine too, its scheduler alone is silent for longer than that.
    pub election_ms: Option<u64>,
    /// Physical logs.
    pub logs: u16,
    /// Threads of each node that run a loop for each log; 0: one loop for all.
    pub log_threads: u16,
}

impl Arguments {
    pub(super) fn levels(&self) -> &'static [u64] {
        match self.common.quick {
            true => QUICK_LEVELS,
            false => LEVELS,
        }
    }

    /// How long turns at a level past saturation are, and how many.
    pub(super) fn turns(&self) -> (Duration, u32) {
        match self.common.quick {
            true => (QUICK_TURN, QUICK_TURNS),
            false => (TURN, TURNS),
        }
    }

    /// Turns in the minutes at the end.
    pub(super) fn long_turns(&self) -> u32 {
        let minutes = Duration::from_secs(60 * self.minutes);
        minutes.div_duration_f64(LONGEST_TURN).ceil() as u32
    }

    /// Times of load for each kind of clients: warming up, saturation, each level below, and two
    /// for each turn.
    pub(super) fn loads(&self) -> usize {
        let beyond = self.levels().iter().filter(|level| **level > 100).count();
        let below = self.levels().len() - beyond;
        let turns = beyond * self.turns().1 as usize + self.long_turns() as usize;
        2 + below + 2 * turns
    }
}

//! The steady clock as the replica sees it.

use cyclone_wire::planted::{self, Bug};

/// Follows the machine's steady clock; when that is caught going back, time goes on from where it
/// was. Were it to stand still instead until the clock has come back, heartbeats, elections and
/// repetitions would stand still with it.
#[derive(Clone, Debug, Default)]
pub(crate) struct MonotonicClock {
    seen_us: u64,
    /// How far the machine's clock has gone back in all.
    back_us: u64,
}

impl MonotonicClock {
    /// What the replica takes for the time when the machine's clock shows `machine_us`.
    pub(crate) fn read(&mut self, machine_us: u64) -> u64 {
        if planted::has(Bug::ClockTrusted) {
            return machine_us;
        }
        self.back_us = self.back_us.max(self.seen_us.saturating_sub(machine_us));
        self.seen_us = machine_us.saturating_add(self.back_us);
        self.seen_us
    }

    /// Takes in what another reader of the same clock has seen.
    pub(crate) fn learn(&mut self, other: &MonotonicClock) {
        self.back_us = self.back_us.max(other.back_us);
        self.seen_us = self.seen_us.max(other.seen_us);
    }

    /// Whether the clock was caught going back.
    pub(crate) fn has_stepped_back_since(&self, before: &MonotonicClock) -> bool {
        self.back_us > before.back_us
    }

    /// What the machine's clock shows when the replica takes the time for `steady_us`.
    pub(crate) fn machine_us(&self, steady_us: u64) -> u64 {
        steady_us.saturating_sub(self.back_us)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_goes_back_is_caught_by_the_next_reader() {
        let mut home = MonotonicClock::default();
        home.read(900);
        let mut other = home.clone();
        other.read(1000);
        home.learn(&other);
        // Later than its own last reading, and earlier than the other's.
        let before = home.clone();
        assert_eq!(home.read(950), 1000);
        assert!(home.has_stepped_back_since(&before));
        let before = home.clone();
        assert_eq!(home.read(951), 1001);
        assert!(!home.has_stepped_back_since(&before));
    }

    #[test]
    fn time_goes_on_when_the_clock_goes_back() {
        let mut steady = MonotonicClock::default();
        let shown = [100, 150, 40, 50, 45, 200].map(|machine_us| steady.read(machine_us));
        assert_eq!(shown, [100, 150, 150, 160, 160, 315]);
        assert_eq!(steady.machine_us(315), 200);
        assert_eq!(steady.machine_us(7), 0);
    }
}

//! The logs' time: it passes in ticks, half a heartbeat each. A replica that is busy wakes up for every one of them. One that is not skips those
//! at which nothing can happen, and lets them pass together when it wakes up, for a heartbeat of its own or its leader's mostly.

use std::time::Duration;

use crate::node::Node;

/// Ticks that a pause of the whole process counts as, at most: one heartbeat's time.
pub(crate) const PAUSE_TICKS: u64 = 2;
/// Ticks without work for a client after which a replica has nothing to do.
const QUIET_TICKS: u64 = 10;
/// The same, after which heartbeats may come further apart: half a second by default.
const REST_TICKS: u64 = 100;
/// Most ticks that pass together besides those of a rest: a heartbeat of the leader comes every second one, and somewhat late.
const TOGETHER: u64 = 3;

/// When ticks come.
pub(crate) struct Ticking {
    tick_us: u64,
    /// Of the first one that has not passed; 0 before the first step.
    next_us: u64,
    /// How many will pass together, from the next on.
    together: u64,
}

impl Ticking {
    pub(crate) fn new(tick_us: u64) -> Ticking {
        Ticking {
            tick_us,
            next_us: 0,
            together: 1,
        }
    }

    /// When the loop has to wake up.
    pub(crate) fn deadline_us(&self) -> u64 {
        self.next_us + (self.together - 1) * self.tick_us
    }

    /// Ticks that have passed, and those among them that were missed; none before the next one is due.
    fn pass(&mut self, now_us: u64) -> Option<(u64, u64)> {
        if self.next_us == 0 {
            self.next_us = now_us + self.tick_us;
        }
        if now_us < self.next_us {
            return None;
        }
        let passed = 1 + (now_us - self.next_us) / self.tick_us;
        self.next_us = now_us + self.tick_us;
        Some((passed, passed.saturating_sub(self.together)))
    }
}

impl Node {
    /// Longest time from one step to the next unless the machine keeps the loop waiting, while there is work.
    pub(crate) fn patience(&self) -> Duration {
        Duration::from_micros(2 * self.ticking.tick_us)
    }

    /// Length of a tick, in microseconds.
    pub(crate) fn tick_us(&self) -> u64 {
        self.ticking.tick_us
    }

    /// Lets time pass for the logs.
    pub(crate) fn tick(&mut self) {
        let Some((passed, missed)) = self.ticking.pass(self.now.steady_us) else {
            return;
        };
        let gap_us = missed * self.ticking.tick_us;
        self.counters.longest_gap_us = self.counters.longest_gap_us.max(gap_us);
        if self.membership.is_removed(self.config.id) {
            // Nobody waits for its vote any more, and it is to ask for none. It may have heard of it while it led: what it was asked
            // for is answered as at any deposed leader.
            self.logs.iter_mut().for_each(|log| log.group.retire());
            return;
        }
        // A pause of the whole process is no evidence against the leader: it counts as one heartbeat's time at most.
        let ticks = passed.min(passed - missed + PAUSE_TICKS - 1);
        for log in &mut self.logs {
            let of_log = match log.group.has_heard() {
                // All but the last two lie before what it heard.
                true => ticks.min(PAUSE_TICKS),
                false => ticks,
            };
            log.group.tick(of_log as u32);
        }
        self.gather(ticks as u32);
    }

    /// Decides which ticks nobody has to wake up for.
    pub(crate) fn skip_ticks(&mut self) {
        let quiet_us = self.now.steady_us.saturating_sub(self.active_us);
        if self.config.log_threads > 0 {
            // A log's own loop does not say when it had work.
            return;
        }
        let is_long = quiet_us >= REST_TICKS * self.ticking.tick_us;
        let idle = self.logs.iter_mut().map(|log| {
            log.group.set_quiet(is_long);
            let most = TOGETHER + log.group.rest_left();
            log.group.idle_ticks().min(most)
        });
        let together = idle.min().unwrap_or(1);
        let is_quiet = quiet_us >= QUIET_TICKS * self.ticking.tick_us;
        self.ticking.together = if is_quiet { together } else { 1 };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_come_one_by_one_or_together_and_what_is_late_was_missed() {
        let mut ticking = Ticking::new(5);
        assert_eq!(ticking.pass(100), None);
        assert_eq!(ticking.deadline_us(), 105);
        assert_eq!(ticking.pass(104), None);
        assert_eq!(ticking.pass(105), Some((1, 0)));
        assert_eq!(ticking.pass(121), Some((3, 2)), "due at 110, 115, 120");
        ticking.together = 3;
        assert_eq!(ticking.deadline_us(), 136);
        assert_eq!(ticking.pass(132), Some((2, 0)), "a message woke it");
        assert_eq!(ticking.pass(147), Some((3, 0)));
        assert_eq!(ticking.pass(172), Some((5, 2)), "due at 162 at the latest");
    }
}

//! The logs' time: it passes in ticks, half a heartbeat each. A replica that is busy wakes up for
//! every one of them. One that is not skips those at which nothing can happen, and lets them pass
//! together when it wakes up, for its own heartbeat or its leader's mostly.

use std::time::Duration;

use crate::node::Node;

/// Ticks that a pause of the whole process counts as, at most: one heartbeat's time.
pub(crate) const PAUSE_TICKS: u64 = 2;
/// Ticks without work for a client after which a replica has nothing to do.
const QUIET_TICKS: u64 = 10;
/// The same, after which heartbeats may come further apart: half a second by default.
const REST_TICKS: u64 = 100;
/// How long packets may wait then where a driver's device wakes no thread. With the default
/// time-outs one heartbeat may be lost and the next so much late.
const REST_LOOK_TICKS: u64 = 4;
/// Most ticks that pass together besides those of a rest: a heartbeat of the leader comes every
/// second one, and somewhat late.
const TOGETHER: u64 = 3;

/// When ticks come.
pub(crate) struct TickTimer {
    tick_us: u64,
    /// Of the first one that has not passed; 0 before the first step.
    next_us: u64,
    /// How many will pass together, from the next on.
    together: u64,
}

impl TickTimer {
    pub(crate) fn new(tick_us: u64) -> TickTimer {
        TickTimer {
            tick_us,
            next_us: 0,
            together: 1,
        }
    }

    /// When the loop has to wake up.
    pub(crate) fn deadline_us(&self) -> u64 {
        self.next_us + (self.together - 1) * self.tick_us
    }

    /// Whether no loop wakes up for the next tick.
    pub(crate) fn skips(&self) -> bool {
        self.together > 1
    }

    /// Ticks that have passed, and those among them that were missed; none before the next one is
    /// due.
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

/// A pause of the whole process is no evidence against the leader: it counts as one heartbeat's
/// time at most.
fn noticed(passed: u64, missed: u64) -> u64 {
    passed.min(passed - missed + PAUSE_TICKS - 1)
}

/// What of the ticks that have passed counts for a log. `is_fresh`: its leader was heard in this
/// step, `has_leader_contact`: and nothing has been counted since.
fn counted(ticks: u64, is_fresh: bool, has_leader_contact: bool) -> u64 {
    match (is_fresh, has_leader_contact) {
        // The step's time was read before: all of them lie before what it heard. How long before is
        // unknown, so that the next pass may begin before it too.
        (true, true) => 0,
        // All but the last two lie before what it heard.
        (false, true) => ticks.min(PAUSE_TICKS),
        (_, false) => ticks,
    }
}

impl Node {
    /// Longest time from one step to the next unless the machine keeps the loop waiting, while
    /// there is work.
    pub(crate) fn patience(&self) -> Duration {
        Duration::from_micros(2 * self.ticking.tick_us)
    }

    /// Lets time pass for the logs.
    pub(crate) fn tick(&mut self) {
        let passes = self.ticking.pass(self.now.steady_us);
        if passes.is_none() {
            self.logs.iter_mut().for_each(|log| {
                log.group.take_leader_contact();
            });
        }
        let Some((passed, missed)) = passes else {
            return;
        };
        let gap_us = missed * self.ticking.tick_us;
        self.counters.longest_gap_us = self.counters.longest_gap_us.max(gap_us);
        if self.membership.is_removed(self.config.id) {
            // No replica waits for its vote any more, and it is to ask for none. It may have heard
            // of it while it led: what it was asked for is answered as at any deposed leader.
            self.logs.iter_mut().for_each(|log| log.group.retire());
            return;
        }
        let ticks = noticed(passed, missed);
        for log in &mut self.logs {
            let is_fresh = log.group.take_leader_contact();
            let of_log = counted(ticks, is_fresh, log.group.has_leader_contact());
            log.group.tick(of_log as u32);
        }
        self.colocate_leaders(ticks as u32);
    }

    /// When a client last had work for this loop or for one of its logs' own.
    fn any_active_us(&self) -> u64 {
        self.active_us.max(self.loaned_logs.active_us)
    }

    /// The same by the machine's clock, for the watchdog: this loop waits for all logs, and sends
    /// the heartbeats of all.
    pub(crate) fn watched_for_us(&self) -> u64 {
        self.steady.machine_us(self.any_active_us())
    }

    /// Decides which ticks the loop need not wake up for.
    pub(crate) fn skip_ticks(&mut self) {
        let quiet_us = self.now.steady_us.saturating_sub(self.any_active_us());
        let is_long = quiet_us >= REST_TICKS * self.ticking.tick_us;
        let idle = self.logs.iter_mut().map(|log| {
            log.group.set_idle(is_long);
            let most = TOGETHER + log.group.quiesced_ticks_left();
            log.group.idle_ticks().min(most)
        });
        let together = idle.min().unwrap_or(1);
        let rests = is_long && self.logs.iter().all(|log| log.group.is_resting());
        let look_us = rests.then_some(REST_LOOK_TICKS * self.ticking.tick_us);
        self.port.set_idle_poll_interval(look_us);
        let is_quiet = quiet_us >= QUIET_TICKS * self.ticking.tick_us;
        self.ticking.together = if is_quiet { together } else { 1 };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A follower's loop that is held up anywhere, between reading the time and reading its
    /// messages above all.
    #[test]
    fn of_the_time_before_a_message_no_more_counts_than_a_lease_allows_for() {
        const TICK: u64 = 5_000;
        for seed in 0..2_000 {
            let mut state = seed;
            let mut draw = |below: u64| {
                state = u64::wrapping_add(state, 0x9e37_79b9_7f4a_7c15);
                let mixed = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                (mixed ^ mixed >> 27) % below
            };
            let mut ticking = TickTimer::new(TICK);
            let (mut now, mut heard_at, mut elapsed) = (1_000_000, 1_000_000, 0);
            let mut next_message = now + draw(40_000);
            for _ in 0..400 {
                let held_up = [0, 0, 0, draw(3_000), draw(60_000)][draw(5) as usize];
                let received = now + held_up;
                let is_fresh = next_message <= received;
                while next_message <= received {
                    (heard_at, elapsed) = (next_message, 0);
                    next_message += 1 + draw(40_000);
                }
                let has_leader_contact = elapsed == 0;
                if let Some((passed, missed)) = ticking.pass(now) {
                    elapsed += counted(noticed(passed, missed), is_fresh, has_leader_contact);
                }
                ticking.together = 1 + draw(4);
                let allowed = received - heard_at + crate::lease::LOST_TICKS * TICK;
                assert!(
                    elapsed * TICK <= allowed,
                    "seed {seed}: {elapsed} ticks {} us after it was heard",
                    received - heard_at
                );
                now = received + 1 + [draw(200), draw(TICK), draw(2 * TICK)][draw(3) as usize];
            }
        }
    }

    #[test]
    fn ticks_come_one_by_one_or_together_and_what_is_late_was_missed() {
        let mut ticking = TickTimer::new(5);
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

//! The time of a log: what its leader stamps entries with, and by which keys expire for reads
//! (docs/adr/0079). It owns what the voters report of their wall clocks, and knows neither Raft nor
//! the store.
//!
//! Every clock is kept as an offset: what it showed less what this replica's steady clock showed
//! then, in microseconds. So a report advances with the steady clock. From the voters' offsets
//! follow
//!
//! | | |
//! |---|---|
//! | `least` | the latest time that a majority of the voters' clocks have reached |
//! | `most` | the earliest time that a majority of the voters' clocks have not passed |
//! | `agreed` | this machine's wall clock where it differs from `least` by at most [`AGREE_US`], otherwise `least` |
//! | `steady` | the log's time before, and the steady clock's advance since, as long as that is not beyond `most`; half of the advance beyond |
//!
//! and the log's time is the later one of `agreed` and `steady`. A clock that is ahead of a
//! majority moves it by nothing beyond its steady advance; one that is behind cannot stop it; and
//! it jumps to the true time when a majority shows that.

use cyclone_wire::planted::planted;
use cyclone_wire::raftmsg::Members;

use crate::node::Now;

/// Wall clocks that differ by at most this agree: they are set by NTP, and reports take time to
/// arrive.
pub(crate) const AGREE_US: i64 = 1_000_000;
/// How often the voters' clocks are compared anew.
const COMPARE_US: u64 = 20_000;
/// A report counts for so long.
const REPORT_VALID_US: u64 = 60_000_000;

/// A wall clock of another replica.
#[derive(Clone, Copy, Debug)]
struct Report {
    id: u64,
    offset_us: i64,
    at_us: u64,
    /// Came in this step, whose clock may have been read long before.
    is_fresh: bool,
}

/// What a majority of the voters' clocks say, as offsets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Majority {
    min_us: i64,
    max_us: i64,
}

/// The time of one log. Call [`LogClock::begin_step`] at the beginning of each step of its mover,
/// and
/// [`LogClock::time_ms`] afterwards.
#[derive(Debug)]
pub(crate) struct LogClock {
    own: u64,
    now: Now,
    reports: Vec<Report>,
    has_fresh: bool,
    majority: Option<Majority>,
    compare_at_us: u64,
    /// The term in which this replica leads the log; 0: it does not.
    term: u64,
    /// The log's time, µs since 1970, and when it was that by the steady clock. Known once
    /// everything from before the leader's term has been applied.
    anchor: Option<(u64, u64)>,
    /// The time of this step.
    time_ms: u64,
    /// Follower: what the leader says that a majority agrees on, as an offset, and when.
    reported_majority: Option<Report>,
}

fn offset_us(wall_ms: u64, steady_us: u64) -> i64 {
    (wall_ms.saturating_mul(1_000) as i64).saturating_sub(steady_us as i64)
}

/// The time at which a clock with this offset shows it, µs since 1970.
fn clock_time_us(offset_us: i64, steady_us: u64) -> u64 {
    (steady_us as i64).saturating_add(offset_us).max(0) as u64
}

impl LogClock {
    /// Of a replica with this id.
    pub(crate) fn new(own: u64) -> LogClock {
        LogClock {
            own,
            now: Now {
                steady_us: 0,
                wall_ms: 0,
            },
            reports: Vec::new(),
            has_fresh: false,
            majority: None,
            compare_at_us: 0,
            term: 0,
            anchor: None,
            time_ms: 0,
            reported_majority: None,
        }
    }

    /// Takes in the clocks of a step. `term`: the one in which this replica leads, 0 if it does
    /// not.
    pub(crate) fn begin_step(&mut self, now: Now, term: u64, members: impl FnOnce() -> Members) {
        if std::mem::take(&mut self.has_fresh) {
            self.settle_reports(now.steady_us);
        }
        self.now = now;
        self.lead(term, members);
        self.time_ms = self.read() / 1_000;
    }

    /// What came in the last step came before this one's clock was read, and perhaps right before:
    /// it must not count as older, or a pause in between would put the other clocks ahead.
    fn settle_reports(&mut self, steady_us: u64) {
        let gap_us = steady_us.saturating_sub(self.now.steady_us) as i64;
        for report in &mut self.reports {
            if std::mem::take(&mut report.is_fresh) {
                report.offset_us -= gap_us;
            }
        }
        if let Some(report) = &mut self.reported_majority
            && std::mem::take(&mut report.is_fresh)
        {
            report.offset_us -= gap_us;
        }
    }

    /// Takes in whether this replica leads, and compares the clocks where that is due.
    fn lead(&mut self, term: u64, members: impl FnOnce() -> Members) {
        let is_new = term != self.term;
        if is_new {
            (self.term, self.anchor) = (term, None);
        }
        if is_new || self.now.steady_us >= self.compare_at_us {
            self.compare_at_us = self.now.steady_us + COMPARE_US;
            if self.anchor.is_some() {
                // What it has become by the old comparison stands.
                self.anchor = Some((self.read(), self.now.steady_us));
            }
            self.majority = match term {
                0 => None,
                _ => self.compare(&members()),
            };
        }
    }

    /// Whether the log's time must begin at the state's clock: what was in the log before this
    /// replica's term is applied now.
    pub(crate) fn wants_state(&self, applied_term: u64) -> bool {
        self.anchor.is_none() && self.term != 0 && self.term == applied_term
    }

    /// Lets the log's time go on from the state's clock.
    pub(crate) fn follow_state(&mut self, clock_ms: u64) {
        let from_us = clock_ms.saturating_mul(1_000).max(self.read());
        self.anchor = Some((from_us, self.now.steady_us));
        self.time_ms = from_us / 1_000;
    }

    /// An entry that concerns other logs too, whose time is later, moves this one's.
    pub(crate) fn advance_to_ms(&mut self, time_ms: u64) {
        if self.anchor.is_some() && time_ms > self.time_ms {
            self.set_ms(time_ms);
        }
    }

    /// The log's time goes on from here, also back: an entry says so.
    pub(crate) fn set_ms(&mut self, time_ms: u64) {
        self.anchor = Some((time_ms.saturating_mul(1_000), self.now.steady_us));
        self.time_ms = time_ms;
    }

    /// The log's time, in milliseconds since 1970. `term` as in [`LogClock::begin_step`]: an
    /// election may have been won in this step.
    pub(crate) fn time_ms(&mut self, term: u64, members: impl FnOnce() -> Members) -> u64 {
        if term != self.term {
            self.lead(term, members);
            self.time_ms = self.read() / 1_000;
        }
        self.time_ms
    }

    fn read(&mut self) -> u64 {
        let own_us = self.now.wall_ms.saturating_mul(1_000);
        if self.term == 0 || planted!(OwnClockStamped) {
            return own_us;
        }
        let now_us = self.now.steady_us;
        let led = self.anchor.map(|(from_us, at_us)| {
            let passed_us = now_us.saturating_sub(at_us);
            (from_us + passed_us, from_us + passed_us / 2)
        });
        let Some(majority) = self.majority else {
            return led.map_or(own_us, |(max_us, min_us)| own_us.min(max_us).max(min_us));
        };
        let min_us = clock_time_us(majority.min_us, now_us);
        let agreed_us = match own_us.abs_diff(min_us) <= AGREE_US.unsigned_abs() {
            true => own_us,
            false if planted!(ClockHeldBack) => own_us.min(min_us),
            false => min_us,
        };
        let Some((max_us, slow_us)) = led else {
            return agreed_us;
        };
        planted!(ClockNeverJumps => return agreed_us.min(max_us).max(slow_us));
        let led_us = max_us
            .min(clock_time_us(majority.max_us, now_us))
            .max(slow_us);
        planted!(ClockHeldBack => return agreed_us);
        if agreed_us > led_us {
            self.anchor = Some((agreed_us, now_us));
        }
        agreed_us.max(led_us)
    }

    /// Compares the voters' clocks.
    fn compare(&mut self, members: &Members) -> Option<Majority> {
        let now_us = self.now.steady_us;
        let own_us = offset_us(self.now.wall_ms, now_us);
        let is_valid = |report: &Report| now_us.saturating_sub(report.at_us) < REPORT_VALID_US;
        self.reports.retain(is_valid);
        let of = |voters: &[u64]| {
            let known = voters.iter().filter_map(|id| match *id == self.own {
                true => Some(own_us),
                false => {
                    let mut reports = self.reports.iter();
                    let report = reports.find(|report| report.id == *id);
                    report.map(|report| report.offset_us)
                }
            });
            let mut known: Vec<i64> = known.collect();
            known.sort_unstable();
            let majority = voters.len() / 2 + 1;
            let min_us = *known.get(known.len().checked_sub(majority)?)?;
            let max_us = *known.get(majority - 1)?;
            Some(Majority { min_us, max_us })
        };
        let now = of(&members.voters)?;
        if members.voters_outgoing.is_empty() {
            return Some(now);
        }
        let before = of(&members.voters_outgoing)?;
        Some(Majority {
            min_us: now.min_us.min(before.min_us),
            max_us: now.max_us.max(before.max_us),
        })
    }

    /// Takes in another replica's wall clock.
    pub(crate) fn note_report(&mut self, id: u64, wall_ms: u64) {
        let at_us = self.now.steady_us;
        let report = Report {
            id,
            offset_us: offset_us(wall_ms, at_us),
            at_us,
            is_fresh: true,
        };
        self.has_fresh = true;
        match self.reports.iter_mut().find(|known| known.id == id) {
            Some(known) => *known = report,
            None => self.reports.push(report),
        }
    }

    /// Takes in what the leader says that a majority agrees on.
    pub(crate) fn note_majority(&mut self, leader: u64, wall_ms: u64) {
        let at_us = self.now.steady_us;
        self.has_fresh = true;
        self.reported_majority = Some(Report {
            id: leader,
            offset_us: offset_us(wall_ms, at_us),
            at_us,
            is_fresh: true,
        });
    }

    /// The time of the last step.
    pub(crate) fn last_ms(&self) -> u64 {
        self.time_ms
    }

    /// Leader: the time that a majority of the voters' clocks agree on, in milliseconds since 1970.
    pub(crate) fn agreed_ms(&self) -> Option<u64> {
        let majority = self.majority?;
        Some(clock_time_us(majority.min_us, self.now.steady_us) / 1_000)
    }

    /// This machine's wall clock less the time that a majority of the voters' clocks agree on, in
    /// milliseconds; `None`: that is not known at present.
    pub(crate) fn offset_ms(&self) -> Option<i64> {
        let now_us = self.now.steady_us;
        let own_us = offset_us(self.now.wall_ms, now_us);
        let majority_us = match self.term {
            0 => {
                let report = self.reported_majority?;
                let is_valid = now_us.saturating_sub(report.at_us) < REPORT_VALID_US;
                is_valid.then_some(report.offset_us)?
            }
            _ => self.majority?.min_us,
        };
        Some(own_us.saturating_sub(majority_us) / 1_000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRUE_MS: u64 = 1_700_000_000_000;
    const DAY_MS: u64 = 86_400_000;

    /// Reports are a millisecond old.
    #[track_caller]
    fn assert_near(off_ms: i64, wanted_ms: i64) {
        assert!((off_ms - wanted_ms).abs() <= 1, "{off_ms}, not {wanted_ms}");
    }

    /// A leader of three voters, with what their wall clocks are off by, in milliseconds.
    struct Cluster {
        clock: LogClock,
        steady_us: u64,
        off_ms: [i64; 3],
        /// Who reports.
        up: [bool; 3],
    }

    impl Cluster {
        fn new(off_ms: [i64; 3]) -> Cluster {
            Cluster {
                clock: LogClock::new(1),
                steady_us: 5_000_000,
                off_ms,
                up: [true; 3],
            }
        }

        fn true_ms(&self) -> u64 {
            TRUE_MS + self.steady_us / 1_000
        }

        /// Lets time pass, with reports and steps; answers the log's time less the true one.
        fn pass(&mut self, ms: u64) -> i64 {
            for _ in 0..ms {
                self.steady_us += 1_000;
                let shown = |of: i64| self.true_ms().saturating_add_signed(of);
                let now = Now {
                    steady_us: self.steady_us,
                    wall_ms: shown(self.off_ms[0]),
                };
                let members = || Members::of_voters(&[1, 2, 3]);
                let reports = [2, 3].map(|id| (id as u64, shown(self.off_ms[id - 1])));
                self.clock.begin_step(now, 7, members);
                for (id, wall_ms) in reports {
                    if self.up[id as usize - 1] {
                        self.clock.note_report(id, wall_ms);
                    }
                }
            }
            let time_ms = self.clock.time_ms(7, || Members::of_voters(&[1, 2, 3]));
            time_ms as i64 - self.true_ms() as i64
        }
    }

    #[test]
    fn leader_that_is_ahead_is_held_to_the_majority() {
        let day_ms = DAY_MS as i64;
        let mut cluster = Cluster::new([day_ms, 0, 0]);
        cluster.pass(40);
        let state_ms = cluster.true_ms();
        cluster.clock.follow_state(state_ms);
        assert_near(cluster.pass(10_000), 0);
        let shown = cluster.clock.offset_ms();
        assert!(
            shown.is_some_and(|ms| (ms - day_ms).abs() <= 1),
            "{shown:?}"
        );
    }

    #[test]
    fn leader_that_is_behind_follows_the_majority() {
        let day_ms = DAY_MS as i64;
        let mut cluster = Cluster::new([-day_ms, 0, 0]);
        assert_near(cluster.pass(40), 0);
        cluster.clock.follow_state(0);
        assert_near(cluster.pass(1_000), 0);
    }

    #[test]
    fn log_time_runs_on_where_the_only_other_voter_is_behind_or_ahead() {
        for other_ms in [-(DAY_MS as i64), DAY_MS as i64] {
            for own in [true, false] {
                let off_ms = match own {
                    true => [other_ms, 0, 0],
                    false => [0, other_ms, 0],
                };
                let mut cluster = Cluster::new(off_ms);
                cluster.up[2] = false;
                cluster.pass(40);
                let state_ms = cluster.true_ms();
                cluster.clock.follow_state(state_ms);
                assert_near(cluster.pass(10_000), 0);
            }
        }
    }

    #[test]
    fn state_that_is_ahead_advances_at_half_the_rate() {
        let mut cluster = Cluster::new([0; 3]);
        cluster.pass(40);
        let state_ms = cluster.true_ms() + DAY_MS;
        cluster.clock.follow_state(state_ms);
        assert_near(cluster.pass(10_000), DAY_MS as i64 - 5_000);
        let true_ms = cluster.true_ms();
        cluster.clock.set_ms(true_ms);
        assert_near(cluster.pass(10_000), 0);
    }

    #[test]
    fn jump_to_the_true_time_takes_a_majority() {
        let mut cluster = Cluster::new([0; 3]);
        cluster.pass(40);
        let state_ms = cluster.true_ms() - 7 * DAY_MS;
        cluster.clock.anchor = None;
        cluster.clock.follow_state(state_ms);
        assert_near(cluster.pass(1), 0);
        cluster.off_ms = [DAY_MS as i64, DAY_MS as i64, 0];
        assert_near(cluster.pass(100), DAY_MS as i64);
    }

    #[test]
    fn single_voter_trusts_itself() {
        let mut clock = LogClock::new(1);
        let members = || Members::of_voters(&[1]);
        let now = |ms: u64, off_ms: u64| Now {
            steady_us: 1_000_000 + ms * 1_000,
            wall_ms: TRUE_MS + ms + off_ms,
        };
        clock.begin_step(now(0, 0), 2, members);
        clock.follow_state(0);
        clock.begin_step(now(100, DAY_MS), 2, members);
        assert_eq!(clock.time_ms(2, members), TRUE_MS + 100 + DAY_MS);
    }

    #[test]
    fn pause_after_the_clock_was_read_puts_no_clock_ahead() {
        let mut cluster = Cluster::new([0; 3]);
        cluster.pass(40);
        let state_ms = cluster.true_ms();
        cluster.clock.follow_state(state_ms);
        // What the others send during the pause is taken in by the step for which the clock was
        // read before it.
        for id in [2, 3] {
            let wall_ms = cluster.true_ms() + 20_000;
            cluster.clock.note_report(id, wall_ms);
        }
        cluster.up = [true, false, false];
        cluster.steady_us += 20_000_000;
        assert_near(cluster.pass(100), 0);
    }

    #[test]
    fn both_memberships_of_a_change_must_agree() {
        let mut clock = LogClock::new(1);
        let members = || Members {
            voters: vec![1, 4, 5],
            voters_outgoing: vec![1, 2, 3],
            ..Members::default()
        };
        let now = Now {
            steady_us: 1_000_000,
            wall_ms: TRUE_MS + DAY_MS,
        };
        clock.begin_step(now, 2, members);
        for (id, wall_ms) in [(2, TRUE_MS), (3, TRUE_MS), (4, TRUE_MS + DAY_MS)] {
            clock.note_report(id, wall_ms);
        }
        let later = Now {
            steady_us: now.steady_us + COMPARE_US,
            wall_ms: now.wall_ms + COMPARE_US / 1_000,
        };
        clock.begin_step(later, 2, members);
        // They came right before this step, as far as is known.
        assert_eq!(clock.time_ms(2, members), TRUE_MS);
    }

    #[test]
    fn time_advances_however_often_it_is_read() {
        let mut cluster = Cluster::new([0; 3]);
        cluster.pass(40);
        let state_ms = cluster.true_ms() + DAY_MS;
        cluster.clock.follow_state(state_ms);
        let members = || Members::of_voters(&[1, 2, 3]);
        for _ in 0..100_000 {
            cluster.steady_us += 1;
            let now = Now {
                steady_us: cluster.steady_us,
                wall_ms: cluster.true_ms(),
            };
            cluster.clock.begin_step(now, 7, members);
        }
        let advanced_ms = cluster.clock.time_ms(7, members) - state_ms;
        assert!((49..=50).contains(&advanced_ms), "{advanced_ms}");
    }
}

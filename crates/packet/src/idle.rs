//! Whether looking again at once is worth it: only while no other thread wants the CPU, or while
//! others give it back soon.
//!
//! A thread that spins on a CPU that others need makes them wait for the scheduler, in steps of
//! milliseconds; on a machine with more busy threads than cores that costs far more than a blocking
//! wake-up. The kernel tells each thread how long it has waited for a CPU itself; where it has
//! waited lately, others have too, and the loop does not spin. It yields then: others run first,
//! and the loop looks again when they have. Where they do not give the CPU back soon (a compaction
//! runs on for milliseconds), a thread that yields is worse off than one that sleeps, which the
//! kernel prefers once it is woken: the loop sleeps.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

/// How long to look again at once after work before sleeping, microseconds, as long as nothing is
/// known. Long enough for a client's next request, its answer and a follower's next entry where one
/// write takes 50 to 100 µs; short enough that who is idle uses no CPU.
const DEFAULT_SPIN_US: u64 = 120;
/// The shortest, where work comes far apart, and the longest, where it comes just after: a sleep
/// and its wake-up take up to 100 µs each in a guest of a virtual machine, and with them the next
/// work comes later still.
const MIN_SPIN_US: u64 = 30;
const MAX_SPIN_US: u64 = 400;
/// How often the kernel is asked, at most; and how often short yields shorten the next ban.
const CHECK_US: u64 = 2_000;
/// Share of the time spent waiting for a CPU from which on spinning stops: one part in this many.
const MAX_WAIT_DIVISOR: u64 = 50;
/// First and longest time without spinning, or yielding, after it was seen to cost something.
const PENALTY_US: u64 = 100_000;
const MAX_PENALTY_US: u64 = 3_200_000;
/// Others that keep the CPU longer than this do more than answer.
const MAX_YIELD: Duration = Duration::from_micros(500);
/// Longest time in which polls of the packet queues
/// ([`Driver::rx_is_empty`](crate::Driver::rx_is_empty)) take the place of whole turns, for what
/// a look does not see.
pub const MAX_RX_POLL_US: u64 = 20;

/// A time without something that has cost too much, longer each time that it is imposed, also while
/// it lasts.
struct Backoff {
    until_us: u64,
    next_us: u64,
}

impl Backoff {
    fn new() -> Backoff {
        Backoff {
            until_us: 0,
            next_us: PENALTY_US,
        }
    }

    fn is_over(&self, now_us: u64) -> bool {
        now_us >= self.until_us
    }

    fn impose(&mut self, now_us: u64) {
        self.until_us = now_us + self.next_us;
        self.next_us = (2 * self.next_us).min(MAX_PENALTY_US);
    }

    /// It was allowed, and cost nothing.
    fn shorten(&mut self) {
        self.next_us = PENALTY_US.max(self.next_us / 2);
    }
}

/// How the event loop waits for work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Polling {
    /// Never blocks. For a dedicated core only.
    Busy,
    /// Looks again at once, or when others have run, for a bounded time after client work, then
    /// blocks.
    Adaptive,
    /// Blocks as soon as there is nothing to do.
    Event,
}

/// How long to look for the next work before sleeping: longer once work has come shortly after the
/// look ended, which a sleep made later than it had to be; shorter once it came so late that
/// looking was useless.
pub struct SpinWindow {
    us: u64,
    /// When there was work last; 0: never.
    worked_us: u64,
}

impl SpinWindow {
    /// One that knows nothing yet.
    pub fn new() -> SpinWindow {
        SpinWindow {
            us: DEFAULT_SPIN_US,
            worked_us: 0,
        }
    }

    /// How long to look, in microseconds since the last work.
    pub fn us(&self) -> u64 {
        self.us
    }

    /// There was work at this time. Telling it the same again changes nothing.
    pub fn note_work(&mut self, at_us: u64) {
        if at_us > self.worked_us {
            if self.worked_us > 0 {
                self.note_wait(at_us - self.worked_us);
            }
            self.worked_us = at_us;
        }
    }

    /// So long did the next work take to come.
    pub fn note_wait(&mut self, us: u64) {
        if us > MAX_SPIN_US {
            self.us = (self.us - self.us / 4).max(MIN_SPIN_US);
        } else if us > self.us {
            self.us = (2 * self.us).min(MAX_SPIN_US);
        }
    }
}

impl Default for SpinWindow {
    fn default() -> Self {
        SpinWindow::new()
    }
}

/// Yields as long as others give the CPU back soon. Times are microseconds of any monotone clock.
pub struct Yielder {
    backoff: Backoff,
    yielded_us: u64,
}

impl Yielder {
    /// One that may yield.
    pub fn new() -> Yielder {
        Yielder {
            backoff: Backoff::new(),
            yielded_us: 0,
        }
    }

    /// Whether to yield and look again, in place of sleeping.
    pub fn may_yield(&self, now_us: u64) -> bool {
        self.backoff.is_over(now_us)
    }

    /// Lets others run first.
    pub fn yield_once(&mut self, now_us: u64) {
        let begun = Instant::now();
        std::thread::yield_now();
        self.note(now_us, begun.elapsed());
    }

    fn note(&mut self, now_us: u64, took: Duration) {
        if took > MAX_YIELD {
            self.backoff.impose(now_us);
        } else if now_us >= self.yielded_us + CHECK_US {
            self.backoff.shorten();
            self.yielded_us = now_us;
        }
    }
}

impl Default for Yielder {
    fn default() -> Self {
        Yielder::new()
    }
}

/// Decides for one thread whether to spin; to be made in it.
pub struct Spinner {
    schedstat: Option<File>,
    checked_us: u64,
    waited_ns: u64,
    spin_backoff: Backoff,
    /// How long to spin or yield after work.
    pub spin_window: SpinWindow,
    /// For when spinning is not allowed.
    pub yielder: Yielder,
}

impl Default for Spinner {
    fn default() -> Self {
        Spinner::new()
    }
}

impl Spinner {
    /// One that may spin.
    pub fn new() -> Spinner {
        // Kernels without scheduler statistics: spin as configured.
        let schedstat = File::open("/proc/thread-self/schedstat").ok();
        Spinner {
            schedstat,
            checked_us: 0,
            waited_ns: 0,
            spin_backoff: Backoff::new(),
            spin_window: SpinWindow::new(),
            yielder: Yielder::new(),
        }
    }

    /// Whether to spin now.
    pub fn may_spin(&mut self, now_us: u64) -> bool {
        if now_us >= self.checked_us + CHECK_US {
            self.check(now_us);
        }
        self.spin_backoff.is_over(now_us)
    }

    fn check(&mut self, now_us: u64) {
        let Some(waited_ns) = self.schedstat.as_ref().and_then(waited_ns) else {
            return;
        };
        let waited_us = waited_ns.saturating_sub(self.waited_ns) / 1000;
        let elapsed_us = now_us - self.checked_us;
        (self.waited_ns, self.checked_us) = (waited_ns, now_us);
        // After a long sleep the average says nothing about now.
        if elapsed_us > 50 * CHECK_US {
            return;
        }
        if waited_us > elapsed_us / MAX_WAIT_DIVISOR {
            self.spin_backoff.impose(now_us);
        } else if self.spin_backoff.is_over(now_us) {
            self.spin_backoff.shorten();
        }
    }
}

/// The second number: nanoseconds spent runnable but not running.
fn waited_ns(file: &File) -> Option<u64> {
    let mut text = [0; 96];
    let length = file.read_at(&mut text, 0).ok()?;
    std::str::from_utf8(&text[..length])
        .ok()?
        .split_ascii_whitespace()
        .nth(1)?
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spinner() -> Spinner {
        Spinner {
            schedstat: None,
            ..Spinner::new()
        }
    }

    #[test]
    fn contention_forbids_spinning_for_a_while() {
        let mut spinner = spinner();
        assert!(
            spinner.may_spin(10_000),
            "without statistics it spins as configured"
        );
        spinner.spin_backoff.impose(60_000);
        assert!(!spinner.may_spin(60_000 + PENALTY_US - 1));
        assert!(spinner.may_spin(60_000 + PENALTY_US));
    }

    #[test]
    fn late_wakeups_stop_yielding_for_longer_each_time() {
        let mut yielder = Yielder::new();
        yielder.note(1_000, MAX_YIELD);
        assert!(yielder.may_yield(1_001));
        let late = 2 * MAX_YIELD;
        yielder.note(2_000, late);
        assert!(!yielder.may_yield(2_000 + PENALTY_US - 1));
        let again = 2_000 + PENALTY_US;
        assert!(yielder.may_yield(again));
        yielder.note(again, late);
        assert!(!yielder.may_yield(again + 2 * PENALTY_US - 1));
        let mut now_us = again + 2 * PENALTY_US;
        for _ in 0..2 {
            yielder.note(now_us, MAX_YIELD / 2);
            now_us += CHECK_US;
        }
        yielder.note(now_us, late);
        assert!(yielder.may_yield(now_us + PENALTY_US), "forgiven");
    }

    #[test]
    fn looks_grow_until_they_find_the_next_work_and_shrink_where_none_comes() {
        let mut spin_window = SpinWindow::new();
        let (mut at_us, gap_us) = (1_000_000, 300);
        spin_window.note_work(at_us);
        for _ in 0..3 {
            at_us += gap_us;
            spin_window.note_work(at_us);
            spin_window.note_work(at_us);
        }
        assert!((gap_us..=MAX_SPIN_US).contains(&spin_window.us()));
        let found = spin_window.us();
        spin_window.note_work(at_us + 5);
        assert_eq!(
            spin_window.us(),
            found,
            "what comes sooner is found as well"
        );
        let mut shorter = found;
        for _ in 0..20 {
            at_us += MAX_SPIN_US + 100;
            spin_window.note_work(at_us);
            assert!(spin_window.us() < shorter || spin_window.us() == MIN_SPIN_US);
            shorter = spin_window.us();
        }
        assert_eq!(shorter, MIN_SPIN_US);
        spin_window.note_wait(MIN_SPIN_US + 1);
        assert_eq!(spin_window.us(), 2 * MIN_SPIN_US, "and grow again");
    }

    #[test]
    fn no_time_without_is_longer_than_the_longest() {
        let mut backoff = Backoff::new();
        for _ in 0..20 {
            backoff.impose(7);
        }
        assert_eq!(backoff.until_us, 7 + MAX_PENALTY_US);
    }
}

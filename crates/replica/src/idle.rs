//! Whether spinning is worth it: only while nobody else wants the CPU.
//!
//! A thread that spins on a CPU that others need makes them wait for the scheduler, in steps of milliseconds; on a machine with more busy
//! threads than cores that costs far more than a blocking wake-up. The kernel tells each thread how long it has waited
//! for a CPU itself; where it has waited lately, others have too, and the loop blocks instead of spinning.

use std::fs::File;
use std::os::unix::fs::FileExt;

/// How often the kernel is asked, at most.
const CHECK_US: u64 = 2_000;
/// Share of the time spent waiting for a CPU from which on spinning stops: one part in this many.
const TOLERATED_PART: u64 = 50;
/// First and longest time without spinning after contention was seen.
const PENALTY_US: u64 = 100_000;
const LONGEST_PENALTY_US: u64 = 3_200_000;

/// Decides for one thread; to be made in it.
pub(crate) struct Spinner {
    schedstat: Option<File>,
    checked_us: u64,
    waited_ns: u64,
    forbidden_until_us: u64,
    penalty_us: u64,
}

impl Spinner {
    pub(crate) fn new() -> Spinner {
        // Kernels without scheduler statistics: spin as configured.
        let schedstat = File::open("/proc/thread-self/schedstat").ok();
        Spinner {
            schedstat,
            checked_us: 0,
            waited_ns: 0,
            forbidden_until_us: 0,
            penalty_us: PENALTY_US,
        }
    }

    /// Whether to spin now.
    pub(crate) fn may_spin(&mut self, now_us: u64) -> bool {
        if now_us >= self.checked_us + CHECK_US {
            self.check(now_us);
        }
        now_us >= self.forbidden_until_us
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
        if waited_us > elapsed_us / TOLERATED_PART {
            self.forbidden_until_us = now_us + self.penalty_us;
            self.penalty_us = (2 * self.penalty_us).min(LONGEST_PENALTY_US);
        } else if now_us >= self.forbidden_until_us {
            self.penalty_us = PENALTY_US.max(self.penalty_us / 2);
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

    #[test]
    fn contention_forbids_spinning_for_a_while() {
        let mut spinner = Spinner {
            schedstat: None,
            ..Spinner::new()
        };
        assert!(
            spinner.may_spin(10_000),
            "without statistics it spins as configured"
        );
        spinner.forbidden_until_us = 60_000;
        assert!(!spinner.may_spin(59_999));
        assert!(spinner.may_spin(60_000));
    }
}

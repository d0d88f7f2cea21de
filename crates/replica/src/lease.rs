//! The leader's lease: until when no other replica can have become leader.
//!
//! A ReadIndex round that was asked at `t` and confirmed by a majority means that each of them
//! heard from this leader at `t` or later. From then on a follower neither campaigns nor votes for
//! an election time-out, so until `t` plus that time-out there is no other leader. What is taken
//! off it:
//!
//! - ticks: followers count time in ticks, up to [`LOST_TICKS`] of which may lie before the message
//!   that set their count back;
//! - drift: clocks (CLOCK_BOOTTIME, which runs on while a machine sleeps) may differ in speed by
//!   the configured bound.
//!
//! Leadership transfer lets its target campaign at once, whenever the order reaches it: a term in
//! which one was begun has no lease any more. A follower that restarts has forgotten whom it heard:
//! with leases it votes for no candidate for its first election time-out (see `Node::may_vote`).

use crate::ticking::PAUSE_TICKS;

/// What a loop that was held up counts at once, and one more for where in a tick a message came.
pub(crate) const LOST_TICKS: u64 = PAUSE_TICKS + 1;

/// The lease of one physical log.
#[derive(Debug, Default)]
pub(crate) struct Lease {
    /// How long a confirmation lasts, in microseconds; 0: leases are off.
    length_us: u64,
    term: u64,
    until_us: u64,
    /// No lease in this term and before.
    revoked_term: u64,
}

impl Lease {
    /// `election_ticks` of `tick_us` are the shortest election time-out; clocks run at most
    /// `drift_ppm` millionths too fast or too slow.
    pub(crate) fn new(election_ticks: u64, tick_us: u64, drift_ppm: u32) -> Lease {
        let promised_us = election_ticks.saturating_sub(LOST_TICKS) * tick_us;
        // One clock may be fast and the other slow.
        let doubt_us = promised_us * 2 * u64::from(drift_ppm) / 1_000_000;
        Lease {
            length_us: promised_us.saturating_sub(doubt_us),
            ..Lease::default()
        }
    }

    /// A majority has confirmed a round asked at `asked_us` in this term.
    pub(crate) fn confirmed(&mut self, asked_us: u64, term: u64) {
        if term < self.term {
            return;
        }
        let until_us = asked_us + self.length_us;
        let before_us = if term == self.term { self.until_us } else { 0 };
        (self.term, self.until_us) = (term, before_us.max(until_us));
    }

    /// Whether no other replica can lead at `now_us`.
    pub(crate) fn holds(&self, now_us: u64, term: u64) -> bool {
        self.length_us > 0
            && term == self.term
            && term > self.revoked_term
            && now_us < self.until_us
    }

    /// Leadership is about to be handed over.
    pub(crate) fn revoke(&mut self, term: u64) {
        self.revoked_term = self.revoked_term.max(term);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_counted_from_when_it_was_asked_for() {
        let mut lease = Lease::new(10, 5_000, 1000);
        // Seven ticks, less two thousandths.
        let length_us = 35_000 - 70;
        assert!(!lease.holds(0, 1));
        lease.confirmed(100_000, 1);
        assert!(lease.holds(100_000 + length_us - 1, 1));
        assert!(!lease.holds(100_000 + length_us, 1));
        lease.confirmed(90_000, 1);
        assert!(
            lease.holds(100_000 + length_us - 1, 1),
            "late news takes nothing away"
        );
        assert!(!lease.holds(100_001, 2), "another term");
        lease.confirmed(101_000, 2);
        assert!(lease.holds(101_001, 2));
        lease.confirmed(200_000, 1);
        assert!(!lease.holds(200_001, 1) && !lease.holds(200_001, 2));
    }

    #[test]
    fn a_transfer_ends_the_leases_of_its_term() {
        let mut lease = Lease::new(10, 5_000, 0);
        lease.confirmed(100, 3);
        lease.revoke(3);
        assert!(!lease.holds(101, 3));
        lease.confirmed(102, 3);
        assert!(!lease.holds(103, 3), "the order may still be in flight");
        lease.confirmed(104, 4);
        assert!(lease.holds(105, 4));
    }

    #[test]
    fn short_time_outs_and_no_leases_at_all() {
        for mut lease in [Lease::new(3, 5_000, 0), Lease::default()] {
            lease.confirmed(100, 1);
            assert!(!lease.holds(100, 1));
        }
    }
}

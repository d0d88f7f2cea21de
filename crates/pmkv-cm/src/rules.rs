//! The manager's numbers.

use crate::planted::planted;

/// Durations, limits and thresholds. All managers and servers of a cluster use the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timing {
    /// A server's lease in microseconds, counted from the moment it asked.
    pub lease_us: u64,
    /// How often a server asks, in microseconds.
    pub renew_us: u64,
    /// A server silent for so long is taken for failed; its lease is still waited for.
    pub suspect_us: u64,
    /// The active manager's own lease in the store, in microseconds.
    pub manager_lease_us: u64,
    /// By how much any machine's clock may run fast or slow, in millionths. Twice as much is taken
    /// off every lease on the holder's side.
    pub drift_ppm: u32,
    /// A live member that has not adopted a configuration within this time is taken for failed.
    pub adopt_wait_us: u64,
    /// When more than half of the members are silent, or have been restarted, the silent ones get
    /// this long to come back before their shards go to others: a whole cluster that returns from a
    /// loss of power is not torn apart.
    pub return_wait_us: u64,
    /// A configuration is sent again to a member that has not adopted it after this time.
    pub resend_us: u64,
    /// Length of a load period in microseconds. //= rowan §4.6
    pub period_us: u64,
    /// A server is overloaded when its load lies above the average by this many thousandths.
    pub overload_permille: u64,
    /// Resharding aims at loads within this many thousandths of the average.
    pub balance_permille: u64,
    /// Requests of all servers per period below which nothing is moved for load.
    pub min_requests: u64,
    /// What a replication write costs the backup, in thousandths of what a request costs the
    /// primary: it comes without the backup's processor and is only digested there.
    pub backup_write_permille: u64,
    /// Copies of whole shards that a server gives or takes at once.
    pub copies_per_server: usize,
    /// A copy that has become full waits so long for others to share a configuration with, in
    /// microseconds.
    pub copied_wait_us: u64,
}

/// The longest lease in microseconds, an hour: everything that is counted from it then fits, too.
pub const MAX_LEASE_US: u64 = 3_600_000_000;

impl Default for Timing {
    fn default() -> Self {
        Timing::with_lease(10_000)
    }
}

impl Timing {
    /// The default rules around a lease of `lease_us` microseconds. Of any lease: [`Timing::check`]
    /// refuses those that are too long.
    pub fn with_lease(lease_us: u64) -> Timing {
        Timing {
            lease_us,
            renew_us: lease_us / 5,
            suspect_us: lease_us.saturating_mul(4) / 5,
            manager_lease_us: lease_us.saturating_mul(2),
            drift_ppm: 1000,
            adopt_wait_us: lease_us.saturating_mul(100),
            return_wait_us: 10_000_000,
            resend_us: lease_us / 2,
            period_us: 500_000,
            overload_permille: 300,
            balance_permille: 50,
            min_requests: 1000,
            backup_write_permille: 250,
            copies_per_server: 2,
            copied_wait_us: lease_us.saturating_mul(20),
        }
    }

    /// The default rules for servers with `cores` cores each: 10 ms with four or more; with fewer,
    /// longer in proportion, 20 ms at most, because going over to a configuration then takes as
    /// long as a lease lasts, and would cause the next one.
    pub fn for_cores(cores: usize) -> Timing {
        Timing::with_lease(10_000 * 4u64.div_ceil((cores as u64).clamp(2, 4)))
    }

    /// For how long a holder may believe in a lease of `lease_us`. The holder's clock may be slow
    /// and the grantor's fast, each by `drift_ppm`: `(1 - 2d)` of it on a slow clock take no longer
    /// than all of it on a fast one.
    pub fn trusted_us(&self, lease_us: u64) -> u64 {
        planted!(DriftIgnored => return lease_us);
        let off = u128::from(lease_us) * u128::from(self.drift_ppm) * 2;
        // At most `lease_us * 2`; saturates for absurd drifts.
        lease_us.saturating_sub(off.div_ceil(1_000_000) as u64)
    }

    /// Whether the numbers fit together.
    ///
    /// # Errors
    /// What does not.
    pub fn check(&self) -> Result<(), RulesError> {
        let require = |holds: bool, what| holds.then_some(()).ok_or(RulesError(what));
        require(self.lease_us >= 100, "a lease of at least 100 us")?;
        require(self.lease_us <= MAX_LEASE_US, "a lease of at most an hour")?;
        require(
            self.renew_us > 0 && self.renew_us <= self.lease_us / 2,
            "leases renewed at least twice in their time",
        )?;
        require(
            self.suspect_us > self.renew_us,
            "suspicion later than renewal",
        )?;
        require(
            self.manager_lease_us >= 100,
            "a manager's lease of at least 100 us",
        )?;
        require(
            self.manager_lease_us <= 2 * MAX_LEASE_US,
            "a manager's lease of at most two hours",
        )?;
        require(self.drift_ppm < 250_000, "a drift below 25 %")?;
        require(
            self.adopt_wait_us > self.lease_us,
            "more time to adopt than a lease",
        )?;
        require(self.period_us > 0 && self.resend_us > 0, "periods above 0")?;
        require(self.copies_per_server > 0, "at least one copy at a time")
    }
}

/// Rules that do not fit together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the rules need {0}")]
pub struct RulesError(pub &'static str);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_sound_and_scale() {
        for cores in 0..100 {
            Timing::for_cores(cores).check().unwrap();
        }
        assert_eq!(Timing::for_cores(0).lease_us, 20_000);
        assert_eq!(Timing::for_cores(2).lease_us, 20_000);
        assert_eq!(Timing::for_cores(64).lease_us, 10_000);
        assert_eq!(Timing::default().trusted_us(10_000), 9_980);
    }

    #[test]
    fn absurd_leases_are_refused() {
        Timing::with_lease(MAX_LEASE_US).check().unwrap();
        for lease_us in [0, 99, MAX_LEASE_US + 1, u64::MAX / 20, u64::MAX] {
            let refused = Timing::with_lease(lease_us).check();
            assert!(refused.is_err(), "{lease_us}");
        }
    }
}

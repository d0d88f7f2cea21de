//! How long to wait for an answer.

/// Smoothed response time, as TCP keeps it (RFC 6298).
#[derive(Default)]
pub(crate) struct ResponseTime {
    mean_us: u64,
    deviation_us: u64,
}

impl ResponseTime {
    pub(crate) fn sample(&mut self, us: u64) {
        if self.mean_us == 0 {
            (self.mean_us, self.deviation_us) = (us, us / 2);
        } else {
            self.deviation_us = (3 * self.deviation_us + self.mean_us.abs_diff(us)) / 4;
            self.mean_us = (7 * self.mean_us + us) / 8;
        }
    }

    /// Time after which an answer is missing: `least_us` up to 16 times that, and twice as long after each of the first
    /// three attempts that had no answer.
    pub(crate) fn patience_us(&self, least_us: u64, timeouts: u32) -> u64 {
        let expected_us = self.mean_us + 4 * self.deviation_us;
        let bounded_us = expected_us.clamp(least_us, least_us.saturating_mul(16));
        bounded_us.saturating_mul(1 << timeouts.min(3))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience_follows_the_answers_within_bounds() {
        let mut time = ResponseTime::default();
        assert_eq!(time.patience_us(1000, 0), 1000);
        (0..100).for_each(|_| time.sample(3000));
        assert!((3000..3200).contains(&time.patience_us(1000, 0)));
        assert_eq!(time.patience_us(1000, 9), 8 * time.patience_us(1000, 0));
        (0..100).for_each(|_| time.sample(1_000_000));
        assert_eq!(time.patience_us(1000, 0), 16_000);
    }
}

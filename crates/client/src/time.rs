//! How long to wait for an answer, and what it means that there is none.

use crate::request::{Kind, Request};

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

/// Tells a request that got lost from one that waits: a server under load answers late, but in the order in which it was asked, so
/// only a request is missing that others of its kind have overtaken (as RFC 8985 tells lost segments). Sending again
/// whatever is merely late would double the load exactly when there is too much of it.
#[derive(Default)]
pub(crate) struct Overtaken {
    /// When the newest write, and the newest read, that is done was sent.
    write_us: u64,
    read_us: u64,
}

/// Patience after which a request counts as missing in any case: servers answer other kinds, sizes and logs out of order.
const LONGEST: u64 = 8;

impl Overtaken {
    /// The newest attempt of a request was answered.
    pub(crate) fn done(&mut self, request: &Request) {
        let newest = match request.kind {
            Kind::Write => &mut self.write_us,
            Kind::Read { .. } => &mut self.read_us,
        };
        *newest = request.sent_us.max(*newest);
    }

    /// Whether what was sent at least `patience_us` later is done.
    pub(crate) fn is_missing(&self, request: &Request, now_us: u64, patience_us: u64) -> bool {
        let newest_us = match request.kind {
            Kind::Write => self.write_us,
            Kind::Read { .. } => self.read_us,
        };
        let waited_us = now_us.saturating_sub(request.sent_us);
        request.sent_us.saturating_add(patience_us) <= newest_us
            || waited_us >= LONGEST.saturating_mul(patience_us)
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

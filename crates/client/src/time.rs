//! How long to wait for an answer, and what it means that there is none.

use crate::request::Kind;

/// Longer than any program runs, and short enough to be added to any time.
const MAX_PATIENCE_US: u64 = u64::MAX >> 2;

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

    /// Hardly any answer takes longer; 0 before the first.
    pub(crate) fn usual_us(&self) -> u64 {
        self.mean_us + 4 * self.deviation_us
    }

    /// Time after which an answer is missing: `least_us` up to 16 times that, and twice as long
    /// after each of the first three attempts that had no answer. Never so long that a clock could
    /// not reach its end.
    pub(crate) fn patience_us(&self, least_us: u64, timeouts: u32) -> u64 {
        let bounded_us = self.usual_us().clamp(least_us, least_us.saturating_mul(16));
        let patience_us = bounded_us.saturating_mul(1 << timeouts.min(3));
        patience_us.min(MAX_PATIENCE_US)
    }
}

/// Tells a request that got lost from one that waits: a server under load answers late, but in the
/// order in which it was asked, so only a request is missing that others of its kind have overtaken
/// (as RFC 8985 tells lost segments). Sending again whatever is merely late would double the load
/// exactly when there is too much of it.
#[derive(Default)]
pub(crate) struct Overtaken {
    /// When the newest write, and the newest read, that is done was sent.
    write_us: u64,
    read_us: u64,
}

/// Patience after which a request counts as missing in any case: servers answer other kinds, sizes
/// and logs out of order.
const LONGEST: u64 = 8;

impl Overtaken {
    /// The newest attempt of a request was answered; it had been sent then.
    pub(crate) fn done(&mut self, kind: Kind, sent_us: u64) {
        let newest_us = match kind {
            Kind::Write => &mut self.write_us,
            Kind::Read { .. } => &mut self.read_us,
        };
        *newest_us = sent_us.max(*newest_us);
    }

    /// Whether something of that kind sent at least `patience_us` later is done.
    pub(crate) fn is_missing(
        &self,
        kind: Kind,
        sent_us: u64,
        now_us: u64,
        patience_us: u64,
    ) -> bool {
        let newest_us = match kind {
            Kind::Write => self.write_us,
            Kind::Read { .. } => self.read_us,
        };
        let waited_us = now_us.saturating_sub(sent_us);
        sent_us.saturating_add(patience_us) <= newest_us
            || waited_us >= LONGEST.saturating_mul(patience_us)
    }
}

#[cfg(test)]
mod tests {
    use cyclone_wire::client::ReadMode;

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
        assert_eq!(time.patience_us(u64::MAX, 9), MAX_PATIENCE_US);
    }

    #[test]
    fn missing_is_what_its_like_have_overtaken() {
        let read = Kind::Read {
            mode: ReadMode::Index,
        };
        let mut overtaken = Overtaken::default();
        assert!(!overtaken.is_missing(Kind::Write, 100, 5_000, 1_000));
        // Answers to reads say nothing of writes.
        overtaken.done(read, 4_000);
        assert!(!overtaken.is_missing(Kind::Write, 100, 5_000, 1_000));
        assert!(overtaken.is_missing(read, 100, 5_000, 1_000));
        // One sent only a little later may have been served by another thread.
        overtaken.done(Kind::Write, 1_099);
        assert!(!overtaken.is_missing(Kind::Write, 100, 5_000, 1_000));
        overtaken.done(Kind::Write, 1_100);
        assert!(overtaken.is_missing(Kind::Write, 100, 5_000, 1_000));
        // An older one does not take that back.
        overtaken.done(Kind::Write, 50);
        assert!(overtaken.is_missing(Kind::Write, 100, 5_000, 1_000));
    }

    #[test]
    fn no_patience_is_unlimited() {
        let overtaken = Overtaken::default();
        assert!(!overtaken.is_missing(Kind::Write, 100, 8_099, 1_000));
        assert!(overtaken.is_missing(Kind::Write, 100, 8_100, 1_000));
        assert!(!overtaken.is_missing(Kind::Write, u64::MAX, 100, u64::MAX));
    }
}

//! Holding connections back while the backend takes little more, so that their callers wait instead
//! of being refused.

/// How long connections are not read because the backend is pressed; then each is read once, and
/// refused what is too much.
const MAX_HOLD_US: u64 = 250_000;
/// How often it is looked whether it still is.
const RECHECK_US: u64 = 1_000;

/// Whether connections that have something to say are read.
#[derive(Debug, Default)]
pub(super) struct Pressure {
    /// Since when some have been held back.
    since_us: Option<u64>,
    /// Connections still to be read although the backend is pressed.
    reads_left: usize,
}

impl Pressure {
    /// Whether the next of `connections` has to wait. Not without limit: a connection that has
    /// waited for long is read, and refused.
    pub(super) fn must_wait(
        &mut self,
        now_us: u64,
        is_backpressured: bool,
        connections: usize,
    ) -> bool {
        if !is_backpressured {
            self.end();
            return false;
        }
        let since_us = *self.since_us.get_or_insert(now_us);
        if now_us.saturating_sub(since_us) < MAX_HOLD_US {
            return true;
        }
        if self.reads_left == 0 {
            // Each gets one. Even when none is open, the one that is asked for.
            self.reads_left = connections.max(1);
        }
        self.reads_left -= 1;
        if self.reads_left == 0 {
            self.since_us = Some(now_us);
        }
        false
    }

    /// No connection is held back any more.
    pub(super) fn end(&mut self) {
        *self = Pressure::default();
    }

    /// Whether somebody is.
    pub(super) fn is_active(&self) -> bool {
        self.since_us.is_some()
    }

    /// When to look again.
    pub(super) fn next_check_us(&self, now_us: u64) -> Option<u64> {
        self.is_active().then_some(now_us + RECHECK_US)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn held_back_until_patience_ends_and_then_one_turn_each() {
        let mut pressure = Pressure::default();
        assert!(!pressure.must_wait(5, false, 3));
        assert_eq!(pressure.next_check_us(5), None);
        assert!(pressure.must_wait(10, true, 3));
        assert_eq!(pressure.next_check_us(10), Some(10 + RECHECK_US));
        assert!(pressure.must_wait(10 + MAX_HOLD_US - 1, true, 3));
        let end = 10 + MAX_HOLD_US;
        let turns: Vec<bool> = (0..5).map(|_| pressure.must_wait(end, true, 3)).collect();
        assert_eq!(turns, [false, false, false, true, true]);
        assert!(!pressure.must_wait(end + MAX_HOLD_US, true, 3));
    }

    #[test]
    fn turns_of_an_earlier_pressure_do_not_count() {
        let mut pressure = Pressure::default();
        assert!(pressure.must_wait(0, true, 9));
        assert!(!pressure.must_wait(MAX_HOLD_US, true, 9));
        assert!(!pressure.must_wait(MAX_HOLD_US, false, 9));
        let later = 3 * MAX_HOLD_US;
        assert!(pressure.must_wait(later, true, 2));
        let end = later + MAX_HOLD_US;
        let turns: Vec<bool> = (0..3).map(|_| pressure.must_wait(end, true, 2)).collect();
        assert_eq!(turns, [false, false, true]);
    }

    #[test]
    fn connections_that_have_gone_are_no_harm() {
        let mut pressure = Pressure::default();
        assert!(pressure.must_wait(0, true, 1));
        assert!(!pressure.must_wait(MAX_HOLD_US, true, 0));
        assert!(pressure.must_wait(MAX_HOLD_US, true, 0));
    }
}

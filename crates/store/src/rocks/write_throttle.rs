//! How fast writers may go while the thread that feeds RocksDB is behind: RocksDB slows down what
//! it is given when compactions fall behind, and a table of megabytes then takes it half a second.
//! Writers who each wait for a while go as fast as writers who take turns at waiting for a whole
//! table, and no writer waits long.

use std::time::{Duration, Instant};

/// With more tables waiting writers are slowed down: with as many again they go at two thirds of
/// the thread's speed.
const FREE: u64 = 3;
/// No writer waits longer because of one write.
const LONGEST: Duration = Duration::from_millis(50);

/// The thread's speed, and when the next write is due.
pub(super) struct WriteThrottle {
    /// When the thread took the table that it is handing over.
    begun: Option<Instant>,
    /// What the table before it took.
    last: Duration,
    due: Option<Instant>,
}

impl WriteThrottle {
    pub(super) fn new() -> WriteThrottle {
        WriteThrottle {
            begun: None,
            last: Duration::ZERO,
            due: None,
        }
    }

    /// The thread takes a table.
    pub(super) fn begin(&mut self, now: Instant) {
        self.begun = Some(now);
    }

    /// The thread has handed it over.
    pub(super) fn end(&mut self, now: Instant) {
        if let Some(begun) = self.begun.take() {
            self.last = now - begun;
        }
    }

    /// How long the next write is to wait.
    pub(super) fn wait(&self, now: Instant) -> Option<Duration> {
        self.due?.checked_duration_since(now)
    }

    /// A write of this part of a table was taken while so many tables wait.
    pub(super) fn took(&mut self, part: f64, waiting: u64, now: Instant) {
        let behind = waiting.saturating_sub(FREE);
        if behind == 0 {
            self.due = None;
            return;
        }
        let in_flight = self.begun.map_or(Duration::ZERO, |begun| now - begun);
        let table = self.last.max(in_flight);
        // At two tables more than are free writers are as fast as the thread.
        let cost = table.mul_f64(part * behind as f64 / 2.0).min(LONGEST);
        let due = self.due.map_or(now, |due| due.max(now));
        self.due = Some(due + cost);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// How many hundredths of a table are taken in `time`, while `waiting` tables wait for a thread
    /// that takes 100 ms for each.
    fn taken(waiting: u64, time: Duration) -> u32 {
        let mut now = Instant::now();
        let mut throttle = WriteThrottle::new();
        throttle.begin(now);
        now += 100 * MS;
        throttle.end(now);
        let end = now + time;
        for taken in 0..10_000 {
            now += throttle.wait(now).unwrap_or_default();
            if now >= end {
                return taken;
            }
            throttle.took(0.01, waiting, now);
        }
        u32::MAX
    }

    #[test]
    fn writers_go_at_the_threads_speed_when_it_is_behind() {
        let speeds =
            [0, FREE, FREE + 1, FREE + 2, FREE + 4].map(|waiting| taken(waiting, 1000 * MS));
        assert_eq!(speeds, [u32::MAX, u32::MAX, 2000, 1000, 500]);
    }

    #[test]
    fn a_table_in_progress_counts_for_the_time_it_took_already() {
        let begun = Instant::now();
        let mut throttle = WriteThrottle::new();
        throttle.begin(begun);
        let now = begun + 1000 * MS;
        throttle.took(0.01, FREE + 2, now);
        assert_eq!(throttle.wait(now), Some(10 * MS));
        throttle.took(1.0, FREE + 2, now);
        assert_eq!(throttle.wait(now), Some(10 * MS + LONGEST));
        throttle.end(now);
        throttle.took(0.01, FREE, now);
        assert_eq!(throttle.wait(now), None);
    }
}

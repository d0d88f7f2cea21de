//! Which posted segments no append will touch again, for NICs that do not tell. Pure; the time is
//! passed in.
//!
//! Segments are consumed in the order in which they were posted, and begin with 64 zero bits; a
//! record's first 64 bits are never zero. A segment whose first word is not zero proves that every
//! segment posted before it was given up by the NIC, but not that the last bytes for them have
//! landed: that is what the wait is for. The sender's half of the rule is
//! [`counts`]: a write whose completion took longer than half of the wait does not count and is made again. Together
//! they hold: a write that counts landed less than 1 ms after its address was given, its address
//! was given before the later segment's first word was written, and the receiver lets 2 ms pass
//! after having seen that word.

use std::collections::VecDeque;

/// How long the receiver waits after it has seen a later segment in use, in microseconds.
//= rowan §4.3
pub const SETTLE_US: u64 = 2_000;

/// The longest that a write may take and still count, in microseconds.
//= rowan §4.3
pub const RETRY_US: u64 = 1_000;

/// Whether a completion counts that was seen this long after its write was posted. Seeing it late
/// is safe: the write is made again, and appears twice.
pub fn counts(posted_us: u64, completed_us: u64) -> bool {
    completed_us.saturating_sub(posted_us) <= RETRY_US
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Posted,
    /// A later segment was seen in use at the last look, whose own time may be long past: the clock
    /// was read before the look, and the thread may have slept between.
    Passed,
    /// The time of the first look after that.
    Settling(u64),
}

/// The posted segments of one queue, oldest first.
#[derive(Default)]
pub struct FirstWords {
    posted: VecDeque<(u32, State)>,
}

impl FirstWords {
    /// Takes note of a posted segment.
    pub fn posted(&mut self, segment: u32) {
        self.posted.push_back((segment, State::Posted));
    }

    /// How many segments are posted and not known used.
    pub fn len(&self) -> usize {
        self.posted.len()
    }

    /// Whether no segment is posted.
    pub fn is_empty(&self) -> bool {
        self.posted.is_empty()
    }

    /// Reads the first words and returns the segments that are used by now, oldest first. `now_us`
    /// was read before.
    pub fn look(
        &mut self,
        now_us: u64,
        mut first_word: impl FnMut(u32) -> u64,
        used: &mut Vec<u32>,
    ) {
        for (_, state) in &mut self.posted {
            if *state == State::Passed {
                *state = State::Settling(now_us);
            }
        }
        while let Some(&(segment, State::Settling(since))) = self.posted.front()
            && now_us.saturating_sub(since) >= SETTLE_US
        {
            used.push(segment);
            self.posted.pop_front();
        }
        let newest = self
            .posted
            .iter()
            .rposition(|&(segment, _)| first_word(segment) != 0);
        for (_, state) in self.posted.iter_mut().take(newest.unwrap_or(0)) {
            if *state == State::Posted {
                *state = State::Passed;
            }
        }
    }

    /// Takes all that are left: the queue is closed.
    pub fn close(&mut self, used: &mut Vec<u32>) {
        used.extend(self.posted.drain(..).map(|(segment, _)| segment));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(words: &mut FirstWords, now_us: u64, memory: &[u64]) -> Vec<u32> {
        let mut used = Vec::new();
        words.look(now_us, |segment| memory[segment as usize], &mut used);
        used
    }

    fn four() -> FirstWords {
        let mut words = FirstWords::default();
        (0..4).for_each(|segment| words.posted(segment));
        words
    }

    #[test]
    fn a_segment_is_used_two_milliseconds_after_a_later_one_began() {
        let mut words = four();
        assert_eq!(look(&mut words, 0, &[1, 0, 0, 0]), []);
        assert_eq!(look(&mut words, 9_000, &[1, 0, 0, 0]), []);
        assert_eq!(look(&mut words, 10_000, &[1, 1, 0, 0]), []);
        assert_eq!(look(&mut words, 10_500, &[1, 1, 0, 0]), []);
        assert_eq!(look(&mut words, 12_499, &[1, 1, 0, 0]), []);
        assert_eq!(look(&mut words, 12_500, &[1, 1, 0, 0]), [0]);
        assert_eq!(words.len(), 3);
    }

    /// The first record of a segment never came (its sender died): the segments behind tell all the
    /// same.
    #[test]
    fn a_hole_in_a_first_word_is_passed_over() {
        let mut words = four();
        look(&mut words, 0, &[1, 0, 0, 1]);
        look(&mut words, 0, &[1, 0, 0, 1]);
        assert_eq!(look(&mut words, 2_000, &[1, 0, 0, 1]), [0, 1, 2]);
    }

    /// The control thread reads the clock, sleeps for a second, and only then sees the word. The
    /// second it slept must not count as waiting: the NIC may have written the word just now.
    #[test]
    fn time_slept_before_the_look_is_not_waiting() {
        let mut words = four();
        look(&mut words, 0, &[1, 1, 0, 0]);
        assert_eq!(look(&mut words, 1_000_000, &[1, 1, 0, 0]), []);
        assert_eq!(look(&mut words, 1_001_999, &[1, 1, 0, 0]), []);
        assert_eq!(look(&mut words, 1_002_000, &[1, 1, 0, 0]), [0]);
    }

    #[test]
    fn closing_takes_what_is_left() {
        let mut words = four();
        let mut used = Vec::new();
        words.close(&mut used);
        assert_eq!(used, [0, 1, 2, 3]);
        assert!(words.is_empty());
    }

    #[test]
    fn a_write_counts_within_a_millisecond() {
        assert!(counts(5, 1_005));
        assert!(!counts(5, 1_006));
        const { assert!(RETRY_US < SETTLE_US) };
    }
}

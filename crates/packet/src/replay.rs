//! The replay window: every sequence number is accepted at most once.

const WORDS: usize = 128;

/// How far behind the newest a sequence number may be and still be accepted.
pub const WINDOW: u64 = (WORDS as u64 - 1) * 64;

/// Sequence numbers at or above this are refused: they only come from a broken peer.
pub const MAX_SEQ: u64 = 1 << 62;

/// Sequence numbers seen in one direction (the ring of words of RFC 6479).
#[derive(Debug, Clone)]
pub struct Window {
    /// One above the newest number accepted.
    next: u64,
    words: [u64; WORDS],
}

impl Default for Window {
    fn default() -> Self {
        Window {
            next: 0,
            words: [0; WORDS],
        }
    }
}

impl Window {
    /// Whether `seq` is neither seen nor too old. Changes nothing, so it may be asked before the
    /// tag is checked.
    pub fn is_fresh(&self, seq: u64) -> bool {
        if seq >= self.next {
            return seq < MAX_SEQ;
        }
        self.next - seq <= WINDOW
            && self.words[(seq / 64) as usize % WORDS] & (1 << (seq % 64)) == 0
    }

    /// Whether `seq` would be the newest so far.
    pub fn is_newest(&self, seq: u64) -> bool {
        seq >= self.next
    }

    /// Marks a fresh number as seen; only after its tag was checked.
    pub fn accept(&mut self, seq: u64) {
        debug_assert!(self.is_fresh(seq));
        if seq >= self.next {
            // The word of the newest number accepted so far is live; those between it and the new
            // one are stale.
            let live = self.next.saturating_sub(1) / 64;
            let fresh = (seq / 64 - live).min(WORDS as u64);
            for i in 1..=fresh {
                self.words[(live + i) as usize % WORDS] = 0;
            }
            self.next = seq + 1;
        }
        self.words[(seq / 64) as usize % WORDS] |= 1 << (seq % 64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    proptest! {
        #[test]
        fn accepts_exactly_the_unseen_inside_the_window(steps in proptest::collection::vec((any::<bool>(), 0u64..5000), 1..800)) {
            let mut window = Window::default();
            let mut seen = HashSet::new();
            let mut top = 0u64;
            for (forward, by) in steps {
                let seq = if forward { top + by % 70 } else { top.saturating_sub(by) };
                let expected = !seen.contains(&seq) && (seq >= top || top - seq <= WINDOW);
                prop_assert_eq!(window.is_fresh(seq), expected, "seq {} top {}", seq, top);
                if expected {
                    window.accept(seq);
                    seen.insert(seq);
                    top = top.max(seq + 1);
                }
            }
        }
    }

    #[test]
    fn a_jump_over_the_whole_window_forgets_nothing_wrongly() {
        let mut window = Window::default();
        window.accept(3);
        window.accept(1_000_000);
        assert!(!window.is_fresh(3) && !window.is_fresh(1_000_000));
        assert!(window.is_fresh(1_000_000 - WINDOW + 1) && !window.is_fresh(1_000_000 - WINDOW));
        assert!(!window.is_fresh(MAX_SEQ));
    }
}

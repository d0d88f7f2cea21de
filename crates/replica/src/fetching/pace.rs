//! How fast the pieces of a checkpoint are asked for: as fast as they come. Pure; times are in µs.
//!
//! What may be on its way grows until something is lost, and is halved then (RFC 5681). A piece may
//! take as long as the round trips before it say (RFC 6298). A piece is several datagrams, and lost
//! with any of them: where little may be on its way, pieces are small.

/// Bytes on their way: at first, and the least and the most that may be; the most is well below
/// what a socket buffers.
const FIRST_WINDOW: u64 = 64 << 10;
const LEAST_WINDOW: u64 = 8 << 10;
const MOST_WINDOW: u64 = 512 << 10;
/// A window is so many pieces.
const PIECES: u64 = 8;
/// Bytes of a piece.
pub(super) const LEAST_PIECE: u32 = 1 << 10;
pub(super) const MOST_PIECE: u32 = 64 << 10;

/// How long a piece may take before one has come, and at least and at most from then on.
const FIRST_PATIENCE_US: u64 = 1_000_000;
const LEAST_PATIENCE_US: u64 = 60_000;
const MOST_PATIENCE_US: u64 = 1_000_000;

/// A piece is lost when so many that were asked for later have come.
const OVERTAKEN: u32 = 4;

/// The pace of one fetch.
pub(super) struct Pace {
    /// Smoothed round trip, and how much round trips differ from it.
    rtt_us: Option<(u64, u64)>,
    /// So often in a row something did not come in time.
    late: u32,
    window: u64,
    /// Up to here the window grows by what comes; from here on by a piece for each whole window.
    threshold: u64,
    /// Questions so far.
    asked: u64,
    /// Of questions before this one another loss says nothing new.
    halved_at: u64,
}

impl Pace {
    pub fn new() -> Pace {
        Pace {
            rtt_us: None,
            late: 0,
            window: FIRST_WINDOW,
            threshold: MOST_WINDOW,
            asked: 0,
            halved_at: 0,
        }
    }

    /// Bytes of the next piece.
    pub fn piece_bytes(&self) -> u32 {
        let bytes = (self.window / PIECES) as u32;
        let power = 1 << bytes.max(1).ilog2();
        LEAST_PIECE.max(power).min(MOST_PIECE)
    }

    /// Whether so many bytes more may be on their way beside these. One piece always may.
    pub fn has_room(&self, in_flight: u64, bytes: u32) -> bool {
        in_flight == 0 || in_flight + u64::from(bytes) <= self.window
    }

    /// How long a piece may take until it is asked for again.
    pub fn patience_us(&self) -> u64 {
        let usual = self.rtt_us.map_or(FIRST_PATIENCE_US, |(trip, differs)| {
            trip.saturating_add(4 * differs)
        });
        let usual = usual.clamp(LEAST_PATIENCE_US, MOST_PATIENCE_US);
        (usual << self.late.min(16)).min(MOST_PATIENCE_US)
    }

    /// A piece is asked for; answers the question's number.
    pub fn ask(&mut self) -> u64 {
        self.asked += 1;
        self.asked
    }

    /// So many bytes have come; `rtt_us`: after so long, if they were asked for once.
    pub fn on_received(&mut self, bytes: u32, rtt_us: Option<u64>) {
        if let Some(sample) = rtt_us {
            self.late = 0;
            self.rtt_us = Some(match self.rtt_us {
                None => (sample, sample / 2),
                Some((trip, differs)) => (
                    (7 * trip + sample) / 8,
                    (3 * differs + trip.abs_diff(sample)) / 4,
                ),
            });
        }
        let bytes = u64::from(bytes);
        let more = match self.window < self.threshold {
            true => bytes,
            false => (bytes * u64::from(self.piece_bytes()) / self.window).max(1),
        };
        self.window = MOST_WINDOW.min(self.window + more);
    }

    /// Whether a question is lost that so many later ones were answered before.
    pub fn is_presumed_lost(answered_since: u32) -> bool {
        answered_since >= OVERTAKEN
    }

    /// The answer to this question is lost. `is_late`: nothing says so but that it does not come.
    /// Then it may only be on its way for longer than any before it, and what is asked again would
    /// make the queue that it stands in longer.
    pub fn lost(&mut self, question: u64, is_late: bool) {
        if question < self.halved_at {
            return;
        }
        self.halved_at = self.asked + 1;
        self.threshold = LEAST_WINDOW.max(self.window / 2);
        self.window = self.threshold;
        if is_late {
            self.window = LEAST_WINDOW;
            self.late = self.late.saturating_add(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience_follows_from_round_trips_and_doubles_when_it_ends() {
        let mut pace = Pace::new();
        assert_eq!(pace.patience_us(), FIRST_PATIENCE_US);
        for _ in 0..40 {
            pace.on_received(1000, Some(150_000));
        }
        assert!((150_000..160_000).contains(&pace.patience_us()));
        for expected in [300_000, 600_000, 1_000_000, 1_000_000] {
            let question = pace.ask();
            pace.lost(question, true);
            assert!(pace.patience_us() >= expected && pace.patience_us() <= MOST_PATIENCE_US);
        }
        // A piece that was asked for twice says nothing of how long it took.
        pace.on_received(1000, None);
        assert_eq!(pace.patience_us(), MOST_PATIENCE_US);
        for _ in 0..60 {
            pace.on_received(1000, Some(100));
        }
        assert_eq!(pace.patience_us(), LEAST_PATIENCE_US);
    }

    #[test]
    fn what_is_on_its_way_grows_until_something_is_lost() {
        let mut pace = Pace::new();
        assert_eq!(pace.piece_bytes(), 8 << 10);
        for _ in 0..64 {
            pace.on_received(pace.piece_bytes(), Some(100));
        }
        assert_eq!((pace.window, pace.piece_bytes()), (MOST_WINDOW, MOST_PIECE));
        let questions: Vec<u64> = (0..8).map(|_| pace.ask()).collect();
        // All of one window: one loss.
        for question in &questions {
            pace.lost(*question, false);
        }
        assert_eq!(
            (pace.window, pace.piece_bytes()),
            (MOST_WINDOW / 2, MOST_PIECE / 2)
        );
        for _ in 0..8 {
            pace.on_received(pace.piece_bytes(), Some(100));
        }
        let grown = pace.window - MOST_WINDOW / 2;
        assert!(
            (20 << 10..=32 << 10).contains(&grown),
            "a piece for a window: {grown}"
        );
        for _ in 0..20 {
            let question = pace.ask();
            pace.lost(question, false);
        }
        assert_eq!(
            (pace.window, pace.piece_bytes()),
            (LEAST_WINDOW, LEAST_PIECE)
        );
        assert!(pace.has_room(0, 1 << 20) && !pace.has_room(LEAST_WINDOW, 1));
    }
}

//! Connections in WAIT. What the replicas hold is asked once a step for all of them, and unless it
//! has changed no connection is checked.

/// Who waits, and what was known at the last look.
#[derive(Debug)]
pub(crate) struct Waits {
    /// Places of the connections.
    places: Vec<u32>,
    /// No deadline passes before.
    until_us: u64,
    /// Up to which marks the replicas hold the log, the lowest first.
    held: Vec<u64>,
}

impl Default for Waits {
    fn default() -> Waits {
        Waits {
            places: Vec::new(),
            until_us: u64::MAX,
            held: Vec::new(),
        }
    }
}

impl Waits {
    pub(crate) fn count(&self) -> usize {
        self.places.len()
    }

    /// Adds a connection that what is held does not satisfy.
    pub(crate) fn add(&mut self, place: u32, deadline_us: u64) {
        self.places.push(place);
        self.until_us = self.until_us.min(deadline_us);
    }

    /// Drops a connection that has gone.
    pub(super) fn remove(&mut self, place: u32) {
        self.places.retain(|one| *one != place);
    }

    /// When to look again at the latest.
    pub(super) fn next_check_us(&self) -> Option<u64> {
        (!self.places.is_empty()).then_some(self.until_us)
    }

    /// While no connection waits, no check runs: what was known says nothing about what has changed
    /// since.
    pub(super) fn forget(&mut self) {
        self.held.clear();
    }

    /// Notes what replicas hold now, a mark of each; returns whether somebody may be satisfied by
    /// it, or late.
    pub(super) fn note(&mut self, now_us: u64, mut held: Vec<u64>) -> bool {
        held.sort_unstable();
        let is_news = held != self.held;
        self.held = held;
        is_news || now_us >= self.until_us
    }

    /// How many replicas hold the log up to a mark.
    pub(super) fn acked(&self, mark: u64) -> usize {
        self.held.len() - self.held.partition_point(|held| *held < mark)
    }

    /// Takes all, for a look: those who go on waiting are added again.
    pub(super) fn take(&mut self) -> Vec<u32> {
        self.until_us = u64::MAX;
        std::mem::take(&mut self.places)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_are_checked_only_after_a_change_or_a_deadline() {
        let mut waits = Waits::default();
        assert_eq!(waits.next_check_us(), None);
        waits.add(7, 500);
        waits.add(8, u64::MAX);
        assert_eq!(waits.next_check_us(), Some(500));
        assert!(waits.note(10, vec![5, 3]), "it was not known");
        assert!(
            !waits.note(20, vec![3, 5]),
            "whose is whose does not matter"
        );
        assert!(!waits.note(499, vec![5, 3]));
        assert!(waits.note(499, vec![5, 4]));
        assert!(waits.note(500, vec![5, 4]), "one is late");
        // The other one goes on waiting.
        assert_eq!(waits.take(), [7, 8]);
        waits.add(8, u64::MAX);
        assert_eq!((waits.count(), waits.next_check_us()), (1, Some(u64::MAX)));
        assert!(!waits.note(1_000_000, vec![5, 4]));
        waits.remove(8);
        assert_eq!((waits.count(), waits.next_check_us()), (0, None));
        // It may have been less when the next one came, after an election.
        waits.forget();
        waits.add(9, u64::MAX);
        assert!(waits.note(1_000_001, vec![5, 4]));
    }

    #[test]
    fn replicas_count_up_to_the_mark_that_they_hold() {
        let mut waits = Waits::default();
        assert_eq!(waits.acked(0), 0);
        waits.note(0, vec![9, 4, 9]);
        let acked = [0, 4, 5, 9, 10].map(|mark| waits.acked(mark));
        assert_eq!(acked, [3, 3, 2, 2, 0]);
    }
}

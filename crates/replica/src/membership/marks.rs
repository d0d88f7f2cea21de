//! How far each log was committed a while ago: what a replica has to have that is to vote.

/// How old a mark becomes until a later one takes its place, µs.
const AGE_US: u64 = 1_000_000;

/// Of all logs, one to two seconds ago. What is known of a replica far away is as old as the way
/// there is long: of what was committed just now, under load, it would never have all.
#[derive(Default)]
pub(super) struct LaggedCommits {
    /// What counts.
    pub before: Vec<u64>,
    /// What will count.
    next: Vec<u64>,
    noted_us: u64,
}

impl LaggedCommits {
    /// So far the logs are committed now.
    pub fn note(&mut self, now_us: u64, committed: Vec<u64>) {
        if self.before.len() != committed.len() {
            (self.before, self.next) = (committed.clone(), committed);
            self.noted_us = now_us;
        } else if now_us.saturating_sub(self.noted_us) >= AGE_US {
            self.before = std::mem::replace(&mut self.next, committed);
            self.noted_us = now_us;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ten entries each millisecond; what is known of the learner is 50 ms older than what is known
    /// of the others.
    #[test]
    fn a_learner_far_away_has_caught_up_under_load() {
        let mut marks = LaggedCommits::default();
        let mut since = None;
        for now_us in (0..10_000_000).step_by(20_000) {
            let committed = now_us / 100;
            marks.note(now_us, vec![committed]);
            let matched = committed.saturating_sub(500);
            if marks.before[0] <= matched {
                since.get_or_insert(now_us);
            } else {
                assert_eq!(since, None, "and stays so");
            }
        }
        assert!(since.is_some_and(|since| since <= 2 * AGE_US), "{since:?}");
        // One that lacks what came in the last seconds has not.
        assert!(marks.before[0] > 10_000_000 / 100 - 25_000);
    }
}

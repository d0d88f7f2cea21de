//! Which versions of a shard are on every replica, for CommitVer (rowan §4.4). Pure.

use std::collections::VecDeque;

/// Versions in flight, in order.
#[derive(Default)]
pub(super) struct Versions(VecDeque<(u64, bool)>);

impl Versions {
    /// An entry, or batch, whose last version is this one is in flight. Versions only rise.
    pub fn begin(&mut self, last: u64) {
        debug_assert!(self.0.back().is_none_or(|it| it.0 < last));
        self.0.push_back((last, false));
    }

    /// It is on every replica; answers the highest version below which nothing is missing, if that
    /// is another now.
    pub fn done(&mut self, last: u64) -> Option<u64> {
        if let Ok(at) = self.0.binary_search_by_key(&last, |it| it.0) {
            self.0[at].1 = true;
        }
        let mut commit = None;
        while let Some(&(version, true)) = self.0.front() {
            commit = Some(version);
            self.0.pop_front();
        }
        commit
    }

    /// Whether nothing is in flight.
    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::Versions;

    #[test]
    fn commits_only_what_has_nothing_missing_below() {
        let mut versions = Versions::default();
        for last in [3, 4, 9] {
            versions.begin(last);
        }
        assert_eq!(versions.done(4), None);
        assert_eq!(versions.done(3), Some(4));
        assert_eq!(versions.done(3), None);
        assert_eq!(versions.done(9), Some(9));
        assert!(versions.is_empty());
    }
}

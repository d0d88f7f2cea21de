//! Which version a ZooKeeper node had at which revision. Versions are 32 bits wide and wrap around:
//! renewals of an office, some milliseconds apart, use them up within months. So a record's
//! revision is the transaction that wrote it last, which only grows, and a swap expects the version
//! that was seen beside it.

use std::collections::BTreeMap;

use super::{Key, Revision};

/// To ZooKeeper this version means any.
const ANY: i32 = -1;

/// How a node is set so that it happens at one version only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// At this version.
    Set(i32),
    /// At this version, and at once again at whichever comes then, in one transaction: it would be
    /// [`ANY`], at which nothing can be expected.
    SetTwice(i32),
    /// No caller can expect this version.
    Impossible,
}

impl Step {
    /// From a version.
    pub fn from(version: i32) -> Step {
        match version {
            ANY => Step::Impossible,
            version if version.wrapping_add(1) == ANY => Step::SetTwice(version),
            version => Step::Set(version),
        }
    }
}

/// The revision of a node that a transaction wrote last; they count from 1.
pub(super) fn revision(mzxid: i64) -> Revision {
    mzxid.cast_unsigned()
}

/// The newest writing of each record that was seen, and its version.
#[derive(Debug, Default)]
pub(super) struct Versions(BTreeMap<Key, (Revision, i32)>);

impl Versions {
    /// A node as it was seen: its revision.
    pub fn saw(&mut self, key: Key, mzxid: i64, version: i32) -> Revision {
        let seen = (revision(mzxid), version);
        let newest = self.0.entry(key).or_insert(seen);
        // Servers that lag behind show what is older.
        if newest.0 < seen.0 {
            *newest = seen;
        }
        seen.0
    }

    /// The version at a revision; `None` unless it is the newest that was seen.
    pub fn at(&self, key: Key, revision: Revision) -> Option<i32> {
        let (newest, version) = self.0.get(&key)?;
        (*newest == revision).then_some(*version)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A node, as ZooKeeper's servers keep it.
    struct Node {
        mzxid: i64,
        version: i32,
        /// Newer servers leave out [`ANY`] (ZOOKEEPER-4743).
        skips: bool,
    }

    impl Node {
        /// `false`: bad version.
        fn set(&mut self, expected: i32) -> bool {
            if expected != ANY && expected != self.version {
                return false;
            }
            self.version = self.version.wrapping_add(1);
            if self.skips && self.version == ANY {
                self.version = 0;
            }
            true
        }

        fn swap(&mut self, step: Step) -> bool {
            // Whatever else the ensemble has written meanwhile.
            self.mzxid += 3;
            match step {
                Step::Set(version) => self.set(version),
                Step::SetTwice(version) => self.set(version) && self.set(ANY),
                Step::Impossible => false,
            }
        }
    }

    /// Two managers swap one record around every place where its version is odd: of two that expect
    /// the same revision one wins, and revisions grow.
    #[test]
    fn swaps_go_on_when_versions_wrap() {
        for skips in [false, true] {
            for start in [0, i32::MAX - 5, i32::MIN, -8] {
                let mut node = Node {
                    mzxid: 7 << 32,
                    version: start,
                    skips,
                };
                let mut ends = [Versions::default(), Versions::default()];
                let mut last = 0;
                for round in 0..20 {
                    let seen = ends
                        .each_mut()
                        .map(|end| end.saw(Key::LeaderRecord, node.mzxid, node.version));
                    assert_eq!(seen[0], seen[1]);
                    assert!(seen[0] > last, "round {round} from {start}");
                    last = seen[0];
                    let steps = ends.each_ref().map(|end| {
                        let version = end.at(Key::LeaderRecord, last).expect("the newest");
                        assert_eq!(version, node.version, "round trip");
                        Step::from(version)
                    });
                    assert!(node.swap(steps[0]), "round {round} from {start}");
                    assert!(!node.swap(steps[1]), "round {round} from {start}");
                    assert_ne!(node.version, ANY);
                }
            }
        }
    }

    #[test]
    fn what_is_older_does_not_take_the_place_of_what_is_newer() {
        let mut versions = Versions::default();
        let key = Key::Configuration;
        let old = versions.saw(key, 10, i32::MAX);
        let new = versions.saw(key, 12, i32::MIN);
        assert_eq!(versions.saw(key, 10, i32::MAX), old);
        assert!(old < new);
        assert_eq!(versions.at(key, new), Some(i32::MIN));
        assert_eq!(versions.at(key, old), None);
        assert_eq!(versions.at(Key::LeaderRecord, new), None);
        assert_eq!(Step::from(ANY), Step::Impossible);
    }
}

//! Comparing whom the replicas' configurations name as founders. Two lists of founders would have
//! two majorities, so that nothing is founded or recovered while they differ.

use std::collections::BTreeMap;

use cyclone_wire::bootstrap::Report;

/// Two configurations that name different founders of one cluster.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct FoundersDiffer {
    own: Vec<u64>,
    peer: u64,
    theirs: Vec<u64>,
}

impl FoundersDiffer {
    pub(super) fn log(&self) {
        let FoundersDiffer { own, peer, theirs } = self;
        tracing::error!(
            ?own,
            peer,
            ?theirs,
            "this replica was started with --bootstrap and the founders {own:?} in its configuration, \
             and replica {peer} names {theirs:?}: it waits. Stop the replica whose [[members]] are \
             wrong, correct them, remove its data directory and log region, and start it again"
        );
    }
}

fn sorted(ids: &[u64]) -> Vec<u64> {
    let mut ids = ids.to_vec();
    ids.sort_unstable();
    ids
}

/// A replica whose founders are others than `own`. Once an entry has changed the members of the
/// cluster the log decides, and configurations may list the new ones.
pub(super) fn differ(own: &[u64], reports: &BTreeMap<u64, Report>) -> Option<FoundersDiffer> {
    let mut logs = reports.values().flat_map(|report| &report.logs);
    if logs.any(|log| log.members_since > 0) {
        return None;
    }
    let own = sorted(own);
    let differs = |(peer, report): (&u64, &Report)| {
        let theirs = sorted(&report.logs.first()?.members.as_ref()?.voters);
        (theirs != own).then(|| FoundersDiffer {
            own: own.clone(),
            peer: *peer,
            theirs,
        })
    };
    reports.iter().find_map(differs)
}

#[cfg(test)]
mod tests {
    use cyclone_wire::bootstrap::{LogReport, Phase};
    use cyclone_wire::raftmsg::Members;

    use super::*;

    fn report(voters: Option<&[u64]>, members_since: u64) -> Report {
        Report {
            wants_answer: false,
            phase: Phase::New,
            incarnation: 1,
            nonce: 1,
            answers: 0,
            founders: Vec::new(),
            logs: vec![LogReport {
                members_since,
                members: voters.map(Members::of_voters),
                ..LogReport::default()
            }],
            record: Vec::new(),
        }
    }

    #[test]
    fn lists_are_compared_until_an_entry_has_changed_the_members() {
        let same = report(Some(&[3, 1, 2]), 0);
        let joins = report(None, 0);
        let of = |reports: [(u64, Report); 2]| differ(&[1, 2, 3], &BTreeMap::from(reports));
        assert_eq!(of([(2, same.clone()), (4, joins)]), None);
        let expected = FoundersDiffer {
            own: vec![1, 2, 3],
            peer: 3,
            theirs: vec![1, 3],
        };
        let other = report(Some(&[3, 1]), 0);
        assert_eq!(of([(2, same), (3, other.clone())]), Some(expected));
        let changed = report(Some(&[1, 2, 3, 4]), 9);
        assert_eq!(of([(2, changed), (3, other)]), None);
    }
}

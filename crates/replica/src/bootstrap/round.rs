//! The rules by which a cluster is founded, as a function of what the founders have reported
//! (docs/adr/0075). Every founder first *agrees* to a list of founders by their incarnations,
//! durably and for good, and votes only once all others are known to have agreed to the same. So an
//! incarnation that has voted is in the list of every founder that has not lost its storage, and a
//! later incarnation of the same replica learns from any of them that it is not new.
//!
//! | own state | what is known of the others | next |
//! |---|---|---|
//! | new, agreed | one is a member, or recovers and holds entries | recovering |
//! | new, agreed | one has a list with another incarnation of this replica | recovering |
//! | new | one has a list with this incarnation | agreed, to that list |
//! | new | all are new, or recover and hold nothing | agreed, to all incarnations |
//! | agreed | one is a founder, and its list has this incarnation | founded |
//! | agreed | all have agreed to the same list, but for those that recover | founded |

use std::collections::BTreeMap;

use cyclone_wire::bootstrap::{Founder, Phase, Report};

use super::state::State;

/// Who decides.
pub(super) struct LocalReplica<'a> {
    pub(super) id: u64,
    pub(super) incarnation: u64,
    /// The ids of all founders, this replica's included.
    pub(super) founders: &'a [u64],
}

fn incarnation_in(founders: &[Founder], id: u64) -> Option<u64> {
    let mut found = founders.iter().filter(|founder| founder.0 == id);
    found.next().map(|founder| founder.1)
}

fn holds_entries(report: &Report) -> bool {
    report.logs.iter().any(|log| log.last > 0)
}

/// Whether the report shows that the cluster has been founded, and this incarnation was not among
/// the founders.
fn proves_founding(own: &LocalReplica<'_>, report: &Report) -> bool {
    match report.phase {
        Phase::Member => true,
        Phase::Recovering => holds_entries(report),
        Phase::Agreed | Phase::Founded => {
            incarnation_in(&report.founders, own.id) != Some(own.incarnation)
        }
        Phase::New | Phase::Joining => false,
    }
}

/// The state that follows from what is known of the others; `None`: nothing changes.
pub(super) fn next(
    own: &LocalReplica<'_>,
    state: &State,
    reports: &BTreeMap<u64, Report>,
) -> Option<State> {
    if !matches!(state, State::New | State::Agreed(_)) {
        return None;
    }
    if reports.values().any(|report| proves_founding(own, report)) {
        return Some(State::Recovering);
    }
    let others = own.founders.iter().filter(|id| **id != own.id);
    let others: Vec<(u64, Option<&Report>)> = others.map(|id| (*id, reports.get(id))).collect();
    let recovers = |id: u64| {
        reports
            .get(&id)
            .is_some_and(|report| report.phase == Phase::Recovering)
    };
    match state {
        State::New => {
            let listed = reports
                .values()
                .find(|report| matches!(report.phase, Phase::Agreed | Phase::Founded));
            if let Some(report) = listed {
                return Some(State::Agreed(report.founders.clone()));
            }
            let mut founders = vec![(own.id, own.incarnation)];
            for (id, report) in others {
                let is_new =
                    |report: &&Report| matches!(report.phase, Phase::New | Phase::Recovering);
                founders.push((id, report.filter(is_new)?.incarnation));
            }
            founders.sort_unstable();
            Some(State::Agreed(founders))
        }
        State::Agreed(founders) => {
            let is_founder = |report: &Report| report.phase == Phase::Founded;
            if let Some(founder) = reports.values().find(|report| is_founder(report)) {
                return Some(State::Founded(founder.founders.clone()));
            }
            let same = |report: &Report| {
                let differs = |(id, incarnation): &&Founder| {
                    !recovers(*id) && incarnation_in(&report.founders, *id) != Some(*incarnation)
                };
                report.phase == Phase::Agreed && !founders.iter().any(|it| differs(&it))
            };
            let agree =
                |(id, report): (u64, Option<&Report>)| recovers(id) || report.is_some_and(same);
            others
                .into_iter()
                .all(agree)
                .then(|| State::Founded(founders.clone()))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Replica {
        id: u64,
        incarnation: u64,
        state: State,
        reports: BTreeMap<u64, Report>,
        /// It has voted in some life, with the storage of that life.
        voted: bool,
    }

    fn report_of(replica: &Replica) -> Report {
        Report {
            wants_answer: false,
            phase: replica.state.phase(),
            incarnation: replica.incarnation,
            nonce: 0,
            answers: 0,
            founders: replica.state.founders().to_vec(),
            logs: Vec::new(),
            record: Vec::new(),
        }
    }

    fn decide(replica: &mut Replica, founders: &[u64]) {
        let own = LocalReplica {
            id: replica.id,
            incarnation: replica.incarnation,
            founders,
        };
        while let Some(state) = next(&own, &replica.state, &replica.reports) {
            assert_ne!(state, replica.state, "no endless loop");
            replica.state = state;
        }
    }

    fn cluster(count: u64) -> (Vec<u64>, Vec<Replica>) {
        let ids: Vec<u64> = (1..=count).collect();
        let replica = |id: &u64| Replica {
            id: *id,
            incarnation: 100 + id,
            state: State::New,
            reports: BTreeMap::new(),
            voted: false,
        };
        let replicas = ids.iter().map(replica).collect();
        (ids, replicas)
    }

    struct Draw(u64);

    impl Draw {
        fn below(&mut self, bound: usize) -> usize {
            self.0 = self
                .0
                .wrapping_mul(0x5851_f42d_4c95_7f2d)
                .wrapping_add(0x1405_7b7e_f767_814f);
            ((self.0 >> 33) as usize) % bound
        }
    }

    /// Reports are lost, late and doubled; processes restart; a minority loses its storage at any
    /// time. A replica that has voted and lost its storage never becomes a founder again, and the
    /// others found the cluster.
    #[test]
    fn no_wiped_founder_votes_again_and_the_others_go_on() {
        let (mut wiped_voters, mut recovered) = (0, 0);
        for seed in 0..20_000u64 {
            let mut draw = Draw(seed);
            let count = [1, 2, 3, 5][draw.below(4)];
            let (ids, mut replicas) = cluster(count);
            let mut flights: Vec<(usize, u64, Report)> = Vec::new();
            let most_wiped = (count - 1) / 2;
            let (mut wiped, mut had_voted) = (Vec::new(), Vec::new());
            for step in 0..400 {
                let at = draw.below(replicas.len());
                match draw.below(16) {
                    0 => replicas[at].reports.clear(),
                    1 if step < 100
                        && (wiped.len() as u64) < most_wiped
                        && !wiped.contains(&at)
                        && draw.below(4) == 0 =>
                    {
                        wiped.push(at);
                        if replicas[at].voted {
                            wiped_voters += 1;
                            had_voted.push(at);
                        }
                        let replica = &mut replicas[at];
                        replica.incarnation += 1000;
                        replica.state = State::New;
                        replica.voted = false;
                        replica.reports.clear();
                        // What was sent to the process that is gone does not reach the new one.
                        flights.retain(|(to, _, _)| *to != at);
                    }
                    2..=8 => {
                        let to = draw.below(replicas.len());
                        if to != at {
                            flights.push((to, replicas[at].id, report_of(&replicas[at])));
                        }
                    }
                    _ if !flights.is_empty() => {
                        let which = draw.below(flights.len());
                        let (to, from, report) = flights[which].clone();
                        if draw.below(4) > 0 {
                            flights.swap_remove(which);
                        }
                        replicas[to].reports.insert(from, report);
                    }
                    _ => {}
                }
                let replica = &mut replicas[at];
                decide(replica, &ids);
                if replica.state.is_full() {
                    assert!(!had_voted.contains(&at), "seed {seed}: {at} votes again");
                    replica.voted = true;
                }
            }
            // Now everybody hears everybody.
            for _ in 0..6 {
                let reports: Vec<Report> = replicas.iter().map(report_of).collect();
                for replica in &mut replicas {
                    for (id, report) in ids.iter().zip(&reports) {
                        if *id != replica.id {
                            replica.reports.insert(*id, report.clone());
                        }
                    }
                    decide(replica, &ids);
                }
            }
            for (at, replica) in replicas.iter().enumerate() {
                let full = replica.state.is_full();
                assert!(
                    full || wiped.contains(&at),
                    "seed {seed}: {at} is {:?}",
                    replica.state
                );
                recovered += u64::from(!full);
            }
        }
        assert!(
            wiped_voters > 100 && recovered > 100,
            "{wiped_voters} {recovered}"
        );
    }

    #[test]
    fn a_founder_that_hears_late_is_a_founder_all_the_same() {
        let (ids, mut replicas) = cluster(3);
        // All three have met; 1 and 2 are founders before 3 has heard that they agreed.
        let exchange = |replicas: &mut Vec<Replica>, pairs: &[(usize, usize)]| {
            for &(from, to) in pairs {
                let report = report_of(&replicas[from]);
                let id = replicas[from].id;
                replicas[to].reports.insert(id, report);
                decide(&mut replicas[to], &[1, 2, 3]);
            }
        };
        exchange(
            &mut replicas,
            &[
                (0, 2),
                (1, 2),
                (1, 0),
                (2, 0),
                (0, 1),
                (2, 1),
                (1, 0),
                (2, 0),
            ],
        );
        assert!(matches!(replicas[0].state, State::Founded(_)));
        assert!(matches!(replicas[2].state, State::Agreed(_)));
        exchange(&mut replicas, &[(0, 2)]);
        assert_eq!(replicas[2].state, replicas[0].state);
        assert_eq!(ids.len(), replicas[2].state.founders().len());
    }

    #[test]
    fn a_replica_is_not_new_where_another_has_history() {
        let own = LocalReplica {
            id: 1,
            incarnation: 7,
            founders: &[1, 2, 3],
        };
        let (_, replicas) = cluster(3);
        let mut report = report_of(&replicas[1]);
        report.phase = Phase::Member;
        let reports = BTreeMap::from([(2, report.clone())]);
        assert_eq!(next(&own, &State::New, &reports), Some(State::Recovering));
        report.phase = Phase::Founded;
        report.founders = vec![(1, 6), (2, 102), (3, 103)];
        let reports = BTreeMap::from([(2, report)]);
        assert_eq!(next(&own, &State::New, &reports), Some(State::Recovering));
        // Alone it waits.
        assert_eq!(next(&own, &State::New, &BTreeMap::new()), None);
        let alone = LocalReplica {
            id: 1,
            incarnation: 7,
            founders: &[1],
        };
        let agreed = next(&alone, &State::New, &BTreeMap::new());
        assert_eq!(agreed, Some(State::Agreed(vec![(1, 7)])));
    }
}

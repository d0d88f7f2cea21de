//! Whether a gang is applied (cyclone §5.1): a function of what the logs hold, never of time.
//!
//! A gang has an entry in each participant's log, all under one nonce. Each log casts a vote, by
//! what comes first in it: the gang's part, an abort entry, or an entry of a term above the one
//! that the coordinator led it in. The gang is applied iff every vote is a part.
//!
//! A log stands still at a gang's entry until enough is known. Then
//!
//! - with a part or an abort entry in every log, all of them go on *together*: one write moves
//!   every participant's applied index and term, whether the gang has an effect or not;
//! - with a log whose term has moved past the view without an entry of the gang, the gang has no
//!   effect and every other log may go on alone. The evidence is the applied term of that log,
//!   which never goes back, so it cannot be lost by trimming, by a crash, or by the installation of
//!   a checkpoint.
//!
//! So an entry of the gang that has been passed *was* passed by that rule, and what is left decides
//! alike whenever and wherever it is evaluated.
//= cyclone §5.1

use std::collections::VecDeque;

use cyclone_wire::gang::{Head, Kind};
use cyclone_wire::planted::{self, Bug};

/// What is to become of the gang at which a log stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Not decided yet.
    Wait,
    /// It has no effect; this log passes its entry alone.
    Skip,
    /// All participants pass their entries in one step.
    Together {
        /// Whether the gang has its effect in that step.
        apply: bool,
        /// Log and index of each entry, ascending.
        entries: Vec<(u16, u64)>,
    },
}

#[derive(Clone, Debug, Default)]
struct Log {
    /// Term of the last committed entry known, or of the last applied one.
    term: u64,
    /// Committed entries of gangs that have not been passed, in order.
    waiting: VecDeque<(u64, Head)>,
}

/// A log's vote on a gang.
enum Vote {
    Part(u64),
    Abort(u64),
    /// The log's term has moved on.
    Moved,
    None,
}

/// What one replica knows of the gangs in its logs' committed and not yet applied entries.
#[derive(Clone, Debug)]
pub struct GangTable {
    logs: Vec<Log>,
}

impl GangTable {
    /// For logs whose last applied entries have these terms.
    pub fn new(applied_terms: &[u64]) -> GangTable {
        let log = |term: &u64| Log {
            term: *term,
            waiting: VecDeque::new(),
        };
        GangTable {
            logs: applied_terms.iter().map(log).collect(),
        }
    }

    /// Begins anew with a log whose last applied entry has this term: a checkpoint was installed.
    /// The entries behind it are to be reported again.
    pub fn reset(&mut self, log: usize, applied_term: u64) {
        self.logs[log] = Log {
            term: applied_term,
            waiting: VecDeque::new(),
        };
    }

    /// A log has committed another entry; `head` if it belongs to a gang. Returns whether the log
    /// must stand still there. An entry that its own view does not know is none of a gang.
    pub fn committed(&mut self, log: usize, index: u64, term: u64, head: Option<Head>) -> bool {
        let book = &mut self.logs[log];
        book.term = book.term.max(term);
        let Some(head) = head.filter(|head| head.term_of(log as u16) == Some(term)) else {
            return false;
        };
        let twice = |(_, other): &(u64, Head)| other.nonce == head.nonce;
        if book.waiting.iter().any(twice) {
            return false;
        }
        book.waiting.push_back((index, head));
        true
    }

    /// The index of the first entry at which a log must stand still.
    pub fn stop(&self, log: usize) -> Option<u64> {
        self.logs[log].waiting.front().map(|(index, _)| *index)
    }

    /// A log has passed an entry.
    pub fn passed(&mut self, log: usize, index: u64) {
        let waiting = &mut self.logs[log].waiting;
        while waiting.front().is_some_and(|(first, _)| *first <= index) {
            waiting.pop_front();
        }
    }

    /// What is to become of the first gang at which this log stands.
    pub fn decide(&self, log: usize) -> Decision {
        let Some((_, head)) = self.logs[log].waiting.front() else {
            return Decision::Wait;
        };
        let (mut apply, mut known) = (true, true);
        let mut entries = Vec::with_capacity(head.view.len());
        for &(member, term) in &head.view {
            match self.vote(member, term, head) {
                Vote::Part(index) => entries.push((member, index)),
                Vote::Abort(index) => {
                    apply = false;
                    entries.push((member, index));
                }
                Vote::Moved if planted::has(Bug::GangViewIgnored) => known = false,
                Vote::Moved => return Decision::Skip,
                Vote::None => known = false,
            }
        }
        match known {
            true => Decision::Together { apply, entries },
            false => Decision::Wait,
        }
    }

    fn vote(&self, member: u16, term: u64, head: &Head) -> Vote {
        // A view that names a log which does not exist cannot be of this cluster.
        let Some(log) = self.logs.get(usize::from(member)) else {
            return Vote::Moved;
        };
        let found = log
            .waiting
            .iter()
            .find(|(_, other)| other.nonce == head.nonce);
        match found {
            Some((index, other)) if other.view == head.view => match other.kind {
                Kind::Part => Vote::Part(*index),
                Kind::Abort => Vote::Abort(*index),
            },
            Some(_) => Vote::Moved,
            None if log.term > term => Vote::Moved,
            None => Vote::None,
        }
    }
}

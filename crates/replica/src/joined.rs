//! Reads over several logs: each of them confirms leadership and reaches what was committed when
//! the read came; then the store is asked once, so that the answer is of one moment.

use std::collections::HashMap;

use crate::logset::LogSet;
use crate::node::{Node, NodeError};
use crate::reads::{Read, ReadBasis};
use crate::requests::{Origin, Outcome};
use crate::slow::LeadershipEpoch;

struct Joined {
    origin: Origin,
    query: Vec<u8>,
    /// Logs that are not there yet.
    missing_logs: usize,
    /// When it came.
    leadership_epoch: LeadershipEpoch,
}

/// The reads over several logs that wait.
#[derive(Default)]
pub(crate) struct JoinedReads {
    next: u64,
    waiting: HashMap<u64, Joined>,
}

impl Node {
    /// Takes in a read that all `logs` must be ready for. The caller has been admitted to them.
    pub(crate) fn join_read(
        &mut self,
        logs: LogSet,
        origin: Origin,
        query: Vec<u8>,
        how: ReadBasis,
    ) {
        self.drain_requests(logs);
        // A lease would have to be checked again for all of them.
        let how = if how == ReadBasis::Lease {
            ReadBasis::Index
        } else {
            how
        };
        self.joined.next += 1;
        let number = self.joined.next;
        let missing_logs = logs.len();
        let joined = Joined {
            origin,
            query,
            missing_logs,
            leadership_epoch: self.leadership_epoch(),
        };
        self.joined.waiting.insert(number, joined);
        for log in logs.iter() {
            let barrier = self.logs[log].barrier();
            let part = Read::new(Origin::Joined(number), Vec::new(), barrier, how);
            self.logs[log].reads.submit(part);
        }
    }

    /// A read's log is ready: asks the store, once all of its logs are.
    pub(crate) fn execute_read(&mut self, log: usize, read: Read) -> Result<(), NodeError> {
        let Origin::Joined(number) = read.origin else {
            return self.ask_store(Some(log), read);
        };
        let Some(joined) = self.joined.waiting.get_mut(&number) else {
            return Ok(());
        };
        joined.missing_logs -= 1;
        if joined.missing_logs > 0 {
            return Ok(());
        }
        let Some(joined) = self.joined.waiting.remove(&number) else {
            return Ok(());
        };
        // One log may have a new leader already, or have had one for a short time, whose entries
        // this replica applies: what it received later than this read must not be seen without what
        // others received in between.
        let is_bound = !matches!(read.how, ReadBasis::Weak { .. });
        let is_over = is_bound && !self.is_current(&joined.leadership_epoch, None);
        let refused = self.check_leadership().err();
        if let Some(refusal) = refused.or(is_over.then_some(Outcome::Busy)) {
            self.answers.push((joined.origin, refusal));
            return Ok(());
        }
        self.ask_store(None, Read::new(joined.origin, joined.query, 0, read.how))
    }

    /// One log of a read over several has failed; the first one to do so answers for all. `None`
    /// for the others.
    pub(crate) fn answers_for(&mut self, origin: Origin) -> Option<Origin> {
        match origin {
            Origin::Joined(number) => {
                let joined = self.joined.waiting.remove(&number)?;
                Some(joined.origin)
            }
            other => Some(other),
        }
    }
}

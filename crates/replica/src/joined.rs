//! Reads over several logs: each of them confirms leadership and reaches what was committed when the read came; then the
//! store is asked once, so that the answer is of one moment.

use std::collections::HashMap;
use std::sync::Arc;

use cyclone_store::{ApplyError, Mode};
use cyclone_wire::command::Query;

use crate::logset::LogSet;
use crate::node::{Done, Node, NodeError};
use crate::reads::Read;
use crate::requests::{Origin, Outcome};

struct Joined {
    origin: Origin,
    query: Vec<u8>,
    /// Logs that are not there yet.
    left: usize,
}

/// The reads over several logs that wait.
#[derive(Default)]
pub(crate) struct JoinedReads {
    next: u64,
    waiting: HashMap<u64, Joined>,
}

impl Node {
    /// Takes in a read that all `logs` must be ready for. The caller has been admitted to them.
    pub(crate) fn join_read(&mut self, logs: LogSet, origin: Origin, query: Vec<u8>) {
        self.joined.next += 1;
        let number = self.joined.next;
        let left = logs.len();
        let joined = Joined {
            origin,
            query,
            left,
        };
        self.joined.waiting.insert(number, joined);
        for log in logs.iter() {
            let barrier = self.logs[log].barrier();
            self.logs[log].reads.submit(Read {
                origin: Origin::Joined(number),
                query: Vec::new(),
                barrier,
            });
        }
    }

    /// A read's log is ready: asks the store, once all of its logs are.
    pub(crate) fn execute_read(&mut self, read: Read) -> Result<(), NodeError> {
        let Origin::Joined(number) = read.origin else {
            return self.ask_store(read.origin, read.query);
        };
        let Some(joined) = self.joined.waiting.get_mut(&number) else {
            return Ok(());
        };
        joined.left -= 1;
        if joined.left > 0 {
            return Ok(());
        }
        let Some(joined) = self.joined.waiting.remove(&number) else {
            return Ok(());
        };
        // One log may have a new leader already, whose entries this replica applies: what it was told later than this
        // read must not be seen without what others were told in between.
        if let Err(refusal) = self.check_leadership() {
            self.answers.push((joined.origin, refusal));
            return Ok(());
        }
        self.ask_store(joined.origin, joined.query)
    }

    fn ask_store(&mut self, origin: Origin, query: Vec<u8>) -> Result<(), NodeError> {
        // It was decoded when it was taken in.
        let Ok(decoded) = Query::decode(&query) else {
            return Ok(());
        };
        match self.store.query(&decoded, Mode::NonBlocking) {
            Ok(reply) => self.answers.push((origin, Outcome::Done(reply))),
            Err(ApplyError::WouldBlock) => {
                let store = Arc::clone(&self.store);
                self.counters.slow_reads += 1;
                self.workers.run(move || {
                    let result = match Query::decode(&query) {
                        Ok(query) => store.query(&query, Mode::Blocking),
                        Err(_) => Err(ApplyError::WouldBlock),
                    };
                    Done::Read { origin, result }
                });
            }
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// One log of a read over several has failed; the first one to do so answers for all. `None` for the others.
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

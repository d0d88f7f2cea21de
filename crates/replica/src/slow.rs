//! Reads that a worker carries out, because the store would have to wait for its disk or to copy much. Few are with the workers at a
//! time: each may hold a long answer in memory.

use std::collections::VecDeque;
use std::sync::Arc;

use cyclone_store::{ApplyError, Mode};
use cyclone_wire::command::Query;
use cyclone_wire::reply::Reply;

use crate::node::{Done, Node, NodeError};
use crate::reads::Read;
use crate::requests::{Origin, Outcome, Ticket};

/// Reads that are with the workers at a time.
const AT_ONCE: usize = 4;
/// Hashes of the whole state that are computed at a time; more are refused.
const DIGESTS_AT_ONCE: usize = 1;
/// Reads that wait for them; more are refused.
const MOST_WAITING: usize = 8192;
/// Bytes that one step's reads may answer; those beyond are left to workers, so that the step stays short.
const STEP_BYTES: usize = 1 << 20;

/// How much a step of a loop has read.
#[derive(Default)]
pub(crate) struct Portion {
    bytes: usize,
}

impl Portion {
    /// Whether it is as much as it may be.
    pub(crate) fn is_spent(&self) -> bool {
        self.bytes >= STEP_BYTES
    }

    /// The step has read this.
    pub(crate) fn spend(&mut self, reply: &Reply) {
        self.bytes += length(reply);
    }
}

/// A read for a worker.
pub(crate) struct SlowRead {
    /// The one log that it is about, if it is one.
    pub(crate) log: Option<usize>,
    pub(crate) read: Read,
    /// Of all logs when it was asked, where no other leader's entries may be seen meanwhile.
    pub(crate) terms: Option<Vec<u64>>,
}

/// The reads that workers carry out, and how much the loop itself has read.
#[derive(Default)]
pub(crate) struct SlowReads {
    running: usize,
    digests: usize,
    waiting: VecDeque<SlowRead>,
    step_us: u64,
    portion: Portion,
}

impl SlowReads {
    /// How much this step has read, which began then.
    pub(crate) fn portion(&mut self, step_us: u64) -> &mut Portion {
        if self.step_us != step_us {
            (self.step_us, self.portion) = (step_us, Portion::default());
        }
        &mut self.portion
    }

    /// Whether another read may wait.
    pub(crate) fn has_room(&self) -> bool {
        self.waiting.len() < MOST_WAITING
    }
}

/// Bytes of values in a reply.
fn length(reply: &Reply) -> usize {
    match reply {
        Reply::Bytes(bytes) => bytes.len(),
        Reply::Array(parts) => parts.iter().map(length).sum(),
        _ => 0,
    }
}

impl Node {
    /// Leaves a read to a worker.
    pub(crate) fn read_slowly(&mut self, slow: SlowRead) {
        self.counters.slow_reads += 1;
        if !self.slow.has_room() {
            self.answers.push((slow.read.origin, Outcome::Busy));
            return;
        }
        self.slow.waiting.push_back(slow);
        self.run_slow_reads();
    }

    /// A worker has carried one out.
    pub(crate) fn slow_read_done(&mut self) {
        self.slow.running -= 1;
        self.run_slow_reads();
    }

    fn run_slow_reads(&mut self) {
        while self.slow.running < AT_ONCE
            && let Some(SlowRead { log, read, terms }) = self.slow.waiting.pop_front()
        {
            self.slow.running += 1;
            let store = Arc::clone(&self.store);
            self.workers.run_read(move || {
                let result = match Query::decode(&read.query) {
                    Ok(query) => store.query_at(&query, read.now_ms, Mode::Blocking),
                    // It was decoded when it was taken in.
                    Err(_) => Err(cyclone_store::ApplyError::WouldBlock),
                };
                Done::Read {
                    log,
                    read,
                    terms,
                    result,
                }
            });
        }
    }

    /// Computes the state's hash on a worker; the outcome comes back under `ticket`.
    pub fn digest(&mut self, ticket: Ticket) {
        if self.slow.digests >= DIGESTS_AT_ONCE {
            self.answers.push((Origin::Local(ticket), Outcome::Busy));
            return;
        }
        self.slow.digests += 1;
        let store = Arc::clone(&self.store);
        self.workers.run_read(move || Done::Digest {
            ticket,
            result: store.digest(),
        });
    }

    /// A worker has computed one.
    pub(crate) fn digest_done(
        &mut self,
        ticket: Ticket,
        result: Result<String, ApplyError>,
    ) -> Result<(), NodeError> {
        self.slow.digests -= 1;
        let outcome = match result {
            Err(ApplyError::NoSpace(_)) => Outcome::Busy,
            result => Outcome::Done(Reply::Bytes(result?.into_bytes())),
        };
        self.completions.push((ticket, outcome));
        Ok(())
    }

    /// Nobody waits for these reads of this process any more: those that have not begun are dropped. They get no outcome.
    pub fn forget_reads(&mut self, gone: &[Ticket]) {
        if self.slow.waiting.is_empty() {
            return;
        }
        let gone: std::collections::HashSet<Ticket> = gone.iter().copied().collect();
        let is_wanted = |slow: &SlowRead| !matches!(slow.read.origin, Origin::Local(ticket) if gone.contains(&ticket));
        self.slow.waiting.retain(is_wanted);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_reads_so_much_and_the_next_one_again() {
        let mut slow = SlowReads::default();
        let values = |bytes| Reply::Array(vec![Reply::Nil, Reply::Bytes(vec![0; bytes])]);
        assert!(!slow.portion(5).is_spent());
        slow.portion(5).spend(&values(STEP_BYTES - 1));
        assert!(!slow.portion(5).is_spent());
        slow.portion(5).spend(&values(1));
        assert!(slow.portion(5).is_spent());
        assert!(!slow.portion(6).is_spent());
    }
}

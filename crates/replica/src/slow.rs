//! Reads that a worker carries out, because the store would have to wait for its disk or to copy
//! much. Few are with the workers at a time: each may hold a long answer in memory. Those that walk
//! through all keys take turns, so that the others never wait for two.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use cyclone_store::{ApplyError, Mode, StateMachine};
use cyclone_wire::command::Query;
use cyclone_wire::reply::Reply;

use crate::node::{Done, Node, NodeError};
use crate::reads::Read;
use crate::requests::{Origin, Outcome, Ticket};

/// Reads that are with the workers at a time.
const AT_ONCE: usize = 4;
/// Those of them that walk through everything.
pub(crate) const WALKS_AT_ONCE: usize = 1;
const _: () = assert!(WALKS_AT_ONCE < AT_ONCE, "others go on beside walks");
/// Hashes of the whole state that wait or are computed at a time; more are refused.
const DIGESTS_AT_ONCE: usize = 1;
/// Reads that wait, of walks and of others each; more are refused.
const MOST_WAITING: usize = 8192;
/// Bytes of their queries, of each likewise: 256 MiB together.
const MOST_WAITING_BYTES: usize = 128 << 20;
/// Keys that a scan visits without being taken for a walk: as many as the Redis port lets it.
const LONGEST_PAGE: u32 = 100_000;
/// Bytes that one step's reads may answer; those beyond are left to workers, so that the step stays
/// short.
const STEP_BYTES: usize = 1 << 20;

/// How much a step of a loop has read.
#[derive(Default)]
pub(crate) struct ReadBudget {
    bytes: usize,
}

impl ReadBudget {
    /// Whether it is as much as it may be.
    pub(crate) fn is_exhausted(&self) -> bool {
        self.bytes >= STEP_BYTES
    }

    /// The step has read this.
    pub(crate) fn consume(&mut self, reply: &Reply) {
        self.bytes += length(reply);
    }
}

/// What this replica was when a read was let to the store. As long as it still is, the store holds
/// nothing of another leader's, and all that this one had applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LeadershipEpoch {
    /// Of all logs.
    pub(crate) terms: Vec<u64>,
    /// How many checkpoints it had installed: each may have taken the store back.
    pub(crate) installed: u64,
}

/// A read for a worker.
pub(crate) struct SlowRead {
    /// The one log that it is about, if it is one.
    pub(crate) log: Option<usize>,
    pub(crate) read: Read,
    /// When it was asked, where that matters.
    pub(crate) leadership_epoch: Option<LeadershipEpoch>,
}

/// What a worker does for a client.
enum Job {
    Read(SlowRead),
    /// Hashes the whole state.
    Digest(Ticket),
}

impl Job {
    /// Whether it walks through everything, however much that is.
    fn is_walk(&self) -> bool {
        let Job::Read(slow) = self else {
            return true;
        };
        match Query::decode(&slow.read.query) {
            Ok(Query::DbSize | Query::Keys { .. }) => true,
            Ok(Query::Scan { count, .. }) => count > LONGEST_PAGE,
            _ => false,
        }
    }

    /// Bytes of its query.
    fn bytes(&self) -> usize {
        match self {
            Job::Read(slow) => slow.read.query.len(),
            Job::Digest(_) => 0,
        }
    }

    /// Who waits for it, if that is somebody in this process.
    fn ticket(&self) -> Option<Ticket> {
        match self {
            Job::Digest(ticket) => Some(*ticket),
            Job::Read(slow) => match slow.read.origin {
                Origin::Local(ticket) => Some(ticket),
                _ => None,
            },
        }
    }

    fn run(self, store: &dyn StateMachine) -> Done {
        match self {
            Job::Digest(ticket) => Done::Digest {
                ticket,
                result: store.digest(),
            },
            Job::Read(SlowRead {
                log,
                read,
                leadership_epoch,
            }) => {
                let result = match Query::decode(&read.query) {
                    Ok(query) => store.query_at(&query, read.now_ms, Mode::Blocking),
                    // It was decoded when it was taken in.
                    Err(_) => Err(ApplyError::Cancelled),
                };
                Done::Read {
                    log,
                    read,
                    leadership_epoch,
                    result,
                }
            }
        }
    }
}

/// What no worker has begun with, in order.
#[derive(Default)]
struct JobQueue {
    jobs: VecDeque<Job>,
    /// Bytes of all their queries.
    bytes: usize,
}

impl JobQueue {
    /// Whether another one may wait. Alone it may be of any length.
    fn has_room(&self) -> bool {
        self.jobs.len() < MOST_WAITING && self.bytes < MOST_WAITING_BYTES
    }

    fn push(&mut self, job: Job) {
        self.bytes += job.bytes();
        self.jobs.push_back(job);
    }

    fn pop(&mut self) -> Option<Job> {
        let job = self.jobs.pop_front()?;
        self.bytes -= job.bytes();
        Some(job)
    }
}

/// The reads that workers carry out, and how much the loop itself has read.
#[derive(Default)]
pub(crate) struct SlowReads {
    running: usize,
    /// Hashes that wait or are computed.
    digests: usize,
    /// Every walk in progress holds it as well.
    walking: Arc<()>,
    walks: JobQueue,
    others: JobQueue,
    step_us: u64,
    read_budget: ReadBudget,
}

impl SlowReads {
    /// How much this step has read, which began then.
    pub(crate) fn read_budget(&mut self, step_us: u64) -> &mut ReadBudget {
        if self.step_us != step_us {
            (self.step_us, self.read_budget) = (step_us, ReadBudget::default());
        }
        &mut self.read_budget
    }

    /// Where it is to wait.
    fn queue_for(&mut self, job: &Job) -> &mut JobQueue {
        match job.is_walk() {
            true => &mut self.walks,
            false => &mut self.others,
        }
    }

    /// What a worker may begin with; with it, if it is a walk, what it holds until it is over.
    fn next(&mut self) -> Option<(Job, Option<Arc<()>>)> {
        if self.running >= AT_ONCE {
            return None;
        }
        let may_walk = Arc::strong_count(&self.walking) <= WALKS_AT_ONCE;
        let walk = if may_walk { self.walks.pop() } else { None };
        let next = match walk {
            Some(walk) => (walk, Some(Arc::clone(&self.walking))),
            None => (self.others.pop()?, None),
        };
        self.running += 1;
        Some(next)
    }

    /// Drops what these have waited for.
    fn forget(&mut self, gone: &HashSet<Ticket>) {
        for waiting in [&mut self.walks, &mut self.others] {
            let (mut bytes, mut digests) = (0, 0);
            waiting.jobs.retain(|job| {
                let is_wanted = job.ticket().is_none_or(|ticket| !gone.contains(&ticket));
                if !is_wanted {
                    bytes += job.bytes();
                    digests += usize::from(matches!(job, Job::Digest(_)));
                }
                is_wanted
            });
            waiting.bytes -= bytes;
            self.digests -= digests;
        }
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
    pub(crate) fn defer_to_worker(&mut self, slow: SlowRead) {
        self.counters.slow_reads += 1;
        let origin = slow.read.origin;
        let job = Job::Read(slow);
        let waiting = self.slow.queue_for(&job);
        if !waiting.has_room() {
            self.answers.push((origin, Outcome::Busy));
            return;
        }
        waiting.push(job);
        self.run_slow_reads();
    }

    /// A worker has carried one out.
    pub(crate) fn slow_read_done(&mut self) {
        self.slow.running -= 1;
        self.run_slow_reads();
    }

    fn run_slow_reads(&mut self) {
        while let Some((job, walking)) = self.slow.next() {
            let store = Arc::clone(&self.store);
            self.workers.run_read(move || {
                let done = job.run(&*store);
                // Before the loop hears of it, which then looks whether another walk may begin.
                drop(walking);
                done
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
        self.slow.walks.push(Job::Digest(ticket));
        self.run_slow_reads();
    }

    /// A worker has computed one.
    pub(crate) fn digest_done(
        &mut self,
        ticket: Ticket,
        result: Result<String, ApplyError>,
    ) -> Result<(), NodeError> {
        self.slow.digests -= 1;
        self.slow_read_done();
        let origin = Origin::Local(ticket);
        match result {
            Ok(digest) => {
                let reply = Reply::Bytes(digest.into_bytes());
                self.answers.push((origin, Outcome::Done(reply)));
                Ok(())
            }
            Err(error) => self.read_refused(origin, error),
        }
    }

    /// No caller of this process waits for these reads any more: those that have not begun are
    /// dropped. They get no outcome.
    pub fn forget_reads(&mut self, gone: &[Ticket]) {
        if self.slow.walks.jobs.is_empty() && self.slow.others.jobs.is_empty() {
            return;
        }
        self.slow.forget(&gone.iter().copied().collect());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reads::ReadBasis;

    fn job(ticket: Ticket, query: Vec<u8>) -> Job {
        Job::Read(SlowRead {
            log: None,
            read: Read::new(Origin::Local(ticket), query, 0, ReadBasis::Index),
            leadership_epoch: None,
        })
    }

    fn push(slow: &mut SlowReads, job: Job) {
        slow.queue_for(&job).push(job);
    }

    /// Whose turn it is, and what a walk holds.
    fn next(slow: &mut SlowReads) -> Option<(Ticket, Option<Arc<()>>)> {
        let (job, walking) = slow.next()?;
        Some((job.ticket()?, walking))
    }

    /// Two that counted the keys had both readers, and reads of a single value from the disk waited
    /// for them.
    #[test]
    fn walks_take_turns_and_the_others_pass_them() {
        let scan = |count| Query::Scan {
            cursor: 0,
            pattern: None,
            count,
            held: false,
        };
        let mut slow = SlowReads::default();
        for (ticket, query) in (1..).zip([
            Query::DbSize,
            Query::Keys { pattern: b"*" },
            Query::Get { key: b"k" },
            scan(LONGEST_PAGE + 1),
            scan(LONGEST_PAGE),
        ]) {
            let mut bytes = Vec::new();
            query.encode(&mut bytes);
            push(&mut slow, job(ticket, bytes));
        }
        push(&mut slow, Job::Digest(6));

        let (first, walking) = next(&mut slow).expect("a walk");
        assert!(first == 1 && walking.is_some());
        for beside in [3, 5] {
            let (ticket, walking) = next(&mut slow).expect("beside it");
            assert!(ticket == beside && walking.is_none(), "{ticket}");
        }
        assert!(next(&mut slow).is_none(), "the other walks wait");
        drop(walking);
        slow.running = 0;
        for walk in [2, 4, 6] {
            let (ticket, walking) = next(&mut slow).expect("its turn");
            assert!(ticket == walk && walking.is_some(), "{ticket}");
            assert!(next(&mut slow).is_none());
        }
        assert_eq!((slow.walks.bytes, slow.others.bytes), (0, 0));
    }

    #[test]
    fn waiting_queries_are_bounded_in_bytes_and_forgotten_ones_make_room() {
        let mut slow = SlowReads {
            digests: 1,
            running: AT_ONCE,
            ..SlowReads::default()
        };
        // No thread touches their pages.
        let long = |ticket| job(ticket, vec![0; MOST_WAITING_BYTES / 2]);
        for ticket in 1..=2 {
            assert!(slow.others.has_room());
            push(&mut slow, long(ticket));
        }
        push(&mut slow, Job::Digest(3));
        assert!(!slow.others.has_room());
        assert!(slow.walks.has_room(), "those have their own");
        assert!(slow.next().is_none(), "the workers have enough");
        slow.forget(&HashSet::from([1, 3, 4]));
        assert!(slow.others.has_room() && slow.digests == 0);
        slow.running = 0;
        assert_eq!(next(&mut slow).map(|(ticket, _)| ticket), Some(2));
        assert!(slow.next().is_none() && slow.others.bytes == 0);
    }

    #[test]
    fn a_step_reads_so_much_and_the_next_one_again() {
        let mut slow = SlowReads::default();
        let values = |bytes| Reply::Array(vec![Reply::Nil, Reply::Bytes(vec![0; bytes])]);
        assert!(!slow.read_budget(5).is_exhausted());
        slow.read_budget(5).consume(&values(STEP_BYTES - 1));
        assert!(!slow.read_budget(5).is_exhausted());
        slow.read_budget(5).consume(&values(1));
        assert!(slow.read_budget(5).is_exhausted());
        assert!(!slow.read_budget(6).is_exhausted());
    }
}

//! Linearizable reads without a log entry: a burst of reads shares one ReadIndex round; each read
//! then waits until the state machine has applied what was committed when the round began, and
//! every write that its own client had submitted before it.

use std::collections::VecDeque;

use cyclone_wire::planted::{self, Bug};

use crate::lease::Lease;
use crate::requests::Origin;

/// Without an answer for this long another round is asked: datagrams get lost. Twice as long each
/// time in a row, up to [`MOST_DOUBLINGS`] times: the replicas may just be far apart.
const ROUND_TIMEOUT_US: u64 = 25_000;
const MOST_DOUBLINGS: u32 = 6;

/// A confirmed read waits for so long for a store that is seen to make no progress; then it is
/// refused.
const STALL_PATIENCE_US: u64 = 1_000_000;

/// What a read rests on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReadBasis {
    /// A separate round.
    Index,
    /// The lease, if there is one; otherwise a round.
    Lease,
    /// Nothing but the log's entries so far (cyclone §2), waited for until then.
    Weak { until_us: u64 },
}

/// One read, with its query in wire form.
pub(crate) struct Read {
    pub(crate) origin: Origin,
    pub(crate) query: Vec<u8>,
    /// Index of the last entry that held a write submitted before this read.
    pub(crate) barrier: u64,
    pub(crate) how: ReadBasis,
    /// The time by which keys expire for it, once that is settled.
    pub(crate) now_ms: u64,
    /// Since when it was seen to wait for a store that makes no progress; 0: never.
    waits_since_us: u64,
}

impl Read {
    pub(crate) fn new(origin: Origin, query: Vec<u8>, barrier: u64, how: ReadBasis) -> Read {
        Read {
            origin,
            query,
            barrier,
            how,
            now_ms: 0,
            waits_since_us: 0,
        }
    }
}

struct Round {
    context: u64,
    term: u64,
    asked_us: u64,
    reads: Vec<Read>,
}

/// The reads of one physical log, by how far they have come.
pub(crate) struct Reads {
    next_context: u64,
    new: Vec<Read>,
    asked: VecDeque<Round>,
    /// Rounds asked in a row because there was no answer.
    repeated: u32,
    /// Confirmed; waiting for the state machine to reach the index.
    confirmed: VecDeque<(u64, Read)>,
    /// Hoping for the lease.
    leased: Vec<Read>,
    /// Weak ones, by the index they wait for.
    weak: VecDeque<(u64, Read)>,
    waiting: usize,
    pub(crate) lease: Lease,
}

impl Reads {
    /// `salt` distinguishes this boot's contexts from those of an earlier one.
    pub(crate) fn new(salt: u64) -> Self {
        Reads {
            next_context: salt << 32,
            new: Vec::new(),
            asked: VecDeque::new(),
            repeated: 0,
            confirmed: VecDeque::new(),
            leased: Vec::new(),
            weak: VecDeque::new(),
            waiting: 0,
            lease: Lease::default(),
        }
    }

    /// Reads that have been submitted and not been taken or failed.
    pub(crate) fn len(&self) -> usize {
        self.waiting
    }

    pub(crate) fn submit(&mut self, read: Read) {
        self.waiting += 1;
        match read.how {
            ReadBasis::Index => self.new.push(read),
            ReadBasis::Lease => self.leased.push(read),
            //= cyclone §2
            ReadBasis::Weak { .. } => {
                let waits = !planted::has(Bug::WeakReadWithoutWaiting);
                self.weak
                    .push_back((if waits { read.barrier } else { 0 }, read));
            }
        }
    }

    /// Takes back a read that may be executed again once the state machine has reached `index`.
    pub(crate) fn wait_for(&mut self, index: u64, read: Read) {
        self.waiting += 1;
        self.confirmed.push_back((index, read));
    }

    /// Lets reads under the lease go on, to see what is committed; without it they become reads
    /// with a round.
    pub(crate) fn use_lease(&mut self, now_us: u64, term: u64, commit: u64) {
        let holds = self.lease.holds(now_us, term);
        for mut read in self.leased.drain(..) {
            if holds {
                self.confirmed.push_back((commit.max(read.barrier), read));
            } else {
                read.how = ReadBasis::Index;
                self.new.push(read);
            }
        }
    }

    /// Takes the weak reads that have waited for too long.
    pub(crate) fn late(&mut self, now_us: u64) -> Vec<Read> {
        let mut late = Vec::new();
        while let Some((_, read)) = self.weak.pop_front_if(
            |(_, read)| matches!(read.how, ReadBasis::Weak { until_us } if until_us <= now_us),
        ) {
            self.waiting -= 1;
            late.push(read);
        }
        late
    }

    /// The store makes no progress: takes the confirmed reads that have waited for it for too long.
    pub(crate) fn give_up(&mut self, now_us: u64) -> impl Iterator<Item = Read> + use<> {
        for (_, read) in &mut self.confirmed {
            if read.waits_since_us == 0 {
                read.waits_since_us = now_us.max(1);
            }
        }
        let is_late = |(_, read): &mut (u64, Read)| {
            now_us.saturating_sub(read.waits_since_us) >= STALL_PATIENCE_US
        };
        let mut late = Vec::new();
        while let Some((_, read)) = self.confirmed.pop_front_if(is_late) {
            self.waiting -= 1;
            late.push(read);
        }
        late.into_iter()
    }

    /// Starts a round for the new reads, and another one where the last got no answer: it may be
    /// lost. Those before it count all the same when an answer comes after all, or confirm what the
    /// new one has confirmed. `ask` is given the context and says whether the round could be
    /// started.
    pub(crate) fn ask(&mut self, now_us: u64, term: u64, mut ask: impl FnMut(u64) -> bool) {
        let patience_us = ROUND_TIMEOUT_US << self.repeated;
        let late = |round: &Round| now_us.saturating_sub(round.asked_us) >= patience_us;
        let is_late = self.asked.back().is_some_and(late);
        if self.new.is_empty() && !is_late {
            return;
        }
        let context = self.next_context;
        if ask(context) {
            self.next_context += 1;
            if is_late {
                self.repeated = MOST_DOUBLINGS.min(self.repeated + 1);
            }
            self.asked.push_back(Round {
                context,
                term,
                asked_us: now_us,
                reads: std::mem::take(&mut self.new),
            });
        }
    }

    /// A quorum has confirmed the round: what was committed up to `index` is what its reads must
    /// see.
    pub(crate) fn confirm(&mut self, context: u64, index: u64) {
        let Some(position) = self.asked.iter().position(|round| round.context == context) else {
            return;
        };
        self.repeated = 0;
        // A confirmed round confirms the earlier ones: they were asked before it.
        for round in self.asked.drain(..=position) {
            // Those before it were not asked later than they were.
            self.lease.confirmed(round.asked_us, round.term);
            self.confirmed.extend(
                round
                    .reads
                    .into_iter()
                    .map(|read| (index.max(read.barrier), read)),
            );
        }
    }

    /// The log ends here, and everything taken in is in it: no read waits for more.
    pub(crate) fn clamp(&mut self, last: u64) {
        for (index, read) in self.confirmed.iter_mut().chain(&mut self.weak) {
            *index = last.min(*index);
            read.barrier = last.min(read.barrier);
        }
        let asked = self.asked.iter_mut().flat_map(|round| &mut round.reads);
        for read in asked.chain(&mut self.new).chain(&mut self.leased) {
            read.barrier = last.min(read.barrier);
        }
    }

    /// Takes the next read that may be executed, given what has been applied.
    pub(crate) fn take(&mut self, applied: u64) -> Option<Read> {
        let due = |(index, _): &mut (u64, Read)| *index <= applied;
        let next = self.confirmed.pop_front_if(due);
        let (_, read) = next.or_else(|| self.weak.pop_front_if(due))?;
        self.waiting -= 1;
        Some(read)
    }

    /// Leadership is gone: hands back the unconfirmed reads, and the confirmed ones whose barrier
    /// may never come.
    pub(crate) fn fail(&mut self) -> Vec<Read> {
        let mut failed = std::mem::take(&mut self.new);
        failed.extend(self.asked.drain(..).flat_map(|round| round.reads));
        failed.extend(self.confirmed.drain(..).map(|(_, read)| read));
        failed.append(&mut self.leased);
        failed.extend(self.weak.drain(..).map(|(_, read)| read));
        (self.waiting, self.repeated) = (0, 0);
        failed
    }

    /// Whether reads have not been asked for yet: Raft was not ready to confirm any.
    pub(crate) fn is_waiting_to_ask(&self) -> bool {
        !self.new.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(barrier: u64) -> Read {
        Read::new(
            Origin::Local(barrier),
            Vec::new(),
            barrier,
            ReadBasis::Index,
        )
    }

    #[test]
    fn a_weak_read_waits_for_the_log_and_not_without_end() {
        let mut reads = Reads::new(1);
        let weak = |barrier, until_us| Read {
            how: ReadBasis::Weak { until_us },
            ..read(barrier)
        };
        reads.submit(weak(5, 100));
        reads.submit(weak(7, 200));
        reads.ask(0, 1, |_| panic!("no round"));
        assert!(reads.take(4).is_none(), "an entry it must see is missing");
        assert_eq!(reads.take(5).map(|read| read.barrier), Some(5));
        assert!(reads.late(199).is_empty());
        assert_eq!(reads.late(200).len(), 1);
        assert_eq!(reads.len(), 0);
        reads.submit(weak(9, 300));
        assert_eq!(reads.fail().len(), 1);
    }

    #[test]
    fn a_read_does_not_wait_without_end_for_a_store_that_makes_no_progress() {
        let mut reads = Reads::new(1);
        for barrier in [5, 9] {
            reads.wait_for(barrier, read(barrier));
        }
        let late = |reads: &mut Reads, now_us| {
            let late = reads.give_up(now_us);
            late.map(|read| read.barrier).collect::<Vec<u64>>()
        };
        assert!(late(&mut reads, 100).is_empty(), "its time begins here");
        reads.wait_for(7, read(7));
        assert!(late(&mut reads, 99 + STALL_PATIENCE_US).is_empty());
        assert_eq!(reads.take(5).map(|read| read.barrier), Some(5));
        assert_eq!(late(&mut reads, 100 + STALL_PATIENCE_US), [9]);
        assert_eq!(reads.len(), 1);
        assert_eq!(reads.take(7).map(|read| read.barrier), Some(7));
    }

    #[test]
    fn a_read_under_the_lease_needs_no_round_and_renews_none() {
        let mut reads = Reads::new(1);
        reads.lease = Lease::new(16, 1000, 0);
        let leased = |barrier| Read {
            how: ReadBasis::Lease,
            ..read(barrier)
        };
        let mut asked = Vec::new();
        reads.submit(leased(1));
        reads.use_lease(1000, 3, 8);
        reads.ask(1000, 3, |context| {
            asked.push(context);
            true
        });
        assert_eq!(asked.len(), 1, "no lease yet");
        reads.confirm(asked[0], 8);
        assert_eq!(reads.take(8).map(|read| read.how), Some(ReadBasis::Index));
        reads.submit(leased(2));
        reads.use_lease(13_999, 3, 9);
        assert!(reads.take(8).is_none(), "what is committed");
        assert_eq!(reads.take(9).map(|read| read.how), Some(ReadBasis::Lease));
        reads.submit(leased(3));
        reads.use_lease(14_000, 3, 9);
        assert!(
            reads.take(9).is_none(),
            "thirteen ticks after the round was asked"
        );
        assert!(reads.is_waiting_to_ask());
    }

    #[test]
    fn a_read_waits_for_its_round_and_for_earlier_writes() {
        let mut reads = Reads::new(1);
        reads.submit(read(5));
        reads.submit(read(9));
        let mut asked = Vec::new();
        reads.ask(0, 1, |context| {
            asked.push(context);
            true
        });
        assert_eq!(asked.len(), 1, "one round for the burst");
        assert!(reads.take(100).is_none(), "not confirmed yet");
        reads.confirm(asked[0], 7);
        assert!(reads.take(6).is_none(), "commit index of the round");
        assert_eq!(reads.take(7).map(|read| read.barrier), Some(5));
        assert!(reads.take(8).is_none(), "own earlier write");
        assert_eq!(reads.take(9).map(|read| read.barrier), Some(9));
        assert_eq!(reads.len(), 0);
    }

    #[test]
    fn no_read_waits_for_what_is_gone_from_the_end_of_the_log() {
        let mut reads = Reads::new(1);
        let mut asked = Vec::new();
        reads.submit(read(9));
        reads.ask(0, 1, |context| {
            asked.push(context);
            true
        });
        reads.confirm(asked[0], 7);
        reads.submit(Read {
            how: ReadBasis::Weak { until_us: 100 },
            ..read(9)
        });
        reads.submit(read(9));
        reads.clamp(8);
        assert!(reads.take(7).is_none());
        assert!(reads.take(8).is_some() && reads.take(8).is_some());
        reads.ask(0, 2, |context| {
            asked.push(context);
            true
        });
        reads.confirm(asked[1], 7);
        assert!(reads.take(8).is_some());
        assert_eq!(reads.len(), 0);
    }

    /// Asks at these times; answers the contexts.
    fn asked(reads: &mut Reads, times_us: &[u64]) -> Vec<u64> {
        let mut asked = Vec::new();
        for now_us in times_us {
            reads.ask(*now_us, 1, |context| {
                asked.push(context);
                true
            });
        }
        asked
    }

    #[test]
    fn a_lost_round_is_asked_again_under_a_new_context() {
        let mut reads = Reads::new(1);
        reads.submit(read(0));
        let asked = asked(&mut reads, &[0, ROUND_TIMEOUT_US - 1, ROUND_TIMEOUT_US]);
        assert_eq!(asked.len(), 2);
        assert_ne!(asked[0], asked[1]);
        reads.confirm(asked[1], 3);
        assert!(reads.take(3).is_some());
        assert_eq!(reads.len(), 0);
    }

    #[test]
    fn rounds_that_take_longer_than_that_count() {
        let mut reads = Reads::new(1);
        reads.submit(read(0));
        let first = asked(&mut reads, &[0, ROUND_TIMEOUT_US]);
        reads.submit(read(1));
        let second = asked(&mut reads, &[ROUND_TIMEOUT_US + 1]);
        reads.confirm(first[0], 3);
        assert_eq!(reads.take(9).map(|read| read.barrier), Some(0));
        assert!(reads.take(9).is_none(), "asked for after that round");
        reads.confirm(first[1], 4);
        assert!(reads.take(9).is_none(), "and after the repeated one");
        reads.confirm(second[0], 5);
        assert!(reads.take(4).is_none());
        assert_eq!(reads.take(5).map(|read| read.barrier), Some(1));
        assert_eq!(reads.len(), 0);
    }

    #[test]
    fn who_does_not_answer_is_asked_less_and_less() {
        let mut reads = Reads::new(1);
        reads.submit(read(0));
        let every_ms: Vec<u64> = (0..10_000).map(|ms| ms * 1_000).collect();
        let contexts = asked(&mut reads, &every_ms);
        // At 0, 25, 75, 175, 375, 775, 1575, 3175, 4775, 6375, 7975 and 9575 ms.
        assert_eq!(contexts.len(), 12);
        assert_eq!(reads.len(), 1, "the read waits once");
        reads.confirm(contexts[11], 3);
        assert!(reads.take(3).is_some());
        reads.submit(read(0));
        let times = [10_000_000, 10_000_000 + ROUND_TIMEOUT_US];
        assert_eq!(asked(&mut reads, &times).len(), 2, "soon again");
    }
}

//! Linearizable reads without a log entry: a burst of reads shares one ReadIndex round; each read then waits until
//! the state machine has applied what was committed when the round began, and every write that its own client
//! had submitted before it.

use std::collections::VecDeque;

use crate::requests::Origin;

/// A round without an answer for this long is asked again: datagrams get lost.
const ROUND_TIMEOUT_US: u64 = 25_000;

/// One read, with its query in wire form.
pub(crate) struct Read {
    pub(crate) origin: Origin,
    pub(crate) query: Vec<u8>,
    /// Index of the last entry that held a write submitted before this read.
    pub(crate) barrier: u64,
}

struct Round {
    context: u64,
    asked_us: u64,
    reads: Vec<Read>,
}

/// The reads of one physical log, by how far they have come.
pub(crate) struct Reads {
    next_context: u64,
    new: Vec<Read>,
    asked: VecDeque<Round>,
    /// Confirmed; waiting for the state machine to reach the index.
    confirmed: VecDeque<(u64, Read)>,
    waiting: usize,
}

impl Reads {
    /// `salt` distinguishes this boot's contexts from those of an earlier one.
    pub(crate) fn new(salt: u64) -> Self {
        Reads {
            next_context: salt << 32,
            new: Vec::new(),
            asked: VecDeque::new(),
            confirmed: VecDeque::new(),
            waiting: 0,
        }
    }

    /// Reads that have been submitted and not been taken or failed.
    pub(crate) fn len(&self) -> usize {
        self.waiting
    }

    pub(crate) fn submit(&mut self, read: Read) {
        self.new.push(read);
        self.waiting += 1;
    }

    /// Starts a round for the new reads, and again for rounds that got no answer. `ask` is given the context and
    /// says whether the round could be started.
    pub(crate) fn ask(&mut self, now_us: u64, mut ask: impl FnMut(u64) -> bool) {
        let late = |round: &Round| now_us.saturating_sub(round.asked_us) >= ROUND_TIMEOUT_US;
        while self.asked.front().is_some_and(late) {
            if let Some(round) = self.asked.pop_front() {
                self.new.extend(round.reads);
            }
        }
        if self.new.is_empty() {
            return;
        }
        let context = self.next_context;
        if ask(context) {
            self.next_context += 1;
            self.asked.push_back(Round {
                context,
                asked_us: now_us,
                reads: std::mem::take(&mut self.new),
            });
        }
    }

    /// A quorum has confirmed the round: what was committed up to `index` is what its reads must see.
    pub(crate) fn confirm(&mut self, context: u64, index: u64) {
        let Some(position) = self.asked.iter().position(|round| round.context == context) else {
            return;
        };
        // A confirmed round confirms the earlier ones: they were asked before it.
        for round in self.asked.drain(..=position) {
            self.confirmed.extend(
                round
                    .reads
                    .into_iter()
                    .map(|read| (index.max(read.barrier), read)),
            );
        }
    }

    /// Takes the next read that may be executed, given what has been applied.
    pub(crate) fn take(&mut self, applied: u64) -> Option<Read> {
        let (index, _) = self.confirmed.front()?;
        if *index > applied {
            return None;
        }
        self.waiting -= 1;
        self.confirmed.pop_front().map(|(_, read)| read)
    }

    /// Leadership is gone: hands back the unconfirmed reads, and the confirmed ones whose barrier may never come.
    pub(crate) fn fail(&mut self) -> Vec<Read> {
        let mut failed = std::mem::take(&mut self.new);
        failed.extend(self.asked.drain(..).flat_map(|round| round.reads));
        failed.extend(self.confirmed.drain(..).map(|(_, read)| read));
        self.waiting = 0;
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
        Read {
            origin: Origin::Local(barrier),
            query: Vec::new(),
            barrier,
        }
    }

    #[test]
    fn a_read_waits_for_its_round_and_for_earlier_writes() {
        let mut reads = Reads::new(1);
        reads.submit(read(5));
        reads.submit(read(9));
        let mut asked = Vec::new();
        reads.ask(0, |context| {
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
    fn a_lost_round_is_asked_again_under_a_new_context() {
        let mut reads = Reads::new(1);
        reads.submit(read(0));
        let mut asked = Vec::new();
        for now_us in [0, ROUND_TIMEOUT_US - 1, ROUND_TIMEOUT_US] {
            reads.ask(now_us, |context| {
                asked.push(context);
                true
            });
        }
        assert_eq!(asked.len(), 2);
        reads.confirm(asked[0], 3);
        assert!(
            reads.take(3).is_none(),
            "the lost round's late answer counts for nothing"
        );
        reads.confirm(asked[1], 3);
        assert!(reads.take(3).is_some());
    }
}

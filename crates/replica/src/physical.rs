//! One physical log: its Raft group, the entry in the making, what waits for commit, and the apply
//! pipeline.

mod in_flight;
mod job;
mod log_once;
mod replay;
mod time;
mod to_apply;

use std::collections::VecDeque;

use cyclone_consensus::{
    Committed, ConsensusError, GangTable, Group, Outbox, ProposeError, RequestError,
};
use cyclone_pmem::Payload;
use cyclone_store::{Applied, ApplyError, EntryInput, Mode, StateMachine};

use cyclone_wire::batch;
use cyclone_wire::gang::{FIXED_BYTES, Head, MAX_LOGS};
use cyclone_wire::planted::{self, Bug};

pub(crate) use job::ApplyJob;
use log_once::LogOnce;
pub(crate) use to_apply::ToApply;

use crate::log_clock::LogClock;
use crate::log_loop::{CommitObserver, Request};
use crate::reads::{Read, Reads};
use crate::requests::{BatchBuilder, Origin, Outcome};

/// Entries of one log handed to the state machine in one step, and in one call.
const APPLY_ENTRIES: usize = 16;
/// Payload bytes after which a step hands over no further entry.
const APPLY_BYTES: usize = 64 << 10;
/// A command whose entry has neither been committed nor overwritten after this long is answered
/// "unknown".
const OUTCOME_TIMEOUT_US: u64 = 5_000_000;
/// Between two tries at a store that is taken: a fraction of a microsecond.
const PAUSE_SPINS: u32 = 16;
/// Sealed entries that may wait to be proposed.
const SEALED_LIMIT: usize = 256;

/// An entry of ours on its way to commitment.
struct InFlight {
    index: u64,
    term: u64,
    origins: Vec<Origin>,
    since_us: u64,
}

/// An entry in waiting.
enum QueuedEntry {
    Batch(Payload, Vec<Origin>),
    /// This log's share of the gang with this number.
    Gang(u64),
}

pub(crate) struct PhysicalLog {
    pub(crate) id: u16,
    pub(crate) group: Group,
    pub(crate) clock: LogClock,
    open: BatchBuilder,
    sealed: VecDeque<QueuedEntry>,
    /// By index; entries of several terms may claim the same one.
    in_flight: VecDeque<InFlight>,
    apply_queue: VecDeque<ToApply>,
    /// Entries up to here come from flash, before any that are committed now; those wait in
    /// `behind`.
    replay_to: u64,
    behind: VecDeque<ToApply>,
    /// The entries at the front of `apply_queue` that a worker is applying.
    applying: usize,
    /// The store has refused the entry at the front; it is asked again after a pause.
    halted: bool,
    /// Why, until the replica's upkeep has taken it.
    refusal: Option<ApplyError>,
    /// The store or flash makes no progress: no writes are taken in.
    stalled: bool,
    pub(crate) applied: u64,
    pub(crate) applied_term: u64,
    pub(crate) reads: Reads,
    pending: usize,
    /// The log had no room for the front of `sealed`.
    log_full: bool,
    told: LogOnce,
    /// The term as leader in which the barriers of reads are those of this log.
    reads_term: u64,
    scratch: Vec<u8>,
}

/// An entry that only takes a place.
fn empty_payload(time_ms: u64) -> Payload {
    Payload::from_vec(batch::Writer::new().finish(time_ms))
}

impl PhysicalLog {
    pub(crate) fn new(
        id: u16,
        own: u64,
        open: BatchBuilder,
        group: Group,
        applied: u64,
        applied_term: u64,
        salt: u64,
    ) -> Self {
        PhysicalLog {
            id,
            replay_to: group.replay_through(),
            behind: VecDeque::new(),
            open: open.with_max_bytes(group.max_entry_bytes()),
            clock: LogClock::new(own),
            group,
            sealed: VecDeque::new(),
            in_flight: VecDeque::new(),
            apply_queue: VecDeque::new(),
            applying: 0,
            halted: false,
            refusal: None,
            stalled: false,
            applied,
            applied_term,
            reads: Reads::new(salt),
            pending: 0,
            log_full: false,
            told: LogOnce::default(),
            reads_term: 0,
            scratch: Vec::new(),
        }
    }

    /// Hands leadership over. The lease ends first: the target may campaign as soon as the order
    /// reaches it.
    pub(crate) fn transfer(&mut self, to: u64) -> Result<(), RequestError> {
        self.revoke_lease();
        self.group.transfer_leader(to)
    }

    /// No lease in this term any more.
    pub(crate) fn revoke_lease(&mut self) {
        self.reads.lease.revoke(self.group.term());
    }

    /// Commands and reads that wait for an answer.
    pub(crate) fn pending(&self) -> usize {
        self.pending + self.reads.len()
    }

    /// Takes the next read that the state machine may be asked.
    pub(crate) fn next_read(&mut self) -> Option<Read> {
        let applied = match planted::has(Bug::ReadsNotWaiting) {
            true => self.group.commit(),
            false => self.applied,
        };
        self.reads.take(applied)
    }

    /// Leader: asks for a round for the reads that want one, or lets them go on under the lease.
    pub(crate) fn ask_reads(&mut self, now_us: u64) {
        if !self.group.is_leader() {
            return;
        }
        let (group, reads) = (&mut self.group, &mut self.reads);
        let (term, mut confirmed) = (group.term(), None);
        reads.use_lease(now_us, term, group.commit());
        reads.ask(now_us, term, |context| {
            confirmed = planted::has(Bug::ReadsNotConfirmed).then_some(context);
            confirmed.is_some() || group.read_index(context).is_ok()
        });
        if let Some(context) = confirmed {
            reads.confirm(context, group.commit());
        }
    }

    /// Whether entries are still to come from flash before those that are committed now.
    pub(crate) fn is_behind(&self) -> bool {
        self.applied < self.replay_to || !self.behind.is_empty()
    }

    /// Whether nothing waits to be proposed: then another entry moves no barrier that a read was
    /// given.
    pub(crate) fn has_proposed_all(&self) -> bool {
        self.sealed.is_empty() && self.open.is_empty()
    }

    /// Whether another entry can be taken in at all.
    pub(crate) fn has_room(&self) -> bool {
        self.sealed.len() < SEALED_LIMIT
    }

    /// Whether few more entries can be taken in.
    pub(crate) fn is_backpressured(&self) -> bool {
        self.sealed.len() >= SEALED_LIMIT / 4 * 3
    }

    /// Whether an entry waits because the log has no room for it.
    pub(crate) fn is_log_full(&self) -> bool {
        self.log_full
    }

    /// Index of the last entry that holds a write submitted so far.
    pub(crate) fn barrier(&self) -> u64 {
        self.group.last_index() + self.sealed.len() as u64 + u64::from(!self.open.is_empty())
    }

    /// Adds a command whose bytes are to be copied into the entry.
    pub(crate) fn write_bytes(&mut self, origin: Origin, encode: impl FnOnce(&mut Vec<u8>)) {
        match self.open.push_bytes(origin, encode) {
            Ok(()) => self.added(),
            Err(command) => self.write_payload(origin, &command),
        }
    }

    /// Adds a command that may stay in the frames it came in.
    pub(crate) fn write_payload(&mut self, origin: Origin, command: &Payload) {
        if self.open.needs_own_entry(command.len()) {
            self.seal();
        }
        self.open.push_payload(origin, command);
        self.added();
    }

    /// Takes in a request that was admitted elsewhere.
    pub(crate) fn take_in(&mut self, request: Request) {
        match request {
            Request::Write(origin, command) => self.write_payload(origin, &command),
            Request::Read { origin, query, how } => {
                let barrier = self.barrier();
                self.reads.submit(Read::new(origin, query, barrier, how));
            }
        }
    }

    fn added(&mut self) {
        self.pending += 1;
        if self.open.is_full() {
            self.seal();
        }
    }

    fn seal(&mut self) {
        if !self.open.is_empty() {
            let time_ms = self.time_ms();
            let (payload, origins) = self.open.seal(time_ms);
            self.sealed.push_back(QueuedEntry::Batch(payload, origins));
        }
    }

    /// Keeps a place for this log's share of a gang, behind everything taken in before it.
    pub(crate) fn queue_gang(&mut self, number: u64, origins: usize) {
        self.seal();
        self.sealed.push_back(QueuedEntry::Gang(number));
        self.pending += origins;
    }

    /// The gang whose share is the next entry to be proposed.
    pub(crate) fn next_gang(&self) -> Option<u64> {
        match self.sealed.front() {
            Some(QueuedEntry::Gang(number)) => Some(*number),
            _ => None,
        }
    }

    /// The share of the gang at the front has been proposed.
    pub(crate) fn gang_proposed(&mut self, index: u64, origins: Vec<Origin>, now_us: u64) {
        self.sealed.pop_front();
        self.track_in_flight(index, origins, now_us);
    }

    /// A gang will not be proposed. Its place is taken by an entry without commands: reads may wait
    /// for its index.
    pub(crate) fn drop_gang(&mut self, number: u64, origins: usize) {
        self.pending -= origins;
        let time_ms = self.time_ms();
        for sealed in &mut self.sealed {
            if matches!(sealed, QueuedEntry::Gang(other) if *other == number) {
                *sealed = QueuedEntry::Batch(empty_payload(time_ms), Vec::new());
            }
        }
    }

    /// Whether the log had no room for its share of a gang.
    pub(crate) fn set_log_full(&mut self) {
        self.log_full = true;
    }

    /// Proposes what has been taken in. Batching never waits: an entry is closed by every step.
    //= cyclone §4.2
    pub(crate) fn propose(&mut self, now_us: u64, answers: &mut Vec<(Origin, Outcome)>) {
        self.seal();
        self.log_full = false;
        while let Some(sealed) = self.sealed.pop_front() {
            let (payload, origins) = match sealed {
                QueuedEntry::Batch(payload, origins) => (payload, origins),
                QueuedEntry::Gang(number) => {
                    return self.sealed.push_front(QueuedEntry::Gang(number));
                }
            };
            match self.group.propose(payload.clone()) {
                Ok(index) => {
                    self.track_in_flight(index, origins, now_us);
                }
                // The log is full for the moment: what was accepted waits, new requests are refused
                // at the door.
                Err(error @ (ProposeError::Full { .. } | ProposeError::Uncommitted { .. }))
                    if self.group.is_leader() =>
                {
                    self.log_full = matches!(error, ProposeError::Full { .. });
                    self.sealed.push_front(QueuedEntry::Batch(payload, origins));
                    return;
                }
                Err(error) => {
                    let outcome = match error {
                        ProposeError::NotLeader { leader } => Outcome::NotLeader(leader),
                        ProposeError::TooLarge { .. } => Outcome::TooLarge,
                        _ => Outcome::Busy,
                    };
                    self.pending -= origins.len();
                    answers.extend(origins.into_iter().map(|origin| (origin, outcome.clone())));
                    // Its place is taken by an entry without commands: reads may wait for its
                    // index.
                    let empty = QueuedEntry::Batch(empty_payload(self.time_ms()), Vec::new());
                    match error {
                        ProposeError::TooLarge { .. } => self.sealed.push_front(empty),
                        ProposeError::Transferring { .. } => {
                            return self.sealed.push_front(empty);
                        }
                        _ => {}
                    }
                }
            }
        }
        if self.group.is_leader() && self.reads_term != self.group.term() {
            // What this replica had taken in when it led before may be gone from the log's end.
            self.reads_term = self.group.term();
            self.reads.clamp(self.group.last_index());
        }
    }

    /// Takes in what a persisted step committed; finds out which of our entries a new leader has
    /// overwritten.
    pub(crate) fn committed(
        &mut self,
        outbox: &mut Outbox,
        observer: &mut impl CommitObserver,
        answers: &mut Vec<(Origin, Outcome)>,
    ) {
        if let Some(change) = outbox.leader_change {
            self.told.leader(self.id, change);
        }
        for entry in outbox.committed.drain(..) {
            let (mut origins, mut since_us) = (Vec::new(), 0);
            while self
                .in_flight
                .front()
                .is_some_and(|ours| ours.index <= entry.index)
            {
                // The loop's condition has just seen it.
                let Some(ours) = self.in_flight.pop_front() else {
                    break;
                };
                if ours.index == entry.index && ours.term == entry.term {
                    (origins, since_us) = (ours.origins, ours.since_us);
                } else {
                    self.pending -= ours.origins.len();
                    answers.extend(
                        ours.origins
                            .into_iter()
                            .map(|origin| (origin, Outcome::Lost)),
                    );
                }
            }
            // A checkpoint may have been installed that holds it.
            if entry.index <= self.applied {
                continue;
            }
            let next = ToApply {
                entry,
                origins,
                since_us,
                skip: false,
                answered: 0,
            };
            // Behind those that wait already, even when what they waited for has just been applied.
            match self.is_behind() {
                true => self.behind.push_back(next),
                false => self.queue(next, observer),
            }
        }
        if self.group.applied() < self.applied {
            self.group.applied_to(self.applied);
        }
    }

    /// An entry is next to be applied. The book must hear of entries in their order, and of none
    /// before: that a log's term has moved on without an entry of a gang is evidence.
    fn queue(&mut self, next: ToApply, observer: &mut impl CommitObserver) {
        let entry = next.entry;
        let head = self.gang_head(&entry);
        observer.committed(usize::from(self.id), entry.index, entry.term, head);
        self.apply_queue.push_back(next);
    }

    /// What a ganged entry begins with; `None` for any other.
    pub(crate) fn gang_head(&self, entry: &Committed) -> Option<Head> {
        let (mut fixed, whole) = ([0; FIXED_BYTES], entry.len as usize);
        if whole < FIXED_BYTES || !self.group.peek_payload(entry.index, &mut fixed) {
            return None;
        }
        let mut head = [0; Head::bytes(MAX_LOGS as usize)];
        let head = &mut head[..Head::length(&fixed)?.min(whole)];
        self.group.peek_payload(entry.index, head);
        Head::decode(head).ok().map(|(head, _)| head)
    }

    /// The first entry that is committed and not applied; `None` also while a worker applies it, or
    /// the store has refused it.
    pub(crate) fn front(&self) -> Option<u64> {
        let is_free = self.applying == 0 && !self.halted;
        let front = self.apply_queue.front().filter(|_| is_free);
        front.map(|next| next.entry.index)
    }

    /// When the entry at the front was proposed here; 0 if it was not.
    pub(crate) fn front_since_us(&self) -> u64 {
        self.apply_queue.front().map_or(0, |next| next.since_us)
    }

    /// Whether somebody waits for the entry at the front.
    pub(crate) fn has_waiter(&self) -> bool {
        let front = self.apply_queue.front();
        front.is_some_and(|front| !front.origins.is_empty())
    }

    /// The entry at the front belongs to a gang without effect.
    pub(crate) fn skip_front(&mut self) {
        if let Some(front) = self.apply_queue.front_mut() {
            front.skip = true;
        }
    }

    /// A worker is applying the gang whose entry is at the front.
    pub(crate) fn hold_front(&mut self) {
        self.applying = 1;
    }

    /// The store has refused what stands at the front; it may be tried again. `None`: another log
    /// of the same gang says why.
    pub(crate) fn halt_apply(&mut self, refusal: Option<ApplyError>) {
        (self.applying, self.halted) = (0, true);
        self.refusal = refusal.or(self.refusal.take());
    }

    /// Takes why the store has refused what stands at the front.
    pub(crate) fn take_refusal(&mut self) -> Option<ApplyError> {
        self.refusal.take()
    }

    /// Whether the store has refused what stands at the front.
    pub(crate) fn is_halted(&self) -> bool {
        self.halted
    }

    /// The store is asked again.
    pub(crate) fn resume_apply(&mut self) {
        self.halted = false;
    }

    /// Whether entries wait for the store, and for nothing else.
    pub(crate) fn waits_for_store(&self) -> bool {
        self.applying > 0 || self.halted
    }

    /// Whether the store or flash makes no progress, so that no writes are taken in.
    pub(crate) fn is_stalled(&self) -> bool {
        self.stalled
    }

    pub(crate) fn set_stalled(&mut self, stalled: bool) {
        self.stalled = stalled;
    }

    /// The entry at the front has been applied with its gang. Answers who waits for it.
    pub(crate) fn pass_front(&mut self) -> Vec<Origin> {
        self.applying = 0;
        let Some(done) = self.apply_queue.pop_front() else {
            return Vec::new();
        };
        (self.applied, self.applied_term) = (done.entry.index, done.entry.term);
        self.group.applied_to(self.applied);
        self.pending -= done.origins.len();
        done.origins
    }

    /// Index and term of the entry at the front, and its payload behind the gang's head.
    pub(crate) fn front_share(&self) -> Option<(u64, u64, Vec<u8>)> {
        let front = self.apply_queue.front()?;
        let mut payload = Vec::with_capacity(front.entry.len as usize);
        self.group.copy_payload(front.entry.index, &mut payload);
        let head = Head::length(payload.first_chunk()?)?;
        payload.drain(..head.min(payload.len()));
        Some((front.entry.index, front.entry.term, payload))
    }

    /// Whether a call of [`PhysicalLog::apply`] would apply something.
    pub(crate) fn can_apply(&self, stop: Option<u64>) -> bool {
        let front = self.front();
        front.is_some_and(|front| stop.is_none_or(|stop| front < stop))
    }

    /// Whether a worker is applying entries of this log.
    pub(crate) fn is_applying(&self) -> bool {
        self.applying > 0
    }

    /// How many entries one call of the state machine is given from the queue's front. It may apply
    /// fewer.
    fn apply_batch_len(&self, stop: Option<u64>) -> usize {
        let mut bytes = 0;
        self.apply_queue
            .iter()
            .take(APPLY_ENTRIES)
            .take_while(|next| stop.is_none_or(|stop| next.entry.index < stop))
            .take_while(|next| {
                let fits = bytes < APPLY_BYTES;
                bytes += next.entry.len as usize;
                fits
            })
            .count()
    }

    /// Applies what is committed, up to where the log must stand still for a gang, and no more at
    /// once than keeps a step short; without ever blocking. Where the store is taken, it is asked
    /// so many times more: another log's loop has it briefly. `Some` is work for a thread that may
    /// block.
    ///
    /// # Errors
    /// A store that cannot go on.
    pub(crate) fn apply(
        &mut self,
        store: &dyn StateMachine,
        stop: Option<u64>,
        mut tries: u32,
        answers: &mut Vec<(Origin, Outcome)>,
    ) -> Result<Option<ApplyJob>, ApplyError> {
        if !self.can_apply(stop) {
            return Ok(None);
        }
        let count = self.apply_batch_len(stop);
        self.scratch.clear();
        let mut spans = Vec::with_capacity(count);
        for next in self.apply_queue.iter().take(count) {
            let start = self.scratch.len();
            if !next.skip {
                self.group.copy_payload(next.entry.index, &mut self.scratch);
            }
            spans.push(start..self.scratch.len());
        }
        let entries: Vec<EntryInput<'_>> = self
            .apply_queue
            .iter()
            .zip(&spans)
            .map(|(next, span)| EntryInput {
                index: next.entry.index,
                term: next.entry.term,
                payload: &self.scratch[span.clone()],
                wants_replies: !next.origins.is_empty(),
            })
            .collect();
        let mut applied = store.apply(self.id, &entries, Mode::NonBlocking);
        while tries > 0 && matches!(applied, Err(ApplyError::WouldBlock)) {
            tries -= 1;
            (0..PAUSE_SPINS).for_each(|_| std::hint::spin_loop());
            applied = store.apply(self.id, &entries, Mode::NonBlocking);
        }
        match applied {
            Ok(applied) => self.finish(applied, answers),
            Err(ApplyError::WouldBlock) => {
                self.applying = count;
                return Ok(Some(ApplyJob::new(&entries)));
            }
            Err(error @ (ApplyError::NoSpace(_) | ApplyError::Damaged(_))) => {
                self.halt_apply(Some(error));
            }
            Err(error) => return Err(error),
        }
        Ok(None)
    }

    /// A worker has applied the entries it was given, or the first of them.
    pub(crate) fn finish_job(&mut self, applied: Applied, answers: &mut Vec<(Origin, Outcome)>) {
        self.applying = 0;
        self.finish(applied, answers);
    }

    fn finish(&mut self, applied: Applied, answers: &mut Vec<(Origin, Outcome)>) {
        let (whole, mut from) = (applied.whole(), applied.from);
        for (place, mut replies) in applied.replies.into_iter().enumerate() {
            let Some(front) = self.apply_queue.front_mut() else {
                break;
            };
            if planted::has(Bug::RepliesReversed) {
                replies.reverse();
            }
            let before = front.origins.len();
            front.answer(std::mem::take(&mut from), replies, answers);
            if place < whole {
                (self.applied, self.applied_term) = (front.entry.index, front.entry.term);
                front.end(answers);
            }
            self.pending -= before - front.origins.len();
            if place < whole {
                self.apply_queue.pop_front();
            }
        }
        self.group.applied_to(self.applied);
    }
}

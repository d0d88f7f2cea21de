//! The hand-over of a log between the replica's loop and the log's own loop, and their messages.
//!
//! ```text
//!   FairHandoff   the log; the loop that has taken it may step it, the other waits; they alternate if both wait
//!   LoopChannel   up: what a log's loop does not decide; down: requests for this log, and answers to clients of its port
//! ```

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use cyclone_consensus::{GangTable, OutMessage};
use cyclone_packet::{DriverStats, Message, PortStats};
use cyclone_pmem::Payload;
use cyclone_wire::client::{ReadMode, Status as Answer};
use cyclone_wire::gang::Head;
use mio::Waker;

use crate::clock::MonotonicClock;
use crate::config::Member;
use crate::embed::Caller;
use crate::node::NodeError;
use crate::physical::{ApplyJob, PhysicalLog};
use crate::reads::{Read, ReadBasis};
use crate::requests::{Origin, Outcome, Ticket};
use crate::status::Counters;

/// Who hears of committed entries, in their order.
pub(crate) trait CommitObserver {
    /// See [`GangTable::committed`].
    fn committed(&mut self, log: usize, index: u64, term: u64, head: Option<Head>);
}

impl CommitObserver for GangTable {
    fn committed(&mut self, log: usize, index: u64, term: u64, head: Option<Head>) {
        let _ = GangTable::committed(self, log, index, term, head);
    }
}

/// What the book of gangs has not heard of a log yet.
#[derive(Default)]
pub(crate) struct PendingGangCommits {
    /// The first entry at which the log stands still, as far as the book knew.
    pub(crate) stop: Option<u64>,
    gangs: Vec<(u64, u64, Head)>,
    /// Index and term of the last entry.
    last: (u64, u64),
}

impl PendingGangCommits {
    pub(crate) fn new(stop: Option<u64>) -> PendingGangCommits {
        PendingGangCommits {
            stop,
            ..PendingGangCommits::default()
        }
    }

    /// The first entry that the log must not pass before the book has heard of it.
    pub(crate) fn stop(&self) -> Option<u64> {
        self.stop
            .or_else(|| self.gangs.first().map(|(index, ..)| *index))
    }

    /// Whether there are entries of gangs.
    pub(crate) fn has_gangs(&self) -> bool {
        !self.gangs.is_empty()
    }

    /// Tells it. Of entries that are no gang's only the last one's term says anything, and nothing
    /// is decided in between.
    pub(crate) fn tell(self, log: usize, gang_table: &mut GangTable) {
        for (index, term, head) in self.gangs {
            gang_table.committed(log, index, term, Some(head));
        }
        gang_table.committed(log, self.last.0, self.last.1, None);
    }
}

impl CommitObserver for PendingGangCommits {
    fn committed(&mut self, _log: usize, index: u64, term: u64, head: Option<Head>) {
        self.last = (index, self.last.1.max(term));
        if let Some(head) = head {
            self.gangs.push((index, term, head));
        }
    }
}

/// A log on loan, with what its loop must know to move it.
pub(crate) struct LoanedLog {
    pub(crate) log: PhysicalLog,
    pub(crate) pending_commits: PendingGangCommits,
    /// Why requests are refused, if they are.
    pub(crate) refusal: Option<Outcome>,
    /// Something is in progress that concerns all logs: this one is left alone.
    pub(crate) paused: bool,
    /// Per log the last term in which this replica led.
    pub(crate) led: Arc<[u64]>,
    /// Where everybody is; the same pointer as long as nothing has changed.
    pub(crate) members: Arc<[Member]>,
    /// Events since the log was lent.
    pub(crate) counters: Counters,
    /// The log has another leader than when it was lent.
    pub(crate) elected: bool,
    pub(crate) steady: MonotonicClock,
    /// A client had work for this log; by the replica's clock.
    pub(crate) active_us: u64,
    /// The replica's loop sleeps for longer than a tick, since no log had work: it is to be woken
    /// when this one has.
    pub(crate) is_quiet: bool,
}

/// Who moves a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LogOwner {
    /// The replica's loop.
    ReplicaLoop = 0,
    /// The log's own.
    LogLoop = 1,
}

struct HandoffState<T> {
    value: Option<T>,
    /// The current owner will never return it.
    abandoned: bool,
    /// By mover, whether it waits.
    waits: [bool; 2],
    /// Who had it last: if both want it, it is the other's turn.
    last: LogOwner,
}

/// Where a log lies while neither loop moves it.
pub(crate) struct FairHandoff<T> {
    place: Mutex<HandoffState<T>>,
    changed: Condvar,
}

impl<T> FairHandoff<T> {
    /// Nothing lies there yet.
    pub(crate) fn new() -> FairHandoff<T> {
        FairHandoff {
            place: Mutex::new(HandoffState {
                value: None,
                abandoned: false,
                waits: [false; 2],
                last: LogOwner::ReplicaLoop,
            }),
            changed: Condvar::new(),
        }
    }

    /// Puts it down.
    pub(crate) fn put(&self, value: T) {
        let mut place = lock(&self.place);
        place.value = Some(value);
        let waited_for = place.waits != [false; 2];
        drop(place);
        if waited_for {
            self.changed.notify_all();
        }
    }

    /// The current owner keeps it, or is gone with it: no loop waits for it any more.
    pub(crate) fn abandon(&self) {
        lock(&self.place).abandoned = true;
        self.changed.notify_all();
    }

    /// Takes it, once the other one has put it down, and has had a turn if it waits for one.
    /// `None`: it is gone.
    pub(crate) fn take(&self, mover: LogOwner) -> Option<T> {
        let mut place = lock(&self.place);
        place.waits[mover as usize] = true;
        loop {
            let other_first = place.waits[1 - mover as usize] && place.last == mover;
            if !other_first && let Some(value) = place.value.take() {
                place.waits[mover as usize] = false;
                place.last = mover;
                return Some(value);
            }
            if place.abandoned {
                return None;
            }
            let waited = self.changed.wait(place);
            place = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// What a log's loop hands to the replica's.
pub(crate) enum ToReplicaLoop {
    /// A message that is not about entries of this log alone.
    Message(Message),
    /// A command that concerns other logs too.
    Write(Origin, Payload),
    /// A read that does.
    Query {
        origin: Origin,
        query: Vec<u8>,
        mode: ReadMode,
        terms: Vec<u64>,
    },
    /// A read of this log that its loop does not answer; it may be executed where so much is
    /// applied.
    Read(u64, Read),
    /// What became of requests that came through other doors.
    Outcome(Origin, Outcome),
    /// Entries that the store would not take without waiting.
    Apply(ApplyJob),
    /// A persisted message to be sent.
    Send(OutMessage),
    /// A message to a replica whose port for this log does not answer, encoded.
    SendEncoded(u64, Vec<u8>),
}

/// A request for one log that came through another door.
pub(crate) enum Request {
    Write(Origin, Payload),
    Read {
        origin: Origin,
        query: Vec<u8>,
        how: ReadBasis,
    },
}

impl Request {
    pub(crate) fn origin(&self) -> Origin {
        match self {
            Request::Write(origin, _) | Request::Read { origin, .. } => *origin,
        }
    }
}

/// What a log's loop is to tell.
pub(crate) enum ToLogLoop {
    /// A client of its port.
    Client(Origin, Answer),
    /// Its host, by ticket.
    Host(Ticket, Outcome),
}

/// Threads of this process that wait for a log, by ticket.
#[derive(Default)]
struct Callers {
    closed: bool,
    next: Ticket,
    waiting: HashMap<Ticket, Caller>,
    /// So many wait at most: a step takes all that is asked, and is to be short.
    max_waiting: usize,
}

/// Letters between the loops of a replica; one box per log.
pub(crate) struct LoopChannel {
    to_replica_loop: Mutex<Vec<ToReplicaLoop>>,
    requests: Mutex<Vec<Request>>,
    down: Mutex<Vec<ToLogLoop>>,
    callers: Mutex<Callers>,
    /// The log's loop sleeps, or is about to.
    asleep: AtomicBool,
    /// Calls that were refused because too many waited, and not counted by the replica yet.
    refused: AtomicU64,
    ended: AtomicBool,
    /// The port's counters, not older than half a second.
    figures: Mutex<(PortStats, DriverStats)>,
    /// Why the log's loop has ended.
    failed: Mutex<Option<NodeError>>,
    replica_waker: OnceLock<Arc<Waker>>,
    log_waker: OnceLock<Arc<Waker>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Messages stay readable after a panic.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn wake(waker: &OnceLock<Arc<Waker>>) {
    if let Some(waker) = waker.get() {
        // A wake-up that fails leaves the letter to the loop's next timer.
        let _ = waker.wake();
    }
}

impl LoopChannel {
    /// For so many threads' calls at once, at most.
    pub(crate) fn new(max_waiting: usize) -> LoopChannel {
        LoopChannel {
            to_replica_loop: Mutex::new(Vec::new()),
            requests: Mutex::new(Vec::new()),
            callers: Mutex::new(Callers {
                max_waiting,
                ..Callers::default()
            }),
            asleep: AtomicBool::new(false),
            refused: AtomicU64::new(0),
            ended: AtomicBool::new(false),
            figures: Mutex::default(),
            down: Mutex::new(Vec::new()),
            failed: Mutex::new(None),
            replica_waker: OnceLock::new(),
            log_waker: OnceLock::new(),
        }
    }

    /// Where the two loops are woken; without, they poll.
    pub(crate) fn connect(&self, replica_waker: Arc<Waker>, log_waker: Arc<Waker>) {
        let _ = (
            self.replica_waker.set(replica_waker),
            self.log_waker.set(log_waker),
        );
    }

    /// To the replica's loop.
    pub(crate) fn send_to_replica_loop(&self, to_replica_loop: &mut Vec<ToReplicaLoop>) {
        if !to_replica_loop.is_empty() {
            lock(&self.to_replica_loop).append(to_replica_loop);
            wake(&self.replica_waker);
        }
    }

    /// Lets the replica's loop look after the log.
    pub(crate) fn ring(&self) {
        wake(&self.replica_waker);
    }

    pub(crate) fn take_for_replica_loop(&self) -> Vec<ToReplicaLoop> {
        std::mem::take(&mut lock(&self.to_replica_loop))
    }

    /// A request for the log; [`LoopChannel::wake_log_loop`] when all are written.
    pub(crate) fn ask(&self, request: Request) {
        lock(&self.requests).push(request);
    }

    /// Requests that were not taken yet.
    pub(crate) fn asked(&self) -> usize {
        lock(&self.requests).len()
    }

    /// In the order in which they were made. For the log's current owner.
    pub(crate) fn take_requests(&self) -> Vec<Request> {
        std::mem::take(&mut lock(&self.requests))
    }

    /// A request for the log, made by another thread of this process; refused where too many wait.
    pub(crate) fn call(&self, log: u16, caller: Caller, request: impl FnOnce(Origin) -> Request) {
        let mut callers = lock(&self.callers);
        if callers.closed {
            return;
        }
        if callers.waiting.len() >= callers.max_waiting {
            drop(callers);
            self.refused.fetch_add(1, Ordering::Relaxed);
            return caller.tell(Outcome::Busy);
        }
        callers.next += 1;
        let ticket = callers.next;
        callers.waiting.insert(ticket, caller);
        drop(callers);
        self.ask(request(Origin::Direct { log, ticket }));
        self.wake_log_loop();
    }

    /// Takes how many calls were refused since the last time.
    pub(crate) fn take_refused(&self) -> u64 {
        self.refused.swap(0, Ordering::Relaxed)
    }

    /// The replica has stopped: no caller is notified any more, and waiting callers learn that.
    pub(crate) fn close(&self) {
        let mut callers = lock(&self.callers);
        callers.closed = true;
        let waiting = std::mem::take(&mut callers.waiting);
        drop(callers);
        drop(waiting);
        // The log's loop ends.
        wake(&self.log_waker);
    }

    /// Tells the threads what they wait for.
    pub(crate) fn reply(&self, outcomes: &mut Vec<(Ticket, Outcome)>) {
        if outcomes.is_empty() {
            return;
        }
        let mut callers = lock(&self.callers);
        let told: Vec<(Caller, Outcome)> = outcomes
            .drain(..)
            .filter_map(|(ticket, outcome)| Some((callers.waiting.remove(&ticket)?, outcome)))
            .collect();
        drop(callers);
        told.into_iter()
            .for_each(|(caller, outcome)| caller.tell(outcome));
    }

    /// An answer; [`LoopChannel::wake_log_loop`] when all are written.
    pub(crate) fn send_to_log_loop(&self, answer: ToLogLoop) {
        lock(&self.down).push(answer);
    }

    /// Wakes the log's loop, should it sleep; the replica's, where there is none any more.
    pub(crate) fn wake_log_loop(&self) {
        if self.has_ended() {
            return wake(&self.replica_waker);
        }
        // A message written before the writer saw it awake is read: it looks once more after it has
        // said that it sleeps.
        std::sync::atomic::fence(Ordering::SeqCst);
        if self.asleep.swap(false, Ordering::SeqCst) {
            wake(&self.log_waker);
        }
    }

    /// The log's loop is about to sleep; `false`: it has letters.
    pub(crate) fn may_sleep(&self) -> bool {
        self.asleep.store(true, Ordering::SeqCst);
        std::sync::atomic::fence(Ordering::SeqCst);
        let empty = lock(&self.requests).is_empty() && lock(&self.down).is_empty();
        if !empty {
            self.asleep.store(false, Ordering::SeqCst);
        }
        empty
    }

    /// The log's loop is awake again.
    pub(crate) fn wakes(&self) {
        self.asleep.store(false, Ordering::SeqCst);
    }

    pub(crate) fn take_for_log_loop(&self) -> Vec<ToLogLoop> {
        std::mem::take(&mut lock(&self.down))
    }

    /// The log's loop cannot go on.
    pub(crate) fn fail(&self, error: NodeError) {
        *lock(&self.failed) = Some(error);
        wake(&self.replica_waker);
    }

    /// Notes the port's counters.
    pub(crate) fn note_figures(&self, port: PortStats, driver: DriverStats) {
        *lock(&self.figures) = (port, driver);
    }

    pub(crate) fn figures(&self) -> (PortStats, DriverStats) {
        *lock(&self.figures)
    }

    /// No thread runs the log's loop any more.
    pub(crate) fn mark_ended(&self) {
        self.ended.store(true, Ordering::Release);
        wake(&self.replica_waker);
    }

    /// Whether no thread runs the log's loop.
    pub(crate) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Why the log's loop has ended, if it has.
    pub(crate) fn failure(&self) -> Option<NodeError> {
        lock(&self.failed).take()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::time::Duration;

    use cyclone_wire::gang::{Kind, Nonce};
    use cyclone_wire::reply::Reply;

    use crate::embed::Answers;

    use super::*;

    #[test]
    fn a_waiting_loop_has_the_next_turn() {
        let (cell, turns) = (
            FairHandoff::new(),
            [AtomicUsize::new(0), AtomicUsize::new(0)],
        );
        cell.put(0usize);
        let play = |mover: LogOwner| {
            for _ in 0..5_000 {
                let count = cell.take(mover).expect("no thread has ended");
                turns[mover as usize].fetch_add(1, Ordering::Relaxed);
                cell.put(count + 1);
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| play(LogOwner::LogLoop));
            play(LogOwner::ReplicaLoop);
        });
        assert_eq!(cell.take(LogOwner::ReplicaLoop), Some(10_000));
    }

    #[test]
    fn a_loop_that_never_yields_does_not_starve_the_other() {
        let (cell, stop) = (FairHandoff::new(), AtomicBool::new(false));
        cell.put(0u64);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let count = cell.take(LogOwner::LogLoop).expect("no thread has ended");
                    cell.put(count + 1);
                }
            });
            for _ in 0..1_000 {
                let before = cell
                    .take(LogOwner::ReplicaLoop)
                    .expect("no thread has ended");
                cell.put(before);
            }
            stop.store(true, Ordering::Relaxed);
        });
    }

    #[test]
    fn an_abandoned_log_ends_the_wait() {
        let cell = FairHandoff::<u8>::new();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| cell.take(LogOwner::ReplicaLoop));
            std::thread::yield_now();
            cell.abandon();
            assert_eq!(waits.join().expect("it ends"), None);
        });
    }

    #[test]
    fn a_letter_written_while_the_loop_falls_asleep_keeps_it_awake() {
        let mailbox = LoopChannel::new(1);
        assert!(mailbox.may_sleep());
        mailbox.wakes();
        let origin = Origin::Direct { log: 0, ticket: 1 };
        mailbox.ask(Request::Write(origin, Payload::new()));
        assert!(!mailbox.may_sleep());
        assert_eq!(mailbox.asked(), 1);
        assert_eq!(mailbox.take_requests().len(), 1);
        assert!(mailbox.may_sleep());
    }

    #[test]
    fn more_calls_than_may_wait_are_refused_at_once() {
        let (mailbox, answers) = (LoopChannel::new(2), Answers::new());
        let mut outcomes = Vec::new();
        let mut call = |token| {
            let caller = Caller::many(token, &answers);
            mailbox.call(0, caller, |origin| Request::Write(origin, Payload::new()));
            answers.wait(Duration::ZERO, &mut outcomes);
            std::mem::take(&mut outcomes)
        };
        assert_eq!(call(1), []);
        assert_eq!(call(2), []);
        assert_eq!(call(3), [(3, Outcome::Busy)]);
        assert_eq!(mailbox.asked(), 2, "it is not requested");
        mailbox.reply(&mut vec![(1, Outcome::Done(Reply::Ok))]);
        assert_eq!(call(4), [(1, Outcome::Done(Reply::Ok))]);
        assert_eq!(call(5), [(5, Outcome::Busy)]);
    }

    #[test]
    fn the_book_hears_of_gangs_in_their_order_and_of_terms() {
        let head = |counter| Head {
            kind: Kind::Part,
            nonce: Nonce {
                replica: 1,
                boot: 2,
                counter,
            },
            view: vec![(0, 3), (1, 3)],
        };
        let mut gang_table = GangTable::new(&[0, 0]);
        let mut pending_commits = PendingGangCommits::new(None);
        CommitObserver::committed(&mut pending_commits, 0, 5, 3, None);
        assert_eq!(pending_commits.stop(), None);
        CommitObserver::committed(&mut pending_commits, 0, 6, 3, Some(head(1)));
        CommitObserver::committed(&mut pending_commits, 0, 7, 3, Some(head(2)));
        assert_eq!(
            pending_commits.stop(),
            Some(6),
            "no log passes a gang alone"
        );
        assert!(pending_commits.has_gangs());
        pending_commits.tell(0, &mut gang_table);
        assert_eq!(gang_table.stop(0), Some(6));
        gang_table.passed(0, 6);
        assert_eq!(gang_table.stop(0), Some(7));
        // The other log's term moves on without a word of the second gang.
        let mut pending_commits = PendingGangCommits::new(gang_table.stop(1));
        CommitObserver::committed(&mut pending_commits, 1, 9, 4, None);
        pending_commits.tell(1, &mut gang_table);
        assert_eq!(gang_table.decide(0), cyclone_consensus::Decision::Skip);
    }
}

//! What goes back and forth between the replica's loop and a log's own: the log, and letters.
//!
//! ```text
//!   Cell   the log itself; whoever has taken it may move it, the other one waits. In turns, if both want it.
//!   Mail   up: what a log's loop has no say in; down: requests for this log, and answers to clients of its port
//! ```

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use cyclone_consensus::{GangBook, OutMessage};
use cyclone_packet::{DriverStats, Message, PortStats};
use cyclone_pmem::Payload;
use cyclone_wire::client::{ReadMode, Status as Answer};
use cyclone_wire::gang::Head;
use mio::Waker;

use crate::clock::Steady;
use crate::config::Member;
use crate::embed::Caller;
use crate::node::NodeError;
use crate::physical::{ApplyJob, PhysicalLog};
use crate::reads::{How, Read};
use crate::requests::{Origin, Outcome, Ticket};
use crate::status::Counters;

/// Who hears of committed entries, in their order.
pub(crate) trait Hears {
    /// See [`GangBook::committed`].
    fn committed(&mut self, log: usize, index: u64, term: u64, head: Option<Head>);
}

impl Hears for GangBook {
    fn committed(&mut self, log: usize, index: u64, term: u64, head: Option<Head>) {
        let _ = GangBook::committed(self, log, index, term, head);
    }
}

/// What the book of gangs has not heard of a log yet.
#[derive(Default)]
pub(crate) struct Unheard {
    /// The first entry at which the log stands still, as far as the book knew.
    pub(crate) stop: Option<u64>,
    gangs: Vec<(u64, u64, Head)>,
    /// Index and term of the last entry.
    last: (u64, u64),
}

impl Unheard {
    pub(crate) fn new(stop: Option<u64>) -> Unheard {
        Unheard {
            stop,
            ..Unheard::default()
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

    /// Tells it. Of entries that are no gang's only the last one's term says anything, and nothing is decided in between.
    pub(crate) fn tell(self, log: usize, book: &mut GangBook) {
        for (index, term, head) in self.gangs {
            book.committed(log, index, term, Some(head));
        }
        book.committed(log, self.last.0, self.last.1, None);
    }
}

impl Hears for Unheard {
    fn committed(&mut self, _log: usize, index: u64, term: u64, head: Option<Head>) {
        self.last = (index, self.last.1.max(term));
        if let Some(head) = head {
            self.gangs.push((index, term, head));
        }
    }
}

/// A log on loan, with what its loop must know to move it.
pub(crate) struct Turn {
    pub(crate) log: PhysicalLog,
    pub(crate) unheard: Unheard,
    /// Why requests are refused, if they are.
    pub(crate) refusal: Option<Outcome>,
    /// Something is under way that concerns all logs: this one is left alone.
    pub(crate) paused: bool,
    /// Per log the last term in which this replica led.
    pub(crate) led: Arc<[u64]>,
    /// Where everybody is; the same pointer as long as nothing has changed.
    pub(crate) members: Arc<[Member]>,
    /// Events since the log was lent.
    pub(crate) counters: Counters,
    /// The log has another leader than when it was lent.
    pub(crate) elected: bool,
    pub(crate) steady: Steady,
    /// A client had work for this log; by the replica's clock.
    pub(crate) active_us: u64,
    /// The replica's loop sleeps for longer than a tick, since no log had work: it is to be woken when this one has.
    pub(crate) is_quiet: bool,
}

/// Who moves a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mover {
    /// The replica's loop.
    Home = 0,
    /// The log's own.
    Lane = 1,
}

struct Place<T> {
    what: Option<T>,
    /// Whoever has it will not put it down any more.
    abandoned: bool,
    /// By mover, whether it waits.
    waits: [bool; 2],
    /// Who had it last: if both want it, it is the other's turn.
    last: Mover,
}

/// Where a log lies while nobody moves it.
pub(crate) struct Cell<T> {
    place: Mutex<Place<T>>,
    changed: Condvar,
}

impl<T> Cell<T> {
    /// Nothing lies there yet.
    pub(crate) fn new() -> Cell<T> {
        Cell {
            place: Mutex::new(Place {
                what: None,
                abandoned: false,
                waits: [false; 2],
                last: Mover::Home,
            }),
            changed: Condvar::new(),
        }
    }

    /// Puts it down.
    pub(crate) fn put(&self, what: T) {
        let mut place = lock(&self.place);
        place.what = Some(what);
        let waited_for = place.waits != [false; 2];
        drop(place);
        if waited_for {
            self.changed.notify_all();
        }
    }

    /// Whoever has it keeps it, or is gone with it: nobody waits for it any more.
    pub(crate) fn abandon(&self) {
        lock(&self.place).abandoned = true;
        self.changed.notify_all();
    }

    /// Takes it, once the other one has put it down, and has had a turn if it waits for one. `None`: it is gone.
    pub(crate) fn take(&self, mover: Mover) -> Option<T> {
        let mut place = lock(&self.place);
        place.waits[mover as usize] = true;
        loop {
            let other_first = place.waits[1 - mover as usize] && place.last == mover;
            if !other_first && let Some(what) = place.what.take() {
                place.waits[mover as usize] = false;
                place.last = mover;
                return Some(what);
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
pub(crate) enum Up {
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
    /// A read of this log that its loop does not answer; it may be executed where so much is applied.
    Read(u64, Read),
    /// What became of requests that came through other doors.
    Outcome(Origin, Outcome),
    /// Entries that the store would not take without waiting.
    Apply(ApplyJob),
    /// A persisted message to be sent.
    Post(OutMessage),
    /// A message to a replica whose port for this log does not answer, encoded.
    Send(u64, Vec<u8>),
}

/// A request for one log that came through another door.
pub(crate) enum Request {
    Write(Origin, Payload),
    Read {
        origin: Origin,
        query: Vec<u8>,
        how: How,
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
pub(crate) enum Down {
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
    most: usize,
}

/// Letters between the loops of a replica; one box per log.
pub(crate) struct Mail {
    up: Mutex<Vec<Up>>,
    requests: Mutex<Vec<Request>>,
    down: Mutex<Vec<Down>>,
    callers: Mutex<Callers>,
    /// The log's loop sleeps, or is about to.
    asleep: AtomicBool,
    left: AtomicBool,
    /// The port's counters, not older than half a second.
    figures: Mutex<(PortStats, DriverStats)>,
    /// Why the log's loop has ended.
    failed: Mutex<Option<NodeError>>,
    home: OnceLock<Arc<Waker>>,
    lane: OnceLock<Arc<Waker>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Letters stay readable whoever panicked.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn wake(waker: &OnceLock<Arc<Waker>>) {
    if let Some(waker) = waker.get() {
        // A wake-up that fails leaves the letter to the loop's next timer.
        let _ = waker.wake();
    }
}

impl Mail {
    /// For so many threads' calls at once, at most.
    pub(crate) fn new(most: usize) -> Mail {
        Mail {
            up: Mutex::new(Vec::new()),
            requests: Mutex::new(Vec::new()),
            callers: Mutex::new(Callers {
                most,
                ..Callers::default()
            }),
            asleep: AtomicBool::new(false),
            left: AtomicBool::new(false),
            figures: Mutex::default(),
            down: Mutex::new(Vec::new()),
            failed: Mutex::new(None),
            home: OnceLock::new(),
            lane: OnceLock::new(),
        }
    }

    /// Where the two loops are woken; without, they look by themselves.
    pub(crate) fn connect(&self, home: Arc<Waker>, lane: Arc<Waker>) {
        let _ = (self.home.set(home), self.lane.set(lane));
    }

    /// To the replica's loop.
    pub(crate) fn send_up(&self, letters: &mut Vec<Up>) {
        if !letters.is_empty() {
            lock(&self.up).append(letters);
            wake(&self.home);
        }
    }

    /// Lets the replica's loop look after the log.
    pub(crate) fn ring(&self) {
        wake(&self.home);
    }

    pub(crate) fn take_up(&self) -> Vec<Up> {
        std::mem::take(&mut lock(&self.up))
    }

    /// A request for the log; [`Mail::ring_lane`] when all are written.
    pub(crate) fn ask(&self, request: Request) {
        lock(&self.requests).push(request);
    }

    /// Requests that nobody has taken yet.
    pub(crate) fn asked(&self) -> usize {
        lock(&self.requests).len()
    }

    /// In the order in which they were made. For whoever has the log in hand.
    pub(crate) fn take_requests(&self) -> Vec<Request> {
        std::mem::take(&mut lock(&self.requests))
    }

    /// A request for the log, made by another thread of this process; refused where too many wait.
    pub(crate) fn call(&self, log: u16, caller: Caller, request: impl FnOnce(Origin) -> Request) {
        let mut callers = lock(&self.callers);
        if callers.closed {
            return;
        }
        if callers.waiting.len() >= callers.most {
            drop(callers);
            return caller.tell(Outcome::Busy);
        }
        callers.next += 1;
        let ticket = callers.next;
        callers.waiting.insert(ticket, caller);
        drop(callers);
        self.ask(request(Origin::Direct { log, ticket }));
        self.ring_lane();
    }

    /// The replica has stopped: nobody is told anything any more, and who waits learns that.
    pub(crate) fn close(&self) {
        let mut callers = lock(&self.callers);
        callers.closed = true;
        let waiting = std::mem::take(&mut callers.waiting);
        drop(callers);
        drop(waiting);
        // The log's loop ends.
        wake(&self.lane);
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

    /// An answer; [`Mail::ring_lane`] when all are written.
    pub(crate) fn send_down(&self, answer: Down) {
        lock(&self.down).push(answer);
    }

    /// Wakes the log's loop, should it sleep; the replica's, where there is none any more.
    pub(crate) fn ring_lane(&self) {
        if self.is_left() {
            return wake(&self.home);
        }
        // Whoever has written before it sees it awake is read: it looks once more after it has said that it sleeps.
        std::sync::atomic::fence(Ordering::SeqCst);
        if self.asleep.swap(false, Ordering::SeqCst) {
            wake(&self.lane);
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

    pub(crate) fn take_down(&self) -> Vec<Down> {
        std::mem::take(&mut lock(&self.down))
    }

    /// The log's loop cannot go on.
    pub(crate) fn fail(&self, error: NodeError) {
        *lock(&self.failed) = Some(error);
        wake(&self.home);
    }

    /// Notes the port's counters.
    pub(crate) fn note_figures(&self, port: PortStats, driver: DriverStats) {
        *lock(&self.figures) = (port, driver);
    }

    pub(crate) fn figures(&self) -> (PortStats, DriverStats) {
        *lock(&self.figures)
    }

    /// Nobody runs the log's loop any more.
    pub(crate) fn leave(&self) {
        self.left.store(true, Ordering::Release);
        wake(&self.home);
    }

    /// Whether nobody runs the log's loop.
    pub(crate) fn is_left(&self) -> bool {
        self.left.load(Ordering::Acquire)
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
    fn whoever_waits_has_the_next_turn() {
        let (cell, turns) = (Cell::new(), [AtomicUsize::new(0), AtomicUsize::new(0)]);
        cell.put(0usize);
        let play = |mover: Mover| {
            for _ in 0..5_000 {
                let count = cell.take(mover).expect("nobody is gone");
                turns[mover as usize].fetch_add(1, Ordering::Relaxed);
                cell.put(count + 1);
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| play(Mover::Lane));
            play(Mover::Home);
        });
        assert_eq!(cell.take(Mover::Home), Some(10_000));
    }

    #[test]
    fn one_that_never_lets_go_of_the_cpu_keeps_nobody_out() {
        let (cell, stop) = (Cell::new(), AtomicBool::new(false));
        cell.put(0u64);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let count = cell.take(Mover::Lane).expect("nobody is gone");
                    cell.put(count + 1);
                }
            });
            for _ in 0..1_000 {
                let before = cell.take(Mover::Home).expect("nobody is gone");
                cell.put(before);
            }
            stop.store(true, Ordering::Relaxed);
        });
    }

    #[test]
    fn what_is_gone_is_waited_for_by_nobody() {
        let cell = Cell::<u8>::new();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| cell.take(Mover::Home));
            std::thread::yield_now();
            cell.abandon();
            assert_eq!(waits.join().expect("it ends"), None);
        });
    }

    #[test]
    fn a_letter_written_while_the_loop_falls_asleep_keeps_it_awake() {
        let mail = Mail::new(1);
        assert!(mail.may_sleep());
        mail.wakes();
        let origin = Origin::Direct { log: 0, ticket: 1 };
        mail.ask(Request::Write(origin, Payload::new()));
        assert!(!mail.may_sleep());
        assert_eq!(mail.asked(), 1);
        assert_eq!(mail.take_requests().len(), 1);
        assert!(mail.may_sleep());
    }

    #[test]
    fn more_calls_than_may_wait_are_refused_at_once() {
        let (mail, answers) = (Mail::new(2), Answers::new());
        let mut outcomes = Vec::new();
        let mut call = |token| {
            let caller = Caller::many(token, &answers);
            mail.call(0, caller, |origin| Request::Write(origin, Payload::new()));
            answers.wait(Duration::ZERO, &mut outcomes);
            std::mem::take(&mut outcomes)
        };
        assert_eq!(call(1), []);
        assert_eq!(call(2), []);
        assert_eq!(call(3), [(3, Outcome::Busy)]);
        assert_eq!(mail.asked(), 2, "nobody is asked for it");
        mail.reply(&mut vec![(1, Outcome::Done(Reply::Ok))]);
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
        let mut book = GangBook::new(&[0, 0]);
        let mut unheard = Unheard::new(None);
        Hears::committed(&mut unheard, 0, 5, 3, None);
        assert_eq!(unheard.stop(), None);
        Hears::committed(&mut unheard, 0, 6, 3, Some(head(1)));
        Hears::committed(&mut unheard, 0, 7, 3, Some(head(2)));
        assert_eq!(unheard.stop(), Some(6), "nobody passes a gang alone");
        assert!(unheard.has_gangs());
        unheard.tell(0, &mut book);
        assert_eq!(book.stop(0), Some(6));
        book.passed(0, 6);
        assert_eq!(book.stop(0), Some(7));
        // The other log's term moves on without a word of the second gang.
        let mut unheard = Unheard::new(book.stop(1));
        Hears::committed(&mut unheard, 1, 9, 4, None);
        unheard.tell(1, &mut book);
        assert_eq!(book.decide(0), cyclone_consensus::Decision::Skip);
    }
}

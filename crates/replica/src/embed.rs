//! A replica inside another program, in place of its store's own log: the program calls, a thread
//! runs the loop.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use cyclone_packet::idle::{SpinWindow, Yielder};
use cyclone_pmem::Payload;
use cyclone_wire::command::{Command, Operation, Query};
use cyclone_wire::reply::Reply;
use mio::Waker;
use mio::event::Event;

use crate::config::Config;
use crate::log_loop::{LogThread, LoopChannel, Request};
use crate::logset::LogSet;
use crate::node::{Node, NodeError, Now};
use crate::reads::ReadBasis;
use crate::requests::Outcome;
use crate::run::{EventSource, Reactor, now};
use crate::start::StartError;

thread_local! {
    /// How this thread waits for outcomes.
    static WAITING: RefCell<(SpinWindow, Yielder)> = RefCell::default();
}

/// How a call to the embedded replica can fail.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum EmbeddedError {
    /// Another replica leads; nothing was done.
    #[error("not the leader (that is {0:?})")]
    NotLeader(Option<u64>),
    /// A queue or the log is full; nothing was done.
    #[error("busy, try again")]
    Busy,
    /// Leadership changed and the command was discarded: certainly not executed.
    #[error("not done: leadership changed")]
    NotDone,
    /// Its fate is not known.
    #[error("outcome unknown")]
    Unknown,
    /// The command exceeds the configured limits, or those of its format; nothing was done.
    #[error("too large")]
    TooLarge,
    /// This replica's store is damaged and cannot read what was asked for; nothing was done.
    /// Another replica is to lead.
    #[error("the store of this replica is damaged")]
    Damaged,
    /// The replica has stopped.
    #[error("the replica has stopped")]
    Stopped,
}

/// Outcomes of many calls, in the order in which they are known: cheaper than a channel for each.
#[derive(Default)]
pub struct Answers {
    known: Mutex<Vec<(u64, Outcome)>>,
    more: Condvar,
}

impl Answers {
    /// An empty queue; one thread waits on it.
    pub fn new() -> Arc<Answers> {
        Arc::default()
    }

    /// Appends the outcomes that are known to `out`, by their tokens; waits for the first, at most
    /// so long.
    pub fn wait(&self, patience: Duration, out: &mut Vec<(u64, Outcome)>) {
        let begun = Instant::now();
        let some = || (!lock(&self.known).is_empty()).then_some(());
        if !patience.is_zero() && spin_for(patience, some).is_some() {
            note_wait(begun);
            return out.append(&mut lock(&self.known));
        }
        let known = lock(&self.known);
        let left = patience.saturating_sub(begun.elapsed());
        let waited = self
            .more
            .wait_timeout_while(known, left, |known| known.is_empty());
        let (mut known, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        out.append(&mut known);
        if !patience.is_zero() && !timeout.timed_out() {
            note_wait(begun);
        }
    }

    fn tell(&self, token: u64, outcome: Outcome) {
        let mut known = lock(&self.known);
        known.push((token, outcome));
        let first = known.len() == 1;
        drop(known);
        if first {
            self.more.notify_one();
        }
    }
}

/// Who waits for an outcome.
pub(crate) enum Caller {
    /// For this one alone.
    Once(Sender<Outcome>),
    /// For many, by token.
    Many(CompletionToken),
}

/// A place in a queue of answers. One that is given up gets an unknown outcome.
pub(crate) struct CompletionToken(u64, Option<Arc<Answers>>);

impl Drop for CompletionToken {
    fn drop(&mut self) {
        if let Some(answers) = self.1.take() {
            answers.tell(self.0, Outcome::Unknown);
        }
    }
}

impl Caller {
    pub(crate) fn many(token: u64, answers: &Arc<Answers>) -> Caller {
        Caller::Many(CompletionToken(token, Some(Arc::clone(answers))))
    }

    pub(crate) fn tell(self, outcome: Outcome) {
        match self {
            // A caller that gave up does not want to know.
            Caller::Once(answer) => drop(answer.send(outcome)),
            Caller::Many(mut place) => {
                if let Some(answers) = place.1.take() {
                    answers.tell(place.0, outcome);
                }
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

enum Call {
    Write(Vec<u8>, Caller),
    Read(Vec<u8>, Caller),
}

impl Call {
    fn caller(self) -> Caller {
        match self {
            Call::Write(_, caller) | Call::Read(_, caller) => caller,
        }
    }
}

struct Queue {
    calls: Mutex<Vec<Call>>,
    /// So many calls wait at most to be processed: a step takes all of them, and is to be short.
    max_calls: usize,
    /// Calls that were refused because so many waited, and not counted by the replica yet.
    refused: AtomicU64,
    /// A caller looks for its outcome. The others sleep: many that yield would keep the loop
    /// waiting.
    spinning: AtomicBool,
    closed: AtomicBool,
}

/// A running replica. Dropping it hands leadership over and stops it.
pub struct Embedded {
    queue: Arc<Queue>,
    /// The mailboxes of logs that have separate loops.
    mailboxes: Vec<Arc<LoopChannel>>,
    logs: usize,
    waker: Arc<Waker>,
    stop: Arc<AtomicBool>,
    leads: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<(), NodeError>>>,
}

/// The loop's side of the queue.
struct Host {
    queue: Arc<Queue>,
    leads: Arc<AtomicBool>,
    waiting: HashMap<u64, Caller>,
    next: u64,
}

/// However the loop ends: waiting callers get an unknown outcome.
impl Drop for Host {
    fn drop(&mut self) {
        self.queue.closed.store(true, Ordering::Release);
        let waiting = std::mem::take(&mut *lock(&self.queue.calls));
        drop(waiting);
    }
}

impl EventSource for Host {
    fn ready(&mut self, _event: &Event) {}

    fn step(&mut self, _now: Now, node: &mut Node) -> usize {
        node.note_refused_elsewhere(self.queue.refused.swap(0, Ordering::Relaxed));
        let calls = std::mem::take(&mut *lock(&self.queue.calls));
        let mut work = calls.len();
        if work > 0 {
            node.note_work();
        }
        for call in calls {
            self.next += 1;
            match call {
                Call::Write(bytes, answer) => match Command::decode(&bytes) {
                    Ok(command) => {
                        self.waiting.insert(self.next, answer);
                        node.write(self.next, &command.operation);
                    }
                    // This program's own handle encoded it: it is beyond what the format takes,
                    // such as a batch of too many operations.
                    Err(_) => answer.tell(Outcome::TooLarge),
                },
                Call::Read(bytes, answer) => match Query::decode(&bytes) {
                    Ok(query) => {
                        self.waiting.insert(self.next, answer);
                        node.read(self.next, &query);
                    }
                    Err(_) => answer.tell(Outcome::TooLarge),
                },
            }
        }
        for (ticket, outcome) in node.take_completions() {
            work += 1;
            if let Some(answer) = self.waiting.remove(&ticket) {
                answer.tell(outcome);
            }
        }
        self.leads.store(node.leads(), Ordering::Relaxed);
        work
    }
}

impl Embedded {
    /// Starts a replica and the thread that runs it. Where the process may raise priorities and
    /// that thread waits for another, all threads of the process are lent nice −20, for 200 ms at
    /// most.
    ///
    /// # Errors
    /// See [`StartError`].
    pub fn start(config: Config) -> Result<Embedded, StartError> {
        let (embedded, loops) = Embedded::launch(config, false)?;
        debug_assert!(loops.is_empty());
        Ok(embedded)
    }

    /// Starts a replica whose logs have separate loops (`config.log_threads` of them, at least
    /// one), and leaves running those to the caller: a program with a thread per core gives each of
    /// its threads a loop, and asks for what is kept there without waking anybody. They are to be
    /// turned all the time: calls from other threads wait for that, for some tens of milliseconds
    /// at most.
    ///
    /// # Errors
    /// See [`StartError`].
    pub fn start_apart(config: Config) -> Result<(Embedded, Vec<LogThread>), StartError> {
        let config = Config {
            log_threads: config.log_threads.max(1),
            ..config
        };
        Embedded::launch(config, true)
    }

    fn launch(config: Config, apart: bool) -> Result<(Embedded, Vec<LogThread>), StartError> {
        let cannot = |source| StartError::Io {
            what: "starting the event loop".into(),
            source,
        };
        let mut reactor = Reactor::new().map_err(cannot)?;
        let waker = reactor.waker();
        let mut node = Node::start(config, Arc::clone(&waker))?;
        let loops = match apart {
            true => {
                LogThread::divide(node.take_log_loops(), node.config(), &waker).map_err(cannot)?
            }
            false => Vec::new(),
        };
        let mailboxes = node.mailboxes();
        let logs = usize::from(node.config().logs);
        let queue = Arc::new(Queue {
            calls: Mutex::new(Vec::new()),
            refused: AtomicU64::new(0),
            max_calls: node.config().max_pending,
            spinning: AtomicBool::new(false),
            closed: AtomicBool::new(false),
        });
        let stop = Arc::new(AtomicBool::new(false));
        let leads = Arc::new(AtomicBool::new(false));
        let mut host = Host {
            queue: Arc::clone(&queue),
            leads: Arc::clone(&leads),
            waiting: HashMap::new(),
            next: 0,
        };
        let stopping = Arc::clone(&stop);
        let run = move || reactor.run(&mut node, &mut host, &stopping);
        let thread = std::thread::Builder::new()
            .name("cyclone".into())
            .spawn(run)
            .map_err(cannot)?;
        let embedded = Embedded {
            queue,
            mailboxes,
            logs,
            waker,
            stop,
            leads,
            thread: Some(thread),
        };
        Ok((embedded, loops))
    }

    /// Whether this replica leads; only then do calls succeed.
    pub fn leads(&self) -> bool {
        self.leads.load(Ordering::Relaxed)
    }

    /// Submits a write; the receiver gets its outcome once it is durable at a majority and applied.
    pub fn submit(&self, operation: &Operation<'_>) -> Receiver<Outcome> {
        let (answer, outcome) = channel();
        self.write_for(Caller::Once(answer), operation);
        outcome
    }

    /// Submits a write; its outcome comes under `token`.
    pub fn submit_to(&self, answers: &Arc<Answers>, token: u64, operation: &Operation<'_>) {
        self.write_for(Caller::many(token, answers), operation);
    }

    /// Submits a linearizable read.
    pub fn submit_read(&self, query: &Query<'_>) -> Receiver<Outcome> {
        let (answer, outcome) = channel();
        self.read_for(Caller::Once(answer), query);
        outcome
    }

    /// Submits a linearizable read; its outcome comes under `token`.
    pub fn submit_read_to(&self, answers: &Arc<Answers>, token: u64, query: &Query<'_>) {
        self.read_for(Caller::many(token, answers), query);
    }

    fn write_for(&self, caller: Caller, operation: &Operation<'_>) {
        let mut bytes = Vec::with_capacity(64);
        Command {
            session: None,
            operation: operation.clone(),
        }
        .encode(&mut bytes);
        match self.mailbox_of(LogSet::of(operation, self.logs)) {
            // As [`Host::step`] does; a log's own loop takes letters as they are.
            Some(_) if Command::decode(&bytes).is_err() => caller.tell(Outcome::TooLarge),
            Some((log, mailbox)) => mailbox.call(log, caller, |origin| {
                Request::Write(origin, Payload::from_vec(bytes))
            }),
            None => self.push(Call::Write(bytes, caller)),
        }
    }

    fn read_for(&self, caller: Caller, query: &Query<'_>) {
        let mut bytes = Vec::with_capacity(64);
        query.encode(&mut bytes);
        let how = ReadBasis::Index;
        match self.mailbox_of(LogSet::of_query(query, self.logs)) {
            Some(_) if Query::decode(&bytes).is_err() => caller.tell(Outcome::TooLarge),
            Some((log, mailbox)) => mailbox.call(log, caller, |origin| Request::Read {
                origin,
                query: bytes,
                how,
            }),
            None => self.push(Call::Read(bytes, caller)),
        }
    }

    /// The letter box of a log that has its own loop, if there is only this log to be asked.
    fn mailbox_of(&self, logs: LogSet) -> Option<(u16, &LoopChannel)> {
        let log = logs.single()?;
        let mailbox = self.mailboxes.get(log)?;
        Some((log as u16, mailbox))
    }

    fn push(&self, call: Call) {
        let mut calls = lock(&self.queue.calls);
        // The caller that adds the first entry wakes the loop, which takes all of it at once.
        let first = calls.is_empty();
        if calls.len() >= self.queue.max_calls {
            drop(calls);
            self.queue.refused.fetch_add(1, Ordering::Relaxed);
            return call.caller().tell(Outcome::Busy);
        }
        if !self.queue.closed.load(Ordering::Acquire) {
            calls.push(call);
        }
        drop(calls);
        if first {
            // The loop looks again within a tenth of a second should the wake-up fail.
            let _ = self.waker.wake();
        }
    }

    /// Executes a write and waits.
    ///
    /// # Errors
    /// See [`EmbeddedError`].
    pub fn write(&self, operation: &Operation<'_>) -> Result<Reply, EmbeddedError> {
        self.wait(&self.submit(operation))
    }

    /// Executes a linearizable read and waits.
    ///
    /// # Errors
    /// See [`EmbeddedError`].
    pub fn read(&self, query: &Query<'_>) -> Result<Reply, EmbeddedError> {
        self.wait(&self.submit_read(query))
    }

    fn wait(&self, outcome: &Receiver<Outcome>) -> Result<Reply, EmbeddedError> {
        let spinning = &self.queue.spinning;
        let begun = Instant::now();
        let told = match spinning.swap(true, Ordering::Relaxed) {
            true => None,
            false => {
                let told = spin_for(Duration::MAX, || match outcome.try_recv() {
                    Err(TryRecvError::Empty) => None,
                    // Also when no answer will come any more.
                    told => Some(told.ok()),
                });
                spinning.store(false, Ordering::Relaxed);
                told
            }
        };
        let told = told.unwrap_or_else(|| outcome.recv().ok());
        note_wait(begun);
        match told {
            Some(Outcome::Done(reply)) => Ok(reply),
            Some(Outcome::NotLeader(leader)) => Err(EmbeddedError::NotLeader(leader)),
            Some(Outcome::Busy) => Err(EmbeddedError::Busy),
            Some(Outcome::Lost) => Err(EmbeddedError::NotDone),
            Some(Outcome::Unknown) => Err(EmbeddedError::Unknown),
            Some(Outcome::TooLarge) => Err(EmbeddedError::TooLarge),
            Some(Outcome::Damaged) => Err(EmbeddedError::Damaged),
            None => Err(EmbeddedError::Stopped),
        }
    }

    /// Waits until this replica leads; `false` when it does not within the time.
    pub fn wait_to_lead(&self, patience: Duration) -> bool {
        let steps = patience.as_millis() / 5;
        for _ in 0..steps {
            if self.leads() {
                return true;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        self.leads()
    }
}

/// Looks for something a little while, at most for `patience`, and lets the loop's thread run in
/// between: to be woken takes longer.
fn spin_for<T>(patience: Duration, mut find: impl FnMut() -> Option<T>) -> Option<T> {
    WAITING.with_borrow_mut(|(look, yielder)| {
        let begun = Instant::now();
        let most = patience.min(Duration::from_micros(look.us()));
        loop {
            let (found, now_us) = (find(), now().steady_us);
            if found.is_some() || begun.elapsed() >= most || !yielder.may_yield(now_us) {
                return found;
            }
            yielder.yield_once(now_us);
        }
    })
}

/// What it waited for came.
fn note_wait(begun: Instant) {
    let waited_us = begun.elapsed().as_micros() as u64;
    WAITING.with_borrow_mut(|(look, _)| look.note_wait(waited_us));
}

impl Drop for Embedded {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.waker.wake();
        if let Some(thread) = self.thread.take() {
            // A loop that ended with an error has reported it in its log.
            let _ = thread.join();
        }
    }
}

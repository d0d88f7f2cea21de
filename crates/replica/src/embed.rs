//! A replica inside another program, in place of its store's own log: the program calls, a thread runs the loop.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use cyclone_wire::command::{Command, Operation, Query};
use cyclone_wire::reply::Reply;
use mio::Waker;
use mio::event::Event;

use crate::config::Config;
use crate::node::{Node, NodeError, Now};
use crate::requests::Outcome;
use crate::run::{Companion, Reactor};
use crate::start::StartError;

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
    /// The command exceeds the configured limits.
    #[error("too large")]
    TooLarge,
    /// The replica has stopped.
    #[error("the replica has stopped")]
    Stopped,
}

enum Call {
    Write(Vec<u8>, Sender<Outcome>),
    Read(Vec<u8>, Sender<Outcome>),
}

struct Queue {
    calls: Mutex<Vec<Call>>,
    closed: AtomicBool,
}

/// A running replica. Dropping it hands leadership over and stops it.
pub struct Embedded {
    queue: Arc<Queue>,
    waker: Arc<Waker>,
    stop: Arc<AtomicBool>,
    leads: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<(), NodeError>>>,
}

/// The loop's side of the queue.
struct Host {
    queue: Arc<Queue>,
    leads: Arc<AtomicBool>,
    waiting: HashMap<u64, Sender<Outcome>>,
    next: u64,
}

impl Companion for Host {
    fn ready(&mut self, _event: &Event) {}

    fn step(&mut self, _now: Now, node: &mut Node) -> usize {
        let calls = std::mem::take(
            &mut *self
                .queue
                .calls
                .lock()
                .unwrap_or_else(PoisonError::into_inner),
        );
        let mut work = calls.len();
        for call in calls {
            self.next += 1;
            match call {
                // Both were encoded by this program's own handle.
                Call::Write(bytes, answer) => {
                    if let Ok(command) = Command::decode(&bytes) {
                        self.waiting.insert(self.next, answer);
                        node.write(self.next, &command.operation);
                    }
                }
                Call::Read(bytes, answer) => {
                    if let Ok(query) = Query::decode(&bytes) {
                        self.waiting.insert(self.next, answer);
                        node.read(self.next, &query);
                    }
                }
            }
        }
        for (ticket, outcome) in node.take_completions() {
            work += 1;
            if let Some(answer) = self.waiting.remove(&ticket) {
                // A caller that gave up does not want to know.
                let _ = answer.send(outcome);
            }
        }
        self.leads.store(node.leads(), Ordering::Relaxed);
        work
    }
}

impl Embedded {
    /// Starts a replica and the thread that runs it.
    ///
    /// # Errors
    /// See [`StartError`].
    pub fn start(config: Config) -> Result<Embedded, StartError> {
        let cannot = |source| StartError::Io {
            what: "starting the event loop".into(),
            source,
        };
        let mut reactor = Reactor::new().map_err(cannot)?;
        let waker = reactor.waker();
        let mut node = Node::start(config, Arc::clone(&waker))?;
        let queue = Arc::new(Queue {
            calls: Mutex::new(Vec::new()),
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
        let (stopping, closing) = (Arc::clone(&stop), Arc::clone(&queue));
        let run = move || {
            let ended = reactor.run(&mut node, &mut host, &stopping);
            closing.closed.store(true, Ordering::Release);
            closing
                .calls
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .clear();
            ended
        };
        let thread = std::thread::Builder::new()
            .name("cyclone".into())
            .spawn(run)
            .map_err(cannot)?;
        Ok(Embedded {
            queue,
            waker,
            stop,
            leads,
            thread: Some(thread),
        })
    }

    /// Whether this replica leads; only then do calls succeed.
    pub fn leads(&self) -> bool {
        self.leads.load(Ordering::Relaxed)
    }

    /// Submits a write; the receiver gets its outcome once it is durable at a majority and applied.
    pub fn submit(&self, operation: &Operation<'_>) -> Receiver<Outcome> {
        let mut bytes = Vec::new();
        Command {
            session: None,
            operation: operation.clone(),
        }
        .encode(&mut bytes);
        self.push(|answer| Call::Write(bytes, answer))
    }

    /// Submits a linearizable read.
    pub fn submit_read(&self, query: &Query<'_>) -> Receiver<Outcome> {
        let mut bytes = Vec::new();
        query.encode(&mut bytes);
        self.push(|answer| Call::Read(bytes, answer))
    }

    fn push(&self, call: impl FnOnce(Sender<Outcome>) -> Call) -> Receiver<Outcome> {
        let (answer, outcome) = channel();
        let mut calls = self
            .queue
            .calls
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        // Whoever made the queue longer than nothing wakes the loop, which takes all of it at once.
        let first = calls.is_empty();
        if !self.queue.closed.load(Ordering::Acquire) {
            calls.push(call(answer));
        }
        drop(calls);
        if first {
            // The loop looks again within a tenth of a second should the wake-up fail.
            let _ = self.waker.wake();
        }
        outcome
    }

    /// Executes a write and waits.
    ///
    /// # Errors
    /// See [`EmbeddedError`].
    pub fn write(&self, operation: &Operation<'_>) -> Result<Reply, EmbeddedError> {
        wait(&self.submit(operation))
    }

    /// Executes a linearizable read and waits.
    ///
    /// # Errors
    /// See [`EmbeddedError`].
    pub fn read(&self, query: &Query<'_>) -> Result<Reply, EmbeddedError> {
        wait(&self.submit_read(query))
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

fn wait(outcome: &Receiver<Outcome>) -> Result<Reply, EmbeddedError> {
    match outcome.recv() {
        Ok(Outcome::Done(reply)) => Ok(reply),
        Ok(Outcome::NotLeader(leader)) => Err(EmbeddedError::NotLeader(leader)),
        Ok(Outcome::Busy) => Err(EmbeddedError::Busy),
        Ok(Outcome::Lost) => Err(EmbeddedError::NotDone),
        Ok(Outcome::Unknown) => Err(EmbeddedError::Unknown),
        Ok(Outcome::TooLarge) => Err(EmbeddedError::TooLarge),
        Err(_) => Err(EmbeddedError::Stopped),
    }
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

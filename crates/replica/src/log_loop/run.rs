//! The loops of logs on threads: those that the replica starts, or a host's own.

use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use cyclone_packet::idle::{Polling, Spinner};
use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token, Waker};

use super::LogLoop;
use super::handoff::{FairHandoff, LoanedLog};
use crate::config::Config;
use crate::node::NodeError;
use crate::run::{WAKER, now, pause};
use crate::watchdog::Watchdog;

/// Tokens of the lanes' descriptors begin here.
const LANES: usize = WAKER.0 + 1;

/// The loops of some logs, for one thread. Where it ends, the replica's loop moves its logs.
pub struct LogThread {
    lanes: Vec<LogLoop>,
    poll: Poll,
    waker: Arc<Waker>,
    events: Events,
    /// What is waited for beside the waker, with the lane that it belongs to; their tokens begin at
    /// [`LANES`].
    descriptors: Vec<(usize, RawFd)>,
    polling: Polling,
    /// Made in the thread that runs it.
    spinner: Option<Spinner>,
    /// Where the replica has its own thread for it and priorities are boosted, made there.
    watchdog: Option<Watchdog>,
}

impl LogThread {
    /// Divides the logs among `config.log_threads` loops, or one per log if that is less.
    /// `replica_waker` wakes the replica's own loop.
    ///
    /// # Errors
    /// When the system grants no descriptor.
    pub(crate) fn divide(
        lanes: Vec<LogLoop>,
        config: &Config,
        replica_waker: &Arc<Waker>,
    ) -> io::Result<Vec<LogThread>> {
        let count = usize::from(config.log_threads).min(lanes.len());
        let mut shares: Vec<Vec<LogLoop>> = (0..count).map(|_| Vec::new()).collect();
        for (position, lane) in lanes.into_iter().enumerate() {
            shares[position % count].push(lane);
        }
        let make = |lanes| LogThread::new(lanes, config.polling, replica_waker);
        shares.into_iter().map(make).collect()
    }

    fn new(
        lanes: Vec<LogLoop>,
        polling: Polling,
        replica_waker: &Arc<Waker>,
    ) -> io::Result<LogThread> {
        let poll = Poll::new()?;
        let waker = Arc::new(Waker::new(poll.registry(), WAKER)?);
        let mut descriptors = Vec::new();
        for (position, lane) in lanes.iter().enumerate() {
            lane.mailbox
                .connect(Arc::clone(replica_waker), Arc::clone(&waker));
            for descriptor in lane.descriptors() {
                let (source, token) =
                    (&mut SourceFd(&descriptor), Token(LANES + descriptors.len()));
                poll.registry()
                    .register(source, token, Interest::READABLE)?;
                descriptors.push((position, descriptor));
            }
        }
        Ok(LogThread {
            lanes,
            poll,
            waker,
            events: Events::with_capacity(64),
            descriptors,
            polling,
            spinner: None,
            watchdog: None,
        })
    }

    /// Has the calling thread, which runs it from now on, helped to its turns: the replica's loop
    /// waits for a log that is in hand.
    fn watch(&mut self, patience: Duration, times: &Arc<AtomicU64>) {
        match Watchdog::start(patience, Arc::clone(times)) {
            Ok(watchdog) => self.watchdog = Some(watchdog),
            Err(error) => tracing::warn!(%error, "the watchdog watches no thread of the logs"),
        }
    }

    /// The loops, for submitting to them and taking outcomes.
    pub fn lanes(&mut self) -> &mut [LogLoop] {
        &mut self.lanes
    }

    /// Does everything that is ready; if that is nothing, waits for something, at most so long.
    /// Answers how much was done.
    ///
    /// # Errors
    /// What the replica cannot live on with; its own loop hears of it.
    pub fn turn(&mut self, patience: Duration) -> Result<usize, NodeError> {
        if let Some(watchdog) = &self.watchdog {
            watchdog.begin(now().steady_us);
        }
        let mut work = 0;
        for lane in &mut self.lanes {
            match lane.step(&now) {
                Ok(done) => work += done,
                Err(error) => {
                    let log = lane.log;
                    lane.mailbox.fail(error);
                    return Err(NodeError::LoopEnded(log));
                }
            }
        }
        let active_us = self.lanes.iter().map(LogLoop::active_us).max();
        let active_us = active_us.unwrap_or(0);
        let spinner = self.spinner.get_or_insert_with(Spinner::new);
        spinner.spin_window.note_work(active_us);
        // Who has no patience does not yield either.
        let wait_us = match work {
            0 if !patience.is_zero() => self.wait_us(active_us).min(patience.as_micros() as u64),
            _ => 0,
        };
        if let Some(watchdog) = &mut self.watchdog {
            watchdog.end(work > 0, active_us);
        }
        if work > 0 {
            return Ok(work);
        }
        let sleeps = self.lanes.iter().all(|lane| lane.mailbox.may_sleep());
        let wait_us = if sleeps { wait_us } else { 0 };
        if let Some(watchdog) = self.watchdog.as_ref().filter(|_| wait_us > 0) {
            watchdog.sleep();
        }
        let waited = self
            .poll
            .poll(&mut self.events, Some(Duration::from_micros(wait_us)));
        self.lanes.iter().for_each(|lane| lane.mailbox.wakes());
        for event in &self.events {
            let position = event.token().0.wrapping_sub(LANES);
            if let Some(&(lane, descriptor)) = self.descriptors.get(position) {
                self.lanes[lane].on_readable(descriptor);
            }
        }
        match (waited, self.lanes.first()) {
            (Err(error), Some(first)) if error.kind() != io::ErrorKind::Interrupted => {
                first.mailbox.fail(NodeError::Port(error));
                Err(NodeError::LoopEnded(first.log))
            }
            _ => Ok(0),
        }
    }

    fn wait_us(&mut self, active_us: u64) -> u64 {
        let deadline_us = self.lanes.iter().map(LogLoop::deadline_us).min();
        let spinner = self.spinner.get_or_insert_with(Spinner::new);
        let now = now();
        let pause = pause(
            self.polling,
            now,
            deadline_us.unwrap_or(u64::MAX),
            active_us,
            spinner,
        );
        let has_deferred_sends = self.lanes.iter().any(LogLoop::has_deferred_sends);
        pause.sooner(has_deferred_sends).begin(now, spinner)
    }
}

impl Drop for LogThread {
    fn drop(&mut self) {
        for lane in &self.lanes {
            // A log that lies in its cell is the replica's loop's from now on; one in hand is lost
            // with this thread.
            if lane.holds {
                lane.mailbox.fail(NodeError::LoopEnded(lane.log));
                lane.log_handoff.abandon();
            }
            lane.mailbox.mark_ended();
        }
    }
}

/// Running loops. Dropping it stops them; each log stays with its current owner.
pub(crate) struct LogThreads {
    stop: Arc<AtomicBool>,
    log_handoffs: Vec<Arc<FairHandoff<Box<LoanedLog>>>>,
    threads: Vec<(Arc<Waker>, JoinHandle<()>)>,
}

impl LogThreads {
    /// Starts a thread for each of these loops. With `watch`, each is to begin a turn at least
    /// every so long while there is work; how often they had to be helped is counted there.
    ///
    /// # Errors
    /// When the system grants no thread.
    pub(crate) fn start(
        loops: Vec<LogThread>,
        config: &Config,
        watch: Option<(Duration, Arc<AtomicU64>)>,
    ) -> io::Result<LogThreads> {
        let mut crew = LogThreads {
            stop: Arc::new(AtomicBool::new(false)),
            log_handoffs: Vec::new(),
            threads: Vec::new(),
        };
        for (position, mut own) in loops.into_iter().enumerate() {
            let (stop, waker) = (Arc::clone(&crew.stop), Arc::clone(&own.waker));
            let log_handoffs = own.lanes.iter().map(|lane| Arc::clone(&lane.log_handoff));
            crew.log_handoffs.extend(log_handoffs);
            let cpu = config.log_cpus.get(position).copied();
            let watch = watch.clone();
            let run = move || {
                if let Some(cpu) = cpu {
                    pin(cpu);
                }
                if let Some((patience, helped)) = &watch {
                    own.watch(*patience, helped);
                }
                // An error was reported to the replica's loop, which ends with it.
                while !stop.load(Ordering::Relaxed) && own.turn(LONGEST_WAIT).is_ok() {}
            };
            let thread = std::thread::Builder::new()
                .name(format!("logs-{position}"))
                .spawn(run)?;
            crew.threads.push((waker, thread));
        }
        Ok(crew)
    }
}

/// A thread looks whether it is to stop, or has missed something, at least so often. A message for
/// it wakes it; a node with nothing to do has many such threads.
const LONGEST_WAIT: Duration = Duration::from_secs(1);

impl Drop for LogThreads {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // The replica's loop may have the logs in hand, and keeps them.
        self.log_handoffs
            .iter()
            .for_each(|log_handoff| log_handoff.abandon());
        for (waker, thread) in self.threads.drain(..) {
            // The thread polls before long.
            let _ = waker.wake();
            // A panic has been reported by its hook, and to the replica's loop by `LogThread`.
            let _ = thread.join();
        }
    }
}

fn pin(cpu: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    if let Err(error) = rustix::thread::sched_setaffinity(None, &set) {
        tracing::warn!(cpu, %error, "cannot pin a thread of the logs");
    }
}

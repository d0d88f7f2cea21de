//! The event loop around [`Node::step`]: clocks, readiness, and how to wait.

use std::io;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use cyclone_packet::idle::{MAX_RX_POLL_US, Polling, Spinner};
use mio::event::Event;
use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Registry, Token, Waker};

use crate::log_loop::{LogThread, LogThreads};
use crate::node::{Node, NodeError, Now};
use crate::watchdog::Watchdog;

/// Token of the waker that other threads use.
pub const WAKER: Token = Token(0);
/// Tokens of the packet port's descriptors begin here.
const PORT: usize = 1;
/// Tokens from here on belong to the loop's companion: beyond all descriptors that a port may have.
pub const COMPANION: usize = 1 << 16;

/// Longest sleep, so that a lost wake-up cannot stop the loop for good.
const LONGEST_SLEEP_US: u64 = 100_000;

/// What shares the replica's loop: the Redis gateway, or an embedding host's queue.
pub trait EventSource {
    /// A descriptor registered under a token from [`COMPANION`] on is ready.
    fn ready(&mut self, event: &Event);
    /// Moves what is ready: submits to the node, delivers its completions. Answers how much was
    /// done.
    fn step(&mut self, now: Now, node: &mut Node) -> usize;
    /// When it wants to be called again at the latest, in microseconds of the steady clock.
    fn deadline_us(&mut self, _now: Now) -> u64 {
        u64::MAX
    }
    /// Whether it may be given something that a whole turn finds and a poll of the packet queues
    /// does not.
    fn is_fed(&self) -> bool {
        true
    }
}

/// Reads both clocks. The steady one is CLOCK_BOOTTIME: it runs on while the machine sleeps.
pub fn now() -> Now {
    let steady = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let wall = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
    let micros = |t: rustix::time::Timespec| t.tv_sec as u64 * 1_000_000 + t.tv_nsec as u64 / 1000;
    Now {
        steady_us: micros(steady),
        wall_ms: micros(wall) / 1000,
    }
}

/// Readiness and the waker, made before the node because its worker threads need the waker.
pub struct Reactor {
    poll: Poll,
    waker: Arc<Waker>,
}

impl Reactor {
    /// # Errors
    /// When the system grants no epoll or event descriptor.
    pub fn new() -> io::Result<Reactor> {
        let poll = Poll::new()?;
        let waker = Arc::new(Waker::new(poll.registry(), WAKER)?);
        Ok(Reactor { poll, waker })
    }

    /// Wakes the loop from other threads.
    pub fn waker(&self) -> Arc<Waker> {
        Arc::clone(&self.waker)
    }

    /// For registering a companion's descriptors.
    pub fn registry(&self) -> &Registry {
        self.poll.registry()
    }

    /// Runs until `stop` is set. On the way out leadership is handed over, for at most half a
    /// second.
    ///
    /// # Errors
    /// What the replica cannot live on with; the process should end and be restarted.
    pub fn run(
        &mut self,
        node: &mut Node,
        companion: &mut dyn EventSource,
        stop: &AtomicBool,
    ) -> Result<(), NodeError> {
        let polling = node.config().polling;
        let descriptors: Vec<RawFd> = node.port_descriptors();
        let packets = node.packet_descriptors();
        for (position, descriptor) in descriptors.iter().enumerate() {
            self.poll
                .registry()
                .register(
                    &mut SourceFd(descriptor),
                    Token(PORT + position),
                    Interest::READABLE,
                )
                .map_err(NodeError::Port)?;
        }
        let loops = LogThread::divide(node.take_log_loops(), node.config(), &self.waker);
        let helped = Arc::new(AtomicU64::new(0));
        let boosts = node.config().priority_boost;
        let watch = boosts.then(|| (node.patience(), Arc::clone(&helped)));
        let start = |loops| LogThreads::start(loops, node.config(), watch.clone());
        let crew = loops.and_then(start);
        let crew = crew.map_err(NodeError::Port)?;
        let mut events = Events::with_capacity(1024);
        let mut leaving_until = None;
        let mut spinner = Spinner::new();
        let start = |(patience, helped)| Watchdog::start(patience, helped);
        let watchdog = watch.clone().map(start).transpose();
        let mut watchdog = watchdog.map_err(NodeError::Port)?;
        loop {
            node.take_logs()?;
            // No loop that moved a log has seen a later time.
            let now = now();
            if let Some(watchdog) = &watchdog {
                watchdog.begin(now.steady_us);
            }
            node.note_boosts(helped.load(Ordering::Relaxed));
            let mut work = companion.step(now, node);
            work += node.step(now)?;
            work += companion.step(now, node);
            spinner.spin_window.note_work(node.active_us());
            if stop.load(Ordering::Relaxed) {
                let until = *leaving_until.get_or_insert_with(|| {
                    node.resign();
                    now.steady_us + node.handover_us()
                });
                if !node.leads_any() || now.steady_us >= until {
                    drop(crew);
                    return node.close();
                }
            }
            let pause = if work > 0 {
                IdleStrategy::Spin
            } else {
                let deadline_us = node.deadline_us().min(companion.deadline_us(now));
                let deadline_us = deadline_us.min(now.steady_us + LONGEST_SLEEP_US);
                let pause = pause(polling, now, deadline_us, node.active_us(), &mut spinner);
                pause.sooner(node.has_deferred_sends())
            };
            node.lend_logs();
            if let Some(watchdog) = &mut watchdog {
                watchdog.end(work > 0, node.watched_for_us());
                if let IdleStrategy::Park(_) = pause {
                    watchdog.sleep();
                }
            }
            if pause == IdleStrategy::Spin && work == 0 && !companion.is_fed() {
                look(node, now);
            }
            let wait_us = pause.begin(now, &mut spinner);
            let is_spurious = |events: &Events| {
                for event in events {
                    node.on_readable(descriptors[event.token().0 - PORT]);
                }
                node.rx_is_empty()
            };
            match self.wait(&mut events, packets, (now.steady_us, wait_us), is_spurious) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(NodeError::Port(error)),
            }
            for event in &events {
                let token = event.token().0;
                if token >= COMPANION {
                    companion.ready(event);
                } else if let Some(&descriptor) = descriptors.get(token.wrapping_sub(PORT)) {
                    node.on_readable(descriptor);
                }
            }
        }
    }

    /// Waits until something is ready, from `now_us` on for so long at most. A driver that has to
    /// look whether something has come looks here, by `is_spurious`, which is given the packets'
    /// events: after an unsuccessful poll the loop need not make its turn. Whatever else is ready
    /// ends the wait.
    fn wait(
        &mut self,
        events: &mut Events,
        packets: usize,
        (now_us, wait_us): (u64, u64),
        mut is_spurious: impl FnMut(&Events) -> bool,
    ) -> io::Result<()> {
        let mut left_us = wait_us;
        loop {
            self.poll
                .poll(events, Some(Duration::from_micros(left_us)))?;
            let mut tokens = events.iter().map(|event| event.token().0);
            let only_packets = tokens.all(|token| (PORT..PORT + packets).contains(&token));
            if left_us == 0 || events.is_empty() || !only_packets || !is_spurious(events) {
                return Ok(());
            }
            // A clock that goes back makes no wait longer.
            let until_us = now_us + wait_us;
            left_us = until_us.saturating_sub(now().steady_us).min(left_us);
        }
    }
}

/// After a step at `now` that did nothing: the time in which looks may take the place of turns. A
/// clock that has gone back is outside of it.
fn quiet_window(node: &Node, now: Now) -> Range<u64> {
    let longest_us = now.steady_us + MAX_RX_POLL_US;
    now.steady_us..node.quiet_until_us().min(longest_us)
}

/// Polls the packet queues until something arrives or the window ends.
fn look(node: &mut Node, since: Now) {
    // First, since most drivers do not look: their loops shall not pay for the time.
    if !node.rx_is_empty() {
        return;
    }
    let quiet_window = quiet_window(node, since);
    while quiet_window.contains(&now().steady_us) && node.rx_is_empty() {
        std::hint::spin_loop();
    }
}

/// Turns of a loop that waits for no descriptors and has nothing but the node: those that would
/// find nothing only poll the packet queues.
#[derive(Default)]
pub struct BusyPoller {
    quiet_window: Range<u64>,
}

impl BusyPoller {
    /// [`Node::step`], unless that would do nothing. Nothing else is done with the node in between.
    ///
    /// # Errors
    /// As [`Node::step`].
    pub fn turn(&mut self, now: Now, node: &mut Node) -> Result<usize, NodeError> {
        if self.quiet_window.contains(&now.steady_us) && node.rx_is_empty() {
            // Another thread of the same core goes on faster.
            std::hint::spin_loop();
            return Ok(0);
        }
        let work = node.step(now)?;
        self.quiet_window = match work {
            0 => quiet_window(node, now),
            _ => Range::default(),
        };
        Ok(work)
    }
}

/// What a loop does that has found nothing to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IdleStrategy {
    /// Looks again at once.
    Spin,
    /// Lets other threads run, then looks again.
    Yield,
    /// Sleeps until something is ready, for so many microseconds at most.
    Park(u64),
}

impl IdleStrategy {
    /// Yields if that is what it is; answers how long to wait for readiness, in microseconds.
    pub(crate) fn begin(self, now: Now, spinner: &mut Spinner) -> u64 {
        match self {
            IdleStrategy::Spin => 0,
            IdleStrategy::Yield => {
                spinner.yielder.yield_once(now.steady_us);
                0
            }
            IdleStrategy::Park(us) => us,
        }
    }

    /// What waits for a full queue goes on within a tenth of a millisecond, and a poll sleeps for a
    /// whole one at least.
    pub(crate) fn sooner(self, has_deferred_sends: bool) -> IdleStrategy {
        match self {
            IdleStrategy::Park(us) if us < 1_000 && has_deferred_sends => IdleStrategy::Yield,
            other => other,
        }
    }
}

/// How to wait for readiness.
pub(crate) fn pause(
    polling: Polling,
    now: Now,
    deadline_us: u64,
    active_us: u64,
    spinner: &mut Spinner,
) -> IdleStrategy {
    let until = deadline_us.saturating_sub(now.steady_us);
    if until == 0 {
        return IdleStrategy::Spin;
    }
    let near_work = now.steady_us.saturating_sub(active_us) < spinner.spin_window.us();
    match polling {
        Polling::Busy => IdleStrategy::Spin,
        Polling::Adaptive if near_work && spinner.may_spin(now.steady_us) => IdleStrategy::Spin,
        Polling::Adaptive if near_work && spinner.yielder.may_yield(now.steady_us) => {
            IdleStrategy::Yield
        }
        Polling::Adaptive | Polling::Event => IdleStrategy::Park(until),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    const LONG_US: u64 = 20_000_000;

    #[test]
    fn spurious_packet_events_end_no_sleep_and_other_events_do() {
        let mut reactor = Reactor::new().unwrap();
        let (packets, card) = UnixStream::pair().unwrap();
        let (news, flash) = UnixStream::pair().unwrap();
        for (token, socket) in [(PORT, &packets), (PORT + 1, &news)] {
            let registry = reactor.registry();
            let mut source = SourceFd(&socket.as_raw_fd());
            registry
                .register(&mut source, Token(token), Interest::READABLE)
                .unwrap();
        }
        let waker = reactor.waker();
        let mut events = Events::with_capacity(8);
        let wake = |mut socket: &UnixStream| socket.write_all(b"1").unwrap();
        let is_ready = |events: &Events, token| events.iter().any(|it| it.token() == token);

        wake(&card);
        let mut looks = 0;
        let found_by_third = |_: &Events| {
            looks += 1;
            wake(&card);
            looks < 3
        };
        let long = (now().steady_us, LONG_US);
        reactor.wait(&mut events, 1, long, found_by_third).unwrap();
        assert!(is_ready(&events, Token(PORT)) && looks == 3, "{looks}");

        // News that come while it sleeps on are not taken for packets.
        wake(&card);
        let long = (now().steady_us, LONG_US);
        let is_spurious = |_: &Events| {
            wake(&flash);
            true
        };
        reactor.wait(&mut events, 1, long, is_spurious).unwrap();
        assert!(is_ready(&events, Token(PORT + 1)));

        wake(&card);
        let long = (now().steady_us, LONG_US);
        let is_spurious = |_: &Events| {
            waker.wake().unwrap();
            true
        };
        reactor.wait(&mut events, 1, long, is_spurious).unwrap();
        assert!(is_ready(&events, WAKER));

        wake(&card);
        let begun_us = now().steady_us;
        reactor
            .wait(&mut events, 1, (begun_us, 20_000), |_| true)
            .unwrap();
        assert!(events.is_empty() && now().steady_us >= begun_us + 20_000);
    }
}

//! A server's side of the configuration manager: a thread that renews the lease, hears of
//! configurations, and hands them to the server's loop. It waits for nothing but its socket, so
//! that a loop that is busy does not lose the lease; a loop or a control thread that does nothing
//! any more does.
//= rowan §4.5

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError};
use std::time::Duration;

use anyhow::{Context, Result};
use cyclone_pmkv_cm::holder::{Action, Event, Holder};
use cyclone_pmkv_cm::message::Refusal;
use cyclone_pmkv_cm::{Configuration, FromServer, Hello, ShardId, Timing, ToServer};

use super::clock;
use super::post::Post;

/// A server whose loop or control thread has shown no life for so long loses its lease.
const LIFELESS_US: u64 = 3_000_000;

/// What the agent tells the loop.
pub(super) enum Order {
    /// Prepare this configuration, then report [`Event::Adopted`].
    Adopt(Arc<Configuration>),
    /// It is committed.
    Commit {
        config: Arc<Configuration>,
        /// Shards that this server serves and did not serve before.
        serve: Vec<ShardId>,
    },
    /// The manager does not let this server in, and goes on not doing so.
    Refused(Refusal),
    /// Everything was moved away from this server.
    Left,
}

/// What loop and agent know of each other at any moment.
#[derive(Default)]
pub(super) struct Shared {
    /// Until when this server may serve, by [`clock::now_us`].
    lease_until_us: AtomicU64,
    /// When loop and control thread last showed that they live.
    alive_us: AtomicU64,
    control_alive_us: AtomicU64,
    ended: AtomicBool,
}

impl Shared {
    /// Whether this server holds its lease at this moment.
    pub fn holds_lease(&self) -> bool {
        clock::now_us() < self.lease_until_us.load(Ordering::SeqCst)
    }

    /// The loop lives.
    pub fn beat(&self) {
        self.alive_us.store(clock::now_us(), Ordering::Relaxed);
    }

    /// The control thread begins a turn.
    pub fn beat_control(&self) {
        self.control_alive_us
            .store(clock::now_us(), Ordering::Relaxed);
    }

    /// Without the loop nothing is answered, without the control thread no segment is posted,
    /// digested or cleaned: who has lost either leaves its shards to others.
    fn is_alive(&self) -> bool {
        let now_us = clock::now_us();
        [&self.alive_us, &self.control_alive_us]
            .iter()
            .all(|it| now_us.saturating_sub(it.load(Ordering::Relaxed)) < LIFELESS_US)
    }

    /// The agent shall end.
    pub fn end(&self) {
        self.ended.store(true, Ordering::SeqCst);
    }
}

/// What an agent is made of.
pub(super) struct Settings {
    pub hello: Hello,
    pub rules: Timing,
    /// Its socket, and the managers'.
    pub socket: PathBuf,
    pub managers: Vec<PathBuf>,
}

/// Runs the agent until [`Shared::end`].
pub(super) fn run(
    settings: Settings,
    shared: &Shared,
    orders: &Sender<Order>,
    reports: &Receiver<Event>,
) -> Result<()> {
    clock::come_first();
    let mut post = Post::open(&settings.socket)
        .with_context(|| format!("cannot open {}", settings.socket.display()))?;
    let mut holder = Holder::new(settings.hello, settings.rules, clock::now_us())?;
    let mut actions = Vec::new();
    while !shared.ended.load(Ordering::SeqCst) {
        let mut events = Vec::new();
        // The manager's leases say how often.
        let wait = Duration::from_micros(holder.tick_us().min(1_000));
        if let Some((_, bytes)) = post.receive(wait)
            && let Ok(message) = ToServer::decode(&bytes)
        {
            events.push(Event::Message(message));
        }
        loop {
            match reports.try_recv() {
                Ok(event) => events.push(event),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return Ok(()),
            }
        }
        if shared.is_alive() {
            events.push(Event::Tick);
        }
        for event in events {
            holder.step(clock::now_us(), event, &mut actions);
        }
        shared
            .lease_until_us
            .store(holder.lease_until_us(), Ordering::SeqCst);
        for action in actions.drain(..) {
            match action {
                Action::Send(message) => say(&mut post, &settings.managers, &message),
                Action::Adopt { config, .. } => give(orders, Order::Adopt(config)),
                // The loop finds what to release in the memory's own file.
                Action::Committed { config, serve, .. } => {
                    give(orders, Order::Commit { config, serve });
                }
                Action::Refused(reason) => give(orders, Order::Refused(reason)),
                Action::Left => give(orders, Order::Left),
            }
        }
    }
    Ok(())
}

fn say(post: &mut Post, managers: &[PathBuf], message: &FromServer) {
    let bytes = message.encode();
    for manager in managers {
        post.send(manager, &bytes);
    }
}

fn give(orders: &Sender<Order>, order: Order) {
    // Without a loop the agent ends with its next check of the reports.
    let _ = orders.send(order);
}

#[cfg(test)]
mod tests {
    use super::*;
    use cyclone_pmkv_cm::ServerId;
    use std::sync::mpsc::channel;

    /// The control thread hangs: the server must not keep its lease, as others would wait for its
    /// memory without end.
    #[test]
    fn without_loop_or_control_thread_nothing_is_asked_for() {
        let directory = tempfile::tempdir().expect("a directory");
        let socket = |name: &str| directory.path().join(name);
        let mut manager = Post::open(&socket("manager")).expect("a socket");
        let settings = Settings {
            hello: Hello {
                server: ServerId(0),
                incarnation: 1,
                session: 1,
                client: "127.0.0.1:1".into(),
                peer: "/x/s0".into(),
            },
            rules: Timing::with_lease(10_000),
            socket: socket("server"),
            managers: vec![socket("manager")],
        };
        let (order, _orders) = channel();
        let (report, reports) = channel();
        let shared = Shared::default();
        std::thread::scope(|scope| {
            let state = &shared;
            scope.spawn(move || run(settings, state, &order, &reports));
            let mut hears = |wait_ms| {
                let heard = manager.receive(Duration::from_millis(wait_ms));
                heard.is_some()
            };
            shared.beat();
            assert!(!hears(200), "there is no control thread");
            shared.beat_control();
            assert!(hears(2_000), "both are there");
            let long_ago = clock::now_us() - LIFELESS_US;
            shared.control_alive_us.store(long_ago, Ordering::Relaxed);
            while hears(200) {}
            shared.beat_control();
            assert!(hears(2_000), "it goes on");
            shared.alive_us.store(long_ago, Ordering::Relaxed);
            while hears(200) {}
            shared.end();
            drop(report);
        });
    }
}

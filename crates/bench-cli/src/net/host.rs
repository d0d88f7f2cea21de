//! Several replicas in one thread that never waits, each with a driver in its own network
//! namespace: one CPU is all that a cluster has, and no time goes to wake-ups and switches between
//! processes.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use cyclone_client::{Client, Completion};
use cyclone_replica::{BusyPoller, Node, Now, Reactor, now};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::{Place, config_of};

/// A node, its turns, and what its workers wake; no thread waits there.
pub(super) struct Hosted {
    node: Node,
    turns: BusyPoller,
    _reactor: Reactor,
}

impl Hosted {
    fn turn(&mut self, now: Now) -> Result<usize> {
        Ok(self.turns.turn(now, &mut self.node)?)
    }
}

/// Short enough that no replica stands for election meanwhile.
const NAP: Duration = Duration::from_micros(200);

/// Runs new nodes until the process ends. The first is expected to lead: it is moved after each
/// other one, so that a majority is enough for its answers.
pub fn run(places: &[Place], naps: bool) -> Result<()> {
    speak();
    let mut nodes = start(places)?;
    let (leader, others) = nodes.split_first_mut().context("no nodes")?;
    let begun = Instant::now();
    let clock = || match naps {
        // Under callgrind only the standard library's clocks run.
        true => plain_now(begun),
        false => now(),
    };
    loop {
        let mut work = leader.turn(clock())?;
        for other in &mut *others {
            work += other.turn(clock())?;
            work += leader.turn(clock())?;
        }
        if naps && work == 0 {
            std::thread::sleep(NAP);
        }
    }
}

fn plain_now(begun: Instant) -> Now {
    let wall = SystemTime::now().duration_since(UNIX_EPOCH);
    Now {
        steady_us: begun.elapsed().as_micros() as u64 + 1,
        wall_ms: wall.unwrap_or_default().as_millis() as u64,
    }
}

/// Starts new nodes, each in its namespace; this thread is back in its own afterwards.
pub(super) fn start(places: &[Place]) -> Result<Vec<Hosted>> {
    let own = File::open("/proc/thread-self/ns/net").context("own namespace")?;
    let mut nodes = Vec::new();
    for place in places {
        enter(&place.namespace)?;
        let config = config_of(place)?;
        let reactor = Reactor::new().context("epoll")?;
        let node = Node::start(config, reactor.waker())?;
        nodes.push(Hosted {
            node,
            turns: BusyPoller::default(),
            _reactor: reactor,
        });
    }
    join(&own)?;
    Ok(nodes)
}

/// Moves a client after each of these nodes, until there is an outcome.
pub(super) fn alternate(
    nodes: &mut [Hosted],
    client: &mut Client,
    done: &mut Vec<Completion>,
) -> Result<()> {
    while done.is_empty() {
        for node in &mut *nodes {
            node.turn(now())?;
            client.poll(Duration::ZERO, done)?;
        }
    }
    Ok(())
}

/// Events are logged to standard error.
pub(super) fn speak() {
    let words = tracing_subscriber::fmt().with_writer(std::io::stderr);
    words.with_target(false).init();
}

/// Moves this thread into a network namespace: what it opens from now on lies there.
pub(super) fn enter(namespace: &str) -> Result<()> {
    let path = Path::new("/run/netns").join(namespace);
    let file = File::open(&path).with_context(|| path.display().to_string())?;
    join(&file).with_context(|| format!("entering {namespace}"))
}

fn join(namespace: &File) -> Result<()> {
    let kind = Some(LinkNameSpaceType::Network);
    move_into_link_name_space(namespace.as_fd(), kind).context("changing the network namespace")
}

//! Several replicas in one thread that never waits, each with a driver in a network namespace of its own: one CPU is all that a
//! cluster has, and no time goes to wake-ups and switches between processes.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use cyclone_client::{Client, Completion};
use cyclone_replica::{Node, Reactor, now};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::{Place, config_of};

/// A node, and what its workers wake; nobody waits there.
pub(super) type Hosted = (Node, Reactor);

/// Runs new nodes until the process ends. The first is expected to lead: it is moved after each other one, so that a majority is
/// enough for its answers.
pub fn run(places: &[Place]) -> Result<()> {
    speak();
    let mut nodes = start(places)?;
    let (leader, others) = nodes.split_first_mut().context("no nodes")?;
    loop {
        leader.0.step(now())?;
        for (other, _) in &mut *others {
            other.step(now())?;
            leader.0.step(now())?;
        }
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
        nodes.push((node, reactor));
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
        for (node, _) in &mut *nodes {
            node.step(now())?;
            client.poll(Duration::ZERO, done)?;
        }
    }
    Ok(())
}

/// What happens is told on standard error.
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

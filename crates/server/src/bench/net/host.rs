//! Several replicas in one thread that never waits, each with a driver in a network namespace of its own: one CPU is all that a
//! cluster has, and no time goes to wake-ups and switches between processes.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;

use anyhow::{Context, Result};
use cyclone_replica::{Node, Reactor, now};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::{Place, config_of};

/// Runs new nodes until the process ends. The first is expected to lead: it is moved after each other one, so that a majority is
/// enough for its answers.
pub fn run(places: &[Place]) -> Result<()> {
    speak();
    let mut nodes = Vec::new();
    for place in places {
        enter(&place.namespace)?;
        let config = config_of(place)?;
        let reactor = Reactor::new().context("epoll")?;
        let node = Node::start(config, reactor.waker())?;
        // The node's workers wake it; nobody waits there.
        nodes.push((node, reactor));
    }
    let (leader, others) = nodes.split_first_mut().context("no nodes")?;
    loop {
        leader.0.step(now())?;
        for (other, _) in &mut *others {
            other.step(now())?;
            leader.0.step(now())?;
        }
    }
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
    move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
        .with_context(|| format!("entering {namespace}"))
}

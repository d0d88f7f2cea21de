//! A whole network in one process, replayed exactly from its seed: memory that loses what was not
//! flushed, packets that are late, connections that end at the worst moment.
//!
//! ```text
//!   SimFabric    the network, and what the test does to it        here
//!   SimConfig    what it does on its own, with a switch each      config.rs
//!   SimEndpoint  one life of one process                          endpoint.rs
//!                what is due when, machines and processes         net.rs
//!                connections: order, effects, completions         link.rs
//!                how they end                                     link/ends.rs
//!                registrations, append queues, lines of bytes     target.rs
//!                chains                                           chain.rs
//! ```
//!
//! # Time
//! Nothing happens but by the test: [`SimFabric::advance`] moves on to the next thing due and does
//! it, [`SimFabric::run_for`] lets a span of time pass. A test polls its programs after each step,
//! in an order it chooses (or draws from its own seed):
//!
//! ```text
//!   loop { for program in programs { program.poll(fabric.now_ns()) }  if !fabric.advance() { break } }
//! ```
//!
//! [`Endpoint::wait`](crate::Endpoint::wait) does the same for a test with one program: it advances
//! until the endpoint has events or the timeout has passed in simulated time. `poll` never moves
//! time. With one thread everything follows from the seed and the calls.
//!
//! # Faults
//! | fault | what happens | switch |
//! |---|---|---|
//! | delay | each packet takes its own time, some very long | [`SimConfig::delay`] |
//! | overtaking | packets of different connections arrive in any order | [`SimConfig::reorder`] |
//! | no order | operations of one connection overtake each other, lines of a write land in any order | [`SimConfig::write_order`] |
//! | partial effect | a write, read, append or copy goes in bursts of 64 B lines; everybody else's in between | [`SimConfig::burst_lines`], [`SimConfig::burst_gap_ns`] |
//! | crash | [`SimFabric::crash`]: operations in flight towards the machine land a random prefix of their lines, later ones nothing; of the memory, each word not flushed and fenced survives or not; peers hear of it up to 1.5 `give_up_ns` later | |
//! | death of a process | [`SimFabric::kill_process`]: the same, but memory stays as it was | |
//! | late packets of the dead | what a dead or disconnected initiator had posted goes on for up to four base delays | [`SimConfig::in_flight_survives`] |
//! | broken connection | at random: the operation and those behind it fail; some may have taken effect, whole or in part, unheard of | [`SimConfig::break_per_million`] |
//! | partition | [`SimFabric::partition`]: packets wait; after a while the connection breaks | [`SimConfig::give_up_ns`] |
//! | pause | [`SimFabric::pause`]: the program polls nothing and posts nothing; others' one-sided operations go on | |
//! | stalled sender | paused between getting an append's address and writing | [`AppendBy::Reservation`](crate::AppendBy) |
//! | no segment | an append waits, then fails; its connection lives | [`SimConfig::no_segment_wait_ns`] |
//! | slow append | lands in a segment that the receiver took as used | [`UsedBy::FirstWords`] |
//! | target's CPU needed | flushes, appends, or everything wait for the target's poll | [`SimConfig::flush`], [`SimConfig::target_polls`] |
//! | missing features | atomics or appends refused | [`SimConfig::atomics`], [`SimConfig::append`] |
//!
//! [`SimFabric::faults`] counts what has happened.
//!
//! # What is promised
//! A flush makes exactly its range durable, at one instant, after everything posted before it on
//! its connection has taken effect. Append completions mean durable. An append's address is given
//! when its packet arrives; its bytes come later. A failed operation (but for
//! [`NoSegment`](crate::FailureKind::NoSegment)) ends its connection for both sides: the owner
//! hears of completions that came before, then of the operation to blame, then
//! [`Broken`](crate::FailureKind) for the rest, and the connection's id is unknown from then on. A
//! side that has nothing in flight gets [`Disconnected`](crate::Event::Disconnected). A failed
//! chain operation ends the chain, not its connections; a connection's end ends its chains.

mod chain;
mod config;
mod endpoint;
mod link;
mod net;
mod target;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::{Arc, Mutex};

use cyclone_pmem::{CrashSim, SharedArea};

pub use config::{Delay, Faults, SimConfig, UsedBy};
pub use endpoint::SimEndpoint;

use endpoint::lock;
use net::Net;

/// A network of simulated endpoints. Clones are the same network.
///
/// Names are the test's own: methods panic when there is no machine of the name, or its state
/// forbids what is asked.
#[derive(Clone)]
pub struct SimFabric(Arc<Mutex<Net>>);

impl SimFabric {
    /// An empty network; everything random in it follows from the seed.
    pub fn new(seed: u64, config: SimConfig) -> SimFabric {
        SimFabric(Arc::new(Mutex::new(Net::new(seed, config))))
    }

    /// A new machine with zeroed memory, and a process on it. Its address is its name.
    ///
    /// # Panics
    /// When there is a machine of this name.
    pub fn endpoint(&self, name: &str) -> SimEndpoint {
        let bytes = lock(&self.0).config.memory_bytes;
        self.endpoint_with(name, bytes)
    }

    /// The same with a given size of memory, in bytes.
    ///
    /// # Panics
    /// When there is a machine of this name.
    pub fn endpoint_with(&self, name: &str, memory_bytes: u64) -> SimEndpoint {
        let mut net = lock(&self.0);
        assert!(net.node(name).is_none(), "there is a machine {name:?}");
        let node = net.add_node(name, memory_bytes);
        let life = net.start(node);
        drop(net);
        SimEndpoint::new(&self.0, life)
    }

    /// A machine loses power: its process ends, and its memory holds what the seed makes of it.
    /// Answers the image.
    ///
    /// # Panics
    /// When there is no such machine.
    pub fn crash(&self, name: &str, seed: u64) -> Vec<u8> {
        let mut net = lock(&self.0);
        let node = find(&net, name);
        net.kill(node);
        net.lose_power(node, seed);
        net.faults.crashes += 1;
        net.nodes[node].crash.newest()
    }

    /// A process ends; the memory that it used stays as it is, unflushed words included. (The
    /// memory is the very same: the dead program must not be run on.)
    ///
    /// # Panics
    /// When there is no such machine.
    pub fn kill_process(&self, name: &str) {
        let mut net = lock(&self.0);
        let node = find(&net, name);
        net.kill(node);
        net.faults.kills += 1;
    }

    /// A new process on the machine's memory: no registration, no queue and no connection is left;
    /// the address is the same.
    ///
    /// # Panics
    /// When there is no such machine, or a process runs there.
    pub fn restart(&self, name: &str) -> SimEndpoint {
        let mut net = lock(&self.0);
        let node = find(&net, name);
        let current = net.nodes[node].current;
        assert!(current.is_none(), "{name:?} runs");
        let life = net.start(node);
        drop(net);
        SimEndpoint::new(&self.0, life)
    }

    /// Cuts two machines off from each other, or joins them again.
    ///
    /// # Panics
    /// When there is no such machine.
    pub fn partition(&self, a: &str, b: &str, on: bool) {
        let mut net = lock(&self.0);
        let (a, b) = (find(&net, a), find(&net, b));
        net.partition(a, b, on);
    }

    /// Stops a machine's program, or lets it go on. Its polls and waits find nothing, its posts are
    /// `Busy`.
    ///
    /// # Panics
    /// When there is no such machine.
    pub fn pause(&self, name: &str, on: bool) {
        let mut net = lock(&self.0);
        let node = find(&net, name);
        net.nodes[node].paused = on;
        net.note(|| format!("pause node {node} {on}"));
        if let Some(life) = net.nodes[node].current.filter(|_| !on) {
            net.release(life, true);
        }
    }

    /// Moves on to the next thing due and does it; `false` when no event is pending any more.
    pub fn advance(&self) -> bool {
        lock(&self.0).advance()
    }

    /// When the next thing is due, in nanoseconds.
    pub fn next_due_ns(&self) -> Option<u64> {
        lock(&self.0).next_due_ns()
    }

    /// Lets so many nanoseconds pass.
    pub fn run_for(&self, ns: u64) {
        let mut net = lock(&self.0);
        let until_ns = net.now_ns.saturating_add(ns);
        net.run_until(until_ns);
    }

    /// Advances until nothing is due any more, `limit` things at most; returns whether all is
    /// quiet.
    pub fn settle(&self, limit: usize) -> bool {
        let mut net = lock(&self.0);
        (0..limit).any(|_| !net.advance())
    }

    /// Simulated time since the beginning, in nanoseconds.
    pub fn now_ns(&self) -> u64 {
        lock(&self.0).now_ns
    }

    /// Whether a process runs on the machine.
    ///
    /// # Panics
    /// When there is no such machine.
    pub fn is_running(&self, name: &str) -> bool {
        let net = lock(&self.0);
        net.nodes[find(&net, name)].current.is_some()
    }

    /// A machine's memory as it is now.
    ///
    /// # Panics
    /// When there is no such machine.
    pub fn memory(&self, name: &str) -> SharedArea {
        let net = lock(&self.0);
        net.nodes[find(&net, name)].memory.clone()
    }

    /// What a machine's memory may hold after a crash, without one.
    ///
    /// # Panics
    /// When there is no such machine.
    pub fn crash_sim(&self, name: &str) -> CrashSim {
        let net = lock(&self.0);
        net.nodes[find(&net, name)].crash.clone()
    }

    /// How often each fault has happened.
    pub fn faults(&self) -> Faults {
        lock(&self.0).faults
    }

    /// The last lines of what happened ([`SimConfig::transcript_lines`]).
    pub fn transcript(&self) -> Vec<String> {
        lock(&self.0).transcript()
    }

    /// A number that follows from everything that has happened: equal for equal runs.
    pub fn fingerprint(&self) -> u64 {
        lock(&self.0).fingerprint()
    }
}

fn find(net: &Net, name: &str) -> usize {
    net.node(name)
        .unwrap_or_else(|| panic!("there is no machine {name:?}"))
}

impl fmt::Debug for SimFabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let net = lock(&self.0);
        let (now_ns, machines) = (net.now_ns, net.nodes.len());
        write!(f, "SimFabric({machines} machines, {now_ns} ns)")
    }
}

//! The whole network: who there is, what is due when, and what a crash does.

use std::collections::{BTreeMap, VecDeque};

use cyclone_pmem::{CrashSim, Region, SharedArea};

use super::chain::Chain;
use super::config::{Faults, Random, SimConfig};
use super::link::Link;
use super::target::Target;
use crate::capabilities::Capabilities;
use crate::event::{Event, FailureKind};
use crate::operation::ConnectionId;

/// One direction of a connection: the link, and the side whose operations go this way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Way {
    pub(super) link: usize,
    pub(super) side: usize,
}

impl Way {
    pub(super) fn of(connection: ConnectionId) -> Way {
        Way {
            link: (connection.0 / 2) as usize,
            side: (connection.0 % 2) as usize,
        }
    }

    pub(super) fn id(self) -> ConnectionId {
        ConnectionId((self.link * 2 + self.side) as u64)
    }

    pub(super) fn back(self) -> Way {
        Way {
            link: self.link,
            side: 1 - self.side,
        }
    }
}

/// One member's part in a chain's operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hop {
    pub(super) chain: usize,
    pub(super) op: u64,
    pub(super) member: usize,
}

/// What is due at some time.
#[derive(Clone, Debug)]
pub(super) enum Due {
    /// An operation's first packet is at the target.
    Arrive(Way, u64),
    /// An operation goes on.
    Advance(Way, u64),
    /// An operation's completion is at the initiator.
    Answer(Way, u64),
    /// A connection ends by chance.
    Break(usize),
    /// The operations in flight of an initiator that is gone end.
    Stop(Way),
    /// A side learns that its connection has ended.
    Notice(Way, FailureKind),
    /// A chain's operation is at a member.
    HopArrive(Hop),
    /// It goes on there.
    HopAdvance(Hop),
    /// Its completion is at the initiator; of one member in a fan-out.
    HopAnswer(Hop),
    /// The operations in flight of a broken chain end.
    ChainStop(usize),
    /// The initiator learns that its chain is broken.
    ChainNotice(usize),
}

/// Something that waits for a program.
#[derive(Clone, Copy, Debug)]
pub(super) enum Gated {
    /// For the target's next poll.
    Operation(Way, u64),
    /// For the member's next poll.
    Hop(Hop),
    /// For the end of the initiator's pause.
    Stalled(Way, u64),
    /// For the end of the member's pause.
    StalledHop(Hop),
}

/// How an operation's step at its target went.
pub(super) enum Progress {
    /// More of it follows.
    More,
    /// Its effect is complete.
    Done,
    /// It waits for room at the target.
    Wait,
    /// It waits for the target's next poll.
    Gate,
    /// It is refused.
    Fail(FailureKind),
}

/// A machine, which outlives its processes.
pub(super) struct Node {
    pub(super) name: String,
    pub(super) memory: SharedArea,
    pub(super) crash: CrashSim,
    /// The endpoint of the process that runs there.
    pub(super) current: Option<usize>,
    pub(super) paused: bool,
}

/// An endpoint: one life of a process.
pub(super) struct Life {
    pub(super) node: usize,
    pub(super) alive: bool,
    pub(super) target: Target,
    pub(super) inbox: VecDeque<Event>,
    /// Messages among the events.
    pub(super) messages: usize,
    pub(super) gated: Vec<Gated>,
    /// The number of the newest packet that took effect, to count overtaking; and when the last
    /// arrives.
    pub(super) newest_packet: u64,
    pub(super) last_arrival_ns: u64,
}

pub(super) struct Net {
    pub(super) config: SimConfig,
    pub(super) capabilities: Capabilities,
    pub(super) random: Random,
    pub(super) now_ns: u64,
    due: BTreeMap<(u64, u64), Due>,
    next_due: u64,
    pub(super) next_id: u64,
    pub(super) next_packet: u64,
    pub(super) nodes: Vec<Node>,
    pub(super) lives: Vec<Life>,
    pub(super) links: Vec<Link>,
    pub(super) chains: Vec<Chain>,
    /// Pairs of nodes that cannot reach each other, lower first.
    cut: Vec<(usize, usize)>,
    pub(super) faults: Faults,
    transcript: VecDeque<String>,
    fingerprint: u64,
}

/// Panics when the machine that simulates has no memory left, or the image is empty.
fn simulated_memory(image: &[u8]) -> (SharedArea, CrashSim) {
    let (region, crash) = Region::from_image(image).expect("the machine has memory for it");
    let area = region.take(0, image.len() as u64);
    (area.expect("it is not taken").share(), crash)
}

impl Net {
    pub(super) fn new(seed: u64, config: SimConfig) -> Net {
        Net {
            capabilities: config.capabilities(),
            config,
            random: Random(seed),
            now_ns: 0,
            due: BTreeMap::new(),
            next_due: 0,
            next_id: 1,
            next_packet: 0,
            nodes: Vec::new(),
            lives: Vec::new(),
            links: Vec::new(),
            chains: Vec::new(),
            cut: Vec::new(),
            faults: Faults::default(),
            transcript: VecDeque::new(),
            fingerprint: 0xcbf2_9ce4_8422_2325,
        }
    }

    // Time.

    pub(super) fn after(&mut self, delay_ns: u64, due: Due) {
        let key = (self.now_ns + delay_ns, self.next_due);
        self.next_due += 1;
        self.due.insert(key, due);
    }

    pub(super) fn next_due_ns(&self) -> Option<u64> {
        self.due.first_key_value().map(|(&(time, _), _)| time)
    }

    /// Moves on to the next thing due and does it; `false` if nothing is.
    pub(super) fn advance(&mut self) -> bool {
        let Some(((time, _), due)) = self.due.pop_first() else {
            return false;
        };
        self.now_ns = self.now_ns.max(time);
        self.note(|| format!("{due:?}"));
        match due {
            Due::Arrive(way, op) => self.arrive(way, op),
            Due::Advance(way, op) => self.run(way, op),
            Due::Answer(way, op) => self.answer(way, op),
            Due::Break(link) => self.break_link(link, None, FailureKind::PeerGone),
            Due::Stop(way) => self.stop_way(way, false),
            Due::Notice(way, kind) => self.notice(way, kind),
            Due::HopArrive(hop) => self.hop_arrive(hop),
            Due::HopAdvance(hop) => self.hop_run(hop),
            Due::HopAnswer(hop) => self.hop_answer(hop),
            Due::ChainStop(chain) => self.chain_stop(chain),
            Due::ChainNotice(chain) => self.chain_notice(chain),
        }
        true
    }

    pub(super) fn run_until(&mut self, time_ns: u64) {
        while self.next_due_ns().is_some_and(|due| due <= time_ns) {
            self.advance();
        }
        self.now_ns = self.now_ns.max(time_ns);
    }

    /// How long a packet takes.
    pub(super) fn delay(&mut self) -> u64 {
        let delay = self.config.delay;
        let mut time = delay.base_ns + self.random.below(delay.jitter_ns);
        if self.random.below(1000) < delay.slow_per_mille {
            self.faults.slow += 1;
            time += delay.slow_ns >> self.random.below(8);
        }
        time
    }

    pub(super) fn gap(&mut self) -> u64 {
        1 + self.random.below(self.config.burst_gap_ns)
    }

    /// Lines that take effect at once, of an operation of so many.
    pub(super) fn burst(&mut self, lines: u64) -> u64 {
        1 + self
            .random
            .below(self.config.burst_lines.max(lines / 32).max(1))
    }

    // Records.

    pub(super) fn note(&mut self, line: impl FnOnce() -> String) {
        if self.config.transcript_lines == 0 {
            // The generator's state follows every decision: together with the clock it tells two
            // runs apart.
            let mixed = self.fingerprint ^ self.random.0 ^ self.now_ns.rotate_left(17);
            self.fingerprint = mixed.wrapping_mul(0x0100_0000_01b3);
            return;
        }
        let line = format!("{:>12} {}", self.now_ns, line());
        for byte in line.bytes() {
            self.fingerprint = (self.fingerprint ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        if self.transcript.len() == self.config.transcript_lines {
            self.transcript.pop_front();
        }
        self.transcript.push_back(line);
    }

    pub(super) fn transcript(&self) -> Vec<String> {
        self.transcript.iter().cloned().collect()
    }

    pub(super) fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    pub(super) fn tell(&mut self, life: usize, event: Event) {
        if !self.lives[life].alive {
            return;
        }
        self.note(|| format!("  tell {life}: {}", brief(&event)));
        self.lives[life].messages += usize::from(matches!(event, Event::Received { .. }));
        self.lives[life].inbox.push_back(event);
    }

    // Machines and processes.

    pub(super) fn node(&self, name: &str) -> Option<usize> {
        self.nodes.iter().position(|node| node.name == name)
    }

    pub(super) fn add_node(&mut self, name: &str, bytes: u64) -> usize {
        let (memory, crash) = simulated_memory(&vec![0; bytes as usize]);
        self.nodes.push(Node {
            name: name.to_owned(),
            memory,
            crash,
            current: None,
            paused: false,
        });
        self.nodes.len() - 1
    }

    pub(super) fn start(&mut self, node: usize) -> usize {
        let life = self.lives.len();
        let machine = &mut self.nodes[node];
        machine.current = Some(life);
        machine.paused = false;
        self.lives.push(Life {
            node,
            alive: true,
            target: Target::new(machine.memory.clone()),
            inbox: VecDeque::new(),
            messages: 0,
            gated: Vec::new(),
            newest_packet: 0,
            last_arrival_ns: 0,
        });
        self.note(|| format!("start node {node} as {life}"));
        life
    }

    /// Ends a node's process. Operations in flight towards it end with a part of their effect.
    pub(super) fn kill(&mut self, node: usize) {
        let Some(life) = self.nodes[node].current.take() else {
            return;
        };
        self.note(|| format!("end of node {node} as {life}"));
        self.nodes[node].paused = false;
        // Before the process is marked dead: the last lines still land.
        for way in self.ways() {
            if self.links[way.link].ends[way.side] == life {
                self.abandon(way, true);
            }
        }
        self.abandon_chains(life);
        let ended = &mut self.lives[life];
        ended.alive = false;
        ended.inbox.clear();
        ended.gated.clear();
        ended.messages = 0;
        ended.target = Target::new(self.nodes[node].memory.clone());
    }

    pub(super) fn ways(&self) -> impl Iterator<Item = Way> + use<> {
        (0..self.links.len()).flat_map(|link| [Way { link, side: 0 }, Way { link, side: 1 }])
    }

    /// Replaces a node's memory by what a loss of power leaves of it.
    pub(super) fn lose_power(&mut self, node: usize, seed: u64) {
        let image = self.nodes[node].crash.sampled(seed);
        let (memory, crash) = simulated_memory(&image);
        // The dead hold no memory.
        for life in self.lives.iter_mut().filter(|life| life.node == node) {
            life.target = Target::new(memory.clone());
        }
        self.nodes[node].memory = memory;
        self.nodes[node].crash = crash;
    }

    pub(super) fn is_paused(&self, life: usize) -> bool {
        self.nodes[self.lives[life].node].paused
    }

    pub(super) fn partition(&mut self, a: usize, b: usize, on: bool) {
        let pair = (a.min(b), a.max(b));
        self.cut.retain(|&cut| cut != pair);
        if on {
            self.cut.push(pair);
        }
        self.note(|| format!("partition {pair:?} {on}"));
    }

    pub(super) fn is_cut(&self, from: usize, to: usize) -> bool {
        let (a, b) = (self.lives[from].node, self.lives[to].node);
        a != b && self.cut.contains(&(a.min(b), a.max(b)))
    }
}

/// An event as a line of the transcript.
fn brief(event: &Event) -> String {
    match event {
        Event::Completed {
            connection,
            context,
            value,
            bytes,
        } => format!(
            "completed {} on {}: {value}, {} bytes",
            context,
            connection.0,
            bytes.len()
        ),
        Event::Received { connection, bytes } => {
            format!("received {} bytes on {}", bytes.len(), connection.0)
        }
        other => format!("{other:?}"),
    }
}

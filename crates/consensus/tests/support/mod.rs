//! A cluster of groups in one thread: simulated memory, a network that loses, doubles and reorders,
//! crashes.
#![allow(dead_code, missing_docs)] // Each test file uses its part.

use std::collections::BTreeMap;

use cyclone_consensus::{
    Config, EarlyAppends, Group, OutMessage, Outbox, PeerState, StepError, persist_all_pipelined,
};
use cyclone_pmem::{CrashSim, Payload, Region};
use cyclone_wal::HardState;
use cyclone_wal::flash::{FlashIdentity, FlashLog, FlashMode, FlashSpec, SimDisk};
use cyclone_wal::ring::{Ring, RingSpec};
use cyclone_wire::membership::read_members_entry;
use cyclone_wire::raftmsg::{Members, RaftKind, RaftMessage, SnapshotMeta};

pub const SPEC: RingSpec = RingSpec { log: 3, slots: 256 };
pub const AREA_BYTES: u64 = 256 << 10;
/// What clusters whose seed is a multiple of three let be unacknowledged.
pub const IN_FLIGHT_BYTES: u64 = 2000;
const SEGMENT_BYTES: u32 = 16 << 10;
const FLASH_BYTES: u64 = 1 << 20;
const WHO: FlashIdentity = FlashIdentity {
    cluster: 1,
    replica: 1,
    incarnation: 1,
};

fn flash_spec(mode: FlashMode) -> FlashSpec {
    FlashSpec {
        segment_bytes: SEGMENT_BYTES,
        outstanding: 8,
        flush_after_us: 300,
        grow_bytes: 128 << 10,
        ..FlashSpec::new(SPEC.log, mode, FLASH_BYTES)
    }
}

/// A small generator: runs are repeated from the seed.
#[derive(Clone)]
pub struct Dice(pub u64);

impl Dice {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    pub fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

/// Bytes that tell which proposal they are of.
pub fn payload(number: u64, len: usize) -> Payload {
    let mut bytes = number.to_le_bytes().to_vec();
    bytes.resize(len.max(8), number as u8);
    Payload::from_vec(bytes)
}

/// Lets a cluster come to rest; answers who leads.
pub fn elect(cluster: &mut Cluster) -> usize {
    cluster.quiesce();
    cluster.leader().unwrap()
}

/// A message as it travels, without its envelope.
pub fn encoded(group: &Group, message: &OutMessage) -> Vec<u8> {
    let encoded = group.encode(message);
    let mut bytes = encoded.prefix;
    (encoded.payloads.iter()).for_each(|part| bytes.extend_from_slice(part));
    assert_eq!(bytes[0], cyclone_wire::envelope::RAFT);
    let told = u32::from_le_bytes(bytes[1..5].try_into().unwrap());
    assert_eq!(told as usize, bytes.len() - 5);
    bytes.split_off(5)
}

/// What leaders send before their own copies are durable, with its receivers.
pub fn bytes_of(ahead: &[EarlyAppends<'_>]) -> Vec<(u64, Vec<u8>)> {
    let of = |from: &EarlyAppends<'_>| {
        let messages = from.messages.iter();
        let sent = messages.map(|message| (message.to, encoded(from.group, message)));
        sent.collect::<Vec<_>>()
    };
    ahead.iter().flat_map(of).collect()
}

pub struct Node {
    pub id: u64,
    pub group: Group,
    pub sim: Option<CrashSim>,
    pub disk: Option<SimDisk>,
    pub applied: u64,
    /// The voters that it was first started with.
    pub voters: Vec<u64>,
    /// The memberships that the store has seen, by index.
    pub memberships: BTreeMap<u64, Members>,
    /// What the store would still have after a crash; the log is trimmed no further.
    pub flushed: u64,
}

pub struct Cluster {
    pub nodes: Vec<Node>,
    pub network: Vec<(u64, Vec<u8>)>,
    /// Every entry ever seen committed, by any node.
    pub committed: BTreeMap<u64, (u64, Vec<u8>)>,
    pub leaders: BTreeMap<u64, u64>,
    pub reads: Vec<(u64, u64, u64)>,
    pub refused: BTreeMap<String, u64>,
    pub snapshots: u64,
    pub dice: Dice,
    pub mode: Option<FlashMode>,
    pub now_us: u64,
    /// Entries that came back from flash after a crash.
    pub replayed: u64,
}

pub fn config(id: u64, voters: &[u64], seed: u64) -> Config {
    let mut config = Config::new(SPEC.log, id, voters);
    config.seed = seed.wrapping_mul(31).wrapping_add(id);
    config.eager_commit = seed.is_multiple_of(2);
    // Some clusters send everything at once, the others next to nothing.
    (config.max_message_bytes, config.max_append_bytes) = match seed % 5 {
        0 => (64 << 10, 64 << 10),
        _ => (700, 3000),
    };
    // Some let next to nothing be unacknowledged.
    if seed.is_multiple_of(3) {
        config.max_inflight_bytes = IN_FLIGHT_BYTES;
    }
    config
}

impl Cluster {
    pub fn new(count: u64, seed: u64) -> Cluster {
        Cluster::with_flash(count, seed, None)
    }

    pub fn with_flash(count: u64, seed: u64, mode: Option<FlashMode>) -> Cluster {
        let voters: Vec<u64> = (1..=count).collect();
        let node = |id: &u64| Cluster::node(*id, &voters, seed, mode);
        Cluster {
            nodes: voters.iter().map(node).collect(),
            network: Vec::new(),
            committed: BTreeMap::new(),
            leaders: BTreeMap::new(),
            reads: Vec::new(),
            refused: BTreeMap::new(),
            snapshots: 0,
            dice: Dice(seed),
            mode,
            now_us: 0,
            replayed: 0,
        }
    }

    /// A replica that knows nothing but these voters; one that joins not even them.
    fn node(id: u64, voters: &[u64], seed: u64, mode: Option<FlashMode>) -> Node {
        let (region, sim) = Region::simulated(AREA_BYTES).unwrap();
        let area = region.take(0, AREA_BYTES).unwrap();
        let ring = Ring::create(area, SPEC, None, &HardState::default()).unwrap();
        let disk = mode.map(|_| SimDisk::new(FLASH_BYTES, seed ^ id));
        let flash = mode.zip(disk.as_ref()).map(|(mode, disk)| {
            let (spec, device) = (flash_spec(mode), Box::new(disk.device()));
            FlashLog::create(device, spec, &WHO, 7, (0, 0), ring.hard_state()).unwrap()
        });
        let group = Group::open_with(config(id, voters, seed), ring, flash).unwrap();
        Node {
            id,
            group,
            sim: Some(sim),
            disk,
            applied: 0,
            voters: voters.to_vec(),
            memberships: BTreeMap::new(),
            flushed: 0,
        }
    }

    /// Starts one more replica, which joins; answers its id.
    pub fn join(&mut self) -> u64 {
        let id = self.nodes.len() as u64 + 1;
        let node = Cluster::node(id, &[], self.dice.next(), self.mode);
        self.nodes.push(node);
        // What it was created with is durable before it takes part.
        for _ in 0..100 {
            self.drain(id as usize - 1);
        }
        id
    }

    /// Persists and sends everything a node has ready, and checks what it says.
    pub fn drain(&mut self, at: usize) {
        self.nodes[at].group.leave_joint();
        loop {
            self.now_us += 40;
            let (_, released) = self.nodes[at].group.poll_flash(self.now_us).unwrap();
            self.take(at, released);
            let mut idle = true;
            while let Some(ready) = self.nodes[at].group.take_ready() {
                let mut ahead = Vec::new();
                let send = |from: &[EarlyAppends<'_>]| ahead = bytes_of(from);
                let mut outboxes = persist_all_pipelined(std::iter::once(((), ready)), send);
                let (_, outbox) = outboxes.pop().unwrap();
                self.network.append(&mut ahead);
                self.take(at, outbox.unwrap());
                idle = false;
            }
            if idle {
                break;
            }
        }
        self.nodes[at].group.drain_flash(self.now_us);
    }

    fn take(&mut self, at: usize, outbox: Outbox) {
        let node = &mut self.nodes[at];
        for message in &outbox.messages {
            self.network
                .push((message.to, encoded(&node.group, message)));
        }
        for entry in &outbox.committed {
            assert_eq!(
                entry.index,
                node.applied + 1,
                "node {} skipped or repeated an entry",
                node.id
            );
            node.applied = entry.index;
            let mut payload = Vec::new();
            assert!(node.group.copy_payload(entry.index, &mut payload));
            assert_eq!(payload.len(), entry.len as usize);
            if entry.kind == cyclone_consensus::KIND_MEMBERS {
                let (_, members) = read_members_entry(&payload).unwrap();
                node.memberships.insert(entry.index, members);
            }
            let known = self
                .committed
                .entry(entry.index)
                .or_insert_with(|| (entry.term, payload.clone()));
            assert_eq!(
                *known,
                (entry.term, payload),
                "a committed entry changed at {}",
                entry.index
            );
        }
        node.group.applied_to(node.applied);
        self.reads.extend(
            outbox
                .read_states
                .iter()
                .map(|(context, index)| (node.id, *context, *index)),
        );
        if node.group.is_leader() {
            let leader = self.leaders.entry(node.group.term()).or_insert(node.id);
            assert_eq!(
                *leader,
                node.id,
                "two leaders in term {}",
                node.group.term()
            );
            if node.group.take_wants_snapshot() {
                let (index, members) = (node.applied, node.group.members());
                let term = node.group.entry_term(index).unwrap();
                let meta = SnapshotMeta {
                    id: self.snapshots,
                    index,
                    term,
                    members,
                };
                node.group
                    .set_snapshot_available((index > 0).then_some(meta));
            }
        }
    }

    /// Hands one message to its receiver.
    pub fn deliver(&mut self, to: u64, bytes: &[u8]) {
        let at = (to - 1) as usize;
        let (message, payload_at) = RaftMessage::decode(bytes).unwrap();
        let node = &mut self.nodes[at];
        if message.kind == RaftKind::Snapshot {
            let meta = message.snapshot.as_ref().unwrap();
            if meta.index > node.applied {
                // The store is replaced first, as it would be by a checkpoint.
                (node.applied, node.flushed) = (meta.index, meta.index);
                if meta.members != Members::default() {
                    node.memberships.insert(meta.index, meta.members.clone());
                }
                node.group.install_snapshot(&message).unwrap();
                self.snapshots += 1;
            }
            return;
        }
        let payloads = Payload::from_vec(bytes[payload_at..].to_vec());
        if let Err(error) = node.group.step(message, payloads) {
            // A leader that sends before its own write is durable may forget, in a crash, what
            // followers then acknowledge.
            let forgot = self.mode == Some(FlashMode::Only);
            let wrong = match error {
                StepError::ContradictsCommitted { .. } => true,
                StepError::BeyondLog { .. } => !forgot,
                _ => false,
            };
            assert!(!wrong, "{error}");
            let name = format!("{error:?}")
                .split([' ', '('])
                .next()
                .unwrap()
                .to_owned();
            *self.refused.entry(name).or_default() += 1;
        }
    }

    /// Kills a node and brings it back from what its memory may hold.
    pub fn crash(&mut self, at: usize) {
        self.crash_leaving(at, None);
    }

    /// The same with what its memory holds; by chance if that is not said.
    pub fn crash_leaving(&mut self, at: usize, image: Option<Vec<u8>>) {
        let node = &mut self.nodes[at];
        let Some(sim) = node.sim.take() else { return };
        let voters = node.voters.clone();
        let mut flash = self.mode.zip(node.disk.as_ref()).map(|(mode, disk)| {
            disk.faults(|faults| faults.torn_pages = true);
            disk.crash(self.dice.next());
            FlashLog::open(Box::new(disk.device()), flash_spec(mode), &WHO)
                .unwrap()
                .0
        });
        let (ring, sim) = if self.mode == Some(FlashMode::Only) {
            // The machine has lost its memory.
            let (region, sim) = Region::simulated(AREA_BYTES).unwrap();
            let area = region.take(0, AREA_BYTES).unwrap();
            let flash = flash.as_mut().unwrap();
            (flash.rebuild(area, SPEC, None, node.flushed).unwrap(), sim)
        } else {
            let image = image.unwrap_or_else(|| sim.sampled(self.dice.next()));
            let (region, sim) = Region::from_image(&image).unwrap();
            let area = region.take(0, AREA_BYTES).unwrap();
            let (ring, _) = Ring::open(area, SPEC, None).unwrap();
            if let Some(flash) = &mut flash {
                flash.join(&ring, node.flushed).unwrap();
            }
            (ring, sim)
        };
        let mut config = config(node.id, &voters, self.dice.next());
        node.applied = node.flushed;
        node.memberships.split_off(&(node.flushed + 1));
        let stored = node.memberships.last_key_value();
        config.members = stored.map(|(index, members)| (*index, members.clone()));
        config.applied = node.applied;
        config.applied_term = self
            .committed
            .get(&node.applied)
            .map_or(0, |(term, _)| *term);
        node.group = Group::open_with(config, ring, flash).unwrap();
        node.sim = Some(sim);
        self.replay(at);
    }

    /// What the store lacks and the ring does not have comes from flash.
    fn replay(&mut self, at: usize) {
        let node = &mut self.nodes[at];
        let through = node.group.replay_through();
        while node.applied < through {
            let entries = node.group.replay(node.applied + 1, through).unwrap();
            for entry in entries {
                assert_eq!(entry.index, node.applied + 1);
                let mut payload = Vec::new();
                assert!(node.group.copy_payload(entry.index, &mut payload));
                assert_eq!(self.committed[&entry.index], (entry.term, payload));
                node.applied = entry.index;
                self.replayed += 1;
            }
            self.now_us += 50;
            let (_, released) = node.group.poll_flash(self.now_us).unwrap();
            // Nothing has been persisted since the start but what the start itself wrote.
            assert!(released.messages.is_empty());
        }
    }

    /// Who leads and is about to be removed hands over.
    pub fn hand_over(&mut self) {
        let Some(at) = self.leader() else { return };
        let node = &mut self.nodes[at];
        let voters = node.group.members().voters;
        if !voters.contains(&node.id) {
            let to = voters[self.dice.below(voters.len() as u64) as usize];
            let _ = node.group.transfer_leader(to);
        }
    }

    /// No losses any more: everything is delivered, time passes, until all agree.
    pub fn quiesce(&mut self) {
        for round in 0..4000 {
            for at in 0..self.nodes.len() {
                self.drain(at);
            }
            let network = std::mem::take(&mut self.network);
            if network.is_empty() {
                let leader = self.leader().map(|at| &self.nodes[at]);
                let members = leader.map(|node| node.group.members());
                let last = leader.unwrap_or(&self.nodes[0]).applied;
                let takes_part =
                    |node: &&Node| members.as_ref().is_none_or(|all| all.contains(node.id));
                let is_settled = members.as_ref().is_some_and(|all| !all.is_joint());
                let agree = is_settled
                    && self.nodes.iter().filter(takes_part).all(|node| {
                        let status = node.group.status();
                        node.applied == last && status.last == last && status.commit == last
                    });
                if round > 40 && agree && self.nodes.iter().any(|node| node.group.is_leader()) {
                    return;
                }
                self.hand_over();
                for node in &mut self.nodes {
                    // An offer that is not taken up is withdrawn after a while.
                    for peer in node.group.status().peers {
                        if round % 50 == 0 && peer.state == PeerState::Snapshot {
                            node.group.report_snapshot(peer.id, false);
                        }
                    }
                    node.flushed = node.applied;
                    node.group.trim(node.applied.saturating_sub(100)).unwrap();
                    node.group.release(node.applied.saturating_sub(20)).unwrap();
                    node.group.tick(1);
                }
            }
            for (to, bytes) in network {
                self.deliver(to, &bytes);
            }
        }
        let status: Vec<_> = self.nodes.iter().map(|node| node.group.status()).collect();
        panic!("no agreement: {status:#?} refused {:?}", self.refused);
    }

    pub fn leader(&self) -> Option<usize> {
        let leaders = self
            .nodes
            .iter()
            .enumerate()
            .filter(|(_, node)| node.group.is_leader());
        leaders
            .max_by_key(|(_, node)| node.group.term())
            .map(|(at, _)| at)
    }
}

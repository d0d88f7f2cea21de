//! What the experiments' child processes do: keep a backup or a group's member, be one of two
//! symmetric servers, or burn a CPU. Parent and child talk in lines of JSON.

use std::io::{BufRead, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use cyclone_bench::children::pin;
use cyclone_bench::measure::Percentiles;
use cyclone_fabric::{Address, MemoryKey, Token};
use cyclone_replication::group::GroupMember;
use cyclone_replication::naive::{NaiveMember, NaiveMode};
use cyclone_replication::{
    Backup, BackupConfig, BackupId, Protocol, Sender, SenderConfig, SenderId, SharedLogs, backup,
    sender,
};
use serde::{Deserialize, Serialize};

use crate::load::{self, Load, RunEvent};
use crate::provider::{self, Provider, Side};

/// The tenant's secret in all experiments.
pub const TOKEN: Token = Token(0x6379_636c_6f6e_6531);
/// Memory of an initiator's endpoint, in bytes: it keeps nothing there.
const INITIATOR_BYTES: u64 = 1 << 20;
/// How long a backup that sleeps between messages sleeps at most. Messages wake it; segments are
/// posted for ten times as long ahead.
const NAP: Duration = Duration::from_millis(10);

/// Where and with what a child works.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Place {
    /// What carries the operations.
    pub provider: Provider,
    /// Where the memory's file is.
    pub directory: PathBuf,
    /// The memory file's name.
    pub name: String,
    /// The CPU to stay on.
    pub cpu: usize,
}

/// What a backup is like.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BackupRole {
    /// The protocol's name.
    pub protocol: String,
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// Bytes per segment.
    pub segment_bytes: u64,
    /// Looks all the time instead of sleeping.
    pub polling: bool,
}

/// What a symmetric server's own load is like.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NodeRole {
    /// Its number.
    pub server: u32,
    /// Senders.
    pub workers: u32,
    /// Records in flight per sender.
    pub window: usize,
    /// Bytes per record.
    pub record_bytes: usize,
    /// Milliseconds before measuring.
    pub warm_up_ms: u64,
    /// Milliseconds measured.
    pub measure_ms: u64,
    /// Of the records' bytes.
    pub seed: u64,
}

/// What a child is for.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "role", rename_all = "kebab-case")]
pub enum Role {
    /// Keeps a backup.
    Backup {
        /// Where.
        place: Place,
        /// How.
        backup: BackupRole,
    },
    /// Keeps a backup and replicates to its peer's, on one CPU.
    Node {
        /// Where.
        place: Place,
        /// Its backup.
        backup: BackupRole,
        /// Its load.
        node: NodeRole,
    },
    /// A member of a group whose operations need no separate program.
    GroupMember {
        /// Where.
        place: Place,
        /// Bytes of group memory.
        memory_bytes: u64,
    },
    /// Members of a naive chain, all on one thread.
    NaiveMembers {
        /// Where.
        place: Place,
        /// How many; more than one only where they look all the time.
        count: usize,
        /// Bytes of group memory.
        memory_bytes: u64,
        /// Looks all the time instead of sleeping.
        polling: bool,
    },
    /// Burns a CPU.
    Hog {
        /// Which.
        cpu: usize,
    },
}

/// A child's first line.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Ready {
    /// Its endpoint's address.
    pub address: Vec<u8>,
    /// The key of its memory, for members.
    pub key: Option<Vec<u8>>,
}

/// What a parent tells a symmetric server.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Peer {
    /// The other one's address.
    pub address: Vec<u8>,
}

/// What a symmetric server measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NodeResult {
    /// Records per second.
    pub records_s: f64,
    /// Latency.
    pub latency: Percentiles,
}

/// Runs a child's role until its parent closes standard input or dies.
pub fn run(role: &str) -> Result<()> {
    let signal = rustix::process::Signal::KILL;
    rustix::process::set_parent_process_death_signal(Some(signal))
        .context("parent death signal")?;
    let role: Role = serde_json::from_str(role).context("the role")?;
    let parent = Parent::listen();
    match role {
        Role::Backup { place, backup } => keep_backup(&place, &backup, &parent),
        Role::Node {
            place,
            backup,
            node,
        } => serve_node(&place, &backup, &node, &parent),
        Role::GroupMember {
            place,
            memory_bytes,
        } => keep_group_member(&place, memory_bytes, &parent),
        Role::NaiveMembers {
            place,
            count,
            memory_bytes,
            polling,
        } => keep_naive_members(&place, count, memory_bytes, polling, &parent),
        Role::Hog { cpu } => burn(cpu, &parent),
    }
}

/// The other end of standard input and output.
struct Parent {
    ended: Arc<AtomicBool>,
    lines: Receiver<String>,
}

impl Parent {
    fn listen() -> Parent {
        let ended = Arc::new(AtomicBool::new(false));
        let (sender, lines) = channel();
        let flag = Arc::clone(&ended);
        std::thread::spawn(move || {
            for line in std::io::stdin().lock().lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
            flag.store(true, Ordering::Relaxed);
        });
        Parent { ended, lines }
    }

    fn gone(&self) -> bool {
        self.ended.load(Ordering::Relaxed)
    }

    fn say(&self, message: &impl Serialize) -> Result<()> {
        let mut out = std::io::stdout().lock();
        writeln!(out, "{}", serde_json::to_string(message)?)?;
        Ok(out.flush()?)
    }
}

/// A backup and the clock of its steps.
struct Keeper {
    backup: Box<dyn Backup>,
    begun: Instant,
    used: Vec<cyclone_replication::UsedSegment>,
    failure: Option<anyhow::Error>,
}

impl Keeper {
    fn open(place: &Place, role: &BackupRole) -> Result<Keeper> {
        let protocol = role
            .protocol
            .parse::<Protocol>()
            .map_err(anyhow::Error::msg)?;
        let (directory, name) = (&place.directory, &place.name);
        let endpoint = provider::open(
            place.provider,
            Side::Target,
            directory,
            name,
            role.memory_bytes,
        )?;
        let mut config = BackupConfig::new(TOKEN, 0x5eed_0f5e_c2e7);
        config.segment_bytes = role.segment_bytes;
        Ok(Keeper {
            backup: backup(protocol, endpoint, config)?,
            begun: Instant::now(),
            used: Vec::new(),
            failure: None,
        })
    }

    /// One step; used segments are given back at once. Returns whether there was anything to do.
    fn step(&mut self) -> bool {
        let busy = self.backup.step(self.begun.elapsed().as_micros() as u64);
        self.backup.take_used(&mut self.used);
        for used in self.used.drain(..) {
            if let Err(error) = self.backup.release(used.segment) {
                self.failure.get_or_insert(error.into());
            }
        }
        busy
    }
}

fn keep_backup(place: &Place, role: &BackupRole, parent: &Parent) -> Result<()> {
    pin(place.cpu);
    let mut keeper = Keeper::open(place, role)?;
    parent.say(&Ready {
        address: keeper.backup.address().0,
        key: None,
    })?;
    while !parent.gone() {
        let busy = keeper.step();
        if let Some(failure) = keeper.failure.take() {
            return Err(failure);
        }
        if !busy && !role.polling {
            keeper.backup.wait(NAP);
        }
    }
    Ok(())
}

/// Senders of one server's workers.
pub fn senders(
    protocol: Protocol,
    place: &Place,
    servers: &[u32],
    workers: u32,
    window: usize,
    mut around: impl FnMut(Box<dyn cyclone_fabric::Endpoint>) -> Box<dyn cyclone_fabric::Endpoint>,
) -> Result<Vec<Box<dyn Sender>>> {
    let mut senders = Vec::new();
    for &server in servers {
        let shared = Arc::new(SharedLogs::default());
        for worker in 0..workers {
            let name = format!("{}-s{server}w{worker}", place.name);
            let (provider, directory) = (place.provider, &place.directory);
            let endpoint =
                provider::open(provider, Side::Initiator, directory, &name, INITIATOR_BYTES)?;
            let mut config = SenderConfig::new(SenderId { server, worker }, 1, TOKEN);
            config.window = window.max(1);
            config.shared = Arc::clone(&shared);
            senders.push(sender(protocol, around(endpoint), config)?);
        }
    }
    Ok(senders)
}

fn serve_node(place: &Place, role: &BackupRole, node: &NodeRole, parent: &Parent) -> Result<()> {
    pin(place.cpu);
    let mut keeper = Keeper::open(place, role)?;
    parent.say(&Ready {
        address: keeper.backup.address().0,
        key: None,
    })?;
    let peer: Peer = loop {
        keeper.step();
        match parent.lines.try_recv() {
            Ok(line) => break serde_json::from_str(&line).context("the peer")?,
            Err(_) if parent.gone() => return Ok(()),
            Err(_) => {}
        }
    };
    let protocol = role
        .protocol
        .parse::<Protocol>()
        .map_err(anyhow::Error::msg)?;
    let senders = senders(
        protocol,
        place,
        &[node.server],
        node.workers,
        node.window,
        |inner| inner,
    )?;
    let load = Load {
        record_bytes: node.record_bytes,
        window: node.window,
        warm_up: Duration::from_millis(node.warm_up_ms),
        measure: Duration::from_millis(node.measure_ms),
        pace: None,
        seed: node.seed,
        backups: vec![(BackupId(1 - node.server.min(1)), Address(peer.address))],
    };
    let measured = load::run(senders, &load, &parent.ended, &mut |moment| {
        if moment == RunEvent::Round {
            keeper.step();
        }
    })?;
    if let Some(failure) = keeper.failure.take() {
        return Err(failure);
    }
    parent.say(&NodeResult {
        records_s: measured.records_s(),
        latency: Percentiles::of(&measured.latency_ns),
    })?;
    // The peer may not be done yet.
    while !parent.gone() {
        keeper.step();
    }
    Ok(())
}

fn keep_group_member(place: &Place, memory_bytes: u64, parent: &Parent) -> Result<()> {
    pin(place.cpu);
    let (directory, name) = (&place.directory, &place.name);
    let endpoint = provider::open(place.provider, Side::Target, directory, name, memory_bytes)?;
    let polls = endpoint.capabilities().target_polls;
    let mut member = GroupMember::new(endpoint, 0, memory_bytes, 4)?;
    let key: MemoryKey = member.grant(1, TOKEN)?;
    parent.say(&Ready {
        address: member.address().0,
        key: Some(key.encode().to_vec()),
    })?;
    while !parent.gone() {
        member.step();
        if polls {
            member.wait(NAP);
        } else {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    Ok(())
}

/// Says `Ready` once per member.
fn keep_naive_members(
    place: &Place,
    count: usize,
    memory_bytes: u64,
    polling: bool,
    parent: &Parent,
) -> Result<()> {
    pin(place.cpu);
    let mut members = Vec::with_capacity(count);
    for number in 0..count {
        let (directory, name) = (&place.directory, format!("{}-{number}", place.name));
        let endpoint =
            provider::open(place.provider, Side::Target, directory, &name, memory_bytes)?;
        let mut member = NaiveMember::new(endpoint, 0, memory_bytes)?;
        member.grant(TOKEN);
        parent.say(&Ready {
            address: member.address().0,
            key: None,
        })?;
        members.push(member);
    }
    match &mut members[..] {
        [alone] if !polling => alone.run(NaiveMode::Event, &parent.ended),
        _ if !polling => bail!("{count} members cannot sleep on one thread"),
        _ => {
            while !parent.gone() {
                for member in &mut members {
                    member.step();
                }
            }
        }
    }
    Ok(())
}

fn burn(cpu: usize, parent: &Parent) -> Result<()> {
    pin(cpu);
    parent.say(&Ready {
        address: Vec::new(),
        key: None,
    })?;
    let mut state = 1u64;
    while !parent.gone() {
        for _ in 0..100_000 {
            state = std::hint::black_box(
                state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1),
            );
        }
    }
    Ok(())
}

//! The other processes of the tests of `shm`: initiators that never rest, and an owner to be
//! killed.
#![allow(dead_code)] // Each test file uses its part.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use cyclone_fabric::shm::{ShmConfig, ShmEndpoint};
use cyclone_fabric::{
    Address, AppendKey, ChainOperation, ChainShape, ConnectionId, Endpoint, Event, FabricError,
    FailureKind, MemoryKey, Operation, Token,
};
use rustix::process::{Pid, Signal, kill_process};

pub const TOKEN: Token = Token(0x70c7);
pub const LINE: u64 = 64;
/// Ends of a child: the fabric refused it as it should.
pub const REFUSED: i32 = 40;

/// Numbers from a seed.
pub struct Dice(pub u64);

impl Dice {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed(self.0)
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

pub fn mixed(word: u64) -> u64 {
    let word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ word >> 31
}

/// The seed of a test: `SEED` in the environment, or a fixed one. Which interleaving it meets is
/// the machine's choice.
pub fn seed() -> u64 {
    let seed = std::env::var("SEED")
        .ok()
        .and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or(1);
    eprintln!("SEED={seed}");
    seed
}

pub fn directory() -> tempfile::TempDir {
    let shared = Path::new("/dev/shm");
    let made = if shared.is_dir() {
        tempfile::tempdir_in(shared)
    } else {
        tempfile::tempdir()
    };
    made.expect("directory")
}

pub fn open(directory: &Path, name: &str, config: ShmConfig) -> ShmEndpoint {
    ShmEndpoint::open(directory, name, config).expect("endpoint")
}

/// Lines of a record: many, so that a process is more often within an append than between two.
/// Every line tells whose it is, and which.
pub fn lines_of(sender: u64, number: u64) -> u64 {
    1 + mixed(sender << 32 ^ number) % 200
}

pub fn line(sender: u64, number: u64, place: u64) -> [u8; LINE as usize] {
    let head = [(sender << 40) | (number + 1), place + 1];
    let mut bytes = [0; LINE as usize];
    for (n, word) in bytes.chunks_exact_mut(8).enumerate() {
        let value = head.get(n).copied();
        let value = value.unwrap_or_else(|| mixed(head[0] ^ place << 20 ^ n as u64) | 1);
        word.copy_from_slice(&value.to_le_bytes());
    }
    bytes
}

pub fn record(sender: u64, number: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    for place in 0..lines_of(sender, number) {
        bytes.extend_from_slice(&line(sender, number, place));
    }
    bytes
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    let digits = (0..text.len() / 2).map(|n| &text[n * 2..n * 2 + 2]);
    digits
        .map(|digits| u8::from_str_radix(digits, 16).expect("hex"))
        .collect()
}

/// What a child does.
#[derive(Clone, Copy)]
pub enum Role {
    /// Appends records without end.
    Append(AppendKey),
    /// Writes, flushes, exchanges and adds without end.
    Operate(MemoryKey),
    /// Writes and flushes numbers along a chain of two without end.
    Chain(MemoryKey, MemoryKey),
}

/// Another process. Killed when dropped.
pub struct Other {
    process: Child,
    pub id: u64,
    memory: PathBuf,
}

impl Other {
    pub fn start(directory: &Path, owner: &str, id: u64, role: Role) -> Other {
        let (role, first, second) = match role {
            Role::Append(key) => ("append", key.0, key.0),
            Role::Operate(key) => ("operate", key, key),
            Role::Chain(first, second) => ("chain", first, second),
        };
        let keys = hex(&[first.encode(), second.encode()].concat());
        let process = Command::new(std::env::current_exe().expect("exe"))
            .args(["--ignored", "--exact", "other_process", "--nocapture"])
            .env("SHM_DIRECTORY", directory)
            .env("SHM_OWNER", owner)
            .env("SHM_ID", id.to_string())
            .env("SHM_ROLE", role)
            .env("SHM_KEYS", keys)
            .stdout(Stdio::null())
            .spawn()
            .expect("child");
        let memory = directory.join(format!("other{id}.mem"));
        Other {
            process,
            id,
            memory,
        }
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_child(&self.process);
        kill_process(pid, signal).expect("signal");
    }

    /// Stops it, wherever it is.
    pub fn pause(&self) {
        self.signal(Signal::STOP);
        // The signal is delivered at the next chance; the process's state says when.
        let path = format!("/proc/{}/stat", self.process.id());
        wait_until("the child to stop", || {
            let text = std::fs::read_to_string(&path).expect("stat");
            let state = text.rsplit_once(") ").map(|(_, rest)| &rest[..1]);
            state == Some("T")
        });
    }

    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    pub fn kill(&mut self) {
        // SIGKILL: nothing of the process runs afterwards.
        self.process.kill().expect("kill");
        self.process.wait().expect("ended");
    }

    pub fn exit_code(&mut self) -> Option<i32> {
        self.process.wait().expect("ended").code()
    }

    /// How many operations it has seen completed.
    pub fn completed(&self) -> u64 {
        let Ok(bytes) = std::fs::read(&self.memory) else {
            return 0;
        };
        let word = bytes.first_chunk::<8>();
        word.map_or(0, |word| u64::from_le_bytes(*word))
    }

    pub fn wait_for_progress(&self) {
        let before = self.completed();
        wait_until("the child's progress", || self.completed() > before);
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

pub fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(
            begun.elapsed() < Duration::from_secs(60),
            "waited for {what}"
        );
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Posts, and waits for what comes of it.
pub fn perform(
    endpoint: &mut dyn Endpoint,
    on: ConnectionId,
    operation: Operation<'_>,
) -> Result<u64, FailureKind> {
    let mut events = Vec::new();
    match endpoint.post(on, operation, 1) {
        Ok(()) => {}
        Err(FabricError::Unknown(_)) => return Err(FailureKind::Broken),
        Err(error) => panic!("{error}"),
    }
    loop {
        endpoint.poll(&mut events);
        for event in events.drain(..) {
            match event {
                Event::Completed { value, .. } => return Ok(value),
                Event::Failed { failure, .. } => return Err(failure.kind),
                Event::Disconnected { .. } => {}
                event => panic!("{event:?}"),
            }
        }
        endpoint.wait(Duration::from_millis(1));
    }
}

/// The child's program, if this process is one; never returns then.
pub fn other_process() {
    let Ok(directory) = std::env::var("SHM_DIRECTORY") else {
        return;
    };
    let directory = PathBuf::from(directory);
    let variable = |name: &str| std::env::var(name).expect("set by the parent");
    let id: u64 = variable("SHM_ID").parse().expect("number");
    let keys = unhex(&variable("SHM_KEYS"));
    let keys = keys.as_chunks::<24>().0;
    let (first, second) = (MemoryKey::decode(&keys[0]), MemoryKey::decode(&keys[1]));
    let owner = variable("SHM_OWNER");
    let mut endpoint = open(&directory, &format!("other{id}"), ShmConfig::new(4096));
    let addresses: Vec<Address> = owner
        .split(',')
        .map(|name| {
            Address(
                directory
                    .join(format!("{name}.ctl"))
                    .into_os_string()
                    .into_encoded_bytes(),
            )
        })
        .collect();
    let mut connect = |n: usize| endpoint.connect(&addresses[n]).expect("connect");
    match variable("SHM_ROLE").as_str() {
        "append" => {
            let on = connect(0);
            append_until_killed(&mut endpoint, on, id, &AppendKey(first));
        }
        "operate" => {
            let on = connect(0);
            operate_until_killed(&mut endpoint, on, id, &first);
        }
        _ => {
            let members = [(connect(0), first), (connect(1), second)];
            chain_until_killed(&mut endpoint, &members);
        }
    }
}

fn refused(kind: &FailureKind) -> ! {
    let expected = matches!(
        kind,
        FailureKind::Closed
            | FailureKind::NotRegistered
            | FailureKind::PeerGone
            | FailureKind::Broken
    );
    std::process::exit(if expected { REFUSED } else { 41 })
}

fn append_until_killed(endpoint: &mut ShmEndpoint, on: ConnectionId, id: u64, queue: &AppendKey) {
    for number in 0.. {
        let bytes = record(id, number);
        let append = Operation::Append {
            queue,
            bytes: &bytes,
        };
        loop {
            match perform(endpoint, on, append) {
                Ok(_) => break,
                Err(FailureKind::NoSegment) => {}
                Err(kind) => refused(&kind),
            }
        }
        endpoint.memory().store_u64(0, number + 1);
    }
}

/// Where in the registration a child writes.
pub fn block_of(id: u64) -> u64 {
    16_384 * (1 + id)
}

fn operate_until_killed(endpoint: &mut ShmEndpoint, on: ConnectionId, id: u64, key: &MemoryKey) {
    for number in 0.. {
        let bytes = record(id, number);
        let offset = block_of(id);
        let mut value = 0;
        let add = Operation::FetchAdd {
            key,
            offset: 8,
            value: 1,
        };
        let write = Operation::Write {
            key,
            offset,
            bytes: &bytes,
        };
        let flush = Operation::Flush {
            key,
            offset,
            len: bytes.len() as u64,
        };
        for operation in [add, write, flush] {
            perform(endpoint, on, operation).unwrap_or_else(|kind| refused(&kind));
        }
        // An increment by exchange: as often as it takes.
        loop {
            let swap = Operation::CompareSwap {
                key,
                offset: 0,
                old: value,
                new: value + 1,
            };
            match perform(endpoint, on, swap).unwrap_or_else(|kind| refused(&kind)) {
                held if held == value => break,
                held => value = held,
            }
        }
        endpoint.memory().store_u64(0, number + 1);
    }
}

fn chain_until_killed(endpoint: &mut ShmEndpoint, members: &[(ConnectionId, MemoryKey)]) {
    let chain = endpoint.open_chain(ChainShape::Chain, members);
    let chain = chain.expect("chain");
    let mut events = Vec::new();
    for number in 1u64.. {
        let bytes = number.to_le_bytes();
        let write = ChainOperation::Write {
            offset: 0,
            bytes: &bytes,
        };
        for operation in [write, ChainOperation::Flush] {
            endpoint.post_chain(chain, operation, number).expect("post");
        }
        endpoint.poll(&mut events);
        for event in events.drain(..) {
            match event {
                Event::ChainCompleted { .. } => {}
                Event::ChainFailed { failure, .. } => refused(&failure.kind),
                event => panic!("{event:?}"),
            }
        }
        endpoint.memory().store_u64(0, number);
    }
}

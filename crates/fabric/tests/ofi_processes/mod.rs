//! Other processes for tests that kill them.
#![allow(dead_code)] // Each test file uses its part.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cyclone_fabric::ofi::OfiEndpoint;
use cyclone_fabric::{
    Access, Address, AppendKey, AppendSpec, ConnectionId, Endpoint, Event, FabricError, MemoryKey,
    Operation, Token,
};
use cyclone_pmem::{FlushPolicy, Region, RegionOptions, SharedArea};

use crate::ofi_common::{PATIENCE, Tester, endpoint, options, wait_for};

/// The target's memory: slots for writes, then segments for appends.
pub const BYTES: u64 = APPENDED + SEGMENTS * SEGMENT;
pub const SLOT: u64 = 8 * 1024;
pub const SLOTS: u64 = 96;
pub const APPENDED: u64 = 1 << 20;
pub const SEGMENT: u64 = 256 * 1024;
pub const SEGMENTS: u64 = 48;
pub const TOKEN: Token = Token(9);

/// What write `number` fills its slot with: never 0, and another byte than the slot's last writes.
pub fn slot_byte(number: u64) -> u8 {
    (number / SLOTS % 255 + 1) as u8
}

/// An append of 64 to 511 bytes: sender and number, then bytes that depend on both.
pub fn record(sender: u64, number: u64) -> Vec<u8> {
    let len = 64 + (number.wrapping_mul(29) % 448) as usize;
    let mut bytes = vec![(number as u8) | 1; len];
    bytes[..8].copy_from_slice(&(sender + 1).to_le_bytes());
    bytes[8..16].copy_from_slice(&number.to_le_bytes());
    bytes
}

pub fn open_queue(target: &mut OfiEndpoint) -> AppendKey {
    let spec = AppendSpec {
        segment_bytes: SEGMENT,
        max_posted: SEGMENTS as u32,
        token: TOKEN,
    };
    let queue = target.open_append(spec).expect("queue");
    let offsets: Vec<u64> = (0..SEGMENTS).map(|n| APPENDED + n * SEGMENT).collect();
    target.post_segments(&queue, &offsets).expect("segments");
    queue
}

/// Memory that outlives the process that uses it: a file without a name, so that no test can leave
/// it behind.
pub struct Memory {
    file: File,
}

impl Memory {
    pub fn new() -> Memory {
        let file = tempfile::tempfile_in("/dev/shm").expect("file");
        Memory { file }
    }

    fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd())
    }

    pub fn area(&self) -> SharedArea {
        area(&self.path())
    }

    pub fn read(&self, offset: u64, len: u64) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        self.file.read_exact_at(&mut bytes, offset).expect("read");
        bytes
    }
}

fn area(path: &str) -> SharedArea {
    let region = Region::open(&RegionOptions {
        path: path.into(),
        len: BYTES,
        create: true,
        flush: FlushPolicy::Auto,
    });
    let region = region.expect("region");
    region.take(0, BYTES).expect("area").share()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(hex: &str) -> Vec<u8> {
    (0..hex.len() / 2)
        .map(|n| u8::from_str_radix(&hex[n * 2..n * 2 + 2], 16).expect("hex"))
        .collect()
}

fn key(bytes: &[u8]) -> MemoryKey {
    MemoryKey::decode(bytes.try_into().expect("24 bytes"))
}

/// Tests that start processes take turns: a process that is started while another test opens its
/// sockets has them too.
pub fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A process that is killed at the latest when this is dropped.
pub struct Child {
    child: std::process::Child,
    lines: Receiver<String>,
    done: BTreeSet<u64>,
    /// What a target says of itself.
    pub address: Address,
    pub key: MemoryKey,
    pub queue: Option<AppendKey>,
}

impl Drop for Child {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn command(role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("exe"));
    command
        .args(["--ignored", "--exact", "child_process", "--nocapture"])
        .env("OFI_ROLE", role)
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    command
}

impl Child {
    fn start(command: &mut Command) -> Child {
        let mut child = command.spawn().expect("child");
        let stdout = BufReader::new(child.stdout.take().expect("stdout"));
        let (send, lines) = channel();
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                if send.send(line).is_err() {
                    return;
                }
            }
        });
        Child {
            child,
            lines,
            done: BTreeSet::new(),
            address: Address(Vec::new()),
            key: key(&[0; 24]),
            queue: None,
        }
    }

    /// A target over this memory, with a queue where it can.
    pub fn target(provider: &str, memory: &Memory) -> Child {
        let mut command = command("target");
        command.env("OFI_PROVIDER", provider);
        let mut child = Child::start(command.env("OFI_MEMORY", memory.path()));
        let start = Instant::now();
        let line = loop {
            let line = child.lines.recv_timeout(PATIENCE).expect("a line");
            if line.starts_with("target ") {
                break line;
            }
            assert!(start.elapsed() < PATIENCE);
        };
        let words: Vec<&str> = line.split(' ').collect();
        child.address = Address(unhex(words[1]));
        child.key = key(&unhex(words[2]));
        child.queue = (words[3] != "-").then(|| AppendKey(key(&unhex(words[3]))));
        child
    }

    /// A sender that fills slots under the key, on and on.
    pub fn writer(provider: &str, to: &Address, key: &MemoryKey) -> Child {
        Child::sender("writer", provider, to, key)
    }

    /// A sender that appends to the queue, on and on.
    pub fn appender(provider: &str, to: &Address, queue: &AppendKey) -> Child {
        Child::sender("appender", provider, to, &queue.0)
    }

    fn sender(role: &str, provider: &str, to: &Address, key: &MemoryKey) -> Child {
        let mut command = command(role);
        command
            .env("OFI_PROVIDER", provider)
            .env("OFI_TARGET", hex(&to.0))
            .env("OFI_KEY", hex(&key.encode()));
        Child::start(&mut command)
    }

    /// Waits for a sender's message with the key of the sender's memory.
    pub fn introduced(&self, target: &mut Tester) -> (ConnectionId, MemoryKey) {
        match wait_for(target, |event| matches!(event, Event::Received { .. })) {
            Event::Received { connection, bytes } => (connection, key(&bytes)),
            event => panic!("{event:?}"),
        }
    }

    /// Numbers that the sender has heard the completion of, as far as it said by now.
    pub fn completed(&mut self) -> &BTreeSet<u64> {
        while let Ok(line) = self.lines.try_recv() {
            self.take(&line);
        }
        &self.done
    }

    /// The same after its end: everything that it said.
    pub fn all_completed(&mut self) -> Vec<u64> {
        while let Ok(line) = self.lines.recv_timeout(PATIENCE) {
            self.take(&line);
        }
        self.done.iter().copied().collect()
    }

    fn take(&mut self, line: &str) {
        // The last line may be cut: a full one ends in a dot.
        let number = line
            .strip_prefix("done ")
            .and_then(|rest| rest.strip_suffix('.'));
        if let Some(number) = number {
            self.done.insert(number.parse().expect("number"));
        }
    }

    /// Panics if the process ended without being killed.
    pub fn lives(&mut self) {
        let ended = self.child.try_wait().expect("wait");
        assert!(ended.is_none(), "the sender ended: {ended:?}");
    }

    /// SIGKILL: nothing of the process runs afterwards.
    pub fn kill(&mut self) {
        self.child.kill().expect("kill");
        self.child.wait().expect("wait");
    }

    pub fn process(&self) -> u32 {
        self.child.id()
    }
}

/// Files that a process left in /dev/shm or in the current directory.
pub fn left_behind(process: u32) -> Vec<String> {
    let number = process.to_string();
    let is_its = |name: &String| {
        let mut words = name.split(|letter: char| !letter.is_ascii_alphanumeric());
        words.any(|word| word == number)
    };
    [Path::new("/dev/shm"), Path::new(".")]
        .into_iter()
        .flat_map(|directory| std::fs::read_dir(directory).expect("directory"))
        .filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned()))
        .filter(is_its)
        .collect()
}

/// Sends a signal to a process with an endpoint; answers by which it ended, and what is in its
/// directory then.
pub fn ended_by(signal: &str, directory: &Path) -> (Option<i32>, Vec<String>) {
    let mut command = command("idler");
    let mut child = Child::start(command.current_dir(directory));
    while child.lines.recv_timeout(PATIENCE).expect("a line") != "idle" {}
    let start = Instant::now();
    let status = loop {
        // Rust answers a SIGSEGV that is no stack overflow by waiting for the next one.
        let sent = Command::new("kill")
            .args(["-s", signal, &child.process().to_string()])
            .status();
        assert!(sent.expect("kill").success());
        std::thread::sleep(Duration::from_millis(50));
        if let Some(status) = child.child.try_wait().expect("wait") {
            break status;
        }
        assert!(start.elapsed() < PATIENCE, "it does not end");
    };
    let files = std::fs::read_dir(directory)
        .expect("directory")
        .map(|entry| entry.expect("entry").file_name().to_string_lossy().into())
        // The system's own dump, where its settings put one there.
        .filter(|name: &String| !name.starts_with("core"))
        .collect();
    (status.signal(), files)
}

pub fn signal_number(name: &str) -> i32 {
    match name {
        "INT" => 2,
        "ABRT" => 6,
        "BUS" => 7,
        "SEGV" => 11,
        "TERM" => 15,
        other => panic!("{other}"),
    }
}

/// What the other process does.
pub fn run() {
    let Ok(role) = std::env::var("OFI_ROLE") else {
        return;
    };
    // Whatever becomes of the test: this process does not outlive it.
    let own = Some(rustix::process::Signal::KILL);
    rustix::process::set_parent_process_death_signal(own).expect("prctl");
    match &role[..] {
        "target" => target(),
        "idler" => idle(),
        role => send(role == "appender"),
    }
}

fn variable(name: &str) -> String {
    std::env::var(name).expect(name)
}

fn say(line: &str) {
    let mut out = std::io::stdout();
    // The test harness may have begun its own line.
    writeln!(out, "{line}").expect("stdout");
    out.flush().expect("stdout");
}

fn target() {
    let area = area(&variable("OFI_MEMORY"));
    let options = options(&variable("OFI_PROVIDER"));
    let mut target = OfiEndpoint::open(area, options).expect("endpoint");
    let key = target
        .register(0, SLOTS * SLOT, Access::ALL, TOKEN)
        .expect("register");
    let queue = match target.capabilities().append {
        Some(_) => hex(&open_queue(&mut target).0.encode()),
        None => "-".into(),
    };
    let address = hex(&target.address().0);
    say(&format!(
        "\ntarget {address} {} {queue}",
        hex(&key.encode())
    ));
    std::thread::sleep(Duration::from_secs(120));
}

fn idle() {
    let provider = ["tcp", "sockets", "shm"].into_iter().find(|provider| {
        let region = Region::anonymous(4096).expect("region");
        let area = region.take(0, 4096).expect("area").share();
        match OfiEndpoint::open(area, options(provider)) {
            // It stays open.
            Ok(endpoint) => {
                std::mem::forget(endpoint);
                true
            }
            Err(_) => false,
        }
    });
    eprintln!("idle with {provider:?}");
    // No dump of a process that is meant to crash.
    let none = rustix::process::Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    rustix::process::setrlimit(rustix::process::Resource::Core, none).expect("setrlimit");
    say("\nidle");
    std::thread::sleep(Duration::from_secs(120));
}

fn send(appends: bool) {
    let mut sender = endpoint(&variable("OFI_PROVIDER"), 4096);
    let own = sender
        .register(0, 4096, Access::ALL, TOKEN)
        .expect("register");
    let to = Address(unhex(&variable("OFI_TARGET")));
    let theirs = key(&unhex(&variable("OFI_KEY")));
    let to = sender.connect(&to).expect("connect");
    let introduction = own.encode();
    let hello = Operation::Send {
        bytes: &introduction,
    };
    crate::ofi_common::post(&mut sender, to, hello, u64::MAX);
    wait_for(&mut sender, |event| {
        crate::ofi_common::completed(event, u64::MAX)
    });
    say("");
    let mut open = BTreeSet::new();
    let mut number = 0;
    loop {
        // One write per slot at a time, and no more records than the segments hold for certain.
        while open.len() < 32
            && open.first().is_none_or(|first| number - first < SLOTS)
            && !(appends && number == SEGMENTS * SEGMENT / 1024)
        {
            let bytes = if appends {
                record(0, number)
            } else {
                vec![slot_byte(number); SLOT as usize]
            };
            let operation = if appends {
                Operation::Append {
                    queue: &AppendKey(theirs),
                    bytes: &bytes,
                }
            } else {
                Operation::Write {
                    key: &theirs,
                    offset: number % SLOTS * SLOT,
                    bytes: &bytes,
                }
            };
            match sender.post(to, operation, number) {
                Ok(()) => open.insert(number),
                Err(FabricError::Busy) => break,
                Err(why) => panic!("{why}"),
            };
            number += 1;
        }
        sender.wait(Duration::from_millis(1));
        let mut events = Vec::new();
        sender.poll(&mut events);
        let mut lines = String::new();
        for event in events {
            match event {
                Event::Completed { context, .. } => {
                    open.remove(&context);
                    lines.push_str(&format!("done {context}.\n"));
                }
                event => panic!("{event:?}"),
            }
        }
        let mut out = std::io::stdout();
        out.write_all(lines.as_bytes()).expect("stdout");
        out.flush().expect("stdout");
    }
}

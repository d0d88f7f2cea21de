//! A fabric that cannot revoke for a while, as when an initiator was stopped in the middle of a
//! copy: nothing that it could write counts as used, and fencing off fails until it can. And one
//! that cannot register for a while.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cyclone_fabric::sim::{SimConfig, SimEndpoint, SimFabric};
use cyclone_fabric::{
    Access, Address, AppendKey, AppendSpec, Capabilities, ChainId, ChainOperation, ChainShape,
    ConnectionId, Endpoint, Event, FabricError, MemoryKey, Operation, Token,
};
use cyclone_pmem::SharedArea;
use cyclone_replication::{
    Backup, BackupConfig, BackupId, Outcome, Protocol, Sender, SenderConfig, SenderId, backup,
    sender,
};

const TOKEN: Token = Token(77);
/// Those whose backups hand out registrations.
const PROTOCOLS: [Protocol; 6] = [
    Protocol::Rwrite,
    Protocol::Batch,
    Protocol::Share,
    Protocol::Faa,
    Protocol::Tailwind,
    Protocol::Hyperloop,
];

/// What an endpoint cannot do.
#[derive(Default)]
struct Trouble {
    /// No revocation succeeds.
    is_stuck: AtomicBool,
    /// Nor does one of these keys, by their ids.
    stays: Mutex<Vec<u64>>,
    /// Keys given, by their ids.
    registered: Mutex<Vec<u64>>,
    /// Which registration from now on fails; 0 for none.
    refuses: AtomicU64,
}

impl Trouble {
    fn is_stuck(&self, key: &MemoryKey) -> bool {
        let stays = self.stays.lock().expect("no thread panicked");
        self.is_stuck.load(Ordering::Relaxed) || stays.contains(&key.id)
    }

    fn registered(&self) -> Vec<u64> {
        self.registered.lock().expect("no thread panicked").clone()
    }
}

/// An endpoint in trouble.
struct PendingRevocations {
    inner: SimEndpoint,
    trouble: Arc<Trouble>,
}

impl Endpoint for PendingRevocations {
    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }

    fn address(&self) -> Address {
        self.inner.address()
    }

    fn memory(&self) -> &SharedArea {
        self.inner.memory()
    }

    fn register(
        &mut self,
        offset: u64,
        len: u64,
        access: Access,
        token: Token,
    ) -> Result<MemoryKey, FabricError> {
        let refuses = self.trouble.refuses.load(Ordering::Relaxed);
        let next = refuses.saturating_sub(1);
        self.trouble.refuses.store(next, Ordering::Relaxed);
        if refuses == 1 {
            let (what, limit) = ("registration", 1);
            return Err(FabricError::Limit { what, limit });
        }
        let key = self.inner.register(offset, len, access, token)?;
        let mut registered = self.trouble.registered.lock().expect("no thread panicked");
        registered.push(key.id);
        Ok(key)
    }

    fn revoke(&mut self, key: &MemoryKey) -> Result<(), FabricError> {
        if self.trouble.is_stuck(key) {
            return Err(FabricError::System {
                what: "stopped in the middle".to_owned(),
                source: std::io::ErrorKind::TimedOut.into(),
            });
        }
        self.inner.revoke(key)
    }

    fn open_append(&mut self, spec: AppendSpec) -> Result<AppendKey, FabricError> {
        self.inner.open_append(spec)
    }

    fn post_segments(&mut self, queue: &AppendKey, offsets: &[u64]) -> Result<(), FabricError> {
        self.inner.post_segments(queue, offsets)
    }

    fn used_segments(&mut self, queue: &AppendKey, used: &mut Vec<u64>) -> Result<(), FabricError> {
        self.inner.used_segments(queue, used)
    }

    fn close_append(&mut self, queue: &AppendKey) -> Result<u64, FabricError> {
        self.inner.close_append(queue)
    }

    fn connect(&mut self, to: &Address) -> Result<ConnectionId, FabricError> {
        self.inner.connect(to)
    }

    fn disconnect(&mut self, connection: ConnectionId) {
        self.inner.disconnect(connection);
    }

    fn post(
        &mut self,
        connection: ConnectionId,
        operation: Operation<'_>,
        context: u64,
    ) -> Result<(), FabricError> {
        self.inner.post(connection, operation, context)
    }

    fn open_chain(
        &mut self,
        shape: ChainShape,
        members: &[(ConnectionId, MemoryKey)],
    ) -> Result<ChainId, FabricError> {
        self.inner.open_chain(shape, members)
    }

    fn post_chain(
        &mut self,
        chain: ChainId,
        operation: ChainOperation<'_>,
        context: u64,
    ) -> Result<(), FabricError> {
        self.inner.post_chain(chain, operation, context)
    }

    fn poll(&mut self, events: &mut Vec<Event>) -> usize {
        self.inner.poll(events)
    }

    fn wait(&mut self, timeout: Duration) {
        self.inner.wait(timeout);
    }
}

fn backup_on(fabric: &SimFabric, protocol: Protocol) -> (Box<dyn Backup>, Arc<Trouble>) {
    let trouble = Arc::new(Trouble::default());
    let endpoint = PendingRevocations {
        inner: fabric.endpoint_with("backup", 512 << 10),
        trouble: Arc::clone(&trouble),
    };
    let config = BackupConfig {
        segment_bytes: 4096,
        ..BackupConfig::new(TOKEN, 0xfeed_beef)
    };
    let backup = backup(protocol, Box::new(endpoint), config).expect("a backup");
    (backup, trouble)
}

/// A worker of server 3's, whose log is to be opened.
fn sender_on(fabric: &SimFabric, protocol: Protocol, name: &str, worker: u32) -> Box<dyn Sender> {
    let me = SenderId { server: 3, worker };
    let endpoint = Box::new(fabric.endpoint_with(name, 64 << 10));
    let config = SenderConfig::new(me, 1, TOKEN);
    let mut sender = sender(protocol, endpoint, config).expect("a sender");
    let to = Address(b"backup".to_vec());
    sender.open(BackupId(0), &to).expect("open");
    sender
}

struct World {
    fabric: SimFabric,
    backup: Box<dyn Backup>,
    sender: Box<dyn Sender>,
    trouble: Arc<Trouble>,
}

impl World {
    /// Server 3 has a segment of the backup's.
    fn new(protocol: Protocol) -> World {
        let fabric = SimFabric::new(1, SimConfig::default());
        let (backup, trouble) = backup_on(&fabric, protocol);
        let mut world = World {
            sender: sender_on(&fabric, protocol, "sender", 0),
            fabric,
            backup,
            trouble,
        };
        let (mut is_sent, mut durable) = (false, 0);
        for _ in 0..2_000 {
            is_sent |= !is_sent && world.sender.append(&[BackupId(0)], &[7; 500], 1).is_ok();
            let outcomes = world.run();
            durable += outcomes
                .iter()
                .filter(|it| matches!(it, Outcome::Durable { .. }))
                .count();
        }
        assert_eq!(durable, 1, "{protocol}");
        world
    }

    fn run(&mut self) -> Vec<Outcome> {
        let now_us = self.fabric.now_ns() / 1000;
        self.backup.step(now_us);
        let mut outcomes = Vec::new();
        self.sender.poll(now_us, &mut outcomes);
        self.fabric.run_for(3_000);
        outcomes
    }

    fn used(&mut self) -> usize {
        let mut used = Vec::new();
        self.backup.take_used(&mut used);
        used.len()
    }
}

#[test]
fn fencing_off_fails_until_everything_is_revoked() {
    for protocol in PROTOCOLS {
        let mut world = World::new(protocol);
        world.trouble.is_stuck.store(true, Ordering::Relaxed);
        // Again and again, whether the session is there any more or not.
        for attempt in 0..3 {
            let refused = world.backup.fence_off(3, 2);
            assert!(refused.is_err(), "{protocol}, attempt {attempt}");
            for _ in 0..50 {
                world.run();
            }
            assert_eq!(world.used(), 0, "{protocol}: used, and may be written yet");
        }
        world.trouble.is_stuck.store(false, Ordering::Relaxed);
        world.backup.fence_off(3, 2).expect("nothing is in the way");
        world.backup.fence_off(3, 2).expect("nothing is left");
        world.run();
        // All senders of `faa` write one segment, which goes on.
        assert!(protocol == Protocol::Faa || world.used() > 0, "{protocol}");
    }
}

#[test]
fn what_a_lost_sender_held_is_used_once_it_can_be_revoked() {
    // Tailwind's backup tries again when it is asked to fence off.
    for protocol in PROTOCOLS {
        if protocol == Protocol::Tailwind {
            continue;
        }
        let mut world = World::new(protocol);
        world.trouble.is_stuck.store(true, Ordering::Relaxed);
        world.fabric.kill_process("sender");
        world.fabric.run_for(1_000_000);
        let begun_us = world.fabric.now_ns() / 1000;
        for turn in 0..100 {
            world.backup.step(begun_us + turn * 100_000);
            world.fabric.run_for(1_000_000);
        }
        assert_eq!(world.used(), 0, "{protocol}: used, and may be written yet");
        world.trouble.is_stuck.store(false, Ordering::Relaxed);
        for turn in 100..200 {
            world.backup.step(begun_us + turn * 100_000);
        }
        if protocol == Protocol::Faa {
            // All senders write its current segment.
            world.backup.fence_off(3, 2).expect("nothing is left");
        } else {
            assert!(world.used() > 0, "{protocol}");
        }
    }
}

/// Each has its turn, whatever becomes of those before it.
#[test]
fn one_that_stays_stuck_keeps_no_other_waiting() {
    for protocol in [
        Protocol::Rwrite,
        Protocol::Batch,
        Protocol::Share,
        Protocol::Hyperloop,
    ] {
        let mut world = World::new(protocol);
        let held = world.trouble.registered();
        assert!(held.len() > 1, "{protocol}: {held:?}");
        world.trouble.is_stuck.store(true, Ordering::Relaxed);
        world.fabric.kill_process("sender");
        world.fabric.run_for(1_000_000);
        let begun_us = world.fabric.now_ns() / 1000;
        for turn in 0..10 {
            world.backup.step(begun_us + turn * 100_000);
            world.fabric.run_for(1_000_000);
        }
        assert_eq!(world.used(), 0, "{protocol}");
        // Attempts come 2 s apart.
        let mut stays = world.trouble.stays.lock().expect("no thread panicked");
        stays.push(held[0]);
        drop(stays);
        world.trouble.is_stuck.store(false, Ordering::Relaxed);
        for turn in 10..10 + 20 * (held.len() as u64 + 1) {
            world.backup.step(begun_us + turn * 100_000);
        }
        assert_eq!(world.used(), held.len() - 1, "{protocol}");
    }
}

/// Two senders wait, and there is a registration for the first of them only. Both have their
/// buffers in the end.
#[test]
fn a_registration_that_fails_takes_no_grant_from_another() {
    let fabric = SimFabric::new(1, SimConfig::calm());
    let (mut backup, trouble) = backup_on(&fabric, Protocol::Tailwind);
    let names = ["first", "second"];
    let mut senders: Vec<_> = (0..2)
        .map(|n| sender_on(&fabric, Protocol::Tailwind, names[n as usize], n))
        .collect();
    trouble.refuses.store(2, Ordering::Relaxed);
    let mut opened = [false; 2];
    for _ in 0..100 {
        fabric.run_for(5_000);
        backup.step(fabric.now_ns() / 1000);
        if !trouble.registered().is_empty() {
            assert_eq!(trouble.refuses.load(Ordering::Relaxed), 0, "not in a step");
        }
        fabric.run_for(5_000);
        for (sender, opened) in senders.iter_mut().zip(&mut opened) {
            let mut outcomes = Vec::new();
            sender.poll(fabric.now_ns() / 1000, &mut outcomes);
            *opened |= matches!(outcomes[..], [Outcome::Opened { .. }]);
        }
    }
    assert_eq!(opened, [true; 2]);
}

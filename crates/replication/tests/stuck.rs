//! A fabric that cannot revoke for a while, as when an initiator was stopped in the middle of a copy: nothing that it could
//! write counts as used, and fencing off fails until it can.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
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

/// An endpoint whose revocations fail while `is_stuck`.
struct Stuck {
    inner: SimEndpoint,
    is_stuck: Arc<AtomicBool>,
}

impl Endpoint for Stuck {
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
        self.inner.register(offset, len, access, token)
    }

    fn revoke(&mut self, key: &MemoryKey) -> Result<(), FabricError> {
        if self.is_stuck.load(Ordering::Relaxed) {
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

struct World {
    fabric: SimFabric,
    backup: Box<dyn Backup>,
    sender: Box<dyn Sender>,
    is_stuck: Arc<AtomicBool>,
}

impl World {
    /// Server 3 has a segment of the backup's.
    fn new(protocol: Protocol) -> World {
        let fabric = SimFabric::new(1, SimConfig::default());
        let is_stuck = Arc::new(AtomicBool::new(false));
        let endpoint = Stuck {
            inner: fabric.endpoint_with("backup", 512 << 10),
            is_stuck: Arc::clone(&is_stuck),
        };
        let config = BackupConfig {
            segment_bytes: 4096,
            ..BackupConfig::new(TOKEN, 0xfeed_beef)
        };
        let backup = backup(protocol, Box::new(endpoint), config).expect("a backup");
        let me = SenderId {
            server: 3,
            worker: 0,
        };
        let endpoint = Box::new(fabric.endpoint_with("sender", 64 << 10));
        let sender = sender(protocol, endpoint, SenderConfig::new(me, 1, TOKEN));
        let mut world = World {
            fabric,
            backup,
            sender: sender.expect("a sender"),
            is_stuck,
        };
        let to = Address(b"backup".to_vec());
        world.sender.open(BackupId(0), &to).expect("open");
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
        world.is_stuck.store(true, Ordering::Relaxed);
        // Again and again, whether the session is there any more or not.
        for attempt in 0..3 {
            let refused = world.backup.fence_off(3, 2);
            assert!(refused.is_err(), "{protocol}, attempt {attempt}");
            for _ in 0..50 {
                world.run();
            }
            assert_eq!(world.used(), 0, "{protocol}: used, and may be written yet");
        }
        world.is_stuck.store(false, Ordering::Relaxed);
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
        world.is_stuck.store(true, Ordering::Relaxed);
        world.fabric.kill_process("sender");
        world.fabric.run_for(1_000_000);
        let begun_us = world.fabric.now_ns() / 1000;
        for turn in 0..100 {
            world.backup.step(begun_us + turn * 100_000);
            world.fabric.run_for(1_000_000);
        }
        assert_eq!(world.used(), 0, "{protocol}: used, and may be written yet");
        world.is_stuck.store(false, Ordering::Relaxed);
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

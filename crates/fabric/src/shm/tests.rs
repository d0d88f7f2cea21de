//! Initiators that stand still at the worst moment, made by writing their announcements by hand;
//! and peers that write nonsense into the control file.

use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::layout::{Control, Mark, connection, header, queue, slot, state_word};
use super::{Memory, ShmConfig, ShmEndpoint, Stalled, index_of};
use crate::endpoint::{AppendSpec, Endpoint, FabricError};
use crate::event::{Event, FailureKind};
use crate::key::{Access, AppendKey, Token};
use crate::operation::{ChainOperation, ChainShape, ConnectionId, Operation};

const SEGMENT: u64 = 4096;
const MEMORY: u64 = 64 << 10;
/// A slot that is not assigned by chance.
const SLOT: u64 = 7;

fn config() -> ShmConfig {
    ShmConfig {
        max_peers: 8,
        ring_bytes: 4096,
        stalled_wait: Duration::from_millis(3),
        peer_check: Duration::from_millis(1),
        no_segment_wait: Duration::ZERO,
        ..ShmConfig::new(MEMORY)
    }
}

/// An owner, an initiator, and its connection.
struct Pair {
    directory: tempfile::TempDir,
    owner: ShmEndpoint,
    initiator: ShmEndpoint,
    on: ConnectionId,
}

impl Pair {
    fn new(config: ShmConfig) -> Pair {
        let directory = tempfile::tempdir().expect("directory");
        let open = |name| ShmEndpoint::open(directory.path(), name, config.clone()).expect("open");
        let (owner, mut initiator) = (open("owner"), open("initiator"));
        let on = initiator.connect(&owner.address()).expect("connect");
        Pair {
            directory,
            owner,
            initiator,
            on,
        }
    }

    fn queue(&mut self, segments: u64) -> AppendKey {
        let spec = AppendSpec {
            segment_bytes: SEGMENT,
            max_posted: 8,
            token: Token(1),
        };
        let queue = self.owner.open_append(spec).expect("queue");
        let offsets: Vec<u64> = (0..segments).map(|n| n * SEGMENT).collect();
        self.owner.post_segments(&queue, &offsets).expect("post");
        queue
    }

    fn perform(&mut self, operation: Operation<'_>) -> Result<(), FailureKind> {
        self.initiator.post(self.on, operation, 1).expect("post");
        let mut events = Vec::new();
        loop {
            self.initiator.poll(&mut events);
            match events.pop() {
                Some(Event::Completed { .. }) => return Ok(()),
                Some(Event::Failed { failure, .. }) => return Err(failure.kind),
                Some(event) => panic!("{event:?}"),
                None => {}
            }
        }
    }

    fn append_segments(&mut self, queue: &AppendKey, segments: usize) {
        for _ in 0..segments {
            let bytes = [7; SEGMENT as usize];
            let append = Operation::Append {
                queue,
                bytes: &bytes,
            };
            self.perform(append).expect("append");
        }
    }

    fn used(&mut self, queue: &AppendKey) -> Vec<u64> {
        let mut used = Vec::new();
        self.owner.used_segments(queue, &mut used).expect("used");
        used.iter().map(|offset| offset / SEGMENT).collect()
    }
}

/// A process that is permanently in the middle of something.
struct Stopped(Child);

impl Stopped {
    fn with_mark(control: &Control, mark: Mark) -> Stopped {
        let child = Command::new("sleep").arg("1000").spawn().expect("child");
        let at = control.shape.slot(SLOT);
        control.before_claiming(SLOT);
        control.store(at + slot::STATE, state_word(child.id(), connection::OPEN));
        control.set_mark(SLOT, mark);
        Stopped(child)
    }

    fn kill(&mut self) {
        self.0.kill().expect("kill");
        self.0.wait().expect("ended");
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn is_stalled<T>(result: Result<T, FabricError>) -> bool {
    matches!(result, Err(FabricError::System { source, .. })
        if source.kind() == std::io::ErrorKind::TimedOut)
}

// Story: a sender announces itself at segment 1 and is stopped before or after its fetch-add.
// Segment 1 and all behind it may still be written to, so they must not be zeroed and posted again.
#[test]
fn a_stopped_sender_keeps_its_segment_and_those_behind_until_it_is_dead() {
    let mut pair = Pair::new(config());
    let queue = pair.queue(6);
    let mark = Mark::queue(index_of(queue.0.id), 1, 9);
    let mut stopped = Stopped::with_mark(&pair.owner.control, mark);
    pair.append_segments(&queue, 1);
    assert_eq!(pair.used(&queue), [0]);
    pair.append_segments(&queue, 4);
    assert_eq!(pair.used(&queue), []);
    // Senders go on as long as there are segments.
    pair.append_segments(&queue, 1);
    assert_eq!(pair.used(&queue), []);
    stopped.kill();
    assert_eq!(pair.used(&queue), [1, 2, 3, 4, 5]);
}

#[test]
fn a_sender_that_saw_no_segment_yet_keeps_all() {
    let mut pair = Pair::new(config());
    let queue = pair.queue(2);
    let before_the_first = u64::MAX;
    let mark = Mark::queue(index_of(queue.0.id), before_the_first, 9);
    let _stopped = Stopped::with_mark(&pair.owner.control, mark);
    pair.append_segments(&queue, 2);
    assert_eq!(pair.used(&queue), []);
    // It has done what it had announced.
    pair.owner.control.set_mark(SLOT, Mark::NONE);
    assert_eq!(pair.used(&queue), [0, 1]);
}

#[test]
fn a_close_waits_for_a_stopped_sender_but_refuses_others_at_once() {
    let mut pair = Pair::new(config());
    let queue = pair.queue(3);
    pair.append_segments(&queue, 1);
    let mark = Mark::queue(index_of(queue.0.id), 0, 9);
    let mut stopped = Stopped::with_mark(&pair.owner.control, mark);
    assert!(is_stalled(pair.owner.close_append(&queue)));
    let append = Operation::Append {
        queue: &queue,
        bytes: &[1; 64],
    };
    assert_eq!(pair.perform(append), Err(FailureKind::Closed));
    assert_eq!(pair.used(&queue), []);
    assert!(pair.owner.post_segments(&queue, &[7 * SEGMENT]).is_err());
    stopped.kill();
    pair.owner.close_append(&queue).expect("it is dead");
    assert_eq!(pair.used(&queue), [0, 1, 2]);
}

#[test]
fn a_revocation_reports_or_kills_who_stands_still() {
    for stalled in [Stalled::Report, Stalled::Kill] {
        let config = ShmConfig {
            stalled,
            ..config()
        };
        let mut pair = Pair::new(config);
        let key = pair.owner.register(0, 4096, Access::ALL, Token(1));
        let key = key.expect("key");
        let mark = Mark::registration(index_of(key.id), 3);
        let mut stopped = Stopped::with_mark(&pair.owner.control, mark);
        let outcome = pair.owner.revoke(&key);
        if stalled == Stalled::Kill {
            outcome.expect("killed");
            assert!(!stopped.0.wait().expect("ended").success());
            continue;
        }
        assert!(is_stalled(outcome));
        // Its place is not given away meanwhile.
        let other = pair.owner.register(0, 4096, Access::ALL, Token(1));
        assert_ne!(index_of(other.expect("key").id), index_of(key.id));
        let write = Operation::Write {
            key: &key,
            offset: 0,
            bytes: &[1],
        };
        assert_eq!(pair.perform(write), Err(FailureKind::NotRegistered));
        stopped.kill();
        pair.owner.revoke(&key).expect("it is dead");
    }
}

#[test]
fn a_mark_in_a_free_slot_blocks_no_process() {
    let mut pair = Pair::new(config());
    let queue = pair.queue(1);
    let mark = Mark::queue(index_of(queue.0.id), 0, 9);
    pair.owner.control.before_claiming(SLOT);
    pair.owner.control.set_mark(SLOT, mark);
    pair.append_segments(&queue, 1);
    assert_eq!(pair.used(&queue), [0]);
    pair.owner.close_append(&queue).expect("close");
}

#[test]
fn the_owner_looks_as_far_as_slots_were_claimed() {
    let mut pair = Pair::new(config());
    let control = pair.owner.control.clone();
    let queue = pair.queue(2);
    pair.append_segments(&queue, 1);
    assert_eq!(control.claimed(), 1);
    control.before_claiming(SLOT);
    assert_eq!(control.claimed(), SLOT + 1);
    control.before_claiming(0);
    assert_eq!(control.claimed(), SLOT + 1);
    // A malformed value makes it check all there are.
    control.store(header::CLAIMED, u64::MAX);
    assert_eq!(control.claimed(), control.shape.peers);
}

#[test]
fn a_new_life_waits_for_who_stood_still_in_the_former() {
    let pair = Pair::new(config());
    let mut stopped = Stopped::with_mark(&pair.owner.control, Mark::registration(0, 1));
    drop(pair.owner);
    let again = |config| ShmEndpoint::open(pair.directory.path(), "owner", config).map(drop);
    assert!(is_stalled(again(config())));
    stopped.kill();
    again(config()).expect("it is dead");
}

// Control files of version 1 do not say how many slots were claimed. The program is replaced while
// its servers are down: their memories must not be lost for that, and who stood still in an old
// file must be waited for.
#[test]
fn a_life_of_an_earlier_version_is_taken_over() {
    let config = || ShmConfig {
        memory: Memory::Kept,
        ..config()
    };
    let pair = Pair::new(config());
    let mut stopped = Stopped::with_mark(&pair.owner.control, Mark::registration(0, 1));
    pair.owner.memory().store_u64(64, 77);
    drop(pair.owner);
    let control = Control::attach(&pair.directory.path().join("owner.ctl")).expect("its file");
    control.store(header::VERSION, 1);
    control.store(header::CLAIMED, 0);
    drop(control);
    let again = || ShmEndpoint::open(pair.directory.path(), "owner", config());
    assert!(is_stalled(again().map(drop)));
    stopped.kill();
    assert_eq!(again().expect("it is dead").memory().load_u64(64), 77);
}

#[test]
fn serials_go_on_from_one_life_to_the_next() {
    let pair = Pair::new(config());
    let mut owner = pair.owner;
    for former in [1 << 47, u64::MAX, (1 << 48) - 1] {
        let before = owner.register(0, 64, Access::ALL, Token(1)).expect("key");
        // Also where the word was scribbled over.
        owner.control.store(header::SERIAL, former);
        drop(owner);
        owner = ShmEndpoint::open(pair.directory.path(), "owner", config()).expect("open");
        let after = owner.register(0, 64, Access::ALL, Token(1)).expect("key");
        assert_ne!(before.id, after.id);
        assert!(former != 1 << 47 || after.id >> 16 > former);
    }
}

struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let word = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ word >> 31
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// A word that somebody might trip over.
    fn word(&mut self, before: u64) -> u64 {
        match self.below(9) {
            0 => 0,
            1 => u64::MAX,
            2 => before.wrapping_add(1),
            3 => before.wrapping_sub(8),
            4 => before ^ 1 << self.below(64),
            5 => 1 << self.below(64),
            6 => u64::from(std::process::id()) << 32 | self.below(8),
            7 => self.below(16),
            _ => self.next(),
        }
    }

    /// Writes nonsense somewhere into a control file, more often where it matters.
    fn scribble(&mut self, control: &Control) {
        let shape = control.shape;
        let base = match self.below(5) {
            0 => 0,
            1 => shape.registration(self.below(shape.registrations.min(4))),
            2 => shape.queue(self.below(shape.queues)),
            _ => shape.slot(self.below(shape.peers)),
        };
        let at = match self.below(4) {
            0 => base + self.below(8) * 8,
            1 => base + self.below(queue::BYTES / 8 + 8) * 8,
            2 => base + self.below(slot::BYTES / 8) * 8,
            _ => base + slot::TO_OWNER + self.below(6) * 64,
        };
        let at = at.min(control.area.len() - 8);
        let word = self.word(control.load(at));
        control.store(at, word);
    }
}

/// Everything that an owner and an initiator may do, whatever comes of it.
fn use_everything(pair: &mut Pair, dice: &mut Dice) {
    let (owner, initiator) = (&mut pair.owner, &mut pair.initiator);
    let mut events = Vec::new();
    let key = owner.register(32 << 10, 4096, Access::ALL, Token(1));
    let spec = AppendSpec {
        segment_bytes: SEGMENT,
        max_posted: 4,
        token: Token(1),
    };
    let queue = owner.open_append(spec);
    if let Ok(queue) = &queue {
        owner.memory().zero(0, 4 * SEGMENT);
        let _ = owner.post_segments(queue, &[0, SEGMENT, 2 * SEGMENT]);
    }
    if let Ok(on) = initiator.connect(&owner.address()) {
        pair.on = on;
    }
    let bytes = vec![5; dice.below(6000) as usize];
    let _ = initiator.post(pair.on, Operation::Send { bytes: &bytes }, 1);
    if let (Ok(key), Ok(queue)) = (&key, &queue) {
        let operations = [
            Operation::Write {
                key,
                offset: 8,
                bytes: &bytes[..bytes.len().min(4000)],
            },
            Operation::Append {
                queue,
                bytes: &bytes,
            },
            Operation::FetchAdd {
                key,
                offset: 8,
                value: 1,
            },
        ];
        for operation in operations {
            let _ = initiator.post(pair.on, operation, 2);
        }
        if let Ok(chain) = initiator.open_chain(ChainShape::Chain, &[(pair.on, *key)]) {
            let _ = initiator.post_chain(chain, ChainOperation::Flush, 3);
            initiator.close_chain(chain);
        }
    }
    owner.poll(&mut events);
    for event in std::mem::take(&mut events) {
        if let Event::Received { connection, bytes } = event {
            let _ = owner.post(connection, Operation::Send { bytes: &bytes }, 4);
        }
    }
    initiator.poll(&mut events);
    if dice.below(2) == 0 {
        initiator.disconnect(pair.on);
    }
    owner.wait(Duration::ZERO);
    if let Ok(queue) = &queue {
        let mut used = Vec::new();
        let _ = owner.used_segments(queue, &mut used);
        assert!(used.iter().all(|offset| offset % SEGMENT == 0));
        let _ = owner.close_append(queue);
        let _ = owner.revoke(&queue.0);
    }
    if let Ok(key) = &key {
        let _ = owner.revoke(key);
    }
}

/// With nonsense in the control files between any two rounds no process panics or hangs, and the
/// owner can begin a new life.
#[test]
fn nonsense_between_operations_does_no_more_than_fail_them() {
    for seed in 0..200 {
        eprintln!("seed {seed}");
        let mut dice = Dice(seed);
        let config = ShmConfig {
            stalled_wait: Duration::from_micros(100),
            max_queues: 2,
            ..config()
        };
        let mut pair = Pair::new(config.clone());
        for _ in 0..20 {
            for _ in 0..dice.below(4) {
                dice.scribble(&pair.owner.control);
                if dice.below(4) == 0 {
                    dice.scribble(&pair.initiator.control);
                }
            }
            use_everything(&mut pair, &mut dice);
        }
        let Pair {
            directory, owner, ..
        } = pair;
        drop(owner);
        let again = ShmEndpoint::open(directory.path(), "owner", config);
        assert!(again.is_ok() || is_stalled(again.map(drop)));
    }
}

/// The machine lost power after the last write: the file system brings the memory's file back, with
/// older content here and there. Only the control file tells; without one this is unknown.
#[test]
fn memory_of_another_boot_is_not_kept() {
    let directory = tempfile::tempdir().expect("directory");
    let description = directory.path().join("description");
    let config = ShmConfig {
        memory: Memory::Kept,
        described_by: Some(description.clone()),
        ..config()
    };
    let open = || ShmEndpoint::open(directory.path(), "owner", config.clone()).expect("open");
    let write = |endpoint: &ShmEndpoint| {
        endpoint.memory().write(64, b"written");
        endpoint.memory().persist(64, 64);
        std::fs::write(&description, b"written").expect("written");
    };
    let is_empty = |endpoint: &ShmEndpoint| {
        let is_empty = endpoint.memory().read_vec(64, 7) == [0; 7];
        assert_eq!(is_empty, !description.exists());
        is_empty
    };
    let first = open();
    assert!(!first.kept_memory() && is_empty(&first));
    assert_eq!(first.survives(), cyclone_pmem::Survives::ProcessCrash);
    write(&first);
    drop(first);
    let second = open();
    assert!(second.kept_memory() && !is_empty(&second));
    let boot = second.control.load(header::BOOT + 8);
    second.control.store(header::BOOT + 8, boot ^ 1);
    drop(second);
    let third = open();
    assert!(!third.kept_memory() && is_empty(&third));
    write(&third);
    drop(third);
    let fourth = open();
    assert!(fourth.kept_memory() && !is_empty(&fourth));
    drop(fourth);
    std::fs::remove_file(directory.path().join("owner.ctl")).expect("removed");
    let fifth = open();
    assert!(!fifth.kept_memory() && is_empty(&fifth));
}

/// Endpoints that go for good take their files with them; others leave them to their next life.
#[test]
fn files_go_with_an_endpoint_that_leaves_nothing() {
    let mut pair = Pair::new(config());
    let config = ShmConfig {
        leaves_nothing: true,
        ..config()
    };
    let passing = ShmEndpoint::open(pair.directory.path(), "passing", config).expect("open");
    let address = passing.address();
    let on = pair.initiator.connect(&address).expect("connect");
    let files = || {
        let entries = std::fs::read_dir(pair.directory.path()).expect("directory");
        let names = entries.map(|it| it.expect("entry").file_name());
        let passing = names.filter(|it| it.to_string_lossy().starts_with("passing"));
        passing.count()
    };
    assert_eq!(files(), 2);
    drop(passing);
    assert_eq!(files(), 0);
    assert!(pair.initiator.connect(&address).is_err());
    let send = Operation::Send { bytes: b"late" };
    pair.initiator.post(on, send, 1).expect("posted");
    let mut events = Vec::new();
    while events.is_empty() {
        pair.initiator.poll(&mut events);
    }
    assert!(matches!(events[0], Event::Failed { .. }), "{events:?}");
    drop(pair.owner);
    assert!(pair.directory.path().join("owner.ctl").exists());
    assert!(pair.directory.path().join("owner.mem").exists());
}

struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The same with somebody scribbling at the same time.
#[test]
fn nonsense_at_any_moment_does_no_more_than_fail_operations() {
    for seed in 0..20 {
        eprintln!("seed {seed}");
        let mut dice = Dice(seed);
        let config = ShmConfig {
            stalled_wait: Duration::from_micros(100),
            max_queues: 2,
            memory: Memory::Kept,
            ..config()
        };
        let mut pair = Pair::new(config);
        let controls = [pair.owner.control.clone(), pair.initiator.control.clone()];
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut dice = Dice(!seed);
                while !is_over.load(Ordering::Relaxed) {
                    let whose = dice.below(4) as usize / 3;
                    dice.scribble(&controls[whose]);
                    std::thread::sleep(Duration::from_micros(dice.below(20)));
                }
            });
            // Also when it ends by a panic.
            let _over = Over(&is_over);
            for _ in 0..30 {
                use_everything(&mut pair, &mut dice);
            }
        });
    }
}

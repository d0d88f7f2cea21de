//! Initiators in threads, which are hit in the middle of an operation more often than processes
//! are.

mod shm_common;

use std::sync::Barrier;
use std::time::Duration;

use cyclone_fabric::shm::{ShmConfig, ShmEndpoint};
use cyclone_fabric::{
    Access, AppendKey, AppendSpec, ConnectionId, Endpoint, FailureKind, MemoryKey, Operation,
};
use shm_common::{Dice, TOKEN, directory, open, perform, seed};

const SEGMENT: u64 = 128 << 10;
const MEMORY: u64 = 2 << 20;
const LONG: usize = 60 << 10;

fn config() -> ShmConfig {
    ShmConfig {
        no_segment_wait: Duration::ZERO,
        // Threads of a busy machine wait long for their turns.
        stalled_wait: Duration::from_secs(30),
        ..ShmConfig::new(MEMORY)
    }
}

/// What an initiator does until it is refused.
#[derive(Clone, Copy)]
enum Work {
    Append(AppendKey),
    Write(MemoryKey),
}

fn work(endpoint: &mut ShmEndpoint, on: ConnectionId, work: Work) -> FailureKind {
    for number in 1u64.. {
        let bytes = vec![number as u8 | 1; LONG];
        let operation = match &work {
            Work::Append(queue) => Operation::Append {
                queue,
                bytes: &bytes,
            },
            Work::Write(key) => Operation::Write {
                key,
                offset: 0,
                bytes: &bytes,
            },
        };
        match perform(endpoint, on, operation) {
            Ok(_) | Err(FailureKind::NoSegment) => {}
            Err(kind) => return kind,
        }
    }
    unreachable!("numbers do not end here");
}

/// Ends the authority while two initiators use it: from that moment on no byte changes.
fn ends_at_once(
    directory: &std::path::Path,
    round: u64,
    dice: &mut Dice,
    begin: impl FnOnce(&mut ShmEndpoint) -> Work,
) -> [FailureKind; 2] {
    let mut owner = open(directory, "owner", config());
    let task = begin(&mut owner);
    let start = Barrier::new(3);
    std::thread::scope(|scope| {
        let initiators = [0, 1].map(|n| {
            let (start, address) = (&start, owner.address());
            scope.spawn(move || {
                let name = format!("initiator{round}-{n}");
                let mut endpoint = open(directory, &name, ShmConfig::new(4096));
                let on = endpoint.connect(&address).expect("connect");
                start.wait();
                work(&mut endpoint, on, task)
            })
        });
        start.wait();
        let spins = dice.below(100_000);
        (0..spins).for_each(|_| std::hint::spin_loop());
        end(&mut owner, task);
        let after = owner.memory().read_vec(0, MEMORY);
        let kinds = initiators.map(|initiator| initiator.join().expect("initiator"));
        assert!(
            after == owner.memory().read_vec(0, MEMORY),
            "round {round}: changed after the end"
        );
        kinds
    })
}

fn open_queue(owner: &mut ShmEndpoint) -> Work {
    let spec = AppendSpec {
        segment_bytes: SEGMENT,
        max_posted: 16,
        token: TOKEN,
    };
    let queue = owner.open_append(spec).expect("queue");
    let offsets: Vec<u64> = (0..16).map(|n| n * SEGMENT).collect();
    owner.post_segments(&queue, &offsets).expect("post");
    Work::Append(queue)
}

fn register(owner: &mut ShmEndpoint) -> Work {
    let key = owner.register(0, MEMORY, Access::ALL, TOKEN);
    Work::Write(key.expect("key"))
}

fn end(owner: &mut ShmEndpoint, work: Work) {
    let ended = match work {
        Work::Append(queue) => owner.close_append(&queue).map(drop),
        Work::Write(key) => owner.revoke(&key),
    };
    ended.expect("no thread stands still");
}

#[test]
fn no_append_outlives_a_close() {
    let mut dice = Dice(seed());
    let directory = directory();
    for round in 0..60 {
        let kinds = ends_at_once(directory.path(), round, &mut dice, open_queue);
        assert_eq!(kinds, [FailureKind::Closed, FailureKind::Closed]);
    }
}

#[test]
fn no_write_outlives_a_revocation() {
    let mut dice = Dice(seed());
    let directory = directory();
    for round in 0..60 {
        let kinds = ends_at_once(directory.path(), round, &mut dice, register);
        let refused = FailureKind::NotRegistered;
        assert_eq!(kinds, [refused.clone(), refused]);
    }
}

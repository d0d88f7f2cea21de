//! Processes killed with -9 while operations are in flight, targets and initiators: what completed
//! is in the target's memory, nothing else is but parts of what was posted, and the survivor hears
//! of it in time.
#![cfg(feature = "libfabric")]

mod ofi_common;
mod ofi_processes;

use std::collections::{BTreeMap, BTreeSet};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use cyclone_fabric::ofi::OfiOptions;
use cyclone_fabric::{
    Access, ConnectionId, Endpoint, Event, FabricError, FailureKind, Operation, Token,
};
use ofi_common::{PATIENCE, Tester, completed, endpoint, endpoint_with, for_each_provider, post};
use ofi_processes::{
    APPENDED, BYTES, Child, Memory, SEGMENT, SEGMENTS, SLOT, SLOTS, TOKEN, left_behind, record,
    slot_byte,
};

/// How long a survivor may take to notice: its time-outs of 4 s, and twice as much again on a
/// machine full of tests.
const NOTICED: Duration = Duration::from_secs(12);

/// Shorter times than by default, but none in which a machine with other work may leave a living
/// process without its CPU.
fn survivor(provider: &str) -> OfiOptions {
    let mut options = ofi_common::options(provider);
    options.operation_timeout = Duration::from_secs(4);
    options.idle_timeout = Duration::from_secs(4);
    options.revoke_timeout = Duration::from_millis(300);
    options
}

/// Runs a test over every provider whose peers can be killed.
fn for_each_that_survives(test: impl Fn(&str)) {
    for_each_provider(|provider| {
        if provider == "shm" {
            // Seen with 1.17: a process that is killed inside the library keeps a spin lock in
            // shared memory, and the next who wants it waits without end inside the library. The
            // fabric's own provider `shm` has no such locks.
            eprintln!("libfabric/shm skipped: it does not survive killed peers");
        } else {
            test(provider);
        }
    });
}

/// Posts until 500 operations have completed, kills the target, and answers the numbers that
/// completed.
fn post_until_killed(
    target: &mut Child,
    initiator: &mut Tester,
    to: ConnectionId,
    (limit, name): (u64, &str),
    mut post: impl FnMut(&mut Tester, u64) -> Result<(), FabricError>,
) -> Vec<u64> {
    let (mut next, mut open, mut completed) = (0, 0, Vec::new());
    let mut failures = Vec::new();
    let mut killed: Option<Instant> = None;
    let start = Instant::now();
    loop {
        while open < 32 && next < limit && killed.is_none() {
            match post(initiator, next) {
                Ok(()) => (next, open) = (next + 1, open + 1),
                Err(FabricError::Busy) => break,
                Err(why) => panic!("{why}"),
            }
        }
        let mut events = Vec::new();
        initiator.poll(&mut events);
        for event in events {
            open -= 1;
            match event {
                Event::Completed { context, .. } => completed.push(context),
                Event::Failed {
                    failure,
                    connection,
                    ..
                } => {
                    assert!(killed.is_some() && connection == to, "{failure}");
                    failures.push(failure);
                }
                event => panic!("{event:?}"),
            }
        }
        match killed {
            Some(at) if open == 0 => {
                assert!(at.elapsed() < NOTICED, "{:?}", at.elapsed());
                break;
            }
            Some(at) => assert!(at.elapsed() < PATIENCE, "{open} operations hang"),
            None if completed.len() >= 500 => {
                target.kill();
                killed = Some(Instant::now());
            }
            None => assert!(start.elapsed() < 2 * PATIENCE, "no progress"),
        }
        initiator.wait(Duration::from_millis(1));
    }
    // The first failure names an operation and why; the rest fail because of it.
    for (place, failure) in failures.iter().enumerate() {
        assert!(failure.operation.starts_with(name), "{failure}");
        let broken = failure.kind == FailureKind::Broken;
        assert_eq!(broken, place > 0, "{failures:?}");
    }
    if !failures.is_empty() {
        let gone = initiator.post(to, Operation::Send { bytes: b"?" }, 0);
        assert!(matches!(gone, Err(FabricError::Unknown(_))), "{gone:?}");
    }
    completed
}

#[test]
fn completed_writes_outlive_a_killed_target_and_the_rest_fails_in_time() {
    let _turn = ofi_processes::turn();
    for_each_that_survives(|provider| {
        let memory = Memory::new();
        let mut target = Child::target(provider, &memory);
        let mut initiator = endpoint_with(survivor(provider), 4096);
        let to = initiator.connect(&target.address).expect("connect");
        let key = target.key;
        let ended = (u64::MAX, "write of ");
        let completed = post_until_killed(
            &mut target,
            &mut initiator,
            to,
            ended,
            |endpoint, number| {
                let offset = number % SLOTS * SLOT;
                let write = Operation::Write {
                    key: &key,
                    offset,
                    bytes: &vec![slot_byte(number); SLOT as usize],
                };
                endpoint.post(to, write, number)
            },
        );
        let process = target.process();
        drop((initiator, target));
        slots_hold(&memory, &completed, provider);
        assert_eq!(left_behind(process), Vec::<String>::new(), "{provider}");
    });
}

/// Every slot holds the last write to it that completed, or that and parts of the next one.
fn slots_hold(memory: &Memory, completed: &[u64], provider: &str) {
    let mut last = BTreeMap::new();
    for &number in completed {
        let slot = last.entry(number % SLOTS).or_insert(number);
        *slot = number.max(*slot);
    }
    for slot in 0..SLOTS {
        let held = memory.read(slot * SLOT, SLOT);
        let (before, next) = match last.get(&slot) {
            Some(&number) => (slot_byte(number), slot_byte(number + SLOTS)),
            None => (0, slot_byte(slot)),
        };
        let strange = held.iter().find(|&&byte| byte != before && byte != next);
        assert_eq!(strange, None, "{provider}: slot {slot}: {before} or {next}");
    }
    let rest = memory.read(SLOTS * SLOT, APPENDED - SLOTS * SLOT);
    assert!(
        rest.iter().all(|&byte| byte == 0),
        "{provider}: bytes behind the slots"
    );
}

#[test]
fn completed_appends_outlive_a_killed_target_and_the_rest_fails_in_time() {
    let _turn = ofi_processes::turn();
    for_each_that_survives(|provider| {
        let memory = Memory::new();
        let mut target = Child::target(provider, &memory);
        let Some(queue) = target.queue else {
            return eprintln!("libfabric/{provider} skipped: no append");
        };
        let mut initiator = endpoint_with(survivor(provider), 4096);
        let to = initiator.connect(&target.address).expect("connect");
        // As many as the segments hold for certain.
        let ended = (BYTES / 2048, "append of ");
        let completed = post_until_killed(
            &mut target,
            &mut initiator,
            to,
            ended,
            |endpoint, number| {
                let append = Operation::Append {
                    queue: &queue,
                    bytes: &record(0, number),
                };
                endpoint.post(to, append, number)
            },
        );
        let process = target.process();
        drop((initiator, target));
        let found = appended(&memory, provider);
        for number in completed {
            assert!(
                found.contains(&(0, number)),
                "{provider}: completed append {number} is lost"
            );
        }
        assert_eq!(left_behind(process), Vec::<String>::new(), "{provider}");
    });
}

/// The whole records in the segments, each sender's in order within a segment. What is not whole is
/// a hole of its length.
fn appended(memory: &Memory, provider: &str) -> BTreeSet<(u64, u64)> {
    let mut found = BTreeSet::new();
    for segment in 0..SEGMENTS {
        let mut latest = BTreeMap::new();
        let bytes = memory.read(APPENDED + segment * SEGMENT, SEGMENT);
        let mut at = 0;
        while at + 64 <= bytes.len() {
            let word =
                |n: usize| u64::from_le_bytes(bytes[at + n..at + n + 8].try_into().expect("8"));
            let Some(sender) = word(0).checked_sub(1) else {
                break;
            };
            let expected = record(sender, word(8));
            let end = (at + expected.len()).min(bytes.len());
            if bytes[at..end] == expected[..] {
                let before = latest.insert(sender, word(8));
                assert!(before < Some(word(8)), "{provider}: order of {sender}");
                found.insert((sender, word(8)));
            }
            at += expected.len().next_multiple_of(64);
        }
    }
    found
}

/// Waits until the connection to a killed peer is known to be gone; answers the failures of its
/// operations.
fn until_noticed(endpoint: &mut Tester, peer: ConnectionId) -> Vec<cyclone_fabric::Failure> {
    let start = Instant::now();
    let mut failures = Vec::new();
    loop {
        let mut events = Vec::new();
        endpoint.poll(&mut events);
        for event in events {
            match event {
                Event::Failed {
                    connection,
                    failure,
                    ..
                } if connection == peer => failures.push(failure),
                Event::Disconnected { connection } if connection == peer => return failures,
                _ => {}
            }
        }
        if !failures.is_empty() {
            return failures;
        }
        assert!(start.elapsed() < NOTICED, "the death was not noticed");
        endpoint.wait(Duration::from_millis(5));
    }
}

#[test]
fn a_sender_killed_amid_writes_leaves_whole_writes_and_a_target_that_goes_on() {
    let _turn = ofi_processes::turn();
    for_each_that_survives(|provider| {
        let memory = Memory::new();
        let mut target = endpoint_on(&memory, survivor(provider));
        let key = target
            .register(0, SLOTS * SLOT, Access::ALL, TOKEN)
            .expect("register");
        let mut sender = Child::writer(provider, &target.address(), &key);
        let (peer, theirs) = sender.introduced(&mut target);
        // The survivor also has operations in flight on the sender's memory.
        let (mut number, mut open) = (0, 0);
        while sender.completed().len() < 300 {
            let write = Operation::Write {
                key: &theirs,
                offset: 0,
                bytes: &[1; 64],
            };
            if open < 4 && target.post(peer, write, number).is_ok() {
                (number, open) = (number + 1, open + 1);
            }
            target.wait(Duration::from_micros(100));
            let mut events = Vec::new();
            target.poll(&mut events);
            for event in events {
                assert!(matches!(event, Event::Completed { .. }), "{event:?}");
                open -= 1;
            }
            sender.lives();
        }
        let write = Operation::Write {
            key: &theirs,
            offset: 64,
            bytes: &[2; 64],
        };
        sender.kill();
        // Posted to somebody who is not there any more: it fails, and says what it was. So do those
        // in flight, and then the connection may be known to be gone already.
        let posted = loop {
            match target.post(peer, write, u64::MAX) {
                Ok(()) => break true,
                Err(FabricError::Unknown(_)) => break false,
                Err(why) => assert!(matches!(why, FabricError::Busy), "{why}"),
            }
        };
        let failures = until_noticed(&mut target, peer);
        assert!(!posted || !failures.is_empty(), "{provider}");
        if let Some(first) = failures.first() {
            let named = first.operation.starts_with("write of ");
            assert!(
                named && first.kind != FailureKind::Broken,
                "{provider}: {failures:?}"
            );
        }
        let completed = sender.all_completed();
        // Nothing of the sender's lands after this, and others are served.
        target.revoke(&key).expect("revoke");
        slots_hold(&memory, &completed, provider);
        serves(&mut target, provider);
        let process = sender.process();
        drop((target, sender));
        assert_eq!(left_behind(process), Vec::<String>::new(), "{provider}");
    });
}

/// The provider `sockets` stops permanently when a connection's receive buffer is full and ends
/// within a message's head; so little is given to it at once. The smaller the buffer, the likelier:
/// three in a hundred runs of the test above with 96 KiB, thirteen with 32.
#[test]
fn sockets_go_on_where_receive_buffers_are_small() {
    let _turn = ofi_processes::turn();
    let small = "ip link set lo up && sysctl -qw net.ipv4.tcp_rmem='4096 32768 32768' && exec \"$0\" \"$@\"";
    let tried = Command::new("unshare")
        .args(["--net", "sh", "-c", small, "true"])
        .status();
    if !tried.is_ok_and(|status| status.success()) {
        eprintln!("skipped: needs the right to a network namespace with separate settings");
        return;
    }
    for _ in 0..5 {
        let at_once = [(); 3].map(|()| {
            Command::new("unshare")
                .args(["--net", "sh", "-c", small])
                .arg(std::env::current_exe().expect("exe"))
                .args(["--exact", "--nocapture"])
                .arg("a_sender_killed_amid_writes_leaves_whole_writes_and_a_target_that_goes_on")
                .env("CYCLONE_TEST_OFI", "sockets")
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .expect("unshare")
        });
        for test in at_once {
            let output = test.wait_with_output().expect("test");
            let said = String::from_utf8_lossy(&output.stdout);
            assert!(
                output.status.success() && said.contains("1 passed"),
                "{said}{}",
                String::from_utf8_lossy(&output.stderr)
            );
        }
    }
}

/// Whether a new initiator is served.
fn serves(target: &mut Tester, provider: &str) {
    let key = target
        .register(APPENDED, 4096, Access::ALL, Token(77))
        .expect("register");
    let mut other = endpoint(provider, 4096);
    let to = other.connect(&target.address()).expect("connect");
    let write = Operation::Write {
        key: &key,
        offset: 0,
        bytes: &[9; 100],
    };
    post(&mut other, to, write, 1);
    ofi_common::wait_for(&mut other, |event| completed(event, 1));
    assert_eq!(target.memory().read_vec(APPENDED, 100), [9; 100]);
}

fn endpoint_on(memory: &Memory, options: OfiOptions) -> Tester {
    Tester::new(memory.area(), options)
}

#[test]
fn a_sender_killed_amid_appends_leaves_whole_appends_and_a_queue_that_goes_on() {
    let _turn = ofi_processes::turn();
    for_each_that_survives(|provider| {
        let memory = Memory::new();
        let mut target = endpoint_on(&memory, survivor(provider));
        if target.capabilities().append.is_none() {
            return eprintln!("libfabric/{provider} skipped: no append");
        }
        let queue = ofi_processes::open_queue(&mut target);
        let mut sender = Child::appender(provider, &target.address(), &queue);
        let (peer, _) = sender.introduced(&mut target);
        while sender.completed().len() < 300 {
            target.wait(Duration::from_millis(1));
            target.poll(&mut Vec::new());
            sender.lives();
        }
        sender.kill();
        // Nothing is in flight from here to there, and still it is noticed.
        assert_eq!(until_noticed(&mut target, peer), [], "{provider}");
        let completed = sender.all_completed();
        // Another sender's appends go through.
        let mut other = endpoint(provider, 4096);
        let to = other.connect(&target.address()).expect("connect");
        for number in 0..20 {
            let bytes = record(1, number);
            let append = Operation::Append {
                queue: &queue,
                bytes: &bytes,
            };
            post(&mut other, to, append, number);
        }
        for number in 0..20 {
            ofi_common::wait_for(&mut other, |event| ofi_common::completed(event, number));
        }
        target.close_append(&queue).expect("close");
        let found = appended(&memory, provider);
        let expected = completed.iter().map(|&number| (0, number));
        for wanted in expected.chain((0..20).map(|number| (1, number))) {
            assert!(
                found.contains(&wanted),
                "{provider}: completed append {wanted:?} is lost"
            );
        }
        let process = sender.process();
        drop((target, other, sender));
        assert_eq!(left_behind(process), Vec::<String>::new(), "{provider}");
    });
}

#[test]
fn files_of_killed_processes_go_with_the_next_endpoint() {
    let _turn = ofi_processes::turn();
    for_each_provider(|provider| {
        let memory = Memory::new();
        let mut target = Child::target(provider, &memory);
        target.kill();
        let process = target.process();
        drop(endpoint(provider, 4096));
        assert_eq!(left_behind(process), Vec::<String>::new(), "{provider}");
    });
}

#[test]
fn signals_and_crashes_have_their_own_actions_and_leave_no_file() {
    let _turn = ofi_processes::turn();
    // libfabric's dependencies catch them, write PROGRAM-…,PID.btr into the current directory and
    // exit with 1.
    for signal in ["ABRT", "TERM", "INT", "SEGV", "BUS"] {
        let directory = tempfile::tempdir().expect("directory");
        let (status, files) = ofi_processes::ended_by(signal, directory.path());
        assert_eq!(files, Vec::<String>::new(), "SIG{signal}");
        assert_eq!(
            status,
            Some(ofi_processes::signal_number(signal)),
            "SIG{signal}"
        );
    }
}

/// The other process of the tests in this file: what it does, its environment says.
#[test]
#[ignore = "the other process of the tests in this file"]
fn child_process() {
    ofi_processes::run();
}

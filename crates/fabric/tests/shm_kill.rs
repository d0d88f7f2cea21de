//! Initiators in separate processes are stopped and killed wherever they happen to be, and so is an
//! owner.

mod shm_common;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use cyclone_fabric::shm::{Memory, ShmConfig, ShmEndpoint, Stalled};
use cyclone_fabric::{
    Access, AppendKey, AppendSpec, Endpoint, Event, FabricError, FailureKind, MemoryKey, Operation,
};
use cyclone_pmem::SharedArea;
use shm_common::*;

const SEGMENT: u64 = 256 << 10;
const POSTED: u64 = 32;
const MEMORY: u64 = 9 << 20;

/// Not a test, but the other processes of those in this file.
#[test]
#[ignore = "the other processes of the tests in this file"]
fn other_process() {
    shm_common::other_process();
}

fn config() -> ShmConfig {
    ShmConfig {
        stalled_wait: Duration::from_millis(30),
        peer_check: Duration::from_millis(2),
        ..ShmConfig::new(MEMORY)
    }
}

fn open_queue(owner: &mut ShmEndpoint) -> AppendKey {
    let spec = AppendSpec {
        segment_bytes: SEGMENT,
        max_posted: POSTED as u32,
        token: TOKEN,
    };
    owner.open_append(spec).expect("queue")
}

fn segments() -> Vec<u64> {
    (0..POSTED).map(|n| n * SEGMENT).collect()
}

fn snapshot(memory: &SharedArea) -> Vec<u8> {
    memory.read_vec(0, memory.len())
}

/// What was found of each sender's records: number, then lines in order.
#[derive(Default)]
struct Found {
    records: BTreeMap<(u64, u64), u64>,
    torn: u64,
}

impl Found {
    /// Takes a used segment apart. A record's lines stand one behind the other, in one segment.
    fn take(&mut self, bytes: &[u8]) {
        let mut previous = None;
        for found in bytes.as_chunks::<{ LINE as usize }>().0 {
            let word = |n: usize| {
                let bytes = found[n * 8..].first_chunk::<8>().expect("8 bytes");
                u64::from_le_bytes(*bytes)
            };
            if found.iter().all(|byte| *byte == 0) {
                previous = None;
                continue;
            }
            let (sender, number) = (word(0) >> 40, (word(0) & ((1 << 40) - 1)).wrapping_sub(1));
            let place = word(1).wrapping_sub(1);
            if word(1) == 0 || *found != line(sender, number, place) {
                self.torn += 1;
                previous = None;
                continue;
            }
            // Overlapping appends would leave a line in the wrong place, or one too many.
            match previous {
                _ if place == 0 => {}
                Some(before) => assert_eq!(before, (sender, number, place - 1)),
                None => panic!("line {place} of record {number} of {sender} without those before"),
            }
            let lines = self.records.entry((sender, number)).or_default();
            assert_eq!(*lines, place, "record {number} of {sender} stands twice");
            *lines += 1;
            previous = Some((sender, number, place));
        }
    }

    /// Every completed record is there once and whole; of the one that was in flight at the end
    /// there may be a part.
    fn check(&self, sender: u64, completed: u64) {
        for number in 0..completed {
            let lines = self.records.get(&(sender, number));
            let expected = lines_of(sender, number);
            assert_eq!(lines, Some(&expected), "record {number} of {sender}");
        }
        let later = self.records.range((sender, completed + 1)..(sender + 1, 0));
        assert_eq!(later.count(), 0, "records of {sender} after the last one");
    }
}

/// Takes used segments, checks them, zeroes them and posts them again; returns how many there were.
fn recycle(owner: &mut ShmEndpoint, queue: &AppendKey, found: &mut Found) -> usize {
    let mut used = Vec::new();
    owner.used_segments(queue, &mut used).expect("used");
    for offset in &used {
        let memory = owner.memory();
        found.take(&memory.read_vec(*offset, SEGMENT));
        memory.zero(*offset, SEGMENT);
        memory.persist(*offset, SEGMENT);
    }
    owner.post_segments(queue, &used).expect("post");
    used.len()
}

#[test]
fn senders_die_and_stall_and_every_completed_record_stands_once() {
    let mut dice = Dice(seed());
    let directory = directory();
    let mut owner = open(directory.path(), "owner", config());
    let queue = open_queue(&mut owner);
    owner.post_segments(&queue, &segments()).expect("post");
    let start = |id| Other::start(directory.path(), "owner", id, Role::Append(queue));
    let mut others: Vec<Other> = (0..3).map(start).collect();
    let (mut ended, mut found) = (Vec::new(), Found::default());
    for next in 3..15 {
        let victim = dice.below(3) as usize;
        let turn = |found: &mut Found, owner: &mut ShmEndpoint, wanted: usize| {
            let mut used = 0;
            wait_until("used segments", || {
                used += recycle(owner, &queue, found);
                used >= wanted
            });
        };
        // It runs among others, and is stopped or killed wherever it is then.
        let begun = others[victim].completed();
        wait_until("the victim's first records", || {
            recycle(&mut owner, &queue, &mut found);
            others[victim].completed() > begun
        });
        std::thread::sleep(Duration::from_micros(dice.below(3_000)));
        if dice.below(3) > 0 {
            others[victim].pause();
            for _ in 0..dice.below(2_000) {
                recycle(&mut owner, &queue, &mut found);
            }
            if dice.below(2) == 0 {
                others[victim].resume();
                // It goes on where it was, whatever was reused meanwhile.
                turn(&mut found, &mut owner, 3);
            }
        }
        others[victim].kill();
        let new = start(next);
        ended.push(std::mem::replace(&mut others[victim], new));
        // Its hole, if there is one, stops no sender: more segments are used than were posted when
        // it died.
        turn(&mut found, &mut owner, POSTED as usize + 1);
    }
    for mut other in others {
        wait_until("the last ones' records", || {
            recycle(&mut owner, &queue, &mut found);
            other.completed() > 0
        });
        other.kill();
        ended.push(other);
    }
    owner.close_append(&queue).expect("close");
    let mut used = Vec::new();
    owner.used_segments(&queue, &mut used).expect("all of them");
    assert_eq!(used.len() as u64, POSTED);
    for offset in used {
        found.take(&owner.memory().read_vec(offset, SEGMENT));
    }
    for other in &ended {
        assert!(other.completed() > 0);
        found.check(other.id, other.completed());
    }
    let (records, torn) = (found.records.len(), found.torn);
    eprintln!("{records} records, {torn} torn lines");
    // One line of each that was killed may be torn.
    assert!(
        found.torn <= ended.len() as u64,
        "{} torn lines",
        found.torn
    );
}

/// Calls until it succeeds, letting the stalled go on after the first refusal; returns whether
/// there was one.
fn until_done(
    mut call: impl FnMut() -> Result<(), FabricError>,
    mut before_again: impl FnMut(),
) -> bool {
    let mut was_refused = false;
    for _ in 0..2_000 {
        match call() {
            Ok(()) => return was_refused,
            Err(FabricError::System { what, .. }) => {
                assert!(what.contains("makes no progress"), "{what}");
                was_refused = true;
                before_again();
            }
            Err(error) => panic!("{error}"),
        }
    }
    panic!("refused permanently");
}

#[test]
fn a_closed_queue_is_never_touched_again() {
    let mut dice = Dice(seed());
    let directory = directory();
    let mut owner = open(directory.path(), "owner", config());
    let mut refusals = 0;
    for round in 0..10u64 {
        let queue = open_queue(&mut owner);
        owner.post_segments(&queue, &segments()).expect("post");
        let ids = [round * 2, round * 2 + 1];
        let start = |id| Other::start(directory.path(), "owner", id, Role::Append(queue));
        let mut others = ids.map(start);
        let mut found = Found::default();
        for other in &others {
            let begun = other.completed();
            wait_until("records", || {
                recycle(&mut owner, &queue, &mut found);
                other.completed() > begun
            });
        }
        std::thread::sleep(Duration::from_micros(dice.below(2_000)));
        let (is_paused, is_killed) = (dice.below(3) > 0, dice.below(2) == 0);
        if is_paused {
            others[0].pause();
        }
        if is_killed {
            others[1].kill();
        }
        let victim = &others[0];
        let refused = until_done(|| owner.close_append(&queue).map(drop), || victim.resume());
        refusals += u32::from(refused);
        let after = snapshot(owner.memory());
        if is_paused {
            others[0].resume();
        }
        assert_eq!(others[0].exit_code(), Some(REFUSED));
        assert!(is_killed || others[1].exit_code() == Some(REFUSED));
        assert!(after == snapshot(owner.memory()), "touched after the close");
        let mut used = Vec::new();
        owner.used_segments(&queue, &mut used).expect("used");
        assert_eq!(used.len() as u64, POSTED, "round {round}");
        for offset in used {
            found.take(&owner.memory().read_vec(offset, SEGMENT));
        }
        for other in &others {
            found.check(other.id, other.completed());
        }
        owner.memory().zero(0, MEMORY);
    }
    eprintln!("{refusals} of 10 closes met a stalled sender");
}

#[test]
fn a_revocation_is_absolute_and_atomics_count_once() {
    let mut dice = Dice(seed());
    let directory = directory();
    for round in 0..8u64 {
        let kills_stalled = round % 2 == 1;
        let config = ShmConfig {
            stalled: if kills_stalled {
                Stalled::Kill
            } else {
                Stalled::Report
            },
            ..config()
        };
        let mut owner = open(directory.path(), "owner", config);
        let key = owner.register(0, MEMORY, Access::ALL, TOKEN).expect("key");
        let ids = [round * 3, round * 3 + 1, round * 3 + 2];
        let start = |id| Other::start(directory.path(), "owner", id, Role::Operate(key));
        let mut others = ids.map(start);
        others.iter().for_each(Other::wait_for_progress);
        std::thread::sleep(Duration::from_micros(dice.below(2_000)));
        others[0].kill();
        others[1].pause();
        let victim = &others[1];
        until_done(|| owner.revoke(&key), || victim.resume());
        let after = snapshot(owner.memory());
        others[1].resume();
        let code = others[1].exit_code();
        assert!(
            code == Some(REFUSED) || kills_stalled && code.is_none(),
            "{code:?}"
        );
        assert_eq!(others[2].exit_code(), Some(REFUSED));
        assert!(after == snapshot(owner.memory()), "touched after it");
        // By exchange and by addition: everyone's completed ones, and one more of each at most.
        let completed: u64 = others.iter().map(Other::completed).sum();
        for offset in [0, 8] {
            let counted = owner.memory().load_u64(offset);
            let possible = completed..=completed + 3;
            assert!(possible.contains(&counted), "{counted} of {completed}");
        }
        let again = owner.revoke(&key);
        assert!(matches!(again, Err(FabricError::Unknown(_))), "{again:?}");
    }
}

#[test]
fn a_chain_cut_anywhere_leaves_a_prefix() {
    let mut dice = Dice(seed());
    let directory = directory();
    let mut owners = ["first", "second"].map(|name| open(directory.path(), name, config()));
    for round in 0..8u64 {
        owners.iter().for_each(|owner| owner.memory().zero(0, 4096));
        let [first, second] = owners
            .each_mut()
            .map(|owner| owner.register(0, 4096, Access::ALL, TOKEN).expect("key"));
        let role = Role::Chain(first, second);
        let mut other = Other::start(directory.path(), "first,second", round, role);
        other.wait_for_progress();
        std::thread::sleep(Duration::from_micros(dice.below(2_000)));
        other.kill();
        let [first_has, second_has] = owners.each_ref().map(|owner| owner.memory().load_u64(0));
        let completed = other.completed();
        assert!(second_has >= completed, "{second_has} of {completed}");
        assert!(first_has == second_has || first_has == second_has + 1);
        assert!(second_has <= completed + 1);
        for (owner, key) in owners.iter_mut().zip([first, second]) {
            owner.revoke(&key).expect("no sender is left");
        }
    }
}

/// The owner of a life that is to be killed; its key comes by a file.
#[test]
#[ignore = "the other processes of the tests in this file"]
fn owner_process() {
    let Ok(directory) = std::env::var("SHM_LIFE") else {
        return;
    };
    let directory = Path::new(&directory);
    let mut owner = open(directory, "owner", config());
    let key = owner.register(0, MEMORY, Access::ALL, TOKEN).expect("key");
    std::fs::write(directory.join("key.new"), key.encode()).expect("key");
    std::fs::rename(directory.join("key.new"), directory.join("key")).expect("key");
    let mut events = Vec::new();
    loop {
        owner.poll(&mut events);
        owner.wait(Duration::from_millis(100));
    }
}

#[test]
fn a_new_life_keeps_the_bytes_and_refuses_old_keys() {
    let directory = directory();
    let mut former = std::process::Command::new(std::env::current_exe().expect("exe"))
        .args(["--ignored", "--exact", "owner_process", "--nocapture"])
        .env("SHM_LIFE", directory.path())
        .stdout(std::process::Stdio::null())
        .spawn()
        .expect("child");
    let key_path = directory.path().join("key");
    wait_until("the owner", || key_path.exists());
    let key = std::fs::read(&key_path).expect("key");
    let key = MemoryKey::decode(key.first_chunk().expect("24 bytes"));
    let mut initiator = open(directory.path(), "initiator", config());
    let address = cyclone_fabric::Address(
        directory
            .path()
            .join("owner.ctl")
            .into_os_string()
            .into_encoded_bytes(),
    );
    let on = initiator.connect(&address).expect("connect");
    let bytes = record(1, 1);
    let write = |key| Operation::Write {
        key,
        offset: 128,
        bytes: &bytes,
    };
    perform(&mut initiator, on, write(&key)).expect("write");
    let mut late = open(directory.path(), "late", config());
    let late_on = late.connect(&address).expect("connect");
    let taken = ShmEndpoint::open(directory.path(), "owner", config());
    assert!(matches!(taken, Err(FabricError::System { .. })), "in use");

    former.kill().expect("kill");
    former.wait().expect("ended");
    // Nothing is in flight: the end itself is reported.
    let mut events = Vec::new();
    wait_until("the end of the connection", || {
        initiator.poll(&mut events);
        events == [Event::Disconnected { connection: on }]
    });
    assert!(matches!(
        initiator.connect(&address),
        Err(FabricError::BadAddress(_))
    ));
    let config = ShmConfig {
        memory: Memory::Kept,
        ..config()
    };
    let mut owner = open(directory.path(), "owner", config);
    assert!(owner.kept_memory());
    assert_eq!(owner.memory().read_vec(128, bytes.len() as u64), bytes);
    let new = owner.register(0, MEMORY, Access::ALL, TOKEN).expect("key");
    assert_ne!(new.id, key.id);
    let again = initiator.connect(&address).expect("connect");
    let refused = perform(&mut initiator, again, write(&key));
    assert_eq!(refused, Err(FailureKind::NotRegistered));
    let again = initiator.connect(&address).expect("connect");
    perform(&mut initiator, again, write(&new)).expect("the new key");
    // Nor does who has not heard of it reach the memory by his old connection.
    owner.memory().zero(0, 4096);
    let refused = perform(&mut late, late_on, write(&key));
    assert_eq!(refused, Err(FailureKind::PeerGone));
    assert_eq!(owner.memory().read_vec(0, 4096), [0; 4096]);
}

#[test]
fn a_connection_of_a_former_life_reaches_nothing() {
    // The same process owns both lives, so that nothing but the file tells the initiator.
    let directory = directory();
    let mut former = open(directory.path(), "owner", config());
    let key = former.register(0, MEMORY, Access::ALL, TOKEN).expect("key");
    let mut initiator = open(directory.path(), "initiator", config());
    let on = initiator.connect(&former.address()).expect("connect");
    drop(former);
    let mut owner = open(directory.path(), "owner", config());
    let same = owner.register(0, MEMORY, Access::ALL, TOKEN).expect("key");
    for key in [key, same] {
        let write = Operation::Write {
            key: &key,
            offset: 0,
            bytes: &[7; 64],
        };
        let refused = perform(&mut initiator, on, write);
        assert!(
            matches!(refused, Err(FailureKind::PeerGone | FailureKind::Broken)),
            "{refused:?}"
        );
    }
    assert!(!owner.kept_memory());
    assert_eq!(owner.memory().read_vec(0, 64), [0; 64]);
}

#[test]
fn slots_of_the_dead_are_given_away() {
    let directory = directory();
    let config = ShmConfig {
        max_peers: 2,
        ..config()
    };
    let mut owner = open(directory.path(), "owner", config);
    let key = owner.register(0, MEMORY, Access::ALL, TOKEN).expect("key");
    let mut events = Vec::new();
    for id in 0..6 {
        let mut other = Other::start(directory.path(), "owner", id, Role::Operate(key));
        other.wait_for_progress();
        other.kill();
        // The owner's program looks after them when it polls.
        for _ in 0..4 {
            owner.wait(Duration::from_millis(5));
            owner.poll(&mut events);
        }
    }
    assert!(events.is_empty(), "no peer sent anything: {events:?}");
}

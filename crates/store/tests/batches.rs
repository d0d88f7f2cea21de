//! Batches with conditions: all or nothing, each operation seeing the earlier ones, versions that
//! show whether a key has changed.

mod support;

use cyclone_store::{EntryInput, Mode, StateMachine};
use cyclone_wire::command::{Condition, Expectation, Expected, Operation, Query};
use cyclone_wire::reply::{Failure, Reply};
use support::{ENGINES, command, entry, incr, operations, payload, set, tag};

fn batch<'a>(expectations: &[(&'a [u8], Expected<'a>)], all: &[Operation<'a>]) -> Operation<'a> {
    Operation::Batch {
        expectations: expectations
            .iter()
            .map(|&(key, state)| Expectation { key, state })
            .collect(),
        operations: all.to_vec(),
    }
}

fn apply(machine: &dyn StateMachine, index: u64, all: &[Operation<'_>]) -> Vec<Reply> {
    let payload = operations(all);
    machine
        .apply(0, &[entry(index, &payload)], Mode::Blocking)
        .unwrap()
        .replies
        .remove(0)
}

fn get(machine: &dyn StateMachine, key: &[u8]) -> Reply {
    machine.query(&Query::Get { key }, Mode::Blocking).unwrap()
}

fn version(machine: &dyn StateMachine, key: &[u8]) -> u64 {
    let query = Query::Versions { keys: vec![key] };
    match &machine.query(&query, Mode::Blocking).unwrap() {
        Reply::Array(items) => match items[..] {
            [Reply::Int(version)] => version as u64,
            ref other => panic!("{other:?}"),
        },
        other => panic!("{other:?}"),
    }
}

fn bytes(text: &str) -> Reply {
    Reply::Bytes(text.as_bytes().to_vec())
}

#[test]
fn operations_see_the_earlier_ones_and_failures_do_not_stop_them() {
    for engine in ENGINES {
        let root = tempfile::tempdir().unwrap();
        let machine = engine.open(root.path(), 1);
        let all = [
            set(b"a", b"1"),
            incr(b"a"),
            set(b"t", b"text"),
            incr(b"t"),
            Operation::Read(Query::MultiGet {
                keys: vec![b"a", b"t", b"none"],
            }),
            Operation::Del { keys: vec![b"t"] },
            Operation::Read(Query::Exists { keys: vec![b"t"] }),
        ];
        let replies = apply(&*machine, 1, &[batch(&[], &all)]);
        let read = Reply::Array(vec![bytes("2"), bytes("text"), Reply::Nil]);
        assert_eq!(
            replies,
            [Reply::Array(vec![
                Reply::Ok,
                Reply::Int(2),
                Reply::Ok,
                Reply::Failed(Failure::NotInteger),
                read,
                Reply::Int(1),
                Reply::Int(0),
            ])]
        );
        assert_eq!(get(&*machine, b"a"), bytes("2"));
    }
}

#[test]
fn a_condition_that_does_not_hold_leaves_everything_as_it_was() {
    for engine in ENGINES {
        let root = tempfile::tempdir().unwrap();
        let machine = engine.open(root.path(), 1);
        apply(&*machine, 1, &[set(b"a", b"1")]);
        let digest = |machine: &dyn StateMachine| {
            let digest = machine.digest().unwrap();
            digest.split('-').next().unwrap().to_owned()
        };
        let _ = digest(&*machine);
        let mut index = 1;
        for (state, holds) in [
            (Expected::Present, true),
            (Expected::Absent, false),
            (Expected::Value(b"1"), true),
            (Expected::Value(b"12"), false),
            (Expected::Version(0), false),
            (Expected::Version(version(&*machine, b"a")), true),
        ] {
            index += 1;
            let before = version(&*machine, b"other");
            let writes = [set(b"other", b"x"), Operation::GetDel { key: b"none" }];
            let first = (&b"none"[..], Expected::Absent);
            let replies = apply(&*machine, index, &[batch(&[first, (b"a", state)], &writes)]);
            match holds {
                true => assert_eq!(replies, [Reply::Array(vec![Reply::Ok, Reply::Nil])]),
                false => {
                    assert_eq!(
                        replies,
                        [Reply::Failed(Failure::ConditionFailed)],
                        "{state:?}"
                    );
                    assert_eq!(version(&*machine, b"other"), before);
                }
            }
        }
    }
}

/// What WATCH needs: every change of a key gives it another version, also one back to what it was,
/// also within an entry.
#[test]
fn versions_change_with_every_change() {
    for engine in ENGINES {
        let root = tempfile::tempdir().unwrap();
        let machine = engine.open(root.path(), 1);
        assert_eq!(version(&*machine, b"a"), 0);
        let mut seen = vec![0];
        let mut index = 0;
        for change in [
            set(b"a", b"1"),
            set(b"a", b"1"),
            Operation::Append {
                key: b"a",
                value: b"",
            },
            Operation::Expire {
                key: b"a",
                expiry: cyclone_wire::command::Expiry::At(1 << 40),
                condition: cyclone_wire::command::ExpireIf::Always,
            },
            batch(&[], &[set(b"a", b"1")]),
        ] {
            index += 1;
            apply(&*machine, index, &[change.clone(), set(b"b", b"")]);
            let now = version(&*machine, b"a");
            assert!(!seen.contains(&now), "{change:?}");
            seen.push(now);
        }
        let now = version(&*machine, b"a");
        for unchanging in [
            Operation::Set {
                key: b"a",
                value: b"2",
                condition: Condition::Absent,
                get: false,
            },
            Operation::Read(Query::Get { key: b"a" }),
            Operation::SetRange {
                key: b"a",
                offset: 3,
                value: b"",
            },
        ] {
            index += 1;
            apply(&*machine, index, &[unchanging]);
            assert_eq!(version(&*machine, b"a"), now);
        }
        // Read and changed in one entry, by different commands.
        let versions = Operation::Read(Query::Versions { keys: vec![b"a"] });
        let (one, two) = (set(b"a", b"x"), set(b"a", b"y"));
        let replies = apply(
            &*machine,
            index + 1,
            &[one, versions.clone(), two, versions],
        );
        assert_ne!(replies[1], replies[3]);
        apply(&*machine, index + 2, &[Operation::FlushAll]);
        assert_eq!(version(&*machine, b"a"), 0);
    }
}

/// A batch under a session counts once, and is answered whole when it is repeated.
#[test]
fn a_repeated_batch_counts_once() {
    for engine in ENGINES {
        let root = tempfile::tempdir().unwrap();
        let machine = engine.open(root.path(), 1);
        let Reply::Int(session) = apply(&*machine, 1, &[Operation::OpenSession])[0] else {
            panic!("no session");
        };
        let transfer = batch(&[], &[incr(b"a"), incr(b"b")]);
        let bytes = command(tag(session as u64, 1, 0), transfer);
        let once = payload(&[bytes.clone(), bytes.clone()]);
        let again = payload(&[bytes]);
        let first = machine
            .apply(0, &[entry(2, &once)], Mode::Blocking)
            .unwrap();
        machine.flush().unwrap();
        drop(machine);
        let machine = engine.open(root.path(), 1);
        let second = machine
            .apply(0, &[entry(3, &again)], Mode::Blocking)
            .unwrap();
        let reply = Reply::Array(vec![Reply::Int(1), Reply::Int(1)]);
        assert_eq!(first.replies[0], [reply.clone(), reply.clone()]);
        assert_eq!(second.replies[0], [reply]);
        assert_eq!(get(&*machine, b"b"), Reply::Bytes(b"1".to_vec()));
    }
}

/// Killed at any moment: either all of a batch is there or nothing.
#[test]
fn a_crash_leaves_all_or_nothing() {
    for engine in ENGINES {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("0");
        let machine = engine.open(&directory, 1);
        let value = [b'v'; 60];
        let keys: Vec<Vec<u8>> = (0..200).map(|n| format!("key {n}").into_bytes()).collect();
        let writes: Vec<Operation<'_>> = keys.iter().map(|key| set(key, &value)).collect();
        let payload = operations(&[batch(&[], &writes)]);
        for index in 1..=20 {
            let input = EntryInput {
                index,
                term: 1,
                payload: &payload,
                wants_replies: true,
            };
            machine.apply(0, &[input], Mode::Blocking).unwrap();
            let left = root.path().join(index.to_string());
            support::crash_copy(&directory, &left);
            let machine = engine.open(&left, 1);
            let exists = Query::Exists {
                keys: keys.iter().map(|key| &key[..]).collect(),
            };
            let found = machine.query(&exists, Mode::Blocking).unwrap();
            let whole = machine.applied(0).0 > 0;
            assert_eq!(found, Reply::Int(if whole { 200 } else { 0 }));
            if index == 10 {
                // From here on the log holds less than the store.
                drop(machine);
            }
        }
        machine.flush().unwrap();
    }
}

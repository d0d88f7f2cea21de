//! What engines owe the replica beyond commands: bounds of sessions, nothing done when a call would
//! block, checkpoints, cursors.

mod support;

use std::collections::BTreeSet;
use std::fs;

use cyclone_store::{Echo, KvMachine, Limits, MemoryKv, Mode, StateMachine};
use cyclone_wire::command::{Operation, Query};
use cyclone_wire::reply::{Failure, Reply};
use support::{ENGINES, command, entry, incr, operations, payload, set, tag};

fn one(machine: &dyn StateMachine, log: u16, index: u64, bytes: &[Vec<u8>]) -> Vec<Reply> {
    let payload = payload(bytes);
    machine
        .apply(log, &[entry(index, &payload)], Mode::Blocking)
        .unwrap()
        .replies
        .remove(0)
}

fn open_session(machine: &dyn StateMachine, index: u64) -> u64 {
    match one(machine, 0, index, &[command(None, Operation::OpenSession)])[..] {
        [Reply::Int(session)] => session as u64,
        ref other => panic!("{other:?}"),
    }
}

#[test]
fn sessions_expire_and_close() {
    for engine in ENGINES {
        let root = tempfile::tempdir().unwrap();
        let machine = engine.open(root.path(), 1);
        let expired = Reply::Failed(Failure::SessionExpired);
        assert_eq!(
            one(&*machine, 0, 1, &[command(tag(77, 1, 0), incr(b"n"))]),
            std::slice::from_ref(&expired)
        );
        let session = open_session(&*machine, 2);
        assert_eq!(
            one(&*machine, 0, 3, &[command(tag(session, 5, 0), incr(b"n"))]),
            [Reply::Int(1)]
        );
        assert_eq!(
            one(
                &*machine,
                0,
                4,
                &[command(None, Operation::CloseSession { session })]
            ),
            [Reply::Ok]
        );
        // Had it been forgotten only in part, this would be answered, or worse, count.
        assert_eq!(
            one(&*machine, 0, 5, &[command(tag(session, 5, 0), incr(b"n"))]),
            std::slice::from_ref(&expired)
        );
        machine.flush().unwrap();
        drop(machine);
        let machine = engine.open(root.path(), 1);
        assert_eq!(
            one(&*machine, 0, 6, &[command(tag(session, 5, 0), incr(b"n"))]),
            [expired]
        );
        assert_eq!(
            machine
                .query(&Query::Get { key: b"n" }, Mode::Blocking)
                .unwrap(),
            Reply::Bytes(b"1".to_vec())
        );
    }
}

/// A client that never acknowledges keeps its newest 4096 replies; older ones count as
/// acknowledged, and never execute again.
#[test]
fn replies_are_bounded() {
    for engine in ENGINES {
        let root = tempfile::tempdir().unwrap();
        let machine = engine.open(root.path(), 1);
        let session = open_session(&*machine, 1);
        for chunk in 0..5u64 {
            let commands: Vec<_> = (1..=1000)
                .map(|n| command(tag(session, chunk * 1000 + n, 0), incr(b"n")))
                .collect();
            one(&*machine, 0, chunk + 2, &commands);
        }
        let ask = |machine: &dyn StateMachine, index, seq| {
            one(
                machine,
                0,
                index,
                &[command(tag(session, seq, 0), incr(b"n"))],
            )
        };
        assert_eq!(
            ask(&*machine, 7, 904),
            [Reply::Failed(Failure::StaleSequence)]
        );
        assert_eq!(ask(&*machine, 8, 905), [Reply::Int(905)]);
        machine.flush().unwrap();
        drop(machine);
        let machine = engine.open(root.path(), 1);
        assert_eq!(
            ask(&*machine, 9, 904),
            [Reply::Failed(Failure::StaleSequence)]
        );
        assert_eq!(ask(&*machine, 10, 905), [Reply::Int(905)]);
        assert_eq!(ask(&*machine, 11, u64::MAX), [Reply::Int(5001)]);
    }
}

/// A client that repeats the same request without end makes nothing grow, and is answered the same
/// after a restart.
#[test]
fn a_number_repeated_without_end_takes_no_room() {
    for engine in ENGINES {
        let root = tempfile::tempdir().unwrap();
        let mut machine = engine.open(root.path(), 1);
        let session = open_session(&*machine, 1);
        let ask = |machine: &dyn StateMachine, index, seq| {
            one(
                machine,
                0,
                index,
                &[command(tag(session, seq, 0), incr(b"n"))],
            )
        };
        assert_eq!(ask(&*machine, 2, 1), [Reply::Int(1)]);
        assert_eq!(ask(&*machine, 3, 7), [Reply::Int(2)]);
        assert_eq!(ask(&*machine, 4, 7), [Reply::Int(2)]);
        let after_one = support::records(&*machine);
        for index in 5..50 {
            assert_eq!(
                ask(&*machine, index, 1 + index % 2 * 6),
                [Reply::Int(1 + (index % 2) as i64)]
            );
            assert_eq!(support::records(&*machine), after_one);
            if index == 20 {
                machine.flush().unwrap();
                drop(machine);
                machine = engine.open(root.path(), 1);
            }
        }
        assert_eq!(ask(&*machine, 50, 8), [Reply::Int(3)]);
    }
}

/// The session unused for longest goes, on every replica the same one, also on one that restarted
/// in between.
#[test]
fn the_session_unused_for_longest_goes() {
    let mut digests = BTreeSet::new();
    for (engine, restart) in ENGINES
        .iter()
        .flat_map(|engine| [(engine, false), (engine, true)])
    {
        let root = tempfile::tempdir().unwrap();
        let mut machine = engine.open(root.path(), 1);
        let mut sessions = Vec::new();
        for index in 1..=10 {
            let opened = one(
                &*machine,
                0,
                index,
                &vec![command(None, Operation::OpenSession); 1000],
            );
            sessions.extend(opened.into_iter().map(|reply| match reply {
                Reply::Int(session) => session as u64,
                other => panic!("{other:?}"),
            }));
        }
        one(
            &*machine,
            0,
            11,
            &[command(tag(sessions[0], 1, 0), incr(b"n"))],
        );
        if restart {
            machine.flush().unwrap();
            drop(machine);
            machine = engine.open(root.path(), 1);
        }
        open_session(&*machine, 12);
        let ask = |index, session| {
            one(
                &*machine,
                0,
                index,
                &[command(tag(session, 1, 0), incr(b"n"))],
            )
        };
        assert_eq!(ask(13, sessions[0]), [Reply::Int(1)]);
        assert_eq!(
            ask(14, sessions[1]),
            [Reply::Failed(Failure::SessionExpired)]
        );
        assert_eq!(ask(15, sessions[2]), [Reply::Int(2)]);
        digests.insert(machine.digest().unwrap());
    }
    assert_eq!(digests.len(), 1, "{digests:?}");
}

/// The value to be incremented is on the device only. The loop's attempt must do nothing at all:
/// not the SET before it, not the session's reply, not the applied index.
#[cfg(feature = "rocksdb")]
#[test]
fn a_call_that_would_block_has_done_nothing() {
    let root = tempfile::tempdir().unwrap();
    let engine = support::Engine::Rocks;
    let machine = engine.open(root.path(), 1);
    let session = open_session(&*machine, 1);
    // Enough that the key does not share a block with what opening reads.
    let keys: Vec<Vec<u8>> = (0..2000).map(|n| format!("key:{n}").into_bytes()).collect();
    let filler: Vec<_> = keys
        .iter()
        .map(|key| command(None, set(key, &[b'v'; 60])))
        .collect();
    one(
        &*machine,
        0,
        2,
        &[filler, vec![command(None, set(b"cold", b"41"))]].concat(),
    );
    machine.flush().unwrap();
    drop(machine);
    let machine = engine.open(root.path(), 1);
    let before = machine.digest().unwrap();
    let commands = [
        command(tag(session, 1, 0), set(b"x", b"1")),
        command(tag(session, 2, 0), incr(b"cold")),
    ];
    let bytes = payload(&commands);
    let would_block = |result: Result<(), cyclone_store::ApplyError>| {
        matches!(result, Err(cyclone_store::ApplyError::WouldBlock))
    };
    // The digest's walk does not fill the cache.
    assert!(would_block(
        machine
            .query(&Query::Get { key: b"cold" }, Mode::NonBlocking)
            .map(drop)
    ));
    assert!(would_block(
        machine
            .apply(0, &[entry(3, &bytes)], Mode::NonBlocking)
            .map(drop)
    ));
    assert_eq!(machine.digest().unwrap(), before);
    assert_eq!(machine.applied(0).0, 2);
    assert_eq!(
        machine
            .query(&Query::Get { key: b"x" }, Mode::Blocking)
            .unwrap(),
        Reply::Nil
    );
    let replies = machine
        .apply(0, &[entry(3, &bytes)], Mode::Blocking)
        .unwrap();
    assert_eq!(replies.replies, [[Reply::Ok, Reply::Int(42)]]);
    // Blind SETs do not read, so they do not block, however cold the key.
    let blind = operations(&[set(b"never seen", b"1")]);
    assert_eq!(
        machine
            .apply(0, &[entry(4, &blind)], Mode::NonBlocking)
            .unwrap()
            .replies,
        [[Reply::Ok]]
    );
    assert!(would_block(
        machine.query(&Query::DbSize, Mode::NonBlocking).map(drop)
    ));
}

#[test]
fn a_checkpoint_carries_everything() {
    for engine in ENGINES {
        let root = tempfile::tempdir().unwrap();
        let source = engine.open(&root.path().join("source"), 2);
        let session = open_session(&*source, 1);
        one(
            &*source,
            0,
            2,
            &[
                command(tag(session, 1, 0), incr(b"n")),
                command(None, set(b"k", b"v")),
            ],
        );
        let last = operations(&[set(b"other log", b"v")]);
        source
            .apply(
                1,
                &[cyclone_store::EntryInput {
                    index: 9,
                    term: 4,
                    payload: &last,
                    wants_replies: true,
                }],
                Mode::Blocking,
            )
            .unwrap();
        let files = root.path().join("checkpoint");
        let meta = source.checkpoint(&files).unwrap();
        assert_eq!(meta.applied, [(2, 1), (9, 4)]);
        let digest = source.digest().unwrap();
        one(&*source, 0, 3, &[command(None, set(b"later", b"v"))]);

        let home = root.path().join("target");
        let target = engine.open(&home, 2);
        one(&*target, 0, 1, &[command(None, set(b"must go", b"v"))]);
        assert_eq!(target.install(&files).unwrap(), meta);
        assert_eq!(
            (
                target.digest().unwrap(),
                target.flushed(0),
                target.flushed(1)
            ),
            (digest.clone(), 2, 9)
        );
        // It stands without a flush: the log before it may be gone.
        let left = root.path().join("left");
        support::crash_copy(&home, &left);
        let target = engine.open(&left, 2);
        assert_eq!(target.digest().unwrap(), digest);
        assert_eq!(
            one(&*target, 0, 3, &[command(tag(session, 1, 0), incr(b"n"))]),
            [Reply::Int(1)]
        );
    }
}

#[test]
fn what_is_no_checkpoint_replaces_nothing() {
    for engine in ENGINES {
        let root = tempfile::tempdir().unwrap();
        let machine = engine.open(&root.path().join("home"), 1);
        one(&*machine, 0, 1, &[command(None, set(b"k", b"v"))]);
        let before = machine.digest().unwrap();
        let missing = root.path().join("missing");
        let rubbish = root.path().join("rubbish");
        let empty = root.path().join("empty");
        fs::create_dir_all(&rubbish).unwrap();
        fs::create_dir_all(&empty).unwrap();
        for name in ["CURRENT", "MANIFEST-000001", "memory.kv"] {
            fs::write(rubbish.join(name), b"rubbish").unwrap();
        }
        for directory in [missing, rubbish, empty] {
            assert!(
                machine.install(&directory).is_err(),
                "{engine:?} {}",
                directory.display()
            );
            assert_eq!(machine.digest().unwrap(), before);
        }
        one(&*machine, 0, 2, &[command(None, set(b"k", b"goes on"))]);
    }
}

/// A state that was labelled with other indexes than its own was given the entries behind them:
/// those between were passed over without a word.
#[test]
fn entries_come_one_after_the_other() {
    for engine in ENGINES {
        let root = tempfile::tempdir().unwrap();
        let machine = engine.open(root.path(), 2);
        let bytes = operations(&[incr(b"n")]);
        let at = |index| entry(index, &bytes);
        let apply = |entries: &[_]| machine.apply(0, entries, Mode::Blocking);
        let fatal = |error| matches!(error, cyclone_store::ApplyError::Fatal(_));
        apply(&[at(1), at(2)]).unwrap();
        assert!(fatal(apply(&[at(4)]).unwrap_err()));
        assert!(fatal(apply(&[at(3), at(5)]).unwrap_err()), "all or nothing");
        assert_eq!(machine.applied(0), (2, 1));
        // What is applied already may come again, as a replay brings it.
        assert_eq!(
            apply(&[at(1), at(2), at(3)]).unwrap().replies[2],
            [Reply::Int(3)]
        );
        machine.apply(1, &[at(1)], Mode::Blocking).unwrap();
        let gang = |one, other| machine.apply_gang(&[(0, at(one)), (1, at(other))], Mode::Blocking);
        assert!(fatal(gang(5, 2).unwrap_err()));
        assert!(fatal(gang(4, 3).unwrap_err()));
        assert_eq!((machine.applied(0).0, machine.applied(1).0), (3, 1));
        assert_eq!(gang(4, 2).unwrap(), [Reply::Int(5)]);
    }
}

/// The pointer names a database that is gone. An empty one in its place would look like a fresh
/// replica that has applied nothing, and the trimmed log could not make up for it.
#[cfg(feature = "rocksdb")]
#[test]
fn a_missing_generation_is_an_error() {
    let root = tempfile::tempdir().unwrap();
    let home = root.path().join("home");
    let machine = support::Engine::Rocks.open(&home, 1);
    one(&*machine, 0, 1, &[command(None, set(b"k", b"v"))]);
    let files = root.path().join("files");
    machine.checkpoint(&files).unwrap();
    machine.install(&files).unwrap();
    drop(machine);
    fs::remove_dir_all(home.join("gen-1")).unwrap();
    assert!(cyclone_store::RocksKv::open(&home, &cyclone_store::RocksOptions::default()).is_err());
}

/// Walks with every page size, on one replica and then on another: no key twice, none left out.
#[test]
fn cursors_survive_a_failover() {
    let keys: Vec<Vec<u8>> = (0..300)
        .map(|n| format!("key:{n}{{{}}}", n % 7).into_bytes())
        .collect();
    let root = tempfile::tempdir().unwrap();
    let replicas: Vec<_> = ENGINES
        .iter()
        .chain(ENGINES)
        .enumerate()
        .map(|(number, engine)| {
            let machine = engine.open(&root.path().join(number.to_string()), 1);
            let sets: Vec<_> = keys.iter().map(|key| set(key, b"v")).collect();
            machine
                .apply(0, &[entry(1, &operations(&sets))], Mode::Blocking)
                .unwrap();
            machine
        })
        .collect();
    for count in [0, 1, 2, 7, 299, 300, 1000] {
        let (mut cursor, mut found, mut pages) = (0u64, Vec::new(), 0);
        loop {
            let query = Query::Scan {
                cursor,
                pattern: None,
                count,
                held: false,
            };
            let page = replicas[pages % replicas.len()]
                .query(&query, Mode::Blocking)
                .unwrap();
            let Reply::Array(parts) = page else {
                panic!("{page:?}")
            };
            let [Reply::Bytes(next), Reply::Array(names)] = &parts[..] else {
                panic!("{parts:?}")
            };
            found.extend(names.iter().map(|name| match name {
                Reply::Bytes(name) => name.clone(),
                other => panic!("{other:?}"),
            }));
            pages += 1;
            assert!(pages <= 400, "SCAN with count {count} does not end");
            cursor = std::str::from_utf8(next).unwrap().parse().unwrap();
            if cursor == 0 {
                break;
            }
        }
        assert_eq!(found.len(), keys.len());
        assert_eq!(
            found.into_iter().collect::<BTreeSet<_>>(),
            keys.iter().cloned().collect()
        );
    }
    let replica = &replicas[0];
    assert_eq!(
        replica.query(&Query::DbSize, Mode::Blocking).unwrap(),
        Reply::Int(300)
    );
    let some = replica
        .query(
            &Query::Keys {
                pattern: b"key:1?{*}",
            },
            Mode::Blocking,
        )
        .unwrap();
    assert!(matches!(some, Reply::Array(keys) if keys.len() == 10));
    for (cursor, held) in [(1 << 48, false), (u64::MAX, false), (1 << 48, true)] {
        let query = Query::Scan {
            cursor,
            pattern: None,
            count: 10,
            held,
        };
        let page = replica.query(&query, Mode::Blocking).unwrap();
        assert_eq!(page, Reply::Failed(Failure::SnapshotGone));
    }
}

/// Trimming the log up to what a map without files has "flushed" would lose it all at the next
/// restart.
#[test]
fn memory_without_a_file_promises_nothing() {
    let limits = Limits {
        max_value_bytes: 100,
        max_sessions: Limits::MAX_SESSIONS,
    };
    let machine = KvMachine::open(MemoryKv::open(None).unwrap(), 1, limits).unwrap();
    one(&machine, 0, 1, &[command(None, set(b"k", b"v"))]);
    machine.flush().unwrap();
    assert_eq!((machine.applied(0).0, machine.flushed(0)), (1, 0));
}

/// Two workers flush at once, again and again: each time the file must be whole.
#[test]
fn flushes_do_not_disturb_each_other() {
    let root = tempfile::tempdir().unwrap();
    let machine = support::Engine::Memory.open(root.path(), 1);
    let keys: Vec<Vec<u8>> = (0..2000).map(|n| format!("key:{n}").into_bytes()).collect();
    let sets: Vec<_> = keys.iter().map(|key| set(key, b"v")).collect();
    machine
        .apply(0, &[entry(1, &operations(&sets))], Mode::Blocking)
        .unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| (0..10).for_each(|_| machine.flush().unwrap()));
        }
    });
    let digest = machine.digest().unwrap();
    drop(machine);
    assert_eq!(
        support::Engine::Memory
            .open(root.path(), 1)
            .digest()
            .unwrap(),
        digest
    );
}

#[test]
fn echo_answers_every_command_once() {
    let echo = Echo::new(1);
    let bytes = operations(&[incr(b"n"), set(b"k", b"v")]);
    let at = |index, term| cyclone_store::EntryInput {
        index,
        term,
        payload: &bytes,
        wants_replies: true,
    };
    assert_eq!(
        echo.apply(0, &[at(5, 3)], Mode::NonBlocking)
            .unwrap()
            .replies,
        [[Reply::Ok, Reply::Ok]]
    );
    let again = echo.apply(0, &[at(4, 2)], Mode::NonBlocking).unwrap();
    assert_eq!(again.replies, [[]]);
    assert_eq!(echo.applied(0), (5, 3));
    assert!(echo.apply(1, &[at(1, 1)], Mode::NonBlocking).is_err());
}

/// While changes gather, are handed over and flushed, whatever a crash leaves is what the log was
/// at one of its entries.
#[test]
fn a_crash_leaves_what_some_entry_made() {
    for engine in ENGINES {
        let root = tempfile::tempdir().unwrap();
        let home = root.path().join("home");
        let machine = engine.open(&home, 1);
        let mut applied = BTreeSet::new();
        for index in 1..=4000u64 {
            let key = format!("key {index}");
            let entry = [set(key.as_bytes(), &[b'v'; 60]), incr(b"entries")];
            one(&*machine, 0, index, &entry.map(|one| command(None, one)));
            if index % 500 != 0 {
                continue;
            }
            let left = root.path().join(format!("left {index}"));
            support::crash_copy(&home, &left);
            let after = engine.open(&left, 1);
            let (upto, _) = after.applied(0);
            applied.insert(upto);
            assert!(upto <= index, "{engine:?}");
            let get = |key: &str| {
                let key = key.as_bytes();
                after.query(&Query::Get { key }, Mode::Blocking).unwrap()
            };
            let entries = match upto {
                0 => Reply::Nil,
                some => Reply::Bytes(some.to_string().into_bytes()),
            };
            assert_eq!(get("entries"), entries, "{engine:?}");
            for number in 1..=index {
                let there = get(&format!("key {number}")) != Reply::Nil;
                assert_eq!(there, number <= upto, "{engine:?}: {number} of {upto}");
            }
        }
        // Something reached the disk without a flush, or nothing needs to.
        assert!(applied.len() > 1 || *engine == support::Engine::Memory);
    }
}

//! Scans that hold a snapshot: every page shows the moment of the first. And how walks end.

mod support;

use cyclone_store::{ApplyError, Mode, StateMachine};
use cyclone_wire::command::{Operation, Query};
use cyclone_wire::reply::{Failure, Reply};
use support::{ENGINES, entry, operations, set};

/// One page of a scan that holds a snapshot: the next cursor, and the keys.
fn held_page(
    machine: &dyn StateMachine,
    cursor: u64,
    count: u32,
) -> Result<(u64, Vec<Vec<u8>>), Failure> {
    let query = Query::Scan {
        cursor,
        pattern: None,
        count,
        held: true,
    };
    assert!(matches!(
        machine.query(&query, Mode::NonBlocking),
        Err(ApplyError::WouldBlock)
    ));
    let parts = match machine.query(&query, Mode::Blocking).unwrap() {
        Reply::Array(parts) => parts,
        Reply::Failed(failure) => return Err(failure),
        other => panic!("{other:?}"),
    };
    let [Reply::Bytes(next), Reply::Array(names)] = &parts[..] else {
        panic!("{parts:?}")
    };
    let next = std::str::from_utf8(next).unwrap().parse().unwrap();
    let names = names.iter().map(|name| match name {
        Reply::Bytes(name) => name.clone(),
        other => panic!("{other:?}"),
    });
    Ok((next, names.collect()))
}

/// Every page of a held scan shows the moment of the first, though all logs go on between them.
#[test]
fn a_held_scan_shows_one_moment() {
    for engine in ENGINES {
        let root = tempfile::tempdir().unwrap();
        let machine = engine.open(&root.path().join("home"), 2);
        let keys: Vec<Vec<u8>> = (0..200).map(|n| format!("key:{n}").into_bytes()).collect();
        let sets: Vec<_> = keys.iter().map(|key| set(key, b"v")).collect();
        let all = operations(&sets);
        let gang = |index: u64, payload: &[u8]| {
            let parts = [(0, entry(index, payload)), (1, entry(index, &[]))];
            machine.apply_gang(&parts, Mode::Blocking).unwrap();
        };
        gang(1, &all);
        let (mut cursor, mut found) = held_page(&*machine, 0, 10).unwrap();
        assert_eq!(machine.held_snapshots(), 1);
        let mut index = 1;
        while cursor != 0 {
            // What is still to come goes, and something new comes in its place.
            index += 1;
            let fresh = format!("fresh:{index}").into_bytes();
            let gone: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
            let change = operations(&[Operation::Del { keys: gone }, set(&fresh, b"v")]);
            gang(index, &change);
            machine.flush().unwrap();
            let (next, page) = held_page(&*machine, cursor, 10).unwrap();
            // A client that has not got the answer asks again.
            assert_eq!(held_page(&*machine, cursor, 10), Ok((next, page.clone())));
            found.extend(page);
            cursor = next;
        }
        found.sort();
        let mut wanted = keys.clone();
        wanted.sort();
        assert_eq!(found, wanted, "{engine:?}");
        assert_eq!(machine.held_snapshots(), 0, "the scan is over");
    }
}

/// Views are few, are dropped, and never stand in for one another.
#[test]
fn held_scans_end() {
    for engine in ENGINES {
        let root = tempfile::tempdir().unwrap();
        let machine = engine.open(&root.path().join("home"), 1);
        let keys: Vec<Vec<u8>> = (0..50).map(|n| format!("key:{n}").into_bytes()).collect();
        let sets: Vec<_> = keys.iter().map(|key| set(key, b"v")).collect();
        one_batch(&*machine, &sets);
        machine.tick(1_000_000);
        let begun: Vec<u64> = (0..16)
            .map(|_| held_page(&*machine, 0, 10).unwrap().0)
            .collect();
        assert_eq!(held_page(&*machine, 0, 10), Err(Failure::TooManySnapshots));
        let (mut cursor, mut last) = (begun[0], 0);
        while cursor != 0 {
            last = cursor;
            cursor = held_page(&*machine, cursor, 10).unwrap().0;
        }
        // The last page can be had again, and its view makes room when it is wanted.
        assert!(held_page(&*machine, last, 10).is_ok());
        assert!(held_page(&*machine, begun[1] ^ 1, 10) == Err(Failure::SnapshotGone));
        let again = held_page(&*machine, 0, 10).unwrap().0;
        assert_eq!(held_page(&*machine, last, 10), Err(Failure::SnapshotGone));
        machine.tick(60_500_000);
        assert!(held_page(&*machine, begun[2], 10).is_ok());
        machine.tick(61_500_000);
        assert_eq!(
            held_page(&*machine, begun[3], 10),
            Err(Failure::SnapshotGone)
        );
        assert_eq!(held_page(&*machine, again, 10), Err(Failure::SnapshotGone));
        let kept = held_page(&*machine, begun[2], 10).map(|(next, _)| next);
        assert!(kept.is_ok(), "used a second ago");
        let files = root.path().join("files");
        machine.checkpoint(&files).unwrap();
        machine.install(&files).unwrap();
        let gone = held_page(&*machine, kept.unwrap(), 10);
        assert_eq!(
            gone,
            Err(Failure::SnapshotGone),
            "of a state that was replaced"
        );
    }
}

/// Two replicas of one state, with one history of scans: neither takes the other's cursors for its
/// own.
#[test]
fn a_cursor_is_good_at_one_replica() {
    for engine in ENGINES {
        let root = tempfile::tempdir().unwrap();
        let keys: Vec<Vec<u8>> = (0..50).map(|n| format!("key:{n}").into_bytes()).collect();
        let sets: Vec<_> = keys.iter().map(|key| set(key, b"v")).collect();
        let begin = |replica: u64| {
            let machine = engine.open(&root.path().join(replica.to_string()), 1);
            machine.set_replica_id(replica);
            one_batch(&*machine, &sets);
            let cursor = held_page(&*machine, 0, 10).unwrap().0;
            (machine, cursor)
        };
        let ((one, first), (two, second)) = (begin(1), begin(2));
        assert_eq!(held_page(&*one, second, 10), Err(Failure::SnapshotGone));
        assert_eq!(held_page(&*two, first, 10), Err(Failure::SnapshotGone));
        assert!(held_page(&*one, first, 10).is_ok() && held_page(&*two, second, 10).is_ok());
    }
}

/// A process that ends does not wait for walks over all keys; what names its keys is answered as
/// ever.
#[test]
fn walks_end_and_other_reads_do_not() {
    for engine in ENGINES {
        let root = tempfile::tempdir().unwrap();
        let machine = engine.open(&root.path().join("home"), 1);
        one_batch(&*machine, &[set(b"a", b"1"), set(b"b", b"2")]);
        let page = |held, cursor| Query::Scan {
            cursor,
            pattern: None,
            count: 1,
            held,
        };
        let (cursor, _) = held_page(&*machine, 0, 1).unwrap();
        let walks = [
            Query::DbSize,
            Query::Keys { pattern: b"*" },
            page(false, 0),
            page(true, 0),
            page(true, cursor),
        ];
        for ended in [false, true] {
            if ended {
                machine.cancel_scans();
            }
            let is_right = |error: Option<ApplyError>| match ended {
                true => matches!(error, Some(ApplyError::Cancelled)),
                false => error.is_none(),
            };
            for walk in &walks {
                let error = machine.query(walk, Mode::Blocking).err();
                assert!(is_right(error), "{walk:?}, ended: {ended}");
            }
            assert!(is_right(machine.digest().err()), "ended: {ended}");
            let get = machine.query(&Query::Get { key: b"a" }, Mode::Blocking);
            assert_eq!(get.unwrap(), Reply::Bytes(b"1".to_vec()));
        }
    }
}

/// More than what is freed at once.
#[test]
fn large_views_end_too() {
    let root = tempfile::tempdir().unwrap();
    let machine = support::Engine::Memory.open(root.path(), 1);
    let keys: Vec<Vec<u8>> = (0..20_000).map(|n| format!("{n}").into_bytes()).collect();
    for (index, keys) in (1..).zip(keys.chunks(500)) {
        let sets: Vec<_> = keys.iter().map(|key| set(key, b"v")).collect();
        let payload = operations(&sets);
        machine
            .apply(0, &[entry(index, &payload)], Mode::Blocking)
            .unwrap();
    }
    let cursor = held_page(&*machine, 0, 10).unwrap().0;
    assert_eq!(machine.held_snapshots(), 1);
    machine.tick(61_000_000);
    assert_eq!(machine.held_snapshots(), 0);
    assert_eq!(held_page(&*machine, cursor, 10), Err(Failure::SnapshotGone));
}

fn one_batch(machine: &dyn StateMachine, sets: &[Operation<'_>]) {
    let payload = operations(sets);
    machine
        .apply(0, &[entry(1, &payload)], Mode::Blocking)
        .unwrap();
}

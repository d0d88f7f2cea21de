//! Reads of much: an event loop leaves them to workers, and no reply takes more memory than it may.

mod support;

use std::collections::HashMap;
use std::path::Path;

use cyclone_store::{ApplyError, KvMachine, Limits, MemoryKv, Mode, StateMachine};
#[cfg(feature = "rocksdb")]
use cyclone_store::{RocksKv, RocksOptions};
use cyclone_wire::command::{Condition, Expiry, Operation, Query};
use cyclone_wire::reply::{Failure, Reply};
use support::{apply_all, entry, operations, set};

const MIB: usize = 1 << 20;
const TOO_LONG: Reply = Reply::Failed(Failure::ReplyTooLong);

fn engines(directory: &Path) -> Vec<Box<dyn StateMachine>> {
    let limits = Limits {
        max_value_bytes: 100 * MIB,
        max_sessions: 10,
    };
    let memory = MemoryKv::open(None).unwrap();
    vec![
        Box::new(KvMachine::open(memory, 1, limits).unwrap()),
        #[cfg(feature = "rocksdb")]
        Box::new({
            let rocks = RocksKv::open(directory, &RocksOptions::default()).unwrap();
            KvMachine::open(rocks, 1, limits).unwrap()
        }),
    ]
}

fn apply(
    machine: &dyn StateMachine,
    all: &[Operation<'_>],
    mode: Mode,
) -> Result<Vec<Reply>, ApplyError> {
    let (payload, index) = (operations(all), machine.applied(0).0 + 1);
    if mode == Mode::Blocking {
        return Ok(apply_all(machine, &[entry(index, &payload)]).0.remove(0));
    }
    let mut applied = machine.apply(0, &[entry(index, &payload)], mode)?;
    Ok(applied.replies.remove(0))
}

fn set_up(machine: &dyn StateMachine, pairs: &[(&[u8], &[u8])]) {
    for (key, value) in pairs {
        apply(machine, &[set(key, value)], Mode::Blocking).unwrap();
    }
}

fn values(reply: &Reply) -> Vec<usize> {
    let Reply::Array(parts) = reply else {
        panic!("{reply:?}");
    };
    let length = |part: &Reply| match part {
        Reply::Bytes(bytes) => bytes.len(),
        other => panic!("{other:?}"),
    };
    parts.iter().map(length).collect()
}

fn would_block<T: std::fmt::Debug>(result: Result<T, ApplyError>) -> bool {
    matches!(result, Err(ApplyError::WouldBlock))
}

#[test]
fn a_loop_reads_little() {
    let place = tempfile::tempdir().unwrap();
    for machine in engines(place.path()) {
        let machine = &*machine;
        set_up(
            machine,
            &[(b"big", &vec![1; 200 << 10]), (b"small", b"value")],
        );
        let ask = |keys: Vec<&[u8]>, mode| machine.query(&Query::MultiGet { keys }, mode);
        let few = ask(vec![b"small", b"big"], Mode::NonBlocking).unwrap();
        assert_eq!(values(&few), [5, 200 << 10]);
        let two: Vec<&[u8]> = vec![b"big", b"big"];
        assert!(would_block(ask(two.clone(), Mode::NonBlocking)));
        assert_eq!(values(&ask(two, Mode::Blocking).unwrap()), [200 << 10; 2]);
        // Looking up takes time, whatever is found.
        let many: Vec<&[u8]> = vec![b"none"; 1000];
        assert!(would_block(ask(many.clone(), Mode::NonBlocking)));
        let found = ask(many, Mode::Blocking).unwrap();
        assert_eq!(found, Reply::Array(vec![Reply::Nil; 1000]));
    }
}

/// Neither does it write much: a command over very many keys is for a worker, be they there or not.
#[test]
fn a_loop_changes_few_keys() {
    let place = tempfile::tempdir().unwrap();
    for machine in engines(place.path()) {
        let keys: Vec<[u8; 4]> = (0..40_000u32).map(u32::to_le_bytes).collect();
        let absent = Operation::Del {
            keys: keys.iter().map(|key| &key[..]).collect(),
        };
        let sets: Vec<Operation<'_>> = keys.iter().map(|key| set(key, b"v")).collect();
        let batch = Operation::Batch {
            expectations: Vec::new(),
            operations: sets,
        };
        for (index, many) in (1..).zip([absent, batch]) {
            let payload = operations(&[many]);
            let entries = [entry(index, &payload)];
            assert!(matches!(
                machine.apply(0, &entries, Mode::NonBlocking),
                Err(ApplyError::WouldBlock)
            ));
            machine.apply(0, &entries, Mode::Blocking).unwrap();
        }
        let count = machine.query(&Query::DbSize, Mode::Blocking).unwrap();
        assert_eq!(count, Reply::Int(40_000));
    }
}

/// What is read lies in the tables of changes, in the database, and in both.
#[cfg(feature = "rocksdb")]
#[test]
fn workers_read_the_same_at_every_stage() {
    let place = tempfile::tempdir().unwrap();
    let machine = engines(place.path()).pop().unwrap();
    let keys: Vec<[u8; 1]> = (0..24).map(|number| [number]).collect();
    let value = |number: u8, round: u8| vec![round; 200_000 + usize::from(number)];
    for round in 0..3u8 {
        for key in &keys {
            // Some are older than others.
            if key[0] % 3 >= round {
                set_up(&*machine, &[(key, &value(key[0], round))]);
            }
        }
        if round == 0 {
            machine.flush().unwrap();
        }
        let all = keys.iter().map(|key| &key[..]).collect();
        let found = machine.query(&Query::MultiGet { keys: all }, Mode::Blocking);
        let newest = |key: &[u8; 1]| Reply::Bytes(value(key[0], round.min(key[0] % 3)));
        assert!(found.unwrap() == Reply::Array(keys.iter().map(newest).collect()));
    }
}

#[test]
fn a_reply_is_bounded() {
    let place = tempfile::tempdir().unwrap();
    for machine in engines(place.path()) {
        let machine = &*machine;
        set_up(
            machine,
            &[(b"big", &vec![1; MIB]), (b"huge", &vec![2; 70 * MIB])],
        );
        let ask = |query: &Query<'_>| machine.query(query, Mode::Blocking).unwrap();
        let many = |count| vec![&b"big"[..]; count];
        let found = ask(&Query::MultiGet { keys: many(63) });
        assert_eq!(values(&found), [MIB; 63]);
        assert_eq!(ask(&Query::MultiGet { keys: many(64) }), TOO_LONG);
        assert_eq!(
            ask(&Query::MultiGet {
                keys: many(100_000)
            }),
            TOO_LONG
        );
        // What does not show values has room for all of them.
        assert_eq!(ask(&Query::Exists { keys: many(1000) }), Reply::Int(1000));
        // A value that was taken in can be read.
        let keys = vec![&b"huge"[..]];
        assert_eq!(values(&ask(&Query::MultiGet { keys })), [70 * MIB]);
        assert!(matches!(ask(&Query::Get { key: b"huge" }), Reply::Bytes(_)));
    }
}

#[test]
fn keys_are_bounded_and_pages_of_long_keys_are_short() {
    let place = tempfile::tempdir().unwrap();
    for machine in engines(place.path()) {
        let key = |number: u32| [&number.to_be_bytes()[..], &vec![b'x'; 64 << 10]].concat();
        let keys: Vec<Vec<u8>> = (0..1024).map(key).collect();
        for some in keys.chunks(64) {
            let all: Vec<Operation<'_>> = some.iter().map(|key| set(key, b"")).collect();
            apply(&*machine, &all, Mode::Blocking).unwrap();
        }
        let ask = |query: &Query<'_>| machine.query(query, Mode::Blocking).unwrap();
        assert_eq!(ask(&Query::Keys { pattern: b"*" }), TOO_LONG);
        assert_eq!(
            ask(&Query::Keys { pattern: b"none*" }),
            Reply::Array(vec![])
        );
        let (mut cursor, mut seen, mut pages) = (0, 0, 0);
        loop {
            let page = ask(&Query::Scan {
                cursor,
                pattern: None,
                count: 100_000,
                held: false,
            });
            let Reply::Array(parts) = page else {
                panic!("{page:?}");
            };
            let [Reply::Bytes(next), found] = &parts[..] else {
                panic!("{parts:?}");
            };
            let lengths = values(found);
            assert!(lengths.iter().sum::<usize>() < 2 * MIB);
            (seen, pages) = (seen + lengths.len(), pages + 1);
            cursor = std::str::from_utf8(next).unwrap().parse().unwrap();
            if cursor == 0 {
                break;
            }
        }
        assert_eq!(seen, keys.len());
        assert!(pages > 30, "{pages} pages");
    }
}

/// Two blocks that do the same to a CRC32C, whatever stands before and behind them.
fn twins() -> [[u8; 8]; 2] {
    let mut known = HashMap::new();
    for number in 0u64.. {
        let block = number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
        let sum = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, &block);
        if let Some(other) = known.insert(sum, block) {
            return [other, block];
        }
    }
    unreachable!("there are more blocks than sums")
}

/// A page ends between places, and any client can give as many keys as they like the same one.
#[test]
fn pages_of_keys_with_one_place_are_bounded() {
    let sum = |key: &[u8]| crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, key);
    let long = |head: &[u8]| {
        let mut key = [b"{slot}", head].concat();
        key.resize(64 << 10, b'x');
        key
    };
    let twins = twins();
    let key = |number: u32| {
        let blocks = (0..11).map(|bit| twins[(number >> bit & 1) as usize]);
        long(blocks.collect::<Vec<_>>().as_flattened())
    };
    let keys: Vec<Vec<u8>> = (0..1100).map(key).collect();
    let other = (0u32..).map(|number| long(&number.to_le_bytes()));
    let others = other.filter(|key| sum(key) < sum(&keys[0])).take(15);
    let others: Vec<Vec<u8>> = others.collect();
    let place = tempfile::tempdir().unwrap();
    for machine in engines(place.path()) {
        let add = |keys: &[Vec<u8>]| {
            for some in keys.chunks(64) {
                let all: Vec<Operation<'_>> = some.iter().map(|key| set(key, b"")).collect();
                apply(&*machine, &all, Mode::Blocking).unwrap();
            }
        };
        let ask = |cursor, pattern, held| {
            let query = Query::Scan {
                cursor,
                pattern,
                count: 10_000,
                held,
            };
            machine.query(&query, Mode::Blocking).unwrap()
        };
        let page = |cursor, pattern, held| match ask(cursor, pattern, held) {
            Reply::Array(mut parts) => {
                let found = values(&parts.remove(1));
                let Reply::Bytes(next) = &parts[0] else {
                    panic!("{parts:?}");
                };
                (std::str::from_utf8(next).unwrap().parse().unwrap(), found)
            }
            other => panic!("{other:?}"),
        };
        add(&others);
        add(&keys[..1015]);
        for held in [false, true] {
            // Together they do not fit, the places one by one do.
            let (next, found) = page(0, None, held);
            assert_eq!(found, [64 << 10; 15]);
            assert_eq!(page(next, None, held), (0, vec![64 << 10; 1015]));
        }
        add(&keys[1015..]);
        let one: Vec<u8> = keys[7].iter().flat_map(|byte| [b'\\', *byte]).collect();
        for held in [false, true] {
            let (next, found) = page(0, None, held);
            assert_eq!(found.len(), 15);
            assert!(ask(next, None, held) == TOO_LONG);
            assert_eq!(page(0, Some(&one), held), (0, vec![64 << 10]));
        }
    }
}

fn get(key: &[u8]) -> Operation<'_> {
    Operation::Read(Query::Get { key })
}

fn batch(operations: Vec<Operation<'_>>) -> Operation<'_> {
    Operation::Batch {
        expectations: Vec::new(),
        operations,
    }
}

/// A transaction has happened when it is found out how much it reads: its writes count, and what
/// does not fit is answered with an error.
#[test]
fn a_transaction_that_reads_much_is_executed_by_a_worker_and_bounded() {
    let place = tempfile::tempdir().unwrap();
    let mut told = Vec::new();
    for machine in engines(place.path()) {
        let machine = &*machine;
        set_up(machine, &[(b"big", &vec![1; MIB])]);
        let mut all = vec![get(b"big"); 20];
        all.push(set(b"done", b"yes"));
        all.push(get(b"none"));
        let all = [batch(all), get(b"big")];
        let before = machine.applied(0);
        for _ in 0..3 {
            assert!(would_block(apply(machine, &all, Mode::NonBlocking)));
        }
        assert_eq!(machine.applied(0), before);
        let replies = apply(machine, &all, Mode::Blocking).unwrap();
        let Reply::Array(parts) = &replies[0] else {
            panic!("{replies:?}");
        };
        assert_eq!(values(&Reply::Array(parts[..15].to_vec())), [MIB; 15]);
        assert_eq!(parts[15..20], [TOO_LONG; 5]);
        assert_eq!(parts[20..], [Reply::Ok, Reply::Nil]);
        // The next command has a separate budget.
        assert!(matches!(&replies[1], Reply::Bytes(_)));
        let done = machine.query(&Query::Get { key: b"done" }, Mode::NonBlocking);
        assert_eq!(done.unwrap(), Reply::Bytes(b"yes".to_vec()));
        // Afterwards the loop goes on without a worker.
        assert!(apply(machine, &[get(b"big")], Mode::NonBlocking).is_ok());
        told.push(replies);
    }
    assert!(told.windows(2).all(|pair| pair[0] == pair[1]));
}

#[test]
fn writes_whose_old_value_does_not_fit_change_nothing() {
    let place = tempfile::tempdir().unwrap();
    for machine in engines(place.path()) {
        let machine = &*machine;
        set_up(
            machine,
            &[(b"big", &vec![1; MIB]), (b"other", &vec![2; MIB])],
        );
        let mut all = vec![get(b"big"); 15];
        let key = &b"other"[..];
        all.push(Operation::GetDel { key });
        all.push(Operation::Set {
            key,
            value: b"new",
            condition: Condition::Always,
            get: true,
        });
        all.push(Operation::GetExpire {
            key,
            expiry: Expiry::At(u64::MAX / 2),
        });
        all.push(Operation::Read(Query::MultiGet {
            keys: vec![b"none", key],
        }));
        all.push(Operation::Read(Query::Exists { keys: vec![key] }));
        all.push(Operation::Read(Query::Ttl {
            key,
            millis: true,
            absolute: true,
        }));
        all.push(Operation::Read(Query::StrLen { key }));
        let replies = apply(machine, &[batch(all)], Mode::Blocking).unwrap();
        let Reply::Array(parts) = &replies[0] else {
            panic!("{replies:?}");
        };
        assert_eq!(parts[15..19], [TOO_LONG; 4]);
        let (there, persistent, long) = (Reply::Int(1), Reply::Int(-1), Reply::Int(MIB as i64));
        assert_eq!(parts[19..], [there, persistent, long]);
    }
}

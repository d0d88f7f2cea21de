//! Keys that expire: by the stamps of the log, alike on every replica, whatever the clocks say; and
//! stores of the first format.

mod support;

use std::collections::BTreeMap;

use cyclone_store::{ApplyError, EntryInput, Mode, StateMachine};
use cyclone_wire::batch::Writer;
use cyclone_wire::command::{Condition, ExpireIf, Expiry, Operation, Query};
use cyclone_wire::reply::Reply;
use proptest::collection::vec;
use proptest::prelude::*;
use support::{ENGINES, command, crash_copy, set};

fn stamped(operations: &[Operation<'_>], stamp_ms: u64) -> Vec<u8> {
    let mut writer = Writer::new();
    for operation in operations {
        let bytes = command(None, operation.clone());
        writer.push(|out| out.extend_from_slice(&bytes));
    }
    writer.finish(stamp_ms)
}

fn apply(
    machine: &dyn StateMachine,
    index: u64,
    stamp_ms: u64,
    operations: &[Operation<'_>],
) -> Vec<Reply> {
    let payload = stamped(operations, stamp_ms);
    let entry = EntryInput {
        index,
        term: 1,
        payload: &payload,
        wants_replies: true,
    };
    support::apply_all(machine, &[entry]).0.remove(0)
}

fn set_for<'a>(key: &'a [u8], value: &'a [u8], expiry: Expiry) -> Operation<'a> {
    Operation::SetExpiring {
        key,
        value,
        condition: Condition::Always,
        get: false,
        expiry,
    }
}

fn ttl(key: &[u8]) -> Query<'_> {
    Query::Ttl {
        key,
        millis: true,
        absolute: false,
    }
}

fn ask(machine: &dyn StateMachine, query: &Query<'_>) -> Reply {
    machine.query(query, Mode::Blocking).unwrap()
}

/// An operator's entry moves the state's clock back, and only that.
#[test]
fn clock_is_set_back_by_its_own_operation_alone() {
    for engine in ENGINES {
        let root = tempfile::tempdir().unwrap();
        let machine = engine.open(root.path(), 1);
        let day_ms = 86_400_000;
        let set_clock = |time_ms| Operation::SetClock { time_ms };
        apply(
            &*machine,
            1,
            day_ms,
            &[set_for(b"ahead", b"v", Expiry::After(1_000))],
        );
        apply(&*machine, 2, 5_000, &[Operation::Noop]);
        assert_eq!(machine.clock_ms(0), day_ms);
        let replies = apply(
            &*machine,
            3,
            6_000,
            &[set_clock(6_000), set_for(b"k", b"v", Expiry::After(1_000))],
        );
        assert_eq!(replies, [Reply::Ok, Reply::Ok]);
        assert_eq!(machine.clock_ms(0), 6_000);
        // Deadlines stay what they are.
        assert_eq!(
            ask(&*machine, &ttl(b"ahead")),
            Reply::Int(day_ms as i64 - 5_000)
        );
        assert_eq!(ask(&*machine, &ttl(b"k")), Reply::Int(1_000));
        assert_eq!(machine.next_deadline(0), Some(7_000));
        let swept = apply(&*machine, 4, 7_000, &[Operation::Sweep { limit: 256 }]);
        assert_eq!(swept, [Reply::Int(1)]);
        assert_eq!(ask(&*machine, &ttl(b"k")), Reply::Int(-2));
        // It stays set after a restart.
        machine.flush().unwrap();
        drop(machine);
        let machine = engine.open(root.path(), 1);
        assert_eq!(machine.clock_ms(0), 7_000);
        // Within an operation of a client it is refused.
        let batch = Operation::Batch {
            expectations: vec![],
            operations: vec![set_clock(1)],
        };
        let bytes = command(None, batch);
        assert!(cyclone_wire::command::Command::decode(&bytes).is_err());
    }
}

/// The state's time is the latest stamp: entries make keys expire, a leader whose clock is behind
/// brings none back, and a reader whose clock is ahead is referred to the log.
#[test]
fn keys_expire_by_the_log() {
    for engine in ENGINES {
        let root = tempfile::tempdir().unwrap();
        let machine = engine.open(root.path(), 1);
        let key = &b"k"[..];
        apply(
            &*machine,
            1,
            1000,
            &[set_for(key, b"v", Expiry::After(500))],
        );
        assert_eq!(ask(&*machine, &ttl(key)), Reply::Int(500));
        assert_eq!(
            machine.query_at(&ttl(key), 1499, Mode::Blocking).unwrap(),
            Reply::Int(1)
        );
        for query in [
            Query::Get { key },
            Query::DbSize,
            Query::Exists {
                keys: vec![b"x", key],
            },
        ] {
            assert!(matches!(
                machine.query_at(&query, 1500, Mode::Blocking),
                Err(ApplyError::ClockBehind)
            ));
        }
        apply(&*machine, 2, 1499, &[Operation::Noop]);
        assert_eq!(
            ask(&*machine, &Query::Get { key }),
            Reply::Bytes(b"v".to_vec())
        );
        apply(&*machine, 3, 1500, &[Operation::Noop]);
        let gone = |machine: &dyn StateMachine| {
            assert_eq!(ask(machine, &Query::Get { key }), Reply::Nil);
            assert_eq!(ask(machine, &Query::DbSize), Reply::Int(0));
            assert_eq!(ask(machine, &ttl(key)), Reply::Int(-2));
            assert_eq!(
                machine.query_at(&ttl(key), 9999, Mode::Blocking).unwrap(),
                Reply::Int(-2)
            );
        };
        gone(&*machine);
        // A new leader's clock is behind.
        let replies = apply(
            &*machine,
            4,
            900,
            &[
                Operation::Read(Query::Get { key }),
                Operation::Append {
                    key: b"n",
                    value: b"new",
                },
                set_for(b"m", b"", Expiry::After(100)),
            ],
        );
        assert_eq!(replies[0], Reply::Nil);
        assert_eq!(ask(&*machine, &ttl(b"m")), Reply::Int(100), "from 1500 on");
        apply(&*machine, 5, 1600, &[Operation::Noop]);
        assert_eq!(ask(&*machine, &Query::DbSize), Reply::Int(1));
        machine.flush().unwrap();
        drop(machine);
        // The clock is part of the state.
        let machine = engine.open(root.path(), 1);
        assert_eq!(ask(&*machine, &Query::Get { key }), Reply::Nil);
        assert_eq!(machine.next_deadline(0), Some(1500));
        let swept = apply(&*machine, 6, 0, &[Operation::Sweep { limit: 10 }]);
        assert_eq!(swept, [Reply::Int(2)]);
        assert_eq!(machine.next_deadline(0), None);
    }
}

/// A key that was set again, or whose deadline was moved, is not what an old record of the index
/// says it is.
#[test]
fn sweeps_remove_only_what_has_expired() {
    for engine in ENGINES {
        let root = tempfile::tempdir().unwrap();
        let machine = engine.open(root.path(), 1);
        let names: Vec<Vec<u8>> = (0..50).map(|n| format!("{n}").into_bytes()).collect();
        let all: Vec<Operation<'_>> = names
            .iter()
            .map(|name| set_for(name, b"v", Expiry::At(1000)))
            .collect();
        apply(&*machine, 1, 10, &all);
        apply(
            &*machine,
            2,
            20,
            &[
                set(&names[0], b"forever"),
                set_for(&names[1], b"longer", Expiry::At(2000)),
                Operation::Expire {
                    key: &names[2],
                    expiry: Expiry::Never,
                    condition: ExpireIf::Always,
                },
                Operation::Del {
                    keys: vec![&names[3]],
                },
                set_for(&names[4], b"kept", Expiry::Keep),
            ],
        );
        assert_eq!(machine.next_deadline(0), Some(1000));
        assert_eq!(
            apply(&*machine, 3, 999, &[Operation::Sweep { limit: 10 }]),
            [Reply::Int(0)]
        );
        let (mut removed, mut index) = (0, 3);
        while machine
            .next_deadline(0)
            .is_some_and(|deadline| deadline <= 1500)
        {
            index += 1;
            match apply(&*machine, index, 1500, &[Operation::Sweep { limit: 7 }])[..] {
                [Reply::Int(count)] => removed += count,
                ref other => panic!("{other:?}"),
            }
        }
        // The blind write has left its own behind.
        assert_eq!((removed, index), (46, 3 + 47u64.div_ceil(7)));
        assert_eq!(machine.next_deadline(0), Some(2000));
        assert_eq!(ask(&*machine, &Query::DbSize), Reply::Int(3));
        apply(&*machine, index + 1, 1500, &[Operation::FlushAll]);
        assert_eq!(machine.next_deadline(0), None);
    }
}

/// Keys whose lives are prolonged again and again, ahead of any sweep, leave nothing behind.
#[test]
fn a_changed_deadline_leaves_no_record() {
    for engine in ENGINES {
        let root = tempfile::tempdir().unwrap();
        let machine = engine.open(root.path(), 1);
        let bare = support::records(&*machine);
        apply(&*machine, 1, 10, &[set_for(b"k", b"0", Expiry::At(5000))]);
        let with_one = support::records(&*machine);
        assert!(with_one > bare + 1, "a value and its deadline");
        for round in 0..30 {
            let get_expire = Operation::GetExpire {
                key: b"k",
                expiry: Expiry::At(6000 + round),
            };
            let expire = Operation::Expire {
                key: b"k",
                expiry: Expiry::At(7000 + round),
                condition: ExpireIf::Later,
            };
            let again = Operation::SetExpiring {
                key: b"k",
                value: b"0",
                condition: [Condition::Present, Condition::Always][round as usize % 2],
                get: false,
                expiry: Expiry::At(5000 + round % 3),
            };
            let kept = support::incr(b"k");
            apply(&*machine, 2 + 2 * round, 10, &[get_expire, expire]);
            apply(&*machine, 3 + 2 * round, 10, &[again, kept]);
            assert_eq!(support::records(&*machine), with_one, "round {round}");
        }
        let del = Operation::Del { keys: vec![b"k"] };
        apply(
            &*machine,
            62,
            10,
            &[set_for(b"l", b"", Expiry::At(900)), del],
        );
        assert_eq!(support::records(&*machine), with_one);
        let swept = apply(&*machine, 63, 901, &[Operation::Sweep { limit: 10 }]);
        assert_eq!(swept, [Reply::Int(1)], "its record is still found");
        assert_eq!(machine.next_deadline(0), None);
        assert_eq!(support::records(&*machine), with_one - 2);
    }
}

/// Many deadlines that were changed before they came are passed over a part at a time, and what
/// lies behind them is still found.
#[test]
fn a_sweep_does_not_pass_over_everything_that_is_gone() {
    for engine in ENGINES {
        let root = tempfile::tempdir().unwrap();
        let machine = engine.open(root.path(), 1);
        apply(
            &*machine,
            1,
            10,
            &[set_for(b"first", b"", Expiry::At(1000))],
        );
        let names: Vec<Vec<u8>> = (0..12_000u32).map(|n| n.to_be_bytes().to_vec()).collect();
        let mut index = 1;
        for deadline in [2_000, 20_000] {
            for some in names.chunks(3_000) {
                index += 1;
                let all: Vec<Operation<'_>> = some
                    .iter()
                    .map(|key| Operation::SetExpiring {
                        key,
                        value: b"",
                        condition: Condition::Always,
                        get: true,
                        expiry: Expiry::At(deadline + u64::from(key[3])),
                    })
                    .collect();
                apply(&*machine, index, 10, &all);
                machine.flush().unwrap();
            }
        }
        let (mut now_ms, mut sweeps) = (1_000, 0);
        while now_ms < 20_000 {
            index += 1;
            sweeps += 1;
            let swept = apply(&*machine, index, now_ms, &[Operation::Sweep { limit: 256 }]);
            assert_eq!(swept, [Reply::Int(i64::from(now_ms == 1_000))]);
            let next_ms = machine.next_deadline(0).expect("the rest are there");
            assert!(
                next_ms > now_ms && next_ms <= 20_000,
                "{next_ms} after {now_ms}"
            );
            now_ms = next_ms;
        }
        assert!(sweeps < 25, "{sweeps} sweeps");
        let mut removed = 0;
        while machine.next_deadline(0).is_some() {
            index += 1;
            match apply(
                &*machine,
                index,
                30_000,
                &[Operation::Sweep { limit: 4096 }],
            )[..]
            {
                [Reply::Int(count)] => removed += count,
                ref other => panic!("{other:?}"),
            }
        }
        assert_eq!(removed, 12_000);
        assert_eq!(ask(&*machine, &Query::DbSize), Reply::Int(0));
    }
}

#[derive(Clone, Debug)]
enum Op {
    Set(u8),
    SetFor(u8, Expiry, Condition),
    Expire(u8, Expiry, ExpireIf),
    GetExpire(u8, Expiry),
    Append(u8),
    Del(u8),
    Get(u8),
    Ttl(u8),
    Sweep(u32),
    Batch(Vec<Op>),
}

const KEYS: [&[u8]; 4] = [b"a", b"b", b"c{a}", b""];

impl Op {
    fn operation(&self) -> Operation<'_> {
        let key = |number: &u8| KEYS[usize::from(*number) % KEYS.len()];
        match self {
            Op::Set(k) => set(key(k), b"v"),
            Op::SetFor(k, expiry, condition) => Operation::SetExpiring {
                key: key(k),
                value: b"w",
                condition: *condition,
                get: true,
                expiry: *expiry,
            },
            Op::Expire(k, expiry, condition) => Operation::Expire {
                key: key(k),
                expiry: *expiry,
                condition: *condition,
            },
            Op::GetExpire(k, expiry) => Operation::GetExpire {
                key: key(k),
                expiry: *expiry,
            },
            Op::Append(k) => Operation::Append {
                key: key(k),
                value: b"+",
            },
            Op::Del(k) => Operation::Del { keys: vec![key(k)] },
            Op::Get(k) => Operation::Read(Query::Get { key: key(k) }),
            Op::Ttl(k) => Operation::Read(ttl(key(k))),
            Op::Sweep(limit) => Operation::Sweep { limit: *limit },
            Op::Batch(all) => Operation::Batch {
                expectations: Vec::new(),
                operations: all.iter().map(Op::operation).collect(),
            },
        }
    }

    /// The same on the model: values with their deadlines, at the time `now`.
    fn on(&self, model: &mut BTreeMap<u8, (Vec<u8>, Option<u64>)>, now: u64) -> Reply {
        model.retain(|_, (_, deadline)| deadline.is_none_or(|deadline| deadline > now));
        let when = |expiry: Expiry, old: Option<u64>| match expiry {
            Expiry::Keep => old,
            Expiry::At(ms) => Some(ms),
            Expiry::After(ms) => Some(now.saturating_add(ms)),
            Expiry::Never => None,
        };
        let answer = |item: Option<&(Vec<u8>, Option<u64>)>| {
            item.map_or(Reply::Nil, |(value, _)| Reply::Bytes(value.clone()))
        };
        let reply = match self {
            Op::Set(k) => {
                model.insert(k % 4, (b"v".to_vec(), None));
                Reply::Ok
            }
            Op::SetFor(k, expiry, condition) => {
                let old = model.get(&(k % 4)).cloned();
                let met = match condition {
                    Condition::Always => true,
                    Condition::Absent => old.is_none(),
                    Condition::Present => old.is_some(),
                };
                if met {
                    let deadline = when(*expiry, old.as_ref().and_then(|old| old.1));
                    model.insert(k % 4, (b"w".to_vec(), deadline));
                }
                answer(old.as_ref())
            }
            Op::Expire(k, expiry, condition) => match model.get_mut(&(k % 4)) {
                None => Reply::Int(0),
                Some((_, deadline)) => {
                    // A key without deadline expires at the end of time.
                    let (old, new) = (deadline.unwrap_or(u64::MAX), when(*expiry, *deadline));
                    let has = deadline.is_some();
                    let later = new.unwrap_or(u64::MAX);
                    let met = match (expiry, condition) {
                        (Expiry::Keep, _) => false,
                        (Expiry::Never, _) => has,
                        (_, ExpireIf::Always) => true,
                        (_, ExpireIf::None) => !has,
                        (_, ExpireIf::Some) => has,
                        (_, ExpireIf::Later) => later > old,
                        (_, ExpireIf::Earlier) => later < old,
                        (_, ExpireIf::EarlierThanSome) => has && later < old,
                    };
                    if met {
                        *deadline = new;
                    }
                    Reply::Int(i64::from(met))
                }
            },
            Op::GetExpire(k, expiry) => {
                let reply = answer(model.get(&(k % 4)));
                if let Some((_, deadline)) = model.get_mut(&(k % 4)) {
                    *deadline = when(*expiry, *deadline);
                }
                reply
            }
            Op::Append(k) => {
                let (value, _) = model.entry(k % 4).or_default();
                // Longer values than the engines take are not this test's concern.
                if value.len() < support::MAX_VALUE_BYTES {
                    value.push(b'+');
                    Reply::Int(value.len() as i64)
                } else {
                    Reply::Failed(cyclone_wire::reply::Failure::TooLong)
                }
            }
            Op::Del(k) => Reply::Int(i64::from(model.remove(&(k % 4)).is_some())),
            Op::Get(k) => answer(model.get(&(k % 4))),
            Op::Ttl(k) => Reply::Int(match model.get(&(k % 4)) {
                None => -2,
                Some((_, None)) => -1,
                Some((_, Some(deadline))) => (*deadline - now) as i64,
            }),
            // How many a sweep removes depends on earlier ones; that it removes nothing visible is
            // seen by the rest.
            Op::Sweep(_) => Reply::Nil,
            Op::Batch(all) => Reply::Array(all.iter().map(|op| op.on(model, now)).collect()),
        };
        model.retain(|_, (_, deadline)| deadline.is_none_or(|deadline| deadline > now));
        reply
    }
}

fn op() -> impl Strategy<Value = Op> {
    let expiry = || {
        prop_oneof![
            Just(Expiry::Keep),
            Just(Expiry::Never),
            (0..400u64).prop_map(Expiry::At),
            (0..80u64).prop_map(Expiry::After),
        ]
    };
    let condition = prop_oneof![
        Just(Condition::Always),
        Just(Condition::Absent),
        Just(Condition::Present)
    ];
    let expire_if = prop_oneof![
        Just(ExpireIf::Always),
        Just(ExpireIf::None),
        Just(ExpireIf::Some),
        Just(ExpireIf::Later),
        Just(ExpireIf::Earlier),
        Just(ExpireIf::EarlierThanSome)
    ];
    let simple = prop_oneof![
        2 => any::<u8>().prop_map(Op::Set),
        4 => (any::<u8>(), expiry(), condition).prop_map(|(k, e, c)| Op::SetFor(k, e, c)),
        5 => (any::<u8>(), expiry(), expire_if).prop_map(|(k, e, c)| Op::Expire(k, e, c)),
        2 => (any::<u8>(), expiry()).prop_map(|(k, e)| Op::GetExpire(k, e)),
        2 => any::<u8>().prop_map(Op::Append),
        1 => any::<u8>().prop_map(Op::Del),
        3 => any::<u8>().prop_map(Op::Get),
        3 => any::<u8>().prop_map(Op::Ttl),
    ];
    prop_oneof![
        8 => simple.clone(),
        1 => vec(simple, 0..5).prop_map(Op::Batch),
        2 => (0..5u32).prop_map(Op::Sweep),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases.div_ceil(5), failure_persistence: None, ..ProptestConfig::default() })]

    /// Random commands at random stamps, in random calls, with crashes: the model's replies, and
    /// one state on all engines.
    #[test]
    fn engines_expire_as_the_model_does(
        log in vec((0..400u64, vec(op(), 0..6)), 1..30),
        calls in vec((1..5usize, any::<bool>()), 1..8),
    ) {
        let (mut model, mut clock, mut index) = (BTreeMap::new(), 0, 0);
        let mut expected = Vec::new();
        let mut payloads = Vec::new();
        for (stamp, ops) in &log {
            clock = clock.max(*stamp);
            index += 1;
            expected.push(ops.iter().map(|op| op.on(&mut model, clock)).collect::<Vec<_>>());
            // An entry without operations moves the clock too.
            model.retain(|_, (_, deadline): &mut (_, Option<u64>)| deadline.is_none_or(|deadline| deadline > clock));
            let operations: Vec<_> = ops.iter().map(Op::operation).collect();
            payloads.push(stamped(&operations, *stamp));
        }
        prop_assert_eq!(index, payloads.len());
        let mut digests = Vec::new();
        for engine in ENGINES {
            for calls in [&calls[..], &[(1, false)]] {
                let root = tempfile::tempdir().unwrap();
                let (mut life, mut directory) = (0, root.path().join("0"));
                let mut machine = engine.open(&directory, 1);
                let mut calls = calls.iter().cycle();
                let mut crashes = 0;
                while machine.applied(0).0 < payloads.len() as u64 {
                    let (size, crash) = *calls.next().unwrap();
                    let from = machine.applied(0).0;
                    let entries: Vec<EntryInput<'_>> = (from + 1..)
                        .zip(&payloads[from as usize..])
                        .take(size)
                        .map(|(index, payload)| EntryInput { index, term: 1, payload, wants_replies: true })
                        .collect();
                    let answers = machine
                        .apply(0, &entries, Mode::NonBlocking)
                        .or_else(|_| machine.apply(0, &entries, Mode::Blocking))
                        .unwrap();
                    for (entry, answers) in entries.iter().zip(answers.replies) {
                        for ((op, answer), expected) in log[entry.index as usize - 1].1.iter()
                            .zip(answers).zip(&expected[entry.index as usize - 1])
                        {
                            if !matches!(op, Op::Sweep(_)) {
                                prop_assert_eq!(&answer, expected, "{:?} {:?}", engine, op);
                            }
                        }
                    }
                    crashes += 1;
                    if crash && crashes < 10 {
                        life += 1;
                        let left = root.path().join(life.to_string());
                        if life % 2 == 0 {
                            machine.flush().unwrap();
                        }
                        crash_copy(&directory, &left);
                        drop(machine);
                        directory = left;
                        machine = engine.open(&directory, 1);
                    }
                }
                digests.push(machine.digest().unwrap());
                let visible = machine.query(&Query::DbSize, Mode::Blocking).unwrap();
                prop_assert_eq!(visible, Reply::Int(model.len() as i64));
            }
        }
        prop_assert!(digests.iter().all(|digest| *digest == digests[0]), "{:?}", digests);
    }
}

/// A file of the memory engine as the first version wrote it: values without heads, applied index
/// without clock.
#[test]
fn a_store_of_the_first_format_is_taken_over() {
    let root = tempfile::tempdir().unwrap();
    std::fs::write(
        root.path().join("memory.kv"),
        include_bytes!("first-format/memory.kv"),
    )
    .unwrap();
    let open = || support::Engine::Memory.open(root.path(), 1);
    let machine = open();
    assert_eq!(machine.applied(0), (3, 1));
    for n in 0..5 {
        let key = format!("old {n}").into_bytes();
        let value = machine
            .query(&Query::Get { key: &key }, Mode::Blocking)
            .unwrap();
        assert_eq!(value, Reply::Bytes(format!("value {n}").into_bytes()));
        assert_eq!(ask(&*machine, &ttl(&key)), Reply::Int(-1));
    }
    assert_eq!(ask(&*machine, &Query::DbSize), Reply::Int(5));
    let digest = machine.digest().unwrap();
    machine.flush().unwrap();
    drop(machine);
    let machine = open();
    assert_eq!(machine.digest().unwrap(), digest);
    apply(
        &*machine,
        4,
        50,
        &[Operation::Append {
            key: b"old 1",
            value: b"!",
        }],
    );
    assert_eq!(
        ask(&*machine, &Query::Get { key: b"old 1" }),
        Reply::Bytes(b"value 1!".to_vec())
    );
}

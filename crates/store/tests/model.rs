//! Every engine against a BTreeMap: random commands in random entries, in random calls, with
//! crashes in between. What the log promises must come out: the same replies as the model, and the
//! same state however it was reached.

mod support;

use std::collections::BTreeMap;

use cyclone_store::{EntryInput, Mode, StateMachine};
use cyclone_wire::command::{Condition, Operation, Query};
use cyclone_wire::reply::{Failure, Reply};
use proptest::collection::vec;
use proptest::prelude::*;
use support::{ENGINES, MAX_VALUE_BYTES, command, crash_copy, operations, tag};

#[derive(Clone, Debug)]
enum Op {
    Set(u8, Vec<u8>, Condition, bool),
    GetDel(u8),
    Del(Vec<u8>),
    Append(u8, Vec<u8>),
    SetRange(u8, u64, Vec<u8>),
    Incr(u8, i64),
    FlushAll,
    Get(u8),
    Exists(Vec<u8>),
    GetRange(u8, i64, i64),
}

/// Some with hash tags, one empty, one binary.
const KEYS: [&[u8]; 6] = [b"a", b"b{x}", b"{x}c", b"", b"\xff\x00\xff", b"key:5"];

fn key(number: u8) -> &'static [u8] {
    KEYS[usize::from(number) % KEYS.len()]
}

impl Op {
    fn operation(&self) -> Operation<'_> {
        let keys = |numbers: &[u8]| numbers.iter().map(|number| key(*number)).collect();
        match self {
            Op::Set(k, value, condition, get) => Operation::Set {
                key: key(*k),
                value,
                condition: *condition,
                get: *get,
            },
            Op::GetDel(k) => Operation::GetDel { key: key(*k) },
            Op::Del(k) => Operation::Del { keys: keys(k) },
            Op::Append(k, value) => Operation::Append {
                key: key(*k),
                value,
            },
            Op::SetRange(k, offset, value) => Operation::SetRange {
                key: key(*k),
                offset: *offset,
                value,
            },
            Op::Incr(k, delta) => Operation::IncrBy {
                key: key(*k),
                delta: *delta,
            },
            Op::FlushAll => Operation::FlushAll,
            Op::Get(k) => Operation::Read(Query::Get { key: key(*k) }),
            Op::Exists(k) => Operation::Read(Query::Exists { keys: keys(k) }),
            Op::GetRange(k, start, end) => Operation::Read(Query::GetRange {
                key: key(*k),
                start: *start,
                end: *end,
            }),
        }
    }

    /// The same command, on the model, written anew from Redis's documentation.
    fn on(&self, model: &mut BTreeMap<Vec<u8>, Vec<u8>>) -> Reply {
        let answer = |value: Option<Vec<u8>>| value.map_or(Reply::Nil, Reply::Bytes);
        match self {
            Op::Set(k, value, condition, get) => {
                let old = model.get(key(*k)).cloned();
                let met = match condition {
                    Condition::Always => true,
                    Condition::Absent => old.is_none(),
                    Condition::Present => old.is_some(),
                };
                if met {
                    model.insert(key(*k).to_vec(), value.clone());
                }
                match (get, met) {
                    (true, _) => answer(old),
                    (false, true) => Reply::Ok,
                    (false, false) => Reply::Nil,
                }
            }
            Op::GetDel(k) => answer(model.remove(key(*k))),
            Op::Del(keys) => Reply::Int(
                keys.iter()
                    .filter(|k| model.remove(key(**k)).is_some())
                    .count() as i64,
            ),
            Op::Append(k, value) => {
                let len = model.get(key(*k)).map_or(0, Vec::len) + value.len();
                if len > MAX_VALUE_BYTES {
                    return Reply::Failed(Failure::TooLong);
                }
                model
                    .entry(key(*k).to_vec())
                    .or_default()
                    .extend_from_slice(value);
                Reply::Int(len as i64)
            }
            Op::SetRange(k, offset, value) => {
                if value.is_empty() {
                    return Reply::Int(model.get(key(*k)).map_or(0, Vec::len) as i64);
                }
                if offset.saturating_add(value.len() as u64) > MAX_VALUE_BYTES as u64 {
                    return Reply::Failed(Failure::TooLong);
                }
                let stored = model.entry(key(*k).to_vec()).or_default();
                for (at, byte) in (*offset as usize..).zip(value) {
                    while stored.len() <= at {
                        stored.push(0);
                    }
                    stored[at] = *byte;
                }
                Reply::Int(stored.len() as i64)
            }
            Op::Incr(k, delta) => {
                let text = model.get(key(*k)).map_or("0".into(), |text| {
                    String::from_utf8_lossy(text).into_owned()
                });
                // What Redis takes for a number is exactly what it would print.
                let Some(old) = text
                    .parse::<i64>()
                    .ok()
                    .filter(|number| number.to_string() == text)
                else {
                    return Reply::Failed(Failure::NotInteger);
                };
                let Some(new) = old.checked_add(*delta) else {
                    return Reply::Failed(Failure::Overflow);
                };
                model.insert(key(*k).to_vec(), new.to_string().into_bytes());
                Reply::Int(new)
            }
            Op::FlushAll => {
                model.clear();
                Reply::Ok
            }
            Op::Get(k) => answer(model.get(key(*k)).cloned()),
            Op::Exists(keys) => {
                Reply::Int(keys.iter().filter(|k| model.contains_key(key(**k))).count() as i64)
            }
            Op::GetRange(k, start, end) => {
                let value = model.get(key(*k)).cloned().unwrap_or_default();
                let len = value.len() as i64;
                let place = |at: i64| if at < 0 { at.saturating_add(len) } else { at };
                let kept =
                    (0..len).filter(|at| *at >= place(*start).max(0) && *at <= place(*end).max(0));
                // Two negative indexes in the wrong order give nothing, also where clamping would
                // make them meet.
                let crossed = *start < 0 && *end < 0 && start > end;
                Reply::Bytes(if crossed {
                    Vec::new()
                } else {
                    kept.map(|at| value[at as usize]).collect()
                })
            }
        }
    }
}

fn value() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        vec(any::<u8>(), 0..40),
        (-1000i64..1000).prop_map(|number| number.to_string().into_bytes()),
        prop_oneof![
            Just("9223372036854775807"),
            Just("-9223372036854775808"),
            Just("-0"),
            Just("007"),
            Just("+1"),
            Just(" 1"),
            Just("1 "),
            Just("0"),
            Just(""),
            Just("9223372036854775808")
        ]
        .prop_map(|text| text.as_bytes().to_vec()),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    let condition = prop_oneof![
        Just(Condition::Always),
        Just(Condition::Absent),
        Just(Condition::Present)
    ];
    prop_oneof![
        8 => (0..6u8, value(), condition, any::<bool>()).prop_map(|(k, v, c, g)| Op::Set(k, v, c, g)),
        2 => (0..6u8).prop_map(Op::GetDel),
        2 => vec(0..6u8, 1..4).prop_map(Op::Del),
        3 => (0..6u8, vec(any::<u8>(), 0..30)).prop_map(|(k, v)| Op::Append(k, v)),
        3 => (0..6u8, prop_oneof![0..80u64, any::<u64>()], vec(any::<u8>(), 0..10))
            .prop_map(|(k, o, v)| Op::SetRange(k, o, v)),
        5 => (0..6u8, prop_oneof![-3..3i64, any::<i64>()]).prop_map(|(k, d)| Op::Incr(k, d)),
        1 => Just(Op::FlushAll),
        3 => (0..6u8).prop_map(Op::Get),
        2 => vec(0..6u8, 1..4).prop_map(Op::Exists),
        2 => (0..6u8, prop_oneof![-50..50i64, any::<i64>()], prop_oneof![-50..50i64, any::<i64>()])
            .prop_map(|(k, s, e)| Op::GetRange(k, s, e)),
    ]
}

/// What happens after a call.
#[derive(Clone, Copy, Debug)]
enum After {
    Nothing,
    Flush,
    Crash,
    Restart,
}

fn after() -> impl Strategy<Value = After> {
    prop_oneof![6 => Just(After::Nothing), 1 => Just(After::Flush), 1 => Just(After::Crash), 1 => Just(After::Restart)]
}

/// As the replica does: the loop tries, a worker does what would block.
fn apply(machine: &dyn StateMachine, log: u16, entries: &[EntryInput<'_>]) -> Vec<Vec<Reply>> {
    machine
        .apply(log, entries, Mode::NonBlocking)
        .or_else(|_| machine.apply(log, entries, Mode::Blocking))
        .expect("applies")
        .replies
}

fn entries(payloads: &[Vec<u8>], from: u64) -> Vec<EntryInput<'_>> {
    (from + 1..)
        .zip(&payloads[from as usize..])
        .map(|(index, payload)| EntryInput {
            index,
            term: index / 3,
            payload,
            wants_replies: true,
        })
        .collect()
}

/// Applies the log in calls of the given sizes, with the given mishaps; answers the replies per
/// entry and the digest.
fn run(
    engine: support::Engine,
    payloads: &[Vec<u8>],
    calls: &[(usize, After)],
) -> (Vec<Vec<Reply>>, String) {
    let root = tempfile::tempdir().unwrap();
    let (mut life, mut directory) = (0, root.path().join("0"));
    let mut machine = engine.open(&directory, 1);
    let mut replies: Vec<Vec<Reply>> = vec![Vec::new(); payloads.len()];
    let mut calls = calls.iter().cycle();
    let mut mishaps = 0;
    while machine.applied(0).0 < payloads.len() as u64 {
        let (size, after) = *calls.next().unwrap();
        let applied = machine.applied(0).0;
        // One that is applied already is sometimes offered again, as a replay does.
        let from = applied.saturating_sub(size as u64 % 2);
        let offered = entries(payloads, from);
        let offered = &offered[..offered.len().min(size + (applied - from) as usize)];
        for (entry, answers) in offered.iter().zip(apply(&*machine, 0, offered)) {
            if entry.index <= applied {
                assert!(
                    answers.is_empty(),
                    "an entry applied before is not answered again"
                );
                continue;
            }
            let known = &mut replies[entry.index as usize - 1];
            assert!(
                known.is_empty() || *known == answers,
                "a replay answers differently"
            );
            *known = answers;
        }
        assert_eq!(
            machine.applied(0).0,
            applied.max(from + offered.len() as u64)
        );
        mishaps += 1;
        match after {
            After::Flush => {
                machine.flush().unwrap();
                assert_eq!(machine.flushed(0), machine.applied(0).0);
            }
            // Bounded, so that a log of crashes comes to its end.
            After::Crash if mishaps < 40 => {
                let promised = machine.flushed(0);
                life += 1;
                let left = root.path().join(life.to_string());
                crash_copy(&directory, &left);
                drop(machine);
                directory = left;
                machine = engine.open(&directory, 1);
                assert!(machine.applied(0).0 >= promised, "flushed entries are gone");
                assert_eq!(machine.flushed(0), machine.applied(0).0);
            }
            After::Restart if mishaps < 40 => {
                drop(machine);
                machine = engine.open(&directory, 1);
            }
            After::Nothing | After::Crash | After::Restart => {}
        }
    }
    let digest = machine.digest().unwrap();
    (replies, digest)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases.div_ceil(5), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn engines_do_what_the_model_does(
        log in vec(vec(op(), 0..8), 1..25),
        calls in vec((1..6usize, after()), 1..12),
    ) {
        let payloads: Vec<Vec<u8>> =
            log.iter().map(|ops| operations(&ops.iter().map(Op::operation).collect::<Vec<_>>())).collect();
        let mut model = BTreeMap::new();
        let expected: Vec<Vec<Reply>> =
            log.iter().map(|ops| ops.iter().map(|op| op.on(&mut model)).collect()).collect();
        let mut digests = Vec::new();
        for engine in ENGINES {
            for calls in [&calls[..], &[(1, After::Nothing)]] {
                let (replies, digest) = run(*engine, &payloads, calls);
                prop_assert_eq!(&replies, &expected, "{:?}", engine);
                digests.push(digest);
            }
        }
        prop_assert!(digests.iter().all(|digest| *digest == digests[0]), "{:?}", digests);
    }

    /// Retries of sessions: whatever is repeated, in whatever grouping and across crashes, a seq
    /// counts once.
    #[test]
    fn retried_commands_count_once(
        log in vec(vec((0..2usize, 1..12u64, 0..6u64), 1..6), 1..20),
        calls in vec((1..5usize, after()), 1..10),
    ) {
        let open = support::payload(&[command(None, Operation::OpenSession), command(None, Operation::OpenSession)]);
        // Which numbers the sessions get is part of the determinism: learned from one engine,
        // expected of all.
        let sessions: Vec<u64> = {
            let root = tempfile::tempdir().unwrap();
            let machine = ENGINES[0].open(root.path(), 1);
            let replies = apply(&*machine, 0, &[support::entry(1, &open)]);
            replies[0].iter().map(|reply| match reply {
                Reply::Int(session) => *session as u64,
                other => panic!("{other:?}"),
            }).collect()
        };
        prop_assert_ne!(sessions[0], sessions[1]);
        let mut payloads = vec![open];
        let mut executed: BTreeMap<(usize, u64), i64> = BTreeMap::new();
        let mut acked = [0u64; 2];
        let mut counters = [0i64; 2];
        let mut expected = Vec::new();
        for commands in &log {
            let mut bytes = Vec::new();
            let mut replies = Vec::new();
            for (who, seq, acks) in commands {
                let name: &[u8] = [b"n0", b"n1"][*who];
                bytes.push(command(tag(sessions[*who], *seq, *acks), support::incr(name)));
                // A client does not acknowledge what it is asking for.
                acked[*who] = acked[*who].max(*acks.min(seq));
                replies.push(if *seq < acked[*who] {
                    Reply::Failed(Failure::StaleSequence)
                } else {
                    let answer = executed.entry((*who, *seq)).or_insert_with(|| {
                        counters[*who] += 1;
                        counters[*who]
                    });
                    Reply::Int(*answer)
                });
            }
            payloads.push(support::payload(&bytes));
            expected.push(replies);
        }
        let mut digests = Vec::new();
        for engine in ENGINES {
            for calls in [&calls[..], &[(1, After::Nothing)]] {
                let (replies, digest) = run(*engine, &payloads, calls);
                prop_assert_eq!(&replies[1..], &expected[..], "{:?}", engine);
                digests.push(digest);
            }
        }
        prop_assert!(digests.iter().all(|digest| *digest == digests[0]), "{:?}", digests);
    }

    /// Bytes that are no batch, or a batch of bytes that are no commands: answered alike
    /// everywhere, never a panic.
    #[test]
    fn bad_bytes_are_answered(
        log in vec(prop_oneof![
            vec(any::<u8>(), 0..60),
            vec(vec(prop_oneof![Just(0u8), Just(1), 0..12u8, any::<u8>()], 0..40), 0..4).prop_map(|c| support::payload(&c)),
        ], 1..12),
    ) {
        let outcomes: Vec<_> = ENGINES.iter().map(|engine| run(*engine, &log, &[(2, After::Nothing)])).collect();
        prop_assert!(outcomes.iter().all(|outcome| *outcome == outcomes[0]));
    }
}

//! What one command may do, and one call, is bounded; what is too much changes nothing, alike on
//! every replica.

mod support;

use cyclone_store::{KvMachine, Limits, MemoryKv, Mode, StateMachine};
use cyclone_wire::batch::Allowed;
use cyclone_wire::command::{Condition, Expectation, Expected, ExpireIf, Expiry, Operation, Query};
use cyclone_wire::reply::{Failure, Reply};
use cyclone_wire::work;
use support::{ENGINES, allowed, apply_all, command, entry, operations, set, tag};

const VALUE: u32 = 1000;
const WORK: u32 = 32_000;
const LIMITS: Allowed = Allowed {
    value_bytes: VALUE,
    work_bytes: WORK,
};

fn machine() -> KvMachine<MemoryKv> {
    let limits = Limits {
        max_value_bytes: 1 << 20,
        max_sessions: 100,
    };
    KvMachine::open(MemoryKv::open(None).unwrap(), 1, limits).unwrap()
}

fn one(operation: &Operation<'_>, limits: Allowed) -> Vec<u8> {
    allowed(&[command(None, operation.clone())], limits)
}

fn batch(operations: Vec<Operation<'_>>) -> Operation<'_> {
    Operation::Batch {
        expectations: Vec::new(),
        operations,
    }
}

fn range(key: &[u8], length: u64) -> Operation<'_> {
    Operation::SetRange {
        key,
        offset: length - 1,
        value: b"x",
    }
}

fn names(count: usize) -> Vec<Vec<u8>> {
    (0..count).map(|n| format!("k{n}").into_bytes()).collect()
}

/// Without what says up to where the log is applied, and the versions of values.
fn content(machine: &dyn StateMachine, keys: &[Vec<u8>]) -> Vec<Reply> {
    let keys: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
    let mut found = Vec::new();
    for key in &keys {
        for query in [
            Query::Get { key },
            Query::Ttl {
                key,
                millis: true,
                absolute: true,
            },
        ] {
            found.push(machine.query(&query, Mode::Blocking).unwrap());
        }
    }
    found.push(machine.query(&Query::DbSize, Mode::Blocking).unwrap());
    found.push(Reply::Int(machine.next_deadline(0).unwrap_or(0) as i64));
    found
}

fn too_much(reply: &Reply) -> bool {
    matches!(reply, Reply::Failed(Failure::TooMuchWork { bytes, limit })
        if bytes > limit && *limit == u64::from(WORK))
}

/// Whatever a command has done before it was too much: values, deadlines, and that everything was
/// removed.
#[test]
fn a_command_that_does_too_much_changes_nothing() {
    let keys = names(40);
    let some = &keys[..20];
    let sets = || some.iter().map(|key| set(key, b"new")).collect::<Vec<_>>();
    let dels = |keys: &'static [&'static [u8]]| Operation::Del {
        keys: keys.to_vec(),
    };
    let expire = |key| Operation::Expire {
        key,
        expiry: Expiry::At(9_000),
        condition: ExpireIf::Always,
    };
    let deadline = |key, ms| Operation::SetExpiring {
        key,
        value: b"v",
        condition: Condition::Always,
        get: false,
        expiry: Expiry::At(ms),
    };
    // Each reads or makes more than is allowed in the end, whatever stands before it.
    let reads = || vec![Operation::Read(Query::Get { key: b"k0" }); 10];
    let ends: Vec<Vec<Operation<'_>>> = vec![
        reads(),
        (0..10).map(|_| range(b"made", 900)).collect(),
        vec![dels(&[
            b"k0", b"k1", b"k2", b"k3", b"k4", b"k5", b"k6", b"k7",
        ])],
    ];
    let begins: Vec<Vec<Operation<'_>>> = vec![
        sets(),
        vec![
            expire(b"k1"),
            deadline(b"k2", 5_000),
            deadline(b"new", 1_000),
        ],
        vec![dels(&[b"k1", b"k2"]), deadline(b"k2", 77_000)],
        vec![
            Operation::FlushAll,
            set(b"after", b"1"),
            deadline(b"k2", 3_000),
            Operation::FlushAll,
        ],
        vec![batch(vec![
            set(b"inner", b"1"),
            Operation::GetDel { key: b"k3" },
        ])],
    ];
    for end in &ends {
        for begin in &begins {
            let machine = machine();
            let long = vec![b'v'; 900];
            let mut all: Vec<Operation<'_>> = some.iter().map(|key| set(key, &long)).collect();
            all.push(deadline(b"k2", 40_000));
            apply_all(&machine, &[entry(1, &operations(&all))]);
            let mut watched = keys.clone();
            watched.extend([&b"new"[..], b"made", b"after", b"inner"].map(<[u8]>::to_vec));
            let before = content(&machine, &watched);
            let mut operations = begin.clone();
            operations.extend(end.iter().cloned().cycle().take(end.len() * 3));
            // What comes before and behind it in the same entry counts.
            let commands = [
                command(None, set(b"k39", b"1")),
                command(None, batch(operations)),
                command(None, set(b"k38", b"2")),
            ];
            let payload = allowed(&commands, LIMITS);
            let replies = apply_all(&machine, &[entry(2, &payload)]).0.remove(0);
            assert!(too_much(&replies[1]), "{replies:?}");
            assert_eq!((&replies[0], &replies[2]), (&Reply::Ok, &Reply::Ok));
            apply_all(
                &machine,
                &[entry(
                    3,
                    &one(&Operation::Del { keys: vec![b"k38"] }, LIMITS),
                )],
            );
            apply_all(
                &machine,
                &[entry(
                    4,
                    &one(&Operation::Del { keys: vec![b"k39"] }, LIMITS),
                )],
            );
            assert_eq!(content(&machine, &watched), before, "{begin:?} {end:?}");
        }
    }
}

/// Bytes that are read count, and so do those that are made and those that are answered: of every
/// command that can be repeated.
#[test]
fn every_amplifying_command_is_bounded() {
    let long = vec![b'v'; 1000];
    let key = &b"big"[..];
    let read = Operation::Read;
    let all = [
        range(b"other", 1000),
        Operation::Append {
            key: b"other",
            value: b"x",
        },
        Operation::Expire {
            key,
            expiry: Expiry::After(1_000_000),
            condition: ExpireIf::Always,
        },
        Operation::Expire {
            key,
            expiry: Expiry::Never,
            condition: ExpireIf::Always,
        },
        Operation::GetExpire {
            key,
            expiry: Expiry::Never,
        },
        Operation::SetExpiring {
            key,
            value: b"v",
            condition: Condition::Absent,
            get: true,
            expiry: Expiry::Keep,
        },
        Operation::IncrBy { key, delta: 1 },
        read(Query::Get { key }),
        read(Query::StrLen { key }),
        read(Query::GetRange {
            key,
            start: 0,
            end: 0,
        }),
        read(Query::Type { key }),
        read(Query::Exists { keys: vec![key] }),
        read(Query::MultiGet { keys: vec![key] }),
        read(Query::Ttl {
            key,
            millis: true,
            absolute: true,
        }),
        Operation::Del {
            keys: vec![b"none"],
        },
        Operation::GetDel { key: b"none" },
    ];
    for operation in all {
        let machine = machine();
        apply_all(&machine, &[entry(1, &one(&set(key, &long), LIMITS))]);
        let run = |index, count| {
            let payload = one(&batch(vec![operation.clone(); count]), LIMITS);
            apply_all(&machine, &[entry(index, &payload)])
                .0
                .remove(0)
                .remove(0)
        };
        assert!(matches!(run(2, 2), Reply::Array(_)), "{operation:?}");
        let reply = run(3, 10);
        assert!(too_much(&reply), "{operation:?}: {reply:?}");
        let most = machine.work_done().largest_command;
        assert!(most <= u64::from(WORK) + 6000, "{operation:?}: {most}");
    }
    // Those of several keys alone.
    let many = vec![key; 20];
    for operation in [
        Operation::Del { keys: many.clone() },
        read(Query::Exists { keys: many.clone() }),
        read(Query::MultiGet { keys: many.clone() }),
        Operation::Batch {
            expectations: many
                .iter()
                .map(|key| Expectation {
                    key,
                    state: Expected::Present,
                })
                .collect(),
            operations: Vec::new(),
        },
    ] {
        let machine = machine();
        let entries = [one(&set(key, &long), LIMITS), one(&operation, LIMITS)];
        let inputs: Vec<_> = (1..)
            .zip(&entries)
            .map(|(index, it)| entry(index, it))
            .collect();
        let replies = apply_all(&machine, &inputs).0;
        assert!(too_much(&replies[1][0]), "{operation:?}: {replies:?}");
        let found = machine.query(&Query::StrLen { key }, Mode::Blocking);
        assert_eq!(found.unwrap(), Reply::Int(1000));
    }
}

/// A value that was stored under another limit is not out of reach.
#[test]
fn a_command_on_one_key_is_always_allowed() {
    let long = vec![b'v'; 100_000];
    let machine = machine();
    apply_all(&machine, &[entry(1, &operations(&[set(b"k", &long)]))]);
    let key = &b"k"[..];
    for (index, operation) in (2..).zip([
        Operation::Read(Query::Get { key }),
        Operation::GetExpire {
            key,
            expiry: Expiry::At(1_000),
        },
        Operation::Del { keys: vec![key] },
    ]) {
        let reply = &apply_all(&machine, &[entry(index, &one(&operation, LIMITS))]).0[0][0];
        assert!(!matches!(reply, Reply::Failed(_)), "{operation:?}");
    }
    assert_eq!(content(&machine, &[key.to_vec()])[0], Reply::Nil);
}

/// Entries that tell no limit mean what they meant.
#[test]
fn entries_that_tell_no_limit_have_none() {
    let keys = names(100);
    let ranges = keys.iter().map(|key| range(key, 1000)).collect();
    let payload = operations(&[batch(ranges)]);
    let machine = machine();
    let replies = apply_all(&machine, &[entry(1, &payload)]).0.remove(0);
    assert_eq!(replies, [Reply::Array(vec![Reply::Int(1000); 100])]);
}

/// Entries as a leader makes them of a burst: commands with and without sessions, each of them
/// within the limit.
fn bursts() -> Vec<Vec<u8>> {
    let keys = names(6);
    let mut entries = vec![allowed(
        &[
            command(None, Operation::OpenSession),
            command(None, Operation::OpenSession),
        ],
        LIMITS,
    )];
    let sessions = [1 << 12, (1 << 12) + 1];
    let mut seq = 0;
    for round in 0..8u64 {
        let mut commands = Vec::new();
        for place in 0..10usize {
            let (key, other) = (&keys[place % 6], &keys[(place + 1) % 6]);
            let operation = match (place as u64 + round) % 5 {
                0 => batch(vec![range(key, 900), range(other, 800)]),
                1 => Operation::Append { key, value: b"abc" },
                2 => Operation::GetExpire {
                    key,
                    expiry: Expiry::At(1_000_000 + round),
                },
                3 => Operation::Read(Query::MultiGet {
                    keys: vec![key, other],
                }),
                _ => Operation::Del {
                    keys: vec![key, other, b"none"],
                },
            };
            let session = sessions[place % 2];
            seq += u64::from(place % 3 != 0);
            let tag = match place % 3 {
                0 => None,
                // The last is repeated: it is known, be it in another part.
                1 => tag(session, seq, seq.saturating_sub(7)),
                _ => tag(session, seq - u64::from(place == 5), 0),
            };
            commands.push(command(tag, operation));
        }
        if round == 5 {
            commands.insert(
                4,
                command(
                    None,
                    Operation::CloseSession {
                        session: sessions[1],
                    },
                ),
            );
        }
        entries.push(allowed(&commands, LIMITS));
    }
    entries
}

/// However entries come into calls, whether somebody wants replies, and wherever a replica is
/// restarted.
#[test]
fn entries_are_applied_in_parts_to_the_same_state() {
    let payloads = bursts();
    let inputs: Vec<_> = (1..)
        .zip(&payloads)
        .map(|(index, it)| entry(index, it))
        .collect();
    for engine in ENGINES {
        let (mut told, mut digests) = (Vec::new(), Vec::new());
        for (group, restarts, wants_replies) in [
            (1, false, true),
            (16, false, true),
            (3, true, true),
            (16, true, false),
        ] {
            let place = tempfile::tempdir().unwrap();
            let mut machine = engine.open(place.path(), 1);
            let (mut at, mut calls, mut parts, mut replies) = (0, 0, 0, vec![Vec::new()]);
            while at < inputs.len() {
                let mut some = inputs[at..(at + group).min(inputs.len())].to_vec();
                some.iter_mut()
                    .for_each(|it| it.wants_replies = wants_replies);
                let mut applied = machine.apply(0, &some, Mode::Blocking).unwrap();
                (calls, parts) = (calls + 1, parts + usize::from(applied.is_part));
                at += applied.whole();
                let whole = applied.whole();
                for (place, some) in applied.replies.drain(..).enumerate() {
                    replies.last_mut().unwrap().extend(some);
                    if place < whole {
                        replies.push(Vec::new());
                    }
                }
                assert_eq!(machine.applied(0).0, at as u64);
                if restarts {
                    machine.flush().unwrap();
                    drop(machine);
                    machine = engine.open(place.path(), 1);
                }
                let most = machine.work_done().largest_call;
                let bound = u64::from(WORK) + 2 * work::portion(WORK);
                assert!(most <= bound, "a call did {most}");
            }
            assert!(parts >= 8, "{parts} of {calls} calls ended within an entry");
            if wants_replies {
                told.push(replies);
            } else {
                assert!(replies.iter().all(Vec::is_empty));
            }
            told.dedup();
            digests.push(machine.digest().unwrap());
            digests.dedup();
        }
        assert_eq!((told.len(), digests.len()), (1, 1), "{engine:?}");
    }
}

/// Only where somebody gets them, or a session keeps them.
#[test]
fn replies_that_no_client_gets_are_not_made() {
    let long = vec![b'v'; 1000];
    let get = |tag| command(tag, Operation::Read(Query::Get { key: b"k" }));
    let machine = machine();
    let first = [
        command(None, set(b"k", &long)),
        command(None, Operation::OpenSession),
    ];
    apply_all(&machine, &[entry(1, &allowed(&first, LIMITS))]);
    let session = (1 << 12) + 1;
    for (index, commands, wants_replies, bytes) in [
        (2, vec![get(None); 3], true, 3000),
        (3, vec![get(None); 3], false, 0),
        (4, vec![get(None), get(tag(session, 1, 0))], false, 1000),
        (
            5,
            vec![command(
                None,
                batch(vec![Operation::Read(Query::Get { key: b"k" }); 2]),
            )],
            false,
            0,
        ),
    ] {
        let payload = allowed(&commands, LIMITS);
        let mut input = entry(index, &payload);
        input.wants_replies = wants_replies;
        let before = machine.work_done().reply_bytes;
        let (replies, _) = apply_all(&machine, &[input]);
        assert_eq!(
            machine.work_done().reply_bytes - before,
            bytes,
            "entry {index}"
        );
        assert_eq!(replies[0].len(), if wants_replies { 3 } else { 0 });
    }
    // What the session keeps is what a repetition is answered.
    let payload = allowed(&[get(tag(session, 1, 0))], LIMITS);
    let replies = apply_all(&machine, &[entry(6, &payload)]).0;
    assert_eq!(replies, [[Reply::Bytes(long)]]);
}

/// A sweep of long values ends early; the rest is for the next one.
#[test]
fn a_sweep_reads_so_much_and_the_next_one_goes_on() {
    let long = vec![b'v'; 1000];
    let keys = names(10);
    let machine = machine();
    let sets: Vec<_> = keys
        .iter()
        .map(|key| Operation::SetExpiring {
            key,
            value: &long,
            condition: Condition::Always,
            get: false,
            expiry: Expiry::At(1_000),
        })
        .collect();
    apply_all(&machine, &[entry(1, &operations(&sets))]);
    let sweep = || {
        let mut payload = one(&Operation::Sweep { limit: 1000 }, LIMITS);
        payload[4..12].copy_from_slice(&2_000u64.to_le_bytes());
        payload
    };
    let (mut index, mut removed) = (2, Vec::new());
    while machine.next_deadline(0).is_some() {
        let replies = apply_all(&machine, &[entry(index, &sweep())]).0;
        let [Reply::Int(count)] = replies[0][..] else {
            panic!("{replies:?}");
        };
        removed.push(count);
        index += 1;
        assert!(index < 100);
    }
    assert_eq!(removed.iter().sum::<i64>(), 10, "{removed:?}");
    assert!(removed.len() > 5, "{removed:?}");
}

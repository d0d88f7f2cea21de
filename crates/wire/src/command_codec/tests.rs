//! Every command comes back as it went; nothing else is one.

use super::*;
use crate::command::{Expectation, Expected, ExpireIf, Expiry};
use proptest::collection::vec;
use proptest::prelude::*;

/// Owned raw material for any command.
type Raw = (
    u8,
    u8,
    Vec<u8>,
    Vec<u8>,
    Vec<Vec<u8>>,
    (i64, i64, u64),
    Option<(u64, u64, u64)>,
);

fn raw() -> impl Strategy<Value = Raw> {
    (
        any::<u8>(),
        any::<u8>(),
        vec(any::<u8>(), 0..40),
        vec(any::<u8>(), 0..200),
        vec(vec(any::<u8>(), 0..10), 0..5),
        any::<(i64, i64, u64)>(),
        proptest::option::of((any::<u64>(), 1..u64::MAX, any::<u64>())),
    )
}

fn query(raw: &Raw) -> Query<'_> {
    let (_, which, key, pattern, keys, (start, end, cursor), _) = raw;
    let keys = || keys.iter().map(|k| &k[..]).collect();
    match which % 11 {
        0 => Query::Get { key },
        1 => Query::MultiGet { keys: keys() },
        2 => Query::Exists { keys: keys() },
        3 => Query::StrLen { key },
        4 => Query::GetRange {
            key,
            start: *start,
            end: *end,
        },
        5 => Query::Type { key },
        6 => Query::DbSize,
        7 => {
            let pattern = (which & 16 != 0).then_some(&pattern[..]);
            Query::Scan {
                cursor: *cursor,
                pattern,
                count: 1 + (*start as u32 >> 1),
                held: which & 32 != 0,
            }
        }
        8 => Query::Keys { pattern },
        9 => Query::Ttl {
            key,
            millis: which & 32 != 0,
            absolute: which & 64 != 0,
        },
        _ => Query::Versions { keys: keys() },
    }
}

fn expiry(raw: &Raw) -> Expiry {
    let (_, flags, .., (delta, _, _), _) = raw;
    match flags % 4 {
        0 => Expiry::Keep,
        1 => Expiry::At(*delta as u64),
        2 => Expiry::After(*delta as u64),
        _ => Expiry::Never,
    }
}

/// What may stand in a batch, by number.
fn operation(raw: &Raw, which: u8) -> Operation<'_> {
    let (_, flags, key, value, keys, (delta, other, offset), _) = raw;
    let condition =
        [Condition::Always, Condition::Absent, Condition::Present][usize::from(flags % 3)];
    let get = flags & 128 != 0;
    match which % 22 {
        0 => Operation::Noop,
        1 => Operation::OpenSession,
        2 => Operation::CloseSession { session: *offset },
        3 => Operation::Set {
            key,
            value,
            condition,
            get,
        },
        4 => Operation::GetDel { key },
        5 => Operation::Del {
            keys: keys.iter().map(|k| &k[..]).collect(),
        },
        6 => Operation::Append { key, value },
        7 => Operation::SetRange {
            key,
            offset: *offset,
            value,
        },
        8 => Operation::IncrBy { key, delta: *delta },
        9 => Operation::IncrByFloat {
            key,
            delta: *other as f64 / 7.0,
        },
        10 => Operation::FlushAll,
        11 => Operation::Read(query(raw)),
        12 => Operation::SetExpiring {
            key,
            value,
            condition,
            get,
            expiry: expiry(raw),
        },
        13 => Operation::Expire {
            key,
            expiry: expiry(raw),
            condition: [
                ExpireIf::Always,
                ExpireIf::None,
                ExpireIf::Some,
                ExpireIf::Later,
                ExpireIf::Earlier,
                ExpireIf::EarlierThanSome,
            ][usize::from(flags % 6)],
        },
        14 => Operation::GetExpire {
            key,
            expiry: expiry(raw),
        },
        15 => Operation::Sweep {
            limit: *delta as u32,
        },
        17 => Operation::Members { members: value },
        18 => Operation::Record {
            after: *offset,
            record: value,
        },
        19 => Operation::IncrByLongDouble {
            key,
            delta: LongDouble::parse(format!("{other}e{}", delta % 4_000).as_bytes())
                .unwrap_or(LongDouble::ZERO),
        },
        20 => Operation::SetClock { time_ms: *offset },
        21 => Operation::SetFormatVersion {
            version: FormatVersion::new(*delta as u32).unwrap_or(FormatVersion::V1),
        },
        _ => Operation::Batch {
            expectations: (0..flags % 5).map(|at| expectation(raw, at)).collect(),
            operations: (0..16u8)
                .filter(|at| offset >> at & 1 == 1 && ![1, 2, 15].contains(at))
                .map(|at| operation(raw, at))
                .filter(|operation| !matches!(operation, Operation::Read(Query::Versions { .. })))
                .collect(),
        },
    }
}

fn expectation(raw: &Raw, at: u8) -> Expectation<'_> {
    let (_, _, key, value, _, (_, _, version), _) = raw;
    let state = match at % 4 {
        0 => Expected::Present,
        1 => Expected::Absent,
        2 => Expected::Value(value),
        _ => Expected::Version(*version),
    };
    Expectation { key, state }
}

fn command(raw: &Raw) -> Command<'_> {
    let operation = operation(raw, raw.0);
    let session = raw.6;
    let session = session.map(|(session, seq, acked_below)| SessionTag {
        session,
        seq,
        acked_below,
    });
    Command { session, operation }
}

proptest! {
    #[test]
    fn commands_come_back(raw in raw()) {
        let command = command(&raw);
        let mut bytes = Vec::new();
        command.encode(&mut bytes);
        prop_assert_eq!(Command::decode(&bytes), Ok(command));
        let mut longer = bytes.clone();
        longer.push(0);
        prop_assert!(Command::decode(&longer).is_err());
        for cut in 0..bytes.len() {
            prop_assert!(Command::decode(&bytes[..cut]).is_err(), "a prefix parsed as a whole command");
        }
    }

    #[test]
    fn queries_come_back(raw in raw()) {
        let query = query(&raw);
        let mut bytes = Vec::new();
        query.encode(&mut bytes);
        prop_assert_eq!(Query::decode(&bytes), Ok(query));
    }

    #[test]
    fn garbage_is_an_error_or_a_command(bytes in vec(any::<u8>(), 0..300), head in 0u8..2, tag in 0u8..22) {
        let _ = Query::decode(&bytes);
        let mut shaped = vec![head, tag];
        shaped.extend_from_slice(&bytes);
        for candidate in [&bytes, &shaped] {
            if let Ok(command) = Command::decode(candidate) {
                let mut again = Vec::new();
                command.encode(&mut again);
                prop_assert_eq!(&again, candidate, "one command, two encodings");
            }
        }
    }
}

#[test]
fn the_layout_is_fixed() {
    let mut bytes = Vec::new();
    let operation = Operation::Set {
        key: b"k",
        value: b"vv",
        condition: Condition::Absent,
        get: false,
    };
    Command {
        session: None,
        operation,
    }
    .encode(&mut bytes);
    assert_eq!(
        bytes,
        [0, 3, 1, 0, 0, 0, b'k', 2, 0, 0, 0, b'v', b'v', 1, 0]
    );
}

#[test]
fn infinite_increments_and_empty_scans_are_refused() {
    let mut bytes = Vec::new();
    let operation = Operation::IncrByFloat {
        key: b"k",
        delta: f64::INFINITY,
    };
    Command {
        session: None,
        operation,
    }
    .encode(&mut bytes);
    assert!(matches!(
        Command::decode(&bytes),
        Err(DecodeError::OutOfRange { .. })
    ));
    bytes.clear();
    Query::Scan {
        cursor: 0,
        pattern: None,
        count: 0,
        held: false,
    }
    .encode(&mut bytes);
    assert!(matches!(
        Query::decode(&bytes),
        Err(DecodeError::OutOfRange { .. })
    ));
}

#[test]
fn a_batch_holds_no_sessions_no_sweeps_no_versions_and_no_deeper_batches() {
    let inner = |operation: Operation<'_>| {
        let mut bytes = Vec::new();
        let operation = Operation::Batch {
            expectations: Vec::new(),
            operations: vec![Operation::Noop, operation],
        };
        Command {
            session: None,
            operation,
        }
        .encode(&mut bytes);
        Command::decode(&bytes).map(drop)
    };
    assert_eq!(inner(Operation::FlushAll), Ok(()));
    let shallow = Operation::Batch {
        expectations: Vec::new(),
        operations: vec![Operation::FlushAll],
    };
    assert_eq!(inner(shallow), Ok(()));
    for refused in [
        Operation::OpenSession,
        Operation::CloseSession { session: 1 },
        Operation::Sweep { limit: 1 },
        Operation::Read(Query::Versions { keys: vec![b"a"] }),
        Operation::Batch {
            expectations: Vec::new(),
            operations: vec![Operation::Batch {
                expectations: Vec::new(),
                operations: Vec::new(),
            }],
        },
    ] {
        let answer = inner(refused.clone());
        assert!(
            matches!(answer, Err(DecodeError::Unknown { .. })),
            "{refused:?}: {answer:?}"
        );
    }
}

#[test]
fn batches_are_bounded() {
    let encoded = |operations: Vec<Operation<'_>>| {
        let mut bytes = Vec::new();
        let operation = Operation::Batch {
            expectations: Vec::new(),
            operations,
        };
        Command {
            session: None,
            operation,
        }
        .encode(&mut bytes);
        bytes
    };
    let most = encoded(vec![Operation::Noop; crate::command::MAX_BATCH_ITEMS]);
    assert!(Command::decode(&most).is_ok());
    let more = encoded(vec![Operation::Noop; crate::command::MAX_BATCH_ITEMS + 1]);
    assert!(matches!(
        Command::decode(&more),
        Err(DecodeError::OutOfRange {
            what: "batch operations",
            ..
        })
    ));
    let long = vec![0; crate::command::MAX_BATCH_BYTES];
    let value = Operation::Append {
        key: b"k",
        value: &long,
    };
    assert!(matches!(
        Command::decode(&encoded(vec![value])),
        Err(DecodeError::OutOfRange {
            what: "batch bytes",
            ..
        })
    ));
}

#[test]
fn a_batch_names_the_keys_of_its_parts() {
    let batch = Operation::Batch {
        expectations: vec![Expectation {
            key: b"e",
            state: Expected::Absent,
        }],
        operations: vec![
            Operation::Noop,
            Operation::Del {
                keys: vec![b"a", b"b"],
            },
            Operation::Read(Query::Get { key: b"c" }),
        ],
    };
    assert_eq!(&*batch.keys(), [&b"e"[..], b"a", b"b", b"c"]);
    assert_eq!(batch.key(), Some(&b"e"[..]));
    assert!(!batch.concerns_all_keys());
}

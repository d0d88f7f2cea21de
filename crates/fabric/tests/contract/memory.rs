//! Writes, reads, flushes and atomics: effects, order, and refusals.

use cyclone_fabric::{
    Access, ConnectionId, Event, FabricError, FailureKind, MemoryKey, Operation, Token, WriteOrder,
};

use crate::group::{Group, MEMORY, TOKEN, pattern};

pub fn what_was_written_is_read_and_seen(group: &mut Group) {
    let key = group.register(1, Access::ALL);
    let on = group.connect(0, 1);
    for (at, len) in [(0, 1), (3, 61), (64, 64), (130, 1000), (8191, 1), (17, 0)] {
        let bytes = pattern(len, at as u8);
        let write = Operation::Write {
            key: &key,
            offset: at,
            bytes: &bytes,
        };
        group.perform(0, on, write).expect("write");
        // Complete means in memory: the target's own program sees it.
        assert_eq!(
            group.endpoints[1].memory().read_vec(4096 + at, len as u64),
            bytes
        );
        assert_eq!(group.read(0, on, &key, at, len as u64), bytes);
    }
}

pub fn a_flush_completes_after_what_it_covers(group: &mut Group) {
    let key = group.register(1, Access::ALL);
    let on = group.connect(0, 1);
    for round in 0..20u8 {
        let bytes = pattern(700, round);
        let write = Operation::Write {
            key: &key,
            offset: 32,
            bytes: &bytes,
        };
        group.post(0, on, write, 1);
        let flush = Operation::Flush {
            key: &key,
            offset: 32,
            len: 700,
        };
        group.post(0, on, flush, 2);
        group.outcome(0, 2).expect("flush");
        assert_eq!(group.endpoints[1].memory().read_vec(4096 + 32, 700), bytes);
        group.outcome(0, 1).expect("write");
    }
}

pub fn completions_carry_contexts_in_order(group: &mut Group) {
    let key = group.register(1, Access::ALL);
    let on = group.connect(0, 1);
    let is_ordered = group.endpoints[0].capabilities().write_order == WriteOrder::Posted;
    for context in 0..60u64 {
        let bytes = context.to_le_bytes();
        // All to one place: in order, the last one stays.
        let write = Operation::Write {
            key: &key,
            offset: 640,
            bytes: &bytes,
        };
        group.post(0, on, write, context);
    }
    let mut seen = Vec::new();
    for _ in 0..60 {
        seen.push(group.until(0, |event| match event {
            Event::Completed {
                context,
                connection,
                ..
            } => {
                assert_eq!(*connection, on);
                Some(*context)
            }
            other => panic!("{other:?}"),
        }));
    }
    if is_ordered {
        assert_eq!(seen, (0..60).collect::<Vec<_>>());
        assert_eq!(group.endpoints[1].memory().load_u64(4096 + 640), 59);
    }
    seen.sort_unstable();
    assert_eq!(seen, (0..60).collect::<Vec<_>>());
}

pub fn every_refusal_names_its_reason(group: &mut impl FnMut(usize) -> Group) {
    let mut group = group(2);
    let atomics = group.endpoints[0].capabilities().atomics;
    let key = group.register(1, Access::ALL);
    let read_only = group.register(1, Access::READ);
    let write_only = group.register(1, Access::WRITE);
    let foreign = MemoryKey {
        token: Token(!TOKEN.0),
        ..key
    };
    let unregistered = MemoryKey {
        id: key.id + 1_000,
        ..key
    };
    let boastful = MemoryKey {
        len: u64::MAX,
        ..key
    };
    let write = |key, offset| Operation::Write {
        key,
        offset,
        bytes: &[1; 16],
    };
    let add = |key, offset| Operation::FetchAdd {
        key,
        offset,
        value: 1,
    };
    let read = |key, offset, len| Operation::Read { key, offset, len };
    let mut cases = vec![
        (write(&foreign, 0), FailureKind::WrongToken),
        (read(&foreign, 0, 8), FailureKind::WrongToken),
        (write(&unregistered, 0), FailureKind::NotRegistered),
        (write(&key, 8190), FailureKind::OutOfBounds),
        (write(&boastful, 9000), FailureKind::OutOfBounds),
        (write(&key, u64::MAX - 7), FailureKind::OutOfBounds),
        (read(&key, 8190, 3), FailureKind::OutOfBounds),
        (write(&read_only, 0), FailureKind::NotAllowed),
        (read(&write_only, 0, 8), FailureKind::NotAllowed),
    ];
    if atomics {
        cases.push((add(&key, 12), FailureKind::Misaligned));
        cases.push((add(&key, 8192), FailureKind::OutOfBounds));
        cases.push((add(&read_only, 8), FailureKind::NotAllowed));
        cases.push((add(&foreign, 8), FailureKind::WrongToken));
    }
    let before = group.endpoints[1].memory().read_vec(0, MEMORY);
    for (operation, kind) in cases {
        let on = group.connect(0, 1);
        let outcome = group.perform(0, on, operation);
        assert_eq!(outcome, Err(kind), "{operation:?}");
        assert_eq!(
            group.endpoints[1].memory().read_vec(0, MEMORY),
            before,
            "{operation:?} had an effect"
        );
    }
}

pub fn what_stands_behind_a_failure_fails_too(group: &mut Group) {
    let key = group.register(1, Access::ALL);
    let wrong = MemoryKey {
        token: Token(1),
        ..key
    };
    let on = group.connect(0, 1);
    let other = group.connect(2, 1);
    let write = |key, context: u64| Operation::Write {
        key,
        offset: context * 64,
        bytes: &[7; 64],
    };
    // Without an order, only what has completed stands in front.
    group.post(0, on, write(&key, 0), 0);
    group.outcome(0, 0).expect("in front");
    for context in 1..10 {
        let key = if context == 1 { &wrong } else { &key };
        match group.endpoints[0].post(on, write(key, context), context) {
            Ok(()) | Err(FabricError::Unknown(_)) => {}
            Err(error) => panic!("{error}"),
        }
    }
    let first = group.until(0, |event| match event {
        Event::Failed {
            context, failure, ..
        } => Some((*context, failure.kind.clone())),
        _ => None,
    });
    assert_eq!(first, (1, FailureKind::WrongToken));
    if group.endpoints[0].capabilities().write_order == WriteOrder::Posted {
        for event in &group.heard[0] {
            let Event::Failed { failure, .. } = event else {
                panic!("{event:?}");
            };
            assert_eq!(failure.kind, FailureKind::Broken);
        }
        let memory = group.endpoints[1].memory();
        assert_eq!(memory.read_vec(4096 + 128, 8 * 64), [0; 8 * 64]);
    }
    // Nothing new either: refused at once, or failed.
    match group.endpoints[0].post(on, write(&key, 20), 20) {
        Ok(()) => assert_eq!(group.outcome(0, 20), Err(FailureKind::Broken)),
        Err(FabricError::Unknown(_)) => {}
        Err(error) => panic!("{error}"),
    }
    // Others, and new connections, are not concerned.
    group.perform(2, other, write(&key, 30)).expect("another's");
    let again = group.connect(0, 1);
    group.perform(0, again, write(&key, 31)).expect("a new one");
}

pub fn nothing_takes_effect_after_a_revocation(group: &mut Group) {
    let key = group.register(1, Access::ALL);
    let on = group.connect(0, 1);
    let bytes = pattern(4096, 9);
    let write = Operation::Write {
        key: &key,
        offset: 0,
        bytes: &bytes,
    };
    for context in 0..4 {
        group.post(0, on, write, context);
    }
    group.poll();
    group.endpoints[1].revoke(&key).expect("revoke");
    let after = group.endpoints[1].memory().read_vec(4096, 4096);
    let mut failed = 0;
    for context in 0..4 {
        failed += u32::from(group.outcome(0, context).is_err());
    }
    assert_eq!(group.endpoints[1].memory().read_vec(4096, 4096), after);
    let on = match failed {
        0 => on,
        _ => group.connect(0, 1),
    };
    assert_eq!(group.perform(0, on, write), Err(FailureKind::NotRegistered));
    let again = group.endpoints[1].revoke(&key);
    assert!(matches!(again, Err(FabricError::Unknown(_))), "{again:?}");
    let new = group.register(1, Access::ALL);
    assert_ne!(new.id, key.id);
}

pub fn bad_calls_are_refused(group: &mut Group) {
    let memory = group.endpoints[0].memory().len();
    for (offset, len) in [(memory, 64), (0, memory + 1), (u64::MAX - 63, 64), (8, 64)] {
        let refused = group.endpoints[0].register(offset, len, Access::ALL, TOKEN);
        assert!(
            matches!(refused, Err(FabricError::OutOfBounds { .. })),
            "{offset}+{len}: {refused:?}"
        );
    }
    let key = group.register(1, Access::ALL);
    let send = Operation::Send { bytes: &[1] };
    let unknown = group.endpoints[0].post(ConnectionId(1 << 40), send, 0);
    assert!(matches!(unknown, Err(FabricError::Unknown(_))));
    let on = group.connect(0, 1);
    let max = group.endpoints[0].capabilities().max_transfer;
    if max < 64 << 20 {
        let read = Operation::Read {
            key: &key,
            offset: 0,
            len: max as u64 + 1,
        };
        let refused = group.endpoints[0].post(on, read, 0);
        assert!(matches!(refused, Err(FabricError::TooLarge { .. })));
    }
}

pub fn atomics_are_atomic(group: &mut Group) {
    let key = group.register(1, Access::ALL);
    let connections = [group.connect(0, 1), group.connect(2, 1)];
    let add = Operation::FetchAdd {
        key: &key,
        offset: 8,
        value: 3,
    };
    for context in 0..50 {
        group.post(0, connections[0], add, context);
        group.post(2, connections[1], add, context);
    }
    let mut before = Vec::new();
    for context in 0..50 {
        before.push(group.outcome(0, context).expect("add").0);
        before.push(group.outcome(2, context).expect("add").0);
    }
    // Every value was there for exactly one of them.
    before.sort_unstable();
    let expected: Vec<u64> = (0..100).map(|n| n * 3).collect();
    assert_eq!(before, expected);
    let swap = |old, new| Operation::CompareSwap {
        key: &key,
        offset: 8,
        old,
        new,
    };
    let mut value = |operation| group.perform(0, connections[0], operation).expect("swap").0;
    assert_eq!(value(swap(300, u64::MAX)), 300);
    assert_eq!(value(swap(300, 1)), u64::MAX);
    assert_eq!(value(add), u64::MAX);
    assert_eq!(value(swap(2, 7)), 2);
    assert_eq!(group.endpoints[1].memory().load_u64(4096 + 8), 7);
}

//! What an entry means does not depend on the settings of who applies it.

mod support;

use cyclone_store::{KvMachine, Limits, MemoryKv, Mode, StateMachine};
use cyclone_wire::batch::Allowed;
use cyclone_wire::command::Operation;
use cyclone_wire::reply::{Failure, Reply};
use support::{allowed, command, entry, operations, set};

fn machine(max_value_bytes: usize) -> KvMachine<MemoryKv> {
    let limits = Limits {
        max_value_bytes,
        max_sessions: Limits::MAX_SESSIONS,
    };
    KvMachine::open(MemoryKv::open(None).unwrap(), 1, limits).unwrap()
}

/// An entry of a leader with this limit.
fn limited(operations: &[Operation<'_>], value_bytes: u32) -> Vec<u8> {
    let commands = operations.iter().map(|it| command(None, it.clone()));
    let limits = Allowed {
        value_bytes,
        work_bytes: 1 << 20,
    };
    allowed(&commands.collect::<Vec<_>>(), limits)
}

/// Commands whose outcome is a matter of the longest value.
fn growing<'a>() -> [Operation<'a>; 4] {
    let offset = 90;
    let (key, value) = (&b"ranged"[..], &b"0123456789"[..]);
    [
        set(b"k", &[1; 60]),
        Operation::Append {
            key: b"k",
            value: &[2; 60],
        },
        Operation::SetRange { key, offset, value },
        set(b"long", &[3; 300]),
    ]
}

/// A rolling change of the limit, or one between two starts: old and new settings apply the same
/// entries.
#[test]
fn replicas_with_other_limits_come_to_the_same_state() {
    for limit in [100, 50, 1000] {
        let payload = limited(&growing(), limit);
        let run = |own: usize| {
            let machine = machine(own);
            let replies = machine.apply(0, &[entry(1, &payload)], Mode::Blocking);
            (replies.unwrap().replies, machine.digest().unwrap())
        };
        let wanted = run(limit as usize);
        for own in [1, 64, 100, 1 << 20] {
            assert_eq!(run(own), wanted, "limit {limit}, applied by {own}");
        }
        let failed = |reply: &Reply| *reply == Reply::Failed(Failure::TooLong);
        let too_long: Vec<bool> = wanted.0[0].iter().map(failed).collect();
        assert_eq!(
            too_long,
            [60, 120, 100, 300].map(|bytes| limit < bytes),
            "{limit:?}"
        );
    }
}

/// Entries of the first format do not tell: there the machine's own limit counts.
#[test]
fn entries_that_do_not_tell_have_the_machines_limit() {
    let payload = operations(&growing());
    let machine = machine(100);
    let replies = machine.apply(0, &[entry(1, &payload)], Mode::Blocking);
    let too_long = Reply::Failed(Failure::TooLong);
    let wanted = vec![Reply::Ok, too_long.clone(), Reply::Int(100), too_long];
    assert_eq!(replies.unwrap().replies, [wanted]);
}

//! INCRBYFLOAT: as an x87 adds, and as the first entries have it.

mod support;

use cyclone_store::{Mode, StateMachine};
use cyclone_wire::command::Operation;
use cyclone_wire::long_double::LongDouble;
use cyclone_wire::reply::{Failure, Reply};
use support::{ENGINES, entry, operations, set};

fn apply(machine: &dyn StateMachine, operation: Operation<'_>) -> Reply {
    let (payload, index) = (operations(&[operation]), machine.applied(0).0 + 1);
    let mut applied = machine
        .apply(0, &[entry(index, &payload)], Mode::Blocking)
        .expect("applied");
    applied.replies.remove(0).remove(0)
}

fn add(machine: &dyn StateMachine, old: &[u8], delta: &str) -> Reply {
    apply(machine, set(b"f", old));
    let delta = LongDouble::parse(delta.as_bytes()).expect("a number");
    apply(machine, Operation::IncrByLongDouble { key: b"f", delta })
}

#[test]
fn long_doubles_are_added_and_older_entries_keep_their_meaning() {
    for engine in ENGINES {
        let directory = tempfile::tempdir().expect("a directory");
        let machine = engine.open(directory.path(), 1);
        let machine = &*machine;
        let text = |text: &str| Reply::Bytes(text.as_bytes().to_vec());
        for (old, delta, sum) in [
            ("3", "1.1", "4.1"),
            ("0.1", "0.2", "0.3"),
            ("10000000000000000000", "1", "10000000000000000001"),
            ("0x10", "0x1p-3", "16.125"),
            ("1e-20", "0", "0"),
        ] {
            assert_eq!(
                add(machine, old.as_bytes(), delta),
                text(sum),
                "{old} + {delta}"
            );
        }
        for (old, delta, failure) in [
            ("x", "1", Failure::NotFloat),
            ("nan", "inf", Failure::NotFloat),
            ("1", "inf", Failure::NotFinite),
            ("inf", "-inf", Failure::NotFinite),
            // The longest value of these tests has 64 bytes.
            ("1e65", "1", Failure::TooLong),
        ] {
            assert_eq!(
                add(machine, old.as_bytes(), delta),
                Reply::Failed(failure),
                "{old} + {delta}"
            );
        }
        // A key that does not exist counts as zero.
        let delta = LongDouble::parse(b"1.5").expect("a number");
        let operation = Operation::IncrByLongDouble { key: b"new", delta };
        assert_eq!(apply(machine, operation), text("1.5"));
        // 64-bit floats: one is lost.
        apply(machine, set(b"f", b"10000000000000000000"));
        let old = Operation::IncrByFloat {
            key: b"f",
            delta: 1.0,
        };
        assert_eq!(apply(machine, old), text("10000000000000000000"));
    }
}

#[test]
fn sums_of_a_transaction_share_the_bound_of_its_replies() {
    let engine = ENGINES[0];
    let directory = tempfile::tempdir().expect("a directory");
    let machine = engine.open_with(directory.path(), 1, 8 << 10);
    let delta = LongDouble::parse(b"1e4900").expect("a number");
    let keys: Vec<Vec<u8>> = (0..4_000u32)
        .map(|key| key.to_be_bytes().to_vec())
        .collect();
    let all: Vec<_> = keys
        .iter()
        .map(|key| Operation::IncrByLongDouble { key, delta })
        .collect();
    let batch = Operation::Batch {
        expectations: Vec::new(),
        operations: all,
    };
    let Reply::Array(replies) = apply(&*machine, batch) else {
        panic!("no batch");
    };
    let long = replies
        .iter()
        .filter(|reply| matches!(reply, Reply::Bytes(sum) if sum.len() == 4_901))
        .count();
    let refused = replies
        .iter()
        .filter(|reply| **reply == Reply::Failed(Failure::ReplyTooLong))
        .count();
    // 16 MiB of 4,901 bytes and 64 for each part.
    assert_eq!((long, refused), (3_379, 621));
}

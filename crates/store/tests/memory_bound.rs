//! Every entry that is accepted can be applied in bounded memory: its own process applies the worst
//! of each command, with an upper bound set by the kernel.
#![cfg(feature = "rocksdb")]

mod support;

use std::path::Path;
use std::process::Command as Process;

use cyclone_store::{KvMachine, Limits, MemoryKv, RocksKv, RocksOptions, StateMachine};
use cyclone_wire::batch::Allowed;
use cyclone_wire::command::{Condition, ExpireIf, Expiry, Operation, Query};
use cyclone_wire::work;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use support::{allowed, apply_all, command, entry, set};

const MIB: u64 = 1 << 20;
const VALUE: u64 = MIB;
/// What the process may take besides what it has when its store holds the values.
const MORE: u64 = 400 * MIB;
/// Commands of an entry.
const BURST: usize = 32;
/// In the environment of the process that is bounded: the engine.
const BOUNDED: &str = "CYCLONE_BOUNDED_ENGINE";

fn limits() -> Allowed {
    Allowed {
        value_bytes: VALUE as u32,
        work_bytes: work::limit(VALUE),
    }
}

fn open(engine: &str, directory: &Path) -> Box<dyn StateMachine> {
    let limits = Limits {
        max_value_bytes: VALUE as usize,
        max_sessions: 100,
    };
    match engine {
        "memory" => Box::new(KvMachine::open(MemoryKv::open(None).unwrap(), 1, limits).unwrap()),
        _ => {
            let rocks = RocksKv::open(directory, &RocksOptions::default()).unwrap();
            Box::new(KvMachine::open(rocks, 1, limits).unwrap())
        }
    }
}

/// Bytes of private memory of this process that can be written, as `RLIMIT_DATA` counts them.
fn data_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmData:"));
    let number = line
        .and_then(|line| line.split_whitespace().nth(1))
        .unwrap();
    number.parse::<u64>().unwrap() * 1024
}

fn batch(operations: Vec<Operation<'_>>) -> Operation<'_> {
    Operation::Batch {
        expectations: Vec::new(),
        operations,
    }
}

/// Per command, as much of it as a batch may hold.
fn worst(keys: &[Vec<u8>]) -> Vec<Vec<Operation<'_>>> {
    let key = |n: usize| &keys[n % keys.len()][..];
    let all = keys.iter().map(Vec::as_slice).collect::<Vec<_>>();
    let range = |n| Operation::SetRange {
        key: key(n),
        offset: VALUE - 1,
        value: b"x",
    };
    let append = |n| Operation::Append {
        key: key(n),
        value: b"",
    };
    let expire = |n| Operation::Expire {
        key: key(n),
        expiry: Expiry::At(1 << 50),
        condition: ExpireIf::Always,
    };
    let persist = |n| Operation::Expire {
        key: key(n),
        expiry: Expiry::Never,
        condition: ExpireIf::Always,
    };
    let get_expire = |n| Operation::GetExpire {
        key: key(n),
        expiry: Expiry::At(1 << 50),
    };
    let get_set = |n| Operation::SetExpiring {
        key: key(n),
        value: b"",
        condition: Condition::Absent,
        get: true,
        expiry: Expiry::Keep,
    };
    let length = |n| Operation::Read(Query::StrLen { key: key(n) });
    let get = |n| Operation::Read(Query::Get { key: key(n) });
    vec![
        vec![batch((0..31).map(range).collect()); BURST],
        vec![batch((0..31).map(append).collect()); BURST],
        vec![batch((0..31).map(expire).collect()); BURST],
        vec![batch((0..31).map(persist).collect()); BURST],
        vec![batch((0..20).map(get_expire).collect()); BURST],
        vec![batch((0..31).map(get_set).collect()); BURST],
        vec![batch((0..63).map(length).collect()); BURST],
        vec![batch((0..31).map(get).collect()); BURST],
        vec![
            Operation::Read(Query::MultiGet {
                keys: all[..15].to_vec()
            });
            BURST
        ],
        vec![Operation::Read(Query::Exists { keys: all.clone() }); BURST],
        // Those that are too much are found out to be, and take no more.
        vec![batch((0..60_000).map(length).collect()); 4],
        vec![batch((0..60_000).map(expire).collect()); 4],
        vec![batch((0..60_000).map(range).collect()); 4],
        // Alone, without a limit: an entry of a burst.
        (0..BURST).map(range).collect(),
        (0..BURST).map(expire).collect(),
        (0..BURST).map(get_expire).collect(),
        vec![Operation::Del { keys: all.clone() }; BURST],
    ]
}

/// The process that is bounded. Called by the test below, and by nothing else.
#[test]
fn bounded_process() {
    let Ok(engine) = std::env::var(BOUNDED) else {
        return;
    };
    let place = tempfile::tempdir().unwrap();
    let machine = open(&engine, place.path());
    let keys: Vec<Vec<u8>> = (0..60).map(|n| format!("key {n}").into_bytes()).collect();
    let value = vec![7; VALUE as usize];
    let mut index = 0;
    let fill = |index: &mut u64| {
        for key in &keys {
            *index += 1;
            let payload = allowed(&[command(None, set(key, &value))], limits());
            apply_all(&*machine, &[entry(*index, &payload)]);
        }
    };
    fill(&mut index);
    let own = getrlimit(Resource::Data);
    setrlimit(
        Resource::Data,
        Rlimit {
            current: Some(data_bytes() + MORE),
            ..own
        },
    )
    .unwrap();
    for operations in worst(&keys) {
        index += 1;
        let commands: Vec<Vec<u8>> = operations
            .iter()
            .map(|it| command(None, it.clone()))
            .collect();
        let payload = allowed(&commands, limits());
        for wants_replies in [false, true] {
            let mut input = entry(index, &payload);
            input.wants_replies = wants_replies;
            // Replies leave with each call, as a replica's do.
            while machine.applied(0).0 < index {
                machine
                    .apply(0, &[input], cyclone_store::Mode::Blocking)
                    .unwrap();
            }
            index += u64::from(!wants_replies);
        }
        let bound = u64::from(limits().work_bytes) + 2 * work::portion(limits().work_bytes);
        let most = machine.work_done().largest_call;
        assert!(most <= bound + 2 * VALUE, "a call did {most} of {bound}");
        fill(&mut index);
    }
}

#[test]
fn the_worst_entry_of_each_command_is_applied_in_bounded_memory() {
    for engine in ["memory", "rocksdb"] {
        let output = Process::new(std::env::current_exe().unwrap())
            .args(["--exact", "bounded_process", "--nocapture"])
            .env(BOUNDED, engine)
            .output()
            .unwrap();
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{engine}: {told}");
    }
}

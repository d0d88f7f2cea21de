//! How fast engines apply: entries of 32 blind SETs, 16-byte keys and 100-byte values.
//!
//! From the repository's root, with the features of `make build`, so that RocksDB is not compiled
//! twice: `cargo run --release --locked --features libfabric --example apply_speed`

use std::time::Instant;

use cyclone_store::{EntryInput, KvMachine, Limits, MemoryKv, Mode, StateMachine};
use cyclone_wire::batch;
use cyclone_wire::command::{Command, Condition, Operation};

const COMMANDS: u64 = 32;
const ENTRIES: u64 = 40_000;

fn payloads() -> Vec<Vec<u8>> {
    let value = [b'v'; 100];
    let mut state = 1u64;
    let mut entry = |_| {
        let mut writer = batch::Writer::new();
        for _ in 0..COMMANDS {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let key = format!("key:{:012}", (state >> 33) % 1_000_000);
            let operation = Operation::Set {
                key: key.as_bytes(),
                value: &value,
                condition: Condition::Always,
                get: false,
            };
            writer.push(|out| {
                Command {
                    session: None,
                    operation,
                }
                .encode(out)
            });
        }
        writer.finish(0)
    };
    (0..ENTRIES).map(&mut entry).collect()
}

fn measure(name: &str, machine: &dyn StateMachine, payloads: &[Vec<u8>], per_call: usize) {
    let entries: Vec<EntryInput<'_>> = (1..)
        .zip(payloads)
        .map(|(index, payload)| EntryInput {
            index,
            term: 1,
            payload,
            wants_replies: true,
        })
        .collect();
    let begin = Instant::now();
    let mut blocked = 0;
    for call in entries.chunks(per_call) {
        if machine.apply(0, call, Mode::NonBlocking).is_err() {
            blocked += 1;
            machine.apply(0, call, Mode::Blocking).expect("applies");
        }
    }
    let rate = (COMMANDS * ENTRIES) as f64 / begin.elapsed().as_secs_f64();
    println!(
        "{name}, {per_call} entries per call: {:.2} M commands/s, {blocked} calls blocked",
        rate / 1e6
    );
}

fn main() {
    let payloads = payloads();
    for per_call in [1, 8] {
        let limits = Limits {
            max_value_bytes: 1 << 20,
            max_sessions: Limits::MAX_SESSIONS,
        };
        let memory =
            KvMachine::open(MemoryKv::open(None).expect("opens"), 1, limits).expect("opens");
        measure("memory", &memory, &payloads, per_call);
        #[cfg(feature = "rocksdb")]
        {
            let directory = tempfile::tempdir().expect("a directory");
            let kv = cyclone_store::RocksKv::open(
                directory.path(),
                &cyclone_store::RocksOptions::default(),
            );
            let rocks = KvMachine::open(kv.expect("opens"), 1, limits).expect("opens");
            measure("rocksdb", &rocks, &payloads, per_call);
        }
    }
}

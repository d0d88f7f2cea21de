//! Every protocol against one model on a simulated fabric: what was reported durable is found, what
//! was not sent is not, nothing is found in part, and nothing fenced off arrives; whatever crashes,
//! breaks, pauses or is cut off.
//!
//! `CYCLONE_SEED=n` runs one seed only, `CYCLONE_SEEDS=n` the first n of each,
//! `CYCLONE_PROTOCOL=name` one protocol.

mod model;
mod world;

use cyclone_fabric::sim::{Delay, Faults, SimConfig, SimFabric, UsedBy};
use cyclone_fabric::{AppendBy, FabricError, FlushBy, Token, WriteOrder};
use cyclone_replication::{
    BackupConfig, Protocol, ReplicationError, SenderConfig, SenderId, backup, sender,
};

use world::{Plan, World};

const PROTOCOLS: [Protocol; 8] = [
    Protocol::Rpc,
    Protocol::Rwrite,
    Protocol::Batch,
    Protocol::Share,
    Protocol::Faa,
    Protocol::Rowan,
    Protocol::Tailwind,
    Protocol::Hyperloop,
];

fn protocols() -> Vec<Protocol> {
    match std::env::var("CYCLONE_PROTOCOL") {
        Ok(name) => vec![name.parse().expect("CYCLONE_PROTOCOL names a protocol")],
        Err(_) => PROTOCOLS.to_vec(),
    }
}

/// Says which run failed.
struct OnPanic(String);

impl Drop for OnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("failed: {}", self.0);
        }
    }
}

fn seeds(count: u64) -> Vec<u64> {
    match std::env::var("CYCLONE_SEED") {
        Ok(seed) => vec![seed.parse().expect("CYCLONE_SEED is a number")],
        Err(_) => {
            let more = std::env::var("CYCLONE_SEEDS").ok();
            let count = more.map_or(count, |more| {
                more.parse().expect("CYCLONE_SEEDS is a number")
            });
            (0..count).collect()
        }
    }
}

/// Runs each seed, and answers what happened to all of them together.
fn run(name: &str, plan: &Plan, count: u64) -> Faults {
    let mut faults = Faults::default();
    for protocol in protocols() {
        let (mut durable, mut failed, mut too_large) = (0, 0, 0);
        for seed in seeds(count) {
            let _on_panic = OnPanic(format!("{name}, {protocol}, CYCLONE_SEED={seed}"));
            let mut world = World::new(protocol, seed, plan);
            world.run();
            world.heal_and_check();
            durable += world.durable();
            failed += world.failed();
            too_large += world.too_large();
            faults = sum(&faults, &world.faults());
        }
        eprintln!(
            "{name}, {protocol}: {durable} records durable, {failed} failed and were retried"
        );
        // A run in which nothing fails, or nothing else, tells nothing.
        assert!(durable > 10 * seeds(count).len() && failed > 0);
        assert!(too_large > 0 || protocol != Protocol::Tailwind);
    }
    eprintln!("{name}: {faults:?}");
    faults
}

fn sum(a: &Faults, b: &Faults) -> Faults {
    Faults {
        crashes: a.crashes + b.crashes,
        kills: a.kills + b.kills,
        breaks: a.breaks + b.breaks,
        lost_completions: a.lost_completions + b.lost_completions,
        torn: a.torn + b.torn,
        never_began: a.never_began + b.never_began,
        slow: a.slow + b.slow,
        overtakes: a.overtakes + b.overtakes,
        held_by_partition: a.held_by_partition + b.held_by_partition,
        no_segment: a.no_segment + b.no_segment,
        late_landings: a.late_landings + b.late_landings,
        refused: a.refused + b.refused,
    }
}

/// Every fault that the plan is about must have happened.
fn expect(faults: &Faults, kinds: &[(&str, u64)]) {
    if std::env::var("CYCLONE_SEED").is_ok() || std::env::var("CYCLONE_PROTOCOL").is_ok() {
        return;
    }
    for (kind, count) in kinds {
        assert!(*count > 0, "no {kind} in all runs: {faults:?}");
    }
}

fn plan(sim: SimConfig) -> Plan {
    Plan {
        servers: 2,
        workers: 2,
        backups: 3,
        steps: 2500,
        faults: true,
        first_words: false,
        sim,
    }
}

#[test]
fn without_faults_every_record_becomes_durable() {
    let calm = Plan {
        faults: false,
        ..plan(SimConfig::calm())
    };
    for protocol in protocols() {
        for seed in seeds(4) {
            let _on_panic = OnPanic(format!("calm, {protocol}, CYCLONE_SEED={seed}"));
            let mut world = World::new(protocol, seed, &calm);
            world.run();
            world.heal_and_check();
            assert_eq!(world.failed(), 0);
            assert!(world.durable() > 120, "{} durable", world.durable());
        }
    }
}

#[test]
fn crashes_breaks_partitions_and_fences_lose_nothing() {
    let faults = run("ordered", &plan(SimConfig::default()), 12);
    let kinds = [
        ("crash", faults.crashes),
        ("death", faults.kills),
        ("slow packet", faults.slow),
        ("torn operation", faults.torn),
        ("operation that never began", faults.never_began),
        ("overtaking", faults.overtakes),
        ("partition", faults.held_by_partition),
        ("append without a segment", faults.no_segment),
    ];
    expect(&faults, &kinds);
}

#[test]
fn nor_do_connections_that_break_all_the_time() {
    let faults = run("hostile", &plan(SimConfig::hostile()), 12);
    let kinds = [
        ("break", faults.breaks),
        ("lost completion", faults.lost_completions),
        ("torn operation", faults.torn),
    ];
    expect(&faults, &kinds);
}

#[test]
fn nor_does_a_fabric_that_keeps_no_order() {
    let unordered = SimConfig {
        write_order: WriteOrder::None,
        ..SimConfig::hostile()
    };
    let faults = run("unordered", &plan(unordered), 12);
    expect(&faults, &[("torn operation", faults.torn)]);
}

#[test]
fn nor_does_a_fabric_that_needs_the_target_and_small_transfers() {
    let small = SimConfig {
        target_polls: true,
        max_transfer: 9000,
        in_flight_survives: false,
        ..SimConfig::default()
    };
    run("small", &plan(small), 6);
}

/// Every line of 64 bytes takes effect separately, with time in between for everything else.
#[test]
fn nor_do_writes_that_take_effect_line_by_line() {
    let lines = SimConfig {
        burst_lines: 1,
        burst_gap_ns: 2_000,
        flush: FlushBy::Target,
        break_per_million: 1_000,
        ..SimConfig::default()
    };
    let faults = run("lines", &plan(lines), 8);
    expect(&faults, &[("torn operation", faults.torn)]);
}

/// Addresses by reservation: a sender may be paused, fenced off or killed between its reservation
/// and its write.
#[test]
fn nor_do_senders_that_stall_with_an_address() {
    let stalled = SimConfig {
        append: Some(AppendBy::Reservation),
        burst_lines: 1,
        burst_gap_ns: 1_000,
        ..SimConfig::default()
    };
    run("stalled", &plan(stalled), 8);
}

/// A NIC that tells nothing: first words and 2 ms; writes of more than 1 ms are made again. Every
/// line lands on its own, so that many are slow.
#[test]
fn nor_do_segments_found_by_their_first_words() {
    let slow = SimConfig {
        used_by: UsedBy::FirstWords { settle_ns: 0 },
        burst_lines: 1,
        burst_gap_ns: 20_000,
        delay: Delay {
            slow_per_mille: 40,
            slow_ns: 4_000_000,
            ..SimConfig::default().delay
        },
        ..SimConfig::default()
    };
    let first_words = Plan {
        first_words: true,
        ..plan(slow)
    };
    let faults = run("first words", &first_words, 6);
    expect(&faults, &[("slow packet", faults.slow)]);
}

/// What a provider cannot do is refused when a sender or a backup is made, by name.
#[test]
fn missing_features_are_refused() {
    let refused = |protocol: Protocol, sim: SimConfig| {
        let fabric = SimFabric::new(1, sim);
        let endpoint = || Box::new(fabric.endpoint_with("backup", 64 << 10));
        let config = BackupConfig::new(Token(1), 2);
        let sender_id = SenderId {
            server: 0,
            worker: 0,
        };
        let backup = backup(protocol, endpoint(), config).err();
        let endpoint = Box::new(fabric.endpoint_with("sender", 4096));
        let sender = sender(
            protocol,
            endpoint,
            SenderConfig::new(sender_id, 1, Token(1)),
        )
        .err();
        for error in [backup, sender] {
            let unsupported = matches!(
                error,
                Some(ReplicationError::Fabric(FabricError::Unsupported { .. }))
            );
            assert!(unsupported, "{protocol}: {error:?}");
        }
    };
    refused(
        Protocol::Faa,
        SimConfig {
            atomics: false,
            ..SimConfig::default()
        },
    );
    refused(
        Protocol::Rowan,
        SimConfig {
            append: None,
            ..SimConfig::default()
        },
    );
}

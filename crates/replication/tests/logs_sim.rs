//! Rowan and Tailwind under the faults of the simulated fabric: senders that die while they append,
//! backups that lose power, stalled senders, broken connections, fenced servers, segments used
//! again and again.

mod logs;

use cyclone_fabric::sim::{Delay, SimConfig, UsedBy};
use cyclone_fabric::{AppendBy, FlushBy, WriteOrder};
use cyclone_replication::Protocol;
use logs::{Plan, World};

fn run(plan: &Plan, seeds: std::ops::Range<u64>) {
    let (mut durable, mut reused) = (0, 0);
    for seed in seeds {
        let mut world = World::new(plan, seed);
        world.run();
        durable += world.durable();
        reused += world.reused;
        assert!(
            world.durable() > 0,
            "seed {seed}: nothing completed: {:?}",
            world.stats()
        );
        if plan.faults_per_mille == 0 && plan.sim.break_per_million == 0 {
            assert_eq!(world.pending(), 0, "seed {seed}: records are stuck");
        }
    }
    assert!(durable > 1_000 && reused > 10, "{durable} {reused}");
}

fn both(plan: impl Fn(Protocol) -> Plan, seeds: std::ops::Range<u64>) {
    for protocol in [Protocol::Rowan, Protocol::Tailwind] {
        run(&plan(protocol), seeds.clone());
    }
}

#[test]
fn without_faults_every_record_completes() {
    both(
        |protocol| Plan {
            faults_per_mille: 0,
            ..Plan::new(protocol)
        },
        0..6,
    );
}

#[test]
fn what_completed_is_found_after_any_fault() {
    both(Plan::new, 100..140);
}

#[test]
fn what_completed_is_found_on_a_hostile_network() {
    both(
        |protocol| {
            let plan = Plan::new(protocol);
            Plan {
                sim: SimConfig {
                    memory_bytes: plan.sim.memory_bytes,
                    max_append: plan.sim.max_append,
                    ..SimConfig::hostile()
                },
                ..plan
            }
        },
        200..225,
    );
}

/// Records of several blocks, interleaved with other senders'.
#[test]
fn large_records_are_whole_or_absent() {
    both(
        |protocol| {
            let plan = Plan::new(protocol);
            Plan {
                max_record: 1_500,
                sim: SimConfig {
                    memory_bytes: 512 << 10,
                    ..plan.sim.clone()
                },
                ..plan
            }
        },
        300..325,
    );
}

/// Addresses by reservation: a paused sender has an address and has not written; its segment must
/// not be used again.
#[test]
fn stalled_senders_hold_their_segments() {
    let plan = Plan::new(Protocol::Rowan);
    let plan = Plan {
        sim: SimConfig {
            append: Some(AppendBy::Reservation),
            ..plan.sim.clone()
        },
        faults_per_mille: 20,
        ..plan
    };
    run(&plan, 400..425);
}

/// A NIC that tells nothing: first words, 2 ms, and slow writes made again.
#[test]
fn first_words_and_times_find_used_segments() {
    let plan = Plan::new(Protocol::Rowan);
    let plan = Plan {
        sim: SimConfig {
            used_by: UsedBy::FirstWords { settle_ns: 0 },
            delay: Delay {
                slow_per_mille: 40,
                slow_ns: 4_000_000,
                ..plan.sim.delay
            },
            ..plan.sim.clone()
        },
        first_words: true,
        ..plan
    };
    run(&plan, 500..525);
}

/// A provider without order within a connection: each write is waited for.
#[test]
fn without_order_tailwind_waits() {
    let plan = Plan::new(Protocol::Tailwind);
    let plan = Plan {
        sim: SimConfig {
            write_order: WriteOrder::None,
            ..plan.sim.clone()
        },
        ..plan
    };
    run(&plan, 600..625);
}

#[test]
fn flushes_by_the_targets_cpu_are_waited_for() {
    both(
        |protocol| {
            let plan = Plan::new(protocol);
            Plan {
                sim: SimConfig {
                    flush: FlushBy::Target,
                    ..plan.sim.clone()
                },
                ..plan
            }
        },
        700..715,
    );
}

/// Full buffers move on to another backup, lost backups are replaced, their buffers written again
/// there.
#[test]
fn candidates_take_over() {
    let plan = Plan::new(Protocol::Tailwind);
    let plan = Plan {
        backups: 4,
        senders: 3,
        rotate: true,
        ..plan
    };
    run(&plan, 800..830);
}

//! Clusters on the simulated fabric under crashes of one server and of all, compared with the
//! replies to clients.

mod model;
mod world;

use std::sync::atomic::Ordering;

use cyclone_fabric::sim::SimConfig;
use cyclone_replication::Protocol;
use world::{Plan, World};

fn each(plan: impl Fn(Protocol) -> Plan, seeds: std::ops::Range<u64>, run: impl Fn(&mut World)) {
    for protocol in Protocol::ALL {
        // Shown with a failure.
        println!("{protocol}");
        let mut acknowledged = 0;
        for seed in seeds.clone() {
            let mut world = World::new(&plan(protocol), seed);
            world.settle();
            run(&mut world);
            world.check();
            acknowledged += world.model.acknowledged;
        }
        assert!(acknowledged > 100, "{protocol}: {acknowledged}");
    }
}

#[test]
fn all_protocols_serve() {
    each(Plan::new, 0..4, |world| world.run(3_000));
}

#[test]
fn what_was_acknowledged_survives_a_servers_end() {
    each(
        |protocol| Plan {
            servers: 4,
            shards: 8,
            ..Plan::new(protocol)
        },
        100..106,
        |world| {
            for power in [true, false] {
                world.run(1_500);
                let live = world.live();
                let victim = live[world.random.below(live.len() as u64) as usize];
                world.fail_over(victim, power);
                world.check();
            }
            world.run(500);
        },
    );
}

#[test]
fn what_was_acknowledged_survives_a_loss_of_power_everywhere() {
    each(Plan::new, 200..206, |world| {
        for _ in 0..3 {
            world.run(1_200);
            world.cold_start();
            world.check();
        }
        world.run(500);
    });
}

/// Records of several blocks, which lie apart at backups.
#[test]
fn large_objects() {
    each(
        |protocol| Plan {
            max_value: 900,
            memory_bytes: 2 << 20,
            sim: SimConfig {
                max_append: 256,
                ..SimConfig::default()
            },
            ..Plan::new(protocol)
        },
        300..306,
        |world| {
            world.run(1_500);
            world.cold_start();
            world.check();
            world.run(500);
            world.fail_over(1, true);
        },
    );
}

#[test]
fn a_hostile_network() {
    each(
        |protocol| Plan {
            sim: SimConfig::hostile(),
            ..Plan::new(protocol)
        },
        400..404,
        |world| {
            world.run(2_500);
            world.fail_over(0, true);
            world.run(500);
        },
    );
}

/// Values are written over and over: segments are cleaned and used again, through losses of power
/// too.
#[test]
fn space_is_used_again() {
    each(
        |protocol| Plan {
            keys: 40,
            max_value: 300,
            memory_bytes: 512 << 10,
            may_be_full: true,
            ..Plan::new(protocol)
        },
        500..502,
        |world| {
            for round in 0..3 {
                world.run(6_000);
                world.settle();
                if round < 2 {
                    world.cold_start();
                }
                world.check();
            }
            for id in world.live() {
                let control = world.node(id).control();
                let stats = control.stats();
                assert!(stats.cleaned > 10, "{stats:?}");
                assert_eq!(stats.refused, 0, "{stats:?}");
            }
        },
    );
}

/// A log that has no segment at this moment refuses nothing: memory is not full.
#[test]
fn writes_wait_for_a_segment() {
    each(Plan::new, 650..652, |world| {
        world.burst(150);
        world.run(500);
        world.settle();
        assert_eq!(world.full, 0);
        world.check();
    });
}

/// A memory full of values refuses more, but takes deletions, and is of use again afterwards.
#[test]
fn a_full_memory_refuses_values_and_takes_deletions() {
    each(
        |protocol| Plan {
            keys: 1,
            memory_bytes: 384 << 10,
            may_be_full: true,
            ..Plan::new(protocol)
        },
        600..602,
        |world| {
            for _ in 0..2 {
                let written = world.fill();
                assert!(written > 50, "{written}");
                world.delete(0..written);
                world.settle();
                world.check();
            }
            world.run(1_000);
        },
    );
}

/// Every server fails once, comes back empty, and is a full replica before the next one fails.
#[test]
fn servers_fail_one_after_the_other_and_join_again() {
    each(
        |protocol| Plan {
            servers: 3,
            copies: 2,
            ..Plan::new(protocol)
        },
        700..703,
        |world| {
            for n in 0..3 {
                world.run(1_000);
                world.fail_over(n, n % 2 == 0);
                world.run(300);
                world.rejoin(n);
                world.check();
            }
            world.cold_start();
        },
    );
}

/// A primary fails while another server joins its shards. What it had in flight may be durable at
/// the joining server and nowhere else: it is either seen by all clients from then on or by none,
/// also once that copy has become a full one.
#[test]
fn a_primary_fails_while_a_server_joins() {
    each(
        |protocol| Plan {
            servers: 4,
            copies: 3,
            shards: 8,
            ..Plan::new(protocol)
        },
        1000..1012,
        |world| {
            world.run(600);
            world.fail_over(0, true);
            world.run(200);
            world.begin_rejoin(0);
            let steps = 100 + world.random.below(400) as usize;
            world.run(steps);
            let joins = world.joins_of(0);
            assert!(!joins.is_empty());
            let shard = joins[world.random.below(joins.len() as u64) as usize];
            let primary = world.configuration.shards[usize::from(shard)].primary;
            let power = world.random.below(2) == 0;
            world.fail_over(primary, power);
            world.check();
            world.run(200);
            world.finish_rejoin(0);
            world.check();
            // Every replica of before is gone but the one that joined.
            world.run(100);
            let other = world.live().into_iter().find(|&id| id != 0);
            world.fail_over(other.expect("one of two"), power);
            world.check();
        },
    );
}

/// Who joins is asked for what a failed primary had in flight, and fails as well before it has
/// answered.
#[test]
fn a_server_that_joins_fails_right_after_the_primary() {
    each(
        |protocol| Plan {
            servers: 4,
            copies: 3,
            shards: 8,
            ..Plan::new(protocol)
        },
        1100..1106,
        |world| {
            world.run(600);
            world.fail_over(0, true);
            world.run(200);
            world.begin_rejoin(0);
            let steps = 100 + world.random.below(400) as usize;
            world.run(steps);
            world.fail_over(1, true);
            let steps = world.random.below(60) as usize;
            world.run(steps);
            world.fail_over(0, false);
            world.check();
            world.run(300);
        },
    );
}

/// Endpoints of a new term cannot be opened for a while, on a full disk for instance: servers that
/// have committed wait for those that have not, clients with them, and nothing is lost.
#[test]
fn a_commitment_that_fails_is_repeated() {
    each(Plan::new, 1200..1203, |world| {
        for _ in 0..3 {
            world.run(700);
            let failing = 1 + world.random.below(8) as u32;
            world.failing.store(failing, Ordering::Relaxed);
            world.configuration.term += 1;
            world.reconfigure();
            assert_eq!(world.failing.load(Ordering::Relaxed), 0);
        }
        world.failing.store(3, Ordering::Relaxed);
        world.fail_over(1, true);
    });
}

/// Shards move under requests; a shard comes back to where it was, too, and what it left there does
/// not count.
#[test]
fn shards_move_while_clients_write() {
    let fetched = std::cell::Cell::new(0);
    each(
        |protocol| Plan {
            servers: 3,
            copies: 2,
            ..Plan::new(protocol)
        },
        800..805,
        |world| {
            for round in 0..8 {
                world.run(400);
                if let Some(it) = world.some_move() {
                    world.begin_move(it);
                    world.run(300);
                    world.finish_move(it);
                    fetched.set(fetched.get() + world.fetched());
                    world.run(100);
                }
                if round % 3 == 2 {
                    world.check();
                }
            }
            world.cold_start();
            world.check();
        },
    );
    assert!(fetched.get() > 40, "{} keys were fetched", fetched.get());
}

#[test]
fn a_move_is_rolled_back_when_either_side_ends() {
    each(
        |protocol| Plan {
            servers: 4,
            copies: 3,
            shards: 8,
            ..Plan::new(protocol)
        },
        900..906,
        |world| {
            world.run(1_000);
            let it = world.some_move().expect("one of four has no copy");
            world.begin_move(it);
            let steps = world.random.below(600) as usize;
            world.run(steps);
            let (targets, power) = (world.random.below(2) == 0, world.random.below(2) == 0);
            world.roll_back(it, targets, power);
            world.run(500);
            world.check();
            world.run(200);
        },
    );
}

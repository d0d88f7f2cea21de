//! Runs with a known course.

use std::sync::Arc;

use super::world::World;
use crate::config::{Configuration, MigrationKind, ServerId, Standing};
use crate::manager::{Command, CommandError};

/// A cluster that works, with writes in flight.
fn cluster(seed: u64, servers: u64, replication: u8) -> World {
    let mut world = World::new(seed, 2, servers, 12, replication);
    world.run(100_000);
    assert_eq!(world.known.broken, None);
    assert_eq!(config(&world).term, 1);
    world
}

fn config(world: &World) -> Arc<Configuration> {
    let processes = world.managers.iter().filter_map(|m| m.process.as_ref());
    let in_office = processes.filter(|p| p.manager.in_office(p.clock.read(world.now_us)));
    let found = in_office.filter_map(|p| p.manager.configuration()).next();
    found.expect("somebody is in office").0.clone()
}

fn in_office(world: &World) -> usize {
    let holds = |m: &super::world::ManagerNode| {
        let process = m.process.as_ref();
        process.is_some_and(|p| p.manager.in_office(p.clock.read(world.now_us)))
    };
    world
        .managers
        .iter()
        .position(holds)
        .expect("somebody is in office")
}

/// Runs until something holds; answers how long that took.
fn until(world: &mut World, what: &str, holds: impl Fn(&World) -> bool) -> u64 {
    let began_us = world.now_us;
    while !holds(world) {
        world.run(200);
        assert_eq!(world.known.broken, None);
        assert!(world.now_us < began_us + 3_000_000, "{what} never holds");
    }
    world.now_us - began_us
}

fn all_served(world: &World) -> bool {
    (0..world.shards).all(|shard| {
        world.servers.iter().any(|s| {
            let local_us = s.clock.read(world.now_us);
            s.process.as_ref().is_some_and(|p| {
                p.promoted.contains_key(&shard) && p.holder.may_serve(shard, local_us).is_ok()
            })
        })
    })
}

fn serves_nothing(world: &World, id: u64) -> bool {
    let server = &world.servers[id as usize - 1];
    let local_us = server.clock.read(world.now_us);
    server
        .process
        .as_ref()
        .is_none_or(|p| (0..world.shards).all(|s| p.holder.may_serve(s, local_us).is_err()))
}

/// A server dies: with a lease of 10 ms its shards are served by their backups soon, spread over
/// all that live, and get new backups in time.
#[test]
fn a_dead_servers_shards_go_to_its_backups() {
    let mut world = cluster(1, 4, 3);
    world.crash_server(0, 5_000_000);
    until(&mut world, "the failure is noticed", |w| {
        !config(w).is_up(ServerId(1))
    });
    let took_us = until(&mut world, "all is served", all_served);
    assert!(took_us < 40_000, "{took_us}");
    let promoted = config(&world);
    for id in 2..=4 {
        let serves = promoted
            .shards
            .iter()
            .filter(|s| s.primary == ServerId(id))
            .count();
        // By weight; the counts come out nearly even, as the weights do.
        assert!((3..=5).contains(&serves), "{promoted:?}");
    }
    until(&mut world, "all copies are there", |w| {
        config(w).shards.iter().all(|s| s.full.len() == 3)
    });
    assert!(world.tally["copied"] >= 9);
}

/// A primary is paused, others take over; when it wakes it serves nothing, and comes back
/// empty-handed.
#[test]
fn a_paused_primary_finds_its_lease_gone() {
    let mut world = cluster(2, 4, 2);
    world.servers[1].paused_until_us = world.now_us + 60_000;
    world.run(60_000);
    assert!(all_served(&world) && serves_nothing(&world, 2));
    world.run(300);
    assert!(serves_nothing(&world, 2));
    until(&mut world, "it is a member again", |w| {
        config(w).is_up(ServerId(2))
    });
    until(&mut world, "it gets work again", |w| !serves_nothing(w, 2));
}

/// The manager in office dies: the other takes over, the shard map stays.
#[test]
fn a_managers_death_moves_nothing() {
    let mut world = cluster(3, 4, 3);
    let before = config(&world).shards.clone();
    let dead = in_office(&world);
    world.crash_manager(dead, 10_000_000);
    world.run(15_000);
    assert!(
        (1..=4).all(|id| serves_nothing(&world, id)),
        "served without a manager"
    );
    until(&mut world, "all is served again", all_served);
    assert_eq!(in_office(&world), 1 - dead);
    assert_eq!(config(&world).shards, before);
}

/// Power fails everywhere, in the midst of a migration; servers come back one by one. Shards
/// without a server go to others, and the migration goes on. //= rowan §4.7
#[test]
fn after_a_loss_of_power_all_is_as_before() {
    let mut world = cluster(4, 4, 2);
    let shard = config(&world)
        .numbered()
        .find(|(_, s)| !s.has(ServerId(4)))
        .unwrap()
        .0;
    let target = ServerId(4);
    assert!(world.command(Command::Move { shard, target }));
    until(&mut world, "it moves", |w| config(w).migrations.len() == 1);
    let before = config(&world);
    assert_eq!(before.migrations[0].kind, MigrationKind::Primary);
    (0..4).for_each(|at| world.crash_server(at, 40_000 + 30_000 * at as u64));
    (0..2).for_each(|at| world.crash_manager(at, 35_000));
    until(&mut world, "all are back", |w| {
        w.now_us > 250_000 && config(w).up().filter(|m| m.session == 2).count() == 4
    });
    until(&mut world, "all is served", all_served);
    let after = config(&world);
    let copies = |config: &Configuration| -> Vec<Vec<ServerId>> {
        let of = |s: &crate::Shard| s.copies().map(|c| c.server).collect();
        config.shards.iter().map(of).collect()
    };
    let unmoved = copies(&before) == copies(&after);
    assert!(
        unmoved || after.migrations.is_empty(),
        "{before:?} {after:?}"
    );
    until(&mut world, "it has moved", |w| {
        config(w).migrations.is_empty()
    });
    assert_eq!(config(&world).shards[usize::from(shard)].primary, target);
}

/// The target dies while a shard moves to it: the source serves again, with everything that was
/// acknowledged meanwhile.
#[test]
fn a_migration_whose_target_dies_is_rolled_back() {
    let mut world = cluster(5, 4, 2);
    let (shard, source) = {
        let config = config(&world);
        let found = config
            .numbered()
            .find(|(_, s)| !s.has(ServerId(4)))
            .unwrap();
        (found.0, found.1.primary)
    };
    world.hot = Some(shard);
    let target = ServerId(4);
    assert!(world.command(Command::Move { shard, target }));
    until(&mut world, "the target serves", |w| {
        let process = w.servers[3].process.as_ref().unwrap();
        process.promoted.contains_key(&shard)
    });
    world.run(1500);
    assert_eq!(config(&world).migrations.len(), 1, "too late");
    world.crash_server(3, 10_000_000);
    until(&mut world, "it is rolled back", |w| {
        config(w).migrations.is_empty()
    });
    assert_eq!(config(&world).shards[usize::from(shard)].primary, source);
    until(&mut world, "all is served", all_served);
}

/// A shard draws most requests: it goes to a server that has little to do.
#[test]
fn a_hot_shard_moves() {
    let mut world = cluster(6, 4, 2);
    let (hot, from) = (5, config(&world).shards[5].primary);
    world.hot = Some(hot);
    until(&mut world, "shards have moved", |w| {
        let now = config(w);
        let own = now.shards.iter().filter(|s| s.primary == from).count();
        now.migrations.is_empty() && (own < 3 || now.shards[5].primary != from)
    });
    world.run(400_000);
    assert_eq!(world.known.broken, None);
}

/// A server is drained: it holds nothing in the end, and leaves; a draining that leaves too few is
/// refused.
#[test]
fn a_drained_server_leaves() {
    let mut world = cluster(7, 4, 3);
    assert!(world.command(Command::Drain(ServerId(2))));
    until(&mut world, "it has left", |w| w.tally.contains_key("left"));
    until(&mut world, "it is forgotten", |w| {
        config(w).member(ServerId(2)).is_none()
    });
    let left = config(&world);
    assert!(
        left.shards
            .iter()
            .all(|s| s.full.len() == 3 && !s.has(ServerId(2)))
    );
    let at = in_office(&world);
    let manager = &mut world.managers[at].process.as_mut().unwrap().manager;
    let refused = manager.command(Command::Drain(ServerId(3)));
    assert_eq!(refused, Err(CommandError::TooFew { left: 2, wanted: 3 }));
    let refused = manager.command(Command::Forget(ServerId(3)));
    assert_eq!(refused, Err(CommandError::Alive(ServerId(3))));
}

/// The only copies are with a server that fails: they stay its own until it returns. Another memory
/// under its name is refused. An operator may give them up.
#[test]
fn the_last_copy_is_waited_for() {
    let mut world = cluster(8, 3, 1);
    world.crash_server(0, 200_000);
    until(&mut world, "it has failed", |w| {
        !config(w).is_up(ServerId(1))
    });
    let down = config(&world);
    let member = down.member(ServerId(1)).expect("remembered");
    assert_eq!(member.standing, Standing::Down);
    // Another memory under its name.
    world.servers[0].incarnation += 1;
    world.servers[0].down_until_us = 0;
    until(&mut world, "it is refused", |w| {
        w.tally.contains_key("refused")
    });
    assert!(!config(&world).is_up(ServerId(1)));
    // The right one.
    world.servers[0].incarnation -= 1;
    world.crash_server(0, 1000);
    until(&mut world, "all is served", all_served);
    world.run(20_000);
    // It dies again, and is given up.
    world.crash_server(0, 100_000_000);
    until(&mut world, "it has failed", |w| {
        !config(w).is_up(ServerId(1))
    });
    world.known.acked.clear();
    assert!(world.command(Command::Forget(ServerId(1))));
    until(&mut world, "all is served", all_served);
    assert_eq!(config(&world).member(ServerId(1)), None);
}

/// A server joins: it gets its share without anybody asking.
#[test]
fn a_new_server_gets_its_share() {
    let mut world = cluster(9, 3, 2);
    world.write_every = 0;
    world.add_server(4);
    until(&mut world, "it serves", |w| {
        let config = config(w);
        config
            .shards
            .iter()
            .filter(|s| s.primary == ServerId(4))
            .count()
            >= 2
            && config
                .shards
                .iter()
                .filter(|s| s.has_full(ServerId(4)))
                .count()
                >= 4
    });
}

//! Tests of several logs in a cluster that suffers only what the test does to it.

use crate::plan::{Kind, Plan};
use crate::world::World;

fn calm(seed: u64, logs: u16) -> Plan {
    let mut plan = Kind::ALL
        .iter()
        .fold(Plan::draw(seed), |plan, &kind| plan.without(kind));
    (plan.nodes, plan.clients) = (3, 0);
    plan.with_logs(logs);
    plan
}

/// The replica that leads every log, if one does.
fn leader_of_all(world: &World) -> Option<usize> {
    world
        .machines
        .iter()
        .position(|machine| machine.node().is_some_and(|node| node.leads()))
}

/// The leader is killed again and again; each time all logs come together at another one, within a
/// few elections. A client's write to every log is then taken.
#[test]
fn all_logs_come_together_after_every_kill() {
    for seed in 0..12 {
        let place = tempfile::tempdir().expect("temporary directory");
        let plan = calm(seed, 4);
        let election_us = plan.election_us;
        let mut world = World::new(plan, place.path()).expect("set up");
        world.run_until(20 * election_us).expect("runs");
        let mut longest_us = 0;
        for kill in 0..15 {
            let leader = leader_of_all(&world)
                .unwrap_or_else(|| panic!("seed {seed}: no leader of all before kill {kill}"));
            world.stop(leader, false);
            let killed_us = world.now_us;
            while leader_of_all(&world).is_none() {
                let next_us = world.now_us + election_us / 20;
                world.run_until(next_us).expect("runs");
                assert!(
                    world.now_us < killed_us + 30 * election_us,
                    "seed {seed}, kill {kill}: the logs do not come together"
                );
            }
            longest_us = longest_us.max(world.now_us - killed_us);
            world.start(leader).expect("starts again");
            let settled_us = world.now_us + 3 * election_us;
            world.run_until(settled_us).expect("runs");
        }
        println!(
            "seed {seed}: longest {} elections",
            longest_us / election_us
        );
    }
}

/// An idle cluster with four logs sends about as many datagrams as one with a single log:
/// heartbeats share them.
#[test]
fn heartbeats_of_all_logs_share_datagrams() {
    let datagrams = |logs: u16| {
        let place = tempfile::tempdir().expect("temporary directory");
        let plan = calm(3, logs);
        let (settled_us, heartbeat_us) = (30 * plan.election_us, plan.heartbeat_us);
        let mut world = World::new(plan, place.path()).expect("set up");
        world.run_until(settled_us).expect("runs");
        assert!(leader_of_all(&world).is_some());
        let before = world.report().datagrams;
        world
            .run_until(settled_us + 1_000 * heartbeat_us)
            .expect("runs");
        world.report().datagrams - before
    };
    let (one, four) = (datagrams(1), datagrams(4));
    // Two followers' heartbeats and their answers, a quarter of those of a cluster with work.
    let most = 1_000 * 4 / 4;
    assert!(one * 10 <= most * 11, "{one} datagrams, which is no rest");
    assert!(
        four * 10 <= one * 11,
        "{one} datagrams with one log, {four} with four"
    );
}

//! Runs: chaos under many seeds, planted mistakes that must be found, and stories with a known end.

use super::world::World;
use crate::planted::{self, Mistake};

/// One run of troubles, a time to heal, and the last checks.
fn chaos(seed: u64) -> World {
    troubled(seed, false, false)
}

fn troubled(seed: u64, embedded: bool, leases_differ: bool) -> World {
    let (servers, replication) = (3 + seed % 3, 2 + (seed / 3 % 2) as u8);
    let mut world = World::new(seed, 1 + (seed % 3) as usize, servers, 8, replication);
    world.leases_differ = leases_differ;
    if embedded {
        world.embed();
    }
    world.run(60_000);
    (world.net.loss, world.net.rare_us) = (40, 25_000);
    for _ in 0..40 {
        world.trouble();
        let pause = world.dice.below(25_000);
        world.run(pause);
    }
    world.heal();
    let drained: Vec<_> = world.servers.iter().map(|server| server.id).collect();
    world.run(400_000);
    for id in drained {
        world.command(crate::manager::Command::Undrain(id));
    }
    // Loads are even from here on; what is still being evened out ends.
    world.run(1_500_000);
    world.write_every = 0;
    world.run(400_000);
    if world.known.broken.is_none() {
        world.check_healed();
    }
    world
}

fn assert_whole(world: &World, seed: u64) {
    if let Some(broken) = &world.known.broken {
        for line in world.trace.iter().rev().take(400).rev() {
            println!("{line}");
        }
        panic!("seed {seed}: {broken}");
    }
}

#[test]
fn chaos_breaks_nothing() {
    let seeds = std::env::var("CM_SEEDS").ok();
    let seeds = seeds.and_then(|text| text.parse().ok()).unwrap_or(40u64);
    let first = std::env::var("CM_FIRST_SEED").ok();
    let first = first.and_then(|text| text.parse().ok()).unwrap_or(0u64);
    let mut tally = std::collections::BTreeMap::new();
    for seed in first..first + seeds {
        let world = chaos(seed);
        assert_whole(&world, seed);
        for (what, count) in world.tally {
            *tally.entry(what).or_insert(0) += count;
        }
    }
    println!("{tally:?}");
    for what in [
        "acknowledged",
        "promoted",
        "copied",
        "migrating",
        "in office",
        "done later",
    ] {
        assert!(tally.contains_key(what), "{what} never happened: {tally:?}");
    }
}

/// The same over the embedded store, whose replicas pause and crash with their managers and lose
/// memory lines that were not flushed.
#[test]
fn chaos_over_the_embedded_store() {
    let seeds = std::env::var("CM_SEEDS").ok();
    let seeds = seeds.and_then(|text| text.parse().ok()).unwrap_or(12u64);
    let (mut offices, mut written) = (0, 0);
    for seed in 0..seeds {
        let world = troubled(seed, true, false);
        assert_whole(&world, seed);
        offices += world.tally.get("in office").unwrap_or(&0);
        written += world.tally.get("written").unwrap_or(&0);
    }
    println!("{offices} times in office, {written} configurations");
    assert!(offices > seeds && written > seeds * 5);
}

/// The file is changed while the cluster runs: managers that begin have shorter or longer leases
/// than the one in office.
#[test]
fn managers_whose_leases_differ_break_nothing() {
    let seeds = std::env::var("CM_SEEDS").ok();
    let seeds = seeds.and_then(|text| text.parse().ok()).unwrap_or(20u64);
    for seed in 0..seeds {
        assert_whole(&troubled(seed, false, true), seed);
    }
}

/// Nothing reads a clock or draws at random.
#[test]
fn runs_repeat() {
    let (first, second) = (chaos(5), chaos(5));
    assert_eq!(first.trace, second.trace);
    assert_eq!(first.tally, second.tally);
}

/// The simulation notices each mistake.
#[test]
fn planted_mistakes_are_found() {
    let mistakes = [
        Mistake::LeaseNotAwaited,
        Mistake::AdoptionNotAwaited,
        Mistake::LeaseFromArrival,
        Mistake::DriftIgnored,
        Mistake::ServesUncommitted,
        Mistake::ServesOld,
        Mistake::JoiningPromoted,
        Mistake::RollbackKeepsTarget,
        Mistake::OfficeSeized,
        Mistake::OwnLeasesAssumed,
        Mistake::LastCopyDropped,
        Mistake::OldReportCounts,
        Mistake::LeaseBeforeAdoption,
        Mistake::MovedWithoutCopy,
    ];
    let mut missed = Vec::new();
    for mistake in mistakes {
        planted::plant(Some(mistake));
        let leases_differ = mistake == Mistake::OwnLeasesAssumed;
        let run = |seed| troubled(seed, false, leases_differ);
        let found = (0..200).find_map(|seed| Some((seed, run(seed).known.broken?)));
        planted::plant(None);
        match found {
            Some((seed, broken)) => println!("{mistake:?}: seed {seed}, {broken}"),
            None => missed.push(mistake),
        }
    }
    assert_eq!(missed, []);
}

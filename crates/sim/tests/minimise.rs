//! A failing run made smaller. Needs a bug to fail by: `cargo test --features planted`.
#![cfg(feature = "planted")]

use std::time::Duration;

use cyclone_sim::hunt::{self, Changes, Range};
use cyclone_sim::{Kind, run};
use cyclone_wire::planted::{Bug, plant};

/// A machine that loses its memory when no power fails during recovery needs one strike to lose it
/// by, and hardly any other.
#[test]
fn few_strikes_are_left_of_a_failing_run() {
    plant(Some(Bug::AmnesiaAccepted));
    let place = tempfile::tempdir().expect("temporary directory");
    let changes = Changes {
        without: vec![Kind::Recovery],
        ..Changes::default()
    };
    let mut first = 1;
    // One with something to leave out.
    let (seed, failure) = loop {
        let range = Range {
            first,
            count: 400,
            time: None,
        };
        let (_, failed) = hunt::hunt(range, &changes, place.path(), |_| {});
        let (seed, failure) = failed.expect("the planted bug is noticed");
        if failure.strikes >= 20 {
            break (seed, failure);
        }
        first = seed + 1;
    };
    let (before, time) = (failure.strikes, Duration::from_secs(120));
    let (smallest, failure) = hunt::minimise(seed, failure, &changes, place.path(), time);
    let left = match &smallest.strikes {
        Some(strikes) => strikes.0.len() as u64,
        None => failure.strikes,
    };
    println!(
        "{before} strikes of seed {seed}, {left} left: {}",
        smallest.command(seed, None)
    );
    assert!(left <= 4, "{left} of {before} strikes are left");
    let again = run(&smallest.plan(seed), place.path(), false).expect_err("still fails");
    assert_eq!((again.at_us, again.what), (failure.at_us, failure.what));
}

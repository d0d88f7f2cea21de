//! The power fails, and fails again before the next life has written much: what the first crash has
//! left is not to be destroyed by what the second one cuts short. `CYCLONE_SEED` replaces the
//! seeds.

#[path = "support/levels.rs"]
mod levels;

use cyclone_wal::flash::{FlashLog, FlashMode, SimDisk};
use levels::{Dice, Levels, WHO, open_flash, open_ring, seed, spec};

/// The fate of pages in flight: most are whole, torn or missing alike, so that writes overtake each
/// other.
fn fate(pages: usize, dice: &mut Dice) -> Vec<u8> {
    (0..pages).map(|_| dice.roll(3) as u8).collect()
}

/// Appends, and lets time pass; while writes are in flight, others follow.
fn go_on(levels: &mut Levels, last: &mut u64, dice: &mut Dice) {
    let len = [60, 1_500, 3_000, 3_900][dice.roll(4) as usize];
    *last += u64::from(levels.append(*last + 1, 1, len));
    let us = [0, 0, 20, 250][dice.roll(4) as usize];
    levels.pass(us, *last);
    let durable = levels.flash.durable_index();
    levels.ring.trim(durable).expect("within the log");
}

/// The second life, which the power ends at every step of it: the third one opens, with all that
/// was durable.
fn second_life(mut levels: Levels, trimmed: u64, dice: &mut Dice, context: &str) -> u64 {
    let mut last = levels.ring.last_index();
    let mut opened = 0;
    if levels.flash.fill() < 0.5 && dice.roll(2) == 0 {
        // There is room, whatever the pages say about it.
        levels.settle(last);
    }
    for step in 0..25 {
        go_on(&mut levels, &mut last, dice);
        for _ in 0..4 {
            let fate = fate(levels.disk.in_flight_pages(), dice);
            let disk = levels.disk.crashed_copy(|page| fate[page]);
            let context = format!("{context}; step {step} of the second life, fate {fate:?}");
            let third = open_flash(&disk, FlashMode::Second)
                .unwrap_or_else(|error| panic!("{error}: {context}"));
            let durable = levels.flash.durable_index();
            assert!(third.last_index() >= durable, "{context}");
            assert!(third.first_index() <= trimmed + 1, "{context}");
            opened += 1;
        }
    }
    opened
}

/// The log is almost full when it is trimmed, and the page that tells so overtakes one that is cut
/// short: it tells where the log begins, and lies where the next life writes first.
#[test]
fn a_second_crash_leaves_a_log_whose_recorded_beginning_lies_behind_its_end() {
    let mut opened = 0;
    for round in 0..3 {
        let seed = seed(4_100 + round);
        println!("seed {seed} (CYCLONE_SEED)");
        let mut dice = Dice(seed);
        let mut levels = Levels::new(FlashMode::Second, seed);
        let (mut last, mut trimmed) = (0, 0);
        for step in 0..400 {
            go_on(&mut levels, &mut last, &mut dice);
            if levels.flash.fill() > 0.9 && dice.roll(3) == 0 {
                trimmed = levels.flash.durable_index().saturating_sub(dice.roll(6));
                levels.flash.trim(trimmed);
            }
            for _ in 0..6 {
                let fate = fate(levels.disk.in_flight_pages(), &mut dice);
                let disk = levels.disk.crashed_copy(|page| fate[page]);
                let context = format!("seed {seed}, step {step}, fate {fate:?}");
                let (flash, found) = open(&disk, &context);
                if found == 0 || levels.flash.fill() < 0.5 && dice.roll(8) > 0 {
                    continue;
                }
                let image = levels.sim.image(|_| 0);
                let (region, sim, ring) = open_ring(&image).expect("memory is whole");
                let second = Levels {
                    region,
                    sim,
                    ring,
                    disk,
                    flash,
                    now_us: 1_000,
                };
                opened += second_life(second, trimmed, &mut dice, &context);
            }
        }
    }
    println!("{opened} third lives");
    assert!(opened > 1_000);
}

/// Opens an area; answers how many whole pages lie behind the log's end, too.
fn open(disk: &SimDisk, context: &str) -> (FlashLog, u64) {
    let opened = FlashLog::open(Box::new(disk.device()), spec(FlashMode::Second), &WHO);
    let (flash, found) = opened.unwrap_or_else(|error| panic!("{error}: {context}"));
    (flash, found.beyond)
}

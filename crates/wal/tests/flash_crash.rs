//! Both levels and a store, cut at every store, flush and fence of memory and with every fate of
//! the flash pages in flight: what was acknowledged is there. And the only level, whose memory is
//! lost with every crash. `CYCLONE_SEED` replaces the seeds.

#[path = "support/levels.rs"]
mod levels;

use cyclone_pmem::{Payload, Region};
use cyclone_wal::flash::{FlashLog, FlashMode, FlashSpec, FlashState, SimDisk};
use cyclone_wal::{Batch, HardState, NewEntry, Ring, RingSpec};
use levels::{
    Dice, LOG, Levels, RING_BYTES, RING_SLOTS, WHO, bytes, first_hard_state, open_flash, open_ring,
    seed,
};

/// What happens, one thing after the other; each touches memory or flash, never both.
#[derive(Clone, Copy, Debug)]
enum Op {
    /// An entry of so many bytes is persisted and acknowledged.
    Append(usize),
    /// Everything appended is committed and applied.
    Commit,
    /// Flash takes what is committed, and time passes.
    Drain(u64),
    /// The ring frees entries that are durable on flash.
    Release,
    /// The store flushes what it has applied.
    StoreFlush,
    /// Flash frees entries that the store has flushed.
    Trim,
}

#[derive(Clone, Copy, Debug, Default)]
struct Truth {
    appended: u64,
    commit: u64,
    flushed: u64,
}

fn script(seed: u64, steps: usize) -> Vec<Op> {
    let mut dice = Dice(seed);
    let op = |dice: &mut Dice| match dice.roll(10) {
        0..=3 => Op::Append(match dice.roll(5) {
            0 => 5_000,
            1 => 0,
            _ => dice.roll(400) as usize,
        }),
        4 => Op::Commit,
        5..=6 => Op::Drain(dice.roll(250)),
        7 => Op::Release,
        8 => Op::StoreFlush,
        _ => Op::Trim,
    };
    (0..steps).map(|_| op(&mut dice)).collect()
}

fn run(levels: &mut Levels, truth: &mut Truth, op: Op) {
    match op {
        Op::Append(len) => {
            let index = truth.appended + 1;
            let fits = levels.append(index, 1 + index / 7, len);
            // What a crash cut short was not acknowledged.
            truth.appended += u64::from(fits && !levels.sim.has_crashed());
        }
        Op::Commit => truth.commit = truth.appended,
        Op::Drain(us) => levels.pass(us, truth.commit),
        Op::Release => {
            let through = levels.flash.durable_index();
            levels.ring.trim(through).expect("within the log");
        }
        Op::StoreFlush => truth.flushed = truth.commit,
        Op::Trim => {
            levels.flash.trim(truth.flushed);
        }
    }
}

/// Recovers from what a crash left, and checks that every acknowledged entry that the store lacks
/// can be had.
fn recover(image: &[u8], disk: &cyclone_wal::flash::SimDisk, truth: Truth, context: &str) {
    let (region, sim, ring) = open_ring(image).unwrap_or_else(|error| panic!("{error}: {context}"));
    let mut flash =
        open_flash(disk, FlashMode::Second).unwrap_or_else(|error| panic!("{error}: {context}"));
    flash
        .join(&ring, truth.flushed)
        .unwrap_or_else(|error| panic!("{error}: {context}"));
    assert!(ring.last_index() >= truth.appended, "{context}");
    let mut levels = Levels {
        region,
        sim,
        ring,
        disk: disk.clone(),
        flash,
        now_us: 1_000_000,
    };
    let check = |levels: &mut Levels| {
        let mut next = truth.flushed + 1;
        let on_flash = levels.flash.last_index().min(levels.ring.last_index());
        if next <= on_flash && next < levels.ring.first_index() {
            for entry in levels
                .read(next, on_flash)
                .unwrap_or_else(|e| panic!("{e}: {context}"))
            {
                let wanted = bytes(entry.index, entry.term, entry.payload.len());
                assert_eq!((entry.index, entry.payload), (next, wanted), "{context}");
                next += 1;
            }
        }
        for index in next.max(levels.ring.first_index())..=truth.appended {
            let entry = levels
                .ring
                .entry(index)
                .unwrap_or_else(|| panic!("{index}: {context}"));
            let found: Vec<u8> = entry.segments().flatten().copied().collect();
            assert_eq!(found, bytes(index, 1 + index / 7, found.len()), "{context}");
            next = index + 1;
        }
        assert!(next > truth.appended, "entry {next} is nowhere: {context}");
    };
    check(&mut levels);
    // Life goes on: what was not drained is, and is there after another start.
    levels.settle(truth.commit);
    levels
        .ring
        .trim(levels.flash.durable_index())
        .expect("within the log");
    levels.flash = open_flash(&levels.disk, FlashMode::Second).expect("it opens again");
    assert!(
        levels.flash.last_index() >= truth.commit.max(truth.flushed),
        "{context}"
    );
    check(&mut levels);
}

/// Fates of the pages in flight: all of them where they are few, else a sample.
fn fates(pages: usize, dice: &mut Dice) -> Vec<Vec<u8>> {
    if pages <= 3 {
        let all = 3usize.pow(pages as u32);
        let fate = |number: usize| {
            (0..pages).map(move |page| (number / 3usize.pow(page as u32) % 3) as u8)
        };
        return (0..all).map(|number| fate(number).collect()).collect();
    }
    let mut some = vec![vec![0; pages], vec![1; pages]];
    some.extend((0..10).map(|_| (0..pages).map(|_| dice.roll(3) as u8).collect()));
    some
}

#[test]
fn any_cut_leaves_every_acknowledged_entry() {
    let mut recoveries = 0;
    for round in 0..3 {
        let seed = seed(700 + round);
        println!("seed {seed} (CYCLONE_SEED)");
        let ops = script(seed, 60);
        let mut dice = Dice(seed ^ 1);
        // Events of memory after each step, in a run without a crash.
        let mut whole = Levels::new(FlashMode::Second, seed);
        let mut truth = Truth::default();
        let start = whole.sim.events();
        for op in &ops {
            run(&mut whole, &mut truth, *op);
        }
        let end = whole.sim.events();
        for cut in start..=end {
            let mut levels = Levels::new(FlashMode::Second, seed);
            let mut truth = Truth::default();
            levels.sim.crash_after(cut);
            let mut step = 0;
            while step < ops.len() && !levels.sim.has_crashed() {
                run(&mut levels, &mut truth, ops[step]);
                step += 1;
                // A cut between memory's events is one at every step of flash, too: those are tried
                // at the next event.
            }
            let pages = levels.disk.in_flight_pages();
            for fate in fates(pages, &mut dice) {
                let disk = levels.disk.crashed_copy(|page| fate[page]);
                let image = match dice.roll(3) {
                    0 => levels.sim.image(|_| 0),
                    1 => levels.sim.image(|ways| ways - 1),
                    _ => levels.sim.sampled(dice.roll(u64::MAX)),
                };
                let context =
                    format!("seed {seed}, cut {cut}, step {step}, fate {fate:?}, {truth:?}");
                recover(&image, &disk, truth, &context);
                recoveries += 1;
            }
        }
        // And between any two steps, with memory as it is.
        let mut levels = Levels::new(FlashMode::Second, seed);
        let mut truth = Truth::default();
        for (step, op) in ops.iter().enumerate() {
            run(&mut levels, &mut truth, *op);
            let image = levels.sim.image(|_| 0);
            for fate in fates(levels.disk.in_flight_pages(), &mut dice) {
                let disk = levels.disk.crashed_copy(|page| fate[page]);
                let context = format!("seed {seed}, after step {step}, fate {fate:?}, {truth:?}");
                recover(&image, &disk, truth, &context);
                recoveries += 1;
            }
        }
    }
    println!("{recoveries} recoveries");
    assert!(recoveries > 1_000);
}

/// The machine stops between the ring's reset (a checkpoint was installed) and that of flash.
#[test]
fn a_crash_between_the_resets_is_mended() {
    let mut levels = Levels::new(FlashMode::Second, 9);
    for index in 1..=20 {
        assert!(levels.append(index, 1, 100));
    }
    levels.settle(20);
    levels.ring.reset(500, 3);
    let mut flash = open_flash(&levels.disk, FlashMode::Second).expect("it opens");
    assert!(
        flash.join(&levels.ring, 20).is_err(),
        "entries 21 to 500 are nowhere"
    );
    flash.join(&levels.ring, 500).expect("the store has them");
    levels.flash = flash;
    assert!(levels.append(501, 3, 100));
    levels.settle(501);
    assert_eq!(
        levels.read(501, 501).expect("there")[0].payload,
        bytes(501, 3, 100)
    );
    let flash = open_flash(&levels.disk, FlashMode::Second).expect("it opens again");
    assert_eq!(
        (flash.first_index(), flash.last_index(), flash.term(500)),
        (501, 501, Some(3))
    );
}

/// A checkpoint is installed where the area is full: it is what makes room, also when the machine
/// stops on the way.
#[test]
fn a_log_that_begins_anew_makes_room_in_a_full_area() {
    for mode in [FlashMode::Second, FlashMode::Only] {
        for stops_after in 0..40 {
            begins_anew_when_full(mode, stops_after);
        }
    }
}

fn begins_anew_when_full(mode: FlashMode, stops_after: u64) {
    let context = format!("{mode:?}, stops after {stops_after} steps");
    let spec = FlashSpec {
        segment_bytes: 4 * 4096,
        ..levels::spec(mode)
    };
    let open = |disk: &SimDisk| FlashLog::open(Box::new(disk.device()), spec, &WHO);
    let mut levels = Levels::new(mode, stops_after);
    levels.disk = SimDisk::new(spec.bytes, stops_after);
    let device = Box::new(levels.disk.device());
    levels.flash =
        FlashLog::create(device, spec, &WHO, 5, (0, 0), &first_hard_state()).expect("a blank disk");
    let mut last = 0;
    while !matches!(levels.flash.state(levels.now_us), FlashState::Full { .. }) {
        last += u64::from(levels.append(last + 1, 1, 3_000));
        assert!(last < 1_000, "{context}");
        levels.flash.set_hard_state(HardState {
            commit: levels.flash.durable_index(),
            ..first_hard_state()
        });
        levels.pass(100, last);
        let through = levels.flash.durable_index();
        levels.ring.trim(through).expect("within the log");
    }
    (0..100).for_each(|_| levels.pass(100, last));
    let anew = HardState {
        term: 3,
        commit: 500,
        ..first_hard_state()
    };
    levels.ring.reset(500, 3);
    levels.flash.reset(500, 3);
    levels.flash.set_hard_state(anew.clone());
    (0..stops_after).for_each(|_| levels.pass(20, 500));
    levels.disk.crash(stops_after);
    (levels.flash, _) = open(&levels.disk).unwrap_or_else(|error| panic!("{error}: {context}"));
    if levels.flash.last_index() < 500 {
        levels.flash.reset(500, 3);
    }
    levels.flash.set_hard_state(anew);
    for index in 501..=520 {
        assert!(levels.append(index, 3, 2_000), "{context}");
        levels.settle(index);
        levels.ring.trim(index).expect("within the log");
    }
    let (flash, _) = open(&levels.disk).unwrap_or_else(|error| panic!("{error}: {context}"));
    assert_eq!(
        (flash.first_index(), flash.last_index()),
        (501, 520),
        "{context}"
    );
}

/// A region from before what flash has is no memory to start from.
#[test]
fn an_old_region_is_noticed() {
    let mut levels = Levels::new(FlashMode::Second, 10);
    assert!(levels.append(1, 1, 10));
    let old = levels.sim.image(|_| 0);
    for index in 2..=9 {
        assert!(levels.append(index, 1, 10));
    }
    levels.settle(9);
    let (_region, _sim, ring) = open_ring(&old).expect("it is whole");
    let joined = levels
        .flash
        .join(&ring, 0)
        .map_err(|error| error.to_string());
    assert!(joined.is_err_and(|error| error.contains("older")));
}

/// One state of a log whose only level is flash.
#[derive(Clone, Debug, PartialEq)]
struct State {
    /// Term and payload length.
    entries: Vec<(u64, usize)>,
    hard: HardState,
}

fn fresh_ring() -> (Region, cyclone_pmem::Area) {
    let (region, _) = Region::simulated(RING_BYTES).expect("memory");
    let area = region.take(0, RING_BYTES).expect("first taker");
    (region, area)
}

/// Appends, truncations and hard states in random order, crashes that take the memory with them:
/// what was reported durable is there, and nothing is there that never was.
#[test]
fn the_only_level_survives_the_loss_of_memory() {
    for round in 0..15 {
        let seed = seed(900 + round);
        println!("seed {seed} (CYCLONE_SEED)");
        only_level(seed);
    }
}

fn only_level(seed: u64) {
    let mut dice = Dice(seed);
    let mut levels = Levels::new(FlashMode::Only, seed);
    levels.disk.faults(|faults| faults.torn_pages = true);
    let mut states = vec![State {
        entries: Vec::new(),
        hard: first_hard_state(),
    }];
    // The state that is known to be durable, and what waits: state, last index, change of the hard
    // state, position.
    let mut durable = 0;
    let mut waiting: Vec<(usize, u64, u64, Option<u64>)> = Vec::new();
    let mut applied = 0;
    let mut crashes = 0;
    for step in 0..1_500 {
        let context = format!("seed {seed}, step {step}");
        let now = states[states.len() - 1].clone();
        let last = now.entries.len() as u64;
        match dice.roll(16) {
            0..=4 => {
                let mut next = now.clone();
                next.hard.term += u64::from(dice.roll(6) == 0);
                let from = match dice.roll(6) {
                    0 => next.hard.commit + 1 + dice.roll(last + 1 - next.hard.commit),
                    _ => last + 1,
                };
                let replaced = from <= last;
                next.hard.term += u64::from(replaced);
                let term = next.hard.term;
                next.entries.truncate(from as usize - 1);
                let lens: Vec<usize> = (0..1 + dice.roll(3))
                    .map(|_| {
                        if dice.roll(9) == 0 {
                            6_000
                        } else {
                            dice.roll(200) as usize
                        }
                    })
                    .collect();
                let payloads: Vec<Payload> = (from..)
                    .zip(&lens)
                    .map(|(index, len)| Payload::from_vec(bytes(index, term, *len)))
                    .collect();
                let new: Vec<NewEntry<'_>> = (from..)
                    .zip(&payloads)
                    .map(|(index, payload)| NewEntry {
                        index,
                        term,
                        kind: 4,
                        payload,
                    })
                    .collect();
                let fits = levels
                    .ring
                    .fits(new.len() as u64, lens.iter().sum::<usize>() as u64);
                if !fits {
                    levels
                        .ring
                        .trim(now.hard.commit.min(applied))
                        .expect("within the log");
                    continue;
                }
                if replaced {
                    levels.flash.rewind(from);
                }
                let persisted = levels.ring.persist(Batch {
                    entries: &new,
                    hard_state: Some(next.hard.clone()),
                });
                assert!(
                    persisted
                        .is_ok_and(|persisted| persisted.last() == from + lens.len() as u64 - 1)
                );
                next.entries.extend(lens.iter().map(|len| (term, *len)));
                let version = levels.flash.set_hard_state(next.hard.clone());
                let last = next.entries.len() as u64;
                waiting
                    .iter_mut()
                    .for_each(|(_, upto, _, _)| *upto = (*upto).min(last));
                states.push(next);
                waiting.push((states.len() - 1, last, version, None));
            }
            5 => {
                // Entries durable here and elsewhere are committed.
                let mut next = now.clone();
                next.hard.commit = levels.flash.durable_index().min(last).max(next.hard.commit);
                let persisted = levels.ring.persist(Batch {
                    entries: &[],
                    hard_state: Some(next.hard.clone()),
                });
                assert!(persisted.is_ok());
                let version = levels.flash.set_hard_state(next.hard.clone());
                states.push(next);
                waiting.push((states.len() - 1, last, version, None));
            }
            6..=11 => {
                let time = dice.roll(150);
                levels.pass(time, last);
            }
            12 => applied = states[durable].hard.commit.max(applied),
            13 if levels.flash.fill() > 0.3 => {
                levels.flash.trim(applied);
            }
            14 if dice.roll(6) == 0 => {
                crashes += 1;
                levels.disk.crash(dice.roll(1 << 40));
                let mut flash = open_flash(&levels.disk, FlashMode::Only)
                    .unwrap_or_else(|error| panic!("{error}: {context}"));
                let (region, area) = fresh_ring();
                let shape = RingSpec {
                    log: LOG,
                    slots: RING_SLOTS,
                };
                let ring: Ring = flash
                    .rebuild(area, shape, None, applied)
                    .unwrap_or_else(|error| panic!("{error}: {context}"));
                (levels.region, levels.ring, levels.flash) = (region, ring, flash);
                let found = recovered(&mut levels, applied, &states[durable..], &context);
                waiting.clear();
                states = vec![found];
                durable = 0;
            }
            _ => {}
        }
        let last = states[states.len() - 1].entries.len() as u64;
        if dice.roll(2) == 0 {
            levels.flash.pump(&levels.ring, last, levels.now_us);
        }
        let (flash, position) = (&levels.flash, levels.flash.position());
        for (state, upto, version, at) in &mut waiting {
            if at.is_none() && flash.has(*upto, *version) {
                *at = Some(position);
            }
            if at.is_some_and(|at| flash.durable_page() >= at) {
                durable = *state;
            }
        }
        waiting.retain(|(state, ..)| *state > durable);
    }
    assert!(crashes > 2, "{crashes} crashes");
}

/// What was recovered, checked against the states from the durable one on.
fn recovered(levels: &mut Levels, applied: u64, states: &[State], context: &str) -> State {
    let (first, last) = (levels.flash.first_index(), levels.flash.last_index());
    assert!(
        applied + 1 >= first && applied <= last,
        "{first} {applied} {last}: {context}"
    );
    let entries = levels
        .read(first, last)
        .unwrap_or_else(|error| panic!("{error}: {context}"));
    let mut known = states[0].entries[..first as usize - 1].to_vec();
    for entry in entries {
        let wanted = bytes(entry.index, entry.term, entry.payload.len());
        assert_eq!(entry.payload, wanted, "{context}");
        known.push((entry.term, entry.payload.len()));
    }
    assert_eq!(levels.ring.last_index(), last, "{context}");
    for index in levels.ring.first_index()..=last {
        let entry = levels.ring.entry(index).expect("within the log");
        assert_eq!(
            (entry.term, entry.len as usize),
            known[index as usize - 1],
            "{context}"
        );
    }
    // A state from the durable one on, or on the way from one to the next.
    let on_the_way = |at: usize| {
        let this = &states[at].entries;
        let next = states.get(at + 1).map_or(this, |state| &state.entries);
        let common = this.iter().zip(next).take_while(|(a, b)| a == b).count();
        *this == known || (known.len() >= common && next.starts_with(&known))
    };
    assert!(
        (0..states.len()).any(on_the_way),
        "{known:?}\nis none of {states:?}\n{context}"
    );
    let hard = levels.flash.hard_state().clone();
    let vouched = &states[0].hard;
    assert!(hard.term >= vouched.term, "{hard:?} {vouched:?}: {context}");
    assert!(
        states.iter().any(|state| state.hard.term == hard.term),
        "{context}"
    );
    assert!(hard.commit <= last, "{context}");
    let mut hard = hard;
    hard.commit = levels.ring.hard_state().commit;
    State {
        entries: known,
        hard,
    }
}

/// The log is trimmed as far as it goes, wherever a hard state or an entry lies across a segment's
/// beginning, and the power fails: a hard state is there.
#[test]
fn as_the_only_level_trimming_leaves_a_hard_state() {
    for round in 0..15 {
        let seed = seed(1_300 + round);
        println!("seed {seed} (CYCLONE_SEED)");
        let mut dice = Dice(seed);
        let mut levels = Levels::new(FlashMode::Only, seed);
        let mut hard = first_hard_state();
        hard.learners = (10..10 + 30 * dice.roll(3)).collect();
        let mut last = 0;
        for step in 0..200 {
            let len = [60, 250, 1_000, 9_000][dice.roll(4) as usize];
            last += u64::from(levels.append(last + 1, 1, len));
            if dice.roll(6) == 0 {
                hard.vote = hard.vote % 3 + 1;
                hard.commit = levels.flash.durable_index();
                levels.flash.set_hard_state(hard.clone());
            }
            // While writes are in flight, pages fill.
            let us = [0, 0, 20, 300][dice.roll(4) as usize];
            levels.pass(us, last);
            levels.flash.trim(levels.flash.durable_index());
            let through = levels.flash.durable_index().min(last - 1);
            levels.ring.trim(through).expect("within the log");
            let durable = levels.flash.durable_index();
            for fate in fates(levels.disk.in_flight_pages(), &mut dice) {
                let disk = levels.disk.crashed_copy(|page| fate[page]);
                let context = format!("seed {seed}, step {step}, fate {fate:?}");
                let flash = open_flash(&disk, FlashMode::Only)
                    .unwrap_or_else(|error| panic!("{error}: {context}"));
                assert!(flash.last_index() >= durable, "{context}");
            }
        }
        assert!(levels.flash.first_index() > 1, "nothing was trimmed");
    }
}

//! The second level against a model: entries, trimming, reading back, crashes, and every fault of
//! the simulated disk. `CYCLONE_SEED` replaces the seeds.

#[path = "support/levels.rs"]
mod levels;

use cyclone_wal::flash::{
    Action, Buffers, DeviceError, FetchError, FlashDevice, FlashError, FlashLog, FlashMode,
    FlashState, Request,
};
use levels::{Dice, Levels, SEGMENT, SEGMENTS, WHO, bytes, open_flash, read, seed, spec};

/// Term and payload length of each entry from index 1 on.
type Model = Vec<(u64, usize)>;

fn check(flash: &mut FlashLog, now_us: &mut u64, model: &Model, context: &str) {
    let (first, last) = (flash.first_index(), flash.durable_index());
    let found =
        read(flash, now_us, first, last).unwrap_or_else(|error| panic!("{error}: {context}"));
    assert_eq!(found.len() as u64, last + 1 - first, "{context}");
    for (index, entry) in (first..).zip(found) {
        let (term, len) = model[index as usize - 1];
        assert_eq!(
            (entry.index, entry.term, entry.kind),
            (index, term, 4),
            "{context}"
        );
        assert_eq!(
            entry.payload,
            bytes(index, term, len),
            "entry {index}, {context}"
        );
        assert_eq!(flash.term(index), Some(term), "{context}");
    }
}

/// Random work with faults that come and go, and crashes; nothing that was durable is ever lost.
#[test]
fn random_work_against_a_model() {
    for round in 0..12u64 {
        let seed = seed(4_000 + round);
        println!("seed {seed} (CYCLONE_SEED)");
        let mut dice = Dice(seed);
        let mut levels = Levels::new(FlashMode::Second, seed);
        let mut model = Model::new();
        let mut term = 1;
        let (mut commit, mut calm_at) = (0, 0);
        let mut crashes = 0;
        for step in 0..3_000 {
            match dice.roll(20) {
                0..=7 => {
                    term += u64::from(dice.roll(30) == 0);
                    let len = match dice.roll(8) {
                        0 => dice.roll(11_000),
                        1 => 0,
                        _ => dice.roll(300),
                    } as usize;
                    let index = model.len() as u64 + 1;
                    if levels.append(index, term, len) {
                        model.push((term, len));
                    }
                }
                8..=9 => {
                    commit = model.len() as u64 - dice.roll(3).min(model.len() as u64 - commit)
                }
                10..=14 => {
                    let time = dice.roll(400);
                    levels.pass(time, commit);
                }
                15 => {
                    let through = levels.flash.durable_index().min(commit);
                    levels.ring.trim(through).expect("within the log");
                }
                16 => {
                    let (first, last) = (levels.flash.first_index(), levels.flash.durable_index());
                    if levels.flash.fill() > 0.4 {
                        levels
                            .flash
                            .trim(first + dice.roll(last + 2 - first.min(last)));
                    }
                }
                17 if levels.flash.durable_index() >= levels.flash.first_index() => {
                    let (first, last) = (levels.flash.first_index(), levels.flash.durable_index());
                    let from = first + dice.roll(last + 1 - first);
                    let hung = levels.disk.outstanding() > 0 && calm_at > levels.now_us;
                    if !hung {
                        let found = levels.read(from, (from + dice.roll(20)).min(last));
                        let found = found.unwrap_or_else(|error| panic!("{error}, step {step}"));
                        assert_eq!(found[0].payload, {
                            let (term, len) = model[from as usize - 1];
                            bytes(from, term, len)
                        });
                    }
                }
                18 if calm_at <= levels.now_us => {
                    calm_at = levels.now_us + 2_000;
                    match dice.roll(12) {
                        0 => levels.disk.faults(|faults| faults.hang_until_us = calm_at),
                        1 => levels.disk.faults(|faults| {
                            faults.write_error = Some(DeviceError::Io(5));
                        }),
                        2 => levels.disk.faults(|faults| {
                            faults.write_error = Some(DeviceError::NoSpace);
                        }),
                        _ => calm_at = 0,
                    }
                }
                19 if dice.roll(8) == 0 => {
                    crashes += 1;
                    let durable = levels.flash.durable_index();
                    levels.disk.faults(|faults| {
                        *faults = Default::default();
                        faults.torn_pages = dice.roll(2) == 0;
                    });
                    levels.disk.crash(dice.roll(1 << 40));
                    let context = format!("seed {seed}, step {step}, crash {crashes}");
                    levels.flash = open_flash(&levels.disk, FlashMode::Second)
                        .unwrap_or_else(|error| panic!("{error}: {context}"));
                    let last = levels.flash.last_index();
                    assert!(
                        durable <= last && last <= commit,
                        "{durable} {last} {commit}: {context}"
                    );
                    // What follows comes from the ring, which keeps all that was not durable.
                    assert!(levels.ring.first_index() <= last + 1, "{context}");
                    check(&mut levels.flash, &mut levels.now_us, &model, &context);
                    calm_at = 0;
                }
                _ => {}
            }
            if calm_at > 0 && levels.now_us >= calm_at {
                calm_at = 0;
                levels.disk.faults(|faults| faults.write_error = None);
            }
        }
        levels.disk.faults(|faults| *faults = Default::default());
        commit = model.len() as u64;
        for _ in 0..2_000 {
            levels.flash.trim(levels.flash.durable_index());
            levels.pass(300, commit);
        }
        levels.settle(commit);
        assert_eq!(levels.flash.state(levels.now_us), FlashState::Ready);
        check(&mut levels.flash, &mut levels.now_us, &model, "at the end");
        assert!(
            crashes > 0 && commit > 300,
            "{crashes} crashes, {commit} entries"
        );
    }
}

fn fill(levels: &mut Levels, from: u64, to: u64, len: usize) {
    for index in from..=to {
        assert!(levels.append(index, 1, len), "the ring has room");
        if index % 8 == 0 {
            levels.settle(index);
            levels
                .ring
                .trim(levels.flash.durable_index())
                .expect("within the log");
        }
    }
    levels.settle(to);
}

/// The budget is used up: the log says so, keeps what it has, and goes on when something is
/// trimmed.
#[test]
fn a_full_budget_is_reported_and_ended_by_trimming() {
    let mut levels = Levels::new(FlashMode::Second, 1);
    let mut index = 0;
    while levels.flash.state(levels.now_us) == FlashState::Ready {
        index += 1;
        assert!(index < 400, "it never fills");
        if levels.append(index, 1, 1_000) {
            levels.pass(2_000, index);
            levels
                .ring
                .trim(levels.flash.durable_index())
                .expect("within the log");
        } else {
            index -= 1;
            levels.pass(2_000, index);
        }
    }
    assert!(matches!(
        levels.flash.state(levels.now_us),
        FlashState::Full { .. }
    ));
    for _ in 0..10 {
        levels.pass(1_000, index);
    }
    let (durable, writes) = (levels.flash.durable_index(), levels.disk.writes());
    for _ in 0..100 {
        levels.pass(1_000, index);
    }
    assert_eq!(
        levels.flash.durable_index(),
        durable,
        "nothing is overwritten"
    );
    assert_eq!(levels.disk.writes(), writes, "nothing is written");
    assert_eq!(
        levels.read(1, durable).expect("all there").len() as u64,
        durable
    );
    levels.flash.trim(durable);
    levels.settle(index);
    assert_eq!(levels.flash.state(levels.now_us), FlashState::Ready);
    // The same after a restart: what was trimmed does not come back, what was not is there.
    let first = levels.flash.first_index();
    let flash = open_flash(&levels.disk.copy(1), FlashMode::Second).expect("it opens");
    assert_eq!((flash.first_index(), flash.last_index()), (first, index));
}

/// Many laps around a small area, with restarts.
#[test]
fn space_is_used_again_and_again() {
    let mut levels = Levels::new(FlashMode::Second, 2);
    let model: Model = (0..2_000).map(|_| (1, 700)).collect();
    for round in 0..20 {
        let from = round * 100 + 1;
        for part in 0..5 {
            fill(&mut levels, from + part * 20, from + part * 20 + 19, 700);
            let durable = levels.flash.durable_index();
            levels.flash.trim(durable.saturating_sub(40));
        }
        assert!(levels.flash.first_index() + 80 > from, "the log is trimmed");
        levels.flash = open_flash(&levels.disk, FlashMode::Second).expect("it opens");
        assert_eq!(levels.flash.last_index(), from + 99);
        check(&mut levels.flash, &mut levels.now_us, &model, "after a lap");
    }
    let pages = u64::from(SEGMENT) * SEGMENTS / 4096;
    assert!(levels.flash.position() > 5 * pages, "several laps");
}

/// A write that takes seconds is reported, and nothing is lost by it.
#[test]
fn a_hung_device_is_reported() {
    let mut levels = Levels::new(FlashMode::Second, 3);
    fill(&mut levels, 1, 16, 100);
    let until = levels.now_us + 3_000_000;
    levels.disk.faults(|faults| faults.hang_until_us = until);
    assert!(levels.append(17, 1, 100));
    levels.pass(10, 17);
    levels.pass(300, 17);
    levels.pass(10_000, 17);
    let state = levels.flash.state(levels.now_us);
    assert!(matches!(state, FlashState::Stalled { .. }), "{state:?}");
    assert_eq!(levels.flash.durable_index(), 16);
    levels.pass(3_000_000, 17);
    levels.settle(17);
    assert_eq!(levels.flash.state(levels.now_us), FlashState::Ready);
    assert_eq!(
        levels.read(17, 17).expect("there")[0].payload,
        bytes(17, 1, 100)
    );
}

/// Failed writes are tried again until they succeed; meanwhile the reason is reported.
#[test]
fn failed_writes_are_repeated() {
    for (error, device_full) in [(DeviceError::Io(5), false), (DeviceError::NoSpace, true)] {
        let mut levels = Levels::new(FlashMode::Second, 4);
        fill(&mut levels, 1, 8, 100);
        levels
            .disk
            .faults(|faults| faults.write_error = Some(error));
        assert!(levels.append(9, 1, 5_000));
        for _ in 0..30 {
            levels.pass(200, 9);
        }
        let state = levels.flash.state(levels.now_us);
        match device_full {
            true => assert!(matches!(state, FlashState::DeviceFull { .. }), "{state:?}"),
            false => assert!(matches!(state, FlashState::Failing { .. }), "{state:?}"),
        }
        assert_eq!(levels.flash.durable_index(), 8);
        levels.disk.faults(|faults| faults.write_error = None);
        levels.settle(9);
        assert_eq!(
            levels.read(9, 9).expect("there")[0].payload,
            bytes(9, 1, 5_000)
        );
    }
}

/// A write that the disk acknowledged and lost, or put elsewhere: the log notices, where it reads
/// and when it opens.
#[test]
fn lost_and_misdirected_writes_are_noticed() {
    for misdirect in [false, true] {
        let mut levels = Levels::new(FlashMode::Second, 5);
        fill(&mut levels, 1, 24, 500);
        let next = levels.disk.writes();
        let page = levels.flash.position();
        levels.disk.faults(|faults| match misdirect {
            // Into the segment that holds the first entries.
            true => faults.misdirect_write = Some((next, 2)),
            false => faults.lose_write = Some(next),
        });
        fill(&mut levels, 25, 60, 500);
        let missing = levels.read(25, 25);
        let expected = FetchError::Corrupt {
            page,
            what: "it is not what was written",
        };
        assert_eq!(missing, Err(expected));
        let opened = open_flash(&levels.disk.copy(1), FlashMode::Second);
        assert!(
            matches!(opened.map(|_| ()), Err(FlashError::Corrupt { .. })),
            "{misdirect}"
        );
    }
}

/// Any page of the log rots, but for the last ones, for which no later page can vouch: the log
/// refuses to open rather than to forget entries. And a page that the device cannot read is an
/// error, not an end.
#[test]
fn rot_and_unreadable_pages_are_no_end_of_the_log() {
    let mut levels = Levels::new(FlashMode::Second, 6);
    fill(&mut levels, 1, 60, 500);
    let seed = seed(99);
    println!("seed {seed} (CYCLONE_SEED)");
    let mut dice = Dice(seed);
    let segment = u64::from(SEGMENT) / 4096;
    let last = levels.flash.position();
    for page in 0..last {
        let disk = levels.disk.copy(1);
        disk.rot(segment + page, dice.roll(4096 * 8) as usize);
        match open_flash(&disk, FlashMode::Second) {
            Err(FlashError::Corrupt { .. }) => {}
            Ok(flash) => {
                assert!(
                    page + 2 * segment >= last,
                    "page {page} of {last} rotted unnoticed"
                );
                assert!(flash.last_index() < 60);
            }
            Err(error) => panic!("{error}"),
        }
        let disk = levels.disk.copy(1);
        disk.faults(|faults| faults.read_error = vec![segment + page]);
        let opened = open_flash(&disk, FlashMode::Second).map(|_| ());
        assert_eq!(opened, Err(FlashError::Device(DeviceError::Io(5))));
    }
    levels
        .disk
        .faults(|faults| faults.read_error = vec![segment]);
    let failed = levels.read(1, 1);
    assert!(
        matches!(failed, Err(FetchError::Device { index: 1, .. })),
        "{failed:?}"
    );
}

/// A page goes bad while the log is open: only entries that lie in it cannot be had, whatever is
/// read along with them.
#[test]
fn a_bad_page_costs_only_the_entries_in_it() {
    let mut levels = Levels::new(FlashMode::Second, 11);
    fill(&mut levels, 1, 60, 500);
    let segment = u64::from(SEGMENT) / 4096;
    for page in 0..levels.flash.position() {
        levels
            .disk
            .faults(|faults| faults.read_error = vec![segment + page]);
        let mut failed = Vec::new();
        for index in 1..=60 {
            // One by one, and as the first of many.
            for to in [index, 60] {
                levels.flash.fetch(index, to, 3_000).expect("it is there");
                let fetched = loop {
                    levels.now_us += 50;
                    levels.flash.poll(levels.now_us);
                    if let Some(fetched) = levels.flash.take_fetched() {
                        break fetched;
                    }
                };
                match fetched.result {
                    Ok(entries) => {
                        for (entry, index) in entries.iter().zip(index..) {
                            assert_eq!((entry.index, entry.term), (index, 1));
                            assert_eq!(entry.payload, bytes(index, 1, 500));
                        }
                    }
                    Err(FetchError::Device { index: told, .. }) => {
                        assert_eq!(told, index, "page {page}");
                        failed.push(index);
                    }
                    Err(error) => panic!("{error}: page {page}"),
                }
            }
        }
        failed.dedup();
        // Seven fit into a page, and one more may lie in it in part at each end.
        assert!(failed.len() <= 9, "page {page}: {failed:?}");
    }
}

/// Areas of others, of other shapes, and damaged ones are distinguished.
#[test]
fn foreign_areas_are_refused() {
    let levels = Levels::new(FlashMode::Second, 7);
    let open = |change: &dyn Fn(&mut cyclone_wal::flash::FlashIdentity), mode| {
        let mut who = WHO;
        change(&mut who);
        FlashLog::open(Box::new(levels.disk.device()), spec(mode), &who).map(|_| ())
    };
    assert_eq!(open(&|_| {}, FlashMode::Second), Ok(()));
    for change in [
        (|who| who.cluster = 1) as fn(&mut cyclone_wal::flash::FlashIdentity),
        |who| who.replica = 9,
        |who| who.incarnation = 9,
    ] {
        let opened = open(&change, FlashMode::Second);
        assert!(
            matches!(opened, Err(FlashError::Foreign { .. })),
            "{opened:?}"
        );
    }
    let opened = open(&|_| {}, FlashMode::Only);
    assert!(
        matches!(opened, Err(FlashError::WrongShape(_))),
        "{opened:?}"
    );
    // One copy of the superblock is enough.
    levels.disk.rot(0, 100);
    assert_eq!(open(&|_| {}, FlashMode::Second), Ok(()));
    levels.disk.rot(1, 100);
    assert_eq!(open(&|_| {}, FlashMode::Second), Err(FlashError::Damaged));
    // The first copy is written last. While it is blank, a torn other one is an area that was not
    // made to its end.
    let zeros = Buffers::new(1, 4096).take().expect("one buffer");
    let mut device = levels.disk.device();
    let blank = Request {
        token: 1,
        action: Action::Write,
        offset: 0,
        buffer: zeros,
        len: 4096,
    };
    device.submit(0, blank).expect("taken");
    levels.disk.settle();
    let opened = open(&|_| {}, FlashMode::Second);
    assert_eq!(opened, Err(FlashError::NotFormatted));
    let blank = cyclone_wal::flash::SimDisk::new(u64::from(SEGMENT) * SEGMENTS, 1);
    let opened = open_flash(&blank, FlashMode::Second).map(|_| ());
    assert_eq!(opened, Err(FlashError::NotFormatted));
}

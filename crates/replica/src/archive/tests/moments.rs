//! Moments when leaders' clocks do not agree.

use cyclone_wire::command::{Command, Operation};

use super::*;

fn stamped(stamps: &[u64]) -> Vec<Entry> {
    let entry = |(number, stamp_ms): (usize, &u64)| Entry {
        term: 1,
        payload: batch::Writer::new().finish(*stamp_ms),
        stamp_ms: *stamp_ms,
        number,
    };
    stamps.iter().enumerate().map(entry).collect()
}

fn cut(archive_dir: &ArchiveDir, until_ms: u64) -> Result<ReplayEnd, ReplayError> {
    replay(archive_dir, &[(0, 0)], Until::Time(until_ms), None)
}

/// A leader's clock was a day ahead for a while. A log that is cut by its latest stamp would end
/// there for every moment of that day, without everything that was acknowledged since, and no error
/// would be reported.
#[test]
fn a_clock_that_was_ahead_hides_no_write() {
    let directory = tempfile::tempdir().expect("directory");
    let all = [stamped(&[1_000_000, 90_000_000, 1_100_000, 1_200_000])];
    let archive_dir = archived(directory.path(), &all);
    for (until_ms, hidden) in [(1_150_000, 3), (1_100_001, 3), (1_300_000, 4)] {
        let Err(ReplayError::ClockBack {
            log: 0,
            cut: 2,
            cut_ms: 90_000_000,
            index: 3,
            stamp_ms: 1_100_000,
            last,
        }) = cut(&archive_dir, until_ms)
        else {
            panic!("until {until_ms}");
        };
        assert_eq!(last, hidden);
    }
    // Where no entry is in doubt, none is in the way.
    for (until_ms, last) in [
        (999_999, 0),
        (1_000_000, 1),
        (1_099_999, 1),
        (90_000_000, 4),
    ] {
        let place = cut(&archive_dir, until_ms)
            .expect("no doubt")
            .places
            .remove(0);
        assert_eq!(place.index, last);
        let left_out = all[0].get(last as usize).map(|entry| FirstExcluded {
            index: last + 1,
            stamp_ms: Some(entry.stamp_ms),
        });
        assert_eq!(place.left_out, left_out);
    }
}

/// An operator has set the clock back: what is before that entry was written before its time.
#[test]
fn clock_that_was_set_back_leaves_no_doubt_behind_it() {
    let directory = tempfile::tempdir().expect("directory");
    let mut all = stamped(&[1_000_000, 90_000_000, 1_100_000, 1_200_000]);
    let command = Command {
        session: None,
        operation: Operation::SetClock { time_ms: 1_100_000 },
    };
    let mut set = batch::Writer::new();
    set.push(|out| command.encode(out));
    all[2].payload = set.finish(1_100_000);
    let archive_dir = archived(directory.path(), &[all]);
    for (until_ms, last) in [
        (1_050_000, 1),
        (1_100_000, 3),
        (1_150_000, 3),
        (1_200_000, 4),
    ] {
        let place = cut(&archive_dir, until_ms)
            .expect("no doubt")
            .places
            .remove(0);
        assert_eq!(place.index, last, "until {until_ms}");
    }
    // A snapshot of after it is not later than a time of that day.
    let later = replay(&archive_dir, &[(3, 1)], Until::Time(1_150_000), None).expect("cut");
    assert_eq!(later.places[0].index, 3);
}

#[test]
fn a_clock_that_is_a_little_back_is_as_good_as_another() {
    let directory = tempfile::tempdir().expect("directory");
    // It is set a little, again and again; then a new leader is almost five seconds behind.
    let stamps = [
        10_000, 10_400, 10_150, 10_300, 10_500, 10_480, 20_000, 15_100,
    ];
    let archive_dir = archived(directory.path(), &[stamped(&stamps)]);
    for until_ms in (9_900..20_100).step_by(10) {
        let latest = stamps.iter().scan(0, |latest, stamp| {
            *latest = (*stamp).max(*latest);
            Some(*latest)
        });
        let before = latest.take_while(|latest| *latest <= until_ms).count();
        let place = cut(&archive_dir, until_ms).expect("cut").places.remove(0);
        assert_eq!(place.index, before as u64, "until {until_ms}");
    }
    let directory = tempfile::tempdir().expect("directory");
    let archive_dir = archived(directory.path(), &[stamped(&[10_000, 20_000, 14_900])]);
    cut(&archive_dir, 14_899).expect("it is later");
    cut(&archive_dir, 14_900).expect_err("it is not");
}

/// What lies behind the moment is checked, but not needed.
#[test]
fn damage_behind_the_point_in_time_is_reported_and_blocks_nothing() {
    let directory = tempfile::tempdir().expect("directory");
    let all = [stamped(&(1..=100).collect::<Vec<u64>>())];
    archive(directory.path(), 1, &all, 1);
    let files = files_of(directory.path(), 0);
    let whole = cut(&archive_dir(&[directory.path()]), 10).expect("cut");
    assert_eq!((whole.places[0].index, whole.places[0].unseen), (10, 0));
    // Five entries each.
    fs::write(&files[5], "damaged").expect("written");
    fs::remove_file(&files[9]).expect("removed");
    fs::write(&files[19], "damaged").expect("written");
    let reached = cut(&archive_dir(&[directory.path()]), 10).expect("cut");
    assert_eq!(
        (reached.places[0].index, reached.places[0].unseen),
        (10, 15)
    );
    let other = tempfile::tempdir().expect("directory");
    archive(other.path(), 2, &all, 1000);
    let healed = cut(&archive_dir(&[directory.path(), other.path()]), 10).expect("cut");
    assert_eq!(healed, whole);
}

/// By an entry behind the time when the clock was ahead: the other logs end about when it was
/// written, and not a day later.
#[test]
fn an_entry_behind_a_clock_that_was_ahead_brings_the_others_to_its_own_time() {
    let directory = tempfile::tempdir().expect("directory");
    let all = [
        stamped(&[1_000_000, 90_000_000, 1_100_000, 1_200_000]),
        stamped(&[1_000_000, 1_090_000, 1_150_000, 95_000_000]),
        stamped(&[90_000_010, 1_099_000, 1_101_000]),
    ];
    let archive_dir = archived(directory.path(), &all);
    let reached = |index| {
        let until = Until::Index(0, index);
        let reached = replay(&archive_dir, &[(0, 0); 3], until, None).expect("reached");
        reached.places.iter().map(|place| place.index).collect()
    };
    let by_index: [Vec<u64>; 4] = std::array::from_fn(|at| reached(at as u64 + 1));
    assert_eq!(by_index[0], [1, 1, 0]);
    assert_eq!(by_index[2], [3, 2, 2]);
    assert_eq!(by_index[3], [4, 3, 3]);
}

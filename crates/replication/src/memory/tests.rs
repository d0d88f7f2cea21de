use cyclone_pmem::{CrashSim, Region};
use proptest::prelude::*;

use super::*;
use crate::protocol::SenderId;

const OPTIONS: FormatOptions = FormatOptions {
    protocol: Protocol::Rwrite,
    segment_bytes: 4096,
    secret: 99,
};
const OWNER: Owner = Owner::Sender(SenderId {
    server: 1,
    worker: 2,
});

fn simulated(len: u64) -> (SharedArea, CrashSim) {
    let (region, sim) = Region::simulated(len).expect("region");
    (region.take(0, len).expect("area").share(), sim)
}

fn from_image(image: &[u8]) -> SharedArea {
    let (region, _) = Region::from_image(image).expect("region");
    region.take(0, image.len() as u64).expect("area").share()
}

fn entries(memory: &BackupMemory) -> Vec<Entry> {
    memory.entries().map(|(_, entry)| *entry).collect()
}

#[test]
fn what_was_allocated_is_there_after_reopening() {
    let (area, _) = simulated(64 << 10);
    let mut memory = BackupMemory::format(area.clone(), &OPTIONS).expect("format");
    assert_eq!(memory.segments(), 15);
    let first = memory.allocate(OWNER, 3, 4, Content::Stale).expect("one");
    let second = memory
        .allocate(Owner::BackupLog, 3, 0, Content::Zeroed)
        .expect("another");
    memory.transition(first, SegmentState::Used).expect("used");
    let before = entries(&memory);
    let reopened = BackupMemory::open_or_format(area, &OPTIONS).expect("open");
    assert_eq!(entries(&reopened), before);
    assert_eq!(reopened.free_segments(), 13);
    assert_eq!(
        reopened.segment_at(reopened.segment_offset(second)),
        Some(second)
    );
    assert_eq!(
        reopened.segment_at(reopened.segment_offset(second) + 64),
        None
    );
    assert_eq!(reopened.in_order(|entry| entry.epoch > 0), [first, second]);
}

#[test]
fn epochs_and_streams_never_come_again() {
    let (area, _) = simulated(32 << 10);
    let mut memory = BackupMemory::format(area.clone(), &OPTIONS).expect("format");
    let mut last = (0, 0);
    for round in 0..50 {
        if round % 7 == 0 {
            memory = BackupMemory::open(area.clone()).expect("open");
        }
        let segment = memory.allocate(OWNER, 1, 0, Content::Stale).expect("free");
        let epoch = memory.entry(segment).expect("entry").epoch;
        let stream = memory.next_stream();
        assert!(epoch > last.0 && stream > last.1);
        last = (epoch, stream);
        memory
            .transition(segment, SegmentState::Used)
            .expect("used");
        memory
            .transition(segment, SegmentState::Free)
            .expect("free");
    }
}

#[test]
fn states_follow_the_papers_figure() {
    let (area, _) = simulated(32 << 10);
    let mut memory = BackupMemory::format(area, &OPTIONS).expect("format");
    let segment = memory.allocate(OWNER, 1, 0, Content::Stale).expect("free");
    for wrong in [SegmentState::Free, SegmentState::Using] {
        let error = memory.transition(segment, wrong).expect_err("refused");
        assert!(
            matches!(error, ReplicationError::Segment { .. }),
            "{wrong:?}"
        );
    }
    memory
        .transition(segment, SegmentState::Used)
        .expect("used");
    assert!(memory.transition(segment, SegmentState::Using).is_err());
    memory
        .transition(segment, SegmentState::Committed)
        .expect("committed");
    assert!(memory.transition(segment, SegmentState::Used).is_err());
    memory
        .transition(segment, SegmentState::Free)
        .expect("free");
    assert!(memory.transition(segment, SegmentState::Free).is_err());
    assert!(memory.transition(9999, SegmentState::Free).is_err());
}

#[test]
fn a_full_table_gives_nothing_and_takes_back() {
    let (area, _) = simulated(32 << 10);
    let mut memory = BackupMemory::format(area, &OPTIONS).expect("format");
    let taken: Vec<u32> =
        std::iter::from_fn(|| memory.allocate(OWNER, 1, 0, Content::Stale)).collect();
    assert_eq!(taken.len() as u32, memory.segments());
    assert_eq!(memory.free_segments(), 0);
    memory
        .transition(taken[2], SegmentState::Used)
        .expect("used");
    memory
        .transition(taken[2], SegmentState::Free)
        .expect("free");
    let again = memory.allocate(OWNER, 1, 0, Content::Stale);
    assert_eq!(again, Some(taken[2]));
}

#[test]
fn damage_is_named_and_one_rotten_slot_is_healed() {
    let (area, _) = simulated(32 << 10);
    let mut memory = BackupMemory::format(area.clone(), &OPTIONS).expect("format");
    memory.allocate(OWNER, 1, 0, Content::Stale).expect("free");
    let before = entries(&memory);
    // One slot of every line rots, the first or the second.
    for at in (COUNTERS_AT..TABLE_AT - 64)
        .step_by(128)
        .chain((TABLE_AT..TABLE_AT + 512).step_by(128))
    {
        let slot = at + at / 128 % 2 * 64;
        area.write(slot + 5, &[0xaa]);
    }
    let healed = BackupMemory::open(area.clone()).expect("open");
    assert_eq!(entries(&healed), before);
    // Both slots of one line rot.
    area.write(TABLE_AT + 128 + 5, &[0xaa]);
    area.write(TABLE_AT + 128 + 64 + 5, &[0xaa]);
    let error = BackupMemory::open(area.clone()).err().expect("damaged");
    assert!(error.to_string().contains("segment 1"), "{error}");
    area.write(COUNTERS_AT + 1, &[1]);
    area.write(COUNTERS_AT + 65, &[1]);
    let error = BackupMemory::open(area.clone()).err().expect("damaged");
    assert!(error.to_string().contains("counters"), "{error}");
    area.write(8, &[9]);
    let error = BackupMemory::open(area.clone()).err().expect("damaged");
    assert!(error.to_string().contains("version 9"), "{error}");
    area.write(0, &[9]);
    let error = BackupMemory::open(area).err().expect("damaged");
    assert!(error.to_string().contains("magic"), "{error}");
}

#[test]
fn a_memory_of_another_protocol_or_size_is_refused() {
    let (area, _) = simulated(32 << 10);
    BackupMemory::format(area.clone(), &OPTIONS).expect("format");
    let other = FormatOptions {
        protocol: Protocol::Faa,
        ..OPTIONS
    };
    assert!(BackupMemory::open_or_format(area.clone(), &other).is_err());
    let other = FormatOptions {
        segment_bytes: 8192,
        ..OPTIONS
    };
    assert!(BackupMemory::open_or_format(area, &other).is_err());
    let (small, _) = simulated(4096);
    assert!(BackupMemory::format(small, &OPTIONS).is_err());
}

/// What is done to the table, as far as it got when the power went.
fn steps() -> Vec<fn(&mut BackupMemory)> {
    vec![
        |memory| {
            memory.allocate(OWNER, 1, 7, Content::Stale);
        },
        |memory| {
            memory.allocate(Owner::BackupLog, 2, 8, Content::Stale);
        },
        |memory| memory.transition(0, SegmentState::Used).expect("used"),
        |memory| {
            memory.next_stream();
        },
        |memory| {
            memory
                .transition(1, SegmentState::Committed)
                .expect("committed")
        },
        |memory| memory.transition(0, SegmentState::Free).expect("free"),
        |memory| memory.raise_min_term(5),
        |memory| {
            memory.allocate(Owner::Server(3), 5, 9, Content::Stale);
        },
        |memory| memory.transition(1, SegmentState::Free).expect("free"),
    ]
}

/// The power goes after every single store, flush and fence of a life of the table, and every set
/// of 8-byte words that were open then may or may not have reached memory. The table is then as
/// before the interrupted step or as after it, and stays so when it is opened once more.
#[test]
fn every_crash_in_every_update_leaves_the_old_table_or_the_new() {
    let (area, sim) = simulated(16 << 10);
    let mut memory = BackupMemory::format(area.clone(), &OPTIONS).expect("format");
    let mut states = vec![(sim.events(), entries(&memory), memory.counters)];
    for step in steps() {
        step(&mut memory);
        states.push((sim.events(), entries(&memory), memory.counters));
    }
    let mut images = 0;
    for crash in states[0].0..=sim.events() {
        let (area, sim) = simulated(16 << 10);
        let mut memory = BackupMemory::format(area, &OPTIONS).expect("format");
        sim.crash_after(crash);
        for step in steps() {
            step(&mut memory);
        }
        let done = states.iter().rposition(|state| state.0 <= crash);
        let done = done.expect("at least the format");
        let outcomes = sim
            .exhaustive(1 << 17)
            .unwrap_or_else(|| panic!("{} outcomes after {crash} events", sim.outcomes()));
        for image in outcomes {
            images += 1;
            let area = from_image(&image);
            let opened = BackupMemory::open(area.clone()).expect("open");
            let found = (entries(&opened), opened.counters);
            let allowed = &states[done..(done + 2).min(states.len())];
            assert!(
                allowed
                    .iter()
                    .any(|(_, entries, counters)| (entries, counters) == (&found.0, &found.1)),
                "after {crash} events: {found:?}"
            );
            // A second look must not see anything else: the first one's repairs were to the same
            // effect.
            let again = BackupMemory::open(area).expect("open again");
            assert_eq!((entries(&again), again.counters), found);
        }
    }
    assert!(images > 100, "only {images} images");
}

/// The power goes while a memory is laid out: afterwards it counts as never laid out, or as laid
/// out and empty.
#[test]
fn a_crash_while_formatting_leaves_no_header_or_all_of_it() {
    let (area, sim) = simulated(16 << 10);
    BackupMemory::format(area, &OPTIONS).expect("format");
    for crash in 0..=sim.events() {
        let (area, sim) = simulated(16 << 10);
        sim.crash_after(crash);
        BackupMemory::format(area, &OPTIONS).expect("format");
        for seed in 0..40 {
            let area = from_image(&sim.sampled(seed));
            match BackupMemory::open(area.clone()) {
                Ok(memory) => assert!(entries(&memory).iter().all(|e| *e == Entry::UNTOUCHED)),
                Err(_) => assert_eq!(area.load_u64(0), 0),
            }
            let again = BackupMemory::open_or_format(area, &OPTIONS).expect("again");
            assert!(entries(&again).iter().all(|e| *e == Entry::UNTOUCHED));
        }
    }
}

proptest! {
    #[test]
    fn any_line_is_refused_or_reads_back(bytes in proptest::array::uniform32(any::<u8>()), seal_it: bool) {
        let mut line = [0; LINE_BYTES];
        line[..32].copy_from_slice(&bytes);
        if seal_it {
            line[0] %= 5;
            line[1] %= 7;
            line[2..4].fill(0);
            seal(&mut line, 3);
        }
        if let Ok(entry) = Entry::decode(&line, 3) {
            prop_assert_eq!(entry.encode(3), line);
            prop_assert!(Entry::decode(&line, 4).is_err());
        }
    }

    #[test]
    fn any_memory_opens_or_is_refused(bytes in proptest::collection::vec(any::<u8>(), 512), whole: bool, at in 0usize..20000) {
        let (area, sim) = simulated(32 << 10);
        if whole {
            BackupMemory::format(area, &OPTIONS).expect("format");
        }
        let mut image = sim.newest();
        let at = at.min(image.len() - bytes.len());
        image[at..at + bytes.len()].copy_from_slice(&bytes);
        let _ = BackupMemory::open(from_image(&image));
    }
}

/// The number of a queue must be no segment's epoch, or a log of the server's own would have the
/// queue's seed; and what is allocated in the next life must not look older than what was promised
/// in this one.
#[test]
fn a_taken_epoch_is_no_segments() {
    let (area, _) = simulated(64 << 10);
    let mut memory = BackupMemory::format(area.clone(), &OPTIONS).expect("format");
    let taken = memory.take_epoch().unwrap();
    assert_eq!(memory.take_epoch(), Some(taken), "nothing was allocated");
    let promised = memory.next_epoch();
    let mut again = BackupMemory::open_or_format(area, &OPTIONS).unwrap();
    again.take_epoch().unwrap();
    assert!(again.next_epoch() >= promised);
    let segment = memory
        .allocate(Owner::Worker(1), 1, 0, Content::Stale)
        .unwrap();
    let epoch = memory.entry(segment).unwrap().epoch;
    assert!(epoch > taken);
    assert!(memory.take_epoch().unwrap() > epoch);
}

/// A queue that is being left may get a segment later than the next queue: its segments come first
/// all the same.
#[test]
fn segments_of_queues_come_queue_by_queue() {
    let (area, _) = simulated(64 << 10);
    let options = FormatOptions {
        protocol: Protocol::Rowan,
        ..OPTIONS
    };
    let mut memory = BackupMemory::format(area, &options).expect("format");
    let allocate = |memory: &mut BackupMemory, tag| {
        let segment = memory.allocate(Owner::BackupLog, 1, tag, Content::Begun);
        segment.unwrap()
    };
    let (first, second) = (memory.take_epoch().unwrap(), 100);
    let order = [
        allocate(&mut memory, first),
        allocate(&mut memory, second),
        allocate(&mut memory, first),
    ];
    let found = memory.in_order(|entry| entry.owner == Owner::BackupLog);
    assert_eq!(found, [order[0], order[2], order[1]]);
}

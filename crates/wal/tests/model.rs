//! The ring against a vector, with reopening; and its limits: the ends of the area, full, too
//! large, refusals.

mod support;

use cyclone_pmem::{Payload, Region};
use cyclone_wal::{Batch, HardState, NewEntry, Ring, RingError};
use proptest::prelude::*;
use support::{
    Bed, Body, Entry, FRAME_BYTES, HEADROOM, Op, RECORDS_BYTES, RING_BYTES, SPEC, State, entry,
    hard,
};

#[derive(Clone, Debug)]
enum Step {
    /// So many entries below the end, new entries, and whether a hard state that commits them goes
    /// along.
    Persist {
        back: u64,
        term_up: u64,
        entries: Vec<(Body, usize)>,
        commit: bool,
    },
    Vote,
    Trim {
        keep: u64,
    },
    Reset {
        ahead: u64,
    },
    Reopen,
}

fn step() -> impl Strategy<Value = Step> {
    let body = prop_oneof![3 => Just(Body::Heap), 2 => Just(Body::Frame), 1 => Just(Body::Mixed)];
    let len = prop_oneof![4 => 4usize..100, 2 => 100usize..400, 1 => 400usize..=880];
    let entries = prop::collection::vec((body, len), 1..5);
    prop_oneof![
        8 => (prop_oneof![3 => Just(0u64), 1 => 0u64..6], 0u64..2, entries, any::<bool>())
            .prop_map(|(back, term_up, entries, commit)| Step::Persist { back, term_up, entries, commit }),
        1 => Just(Step::Vote),
        4 => (0u64..8).prop_map(|keep| Step::Trim { keep }),
        1 => (0u64..5).prop_map(|ahead| Step::Reset { ahead }),
        3 => Just(Step::Reopen),
    ]
}

fn run(steps: Vec<Step>) {
    let mut bed = Bed::create();
    let mut model = State::new();
    let mut term = 1;
    for step in steps {
        match step {
            Step::Persist {
                back,
                term_up,
                entries,
                commit,
            } => {
                term += term_up;
                let least = model.first.max(model.hard.commit + 1);
                let from = (model.last() + 1).saturating_sub(back).max(least);
                let framed: usize = entries
                    .iter()
                    .filter(|(body, _)| *body != Body::Heap)
                    .map(|(_, len)| (len + HEADROOM).div_ceil(FRAME_BYTES as usize))
                    .sum();
                let entries: Vec<Entry> = (from..)
                    .zip(entries)
                    .map(|(index, (body, len))| {
                        // Without enough frames the bytes come from the heap.
                        let body = if framed > bed.pool.free() as usize {
                            Body::Heap
                        } else {
                            body
                        };
                        entry(index, term, body, len)
                    })
                    .collect();
                let covered = from + entries.len() as u64 - 1;
                let state = commit.then(|| hard(term, covered));
                let payload_bytes = entries.iter().map(|entry| entry.bytes.len() as u64).sum();
                let fits = bed.ring.fits(entries.len() as u64, payload_bytes);
                let op = Op::Persist(from, entries, state);
                match bed.apply(&op) {
                    Ok(()) => model = model.after(&op),
                    Err(RingError::Full { .. }) => {
                        assert!(!fits, "refused although it fits");
                        model.entries.truncate((from - model.first) as usize);
                    }
                    Err(error) => panic!("{error}"),
                }
            }
            Step::Vote => {
                term += 1;
                let op = Op::Persist(0, Vec::new(), Some(hard(term, model.hard.commit)));
                bed.apply(&op).expect("a hard state always fits");
                model = model.after(&op);
            }
            Step::Trim { keep } => {
                let through = model.last().saturating_sub(keep);
                bed.apply(&Op::Trim(through)).expect("not beyond the end");
                if through >= model.first {
                    model = model.after(&Op::Trim(through));
                }
            }
            Step::Reset { ahead } => {
                let op = Op::Reset(model.last() + ahead, term);
                bed.apply(&op).expect("never fails");
                model = model.after(&op);
            }
            Step::Reopen => {
                let again = Bed::open(&bed.durable()).expect("what is durable reads back");
                assert_eq!(again.ring.used_bytes(), bed.ring.used_bytes());
                assert_eq!(again.ring.free_slots(), bed.ring.free_slots());
                assert_eq!(again.pool.free(), bed.pool.free());
                bed = again;
            }
        }
        assert_eq!(bed.state(), model);
        assert!(bed.ring.used_bytes() <= RECORDS_BYTES);
        assert_eq!(bed.ring.term(model.last() + 1), None);
        assert_eq!(bed.ring.term(u64::MAX), None);
        if model.first > 1 {
            assert_eq!(bed.ring.term(model.first - 2), None);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases * 6, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn behaves_like_a_vector(steps in prop::collection::vec(step(), 1..60)) {
        run(steps);
    }
}

fn heap(index: u64, len: usize) -> Op {
    Op::Persist(index, vec![entry(index, 1, Body::Heap, len)], None)
}

/// Thousands of entries of ever other sizes through 16 slots and 4 KiB, reopened at every place of
/// the wrap.
#[test]
fn round_and_round() {
    let mut bed = Bed::create();
    let mut model = State::new();
    for index in 1..2000u64 {
        let op = heap(index, (index * 37 % 400) as usize);
        while let Err(error) = bed.apply(&op) {
            assert!(matches!(error, RingError::Full { .. }), "{error}");
            let trim = Op::Trim(model.first + index % 3 % model.entries.len() as u64);
            bed.apply(&trim).expect("within the log");
            model = model.after(&trim);
        }
        model = model.after(&op);
        if index % 7 == 0 {
            bed = Bed::open(&bed.durable()).expect("what is durable reads back");
        }
        assert_eq!(bed.state(), model, "at {index}");
    }
}

/// The record that begins behind the wrap leaves a gap before it. After a restart the gap must
/// count as used again, or `fits` would promise room that is not in one piece.
#[test]
fn the_gap_at_the_wrap_counts_after_a_restart() {
    let mut bed = Bed::create();
    for index in 1..=4 {
        bed.apply(&heap(index, 800)).expect("room");
    }
    bed.apply(&Op::Trim(2)).expect("within the log");
    bed.apply(&heap(5, 880)).expect("behind the wrap");
    let gap = RECORDS_BYTES - 4 * 896;
    assert!(gap > 0);
    let used = 2 * 896 + gap + 960;
    assert_eq!(bed.ring.used_bytes(), used);
    let mut bed = Bed::open(&bed.durable()).expect("recovers");
    assert_eq!(bed.ring.used_bytes(), used);
    // Once the gap lies before the first entry it is free.
    bed.apply(&Op::Trim(4)).expect("within the log");
    assert_eq!(bed.ring.used_bytes(), 960);
}

#[test]
fn full_by_slots_and_by_bytes() {
    let mut bed = Bed::create();
    for index in 1..=15 {
        assert!(bed.ring.fits(1, 10));
        bed.apply(&heap(index, 10)).expect("a slot is free");
    }
    assert_eq!((bed.ring.free_slots(), bed.ring.fill()), (0, 1.0));
    assert!(!bed.ring.fits(1, 0));
    let before = bed.state();
    assert!(matches!(
        bed.apply(&heap(16, 0)),
        Err(RingError::Full { .. })
    ));
    assert_eq!(bed.state(), before);
    let mut bed = Bed::open(&bed.durable()).expect("a full ring recovers");
    assert_eq!(bed.state(), before);
    bed.apply(&Op::Trim(1)).expect("within the log");
    bed.apply(&heap(16, 10)).expect("a slot is free again");

    let mut bed = Bed::create();
    for index in 1..=4 {
        bed.apply(&heap(index, 896)).expect("room");
    }
    let before = bed.state();
    assert_eq!(
        bed.apply(&heap(5, 500)),
        Err(RingError::Full {
            needed: 576,
            free: RECORDS_BYTES - 4 * 960
        })
    );
    // A batch whose last entry does not fit leaves none of it, neither now nor after a restart.
    let two = Op::Persist(
        5,
        vec![entry(5, 1, Body::Heap, 100), entry(6, 1, Body::Heap, 600)],
        None,
    );
    assert!(matches!(bed.apply(&two), Err(RingError::Full { .. })));
    assert_eq!(bed.state(), before);
    assert_eq!(Bed::open(&bed.durable()).expect("recovers").state(), before);
}

#[test]
fn the_largest_entry() {
    let mut bed = Bed::create();
    let limit = bed.ring.max_payload();
    assert_eq!(limit, 1024 - 128);
    for body in [Body::Heap, Body::Frame, Body::Mixed] {
        let op = |len| Op::Persist(1, vec![entry(1, 1, body, len)], None);
        let refused = bed.apply(&op(limit as usize + 1));
        assert_eq!(
            refused,
            Err(RingError::TooLarge {
                len: limit + 1,
                limit
            })
        );
        bed.apply(&op(limit as usize))
            .expect("the limit itself is fine");
        assert_eq!(bed.ring.payload_len(1), Some(limit as u32));
    }
}

/// Appends an entry whose payload the test has made itself.
fn append(bed: &mut Bed, index: u64, payload: &Payload) {
    let entries = [NewEntry {
        index,
        term: 1,
        kind: 7,
        payload,
    }];
    let _ = bed
        .ring
        .persist(Batch {
            entries: &entries,
            hard_state: None,
        })
        .expect("fits");
}

/// A payload of many slivers and one frame: a table of all of them would take far more room than
/// the bytes, beyond what the size limit promises.
#[test]
fn slivers_do_not_blow_records_up() {
    let mut bed = Bed::create();
    let mut payload = Payload::new();
    for byte in 0..200 {
        payload.push_bytes(&[byte]);
    }
    let mut frame = bed.pool.alloc().expect("a free frame");
    frame[..64].fill(9);
    payload.push_frame(frame.freeze(0..64));
    assert!(bed.ring.fits(1, 264));
    append(&mut bed, 1, &payload);
    assert_eq!(bed.ring.used_bytes(), 384);
    let again = Bed::open(&bed.durable()).expect("recovers");
    assert_eq!(again.state().entries[0].1, payload.to_vec());
}

/// An entry of a few bytes does not take a whole frame: frames would be gone while the ring is
/// empty. A payload that fills an eighth of its frame stays in it.
#[test]
fn small_payloads_give_their_frames_back() {
    let mut bed = Bed::create();
    let least = FRAME_BYTES as usize / 8;
    for (index, len, held) in [(1, least - 1, 0), (2, least, 1)] {
        let mut frame = bed.pool.alloc().expect("a free frame");
        frame[..len].fill(index as u8);
        let payload = Payload::from(frame.freeze(0..len));
        append(&mut bed, index, &payload);
        drop(payload);
        assert_eq!(bed.pool.count() - bed.pool.free(), held, "{len:?}");
    }
    let again = Bed::open(&bed.durable()).expect("recovers");
    let wanted = [vec![1; least - 1], vec![2; least]];
    assert!((again.state().entries.iter().map(|(_, bytes)| bytes)).eq(&wanted));
}

/// A frame of another pool has no number that recovery could look up: its bytes are copied.
#[test]
fn frames_of_another_pool_are_copied() {
    let mut bed = Bed::create();
    let other = Region::anonymous(8192).expect("memory");
    let other = cyclone_pmem::Pool::new(other.take(0, 8192).expect("free"), FRAME_BYTES);
    let mut frame = other.alloc().expect("a free frame");
    frame.fill(3);
    let payload = Payload::from(frame.freeze(0..500));
    append(&mut bed, 1, &payload);
    drop(payload);
    assert_eq!(other.free(), other.count());
    assert_eq!(
        Bed::open(&bed.durable()).expect("recovers").state().entries,
        [(1, vec![3; 500])]
    );
}

/// Who overwrites a suffix may count on the room that its records take, and on no more: what lies
/// in frames gives the ring nothing back.
#[test]
fn a_suffix_gives_back_what_its_records_take() {
    let mut bed = Bed::create();
    let bodies = [Body::Heap, Body::Frame, Body::Mixed];
    let entries = (1..)
        .zip(bodies)
        .map(|(index, body)| entry(index, 1, body, 400));
    bed.apply(&Op::Persist(1, entries.collect(), None))
        .expect("fits");
    let takes = |bed: &Bed, index| bed.ring.record_bytes(index).expect("there");
    let [heap, frame, mixed] = [1, 2, 3].map(|index| takes(&bed, index));
    assert!(heap > 400 && frame <= 128 && mixed <= 256);
    assert_eq!(bed.ring.used_bytes(), heap + frame + mixed);
    bed.apply(&Op::Persist(2, vec![entry(2, 2, Body::Heap, 1)], None))
        .expect("fits");
    assert_eq!(bed.ring.used_bytes(), heap + takes(&bed, 2));
    assert_eq!(bed.ring.record_bytes(3), None);
}

/// Frames stay taken as long as the log names them, over a restart too, and not longer.
#[test]
fn frames_come_back() {
    let mut bed = Bed::create();
    let all = bed.pool.count();
    let framed = |index| Op::Persist(index, vec![entry(index, 1, Body::Frame, 200)], None);
    for index in 1..=3 {
        bed.apply(&framed(index)).expect("fits");
    }
    assert_eq!(bed.pool.free(), all - 3);
    let mut bed = Bed::open(&bed.durable()).expect("recovers");
    assert_eq!(bed.pool.free(), all - 3);
    bed.apply(&Op::Trim(1)).expect("within the log");
    assert_eq!(bed.pool.free(), all - 2);
    bed.apply(&heap(3, 5)).expect("replaces one");
    assert_eq!(bed.pool.free(), all - 1);
    bed.ring.reset(8, 2);
    assert_eq!(bed.pool.free(), all);
}

#[test]
fn refusals_change_nothing() {
    let mut bed = Bed::create();
    for index in 1..=4 {
        bed.apply(&Op::Persist(
            index,
            vec![entry(index, 3, Body::Heap, 9)],
            Some(hard(3, 1)),
        ))
        .expect("fits");
    }
    bed.apply(&Op::Trim(2)).expect("within the log");
    let before = bed.state();
    let not = |index| {
        Err(RingError::NotConsecutive {
            index,
            last: 4,
            first: 3,
        })
    };
    assert_eq!(bed.apply(&heap(6, 1)), not(6));
    assert_eq!(bed.apply(&heap(2, 1)), not(2));
    assert_eq!(bed.apply(&heap(0, 1)), not(0));
    let payload = Payload::from_vec(vec![1]);
    let gap = [5, 7].map(|index| NewEntry {
        index,
        term: 3,
        kind: 7,
        payload: &payload,
    });
    assert_eq!(
        bed.ring
            .persist(Batch {
                entries: &gap,
                hard_state: None
            })
            .err(),
        not(7).err()
    );
    // Recovery takes falling terms for corruption.
    let backwards = RingError::TermBackwards {
        index: 5,
        term: 2,
        previous: 3,
    };
    assert_eq!(
        bed.apply(&Op::Persist(5, vec![entry(5, 2, Body::Heap, 1)], None)),
        Err(backwards)
    );
    let backwards = RingError::TermBackwards {
        index: 3,
        term: 2,
        previous: 3,
    };
    assert_eq!(
        bed.apply(&Op::Persist(3, vec![entry(3, 2, Body::Heap, 1)], None)),
        Err(backwards)
    );
    assert_eq!(
        bed.apply(&Op::Trim(5)),
        Err(RingError::TrimBeyondEnd {
            through: 5,
            last: 4
        })
    );
    bed.apply(&Op::Trim(1)).expect("long done");
    // Too many members are found out before an entry is written.
    let crowd = HardState {
        learners: vec![1; 65],
        ..hard(4, 1)
    };
    let op = Op::Persist(5, vec![entry(5, 4, Body::Heap, 1)], Some(crowd.clone()));
    assert_eq!(bed.apply(&op), Err(RingError::TooManyMembers(65)));
    assert_eq!(bed.state(), before);
    assert_eq!(Bed::open(&bed.durable()).expect("recovers").state(), before);

    let (region, _) = Region::simulated(RING_BYTES).expect("memory");
    let small = Ring::create(
        region.take(0, RING_BYTES - 64).expect("free"),
        SPEC,
        None,
        &hard(0, 0),
    );
    assert!(matches!(small, Err(RingError::AreaTooSmall { .. })));
    let (region, _) = Region::simulated(RING_BYTES).expect("memory");
    let refused = Ring::create(
        region.take(0, RING_BYTES).expect("free"),
        SPEC,
        None,
        &crowd,
    );
    assert_eq!(refused.err(), Some(RingError::TooManyMembers(65)));
    // Never formatted.
    let (region, _) = Region::simulated(RING_BYTES).expect("memory");
    let blank = Ring::open(region.take(0, RING_BYTES).expect("free"), SPEC, None);
    assert!(matches!(blank, Err(RingError::Corrupt { index: 0, .. })));
}

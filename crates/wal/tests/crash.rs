//! Every operation, crashed at every store, flush and fence. Where the ways a crash can end are
//! few, all are tried; else a sample, whose seed `CYCLONE_SEED` replaces.

mod support;

use cyclone_pmem::Region;
use cyclone_wal::{Ring, RingError, RingSpec};
use support::{
    Bed, Body, Entry, Op, RECORDS_AT, REGION_BYTES, RING_BYTES, SPEC, State, entry, hard, seed,
};

/// Ways that are all tried.
const EXHAUSTIVE: u64 = 512;
/// Ways that are tried where there are more.
const SAMPLES: u64 = 200;

fn images(bed: &Bed, point: u64) -> Vec<(String, Vec<u8>)> {
    if let Some(all) = bed.sim.exhaustive(EXHAUSTIVE) {
        return all
            .into_iter()
            .enumerate()
            .map(|(way, image)| (format!("way {way}"), image))
            .collect();
    }
    let mut images: Vec<_> = (0..SAMPLES)
        .map(|sample| seed().wrapping_add(point << 32 | sample))
        .map(|seed| (format!("sample {seed}"), bed.sim.sampled(seed)))
        .collect();
    images.push(("oldest".into(), bed.sim.image(|_| 0)));
    images.push(("newest".into(), bed.sim.image(|ways| ways - 1)));
    images
}

/// Runs `before`, then crashes `ops` at every event, and checks every recovery.
fn enumerate(before: &[Op], ops: &[Op]) {
    println!("seed {} (CYCLONE_SEED)", seed());
    let mut states = vec![
        before
            .iter()
            .fold(State::new(), |state, op| state.after(op)),
    ];
    let prepare = || {
        let mut bed = Bed::create();
        before
            .iter()
            .for_each(|op| bed.apply(op).expect("preparation"));
        bed
    };
    let mut bed = prepare();
    assert_eq!(bed.state(), states[0]);
    let start = bed.sim.events();
    let mut ends = Vec::new();
    for op in ops {
        bed.apply(op).expect("the operation itself");
        ends.push(bed.sim.events());
        states.push(states[states.len() - 1].after(op));
        assert_eq!(bed.state(), states[states.len() - 1]);
    }
    let mut recoveries = 0;
    for point in start..=ends[ends.len() - 1] {
        let mut bed = prepare();
        bed.sim.crash_after(point);
        ops.iter()
            .for_each(|op| bed.apply(op).expect("the operation itself"));
        let done = ends.iter().filter(|&&end| end <= point).count();
        let allowed = match ops.get(done) {
            Some(op) => states[done].during(op),
            None => vec![states[done].clone()],
        };
        for (way, image) in images(&bed, point) {
            let context = format!("{way}, event {} of op {done} in {ops:?}", point - start);
            check(&image, &allowed, &context);
            recoveries += 1;
        }
    }
    println!(
        "{recoveries} recoveries over {} crash points",
        ends[ends.len() - 1] - start + 1
    );
}

/// The recovered log is an allowed one, can be used, and is still there after another crash.
fn check(image: &[u8], allowed: &[State], context: &str) {
    let mut bed = Bed::open(image).unwrap_or_else(|error| panic!("{error}: {context}"));
    let found = bed.state();
    assert!(
        allowed.contains(&found),
        "{found:?}\nis none of {allowed:?}\n{context}"
    );
    assert_eq!(
        Bed::open(&bed.durable()).map(|bed| bed.state()),
        Ok(found.clone()),
        "recovered twice: {context}"
    );
    let index = found.last() + 1;
    let term = found.term(found.last()).max(found.hard.term) + 1;
    let next = [
        entry(index, term, Body::Mixed, 200),
        entry(index + 1, term, Body::Heap, 70),
    ];
    let op = Op::Persist(index, next.to_vec(), Some(hard(term, index)));
    bed.apply(&op)
        .unwrap_or_else(|error| panic!("append after recovery: {error}: {context}"));
    let expected = found.after(&op);
    let again = Bed::open(&bed.durable())
        .unwrap_or_else(|error| panic!("{error}: second reopen, {context}"));
    assert_eq!(again.state(), expected, "{context}");
    drop(bed);
}

fn append(from: u64, entries: &[(u64, Body, usize)]) -> Op {
    Op::Persist(from, batch(from, entries), None)
}

fn batch(from: u64, entries: &[(u64, Body, usize)]) -> Vec<Entry> {
    (from..)
        .zip(entries)
        .map(|(index, &(term, body, len))| entry(index, term, body, len))
        .collect()
}

fn some_log() -> Vec<Op> {
    let entries = [
        (1, Body::Heap, 10),
        (1, Body::Frame, 100),
        (2, Body::Heap, 0),
        (2, Body::Mixed, 150),
    ];
    vec![Op::Persist(1, batch(1, &entries), Some(hard(2, 2)))]
}

/// The machine stops while a group of inline entries is appended: a prefix of the group may be
/// there, whole.
#[test]
fn append_inline() {
    enumerate(
        &some_log(),
        &[append(
            5,
            &[(2, Body::Heap, 5), (3, Body::Heap, 64), (3, Body::Heap, 0)],
        )],
    );
}

/// The same with payloads that stay in frames: a slot must not be durable before the frame's bytes
/// are.
#[test]
fn append_extents() {
    enumerate(
        &some_log(),
        &[append(5, &[(2, Body::Frame, 64), (3, Body::Mixed, 130)])],
    );
}

/// A new leader's entries replace a suffix: the old suffix may be there whole or not at all, never
/// behind new entries.
#[test]
fn truncate_and_append() {
    enumerate(&some_log(), &[append(3, &[(3, Body::Heap, 30)])]);
    enumerate(
        &some_log(),
        &[append(
            3,
            &[
                (3, Body::Heap, 30),
                (3, Body::Frame, 90),
                (4, Body::Heap, 1),
            ],
        )],
    );
    enumerate(
        &[append(1, &[(1, Body::Heap, 3); 5])],
        &[append(1, &[(2, Body::Heap, 3); 2])],
    );
}

/// Entries are trimmed, their space and frames are used again, and the machine stops: what was
/// trimmed stays away.
#[test]
fn trim_and_reuse() {
    enumerate(&some_log(), &[Op::Trim(1)]);
    enumerate(
        &some_log(),
        &[Op::Trim(3), append(5, &[(2, Body::Frame, 80)])],
    );
    enumerate(
        &some_log(),
        &[
            Op::Trim(4),
            append(5, &[(2, Body::Frame, 80), (2, Body::Frame, 81)]),
        ],
    );
}

/// A checkpoint replaces the log: all old entries are there or none, and none comes back behind new
/// ones.
#[test]
fn reset_and_append() {
    enumerate(&some_log(), &[Op::Reset(9, 3)]);
    enumerate(
        &some_log(),
        &[
            Op::Reset(9, 3),
            Op::Persist(10, batch(10, &[(4, Body::Frame, 70)]), Some(hard(4, 10))),
        ],
    );
    // The same indexes again, so that stale slots would fit.
    enumerate(
        &some_log(),
        &[Op::Reset(2, 3), append(3, &[(4, Body::Heap, 70)])],
    );
}

/// The machine stops while votes are stored: the old hard state or the new, whole, and never an
/// older one.
#[test]
fn hard_state() {
    let vote = |term| Op::Persist(0, Vec::new(), Some(hard(term, 2)));
    enumerate(&some_log(), &[vote(3), vote(4), vote(5)]);
}

/// Entries and the commit index that covers them in one batch: the index must not be durable before
/// them.
#[test]
fn entries_with_their_commit() {
    let entries = batch(5, &[(3, Body::Heap, 20), (3, Body::Frame, 64)]);
    enumerate(
        &some_log(),
        &[Op::Persist(5, entries.clone(), Some(hard(3, 6)))],
    );
    enumerate(&some_log(), &[Op::Persist(5, entries, Some(hard(3, 4)))]);
    let conflicting = batch(3, &[(3, Body::Heap, 20), (3, Body::Heap, 30)]);
    enumerate(
        &some_log(),
        &[Op::Persist(3, conflicting, Some(hard(3, 4)))],
    );
}

/// Records go round the area's end and slots round theirs while the machine stops.
#[test]
fn around_the_ends() {
    let mut before = Vec::new();
    let mut index = 1;
    // 14 slots and 3840 bytes further on.
    for _ in 0..7 {
        before.push(append(index, &[(1, Body::Heap, 200), (1, Body::Heap, 180)]));
        before.push(Op::Trim(index));
        index += 2;
        before.push(Op::Trim(index - 2));
    }
    before.push(append(15, &[(1, Body::Heap, 40)]));
    enumerate(
        &before,
        &[
            append(
                16,
                &[
                    (1, Body::Heap, 500),
                    (2, Body::Heap, 300),
                    (2, Body::Heap, 9),
                ],
            ),
            Op::Trim(16),
        ],
    );
}

/// The machine stops again while it recovers, at every point, and recovers the same log in the end.
#[test]
fn recovery_itself() {
    let cases: [(Vec<Op>, Op); 4] = [
        (some_log(), append(3, &[(3, Body::Heap, 30)])),
        (some_log(), Op::Reset(9, 3)),
        (some_log(), Op::Trim(3)),
        (
            some_log(),
            Op::Persist(5, batch(5, &[(3, Body::Heap, 20); 3]), Some(hard(3, 2))),
        ),
    ];
    for (before, op) in cases {
        let mut bed = Bed::create();
        before
            .iter()
            .for_each(|op| bed.apply(op).expect("preparation"));
        let start = bed.sim.events();
        bed.apply(&op).expect("the operation itself");
        for point in start..=bed.sim.events() {
            let mut bed = Bed::create();
            before
                .iter()
                .for_each(|op| bed.apply(op).expect("preparation"));
            bed.sim.crash_after(point);
            bed.apply(&op).expect("the operation itself");
            for sample in 0..8 {
                let image = bed.sim.sampled(seed() + sample);
                let recovered = Bed::open(&image).expect("recovers");
                let (state, events) = (recovered.state(), recovered.sim.events());
                for stop in 0..=events {
                    let (_, crashed) = Bed::open_crashing(&image, Some(stop));
                    let again = Bed::open(&crashed).map(|bed| bed.state());
                    assert_eq!(
                        again.as_ref(),
                        Ok(&state),
                        "seed {} stop {stop} of {op:?}",
                        seed() + sample
                    );
                }
            }
        }
    }
}

/// The process is killed between storing slots, anchor or hard state and flushing them. The new
/// process reads them from the caches and tells others; then the power fails. What recovery has
/// shown must be durable.
#[test]
fn killed_process_then_power_loss() {
    let mut killed = Bed::create();
    some_log()
        .iter()
        .for_each(|op| killed.apply(op).expect("preparation"));
    killed.apply(&Op::Trim(1)).expect("trims");
    let visible = killed.sim.image(|ways| ways - 1);

    let (region, sim) = Region::simulated(REGION_BYTES).expect("memory");
    let mut area = region.take(0, RING_BYTES).expect("free");
    area.write(0, &visible[..RING_BYTES as usize]);
    area.persist(RECORDS_AT, RING_BYTES - RECORDS_AT);
    let frames = region
        .take(RING_BYTES, REGION_BYTES - RING_BYTES)
        .expect("free");
    let mut frames = frames;
    frames.write(0, &visible[RING_BYTES as usize..]);
    frames.persist(0, frames.len());
    let pool = cyclone_pmem::Pool::new(frames, support::FRAME_BYTES);
    let (ring, recovered) = Ring::open(area, SPEC, Some(&pool)).expect("recovers");
    assert_eq!((recovered.first, recovered.last), (2, 4));
    drop(ring);
    let after = Bed::open(&sim.image(|_| 0)).expect("recovers after the power loss");
    assert_eq!(after.state(), killed.state());
}

fn rotten(image: &[u8], at: usize, bit: u8) -> Vec<u8> {
    let mut image = image.to_vec();
    image[at] ^= 1 << bit;
    image
}

/// Any bit of a live slot, record or frame turns: the log says so and does not shorten itself, even
/// where the commit index would allow it.
#[test]
fn rot_is_detected() {
    let mut bed = Bed::create();
    some_log()
        .iter()
        .for_each(|op| bed.apply(op).expect("preparation"));
    let image = bed.durable();
    let mut places: Vec<usize> = (1..=4)
        .flat_map(|index| 12288 + index * 8..12288 + index * 8 + 8)
        .collect();
    // Headers, tables and inline bytes; records begin at multiples of 64 and take 74, 80, 64, 64 +
    // 48 + 28.
    for (from, len) in [(0, 74), (128, 80), (256, 64), (320, 64 + 48 + 28)] {
        places.extend(RECORDS_AT as usize + from..RECORDS_AT as usize + from + len);
    }
    for (index, from, len) in [(2, 0, 100), (4, 25, 122)] {
        let bytes = &bed.state().entries[index - 1].1[from..from + len];
        let at = image
            .windows(len)
            .rposition(|window| window == bytes)
            .expect("in its frame");
        assert!(at > RING_BYTES as usize);
        places.extend(at..at + len);
    }
    for at in places {
        for bit in 0..8 {
            match Bed::open(&rotten(&image, at, bit)) {
                Err(RingError::Corrupt { .. }) => {}
                Err(other) => panic!("byte {at} bit {bit}: {other}"),
                Ok(bed) => panic!("byte {at} bit {bit}: opened as {:?}", bed.state()),
            }
        }
    }
}

/// A bit of the newest hard state or anchor turns. A replica that fell back to the one before would
/// forget a vote, or take up a reset again that was finished: the copy in the other slot must be as
/// new.
#[test]
fn rot_in_one_copy_changes_nothing() {
    let mut bed = Bed::create();
    let mut ops = some_log();
    ops.push(Op::Reset(9, 2));
    ops.push(append(10, &[(3, Body::Heap, 50)]));
    ops.push(Op::Persist(0, Vec::new(), Some(hard(7, 9))));
    ops.push(append(11, &[(7, Body::Heap, 50)]));
    ops.iter()
        .for_each(|op| bed.apply(op).expect("preparation"));
    let image = bed.durable();
    for at in (0..44)
        .chain(64..108)
        .chain(4096..4096 + 81)
        .chain(8192..8192 + 81)
    {
        for bit in 0..8 {
            let opened = Bed::open(&rotten(&image, at, bit))
                .unwrap_or_else(|error| panic!("byte {at}: {error}"));
            assert_eq!(opened.state(), bed.state(), "byte {at} bit {bit}");
            // Mended: now the other copy may go, at any point of the next change.
            let repaired = opened.durable();
            let other = if at < 4096 { at ^ 64 } else { at ^ 12288 };
            assert_eq!(
                Bed::open(&rotten(&repaired, other, bit))
                    .expect("mended")
                    .state(),
                bed.state()
            );
        }
    }
    for (one, other) in [(0, 64), (4096, 8192)] {
        let image = rotten(&rotten(&image, one, 0), other, 0);
        assert!(matches!(
            Bed::open(&image),
            Err(RingError::Corrupt { index: 0, .. })
        ));
    }
}

/// One copy has rotted, was mended at the restart, and the next change stops half-way: the change
/// must have gone to the other slot than the last whole copy's.
#[test]
fn a_change_after_rot_spares_the_newest_copy() {
    let mut bed = Bed::create();
    some_log()
        .iter()
        .for_each(|op| bed.apply(op).expect("preparation"));
    bed.apply(&Op::Trim(1)).expect("trims");
    let (state, image) = (bed.state(), bed.durable());
    for (at, op) in [
        (0, Op::Trim(2)),
        (64, Op::Trim(2)),
        (4096, Op::Persist(0, Vec::new(), Some(hard(9, 2)))),
        (8192, Op::Persist(0, Vec::new(), Some(hard(9, 2)))),
    ] {
        let allowed = state.during(&op);
        for point in 0..60 {
            let mut bed = Bed::open(&rotten(&image, at, 3)).expect("one copy is whole");
            bed.sim.crash_after(bed.sim.events() + point);
            bed.apply(&op).expect("the operation itself");
            for (way, image) in images(&bed, point) {
                check(
                    &image,
                    &allowed,
                    &format!("{way}, rot at {at}, event {point} of {op:?}"),
                );
            }
        }
    }
}

/// The last slots are gone although the hard state says that they were committed: the log is
/// corrupt, stays so at the next try, and nothing in it has been touched meanwhile.
#[test]
fn a_log_that_ends_below_its_commit() {
    let mut bed = Bed::create();
    let entries = batch(1, &[(1, Body::Heap, 9); 4]);
    bed.apply(&Op::Persist(1, entries, Some(hard(1, 3))))
        .expect("preparation");
    let mut image = bed.durable();
    image[12288 + 2 * 8..12288 + 3 * 8].fill(0);
    for _ in 0..2 {
        let (opened, after) = Bed::open_crashing(&image, None);
        let expected = RingError::Corrupt {
            index: 2,
            what: "the log ends below the durable commit index",
        };
        assert_eq!(opened.err(), Some(expected));
        assert_eq!(after, image);
    }
}

/// Somebody changes the number of slots and starts again: read with another shape, records would
/// count as slots and be wiped.
#[test]
fn another_shape_is_refused_untouched() {
    let mut bed = Bed::create();
    some_log()
        .iter()
        .for_each(|op| bed.apply(op).expect("preparation"));
    let image = bed.durable();
    for (spec, bytes) in [
        (RingSpec { slots: 8, ..SPEC }, RING_BYTES),
        (RingSpec { slots: 32, ..SPEC }, RING_BYTES + 1024),
        (RingSpec { log: 4, ..SPEC }, RING_BYTES),
        (SPEC, RING_BYTES + 64),
    ] {
        let (region, sim) = Region::from_image(&image).expect("memory");
        let opened = Ring::open(region.take(0, bytes).expect("free"), spec, None);
        assert!(matches!(
            opened,
            Err(RingError::WrongShape {
                log: 5,
                slots: 16,
                area: RING_BYTES
            })
        ));
        assert_eq!(sim.image(|ways| ways - 1), image);
    }
}

//! Batches of two rings that become durable by the same fences: each must come through a crash at
//! any point as if it had been persisted alone.

mod support;

use cyclone_pmem::{CrashSim, Payload, Region};
use cyclone_wal::{
    Batch, NewEntry, PendingBatch, Persisted, Ring, RingError, RingSpec, persist_all,
};
use support::{Body, Entry, Op, RING_BYTES, SPEC, State, entry, hard, seed};

const AREA_BYTES: u64 = RING_BYTES.next_multiple_of(64);
const SAMPLES: u64 = 60;

fn spec(log: usize) -> RingSpec {
    RingSpec {
        log: log as u16,
        ..SPEC
    }
}

fn areas(region: &Region) -> [cyclone_pmem::Area; 2] {
    [0, 1].map(|log| region.take(log * AREA_BYTES, AREA_BYTES).expect("free"))
}

fn create() -> (CrashSim, [Ring; 2]) {
    let (region, sim) = Region::simulated(2 * AREA_BYTES).expect("memory");
    let mut log = 0;
    let rings = areas(&region).map(|area| {
        log += 1;
        Ring::create(area, spec(log), None, &hard(0, 0)).expect("the shape fits")
    });
    (sim, rings)
}

fn open(image: &[u8]) -> [Ring; 2] {
    let (region, _) = Region::from_image(image).expect("memory");
    let mut log = 0;
    areas(&region).map(|area| {
        log += 1;
        Ring::open(area, spec(log), None).expect("recovers").0
    })
}

fn state(ring: &Ring) -> State {
    let first = ring.first_index();
    let entries = (first..=ring.last_index()).map(|index| {
        let view = ring.entry(index).expect("within the log");
        (view.term, view.segments().flatten().copied().collect())
    });
    State {
        first,
        prev_term: ring.term(first - 1).expect("always known"),
        entries: entries.collect(),
        hard: ring.hard_state().clone(),
    }
}

fn write<'r>(ring: &'r mut Ring, op: &Op) -> Result<(&'r mut Ring, PendingBatch), RingError> {
    let Op::Persist(from, entries, hard_state) = op else {
        panic!("nothing else is done together");
    };
    let payload = |entry: &Entry| Payload::from_vec(entry.bytes.clone());
    let payloads: Vec<Payload> = entries.iter().map(payload).collect();
    let new: Vec<NewEntry<'_>> = (*from..)
        .zip(entries.iter().zip(&payloads))
        .map(|(index, (entry, payload))| NewEntry {
            index,
            term: entry.term,
            kind: 7,
            payload,
        })
        .collect();
    let written = ring.write(Batch {
        entries: &new,
        hard_state: hard_state.clone(),
    })?;
    Ok((ring, written))
}

fn together(rings: &mut [Ring; 2], ops: &[Op; 2]) -> Vec<Result<Persisted, RingError>> {
    let written = rings.iter_mut().zip(ops).map(|(ring, op)| write(ring, op));
    persist_all(written.collect::<Vec<_>>()).collect()
}

fn alone(rings: &mut [Ring; 2], ops: &[Op; 2]) {
    for (ring, op) in rings.iter_mut().zip(ops) {
        let one: Result<Vec<Persisted>, RingError> = persist_all(vec![write(ring, op)]).collect();
        assert_eq!(one.expect("there is room")[0].last(), ring.last_index());
    }
}

fn batch(from: u64, term: u64, lengths: &[usize]) -> Vec<Entry> {
    (from..)
        .zip(lengths)
        .map(|(index, len)| entry(index, term, Body::Heap, *len))
        .collect()
}

/// Some entries in both logs.
fn before() -> [Op; 2] {
    [
        Op::Persist(1, batch(1, 1, &[10, 30, 0]), Some(hard(1, 1))),
        Op::Persist(1, batch(1, 1, &[50, 20]), Some(hard(1, 1))),
    ]
}

fn cases() -> Vec<[Op; 2]> {
    let only_state = Op::Persist(0, Vec::new(), Some(hard(3, 2)));
    vec![
        // Entries in both.
        [
            Op::Persist(4, batch(4, 1, &[40]), None),
            Op::Persist(3, batch(3, 1, &[70, 8]), None),
        ],
        // Entries that one of them commits itself, beside a hard state alone.
        [
            Op::Persist(4, batch(4, 2, &[25, 90]), Some(hard(2, 5))),
            only_state.clone(),
        ],
        // A suffix that is overwritten, and a commit index below the batch.
        [
            Op::Persist(2, batch(2, 2, &[60]), Some(hard(2, 1))),
            Op::Persist(3, batch(3, 3, &[15]), Some(hard(3, 3))),
        ],
        // Nothing in one of them.
        [
            Op::Persist(0, Vec::new(), None),
            Op::Persist(3, batch(3, 1, &[33]), Some(hard(1, 2))),
        ],
        [only_state.clone(), only_state],
    ]
}

#[test]
fn a_crash_at_any_point_leaves_each_as_if_alone() {
    println!("seed {} (CYCLONE_SEED)", seed());
    for ops in cases() {
        let prepare = || {
            let (sim, mut rings) = create();
            alone(&mut rings, &before());
            (sim, rings)
        };
        let (sim, mut rings) = prepare();
        let start = sim.events();
        let from = [0, 1].map(|log| state(&rings[log]));
        for (log, persisted) in together(&mut rings, &ops).into_iter().enumerate() {
            let last = persisted.expect("there is room").last();
            assert_eq!(last, rings[log].last_index());
            assert_eq!(state(&rings[log]), from[log].after(&ops[log]));
        }
        for point in start..=sim.events() {
            let (crashed, mut rings) = prepare();
            crashed.crash_after(point);
            let _ = together(&mut rings, &ops);
            let sampled = (0..SAMPLES).map(|n| crashed.sampled(seed() ^ (point << 32 | n)));
            let edges = [crashed.image(|_| 0), crashed.image(|ways| ways - 1)];
            for image in sampled.chain(edges) {
                for (log, ring) in open(&image).iter().enumerate() {
                    let allowed = match point < sim.events() {
                        true => from[log].during(&ops[log]),
                        false => vec![from[log].after(&ops[log])],
                    };
                    let found = state(ring);
                    let at = point - start;
                    assert!(
                        allowed.contains(&found),
                        "log {log} after {at} events of {ops:?}:\n{found:?}\nis none of {allowed:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn two_rings_wait_as_often_as_one() {
    let ops = &cases()[0];
    let [(one, mut apart), (both, mut joined)] = [create(), create()];
    alone(&mut apart, &before());
    alone(&mut joined, &before());
    let (began_apart, began_joined) = (one.events(), both.events());
    alone(&mut apart, ops);
    together(&mut joined, ops)
        .into_iter()
        .for_each(|persisted| drop(persisted.expect("there is room")));
    let (apart, joined) = (one.events() - began_apart, both.events() - began_joined);
    assert_eq!(joined + 2, apart, "the stores and flushes are the same");
}

#[test]
fn one_that_is_refused_does_not_keep_the_other() {
    let (sim, mut rings) = create();
    alone(&mut rings, &before());
    let full = state(&rings[0]);
    let ops = [
        Op::Persist(4, batch(4, 1, &[800; 5]), None),
        Op::Persist(3, batch(3, 1, &[70]), None),
    ];
    let outcomes = together(&mut rings, &ops);
    assert!(matches!(outcomes[0], Err(RingError::Full { .. })));
    assert!(outcomes[1].is_ok());
    assert_eq!(state(&rings[0]), full);
    let again = open(&sim.image(|_| 0));
    assert_eq!(again.each_ref().map(state), rings.each_ref().map(state));
    assert_eq!(rings[1].last_index(), 3);
}

/// Records that no slot points at are forgotten by a start, whatever of them has reached the
/// memory.
#[test]
fn what_is_written_and_not_made_durable_was_never_there() {
    let (sim, mut rings) = create();
    alone(&mut rings, &before());
    let was = state(&rings[0]);
    let used = rings[0].used_bytes();
    let ops = &cases()[0];
    let (_, _written) = write(&mut rings[0], &ops[0]).expect("there is room");
    for image in [sim.image(|_| 0), sim.image(|ways| ways - 1)] {
        let mut again = open(&image);
        assert_eq!(
            (state(&again[0]), again[0].used_bytes()),
            (was.clone(), used)
        );
        alone(&mut again, ops);
        assert_eq!(state(&again[0]), was.after(&ops[0]));
    }
}

/// A batch that was not made durable must not be built upon: the process ends instead.
#[test]
#[should_panic(expected = "one batch at a time")]
fn a_second_batch_waits_for_the_first() {
    let (_sim, mut rings) = create();
    alone(&mut rings, &before());
    let [ops, _] = &cases()[0];
    drop(write(&mut rings[0], ops).expect("there is room"));
    let next = Op::Persist(5, batch(5, 1, &[10]), None);
    let _ = write(&mut rings[0], &next);
}

//! Mending damaged rings: every single damaged byte, with every index that the store may hold. What
//! is offered without loss keeps every entry above that index, the hard state, and the end; nothing
//! is changed by looking.

mod support;

use cyclone_pmem::{Area, Payload, Pool, Region};
use cyclone_wal::{Batch, Finding, HardState, NewEntry, Ring, RingError};

use support::{FRAME_BYTES, FRAMES, RECORDS_AT, REGION_BYTES, RING_BYTES, SPEC, hard};

/// Where the slots of anchor and hard state lie, each twice.
const ANCHORS: [usize; 2] = [0, 64];
const HARD_STATES: [usize; 2] = [4096, 8192];

const ENTRIES: u64 = 9;
/// Trimmed before the damage.
const TRIMMED: u64 = 2;

fn term(index: u64) -> u64 {
    1 + index / 4
}

fn payload(index: u64) -> Vec<u8> {
    (0..20 + index * 13)
        .map(|n| (n * 7 + index) as u8)
        .collect()
}

fn state() -> HardState {
    HardState {
        vote: 2,
        ..hard(term(ENTRIES) + 3, ENTRIES)
    }
}

fn pool(region: &Region) -> Pool {
    let frames = region.take(RING_BYTES, FRAMES * u64::from(FRAME_BYTES));
    Pool::new(frames.unwrap(), FRAME_BYTES)
}

/// A ring with entries 3 to 9, all of them committed, as bytes.
fn image() -> Vec<u8> {
    let region = Region::anonymous(REGION_BYTES).unwrap();
    let pool = pool(&region);
    let area = region.take(0, RING_BYTES).unwrap();
    let mut ring = Ring::create(area, SPEC, Some(&pool), &HardState::default()).unwrap();
    for index in 1..=ENTRIES {
        let body = Payload::from_vec(payload(index));
        let entry = NewEntry {
            index,
            term: term(index),
            kind: 1,
            payload: &body,
        };
        let batch = Batch {
            entries: &[entry],
            hard_state: None,
        };
        let _durable = ring.persist(batch).unwrap();
    }
    ring.trim(TRIMMED).unwrap();
    let batch = Batch {
        entries: &[],
        hard_state: Some(state()),
    };
    let _durable = ring.persist(batch).unwrap();
    let area = ring.into_area();
    area.bytes(0, RING_BYTES).to_vec()
}

/// A region that begins with these bytes.
fn placed(bytes: &[u8]) -> (Area, Pool) {
    let region = Region::anonymous(REGION_BYTES).unwrap();
    let pool = pool(&region);
    let mut area = region.take(0, RING_BYTES).unwrap();
    area.write(0, bytes);
    (area, pool)
}

fn check(ring: &Ring, first: u64, last: u64, commit: u64, what: &str) {
    assert_eq!(
        (ring.first_index(), ring.last_index()),
        (first, last),
        "{what}"
    );
    assert_eq!(ring.term(first - 1), Some(term(first - 1)), "{what}");
    for index in first..=last {
        let entry = ring.entry(index).unwrap();
        let bytes: Vec<u8> = entry.segments().flatten().copied().collect();
        assert!(bytes == payload(index), "{what}: entry {index}");
        assert_eq!(entry.term, term(index), "{what}");
    }
    let wanted = HardState { commit, ..state() };
    assert_eq!(ring.hard_state(), &wanted, "{what}");
}

#[test]
fn every_damaged_byte_with_everything_the_store_may_hold() {
    let image = image();
    let (mut heads, mut tails, mut hopeless) = (0, 0, 0);
    for at in 0..RING_BYTES as usize {
        // What is never read makes no difference; one of its bytes is enough.
        if image[at] == 0 && at % 64 != 0 {
            continue;
        }
        let mut damaged = image.clone();
        damaged[at] ^= 0x40;
        for held in TRIMMED - 1..=ENTRIES + 1 {
            let what = format!("byte {at}, held {held}");
            let told = (held, term(held));
            let (area, pool) = placed(&damaged);
            let (area, finding) = Ring::examine(area, SPEC, Some(&pool), told).unwrap();
            assert!(
                area.bytes(0, RING_BYTES) == damaged,
                "{what}: looking has changed it"
            );
            let repaired = Ring::repair_damage(area, SPEC, Some(&pool), told, false);
            match (finding, repaired) {
                (Finding::Sound { first, last }, Ok(ring)) => {
                    assert_eq!((first, last), (TRIMMED + 1, ENTRIES), "{what}");
                    check(&ring, first, last, ENTRIES, &what);
                }
                (Finding::Head { last, .. }, Ok(ring)) => {
                    heads += 1;
                    // Where the store holds the whole log, nothing is left of it.
                    assert_eq!(last, ENTRIES.max(held), "{what}");
                    check(&ring, held + 1, last, ENTRIES, &what);
                }
                (Finding::Tail { from, commit, .. }, Err(_)) => {
                    tails += 1;
                    assert!(
                        from > held && from <= ENTRIES && commit == ENTRIES,
                        "{what}"
                    );
                    // A refusal leaves it as it was; told to, it gives up exactly what was said.
                    let (area, pool) = placed(&damaged);
                    let repaired = Ring::repair_damage(area, SPEC, Some(&pool), told, true);
                    let ring = repaired.unwrap();
                    check(&ring, TRIMMED + 1, from - 1, from - 1, &what);
                }
                (Finding::Hopeless { .. }, Err(_)) => {
                    hopeless += 1;
                    let (area, pool) = placed(&damaged);
                    let repaired = Ring::repair_damage(area, SPEC, Some(&pool), told, true);
                    assert!(repaired.is_err(), "{what}");
                }
                (finding, repaired) => panic!("{what}: {finding:?}, {:?}", repaired.err()),
            }
        }
    }
    assert!(
        heads > 1000 && tails > 1000 && hopeless > 0,
        "{heads} {tails} {hopeless}"
    );
}

/// Both copies of the hard state, or of the anchor, gone: term and vote or the log's beginning are
/// forgotten. No mending.
#[test]
fn a_forgotten_vote_is_never_mended() {
    let image = image();
    for range in [0..4096, 4096..RECORDS_AT as usize - 128] {
        let mut damaged = image.clone();
        damaged[range.clone()].fill(0xff);
        for accept_loss in [false, true] {
            let (area, pool) = placed(&damaged);
            let held = (ENTRIES, term(ENTRIES));
            let repaired = Ring::repair_damage(area, SPEC, Some(&pool), held, accept_loss);
            assert!(repaired.is_err(), "{range:?}");
        }
    }
}

/// The image with the entry's record damaged, and one slot of anchor or hard state with it.
fn damaged(slot: usize, index: u64) -> Vec<u8> {
    let mut image = image();
    let body = payload(index);
    let at = image.windows(body.len()).rposition(|bytes| bytes == body);
    image[at.expect("it was written")] ^= 0x40;
    image[slot] ^= 0x40;
    image
}

/// The power fails at every moment while a ring is mended in which one copy of anchor or hard state
/// is damaged, too: the other one is not written over before there are two, so the ring can be
/// mended once more.
#[test]
fn mending_that_is_cut_off_leaves_a_ring_that_can_be_mended() {
    let held = (TRIMMED + 4, term(TRIMMED + 4));
    let mut cuts = 0;
    for slot in ANCHORS.into_iter().chain(HARD_STATES) {
        // One that the store holds, and one that it lacks.
        for index in [held.0, ENTRIES] {
            let damaged = damaged(slot, index);
            let mut done = false;
            for point in 0.. {
                let mut whole = damaged.clone();
                whole.resize(REGION_BYTES as usize, 0);
                let (region, sim) = Region::from_image(&whole).expect("memory");
                let pool = pool(&region);
                let area = region.take(0, RING_BYTES).expect("the ring's part is free");
                sim.crash_after(sim.events() + point);
                let repaired = Ring::repair_damage(area, SPEC, Some(&pool), held, true);
                drop(repaired.expect("what is damaged can be mended"));
                done |= !sim.has_crashed();
                for seed in 0..20 {
                    let what = format!("slot {slot}, entry {index}, point {point}, seed {seed}");
                    let (area, pool) = placed(&sim.sampled(seed)[..RING_BYTES as usize]);
                    let (area, finding) = Ring::examine(area, SPEC, Some(&pool), held)
                        .unwrap_or_else(|error| panic!("{error}: {what}"));
                    let hopeless = matches!(finding, Finding::Hopeless { .. });
                    assert!(!hopeless, "{finding:?}: {what}");
                    let ring = Ring::repair_damage(area, SPEC, Some(&pool), held, true)
                        .unwrap_or_else(|error| panic!("{error}: {what}"));
                    let (first, last) = match index {
                        ENTRIES => (TRIMMED + 1, ENTRIES - 1),
                        _ => (held.0 + 1, ENTRIES),
                    };
                    check(&ring, first, last, last, &what);
                    cuts += 1;
                }
                if done {
                    break;
                }
            }
        }
    }
    assert!(cuts > 1000, "{cuts}");
}

/// For a replica whose cluster is lost: everything before the damage can be read, and nothing is
/// changed.
#[test]
fn every_entry_before_a_damaged_one_is_salvaged() {
    let image = image();
    let (mut whole, mut cut, mut skipped) = (0, 0, 0);
    for at in 0..RING_BYTES as usize {
        if image[at] == 0 && at % 64 != 0 {
            continue;
        }
        let mut damaged = image.clone();
        damaged[at] ^= 0x40;
        for held in TRIMMED..=ENTRIES {
            let what = format!("byte {at}, held {held}");
            let (area, pool) = placed(&damaged);
            let told = (held, term(held));
            let (ring, error) = Ring::salvage(area, SPEC, Some(&pool), told).unwrap();
            let mut reached = held;
            while let Some(entry) = ring.entry(reached + 1) {
                reached += 1;
                let bytes: Vec<u8> = entry.segments().flatten().copied().collect();
                assert!(bytes == payload(reached), "{what}: entry {reached}");
                assert_eq!(entry.term, term(reached), "{what}");
            }
            let wanted = match error {
                Some(RingError::Corrupt { index, .. }) if index > held => {
                    cut += 1;
                    index - 1
                }
                Some(_) => {
                    skipped += 1;
                    ENTRIES
                }
                None => {
                    whole += 1;
                    ENTRIES
                }
            };
            assert_eq!(reached, wanted, "{what}: {error:?}");
            assert_eq!(ring.hard_state(), &state(), "{what}");
            let area = ring.into_area();
            assert!(
                area.bytes(0, RING_BYTES) == damaged,
                "{what}: it was changed"
            );
        }
    }
    assert!(
        whole > 100 && cut > 100 && skipped > 100,
        "{whole} {cut} {skipped}"
    );
}

//! The crash simulator: exactly the outcomes that memory allows, at every point of an operation.

use std::collections::BTreeSet;

use cyclone_pmem::{Area, CrashSim, Outcome, Pool, Region};
use proptest::prelude::*;

const LEN: u64 = 1024;

fn simulated() -> (Area, CrashSim) {
    let (region, sim) = Region::simulated(LEN).unwrap();
    (region.take(0, LEN).unwrap(), sim)
}

fn word(image: &[u8], offset: usize) -> u64 {
    u64::from_le_bytes(image[offset..offset + 8].try_into().unwrap())
}

/// What the words at the offsets can be after a crash now.
fn outcomes<const N: usize>(sim: &CrashSim, offsets: [usize; N]) -> BTreeSet<[u64; N]> {
    let images = sim.exhaustive(10_000).unwrap();
    images
        .iter()
        .map(|image| offsets.map(|offset| word(image, offset)))
        .collect()
}

#[test]
fn unflushed_stores_may_be_lost_or_not() {
    let (mut area, sim) = simulated();
    area.store_u64(0, 1);
    area.store_u64(0, 2);
    assert_eq!(outcomes(&sim, [0]), BTreeSet::from([[0], [1], [2]]));
    area.flush(0, 8);
    assert_eq!(
        outcomes(&sim, [0]),
        BTreeSet::from([[0], [1], [2]]),
        "flushed, not fenced"
    );
    area.store_u64(0, 3);
    area.fence();
    assert_eq!(
        outcomes(&sim, [0]),
        BTreeSet::from([[2], [3]]),
        "the store after the flush is open"
    );
    area.persist(0, 8);
    assert_eq!(outcomes(&sim, [0]), BTreeSet::from([[3]]));
    assert_eq!(sim.outcomes(), 1);
}

#[test]
fn words_of_a_line_are_independent() {
    let (mut area, sim) = simulated();
    area.write(4, &[0xff; 8]);
    let (low, high) = (0xffff_ffff_0000_0000, 0x0000_0000_ffff_ffff);
    assert_eq!(sim.open_words(), [(0, 2), (8, 2)]);
    assert_eq!(
        outcomes(&sim, [0, 8]),
        BTreeSet::from([[0, 0], [low, 0], [0, high], [low, high]])
    );
}

#[test]
fn a_flush_covers_whole_lines_and_only_those() {
    let (mut area, sim) = simulated();
    for offset in [0, 56, 64, 120, 128] {
        area.store_u64(offset, 9);
    }
    area.persist(70, 1);
    assert_eq!(sim.open_words(), [(0, 2), (56, 2), (128, 2)]);
    area.persist(63, 66);
    assert_eq!(sim.open_words(), []);
    area.store_u64(0, 1);
    area.persist(0, 0);
    assert_eq!(sim.open_words(), [(0, 2)], "nothing was flushed");
}

#[test]
fn streaming_needs_only_a_fence_and_does_not_flush_its_neighbours() {
    let (mut area, sim) = simulated();
    area.store_u64(0, 5);
    area.write_streaming(8, &[7; 48]);
    assert_eq!(sim.open_words().len(), 7);
    area.fence();
    assert_eq!(sim.open_words(), [(0, 2)]);
    assert_eq!(sim.sampled(1)[8..56], [7; 48]);
}

#[test]
fn storing_the_same_again_opens_nothing() {
    let (mut area, sim) = simulated();
    area.zero(0, LEN);
    assert_eq!(sim.outcomes(), 1);
    area.store_u64(8, 4);
    area.store_u64(8, 4);
    assert_eq!(sim.open_words(), [(8, 2)]);
    area.flush(8, 8);
    area.store_u64(8, 4);
    area.fence();
    assert_eq!(sim.open_words(), []);
}

#[test]
fn frames_are_seen_when_they_are_frozen() {
    let (region, sim) = Region::simulated(LEN).unwrap();
    let pool = Pool::new(region.take(512, 512).unwrap(), 128);
    let mut frame = pool.alloc().unwrap();
    let at = 512 + frame.number() as usize * 128;
    frame[..16].copy_from_slice(&[3; 16]);
    let frame = frame.freeze(0..16);
    assert_eq!(sim.outcomes(), 4);
    frame.flush();
    pool.fence();
    assert_eq!(sim.outcomes(), 1);
    assert_eq!(sim.sampled(0)[at..at + 16], [3; 16]);
}

#[test]
fn exhaustive_counts_up_to_its_limit_only() {
    let (mut area, sim) = simulated();
    area.write(0, &[1; 80]);
    assert_eq!(sim.outcomes(), 1024);
    assert!(sim.exhaustive(1023).is_none());
    let images: BTreeSet<Vec<u8>> = sim.exhaustive(1024).unwrap().into_iter().collect();
    assert_eq!(images.len(), 1024);
    area.write(0, &[2; LEN as usize]);
    assert_eq!(sim.outcomes(), u64::MAX, "saturated");
    assert!(sim.exhaustive(u64::MAX - 1).is_none());
    assert_eq!(sim.sampled(42), sim.sampled(42), "the seed decides");
    assert_ne!(sim.sampled(42), sim.sampled(43));
}

#[test]
fn images_can_be_opened_again() {
    let (mut area, sim) = simulated();
    area.store_u64(64, 11);
    area.persist(64, 8);
    let (region, again) = Region::from_image(&sim.sampled(0)).unwrap();
    let area = region.take(0, LEN).unwrap();
    assert_eq!(area.load_u64(64), 11);
    assert_eq!((again.outcomes(), again.events()), (1, 0));
}

/// A record and the word that makes it valid, as a log writes them. With the flush between them
/// every crash point leaves either no word or a whole record; without it, the simulator finds the
/// torn record.
fn append(area: &mut Area, ordered: bool) {
    area.write(0, &[0xaa; 24]);
    area.flush(0, 24);
    if ordered {
        area.fence();
    }
    area.store_u64(64, 1);
    area.persist(64, 8);
}

fn torn(ordered: bool) -> bool {
    let (mut area, sim) = simulated();
    append(&mut area, ordered);
    let events = sim.events();
    (0..=events).any(|stop| {
        let (mut area, sim) = simulated();
        sim.crash_after(stop);
        append(&mut area, ordered);
        assert!(
            area.load_u64(64) == 1,
            "the program runs on and sees its own stores"
        );
        let images = sim.exhaustive(1000).unwrap();
        images
            .iter()
            .any(|image| word(image, 64) == 1 && image[..24] != [0xaa; 24])
    })
}

#[test]
fn a_missing_fence_is_found() {
    assert!(!torn(true));
    assert!(torn(false));
}

#[derive(Clone, Debug)]
enum Step {
    Write(u64, Vec<u8>),
    Stream(u64, Vec<u8>),
    Flush(u64, u64),
    Fence,
}

fn step() -> impl Strategy<Value = Step> {
    let bytes = || proptest::collection::vec(any::<u8>(), 0..40);
    prop_oneof![
        (0..LEN - 40, bytes()).prop_map(|(at, bytes)| Step::Write(at, bytes)),
        (0..LEN - 40, bytes()).prop_map(|(at, bytes)| Step::Stream(at, bytes)),
        (0..LEN - 200, 0..200u64).prop_map(|(at, len)| Step::Flush(at, len)),
        Just(Step::Fence),
    ]
}

proptest! {
    /// Against a plain model: every word of a crash image is a value that it held since the fence
    /// after its last flush.
    #[test]
    fn images_hold_only_possible_words(steps in proptest::collection::vec(step(), 0..60), seed: u64) {
        let (mut area, sim) = simulated();
        let words = (LEN / 8) as usize;
        // Per word all values so far; the index of the durable one; the index that the last flush
        // covers.
        let mut history: Vec<(Vec<u64>, usize, usize)> = vec![(vec![0], 0, 0); words];
        for step in steps {
            let (range, flushed) = match &step {
                Step::Write(at, bytes) => { area.write(*at, bytes); (*at..*at + bytes.len() as u64, false) }
                Step::Stream(at, bytes) => { area.write_streaming(*at, bytes); (*at..*at + bytes.len() as u64, true) }
                Step::Flush(at, len) => {
                    area.flush(*at, *len);
                    if *len > 0 {
                        for word in history.iter_mut().take((at + len).div_ceil(64) as usize * 8).skip((at / 64 * 8) as usize) {
                            word.2 = word.0.len() - 1;
                        }
                    }
                    continue;
                }
                Step::Fence => {
                    area.fence();
                    history.iter_mut().for_each(|word| word.1 = word.2);
                    continue;
                }
            };
            if range.is_empty() { continue; }
            for at in (range.start / 8)..range.end.div_ceil(8) {
                let entry = &mut history[at as usize];
                entry.0.push(area.load_u64(at * 8));
                if flushed { entry.2 = entry.0.len() - 1; }
            }
        }
        let image = sim.sampled(seed);
        for (at, (values, durable, _)) in history.iter().enumerate() {
            let found = word(&image, at * 8);
            prop_assert!(values[*durable..].contains(&found), "word {at}: {found:#x} of {values:x?} from {durable}");
        }
        let newest = sim.image(|ways| ways - 1);
        prop_assert_eq!(&newest[..], area.bytes(0, LEN), "the newest of everything is what the program sees");
    }
}

#[test]
fn memory_that_crashed_in_place_holds_what_an_image_of_the_crash_holds() {
    for seed in 0..100 {
        let (region, sim) = Region::simulated(8192).unwrap();
        let mut area = region.take(0, 8192).unwrap();
        for round in 0..20u8 {
            area.write(u64::from(round) * 200, &[round + 1; 72]);
            if round % 3 == 0 {
                area.persist(u64::from(round) * 200, 72);
            }
        }
        let image = match seed % 2 {
            0 => sim.sampled(seed),
            _ => sim.newest(),
        };
        drop((area, region));
        sim.crash(match seed % 2 {
            0 => Outcome::Words(seed),
            _ => Outcome::Newest,
        });
        assert!(sim.open_words().is_empty(), "seed {seed}");
        let after = Region::after_crash(&sim);
        let mut area = after.take(0, 8192).unwrap();
        assert_eq!(area.bytes(0, 8192), &image[..], "seed {seed}");
        assert_eq!(sim.newest(), image, "seed {seed}");
        // The next life's stores are open again.
        area.store_u64(640, 0xeeee);
        assert_eq!(sim.open_words(), [(640, 2)], "seed {seed}");
    }
}

#[test]
fn lines_are_kept_or_lost_whole() {
    let mut kept = 0;
    for seed in 0..64 {
        let (region, sim) = Region::simulated(4096).unwrap();
        let mut area = region.take(0, 4096).unwrap();
        area.write(128, &[7; 64]);
        drop((area, region));
        sim.crash(Outcome::Lines(seed));
        let image = sim.newest();
        assert!(image[128..192] == [7; 64] || image[128..192] == [0; 64]);
        kept += usize::from(image[128] == 7);
    }
    assert!((8..56).contains(&kept), "{kept} of 64");
}

#[test]
#[should_panic = "still in use"]
fn memory_in_use_does_not_crash_in_place() {
    let (_region, sim) = Region::simulated(4096).unwrap();
    sim.crash(Outcome::Newest);
}

#[test]
fn the_next_user_finds_nothing_that_was_not_durable() {
    const MORE: u64 = 64 << 10;
    let (region, sim) = Region::simulated(MORE).unwrap();
    let mut area = region.take(0, MORE / 2).unwrap();
    let pool = Pool::new(region.take(MORE / 2, MORE / 2).unwrap(), 4096);
    area.write(100, &[1; 5000]);
    area.persist(100, 5000);
    // Written and given back, and written and used in part only: the simulator was notified of
    // fewer bytes than were stored.
    let (mut used, mut unused) = (pool.alloc().unwrap(), pool.alloc().unwrap());
    unused.fill(2);
    drop(unused);
    used.fill(3);
    let used = used.freeze(0..64);
    sim.crash_after(sim.events());
    area.write(20_000, &[4; 8]);
    area.persist(20_000, 8);
    assert!(sim.has_crashed());
    let durable = sim.image(|_| 0);
    drop((used, area, pool, region));
    sim.crash(Outcome::Lines(1));
    let lines_kept = sim.newest();
    assert!(sim.flip(4096, &mut || 0x10));
    let after = Region::after_crash(&sim);
    let area = after.take(0, MORE).unwrap();
    let mut expected = lines_kept;
    expected[4096] ^= 0x10;
    assert_eq!(area.bytes(0, MORE), &expected[..]);
    let half = (MORE / 2) as usize;
    assert_eq!(expected[..4096], durable[..4096]);
    assert!(expected[half + 64..].iter().all(|byte| *byte == 0));
}

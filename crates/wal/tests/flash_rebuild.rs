//! Memory made anew from flash, where more is put back than a ring takes without frames: while the
//! log lived, what was received lay in frames.

#[path = "support/levels.rs"]
mod levels;

use cyclone_pmem::{CrashSim, Payload, Pool, Region};
use cyclone_wal::flash::{FlashMode, RebuildError};
use cyclone_wal::{Batch, NewEntry, Ring, RingSpec};
use levels::{LOG, Levels, RING_BYTES, RING_SLOTS, bytes, first_hard_state};

const FRAME_BYTES: u32 = 2048;
const FRAMES: u64 = 96;
const FRAMES_AT: u64 = RING_BYTES.next_multiple_of(4096);
const SPEC: RingSpec = RingSpec {
    log: LOG,
    slots: RING_SLOTS,
};

/// Memory for a ring, and frames behind it.
fn region(frames: u64) -> (Region, CrashSim, Pool) {
    let (region, sim) =
        Region::simulated(FRAMES_AT + frames * u64::from(FRAME_BYTES)).expect("memory");
    let pool = pool(&region, frames);
    (region, sim, pool)
}

fn pool(region: &Region, frames: u64) -> Pool {
    let area = region.take(FRAMES_AT, frames * u64::from(FRAME_BYTES));
    Pool::new(area.expect("first taker"), FRAME_BYTES)
}

/// A payload as it is received: one entry behind the other.
fn received(pool: &Pool, bytes: &[u8]) -> Payload {
    let mut payload = Payload::new();
    for piece in bytes.chunks(FRAME_BYTES as usize) {
        let mut frame = pool.alloc().expect("there are enough");
        frame[..piece.len()].copy_from_slice(piece);
        payload.push_frame(frame.freeze(0..piece.len()));
    }
    payload
}

/// Entries of these lengths, those from half a kilobyte on in frames, durable on flash and none of
/// them known to be committed.
fn lived(lens: &[usize]) -> Levels {
    let (region, sim, pool) = region(FRAMES);
    let area = region.take(0, RING_BYTES).expect("first taker");
    let ring = Ring::create(area, SPEC, Some(&pool), &first_hard_state()).expect("it fits");
    let mut levels = Levels {
        region,
        sim,
        ring,
        ..Levels::new(FlashMode::Only, 7)
    };
    for (index, len) in (1..).zip(lens) {
        let bytes = bytes(index, 1, *len);
        let payload = match *len < 512 {
            true => Payload::from_vec(bytes),
            false => received(&pool, &bytes),
        };
        let entry = NewEntry {
            index,
            term: 1,
            kind: 4,
            payload: &payload,
        };
        let batch = Batch {
            entries: &[entry],
            hard_state: None,
        };
        let _durable = levels.ring.persist(batch).expect("the ring has room");
    }
    levels.settle(lens.len() as u64);
    assert_eq!(levels.flash.hard_state().commit, 0);
    levels
}

fn check(ring: &Ring, lens: &[usize]) {
    assert_eq!(
        (ring.first_index(), ring.last_index()),
        (1, lens.len() as u64)
    );
    for (index, len) in (1..).zip(lens) {
        let entry = ring.entry(index).expect("within the log");
        let found: Vec<u8> = entry.segments().flatten().copied().collect();
        assert!(found == bytes(index, 1, *len), "entry {index}");
        assert_eq!((entry.term, entry.kind), (1, 4), "entry {index}");
    }
}

/// Makes memory with so many frames anew; answers how many of them the log took. All come back with
/// its entries, and what is in memory is durable there, too.
fn frames_taken(levels: &mut Levels, frames: u64, lens: &[usize]) -> u32 {
    let (region, sim, pool) = region(frames);
    let area = region.take(0, RING_BYTES).expect("first taker");
    let rebuilt = levels.flash.rebuild(area, SPEC, Some(&pool), 0);
    let mut ring = rebuilt.unwrap_or_else(|error| panic!("{error}"));
    check(&ring, lens);
    let free = pool.free();
    let (crashed, _) = Region::from_image(&sim.image(|_| 0)).expect("memory");
    let (area, other) = (crashed.take(0, RING_BYTES), self::pool(&crashed, frames));
    let opened = Ring::open(area.expect("first taker"), SPEC, Some(&other));
    check(&opened.expect("it is whole").0, lens);
    assert_eq!(pool.count() - free, ring.frames_held() as u32);
    assert!(free >= pool.count() / 8, "some are left to receive into");
    ring.trim(lens.len() as u64).expect("within the log");
    assert_eq!(pool.free(), pool.count());
    pool.count() - free
}

/// Twelve of 7,000 bytes: almost twice what the ring takes.
const LARGE: [usize; 12] = [7_000; 12];

#[test]
fn what_lay_in_frames_goes_back_into_frames() {
    let mut levels = lived(&LARGE);
    let payloads = LARGE.iter().sum::<usize>() as u64;
    assert!(payloads > levels.ring.capacity_bytes());
    let taken = frames_taken(&mut levels, FRAMES, &LARGE);
    // Of less than 64 bytes the ring makes a copy.
    let least = payloads / u64::from(FRAME_BYTES);
    assert!((least..=least + 1).contains(&taken.into()), "{taken}");
}

/// Short entries have only the ring: large ones that came before them do not take it.
#[test]
fn large_entries_leave_the_ring_to_small_ones() {
    let lens = [[7_000; 6].as_slice(), &[500; 52]].concat();
    frames_taken(&mut lived(&lens), FRAMES, &lens);
}

/// Entries of a third of a frame share frames, as those that come in one packet do.
#[test]
fn entries_share_frames() {
    let lens = [680; 63];
    let taken = frames_taken(&mut lived(&lens), 26, &lens);
    assert!((18..=22).contains(&taken), "{taken}");
}

#[test]
fn what_fits_the_ring_takes_no_frames() {
    let lens = [[7_000; 2].as_slice(), &[100; 20]].concat();
    assert_eq!(frames_taken(&mut lived(&lens), FRAMES, &lens), 0);
}

/// Frames for half of it: the ring takes the rest.
#[test]
fn where_frames_run_out_the_rest_lies_in_the_ring() {
    let taken = frames_taken(&mut lived(&LARGE), 32, &LARGE);
    assert!(taken > 20, "{taken}");
}

/// Too few frames, or none: nothing is lost, and the way out is said.
#[test]
fn what_does_not_fit_says_how_to_make_room() {
    let mut levels = lived(&LARGE);
    for frames in [0, 4] {
        let (region, _, pool) = region(frames.max(1));
        let area = region.take(0, RING_BYTES).expect("first taker");
        let pool = (frames > 0).then_some(&pool);
        match levels.flash.rebuild(area, SPEC, pool, 0) {
            Err(error @ RebuildError::TooLittleMemory(_)) => {
                assert!(error.to_string().contains("raise nvm_bytes"), "{error}");
            }
            Err(error) => panic!("{error}"),
            Ok(_) => panic!("it does not fit"),
        }
    }
    frames_taken(&mut levels, FRAMES, &LARGE);
}

//! Memory made anew from flash, where more is put back than a ring takes by itself.

#[path = "support/levels.rs"]
mod levels;

use cyclone_pmem::{Pool, Region};
use cyclone_wal::flash::{FlashMode, RebuildError};
use cyclone_wal::{Ring, RingSpec};
use levels::{LOG, Levels, RING_BYTES, RING_SLOTS, bytes};

const FRAME_BYTES: u32 = 2048;
const FRAMES: u64 = 128;
const PAYLOAD_BYTES: usize = 5_000;

fn region() -> (Region, Pool) {
    let frames_bytes = FRAMES * u64::from(FRAME_BYTES);
    let region = Region::anonymous(RING_BYTES.next_multiple_of(4096) + frames_bytes);
    let region = region.expect("memory");
    let at = RING_BYTES.next_multiple_of(4096);
    let area = region.take(at, frames_bytes).expect("first taker");
    (region, Pool::new(area, FRAME_BYTES))
}

/// While the log lives, most of what is received lies in frames and takes hardly any of the ring; nothing of it is known to be committed
/// when the power fails.
#[test]
fn what_lay_in_frames_goes_back_into_frames() {
    let mut levels = Levels::new(FlashMode::Only, 7);
    let mut last = 0;
    // All that is handed over at once shares pages.
    while levels.flash.fill() < 0.7 {
        while levels.append(last + 1, 1, PAYLOAD_BYTES) {
            last += 1;
        }
        while levels.flash.durable_index() < last {
            levels.pass(500, last);
        }
        levels.ring.trim(last).expect("within the log");
    }
    assert_eq!(levels.flash.hard_state().commit, 0);
    let payloads = last * PAYLOAD_BYTES as u64;
    assert!(payloads > levels.ring.capacity_bytes(), "{payloads}");
    let spec = RingSpec {
        log: LOG,
        slots: RING_SLOTS,
    };
    let (small, _) = region();
    let area = small.take(0, RING_BYTES).expect("first taker");
    match levels.flash.rebuild(area, spec, None, 0) {
        Err(error @ RebuildError::TooLittleMemory(_)) => {
            assert!(error.to_string().contains("raise nvm_bytes"), "{error}");
        }
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("it does not fit"),
    }
    let (region, pool) = region();
    let whole = pool.free();
    let area = region.take(0, RING_BYTES).expect("first taker");
    let mut ring: Ring = levels
        .flash
        .rebuild(area, spec, Some(&pool), 0)
        .unwrap_or_else(|error| panic!("{error}"));
    assert_eq!((ring.first_index(), ring.last_index()), (1, last));
    for index in 1..=last {
        let entry = ring.entry(index).expect("there");
        let found: Vec<u8> = entry.segments().flatten().copied().collect();
        assert!(found == bytes(index, 1, PAYLOAD_BYTES), "entry {index}");
    }
    // Some are left to receive into, and all come back.
    assert!(pool.free() < whole && pool.free() >= pool.count() / 4);
    ring.trim(last).expect("within the log");
    assert_eq!(pool.free(), whole);
}

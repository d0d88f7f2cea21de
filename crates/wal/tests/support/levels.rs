//! A ring in simulated memory and a flash log on a simulated disk, side by side.

#![allow(dead_code, reason = "each test program uses its part")]

use cyclone_pmem::{CrashSim, Payload, Region};
use cyclone_test_support::Random;
use cyclone_wal::flash::{
    FetchError, FlashError, FlashIdentity, FlashLog, FlashMode, FlashSpec, SimDisk, StoredEntry,
};
use cyclone_wal::{Batch, HardState, NewEntry, Ring, RingError, RingSpec};

pub const LOG: u16 = 3;
pub const SEGMENT: u32 = 8192;
pub const SEGMENTS: u64 = 16;
pub const RING_SLOTS: u32 = 64;
pub const RING_BYTES: u64 = 12288 + 64 * 8 + 48 * 1024;
pub const WHO: FlashIdentity = FlashIdentity {
    cluster: 77,
    replica: 2,
    incarnation: 5,
};

pub fn spec(mode: FlashMode) -> FlashSpec {
    FlashSpec {
        segment_bytes: SEGMENT,
        outstanding: 6,
        groups: 2,
        flush_after_us: 200,
        grow_bytes: 4 * u64::from(SEGMENT),
        stall_after_us: 5_000,
        retry_after_us: 300,
        ..FlashSpec::new(LOG, mode, u64::from(SEGMENT) * SEGMENTS)
    }
}

/// `CYCLONE_SEED`, or the given one.
pub fn seed(fixed: u64) -> u64 {
    let text = std::env::var("CYCLONE_SEED").ok();
    text.and_then(|text| text.parse().ok()).unwrap_or(fixed)
}

/// Bytes that no other entry has.
pub fn bytes(index: u64, term: u64, len: usize) -> Vec<u8> {
    let mut random = Random::new(index << 20 | term);
    (0..len).map(|_| random.below(256) as u8).collect()
}

pub struct Levels {
    pub region: Region,
    pub sim: CrashSim,
    pub ring: Ring,
    pub disk: SimDisk,
    pub flash: FlashLog,
    pub now_us: u64,
}

pub fn first_hard_state() -> HardState {
    HardState {
        term: 1,
        voters: vec![1, 2, 3],
        ..HardState::default()
    }
}

pub fn new_ring() -> (Region, CrashSim, Ring) {
    let (region, sim) = Region::simulated(RING_BYTES).expect("memory");
    let area = region.take(0, RING_BYTES).expect("first taker");
    let shape = RingSpec {
        log: LOG,
        slots: RING_SLOTS,
    };
    let ring = Ring::create(area, shape, None, &first_hard_state()).expect("the shape fits");
    (region, sim, ring)
}

pub fn open_ring(image: &[u8]) -> Result<(Region, CrashSim, Ring), RingError> {
    let (region, sim) = Region::from_image(image).expect("memory");
    let area = region.take(0, RING_BYTES).expect("first taker");
    let shape = RingSpec {
        log: LOG,
        slots: RING_SLOTS,
    };
    Ring::open(area, shape, None).map(|(ring, _)| (region, sim, ring))
}

pub fn open_flash(disk: &SimDisk, mode: FlashMode) -> Result<FlashLog, FlashError> {
    FlashLog::open(Box::new(disk.device()), spec(mode), &WHO).map(|(log, _)| log)
}

impl Levels {
    pub fn new(mode: FlashMode, seed: u64) -> Levels {
        let (region, sim, ring) = new_ring();
        let disk = SimDisk::new(u64::from(SEGMENT) * SEGMENTS, seed);
        let device = Box::new(disk.device());
        let hard = first_hard_state();
        let flash = FlashLog::create(device, spec(mode), &WHO, seed | 1, (0, 0), &hard)
            .expect("a blank disk");
        Levels {
            region,
            sim,
            ring,
            disk,
            flash,
            now_us: 1_000,
        }
    }

    /// Appends an entry to the ring; `false` when it is full.
    pub fn append(&mut self, index: u64, term: u64, len: usize) -> bool {
        let payload = Payload::from_vec(bytes(index, term, len));
        let entry = NewEntry {
            index,
            term,
            kind: 4,
            payload: &payload,
        };
        let persisted = self.ring.persist(Batch {
            entries: &[entry],
            hard_state: None,
        });
        match persisted {
            Ok(_) => true,
            Err(RingError::Full { .. }) => false,
            Err(error) => panic!("{error}"),
        }
    }

    /// Lets time pass, pumping up to `upto`.
    pub fn pass(&mut self, us: u64, upto: u64) {
        self.now_us += us;
        self.flash.poll(self.now_us);
        self.flash.pump(&self.ring, upto, self.now_us);
    }

    /// Until everything up to `upto` is durable on flash.
    pub fn settle(&mut self, upto: u64) {
        for _ in 0..20_000 {
            if self.flash.durable_index() >= upto
                && self.flash.durable_page() == self.flash.position()
            {
                return;
            }
            self.pass(50, upto);
        }
        let state = self.flash.state(self.now_us);
        panic!("entry {upto} does not become durable: {state:?}");
    }

    pub fn read(&mut self, from: u64, to: u64) -> Result<Vec<StoredEntry>, FetchError> {
        read(&mut self.flash, &mut self.now_us, from, to)
    }
}

/// Reads entries back, all of them.
pub fn read(
    flash: &mut FlashLog,
    now_us: &mut u64,
    from: u64,
    to: u64,
) -> Result<Vec<StoredEntry>, FetchError> {
    let mut found = Vec::new();
    while from + (found.len() as u64) <= to {
        let id = flash.fetch(from + found.len() as u64, to, 3_000)?;
        let fetched = loop {
            *now_us += 50;
            flash.poll(*now_us);
            if let Some(fetched) = flash.take_fetched() {
                break fetched;
            }
        };
        assert_eq!(fetched.id, id);
        found.extend(fetched.result?);
    }
    Ok(found)
}

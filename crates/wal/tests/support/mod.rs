//! A ring and its frames in one simulated region, the operations on it, and what the log must then
//! hold.
#![allow(dead_code, reason = "each test program uses its part")]

use cyclone_pmem::{CrashSim, Payload, Pool, Region};
use cyclone_wal::{Batch, HardState, NewEntry, Ring, RingError, RingSpec};

/// Smallest ring: 64 record units.
pub const SPEC: RingSpec = RingSpec { log: 5, slots: 16 };
pub const RECORDS_AT: u64 = 12288 + 16 * 8;
pub const RECORDS_BYTES: u64 = 4096;
pub const RING_BYTES: u64 = RECORDS_AT + RECORDS_BYTES;
pub const FRAME_BYTES: u32 = 512;
pub const FRAMES: u64 = 10;
/// Before a payload in its first frame.
pub const HEADROOM: usize = 40;
pub const REGION_BYTES: u64 = RING_BYTES + FRAMES * FRAME_BYTES as u64;

/// Where an entry's payload lies before it is appended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body {
    Heap,
    Frame,
    /// Heap, frame, heap.
    Mixed,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub term: u64,
    pub body: Body,
    pub bytes: Vec<u8>,
}

/// An entry whose bytes no other has.
pub fn entry(index: u64, term: u64, body: Body, len: usize) -> Entry {
    let mut word = index << 32 | term << 8 | 1;
    let bytes = std::iter::repeat_with(|| {
        word = word.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (word >> 56) as u8
    });
    Entry {
        term,
        body,
        bytes: bytes.take(len).collect(),
    }
}

#[derive(Clone, Debug)]
pub enum Op {
    /// Entries from an index on, and a hard state.
    Persist(u64, Vec<Entry>, Option<HardState>),
    Trim(u64),
    Reset(u64, u64),
}

/// What a log holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    pub first: u64,
    pub prev_term: u64,
    pub entries: Vec<(u64, Vec<u8>)>,
    pub hard: HardState,
}

pub fn hard(term: u64, commit: u64) -> HardState {
    HardState {
        term,
        vote: term % 3 + 1,
        commit,
        voters: vec![1, 2, 3],
        ..HardState::default()
    }
}

impl State {
    pub fn new() -> State {
        State {
            first: 1,
            prev_term: 0,
            entries: Vec::new(),
            hard: hard(0, 0),
        }
    }

    pub fn last(&self) -> u64 {
        self.first + self.entries.len() as u64 - 1
    }

    pub fn term(&self, index: u64) -> u64 {
        match index + 1 == self.first {
            true => self.prev_term,
            false => self.entries[(index - self.first) as usize].0,
        }
    }

    /// The state with entries from `from` on replaced by the first `count` of `entries`.
    fn with(&self, from: u64, entries: &[Entry], count: usize) -> State {
        let mut next = self.clone();
        next.entries.truncate((from - self.first) as usize);
        next.entries.extend(
            entries[..count]
                .iter()
                .map(|entry| (entry.term, entry.bytes.clone())),
        );
        next
    }

    pub fn after(&self, op: &Op) -> State {
        match op {
            Op::Persist(from, entries, state) => {
                let mut next = match entries.is_empty() {
                    true => self.clone(),
                    false => self.with(*from, entries, entries.len()),
                };
                next.hard = state.clone().unwrap_or(next.hard);
                next
            }
            Op::Trim(through) => State {
                first: through + 1,
                prev_term: self.term(*through),
                entries: self.entries[(through + 1 - self.first) as usize..].to_vec(),
                hard: self.hard.clone(),
            },
            Op::Reset(index, term) => State {
                first: index + 1,
                prev_term: *term,
                entries: Vec::new(),
                hard: self.hard.clone(),
            },
        }
    }

    /// Every state that a crash during `op` may leave.
    pub fn during(&self, op: &Op) -> Vec<State> {
        let after = self.after(op);
        let mut allowed = vec![self.clone(), after.clone()];
        if let Op::Persist(from, entries, _) = op {
            if !entries.is_empty() {
                allowed.extend((0..=entries.len()).map(|count| self.with(*from, entries, count)));
            }
            // The new hard state may be first, unless it commits what this very batch brings.
            let durable = if entries.is_empty() {
                self.last()
            } else {
                from - 1
            };
            if after.hard.commit <= durable {
                let renewed = allowed.iter().map(|state| State {
                    hard: after.hard.clone(),
                    ..state.clone()
                });
                allowed.extend(renewed.collect::<Vec<_>>());
            }
        }
        allowed
    }
}

pub struct Bed {
    pub region: Region,
    pub sim: CrashSim,
    pub pool: Pool,
    pub ring: Ring,
}

fn parts(region: &Region) -> (cyclone_pmem::Area, Pool) {
    let area = region.take(0, RING_BYTES).expect("the ring's part is free");
    let frames = region
        .take(RING_BYTES, FRAMES * u64::from(FRAME_BYTES))
        .expect("the frames' part is free");
    (area, Pool::new(frames, FRAME_BYTES))
}

impl Bed {
    pub fn create() -> Bed {
        let (region, sim) = Region::simulated(REGION_BYTES).expect("memory");
        let (area, pool) = parts(&region);
        let ring = Ring::create(area, SPEC, Some(&pool), &hard(0, 0)).expect("the shape fits");
        Bed {
            region,
            sim,
            pool,
            ring,
        }
    }

    pub fn open(image: &[u8]) -> Result<Bed, RingError> {
        Bed::open_crashing(image, None).0
    }

    /// Opens with the machine crashing after some events; answers the crash, too.
    pub fn open_crashing(
        image: &[u8],
        crash_after: Option<u64>,
    ) -> (Result<Bed, RingError>, Vec<u8>) {
        let (region, sim) = Region::from_image(image).expect("memory");
        if let Some(events) = crash_after {
            sim.crash_after(events);
        }
        let (area, pool) = parts(&region);
        let opened = Ring::open(area, SPEC, Some(&pool));
        let crashed = sim.sampled(crash_after.unwrap_or(0));
        (
            opened.map(|(ring, _)| Bed {
                region,
                sim,
                pool,
                ring,
            }),
            crashed,
        )
    }

    pub fn payload(&self, entry: &Entry) -> Payload {
        let bytes = &entry.bytes;
        // Where the first frame begins a little later, as behind a packet's header.
        let framed = |mut bytes: &[u8], mut from: usize| {
            let mut payload = Payload::new();
            while !bytes.is_empty() {
                let mut frame = self.pool.alloc().expect("tests never hold all frames");
                let (now, rest) = bytes.split_at(bytes.len().min(FRAME_BYTES as usize - from));
                frame[from..from + now.len()].copy_from_slice(now);
                payload.push_frame(frame.freeze(from..from + now.len()));
                (bytes, from) = (rest, 0);
            }
            payload
        };
        match entry.body {
            Body::Heap => Payload::from_vec(bytes.clone()),
            Body::Frame => framed(bytes, HEADROOM),
            Body::Mixed => {
                let third = bytes.len() / 6;
                let mut payload = Payload::from_vec(bytes[..third].to_vec());
                payload.append(framed(&bytes[third..bytes.len() - 3], 0));
                payload.push_bytes(&bytes[bytes.len() - 3..]);
                payload
            }
        }
    }

    pub fn apply(&mut self, op: &Op) -> Result<(), RingError> {
        match op {
            Op::Persist(from, entries, hard_state) => {
                let payloads: Vec<Payload> =
                    entries.iter().map(|entry| self.payload(entry)).collect();
                let new: Vec<NewEntry<'_>> = (*from..)
                    .zip(entries)
                    .zip(&payloads)
                    .map(|((index, entry), payload)| NewEntry {
                        index,
                        term: entry.term,
                        kind: 7,
                        payload,
                    })
                    .collect();
                let persisted = self.ring.persist(Batch {
                    entries: &new,
                    hard_state: hard_state.clone(),
                })?;
                assert_eq!(persisted.last(), self.ring.last_index());
                Ok(())
            }
            Op::Trim(through) => self.ring.trim(*through),
            Op::Reset(index, term) => {
                self.ring.reset(*index, *term);
                Ok(())
            }
        }
    }

    pub fn state(&self) -> State {
        let first = self.ring.first_index();
        let entries = (first..=self.ring.last_index()).map(|index| {
            let view = self.ring.entry(index).expect("within the log");
            assert_eq!((view.index, view.kind), (index, 7));
            let bytes: Vec<u8> = view.segments().flatten().copied().collect();
            assert_eq!(bytes.len(), view.len as usize);
            (view.term, bytes)
        });
        State {
            first,
            prev_term: self.ring.term(first - 1).expect("always known"),
            entries: entries.collect(),
            hard: self.ring.hard_state().clone(),
        }
    }

    /// What memory holds if nothing that is not durable got there.
    pub fn durable(&self) -> Vec<u8> {
        self.sim.image(|_| 0)
    }
}

/// `CYCLONE_SEED`, or the fixed seed.
pub fn seed() -> u64 {
    std::env::var("CYCLONE_SEED")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(20_240_817)
}

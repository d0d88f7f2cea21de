//! The control file: what an endpoint tells its peers, and where they announce what they do. Drawn
//! in docs/formats.md, "Shared-memory fabric".
//!
//! Every process that has the file open may store anywhere in it, so whatever is read from it is
//! checked before it is used as an index or a length.

use std::path::Path;

use cyclone_pmem::{FlushPolicy, Region, SharedArea};

use super::config::ShmConfig;

pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"CYSHMCTL");
pub(super) const VERSION: u64 = 2;
pub(super) const HEADER_BYTES: u64 = 4096;
pub(super) const MAX_ADDRESS: usize = 432;
const MAX_PATH: u64 = 3072;

/// Words of the header.
pub(super) mod header {
    pub const MAGIC: u64 = 0;
    pub const VERSION: u64 = 8;
    pub const STATE: u64 = 16;
    pub const INCARNATION: u64 = 24;
    pub const PID: u64 = 32;
    pub const START: u64 = 40;
    pub const BOOT: u64 = 48;
    pub const MEMORY_BYTES: u64 = 64;
    pub const FLUSH: u64 = 72;
    pub const REGISTRATIONS: u64 = 80;
    pub const QUEUES: u64 = 88;
    pub const POSTED: u64 = 96;
    pub const PEERS: u64 = 104;
    pub const RING_BYTES: u64 = 112;
    /// The last serial number given to a registration or queue.
    pub const SERIAL: u64 = 120;
    pub const PATH_LEN: u64 = 128;
    /// No slot from this one on was ever claimed: raised before a slot is.
    pub const CLAIMED: u64 = 136;
    /// Counts whatever may concern the owner's program; its low half is the futex.
    pub const DOORBELL: u64 = 192;
    /// Not zero while the owner sleeps.
    pub const SLEEPS: u64 = 200;
    pub const PATH: u64 = 256;
}

/// Values of the header's state.
pub(super) const LIVE: u64 = 1;
pub(super) const RETIRED: u64 = 2;

/// Words of a registration (64 bytes).
pub(super) mod registration {
    pub const BYTES: u64 = 64;
    /// Zero: none.
    pub const ID: u64 = 0;
    pub const OFFSET: u64 = 8;
    pub const LEN: u64 = 16;
    pub const TOKEN: u64 = 24;
    pub const RIGHTS: u64 = 32;
}

/// Words of an append queue (192 bytes, then its segments' offsets).
pub(super) mod queue {
    pub const BYTES: u64 = 192;
    /// Zero: none.
    pub const ID: u64 = 0;
    pub const TOKEN: u64 = 8;
    pub const SEGMENT_BYTES: u64 = 16;
    /// Places for offsets that are used, a power of two.
    pub const PLACES: u64 = 24;
    pub const TAIL: u64 = 64;
    /// Segments posted since the queue was opened.
    pub const POSTED: u64 = 128;
}

/// Words of a connection's slot (1024 bytes, then two rings).
pub(super) mod slot {
    pub const BYTES: u64 = 1024;
    /// The initiator's process id (upper half) and the slot's state.
    pub const STATE: u64 = 0;
    /// What the initiator is in the middle of; zero: nothing.
    pub const MARK: u64 = 8;
    pub const START: u64 = 64;
    pub const ADDRESS_LEN: u64 = 72;
    pub const ADDRESS: u64 = 80;
    pub const TO_OWNER: u64 = 512;
    pub const TO_INITIATOR: u64 = 768;
}

/// States of a slot.
pub(super) mod connection {
    pub const FREE: u64 = 0;
    /// Being filled in by the initiator.
    pub const CLAIMED: u64 = 1;
    /// In use; the owner's program knows nothing of it.
    pub const OPEN: u64 = 2;
    /// In use, and the owner's program has heard of it.
    pub const ACCEPTED: u64 = 3;
    /// Ended by the initiator: the owner takes what is in the ring and frees it.
    pub const CLOSED: u64 = 4;
    /// Ended by the owner: the initiator takes what is in the ring and frees it.
    pub const ENDED: u64 = 5;
}

/// A slot's state word.
pub(super) fn state_word(pid: u32, state: u64) -> u64 {
    u64::from(pid) << 32 | state
}

/// Process id and state of a slot's state word.
pub(super) fn split_state(word: u64) -> (u32, u64) {
    ((word >> 32) as u32, word & 0xffff_ffff)
}

/// What an initiator is in the middle of.
///
/// ```text
///  bit 0      2        18               64
///     | kind  | index  | detail          |     kind 1: registration, detail: a sequence number
///                                              kind 2: queue, detail: lowest segment (28 bits), sequence number
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mark(pub u64);

impl Mark {
    pub(super) const NONE: Mark = Mark(0);

    pub(super) fn registration(index: u64, sequence: u64) -> Mark {
        Mark(1 | (index & 0xffff) << 2 | sequence << 18)
    }

    pub(super) fn queue(index: u64, segment: u64, sequence: u64) -> Mark {
        Mark(2 | (index & 0xffff) << 2 | (segment & Tail::SEGMENTS) << 18 | sequence << 46)
    }

    pub(super) fn names_registration(self, index: u64) -> bool {
        self.0 & 0x3_ffff == Mark::registration(index, 0).0
    }

    pub(super) fn names_queue(self, index: u64) -> bool {
        self.0 & 0x3_ffff == Mark::queue(index, 0, 0).0
    }

    /// The lowest segment that the append may be given.
    pub(super) fn segment(self) -> u64 {
        self.0 >> 18 & Tail::SEGMENTS
    }
}

/// A queue's tail.
///
/// ```text
///  bit 0             24               52      63       64
///     | next, 64 B   | segment number | epoch | closed  |
/// ```
/// Next may pass the segment's end by what senders add at the same time; then the segment is full,
/// and who finds it so moves the tail on to the next one, if one is posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tail(pub u64);

impl Tail {
    const NEXT: u64 = (1 << 24) - 1;
    /// The largest segment number; they wrap.
    pub(super) const SEGMENTS: u64 = (1 << 28) - 1;
    const EPOCHS: u64 = (1 << 11) - 1;
    const CLOSED: u64 = 1 << 63;
    /// The largest segment, in units of 64 bytes. Leaves as much again for what passes its end.
    pub(super) const MAX_UNITS: u64 = 1 << 23;

    /// Of a new queue: as if the segment before the first one were full.
    pub(super) fn new(epoch: u64, units: u64) -> Tail {
        Tail(units | Tail::SEGMENTS << 24 | (epoch & Tail::EPOCHS) << 52)
    }

    pub(super) fn next(self) -> u64 {
        self.0 & Tail::NEXT
    }

    pub(super) fn segment(self) -> u64 {
        self.0 >> 24 & Tail::SEGMENTS
    }

    pub(super) fn is_closed(self) -> bool {
        self.0 & Tail::CLOSED != 0
    }

    pub(super) fn is_of(self, epoch: u64) -> bool {
        self.0 >> 52 & Tail::EPOCHS == epoch & Tail::EPOCHS
    }

    pub(super) fn closed(self) -> Tail {
        Tail(self.0 | Tail::CLOSED)
    }

    /// At the beginning of the next segment.
    pub(super) fn moved_on(self) -> Tail {
        let kept = self.0 & (Tail::CLOSED | Tail::EPOCHS << 52);
        Tail(kept | ((self.segment() + 1) & Tail::SEGMENTS) << 24)
    }

    /// The place so many units further on in the same segment.
    pub(super) fn behind(self, units: u64) -> Tail {
        Tail(self.0 + units)
    }

    /// How many segments after this one are posted.
    pub(super) fn ahead(self, posted: u64) -> u64 {
        posted.wrapping_sub(self.segment() + 1) & Tail::SEGMENTS
    }
}

/// The count of segments before the one with this number, given how many were posted. For the one
/// "before the first" it wraps.
pub(super) fn absolute(segment: u64, posted: u64) -> u64 {
    let behind = posted.wrapping_sub(segment) & Tail::SEGMENTS;
    posted.wrapping_sub(behind)
}

/// Where things lie in a control file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub registrations: u64,
    pub queues: u64,
    pub posted: u64,
    pub peers: u64,
    pub ring_bytes: u64,
}

impl Shape {
    pub(super) fn of(config: &ShmConfig) -> Shape {
        Shape {
            registrations: config.max_registrations.into(),
            queues: config.max_queues.into(),
            posted: u64::from(config.max_posted).next_power_of_two(),
            peers: config.max_peers.into(),
            ring_bytes: config.ring_bytes,
        }
    }

    /// Whether the numbers can be believed; with these limits no sum below overflows.
    pub(super) fn is_sane(&self) -> bool {
        self.registrations <= 32_768
            && self.queues <= 32_768
            && self.posted <= 65_536
            && self.posted.is_power_of_two()
            && self.peers <= 4096
            && (4096..=64 << 20).contains(&self.ring_bytes)
            && self.ring_bytes.is_power_of_two()
    }

    pub(super) fn registration(&self, index: u64) -> u64 {
        HEADER_BYTES + index * registration::BYTES
    }

    pub(super) fn queue(&self, index: u64) -> u64 {
        let bytes = queue::BYTES + (self.posted * 8).next_multiple_of(64);
        self.registration(self.registrations) + index * bytes
    }

    pub(super) fn slot(&self, index: u64) -> u64 {
        self.queue(self.queues) + index * (slot::BYTES + 2 * self.ring_bytes)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.slot(self.peers).next_multiple_of(4096)
    }
}

/// A mapped control file.
#[derive(Clone, Debug)]
pub(super) struct Control {
    pub area: SharedArea,
    pub shape: Shape,
}

impl Control {
    /// Somebody's file; `None` for what is none of this version.
    pub(super) fn attach(path: &Path) -> Option<Control> {
        Control::attach_if(path, |version| version == VERSION)
    }

    /// The file of a life before, which may have been an earlier program's.
    pub(super) fn attach_former(path: &Path) -> Option<Control> {
        let former = Control::attach_if(path, |version| (1..=VERSION).contains(&version))?;
        if former.load(header::VERSION) == 1 {
            // Its initiators did not say how many they were, and that word was unused.
            former.store(header::CLAIMED, former.shape.peers);
        }
        Some(former)
    }

    fn attach_if(path: &Path, version: impl Fn(u64) -> bool) -> Option<Control> {
        let region = Region::attach(path, FlushPolicy::Eadr).ok()?;
        let area = region.take(0, region.len()).ok()?.share();
        let word = |at| area.load_u64(at);
        if area.len() < HEADER_BYTES
            || word(header::MAGIC) != MAGIC
            || !version(word(header::VERSION))
        {
            return None;
        }
        let shape = Shape {
            registrations: word(header::REGISTRATIONS),
            queues: word(header::QUEUES),
            posted: word(header::POSTED),
            peers: word(header::PEERS),
            ring_bytes: word(header::RING_BYTES),
        };
        (shape.is_sane() && shape.bytes() == area.len()).then_some(Control { area, shape })
    }

    #[inline]
    pub(super) fn load(&self, at: u64) -> u64 {
        self.area.load_u64(at)
    }

    #[inline]
    pub(super) fn store(&self, at: u64, value: u64) {
        self.area.store_u64(at, value);
    }

    #[inline]
    pub(super) fn is_live(&self) -> bool {
        self.load(header::STATE) == LIVE
    }

    /// The slots that somebody may have: those before any other was claimed in this life. Most
    /// files have room for far more peers than ever come, and each slot is on separate pages.
    #[inline]
    pub(super) fn claimed(&self) -> u64 {
        self.load(header::CLAIMED).min(self.shape.peers)
    }

    /// Has the owner check a slot, before it is claimed: a mark that was left is seen by checks
    /// that began later.
    pub(super) fn before_claiming(&self, slot: u64) {
        let mut known = self.load(header::CLAIMED);
        while known <= slot {
            let found = self.area.compare_swap(header::CLAIMED, known, slot + 1);
            if found == known {
                return;
            }
            known = found;
        }
    }

    #[inline]
    pub(super) fn slot_state(&self, index: u64) -> u64 {
        self.load(self.shape.slot(index) + slot::STATE)
    }

    #[inline]
    pub(super) fn mark(&self, index: u64) -> Mark {
        Mark(self.load(self.shape.slot(index) + slot::MARK))
    }

    #[inline]
    pub(super) fn set_mark(&self, index: u64, mark: Mark) {
        self.store(self.shape.slot(index) + slot::MARK, mark.0);
    }

    /// Changes a slot's state if it is still what it was.
    pub(super) fn change_slot(&self, index: u64, from: u64, to: u64) -> bool {
        let at = self.shape.slot(index) + slot::STATE;
        self.area.compare_swap(at, from, to) == from
    }

    /// Frees a slot that belongs to who calls.
    pub(super) fn free_slot(&self, index: u64) {
        self.set_mark(index, Mark::NONE);
        let at = self.shape.slot(index);
        self.store(at + slot::START, 0);
        self.store(at + slot::STATE, 0);
    }

    /// The start time of the initiator's process.
    pub(super) fn slot_start(&self, index: u64) -> u64 {
        self.load(self.shape.slot(index) + slot::START)
    }

    /// The initiator's address, as far as it makes sense.
    pub(super) fn slot_address(&self, index: u64) -> Option<Vec<u8>> {
        let at = self.shape.slot(index);
        let len = self.load(at + slot::ADDRESS_LEN);
        (len <= MAX_ADDRESS as u64).then(|| self.area.read_vec(at + slot::ADDRESS, len))
    }

    /// The path of the memory that belongs to the file.
    pub(super) fn memory_path(&self) -> Option<Vec<u8>> {
        let len = self.load(header::PATH_LEN);
        (len <= MAX_PATH).then(|| self.area.read_vec(header::PATH, len))
    }

    pub(super) fn set_memory_path(&self, path: &[u8]) -> bool {
        self.store(header::PATH_LEN, path.len() as u64);
        let fits = path.len() as u64 <= MAX_PATH;
        if fits {
            self.area.write(header::PATH, path);
        }
        fits
    }
}

const POLICIES: [FlushPolicy; 5] = [
    FlushPolicy::Auto,
    FlushPolicy::Eadr,
    FlushPolicy::Clwb,
    FlushPolicy::ClflushOpt,
    FlushPolicy::Clflush,
];

/// A flush policy as a number of the header.
pub(super) fn policy_number(policy: FlushPolicy) -> u64 {
    let place = POLICIES.iter().position(|other| *other == policy);
    place.unwrap_or(0) as u64
}

/// The flush policy of a number of the header.
pub(super) fn policy_of(number: u64) -> Option<FlushPolicy> {
    POLICIES.get(usize::try_from(number).ok()?).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segment_numbers_wrap_without_notice() {
        let first = Tail::new(77, 64);
        assert_eq!(absolute(first.segment(), 0).wrapping_add(1), 0);
        assert_eq!(first.ahead(0), 0);
        assert_eq!(first.ahead(3), 3);
        assert_eq!(first.moved_on().segment(), 0);
        assert_eq!(first.moved_on().next(), 0);
        assert!(first.moved_on().is_of(77) && !first.moved_on().is_of(78));
        let wrapped = 1u64 << 28;
        assert_eq!(absolute(5, wrapped + 9), wrapped + 5);
        assert_eq!(absolute(Tail::SEGMENTS, wrapped + 9), wrapped - 1);
        let closed = first.closed();
        assert!(closed.is_closed() && closed.moved_on().is_closed());
    }

    #[test]
    fn marks_name_one_thing() {
        let mark = Mark::queue(3, Tail::SEGMENTS, 1 << 17);
        assert!(mark.names_queue(3) && !mark.names_queue(2) && !mark.names_registration(3));
        assert_eq!(mark.segment(), Tail::SEGMENTS);
        let mark = Mark::registration(9, u64::MAX >> 18);
        assert!(mark.names_registration(9) && !mark.names_queue(9));
        assert!(!Mark::NONE.names_registration(0) && !Mark::NONE.names_queue(0));
    }
}

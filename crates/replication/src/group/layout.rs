//! What lies where in a group's memory, alike at every member. Little-endian.
//!
//! ```text
//!   0        header, 64 B: magic "CYCGROUP", version u32, crc32c u32, group u64, locks u32, clients u32,
//!                          log bytes u64, data bytes u64, generation u32 and its complement u32, zeros
//!   64       one slot of 64 B per client: epoch u64 (odd while in use), head u64, seed u64, zeros
//!   …        lock words, 8 B each, up to a multiple of 64
//!   …        one redo log per client
//!   …        data
//! ```
//!
//! The generation is its own word, outside the header's checksum: it changes after formatting, and
//! a word is never torn. It counts the recoveries of the whole group; a member that was away during
//! one has an older generation and is copied anew by the next.

use cyclone_wire::ring::crc32c;

use super::io::Io;
use super::operation::{GroupError, GroupMemory, GroupOp};

/// The most clients: a bit each in a shared lock's word.
pub const MAX_CLIENTS: u32 = 32;
/// Bytes of the header, and of a client's slot.
pub const LINE_BYTES: u64 = 64;
/// Where in a slot the log's head is.
pub const SLOT_HEAD: u64 = 8;
/// Where in a slot the log's seed is.
pub const SLOT_SEED: u64 = 16;

const MAGIC: &[u8; 8] = b"CYCGROUP";
const VERSION: u32 = 1;
const MAX_LOCKS: u32 = 1 << 24;

/// Where the generation is; the checksum leaves it out.
const GENERATION_AT: u64 = 48;
/// A log's positions stay below this: a thousand years of writing, and no sum of positions
/// overflows.
pub const MAX_POSITION: u64 = 1 << 62;

/// The sizes that are chosen; data gets the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayoutSpec {
    /// The group's name; members of another group are not taken for members of this one.
    pub group: u64,
    /// Locks, at most 16 Mi.
    pub locks: u32,
    /// Clients, at most [`MAX_CLIENTS`].
    pub clients: u32,
    /// Bytes of each client's redo log; a multiple of 64, at least 256.
    pub log_bytes: u64,
}

/// Where everything is. Offsets are of group memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The sizes chosen.
    pub spec: LayoutSpec,
    /// Bytes of data.
    pub data_bytes: u64,
    /// How many recoveries of the whole group it has seen, and the formatting: from 1.
    pub generation: u32,
}

impl Layout {
    /// The layout of `len` bytes; refuses sizes that leave no data.
    pub fn new(spec: LayoutSpec, len: u64) -> Result<Layout, GroupError> {
        let bad = |what, value| Err(GroupError::BadLayout { what, value });
        if !(1..=MAX_CLIENTS).contains(&spec.clients) {
            return bad("clients", u64::from(spec.clients));
        }
        if !(1..=MAX_LOCKS).contains(&spec.locks) {
            return bad("locks", u64::from(spec.locks));
        }
        if spec.log_bytes < 256 || !spec.log_bytes.is_multiple_of(64) || spec.log_bytes > 1 << 32 {
            return bad("log bytes", spec.log_bytes);
        }
        let mut layout = Layout {
            spec,
            data_bytes: 0,
            generation: 1,
        };
        match len.checked_sub(layout.data_at()) {
            Some(data) if data > 0 => layout.data_bytes = data,
            _ => return bad("bytes", len),
        }
        Ok(layout)
    }

    /// A client's slot.
    pub fn slot_at(&self, client: u32) -> u64 {
        LINE_BYTES + u64::from(client) * LINE_BYTES
    }

    /// The first lock word.
    pub fn locks_at(&self) -> u64 {
        self.slot_at(self.spec.clients)
    }

    /// Bytes of all lock words, up to a multiple of 64.
    pub fn locks_bytes(&self) -> u64 {
        (u64::from(self.spec.locks) * 8).next_multiple_of(LINE_BYTES)
    }

    /// A lock's word.
    pub fn lock_at(&self, lock: u32) -> Result<u64, GroupError> {
        if lock >= self.spec.locks {
            return Err(GroupError::NoLock {
                lock,
                locks: self.spec.locks,
            });
        }
        Ok(self.locks_at() + u64::from(lock) * 8)
    }

    /// The first byte of a client's redo log.
    pub fn log_at(&self, client: u32) -> u64 {
        self.locks_at() + self.locks_bytes() + u64::from(client) * self.spec.log_bytes
    }

    /// The first byte of data.
    pub fn data_at(&self) -> u64 {
        self.log_at(self.spec.clients)
    }

    /// Where a range of data is in group memory.
    pub fn data_range(&self, offset: u64, len: u64) -> Result<u64, GroupError> {
        match offset.checked_add(len) {
            Some(end) if end <= self.data_bytes => Ok(self.data_at() + offset),
            _ => Err(GroupError::OutsideData {
                offset,
                len,
                data: self.data_bytes,
            }),
        }
    }

    /// Refuses clients that have no slot.
    pub fn check_client(&self, client: u32) -> Result<(), GroupError> {
        if client >= self.spec.clients {
            return Err(GroupError::NoClient {
                client,
                clients: self.spec.clients,
            });
        }
        Ok(())
    }

    /// The header's bytes.
    pub fn encode(&self) -> [u8; LINE_BYTES as usize] {
        let mut bytes = [0; LINE_BYTES as usize];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.spec.group.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.spec.locks.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.spec.clients.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.spec.log_bytes.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.data_bytes.to_le_bytes());
        bytes[48..56].copy_from_slice(&generation_word(self.generation).to_le_bytes());
        let checksum = header_checksum(&bytes);
        bytes[12..16].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// Reads a header for a memory of `len` bytes; `None` if there is none, or it is for another
    /// length.
    pub fn decode(bytes: &[u8], len: u64) -> Option<Layout> {
        let bytes: &[u8; LINE_BYTES as usize] = bytes.first_chunk()?;
        let u32_at = |at: usize| bytes[at..].first_chunk().map(|b| u32::from_le_bytes(*b));
        let u64_at = |at: usize| bytes[at..].first_chunk().map(|b| u64::from_le_bytes(*b));
        if &bytes[..8] != MAGIC || u32_at(8)? != VERSION || u32_at(12)? != header_checksum(bytes) {
            return None;
        }
        let spec = LayoutSpec {
            group: u64_at(16)?,
            locks: u32_at(24)?,
            clients: u32_at(28)?,
            log_bytes: u64_at(32)?,
        };
        let generation = u32_at(GENERATION_AT as usize)?;
        let layout = Layout {
            generation,
            ..Layout::new(spec, len).ok()?
        };
        let whole = u64_at(GENERATION_AT as usize)? == generation_word(generation)
            && u64_at(56)? == 0
            && layout.data_bytes == u64_at(40)?;
        whole.then_some(layout)
    }

    /// Whether two members' layouts are of one group and shape, of whatever generation.
    pub fn is_same_group(&self, other: &Layout) -> bool {
        self.spec == other.spec && self.data_bytes == other.data_bytes
    }

    /// The operation that gives every member a generation.
    pub(super) fn generation_operation(generation: u32) -> GroupOp {
        GroupOp::Write {
            offset: GENERATION_AT,
            bytes: generation_word(generation).to_le_bytes().to_vec(),
        }
    }

    /// Formats a group's memory at all members: everything zero but the header and the logs' seeds.
    /// `seeds` has one random number per client, which must be unknown to those who choose
    /// payloads. Whatever was there is gone.
    pub async fn format<M: GroupMemory>(
        io: &Io<M>,
        spec: LayoutSpec,
        seeds: &[u64],
    ) -> Result<Layout, GroupError> {
        let layout = Layout::new(spec, io.memory_len())?;
        if seeds.len() != spec.clients as usize {
            return Err(GroupError::BadLayout {
                what: "seeds",
                value: seeds.len() as u64,
            });
        }
        // The header goes first and comes last, so that a half-formatted memory is none.
        let blank = io.writes(0, &[0; LINE_BYTES as usize]);
        io.post(blank).await?;
        io.run(GroupOp::Flush).await?;
        let step = (io.max_transfer() as u64).clamp(1, 1 << 20);
        let mut at = LINE_BYTES;
        while at < io.memory_len() {
            let len = step.min(io.memory_len() - at);
            io.post(io.writes(at, &vec![0; len as usize])).await?;
            at += len;
        }
        for (client, seed) in (0..).zip(seeds) {
            let at = layout.slot_at(client) + SLOT_SEED;
            io.post(io.writes(at, &seed.to_le_bytes())).await?;
        }
        io.run(GroupOp::Flush).await?;
        io.post(io.writes(0, &layout.encode())).await?;
        io.run(GroupOp::Flush).await?;
        Ok(layout)
    }

    /// Reads one member's header; `None` if the member holds no group memory.
    pub async fn of_member<M: GroupMemory>(
        io: &Io<M>,
        member: usize,
    ) -> Result<Option<Layout>, GroupError> {
        if io.memory_len() < LINE_BYTES {
            return Ok(None);
        }
        let bytes = io.read(member, 0, LINE_BYTES).await?;
        Ok(Layout::decode(&bytes, io.memory_len()))
    }

    /// The layout that all members agree on.
    ///
    /// # Errors
    /// [`GroupError::Missed`] for a member that is blank or was away during a recovery: the group
    /// has to be [recovered](super::recover_all) before anybody works on it.
    pub async fn of_group<M: GroupMemory>(io: &Io<M>) -> Result<Layout, GroupError> {
        let mut layouts = Vec::with_capacity(io.members());
        for member in 0..io.members() {
            layouts.push(Layout::of_member(io, member).await?);
        }
        let newest = newest(&layouts)?;
        match layouts.iter().position(|layout| *layout != Some(newest)) {
            None => Ok(newest),
            Some(member) => Err(GroupError::Missed {
                member,
                generation: layouts[member].map_or(0, |layout| layout.generation),
                newest: newest.generation,
            }),
        }
    }
}

/// The layout of the newest generation among the members'; at least one holds one, and all are of
/// one group.
pub(super) fn newest(layouts: &[Option<Layout>]) -> Result<Layout, GroupError> {
    let newest = layouts.iter().flatten().max_by_key(|l| l.generation);
    let none = || GroupError::Damaged("no member holds a group's memory".into());
    let newest = *newest.ok_or_else(none)?;
    let is_other = |of: &Option<Layout>| of.is_some_and(|layout| !layout.is_same_group(&newest));
    match layouts.iter().position(is_other) {
        None => Ok(newest),
        Some(member) => Err(GroupError::Damaged(format!(
            "member {member} is of another group or shape"
        ))),
    }
}

fn generation_word(generation: u32) -> u64 {
    u64::from(generation) | u64::from(!generation) << 32
}

fn header_checksum(bytes: &[u8; LINE_BYTES as usize]) -> u32 {
    let at = GENERATION_AT as usize;
    crc32c([&bytes[..12], &bytes[16..at]].into_iter())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPEC: LayoutSpec = LayoutSpec {
        group: 7,
        locks: 9,
        clients: 3,
        log_bytes: 512,
    };

    #[test]
    fn parts_follow_each_other_without_overlap() {
        let layout = Layout::new(SPEC, 8192).expect("layout");
        assert_eq!(layout.slot_at(0), 64);
        assert_eq!(layout.locks_at(), 256);
        assert_eq!(layout.lock_at(8).expect("lock"), 256 + 64);
        assert_eq!(layout.log_at(0), 256 + 128);
        assert_eq!(layout.data_at(), 384 + 3 * 512);
        assert_eq!(layout.data_at() + layout.data_bytes, 8192);
        assert!(layout.lock_at(9).is_err());
        assert!(layout.data_range(layout.data_bytes - 8, 8).is_ok());
        assert!(layout.data_range(layout.data_bytes - 8, 9).is_err());
        assert!(layout.data_range(u64::MAX, 2).is_err());
        assert!(layout.check_client(3).is_err());
    }

    #[test]
    fn headers_come_back_and_damaged_ones_do_not() {
        let layout = Layout::new(SPEC, 8192).expect("layout");
        let bytes = layout.encode();
        assert_eq!(Layout::decode(&bytes, 8192), Some(layout));
        assert_eq!(Layout::decode(&bytes, 8256), None);
        assert_eq!(Layout::decode(&bytes[..63], 8192), None);
        for bit in 0..bytes.len() * 8 {
            let mut bytes = bytes;
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Layout::decode(&bytes, 8192), None, "bit {bit}");
        }
    }

    #[test]
    fn impossible_sizes_are_refused() {
        let with = |change: fn(&mut LayoutSpec)| {
            let mut spec = SPEC;
            change(&mut spec);
            Layout::new(spec, 8192)
        };
        assert!(with(|spec| spec.clients = 0).is_err());
        assert!(with(|spec| spec.clients = 33).is_err());
        assert!(with(|spec| spec.locks = 0).is_err());
        assert!(with(|spec| spec.log_bytes = 300).is_err());
        assert!(with(|spec| spec.log_bytes = 1 << 20).is_err());
    }
}

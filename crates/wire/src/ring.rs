//! Byte layouts of the log region: superblock, anchor, hard state, pointer slots, records.
//! Little-endian throughout.
//!
//! ```text
//! one log's area                                                     superblock (one per region, 4 KiB)
//!   0      anchor slot 0 (64 B)                                         0  magic "CYCLONE1"
//!   64     anchor slot 1                                                8  version u32, crc32c u32 (of all but itself)
//!   4096   hard state slot 0 (4 KiB)                                    16 cluster id u128
//!   8192   hard state slot 1                                            32 replica u64, 40 incarnation u64
//!   12288  pointer slots, 8 B each                                      48 boot id [16]
//!   …      records, 64 B aligned, filled and freed in log order         64 logs u16, 66 zero, 72 region len u64
//!
//! pointer slot                                record
//!   0..32   record offset / 64 + 1 (0 = null)   0  crc32c of 4..64 and the segment table
//!   32..64  low half of the index               4  magic u16, log u16, kind u8, zero u8, segments u16
//!                                               12 payload length u32
//! segment (16 B)                                16 term u64, 24 predecessor's term u64, 32 index u64
//!   frame u32 (0xffff_ffff = inline)            40 crc32c of the payload, 44 zero to 64
//!   offset u32, length u32, zero u32            64 segment table; then the inline bytes in order
//! ```

use crate::at::{u16_at, u32_at, u64_at};

/// Offset of the anchors.
pub const ANCHOR_AT: u64 = 0;
/// Bytes between anchor slots.
pub const ANCHOR_STRIDE: u64 = 64;
/// Offset of the hard state slots.
pub const HARD_STATE_AT: u64 = 4096;
/// Bytes of a hard state slot.
pub const HARD_STATE_BYTES: u64 = 4096;
/// Offset of the pointer slots.
pub const SLOTS_AT: u64 = HARD_STATE_AT + 2 * HARD_STATE_BYTES;
/// Alignment and unit of records.
pub const RECORD_UNIT: u64 = 64;
/// Bytes of a record before its segment table.
pub const RECORD_HEADER_BYTES: usize = 64;
/// Bytes of an entry of the segment table.
pub const SEGMENT_BYTES: usize = 16;
/// Bytes of the superblock.
pub const SUPERBLOCK_BYTES: u64 = 4096;
/// Version of these layouts; others are refused.
pub const VERSION: u32 = 1;

const RECORD_MAGIC: u16 = 0x5243;
const SUPERBLOCK_MAGIC: &[u8; 8] = b"CYCLONE1";
const INLINE: u32 = u32::MAX;
const ANCHOR_USED: usize = 48;
const SUPERBLOCK_USED: usize = 80;
/// Members of each kind that a hard state has room for.
pub const MAX_MEMBERS: usize = 64;

fn crc(parts: &[&[u8]]) -> u32 {
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    for part in parts {
        digest.update(part);
    }
    digest.finalize() as u32
}

/// CRC32C of bytes in several pieces.
pub fn crc32c<'a>(parts: impl Iterator<Item = &'a [u8]>) -> u32 {
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    for part in parts {
        digest.update(part);
    }
    digest.finalize() as u32
}

/// CRC32C of one piece.
pub fn crc32c_of(bytes: &[u8]) -> u32 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

/// CRC32C of bytes that go on with `bytes`, where `before` is that of those before them; 0 where
/// there are none.
pub fn crc32c_after(before: u32, bytes: &[u8]) -> u32 {
    let state = u64::from(!before);
    let mut digest =
        crc_fast::Digest::new_with_init_state(crc_fast::CrcAlgorithm::Crc32Iscsi, state);
    digest.update(bytes);
    digest.finalize() as u32
}

/// A pointer slot's value for a record at `offset` of the record area.
pub fn slot(offset: u64, index: u64) -> u64 {
    (offset / RECORD_UNIT + 1) | (index << 32)
}

/// The record offset in a slot; `None` if the slot is null or names another index.
pub fn slot_offset(slot: u64, index: u64) -> Option<u64> {
    let unit = slot & u64::from(u32::MAX);
    (unit != 0 && slot >> 32 == index & u64::from(u32::MAX)).then(|| (unit - 1) * RECORD_UNIT)
}

/// Where the log begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Anchor {
    /// Written to slot `seq % 2`, then copied to the other; the higher one counts.
    pub seq: u64,
    /// Index of the first entry, present or to come.
    pub first: u64,
    /// Term of the entry before it.
    pub prev_term: u64,
    /// The log is being emptied: recovery nulls every slot.
    pub resetting: bool,
    /// The log that the area was formatted for.
    pub log: u16,
    /// Its pointer slots.
    pub slots: u32,
    /// Bytes of the whole area.
    pub area_bytes: u64,
}

impl Anchor {
    /// The slot's bytes.
    pub fn encode(&self) -> [u8; ANCHOR_USED] {
        let mut bytes = [0; ANCHOR_USED];
        bytes[0..8].copy_from_slice(&self.seq.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.first.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.prev_term.to_le_bytes());
        bytes[24] = u8::from(self.resetting);
        bytes[26..28].copy_from_slice(&self.log.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.slots.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.area_bytes.to_le_bytes());
        let sum = crc(&[&bytes[..40]]);
        bytes[40..44].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Reads a slot; `None` if it was never written whole.
    pub fn decode(bytes: &[u8]) -> Option<Anchor> {
        let bytes = bytes.get(..ANCHOR_USED)?;
        let anchor = Anchor {
            seq: u64_at(bytes, 0),
            first: u64_at(bytes, 8),
            prev_term: u64_at(bytes, 16),
            resetting: bytes[24] == 1,
            log: u16_at(bytes, 26),
            slots: u32_at(bytes, 28),
            area_bytes: u64_at(bytes, 32),
        };
        (u32_at(bytes, 40) == crc(&[&bytes[..40]]) && anchor.seq > 0).then_some(anchor)
    }
}

/// What Raft must never forget, and who takes part.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HardState {
    /// Current term.
    pub term: u64,
    /// Whom this replica voted for in it; 0 for no replica.
    pub vote: u64,
    /// Index known to be committed.
    pub commit: u64,
    /// Index of the entry that made the membership what it is.
    pub conf_index: u64,
    /// Replicas that vote.
    pub voters: Vec<u64>,
    /// During a joint change: the voters of the old configuration.
    pub voters_outgoing: Vec<u64>,
    /// Replicas that receive but do not vote.
    pub learners: Vec<u64>,
    /// During a joint change: outgoing voters that become learners at its end.
    pub learners_next: Vec<u64>,
    /// Whether the joint configuration is left without being asked.
    pub auto_leave: bool,
}

impl HardState {
    /// The slot's bytes: crc32c u32, length u32, seq u64, term, vote, commit, conf_index, four
    /// counts u16, auto_leave u8, then the members.
    pub fn encode(&self, seq: u64, out: &mut Vec<u8>) {
        out.clear();
        out.extend_from_slice(&[0; 8]);
        for number in [seq, self.term, self.vote, self.commit, self.conf_index] {
            out.extend_from_slice(&number.to_le_bytes());
        }
        let lists = [
            &self.voters,
            &self.voters_outgoing,
            &self.learners,
            &self.learners_next,
        ];
        for list in lists {
            out.extend_from_slice(&(list.len() as u16).to_le_bytes());
        }
        out.push(u8::from(self.auto_leave));
        for member in lists.into_iter().flatten() {
            out.extend_from_slice(&member.to_le_bytes());
        }
        let len = out.len() as u32;
        out[4..8].copy_from_slice(&len.to_le_bytes());
        let sum = crc(&[&out[4..]]);
        out[0..4].copy_from_slice(&sum.to_le_bytes());
    }

    /// Reads a slot; `None` if it was never written whole.
    pub fn decode(bytes: &[u8]) -> Option<(u64, HardState)> {
        const FIXED: usize = 8 + 40 + 8 + 1;
        let len = u32_at(bytes.get(..FIXED)?, 4) as usize;
        let bytes = bytes.get(..len).filter(|_| len >= FIXED)?;
        if crc(&[&bytes[4..]]) != u32_at(bytes, 0) {
            return None;
        }
        let counts: Vec<usize> = (0..4)
            .map(|list| usize::from(u16_at(bytes, 48 + 2 * list)))
            .collect();
        if counts.iter().any(|&count| count > MAX_MEMBERS)
            || FIXED + 8 * counts.iter().sum::<usize>() != len
        {
            return None;
        }
        let mut members = (0..).map(|place| u64_at(bytes, FIXED + 8 * place));
        let mut list = |count: usize| -> Vec<u64> { members.by_ref().take(count).collect() };
        Some((
            u64_at(bytes, 8),
            HardState {
                term: u64_at(bytes, 16),
                vote: u64_at(bytes, 24),
                commit: u64_at(bytes, 32),
                conf_index: u64_at(bytes, 40),
                voters: list(counts[0]),
                voters_outgoing: list(counts[1]),
                learners: list(counts[2]),
                learners_next: list(counts[3]),
                auto_leave: bytes[56] == 1,
            },
        ))
    }
}

/// Where a piece of a record's payload lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece {
    /// In the record, behind the pieces before it.
    Inline {
        /// Bytes.
        len: u32,
    },
    /// In a frame of the region's pool.
    Extent {
        /// The frame.
        frame: u32,
        /// First byte within it.
        offset: u32,
        /// Bytes.
        len: u32,
    },
}

/// A record's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordHeader {
    /// The log the record belongs to.
    pub log: u16,
    /// What the payload is.
    pub kind: u8,
    /// Entries of the segment table.
    pub segments: u16,
    /// Payload bytes.
    pub len: u32,
    /// The entry's term.
    pub term: u64,
    /// Its predecessor's term.
    pub prev_term: u64,
    /// The entry's index.
    pub index: u64,
    /// CRC32C of the payload.
    pub payload_crc: u32,
}

impl RecordHeader {
    /// Appends the header and the segment table, checksummed.
    pub fn encode(&self, pieces: &[Piece], out: &mut Vec<u8>) {
        let start = out.len();
        out.resize(start + RECORD_HEADER_BYTES, 0);
        for piece in pieces {
            let (frame, offset, len) = match *piece {
                Piece::Inline { len } => (INLINE, 0, len),
                Piece::Extent { frame, offset, len } => (frame, offset, len),
            };
            for number in [frame, offset, len, 0] {
                out.extend_from_slice(&number.to_le_bytes());
            }
        }
        let bytes = &mut out[start..];
        bytes[4..6].copy_from_slice(&RECORD_MAGIC.to_le_bytes());
        bytes[6..8].copy_from_slice(&self.log.to_le_bytes());
        bytes[8] = self.kind;
        bytes[10..12].copy_from_slice(&(pieces.len() as u16).to_le_bytes());
        bytes[12..16].copy_from_slice(&self.len.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.term.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.prev_term.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.index.to_le_bytes());
        bytes[40..44].copy_from_slice(&self.payload_crc.to_le_bytes());
        let sum = crc32c_of(&bytes[4..]);
        bytes[0..4].copy_from_slice(&sum.to_le_bytes());
    }

    /// Reads the record that begins `bytes`; `None` if header or segment table are not what was
    /// written.
    pub fn decode(bytes: &[u8]) -> Option<(RecordHeader, Vec<Piece>)> {
        let head = bytes.get(..RECORD_HEADER_BYTES)?;
        let segments = u16_at(head, 10);
        let table_end = RECORD_HEADER_BYTES + usize::from(segments) * SEGMENT_BYTES;
        let covered = bytes.get(..table_end)?;
        if u16_at(head, 4) != RECORD_MAGIC || crc32c_of(&covered[4..]) != u32_at(head, 0) {
            return None;
        }
        let header = RecordHeader {
            log: u16_at(head, 6),
            kind: head[8],
            segments,
            len: u32_at(head, 12),
            term: u64_at(head, 16),
            prev_term: u64_at(head, 24),
            index: u64_at(head, 32),
            payload_crc: u32_at(head, 40),
        };
        let pieces: Vec<Piece> = (0..usize::from(segments))
            .map(|piece| {
                let at = RECORD_HEADER_BYTES + piece * SEGMENT_BYTES;
                let (frame, offset, len) = (
                    u32_at(covered, at),
                    u32_at(covered, at + 4),
                    u32_at(covered, at + 8),
                );
                if frame == INLINE {
                    Piece::Inline { len }
                } else {
                    Piece::Extent { frame, offset, len }
                }
            })
            .collect();
        let total: u64 = pieces
            .iter()
            .map(|piece| match *piece {
                Piece::Inline { len } | Piece::Extent { len, .. } => u64::from(len),
            })
            .sum();
        // Without a table the whole payload is inline.
        (pieces.is_empty() || total == u64::from(header.len)).then_some((header, pieces))
    }
}

/// Who a region belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// The cluster.
    pub cluster: u128,
    /// The replica.
    pub replica: u64,
    /// Drawn at random when the region was formatted.
    pub incarnation: u64,
    /// The kernel's boot id when the region was formatted.
    pub boot_id: [u8; 16],
    /// Number of physical logs.
    pub logs: u16,
    /// Bytes of each frame; 0 means [`Superblock::OLD_FRAME_BYTES`].
    pub frame_bytes: u32,
    /// Bytes of the region.
    pub region_bytes: u64,
}

/// What a superblock that cannot be used is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SuperblockFault {
    /// No magic: the region was never formatted, or not to the end.
    Blank,
    /// Another version.
    Version(u32),
    /// What was written there has changed.
    Damaged,
    /// Nothing that was ever a superblock: another file.
    Other,
}

impl Superblock {
    /// Bytes of each frame where the superblock does not say.
    pub const OLD_FRAME_BYTES: u32 = 9216;

    /// The superblock's bytes.
    pub fn encode(&self) -> [u8; SUPERBLOCK_USED] {
        let mut bytes = [0; SUPERBLOCK_USED];
        bytes[0..8].copy_from_slice(SUPERBLOCK_MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[16..32].copy_from_slice(&self.cluster.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.replica.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.incarnation.to_le_bytes());
        bytes[48..64].copy_from_slice(&self.boot_id);
        bytes[64..66].copy_from_slice(&self.logs.to_le_bytes());
        bytes[68..72].copy_from_slice(&self.frame_bytes.to_le_bytes());
        bytes[72..80].copy_from_slice(&self.region_bytes.to_le_bytes());
        let sum = crc(&[&bytes[..12], &bytes[16..]]);
        bytes[12..16].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Reads a superblock.
    ///
    /// # Errors
    /// Which kind of unusable it is.
    pub fn decode(bytes: &[u8]) -> Result<Superblock, SuperblockFault> {
        let bytes = bytes.get(..SUPERBLOCK_USED).ok_or(SuperblockFault::Other)?;
        // Formatting writes the magic last.
        if bytes[..8].iter().all(|&byte| byte == 0) {
            return Err(SuperblockFault::Blank);
        }
        // Where only the magic has changed the rest still fits.
        let is_whole = u32_at(bytes, 12) == crc(&[SUPERBLOCK_MAGIC, &bytes[8..12], &bytes[16..]]);
        match (&bytes[..8] == SUPERBLOCK_MAGIC, is_whole) {
            (true, true) => {}
            (false, false) => return Err(SuperblockFault::Other),
            (true, false) | (false, true) => return Err(SuperblockFault::Damaged),
        }
        if u32_at(bytes, 8) != VERSION {
            return Err(SuperblockFault::Version(u32_at(bytes, 8)));
        }
        let mut cluster = [0; 16];
        cluster.copy_from_slice(&bytes[16..32]);
        let mut boot_id = [0; 16];
        boot_id.copy_from_slice(&bytes[48..64]);
        Ok(Superblock {
            cluster: u128::from_le_bytes(cluster),
            replica: u64_at(bytes, 32),
            incarnation: u64_at(bytes, 40),
            boot_id,
            logs: u16_at(bytes, 64),
            frame_bytes: u32_at(bytes, 68),
            region_bytes: u64_at(bytes, 72),
        })
    }
}

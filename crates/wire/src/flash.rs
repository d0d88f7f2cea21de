//! Byte layouts of the flash log: superblock, pages, records. Little-endian throughout. //= cyclone
//! §3, fig. 2
//!
//! ```text
//! area (a file per physical log)                    page (4 KiB)
//!   0        superblock (4 KiB), 4096: its copy       0  crc32c u32 (of 4..4096)
//!   segment  page of sequence 0                       4  magic u16, log u16
//!   …        page of sequence s lies at               8  sequence u64
//!            segment + (s mod pages) * 4096           16 durable u64: all pages below were durable by then
//!                                                     24 first u64: the first page that is still needed
//!                                                     32 tag u64: the area's, random
//!                                                     40 life u32, used u16 (bytes of records), zero u16
//! superblock                                          48 records, back to back
//!   0  magic "CYCFLASH"
//!   8  version u32, crc32c u32 (of all but itself)  record
//!   16 cluster u128                                   0  bytes u16 of this part
//!   32 replica u64, 40 incarnation u64, 48 tag u64    2  flags u8: 1 first part, 2 last part
//!   56 log u16, mode u8, zero u8, segment bytes u32   3  kind u8: 1 entry, 2 hard state, 3 reset
//!   64 pages u64, zero to 4096                        4  the part
//!
//! entry                                             reset (the log begins anew behind an index)
//!   0  index u64, 8 term u64, 16 previous term u64    0  index u64, 8 term u64
//!   24 payload length u32, 28 crc32c of the payload
//!   32 what the payload is u8, zeros to 40          hard state: as in the region
//!   40 payload
//! ```
//!
//! An object that does not fit a page continues in the next one: all its parts but the last lack
//! the flag 2.

use crate::at::{u16_at, u32_at, u64_at};
use crate::ring::crc32c_of;

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;
/// Bytes of a page before its records.
pub const PAGE_HEADER_BYTES: usize = 48;
/// Bytes of a record before its part.
pub const RECORD_HEAD_BYTES: usize = 4;
/// Bytes of an entry before its payload.
pub const ENTRY_HEAD_BYTES: usize = 40;
/// Bytes of a reset.
pub const RESET_BYTES: usize = 16;
/// Bytes of records in a page.
pub const PAGE_ROOM: usize = PAGE_BYTES - PAGE_HEADER_BYTES;
/// Version of these layouts; others are refused.
pub const VERSION: u32 = 1;

const PAGE_MAGIC: u16 = 0x4650;
const SUPERBLOCK_MAGIC: &[u8; 8] = b"CYCFLASH";
const FIRST_PART: u8 = 1;
const LAST_PART: u8 = 2;

const _: () = assert!(PAGE_ROOM > RECORD_HEAD_BYTES + ENTRY_HEAD_BYTES);

/// What an area is for: which entries it takes, and what it alone can bring back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlashMode {
    /// The second level behind memory that keeps its bytes: committed entries only.
    Second,
    /// The only durable level: entries before their commitment, truncations and hard state, too.
    Only,
}

/// Whose area this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlashSuperblock {
    /// The cluster.
    pub cluster: u128,
    /// The replica.
    pub replica: u64,
    /// The replica's incarnation.
    pub incarnation: u64,
    /// In every page of the area; random, so that no page of another area or an earlier format is
    /// taken for one.
    pub tag: u64,
    /// The physical log.
    pub log: u16,
    /// What the area is for.
    pub mode: FlashMode,
    /// Bytes of a segment, a multiple of the page.
    pub segment_bytes: u32,
    /// Pages of the log.
    pub pages: u64,
}

/// Why a page is no superblock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlashSuperblockFault {
    /// Never formatted.
    Blank,
    /// Another version.
    Version(u32),
    /// Not what was written.
    Damaged,
}

impl FlashSuperblock {
    /// The page's bytes.
    pub fn encode(&self, page: &mut [u8]) {
        page.fill(0);
        page[0..8].copy_from_slice(SUPERBLOCK_MAGIC);
        page[8..12].copy_from_slice(&VERSION.to_le_bytes());
        page[16..32].copy_from_slice(&self.cluster.to_le_bytes());
        page[32..40].copy_from_slice(&self.replica.to_le_bytes());
        page[40..48].copy_from_slice(&self.incarnation.to_le_bytes());
        page[48..56].copy_from_slice(&self.tag.to_le_bytes());
        page[56..58].copy_from_slice(&self.log.to_le_bytes());
        page[58] = match self.mode {
            FlashMode::Second => 1,
            FlashMode::Only => 2,
        };
        page[60..64].copy_from_slice(&self.segment_bytes.to_le_bytes());
        page[64..72].copy_from_slice(&self.pages.to_le_bytes());
        let sum = Self::sum(page);
        page[12..16].copy_from_slice(&sum.to_le_bytes());
    }

    fn sum(page: &[u8]) -> u32 {
        crate::ring::crc32c([&page[..12], &page[16..]].into_iter())
    }

    /// Reads a page.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn decode(page: &[u8]) -> Result<FlashSuperblock, FlashSuperblockFault> {
        let page = page
            .get(..PAGE_BYTES)
            .ok_or(FlashSuperblockFault::Damaged)?;
        if page[..16].iter().all(|byte| *byte == 0) {
            return Err(FlashSuperblockFault::Blank);
        }
        if &page[0..8] != SUPERBLOCK_MAGIC || Self::sum(page) != u32_at(page, 12) {
            return Err(FlashSuperblockFault::Damaged);
        }
        if u32_at(page, 8) != VERSION {
            return Err(FlashSuperblockFault::Version(u32_at(page, 8)));
        }
        let mut cluster = [0; 16];
        cluster.copy_from_slice(&page[16..32]);
        let block = FlashSuperblock {
            cluster: u128::from_le_bytes(cluster),
            replica: u64_at(page, 32),
            incarnation: u64_at(page, 40),
            tag: u64_at(page, 48),
            log: u16_at(page, 56),
            mode: match page[58] {
                1 => FlashMode::Second,
                2 => FlashMode::Only,
                _ => return Err(FlashSuperblockFault::Damaged),
            },
            segment_bytes: u32_at(page, 60),
            pages: u64_at(page, 64),
        };
        let segment = block.segment_bytes as usize;
        let sane = segment >= 2 * PAGE_BYTES
            && segment.is_multiple_of(PAGE_BYTES)
            && block.pages > 0
            && block.pages < 1 << 40
            && block.pages.is_multiple_of((segment / PAGE_BYTES) as u64);
        if !sane {
            return Err(FlashSuperblockFault::Damaged);
        }
        Ok(block)
    }

    /// Where the page of a sequence lies, in bytes from the area's beginning.
    pub fn page_at(&self, sequence: u64) -> u64 {
        u64::from(self.segment_bytes) + sequence % self.pages * PAGE_BYTES as u64
    }

    /// Bytes of the whole area.
    pub fn area_bytes(&self) -> u64 {
        u64::from(self.segment_bytes) + self.pages * PAGE_BYTES as u64
    }
}

/// A page's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageHeader {
    /// The physical log.
    pub log: u16,
    /// Number of the page; each is written once.
    pub sequence: u64,
    /// Every page below this sequence was durable when this one was written: if one of them does
    /// not read back, that is damage and not a write cut short.
    pub durable: u64,
    /// The first page that was still needed.
    pub first: u64,
    /// The area's tag.
    pub tag: u64,
    /// Grows with every start: a page whose life is lower than its predecessor's is left over from
    /// before a crash.
    pub life: u32,
    /// Bytes of records.
    pub used: u16,
}

impl PageHeader {
    /// Completes a page whose records are in place.
    pub fn seal(&self, page: &mut [u8]) {
        page[4..6].copy_from_slice(&PAGE_MAGIC.to_le_bytes());
        page[6..8].copy_from_slice(&self.log.to_le_bytes());
        page[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        page[16..24].copy_from_slice(&self.durable.to_le_bytes());
        page[24..32].copy_from_slice(&self.first.to_le_bytes());
        page[32..40].copy_from_slice(&self.tag.to_le_bytes());
        page[40..44].copy_from_slice(&self.life.to_le_bytes());
        page[44..46].copy_from_slice(&self.used.to_le_bytes());
        page[46..48].fill(0);
        page[PAGE_HEADER_BYTES + usize::from(self.used)..PAGE_BYTES].fill(0);
        let sum = crc32c_of(&page[4..PAGE_BYTES]);
        page[0..4].copy_from_slice(&sum.to_le_bytes());
    }

    /// Reads a page; `None` if it is not what was written.
    pub fn decode(page: &[u8]) -> Option<PageHeader> {
        let page = page.get(..PAGE_BYTES)?;
        let header = PageHeader {
            log: u16_at(page, 6),
            sequence: u64_at(page, 8),
            durable: u64_at(page, 16),
            first: u64_at(page, 24),
            tag: u64_at(page, 32),
            life: u32_at(page, 40),
            used: u16_at(page, 44),
        };
        // A page of zeros, which is what most invalid ones are, is recognised without a checksum.
        let whole = u16_at(page, 4) == PAGE_MAGIC
            && usize::from(header.used) <= PAGE_ROOM
            && header.durable <= header.sequence
            && header.first <= header.sequence
            && header.sequence < 1 << 60
            && crc32c_of(&page[4..]) == u32_at(page, 0);
        whole.then_some(header)
    }
}

/// What an object is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObjectKind {
    /// An entry of the log.
    Entry,
    /// The hard state.
    HardState,
    /// The log begins anew.
    Reset,
}

/// One part of an object in a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part<'a> {
    /// The object begins here.
    pub first: bool,
    /// The object ends here.
    pub last: bool,
    /// What it is.
    pub kind: ObjectKind,
    /// The part's bytes.
    pub bytes: &'a [u8],
}

/// A record's head.
pub fn record_head(len: u16, first: bool, last: bool, kind: ObjectKind) -> [u8; RECORD_HEAD_BYTES] {
    let [low, high] = len.to_le_bytes();
    let flags = (u8::from(first) * FIRST_PART) | (u8::from(last) * LAST_PART);
    let kind = match kind {
        ObjectKind::Entry => 1,
        ObjectKind::HardState => 2,
        ObjectKind::Reset => 3,
    };
    [low, high, flags, kind]
}

/// The parts in a page's records (`page[48..48 + used]`). `None` in place of a part that makes no
/// sense; nothing follows it.
pub fn parts(mut records: &[u8]) -> impl Iterator<Item = Option<Part<'_>>> {
    std::iter::from_fn(move || {
        if records.is_empty() {
            return None;
        }
        let part = next_part(&mut records);
        if part.is_none() {
            records = &[];
        }
        Some(part)
    })
}

fn next_part<'a>(records: &mut &'a [u8]) -> Option<Part<'a>> {
    let (head, rest) = records.split_at_checked(RECORD_HEAD_BYTES)?;
    let (bytes, rest) = rest.split_at_checked(usize::from(u16_at(head, 0)))?;
    let kind = match head[3] {
        1 => ObjectKind::Entry,
        2 => ObjectKind::HardState,
        3 => ObjectKind::Reset,
        _ => return None,
    };
    if head[2] & !(FIRST_PART | LAST_PART) != 0 {
        return None;
    }
    *records = rest;
    Some(Part {
        first: head[2] & FIRST_PART != 0,
        last: head[2] & LAST_PART != 0,
        kind,
        bytes,
    })
}

/// What stands before an entry's payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryHead {
    /// The entry's index.
    pub index: u64,
    /// Its term.
    pub term: u64,
    /// Its predecessor's term.
    pub prev_term: u64,
    /// Payload bytes.
    pub len: u32,
    /// CRC32C of the payload.
    pub payload_crc: u32,
    /// What the payload is.
    pub kind: u8,
}

impl EntryHead {
    /// Its bytes.
    pub fn encode(&self) -> [u8; ENTRY_HEAD_BYTES] {
        let mut bytes = [0; ENTRY_HEAD_BYTES];
        bytes[0..8].copy_from_slice(&self.index.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.term.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.prev_term.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.len.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.payload_crc.to_le_bytes());
        bytes[32] = self.kind;
        bytes
    }

    /// Reads the head that begins `bytes`.
    pub fn decode(bytes: &[u8]) -> Option<EntryHead> {
        let bytes = bytes.get(..ENTRY_HEAD_BYTES)?;
        Some(EntryHead {
            index: u64_at(bytes, 0),
            term: u64_at(bytes, 8),
            prev_term: u64_at(bytes, 16),
            len: u32_at(bytes, 24),
            payload_crc: u32_at(bytes, 28),
            kind: bytes[32],
        })
    }
}

/// A reset's bytes.
pub fn encode_reset(index: u64, term: u64) -> [u8; RESET_BYTES] {
    let mut bytes = [0; RESET_BYTES];
    bytes[..8].copy_from_slice(&index.to_le_bytes());
    bytes[8..].copy_from_slice(&term.to_le_bytes());
    bytes
}

/// Index and term of a reset.
pub fn decode_reset(bytes: &[u8]) -> Option<(u64, u64)> {
    (bytes.len() == RESET_BYTES).then(|| (u64_at(bytes, 0), u64_at(bytes, 8)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> PageHeader {
        PageHeader {
            log: 3,
            sequence: 77,
            durable: 70,
            first: 64,
            tag: 0xfeed,
            life: 2,
            used: 20,
        }
    }

    #[test]
    fn a_page_reads_back_and_any_turned_bit_shows() {
        let mut page = vec![0xee; PAGE_BYTES];
        header().seal(&mut page);
        assert_eq!(PageHeader::decode(&page), Some(header()));
        for bit in (0..PAGE_BYTES * 8).step_by(61) {
            page[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(PageHeader::decode(&page), None, "bit {bit}");
            page[bit / 8] ^= 1 << (bit % 8);
        }
        assert_eq!(PageHeader::decode(&[0; PAGE_BYTES]), None);
        assert_eq!(PageHeader::decode(&page[1..]), None);
    }

    #[test]
    fn a_superblock_reads_back_and_any_turned_bit_shows() {
        let block = FlashSuperblock {
            cluster: 9 << 100,
            replica: 2,
            incarnation: 3,
            tag: 4,
            log: 1,
            mode: FlashMode::Only,
            segment_bytes: 131_072,
            pages: 320,
        };
        let mut page = vec![1; PAGE_BYTES];
        block.encode(&mut page);
        assert_eq!(FlashSuperblock::decode(&page), Ok(block));
        for bit in 0..PAGE_BYTES * 8 {
            page[bit / 8] ^= 1 << (bit % 8);
            assert!(FlashSuperblock::decode(&page).is_err(), "bit {bit}");
            page[bit / 8] ^= 1 << (bit % 8);
        }
        assert_eq!(
            FlashSuperblock::decode(&[0; PAGE_BYTES]),
            Err(FlashSuperblockFault::Blank)
        );
        assert_eq!(block.page_at(321), 131_072 + 4096);
    }

    #[test]
    fn parts_read_back_and_nonsense_ends_them() {
        let mut records = Vec::new();
        records.extend(record_head(3, true, false, ObjectKind::Entry));
        records.extend(b"abc");
        records.extend(record_head(0, false, true, ObjectKind::Reset));
        let found: Vec<_> = parts(&records).collect();
        assert_eq!(found.len(), 2);
        assert_eq!(
            found[0],
            Some(Part {
                first: true,
                last: false,
                kind: ObjectKind::Entry,
                bytes: b"abc"
            })
        );
        assert!(found[1].is_some_and(|part| part.last && part.bytes.is_empty()));
        for cut in [1, 5, 8, 10] {
            let last = parts(&records[..cut]).last().flatten();
            assert!(last.is_none(), "cut {cut}");
        }
        records[3] = 9;
        assert_eq!(parts(&records).collect::<Vec<_>>(), [None]);
    }
}

//! One line of the segment table, and how any line is stored so that a crash leaves the old content
//! or the new. Pure but for the two stores.

use cyclone_pmem::SharedArea;
use cyclone_wire::codec::{DecodeError, Reader};
use cyclone_wire::ring::crc32c;

use crate::protocol::SenderId;

/// Bytes of one slot: a cache line, the unit of flushing.
pub const LINE_BYTES: usize = 64;

/// Every line is kept twice, slot after slot.
pub const SLOTS_BYTES: u64 = 2 * LINE_BYTES as u64;

const CRC_AT: usize = LINE_BYTES - 4;

/// What a segment is for at the moment.
//= rowan §4.2.1
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SegmentState {
    /// Unowned; may be allocated.
    Free,
    /// Being written.
    Using,
    /// Written for the last time; some of its records may not be on every replica.
    Used,
    /// All of its records are on every replica.
    Committed,
}

impl SegmentState {
    /// The name in messages and reports.
    pub const fn name(self) -> &'static str {
        match self {
            SegmentState::Free => "free",
            SegmentState::Using => "using",
            SegmentState::Used => "used",
            SegmentState::Committed => "committed",
        }
    }

    const fn code(self) -> u8 {
        match self {
            SegmentState::Free => 0,
            SegmentState::Using => 1,
            SegmentState::Used => 2,
            SegmentState::Committed => 3,
        }
    }

    fn from_code(code: u8) -> Result<SegmentState, DecodeError> {
        Ok(match code {
            0 => SegmentState::Free,
            1 => SegmentState::Using,
            2 => SegmentState::Used,
            3 => SegmentState::Committed,
            other => {
                return Err(DecodeError::Unknown {
                    what: "segment state",
                    value: u64::from(other),
                });
            }
        })
    }

    /// Whether a segment may go from this state to that one in one step. Allocation, free to using,
    /// is not among them: it needs a new epoch.
    //= rowan §4.2.1, fig. 6
    pub const fn may_become(self, to: SegmentState) -> bool {
        matches!(
            (self, to),
            (
                SegmentState::Using,
                SegmentState::Used | SegmentState::Committed
            ) | (
                SegmentState::Used,
                SegmentState::Committed | SegmentState::Free
            ) | (SegmentState::Committed, SegmentState::Free)
        )
    }
}

/// Who allocated a segment.
//= rowan §4.2.1
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Owner {
    /// No owner: the segment is free.
    None,
    /// One remote worker writes it.
    Sender(SenderId),
    /// The workers of one remote server write it.
    Server(u32),
    /// The server's backup log: all remote senders append.
    BackupLog,
    /// The log of a worker of this server itself.
    Worker(u32),
    /// A cleaning thread of this server itself.
    Cleaner(u32),
}

impl Owner {
    fn encode(self) -> (u8, u32, u32) {
        match self {
            Owner::None => (0, 0, 0),
            Owner::Sender(id) => (1, id.server, id.worker),
            Owner::Server(server) => (2, server, 0),
            Owner::BackupLog => (3, 0, 0),
            Owner::Worker(worker) => (4, 0, worker),
            Owner::Cleaner(thread) => (5, 0, thread),
        }
    }

    fn decode(kind: u8, server: u32, worker: u32) -> Result<Owner, DecodeError> {
        let owner = match kind {
            0 => Owner::None,
            1 => Owner::Sender(SenderId { server, worker }),
            2 => Owner::Server(server),
            3 => Owner::BackupLog,
            4 => Owner::Worker(worker),
            5 => Owner::Cleaner(worker),
            other => {
                return Err(DecodeError::Unknown {
                    what: "segment owner",
                    value: u64::from(other),
                });
            }
        };
        if owner.encode() == (kind, server, worker) {
            Ok(owner)
        } else {
            Err(DecodeError::Contradiction("owner and its numbers"))
        }
    }

    /// Whether remote senders write the segment.
    pub const fn is_remote(self) -> bool {
        matches!(self, Owner::Sender(_) | Owner::Server(_) | Owner::BackupLog)
    }
}

/// What the table says of one segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its state.
    pub state: SegmentState,
    /// Who allocated it.
    pub owner: Owner,
    /// Grows with every allocation of any segment and is never given twice, so it also tells the
    /// order of allocations; 0 before the first.
    pub epoch: u64,
    /// The term in which it was allocated; for a log with one writer, that of its records.
    pub term: u32,
    /// The protocol's own; 0 where it needs none.
    pub tag: u64,
}

impl Entry {
    /// A segment that was never allocated.
    pub const UNTOUCHED: Entry = Entry {
        state: SegmentState::Free,
        owner: Owner::None,
        epoch: 0,
        term: 0,
        tag: 0,
    };

    /// As a line of the table; `segment` goes into the checksum only, so that a misplaced line is
    /// recognised.
    pub fn encode(&self, segment: u32) -> [u8; LINE_BYTES] {
        let (kind, server, worker) = self.owner.encode();
        let mut line = [0; LINE_BYTES];
        line[0] = self.state.code();
        line[1] = kind;
        line[4..8].copy_from_slice(&self.term.to_le_bytes());
        line[8..16].copy_from_slice(&self.epoch.to_le_bytes());
        line[16..24].copy_from_slice(&self.tag.to_le_bytes());
        line[24..28].copy_from_slice(&server.to_le_bytes());
        line[28..32].copy_from_slice(&worker.to_le_bytes());
        seal(&mut line, u64::from(segment));
        line
    }

    /// From a line of the table.
    pub fn decode(line: &[u8; LINE_BYTES], segment: u32) -> Result<Entry, DecodeError> {
        let mut reader = check(line, u64::from(segment))?;
        let state = SegmentState::from_code(reader.u8()?)?;
        let kind = reader.u8()?;
        let zero = reader.u16()?;
        let term = reader.u32()?;
        let epoch = reader.u64()?;
        let tag = reader.u64()?;
        let owner = Owner::decode(kind, reader.u32()?, reader.u32()?)?;
        if zero != 0 || (state == SegmentState::Free) != (owner == Owner::None) {
            return Err(DecodeError::Contradiction("segment state and owner"));
        }
        Ok(Entry {
            state,
            owner,
            epoch,
            term,
            tag,
        })
    }
}

/// Puts a line's checksum into its last four bytes.
pub(super) fn seal(line: &mut [u8; LINE_BYTES], place: u64) {
    let crc = crc32c([&place.to_le_bytes()[..], &line[..CRC_AT]].into_iter());
    line[CRC_AT..].copy_from_slice(&crc.to_le_bytes());
}

/// Checks a line's checksum; reads on from its front.
pub(super) fn check(line: &[u8; LINE_BYTES], place: u64) -> Result<Reader<'_>, DecodeError> {
    let computed = crc32c([&place.to_le_bytes()[..], &line[..CRC_AT]].into_iter());
    let found = Reader::new(&line[CRC_AT..]).u32()?;
    if found == computed {
        Ok(Reader::new(&line[..CRC_AT]))
    } else {
        Err(DecodeError::Checksum { found, computed })
    }
}

/// Stores a line in both of its slots, one durable before the other is touched: a crash tears at
/// most one, and the first slot, where whole, is never older than the second.
pub(super) fn store_twice(area: &SharedArea, at: u64, line: &[u8; LINE_BYTES]) {
    for slot in [at, at + LINE_BYTES as u64] {
        area.write(slot, line);
        area.persist(slot, LINE_BYTES as u64);
    }
}

/// What to do besides reading a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Repair {
    /// Make both slots the same, durably.
    Yes,
    /// Leave the memory alone.
    No,
}

/// Reads a line from the first slot that is whole. Two bad slots are no crash's work.
pub(super) fn load_twice<T>(
    area: &SharedArea,
    at: u64,
    repair: Repair,
    decode: impl Fn(&[u8; LINE_BYTES]) -> Result<T, DecodeError>,
) -> Result<T, DecodeError> {
    let mut lines = [[0; LINE_BYTES]; 2];
    area.read(at, &mut lines[0]);
    area.read(at + LINE_BYTES as u64, &mut lines[1]);
    let (whole, value) = match decode(&lines[0]) {
        Ok(value) => (0, value),
        Err(first) => match decode(&lines[1]) {
            Ok(value) => (1, value),
            Err(_) => return Err(first),
        },
    };
    if repair == Repair::No {
        return Ok(value);
    }
    let other = 1 - whole;
    if lines[other] != lines[whole] {
        let slot = at + (other * LINE_BYTES) as u64;
        area.write(slot, &lines[whole]);
    }
    // Also when both are the same: the one that was read may never have been made durable.
    area.persist(at, SLOTS_BYTES);
    Ok(value)
}

//! A backup's memory: a header, counters, the table of segments, one word per segment, the
//! segments. Drawn in docs/formats.md. Depends on pmem only; who may write which segment is decided
//! above.
//!
//! ```text
//!   | header | counters ×2 | … | entry 0 ×2 | entry 1 ×2 | … | word 0 | word 1 | … | segment 0 | segment 1 | …
//!   0        64            256                               64 B each             4 KiB aligned
//! ```
//!
//! The table changes by whole lines, each kept twice (`entry.rs`). A segment's epoch is given when
//! it is allocated and reported to no sender before its entry is durable; a torn allocation
//! therefore leaves no trace that could matter.

mod entry;
#[cfg(test)]
mod tests;

use cyclone_pmem::SharedArea;
use cyclone_wire::codec::{DecodeError, Reader};

pub use entry::{Entry, LINE_BYTES, Owner, SegmentState};

use crate::protocol::{Protocol, ReplicationError};
use entry::{Repair, SLOTS_BYTES, check, load_twice, seal, store_twice};

const MAGIC: &[u8; 8] = b"CYCBKUP1";
const VERSION: u32 = 1;
const COUNTERS_AT: u64 = 64;
const TABLE_AT: u64 = 256;
const ALIGN: u64 = 4096;
/// Place numbers of lines that are no entry of the table, for their checksums.
const HEADER_PLACE: u64 = u64::MAX;
const COUNTERS_PLACE: u64 = u64::MAX - 1;

/// The most segments a memory may have.
pub const MAX_SEGMENTS: u32 = 1 << 20;

/// Bytes of a segment unless said otherwise.
//= rowan §3.2.2
pub const DEFAULT_SEGMENT_BYTES: u64 = 4 << 20;

/// The smallest segment, and the alignment of all.
pub const MIN_SEGMENT_BYTES: u64 = 4096;

/// The largest segment.
pub const MAX_SEGMENT_BYTES: u64 = 1 << 30;

/// Stream numbers have this many bits, and begin again when they are used up.
pub const STREAM_BITS: u32 = 24;

/// How to lay out a memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FormatOptions {
    /// The protocol whose records it will hold.
    pub protocol: Protocol,
    /// Bytes per segment; a multiple of 4096.
    pub segment_bytes: u64,
    /// A random number that no author of records knows: part of what record checksums are seeded
    /// with.
    pub secret: u64,
}

/// What a segment holds when it is allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Zeros, at the price of writing them.
    Zeroed,
    /// What it held before, but for 64 zero bytes in front.
    Begun,
    /// What it held before. Records of its earlier life fail their checksums, which are seeded with
    /// its epoch.
    Stale,
}

/// The header's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    protocol: Protocol,
    segments: u32,
    segment_bytes: u64,
    secret: u64,
}

/// Numbers that outlive a crash.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counters {
    /// Streams given so far.
    streams: u64,
    /// The lowest term that is still let in.
    min_term: u32,
}

/// A backup's memory, open.
pub struct BackupMemory {
    area: SharedArea,
    shape: Shape,
    counters: Counters,
    entries: Vec<Entry>,
    next_epoch: u64,
    /// The epoch that was taken last.
    taken: Option<u64>,
    /// Where the search for a free segment goes on, so that wear is spread.
    search_from: u32,
    free: u32,
    /// Free segments that remote owners do not get.
    reserved: u32,
}

fn damaged(what: impl Into<String>) -> ReplicationError {
    ReplicationError::Damaged(what.into())
}

fn protocol_code(protocol: Protocol) -> u8 {
    match protocol {
        Protocol::Rpc => 1,
        Protocol::Rwrite => 2,
        Protocol::Batch => 3,
        Protocol::Share => 4,
        Protocol::Faa => 5,
        Protocol::Rowan => 6,
        Protocol::Tailwind => 7,
        Protocol::Hyperloop => 8,
    }
}

/// A protocol's number in formats; see docs/formats.md.
pub(crate) fn encode_protocol(protocol: Protocol) -> u8 {
    protocol_code(protocol)
}

/// A protocol by its number in formats.
pub(crate) fn decode_protocol(code: u8) -> Result<Protocol, DecodeError> {
    let mut all = Protocol::ALL.into_iter();
    all.find(|&protocol| protocol_code(protocol) == code)
        .ok_or(DecodeError::Unknown {
            what: "protocol",
            value: u64::from(code),
        })
}

impl Shape {
    fn words_at(&self) -> u64 {
        TABLE_AT + u64::from(self.segments) * SLOTS_BYTES
    }

    fn segments_at(&self) -> u64 {
        let words_end = self.words_at() + u64::from(self.segments) * LINE_BYTES as u64;
        words_end.next_multiple_of(ALIGN)
    }

    fn total_bytes(&self) -> u64 {
        self.segments_at() + u64::from(self.segments) * self.segment_bytes
    }

    /// As many segments as fit.
    fn fitting(options: &FormatOptions, len: u64) -> Result<Shape, ReplicationError> {
        let FormatOptions {
            protocol,
            segment_bytes,
            secret,
        } = *options;
        let sized = (MIN_SEGMENT_BYTES..=MAX_SEGMENT_BYTES).contains(&segment_bytes);
        if !sized || !segment_bytes.is_multiple_of(ALIGN) {
            return Err(damaged(format!(
                "segments of {segment_bytes} bytes are not between {MIN_SEGMENT_BYTES} and {MAX_SEGMENT_BYTES} in \
                 steps of {ALIGN}"
            )));
        }
        let most = (len / segment_bytes).min(u64::from(MAX_SEGMENTS)) as u32;
        let mut shape = Shape {
            protocol,
            segments: most,
            segment_bytes,
            secret,
        };
        while shape.segments > 0 && shape.total_bytes() > len {
            shape.segments -= 1;
        }
        if shape.segments == 0 {
            return Err(damaged(format!(
                "{len} bytes hold no segment of {segment_bytes} bytes"
            )));
        }
        Ok(shape)
    }

    fn encode(&self) -> [u8; LINE_BYTES] {
        let mut line = [0; LINE_BYTES];
        line[..8].copy_from_slice(MAGIC);
        line[8..12].copy_from_slice(&VERSION.to_le_bytes());
        line[12] = protocol_code(self.protocol);
        line[16..20].copy_from_slice(&self.segments.to_le_bytes());
        line[24..32].copy_from_slice(&self.segment_bytes.to_le_bytes());
        line[32..40].copy_from_slice(&self.secret.to_le_bytes());
        seal(&mut line, HEADER_PLACE);
        line
    }

    fn decode(line: &[u8; LINE_BYTES], len: u64) -> Result<Shape, ReplicationError> {
        if !line.starts_with(MAGIC) {
            return Err(damaged("the header's magic is missing"));
        }
        let version = u32::from_le_bytes([line[8], line[9], line[10], line[11]]);
        if version != VERSION {
            return Err(damaged(format!(
                "format version {version}; this program knows {VERSION}"
            )));
        }
        let header = |error: DecodeError| damaged(format!("the header: {error}"));
        let mut reader = check(line, HEADER_PLACE).map_err(header)?;
        reader.take(12).map_err(header)?;
        let protocol = decode_protocol(reader.u8().map_err(header)?).map_err(header)?;
        reader.take(3).map_err(header)?;
        let segments = reader.u32().map_err(header)?;
        reader.take(4).map_err(header)?;
        let shape = Shape {
            protocol,
            segments,
            segment_bytes: reader.u64().map_err(header)?,
            secret: reader.u64().map_err(header)?,
        };
        let sized = (MIN_SEGMENT_BYTES..=MAX_SEGMENT_BYTES).contains(&shape.segment_bytes)
            && shape.segment_bytes.is_multiple_of(ALIGN)
            && (1..=MAX_SEGMENTS).contains(&segments);
        if sized && shape.total_bytes() <= len {
            Ok(shape)
        } else {
            Err(damaged(format!(
                "the header speaks of {segments} segments of {} bytes; the memory has {len} bytes",
                shape.segment_bytes
            )))
        }
    }
}

impl Counters {
    fn encode(&self) -> [u8; LINE_BYTES] {
        let mut line = [0; LINE_BYTES];
        line[..8].copy_from_slice(&self.streams.to_le_bytes());
        line[8..12].copy_from_slice(&self.min_term.to_le_bytes());
        seal(&mut line, COUNTERS_PLACE);
        line
    }

    fn decode(line: &[u8; LINE_BYTES]) -> Result<Counters, DecodeError> {
        let mut reader: Reader<'_> = check(line, COUNTERS_PLACE)?;
        Ok(Counters {
            streams: reader.u64()?,
            min_term: reader.u32()?,
        })
    }
}

impl BackupMemory {
    /// Lays out a memory anew; what it held is lost. A crash on the way leaves no header, or the
    /// whole layout.
    pub fn format(
        area: SharedArea,
        options: &FormatOptions,
    ) -> Result<BackupMemory, ReplicationError> {
        let shape = Shape::fitting(options, area.len())?;
        area.store_u64(0, 0);
        area.persist(0, LINE_BYTES as u64);
        let counters = Counters::default();
        store_twice(&area, COUNTERS_AT, &counters.encode());
        for segment in 0..shape.segments {
            let line = Entry::UNTOUCHED.encode(segment);
            let at = TABLE_AT + u64::from(segment) * SLOTS_BYTES;
            area.write(at, &line);
            area.write(at + LINE_BYTES as u64, &line);
        }
        area.persist(TABLE_AT, shape.words_at() - TABLE_AT);
        // The magic goes last: while it is zero, the memory counts as never laid out.
        let header = shape.encode();
        area.write(8, &header[8..]);
        area.persist(0, LINE_BYTES as u64);
        area.store_u64(0, u64::from_ne_bytes(*MAGIC));
        area.persist(0, LINE_BYTES as u64);
        Ok(BackupMemory {
            area,
            shape,
            counters,
            entries: vec![Entry::UNTOUCHED; shape.segments as usize],
            next_epoch: 1,
            taken: None,
            search_from: 0,
            free: shape.segments,
            reserved: 0,
        })
    }

    /// Opens a memory that was laid out before, after a crash or not.
    ///
    /// # Errors
    /// [`ReplicationError::Damaged`], naming what is.
    pub fn open(area: SharedArea) -> Result<BackupMemory, ReplicationError> {
        BackupMemory::load(area, Repair::Yes)
    }

    /// Reads the table as it is now and changes nothing: for scans beside the backup that owns the
    /// memory, or of a dead one's.
    ///
    /// # Errors
    /// As for [`BackupMemory::open`].
    pub fn view(area: SharedArea) -> Result<BackupMemory, ReplicationError> {
        BackupMemory::load(area, Repair::No)
    }

    fn load(area: SharedArea, repair: Repair) -> Result<BackupMemory, ReplicationError> {
        if area.len() < TABLE_AT {
            return Err(damaged(format!("{} bytes hold no header", area.len())));
        }
        let mut line = [0; LINE_BYTES];
        area.read(0, &mut line);
        let shape = Shape::decode(&line, area.len())?;
        let counters = load_twice(&area, COUNTERS_AT, repair, Counters::decode)
            .map_err(|error| damaged(format!("the counters: {error}")))?;
        let mut entries = Vec::with_capacity(shape.segments as usize);
        for segment in 0..shape.segments {
            let at = TABLE_AT + u64::from(segment) * SLOTS_BYTES;
            let entry = load_twice(&area, at, repair, |line| Entry::decode(line, segment))
                .map_err(|error| damaged(format!("the entry of segment {segment}: {error}")))?;
            entries.push(entry);
        }
        let newest = entries.iter().map(|entry| entry.epoch).max().unwrap_or(0);
        let free = entries
            .iter()
            .filter(|entry| entry.state == SegmentState::Free)
            .count();
        Ok(BackupMemory {
            area,
            shape,
            counters,
            next_epoch: newest
                .checked_add(1)
                .ok_or_else(|| damaged("epochs are used up"))?,
            taken: None,
            search_from: 0,
            free: free as u32,
            reserved: 0,
            entries,
        })
    }

    /// Opens the memory if it holds a layout, and lays it out if its first 8 bytes are zeros.
    ///
    /// # Errors
    /// [`ReplicationError::Damaged`] also when the layout is for another protocol or segment size.
    pub fn open_or_format(
        area: SharedArea,
        options: &FormatOptions,
    ) -> Result<BackupMemory, ReplicationError> {
        if area.len() < TABLE_AT || area.load_u64(0) == 0 {
            return BackupMemory::format(area, options);
        }
        let memory = BackupMemory::open(area)?;
        let Shape {
            protocol,
            segment_bytes,
            ..
        } = memory.shape;
        if (protocol, segment_bytes) == (options.protocol, options.segment_bytes) {
            Ok(memory)
        } else {
            Err(damaged(format!(
                "laid out for {protocol} with segments of {segment_bytes} bytes, not for {} with {}",
                options.protocol, options.segment_bytes
            )))
        }
    }

    /// The bytes themselves.
    pub fn area(&self) -> &SharedArea {
        &self.area
    }

    /// The protocol whose records it holds.
    pub fn protocol(&self) -> Protocol {
        self.shape.protocol
    }

    /// How many segments there are.
    pub fn segments(&self) -> u32 {
        self.shape.segments
    }

    /// Bytes per segment.
    pub fn segment_bytes(&self) -> u64 {
        self.shape.segment_bytes
    }

    /// How many segments are free.
    pub fn free_segments(&self) -> u32 {
        self.free
    }

    /// Keeps so many free segments for the server's own logs: [`BackupMemory::allocate`] gives
    /// remote owners none of them. Holds until the memory is opened again.
    pub fn reserve(&mut self, segments: u32) {
        self.reserved = segments;
    }

    /// A number that every segment allocated from here on exceeds or has as its epoch, and no
    /// earlier one has.
    pub fn next_epoch(&self) -> u64 {
        self.next_epoch
    }

    /// Takes an epoch that no segment will have: the same again if no segment was allocated since.
    /// So what is allocated in the next life, which takes one first, is never older than what
    /// [`BackupMemory::next_epoch`] said in this one.
    pub(crate) fn take_epoch(&mut self) -> Option<u64> {
        let again = self.taken.filter(|taken| taken + 1 == self.next_epoch);
        let taken = again.unwrap_or(self.next_epoch);
        self.next_epoch = taken.checked_add(1)?;
        self.taken = Some(taken);
        Some(taken)
    }

    /// What the table says of a segment; `None` beyond its end.
    pub fn entry(&self, segment: u32) -> Option<&Entry> {
        self.entries.get(segment as usize)
    }

    /// Every segment with its entry.
    pub fn entries(&self) -> impl Iterator<Item = (u32, &Entry)> {
        self.entries.iter().zip(0..).map(|(entry, n)| (n, entry))
    }

    /// Segments in a state that satisfies `wanted`, in order of allocation; those of Rowan's queues
    /// queue by queue.
    pub fn in_order(&self, wanted: impl Fn(&Entry) -> bool) -> Vec<u32> {
        let is_rowan = self.shape.protocol == Protocol::Rowan;
        let mut found: Vec<(u64, u64, u32)> = self
            .entries()
            .filter(|(_, entry)| wanted(entry))
            .map(|(segment, entry)| match entry.owner {
                // A queue that its senders are leaving may get a segment later than the next queue
                // its first.
                Owner::BackupLog if is_rowan => (entry.tag, entry.epoch, segment),
                _ => (entry.epoch, entry.epoch, segment),
            })
            .collect();
        found.sort_unstable();
        found.into_iter().map(|(.., segment)| segment).collect()
    }

    /// First byte of a segment. Numbers come from the table: one beyond its end answers a place
    /// beyond the memory.
    pub fn segment_offset(&self, segment: u32) -> u64 {
        self.shape.segments_at() + u64::from(segment) * self.shape.segment_bytes
    }

    /// The segment that begins at this byte of the memory, if one does.
    pub fn segment_at(&self, offset: u64) -> Option<u32> {
        let within = offset.checked_sub(self.shape.segments_at())?;
        let number = within / self.shape.segment_bytes;
        let exact = within.is_multiple_of(self.shape.segment_bytes);
        (exact && number < u64::from(self.shape.segments)).then_some(number as u32)
    }

    /// A line of the segment's own outside the segment, for a tail that others change atomically.
    /// What it holds does not matter after a crash.
    pub fn word_offset(&self, segment: u32) -> u64 {
        self.shape.words_at() + u64::from(segment) * LINE_BYTES as u64
    }

    /// What the checksums of records in a segment are seeded with: no two allocations have the
    /// same, and authors of records know none.
    pub fn seed(&self, epoch: u64) -> u64 {
        // Epochs that differ in their lower halves only give seeds that do too: a CRC32 tells such
        // seeds apart with certainty, not by chance.
        self.shape.secret ^ epoch
    }

    /// What the checksums of records in a segment are seeded with, by its entry. Rowan's senders do
    /// not know where their blocks land: the queue that a segment was posted to, its entry's tag,
    /// gives the seed.
    pub fn seed_of(&self, entry: &Entry) -> u64 {
        self.seed(match self.shape.protocol {
            Protocol::Rowan => entry.tag,
            _ => entry.epoch,
        })
    }

    /// Gives a number for an opened log that was not given before (within 2^24 of them), durably.
    pub fn next_stream(&mut self) -> u32 {
        self.counters.streams = self.counters.streams.wrapping_add(1);
        store_twice(&self.area, COUNTERS_AT, &self.counters.encode());
        (self.counters.streams % (1 << STREAM_BITS)) as u32
    }

    /// The lowest term that is still let in.
    pub fn min_term(&self) -> u32 {
        self.counters.min_term
    }

    /// Lets in no term below this one any more, durably.
    pub fn raise_min_term(&mut self, term: u32) {
        if term > self.counters.min_term {
            self.counters.min_term = term;
            store_twice(&self.area, COUNTERS_AT, &self.counters.encode());
        }
    }

    /// Takes a free segment: its content prepared durably first, then its entry with a new epoch
    /// made durable. `None` when there is none, or the epochs are used up.
    pub fn allocate(&mut self, owner: Owner, term: u32, tag: u64, content: Content) -> Option<u32> {
        self.allocate_where(owner, term, tag, content, |_| true)
    }

    /// As [`BackupMemory::allocate`], one of those that are `wanted`.
    pub fn allocate_where(
        &mut self,
        owner: Owner,
        term: u32,
        tag: u64,
        content: Content,
        wanted: impl Fn(u32) -> bool,
    ) -> Option<u32> {
        if self.free == 0 || owner.is_remote() && self.free <= self.reserved {
            return None;
        }
        let count = self.shape.segments;
        let segment = (0..count)
            .map(|step| (self.search_from + step) % count)
            .find(|&n| self.entries[n as usize].state == SegmentState::Free && wanted(n))?;
        let after = self.next_epoch.checked_add(1)?;
        let (at, len) = (self.segment_offset(segment), self.shape.segment_bytes);
        match content {
            // Past the caches: no thread reads these bytes before a sender writes them.
            Content::Zeroed => self.area.zero_streaming(at, len),
            Content::Begun => self.area.zero_streaming(at, LINE_BYTES as u64),
            Content::Stale => {}
        }
        if content != Content::Stale {
            self.area.fence();
        }
        self.area.zero(self.word_offset(segment), LINE_BYTES as u64);
        let entry = Entry {
            state: SegmentState::Using,
            owner,
            epoch: self.next_epoch,
            term,
            tag,
        };
        self.store(segment, entry);
        self.next_epoch = after;
        self.search_from = (segment + 1) % count;
        self.free -= 1;
        Some(segment)
    }

    /// Moves a segment to another state, durably.
    ///
    /// # Errors
    /// [`ReplicationError::Segment`] when it does not exist or [`SegmentState::may_become`] says
    /// no.
    pub fn transition(&mut self, segment: u32, to: SegmentState) -> Result<(), ReplicationError> {
        let entry = self.entries.get(segment as usize).copied();
        let refused = |state: &str, wanted| ReplicationError::Segment {
            segment,
            state: state.to_owned(),
            wanted,
        };
        let entry = entry.ok_or_else(|| refused("beyond the table", "in it"))?;
        if !entry.state.may_become(to) {
            let wanted = match to {
                SegmentState::Free => "used or committed",
                SegmentState::Using => "free",
                SegmentState::Used => "using",
                SegmentState::Committed => "using or used",
            };
            return Err(refused(entry.state.name(), wanted));
        }
        let owner = match to {
            SegmentState::Free => Owner::None,
            _ => entry.owner,
        };
        let changed = Entry {
            state: to,
            owner,
            ..entry
        };
        self.store(segment, changed);
        if to == SegmentState::Free {
            self.free += 1;
        }
        Ok(())
    }

    fn store(&mut self, segment: u32, entry: Entry) {
        let at = TABLE_AT + u64::from(segment) * SLOTS_BYTES;
        store_twice(&self.area, at, &entry.encode(segment));
        self.entries[segment as usize] = entry;
    }
}

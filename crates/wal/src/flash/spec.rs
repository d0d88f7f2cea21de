//! A flash log's shape and settings, whose it is, and its refusals.

use cyclone_wire::flash::{FlashMode, FlashSuperblock, PAGE_BYTES};

use super::device::DeviceError;

/// Shape (fixed when the area is formatted) and settings (not).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlashSpec {
    /// The physical log. Shape.
    pub log: u16,
    /// What the area is for. Shape.
    pub mode: FlashMode,
    /// Bytes of a segment: the largest write. Shape.
    pub segment_bytes: u32,
    /// Bytes of the whole area, rounded down to segments. Shape.
    pub bytes: u64,
    /// Writes that may be outstanding; as many segment buffers are held.
    pub outstanding: usize,
    /// As the only level: writes outstanding from which on entries are gathered instead of written
    /// at once.
    pub groups: usize,
    /// A page that is not full is written after this long, in microseconds.
    pub flush_after_us: u64,
    /// Space is written once before it is used, this many bytes at a time.
    pub grow_bytes: u64,
    /// A write that takes longer than this is reported, in microseconds.
    pub stall_after_us: u64,
    /// Time before a failed write is tried again, in microseconds.
    pub retry_after_us: u64,
}

impl FlashSpec {
    /// Segments that an area has at least.
    pub const LEAST_SEGMENTS: u64 = 8;

    /// The paper's settings. //= cyclone §3
    pub fn new(log: u16, mode: FlashMode, bytes: u64) -> FlashSpec {
        FlashSpec {
            log,
            mode,
            segment_bytes: 128 << 10,
            bytes,
            outstanding: 32,
            groups: 4,
            flush_after_us: 20_000,
            grow_bytes: 1 << 30,
            stall_after_us: 1_000_000,
            retry_after_us: 100_000,
        }
    }

    /// Pages of a segment.
    pub fn segment_pages(&self) -> u64 {
        u64::from(self.segment_bytes) / PAGE_BYTES as u64
    }

    /// Pages of the log: the area without the segment that its superblock takes.
    pub(crate) fn pages(&self) -> u64 {
        let segments = (self.bytes / u64::from(self.segment_bytes.max(1))).saturating_sub(1);
        segments * self.segment_pages()
    }

    pub(crate) fn check(&self, device_bytes: u64) -> Result<(), FlashError> {
        let (segment, page) = (self.segment_bytes as usize, PAGE_BYTES);
        if segment < 2 * page || !segment.is_multiple_of(page) {
            return Err(FlashError::Segment(self.segment_bytes));
        }
        let bytes = self.bytes.min(device_bytes);
        let least = u64::from(self.segment_bytes) * Self::LEAST_SEGMENTS;
        if bytes < least {
            return Err(FlashError::TooSmall { bytes, least });
        }
        Ok(())
    }
}

/// Whose area it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlashIdentity {
    /// The cluster.
    pub cluster: u128,
    /// The replica.
    pub replica: u64,
    /// The replica's incarnation.
    pub incarnation: u64,
}

/// Why an area cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FlashError {
    /// Segments are whole pages, at least two.
    #[error("segments of {0} bytes; a multiple of 4096, at least 8192, is needed")]
    Segment(u32),
    /// Too small.
    #[error("a flash log of {bytes} bytes; at least {least} are needed")]
    TooSmall {
        /// Bytes there are.
        bytes: u64,
        /// Bytes needed.
        least: u64,
    },
    /// The file system has no room for a new one.
    #[error("no space for {bytes} bytes of flash_bytes: free as much, or set less")]
    NoRoom {
        /// Bytes needed.
        bytes: u64,
    },
    /// It was never formatted.
    #[error("the flash area has never been formatted")]
    NotFormatted,
    /// Another version of the format.
    #[error("the flash area has format version {0}, this program knows another")]
    VersionUnknown(u32),
    /// Neither copy of the superblock is what was written.
    #[error("the flash area's header is damaged, or the file is no flash area")]
    Damaged,
    /// Another cluster's, replica's or life's.
    #[error("the flash area belongs to {found:x?}, not {expected:x?}")]
    Foreign {
        /// Whose it is.
        found: FlashIdentity,
        /// Whose it should be.
        expected: FlashIdentity,
    },
    /// Made for another log, another mode or another size.
    #[error(
        "the flash area was made for log {} with {} bytes in segments of {} ({:?}); log, mode, segment and size are fixed at creation",
        .0.log, .0.area_bytes(), .0.segment_bytes, .0.mode
    )]
    WrongShape(Box<FlashSuperblock>),
    /// Something that was durable does not read back.
    #[error("the flash log is corrupt at page {page}: {what}")]
    Corrupt {
        /// The page's sequence.
        page: u64,
        /// What does not fit.
        what: &'static str,
    },
    /// The device failed while starting.
    #[error("the flash device failed while starting: {0}")]
    Device(#[from] DeviceError),
    /// The two levels do not fit each other.
    #[error(
        "flash holds entries {flash_first} to {flash_last}, memory {ring_first} to {ring_last}: {what}"
    )]
    Levels {
        /// First index on flash.
        flash_first: u64,
        /// Last index on flash.
        flash_last: u64,
        /// First index in memory.
        ring_first: u64,
        /// Last index in memory.
        ring_last: u64,
        /// What does not fit.
        what: &'static str,
    },
}

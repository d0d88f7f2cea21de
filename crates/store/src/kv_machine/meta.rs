//! A log's place in the state: its key and value (docs/formats.md).

use cyclone_wire::codec::{DecodeError, Reader};

use crate::kv::space;
use crate::machine::ApplyError;

pub(super) fn key(log: u16) -> [u8; 3] {
    let [high, low] = log.to_be_bytes();
    [space::META, high, low]
}

/// Where a log stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Place {
    /// The last entry that is applied to its end, and its term.
    pub(super) applied: u64,
    pub(super) term: u64,
    pub(super) clock_ms: u64,
    /// Commands of the next entry that are applied as well, and the sum of its payload ([`sum`]).
    pub(super) commands: u16,
    pub(super) sum: u32,
}

impl Place {
    /// How many commands of this entry, the next one, are applied. None of one that has taken the
    /// other's place: in a cluster that was restored from a state within an entry, which goes on
    /// without the rest of that.
    pub(super) fn commands_of(&self, payload: &[u8]) -> u16 {
        match self.commands > 0 && self.sum == sum(payload) {
            true => self.commands,
            false => 0,
        }
    }
}

/// Tells an entry's payload from others.
pub(super) fn sum(payload: &[u8]) -> u32 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, payload) as u32
}

/// A stored place: with a number of commands it is longer.
pub(super) struct Value {
    bytes: [u8; 30],
    len: usize,
}

impl std::ops::Deref for Value {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

pub(super) fn value(place: &Place) -> Value {
    let mut bytes = [0; 30];
    bytes[..8].copy_from_slice(&place.applied.to_le_bytes());
    bytes[8..16].copy_from_slice(&place.term.to_le_bytes());
    bytes[16..24].copy_from_slice(&place.clock_ms.to_le_bytes());
    bytes[24..26].copy_from_slice(&place.commands.to_le_bytes());
    bytes[26..].copy_from_slice(&place.sum.to_le_bytes());
    let len = if place.commands == 0 { 24 } else { 30 };
    Value { bytes, len }
}

/// The first format had no clock.
pub(super) fn read(value: &[u8]) -> Result<Place, DecodeError> {
    let mut reader = Reader::new(value);
    let mut place = Place {
        applied: reader.u64()?,
        term: reader.u64()?,
        ..Place::default()
    };
    if reader.left() > 0 {
        place.clock_ms = reader.u64()?;
    }
    if reader.left() > 0 {
        place.commands = u16::from_le_bytes(reader.array()?);
        place.sum = reader.u32()?;
    }
    reader.finish()?;
    Ok(place)
}

/// Entries come one after the other: one that is passed over never comes again. A log of which
/// nothing is applied may begin anywhere.
pub(super) fn check_next(log: u16, applied: u64, index: u64) -> Result<(), ApplyError> {
    match applied == 0 || index == applied + 1 {
        true => Ok(()),
        false => Err(ApplyError::Fatal(format!(
            "entry {index} of log {log} is to be applied to a state that has its entries up to {applied}"
        ))),
    }
}

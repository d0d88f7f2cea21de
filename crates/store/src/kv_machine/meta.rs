//! A log's place in the state: its key and value (docs/formats.md).

use cyclone_wire::codec::{DecodeError, Reader};

use crate::kv::space;
use crate::machine::ApplyError;

pub(super) fn key(log: u16) -> [u8; 3] {
    let [high, low] = log.to_be_bytes();
    [space::META, high, low]
}

pub(super) fn value(applied: u64, term: u64, clock_ms: u64) -> [u8; 24] {
    let mut value = [0; 24];
    value[..8].copy_from_slice(&applied.to_le_bytes());
    value[8..16].copy_from_slice(&term.to_le_bytes());
    value[16..].copy_from_slice(&clock_ms.to_le_bytes());
    value
}

/// Applied index, term and clock; the first format had no clock.
pub(super) fn read(value: &[u8]) -> Result<(u64, u64, u64), DecodeError> {
    let mut reader = Reader::new(value);
    let (applied, term) = (reader.u64()?, reader.u64()?);
    let clock_ms = if reader.left() == 0 { 0 } else { reader.u64()? };
    reader.finish()?;
    Ok((applied, term, clock_ms))
}

/// Entries come one after the other: one that is passed over never comes again. A log of which nothing is applied may begin anywhere.
pub(super) fn check_next(log: u16, applied: u64, index: u64) -> Result<(), ApplyError> {
    match applied == 0 || index == applied + 1 {
        true => Ok(()),
        false => Err(ApplyError::Fatal(format!(
            "entry {index} of log {log} is to be applied to a state that has its entries up to {applied}"
        ))),
    }
}

//! Bytes of batches, expectations and expiries.

use super::{Where, tag};
use crate::codec::{DecodeError, Reader, Write};
use crate::command::{
    Expectation, Expected, ExpireIf, Expiry, MAX_BATCH_BYTES, MAX_BATCH_ITEMS, Operation,
};

/// Bytes of the shortest operation and of the shortest expectation: what a count must at least be
/// followed by.
const SHORTEST_OPERATION: usize = 1;
const SHORTEST_EXPECTATION: usize = 5;

/// Whether an operation of this tag may stand there.
pub(super) fn may_stand(tag: u8, place: Where) -> bool {
    match tag {
        tag::OPEN_SESSION
        | tag::CLOSE_SESSION
        | tag::SWEEP
        | tag::MEMBERS
        | tag::RECORD
        | tag::SET_CLOCK
        | tag::SET_FORMAT_VERSION => place == Where::Entry,
        tag::BATCH => place != Where::Inner,
        _ => true,
    }
}

pub(super) fn encode(
    out: &mut Vec<u8>,
    expectations: &[Expectation<'_>],
    operations: &[Operation<'_>],
) {
    out.put_u32(expectations.len() as u32);
    for Expectation { key, state } in expectations {
        out.put_bytes(key);
        match state {
            Expected::Present => out.put_u8(0),
            Expected::Absent => out.put_u8(1),
            Expected::Value(value) => {
                out.put_u8(2);
                out.put_bytes(value);
            }
            Expected::Version(version) => {
                out.put_u8(3);
                out.put_u64(*version);
            }
        }
    }
    out.put_u32(operations.len() as u32);
    operations
        .iter()
        .for_each(|operation| operation.encode(out));
}

fn count(
    reader: &mut Reader<'_>,
    shortest: usize,
    what: &'static str,
) -> Result<usize, DecodeError> {
    let count = reader.count(shortest)?;
    if count > MAX_BATCH_ITEMS {
        return Err(DecodeError::OutOfRange {
            what,
            value: count as u64,
        });
    }
    Ok(count)
}

/// Reads what follows the tag. Vectors grow as items are read, so that a count alone reserves
/// nothing.
pub(super) fn read<'a>(
    reader: &mut Reader<'a>,
    place: Where,
) -> Result<Operation<'a>, DecodeError> {
    let before = reader.left();
    let expected = count(reader, SHORTEST_EXPECTATION, "batch expectations")?;
    let expectations = (0..expected)
        .map(|_| read_expectation(reader))
        .collect::<Result<Vec<_>, _>>()?;
    let held = count(reader, SHORTEST_OPERATION, "batch operations")?;
    let inside = match place {
        Where::Entry => Where::Batch,
        Where::Batch | Where::Inner => Where::Inner,
    };
    let mut operations = Vec::new();
    // Those of batches within count too, or few bytes would become a lot of memory.
    let mut items = held;
    for _ in 0..held {
        let operation = Operation::read(reader, inside)?;
        if let Operation::Batch { operations, .. } = &operation {
            items += operations.len();
        }
        if items > MAX_BATCH_ITEMS {
            return Err(DecodeError::OutOfRange {
                what: "batch operations",
                value: items as u64,
            });
        }
        operations.push(operation);
    }
    let bytes = before - reader.left();
    if bytes > MAX_BATCH_BYTES {
        return Err(DecodeError::OutOfRange {
            what: "batch bytes",
            value: bytes as u64,
        });
    }
    Ok(Operation::Batch {
        expectations,
        operations,
    })
}

fn read_expectation<'a>(reader: &mut Reader<'a>) -> Result<Expectation<'a>, DecodeError> {
    let key = reader.bytes()?;
    let state = match reader.u8()? {
        0 => Expected::Present,
        1 => Expected::Absent,
        2 => Expected::Value(reader.bytes()?),
        3 => Expected::Version(reader.u64()?),
        other => {
            return Err(DecodeError::Unknown {
                what: "expectation",
                value: u64::from(other),
            });
        }
    };
    Ok(Expectation { key, state })
}

impl Expiry {
    pub(super) fn encode(self, out: &mut Vec<u8>) {
        match self {
            Expiry::Keep => out.put_u8(0),
            Expiry::At(ms) => {
                out.put_u8(1);
                out.put_u64(ms);
            }
            Expiry::After(ms) => {
                out.put_u8(2);
                out.put_u64(ms);
            }
            Expiry::Never => out.put_u8(3),
        }
    }
}

pub(super) fn read_expiry(reader: &mut Reader<'_>) -> Result<Expiry, DecodeError> {
    Ok(match reader.u8()? {
        0 => Expiry::Keep,
        1 => Expiry::At(reader.u64()?),
        2 => Expiry::After(reader.u64()?),
        3 => Expiry::Never,
        other => {
            return Err(DecodeError::Unknown {
                what: "expiry",
                value: u64::from(other),
            });
        }
    })
}

const EXPIRE_IF: [ExpireIf; 6] = [
    ExpireIf::Always,
    ExpireIf::None,
    ExpireIf::Some,
    ExpireIf::Later,
    ExpireIf::Earlier,
    ExpireIf::EarlierThanSome,
];

impl ExpireIf {
    pub(super) fn encode(self, out: &mut Vec<u8>) {
        out.put_u8(match self {
            ExpireIf::Always => 0,
            ExpireIf::None => 1,
            ExpireIf::Some => 2,
            ExpireIf::Later => 3,
            ExpireIf::Earlier => 4,
            ExpireIf::EarlierThanSome => 5,
        });
    }
}

pub(super) fn read_expire_if(reader: &mut Reader<'_>) -> Result<ExpireIf, DecodeError> {
    let number = reader.u8()?;
    let known = EXPIRE_IF.get(usize::from(number)).copied();
    known.ok_or(DecodeError::Unknown {
        what: "expire condition",
        value: u64::from(number),
    })
}

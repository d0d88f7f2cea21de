//! Bytes of commands and queries: one tag byte, then the fields in the order of their declaration
//! (docs/formats.md, "Commands").

mod batch;
mod query;
#[cfg(test)]
mod tests;

use std::borrow::Cow;

use crate::codec::{DecodeError, Reader, Write};
use crate::command::{Command, Condition, Operation, Query, SessionTag};
use crate::format_version::FormatVersion;
use crate::long_double::LongDouble;

mod tag {
    pub const NOOP: u8 = 0;
    pub const OPEN_SESSION: u8 = 1;
    pub const CLOSE_SESSION: u8 = 2;
    pub const SET: u8 = 3;
    pub const GET_DEL: u8 = 4;
    pub const DEL: u8 = 5;
    pub const APPEND: u8 = 6;
    pub const SET_RANGE: u8 = 7;
    pub const INCR_BY: u8 = 8;
    pub const INCR_BY_FLOAT: u8 = 9;
    pub const FLUSH_ALL: u8 = 10;
    pub const READ: u8 = 11;
    pub const SET_EXPIRING: u8 = 12;
    pub const EXPIRE: u8 = 13;
    pub const GET_EXPIRE: u8 = 14;
    pub const BATCH: u8 = 15;
    pub const SWEEP: u8 = 16;
    pub const MEMBERS: u8 = 17;
    pub const RECORD: u8 = 18;
    pub const INCR_BY_LONG_DOUBLE: u8 = 19;
    pub const SET_CLOCK: u8 = 20;
    pub const SET_FORMAT_VERSION: u8 = 21;
}

impl<'a> Command<'a> {
    /// Appends the command's bytes to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        match &self.session {
            None => out.put_u8(0),
            Some(session) => {
                out.put_u8(1);
                out.put_u64(session.session);
                out.put_u64(session.seq);
                out.put_u64(session.acked_below);
            }
        }
        self.operation.encode(out);
    }

    /// Reads a command that takes up all of `bytes`.
    ///
    /// # Errors
    /// Anything that [`Command::encode`] would not write.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(bytes);
        let session = match reader.bool("session flag")? {
            false => None,
            true => {
                let tag = SessionTag {
                    session: reader.u64()?,
                    seq: reader.u64()?,
                    acked_below: reader.u64()?,
                };
                if tag.seq == 0 {
                    return Err(DecodeError::OutOfRange {
                        what: "session sequence",
                        value: 0,
                    });
                }
                Some(tag)
            }
        };
        let operation = Operation::read(&mut reader, Where::Entry)?;
        reader.finish()?;
        Ok(Command { session, operation })
    }
}

fn put_keys(out: &mut Vec<u8>, keys: &[&[u8]]) {
    out.put_u32(keys.len() as u32);
    keys.iter().for_each(|key| out.put_bytes(key));
}

fn read_keys<'a>(reader: &mut Reader<'a>) -> Result<Vec<&'a [u8]>, DecodeError> {
    let count = reader.count(4)?;
    (0..count).map(|_| reader.bytes()).collect()
}

/// Where an operation stands: some are not allowed within a batch.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Where {
    Entry,
    Batch,
    /// In a batch within a batch.
    Inner,
}

fn put_condition(out: &mut Vec<u8>, condition: Condition) {
    out.put_u8(match condition {
        Condition::Always => 0,
        Condition::Absent => 1,
        Condition::Present => 2,
    });
}

fn read_condition(reader: &mut Reader<'_>) -> Result<Condition, DecodeError> {
    match reader.u8()? {
        0 => Ok(Condition::Always),
        1 => Ok(Condition::Absent),
        2 => Ok(Condition::Present),
        other => Err(DecodeError::Unknown {
            what: "condition",
            value: u64::from(other),
        }),
    }
}

impl<'a> Operation<'a> {
    /// Reads an operation that takes up all of `bytes`; within a command it has the same form.
    ///
    /// # Errors
    /// Anything that [`Operation::encode`] would not write.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(bytes);
        let operation = Operation::read(&mut reader, Where::Entry)?;
        reader.finish()?;
        Ok(operation)
    }

    /// Appends the operation's bytes to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Operation::Noop => out.put_u8(tag::NOOP),
            Operation::OpenSession => out.put_u8(tag::OPEN_SESSION),
            Operation::CloseSession { session } => {
                out.put_u8(tag::CLOSE_SESSION);
                out.put_u64(*session);
            }
            Operation::Set {
                key,
                value,
                condition,
                get,
            } => {
                out.put_u8(tag::SET);
                out.put_bytes(key);
                out.put_bytes(value);
                put_condition(out, *condition);
                out.put_u8(u8::from(*get));
            }
            Operation::GetDel { key } => {
                out.put_u8(tag::GET_DEL);
                out.put_bytes(key);
            }
            Operation::Del { keys } => {
                out.put_u8(tag::DEL);
                put_keys(out, keys);
            }
            Operation::Append { key, value } => {
                out.put_u8(tag::APPEND);
                out.put_bytes(key);
                out.put_bytes(value);
            }
            Operation::SetRange { key, offset, value } => {
                out.put_u8(tag::SET_RANGE);
                out.put_bytes(key);
                out.put_u64(*offset);
                out.put_bytes(value);
            }
            Operation::IncrBy { key, delta } => {
                out.put_u8(tag::INCR_BY);
                out.put_bytes(key);
                out.put_i64(*delta);
            }
            Operation::IncrByFloat { key, delta } => {
                out.put_u8(tag::INCR_BY_FLOAT);
                out.put_bytes(key);
                out.put_u64(delta.to_bits());
            }
            Operation::IncrByLongDouble { key, delta } => {
                out.put_u8(tag::INCR_BY_LONG_DOUBLE);
                out.put_bytes(key);
                out.extend_from_slice(&delta.to_bytes());
            }
            Operation::FlushAll => out.put_u8(tag::FLUSH_ALL),
            Operation::Read(query) => {
                out.put_u8(tag::READ);
                query.encode(out);
            }
            Operation::SetExpiring {
                key,
                value,
                condition,
                get,
                expiry,
            } => {
                out.put_u8(tag::SET_EXPIRING);
                out.put_bytes(key);
                out.put_bytes(value);
                put_condition(out, *condition);
                out.put_u8(u8::from(*get));
                expiry.encode(out);
            }
            Operation::Expire {
                key,
                expiry,
                condition,
            } => {
                out.put_u8(tag::EXPIRE);
                out.put_bytes(key);
                expiry.encode(out);
                condition.encode(out);
            }
            Operation::GetExpire { key, expiry } => {
                out.put_u8(tag::GET_EXPIRE);
                out.put_bytes(key);
                expiry.encode(out);
            }
            Operation::Batch {
                expectations,
                operations,
            } => {
                out.put_u8(tag::BATCH);
                batch::encode(out, expectations, operations);
            }
            Operation::Sweep { limit } => {
                out.put_u8(tag::SWEEP);
                out.put_u32(*limit);
            }
            Operation::Members { members } => {
                out.put_u8(tag::MEMBERS);
                out.put_bytes(members);
            }
            Operation::Record { after, record } => {
                out.put_u8(tag::RECORD);
                out.put_u64(*after);
                out.put_bytes(record);
            }
            Operation::SetClock { time_ms } => {
                out.put_u8(tag::SET_CLOCK);
                out.put_u64(*time_ms);
            }
            Operation::SetFormatVersion { version } => {
                out.put_u8(tag::SET_FORMAT_VERSION);
                version.encode(out);
            }
        }
    }

    fn read(reader: &mut Reader<'a>, place: Where) -> Result<Self, DecodeError> {
        let tag = reader.u8()?;
        if !batch::may_stand(tag, place) {
            return Err(DecodeError::Unknown {
                what: "operation of a batch",
                value: u64::from(tag),
            });
        }
        Ok(match tag {
            tag::NOOP => Operation::Noop,
            tag::OPEN_SESSION => Operation::OpenSession,
            tag::CLOSE_SESSION => Operation::CloseSession {
                session: reader.u64()?,
            },
            tag::SET => Operation::Set {
                key: reader.bytes()?,
                value: reader.bytes()?,
                condition: read_condition(reader)?,
                get: reader.bool("get flag")?,
            },
            tag::GET_DEL => Operation::GetDel {
                key: reader.bytes()?,
            },
            tag::DEL => Operation::Del {
                keys: read_keys(reader)?,
            },
            tag::APPEND => Operation::Append {
                key: reader.bytes()?,
                value: reader.bytes()?,
            },
            tag::SET_RANGE => Operation::SetRange {
                key: reader.bytes()?,
                offset: reader.u64()?,
                value: reader.bytes()?,
            },
            tag::INCR_BY => Operation::IncrBy {
                key: reader.bytes()?,
                delta: reader.i64()?,
            },
            tag::INCR_BY_FLOAT => {
                let key = reader.bytes()?;
                let bits = reader.u64()?;
                let delta = f64::from_bits(bits);
                if !delta.is_finite() {
                    return Err(DecodeError::OutOfRange {
                        what: "float increment",
                        value: bits,
                    });
                }
                Operation::IncrByFloat { key, delta }
            }
            tag::INCR_BY_LONG_DOUBLE => {
                let key = reader.bytes()?;
                let bytes = reader.array()?;
                let delta = LongDouble::from_bytes(bytes).ok_or(DecodeError::OutOfRange {
                    what: "long double's sign and exponent",
                    value: u64::from(u16::from_le_bytes([bytes[8], bytes[9]])),
                })?;
                Operation::IncrByLongDouble { key, delta }
            }
            tag::FLUSH_ALL => Operation::FlushAll,
            tag::READ => Operation::Read(Query::read(reader, place)?),
            tag::SET_EXPIRING => Operation::SetExpiring {
                key: reader.bytes()?,
                value: reader.bytes()?,
                condition: read_condition(reader)?,
                get: reader.bool("get flag")?,
                expiry: batch::read_expiry(reader)?,
            },
            tag::EXPIRE => Operation::Expire {
                key: reader.bytes()?,
                expiry: batch::read_expiry(reader)?,
                condition: batch::read_expire_if(reader)?,
            },
            tag::GET_EXPIRE => Operation::GetExpire {
                key: reader.bytes()?,
                expiry: batch::read_expiry(reader)?,
            },
            tag::BATCH => batch::read(reader, place)?,
            tag::SWEEP => Operation::Sweep {
                limit: reader.u32()?,
            },
            tag::MEMBERS => Operation::Members {
                members: reader.bytes()?,
            },
            tag::RECORD => Operation::Record {
                after: reader.u64()?,
                record: reader.bytes()?,
            },
            tag::SET_CLOCK => Operation::SetClock {
                time_ms: reader.u64()?,
            },
            tag::SET_FORMAT_VERSION => Operation::SetFormatVersion {
                version: FormatVersion::read(reader)?,
            },
            other => {
                return Err(DecodeError::Unknown {
                    what: "operation",
                    value: u64::from(other),
                });
            }
        })
    }

    /// The keys it touches, in order, with repetitions; none for operations on no key or on all.
    pub fn keys(&self) -> Cow<'_, [&'a [u8]]> {
        match self {
            Operation::Noop
            | Operation::OpenSession
            | Operation::CloseSession { .. }
            | Operation::FlushAll
            | Operation::Sweep { .. }
            | Operation::Members { .. }
            | Operation::Record { .. }
            | Operation::SetClock { .. }
            | Operation::SetFormatVersion { .. } => Cow::Borrowed(&[]),
            Operation::Set { key, .. }
            | Operation::GetDel { key }
            | Operation::Append { key, .. }
            | Operation::SetRange { key, .. }
            | Operation::IncrBy { key, .. }
            | Operation::IncrByFloat { key, .. }
            | Operation::IncrByLongDouble { key, .. }
            | Operation::SetExpiring { key, .. }
            | Operation::Expire { key, .. }
            | Operation::GetExpire { key, .. } => Cow::Borrowed(std::slice::from_ref(key)),
            Operation::Del { keys } => Cow::Borrowed(keys),
            Operation::Read(query) => Cow::Borrowed(query.keys()),
            Operation::Batch {
                expectations,
                operations,
            } => {
                let mut keys: Vec<&[u8]> = expectations.iter().map(|e| e.key).collect();
                for operation in operations {
                    keys.extend_from_slice(&operation.keys());
                }
                Cow::Owned(keys)
            }
        }
    }

    /// The first key, which decides the physical log.
    pub fn key(&self) -> Option<&'a [u8]> {
        match self {
            // Without gathering all of them.
            Operation::Batch {
                expectations,
                operations,
            } => expectations
                .first()
                .map(|expectation| expectation.key)
                .or_else(|| operations.iter().find_map(Operation::key)),
            _ => self.keys().first().copied(),
        }
    }

    /// Whether it concerns every key there is, whatever [`Operation::keys`] names.
    pub fn concerns_all_keys(&self) -> bool {
        match self {
            Operation::FlushAll => true,
            Operation::Batch { operations, .. } => {
                operations.iter().any(Operation::concerns_all_keys)
            }
            _ => false,
        }
    }

    /// Length of the longest value it carries, in bytes; 0 without one.
    pub fn longest_value(&self) -> usize {
        match self {
            Operation::Set { value, .. }
            | Operation::Append { value, .. }
            | Operation::SetRange { value, .. }
            | Operation::SetExpiring { value, .. } => value.len(),
            Operation::Batch { operations, .. } => operations
                .iter()
                .map(Operation::longest_value)
                .max()
                .unwrap_or(0),
            _ => 0,
        }
    }
}

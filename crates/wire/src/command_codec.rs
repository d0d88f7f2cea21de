//! Bytes of commands and queries: one tag byte, then the fields in the order of their declaration (docs/formats.md,
//! "Commands").

use crate::codec::{DecodeError, Reader, Write};
use crate::command::{Command, Condition, Operation, Query, SessionTag};

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

    pub const GET: u8 = 0;
    pub const MULTI_GET: u8 = 1;
    pub const EXISTS: u8 = 2;
    pub const STR_LEN: u8 = 3;
    pub const GET_RANGE: u8 = 4;
    pub const TYPE: u8 = 5;
    pub const DB_SIZE: u8 = 6;
    pub const SCAN: u8 = 7;
    pub const KEYS: u8 = 8;
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
        let operation = Operation::read(&mut reader)?;
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

impl<'a> Operation<'a> {
    fn encode(&self, out: &mut Vec<u8>) {
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
                out.put_u8(match condition {
                    Condition::Always => 0,
                    Condition::Absent => 1,
                    Condition::Present => 2,
                });
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
            Operation::FlushAll => out.put_u8(tag::FLUSH_ALL),
            Operation::Read(query) => {
                out.put_u8(tag::READ);
                query.encode(out);
            }
        }
    }

    fn read(reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
        Ok(match reader.u8()? {
            tag::NOOP => Operation::Noop,
            tag::OPEN_SESSION => Operation::OpenSession,
            tag::CLOSE_SESSION => Operation::CloseSession {
                session: reader.u64()?,
            },
            tag::SET => Operation::Set {
                key: reader.bytes()?,
                value: reader.bytes()?,
                condition: match reader.u8()? {
                    0 => Condition::Always,
                    1 => Condition::Absent,
                    2 => Condition::Present,
                    other => {
                        return Err(DecodeError::Unknown {
                            what: "condition",
                            value: u64::from(other),
                        });
                    }
                },
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
            tag::FLUSH_ALL => Operation::FlushAll,
            tag::READ => Operation::Read(Query::read(reader)?),
            other => {
                return Err(DecodeError::Unknown {
                    what: "operation",
                    value: u64::from(other),
                });
            }
        })
    }

    /// The keys it touches; empty for operations on no key or on all.
    pub fn keys(&self) -> &[&'a [u8]] {
        match self {
            Operation::Noop
            | Operation::OpenSession
            | Operation::CloseSession { .. }
            | Operation::FlushAll => &[],
            Operation::Set { key, .. }
            | Operation::GetDel { key }
            | Operation::Append { key, .. }
            | Operation::SetRange { key, .. }
            | Operation::IncrBy { key, .. }
            | Operation::IncrByFloat { key, .. } => std::slice::from_ref(key),
            Operation::Del { keys } => keys,
            Operation::Read(query) => query.keys(),
        }
    }

    /// The first key, which decides the physical log.
    pub fn key(&self) -> Option<&'a [u8]> {
        self.keys().first().copied()
    }

    /// The value bytes it carries, if any.
    pub fn value(&self) -> Option<&'a [u8]> {
        match self {
            Operation::Set { value, .. }
            | Operation::Append { value, .. }
            | Operation::SetRange { value, .. } => Some(value),
            _ => None,
        }
    }
}

impl<'a> Query<'a> {
    /// Appends the query's bytes to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Query::Get { key } => {
                out.put_u8(tag::GET);
                out.put_bytes(key);
            }
            Query::MultiGet { keys } => {
                out.put_u8(tag::MULTI_GET);
                put_keys(out, keys);
            }
            Query::Exists { keys } => {
                out.put_u8(tag::EXISTS);
                put_keys(out, keys);
            }
            Query::StrLen { key } => {
                out.put_u8(tag::STR_LEN);
                out.put_bytes(key);
            }
            Query::GetRange { key, start, end } => {
                out.put_u8(tag::GET_RANGE);
                out.put_bytes(key);
                out.put_i64(*start);
                out.put_i64(*end);
            }
            Query::Type { key } => {
                out.put_u8(tag::TYPE);
                out.put_bytes(key);
            }
            Query::DbSize => out.put_u8(tag::DB_SIZE),
            Query::Scan {
                cursor,
                pattern,
                count,
            } => {
                out.put_u8(tag::SCAN);
                out.put_u64(*cursor);
                match pattern {
                    None => out.put_u8(0),
                    Some(pattern) => {
                        out.put_u8(1);
                        out.put_bytes(pattern);
                    }
                }
                out.put_u32(*count);
            }
            Query::Keys { pattern } => {
                out.put_u8(tag::KEYS);
                out.put_bytes(pattern);
            }
        }
    }

    /// Reads a query that takes up all of `bytes`.
    ///
    /// # Errors
    /// Anything that [`Query::encode`] would not write.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(bytes);
        let query = Query::read(&mut reader)?;
        reader.finish()?;
        Ok(query)
    }

    fn read(reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
        Ok(match reader.u8()? {
            tag::GET => Query::Get {
                key: reader.bytes()?,
            },
            tag::MULTI_GET => Query::MultiGet {
                keys: read_keys(reader)?,
            },
            tag::EXISTS => Query::Exists {
                keys: read_keys(reader)?,
            },
            tag::STR_LEN => Query::StrLen {
                key: reader.bytes()?,
            },
            tag::GET_RANGE => Query::GetRange {
                key: reader.bytes()?,
                start: reader.i64()?,
                end: reader.i64()?,
            },
            tag::TYPE => Query::Type {
                key: reader.bytes()?,
            },
            tag::DB_SIZE => Query::DbSize,
            tag::SCAN => {
                let cursor = reader.u64()?;
                let pattern = if reader.bool("pattern flag")? {
                    Some(reader.bytes()?)
                } else {
                    None
                };
                let count = reader.u32()?;
                if count == 0 {
                    return Err(DecodeError::OutOfRange {
                        what: "scan count",
                        value: 0,
                    });
                }
                Query::Scan {
                    cursor,
                    pattern,
                    count,
                }
            }
            tag::KEYS => Query::Keys {
                pattern: reader.bytes()?,
            },
            other => {
                return Err(DecodeError::Unknown {
                    what: "query",
                    value: u64::from(other),
                });
            }
        })
    }

    /// The keys it reads; empty for queries on no key or on all.
    pub fn keys(&self) -> &[&'a [u8]] {
        match self {
            Query::Get { key }
            | Query::StrLen { key }
            | Query::GetRange { key, .. }
            | Query::Type { key } => std::slice::from_ref(key),
            Query::MultiGet { keys } | Query::Exists { keys } => keys,
            Query::DbSize | Query::Scan { .. } | Query::Keys { .. } => &[],
        }
    }

    /// The first key, which decides the physical log.
    pub fn key(&self) -> Option<&'a [u8]> {
        self.keys().first().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    /// Owned raw material for any command.
    type Raw = (
        u8,
        u8,
        Vec<u8>,
        Vec<u8>,
        Vec<Vec<u8>>,
        (i64, i64, u64),
        Option<(u64, u64, u64)>,
    );

    fn raw() -> impl Strategy<Value = Raw> {
        (
            any::<u8>(),
            any::<u8>(),
            vec(any::<u8>(), 0..40),
            vec(any::<u8>(), 0..200),
            vec(vec(any::<u8>(), 0..10), 0..5),
            any::<(i64, i64, u64)>(),
            proptest::option::of((any::<u64>(), 1..u64::MAX, any::<u64>())),
        )
    }

    fn query(raw: &Raw) -> Query<'_> {
        let (_, which, key, pattern, keys, (start, end, cursor), _) = raw;
        let keys = || keys.iter().map(|k| &k[..]).collect();
        match which % 9 {
            0 => Query::Get { key },
            1 => Query::MultiGet { keys: keys() },
            2 => Query::Exists { keys: keys() },
            3 => Query::StrLen { key },
            4 => Query::GetRange {
                key,
                start: *start,
                end: *end,
            },
            5 => Query::Type { key },
            6 => Query::DbSize,
            7 => {
                let pattern = (which & 16 != 0).then_some(&pattern[..]);
                Query::Scan {
                    cursor: *cursor,
                    pattern,
                    count: 1 + (*start as u32 >> 1),
                }
            }
            _ => Query::Keys { pattern },
        }
    }

    fn command(raw: &Raw) -> Command<'_> {
        let (which, flags, key, value, keys, (delta, other, offset), session) = raw;
        let operation = match which % 12 {
            0 => Operation::Noop,
            1 => Operation::OpenSession,
            2 => Operation::CloseSession { session: *offset },
            3 => Operation::Set {
                key,
                value,
                condition: [Condition::Always, Condition::Absent, Condition::Present]
                    [usize::from(flags % 3)],
                get: flags & 128 != 0,
            },
            4 => Operation::GetDel { key },
            5 => Operation::Del {
                keys: keys.iter().map(|k| &k[..]).collect(),
            },
            6 => Operation::Append { key, value },
            7 => Operation::SetRange {
                key,
                offset: *offset,
                value,
            },
            8 => Operation::IncrBy { key, delta: *delta },
            9 => Operation::IncrByFloat {
                key,
                delta: *other as f64 / 7.0,
            },
            10 => Operation::FlushAll,
            _ => Operation::Read(query(raw)),
        };
        let session = session.map(|(session, seq, acked_below)| SessionTag {
            session,
            seq,
            acked_below,
        });
        Command { session, operation }
    }

    proptest! {
        #[test]
        fn commands_come_back(raw in raw()) {
            let command = command(&raw);
            let mut bytes = Vec::new();
            command.encode(&mut bytes);
            prop_assert_eq!(Command::decode(&bytes), Ok(command));
            let mut longer = bytes.clone();
            longer.push(0);
            prop_assert!(Command::decode(&longer).is_err());
            for cut in 0..bytes.len() {
                prop_assert!(Command::decode(&bytes[..cut]).is_err(), "a prefix parsed as a whole command");
            }
        }

        #[test]
        fn queries_come_back(raw in raw()) {
            let query = query(&raw);
            let mut bytes = Vec::new();
            query.encode(&mut bytes);
            prop_assert_eq!(Query::decode(&bytes), Ok(query));
        }

        #[test]
        fn garbage_is_an_error_or_a_command(bytes in vec(any::<u8>(), 0..300), head in 0u8..2, tag in 0u8..14) {
            let _ = Query::decode(&bytes);
            let mut shaped = vec![head, tag];
            shaped.extend_from_slice(&bytes);
            for candidate in [&bytes, &shaped] {
                if let Ok(command) = Command::decode(candidate) {
                    let mut again = Vec::new();
                    command.encode(&mut again);
                    prop_assert_eq!(&again, candidate, "one command, two encodings");
                }
            }
        }
    }

    #[test]
    fn the_layout_is_fixed() {
        let mut bytes = Vec::new();
        let operation = Operation::Set {
            key: b"k",
            value: b"vv",
            condition: Condition::Absent,
            get: false,
        };
        Command {
            session: None,
            operation,
        }
        .encode(&mut bytes);
        assert_eq!(
            bytes,
            [0, 3, 1, 0, 0, 0, b'k', 2, 0, 0, 0, b'v', b'v', 1, 0]
        );
    }

    #[test]
    fn infinite_increments_and_empty_scans_are_refused() {
        let mut bytes = Vec::new();
        let operation = Operation::IncrByFloat {
            key: b"k",
            delta: f64::INFINITY,
        };
        Command {
            session: None,
            operation,
        }
        .encode(&mut bytes);
        assert!(matches!(
            Command::decode(&bytes),
            Err(DecodeError::OutOfRange { .. })
        ));
        bytes.clear();
        Query::Scan {
            cursor: 0,
            pattern: None,
            count: 0,
        }
        .encode(&mut bytes);
        assert!(matches!(
            Query::decode(&bytes),
            Err(DecodeError::OutOfRange { .. })
        ));
    }
}

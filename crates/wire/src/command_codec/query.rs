//! Bytes of queries.

use super::{Where, put_keys, read_keys};
use crate::codec::{DecodeError, Reader, Write};
use crate::command::Query;

mod tag {
    pub const GET: u8 = 0;
    pub const MULTI_GET: u8 = 1;
    pub const EXISTS: u8 = 2;
    pub const STR_LEN: u8 = 3;
    pub const GET_RANGE: u8 = 4;
    pub const TYPE: u8 = 5;
    pub const DB_SIZE: u8 = 6;
    pub const SCAN: u8 = 7;
    pub const KEYS: u8 = 8;
    pub const TTL: u8 = 9;
    pub const VERSIONS: u8 = 10;
    pub const HELD_SCAN: u8 = 11;
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
                held,
            } => {
                out.put_u8(if *held { tag::HELD_SCAN } else { tag::SCAN });
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
            Query::Ttl {
                key,
                millis,
                absolute,
            } => {
                out.put_u8(tag::TTL);
                out.put_bytes(key);
                out.put_u8(u8::from(*millis));
                out.put_u8(u8::from(*absolute));
            }
            Query::Versions { keys } => {
                out.put_u8(tag::VERSIONS);
                put_keys(out, keys);
            }
        }
    }

    /// Reads a query that takes up all of `bytes`.
    ///
    /// # Errors
    /// Anything that [`Query::encode`] would not write.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(bytes);
        let query = Query::read(&mut reader, Where::Entry)?;
        reader.finish()?;
        Ok(query)
    }

    pub(super) fn read(reader: &mut Reader<'a>, place: Where) -> Result<Self, DecodeError> {
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
            scan @ (tag::SCAN | tag::HELD_SCAN) => {
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
                    held: scan == tag::HELD_SCAN,
                }
            }
            tag::KEYS => Query::Keys {
                pattern: reader.bytes()?,
            },
            tag::TTL => Query::Ttl {
                key: reader.bytes()?,
                millis: reader.bool("unit")?,
                absolute: reader.bool("absolute flag")?,
            },
            // Within a batch a version would be one that the batch itself may still use.
            tag::VERSIONS if place == Where::Entry => Query::Versions {
                keys: read_keys(reader)?,
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
            | Query::Type { key }
            | Query::Ttl { key, .. } => std::slice::from_ref(key),
            Query::MultiGet { keys } | Query::Exists { keys } | Query::Versions { keys } => keys,
            Query::DbSize | Query::Scan { .. } | Query::Keys { .. } => &[],
        }
    }

    /// The first key, which decides the physical log.
    pub fn key(&self) -> Option<&'a [u8]> {
        self.keys().first().copied()
    }
}

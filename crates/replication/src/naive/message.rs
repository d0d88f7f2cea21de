//! The naive chain's messages. Little-endian; every message begins with 32 bytes:
//!
//! ```text
//!   0      1      2       8         16      24       32
//!   | kind | what | zeros | session | token | number | fields …
//!     u8     u8             u64       u64     u64
//!
//!   open       what = 0             number = window; fields: member u64, members u64, the next member's address
//!   opened     what = 0
//!   operation  what = operation     write: offset u64, bytes …         copy: from u64, to u64, len u64
//!                                   swap: offset, old, new, execute u64 each, then a word per member passed
//!                                   read: member u64, offset u64, len u64, then the bytes once passed there
//!                                   flush: nothing
//!   answer     what = operation     fields: the results
//!   failed     what = 0             fields: why, as text
//! ```
//!
//! A member hands an operation on as it came, with its result behind it.

use cyclone_fabric::Token;
use cyclone_wire::codec::{DecodeError, Reader};

use crate::group::{Answer, GroupOp};

/// Bytes before a message's fields.
pub(super) const HEADER_BYTES: usize = 32;
/// Bytes of an operation's fields beside what it carries, and of a full gCAS's results.
pub(super) const OVERHEAD_BYTES: usize = HEADER_BYTES + 32 + 64 * 8;

/// The longest explanation that is believed.
const MAX_WHY_BYTES: usize = 256;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Open,
    Opened,
    Operation,
    Answer,
    Failed,
}

/// What every message begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) kind: Kind,
    pub(super) what: u8,
    pub(super) session: u64,
    pub(super) token: Token,
    pub(super) number: u64,
}

const WRITE: u8 = 1;
const SWAP: u8 = 2;
const COPY: u8 = 3;
const FLUSH: u8 = 4;
const READ: u8 = 5;

impl Header {
    pub(super) fn encode(&self, fields: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER_BYTES + fields);
        let kind = match self.kind {
            Kind::Open => 1,
            Kind::Opened => 2,
            Kind::Operation => 3,
            Kind::Answer => 4,
            Kind::Failed => 5,
        };
        bytes.extend_from_slice(&[kind, self.what, 0, 0, 0, 0, 0, 0]);
        bytes.extend_from_slice(&self.session.to_le_bytes());
        bytes.extend_from_slice(&self.token.0.to_le_bytes());
        bytes.extend_from_slice(&self.number.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<(Header, &[u8]), DecodeError> {
        let mut reader = Reader::new(bytes);
        let kind = match reader.u8()? {
            1 => Kind::Open,
            2 => Kind::Opened,
            3 => Kind::Operation,
            4 => Kind::Answer,
            5 => Kind::Failed,
            other => {
                return Err(DecodeError::Unknown {
                    what: "message kind",
                    value: u64::from(other),
                });
            }
        };
        let what = reader.u8()?;
        reader.take(6)?;
        let header = Header {
            kind,
            what,
            session: reader.u64()?,
            token: Token(reader.u64()?),
            number: reader.u64()?,
        };
        Ok((header, &bytes[HEADER_BYTES..]))
    }
}

/// Who comes where in a session's chain.
pub(super) struct Place<'a> {
    pub(super) member: usize,
    pub(super) members: usize,
    /// The next member's address; empty for the last.
    pub(super) next: &'a [u8],
}

pub(super) fn encode_open(session: u64, token: Token, window: u64, place: &Place<'_>) -> Vec<u8> {
    let header = Header {
        kind: Kind::Open,
        what: 0,
        session,
        token,
        number: window,
    };
    let mut bytes = header.encode(16 + place.next.len());
    bytes.extend_from_slice(&(place.member as u64).to_le_bytes());
    bytes.extend_from_slice(&(place.members as u64).to_le_bytes());
    bytes.extend_from_slice(place.next);
    bytes
}

pub(super) fn decode_open(fields: &[u8]) -> Result<Place<'_>, DecodeError> {
    let mut reader = Reader::new(fields);
    let (member, members) = (reader.u64()?, reader.u64()?);
    if members > 64 || member >= members {
        return Err(DecodeError::OutOfRange {
            what: "member",
            value: member,
        });
    }
    Ok(Place {
        member: member as usize,
        members: members as usize,
        next: reader.take(reader.left())?,
    })
}

pub(super) fn encode_operation(
    session: u64,
    token: Token,
    number: u64,
    operation: &GroupOp,
) -> Vec<u8> {
    let (what, words, carried): (u8, &[u64], &[u8]) = match operation {
        GroupOp::Write { offset, bytes } => (WRITE, &[*offset], bytes),
        GroupOp::CompareSwap {
            offset,
            old,
            new,
            execute,
        } => (SWAP, &[*offset, *old, *new, *execute], &[]),
        GroupOp::Copy { from, to, len } => (COPY, &[*from, *to, *len], &[]),
        GroupOp::Flush => (FLUSH, &[], &[]),
        GroupOp::Read {
            member,
            offset,
            len,
        } => (READ, &[*member as u64, *offset, *len], &[]),
    };
    let header = Header {
        kind: Kind::Operation,
        what,
        session,
        token,
        number,
    };
    let mut bytes = header.encode(words.len() * 8 + carried.len());
    for word in words {
        bytes.extend_from_slice(&word.to_le_bytes());
    }
    bytes.extend_from_slice(carried);
    bytes
}

/// An operation as it stands in a message, and the results behind it.
pub(super) enum Incoming<'a> {
    Write {
        offset: u64,
        bytes: &'a [u8],
    },
    /// Anything else, and where in the message its results begin.
    Other {
        operation: GroupOp,
        results_at: usize,
    },
}

pub(super) fn decode_operation(what: u8, fields: &[u8]) -> Result<Incoming<'_>, DecodeError> {
    let mut reader = Reader::new(fields);
    let operation = match what {
        WRITE => {
            let offset = reader.u64()?;
            let bytes = reader.take(reader.left())?;
            return Ok(Incoming::Write { offset, bytes });
        }
        SWAP => GroupOp::CompareSwap {
            offset: reader.u64()?,
            old: reader.u64()?,
            new: reader.u64()?,
            execute: reader.u64()?,
        },
        COPY => GroupOp::Copy {
            from: reader.u64()?,
            to: reader.u64()?,
            len: reader.u64()?,
        },
        FLUSH => GroupOp::Flush,
        READ => GroupOp::Read {
            member: usize::try_from(reader.u64()?).unwrap_or(usize::MAX),
            offset: reader.u64()?,
            len: reader.u64()?,
        },
        other => {
            return Err(DecodeError::Unknown {
                what: "operation",
                value: u64::from(other),
            });
        }
    };
    Ok(Incoming::Other {
        operation,
        results_at: HEADER_BYTES + fields.len() - reader.left(),
    })
}

/// The last member's answer: the operation's results behind a new header.
pub(super) fn encode_answer(header: &Header, results: &[u8]) -> Vec<u8> {
    let header = Header {
        kind: Kind::Answer,
        ..*header
    };
    let mut bytes = header.encode(results.len());
    bytes.extend_from_slice(results);
    bytes
}

pub(super) fn decode_answer(
    what: u8,
    results: &[u8],
    members: usize,
) -> Result<Answer, DecodeError> {
    match what {
        WRITE | COPY | FLUSH => Ok(Answer::Done),
        SWAP => {
            let (words, rest) = results.as_chunks::<8>();
            if words.len() != members || !rest.is_empty() {
                return Err(DecodeError::OutOfRange {
                    what: "results of a swap",
                    value: results.len() as u64,
                });
            }
            let words = words.iter().map(|word| u64::from_le_bytes(*word));
            Ok(Answer::Values(words.collect()))
        }
        READ => Ok(Answer::Bytes(results.to_vec())),
        other => Err(DecodeError::Unknown {
            what: "operation",
            value: u64::from(other),
        }),
    }
}

pub(super) fn encode_plain(kind: Kind, session: u64, why: &str) -> Vec<u8> {
    let header = Header {
        kind,
        what: 0,
        session,
        token: Token(0),
        number: 0,
    };
    let why = &why[..why.floor_char_boundary(MAX_WHY_BYTES)];
    let mut bytes = header.encode(why.len());
    bytes.extend_from_slice(why.as_bytes());
    bytes
}

/// An explanation, for people.
pub(super) fn decode_why(fields: &[u8]) -> String {
    let fields = &fields[..fields.len().min(MAX_WHY_BYTES)];
    String::from_utf8_lossy(fields).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn operations_come_back_with_their_results_behind_them() {
        let swap = GroupOp::CompareSwap {
            offset: 8,
            old: 1,
            new: 2,
            execute: 3,
        };
        let mut bytes = encode_operation(5, Token(6), 7, &swap);
        let bare = bytes.len();
        bytes.extend_from_slice(&9u64.to_le_bytes());
        let (header, fields) = Header::decode(&bytes).expect("header");
        assert_eq!(
            (header.session, header.token, header.number),
            (5, Token(6), 7)
        );
        match decode_operation(header.what, fields).expect("operation") {
            Incoming::Other {
                operation,
                results_at,
            } => {
                assert_eq!(operation, swap);
                assert_eq!(results_at, bare);
            }
            Incoming::Write { .. } => panic!("a swap"),
        }
        let answer = encode_answer(&header, &bytes[bare..]);
        let (header, results) = Header::decode(&answer).expect("header");
        assert_eq!(
            decode_answer(header.what, results, 1).expect("answer"),
            Answer::Values(vec![9])
        );
        assert!(decode_answer(header.what, results, 2).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(bytes in proptest::collection::vec(any::<u8>(), 0..120)) {
            if let Ok((header, fields)) = Header::decode(&bytes) {
                let _ = decode_open(fields);
                let _ = decode_operation(header.what, fields);
                let _ = decode_answer(header.what, fields, 3);
                let _ = decode_why(fields);
            }
        }
    }
}

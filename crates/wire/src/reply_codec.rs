//! Bytes of replies: a tag byte, then the value (docs/formats.md, "Replies").

use crate::codec::{DecodeError, Reader, Write};
use crate::reply::{Failure, Reply};

/// Arrays within arrays that a decoder follows. SCAN needs two.
const MAX_DEPTH: usize = 8;

const OK: u8 = 0;
const NIL: u8 = 1;
const INT: u8 = 2;
const BYTES: u8 = 3;
const ARRAY: u8 = 4;
const FAILED: u8 = 5;

/// The failure that has fields: two numbers follow.
const TOO_MUCH_WORK: u8 = 12;

/// The failures without fields, by number.
const FAILURES: [Failure; 12] = [
    Failure::NotInteger,
    Failure::NotFloat,
    Failure::Overflow,
    Failure::NotFinite,
    Failure::TooLong,
    Failure::SessionExpired,
    Failure::StaleSequence,
    Failure::Unsupported,
    Failure::ConditionFailed,
    Failure::SnapshotGone,
    Failure::TooManySnapshots,
    Failure::ReplyTooLong,
];

fn failure_number(failure: Failure) -> u8 {
    match failure {
        Failure::NotInteger => 0,
        Failure::NotFloat => 1,
        Failure::Overflow => 2,
        Failure::NotFinite => 3,
        Failure::TooLong => 4,
        Failure::SessionExpired => 5,
        Failure::StaleSequence => 6,
        Failure::Unsupported => 7,
        Failure::ConditionFailed => 8,
        Failure::SnapshotGone => 9,
        Failure::TooManySnapshots => 10,
        Failure::ReplyTooLong => 11,
        Failure::TooMuchWork { .. } => TOO_MUCH_WORK,
    }
}

impl Reply {
    /// Appends the reply's bytes to `out`. Replies nested deeper than 8 do not decode.
    pub fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Reply::Ok => out.put_u8(OK),
            Reply::Nil => out.put_u8(NIL),
            Reply::Int(value) => {
                out.put_u8(INT);
                out.put_i64(*value);
            }
            Reply::Bytes(bytes) => {
                out.put_u8(BYTES);
                out.put_bytes(bytes);
            }
            Reply::Array(items) => {
                out.put_u8(ARRAY);
                out.put_u32(items.len() as u32);
                items.iter().for_each(|item| item.encode(out));
            }
            Reply::Failed(failure) => {
                out.put_u8(FAILED);
                out.put_u8(failure_number(*failure));
                if let Failure::TooMuchWork { bytes, limit } = failure {
                    out.put_u64(*bytes);
                    out.put_u64(*limit);
                }
            }
        }
    }

    /// Reads a reply that takes up all of `bytes`.
    ///
    /// # Errors
    /// Anything that [`Reply::encode`] would not write, and nesting deeper than 8.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(bytes);
        let reply = Reply::read(&mut reader, MAX_DEPTH)?;
        reader.finish()?;
        Ok(reply)
    }

    fn read(reader: &mut Reader<'_>, depth: usize) -> Result<Self, DecodeError> {
        Ok(match reader.u8()? {
            OK => Reply::Ok,
            NIL => Reply::Nil,
            INT => Reply::Int(reader.i64()?),
            BYTES => Reply::Bytes(reader.bytes()?.to_vec()),
            ARRAY => {
                let depth = depth.checked_sub(1).ok_or(DecodeError::TooDeep)?;
                let count = reader.count(1)?;
                let mut items = Vec::with_capacity(count.min(1024));
                for _ in 0..count {
                    items.push(Reply::read(reader, depth)?);
                }
                Reply::Array(items)
            }
            FAILED => {
                let number = reader.u8()?;
                if number == TOO_MUCH_WORK {
                    return Ok(Reply::Failed(Failure::TooMuchWork {
                        bytes: reader.u64()?,
                        limit: reader.u64()?,
                    }));
                }
                match FAILURES.get(usize::from(number)) {
                    Some(failure) => Reply::Failed(*failure),
                    None => {
                        return Err(DecodeError::Unknown {
                            what: "failure",
                            value: u64::from(number),
                        });
                    }
                }
            }
            other => {
                return Err(DecodeError::Unknown {
                    what: "reply",
                    value: u64::from(other),
                });
            }
        })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    pub(crate) fn reply() -> impl Strategy<Value = Reply> {
        let leaf = prop_oneof![
            Just(Reply::Ok),
            Just(Reply::Nil),
            any::<i64>().prop_map(Reply::Int),
            vec(any::<u8>(), 0..50).prop_map(Reply::Bytes),
            (0..FAILURES.len()).prop_map(|number| Reply::Failed(FAILURES[number])),
            any::<(u64, u64)>().prop_map(|(bytes, limit)| {
                Reply::Failed(Failure::TooMuchWork { bytes, limit })
            }),
        ];
        leaf.prop_recursive(4, 40, 6, |inner| vec(inner, 0..6).prop_map(Reply::Array))
    }

    proptest! {
        #[test]
        fn replies_come_back(reply in reply()) {
            let mut bytes = Vec::new();
            reply.encode(&mut bytes);
            prop_assert_eq!(Reply::decode(&bytes), Ok(reply));
            for cut in 0..bytes.len() {
                prop_assert!(Reply::decode(&bytes[..cut]).is_err());
            }
        }

        #[test]
        fn garbage_is_an_error_or_a_reply(bytes in vec(prop_oneof![0u8..6, any::<u8>()], 0..200)) {
            if let Ok(reply) = Reply::decode(&bytes) {
                let mut again = Vec::new();
                reply.encode(&mut again);
                prop_assert_eq!(again, bytes);
            }
        }
    }

    #[test]
    fn failure_numbers_match_their_table() {
        for (number, failure) in FAILURES.into_iter().enumerate() {
            assert_eq!(usize::from(failure_number(failure)), number);
        }
        assert_eq!(usize::from(TOO_MUCH_WORK), FAILURES.len());
    }

    #[test]
    fn nesting_is_bounded() {
        let mut bytes = Vec::new();
        for _ in 0..100_000 {
            bytes.extend_from_slice(&[ARRAY, 1, 0, 0, 0]);
        }
        bytes.push(OK);
        assert_eq!(Reply::decode(&bytes), Err(DecodeError::TooDeep));
    }
}

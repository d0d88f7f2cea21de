//! What is stored under a data key: the user's value behind a short head (docs/formats.md, "Store
//! keys").

use std::borrow::Cow;

use cyclone_wire::codec::{DecodeError, Reader, Write};

const PLAIN: u8 = 0;
const EXPIRES: u8 = 1;
/// The version of values taken over from the first format, which had none. No entry has index 0.
pub(crate) const OLD_VERSION: u64 = 1;

/// A stored value, read.
#[derive(Clone, Debug)]
pub(crate) struct Item<'a> {
    stored: Cow<'a, [u8]>,
    value_at: usize,
    /// Which command changed it last: entry index × 4096 + the command's place.
    pub(crate) version: u64,
    /// When it expires, in milliseconds since 1970.
    pub(crate) deadline: Option<u64>,
}

impl<'a> Item<'a> {
    /// Reads what [`encode`] has written.
    pub(crate) fn read(stored: Cow<'a, [u8]>) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(&stored);
        let kind = reader.u8()?;
        let version = reader.u64()?;
        let deadline = match kind {
            PLAIN => None,
            EXPIRES => Some(reader.u64()?),
            other => {
                return Err(DecodeError::Unknown {
                    what: "kind of stored value",
                    value: u64::from(other),
                });
            }
        };
        let value_at = stored.len() - reader.left();
        Ok(Item {
            stored,
            value_at,
            version,
            deadline,
        })
    }

    /// The user's value.
    pub(crate) fn value(&self) -> &[u8] {
        &self.stored[self.value_at..]
    }

    /// The user's value, taken out.
    pub(crate) fn into_value(self) -> Vec<u8> {
        match self.stored {
            Cow::Borrowed(stored) => stored[self.value_at..].to_vec(),
            Cow::Owned(mut stored) => {
                stored.drain(..self.value_at);
                stored
            }
        }
    }

    /// Whether it has expired by the time `now_ms`.
    pub(crate) fn is_expired(&self, now_ms: u64) -> bool {
        self.deadline.is_some_and(|deadline| deadline <= now_ms)
    }
}

/// The bytes to store for a value that consists of `parts`.
pub(crate) fn encode(version: u64, deadline: Option<u64>, parts: &[&[u8]]) -> Vec<u8> {
    let len: usize = parts.iter().map(|part| part.len()).sum();
    let mut out = Vec::with_capacity(17 + len);
    out.put_u8(if deadline.is_some() { EXPIRES } else { PLAIN });
    out.put_u64(version);
    if let Some(deadline) = deadline {
        out.put_u64(deadline);
    }
    parts.iter().for_each(|part| out.extend_from_slice(part));
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_come_back_and_strange_bytes_are_refused() {
        for deadline in [None, Some(7)] {
            let stored = encode(9, deadline, &[b"ab", b"", b"c"]);
            let item = Item::read(Cow::Borrowed(&stored)).unwrap();
            assert_eq!(
                (item.value(), item.version, item.deadline),
                (&b"abc"[..], 9, deadline)
            );
            assert_eq!(Item::read(Cow::Owned(stored)).unwrap().into_value(), b"abc");
        }
        for bytes in [&b""[..], b"\0", b"\x01123456781234567", b"\x0212345678"] {
            assert!(Item::read(Cow::Borrowed(bytes)).is_err(), "{bytes:?}");
        }
    }

    #[test]
    fn the_layout_is_fixed() {
        assert_eq!(encode(3, None, &[b"v"]), [0, 3, 0, 0, 0, 0, 0, 0, 0, b'v']);
        assert_eq!(
            encode(3, Some(258), &[b"v"]),
            [1, 3, 0, 0, 0, 0, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0, b'v']
        );
    }
}

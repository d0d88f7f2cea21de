//! The reader and writer that all formats share: little-endian integers, byte strings with a 32-bit
//! length. The reader never looks beyond its slice and allocates nothing.

/// Why bytes are not what they claim to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The bytes end too early.
    #[error("{needed} bytes needed, {left} left")]
    Truncated {
        /// Bytes the next field takes.
        needed: usize,
        /// Bytes left.
        left: usize,
    },
    /// Bytes follow the last field.
    #[error("{left} bytes too many")]
    Trailing {
        /// How many.
        left: usize,
    },
    /// A tag, flag or enumeration value that no format defines.
    #[error("unknown {what} {value}")]
    Unknown {
        /// Which field.
        what: &'static str,
        /// Its value.
        value: u64,
    },
    /// A value outside what the field allows.
    #[error("{what} {value} out of range")]
    OutOfRange {
        /// Which field.
        what: &'static str,
        /// Its value.
        value: u64,
    },
    /// Fields that contradict each other.
    #[error("contradiction: {0}")]
    Contradiction(&'static str),
    /// Nested deeper than the format allows.
    #[error("nested too deeply")]
    TooDeep,
    /// A text field is not UTF-8.
    #[error("text is not UTF-8")]
    NotText,
    /// The bytes fail their checksum.
    #[error("checksum is {found:#010x}, bytes give {computed:#010x}")]
    Checksum {
        /// The checksum that came with the bytes.
        found: u32,
        /// The checksum of the bytes.
        computed: u32,
    },
}

/// Reads fields from the front of a slice.
#[derive(Clone, Debug)]
pub struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    /// Starts at the front of `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Reader { rest: bytes }
    }

    /// Bytes not read yet.
    pub fn left(&self) -> usize {
        self.rest.len()
    }

    /// The next `count` bytes.
    ///
    /// # Errors
    /// [`DecodeError::Truncated`]
    pub fn take(&mut self, count: usize) -> Result<&'a [u8], DecodeError> {
        match self.rest.split_at_checked(count) {
            Some((head, rest)) => {
                self.rest = rest;
                Ok(head)
            }
            None => Err(DecodeError::Truncated {
                needed: count,
                left: self.rest.len(),
            }),
        }
    }

    /// The next `N` bytes as an array.
    ///
    /// # Errors
    /// [`DecodeError::Truncated`]
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        match self.rest.split_first_chunk::<N>() {
            Some((head, rest)) => {
                self.rest = rest;
                Ok(*head)
            }
            None => Err(DecodeError::Truncated {
                needed: N,
                left: self.rest.len(),
            }),
        }
    }

    /// One byte.
    ///
    /// # Errors
    /// [`DecodeError::Truncated`]
    pub fn u8(&mut self) -> Result<u8, DecodeError> {
        self.array::<1>().map(|[byte]| byte)
    }

    /// Two bytes, little-endian.
    ///
    /// # Errors
    /// [`DecodeError::Truncated`]
    pub fn u16(&mut self) -> Result<u16, DecodeError> {
        self.array().map(u16::from_le_bytes)
    }

    /// Four bytes, little-endian.
    ///
    /// # Errors
    /// [`DecodeError::Truncated`]
    pub fn u32(&mut self) -> Result<u32, DecodeError> {
        self.array().map(u32::from_le_bytes)
    }

    /// Eight bytes, little-endian.
    ///
    /// # Errors
    /// [`DecodeError::Truncated`]
    pub fn u64(&mut self) -> Result<u64, DecodeError> {
        self.array().map(u64::from_le_bytes)
    }

    /// Eight bytes, little-endian, two's complement.
    ///
    /// # Errors
    /// [`DecodeError::Truncated`]
    pub fn i64(&mut self) -> Result<i64, DecodeError> {
        self.array().map(i64::from_le_bytes)
    }

    /// A byte that is 0 or 1.
    ///
    /// # Errors
    /// [`DecodeError::Truncated`], or [`DecodeError::Unknown`] for another value.
    pub fn bool(&mut self, what: &'static str) -> Result<bool, DecodeError> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(DecodeError::Unknown {
                what,
                value: u64::from(other),
            }),
        }
    }

    /// A byte string: 32-bit length, then the bytes.
    ///
    /// # Errors
    /// [`DecodeError::Truncated`]
    pub fn bytes(&mut self) -> Result<&'a [u8], DecodeError> {
        let length = self.u32()?;
        self.take(length as usize)
    }

    /// A count of elements that take at least `element_bytes` each: refused when the bytes left
    /// cannot hold them, so that the caller may reserve memory for them.
    ///
    /// # Errors
    /// [`DecodeError::Truncated`]
    pub fn count(&mut self, element_bytes: usize) -> Result<usize, DecodeError> {
        let count = self.u32()? as usize;
        let needed = count.saturating_mul(element_bytes);
        if needed > self.rest.len() {
            return Err(DecodeError::Truncated {
                needed,
                left: self.rest.len(),
            });
        }
        Ok(count)
    }

    /// Ends the reading.
    ///
    /// # Errors
    /// [`DecodeError::Trailing`] when bytes are left.
    pub fn finish(self) -> Result<(), DecodeError> {
        match self.rest.len() {
            0 => Ok(()),
            left => Err(DecodeError::Trailing { left }),
        }
    }
}

/// Writes fields to the end of a vector; the counterpart of [`Reader`].
pub trait Write {
    /// One byte.
    fn put_u8(&mut self, value: u8);
    /// Two bytes, little-endian.
    fn put_u16(&mut self, value: u16);
    /// Four bytes, little-endian.
    fn put_u32(&mut self, value: u32);
    /// Eight bytes, little-endian.
    fn put_u64(&mut self, value: u64);
    /// Eight bytes, little-endian, two's complement.
    fn put_i64(&mut self, value: i64);
    /// 32-bit length, then the bytes.
    fn put_bytes(&mut self, value: &[u8]);
    /// Writes a 32-bit length, and before it what `body` writes behind it.
    fn put_sized(&mut self, body: impl FnOnce(&mut Vec<u8>));
}

/// Lengths above 4 GiB never arise: every caller's limits are far below. If one did, the length
/// would saturate and the reader refuse the bytes.
fn length(bytes: usize) -> u32 {
    u32::try_from(bytes).unwrap_or(u32::MAX)
}

impl Write for Vec<u8> {
    fn put_u8(&mut self, value: u8) {
        self.push(value);
    }

    fn put_u16(&mut self, value: u16) {
        self.extend_from_slice(&value.to_le_bytes());
    }

    fn put_u32(&mut self, value: u32) {
        self.extend_from_slice(&value.to_le_bytes());
    }

    fn put_u64(&mut self, value: u64) {
        self.extend_from_slice(&value.to_le_bytes());
    }

    fn put_i64(&mut self, value: i64) {
        self.extend_from_slice(&value.to_le_bytes());
    }

    fn put_bytes(&mut self, value: &[u8]) {
        self.put_u32(length(value.len()));
        self.extend_from_slice(value);
    }

    fn put_sized(&mut self, body: impl FnOnce(&mut Vec<u8>)) {
        let at = self.len();
        self.put_u32(0);
        body(self);
        let written = length(self.len() - at - 4);
        self[at..at + 4].copy_from_slice(&written.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_come_back_in_order() {
        let mut out = Vec::new();
        out.put_u8(7);
        out.put_u16(0x1234);
        out.put_u32(9);
        out.put_u64(u64::MAX);
        out.put_i64(-3);
        out.put_bytes(b"abc");
        out.put_sized(|out| out.extend_from_slice(b"de"));
        let mut reader = Reader::new(&out);
        assert_eq!(reader.u8(), Ok(7));
        assert_eq!(reader.u16(), Ok(0x1234));
        assert_eq!(reader.u32(), Ok(9));
        assert_eq!(reader.u64(), Ok(u64::MAX));
        assert_eq!(reader.i64(), Ok(-3));
        assert_eq!(reader.bytes(), Ok(&b"abc"[..]));
        assert_eq!(reader.bytes(), Ok(&b"de"[..]));
        assert_eq!(reader.finish(), Ok(()));
    }

    #[test]
    fn a_length_beyond_the_end_is_refused() {
        let mut out = Vec::new();
        out.put_u32(u32::MAX);
        assert!(matches!(
            Reader::new(&out).bytes(),
            Err(DecodeError::Truncated { left: 0, .. })
        ));
        assert!(matches!(
            Reader::new(&out).count(4),
            Err(DecodeError::Truncated { left: 0, .. })
        ));
        assert_eq!(
            Reader::new(&out).finish(),
            Err(DecodeError::Trailing { left: 4 })
        );
    }
}

//! The payload of a log entry: several commands that were received in one burst and share one
//! entry.
//!
//! ```text
//! 0        4               12                 16                20
//! +--------+---------------+------------------+-----------------+----------------------------+----
//! | count  | stamp_ms      | max_value_bytes  | max_work_bytes  | length u32 | command bytes | ...
//! +--------+---------------+------------------+-----------------+----------------------------+----
//! ```
//! What commands may do is the leader's to say, so its limits come with them: replicas with other
//! settings, or these ones after a restart with others, must come to the same state. Bit 31 of the
//! count says that `max_value_bytes` is there, bit 30 that `max_work_bytes` ([`crate::work`])
//! follows it; bit 30 alone is refused. Entries of the first format have neither, those of the
//! second have the first. An empty payload (the entry a new leader begins its term with) is an
//! empty batch.
//= cyclone §4.2

use crate::codec::{DecodeError, Reader, Write};

/// Bytes before the first command.
pub const HEADER_BYTES: usize = 20;
/// The same where no limit is stated.
const SHORT_HEADER_BYTES: usize = 12;
/// In the count: the longest value is stated.
const LIMITED: u32 = 1 << 31;
/// In the count: the most work of a command is stated as well.
const WORK_LIMITED: u32 = 1 << 30;
/// Commands that one entry may hold.
pub const MAX_COMMANDS: usize = 4096;

/// What the leader that makes an entry allows its commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allowed {
    /// The longest value that a command may produce, bytes.
    pub value_bytes: u32,
    /// The most work ([`crate::work`]) that a command may do, bytes.
    pub work_bytes: u32,
}

/// The header of a batch of `count` commands; `stamp_ms` is the leader's clock in milliseconds
/// since 1970.
pub fn header(count: u32, stamp_ms: u64, allowed: Allowed) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[..4].copy_from_slice(&(count | LIMITED | WORK_LIMITED).to_le_bytes());
    header[4..12].copy_from_slice(&stamp_ms.to_le_bytes());
    header[12..16].copy_from_slice(&allowed.value_bytes.to_le_bytes());
    header[16..].copy_from_slice(&allowed.work_bytes.to_le_bytes());
    header
}

/// What a batch says before its commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// Commands that follow.
    pub count: u32,
    /// The leader's clock when the entry was made, in milliseconds since 1970.
    pub stamp_ms: u64,
    /// The longest value that the commands may produce, bytes; `None`: it is not told.
    pub max_value_bytes: Option<u32>,
    /// The most work that each command may do, bytes; `None`: it is not told.
    pub max_work_bytes: Option<u32>,
}

impl Head {
    fn read(reader: &mut Reader<'_>) -> Result<Head, DecodeError> {
        let first = reader.u32()?;
        let count = first & !(LIMITED | WORK_LIMITED);
        let flags = first & (LIMITED | WORK_LIMITED);
        if count as usize > MAX_COMMANDS || flags == WORK_LIMITED {
            return Err(DecodeError::OutOfRange {
                what: "batch count",
                value: u64::from(first & !LIMITED),
            });
        }
        Ok(Head {
            count,
            stamp_ms: reader.u64()?,
            max_value_bytes: match first & LIMITED {
                0 => None,
                _ => Some(reader.u32()?),
            },
            max_work_bytes: match first & WORK_LIMITED {
                0 => None,
                _ => Some(reader.u32()?),
            },
        })
    }

    /// Reads what stands before the commands, and looks no further.
    ///
    /// # Errors
    /// It is cut short, or has more than [`MAX_COMMANDS`].
    pub fn decode(bytes: &[u8]) -> Result<Head, DecodeError> {
        Head::read(&mut Reader::new(bytes))
    }
}

/// Builds a batch in one vector that tells no limit, for commands that make no values.
#[derive(Clone, Debug)]
pub struct Writer {
    bytes: Vec<u8>,
    count: u32,
}

impl Default for Writer {
    fn default() -> Self {
        Writer::new()
    }
}

impl Writer {
    /// An empty batch.
    pub fn new() -> Self {
        Writer {
            bytes: vec![0; SHORT_HEADER_BYTES],
            count: 0,
        }
    }

    /// Commands added so far.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Bytes of the batch so far, header included.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether no command has been added.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Adds the command that `encode` writes.
    pub fn push(&mut self, encode: impl FnOnce(&mut Vec<u8>)) {
        self.bytes.put_sized(encode);
        self.count += 1;
    }

    /// The finished batch.
    pub fn finish(mut self, stamp_ms: u64) -> Vec<u8> {
        self.bytes[..4].copy_from_slice(&self.count.to_le_bytes());
        self.bytes[4..SHORT_HEADER_BYTES].copy_from_slice(&stamp_ms.to_le_bytes());
        self.bytes
    }
}

/// The commands of a batch, in order.
#[derive(Clone, Debug)]
pub struct Iter<'a> {
    reader: Reader<'a>,
    left: u32,
    stamp_ms: u64,
    max_value_bytes: Option<u32>,
    max_work_bytes: Option<u32>,
}

impl Iter<'_> {
    /// The leader's clock when the entry was made, in milliseconds since 1970; 0 for an empty
    /// payload.
    pub fn stamp_ms(&self) -> u64 {
        self.stamp_ms
    }

    /// The longest value that the commands may produce, bytes; `None`: it is not told.
    pub fn max_value_bytes(&self) -> Option<u32> {
        self.max_value_bytes
    }

    /// The most work that each command may do, bytes; `None`: it is not told.
    pub fn max_work_bytes(&self) -> Option<u32> {
        self.max_work_bytes
    }
}

impl<'a> Iterator for Iter<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        self.left = self.left.checked_sub(1)?;
        // `iter` has walked all lengths.
        self.reader.bytes().ok()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left as usize, Some(self.left as usize))
    }
}

impl ExactSizeIterator for Iter<'_> {}

/// The commands of the batch `bytes`. The framing is checked here, the commands are not.
///
/// # Errors
/// Anything that [`Writer`] would not write, and more than [`MAX_COMMANDS`].
pub fn iter(bytes: &[u8]) -> Result<Iter<'_>, DecodeError> {
    if bytes.is_empty() {
        return Ok(Iter {
            reader: Reader::new(bytes),
            left: 0,
            stamp_ms: 0,
            max_value_bytes: None,
            max_work_bytes: None,
        });
    }
    let mut reader = Reader::new(bytes);
    let head = Head::read(&mut reader)?;
    let mut walk = reader.clone();
    for _ in 0..head.count {
        walk.bytes()?;
    }
    walk.finish()?;
    Ok(Iter {
        reader,
        left: head.count,
        stamp_ms: head.stamp_ms,
        max_value_bytes: head.max_value_bytes,
        max_work_bytes: head.max_work_bytes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn batches_come_back(commands in vec(vec(any::<u8>(), 0..30), 0..40), stamp_ms: u64) {
            let mut writer = Writer::new();
            for command in &commands {
                writer.push(|out| out.extend_from_slice(command));
            }
            let bytes = writer.finish(stamp_ms);
            let batch = iter(&bytes).unwrap();
            prop_assert_eq!((batch.stamp_ms(), batch.max_value_bytes()), (stamp_ms, None));
            prop_assert_eq!(batch.len(), commands.len());
            prop_assert_eq!(batch.map(<[u8]>::to_vec).collect::<Vec<_>>(), commands);
            for cut in 1..bytes.len() {
                prop_assert!(iter(&bytes[..cut]).is_err());
            }
        }

        #[test]
        fn limits_come_back(
            commands in vec(vec(any::<u8>(), 0..30), 0..40),
            stamp_ms: u64,
            value_bytes: u32,
            work_bytes: u32,
            told_work: bool,
        ) {
            let allowed = Allowed { value_bytes, work_bytes };
            let mut bytes = header(commands.len() as u32, stamp_ms, allowed).to_vec();
            if !told_work {
                // As the second format has it.
                bytes.truncate(16);
                bytes[3] &= !0x40;
            }
            for command in &commands {
                bytes.put_sized(|out| out.extend_from_slice(command));
            }
            let work = told_work.then_some(work_bytes);
            let wanted = Head {
                count: commands.len() as u32,
                stamp_ms,
                max_value_bytes: Some(value_bytes),
                max_work_bytes: work,
            };
            prop_assert_eq!(Head::decode(&bytes).unwrap(), wanted);
            let batch = iter(&bytes).unwrap();
            prop_assert_eq!((batch.stamp_ms(), batch.max_value_bytes()), (stamp_ms, Some(value_bytes)));
            prop_assert_eq!(batch.max_work_bytes(), work);
            prop_assert_eq!(batch.map(<[u8]>::to_vec).collect::<Vec<_>>(), commands);
            for cut in 1..bytes.len() {
                prop_assert!(iter(&bytes[..cut]).is_err());
            }
        }

        #[test]
        fn garbage_is_an_error_or_a_batch(mut bytes in vec(prop_oneof![Just(0u8), any::<u8>()], 0..200), few in 0u8..8, flags in 0u8..4) {
            if bytes.len() > 4 {
                bytes[..4].copy_from_slice(&[few, 0, 0, flags << 6]);
            }
            if let Ok(batch) = iter(&bytes) {
                prop_assert!(batch.map(<[u8]>::len).sum::<usize>() <= bytes.len());
            }
        }
    }

    #[test]
    fn a_limit_of_work_alone_is_refused() {
        let allowed = Allowed {
            value_bytes: 1,
            work_bytes: 2,
        };
        let mut bytes = header(0, 0, allowed);
        assert!(iter(&bytes).is_ok());
        bytes[3] &= !0x80;
        assert!(iter(&bytes).is_err());
    }

    #[test]
    fn an_empty_payload_is_an_empty_batch() {
        assert_eq!(iter(&[]).unwrap().count(), 0);
    }
}

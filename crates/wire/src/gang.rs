//! The payload of a ganged entry: one operation's share in one physical log (cyclone §5.1).
//!
//! ```text
//! 0        4       5      6        8           16       24        32
//! +--------+-------+------+--------+-----------+--------+---------+----------------------------+--------
//! | "GANG" | kind  | 0    | count  | replica   | boot   | counter | count × (log u16, term u64)| batch
//! +--------+-------+------+--------+-----------+--------+---------+----------------------------+--------
//!                                  |            nonce             |            view            |
//! ```
//! The lowest participant's part carries the commands as a [`crate::batch`], the others' parts
//! carry nothing more than the head; nor does an abort entry. The first word is no count that a
//! batch may have, so that the two are distinguished.
//= cyclone §5.1

use crate::codec::{DecodeError, Reader, Write};

/// The first word of a ganged entry; larger than [`crate::batch::MAX_COMMANDS`].
pub const MARK: u32 = u32::from_le_bytes(*b"GANG");
/// Bytes before the view.
pub const FIXED_BYTES: usize = 32;
/// Bytes of a view per participant.
pub const PLACE_BYTES: usize = 10;
/// Physical logs that a cluster may have, and so participants of a gang.
pub const MAX_LOGS: u16 = 64;

const PART: u8 = 1;
const ABORT: u8 = 2;

/// Names one gang, uniquely for all time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Nonce {
    /// The coordinator.
    pub replica: u64,
    /// Drawn at random when its process started.
    pub boot: u64,
    /// Counts the gangs of that process.
    pub counter: u64,
}

/// What an entry is to its gang.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The log takes part.
    Part,
    /// The log could not take its part: the gang must not be applied.
    Abort,
}

/// What all entries of a gang begin with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    /// What this entry is.
    pub kind: Kind,
    /// Which gang.
    pub nonce: Nonce,
    /// The participants, ascending, and the terms in which the coordinator led them.
    pub view: Vec<(u16, u64)>,
}

impl Head {
    /// Bytes of the head of a gang with so many participants.
    pub const fn bytes(participants: usize) -> usize {
        FIXED_BYTES + PLACE_BYTES * participants
    }

    /// The term that the view gives a log; `None` if it takes no part.
    pub fn term_of(&self, log: u16) -> Option<u64> {
        let found = self.view.iter().find(|(member, _)| *member == log);
        found.map(|(_, term)| *term)
    }

    /// Appends the head.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.put_u32(MARK);
        out.put_u8(match self.kind {
            Kind::Part => PART,
            Kind::Abort => ABORT,
        });
        out.put_u8(0);
        out.extend_from_slice(&(self.view.len() as u16).to_le_bytes());
        out.put_u64(self.nonce.replica);
        out.put_u64(self.nonce.boot);
        out.put_u64(self.nonce.counter);
        for (log, term) in &self.view {
            out.extend_from_slice(&log.to_le_bytes());
            out.put_u64(*term);
        }
    }

    /// How long the head is that begins with these bytes; `None` if they begin no ganged entry.
    pub fn length(fixed: &[u8; FIXED_BYTES]) -> Option<usize> {
        let mark = u32::from_le_bytes([fixed[0], fixed[1], fixed[2], fixed[3]]);
        let count = u16::from_le_bytes([fixed[6], fixed[7]]);
        (mark == MARK && (2..=MAX_LOGS).contains(&count)).then(|| Head::bytes(usize::from(count)))
    }

    /// Reads a head and says where the batch begins.
    ///
    /// # Errors
    /// Anything that [`Head::encode`] would not write of a gang of at least two logs.
    pub fn decode(bytes: &[u8]) -> Result<(Head, usize), DecodeError> {
        let mut reader = Reader::new(bytes);
        let unknown = |what, value| Err(DecodeError::Unknown { what, value });
        let mark = reader.u32()?;
        if mark != MARK {
            return unknown("gang mark", u64::from(mark));
        }
        let kind = match reader.u8()? {
            PART => Kind::Part,
            ABORT => Kind::Abort,
            other => return unknown("gang entry", u64::from(other)),
        };
        let zero = reader.u8()?;
        if zero != 0 {
            return unknown("gang flags", u64::from(zero));
        }
        let count = u16::from_le_bytes(reader.array()?);
        if !(2..=MAX_LOGS).contains(&count) {
            return Err(DecodeError::OutOfRange {
                what: "participants",
                value: u64::from(count),
            });
        }
        let nonce = Nonce {
            replica: reader.u64()?,
            boot: reader.u64()?,
            counter: reader.u64()?,
        };
        let mut view: Vec<(u16, u64)> = Vec::with_capacity(usize::from(count));
        for _ in 0..count {
            let (log, term) = (u16::from_le_bytes(reader.array()?), reader.u64()?);
            if view.last().is_some_and(|(before, _)| *before >= log) || term == 0 {
                return Err(DecodeError::Contradiction("view of a gang"));
            }
            view.push((log, term));
        }
        let at = Head::bytes(usize::from(count));
        Ok((Head { kind, nonce, view }, at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::{btree_map, vec};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn heads_come_back(
            abort: bool,
            numbers: (u64, u64, u64),
            view in btree_map(any::<u16>(), 1u64.., 2..20),
            batch in vec(any::<u8>(), 0..40),
        ) {
            let (replica, boot, counter) = numbers;
            let head = Head {
                kind: if abort { Kind::Abort } else { Kind::Part },
                nonce: Nonce { replica, boot, counter },
                view: view.into_iter().collect(),
            };
            let mut bytes = Vec::new();
            head.encode(&mut bytes);
            let length = bytes.len();
            bytes.extend_from_slice(&batch);
            prop_assert_eq!(Head::decode(&bytes), Ok((head, length)));
            let fixed: &[u8; FIXED_BYTES] = bytes[..FIXED_BYTES].try_into().unwrap();
            prop_assert_eq!(Head::length(fixed), Some(length));
            for cut in 0..length {
                prop_assert!(Head::decode(&bytes[..cut]).is_err());
            }
            prop_assert!(crate::batch::iter(&bytes).is_err(), "no batch reads like a gang");
        }

        #[test]
        fn garbage_is_an_error_or_a_head(mut bytes in vec(any::<u8>(), 0..120), whole: bool) {
            if bytes.len() > 8 && whole {
                bytes[..8].copy_from_slice(b"GANG\x01\0\x03\0");
            }
            if let Ok((head, at)) = Head::decode(&bytes) {
                let mut again = Vec::new();
                head.encode(&mut again);
                prop_assert_eq!(&again[..], &bytes[..at]);
            }
        }
    }
}

//! Messages between endpoints of this provider (docs/formats.md draws them too).
//!
//! ```text
//!   0 kind  1 version  2..4 number  4..8 payload length  8 incarnation  16 connection  24..64 five words   64 payload
//! ```
//! Little-endian. `incarnation` and `connection` are the receiver's: what is meant for a process
//! that has ended, or for a connection that it has closed, is dropped. `number` counts a
//! connection's messages in each direction, without Hello, from 0 and around: the receiver handles
//! them in that order (turns.rs).

use crate::event::FailureKind;

/// Bytes before the payload.
pub const HEADER_BYTES: usize = 64;

const VERSION: u8 = 2;

/// What a message is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Opens a connection. Words: the sender's incarnation and connection, 1 if a thread of its
    /// answers at any time. Payload: the sender's address.
    Hello = 1,
    /// Accepts it. Words: the acceptor's incarnation and connection, 1 if a thread of its answers
    /// at any time.
    Welcome = 2,
    /// Ends it. Words: 1 if the sender has no one-sided operation in flight.
    Bye = 3,
    /// The program's own bytes.
    User = 4,
    /// Asks for the means to use a key. Words: id, token.
    Resolve = 5,
    /// Gives them. Words: id, token, base address, provider's key, length. Payload: rights, and a
    /// queue's address.
    Granted = 6,
    /// Refuses them. Words: id, token, reason.
    Denied = 7,
    /// Asks to make bytes durable. Words: operation, id, token, offset, length.
    Flush = 8,
    /// They are, or why not. Words: operation, reason (0: durable).
    Flushed = 9,
    /// Appends are durable. Payload: their numbers, 4 bytes each.
    Appended = 10,
    /// A key ends. Words: id, 1 for a queue.
    Revoked = 11,
    /// Nothing of this connection under that key is in flight any more. Words: id.
    Drained = 12,
    /// Asks for a sign of life.
    Ping = 13,
    /// Gives it.
    Pong = 14,
    /// Makes the receiver a chain's member. Words: chain, member. Payload: key, the next member's
    /// address.
    ChainOpen = 15,
    /// The member's link to the next one stands. Words: chain, member, reason (0: ready).
    ChainReady = 16,
    /// A chain's operation. Words: chain, number, members that ran it. Payload: see chain.rs.
    ChainRun = 17,
    /// It has run at the last member, or failed at one. Words: chain, number, member, reason.
    /// Payload: results.
    ChainDone = 18,
    /// Ends a chain. Words: chain.
    ChainClose = 19,
    /// An atomic for the target's thread. Words: operation, id, token, offset. Payload: 0 to add or
    /// 1 to exchange, and two words: what to add, or the new value and the old one.
    Atomic = 20,
    /// It is done. Words: operation, reason (0: done), the word before.
    AtomicDone = 21,
}

const KINDS: [Kind; 21] = [
    Kind::Hello,
    Kind::Welcome,
    Kind::Bye,
    Kind::User,
    Kind::Resolve,
    Kind::Granted,
    Kind::Denied,
    Kind::Flush,
    Kind::Flushed,
    Kind::Appended,
    Kind::Revoked,
    Kind::Drained,
    Kind::Ping,
    Kind::Pong,
    Kind::ChainOpen,
    Kind::ChainReady,
    Kind::ChainRun,
    Kind::ChainDone,
    Kind::ChainClose,
    Kind::Atomic,
    Kind::AtomicDone,
];

/// A message's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    pub kind: Kind,
    pub number: u16,
    pub incarnation: u64,
    pub connection: u64,
    pub words: [u64; 5],
}

impl Header {
    /// As bytes, for a payload of `len` bytes.
    pub fn encode(&self, len: usize) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0] = self.kind as u8;
        bytes[1] = VERSION;
        bytes[2..4].copy_from_slice(&self.number.to_le_bytes());
        let len = u32::try_from(len).unwrap_or(u32::MAX);
        bytes[4..8].copy_from_slice(&len.to_le_bytes());
        let words = [self.incarnation, self.connection]
            .into_iter()
            .chain(self.words);
        for (place, word) in bytes[8..].chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// The header and payload in `bytes`; `None` if they are not a message of this version.
    pub fn decode(bytes: &[u8]) -> Option<(Header, &[u8])> {
        let (head, payload) = bytes.split_at_checked(HEADER_BYTES)?;
        let len = u32::from_le_bytes([head[4], head[5], head[6], head[7]]);
        if head[1] != VERSION || len as usize != payload.len() {
            return None;
        }
        let kind = *KINDS.get(usize::from(head[0]).checked_sub(1)?)?;
        let word = |index: usize| word_at(head, 8 + index * 8);
        let header = Header {
            kind,
            number: u16::from_le_bytes([head[2], head[3]]),
            incarnation: word(0)?,
            connection: word(1)?,
            words: [word(2)?, word(3)?, word(4)?, word(5)?, word(6)?],
        };
        Some((header, payload))
    }
}

/// The little-endian word at `offset`.
pub fn word_at(bytes: &[u8], offset: usize) -> Option<u64> {
    let word = bytes.get(offset..offset.checked_add(8)?)?;
    Some(u64::from_le_bytes(word.try_into().ok()?))
}

/// A failure's number in messages; 0 is none.
pub fn reason(kind: &FailureKind) -> u64 {
    match kind {
        FailureKind::WrongToken => 1,
        FailureKind::NotRegistered => 2,
        FailureKind::OutOfBounds => 3,
        FailureKind::NotAllowed => 4,
        FailureKind::Misaligned => 5,
        FailureKind::NoSegment => 6,
        FailureKind::Closed => 7,
        FailureKind::PeerGone => 8,
        FailureKind::Broken => 9,
        FailureKind::Provider(_) => 10,
    }
}

/// The failure of that number.
pub fn failure(reason: u64) -> Option<FailureKind> {
    Some(match reason {
        0 => return None,
        1 => FailureKind::WrongToken,
        2 => FailureKind::NotRegistered,
        3 => FailureKind::OutOfBounds,
        4 => FailureKind::NotAllowed,
        5 => FailureKind::Misaligned,
        6 => FailureKind::NoSegment,
        7 => FailureKind::Closed,
        8 => FailureKind::PeerGone,
        9 => FailureKind::Broken,
        _ => FailureKind::Provider("the peer's provider refused".into()),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_bytes_are_a_message_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Some((header, payload)) = Header::decode(&bytes) {
                prop_assert_eq!(&header.encode(payload.len())[..], &bytes[..HEADER_BYTES]);
            }
        }

        #[test]
        fn messages_come_back(kind in 0..KINDS.len(), number: u16, words in any::<[u64; 5]>(), id in any::<[u64; 2]>(),
                              payload in prop::collection::vec(any::<u8>(), 0..100)) {
            let header = Header { kind: KINDS[kind], number, incarnation: id[0], connection: id[1], words };
            let mut bytes = header.encode(payload.len()).to_vec();
            bytes.extend(&payload);
            prop_assert_eq!(Header::decode(&bytes), Some((header, &payload[..])));
            bytes.push(0);
            prop_assert_eq!(Header::decode(&bytes), None);
        }
    }

    #[test]
    fn reasons_come_back() {
        for number in 0..=10 {
            assert_eq!(failure(number).as_ref().map_or(0, reason), number);
        }
    }
}

//! A message ring: one producer, one consumer, each in its own process.
//!
//! ```text
//!   0      64     128
//!  | head | tail | starved |      head: bytes consumed, tail: bytes produced, both for ever growing
//! ```
//! A piece of a message is a word (length, bit 63: more pieces follow) and its bytes, padded to 8.

use super::layout::{Control, slot};

const HEAD: u64 = 0;
const TAIL: u64 = 64;
/// Set by a producer that found no room: the consumer rings when it has made some.
const STARVED: u64 = 128;
const MORE: u64 = 1 << 63;

/// The other side has written nonsense.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Garbage;

/// Which of a slot's two rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    ToOwner,
    ToInitiator,
}

pub(super) struct Ring<'a> {
    control: &'a Control,
    words: u64,
    data: u64,
}

/// A piece of a message.
pub(super) struct Piece {
    pub bytes: Vec<u8>,
    pub more: bool,
}

impl<'a> Ring<'a> {
    pub(super) fn new(control: &'a Control, slot: u64, direction: Direction) -> Ring<'a> {
        let at = control.shape.slot(slot);
        let bytes = control.shape.ring_bytes;
        let (words, data) = match direction {
            Direction::ToOwner => (slot::TO_OWNER, 0),
            Direction::ToInitiator => (slot::TO_INITIATOR, bytes),
        };
        Ring {
            control,
            words: at + words,
            data: at + slot::BYTES + data,
        }
    }

    fn bytes(&self) -> u64 {
        self.control.shape.ring_bytes
    }

    /// Empties it, as its only user.
    pub(super) fn reset(&self) {
        for word in [HEAD, TAIL, STARVED] {
            self.control.store(self.words + word, 0);
        }
    }

    /// Bytes in it.
    fn held(&self) -> Result<(u64, u64), Garbage> {
        let head = self.control.load(self.words + HEAD);
        let tail = self.control.load(self.words + TAIL);
        let is_sane = tail.wrapping_sub(head) <= self.bytes() && (head | tail).is_multiple_of(8);
        if is_sane {
            Ok((head, tail))
        } else {
            Err(Garbage)
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.held().is_ok_and(|(head, tail)| head == tail)
    }

    /// The most bytes of one piece.
    pub(super) fn max_piece(&self) -> usize {
        // Two fit, so that one is taken out while the next is put in.
        (self.bytes() / 2 - 8) as usize
    }

    /// Puts a piece in; `false` without room.
    pub(super) fn push(&self, bytes: &[u8], more: bool) -> Result<bool, Garbage> {
        let need = 8 + (bytes.len() as u64).next_multiple_of(8);
        let (head, tail) = self.held()?;
        // Saturating: between two loads the other side may write anything.
        let room = |head| self.bytes().saturating_sub(tail.wrapping_sub(head));
        if room(head) < need {
            self.control.store(self.words + STARVED, 1);
            // The consumer may have made room before it could see that.
            if room(self.held()?.0) < need {
                return Ok(false);
            }
        }
        let word = bytes.len() as u64 | if more { MORE } else { 0 };
        self.copy_in(tail, &word.to_le_bytes());
        self.copy_in(tail.wrapping_add(8), bytes);
        self.control
            .store(self.words + TAIL, tail.wrapping_add(need));
        Ok(true)
    }

    /// Takes a piece out. The second answer: the producer waits for room and wants a notification.
    pub(super) fn pop(&self) -> Result<Option<(Piece, bool)>, Garbage> {
        let (head, tail) = self.held()?;
        if head == tail {
            return Ok(None);
        }
        let mut word = [0; 8];
        self.copy_out(head, &mut word);
        let word = u64::from_le_bytes(word);
        let len = word & !MORE;
        let held = tail.wrapping_sub(head);
        if len > self.max_piece() as u64 || 8 + len.next_multiple_of(8) > held {
            return Err(Garbage);
        }
        let mut bytes = vec![0; len as usize];
        self.copy_out(head.wrapping_add(8), &mut bytes);
        let after = head.wrapping_add(8 + len.next_multiple_of(8));
        self.control.store(self.words + HEAD, after);
        let starved = self.control.load(self.words + STARVED) != 0;
        if starved {
            self.control.store(self.words + STARVED, 0);
        }
        let more = word & MORE != 0;
        Ok(Some((Piece { bytes, more }, starved)))
    }

    fn copy_in(&self, at: u64, bytes: &[u8]) {
        let at = at & (self.bytes() - 1);
        let first = bytes.len().min((self.bytes() - at) as usize);
        self.control.area.write(self.data + at, &bytes[..first]);
        self.control.area.write(self.data, &bytes[first..]);
    }

    fn copy_out(&self, at: u64, bytes: &mut [u8]) {
        let at = at & (self.bytes() - 1);
        let first = bytes.len().min((self.bytes() - at) as usize);
        let (first, rest) = bytes.split_at_mut(first);
        self.control.area.read(self.data + at, first);
        self.control.area.read(self.data, rest);
    }
}

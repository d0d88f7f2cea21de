//! Byte layouts of the datagrams. All integers little-endian.
//!
//! Data (kind 4), 48 bytes before the payload:
//! ```text
//!  0      1      2       4          12        20        24      26     32     48
//! | 0xC9 | kind | count | assoc    | seq     | total   | index | zero | tag  | payload ...
//!   u8     u8     u16     u64        u64       u32       u16     6 B    16 B
//! ```
//! - `assoc`: association id, derived together with its keys.
//! - `seq`: own to every datagram of one direction of an association, from 0, never repeated.
//! - `count`: datagrams in the message; 0 is an empty control datagram (only proves that the keys
//!   stand).
//! - `index`: which of them; the fragments of a message have consecutive sequence numbers, so
//!   `seq - index` names the message.
//! - `total`: length of the whole message in bytes.
//! - `tag`: AES-256-GCM tag, nonce = 4 zero bytes and `seq` as u64 big-endian. Mode
//!   `Authenticated`: associated data = bytes 0..32 and payload, no plaintext. `Encrypted`:
//!   associated data = bytes 0..32, payload is ciphertext. `Off`: zero, not checked.
//!
//! Unknown (kind 6), 12 bytes, unauthenticated: `| 0xC9 | 6 | zero u16 | assoc u64 |`.
//! The handshake's datagrams are drawn in [`crate::auth`].

/// First byte of every datagram: protocol and version.
pub const MAGIC: u8 = 0xC9;
/// Bytes before a data datagram's payload.
pub const DATA_BYTES: usize = 48;
/// Of these, the bytes under the tag.
pub const COVERED_BYTES: usize = 32;
/// Length of an unknown-association notice.
pub const UNKNOWN_BYTES: usize = 12;

// The answer to a data datagram of an unknown association is smaller than what it answers.
const _: () = assert!(UNKNOWN_BYTES < DATA_BYTES);
// The covered header is whole GHASH blocks, so an aligned payload is hashed in place.
const _: () = assert!(COVERED_BYTES.is_multiple_of(16) && COVERED_BYTES + 16 == DATA_BYTES);

/// Second byte of every datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// First handshake datagram, from the initiator.
    Hello = 1,
    /// Its answer, which leaves no state at the responder.
    Challenge = 2,
    /// The initiator's proof that it received the challenge.
    Confirm = 3,
    /// A message, a fragment of one, or an empty control datagram.
    Data = 4,
    /// "I do not know this association": makes the peer shake hands anew.
    Unknown = 6,
}

impl Kind {
    /// The kind of a datagram, if its first two bytes are ours.
    pub fn of(datagram: &[u8]) -> Option<Kind> {
        match datagram {
            [MAGIC, 1, ..] => Some(Kind::Hello),
            [MAGIC, 2, ..] => Some(Kind::Challenge),
            [MAGIC, 3, ..] => Some(Kind::Confirm),
            [MAGIC, 4, ..] => Some(Kind::Data),
            [MAGIC, 6, ..] => Some(Kind::Unknown),
            _ => None,
        }
    }
}

/// A fixed part of a datagram; the caller has checked that it is inside.
pub(crate) fn field<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}

/// The header of a data datagram, without its tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DataHeader {
    /// Association id.
    pub assoc: u64,
    /// Sequence number.
    pub seq: u64,
    /// Length of the whole message, bytes.
    pub total: u32,
    /// Number of this fragment, from 0.
    pub index: u16,
    /// Number of fragments; 0 = control.
    pub count: u16,
}

impl DataHeader {
    /// The header's bytes, with a zero tag.
    pub fn encode(&self) -> [u8; DATA_BYTES] {
        let mut b = [0; DATA_BYTES];
        b[0] = MAGIC;
        b[1] = Kind::Data as u8;
        b[2..4].copy_from_slice(&self.count.to_le_bytes());
        b[4..12].copy_from_slice(&self.assoc.to_le_bytes());
        b[12..20].copy_from_slice(&self.seq.to_le_bytes());
        b[20..24].copy_from_slice(&self.total.to_le_bytes());
        b[24..26].copy_from_slice(&self.index.to_le_bytes());
        b
    }

    /// Reads the header of a whole datagram and checks that its fields agree with each other and
    /// with the datagram's length. `None`: malformed.
    pub fn parse(datagram: &[u8]) -> Option<DataHeader> {
        DataHeader::parse_first(datagram, datagram.len())
    }

    /// The same of a datagram of `len` bytes in several pieces, of which this is the first.
    pub fn parse_first(datagram: &[u8], len: usize) -> Option<DataHeader> {
        if datagram.len() < DATA_BYTES || Kind::of(datagram) != Some(Kind::Data) {
            return None;
        }
        let header = DataHeader {
            count: u16::from_le_bytes(field(datagram, 2)),
            assoc: u64::from_le_bytes(field(datagram, 4)),
            seq: u64::from_le_bytes(field(datagram, 12)),
            total: u32::from_le_bytes(field(datagram, 20)),
            index: u16::from_le_bytes(field(datagram, 24)),
        };
        let payload = len.checked_sub(DATA_BYTES)?;
        let total = header.total as usize;
        let sane = match header.count {
            0 => header.index == 0 && total == 0 && payload == 0,
            1 => header.index == 0 && total == payload,
            count => {
                header.index < count
                    && u64::from(header.index) <= header.seq
                    && payload > 0
                    && payload < total
                    && usize::from(count) <= total
            }
        };
        (sane && datagram[26..32] == [0; 6]).then_some(header)
    }
}

/// An unknown-association notice.
pub fn encode_unknown(assoc: u64) -> [u8; UNKNOWN_BYTES] {
    let mut b = [0; UNKNOWN_BYTES];
    b[0] = MAGIC;
    b[1] = Kind::Unknown as u8;
    b[4..12].copy_from_slice(&assoc.to_le_bytes());
    b
}

/// The association named by a notice.
pub fn parse_unknown(datagram: &[u8]) -> Option<u64> {
    (datagram.len() == UNKNOWN_BYTES
        && Kind::of(datagram) == Some(Kind::Unknown)
        && datagram[2..4] == [0; 2])
        .then(|| u64::from_le_bytes(field(datagram, 4)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_bytes_parse_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = DataHeader::parse(&bytes);
            let _ = parse_unknown(&bytes);
        }

        #[test]
        fn what_parses_encodes_to_the_same(mut bytes in proptest::collection::vec(any::<u8>(), 48..80), count in 0u16..4, index in 0u16..4, total in 0u32..100) {
            bytes[0] = MAGIC;
            bytes[1] = 4;
            bytes[2..4].copy_from_slice(&count.to_le_bytes());
            bytes[20..24].copy_from_slice(&total.to_le_bytes());
            bytes[24..26].copy_from_slice(&index.to_le_bytes());
            bytes[26..32].fill(0);
            if let Some(h) = DataHeader::parse(&bytes) {
                prop_assert_eq!(&h.encode()[..32], &bytes[..32]);
            }
        }
    }

    #[test]
    fn impossible_headers_are_refused() {
        let whole = DataHeader {
            assoc: 1,
            seq: 5,
            total: 3,
            index: 0,
            count: 1,
        };
        let datagram = |h: DataHeader, payload: &[u8]| [&h.encode()[..], payload].concat();
        assert_eq!(DataHeader::parse(&datagram(whole, b"abc")), Some(whole));
        assert_eq!(DataHeader::parse(&datagram(whole, b"ab")), None);
        assert_eq!(
            DataHeader::parse(&datagram(DataHeader { index: 1, ..whole }, b"abc")),
            None
        );
        assert_eq!(
            DataHeader::parse(&datagram(DataHeader { count: 0, ..whole }, b"")),
            None
        );
        let piece = DataHeader {
            total: 9,
            index: 1,
            count: 2,
            ..whole
        };
        assert_eq!(DataHeader::parse(&datagram(piece, b"abc")), Some(piece));
        assert_eq!(
            DataHeader::parse(&datagram(DataHeader { index: 2, ..piece }, b"abc")),
            None
        );
        assert_eq!(
            DataHeader::parse(&datagram(DataHeader { seq: 0, ..piece }, b"abc")),
            None
        );
        assert_eq!(
            DataHeader::parse(&datagram(DataHeader { total: 3, ..piece }, b"abc")),
            None
        );
        assert_eq!(DataHeader::parse(&datagram(piece, b"")), None);
    }
}

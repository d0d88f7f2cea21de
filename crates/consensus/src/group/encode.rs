//! The bytes of messages: a prefix, and the payloads where they lie in the log.

use cyclone_wire::codec::Write;
use cyclone_wire::envelope;
use cyclone_wire::raftmsg::RaftMessage;

use super::Group;
use crate::message::OutMessage;

/// A message's bytes, scattered: the prefix, then the payloads where they lie in the log.
#[derive(Debug)]
pub struct EncodedMessage<'a> {
    /// Envelope class, length and header.
    pub prefix: Vec<u8>,
    /// The entries' payloads, in order, piece by piece.
    pub payloads: Vec<&'a [u8]>,
}

impl Group {
    /// A message's bytes, ready to be sent piece by piece. Entries that the log has dropped since
    /// are left out.
    pub fn encode<'a>(&'a self, message: &OutMessage) -> EncodedMessage<'a> {
        let (mut prefix, mut payloads) = (Vec::new(), Vec::new());
        self.encode_into(message, &mut prefix, &mut payloads);
        EncodedMessage { prefix, payloads }
    }

    /// The same, into buffers that may hold other messages already.
    pub fn encode_into<'a>(
        &'a self,
        message: &OutMessage,
        prefix: &mut Vec<u8>,
        payloads: &mut Vec<&'a [u8]>,
    ) {
        let log = self.raw.store();
        for (place, entry) in message.header.entries.iter().enumerate() {
            let level = log.flash.as_ref();
            let fetched = || level?.fetched(entry.index, entry.term);
            match log.ring.entry(entry.index) {
                Some(view) if view.term == entry.term => payloads.extend(view.segments()),
                None if let Some(stored) = fetched() => payloads.push(&stored.payload[..]),
                _ => {
                    let mut header = message.header.clone();
                    header.entries.truncate(place);
                    return put_prefix(&header, prefix);
                }
            }
        }
        put_prefix(&message.header, prefix);
    }
}

/// Appends the bytes of a message without its payloads: class, length of header and payloads,
/// header.
fn put_prefix(header: &RaftMessage, out: &mut Vec<u8>) {
    let at = out.len();
    out.reserve(5 + cyclone_wire::raftmsg::HEADER_BYTES + 16 * header.entries.len());
    out.put_u8(envelope::RAFT);
    out.put_u32(0);
    header.encode_header(out);
    let length = (out.len() - at - 5) as u64 + header.payload_bytes();
    // Messages are split far below 4 GiB.
    out[at + 1..at + 5].copy_from_slice(&u32::try_from(length).unwrap_or(u32::MAX).to_le_bytes());
}

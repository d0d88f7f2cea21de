//! Many requests in one message.

use cyclone_wire::envelope;

/// Bytes after which a message takes no further request.
const MESSAGE_BYTES: usize = 8000;
/// Requests per message; a replica makes one log entry of as many.
pub(crate) const MESSAGE_REQUESTS: usize = 32;
/// Bytes that a message adds to a request, at most: envelope, item, session tag.
pub(crate) const OVERHEAD_BYTES: usize = 64;
/// Message buffers kept for reuse, and their largest size.
const SPARE: usize = 64;
const SPARE_BYTES: usize = 64 << 10;

/// Buffers of messages sent, for new ones.
#[derive(Default)]
pub(crate) struct Buffers(Vec<Vec<u8>>);

impl Buffers {
    pub(crate) fn recycle(&mut self, mut message: Vec<u8>) {
        if self.0.len() < SPARE && message.capacity() <= SPARE_BYTES {
            message.clear();
            self.0.push(message);
        }
    }
}

/// A message being filled.
pub(crate) struct Pack {
    pub(crate) message: Vec<u8>,
    count: usize,
    most: usize,
}

impl Pack {
    /// `most`: requests per message.
    pub(crate) fn new(most: usize) -> Pack {
        Pack {
            message: Vec::new(),
            count: 0,
            most,
        }
    }

    /// Makes sure that a request with a body of so many bytes can be appended, and counts it.
    pub(crate) fn make_room(
        &mut self,
        node: u64,
        body_bytes: usize,
        buffers: &mut Buffers,
        out: &mut Vec<(u64, Vec<u8>)>,
    ) {
        let bytes = self.message.len() + body_bytes + OVERHEAD_BYTES;
        if self.count > 0 && (self.count >= self.most || bytes > MESSAGE_BYTES) {
            out.push((node, std::mem::take(&mut self.message)));
            self.count = 0;
        }
        if self.count == 0 {
            self.message = buffers.0.pop().unwrap_or_default();
            self.message.push(envelope::CLIENT_REQUEST);
        }
        self.count += 1;
    }

    /// The last message.
    pub(crate) fn finish(self, node: u64, out: &mut Vec<(u64, Vec<u8>)>) {
        if self.count > 0 {
            out.push((node, self.message));
        }
    }
}

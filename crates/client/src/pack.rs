//! Many requests in one message.

use cyclone_packet::door::port_of;
use cyclone_wire::envelope;

/// Bytes after which a message takes no further request.
const MESSAGE_BYTES: usize = 8000;
/// Requests per message; a replica makes one log entry of as many.
pub(crate) const MESSAGE_REQUESTS: usize = 32;
/// Bytes that a message adds to a request, at most: envelope, item, session tag.
pub(crate) const OVERHEAD_BYTES: usize = 64;
/// Message buffers kept for reuse, and their largest size; of small ones, a burst's of single
/// requests.
const SPARE: usize = 64;
const SPARE_BYTES: usize = 64 << 10;
const SMALL_SPARE: usize = 1024;
const SMALL_BYTES: usize = 512;
/// What a new buffer has room for.
const FIRST_BYTES: usize = 256;

/// Buffers of messages sent, for new ones.
#[derive(Default)]
pub(crate) struct Buffers(Vec<Vec<u8>>);

impl Buffers {
    pub(crate) fn recycle(&mut self, mut message: Vec<u8>) {
        let (kept, bytes) = (self.0.len(), message.capacity());
        if (kept < SPARE && bytes <= SPARE_BYTES) || (kept < SMALL_SPARE && bytes <= SMALL_BYTES) {
            message.clear();
            self.0.push(message);
        }
    }
}

/// A message being filled.
pub(crate) struct Pack {
    /// Where it goes.
    to: u64,
    pub(crate) message: Vec<u8>,
    count: usize,
    most: usize,
}

/// Messages being filled, one for each port of a node.
pub(crate) struct Packs(Vec<Pack>);

impl Packs {
    /// For a node's own port and so many of its logs. `most`: requests per message.
    pub(crate) fn new(node: u64, log_ports: u16, most: usize) -> Packs {
        let pack = |door| Pack::new(port_of(node, door), most);
        Packs((0..=log_ports).map(pack).collect())
    }

    /// The one for a port.
    pub(crate) fn at(&mut self, door: u16) -> &mut Pack {
        let last = self.0.len() - 1;
        &mut self.0[usize::from(door).min(last)]
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.iter().all(|pack| pack.count == 0)
    }

    /// The last messages.
    pub(crate) fn finish(self, out: &mut Vec<(u64, Vec<u8>)>) {
        self.0.into_iter().for_each(|pack| pack.finish(out));
    }
}

impl Pack {
    fn new(to: u64, most: usize) -> Pack {
        Pack {
            to,
            message: Vec::new(),
            count: 0,
            most,
        }
    }

    /// Makes sure that a request with a body of so many bytes can be appended, and counts it.
    pub(crate) fn make_room(
        &mut self,
        body_bytes: usize,
        buffers: &mut Buffers,
        out: &mut Vec<(u64, Vec<u8>)>,
    ) {
        let bytes = self.message.len() + body_bytes + OVERHEAD_BYTES;
        if self.count > 0 && (self.count >= self.most || bytes > MESSAGE_BYTES) {
            out.push((self.to, std::mem::take(&mut self.message)));
            self.count = 0;
        }
        if self.count == 0 {
            let spare = buffers.0.pop();
            self.message = spare.unwrap_or_else(|| Vec::with_capacity(FIRST_BYTES));
            self.message.push(envelope::CLIENT_REQUEST);
        }
        self.count += 1;
    }

    /// The last message.
    fn finish(self, out: &mut Vec<(u64, Vec<u8>)>) {
        if self.count > 0 {
            out.push((self.to, self.message));
        }
    }
}

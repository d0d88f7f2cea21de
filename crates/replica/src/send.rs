//! What leaves for other replicas: everything that a step of all logs says to one peer shares datagrams, so that one
//! heartbeat datagram carries all logs.

use cyclone_consensus::EncodedMessage;
use cyclone_packet::{Outgoing, Peer};

use crate::node::{Node, NodeError};

/// Messages to one peer that share a datagram, or one that is larger.
struct Shared<'a> {
    to: u64,
    bytes: usize,
    parts: Vec<&'a [u8]>,
}

impl Node {
    /// Sends the persisted messages of this step as one burst.
    //= cyclone §4.2
    pub(crate) fn send(&mut self) -> Result<(), NodeError> {
        if self.outgoing.is_empty() {
            return Ok(());
        }
        let limit = self.port.chunk_bytes();
        let mut encoded: Vec<(u64, EncodedMessage<'_>)> = Vec::with_capacity(self.outgoing.len());
        for (log, message) in &self.outgoing {
            encoded.push((message.to, self.logs[*log].group.encode(message)));
        }
        let mut shared: Vec<Shared<'_>> = Vec::with_capacity(encoded.len());
        for (to, message) in &encoded {
            let payload: usize = message.payloads.iter().map(|part| part.len()).sum();
            let bytes = message.prefix.len() + payload;
            let open = shared
                .iter_mut()
                .rev()
                .find(|shared| shared.to == *to)
                .filter(|shared| shared.bytes + bytes <= limit);
            match open {
                // The class byte stands at the datagram's start already.
                Some(open) => {
                    open.bytes += bytes;
                    open.parts.push(&message.prefix[1..]);
                    open.parts.extend(message.payloads.iter().copied());
                }
                None => {
                    let mut parts: Vec<&[u8]> = Vec::with_capacity(2 + message.payloads.len());
                    parts.push(&message.prefix);
                    parts.extend(message.payloads.iter().copied());
                    let to = *to;
                    shared.push(Shared { to, bytes, parts });
                }
            }
        }
        let burst: Vec<Outgoing<'_>> = shared
            .iter()
            .map(|shared| Outgoing {
                to: Peer::Node(shared.to),
                parts: &shared.parts,
            })
            .collect();
        self.port
            .send(self.now.steady_us, &burst)
            .map_err(NodeError::Port)?;
        drop(burst);
        drop(shared);
        drop(encoded);
        self.outgoing.clear();
        Ok(())
    }
}

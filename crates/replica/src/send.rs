//! What leaves for other replicas: everything that a step says to one peer shares datagrams, so
//! that one heartbeat datagram carries all logs.

use std::io;

use cyclone_consensus::{EarlyAppends, Group, OutMessage};
use cyclone_packet::{Outgoing, Peer, Port};
use smallvec::SmallVec;

use crate::node::{Node, NodeError};

/// Pieces of payloads up to this long are copied behind their message's header: as separate slices
/// they cost the system call and the tag more than the copy does.
const COPIED_BYTES: usize = 256;

/// Messages to one peer that share a datagram, or one that is larger.
struct Shared<'a> {
    to: u64,
    bytes: usize,
    /// Headers, and what is copied behind them.
    copied: Vec<u8>,
    /// The other pieces, where they lie in the log, each with how much of `copied` comes before it.
    borrowed: Vec<(usize, &'a [u8])>,
}

impl<'a> Shared<'a> {
    fn new(to: u64) -> Shared<'a> {
        Shared {
            to,
            bytes: 0,
            copied: Vec::new(),
            borrowed: Vec::new(),
        }
    }

    fn add(&mut self, prefix: &mut Vec<u8>, payloads: &[&'a [u8]], bytes: usize) {
        match self.copied.is_empty() {
            true => std::mem::swap(&mut self.copied, prefix),
            // The class byte stands at the datagram's start already.
            false => self.copied.extend_from_slice(&prefix[1..]),
        }
        for piece in payloads {
            match piece.len() <= COPIED_BYTES {
                true => self.copied.extend_from_slice(piece),
                false => self.borrowed.push((self.copied.len(), piece)),
            }
        }
        self.bytes += bytes;
    }

    /// How many pieces there are.
    fn count(&self) -> usize {
        2 * self.borrowed.len() + 1
    }

    /// Appends all pieces in their order.
    fn put<'s>(&'s self, parts: &mut SmallVec<[&'s [u8]; 8]>) {
        let mut from = 0;
        for (at, piece) in &self.borrowed {
            parts.extend([&self.copied[from..*at], piece]);
            from = *at;
        }
        parts.push(&self.copied[from..]);
    }
}

/// Drops what a later message says as well: of several acknowledgements to one peer only the last
/// is kept.
pub(crate) fn drop_superseded(messages: &mut Vec<OutMessage>) {
    let mut kept = 0;
    for at in 0..messages.len() {
        if messages[at].is_superseded_by(&messages[at + 1..]) {
            continue;
        }
        if kept < at {
            messages.swap(kept, at);
        }
        kept += 1;
    }
    messages.truncate(kept);
}

/// Sends messages as one burst: each with the number of the port it goes to, and the group it is
/// of.
//= cyclone §4.2
pub(crate) fn burst<'a>(
    port: &mut Port,
    now_us: u64,
    messages: impl Iterator<Item = (u64, &'a Group, &'a OutMessage)>,
) -> io::Result<()> {
    let limit = port.chunk_bytes();
    let mut shared: SmallVec<[Shared<'_>; 2]> = SmallVec::new();
    let (mut prefix, mut payloads) = (Vec::new(), Vec::new());
    for (to, group, message) in messages {
        prefix.clear();
        payloads.clear();
        // With what is copied behind it, nearly always.
        prefix.reserve(2 * COPIED_BYTES);
        group.encode_into(message, &mut prefix, &mut payloads);
        let bytes = prefix.len() + payloads.iter().map(|piece| piece.len()).sum::<usize>();
        let last = shared.iter().rposition(|shared| shared.to == to);
        let open = last.filter(|at| shared[*at].bytes + bytes <= limit);
        let open = open.unwrap_or_else(|| {
            shared.push(Shared::new(to));
            shared.len() - 1
        });
        shared[open].add(&mut prefix, &payloads, bytes);
    }
    let mut parts: SmallVec<[&[u8]; 8]> = SmallVec::new();
    shared.iter().for_each(|one| one.put(&mut parts));
    let mut rest = &parts[..];
    let take = |shared: &Shared<'_>| {
        let (parts, behind) = rest.split_at(shared.count());
        rest = behind;
        Outgoing {
            to: Peer::Node(shared.to),
            parts,
        }
    };
    let burst: SmallVec<[Outgoing<'_>; 2]> = shared.iter().map(take).collect();
    port.send(now_us, &burst)?;
    Ok(())
}

/// Sends what leaders say before their own copies are durable.
pub(crate) fn ahead<'a>(
    port: &mut Port,
    now_us: u64,
    ahead: &'a [EarlyAppends<'a>],
) -> io::Result<()> {
    let messages = |of: &'a EarlyAppends<'a>| {
        let messages = of.messages.iter();
        messages.map(|message| (message.to, of.group, message))
    };
    burst(port, now_us, ahead.iter().flat_map(messages))
}

impl Node {
    /// Sends the persisted messages of this step, and those that the logs' own loops could not.
    pub(crate) fn send(&mut self) -> Result<(), NodeError> {
        let now_us = self.now.steady_us;
        for (to, bytes) in self.loaned_logs.forwarded.drain(..) {
            let (to, parts) = (Peer::Node(to), [&bytes[..]]);
            let one = Outgoing { to, parts: &parts };
            self.port.send(now_us, &[one]).map_err(NodeError::Port)?;
        }
        if self.outgoing.is_empty() {
            return Ok(());
        }
        let logs = &self.logs;
        let messages = self.outgoing.iter().map(|message| {
            let group = &logs[usize::from(message.header.log)].group;
            (message.to, group, message)
        });
        burst(&mut self.port, now_us, messages).map_err(NodeError::Port)?;
        self.outgoing.clear();
        Ok(())
    }
}

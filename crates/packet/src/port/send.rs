//! The sending half: messages to fragments to one burst.

use smallvec::{SmallVec, smallvec};

use super::*;

/// More slices than this in one datagram are copied together: the kernel takes 1024.
const MAX_SLICES: usize = 256;
/// After this many datagrams on one association fresh keys are made: with 64 KiB datagrams, 2^48
/// AES blocks.
const REKEY_AFTER: u64 = 1 << 36;

/// A message, or what is left of one.
#[derive(Clone, Copy)]
pub(super) struct Piece<'a> {
    pub(super) assoc: u64,
    /// Its bytes, from those of the first datagram to go on.
    pub(super) parts: &'a [&'a [u8]],
    /// Bytes of the whole message.
    pub(super) total: usize,
    /// The sequence number of the message's first datagram, if one has been sealed.
    pub(super) base: Option<u64>,
    /// The first datagram to go, and how many at most.
    pub(super) first: usize,
    pub(super) most: usize,
}

impl<'a> Piece<'a> {
    pub(super) fn whole(assoc: u64, parts: &'a [&'a [u8]], total: usize) -> Piece<'a> {
        Piece {
            assoc,
            parts,
            total,
            base: None,
            first: 0,
            most: usize::MAX,
        }
    }
}

/// What is left of a piece after a burst: the first datagram that did not go.
#[derive(Clone, Copy)]
pub(super) struct UnsentPiece {
    pub(super) piece: usize,
    pub(super) first: usize,
}

/// One data datagram about to be sent.
struct Plan {
    to: SocketAddr,
    /// Its slices in the list of all slices; the first is a place for the header.
    slices: std::ops::Range<usize>,
    header: usize,
    /// Where its payload is in the scratch buffer, if it was copied; then its second slice is a
    /// place for it.
    copied: Option<std::ops::Range<usize>>,
    payload_bytes: usize,
    /// The message's place among those of the burst, and the datagram's within it; none of a
    /// control datagram.
    of: Option<(usize, usize)>,
    /// The last datagram of its message.
    last: bool,
}

/// A burst's slices. Of one to each follower they need no heap memory.
type Slices<'a> = SmallVec<[&'a [u8]; 16]>;

/// What became of a burst.
pub(super) struct Burst {
    /// Messages whose last datagram went out.
    pub(super) sent: usize,
    /// The sequence number of each message's first datagram.
    pub(super) bases: SmallVec<[Option<u64>; 4]>,
    /// Of those that found their queue full.
    pub(super) left: Vec<UnsentPiece>,
}

/// Buffers of a send call, kept for the next.
#[derive(Default)]
pub(super) struct Outbox {
    headers: Vec<[u8; DATA_BYTES]>,
    scratch: Vec<u8>,
    plans: Vec<Plan>,
}

impl Port {
    /// Sends messages, all in one burst. A message to a node without an association waits in a
    /// bounded queue for the handshake that it starts; what finds the driver's queue full waits in
    /// another, and goes with one of the next calls of [`Port::poll`]. Returns how many were sent
    /// or queued; the others are counted in [`PortStats`] and gone. Even those sent may be lost on
    /// the way.
    ///
    /// # Errors
    /// The driver is unusable.
    pub fn send(&mut self, now_us: u64, messages: &[Outgoing<'_>]) -> io::Result<usize> {
        let mut routed: SmallVec<[Piece<'_>; 4]> = SmallVec::with_capacity(messages.len());
        let mut queued = 0;
        for message in messages {
            let len: usize = message.parts.iter().map(|p| p.len()).sum();
            if len > self.max_message {
                self.stats.too_large += 1;
                continue;
            }
            match message.to {
                Peer::Client(id) if self.is_connected(message.to) => {
                    routed.push(Piece::whole(id, message.parts, len));
                }
                Peer::Client(_) => self.stats.no_association += 1,
                Peer::Node(id) => match self.nodes.get_mut(&id) {
                    None => self.stats.no_association += 1,
                    Some(node) => match node.current {
                        Some(assoc) => routed.push(Piece::whole(assoc, message.parts, len)),
                        None => {
                            let full = node.queue.len() >= self.queue_messages
                                || (!node.queue.is_empty()
                                    && node.queue_bytes + len > self.queue_bytes);
                            if full {
                                self.stats.queue_dropped += 1;
                            } else {
                                node.queue.push_back(message.parts.concat());
                                node.queue_bytes += len;
                                self.stats.queued += 1;
                                queued += 1;
                            }
                            self.start_hello(now_us, id);
                        }
                    },
                },
            }
        }
        let sent = self.transmit(now_us, &routed)?;
        Ok(sent + queued)
    }

    /// Sends what handshakes left to send, and the queues of nodes whose association stands now.
    pub(super) fn flush_ready(&mut self, now_us: u64) -> io::Result<()> {
        let mut queues: Vec<(u64, VecDeque<Vec<u8>>)> = Vec::new();
        for id in std::mem::take(&mut self.ready) {
            if let Some(node) = self.nodes.get_mut(&id)
                && let Some(assoc) = node.current
            {
                node.queue_bytes = 0;
                queues.push((assoc, std::mem::take(&mut node.queue)));
            }
        }
        let slices: Vec<(u64, [&[u8]; 1])> = queues
            .iter()
            .flat_map(|(assoc, queue)| queue.iter().map(|m| (*assoc, [m.as_slice()])))
            .collect();
        let routed: Vec<Piece<'_>> = slices
            .iter()
            .map(|(id, m)| Piece::whole(*id, m, m[0].len()))
            .collect();
        self.transmit(now_us, &routed).map(|_| ())
    }

    /// Handshake datagrams, then the messages, but for those that have to wait. Returns how many
    /// messages went out whole or wait.
    fn transmit(&mut self, now_us: u64, messages: &[Piece<'_>]) -> io::Result<usize> {
        if messages.is_empty() && self.control.is_empty() && self.greet.is_empty() {
            return Ok(0);
        }
        if self.backlog.is_empty() {
            return self.transmit_now(now_us, messages);
        }
        let (behind, ahead): (Vec<Piece<'_>>, Vec<Piece<'_>>) = messages
            .iter()
            .copied()
            .partition(|piece| self.must_queue_behind(piece));
        let mut done = self.transmit_now(now_us, &ahead)?;
        for piece in &behind {
            done += usize::from(self.defer(now_us, piece, None, 0));
        }
        Ok(done)
    }

    fn transmit_now(&mut self, now_us: u64, messages: &[Piece<'_>]) -> io::Result<usize> {
        let burst = self.burst(now_us, messages)?;
        let mut done = burst.sent;
        for UnsentPiece { piece, first } in burst.left {
            let kept = self.defer(now_us, &messages[piece], burst.bases[piece], first);
            done += usize::from(kept);
        }
        Ok(done)
    }

    /// One burst: handshake datagrams first, then the messages, as far as their queues take them.
    pub(super) fn burst(&mut self, now_us: u64, messages: &[Piece<'_>]) -> io::Result<Burst> {
        let control = std::mem::take(&mut self.control);
        let mut outbox = std::mem::take(&mut self.outbox);
        outbox.headers.clear();
        outbox.scratch.clear();
        outbox.plans.clear();
        let mut slices: Slices<'_> = SmallVec::with_capacity(4 * messages.len() + control.len());
        for id in std::mem::take(&mut self.greet) {
            if let Some(assoc) = self.assocs.get_mut(&id) {
                seal(assoc, id, self.security, None, &mut outbox, &mut slices);
            }
        }
        let mut bases = smallvec![None; messages.len()];
        for (at, piece) in messages.iter().enumerate() {
            let id = piece.assoc;
            let Some(assoc) = self.assocs.get_mut(&id) else {
                self.stats.no_association += 1;
                continue;
            };
            let message = Some((at, piece));
            let (base, copied) = seal(assoc, id, self.security, message, &mut outbox, &mut slices);
            bases[at] = Some(base);
            self.stats.copied_crypt_bytes += copied as u64;
            if assoc.next_seq >= REKEY_AFTER
                && let Peer::Node(node) = assoc.peer
            {
                self.start_hello(now_us, node);
            }
        }
        let Outbox {
            headers,
            scratch,
            plans,
        } = &outbox;
        for plan in plans {
            slices[plan.slices.start] = &headers[plan.header];
            if let Some(range) = &plan.copied {
                slices[plan.slices.start + 1] = &scratch[range.clone()];
            }
        }
        let first_control = slices.len();
        slices.extend(control.iter().map(|c| &c.bytes[..c.len]));
        let mut datagrams: SmallVec<[Datagram<'_>; 4]> =
            SmallVec::with_capacity(control.len() + plans.len());
        for (i, c) in control.iter().enumerate() {
            let at = first_control + i;
            datagrams.push(Datagram {
                to: c.to,
                parts: &slices[at..=at],
            });
        }
        for plan in plans {
            datagrams.push(Datagram {
                to: plan.to,
                parts: &slices[plan.slices.clone()],
            });
        }
        let taken = self.driver.send(&datagrams);
        let mut burst = Burst {
            sent: 0,
            bases,
            left: Vec::new(),
        };
        if let Ok(taken) = taken {
            // Positions in ascending order; of one message the last ones.
            let skipped = self.driver.skipped();
            for (at, plan) in plans.iter().enumerate() {
                let position = control.len() + at;
                if position < taken && skipped.binary_search(&position).is_err() {
                    self.stats.datagrams_sent += 1;
                    self.stats.bytes_sent += plan.payload_bytes as u64;
                    burst.sent += usize::from(plan.last);
                    continue;
                }
                match plan.of {
                    None => self.stats.send_dropped += 1,
                    Some((piece, _)) if burst.left.last().is_some_and(|it| it.piece == piece) => {}
                    Some((piece, first)) => burst.left.push(UnsentPiece { piece, first }),
                }
            }
            self.stats.messages_sent += burst.sent as u64;
        }
        drop(datagrams);
        drop(slices);
        self.outbox = outbox;
        self.note_unsent(now_us);
        taken.map(|_| burst)
    }
}

/// Cuts a message, or what is left of one, into datagrams and makes their headers and tags; `None`
/// is an empty control datagram. Returns the sequence number of the message's first datagram, and
/// the payload bytes copied.
fn seal<'a>(
    assoc: &mut Assoc,
    id: u64,
    security: Security,
    message: Option<(usize, &Piece<'a>)>,
    outbox: &mut Outbox,
    slices: &mut Slices<'a>,
) -> (u64, usize) {
    let empty = Piece::whole(id, &[], 0);
    let (place, piece) = message.map_or((None, &empty), |(at, piece)| (Some(at), piece));
    let (parts, total) = (piece.parts, piece.total);
    let count = place.map_or(0, |_| datagrams(total, assoc.chunk));
    // All of a message's numbers, whenever its datagrams go.
    let base = piece.base.unwrap_or_else(|| {
        let next = assoc.next_seq;
        assoc.next_seq += count.max(1) as u64;
        next
    });
    let (mut part, mut at) = (0, 0);
    let mut copied_bytes = 0;
    let end = piece.first.saturating_add(piece.most).min(count.max(1));
    for index in piece.first..end {
        let first = slices.len();
        // The places of the header and, perhaps, of a copy of the payload.
        slices.push(&[]);
        let payload_bytes = (total - index * assoc.chunk).min(assoc.chunk);
        let mut left = payload_bytes;
        while left > 0 {
            let rest = &parts[part][at..];
            let take = rest.len().min(left);
            if take > 0 {
                slices.push(&rest[..take]);
            }
            left -= take;
            at += take;
            if take == rest.len() {
                (part, at) = (part + 1, 0);
            }
        }
        let header = DataHeader {
            assoc: id,
            seq: base + index as u64,
            // Bounded by the largest message, which is bounded by what `count` can express.
            total: total as u32,
            index: index as u16,
            count: count as u16,
        };
        let mut bytes = header.encode();
        let nonce = nonce_of(header.seq);
        let payload = &slices[first + 1..];
        let mut copied = None;
        if payload_bytes > 0 && (security == Security::Encrypted || payload.len() > MAX_SLICES) {
            let start = outbox.scratch.len();
            for slice in payload {
                outbox.scratch.extend_from_slice(slice);
            }
            copied = Some(start..outbox.scratch.len());
            copied_bytes += payload_bytes;
        }
        let covered = &bytes[..COVERED_BYTES];
        let tag = match security {
            Security::Off => [0; 16],
            Security::Authenticated => {
                let scattered = payload.iter().copied();
                assoc
                    .send
                    .tag(&nonce, std::iter::once(covered).chain(scattered), &[])
            }
            Security::Encrypted => {
                let text = &mut outbox.scratch[copied.clone().unwrap_or(0..0)];
                assoc.send.crypt(&nonce, text);
                assoc.send.tag(&nonce, [covered], text)
            }
        };
        bytes[COVERED_BYTES..].copy_from_slice(&tag);
        if copied.is_some() {
            slices.truncate(first + 1);
            slices.push(&[]);
        }
        outbox.plans.push(Plan {
            to: assoc.address,
            slices: first..slices.len(),
            header: outbox.headers.len(),
            copied,
            payload_bytes,
            of: place.map(|place| (place, index)),
            last: count > 0 && index + 1 == count,
        });
        outbox.headers.push(bytes);
    }
    (base, copied_bytes)
}

/// Datagrams of a message: of one that is empty, one.
pub(super) fn datagrams(bytes: usize, chunk: usize) -> usize {
    bytes.div_ceil(chunk).max(1)
}

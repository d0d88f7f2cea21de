//! What one driver sends by one port: packets in the making, of copies and of what they take along
//! from where it lies, and those that wait to be handed to a queue.

use cyclone_pmem::pool::Frame;

use super::card::Card;
use super::error::DpdkError;
use super::ffi::{self, BURST, RawOutbox};
use super::frames::{Frames, as_token};
use super::tx_backoff::TxBackoff;
use crate::headers::Template;

/// Parts shorter than this are copied behind the headers: their own descriptor costs more.
const LEND_BYTES: usize = 256;

/// Packets that wait to be handed to one queue.
pub(super) struct Outbox {
    pub(super) raw: *mut RawOutbox,
    /// How many are ready.
    ready: u64,
}

// SAFETY: the memory is used through `&mut` of its owner only.
unsafe impl Send for Outbox {}

impl Drop for Outbox {
    fn drop(&mut self) {
        // SAFETY: made by the shim, destroyed once.
        unsafe { ffi::cy_outbox_destroy(self.raw) };
    }
}

/// A driver's way to one port.
pub(super) struct Outlet {
    outboxes: Vec<Outbox>,
    /// Its first queue to send by, of those counted on over all drivers.
    first: usize,
    /// Pieces that a packet may be sent in.
    most_pieces: usize,
}

impl Outlet {
    /// The way of the driver with this number.
    ///
    /// # Errors
    /// No memory.
    pub(super) fn new(card: &Card, driver: u16) -> Result<Outlet, DpdkError> {
        let mut outboxes = Vec::new();
        for _ in 0..card.queues() {
            // SAFETY: nothing is asked of the caller.
            let raw = unsafe { ffi::cy_outbox_create() };
            if raw.is_null() {
                return Err(DpdkError::Memory("no memory".to_owned()));
            }
            outboxes.push(Outbox { raw, ready: 0 });
        }
        Ok(Outlet {
            first: usize::from(driver) * outboxes.len(),
            outboxes,
            most_pieces: card.most_pieces,
        })
    }

    /// How many queues it has.
    pub(super) fn queues(&self) -> u16 {
        self.outboxes.len() as u16
    }

    fn raw(&mut self, queue: u16) -> *mut RawOutbox {
        self.outboxes[usize::from(queue)].raw
    }

    /// Puts a datagram together: headers and what lies elsewhere in buffers of DPDK's, what lies in
    /// the pool from there. Answers how many bytes of it were copied, and how many lent; `None`: no
    /// buffer is free.
    pub(super) fn put(
        &mut self,
        queue: u16,
        frames: &Frames,
        template: &Template,
        parts: &[&[u8]],
    ) -> Option<(u64, u64)> {
        let (mut copied_bytes, mut lent_bytes) = (0, 0);
        let (mut at, mut pieces) = (0, 0);
        let mut with_headers = template.len();
        let mut good = true;
        while good && (at < parts.len() || with_headers > 0) {
            let begin = at;
            let mut lent = None;
            while at < parts.len() && lent.is_none() {
                // Its own piece, what is to be copied before it, and all that follows it.
                let before = usize::from(with_headers > 0 || at > begin);
                let after = usize::from(at + 1 < parts.len());
                let room = pieces + before + 1 + after <= self.most_pieces;
                if room && parts[at].len() >= LEND_BYTES {
                    lent = frames.share(parts[at]);
                }
                at += usize::from(lent.is_none());
            }
            let copied: usize = parts[begin..at].iter().map(|part| part.len()).sum();
            if copied + with_headers > 0 {
                match self.copy(queue, frames, copied + with_headers) {
                    Some(place) => {
                        if with_headers > 0 {
                            template.write(parts, place);
                        }
                        let mut to = with_headers;
                        for part in &parts[begin..at] {
                            place[to..to + part.len()].copy_from_slice(part);
                            to += part.len();
                        }
                        copied_bytes += copied as u64;
                        pieces += 1;
                        with_headers = 0;
                    }
                    None => good = false,
                }
            }
            if let Some(frame) = lent.filter(|_| good) {
                lent_bytes += frame.len() as u64;
                good = self.lend(queue, frames, frame);
                pieces += 1;
                at += 1;
            }
        }
        if !good {
            self.discard(queue);
        }
        good.then_some((copied_bytes, lent_bytes))
    }

    /// A piece of `len` bytes for the packet in the making, in memory of DPDK's own, to be filled
    /// by the caller.
    pub(super) fn copy(&mut self, queue: u16, frames: &Frames, len: usize) -> Option<&mut [u8]> {
        let outbox = self.raw(queue);
        // SAFETY: both are alive.
        let place = unsafe { ffi::cy_copy(frames.raw(), outbox, len as u16) };
        if place.is_null() {
            return None;
        }
        // SAFETY: the shim has reserved so many bytes in a fresh buffer, which no other code reads
        // before the packet is sent; that needs `&mut self` again. They are bytes of memory that
        // was mapped with zeros or written since.
        Some(unsafe { std::slice::from_raw_parts_mut(place.cast(), len) })
    }

    /// A frame as the next piece of the packet in the making, where it lies. False: no descriptor
    /// is free.
    pub(super) fn lend(&mut self, queue: u16, frames: &Frames, frame: Frame) -> bool {
        let outbox = self.raw(queue);
        let (address, len) = (frame.as_ptr().cast_mut(), frame.len());
        let token = as_token(frame);
        // SAFETY: the bytes are a reader's, and stay so until the token comes back; cards read them
        // only.
        let lent = unsafe {
            ffi::cy_lend(
                frames.raw(),
                outbox,
                address.cast(),
                len as u16,
                token.as_ptr().cast(),
                size_of::<Frame>(),
            )
        };
        if !lent {
            // SAFETY: the shim has not taken it.
            drop(unsafe { token.assume_init() });
        }
        lent
    }

    /// The packet in the making is given up.
    pub(super) fn discard(&mut self, queue: u16) {
        // SAFETY: alive.
        unsafe { ffi::cy_discard(self.raw(queue)) };
    }

    /// The packet in the making is ready. True: the queue's burst is full, and has to be sent
    /// before the next one.
    pub(super) fn ready(&mut self, queue: u16) -> bool {
        let outbox = &mut self.outboxes[usize::from(queue)];
        // SAFETY: alive, and not full: the caller sends when told so.
        outbox.ready = unsafe { ffi::cy_ready(outbox.raw) }.into();
        outbox.ready >= BURST as u64
    }

    /// Sends what is ready by a queue. Answers how many packets the card took, how many were given
    /// up because it is full, and how many calls it took.
    pub(super) fn send(
        &mut self,
        card: &Card,
        queue: u16,
        patience: &mut TxBackoff,
        now_us: impl FnMut() -> u64,
    ) -> (u64, u64, u64) {
        let turn = self.first + usize::from(queue);
        let outbox = &mut self.outboxes[usize::from(queue)];
        let ready = std::mem::take(&mut outbox.ready);
        if ready == 0 {
            return (0, 0, 0);
        }
        let (sent, calls) = patience.send_with_retry(ready, card.empties_soon(), now_us, || {
            card.send(turn, outbox)
        });
        // SAFETY: alive.
        let dropped = unsafe { ffi::cy_drop(outbox.raw) };
        (sent, dropped.into(), calls)
    }

    /// Takes back the buffers of packets that have left by its queues.
    pub(super) fn reclaim(&self, card: &Card) {
        (0..self.outboxes.len()).for_each(|queue| card.reclaim(self.first + queue));
    }
}

//! A packet to send, in the making: headers and what is copied in frames of the queue's own,
//! everything else where it lies.

use cyclone_pmem::pool::{Frame, FrameMut};

use super::socket::Descriptor;
use super::umem_frames::{FrameState, UmemFrames};
use crate::headers::Template;

/// A packet in the making.
pub(super) struct Packet<'a> {
    umem_frames: &'a mut UmemFrames,
    descriptors: &'a mut Vec<Descriptor>,
    chunk_bytes: usize,
    /// Own frame that is being filled: it, where its open piece begins, and where it ends;
    /// descriptors made of it.
    open: Option<(FrameMut, usize, usize, u32)>,
}

impl<'a> Packet<'a> {
    /// Nothing of it is there yet. What it is made of goes to `descriptors`.
    pub(super) fn new(
        umem_frames: &'a mut UmemFrames,
        descriptors: &'a mut Vec<Descriptor>,
        chunk_bytes: usize,
    ) -> Packet<'a> {
        Packet {
            umem_frames,
            descriptors,
            chunk_bytes,
            open: None,
        }
    }

    /// Its descriptors so far.
    pub(super) fn pieces(&self) -> usize {
        self.descriptors.len()
    }

    /// A fresh own frame. The caller has seen to it that there are enough.
    fn fresh(&mut self) -> (FrameMut, usize, usize, u32) {
        match self.umem_frames.own.pop() {
            Some(frame) => (frame, 0, 0, 0),
            None => unreachable!("counted before the packet was begun"),
        }
    }

    /// Begins with the headers.
    pub(super) fn headers(&mut self, template: &Template, parts: &[&[u8]]) {
        let mut open = self.fresh();
        template.write(parts, &mut open.0[..]);
        open.2 = template.len();
        self.open = Some(open);
    }

    /// Adds bytes behind what it has in frames of the queue's own.
    pub(super) fn copy(&mut self, mut part: &[u8]) {
        while !part.is_empty() {
            let mut open = match self.open.take() {
                Some(open) => open,
                None => self.fresh(),
            };
            let room = self.chunk_bytes - open.2;
            if room == 0 {
                self.open = Some(open);
                self.close();
                continue;
            }
            let take = room.min(part.len());
            open.0[open.2..open.2 + take].copy_from_slice(&part[..take]);
            open.2 += take;
            part = &part[take..];
            self.open = Some(open);
        }
    }

    /// Ends the open piece with a descriptor; its frame may take another piece.
    fn cut(&mut self) {
        if let Some((frame, start, end, count)) = &mut self.open
            && end > start
        {
            let at = u64::from(frame.number()) * self.umem_frames.frame_bytes + *start as u64;
            self.descriptors.push(Descriptor {
                address: at,
                len: (*end - *start) as u32,
                options: 0,
            });
            *start = *end;
            *count += 1;
        }
    }

    /// Ends the open frame.
    pub(super) fn close(&mut self) {
        self.cut();
        if let Some((frame, _, _, count)) = self.open.take() {
            if count == 0 {
                self.umem_frames.own.push(frame);
            } else {
                let number = frame.number() as usize;
                self.umem_frames.held[number] = FrameState::Headers(frame, count);
            }
        }
    }

    /// Adds somebody's frame, from where it is.
    pub(super) fn lend(&mut self, frame: Frame) {
        self.cut();
        let number = frame.number() as usize;
        let mut at = number as u64 * self.umem_frames.frame_bytes + u64::from(frame.offset());
        let mut left = frame.len();
        let mut count = 0;
        while left > 0 {
            let take = left.min(self.chunk_bytes);
            self.descriptors.push(Descriptor {
                address: at,
                len: take as u32,
                options: 0,
            });
            at += take as u64;
            left -= take;
            count += 1;
        }
        match &mut self.umem_frames.held[number] {
            FrameState::Lent(_, lent) => *lent += count,
            held => *held = FrameState::Lent(frame, count),
        }
    }
}

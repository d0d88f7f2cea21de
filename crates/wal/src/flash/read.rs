//! Reading an area while nothing else goes on: superblock, whole segments, and what is left of a
//! segment with bad pages.

use std::collections::BTreeMap;
use std::ops::Range;

use cyclone_wire::flash::{FlashSuperblock, FlashSuperblockFault, PAGE_BYTES};

use super::buffer::{Buffer, Buffers};
use super::device::{Action, Completion, DeviceError, FlashDevice, Request};
use super::log::FlashLog;
use super::spec::FlashError;

/// Pages that cannot be read, by place, and why.
pub(crate) type Unreadable = BTreeMap<u64, DeviceError>;

/// Segments read, by place, whose turn has not come.
type Ready = BTreeMap<u64, Result<Buffer, DeviceError>>;

/// Segments read ahead: enough to keep a disk busy, few enough to stay in the processor's cache.
const AHEAD: u64 = 8;
/// Segments that are read page by page when they cannot be read as a whole; with more of them it is
/// not pages that are bad.
const SALVAGED: usize = 8;

/// Names the requests that are waited for.
pub(crate) const WAITED_FOR: u64 = u64::MAX;

/// Reads or writes one piece and waits for it, with no other request in flight.
pub(crate) fn blocking(
    device: &mut dyn FlashDevice,
    action: Action,
    offset: u64,
    buffer: Buffer,
    len: usize,
) -> Result<Buffer, FlashError> {
    let request = Request {
        token: WAITED_FOR,
        action,
        offset,
        buffer,
        len,
    };
    device
        .submit(0, request)
        .map_err(|_| DeviceError::Io(libc::EBUSY))?;
    let mut done: Vec<Completion> = Vec::new();
    loop {
        device.poll(0, &mut done);
        if let Some(completion) = done.pop() {
            completion.result?;
            return Ok(completion.buffer);
        }
        device.wait();
    }
}

pub(crate) fn one_page() -> Result<Buffer, FlashError> {
    let taken = Buffers::new(1, PAGE_BYTES).take();
    // Just made, with one buffer in it.
    taken.ok_or(FlashError::Device(DeviceError::Io(libc::ENOMEM)))
}

/// The area's superblock: either copy. The first one is written last; where it was never begun and
/// the other is torn, the area has not been made yet.
///
/// # Errors
/// [`FlashError::NotFormatted`], [`FlashError::Damaged`], [`FlashError::VersionUnknown`],
/// [`FlashError::Device`].
pub(crate) fn superblock(device: &mut dyn FlashDevice) -> Result<FlashSuperblock, FlashError> {
    let mut fault = None;
    let mut blank = [false; 2];
    for (copy, blank) in blank.iter_mut().enumerate() {
        let at = (copy * PAGE_BYTES) as u64;
        let page = match blocking(device, Action::Read, at, one_page()?, PAGE_BYTES) {
            Ok(page) => page,
            // A file that has just been made has no bytes yet.
            Err(FlashError::Device(DeviceError::Short { .. })) => {
                *blank = true;
                continue;
            }
            Err(error) => {
                fault = Some(error);
                continue;
            }
        };
        match FlashSuperblock::decode(&page[..PAGE_BYTES]) {
            Ok(block) => return Ok(block),
            Err(FlashSuperblockFault::Blank) => *blank = true,
            Err(FlashSuperblockFault::Version(found)) => {
                fault = Some(FlashError::VersionUnknown(found));
            }
            Err(FlashSuperblockFault::Damaged) => fault = Some(FlashError::Damaged),
        }
    }
    match (blank, fault) {
        ([true, true], _) | ([true, false], Some(FlashError::Damaged)) => {
            Err(FlashError::NotFormatted)
        }
        (_, fault) => Err(fault.unwrap_or(FlashError::Damaged)),
    }
}

impl FlashLog {
    /// Reads segments, many at a time, and hands them over in their order. Pages that cannot be
    /// read are handed over as zeros, and answered by place.
    pub(crate) fn read_segments(
        &mut self,
        segments: Range<u64>,
        mut pages: impl FnMut(&[u8]),
    ) -> Result<Unreadable, FlashError> {
        let mut asked = segments.start;
        let mut ready = BTreeMap::new();
        let mut done = Vec::new();
        let mut unreadable = Unreadable::new();
        let mut salvaged = 0;
        for next in segments.clone() {
            let result = loop {
                while asked < segments.end.min(next + AHEAD) && self.ask_segment(asked) {
                    asked += 1;
                }
                if let Some(result) = ready.remove(&next) {
                    break result;
                }
                self.take_segments(&mut done, &mut ready);
            };
            match result {
                Ok(buffer) => pages(&buffer),
                Err(error) => {
                    // One page after the other is read with no other request in flight.
                    while self.device.outstanding() > 0 {
                        self.take_segments(&mut done, &mut ready);
                    }
                    salvaged += 1;
                    if salvaged > SALVAGED {
                        return Err(error.into());
                    }
                    self.salvage(next, &mut unreadable, &mut pages)?;
                }
            }
        }
        Ok(unreadable)
    }

    /// Asks for a segment; `false` if too many requests are in flight.
    fn ask_segment(&mut self, place: u64) -> bool {
        let segment = self.segment_pages();
        let Some(buffer) = self.buffers.take() else {
            return false;
        };
        let request = Request {
            token: place,
            action: Action::Read,
            offset: self.block.page_at(place * segment),
            buffer,
            len: segment as usize * PAGE_BYTES,
        };
        self.device.submit(0, request).is_ok()
    }

    fn take_segments(&mut self, done: &mut Vec<Completion>, ready: &mut Ready) {
        self.device.poll(0, done);
        if done.is_empty() {
            self.device.wait();
        }
        ready.extend(done.drain(..).map(|completion| {
            let buffer = completion.buffer;
            (completion.token, completion.result.map(|()| buffer))
        }));
    }

    /// Reads a segment that did not read as a whole page by page.
    fn salvage(
        &mut self,
        place: u64,
        unreadable: &mut Unreadable,
        pages: &mut impl FnMut(&[u8]),
    ) -> Result<(), FlashError> {
        let segment = self.segment_pages();
        let mut bytes = vec![0; segment as usize * PAGE_BYTES];
        let numbers = place * segment..(place + 1) * segment;
        for (number, into) in numbers.zip(bytes.chunks_exact_mut(PAGE_BYTES)) {
            let at = self.block.page_at(number);
            match blocking(&mut *self.device, Action::Read, at, one_page()?, PAGE_BYTES) {
                Ok(page) => into.copy_from_slice(&page[..PAGE_BYTES]),
                Err(FlashError::Device(error)) => {
                    unreadable.insert(number, error);
                }
                Err(error) => return Err(error),
            }
        }
        pages(&bytes);
        Ok(())
    }
}

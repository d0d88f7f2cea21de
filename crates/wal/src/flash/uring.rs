//! The device on io_uring: direct writes from registered buffers, each durable when it comes back.
#![allow(unsafe_code, reason = "memory is lent to the kernel")]

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::Path;

use io_uring::{IoUring, opcode, squeue, types};
use rustix::event::{EventfdFlags, eventfd};

use super::buffer::Buffers;
use super::device::{Action, Completion, DeviceError, FlashDevice, Request};
use super::threaded::AreaFile;

/// Requests that the ring takes: 32 writes, reads, growth.
const ENTRIES: u32 = 64;

/// See the module's text.
pub struct UringFlash {
    ring: IoUring,
    area: AreaFile,
    bytes: u64,
    event: OwnedFd,
    /// Buffers that the kernel knows.
    registered: Option<Buffers>,
    /// Requests that the kernel works on; their place is their name there.
    in_flight: Vec<Option<Request>>,
    free: Vec<usize>,
    /// Some are in the queue, and have not been submitted to the kernel.
    needs_submit: bool,
}

impl UringFlash {
    /// Opens (or makes) the area's file, which may grow to `bytes`.
    ///
    /// # Errors
    /// When it cannot be opened, another process has it, or the kernel has no io_uring for us.
    pub fn open(path: &Path, bytes: u64) -> io::Result<UringFlash> {
        let ring = IoUring::new(ENTRIES)?;
        let area = AreaFile::open(path, false)?;
        let event = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        ring.submitter().register_eventfd(event.as_raw_fd())?;
        Ok(UringFlash {
            ring,
            area,
            bytes,
            event,
            registered: None,
            in_flight: (0..ENTRIES).map(|_| None).collect(),
            free: (0..ENTRIES as usize).collect(),
            needs_submit: false,
        })
    }

    fn entry(&self, place: usize, request: &mut Request) -> squeue::Entry {
        let fd = types::Fd(self.area.file.as_raw_fd());
        let (offset, len) = (request.offset, request.len as u32);
        let number = request.buffer.number() as u16;
        let known = self.registered.as_ref();
        let known = known.is_some_and(|known| known.owns(&request.buffer));
        let pointer = request.buffer.pointer();
        // Even where no cache loses anything: growth changes what the file system only keeps in its
        // journal, and so does the first write to a hole. Where neither is the case the flag costs
        // nothing.
        let sync = libc::RWF_DSYNC;
        let entry = match (request.action, known) {
            (Action::Read, true) => opcode::ReadFixed::new(fd, pointer, len, number)
                .offset(offset)
                .build(),
            (Action::Read, false) => opcode::Read::new(fd, pointer, len).offset(offset).build(),
            (Action::Write, true) => opcode::WriteFixed::new(fd, pointer, len, number)
                .offset(offset)
                .rw_flags(sync)
                .build(),
            (Action::Write, false) => opcode::Write::new(fd, pointer, len)
                .offset(offset)
                .rw_flags(sync)
                .build(),
        };
        entry.user_data(place as u64)
    }

    fn tell(&mut self) {
        // Interrupted or busy: the queue keeps them, the next call tells again.
        if self.needs_submit && self.ring.submit().is_ok() {
            self.needs_submit = !self.ring.submission().is_empty();
        }
    }
}

impl FlashDevice for UringFlash {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn grown_bytes(&self) -> u64 {
        self.area.len()
    }

    fn reserve(&mut self, bytes: u64) -> Result<(), DeviceError> {
        self.area.reserve(bytes)
    }

    fn register(&mut self, buffers: &Buffers) {
        if self.registered.is_some() {
            return;
        }
        // SAFETY: the buffers' block lives as long as `registered` holds on to it, which is until
        // the ring is gone.
        let registered = unsafe { self.ring.submitter().register_buffers(&buffers.iovecs()) };
        // Limits on locked memory may refuse it: then the buffers are named anew with each request.
        self.registered = registered.is_ok().then(|| buffers.clone());
    }

    fn submit(&mut self, _now_us: u64, mut request: Request) -> Result<(), Request> {
        if request.len > request.buffer.len() {
            return Err(request);
        }
        let Some(place) = self.free.pop() else {
            return Err(request);
        };
        let entry = self.entry(place, &mut request);
        // SAFETY: the buffer is kept in `in_flight`, untouched, until the kernel is done with it;
        // if the device is dropped before, it is leaked. The file stays open as long as the ring.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        if pushed.is_err() {
            self.free.push(place);
            return Err(request);
        }
        self.in_flight[place] = Some(request);
        self.needs_submit = true;
        self.tell();
        Ok(())
    }

    fn poll(&mut self, _now_us: u64, done: &mut Vec<Completion>) {
        self.tell();
        // The usual case is not worth a call to the kernel, in every step of an event loop.
        if self.ring.completion().is_empty() {
            return;
        }
        // Before taking them: what comes in between makes it readable again.
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
        for entry in self.ring.completion() {
            let place = entry.user_data() as usize;
            let request = self.in_flight.get_mut(place).and_then(Option::take);
            let Some(request) = request else { continue };
            self.free.push(place);
            let result = match entry.result() {
                error if error < 0 => Err(DeviceError::from_errno(-error)),
                bytes if bytes as usize == request.len => Ok(()),
                bytes => Err(DeviceError::Short {
                    asked: request.len,
                    done: bytes as usize,
                }),
            };
            done.push(Completion {
                token: request.token,
                action: request.action,
                buffer: request.buffer,
                result,
            });
        }
    }

    fn wait(&mut self) {
        if self.outstanding() > 0 {
            // An interruption is as good as an event: the caller polls either way.
            let _ = self.ring.submit_and_wait(1);
            self.needs_submit = false;
        }
    }

    fn outstanding(&self) -> usize {
        self.in_flight.len() - self.free.len()
    }

    fn descriptor(&self) -> Option<RawFd> {
        Some(self.event.as_raw_fd())
    }

    fn is_in_memory(&self) -> bool {
        self.area.is_in_memory()
    }

    fn describe(&self) -> String {
        match self.registered {
            Some(_) => self.area.describe("io_uring, registered buffers"),
            None => self.area.describe("io_uring"),
        }
    }
}

impl Drop for UringFlash {
    fn drop(&mut self) {
        let mut done = Vec::new();
        self.poll(0, &mut done);
        // What the kernel still works on is leaked rather than waited for: a device that hangs must
        // not hang its owner.
        for request in self.in_flight.drain(..).flatten() {
            std::mem::forget(request);
        }
        if self.free.len() < ENTRIES as usize {
            std::mem::forget(self.registered.take());
        }
    }
}

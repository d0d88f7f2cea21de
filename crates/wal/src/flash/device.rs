//! What a flash log asks of its device. Requests are handed over and come back later; nothing
//! blocks but
//! [`FlashDevice::wait`], which is for starting up.

use std::os::fd::RawFd;

use super::buffer::{Buffer, Buffers};

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Fills the buffer's part from the device.
    Read,
    /// Writes the buffer's part; it is durable when the request comes back.
    Write,
}

/// A piece of work for the device.
#[derive(Debug)]
pub struct Request {
    /// Comes back with the outcome; chosen by the caller.
    pub token: u64,
    /// What to do.
    pub action: Action,
    /// Byte of the area, a multiple of the page.
    pub offset: u64,
    /// The memory; the device holds it until the request comes back.
    pub buffer: Buffer,
    /// Bytes from the buffer's beginning, a multiple of the page.
    pub len: usize,
}

/// Why a request failed. A write that failed may or may not have reached the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// No room left on the device.
    #[error("no space left on the device")]
    NoSpace,
    /// The device says so.
    #[error("the device failed with error {0}")]
    Io(i32),
    /// Fewer bytes than asked for.
    #[error("{done} of {asked} bytes transferred")]
    Short {
        /// Bytes asked for.
        asked: usize,
        /// Bytes transferred.
        done: usize,
    },
}

impl DeviceError {
    /// From an error number of the system.
    pub fn from_errno(errno: i32) -> DeviceError {
        match errno {
            libc::ENOSPC | libc::EDQUOT => DeviceError::NoSpace,
            errno => DeviceError::Io(errno),
        }
    }
}

/// A request that came back.
#[derive(Debug)]
pub struct Completion {
    /// The request's token.
    pub token: u64,
    /// What it was to do.
    pub action: Action,
    /// Its memory.
    pub buffer: Buffer,
    /// How it went.
    pub result: Result<(), DeviceError>,
}

/// An area on a block device or in a file on one. Writes may complete in any order.
pub trait FlashDevice: Send {
    /// Bytes of the area.
    fn bytes(&self) -> u64;

    /// Bytes from the area's beginning that have been written before, so that writing them again
    /// changes no metadata.
    fn grown_bytes(&self) -> u64;

    /// Has so many bytes from the area's beginning set aside, so that no other file can take them.
    /// Nothing is written, and [`FlashDevice::grown_bytes`] stays. A device that cannot do so
    /// leaves it. For starting up only.
    ///
    /// # Errors
    /// When there is no room for them; nothing is taken then.
    fn reserve(&mut self, _bytes: u64) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Names buffers that will be used again and again. A device may make use of it.
    fn register(&mut self, _buffers: &Buffers) {}

    /// Hands a request over. Never blocks.
    ///
    /// # Errors
    /// The request itself when as many are outstanding as the device takes; nothing was done.
    fn submit(&mut self, now_us: u64, request: Request) -> Result<(), Request>;

    /// Takes back what is done. Never blocks.
    fn poll(&mut self, now_us: u64, done: &mut Vec<Completion>);

    /// Blocks until something is done, if anything is outstanding. For starting up only.
    fn wait(&mut self);

    /// Requests that have not come back.
    fn outstanding(&self) -> usize;

    /// Becomes readable, again each time, when something is done, where the device has such a
    /// thing. To be waited for by edges: it may stay readable, and may become so when what was done
    /// has already been polled for.
    fn descriptor(&self) -> Option<RawFd> {
        None
    }

    /// Whether it lies in the machine's memory, and goes with it.
    fn is_in_memory(&self) -> bool {
        false
    }

    /// What it is, for people.
    fn describe(&self) -> String;
}

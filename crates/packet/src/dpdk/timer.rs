//! A descriptor that becomes readable by itself: cards that are polled wake nobody.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// How soon to look again while packets have just come, and otherwise, µs.
const SOON_US: u64 = 50;
const LATER_US: u64 = 500;
/// For how long after a packet the next one is expected soon, µs.
const BUSY_US: u64 = 1_000;

/// The timer; runs only while its owner finds nothing.
pub(super) struct Timer {
    fd: OwnedFd,
    /// When it becomes readable, at the earliest: no system call is worth it before.
    due_us: u64,
    busy_until_us: u64,
}

impl Timer {
    /// # Errors
    /// When the system grants no descriptor.
    pub(super) fn new() -> io::Result<Timer> {
        // SAFETY: a plain system call; a non-negative result is a descriptor that nobody else owns.
        let fd = unsafe {
            let fd = libc::timerfd_create(
                libc::CLOCK_MONOTONIC,
                libc::TFD_NONBLOCK | libc::TFD_CLOEXEC,
            );
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            OwnedFd::from_raw_fd(fd)
        };
        // It runs from the first time on that nothing is there.
        Ok(Timer {
            fd,
            due_us: 0,
            busy_until_us: 0,
        })
    }

    fn arm(&mut self, now_us: u64, after_us: u64) {
        let never = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let time = libc::itimerspec {
            it_interval: never,
            it_value: libc::timespec {
                tv_nsec: 1_000 * after_us as i64,
                ..never
            },
        };
        // SAFETY: the time lives for the call; no old one is asked for.
        let rc =
            unsafe { libc::timerfd_settime(self.fd.as_raw_fd(), 0, &time, std::ptr::null_mut()) };
        self.due_us = if rc == 0 { now_us + after_us } else { 0 };
    }

    /// Packets have come, or left: others will.
    pub(super) fn busy(&mut self, now_us: u64) {
        self.busy_until_us = now_us + BUSY_US;
    }

    /// Nothing was there: whoever waits for the descriptor will look again after a while.
    pub(super) fn idle(&mut self, now_us: u64) {
        let soon = now_us < self.busy_until_us;
        if now_us < self.due_us {
            if soon && self.due_us > now_us + SOON_US {
                self.arm(now_us, SOON_US);
            }
            return;
        }
        let mut count = [0u8; 8];
        // SAFETY: the buffer is ours and as long as said.
        let read =
            unsafe { libc::read(self.fd.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
        // It may be a little late.
        if read > 0 || self.due_us == 0 {
            self.arm(now_us, if soon { SOON_US } else { LATER_US });
        }
    }

    pub(super) fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

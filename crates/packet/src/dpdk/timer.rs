//! A descriptor that a timer makes readable: cards that are polled wake no thread.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// How soon to look again, at the earliest and at the latest, µs.
const MIN_POLL_US: u64 = 50;
const MAX_POLL_US: u64 = 2_000;
/// A look comes after so many parts of the time since the last packet: a packet waits for a quarter
/// of the pause before it.
const PAUSE_DIVISOR: u64 = 4;

/// How soon to look again when the last packet came or left so long ago.
fn poll_after_us(pause_us: u64) -> u64 {
    (pause_us / PAUSE_DIVISOR).clamp(MIN_POLL_US, MAX_POLL_US)
}

/// The timer; runs only while its owner finds nothing.
pub(super) struct Timer {
    fd: OwnedFd,
    /// When it becomes readable, at the earliest: no system call is worth it before.
    due_us: u64,
    /// When a packet last came or left.
    busy_us: u64,
    /// Where little is expected: how soon to look, whatever was there before.
    idle_poll_us: Option<u64>,
}

impl Timer {
    /// # Errors
    /// When the system grants no descriptor.
    pub(super) fn new() -> io::Result<Timer> {
        // SAFETY: a plain system call; a non-negative result is a descriptor that nothing else
        // owns.
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
            busy_us: 0,
            idle_poll_us: None,
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
                tv_sec: (after_us / 1_000_000) as i64,
                tv_nsec: 1_000 * (after_us % 1_000_000) as i64,
            },
        };
        // SAFETY: the time lives for the call; no old one is asked for.
        let rc =
            unsafe { libc::timerfd_settime(self.fd.as_raw_fd(), 0, &time, std::ptr::null_mut()) };
        self.due_us = if rc == 0 { now_us + after_us } else { 0 };
    }

    /// What comes may wait for so long; `None`: others will come as soon as they have.
    pub(super) fn set_idle_interval(&mut self, now_us: u64, look_us: Option<u64>) {
        if self.idle_poll_us.is_some() && look_us.is_none() {
            self.busy_us = now_us;
        }
        self.idle_poll_us = look_us;
    }

    /// Packets have come, or left: others will.
    pub(super) fn busy(&mut self, now_us: u64) {
        self.busy_us = now_us;
    }

    /// Nothing was there: the thread that waits for the descriptor will look again after a while.
    pub(super) fn idle(&mut self, now_us: u64) {
        let pause_us = now_us.saturating_sub(self.busy_us);
        let after_us = self.idle_poll_us.unwrap_or_else(|| poll_after_us(pause_us));
        if now_us < self.due_us {
            // At rest a poll for another reason spares the timer a wake-up.
            let later =
                self.idle_poll_us.is_some() && self.due_us + after_us / 4 < now_us + after_us;
            if later || self.due_us > now_us + after_us {
                self.arm(now_us, after_us);
            }
            return;
        }
        let mut count = [0u8; 8];
        // SAFETY: the buffer is ours and as long as said.
        let read =
            unsafe { libc::read(self.fd.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
        // It may be a little late.
        if read > 0 || self.due_us == 0 {
            self.arm(now_us, after_us);
        }
    }

    pub(super) fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_readable(timer: &Timer, wait_ms: i32) -> bool {
        let mut poll = libc::pollfd {
            fd: timer.fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one descriptor, which lives for the call.
        unsafe { libc::poll(&mut poll, 1, wait_ms) == 1 }
    }

    #[test]
    fn a_packet_waits_for_a_part_of_the_pause_before_it() {
        let mut looks = 0;
        let mut pause_us = 0;
        while pause_us < 60_000 {
            let after_us = poll_after_us(pause_us);
            assert!(after_us <= MIN_POLL_US.max(pause_us / PAUSE_DIVISOR).min(MAX_POLL_US));
            pause_us += after_us;
            looks += 1;
        }
        assert!(looks < 60, "{looks} looks between two heartbeats");
    }

    #[test]
    fn it_runs_while_nothing_comes_and_sooner_once_something_has() {
        let mut timer = Timer::new().unwrap();
        assert!(!is_readable(&timer, 0));
        timer.idle(1_000_000);
        assert_eq!(timer.due_us, 1_000_000 + MAX_POLL_US);
        timer.idle(1_000_100);
        assert_eq!(timer.due_us, 1_000_000 + MAX_POLL_US, "it runs");
        timer.busy(1_000_200);
        timer.idle(1_000_210);
        assert_eq!(timer.due_us, 1_000_210 + MIN_POLL_US);
        assert!(is_readable(&timer, 10_000));
        timer.idle(1_000_300);
        assert_eq!(timer.due_us, 1_000_300 + MIN_POLL_US, "and again");
        assert!(is_readable(&timer, 10_000));
    }

    #[test]
    fn at_rest_it_looks_seldom_and_at_once_when_that_ends() {
        let mut timer = Timer::new().unwrap();
        timer.set_idle_interval(1_000_000, Some(15_000));
        timer.idle(1_000_000);
        assert_eq!(timer.due_us, 1_015_000);
        timer.busy(1_000_500);
        timer.idle(1_000_600);
        assert_eq!(
            timer.due_us, 1_015_000,
            "a heartbeat does not shorten the wait"
        );
        timer.idle(1_010_000);
        assert_eq!(timer.due_us, 1_025_000, "this was a look");
        timer.set_idle_interval(1_011_000, None);
        timer.idle(1_011_000);
        assert_eq!(timer.due_us, 1_011_000 + MIN_POLL_US);
        assert!(is_readable(&timer, 10_000));
    }
}

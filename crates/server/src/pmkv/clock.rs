//! The clock that leases are measured by: it runs on while the machine sleeps.

use rustix::time::{ClockId, clock_gettime};

/// Microseconds of CLOCK_BOOTTIME; the same for all processes of a machine.
pub(super) fn now_us() -> u64 {
    let time = clock_gettime(ClockId::Boottime);
    // Both are positive on a clock that counts from the machine's start.
    time.tv_sec as u64 * 1_000_000 + time.tv_nsec as u64 / 1000
}

/// Microseconds of the calendar's clock; 0 before 1970.
pub(super) fn calendar_us() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |it| it.as_micros() as u64)
}

/// Asks for a little more of the processor for this thread, which has leases to renew; it does without, too.
pub(super) fn come_first() {
    let _ = rustix::process::setpriority_process(None, -10);
}

//! The clock that leases are measured by: it runs on while the machine sleeps.

use rustix::time::{ClockId, clock_gettime};
use thread_priority::{
    RealtimeThreadSchedulePolicy, ThreadPriority, ThreadSchedulePolicy,
    set_thread_priority_and_policy, thread_native_id,
};

/// Real-time, in turn with others of the same priority.
const ROUND_ROBIN: ThreadSchedulePolicy =
    ThreadSchedulePolicy::Realtime(RealtimeThreadSchedulePolicy::RoundRobin);

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

/// Asks for the processor before all ordinary threads, for this thread, which has leases to renew
/// and works for some microseconds at a time. Where that is not allowed, for a little more of the
/// processor; it does without, too.
pub(super) fn come_first() {
    let this = thread_native_id();
    if set_thread_priority_and_policy(this, ThreadPriority::Min, ROUND_ROBIN).is_err() {
        let _ = rustix::process::setpriority_process(None, -10);
    }
}

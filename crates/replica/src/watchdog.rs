//! Sees to it that the event loops get their turns in time on a CPU that others want too
//! (docs/adr/0057).
//!
//! A store's threads (flushes, compactions, the writer) have as much right to the CPU as the loop,
//! and each runs for whole ticks of the scheduler. With a dozen of them the loop waits for a
//! hundred milliseconds between two steps, or within one: longer than followers wait for a
//! heartbeat. The watchdog is a thread that sleeps. When the loop has not begun a turn for two of
//! its ticks, it lends it the highest ordinary priority until the end of the turn that is due.
//! Turns are short, so that others lose little. Where the loop waits for another thread, all
//! threads are lent as much. A loop that mostly sleeps needs no help, since the scheduler prefers
//! who has used little; it is not watched, until a client has work for it.

mod holders;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::process::{Pid, getpriority_process, setpriority_process};
use thread_priority::{
    RealtimeThreadSchedulePolicy, ThreadPriority, ThreadSchedulePolicy,
    set_thread_priority_and_policy, thread_native_id,
};

use self::holders::{PriorityBoost, own_nice};
use crate::run::now;

/// The nice value that is lent: nine tenths of a CPU, even beside a dozen others. A real-time
/// priority would be all of it, and a thread that spins briefly, waiting for a thread that has been
/// interrupted, would wait without end.
const LENT: i32 = -20;

/// The longest time for which other threads are lent it. A loop that waits for a disk is not helped
/// by that.
const LONGEST_LOAN: Duration = Duration::from_millis(200);
/// While they are, the watchdog looks so many times as often.
const LOOKS: u32 = 4;

/// Turns in a row that found work, from which on the loop is busy whether or not it was for a
/// client. A heartbeat is one.
const STREAK: u32 = 4;
/// A loop that has not been busy for this long is not watched, in microseconds.
const QUIET_US: u64 = 1_000_000;

/// Watches one loop. To be made in its thread; dropping it ends the watch.
pub(crate) struct Watchdog {
    seen: Arc<LoopActivity>,
    /// Turns in a row that found work.
    busy_turns: u32,
    /// When a client last had work, as the loop has said.
    active_us: u64,
    thread: Option<JoinHandle<()>>,
}

/// What the loop and the thread that watches it tell each other.
struct LoopActivity {
    /// The loop's thread, and the nice value that it has without a boost.
    watched: Pid,
    nice: i32,
    /// When it began its last turn, in microseconds of the steady clock.
    turn_started_us: AtomicU64,
    /// It sleeps until something comes, or has been woken from that and not begun a turn.
    sleeps: AtomicBool,
    /// When it was last busy.
    busy_us: AtomicU64,
    /// It is not watched until it is busy again.
    asleep: AtomicBool,
    /// It has another nice value, to be given back at the end of the turn.
    lent: AtomicBool,
    /// How often loops of this replica had to be helped so far.
    times: Arc<AtomicU64>,
    stop: AtomicBool,
}

impl Watchdog {
    /// Watches the calling thread, which is to begin a turn at least every `patience`. Does nothing
    /// where the process may not raise priorities. Counts in `times`.
    ///
    /// # Errors
    /// When the system grants no thread, or does not tell the calling one's nice value.
    pub(crate) fn start(patience: Duration, times: Arc<AtomicU64>) -> io::Result<Watchdog> {
        let watched = rustix::thread::gettid();
        let seen = Arc::new(LoopActivity {
            watched,
            nice: own_nice(watched, LENT)?,
            turn_started_us: AtomicU64::new(now().steady_us),
            sleeps: AtomicBool::new(false),
            busy_us: AtomicU64::new(0),
            asleep: AtomicBool::new(false),
            lent: AtomicBool::new(false),
            times,
            stop: AtomicBool::new(false),
        });
        let shared = Arc::clone(&seen);
        let thread = std::thread::Builder::new()
            .name("watchdog".to_owned())
            .spawn(move || shared.watch(patience))?;
        Ok(Watchdog {
            seen,
            busy_turns: 0,
            active_us: 0,
            thread: Some(thread),
        })
    }

    /// The loop begins a turn.
    pub(crate) fn begin(&self, now_us: u64) {
        self.seen.turn_started_us.store(now_us, Ordering::Relaxed);
        self.seen.sleeps.store(false, Ordering::Relaxed);
    }

    /// The loop goes to sleep, after the end of a turn.
    pub(crate) fn sleep(&self) {
        self.seen.sleeps.store(true, Ordering::Relaxed);
    }

    /// The loop ends a turn, in which it found work or may sleep after it. `active_us` is when a
    /// client last had work for it: where that comes in small pieces the next turn may be a long
    /// one nevertheless.
    pub(crate) fn end(&mut self, found_work: bool, active_us: u64) {
        self.busy_turns = match found_work {
            true => self.busy_turns.saturating_add(1),
            false => 0,
        };
        let is_active = std::mem::replace(&mut self.active_us, active_us) != active_us;
        if is_active || self.busy_turns >= STREAK {
            let now_us = self.seen.turn_started_us.load(Ordering::Relaxed);
            // Either this thread sees that the other one sleeps, or that one sees that this one is
            // busy.
            self.seen.busy_us.store(now_us, Ordering::SeqCst);
            if let (true, Some(thread)) = (self.seen.asleep.load(Ordering::SeqCst), &self.thread) {
                thread.thread().unpark();
            }
        }
        self.seen.restore_priority();
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.seen.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // It cannot panic; if it did, its hook has told.
            let _ = thread.join();
        }
        self.seen.restore_priority();
    }
}

impl LoopActivity {
    fn watch(&self, patience: Duration) {
        if let Err(error) = raise_own_priority() {
            tracing::info!(
                %error,
                "priorities cannot be raised (CAP_SYS_NICE or RLIMIT_NICE): where threads want all CPUs, heartbeats may come late"
            );
            return;
        }
        let mut loan = None;
        while !self.stop.load(Ordering::Relaxed) {
            if self.is_quiet() {
                loan = None;
                self.sleep();
                continue;
            }
            let turn_started_us = self.turn_started_us.load(Ordering::Relaxed);
            let since = Duration::from_micros(now().steady_us.saturating_sub(turn_started_us));
            let left = patience.saturating_sub(since);
            let state = match self.sleeps.load(Ordering::Relaxed) {
                _ if !left.is_zero() => State::InTime,
                _ if wants_cpu(self.watched) => State::Late,
                true => State::InTime,
                false => State::Waits,
            };
            if state != State::InTime {
                self.boost_priority();
            }
            let waits = state == State::Waits && since <= LONGEST_LOAN;
            loan = waits.then(|| loan.unwrap_or_else(|| PriorityBoost::take(LENT, self.nice)));
            std::thread::park_timeout(match left.is_zero() {
                true if loan.is_some() => patience / LOOKS,
                true => patience,
                false => left,
            });
        }
    }

    /// Whether the loop has not been busy lately, nor stands still since it was.
    fn is_quiet(&self) -> bool {
        let busy_us = self.busy_us.load(Ordering::SeqCst);
        let turn_started_us = self.turn_started_us.load(Ordering::Relaxed);
        turn_started_us.saturating_sub(busy_us) > QUIET_US || busy_us == 0
    }

    fn sleep(&self) {
        self.asleep.store(true, Ordering::SeqCst);
        if self.is_quiet() && !self.stop.load(Ordering::Relaxed) {
            std::thread::park();
        }
        self.asleep.store(false, Ordering::SeqCst);
    }

    fn boost_priority(&self) {
        // What it has is asked anew: it may have lost the CPU while it gave back.
        let has = getpriority_process(Some(self.watched));
        // The flag comes after the priority: a turn that ends in between leaves it to the next one
        // to give it back.
        if has != Ok(LENT) && setpriority_process(Some(self.watched), LENT).is_ok() {
            self.times.fetch_add(1, Ordering::Relaxed);
            self.lent.store(true, Ordering::Release);
        }
    }

    fn restore_priority(&self) {
        // The flag goes first: who lowers its priority after a long turn loses the CPU on the spot,
        // and is to be helped again.
        if self.lent.swap(false, Ordering::AcqRel) {
            // Everybody may lower a priority.
            let _ = setpriority_process(Some(self.watched), self.nice);
        }
    }
}

/// What the loop does.
#[derive(Clone, Copy, PartialEq)]
enum State {
    /// It has begun a turn lately, or has nothing to do.
    InTime,
    /// It runs for long, or would if it had a CPU.
    Late,
    /// It waits within a turn, for a lock or a disk.
    Waits,
}

/// Raises the calling thread's priority, to a real-time one where that is allowed as well: with an
/// ordinary one, however high, it waits until the thread that runs has had its slice. The watchdog
/// works for microseconds at a time and does not spin.
///
/// # Errors
/// When the process may not raise priorities.
fn raise_own_priority() -> io::Result<()> {
    setpriority_process(Some(rustix::thread::gettid()), LENT)?;
    let fifo = ThreadSchedulePolicy::Realtime(RealtimeThreadSchedulePolicy::Fifo);
    let _ = set_thread_priority_and_policy(thread_native_id(), ThreadPriority::Min, fifo);
    Ok(())
}

/// Whether a thread of this process runs, or would if it had a CPU. One that has ended does not.
fn wants_cpu(thread: Pid) -> bool {
    let path = format!("/proc/self/task/{}/stat", thread.as_raw_nonzero());
    let stat = std::fs::read_to_string(path).unwrap_or_default();
    // The name before it, in brackets, may be anything.
    let state = stat.rsplit(") ").next();
    state.is_some_and(|state| state.starts_with('R'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::time::Instant;

    const PATIENCE: Duration = Duration::from_millis(2);

    /// Other tests' watchdogs lend to all threads at times: that does not count.
    fn nice() -> i32 {
        own_nice(rustix::thread::gettid(), LENT).unwrap()
    }

    #[track_caller]
    fn wait_for(what: &str, mut is: impl FnMut() -> bool) {
        let begun = Instant::now();
        while !is() {
            assert!(begun.elapsed() < Duration::from_secs(20), "no {what}");
            std::thread::sleep(PATIENCE / 4);
        }
    }

    fn may_raise() -> bool {
        let raised = std::thread::spawn(|| {
            setpriority_process(Some(rustix::thread::gettid()), LENT).is_ok()
        });
        let may = raised.join().unwrap();
        if !may {
            println!("skipped: priorities cannot be raised here");
        }
        may
    }

    fn watch(patience: Duration) -> Watchdog {
        Watchdog::start(patience, Arc::default()).unwrap()
    }

    fn times(watchdog: &Watchdog) -> u64 {
        watchdog.seen.times.load(Ordering::Relaxed)
    }

    /// The loop is busy for some turns.
    fn work(watchdog: &mut Watchdog) {
        for _ in 0..STREAK {
            watchdog.begin(now().steady_us);
            watchdog.end(true, 0);
        }
    }

    #[test]
    fn a_loop_that_takes_no_turn_is_helped_until_the_next_one_ends() {
        if !may_raise() {
            return;
        }
        let own = nice();
        let mut watchdog = watch(PATIENCE);
        for _ in 0..3 {
            work(&mut watchdog);
            wait_for("help", || watchdog.seen.lent.load(Ordering::Acquire));
            // Once for each turn, however long it takes.
            let so_far = times(&watchdog);
            std::thread::sleep(5 * PATIENCE);
            assert_eq!((times(&watchdog), nice()), (so_far, LENT));
            // The flag may come after the end of a turn; the next one sees it.
            wait_for("the end of it", || {
                watchdog.begin(now().steady_us);
                watchdog.end(false, 0);
                nice() == own
            });
        }
    }

    /// It lost the CPU between giving the priority back and saying so, which is where a loop does
    /// that has had a long turn.
    #[test]
    fn a_loop_that_has_not_what_it_was_lent_is_helped_again() {
        if !may_raise() {
            return;
        }
        let own = nice();
        let mut watchdog = watch(PATIENCE);
        work(&mut watchdog);
        wait_for("help", || watchdog.seen.lent.load(Ordering::Acquire));
        let so_far = times(&watchdog);
        setpriority_process(Some(watchdog.seen.watched), own).unwrap();
        wait_for("more help", || times(&watchdog) > so_far && nice() == LENT);
    }

    #[test]
    fn a_sleeping_thread_is_distinguished_from_a_woken_one() {
        assert!(wants_cpu(rustix::thread::gettid()));
        let (tell, told) = mpsc::channel();
        let (wake, woken) = mpsc::channel::<()>();
        let sleeper = std::thread::spawn(move || {
            tell.send(rustix::thread::gettid()).unwrap();
            let _ = woken.recv();
        });
        let thread = told.recv().unwrap();
        wait_for("sleep", || !wants_cpu(thread));
        drop(wake);
        sleeper.join().unwrap();
        // The waiting thread goes on slightly before the kernel has done with it.
        wait_for("end", || !wants_cpu(thread));

        if !may_raise() {
            return;
        }
        // One that goes to sleep and does not come to it is helped.
        let mut watchdog = watch(PATIENCE);
        work(&mut watchdog);
        watchdog.sleep();
        let begun = Instant::now();
        while times(&watchdog) == 0 {
            assert!(begun.elapsed() < Duration::from_secs(20), "no help");
        }
    }

    #[test]
    fn all_threads_are_helped_while_the_loop_waits_for_one() {
        if !may_raise() {
            return;
        }
        let lock = std::sync::Mutex::new(());
        let held = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            let holder = scope.spawn(|| {
                let this = rustix::thread::gettid();
                let has = || getpriority_process(Some(this)).unwrap();
                setpriority_process(Some(this), 3).unwrap();
                let guard = lock.lock().unwrap();
                held.wait();
                wait_for("help for the holder", || has() == LENT);
                drop(guard);
                wait_for("the holder's own priority", || has() == 3);
            });
            held.wait();
            let mut watchdog = watch(PATIENCE);
            work(&mut watchdog);
            watchdog.begin(now().steady_us);
            drop(lock.lock().unwrap());
            watchdog.end(true, 0);
            holder.join().unwrap();
        });
    }

    #[test]
    fn the_priority_is_given_back_when_the_watch_ends() {
        if !may_raise() {
            return;
        }
        let own = nice();
        let mut watchdog = watch(PATIENCE);
        work(&mut watchdog);
        wait_for("help", || times(&watchdog) > 0);
        drop(watchdog);
        assert_eq!(nice(), own);
    }

    #[test]
    fn a_loop_that_takes_its_turns_is_left_alone() {
        let own = nice();
        let mut watchdog = watch(Duration::from_secs(60));
        work(&mut watchdog);
        assert_eq!((times(&watchdog), nice()), (0, own));
    }

    #[test]
    fn a_loop_that_is_not_busy_is_not_watched_until_it_is() {
        if !may_raise() {
            return;
        }
        let mut watchdog = watch(PATIENCE);
        // Heartbeats and pauses.
        for found_work in [true, false, true, true, false, false] {
            watchdog.begin(now().steady_us);
            watchdog.end(found_work, 0);
            std::thread::sleep(5 * PATIENCE);
        }
        assert_eq!(times(&watchdog), 0);
        wait_for("sleep", || watchdog.seen.asleep.load(Ordering::SeqCst));
        work(&mut watchdog);
        wait_for("help", || times(&watchdog) > 0);
    }

    /// As a follower's of a leader with little load, which sleeps after every entry: its next turn
    /// may take in many of them.
    #[test]
    fn a_loop_that_a_client_has_work_for_is_watched_however_often_it_sleeps() {
        if !may_raise() {
            return;
        }
        let mut watchdog = watch(PATIENCE);
        for (found_work, active_us) in [(true, 1), (false, 1)] {
            watchdog.begin(now().steady_us);
            watchdog.end(found_work, active_us);
        }
        wait_for("help", || times(&watchdog) > 0);
    }
}

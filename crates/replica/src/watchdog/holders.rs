//! Priority for the holder of the lock that an event loop waits for.
//!
//! A thread that was interrupted with a lock in hand gets the CPU back only when all others had
//! their turns, and the loop's own priority is of no use to it. The lock's holder is unknown, so
//! that all threads of the process are lent the loop's priority: the holder is one of them, and
//! releases it soon after.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::{fs, io};

use rustix::process::{Pid, getpriority_process, setpriority_process};

/// Several loops of a process may wait at once; the threads' own priorities only the first of them
/// reads.
struct BoostState {
    boosts: usize,
    /// For threads that are started during a loan, and inherit what was lent.
    usual: i32,
    /// The threads that there were, each with the nice value that is to be given back to it, if it
    /// was lent another.
    threads: BTreeMap<i32, Option<i32>>,
}

static LENT: Mutex<BoostState> = Mutex::new(BoostState {
    boosts: 0,
    usual: 0,
    threads: BTreeMap::new(),
});

impl BoostState {
    /// What is to be given back to a thread that has `has`; `None`: it was lent nothing.
    fn own(&self, thread: Pid, has: i32, nice: i32) -> Option<i32> {
        let known = self.threads.get(&thread.as_raw_nonzero().get());
        match known {
            _ if has > nice => Some(has),
            Some(own) => *own,
            None if self.boosts > 0 => Some(self.usual),
            None => None,
        }
    }

    /// Gives back to all threads; returns whether there were any.
    fn restore_priority(&self, nice: i32) -> bool {
        let mut some = false;
        for thread in threads() {
            // Who has another one by now was given that by somebody else.
            if getpriority_process(Some(thread)) == Ok(nice)
                && let Some(own) = self.own(thread, nice, nice)
            {
                // Everybody may lower a priority.
                some |= setpriority_process(Some(thread), own).is_ok() && own > nice;
            }
        }
        some
    }
}

/// The nice value that a thread has without a boost, whatever all threads are lent (`nice`) just
/// now.
///
/// # Errors
/// When the system does not tell.
pub(super) fn own_nice(thread: Pid, nice: i32) -> io::Result<i32> {
    let lent = lent();
    let has = getpriority_process(Some(thread))?;
    Ok(lent.own(thread, has, nice).unwrap_or(has))
}

/// All threads of this process have a nice value as low as this; dropping it gives back what they
/// had.
pub(super) struct PriorityBoost {
    nice: i32,
}

impl PriorityBoost {
    /// Threads that are started meanwhile get `usual` in the end.
    pub(super) fn take(nice: i32, usual: i32) -> PriorityBoost {
        let mut lent = lent();
        if lent.boosts == 0 {
            lent.usual = usual;
        }
        for thread in threads() {
            let has = getpriority_process(Some(thread)).unwrap_or(nice);
            let own = lent.own(thread, has, nice);
            if has <= nice || setpriority_process(Some(thread), nice).is_ok() {
                lent.threads.insert(thread.as_raw_nonzero().get(), own);
            }
        }
        lent.boosts += 1;
        PriorityBoost { nice }
    }
}

impl Drop for PriorityBoost {
    fn drop(&mut self) {
        let mut lent = lent();
        if lent.boosts == 1 {
            // Who was started by a thread that had it still is found when none has it any more.
            while lent.restore_priority(self.nice) {}
            lent.threads.clear();
        }
        lent.boosts -= 1;
    }
}

fn lent() -> MutexGuard<'static, BoostState> {
    LENT.lock().unwrap_or_else(PoisonError::into_inner)
}

fn threads() -> Vec<Pid> {
    let tasks = fs::read_dir("/proc/self/task");
    let tasks = tasks.into_iter().flatten().flatten();
    let ids = tasks.filter_map(|task| task.file_name().to_str()?.parse().ok());
    ids.filter_map(Pid::from_raw).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    const NICE: i32 = 7;
    const USUAL: i32 = 12;

    /// A thread that waits.
    struct Waiting {
        thread: Pid,
        _end: mpsc::Sender<()>,
    }

    fn start(nice: Option<i32>) -> Waiting {
        let (tell, told) = mpsc::channel();
        let (end, ended) = mpsc::channel::<()>();
        std::thread::spawn(move || {
            let this = rustix::thread::gettid();
            if let Some(nice) = nice {
                setpriority_process(Some(this), nice).unwrap();
            }
            tell.send(this).unwrap();
            let _ = ended.recv();
        });
        Waiting {
            thread: told.recv().unwrap(),
            _end: end,
        }
    }

    #[test]
    fn what_is_to_be_given_back() {
        let mut lent = BoostState {
            boosts: 0,
            usual: USUAL,
            threads: BTreeMap::new(),
        };
        let thread = rustix::thread::gettid();
        let id = thread.as_raw_nonzero().get();
        // Nothing is lent: a thread that has it has it without a boost.
        assert_eq!(lent.own(thread, NICE, NICE), None);
        assert_eq!(lent.own(thread, 15, NICE), Some(15));
        lent.boosts = 1;
        // Started since, it inherited what it has.
        assert_eq!(lent.own(thread, NICE, NICE), Some(USUAL));
        lent.threads.insert(id, None);
        assert_eq!(lent.own(thread, NICE, NICE), None);
        lent.threads.insert(id, Some(9));
        assert_eq!(lent.own(thread, NICE, NICE), Some(9));
        // It was given another one meanwhile.
        assert_eq!(lent.own(thread, 11, NICE), Some(11));
    }

    #[test]
    fn loans_that_overlap_give_back_what_threads_had_before_the_first() {
        let lowest = -20;
        let may_raise = std::thread::spawn(move || {
            setpriority_process(Some(rustix::thread::gettid()), lowest).is_ok()
        });
        if !may_raise.join().unwrap() {
            println!("skipped: priorities cannot be raised here");
            return;
        }
        let own = |waiting: &Waiting| own_nice(waiting.thread, lowest).unwrap();
        let has = |waiting: &Waiting| getpriority_process(Some(waiting.thread)).unwrap();
        // As other tests' watchdogs have it: only the first of several loans says what is usual.
        let usual = own_nice(rustix::thread::gettid(), lowest).unwrap();
        let before = start(Some(3));
        let first = PriorityBoost::take(lowest, usual);
        assert_eq!((has(&before), own(&before)), (lowest, 3));
        let inherited = start(Some(lowest));
        let second = PriorityBoost::take(lowest, usual);
        drop(first);
        assert_eq!((has(&before), own(&before)), (lowest, 3));
        assert_eq!((has(&inherited), own(&inherited)), (lowest, usual));
        drop(second);
        // Another test's watchdog may have a loan at this moment, for which it does not count.
        assert_eq!((own(&before), own(&inherited)), (3, usual));
    }
}

//! Priority for whoever holds the lock that an event loop waits for.
//!
//! A thread that was interrupted with a lock in hand gets the CPU back only when all others had their turns, and the loop's own priority is of no
//! use to it. Who holds the lock nobody knows, so that all threads of the process are lent the loop's priority: the holder is one of them, and has
//! it free a moment later.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::process::{Pid, getpriority_process, setpriority_process};

/// Several loops of a process may wait at once; what the threads have by themselves only the first of them sees.
struct Lent {
    loans: usize,
    /// The threads that there were, each with the nice value that is to be given back to it, if it was lent another.
    threads: BTreeMap<i32, Option<i32>>,
}

static LENT: Mutex<Lent> = Mutex::new(Lent {
    loans: 0,
    threads: BTreeMap::new(),
});

/// All threads of this process have a nice value as low as this; dropping it gives back what they had.
pub(super) struct Loan {
    nice: i32,
    /// For threads that have been started meanwhile, and inherited what was lent.
    usual: i32,
}

impl Loan {
    pub(super) fn take(nice: i32, usual: i32) -> Loan {
        let mut lent = lent();
        lent.loans += 1;
        for thread in threads() {
            let had = getpriority_process(Some(thread)).unwrap_or(nice);
            let raised = had > nice && setpriority_process(Some(thread), nice).is_ok();
            let own = lent.threads.entry(thread.as_raw_nonzero().get());
            let own = own.or_default();
            if raised {
                own.get_or_insert(had);
            }
        }
        Loan { nice, usual }
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        let mut lent = lent();
        lent.loans -= 1;
        if lent.loans > 0 {
            return;
        }
        let known = std::mem::take(&mut lent.threads);
        for thread in threads() {
            let own = known.get(&thread.as_raw_nonzero().get());
            let own = own.copied().unwrap_or(Some(self.usual));
            // Who has another one by now was given that by somebody else.
            if let Some(own) = own
                && getpriority_process(Some(thread)) == Ok(self.nice)
            {
                // Everybody may lower a priority.
                let _ = setpriority_process(Some(thread), own);
            }
        }
    }
}

fn lent() -> MutexGuard<'static, Lent> {
    LENT.lock().unwrap_or_else(PoisonError::into_inner)
}

fn threads() -> Vec<Pid> {
    let tasks = fs::read_dir(Path::new("/proc/self/task"));
    let tasks = tasks.into_iter().flatten().flatten();
    let ids = tasks.filter_map(|task| task.file_name().to_str()?.parse().ok());
    ids.filter_map(Pid::from_raw).collect()
}

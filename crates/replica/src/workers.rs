//! What would block the event loop runs elsewhere: stalled store writes, reads that need the disk,
//! checkpoints. In a process these are small pools of threads, one for what the log waits for and
//! one for what only a client waits for; in a simulation a queue that the simulator empties when it
//! likes.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use mio::Waker;

type Job<R> = Box<dyn FnOnce() -> R + Send>;

/// Runs jobs whose results come back to the loop that owns it.
pub(crate) enum Workers<R: Send + 'static> {
    Threads(Threads<R>),
    Manual {
        jobs: VecDeque<Job<R>>,
        /// To be run right after the loop has looked for results.
        unseen: Option<Job<R>>,
        results: VecDeque<R>,
    },
}

/// Two small pools of threads.
pub(crate) struct Threads<R: Send + 'static> {
    /// `None` once they are to end.
    jobs: Option<[Sender<Job<R>>; 2]>,
    /// Of a job that panicked, with what: the loop goes on panicking with it. Were it to go on,
    /// nothing would be applied any more.
    results: Receiver<std::thread::Result<R>>,
    threads: Vec<JoinHandle<()>>,
    running: usize,
    /// Jobs that have not begun are not begun any more.
    ending: Arc<AtomicBool>,
}

impl<R: Send + 'static> Workers<R> {
    /// Starts `count` threads for each kind of job; `waker` wakes the loop when a result is there.
    ///
    /// # Errors
    /// When a thread cannot be started.
    pub(crate) fn threads(count: usize, waker: Arc<Waker>) -> std::io::Result<Self> {
        let (jobs, queue) = channel::<Job<R>>();
        let (reads, read_queue) = channel::<Job<R>>();
        let (results_in, results) = channel();
        let queues = [queue, read_queue].map(|queue| Arc::new(Mutex::new(queue)));
        let mut threads = Vec::with_capacity(2 * count);
        let ending = Arc::new(AtomicBool::new(false));
        for (name, queue) in ["worker", "reader"].iter().zip(&queues) {
            for number in 0..count {
                let (queue, results) = (Arc::clone(queue), results_in.clone());
                let (waker, ending) = (Arc::clone(&waker), Arc::clone(&ending));
                let thread = std::thread::Builder::new()
                    .name(format!("{name}-{number}"))
                    .spawn(move || {
                        loop {
                            // The lock is held only while waiting for a job, so a poisoned one
                            // still guards a sound queue.
                            let job = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
                            let Ok(job) = job else { return };
                            if ending.load(Ordering::Relaxed) {
                                return;
                            }
                            // Nothing of a job that panicked is used again.
                            let result = catch_unwind(AssertUnwindSafe(job));
                            if results.send(result).is_err() {
                                return;
                            }
                            // A wake-up that fails leaves the result to the loop's next timer.
                            let _ = waker.wake();
                        }
                    })?;
                threads.push(thread);
            }
        }
        Ok(Workers::Threads(Threads {
            jobs: Some([jobs, reads]),
            results,
            threads,
            running: 0,
            ending,
        }))
    }

    /// Jobs wait until [`Workers::run_one`] is called.
    pub(crate) fn manual() -> Self {
        Workers::Manual {
            jobs: VecDeque::new(),
            unseen: None,
            results: VecDeque::new(),
        }
    }

    /// Jobs that wait for [`Workers::run_one`].
    pub(crate) fn waiting(&self) -> usize {
        match self {
            Workers::Threads(_) => 0,
            Workers::Manual { jobs, .. } => jobs.len(),
        }
    }

    /// Runs one waiting job, counted from the oldest.
    pub(crate) fn run_one(&mut self, which: usize) {
        if let Workers::Manual { jobs, results, .. } = self
            && let Some(job) = jobs.remove(which)
        {
            results.push_back(job());
        }
    }

    /// Runs one waiting job, counted from the oldest, when the loop has next looked for results: as
    /// a thread does that gets done while the loop is busy with something else.
    pub(crate) fn run_one_unseen(&mut self, which: usize) {
        if let Workers::Manual { jobs, unseen, .. } = self
            && unseen.is_none()
        {
            *unseen = jobs.remove(which);
        }
    }

    /// Queues a job that the log waits for.
    pub(crate) fn run(&mut self, job: impl FnOnce() -> R + Send + 'static) {
        self.queue(0, job);
    }

    /// Queues a job that may take long, and for which only a client waits: no other kind stands
    /// behind it.
    pub(crate) fn run_read(&mut self, job: impl FnOnce() -> R + Send + 'static) {
        self.queue(1, job);
    }

    fn queue(&mut self, kind: usize, job: impl FnOnce() -> R + Send + 'static) {
        match self {
            Workers::Threads(Threads {
                jobs: Some(jobs),
                running,
                ..
            }) => {
                *running += 1;
                // Threads end only when the sender is dropped, so the queue is there.
                let _ = jobs[kind].send(Box::new(job));
            }
            Workers::Threads(_) => {}
            Workers::Manual { jobs, .. } => jobs.push_back(Box::new(job)),
        }
    }

    /// Whether no result can come.
    pub(crate) fn is_idle(&self) -> bool {
        match self {
            Workers::Threads(pool) => pool.running == 0,
            Workers::Manual { .. } => false,
        }
    }

    /// The next finished job's result, if there is one. Never blocks.
    pub(crate) fn poll(&mut self) -> Option<R> {
        match self {
            Workers::Threads(pool) => {
                if pool.running == 0 {
                    return None;
                }
                let result = pool.results.try_recv().ok()?;
                pool.running -= 1;
                match result {
                    Ok(result) => Some(result),
                    Err(panic) => resume_unwind(panic),
                }
            }
            Workers::Manual {
                results, unseen, ..
            } => {
                let result = results.pop_front();
                if let Some(job) = unseen.take_if(|_| result.is_none()) {
                    results.push_back(job());
                }
                result
            }
        }
    }
}

impl<R: Send + 'static> Drop for Threads<R> {
    /// Waits for the jobs that have begun. The others are as good as lost in a crash: what they
    /// would have done is in the log, or done at the next start, or is not reported.
    fn drop(&mut self) {
        self.ending.store(true, Ordering::Relaxed);
        self.jobs = None;
        for thread in self.threads.drain(..) {
            // A job that panicked has already been reported by the panic hook.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use mio::{Poll, Token};

    use super::*;

    #[test]
    fn what_has_not_begun_at_the_end_does_not_begin() {
        let poll = Poll::new().unwrap();
        let waker = Arc::new(Waker::new(poll.registry(), Token(0)).unwrap());
        let mut workers = Workers::threads(1, waker).unwrap();
        let Workers::Threads(threads) = &workers else {
            unreachable!("asked for")
        };
        let ending = Arc::clone(&threads.ending);
        let (begun, begins) = channel();
        workers.run(move || {
            begun.send(()).unwrap();
            while !ending.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
        });
        let ran = Arc::new(AtomicBool::new(false));
        let runs = Arc::clone(&ran);
        workers.run(move || runs.store(true, Ordering::Relaxed));
        begins.recv().unwrap();
        drop(workers);
        assert!(!ran.load(Ordering::Relaxed));
    }
}

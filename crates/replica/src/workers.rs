//! Threads for what would block the event loop: stalled store writes, reads that need the disk, checkpoints.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use mio::Waker;

type Job<R> = Box<dyn FnOnce() -> R + Send>;

/// A small pool whose results come back to the loop that owns it.
pub(crate) struct Workers<R: Send + 'static> {
    jobs: Option<Sender<Job<R>>>,
    results: Receiver<R>,
    threads: Vec<JoinHandle<()>>,
    running: usize,
}

impl<R: Send + 'static> Workers<R> {
    /// Starts `count` threads; `waker` wakes the loop when a result is there.
    ///
    /// # Errors
    /// When a thread cannot be started.
    pub(crate) fn new(count: usize, waker: Arc<Waker>) -> std::io::Result<Self> {
        let (jobs, queue) = channel::<Job<R>>();
        let (results_in, results) = channel();
        let queue = Arc::new(Mutex::new(queue));
        let mut threads = Vec::with_capacity(count);
        for number in 0..count {
            let (queue, results, waker) =
                (Arc::clone(&queue), results_in.clone(), Arc::clone(&waker));
            threads.push(
                std::thread::Builder::new()
                    .name(format!("worker-{number}"))
                    .spawn(move || {
                        loop {
                            // The lock is held only while waiting for a job, so a poisoned one still guards a sound queue.
                            let job = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
                            let Ok(job) = job else { return };
                            if results.send(job()).is_err() {
                                return;
                            }
                            // A wake-up that fails leaves the result to the loop's next timer.
                            let _ = waker.wake();
                        }
                    })?,
            );
        }
        Ok(Workers {
            jobs: Some(jobs),
            results,
            threads,
            running: 0,
        })
    }

    /// Queues a job.
    pub(crate) fn run(&mut self, job: impl FnOnce() -> R + Send + 'static) {
        if let Some(jobs) = &self.jobs {
            self.running += 1;
            // Threads end only when the sender is dropped, so the queue is there.
            let _ = jobs.send(Box::new(job));
        }
    }

    /// The next finished job's result, if there is one. Never blocks.
    pub(crate) fn poll(&mut self) -> Option<R> {
        if self.running == 0 {
            return None;
        }
        let result = self.results.try_recv().ok()?;
        self.running -= 1;
        Some(result)
    }
}

impl<R: Send + 'static> Drop for Workers<R> {
    fn drop(&mut self) {
        self.jobs = None;
        for thread in self.threads.drain(..) {
            // A job that panicked has already been reported by the panic hook.
            let _ = thread.join();
        }
    }
}

//! The lock around an endpoint's core, and the thread that makes progress while the program does
//! not poll.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::core::Core;
use crate::endpoint::FabricError;

/// The thread's first and longest sleeps.
const NAP: Duration = Duration::from_micros(20);
const LONGEST_NAP: Duration = Duration::from_micros(200);

/// A core and who watches it.
pub struct Shared {
    core: Mutex<Core>,
    /// Told when there are events.
    news: Condvar,
    stopped: AtomicBool,
    cpu_ns: AtomicU64,
}

impl Shared {
    pub fn new(core: Core) -> Shared {
        Shared {
            core: Mutex::new(core),
            news: Condvar::new(),
            stopped: AtomicBool::new(false),
            cpu_ns: AtomicU64::new(0),
        }
    }

    pub fn lock(&self) -> MutexGuard<'_, Core> {
        // A panic under the lock leaves tables that are each consistent: every entry is whole
        // before it is entered.
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn cpu_ns(&self) -> u64 {
        self.cpu_ns.load(Ordering::Relaxed)
    }

    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
    }

    /// Waits for events, at most `timeout`; without a thread the caller makes the progress.
    pub fn wait(&self, timeout: Duration, threaded: bool) {
        let until = Instant::now() + timeout;
        let mut core = self.lock();
        loop {
            let did = core.progress();
            let now = Instant::now();
            if !core.events.is_empty() || now >= until {
                return;
            }
            let left = until - now;
            if threaded {
                let waited = self.news.wait_timeout(core, left);
                core = waited.unwrap_or_else(PoisonError::into_inner).0;
            } else {
                drop(core);
                if !did {
                    std::thread::sleep(NAP.min(left));
                }
                core = self.lock();
            }
        }
    }
}

/// Starts the thread; it ends when the endpoint is dropped.
pub fn start(shared: &Arc<Shared>, spin: Duration) -> Result<JoinHandle<()>, FabricError> {
    let weak = Arc::downgrade(shared);
    std::thread::Builder::new()
        .name("fabric-progress".into())
        .spawn(move || run(&weak, spin))
        .map_err(|source| FabricError::System {
            what: "starting the fabric's progress thread".into(),
            source,
        })
}

fn run(shared: &Weak<Shared>, spin: Duration) {
    let mut busy_at = Instant::now();
    let mut nap = NAP;
    while let Some(shared) = shared.upgrade() {
        if shared.stopped.load(Ordering::Acquire) {
            return;
        }
        // The thread that holds the lock makes progress too.
        let did = match shared.core.try_lock() {
            Ok(mut core) => {
                let did = core.progress();
                if !core.events.is_empty() {
                    shared.news.notify_all();
                }
                did
            }
            Err(_) => false,
        };
        shared.cpu_ns.store(thread_cpu_ns(), Ordering::Relaxed);
        let now = Instant::now();
        if did {
            busy_at = now;
            nap = NAP;
        } else if now.duration_since(busy_at) < spin {
            std::thread::yield_now();
        } else {
            std::thread::sleep(nap);
            nap = (nap * 2).min(LONGEST_NAP);
        }
    }
}

/// CPU time of this thread.
fn thread_cpu_ns() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is a timespec; the clock exists on Linux.
    let code = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    if code != 0 {
        return 0;
    }
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

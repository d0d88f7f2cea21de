//! For how long the machine's host takes a CPU at a stretch: whatever runs there stands still for
//! as long, and no program can help it.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Time between two looks.
const LOOK: Duration = Duration::from_millis(20);

/// Measures what the host takes of one CPU, until it is dropped. The kernel counts that after each
/// stretch, in hundredths of a second.
pub struct Stolen {
    stretches: Arc<Mutex<Vec<Duration>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Stolen {
    /// Observes this CPU from now on.
    ///
    /// # Errors
    /// When the system grants no thread.
    pub fn watch(cpu: usize) -> io::Result<Stolen> {
        let stretches = Arc::new(Mutex::new(Vec::new()));
        let stop = Arc::new(AtomicBool::new(false));
        let (seen, stopped) = (Arc::clone(&stretches), Arc::clone(&stop));
        let look = move || {
            let read = || Some((Instant::now(), of_cpu(&stat(), cpu)?));
            let (mut last, mut goes_on) = (read(), false);
            while !stopped.load(Ordering::Relaxed) {
                std::thread::park_timeout(LOOK);
                // Where it cannot be read, the next time is compared with the last that could.
                let Some((at, taken)) = read() else { continue };
                if let Some((last_at, last_taken)) = last {
                    let taken = taken.saturating_sub(last_taken);
                    goes_on = note(&mut lock(&seen), goes_on, taken, at - last_at);
                }
                last = Some((at, taken));
            }
        };
        let thread = std::thread::Builder::new()
            .name("stolen".to_owned())
            .spawn(look)?;
        Ok(Stolen {
            stretches,
            stop,
            thread: Some(thread),
        })
    }

    /// The stretches since this was asked last.
    pub fn stretches(&self) -> Vec<Duration> {
        std::mem::take(&mut lock(&self.stretches))
    }
}

impl Drop for Stolen {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // A panic has been reported by its hook.
            let _ = thread.join();
        }
    }
}

fn lock(stretches: &Mutex<Vec<Duration>>) -> MutexGuard<'_, Vec<Duration>> {
    stretches.lock().unwrap_or_else(PoisonError::into_inner)
}

fn stat() -> String {
    std::fs::read_to_string("/proc/stat").unwrap_or_default()
}

/// What the host has taken of a CPU so far, according to `/proc/stat`; `None` if that does not say.
fn of_cpu(stat: &str, cpu: usize) -> Option<Duration> {
    let name = format!("cpu{cpu} ");
    let numbers = stat.lines().find_map(|line| line.strip_prefix(&name))?;
    // user nice system idle iowait irq softirq steal
    let steal: u64 = numbers.split_whitespace().nth(7)?.parse().ok()?;
    let second = rustix::param::clock_ticks_per_second() as f64;
    Some(Duration::from_secs_f64(steal as f64 / second))
}

/// Notes what was taken between two looks so long apart; `goes_on`: the last stretch may go on,
/// which is answered as well. It does for as long as the host takes most of the time, since a CPU
/// that runs for short times does nothing in them. Who looked late does not know.
fn note(stretches: &mut Vec<Duration>, goes_on: bool, taken: Duration, apart: Duration) -> bool {
    let is_stretch = 2 * taken > apart;
    match stretches.last_mut() {
        _ if !is_stretch => {}
        Some(stretch) if goes_on => *stretch += taken,
        _ => stretches.push(taken),
    }
    is_stretch
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_stretch_goes_on_while_the_host_takes_most() {
        let (mut seen, mut goes_on) = (Vec::new(), false);
        for (taken, apart) in [
            (0, 20),
            // The kernel counts it at its end, or in pieces.
            (100, 20),
            (20, 25),
            (10, 20),
            (30, 50),
            // Who looked late does not know.
            (30, 400),
        ] {
            goes_on = note(&mut seen, goes_on, taken * MS, apart * MS);
        }
        assert_eq!(seen, [120 * MS, 30 * MS]);
    }

    #[test]
    fn a_cpu_is_distinguished_from_the_total_and_from_cpu_ten() {
        let line = |name: &str, steal: u64| format!("{name} 1 2 3 4 5 6 7 {steal} 9 10\n");
        let stat = line("cpu ", 1000) + &line("cpu10", 30) + &line("cpu1", 50) + "intr 7\n";
        let second = rustix::param::clock_ticks_per_second() as f64;
        let seconds = |steal: f64| Some(Duration::from_secs_f64(steal / second));
        assert_eq!(of_cpu(&stat, 1), seconds(50.0));
        assert_eq!(of_cpu(&stat, 10), seconds(30.0));
        assert_eq!((of_cpu(&stat, 2), of_cpu("", 1)), (None, None));
    }
}

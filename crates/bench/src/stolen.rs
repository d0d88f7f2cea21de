//! For how long the machine's host takes a CPU at a stretch: whatever runs there stands still for as long, and no program can help it.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Time between two looks.
const LOOK: Duration = Duration::from_millis(20);

/// Looks at what the host takes of one CPU, until it is dropped. The kernel counts that after each stretch, in hundredths of a second.
pub struct Stolen {
    longest_us: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Stolen {
    /// Looks at this CPU from now on.
    ///
    /// # Errors
    /// When the system grants no thread.
    pub fn watch(cpu: usize) -> io::Result<Stolen> {
        let (longest_us, stop) = (
            Arc::new(AtomicU64::new(0)),
            Arc::new(AtomicBool::new(false)),
        );
        let (longest, stopped) = (Arc::clone(&longest_us), Arc::clone(&stop));
        let look = move || {
            let mut last = (Instant::now(), of_cpu(&stat(), cpu));
            let mut stretch = Duration::ZERO;
            while !stopped.load(Ordering::Relaxed) {
                std::thread::park_timeout(LOOK);
                let now = (Instant::now(), of_cpu(&stat(), cpu));
                let taken = now.1.saturating_sub(last.1);
                stretch = at_a_stretch(stretch, taken, now.0 - last.0);
                longest.fetch_max(stretch.as_micros() as u64, Ordering::Relaxed);
                last = now;
            }
        };
        let thread = std::thread::Builder::new()
            .name("stolen".to_owned())
            .spawn(look)?;
        Ok(Stolen {
            longest_us,
            stop,
            thread: Some(thread),
        })
    }

    /// The longest stretch since this was asked last.
    pub fn longest(&self) -> Duration {
        Duration::from_micros(self.longest_us.swap(0, Ordering::Relaxed))
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

fn stat() -> String {
    std::fs::read_to_string("/proc/stat").unwrap_or_default()
}

/// What the host has taken of a CPU so far, according to `/proc/stat`.
fn of_cpu(stat: &str, cpu: usize) -> Duration {
    let name = format!("cpu{cpu} ");
    let mut lines = stat.lines();
    let of_cpu = lines.find_map(|line| line.strip_prefix(&name));
    // user nice system idle iowait irq softirq steal
    let steal = of_cpu.and_then(|numbers| numbers.split_whitespace().nth(7)?.parse().ok());
    let steal: u64 = steal.unwrap_or(0);
    Duration::from_secs_f64(steal as f64 / rustix::param::clock_ticks_per_second() as f64)
}

/// How long a stretch is after a look that was so long after the one before: it goes on for as long as the host takes most of the time, since
/// a CPU that has a moment now and then does nothing in it. Who looked late does not know.
fn at_a_stretch(so_far: Duration, taken: Duration, apart: Duration) -> Duration {
    match 2 * taken > apart {
        true => so_far + taken,
        false => Duration::ZERO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_stretch_goes_on_while_the_host_takes_most() {
        let none = Duration::ZERO;
        // The kernel counts it at its end.
        assert_eq!(at_a_stretch(none, 100 * MS, 20 * MS), 100 * MS);
        // Or in pieces.
        assert_eq!(at_a_stretch(100 * MS, 20 * MS, 25 * MS), 120 * MS);
        assert_eq!(at_a_stretch(120 * MS, 10 * MS, 20 * MS), none);
        assert_eq!(at_a_stretch(none, 30 * MS, 400 * MS), none);
        assert_eq!(at_a_stretch(none, none, 20 * MS), none);
    }

    #[test]
    fn a_cpu_is_told_from_all_and_from_the_tenth() {
        let line = |name: &str, steal: u64| format!("{name} 1 2 3 4 5 6 7 {steal} 9 10\n");
        let stat = line("cpu ", 1000) + &line("cpu10", 30) + &line("cpu1", 50) + "intr 7\n";
        let second = rustix::param::clock_ticks_per_second() as f64;
        assert_eq!(of_cpu(&stat, 1), Duration::from_secs_f64(50.0 / second));
        assert_eq!(of_cpu(&stat, 10), Duration::from_secs_f64(30.0 / second));
        assert_eq!(of_cpu(&stat, 2), Duration::ZERO);
    }
}

//! Processes that an experiment starts: the same program with a hidden subcommand. They are killed
//! and reaped by their number when dropped, also after an error, and end without help when the
//! experiment's process is gone.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// How to start this program as a child.
#[derive(Clone, Debug)]
pub struct Launcher {
    program: PathBuf,
    arguments: Vec<String>,
    stop: Arc<AtomicBool>,
}

impl Launcher {
    /// This very program with the arguments that lead to its hidden subcommand. SIGINT and SIGTERM
    /// set the flag that every wait here checks, so that children are ended in order.
    pub fn this(arguments: &[&str]) -> Result<Launcher> {
        let stop = Arc::new(AtomicBool::new(false));
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            signal_hook::flag::register(signal, Arc::clone(&stop)).context("signal handler")?;
        }
        Ok(Launcher {
            program: std::env::current_exe().context("where is this program?")?,
            arguments: arguments.iter().map(|text| (*text).to_owned()).collect(),
            stop,
        })
    }

    /// Set when the experiment is to end.
    pub fn stop(&self) -> &Arc<AtomicBool> {
        &self.stop
    }

    /// An error once the experiment is to end.
    pub fn check(&self) -> Result<()> {
        if self.stop.load(Ordering::Relaxed) {
            bail!("ended by a signal");
        }
        Ok(())
    }

    /// Starts a child in a role.
    pub fn start(&self, name: &str, role: &impl Serialize) -> Result<Kid> {
        self.check()?;
        let mut child = Command::new(&self.program)
            .args(&self.arguments)
            .arg(serde_json::to_string(role)?)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("starting {name}"))?;
        let stdin = child.stdin.take();
        let (sender, lines) = channel();
        if let Some(stdout) = child.stdout.take() {
            std::thread::spawn(move || {
                for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                    if sender.send(line).is_err() {
                        break;
                    }
                }
            });
        }
        Ok(Kid {
            name: name.to_owned(),
            child,
            stdin,
            lines,
            stop: Arc::clone(&self.stop),
        })
    }
}

/// A child process; ended when dropped.
pub struct Kid {
    name: String,
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
    stop: Arc<AtomicBool>,
}

impl Kid {
    /// Its process number.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Tells it something, in one line.
    pub fn tell(&mut self, message: &impl Serialize) -> Result<()> {
        let line = serde_json::to_string(message)?;
        let Some(stdin) = &mut self.stdin else {
            bail!("{} was ordered to end", self.name);
        };
        writeln!(stdin, "{line}").with_context(|| format!("telling {}", self.name))
    }

    /// Its next line.
    pub fn hear<T: DeserializeOwned>(&mut self, patience: Duration) -> Result<T> {
        let until = Instant::now() + patience;
        loop {
            if self.stop.load(Ordering::Relaxed) {
                bail!("ended by a signal");
            }
            match self.lines.recv_timeout(Duration::from_millis(100)) {
                Ok(line) => {
                    return serde_json::from_str(&line)
                        .with_context(|| format!("{} said {line:?}", self.name));
                }
                // A signal to the whole group of processes may reach the child first.
                Err(RecvTimeoutError::Disconnected) if self.stop.load(Ordering::Relaxed) => {}
                Err(RecvTimeoutError::Disconnected) => bail!("{} ended early", self.name),
                Err(RecvTimeoutError::Timeout) if Instant::now() > until => {
                    bail!("{} said nothing for {patience:?}", self.name)
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// CPU time of all its threads so far.
    pub fn cpu(&self) -> Duration {
        process_cpu(self.pid())
    }
}

impl Drop for Kid {
    fn drop(&mut self) {
        self.stdin = None;
        // One that has already ended needs no killing.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// CPU time of a process's living threads, from the scheduler's own count in nanoseconds.
pub fn process_cpu(pid: u32) -> Duration {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else {
        return Duration::ZERO;
    };
    let on_cpu = threads.flatten().filter_map(|thread| {
        let line = std::fs::read_to_string(thread.path().join("schedstat")).ok()?;
        line.split(' ').next()?.parse::<u64>().ok()
    });
    Duration::from_nanos(on_cpu.sum())
}

/// Keeps the calling thread, and those it starts from now on, on one CPU. Says `false` where there
/// is no such CPU.
pub fn pin(cpu: usize) -> bool {
    let mut set = rustix::thread::CpuSet::new();
    if cpu >= rustix::thread::CpuSet::MAX_CPU {
        return false;
    }
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set).is_ok()
}

/// Lets the calling thread run on any CPU again.
pub fn unpin() {
    let mut set = rustix::thread::CpuSet::new();
    for cpu in 0..rustix::thread::CpuSet::MAX_CPU {
        set.set(cpu);
    }
    // The kernel leaves out CPUs that are not there; if it refuses, the thread stays where it was.
    let _ = rustix::thread::sched_setaffinity(None, &set);
}

/// An initiator's thread, on a CPU of its choice. Ends when dropped.
pub struct Initiator {
    is_real_time: bool,
}

impl Initiator {
    /// Makes the calling thread one. With `real_time`, no ordinary thread has the CPU beside it.
    /// Start children before: they would inherit both.
    ///
    /// # Errors
    /// When real time is asked for and the system refuses.
    pub fn on(cpu: usize, real_time: bool) -> Result<Initiator> {
        if real_time && !schedule("--fifo", "1")? {
            bail!("the system refuses real-time priority: try without --real-time");
        }
        pin(cpu);
        Ok(Initiator {
            is_real_time: real_time,
        })
    }
}

impl Drop for Initiator {
    fn drop(&mut self) {
        if self.is_real_time {
            // Giving up priority is always allowed.
            let _ = schedule("--other", "0");
        }
        unpin();
    }
}

/// Sets the calling thread's scheduling class and priority.
fn schedule(class: &str, priority: &str) -> Result<bool> {
    let thread = rustix::thread::gettid().as_raw_nonzero().to_string();
    let done = Command::new("chrt")
        .args([class, "--pid", priority, &thread])
        .stderr(Stdio::null())
        .status()
        .context("chrt, of util-linux")?;
    Ok(done.success())
}

/// How long the calling thread could have run so far and was not let: others had its CPU.
pub fn kept_waiting() -> Duration {
    let line = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let waited = line.split_whitespace().nth(1);
    Duration::from_nanos(waited.and_then(|word| word.parse().ok()).unwrap_or(0))
}

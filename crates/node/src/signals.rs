//! What signals do to this program.
//!
//! A serving process: SIGTERM and SIGINT end it in order, SIGHUP lets it read files again, and
//! SIGUSR1, SIGUSR2 and a terminal that is closed do nothing to it. A command that measures or
//! demonstrates ends in order at SIGTERM and SIGINT ([`stop_flag`], [`check`], [`sleep`]). A
//! command that writes one file removes its draft ([`Draft`]).

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;

use crate::reload::Reloader;

/// Signals that end a command.
const ENDING: [i32; 2] = [SIGINT, SIGTERM];
/// How often [`sleep`] checks the flag.
const LOOK: Duration = Duration::from_millis(50);

fn name(signal: i32) -> &'static str {
    match signal {
        SIGHUP => "SIGHUP",
        SIGINT => "SIGINT",
        SIGTERM => "SIGTERM",
        SIGUSR1 => "SIGUSR1",
        SIGUSR2 => "SIGUSR2",
        _ => "a signal",
    }
}

/// The signals of a serving process from [`take`] on. Those that arrive before [`Taken::handle`]
/// are kept for it.
pub struct Taken {
    signals: Signals,
}

/// Takes signals from here on: the first thing that a serving process does, because the default
/// action of each is to end it.
///
/// # Errors
/// When the system grants no handler.
pub fn take() -> Result<Taken> {
    let taken = [SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2];
    let signals = Signals::new(taken).context("signal handler")?;
    Ok(Taken { signals })
}

impl Taken {
    /// Does what the signals ask for, also those that have arrived already. Returns the flag that
    /// SIGTERM and SIGINT set; a second one changes nothing.
    ///
    /// # Errors
    /// When the system grants no thread.
    pub fn handle(mut self, reloader: Reloader) -> Result<Arc<AtomicBool>> {
        let stop = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&stop);
        let act = move |signal| match signal {
            SIGHUP => reloader.reload(),
            SIGINT | SIGTERM => {
                tracing::info!(
                    "{}: this node hands over what it leads, and ends",
                    name(signal)
                );
                // After the line, which the log has before those of the end.
                flag.store(true, Ordering::Relaxed);
            }
            other => tracing::info!("{}: nothing is done", name(other)),
        };
        // What has arrived already is done here: a node that is to end has made nothing yet.
        self.signals.pending().for_each(&act);
        std::thread::Builder::new()
            .name("cyclone-signals".to_owned())
            .spawn(move || self.signals.forever().for_each(act))
            .context("the thread for signals")?;
        Ok(stop)
    }
}

/// What [`stop_flag`] registers, once.
static STOP: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);
static IS_REGISTERED: Mutex<bool> = Mutex::new(false);

/// The flag that SIGINT and SIGTERM set from here on in a command. What was started is ended in
/// order, and temporary files are removed; a second signal changes nothing.
///
/// # Errors
/// When the system grants no handler.
pub fn stop_flag() -> Result<&'static Arc<AtomicBool>> {
    let mut is_registered = IS_REGISTERED.lock().unwrap_or_else(PoisonError::into_inner);
    if !*is_registered {
        for signal in ENDING {
            signal_hook::flag::register(signal, Arc::clone(&STOP)).context("signal handler")?;
        }
        *is_registered = true;
    }
    Ok(&STOP)
}

/// An error once a signal has set the flag of [`stop_flag`], for loops of a command.
///
/// # Errors
/// The command is to end.
pub fn check() -> Result<()> {
    if STOP.load(Ordering::Relaxed) {
        bail!("ended by a signal");
    }
    Ok(())
}

/// Sleeps, at most until a signal sets the flag of [`stop_flag`].
///
/// # Errors
/// The command is to end.
pub fn sleep(time: Duration) -> Result<()> {
    let until = Instant::now() + time;
    loop {
        check()?;
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        std::thread::sleep(left.min(LOOK));
    }
}

/// The name of a file that a command writes. SIGINT and SIGTERM end the command at once, as they do
/// by default, and remove the file before; dropping this removes it as well, if it is still there.
pub struct Draft {
    path: Arc<Mutex<Option<PathBuf>>>,
}

impl Draft {
    /// From here on.
    ///
    /// # Errors
    /// When the system grants no handler or no thread.
    pub fn new(path: PathBuf) -> Result<Draft> {
        let path = Arc::new(Mutex::new(Some(path)));
        let mut signals = Signals::new(ENDING).context("signal handler")?;
        let draft = Draft {
            path: Arc::clone(&path),
        };
        std::thread::Builder::new()
            .name("cyclone-signals".to_owned())
            .spawn(move || {
                for signal in signals.forever() {
                    remove(&path);
                    // Does not return: the default action of both ends this program.
                    let _ = signal_hook::low_level::emulate_default_handler(signal);
                }
            })
            .context("the thread for signals")?;
        Ok(draft)
    }

    /// Keeps the file from here on, whatever happens.
    pub fn keep(self) {
        self.path
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        remove(&self.path);
    }
}

fn remove(path: &Mutex<Option<PathBuf>>) {
    let mut path = path.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(path) = path.take() {
        // It may not have been made yet, or have another name by now.
        let _ = std::fs::remove_file(path);
    }
}

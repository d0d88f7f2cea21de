//! What a serving process does about signals: SIGTERM and SIGINT end it in order, SIGHUP lets it
//! read files again, and SIGUSR1, SIGUSR2 and a terminal that is closed do nothing to it.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;

use crate::reload::Reloader;

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

/// Takes signals from here on. Answers the flag that SIGTERM and SIGINT set; a second one changes
/// nothing.
///
/// # Errors
/// When the system grants no handler or no thread.
pub fn take(reloader: Reloader) -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&stop)).context("signal handler")?;
    }
    let taken = [SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2];
    let mut signals = Signals::new(taken).context("signal handler")?;
    std::thread::Builder::new()
        .name("cyclone-signals".to_owned())
        .spawn(move || {
            for signal in signals.forever() {
                match signal {
                    SIGHUP => reloader.reload(),
                    SIGINT | SIGTERM => tracing::info!(
                        "{}: this node hands over what it leads, and ends",
                        name(signal)
                    ),
                    other => tracing::info!("{}: nothing is done", name(other)),
                }
            }
        })
        .context("the thread for signals")?;
    Ok(stop)
}

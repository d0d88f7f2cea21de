//! Who runs, and how one sleeps until another rings.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use rustix::thread::futex;
use rustix::time::Timespec;

use super::layout::{Control, header};

/// A process, for as long as the machine is up: process ids come back, start times do not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    pub pid: u32,
    /// Clock ticks since boot; 0 while not known yet.
    pub start: u64,
}

impl Identity {
    pub(super) fn own() -> io::Result<Identity> {
        let pid = std::process::id();
        let start = start_time(pid)?;
        Ok(Identity { pid, start })
    }
}

/// Field 22 of the process's stat file. The second field is the program's name and may contain
/// anything.
fn start_time(pid: u32) -> io::Result<u64> {
    let text = std::fs::read(format!("/proc/{pid}/stat"))?;
    let text = String::from_utf8_lossy(&text);
    let field = text
        .rsplit_once(')')
        .and_then(|(_, rest)| rest.split_whitespace().nth(19))
        .and_then(|field| field.parse().ok());
    field.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
}

/// The kernel's boot id: another one, and no process of before runs.
pub(super) fn boot_id() -> io::Result<[u64; 2]> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let hex: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    let number = u128::from_str_radix(&hex, 16);
    let number = number.map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
    Ok([number as u64, (number >> 64) as u64])
}

/// A process to look after.
#[derive(Debug)]
pub(super) enum Process {
    Ourselves,
    Other(OwnedFd),
    Gone,
}

impl Process {
    /// # Errors
    /// When the system has no descriptor left: then nothing is known.
    pub(super) fn find(wanted: Identity, own: Identity) -> io::Result<Process> {
        if wanted.pid == own.pid {
            let is_own = wanted.start == 0 || wanted.start == own.start;
            return Ok(if is_own {
                Process::Ourselves
            } else {
                Process::Gone
            });
        }
        let raw = i32::try_from(wanted.pid).ok().filter(|pid| *pid > 0);
        let Some(pid) = raw.and_then(Pid::from_raw) else {
            return Ok(Process::Gone);
        };
        // The descriptor first: if the start time then read is the wanted one, the descriptor is
        // the wanted process's.
        match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(descriptor) => match start_time(wanted.pid) {
                Ok(start) if wanted.start != 0 && start != wanted.start => Ok(Process::Gone),
                _ => Ok(Process::Other(descriptor)),
            },
            Err(rustix::io::Errno::SRCH | rustix::io::Errno::INVAL) => Ok(Process::Gone),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether every thread of it has ended. A stopped process is not gone.
    pub(super) fn is_gone(&self) -> bool {
        match self {
            Process::Ourselves => false,
            Process::Gone => true,
            Process::Other(descriptor) => {
                let mut wanted = [PollFd::new(descriptor, PollFlags::IN)];
                let now = Timespec::default();
                matches!(poll(&mut wanted, Some(&now)), Ok(1..))
            }
        }
    }

    /// Kills it, unless it is this one; returns whether that was tried.
    pub(super) fn kill(&self) -> bool {
        match self {
            Process::Other(descriptor) => pidfd_send_signal(descriptor, Signal::KILL).is_ok(),
            _ => false,
        }
    }
}

/// The futex: the low half of the doorbell's word.
fn futex_word(control: &Control) -> &AtomicU32 {
    let area = control.area.part(header::DOORBELL, 8);
    // SAFETY: mapped for the life of `control`, aligned, and only ever accessed atomically (x86-64
    // is little-endian: the low half comes first).
    unsafe { AtomicU32::from_ptr(area.as_ptr().cast()) }
}

/// Tells the owner that something may concern its program. A system call only if it sleeps.
pub(super) fn ring(control: &Control) {
    control.area.fetch_add(header::DOORBELL, 1);
    if control.load(header::SLEEPS) != 0 {
        // Who does not sleep any more looks anyway.
        let _ = futex::wake(futex_word(control), futex::Flags::empty(), 1);
    }
}

/// Sleeps until the doorbell has moved away from `seen`, at most so long.
pub(super) fn sleep(control: &Control, seen: u64, at_most: Duration) {
    control.store(header::SLEEPS, 1);
    if control.load(header::DOORBELL) == seen {
        let timeout = Timespec {
            tv_sec: at_most.as_secs().min(3600) as i64,
            tv_nsec: at_most.subsec_nanos().into(),
        };
        // Woken, timed out, interrupted or changed before: all the same to the caller, who looks.
        let word = futex_word(control);
        let _ = futex::wait(word, futex::Flags::empty(), seen as u32, Some(&timeout));
    }
    control.store(header::SLEEPS, 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_are_known_by_their_start() {
        let own = Identity::own().expect("own");
        assert!(matches!(Process::find(own, own), Ok(Process::Ourselves)));
        let mut child = std::process::Command::new("sleep")
            .arg("100")
            .spawn()
            .expect("child");
        let pid = child.id();
        let start = start_time(pid).expect("start");
        let found = Process::find(Identity { pid, start }, own).expect("found");
        assert!(!found.is_gone());
        let later = Identity {
            pid,
            start: start + 1,
        };
        assert!(Process::find(later, own).expect("other").is_gone());
        assert!(found.kill());
        child.wait().expect("ended");
        assert!(found.is_gone());
        let gone = Process::find(Identity { pid, start }, own).expect("gone");
        assert!(gone.is_gone());
        assert_ne!(boot_id().expect("boot id"), [0, 0]);
    }
}

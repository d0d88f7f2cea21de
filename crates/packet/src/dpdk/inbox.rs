//! How datagrams come to a driver that polls no card: from the one that does, through a queue of
//! fixed length, with a bell for a thread that sleeps.
//!
//! ```text
//! looks at cards    put, then ring if the other waits          Door
//! has a door        takes; finds nothing: waits, looks again   Inbox
//! ```
//! Between putting and asking whether somebody waits, and between waiting and looking again,
//! everything before is seen by the other: one of the two finds the datagram.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};

use cyclone_pmem::payload::Payload;

/// A datagram and its sender.
pub(super) type RxDatagram = (SocketAddr, Payload);

struct Notifier {
    fd: OwnedFd,
    is_waiting: AtomicBool,
}

/// Where datagrams for another driver are put.
pub(super) struct InboxSender {
    queue: SyncSender<RxDatagram>,
    notifier: Arc<Notifier>,
    /// Datagrams for which there was no room.
    dropped: Arc<AtomicU64>,
}

/// Where that driver finds them.
pub(super) struct Inbox {
    queue: Receiver<RxDatagram>,
    notifier: Arc<Notifier>,
    dropped: Arc<AtomicU64>,
}

/// A queue for so many datagrams.
///
/// # Errors
/// When the system grants no descriptor.
pub(super) fn inbox(length: usize) -> io::Result<(InboxSender, Inbox)> {
    // SAFETY: a plain system call; a non-negative result is a descriptor that nothing else owns.
    let fd = unsafe {
        let fd = libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        OwnedFd::from_raw_fd(fd)
    };
    let notifier = Arc::new(Notifier {
        fd,
        is_waiting: AtomicBool::new(false),
    });
    let dropped = Arc::new(AtomicU64::new(0));
    let (sender, receiver) = sync_channel(length);
    let door = InboxSender {
        queue: sender,
        notifier: Arc::clone(&notifier),
        dropped: Arc::clone(&dropped),
    };
    let inbox = Inbox {
        queue: receiver,
        notifier,
        dropped,
    };
    Ok((door, inbox))
}

impl InboxSender {
    /// Puts a datagram into the queue; where it is full the datagram is dropped, and counted.
    /// False: the receiver is gone.
    pub(super) fn put(&self, letter: RxDatagram) -> bool {
        match self.queue.try_send(letter) {
            Ok(()) => self.notify(),
            Err(TrySendError::Full(_)) => {
                self.dropped.fetch_add(1, Ordering::Relaxed);
            }
            Err(TrySendError::Disconnected(_)) => return false,
        }
        true
    }

    fn notify(&self) {
        fence(Ordering::SeqCst);
        if self.notifier.is_waiting.load(Ordering::Relaxed)
            && self.notifier.is_waiting.swap(false, Ordering::Relaxed)
        {
            let one = 1u64.to_ne_bytes();
            // It fails only where so many have rung already that the counter is full: the
            // descriptor is readable. SAFETY: the bytes are ours and as many as said.
            unsafe { libc::write(self.notifier.fd.as_raw_fd(), one.as_ptr().cast(), one.len()) };
        }
    }
}

impl Inbox {
    /// Appends up to `most` datagrams. If there is none, the descriptor becomes readable with the
    /// next one.
    pub(super) fn take(&self, out: &mut Vec<RxDatagram>, most: usize) -> usize {
        let before = out.len();
        out.extend(self.queue.try_iter().take(most));
        if out.len() == before && most > 0 && !self.notifier.is_waiting.load(Ordering::Relaxed) {
            self.notifier.is_waiting.store(true, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            out.extend(self.queue.try_iter().take(most));
        }
        out.len() - before
    }

    pub(super) fn fd(&self) -> RawFd {
        self.notifier.fd.as_raw_fd()
    }

    /// The descriptor was seen to be readable, and is not any more.
    pub(super) fn on_readable(&self) {
        let mut count = [0u8; 8];
        // Where it was not rung there is nothing to read.
        // SAFETY: the buffer is ours and as long as said.
        unsafe { libc::read(self.fd(), count.as_mut_ptr().cast(), count.len()) };
    }

    /// Datagrams for which there was no room.
    pub(super) fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn letter(number: u16) -> RxDatagram {
        (SocketAddr::from(([10, 0, 0, 1], number)), Payload::new())
    }

    /// Waits for the descriptor; false after so many milliseconds.
    fn is_readable(inbox: &Inbox, wait_ms: i32) -> bool {
        let mut entry = libc::pollfd {
            fd: inbox.fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one entry, which lives for the call.
        unsafe { libc::poll(&mut entry, 1, wait_ms) > 0 }
    }

    #[test]
    fn who_waits_is_rung_once_and_who_works_is_not() {
        let (door, inbox) = inbox(4).unwrap();
        let mut out = Vec::new();
        assert!(door.put(letter(1)));
        assert!(!is_readable(&inbox, 0), "no thread waits yet");
        assert_eq!(inbox.take(&mut out, 8), 1);
        assert_eq!(inbox.take(&mut out, 8), 0);
        assert!(door.put(letter(2)) && door.put(letter(3)));
        assert!(is_readable(&inbox, 0));
        inbox.on_readable();
        assert!(!is_readable(&inbox, 0));
        assert_eq!(inbox.take(&mut out, 1), 1);
        assert_eq!(inbox.take(&mut out, 8), 1);
        let ports: Vec<u16> = out.iter().map(|(from, _)| from.port()).collect();
        assert_eq!(ports, [1, 2, 3]);
    }

    #[test]
    fn a_full_queue_drops_and_a_closed_one_refuses() {
        let (door, inbox) = inbox(2).unwrap();
        assert!((0..5).all(|number| door.put(letter(number))));
        assert_eq!(inbox.dropped(), 3);
        let mut out = Vec::new();
        assert_eq!(inbox.take(&mut out, 8), 2);
        drop(inbox);
        assert!(!door.put(letter(9)));
    }

    /// One puts without pause or with some, the other sleeps whenever it finds nothing: none is
    /// slept through.
    #[test]
    fn no_datagram_is_slept_through() {
        const COUNT: u16 = 20_000;
        let (door, inbox) = inbox(64).unwrap();
        let sender = std::thread::spawn(move || {
            for number in 0..COUNT {
                // As many as there is room for; none may be dropped here.
                while door.queue.try_send(letter(number)).is_err() {
                    std::thread::yield_now();
                }
                door.notify();
                if number % 64 == 0 {
                    std::thread::sleep(std::time::Duration::from_micros(u64::from(number) % 150));
                }
            }
        });
        let mut out = Vec::new();
        while out.len() < usize::from(COUNT) {
            if inbox.take(&mut out, 8) == 0 {
                assert!(is_readable(&inbox, 20_000), "slept through: {}", out.len());
                inbox.on_readable();
            }
        }
        sender.join().unwrap();
        assert!(out.iter().zip(0..).all(|((from, _), n)| from.port() == n));
    }
}

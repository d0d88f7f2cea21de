//! Giving memory back to the system after clients have held much of it: replies that were not read,
//! say. The allocator would do so automatically only as the process goes on allocating, and a
//! thread that others wait for has no time for it.

use std::io;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::sleep;
use std::time::Duration;

/// Less is not worth it.
const LEAST_BYTES: usize = 32 << 20;
/// When to give back after clients have freed memory: it is freed a portion at a time.
const PAUSES: [Duration; 3] = [
    Duration::from_millis(500),
    Duration::from_secs(1),
    Duration::from_secs(4),
];

/// Watches how much memory clients hold. Its thread sleeps until much of it was freed.
pub struct Trimmer {
    most_bytes: usize,
    wake: SyncSender<()>,
}

impl Trimmer {
    /// Starts the thread, which ends when this is dropped.
    ///
    /// # Errors
    /// When the system starts no thread.
    pub fn start() -> io::Result<Trimmer> {
        let (wake, woken) = sync_channel(1);
        std::thread::Builder::new()
            .name("cyclone-trim".to_owned())
            .spawn(move || trim(&woken))?;
        Ok(Trimmer {
            most_bytes: 0,
            wake,
        })
    }

    /// Notes how much clients hold now.
    pub fn note(&mut self, held_bytes: usize) {
        if self.has_fallen(held_bytes) {
            // One that is awake already will look again.
            let _ = self.wake.try_send(());
        }
    }

    /// Whether it is less than half of what it was, and the difference is worth giving back.
    fn has_fallen(&mut self, held_bytes: usize) -> bool {
        self.most_bytes = self.most_bytes.max(held_bytes);
        let has_fallen =
            held_bytes <= self.most_bytes / 2 && self.most_bytes - held_bytes >= LEAST_BYTES;
        if has_fallen {
            self.most_bytes = held_bytes;
        }
        has_fallen
    }
}

fn trim(woken: &Receiver<()>) {
    while woken.recv().is_ok() {
        for pause in PAUSES {
            sleep(pause);
            cyclone_allocator::release_free_memory();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trimmer_is_woken_once_when_much_was_freed() {
        let (wake, woken) = sync_channel(1);
        let mut trimmer = Trimmer {
            most_bytes: 0,
            wake,
        };
        let mib = 1 << 20;
        for (held, is_woken) in [
            (0, false),
            (31 * mib, false),
            (0, false),
            (100 * mib, false),
            (51 * mib, false),
            (50 * mib, true),
            (49 * mib, false),
            (18 * mib, true),
            (0, false),
            (1000 * mib, false),
            (0, true),
            (0, false),
        ] {
            trimmer.note(held);
            assert_eq!(woken.try_recv().is_ok(), is_woken, "{held}");
        }
    }
}

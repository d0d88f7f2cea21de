//! How long to wait for a card whose queue is full: as long as it goes on sending, but not without
//! limit.
//!
//! The datagrams of one long message are more than a queue has slots. A sender that gave up at the
//! first full queue would lose the same tail of it with each repetition. No clock: it comes with
//! each call.

/// A card that has taken nothing for so long stands still, µs.
const STALL_US: u64 = 50;
/// One call of the driver waits for so long in all, at most, µs.
const MAX_WAIT_US: u64 = 2_000;

/// How long one call of the driver may still wait.
#[derive(Default)]
pub(super) struct TxBackoff {
    /// Known from the first wait on.
    until_us: Option<u64>,
}

impl TxBackoff {
    /// Hands `packets` over with `give`, which answers how many more were taken. If the queue is
    /// full and `waits`, tries again for a while. Answers how many were taken, and with how many
    /// calls.
    pub(super) fn send_with_retry(
        &mut self,
        packets: u64,
        waits: bool,
        mut now_us: impl FnMut() -> u64,
        mut give: impl FnMut() -> u64,
    ) -> (u64, u64) {
        let (mut taken, mut calls) = (0, 0);
        let (mut since_us, mut is_last) = (None, false);
        while taken < packets {
            let more = give();
            if more > 0 {
                taken += more;
                calls += 1;
                (since_us, is_last) = (None, false);
                continue;
            }
            if !waits || is_last {
                break;
            }
            let now = now_us();
            let stalled = *since_us.get_or_insert(now) + STALL_US;
            let until = *self.until_us.get_or_insert(now + MAX_WAIT_US);
            // Once more when the time is over: this thread may have been off its CPU for most of
            // it.
            is_last = now >= stalled.min(until);
            std::hint::spin_loop();
        }
        (taken, calls)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// A card with a ring of some slots, that sends one packet in so many µs; each poll takes one.
    struct Ring {
        now_us: Cell<u64>,
        slots: u64,
        each_us: u64,
        gone: Cell<u64>,
        given: Cell<u64>,
    }

    impl Ring {
        fn new(slots: u64, each_us: u64) -> Ring {
            Ring {
                now_us: Cell::new(1000),
                slots,
                each_us,
                gone: Cell::new(0),
                given: Cell::new(0),
            }
        }

        /// Hands over a burst, as the driver does.
        fn burst(&self, patience: &mut TxBackoff, packets: u64, waits: bool) -> u64 {
            let before = self.given.get();
            let now = || self.now_us.get();
            let give = || {
                self.now_us.set(self.now_us.get() + 1);
                let sent = (self.now_us.get() - 1000)
                    .checked_div(self.each_us)
                    .unwrap_or(0);
                self.gone.set(sent.min(self.given.get()));
                let free = self.slots - (self.given.get() - self.gone.get());
                let left = packets - (self.given.get() - before);
                self.given.set(self.given.get() + free.min(left));
                free.min(left)
            };
            patience.send_with_retry(packets, waits, now, give).0
        }
    }

    /// How much of a message of so many packets a card takes in one call of the driver, and how
    /// long that takes.
    fn message(ring: &Ring, packets: u64, waits: bool) -> (u64, u64) {
        let mut patience = TxBackoff::default();
        let bursts = packets / 32;
        let taken = (0..bursts).map(|_| ring.burst(&mut patience, 32, waits));
        (taken.sum(), ring.now_us.get() - 1000)
    }

    #[test]
    fn a_long_message_gets_through_a_short_queue_that_moves() {
        let ring = Ring::new(1024, 1);
        assert_eq!(message(&ring, 2048, true).0, 2048);
        // A slow one as well, as long as it moves at all.
        let ring = Ring::new(1024, STALL_US - 1);
        let (taken, _) = message(&ring, 1024 + 32, true);
        assert_eq!(taken, 1024 + 32);
    }

    #[test]
    fn a_sender_that_does_not_wait_gives_up_at_once() {
        let ring = Ring::new(1024, 0);
        let (taken, took_us) = message(&ring, 2048, false);
        assert_eq!((taken, took_us), (1024, 2 * 1024 / 32));
    }

    #[test]
    fn a_card_that_stands_still_is_not_waited_for() {
        let ring = Ring::new(64, 0);
        let mut patience = TxBackoff::default();
        assert_eq!(ring.burst(&mut patience, 64, true), 64);
        let before = ring.now_us.get();
        assert_eq!(ring.burst(&mut patience, 32, true), 0);
        let waited = ring.now_us.get() - before;
        assert!((STALL_US..STALL_US + 5).contains(&waited), "{waited} µs");
    }

    #[test]
    fn one_call_waits_no_longer_than_it_may() {
        let ring = Ring::new(64, STALL_US - 1);
        let (taken, took_us) = message(&ring, 32 * 1000, true);
        assert!(taken > 64, "{taken}");
        // Then each further burst is tried twice.
        assert!(took_us <= MAX_WAIT_US + 2 * 1000 + 100, "{took_us} µs");
        // The next call has new patience.
        let ring_taken = message(&ring, 64, true).0;
        assert!(ring_taken > 0);
    }

    #[test]
    fn a_thread_that_was_off_its_cpu_tries_once_more() {
        let now = Cell::new(0);
        let mut answers = [0, 7].into_iter();
        let give = || {
            now.set(now.get() + 10 * MAX_WAIT_US);
            answers.next().unwrap_or(0)
        };
        let mut patience = TxBackoff::default();
        let first = patience.send_with_retry(7, true, || now.get(), give);
        assert_eq!(first, (7, 1));
    }
}

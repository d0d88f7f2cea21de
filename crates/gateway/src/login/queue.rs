//! The logins that wait for the thread. Addresses take turns, so that none waits for one that asks
//! much.

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Most that wait.
pub(super) const MOST: usize = 4096;
/// Bits of an IPv6 address that tell one subscriber from another.
const SUBSCRIBER_BITS: u32 = 64;

/// A login to be checked.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct LoginRequest {
    pub(super) ticket: u64,
    pub(super) user: Vec<u8>,
    pub(super) password: Vec<u8>,
}

/// Those that wait, in the order in which they are checked.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    /// By whose they are; no list is empty.
    by_subscriber: BTreeMap<IpAddr, VecDeque<LoginRequest>>,
    /// Whose turn it is; each of the above once.
    turn_order: VecDeque<IpAddr>,
    /// Those of clients that have most likely gone.
    deprioritized: VecDeque<LoginRequest>,
    closed: bool,
}

/// Whose an address is.
fn subscriber(peer: IpAddr) -> IpAddr {
    match peer.to_canonical() {
        IpAddr::V6(addr) => {
            let mask = u128::MAX << (128 - SUBSCRIBER_BITS);
            IpAddr::V6(Ipv6Addr::from_bits(addr.to_bits() & mask))
        }
        v4 => v4,
    }
}

impl Waiting {
    fn len(&self) -> usize {
        self.by_subscriber
            .values()
            .map(VecDeque::len)
            .sum::<usize>()
            + self.deprioritized.len()
    }

    /// Adds one; where all places are taken, in place of another one, whose ticket it answers.
    ///
    /// # Errors
    /// The question, if its asker has as many waiting as anybody, or none are taken any more.
    pub(super) fn push(
        &mut self,
        peer: IpAddr,
        question: LoginRequest,
    ) -> Result<Option<u64>, LoginRequest> {
        if self.closed {
            return Err(question);
        }
        let peer = subscriber(peer);
        let mut displaced = None;
        if self.len() >= MOST {
            displaced = match self.deprioritized.pop_back() {
                Some(gone) => Some(gone.ticket),
                None => self.displace(peer),
            };
            if displaced.is_none() {
                return Err(question);
            }
        }
        let own = self.by_subscriber.entry(peer).or_default();
        if own.is_empty() {
            self.turn_order.push_back(peer);
        }
        own.push_back(question);
        Ok(displaced)
    }

    /// Takes the latest of the subscriber that has most, if that is more than `peer` would have.
    fn displace(&mut self, peer: IpAddr) -> Option<u64> {
        let own = self.by_subscriber.get(&peer).map_or(0, VecDeque::len);
        let (_, most) = self
            .by_subscriber
            .iter_mut()
            .max_by_key(|(_, list)| list.len())?;
        // More than one is left, so no list becomes empty.
        (most.len() > own + 1)
            .then(|| most.pop_back())
            .flatten()
            .map(|question| question.ticket)
    }

    /// Takes out the next.
    fn pop(&mut self) -> Option<LoginRequest> {
        let Some(peer) = self.turn_order.pop_front() else {
            return self.deprioritized.pop_front();
        };
        let own = self.by_subscriber.get_mut(&peer)?;
        let question = own.pop_front();
        match own.is_empty() {
            true => drop(self.by_subscriber.remove(&peer)),
            false => self.turn_order.push_back(peer),
        }
        question
    }

    /// Takes out a certain one, if it still waits.
    pub(super) fn take(&mut self, ticket: u64, peer: IpAddr) -> Option<LoginRequest> {
        let place =
            |list: &VecDeque<LoginRequest>| list.iter().position(|one| one.ticket == ticket);
        if let Some(at) = place(&self.deprioritized) {
            return self.deprioritized.remove(at);
        }
        let peer = subscriber(peer);
        let own = self.by_subscriber.get_mut(&peer)?;
        let question = place(own).and_then(|at| own.remove(at));
        if own.is_empty() {
            self.by_subscriber.remove(&peer);
            self.turn_order.retain(|turn| *turn != peer);
        }
        question
    }

    /// Lets all others go before one.
    pub(super) fn defer(&mut self, ticket: u64, peer: IpAddr) {
        if let Some(question) = self.take(ticket, peer) {
            self.deprioritized.push_back(question);
        }
    }

    /// Takes and hands out no more.
    pub(super) fn close(&mut self) {
        self.closed = true;
    }
}

/// The same, between the loop and the thread.
#[derive(Debug, Default)]
pub(super) struct Queue {
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

impl Queue {
    /// No panic leaves the lists half changed.
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes what waits.
    pub(super) fn change<R>(&self, change: impl FnOnce(&mut Waiting) -> R) -> R {
        let result = change(&mut self.lock());
        self.changed.notify_one();
        result
    }

    /// Waits for the next; `None` once it is closed.
    pub(super) fn next(&self) -> Option<LoginRequest> {
        let mut waiting = self.lock();
        loop {
            if waiting.closed {
                return None;
            }
            if let Some(question) = waiting.pop() {
                return Some(question);
            }
            waiting = self
                .changed
                .wait(waiting)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn question(ticket: u64) -> LoginRequest {
        LoginRequest {
            ticket,
            user: b"ada".to_vec(),
            password: b"guess".to_vec(),
        }
    }

    fn addr(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    fn order(waiting: &mut Waiting) -> Vec<u64> {
        std::iter::from_fn(|| waiting.pop().map(|one| one.ticket)).collect()
    }

    #[test]
    fn addresses_take_turns() {
        let mut waiting = Waiting::default();
        for ticket in 0..5 {
            assert_eq!(waiting.push(addr(1), question(ticket)), Ok(None));
        }
        assert_eq!(waiting.push(addr(2), question(10)), Ok(None));
        assert_eq!(waiting.push(addr(3), question(20)), Ok(None));
        assert_eq!(waiting.push(addr(2), question(11)), Ok(None));
        assert_eq!(order(&mut waiting), [0, 10, 20, 1, 11, 2, 3, 4]);
        assert_eq!(waiting.len(), 0);
    }

    /// A subscriber that has a network of 2^64 addresses counts as one all the same.
    #[test]
    fn a_subscriber_is_one_however_many_addresses() {
        let v6 = |text: &str| -> IpAddr { text.parse().unwrap() };
        assert_eq!(
            subscriber(v6("2001:db8::1")),
            subscriber(v6("2001:db8::ffff:2"))
        );
        assert_ne!(
            subscriber(v6("2001:db8::1")),
            subscriber(v6("2001:db8:0:1::1"))
        );
        assert_eq!(subscriber(v6("::ffff:10.0.0.1")), addr(1));
        assert_ne!(subscriber(addr(1)), subscriber(addr(2)));
    }

    #[test]
    fn a_full_queue_is_shared() {
        let mut waiting = Waiting::default();
        for ticket in 0..MOST as u64 {
            assert_eq!(waiting.push(addr(1), question(ticket)), Ok(None));
        }
        assert!(waiting.push(addr(1), question(9999)).is_err(), "its share");
        // Another gets the place of the latest, and its turn at once.
        assert_eq!(
            waiting.push(addr(2), question(10_000)),
            Ok(Some(MOST as u64 - 1))
        );
        assert_eq!(waiting.len(), MOST);
        assert_eq!(waiting.pop().unwrap().ticket, 0);
        assert_eq!(waiting.pop().unwrap().ticket, 10_000);
    }

    #[test]
    fn who_has_gone_is_forgotten_and_who_may_have_comes_last() {
        let mut waiting = Waiting::default();
        for ticket in 0..4 {
            assert_eq!(waiting.push(addr(1), question(ticket)), Ok(None));
        }
        assert_eq!(waiting.push(addr(2), question(10)), Ok(None));
        waiting.defer(0, addr(1));
        assert_eq!(waiting.take(2, addr(1)).unwrap().ticket, 2);
        assert_eq!(waiting.take(10, addr(2)).unwrap().ticket, 10);
        assert_eq!(waiting.take(10, addr(2)), None);
        waiting.defer(77, addr(9));
        assert_eq!(order(&mut waiting), [1, 3, 0]);
        // Those that may have gone lose their places first.
        for ticket in 0..MOST as u64 {
            assert_eq!(waiting.push(addr(1), question(ticket)), Ok(None));
        }
        waiting.defer(5, addr(1));
        assert_eq!(waiting.push(addr(1), question(9999)), Ok(Some(5)));
        assert_eq!(waiting.take(5, addr(1)), None);
    }
}

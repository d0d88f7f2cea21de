//! A network in memory for tests: deterministic from its seed, as unkind as asked.

use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cyclone_pmem::payload::Payload;
use cyclone_pmem::pool::Pool;

use crate::driver::{Datagram, Driver, DriverStats, receive_waiting};

/// What the network does to datagrams; probabilities from 0 to 1, each on its own.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Faults {
    /// Lost.
    pub loss: f64,
    /// Delivered twice.
    pub duplicate: f64,
    /// Delivered before some of those sent earlier.
    pub reorder: f64,
    /// One bit flipped.
    pub corrupt: f64,
    /// Cut short.
    pub truncate: f64,
}

struct Net {
    random: u64,
    faults: Faults,
    blocked: HashSet<(SocketAddr, SocketAddr)>,
    inboxes: HashMap<SocketAddr, VecDeque<(SocketAddr, Vec<u8>)>>,
    inbox_limit: usize,
    captured: Option<Vec<(SocketAddr, SocketAddr, Vec<u8>)>>,
}

impl Net {
    /// xorshift64*: good enough to choose faults, and the same everywhere.
    fn next(&mut self) -> u64 {
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        self.random.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    fn chance(&mut self, probability: f64) -> bool {
        probability > 0.0 && ((self.next() >> 11) as f64) < probability * (1u64 << 53) as f64
    }

    fn deliver(&mut self, from: SocketAddr, to: SocketAddr, mut bytes: Vec<u8>) {
        if let Some(captured) = &mut self.captured {
            captured.push((from, to, bytes.clone()));
        }
        let faults = self.faults;
        if self.blocked.contains(&(from, to)) || self.chance(faults.loss) {
            return;
        }
        let copies = if self.chance(faults.duplicate) { 2 } else { 1 };
        for _ in 0..copies {
            let mut copy = if copies == 1 {
                std::mem::take(&mut bytes)
            } else {
                bytes.clone()
            };
            if !copy.is_empty() && self.chance(faults.corrupt) {
                let at = self.next() as usize % copy.len();
                copy[at] ^= 1 << (self.next() % 8);
            }
            if !copy.is_empty() && self.chance(faults.truncate) {
                let len = self.next() as usize % copy.len();
                copy.truncate(len);
            }
            let late = self.chance(faults.reorder);
            let back = self.next() as usize;
            let limit = self.inbox_limit;
            let Some(inbox) = self.inboxes.get_mut(&to) else {
                return;
            };
            if inbox.len() >= limit {
                return;
            }
            let at = if late {
                inbox.len() - back % (inbox.len() + 1)
            } else {
                inbox.len()
            };
            inbox.insert(at, (from, copy));
        }
    }
}

/// The network; cheap to clone, all clones are the same one.
#[derive(Clone)]
pub struct MemNet {
    net: Arc<Mutex<Net>>,
}

impl MemNet {
    /// An empty network; the same seed and the same calls give the same deliveries.
    pub fn new(seed: u64, faults: Faults) -> MemNet {
        let net = Net {
            random: seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1,
            faults,
            blocked: HashSet::new(),
            inboxes: HashMap::new(),
            inbox_limit: 65_536,
            captured: None,
        };
        MemNet {
            net: Arc::new(Mutex::new(net)),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Net> {
        // A test that panicked elsewhere leaves the queues usable.
        self.net.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A driver at this address; an older one there loses its inbox.
    pub fn driver(&self, address: SocketAddr, max_datagram: usize) -> MemDriver {
        self.lock().inboxes.insert(address, VecDeque::new());
        MemDriver {
            net: self.clone(),
            address,
            max_datagram,
            stats: DriverStats::default(),
        }
    }

    /// Changes the faults from now on.
    pub fn set_faults(&self, faults: Faults) {
        self.lock().faults = faults;
    }

    /// Loses everything from one address to another from now on.
    pub fn block(&self, from: SocketAddr, to: SocketAddr) {
        self.lock().blocked.insert((from, to));
    }

    /// Undoes [`MemNet::block`].
    pub fn unblock(&self, from: SocketAddr, to: SocketAddr) {
        self.lock().blocked.remove(&(from, to));
    }

    /// Puts a datagram into the network as if `from` had sent it.
    pub fn inject(&self, from: SocketAddr, to: SocketAddr, bytes: &[u8]) {
        self.lock().deliver(from, to, bytes.to_vec());
    }

    /// From now on remembers what is sent (sender, destination, bytes).
    pub fn capture(&self) {
        self.lock().captured = Some(Vec::new());
    }

    /// What was sent since [`MemNet::capture`] or the last call.
    pub fn captured(&self) -> Vec<(SocketAddr, SocketAddr, Vec<u8>)> {
        self.lock()
            .captured
            .as_mut()
            .map(std::mem::take)
            .unwrap_or_default()
    }

    /// Datagrams in flight.
    pub fn in_flight(&self) -> usize {
        self.lock().inboxes.values().map(VecDeque::len).sum()
    }
}

/// One address on a [`MemNet`].
pub struct MemDriver {
    net: MemNet,
    address: SocketAddr,
    max_datagram: usize,
    stats: DriverStats,
}

impl Driver for MemDriver {
    fn send(&mut self, datagrams: &[Datagram<'_>]) -> io::Result<usize> {
        let mut net = self.net.lock();
        for datagram in datagrams {
            if datagram.len() > self.max_datagram {
                self.stats.send_errors += 1;
                continue;
            }
            net.deliver(self.address, datagram.to, datagram.parts.concat());
            self.stats.sent += 1;
        }
        self.stats.send_calls += 1;
        Ok(datagrams.len())
    }

    fn recv(
        &mut self,
        pool: &Pool,
        out: &mut Vec<(SocketAddr, Payload)>,
        max: usize,
    ) -> io::Result<usize> {
        let mut net = self.net.lock();
        let Some(inbox) = net.inboxes.get_mut(&self.address) else {
            return Ok(0);
        };
        let (limit, stats) = (self.max_datagram, &mut self.stats);
        Ok(receive_waiting(inbox, pool, out, max, limit, stats))
    }

    /// None: a network in memory is polled.
    fn fds(&self) -> Vec<RawFd> {
        Vec::new()
    }

    fn max_datagram(&self) -> usize {
        self.max_datagram
    }

    fn describe(&self) -> String {
        "memory".to_owned()
    }

    fn local_addr(&self) -> SocketAddr {
        self.address
    }

    fn stats(&self) -> DriverStats {
        self.stats
    }
}

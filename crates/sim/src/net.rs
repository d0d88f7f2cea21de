//! The simulated network: a driver per address, every datagram's fate drawn when it is sent, time
//! passed by the world.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cyclone_packet::driver::receive_waiting;
use cyclone_packet::{Datagram, Driver, DriverStats};
use cyclone_pmem::{CrashSim, Payload, Pool};

use crate::plan::{FaultCounts, Kind, PacketFaults};
use crate::random::Random;

/// Datagrams that wait at one address; what comes after is lost, as in a socket's buffer.
const INBOX: usize = 4096;

/// A datagram on its way.
#[derive(Debug)]
pub struct Flight {
    /// When it arrives.
    pub at_us: u64,
    /// Who sent it.
    pub from: SocketAddr,
    /// Where it goes.
    pub to: SocketAddr,
    /// What it says.
    pub bytes: Vec<u8>,
}

struct State {
    now_us: u64,
    random: Random,
    faults: PacketFaults,
    inboxes: BTreeMap<SocketAddr, VecDeque<(SocketAddr, Vec<u8>)>>,
    sent: Vec<Flight>,
    /// Links that carry nothing: from, to.
    cut: BTreeSet<(IpAddr, IpAddr)>,
    /// Links that carry nothing until a time, and then everything.
    clogged: BTreeMap<(IpAddr, IpAddr), u64>,
    struck: FaultCounts,
    datagrams: u64,
    datagram_bytes: usize,
}

/// The network. Clones are the same one.
#[derive(Clone)]
pub struct Net(Arc<Mutex<State>>);

impl Net {
    /// An empty one.
    pub fn new(random: Random, faults: PacketFaults, datagram_bytes: usize) -> Net {
        Net(Arc::new(Mutex::new(State {
            now_us: 0,
            random,
            faults,
            inboxes: BTreeMap::new(),
            sent: Vec::new(),
            cut: BTreeSet::new(),
            clogged: BTreeMap::new(),
            struck: FaultCounts::default(),
            datagrams: 0,
            datagram_bytes,
        })))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A driver at an address. What waits there from before is gone. With `power`, nothing is sent
    /// once that memory has crashed.
    pub fn driver(&self, address: SocketAddr, power: Option<CrashSim>) -> SimDriver {
        let mut state = self.lock();
        state.inboxes.insert(address, VecDeque::new());
        let max_datagram = state.datagram_bytes;
        drop(state);
        SimDriver {
            net: self.clone(),
            address,
            power,
            max_datagram,
            stats: DriverStats::default(),
        }
    }

    /// No node is at this address any more.
    pub fn remove(&self, address: SocketAddr) {
        self.lock().inboxes.remove(&address);
    }

    /// Sets the time at which datagrams are sent.
    pub fn set_now(&self, now_us: u64) {
        self.lock().now_us = now_us;
    }

    /// Takes what was sent since the last call.
    pub fn take_sent(&self, into: &mut Vec<Flight>) {
        into.append(&mut self.lock().sent);
    }

    /// A datagram arrives; returns whether somebody is there.
    pub fn arrive(&self, flight: Flight) -> bool {
        let mut state = self.lock();
        let Some(inbox) = state.inboxes.get_mut(&flight.to) else {
            return false;
        };
        if inbox.len() < INBOX {
            inbox.push_back((flight.from, flight.bytes));
        }
        true
    }

    /// Cuts a link in one direction.
    pub fn cut(&self, from: IpAddr, to: IpAddr) {
        self.lock().cut.insert((from, to));
    }

    /// Mends a link in one direction.
    pub fn mend(&self, from: IpAddr, to: IpAddr) {
        self.lock().cut.remove(&(from, to));
    }

    /// Holds back what is sent over a link until a time.
    pub fn clog(&self, from: IpAddr, to: IpAddr, until_us: u64) {
        self.lock().clogged.insert((from, to), until_us);
    }

    /// From now on every link works and no datagram suffers.
    pub fn heal(&self) {
        let mut state = self.lock();
        state.faults = PacketFaults::default();
        state.cut.clear();
        state.clogged.clear();
    }

    /// Faults so far, and datagrams sent.
    pub fn struck(&self) -> (FaultCounts, u64) {
        let state = self.lock();
        (state.struck.clone(), state.datagrams)
    }
}

impl State {
    fn send(&mut self, from: SocketAddr, to: SocketAddr, bytes: Vec<u8>) {
        self.datagrams += 1;
        let faults = self.faults;
        if self.cut.contains(&(from.ip(), to.ip())) {
            return;
        }
        if self.random.chance(faults.loss) {
            return self.struck.note(Kind::Loss);
        }
        let twice = self.random.chance(faults.duplicate);
        if twice {
            self.struck.note(Kind::Duplicate);
            self.fly(from, to, bytes.clone());
        }
        self.fly(from, to, bytes);
    }

    fn fly(&mut self, from: SocketAddr, to: SocketAddr, mut bytes: Vec<u8>) {
        let faults = self.faults;
        if !bytes.is_empty() && self.random.chance(faults.corrupt) {
            let bit = self.random.below(bytes.len() as u64 * 8) as usize;
            bytes[bit / 8] ^= 1 << (bit % 8);
            self.struck.note(Kind::Corrupt);
        }
        if !bytes.is_empty() && self.random.chance(faults.truncate) {
            bytes.truncate(self.random.below(bytes.len() as u64) as usize);
            self.struck.note(Kind::Truncate);
        }
        let mut at_us = self.now_us + self.random.within(8, 60);
        if self.random.chance(faults.reorder) {
            at_us += self.random.within(50, 5_000);
            self.struck.note(Kind::Reorder);
        }
        if self.random.chance(faults.tail) {
            at_us += self.random.tail(1_000, 1_000_000);
            self.struck.note(Kind::Tail);
        }
        if let Some(&until_us) = self.clogged.get(&(from.ip(), to.ip())) {
            if until_us > self.now_us {
                at_us = at_us.max(until_us);
            } else {
                self.clogged.remove(&(from.ip(), to.ip()));
            }
        }
        self.sent.push(Flight {
            at_us,
            from,
            to,
            bytes,
        });
    }
}

/// One address on the simulated network.
pub struct SimDriver {
    net: Net,
    address: SocketAddr,
    power: Option<CrashSim>,
    max_datagram: usize,
    stats: DriverStats,
}

impl Driver for SimDriver {
    fn send(&mut self, datagrams: &[Datagram<'_>]) -> io::Result<usize> {
        self.stats.send_calls += 1;
        self.stats.sent += datagrams.len() as u64;
        // A machine without power sends nothing, however far its program has come in this step.
        if self.power.as_ref().is_some_and(CrashSim::has_crashed) {
            return Ok(datagrams.len());
        }
        let mut net = self.net.lock();
        for datagram in datagrams {
            net.send(self.address, datagram.to, datagram.parts.concat());
        }
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

    fn fds(&self) -> Vec<RawFd> {
        Vec::new()
    }

    fn max_datagram(&self) -> usize {
        self.max_datagram
    }

    fn describe(&self) -> String {
        "simulated network".to_owned()
    }

    fn local_addr(&self) -> SocketAddr {
        self.address
    }

    fn stats(&self) -> DriverStats {
        self.stats
    }
}

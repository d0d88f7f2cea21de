//! Which port and Ethernet address lead to a destination: asked of the network itself, since the kernel does not see it.
//!
//! A destination outside our own network is reached by the gateway, if there is one. What is known is good for half a
//! minute after it was last heard, and asked for again before that is over. No clock: `now_us` comes with each call.
//!
//! With several ports a machine is asked every second by each: a cable that dies behind a switch leaves our link up, and
//! only the silence of one beside the others tells.
//!
//! Anybody can make us answer to an address that is not theirs, so strangers, machines never heard, may cost little: so
//! many questions a second, and when there is no room, strangers go before any machine that has been heard.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::discovery::{self, Mac};

/// How long an answer is good, µs; from when on it is asked for again.
const KEPT_US: u64 = 30_000_000;
const STALE_US: u64 = 15_000_000;
/// Time between two questions for the same machine, µs.
const ASK_EVERY_US: u64 = 20_000;
/// With several ports: time between two questions for a machine that is written to, µs, and by how much the last word
/// by one port may be older than that by another.
const PROBE_EVERY_US: u64 = 1_000_000;
const SILENT_US: u64 = 3_000_000;
/// Time between the first two words of what we listen to, and between all later ones, µs.
const TELL_AGAIN_US: u64 = 1_000_000;
const TELL_EVERY_US: u64 = 60_000_000;
/// How often it is told where we are.
const NEWS_TIMES: u32 = 2;
/// Machines kept. A network segment has fewer.
const MOST_MACHINES: usize = 4096;
/// Questions for strangers: at most this many at once...
const STRANGERS_BURST: u64 = 256;
/// ...and one more per this time, µs.
const STRANGER_EVERY_US: u64 = 250;

/// A machine on one of our networks.
#[derive(Default)]
struct Machine {
    /// By port: its Ethernet address there, and when it was last heard. Empty: a stranger.
    heard: Vec<Option<(Mac, u64)>>,
    asked_us: Option<u64>,
}

impl Machine {
    fn last_heard(&self) -> Option<u64> {
        self.heard.iter().flatten().map(|(_, at)| *at).max()
    }

    /// The ports by which it can be reached now: those that have not been silent for long, while it was heard by others.
    fn ports(&self, now_us: u64) -> impl Iterator<Item = (usize, Mac)> + '_ {
        let known = self.heard.iter().enumerate();
        let freshest = self.last_heard().unwrap_or(0);
        known.filter_map(move |(port, heard)| {
            let (mac, at) = (*heard)?;
            let good = now_us < at + KEPT_US && freshest <= at + SILENT_US;
            good.then_some((port, mac))
        })
    }

    /// Its address by this port, if it was heard a moment ago: to be asked there, and nobody else disturbed.
    fn near(&self, port: usize, now_us: u64) -> Option<Mac> {
        let (mac, at) = (*self.heard.get(port)?)?;
        (now_us < at + SILENT_US).then_some(mac)
    }

    fn is_stale(&self, now_us: u64) -> bool {
        self.last_heard().is_none_or(|at| now_us >= at + STALE_US)
    }

    fn is_stranger(&self) -> bool {
        self.heard.is_empty()
    }

    /// Whether it is to be asked for.
    fn is_due(&self, now_us: u64) -> bool {
        let every_us = if self.is_stale(now_us) {
            ASK_EVERY_US
        } else if self.heard.iter().flatten().count() > 1 {
            PROBE_EVERY_US
        } else {
            return false;
        };
        self.asked_us.is_none_or(|at| now_us >= at + every_us)
    }
}

/// A packet to send by one port.
pub(super) type Call = (usize, Vec<u8>);

/// What is known about the network.
pub(super) struct Neighbours {
    own: IpAddr,
    gateway: Option<(IpAddr, u8)>,
    macs: Vec<Mac>,
    /// Of each port that has a cable: when it was last told what we listen to, and how often.
    told: Vec<Option<(u64, u32)>>,
    machines: HashMap<IpAddr, Machine>,
    /// Strangers, the oldest first, and machines that were.
    strangers: VecDeque<IpAddr>,
    stranger_credit: u64,
    credited_us: u64,
    /// Counts what makes ways that were found before wrong.
    changes: Arc<AtomicU64>,
}

/// Where a destination stands among all, as a fraction of 2^32: evenly for machines with one port number, for ports of one
/// machine, and for both counted up together.
pub(super) fn spread(to: SocketAddr) -> u32 {
    let end = match to.ip() {
        IpAddr::V4(ip) => u32::from(ip) & 0xffff,
        IpAddr::V6(ip) => u32::from(ip.segments()[7]),
    };
    // Multiples of the golden ratio keep away from each other; so do those of six times it, and of seven times.
    (end + 6 * u32::from(to.port())).wrapping_mul(0x9e37_79b1)
}

/// Which of so many ways are its; and where it stands among those who have the same.
pub(super) fn share(place: u32, ways: usize) -> (usize, u32) {
    let scaled = u64::from(place) * ways as u64;
    ((scaled >> 32) as usize, scaled as u32)
}

/// Whether two addresses begin with the same bits.
fn same_network(a: IpAddr, b: IpAddr, bits: u8) -> bool {
    match (a, b) {
        (IpAddr::V4(a), IpAddr::V4(b)) => {
            let apart = u32::from(a) ^ u32::from(b);
            bits == 0 || apart >> (32 - u32::from(bits.min(32))) == 0
        }
        (IpAddr::V6(a), IpAddr::V6(b)) => {
            let apart = u128::from(a) ^ u128::from(b);
            bits == 0 || apart >> (128 - u32::from(bits.min(128))) == 0
        }
        _ => false,
    }
}

impl Neighbours {
    /// `macs`: of our ports, in order.
    pub(super) fn new(own: IpAddr, gateway: Option<(IpAddr, u8)>, macs: Vec<Mac>) -> Neighbours {
        Neighbours {
            own,
            gateway,
            told: vec![None; macs.len()],
            macs,
            machines: HashMap::new(),
            strangers: VecDeque::new(),
            stranger_credit: STRANGERS_BURST,
            credited_us: 0,
            changes: Arc::default(),
        }
    }

    /// A number that grows when ways that were found before may be wrong.
    pub(super) fn changes(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.changes)
    }

    fn note_change(&self) {
        self.changes.fetch_add(1, Ordering::Release);
    }

    /// Our address by each port.
    pub(super) fn macs(&self) -> &[Mac] {
        &self.macs
    }

    /// The port that leads to `to`, and the next machine's address there, if the way is known; what has to be asked goes
    /// to `calls`.
    pub(super) fn find(
        &mut self,
        now_us: u64,
        to: SocketAddr,
        calls: &mut Vec<Call>,
    ) -> Option<(usize, Mac)> {
        let hop = self.next_hop(to.ip())?;
        let known = self.machines.get(&hop);
        let is_due = known.is_none_or(|machine| machine.is_due(now_us));
        let (is_new, is_stranger) = (known.is_none(), known.is_none_or(Machine::is_stranger));
        let ask = is_due && (!is_stranger || self.may_ask_stranger(now_us));
        if is_new {
            if !ask {
                return None;
            }
            self.make_room();
            self.strangers.push_back(hop);
        }
        let machine = self.machines.entry(hop).or_default();
        if ask {
            machine.asked_us = Some(now_us);
            for (port, mac) in self.macs.iter().enumerate() {
                let near = machine.near(port, now_us);
                let question = discovery::question(*mac, self.own, hop, near);
                calls.extend(question.map(|packet| (port, packet)));
            }
        }
        // Of several ways each destination has its own, so that its datagrams stay in order.
        let (way, _) = share(spread(to), machine.ports(now_us).count());
        machine.ports(now_us).nth(way)
    }

    fn may_ask_stranger(&mut self, now_us: u64) -> bool {
        let earned = now_us.saturating_sub(self.credited_us) / STRANGER_EVERY_US;
        if earned > 0 {
            self.stranger_credit = self
                .stranger_credit
                .saturating_add(earned)
                .min(STRANGERS_BURST);
            self.credited_us = now_us;
        }
        let may = self.stranger_credit > 0;
        self.stranger_credit -= u64::from(may);
        may
    }

    /// Forgets the oldest stranger if there is no room for one more machine. False: there is none.
    fn drop_stranger(&mut self) -> bool {
        while self.machines.len() >= MOST_MACHINES {
            let Some(oldest) = self.strangers.pop_front() else {
                return false;
            };
            if self.machines.get(&oldest).is_some_and(Machine::is_stranger) {
                self.machines.remove(&oldest);
            }
        }
        true
    }

    /// Makes room for one more machine: strangers go first, then who was not heard for the longest time.
    fn make_room(&mut self) {
        if self.drop_stranger() {
            return;
        }
        let oldest = self
            .machines
            .iter()
            .min_by_key(|(ip, machine)| (machine.last_heard(), **ip));
        if let Some(ip) = oldest.map(|(ip, _)| *ip) {
            self.machines.remove(&ip);
        }
    }

    fn next_hop(&self, to: IpAddr) -> Option<IpAddr> {
        if to.is_multicast() || to.is_unspecified() || to.is_ipv4() != self.own.is_ipv4() {
            return None;
        }
        match self.gateway {
            Some((gateway, bits)) if !same_network(self.own, to, bits) => Some(gateway),
            _ => Some(to),
        }
    }

    /// Takes in a packet that is no datagram of ours; what has to be answered goes to `calls`. False: it is not about
    /// neighbours, nor about groups.
    pub(super) fn hear(
        &mut self,
        now_us: u64,
        port: usize,
        packet: &[u8],
        calls: &mut Vec<Call>,
    ) -> bool {
        let Some(heard) = discovery::hear(packet) else {
            return discovery::is_about_groups(packet);
        };
        let own = self.own;
        if heard.ip == own {
            // Our own question come back, or somebody who claims our address: not to be believed.
            return true;
        }
        let asks_us = heard.asks_for == Some(own);
        if let Some(mac) = heard.mac {
            let known = self.machines.contains_key(&heard.ip);
            // Who asks for us will be written to.
            if known || (asks_us && self.drop_stranger()) {
                let machine = self.machines.entry(heard.ip).or_default();
                machine.heard.resize(self.macs.len(), None);
                let before = machine.heard[port].replace((mac, now_us));
                if before.is_none_or(|(known, _)| known != mac) {
                    self.note_change();
                }
            }
            if asks_us && let Some(answer) = discovery::answer(self.macs[port], own, mac, heard.ip)
            {
                calls.push((port, answer));
            }
        }
        true
    }

    /// Tells by a port where we are and what we listen to, where it is time: when it gets a cable, twice, since the first may be lost, and every
    /// minute what we listen to. Switches forget who has not said so for some minutes, and others look for us where they knew us.
    pub(super) fn tell(&mut self, now_us: u64, port: usize, is_up: bool, calls: &mut Vec<Call>) {
        let told = &mut self.told[port];
        let times = match *told {
            _ if !is_up => {
                *told = None;
                return;
            }
            None => 0,
            Some((at, 1)) if now_us >= at + TELL_AGAIN_US => 1,
            Some((at, times)) if now_us >= at + TELL_EVERY_US => times,
            Some(_) => return,
        };
        *told = Some((now_us, times.saturating_add(1)));
        let mac = self.macs[port];
        let listens = discovery::listens(mac, self.own);
        let news = (times < NEWS_TIMES).then(|| discovery::news(mac, self.own));
        calls.extend([listens, news].into_iter().flatten().map(|it| (port, it)));
    }

    /// Forgets what was heard by a port: its cable is out. The others tell again where we are, since machines may know us by that one.
    pub(super) fn forget(&mut self, port: usize) {
        self.told.fill(None);
        for machine in self.machines.values_mut() {
            if let Some(heard) = machine.heard.get_mut(port) {
                *heard = None;
            }
            machine.asked_us = None;
        }
        self.note_change();
    }
}

#[cfg(test)]
mod tests;

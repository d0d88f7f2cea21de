//! Which port and Ethernet address lead to a destination: asked of the network itself, since the
//! kernel does not see it.
//!
//! A destination outside our own network is reached by the gateway, if there is one. What is known
//! is good for half a minute after it was last heard, and asked for again before that is over. No
//! clock: `now_us` comes with each call.
//!
//! With several ports a machine is asked every second by each: a cable that dies behind a switch
//! leaves our link up, and only the silence of one beside the others tells.
//!
//! Anybody can make us answer to an address that is not theirs, so strangers, machines never heard,
//! may cost little: so many questions a second, and when there is no room, strangers go before any
//! machine that has been heard.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::discovery::{self, Mac};

/// How long an answer is good, µs; from when on it is asked for again.
const REACHABLE_US: u64 = 30_000_000;
const STALE_US: u64 = 15_000_000;
/// Time between two questions for the same machine, µs.
const SOLICIT_EVERY_US: u64 = 20_000;
/// With several ports: time between two questions for a machine that is written to, µs, and by how
/// much the last word by one port may be older than that by another.
const PROBE_EVERY_US: u64 = 1_000_000;
const SILENT_US: u64 = 3_000_000;
/// Time between the first two words of what we listen to, and between all later ones, µs.
const ANNOUNCE_AGAIN_US: u64 = 1_000_000;
const REPORT_EVERY_US: u64 = 60_000_000;
/// How often we announce our address to it.
const ANNOUNCE_TIMES: u32 = 2;
/// Machines kept. A network segment has fewer.
const MAX_NEIGHBOURS: usize = 4096;
/// Questions for strangers: at most this many at once...
const UNRESOLVED_BURST: u64 = 256;
/// ...and one more per this time, µs.
const UNRESOLVED_EVERY_US: u64 = 250;

/// A machine on one of our networks.
#[derive(Default)]
struct NeighbourEntry {
    /// By port: its Ethernet address there, and when it was last heard. Empty: a stranger.
    heard: Vec<Option<(Mac, u64)>>,
    solicited_us: Option<u64>,
}

impl NeighbourEntry {
    fn last_heard(&self) -> Option<u64> {
        self.heard.iter().flatten().map(|(_, at)| *at).max()
    }

    /// The ports by which it can be reached now: those that have not been silent for long, while it
    /// was heard by others.
    fn ports(&self, now_us: u64) -> impl Iterator<Item = (usize, Mac)> + '_ {
        let known = self.heard.iter().enumerate();
        let freshest = self.last_heard().unwrap_or(0);
        known.filter_map(move |(port, heard)| {
            let (mac, at) = (*heard)?;
            let good = now_us < at + REACHABLE_US && freshest <= at + SILENT_US;
            good.then_some((port, mac))
        })
    }

    /// Its address by this port, if it was heard recently: to be asked there, and no other machine
    /// disturbed.
    fn recent_mac(&self, port: usize, now_us: u64) -> Option<Mac> {
        let (mac, at) = (*self.heard.get(port)?)?;
        (now_us < at + SILENT_US).then_some(mac)
    }

    fn is_stale(&self, now_us: u64) -> bool {
        self.last_heard().is_none_or(|at| now_us >= at + STALE_US)
    }

    fn is_unresolved(&self) -> bool {
        self.heard.is_empty()
    }

    /// Whether it is to be asked for.
    fn is_due(&self, now_us: u64) -> bool {
        let every_us = if self.is_stale(now_us) {
            SOLICIT_EVERY_US
        } else if self.heard.iter().flatten().count() > 1 {
            PROBE_EVERY_US
        } else {
            return false;
        };
        self.solicited_us.is_none_or(|at| now_us >= at + every_us)
    }
}

/// A packet to send by one port.
pub(super) type OutgoingPacket = (usize, Vec<u8>);

/// What is known about the network.
pub(super) struct Neighbours {
    own: IpAddr,
    gateway: Option<(IpAddr, u8)>,
    macs: Vec<Mac>,
    /// Of each port that has a cable: when it was last told what we listen to, and how often.
    announced: Vec<Option<(u64, u32)>>,
    entries: HashMap<IpAddr, NeighbourEntry>,
    /// Strangers, the oldest first, and machines that were.
    unresolved: VecDeque<IpAddr>,
    unresolved_credit: u64,
    credited_us: u64,
    /// Counts what makes ways that were found before wrong.
    generation: Arc<AtomicU64>,
}

/// Where a destination stands among all, as a fraction of 2^32: evenly for machines with one port
/// number, for ports of one machine, and for both counted up together.
pub(super) fn flow_hash(to: SocketAddr) -> u32 {
    let end = match to.ip() {
        IpAddr::V4(ip) => u32::from(ip) & 0xffff,
        IpAddr::V6(ip) => u32::from(ip.segments()[7]),
    };
    // Multiples of the golden ratio keep away from each other; so do those of six times it, and of
    // seven times.
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
            announced: vec![None; macs.len()],
            macs,
            entries: HashMap::new(),
            unresolved: VecDeque::new(),
            unresolved_credit: UNRESOLVED_BURST,
            credited_us: 0,
            generation: Arc::default(),
        }
    }

    /// A number that grows when ways that were found before may be wrong.
    pub(super) fn generation(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.generation)
    }

    fn bump_generation(&self) {
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// Our address by each port.
    pub(super) fn macs(&self) -> &[Mac] {
        &self.macs
    }

    /// The port that leads to `to`, and the next machine's address there, if the way is known; what
    /// has to be asked goes to `outgoing`.
    pub(super) fn find(
        &mut self,
        now_us: u64,
        to: SocketAddr,
        outgoing: &mut Vec<OutgoingPacket>,
    ) -> Option<(usize, Mac)> {
        let hop = self.next_hop(to.ip())?;
        let known = self.entries.get(&hop);
        let is_due = known.is_none_or(|entry| entry.is_due(now_us));
        let (is_new, is_unresolved) = (
            known.is_none(),
            known.is_none_or(NeighbourEntry::is_unresolved),
        );
        let ask = is_due && (!is_unresolved || self.may_solicit_unresolved(now_us));
        if is_new {
            if !ask {
                return None;
            }
            self.make_room();
            self.unresolved.push_back(hop);
        }
        let entry = self.entries.entry(hop).or_default();
        if ask {
            entry.solicited_us = Some(now_us);
            for (port, mac) in self.macs.iter().enumerate() {
                let recent_mac = entry.recent_mac(port, now_us);
                let solicitation = discovery::solicitation(*mac, self.own, hop, recent_mac);
                outgoing.extend(solicitation.map(|packet| (port, packet)));
            }
        }
        // Of several ways each destination has its own, so that its datagrams stay in order.
        let (way, _) = share(flow_hash(to), entry.ports(now_us).count());
        entry.ports(now_us).nth(way)
    }

    fn may_solicit_unresolved(&mut self, now_us: u64) -> bool {
        let earned = now_us.saturating_sub(self.credited_us) / UNRESOLVED_EVERY_US;
        if earned > 0 {
            self.unresolved_credit = self
                .unresolved_credit
                .saturating_add(earned)
                .min(UNRESOLVED_BURST);
            self.credited_us = now_us;
        }
        let may = self.unresolved_credit > 0;
        self.unresolved_credit -= u64::from(may);
        may
    }

    /// Forgets the oldest stranger if there is no room for one more machine. False: there is none.
    fn drop_unresolved(&mut self) -> bool {
        while self.entries.len() >= MAX_NEIGHBOURS {
            let Some(oldest) = self.unresolved.pop_front() else {
                return false;
            };
            if self
                .entries
                .get(&oldest)
                .is_some_and(NeighbourEntry::is_unresolved)
            {
                self.entries.remove(&oldest);
            }
        }
        true
    }

    /// Makes room for one more machine: strangers go first, then who was not heard for the longest
    /// time.
    fn make_room(&mut self) {
        if self.drop_unresolved() {
            return;
        }
        let oldest = self
            .entries
            .iter()
            .min_by_key(|(ip, entry)| (entry.last_heard(), **ip));
        if let Some(ip) = oldest.map(|(ip, _)| *ip) {
            self.entries.remove(&ip);
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

    /// Takes in a packet that is no datagram of ours; what has to be answered goes to `outgoing`.
    /// False: it is not about neighbours, nor about groups.
    pub(super) fn on_packet(
        &mut self,
        now_us: u64,
        port: usize,
        packet: &[u8],
        outgoing: &mut Vec<OutgoingPacket>,
    ) -> bool {
        let Some(heard) = discovery::parse_neighbour(packet) else {
            return discovery::is_multicast_listener_packet(packet);
        };
        let own = self.own;
        if heard.ip == own {
            // Our own question come back, or somebody who claims our address: not to be believed.
            return true;
        }
        let asks_us = heard.solicited == Some(own);
        if let Some(mac) = heard.mac {
            let known = self.entries.contains_key(&heard.ip);
            // Who asks for us will be written to.
            if known || (asks_us && self.drop_unresolved()) {
                let entry = self.entries.entry(heard.ip).or_default();
                entry.heard.resize(self.macs.len(), None);
                let before = entry.heard[port].replace((mac, now_us));
                if before.is_none_or(|(known, _)| known != mac) {
                    self.bump_generation();
                }
            }
            if asks_us && let Some(answer) = discovery::answer(self.macs[port], own, mac, heard.ip)
            {
                outgoing.push((port, answer));
            }
        }
        true
    }

    /// Tells by a port where we are and what we listen to, where it is time: when it gets a cable,
    /// twice, since the first may be lost, and every minute what we listen to. Switches forget who
    /// has not said so for some minutes, and others look for us where they knew us.
    pub(super) fn announce(
        &mut self,
        now_us: u64,
        port: usize,
        is_up: bool,
        outgoing: &mut Vec<OutgoingPacket>,
    ) {
        let announced = &mut self.announced[port];
        let times = match *announced {
            _ if !is_up => {
                *announced = None;
                return;
            }
            None => 0,
            Some((at, 1)) if now_us >= at + ANNOUNCE_AGAIN_US => 1,
            Some((at, times)) if now_us >= at + REPORT_EVERY_US => times,
            Some(_) => return,
        };
        *announced = Some((now_us, times.saturating_add(1)));
        let mac = self.macs[port];
        let listener_report = discovery::listener_report(mac, self.own);
        let announcement = (times < ANNOUNCE_TIMES).then(|| discovery::announcement(mac, self.own));
        outgoing.extend(
            [listener_report, announcement]
                .into_iter()
                .flatten()
                .map(|it| (port, it)),
        );
    }

    /// Forgets what was heard by a port: its cable is out. The others tell again where we are,
    /// since machines may know us by that one.
    pub(super) fn forget(&mut self, port: usize) {
        self.announced.fill(None);
        for entry in self.entries.values_mut() {
            if let Some(heard) = entry.heard.get_mut(port) {
                *heard = None;
            }
            entry.solicited_us = None;
        }
        self.bump_generation();
    }
}

#[cfg(test)]
mod tests;

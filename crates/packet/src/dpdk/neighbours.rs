//! Which port and Ethernet address lead to a destination: asked of the network itself, since the kernel does not see it.
//!
//! A destination outside our own network is reached by the gateway, if there is one. What is known is good for half a
//! minute after it was last heard, and asked for again before that is over. No clock: `now_us` comes with each call.
//!
//! Anybody can make us answer to an address that is not theirs, so strangers, machines never heard, may cost little: so
//! many questions a second, and when there is no room, strangers go before any machine that has been heard.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};

use super::discovery::{self, Mac};
use crate::headers::Template;

/// How long an answer is good, µs; from when on it is asked for again.
const KEPT_US: u64 = 30_000_000;
const STALE_US: u64 = 15_000_000;
/// Time between two questions for the same machine, µs.
const ASK_EVERY_US: u64 = 20_000;
/// Machines kept. A network segment has fewer.
const MOST_MACHINES: usize = 4096;
/// Questions for strangers: at most this many at once...
const STRANGERS_BURST: u64 = 256;
/// ...and one more per this time, µs.
const STRANGER_EVERY_US: u64 = 250;
/// Destinations whose headers are kept.
const MOST_WAYS: usize = 16_384;
/// How long ready-made headers are used before they are looked at again, µs.
const WAY_US: u64 = 1_000_000;

/// A machine on one of our networks.
#[derive(Default)]
struct Machine {
    /// By port: its Ethernet address there, and when it was last heard. Empty: a stranger.
    heard: Vec<Option<(Mac, u64)>>,
    asked_us: Option<u64>,
}

impl Machine {
    /// The ports by which it can be reached now.
    fn ports(&self, now_us: u64) -> impl Iterator<Item = (usize, Mac)> + '_ {
        let known = self.heard.iter().enumerate();
        known.filter_map(move |(port, heard)| {
            let (mac, at) = (*heard)?;
            (now_us < at + KEPT_US).then_some((port, mac))
        })
    }

    fn is_stale(&self, now_us: u64) -> bool {
        let fresh =
            |heard: &Option<(Mac, u64)>| heard.is_some_and(|(_, at)| now_us < at + STALE_US);
        !self.heard.iter().any(fresh)
    }

    fn is_stranger(&self) -> bool {
        self.heard.is_empty()
    }

    /// Whether it is to be asked for.
    fn is_due(&self, now_us: u64) -> bool {
        let asked = |asked| now_us < asked + ASK_EVERY_US;
        self.is_stale(now_us) && !self.asked_us.is_some_and(asked)
    }
}

/// A packet to send by one port.
pub(super) type Call = (usize, Vec<u8>);

/// What is known about the network.
pub(super) struct Neighbours {
    local: SocketAddr,
    gateway: Option<(IpAddr, u8)>,
    macs: Vec<Mac>,
    machines: HashMap<IpAddr, Machine>,
    /// Strangers, the oldest first, and machines that were.
    strangers: VecDeque<IpAddr>,
    stranger_credit: u64,
    credited_us: u64,
    ways: HashMap<SocketAddr, (usize, Template, u64)>,
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
    pub(super) fn new(
        local: SocketAddr,
        gateway: Option<(IpAddr, u8)>,
        macs: Vec<Mac>,
    ) -> Neighbours {
        Neighbours {
            local,
            gateway,
            macs,
            machines: HashMap::new(),
            strangers: VecDeque::new(),
            stranger_credit: STRANGERS_BURST,
            credited_us: 0,
            ways: HashMap::new(),
        }
    }

    /// The port and the headers for `to`, if the way is known; what has to be asked goes to `calls`.
    pub(super) fn find(
        &mut self,
        now_us: u64,
        to: SocketAddr,
        calls: &mut Vec<Call>,
    ) -> Option<(usize, Template)> {
        if let Some((port, headers, until)) = self.ways.get(&to)
            && now_us < *until
        {
            return Some((*port, *headers));
        }
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
                let question = discovery::question(*mac, self.local.ip(), hop);
                calls.extend(question.map(|packet| (port, packet)));
            }
        }
        // Of several ways each destination has its own, so that its datagrams stay in order.
        let ways = machine.ports(now_us).count().max(1);
        let (port, mac) = machine.ports(now_us).nth(usize::from(to.port()) % ways)?;
        let headers = Template::new(self.macs[port], self.local, mac, to)?;
        if self.ways.len() >= MOST_WAYS {
            self.ways.clear();
        }
        self.ways.insert(to, (port, headers, now_us + WAY_US));
        Some((port, headers))
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
        let last = |machine: &Machine| machine.heard.iter().flatten().map(|(_, at)| *at).max();
        let oldest = self
            .machines
            .iter()
            .min_by_key(|(ip, machine)| (last(machine), **ip));
        if let Some(ip) = oldest.map(|(ip, _)| *ip) {
            self.machines.remove(&ip);
        }
    }

    fn next_hop(&self, to: IpAddr) -> Option<IpAddr> {
        if to.is_multicast() || to.is_unspecified() || to.is_ipv4() != self.local.is_ipv4() {
            return None;
        }
        match self.gateway {
            Some((gateway, bits)) if !same_network(self.local.ip(), to, bits) => Some(gateway),
            _ => Some(to),
        }
    }

    /// Takes in a packet that is no datagram of ours; what has to be answered goes to `calls`. False: it is not about
    /// neighbours.
    pub(super) fn hear(
        &mut self,
        now_us: u64,
        port: usize,
        packet: &[u8],
        calls: &mut Vec<Call>,
    ) -> bool {
        let Some(heard) = discovery::hear(packet) else {
            return false;
        };
        let own = self.local.ip();
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
                    self.ways.clear();
                }
            }
            if asks_us && let Some(answer) = discovery::answer(self.macs[port], own, mac, heard.ip)
            {
                calls.push((port, answer));
            }
        }
        true
    }

    /// Forgets what was heard by a port: its cable is out.
    pub(super) fn forget(&mut self, port: usize) {
        for machine in self.machines.values_mut() {
            if let Some(heard) = machine.heard.get_mut(port) {
                *heard = None;
            }
            machine.asked_us = None;
        }
        self.ways.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: [Mac; 4] = [
        [2, 0, 0, 0, 0, 1],
        [2, 0, 0, 0, 0, 2],
        [2, 0, 0, 0, 0, 3],
        [2, 0, 0, 0, 0, 4],
    ];

    fn at(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    /// Carries calls to and fro between two ends, port by port, until nobody has more to say.
    fn carry(now_us: u64, mut calls: Vec<Call>, a: &mut Neighbours, b: &mut Neighbours) {
        let mut at_b = true;
        for _ in 0..4 {
            let mut more = Vec::new();
            for (port, packet) in calls {
                let to = if at_b { &mut *b } else { &mut *a };
                assert!(to.hear(now_us, port, &packet, &mut more));
            }
            (calls, at_b) = (more, !at_b);
        }
        assert!(calls.is_empty());
    }

    #[test]
    fn asked_once_then_known_both_ways_until_it_is_old() {
        for (one, other) in [("10.0.0.1:1", "10.0.0.2:2"), ("[fd77::1]:1", "[fd77::2]:2")] {
            let (one, other) = (at(one), at(other));
            let mut a = Neighbours::new(one, None, vec![MAC[0]]);
            let mut b = Neighbours::new(other, None, vec![MAC[1]]);
            let mut calls = Vec::new();
            assert_eq!(a.find(0, other, &mut calls), None);
            assert_eq!(a.find(1, other, &mut calls), None);
            assert_eq!(calls.len(), 1, "not asked twice at once");
            carry(2, calls, &mut a, &mut b);
            let mut calls = Vec::new();
            let (port, headers) = a.find(3, other, &mut calls).unwrap();
            assert_eq!(
                (port, headers),
                (0, Template::new(MAC[0], one, MAC[1], other).unwrap())
            );
            assert!(b.find(3, one, &mut calls).is_some(), "who asked is known");
            assert!(calls.is_empty());
            // Old, but good: asked for again meanwhile.
            assert!(a.find(STALE_US + 5, other, &mut calls).is_some());
            assert_eq!(calls.len(), 1);
            assert_eq!(a.find(KEPT_US + WAY_US + 5, other, &mut calls), None);
        }
    }

    #[test]
    fn several_ports_are_used_in_turn_and_dead_ones_are_not() {
        let peer = |port: u16| SocketAddr::from(([10, 0, 0, 2], port));
        let mut a = Neighbours::new(at("10.0.0.1:1"), None, vec![MAC[0], MAC[1]]);
        let mut b = Neighbours::new(at("10.0.0.2:1"), None, vec![MAC[2], MAC[3]]);
        let mut calls = Vec::new();
        assert_eq!(a.find(0, peer(1), &mut calls), None);
        assert_eq!(calls.len(), 2, "asked by every port");
        carry(0, calls, &mut a, &mut b);
        let used = |a: &mut Neighbours, port| a.find(1, peer(port), &mut Vec::new()).unwrap().0;
        assert_ne!(used(&mut a, 1), used(&mut a, 2));
        assert_eq!(used(&mut a, 3), used(&mut a, 5));
        a.forget(0);
        assert_eq!((used(&mut a, 1), used(&mut a, 2)), (1, 1));
    }

    #[test]
    fn strangers_are_reached_by_the_gateway() {
        let gateway = Some(([10, 0, 0, 254].into(), 24));
        let mut a = Neighbours::new(at("10.0.0.1:1"), gateway, vec![MAC[0]]);
        let mut router = Neighbours::new(at("10.0.0.254:1"), None, vec![MAC[1]]);
        let mut calls = Vec::new();
        assert_eq!(a.find(0, at("192.0.2.9:7"), &mut calls), None);
        carry(0, calls, &mut a, &mut router);
        let (_, headers) = a.find(1, at("192.0.2.9:7"), &mut Vec::new()).unwrap();
        let wanted = Template::new(MAC[0], at("10.0.0.1:1"), MAC[1], at("192.0.2.9:7"));
        assert_eq!(Some(headers), wanted);
        let mut calls = Vec::new();
        assert_eq!(
            a.find(1, at("10.0.0.9:7"), &mut calls),
            None,
            "a neighbour that nobody has heard"
        );
        assert_eq!(calls.len(), 1);
        assert_eq!(
            a.find(1, at("[fd77::1]:7"), &mut calls),
            None,
            "the other family"
        );
    }

    #[test]
    fn unasked_news_is_not_kept() {
        let mut a = Neighbours::new(at("10.0.0.1:1"), None, vec![MAC[0]]);
        let mut calls = Vec::new();
        for number in 0..=255u8 {
            let news = discovery::answer(
                MAC[1],
                [10, 0, 9, number].into(),
                MAC[0],
                [10, 0, 0, 1].into(),
            );
            assert!(a.hear(0, 0, &news.unwrap(), &mut calls));
        }
        assert!(a.machines.is_empty() && calls.is_empty());
        // Nor is anybody believed who claims our own address.
        let lie = discovery::answer(MAC[1], [10, 0, 0, 1].into(), MAC[0], [10, 0, 0, 1].into());
        assert!(a.hear(0, 0, &lie.unwrap(), &mut calls));
        assert!(a.machines.is_empty());
    }

    /// The machine with this number, not one of those that the tests name.
    fn numbered(number: u32) -> SocketAddr {
        SocketAddr::from((0x0b00_0000_u32.wrapping_add(number).to_be_bytes(), 9))
    }

    #[test]
    fn strangers_push_out_strangers_only() {
        let (own, peer, late) = (at("10.0.0.1:1"), at("10.0.0.2:2"), at("10.0.0.3:3"));
        let mut a = Neighbours::new(own, None, vec![MAC[0], MAC[1]]);
        let mut b = Neighbours::new(peer, None, vec![MAC[2], MAC[3]]);
        let mut c = Neighbours::new(late, None, vec![MAC[2], MAC[3]]);
        let mut calls = Vec::new();
        assert_eq!(a.find(0, peer, &mut calls), None);
        carry(0, calls, &mut a, &mut b);
        let mut questions = 0;
        for number in 0..50_000u32 {
            let now_us = u64::from(number) * 1000;
            let mut calls = Vec::new();
            assert_eq!(a.find(now_us, numbered(number), &mut calls), None);
            questions += calls.len();
            assert!(a.machines.len() <= MOST_MACHINES && a.strangers.len() <= MOST_MACHINES);
            let mut calls = Vec::new();
            assert!(a.find(now_us, peer, &mut calls).is_some(), "{number}");
            carry(now_us, calls, &mut a, &mut b);
            // Somebody new is found all the same, and who asks is known.
            if number == 20_000 {
                let mut calls = Vec::new();
                assert_eq!(a.find(now_us, late, &mut calls), None);
                carry(now_us, calls, &mut a, &mut c);
            }
            if number == 30_000 {
                let mut calls = Vec::new();
                let asks = discovery::question(MAC[2], [10, 0, 0, 4].into(), own.ip());
                assert!(a.hear(now_us, 0, &asks.unwrap(), &mut calls));
                assert_eq!(calls.len(), 1);
            }
        }
        assert_eq!(questions, 100_000, "each was asked for by both ports");
        for known in [peer, late, at("10.0.0.4:4")] {
            assert!(!a.machines[&known.ip()].is_stranger());
        }
        // A cable that is out for a while makes nobody a stranger.
        a.forget(0);
        a.forget(1);
        for number in 50_000..60_000 {
            let now_us = u64::from(number) * 1000;
            a.find(now_us, numbered(number), &mut Vec::new());
        }
        assert!(a.machines.contains_key(&peer.ip()));
    }

    #[test]
    fn questions_for_strangers_are_few_and_known_machines_are_not_counted() {
        let (own, peer) = (at("10.0.0.1:1"), at("10.0.0.2:2"));
        let mut a = Neighbours::new(own, None, vec![MAC[0]]);
        let mut b = Neighbours::new(peer, None, vec![MAC[1]]);
        let mut calls = Vec::new();
        assert_eq!(a.find(0, peer, &mut calls), None);
        carry(0, calls, &mut a, &mut b);
        let mut asked = Vec::new();
        for number in 0..100_000u32 {
            // In a second, new ones and the same again.
            let now_us = u64::from(number) * 10;
            a.find(now_us, numbered(number % 5000), &mut asked);
        }
        let most = STRANGERS_BURST + 1_000_000 / STRANGER_EVERY_US;
        assert!(asked.len() as u64 <= most, "{} questions", asked.len());
        // Whoever is known is asked for again although the strangers have used up theirs.
        let stale_us = STALE_US + 5;
        for number in 0..1000 {
            a.find(stale_us, numbered(number), &mut Vec::new());
        }
        let mut calls = Vec::new();
        assert!(a.find(stale_us, peer, &mut calls).is_some());
        assert_eq!(calls.len(), 1);
    }

    #[test]
    fn of_too_many_machines_the_one_not_heard_for_the_longest_time_goes() {
        let own = at("10.0.0.1:1");
        let mut a = Neighbours::new(own, None, vec![MAC[0]]);
        let machines = MOST_MACHINES as u32;
        let asks = |number| discovery::question(MAC[1], numbered(number).ip(), own.ip()).unwrap();
        for number in 0..machines + 10 {
            // The second asks first. Those for whom there is no room are answered, and not kept.
            let mut calls = Vec::new();
            assert!(a.hear((number ^ 1).into(), 0, &asks(number), &mut calls));
            assert_eq!(calls.len(), 1);
        }
        assert_eq!(a.machines.len(), MOST_MACHINES);
        for number in 0..1000 {
            let now_us = 10_000 + u64::from(number) * STRANGER_EVERY_US;
            a.find(now_us, numbered(machines + 20 + number), &mut Vec::new());
        }
        assert_eq!(a.machines.len(), MOST_MACHINES);
        let gone = (0..machines).filter(|n| !a.machines.contains_key(&numbered(*n).ip()));
        assert_eq!(gone.collect::<Vec<u32>>(), [1]);
    }
}

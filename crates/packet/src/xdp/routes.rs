//! Which way datagrams go: straight out of our interface under ready-made headers, or by the kernel.
//!
//! The kernel resolves neighbours (ARP, neighbour discovery) and knows the routes; here its answers are kept for a
//! second. A datagram whose next hop is not known yet is handed to the kernel's own UDP socket, which both delivers it
//! and makes the kernel look for the neighbour. Once that is known the kernel is told whenever it is used and nobody has made sure
//! of it lately: so it notices when a neighbour is gone or has another address, and no datagram has to go by it.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::netlink::{Link, Netlink};
use crate::headers::Template;

/// How long an answer is good.
const KEPT: Duration = Duration::from_secs(1);
/// How soon a neighbour that is being looked for is asked about again.
const SOON: Duration = Duration::from_millis(10);
/// Destinations kept; beyond, all are asked about again.
const MOST_WAYS: usize = 16_384;

struct Way {
    /// Which interface, and the headers.
    straight: Option<(usize, Template)>,
    /// The longest IP packet that the route, or a router on it, takes, where that is less than the interface does.
    mtu: Option<usize>,
    until: Instant,
}

impl Way {
    fn straight_for(&self, bytes: usize) -> Option<(usize, Template)> {
        let (_, template) = self.straight.as_ref()?;
        let fits = self
            .mtu
            .is_none_or(|mtu| template.packet_bytes(bytes) <= mtu);
        self.straight.filter(|_| fits)
    }
}

/// What the kernel says of a way.
enum Answer {
    /// Which interface, and the headers.
    Straight(usize, Template),
    /// The same, but something has to go by the kernel, which is to make sure of the neighbour.
    AfterThis(usize, Template),
    /// Its own.
    ByKernel,
    /// Its own, until the neighbour is known.
    Soon,
}

/// The ways from our interfaces and port.
pub(crate) struct Routes {
    netlink: Netlink,
    /// Our interfaces and their Ethernet addresses.
    ports: Vec<(Link, [u8; 6])>,
    local: SocketAddr,
    ways: HashMap<SocketAddr, Way>,
}

impl Routes {
    /// `local`: where datagrams come from; with an unspecified address, the one that the route says.
    pub(crate) fn new(netlink: Netlink, ports: Vec<(Link, [u8; 6])>, local: SocketAddr) -> Routes {
        Routes {
            netlink,
            ports,
            local,
            ways: HashMap::new(),
        }
    }

    /// The interface and the headers for a datagram of so many bytes; `None`: by the kernel, which also cuts what is too long for a router on
    /// the way.
    pub(crate) fn find(
        &mut self,
        now: Instant,
        to: SocketAddr,
        bytes: usize,
    ) -> Option<(usize, Template)> {
        match self.ways.get(&to) {
            Some(way) if now < way.until => return way.straight_for(bytes),
            Some(_) => {}
            None if self.ways.len() >= MOST_WAYS => self.ways.clear(),
            None => {}
        }
        let mut mtu = None;
        let (straight, kept, now_straight) = match self.ask(to, &mut mtu) {
            Answer::Straight(card, headers) => (Some((card, headers)), KEPT, true),
            Answer::AfterThis(card, headers) => (Some((card, headers)), KEPT, false),
            Answer::ByKernel => (None, KEPT, false),
            Answer::Soon => (None, SOON, false),
        };
        let way = Way {
            straight,
            mtu,
            until: now + kept,
        };
        let found = way.straight_for(bytes).filter(|_| now_straight);
        self.ways.insert(to, way);
        found
    }

    fn ask(&mut self, to: SocketAddr, mtu: &mut Option<usize>) -> Answer {
        if to.ip().is_multicast() || to.ip().is_unspecified() {
            return Answer::ByKernel;
        }
        let (interface, next_hop, source) = match to {
            SocketAddr::V6(v6) if v6.ip().is_unicast_link_local() => (v6.scope_id(), to.ip(), None),
            _ => match self.netlink.route(to.ip()) {
                Some(route) => {
                    *mtu = route.mtu;
                    (route.interface, route.next_hop, route.source)
                }
                None => return Answer::ByKernel,
            },
        };
        let ours = |(link, _): &(Link, _)| link.index == interface;
        let Some(card) = self.ports.iter().position(ours) else {
            return Answer::ByKernel;
        };
        let Some(neighbour) = self.netlink.neighbour(interface, next_hop) else {
            return Answer::Soon;
        };
        let mut from = self.local;
        if from.ip().is_unspecified() {
            match source {
                Some(source) => from.set_ip(source),
                None => return Answer::ByKernel,
            }
        }
        let Some(headers) = Template::new(self.ports[card].1, from, neighbour.mac, to) else {
            return Answer::ByKernel;
        };
        if neighbour.is_stale && self.netlink.use_neighbour(interface, next_hop).is_err() {
            return Answer::AfterThis(card, headers);
        }
        Answer::Straight(card, headers)
    }
}

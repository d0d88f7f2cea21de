//! Which way datagrams go: straight out of our interface under ready-made headers, or by the kernel.
//!
//! The kernel resolves neighbours (ARP, neighbour discovery) and knows the routes; here its answers are kept for a
//! second. A datagram whose next hop is not known yet is handed to the kernel's own UDP socket, which both delivers it
//! and makes the kernel look for the neighbour. So does one datagram per second and destination afterwards: the kernel
//! then notices when a neighbour is gone or has another address.

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
    until: Instant,
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

    /// The interface and the headers for `to`; `None`: by the kernel.
    pub(crate) fn find(&mut self, now: Instant, to: SocketAddr) -> Option<(usize, Template)> {
        match self.ways.get(&to) {
            Some(way) if now < way.until => return way.straight,
            Some(_) => {}
            None if self.ways.len() >= MOST_WAYS => self.ways.clear(),
            None => {}
        }
        let (straight, soon) = self.ask(to);
        let until = now + if soon { SOON } else { KEPT };
        self.ways.insert(to, Way { straight, until });
        // This one goes by the kernel, whether or not the next will.
        None
    }

    /// The headers, if they are known, and whether they may be known soon.
    fn ask(&mut self, to: SocketAddr) -> (Option<(usize, Template)>, bool) {
        if to.ip().is_multicast() || to.ip().is_unspecified() {
            return (None, false);
        }
        let (interface, next_hop, source) = match to {
            SocketAddr::V6(v6) if v6.ip().is_unicast_link_local() => (v6.scope_id(), to.ip(), None),
            _ => match self.netlink.route(to.ip()) {
                Some(route) => (route.interface, route.next_hop, route.source),
                None => return (None, false),
            },
        };
        let ours = |(link, _): &(Link, _)| link.index == interface;
        let Some(card) = self.ports.iter().position(ours) else {
            return (None, false);
        };
        let Some(mac) = self.netlink.neighbour(interface, next_hop) else {
            return (None, true);
        };
        let mut from = self.local;
        if from.ip().is_unspecified() {
            match source {
                Some(source) => from.set_ip(source),
                None => return (None, false),
            }
        }
        let headers = Template::new(self.ports[card].1, from, mac, to);
        (headers.map(|headers| (card, headers)), false)
    }
}

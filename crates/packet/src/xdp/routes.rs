//! Which way datagrams go: straight out of our interface under ready-made headers, or by the
//! kernel.
//!
//! The kernel resolves neighbours (ARP, neighbour discovery) and knows the routes; here its answers
//! are kept for a second. A datagram whose next hop is not known yet is handed to the kernel's own
//! UDP socket, which both delivers it and makes the kernel look for the neighbour. Once that is
//! known the kernel is notified whenever it is used and was not confirmed lately: so it notices
//! when a neighbour is gone or has another address, and no datagram has to go through it while
//! others follow.
//!
//! A thread asks, and the sender goes on with what it knows: the kernel answers within
//! microseconds, but for as long as somebody changes the network's configuration (makes an
//! interface, resets a card) not at all, and until 6.17 it blocks the asking thread.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use std::{io, thread};

use foldhash::fast::RandomState;

use super::netlink::{Link, Netlink};
use crate::headers::Template;

/// How long an answer is good.
const ROUTE_TTL: Duration = Duration::from_secs(1);
/// How long beyond that it is used while the next one is waited for.
const STALE_ROUTE_GRACE: Duration = Duration::from_secs(10);
/// How soon a neighbour that is being looked for is asked about again.
const NEIGHBOUR_RETRY: Duration = Duration::from_millis(10);
/// How long the kernel is not asked again about an interface: the destinations behind it are many.
const LINK_TTL: Duration = Duration::from_millis(100);
/// Destinations kept. Beyond, those without a way of ours are forgotten; all, if these are less
/// than a quarter.
const MAX_ROUTES: usize = 16_384;
/// Questions that wait for the thread; beyond, they are put again with the next datagram.
const MAX_ROUTE_QUERIES: usize = 1024;

/// The way to a destination, as far as it is known.
struct NextHop {
    /// Which interface, and the headers.
    direct: Option<(usize, Template)>,
    /// The longest IP packet that the interface takes, or the route, or a router on it, where that
    /// is less.
    mtu: Option<usize>,
    until: Instant,
    /// The next datagram has to go through the kernel, which is to make sure of the neighbour.
    next_via_kernel: bool,
    is_query_pending: bool,
}

impl NextHop {
    fn unknown(now: Instant) -> NextHop {
        NextHop {
            direct: None,
            mtu: None,
            until: now,
            next_via_kernel: false,
            is_query_pending: false,
        }
    }

    fn direct_route(&self, now: Instant, bytes: usize) -> Option<(usize, &Template)> {
        let (card, template) = self.direct.as_ref()?;
        let fits = self
            .mtu
            .is_none_or(|mtu| template.packet_bytes(bytes) <= mtu);
        (fits && now < self.until + STALE_ROUTE_GRACE).then_some((*card, template))
    }
}

/// What the kernel says of a way.
struct RouteReply {
    direct: Option<(usize, Template)>,
    mtu: Option<usize>,
    ttl: Duration,
    next_via_kernel: bool,
}

impl RouteReply {
    fn via_kernel(ttl: Duration) -> RouteReply {
        RouteReply {
            direct: None,
            mtu: None,
            ttl,
            next_via_kernel: false,
        }
    }
}

/// The ways from our interfaces and one port.
pub(crate) struct Routes {
    next_hops: HashMap<SocketAddr, NextHop, RandomState>,
    resolver: Arc<RouteResolver>,
    /// The port's place among those that the thread asks for.
    port: usize,
    answers: Receiver<(SocketAddr, RouteReply)>,
}

impl Routes {
    /// The ways from each of these ports, which are on these interfaces (with their Ethernet
    /// addresses). `locals`: where datagrams come from; with an unspecified address, the one that
    /// the route says.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(crate) fn of_ports(
        netlink: Netlink,
        interfaces: Vec<(Link, [u8; 6])>,
        locals: &[SocketAddr],
    ) -> io::Result<Vec<Routes>> {
        let (to_ports, answers): (Vec<_>, Vec<_>) = locals
            .iter()
            .map(|local| {
                let (sender, receiver) = channel();
                ((*local, sender), receiver)
            })
            .unzip();
        let of_link = |(link, mac): (Link, [u8; 6])| Interface {
            index: link.index,
            now: Some((mac, link.mtu)),
            queried_at: Instant::now(),
        };
        let resolver = Arc::new(RouteResolver::start(Kernel {
            netlink,
            interfaces: interfaces.into_iter().map(of_link).collect(),
            ports: to_ports,
        })?);
        let routes = answers
            .into_iter()
            .enumerate()
            .map(|(port, answers)| Routes {
                next_hops: HashMap::default(),
                resolver: Arc::clone(&resolver),
                port,
                answers,
            });
        Ok(routes.collect())
    }

    /// Takes in what the kernel has answered since.
    pub(crate) fn drain_answers(&mut self, now: Instant) {
        while let Ok((to, answer)) = self.answers.try_recv() {
            self.learn(now, to, answer);
        }
    }

    /// The interface and the headers for a datagram of so many bytes; `None`: by the kernel, which
    /// also cuts what is too long for a router on the way.
    pub(crate) fn find(
        &mut self,
        now: Instant,
        to: SocketAddr,
        bytes: usize,
    ) -> Option<(usize, &Template)> {
        if self.next_hops.len() >= MAX_ROUTES && !self.next_hops.contains_key(&to) {
            self.forget();
        }
        let way = self
            .next_hops
            .entry(to)
            .or_insert_with(|| NextHop::unknown(now));
        if now >= way.until && !way.is_query_pending {
            way.is_query_pending = self.resolver.ask(self.port, to);
        }
        if std::mem::take(&mut way.next_via_kernel) {
            return None;
        }
        way.direct_route(now, bytes)
    }

    fn learn(&mut self, now: Instant, to: SocketAddr, answer: RouteReply) {
        // Forgotten meanwhile: it is asked about again.
        if let Some(way) = self.next_hops.get_mut(&to) {
            *way = NextHop {
                direct: answer.direct,
                mtu: answer.mtu,
                until: now + answer.ttl,
                next_via_kernel: answer.next_via_kernel,
                is_query_pending: false,
            };
        }
    }

    /// Makes room: strangers that are nowhere give way to those that are somewhere.
    fn forget(&mut self) {
        self.next_hops.retain(|_, way| way.direct.is_some());
        if self.next_hops.len() >= MAX_ROUTES / 4 * 3 {
            self.next_hops.clear();
        }
    }
}

/// The thread that asks.
struct RouteResolver {
    /// Until the end.
    queries: Option<SyncSender<(usize, SocketAddr)>>,
    is_stopped: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl RouteResolver {
    fn start(mut kernel: Kernel) -> io::Result<RouteResolver> {
        let (queries, put) = sync_channel::<(usize, SocketAddr)>(MAX_ROUTE_QUERIES);
        let is_stopped = Arc::new(AtomicBool::new(false));
        let ends = Arc::clone(&is_stopped);
        let answering = move || {
            // No sender waits for the answers to what is left at the end.
            for (port, to) in put.iter().take_while(|_| !ends.load(Ordering::Relaxed)) {
                kernel.answer(port, to);
            }
        };
        let thread = thread::Builder::new().name("cyclone-routes".to_owned());
        Ok(RouteResolver {
            queries: Some(queries),
            is_stopped,
            thread: Some(thread.spawn(answering)?),
        })
    }

    /// Puts a question; false if there are too many.
    fn ask(&self, port: usize, to: SocketAddr) -> bool {
        let queries = self.queries.as_ref();
        queries.is_some_and(|queries| queries.try_send((port, to)).is_ok())
    }
}

impl Drop for RouteResolver {
    fn drop(&mut self) {
        self.is_stopped.store(true, Ordering::Relaxed);
        self.queries = None;
        if let Some(thread) = self.thread.take() {
            // It has nothing to say that anybody could use.
            let _ = thread.join();
        }
    }
}

/// An interface of ours: what it is may change while it is in use.
struct Interface {
    index: u32,
    /// Its Ethernet address and the longest IP packet; `None` where it is gone.
    now: Option<([u8; 6], usize)>,
    queried_at: Instant,
}

/// The kernel, as the thread asks it.
struct Kernel {
    netlink: Netlink,
    interfaces: Vec<Interface>,
    /// Where each port's datagrams come from, and where its answers go.
    ports: Vec<(SocketAddr, Sender<(SocketAddr, RouteReply)>)>,
}

impl Kernel {
    fn answer(&mut self, port: usize, to: SocketAddr) {
        let Some((local, answers)) = self.ports.get(port).cloned() else {
            return;
        };
        // A port that has gone needs none.
        let _ = answers.send((to, self.ask(local, to)));
    }

    fn ask(&mut self, mut from: SocketAddr, to: SocketAddr) -> RouteReply {
        let its_own = RouteReply::via_kernel(ROUTE_TTL);
        if to.ip().is_multicast() || to.ip().is_unspecified() {
            return its_own;
        }
        let (interface, next_hop, source, mtu) = match to {
            SocketAddr::V6(v6) if v6.ip().is_unicast_link_local() => {
                (v6.scope_id(), to.ip(), None, None)
            }
            _ => match self.netlink.route(to.ip()) {
                Some(route) => (route.interface, route.next_hop, route.source, route.mtu),
                None => return its_own,
            },
        };
        let ours = |ours: &Interface| ours.index == interface;
        let Some(card) = self.interfaces.iter().position(ours) else {
            return its_own;
        };
        let Some((mac, carries)) = self.link_state(card) else {
            return its_own;
        };
        let Some(neighbour) = self.netlink.neighbour(interface, next_hop) else {
            return RouteReply::via_kernel(NEIGHBOUR_RETRY);
        };
        if from.ip().is_unspecified() {
            match source {
                Some(source) => from.set_ip(source),
                None => return its_own,
            }
        }
        let Some(headers) = Template::new(mac, from, neighbour.mac, to) else {
            return its_own;
        };
        RouteReply {
            direct: Some((card, headers)),
            mtu: Some(mtu.map_or(carries, |mtu| mtu.min(carries))),
            ttl: ROUTE_TTL,
            next_via_kernel: neighbour.is_stale
                && self.netlink.use_neighbour(interface, next_hop).is_err(),
        }
    }

    /// An interface's Ethernet address now, and the longest IP packet.
    fn link_state(&mut self, card: usize) -> Option<([u8; 6], usize)> {
        let ours = &mut self.interfaces[card];
        if ours.queried_at.elapsed() >= LINK_TTL {
            match self.netlink.link(ours.index) {
                Ok(link) => ours.now = link.mac.map(|mac| (mac, link.mtu)),
                Err(error) if error.raw_os_error() == Some(libc::ENODEV) => ours.now = None,
                // It did not answer in time: what it said before is good.
                Err(_) => {}
            }
            ours.queried_at = Instant::now();
        }
        ours.now
    }
}

//! Headers ready to be put before datagrams, by destination: what one driver has found out of what
//! all know.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::discovery::Mac;
use super::neighbours::{Neighbours, OutgoingPacket};
use crate::headers::Template;

/// Destinations whose headers are kept.
const MAX_ROUTES: usize = 16_384;
/// How long ready-made headers are used before the way is looked for again, µs.
const ROUTE_TTL_US: u64 = 1_000_000;

/// A port of ours, the headers, and until when they are good.
type CachedRoute = (usize, Template, u64);

pub(super) struct RouteCache {
    /// Where our datagrams come from.
    local: SocketAddr,
    macs: Vec<Mac>,
    routes: HashMap<SocketAddr, CachedRoute>,
    generation: Arc<AtomicU64>,
    /// Of the changes, those that `routes` has seen.
    seen_generation: u64,
}

impl RouteCache {
    pub(super) fn new(local: SocketAddr, neighbours: &Neighbours) -> RouteCache {
        let generation = neighbours.generation();
        RouteCache {
            local,
            macs: neighbours.macs().to_vec(),
            routes: HashMap::new(),
            seen_generation: generation.load(Ordering::Acquire),
            generation,
        }
    }

    /// The port and the headers for `to`, if the way is known; what has to be asked goes to
    /// `calls`.
    pub(super) fn find(
        &mut self,
        now_us: u64,
        to: SocketAddr,
        neighbours: &Mutex<Neighbours>,
        calls: &mut Vec<OutgoingPacket>,
    ) -> Option<(usize, Template)> {
        let generation = self.generation.load(Ordering::Acquire);
        if generation != self.seen_generation {
            self.routes.clear();
            self.seen_generation = generation;
        }
        if let Some((port, headers, until)) = self.routes.get(&to)
            && now_us < *until
        {
            return Some((*port, *headers));
        }
        let mut neighbours = neighbours.lock().unwrap_or_else(PoisonError::into_inner);
        let (port, mac) = neighbours.find(now_us, to, calls)?;
        drop(neighbours);
        let headers = Template::new(self.macs[port], self.local, mac, to)?;
        if self.routes.len() >= MAX_ROUTES {
            self.routes.clear();
        }
        self.routes
            .insert(to, (port, headers, now_us + ROUTE_TTL_US));
        Some((port, headers))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dpdk::discovery;

    const OWN: Mac = [2, 0, 0, 0, 0, 1];
    const OTHERS: [Mac; 2] = [[2, 0, 0, 0, 0, 2], [2, 0, 0, 0, 0, 3]];

    /// Each driver's datagrams come from its own port; what one of them hears all know at once.
    #[test]
    fn drivers_share_routes_and_have_separate_ports() {
        let locals: [SocketAddr; 2] =
            ["10.0.0.1:7000", "10.0.0.1:7001"].map(|it| it.parse().unwrap());
        let to: SocketAddr = "10.0.0.2:9".parse().unwrap();
        let all = Mutex::new(Neighbours::new(locals[0].ip(), None, vec![OWN]));
        let mut ways = locals.map(|local| RouteCache::new(local, &all.lock().unwrap()));
        let mut calls = Vec::new();
        for ways in &mut ways {
            assert_eq!(ways.find(0, to, &all, &mut calls), None);
        }
        assert_eq!(calls.len(), 1, "asked for once");
        // It has another address after a while, and the first one is not used any longer.
        for (now_us, mac) in [(1, OTHERS[0]), (2, OTHERS[1])] {
            let announcement = discovery::answer(mac, to.ip(), OWN, locals[0].ip()).unwrap();
            assert!(
                all.lock()
                    .unwrap()
                    .on_packet(now_us, 0, &announcement, &mut calls)
            );
            for (ways, local) in ways.iter_mut().zip(locals) {
                let wanted = Template::new(OWN, local, mac, to).unwrap();
                let found = ways.find(now_us, to, &all, &mut calls);
                assert_eq!(found, Some((0, wanted)));
            }
        }
        assert_eq!(calls.len(), 1);
    }

    #[test]
    fn old_ways_are_looked_for_again() {
        let local: SocketAddr = "[fd77::1]:7000".parse().unwrap();
        let to: SocketAddr = "[fd77::2]:9".parse().unwrap();
        let all = Mutex::new(Neighbours::new(local.ip(), None, vec![OWN]));
        let mut ways = RouteCache::new(local, &all.lock().unwrap());
        let mut calls = Vec::new();
        assert_eq!(ways.find(0, to, &all, &mut calls), None);
        let announcement = discovery::answer(OTHERS[0], to.ip(), OWN, local.ip()).unwrap();
        assert!(
            all.lock()
                .unwrap()
                .on_packet(0, 0, &announcement, &mut calls)
        );
        assert!(ways.find(0, to, &all, &mut calls).is_some());
        // No request is sent while ready-made headers do; then it is asked for, as it has not been
        // heard for long.
        let late_us = 20_000_000;
        assert!(ways.find(ROUTE_TTL_US - 1, to, &all, &mut calls).is_some());
        assert_eq!(calls.len(), 1);
        assert!(ways.find(late_us, to, &all, &mut calls).is_some());
        assert_eq!(calls.len(), 2);
        assert_eq!(ways.find(2 * late_us, to, &all, &mut calls), None);
    }
}

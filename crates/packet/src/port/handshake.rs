//! Making, replacing and forgetting associations. The datagrams are drawn in [`crate::auth`].
//!
//! - One handshake per node at a time, retried with growing pauses, given up after two seconds; the
//!   next message starts another.
//! - A new association never ends an old one at once: both sides receive on the newest few and send
//!   on the newest that the other side has confirmed, so forged or replayed handshake datagrams and
//!   notices disturb nothing, and two nodes that greet each other at the same time simply hold two
//!   for a while.
//! - The responder confirms by an empty datagram, and by another whenever the Confirm is repeated.
//! - An association is kept at least as long as its Confirm could be replayed (or remembered as
//!   retired), so the same keys never start again from sequence number 0.

use super::*;
use crate::auth::{Class, Greeting, Refusal, Session};

/// First pause before a handshake datagram is repeated, µs; doubles up to the next.
const RETRY_US: u64 = 5_000;
const RETRY_MAX_US: u64 = 80_000;
/// A handshake without an answer is given up after this time, µs.
const GIVE_UP_US: u64 = 2_000_000;
/// A notice can start a handshake with the same node only this often, µs.
const NOTICE_HANDSHAKE_EVERY_US: u64 = 20_000;
/// A notice can repeat a Confirm only this soon after the last, µs.
const RECONFIRM_US: u64 = 1_000;
/// Associations with one node that are kept in normal times.
const NODE_ASSOCS: usize = 2;
/// ...and at most, counting those too young to be dropped.
const NODE_ASSOCS_MAX: usize = 8;
/// Nodes known at most (configured ones are always accepted).
const MAX_NODES: usize = 256;

/// When a handshake datagram is repeated, and when it is given up.
pub(super) struct Retry {
    pub(super) next_us: u64,
    interval_us: u64,
    pub(super) give_up_us: u64,
}

impl Retry {
    pub(super) fn new(now_us: u64) -> Retry {
        Retry {
            next_us: now_us + RETRY_US,
            interval_us: RETRY_US,
            give_up_us: now_us + GIVE_UP_US,
        }
    }

    pub(super) fn back_off(&mut self, now_us: u64) {
        self.interval_us = (self.interval_us * 2).min(RETRY_MAX_US);
        self.next_us = now_us + self.interval_us;
    }
}

impl Node {
    pub(super) fn new(address: SocketAddr) -> Node {
        Node {
            address,
            configured: false,
            current: None,
            assocs: Vec::new(),
            hello: None,
            confirm: None,
            queue: VecDeque::new(),
            queue_bytes: 0,
            notice_handshake_us: None,
        }
    }

    /// The other side has shown that it holds an association's keys: messages go on it, unless on a
    /// newer one.
    pub(super) fn note_confirmed(&mut self, assoc: u64) {
        if self.confirm.as_ref().is_none_or(|(of, ..)| *of != assoc) {
            return;
        }
        self.confirm = None;
        let place = |id: u64| self.assocs.iter().position(|it| *it == id);
        if self.current.and_then(place) < place(assoc) {
            self.current = Some(assoc);
        }
    }
}

impl Port {
    /// The largest datagram we can take, as told to peers.
    pub(super) fn receive_max(&self) -> u32 {
        let most = largest_datagram(&*self.driver, &self.pool);
        u32::try_from(most).unwrap_or(u32::MAX)
    }

    /// Payload bytes per datagram towards a peer; `None` if it takes less than anyone may.
    fn chunk_to(&self, to: SocketAddr, their_max: u32) -> Option<usize> {
        let max = self.driver.max_datagram_to(to).min(their_max as usize);
        (max >= MIN_DATAGRAM).then(|| chunk_of(max))
    }

    fn class(&self) -> (Class, u64) {
        match self.identity {
            Identity::Node(id) => (Class::Node, id),
            Identity::Client => (Class::Client, 0),
        }
    }

    pub(super) fn refuse(&mut self, refusal: Refusal) {
        match refusal {
            Refusal::Malformed => self.stats.malformed += 1,
            Refusal::Forged => self.stats.forged += 1,
            Refusal::Mode => self.stats.mode_mismatch += 1,
            Refusal::Version(_) => self.stats.version_mismatch += 1,
            Refusal::Cluster { .. } => self.stats.cluster_mismatch += 1,
            Refusal::Stale => self.stats.handshake_stale += 1,
        }
    }

    /// Refuses a Hello, and notes why: each node that is set up wrongly sends some.
    fn refuse_hello(&mut self, now_us: u64, from: SocketAddr, bytes: &[u8], refusal: Refusal) {
        self.refuse(refusal);
        let is_client = bytes.get(2) == Some(&(Class::Client as u8));
        let fault = match refusal {
            Refusal::Forged if is_client => PeerFault::ClientKey,
            Refusal::Forged => PeerFault::NodeKey,
            Refusal::Mode => PeerFault::Security {
                theirs: bytes.get(3).copied().unwrap_or(0),
                ours: self.security,
            },
            Refusal::Version(theirs) => PeerFault::Version {
                theirs,
                ours: crate::auth::VERSION,
            },
            Refusal::Cluster { .. } => PeerFault::Cluster,
            Refusal::Malformed | Refusal::Stale => return,
        };
        self.warn(now_us, from, fault);
    }

    /// Notes a fault of the member at this address, or of a stranger.
    fn warn(&mut self, now_us: u64, from: SocketAddr, fault: PeerFault) {
        let mut members = self.nodes.iter().filter(|(_, node)| node.configured);
        let member = members.find(|(_, node)| node.address == from);
        let member = member.map(|(id, _)| *id);
        self.warnings.note(now_us, from, member, fault);
    }

    /// Greets a node, unless a handshake is in progress.
    pub(super) fn start_hello(&mut self, now_us: u64, id: u64) {
        let (class, me) = self.class();
        let max = self.receive_max();
        let Some(node) = self.nodes.get_mut(&id) else {
            return;
        };
        if node.hello.is_some() || node.confirm.is_some() {
            return;
        }
        let Some(hello) = self.auth.hello(class, me, id, max) else {
            return;
        };
        node.hello = Some((hello, Retry::new(now_us)));
        self.timer_us = self.timer_us.min(now_us + RETRY_US);
        self.stats.handshakes_started += 1;
        let to = node.address;
        self.push_control(to, &hello);
    }

    pub(super) fn on_hello(&mut self, now_us: u64, from: SocketAddr, bytes: &[u8]) {
        let Identity::Node(me) = self.identity else {
            self.stats.malformed += 1;
            return;
        };
        let greeting = match self.auth.read_hello(bytes) {
            Ok(greeting) => greeting,
            Err(refusal) => return self.refuse_hello(now_us, from, bytes, refusal),
        };
        if !self.acceptable(me, &greeting) {
            if greeting.class == Class::Node {
                let fault = match greeting.from == me {
                    true => PeerFault::OwnId(me),
                    false => PeerFault::WrongNode {
                        wanted: greeting.to,
                        found: me,
                    },
                };
                self.warn(now_us, from, fault);
            }
            return;
        }
        let max = self.receive_max();
        if let Some(challenge) = self
            .auth
            .challenge(now_us, from, bytes, greeting.class, max)
        {
            self.push_control(from, &challenge);
        }
    }

    fn acceptable(&mut self, me: u64, greeting: &Greeting) -> bool {
        let myself = greeting.class == Class::Node && greeting.from == me;
        if greeting.to != me || myself {
            self.stats.wrong_node += 1;
            return false;
        }
        true
    }

    pub(super) fn on_challenge(&mut self, now_us: u64, from: SocketAddr, bytes: &[u8]) {
        if self.take_probe_answer(bytes) {
            return;
        }
        let (class, _) = self.class();
        // Few nodes, and a Challenge is rare: finding the Hello it answers needs no index.
        let answered = self.nodes.iter().find(|(_, node)| {
            node.hello
                .as_ref()
                .is_some_and(|(hello, _)| bytes.get(4..20) == Some(&hello[36..52]))
        });
        let Some((&id, node)) = answered else {
            self.stats.handshake_stale += 1;
            return;
        };
        let Some((hello, _)) = &node.hello else {
            return;
        };
        let made = match self.auth.read_challenge(bytes, hello, class) {
            Ok(made) => made,
            Err(refusal) => return self.refuse(refusal),
        };
        let to = node.address;
        let configured = node.configured;
        let Some(chunk) = self.chunk_to(to, made.max_datagram) else {
            self.stats.associations_refused += 1;
            return;
        };
        if self.needs_authentication {
            self.driver.note_authenticated(from, PeerClass::Node);
        }
        let assoc_id = made.session.id;
        if self.assocs.contains_key(&assoc_id) {
            // Two ids alike by chance: the retry makes another.
            self.stats.associations_refused += 1;
            return;
        }
        let assoc = Assoc {
            address: if configured { to } else { from },
            fixed: configured,
            boot: made.boot,
            ..Assoc::new(now_us, Peer::Node(id), from, made.session, chunk)
        };
        self.assocs.insert(assoc_id, Box::new(assoc));
        self.stats.associations_made += 1;
        if let Some(node) = self.nodes.get_mut(&id) {
            node.hello = None;
            node.confirm = Some((assoc_id, made.confirm, Retry::new(now_us)));
        }
        self.timer_us = self.timer_us.min(now_us + RETRY_US);
        self.push_control(to, &made.confirm);
        self.add_assoc(now_us, id, assoc_id, false);
    }

    pub(super) fn on_confirm(&mut self, now_us: u64, from: SocketAddr, bytes: &[u8]) {
        let Identity::Node(me) = self.identity else {
            self.stats.malformed += 1;
            return;
        };
        let (greeting, session) = match self.auth.read_confirm(now_us, from, bytes) {
            Ok(made) => made,
            Err(refusal) => return self.refuse(refusal),
        };
        if !self.acceptable(me, &greeting) {
            return;
        }
        let id = session.id;
        if self.assocs.contains_key(&id) {
            // A repeated Confirm: our answer was lost.
            self.greet.push(id);
            return;
        }
        if self.retired.contains_key(&id) {
            self.stats.handshake_stale += 1;
            return;
        }
        let Some(chunk) = self.chunk_to(from, greeting.max_datagram) else {
            self.stats.associations_refused += 1;
            return;
        };
        let room = match greeting.class {
            Class::Node => self.room_for_node(now_us, greeting.from, from),
            Class::Client => self.room_for_client(now_us),
        };
        if !room {
            self.stats.associations_refused += 1;
            return;
        }
        let peer = match greeting.class {
            Class::Node => Peer::Node(greeting.from),
            Class::Client => Peer::Client(id),
        };
        if self.needs_authentication {
            self.driver.note_authenticated(from, class_of(peer));
        }
        let mut assoc = Assoc::new(now_us, peer, from, session, chunk);
        // Its Confirm proves that the initiator holds the keys.
        assoc.confirmed = true;
        assoc.boot = greeting.boot;
        if let Peer::Node(node) = peer
            && let Some(node) = self.nodes.get(&node)
            && node.configured
        {
            assoc.address = node.address;
            assoc.fixed = true;
        }
        self.assocs.insert(id, Box::new(assoc));
        self.stats.associations_made += 1;
        self.greet.push(id);
        match peer {
            Peer::Client(_) => {
                self.clients += 1;
                self.timer_us = self.timer_us.min(now_us + CLIENT_SWEEP_US);
            }
            Peer::Node(node) => {
                // Ours is not needed any more.
                if let Some(node) = self.nodes.get_mut(&node) {
                    node.hello = None;
                }
                self.add_assoc(now_us, node, id, true);
            }
        }
    }

    fn room_for_node(&mut self, now_us: u64, id: u64, from: SocketAddr) -> bool {
        if !self.nodes.contains_key(&id) {
            if self.nodes.len() >= MAX_NODES {
                return false;
            }
            self.nodes.insert(id, Node::new(from));
        }
        self.trim_node(now_us, id, NODE_ASSOCS_MAX - 1);
        self.nodes.get_mut(&id).is_some_and(|node| {
            if !node.configured {
                node.address = from;
            }
            node.assocs.len() < NODE_ASSOCS_MAX
        })
    }

    fn room_for_client(&mut self, now_us: u64) -> bool {
        if self.clients < self.max_clients {
            return true;
        }
        let old = self.assocs.iter().filter(|(_, a)| {
            matches!(a.peer, Peer::Client(_))
                && now_us.saturating_sub(a.made_us) >= CHALLENGE_LIFE_US
        });
        let Some(oldest) = old.min_by_key(|(_, a)| a.used_us).map(|(id, _)| *id) else {
            return false;
        };
        self.drop_assoc(now_us, oldest);
        true
    }

    /// Adds a node's newest association. Messages wait for it to be confirmed as long as there is
    /// another: an attacker that forges notices can make us begin more of them than the other side
    /// accepts.
    fn add_assoc(&mut self, now_us: u64, node_id: u64, assoc: u64, is_confirmed: bool) {
        self.detect_duplicate_id(now_us, node_id, assoc);
        if let Some(node) = self.nodes.get_mut(&node_id) {
            node.assocs.push(assoc);
            if is_confirmed || node.current.is_none() {
                node.current = Some(assoc);
            }
            if !node.queue.is_empty() {
                self.ready.push(node_id);
            }
        }
        self.trim_node(now_us, node_id, NODE_ASSOCS);
    }

    /// Two processes with one id show in the order of their associations: one that was there before
    /// the other and is there behind it. What was only restarted, or moved, never comes back as
    /// what it was.
    fn detect_duplicate_id(&mut self, now_us: u64, node_id: u64, assoc: u64) {
        let Some((node, new)) = self.nodes.get(&node_id).zip(self.assocs.get(&assoc)) else {
            return;
        };
        let known = node.assocs.iter().filter_map(|id| self.assocs.get(id));
        let mut behind = known.skip_while(|old| old.boot != new.boot);
        let other = behind.find(|old| old.boot != new.boot && old.source != new.source);
        let Some(other) = other.map(|old| old.source) else {
            return;
        };
        let (from, fault) = (new.source, PeerFault::SameId { id: node_id, other });
        self.stats.duplicate_ids += 1;
        self.warnings.note(now_us, from, Some(node_id), fault);
    }

    /// Drops a node's oldest associations beyond `keep` that are old enough.
    fn trim_node(&mut self, now_us: u64, node_id: u64, keep: usize) {
        loop {
            let Some(node) = self.nodes.get_mut(&node_id) else {
                return;
            };
            let Some(&oldest) = node.assocs.first() else {
                return;
            };
            let young = self
                .assocs
                .get(&oldest)
                .is_some_and(|a| now_us.saturating_sub(a.made_us) < CHALLENGE_LIFE_US);
            if node.assocs.len() <= keep || node.current == Some(oldest) || young {
                return;
            }
            node.assocs.remove(0);
            self.drop_assoc(now_us, oldest);
        }
    }

    pub(super) fn drop_assoc(&mut self, now_us: u64, id: u64) {
        let Some(assoc) = self.assocs.remove(&id) else {
            return;
        };
        self.stats.associations_dropped += 1;
        self.clients -= usize::from(matches!(assoc.peer, Peer::Client(_)));
        self.reassembler.forget(id);
        let replayable_until = assoc.made_us + CHALLENGE_LIFE_US;
        if replayable_until > now_us {
            self.retired.insert(id, replayable_until);
            self.timer_us = self.timer_us.min(now_us + CLIENT_SWEEP_US);
        }
    }

    pub(super) fn on_unknown(&mut self, now_us: u64, from: SocketAddr, bytes: &[u8]) {
        let Some(id) = crate::header::parse_unknown(bytes) else {
            self.stats.malformed += 1;
            return;
        };
        let about = self.assocs.get(&id).filter(|a| a.address == from);
        let Some(Peer::Node(node_id)) = about.map(|a| a.peer) else {
            self.stats.notices_ignored += 1;
            return;
        };
        let Some(node) = self.nodes.get_mut(&node_id) else {
            return;
        };
        if let Some((_, confirm, retry)) = node.confirm.as_mut().filter(|(of, ..)| *of == id) {
            // Our data overtook the Confirm, or that was lost.
            let sent_us = retry.next_us - retry.interval_us;
            if now_us.saturating_sub(sent_us) >= RECONFIRM_US {
                retry.next_us = now_us + retry.interval_us;
                let (to, confirm) = (node.address, *confirm);
                self.push_control(to, &confirm);
            }
            return;
        }
        let soon = node
            .notice_handshake_us
            .is_some_and(|at| now_us.saturating_sub(at) < NOTICE_HANDSHAKE_EVERY_US);
        let is_busy = node.hello.is_some() || node.confirm.is_some();
        if node.current != Some(id) || is_busy || soon {
            self.stats.notices_ignored += 1;
            return;
        }
        node.notice_handshake_us = Some(now_us);
        self.stats.notices_heeded += 1;
        self.start_hello(now_us, node_id);
    }

    pub(super) fn run_timers(&mut self, now_us: u64) {
        let mut next_us = self.run_probe(now_us);
        let mut resend: Vec<(SocketAddr, [u8; CONFIRM_BYTES], usize)> = Vec::new();
        let mut dead = Vec::new();
        for node in self.nodes.values_mut() {
            if let Some((hello, retry)) = &mut node.hello {
                if now_us >= retry.give_up_us {
                    node.hello = None;
                    self.stats.handshake_timeouts += 1;
                    self.stats.queue_dropped += node.queue.len() as u64;
                    node.queue.clear();
                    node.queue_bytes = 0;
                } else {
                    if now_us >= retry.next_us {
                        let mut bytes = [0; CONFIRM_BYTES];
                        bytes[..HELLO_BYTES].copy_from_slice(hello);
                        resend.push((node.address, bytes, HELLO_BYTES));
                        retry.back_off(now_us);
                    }
                    next_us = next_us.min(retry.next_us);
                }
            }
            if let Some((assoc, confirm, retry)) = &mut node.confirm {
                if now_us >= retry.give_up_us {
                    // The responder never showed the keys. Back to an older association, or to
                    // shaking hands.
                    let assoc = *assoc;
                    node.confirm = None;
                    node.assocs.retain(|id| *id != assoc);
                    if node.current == Some(assoc) {
                        node.current = node.assocs.last().copied();
                    }
                    self.stats.handshake_timeouts += 1;
                    dead.push(assoc);
                } else {
                    if now_us >= retry.next_us {
                        resend.push((node.address, *confirm, CONFIRM_BYTES));
                        retry.back_off(now_us);
                    }
                    next_us = next_us.min(retry.next_us);
                }
            }
        }
        for assoc in dead {
            self.drop_assoc(now_us, assoc);
        }
        for (to, bytes, len) in resend {
            self.push_control(to, &bytes[..len]);
        }
        self.reassembler.expire(now_us);
        if !self.reassembler.is_empty() {
            next_us = next_us.min(now_us + PARTIAL_SWEEP_US);
        }
        self.retired.retain(|_, until_us| *until_us > now_us);
        let idle_us = self.client_idle_us;
        let idle: Vec<u64> = self
            .assocs
            .iter()
            .filter(|(_, a)| {
                matches!(a.peer, Peer::Client(_)) && now_us.saturating_sub(a.used_us) >= idle_us
            })
            .map(|(id, _)| *id)
            .collect();
        for id in idle {
            self.drop_assoc(now_us, id);
        }
        if self.clients > 0 || !self.retired.is_empty() {
            next_us = next_us.min(now_us + CLIENT_SWEEP_US);
        }
        self.timer_us = next_us;
    }
}

impl Assoc {
    fn new(now_us: u64, peer: Peer, address: SocketAddr, session: Session, chunk: usize) -> Assoc {
        Assoc {
            peer,
            address,
            fixed: false,
            send: session.send,
            receive: session.receive,
            next_seq: 0,
            window: Window::default(),
            chunk,
            made_us: now_us,
            used_us: now_us,
            confirmed: false,
            source: address,
            boot: [0; 16],
        }
    }
}

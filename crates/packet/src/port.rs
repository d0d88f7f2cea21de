//! A port: messages to and from peers over one driver, shared by nodes and clients.
//!
//! ```text
//! send     message -> fragments -> header, tag -> one burst to the driver
//! receive  datagram -> association -> replay window -> tag -> (decrypt) -> reassembly -> message
//! ```
//! Associations are made on demand when a message is sent to a node (`handshake.rs`); clients are
//! known only through the associations they made. While a handshake runs, a few messages per peer
//! wait for it.

mod backlog;
mod config;
mod handshake;
mod open;
mod probe;
mod send;
mod sizes;
mod warnings;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::io;
use std::net::SocketAddr;
use std::os::fd::RawFd;

use cyclone_pmem::payload::{Payload, Segment};
use cyclone_pmem::pool::Pool;
use cyclone_wire::planted::{self, Bug};

use crate::auth::{Authenticator, CHALLENGE_LIFE_US, CONFIRM_BYTES, HELLO_BYTES, Keys, Security};
use crate::driver::{Driver, DriverStats, PeerClass};
use crate::fragment::{Limits, Outcome, Reassembler};
use crate::gcm::Gcm;
use crate::header::{COVERED_BYTES, DATA_BYTES, DataHeader, Kind, encode_unknown, field};
use crate::replay::Window;
use crate::stats::PortStats;
use crate::{Datagram, PacketError};
pub use config::PortConfig;
use handshake::Retry;
pub use probe::ProbeOutcome;
use sizes::{chunk_of, largest_datagram};
pub use warnings::{PeerFault, PeerWarning};

/// Datagrams taken per poll.
const POLL_BURST: usize = 64;
/// Drivers and peers with smaller datagrams than this are refused, bytes.
const MIN_DATAGRAM: usize = 512;
/// How soon a driver is called again that has not sent all it took, and how soon at least if that
/// does not help, µs.
const UNSENT_US: u64 = 100;
const MAX_UNSENT_US: u64 = 10_000;
/// How soon to look again for what the driver has left there.
const UNRECEIVED_US: u64 = 1_000;
/// How often partial messages are checked for age, µs.
const PARTIAL_SWEEP_US: u64 = 250_000;
/// How often clients are checked for idleness, µs.
const CLIENT_SWEEP_US: u64 = 5_000_000;
/// Unknown-association notices: at most this many at once...
const NOTICE_BURST: u64 = 64;
/// ...and one more per this time, µs.
const NOTICE_EVERY_US: u64 = 1_000;

// The smallest fragments still fit the reassembly's bound.
const _: () = assert!((MIN_DATAGRAM - DATA_BYTES) / 64 * 64 >= crate::fragment::MIN_FRAGMENT);

/// Who this port is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Identity {
    /// A node of the cluster, by id. Accepts associations.
    Node(u64),
    /// A client. Only makes associations.
    Client,
}

/// The other end of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Peer {
    /// A node, by id; proven by the node key (between nodes) or the client key (seen from a
    /// client).
    Node(u64),
    /// A client, by association id: a client that restarts or was forgotten comes back under
    /// another one.
    Client(u64),
}

/// A message received.
#[derive(Debug)]
pub struct Message {
    /// Who sent it, proven by its key.
    pub from: Peer,
    /// Its bytes, in the frames they arrived in.
    pub body: Payload,
}

/// A message to send: the concatenation of `parts`.
#[derive(Debug, Clone, Copy)]
pub struct Outgoing<'a> {
    /// Destination.
    pub to: Peer,
    /// The bytes, in order.
    pub parts: &'a [&'a [u8]],
}

/// Association ids are outputs of a key derivation: they hash themselves.
#[derive(Default)]
struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn write_u64(&mut self, id: u64) {
        self.0 = id;
    }
}

/// Keys and sequence numbers shared with one peer.
struct Assoc {
    peer: Peer,
    address: SocketAddr,
    /// The address is configured and does not follow the peer's datagrams.
    fixed: bool,
    send: Gcm,
    receive: Gcm,
    next_seq: u64,
    window: Window,
    /// Payload bytes per datagram.
    chunk: usize,
    made_us: u64,
    used_us: u64,
    /// The peer has shown that it holds the keys.
    confirmed: bool,
    /// Where its handshake came from, and what the peer drew when it started.
    source: SocketAddr,
    boot: [u8; 16],
}

/// A node this port talks to.
struct Node {
    address: SocketAddr,
    configured: bool,
    /// Association that messages are sent on: the newest that is confirmed, or the only one.
    current: Option<u64>,
    /// All that are received on, oldest first.
    assocs: Vec<u64>,
    hello: Option<([u8; HELLO_BYTES], Retry)>,
    confirm: Option<(u64, [u8; CONFIRM_BYTES], Retry)>,
    queue: VecDeque<Vec<u8>>,
    queue_bytes: usize,
    notice_handshake_us: Option<u64>,
}

/// A handshake datagram or notice about to be sent.
struct Control {
    to: SocketAddr,
    len: usize,
    bytes: [u8; CONFIRM_BYTES],
}

/// Messages to and from peers over one driver. Never blocks; not for use by several threads at
/// once.
pub struct Port {
    driver: Box<dyn Driver>,
    /// See [`Driver::needs_authentication`].
    needs_authentication: bool,
    pool: Pool,
    pool_reserve: usize,
    identity: Identity,
    security: Security,
    max_message: usize,
    max_clients: usize,
    client_idle_us: u64,
    queue_messages: usize,
    queue_bytes: usize,
    auth: Authenticator,
    nodes: BTreeMap<u64, Node>,
    assocs: HashMap<u64, Box<Assoc>, BuildHasherDefault<IdHasher>>,
    clients: usize,
    /// Associations dropped so early that their Confirm could still be replayed, with the end of
    /// that time.
    retired: HashMap<u64, u64>,
    reassembler: Reassembler,
    inbox: Vec<(SocketAddr, Payload)>,
    control: Vec<Control>,
    /// Associations to send an empty datagram on.
    greet: Vec<u64>,
    /// A question whether a node answers at an address, and how the last one ended.
    probe: Option<probe::Probe>,
    probed: Option<ProbeOutcome>,
    /// Nodes whose queue can go out.
    ready: Vec<u64>,
    outbox: send::Outbox,
    backlog: backlog::Backlog,
    /// Bytes that may wait in it.
    backlog_bytes: usize,
    notice_credit: u64,
    notice_us: u64,
    timer_us: u64,
    /// When the driver is to be called again for what it has not sent yet.
    unsent_us: Option<u64>,
    unsent_wait_us: u64,
    /// When it is to be called again for what it has left there.
    unreceived_us: Option<u64>,
    warnings: warnings::Warnings,
    stats: PortStats,
}

impl Port {
    /// A port over `driver` whose received messages live in frames of `pool`.
    ///
    /// # Errors
    /// The configuration contradicts itself; see [`PacketError`].
    pub fn new(
        driver: Box<dyn Driver>,
        pool: Pool,
        config: PortConfig,
    ) -> Result<Port, PacketError> {
        if matches!(config.identity, Identity::Node(_)) && config.keys.node.is_none() {
            return Err(PacketError::NodeKeyMissing);
        }
        let keys = match config.identity {
            Identity::Node(_) => config.keys,
            // A client that was given the node key does not use it.
            Identity::Client => Keys {
                node: None,
                ..config.keys
            },
        };
        let own_pool = driver.pool();
        let stats = PortStats {
            frames_outside: own_pool.is_some().into(),
            ..PortStats::default()
        };
        let pool = own_pool.unwrap_or(pool);
        let max_datagram = largest_datagram(&*driver, &pool);
        if max_datagram < MIN_DATAGRAM {
            return Err(PacketError::DatagramTooSmall(max_datagram, MIN_DATAGRAM));
        }
        let most = usize::from(u16::MAX) * chunk_of(MIN_DATAGRAM);
        if config.max_message > most {
            return Err(PacketError::MessageTooLarge(config.max_message));
        }
        let limits = config.reassembly.unwrap_or(Limits {
            max_message: config.max_message,
            held_bytes: config.max_message.saturating_mul(4).max(16 << 20),
            per_association: 64,
            timeout_us: 1_000_000,
        });
        let limits = Limits {
            max_message: config.max_message,
            ..limits
        };
        let frames = pool.count() as usize;
        Ok(Port {
            auth: Authenticator::new(&keys, config.security, &config.boot, config.cluster),
            reassembler: Reassembler::new(limits, pool.frame_bytes() as usize),
            pool_reserve: (frames / 8).max(2 * POLL_BURST).min(frames / 2),
            needs_authentication: driver.needs_authentication(),
            driver,
            pool,
            identity: config.identity,
            security: config.security,
            max_message: config.max_message,
            max_clients: config.max_clients,
            client_idle_us: config.client_idle_us.max(CHALLENGE_LIFE_US),
            queue_messages: config.queue_messages,
            queue_bytes: config.queue_bytes,
            nodes: BTreeMap::new(),
            assocs: HashMap::default(),
            clients: 0,
            retired: HashMap::new(),
            inbox: Vec::with_capacity(POLL_BURST),
            control: Vec::new(),
            greet: Vec::new(),
            probe: None,
            probed: None,
            ready: Vec::new(),
            outbox: send::Outbox::default(),
            backlog: backlog::Backlog::default(),
            backlog_bytes: config.max_message.saturating_mul(4).max(16 << 20),
            notice_credit: NOTICE_BURST,
            notice_us: 0,
            timer_us: u64::MAX,
            unsent_us: None,
            unsent_wait_us: UNSENT_US,
            unreceived_us: None,
            warnings: warnings::Warnings::default(),
            stats,
        })
    }

    /// Makes a node known, or changes its address. No datagram is sent before a message is.
    pub fn add_node(&mut self, id: u64, address: SocketAddr) {
        let known = self.nodes.get(&id).filter(|node| node.configured);
        if let Some(old) = known.map(|node| node.address).filter(|it| *it != address) {
            self.driver.forget_node(old);
        }
        self.driver.add_node(address);
        let node = self.nodes.entry(id).or_insert_with(|| Node::new(address));
        node.address = address;
        node.configured = true;
        for assoc in &node.assocs {
            if let Some(assoc) = self.assocs.get_mut(assoc) {
                assoc.address = address;
                assoc.fixed = true;
            }
        }
    }

    /// Forgets a node and its associations. It may come back by shaking hands if it holds the node
    /// key.
    pub fn remove_node(&mut self, now_us: u64, id: u64) {
        let Some(node) = self.nodes.remove(&id) else {
            return;
        };
        if node.configured {
            self.driver.forget_node(node.address);
        }
        self.stats.queue_dropped += node.queue.len() as u64;
        for assoc in node.assocs {
            self.drop_assoc(now_us, assoc);
        }
    }

    /// Receives a burst of datagrams, appends the messages that became whole to `out`, and does
    /// what is due. Returns the number of datagrams taken from the driver: 0 means that nothing
    /// more is there now. `now_us`: any monotone clock, the same one in every call.
    ///
    /// # Errors
    /// The driver is unusable.
    pub fn poll(&mut self, now_us: u64, out: &mut Vec<Message>) -> io::Result<usize> {
        let mut inbox = std::mem::take(&mut self.inbox);
        let received = self.driver.recv(&self.pool, &mut inbox, POLL_BURST);
        let again = self.driver.has_unreceived();
        self.unreceived_us = again.then_some(now_us + UNRECEIVED_US);
        if !inbox.is_empty() {
            // Frames held elsewhere (in the log, say) must never stop this port from receiving what
            // would free them, so when few are left messages are copied out and their frames go
            // round again.
            let low = self.available_frames() == 0;
            for (from, datagram) in inbox.drain(..) {
                self.receive(now_us, from, datagram, low, out);
            }
        }
        self.inbox = inbox;
        if now_us >= self.timer_us {
            self.run_timers(now_us);
        }
        if !(self.control.is_empty() && self.greet.is_empty() && self.ready.is_empty()) {
            self.flush_ready(now_us)?;
        }
        self.send_backlog(now_us)?;
        self.note_unsent(now_us);
        received
    }

    /// Blocks until a datagram may be there or the time is over. For hosts without their own event
    /// loop.
    ///
    /// # Errors
    /// When the system refuses to poll.
    pub fn wait(&mut self, most: std::time::Duration) -> io::Result<()> {
        crate::wait(&mut *self.driver, most)
    }

    /// The host's event loop has seen that one of [`Port::fds`] is readable.
    pub fn on_readable(&mut self, fd: RawFd) {
        self.driver.on_readable(fd);
    }

    /// See [`Driver::rx_is_empty`].
    pub fn rx_is_empty(&mut self) -> bool {
        self.driver.rx_is_empty()
    }

    /// Descriptors to wait on.
    pub fn fds(&self) -> Vec<RawFd> {
        self.driver.fds()
    }

    /// When to call [`Port::poll`] at the latest even if nothing arrives, on the clock of `now_us`.
    pub fn next_timeout(&self) -> Option<u64> {
        let timer = (self.timer_us != u64::MAX).then_some(self.timer_us);
        let others = [self.backlog.retry_us, self.unsent_us, self.unreceived_us];
        timer.into_iter().chain(others.into_iter().flatten()).min()
    }

    /// Where this port receives.
    pub fn local_addr(&self) -> SocketAddr {
        self.driver.local_addr()
    }

    /// Share of the frames that are in use, of those that may be before messages are copied out of
    /// theirs; 0 to 1.
    pub fn frames_used(&self) -> f64 {
        let kept = self.driver.frames_kept() + self.driver.deferred_frames();
        let all = (self.pool.count() as usize).saturating_sub(kept as usize + self.pool_reserve);
        1.0 - (self.available_frames() as f64 / all.max(1) as f64).min(1.0)
    }

    /// Free frames beyond the reserve and what the driver will want again.
    fn available_frames(&self) -> usize {
        let spoken_for = self.pool_reserve + self.driver.deferred_frames() as usize;
        (self.pool.free() as usize).saturating_sub(spoken_for)
    }

    /// What the driver is, for people.
    pub fn describe_driver(&self) -> String {
        self.driver.describe()
    }

    /// The driver's counters.
    pub fn driver_stats(&self) -> DriverStats {
        DriverStats {
            frames_kept: self.driver.frames_kept().into(),
            ..self.driver.stats()
        }
    }

    /// Payload bytes per frame of a message of many datagrams on the receiving side, at least.
    pub fn chunk_bytes(&self) -> usize {
        sizes::chunk_per_frame(&*self.driver, &self.pool)
    }

    /// See [`Driver::set_idle_poll_interval`].
    pub fn set_idle_poll_interval(&mut self, look_us: Option<u64>) {
        self.driver.set_idle_poll_interval(look_us);
    }

    /// The longest message, in bytes.
    pub fn max_message(&self) -> usize {
        self.max_message
    }

    /// The port's counters.
    pub fn stats(&self) -> PortStats {
        PortStats {
            partials_dropped: self.reassembler.dropped(),
            partials: self.reassembler.len() as u64,
            associations: self.assocs.len() as u64,
            ..self.stats
        }
    }

    /// Takes what is to be logged about peers that were refused; rate-limited.
    pub fn take_warnings(&mut self) -> Vec<PeerWarning> {
        match self.warnings.is_empty() {
            true => Vec::new(),
            false => self.warnings.take(),
        }
    }

    /// When a datagram of a node was last received under its keys, on the clock of `now_us`; 0:
    /// never.
    pub fn heard_us(&self, id: u64) -> u64 {
        let assocs = self.nodes.get(&id).map_or(&[][..], |node| &node.assocs);
        let heard = assocs.iter().filter_map(|id| self.assocs.get(id));
        heard.map(|assoc| assoc.used_us).max().unwrap_or(0)
    }

    /// Whether an association with this peer stands.
    pub fn is_connected(&self, peer: Peer) -> bool {
        match peer {
            Peer::Node(id) => self
                .nodes
                .get(&id)
                .is_some_and(|node| node.current.is_some()),
            Peer::Client(id) => self.assocs.get(&id).is_some_and(|a| a.peer == peer),
        }
    }

    fn receive(
        &mut self,
        now_us: u64,
        from: SocketAddr,
        datagram: Payload,
        low: bool,
        out: &mut Vec<Message>,
    ) {
        // Everything but payloads lies in the first frame.
        let first = datagram.parts().first().map_or(&[][..], Segment::as_slice);
        match Kind::of(first) {
            Some(Kind::Data) => self.on_data(now_us, from, datagram, low, out),
            Some(Kind::Hello) => self.on_hello(now_us, from, first),
            Some(Kind::Challenge) => self.on_challenge(now_us, from, first),
            Some(Kind::Confirm) => self.on_confirm(now_us, from, first),
            Some(Kind::Unknown) => self.on_unknown(now_us, from, first),
            None => self.stats.malformed += 1,
        }
    }

    fn on_data(
        &mut self,
        now_us: u64,
        from: SocketAddr,
        datagram: Payload,
        low: bool,
        out: &mut Vec<Message>,
    ) {
        let first = datagram.parts().first().map_or(&[][..], Segment::as_slice);
        let Some(header) = DataHeader::parse_first(first, datagram.len()) else {
            self.stats.malformed += 1;
            return;
        };
        let Some(assoc) = self.assocs.get_mut(&header.assoc) else {
            self.stats.unknown_association += 1;
            self.send_unknown_notice(now_us, from, header.assoc);
            return;
        };
        if !assoc.window.is_fresh(header.seq) {
            self.stats.replayed += 1;
            return;
        }
        let covered: [u8; COVERED_BYTES] = field(first, 0);
        let tag = field(first, COVERED_BYTES);
        let nonce = nonce_of(header.seq);
        let payload = datagram.tail(DATA_BYTES);
        let payload_bytes = payload.len();
        let good = match self.security {
            Security::Off => true,
            Security::Authenticated => {
                let parts = std::iter::once(&covered[..]).chain(payload.segments());
                assoc.receive.verify(&nonce, parts, &[], &tag)
            }
            Security::Encrypted => {
                let text = open::in_one_piece(&payload);
                assoc.receive.verify(&nonce, [&covered[..]], &text, &tag)
            }
        };
        if !good && !planted::has(Bug::TagNotChecked) {
            self.stats.forged += 1;
            return;
        }
        if !assoc.fixed && assoc.address != from && assoc.window.is_newest(header.seq) {
            assoc.address = from;
        }
        assoc.window.accept(header.seq);
        assoc.used_us = now_us;
        let peer = assoc.peer;
        if self.needs_authentication {
            self.driver.note_authenticated(from, class_of(peer));
        }
        if !assoc.confirmed {
            assoc.confirmed = true;
            if let Peer::Node(id) = peer
                && let Some(node) = self.nodes.get_mut(&id)
            {
                node.note_confirmed(header.assoc);
            }
        }
        self.stats.datagrams_received += 1;
        self.stats.bytes_received += payload_bytes as u64;
        if header.count == 0 {
            return;
        }
        if header.total as usize > self.max_message {
            self.stats.too_large += 1;
            return;
        }
        // Fragments from a peer with a small MTU would hold large frames for little.
        let fragment = u32::from(header.index) + 1 < u32::from(header.count);
        let frames_bytes = payload.parts().len() * self.pool.frame_bytes() as usize;
        let spare = low || (fragment && payload_bytes * 2 < frames_bytes);
        let piece = match self.security {
            Security::Encrypted => {
                self.stats.copied_crypt_bytes += payload_bytes as u64;
                open::open(&assoc.receive, &self.pool, &nonce, &payload, spare)
            }
            _ if spare => {
                self.stats.copied_spare_bytes += payload_bytes as u64;
                Payload::from_vec(payload.to_vec())
            }
            _ => {
                let in_frame = |part: &&Segment| matches!(part, Segment::Frame(_));
                let kept = payload.parts().iter().filter(in_frame);
                self.stats.kept_bytes += kept.map(|part| part.as_slice().len() as u64).sum::<u64>();
                payload
            }
        };
        let body = if header.count == 1 {
            piece
        } else {
            let from_node = matches!(peer, Peer::Node(_));
            match self.reassembler.add(now_us, &header, from_node, piece) {
                Outcome::Whole(body) => body,
                Outcome::Kept => {
                    self.timer_us = self.timer_us.min(now_us + PARTIAL_SWEEP_US);
                    return;
                }
                Outcome::NoRoom => return,
                Outcome::Refused => {
                    self.stats.malformed += 1;
                    return;
                }
            }
        };
        self.stats.messages_received += 1;
        out.push(Message { from: peer, body });
    }

    /// Tells the sender of data that its association is not known here: a hint, smaller than what
    /// caused it.
    fn send_unknown_notice(&mut self, now_us: u64, to: SocketAddr, assoc: u64) {
        // Clients do not accept associations, so a node could do nothing about it.
        if self.identity == Identity::Client {
            return;
        }
        let earned = now_us.saturating_sub(self.notice_us) / NOTICE_EVERY_US;
        if earned > 0 {
            self.notice_credit = (self.notice_credit + earned.min(NOTICE_BURST)).min(NOTICE_BURST);
            self.notice_us = now_us;
        }
        if self.notice_credit == 0 {
            return;
        }
        self.notice_credit -= 1;
        self.stats.notices_sent += 1;
        self.push_control(to, &encode_unknown(assoc));
    }

    fn push_control(&mut self, to: SocketAddr, datagram: &[u8]) {
        let mut bytes = [0; CONFIRM_BYTES];
        bytes[..datagram.len()].copy_from_slice(datagram);
        self.control.push(Control {
            to,
            len: datagram.len(),
            bytes,
        });
    }
}

fn class_of(peer: Peer) -> PeerClass {
    match peer {
        Peer::Node(_) => PeerClass::Node,
        Peer::Client(_) => PeerClass::Client,
    }
}

/// The GCM nonce of a sequence number.
fn nonce_of(seq: u64) -> [u8; 12] {
    let mut nonce = [0; 12];
    nonce[4..].copy_from_slice(&seq.to_be_bytes());
    nonce
}

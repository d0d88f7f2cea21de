//! Datagrams over TCP connections: the baseline the paper starts from. //= cyclone §6.1
//!
//! Each datagram is preceded by its length, u32 little-endian. Connections are made on demand by
//! the side that sends first; an accepted connection is known by its remote address. A connection
//! that fails loses what was queued on it, as a network may. Copies on both sides; bounded buffers;
//! never blocks.
//!
//! Anybody can connect. Connections of peers that have not been authenticated have their own bound
//! and push out only each other; nodes and clients keep their places however many strangers come.

mod input;

use std::collections::{HashMap, HashSet};
use std::io::{self, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use cyclone_pmem::payload::Payload;
use cyclone_pmem::pool::Pool;

use self::input::{Input, Spares};
use crate::driver::{Datagram, Driver, DriverStats, HEADROOM, PeerClass};
use crate::sys;

/// Beyond this nothing more is read from a connection before what was is taken in, bytes.
const WAITING_BYTES: usize = 1 << 20;
/// A connection whose other side acknowledges nothing, or takes nothing, for so long is ended, ms.
const SILENCE_MS: i32 = 3_000;

/// Limits.
#[derive(Debug, Clone, Copy)]
pub struct TcpOptions {
    /// Largest datagram, bytes; also bounded by the pool's frames.
    pub max_datagram: usize,
    /// Bytes queued per connection before datagrams are dropped.
    pub queue_bytes: usize,
    /// Connections, accepted and made, at most. A quarter of them may be of peers that have not
    /// been authenticated.
    pub max_connections: usize,
    /// Datagrams per system call at most; 1 for measuring what more are worth.
    pub burst: usize,
}

impl Default for TcpOptions {
    fn default() -> Self {
        TcpOptions {
            max_datagram: 64 << 10,
            queue_bytes: 16 << 20,
            max_connections: 1024,
            burst: usize::MAX,
        }
    }
}

impl TcpOptions {
    fn max_unauthenticated(&self) -> usize {
        (self.max_connections / 4).max(1)
    }
}

struct Connection {
    stream: TcpStream,
    token: u64,
    /// Still connecting: writes wait.
    connecting: bool,
    wants_write: bool,
    output: Vec<u8>,
    output_at: usize,
    input: Input,
    /// Order of last use, for eviction.
    used: u64,
    class: PeerClass,
}

/// A listening socket and its connections as a [`Driver`].
pub struct TcpDriver {
    listener: TcpListener,
    local: SocketAddr,
    epoll: OwnedFd,
    options: TcpOptions,
    connections: HashMap<SocketAddr, Connection>,
    by_token: HashMap<u64, SocketAddr>,
    /// Addresses of nodes that the port may contact first.
    nodes: HashSet<SocketAddr>,
    /// How many connections there are of each class.
    counts: [usize; 3],
    /// Buffers to read into.
    spares: Spares,
    /// Connections whose input may still hold whole datagrams.
    backlog: Vec<SocketAddr>,
    next_token: u64,
    clock: u64,
    has_unreceived: bool,
    stats: DriverStats,
}

const LISTENER: u64 = 0;

impl TcpDriver {
    /// Listens; datagrams will be received into frames of `pool`'s size.
    ///
    /// # Errors
    /// The address is in use or not ours, or no descriptor is free.
    pub fn bind(
        address: SocketAddr,
        pool: &Pool,
        mut options: TcpOptions,
    ) -> io::Result<TcpDriver> {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        options.max_datagram = options
            .max_datagram
            .min((pool.frame_bytes() as usize).saturating_sub(64));
        // SAFETY: a plain system call; a non-negative result is a descriptor that nothing else
        // owns.
        let epoll = unsafe {
            let fd = libc::epoll_create1(libc::EPOLL_CLOEXEC);
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            OwnedFd::from_raw_fd(fd)
        };
        let driver = TcpDriver {
            local: listener.local_addr()?,
            listener,
            epoll,
            options,
            connections: HashMap::new(),
            by_token: HashMap::new(),
            nodes: HashSet::new(),
            counts: [0; 3],
            spares: Spares::default(),
            backlog: Vec::new(),
            next_token: LISTENER + 1,
            clock: 0,
            has_unreceived: false,
            stats: DriverStats::default(),
        };
        driver.watch(
            libc::EPOLL_CTL_ADD,
            driver.listener.as_raw_fd(),
            LISTENER,
            false,
        )?;
        Ok(driver)
    }

    fn watch(&self, op: i32, fd: RawFd, token: u64, write: bool) -> io::Result<()> {
        let events = libc::EPOLLIN | if write { libc::EPOLLOUT } else { 0 };
        let mut event = libc::epoll_event {
            events: events as u32,
            u64: token,
        };
        // SAFETY: `event` is valid for the call, which copies it.
        let rc = unsafe { libc::epoll_ctl(self.epoll.as_raw_fd(), op, fd, &mut event) };
        if rc == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }

    fn drop_connection(&mut self, address: SocketAddr) {
        // Closing the descriptor takes it out of the epoll set.
        if let Some(connection) = self.connections.remove(&address) {
            self.by_token.remove(&connection.token);
            self.counts[connection.class as usize] -= 1;
            self.stats.connections_dropped += 1;
        }
    }

    /// Makes room for a connection of a class. The unauthenticated ones, which anybody can make,
    /// push out only each other; of the rest the class that has proven less goes first, and of one
    /// class who was not heard for longest.
    fn make_room(&mut self, class: PeerClass) {
        let unauthenticated = self.counts[PeerClass::Unauthenticated as usize];
        let has_too_many = unauthenticated >= self.options.max_unauthenticated();
        let most = match class {
            PeerClass::Unauthenticated if has_too_many => PeerClass::Unauthenticated,
            _ if self.connections.len() < self.options.max_connections => return,
            PeerClass::Unauthenticated if unauthenticated > 0 => PeerClass::Unauthenticated,
            _ => PeerClass::Node,
        };
        let candidates = self.connections.iter().filter(|(_, c)| c.class <= most);
        let oldest = candidates.min_by_key(|(_, c)| (c.class, c.used));
        if let Some(address) = oldest.map(|(address, _)| *address) {
            self.drop_connection(address);
        }
    }

    fn set_class(&mut self, address: SocketAddr, class: PeerClass) {
        if let Some(connection) = self.connections.get_mut(&address)
            && connection.class != class
        {
            self.counts[connection.class as usize] -= 1;
            self.counts[class as usize] += 1;
            connection.class = class;
        }
    }

    fn adopt(
        &mut self,
        address: SocketAddr,
        stream: TcpStream,
        connecting: bool,
    ) -> io::Result<()> {
        let class = match self.nodes.contains(&address) {
            true => PeerClass::Node,
            false => PeerClass::Unauthenticated,
        };
        self.make_room(class);
        // Latency matters more than packet count; a socket that refuses an option still works.
        let _ = stream.set_nodelay(true);
        // The kernel would try a peer that was away for a minute after ever longer times, up to two
        // minutes.
        let _ = sys::set_user_timeout(stream.as_raw_fd(), SILENCE_MS);
        let token = self.next_token;
        self.next_token += 1;
        self.clock += 1;
        self.watch(libc::EPOLL_CTL_ADD, stream.as_raw_fd(), token, connecting)?;
        self.by_token.insert(token, address);
        let fresh = Connection {
            stream,
            token,
            connecting,
            wants_write: connecting,
            output: Vec::new(),
            output_at: 0,
            input: Input::default(),
            used: self.clock,
            class,
        };
        self.counts[class as usize] += 1;
        if let Some(old) = self.connections.insert(address, fresh) {
            self.by_token.remove(&old.token);
            self.counts[old.class as usize] -= 1;
        }
        Ok(())
    }

    /// Queues datagrams and writes each connection's at once.
    fn queue_and_flush(&mut self, datagrams: &[Datagram<'_>]) {
        let mut touched: Vec<SocketAddr> = Vec::new();
        for datagram in datagrams {
            let to = datagram.to;
            let len = datagram.len();
            if len == 0 || len > self.options.max_datagram {
                self.stats.send_errors += 1;
                continue;
            }
            if !self.connections.contains_key(&to) {
                let made = connect(to).and_then(|stream| self.adopt(to, stream, true));
                if made.is_err() {
                    self.stats.send_errors += 1;
                    continue;
                }
            }
            let Some(c) = self.connections.get_mut(&to) else {
                continue;
            };
            if c.output.len() - c.output_at + len + 4 > self.options.queue_bytes {
                // One slow peer must not hold up datagrams for the others.
                self.stats.send_errors += 1;
                continue;
            }
            self.clock += 1;
            c.used = self.clock;
            c.output.extend_from_slice(&(len as u32).to_le_bytes());
            for part in datagram.parts {
                c.output.extend_from_slice(part);
            }
            self.stats.sent += 1;
            if touched.last() != Some(&to) && !touched.contains(&to) {
                touched.push(to);
            }
        }
        for address in touched {
            if !self.flush(address) {
                self.drop_connection(address);
            }
        }
    }

    /// Writes what is queued; `false` if the connection failed.
    fn flush(&mut self, address: SocketAddr) -> bool {
        let Some(c) = self.connections.get_mut(&address) else {
            return false;
        };
        while !c.connecting && c.output_at < c.output.len() {
            match c.stream.write(&c.output[c.output_at..]) {
                Ok(0) => return false,
                Ok(n) => {
                    self.stats.send_calls += 1;
                    c.output_at += n;
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
        if c.output_at == c.output.len() {
            c.output.clear();
            c.output_at = 0;
        } else if c.output_at > 1 << 20 {
            c.output.drain(..c.output_at);
            c.output_at = 0;
        }
        let wants = c.connecting || !c.output.is_empty();
        if wants != c.wants_write {
            c.wants_write = wants;
            let (fd, token) = (c.stream.as_raw_fd(), c.token);
            return self.watch(libc::EPOLL_CTL_MOD, fd, token, wants).is_ok();
        }
        true
    }

    fn accept(&mut self) {
        // A bound per call, so that a flood of connections cannot starve those that stand.
        for _ in 0..64 {
            match self.listener.accept() {
                Ok((stream, address)) => {
                    if stream.set_nonblocking(true).is_ok() {
                        let _ = self.adopt(address, stream, false);
                    }
                }
                Err(_) => return,
            }
        }
    }

    /// Reads what has arrived; `false` if the connection ended.
    fn fill(&mut self, address: SocketAddr) -> bool {
        let Some(c) = self.connections.get_mut(&address) else {
            return true;
        };
        self.clock += 1;
        c.used = self.clock;
        // Enough is here already: let the kernel hold the rest back.
        if c.input.bytes().len() > WAITING_BYTES {
            return true;
        }
        match c.input.read(&mut c.stream, &mut self.spares) {
            Ok(0) => false,
            Ok(_) => {
                self.stats.receive_calls += 1;
                true
            }
            Err(e) => matches!(
                e.kind(),
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
            ),
        }
    }

    /// Takes whole datagrams out of a connection's input. `false`: the stream makes no sense.
    fn parse(
        &mut self,
        address: SocketAddr,
        pool: &Pool,
        out: &mut Vec<(SocketAddr, Payload)>,
        end: usize,
    ) -> bool {
        let Some(c) = self.connections.get_mut(&address) else {
            return true;
        };
        let (mut more, mut is_sound) = (false, true);
        while let Some((len, rest)) = c.input.bytes().split_first_chunk::<4>() {
            let len = u32::from_le_bytes(*len) as usize;
            if len == 0 || len > self.options.max_datagram {
                is_sound = false;
                break;
            }
            if rest.len() < len {
                break;
            }
            if out.len() >= end {
                more = true;
                break;
            }
            let Some(mut frame) = pool.alloc() else {
                self.stats.pool_empty += 1;
                more = true;
                break;
            };
            frame[HEADROOM..HEADROOM + len].copy_from_slice(&rest[..len]);
            out.push((address, frame.freeze(HEADROOM..HEADROOM + len).into()));
            self.stats.received += 1;
            c.input.skip(4 + len);
        }
        c.input.shrink(&mut self.spares);
        if more && !self.backlog.contains(&address) {
            self.backlog.push(address);
        }
        is_sound
    }

    fn settle_connect(&mut self, address: SocketAddr) -> bool {
        let Some(c) = self.connections.get_mut(&address) else {
            return true;
        };
        if c.connecting {
            match c.stream.take_error() {
                Ok(None) => c.connecting = false,
                _ => return false,
            }
        }
        self.flush(address)
    }
}

/// Starts a connection without waiting for it.
fn connect(to: SocketAddr) -> io::Result<TcpStream> {
    let family = if to.is_ipv4() {
        libc::AF_INET
    } else {
        libc::AF_INET6
    };
    let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: a plain system call; a non-negative result is a descriptor that nothing else owns.
    let fd = unsafe {
        let fd = libc::socket(family, kind, 0);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        OwnedFd::from_raw_fd(fd)
    };
    let mut storage = sys::blank_address();
    let len = sys::put_address(to, &mut storage);
    // SAFETY: the address and its length describe `storage`, which the call only reads.
    let rc = unsafe { libc::connect(fd.as_raw_fd(), (&raw const storage).cast(), len) };
    if rc < 0 {
        let e = io::Error::last_os_error();
        if e.raw_os_error() != Some(libc::EINPROGRESS) {
            return Err(e);
        }
    }
    Ok(TcpStream::from(fd))
}

impl Driver for TcpDriver {
    fn send(&mut self, datagrams: &[Datagram<'_>]) -> io::Result<usize> {
        for burst in datagrams.chunks(self.options.burst.max(1)) {
            self.queue_and_flush(burst);
        }
        Ok(datagrams.len())
    }

    fn recv(
        &mut self,
        pool: &Pool,
        out: &mut Vec<(SocketAddr, Payload)>,
        max: usize,
    ) -> io::Result<usize> {
        let before = out.len();
        let end = before + max;
        self.has_unreceived = false;
        for address in std::mem::take(&mut self.backlog) {
            if !self.parse(address, pool, out, end) {
                self.drop_connection(address);
            }
        }
        if out.len() >= end {
            return Ok(out.len() - before);
        }
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 64];
        // SAFETY: the pointer and count describe `events`, which the kernel fills.
        let n = unsafe {
            libc::epoll_wait(
                self.epoll.as_raw_fd(),
                events.as_mut_ptr(),
                events.len() as i32,
                0,
            )
        };
        if n < 0 {
            let e = io::Error::last_os_error();
            self.has_unreceived = true;
            return if e.kind() == io::ErrorKind::Interrupted {
                Ok(out.len() - before)
            } else {
                Err(e)
            };
        }
        for event in &events[..n as usize] {
            let (token, flags) = (event.u64, event.events);
            if token == LISTENER {
                self.accept();
                continue;
            }
            let Some(&address) = self.by_token.get(&token) else {
                continue;
            };
            let mut alive = true;
            if flags & (libc::EPOLLOUT | libc::EPOLLERR | libc::EPOLLHUP) as u32 != 0 {
                alive = self.settle_connect(address);
            }
            if alive && flags & (libc::EPOLLIN | libc::EPOLLHUP) as u32 != 0 {
                alive = self.fill(address);
                // What arrived before the end still counts.
                alive &= self.parse(address, pool, out, end);
            }
            if !alive {
                self.drop_connection(address);
            }
        }
        // What a connection still has, of a datagram that is not whole yet, or connections beyond
        // these.
        let may_have_more = n > 0 && out.len() == before;
        self.has_unreceived = may_have_more || !self.backlog.is_empty();
        Ok(out.len() - before)
    }

    fn has_unreceived(&self) -> bool {
        self.has_unreceived
    }

    fn fds(&self) -> Vec<RawFd> {
        vec![self.epoll.as_raw_fd()]
    }

    fn max_datagram(&self) -> usize {
        self.options.max_datagram
    }

    fn needs_authentication(&self) -> bool {
        true
    }

    fn note_authenticated(&mut self, from: SocketAddr, class: PeerClass) {
        let known = self.connections.get(&from).map(|it| it.class);
        if known.is_some_and(|known| known < class) {
            self.set_class(from, class);
        }
    }

    fn add_node(&mut self, address: SocketAddr) {
        self.nodes.insert(address);
        self.set_class(address, PeerClass::Node);
    }

    fn forget_node(&mut self, address: SocketAddr) {
        if self.nodes.remove(&address) {
            self.set_class(address, PeerClass::Unauthenticated);
        }
    }

    fn describe(&self) -> String {
        "TCP".to_owned()
    }

    fn local_addr(&self) -> SocketAddr {
        self.local
    }

    fn stats(&self) -> DriverStats {
        self.stats
    }
}

#[cfg(test)]
mod tests;

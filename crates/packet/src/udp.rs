//! UDP with bursts: recvmmsg straight into frames, sendmmsg straight out of them.

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsRawFd, RawFd};

use cyclone_pmem::payload::Payload;
use cyclone_pmem::pool::{FrameMut, Pool};

use crate::driver::{Datagram, Driver, DriverStats, HEADROOM};
use crate::sys;

/// Most datagrams of one receive call.
const RECEIVE_BURST: usize = 64;
/// Calls in a row that may find nothing but datagrams cut short.
const CUT_BURSTS: usize = 8;
/// Most datagrams of one send call.
const SEND_BURST: usize = 256;
/// What UDP over IPv4 can carry at most, bytes.
const UDP_MAX: usize = 65_507;

/// How the socket is set up.
#[derive(Debug, Clone, Copy)]
pub struct UdpOptions {
    /// Size asked for each socket buffer, bytes.
    pub socket_buffer_bytes: usize,
    /// Largest datagram, bytes; `None`: what the route to each peer carries in one packet.
    pub max_datagram: Option<usize>,
    /// Datagrams per system call at most.
    pub burst: usize,
}

impl Default for UdpOptions {
    fn default() -> Self {
        UdpOptions {
            socket_buffer_bytes: 8 << 20,
            max_datagram: None,
            burst: SEND_BURST,
        }
    }
}

/// A UDP socket as a [`Driver`].
pub struct UdpDriver {
    socket: UdpSocket,
    local: SocketAddr,
    max_datagram: usize,
    burst: usize,
    probe_routes: bool,
    receive: sys::Burst,
    send: sys::Burst,
    /// Frames for the next receive call.
    waiting: Vec<FrameMut>,
    has_unreceived: bool,
    stats: DriverStats,
}

impl UdpDriver {
    /// Binds a socket; datagrams will be received into frames of `pool`'s size.
    ///
    /// # Errors
    /// The address is in use or not ours.
    pub fn bind(address: SocketAddr, pool: &Pool, options: UdpOptions) -> io::Result<UdpDriver> {
        let socket = UdpSocket::bind(address)?;
        socket.set_nonblocking(true)?;
        sys::set_buffers(socket.as_raw_fd(), options.socket_buffer_bytes);
        let frame_max = (pool.frame_bytes() as usize)
            .saturating_sub(64)
            .min(UDP_MAX);
        Ok(UdpDriver {
            local: socket.local_addr()?,
            socket,
            max_datagram: frame_max.min(options.max_datagram.unwrap_or(UDP_MAX)),
            burst: options.burst.clamp(1, SEND_BURST),
            probe_routes: options.max_datagram.is_none(),
            receive: sys::Burst::new(),
            send: sys::Burst::new(),
            waiting: Vec::with_capacity(RECEIVE_BURST),
            has_unreceived: false,
            stats: DriverStats::default(),
        })
    }

    /// One call; answers how many datagrams it took, and how many of them are whole.
    fn receive_burst(
        &mut self,
        pool: &Pool,
        out: &mut Vec<(SocketAddr, Payload)>,
        max: usize,
    ) -> io::Result<(usize, usize)> {
        let want = max.min(RECEIVE_BURST).min(self.burst);
        while self.waiting.len() < want {
            match pool.alloc() {
                Some(frame) => self.waiting.push(frame),
                None => break,
            }
        }
        if self.waiting.is_empty() {
            self.stats.pool_empty += 1;
            self.has_unreceived = true;
            return Ok((0, 0));
        }
        let buffers = self
            .waiting
            .iter_mut()
            .take(want)
            .map(|frame| &mut frame[HEADROOM..]);
        let n = match self.receive.receive(self.socket.as_raw_fd(), buffers) {
            Ok(n) => n,
            Err(e) => match e.raw_os_error() {
                // An ICMP error about something sent earlier is no reason to stop receiving.
                Some(libc::EAGAIN | libc::EINTR | libc::ECONNREFUSED | libc::ENOMEM) => {
                    return Ok((0, 0));
                }
                _ => return Err(e),
            },
        };
        if n > 0 {
            self.stats.receive_calls += 1;
        }
        let before = out.len();
        for (i, frame) in self.waiting.drain(..n).enumerate() {
            let (len, cut, from) = self.receive.received(i);
            match from {
                Some(from) if !cut => {
                    out.push((from, frame.freeze(HEADROOM..HEADROOM + len).into()))
                }
                _ => self.stats.truncated += 1,
            }
        }
        let good = out.len() - before;
        self.stats.received += good as u64;
        Ok((n, good))
    }
}

impl Driver for UdpDriver {
    fn send(&mut self, datagrams: &[Datagram<'_>]) -> io::Result<usize> {
        let mut done = 0;
        while done < datagrams.len() {
            let end = datagrams.len().min(done + self.burst);
            match self
                .send
                .send(self.socket.as_raw_fd(), &datagrams[done..end])
            {
                Ok(n) => {
                    self.stats.send_calls += 1;
                    self.stats.sent += n as u64;
                    done += n;
                }
                Err(e) => match e.raw_os_error() {
                    Some(libc::EINTR) => {}
                    Some(libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM) => {
                        self.stats.send_full += 1;
                        return Ok(done);
                    }
                    Some(libc::EBADF | libc::ENOTSOCK | libc::EFAULT) => return Err(e),
                    // About the first datagram only (no route, too large for the interface...): it
                    // is lost.
                    _ => {
                        self.stats.send_errors += 1;
                        done += 1;
                    }
                },
            }
        }
        Ok(done)
    }

    fn recv(
        &mut self,
        pool: &Pool,
        out: &mut Vec<(SocketAddr, Payload)>,
        max: usize,
    ) -> io::Result<usize> {
        self.has_unreceived = false;
        // A call that found nothing but datagrams cut short would look like an empty socket.
        for _ in 0..CUT_BURSTS {
            let (taken, good) = self.receive_burst(pool, out, max)?;
            if taken == 0 || good > 0 {
                return Ok(good);
            }
        }
        self.has_unreceived = true;
        Ok(0)
    }

    fn has_unreceived(&self) -> bool {
        self.has_unreceived
    }

    fn fds(&self) -> Vec<RawFd> {
        vec![self.socket.as_raw_fd()]
    }

    fn max_datagram(&self) -> usize {
        self.max_datagram
    }

    fn max_datagram_to(&self, to: SocketAddr) -> usize {
        if !self.probe_routes {
            return self.max_datagram;
        }
        // Without an answer, what every Ethernet carries.
        self.max_datagram
            .min(sys::path_payload(to).unwrap_or(1452).max(512))
    }

    fn describe(&self) -> String {
        "UDP".to_owned()
    }

    fn local_addr(&self) -> SocketAddr {
        self.local
    }

    fn frames_kept(&self) -> u32 {
        self.waiting.len() as u32
    }

    fn stats(&self) -> DriverStats {
        self.stats
    }
}

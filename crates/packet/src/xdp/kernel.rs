//! The kernel's own socket on the driver's port: the slow way for what the queues cannot take.

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsRawFd, RawFd};

use cyclone_pmem::payload::Payload;

use crate::driver::{Datagram, DriverStats};
use crate::sys;

/// What UDP can carry at most, bytes.
const UDP_MAX: usize = 65_535;

/// A UDP socket that copies.
pub(crate) struct KernelSocket {
    socket: UdpSocket,
    local: SocketAddr,
    send: sys::Burst,
    buffer: Vec<u8>,
}

impl KernelSocket {
    /// # Errors
    /// The address is in use or not ours.
    pub(crate) fn bind(address: SocketAddr) -> io::Result<KernelSocket> {
        let socket = UdpSocket::bind(address)?;
        socket.set_nonblocking(true)?;
        sys::set_buffers(socket.as_raw_fd(), 1 << 20);
        Ok(KernelSocket {
            local: socket.local_addr()?,
            socket,
            send: sys::Burst::new(),
            buffer: vec![0; UDP_MAX],
        })
    }

    pub(crate) fn local_addr(&self) -> SocketAddr {
        self.local
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    /// Sends a datagram; false when the socket's queue is full. One that the network refuses is
    /// counted and lost.
    pub(crate) fn send(&mut self, datagram: Datagram<'_>, stats: &mut DriverStats) -> bool {
        stats.by_kernel += 1;
        stats.send_calls += 1;
        match self.send.send(self.socket.as_raw_fd(), &[datagram]) {
            Ok(_) => stats.sent += 1,
            Err(error) => match error.raw_os_error() {
                Some(libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM) => return false,
                _ => stats.send_errors += 1,
            },
        }
        true
    }

    /// Appends up to `max` datagrams, in separate memory. Returns whether there may be more.
    pub(crate) fn receive(
        &mut self,
        out: &mut Vec<(SocketAddr, Payload)>,
        max: usize,
        stats: &mut DriverStats,
    ) -> bool {
        for _ in 0..max {
            match self.socket.recv_from(&mut self.buffer) {
                Ok((len, from)) => {
                    stats.by_kernel += 1;
                    stats.received += 1;
                    out.push((from, Payload::from_vec(self.buffer[..len].to_vec())));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
                // An ICMP error about something sent earlier comes out here too.
                Err(_) => {}
            }
        }
        true
    }
}

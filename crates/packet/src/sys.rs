//! The system calls the UDP driver needs beside std: bursts, socket options, addresses.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6, UdpSocket};
use std::os::fd::{AsRawFd, RawFd};

/// An all-zero address buffer.
pub(crate) fn blank_address() -> libc::sockaddr_storage {
    // SAFETY: sockaddr_storage is plain old data; all zeros is a valid value (family AF_UNSPEC).
    unsafe { std::mem::zeroed() }
}

/// Writes `address` in the kernel's form; returns its length in bytes.
pub(crate) fn put_address(
    address: SocketAddr,
    storage: &mut libc::sockaddr_storage,
) -> libc::socklen_t {
    let place = std::ptr::from_mut(storage);
    match address {
        SocketAddr::V4(v4) => {
            let sin = libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: v4.port().to_be(),
                sin_addr: libc::in_addr {
                    s_addr: u32::from(*v4.ip()).to_be(),
                },
                sin_zero: [0; 8],
            };
            // SAFETY: sockaddr_storage is at least as large and as aligned as sockaddr_in, and
            // exclusively borrowed.
            unsafe { place.cast::<libc::sockaddr_in>().write(sin) };
            size_of::<libc::sockaddr_in>() as libc::socklen_t
        }
        SocketAddr::V6(v6) => {
            let sin6 = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: v6.port().to_be(),
                sin6_flowinfo: v6.flowinfo(),
                sin6_addr: libc::in6_addr {
                    s6_addr: v6.ip().octets(),
                },
                sin6_scope_id: v6.scope_id(),
            };
            // SAFETY: sockaddr_storage is at least as large and as aligned as sockaddr_in6, and
            // exclusively borrowed.
            unsafe { place.cast::<libc::sockaddr_in6>().write(sin6) };
            size_of::<libc::sockaddr_in6>() as libc::socklen_t
        }
    }
}

/// Reads an address the kernel wrote.
pub(crate) fn get_address(storage: &libc::sockaddr_storage) -> Option<SocketAddr> {
    let place = std::ptr::from_ref(storage);
    match i32::from(storage.ss_family) {
        libc::AF_INET => {
            // SAFETY: the family says that it is a sockaddr_in, which fits and has no invalid
            // values.
            let sin = unsafe { place.cast::<libc::sockaddr_in>().read() };
            let ip = Ipv4Addr::from(u32::from_be(sin.sin_addr.s_addr));
            Some(SocketAddrV4::new(ip, u16::from_be(sin.sin_port)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: the family says that it is a sockaddr_in6, which fits and has no invalid
            // values.
            let sin6 = unsafe { place.cast::<libc::sockaddr_in6>().read() };
            let ip = Ipv6Addr::from(sin6.sin6_addr.s6_addr);
            let port = u16::from_be(sin6.sin6_port);
            Some(SocketAddrV6::new(ip, port, sin6.sin6_flowinfo, sin6.sin6_scope_id).into())
        }
        _ => None,
    }
}

fn set_option(fd: RawFd, level: i32, name: i32, value: i32) -> io::Result<()> {
    // SAFETY: the pointer and length describe `value`, which the call only reads.
    let rc = unsafe {
        libc::setsockopt(
            fd,
            level,
            name,
            (&raw const value).cast(),
            size_of::<i32>() as libc::socklen_t,
        )
    };
    if rc == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

fn get_option(fd: RawFd, level: i32, name: i32) -> io::Result<i32> {
    let mut value = 0i32;
    let mut len = size_of::<i32>() as libc::socklen_t;
    // SAFETY: the pointer and length describe `value`; the kernel writes at most `len` bytes.
    let rc = unsafe { libc::getsockopt(fd, level, name, (&raw mut value).cast(), &mut len) };
    if rc == 0 {
        Ok(value)
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Asks for socket buffers of this size; beyond the system's limit if we are allowed to.
pub(crate) fn set_buffers(fd: RawFd, bytes: usize) {
    let bytes = i32::try_from(bytes).unwrap_or(i32::MAX);
    for (force, plain) in [
        (libc::SO_RCVBUFFORCE, libc::SO_RCVBUF),
        (libc::SO_SNDBUFFORCE, libc::SO_SNDBUF),
    ] {
        if set_option(fd, libc::SOL_SOCKET, force, bytes).is_err() {
            // Smaller buffers only lose more packets under bursts.
            let _ = set_option(fd, libc::SOL_SOCKET, plain, bytes);
        }
    }
}

/// Ends a connection, or an attempt to make one, whose other side has acknowledged nothing for so
/// long.
pub(crate) fn set_user_timeout(fd: RawFd, ms: i32) -> io::Result<()> {
    set_option(fd, libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, ms)
}

/// The largest UDP payload that reaches `to` in one packet, by the route's MTU.
pub(crate) fn path_payload(to: SocketAddr) -> io::Result<usize> {
    let any: SocketAddr = if to.is_ipv4() {
        (Ipv4Addr::UNSPECIFIED, 0).into()
    } else {
        (Ipv6Addr::UNSPECIFIED, 0).into()
    };
    let probe = UdpSocket::bind(any)?;
    probe.connect(to)?;
    let (level, name, headers) = if to.is_ipv4() {
        (libc::IPPROTO_IP, libc::IP_MTU, 28)
    } else {
        (libc::IPPROTO_IPV6, libc::IPV6_MTU, 48)
    };
    let mtu = get_option(probe.as_raw_fd(), level, name)?;
    Ok(usize::try_from(mtu).unwrap_or(0).saturating_sub(headers))
}

/// Descriptors of a burst for recvmmsg or sendmmsg: one message header, address and some slices
/// each.
///
/// The message headers hold pointers into the two sibling vectors and to the data. They are set
/// anew before every call and not used after it.
#[derive(Default)]
pub(crate) struct Burst {
    headers: Vec<libc::mmsghdr>,
    addresses: Vec<libc::sockaddr_storage>,
    slices: Vec<libc::iovec>,
}

// SAFETY: the raw pointers are only dereferenced by the system call in the method that has just set
// them all.
unsafe impl Send for Burst {}

impl Burst {
    pub(crate) fn new() -> Burst {
        Burst::default()
    }

    fn blank_header() -> libc::mmsghdr {
        // SAFETY: mmsghdr is plain old data; all zeros means no address, no slices.
        unsafe { std::mem::zeroed() }
    }

    fn reserve(&mut self, n: usize) {
        while self.headers.len() < n {
            self.headers.push(Self::blank_header());
            self.addresses.push(blank_address());
        }
    }

    /// Receives into `buffers`; returns how many got a datagram. See [`Burst::received`] for each.
    pub(crate) fn receive<'a>(
        &mut self,
        fd: RawFd,
        buffers: impl Iterator<Item = &'a mut [u8]>,
    ) -> io::Result<usize> {
        self.slices.clear();
        for buffer in buffers {
            let iov_base = buffer.as_mut_ptr().cast();
            self.slices.push(libc::iovec {
                iov_base,
                iov_len: buffer.len(),
            });
        }
        let n = self.slices.len();
        self.reserve(n);
        for i in 0..n {
            let header = &mut self.headers[i].msg_hdr;
            header.msg_name = (&raw mut self.addresses[i]).cast();
            header.msg_namelen = size_of::<libc::sockaddr_storage>() as libc::socklen_t;
            header.msg_iov = &raw mut self.slices[i];
            header.msg_iovlen = 1;
            header.msg_flags = 0;
        }
        // SAFETY: the n headers point to addresses and slices in our own vectors, not moved since,
        // and to buffers exclusively borrowed by the caller's iterator items for 'a, which outlives
        // this call.
        let rc = unsafe {
            libc::recvmmsg(
                fd,
                self.headers.as_mut_ptr(),
                n as libc::c_uint,
                libc::MSG_DONTWAIT,
                std::ptr::null_mut(),
            )
        };
        if rc < 0 {
            Err(io::Error::last_os_error())
        } else {
            Ok(rc as usize)
        }
    }

    /// Length, whether it was cut short, and sender of the i-th datagram of the last receive.
    pub(crate) fn received(&self, i: usize) -> (usize, bool, Option<SocketAddr>) {
        let header = &self.headers[i];
        let cut = header.msg_hdr.msg_flags & libc::MSG_TRUNC != 0;
        (
            header.msg_len as usize,
            cut,
            get_address(&self.addresses[i]),
        )
    }

    /// Sends datagrams in order; returns how many were taken.
    pub(crate) fn send(
        &mut self,
        fd: RawFd,
        datagrams: &[crate::Datagram<'_>],
    ) -> io::Result<usize> {
        let n = datagrams.len();
        self.reserve(n);
        self.slices.clear();
        for part in datagrams.iter().flat_map(|d| d.parts) {
            let iov_base = part.as_ptr().cast_mut().cast();
            self.slices.push(libc::iovec {
                iov_base,
                iov_len: part.len(),
            });
        }
        let mut first = 0;
        for (i, datagram) in datagrams.iter().enumerate() {
            let header = &mut self.headers[i].msg_hdr;
            header.msg_namelen = put_address(datagram.to, &mut self.addresses[i]);
            header.msg_name = (&raw mut self.addresses[i]).cast();
            header.msg_iov = self.slices[first..].as_mut_ptr();
            header.msg_iovlen = datagram.parts.len();
            header.msg_flags = 0;
            first += datagram.parts.len();
        }
        // SAFETY: the n headers point to addresses and slices in our own vectors, not moved since,
        // and to parts borrowed by the caller, which sendmmsg only reads.
        let rc = unsafe {
            libc::sendmmsg(
                fd,
                self.headers.as_mut_ptr(),
                n as libc::c_uint,
                libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
            )
        };
        if rc < 0 {
            Err(io::Error::last_os_error())
        } else {
            Ok(rc as usize)
        }
    }
}

/// Blocks until one of the descriptors is readable or the time is over; an interruption counts as
/// the latter. Answers those that are.
pub(crate) fn wait_readable(
    fds: &[std::os::fd::RawFd],
    most: std::time::Duration,
) -> io::Result<Vec<std::os::fd::RawFd>> {
    let mut polled: Vec<libc::pollfd> = fds
        .iter()
        .map(|&fd| libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        })
        .collect();
    let timeout = libc::timespec {
        tv_sec: i64::try_from(most.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(most.subsec_nanos()),
    };
    // SAFETY: the array and the time live for the call; no signal mask is changed.
    let ready = unsafe {
        libc::ppoll(
            polled.as_mut_ptr(),
            polled.len() as libc::nfds_t,
            &timeout,
            std::ptr::null(),
        )
    };
    match ready {
        -1 => {
            let error = io::Error::last_os_error();
            if error.kind() == io::ErrorKind::Interrupted {
                Ok(Vec::new())
            } else {
                Err(error)
            }
        }
        _ => {
            let readable = polled.iter().filter(|polled| polled.revents != 0);
            Ok(readable.map(|polled| polled.fd).collect())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_survive_the_round_trip() {
        for text in [
            "127.0.0.1:7000",
            "[::1]:65535",
            "[fe80::1%3]:9",
            "255.1.2.3:0",
        ] {
            let address: SocketAddr = text.parse().unwrap();
            let mut storage = blank_address();
            put_address(address, &mut storage);
            assert_eq!(get_address(&storage), Some(address));
        }
        assert_eq!(get_address(&blank_address()), None);
    }
}

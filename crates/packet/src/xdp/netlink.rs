//! Questions to the kernel about interfaces, addresses, routes and neighbours (rtnetlink), one at a
//! time.
//!
//! ```text
//! message     length u32 · type u16 · flags u16 · sequence u32 · port u32 · body · attributes
//! attribute   length u16 · type u16 · bytes, padded to 4
//! ```

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

const ERROR: u16 = 2;
const DONE: u16 = 3;
const REQUEST: u16 = 1;
const ACK: u16 = 4;
const DUMP: u16 = 0x300;
const HEADER_BYTES: usize = 16;

const NEW_LINK: u16 = 16;
const GET_LINK: u16 = 18;
const SET_LINK: u16 = 19;
const NEW_ADDRESS: u16 = 20;
const GET_ADDRESS: u16 = 22;
const NEW_ROUTE: u16 = 24;
const GET_ROUTE: u16 = 26;
const NEW_NEIGHBOUR: u16 = 28;
const GET_NEIGHBOUR: u16 = 30;

const LINK_ADDRESS: u16 = 1;
const LINK_MTU: u16 = 4;
const LINK_RX_QUEUES: u16 = 32;
const LINK_XDP: u16 = 43;
const XDP_FD: u16 = 1;
const XDP_ATTACHED: u16 = 2;
const XDP_FLAGS: u16 = 3;
const XDP_PROGRAM: u16 = 4;
const NESTED: u16 = 1 << 15;
const LINK_BODY: usize = 16;
const ADDRESS_BODY: usize = 8;
const ADDRESS_ADDRESS: u16 = 1;
const ADDRESS_LOCAL: u16 = 2;
const ROUTE_BODY: usize = 12;
const ROUTE_DESTINATION: u16 = 1;
const ROUTE_INTERFACE: u16 = 4;
const ROUTE_GATEWAY: u16 = 5;
const ROUTE_SOURCE: u16 = 7;
const ROUTE_METRICS: u16 = 8;
const METRIC_MTU: u16 = 2;
const ROUTE_VIA: u16 = 18;
const ROUTE_UNICAST: u8 = 1;
const NEIGHBOUR_BODY: usize = 12;
const NEIGHBOUR_DESTINATION: u16 = 1;
const NEIGHBOUR_ADDRESS: u16 = 2;
/// Permanent, no ARP, reachable, stale, delay, probe: states in which the kernel itself would use
/// the address.
const NEIGHBOUR_VALID: u16 = 0x80 | 0x40 | 0x02 | 0x04 | 0x08 | 0x10;
/// The address was not confirmed lately, and no confirmation is pending.
const NEIGHBOUR_STALE: u16 = 0x04;
/// Flag: as if the kernel had sent something there itself.
const NEIGHBOUR_USE: u8 = 0x01;

/// Answers larger than this are cut; a message about one interface has a few kilobytes.
const BUFFER_BYTES: usize = 64 << 10;
/// Messages read for one question at most.
const MOST_READS: usize = 1024;

/// What the kernel says of an interface.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Link {
    /// Its number.
    pub(crate) index: u32,
    /// Whether it is up.
    pub(crate) up: bool,
    /// Its Ethernet address; `None` for an interface that is none.
    pub(crate) mac: Option<[u8; 6]>,
    /// Bytes of an IP packet.
    pub(crate) mtu: usize,
    /// Receive queues.
    pub(crate) queues: u32,
    /// Number of the XDP program that runs on it, and whether in the driver.
    pub(crate) program: Option<(u32, bool)>,
}

/// The way to a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Route {
    /// Number of the interface.
    pub(crate) interface: u32,
    /// The machine on that interface's network that packets go to.
    pub(crate) next_hop: IpAddr,
    /// Our address there.
    pub(crate) source: Option<IpAddr>,
    /// The route's own limit, bytes of an IP packet.
    pub(crate) mtu: Option<usize>,
}

/// What the kernel knows of a machine on an interface's network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Neighbour {
    /// Its Ethernet address.
    pub(crate) mac: [u8; 6],
    /// The kernel would make sure of it if it sent something there.
    pub(crate) is_stale: bool,
}

/// A socket for such questions.
pub(crate) struct Netlink {
    socket: OwnedFd,
    sequence: u32,
    buffer: Vec<u8>,
}

struct Message {
    bytes: Vec<u8>,
}

impl Message {
    fn new(kind: u16, flags: u16, body: &[u8]) -> Message {
        let mut bytes = vec![0; HEADER_BYTES];
        bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
        bytes[6..8].copy_from_slice(&(REQUEST | flags).to_ne_bytes());
        bytes.extend_from_slice(body);
        Message { bytes }
    }

    fn attribute(mut self, kind: u16, value: &[u8]) -> Message {
        let length = value.len() as u16 + 4;
        self.bytes.extend_from_slice(&length.to_ne_bytes());
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        self.bytes.extend_from_slice(value);
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
        self
    }
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    let pair = bytes.get(at..at + 2)?;
    Some(u16::from_ne_bytes([pair[0], pair[1]]))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    let word = bytes.get(at..at + 4)?;
    Some(u32::from_ne_bytes([word[0], word[1], word[2], word[3]]))
}

/// The attributes in a message's end; what does not parse ends the list.
fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let length = usize::from(u16_at(bytes, 0)?);
        let kind = u16_at(bytes, 2)?;
        let value = bytes.get(4..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or(&[]);
        Some((kind & !NESTED, value))
    })
}

fn ip_of(bytes: &[u8]) -> Option<IpAddr> {
    match bytes.len() {
        4 => <[u8; 4]>::try_from(bytes)
            .ok()
            .map(|b| Ipv4Addr::from(b).into()),
        16 => <[u8; 16]>::try_from(bytes)
            .ok()
            .map(|b| Ipv6Addr::from(b).into()),
        _ => None,
    }
}

fn with_octets<R>(ip: IpAddr, then: impl FnOnce(u8, &[u8]) -> R) -> R {
    match ip {
        IpAddr::V4(ip) => then(libc::AF_INET as u8, &ip.octets()),
        IpAddr::V6(ip) => then(libc::AF_INET6 as u8, &ip.octets()),
    }
}

fn link_body(index: u32) -> [u8; LINK_BODY] {
    let mut body = [0; LINK_BODY];
    body[4..8].copy_from_slice(&index.to_ne_bytes());
    body
}

fn neighbour_message(kind: u16, flags: u16, index: u32, ip: IpAddr, what: u8) -> Message {
    with_octets(ip, |family, octets| {
        let mut body = [0; NEIGHBOUR_BODY];
        body[0] = family;
        body[4..8].copy_from_slice(&index.to_ne_bytes());
        body[10] = what;
        Message::new(kind, flags, &body).attribute(NEIGHBOUR_DESTINATION, octets)
    })
}

impl Netlink {
    /// # Errors
    /// When the system grants no socket.
    pub(crate) fn open() -> io::Result<Netlink> {
        // SAFETY: a plain system call; a non-negative result is a descriptor that nothing else
        // owns.
        let socket = unsafe {
            let fd = libc::socket(
                libc::AF_NETLINK,
                libc::SOCK_RAW | libc::SOCK_CLOEXEC,
                libc::NETLINK_ROUTE,
            );
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            OwnedFd::from_raw_fd(fd)
        };
        // The kernel answers at once; should it ever not, the next question has its turn.
        let patience = libc::timeval {
            tv_sec: 0,
            tv_usec: 200_000,
        };
        // SAFETY: the pointer and length describe `patience`, which the call only reads.
        unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_RCVTIMEO,
                (&raw const patience).cast(),
                size_of::<libc::timeval>() as libc::socklen_t,
            );
        }
        Ok(Netlink {
            socket,
            sequence: 0,
            buffer: vec![0; BUFFER_BYTES],
        })
    }

    fn receive(&mut self) -> io::Result<usize> {
        loop {
            // SAFETY: the buffer is ours and as long as said.
            let n = unsafe {
                libc::recv(
                    self.socket.as_raw_fd(),
                    self.buffer.as_mut_ptr().cast(),
                    self.buffer.len(),
                    0,
                )
            };
            if n >= 0 {
                return Ok(n as usize);
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }

    /// Sends a question and shows `each` the messages of the answer: their type, and what follows
    /// their header.
    fn ask(&mut self, mut message: Message, mut each: impl FnMut(u16, &[u8])) -> io::Result<()> {
        self.sequence = self.sequence.wrapping_add(1);
        let length = message.bytes.len() as u32;
        message.bytes[0..4].copy_from_slice(&length.to_ne_bytes());
        message.bytes[8..12].copy_from_slice(&self.sequence.to_ne_bytes());
        let many = u16_at(&message.bytes, 6).unwrap_or(0) & DUMP == DUMP;
        // SAFETY: the bytes live for the call, which only reads them.
        let sent = unsafe {
            libc::send(
                self.socket.as_raw_fd(),
                message.bytes.as_ptr().cast(),
                message.bytes.len(),
                0,
            )
        };
        if sent < 0 {
            return Err(io::Error::last_os_error());
        }
        for _ in 0..MOST_READS {
            let n = self.receive()?;
            let mut at = 0;
            while let Some(length) = u32_at(&self.buffer[..n], at) {
                let length = length as usize;
                if length < HEADER_BYTES || at + length > n {
                    break;
                }
                let one = &self.buffer[at..at + length];
                at += length.next_multiple_of(4);
                // Late answers to earlier questions are skipped.
                if u32_at(one, 8) != Some(self.sequence) {
                    continue;
                }
                match u16_at(one, 4) {
                    Some(ERROR) => {
                        let code = u32_at(one, HEADER_BYTES).unwrap_or(0) as i32;
                        if code != 0 {
                            return Err(io::Error::from_raw_os_error(-code));
                        }
                        return Ok(());
                    }
                    Some(DONE) => return Ok(()),
                    Some(kind) => {
                        each(kind, &one[HEADER_BYTES..]);
                        if !many {
                            return Ok(());
                        }
                    }
                    None => {}
                }
            }
        }
        Err(io::ErrorKind::InvalidData.into())
    }

    /// The interface of this number.
    ///
    /// # Errors
    /// When there is none.
    pub(crate) fn link(&mut self, index: u32) -> io::Result<Link> {
        let mut link = Link {
            index,
            ..Link::default()
        };
        self.ask(
            Message::new(GET_LINK, 0, &link_body(index)),
            |kind, body| {
                if kind != NEW_LINK || body.len() < LINK_BODY {
                    return;
                }
                link.up = u32_at(body, 8).unwrap_or(0) & libc::IFF_UP as u32 != 0;
                for (kind, value) in attributes(&body[LINK_BODY..]) {
                    match kind {
                        LINK_ADDRESS => link.mac = value.try_into().ok(),
                        LINK_MTU => link.mtu = u32_at(value, 0).unwrap_or(0) as usize,
                        LINK_RX_QUEUES => link.queues = u32_at(value, 0).unwrap_or(1),
                        LINK_XDP => link.program = program_of(value),
                        _ => {}
                    }
                }
            },
        )?;
        Ok(link)
    }

    /// The addresses of this interface.
    ///
    /// # Errors
    /// When the kernel does not answer.
    pub(crate) fn addresses(&mut self, index: u32) -> io::Result<Vec<IpAddr>> {
        let mut found = Vec::new();
        let body = [0; ADDRESS_BODY];
        self.ask(Message::new(GET_ADDRESS, DUMP, &body), |kind, body| {
            if kind != NEW_ADDRESS || u32_at(body, 4) != Some(index) {
                return;
            }
            let of = |wanted: u16| {
                attributes(&body[ADDRESS_BODY..])
                    .find(|(kind, _)| *kind == wanted)
                    .and_then(|(_, value)| ip_of(value))
            };
            found.extend(of(ADDRESS_LOCAL).or_else(|| of(ADDRESS_ADDRESS)));
        })?;
        Ok(found)
    }

    /// The way to `to`; `None` if it is not one machine elsewhere, or cannot be reached.
    pub(crate) fn route(&mut self, to: IpAddr) -> Option<Route> {
        let message = with_octets(to, |family, octets| {
            let mut body = [0; ROUTE_BODY];
            body[0] = family;
            body[1] = octets.len() as u8 * 8;
            Message::new(GET_ROUTE, 0, &body).attribute(ROUTE_DESTINATION, octets)
        });
        let mut found = None;
        let asked = self.ask(message, |kind, body| {
            if kind != NEW_ROUTE || body.get(7) != Some(&ROUTE_UNICAST) || body.len() < ROUTE_BODY {
                return;
            }
            let mut route = Route {
                interface: 0,
                next_hop: to,
                source: None,
                mtu: None,
            };
            for (kind, value) in attributes(&body[ROUTE_BODY..]) {
                match kind {
                    ROUTE_INTERFACE => route.interface = u32_at(value, 0).unwrap_or(0),
                    ROUTE_GATEWAY => route.next_hop = ip_of(value).unwrap_or(to),
                    // A gateway of the other family: its family first, two bytes.
                    ROUTE_VIA => {
                        route.next_hop = value.get(2..).and_then(ip_of).unwrap_or(to);
                    }
                    ROUTE_SOURCE => route.source = ip_of(value),
                    ROUTE_METRICS => {
                        route.mtu = attributes(value)
                            .find(|(kind, _)| *kind == METRIC_MTU)
                            .and_then(|(_, value)| u32_at(value, 0))
                            .map(|mtu| mtu as usize);
                    }
                    _ => {}
                }
            }
            found = Some(route);
        });
        asked.ok().and(found)
    }

    /// A machine on this interface's network, if the kernel knows its Ethernet address.
    pub(crate) fn neighbour(&mut self, index: u32, ip: IpAddr) -> Option<Neighbour> {
        let message = neighbour_message(GET_NEIGHBOUR, 0, index, ip, 0);
        let mut found = None;
        let asked = self.ask(message, |kind, body| {
            let state = u16_at(body, 8).unwrap_or(0);
            if kind != NEW_NEIGHBOUR || state & NEIGHBOUR_VALID == 0 || body.len() < NEIGHBOUR_BODY
            {
                return;
            }
            let mac = attributes(&body[NEIGHBOUR_BODY..])
                .find(|(kind, _)| *kind == NEIGHBOUR_ADDRESS)
                .and_then(|(_, value)| value.try_into().ok());
            found = mac.map(|mac| Neighbour {
                mac,
                is_stale: state & NEIGHBOUR_STALE != 0,
            });
        });
        asked.ok().and(found)
    }

    /// Lets the kernel make sure of a stale neighbour, as if it had sent something there itself.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub(crate) fn use_neighbour(&mut self, index: u32, ip: IpAddr) -> io::Result<()> {
        let message = neighbour_message(NEW_NEIGHBOUR, ACK, index, ip, NEIGHBOUR_USE);
        self.ask(message, |_, _| {})
    }

    /// Attaches a program to an interface in the way that outlives this process, or detaches it
    /// (`-1`).
    ///
    /// # Errors
    /// When the kernel refuses.
    pub(crate) fn set_program(&mut self, index: u32, program: i32, mode: u32) -> io::Result<()> {
        let nested = Message { bytes: Vec::new() }
            .attribute(XDP_FD, &program.to_ne_bytes())
            .attribute(XDP_FLAGS, &mode.to_ne_bytes());
        let message = Message::new(SET_LINK, ACK, &link_body(index))
            .attribute(LINK_XDP | NESTED, &nested.bytes);
        self.ask(message, |_, _| {})
    }
}

/// The program in an interface's XDP attribute.
fn program_of(nested: &[u8]) -> Option<(u32, bool)> {
    /// XDP_ATTACHED_DRV.
    const IN_DRIVER: u8 = 1;
    let find = |wanted: u16| attributes(nested).find(|(kind, _)| *kind == wanted);
    let id = find(XDP_PROGRAM).and_then(|(_, value)| u32_at(value, 0))?;
    let mode = find(XDP_ATTACHED).and_then(|(_, value)| value.first().copied());
    (id != 0).then_some((id, mode == Some(IN_DRIVER)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Attributes end where they stop making sense, whatever the bytes.
        #[test]
        fn attributes_never_leave_the_bytes(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let total: usize = attributes(&bytes).take(1000).map(|(_, value)| value.len() + 4).sum();
            prop_assert!(total <= bytes.len().max(4) + 3);
            let _ = program_of(&bytes);
        }
    }

    #[test]
    fn the_loopback_interface_is_known() {
        let mut netlink = Netlink::open().expect("netlink needs no rights");
        let link = netlink.link(1).expect("lo");
        assert_eq!(link.index, 1);
        assert!(link.mtu > 0);
        let error = netlink.link(9_999_999).expect_err("no such interface");
        assert_eq!(error.raw_os_error(), Some(libc::ENODEV));
        assert_eq!(
            netlink.route(Ipv4Addr::LOCALHOST.into()),
            None,
            "a local destination is no machine elsewhere"
        );
        assert_eq!(
            netlink.neighbour(1, Ipv4Addr::new(10, 77, 9, 9).into()),
            None
        );
    }
}

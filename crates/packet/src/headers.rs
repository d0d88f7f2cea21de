//! Ethernet, IP and UDP headers: made for what we send, checked in what we receive.
//!
//! ```text
//! IPv4   Ethernet 14 · IPv4 20 · UDP 8    UDP checksum 0: none (RFC 768)
//! IPv6   Ethernet 14 · IPv6 40 · UDP 8    UDP checksum over everything (RFC 8200 §8.1)
//! ```
//! What is received is not summed again: Ethernet's own check covers the way, and datagrams are
//! authenticated above. Packets of a virtual interface may come with the sum left to a card that is
//! not there.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

pub(crate) const ETHER_BYTES: usize = 14;
pub(crate) const IPV4_BYTES: usize = 20;
pub(crate) const IPV6_BYTES: usize = 40;
pub(crate) const UDP_BYTES: usize = 8;
pub(crate) const ETHER_IPV4: u16 = 0x0800;
pub(crate) const ETHER_IPV6: u16 = 0x86dd;
pub(crate) const PROTOCOL_UDP: u8 = 17;

/// Headers of a datagram in all, at most.
pub(crate) const MOST_BYTES: usize = ETHER_BYTES + IPV6_BYTES + UDP_BYTES;
const HOPS: u8 = 64;

/// IP and UDP headers of a datagram to this kind of address, bytes.
pub(crate) fn ip_udp_bytes(ip: IpAddr) -> usize {
    match ip {
        IpAddr::V4(_) => IPV4_BYTES + UDP_BYTES,
        IpAddr::V6(_) => IPV6_BYTES + UDP_BYTES,
    }
}

/// The headers of all datagrams of one way, but for lengths and checksums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Template {
    bytes: [u8; MOST_BYTES],
    len: usize,
    /// Sum of what does not change: the IPv4 header, or the IPv6 pseudo-header and the ports.
    sum: u64,
}

impl Template {
    /// Headers from us to the machine with `to_mac`, which has, or routes to, `to`. `None` if the
    /// families differ.
    pub(crate) fn new(
        from_mac: [u8; 6],
        from: SocketAddr,
        to_mac: [u8; 6],
        to: SocketAddr,
    ) -> Option<Template> {
        let mut bytes = [0; MOST_BYTES];
        bytes[0..6].copy_from_slice(&to_mac);
        bytes[6..12].copy_from_slice(&from_mac);
        let ip = ETHER_BYTES;
        let (len, sum) = match (from.ip(), to.ip()) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                bytes[12..14].copy_from_slice(&ETHER_IPV4.to_be_bytes());
                bytes[ip] = 0x45;
                // Don't fragment: then the identification may be 0.
                bytes[ip + 6] = 0x40;
                bytes[ip + 8] = HOPS;
                bytes[ip + 9] = PROTOCOL_UDP;
                bytes[ip + 12..ip + 16].copy_from_slice(&source.octets());
                bytes[ip + 16..ip + 20].copy_from_slice(&destination.octets());
                (
                    ETHER_BYTES + IPV4_BYTES + UDP_BYTES,
                    sum(&bytes[ip..ip + IPV4_BYTES]),
                )
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                bytes[12..14].copy_from_slice(&ETHER_IPV6.to_be_bytes());
                bytes[ip] = 0x60;
                bytes[ip + 6] = PROTOCOL_UDP;
                bytes[ip + 7] = HOPS;
                bytes[ip + 8..ip + 24].copy_from_slice(&source.octets());
                bytes[ip + 24..ip + 40].copy_from_slice(&destination.octets());
                let ports = [from.port().to_be_bytes(), to.port().to_be_bytes()].concat();
                let fixed = sum(&bytes[ip + 8..ip + 40]) + sum(&ports) + u64::from(PROTOCOL_UDP);
                (ETHER_BYTES + IPV6_BYTES + UDP_BYTES, fixed)
            }
            _ => return None,
        };
        bytes[len - 8..len - 6].copy_from_slice(&from.port().to_be_bytes());
        bytes[len - 6..len - 4].copy_from_slice(&to.port().to_be_bytes());
        Some(Template { bytes, len, sum })
    }

    /// Bytes of the headers.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Bytes of the IP packet that carries so many.
    pub(crate) fn packet_bytes(&self, payload: usize) -> usize {
        self.len - ETHER_BYTES + payload
    }

    /// Writes the headers of a datagram of these parts to the beginning of `into`.
    ///
    /// # Panics
    /// When `into` is shorter than the headers, or the datagram longer than 65,000 bytes.
    pub(crate) fn write(&self, parts: &[&[u8]], into: &mut [u8]) {
        let payload: usize = parts.iter().map(|part| part.len()).sum();
        let udp = (payload + UDP_BYTES) as u16;
        let out = &mut into[..self.len];
        out.copy_from_slice(&self.bytes[..self.len]);
        out[self.len - 4..self.len - 2].copy_from_slice(&udp.to_be_bytes());
        let ip = ETHER_BYTES;
        if self.len == ETHER_BYTES + IPV4_BYTES + UDP_BYTES {
            let total = udp + IPV4_BYTES as u16;
            out[ip + 2..ip + 4].copy_from_slice(&total.to_be_bytes());
            let check = !fold(self.sum + u64::from(total));
            out[ip + 10..ip + 12].copy_from_slice(&check.to_be_bytes());
        } else {
            out[ip + 4..ip + 6].copy_from_slice(&udp.to_be_bytes());
            // The length counts in the pseudo-header and in the header.
            let whole = self.sum + 2 * u64::from(udp) + sum_parts(parts);
            // 0 means "none", which IPv6 does not allow; all ones is the same sum.
            let check = match !fold(whole) {
                0 => u16::MAX,
                check => check,
            };
            out[self.len - 2..].copy_from_slice(&check.to_be_bytes());
        }
    }
}

/// Sum of the 16-bit big-endian words, the last one padded; of at most 64 KiB.
fn sum(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<4>();
    // 32-bit words sum to the same, folded: 2^16 is 1 in this arithmetic.
    let mut total: u64 = words
        .iter()
        .map(|w| u64::from(u32::from_be_bytes(*w)))
        .sum();
    let mut last = [0; 4];
    last[..rest.len()].copy_from_slice(rest);
    total += u64::from(u32::from_be_bytes(last));
    u64::from(fold(total))
}

/// The same over the concatenation of parts: a part that begins at an odd byte counts with its
/// bytes swapped.
fn sum_parts(parts: &[&[u8]]) -> u64 {
    let (mut total, mut odd) = (0, false);
    for part in parts {
        let of_part = fold(sum(part));
        total += u64::from(if odd { of_part.swap_bytes() } else { of_part });
        odd ^= part.len() % 2 == 1;
    }
    total
}

/// Adds the carries back in until 16 bits are left.
fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// Where a received packet's datagram lies, and who sent it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Parsed {
    /// The sender.
    pub(crate) from: SocketAddr,
    /// Bytes before the datagram's payload.
    pub(crate) at: usize,
    /// Bytes of the payload.
    pub(crate) len: usize,
}

/// To which address a packet goes whose headers [`parse`] has read.
#[cfg(feature = "dpdk")]
pub(crate) fn destination(first: &[u8]) -> Option<IpAddr> {
    let ip = first.get(ETHER_BYTES..)?;
    if u16_at(first, 12) == ETHER_IPV4 {
        let octets: [u8; 4] = ip.get(16..20)?.try_into().ok()?;
        Some(octets.into())
    } else {
        let octets: [u8; 16] = ip.get(24..40)?.try_into().ok()?;
        Some(octets.into())
    }
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

/// The UDP port that a packet is for, if it can be one of ours: [`parse`] says whether it is.
#[cfg(feature = "dpdk")]
pub(crate) fn destination_port(first: &[u8]) -> Option<u16> {
    let ip_bytes = match u16_at(first.get(..ETHER_BYTES)?, 12) {
        ETHER_IPV4 => IPV4_BYTES,
        ETHER_IPV6 => IPV6_BYTES,
        _ => return None,
    };
    let at = ETHER_BYTES + ip_bytes + 2;
    Some(u16_at(first.get(at..at + 2)?, 0))
}

/// Reads the headers of a packet of `total` bytes, of which `first` are the first ones. `None`
/// unless it is a whole UDP datagram to this port, without VLAN tag, IP options, extension headers
/// or fragmentation. `interface` completes link-local senders.
pub(crate) fn parse(first: &[u8], total: usize, port: u16, interface: u32) -> Option<Parsed> {
    if first.len() < ETHER_BYTES + IPV4_BYTES + UDP_BYTES || total < first.len() {
        return None;
    }
    let ip = &first[ETHER_BYTES..];
    let (source, ip_bytes, ip_len): (IpAddr, usize, usize) = match u16_at(first, 12) {
        ETHER_IPV4 => {
            if ip[0] != 0x45 || ip[9] != PROTOCOL_UDP || u16_at(ip, 6) & 0x3fff != 0 {
                return None;
            }
            let source = Ipv4Addr::new(ip[12], ip[13], ip[14], ip[15]);
            (source.into(), IPV4_BYTES, usize::from(u16_at(ip, 2)))
        }
        ETHER_IPV6 => {
            if ip.len() < IPV6_BYTES + UDP_BYTES || ip[0] >> 4 != 6 || ip[6] != PROTOCOL_UDP {
                return None;
            }
            let mut source = [0; 16];
            source.copy_from_slice(&ip[8..24]);
            let length = usize::from(u16_at(ip, 4)) + IPV6_BYTES;
            (Ipv6Addr::from(source).into(), IPV6_BYTES, length)
        }
        _ => return None,
    };
    let udp = &ip[ip_bytes..];
    let udp_len = usize::from(u16_at(udp, 4));
    let fits = udp_len >= UDP_BYTES
        && udp_len + ip_bytes <= ip_len
        && ip_len + ETHER_BYTES <= total
        && u16_at(udp, 2) == port
        && u16_at(udp, 0) != 0;
    // An answer to these would go astray.
    let bad_source = source.is_multicast()
        || source.is_unspecified()
        || source == IpAddr::V4(Ipv4Addr::BROADCAST);
    if !fits || bad_source {
        return None;
    }
    let mut from = SocketAddr::new(source, u16_at(udp, 0));
    if let SocketAddr::V6(v6) = &mut from
        && v6.ip().is_unicast_link_local()
    {
        v6.set_scope_id(interface);
    }
    Some(Parsed {
        from,
        at: ETHER_BYTES + ip_bytes + UDP_BYTES,
        len: udp_len - UDP_BYTES,
    })
}

//! Questions and answers about Ethernet addresses: ARP (RFC 826) and neighbour discovery (RFC
//! 4861), as far as a machine with one address per family needs them.
//!
//! ```text
//! ARP   Ethernet 14 · 0001 0800 06 04 · 1 ask, 2 answer · sender MAC 6, IP 4 · target MAC 6, IP 4
//! ND    Ethernet 14 · IPv6 40, hop limit 255 · type 135 ask, 136 answer · 0 · checksum 2 · flags 4 · target 16
//!       · option 1 (sender's) or 2 (target's MAC), length 1, MAC 6
//! MLD   Ethernet 14 · IPv6 40, hop limit 1 · router alert 8 · type 143 · 0 · checksum 2 · 0 2 · 1 record 2
//!       · 4 everything from now on · 0 · no sources 2 · group 16
//! ```
//! Questions for an IPv6 address go to a group, and switches that watch who listens to which (RFC
//! 4541) bring them only to those that have said so (RFC 3810).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::headers::{ETHER_BYTES, ETHER_IPV6, IPV6_BYTES};

pub(super) type Mac = [u8; 6];

const ETHER_ARP: u16 = 0x0806;
const ARP_BYTES: usize = 28;
/// Ethernet, IPv4, addresses of 6 and 4 bytes.
const ARP_KIND: [u8; 6] = [0, 1, 8, 0, 6, 4];
const BROADCAST_MAC: Mac = [0xff; 6];
/// The shortest packet that Ethernet carries, without its checksum, bytes.
const LEAST_BYTES: usize = 60;
const PROTOCOL_ICMPV6: u8 = 58;
const SOLICITATION: u8 = 135;
const ADVERTISEMENT: u8 = 136;
const ND_BYTES: usize = 24;
const OPTION_SOURCE: u8 = 1;
const OPTION_TARGET: u8 = 2;
const OPTION_BYTES: usize = 8;
const PROTOCOL_HOP_BY_HOP: u8 = 0;
const LISTENER_REPORT: u8 = 143;
/// Query, report and done of the first version, and the report of the second.
const GROUP_KINDS: [u8; 4] = [130, 131, 132, LISTENER_REPORT];
/// A change to "all but these sources", and none are named.
const EVERYTHING: u8 = 4;
/// ICMPv6 next, eight bytes; routers are to look; two bytes of padding.
const ROUTER_ALERT: [u8; 8] = [PROTOCOL_ICMPV6, 0, 5, 2, 0, 0, 1, 0];
/// All routers that know MLD of version 2, and switches.
const MLD_ROUTERS: [u8; 16] = [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x16];
const MLD_ROUTERS_MAC: Mac = [0x33, 0x33, 0, 0, 0, 0x16];
/// All machines on the link.
const ALL_NODES: [u8; 16] = [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
const ALL_NODES_MAC: Mac = [0x33, 0x33, 0, 0, 0, 1];
/// Solicited, override; and override alone.
const ADVERTISEMENT_FLAGS: u8 = 0x60;
const ANNOUNCEMENT_FLAGS: u8 = 0x20;

/// What a packet says about a machine's Ethernet address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NeighbourInfo {
    /// Whose.
    pub(super) ip: IpAddr,
    /// Its address; `None` in a question that does not tell.
    pub(super) mac: Option<Mac>,
    /// Whom it asks for.
    pub(super) solicited: Option<IpAddr>,
}

fn ethernet(to: Mac, from: Mac, kind: u16) -> Vec<u8> {
    let mut packet = Vec::with_capacity(96);
    packet.extend(to);
    packet.extend(from);
    packet.extend(kind.to_be_bytes());
    packet
}

fn arp(operation: u8, from: (Mac, Ipv4Addr), to: (Mac, Ipv4Addr), ether_to: Mac) -> Vec<u8> {
    let mut packet = ethernet(ether_to, from.0, ETHER_ARP);
    packet.extend(ARP_KIND);
    packet.extend([0, operation]);
    packet.extend(from.0);
    packet.extend(from.1.octets());
    packet.extend(to.0);
    packet.extend(to.1.octets());
    packet.resize(LEAST_BYTES, 0);
    packet
}

fn checksum(from: Ipv6Addr, to: Ipv6Addr, body: &[u8]) -> u16 {
    let mut sum = u32::from(PROTOCOL_ICMPV6) + body.len() as u32;
    let all = [&from.octets()[..], &to.octets(), body];
    for bytes in all {
        for pair in bytes.chunks(2) {
            sum += u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0));
        }
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

fn icmpv6(
    kind: u8,
    flags: u8,
    from: (Mac, Ipv6Addr),
    to: (Mac, Ipv6Addr),
    target: Ipv6Addr,
) -> Vec<u8> {
    let option = if kind == SOLICITATION {
        OPTION_SOURCE
    } else {
        OPTION_TARGET
    };
    let mut body = vec![kind, 0, 0, 0, flags, 0, 0, 0];
    body.extend(target.octets());
    body.extend([option, 1]);
    body.extend(from.0);
    let sum = checksum(from.1, to.1, &body);
    body[2..4].copy_from_slice(&sum.to_be_bytes());
    let mut packet = ethernet(to.0, from.0, ETHER_IPV6);
    packet.extend([0x60, 0, 0, 0, 0, body.len() as u8, PROTOCOL_ICMPV6, 255]);
    packet.extend(from.1.octets());
    packet.extend(to.1.octets());
    packet.extend(body);
    packet
}

/// The group that is asked for this address: of all whose addresses end alike.
fn group_of(ip: Ipv6Addr) -> (Mac, Ipv6Addr) {
    let end = ip.octets();
    let mut group = [0; 16];
    group[..2].copy_from_slice(&[0xff, 2]);
    group[11..13].copy_from_slice(&[1, 0xff]);
    group[13..].copy_from_slice(&end[13..]);
    let mac = [0x33, 0x33, 0xff, end[13], end[14], end[15]];
    (mac, Ipv6Addr::from(group))
}

/// The address of this link that goes with an Ethernet address (RFC 4291, appendix A).
fn link_local(mac: Mac) -> Ipv6Addr {
    let [a, b, c, d, e, f] = mac;
    let pairs = [[a ^ 2, b], [c, 0xff], [0xfe, d], [e, f]];
    let [a, b, c, d] = pairs.map(u16::from_be_bytes);
    Ipv6Addr::new(0xfe80, 0, 0, 0, a, b, c, d)
}

/// Says that we listen to the group that is asked for our address. `None` over IPv4, where
/// questions go to everybody.
pub(super) fn listener_report(mac: Mac, own: IpAddr) -> Option<Vec<u8>> {
    let IpAddr::V6(own) = own else { return None };
    let (from, to) = (link_local(mac), Ipv6Addr::from(MLD_ROUTERS));
    let mut body = vec![LISTENER_REPORT, 0, 0, 0, 0, 0, 0, 1, EVERYTHING, 0, 0, 0];
    body.extend(group_of(own).1.octets());
    let sum = checksum(from, to, &body);
    body[2..4].copy_from_slice(&sum.to_be_bytes());
    let mut packet = ethernet(MLD_ROUTERS_MAC, mac, ETHER_IPV6);
    let bytes = (ROUTER_ALERT.len() + body.len()) as u8;
    packet.extend([0x60, 0, 0, 0, 0, bytes, PROTOCOL_HOP_BY_HOP, 1]);
    packet.extend(from.octets());
    packet.extend(to.octets());
    packet.extend(ROUTER_ALERT);
    packet.extend(body);
    Some(packet)
}

/// A question for the Ethernet address of `target`, to all who may know it, or to a `known` address
/// to see whether it is still there. `None` if the families differ.
pub(super) fn solicitation(
    mac: Mac,
    own: IpAddr,
    target: IpAddr,
    known: Option<Mac>,
) -> Option<Vec<u8>> {
    match (own, target) {
        (IpAddr::V4(own), IpAddr::V4(target)) => {
            let to = known.unwrap_or(BROADCAST_MAC);
            Some(arp(1, (mac, own), ([0; 6], target), to))
        }
        (IpAddr::V6(own), IpAddr::V6(target)) => {
            if let Some(known) = known {
                return Some(icmpv6(SOLICITATION, 0, (mac, own), (known, target), target));
            }
            Some(icmpv6(
                SOLICITATION,
                0,
                (mac, own),
                group_of(target),
                target,
            ))
        }
        _ => None,
    }
}

/// The answer to somebody's question for `own`.
pub(super) fn answer(mac: Mac, own: IpAddr, to_mac: Mac, to: IpAddr) -> Option<Vec<u8>> {
    match (own, to) {
        (IpAddr::V4(own), IpAddr::V4(to)) => Some(arp(2, (mac, own), (to_mac, to), to_mac)),
        (IpAddr::V6(own), IpAddr::V6(to)) => {
            let flags = ADVERTISEMENT_FLAGS;
            Some(icmpv6(ADVERTISEMENT, flags, (mac, own), (to_mac, to), own))
        }
        _ => None,
    }
}

/// Tells everybody who knows us where we are now (RFC 5227, 3; RFC 4861, 7.2.6).
pub(super) fn announcement(mac: Mac, own: IpAddr) -> Vec<u8> {
    match own {
        IpAddr::V4(own) => arp(1, (mac, own), ([0; 6], own), BROADCAST_MAC),
        IpAddr::V6(own) => {
            let to = (ALL_NODES_MAC, Ipv6Addr::from(ALL_NODES));
            icmpv6(ADVERTISEMENT, ANNOUNCEMENT_FLAGS, (mac, own), to, own)
        }
    }
}

fn mac_at(bytes: &[u8], at: usize) -> Option<Mac> {
    let mac: Mac = bytes.get(at..at + 6)?.try_into().ok()?;
    // Multicast, broadcast and zero addresses are no machine.
    (mac[0] & 1 == 0 && mac != [0; 6]).then_some(mac)
}

fn ip4_at(bytes: &[u8], at: usize) -> Option<Ipv4Addr> {
    let octets: [u8; 4] = bytes.get(at..at + 4)?.try_into().ok()?;
    Some(octets.into())
}

fn ip6_at(bytes: &[u8], at: usize) -> Option<Ipv6Addr> {
    let octets: [u8; 16] = bytes.get(at..at + 16)?.try_into().ok()?;
    Some(octets.into())
}

fn is_host(ip: IpAddr) -> bool {
    !(ip.is_unspecified()
        || ip.is_multicast()
        || ip.is_loopback()
        || ip == IpAddr::V4(Ipv4Addr::BROADCAST))
}

/// Reads a packet; `None` unless it is about Ethernet addresses and makes sense.
pub(super) fn parse_neighbour(packet: &[u8]) -> Option<NeighbourInfo> {
    let kind = u16::from_be_bytes(packet.get(12..14)?.try_into().ok()?);
    match kind {
        ETHER_ARP => parse_arp(packet.get(ETHER_BYTES..ETHER_BYTES + ARP_BYTES)?),
        ETHER_IPV6 => parse_ndp(mac_at(packet, 6), &packet[ETHER_BYTES..]),
        _ => None,
    }
}

/// Whether a packet is about who listens to which group: switches and routers read it.
pub(super) fn is_multicast_listener_packet(packet: &[u8]) -> bool {
    const ICMPV6_AT: usize = ETHER_BYTES + IPV6_BYTES + ROUTER_ALERT.len();
    let is_ipv6 = packet.get(12..14) == Some(&ETHER_IPV6.to_be_bytes()[..]);
    let next = [ETHER_BYTES + 6, ETHER_BYTES + IPV6_BYTES].map(|at| packet.get(at).copied());
    let kind = packet.get(ICMPV6_AT).copied();
    is_ipv6
        && next == [Some(PROTOCOL_HOP_BY_HOP), Some(PROTOCOL_ICMPV6)]
        && kind.is_some_and(|kind| GROUP_KINDS.contains(&kind))
}

fn parse_arp(arp: &[u8]) -> Option<NeighbourInfo> {
    if arp[..6] != ARP_KIND || arp[6] != 0 {
        return None;
    }
    let ip = IpAddr::V4(ip4_at(arp, 14)?);
    let heard = NeighbourInfo {
        ip,
        mac: Some(mac_at(arp, 8)?),
        solicited: match arp[7] {
            1 => Some(ip4_at(arp, 24)?.into()),
            2 => None,
            _ => return None,
        },
    };
    // An address that is being tried out (RFC 5227) asks from nowhere; none of our ports has to
    // answer it.
    is_host(ip).then_some(heard)
}

/// `sender`: the Ethernet address that the packet comes from.
fn parse_ndp(sender: Option<Mac>, ip: &[u8]) -> Option<NeighbourInfo> {
    let body_bytes = usize::from(u16::from_be_bytes([*ip.get(4)?, *ip.get(5)?]));
    let body = ip.get(IPV6_BYTES..IPV6_BYTES + body_bytes)?;
    // 255: it comes from a neighbour, no router has counted it down.
    let fits = ip[0] >> 4 == 6 && ip[6] == PROTOCOL_ICMPV6 && ip[7] == 255;
    if !fits || body.len() < ND_BYTES || body[1] != 0 {
        return None;
    }
    let (from, to) = (ip6_at(ip, 8)?, ip6_at(ip, 24)?);
    // The sum over a body that holds its own sum is zero.
    if checksum(from, to, body) != 0 {
        return None;
    }
    let target = ip6_at(body, 8)?;
    let wanted = match body[0] {
        SOLICITATION => OPTION_SOURCE,
        ADVERTISEMENT => OPTION_TARGET,
        _ => return None,
    };
    let mut mac = None;
    let mut options = &body[ND_BYTES..];
    while options.len() >= OPTION_BYTES {
        let bytes = usize::from(options[1]) * OPTION_BYTES;
        if bytes == 0 || bytes > options.len() {
            return None;
        }
        if options[0] == wanted {
            mac = mac_at(options, 2);
        }
        options = &options[bytes..];
    }
    // A machine that only makes sure that we are still there need not say where it is (RFC 4861,
    // 4.3).
    if body[0] == SOLICITATION && !to.is_multicast() {
        mac = mac.or(sender);
    }
    let heard = match body[0] {
        SOLICITATION => NeighbourInfo {
            ip: from.into(),
            mac,
            solicited: Some(target.into()),
        },
        _ => NeighbourInfo {
            ip: target.into(),
            mac: Some(mac?),
            solicited: None,
        },
    };
    is_host(heard.ip).then_some(heard)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MACS: [Mac; 2] = [[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]];

    fn addresses() -> [(IpAddr, IpAddr); 2] {
        [
            ([10, 77, 0, 1].into(), [10, 77, 0, 2].into()),
            ("fd77::1".parse().unwrap(), "fd77::12:3456".parse().unwrap()),
        ]
    }

    #[test]
    fn questions_are_understood_and_answered() {
        for (a, b) in addresses() {
            let asked = solicitation(MACS[0], a, b, None).unwrap();
            let heard = parse_neighbour(&asked).unwrap();
            assert_eq!(
                heard,
                NeighbourInfo {
                    ip: a,
                    mac: Some(MACS[0]),
                    solicited: Some(b)
                }
            );
            let answered = answer(MACS[1], b, MACS[0], a).unwrap();
            let heard = parse_neighbour(&answered).unwrap();
            assert_eq!(
                heard,
                NeighbourInfo {
                    ip: b,
                    mac: Some(MACS[1]),
                    solicited: None
                }
            );
            assert!(asked.len() >= 60 && answered.len() >= 60);
        }
        let [(v4, _), (v6, _)] = addresses();
        assert_eq!(solicitation(MACS[0], v4, v6, None), None);
        assert_eq!(answer(MACS[0], v6, MACS[1], v4), None);
    }

    #[test]
    fn what_we_listen_to_is_the_group_that_is_asked() {
        let [(v4, _), (a, b)] = addresses();
        assert_eq!(listener_report(MACS[0], v4), None);
        let said = listener_report(MACS[0], b).unwrap();
        let asked = solicitation(MACS[1], a, b, None).unwrap();
        let group = &said[said.len() - 16..];
        assert_eq!(group, &asked[38..54], "the question's destination");
        assert_eq!(
            parse_neighbour(&said),
            None,
            "it tells nothing about neighbours"
        );
        assert!(
            is_multicast_listener_packet(&said)
                && !is_multicast_listener_packet(&asked)
                && !is_multicast_listener_packet(&said[..62])
        );
        let (from, to) = (ip6_at(&said, 22).unwrap(), ip6_at(&said, 38).unwrap());
        assert_eq!(from, "fe80::ff:fe00:1".parse::<Ipv6Addr>().unwrap());
        assert_eq!(checksum(from, to, &said[62..]), 0);
        assert_eq!(usize::from(said[19]), said.len() - 54);
    }

    #[test]
    fn news_are_understood_and_ask_nothing_of_others() {
        for (a, b) in addresses() {
            let said = announcement(MACS[0], a);
            let heard = parse_neighbour(&said).expect("it is about a neighbour");
            assert_eq!((heard.ip, heard.mac), (a, Some(MACS[0])));
            assert_ne!(heard.solicited, Some(b));
            assert!(said[0] & 1 == 1 && said.len() >= 60, "to everybody");
        }
    }

    #[test]
    fn groups_and_nobodies_are_no_neighbours() {
        for (a, b) in addresses() {
            let mut asked = solicitation([0xff; 6], a, b, None).unwrap();
            let mac = parse_neighbour(&asked).and_then(|heard| heard.mac);
            assert_eq!(mac, None, "{a}");
            asked.truncate(40);
            assert_eq!(parse_neighbour(&asked), None);
        }
        let nowhere = solicitation(
            MACS[0],
            Ipv4Addr::UNSPECIFIED.into(),
            [10, 0, 0, 1].into(),
            None,
        );
        assert_eq!(parse_neighbour(&nowhere.unwrap()), None);
    }

    #[test]
    fn one_who_is_asked_itself_is_asked_alone() {
        for (a, b) in addresses() {
            let asked = solicitation(MACS[0], a, b, Some(MACS[1])).unwrap();
            assert_eq!(asked[..6], MACS[1]);
            let heard = parse_neighbour(&asked).unwrap();
            assert_eq!((heard.mac, heard.solicited), (Some(MACS[0]), Some(b)));
        }
    }

    /// As the kernel asks whether somebody it knows is still there. In a question to a group it has
    /// to say where it is.
    #[test]
    fn a_neighbour_that_does_not_say_where_it_is_is_answered_there() {
        let [_, (a, b)] = addresses();
        for (known, mac) in [(Some(MACS[1]), Some(MACS[0])), (None, None)] {
            let mut asked = solicitation(MACS[0], a, b, known).unwrap();
            asked.truncate(ETHER_BYTES + IPV6_BYTES + ND_BYTES);
            asked[ETHER_BYTES + 5] = ND_BYTES as u8;
            let (head, body) = asked.split_at_mut(ETHER_BYTES + IPV6_BYTES);
            body[2..4].fill(0);
            let (from, to) = (ip6_at(head, 22).unwrap(), ip6_at(head, 38).unwrap());
            let sum = checksum(from, to, body);
            body[2..4].copy_from_slice(&sum.to_be_bytes());
            let heard = parse_neighbour(&asked).unwrap();
            assert_eq!((heard.ip, heard.mac, heard.solicited), (a, mac, Some(b)));
        }
    }

    proptest! {
        /// Whatever bytes arrive: nothing breaks, and what is believed of IPv6 has the right sum.
        #[test]
        fn any_bytes_are_read(bytes in prop::collection::vec(any::<u8>(), 0..128)) {
            let _ = (parse_neighbour(&bytes), is_multicast_listener_packet(&bytes));
        }

        #[test]
        fn damaged_packets_are_read(
            v6 in any::<bool>(), answers in any::<bool>(), at in 0..96usize, bit in 0..8u8, cut in 0..96usize,
        ) {
            let (a, b) = addresses()[usize::from(v6)];
            let mut packet = match answers {
                true => answer(MACS[0], a, MACS[1], b),
                false => solicitation(MACS[0], a, b, None),
            }.unwrap();
            if let Some(byte) = packet.get_mut(at) {
                *byte ^= 1 << bit;
            }
            packet.truncate(cut.max(20));
            if let Some(heard) = parse_neighbour(&packet) {
                prop_assert!(is_host(heard.ip));
                prop_assert!(heard.mac.is_none_or(|mac| mac[0] & 1 == 0));
            }
        }
    }
}

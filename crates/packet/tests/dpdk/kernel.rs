//! Over a veth pair (net_af_packet): the other end is a kernel, which asks and answers about
//! neighbours, checks headers and sums, and can be made to send anything.

use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use cyclone_packet::{UdpDriver, UdpOptions};

use super::*;
use crate::net::{Cable, Machine};

/// A cable whose near end has no address in the kernel: it is ours.
fn cable() -> Option<Cable> {
    let cable = Cable::new(1500, 1)?;
    cable.a.ip("addr flush dev va");
    Some(cable)
}

fn open_here(machine: &Machine, number: u32, address: &str, pool: &Pool) -> DpdkDriver {
    machine.enter();
    open(address, &format!("net_af_packet{number},iface=va"), pool)
}

#[test]
fn ordinary_sockets_are_understood() {
    let _alone = alone();
    for (number, at, peer) in [
        (0, "10.77.0.1:7101", "10.77.0.2:7102"),
        (1, "[fd77::1]:7101", "[fd77::2]:7102"),
    ] {
        let Some(cable) = cable() else { return };
        let clock = Clock(Instant::now());
        let pools = (pool(1024, 2048), pool(1024, 9216));
        let driver = open_here(&cable.a, number, at, &pools.0);
        let mut a = End::new(Box::new(driver), pools.0, 1);
        cable.b.enter();
        let driver = UdpDriver::bind(peer.parse().unwrap(), &pools.1, UdpOptions::default());
        let mut b = End::new(Box::new(driver.unwrap()), pools.1, 2);
        a.port.add_node(2, peer.parse().unwrap());
        b.port.add_node(1, at.parse().unwrap());
        settle(&clock, &mut a, &mut b);
        let bodies: Vec<Vec<u8>> = [1, 2, 333, 1400, 1401, 30_000]
            .map(|len| body(1, len))
            .into();
        exchange(&clock, &mut a, &mut b, 2, &bodies);
        exchange(&clock, &mut b, &mut a, 1, &bodies);
        assert_eq!(b.port.stats().forged + a.port.stats().forged, 0);
        a.close();
        b.close();
    }
}

/// What a program of iproute2 says on this machine.
fn said(machine: &Machine, program: &str, arguments: &str) -> String {
    machine.enter();
    let output = std::process::Command::new(program)
        .args(arguments.split_whitespace())
        .output();
    let output = output.expect("a program of iproute2").stdout;
    String::from_utf8_lossy(&output).into_owned()
}

/// A machine that knows us by another card, as before a cable or a card was changed, would send
/// there until it asks again.
#[test]
fn our_address_is_announced_to_a_machine_that_knew_us_elsewhere() {
    let _alone = alone();
    for (number, own) in [(10, "10.77.0.1"), (11, "fd77::1")] {
        let Some(cable) = cable() else { return };
        let link = said(&cable.a, "ip", "-o link show va");
        let mac = link.split_once("link/ether ").map(|(_, rest)| &rest[..17]);
        let mac = mac.unwrap_or_else(|| panic!("{link}")).to_owned();
        let elsewhere =
            format!("neigh replace {own} lladdr 02:00:00:00:00:99 dev vb nud reachable");
        cable.b.ip(&elsewhere);
        let address = SocketAddr::new(own.parse().expect("an address"), 7101);
        let frames = pool(1024, 2048);
        let mut driver = open_here(&cable.a, number, &address.to_string(), &frames);
        let (since, mut got) = (Instant::now(), Vec::new());
        loop {
            // The cards are checked once in some hundred calls.
            for _ in 0..300 {
                driver.recv(&frames, &mut got, 32).expect("received");
            }
            let known = said(&cable.b, "ip", &format!("neigh show {own} dev vb"));
            if known.contains(&mac) {
                break;
            }
            assert!(since.elapsed() < Duration::from_secs(10), "{known:?}");
        }
    }
}

/// A switch that watches who listens to which group brings questions for our address only to whom
/// has said that it listens.
#[test]
fn groups_are_reported_to_a_switch() {
    let _alone = alone();
    let Some(cable) = cable() else { return };
    if !cable.b.try_ip("link add br0 type bridge mcast_snooping 1") {
        println!("skipped: no bridges here");
        return;
    }
    cable.b.ip("link set vb master br0");
    cable.b.ip("link set br0 up");
    let frames = pool(1024, 2048);
    let mut driver = open_here(&cable.a, 0, "[fd77::12:3456]:7101", &frames);
    let (since, mut got) = (Instant::now(), Vec::new());
    loop {
        driver.recv(&frames, &mut got, 32).expect("received");
        let shown = said(&cable.b, "bridge", "mdb show");
        if shown
            .lines()
            .any(|line| line.contains("port vb") && line.contains("ff02::1:ff12:3456"))
        {
            break;
        }
        assert!(since.elapsed() < PATIENCE, "{shown:?}");
        // The cards are checked once in some hundred calls.
        for _ in 0..100 {
            driver.recv(&frames, &mut got, 32).expect("received");
        }
    }
}

/// A socket that sends Ethernet packets as they are.
struct Raw(OwnedFd, i32);

impl Raw {
    fn new(machine: &Machine, interface: &str) -> Raw {
        machine.enter();
        let name = std::ffi::CString::new(interface).unwrap();
        // SAFETY: plain system calls; the name lives for the call, and nothing else owns the
        // descriptor.
        unsafe {
            let fd = libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0);
            assert!(fd >= 0, "{}", std::io::Error::last_os_error());
            Raw(
                OwnedFd::from_raw_fd(fd),
                libc::if_nametoindex(name.as_ptr()) as i32,
            )
        }
    }

    fn send(&self, packet: &[u8]) {
        // SAFETY: all zeros is a valid address of this kind.
        let mut to: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        to.sll_family = libc::AF_PACKET as u16;
        to.sll_ifindex = self.1;
        // SAFETY: bytes and address live for the call and are as long as said.
        unsafe {
            libc::sendto(
                self.0.as_raw_fd(),
                packet.as_ptr().cast(),
                packet.len(),
                0,
                (&raw const to).cast(),
                size_of::<libc::sockaddr_ll>() as u32,
            );
        }
    }
}

/// A good datagram to our port, to be spoilt.
fn packet(payload: usize) -> Vec<u8> {
    let mut bytes = vec![0xff; 12];
    bytes.extend([8, 0]);
    let total = (28 + payload) as u16;
    bytes.extend([0x45, 0]);
    bytes.extend(total.to_be_bytes());
    bytes.extend([0, 0, 0x40, 0, 64, 17, 0, 0]);
    bytes.extend([10, 77, 0, 2, 10, 77, 0, 1]);
    bytes.extend(7102u16.to_be_bytes());
    bytes.extend(7101u16.to_be_bytes());
    bytes.extend(((8 + payload) as u16).to_be_bytes());
    bytes.extend([0, 0]);
    bytes.extend(body(3, payload));
    bytes
}

type Spoil = fn(&mut Vec<u8>);

/// What is not a whole datagram for our port and address, one way or other.
const SPOILT: [(&str, Spoil); 12] = [
    ("another port", |p| p[36] ^= 1),
    ("another address", |p| p[33] ^= 4),
    ("no sender", |p| p[26..30].fill(0)),
    ("sent by a group", |p| p[26] = 224),
    ("VLAN tag", |p| drop(p.splice(12..12, [0x81, 0, 0, 5]))),
    ("TCP", |p| p[23] = 6),
    ("an unknown protocol over Ethernet", |p| p[12] = 0x99),
    ("IP options", |p| p[14] = 0x46),
    ("a fragment", |p| p[20] = 0x20),
    ("cut short", |p| p.truncate(60)),
    ("longer than it is", |p| p[38] = 7),
    ("hardly anything", |p| p.truncate(15)),
];

/// Bytes that are no datagrams, and datagrams that are no messages, are counted and dropped; what
/// follows them is received.
#[test]
fn garbage_is_dropped() {
    let _alone = alone();
    let Some(cable) = cable() else { return };
    let frames = pool(1024, 2048);
    let mut driver = open_here(&cable.a, 2, "10.77.0.1:7101", &frames);
    let raw = Raw::new(&cable.b, "vb");
    let mut out = Vec::new();
    let poll = |driver: &mut DpdkDriver, out: &mut Vec<_>| {
        let since = Instant::now();
        while since.elapsed() < Duration::from_millis(20) {
            driver.recv(&frames, out, 32).unwrap();
        }
    };
    for (what, spoil) in SPOILT {
        let mut bytes = packet(500);
        spoil(&mut bytes);
        let before = driver.stats().malformed;
        raw.send(&bytes);
        poll(&mut driver, &mut out);
        assert!(out.is_empty(), "{what}: received");
        // Fragments wait in the kernel for their rest, and then go nowhere.
        let counted = driver.stats().malformed > before;
        assert!(counted || what == "a fragment", "{what}: not counted");
    }
    raw.send(&packet(500));
    poll(&mut driver, &mut out);
    assert_eq!(out.len(), 1);
    assert_eq!(out[0].1.to_vec(), body(3, 500));
    assert_eq!(out[0].0, SocketAddr::from(([10, 77, 0, 2], 7102)));
    out.clear();

    // Bit by bit, and bytes without any sense.
    let mut seed = 7u64;
    for round in 0..3000 {
        seed = seed
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        let mut bytes = packet((seed >> 40) as usize % 1400);
        if round % 2 == 0 {
            let at = (seed >> 20) as usize % 60.min(bytes.len());
            bytes[at] ^= 1 << (seed >> 8 & 7);
        } else {
            bytes = body(seed, (seed >> 33) as usize % 1400);
        }
        raw.send(&bytes);
        driver.recv(&frames, &mut out, 32).unwrap();
        out.clear();
    }
    poll(&mut driver, &mut out);
    out.clear();
    let mut a = End::new(Box::new(driver), frames.clone(), 1);
    cable.b.enter();
    let (peer, theirs) = ("10.77.0.2:7102".parse().unwrap(), pool(1024, 9216));
    let udp = UdpDriver::bind(peer, &theirs, UdpOptions::default()).unwrap();
    let mut b = End::new(Box::new(udp), theirs, 2);
    b.port.add_node(1, "10.77.0.1:7101".parse().unwrap());
    let socket = UdpSocket::bind("10.77.0.2:0").unwrap();
    socket
        .send_to(b"no message", "10.77.0.1:7101")
        .expect("send");
    exchange(&Clock(Instant::now()), &mut b, &mut a, 1, &[body(9, 3000)]);
    assert!(a.port.stats().malformed > 0);
    drop(frames);
    a.close();
}

//! The program against the kernel's verifier, and against the parser; headers against sums computed
//! the long way.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use cyclone_pmem::{Pool, Region};
use proptest::prelude::*;

use super::bpf;
use super::netlink::Netlink;
use super::open::{packet_room, payload_room, umem};
use super::program::{self, Verdict, XDP_PASS};
use super::{Driver, XdpDriver, XdpError, XdpOptions};
use crate::headers::{self, Template};

const PORT: u16 = 7101;
/// XDP_TX: a value that no part of the program returns.
const TAKEN: i32 = 3;

fn ours() -> Vec<IpAddr> {
    ["10.77.0.1", "192.168.200.9", "fd77::1", "fe80::1"]
        .iter()
        .map(|text| text.parse().expect("an address"))
        .collect()
}

/// The program, if we may load it.
fn load() -> Option<OwnedFd> {
    bpf::lift_memory_limit();
    let code = program::assemble(PORT, 1, &ours(), Verdict::Return(TAKEN));
    match bpf::load(&code, true) {
        Ok((program, _)) => Some(program),
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
            println!("skipped: no right to load BPF programs");
            None
        }
        Err(error) => panic!("the verifier refuses the program: {error}"),
    }
}

fn packet(from: &str, to: &str, payload: &[u8]) -> Vec<u8> {
    let (from, to): (SocketAddr, SocketAddr) = (
        from.parse().expect("an address"),
        to.parse().expect("an address"),
    );
    let template = Template::new([2; 6], from, [4; 6], to).expect("same family");
    let mut bytes = vec![0; template.len()];
    template.write(&[payload], &mut bytes);
    bytes.extend_from_slice(payload);
    bytes
}

fn good() -> Vec<Vec<u8>> {
    vec![
        packet("10.77.0.2:9000", "10.77.0.1:7101", b"hello"),
        packet("10.77.0.2:9000", "192.168.200.9:7101", &[7; 1400]),
        packet("[fd77::2]:9000", "[fd77::1]:7101", b"hello"),
        packet("[fe80::2]:9000", "[fe80::1]:7101", &[1; 99]),
    ]
}

fn takes(program: &OwnedFd, bytes: &[u8]) -> bool {
    match bpf::test_run(program, bytes).expect("a run") {
        TAKEN => true,
        XDP_PASS => false,
        other => panic!("the program answers {other}"),
    }
}

fn parses(bytes: &[u8]) -> bool {
    headers::parse(bytes, bytes.len(), PORT, 3).is_some()
}

#[test]
fn our_datagrams_are_taken_and_nothing_else() {
    let Some(program) = load() else { return };
    for bytes in good() {
        assert!(takes(&program, &bytes), "{bytes:x?}");
        assert!(parses(&bytes));
    }
    let mut foreign = vec![
        packet("10.77.0.2:9000", "10.77.0.1:7102", b"another port"),
        packet("10.77.0.2:9000", "10.77.0.7:7101", b"forwarded"),
        packet("[fd77::2]:9000", "[fd77::3]:7101", b"forwarded"),
        vec![0xff; 60],
    ];
    // ARP; a VLAN tag before the datagram; TCP; more fragments; a later fragment; options.
    let plain = packet("10.77.0.2:9000", "10.77.0.1:7101", b"hello, hello, hello");
    let with = |at: usize, value: u8| {
        let mut bytes = plain.clone();
        bytes[at] = value;
        bytes
    };
    foreign.extend([
        with(13, 6),
        with(23, 6),
        with(20, 0x20),
        with(21, 1),
        with(14, 0x46),
    ]);
    let mut tagged = plain.clone();
    tagged.splice(12..12, [0x81, 0, 0, 5]);
    foreign.push(tagged);
    let mut extended = packet("[fd77::2]:9000", "[fd77::1]:7101", &[17; 40]);
    extended[20] = 0;
    foreign.push(extended);
    for bytes in foreign {
        assert!(!takes(&program, &bytes), "{bytes:x?}");
    }
}

#[test]
fn of_several_ports_each_is_taken() {
    bpf::lift_memory_limit();
    for (first, ports) in [(PORT, 3), (1, 1), (u16::MAX, 1), (65_000, 536)] {
        let code = program::assemble(first, ports, &ours(), Verdict::Return(TAKEN));
        let Ok((program, _)) = bpf::load(&code, true) else {
            println!("skipped: no right to load BPF programs");
            return;
        };
        let last = first + (ports - 1);
        for port in [0, 1, first - 1, first, last, last.wrapping_add(1), u16::MAX] {
            let ours = (first..=last).contains(&port);
            for (from, to) in [("10.77.0.2:9", "10.77.0.1"), ("[fd77::2]:9", "[fd77::1]")] {
                let bytes = packet(from, &format!("{to}:{port}"), b"hello");
                assert_eq!(takes(&program, &bytes), ours, "{first}+{ports}: {port}");
            }
        }
    }
}

/// Flips bytes of good packets and cuts them: program and parser read the same way, so whatever the
/// program takes and the parser refuses is wrong only in lengths or senders.
#[test]
fn program_and_parser_agree() {
    let Some(program) = load() else { return };
    let mut seed = 0x9E37_79B9_7F4A_7C15u64;
    let mut next = |below: usize| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        (seed >> 11) as usize % below
    };
    let (mut taken, mut refused) = (0, 0);
    for round in 0..20_000 {
        let mut bytes = good()[next(4)].clone();
        bytes.truncate(14 + next(bytes.len() - 13).max(1));
        for _ in 0..next(3) {
            let at = next(bytes.len().min(70));
            bytes[at] ^= 1 << next(8);
        }
        let (kernel, parser) = (takes(&program, &bytes), parses(&bytes));
        assert!(
            kernel || !parser || to_others(&bytes),
            "round {round}: {bytes:x?}"
        );
        taken += usize::from(kernel);
        refused += usize::from(kernel && !parser);
    }
    assert!(
        taken > 1000 && refused > 100,
        "{taken} taken, {refused} of them refused"
    );
}

/// The parser does not check the destination: only the program's packets come to it.
fn to_others(bytes: &[u8]) -> bool {
    let to: IpAddr = match bytes[12..14] {
        [8, 0] => <[u8; 4]>::try_from(&bytes[30..34]).expect("four").into(),
        _ => <[u8; 16]>::try_from(&bytes[38..54])
            .expect("sixteen")
            .into(),
    };
    !ours().contains(&to)
}

fn ip(arguments: &str) -> bool {
    let output = std::process::Command::new("ip")
        .args(arguments.split_whitespace())
        .output();
    output.is_ok_and(|output| output.status.success())
}

/// A cable from `va` to `vb` in a network namespace of this thread's own, if we may have one.
fn fresh_cable() -> bool {
    // SAFETY: a plain system call that concerns this thread.
    let fresh = unsafe { libc::unshare(libc::CLONE_NEWNET) } == 0;
    if !fresh || !ip("link add va type veth peer name vb") {
        return false;
    }
    assert!(ip("addr add 10.77.0.1/24 dev va") && ip("link set vb up") && ip("link set va up"));
    true
}

fn frames() -> Pool {
    let region = Region::anonymous(1024 * 2048).expect("memory");
    Pool::new(region.take(0, region.len()).expect("first taker"), 2048)
}

fn open_ports(pool: &Pool, ports: u16) -> Result<Vec<XdpDriver>, XdpError> {
    let address = "10.77.0.1:7101".parse().expect("an address");
    XdpDriver::open_ports(address, pool, &XdpOptions::new("va"), ports)
}

fn open(pool: &Pool) -> Result<XdpDriver, XdpError> {
    Ok(open_ports(pool, 1)?.remove(0))
}

/// A program of ours that is attached without a process that keeps it, as older kernels leave it
/// after a crash, is replaced; somebody else's is not touched, and named.
#[test]
fn stale_programs_are_replaced_and_foreign_ones_respected() {
    if !fresh_cable() {
        println!("skipped: no right to make network namespaces, or no veth interfaces");
        return;
    }
    let pool = frames();
    let open = || open(&pool);
    let mut netlink = Netlink::open().expect("netlink");
    // SAFETY: a string that ends in a zero byte.
    let index = unsafe { libc::if_nametoindex(c"va".as_ptr()) };
    for mode in [bpf::MODE_NATIVE, bpf::MODE_GENERIC] {
        for (name, ours) in [(bpf::PROGRAM_NAME, true), (&b"somebody"[..], false)] {
            let code = program::assemble(9, 1, &ours_v4(), Verdict::Return(XDP_PASS));
            let (program, _) = bpf::load_as(&code, name, true).expect("a program");
            netlink
                .set_program(index, program.as_raw_fd(), mode)
                .expect("attached for good");
            drop(program);
            let left = netlink.link(index).expect("va").program;
            assert!(left.is_some());
            if ours {
                let driver = open().expect("the stale program goes");
                assert_ne!(netlink.link(index).expect("va").program, left);
                drop(driver);
            } else {
                match open().err() {
                    Some(XdpError::Occupied { name, .. }) => assert_eq!(name, "somebody"),
                    other => panic!("{other:?}"),
                }
                assert_eq!(netlink.link(index).expect("va").program, left);
                netlink.set_program(index, -1, mode).expect("detached");
            }
            assert_eq!(netlink.link(index).expect("va").program, None);
        }
    }
    assert_eq!(pool.free(), pool.count());
}

/// A socket that sends bytes as they are. Closing one takes the kernel 10 ms.
fn raw_socket() -> OwnedFd {
    // SAFETY: a plain system call; the descriptor is this function's alone.
    unsafe {
        let socket = libc::socket(libc::AF_PACKET, libc::SOCK_RAW, 0);
        assert!(socket >= 0, "{}", std::io::Error::last_os_error());
        OwnedFd::from_raw_fd(socket)
    }
}

fn inject(socket: &OwnedFd, interface: u32, bytes: &[u8]) {
    // SAFETY: a plain system call; the address is a whole `sockaddr_ll`.
    let sent = unsafe {
        let mut to: libc::sockaddr_ll = std::mem::zeroed();
        to.sll_family = libc::AF_PACKET as u16;
        to.sll_ifindex = interface as i32;
        libc::sendto(
            socket.as_raw_fd(),
            bytes.as_ptr().cast(),
            bytes.len(),
            0,
            std::ptr::from_ref(&to).cast(),
            size_of_val(&to) as u32,
        )
    };
    assert_eq!(sent, bytes.len() as isize);
}

#[test]
fn where_the_kernel_copies_sockets_send_apart() {
    if !fresh_cable() {
        println!("skipped: no right to make network namespaces, or no veth interfaces");
        return;
    }
    let pool = frames();
    for port in open_ports(&pool, 2).expect("AF_XDP") {
        assert!(!port.is_zero_copy() && port.queues[0].socket().has_send_socket());
    }
}

#[test]
fn where_the_next_packet_will_lie_is_known() {
    if !fresh_cable() {
        println!("skipped: no right to make network namespaces, or no veth interfaces");
        return;
    }
    let pool = frames();
    let mut driver = open(&pool).expect("AF_XDP");
    // SAFETY: a string that ends in a zero byte.
    let far = unsafe { libc::if_nametoindex(c"vb".as_ptr()) };
    let (socket, mut got) = (raw_socket(), Vec::new());
    let bytes = packet("10.77.0.2:9000", "10.77.0.1:7101", b"hello");
    // More than there are frames: they are offered again and again, singly and several at a time.
    for round in 0..1500 {
        for _ in 0..1 + round % 3 {
            inject(&socket, far, &bytes);
        }
        let since = Instant::now();
        while driver.rx_is_empty() {
            assert!(since.elapsed() < Duration::from_secs(20), "lost");
        }
        assert!(
            round == 0 || driver.queues[0].has_predicted_next(),
            "{round}"
        );
        while driver.recv(&pool, &mut got, 32).expect("received") > 0 {}
        // Some are kept for a while, and come back in another order.
        if round % 100 == 0 {
            got.clear();
        }
    }
    assert_eq!(driver.stats().received, 3000);
}

/// Frames of the longest datagram: the packet's bytes, headers and all, in frames that each hold so
/// many, is what the receiver of a message reckons from [`crate::Driver::supports_multi_slice`].
#[test]
fn frames_of_the_longest_datagram_are_counted_right() {
    let (v4, v6): (IpAddr, IpAddr) = (
        [10, 77, 0, 1].into(),
        "fd77::1".parse().expect("an address"),
    );
    for (frame_bytes, mtu, frames) in [
        (2048, 1500, 1),
        (2048, 9000, 6),
        (4096, 1500, 1),
        (4096, 9000, 3),
        (9216, 1500, 1),
        (9216, 9000, 3),
    ] {
        let region = Region::anonymous(128 * u64::from(frame_bytes)).expect("memory");
        let pool = Pool::new(
            region.take(0, region.len()).expect("first taker"),
            frame_bytes,
        );
        for (ip, zero_copy) in [(v4, true), (v4, false), (v6, true), (v6, false)] {
            let umem = umem(&pool, ip, zero_copy).expect("frames that will do");
            let (packet, payload) = (packet_room(&umem), payload_room(&umem, ip));
            assert_eq!(umem.unaligned, frame_bytes == 9216 || !zero_copy);
            assert!(payload >= 512);
            let longest = mtu - headers::ip_udp_bytes(ip);
            assert_eq!((mtu + headers::ETHER_BYTES).div_ceil(packet), frames);
            assert_eq!(
                longest.div_ceil(payload),
                frames,
                "{frame_bytes}, {mtu}, {ip}"
            );
            // With single buffers, as [`XdpDriver::open`] bounds it.
            let longest = longest.min(packet - headers::MOST_BYTES);
            assert_eq!(longest.div_ceil(payload), 1, "{frame_bytes}, {mtu}, {ip}");
        }
    }
}

fn ours_v4() -> Vec<IpAddr> {
    vec![[10, 77, 0, 1].into()]
}

/// The one's complement sum, byte by byte.
fn slow_sum(bytes: impl Iterator<Item = u8>) -> u16 {
    let mut sum = 0u32;
    for (at, byte) in bytes.enumerate() {
        sum += u32::from(byte) << if at % 2 == 0 { 8 } else { 0 };
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

proptest! {
    /// Whatever comes, the parser answers within the packet or not at all.
    #[test]
    fn the_parser_stays_within_the_packet(
        mut bytes in prop::collection::vec(any::<u8>(), 0..120),
        kind in 0..3,
        extra in 0..4000usize,
    ) {
        if bytes.len() > 24 && kind > 0 {
            let (ether, version) = if kind == 1 { ([8, 0], 0x45) } else { ([0x86, 0xdd], 0x60) };
            bytes[12..14].copy_from_slice(&ether);
            bytes[14] = version;
            let protocol = if kind == 1 { 23 } else { 20 };
            bytes[protocol] = 17;
        }
        let total = bytes.len() + extra;
        if let Some(parsed) = headers::parse(&bytes, total, PORT, 1) {
            prop_assert!(parsed.at <= bytes.len() && parsed.at + parsed.len <= total);
        }
        prop_assert_eq!(headers::parse(&bytes, bytes.len().saturating_sub(1), PORT, 1), None);
    }

    #[test]
    fn checksums_are_right_however_the_payload_is_cut(
        payload in prop::collection::vec(any::<u8>(), 0..300),
        cuts in prop::collection::vec(0..300usize, 0..5),
    ) {
        let mut parts = Vec::new();
        let mut rest = payload.as_slice();
        for cut in cuts {
            let (part, after) = rest.split_at(cut.min(rest.len()));
            parts.push(part);
            rest = after;
        }
        parts.push(rest);
        for (from, to) in [("10.77.0.2:9000", "10.77.0.1:7101"), ("[fd77::2]:9000", "[fd77::1]:7101")] {
            let (from, to): (SocketAddr, SocketAddr) = (from.parse().unwrap(), to.parse().unwrap());
            let template = Template::new([2; 6], from, [4; 6], to).unwrap();
            let mut bytes = vec![0; template.len()];
            template.write(&parts, &mut bytes);
            bytes.extend_from_slice(&payload);
            let parsed = headers::parse(&bytes, bytes.len(), PORT, 1).expect("well-formed");
            prop_assert_eq!(parsed.from, from);
            prop_assert_eq!(&bytes[parsed.at..parsed.at + parsed.len], payload.as_slice());
            let ip = &bytes[14..];
            if from.is_ipv4() {
                prop_assert_eq!(slow_sum(ip[..20].iter().copied()), 0xffff);
            } else {
                let length = (payload.len() as u16 + 8).to_be_bytes();
                let pseudo = ip[8..40].iter().copied().chain(length).chain([0, 17]);
                prop_assert_eq!(slow_sum(pseudo.chain(ip[40..].iter().copied())), 0xffff);
                prop_assert_ne!(&ip[46..48], &[0, 0]);
            }
        }
    }
}

//! AF_XDP between two machines that the tests make: needs root, skips without. Nothing outside
//! their network namespaces is touched.

mod apart;
mod bursts;
#[path = "../common/cable.rs"]
mod cable;
mod child;
#[path = "../common/mod.rs"]
mod common;
mod crash;
mod fair;
mod frames;
mod gateway;
mod kernel;
mod locked;
mod net;
mod ports;
mod single;
mod slow;
mod ways;

use std::net::UdpSocket;
use std::time::{Duration, Instant};

use cable::{Clock, body};
use common::*;
use cyclone_packet::{
    Datagram, Driver, Message, Outgoing, Peer, Port, UdpDriver, UdpOptions, XdpDriver, XdpError,
    XdpOptions,
};
use cyclone_pmem::pool::Pool;
use net::{Cable, Machine};

const PATIENCE: Duration = Duration::from_secs(20);

/// A port on a machine, and its pool.
struct End<'a> {
    machine: &'a Machine,
    port: Port,
    pool: Pool,
}

fn xdp(address: &str, interface: &str, pool: &Pool) -> XdpDriver {
    open(address, pool, &XdpOptions::new(interface))
}

fn open(address: &str, pool: &Pool, options: &XdpOptions) -> XdpDriver {
    let address = address.parse().expect("an address");
    let since = Instant::now();
    loop {
        match XdpDriver::open(address, pool, options) {
            Ok(driver) => return driver,
            // Programs that other tests are just starting hold copies of all descriptors for a
            // short time.
            Err(XdpError::Bind { .. }) if since.elapsed() < PATIENCE => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(error) => panic!("AF_XDP: {error}"),
        }
    }
}

fn end<'a>(machine: &'a Machine, driver: Box<dyn Driver>, pool: Pool, id: u64) -> End<'a> {
    let port = Port::new(driver, pool.clone(), node_config(id, id as u8)).expect("a port");
    End {
        machine,
        port,
        pool,
    }
}

fn xdp_pair<'a>(cable: &'a Cable, frame_bytes: u32, a: &str, b: &str) -> (End<'a>, End<'a>) {
    let (pool_a, pool_b) = (pool(4096, frame_bytes), pool(4096, frame_bytes));
    cable.a.enter();
    let driver = Box::new(xdp(a, "va", &pool_a));
    let mut a_end = end(&cable.a, driver, pool_a, 1);
    cable.b.enter();
    let driver = Box::new(xdp(b, "vb", &pool_b));
    let mut b_end = end(&cable.b, driver, pool_b, 2);
    a_end.port.add_node(2, b.parse().unwrap());
    b_end.port.add_node(1, a.parse().unwrap());
    (a_end, b_end)
}

/// Sends messages one way until all have arrived, again and again those that got lost; answers what
/// arrived.
fn exchange(clock: &Clock, from: &mut End<'_>, to: &mut End<'_>, peer: u64, bodies: &[Vec<u8>]) {
    let mut got: Vec<Message> = Vec::new();
    let mut back = Vec::new();
    for (number, body) in bodies.iter().enumerate() {
        let since = Instant::now();
        let mut sent = None::<Instant>;
        while got.len() <= number {
            assert!(
                since.elapsed() < PATIENCE,
                "message {number}: {:?} {:?} {:?} {:?}",
                from.port.stats(),
                from.port.driver_stats(),
                to.port.stats(),
                to.port.driver_stats()
            );
            if sent.is_none_or(|at| at.elapsed() > Duration::from_millis(300)) {
                sent = Some(Instant::now());
                from.machine.enter();
                let half = body.len() / 2;
                let parts: [&[u8]; 2] = [&body[..half], &body[half..]];
                let message = Outgoing {
                    to: Peer::Node(peer),
                    parts: &parts,
                };
                from.port.send(clock.now_us(), &[message]).expect("send");
            }
            to.machine.enter();
            to.port.poll(clock.now_us(), &mut got).expect("poll");
            from.machine.enter();
            from.port.poll(clock.now_us(), &mut back).expect("poll");
        }
        assert_eq!(got[number].body.to_vec(), *body, "message {number}");
        // A repetition that was slow, not lost.
        got.truncate(number + 1);
    }
}

/// One datagram from driver to driver, as often as it takes. It begins with eight bytes that no
/// other one has.
fn carry(from: &mut XdpDriver, to: &mut XdpDriver, pool: &Pool, parts: &[&[u8]]) {
    let (mut got, mut back) = (Vec::new(), Vec::new());
    let (since, expected) = (Instant::now(), parts.concat());
    let mut sent = None::<Instant>;
    loop {
        if sent.is_none_or(|at| at.elapsed() > Duration::from_millis(300)) {
            sent = Some(Instant::now());
            let datagram = Datagram {
                to: to.local_addr(),
                parts,
            };
            assert_eq!(from.send(&[datagram]).expect("send"), 1);
        }
        to.recv(pool, &mut got, 32).expect("received");
        from.recv(pool, &mut back, 32).expect("received");
        for (sender, datagram) in got.drain(..) {
            let bytes = datagram.to_vec();
            // An earlier one may have been slow, not lost.
            if bytes.get(..8) == expected.get(..8) {
                assert_eq!(sender, from.local_addr());
                assert!(bytes == expected, "{} bytes are damaged", expected.len());
                return;
            }
        }
        let stats = (from.stats(), to.stats());
        assert!(
            since.elapsed() < PATIENCE,
            "{} bytes: {stats:?}",
            expected.len()
        );
    }
}

/// Until datagrams go straight both ways.
fn introduce(a: &mut XdpDriver, b: &mut XdpDriver, pool: &Pool) {
    let since = Instant::now();
    for round in 0u64.. {
        let before = (a.stats().by_kernel, b.stats().by_kernel);
        let name = (round | 1 << 63).to_le_bytes();
        carry(a, b, pool, &[&name]);
        carry(b, a, pool, &[&name]);
        if before == (a.stats().by_kernel, b.stats().by_kernel) {
            return;
        }
        assert!(since.elapsed() < PATIENCE);
        std::thread::sleep(Duration::from_millis(15));
    }
}

/// The end of a driver: everything is sent, and its frames have come back, but for so many that the
/// test holds.
fn close(driver: XdpDriver, pool: &Pool, held: u32) {
    await_sent(&driver);
    drop(driver);
    assert_eq!(
        pool.free() + held,
        pool.count(),
        "every frame has come back"
    );
}

fn await_sent(driver: &XdpDriver) {
    let since = Instant::now();
    while driver.frames_sending() > 0 {
        assert!(
            since.elapsed() < PATIENCE,
            "{} frames are not sent",
            driver.frames_sending()
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Time for neighbours to be found; then nothing goes through the kernel.
fn settle(clock: &Clock, a: &mut End<'_>, b: &mut End<'_>) {
    for round in 0..20 {
        exchange(clock, a, b, 2, &[body(round, 100)]);
        exchange(clock, b, a, 1, &[body(round, 100)]);
        std::thread::sleep(Duration::from_millis(15));
    }
}

fn talk(mtu: usize, frame_bytes: u32, a: &str, b: &str) {
    let Some(cable) = Cable::new(mtu, 1) else {
        return;
    };
    let clock = Clock(Instant::now());
    let (mut a, mut b) = xdp_pair(&cable, frame_bytes, a, b);
    println!("{}", a.port.describe_driver());
    settle(&clock, &mut a, &mut b);
    let sizes = [
        0, 1, 47, 48, 255, 256, 1024, 1400, 1452, 1500, 4000, 8900, 9000, 65_000, 200_000,
    ];
    let bodies: Vec<Vec<u8>> = sizes.iter().map(|&len| body(len as u64, len)).collect();
    let before = b.port.driver_stats();
    exchange(&clock, &mut a, &mut b, 2, &bodies);
    exchange(&clock, &mut b, &mut a, 1, &bodies);
    let stats = b.port.driver_stats();
    let (received, by_kernel) = (
        stats.received - before.received,
        stats.by_kernel - before.by_kernel,
    );
    assert!(
        by_kernel * 10 < received,
        "{by_kernel} of {received} by the kernel"
    );
    assert_eq!(stats.malformed, 0);
    assert_eq!(stats.truncated, 0);
    assert_eq!(b.port.stats().forged, 0);
    for end in [a, b] {
        let End { port, pool, .. } = end;
        drop(port);
        assert_eq!(pool.free(), pool.count(), "every frame has come back");
    }
}

#[test]
fn two_ports_talk_over_ipv4() {
    talk(1500, 2048, "10.77.0.1:7101", "10.77.0.2:7102");
}

#[test]
fn two_ports_talk_over_ipv6() {
    talk(1500, 2048, "[fd77::1]:7101", "[fd77::2]:7102");
}

#[test]
fn jumbo_datagrams_lie_in_several_frames() {
    talk(9000, 4096, "10.77.0.1:7101", "10.77.0.2:7102");
}

#[test]
fn jumbo_datagrams_over_ipv6() {
    talk(9000, 4096, "[fd77::1]:7101", "[fd77::2]:7102");
}

#[test]
fn frames_of_any_size_will_do() {
    talk(9000, 9216, "10.77.0.1:7101", "10.77.0.2:7102");
}

/// What arrives in frames is sent on from them, and reaches the receiver's frames, without a copy
/// in either program: the way of a log entry. //= cyclone §4.2
#[test]
fn payloads_are_forwarded_uncopied() {
    for (mtu, frame_bytes, len) in [(1500, 2048, 1300), (9000, 4096, 8000)] {
        let Some(cable) = Cable::new(mtu, 1) else {
            return;
        };
        let clock = Clock(Instant::now());
        let (mut a, mut b) = xdp_pair(&cable, frame_bytes, "10.77.0.1:7101", "10.77.0.2:7102");
        settle(&clock, &mut a, &mut b);
        let text = body(3, len);
        a.machine.enter();
        let message = Outgoing {
            to: Peer::Node(2),
            parts: &[&text],
        };
        let before = b.port.stats();
        let mut got = Vec::new();
        let since = Instant::now();
        while got.is_empty() {
            assert!(since.elapsed() < PATIENCE);
            a.machine.enter();
            a.port.send(clock.now_us(), &[message]).unwrap();
            b.machine.enter();
            std::thread::sleep(Duration::from_millis(5));
            b.port.poll(clock.now_us(), &mut got).unwrap();
        }
        got.truncate(1);
        let after = b.port.stats();
        assert!(
            after.kept_bytes - before.kept_bytes >= len as u64,
            "{len}: {before:?} {after:?} {:?} {:?}",
            got[0].body.len(),
            b.port.driver_stats()
        );
        assert_eq!(after.copied_spare_bytes, before.copied_spare_bytes);

        let before = b.port.driver_stats();
        let mut lent = 0;
        let mut back = Vec::new();
        while back.is_empty() {
            assert!(since.elapsed() < PATIENCE);
            b.machine.enter();
            let header = [7; 24];
            let parts: Vec<&[u8]> = std::iter::once(&header[..])
                .chain(got[0].body.segments())
                .collect();
            let message = Outgoing {
                to: Peer::Node(1),
                parts: &parts,
            };
            b.port.send(clock.now_us(), &[message]).unwrap();
            let stats = b.port.driver_stats();
            lent = stats.lent_bytes - before.lent_bytes;
            a.machine.enter();
            std::thread::sleep(Duration::from_millis(5));
            a.port.poll(clock.now_us(), &mut back).unwrap();
        }
        assert!(lent >= len as u64 * 9 / 10, "{lent} bytes of {len} lent");
        assert_eq!(back[0].body.slice(24..24 + len).to_vec(), text);
        // The sender's frame is kept as long as the kernel may read it, and no longer.
        drop((got, back));
        let pool = b.pool.clone();
        drop(b);
        assert_eq!(pool.free(), pool.count());
    }
}

/// A peer with an ordinary socket: its kernel checks our headers and sums, and may leave sums to a
/// card.
#[test]
fn ordinary_sockets_are_understood() {
    for (at, peer) in [
        ("10.77.0.1:7101", "10.77.0.2:7102"),
        ("[fd77::1]:7101", "[fd77::2]:7102"),
    ] {
        let Some(cable) = Cable::new(1500, 1) else {
            return;
        };
        let clock = Clock(Instant::now());
        let pools = (pool(1024, 2048), pool(1024, 9216));
        cable.a.enter();
        let driver = Box::new(xdp(at, "va", &pools.0));
        let mut a = end(&cable.a, driver, pools.0, 1);
        cable.b.enter();
        let driver = UdpDriver::bind(peer.parse().unwrap(), &pools.1, UdpOptions::default());
        let mut b = end(&cable.b, Box::new(driver.unwrap()), pools.1, 2);
        a.port.add_node(2, peer.parse().unwrap());
        b.port.add_node(1, at.parse().unwrap());
        settle(&clock, &mut a, &mut b);
        let bodies: Vec<Vec<u8>> = [1, 2, 333, 1400, 1401, 30_000]
            .map(|len| body(1, len))
            .into();
        exchange(&clock, &mut a, &mut b, 2, &bodies);
        exchange(&clock, &mut b, &mut a, 1, &bodies);
        let stats = a.port.driver_stats();
        assert!(stats.by_kernel < stats.sent / 2, "{stats:?}");
        assert_eq!(b.port.stats().forged + a.port.stats().forged, 0);
    }
}

/// Bytes that are no messages, and packets that are no datagrams, are counted and dropped; what
/// follows them is received.
#[test]
fn garbage_is_dropped() {
    let Some(cable) = Cable::new(1500, 1) else {
        return;
    };
    let clock = Clock(Instant::now());
    let (mut a, mut b) = xdp_pair(&cable, 2048, "10.77.0.1:7101", "10.77.0.2:7102");
    settle(&clock, &mut a, &mut b);
    cable.b.enter();
    let socket = UdpSocket::bind("10.77.0.2:0").unwrap();
    let mut seed = 7u64;
    let mut got = Vec::new();
    for round in 0..2000 {
        seed = seed
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        let bytes = body(seed, (seed >> 33) as usize % 1400);
        socket.send_to(&bytes, "10.77.0.1:7101").unwrap();
        if round % 16 == 0 {
            a.machine.enter();
            a.port.poll(clock.now_us(), &mut got).unwrap();
        }
    }
    exchange(&clock, &mut b, &mut a, 1, &[body(9, 3000)]);
    let stats = a.port.stats();
    assert!(got.is_empty() && stats.malformed > 1000, "{stats:?}");
    let End { port, pool, .. } = a;
    drop(port);
    assert_eq!(pool.free(), pool.count());
}

/// A slow or dead receiver, an interface that goes down and comes up: frames come back, and it goes
/// on.
#[test]
fn no_frame_is_lost_when_the_cable_is() {
    let Some(cable) = Cable::new(1500, 1) else {
        return;
    };
    let clock = Clock(Instant::now());
    let (mut a, mut b) = xdp_pair(&cable, 2048, "10.77.0.1:7101", "10.77.0.2:7102");
    settle(&clock, &mut a, &mut b);
    let text = body(1, 1200);
    for round in 0..40 {
        if round % 8 == 3 {
            cable.b.ip("link set vb down");
        }
        if round % 8 == 6 {
            cable.b.ip("link set vb up");
            cable.b.ip("addr replace fd77::2/64 dev vb nodad");
        }
        a.machine.enter();
        for _ in 0..50 {
            let message = Outgoing {
                to: Peer::Node(2),
                parts: &[&text],
            };
            a.port.send(clock.now_us(), &[message; 32]).unwrap();
        }
        // The receiver polls only rarely: its ring overflows.
        let mut got = Vec::new();
        b.machine.enter();
        b.port.poll(clock.now_us(), &mut got).unwrap();
        a.machine.enter();
        a.port.poll(clock.now_us(), &mut got).unwrap();
    }
    // What was sent before may have waited for the neighbour to be found, and come only now.
    let (last, since) = (body(5, 20_000), Instant::now());
    let is_last = |message: &Message| message.body.to_vec() == last;
    let mut got = Vec::new();
    while !got.iter().any(is_last) {
        assert!(since.elapsed() < PATIENCE, "{:?}", b.port.stats());
        got.clear();
        a.machine.enter();
        let message = Outgoing {
            to: Peer::Node(2),
            parts: &[&last],
        };
        a.port.send(clock.now_us(), &[message]).unwrap();
        a.port.poll(clock.now_us(), &mut Vec::new()).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        b.machine.enter();
        while b.port.poll(clock.now_us(), &mut got).unwrap() > 0 {}
    }
    drop(got);
    for end in [a, b] {
        let End { port, pool, .. } = end;
        drop(port);
        assert_eq!(pool.free(), pool.count());
    }
}

#[test]
fn refusals_say_why() {
    let Some(cable) = Cable::new(1500, 1) else {
        return;
    };
    cable.a.enter();
    let frames = pool(1024, 2048);
    let open = |address: &str, interface: &str| {
        XdpDriver::open(
            address.parse().unwrap(),
            &frames,
            &XdpOptions::new(interface),
        )
        .err()
    };
    assert!(matches!(
        open("10.77.0.1:7101", "eth99"),
        Some(XdpError::NoInterface(_))
    ));
    assert!(matches!(
        open("127.0.0.1:7101", "lo"),
        Some(XdpError::NotEthernet(_))
    ));
    assert!(matches!(
        open("10.77.0.9:7101", "va"),
        Some(XdpError::ForeignAddress { .. })
    ));
    let first = xdp("10.77.0.1:7101", "va", &frames);
    let second = open("10.77.0.1:7103", "va");
    assert!(matches!(second, Some(XdpError::InUse(_))), "{second:?}");
    drop(first);
    drop(xdp("0.0.0.0:0", "va", &frames));
    cable.a.ip("link set va down");
    assert!(matches!(
        open("10.77.0.1:7101", "va"),
        Some(XdpError::Down(_))
    ));
    assert_eq!(frames.free(), frames.count());
}

/// Several interfaces, as a machine with several cards has: each carries what is routed by it.
#[test]
fn several_interfaces_serve_one_port() {
    let (Some(a), Some(b), Some(c)) = (Machine::new(), Machine::new(), Machine::new()) else {
        return;
    };
    a.connect(("va", 1), &b, ("vb", 2));
    a.connect(("vd", 1), &c, ("vc", 3));
    let clock = Clock(Instant::now());
    let open = |machine: &'_ Machine, at: &str, interfaces: &str| {
        let frames = pool(8192, 2048);
        machine.enter();
        (Box::new(xdp(at, interfaces, &frames)), frames)
    };
    let (driver, frames) = open(&a, "10.77.0.1:7101", "va, vd");
    let mut at_a = end(&a, driver, frames, 1);
    let (driver, frames) = open(&b, "10.77.0.2:7102", "vb");
    let mut at_b = end(&b, driver, frames, 2);
    let (driver, frames) = open(&c, "10.77.0.3:7103", "vc");
    let mut at_c = end(&c, driver, frames, 3);
    at_a.port.add_node(2, "10.77.0.2:7102".parse().unwrap());
    at_a.port.add_node(3, "10.77.0.3:7103".parse().unwrap());
    at_b.port.add_node(1, "10.77.0.1:7101".parse().unwrap());
    at_c.port.add_node(1, "10.77.0.1:7101".parse().unwrap());
    for n in 0..10 {
        exchange(&clock, &mut at_a, &mut at_b, 2, &[body(n, 9)]);
        exchange(&clock, &mut at_a, &mut at_c, 3, &[body(n, 9)]);
        exchange(&clock, &mut at_c, &mut at_a, 1, &[body(n, 9)]);
        std::thread::sleep(Duration::from_millis(15));
    }
    let bodies: Vec<Vec<u8>> = (0..40).map(|n| body(n, 700 * n as usize)).collect();
    for _ in 0..3 {
        exchange(&clock, &mut at_a, &mut at_b, 2, &bodies);
        exchange(&clock, &mut at_a, &mut at_c, 3, &bodies);
        exchange(&clock, &mut at_c, &mut at_a, 1, &bodies);
    }
    let stats = at_a.port.driver_stats();
    assert!(stats.by_kernel * 5 < stats.received, "{stats:?}");
    for end in [at_a, at_b, at_c] {
        let End { port, pool, .. } = end;
        drop(port);
        assert_eq!(pool.free(), pool.count());
    }
}

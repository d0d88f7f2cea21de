//! The DPDK driver over shared memory between two ports (net_memif, anywhere) and over a veth pair
//! (net_af_packet, needs root and skips without). Neither needs huge pages.

#[path = "../common/cable.rs"]
mod cable;
#[path = "../common/mod.rs"]
mod common;
mod doors;
mod kernel;
#[path = "../xdp/net.rs"]
#[allow(dead_code)] // Only a part is used here.
mod net;
mod peers;

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cable::{Clock, body};
use common::*;
use cyclone_packet::{DpdkDriver, DpdkError, DpdkOptions, Driver, Message, Outgoing, Peer, Port};
use cyclone_pmem::pool::Pool;

const PATIENCE: Duration = Duration::from_secs(60);

/// One test at a time: they poll, and DPDK is one per process.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A port and its pool.
struct End {
    port: Port,
    pool: Pool,
}

impl End {
    fn new(driver: Box<dyn Driver>, pool: Pool, id: u64) -> End {
        let port = Port::new(driver, pool.clone(), node_config(id, id as u8)).expect("a port");
        End { port, pool }
    }

    /// The end of it: every frame has come back.
    fn close(self) {
        let End { port, pool } = self;
        drop(port);
        assert_eq!(pool.free(), pool.count(), "every frame has come back");
    }
}

/// A shared-memory cable: what each of its two ends is called.
fn memif() -> (String, String) {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let path = format!("/tmp/cyclone-test-{}-{number}.sock", std::process::id());
    let end = |role: &str, side: u32| {
        let name = 2 * number + side;
        let mac = format!("02:00:00:00:{number:02x}:{side:02x}");
        format!("net_memif{name},role={role},id=0,socket={path},mac={mac}")
    };
    (end("server", 0), end("client", 1))
}

fn open(address: &str, ports: &str, pool: &Pool) -> DpdkDriver {
    let options = DpdkOptions::parse(ports).expect("options");
    open_with(address, &options, pool)
}

fn open_with(address: &str, options: &DpdkOptions, pool: &Pool) -> DpdkDriver {
    DpdkDriver::open(address.parse().expect("an address"), pool, options).expect("DPDK")
}

/// Two ports on one cable, at these addresses. `settings`: of both, beside the ports.
fn pair(frame_bytes: u32, settings: &str, a: &str, b: &str) -> (End, End) {
    let (one, other) = memif();
    let pools = (pool(4096, frame_bytes), pool(4096, frame_bytes));
    let driver = open(a, &format!("{one};{settings}"), &pools.0);
    println!("{}", driver.describe());
    let mut a_end = End::new(Box::new(driver), pools.0, 1);
    let driver = open(b, &format!("{other};{settings}"), &pools.1);
    let mut b_end = End::new(Box::new(driver), pools.1, 2);
    a_end.port.add_node(2, b.parse().unwrap());
    b_end.port.add_node(1, a.parse().unwrap());
    (a_end, b_end)
}

/// Sends messages one way until all have arrived, again and again those that got lost.
fn exchange(clock: &Clock, from: &mut End, to: &mut End, peer: u64, bodies: &[Vec<u8>]) {
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
                let half = body.len() / 2;
                let parts: [&[u8]; 2] = [&body[..half], &body[half..]];
                let message = Outgoing {
                    to: Peer::Node(peer),
                    parts: &parts,
                };
                from.port.send(clock.now_us(), &[message]).expect("send");
            }
            to.port.poll(clock.now_us(), &mut got).expect("poll");
            from.port.poll(clock.now_us(), &mut back).expect("poll");
        }
        assert_eq!(got[number].body.to_vec(), *body, "message {number}");
        // A repetition that was slow, not lost.
        got.truncate(number + 1);
    }
}

fn settle(clock: &Clock, a: &mut End, b: &mut End) {
    for round in 0..3 {
        exchange(clock, a, b, 2, &[body(round, 100)]);
        exchange(clock, b, a, 1, &[body(round, 100)]);
    }
}

const SIZES: [usize; 15] = [
    0, 1, 47, 48, 255, 256, 1024, 1400, 1452, 1500, 4000, 8900, 9000, 65_000, 200_000,
];

fn talk(frame_bytes: u32, settings: &str, a: &str, b: &str) {
    let _alone = alone();
    let clock = Clock(Instant::now());
    let (mut a, mut b) = pair(frame_bytes, settings, a, b);
    settle(&clock, &mut a, &mut b);
    let bodies: Vec<Vec<u8>> = SIZES.iter().map(|&len| body(len as u64, len)).collect();
    exchange(&clock, &mut a, &mut b, 2, &bodies);
    exchange(&clock, &mut b, &mut a, 1, &bodies);
    for end in [&a, &b] {
        let stats = end.port.driver_stats();
        assert_eq!((stats.malformed, stats.truncated), (0, 0), "{stats:?}");
        assert_eq!(end.port.stats().forged, 0);
    }
    a.close();
    b.close();
}

#[test]
fn two_ports_talk_over_ipv4() {
    talk(2048, "mtu=1500", "10.77.0.1:7101", "10.77.0.2:7102");
}

#[test]
fn two_ports_talk_over_ipv6() {
    talk(2048, "mtu=1500", "[fd77::1]:7101", "[fd77::2]:7102");
}

#[test]
fn jumbo_datagrams_lie_in_one_frame_or_several() {
    let suits = DpdkOptions::parse("x;mtu=9000").unwrap().frame_bytes();
    talk(suits, "mtu=9000", "10.77.0.1:7101", "10.77.0.2:7102");
    talk(2048, "mtu=9000", "10.77.0.1:7101", "10.77.0.2:7102");
    talk(4096, "mtu=9000", "[fd77::1]:7101", "[fd77::2]:7102");
}

#[test]
fn several_queues_serve_one_port() {
    let _alone = alone();
    let clock = Clock(Instant::now());
    let (one, other) = memif();
    let pools = (pool(4096, 2048), pool(4096, 2048));
    let options = |text: &str| DpdkOptions {
        queues: 2,
        ..DpdkOptions::parse(text).unwrap()
    };
    let (at, peer) = ("10.77.0.1:7101", "10.77.0.2:7102");
    let driver = open_with(at, &options(&one), &pools.0);
    let mut a = End::new(Box::new(driver), pools.0, 1);
    let driver = open_with(peer, &options(&other), &pools.1);
    let mut b = End::new(Box::new(driver), pools.1, 2);
    a.port.add_node(2, peer.parse().unwrap());
    b.port.add_node(1, at.parse().unwrap());
    settle(&clock, &mut a, &mut b);
    exchange(&clock, &mut a, &mut b, 2, &[body(1, 50_000), body(2, 10)]);
    exchange(&clock, &mut b, &mut a, 1, &[body(1, 50_000), body(2, 10)]);
    a.close();
    b.close();
}

/// More rings for sending than fit a pool of fixed size, and all of them in use for many rounds.
#[test]
fn many_queues_of_several_ports_go_on_sending() {
    let _alone = alone();
    let (one, one_peer) = memif();
    let (two, two_peer) = memif();
    let pools = (pool(8192, 2176), pool(8192, 2176));
    let options = |text: &str| DpdkOptions {
        queues: 4,
        ..DpdkOptions::parse(text).unwrap()
    };
    let (at, peer) = ("10.77.0.1:7101", "10.77.0.2:7102");
    let mut a = open_with(at, &options(&format!("{one};{two}")), &pools.0);
    let mut b = open_with(peer, &options(&format!("{one_peer};{two_peer}")), &pools.1);
    let text = pools.0.alloc().unwrap().freeze(0..1000);
    let parts: [&[u8]; 2] = [&[1; 40], &text];
    let mut out = Vec::new();
    let since = Instant::now();
    // To its own port, and to others of the same machine: these it counts, and drops.
    let burst: Vec<cyclone_packet::Datagram<'_>> = (7102..7134)
        .map(|port| cyclone_packet::Datagram {
            to: ([10, 77, 0, 2], port).into(),
            parts: &parts,
        })
        .collect();
    while b.received_by_port().iter().any(|&count| count < 10_000) {
        assert!(
            since.elapsed() < PATIENCE,
            "{:?} {:?} {:?}",
            a.stats(),
            b.stats(),
            b.received_by_port()
        );
        assert_eq!(a.send(&burst).unwrap(), burst.len());
        for _ in 0..8 {
            b.recv(&pools.1, &mut out, 32).unwrap();
        }
        a.recv(&pools.0, &mut out, 32).unwrap();
        out.clear();
    }
    assert!(b.stats().received > 0);
    drop((a, b, text));
    for frames in [pools.0, pools.1] {
        assert_eq!(frames.free(), frames.count());
    }
}

/// What arrives in frames is sent on from them, and reaches the receiver's frames, without a copy
/// in either program: the way of a log entry. //= cyclone §4.2
#[test]
fn payloads_are_forwarded_uncopied() {
    let _alone = alone();
    for (settings, frame_bytes, len) in [("mtu=1500", 2048, 1300), ("mtu=9000", 2048, 8000)] {
        let clock = Clock(Instant::now());
        let (at, peer) = ("10.77.0.1:7101", "10.77.0.2:7102");
        let (mut a, mut b) = pair(frame_bytes, settings, at, peer);
        settle(&clock, &mut a, &mut b);
        let text = body(3, len);
        let (before, mut got) = (b.port.stats(), Vec::new());
        let parts: [&[u8]; 1] = [&text];
        let message = Outgoing {
            to: Peer::Node(2),
            parts: &parts,
        };
        a.port.send(clock.now_us(), &[message]).unwrap();
        while got.is_empty() {
            b.port.poll(clock.now_us(), &mut got).unwrap();
        }
        let after = b.port.stats();
        assert!(
            after.kept_bytes - before.kept_bytes >= len as u64,
            "{after:?}"
        );
        assert_eq!(after.copied_spare_bytes, before.copied_spare_bytes);

        let before = b.port.driver_stats();
        let header = [7; 24];
        let parts: Vec<&[u8]> = std::iter::once(&header[..])
            .chain(got[0].body.segments())
            .collect();
        let message = Outgoing {
            to: Peer::Node(1),
            parts: &parts,
        };
        b.port.send(clock.now_us(), &[message]).unwrap();
        let mut back = Vec::new();
        while back.is_empty() {
            a.port.poll(clock.now_us(), &mut back).unwrap();
        }
        let lent = b.port.driver_stats().lent_bytes - before.lent_bytes;
        assert!(lent >= len as u64 * 8 / 10, "{lent} bytes of {len} lent");
        assert_eq!(back[0].body.slice(24..24 + len).to_vec(), text);
        // The sender's frame is kept as long as the card may read it, and no longer.
        drop((got, back));
        a.close();
        b.close();
    }
}

/// A receiver that polls only rarely: its queue overflows, what does not fit is dropped, and frames
/// come back.
#[test]
fn no_frame_is_lost_when_queues_overflow() {
    let _alone = alone();
    let clock = Clock(Instant::now());
    let (mut a, mut b) = pair(2048, "", "10.77.0.1:7101", "10.77.0.2:7102");
    settle(&clock, &mut a, &mut b);
    let text = body(1, 1200);
    let parts: [&[u8]; 1] = [&text];
    let message = Outgoing {
        to: Peer::Node(2),
        parts: &parts,
    };
    // Kept until the pool runs dry, then freed: as a log does that is trimmed late.
    let mut got = Vec::new();
    for round in 0..100 {
        for _ in 0..40 {
            a.port.send(clock.now_us(), &[message; 32]).unwrap();
        }
        for _ in 0..100 {
            b.port.poll(clock.now_us(), &mut got).unwrap();
        }
        if round % 25 == 24 {
            got.clear();
        }
    }
    assert!(
        a.port.driver_stats().send_full > 0,
        "{:?}",
        a.port.driver_stats()
    );
    assert!(
        b.port.stats().copied_spare_bytes > 0,
        "{:?}",
        b.port.stats()
    );
    got.clear();
    while b.port.poll(clock.now_us(), &mut got).unwrap() > 0 {
        got.clear();
    }
    exchange(&clock, &mut a, &mut b, 2, &[body(5, 20_000)]);
    a.close();
    b.close();
}

#[test]
fn refusals_say_why() {
    let _alone = alone();
    let frames = pool(1024, 2048);
    let refused = |address: &str, options: &DpdkOptions| {
        let address = address.parse().unwrap();
        DpdkDriver::open(address, &frames, options).err()
    };
    let at = "10.77.0.1:7101";
    let parse = |text: &str| DpdkOptions::parse(text).unwrap();
    let error = refused(at, &parse("net_nonsense0"));
    assert!(matches!(error, Some(DpdkError::Port { .. })), "{error:?}");
    let error = refused("0.0.0.0:0", &parse("net_null0"));
    assert!(matches!(error, Some(DpdkError::NoAddress(_))), "{error:?}");
    let many = DpdkOptions {
        queues: 300,
        ..parse(&memif().0)
    };
    let error = refused(at, &many);
    assert!(
        matches!(error, Some(DpdkError::TooFewQueues { wanted: 300, .. })),
        "{error:?}"
    );
    // The good one of two is given up with the bad one, and can be had again.
    let (one, _) = memif();
    let error = refused(at, &parse(&format!("{one};net_nonsense0")));
    assert!(matches!(error, Some(DpdkError::Port { .. })), "{error:?}");
    drop(open(at, &one, &frames));
    assert_eq!(frames.free(), frames.count());
}

//! Two ports over real sockets on loopback, through both drivers.

mod common;
use std::collections::HashSet;
use std::io::{Read as _, Write as _};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use common::*;
use cyclone_packet::{
    Driver, Message, Outgoing, Peer, Port, PortConfig, Security, TcpDriver, TcpOptions, UdpDriver,
    UdpOptions,
};
use cyclone_pmem::pool::Pool;

type Bind = fn(&Pool) -> Box<dyn Driver>;

fn loopback() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

const DRIVERS: [(&str, Bind); 2] = [
    ("udp", |pool| {
        Box::new(UdpDriver::bind(loopback(), pool, UdpOptions::default()).unwrap())
    }),
    ("tcp", |pool| {
        Box::new(TcpDriver::bind(loopback(), pool, TcpOptions::default()).unwrap())
    }),
];

struct Clock(Instant);

impl Clock {
    fn now_us(&self) -> u64 {
        self.0.elapsed().as_micros() as u64
    }
}

fn make(bind: Bind, frame_bytes: u32, config: PortConfig) -> Port {
    let pool = pool((32 << 20) / u64::from(frame_bytes), frame_bytes);
    Port::new(bind(&pool), pool, config).unwrap()
}

fn wait(clock: &Clock, receiver: &mut Port, sender: &mut Port, n: usize) -> Vec<Message> {
    let start = Instant::now();
    let (mut got, mut back) = (Vec::new(), Vec::new());
    while got.len() < n {
        receiver.poll(clock.now_us(), &mut got).unwrap();
        sender.poll(clock.now_us(), &mut back).unwrap();
        let waited = start.elapsed();
        assert!(
            waited < Duration::from_secs(10),
            "{} of {n}: {:?} {:?}",
            got.len(),
            receiver.stats(),
            receiver.driver_stats()
        );
    }
    assert!(back.is_empty());
    got
}

#[test]
fn small_and_large_messages_cross_loopback() {
    for (name, bind) in DRIVERS {
        for frame_bytes in [2048, 65_536] {
            for security in [Security::Authenticated, Security::Encrypted] {
                let clock = Clock(Instant::now());
                let mut a = make(
                    bind,
                    frame_bytes,
                    PortConfig {
                        security,
                        ..node_config(1, 1)
                    },
                );
                let mut b = make(
                    bind,
                    frame_bytes,
                    PortConfig {
                        security,
                        ..node_config(2, 2)
                    },
                );
                a.add_node(2, b.local_addr());
                b.add_node(1, a.local_addr());
                for (i, len) in [8usize, 200, 70_000, 1 << 20, (1 << 20) + 4097]
                    .into_iter()
                    .enumerate()
                {
                    let bytes = numbered(i as u64, len);
                    assert_eq!(send(&mut a, clock.now_us(), Peer::Node(2), &bytes), 1);
                    let got = wait(&clock, &mut b, &mut a, 1);
                    assert!(got[0].body.to_vec() == bytes, "{name} {len}");
                    send(&mut b, clock.now_us(), Peer::Node(1), &bytes);
                    assert!(wait(&clock, &mut a, &mut b, 1)[0].body.to_vec() == bytes);
                }
                // A burst is one call.
                let calls = a.driver_stats().send_calls;
                let bytes: Vec<Vec<u8>> = (0..100).map(|i| numbered(i, 200)).collect();
                let parts: Vec<[&[u8]; 1]> = bytes.iter().map(|b| [b.as_slice()]).collect();
                let burst: Vec<Outgoing<'_>> = parts
                    .iter()
                    .map(|p| Outgoing {
                        to: Peer::Node(2),
                        parts: p,
                    })
                    .collect();
                assert_eq!(a.send(clock.now_us(), &burst).unwrap(), 100);
                assert_eq!(a.driver_stats().send_calls, calls + 1);
                let numbers: HashSet<u64> = wait(&clock, &mut b, &mut a, 100)
                    .iter()
                    .map(|m| number_of(&m.body.to_vec()))
                    .collect();
                assert_eq!(numbers.len(), 100);
            }
        }
    }
}

#[test]
fn many_clients_and_nodes_share_a_socket_under_load() {
    for (name, bind) in DRIVERS {
        let clock = Clock(Instant::now());
        let mut node = make(bind, 16_384, node_config(1, 1));
        let mut others: Vec<Port> = (0..8)
            .map(|i| {
                make(
                    bind,
                    16_384,
                    if i < 2 {
                        node_config(2 + i, 2 + i as u8)
                    } else {
                        client_config(2 + i as u8)
                    },
                )
            })
            .collect();
        for (i, other) in others.iter_mut().enumerate() {
            other.add_node(1, node.local_addr());
            if i < 2 {
                node.add_node(2 + i as u64, other.local_addr());
            }
        }
        // Echo with up to 16 messages in flight each.
        const EACH: u64 = 400;
        let mut sent = [0u64; 8];
        let mut seen: Vec<HashSet<u64>> = vec![HashSet::new(); 8];
        let start = Instant::now();
        while seen.iter().any(|s| (s.len() as u64) < EACH) {
            assert!(
                start.elapsed() < Duration::from_secs(20),
                "{name}: {seen:?} {:?}",
                node.stats()
            );
            let now_us = clock.now_us();
            for (i, other) in others.iter_mut().enumerate() {
                while sent[i] < EACH && sent[i] - (seen[i].len() as u64) < 16 {
                    let number = i as u64 * 1_000_000 + sent[i];
                    send(
                        other,
                        now_us,
                        Peer::Node(1),
                        &numbered(number, 50 + (sent[i] % 40) as usize * 1000),
                    );
                    sent[i] += 1;
                }
                for message in poll(other, now_us) {
                    let number = number_of(&message.body.to_vec());
                    assert!(
                        number / 1_000_000 == i as u64 && seen[i].insert(number),
                        "{name} {number} at {i}"
                    );
                }
            }
            let got = poll(&mut node, now_us);
            let parts: Vec<Vec<&[u8]>> = got.iter().map(|m| m.body.segments().collect()).collect();
            let echo: Vec<Outgoing<'_>> = got
                .iter()
                .zip(&parts)
                .map(|(m, parts)| Outgoing { to: m.from, parts })
                .collect();
            node.send(now_us, &echo).unwrap();
        }
        assert_eq!(node.stats().associations, 8);
    }
}

#[test]
fn tcp_reconnects_and_drops_nonsense() {
    let bind = DRIVERS[1].1;
    let clock = Clock(Instant::now());
    let mut a = make(bind, 4096, node_config(1, 1));
    let mut b = make(bind, 4096, node_config(2, 2));
    let at = b.local_addr();
    a.add_node(2, at);
    b.add_node(1, a.local_addr());
    send(&mut a, clock.now_us(), Peer::Node(2), b"one");
    wait(&clock, &mut b, &mut a, 1);
    // Garbage on a separate connection.
    let mut garbage = std::net::TcpStream::connect(at).unwrap();
    std::io::Write::write_all(&mut garbage, &[0xFF; 4096]).unwrap();
    let start = Instant::now();
    while b.driver_stats().connections_dropped == 0 {
        assert!(start.elapsed() < Duration::from_secs(5));
        poll(&mut b, clock.now_us());
    }
    send(&mut a, clock.now_us(), Peer::Node(2), b"two");
    wait(&clock, &mut b, &mut a, 1);
    // b dies and comes back at the same address.
    drop(b);
    send(&mut a, clock.now_us(), Peer::Node(2), b"lost");
    let pool = pool(1024, 4096);
    let driver = TcpDriver::bind(at, &pool, TcpOptions::default()).unwrap();
    let mut b = Port::new(Box::new(driver), pool, node_config(2, 9)).unwrap();
    let (mut got, mut back) = (Vec::new(), Vec::new());
    let start = Instant::now();
    while got.is_empty() {
        assert!(start.elapsed() < Duration::from_secs(5));
        send(&mut a, clock.now_us(), Peer::Node(2), b"three");
        a.poll(clock.now_us(), &mut back).unwrap();
        b.poll(clock.now_us(), &mut got).unwrap();
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn strangers_that_only_connect_take_no_peer_s_place() {
    let clock = Clock(Instant::now());
    let frames = || pool(2048, 2048);
    let options = TcpOptions {
        max_connections: 4,
        ..TcpOptions::default()
    };
    let ours = frames();
    let driver = TcpDriver::bind(loopback(), &ours, options).unwrap();
    let at = driver.local_addr();
    let mut server = Port::new(Box::new(driver), ours, node_config(1, 1)).unwrap();
    let mut client = make(DRIVERS[1].1, 2048, client_config(2));
    client.add_node(1, at);
    send(&mut client, clock.now_us(), Peer::Node(1), b"before");
    let whose = wait(&clock, &mut server, &mut client, 1)[0].from;
    for _ in 0..5 {
        let strangers: Vec<_> = (0..4)
            .map(|_| std::net::TcpStream::connect(at).unwrap())
            .collect();
        let since = Instant::now();
        while since.elapsed() < Duration::from_millis(20) {
            server.poll(clock.now_us(), &mut Vec::new()).unwrap();
        }
        drop(strangers);
    }
    // The connection that the client made still stands: no server can connect to it.
    send(&mut server, clock.now_us(), whose, b"after");
    let got = wait(&clock, &mut client, &mut server, 1);
    assert_eq!(bodies(&got), [b"after"]);
    assert!(server.driver_stats().connections_dropped >= 4);
}

/// Strangers draw notices and challenges, so they are answered as peers are; they had the same rank
/// for that.
#[test]
fn unauthenticated_connections_push_no_authenticated_peer_out() {
    let clock = Clock(Instant::now());
    let frames = || pool(2048, 2048);
    let options = TcpOptions {
        max_connections: 8,
        ..TcpOptions::default()
    };
    let ours = frames();
    let driver = TcpDriver::bind(loopback(), &ours, options).unwrap();
    let at = driver.local_addr();
    let mut server = Port::new(Box::new(driver), ours, node_config(1, 1)).unwrap();
    let mut client = make(DRIVERS[1].1, 2048, client_config(2));
    client.add_node(1, at);
    let mut node = make(DRIVERS[1].1, 2048, node_config(2, 3));
    node.add_node(1, at);
    server.add_node(2, node.local_addr());
    send(&mut client, clock.now_us(), Peer::Node(1), b"of a client");
    let whose = wait(&clock, &mut server, &mut client, 1)[0].from;
    send(&mut node, clock.now_us(), Peer::Node(1), b"of a node");
    wait(&clock, &mut server, &mut node, 1);
    send(&mut server, clock.now_us(), Peer::Node(2), b"to the node");
    wait(&clock, &mut node, &mut server, 1);
    let mut strangers = Vec::new();
    for number in 0..20u8 {
        // Data of an association that does not exist draws a notice.
        let mut datagram = [0; 4 + 48];
        datagram[0] = 48;
        datagram[4..6].copy_from_slice(&[0xC9, 4]);
        datagram[8] = number;
        let mut stranger = std::net::TcpStream::connect(at).unwrap();
        stranger.write_all(&datagram).unwrap();
        stranger.set_nonblocking(true).unwrap();
        let (since, mut notice) = (Instant::now(), [0; 16]);
        while stranger.read(&mut notice).is_err() {
            assert!(since.elapsed() < Duration::from_secs(5), "no notice");
            assert!(poll(&mut server, clock.now_us()).is_empty());
        }
        assert_eq!(notice[4..6], [0xC9, 6]);
        strangers.push(stranger);
    }
    // Neither the client nor the node connects again: the server's own answers find them where they
    // were.
    let before = server.stats();
    send(&mut server, clock.now_us(), whose, b"to the client");
    let got = wait(&clock, &mut client, &mut server, 1);
    assert_eq!(bodies(&got), [b"to the client"]);
    let dropped = (client.driver_stats(), node.driver_stats());
    assert_eq!(
        (dropped.0.connections_dropped, dropped.1.connections_dropped),
        (0, 0)
    );
    send(&mut node, clock.now_us(), Peer::Node(1), b"again");
    wait(&clock, &mut server, &mut node, 1);
    assert_eq!(
        server.stats().associations_made,
        before.associations_made,
        "no side had to shake hands again"
    );
    // The strangers pushed out each other.
    assert!(server.driver_stats().connections_dropped >= 10);
}

#[test]
fn datagrams_longer_than_a_frame_are_counted() {
    let bind = DRIVERS[0].1;
    let clock = Clock(Instant::now());
    let mut b = make(bind, 2048, node_config(2, 2));
    let raw = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    raw.send_to(&[0xC9; 9000], b.local_addr()).unwrap();
    raw.send_to(&[], b.local_addr()).unwrap();
    let start = Instant::now();
    while b.driver_stats().truncated == 0 || b.stats().malformed == 0 {
        assert!(start.elapsed() < Duration::from_secs(5));
        poll(&mut b, clock.now_us());
    }
}

/// Prints what a small message costs beside the system calls: `cargo test --release -- --ignored
/// --nocapture cost`. A descriptor reports what has arrived once. What could not be taken then,
/// because all frames were elsewhere, is looked for again.
#[test]
fn what_found_no_frame_is_asked_for_again() {
    for (name, bind) in DRIVERS {
        let clock = Clock(Instant::now());
        let pool = pool(256, 2048);
        let mut a = Port::new(bind(&pool), pool.clone(), node_config(1, 1)).unwrap();
        let mut b = make(bind, 2048, node_config(2, 2));
        a.add_node(2, b.local_addr());
        b.add_node(1, a.local_addr());
        let held: Vec<_> = std::iter::from_fn(|| pool.alloc()).collect();
        let message = Outgoing {
            to: Peer::Node(1),
            parts: &[b"a message"],
        };
        b.send(clock.now_us(), &[message]).unwrap();

        let (mut got, mut back) = (Vec::new(), Vec::new());
        let start = Instant::now();
        while a.driver_stats().pool_empty == 0 {
            a.poll(clock.now_us(), &mut got).unwrap();
            b.poll(clock.now_us(), &mut back).unwrap();
            assert!(start.elapsed() < Duration::from_secs(10), "{name}");
        }
        let now_us = clock.now_us();
        assert_eq!(a.poll(now_us, &mut got).unwrap(), 0);
        let due_us = a.next_timeout().expect("it wants to be called");
        assert!(due_us <= now_us + 1_000, "{name}: {due_us} {now_us}");

        drop(held);
        wait(&clock, &mut a, &mut b, 1);
        while a.poll(clock.now_us(), &mut got).unwrap() > 0 {}
        let now_us = clock.now_us();
        a.poll(now_us, &mut got).unwrap();
        let due_us = a.next_timeout().unwrap_or(u64::MAX);
        assert!(due_us > now_us + 1_000, "{name}: {due_us} {now_us}");
    }
}

#[test]
#[ignore = "a measurement"]
fn cost_of_a_small_message() {
    let net = cyclone_packet::MemNet::new(1, Default::default());
    for security in [Security::Off, Security::Authenticated, Security::Encrypted] {
        let mut a = port(
            &net,
            1,
            PortConfig {
                security,
                ..node_config(1, 1)
            },
        );
        let mut b = port(
            &net,
            2,
            PortConfig {
                security,
                ..node_config(2, 2)
            },
        );
        a.add_node(2, address(2));
        send(&mut a, 0, Peer::Node(2), b"x");
        settle(0, &mut a, &mut b);
        let bytes = numbered(1, 200);
        let mut out = Vec::new();
        let (mut sending, mut receiving) = (Duration::ZERO, Duration::ZERO);
        const N: u32 = 200_000;
        for _ in 0..N {
            let t = Instant::now();
            send(&mut a, 0, Peer::Node(2), &bytes);
            sending += t.elapsed();
            let t = Instant::now();
            b.poll(0, &mut out).unwrap();
            out.clear();
            receiving += t.elapsed();
        }
        println!(
            "{security:?}: send {:?}, receive {:?} (each with a simulated driver call)",
            sending / N,
            receiving / N
        );
    }
    for (name, bind) in DRIVERS {
        let mut a = make(bind, 16_384, node_config(1, 1));
        let mut b = make(bind, 16_384, node_config(2, 2));
        a.add_node(2, b.local_addr());
        let clock = Clock(Instant::now());
        send(&mut a, 0, Peer::Node(2), b"x");
        wait(&clock, &mut b, &mut a, 1);
        let bytes = numbered(1, 200);
        let start = Instant::now();
        const ROUNDS: u32 = 50_000;
        let mut out = Vec::new();
        for _ in 0..ROUNDS {
            send(&mut a, 0, Peer::Node(2), &bytes);
            while out.is_empty() {
                b.poll(0, &mut out).unwrap();
            }
            out.clear();
        }
        println!(
            "{name}: one message, one thread, there: {:?}",
            start.elapsed() / ROUNDS
        );
        let large = numbered(1, 1 << 20);
        let start = Instant::now();
        for _ in 0..500 {
            send(&mut a, clock.now_us(), Peer::Node(2), &large);
            out.append(&mut wait(&clock, &mut b, &mut a, 1));
            out.clear();
        }
        println!("{name}: 1 MiB: {:?}", start.elapsed() / 500);
    }
}

//! Several ports, and peers that come and go.

use std::process::{Child, Command, Stdio};

use super::*;

/// Three machines, each with a cable to each other: as many ports as peers.
#[test]
fn several_ports_lead_to_several_peers() {
    let _alone = alone();
    let clock = Clock(Instant::now());
    let (ab, ba) = memif();
    let (ac, ca) = memif();
    let open_end = |id: u64, address: &str, ports: &str| {
        let frames = pool(8192, 2048);
        End::new(Box::new(open(address, ports, &frames)), frames, id)
    };
    let mut a = open_end(1, "10.77.0.1:7101", &format!("{ab};{ac}"));
    let mut b = open_end(2, "10.77.0.2:7102", &ba);
    let mut c = open_end(3, "10.77.0.3:7103", &ca);
    a.port.add_node(2, "10.77.0.2:7102".parse().unwrap());
    a.port.add_node(3, "10.77.0.3:7103".parse().unwrap());
    b.port.add_node(1, "10.77.0.1:7101".parse().unwrap());
    c.port.add_node(1, "10.77.0.1:7101".parse().unwrap());
    let bodies: Vec<Vec<u8>> = (0..40).map(|n| body(n, 700 * n as usize)).collect();
    for _ in 0..3 {
        exchange(&clock, &mut a, &mut b, 2, &bodies);
        exchange(&clock, &mut a, &mut c, 3, &bodies);
        exchange(&clock, &mut c, &mut a, 1, &bodies);
    }
    for end in [a, b, c] {
        end.close();
    }
}

/// Two cables between the same two machines: destinations share them out, and one is enough when
/// the other is gone.
#[test]
fn two_cables_to_one_peer() {
    let _alone = alone();
    let clock = Clock(Instant::now());
    let (one, one_peer) = memif();
    let (two, two_peer) = memif();
    let pools = (pool(8192, 2048), pool(8192, 2048));
    let (at, peer) = ("10.77.0.1:7101", "10.77.0.2:7102");
    let driver = open(at, &format!("{one};{two}"), &pools.0);
    let mut a = End::new(Box::new(driver), pools.0, 1);
    a.port.add_node(2, peer.parse().unwrap());
    for ports in [
        format!("{one_peer};{two_peer}"),
        one_peer.clone(),
        two_peer.clone(),
    ] {
        let driver = open(peer, &ports, &pools.1);
        let mut b = End::new(Box::new(driver), pools.1.clone(), 2);
        b.port.add_node(1, at.parse().unwrap());
        settle(&clock, &mut a, &mut b);
        exchange(&clock, &mut a, &mut b, 2, &[body(1, 50_000)]);
        exchange(&clock, &mut b, &mut a, 1, &[body(1, 50_000)]);
        b.close();
    }
    a.close();
}

/// While both cables are there both are used: by one machine's ports, and by machines that have one
/// port number.
#[test]
fn two_cables_are_both_used() {
    let _alone = alone();
    let (one, one_peer) = memif();
    let (two, two_peer) = memif();
    let frames = pool(4096, 2176);
    let mut a = open("10.77.0.1:7101", &format!("{one};{two}"), &frames);
    let ports = format!("{one_peer};{two_peer}");
    let text = [5u8; 700];
    let parts: [&[u8]; 1] = [&text];
    let mut out = Vec::new();
    let mut run = |a: &mut DpdkDriver, b: &mut DpdkDriver, to: &[std::net::SocketAddr]| {
        let since = Instant::now();
        let before = b.received_by_port();
        loop {
            assert!(since.elapsed() < PATIENCE, "{:?} {:?}", a.stats(), to);
            let burst: Vec<cyclone_packet::Datagram<'_>> = to
                .iter()
                .map(|&to| cyclone_packet::Datagram { to, parts: &parts })
                .collect();
            a.send(&burst).unwrap();
            for driver in [&mut *a, &mut *b] {
                driver.recv(&frames, &mut out, 32).unwrap();
            }
            out.clear();
            let counts = b.received_by_port();
            // More than the questions about neighbours.
            if counts.iter().zip(&before).all(|(now, old)| now - old > 100) {
                break;
            }
        }
    };
    let mut b = open("10.77.0.2:7102", &ports, &frames);
    let to: Vec<_> = (7102..7110)
        .map(|port| ([10, 77, 0, 2], port).into())
        .collect();
    run(&mut a, &mut b, &to);
    drop(b);
    // Machines 3 and 4, one after the other at the same cables, by the same port number: each has
    // its cable.
    let mut used = Vec::new();
    for last in [3, 4] {
        let at = std::net::SocketAddr::from(([10, 77, 0, last], 7000));
        let mut b = open(&at.to_string(), &ports, &frames);
        let since = Instant::now();
        let mut got = Vec::new();
        // Until both cables are there, and both ways known, all goes through the one that is.
        let mut before = None;
        while before.is_none() || got.len() < 200 {
            let elapsed = since.elapsed();
            assert!(elapsed < PATIENCE, "{last}: {:?}", a.stats());
            let both = a.is_connected() && b.received_by_port().iter().all(|&count| count > 0);
            if before.is_none() {
                // What waits here has frames, without which nothing is received by the other cable.
                got.clear();
                before =
                    (both && elapsed > Duration::from_millis(300)).then(|| b.received_by_port());
            }
            let datagram = cyclone_packet::Datagram {
                to: at,
                parts: &parts,
            };
            a.send(&[datagram; 8]).unwrap();
            for driver in [&mut a, &mut b] {
                driver.recv(&frames, &mut got, 32).unwrap();
            }
        }
        let (counts, before) = (b.received_by_port(), before.expect("just counted"));
        used.push(usize::from(counts[1] - before[1] > counts[0] - before[0]));
    }
    assert_ne!(used[0], used[1], "{used:?}");
    drop((a, out));
    assert_eq!(frames.free(), frames.count());
}

/// What leaves together with a question for a stranger is counted like everything else.
#[test]
fn datagrams_that_leave_with_questions_are_counted() {
    let _alone = alone();
    let (one, other) = memif();
    let frames = pool(4096, 2048);
    let mut a = open("10.77.0.1:7101", &one, &frames);
    let mut b = open("10.77.0.2:7102", &other, &frames);
    let text = [1u8; 600];
    let parts: [&[u8]; 1] = [&text];
    let datagram = |to: &str| cyclone_packet::Datagram {
        to: to.parse().unwrap(),
        parts: &parts,
    };
    let mut got = Vec::new();
    let since = Instant::now();
    while got.is_empty() {
        assert!(since.elapsed() < PATIENCE, "{:?}", a.stats());
        a.send(&[datagram("10.77.0.2:7102")]).unwrap();
        for driver in [&mut a, &mut b] {
            driver.recv(&frames, &mut got, 32).unwrap();
        }
    }
    let before = a.stats();
    let burst = [datagram("10.77.0.2:7102"), datagram("10.77.0.9:7109")];
    assert_eq!(a.send(&burst).unwrap(), 2);
    let after = a.stats();
    assert_eq!(after.sent - before.sent, 1, "{after:?}");
    assert_eq!(after.send_errors - before.send_errors, 1, "{after:?}");
    assert_eq!(after.send_calls - before.send_calls, 1, "{after:?}");
    drop((got, a, b));
    assert_eq!(frames.free(), frames.count());
}

const CHILD: &str = "CYCLONE_TEST_DPDK_CHILD";

/// What the killed process does: echoes what it gets.
#[test]
fn child() {
    let Ok(ports) = std::env::var(CHILD) else {
        return;
    };
    let frames = pool(1024, 2048);
    let mut driver = open("10.77.0.2:7102", &ports, &frames);
    let mut out = Vec::new();
    loop {
        driver.recv(&frames, &mut out, 32).unwrap();
        for (from, datagram) in out.drain(..) {
            let parts: Vec<&[u8]> = datagram.segments().collect();
            let back = cyclone_packet::Datagram {
                to: from,
                parts: &parts,
            };
            driver.send(&[back]).unwrap();
        }
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// A process at the other end of the cable; killed at the end, also of a test that fails.
struct Other(Child);

impl Other {
    fn spawn(ports: &str) -> Other {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "peers::child", "--nocapture"])
            .env(CHILD, ports)
            .stdout(Stdio::null())
            .spawn();
        Other(child.unwrap())
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// Asks the other process until it has answered.
fn await_echo(driver: &mut DpdkDriver, frames: &Pool, text: &[u8]) {
    let since = Instant::now();
    let mut out = Vec::new();
    let is_it = |(_, d): &(_, cyclone_pmem::payload::Payload)| d.to_vec() == text;
    while !out.iter().any(is_it) {
        assert!(since.elapsed() < PATIENCE, "{:?}", driver.stats());
        let datagram = cyclone_packet::Datagram {
            to: "10.77.0.2:7102".parse().unwrap(),
            parts: &[text],
        };
        driver.send(&[datagram]).unwrap();
        driver.recv(frames, &mut out, 32).unwrap();
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Who starts first waits for the other; a process that is killed leaves nothing behind that would
/// stop its successor, nor its peer.
#[test]
fn a_killed_process_is_replaced() {
    let _alone = alone();
    let (server, client) = memif();
    let frames = pool(1024, 2048);
    let mut driver = open("10.77.0.1:7101", &client, &frames);
    assert!(!driver.is_connected(), "no peer listens yet");
    for round in 0..3u8 {
        let _other = Other::spawn(&server);
        await_echo(&mut driver, &frames, &[round; 600]);
    }
    drop(driver);
    // Of the last child, which was killed.
    let socket = server.split(',').find_map(|it| it.strip_prefix("socket="));
    let _ = std::fs::remove_file(socket.expect("a socket"));
    assert_eq!(frames.free(), frames.count());
}

/// Who listens has waited for longer than it hurries for, at its start and between two clients.
#[test]
fn a_late_client_is_connected() {
    let _alone = alone();
    let (server, client) = memif();
    let frames = pool(1024, 2048);
    let mut driver = open("10.77.0.1:7101", &server, &frames);
    for round in 0..2u8 {
        let since = Instant::now();
        // Longer than it hurries at its start, and until it has seen that the last one is gone.
        while since.elapsed() < Duration::from_secs(2) || driver.is_connected() {
            assert!(since.elapsed() < PATIENCE, "the peer is gone");
            driver.recv(&frames, &mut Vec::new(), 32).unwrap();
            std::thread::sleep(Duration::from_micros(200));
        }
        let _other = Other::spawn(&client);
        await_echo(&mut driver, &frames, &[round; 600]);
    }
    drop(driver);
    assert_eq!(frames.free(), frames.count());
}

//! What is the kernel's: its own socket beside the queues, where what comes is found as soon as the
//! host sees that it is readable, and all that is not for our port.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use cyclone_packet::{Driver, XdpDriver};
use cyclone_pmem::Pool;

use crate::cable::body;
use crate::common::pool;
use crate::net::Cable;
use crate::{PATIENCE, carry, introduce, xdp};

/// A driver on one end of a cable, and a socket of the same machine, whose datagrams come over the
/// loopback device and so past the queues.
fn beside_a_neighbour() -> Option<(Cable, Pool, XdpDriver, UdpSocket)> {
    let cable = Cable::new(1500, 1)?;
    let pool = pool(1024, 2048);
    cable.a.enter();
    let driver = xdp("10.77.0.1:7101", "va", &pool);
    let neighbour = UdpSocket::bind("10.77.0.1:0").expect("a socket");
    Some((cable, pool, driver, neighbour))
}

#[test]
fn a_datagram_on_the_kernel_s_way_is_found_when_its_descriptor_is_readable() {
    let Some((_cable, pool, mut driver, neighbour)) = beside_a_neighbour() else {
        return;
    };
    let mut got = Vec::new();
    for round in 0..20u8 {
        neighbour
            .send_to(&[round], driver.local_addr())
            .expect("sent");
        cyclone_packet::wait(&mut driver, Duration::from_secs(5)).expect("readable");
        // One look is enough; then nothing more is there.
        assert_eq!(driver.recv(&pool, &mut got, 32).expect("received"), 1);
        assert_eq!(driver.recv(&pool, &mut got, 32).expect("received"), 0);
    }
    let bytes: Vec<u8> = got.iter().map(|(_, one)| one.to_vec()[0]).collect();
    assert_eq!(bytes, (0..20).collect::<Vec<u8>>());
    assert_eq!(driver.stats().by_kernel, 20);

    // A burst of more than it takes at once is found without another word.
    for n in 0..20u8 {
        neighbour.send_to(&[n], driver.local_addr()).expect("sent");
    }
    cyclone_packet::wait(&mut driver, Duration::from_secs(5)).expect("readable");
    got.clear();
    for _ in 0..3 {
        driver.recv(&pool, &mut got, 32).expect("received");
    }
    assert_eq!(got.len(), 20);
}

#[test]
fn a_poll_sees_the_queues_and_reported_descriptors() {
    let Some(cable) = Cable::new(1500, 1) else {
        return;
    };
    let (pool_a, pool_b) = (pool(1024, 2048), pool(1024, 2048));
    cable.a.enter();
    let mut driver = xdp("10.77.0.1:7101", "va", &pool_a);
    let neighbour = UdpSocket::bind("10.77.0.1:0").expect("a socket");
    cable.b.enter();
    let mut peer = xdp("10.77.0.2:7102", "vb", &pool_b);
    introduce(&mut driver, &mut peer, &pool_b);
    let mut got = Vec::new();
    while driver.recv(&pool_a, &mut got, 32).expect("received") > 0 {}
    got.clear();

    for round in 0..20u8 {
        assert!(driver.rx_is_empty() && driver.rx_is_empty());
        let datagram = cyclone_packet::Datagram {
            to: driver.local_addr(),
            parts: &[&[round]],
        };
        assert_eq!(peer.send(&[datagram; 2]).expect("sent"), 2);
        let since = Instant::now();
        while got.len() < 2 {
            assert!(since.elapsed() < PATIENCE, "{:?}", driver.stats());
            let found = !driver.rx_is_empty();
            // Found, perhaps because the kernel's socket is to be asked; it stays so until it is
            // taken.
            assert!(!found || !driver.rx_is_empty());
            let received = driver.recv(&pool_a, &mut got, 1).expect("received");
            assert!(received <= 1);
        }
        got.clear();
        // One that may take a single datagram has perhaps put the kernel's socket off.
        assert_eq!(driver.recv(&pool_a, &mut got, 32).expect("received"), 0);
        assert!(driver.rx_is_empty());

        // What came past the queues is not seen, so that `on_readable` has to be called.
        neighbour
            .send_to(&[round], driver.local_addr())
            .expect("sent");
        cyclone_packet::wait(&mut driver, PATIENCE).expect("readable");
        assert!(!driver.rx_is_empty());
        assert_eq!(driver.recv(&pool_a, &mut got, 32).expect("received"), 1);
        got.clear();
    }
}

/// Looks until what has come on the kernel's way is found by a loop that is not notified of it.
fn looks_for_one(driver: &mut XdpDriver, pool: &Pool) -> u32 {
    let (mut looks, mut got) = (0, Vec::new());
    let since = Instant::now();
    while driver.recv(pool, &mut got, 32).expect("received") == 0 {
        assert!(since.elapsed() < PATIENCE, "{:?}", driver.stats());
        for _ in 0..16 {
            looks += 1;
            assert!(driver.rx_is_empty());
        }
    }
    looks
}

#[test]
fn the_kernel_socket_is_polled_less_often_the_longer_it_was_empty() {
    let Some((_cable, pool, mut driver, neighbour)) = beside_a_neighbour() else {
        return;
    };
    let send = |driver: &XdpDriver| {
        let to = driver.local_addr();
        neighbour.send_to(&[1], to).expect("sent");
    };
    let look = |driver: &mut XdpDriver, looks: u32| {
        let mut got = Vec::new();
        for _ in 0..looks / 64 {
            (0..64).for_each(|_| assert!(driver.rx_is_empty()));
            assert_eq!(driver.recv(&pool, &mut got, 32).expect("received"), 0);
        }
    };
    let mut longest = 0;
    for _ in 0..20 {
        look(&mut driver, 8192 + 192);
        send(&driver);
        longest = longest.max(looks_for_one(&mut driver, &pool));
        // Another one soon after: it is looked for as often as ever.
        send(&driver);
        let soon = looks_for_one(&mut driver, &pool);
        assert!(soon <= 64, "{soon} looks");
    }
    assert!((128..=1024).contains(&longest), "{longest} looks");
}

/// How many seconds ago the kernel last made sure of its only neighbour on this interface, in this
/// thread's namespace.
fn confirmed_s(interface: &str) -> u64 {
    let output = std::process::Command::new("ip")
        .args(["-4", "-s", "neigh", "show", "dev", interface])
        .output()
        .expect("ip");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    // … used 5/1/5 probes 0 REACHABLE: used, made sure of, changed
    let times = text.split_once("used ").map(|(_, rest)| rest);
    let confirmed = times.and_then(|rest| rest.split('/').nth(1));
    confirmed
        .and_then(|seconds| seconds.parse().ok())
        .unwrap_or_else(|| panic!("{text:?}"))
}

#[test]
fn neighbours_are_confirmed_without_a_datagram_through_the_kernel() {
    let Some(cable) = Cable::new(1500, 1) else {
        return;
    };
    let pool = pool(4096, 2048);
    // What was made sure of is stale after 0.6 to 1.8 s; a second after its next use the kernel
    // asks.
    for (machine, interface) in [(&cable.a, "va"), (&cable.b, "vb")] {
        machine.enter();
        for (name, value) in [
            ("base_reachable_time_ms", "1200"),
            ("delay_first_probe_time", "1"),
        ] {
            let path = format!("/proc/sys/net/ipv4/neigh/{interface}/{name}");
            std::fs::write(path, value).expect("a setting of the namespace");
        }
    }
    cable.a.enter();
    let mut a = xdp("10.77.0.1:7101", "va", &pool);
    cable.b.enter();
    let mut b = xdp("10.77.0.2:7101", "vb", &pool);
    introduce(&mut a, &mut b, &pool);
    let before = (a.stats().by_kernel, b.stats().by_kernel);
    for round in 0..160u64 {
        carry(&mut a, &mut b, &pool, &[&round.to_le_bytes()]);
        carry(&mut b, &mut a, &pool, &[&round.to_le_bytes()]);
        std::thread::sleep(Duration::from_millis(60));
    }
    assert_eq!((a.stats().by_kernel, b.stats().by_kernel), before);
    // As long as it is used it is asked for again and again, also where other work holds that up.
    let since = Instant::now();
    cable.a.enter();
    while confirmed_s("va") >= 5 {
        assert!(since.elapsed() < PATIENCE, "it is not confirmed");
        carry(
            &mut a,
            &mut b,
            &pool,
            &[&since.elapsed().as_nanos().to_le_bytes()],
        );
        std::thread::sleep(Duration::from_millis(60));
    }
}

/// Everything that is not for our port goes to the kernel as ever: TCP, other UDP ports, ICMP, ARP,
/// VLANs.
#[test]
fn other_traffic_passes() {
    let Some(cable) = Cable::new(1500, 1) else {
        return;
    };
    cable.a.enter();
    let frames = pool(1024, 2048);
    let mut driver = xdp("10.77.0.1:7101", "va", &frames);
    let listener = TcpListener::bind("10.77.0.1:80").unwrap();
    let other = UdpSocket::bind("10.77.0.1:7999").unwrap();
    other.set_read_timeout(Some(PATIENCE)).unwrap();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut bytes = vec![0; 100_000];
        stream.read_exact(&mut bytes).unwrap();
        stream.write_all(&bytes).unwrap();
    });
    cable.b.enter();
    let mut stream = TcpStream::connect("10.77.0.1:80").unwrap();
    let text = body(1, 100_000);
    stream.write_all(&text).unwrap();
    let mut back = vec![0; text.len()];
    stream.read_exact(&mut back).unwrap();
    assert_eq!(back, text);
    server.join().unwrap();

    let socket = UdpSocket::bind("10.77.0.2:0").unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
        .send_to(b"to another port", "10.77.0.1:7999")
        .unwrap();
    let mut bytes = [0; 64];
    let (n, from) = other.recv_from(&mut bytes).unwrap();
    assert_eq!(&bytes[..n], b"to another port");
    other.send_to(b"answer", from).unwrap();
    assert_eq!(socket.recv(&mut bytes).unwrap(), 6);
    // A closed port is answered by ICMP, which has to come through.
    socket.connect("10.77.0.1:7998").unwrap();
    socket.send(b"anybody there?").unwrap();
    let refused = socket.recv(&mut bytes).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
    tagged_traffic(&cable);
    let mut out = Vec::new();
    assert_eq!(driver.recv(&frames, &mut out, 32).unwrap(), 0);
    assert_eq!(driver.stats().received, 0);
}

/// The same port number in a VLAN is not our port.
fn tagged_traffic(cable: &Cable) {
    if !cable.a.try_ip("link add link va name va.5 type vlan id 5") {
        println!("skipped: no VLANs here");
        return;
    }
    cable.a.ip("addr add 10.77.5.1/24 dev va.5");
    cable.a.ip("link set va.5 up");
    cable.b.ip("link add link vb name vb.5 type vlan id 5");
    cable.b.ip("addr add 10.77.5.2/24 dev vb.5");
    cable.b.ip("link set vb.5 up");
    cable.a.enter();
    let inside = UdpSocket::bind("10.77.5.1:7101").unwrap();
    inside.set_read_timeout(Some(PATIENCE)).unwrap();
    cable.b.enter();
    let socket = UdpSocket::bind("10.77.5.2:0").unwrap();
    socket.send_to(b"in a VLAN", "10.77.5.1:7101").unwrap();
    let mut bytes = [0; 64];
    assert_eq!(inside.recv(&mut bytes).unwrap(), 9);
}

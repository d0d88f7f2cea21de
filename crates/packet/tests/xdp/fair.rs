//! What is full or busy does not keep the others waiting.

use super::*;

/// Bursts per round, and datagrams of each to either peer.
const BURSTS: u64 = 10;
const EACH: u64 = 16;

/// A peer whose link is down, so that its queue fills: every other one's datagrams arrive.
#[test]
fn a_full_queue_does_not_stop_the_others() {
    let (Some(a), Some(b), Some(c)) = (Machine::new(), Machine::new(), Machine::new()) else {
        return;
    };
    a.connect(("va", 1), &b, ("vb", 2));
    a.connect(("vd", 1), &c, ("vc", 3));
    let pools = (pool(1024, 2048), pool(1024, 2048), pool(1024, 2048));
    a.enter();
    let mut at_a = xdp("10.77.0.1:7101", "va, vd", &pools.0);
    b.enter();
    let mut at_b = xdp("10.77.0.2:7102", "vb", &pools.1);
    c.enter();
    let mut at_c = xdp("10.77.0.3:7103", "vc", &pools.2);
    let mut number = 0u64;
    // The way to a peer may be asked for again at any moment, and that of a link that is down is
    // the kernel's.
    for round in 0.. {
        assert!(round < 10, "the queue was never full: {:?}", at_a.stats());
        introduce(&mut at_a, &mut at_b, &pools.1);
        introduce(&mut at_a, &mut at_c, &pools.2);
        a.ip("link set va down");
        let before = at_a.stats();
        let (first, mut got) = (number, Vec::new());
        let mut skipped_first = 0;
        for _ in 0..BURSTS {
            let names: Vec<[u8; 8]> = (number..number + EACH).map(u64::to_le_bytes).collect();
            number += EACH;
            let parts: Vec<[&[u8]; 1]> = names.iter().map(|name| [&name[..]]).collect();
            let both =
                |parts| [at_b.local_addr(), at_c.local_addr()].map(|to| Datagram { to, parts });
            let burst: Vec<Datagram<'_>> = parts.iter().flat_map(|one| both(one)).collect();
            // The last one is not skipped, so all are taken.
            assert_eq!(at_a.send(&burst).expect("send"), burst.len());
            let full = at_a.stats().send_full;
            if full - before.send_full >= 2 * EACH {
                // Full before this burst began, and now: nothing but the skipped at its end.
                let taken = at_a.send(&[burst[1], burst[0], burst[0]]).expect("send");
                skipped_first += u64::from(taken == 1);
            }
            at_c.recv(&pools.2, &mut got, 64).expect("received");
        }
        let since = Instant::now();
        let numbers = |got: &[(std::net::SocketAddr, cyclone_pmem::payload::Payload)]| {
            let bytes = got
                .iter()
                .filter_map(|(_, one)| one.to_vec().try_into().ok());
            let numbers = bytes.map(u64::from_le_bytes);
            let mut numbers: Vec<u64> = numbers.filter(|n| (first..number).contains(n)).collect();
            numbers.sort_unstable();
            numbers.dedup();
            numbers.len() as u64
        };
        while numbers(&got) < number - first {
            let stats = at_a.stats();
            assert!(
                since.elapsed() < PATIENCE,
                "{} arrived, {stats:?}",
                got.len()
            );
            at_c.recv(&pools.2, &mut got, 64).expect("received");
        }
        let full = at_a.stats().send_full - before.send_full;
        a.ip("link set va up");
        a.ip("route replace 10.77.0.2/32 dev va");
        // No other link takes the frames of a link that is down.
        let since = Instant::now();
        while at_a.frames_sending() > 0 {
            assert!(since.elapsed() < PATIENCE);
            at_a.recv(&pools.0, &mut Vec::new(), 64).expect("received");
        }
        if full > 0 && skipped_first > 0 {
            break;
        }
    }
    close(at_a, &pools.0, 0);
    close(at_b, &pools.1, 0);
    close(at_c, &pools.2, 0);
}

/// A queue that fills every burst leaves the kernel's socket its part.
#[test]
fn full_bursts_do_not_starve_the_kernel_s_socket() {
    let Some(cable) = Cable::new(1500, 1) else {
        return;
    };
    let pool = pool(2048, 2048);
    cable.a.enter();
    let mut driver = xdp("10.77.0.1:7101", "va", &pool);
    let neighbour = UdpSocket::bind("10.77.0.1:0").expect("a socket");
    cable.b.enter();
    let far = UdpSocket::bind("10.77.0.2:0").expect("a socket");
    let (mut got, mut rounds) = (Vec::new(), 0);
    // Until a burst is full: the first datagrams wait for the neighbour to be found.
    while got.len() < 32 {
        rounds += 1;
        assert!(rounds < 100, "{:?}", driver.stats());
        for _ in 0..200 {
            far.send_to(b"from afar", driver.local_addr())
                .expect("sent");
        }
        std::thread::sleep(Duration::from_millis(20));
        got.clear();
        driver.recv(&pool, &mut got, 32).expect("received");
    }
    let waiting = b"from here";
    neighbour
        .send_to(waiting, driver.local_addr())
        .expect("sent");
    let kernel = *driver.fds().last().expect("the kernel's socket");
    driver.on_readable(kernel);
    got.clear();
    assert_eq!(driver.recv(&pool, &mut got, 32).expect("received"), 25);
    let here = got.iter().filter(|(_, bytes)| bytes.to_vec() == waiting);
    assert_eq!(here.count(), 1);
    // With nothing there, the whole burst is the queue's again.
    got.clear();
    assert_eq!(driver.recv(&pool, &mut got, 32).expect("received"), 32);
}

/// Bursts of one datagram: each look finds one while there are any, and the kernel's socket has its
/// turn when there are none.
#[test]
fn bursts_of_one_datagram_find_what_is_there() {
    let Some(cable) = Cable::new(1500, 1) else {
        return;
    };
    let pool = pool(2048, 2048);
    cable.a.enter();
    let options = XdpOptions {
        burst: 1,
        ..XdpOptions::new("va")
    };
    let mut driver = open("10.77.0.1:7101", &pool, &options);
    let neighbour = UdpSocket::bind("10.77.0.1:0").expect("a socket");
    cable.b.enter();
    let far = UdpSocket::bind("10.77.0.2:0").expect("a socket");
    let mut got = Vec::new();
    // Until nothing waits for the neighbour to be found any more.
    let since = Instant::now();
    while got.is_empty() {
        assert!(since.elapsed() < PATIENCE, "{:?}", driver.stats());
        far.send_to(b"from afar", driver.local_addr())
            .expect("sent");
        std::thread::sleep(Duration::from_millis(20));
        driver.recv(&pool, &mut got, 32).expect("received");
    }
    for _ in 0..200 {
        driver.recv(&pool, &mut got, 32).expect("received");
    }
    for round in 0..3 {
        for _ in 0..200 {
            far.send_to(b"from afar", driver.local_addr())
                .expect("sent");
        }
        std::thread::sleep(Duration::from_millis(20));
        neighbour
            .send_to(b"from here", driver.local_addr())
            .expect("sent");
        let kernel = *driver.fds().last().expect("the kernel's socket");
        if round > 0 {
            driver.on_readable(kernel);
        }
        got.clear();
        for look in 1..=200 {
            driver.recv(&pool, &mut got, 32).expect("received");
            assert_eq!(got.len(), look, "look {look} of round {round}");
        }
        assert!(got.iter().all(|(_, bytes)| bytes.to_vec() == b"from afar"));
        // Its turn has come meanwhile, or it was known to be readable.
        got.clear();
        assert_eq!(driver.recv(&pool, &mut got, 32).expect("received"), 1);
        assert_eq!(got[0].1.to_vec(), b"from here");
        got.clear();
        assert_eq!(driver.recv(&pool, &mut got, 32).expect("received"), 0);
    }
}

//! Several drivers of one process: one receives for all, each sends independently.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};

use cyclone_packet::Datagram;
use cyclone_pmem::payload::Payload;

use super::*;

const COUNT: u16 = 3;

fn at(last: u8, port: u16) -> SocketAddr {
    SocketAddr::from(([10, 77, 0, last], port))
}

/// A process with several drivers and one with a single one, at the ends of a cable.
fn process_and_peer(pools: &(Pool, Pool)) -> (Vec<DpdkDriver>, DpdkDriver) {
    let (one, other) = memif();
    let options = DpdkOptions::parse(&one).unwrap();
    let all = DpdkDriver::open_ports(at(1, 7101), &pools.0, &options, COUNT).expect("DPDK");
    let peer = open("10.77.0.2:7200", &other, &pools.1);
    let locals: Vec<u16> = all.iter().map(|it| it.local_addr().port()).collect();
    assert_eq!(locals, [7101, 7102, 7103]);
    (all, peer)
}

/// Polls all of them, as their loops do.
fn look(drivers: &mut [DpdkDriver], pool: &Pool, got: &mut [Vec<(SocketAddr, Payload)>]) {
    for (driver, got) in drivers.iter_mut().zip(got) {
        driver.recv(pool, got, 32).unwrap();
    }
}

#[test]
fn each_driver_gets_what_is_for_its_port_and_answers_from_it() {
    let _alone = alone();
    let pools = (pool(4096, 2176), pool(4096, 2176));
    let (mut all, mut peer) = process_and_peer(&pools);
    let mut got: Vec<Vec<_>> = vec![Vec::new(); usize::from(COUNT)];
    let mut back = Vec::new();
    let since = Instant::now();
    // Questions about neighbours lose the first ones.
    while got.iter().any(|it| it.len() < 50) || back.len() < 50 {
        assert!(since.elapsed() < PATIENCE, "{:?}", peer.stats());
        for number in 0..COUNT {
            let to = at(1, 7101 + number);
            let text = [number as u8; 700];
            peer.send(&[Datagram {
                to,
                parts: &[&text],
            }])
            .unwrap();
        }
        look(&mut all, &pools.0, &mut got);
        for (driver, number) in all.iter_mut().zip(0..COUNT) {
            let to = at(2, 7200);
            let text = [0x10 + number as u8; 300];
            driver
                .send(&[Datagram {
                    to,
                    parts: &[&text],
                }])
                .unwrap();
        }
        peer.recv(&pools.1, &mut back, 32).unwrap();
    }
    for (number, got) in (0..COUNT).zip(&got) {
        for (from, body) in got {
            assert_eq!(*from, at(2, 7200));
            assert_eq!(body.to_vec(), [number as u8; 700]);
        }
        let stats = all[usize::from(number)].stats();
        assert_eq!(stats.received, got.len() as u64, "{stats:?}");
    }
    let mut seen = [0; COUNT as usize];
    for (from, body) in &back {
        let number = from.port() - 7101;
        assert_eq!(body.to_vec(), [0x10 + number as u8; 300]);
        seen[usize::from(number)] += 1;
    }
    assert!(seen.iter().all(|&count| count > 5), "{seen:?}");
    drop((all, peer, got, back));
    assert_eq!(pools.0.free(), pools.0.count());
    assert_eq!(pools.1.free(), pools.1.count());
}

/// A loop that stands still loses what is for it, when its queue is full; the others, and the
/// node's own, lose nothing.
#[test]
fn a_driver_that_stands_still_is_in_nobodys_way() {
    let _alone = alone();
    let pools = (pool(4096, 2176), pool(4096, 2176));
    let (mut all, mut peer) = process_and_peer(&pools);
    let mut got: Vec<Vec<_>> = vec![Vec::new(); usize::from(COUNT)];
    let since = Instant::now();
    let mut counts = [0; COUNT as usize];
    // Far more than all frames there are.
    while counts[0] < 10_000 || counts[2] < 10_000 {
        assert!(since.elapsed() < PATIENCE, "{counts:?}");
        let text = [1; 700];
        let parts: [&[u8]; 1] = [&text];
        let burst: Vec<Datagram<'_>> = (0..COUNT)
            .map(|number| Datagram {
                to: at(1, 7101 + number),
                parts: &parts,
            })
            .collect();
        peer.send(&burst).unwrap();
        for number in [0, 2] {
            all[number].recv(&pools.0, &mut got[number], 32).unwrap();
            counts[number] += got[number].len();
            got[number].clear();
        }
        peer.recv(&pools.1, &mut Vec::new(), 32).unwrap();
    }
    let stats = all[1].stats();
    assert!(stats.pool_empty > 1000, "its queue was full: {stats:?}");
    assert_eq!(all[0].stats().pool_empty, 0, "{:?}", all[0].stats());
    // It wakes up: what it had is there, and it goes on.
    let before = all[1].recv(&pools.0, &mut got[1], 32).unwrap();
    assert_eq!(before, 32);
    // The others go on without it.
    drop(all.remove(1));
    let malformed = all[0].stats().malformed;
    while all[0].stats().malformed == malformed {
        assert!(since.elapsed() < PATIENCE, "no driver is at its port");
        let to = at(1, 7102);
        peer.send(&[Datagram {
            to,
            parts: &[&[1; 9]],
        }])
        .unwrap();
        all[0].recv(&pools.0, &mut got[0], 32).unwrap();
    }
    drop((all, peer, got));
    assert_eq!(pools.0.free(), pools.0.count());
}

/// Separate threads, payloads lent from frames by all of them at once; two of them sleep until they
/// are rung.
#[test]
fn threads_send_and_receive_side_by_side() {
    let _alone = alone();
    let pools = (pool(8192, 2176), pool(8192, 2176));
    let (all, mut peer) = process_and_peer(&pools);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for (number, mut driver) in (0..COUNT).zip(all) {
            let (pool, stop) = (&pools.0, &stop);
            scope.spawn(move || {
                let frame = pool.alloc().expect("a frame").freeze(100..1500);
                let (mut got, mut received) = (Vec::new(), 0);
                while !stop.load(Ordering::Relaxed) {
                    let head = number.to_le_bytes();
                    let parts: [&[u8]; 2] = [&head, &frame];
                    let datagram = Datagram {
                        to: at(2, 7200),
                        parts: &parts,
                    };
                    driver.send(&[datagram; 8]).unwrap();
                    if driver.recv(pool, &mut got, 32).unwrap() == 0 && number > 0 {
                        cyclone_packet::wait(&mut driver, Duration::from_millis(20)).unwrap();
                    }
                    received += got.len();
                    got.clear();
                }
                assert!(received > 0, "{number}: {:?}", driver.stats());
                assert!(driver.stats().lent_bytes > 0);
            });
        }
        let since = Instant::now();
        let (mut back, mut seen) = (Vec::new(), [0; COUNT as usize]);
        while seen.iter().any(|&count| count < 20_000) && since.elapsed() < PATIENCE {
            peer.recv(&pools.1, &mut back, 32).unwrap();
            for (from, body) in back.drain(..) {
                let number = from.port() - 7101;
                assert_eq!(body.len(), 1402);
                assert_eq!(body.slice(0..2).to_vec(), number.to_le_bytes());
                seen[usize::from(number)] += 1;
            }
            let parts: [&[u8]; 1] = [&[1; 64]];
            let burst: Vec<Datagram<'_>> = (0..COUNT)
                .map(|number| Datagram {
                    to: at(1, 7101 + number),
                    parts: &parts,
                })
                .collect();
            peer.send(&burst).unwrap();
        }
        stop.store(true, Ordering::Relaxed);
        assert!(seen.iter().all(|&count| count >= 20_000), "{seen:?}");
    });
    drop(peer);
    assert_eq!(pools.0.free(), pools.0.count());
    assert_eq!(pools.1.free(), pools.1.count());
}

/// What a woken host finds by looking once more comes with the next calls, in order, however few it
/// takes at once.
#[test]
fn a_look_keeps_what_it_finds() {
    let _alone = alone();
    let pools = (pool(4096, 2176), pool(4096, 2176));
    let (mut all, mut peer) = process_and_peer(&pools);
    let mut got: Vec<Vec<_>> = vec![Vec::new(); usize::from(COUNT)];
    let since = Instant::now();
    let send = |peer: &mut DpdkDriver, numbers: std::ops::Range<u8>| {
        for number in numbers {
            let to = at(1, 7101);
            let parts: &[&[u8]] = &[&[number; 100]];
            peer.send(&[Datagram { to, parts }]).unwrap();
        }
    };
    // Questions about neighbours lose the first ones.
    while got[0].is_empty() {
        assert!(since.elapsed() < PATIENCE);
        send(&mut peer, 0..1);
        peer.recv(&pools.1, &mut Vec::new(), 32).unwrap();
        look(&mut all, &pools.0, &mut got);
    }
    while !all[0].rx_is_empty() {
        all[0].recv(&pools.0, &mut got[0], 32).unwrap();
    }
    // The others are notified of what has come.
    assert!(!all[1].rx_is_empty() && !all[2].rx_is_empty());
    got[0].clear();
    send(&mut peer, 1..41);
    let received = all[0].stats().received;
    while all[0].rx_is_empty() {
        assert!(since.elapsed() < PATIENCE);
    }
    // A second look is not needed for more, and loses nothing.
    assert!(!all[0].rx_is_empty());
    while got[0].len() < 40 {
        assert!(since.elapsed() < PATIENCE);
        let count = all[0].recv(&pools.0, &mut got[0], 7).unwrap();
        assert!(count <= 7, "{count}");
    }
    let bodies = got[0].iter().map(|(_, body)| body.to_vec()[0]);
    assert_eq!(bodies.collect::<Vec<_>>(), (1..41).collect::<Vec<u8>>());
    assert_eq!(all[0].stats().received, received + 40);
    assert!(all[0].rx_is_empty());
    drop((all, peer, got));
    assert_eq!(pools.0.free(), pools.0.count());
    assert_eq!(pools.1.free(), pools.1.count());
}

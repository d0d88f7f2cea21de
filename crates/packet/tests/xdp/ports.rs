//! Several ports in a row on the same queues, each with its own driver, as a replica's logs have
//! them.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::*;

/// Ports of each machine.
pub(crate) const PORTS: u16 = 3;

pub(crate) fn open_ports(
    address: &str,
    interface: &str,
    pool: &Pool,
    queues: u32,
) -> Vec<XdpDriver> {
    let options = XdpOptions {
        queues,
        ..XdpOptions::new(interface)
    };
    let address = address.parse().expect("an address");
    XdpDriver::open_ports(address, pool, &options, PORTS).expect("AF_XDP")
}

#[test]
fn each_port_has_a_socket_on_each_queue() {
    for (addresses, queues) in [
        (["10.77.0.1:7101", "10.77.0.2:7201"], 1),
        (["[fd77::1]:7101", "[fd77::2]:7201"], 2),
    ] {
        let Some(cable) = Cable::new(1500, queues) else {
            return;
        };
        let (pool_a, pool_b) = (pool(4096, 2048), pool(4096, 2048));
        cable.a.enter();
        let mut all_a = open_ports(addresses[0], "va", &pool_a, queues);
        cable.b.enter();
        let mut all_b = open_ports(addresses[1], "vb", &pool_b, queues);
        // Frames for headers and to receive into are counted once.
        let kept: Vec<bool> = all_a.iter().map(|a| a.frames_kept() > 0).collect();
        assert_eq!(kept, [true, false, false]);
        for (at, a) in (0..).zip(&mut all_a) {
            assert_eq!(a.local_addr().port(), 7101 + at);
            for b in &mut all_b {
                introduce(a, b, &pool_b);
                // Straight, by the socket of the same port: nothing is left for the kernel's.
                let before = (b.stats().by_kernel, b.stats().received);
                let queued: u64 = b.received_by_queue().iter().sum();
                let name = u64::from(a.local_addr().port()).to_le_bytes();
                carry(a, b, &pool_b, &[&name, &[7; 900]]);
                assert_eq!(b.stats().by_kernel, before.0);
                assert!(b.received_by_queue().iter().sum::<u64>() > queued);
            }
        }
        // The first one's end is not the others'.
        drop(all_a.remove(0));
        for a in &mut all_a {
            let name = (1000 + u64::from(a.local_addr().port())).to_le_bytes();
            carry(a, &mut all_b[0], &pool_b, &[&name, &[8; 300]]);
            let back = (2000 + u64::from(a.local_addr().port())).to_le_bytes();
            carry(&mut all_b[0], a, &pool_a, &[&back, &[9; 300]]);
        }
        cable.a.enter();
        let beside = XdpDriver::open(
            "10.77.0.1:9000".parse().unwrap(),
            &pool_a,
            &XdpOptions::new("va"),
        );
        assert!(
            matches!(beside, Err(XdpError::InUse(_))),
            "the program stays"
        );
        all_a.iter().chain(&all_b).for_each(await_sent);
        drop((all_a, all_b));
        assert_eq!(pool_a.free(), pool_a.count());
        assert_eq!(pool_b.free(), pool_b.count());
    }
}

/// Separate threads send and receive by the ports of one queue, payloads of the pool among them;
/// frames that one has sent come back to another, and none is lost or given out twice.
#[test]
fn threads_share_a_queue() {
    let Some(cable) = Cable::new(1500, 1) else {
        return;
    };
    let (pool_a, pool_b) = (pool(4096, 2048), pool(4096, 2048));
    cable.a.enter();
    let mut all_a = open_ports("10.77.0.1:7101", "va", &pool_a, 1);
    cable.b.enter();
    let mut all_b = open_ports("10.77.0.2:7201", "vb", &pool_b, 1);
    for (a, b) in all_a.iter_mut().zip(&mut all_b) {
        introduce(a, b, &pool_b);
    }
    let stop = AtomicBool::new(false);
    let arrived: [AtomicU32; PORTS as usize] = Default::default();
    let count = 20_000u32;
    let (ended_a, ended_b): (Vec<_>, Vec<_>) = std::thread::scope(|scope| {
        let receivers: Vec<_> = (0..)
            .zip(all_b)
            .map(|(port, mut b)| {
                let (pool_b, stop) = (&pool_b, &stop);
                let arrived = &arrived[usize::from(port)];
                scope.spawn(move || {
                    let mut got = Vec::new();
                    while !stop.load(Ordering::Relaxed) || b.recv(pool_b, &mut got, 32).unwrap() > 0
                    {
                        b.recv(pool_b, &mut got, 32).expect("received");
                        for (_, datagram) in got.drain(..) {
                            let bytes = datagram.to_vec();
                            if bytes.len() == 8 {
                                // What introduced it.
                                continue;
                            }
                            assert_eq!(bytes.len(), 1200);
                            assert_eq!(bytes[0], port, "another port's");
                            let number = u32::from_le_bytes(bytes[1..5].try_into().unwrap());
                            assert!(bytes[5..].iter().all(|&byte| byte == number as u8));
                            arrived.fetch_add(1, Ordering::Relaxed);
                        }
                        std::thread::yield_now();
                    }
                    b
                })
            })
            .collect();
        let senders: Vec<_> = (0..)
            .zip(all_a)
            .map(|(port, mut a): (u8, _)| {
                let pool_a = &pool_a;
                let arrived = &arrived[usize::from(port)];
                scope.spawn(move || {
                    let to = (
                        std::net::Ipv4Addr::new(10, 77, 0, 2),
                        7201 + u16::from(port),
                    )
                        .into();
                    let (mut back, mut lost) = (Vec::new(), 0);
                    for number in 0..count {
                        // No more in flight than fit into a queue; what does not come is lost.
                        let since = Instant::now();
                        loop {
                            let missing =
                                number.saturating_sub(lost + arrived.load(Ordering::Relaxed));
                            if missing < 100 {
                                break;
                            }
                            if since.elapsed() > Duration::from_secs(1) {
                                lost += missing;
                            }
                            std::thread::yield_now();
                        }
                        // Every other payload lies in the pool, and is sent from there.
                        let mut body = vec![number as u8; 1195];
                        let frame = number.is_multiple_of(2).then(|| pool_a.alloc()).flatten();
                        let frame = frame.map(|mut frame| {
                            frame[..1195].copy_from_slice(&body);
                            frame.freeze(0..1195)
                        });
                        let mut head = vec![port];
                        head.extend(number.to_le_bytes());
                        let parts: [&[u8]; 2] = match &frame {
                            Some(frame) => [&head, frame],
                            None => [&head, &body],
                        };
                        a.send(&[Datagram { to, parts: &parts }]).expect("sent");
                        body.clear();
                        a.recv(pool_a, &mut back, 32).expect("received");
                    }
                    a
                })
            })
            .collect();
        let ended_a: Vec<_> = senders.into_iter().map(|a| a.join().unwrap()).collect();
        std::thread::sleep(Duration::from_millis(200));
        stop.store(true, Ordering::Relaxed);
        let ended_b: Vec<_> = receivers.into_iter().map(|b| b.join().unwrap()).collect();
        (ended_a, ended_b)
    });
    for (b, arrived) in ended_b.into_iter().zip(arrived) {
        let arrived = arrived.into_inner();
        assert!(
            arrived > count / 10 * 9,
            "{arrived} of {count}: {:?}",
            b.stats()
        );
        assert_eq!(b.stats().malformed, 0);
        await_sent(&b);
    }
    for a in ended_a {
        assert!(a.stats().lent_bytes > 0);
        await_sent(&a);
    }
    assert_eq!(pool_a.free(), pool_a.count());
    assert_eq!(pool_b.free(), pool_b.count());
}

#[test]
fn there_may_be_no_room_for_them() {
    let Some(cable) = Cable::new(1500, 1) else {
        return;
    };
    let frames = pool(1024, 2048);
    cable.a.enter();
    let open = |address: &str| {
        let (address, options) = (address.parse().unwrap(), XdpOptions::new("va"));
        XdpDriver::open_ports(address, &frames, &options, 2).err()
    };
    let beyond = open("10.77.0.1:65535");
    assert!(
        matches!(beyond, Some(XdpError::NoPorts { ports: 2, .. })),
        "{beyond:?}"
    );
    let taken = UdpSocket::bind("10.77.0.1:7102").expect("a socket");
    match open("10.77.0.1:7101") {
        Some(XdpError::Bind { address, .. }) => assert_eq!(address, taken.local_addr().unwrap()),
        other => panic!("{other:?}"),
    }
    assert_eq!(frames.free(), frames.count());
}

//! One of several ports stands still, or goes: the others of its queue do not feel it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::ports::{PORTS, open_ports};
use super::*;

/// Frames of the pools, those offered of them, and the entries of each port's ring.
const FRAMES: u32 = 4096;
const OFFERED: u32 = FRAMES / 4;
const RING: u32 = 256;

/// A machine with several ports, and a socket on the other one that knows the way.
fn machine(cable: &Cable) -> (Pool, Vec<XdpDriver>, UdpSocket) {
    let frames = pool(FRAMES.into(), 2048);
    cable.a.enter();
    let mut ports = open_ports("10.77.0.1:7101", "va", &frames, 1);
    cable.b.enter();
    let far = UdpSocket::bind("10.77.0.2:0").expect("a socket");
    for port in &mut ports {
        let (since, mut got) = (Instant::now(), Vec::new());
        while got.is_empty() {
            assert!(since.elapsed() < PATIENCE, "{:?}", port.stats());
            far.send_to(b"introduced", port.local_addr()).expect("sent");
            std::thread::sleep(Duration::from_millis(2));
            port.recv(&frames, &mut got, 32).expect("received");
        }
        // Those that waited for the neighbour to be found.
        std::thread::sleep(Duration::from_millis(50));
        while port.recv(&frames, &mut got, 32).expect("received") > 0 {}
    }
    (frames, ports, far)
}

/// More for this port than its queue has frames.
fn flood(far: &UdpSocket, port: &XdpDriver) {
    for _ in 0..3 * OFFERED {
        far.send_to(&[9; 1000], port.local_addr()).expect("sent");
    }
    std::thread::sleep(Duration::from_millis(20));
}

/// After an interface was down: until the cable carries again, which the kernel sees to later, and
/// its first question for a neighbour may be lost. This thread is on the first machine then.
fn await_cable(cable: &Cable, far: &UdpSocket) {
    cable.a.enter();
    let near = UdpSocket::bind("10.77.0.1:0").expect("a socket");
    near.set_read_timeout(Some(Duration::from_millis(10)))
        .expect("a socket");
    let to = near.local_addr().expect("a socket");
    let since = Instant::now();
    while near.recv(&mut [0; 64]).is_err() {
        assert!(since.elapsed() < PATIENCE, "the cable carries nothing");
        // It may be refused as long as there is no way.
        let _ = far.send_to(b"carried", to);
    }
}

/// Datagrams for a port arrive, all of them.
fn serves(far: &UdpSocket, port: &mut XdpDriver, frames: &Pool, round: u64) {
    let count = 32;
    for number in 0..count {
        let name = [round.to_le_bytes(), u64::to_le_bytes(number)].concat();
        far.send_to(&name, port.local_addr()).expect("sent");
    }
    let (since, mut got) = (Instant::now(), Vec::new());
    while got.len() < count as usize {
        assert!(
            since.elapsed() < PATIENCE,
            "round {round}: {} of {count}, {:?}",
            got.len(),
            port.stats()
        );
        port.recv(frames, &mut got, 32).expect("received");
    }
    for (number, (_, bytes)) in (0..).zip(&got) {
        let name = [round.to_le_bytes(), u64::to_le_bytes(number)].concat();
        assert_eq!(bytes.to_vec(), name);
    }
}

/// Frames that the drivers have of the pool, when nothing is in flight.
fn settled(ports: &mut [XdpDriver], frames: &Pool) -> u32 {
    for port in ports.iter_mut() {
        let mut got = Vec::new();
        while port.recv(frames, &mut got, 32).expect("received") > 0 {
            got.clear();
        }
        await_sent(port);
        // What waits for the kernel's look, at the turn that it has.
        for _ in 0..64 {
            port.recv(frames, &mut got, 32).expect("received");
        }
    }
    frames.count() - frames.free()
}

#[test]
fn a_port_that_stands_still_takes_no_other_one_s_frames() {
    let Some(cable) = Cable::new(1500, 1) else {
        return;
    };
    for still in 0..usize::from(PORTS) {
        let (frames, mut ports, far) = machine(&cable);
        let kept: u32 = ports.iter().map(|port| port.frames_kept()).sum();
        for round in 0..5 {
            flood(&far, &ports[still]);
            for (at, port) in ports.iter_mut().enumerate() {
                if at != still {
                    serves(&far, port, &frames, round);
                }
            }
        }
        let full = ports[still].stats().pool_empty;
        assert!(full >= u64::from(3 * OFFERED - RING), "{full}");
        // All but this one stand still: what their rings do not hold is its own.
        for port in &ports[1..] {
            flood(&far, port);
        }
        ports[0]
            .recv(&frames, &mut Vec::new(), 32)
            .expect("received");
        while ports[0]
            .recv(&frames, &mut Vec::new(), 32)
            .expect("received")
            > 0
        {}
        serves(&far, &mut ports[0], &frames, 9);
        // It goes on with what its ring holds, and then as ever.
        let mut got = Vec::new();
        while ports[1].recv(&frames, &mut got, 32).expect("received") > 0 {}
        assert_eq!(got.len(), RING as usize);
        drop(got);
        serves(&far, &mut ports[1], &frames, 10);
        assert_eq!(settled(&mut ports, &frames), kept);
        drop(ports);
        assert_eq!(frames.free(), frames.count());
    }
}

#[test]
fn a_port_that_goes_leaves_what_its_rings_hold() {
    let Some(cable) = Cable::new(1500, 1) else {
        return;
    };
    // The first one's socket has the rings that all share.
    for going in 0..usize::from(PORTS) {
        let (frames, mut ports, far) = machine(&cable);
        let kept: u32 = ports.iter().map(|port| port.frames_kept()).sum();
        cable.b.enter();
        let peer_frames = pool(1024, 2048);
        let mut peer = xdp("10.77.0.2:7201", "vb", &peer_frames);
        introduce(&mut ports[going], &mut peer, &peer_frames);
        settled(&mut ports, &frames);

        // Datagrams that the kernel does not take, since the interface is down; with parts in
        // frames of the pool.
        cable.a.ip("link set va down");
        let mut frame = frames.alloc().expect("a frame");
        frame.fill(7);
        let frame = frame.freeze(0..1000);
        let datagram = Datagram {
            to: peer.local_addr(),
            parts: &[b"never sent", &frame],
        };
        for _ in 0..20 {
            assert_eq!(ports[going].send(&[datagram; 16]).expect("send"), 16);
        }
        drop(frame);
        assert!(ports[going].frames_sending() > 0, "the kernel took them");
        let gone = ports.remove(going);
        cable.a.ip("link set va up");
        cable.a.ip("addr replace 10.77.0.1/24 dev va");
        await_cable(&cable, &far);
        // The kernel could send them now, but it is not called.
        flood(&far, &gone);
        cable.a.ip("link set va down");
        let before = frames.free();
        assert!(gone.frames_sending() > 0);
        drop(gone);
        let back = frames.free() - before;
        // The ring's, and the one that was lent; those for headers are the queue's.
        assert_eq!(back, RING + 1);
        for port in &ports {
            assert_eq!(port.frames_sending(), 0);
        }
        cable.a.ip("link set va up");
        await_cable(&cable, &far);

        // Nothing for it comes into a ring that no driver reads: the port is the kernel's.
        let gone_to: std::net::SocketAddr = ([10, 77, 0, 1], 7101 + going as u16).into();
        for _ in 0..OFFERED {
            // An answer that the port is closed comes out of the next call.
            let _ = far.send_to(&[9; 1000], gone_to);
        }
        cable.a.enter();
        let heir = UdpSocket::bind(gone_to).expect("the port is free");
        heir.set_read_timeout(Some(PATIENCE)).expect("a socket");
        let _ = far.take_error();
        let message = b"to the port's owner";
        far.send_to(message, gone_to).expect("sent");
        // Those before it may only now be on their way through the kernel.
        while heir.recv(&mut [0; 64]).expect("received") != message.len() {}
        for round in 0..20 {
            for port in &mut ports {
                serves_on(&far, port, &frames, round);
            }
        }
        assert_eq!(settled(&mut ports, &frames), kept);
        await_sent(&peer);
        drop((ports, peer));
        assert_eq!(frames.free(), frames.count());
        assert_eq!(peer_frames.free(), peer_frames.count());
    }
}

/// As [`serves`], by a socket that may be notified of a closed port.
fn serves_on(far: &UdpSocket, port: &mut XdpDriver, frames: &Pool, round: u64) {
    while far.take_error().expect("a socket").is_some() {}
    serves(far, port, frames, round);
}

/// Under traffic for all, one port's thread after the other ends.
#[test]
fn ports_go_under_traffic_and_the_last_goes_on() {
    let Some(cable) = Cable::new(1500, 1) else {
        return;
    };
    let (frames, ports, _far) = machine(&cable);
    let kept: u32 = ports.iter().map(|port| port.frames_kept()).sum();
    let addresses: Vec<_> = ports.iter().map(|port| port.local_addr()).collect();
    cable.b.enter();
    let far: Vec<UdpSocket> = addresses
        .iter()
        .map(|_| UdpSocket::bind("10.77.0.2:0").expect("a socket"))
        .collect();
    let stop = AtomicBool::new(false);
    let answered: Vec<Arc<AtomicU64>> = addresses.iter().map(|_| Arc::default()).collect();
    let mut left = std::thread::scope(|scope| {
        let senders: Vec<_> = far
            .iter()
            .zip(&addresses)
            .map(|(far, to)| {
                let stop = &stop;
                scope.spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        for _ in 0..16 {
                            // A port that has gone answers that it is closed.
                            let _ = far.send_to(&[5; 900], to);
                        }
                        std::thread::sleep(Duration::from_micros(200));
                    }
                })
            })
            .collect();
        let receivers: Vec<_> = ports
            .into_iter()
            .zip(&answered)
            .enumerate()
            .map(|(at, (mut port, answered))| {
                let (frames, stop) = (&frames, &stop);
                // The first ends first, then the second; the last goes on.
                let most = if at + 1 < usize::from(PORTS) {
                    u64::from(4 * OFFERED) * (at as u64 + 1)
                } else {
                    u64::MAX
                };
                scope.spawn(move || {
                    let mut got = Vec::new();
                    let mut count = 0;
                    while count < most && !stop.load(Ordering::Relaxed) {
                        port.recv(frames, &mut got, 32).expect("received");
                        count += got.len() as u64;
                        let answers: Vec<_> = got.iter().map(|(from, _)| *from).collect();
                        let segments: Vec<Vec<&[u8]>> = got
                            .iter()
                            .map(|(_, bytes)| bytes.segments().collect())
                            .collect();
                        let answers: Vec<Datagram<'_>> = answers
                            .iter()
                            .zip(&segments)
                            .map(|(&to, parts)| Datagram { to, parts })
                            .collect();
                        port.send(&answers).expect("sent");
                        drop(segments);
                        got.clear();
                        answered.store(count, Ordering::Relaxed);
                        std::thread::yield_now();
                    }
                    // What comes now stays in its rings.
                    (at + 1 == usize::from(PORTS)).then_some(port)
                })
            })
            .collect();
        let since = Instant::now();
        let last = &answered[usize::from(PORTS) - 1];
        let others_gone = || {
            receivers[..receivers.len() - 1]
                .iter()
                .all(|one| one.is_finished())
        };
        while !others_gone() {
            assert!(since.elapsed() < PATIENCE, "{answered:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
        let goal = last.load(Ordering::Relaxed) + u64::from(10 * OFFERED);
        while last.load(Ordering::Relaxed) < goal {
            assert!(since.elapsed() < 2 * PATIENCE, "{answered:?} of {goal}");
            std::thread::sleep(Duration::from_millis(5));
        }
        stop.store(true, Ordering::Relaxed);
        senders
            .into_iter()
            .for_each(|one| one.join().expect("sent"));
        let ended = receivers.into_iter().map(|one| one.join().expect("ended"));
        ended.flatten().collect::<Vec<XdpDriver>>()
    });
    assert_eq!(left.len(), 1);
    assert_eq!(left[0].stats().malformed, 0);
    assert_eq!(settled(&mut left, &frames), kept);
    drop(left);
    assert_eq!(frames.free(), frames.count());
}

/// Where the program runs in the network stack too, on kernels that can.
#[test]
fn several_ports_in_the_network_stack() {
    let Some(cable) = Cable::new(9000, 1) else {
        return;
    };
    let (pool_a, pool_b) = (pool(4096, 4096), pool(4096, 4096));
    let open = |address: &str, interface: &str, pool: &Pool| {
        let options = XdpOptions {
            generic: true,
            ..XdpOptions::new(interface)
        };
        XdpDriver::open_ports(address.parse().unwrap(), pool, &options, PORTS)
    };
    cable.a.enter();
    let mut all_a = match open("10.77.0.1:7101", "va", &pool_a) {
        Ok(ports) => ports,
        Err(error @ XdpError::OldKernel { .. }) => {
            println!("{error}");
            assert_eq!(pool_a.free(), pool_a.count());
            return;
        }
        Err(error) => panic!("{error}"),
    };
    cable.b.enter();
    let mut all_b = open("10.77.0.2:7201", "vb", &pool_b).expect("as the other");
    for (number, (a, b)) in (1u64..).zip(all_a.iter_mut().zip(&mut all_b)) {
        let described = a.describe();
        assert!(
            described.contains("generic, copy with several buffers"),
            "{described}"
        );
        introduce(a, b, &pool_b);
        for length in [8, 1400, 8900] {
            let name = (number << 32 | length).to_le_bytes();
            carry(a, b, &pool_b, &[&name, &body(number, length as usize - 8)]);
        }
    }
    all_a.iter().chain(&all_b).for_each(await_sent);
    drop((all_a, all_b));
    assert_eq!(pool_a.free(), pool_a.count());
    assert_eq!(pool_b.free(), pool_b.count());
}

//! Several queues, and the lesser ways.

use std::net::SocketAddr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::*;

/// Several queues: datagrams arrive on the one that the interface chooses, and all of them are
/// served.
#[test]
fn several_queues_serve_one_port() {
    let Some(cable) = Cable::new(1500, 2) else {
        return;
    };
    let options = |name| XdpOptions {
        queues: 2,
        ..XdpOptions::new(name)
    };
    let (pool_a, pool_b) = (pool(4096, 2048), pool(4096, 2048));
    cable.a.enter();
    let mut a = open("10.77.0.1:7101", &pool_a, &options("va"));
    cable.b.enter();
    let mut b = open("10.77.0.2:7102", &pool_b, &options("vb"));
    introduce(&mut a, &mut b, &pool_b);
    let too_many = XdpOptions {
        queues: 3,
        ..XdpOptions::new("va")
    };
    cable.a.enter();
    let refused = XdpDriver::open(a.local_addr(), &pool_a, &too_many).err();
    assert!(
        matches!(refused, Some(XdpError::TooFewQueues { has: 2, .. })),
        "{refused:?}"
    );

    // The interface chooses by the sender's port.
    cable.b.enter();
    let senders = (0..64u8).map(|_| UdpSocket::bind("10.77.0.2:0").expect("a socket"));
    let senders: Vec<UdpSocket> = senders.collect();
    let before = a.received_by_queue();
    let mut got = Vec::new();
    for (number, sender) in senders.iter().enumerate() {
        let name = [number as u8; 20];
        sender.send_to(&name, a.local_addr()).expect("sent");
        let since = Instant::now();
        while got.len() <= number {
            assert!(since.elapsed() < PATIENCE, "{number}: {:?}", a.stats());
            a.recv(&pool_a, &mut got, 32).expect("received");
        }
        let (from, bytes) = &got[number];
        assert_eq!(*from, sender.local_addr().unwrap());
        assert_eq!(bytes.to_vec(), name);
    }
    let each: Vec<u64> = a.received_by_queue();
    let each: Vec<u64> = each
        .iter()
        .zip(before)
        .map(|(now, then)| now - then)
        .collect();
    assert!(each.iter().all(|&count| count >= 8), "{each:?}");
    assert_eq!(each.iter().sum::<u64>(), 64);
    drop(got);
    close(a, &pool_a, 0);
    close(b, &pool_b, 0);
}

/// A log that has most of the frames, as after a restart: each queue gets some to send and receive
/// with, and the rest when there are more.
#[test]
fn a_full_log_leaves_every_queue_some_frames() {
    let Some(cable) = Cable::new(1500, 4) else {
        return;
    };
    let options = |name| XdpOptions {
        queues: 4,
        ..XdpOptions::new(name)
    };
    let (pool_a, pool_b) = (pool(4096, 2048), pool(4096, 2048));
    let log: Vec<_> = (0..4096 - 120).map_while(|_| pool_a.alloc()).collect();
    assert_eq!(pool_a.free(), 120);
    cable.a.enter();
    let mut a = open("10.77.0.1:7101", &pool_a, &options("va"));
    cable.b.enter();
    let mut b = open("10.77.0.2:7102", &pool_b, &options("vb"));
    introduce(&mut a, &mut b, &pool_b);

    // By each queue in both directions: it is chosen by the far port for what is sent, by the
    // interface for what comes.
    let far: Vec<UdpSocket> = (0..32)
        .map(|_| UdpSocket::bind("10.77.0.2:0").expect("a socket"))
        .collect();
    let exchange_with_all = |a: &mut XdpDriver| {
        for (number, socket) in far.iter().enumerate() {
            let name = [number as u8; 20];
            let to = socket.local_addr().expect("bound");
            let before = a.stats();
            socket.send_to(&name, a.local_addr()).expect("sent");
            let (since, mut got) = (Instant::now(), Vec::new());
            while got.is_empty() {
                assert!(since.elapsed() < PATIENCE, "{number}: {:?}", a.stats());
                a.recv(&pool_a, &mut got, 32).expect("received");
            }
            assert_eq!(got[0].0, to);
            let answer = Datagram {
                to,
                parts: &[&name],
            };
            while a.send(&[answer]).expect("sent") == 0 {
                assert!(since.elapsed() < PATIENCE, "{number}: {:?}", a.stats());
            }
            let mut bytes = [0; 100];
            socket.set_read_timeout(Some(PATIENCE)).expect("a time-out");
            assert_eq!(socket.recv(&mut bytes).expect("an answer"), name.len());
            assert_eq!(a.stats().send_full, before.send_full, "{number}");
        }
    };
    // More than a queue has to receive into: what comes back stays what it was.
    for _ in 0..10 {
        exchange_with_all(&mut a);
    }
    assert!(a.received_by_queue().iter().all(|&count| count > 0));
    // The log is trimmed.
    drop(log);
    exchange_with_all(&mut a);
    exchange_with_all(&mut a);
    // Which take what they lack when there is nothing else to do.
    for (driver, pool) in [(&mut a, &pool_a), (&mut b, &pool_b)] {
        let found = driver.recv(pool, &mut Vec::new(), 32).expect("received");
        assert_eq!(found, 0);
        assert_eq!(driver.frames_kept(), pool.count() - pool.free());
    }
    assert_eq!(
        a.frames_kept(),
        b.frames_kept(),
        "what a queue is to have it has"
    );
    close(a, &pool_a, 0);
    close(b, &pool_b, 0);
}

/// Whether a file in this folder is memory, which can be pinned.
fn is_memory(folder: &Path) -> bool {
    let path = std::ffi::CString::new(folder.as_os_str().as_bytes()).expect("a path");
    // SAFETY: plain numbers.
    let mut about: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: a path that ends in a zero byte, and a structure; both live for the call.
    let rc = unsafe { libc::statfs(path.as_ptr(), &raw mut about) };
    assert_eq!(rc, 0, "{}", std::io::Error::last_os_error());
    let kind = about.f_type as u32;
    // tmpfs, ramfs, hugetlbfs.
    [0x0102_1994, 0x8584_58f6, 0x9584_58f6].contains(&kind)
}

/// In the network stack, for cards whose driver knows no XDP; through a pool that cannot be pinned.
#[test]
fn lesser_ways_work_too() {
    let Some(cable) = Cable::new(1500, 1) else {
        return;
    };
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    if is_memory(folder) {
        println!("skipped: {} is not on a disk", folder.display());
        return;
    }
    let clock = Clock(Instant::now());
    let path = folder.join(format!("xdp-region-{}", std::process::id()));
    let options = cyclone_pmem::RegionOptions {
        path: path.clone(),
        len: 8 << 20,
        create: true,
        flush: cyclone_pmem::FlushPolicy::Auto,
    };
    let region = cyclone_pmem::Region::open(&options).unwrap();
    let on_disk = Pool::new(region.take(0, region.len()).unwrap(), 2048);
    std::fs::remove_file(path).unwrap();
    let (at, peer): (SocketAddr, SocketAddr) = (
        "10.77.0.1:7101".parse().unwrap(),
        "10.77.0.2:7102".parse().unwrap(),
    );
    cable.a.enter();
    let driver = open("10.77.0.1:7101", &on_disk, &XdpOptions::new("va"));
    let described = driver.describe();
    assert!(
        described.contains("frames outside the region"),
        "{described}"
    );
    let own = driver.pool().expect("a pool of the driver's own");
    let mut a = end(&cable.a, Box::new(driver), on_disk.clone(), 1);
    cable.b.enter();
    let frames = pool(1024, 2048);
    let generic = XdpOptions {
        generic: true,
        ..XdpOptions::new("vb")
    };
    let driver = open("10.77.0.2:7102", &frames, &generic);
    assert!(driver.describe().contains("generic"));
    let mut b = end(&cable.b, Box::new(driver), frames, 2);
    a.port.add_node(2, peer);
    b.port.add_node(1, at);
    settle(&clock, &mut a, &mut b);
    let before = [a.port.driver_stats(), b.port.driver_stats()];
    exchange(&clock, &mut a, &mut b, 2, &[body(1, 50_000)]);
    exchange(&clock, &mut b, &mut a, 1, &[body(1, 50_000)]);
    for (end, before) in [&a, &b].into_iter().zip(before) {
        let stats = end.port.driver_stats();
        let (received, by_kernel) = (
            stats.received - before.received,
            stats.by_kernel - before.by_kernel,
        );
        assert!(received > 30 && by_kernel * 2 < received, "{stats:?}");
    }
    // None of it lay in the region's frames.
    assert_eq!(on_disk.free(), on_disk.count());
    assert!(own.free() < own.count());
    drop(a);
    assert_eq!(own.free(), own.count());
}

/// What is said at the start tells in which way packets go.
#[test]
fn the_way_is_said() {
    let Some(cable) = Cable::new(1500, 1) else {
        return;
    };
    cable.a.enter();
    for (frame_bytes, single_buffer, generic, said) in [
        (
            2048,
            false,
            false,
            "native, copy with several buffers a packet",
        ),
        (
            2176,
            false,
            false,
            "native, copy with several buffers a packet",
        ),
        (4096, true, false, "native, copy with one buffer a packet"),
        (9216, true, true, "generic, copy with one buffer a packet"),
    ] {
        let frames = pool(1024, frame_bytes);
        let options = XdpOptions {
            single_buffer,
            generic,
            ..XdpOptions::new("va")
        };
        let driver = open("10.77.0.1:7101", &frames, &options);
        let described = driver.describe();
        assert_eq!(
            described,
            format!("AF_XDP on va, 1 of 1 queues, {said}"),
            "{frame_bytes}"
        );
        assert!(!driver.is_zero_copy(), "{generic:?}");
        close(driver, &frames, 0);
    }
}

/// What an interface carries may become less while it is in use: what does not fit any more is cut
/// by the kernel.
#[test]
fn an_interface_that_carries_less_from_now_on_is_noticed() {
    let Some(cable) = Cable::new(9000, 1) else {
        return;
    };
    let clock = Clock(Instant::now());
    let (mut a, mut b) = xdp_pair(&cable, 4096, "10.77.0.1:7101", "10.77.0.2:7102");
    settle(&clock, &mut a, &mut b);
    exchange(&clock, &mut a, &mut b, 2, &[body(1, 50_000)]);
    exchange(&clock, &mut b, &mut a, 1, &[body(1, 50_000)]);
    let by_kernel = a.port.driver_stats().by_kernel;
    cable.a.ip("link set va mtu 1500");
    cable.b.ip("link set vb mtu 1500");
    // What is known of a way is good for a second.
    std::thread::sleep(Duration::from_millis(1_300));
    exchange(&clock, &mut a, &mut b, 2, &[body(2, 50_000)]);
    exchange(&clock, &mut b, &mut a, 1, &[body(2, 50_000)]);
    assert!(a.port.driver_stats().by_kernel > by_kernel + 5);
    // What fits goes straight.
    let before = a.port.driver_stats();
    exchange(&clock, &mut a, &mut b, 2, &[body(3, 1000)]);
    let after = a.port.driver_stats();
    assert!(after.sent > before.sent && after.by_kernel == before.by_kernel);
}

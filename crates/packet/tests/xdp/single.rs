//! Packets in one buffer each, as kernels before 6.6 have them.

use super::*;

fn options(interface: &str) -> XdpOptions {
    XdpOptions {
        single_buffer: true,
        ..XdpOptions::new(interface)
    }
}

/// What lies in the pool is copied behind the headers; nothing waits without limit to have been
/// sent.
#[test]
fn lent_payloads_arrive_in_one_buffer() {
    for (mtu, frame_bytes) in [(1500, 2048), (9000, 4096), (9000, 2176)] {
        let Some(cable) = Cable::new(mtu, 1) else {
            return;
        };
        let (pool_a, pool_b) = (pool(1024, frame_bytes), pool(1024, frame_bytes));
        cable.a.enter();
        let mut a = open("10.77.0.1:7101", &pool_a, &options("va"));
        cable.b.enter();
        let mut b = open("10.77.0.2:7102", &pool_b, &options("vb"));
        introduce(&mut a, &mut b, &pool_b);
        let most = a.max_datagram();
        assert!(most <= frame_bytes as usize - 256, "{most}");
        assert!(most >= 1472, "{most}");
        for (number, size) in (600..most).step_by(50).chain(most - 9..=most).enumerate() {
            let name = (number as u64).to_le_bytes();
            let mut frame = pool_a.alloc().expect("a frame");
            frame.copy_from_slice(&body(number as u64, frame_bytes as usize));
            let frame = frame.freeze(0..frame_bytes as usize);
            // Two parts, either long enough to be lent.
            let (first, second) = frame[..size - name.len()].split_at(290);
            carry(&mut a, &mut b, &pool_b, &[&name, first, second]);
        }
        let too_long = vec![0; most + 1];
        let before = a.stats();
        let datagram = Datagram {
            to: b.local_addr(),
            parts: &[&too_long],
        };
        assert_eq!(a.send(&[datagram]).expect("send"), 1);
        let stats = a.stats();
        assert_eq!(stats.send_errors, before.send_errors + 1);
        assert_eq!(stats.lent_bytes, 0);
        assert!(stats.by_kernel * 5 < stats.sent, "{stats:?}");
        assert_eq!(b.stats().malformed + b.stats().truncated, 0);
        close(a, &pool_a, 0);
        close(b, &pool_b, 0);
    }
}

/// An old kernel and a new one.
#[test]
fn a_port_with_one_buffer_talks_to_one_with_several() {
    let Some(cable) = Cable::new(9000, 1) else {
        return;
    };
    let clock = Clock(Instant::now());
    let (pool_a, pool_b) = (pool(4096, 4096), pool(4096, 4096));
    cable.a.enter();
    let driver = Box::new(open("10.77.0.1:7101", &pool_a, &options("va")));
    let mut a = end(&cable.a, driver, pool_a, 1);
    cable.b.enter();
    let driver = Box::new(xdp("10.77.0.2:7102", "vb", &pool_b));
    let mut b = end(&cable.b, driver, pool_b, 2);
    a.port.add_node(2, "10.77.0.2:7102".parse().unwrap());
    b.port.add_node(1, "10.77.0.1:7101".parse().unwrap());
    settle(&clock, &mut a, &mut b);
    let bodies: Vec<Vec<u8>> = [0, 255, 3000, 9000, 65_000, 200_000]
        .map(|len| body(len as u64, len))
        .into();
    exchange(&clock, &mut a, &mut b, 2, &bodies);
    exchange(&clock, &mut b, &mut a, 1, &bodies);
    for End { port, pool, .. } in [a, b] {
        let stats = port.driver_stats();
        assert!(stats.by_kernel * 10 < stats.received, "{stats:?}");
        assert_eq!(stats.malformed + stats.truncated, 0, "{stats:?}");
        drop(port);
        assert_eq!(pool.free(), pool.count());
    }
}

//! A link that is slower than the sender.

use super::*;

/// Sends on a link of 100 Mbit/s what a socket buffer of 64 KiB does not hold: with UDP each
/// datagram that leaves makes room for the next.
#[test]
fn a_message_longer_than_the_socket_s_buffer_crosses_a_slow_link() {
    let Some(cable) = Cable::new(1500, 1) else {
        return;
    };
    cable.a.enter();
    let limits = "qdisc add dev va root tbf rate 100mbit burst 16kb latency 1s";
    let limited = std::process::Command::new("tc")
        .args(limits.split(' '))
        .status();
    if !limited.is_ok_and(|status| status.success()) {
        println!("skipped: tc cannot limit a link here (the kernel's sch_tbf)");
        return;
    }
    let udp = |address: &str, pool: &Pool, socket_buffer_bytes| {
        let options = UdpOptions {
            socket_buffer_bytes,
            ..UdpOptions::default()
        };
        Box::new(UdpDriver::bind(address.parse().unwrap(), pool, options).expect("bound"))
    };
    let (a, b) = ("10.77.0.1:7101", "10.77.0.2:7102");
    let (pool_a, pool_b) = (pool(4096, 2048), pool(4096, 2048));
    let driver = udp(a, &pool_a, 64 << 10);
    let mut a_end = end(&cable.a, driver, pool_a, 1);
    cable.b.enter();
    let driver = udp(b, &pool_b, 8 << 20);
    let mut b_end = end(&cable.b, driver, pool_b, 2);
    a_end.port.add_node(2, b.parse().unwrap());
    b_end.port.add_node(1, a.parse().unwrap());
    let clock = Clock(Instant::now());
    let bodies: Vec<Vec<u8>> = (0..4).map(|number| body(number, 1_500_000)).collect();
    exchange(&clock, &mut a_end, &mut b_end, 2, &bodies);
    let (stats, driver) = (a_end.port.stats(), a_end.port.driver_stats());
    assert!(driver.send_full > 0, "the buffer was never full");
    assert!(stats.send_deferred > 1000, "{stats:?}");
    assert_eq!(stats.send_dropped, 0);
}

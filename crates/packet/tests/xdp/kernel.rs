//! The kernel's own socket beside the queues: what comes there is found as soon as the host sees that it is readable.

use std::net::UdpSocket;
use std::time::Duration;

use cyclone_packet::Driver;

use crate::common::pool;
use crate::net::Cable;
use crate::xdp;

#[test]
fn a_datagram_on_the_kernel_s_way_is_found_when_its_descriptor_is_readable() {
    let Some(cable) = Cable::new(1500, 1) else {
        return;
    };
    let pool = pool(1024, 2048);
    cable.a.enter();
    let mut driver = xdp("10.77.0.1:7101", "va", &pool);
    // From the same machine, so over its loopback device and past the queues.
    let neighbour = UdpSocket::bind("10.77.0.1:0").expect("a socket");
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

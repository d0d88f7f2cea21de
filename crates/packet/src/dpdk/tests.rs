//! What needs the driver's inside.

use std::net::IpAddr;

use super::frames::{send_mib, send_slots};
use super::network::own_pool;
use super::*;

#[test]
fn clients_need_an_address() {
    let options = DpdkOptions::parse("net_null0").unwrap();
    let any = SocketAddr::from(([0, 0, 0, 0], 0));
    assert_eq!(local_address(any, &options), Err(DpdkError::NoAddress(any)));
    let options = DpdkOptions::parse("net_null0;address=10.0.0.3").unwrap();
    let local = local_address(any, &options).unwrap();
    assert_eq!(local.ip(), IpAddr::from([10, 0, 0, 3]));
    assert!(local.port() >= 0xc000);
    let six = SocketAddr::from((std::net::Ipv6Addr::UNSPECIFIED, 0));
    assert_eq!(local_address(six, &options), Err(DpdkError::NoAddress(six)));
}

/// As cards do that give buffers back only when a slot is used again: all rings keep as many as
/// they have slots, and there is still one for the next packet.
#[test]
fn there_are_buffers_for_every_slot_of_every_ring() {
    let port = |number: u32| {
        let process = std::process::id();
        format!("net_memif{number},role=server,socket=/tmp/cyclone-unit-{process}-{number}.sock")
    };
    let text = format!("{};{}", port(0), port(1));
    let options = DpdkOptions {
        queues: 4,
        ..DpdkOptions::parse(&text).unwrap()
    };
    let pool = own_pool(options.frame_bytes()).unwrap();
    let address = SocketAddr::from(([10, 77, 0, 1], 7101));
    let mut driver = DpdkDriver::open(address, &pool, &options).unwrap();
    let network = Arc::clone(&driver.network);
    let frames = &network.frames;
    let mut slots = 0;
    for (card, outlet) in network.cards.iter().zip(&mut driver.outlets) {
        let each = card.send_slots / u32::from(card.queues());
        for queue in 0..card.queues() {
            for _ in 0..each {
                assert!(outlet.copy(queue, frames, 64).is_some(), "after {slots}");
                slots += 1;
            }
        }
    }
    assert_eq!(slots, 8 * 1024);
    let mut spare = 0;
    while driver.outlets[0].copy(0, frames, 64).is_some() {
        spare += 1;
    }
    assert!(spare >= 512, "no room for a burst: {spare}");
    // Nothing is free: the datagram waits, and goes when there is.
    let to = SocketAddr::from(([10, 77, 0, 2], 7102));
    let template = Template::new([2; 6], address, [4; 6], to).unwrap();
    let parts: [&[u8]; 1] = [&[7; 300]];
    assert!(!driver.put(1, 3, &template, &parts));
    driver.reclaim(&mut TxBackoff::default());
    assert_eq!(driver.stats().copied_bytes, 0);
    for outlet in &mut driver.outlets {
        for queue in 0..outlet.queues() {
            outlet.discard(queue);
        }
    }
    assert!(driver.put(1, 3, &template, &parts));
    assert_eq!(driver.stats().copied_bytes, 300);
    driver.outlets[1].discard(3);
    drop((driver, network));
    assert_eq!(pool.free(), pool.count());
}

#[test]
fn rings_are_long_where_they_are_few() {
    assert_eq!(
        [1, 4, 5, 8, 16, 64].map(send_slots),
        [4096, 4096, 2048, 2048, 1024, 1024]
    );
    assert!(send_mib(1, 1, 1536) < 32);
    assert!(send_mib(16, 1, 1536) < 128);
}

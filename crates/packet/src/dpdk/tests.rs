//! What needs the driver's inside.

use std::net::IpAddr;

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

/// A queue that is always full takes all of a call that begins with it: every other one has to come first as often.
#[test]
fn each_queue_of_each_card_comes_first_in_turn() {
    for (cards, queues) in [(1, 1), (1, 4), (2, 1), (2, 4), (3, 2)] {
        let count = cards * usize::from(queues);
        let mut rotation = Rotation::default();
        let mut first = Vec::new();
        for _ in 0..count {
            let order: Vec<(usize, u16)> = rotation.next(cards, queues).collect();
            let mut sorted = order.clone();
            sorted.sort_unstable();
            sorted.dedup();
            assert_eq!((order.len(), sorted.len()), (count, count));
            assert!(order.iter().all(|&(n, queue)| n < cards && queue < queues));
            first.push(order[0]);
        }
        first.sort_unstable();
        first.dedup();
        assert_eq!(first.len(), count, "{cards} cards, {queues} queues");
    }
    assert_eq!(Rotation::default().next(0, 0).count(), 0);
}

/// As cards do that give buffers back only when a slot is used again: all rings keep as many as they have slots, and there
/// is still one for the next packet.
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
    let frames = driver.frames.take().unwrap();
    let mut slots = 0;
    for card in &mut driver.cards {
        let each = card.send_slots / u32::from(card.queues());
        for queue in 0..card.queues() {
            for _ in 0..each {
                assert!(card.copy(queue, &frames, 64).is_some(), "after {slots}");
                slots += 1;
            }
        }
    }
    assert_eq!(slots, 8 * 1024);
    let mut spare = 0;
    while driver.cards[0].copy(0, &frames, 64).is_some() {
        spare += 1;
    }
    assert!(spare >= 512, "no room for a burst: {spare}");
    driver.frames = Some(frames);
    // Nothing is free: the datagram waits, and goes when there is.
    let to = SocketAddr::from(([10, 77, 0, 2], 7102));
    let template = Template::new([2; 6], address, [4; 6], to).unwrap();
    let parts: [&[u8]; 1] = [&[7; 300]];
    assert!(!driver.put(1, 3, &template, &parts));
    driver.reclaim(&mut Patience::default());
    assert_eq!(driver.stats().copied_bytes, 0);
    for card in &mut driver.cards {
        for queue in 0..card.queues() {
            card.discard(queue);
        }
    }
    assert!(driver.put(1, 3, &template, &parts));
    assert_eq!(driver.stats().copied_bytes, 300);
    driver.cards[1].discard(3);
    drop(driver);
    assert_eq!(pool.free(), pool.count());
}

#[test]
fn rings_are_long_where_they_are_few() {
    assert_eq!(
        [1, 4, 5, 8, 16, 64].map(frames::send_slots),
        [4096, 4096, 2048, 2048, 1024, 1024]
    );
    assert!(frames::send_mib(1, 1536) < 32);
    assert!(frames::send_mib(16, 1536) < 128);
}

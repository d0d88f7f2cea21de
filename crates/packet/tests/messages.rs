//! Messages of all sizes over an unkind network.

mod common;
#[path = "common/inner.rs"]
mod inner;
use std::collections::HashSet;
use std::io;

use common::*;
use cyclone_packet::{
    Datagram, Driver, Faults, MemDriver, MemNet, Outgoing, Peer, Port, PortConfig, Security,
};
use cyclone_pmem::pool::Pool;
use inner::as_inner;
use proptest::prelude::*;

#[test]
fn large_messages_arrive_whole_and_in_frames() {
    for security in [Security::Off, Security::Authenticated, Security::Encrypted] {
        let (_net, mut a, mut b) = pair(Faults::default(), security);
        for (i, len) in [1, 1408, 1409, 2816, 65_536, 1_200_000]
            .into_iter()
            .enumerate()
        {
            let bytes = numbered(i as u64, len);
            send(&mut a, 0, Peer::Node(2), &bytes);
            let (_, at_b) = settle(0, &mut a, &mut b);
            // Even the queue takes one message whatever its size.
            assert_eq!(at_b.len(), 1, "{len} bytes");
            assert!(at_b[0].body.to_vec() == bytes);
        }
        assert_eq!(send(&mut a, 0, Peer::Node(2), &vec![0; (2 << 20) + 1]), 0);
        assert_eq!((a.stats().too_large, b.stats().copied_spare_bytes), (1, 0));
        let copied = b.stats().copied_crypt_bytes;
        assert_eq!(copied > 0, security == Security::Encrypted);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases.div_ceil(4), ..ProptestConfig::default() })]
    #[test]
    fn parts_cut_anywhere_arrive_as_their_concatenation(lens in proptest::collection::vec(0usize..4000, 0..12), encrypted in any::<bool>()) {
        let security = if encrypted { Security::Encrypted } else { Security::Authenticated };
        let (_net, mut a, mut b) = pair(Faults::default(), security);
        let parts: Vec<Vec<u8>> = lens.iter().enumerate().map(|(i, len)| vec![i as u8; *len]).collect();
        let slices: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
        send(&mut a, 0, Peer::Node(2), b"first");
        settle(0, &mut a, &mut b);
        let message = Outgoing { to: Peer::Node(2), parts: &slices };
        prop_assert_eq!(a.send(0, &[message, message]).unwrap(), 2);
        let (_, at_b) = settle(0, &mut a, &mut b);
        prop_assert_eq!(bodies(&at_b), vec![parts.concat(); 2]);
    }
}

#[test]
fn peers_with_unequal_frames_agree_on_the_smaller() {
    let net = MemNet::new(1, Faults::default());
    let mut a = port(&net, 1, node_config(1, 1));
    let driver = Box::new(net.driver(address(2), 65_000));
    let mut b = cyclone_packet::Port::new(driver, pool(256, 65_536), node_config(2, 2)).unwrap();
    a.add_node(2, address(2));
    b.add_node(1, address(1));
    for (number, len) in [(1, 500_000), (2, 2 << 20)] {
        let bytes = numbered(number, len);
        send(&mut a, 0, Peer::Node(2), &bytes);
        assert!(settle(0, &mut a, &mut b).1[0].body.to_vec() == bytes);
        send(&mut b, 0, Peer::Node(1), &bytes);
        assert!(settle(0, &mut a, &mut b).0[0].body.to_vec() == bytes);
    }
    assert_eq!(a.driver_stats().truncated + b.driver_stats().truncated, 0);
    let copied = b.stats().copied_spare_bytes as usize;
    assert!(copied <= 500_000 + (2 << 20) && copied > 2 << 20);
}

#[test]
fn thousands_of_slices_in_one_message() {
    let (_net, mut a, mut b) = pair(Faults::default(), Security::Authenticated);
    send(&mut a, 0, Peer::Node(2), b"first");
    settle(0, &mut a, &mut b);
    let bytes = numbered(1, 10_000);
    let slices: Vec<&[u8]> = bytes.chunks(1).collect();
    a.send(
        0,
        &[Outgoing {
            to: Peer::Node(2),
            parts: &slices,
        }],
    )
    .unwrap();
    assert_eq!(bodies(&settle(0, &mut a, &mut b).1), [bytes]);
    assert!(a.stats().copied_crypt_bytes >= 9_000, "the copy is counted");
}

#[test]
fn what_arrives_over_a_bad_network_is_intact_and_comes_once() {
    for security in [Security::Authenticated, Security::Encrypted] {
        for seed in 0..8 {
            bad_network(
                seed,
                security,
                Faults {
                    loss: 0.2,
                    duplicate: 0.2,
                    reorder: 0.2,
                    ..Faults::default()
                },
            );
            bad_network(
                seed,
                security,
                Faults {
                    loss: 0.05,
                    duplicate: 0.2,
                    reorder: 0.2,
                    corrupt: 0.1,
                    truncate: 0.05,
                },
            );
        }
    }
    bad_network(
        99,
        Security::Off,
        Faults {
            loss: 0.2,
            duplicate: 0.2,
            reorder: 0.2,
            ..Faults::default()
        },
    );
}

fn bad_network(seed: u64, security: Security, faults: Faults) {
    let net = MemNet::new(seed, faults);
    let mut a = port(
        &net,
        1,
        PortConfig {
            security,
            ..node_config(1, 1)
        },
    );
    let mut b = port(
        &net,
        2,
        PortConfig {
            security,
            ..node_config(2, 2)
        },
    );
    let mut c = port(
        &net,
        3,
        PortConfig {
            security,
            ..client_config(3)
        },
    );
    a.add_node(2, address(2));
    b.add_node(1, address(1));
    c.add_node(2, address(2));
    let mut seen = [HashSet::new(), HashSet::new(), HashSet::new()];
    let (mut number, mut at_once) = (0u64, 0);
    for ms in 0..1500u64 {
        let now_us = ms * 1000;
        let sizes = [8, 200, 1400, 5000, 30_000];
        let mut messages = Vec::new();
        for _ in 0..3 {
            number += 1;
            messages.push(numbered(number, sizes[(number % 5) as usize]));
        }
        send(&mut a, now_us, Peer::Node(2), &messages[0]);
        send(&mut b, now_us, Peer::Node(1), &messages[1]);
        send(&mut c, now_us, Peer::Node(2), &messages[2]);
        at_once = at_once.max(b.stats().partials / b.stats().associations.max(1));
        for (port, seen) in [&mut a, &mut b, &mut c].into_iter().zip(&mut seen) {
            for message in poll(port, now_us) {
                let bytes = message.body.to_vec();
                let number = number_of(&bytes);
                assert!(seen.insert(number), "message {number} came twice");
                // Numbers 1, 4, 7... come from a, 2, 5, 8... from b, the others from the client.
                let from = match number % 3 {
                    1 => message.from == Peer::Node(1),
                    2 => message.from == Peer::Node(2),
                    _ => matches!(message.from, Peer::Client(_)),
                };
                assert!(from, "message {number} from {:?}", message.from);
            }
        }
    }
    let got: usize = seen.iter().map(HashSet::len).sum();
    assert!(got > 1500, "seed {seed}: {got} of {number}");
    assert!(
        at_once <= 64,
        "{at_once} partial messages held per association"
    );
    for port in [&mut a, &mut b, &mut c] {
        poll(port, 60_000_000);
        assert_eq!(port.stats().partials, 0);
    }
}

#[test]
fn held_frames_never_stop_a_port_from_receiving() {
    // A log that keeps every frame it is given would starve the receiver of the very
    // acknowledgements that let it be trimmed.
    let net = MemNet::new(1, Faults::default());
    let mut a = port(&net, 1, node_config(1, 1));
    let driver = Box::new(net.driver(address(2), 1500));
    let mut b = cyclone_packet::Port::new(driver, pool(64, 2048), node_config(2, 2)).unwrap();
    a.add_node(2, address(2));
    let mut held = Vec::new();
    for i in 0..1000u64 {
        send(&mut a, i, Peer::Node(2), &numbered(i, 100));
        held.extend(settle(i, &mut a, &mut b).1);
    }
    assert_eq!(held.len(), 1000);
    for (i, message) in held.iter().enumerate() {
        assert_eq!(number_of(&message.body.to_vec()), i as u64);
    }
    assert!(b.stats().copied_spare_bytes > 0);
}

/// A driver that cannot reach the memory it is given.
struct Apart(MemDriver, Pool);

impl Driver for Apart {
    fn send(&mut self, datagrams: &[Datagram<'_>]) -> io::Result<usize> {
        self.0.send(datagrams)
    }

    as_inner!();

    fn pool(&self) -> Option<Pool> {
        Some(self.1.clone())
    }
}

#[test]
fn frames_outside_the_given_memory_are_reported() {
    let (net, mut a, mut b) = pair(Faults::default(), Security::Authenticated);
    assert_eq!(b.stats().frames_outside, 0);
    let (given, own) = (pool(64, 2048), pool(256, 2048));
    let driver = Apart(net.driver(address(2), 1500), own.clone());
    b = Port::new(Box::new(driver), given.clone(), node_config(2, 3)).unwrap();
    assert_eq!(b.stats().frames_outside, 1);
    send(&mut a, 0, Peer::Node(2), &numbered(1, 3000));
    let got = settle(0, &mut a, &mut b).1;
    assert_eq!(bodies(&got), [numbered(1, 3000)]);
    assert_eq!(given.free(), given.count());
    assert!(own.free() < own.count(), "the message lies there");
}

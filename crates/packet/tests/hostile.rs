//! Garbage, forgeries and replays: counted, dropped, and nothing else.

mod common;
use common::*;
use cyclone_packet::{Faults, Identity, Keys, MemNet, Peer, PortConfig, Security};
use proptest::prelude::*;

#[test]
fn forged_replayed_truncated_and_garbage_datagrams_are_counted_and_dropped() {
    for security in [Security::Authenticated, Security::Encrypted] {
        let (net, mut a, mut b) = pair(Faults::default(), security);
        send(&mut a, 0, Peer::Node(2), b"hello");
        settle(0, &mut a, &mut b);
        net.capture();
        send(&mut a, 0, Peer::Node(2), &numbered(1, 300));
        let (from, to, datagram) = net.captured().remove(0);
        assert_eq!(poll(&mut b, 0).len(), 1);
        let before = b.stats();
        // The same again.
        net.inject(from, to, &datagram);
        assert!(poll(&mut b, 0).is_empty());
        assert_eq!(b.stats().replayed, before.replayed + 1);
        // Every bit of it flipped, with a sequence number not seen.
        let mut fresh = datagram.clone();
        fresh[12] ^= 64;
        for bit in 0..fresh.len() * 8 {
            let mut bad = fresh.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            if bad[12..20] != datagram[12..20] {
                net.inject(from, to, &bad);
                assert!(poll(&mut b, 0).is_empty(), "bit {bit}");
            }
        }
        // Cut at every length.
        for len in 0..datagram.len() {
            net.inject(from, to, &fresh[..len]);
            assert!(poll(&mut b, 0).is_empty(), "cut to {len}");
        }
        let after = b.stats();
        assert!(after.forged > before.forged + 2000 && after.malformed > before.malformed + 300);
        assert_eq!(after.messages_received, before.messages_received);
        poll(&mut a, 0);
        send(&mut a, 50, Peer::Node(2), b"still");
        assert_eq!(bodies(&settle(50, &mut a, &mut b).1), [b"still"]);
    }
}

proptest! {
    #[test]
    fn garbage_is_never_delivered_and_answers_are_never_longer(
        datagrams in proptest::collection::vec((proptest::collection::vec(any::<u8>(), 0..300), 0u8..8, 0usize..6), 1..200)
    ) {
        let net = MemNet::new(1, Faults::default());
        let mut b = port(&net, 2, node_config(2, 2));
        net.driver(address(66), 1500);
        net.capture();
        for (mut bytes, kind, len) in datagrams {
            // Mostly things that look like ours.
            bytes.resize([bytes.len(), 12, 48, 96, 112, 60][len], 0);
            if bytes.len() > 4 && kind > 0 {
                bytes[..2].copy_from_slice(&[0xC9, kind]);
                bytes[2] %= 3;
                bytes[3] %= 3;
            }
            net.inject(address(66), address(2), &bytes);
            net.captured();
            prop_assert!(poll(&mut b, 0).is_empty());
            let answered: usize = net.captured().iter().map(|(.., answer)| answer.len()).sum();
            prop_assert!(answered <= bytes.len(), "{} bytes draw {}", bytes.len(), answered);
        }
        prop_assert_eq!(b.stats().associations, 0);
    }
}

#[test]
fn hellos_from_invented_addresses_leave_nothing_behind() {
    let net = MemNet::new(1, Faults::default());
    let mut b = port(&net, 2, node_config(2, 2));
    net.capture();
    let mut a = port(&net, 1, node_config(1, 1));
    a.add_node(2, address(2));
    send(&mut a, 0, Peer::Node(2), b"x");
    let (_, to, hello) = net.captured().remove(0);
    for i in 0..10_000u16 {
        net.inject(address(1000 + i), to, &hello);
    }
    poll(&mut b, 0);
    assert_eq!(b.stats().associations, 0);
    for (from, _, answer) in net.captured().into_iter().skip(10_000) {
        assert!(from != address(2) || answer.len() <= hello.len());
    }
}

#[test]
fn a_client_cannot_send_as_a_node() {
    let net = MemNet::new(1, Faults::default());
    let mut b = port(&net, 2, node_config(2, 2));
    b.add_node(1, address(1));
    // A client that calls itself node 1, with the only key it has in place of the node key.
    let keys = Keys {
        node: Some(CLIENT_KEY),
        client: CLIENT_KEY,
    };
    let mut liar = port(&net, 1, PortConfig::new(Identity::Node(1), keys, [5; 16]));
    liar.add_node(2, address(2));
    send(&mut liar, 0, Peer::Node(2), b"vote for me");
    assert!(settle(0, &mut liar, &mut b).1.is_empty());
    assert_eq!((b.stats().forged, b.stats().associations), (1, 0));
    // A client's own association delivers as a client's, from whatever address.
    let mut client = port(&net, 1, client_config(6));
    client.add_node(2, address(2));
    send(&mut client, 0, Peer::Node(2), b"vote for me");
    let (_, at_b) = settle(0, &mut client, &mut b);
    assert!(matches!(at_b[0].from, Peer::Client(_)));
    assert!(!b.is_connected(Peer::Node(1)));
}

#[test]
fn notices_are_rationed() {
    let net = MemNet::new(1, Faults::default());
    let mut b = port(
        &net,
        2,
        PortConfig {
            security: Security::Authenticated,
            ..node_config(2, 2)
        },
    );
    let header = cyclone_packet::header::DataHeader {
        assoc: 1,
        seq: 0,
        total: 0,
        index: 0,
        count: 0,
    };
    for i in 0..10_000u64 {
        net.inject(address(9), address(2), &header.encode());
        poll(&mut b, 1_000_000 + i);
    }
    assert_eq!(b.stats().unknown_association, 10_000);
    assert!(b.stats().notices_sent <= 64 + 10);
}

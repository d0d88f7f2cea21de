//! Handshakes: made on demand, survive loss, restarts and old datagrams.

mod common;
use common::*;
use cyclone_packet::{Faults, MemNet, Peer, Port, PortConfig, ProbeOutcome, Security};

#[test]
fn the_first_message_waits_for_the_handshake_and_arrives() {
    for security in [Security::Off, Security::Authenticated, Security::Encrypted] {
        let (_net, mut a, mut b) = pair(Faults::default(), security);
        assert_eq!(send(&mut a, 0, Peer::Node(2), b"one"), 1);
        assert_eq!(send(&mut a, 0, Peer::Node(2), b""), 1);
        let (_, at_b) = settle(0, &mut a, &mut b);
        assert_eq!(bodies(&at_b), [b"one".to_vec(), vec![]]);
        assert_eq!(at_b[0].from, Peer::Node(1));
        // The association serves both directions.
        send(&mut b, 0, Peer::Node(1), b"two");
        let (at_a, _) = settle(0, &mut a, &mut b);
        assert_eq!(
            (bodies(&at_a), at_a[0].from),
            (vec![b"two".to_vec()], Peer::Node(2))
        );
        assert_eq!(
            (a.stats().associations_made, b.stats().associations_made),
            (1, 1)
        );
        poll(&mut a, 1_000_000);
        assert_eq!(
            a.next_timeout(),
            None,
            "an idle node has nothing to wait for"
        );
    }
}

#[test]
fn nodes_that_greet_each_other_at_once_understand_each_other() {
    let (_net, mut a, mut b) = pair(Faults::default(), Security::Authenticated);
    send(&mut a, 0, Peer::Node(2), b"to b");
    send(&mut b, 0, Peer::Node(1), b"to a");
    let (at_a, at_b) = settle(0, &mut a, &mut b);
    assert_eq!(
        (bodies(&at_a), bodies(&at_b)),
        (vec![b"to a".to_vec()], vec![b"to b".to_vec()])
    );
    for i in 0..20u8 {
        send(&mut a, 0, Peer::Node(2), &[i]);
        send(&mut b, 0, Peer::Node(1), &[i]);
        let (at_a, at_b) = settle(0, &mut a, &mut b);
        assert_eq!(
            (bodies(&at_a), bodies(&at_b)),
            (vec![vec![i]], vec![vec![i]])
        );
    }
}

#[test]
fn clients_talk_to_nodes_and_get_answers() {
    let net = MemNet::new(1, Faults::default());
    let mut node = port(&net, 1, node_config(1, 1));
    let mut clients: Vec<_> = (0..5)
        .map(|i| port(&net, 10 + i, client_config(10 + i as u8)))
        .collect();
    for (i, client) in clients.iter_mut().enumerate() {
        client.add_node(1, address(1));
        send(client, 0, Peer::Node(1), &[i as u8]);
        let (_, at_node) = settle(0, client, &mut node);
        assert!(
            matches!(at_node[0].from, Peer::Client(_)),
            "a client is never a node"
        );
        let answer = [at_node[0].body.to_vec(), b"!".to_vec()].concat();
        send(&mut node, 0, at_node[0].from, &answer);
        let (at_client, _) = settle(0, client, &mut node);
        assert_eq!(
            (bodies(&at_client), at_client[0].from),
            (vec![vec![i as u8, b'!']], Peer::Node(1))
        );
    }
    assert_eq!(send(&mut node, 0, Peer::Client(12345), b"x"), 0);
    assert_eq!(node.stats().no_association, 1);
}

#[test]
fn a_restarted_side_is_back_within_a_round_trip() {
    let (net, mut a, mut b) = pair(Faults::default(), Security::Authenticated);
    send(&mut a, 0, Peer::Node(2), b"before");
    settle(0, &mut a, &mut b);
    // b restarts with a new boot value and knows nothing.
    let mut b = port(&net, 2, node_config(2, 77));
    b.add_node(1, address(1));
    send(&mut a, 1000, Peer::Node(2), b"lost");
    assert!(settle(1000, &mut a, &mut b).1.is_empty());
    assert_eq!(
        (b.stats().unknown_association, a.stats().notices_heeded),
        (1, 1)
    );
    send(&mut a, 1100, Peer::Node(2), b"after");
    assert_eq!(bodies(&settle(1100, &mut a, &mut b).1), [b"after"]);
    // And the side that restarts speaks first.
    let mut a = port(&net, 1, node_config(1, 78));
    a.add_node(2, address(2));
    send(&mut a, 1200, Peer::Node(2), b"again");
    assert_eq!(bodies(&settle(1200, &mut a, &mut b).1), [b"again"]);
    send(&mut b, 1300, Peer::Node(1), b"back");
    assert_eq!(bodies(&settle(1300, &mut a, &mut b).0), [b"back"]);
}

#[test]
fn handshakes_survive_loss_and_give_up_on_the_dead() {
    for seed in 0..50 {
        let net = MemNet::new(
            seed,
            Faults {
                loss: 0.4,
                duplicate: 0.2,
                reorder: 0.3,
                ..Faults::default()
            },
        );
        let mut a = port(&net, 1, node_config(1, 1));
        let mut b = port(&net, 2, node_config(2, 2));
        a.add_node(2, address(2));
        let mut got = 0;
        for ms in 0..3000u64 {
            if ms % 20 == 0 {
                send(&mut a, ms * 1000, Peer::Node(2), &numbered(ms, 20));
            }
            poll(&mut a, ms * 1000);
            got += poll(&mut b, ms * 1000).len();
        }
        assert!(got > 60, "seed {seed}: {got} of 150");
    }
    let (net, mut a, _) = pair(Faults::default(), Security::Authenticated);
    net.block(address(1), address(2));
    for ms in 0..2100u64 {
        if ms < 100 {
            send(&mut a, ms * 1000, Peer::Node(2), b"no node");
        }
        poll(&mut a, ms * 1000);
    }
    let stats = a.stats();
    assert_eq!(
        (stats.queued, stats.queue_dropped, stats.handshake_timeouts),
        (64, 100, 1)
    );
    assert_eq!(a.next_timeout(), None);
}

#[test]
fn replayed_handshakes_disturb_nothing_and_leave_no_state() {
    let (net, mut a, mut b) = pair(Faults::default(), Security::Authenticated);
    net.capture();
    send(&mut a, 0, Peer::Node(2), b"one");
    settle(0, &mut a, &mut b);
    let old = net.captured();
    for now_us in [10, 1_000_000, 3_999_999, 9_000_000] {
        for _ in 0..3 {
            for (from, to, bytes) in &old {
                net.inject(*from, *to, bytes);
            }
            let (at_a, at_b) = settle(now_us, &mut a, &mut b);
            assert!(
                at_a.is_empty() && at_b.is_empty(),
                "replayed data was delivered"
            );
        }
        send(&mut a, now_us, Peer::Node(2), b"x");
        send(&mut b, now_us, Peer::Node(1), b"y");
        let (at_a, at_b) = settle(now_us, &mut a, &mut b);
        assert_eq!((at_a.len(), at_b.len()), (1, 1));
    }
    assert_eq!(
        (a.stats().associations_made, b.stats().associations_made),
        (1, 1)
    );
    assert_eq!(b.stats().associations, 1);
    // Even to a node that has forgotten the association in the meantime.
    b.remove_node(9_000_000, 1);
    for (from, to, bytes) in &old {
        net.inject(*from, *to, bytes);
    }
    assert!(settle(9_000_001, &mut a, &mut b).1.is_empty());
}

#[test]
fn a_forgotten_association_cannot_be_made_again_by_its_confirm() {
    let (net, mut a, mut b) = pair(Faults::default(), Security::Authenticated);
    net.capture();
    send(&mut a, 0, Peer::Node(2), b"one");
    settle(0, &mut a, &mut b);
    let old = net.captured();
    b.remove_node(100, 1);
    for (from, to, bytes) in &old {
        net.inject(*from, *to, bytes);
    }
    assert!(
        poll(&mut b, 200).is_empty(),
        "the same message a second time"
    );
    assert_eq!(b.stats().associations_made, 1);
}

#[test]
fn a_forged_notice_only_causes_a_new_handshake() {
    let (net, mut a, mut b) = pair(Faults::default(), Security::Authenticated);
    net.capture();
    send(&mut a, 0, Peer::Node(2), b"one");
    settle(0, &mut a, &mut b);
    let data = net
        .captured()
        .into_iter()
        .map(|(.., bytes)| bytes)
        .find(|b| b[1] == 4)
        .unwrap();
    let assoc = u64::from_le_bytes(data[4..12].try_into().unwrap());
    for i in 0..1000u64 {
        net.inject(
            address(2),
            address(1),
            &cyclone_packet::header::encode_unknown(assoc),
        );
        net.inject(
            address(2),
            address(1),
            &cyclone_packet::header::encode_unknown(i),
        );
        send(&mut a, 1000 + i, Peer::Node(2), &numbered(i, 8));
        send(&mut b, 1000 + i, Peer::Node(1), &numbered(i, 8));
        let (at_a, at_b) = settle(1000 + i, &mut a, &mut b);
        assert_eq!(
            (at_a.len(), at_b.len()),
            (1, 1),
            "nothing is lost meanwhile"
        );
    }
    assert!(a.stats().handshakes_started <= 2 && a.stats().notices_ignored > 1900);
}

/// The association that the last captured datagram of data from `from` was on.
fn captured_assoc(net: &MemNet, from: u16) -> Option<u64> {
    let sent = net.captured();
    let is_data = |bytes: &[u8]| bytes[1] == 4;
    let mut backwards = sent.iter().rev();
    let data = backwards.find(|(at, _, bytes)| *at == address(from) && is_data(bytes))?;
    let id = data.2[4..12].try_into().expect("eight bytes");
    Some(u64::from_le_bytes(id))
}

/// An attacker that sees which associations messages use can name them in notices, again and again:
/// more handshakes than the other side keeps associations for.
#[test]
fn forged_notices_again_and_again_cost_no_message() {
    for is_client in [false, true] {
        let (net, mut a, mut b) = pair(Faults::default(), Security::Authenticated);
        if is_client {
            a = port(&net, 1, client_config(1));
            a.add_node(2, address(2));
        }
        net.capture();
        send(&mut a, 0, Peer::Node(2), b"one");
        let mut from = settle(0, &mut a, &mut b).1[0].from;
        for step in 1..=120u64 {
            let now_us = step * 25_000;
            let named = captured_assoc(&net, 1).expect("a message was sent");
            let notice = cyclone_packet::header::encode_unknown(named);
            net.inject(address(2), address(1), &notice);
            send(&mut a, now_us, Peer::Node(2), &numbered(step, 8));
            send(&mut b, now_us, from, &numbered(step, 8));
            let (at_a, at_b) = settle(now_us, &mut a, &mut b);
            assert_eq!((at_a.len(), at_b.len()), (1, 1), "step {step}");
            from = at_b[0].from;
        }
        // A node has no more than its peer accepts, and one that it tries.
        let held = (a.stats().associations, b.stats().associations);
        assert!(is_client || held.0 <= 9 && held.1 <= 8, "{held:?}");
    }
}

/// It confirms the new association without a message to send, and once more if that is lost.
#[test]
fn a_restarted_side_that_has_nothing_to_say_is_reached_after_few_round_trips() {
    for is_client in [false, true] {
        for is_lossy in [false, true] {
            let (net, mut a, mut b) = pair(Faults::default(), Security::Authenticated);
            if is_client {
                a = port(&net, 1, client_config(1));
                a.add_node(2, address(2));
            }
            send(&mut a, 0, Peer::Node(2), b"before");
            settle(0, &mut a, &mut b);
            let mut b = port(&net, 2, node_config(2, 77));
            // A round trip each.
            let reached = (1..100u64).find(|step| {
                let now_us = 10_000 + step * 1000;
                send(&mut a, now_us, Peer::Node(2), &numbered(*step, 8));
                match step {
                    // The notice and the Challenge have passed.
                    3 if is_lossy => net.block(address(2), address(1)),
                    5 => net.unblock(address(2), address(1)),
                    _ => {}
                }
                let got = poll(&mut b, now_us);
                poll(&mut a, now_us);
                !got.is_empty()
            });
            let most = if is_lossy { 12 } else { 4 };
            assert!(reached.is_some_and(|it| it <= most), "{reached:?}");
            assert_eq!(a.stats().handshakes_started, 2);
        }
    }
}

#[test]
fn too_many_clients_push_out_the_idlest_and_the_young_are_safe() {
    let net = MemNet::new(1, Faults::default());
    let mut node = port(
        &net,
        1,
        PortConfig {
            max_clients: 3,
            client_idle_us: 60_000_000,
            ..node_config(1, 1)
        },
    );
    let mut clients: Vec<_> = (0..5)
        .map(|i| port(&net, 10 + i, client_config(10 + i as u8)))
        .collect();
    let mut reach = |i: usize, now_us: u64, node: &mut cyclone_packet::Port| {
        clients[i].add_node(1, address(1));
        send(&mut clients[i], now_us, Peer::Node(1), b"x");
        settle(now_us, &mut clients[i], node).1.len()
    };
    assert_eq!((0..3).map(|i| reach(i, 0, &mut node)).sum::<usize>(), 3);
    assert_eq!(reach(3, 1_000_000, &mut node), 0);
    assert_eq!(node.stats().associations_refused, 1);
    assert_eq!(reach(0, 5_000_000, &mut node), 1);
    assert_eq!(reach(2, 5_000_001, &mut node), 1);
    assert_eq!(reach(4, 5_000_002, &mut node), 1);
    assert_eq!(node.stats().associations, 3);
    poll(&mut node, 70_000_000);
    assert_eq!(node.stats().associations, 0, "all idle");
    // A client whose association is gone finds its way back.
    assert_eq!(reach(2, 70_000_001, &mut node), 0);
    assert_eq!(reach(2, 70_000_002, &mut node), 1);
}

#[test]
fn ports_of_another_mode_or_key_or_id_get_nowhere() {
    let net = MemNet::new(1, Faults::default());
    let mut b = port(&net, 2, node_config(2, 2));
    let mut other = node_config(1, 1);
    other.keys.node = Some([1; 32]);
    let configs = [
        PortConfig {
            security: Security::Encrypted,
            ..node_config(1, 1)
        },
        PortConfig {
            security: Security::Off,
            ..node_config(1, 1)
        },
        other,
        node_config(2, 3),
    ];
    for config in configs {
        let mut a = port(&net, 1, config);
        a.add_node(2, address(2));
        send(&mut a, 0, Peer::Node(2), b"x");
        let (_, at_b) = settle(0, &mut a, &mut b);
        assert!(at_b.is_empty());
    }
    let mut a = port(&net, 1, node_config(1, 1));
    a.add_node(9, address(2));
    send(&mut a, 0, Peer::Node(9), b"x");
    settle(0, &mut a, &mut b);
    let stats = b.stats();
    assert_eq!(
        (stats.mode_mismatch, stats.forged, stats.wrong_node),
        (2, 1, 2)
    );
    assert_eq!(stats.associations, 0);
}

/// The outcome of a probe, and how long it took.
fn probed(a: &mut Port, others: &mut [&mut Port], from_us: u64) -> (ProbeOutcome, u64) {
    let mut now_us = from_us;
    loop {
        poll(a, now_us);
        for other in others.iter_mut() {
            poll(other, now_us);
        }
        if let Some(outcome) = a.take_probe_outcome() {
            return (outcome, now_us - from_us);
        }
        now_us += 1_000;
        assert!(now_us < from_us + 10_000_000, "no outcome");
    }
}

#[test]
fn probe_is_answered_by_the_node_of_that_id_and_key_only() {
    for security in [Security::Off, Security::Authenticated, Security::Encrypted] {
        let (net, mut a, mut b) = pair(Faults::default(), security);
        let secured = |config| PortConfig { security, ..config };
        let mut third = port(&net, 3, secured(node_config(3, 3)));
        let mut foreign = secured(node_config(4, 4));
        foreign.keys.node = Some([1; 32]);
        let mut foreign = port(&net, 4, foreign);
        let before = (a.stats().associations_made, b.stats().associations_made);
        for (id, at, answers) in [
            (2, 2, true),
            // Node 3 is known to no node, and answers where it is.
            (3, 3, true),
            (2, 3, false),
            (3, 2, false),
            (2, 9, false),
            (4, 4, false),
        ] {
            assert!(a.probe(0, id, address(at)));
            let others = &mut [&mut b, &mut third, &mut foreign];
            let (outcome, took_us) = probed(&mut a, others, 0);
            let expected = ProbeOutcome {
                id,
                address: address(at),
                answered: answers,
            };
            assert_eq!(outcome, expected, "{security:?}");
            assert!(took_us <= 1_001_000, "{took_us}");
        }
        let after = (a.stats().associations_made, b.stats().associations_made);
        assert_eq!(after, before, "nothing is made");
        // Messages go where they went.
        send(&mut a, 5_000_000, Peer::Node(2), b"as ever");
        assert_eq!(bodies(&settle(5_000_000, &mut a, &mut b).1), [b"as ever"]);
    }
}

#[test]
fn probe_survives_loss() {
    let faults = Faults {
        loss: 0.4,
        ..Faults::default()
    };
    let (_net, mut a, mut b) = pair(faults, Security::Authenticated);
    for round in 0..20 {
        let from_us = round * 10_000_000;
        assert!(a.probe(from_us, 2, address(2)));
        assert!(probed(&mut a, &mut [&mut b], from_us).0.answered, "{round}");
    }
}

use super::*;

const MAC: [Mac; 4] = [
    [2, 0, 0, 0, 0, 1],
    [2, 0, 0, 0, 0, 2],
    [2, 0, 0, 0, 0, 3],
    [2, 0, 0, 0, 0, 4],
];

fn at(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

/// Carries calls to and fro between two ends, port by port, until neither end has more to say.
fn carry(now_us: u64, mut calls: Vec<OutgoingPacket>, a: &mut Neighbours, b: &mut Neighbours) {
    let mut at_b = true;
    for _ in 0..4 {
        let mut more = Vec::new();
        for (port, packet) in calls {
            let to = if at_b { &mut *b } else { &mut *a };
            assert!(to.on_packet(now_us, port, &packet, &mut more));
        }
        (calls, at_b) = (more, !at_b);
    }
    assert!(calls.is_empty());
}

#[test]
fn asked_once_then_known_both_ways_until_it_is_old() {
    for (one, other) in [("10.0.0.1:1", "10.0.0.2:2"), ("[fd77::1]:1", "[fd77::2]:2")] {
        let (one, other) = (at(one), at(other));
        let mut a = Neighbours::new(one.ip(), None, vec![MAC[0]]);
        let mut b = Neighbours::new(other.ip(), None, vec![MAC[1]]);
        let mut calls = Vec::new();
        assert_eq!(a.find(0, other, &mut calls), None);
        assert_eq!(a.find(1, other, &mut calls), None);
        assert_eq!(calls.len(), 1, "not asked twice at once");
        carry(2, calls, &mut a, &mut b);
        let mut calls = Vec::new();
        assert_eq!(a.find(3, other, &mut calls), Some((0, MAC[1])));
        assert!(b.find(3, one, &mut calls).is_some(), "who asked is known");
        assert!(calls.is_empty());
        // Old, but good: asked for again meanwhile.
        assert!(a.find(STALE_US + 5, other, &mut calls).is_some());
        assert_eq!(calls.len(), 1);
        assert_eq!(a.find(REACHABLE_US + 5, other, &mut calls), None);
    }
}

#[test]
fn group_reports_are_sent_every_minute_and_twice_with_our_address_for_a_new_cable() {
    let mut ours = Neighbours::new(at("[fd77::1]:1").ip(), None, vec![MAC[0], MAC[1]]);
    let mut announced = |now_us, is_up| {
        let mut calls = Vec::new();
        ours.announce(now_us, 1, is_up, &mut calls);
        assert!(calls.iter().all(|(port, _)| *port == 1));
        calls.len()
    };
    let minute = REPORT_EVERY_US;
    for (now_us, is_up, expected) in [
        (0, false, 0),
        (10, true, 2),
        (ANNOUNCE_AGAIN_US, true, 0),
        (ANNOUNCE_AGAIN_US + 10, true, 2),
        (minute, true, 0),
        (minute + ANNOUNCE_AGAIN_US + 10, true, 1),
        (2 * minute, true, 0),
        (2 * minute + 1, false, 0),
        (2 * minute + 2, true, 2),
    ] {
        assert_eq!(announced(now_us, is_up), expected, "{now_us}");
    }
    // Over IPv4 questions go to everybody: only our address is announced.
    let mut v4 = Neighbours::new(at("10.0.0.1:1").ip(), None, vec![MAC[0]]);
    let mut calls = Vec::new();
    for now_us in [0, ANNOUNCE_AGAIN_US, REPORT_EVERY_US, 2 * REPORT_EVERY_US] {
        v4.announce(now_us, 0, true, &mut calls);
    }
    let announcement = (0, discovery::announcement(MAC[0], [10, 0, 0, 1].into()));
    assert_eq!(calls, [announcement.clone(), announcement]);
}

/// A machine that knows us by a cable that is out now would go on sending there.
#[test]
fn the_other_ports_tell_where_we_are_when_a_cable_is_out() {
    for own in ["10.0.0.1", "fd77::1"] {
        let own: IpAddr = own.parse().expect("an address");
        let mut ours = Neighbours::new(own, None, vec![MAC[0], MAC[1], MAC[2]]);
        let announcement = |ours: &mut Neighbours, now_us, up: [bool; 3]| {
            let mut calls = Vec::new();
            for (port, is_up) in up.into_iter().enumerate() {
                ours.announce(now_us, port, is_up, &mut calls);
            }
            let is_news = |(port, packet): &OutgoingPacket| {
                *packet == discovery::announcement(MAC[*port], own)
            };
            let ports = calls.iter().filter(|call| is_news(call));
            ports.map(|(port, _)| *port).collect::<Vec<usize>>()
        };
        let up = [true, true, false];
        assert_eq!(announcement(&mut ours, 0, up), [0, 1]);
        assert_eq!(announcement(&mut ours, ANNOUNCE_AGAIN_US, up), [0, 1]);
        assert!(announcement(&mut ours, 2 * ANNOUNCE_AGAIN_US, up).is_empty());
        ours.forget(1);
        let up = [true, false, false];
        assert_eq!(announcement(&mut ours, 2 * ANNOUNCE_AGAIN_US + 1, up), [0]);
        assert_eq!(announcement(&mut ours, 3 * ANNOUNCE_AGAIN_US + 1, up), [0]);
        assert!(announcement(&mut ours, 5 * ANNOUNCE_AGAIN_US, up).is_empty());
        assert_eq!(
            announcement(&mut ours, 6 * ANNOUNCE_AGAIN_US, [true, true, false]),
            [1]
        );

        // Who knows us hears of it.
        let peer = SocketAddr::new(own, 1);
        let mut other = match own {
            IpAddr::V4(_) => Neighbours::new(at("10.0.0.2:1").ip(), None, vec![MAC[3]]),
            IpAddr::V6(_) => Neighbours::new(at("[fd77::2]:1").ip(), None, vec![MAC[3]]),
        };
        other.find(0, peer, &mut Vec::new());
        for mac in [MAC[1], MAC[0]] {
            let mut answers = Vec::new();
            assert!(other.on_packet(1, 0, &discovery::announcement(mac, own), &mut answers));
            assert!(answers.is_empty(), "no machine is asked");
            assert_eq!(other.find(2, peer, &mut answers), Some((0, mac)));
        }
    }
}

#[test]
fn several_ports_are_used_in_turn_and_dead_ones_are_not() {
    let peer = |port: u16| SocketAddr::from(([10, 0, 0, 2], port));
    let mut a = Neighbours::new(at("10.0.0.1:1").ip(), None, vec![MAC[0], MAC[1]]);
    let mut b = Neighbours::new(at("10.0.0.2:1").ip(), None, vec![MAC[2], MAC[3]]);
    let mut calls = Vec::new();
    assert_eq!(a.find(0, peer(1), &mut calls), None);
    assert_eq!(calls.len(), 2, "asked by every port");
    carry(0, calls, &mut a, &mut b);
    let used = |a: &mut Neighbours| {
        let mut used = [0; 2];
        for port in 1..=20 {
            used[a.find(1, peer(port), &mut Vec::new()).unwrap().0] += 1;
        }
        used
    };
    let before = used(&mut a);
    assert!(before.iter().all(|&count| count >= 8), "{before:?}");
    assert_eq!(used(&mut a), before);
    a.forget(0);
    assert_eq!(used(&mut a), [0, 20]);
}

/// Machines with one port number share the cables and queues; so do ports of one machine, and
/// machines whose ports are numbered as they are.
#[test]
fn destinations_are_spread_over_cables_and_queues() {
    type Row = fn(u16) -> SocketAddr;
    let rows: [Row; 4] = [
        |n| SocketAddr::from(([10, 0, 0, n as u8], 7000)),
        |n| SocketAddr::from(([10, 0, 0, 2], 7000 + n)),
        |n| SocketAddr::from(([10, 0, 0, n as u8], 7100 + n)),
        |n| SocketAddr::from(([0xfd77, 0, 0, 0, 0, 0, 0, n], 7000)),
    ];
    for (number, row) in rows.iter().enumerate() {
        for (ways, queues) in [(1, 2), (2, 1), (2, 2), (1, 4), (3, 1)] {
            let mut used = vec![0; ways * queues];
            for n in 1..=48 {
                let (way, rest) = share(flow_hash(row(n)), ways);
                used[way * queues + share(rest, queues).0] += 1;
            }
            let least = 48 / used.len() * 3 / 4;
            assert!(used.iter().all(|&n| n >= least), "{number}: {used:?}");
        }
        let two = (1..=3).map(|n| share(flow_hash(row(n)), 2).0);
        assert!((1..=2).contains(&two.sum::<usize>()), "{number}");
    }
    assert_eq!(share(flow_hash(rows[0](1)), 0).0, 0);
}

/// A cable that is out behind a switch: our link stays up, and no machine answers by it.
#[test]
fn a_port_without_answers_is_left_out_until_one_comes() {
    for (own, other) in [("10.0.0.1:1", "10.0.0.2:1"), ("[fd77::1]:1", "[fd77::2]:1")] {
        let peer = |port| SocketAddr::new(at(other).ip(), port);
        let mut a = Neighbours::new(at(own).ip(), None, vec![MAC[0], MAC[1]]);
        let mut b = Neighbours::new(at(other).ip(), None, vec![MAC[2], MAC[3]]);
        let mut asked = 0;
        // The second cable is out from 5 s to 20 s.
        for now_us in (0..30_000_000).step_by(100_000) {
            let out = (5_000_000..20_000_000).contains(&now_us);
            let mut calls = Vec::new();
            let mut used = [0; 2];
            for port in 1..=20 {
                if let Some((port, _)) = a.find(now_us, peer(port), &mut calls) {
                    used[port] += 1;
                }
            }
            asked += calls.len();
            calls.retain(|(port, _)| !out || *port == 0);
            carry(now_us, calls, &mut a, &mut b);
            match now_us {
                0 => assert_eq!(used, [0, 0]),
                10_000_000..20_000_000 => assert_eq!(used, [20, 0], "{now_us}"),
                2_000_000..5_000_000 | 23_000_000.. => {
                    assert!(used.iter().all(|&count| count >= 8), "{now_us}: {used:?}");
                }
                _ => assert_eq!(used.iter().sum::<i32>(), 20),
            }
        }
        assert!((50..=62).contains(&asked), "once a second: {asked}");
    }
}

#[test]
fn with_one_port_no_machine_is_asked_every_second() {
    let (own, peer) = (at("10.0.0.1:1"), at("10.0.0.2:2"));
    let mut a = Neighbours::new(own.ip(), None, vec![MAC[0]]);
    let mut b = Neighbours::new(peer.ip(), None, vec![MAC[1]]);
    let mut asked = 0;
    for now_us in (0..STALE_US).step_by(100_000) {
        let mut calls = Vec::new();
        a.find(now_us, peer, &mut calls);
        asked += calls.len();
        carry(now_us, calls, &mut a, &mut b);
    }
    assert_eq!(asked, 1);
}

#[test]
fn strangers_are_reached_by_the_gateway() {
    let gateway = Some(([10, 0, 0, 254].into(), 24));
    let mut a = Neighbours::new(at("10.0.0.1:1").ip(), gateway, vec![MAC[0]]);
    let mut router = Neighbours::new(at("10.0.0.254:1").ip(), None, vec![MAC[1]]);
    let mut calls = Vec::new();
    assert_eq!(a.find(0, at("192.0.2.9:7"), &mut calls), None);
    carry(0, calls, &mut a, &mut router);
    let found = a.find(1, at("192.0.2.9:7"), &mut Vec::new());
    assert_eq!(found, Some((0, MAC[1])));
    let mut calls = Vec::new();
    assert_eq!(
        a.find(1, at("10.0.0.9:7"), &mut calls),
        None,
        "a neighbour that was never heard"
    );
    assert_eq!(calls.len(), 1);
    assert_eq!(
        a.find(1, at("[fd77::1]:7"), &mut calls),
        None,
        "the other family"
    );
}

#[test]
fn unasked_news_is_not_kept() {
    let mut a = Neighbours::new(at("10.0.0.1:1").ip(), None, vec![MAC[0]]);
    let mut calls = Vec::new();
    for number in 0..=255u8 {
        let announcement = discovery::answer(
            MAC[1],
            [10, 0, 9, number].into(),
            MAC[0],
            [10, 0, 0, 1].into(),
        );
        assert!(a.on_packet(0, 0, &announcement.unwrap(), &mut calls));
    }
    assert!(a.entries.is_empty() && calls.is_empty());
    // Nor is anybody believed who claims our own address.
    let lie = discovery::answer(MAC[1], [10, 0, 0, 1].into(), MAC[0], [10, 0, 0, 1].into());
    assert!(a.on_packet(0, 0, &lie.unwrap(), &mut calls));
    assert!(a.entries.is_empty());
}

/// The machine with this number, not one of those that the tests name.
fn numbered(number: u32) -> SocketAddr {
    SocketAddr::from((0x0b00_0000_u32.wrapping_add(number).to_be_bytes(), 9))
}

#[test]
fn strangers_push_out_strangers_only() {
    let (own, peer, late) = (at("10.0.0.1:1"), at("10.0.0.2:2"), at("10.0.0.3:3"));
    let mut a = Neighbours::new(own.ip(), None, vec![MAC[0], MAC[1]]);
    let mut b = Neighbours::new(peer.ip(), None, vec![MAC[2], MAC[3]]);
    let mut c = Neighbours::new(late.ip(), None, vec![MAC[2], MAC[3]]);
    let mut calls = Vec::new();
    assert_eq!(a.find(0, peer, &mut calls), None);
    carry(0, calls, &mut a, &mut b);
    let mut questions = 0;
    for number in 0..50_000u32 {
        let now_us = u64::from(number) * 1000;
        let mut calls = Vec::new();
        assert_eq!(a.find(now_us, numbered(number), &mut calls), None);
        questions += calls.len();
        assert!(a.entries.len() <= MAX_NEIGHBOURS && a.unresolved.len() <= MAX_NEIGHBOURS);
        let mut calls = Vec::new();
        assert!(a.find(now_us, peer, &mut calls).is_some(), "{number}");
        carry(now_us, calls, &mut a, &mut b);
        // Somebody new is found all the same, and who asks is known.
        if number == 20_000 {
            let mut calls = Vec::new();
            assert_eq!(a.find(now_us, late, &mut calls), None);
            carry(now_us, calls, &mut a, &mut c);
        }
        if number == 30_000 {
            let mut calls = Vec::new();
            let asks = discovery::solicitation(MAC[2], [10, 0, 0, 4].into(), own.ip(), None);
            assert!(a.on_packet(now_us, 0, &asks.unwrap(), &mut calls));
            assert_eq!(calls.len(), 1);
        }
    }
    assert_eq!(questions, 100_000, "each was asked for by both ports");
    for known in [peer, late, at("10.0.0.4:4")] {
        assert!(!a.entries[&known.ip()].is_unresolved());
    }
    // A cable that is out for a while makes no neighbour a stranger.
    a.forget(0);
    a.forget(1);
    for number in 50_000..60_000 {
        let now_us = u64::from(number) * 1000;
        a.find(now_us, numbered(number), &mut Vec::new());
    }
    assert!(a.entries.contains_key(&peer.ip()));
}

#[test]
fn questions_for_strangers_are_few_and_known_machines_are_not_counted() {
    let (own, peer) = (at("10.0.0.1:1"), at("10.0.0.2:2"));
    let mut a = Neighbours::new(own.ip(), None, vec![MAC[0]]);
    let mut b = Neighbours::new(peer.ip(), None, vec![MAC[1]]);
    let mut calls = Vec::new();
    assert_eq!(a.find(0, peer, &mut calls), None);
    carry(0, calls, &mut a, &mut b);
    let mut asked = Vec::new();
    for number in 0..100_000u32 {
        // In a second, new ones and the same again.
        let now_us = u64::from(number) * 10;
        a.find(now_us, numbered(number % 5000), &mut asked);
    }
    let most = UNRESOLVED_BURST + 1_000_000 / UNRESOLVED_EVERY_US;
    assert!(asked.len() as u64 <= most, "{} questions", asked.len());
    // Known neighbours are asked for again although the strangers have used up theirs.
    let stale_us = STALE_US + 5;
    for number in 0..1000 {
        a.find(stale_us, numbered(number), &mut Vec::new());
    }
    let mut calls = Vec::new();
    assert!(a.find(stale_us, peer, &mut calls).is_some());
    assert_eq!(calls.len(), 1);
}

#[test]
fn of_too_many_machines_the_one_not_heard_for_the_longest_time_goes() {
    let own = at("10.0.0.1:1");
    let mut a = Neighbours::new(own.ip(), None, vec![MAC[0]]);
    let entries = MAX_NEIGHBOURS as u32;
    let asks =
        |number| discovery::solicitation(MAC[1], numbered(number).ip(), own.ip(), None).unwrap();
    for number in 0..entries + 10 {
        // The second asks first. Those for whom there is no room are answered, and not kept.
        let mut calls = Vec::new();
        assert!(a.on_packet((number ^ 1).into(), 0, &asks(number), &mut calls));
        assert_eq!(calls.len(), 1);
    }
    assert_eq!(a.entries.len(), MAX_NEIGHBOURS);
    for number in 0..1000 {
        let now_us = 10_000 + u64::from(number) * UNRESOLVED_EVERY_US;
        a.find(now_us, numbered(entries + 20 + number), &mut Vec::new());
    }
    assert_eq!(a.entries.len(), MAX_NEIGHBOURS);
    let gone = (0..entries).filter(|n| !a.entries.contains_key(&numbered(*n).ip()));
    assert_eq!(gone.collect::<Vec<u32>>(), [1]);
}

//! Queues of drivers that are full.

mod common;
#[path = "common/inner.rs"]
mod inner;
use std::cell::Cell;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use common::*;
use cyclone_packet::{
    Datagram, Driver, Faults, MemDriver, MemNet, Outgoing, Peer, Port, PortConfig, Security,
};
use inner::as_inner;

/// How many datagrams the queue has room for: to all, and to one peer alone.
#[derive(Default)]
struct Room {
    all: usize,
    /// Nothing goes there, and the others' datagrams pass it over.
    shut: Option<SocketAddr>,
}

/// A driver whose queue has room for what the test says.
struct Narrow(MemDriver, Arc<Mutex<Room>>, Vec<usize>);

impl Driver for Narrow {
    fn send(&mut self, datagrams: &[Datagram<'_>]) -> io::Result<usize> {
        let mut room = self.1.lock().unwrap();
        self.2.clear();
        for (at, datagram) in datagrams.iter().enumerate() {
            if room.shut == Some(datagram.to) {
                self.2.push(at);
                continue;
            }
            if room.all == 0 {
                self.2.retain(|skipped| *skipped < at);
                return Ok(at);
            }
            room.all -= 1;
            self.0.send(&[*datagram])?;
        }
        Ok(datagrams.len())
    }

    fn skipped(&self) -> &[usize] {
        &self.2
    }

    fn is_multiqueue(&self) -> bool {
        self.1.lock().unwrap().shut.is_some()
    }

    as_inner!();
}

/// Node 1 with its own queue, and nodes 2 and 3, all acquainted.
struct World {
    net: MemNet,
    room: Arc<Mutex<Room>>,
    sender: Port,
    receivers: [Port; 2],
    now_us: Cell<u64>,
}

impl World {
    fn new(security: Security) -> World {
        World::with(security, 2 << 20)
    }

    /// With messages up to this length.
    fn with(security: Security, max_message: usize) -> World {
        let frames = (4096 * max_message as u64) >> 21;
        let net = MemNet::new(1, Faults::default());
        let room = Arc::new(Mutex::new(Room {
            all: usize::MAX,
            shut: None,
        }));
        let driver = Narrow(net.driver(address(1), 1500), Arc::clone(&room), Vec::new());
        let config = |id, boot| PortConfig {
            security,
            max_message,
            ..node_config(id, boot)
        };
        let mut sender = Port::new(Box::new(driver), pool(frames, 2048), config(1, 1)).unwrap();
        let mut receivers = [2u8, 3].map(|id| {
            let driver = net.driver(address(id.into()), 1500);
            Port::new(Box::new(driver), pool(frames, 2048), config(id.into(), id)).unwrap()
        });
        for (id, receiver) in (2..).zip(&mut receivers) {
            sender.add_node(id, address(id as u16));
            receiver.add_node(1, address(1));
            send(&mut sender, 0, Peer::Node(id), b"first");
            settle(0, &mut sender, receiver);
        }
        World {
            net,
            room,
            sender,
            receivers,
            now_us: Cell::new(0),
        }
    }

    /// Lets 100 us pass, in which the queue makes room for so many; answers what arrived at whom.
    fn pass(&mut self, more: usize) -> Vec<(usize, Vec<u8>)> {
        let now_us = self.now_us.get() + 100;
        self.now_us.set(now_us);
        self.room.lock().unwrap().all = more;
        self.sender.poll(now_us, &mut Vec::new()).unwrap();
        let mut got = Vec::new();
        for (at, receiver) in self.receivers.iter_mut().enumerate() {
            let mut out = Vec::new();
            while receiver.poll(now_us, &mut out).unwrap() > 0 {}
            got.extend(out.iter().map(|message| (at, message.body.to_vec())));
        }
        got
    }

    fn send(&mut self, to: u64, bytes: &[u8]) -> usize {
        send(&mut self.sender, self.now_us.get(), Peer::Node(to), bytes)
    }
}

#[test]
fn a_message_longer_than_the_queue_arrives_a_little_at_a_time() {
    for security in [Security::Off, Security::Authenticated, Security::Encrypted] {
        let mut world = World::new(security);
        let bytes = numbered(7, 2 << 20);
        world.room.lock().unwrap().all = 100;
        assert_eq!(world.send(2, &bytes), 1, "kept");
        assert!(world.sender.next_timeout().is_some_and(|at| at <= 100));
        let mut got = Vec::new();
        for _ in 0..200 {
            got.extend(world.pass(10));
        }
        assert!(got == [(0, bytes)], "{} messages", got.len());
        let stats = world.sender.stats();
        assert_eq!(stats.send_dropped, 0);
        assert!(stats.send_deferred > 1300, "{}", stats.send_deferred);
        // No thread is woken without need.
        assert!(world.sender.next_timeout().is_none_or(|at| at > 100_000));
    }
}

#[test]
fn order_is_kept_and_short_messages_overtake() {
    let mut world = World::new(Security::Authenticated);
    world.room.lock().unwrap().all = 50;
    let long = [numbered(1, 300_000), numbered(2, 200_000)];
    let next = numbered(3, 1000);
    world.send(2, &long[0]);
    world.send(2, &long[1]);
    world.send(2, &next);
    let mut order = Vec::new();
    for round in 0..200u64 {
        if round % 10 == 0 {
            // Its queue has room again.
            world.room.lock().unwrap().all = 1;
            world.send(2, &numbered(100 + round, 40));
        }
        order.extend(world.pass(5).into_iter().map(|(_, bytes)| bytes));
    }
    let ours: Vec<u64> = order
        .iter()
        .map(|bytes| number_of(bytes))
        .filter(|n| *n < 100)
        .collect();
    assert_eq!(ours, [1, 2, 3]);
    let first_long = order
        .iter()
        .position(|bytes| number_of(bytes) == 1)
        .unwrap();
    assert!(first_long >= 4, "heartbeats came before: {first_long}");
    assert_eq!(order.len(), 3 + 20);
    let replayed: u64 = world
        .receivers
        .iter()
        .map(|port| port.stats().replayed)
        .sum();
    assert_eq!(replayed, 0);
}

#[test]
fn a_peer_that_takes_nothing_delays_no_other_and_is_given_up() {
    let mut world = World::new(Security::Authenticated);
    world.room.lock().unwrap().shut = Some(address(2));
    let (dead, alive) = (numbered(1, 400_000), numbered(2, 400_000));
    world.room.lock().unwrap().all = 20;
    let parts = [[&dead[..]], [&alive[..]]];
    let burst = [(2, &parts[0]), (3, &parts[1])].map(|(to, parts)| Outgoing {
        to: Peer::Node(to),
        parts,
    });
    assert_eq!(world.sender.send(0, &burst).unwrap(), 2);
    let mut got = Vec::new();
    for _ in 0..100 {
        got.extend(world.pass(20));
    }
    assert!(got == [(1, alive)]);
    for _ in 0..1100 {
        got.extend(world.pass(20));
    }
    assert_eq!((got.len(), world.sender.stats().send_dropped), (1, 1));
    assert!(
        world
            .sender
            .next_timeout()
            .is_none_or(|at| at > world.now_us.get() + 10_000)
    );
    // It lives again.
    world.room.lock().unwrap().shut = None;
    world.send(2, &numbered(4, 5000));
    assert!(world.pass(20) == [(0, numbered(4, 5000))]);
    // What waited for it comes in order.
    world.room.lock().unwrap().shut = Some(address(2));
    let both = [numbered(5, 50_000), numbered(6, 50_000)];
    for bytes in &both {
        world.send(2, bytes);
    }
    for _ in 0..5 {
        assert!(world.pass(20).is_empty());
    }
    world.room.lock().unwrap().shut = None;
    let mut got = Vec::new();
    for _ in 0..20 {
        got.extend(world.pass(20));
    }
    assert!(got == both.map(|bytes| (0, bytes)));
}

#[test]
fn what_waits_is_bounded() {
    let mut world = World::new(Security::Authenticated);
    world.room.lock().unwrap().all = 0;
    let bytes = numbered(1, 2 << 20);
    let kept: usize = (0..20).map(|_| world.send(2, &bytes)).sum();
    assert!((4..=9).contains(&kept), "{kept}");
    assert!(world.sender.stats().send_dropped > 0);
}

#[test]
fn two_long_messages_go_one_after_the_other_and_none_is_given_up() {
    let mut world = World::new(Security::Authenticated);
    world.room.lock().unwrap().all = 0;
    let long = [
        numbered(1, 400_000),
        numbered(2, 400_000),
        numbered(3, 2000),
    ];
    world.send(2, &long[0]);
    world.send(3, &long[1]);
    world.send(2, &long[2]);
    let mut got = Vec::new();
    // 2 Mbit/s: one of them alone takes longer than what stands still is kept for.
    for round in 0..3000 {
        got.extend(world.pass(usize::from(round % 4 == 0)));
    }
    let stats = world.sender.stats();
    assert_eq!(stats.send_dropped, 0);
    let [first, second, third] = long;
    let arrived: Vec<(usize, u64)> = got
        .iter()
        .map(|(at, bytes)| (*at, number_of(bytes)))
        .collect();
    assert!(got == [(0, first), (1, second), (0, third)], "{arrived:?}");
}

#[test]
fn what_is_short_and_found_no_room_goes_before_what_is_long() {
    let mut world = World::new(Security::Encrypted);
    world.room.lock().unwrap().all = 0;
    world.send(2, &numbered(1, 100_000));
    world.send(2, &numbered(2, 40));
    world.send(2, &numbered(3, 1000));
    let mut order = Vec::new();
    for _ in 0..40 {
        order.extend(
            world
                .pass(4)
                .into_iter()
                .map(|(_, bytes)| number_of(&bytes)),
        );
    }
    assert_eq!(order, [2, 1, 3]);
}

#[test]
fn what_is_short_does_not_overtake_more_than_the_receiver_remembers() {
    let mut world = World::with(Security::Authenticated, 16 << 20);
    world.room.lock().unwrap().all = 180;
    // Some 8,600 datagrams, and one that has its number behind all of them.
    let (long, short) = (numbered(1, 12 << 20), numbered(2, 40));
    let parts = [[&long[..]], [&short[..]]];
    let burst = [&parts[0], &parts[1]].map(|parts| Outgoing {
        to: Peer::Node(2),
        parts,
    });
    assert_eq!(world.sender.send(0, &burst).unwrap(), 2);
    let mut got = Vec::new();
    for _ in 0..200 {
        got.extend(world.pass(180));
    }
    let arrived: Vec<u64> = got.iter().map(|(_, bytes)| number_of(bytes)).collect();
    assert_eq!(arrived, [1, 2]);
    assert_eq!(world.receivers[0].stats().replayed, 0);
}

#[test]
fn messages_to_replicas_have_separate_room_and_go_first() {
    let mut world = World::new(Security::Authenticated);
    let mut client = port(&world.net, 4, client_config(4));
    client.add_node(1, address(1));
    send(&mut client, 0, Peer::Node(1), b"request");
    let (_, at_node) = settle(0, &mut client, &mut world.sender);
    let whose = at_node[0].from;
    assert!(matches!(whose, Peer::Client(_)));
    world.room.lock().unwrap().all = 0;
    // Answers of all lengths, until no more are kept.
    for len in [200_000, 20_000, 2000, 20] {
        while send(&mut world.sender, 0, whose, &numbered(len, len as usize)) > 0 {}
    }
    let refused = world.sender.stats().send_dropped;
    assert!(refused > 0);
    let to_replicas = [
        (2, numbered(1, 40)),
        (3, numbered(2, 40)),
        (2, numbered(3, 100_000)),
    ];
    for (to, bytes) in &to_replicas {
        assert_eq!(world.send(*to, bytes), 1, "kept");
    }
    assert_eq!(world.sender.stats().send_dropped, refused);
    let mut order = Vec::new();
    let answered = client.stats().datagrams_received;
    while order.len() < 3 {
        assert!(world.now_us.get() < 20_000, "{order:?}");
        order.extend(
            world
                .pass(4)
                .into_iter()
                .map(|(_, bytes)| number_of(&bytes)),
        );
        poll(&mut client, world.now_us.get());
    }
    assert_eq!(order, [1, 2, 3]);
    // 72 datagrams, and as many to clients meanwhile.
    let answered = client.stats().datagrams_received - answered;
    assert!((50..100).contains(&answered), "{answered}");
}

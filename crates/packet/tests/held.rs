//! A holder of a client's key begins as many messages as it can and ends none: what they take, as
//! the reassembly counts it and as the allocator does, stays within the bound. Messages of others
//! pass meanwhile.

mod common;
use std::alloc::{GlobalAlloc, Layout, System};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use common::*;
use cyclone_packet::fragment::{Limits, Outcome, Reassembler};
use cyclone_packet::header::{DataHeader, Kind};
use cyclone_packet::{Faults, MemNet, Peer, Port, PortConfig, Security};
use cyclone_pmem::payload::Payload;

/// The system's allocator, and how many bytes are out.
struct Counting;

static OUT: AtomicUsize = AtomicUsize::new(0);

// SAFETY: everything is passed on as it came; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        OUT.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        OUT.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// One test at a time: they count what the process has.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn out() -> usize {
    OUT.load(Ordering::Relaxed)
}

/// A server's defaults.
const MAX_MESSAGE: usize = 5 << 20;
const HELD_BYTES: usize = 4 * MAX_MESSAGE;
/// What is not the reassembly's, or so little that it is not counted.
const SLACK: usize = 1 << 20;

/// A message of as many fragments as there can be.
fn widest(assoc: u64, first: u64, index: u16) -> DataHeader {
    DataHeader {
        assoc,
        seq: first + u64::from(index),
        total: MAX_MESSAGE as u32,
        index,
        count: (MAX_MESSAGE / 256) as u16,
    }
}

fn reassembler() -> Reassembler {
    let limits = Limits {
        max_message: MAX_MESSAGE,
        held_bytes: HELD_BYTES,
        per_association: 64,
        timeout_us: 1_000_000,
    };
    Reassembler::new(limits, 2048)
}

#[test]
fn messages_that_are_only_begun_take_no_more_than_the_bound() {
    let _alone = alone();
    // The first fragments of each, or those at the far end.
    for (each, from_end) in [(1u16, false), (1, true), (2, true), (5, false), (70, false)] {
        let mut r = reassembler();
        let before = out();
        let mut is_full = false;
        for number in 0..100_000 / u64::from(each) {
            let (assoc, first) = (number / 64, number % 64 * 30_000);
            for index in 0..each {
                let index = match from_end {
                    true => widest(0, 0, 0).count - 1 - index,
                    false => index,
                };
                let header = widest(assoc, first, index);
                let piece = Payload::from_vec(vec![1; 256]);
                let outcome = r.add(number, &header, false, piece);
                assert!(matches!(outcome, Outcome::Kept | Outcome::NoRoom));
                is_full |= matches!(outcome, Outcome::NoRoom);
            }
            let taken = out() - before;
            assert!(r.held_bytes() <= HELD_BYTES, "{}", r.held_bytes());
            assert!(
                taken <= r.held_bytes() + SLACK,
                "{taken} bytes are taken, {} are counted, by {} messages",
                r.held_bytes(),
                r.len()
            );
        }
        assert!(r.dropped() > 0 || is_full, "the bound was never reached");
        r.expire(u64::MAX);
        assert!(r.is_empty() && r.held_bytes() == 0);
    }
}

#[test]
fn the_widest_message_passes_in_any_order() {
    let _alone = alone();
    let count = widest(1, 0, 0).count;
    let mut shuffled: Vec<u16> = (0..count).collect();
    shuffled.sort_by_key(|index| index.wrapping_mul(40_503));
    let in_order = (0..count).collect();
    let backwards = (0..count).rev().collect();
    for order in [in_order, backwards, shuffled] {
        let mut r = reassembler();
        let mut whole = None;
        for index in order {
            let piece = Payload::from_vec(vec![(index % 251) as u8; 256]);
            if let Outcome::Whole(body) = r.add(0, &widest(1, 9, index), false, piece) {
                whole = Some(body.to_vec());
            }
        }
        let whole = whole.expect("whole");
        assert_eq!(whole.len(), MAX_MESSAGE);
        let mut pieces = (0u16..).zip(whole.chunks(256));
        assert!(pieces.all(|(index, piece)| piece.iter().all(|b| *b == (index % 251) as u8)));
        assert!(r.is_empty() && r.held_bytes() == 0 && r.dropped() == 0);
    }
}

/// A client and the id of its association with node 1.
fn client(net: &MemNet, server: &mut Port, number: u16) -> (SocketAddr, u64) {
    let at = address(100 + number);
    let mut config = client_config(1);
    config.security = Security::Off;
    config.boot[2..4].copy_from_slice(&number.to_le_bytes());
    let driver = Box::new(net.driver(at, 1500));
    let mut port = Port::new(driver, pool(8, 2048), config).expect("a port");
    port.add_node(1, address(1));
    net.capture();
    send(&mut port, 0, Peer::Node(1), b"hello");
    settle(0, &mut port, server);
    let data = |bytes: &[u8]| Kind::of(bytes) == Some(Kind::Data);
    let mine = net
        .captured()
        .into_iter()
        .find(|(from, _, bytes)| *from == at && data(bytes));
    let (_, _, bytes) = mine.expect("a separate message");
    let header = DataHeader::parse(&bytes).expect("a header");
    (at, header.assoc)
}

/// By a whole port, over many associations. Without tags, since it is about those who could make
/// them.
#[test]
fn a_server_that_clients_flood_with_beginnings() {
    const CLIENTS: u16 = 400;
    let _alone = alone();
    let net = MemNet::new(1, Faults::default());
    let config = |id| PortConfig {
        security: Security::Off,
        max_message: MAX_MESSAGE,
        ..node_config(id, id as u8)
    };
    let driver = |at| Box::new(net.driver(address(at), 1500));
    let mut server = Port::new(driver(1), pool(16 << 10, 2048), config(1)).expect("a port");
    let mut other = Port::new(driver(2), pool(16 << 10, 2048), config(2)).expect("a port");
    other.add_node(1, address(1));
    server.add_node(2, address(2));
    send(&mut other, 0, Peer::Node(1), b"hello");
    settle(0, &mut other, &mut server);
    let clients: Vec<(SocketAddr, u64)> = (0..CLIENTS)
        .map(|number| client(&net, &mut server, number))
        .collect();

    let before = out();
    let mut most = 0;
    for round in 0..64 {
        let now_us = round * 1000;
        for (at, assoc) in &clients {
            let header = widest(*assoc, 100 + round * 25_000, 0);
            let mut datagram = header.encode().to_vec();
            datagram.resize(datagram.len() + 256, 1);
            net.inject(*at, address(1), &datagram);
            assert!(poll(&mut server, now_us).is_empty());
            drop(net.captured());
            most = most.max(out() - before);
            assert!(
                most <= HELD_BYTES + SLACK,
                "{most} bytes are taken by {} messages",
                server.stats().partials
            );
        }
        if round % 16 == 15 {
            // Nodes are understood whatever clients do.
            let body = numbered(round, MAX_MESSAGE);
            send(&mut other, now_us, Peer::Node(1), &body);
            let got = settle(now_us, &mut other, &mut server).1;
            assert_eq!(bodies(&got), [body], "{:?}", server.stats());
        }
    }
    assert_eq!(server.stats().malformed, 0);
    assert!(server.stats().partials_dropped > 0, "{:?}", server.stats());
    // And clients, while no node pushes them out.
    let mut config = client_config(200);
    config.security = Security::Off;
    config.max_message = MAX_MESSAGE;
    let mut honest = Port::new(driver(3), pool(64, 2048), config).expect("a port");
    honest.add_node(1, address(1));
    send(&mut honest, 64_000, Peer::Node(1), b"hello");
    settle(64_000, &mut honest, &mut server);
    let body = numbered(3, 2 << 20);
    send(&mut honest, 64_000, Peer::Node(1), &body);
    let got = settle(64_000, &mut honest, &mut server).1;
    assert_eq!(bodies(&got), [body], "{:?}", server.stats());
}

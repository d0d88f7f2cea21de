//! Whatever datagrams come to a port, from a peer that it knows and from others, without tags in
//! the way: no frame is lost, and another peer is understood as ever.
#![no_main]

use std::net::SocketAddr;

use cyclone_packet::{
    Faults, Identity, Keys, MemNet, Message, Outgoing, Peer, Port, PortConfig, Security,
};
use cyclone_pmem::{Pool, Region};
use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;

/// Bytes of a header that say of which association a datagram is.
const NAMED: usize = 12;
const FRAMES: u64 = 256;

#[derive(Arbitrary, Debug)]
struct Said {
    /// Begins as the known peer's datagrams do.
    from_peer: bool,
    later_us: u16,
    bytes: Vec<u8>,
}

fn address(port: u16) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, 1], port))
}

fn port(net: &MemNet, id: u16) -> Port {
    let region = Region::anonymous(FRAMES * 2048).expect("memory");
    let pool = Pool::new(region.take(0, region.len()).expect("all of it"), 2048);
    let keys = Keys {
        node: Some([7; 32]),
        client: [9; 32],
    };
    let config = PortConfig {
        security: Security::Off,
        ..PortConfig::new(Identity::Node(u64::from(id)), keys, [id as u8; 16])
    };
    Port::new(Box::new(net.driver(address(id), 1500)), pool, config).expect("a port")
}

fn poll(port: &mut Port, now_us: u64) -> Vec<Message> {
    let mut got = Vec::new();
    while port.poll(now_us, &mut got).expect("no driver fails") > 0 {}
    got
}

/// Lets a port speak to node 2; what that one got.
fn speak(now_us: u64, from: &mut Port, b: &mut Port, text: &[u8]) -> Vec<Message> {
    let parts = [text];
    let burst = [Outgoing {
        to: Peer::Node(2),
        parts: &parts,
    }];
    from.send(now_us, &burst).expect("sent");
    let mut got = Vec::new();
    for _ in 0..4 {
        got.extend(poll(b, now_us));
        poll(from, now_us);
    }
    got
}

fuzz_target!(|said: Vec<Said>| {
    let net = MemNet::new(1, Faults::default());
    let (mut a, mut b) = (port(&net, 1), port(&net, 2));
    a.add_node(2, address(2));
    b.add_node(1, address(1));
    assert_eq!(speak(0, &mut a, &mut b, b"hello").len(), 1);
    net.capture();
    speak(0, &mut a, &mut b, b"again");
    let named = net.captured().remove(0).2;
    net.driver(address(66), 1500);
    let mut now_us = 0;
    for said in said {
        now_us += u64::from(said.later_us);
        let mut bytes = said.bytes;
        bytes.truncate(1472);
        let from = match said.from_peer {
            true => {
                bytes.splice(0..0, named[..NAMED].iter().copied());
                address(1)
            }
            false => address(66),
        };
        net.inject(from, address(2), &bytes);
        drop(poll(&mut b, now_us));
        net.captured();
    }
    for _ in 0..2 {
        now_us += 10_000_000;
        drop(poll(&mut b, now_us));
    }
    assert!(b.frames_used() == 0.0, "{:?}", b.stats());
    let mut c = port(&net, 3);
    c.add_node(2, address(2));
    let got = speak(now_us, &mut c, &mut b, b"other");
    assert!(got.iter().any(|message| message.body.to_vec() == b"other"));
});

//! Ports on a network in memory, and a clock that the test turns.
#![allow(dead_code)] // Each test file uses its part.

use std::net::SocketAddr;

use cyclone_packet::{
    Faults, Identity, Keys, MemNet, Message, Outgoing, Peer, Port, PortConfig, Security,
};
use cyclone_pmem::Region;
use cyclone_pmem::pool::Pool;

pub const NODE_KEY: [u8; 32] = [7; 32];
pub const CLIENT_KEY: [u8; 32] = [9; 32];

pub fn pool(frames: u64, frame_bytes: u32) -> Pool {
    let len = frames * u64::from(frame_bytes);
    let region = Region::anonymous(len).unwrap();
    Pool::new(region.take(0, len).unwrap(), frame_bytes)
}

pub fn address(port: u16) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, 1], port))
}

pub fn node_config(id: u64, boot: u8) -> PortConfig {
    let keys = Keys {
        node: Some(NODE_KEY),
        client: CLIENT_KEY,
    };
    PortConfig::new(Identity::Node(id), keys, [boot; 16])
}

pub fn client_config(boot: u8) -> PortConfig {
    PortConfig::new(
        Identity::Client,
        Keys {
            node: None,
            client: CLIENT_KEY,
        },
        [boot; 16],
    )
}

pub fn port(net: &MemNet, at: u16, config: PortConfig) -> Port {
    Port::new(
        Box::new(net.driver(address(at), 1500)),
        pool(2048, 2048),
        config,
    )
    .unwrap()
}

/// Nodes 1 and 2 at ports 1 and 2, known to each other.
pub fn pair(faults: Faults, security: Security) -> (MemNet, Port, Port) {
    let net = MemNet::new(1, faults);
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
    a.add_node(2, address(2));
    b.add_node(1, address(1));
    (net, a, b)
}

pub fn send(port: &mut Port, now_us: u64, to: Peer, bytes: &[u8]) -> usize {
    port.send(
        now_us,
        &[Outgoing {
            to,
            parts: &[bytes],
        }],
    )
    .unwrap()
}

pub fn poll(port: &mut Port, now_us: u64) -> Vec<Message> {
    let mut out = Vec::new();
    while port.poll(now_us, &mut out).unwrap() > 0 {}
    out
}

pub fn bodies(messages: &[Message]) -> Vec<Vec<u8>> {
    messages.iter().map(|m| m.body.to_vec()).collect()
}

/// Polls both until nothing moves; returns what each received.
pub fn settle(now_us: u64, a: &mut Port, b: &mut Port) -> (Vec<Message>, Vec<Message>) {
    let (mut at_a, mut at_b) = (Vec::new(), Vec::new());
    for _ in 0..8 {
        at_b.extend(poll(b, now_us));
        at_a.extend(poll(a, now_us));
    }
    (at_a, at_b)
}

/// A message that says which it is and checks itself.
pub fn numbered(number: u64, len: usize) -> Vec<u8> {
    let mut bytes = number.to_le_bytes().to_vec();
    let mut x = number.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    while bytes.len() < len.max(8) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        bytes.push(x as u8);
    }
    bytes
}

/// The number of a message that is intact.
pub fn number_of(bytes: &[u8]) -> u64 {
    let number = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    assert!(
        numbered(number, bytes.len()) == bytes,
        "message {number} is damaged"
    );
    number
}

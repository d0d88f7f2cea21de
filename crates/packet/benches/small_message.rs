//! Time per message between two ports in one thread: 200 bytes over the network in memory at each
//! level of security, then 200 bytes and 1 MiB over sockets on loopback. HACKING.md says how to run
//! it.

#[path = "../tests/common/mod.rs"]
mod common;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use common::{node_config, numbered, pair, pool, send, settle};
use cyclone_packet::{
    Driver, Faults, Message, Peer, Port, Security, TcpDriver, TcpOptions, UdpDriver, UdpOptions,
};
use cyclone_pmem::pool::Pool;

const SMALL_BYTES: usize = 200;
const LARGE_BYTES: usize = 1 << 20;
const IN_MEMORY: u32 = 200_000;
const SMALL: u32 = 50_000;
const LARGE: u32 = 500;
/// A message that has not come by then never will.
const PATIENCE: Duration = Duration::from_secs(10);

fn main() {
    for security in [Security::Off, Security::Authenticated, Security::Encrypted] {
        in_memory(security);
    }
    over_sockets("udp", |at, pool| {
        Box::new(UdpDriver::bind(at, pool, UdpOptions::default()).expect("a socket"))
    });
    over_sockets("tcp", |at, pool| {
        Box::new(TcpDriver::bind(at, pool, TcpOptions::default()).expect("a socket"))
    });
}

fn in_memory(security: Security) {
    let (_net, mut a, mut b) = pair(Faults::default(), security);
    assert_eq!(send(&mut a, 0, Peer::Node(2), b"x"), 1);
    assert_eq!(settle(0, &mut a, &mut b).1.len(), 1);
    let bytes = numbered(1, SMALL_BYTES);
    let mut out: Vec<Message> = Vec::new();
    let (mut sending, mut receiving) = (Duration::ZERO, Duration::ZERO);
    let mut received = 0;
    for _ in 0..IN_MEMORY {
        let begun = Instant::now();
        send(&mut a, 0, Peer::Node(2), &bytes);
        sending += begun.elapsed();
        let begun = Instant::now();
        b.poll(0, &mut out).expect("polled");
        received += out.len() as u32;
        out.clear();
        receiving += begun.elapsed();
    }
    assert_eq!(received, IN_MEMORY, "{security:?}");
    println!(
        "{security:?}: send {:?}, receive {:?} (each with a simulated driver call)",
        sending / IN_MEMORY,
        receiving / IN_MEMORY
    );
}

/// Two ports over sockets, and the clock that they share.
struct Pair {
    begun: Instant,
    a: Port,
    b: Port,
}

impl Pair {
    /// Sends so many messages one after the other, and returns the time of one.
    fn exchange(&mut self, bytes: &[u8], messages: u32) -> Duration {
        let (mut got, mut back) = (Vec::new(), Vec::new());
        let begun = Instant::now();
        for _ in 0..messages {
            let sent = Instant::now();
            let now_us = self.begun.elapsed().as_micros() as u64;
            assert_eq!(send(&mut self.a, now_us, Peer::Node(2), bytes), 1);
            while got.is_empty() {
                let now_us = self.begun.elapsed().as_micros() as u64;
                self.b.poll(now_us, &mut got).expect("polled");
                if got.is_empty() {
                    self.a.poll(now_us, &mut back).expect("polled");
                }
                assert!(sent.elapsed() < PATIENCE, "a message never comes");
            }
            assert_eq!((got.len(), got[0].body.len()), (1, bytes.len()));
            got.clear();
        }
        assert!(back.is_empty(), "nothing is sent back");
        begun.elapsed() / messages
    }
}

fn over_sockets(name: &str, bind: fn(SocketAddr, &Pool) -> Box<dyn Driver>) {
    let make = |id| {
        let pool = pool((32 << 20) / 16_384, 16_384);
        let driver = bind(SocketAddr::from(([127, 0, 0, 1], 0)), &pool);
        Port::new(driver, pool, node_config(id, id as u8)).expect("a port")
    };
    let (mut a, b) = (make(1), make(2));
    a.add_node(2, b.local_addr());
    let mut pair = Pair {
        begun: Instant::now(),
        a,
        b,
    };
    pair.exchange(b"x", 1);
    let small = pair.exchange(&numbered(1, SMALL_BYTES), SMALL);
    let large = pair.exchange(&numbered(1, LARGE_BYTES), LARGE);
    println!("{name}: {SMALL_BYTES} bytes {small:?}, 1 MiB {large:?}");
}

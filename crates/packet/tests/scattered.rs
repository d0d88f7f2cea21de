//! Datagrams that lie in several pieces, as jumbo packets do: cut anywhere, changed anywhere,
//! fragments mixed up, twice, overlapping, contradicting each other. Messages arrive whole or not
//! at all, and frames come back.
//!
//! `CYCLONE_SEED` repeats a run.

mod common;

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex};

use common::*;
use cyclone_packet::header::DataHeader;
use cyclone_packet::{Datagram, Driver, DriverStats, Peer, Port, PortConfig, Security};
use cyclone_pmem::payload::Payload;
use cyclone_pmem::pool::Pool;

const FRAME_BYTES: u32 = 2048;
const JUMBO: usize = 9000;

type Wire = Arc<Mutex<VecDeque<Vec<u8>>>>;

/// One end of a wire that carries jumbo datagrams in frames of 2 KiB, the first piece of each of
/// any length from 512 on.
struct Scatter {
    at: SocketAddr,
    peer: SocketAddr,
    out: Wire,
    inbox: Wire,
    random: u64,
    stats: DriverStats,
}

fn draw(random: &mut u64) -> usize {
    *random ^= *random << 13;
    *random ^= *random >> 7;
    *random ^= *random << 17;
    (*random >> 16) as usize
}

impl Driver for Scatter {
    fn send(&mut self, datagrams: &[Datagram<'_>]) -> io::Result<usize> {
        let mut out = self.out.lock().unwrap();
        out.extend(datagrams.iter().map(|d| d.parts.concat()));
        Ok(datagrams.len())
    }

    fn recv(
        &mut self,
        pool: &Pool,
        out: &mut Vec<(SocketAddr, Payload)>,
        max: usize,
    ) -> io::Result<usize> {
        let mut inbox = self.inbox.lock().unwrap();
        let mut count = 0;
        while count < max
            && pool.free() > 8
            && let Some(bytes) = inbox.pop_front()
        {
            let mut rope = Payload::new();
            let mut rest = bytes.as_slice();
            while !rest.is_empty() {
                let most = if rope.is_empty() {
                    512 + draw(&mut self.random) % 1400
                } else {
                    1 + draw(&mut self.random) % 2000
                };
                let (piece, after) = rest.split_at(most.min(rest.len()));
                let mut frame = pool.alloc().expect("some are free");
                frame[16..16 + piece.len()].copy_from_slice(piece);
                rope.push_frame(frame.freeze(16..16 + piece.len()));
                rest = after;
            }
            out.push((self.peer, rope));
            count += 1;
        }
        Ok(count)
    }

    fn fds(&self) -> Vec<RawFd> {
        Vec::new()
    }

    fn max_datagram(&self) -> usize {
        JUMBO
    }

    fn supports_multi_slice(&self) -> Option<usize> {
        Some(512)
    }

    fn describe(&self) -> String {
        "scattered".to_owned()
    }

    fn local_addr(&self) -> SocketAddr {
        self.at
    }

    fn stats(&self) -> DriverStats {
        self.stats
    }
}

struct Ends {
    a: Port,
    b: Port,
    pool_b: Pool,
    to_b: Wire,
}

fn ends(seed: u64, security: Security) -> Ends {
    let (to_a, to_b) = (Wire::default(), Wire::default());
    let end = |n: u16, out: &Wire, inbox: &Wire| {
        let pool = pool(2048, FRAME_BYTES);
        let driver = Scatter {
            at: address(n),
            peer: address(3 - n),
            out: Arc::clone(out),
            inbox: Arc::clone(inbox),
            random: seed + u64::from(n),
            stats: DriverStats::default(),
        };
        let config = PortConfig {
            security,
            max_message: 200_000,
            ..node_config(n.into(), n as u8)
        };
        let mut port = Port::new(Box::new(driver), pool.clone(), config).unwrap();
        port.add_node(u64::from(3 - n), address(3 - n));
        (port, pool)
    };
    let (a, _) = end(1, &to_b, &to_a);
    let (b, pool_b) = end(2, &to_a, &to_b);
    let mut ends = Ends { a, b, pool_b, to_b };
    send(&mut ends.a, 0, Peer::Node(2), b"hello");
    settle(0, &mut ends.a, &mut ends.b);
    assert!(ends.b.is_connected(Peer::Node(1)));
    ends
}

fn seed() -> u64 {
    let seed = std::env::var("CYCLONE_SEED").ok();
    let seed = seed.and_then(|text| text.parse().ok()).unwrap_or(11);
    println!("CYCLONE_SEED={seed}");
    seed
}

fn body(n: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + n) as u8).collect()
}

#[test]
fn messages_in_pieces_arrive_as_they_were() {
    for security in [Security::Off, Security::Authenticated, Security::Encrypted] {
        let mut ends = ends(seed(), security);
        for (n, len) in [0, 1, 500, 2000, 8800, 8900, 9000, 50_000, 199_999]
            .into_iter()
            .enumerate()
        {
            let text = body(n, len);
            send(&mut ends.a, 0, Peer::Node(2), &text);
            let (_, got) = settle(0, &mut ends.a, &mut ends.b);
            assert_eq!(bodies(&got), [text], "{security:?} {len}");
        }
        let stats = ends.b.stats();
        assert_eq!(stats.malformed + stats.forged, 0, "{security:?}");
        assert_eq!(ends.pool_b.free(), ends.pool_b.count(), "{security:?}");
    }
}

/// Without tags everything reaches the reassembly, so everything is tried on it.
#[test]
fn fragments_that_lie_neither_panic_nor_stay() {
    let mut random = seed() | 1;
    let mut ends = ends(random, Security::Off);
    let mut now_us = 0;
    for round in 0..3000 {
        send(
            &mut ends.a,
            now_us,
            Peer::Node(2),
            &body(round, draw(&mut random) % 60_000),
        );
        let mut wire = ends.to_b.lock().unwrap();
        let mut datagrams: Vec<Vec<u8>> = wire.drain(..).collect();
        for _ in 0..draw(&mut random) % 4 {
            let which = draw(&mut random) % datagrams.len();
            let mut copy = datagrams[which].clone();
            if copy.len() < 48 {
                continue;
            }
            match draw(&mut random) % 6 {
                // Another place, number, count or length for the same bytes: overlaps, loops, gaps.
                0 => copy[24] ^= 1 << (draw(&mut random) % 4),
                1 => copy[12] ^= 1 << (draw(&mut random) % 5),
                2 => copy[2] ^= 1 << (draw(&mut random) % 5),
                3 => copy[20 + draw(&mut random) % 3] ^= 1 << (draw(&mut random) % 8),
                4 => copy.truncate(draw(&mut random) % copy.len().max(1)),
                _ => {
                    // A number far ahead would make all that follow too old, as without tags it
                    // must.
                    let at = [0, 1, 2, 3, 20, 21, 22, 23, 24, 25, 26, 31, 32, 47];
                    let at = at[draw(&mut random) % at.len()];
                    copy[at] = draw(&mut random) as u8;
                }
            }
            let at = draw(&mut random) % (datagrams.len() + 1);
            datagrams.insert(at, copy);
        }
        if draw(&mut random).is_multiple_of(3) {
            let gone = draw(&mut random) % datagrams.len();
            datagrams.remove(gone);
        }
        wire.extend(datagrams);
        drop(wire);
        now_us += 2000;
        let (_, got) = settle(now_us, &mut ends.a, &mut ends.b);
        assert!(got.iter().all(|message| message.body.len() <= 200_000));
    }
    let stats = ends.b.stats();
    assert!(
        stats.messages_received > 1000 && stats.malformed > 100,
        "{stats:?}"
    );
    // What was never completed is given up.
    settle(now_us + 10_000_000, &mut ends.a, &mut ends.b);
    assert_eq!(ends.b.stats().partials, 0);
    assert_eq!(ends.pool_b.free(), ends.pool_b.count());
}

/// The length of the whole decides, not that of the first piece.
#[test]
fn headers_are_checked_against_the_whole_datagram() {
    let header = DataHeader {
        assoc: 1,
        seq: 0,
        total: 4000,
        index: 0,
        count: 1,
    };
    let mut bytes = header.encode().to_vec();
    bytes.resize(1000, 7);
    assert_eq!(DataHeader::parse_first(&bytes, 4048), Some(header));
    for len in [0, 47, 48, 1000, 4047, 4049] {
        assert_eq!(DataHeader::parse_first(&bytes, len), None, "{len:?}");
    }
}

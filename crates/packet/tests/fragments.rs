//! Fragments that do not fit together: cut short, overlapping, doubled, in a circle, of messages
//! that contradict each other. Whatever comes, nothing breaks, memory stays bounded, and what is
//! delivered is what was said.

mod common;
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use common::*;
use cyclone_packet::fragment::{Limits, Outcome, Reassembler};
use cyclone_packet::header::DataHeader;
use cyclone_packet::{Driver, Faults, Peer, PortConfig, Security, TcpDriver, TcpOptions};
use cyclone_pmem::payload::Payload;
use proptest::prelude::*;

const LIMITS: Limits = Limits {
    max_message: 16 << 10,
    held_bytes: 64 << 10,
    per_association: 4,
    timeout_us: 1000,
};
const FRAMES: u64 = 128;
const FRAME_BYTES: u32 = 2048;

/// One fragment as an attacker with the key would make it.
#[derive(Debug, Clone)]
struct Said {
    assoc: u64,
    first: u64,
    index: u16,
    count: u16,
    total: u32,
    len: usize,
    from_node: bool,
    later_us: u64,
    in_frame: bool,
}

fn said() -> impl Strategy<Value = Said> {
    let small = (0u64..3, 0u64..3, 0u16..6, 2u16..6, 0usize..5, 0usize..5);
    let rest = (
        any::<bool>(),
        0u64..60,
        any::<bool>(),
        any::<u16>(),
        any::<u32>(),
        0u8..12,
    );
    (small, rest).prop_map(|(small, rest)| {
        let (assoc, first, index, count, total, len) = small;
        let (from_node, later_us, in_frame, odd_count, odd_total, odd) = rest;
        let count = if odd == 0 { odd_count.max(2) } else { count };
        let index = index % count;
        let total = match odd {
            2 => odd_total,
            _ => [0, 300, 700, 1500, 20_000][total],
        };
        // Mostly as it would be if the message were cut evenly.
        let (whole, each) = (total as usize, total.div_ceil(count.into()) as usize);
        let even = match index + 1 == count {
            true => whole.saturating_sub(each * usize::from(index)),
            false => each,
        };
        Said {
            assoc,
            first: if odd == 1 { u64::MAX - 70_000 } else { first },
            index,
            count,
            total,
            len: match odd {
                0..6 => [0, 1, 256, 300, 1900][len],
                _ => even.min(1900),
            },
            from_node,
            later_us,
            in_frame,
        }
    })
}

proptest! {
    #[test]
    fn any_fragments_are_survived(fragments in prop::collection::vec(said(), 1..300)) {
        let pool = pool(FRAMES, FRAME_BYTES);
        let mut reassembler = Reassembler::new(LIMITS, FRAME_BYTES as usize);
        let mut now_us = 0;
        for said in fragments {
            now_us += said.later_us;
            if said.later_us == 59 {
                reassembler.expire(now_us);
            }
            if said.later_us == 58 {
                reassembler.forget(said.assoc);
            }
            let header = DataHeader {
                assoc: said.assoc,
                seq: said.first + u64::from(said.index),
                total: said.total,
                index: said.index,
                count: said.count,
            };
            // Every byte says which fragment of how long a message it is from.
            let mark = (said.index as u8) ^ (said.total as u8) ^ (said.first as u8) << 6;
            let piece = match pool.alloc().filter(|_| said.in_frame) {
                Some(mut frame) => {
                    frame[..said.len].fill(mark);
                    frame.freeze(0..said.len).into()
                }
                None => Payload::from_vec(vec![mark; said.len]),
            };
            match reassembler.add(now_us, &header, said.from_node, piece) {
                Outcome::Whole(body) => {
                    prop_assert_eq!(body.len(), said.total as usize);
                    prop_assert!(body.len() <= LIMITS.max_message);
                }
                Outcome::Kept | Outcome::Refused | Outcome::NoRoom => {}
            }
            let used = u64::from(pool.count() - pool.free()) * u64::from(FRAME_BYTES);
            let counted = reassembler.held_bytes() as u64;
            prop_assert!(used <= counted && counted <= LIMITS.held_bytes as u64, "{} bytes of {} counted", used, counted);
            prop_assert!(reassembler.len() <= 3 * LIMITS.per_association);
        }
        reassembler.expire(now_us + LIMITS.timeout_us);
        prop_assert!(reassembler.is_empty() && reassembler.held_bytes() == 0);
        prop_assert_eq!(pool.free(), pool.count());
    }

    /// The same by a whole port, without tags in the way: what a peer sends is damaged, doubled and
    /// put together anew.
    #[test]
    fn any_datagrams_of_a_known_peer_are_survived(
        changes in prop::collection::vec((any::<u16>(), 0usize..48, any::<u8>(), 0usize..1500, 0u8..4), 1..80),
        lens in prop::collection::vec(0usize..9000, 1..4),
    ) {
        let (net, mut a, mut b) = pair(Faults::default(), Security::Off);
        send(&mut a, 0, Peer::Node(2), b"hello");
        settle(0, &mut a, &mut b);
        net.capture();
        for len in &lens {
            send(&mut a, 0, Peer::Node(2), &numbered(1, *len));
        }
        let sent: Vec<_> = net.captured();
        settle(0, &mut a, &mut b);
        for (round, (which, at, value, cut, how)) in changes.into_iter().enumerate() {
            let (from, to, mut bytes) = sent[usize::from(which) % sent.len()].clone();
            // A sequence number that was not seen yet, as a holder of the keys can have.
            let seq = bytes.len().min(20);
            if seq == 20 {
                bytes[12..20].copy_from_slice(&(1000 + 7 * round as u64 + u64::from(value % 5)).to_le_bytes());
            }
            match how {
                0 => bytes.truncate(cut),
                1 if at < bytes.len() => bytes[at] = value,
                2 => bytes.resize(bytes.len().max(cut), value),
                _ => {}
            }
            net.inject(from, to, &bytes);
            poll(&mut b, round as u64);
        }
        drop(poll(&mut b, 10_000_000));
        drop(poll(&mut b, 20_000_000));
        let used = b.frames_used();
        prop_assert!(used == 0.0, "{} of the frames in use, {:?}", used, b.stats());
        // The peer's own numbers are used up; another one is understood as ever.
        let config = PortConfig {
            security: Security::Off,
            ..node_config(3, 3)
        };
        let mut c = port(&net, 3, config);
        c.add_node(2, address(2));
        send(&mut c, 20_000_000, Peer::Node(2), &numbered(9, 3000));
        let got = settle(20_000_000, &mut c, &mut b).1;
        prop_assert!(got.iter().any(|m| m.body.to_vec() == numbered(9, 3000)), "{:?}", b.stats());
    }
}

proptest! {
    // Each opens real connections.
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases.div_ceil(16), ..ProptestConfig::default() })]

    /// The TCP driver: streams of any bytes, in any pieces. They become datagrams or end the
    /// connection, which does not hold up the others.
    #[test]
    fn any_stream_is_cut_into_datagrams_or_closed(
        pieces in prop::collection::vec((prop::collection::vec(any::<u8>(), 0..200), 0u32..3000, any::<bool>()), 1..12),
    ) {
        let frames = pool(256, FRAME_BYTES);
        let any: SocketAddr = ([127, 0, 0, 1], 0).into();
        let mut driver = TcpDriver::bind(any, &frames, TcpOptions::default()).unwrap();
        let mut stream = TcpStream::connect(driver.local_addr()).unwrap();
        for (bytes, len, with_length) in &pieces {
            // Mostly lengths that are near the truth.
            let mut text = bytes.clone();
            if *with_length {
                text.splice(0..0, (bytes.len() as u32 + len / 1000).to_le_bytes());
            }
            // The other end may have closed it already.
            let _ = stream.write_all(&text);
        }
        drop(stream);
        let mut out = Vec::new();
        let since = Instant::now();
        let mut quiet = 0;
        while quiet < 3 && since.elapsed() < Duration::from_secs(5) {
            quiet = match driver.recv(&frames, &mut out, 32).unwrap() {
                0 => quiet + 1,
                _ => 0,
            };
            for (_, datagram) in out.drain(..) {
                prop_assert!(datagram.len() <= FRAME_BYTES as usize);
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        drop(driver);
        prop_assert_eq!(frames.free(), frames.count());
    }
}

#[test]
fn pairs_without_tags_understand_each_other() {
    let (_, mut a, mut b) = pair(Faults::default(), Security::Off);
    send(&mut a, 0, Peer::Node(2), &numbered(3, 5000));
    let got = settle(0, &mut a, &mut b).1;
    assert_eq!(bodies(&got), [numbered(3, 5000)]);
}

//! A million messages over a bad network, kept and freed as a log does it, with restarts: not one
//! frame is lost.
//!
//! `CYCLONE_SEED=n` repeats a run, `CYCLONE_OPERATIONS=n` makes it longer or shorter.

mod common;
use std::collections::VecDeque;

use common::*;
use cyclone_packet::{Faults, MemNet, Peer, Port};
use cyclone_pmem::payload::Segment;
use cyclone_pmem::pool::{Frame, Pool};

const FRAMES: u64 = 256;
const FRAME_BYTES: u32 = 2048;
/// Messages that a log holds at most.
const MOST_HELD: usize = 200;

struct Random(u64);

impl Random {
    fn next(&mut self, below: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.0 >> 33) % below
    }
}

fn from_environment(name: &str, usual: u64) -> u64 {
    let given = std::env::var(name).ok();
    given.map_or(usual, |text| text.parse().expect(name))
}

/// A node: its port, and the frames that its log holds, message by message.
struct Machine {
    id: u64,
    pool: Pool,
    port: Option<Port>,
    log: VecDeque<Vec<Frame>>,
    boots: u8,
    received: u64,
}

impl Machine {
    fn new(id: u64) -> Machine {
        Machine {
            id,
            pool: pool(FRAMES, FRAME_BYTES),
            port: None,
            log: VecDeque::new(),
            boots: 0,
            received: 0,
        }
    }

    fn start(&mut self, net: &MemNet) {
        self.boots = self.boots.wrapping_add(1);
        let driver = Box::new(net.driver(address(self.id as u16), 1500));
        let mut config = node_config(self.id, self.boots);
        config.boot[1] = self.id as u8;
        let mut port = Port::new(driver, self.pool.clone(), config).expect("a port");
        for other in 1..=3 {
            if other != self.id {
                port.add_node(other, address(other as u16));
            }
        }
        self.port = Some(port);
    }

    /// The process ends, and its successor takes over the frames that its log names.
    fn restart(&mut self, net: &MemNet) {
        let ended = self.port.take();
        self.received += ended.map_or(0, |port| port.stats().messages_received);
        let named: Vec<Vec<(u32, u32, u32)>> = self
            .log
            .drain(..)
            .map(|frames| {
                let name = |f: &Frame| (f.number(), f.offset(), f.len() as u32);
                frames.iter().map(name).collect()
            })
            .collect();
        assert_eq!(self.pool.free(), self.pool.count(), "no frame is held");
        for frames in named {
            let adopt = |(number, offset, len)| self.pool.adopt(number, offset, len);
            let adopted: Result<Vec<Frame>, _> = frames.into_iter().map(adopt).collect();
            self.log.push_back(adopted.expect("they were free"));
        }
        self.start(net);
    }

    /// Takes in what has come; the log keeps what lies in frames.
    fn poll(&mut self, now_us: u64) {
        let Some(port) = &mut self.port else { return };
        let mut got = Vec::new();
        port.poll(now_us, &mut got).expect("poll");
        for message in got {
            let of = |part: &Segment| match part {
                Segment::Frame(frame) => Some(frame.clone()),
                Segment::Bytes { .. } => None,
            };
            let frames: Vec<Frame> = message.body.parts().iter().filter_map(of).collect();
            if !frames.is_empty() {
                self.log.push_back(frames);
            }
        }
        while self.log.len() > MOST_HELD {
            self.log.pop_front();
        }
    }

    /// With an empty log, nothing in flight and half-received messages too old, all frames are free
    /// while the port lives.
    fn settle(&mut self, now_us: u64) {
        self.log.clear();
        let port = self.port.as_mut().expect("it runs");
        for late in [0, 2_000_000, 4_000_000] {
            let mut got = Vec::new();
            while port.poll(now_us + late, &mut got).expect("poll") > 0 {
                got.clear();
            }
        }
        let (free, count) = (self.pool.free(), self.pool.count());
        assert_eq!(free, count, "{:?}", port.stats());
    }
}

#[test]
fn a_million_messages_leave_every_frame_free() {
    let seed = from_environment("CYCLONE_SEED", 1);
    let operations = from_environment("CYCLONE_OPERATIONS", 1_000_000);
    println!("CYCLONE_SEED={seed}");
    let mut random = Random(seed);
    let net = MemNet::new(seed, Faults::default());
    let mut machines = [1, 2, 3].map(Machine::new);
    for machine in &mut machines {
        machine.start(&net);
    }
    let text = body_of(30_000);
    let (mut now_us, mut restarts, mut parted, mut short) = (0, 0u64, 0u64, 0u64);
    for operation in 0..operations {
        now_us += random.next(40);
        let at = random.next(3) as usize;
        match random.next(10_000) {
            0..2 => {
                machines[at].restart(&net);
                restarts += 1;
            }
            2..4 => {
                // A member goes and comes back.
                let other = machines[(at + 1) % 3].id;
                let port = machines[at].port.as_mut().expect("it runs");
                port.remove_node(now_us, other);
                port.add_node(other, address(other as u16));
                parted += 1;
            }
            4..6 => {
                // Half-received messages grow old.
                now_us += 1_500_000;
            }
            6..12 => {
                let tenth = |n: u64| n as f64 / 10.0;
                net.set_faults(Faults {
                    loss: tenth(random.next(4)),
                    duplicate: tenth(random.next(4)),
                    reorder: tenth(random.next(6)),
                    corrupt: tenth(random.next(2)),
                    truncate: tenth(random.next(2)),
                });
            }
            12 => {
                net.set_faults(Faults::default());
                for machine in &mut machines {
                    machine.poll(now_us);
                }
                for machine in &mut machines {
                    machine.settle(now_us);
                }
                now_us += 5_000_000;
            }
            _ => {
                let other = machines[(at + 1 + random.next(2) as usize) % 3].id;
                let len = match random.next(20) {
                    0 => random.next(30_000),
                    _ => random.next(1400),
                };
                let port = machines[at].port.as_mut().expect("it runs");
                send(port, now_us, Peer::Node(other), &text[..len as usize]);
            }
        }
        if operation % 4 == 0 {
            machines[random.next(3) as usize].poll(now_us);
        }
        // Half of them are a port's reserve: with so few left it copies messages out of their
        // frames.
        short += u64::from(machines[at].pool.free() < FRAMES as u32 * 5 / 8);
    }
    net.set_faults(Faults::default());
    for machine in &mut machines {
        machine.settle(now_us + 10_000_000);
        machine.restart(&net);
    }
    let received: u64 = machines.iter().map(|machine| machine.received).sum();
    println!(
        "{restarts} restarts, {parted} partings, {received} received, {short} times short of frames"
    );
    assert!(received > operations / 10 && restarts > 0 && parted > 0 && short > 0);
}

fn body_of(len: usize) -> Vec<u8> {
    (0..len).map(|at| at as u8).collect()
}

//! Connections to the current leader.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Result;
use cyclone_bench::drive::{Done, Lane, Request};

use super::{Batch, Command, Commands, Readiness, Waits, Wire};

/// How to reach a server.
#[derive(Clone, Debug)]
pub struct Wires {
    /// Its address.
    pub address: SocketAddr,
    /// Commands of a batch.
    pub pipeline: usize,
    /// What follows a batch.
    pub waits: Waits,
    /// A command sent first on every connection; empty for none.
    pub greeting: Vec<Vec<u8>>,
}

/// Connections to one server.
pub struct WireLane {
    wires: Vec<Wire>,
    idle: VecDeque<usize>,
    ready: Readiness,
    reach: Wires,
    queue: VecDeque<Command>,
    commands: Commands,
}

impl WireLane {
    /// Opens as many connections as so many operations in flight need.
    pub fn open(wires: &Wires, share: usize) -> Result<WireLane> {
        let count = share.div_ceil(wires.pipeline.max(1)).max(1);
        let ready = Readiness::new()?;
        let open = |number| Wire::open(number, wires.address, &wires.greeting, &ready);
        Ok(WireLane {
            wires: (0..count).map(open).collect::<Result<_>>()?,
            idle: (0..count).collect(),
            ready,
            reach: wires.clone(),
            queue: VecDeque::new(),
            commands: Commands::default(),
        })
    }

    /// Gives what waits to connections that are free.
    fn send(&mut self) -> Result<()> {
        let batch = Batch {
            most: self.reach.pipeline,
            waits: self.reach.waits,
        };
        while !self.queue.is_empty() {
            let Some(number) = self.idle.pop_front() else {
                return Ok(());
            };
            let (wire, address) = (&mut self.wires[number], self.reach.address);
            if wire.address != address {
                // The old one leaves the epoll set as it is closed.
                *wire = Wire::open(number, address, &self.reach.greeting, &self.ready)?;
            }
            wire.send(&mut self.queue, batch, &mut self.commands, &self.ready)?;
        }
        Ok(())
    }
}

impl Lane for WireLane {
    fn submit(&mut self, token: u64, request: Request<'_>) -> Result<()> {
        self.queue.push_back(self.commands.make(token, request)?);
        Ok(())
    }

    fn poll(&mut self, patience: Duration, done: &mut Vec<Done>) -> Result<()> {
        self.send()?;
        self.ready.wait(patience)?;
        let mut place = 0;
        while let Some((number, takes)) = self.ready.event(place) {
            place += 1;
            let wire = &mut self.wires[number];
            if takes {
                wire.flush(&self.ready)?;
            }
            wire.receive()?;
            let reach = &mut self.reach.address;
            if wire.settle(&mut |address| *reach = address, done)? {
                self.idle.push_back(number);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;

    use cyclone_bench::drive::Outcome;

    use super::*;
    use crate::wires::answer;

    /// A server that answers each command with OK and WAIT with a number.
    fn serve(listener: TcpListener, replicas: i64) -> std::thread::JoinHandle<Vec<u8>> {
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a client");
            let (mut seen, mut at) = (Vec::new(), 0);
            let mut buffer = [0; 1000];
            loop {
                let count = stream.read(&mut buffer).unwrap_or(0);
                if count == 0 {
                    return seen;
                }
                seen.extend_from_slice(&buffer[..count]);
                while let Ok(Some((len, _))) = answer(&seen[at..]) {
                    let wait = seen[at..at + len].windows(4).any(|word| word == b"WAIT");
                    at += len;
                    let reply = if wait {
                        format!(":{replicas}\r\n")
                    } else {
                        "+OK\r\n".into()
                    };
                    if stream.write_all(reply.as_bytes()).is_err() {
                        return seen;
                    }
                }
            }
        })
    }

    fn outcomes(replicas: i64, waits: Waits) -> (Vec<Outcome>, Vec<u8>) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let wires = Wires {
            address: listener.local_addr().expect("address"),
            pipeline: 4,
            waits,
            greeting: Vec::new(),
        };
        let server = serve(listener, replicas);
        let mut lane = WireLane::open(&wires, 4).expect("a lane");
        let pair = cyclone_bench::workload::Pair {
            key: cyclone_bench::workload::Key::new(1, 8),
            value: b"value",
        };
        // More than fit one batch: the rest goes when it is answered.
        for token in 0..6 {
            lane.submit(token, Request::Write(&[pair])).expect("taken");
        }
        let mut done = Vec::new();
        while done.len() < 6 {
            lane.poll(Duration::from_secs(10), &mut done)
                .expect("polled");
        }
        drop(lane);
        let mut tokens: Vec<u64> = done.iter().map(|done| done.token).collect();
        tokens.sort_unstable();
        assert_eq!(tokens, [0, 1, 2, 3, 4, 5]);
        let outcomes = done.iter().map(|done| done.outcome).collect();
        (outcomes, server.join().expect("server"))
    }

    #[test]
    fn a_lane_follows_the_leader() {
        let there = TcpListener::bind("127.0.0.1:0").expect("a port");
        let moved = format!("-MOVED 7 {}\r\n", there.local_addr().expect("address"));
        let here = TcpListener::bind("127.0.0.1:0").expect("a port");
        let wires = Wires {
            address: here.local_addr().expect("address"),
            pipeline: 1,
            waits: Waits::Never,
            greeting: Vec::new(),
        };
        let first = std::thread::spawn(move || {
            let (mut stream, _) = here.accept().expect("a client");
            let mut buffer = [0; 1000];
            assert!(stream.read(&mut buffer).expect("a command") > 0);
            stream.write_all(moved.as_bytes()).expect("answered");
        });
        let second = serve(there, 0);
        let mut lane = WireLane::open(&wires, 1).expect("a lane");
        let key = cyclone_bench::workload::Key::new(1, 8);
        for expected in [Outcome::Refused, Outcome::Done] {
            lane.submit(1, Request::Read(key)).expect("taken");
            let mut done = Vec::new();
            while done.is_empty() {
                lane.poll(Duration::from_secs(10), &mut done)
                    .expect("polled");
            }
            assert_eq!(done[0].outcome, expected);
        }
        drop(lane);
        first.join().expect("the first server");
        assert!(!second.join().expect("the second server").is_empty());
    }

    #[test]
    fn a_batch_is_done_when_a_replica_has_it_and_of_unknown_fate_when_none_has() {
        let waits = |seen: &[u8]| seen.windows(4).filter(|word| word == b"WAIT").count();
        let (all, seen) = outcomes(1, Waits::OneReplica);
        assert!(all.iter().all(|one| *one == Outcome::Done));
        assert_eq!(waits(&seen), 2, "one per batch");
        let (all, _) = outcomes(0, Waits::OneReplica);
        assert!(all.iter().all(|one| *one == Outcome::Unfinished));
        let (all, seen) = outcomes(0, Waits::Never);
        assert!(all.iter().all(|one| *one == Outcome::Done));
        assert_eq!(waits(&seen), 0);
    }
}

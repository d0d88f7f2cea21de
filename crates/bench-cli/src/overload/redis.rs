//! Commands over the Redis protocol in pipelines, over many connections, from one thread.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::{Arrivals, Seen, Source, value};
use crate::Sequence;

/// Together more commands in flight than the leader lets wait.
const CONNECTIONS: usize = 32;
/// Without a rate: commands in flight per connection.
const WINDOW: usize = 64;
/// Commands that arrive together on a connection, however fast they arrive.
const PIPELINE: usize = 16;
/// Commands sent and not answered on one connection at most; what arrives beyond is not queued and
/// not sent.
const MOST_PENDING: usize = 2048;
/// Bytes that wait to be sent on one connection at most: the other side takes no more.
const MOST_UNSENT: usize = 256 << 10;

struct One {
    stream: TcpStream,
    arrived: VecDeque<Instant>,
    /// What is to be sent, from `sent` on.
    commands: Vec<u8>,
    sent: usize,
    answers: Vec<u8>,
}

/// The connections.
pub(super) struct Redis {
    leader: SocketAddr,
    connections: Vec<One>,
    sequence: Sequence,
    value: Vec<u8>,
    piece: Box<[u8]>,
}

impl Redis {
    pub(super) fn new(leader: SocketAddr, seed: u64) -> Result<Redis> {
        let mut connections = Vec::new();
        for _ in 0..CONNECTIONS {
            let stream = TcpStream::connect(leader)
                .with_context(|| format!("cannot connect to {leader}"))?;
            stream.set_nodelay(true)?;
            stream.set_nonblocking(true)?;
            connections.push(One {
                stream,
                arrived: VecDeque::new(),
                commands: Vec::new(),
                sent: 0,
                answers: Vec::new(),
            });
        }
        Ok(Redis {
            leader,
            connections,
            sequence: Sequence(seed),
            value: value(seed),
            piece: vec![0; 64 << 10].into(),
        })
    }
}

/// Bytes that could be moved; none when it would block.
fn moved(result: std::io::Result<usize>) -> Result<usize> {
    match result {
        Ok(0) => bail!("the node has closed a connection"),
        Ok(count) => Ok(count),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
            Ok(0)
        }
        Err(error) => Err(error.into()),
    }
}

impl One {
    fn push(&mut self, arrived: Instant, key: &[u8], value: &[u8]) {
        self.arrived.push_back(arrived);
        let out = &mut self.commands;
        out.extend_from_slice(b"*3\r\n$3\r\nSET\r\n$16\r\n");
        out.extend_from_slice(key);
        out.extend_from_slice(format!("\r\n${}\r\n", value.len()).as_bytes());
        out.extend_from_slice(value);
        out.extend_from_slice(b"\r\n");
    }

    fn unsent(&self) -> usize {
        self.commands.len() - self.sent
    }

    fn exchange(&mut self, piece: &mut [u8], seen: &mut Seen) -> Result<()> {
        while self.unsent() > 0 {
            match moved(self.stream.write(&self.commands[self.sent..]))? {
                0 => break,
                count => self.sent += count,
            }
        }
        // What was sent is dropped when it is more than what was not: no byte is moved often.
        if self.sent >= self.unsent() {
            self.commands.drain(..self.sent);
            self.sent = 0;
        }
        loop {
            match moved(self.stream.read(piece))? {
                0 => break,
                count => self.answers.extend_from_slice(&piece[..count]),
            }
        }
        let mut begin = 0;
        while let Some(end) = self.answers[begin..].iter().position(|&b| b == b'\n') {
            let answer = &self.answers[begin..begin + end];
            begin += end + 1;
            let Some(arrived) = self.arrived.pop_front() else {
                bail!("an answer to nothing");
            };
            if answer.starts_with(b"+OK") {
                seen.done += 1;
                let took = arrived.elapsed().as_nanos() as u64;
                seen.latency_ns.saturating_record(took);
            } else if answer.starts_with(b"-TRYAGAIN") {
                seen.refused += 1;
            } else {
                seen.unclear += 1;
            }
        }
        self.answers.drain(..begin);
        Ok(())
    }
}

impl Source for Redis {
    fn follow(&mut self, leader: SocketAddr) -> Result<()> {
        if leader != self.leader {
            *self = Redis::new(leader, self.sequence.0)?;
        }
        Ok(())
    }

    fn run(&mut self, rate: Option<f64>, time: Duration, stop: &AtomicBool) -> Result<Seen> {
        let mut seen = Seen::new()?;
        let mut pipelines = Arrivals::new(rate.map(|rate| rate / PIPELINE as f64));
        let begun = Instant::now();
        let mut turn = 0;
        while begun.elapsed() < time && !stop.load(Ordering::Relaxed) {
            let now = Instant::now();
            for _ in 0..256 / PIPELINE {
                turn = (turn + 1) % CONNECTIONS;
                let one = &mut self.connections[turn];
                if rate.is_none() && one.arrived.len() >= WINDOW {
                    continue;
                }
                let Some(arrived) = pipelines.due(now) else {
                    break;
                };
                for _ in 0..PIPELINE {
                    seen.offered += 1;
                    if one.arrived.len() >= MOST_PENDING || one.unsent() >= MOST_UNSENT {
                        seen.held += 1;
                        continue;
                    }
                    let key = self.sequence.key();
                    one.push(arrived, &key, &self.value);
                }
            }
            for one in &mut self.connections {
                one.exchange(&mut self.piece, &mut seen)?;
            }
        }
        seen.elapsed = begun.elapsed();
        let mut rest = Seen::new()?;
        let until = Instant::now() + Duration::from_secs(20);
        let waits = |one: &One| !one.arrived.is_empty() && !stop.load(Ordering::Relaxed);
        while self.connections.iter().any(waits) {
            if Instant::now() > until {
                bail!("commands are not answered within 20 s after the load");
            }
            for one in &mut self.connections {
                one.exchange(&mut self.piece, &mut rest)?;
            }
        }
        seen.done_late = rest.done;
        seen.late = begun.elapsed() - seen.elapsed;
        Ok(seen)
    }
}

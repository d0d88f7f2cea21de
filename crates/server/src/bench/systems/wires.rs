//! The Redis protocol as a lane: many connections in one thread, each with one batch of commands under way at a time. A batch
//! counts as answered when all of it is.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use cyclone_bench::drive::{Done, Lane, Outcome, Request};
use rustix::event::{Timespec, epoll};

/// What follows the writes of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waits {
    /// Nothing: an answer is a promise already.
    Never,
    /// WAIT 1: one replica has them.
    OneReplica,
}

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

struct Wire {
    stream: TcpStream,
    address: SocketAddr,
    /// Bytes to be sent.
    out: Vec<u8>,
    /// Whether the socket would not take all of them.
    stuck: bool,
    /// Bytes that have arrived and are no whole answer yet.
    arrived: Vec<u8>,
    /// Operations of the batch under way.
    tokens: Vec<u64>,
    /// Answers that are still to come, WAIT's included.
    missing: usize,
    /// Whether one of them was an error, or WAIT found no replica.
    refused: bool,
    /// Whether WAIT's is the last one.
    wait: bool,
}

/// Connections to one server.
pub struct WireLane {
    wires: Vec<Wire>,
    idle: VecDeque<usize>,
    epoll: OwnedFd,
    events: Vec<epoll::Event>,
    reach: Wires,
    /// Operations that wait for a connection: number, command, whether it writes.
    queue: VecDeque<(u64, Vec<u8>, bool)>,
    /// Buffers of commands that were sent.
    spare: Vec<Vec<u8>>,
}

/// WAIT's patience, ms.
const WAIT_MS: &[u8] = b"10000";

impl WireLane {
    /// Opens as many connections as so many operations in flight need.
    pub fn open(wires: &Wires, share: usize) -> Result<WireLane> {
        let pipeline = wires.pipeline.max(1);
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).context("epoll")?;
        let mut lane = WireLane {
            wires: Vec::new(),
            idle: VecDeque::new(),
            epoll,
            events: Vec::with_capacity(256),
            reach: wires.clone(),
            queue: VecDeque::new(),
            spare: Vec::new(),
        };
        for number in 0..share.div_ceil(pipeline).max(1) {
            let stream = lane.connect(number)?;
            lane.wires.push(Wire {
                stream,
                address: wires.address,
                out: Vec::new(),
                stuck: false,
                arrived: Vec::new(),
                tokens: Vec::new(),
                missing: 0,
                refused: false,
                wait: false,
            });
            lane.idle.push_back(number);
        }
        Ok(lane)
    }

    /// A connection to where the leader is, as far as is known.
    fn connect(&self, number: usize) -> Result<TcpStream> {
        let address = self.reach.address;
        let stream =
            TcpStream::connect(address).with_context(|| format!("cannot connect to {address}"))?;
        stream.set_nodelay(true)?;
        if !self.reach.greeting.is_empty() {
            greet(&stream, &self.reach.greeting)?;
        }
        stream.set_nonblocking(true)?;
        let data = epoll::EventData::new_u64(number as u64);
        epoll::add(&self.epoll, &stream, data, epoll::EventFlags::IN).context("epoll")?;
        Ok(stream)
    }

    /// Gives what waits to connections that are free.
    fn send(&mut self) -> Result<()> {
        while !self.queue.is_empty() {
            let Some(number) = self.idle.pop_front() else {
                return Ok(());
            };
            if self.wires[number].address != self.reach.address {
                // The old one leaves the epoll set as it is closed.
                self.wires[number].stream = self.connect(number)?;
                self.wires[number].address = self.reach.address;
            }
            let wire = &mut self.wires[number];
            let mut writes = false;
            while wire.tokens.len() < self.reach.pipeline.max(1)
                && let Some((token, mut command, write)) = self.queue.pop_front()
            {
                wire.tokens.push(token);
                wire.out.extend_from_slice(&command);
                writes |= write;
                command.clear();
                self.spare.push(command);
            }
            wire.missing = wire.tokens.len();
            wire.refused = false;
            wire.wait = writes && self.reach.waits == Waits::OneReplica;
            if wire.wait {
                array(&mut wire.out, &[b"WAIT", b"1", WAIT_MS]);
                wire.missing += 1;
            }
            self.flush(number)?;
        }
        Ok(())
    }

    fn flush(&mut self, number: usize) -> Result<()> {
        let wire = &mut self.wires[number];
        let mut sent = 0;
        let stuck = loop {
            if sent == wire.out.len() {
                break false;
            }
            match wire.stream.write(&wire.out[sent..]) {
                Ok(0) => bail!("the server takes no more bytes"),
                Ok(count) => sent += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break true,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error).context("sending"),
            }
        };
        wire.out.drain(..sent);
        if stuck != wire.stuck {
            wire.stuck = stuck;
            let mut flags = epoll::EventFlags::IN;
            flags.set(epoll::EventFlags::OUT, stuck);
            let data = epoll::EventData::new_u64(number as u64);
            epoll::modify(&self.epoll, &wire.stream, data, flags).context("epoll")?;
        }
        Ok(())
    }

    fn receive(&mut self, number: usize, done: &mut Vec<Done>) -> Result<()> {
        let wire = &mut self.wires[number];
        let mut buffer = [0; 16_384];
        loop {
            match wire.stream.read(&mut buffer) {
                Ok(0) => bail!("the server closed the connection"),
                Ok(count) => {
                    wire.arrived.extend_from_slice(&buffer[..count]);
                    if count < buffer.len() {
                        break;
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error).context("receiving"),
            }
        }
        let mut taken = 0;
        while wire.missing > 0
            && let Some((len, answer)) = answer(&wire.arrived[taken..])?
        {
            taken += len;
            wire.missing -= 1;
            match answer {
                Answer::Error(text) if text.starts_with("MOVED ") => {
                    let place = text.rsplit(' ').next().unwrap_or_default();
                    self.reach.address = place
                        .parse()
                        .with_context(|| format!("the server says {text}"))?;
                    wire.refused = true;
                }
                Answer::Error(text) if !retryable(&text) => bail!("the server says {text}"),
                Answer::Error(_) => wire.refused = true,
                Answer::Number(replicas) if wire.wait && wire.missing == 0 => {
                    wire.refused |= replicas < 1;
                }
                _ => {}
            }
        }
        wire.arrived.drain(..taken);
        if wire.missing == 0 && !wire.tokens.is_empty() {
            let outcome = match wire.refused {
                true => Outcome::Refused,
                false => Outcome::Done,
            };
            done.extend(wire.tokens.drain(..).map(|token| Done { token, outcome }));
            self.idle.push_back(number);
        }
        Ok(())
    }
}

/// Errors after which another attempt may succeed.
fn retryable(text: &str) -> bool {
    ["TRYAGAIN", "CLUSTERDOWN", "LOADING", "BUSY", "NOREPLICAS"]
        .iter()
        .any(|word| text.starts_with(word))
}

fn greet(mut stream: &TcpStream, command: &[Vec<u8>]) -> Result<()> {
    let mut bytes = Vec::new();
    let parts: Vec<&[u8]> = command.iter().map(Vec::as_slice).collect();
    array(&mut bytes, &parts);
    stream.write_all(&bytes)?;
    let mut arrived = Vec::new();
    let mut buffer = [0; 512];
    loop {
        let count = stream.read(&mut buffer)?;
        arrived.extend_from_slice(&buffer[..count]);
        match answer(&arrived)? {
            Some((_, Answer::Error(text))) => bail!("the server says {text}"),
            Some(_) => return Ok(()),
            None if count == 0 => bail!("the server closed the connection"),
            None => {}
        }
    }
}

impl Lane for WireLane {
    fn submit(&mut self, token: u64, request: Request<'_>) -> Result<()> {
        let mut command = self.spare.pop().unwrap_or_default();
        let write = match request {
            Request::Read(key) => {
                array(&mut command, &[b"GET", &key]);
                false
            }
            Request::Write([pair]) => {
                array(&mut command, &[b"SET", &pair.key, pair.value]);
                true
            }
            Request::Write(pairs) => {
                let mut parts: Vec<&[u8]> = vec![b"MSET"];
                for pair in pairs {
                    parts.push(&pair.key);
                    parts.push(pair.value);
                }
                array(&mut command, &parts);
                true
            }
            Request::Scan(..) => bail!("there are no range scans"),
        };
        self.queue.push_back((token, command, write));
        Ok(())
    }

    fn poll(&mut self, patience: Duration, done: &mut Vec<Done>) -> Result<()> {
        self.send()?;
        let timeout = Timespec {
            tv_sec: patience.as_secs() as i64,
            tv_nsec: patience.subsec_nanos().into(),
        };
        self.events.clear();
        let events = rustix::buffer::spare_capacity(&mut self.events);
        match epoll::wait(&self.epoll, events, Some(&timeout)) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Ok(()),
            Err(error) => return Err(error).context("epoll"),
        }
        for place in 0..self.events.len() {
            let event = self.events[place];
            let number = event.data.u64() as usize;
            let flags = event.flags;
            if flags.contains(epoll::EventFlags::OUT) {
                self.flush(number)?;
            }
            self.receive(number, done)?;
        }
        Ok(())
    }
}

/// A command in wire form.
fn array(out: &mut Vec<u8>, parts: &[&[u8]]) {
    // Writing to a vector does not fail.
    let _ = write!(out, "*{}\r\n", parts.len());
    for part in parts {
        let _ = write!(out, "${}\r\n", part.len());
        out.extend_from_slice(part);
        out.extend_from_slice(b"\r\n");
    }
}

/// What matters of an answer.
#[derive(Debug, PartialEq, Eq)]
enum Answer {
    Error(String),
    Number(i64),
    Other,
}

/// The first answer and its length; `None` while it is not whole.
fn answer(bytes: &[u8]) -> Result<Option<(usize, Answer)>> {
    let Some(end) = bytes.windows(2).position(|two| two == b"\r\n") else {
        return Ok(None);
    };
    let line = String::from_utf8_lossy(&bytes[1..end]);
    let number = || -> Result<i64> {
        line.parse()
            .with_context(|| format!("{line:?} where a number was expected"))
    };
    let after = end + 2;
    Ok(match bytes[0] {
        b'+' | b'_' => Some((after, Answer::Other)),
        b'-' => Some((after, Answer::Error(line.into_owned()))),
        b':' => Some((after, Answer::Number(number()?))),
        b'$' => match usize::try_from(number()?) {
            Err(_) => Some((after, Answer::Other)),
            Ok(len) if bytes.len() >= after + len + 2 => Some((after + len + 2, Answer::Other)),
            Ok(_) => None,
        },
        b'*' => {
            let mut at = after;
            for _ in 0..number()?.max(0) {
                let Some((len, _)) = answer(&bytes[at..])? else {
                    return Ok(None);
                };
                at += len;
            }
            Some((at, Answer::Other))
        }
        other => bail!("an answer begins with {:?}", char::from(other)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn answers_are_found_whole_wherever_they_are_cut() {
        let text = b"+OK\r\n$5\r\nhe\r\no\r\n$-1\r\n:42\r\n*2\r\n$1\r\na\r\n:1\r\n-ERR no\r\n";
        let expected = [
            (5, Answer::Other),
            (11, Answer::Other),
            (5, Answer::Other),
            (5, Answer::Number(42)),
            (15, Answer::Other),
            (9, Answer::Error("ERR no".into())),
        ];
        let mut at = 0;
        for (len, wanted) in expected {
            for cut in 0..len {
                assert_eq!(answer(&text[at..at + cut]).expect("an answer"), None);
            }
            assert_eq!(answer(&text[at..]).expect("an answer"), Some((len, wanted)));
            at += len;
        }
        assert_eq!(at, text.len());
        assert!(answer(b"!what\r\n").is_err());
        assert!(answer(b":x\r\n").is_err());
    }

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
    fn a_batch_is_done_when_a_replica_has_it_and_refused_when_none_has() {
        let waits = |seen: &[u8]| seen.windows(4).filter(|word| word == b"WAIT").count();
        let (all, seen) = outcomes(1, Waits::OneReplica);
        assert!(all.iter().all(|one| *one == Outcome::Done));
        assert_eq!(waits(&seen), 2, "one per batch");
        let (all, _) = outcomes(0, Waits::OneReplica);
        assert!(all.iter().all(|one| *one == Outcome::Refused));
        let (all, seen) = outcomes(0, Waits::Never);
        assert!(all.iter().all(|one| *one == Outcome::Done));
        assert_eq!(waits(&seen), 0);
    }
}

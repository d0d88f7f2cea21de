//! The Redis protocol as lanes: many connections in one thread, each with one batch of commands in
//! flight at a time. A batch counts as answered when all of it is.
//!
//! ```text
//!   WireLane    to whoever leads                              wires/leader.rs
//!   ShardLane   to the server that has a key's slot           wires/shards.rs
//! ```

mod leader;
mod shards;

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use cyclone_bench::drive::{Done, Outcome, Request};
use rustix::event::{Timespec, epoll};

pub use leader::{WireLane, Wires};
pub use shards::ShardLane;

/// What follows the writes of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waits {
    /// Nothing: an answer is a promise already.
    Never,
    /// WAIT 1: one replica has them.
    OneReplica,
}

/// WAIT's patience, ms.
const WAIT_MS: &[u8] = b"10000";

/// Commands that travel together.
#[derive(Clone, Copy, Debug)]
struct Batch {
    most: usize,
    waits: Waits,
}

/// A command that waits for a connection.
struct Command {
    token: u64,
    bytes: Vec<u8>,
    writes: bool,
}

/// Commands, and the buffers of those that were sent.
#[derive(Default)]
struct Commands {
    spare: Vec<Vec<u8>>,
}

impl Commands {
    fn make(&mut self, token: u64, request: Request<'_>) -> Result<Command> {
        let mut bytes = self.spare.pop().unwrap_or_default();
        let writes = match request {
            Request::Read(key) => {
                array(&mut bytes, &[b"GET", &key]);
                false
            }
            Request::Write([pair]) => {
                array(&mut bytes, &[b"SET", &pair.key, pair.value]);
                true
            }
            Request::Write(pairs) => {
                let mut parts: Vec<&[u8]> = vec![b"MSET"];
                for pair in pairs {
                    parts.push(&pair.key);
                    parts.push(pair.value);
                }
                array(&mut bytes, &parts);
                true
            }
            Request::Scan(..) => bail!("there are no range scans"),
        };
        Ok(Command {
            token,
            bytes,
            writes,
        })
    }

    fn take_back(&mut self, mut bytes: Vec<u8>) {
        bytes.clear();
        self.spare.push(bytes);
    }
}

/// Says which connections have something, by number.
struct Readiness {
    epoll: OwnedFd,
    events: Vec<epoll::Event>,
}

impl Readiness {
    fn new() -> Result<Readiness> {
        Ok(Readiness {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC).context("epoll")?,
            events: Vec::with_capacity(256),
        })
    }

    /// Waits at most `patience` for the first one.
    fn wait(&mut self, patience: Duration) -> Result<()> {
        let timeout = Timespec {
            tv_sec: patience.as_secs() as i64,
            tv_nsec: patience.subsec_nanos().into(),
        };
        self.events.clear();
        let events = rustix::buffer::spare_capacity(&mut self.events);
        match epoll::wait(&self.epoll, events, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error).context("epoll"),
        }
    }

    /// The connection of an event of the last wait, and whether it takes bytes again.
    fn event(&self, place: usize) -> Option<(usize, bool)> {
        let event = self.events.get(place)?;
        let (data, flags) = (event.data, event.flags);
        Some((data.u64() as usize, flags.contains(epoll::EventFlags::OUT)))
    }
}

/// One connection.
struct Wire {
    number: usize,
    address: SocketAddr,
    stream: TcpStream,
    /// Bytes to be sent.
    out: Vec<u8>,
    /// Whether the socket would not take all of them.
    stuck: bool,
    /// Bytes that have arrived and are no whole answer yet.
    arrived: Vec<u8>,
    /// Operations of the batch in flight.
    tokens: Vec<u64>,
    /// Answers that are still to come, WAIT's included.
    missing: usize,
    /// Of all of them: one was an error, or WAIT found no replica in its time.
    outcome: Outcome,
    /// Whether WAIT's is the last one.
    wait: bool,
}

impl Wire {
    /// Connects; `greeting` is a command sent first, empty for none.
    fn open(
        number: usize,
        address: SocketAddr,
        greeting: &[Vec<u8>],
        ready: &Readiness,
    ) -> Result<Wire> {
        let stream =
            TcpStream::connect(address).with_context(|| format!("cannot connect to {address}"))?;
        stream.set_nodelay(true)?;
        if !greeting.is_empty() {
            greet(&stream, greeting)?;
        }
        stream.set_nonblocking(true)?;
        let data = epoll::EventData::new_u64(number as u64);
        epoll::add(&ready.epoll, &stream, data, epoll::EventFlags::IN).context("epoll")?;
        Ok(Wire {
            number,
            address,
            stream,
            out: Vec::new(),
            stuck: false,
            arrived: Vec::new(),
            tokens: Vec::new(),
            missing: 0,
            outcome: Outcome::Done,
            wait: false,
        })
    }

    /// Sends the next batch of a queue that is not empty; nothing may be in flight.
    fn send(
        &mut self,
        queue: &mut VecDeque<Command>,
        batch: Batch,
        commands: &mut Commands,
        ready: &Readiness,
    ) -> Result<()> {
        let mut writes = false;
        while self.tokens.len() < batch.most.max(1)
            && let Some(command) = queue.pop_front()
        {
            self.tokens.push(command.token);
            self.out.extend_from_slice(&command.bytes);
            writes |= command.writes;
            commands.take_back(command.bytes);
        }
        self.missing = self.tokens.len();
        self.outcome = Outcome::Done;
        self.wait = writes && batch.waits == Waits::OneReplica;
        if self.wait {
            array(&mut self.out, &[b"WAIT", b"1", WAIT_MS]);
            self.missing += 1;
        }
        self.flush(ready)
    }

    fn flush(&mut self, ready: &Readiness) -> Result<()> {
        let mut sent = 0;
        let stuck = loop {
            if sent == self.out.len() {
                break false;
            }
            match self.stream.write(&self.out[sent..]) {
                Ok(0) => bail!("the server takes no more bytes"),
                Ok(count) => sent += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break true,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error).context("sending"),
            }
        };
        self.out.drain(..sent);
        if stuck != self.stuck {
            self.stuck = stuck;
            let mut flags = epoll::EventFlags::IN;
            flags.set(epoll::EventFlags::OUT, stuck);
            let data = epoll::EventData::new_u64(self.number as u64);
            epoll::modify(&ready.epoll, &self.stream, data, flags).context("epoll")?;
        }
        Ok(())
    }

    fn receive(&mut self) -> Result<()> {
        let mut buffer = [0; 16_384];
        loop {
            match self.stream.read(&mut buffer) {
                Ok(0) => bail!("the server closed the connection"),
                Ok(count) => {
                    self.arrived.extend_from_slice(&buffer[..count]);
                    if count < buffer.len() {
                        return Ok(());
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error).context("receiving"),
            }
        }
    }

    /// Takes the answers that have arrived; `moved` hears where a key is said to be. Returns
    /// whether the batch has ended.
    fn settle(&mut self, moved: &mut dyn FnMut(SocketAddr), done: &mut Vec<Done>) -> Result<bool> {
        let mut taken = 0;
        while self.missing > 0
            && let Some((len, answer)) = answer(&self.arrived[taken..])?
        {
            taken += len;
            self.missing -= 1;
            match answer {
                Answer::Error(text) if text.starts_with("MOVED ") => {
                    let place = text.rsplit(' ').next().unwrap_or_default();
                    moved(
                        place
                            .parse()
                            .with_context(|| format!("the server says {text}"))?,
                    );
                    self.outcome = worse(self.outcome, Outcome::Refused);
                }
                Answer::Error(text) if !retryable(&text) => bail!("the server says {text}"),
                Answer::Error(text) if text.starts_with(UNKNOWN) => {
                    self.outcome = Outcome::Unfinished;
                }
                Answer::Error(_) => self.outcome = worse(self.outcome, Outcome::Refused),
                Answer::Number(replicas) if self.wait && self.missing == 0 && replicas < 1 => {
                    self.outcome = Outcome::Unfinished;
                }
                _ => {}
            }
        }
        self.arrived.drain(..taken);
        if self.missing > 0 || self.tokens.is_empty() {
            return Ok(false);
        }
        let outcome = self.outcome;
        done.extend(self.tokens.drain(..).map(|token| Done { token, outcome }));
        Ok(true)
    }
}

/// Of a batch: it is refused if nothing else is worse, and of unknown fate if any part of it is.
pub(super) fn worse(one: Outcome, other: Outcome) -> Outcome {
    match (one, other) {
        (Outcome::Unfinished, _) | (_, Outcome::Unfinished) => Outcome::Unfinished,
        (Outcome::Refused, _) | (_, Outcome::Refused) => Outcome::Refused,
        (Outcome::Done, Outcome::Done) => Outcome::Done,
    }
}

/// What may have been carried out is answered so.
const UNKNOWN: &str = "ERR outcome unknown";

/// Errors after which another attempt may succeed, or whose command may have been carried out.
fn retryable(text: &str) -> bool {
    [
        "TRYAGAIN",
        "CLUSTERDOWN",
        "LOADING",
        "BUSY",
        "NOREPLICAS",
        UNKNOWN,
    ]
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
}

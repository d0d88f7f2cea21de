//! Connections to the servers of a cluster: each command goes to the one that has its key's slot,
//! as cluster clients do it.
//!
//! A server that cannot be reached is tried again a few milliseconds later; what waits for it
//! meanwhile is refused then, and asked for elsewhere if its slots have moved.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use cyclone::resp;
use cyclone_bench::drive::{Done, Lane, Outcome, Request};
use cyclone_wire::slot::{self, SLOTS};

use super::{Batch, Command, Commands, Readiness, Waits, Wire};

/// Between two attempts to reach a server, or to hear where slots are.
const AGAIN_AFTER: Duration = Duration::from_millis(5);
/// For an answer about slots.
const MAP_PATIENCE: Duration = Duration::from_millis(200);

/// First slot, last slot, and who has them.
type Ranges = Vec<(u16, u16, String)>;

/// One server's part.
struct Server {
    address: SocketAddr,
    idle: Vec<usize>,
    queue: VecDeque<Command>,
    /// It did not answer: not before this time again.
    not_before: Option<Instant>,
}

/// Connections to all servers.
pub struct ShardLane {
    servers: Vec<Server>,
    /// By number; opened when first needed. A server's numbers follow each other.
    wires: Vec<Option<Wire>>,
    per_server: usize,
    /// The server of each slot.
    places: Vec<u8>,
    /// Whether a server has said that a slot is elsewhere.
    is_stale: bool,
    asked_at: Instant,
    batch: Batch,
    ready: Readiness,
    commands: Commands,
    /// Operations that ended with their connection.
    ended: Vec<Done>,
}

impl ShardLane {
    /// As many connections to each server as so many operations in flight may need at once.
    ///
    /// # Errors
    /// When no server says where slots are.
    pub fn open(addresses: &[SocketAddr], pipeline: usize, share: usize) -> Result<ShardLane> {
        let per_server = share.div_ceil(pipeline.max(1)).max(1);
        let servers = addresses.iter().enumerate().map(|(at, &address)| Server {
            address,
            idle: (at * per_server..(at + 1) * per_server).rev().collect(),
            queue: VecDeque::new(),
            not_before: None,
        });
        let mut lane = ShardLane {
            servers: servers.collect(),
            wires: (0..addresses.len() * per_server).map(|_| None).collect(),
            per_server,
            places: vec![0; usize::from(SLOTS)],
            is_stale: true,
            asked_at: Instant::now(),
            batch: Batch {
                most: pipeline,
                waits: Waits::Never,
            },
            ready: Readiness::new()?,
            commands: Commands::default(),
            ended: Vec::new(),
        };
        if !lane.learn() {
            bail!("no server says where slots are");
        }
        Ok(lane)
    }

    /// The server, by its place among the addresses, that a key is asked of.
    pub fn place_of(&self, key: &[u8]) -> usize {
        usize::from(self.places[usize::from(slot::slot(key))])
    }

    /// Hears from any server where slots are.
    fn learn(&mut self) -> bool {
        self.asked_at = Instant::now();
        for at in 0..self.servers.len() {
            if self.servers[at].not_before.is_some() {
                continue;
            }
            if let Ok(ranges) = slots_of(self.servers[at].address) {
                self.take(ranges);
                self.is_stale = false;
                return true;
            }
        }
        false
    }

    fn take(&mut self, ranges: Ranges) {
        for (first, last, name) in ranges {
            let at = |server: &Server| server.address.to_string() == name;
            let (Some(place), true) = (self.servers.iter().position(at), last < SLOTS) else {
                continue;
            };
            self.places[usize::from(first)..=usize::from(last)].fill(place as u8);
        }
    }

    /// Gives what waits to connections that are free.
    fn send(&mut self) {
        let now = Instant::now();
        for at in 0..self.servers.len() {
            let server = &mut self.servers[at];
            if server.not_before.is_some_and(|time| now < time) {
                continue;
            }
            while !self.servers[at].queue.is_empty() {
                let Some(number) = self.servers[at].idle.pop() else {
                    break;
                };
                if self.give(at, number).is_err() {
                    self.lose(number);
                    break;
                }
                self.servers[at].not_before = None;
            }
        }
    }

    fn give(&mut self, at: usize, number: usize) -> Result<()> {
        let server = &mut self.servers[at];
        let wire = match &mut self.wires[number] {
            Some(wire) => wire,
            closed => closed.insert(Wire::open(number, server.address, &[], &self.ready)?),
        };
        wire.send(
            &mut server.queue,
            self.batch,
            &mut self.commands,
            &self.ready,
        )
    }

    /// A connection is gone: what was in flight or waited for its server has an unknown fate, or
    /// none.
    fn lose(&mut self, number: usize) {
        let server = &mut self.servers[number / self.per_server];
        if let Some(wire) = self.wires[number].take() {
            let outcome = Outcome::Unfinished;
            let sent = wire.tokens.into_iter();
            self.ended.extend(sent.map(|token| Done { token, outcome }));
        }
        for command in server.queue.drain(..) {
            self.ended.push(Done {
                token: command.token,
                outcome: Outcome::Refused,
            });
            self.commands.take_back(command.bytes);
        }
        server.idle.push(number);
        server.not_before = Some(Instant::now() + AGAIN_AFTER);
        self.is_stale = true;
    }

    fn take_answers(&mut self, number: usize, takes: bool, done: &mut Vec<Done>) -> Result<bool> {
        let Some(wire) = &mut self.wires[number] else {
            return Ok(true);
        };
        let arrived = match takes {
            true => wire.flush(&self.ready),
            false => Ok(()),
        };
        if arrived.and_then(|()| wire.receive()).is_err() {
            return Ok(false);
        }
        let is_stale = &mut self.is_stale;
        if wire.settle(&mut |_| *is_stale = true, done)? {
            self.servers[number / self.per_server].idle.push(number);
        }
        Ok(true)
    }
}

/// What a server says about slots.
fn slots_of(address: SocketAddr) -> Result<Ranges> {
    let mut connection = resp::connect(address, MAP_PATIENCE)?;
    let mut command = redis::cmd("CLUSTER");
    let ranges: Vec<Vec<redis::Value>> = command
        .arg("SLOTS")
        .query(&mut connection)
        .context("CLUSTER SLOTS")?;
    let ranges: Option<Ranges> = ranges.into_iter().map(range).collect();
    ranges.context("an answer to CLUSTER SLOTS of another form")
}

/// First slot, last slot, then the servers, the one that serves them first: host, port, and what
/// does not matter.
fn range(parts: Vec<redis::Value>) -> Option<(u16, u16, String)> {
    let mut parts = parts.into_iter();
    let mut number = || redis::from_redis_value(parts.next()?).ok();
    let (first, last) = (number()?, number()?);
    let server: Vec<redis::Value> = redis::from_redis_value(parts.next()?).ok()?;
    let mut server = server.into_iter();
    let host: String = redis::from_redis_value(server.next()?).ok()?;
    let port: u16 = redis::from_redis_value(server.next()?).ok()?;
    Some((first, last, format!("{host}:{port}")))
}

impl Lane for ShardLane {
    fn submit(&mut self, token: u64, request: Request<'_>) -> Result<()> {
        let place = match &request {
            Request::Read(key) | Request::Scan(key, _) => self.place_of(key),
            Request::Write(pairs) => {
                let first = pairs.first().context("a write of nothing")?;
                self.place_of(&first.key)
            }
        };
        let command = self.commands.make(token, request)?;
        self.servers[place].queue.push_back(command);
        Ok(())
    }

    fn poll(&mut self, patience: Duration, done: &mut Vec<Done>) -> Result<()> {
        if self.is_stale && self.asked_at.elapsed() >= AGAIN_AFTER {
            self.learn();
        }
        self.send();
        let is_down = |it: &Server| it.not_before.is_some() && !it.queue.is_empty();
        let patience = match self.servers.iter().any(is_down) || !self.ended.is_empty() {
            true => patience.min(Duration::from_millis(1)),
            false => patience,
        };
        self.ready.wait(patience)?;
        let mut place = 0;
        while let Some((number, takes)) = self.ready.event(place) {
            place += 1;
            if !self.take_answers(number, takes, done)? {
                self.lose(number);
            }
        }
        done.append(&mut self.ended);
        Ok(())
    }
}

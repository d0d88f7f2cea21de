//! A member's program: takes operations, does them with its own CPU, hands them on.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cyclone_fabric::{Address, ConnectionId, Endpoint, Event, FabricError, Operation, Token};
use cyclone_pmem::SharedArea;

use super::message::{
    Header, Incoming, Kind, decode_open, decode_operation, encode_answer, encode_plain,
};
use crate::group::GroupOp;

/// The most sessions of one member.
pub const MAX_SESSIONS: usize = 1024;
/// The largest window that a session may ask for.
pub const MAX_WINDOW: u64 = 4096;
/// Ranges remembered for a flush; more are taken for everything.
const MAX_DIRTY: usize = 256;

/// How a member's program finds its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NaiveMode {
    /// Sleeps until something arrives.
    Event,
    /// Looks all the time.
    Polling,
}

/// Plain counters of a member.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NaiveStats {
    /// Operations done here.
    pub operations: u64,
    /// Messages that were none, or not from whom they should be.
    pub refused: u64,
}

struct Session {
    token: Token,
    /// The tenant's memory; offsets count from its first byte.
    memory: SharedArea,
    client: ConnectionId,
    /// Where operations go from here; nowhere at the last member.
    next: Option<ConnectionId>,
    member: usize,
    members: usize,
    window: u64,
    /// The next operation's number; others wait, where the fabric does not keep order.
    expected: u64,
    early: BTreeMap<u64, Vec<u8>>,
    /// What was stored since the last flush.
    dirty: Vec<(u64, u64)>,
    /// Messages that the fabric did not take yet.
    out: VecDeque<(ConnectionId, Vec<u8>)>,
}

/// One member of naive groups: a range of an endpoint's memory, for tenants whose tokens it knows.
pub struct NaiveMember {
    endpoint: Box<dyn Endpoint>,
    memory: SharedArea,
    /// By token: the tenant's part of the memory.
    tenants: BTreeMap<u64, SharedArea>,
    sessions: BTreeMap<u64, Session>,
    events: Vec<Event>,
    stats: NaiveStats,
}

impl NaiveMember {
    /// A member that keeps `len` bytes from `offset` of its endpoint's memory.
    pub fn new(
        endpoint: Box<dyn Endpoint>,
        offset: u64,
        len: u64,
    ) -> Result<NaiveMember, FabricError> {
        let memory = endpoint.memory();
        if !memory.contains(offset, len) || !offset.is_multiple_of(64) {
            return Err(FabricError::OutOfBounds {
                offset,
                len,
                memory: memory.len(),
            });
        }
        let memory = memory.part(offset, len);
        Ok(NaiveMember {
            endpoint,
            memory,
            tenants: BTreeMap::new(),
            sessions: BTreeMap::new(),
            events: Vec::new(),
            stats: NaiveStats::default(),
        })
    }

    /// Where clients and other members reach it.
    pub fn address(&self) -> Address {
        self.endpoint.address()
    }

    /// The memory it keeps.
    pub fn memory(&self) -> &SharedArea {
        &self.memory
    }

    /// What it has done so far.
    pub fn stats(&self) -> NaiveStats {
        self.stats
    }

    /// Lets a tenant in, to all of the memory.
    pub fn grant(&mut self, token: Token) {
        self.tenants.insert(token.0, self.memory.clone());
    }

    /// Lets a tenant in to `len` bytes from `offset` of the memory, which are all that it sees. The
    /// ranges of other tenants are not checked.
    pub fn grant_range(&mut self, token: Token, offset: u64, len: u64) -> Result<(), FabricError> {
        if !self.memory.contains(offset, len) || !offset.is_multiple_of(64) {
            return Err(FabricError::OutOfBounds {
                offset,
                len,
                memory: self.memory.len(),
            });
        }
        let part = self.memory.part(offset, len);
        self.tenants.insert(token.0, part);
        Ok(())
    }

    /// Ends a tenant's access.
    pub fn fence_off(&mut self, token: Token) {
        self.tenants.remove(&token.0);
        let theirs = self.sessions.iter().filter(|(_, s)| s.token == token);
        let theirs: Vec<u64> = theirs.map(|(number, _)| *number).collect();
        for number in theirs {
            self.fail(number, "the tenant's access has ended");
        }
    }

    /// Takes what has arrived; returns whether there was anything. Never waits.
    pub fn step(&mut self) -> bool {
        let mut events = std::mem::take(&mut self.events);
        self.endpoint.poll(&mut events);
        let any = !events.is_empty();
        for event in events.drain(..) {
            match event {
                Event::Received { connection, bytes } => self.receive(connection, bytes),
                Event::Failed { connection, .. } | Event::Disconnected { connection } => {
                    self.lost(connection);
                }
                _ => {}
            }
        }
        self.events = events;
        self.send_queued();
        any
    }

    /// Sleeps until `step` may have something to do, at most `timeout`.
    pub fn wait(&mut self, timeout: Duration) {
        self.endpoint.wait(timeout);
    }

    /// Works until `stop` is set.
    pub fn run(&mut self, mode: NaiveMode, stop: &AtomicBool) {
        while !stop.load(Ordering::Relaxed) {
            let any = self.step();
            if any {
                continue;
            }
            match mode {
                NaiveMode::Event => self.wait(Duration::from_millis(10)),
                NaiveMode::Polling => std::hint::spin_loop(),
            }
        }
    }

    fn receive(&mut self, connection: ConnectionId, bytes: Vec<u8>) {
        let Ok((header, fields)) = Header::decode(&bytes) else {
            self.stats.refused += 1;
            return;
        };
        match header.kind {
            Kind::Open => self.open(connection, &header, fields),
            Kind::Operation => self.operation(&header, bytes),
            _ => self.stats.refused += 1,
        }
    }

    fn open(&mut self, client: ConnectionId, header: &Header, fields: &[u8]) {
        let message = match self.admit(client, header, fields) {
            Ok(session) => {
                self.sessions.insert(header.session, session);
                let opened = encode_plain(Kind::Opened, header.session, "");
                return self.send(header.session, client, opened);
            }
            Err(why) => encode_plain(Kind::Failed, header.session, &why),
        };
        self.stats.refused += 1;
        let send = Operation::Send { bytes: &message };
        // Best effort: a client that is not told gives up after a time-out.
        let _ = self.endpoint.post(client, send, 0);
    }

    /// A session to be, or why there cannot be one.
    fn admit(
        &mut self,
        client: ConnectionId,
        header: &Header,
        fields: &[u8],
    ) -> Result<Session, String> {
        let place = decode_open(fields).map_err(|error| error.to_string())?;
        let memory = self.tenants.get(&header.token.0).cloned();
        let memory = memory.ok_or("the token is unknown")?;
        if self.sessions.contains_key(&header.session) {
            return Err("the session is taken".to_owned());
        }
        if self.sessions.len() >= MAX_SESSIONS {
            return Err("too many sessions".to_owned());
        }
        if !(1..=MAX_WINDOW).contains(&header.number) {
            return Err("a strange window".to_owned());
        }
        let next = match place.next {
            [] => None,
            address => {
                let next = self.endpoint.connect(&Address(address.to_vec()));
                Some(next.map_err(|error| error.to_string())?)
            }
        };
        Ok(Session {
            token: header.token,
            memory,
            client,
            next,
            member: place.member,
            members: place.members,
            window: header.number,
            expected: 0,
            early: BTreeMap::new(),
            dirty: Vec::new(),
            out: VecDeque::new(),
        })
    }

    fn operation(&mut self, header: &Header, bytes: Vec<u8>) {
        let Some(session) = self.sessions.get_mut(&header.session) else {
            self.stats.refused += 1;
            return;
        };
        let ahead = header.number.checked_sub(session.expected);
        if session.token != header.token || ahead.is_none_or(|ahead| ahead >= session.window) {
            self.stats.refused += 1;
            return;
        }
        session.early.insert(header.number, bytes);
        while let Some(session) = self.sessions.get_mut(&header.session)
            && let Some(bytes) = session.early.remove(&session.expected)
        {
            session.expected += 1;
            self.perform(header.session, bytes);
        }
    }

    /// Does the next operation and hands it on.
    fn perform(&mut self, number: u64, mut bytes: Vec<u8>) {
        let Some(session) = self.sessions.get_mut(&number) else {
            return;
        };
        let done = match Header::decode(&bytes) {
            Ok((header, fields)) => match decode_operation(header.what, fields) {
                Ok(incoming) => perform(session, &incoming)
                    .map(|(results_at, result)| (header, results_at, result)),
                Err(error) => Err(error.to_string()),
            },
            Err(error) => Err(error.to_string()),
        };
        match done {
            Ok((header, results_at, result)) => {
                self.stats.operations += 1;
                bytes.extend_from_slice(&result);
                let (to, message) = match session.next {
                    Some(next) => (next, bytes),
                    None => {
                        let results = results_at.map_or(&[][..], |at| &bytes[at..]);
                        (session.client, encode_answer(&header, results))
                    }
                };
                self.send(number, to, message);
            }
            Err(why) => self.fail(number, &why),
        }
    }

    fn send(&mut self, number: u64, to: ConnectionId, message: Vec<u8>) {
        let Some(session) = self.sessions.get_mut(&number) else {
            return;
        };
        // A client never has more than its window in flight, so no more can wait here.
        if session.out.len() as u64 > session.window {
            return self.fail(number, "too many operations");
        }
        session.out.push_back((to, message));
        self.send_one(number);
    }

    fn send_one(&mut self, number: u64) {
        while let Some(session) = self.sessions.get_mut(&number)
            && let Some((to, message)) = session.out.front()
        {
            match self
                .endpoint
                .post(*to, Operation::Send { bytes: message }, 0)
            {
                Ok(()) => drop(session.out.pop_front()),
                Err(FabricError::Busy) => return,
                Err(error) => {
                    let why = format!("handing on: {error}");
                    return self.fail(number, &why);
                }
            }
        }
    }

    fn send_queued(&mut self) {
        let waiting = self.sessions.iter().filter(|(_, s)| !s.out.is_empty());
        let waiting: Vec<u64> = waiting.map(|(number, _)| *number).collect();
        for number in waiting {
            self.send_one(number);
        }
    }

    /// Ends a session and tells its client.
    fn fail(&mut self, number: u64, why: &str) {
        if let Some(session) = self.sessions.remove(&number) {
            self.stats.refused += 1;
            let failed = encode_plain(Kind::Failed, number, why);
            let send = Operation::Send { bytes: &failed };
            // Best effort, as above.
            let _ = self.endpoint.post(session.client, send, 0);
            if let Some(next) = session.next {
                self.endpoint.disconnect(next);
            }
        }
    }

    fn lost(&mut self, connection: ConnectionId) {
        let touched = self
            .sessions
            .iter()
            .filter(|(_, s)| s.client == connection || s.next == Some(connection));
        let touched: Vec<u64> = touched.map(|(number, _)| *number).collect();
        for number in touched {
            self.fail(number, "a neighbour is gone");
        }
    }
}

/// Does an operation here; answers where results begin in the message, and what this member adds to
/// them.
fn perform(
    session: &mut Session,
    incoming: &Incoming<'_>,
) -> Result<(Option<usize>, Vec<u8>), String> {
    let memory = session.memory.clone();
    let (operation, results_at) = match incoming {
        Incoming::Write { offset, bytes } => {
            if !memory.contains(*offset, bytes.len() as u64) {
                return Err(format!("{offset}+{} is outside", bytes.len()));
            }
            memory.write(*offset, bytes);
            note(session, *offset, bytes.len() as u64);
            return Ok((None, Vec::new()));
        }
        Incoming::Other {
            operation,
            results_at,
        } => (operation, *results_at),
    };
    operation
        .check(session.members, memory.len(), usize::MAX)
        .map_err(|error| error.to_string())?;
    match *operation {
        GroupOp::CompareSwap {
            offset,
            old,
            new,
            execute,
        } => {
            let mut before = 0;
            if execute & (1 << session.member) != 0 {
                before = memory.compare_swap(offset, old, new);
                note(session, offset, 8);
            }
            Ok((Some(results_at), before.to_le_bytes().to_vec()))
        }
        GroupOp::Copy { from, to, len } => {
            memory.write(to, &memory.read_vec(from, len));
            note(session, to, len);
            Ok((None, Vec::new()))
        }
        GroupOp::Flush => {
            for (offset, len) in session.dirty.drain(..) {
                memory.flush(offset, len);
            }
            memory.fence();
            Ok((None, Vec::new()))
        }
        GroupOp::Read {
            member,
            offset,
            len,
        } => {
            let here = member == session.member;
            let bytes = here.then(|| memory.read_vec(offset, len));
            Ok((Some(results_at), bytes.unwrap_or_default()))
        }
        GroupOp::Write { .. } => Ok((None, Vec::new())),
    }
}

fn note(session: &mut Session, offset: u64, len: u64) {
    if session.dirty.len() >= MAX_DIRTY {
        session.dirty = vec![(0, session.memory.len())];
    } else {
        session.dirty.push((offset, len));
    }
}

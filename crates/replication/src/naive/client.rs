//! The client's side of a naive chain.

use std::collections::VecDeque;
use std::time::Duration;

use cyclone_fabric::{Address, ConnectionId, Endpoint, Event, FabricError, Operation, Token};

use super::member::MAX_WINDOW;
use super::message::{
    Header, Kind, OVERHEAD_BYTES, Place, decode_answer, decode_why, encode_open, encode_operation,
};
use crate::group::operation::MAX_MEMBERS;
use crate::group::{GroupError, GroupEvent, GroupMemory, GroupOp};

/// One client's naive group. Operations are `Busy` until all members have answered.
pub struct NaiveGroup {
    endpoint: Box<dyn Endpoint>,
    members: Vec<ConnectionId>,
    opened: Vec<bool>,
    /// Openings that the fabric has not taken yet.
    openings: VecDeque<(ConnectionId, Vec<u8>)>,
    session: u64,
    token: Token,
    len: u64,
    window: usize,
    next: u64,
    /// Contexts in flight, the oldest first: they are answered in order.
    in_flight: VecDeque<u64>,
    events: Vec<Event>,
    broken: Option<String>,
    told: bool,
}

impl NaiveGroup {
    /// Opens a session over members that keep `len` bytes each, first hop first. `session` is a
    /// number that no other client of these members uses.
    pub fn open(
        mut endpoint: Box<dyn Endpoint>,
        members: &[Address],
        len: u64,
        token: Token,
        session: u64,
        window: usize,
    ) -> Result<NaiveGroup, GroupError> {
        if members.is_empty() || members.len() > MAX_MEMBERS {
            return Err(GroupError::MemberCount(members.len()));
        }
        let window = window.clamp(1, MAX_WINDOW as usize);
        let mut connections = Vec::with_capacity(members.len());
        let mut openings = VecDeque::new();
        for (member, address) in members.iter().enumerate() {
            let connection = endpoint.connect(address)?;
            let place = Place {
                member,
                members: members.len(),
                next: members.get(member + 1).map_or(&[], |next| &next.0),
            };
            let opening = encode_open(session, token, window as u64, &place);
            connections.push(connection);
            openings.push_back((connection, opening));
        }
        Ok(NaiveGroup {
            endpoint,
            opened: vec![false; connections.len()],
            members: connections,
            openings,
            session,
            token,
            len,
            window,
            next: 0,
            in_flight: VecDeque::new(),
            events: Vec::new(),
            broken: None,
            told: false,
        })
    }

    fn send_openings(&mut self) {
        while let Some((to, bytes)) = self.openings.front() {
            match self.endpoint.post(*to, Operation::Send { bytes }, 0) {
                Ok(()) => drop(self.openings.pop_front()),
                Err(FabricError::Busy) => return,
                Err(error) => return self.break_with(error.to_string()),
            }
        }
    }

    fn break_with(&mut self, why: String) {
        self.broken.get_or_insert(why);
        self.openings.clear();
        self.in_flight.clear();
    }

    fn receive(&mut self, from: ConnectionId, bytes: &[u8], events: &mut Vec<GroupEvent>) {
        let Some(member) = self.members.iter().position(|of| *of == from) else {
            return;
        };
        let (header, fields) = match Header::decode(bytes) {
            Ok((header, fields)) if header.session == self.session => (header, fields),
            _ => return,
        };
        match header.kind {
            Kind::Opened => self.opened[member] = true,
            Kind::Failed => self.break_with(format!("member {member}: {}", decode_why(fields))),
            Kind::Answer => {
                let oldest = self.next - self.in_flight.len() as u64;
                let answer = decode_answer(header.what, fields, self.members.len());
                match (answer, self.in_flight.pop_front()) {
                    (Ok(answer), Some(context)) if header.number == oldest => {
                        events.push(GroupEvent::Done { context, answer });
                    }
                    _ => self.break_with(format!("member {member} answers out of turn")),
                }
            }
            Kind::Open | Kind::Operation => {}
        }
    }
}

impl GroupMemory for NaiveGroup {
    fn members(&self) -> usize {
        self.members.len()
    }

    fn len(&self) -> u64 {
        self.len
    }

    fn max_transfer(&self) -> usize {
        let most = self.endpoint.capabilities().max_transfer;
        most.saturating_sub(OVERHEAD_BYTES)
    }

    fn submit(&mut self, operation: &GroupOp, context: u64) -> Result<(), GroupError> {
        operation.check(self.members.len(), self.len, self.max_transfer())?;
        if let Some(why) = &self.broken {
            return Err(GroupError::Broken(why.clone()));
        }
        if self.in_flight.len() >= self.window || self.opened.contains(&false) {
            return Err(GroupError::Busy);
        }
        let bytes = encode_operation(self.session, self.token, self.next, operation);
        let send = Operation::Send { bytes: &bytes };
        match self.endpoint.post(self.members[0], send, 0) {
            Ok(()) => {}
            Err(FabricError::Busy) => return Err(GroupError::Busy),
            Err(error) => {
                self.break_with(error.to_string());
                return Err(GroupError::Broken(error.to_string()));
            }
        }
        self.next += 1;
        self.in_flight.push_back(context);
        Ok(())
    }

    fn poll(&mut self, events: &mut Vec<GroupEvent>) {
        self.send_openings();
        let mut seen = std::mem::take(&mut self.events);
        self.endpoint.poll(&mut seen);
        for event in seen.drain(..) {
            match event {
                Event::Received { connection, bytes } => self.receive(connection, &bytes, events),
                Event::Failed {
                    connection,
                    failure,
                    ..
                } if self.members.contains(&connection) => self.break_with(failure.to_string()),
                Event::Disconnected { connection } if self.members.contains(&connection) => {
                    self.break_with("a member is gone".to_owned());
                }
                _ => {}
            }
        }
        self.events = seen;
        if let (Some(why), false) = (&self.broken, self.told) {
            self.told = true;
            events.push(GroupEvent::Broken { why: why.clone() });
        }
    }

    fn wait(&mut self, timeout: Duration) {
        self.endpoint.wait(timeout);
    }
}

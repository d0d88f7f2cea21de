//! Group memory over the fabric's chains.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use cyclone_fabric::{
    Address, Capabilities, ChainId, ChainOperation, ChainShape, ConnectionId, Endpoint, Event,
    FabricError, MemoryKey, Operation,
};

use super::operation::{Answer, GroupError, GroupEvent, GroupMemory, GroupOp, MAX_MEMBERS};

/// How a group is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupOptions {
    /// Hop by hop, or from the initiator to all at once.
    pub shape: ChainShape,
    /// The most operations in flight at once, at least 1.
    pub window: usize,
}

impl Default for GroupOptions {
    fn default() -> GroupOptions {
        GroupOptions {
            shape: ChainShape::Chain,
            window: 64,
        }
    }
}

/// One client's group: an endpoint and the members' registrations, all of one length.
pub struct Group {
    endpoint: Box<dyn Endpoint>,
    chain: ChainId,
    members: Vec<(ConnectionId, MemoryKey)>,
    window: usize,
    len: u64,
    /// Number of the next operation; the fabric's context.
    next: u64,
    /// Chain operations in flight in order of posting: number, the caller's context, the answer
    /// once it is there.
    in_flight: VecDeque<(u64, u64, Option<Answer>)>,
    /// Reads in flight: number to the caller's context.
    reads: HashMap<u64, u64>,
    events: Vec<Event>,
    broken: Option<String>,
    told: bool,
}

impl Group {
    /// Connects to the members, first hop first, and opens the chain. Takes the endpoint for good:
    /// what it receives that is not the group's is dropped.
    pub fn open(
        mut endpoint: Box<dyn Endpoint>,
        members: &[(Address, MemoryKey)],
        options: GroupOptions,
    ) -> Result<Group, GroupError> {
        let first = match members {
            [(_, first), ..] if members.len() <= MAX_MEMBERS => first.len,
            _ => return Err(GroupError::MemberCount(members.len())),
        };
        if let Some((_, other)) = members.iter().find(|(_, key)| key.len != first) {
            return Err(GroupError::Unequal {
                first,
                other: other.len,
            });
        }
        let mut connected = Vec::with_capacity(members.len());
        for (address, key) in members {
            connected.push((endpoint.connect(address)?, *key));
        }
        let chain = endpoint.open_chain(options.shape, &connected)?;
        Ok(Group {
            endpoint,
            chain,
            members: connected,
            window: options.window.max(1),
            len: first,
            next: 0,
            in_flight: VecDeque::new(),
            reads: HashMap::new(),
            events: Vec::new(),
            broken: None,
            told: false,
        })
    }

    /// What the provider promises, and who carries the operations from hop to hop.
    pub fn capabilities(&self) -> &Capabilities {
        self.endpoint.capabilities()
    }

    /// Gives the endpoint back; the members' connections are ended.
    pub fn close(mut self) -> Box<dyn Endpoint> {
        for (connection, _) in &self.members {
            self.endpoint.disconnect(*connection);
        }
        self.endpoint
    }

    fn post(&mut self, operation: &GroupOp, number: u64) -> Result<(), FabricError> {
        let operation = match *operation {
            GroupOp::Write { offset, ref bytes } => ChainOperation::Write { offset, bytes },
            GroupOp::CompareSwap {
                offset,
                old,
                new,
                execute,
            } => ChainOperation::CompareSwap {
                offset,
                old,
                new,
                execute,
            },
            GroupOp::Copy { from, to, len } => ChainOperation::Copy { from, to, len },
            GroupOp::Flush => ChainOperation::Flush,
            GroupOp::Read {
                member,
                offset,
                len,
            } => {
                let (connection, key) = &self.members[member];
                let read = Operation::Read { key, offset, len };
                return self.endpoint.post(*connection, read, number);
            }
        };
        self.endpoint.post_chain(self.chain, operation, number)
    }

    fn break_with(&mut self, why: String) {
        self.broken.get_or_insert(why);
        self.in_flight.clear();
        self.reads.clear();
    }

    fn take(&mut self, event: Event, events: &mut Vec<GroupEvent>) {
        match event {
            Event::ChainCompleted {
                chain,
                context,
                values,
            } if chain == self.chain => {
                let place = self.in_flight.iter_mut().find(|(n, ..)| *n == context);
                if let Some((.., answer)) = place {
                    *answer = Some(if values.is_empty() {
                        Answer::Done
                    } else {
                        Answer::Values(values)
                    });
                }
            }
            Event::Completed { context, bytes, .. } => {
                if let Some(context) = self.reads.remove(&context) {
                    events.push(GroupEvent::Done {
                        context,
                        answer: Answer::Bytes(bytes),
                    });
                }
            }
            Event::ChainFailed { chain, failure, .. } if chain == self.chain => {
                self.break_with(failure.to_string());
            }
            Event::Failed {
                connection,
                failure,
                ..
            } => {
                if self.members.iter().any(|(of, _)| *of == connection) {
                    self.break_with(failure.to_string());
                }
            }
            Event::Disconnected { connection } => {
                let member = self.members.iter().position(|(of, _)| *of == connection);
                if let Some(member) = member {
                    self.break_with(format!("member {member} is gone"));
                }
            }
            Event::ChainCompleted { .. } | Event::ChainFailed { .. } | Event::Received { .. } => {}
        }
    }
}

impl GroupMemory for Group {
    fn members(&self) -> usize {
        self.members.len()
    }

    fn len(&self) -> u64 {
        self.len
    }

    fn max_transfer(&self) -> usize {
        self.endpoint.capabilities().max_transfer
    }

    fn submit(&mut self, operation: &GroupOp, context: u64) -> Result<(), GroupError> {
        operation.check(self.members.len(), self.len, self.max_transfer())?;
        if let Some(why) = &self.broken {
            return Err(GroupError::Broken(why.clone()));
        }
        if self.in_flight.len() + self.reads.len() >= self.window {
            return Err(GroupError::Busy);
        }
        let number = self.next;
        match self.post(operation, number) {
            Ok(()) => {}
            Err(FabricError::Busy) => return Err(GroupError::Busy),
            Err(FabricError::Unknown(what)) => {
                let why = format!("the {what} is gone");
                self.break_with(why.clone());
                return Err(GroupError::Broken(why));
            }
            Err(error) => return Err(error.into()),
        }
        self.next += 1;
        if matches!(operation, GroupOp::Read { .. }) {
            self.reads.insert(number, context);
        } else {
            self.in_flight.push_back((number, context, None));
        }
        Ok(())
    }

    fn poll(&mut self, events: &mut Vec<GroupEvent>) {
        let mut seen = std::mem::take(&mut self.events);
        self.endpoint.poll(&mut seen);
        for event in seen.drain(..) {
            self.take(event, events);
        }
        self.events = seen;
        while let Some((_, context, Some(_))) = self.in_flight.front() {
            let context = *context;
            if let Some((.., Some(answer))) = self.in_flight.pop_front() {
                events.push(GroupEvent::Done { context, answer });
            }
        }
        if let (Some(why), false) = (&self.broken, self.told) {
            self.told = true;
            events.push(GroupEvent::Broken { why: why.clone() });
        }
    }

    fn wait(&mut self, timeout: Duration) {
        self.endpoint.wait(timeout);
    }
}

//! Native clients' requests: read, checked, and given to the logs they concern. Both loops that may
//! be asked do it alike: the replica's, and a log's own.

use cyclone_packet::Peer;
use cyclone_pmem::Payload;
use cyclone_wire::batch::Allowed;
use cyclone_wire::client::{self, ITEM_BYTES, ReadMode, Request};
use cyclone_wire::command::{Command, Operation, Query};
use cyclone_wire::reply::Reply;

use crate::fragmented::outline;
use crate::logset::LogSet;
use crate::requests::{Origin, Outcome, refuse_excess};
use crate::status::Counters;

/// The longest key and the longest value that are taken in, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SizeLimits {
    pub(crate) key: usize,
    pub(crate) value: usize,
}

impl SizeLimits {
    /// The configured limits, checked where a command enters so that all replicas need not agree on
    /// them.
    fn admits(self, operation: &Operation<'_>) -> bool {
        let keys_fit = operation.keys().iter().all(|key| key.len() <= self.key);
        keys_fit && operation.longest_value() <= self.value
    }
}

/// Takes requests in.
pub(crate) trait Intake {
    fn counters_mut(&mut self) -> &mut Counters;

    fn size_limits(&self) -> SizeLimits;

    /// What commands may do.
    fn allowed(&self) -> Allowed;

    /// How many logs there are.
    fn log_count(&self) -> usize;

    /// Whether requests are taken; otherwise the refusal.
    fn readiness(&self) -> Result<(), Outcome>;

    /// A request has ended.
    fn end(&mut self, origin: Origin, outcome: Outcome);

    /// A request says nothing that could be carried out.
    fn refuse_malformed(&mut self, origin: Origin);

    /// A write that is within the limits, and the logs it concerns.
    fn take_write(&mut self, logs: LogSet, origin: Origin, command: &Payload);

    /// A read; `bytes` are the query's.
    fn take_read(
        &mut self,
        origin: Origin,
        query: &Query<'_>,
        bytes: Vec<u8>,
        mode: ReadMode,
        terms: Vec<u64>,
    );

    /// The requests in a client's message, which came through this door.
    fn client_requests(&mut self, door: u16, peer: Peer, body: &Payload) {
        match body.contiguous() {
            Some(bytes) => self.walk_requests(door, peer, body, bytes),
            None => self.fragmented_requests(door, peer, body),
        }
    }

    /// `bytes` are those of `body`.
    fn walk_requests(&mut self, door: u16, peer: Peer, body: &Payload, bytes: &[u8]) {
        let mut requests = client::requests(body.len());
        for number in 0.. {
            let (id, request) = match requests.next(bytes) {
                None => break,
                // A message is one step of the loop: heartbeats wait for its end.
                Some(Ok(request)) if number < client::MOST_REQUESTS => request,
                Some(_) => {
                    self.counters_mut().malformed += 1;
                    break;
                }
            };
            let origin = Origin::Native { door, peer, id };
            match request {
                Request::Command(range) => self.native_write(origin, body, range, bytes),
                Request::Query { query, mode, terms } => {
                    self.native_read(origin, &bytes[query], mode, terms);
                }
                Request::Ping => {
                    let outcome = match self.readiness() {
                        Ok(()) => Outcome::Done(Reply::Ok),
                        Err(refusal) => refusal,
                    };
                    self.end(origin, outcome);
                }
            }
        }
    }

    /// The requests in a message that lies in several pieces.
    fn fragmented_requests(&mut self, door: u16, peer: Peer, body: &Payload) {
        let (mut at, mut number) = (0, 0);
        while at < body.len() {
            let mut length = [0; 4];
            let whole = body.read_at(at, &mut length);
            let end = at + 4 + u32::from_le_bytes(length) as usize;
            number += 1;
            if !whole || end > body.len() || number > client::MOST_REQUESTS {
                self.counters_mut().malformed += 1;
                return;
            }
            let item = body.slice(at..end);
            at = end;
            if let Some(bytes) = item.contiguous() {
                self.walk_requests(door, peer, &item, bytes);
            } else if !self.large_write(door, peer, &item) {
                self.counters_mut().gathered_bytes += item.len() as u64;
                self.walk_requests(door, peer, &item, &item.to_vec());
            }
        }
    }

    /// Takes a command whose value is large; `false` if the request is something else.
    fn large_write(&mut self, door: u16, peer: Peer, item: &Payload) -> bool {
        let mut head = [0; ITEM_BYTES];
        if !item.read_at(0, &mut head) || head[ITEM_BYTES - 1] != client::COMMAND {
            return false;
        }
        let command = item.slice(ITEM_BYTES..item.len());
        let Some((outline, value_bytes)) = outline(&command) else {
            return false;
        };
        // What does not parse is refused by the one who reads all of it.
        let Ok(decoded) = Command::decode(&outline) else {
            return false;
        };
        if decoded.operation.longest_value() != 0 {
            return false;
        }
        // A command with one value has one key, so it concerns one log.
        let logs = LogSet::of(&decoded.operation, self.log_count());
        if logs.single().is_none() {
            return false;
        }
        self.counters_mut().writes += 1;
        let mut id = [0; 8];
        id.copy_from_slice(&head[4..12]);
        let id = u64::from_le_bytes(id);
        let origin = Origin::Native { door, peer, id };
        let size_limits = self.size_limits();
        if !size_limits.admits(&decoded.operation) || value_bytes > size_limits.value {
            self.end(origin, Outcome::TooLarge);
        } else {
            self.take_write(logs, origin, &command);
        }
        true
    }

    fn native_write(
        &mut self,
        origin: Origin,
        body: &Payload,
        range: std::ops::Range<usize>,
        bytes: &[u8],
    ) {
        self.counters_mut().writes += 1;
        let decoded = Command::decode(&bytes[range.clone()]);
        let Some(command) = decoded.ok().filter(|it| !it.operation.is_of_replicas()) else {
            self.counters_mut().malformed += 1;
            return self.refuse_malformed(origin);
        };
        if !self.size_limits().admits(&command.operation) {
            return self.end(origin, Outcome::TooLarge);
        }
        if let Some(refusal) = refuse_excess(&command.operation, self.allowed()) {
            self.counters_mut().refused_work += 1;
            let refusal = self.readiness().err().unwrap_or(refusal);
            return self.end(origin, refusal);
        }
        let logs = LogSet::of(&command.operation, self.log_count());
        self.take_write(logs, origin, &body.slice(range));
    }

    fn native_read(&mut self, origin: Origin, query: &[u8], mode: ReadMode, terms: Vec<u64>) {
        let Ok(decoded) = Query::decode(query) else {
            self.counters_mut().malformed += 1;
            return self.refuse_malformed(origin);
        };
        self.take_read(origin, &decoded, query.to_vec(), mode, terms);
    }
}

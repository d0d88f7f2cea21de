//! Native clients' requests: checked, and submitted to the logs they concern.

use super::*;

impl Node {
    pub(super) fn client_requests(&mut self, peer: Peer, body: &Payload) {
        self.active_us = self.now.steady_us;
        match body.contiguous() {
            Some(bytes) => self.walk_requests(peer, body, bytes),
            None => self.scattered_requests(peer, body),
        }
    }

    /// `bytes` are those of `body`.
    pub(super) fn walk_requests(&mut self, peer: Peer, body: &Payload, bytes: &[u8]) {
        let mut requests = cyclone_wire::client::requests(body.len());
        loop {
            let (id, request) = match requests.next(bytes) {
                None => break,
                Some(Err(_)) => {
                    self.counters.malformed += 1;
                    break;
                }
                Some(Ok(request)) => request,
            };
            let origin = Origin::Native { peer, id };
            match request {
                cyclone_wire::client::Request::Command(range) => {
                    self.native_write(origin, body, range, bytes);
                }
                cyclone_wire::client::Request::Query { query, mode, terms } => {
                    self.native_read(origin, &bytes[query], mode, terms);
                }
                cyclone_wire::client::Request::Ping => {
                    let outcome = match self.check_leadership() {
                        Ok(()) => Outcome::Done(Reply::Ok),
                        Err(refusal) => refusal,
                    };
                    self.answers.push((origin, outcome));
                }
            }
        }
    }

    pub(super) fn native_write(
        &mut self,
        origin: Origin,
        body: &Payload,
        range: std::ops::Range<usize>,
        bytes: &[u8],
    ) {
        self.counters.writes += 1;
        let Ok(command) = Command::decode(&bytes[range.clone()]) else {
            self.counters.malformed += 1;
            self.clients.refuse(origin, &Status::Malformed);
            return;
        };
        if command.operation.is_of_replicas() {
            self.counters.malformed += 1;
            self.clients.refuse(origin, &Status::Malformed);
            return;
        }
        if !self.within_limits(&command.operation) {
            self.answers.push((origin, Outcome::TooLarge));
            return;
        }
        let logs = LogSet::of(&command.operation, self.logs.len());
        match (self.admit(logs), logs.single()) {
            (Err(outcome), _) => self.answers.push((origin, outcome)),
            (Ok(()), Some(log)) => {
                self.logs[log].write_payload(self.now.wall_ms, origin, &body.slice(range));
            }
            (Ok(()), None) => {
                let mut builder = BatchBuilder::new(self.config.network.burst);
                builder.push_payload(origin, &body.slice(range));
                self.begin_gang(logs, builder);
            }
        }
    }

    pub(super) fn native_read(
        &mut self,
        origin: Origin,
        query: &[u8],
        mode: ReadMode,
        terms: Vec<u64>,
    ) {
        let Ok(decoded) = Query::decode(query) else {
            self.counters.malformed += 1;
            self.clients.refuse(origin, &Status::Malformed);
            return;
        };
        self.submit_read_as(origin, &decoded, query.to_vec(), mode, &terms);
    }

    /// The configured limits, checked where a command enters so that all replicas need not agree on them.
    pub(super) fn within_limits(&self, operation: &Operation<'_>) -> bool {
        let keys_fit = operation
            .keys()
            .iter()
            .all(|key| key.len() <= self.config.max_key_bytes);
        keys_fit && operation.longest_value() <= self.config.max_value_bytes
    }
}

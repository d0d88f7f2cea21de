//! What the replica's own loop does with requests: every log is at hand.

use super::*;
use crate::intake::{Intake, SizeLimits};
use cyclone_wire::batch::Allowed;
use cyclone_wire::client::Status;

impl Intake for Node {
    fn counters_mut(&mut self) -> &mut Counters {
        &mut self.counters
    }

    fn size_limits(&self) -> SizeLimits {
        SizeLimits {
            key: self.config.max_key_bytes,
            value: self.config.max_value_bytes,
        }
    }

    fn allowed(&self) -> Allowed {
        self.config.allowed()
    }

    fn log_count(&self) -> usize {
        self.logs.len()
    }

    fn readiness(&self) -> Result<(), Outcome> {
        self.check_leadership()
    }

    fn end(&mut self, origin: Origin, outcome: Outcome) {
        self.answers.push((origin, outcome));
    }

    fn refuse_malformed(&mut self, origin: Origin) {
        self.tell(origin, Status::Malformed);
    }

    fn take_write(&mut self, logs: LogSet, origin: Origin, command: &Payload) {
        match (self.admit_write(logs), logs.single()) {
            (Err(outcome), _) => self.answers.push((origin, outcome)),
            (Ok(()), Some(log)) => self.submit(log, Request::Write(origin, command.clone())),
            (Ok(()), None) => {
                let mut builder = BatchBuilder::new(&self.config);
                builder.push_payload(origin, command);
                self.begin_gang(logs, builder);
            }
        }
    }

    fn take_read(
        &mut self,
        origin: Origin,
        query: &Query<'_>,
        bytes: Vec<u8>,
        mode: ReadMode,
        terms: Vec<u64>,
    ) {
        self.submit_read_as(origin, query, bytes, mode, &terms);
    }
}

//! What comes in from clients and what goes back, whichever door it came through.

use cyclone_packet::Peer;
use cyclone_pmem::Payload;
use cyclone_wire::batch::{self, Allowed};
use cyclone_wire::command::Operation;
use cyclone_wire::planted::{self, Bug};
use cyclone_wire::reply::{Failure, Reply};

use crate::config::Config;

/// The caller's own number for a request; handed back with its outcome.
pub type Ticket = u64;

/// How a request ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// Executed (for writes: durable at a majority and applied); the state machine's answer.
    Done(Reply),
    /// This replica does not lead; nothing was done. The leader, if known.
    NotLeader(Option<u64>),
    /// A queue or the log is full; nothing was done. Try again later.
    Busy,
    /// A new leader discarded the command before it was committed: certainly not executed.
    Lost,
    /// Leadership was lost and the command's fate is not known within the time allowed.
    Unknown,
    /// The command exceeds the configured limits; nothing was done.
    TooLarge,
    /// This replica's store is damaged and cannot read what was asked for; nothing was done.
    /// Another replica is to lead.
    Damaged,
}

/// The door a request came through, and its number there.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Origin {
    /// The host process: the Redis gateway or an embedding program.
    Local(Ticket),
    /// A caller of a log's own loop: its host, or another thread of this process.
    Direct {
        /// The log.
        log: u16,
        /// The number of the request there.
        ticket: Ticket,
    },
    /// A native client's request.
    Native {
        /// The port: 0 is the replica's, beyond it those of the logs.
        door: u16,
        /// The client's association there.
        peer: Peer,
        /// The client's number for the request.
        id: u64,
    },
    /// One log's part of a read over several, by the read's number.
    Joined(u64),
    /// No client: the replica's own.
    Internal,
}

/// Refuses an operation that needs more work than it may do, whatever is stored: it is not
/// proposed.
pub(crate) fn refuse_excess(operation: &Operation<'_>, allowed: Allowed) -> Option<Outcome> {
    if !operation.is_of_many() || planted::has(Bug::ExcessProposed) {
        return None;
    }
    let limit = u64::from(allowed.work_bytes);
    let bytes = operation.least_work(allowed.value_bytes.into());
    let excess = Failure::TooMuchWork { bytes, limit };
    (bytes > limit).then_some(Outcome::Done(Reply::Failed(excess)))
}

/// A log entry's payload in the making: a burst of up to 32 commands becomes one entry (cyclone
/// §4.2, fig. 6). Small commands are copied densely; larger ones stay in the frames they came in.
//= cyclone §4.2
pub(crate) struct BatchBuilder {
    max_commands: usize,
    /// What the commands may do.
    allowed: Allowed,
    done: Payload,
    open: Vec<u8>,
    origins: Vec<Origin>,
    bytes: usize,
    /// Bytes that an entry may have.
    max_bytes: usize,
}

impl BatchBuilder {
    /// A command longer than this stays in its frames.
    pub(crate) const INLINE_BYTES: usize = 1024;
    /// Payload bytes after which an entry takes no further command.
    pub(crate) const FULL_BYTES: usize = 64 << 10;

    /// As a replica with this configuration makes them.
    pub(crate) fn new(config: &Config) -> Self {
        BatchBuilder {
            max_commands: config.network.burst,
            allowed: config.allowed(),
            done: Payload::new(),
            open: Vec::new(),
            origins: Vec::new(),
            bytes: 0,
            max_bytes: usize::MAX,
        }
    }

    /// For a log whose entries may have so many bytes: commands that would be too long only
    /// together do not come together.
    pub(crate) fn with_max_bytes(self, max_bytes: u64) -> Self {
        let max_bytes = usize::try_from(max_bytes).unwrap_or(usize::MAX);
        BatchBuilder { max_bytes, ..self }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.origins.is_empty()
    }

    pub(crate) fn is_full(&self) -> bool {
        self.origins.len() >= self.max_commands || self.bytes >= Self::FULL_BYTES
    }

    /// Adds a command whose bytes are copied. One that would fill an entry alone is given back if
    /// it is not the first: if it is too long for the log, its neighbours are not to be refused
    /// with it.
    pub(crate) fn push_bytes(
        &mut self,
        origin: Origin,
        encode: impl FnOnce(&mut Vec<u8>),
    ) -> Result<(), Payload> {
        self.begin();
        let length_at = self.open.len();
        self.open.extend_from_slice(&[0; 4]);
        encode(&mut self.open);
        let length = self.open.len() - length_at - 4;
        if self.needs_own_entry(length) {
            let command = self.open.split_off(length_at + 4);
            self.open.truncate(length_at);
            return Err(Payload::from_vec(command));
        }
        self.open[length_at..length_at + 4].copy_from_slice(&(length as u32).to_le_bytes());
        self.bytes += length + 4;
        self.origins.push(origin);
        Ok(())
    }

    /// Whether a command of this length is to begin an entry: see [`BatchBuilder::push_bytes`] and
    /// [`BatchBuilder::with_max_bytes`].
    pub(crate) fn needs_own_entry(&self, length: usize) -> bool {
        let together = batch::HEADER_BYTES + self.bytes + 4 + length;
        !self.origins.is_empty() && (length > Self::FULL_BYTES || together > self.max_bytes)
    }

    /// Adds a command that stays where it was received, if it is not short.
    pub(crate) fn push_payload(&mut self, origin: Origin, command: &Payload) {
        self.begin();
        if command.len() <= Self::INLINE_BYTES {
            self.open
                .extend_from_slice(&(command.len() as u32).to_le_bytes());
            for part in command.segments() {
                self.open.extend_from_slice(part);
            }
            self.bytes += command.len() + 4;
            self.origins.push(origin);
            return;
        }
        self.open
            .extend_from_slice(&(command.len() as u32).to_le_bytes());
        self.done.push_vec(std::mem::take(&mut self.open));
        self.done.append(command.clone());
        self.bytes += command.len() + 4;
        self.origins.push(origin);
    }

    fn begin(&mut self) {
        if self.origins.is_empty() {
            self.open.clear();
            self.open.extend_from_slice(&[0; batch::HEADER_BYTES]);
        }
    }

    /// Closes the entry. `stamp_ms` is the leader's clock.
    pub(crate) fn seal(&mut self, stamp_ms: u64) -> (Payload, Vec<Origin>) {
        let origins = std::mem::take(&mut self.origins);
        let header = batch::header(origins.len() as u32, stamp_ms, self.allowed);
        let mut sealed = Payload::new();
        let done = std::mem::take(&mut self.done);
        if done.is_empty() {
            self.open[..header.len()].copy_from_slice(&header);
            sealed.push_vec(std::mem::take(&mut self.open));
        } else {
            // The header's place is at the start of the first part, which was already handed over:
            // prepend by skipping the reserved bytes there.
            sealed.push_vec(header.to_vec());
            sealed.append(done.slice(header.len()..done.len()));
            sealed.push_vec(std::mem::take(&mut self.open));
        }
        self.bytes = 0;
        (sealed, origins)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_that_are_too_long_together_stand_apart() {
        let builder = BatchBuilder {
            max_commands: 32,
            allowed: Allowed {
                value_bytes: 1000,
                work_bytes: 1000,
            },
            done: Payload::new(),
            open: Vec::new(),
            origins: Vec::new(),
            bytes: 0,
            max_bytes: usize::MAX,
        };
        let mut builder = builder.with_max_bytes(1000 + batch::HEADER_BYTES as u64);
        let push = |builder: &mut BatchBuilder, length: usize| {
            let put = |out: &mut Vec<u8>| out.resize(out.len() + length, 7);
            builder
                .push_bytes(Origin::Local(length as u64), put)
                .is_ok()
        };
        // One that is too long alone is the log's to refuse.
        assert!(push(&mut builder, 2000));
        builder.seal(1);
        assert!(push(&mut builder, 500));
        assert!(!push(&mut builder, 493));
        assert!(push(&mut builder, 492));
        assert!(builder.needs_own_entry(1));
        let (payload, origins) = builder.seal(1);
        assert_eq!(
            (payload.len(), origins.len()),
            (1000 + batch::HEADER_BYTES, 2)
        );
        assert!(push(&mut builder, 493));
    }
}

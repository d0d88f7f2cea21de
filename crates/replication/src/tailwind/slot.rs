//! One replica of a sender's log: where it is at the moment, its open buffer, and what is on its
//! way there.

use std::collections::VecDeque;
use std::sync::Arc;

use cyclone_fabric::{ConnectionId, Endpoint, FabricError, MemoryKey, Operation};

use super::chain::{Chain, OVERHEAD_BYTES};
use crate::control::{Grant, ToBackup};
use crate::protocol::BackupId;

/// The number of a record that this replica has been counted for: written again, it must not be
/// counted again.
const SETTLED: u64 = u64::MAX;

/// A record on its way to one replica, or in its open buffer.
#[derive(Clone)]
pub(super) struct Item {
    /// The sender's number for it; [`SETTLED`] once it is durable at this replica. It may have
    /// failed, and be unknown to the sender by now.
    pub(super) record: u64,
    pub(super) bytes: Arc<[u8]>,
}

pub(super) struct Buffer {
    segment: u32,
    epoch: u64,
    key: MemoryKey,
    chain: Chain,
    /// Bytes written, or on their way.
    cursor: u64,
    /// Bytes that flushes were posted for.
    flushed: u64,
}

impl Buffer {
    fn new(grant: &Grant) -> Buffer {
        Buffer {
            segment: grant.segment,
            epoch: grant.epoch,
            key: grant.key,
            chain: Chain::new(grant.seed),
            cursor: 0,
            flushed: 0,
        }
    }

    fn has_room(&self, record_bytes: usize) -> bool {
        self.cursor + (record_bytes + OVERHEAD_BYTES) as u64 <= self.key.len
    }
}

/// An operation in flight.
struct Posted {
    context: u64,
    /// Of a flush: how many records are durable here once it completes.
    covers: Option<usize>,
}

/// What pumping a slot came to.
pub(super) enum Pumped {
    /// All that can be done for now.
    Done,
    /// The buffer is full and everything in it is durable: close it and get another.
    Full,
    /// A record is larger than a whole buffer here; it was taken out.
    TooLarge(u64),
    /// The backup is lost.
    Broken(String),
}

pub(super) struct Slot {
    /// Where it is.
    pub(super) host: BackupId,
    pub(super) connection: ConnectionId,
    /// Whether the log was asked for and not granted yet.
    pub(super) asked: bool,
    /// Since when, by the first clock read after.
    pub(super) asked_us: Option<u64>,
    /// Whether it was reported to the caller as open.
    pub(super) told: bool,
    pub(super) buffer: Option<Buffer>,
    /// The open buffer's records, durable or not: what a replacement is given.
    copy: Vec<Item>,
    /// How many of `copy`, from its front, flushes were posted for.
    covered: usize,
    /// How many of `copy`, from its front, are durable here.
    settled: usize,
    /// Records that were not written yet.
    pub(super) waiting: VecDeque<Item>,
    posted: VecDeque<Posted>,
    /// Bytes of a buffer here, as of the last one.
    buffer_bytes: Option<u64>,
    /// Sealed records, while they are posted.
    sealed: Vec<u8>,
    /// The next of them, while it is sealed.
    part: Vec<u8>,
    /// How many records of `waiting` and of those in flight were there before the caller is
    /// notified.
    pub(super) owed: usize,
}

impl Slot {
    /// A replica at a host that was asked for a log, which shall first be given `owed`.
    pub(super) fn new(host: BackupId, connection: ConnectionId, owed: VecDeque<Item>) -> Slot {
        Slot {
            host,
            connection,
            asked: true,
            asked_us: None,
            told: false,
            buffer: None,
            copy: Vec::new(),
            covered: 0,
            settled: 0,
            owed: owed.len(),
            waiting: owed,
            posted: VecDeque::new(),
            buffer_bytes: None,
            sealed: Vec::new(),
            part: Vec::new(),
        }
    }

    /// Moves to another host with nothing in flight, to begin a buffer there.
    pub(super) fn move_to(&mut self, host: BackupId, connection: ConnectionId) {
        self.host = host;
        self.connection = connection;
        (self.asked, self.asked_us) = (true, None);
        self.buffer = None;
    }

    pub(super) fn granted(&mut self, grant: &Grant) {
        self.buffer = Some(Buffer::new(grant));
        self.buffer_bytes = Some(grant.key.len);
    }

    /// The most bytes that a record may have here, as far as is known: it lies in one buffer.
    pub(super) fn max_record(&self) -> Option<usize> {
        let bytes = usize::try_from(self.buffer_bytes?).ok()?;
        Some(bytes.saturating_sub(OVERHEAD_BYTES))
    }

    /// Ends the open buffer; answers the message that closes it.
    pub(super) fn close(&mut self) -> Option<Vec<u8>> {
        self.copy.clear();
        (self.covered, self.settled) = (0, 0);
        let buffer = self.buffer.take()?;
        let done = ToBackup::Done {
            segment: buffer.segment,
            epoch: buffer.epoch,
        };
        Some(done.encode())
    }

    /// What a replacement needs: the open buffer's records from its start, then those not written
    /// yet.
    pub(super) fn into_items(mut self) -> (Vec<Item>, VecDeque<Item>) {
        // Flushes complete in order.
        for item in self.copy.iter_mut().take(self.settled) {
            item.record = SETTLED;
        }
        (self.copy, self.waiting)
    }

    /// Numbers of the records that are not durable here.
    pub(super) fn unfinished(&self) -> Vec<u64> {
        let written = self.copy.iter().skip(self.settled);
        let all = written.chain(&self.waiting);
        all.map(|item| item.record).collect()
    }

    /// An operation has completed; answers the records that are durable here now.
    pub(super) fn completed(&mut self, context: u64) -> &[Item] {
        let place = self.posted.iter().position(|it| it.context == context);
        let posted = place.and_then(|place| self.posted.remove(place));
        let covers = posted.and_then(|posted| posted.covers).unwrap_or(0);
        let before = self.settled;
        self.settled = (before + covers).min(self.copy.len());
        self.owed = self.owed.saturating_sub(covers);
        &self.copy[before..self.settled]
    }

    /// Writes what waits, and flushes what was written.
    ///
    /// `ordered`: whether the provider keeps a connection's order. Without it, each write is waited
    /// for, and each flush; so each takes all the records that wait, as many as fit one operation.
    pub(super) fn pump(
        &mut self,
        endpoint: &mut dyn Endpoint,
        next_context: &mut u64,
        ordered: bool,
    ) -> Pumped {
        while let Some(item) = self.waiting.front() {
            let Some(buffer) = &mut self.buffer else {
                return Pumped::Done;
            };
            let idle = self.posted.is_empty() && self.covered == self.copy.len();
            if !ordered && !idle {
                break;
            }
            if !buffer.has_room(item.bytes.len()) {
                if buffer.cursor == 0 {
                    return self.drop_too_large();
                }
                if idle {
                    return Pumped::Full;
                }
                break;
            }
            let mut chain = buffer.chain.clone();
            if !chain.seal_into(&item.bytes, &mut self.sealed) {
                return self.drop_too_large();
            }
            let mut count = 1;
            if !ordered {
                let room = usize::try_from(buffer.key.len - buffer.cursor).unwrap_or(usize::MAX);
                let most = room.min(endpoint.capabilities().max_transfer);
                for item in self.waiting.iter().skip(1) {
                    let end = self.sealed.len() + item.bytes.len() + OVERHEAD_BYTES;
                    if end > most || !chain.seal_into(&item.bytes, &mut self.part) {
                        break;
                    }
                    self.sealed.append(&mut self.part);
                    count += 1;
                }
            }
            let write = Operation::Write {
                key: &buffer.key,
                offset: buffer.cursor,
                bytes: &self.sealed,
            };
            match endpoint.post(self.connection, write, *next_context) {
                Ok(()) => {}
                Err(FabricError::Busy) => break,
                Err(error) => return Pumped::Broken(error.to_string()),
            }
            self.posted.push_back(Posted {
                context: *next_context,
                covers: None,
            });
            *next_context += 1;
            buffer.chain = chain;
            buffer.cursor += self.sealed.len() as u64;
            self.copy.extend(self.waiting.drain(..count));
        }
        self.flush(endpoint, next_context, ordered)
    }

    /// The first record that waits is larger than a buffer here. One that a replacement is owed
    /// cannot be left out.
    fn drop_too_large(&mut self) -> Pumped {
        if self.owed > 0 {
            return Pumped::Broken(
                "its buffers are too small for the lost one's records".to_owned(),
            );
        }
        let record = self.waiting.pop_front().map(|item| item.record);
        record.map_or(Pumped::Done, Pumped::TooLarge)
    }

    fn flush(
        &mut self,
        endpoint: &mut dyn Endpoint,
        next_context: &mut u64,
        ordered: bool,
    ) -> Pumped {
        let Some(buffer) = &mut self.buffer else {
            return Pumped::Done;
        };
        let covers = self.copy.len() - self.covered;
        if covers == 0 || (!ordered && !self.posted.is_empty()) {
            return Pumped::Done;
        }
        let flush = Operation::Flush {
            key: &buffer.key,
            offset: buffer.flushed,
            len: buffer.cursor - buffer.flushed,
        };
        match endpoint.post(self.connection, flush, *next_context) {
            Ok(()) => {
                self.posted.push_back(Posted {
                    context: *next_context,
                    covers: Some(covers),
                });
                self.covered = self.copy.len();
                *next_context += 1;
                buffer.flushed = buffer.cursor;
                Pumped::Done
            }
            Err(FabricError::Busy) => Pumped::Done,
            Err(error) => Pumped::Broken(error.to_string()),
        }
    }
}

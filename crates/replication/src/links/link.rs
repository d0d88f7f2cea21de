//! One backup as its sender sees it: which records are in flight there, what was written and not
//! flushed, which segments are held, what waits for the fabric. Knows no records of others and no
//! outcomes.

use std::collections::VecDeque;

use cyclone_fabric::{ConnectionId, Endpoint, FabricError, MemoryKey, Operation, WriteOrder};

use crate::control::{Grant, ToBackup};
use crate::frame::{Origin, RecordName};
use crate::protocol::{BackupId, SenderId};

const KIND_SHIFT: u32 = 56;
const NUMBER: u64 = (1 << KIND_SHIFT) - 1;
const IGNORED: u64 = 0;
const WRITE: u64 = 1 << KIND_SHIFT;
const FLUSH: u64 = 2 << KIND_SHIFT;
const ADD: u64 = 3 << KIND_SHIFT;

/// The most operations that wait for the fabric on one link before appends are refused.
const MAX_OUTBOX: usize = 1024;
/// Buffers kept for reuse.
const MAX_SPARE: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Opening,
    Open,
    Lost,
}

/// A record on one link.
struct Item {
    record: u32,
    /// Writes in flight, and one for the log until it has placed the whole record.
    holds: u32,
}

/// One contiguous write and the flush behind it.
struct Unit {
    epoch: u64,
    key: MemoryKey,
    offset: u64,
    len: u64,
    /// Writes that must complete before the flush is posted.
    writes: u32,
    items: (u64, u64),
    done: bool,
}

/// A segment that this sender may write.
struct Holding {
    grant: Grant,
    /// Operations that name it.
    users: u32,
    leaving: bool,
}

enum Post {
    Write {
        key: MemoryKey,
        offset: u64,
        bytes: Vec<u8>,
        context: u64,
    },
    Flush {
        unit: u64,
    },
    Add {
        key: MemoryKey,
        value: u64,
        ticket: u64,
    },
    Send {
        bytes: Vec<u8>,
    },
}

/// One backup as its sender sees it.
pub(crate) struct Link {
    pub backup: BackupId,
    /// The newest time passed to `poll`.
    pub now_us: u64,
    pub max_transfer: usize,
    pub(super) connection: ConnectionId,
    pub(super) state: State,
    origin: Origin,
    pub(super) stream: u32,
    counter: u64,
    in_order: bool,
    wait_per_write: bool,
    items: VecDeque<Item>,
    first_item: u64,
    units: VecDeque<Unit>,
    first_unit: u64,
    holdings: Vec<Holding>,
    outbox: VecDeque<Post>,
    /// Records that are durable here and were not counted yet.
    pub(super) finished: Vec<u32>,
    spare: Vec<Vec<u8>>,
}

/// What an operation's completion was.
pub(super) enum Completed {
    /// Bytes written to the segment of this epoch are durable.
    Durable(u64),
    /// A fetch-add's ticket.
    Added(u64),
    /// Nothing that a log wants to know.
    Other,
}

impl Link {
    /// A link whose log was not opened yet. `in_order`: see
    /// [`Log::IN_ORDER`](super::Log::IN_ORDER).
    pub(super) fn new(
        backup: BackupId,
        connection: ConnectionId,
        endpoint: &dyn Endpoint,
        (sender, term): (SenderId, u32),
        in_order: bool,
    ) -> Link {
        let capabilities = endpoint.capabilities();
        Link {
            backup,
            now_us: 0,
            max_transfer: capabilities.max_transfer.max(1),
            connection,
            state: State::Opening,
            origin: Origin {
                sender,
                term,
                name: RecordName::from_bits(0),
            },
            stream: 0,
            counter: 0,
            in_order,
            wait_per_write: capabilities.write_order == WriteOrder::None,
            items: VecDeque::new(),
            first_item: 0,
            units: VecDeque::new(),
            first_unit: 0,
            holdings: Vec::new(),
            outbox: VecDeque::new(),
            finished: Vec::new(),
            spare: Vec::new(),
        }
    }

    /// Whether another record may be in flight here.
    pub(super) fn has_room(&self, window: usize) -> bool {
        self.items.len() < window && self.outbox.len() < MAX_OUTBOX
    }

    /// Takes note of a record; answers its item, which is held until released.
    pub(super) fn begin(&mut self, record: u32) -> u64 {
        self.items.push_back(Item { record, holds: 1 });
        self.first_item + self.items.len() as u64 - 1
    }

    /// Ends everything; answers the records that are not durable here. Those that are stay in
    /// `finished`.
    pub(super) fn end(&mut self) -> Vec<u32> {
        self.state = State::Lost;
        let reported = |item: &Item| item.holds == 0 && !self.in_order;
        let items = self.items.iter().filter(|item| !reported(item));
        let unfinished = items.map(|item| item.record).collect();
        self.items.clear();
        self.units.clear();
        self.outbox.clear();
        self.holdings.clear();
        unfinished
    }

    /// An operation has completed.
    pub(super) fn completed(&mut self, context: u64) -> Completed {
        let number = context & NUMBER;
        match context & !NUMBER {
            WRITE => self.write_completed(number),
            FLUSH => {
                if let Some(epoch) = self.flush_completed(number) {
                    return Completed::Durable(epoch);
                }
            }
            ADD => return Completed::Added(number),
            _ => {}
        }
        Completed::Other
    }

    /// The next record's origin.
    pub fn next_origin(&mut self) -> Origin {
        self.counter += 1;
        Origin {
            name: RecordName::new(self.stream, self.counter),
            ..self.origin
        }
    }

    /// An empty buffer.
    pub fn buffer(&mut self) -> Vec<u8> {
        self.spare.pop().unwrap_or_default()
    }

    /// Takes a buffer back for reuse.
    pub fn recycle(&mut self, mut bytes: Vec<u8>) {
        if self.spare.len() < MAX_SPARE {
            bytes.clear();
            self.spare.push(bytes);
        }
    }

    pub fn send(&mut self, message: &ToBackup<'_>) {
        let mut bytes = self.buffer();
        message.encode_into(&mut bytes);
        self.outbox.push_back(Post::Send { bytes });
    }

    /// Keeps a record from being reported until released.
    fn hold(&mut self, item: u64) {
        if let Some(item) = self.items.get_mut((item - self.first_item) as usize) {
            item.holds += 1;
        }
    }

    /// Takes a hold away; with the last one the record is durable here.
    pub fn release(&mut self, item: u64) {
        let Some(found) = self.items.get_mut((item - self.first_item) as usize) else {
            return;
        };
        found.holds -= 1;
        if found.holds == 0 && !self.in_order {
            self.finished.push(found.record);
        }
        while let Some(first) = self.items.front()
            && first.holds == 0
        {
            if self.in_order {
                self.finished.push(first.record);
            }
            self.items.pop_front();
            self.first_item += 1;
        }
    }

    /// Writes bytes of a segment and makes them durable; holds every item of the range until they
    /// are.
    pub fn write(&mut self, grant: &Grant, offset: u64, bytes: Vec<u8>, items: (u64, u64)) {
        for item in items.0..=items.1 {
            self.hold(item);
        }
        let number = self.first_unit + self.units.len() as u64;
        let pieces = bytes.len().div_ceil(self.max_transfer);
        self.units.push_back(Unit {
            epoch: grant.epoch,
            key: grant.key,
            offset,
            len: bytes.len() as u64,
            writes: if self.wait_per_write {
                pieces as u32
            } else {
                0
            },
            items,
            done: false,
        });
        self.use_segment(grant.epoch);
        let context = if self.wait_per_write {
            WRITE | number
        } else {
            IGNORED
        };
        let key = grant.key;
        let write = |offset, bytes| Post::Write {
            key,
            offset,
            bytes,
            context,
        };
        if pieces == 1 {
            self.outbox.push_back(write(offset, bytes));
        } else {
            let mut at = offset;
            for piece in bytes.chunks(self.max_transfer) {
                self.outbox.push_back(write(at, piece.to_vec()));
                at += piece.len() as u64;
            }
        }
        if !self.wait_per_write {
            self.outbox.push_back(Post::Flush { unit: number });
        }
    }

    fn unit(&mut self, number: u64) -> Option<&mut Unit> {
        let place = number.checked_sub(self.first_unit)?;
        self.units.get_mut(usize::try_from(place).ok()?)
    }

    fn write_completed(&mut self, number: u64) {
        if let Some(unit) = self.unit(number)
            && unit.writes > 0
        {
            unit.writes -= 1;
            if unit.writes == 0 {
                self.outbox.push_back(Post::Flush { unit: number });
            }
        }
    }

    /// Answers the epoch of the segment that was written.
    fn flush_completed(&mut self, number: u64) -> Option<u64> {
        let unit = self.unit(number)?;
        if std::mem::replace(&mut unit.done, true) {
            return None;
        }
        let (epoch, items) = (unit.epoch, unit.items);
        while self.units.front().is_some_and(|unit| unit.done) {
            self.units.pop_front();
            self.first_unit += 1;
        }
        for item in items.0..=items.1 {
            self.release(item);
        }
        self.unuse_segment(epoch);
        Some(epoch)
    }

    /// Asks for a fetch-add on a segment's tail; the segment is used until the log unuses it.
    pub fn add(&mut self, grant: &Grant, tail: MemoryKey, value: u64, ticket: u64) {
        self.use_segment(grant.epoch);
        self.outbox.push_back(Post::Add {
            key: tail,
            value,
            ticket,
        });
    }

    /// Takes note of a segment that is this sender's to write.
    pub fn hold_segment(&mut self, grant: Grant) {
        self.holdings.push(Holding {
            grant,
            users: 0,
            leaving: false,
        });
    }

    /// Gives a segment back once no operation names it any more.
    pub fn leave_segment(&mut self, epoch: u64) {
        if let Some(holding) = self.holding(epoch) {
            holding.leaving = true;
        }
        self.finish_leaving(epoch);
    }

    fn holding(&mut self, epoch: u64) -> Option<&mut Holding> {
        let mut all = self.holdings.iter_mut();
        all.find(|holding| holding.grant.epoch == epoch)
    }

    fn use_segment(&mut self, epoch: u64) {
        if let Some(holding) = self.holding(epoch) {
            holding.users += 1;
        }
    }

    /// An operation that named the segment is over.
    pub fn unuse_segment(&mut self, epoch: u64) {
        if let Some(holding) = self.holding(epoch) {
            holding.users -= 1;
            self.finish_leaving(epoch);
        }
    }

    fn finish_leaving(&mut self, epoch: u64) {
        let done = |holding: &Holding| {
            holding.grant.epoch == epoch && holding.leaving && holding.users == 0
        };
        if let Some(place) = self.holdings.iter().position(done) {
            let Grant { segment, epoch, .. } = self.holdings.swap_remove(place).grant;
            self.send(&ToBackup::Done { segment, epoch });
        }
    }

    /// Hands the fabric what it takes. `Err` means that the connection is of no use any more.
    pub(super) fn drain(&mut self, endpoint: &mut dyn Endpoint) -> Result<(), FabricError> {
        while let Some(post) = self.outbox.front() {
            let (operation, context) = match post {
                Post::Write {
                    key,
                    offset,
                    bytes,
                    context,
                } => {
                    let offset = *offset;
                    (Operation::Write { key, offset, bytes }, *context)
                }
                Post::Flush { unit } => {
                    let place = unit.checked_sub(self.first_unit);
                    let found = place.and_then(|place| self.units.get(place as usize));
                    let Some(unit_of) = found else {
                        self.outbox.pop_front();
                        continue;
                    };
                    let (key, offset, len) = (&unit_of.key, unit_of.offset, unit_of.len);
                    (Operation::Flush { key, offset, len }, FLUSH | unit)
                }
                Post::Add { key, value, ticket } => {
                    let (offset, value) = (0, *value);
                    (Operation::FetchAdd { key, offset, value }, ADD | ticket)
                }
                Post::Send { bytes } => (Operation::Send { bytes }, IGNORED),
            };
            match endpoint.post(self.connection, operation, context) {
                Ok(()) => {}
                Err(FabricError::Busy) => return Ok(()),
                Err(error) => return Err(error),
            }
            if let Some(Post::Write { bytes, .. } | Post::Send { bytes }) = self.outbox.pop_front()
            {
                self.recycle(bytes);
            }
        }
        Ok(())
    }
}

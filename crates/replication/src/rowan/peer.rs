//! One backup as a Rowan sender sees it: its queue, the blocks that wait, those in flight.

use std::collections::VecDeque;

use cyclone_fabric::{AppendKey, ConnectionId, Endpoint, FabricError, Operation};

use crate::control::{Grant, ToBackup};
use crate::frame::reseed_block;
use crate::outbox::CONTROL;

/// How far the numbers of records in flight at one backup may lie apart.
const WINDOW: u64 = 1024;
const _: () = assert!(WINDOW < crate::assemble::WINDOW);

/// Blocks posted together.
pub(super) const BATCH: usize = 16;

/// Buffers kept for reuse.
const MAX_SPARE: usize = 64;

/// The most queues that a backup may have told of and still expects an answer about.
const MAX_LEFT: usize = 8;

/// What a backup granted.
#[derive(Clone, Copy)]
pub(super) struct Log {
    pub(super) key: AppendKey,
    /// The number of the queue.
    pub(super) queue: u64,
    pub(super) seed: u64,
    pub(super) stream: u32,
}

pub(super) struct Piece {
    /// The sender's number for its record.
    pub(super) record: u32,
    pub(super) seq: u64,
    pub(super) bytes: Vec<u8>,
    /// The queue whose seed its checksum has.
    pub(super) queue: u64,
    pub(super) posted_us: u64,
    /// Since when there has been no segment for it.
    pub(super) hungry_since: Option<u64>,
}

pub(super) struct Peer {
    pub(super) connection: ConnectionId,
    /// When the log was asked for, by the first clock read since.
    pub(super) asked_us: Option<u64>,
    pub(super) stream: Option<u32>,
    pub(super) grant: Option<Grant>,
    pub(super) log: Option<Log>,
    /// Queues that nothing is appended to any more, about which the backup has not been notified.
    left: Vec<u64>,
    pub(super) waiting: VecDeque<Piece>,
    next_seq: u64,
    /// Blocks left of the records before `next_seq`, the newest last.
    unfinished: VecDeque<usize>,
    /// Blocks in flight; their places are their contexts.
    posted: Vec<Option<Piece>>,
    free: Vec<u32>,
    spare: Vec<Vec<u8>>,
    /// The most blocks in flight at once. Where slow writes are made again, their number would keep
    /// them slow: each slow one halves it, each other one adds one.
    allowed: usize,
}

impl Peer {
    pub(super) fn new(connection: ConnectionId, max_blocks: usize) -> Peer {
        Peer {
            connection,
            asked_us: None,
            stream: None,
            grant: None,
            log: None,
            left: Vec::new(),
            waiting: VecDeque::new(),
            next_seq: 0,
            unfinished: VecDeque::new(),
            posted: Vec::new(),
            free: Vec::new(),
            spare: Vec::new(),
            allowed: max_blocks.max(1),
        }
    }

    /// Takes note of a queue to append to; `false` if this is no answer to anything. They may come
    /// in any order.
    pub(super) fn granted(&mut self, grant: Grant) -> bool {
        let Some(known) = self.grant else {
            self.grant = Some(grant);
            return true;
        };
        let is_newer = grant.epoch.wrapping_sub(known.epoch) < u64::MAX / 2;
        if grant.epoch == known.epoch || self.left.len() >= MAX_LEFT {
            return false;
        }
        self.left
            .push(if is_newer { known.epoch } else { grant.epoch });
        if is_newer {
            self.grant = Some(grant);
        }
        true
    }

    /// Opens the log, or moves it to another queue, with what was granted. Whether it is open for
    /// the first time.
    pub(super) fn open(&mut self) -> bool {
        let (Some(stream), Some(grant)) = (self.stream, self.grant) else {
            return false;
        };
        let log = Log {
            key: AppendKey(grant.key),
            queue: grant.epoch,
            seed: grant.seed,
            stream,
        };
        self.log.replace(log).is_none()
    }

    /// Reports to the backup the queues to which nothing is in flight any more.
    pub(super) fn take_leave(&mut self, endpoint: &mut dyn Endpoint) -> Result<(), FabricError> {
        while let Some(&queue) = self.left.first() {
            let mut posted = self.posted.iter().flatten();
            if posted.any(|piece| piece.queue == queue) {
                return Ok(());
            }
            let done = ToBackup::Done {
                segment: 0,
                epoch: queue,
            };
            let bytes = &done.encode();
            match endpoint.post(self.connection, Operation::Send { bytes }, CONTROL) {
                Ok(()) => self.left.remove(0),
                Err(FabricError::Busy) => return Ok(()),
                Err(error) => return Err(error),
            };
        }
        Ok(())
    }

    /// Whether something may be to be posted.
    pub(super) fn has_work(&self) -> bool {
        !self.waiting.is_empty() || !self.left.is_empty()
    }

    /// Whether another record may get a sequence number.
    pub(super) fn has_room(&self) -> bool {
        (self.unfinished.len() as u64) < WINDOW
    }

    /// The sequence number of a record of so many blocks.
    pub(super) fn begin(&mut self, blocks: usize) -> u64 {
        self.unfinished.push_back(blocks);
        self.next_seq += 1;
        self.next_seq - 1
    }

    /// An empty buffer.
    pub(super) fn buffer(&mut self) -> Vec<u8> {
        self.spare.pop().unwrap_or_default()
    }

    /// A block is durable; answers its record's number.
    pub(super) fn done(&mut self, mut piece: Piece) -> u32 {
        let oldest = self.next_seq - self.unfinished.len() as u64;
        if let Some(left) = self.unfinished.get_mut((piece.seq - oldest) as usize) {
            *left -= 1;
        }
        while self.unfinished.front() == Some(&0) {
            self.unfinished.pop_front();
        }
        if self.spare.len() < MAX_SPARE {
            piece.bytes.clear();
            self.spare.push(piece.bytes);
        }
        piece.record
    }

    /// A write was slow, or was not, where that matters.
    pub(super) fn adapt(&mut self, is_slow: bool, max_blocks: usize) {
        self.allowed = if is_slow {
            (self.allowed / 2).max(1)
        } else {
            (self.allowed + 1).min(max_blocks.max(1))
        };
    }

    /// Puts a block back in its record's place among those that wait.
    pub(super) fn again(&mut self, piece: Piece) {
        let behind = |queued: &Piece| queued.seq > piece.seq;
        let place = self.waiting.iter().position(behind);
        self.waiting
            .insert(place.unwrap_or(self.waiting.len()), piece);
    }

    /// Takes a block that is no longer in flight.
    pub(super) fn take_posted(&mut self, context: u64) -> Option<Piece> {
        let place = usize::try_from(context).ok()?;
        let piece = self.posted.get_mut(place)?.take()?;
        // Places are as many as blocks in flight at once.
        self.free.push(place as u32);
        Some(piece)
    }

    /// Posts what waits, as far as that is allowed.
    pub(super) fn pump(
        &mut self,
        endpoint: &mut dyn Endpoint,
        now_us: u64,
    ) -> Result<(), FabricError> {
        let Some(log) = self.log else {
            return Ok(());
        };
        loop {
            let in_flight = self.posted.len() - self.free.len();
            let count = (self.waiting.len().min(BATCH)).min(self.allowed.saturating_sub(in_flight));
            if count == 0 {
                return Ok(());
            }
            for piece in self.waiting.iter_mut().take(count) {
                if piece.queue != log.queue {
                    reseed_block(log.seed, &mut piece.bytes);
                    piece.queue = log.queue;
                }
                piece.posted_us = now_us;
            }
            let mut appends: [(&[u8], u64); BATCH] = [(&[], 0); BATCH];
            let free = self.free.iter().rev().copied().map(u64::from);
            let contexts = free.chain(self.posted.len() as u64..);
            let pieces = self.waiting.iter().zip(contexts);
            for (append, (piece, context)) in appends[..count].iter_mut().zip(pieces) {
                *append = (&piece.bytes, context);
            }
            let taken = endpoint.post_appends(self.connection, &log.key, &appends[..count])?;
            for piece in self.waiting.drain(..taken) {
                match self.free.pop() {
                    Some(place) => self.posted[place as usize] = Some(piece),
                    None => self.posted.push(Some(piece)),
                }
            }
            if taken < count {
                return Ok(());
            }
        }
    }

    /// Every block that is not durable.
    pub(super) fn left(self) -> impl Iterator<Item = Piece> {
        let posted = self.posted.into_iter().flatten();
        self.waiting.into_iter().chain(posted)
    }
}

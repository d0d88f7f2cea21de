//! One backup as a Rowan sender sees it: its queue, the blocks that wait, those under way.

use std::collections::VecDeque;

use cyclone_fabric::{AppendKey, ConnectionId, Endpoint, FabricError, Operation};

use crate::control::Grant;

/// How far the numbers of records under way at one backup may lie apart.
const WINDOW: u64 = 1024;
const _: () = assert!(WINDOW < crate::assemble::WINDOW);

/// Buffers kept for reuse.
const MAX_SPARE: usize = 64;

/// What a backup granted.
#[derive(Clone, Copy)]
pub(super) struct Log {
    pub(super) key: AppendKey,
    pub(super) seed: u64,
    pub(super) stream: u32,
}

pub(super) struct Piece {
    /// The sender's number for its record.
    pub(super) record: u32,
    pub(super) seq: u64,
    pub(super) bytes: Vec<u8>,
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
    pub(super) waiting: VecDeque<Piece>,
    next_seq: u64,
    /// Blocks left of the records before `next_seq`, the newest last.
    unfinished: VecDeque<usize>,
    /// Blocks under way; their places are their contexts.
    posted: Vec<Option<Piece>>,
    free: Vec<u32>,
    spare: Vec<Vec<u8>>,
    /// The most blocks under way at once. Where slow writes are made again, their number would keep them slow: each
    /// slow one halves it, each other one adds one.
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
            waiting: VecDeque::new(),
            next_seq: 0,
            unfinished: VecDeque::new(),
            posted: Vec::new(),
            free: Vec::new(),
            spare: Vec::new(),
            allowed: max_blocks.max(1),
        }
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

    /// Takes a block that is no longer under way.
    pub(super) fn take_posted(&mut self, context: u64) -> Option<Piece> {
        let place = usize::try_from(context).ok()?;
        let piece = self.posted.get_mut(place)?.take()?;
        // Places are as many as blocks under way at once.
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
        while self.posted.len() - self.free.len() < self.allowed
            && let Some(piece) = self.waiting.front_mut()
        {
            let context = self.free.last().copied().map(u64::from);
            let context = context.unwrap_or(self.posted.len() as u64);
            let operation = Operation::Append {
                queue: &log.key,
                bytes: &piece.bytes,
            };
            match endpoint.post(self.connection, operation, context) {
                Ok(()) => piece.posted_us = now_us,
                Err(FabricError::Busy) => return Ok(()),
                Err(error) => return Err(error),
            }
            let piece = self.waiting.pop_front();
            match self.free.pop() {
                Some(place) => self.posted[place as usize] = piece,
                None => self.posted.push(piece),
            }
        }
        Ok(())
    }

    /// Every block that is not durable.
    pub(super) fn left(self) -> impl Iterator<Item = Piece> {
        let posted = self.posted.into_iter().flatten();
        self.waiting.into_iter().chain(posted)
    }
}

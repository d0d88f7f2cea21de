//! One set of backups: the chain segment it writes, the blocks that wait for room, the records in
//! flight.

use std::collections::VecDeque;

use cyclone_fabric::{ChainId, ChainOperation, Endpoint, FabricError};

use super::scan::MARK_BYTES;
use crate::control::Grant;
use crate::frame::{Cut, Origin, block_bytes, encode_block};
use crate::protocol::BackupId;

/// Buffers kept for reuse.
const MAX_SPARE: usize = 64;

/// The chain segment of a set.
pub(super) enum Stage {
    /// There is none.
    Idle,
    /// Marks are on their way to the members; so many are not durable yet.
    Marking { grants: Vec<Grant>, left: usize },
    /// The chain is open.
    Open { grants: Vec<Grant>, chain: ChainId },
}

/// A record in flight.
struct Item {
    context: u64,
    counter: u64,
    /// The flush behind its last block, once that is placed.
    last: Option<u64>,
}

/// A block that waits for room.
struct Part {
    origin: Origin,
    cut: (u16, u16),
    payload: Vec<u8>,
}

enum Post {
    Write { offset: u64, bytes: Vec<u8> },
    Flush { number: u64 },
}

pub(super) struct Set {
    /// In the chain's order.
    pub backups: Vec<BackupId>,
    /// Unique among a sender's sets.
    pub id: u64,
    pub stage: Stage,
    /// When it last had something to do, in microseconds.
    pub touched_us: u64,
    /// Where the next block goes.
    at: u64,
    items: VecDeque<Item>,
    parts: VecDeque<Part>,
    outbox: VecDeque<Post>,
    /// Flushes that have not completed.
    flushes: usize,
    next_flush: u64,
    spare: Vec<Vec<u8>>,
}

/// How records are cut for chain segments of this size.
pub(super) fn cut_for(segment_bytes: u64) -> Option<Cut> {
    let room = segment_bytes.checked_sub(MARK_BYTES)?;
    Cut::new(usize::try_from(room).ok()?)
}

impl Set {
    pub fn new(id: u64, backups: Vec<BackupId>, now_us: u64) -> Set {
        Set {
            backups,
            id,
            stage: Stage::Idle,
            touched_us: now_us,
            at: 0,
            items: VecDeque::new(),
            parts: VecDeque::new(),
            outbox: VecDeque::new(),
            flushes: 0,
            // 0 stands for operations that no caller waits for.
            next_flush: 1,
            spare: Vec::new(),
        }
    }

    /// The members' segments.
    pub fn grants(&self) -> &[Grant] {
        match &self.stage {
            Stage::Idle => &[],
            Stage::Marking { grants, .. } | Stage::Open { grants, .. } => grants,
        }
    }

    /// Members of one chain have segments of one length; `None` before there are any.
    fn segment_bytes(&self) -> Option<u64> {
        self.grants().first().map(|grant| grant.key.len)
    }

    /// How records are cut now; `None` while there is no chain.
    pub fn cut(&self) -> Option<Cut> {
        match self.stage {
            Stage::Open { .. } => cut_for(self.segment_bytes()?),
            _ => None,
        }
    }

    pub fn records(&self) -> usize {
        self.items.len()
    }

    /// The oldest record's counter.
    pub fn oldest(&self) -> Option<u64> {
        self.items.front().map(|item| item.counter)
    }

    /// Whether blocks wait for another segment.
    pub fn is_full(&self) -> bool {
        !self.parts.is_empty()
    }

    pub fn waiting_posts(&self) -> usize {
        self.outbox.len()
    }

    /// Whether nothing is in flight on the chain.
    pub fn is_drained(&self) -> bool {
        self.flushes == 0 && self.outbox.is_empty()
    }

    /// The chain is open over marked segments.
    pub fn opened(&mut self, chain: ChainId) {
        if let Stage::Marking { grants, .. } = std::mem::replace(&mut self.stage, Stage::Idle) {
            self.stage = Stage::Open { grants, chain };
            self.at = MARK_BYTES;
        }
    }

    /// Forgets the chain segment; answers what it was.
    pub fn leave(&mut self) -> (Vec<Grant>, Option<ChainId>) {
        match std::mem::replace(&mut self.stage, Stage::Idle) {
            Stage::Idle => (Vec::new(), None),
            Stage::Marking { grants, .. } => (grants, None),
            Stage::Open { grants, chain } => (grants, Some(chain)),
        }
    }

    /// Takes a record; the chain is open and nothing waits.
    pub fn append(
        &mut self,
        cut: &Cut,
        origin: Origin,
        context: u64,
        record: &[u8],
        max_transfer: usize,
    ) {
        // The sender has bounded the count.
        let count = cut.count(record.len()) as u16;
        self.items.push_back(Item {
            context,
            counter: origin.name.counter(),
            last: None,
        });
        for (payload, number) in cut.parts(record).zip(0u16..) {
            let cut = (count, number);
            if !self.parts.is_empty() || !self.place(&origin, cut, payload, max_transfer) {
                self.parts.push_back(Part {
                    origin,
                    cut,
                    payload: payload.to_vec(),
                });
            }
        }
    }

    /// Places blocks that waited.
    pub fn place_waiting(&mut self, max_transfer: usize) {
        while let Some(part) = self.parts.pop_front() {
            if !self.place(&part.origin, part.cut, &part.payload, max_transfer) {
                self.parts.push_front(part);
                return;
            }
        }
    }

    /// Puts a block behind the last one, with a flush if it is its record's last; `false` if it
    /// does not fit.
    fn place(
        &mut self,
        origin: &Origin,
        cut: (u16, u16),
        payload: &[u8],
        max_transfer: usize,
    ) -> bool {
        let Stage::Open { grants, .. } = &self.stage else {
            return false;
        };
        let Some(head) = grants.first() else {
            return false;
        };
        let len = block_bytes(payload.len()) as u64;
        if self.at + len > head.key.len {
            return false;
        }
        let seed = head.seed;
        let mut bytes = self.spare.pop().unwrap_or_default();
        encode_block(seed, origin, cut, payload, &mut bytes);
        let offset = self.at;
        self.at += len;
        if bytes.len() <= max_transfer {
            self.outbox.push_back(Post::Write { offset, bytes });
        } else {
            let step = max_transfer.max(1);
            for (n, piece) in bytes.chunks(step).enumerate() {
                self.outbox.push_back(Post::Write {
                    offset: offset + (n * step) as u64,
                    bytes: piece.to_vec(),
                });
            }
        }
        // Every segment is left flushed: a record's earlier blocks may lie in the one before.
        let number = self.next_flush;
        self.next_flush += 1;
        self.flushes += 1;
        self.outbox.push_back(Post::Flush { number });
        if cut.1 + 1 == cut.0
            && let Some(item) = self.items.back_mut()
        {
            item.last = Some(number);
        }
        true
    }

    /// Posts what the fabric takes.
    pub fn drain(&mut self, endpoint: &mut dyn Endpoint) -> Result<(), FabricError> {
        let Stage::Open { chain, .. } = self.stage else {
            return Ok(());
        };
        while let Some(post) = self.outbox.front() {
            let posted = match post {
                Post::Write { offset, bytes } => {
                    let offset = *offset;
                    endpoint.post_chain(chain, ChainOperation::Write { offset, bytes }, 0)
                }
                Post::Flush { number } => {
                    endpoint.post_chain(chain, ChainOperation::Flush, *number)
                }
            };
            match posted {
                Ok(()) => {}
                Err(FabricError::Busy) => return Ok(()),
                Err(error) => return Err(error),
            }
            if let Some(Post::Write { mut bytes, .. }) = self.outbox.pop_front()
                && self.spare.len() < MAX_SPARE
            {
                bytes.clear();
                self.spare.push(bytes);
            }
        }
        Ok(())
    }

    /// A chain operation has completed; answers the context of the record that is durable with it.
    pub fn completed(&mut self, number: u64) -> Option<u64> {
        if number == 0 {
            return None;
        }
        self.flushes = self.flushes.saturating_sub(1);
        let done = self.items.front().is_some_and(|i| i.last == Some(number));
        let item = self.items.pop_front_if(|_| done);
        item.map(|item| item.context)
    }

    /// The contexts of all records in flight, which will not be durable here.
    pub fn failed(&mut self) -> impl Iterator<Item = u64> + use<> {
        self.parts.clear();
        self.outbox.clear();
        std::mem::take(&mut self.items)
            .into_iter()
            .map(|item| item.context)
    }
}

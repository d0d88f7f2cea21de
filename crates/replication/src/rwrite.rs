//! One exclusive remote log per worker and backup, written one-sidedly (rowan §2.4, §6.1); with a
//! threshold, the `batch` protocol's as well (batch.rs).
//!
//! Segments are asked for by message ahead of need. A record that does not fit a segment goes to
//! the next one, a record larger than a segment into several. Records count in order: a scan stops
//! at the first gap.

use std::collections::VecDeque;

use crate::batch::Gather;
use crate::build::SenderConfig;
use crate::control::{Grant, MAX_WANTED, ToBackup};
use crate::frame::{ALIGN_BYTES, Cut, block_bytes, encode_block};
use crate::links::{Link, Log};
use crate::protocol::{BackupId, ReplicationError};

/// The log of a sender at one backup.
pub(crate) struct ExclusiveLog {
    ahead: usize,
    current: Option<Grant>,
    /// Where in `current` the next block goes.
    at: u64,
    next: VecDeque<Grant>,
    /// Segments asked for and not granted yet.
    wanted: usize,
    gather: Gather,
}

/// How records are cut for segments of this size. `None` for a size that no backup of ours has.
pub(crate) fn cut_for(segment_bytes: u64) -> Option<Cut> {
    Cut::new(usize::try_from(segment_bytes).ok()?)
}

/// The block count of a record, bounded by what one message may ask for.
pub(crate) fn count_blocks(cut: &Cut, len: usize) -> Result<usize, ReplicationError> {
    let count = cut.count(len);
    if count <= usize::from(MAX_WANTED) {
        return Ok(count);
    }
    let max = cut.max_record() / usize::from(crate::frame::MAX_BLOCKS) * usize::from(MAX_WANTED);
    Err(ReplicationError::TooLarge { len, max })
}

impl ExclusiveLog {
    /// Asks for as many segments as it takes to have `target` ahead.
    fn want(&mut self, link: &mut Link, target: usize) {
        let missing = target.saturating_sub(self.next.len() + self.wanted);
        let count = missing.min(usize::from(MAX_WANTED)) as u8;
        if count > 0 {
            self.wanted += usize::from(count);
            link.send(&ToBackup::Want { count, after: 0 });
        }
    }

    /// Writes what is gathered. `partly`: the last item has blocks to come.
    fn emit(&mut self, link: &mut Link, partly: bool) {
        let (Some(grant), Some(gathered)) = (&self.current, self.gather.take()) else {
            return;
        };
        let (first, last) = gathered.items;
        link.write(grant, gathered.offset, gathered.bytes, (first, last));
        let released = if partly { last } else { last + 1 };
        for item in first..released {
            link.release(item);
        }
    }

    fn next_segment(&mut self, link: &mut Link, partly: bool) {
        self.emit(link, partly);
        if let Some(old) = self.current.take() {
            link.leave_segment(old.epoch);
        }
        self.current = self.next.pop_front();
        self.at = 0;
        self.want(link, self.ahead);
    }
}

impl Log for ExclusiveLog {
    const IN_ORDER: bool = true;

    fn new(config: &SenderConfig, _backup: BackupId) -> ExclusiveLog {
        ExclusiveLog {
            ahead: usize::from(config.ahead_segments.clamp(1, MAX_WANTED)),
            current: None,
            at: 0,
            next: VecDeque::new(),
            wanted: 0,
            gather: Gather::new(config.gather_bytes, config.gather_us),
        }
    }

    fn opened(&mut self, link: &mut Link) {
        self.want(link, self.ahead);
    }

    fn granted(&mut self, link: &mut Link, grant: Grant) {
        self.wanted = self.wanted.saturating_sub(1);
        link.hold_segment(grant);
        self.next.push_back(grant);
    }

    fn room(&mut self, link: &mut Link, len: usize) -> Result<bool, ReplicationError> {
        let Some(grant) = self.current.as_ref().or(self.next.front()) else {
            self.want(link, self.ahead);
            return Ok(false);
        };
        let Some(cut) = cut_for(grant.key.len) else {
            return Ok(false);
        };
        let count = count_blocks(&cut, len)?;
        let room = match self.current {
            Some(current) => current.key.len.saturating_sub(self.at),
            None => 0,
        };
        // All blocks but the last fill a segment each, or nearly so.
        let segments = match count {
            1 if block_bytes(len) as u64 <= room => 0,
            count => count,
        };
        if segments > self.next.len() {
            self.want(link, segments.max(self.ahead));
        }
        Ok(segments <= self.next.len())
    }

    fn append(&mut self, link: &mut Link, item: u64, record: &[u8]) {
        let origin = link.next_origin();
        let grant = self.current.as_ref().or(self.next.front());
        let Some(cut) = grant.and_then(|grant| cut_for(grant.key.len)) else {
            return;
        };
        // `room` has bounded the count.
        let count = cut.count(record.len()) as u16;
        for (part, number) in cut.parts(record).zip(0u16..) {
            let len = block_bytes(part.len()) as u64;
            let fits = |grant: &Grant| self.at + len <= grant.key.len;
            if !self.current.as_ref().is_some_and(fits) {
                self.next_segment(link, number > 0);
            }
            let Some(grant) = self.current else {
                return;
            };
            debug_assert!(self.at.is_multiple_of(ALIGN_BYTES as u64));
            let bytes = self.gather.bytes(link, self.at, item);
            encode_block(grant.seed, &origin, (count, number), part, bytes);
            self.at += len;
        }
        if self.gather.is_due(link.now_us) {
            self.emit(link, false);
        }
    }

    fn tick(&mut self, link: &mut Link) {
        if self.gather.is_due(link.now_us) {
            self.emit(link, false);
        }
    }

    fn patience_us(&self) -> Option<u64> {
        self.gather.patience_us()
    }
}

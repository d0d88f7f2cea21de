//! The area grows by prewritten pieces, behind the pages in use.

use super::*;
use crate::flash::log::GrowFailed;

/// Segments ahead of the log that growth hurries to have.
const NEAR: u64 = 64;
/// Time between two pieces of zeros beyond that: the device belongs to the log, and to other
/// replicas' logs.
const PAUSE_US: u64 = 5_000;
/// The same while entries are on their way to the device and there is room for many more: what they
/// wait for comes first.
const BUSY_PAUSE_US: u64 = 50_000;
/// The same for the first pieces of a new area: as a rule there is nothing yet that needs the
/// device.
const NEW_PAUSE_US: u64 = 1_000;

impl FlashLog {
    /// Pages that are written before they are used.
    fn ahead(&self) -> u64 {
        let pages = (self.spec.grow_bytes / PAGE_BYTES as u64).min(self.block.pages);
        pages.max(self.segment_pages())
    }

    /// Whether pieces are missing that should be there by now.
    pub(super) fn wants_to_grow(&self) -> bool {
        let ahead = self.ahead();
        let wanted = ((self.tail + ahead / 2) / ahead + 1).saturating_mul(ahead);
        !self.growing && !self.read_only && self.grown < wanted.min(self.block.pages)
    }

    /// Writes zeros ahead of the log, so that its own writes change no metadata of the file system.
    pub(super) fn grow(&mut self, now_us: u64) {
        let segment = self.segment_pages();
        let near = self.grown < self.tail + NEAR * segment;
        if !self.wants_to_grow() || (!near && now_us < self.grow_due_us) {
            return;
        }
        if self
            .grow_failed
            .is_some_and(|failed| now_us < failed.due_us)
        {
            return;
        }
        let Some(mut buffer) = self.buffers.take() else {
            return;
        };
        let len = segment as usize * PAGE_BYTES;
        buffer[..len].fill(0);
        let request = Request {
            token: GROW,
            action: Action::Write,
            offset: self.block.page_at(self.grown),
            buffer,
            len,
        };
        self.growing = self.device.submit(now_us, request).is_ok();
    }

    pub(super) fn has_grown(&mut self, completion: Completion, now_us: u64) {
        self.growing = false;
        match completion.result {
            Ok(()) => {
                self.grown += self.segment_pages();
                let busy = self.filling.is_some() || !self.writes.is_empty();
                let ahead = self.ahead();
                let pause = if busy && self.grown > self.tail + ahead / 4 {
                    BUSY_PAUSE_US
                } else if !busy && self.grown < ahead {
                    NEW_PAUSE_US
                } else {
                    PAUSE_US
                };
                self.grow_due_us = now_us.saturating_add(pause);
                self.stats.grown_segments += 1;
                self.grow_failed = None;
            }
            Err(error) => {
                self.grow_failed = Some(GrowFailed {
                    since_us: self.grow_failed.map_or(now_us, |failed| failed.since_us),
                    due_us: now_us + self.spec.retry_after_us,
                    error,
                });
                if error != DeviceError::NoSpace {
                    self.stats.write_errors += 1;
                }
            }
        }
    }
}

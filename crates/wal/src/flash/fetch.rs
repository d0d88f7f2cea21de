//! Reading entries back without waiting: for followers that are behind the ring, and for a replay at the start.

use std::collections::VecDeque;

use cyclone_wire::flash::{PAGE_BYTES, PageHeader};

use super::assemble::{Assembler, Object, Step, StoredEntry};
use super::buffer::Buffers;
use super::device::{Action, Completion, DeviceError, Request};
use super::log::FlashLog;

/// Buffers for reading; as many reads are outstanding at most.
const READERS: usize = 4;
/// Fetches that may wait or be under way.
const MAX_FETCHES: usize = 64;

/// Names a fetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FetchId(u64);

/// Why entries could not be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FetchError {
    /// Not on flash, or not durable there yet, or trimmed meanwhile.
    #[error("entry {index} is not on flash")]
    Missing {
        /// The entry.
        index: u64,
    },
    /// Too many fetches under way.
    #[error("{0} fetches are under way")]
    Busy(usize),
    /// The device failed.
    #[error("reading entry {index}: {source}")]
    Device {
        /// The first entry wanted.
        index: u64,
        /// What happened.
        source: DeviceError,
    },
    /// What was durable does not read back.
    #[error("page {page} of the flash log does not read back: {what}")]
    Corrupt {
        /// The page's sequence.
        page: u64,
        /// What does not fit.
        what: &'static str,
    },
}

/// A fetch that came to its end.
#[derive(Debug)]
pub struct Fetched {
    /// Which.
    pub id: FetchId,
    /// Consecutive entries from the first one wanted; perhaps fewer than wanted, at least one.
    pub result: Result<Vec<StoredEntry>, FetchError>,
}

struct Fetch {
    id: FetchId,
    token: Option<u64>,
    from: u64,
    /// Last entry wanted.
    to: u64,
    max_bytes: u64,
    bytes: u64,
    /// The page to read next.
    page: u64,
    /// Pages under way.
    pages: u64,
    assembler: Assembler,
    entries: Vec<StoredEntry>,
}

pub(crate) struct Fetches {
    buffers: Buffers,
    queue: VecDeque<Fetch>,
    done: VecDeque<Fetched>,
    next: u64,
}

impl Fetches {
    pub(crate) fn new(segment_bytes: usize) -> Fetches {
        Fetches {
            buffers: Buffers::new(READERS, segment_bytes),
            queue: VecDeque::new(),
            done: VecDeque::new(),
            next: 0,
        }
    }
}

impl FlashLog {
    /// Begins to read entries `from` to `to`, both included, or as many of them as have `max_bytes` of payload together,
    /// but at least one.
    ///
    /// # Errors
    /// [`FetchError::Missing`], [`FetchError::Busy`].
    pub fn fetch(&mut self, from: u64, to: u64, max_bytes: u64) -> Result<FetchId, FetchError> {
        let to = to.min(self.durable_index);
        let page = self.page_of(from);
        let known = from >= self.terms.first() && from <= to;
        let Some(page) = page.filter(|_| known) else {
            return Err(FetchError::Missing { index: from });
        };
        let waiting = self.fetches.queue.len() + self.fetches.done.len();
        if waiting >= MAX_FETCHES {
            return Err(FetchError::Busy(waiting));
        }
        self.fetches.next += 1;
        let id = FetchId(self.fetches.next);
        self.fetches.queue.push_back(Fetch {
            id,
            token: None,
            from,
            to,
            max_bytes,
            bytes: 0,
            page,
            pages: 0,
            assembler: Assembler::from_index(from),
            entries: Vec::new(),
        });
        Ok(id)
    }

    /// Takes a fetch that has come to its end.
    pub fn take_fetched(&mut self) -> Option<Fetched> {
        self.fetches.done.pop_front()
    }

    /// Fetches under way.
    pub fn fetching(&self) -> usize {
        self.fetches.queue.len()
    }

    pub(crate) fn pump_fetches(&mut self, now_us: u64) {
        let segment = self.segment_pages();
        for place in 0..self.fetches.queue.len() {
            let fetch = &self.fetches.queue[place];
            if fetch.token.is_some() {
                continue;
            }
            let (page, from) = (fetch.page, fetch.from);
            // Whole segments: one read each.
            let until = (page / segment + 1) * segment;
            let pages = until.min(self.durable).saturating_sub(page);
            if pages == 0 || page < self.first {
                let result = Err(FetchError::Missing { index: from });
                self.end_fetch(place, result);
                return self.pump_fetches(now_us);
            }
            let Some(buffer) = self.fetches.buffers.take() else {
                return;
            };
            let token = self.token();
            let request = Request {
                token,
                action: Action::Read,
                offset: self.block.page_at(page),
                buffer,
                len: pages as usize * PAGE_BYTES,
            };
            if self.device.submit(now_us, request).is_err() {
                return;
            }
            self.stats.reads += 1;
            let fetch = &mut self.fetches.queue[place];
            (fetch.token, fetch.pages) = (Some(token), pages);
        }
    }

    fn end_fetch(&mut self, place: usize, result: Result<Vec<StoredEntry>, FetchError>) {
        if let Some(fetch) = self.fetches.queue.remove(place) {
            let id = fetch.id;
            self.fetches.done.push_back(Fetched { id, result });
        }
    }

    pub(crate) fn fetched(&mut self, completion: Completion, now_us: u64) {
        let token = Some(completion.token);
        let place = self
            .fetches
            .queue
            .iter()
            .position(|fetch| fetch.token == token);
        let Some(place) = place else { return };
        let fetch = &mut self.fetches.queue[place];
        fetch.token = None;
        let index = fetch.from;
        let ended = match completion.result {
            Err(source) => Some(Err(FetchError::Device { index, source })),
            Ok(()) => self.take_pages(place, &completion.buffer),
        };
        drop(completion.buffer);
        if let Some(result) = ended {
            self.end_fetch(place, result);
        }
        self.pump_fetches(now_us);
    }

    /// Goes through the pages that were read. `Some`: the fetch has come to its end.
    fn take_pages(
        &mut self,
        place: usize,
        buffer: &[u8],
    ) -> Option<Result<Vec<StoredEntry>, FetchError>> {
        let (first, terms, block) = (self.first, &self.terms, &self.block);
        let fetch = &mut self.fetches.queue[place];
        let count = fetch.pages as usize;
        for bytes in buffer.chunks_exact(PAGE_BYTES).take(count) {
            let page = fetch.page;
            let header = PageHeader::decode(bytes).filter(|header| {
                header.sequence == page && header.tag == block.tag && header.log == block.log
            });
            let Some(header) = header else {
                // Overwritten after it was trimmed.
                return Some(Err(match page < first {
                    true => FetchError::Missing { index: fetch.from },
                    false => FetchError::Corrupt {
                        page,
                        what: "it is not what was written",
                    },
                }));
            };
            let Fetch {
                from,
                entries,
                bytes: total,
                ..
            } = fetch;
            let fed = fetch.assembler.feed(&header, bytes, |step| {
                let Step::Done(Object::Entry(entry)) = step else {
                    return Ok(());
                };
                // Replaced entries may stand in the pages, too: index and term together name one.
                if entry.index == *from + entries.len() as u64
                    && terms.get(entry.index) == Some(entry.term)
                {
                    *total += entry.payload.len() as u64;
                    entries.push(entry);
                }
                Ok(())
            });
            if let Err(what) = fed {
                return Some(Err(FetchError::Corrupt { page, what }));
            }
            fetch.page += 1;
            let got = fetch.entries.len() as u64;
            if got > 0 && (fetch.bytes >= fetch.max_bytes || fetch.from + got > fetch.to) {
                let mut entries = std::mem::take(&mut fetch.entries);
                entries.truncate((fetch.to + 1 - fetch.from) as usize);
                return Some(Ok(entries));
            }
        }
        None
    }
}

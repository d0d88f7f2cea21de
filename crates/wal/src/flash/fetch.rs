//! Reading entries back without waiting: for followers that are behind the ring, and for a replay
//! at the start.

use std::collections::VecDeque;

use cyclone_wire::flash::{PAGE_BYTES, PageHeader};

use super::assemble::{Assembler, MalformedPage, Object, Step, StoredEntry};
use super::buffer::{Buffer, Buffers};
use super::device::{Action, Completion, DeviceError, Request};
use super::log::FlashLog;

/// Buffers for reading; as many reads are outstanding at most.
const READERS: usize = 8;
/// Reads of one fetch: the device works while entries are put together.
const AHEAD: usize = 4;
/// Fetches that may be queued or in flight.
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
    /// Too many fetches in flight.
    #[error("{0} fetches are in flight")]
    Busy(usize),
    /// The device failed.
    #[error("reading entry {index}, page {page} of the flash log: {source}")]
    Device {
        /// The first entry wanted.
        index: u64,
        /// The page's sequence.
        page: u64,
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

impl FetchError {
    /// The page that does not read back.
    pub fn page(&self) -> Option<u64> {
        match *self {
            FetchError::Device { page, .. } | FetchError::Corrupt { page, .. } => Some(page),
            FetchError::Missing { .. } | FetchError::Busy(_) => None,
        }
    }
}

/// A fetch that came to its end.
#[derive(Debug)]
pub struct Fetched {
    /// Which.
    pub id: FetchId,
    /// Consecutive entries from the first one wanted; perhaps fewer than wanted, at least one.
    pub result: Result<Vec<StoredEntry>, FetchError>,
}

/// A read in flight, or completed before its turn.
struct Reading {
    token: u64,
    pages: u64,
    result: Option<Result<Buffer, DeviceError>>,
}

struct Fetch {
    id: FetchId,
    from: u64,
    /// Last entry wanted.
    to: u64,
    max_bytes: u64,
    bytes: u64,
    /// The page to go through next.
    page: u64,
    /// The page to ask for next.
    asked: u64,
    /// In their order.
    readings: VecDeque<Reading>,
    /// Reading ahead is of no use from here on.
    until: u64,
    /// Pages below this are read one by one: a read of several failed, and the bad one may be of no
    /// use here.
    single_reads_below: u64,
    assembler: Assembler<Vec<u8>>,
    entries: Vec<StoredEntry>,
}

impl Fetch {
    /// Whether it can do with another read, when it has so many at most.
    fn wants(&self, readings: usize) -> bool {
        let ahead = (self.asked - self.page) * PAGE_BYTES as u64;
        let useful = self.asked < self.until && self.bytes + ahead < self.max_bytes;
        self.readings.len() < readings && (self.readings.is_empty() || useful)
    }
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
    /// Begins to read entries `from` to `to`, both included, or as many of them as have `max_bytes`
    /// of payload together, but at least one.
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
        // The last entry wanted ends at the latest where its successor begins.
        let until = self.page_of(to + 1).map_or(page, |last| last + 1);
        self.fetches.next += 1;
        let id = FetchId(self.fetches.next);
        self.fetches.queue.push_back(Fetch {
            id,
            from,
            to,
            max_bytes,
            bytes: 0,
            page,
            asked: page,
            readings: VecDeque::new(),
            until,
            single_reads_below: page,
            assembler: Assembler::from_index(from),
            entries: Vec::new(),
        });
        Ok(id)
    }

    /// Takes a fetch that has come to its end.
    pub fn take_fetched(&mut self) -> Option<Fetched> {
        self.fetches.done.pop_front()
    }

    /// Fetches in flight.
    pub fn fetching(&self) -> usize {
        self.fetches.queue.len()
    }

    /// Hands over reads: the first of each fetch, and then those ahead.
    pub(crate) fn pump_fetches(&mut self, now_us: u64) {
        for readings in 1..=AHEAD {
            let mut place = 0;
            while let Some(fetch) = self.fetches.queue.get(place) {
                if !fetch.wants(readings) {
                    place += 1;
                    continue;
                }
                match self.read_for(place, now_us) {
                    // Ended: another one is in its place.
                    Some(false) => {}
                    Some(true) => place += 1,
                    None => return,
                }
            }
        }
    }

    /// Hands over a fetch's next read. `Some(false)`: the fetch has come to its end; `None`: too
    /// many reads are in flight.
    fn read_for(&mut self, place: usize, now_us: u64) -> Option<bool> {
        let segment = self.segment_pages();
        let fetch = &self.fetches.queue[place];
        let (page, from) = (fetch.asked, fetch.from);
        // Whole segments: one read each.
        let until = match page < fetch.single_reads_below {
            true => page + 1,
            false => (page / segment + 1) * segment,
        };
        let pages = until.min(self.durable).saturating_sub(page);
        if pages == 0 && !fetch.readings.is_empty() {
            // What has been asked for may do.
            self.fetches.queue[place].until = page;
            return Some(true);
        }
        if pages == 0 || page < self.first {
            let result = Err(FetchError::Missing { index: from });
            self.end_fetch(place, result);
            return Some(false);
        }
        let buffer = self.fetches.buffers.take()?;
        let token = self.token();
        let request = Request {
            token,
            action: Action::Read,
            offset: self.block.page_at(page),
            buffer,
            len: pages as usize * PAGE_BYTES,
        };
        self.device.submit(now_us, request).ok()?;
        self.stats.reads += 1;
        let fetch = &mut self.fetches.queue[place];
        fetch.asked += pages;
        fetch.readings.push_back(Reading {
            token,
            pages,
            result: None,
        });
        Some(true)
    }

    fn end_fetch(&mut self, place: usize, result: Result<Vec<StoredEntry>, FetchError>) {
        if let Some(fetch) = self.fetches.queue.remove(place) {
            let id = fetch.id;
            self.fetches.done.push_back(Fetched { id, result });
        }
    }

    pub(crate) fn fetched(&mut self, completion: Completion, now_us: u64) {
        let token = completion.token;
        let mut found = self.fetches.queue.iter_mut().enumerate();
        let found = found.find_map(|(place, fetch)| {
            let mut readings = fetch.readings.iter_mut();
            Some((place, readings.find(|reading| reading.token == token)?))
        });
        if let Some((place, reading)) = found {
            let buffer = completion.buffer;
            reading.result = Some(completion.result.map(|()| buffer));
            if let Some(result) = self.process_completed(place) {
                self.end_fetch(place, result);
            }
        }
        self.pump_fetches(now_us);
    }

    /// Goes through what has come back and whose turn it is. `Some`: the fetch has come to its end.
    fn process_completed(&mut self, place: usize) -> Option<Result<Vec<StoredEntry>, FetchError>> {
        loop {
            let fetch = &mut self.fetches.queue[place];
            fetch.readings.front()?.result.as_ref()?;
            let Reading { pages, result, .. } = fetch.readings.pop_front()?;
            let index = fetch.from;
            let ended = match result? {
                Err(_) if pages > 1 => {
                    fetch.single_reads_below = fetch.page + pages;
                    fetch.asked = fetch.page;
                    fetch.readings.clear();
                    None
                }
                Err(_) if !fetch.entries.is_empty() => Some(Ok(std::mem::take(&mut fetch.entries))),
                Err(source) => Some(Err(FetchError::Device {
                    index,
                    page: fetch.page,
                    source,
                })),
                Ok(buffer) => self.take_pages(place, &buffer[..pages as usize * PAGE_BYTES]),
            };
            if ended.is_some() {
                return ended;
            }
        }
    }

    /// Goes through the pages that were read. `Some`: the fetch has come to its end.
    fn take_pages(
        &mut self,
        place: usize,
        buffer: &[u8],
    ) -> Option<Result<Vec<StoredEntry>, FetchError>> {
        let (first, terms, block) = (self.first, &self.terms, &self.block);
        let fetch = &mut self.fetches.queue[place];
        for bytes in buffer.chunks_exact(PAGE_BYTES) {
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
                let Step::Done(Object::Entry(head, payload), _) = step else {
                    return;
                };
                // Replaced entries may stand in the pages, too: index and term together name one.
                if head.index == *from + entries.len() as u64
                    && terms.get(head.index) == Some(head.term)
                {
                    *total += payload.len() as u64;
                    entries.push(StoredEntry {
                        index: head.index,
                        term: head.term,
                        prev_term: head.prev_term,
                        kind: head.kind,
                        payload_crc: head.payload_crc,
                        payload,
                    });
                }
            });
            if let Err(MalformedPage { what, .. }) = fed {
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

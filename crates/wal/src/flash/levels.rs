//! The two levels together, at a start: whether what memory and flash hold fits, and memory made
//! anew from flash where flash is the only durable level.

use cyclone_pmem::{Area, FrameMut, Payload, Pool};
use cyclone_wire::flash::PAGE_BYTES;

use super::assemble::StoredEntry;
use super::fetch::FetchError;
use super::log::FlashLog;
use super::spec::FlashError;
use crate::ring::{Batch, NewEntry, Ring, RingError, RingSpec};

/// Payload bytes read back at once.
const READ_BYTES: u64 = 1 << 20;
/// Payloads shorter than this part of a frame are copied inline: the ring copies those out that
/// leave most of their frames empty, and one may lie across two.
const LEAST_FILLED: usize = 4;
/// This part of the frames is left free.
const KEPT_FREE: u32 = 8;

/// Why memory could not be made anew from flash.
#[derive(Debug, thiserror::Error)]
pub enum RebuildError {
    /// Reading flash failed.
    #[error("flash: {0}")]
    Fetch(#[from] FetchError),
    /// The region does not take what flash holds.
    #[error("ring: {0}")]
    Ring(#[from] RingError),
    /// It is whole, and larger than memory.
    #[error(
        "what flash holds behind the last durable commit index does not fit the log's share of the region ({0}): nothing is lost; raise \
         nvm_bytes and remove the region, which is made anew from flash"
    )]
    TooLittleMemory(RingError),
}

impl FlashLog {
    /// As the second level: checks what was found on flash against the ring, and sees to it that
    /// draining can go on. Entries in both levels are matched by their index; the ring's are the
    /// ones that count. `applied` is the last entry that the store survives a crash with.
    ///
    /// # Errors
    /// [`FlashError::Levels`]: entries that the store lacks are in neither level, or one of the levels is older than it
    /// may be.
    pub fn join(&mut self, ring: &Ring, applied: u64) -> Result<(), FlashError> {
        let (flash_first, flash_last) = (self.first_index(), self.last_index());
        let (ring_first, ring_last) = (ring.first_index(), ring.last_index());
        let fail = |what| {
            Err(FlashError::Levels {
                flash_first,
                flash_last,
                ring_first,
                ring_last,
                what,
            })
        };
        if applied > ring_last {
            // A checkpoint was installed and the crash came before the ring was reset to it: both
            // are, with the ring.
            return Ok(());
        }
        if flash_last > ring_last {
            return fail("memory is older than flash");
        }
        if flash_last + 1 < ring_first {
            if applied + 1 < ring_first {
                return fail("entries that the store lacks are in neither");
            }
            // A checkpoint was installed, and the crash came between the ring's reset and that of
            // flash.
            self.reset(ring_first - 1, ring.term(ring_first - 1).unwrap_or(0));
            return Ok(());
        }
        for index in [flash_last, (ring_first - 1).max(flash_first)] {
            if let (Some(here), Some(there)) = (self.term(index), ring.term(index))
                && here != there
            {
                return fail("they have different terms at one index");
            }
        }
        Ok(())
    }

    /// Reads entries and waits for them; for starting up and for tools. Stops when `each` says so.
    ///
    /// # Errors
    /// See [`FetchError`].
    pub fn read_all(
        &mut self,
        from: u64,
        to: u64,
        mut each: impl FnMut(StoredEntry) -> bool,
    ) -> Result<(), FetchError> {
        let mut next = from;
        while next <= to {
            self.fetch(next, to, READ_BYTES)?;
            let fetched = loop {
                // Time stands still: nothing is to be written while starting.
                self.poll(0);
                match self.take_fetched() {
                    Some(fetched) => break fetched,
                    None => self.device.wait(),
                }
            };
            for entry in fetched.result? {
                next = entry.index + 1;
                if !each(entry) {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// As the only level: formats a ring that holds what flash says. It begins behind `applied` or
    /// the commit index, whichever is higher: what the store lacks below that is read from flash.
    /// Where the ring might not take all of it, large payloads go into frames of `pool`, from which
    /// no other code takes any meanwhile.
    ///
    /// # Errors
    /// See [`RebuildError`].
    pub fn rebuild(
        &mut self,
        area: Area,
        spec: RingSpec,
        pool: Option<&Pool>,
        applied: u64,
    ) -> Result<Ring, RebuildError> {
        let (first, last) = (self.first_index(), self.last_index());
        let mut state = self.hard_state().clone();
        let begin = state.commit.max(applied).clamp(first - 1, last);
        state.commit = begin;
        let term = self.term(begin).unwrap_or(0);
        let mut ring = Ring::create(area, spec, pool, &state)?;
        ring.reset(begin, term);
        let pool = pool.filter(|_| !self.fits_inline(&ring));
        let (mut gathered, mut bytes) = (Vec::new(), 0);
        let mut put = Ok(());
        self.read_all(begin + 1, last, |entry| {
            bytes += entry.payload.len() as u64;
            let is_last = entry.index == last;
            gathered.push(entry);
            if bytes >= READ_BYTES || is_last {
                bytes = 0;
                put = put_back(&mut ring, pool, std::mem::take(&mut gathered));
            }
            put.is_ok()
        })?;
        put.map(|()| ring)
    }

    /// Whether what lies behind the ring's end certainly fits into it without frames: it is no more
    /// than its pages.
    fn fits_inline(&self, ring: &Ring) -> bool {
        let begin = ring.last_index();
        let page = self.page_of(begin + 1).unwrap_or(self.first);
        let entries = self.last_index() - begin;
        ring.fits(entries, (self.tail - page) * PAGE_BYTES as u64)
    }
}

/// Appends entries to a ring that is made anew.
fn put_back(
    ring: &mut Ring,
    pool: Option<&Pool>,
    mut entries: Vec<StoredEntry>,
) -> Result<(), RebuildError> {
    let payloads = payloads(pool, &mut entries);
    let new: Vec<NewEntry<'_>> = entries
        .iter()
        .zip(&payloads)
        .map(|(entry, payload)| NewEntry {
            index: entry.index,
            term: entry.term,
            kind: entry.kind,
            payload,
        })
        .collect();
    let persisted = ring.persist(Batch {
        entries: &new,
        hard_state: None,
    });
    match persisted {
        Ok(_) => Ok(()),
        Err(error @ (RingError::Full { .. } | RingError::TooLarge { .. })) => {
            Err(RebuildError::TooLittleMemory(error))
        }
        Err(error) => Err(error.into()),
    }
}

/// The entries' payloads as the ring is to take them: large ones in frames, one behind the other as
/// in packets, as long as there are frames.
fn payloads(pool: Option<&Pool>, entries: &mut [StoredEntry]) -> Vec<Payload> {
    let least = pool.map_or(0, |pool| pool.frame_bytes() as usize / LEAST_FILLED);
    let (mut room, mut end) = (pool.map_or(0, frame_budget_bytes), 0);
    let mut places = Vec::with_capacity(entries.len());
    for entry in entries.iter() {
        let len = entry.payload.len();
        let is_framed = len > 0 && len >= least && len <= room;
        places.push(is_framed.then_some(end..end + len));
        if is_framed {
            (room, end) = (room - len, end + len);
        }
    }
    let framed = entries.iter().zip(&places);
    let framed = framed.filter_map(|(entry, place)| place.as_ref().map(|_| &entry.payload[..]));
    let frames = pool.and_then(|pool| copy_to_frames(pool, framed));
    entries
        .iter_mut()
        .zip(places)
        .map(|(entry, place)| match (&frames, place) {
            (Some(frames), Some(place)) => frames.slice(place),
            _ => Payload::from_vec(std::mem::take(&mut entry.payload)),
        })
        .collect()
}

/// Bytes of frames that the log may take: the rest is to receive packets into, as while it lives.
fn frame_budget_bytes(pool: &Pool) -> usize {
    let frames = pool.free().saturating_sub(pool.count() / KEPT_FREE);
    frames as usize * pool.frame_bytes() as usize
}

/// Copies pieces into frames, without gaps. `None`: there are not enough.
fn copy_to_frames<'p>(pool: &Pool, pieces: impl Iterator<Item = &'p [u8]>) -> Option<Payload> {
    let mut all = Payload::new();
    let mut open: Option<(FrameMut, usize)> = None;
    for mut piece in pieces {
        while !piece.is_empty() {
            let (mut frame, at) = match open.take() {
                Some(open) => open,
                None => (pool.alloc()?, 0),
            };
            let (now, later) = piece.split_at(piece.len().min(frame.len() - at));
            let end = at + now.len();
            frame[at..end].copy_from_slice(now);
            piece = later;
            match end < frame.len() {
                true => open = Some((frame, end)),
                false => all.push_frame(frame.freeze(0..end)),
            }
        }
    }
    if let Some((frame, end)) = open {
        all.push_frame(frame.freeze(0..end));
    }
    Some(all)
}

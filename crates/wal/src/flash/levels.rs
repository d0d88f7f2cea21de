//! The two levels together, at a start: whether what memory and flash hold fits, and memory made anew from flash where
//! flash is the only durable level.

use cyclone_pmem::{Area, Payload, Pool};

use super::assemble::StoredEntry;
use super::fetch::FetchError;
use super::log::FlashLog;
use super::spec::FlashError;
use crate::ring::{Batch, NewEntry, Ring, RingError, RingSpec};

/// Payload bytes read back at once.
const READ_BYTES: u64 = 1 << 20;

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

/// An entry's payload as the ring is to take it: from one half on out of frames, which is where most of what is received lies while
/// the log lives. Some are left to receive into.
fn placed(bytes: Vec<u8>, ring: &Ring, pool: Option<&Pool>) -> Payload {
    let is_roomy = 2 * (ring.used_bytes() + bytes.len() as u64) <= ring.capacity_bytes();
    let framed = pool
        .filter(|_| !is_roomy)
        .and_then(|pool| in_frames(&bytes, pool));
    framed.unwrap_or_else(|| Payload::from_vec(bytes))
}

fn in_frames(bytes: &[u8], pool: &Pool) -> Option<Payload> {
    let each = pool.frame_bytes() as usize;
    let needed = bytes.len().div_ceil(each) as u64;
    if u64::from(pool.free()) < needed + u64::from(pool.count() / 4) {
        return None;
    }
    let mut payload = Payload::new();
    for piece in bytes.chunks(each) {
        let mut frame = pool.alloc()?;
        frame[..piece.len()].copy_from_slice(piece);
        payload.push_frame(frame.freeze(0..piece.len()));
    }
    Some(payload)
}

impl FlashLog {
    /// As the second level: checks what was found on flash against the ring, and sees to it that draining can go on.
    /// Entries in both levels are told by their index; the ring's are the ones that count. `applied` is the last entry
    /// that the store survives a crash with.
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
            // A checkpoint was installed and the crash came before the ring was reset to it: both are, with the ring.
            return Ok(());
        }
        if flash_last > ring_last {
            return fail("memory is older than flash");
        }
        if flash_last + 1 < ring_first {
            if applied + 1 < ring_first {
                return fail("entries that the store lacks are in neither");
            }
            // A checkpoint was installed, and the crash came between the ring's reset and that of flash.
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

    /// As the only level: formats a ring that holds what flash says. It begins behind `applied` or the commit index,
    /// whichever is higher: what the store lacks below that is read from flash.
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
        let mut failed = None;
        self.read_all(begin + 1, last, |entry| {
            let payload = placed(entry.payload, &ring, pool);
            let new = NewEntry {
                index: entry.index,
                term: entry.term,
                kind: entry.kind,
                payload: &payload,
            };
            let persisted = ring.persist(Batch {
                entries: &[new],
                hard_state: None,
            });
            failed = persisted.err();
            failed.is_none()
        })?;
        match failed {
            None => Ok(ring),
            Some(full @ RingError::Full { .. }) => Err(RebuildError::TooLittleMemory(full)),
            Some(error) => Err(error.into()),
        }
    }
}

//! Making batches durable: one ring's, or those of several rings by the same fences. //= cyclone
//! §4.2
//!
//! Order of every append: records (and the frames they name) are flushed and fenced; only then are
//! the slots that point at them stored, flushed and fenced. So the first null slot is the log's
//! end, and whatever a non-null slot points at before it was durable once: if it does not read
//! back, memory has rotted, and the log says so instead of shortening itself.
//!
//! A fence waits for everything that its thread has flushed, in whichever area. So several rings
//! take each of these steps together, and wait once.

use std::ops::Range;

use cyclone_pmem::Area;
use cyclone_wire::planted::unless_planted;
use cyclone_wire::ring::HardState;

use crate::ring::{Batch, Persisted, Ring, RingError, check_members};

/// A batch whose records are written and on their way to memory. The ring shows them already, but
/// no slot points at them: they are durable after [`persist_all`], and nothing else may be written
/// before that.
#[must_use]
pub struct PendingBatch {
    entries: Range<u64>,
    hard_state: Option<Box<HardState>>,
    has_state: bool,
    /// The last index that is durable already.
    durable_last: u64,
}

/// A ring and what has been written to it.
type Open<'r> = (&'r mut Ring, PendingBatch);

impl Ring {
    /// Makes entries and hard state durable, in that order where it matters. After `Ok` nothing in
    /// the batch is lost by a crash; after an error nothing was appended (a conflicting suffix may
    /// be gone, as it would be anyway).
    ///
    /// # Errors
    /// [`RingError::Full`], [`RingError::TooLarge`], [`RingError::NotConsecutive`],
    /// [`RingError::TermBackwards`], [`RingError::TooManyMembers`], [`RingError::CommitBeyondEnd`],
    /// [`RingError::TruncatesCommitted`].
    pub fn persist(&mut self, batch: Batch<'_>) -> Result<Persisted, RingError> {
        let written = self.write(batch)?;
        let mut one: [Result<Open<'_>, RingError>; 1] = [Ok((self, written))];
        commit_batches(&mut one);
        let [one] = one;
        one.map(witness)
    }

    /// The first half of [`Ring::persist`]: writes the records, for [`persist_all`].
    ///
    /// # Errors
    /// As [`Ring::persist`].
    ///
    /// # Panics
    /// When what was written before has not been made durable.
    pub fn write(&mut self, batch: Batch<'_>) -> Result<PendingBatch, RingError> {
        assert!(!self.is_open, "one batch at a time");
        self.check_hard_state(&batch)?;
        let next = match batch.entries.first() {
            Some(entry) => {
                self.check(batch.entries)?;
                if entry.index <= self.last_index() {
                    self.truncate(entry.index);
                }
                entry.index
            }
            None => self.last_index() + 1,
        };
        let written = PendingBatch {
            entries: next..next + batch.entries.len() as u64,
            has_state: batch.hard_state.is_some(),
            hard_state: batch.hard_state.map(Box::new),
            durable_last: self.last_index(),
        };
        let before = self.mark();
        for entry in batch.entries {
            if let Err(error) = self.write_record(entry) {
                self.rollback_to(before);
                return Err(error);
            }
        }
        self.is_open = true;
        Ok(written)
    }

    fn check_hard_state(&self, batch: &Batch<'_>) -> Result<(), RingError> {
        let Some(state) = &batch.hard_state else {
            return Ok(());
        };
        check_members(state)?;
        let added = batch.entries.len() as u64;
        let last = match batch.entries.first() {
            Some(entry) => entry.index.saturating_add(added) - 1,
            None => self.last_index(),
        };
        if state.commit > last {
            let commit = state.commit;
            return Err(RingError::CommitBeyondEnd { commit, last });
        }
        Ok(())
    }
}

impl PendingBatch {
    fn has_entries(&self) -> bool {
        !self.entries.is_empty()
    }

    /// Whether the commit index covers entries of the same batch: it must not become durable before
    /// they are.
    fn covers_own_entries(&self) -> bool {
        let commit = self.hard_state.as_ref().map_or(0, |state| state.commit);
        self.has_entries() && commit > self.durable_last
    }
}

/// Lets slots point at the records, which are durable.
fn publish_slots((ring, written): &mut Open<'_>) {
    ring.store_slots(written.entries.clone());
}

fn write_hard_state((ring, written): &mut Open<'_>) {
    if let Some(state) = written.hard_state.take() {
        ring.write_hard_state(*state);
    }
}

/// The hard state is durable in its slot.
fn copy_hard_state((ring, written): &mut Open<'_>) {
    if written.has_state {
        ring.copy_hard_state();
    }
}

/// For those that have been settled.
fn witness((ring, _): Open<'_>) -> Persisted {
    Persisted::after_fence(ring.last_index())
}

/// Makes batches of several rings durable, each as [`Ring::persist`] does, with as many fences as
/// one of them takes. Those that could not be written stay as they are.
pub fn persist_all<'r, E: 'r>(
    mut written: impl AsMut<[Result<(&'r mut Ring, PendingBatch), E>]>
    + IntoIterator<Item = Result<(&'r mut Ring, PendingBatch), E>>,
) -> impl Iterator<Item = Result<Persisted, E>> {
    commit_batches(written.as_mut());
    written.into_iter().map(|one| one.map(witness))
}

/// Makes durable what has been written.
fn commit_batches<E>(written: &mut [Result<Open<'_>, E>]) {
    unless_planted!(RecordsNotFenced, fence(written, PendingBatch::has_entries));
    written.iter_mut().flatten().for_each(publish_slots);
    unless_planted!(
        CommitBeforeEntries,
        fence(written, PendingBatch::covers_own_entries)
    );
    written.iter_mut().flatten().for_each(write_hard_state);
    unless_planted!(
        AckBeforeFence,
        fence(written, |one| one.has_entries() || one.has_state)
    );
    written.iter_mut().flatten().for_each(copy_hard_state);
    for (ring, _) in written.iter_mut().flatten() {
        ring.is_open = false;
    }
}

/// Waits for what was flushed, if any of them needs it.
fn fence<E>(written: &[Result<Open<'_>, E>], needs: impl Fn(&PendingBatch) -> bool) {
    if written.iter().flatten().any(|(_, one)| needs(one)) {
        Area::fence_all(written.iter().flatten().map(|(ring, _)| &ring.area));
    }
}

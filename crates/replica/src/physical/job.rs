//! What a worker does for a log.

use cyclone_store::{Applied, ApplyError, EntryInput, Mode, StateMachine};

/// Committed entries for a worker: index, term, payload.
pub(crate) struct ApplyJob {
    entries: Vec<(u64, u64, Vec<u8>)>,
}

impl ApplyJob {
    pub(super) fn new(entries: Vec<(u64, u64, Vec<u8>)>) -> ApplyJob {
        ApplyJob { entries }
    }

    /// Applies them, waiting as long as it takes.
    pub(crate) fn apply(&self, store: &dyn StateMachine, log: u16) -> Result<Applied, ApplyError> {
        let entries: Vec<EntryInput<'_>> = self
            .entries
            .iter()
            .map(|(index, term, payload)| EntryInput {
                index: *index,
                term: *term,
                payload,
            })
            .collect();
        store.apply(log, &entries, Mode::Blocking)
    }
}

//! What a worker does for a log.

use cyclone_store::{Applied, ApplyError, EntryInput, Mode, StateMachine};

/// Committed entries for a worker.
pub(crate) struct ApplyJob {
    entries: Vec<Entry>,
}

struct Entry {
    index: u64,
    term: u64,
    payload: Vec<u8>,
    wants_replies: bool,
}

impl ApplyJob {
    pub(super) fn new(entries: &[EntryInput<'_>]) -> ApplyJob {
        let copy = |entry: &EntryInput<'_>| Entry {
            index: entry.index,
            term: entry.term,
            payload: entry.payload.to_vec(),
            wants_replies: entry.wants_replies,
        };
        ApplyJob {
            entries: entries.iter().map(copy).collect(),
        }
    }

    /// Applies as many of them as one call does, waiting as long as it takes.
    pub(crate) fn apply(&self, store: &dyn StateMachine, log: u16) -> Result<Applied, ApplyError> {
        let entries: Vec<EntryInput<'_>> = self
            .entries
            .iter()
            .map(|entry| EntryInput {
                index: entry.index,
                term: entry.term,
                payload: &entry.payload,
                wants_replies: entry.wants_replies,
            })
            .collect();
        store.apply(log, &entries, Mode::Blocking)
    }
}

//! A store in memory, shared by the managers of one process: for tests.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::{Answer, Key, Record, Report, Request, Revision, Store, StoreError, Ticket};

/// The records.
#[derive(Clone, Debug, Default)]
pub struct Records {
    records: BTreeMap<Key, Record>,
    revision: Revision,
}

impl Records {
    /// A record; revision 0 if there is none.
    pub fn get(&self, key: Key) -> Record {
        self.records.get(&key).cloned().unwrap_or_default()
    }

    /// No records, of a store whose last revision was this one.
    pub(crate) fn at(revision: Revision) -> Records {
        Records {
            revision,
            ..Records::default()
        }
    }

    /// The last revision given.
    pub(crate) fn revision(&self) -> Revision {
        self.revision
    }

    /// Sets a record as it was.
    pub(crate) fn put(&mut self, key: Key, record: Record) {
        self.records.insert(key, record);
    }

    /// Does a request, at once.
    pub fn apply(&mut self, request: &Request) -> Answer {
        match request {
            Request::Get(key) => Answer::Value(self.get(*key)),
            Request::Swap {
                key,
                expected,
                value,
            } => {
                let record = self.get(*key);
                if record.revision != *expected {
                    return Answer::Conflict(record);
                }
                self.revision += 1;
                let record = Record {
                    revision: self.revision,
                    value: value.clone(),
                };
                self.records.insert(*key, record);
                Answer::Swapped(self.revision)
            }
        }
    }
}

/// One manager's end.
#[derive(Debug, Default)]
pub struct MemoryStore {
    shared: Arc<Mutex<Records>>,
    answers: Vec<Report>,
    seen: BTreeMap<Key, Revision>,
}

impl MemoryStore {
    /// A new store's first end.
    pub fn new() -> MemoryStore {
        MemoryStore::default()
    }

    /// Another end of the same store.
    pub fn another(&self) -> MemoryStore {
        MemoryStore {
            shared: self.shared.clone(),
            ..MemoryStore::default()
        }
    }
}

impl Store for MemoryStore {
    fn submit(&mut self, _: u64, ticket: Ticket, request: Request) -> Result<(), StoreError> {
        let mut records = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        let answer = records.apply(&request);
        self.answers.push(Report::Answer(ticket, answer));
        Ok(())
    }

    fn poll(&mut self, _: u64, reports: &mut Vec<Report>) {
        reports.append(&mut self.answers);
        let records = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        for key in Key::ALL {
            let record = records.get(key);
            let seen = self.seen.entry(key).or_insert(0);
            if record.revision > *seen {
                *seen = record.revision;
                reports.push(Report::Changed(key, record));
            }
        }
    }
}

//! The store of configurations: two records, compared and swapped by revision. Implementations:
//! [`memory`] (tests),
//! [`raft`] (our own consensus, embedded), etcd and ZooKeeper behind features of their names.
//!
//! A lease is nothing a store has to offer: it follows from compare-and-swap. A manager in office
//! swaps its record ever again and counts from the moment it *sent* the last swap that succeeded.
//! Another one that has watched the record stand still for a whole lease swaps from the revision it
//! saw: if that succeeds, the last renewal was sent before it looked, so the lease has run out. No
//! clock of the store takes part, and leases may be far shorter than those of etcd (seconds) or
//! ZooKeeper (sessions of several ticks).

#[cfg(feature = "etcd")]
pub mod etcd;
pub mod memory;
pub mod raft;
#[cfg(any(feature = "etcd", feature = "zookeeper"))]
mod remote;
#[cfg(any(feature = "zookeeper", test))]
mod versions;
#[cfg(feature = "zookeeper")]
pub mod zookeeper;

/// One of the records.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Key {
    /// The [`crate::Configuration`].
    Configuration,
    /// The [`crate::codec::LeaderRecord`].
    LeaderRecord,
}

impl Key {
    /// Both.
    pub const ALL: [Key; 2] = [Key::Configuration, Key::LeaderRecord];

    /// The record's name, as part of a path.
    pub fn name(self) -> &'static str {
        match self {
            Key::Configuration => "configuration",
            Key::LeaderRecord => "manager",
        }
    }
}

/// Which writing of a record; grows with each. 0: the record does not exist.
pub type Revision = u64;

/// Largest record in bytes.
pub const MAX_RECORD: usize = 1 << 20;

/// Names a request, in the answer.
pub type Ticket = u64;

/// What is asked of the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// The record as it is now: linearizable.
    Get(Key),
    /// Write it, if its revision is this one.
    Swap {
        /// The record.
        key: Key,
        /// The revision expected; 0: it must not exist.
        expected: Revision,
        /// The new content, at most [`MAX_RECORD`] bytes.
        value: Vec<u8>,
    },
}

/// How it ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The record; revision 0 and no bytes if there is none.
    Value(Record),
    /// Written, under this revision.
    Swapped(Revision),
    /// Not written; this is the record.
    Conflict(Record),
    /// Nothing was done; ask again later.
    Unavailable,
    /// It may have been done, or may yet be.
    Unknown,
}

/// A record's content.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// Which writing.
    pub revision: Revision,
    /// The bytes.
    pub value: Vec<u8>,
}

/// What a store reports without a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Report {
    /// A request has ended.
    Answer(Ticket, Answer),
    /// A record has changed; not every change need be reported, but the last one is, sooner or
    /// later.
    Changed(Key, Record),
}

/// A store does not take a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// Too many in flight; nothing was done.
    #[error("{0} requests in flight")]
    Busy(usize),
    /// Larger than [`MAX_RECORD`].
    #[error("a record of {0} bytes; at most {MAX_RECORD} are possible")]
    TooLarge(usize),
    /// The store has failed for good.
    #[error("the store has stopped")]
    Stopped,
}

/// A store, from one manager's side. It never blocks.
pub trait Store {
    /// Begins a request. Its answer comes from [`Store::poll`], once, [`Answer::Unknown`] if
    /// nothing else becomes known.
    ///
    /// # Errors
    /// Nothing was done, and no answer will come.
    fn submit(&mut self, now_us: u64, ticket: Ticket, request: Request) -> Result<(), StoreError>;

    /// Lets time pass and gives what there is to tell.
    fn poll(&mut self, now_us: u64, reports: &mut Vec<Report>);
}

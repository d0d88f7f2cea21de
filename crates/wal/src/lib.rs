//! The log in byte-addressable memory: a ring of pointer slots at records, two-slot hard state,
//! recovery; and the superblock that says whose region it is. Knows neither sockets nor Raft; has
//! no clock.
#![deny(unsafe_code)]

pub mod flash;
mod persist;
mod recover;
mod recovery_cases;
mod repair;
pub mod ring;
pub mod superblock;
mod write;

pub use cyclone_wire::ring::HardState;
pub use persist::{PendingBatch, persist_all};
pub use recover::Recovered;
pub use repair::Finding;
pub use ring::{Batch, EntryView, NewEntry, Persisted, Ring, RingError, RingSpec};
pub use superblock::{Identity, SuperblockError};

//! Rowan-KV: a sharded, log-structured key-value store in persistent memory, whose backups do nothing while a client waits
//! (rowan §4–5). A server's worker appends to its own log, writes to every backup's log one-sidedly, by any of the
//! protocols of `replication`, and answers when all have it.
//!
//! ```text
//!   Configuration  who serves which shard, and where keys belong         configuration.rs
//!   Entry          how objects stand in logs                              entry.rs
//!   Index          where a shard's objects lie, in DRAM                   index/
//!   Heap           entries by address, live bytes per segment             heap.rs
//!   Store          what a server's threads share                          store.rs, space.rs, walk.rs
//!   Void           what is there and does not count                        void.rs
//!   Log            a log of the server's own                              log.rs
//!   Worker         requests: append, replicate, publish, answer           worker/
//!   Checkpoint     the indexes in a file, for a faster start               checkpoint.rs
//!   Restored       an index from what lies in memory                       rebuild.rs
//!   Control        the segment table, digestion, cleaning, cold start     control.rs, clean.rs
//!   Node           a server: all of it, over configurations          node/
//!   Message        what servers tell each other                           message.rs, peers.rs
//! ```
//!
//! Time and seeds are passed in; no part has a thread, a socket or a clock of its own.

#![forbid(unsafe_code)]

pub mod checkpoint;
mod clean;
pub mod configuration;
pub mod control;
#[cfg(test)]
mod damage_tests;
mod digest;
pub mod entry;
pub mod heap;
pub mod index;
pub mod log;
pub mod message;
pub mod node;
pub mod peers;
mod rebuild;
pub mod space;
pub mod store;
#[cfg(test)]
mod testing;
pub mod void;
pub mod walk;
mod words;
pub mod worker;

pub use checkpoint::{Checkpoint, Sink, Start};
pub use configuration::{Configuration, KeyHash, Placement, Server, ServerId, ShardId};
pub use control::{Control, ControlConfig};
pub use node::{Endpoints, Node, NodeConfig, NodeError, SharedControl};
pub use store::Store;
pub use void::Void;
pub use worker::{Answer, Role, Worker, WorkerConfig};

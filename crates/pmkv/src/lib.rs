//! Rowan-KV: a sharded, log-structured key-value store in persistent memory (rowan §4–5). A
//! server's worker appends to its own log, writes to every backup's log by any of the protocols of
//! `replication`, and answers when all have it. With the one-sided ones over shared memory a
//! backup's program takes no part in that; over `rpc`, and over libfabric's software providers, it
//! does.
//!
//! ```text
//!   Configuration  who serves which shard, and where keys belong         configuration.rs
//!   Entry          how objects stand in logs                              entry.rs
//!   Index          where a shard's objects lie, in DRAM                   index/
//!   Heap           entries by address, live bytes per segment             heap.rs
//!   Store          what a server's threads share                          store.rs, space.rs, walk.rs
//!   DiscardedCopy  copies of shards that do not count                      discarded_copy.rs
//!   Log            a log of the server's own                              log.rs
//!   Worker         requests: append, replicate, publish, answer           worker/
//!   Checkpoint     the indexes in a file, for a faster start               checkpoint.rs
//!   Restored       an index from what lies in memory                       rebuild.rs
//!   Control        the segment table, digestion, cleaning, cold start     control.rs, clean.rs
//!   Node           a server: all of it, over configurations          node/
//!   Message        what servers tell each other                           message.rs, peers.rs
//! ```
//!
//! Time and seeds are passed in; no part has a thread, a socket or its own clock.

#![forbid(unsafe_code)]

pub mod checkpoint;
mod clean;
pub mod configuration;
pub mod control;
#[cfg(test)]
mod damage_tests;
mod digest;
pub mod discarded_copy;
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
pub mod walk;
mod words;
pub mod worker;

pub use checkpoint::{Checkpoint, Sink, Start};
pub use configuration::{Configuration, KeyHash, Placement, Server, ServerId, ShardId};
pub use control::{Control, ControlConfig};
pub use discarded_copy::DiscardedCopy;
pub use node::{Endpoints, Node, NodeConfig, NodeError, SharedControl};
pub use store::Store;
pub use worker::{Answer, Role, Worker, WorkerConfig};

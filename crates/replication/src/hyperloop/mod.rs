//! HyperLoop as a replication protocol: a worker's log goes to its backups as one chain, hop by
//! hop, without their CPUs.
//!
//! ```text
//!   HyperloopSender   a worker: one chain per set of backups              sender.rs
//!   Set               a chain's segment, its records under way            set.rs
//!   scan              the records in a backup's memory                    scan.rs
//! ```
//!
//! A chain writes the same bytes at the same place of every member. So a *chain segment* is one
//! segment at each backup of the set, all written by one worker alone, and a record is a gWRITE
//! behind the last one and a gFLUSH; it is durable at all once the last member answers. A set's
//! chain goes through its backups in order of their ids, and is opened with its first record.
//!
//! ```text
//!   segment at each backup:
//!   | mark (64 B): a block under this backup's own seed | block | block | …      under the chain's seed
//!   0                                                   64
//!   mark's payload: the chain's seed u64
//! ```
//!
//! **Seeds and names.** Blocks (`frame`) carry a checksum seeded with a number that belongs to one
//! allocation of one segment. The members' allocations differ and the bytes must not, so the chain
//! takes the first member's seed, and a *mark*, written to each member before the chain is opened
//! and durable there, tells it under the member's own seed: a segment without its mark holds no
//! record. The mark's name has the stream that this member gave the worker; blocks leave theirs 0,
//! and a scan puts the member's in. Counters are the worker's, across its chains, so names stay
//! unique in every memory.

pub mod scan;
pub mod sender;
mod set;

pub use scan::{scan_blocks_of, scan_segment};
pub use sender::HyperloopSender;

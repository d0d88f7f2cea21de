//! One-sided operations on other machines' memory: write, read, flush, atomics, append, chains.
//!
//! ```text
//!   Endpoint      one participant: its memory, its connections, its events        endpoint.rs
//!   MemoryKey     what a peer needs to name registered memory                     key.rs
//!   Operation     what an initiator asks for                                      operation.rs
//!   Event         what came of it                                                 event.rs
//!   Capabilities  what a provider promises, and what it costs the target          capabilities.rs
//!   shm           other processes' regions on one machine                         shm/
//!   ofi           NICs and sockets through libfabric (feature `libfabric`)        ofi/
//!   sim           a whole network in one process, from a seed                     sim/
//! ```
//!
//! An operation is *complete* when its effect is in the target's memory; it is *durable* only after
//! a flush of the same connection that was posted later has completed. Operations of one connection
//! take effect in the order in which they were posted only where the provider declares it
//! ([`Capabilities::write_order`]). A failed operation breaks its connection: everything posted
//! behind it fails too, and the first failure names the operation.
//!
//! Knows no records and no protocols; those stand above, in `replication`.

pub mod capabilities;
pub mod endpoint;
pub mod event;
pub mod key;
#[cfg(feature = "libfabric")]
pub mod ofi;
pub mod operation;
pub mod shm;
pub mod sim;

pub use capabilities::{AppendBy, Capabilities, ChainBy, FlushBy, WriteOrder};
pub use endpoint::{AppendSpec, Endpoint, FabricError};
pub use event::{Event, Failure, FailureKind};
pub use key::{Access, Address, AppendKey, MemoryKey, Token};
pub use operation::{ChainId, ChainOperation, ChainShape, ConnectionId, Operation};

//! Group memory: one range of bytes kept alike at every member, changed by operations that travel
//! from member to member without the members' programs (HyperLoop).
//!
//! ```text
//!   GroupMemory    the face: gWRITE, gCAS, gMEMCPY, gFLUSH, and reading one member    operation.rs
//!   Group          over the fabric's chains                                           chain.rs
//!   GroupMember    the keeping side: registers memory per tenant, fences clients      member.rs
//!   Io             operations as futures, in order, with a bounded queue              io.rs
//!   Layout         what lies where in a group's memory                                layout.rs
//!   lock           shared and exclusive locks by gCAS                                 lock.rs
//!   RedoLog        append, execute and advance                                        log.rs, record.rs
//!   Client         transactions: locks, redo records, reads                           client.rs
//!   recovery       after a crash of a client or of members                            recovery.rs
//! ```
//!
//! Everything above `Group` is plain `async` code without a runtime, a clock or threads: a caller
//! polls the futures itself or uses [`block_on`]. To drop a future in mid-air is to crash a client
//! there. `naive` has a second `GroupMemory`, whose members' programs do the work.
//!
//! **Invariants.**
//! - A redo record names every byte its transaction changes; it is in all members' logs before any
//!   is executed.
//! - Bytes are changed only under an exclusive lock, which is held at all members until the record
//!   that changed them is executed, durable and passed by the log's head at all members. So the
//!   records of different clients that a recovery finds never touch the same bytes, and any order
//!   of replaying the logs is right.
//! - Space of a log is written again only once its head has passed it, durably, at all members.
//! - There is no tail word: a record's checksum says whether it is there. It is seeded with a
//!   number that no author of payloads knows, and covers position and epoch, so that recycled bytes
//!   and payloads that imitate records fail.

pub mod chain;
pub mod client;
pub mod io;
pub mod layout;
pub mod lock;
pub mod log;
pub mod member;
pub mod operation;
pub mod record;
pub mod recovery;

pub use chain::{Group, GroupOptions};
pub use client::{Client, ClientOptions, Durability, LogProcessing, Transaction};
pub use io::{Batch, Io, block_on, drive};
pub use layout::{Layout, LayoutSpec};
pub use lock::{LockMode, LockWord};
pub use log::RedoLog;
pub use member::GroupMember;
pub use operation::{Answer, GroupError, GroupEvent, GroupMemory, GroupOp};
pub use record::Update;
pub use recovery::{Recovered, recover_all, recover_client};

#[cfg(test)]
mod fuzz_tests;
#[cfg(test)]
mod history;
#[cfg(test)]
pub(crate) mod model_tests;
#[cfg(test)]
mod serial_tests;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod transaction_tests;

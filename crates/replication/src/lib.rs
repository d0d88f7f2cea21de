//! Replicating a log of records to backups' memory, one-sidedly and by the baselines that is
//! measured against.
//!
//! ```text
//!   Protocol, Sender, Backup   the one face of all protocols                      protocol.rs
//!   BackupMemory               a backup's memory: segments and their table        memory/
//!   frame, assemble            how records stand in segments                      frame.rs, assemble.rs
//!   scan                       the records in a memory                            scan.rs
//!   ToBackup, ToSender         control messages                                   control.rs
//!   sender, backup             one of any protocol                                build.rs
//!   LogSender, Log             what senders share, and a protocol's part          links/, records.rs
//!   LogBackup, Keeper          what backups share, and a protocol's part          sessions.rs, outbox.rs, grants.rs, stuck.rs
//!                              the baselines                       rpc.rs, rwrite.rs, batch.rs, share.rs, faa.rs
//!   rowan, tailwind, hyperloop one-sided protocols                rowan/, tailwind/, hyperloop/
//!   group                      a library: memory kept alike at all members        group/
//!   naive                      the same by messages, to compare with                naive/
//! ```

#![forbid(unsafe_code)]

pub mod assemble;
pub mod batch;
pub mod build;
pub mod control;
mod faa;
pub mod frame;
mod grants;
pub mod group;
pub mod hyperloop;
mod links;
pub mod memory;
pub mod naive;
mod outbox;
pub mod protocol;
mod records;
pub mod rowan;
mod rpc;
mod rwrite;
pub mod scan;
mod sessions;
mod share;
mod stuck;
pub mod tailwind;

pub use assemble::Assembler;
pub use build::{BackupConfig, SenderConfig, backup, sender};
pub use memory::{BackupMemory, Content, Entry, FormatOptions, Owner, SegmentState};
pub use protocol::{
    Backup, BackupId, BackupStats, Outcome, Protocol, ReplicationError, Sender, SenderId,
    UsedSegment,
};
pub use scan::{FoundRecord, ScannedRecord, scan, scan_records, scan_segment};
pub use share::SharedLogs;

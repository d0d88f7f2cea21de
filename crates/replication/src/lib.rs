//! Replicating a log of records to backups' memory, one-sidedly and by the baselines that is measured against.
//!
//! ```text
//!   Protocol, Sender, Backup   the one face of all protocols                      protocol.rs
//! ```

pub mod protocol;

pub use protocol::{
    Backup, BackupId, BackupStats, Outcome, Protocol, ReplicationError, Sender, SenderId,
    UsedSegment,
};

//! Tailwind: one-sided writes into a buffer at each backup, and a chained checksum behind every
//! record that alone says what is whole (tailwind-slides).
//!
//! ```text
//!   chain      the checksums, and how a buffer's end is found                 chain.rs
//!   sender     writes, flushes, fills buffers, replaces lost backups          sender.rs, slot.rs
//!   backup     grants buffers, closes and archives them                       backup.rs
//!   archive    closed buffers on durable storage                              archive.rs
//!   scan       the records of a memory or of one buffer                       scan.rs
//! ```
//!
//! Opening: `Open`, `Opened`, then `Want`, answered by a `Segment` as soon as one is free: the
//! buffer. A full buffer is closed by `Done`, or by the end of its connection; the backup revokes
//! its key, archives it if the sender asked for that, and hands it over.
//!
//! A buffer's records become durable in order: a flush follows the writes on the same connection
//! and covers all before it. So whatever was acknowledged lies before the first record that is not
//! whole. Where the provider does not keep a connection's order, the sender waits for each write,
//! and each flush.
//!
//! Buffers are not zeroed: the chain is seeded with the buffer's epoch.

pub mod archive;
pub mod backup;
pub mod chain;
pub mod scan;
pub mod sender;
mod slot;

pub use archive::{Archive, ArchiveError, ArchivedBuffer};
pub use backup::{ArchiveConfig, TailwindBackup, TailwindBackupConfig};
pub use chain::{BufferScan, Found, scan_buffer};
pub use scan::{TailwindScan, scan, scan_segment};
pub use sender::{Placement, TailwindSender, TailwindSenderConfig};

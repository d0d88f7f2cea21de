//! Rowan: many senders append to one receiver, whose side gives the addresses in order of arrival
//! (rowan §3).
//!
//! ```text
//!   sender     cuts records into blocks, appends them to every backup's queue      sender.rs, peer.rs
//!   backup     the control thread: posts segments ahead, finds used ones           backup.rs, queue.rs
//!   detect     which segments are used, for NICs that do not tell                  detect.rs
//! ```
//!
//! A log is opened by `Open`, answered by `Opened` with the stream and by one `Segment` that names
//! the queue: its number as the epoch, its append key, its seed.
//!
//! No record waits for the backup's CPU. What its control thread does, in batches: a segment goes
//! from free to posted (its first line zeroed durably, its entry durable with a new epoch, then
//! given to the provider), to used (no append will touch it; handed over for digestion), and after
//! its release back to free. When the queue has had every segment, there is another queue, with
//! another seed; the senders are notified, go on there, and report when they have nothing in flight
//! at the old one.
//!
//! Fencing closes the queue and opens another, with another token and seed: the fenced server's key
//! is dead, and so are the keys of the living, who open their logs again in the new term. Records
//! say in which term they were sent; digestion drops those of older terms once a backup was
//! promoted.
//!
//! **What tells a record from other bytes.** A sender knows neither the address nor the segment
//! that its bytes will get, so a segment's epoch cannot seed its checksum. What it knows is its
//! queue's seed, handed out when it opens its log: a number that a memory never uses for two queues
//! that received anything, and that no author of payloads knows. The table keeps, beside each
//! segment, the queue that it was posted to. The argument, threat by threat:
//!
//! - *Bytes of a segment's earlier life*: they were sealed with other seeds, which differ in their
//!   lower halves, so a CRC32 tells them apart with certainty. A segment that this very queue has
//!   had before is zeroed, durably, before its entry says that it is in use: while senders are slow
//!   to leave the queue before, and always where the provider does not tell which segments are
//!   used. It is not posted before no append to its earlier life can touch it any more.
//! - *A sender that was paused and wakes after its server was fenced off*: its queue is closed, so
//!   the fabric takes nothing from it, and it knows only the old seed.
//! - *Holes*: a dead sender's append, or lines that a power failure took. The scan goes on at the
//!   next multiple of 64.
//! - *Payloads that imitate blocks*: read only when the block around them is broken, and then they
//!   fail for want of the seed.
//! - *Blocks of two records*: a stream number is given once, a record number once per stream; both
//!   are in every block. A sender that opens its log again gets another stream.
//! - *On NICs that do not tell which segments are used*, an append that lands more than 2 ms late
//!   could land in a segment's next life. It would be a whole record that its sender has given up
//!   or made again, but it could hide another: there the paper's timing is trusted, as the paper
//!   trusts it (`detect`).
//!
//! Records are found again by [`scan`](crate::scan()), like those of the other logs with holes.
//!
//! A record may appear twice: under one name if its sender made a slow write again, under two if
//! its caller appended it again.

pub mod backup;
pub mod detect;
mod peer;
mod queue;
pub mod sender;

pub use backup::{RowanBackup, RowanBackupConfig};
pub use queue::posted_and_empty;
pub use sender::{RowanSender, RowanSenderConfig};

/// Spreads a number over 64 bits; one to one.
pub(crate) fn mix(number: u64) -> u64 {
    let mut mixed = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

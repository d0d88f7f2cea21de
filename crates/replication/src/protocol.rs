//! The one face of all replication protocols: who appends, who keeps, and what a crash leaves.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use cyclone_fabric::{Address, FabricError};
use cyclone_pmem::SharedArea;

use crate::memory::BackupMemory;

/// The protocols, by the names that commands and reports use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Protocol {
    /// The backup's thread receives each record and appends it.
    Rpc,
    /// One-sided writes into one exclusive remote log per worker and backup (rowan §2.4).
    Rwrite,
    /// Like `rwrite`, with records gathered until 256 bytes or 5 µs (rowan §6.1).
    Batch,
    /// Workers of one server share a remote log; addresses come from a local atomic (rowan §6.1).
    Share,
    /// Addresses come from a fetch-add on the backup's tail (rowan §3.2.1).
    Faa,
    /// Appends whose addresses the receiver's side gives, in order of arrival (rowan §3).
    Rowan,
    /// One-sided writes of records that only a chained checksum vouches for (Tailwind).
    Tailwind,
    /// A chain of backups, each hop triggered by the one before (HyperLoop).
    Hyperloop,
}

impl Protocol {
    /// Every protocol, baselines first.
    pub const ALL: [Protocol; 8] = [
        Protocol::Rpc,
        Protocol::Rwrite,
        Protocol::Batch,
        Protocol::Share,
        Protocol::Faa,
        Protocol::Rowan,
        Protocol::Tailwind,
        Protocol::Hyperloop,
    ];

    /// The name on command lines and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Protocol::Rpc => "rpc",
            Protocol::Rwrite => "rwrite",
            Protocol::Batch => "batch",
            Protocol::Share => "share",
            Protocol::Faa => "faa",
            Protocol::Rowan => "rowan",
            Protocol::Tailwind => "tailwind",
            Protocol::Hyperloop => "hyperloop",
        }
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Protocol {
    type Err = String;

    fn from_str(name: &str) -> Result<Protocol, String> {
        Protocol::ALL
            .into_iter()
            .find(|protocol| protocol.name() == name)
            .ok_or_else(|| {
                let known: Vec<_> = Protocol::ALL.iter().map(|known| known.name()).collect();
                format!(
                    "no replication called {name:?}; there are {}",
                    known.join(", ")
                )
            })
    }
}

/// A server of the group that keeps backups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BackupId(pub u32);

/// Who appends: a worker thread of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SenderId {
    /// The server.
    pub server: u32,
    /// The worker on it.
    pub worker: u32,
}

/// The appending side: one per worker, with its own endpoint.
pub trait Sender: Send {
    /// Which protocol this is.
    fn protocol(&self) -> Protocol;

    /// Opens this sender's log at a backup (again, if it was lost); [`Outcome::Opened`] tells when
    /// records may flow.
    fn open(&mut self, backup: BackupId, address: &Address) -> Result<(), ReplicationError>;

    /// Replicates a record to all the backups named. [`Outcome::Durable`] comes when it is durable
    /// on every one of them. `Err(Busy)` is back-pressure: poll, then try again; nothing was done.
    fn append(
        &mut self,
        backups: &[BackupId],
        record: &[u8],
        context: u64,
    ) -> Result<(), ReplicationError>;

    /// Hands the fabric what [`Sender::append`] has gathered; [`Sender::poll`] does so too. For
    /// when nothing more is to be appended now.
    fn post(&mut self) {}

    /// Makes progress and takes outcomes. Never waits. `now_us` never goes back. Who has nothing to
    /// append polls too, at least every 100 ms: a backup gives up a sender that does not answer it.
    fn poll(&mut self, now_us: u64, outcomes: &mut Vec<Outcome>);

    /// Sleeps until `poll` may have something to do, at most `timeout`.
    fn wait(&mut self, timeout: Duration);
}

/// What a sender has to tell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The log at a backup is open.
    Opened {
        /// Which backup.
        backup: BackupId,
    },
    /// A record is durable on all the backups it was meant for.
    Durable {
        /// The caller's context.
        context: u64,
    },
    /// A record may be on some of its backups, or on none: the caller decides, usually with a new
    /// configuration.
    Failed {
        /// The caller's context.
        context: u64,
        /// The first backup that failed.
        backup: BackupId,
        /// Why, for people.
        why: String,
    },
    /// A backup is lost to this sender until it is opened again.
    Lost {
        /// Which backup.
        backup: BackupId,
        /// Why, for people.
        why: String,
    },
}

/// The keeping side: one per server, with its own endpoint. Its thread does what a protocol's
/// control thread does (rowan §4.3); for one-sided protocols nothing of it is in any record's way.
pub trait Backup: Send {
    /// Which protocol this is.
    fn protocol(&self) -> Protocol;

    /// Where senders reach it.
    fn address(&self) -> Address;

    /// Answers control messages, posts segments, finds used ones (and, for `rpc`, appends). Returns
    /// whether there was anything to do. Never waits.
    fn step(&mut self, now_us: u64) -> bool;

    /// Sleeps until `step` may have something to do, at most `timeout`.
    fn wait(&mut self, timeout: Duration);

    /// Takes segments that no sender will write again, for digestion; their records are read with
    /// `scan_segment`.
    fn take_used(&mut self, used: &mut Vec<UsedSegment>);

    /// Gives a digested segment back for reuse.
    fn release(&mut self, segment: u32) -> Result<(), ReplicationError>;

    /// Ends every access of a server and of all terms below `term`: once this returns, nothing that
    /// server still sends takes effect here (rowan §4.5).
    fn fence_off(&mut self, server: u32, term: u32) -> Result<(), ReplicationError>;

    /// The memory that holds the log, for scanning.
    fn memory(&self) -> &SharedArea;

    /// The segment table, which the server's own logs have their segments from too.
    fn table(&self) -> &BackupMemory;

    /// The same, to allocate and to move segments that
    /// [`Owner::is_remote`](crate::Owner::is_remote) says are the server's own, and to commit used
    /// segments of remote owners that were taken. Everything else is the protocol's.
    fn table_mut(&mut self) -> &mut BackupMemory;

    /// What it has done so far.
    fn stats(&self) -> BackupStats;
}

/// A segment handed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UsedSegment {
    /// Its number in the segment table.
    pub segment: u32,
    /// Who wrote it, where a segment has one writer.
    pub owner: Option<SenderId>,
}

/// Plain counters of a backup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BackupStats {
    /// Control messages answered.
    pub control_messages: u64,
    /// Records that the backup's own thread appended (only `rpc`).
    pub records_appended: u64,
    /// Segments posted or handed to senders.
    pub segments_posted: u64,
    /// Segments found used.
    pub segments_used: u64,
    /// Append queues opened (only `rowan`).
    pub queues_opened: u64,
    /// Segments zeroed from end to end (only `rowan`).
    pub segments_zeroed: u64,
}

/// Why a protocol refused a call.
#[derive(Debug, thiserror::Error)]
pub enum ReplicationError {
    /// Too many records are in flight, or a remote log is full: poll, then try again. Nothing was
    /// done.
    #[error("too many records are in flight")]
    Busy,
    /// The backup is not open, or was lost.
    #[error("backup {0:?} is not open")]
    NotOpen(BackupId),
    /// More bytes than a record may have.
    #[error("a record of {len} bytes; the most is {max}")]
    TooLarge {
        /// Bytes given.
        len: usize,
        /// The most a record may have.
        max: usize,
    },
    /// The memory holds no log of this protocol and version, or its table is damaged.
    #[error("the backup's memory: {0}")]
    Damaged(String),
    /// There is no such segment, or it is not in the state that the call needs.
    #[error("segment {segment} is {state}, not {wanted}")]
    Segment {
        /// Its number.
        segment: u32,
        /// What it is.
        state: String,
        /// What it should be.
        wanted: &'static str,
    },
    /// The fabric refused.
    #[error(transparent)]
    Fabric(#[from] FabricError),
}

//! What an endpoint is made of, and its limits.

use std::path::PathBuf;
use std::time::Duration;

use cyclone_pmem::FlushPolicy;

/// What becomes of memory that is there already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// It is zeroed.
    Zeroed,
    /// Its bytes stay ([`ShmEndpoint::kept_memory`](super::ShmEndpoint::kept_memory) says whether
    /// there were any); the length must be the configured one. Memory that does not survive a loss
    /// of power is zeroed all the same, unless the control file of the life before says that the
    /// machine was not started again since.
    Kept,
}

/// What [`revoke`](crate::Endpoint::revoke), [`close_append`](crate::Endpoint::close_append) and a
/// takeover do about a process that is in the middle of an operation and makes no progress for
/// [`ShmConfig::stalled_wait`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stalled {
    /// The call fails and names the process. New operations are refused all the same; the call can
    /// be repeated.
    Report,
    /// The process is killed with SIGKILL, unless it is this one.
    Kill,
}

/// What an endpoint is made of. All limits hold for the life of the endpoint.
#[derive(Clone, Debug)]
pub struct ShmConfig {
    /// Bytes of memory; a multiple of 4096 (of 2 MiB on hugetlbfs and device-DAX).
    pub memory_bytes: u64,
    /// The file or device that holds the memory; `None`: `NAME.mem` in the endpoint's directory.
    pub region: Option<PathBuf>,
    /// What becomes of memory that is there already.
    pub memory: Memory,
    /// A file that says what is in the memory: removed, durably, before a memory begins anew, so
    /// that it is never taken for the description of an empty one.
    pub described_by: Option<PathBuf>,
    /// Whether the endpoint's files go when it is dropped: of use only to the process that opened
    /// it, and under a name that does not come back. What is left by a process that was killed is
    /// for its successor to remove.
    pub leaves_nothing: bool,
    /// How everybody flushes this memory.
    pub flush: FlushPolicy,
    /// Registrations at once.
    pub max_registrations: u32,
    /// Append queues at once; a closed one counts until its place is needed.
    pub max_queues: u32,
    /// Segments posted at once to one queue; at most 65,536.
    pub max_posted: u32,
    /// Connections that peers may have to this endpoint at once; at most 4096.
    pub max_peers: u32,
    /// Connections and chains that this endpoint may have at once, each.
    pub max_connections: u32,
    /// Bytes of the message ring of each direction of each connection; a power of two from 4096 to
    /// 64 MiB. Longer messages travel in pieces.
    pub ring_bytes: u64,
    /// The largest append in bytes.
    pub max_append: usize,
    /// The largest write, read or message in bytes.
    pub max_transfer: usize,
    /// Events that wait to be polled; beyond them operations are refused with `Busy`.
    pub max_events: usize,
    /// How long an append waits for a segment.
    pub no_segment_wait: Duration,
    /// How often processes are looked after while nothing else reports their end.
    pub peer_check: Duration,
    /// How long a process that is in the middle of an operation is waited for by who wants to
    /// revoke.
    pub stalled_wait: Duration,
    /// What then happens to it.
    pub stalled: Stalled,
}

impl ShmConfig {
    /// The defaults, with so many bytes of memory.
    pub fn new(memory_bytes: u64) -> ShmConfig {
        ShmConfig {
            memory_bytes,
            region: None,
            memory: Memory::Zeroed,
            described_by: None,
            leaves_nothing: false,
            flush: FlushPolicy::Auto,
            max_registrations: 256,
            max_queues: 8,
            max_posted: 1024,
            max_peers: 64,
            max_connections: 256,
            ring_bytes: 32 << 10,
            max_append: 64 << 10,
            max_transfer: 16 << 20,
            max_events: 1024,
            no_segment_wait: Duration::from_millis(50),
            peer_check: Duration::from_millis(20),
            stalled_wait: Duration::from_secs(1),
            stalled: Stalled::Report,
        }
    }
}

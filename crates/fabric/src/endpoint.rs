//! One participant: its memory, its connections, its events.

use std::time::Duration;

use cyclone_pmem::SharedArea;

use crate::capabilities::Capabilities;
use crate::event::Event;
use crate::key::{Access, Address, AppendKey, MemoryKey, Token};
use crate::operation::{ChainId, ChainOperation, ChainShape, ConnectionId, Operation};

/// A participant in the fabric. Initiator and target alike: it registers its own memory and
/// operates on others'.
///
/// One thread owns an endpoint and polls it. Contexts are the caller's and come back unchanged.
pub trait Endpoint: Send {
    /// What this endpoint's provider promises.
    fn capabilities(&self) -> &Capabilities;

    /// Where peers reach it.
    fn address(&self) -> Address;

    /// Its own memory, which registrations are parts of.
    fn memory(&self) -> &SharedArea;

    /// Registers `len` bytes of the endpoint's memory from `offset` (a multiple of 64) under a
    /// tenant's token.
    fn register(
        &mut self,
        offset: u64,
        len: u64,
        access: Access,
        token: Token,
    ) -> Result<MemoryKey, FabricError>;

    /// Ends a registration or an append queue's: once this returns, no operation under the key
    /// takes effect, not even one that was in flight (rowan §4.5: a failed server's access ends
    /// before a backup is promoted).
    fn revoke(&mut self, key: &MemoryKey) -> Result<(), FabricError>;

    /// Opens an append queue; senders may use the key once segments are posted.
    fn open_append(&mut self, spec: AppendSpec) -> Result<AppendKey, FabricError>;

    /// Posts segments for appends, in this order: their first 64 bytes are zero. Offsets count from
    /// the first byte of the endpoint's memory.
    fn post_segments(&mut self, queue: &AppendKey, offsets: &[u64]) -> Result<(), FabricError>;

    /// Takes the segments that no append will touch again, in the order in which they were posted.
    fn used_segments(&mut self, queue: &AppendKey, used: &mut Vec<u64>) -> Result<(), FabricError>;

    /// Whether a sender is in the middle of an append, so that closing the queue would wait for it.
    fn has_append_in_flight(&mut self, _queue: &AppendKey) -> bool {
        false
    }

    /// Closes an append queue: once this returns, no append takes effect, and every posted segment
    /// counts as used. Answers how many of those posted last were certainly never touched, as far
    /// as the provider knows.
    fn close_append(&mut self, queue: &AppendKey) -> Result<u64, FabricError>;

    /// Connects to a peer. Authority is in the keys, not in the connection.
    fn connect(&mut self, to: &Address) -> Result<ConnectionId, FabricError>;

    /// Ends a connection; what was posted and has not completed fails.
    fn disconnect(&mut self, connection: ConnectionId);

    /// Posts an operation. `Err(Busy)` is back-pressure: poll and try again; nothing was done.
    /// `Err(Unknown)`: the connection has ended, maybe very recently and with its events not yet
    /// polled. What goes wrong with a posted operation comes as [`Event::Failed`].
    fn post(
        &mut self,
        connection: ConnectionId,
        operation: Operation<'_>,
        context: u64,
    ) -> Result<(), FabricError>;

    /// Posts appends to one queue, each with its context, as [`Endpoint::post`] would one after the
    /// other; together they may cost less. Answers how many were taken: fewer than all is
    /// back-pressure.
    fn post_appends(
        &mut self,
        connection: ConnectionId,
        queue: &AppendKey,
        appends: &[(&[u8], u64)],
    ) -> Result<usize, FabricError> {
        for (taken, &(bytes, context)) in appends.iter().enumerate() {
            match self.post(connection, Operation::Append { queue, bytes }, context) {
                Ok(()) => {}
                Err(FabricError::Busy) => return Ok(taken),
                // The next call will tell.
                Err(_) if taken > 0 => return Ok(taken),
                Err(error) => return Err(error),
            }
        }
        Ok(appends.len())
    }

    /// Opens a chain over connected peers' registrations, all of one length, first hop first.
    fn open_chain(
        &mut self,
        shape: ChainShape,
        members: &[(ConnectionId, MemoryKey)],
    ) -> Result<ChainId, FabricError>;

    /// Ends a chain: its name is not used again, and its operations in flight may or may not take
    /// effect, and are not reported. The connections stay. Providers that keep nothing per chain
    /// need not do anything.
    fn close_chain(&mut self, _chain: ChainId) {}

    /// Posts a chain operation; operations of one chain take effect at each member in order of
    /// posting.
    fn post_chain(
        &mut self,
        chain: ChainId,
        operation: ChainOperation<'_>,
        context: u64,
    ) -> Result<(), FabricError>;

    /// Makes progress and takes events; answers how many were added. Never waits.
    fn poll(&mut self, events: &mut Vec<Event>) -> usize;

    /// Sleeps until `poll` may have something to do, at most `timeout`.
    fn wait(&mut self, timeout: Duration);
}

/// An append queue to open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AppendSpec {
    /// Bytes per segment (4 MiB in rowan §3); a multiple of 64.
    pub segment_bytes: u64,
    /// The most segments posted at once (512 in rowan §3).
    pub max_posted: u32,
    /// The tenant's secret.
    pub token: Token,
}

/// Why the fabric refused a call.
#[derive(Debug, thiserror::Error)]
pub enum FabricError {
    /// Too many operations are in flight: poll, then try again. Nothing was done.
    #[error("too many operations are in flight")]
    Busy,
    /// There is no such connection, chain, registration or queue, or no longer.
    #[error("no {0} of that name, or no longer")]
    Unknown(&'static str),
    /// A range is outside the endpoint's memory or badly aligned.
    #[error(
        "{offset}+{len} is no range of {memory} bytes of memory, or does not begin on a multiple of 64"
    )]
    OutOfBounds {
        /// First byte.
        offset: u64,
        /// Number of bytes.
        len: u64,
        /// Bytes there are.
        memory: u64,
    },
    /// More bytes than the provider takes at once.
    #[error("{len} bytes at once; this provider takes {max}")]
    TooLarge {
        /// Bytes given.
        len: usize,
        /// The most it takes.
        max: usize,
    },
    /// The provider cannot do this.
    #[error("{provider} cannot {what}")]
    Unsupported {
        /// The provider's name.
        provider: String,
        /// What was asked.
        what: &'static str,
    },
    /// An address that this provider does not understand.
    #[error("not an address of this provider: {0:?}")]
    BadAddress(Address),
    /// A limit that was set at creation is reached.
    #[error("no room for another {what}: the limit is {limit}")]
    Limit {
        /// Of what.
        what: &'static str,
        /// How many there may be.
        limit: u64,
    },
    /// The system refused a call.
    #[error("{what}")]
    System {
        /// What was tried.
        what: String,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// The provider's library refused a call.
    #[error("{call}: {message}")]
    Provider {
        /// The function.
        call: &'static str,
        /// What the library said.
        message: String,
    },
}

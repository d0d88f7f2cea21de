//! What an initiator asks for.

use crate::key::{AppendKey, MemoryKey};

/// A connection of this endpoint; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnectionId(pub u64);

/// A chain opened by this endpoint; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChainId(pub u64);

/// One operation on the memory behind a connection. Bytes are copied or sent before `post` returns.
#[derive(Clone, Copy, Debug)]
pub enum Operation<'a> {
    /// Stores bytes.
    Write {
        /// Whose memory.
        key: &'a MemoryKey,
        /// First byte.
        offset: u64,
        /// What to store.
        bytes: &'a [u8],
    },
    /// Fetches bytes; they arrive in [`Event::Completed`](crate::Event::Completed).
    Read {
        /// Whose memory.
        key: &'a MemoryKey,
        /// First byte.
        offset: u64,
        /// How many.
        len: u64,
    },
    /// Makes what this connection wrote or appended before durable. The range is what the caller
    /// needs: a provider may make more durable.
    Flush {
        /// Whose memory.
        key: &'a MemoryKey,
        /// First byte.
        offset: u64,
        /// How many.
        len: u64,
    },
    /// Exchanges an aligned 8-byte word if it holds `old`; the word before is the completion's
    /// value.
    CompareSwap {
        /// Whose memory.
        key: &'a MemoryKey,
        /// The word's first byte; a multiple of 8.
        offset: u64,
        /// What it must hold.
        old: u64,
        /// What it shall hold.
        new: u64,
    },
    /// Adds to an aligned 8-byte word, wrapping; the word before is the completion's value.
    FetchAdd {
        /// Whose memory.
        key: &'a MemoryKey,
        /// The word's first byte; a multiple of 8.
        offset: u64,
        /// What to add.
        value: u64,
    },
    /// Stores bytes at the queue's tail, at an address of the receiver's choosing, and makes them
    /// durable. Each append begins on a multiple of 64 bytes; the sender pads. The completion means
    /// durable, and carries no address.
    Append {
        /// Whose queue.
        queue: &'a AppendKey,
        /// What to store; at most [`Capabilities::max_append`](crate::Capabilities::max_append)
        /// bytes.
        bytes: &'a [u8],
    },
    /// A message to the peer's program: the two-sided operation that remote procedure calls are
    /// made of. Complete when the peer's provider holds it.
    Send {
        /// What to send.
        bytes: &'a [u8],
    },
}

/// How a chain's operation reaches its members.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChainShape {
    /// From each member to the next; the last one's completion is the operation's.
    Chain,
    /// From the initiator to all at once; complete when all are.
    FanOut,
}

/// One operation on group memory: the same range of every member's registration (HyperLoop §4).
#[derive(Clone, Copy, Debug)]
pub enum ChainOperation<'a> {
    /// gWRITE: stores bytes at every member.
    Write {
        /// First byte.
        offset: u64,
        /// What to store.
        bytes: &'a [u8],
    },
    /// gCAS: exchanges a word at the members whose bit in `execute` is set (bit 0 is the first
    /// member). The results' words are what each of them held before; members left out answer 0.
    CompareSwap {
        /// The word's first byte; a multiple of 8.
        offset: u64,
        /// What it must hold.
        old: u64,
        /// What it shall hold.
        new: u64,
        /// Which members.
        execute: u64,
    },
    /// gMEMCPY: copies within each member's memory. The ranges must not overlap.
    Copy {
        /// First byte of the source.
        from: u64,
        /// First byte of the destination.
        to: u64,
        /// How many.
        len: u64,
    },
    /// gFLUSH: makes what precedes on this chain durable at every member.
    Flush,
}

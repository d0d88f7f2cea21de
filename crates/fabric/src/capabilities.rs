//! What a provider promises, and what it costs the target.

/// What an endpoint's provider can do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// The provider's name, as commands and reports print it: `shm`, `libfabric/tcp`, `sim`.
    pub provider: String,
    /// Order of effects within one connection.
    pub write_order: WriteOrder,
    /// Who makes bytes durable when an initiator asks for a flush.
    pub flush: FlushBy,
    /// Whether compare-swap and fetch-add work.
    pub atomics: bool,
    /// Who gives appended bytes their address; `None` where append does not work.
    pub append: Option<AppendBy>,
    /// Who carries a chain's operation from hop to hop.
    pub chain: ChainBy,
    /// Whether the target's program must call [`Endpoint::poll`](crate::Endpoint::poll) for
    /// one-sided operations to make progress. Its CPU time is then part of the price.
    pub target_polls: bool,
    /// The largest append in bytes (the MTU for NICs). Larger records are cut by the protocol.
    pub max_append: usize,
    /// The largest write, read or message in bytes.
    pub max_transfer: usize,
}

/// Order of effects within one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteOrder {
    /// As posted, and bytes of one write in order of address.
    Posted,
    /// None: a protocol that needs order waits for each completion.
    None,
}

/// Who makes bytes durable when an initiator asks for a flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlushBy {
    /// The initiator or the hardware.
    Initiator,
    /// The target's CPU: its provider thread or its calls to `poll`.
    Target,
}

/// Who gives appended bytes their address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AppendBy {
    /// The initiator, by an atomic on the target's tail, under a reservation that others see.
    Reservation,
    /// The target's NIC or provider, by buffers posted ahead.
    PostedBuffers,
}

/// Who carries a chain's operation from hop to hop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChainBy {
    /// The initiator does every hop's work itself (memory shared by all).
    Initiator,
    /// The hop's NIC or provider, triggered by the previous hop's arrival.
    Trigger,
    /// A thread of the hop's program: its CPU time is part of the price.
    ProgressThread,
}

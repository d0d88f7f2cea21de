//! The numbers under which a node's ports are known to others: its own, and one for each of its
//! logs that has its own loop.
//!
//! An association names both ends by such numbers, so that a port is not taken for another one of
//! the same node.

/// The number of a node's port: door 0 is the node's own, door `log + 1` a log's.
pub fn port_of(node: u64, door: u16) -> u64 {
    node | u64::from(door) << 32
}

/// The node of a port.
pub fn node_of(port: u64) -> u64 {
    port & 0xffff_ffff
}

//! The configuration of a port.

use super::Identity;
use crate::auth::{Keys, Security};
use crate::fragment::Limits;

/// A port's settings.
#[derive(Debug, Clone)]
pub struct PortConfig {
    /// Who this port is.
    pub identity: Identity,
    /// The cluster's keys.
    pub keys: Keys,
    /// The cluster's id: nodes of other clusters are refused, also with the same key. Clients have
    /// none: 0.
    pub cluster: u128,
    /// What is done to payloads; all sides alike.
    pub security: Security,
    /// Largest message sent or received, bytes.
    pub max_message: usize,
    /// Fresh random bytes at every start; all keys and nonces come from them.
    pub boot: [u8; 16],
    /// Client associations kept; the least recently used goes first.
    pub max_clients: usize,
    /// A client association unused for this long is forgotten, µs (at least 4 s).
    pub client_idle_us: u64,
    /// Messages queued per node while a handshake runs.
    pub queue_messages: usize,
    /// Their bytes; one message is queued whatever its size.
    pub queue_bytes: usize,
    /// Bounds of partly received messages; `None`: four largest messages, at least 16 MiB.
    pub reassembly: Option<Limits>,
}

impl PortConfig {
    /// Defaults: authenticated, messages up to 2 MiB, 4096 clients, forgotten after five minutes.
    pub fn new(identity: Identity, keys: Keys, boot: [u8; 16]) -> PortConfig {
        PortConfig {
            identity,
            keys,
            cluster: 0,
            security: Security::Authenticated,
            max_message: 2 << 20,
            boot,
            max_clients: 4096,
            client_idle_us: 300_000_000,
            queue_messages: 64,
            queue_bytes: 256 << 10,
            reassembly: None,
        }
    }
}

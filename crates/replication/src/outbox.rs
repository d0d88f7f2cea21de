//! Messages that wait for the fabric: in order per connection, and none in the way of another
//! connection's.

use std::collections::{BTreeMap, VecDeque};

use cyclone_fabric::{ConnectionId, Endpoint, FabricError, Operation};

/// The context of messages.
pub(crate) const CONTROL: u64 = u64::MAX;

/// The most messages that wait on one connection.
const MAX_WAITING: usize = 64;

/// Messages by connection.
#[derive(Default)]
pub(crate) struct Outbox(BTreeMap<ConnectionId, VecDeque<Vec<u8>>>);

impl Outbox {
    /// Queues a message. `false` when too many wait: who asks and does not listen is to be given
    /// up.
    #[must_use]
    pub fn push(&mut self, connection: ConnectionId, bytes: Vec<u8>) -> bool {
        let waiting = self.0.entry(connection).or_default();
        if waiting.len() >= MAX_WAITING {
            return false;
        }
        waiting.push_back(bytes);
        true
    }

    /// Whether something waits on this connection.
    pub fn has(&self, connection: ConnectionId) -> bool {
        self.0.contains_key(&connection)
    }

    /// Drops what waits for a connection that is gone.
    pub fn forget(&mut self, connection: ConnectionId) {
        self.0.remove(&connection);
    }

    /// Sends what the fabric takes.
    pub fn send(&mut self, endpoint: &mut dyn Endpoint) {
        self.0.retain(|&connection, waiting| {
            while let Some(bytes) = waiting.front() {
                match endpoint.post(connection, Operation::Send { bytes }, CONTROL) {
                    Ok(()) => waiting.pop_front(),
                    Err(FabricError::Busy) => return true,
                    // A connection that is gone needs none.
                    Err(_) => return false,
                };
            }
            false
        });
    }
}

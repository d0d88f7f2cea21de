//! Closing the connections that hold most, when all together hold too much.

use super::Gateway;
use crate::connection::Connection;
use crate::memory::{Direction, Eviction, HeldBytes};

impl Gateway {
    /// What all connections hold together.
    pub fn held(&self) -> HeldBytes {
        self.shared.totals.held()
    }

    /// The next connection that was closed because all together held too much, for the operator's
    /// log. Of many in a short time some are only counted.
    pub fn next_eviction(&mut self) -> Option<Eviction> {
        self.shared.totals.next_eviction()
    }

    /// Brings the sums up to date with a connection.
    pub(crate) fn recount(&mut self, connection: &mut Connection) {
        let now = connection.held();
        self.shared.totals.recount(&mut connection.counted, now);
    }

    /// Whether a connection has to wait until others hold less.
    pub(crate) fn must_wait_for_memory(&self, connection: &Connection) -> bool {
        self.shared.totals.excess(&self.shared.config).is_some()
            && !connection.counted.is_below_minimum()
    }

    /// Closes those that hold most until the rest are within the limits.
    pub(super) fn evict(&mut self) {
        while let Some((direction, limit)) = self.shared.totals.excess(&self.shared.config) {
            let mut holders: Vec<(usize, u32)> = self
                .slab
                .iter()
                .map(|one| (one.counted.of(direction), one.session.index))
                .filter(|(held, _)| *held > 0)
                .collect();
            // One pass over all connections serves for as many evictions as are needed.
            holders.sort_unstable();
            while self.shared.totals.held().of(direction) > limit
                && let Some((held, index)) = holders.pop()
                && let Some(connection) = self.slab.take(index)
            {
                self.close_evicted(connection, direction, held, limit);
            }
            if self.shared.totals.held().of(direction) > limit {
                // What is counted is counted for somebody.
                debug_assert!(false, "{:?} without a holder", self.held());
                return;
            }
        }
    }

    fn close_evicted(
        &mut self,
        connection: Box<Connection>,
        direction: Direction,
        held: usize,
        limit: usize,
    ) {
        self.shared.stats.evicted += 1;
        self.shared.totals.note(Eviction {
            client: connection.session.id,
            peer: connection.session.peer,
            direction,
            held,
            total: self.shared.totals.held().of(direction),
            limit,
        });
        self.close(connection);
    }
}

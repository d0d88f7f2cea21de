//! What the connections hold together. Each has separate bounds, far above what most need at a
//! time; all of them at these bounds would be more than a machine has.

use std::collections::VecDeque;
use std::fmt;
use std::net::SocketAddr;

use crate::config::GatewayConfig;

/// A connection that holds no more is read whatever the others hold.
pub(crate) const MIN_HELD_BYTES: usize = 16 * 1024;
/// Evictions told of at most; further ones are only counted.
const MAX_REPORTED_EVICTIONS: usize = 64;

/// Bytes of memory, of one connection or of all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeldBytes {
    /// Requests that have not been executed: partial ones, those that wait or are in progress,
    /// transactions, watched keys.
    pub input_bytes: usize,
    /// Replies that have not been sent, in full until all of one has been encoded, and what is
    /// known of those to come.
    pub output_bytes: usize,
}

/// What a connection held too much of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Requests.
    Input,
    /// Replies.
    Output,
}

impl HeldBytes {
    /// How much there is of one kind.
    pub fn of(&self, direction: Direction) -> usize {
        match direction {
            Direction::Input => self.input_bytes,
            Direction::Output => self.output_bytes,
        }
    }

    /// Whether it is too little to matter.
    pub(crate) fn is_below_minimum(&self) -> bool {
        self.input_bytes + self.output_bytes <= MIN_HELD_BYTES
    }
}

/// A connection that was closed because all together held too much, and it the most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Eviction {
    /// Its number, as in CLIENT LIST.
    pub client: u64,
    /// Whose it was.
    pub peer: SocketAddr,
    /// What of.
    pub direction: Direction,
    /// Bytes that it held.
    pub held: usize,
    /// Bytes that all together held.
    pub total: usize,
    /// Bytes that they may hold.
    pub limit: usize,
}

impl fmt::Display for Eviction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.direction {
            Direction::Input => "requests not executed",
            Direction::Output => "replies not taken",
        };
        write!(
            f,
            "client {} of {} was closed: all connections held {} bytes of {what}, more than {}, and it held the most, {}",
            self.client, self.peer, self.total, self.limit, self.held
        )
    }
}

/// The sums over all connections.
#[derive(Debug, Default)]
pub(crate) struct Totals {
    held: HeldBytes,
    evictions: VecDeque<Eviction>,
}

impl Totals {
    /// Notes what a connection holds now instead of what was counted for it before.
    pub(crate) fn recount(&mut self, counted: &mut HeldBytes, now: HeldBytes) {
        self.held.input_bytes = self.held.input_bytes - counted.input_bytes + now.input_bytes;
        self.held.output_bytes = self.held.output_bytes - counted.output_bytes + now.output_bytes;
        *counted = now;
    }

    pub(crate) fn held(&self) -> HeldBytes {
        self.held
    }

    /// What there is too much of, and how much there may be.
    pub(crate) fn excess(&self, config: &GatewayConfig) -> Option<(Direction, usize)> {
        if self.held.input_bytes > config.total_input_bytes {
            Some((Direction::Input, config.total_input_bytes))
        } else if self.held.output_bytes > config.total_output_bytes {
            Some((Direction::Output, config.total_output_bytes))
        } else {
            None
        }
    }

    pub(crate) fn note(&mut self, eviction: Eviction) {
        if self.evictions.len() < MAX_REPORTED_EVICTIONS {
            self.evictions.push_back(eviction);
        }
    }

    pub(crate) fn next_eviction(&mut self) -> Option<Eviction> {
        self.evictions.pop_front()
    }
}

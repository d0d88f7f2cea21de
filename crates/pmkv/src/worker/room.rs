//! Requests that wait until the log has a segment with room for them: the control thread gives
//! segments, and may be slightly behind where memory is not full at all. Nothing overtakes them.

use std::collections::VecDeque;

use cyclone_wire::command::Operation;

use super::requests::Parked;
use super::{Answer, Worker};

/// So long a request waits for room before it is refused, in microseconds.
pub(super) const ROOM_PATIENCE_US: u64 = 1_000_000;

/// Requests that wait for room, in order.
#[derive(Default)]
pub(super) struct WaitingForSegment {
    /// With the time at which each began to wait.
    requests: VecDeque<(Parked, u64)>,
    /// Since when the request has waited that is tried again now.
    tried: Option<u64>,
}

impl WaitingForSegment {
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Whether what comes now has others before it.
    pub fn is_queue(&self) -> bool {
        self.tried.is_none() && !self.requests.is_empty()
    }
}

impl Worker {
    /// There is no room, or others wait for it.
    pub(super) fn wait_for_room(&mut self, ticket: u64, operations: &[Operation<'_>]) {
        let since_us = self.roomless.tried.unwrap_or(self.now_us);
        if self.now_us.saturating_sub(since_us) > ROOM_PATIENCE_US {
            self.stats.refused_full += 1;
            return self.answers.push((ticket, Answer::Full));
        }
        let request = (Parked::new(ticket, operations), since_us);
        match self.roomless.tried {
            Some(_) => self.roomless.requests.push_front(request),
            None => self.roomless.requests.push_back(request),
        }
    }

    /// Requests that waited for room go, as far as there is some.
    pub(super) fn use_room(&mut self) {
        while let Some((request, since_us)) = self.roomless.requests.pop_front() {
            let others = self.roomless.len();
            self.roomless.tried = Some(since_us);
            self.arrive(request);
            self.roomless.tried = None;
            if self.roomless.len() > others {
                break;
            }
        }
    }
}

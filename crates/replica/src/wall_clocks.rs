//! What a node does about wall clocks: it reports its own when that is off, and sets the state's
//! clock for an operator (docs/adr/0079).

use crate::node::Node;
use crate::requests::{Origin, Outcome, Ticket};

/// A wall clock that differs from a majority's by more is reported.
const OFF_MS: u64 = 5_000;
/// Not more often than this while it stays so.
const REPORT_EVERY_US: u64 = 60_000_000;

/// What was reported of this machine's wall clock.
#[derive(Default)]
pub(crate) struct ClockReports {
    is_off: bool,
    next_us: u64,
}

impl Node {
    /// This machine's wall clock less the time that a majority of the voters' clocks agree on, in
    /// milliseconds; `None`: that is not known at present.
    pub fn clock_offset_ms(&self) -> Option<i64> {
        self.logs[0].clock.offset_ms()
    }

    /// What this replica would stamp a log's next entry with, in milliseconds since 1970.
    pub fn log_time_ms(&self, log: usize) -> u64 {
        self.logs[log].clock.last_ms()
    }

    /// The state's clock of a log less this machine's wall clock, in milliseconds. Where nothing is
    /// written the state's clock stands still.
    pub fn state_clock_offset_ms(&self, log: usize) -> i64 {
        self.store.clock_ms(log as u16) as i64 - self.now.wall_ms as i64
    }

    /// Reports a wall clock that is off, and its end.
    pub(crate) fn report_clock(&mut self) {
        let Some(offset_ms) = self.clock_offset_ms() else {
            return;
        };
        let (is_off, now_us) = (offset_ms.unsigned_abs() > OFF_MS, self.now.steady_us);
        let was_off = std::mem::replace(&mut self.clock_reports.is_off, is_off);
        if is_off && (!was_off || now_us >= self.clock_reports.next_us) {
            self.clock_reports.next_us = now_us + REPORT_EVERY_US;
            tracing::warn!(
                offset_ms,
                "this machine's wall clock differs from the time that a majority of the voters' clocks agree on: keys \
                 expire by the majority's; check NTP here"
            );
        } else if was_off && !is_off {
            tracing::info!(
                offset_ms,
                "this machine's wall clock agrees with the majority's again"
            );
        }
    }

    /// Sets the state's clock of every log to the time that a majority of the voters' wall clocks
    /// agree on, also back. The outcome comes back under `ticket` when the last log has it.
    pub fn reset_clock(&mut self, ticket: Ticket) {
        let origin = Origin::Local(ticket);
        let agreed_ms = self.logs.iter().map(|log| log.clock.agreed_ms()).min();
        let refusal = match (self.check_leadership(), agreed_ms.flatten()) {
            (Err(outcome), _) => outcome,
            // Too few voters have been heard.
            (Ok(()), None) => Outcome::Busy,
            (Ok(()), Some(time_ms)) if self.logs.iter().all(|log| log.has_room()) => {
                return self.set_clocks(time_ms, origin);
            }
            (Ok(()), Some(_)) => Outcome::Busy,
        };
        self.answers.push((origin, refusal));
    }

    fn set_clocks(&mut self, time_ms: u64, origin: Origin) {
        tracing::warn!(
            time_ms,
            "the state's clock is set, as an operator has asked"
        );
        let last = self.logs.len() - 1;
        for (number, log) in self.logs.iter_mut().enumerate() {
            let waits = match number == last {
                true => origin,
                false => Origin::Internal,
            };
            log.set_clock(time_ms, waits);
        }
    }
}

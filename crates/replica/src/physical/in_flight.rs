//! What becomes of commands whose entries are in flight when leadership is lost.

use super::*;

impl PhysicalLog {
    /// Notes an entry of ours, by its index. Those of an earlier time as leader that lie beyond it
    /// may still be there: until something is committed in their place, another leader may commit
    /// them.
    pub(super) fn track_in_flight(&mut self, index: u64, origins: Vec<Origin>, since_us: u64) {
        let ours = InFlight {
            index,
            term: self.group.term(),
            origins,
            since_us,
        };
        let at = match planted::has(Bug::EarlierTermForgotten) {
            true => self.in_flight.len(),
            false => self.in_flight.partition_point(|other| other.index <= index),
        };
        self.in_flight.insert(at, ours);
    }

    /// Answers commands whose fate stays open for too long, and reads that can no longer be
    /// confirmed.
    ///
    /// `stop` is the entry of a gang at which the log stands still. Gangs whose shares will not be
    /// proposed are added to `gangs`.
    pub(crate) fn expire(
        &mut self,
        now_us: u64,
        stop: Option<u64>,
        gangs: &mut Vec<u64>,
        answers: &mut Vec<(Origin, Outcome)>,
    ) {
        // A gang that is committed here may wait for another log's leader, and what is committed
        // behind it waits too: without end, where this replica has been removed since. Nothing is
        // decided by telling their clients. The same holds where the store takes nothing.
        let stands = stop.is_some() && stop == self.apply_queue.front().map(|e| e.entry.index);
        if (stands && self.applying == 0) || self.stalled {
            let ours = self.apply_queue.iter_mut();
            for waiting in ours.filter(|waiting| !waiting.origins.is_empty()) {
                if now_us.saturating_sub(waiting.since_us) <= OUTCOME_TIMEOUT_US {
                    // Those behind it came later.
                    break;
                }
                self.pending -= waiting.origins.len();
                let origins = waiting.origins.drain(..);
                answers.extend(origins.map(|origin| (origin, Outcome::Unknown)));
            }
        }
        if self.stalled {
            let late = self.reads.give_up(now_us);
            answers.extend(late.map(|read| (read.origin, Outcome::Busy)));
        }
        if planted::has(Bug::WaitersForgotten) {
            return;
        }
        if self.group.is_leader() {
            // Those of an earlier time as leader may lie beyond the log's end, where nothing may
            // come for long.
            return self.give_up_late(now_us, answers);
        }
        let leader = self.group.leader();
        for read in self.reads.fail() {
            answers.push((read.origin, Outcome::NotLeader(leader)));
        }
        let sealed = std::mem::take(&mut self.sealed);
        for sealed in sealed {
            let origins = match sealed {
                QueuedEntry::Batch(_, origins) => origins,
                QueuedEntry::Gang(number) => {
                    gangs.push(number);
                    continue;
                }
            };
            self.pending -= origins.len();
            answers.extend(
                origins
                    .into_iter()
                    .map(|origin| (origin, Outcome::NotLeader(leader))),
            );
        }
        if planted::has(Bug::InFlightIsLost) {
            for ours in self.in_flight.drain(..) {
                self.pending -= ours.origins.len();
                let lost = ours
                    .origins
                    .into_iter()
                    .map(|origin| (origin, Outcome::Lost));
                answers.extend(lost);
            }
        }
        self.give_up_late(now_us, answers);
    }

    /// Refuses what has been taken in and not proposed; entries without commands take its places,
    /// as reads may wait for their indexes. Answers the gangs that are to be refused.
    pub(crate) fn refuse_sealed(&mut self, answers: &mut Vec<(Origin, Outcome)>) -> Vec<u64> {
        self.seal();
        let time_ms = self.time_ms();
        let mut gangs = Vec::new();
        for sealed in &mut self.sealed {
            match sealed {
                QueuedEntry::Gang(number) => gangs.push(*number),
                QueuedEntry::Batch(_, origins) if origins.is_empty() => {}
                QueuedEntry::Batch(payload, origins) => {
                    *payload = empty_payload(time_ms);
                    self.pending -= origins.len();
                    answers.extend(origins.drain(..).map(|origin| (origin, Outcome::Busy)));
                }
            }
        }
        gangs
    }

    /// Answers "unknown" for what has been in flight for too long, but not for what this replica
    /// itself, as leader, is about to commit: unless its flash or store takes nothing.
    fn give_up_late(&mut self, now_us: u64, answers: &mut Vec<(Origin, Outcome)>) {
        let commits = self.group.is_leader() && !self.stalled;
        let leading_term = commits.then(|| self.group.term());
        let pending = &mut self.pending;
        self.in_flight.retain_mut(|ours| {
            let late = leading_term != Some(ours.term)
                && now_us.saturating_sub(ours.since_us) > OUTCOME_TIMEOUT_US;
            if late {
                *pending -= ours.origins.len();
                let unknown = ours.origins.drain(..);
                answers.extend(unknown.map(|origin| (origin, Outcome::Unknown)));
            }
            !late
        });
    }
}

//! Entries that are applied again, or not any more: what a replay brings, and what a checkpoint
//! replaces.

use super::*;

impl PhysicalLog {
    /// Takes the next part of what the store lacks and the ring does not have, or what waited for
    /// that. Answers how many entries have become next to be applied.
    ///
    /// # Errors
    /// Flash does not read back.
    pub(crate) fn replay(&mut self, gang_table: &mut GangTable) -> Result<usize, ConsensusError> {
        let before = self.apply_queue.len();
        if self.applied >= self.replay_to {
            while let Some(next) = self.behind.pop_front() {
                self.queue(next, gang_table);
            }
        } else if self.applying == 0 && self.apply_queue.is_empty() {
            for entry in self.group.replay(self.applied + 1, self.replay_to)? {
                self.queue(ToApply::replayed(entry), gang_table);
            }
        }
        Ok(self.apply_queue.len() - before)
    }

    /// A checkpoint has replaced the state up to `index`: what waited below it is settled, its
    /// replies are not known.
    pub(crate) fn skip_to(&mut self, index: u64, term: u64, answers: &mut Vec<(Origin, Outcome)>) {
        if index >= self.replay_to {
            self.replay_to = 0;
            self.apply_queue.append(&mut self.behind);
        }
        let mut settle = |origins: Vec<Origin>| {
            self.pending -= origins.len();
            answers.extend(origins.into_iter().map(|origin| (origin, Outcome::Unknown)));
        };
        while let Some(skipped) = (self.apply_queue).pop_front_if(|next| next.entry.index <= index)
        {
            settle(skipped.origins);
        }
        while let Some(ours) = self.in_flight.pop_front_if(|ours| ours.index <= index) {
            settle(ours.origins);
        }
        if index < self.applied {
            self.rewind_to(index);
        }
        self.applied = index;
        self.applied_term = term;
        self.halted = false;
        self.group.skip_to(index);
        // The log may be without a leader, and full: what the checkpoint holds of it may go.
        self.group.applied_to(index);
    }

    /// A checkpoint holds less of this log than was applied: the entries behind it are applied
    /// again. The log still has them, or the checkpoint would not have been taken: the ring, or
    /// below its first entry flash. The gang table is notified by [`PhysicalLog::reregister_gangs`]
    /// and [`PhysicalLog::replay`].
    fn rewind_to(&mut self, index: u64) {
        let through = self.group.replay_through();
        let mut waiting = std::mem::take(&mut self.apply_queue);
        waiting.append(&mut self.behind);
        // Parts of a replay that was in progress; no client waits for them.
        waiting.retain(|next| next.entry.index > through);
        let from = waiting.front().map(|next| next.entry.index);
        let until = from.unwrap_or(self.group.delivered() + 1);
        for again in (index.max(through) + 1..until).rev() {
            let Some(entry) = self.group.delivered_entry(again) else {
                debug_assert!(false, "entry {again} is gone");
                return;
            };
            waiting.push_front(ToApply::replayed(entry));
        }
        match index < through {
            true => (self.replay_to, self.behind) = (through, waiting),
            false => (self.replay_to, self.apply_queue) = (0, waiting),
        }
    }

    /// Tells the book again what waits in this log.
    pub(crate) fn reregister_gangs(&mut self, gang_table: &mut GangTable) {
        let log = usize::from(self.id);
        gang_table.reset(log, self.applied_term);
        for position in 0..self.apply_queue.len() {
            self.apply_queue[position].skip = false;
            let entry = self.apply_queue[position].entry;
            let head = self.gang_head(&entry);
            gang_table.committed(log, entry.index, entry.term, head);
        }
    }
}

//! Values that failed at a server whose memory is full: sending them again and again would only
//! fill the other backups, which have them already. Deletions and CommitVers go past them: these
//! are what makes room there.

use std::collections::VecDeque;

use super::{Op, Purpose, Worker};
use crate::entry::{Header, Kind};

/// After how long one of them is tried, in microseconds: a server is full before its last segment
/// is used.
const PROBE_US: u64 = 100_000;

/// Ops that wait until their backup has room again, in order.
#[derive(Default)]
pub(super) struct Held {
    ops: VecDeque<u64>,
    /// The one that is tried, and when the next one may be.
    tried: Option<u64>,
    due_us: u64,
}

impl Worker {
    /// Whether an op has values for a server whose memory is full.
    pub(super) fn is_value_for_full(&self, op: &Op) -> bool {
        let full = !self.full_servers.is_empty()
            && (op.backups.iter()).any(|id| self.full_servers.contains(&id.0));
        // Batches nearly always have values.
        let deletes = || Header::decode(&op.record).is_ok_and(|it| it.kind == Kind::Delete);
        full && matches!(op.purpose, Purpose::Write { .. }) && !deletes()
    }

    /// An op has failed at one of its backups.
    pub(super) fn send_again(&mut self, context: u64) {
        let Some(op) = self.ops.get(&context) else {
            return;
        };
        // CommitVers are sent once: without them the backup commits nothing, and wins nothing back.
        if matches!(op.purpose, Purpose::Notice) {
            return self.staged.push_back(context);
        }
        if !self.is_value_for_full(op) {
            return self.stage_again(context);
        }
        if self.held.tried == Some(context) {
            self.held.tried = None;
        }
        if self.held.ops.is_empty() {
            self.held.due_us = self.now_us + PROBE_US;
        }
        self.held.ops.push_back(context);
    }

    /// Sends what was held for servers that have room again, and periodically tries one of the
    /// others.
    pub(super) fn release_held(&mut self) {
        if self.held.ops.is_empty() {
            return;
        }
        let mut held = std::mem::take(&mut self.held.ops);
        held.retain(|context| {
            let is_held = self
                .ops
                .get(context)
                .is_some_and(|op| self.is_value_for_full(op));
            if !is_held {
                self.stage_again(*context);
            }
            is_held
        });
        if self.now_us >= self.held.due_us
            && let Some(context) = held.pop_front()
        {
            self.held.due_us = self.now_us + PROBE_US;
            self.held.tried = Some(context);
            self.stage_again(context);
        }
        self.held.ops = held;
    }

    /// An op is durable everywhere: if it was held, others may be sent too.
    pub(super) fn held_got_on(&mut self, context: u64) {
        if self.held.tried == Some(context) {
            self.held.tried = None;
            for context in std::mem::take(&mut self.held.ops) {
                self.stage_again(context);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use cyclone_fabric::Address;
    use cyclone_replication::{BackupId, Outcome, Protocol, ReplicationError, Sender};
    use cyclone_wire::command::Operation;
    use cyclone_wire::reply::Reply;

    use crate::entry::{Entry, Kind};
    use crate::testing::{Alone, set};
    use crate::worker::Answer;

    /// A backup without room for values, or with room.
    #[derive(Default)]
    struct Backup {
        has_room: bool,
        is_busy: bool,
        loses_notices: usize,
        took: Vec<Kind>,
        outcomes: Vec<Outcome>,
    }

    struct ToBackup(Arc<Mutex<Backup>>);

    impl Sender for ToBackup {
        fn protocol(&self) -> Protocol {
            Protocol::Rowan
        }

        fn open(&mut self, backup: BackupId, _: &Address) -> Result<(), ReplicationError> {
            let mut there = self.0.lock().expect("alone");
            there.outcomes.push(Outcome::Opened { backup });
            Ok(())
        }

        fn append(
            &mut self,
            backups: &[BackupId],
            record: &[u8],
            context: u64,
        ) -> Result<(), ReplicationError> {
            let mut there = self.0.lock().expect("alone");
            let kind = Entry::decode(record).expect("whole").header.kind;
            if there.is_busy && kind == Kind::Put {
                return Err(ReplicationError::Busy);
            }
            there.took.push(kind);
            let is_lost = kind == Kind::Commit && there.loses_notices > 0;
            there.loses_notices -= usize::from(is_lost);
            let outcome = match is_lost || (kind == Kind::Put && !there.has_room) {
                true => Outcome::Failed {
                    context,
                    backup: backups[0],
                    why: "no segment".to_owned(),
                },
                false => Outcome::Durable { context },
            };
            there.outcomes.push(outcome);
            Ok(())
        }

        fn poll(&mut self, _: u64, outcomes: &mut Vec<Outcome>) {
            outcomes.append(&mut self.0.lock().expect("alone").outcomes);
        }

        fn wait(&mut self, _: Duration) {}
    }

    fn with_backup() -> (Alone, Arc<Mutex<Backup>>) {
        let mut alone = Alone::new(1 << 20, 8192);
        alone.serve(1, &[]);
        alone.set("old", "value");
        let mut configuration = alone.node.configuration().expect("one").clone();
        for placement in &mut configuration.shards {
            placement.backups = vec![1];
        }
        let backup = Arc::new(Mutex::new(Backup::default()));
        let sender = Box::new(ToBackup(Arc::clone(&backup)));
        let worker = alone.node.worker(0).expect("one");
        worker.install(&configuration, sender);
        (alone, backup)
    }

    fn count(backup: &Mutex<Backup>, kind: Kind) -> usize {
        let took = &backup.lock().expect("alone").took;
        took.iter().filter(|&&it| it == kind).count()
    }

    /// A burst fills a backup: each of its values goes to all backups with every attempt.
    #[test]
    fn values_that_a_full_backup_cannot_take_are_not_sent_without_end() {
        let (mut alone, backup) = with_backup();
        for n in 0..20 {
            alone.submit(&[set(&format!("key {n}"), "value")]);
        }
        alone.step();
        alone.node.worker(0).expect("one").set_full(1, true);
        alone.step();
        let before = count(&backup, Kind::Put);
        // A second.
        alone.steps(5_000);
        let again = count(&backup, Kind::Put) - before;
        assert!((5..=10).contains(&again), "{again}");
        assert_eq!(alone.answers(), []);
        // What makes room there goes on.
        let delete = Operation::Del { keys: vec![b"old"] };
        assert_eq!(alone.ask(delete), Answer::Done(vec![Reply::Int(1)]));
        alone.steps(10);
        assert!(count(&backup, Kind::Commit) > 0);

        backup.lock().expect("alone").has_room = true;
        alone.node.worker(0).expect("one").set_full(1, false);
        let answers = alone.wait_for(20);
        assert!(
            answers
                .iter()
                .all(|it| *it == Answer::Done(vec![Reply::Ok]))
        );
    }

    /// It says that it is full, but takes some more: one that gets through shows it.
    #[test]
    fn values_that_a_full_backup_takes_after_all_are_sent() {
        let (mut alone, backup) = with_backup();
        for n in 0..20 {
            alone.submit(&[set(&format!("key {n}"), "value")]);
        }
        alone.step();
        alone.node.worker(0).expect("one").set_full(1, true);
        alone.steps(5);
        backup.lock().expect("alone").has_room = true;
        alone.steps(600);
        assert_eq!(alone.answers().len(), 20);
    }

    /// Nothing else is written that would carry another one.
    #[test]
    fn a_commit_version_that_was_lost_is_sent_again() {
        let (mut alone, backup) = with_backup();
        backup.lock().expect("alone").loses_notices = 2;
        alone.steps(50);
        assert_eq!(count(&backup, Kind::Commit), 3);
    }

    #[test]
    fn deletions_go_past_values_for_a_full_backup() {
        let (mut alone, backup) = with_backup();
        backup.lock().expect("alone").is_busy = true;
        alone.submit(&[set("key", "value")]);
        alone.step();
        alone.node.worker(0).expect("one").set_full(1, true);
        let delete = Operation::Del { keys: vec![b"old"] };
        assert_eq!(alone.ask(delete), Answer::Done(vec![Reply::Int(1)]));
    }
}

//! The engine that keeps nothing: for measuring the log alone (cyclone §6's stub server).

use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use cyclone_wire::batch;
use cyclone_wire::command::Query;
use cyclone_wire::reply::{Failure, Reply};

use crate::machine::{Applied, ApplyError, CheckpointMeta, EntryInput, Mode, StateMachine};

/// Answers Ok to every command.
pub struct Echo {
    /// Per log; the logs have nothing to do with each other.
    applied: Vec<Place>,
}

/// Where a log stands, on its own cache line.
#[repr(align(128))]
struct Place(Mutex<(u64, u64)>);

impl Echo {
    /// For this many logs.
    pub fn new(logs: u16) -> Echo {
        Echo {
            applied: (0..logs).map(|_| Place(Mutex::new((0, 0)))).collect(),
        }
    }

    fn place(&self, log: u16) -> Option<MutexGuard<'_, (u64, u64)>> {
        let place = self.applied.get(usize::from(log))?;
        Some(place.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn applied_positions(&self) -> Vec<(u64, u64)> {
        let logs = 0..self.applied.len() as u16;
        logs.map(|log| self.applied(log)).collect()
    }
}

impl StateMachine for Echo {
    fn apply(
        &self,
        log: u16,
        entries: &[EntryInput<'_>],
        _mode: Mode,
    ) -> Result<Applied, ApplyError> {
        let Some(mut applied) = self.place(log) else {
            return Err(ApplyError::Fatal(format!("no log {log}")));
        };
        let mut answers = Vec::with_capacity(entries.len());
        for entry in entries {
            let fresh = entry.index > applied.0;
            if fresh {
                *applied = (entry.index, entry.term);
            }
            let commands = batch::iter(entry.payload).map_or(0, |commands| commands.len());
            answers.push(if fresh {
                vec![Reply::Ok; commands]
            } else {
                Vec::new()
            });
        }
        Ok(Applied {
            replies: answers,
            ..Applied::default()
        })
    }

    fn apply_gang(
        &self,
        parts: &[(u16, EntryInput<'_>)],
        mode: Mode,
    ) -> Result<Vec<Reply>, ApplyError> {
        let mut replies = Vec::new();
        for (position, (log, entry)) in parts.iter().enumerate() {
            let answers = self.apply(*log, std::slice::from_ref(entry), mode)?;
            if position == 0 {
                replies = answers.replies.into_iter().next().unwrap_or_default();
            }
        }
        Ok(replies)
    }

    fn query(&self, _query: &Query<'_>, _mode: Mode) -> Result<Reply, ApplyError> {
        Ok(Reply::Failed(Failure::Unsupported))
    }

    fn applied(&self, log: u16) -> (u64, u64) {
        self.place(log).map(|place| *place).unwrap_or_default()
    }

    fn flushed(&self, log: u16) -> u64 {
        self.applied(log).0
    }

    fn flush(&self) -> Result<(), ApplyError> {
        Ok(())
    }

    fn checkpoint(&self, directory: &Path) -> Result<CheckpointMeta, ApplyError> {
        let meta = CheckpointMeta {
            applied: self.applied_positions(),
        };
        let text: Vec<String> = meta
            .applied
            .iter()
            .map(|(index, term)| format!("{index} {term}"))
            .collect();
        std::fs::create_dir_all(directory)
            .and_then(|()| std::fs::write(directory.join("applied"), text.join("\n")))
            .map_err(|error| ApplyError::Fatal(error.to_string()))?;
        Ok(meta)
    }

    fn install(&self, directory: &Path) -> Result<CheckpointMeta, ApplyError> {
        let text = std::fs::read_to_string(directory.join("applied"))
            .map_err(|error| ApplyError::Fatal(error.to_string()))?;
        let applied: Option<Vec<(u64, u64)>> = text
            .lines()
            .map(|line| {
                line.split_once(' ')
                    .and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)))
            })
            .collect();
        let applied = applied.ok_or_else(|| ApplyError::Fatal("not an echo checkpoint".into()))?;
        for (log, place) in (0..).zip(&applied) {
            if let Some(mut ours) = self.place(log) {
                *ours = *place;
            }
        }
        Ok(CheckpointMeta { applied })
    }

    fn digest(&self) -> Result<String, ApplyError> {
        Ok("echo".into())
    }
}

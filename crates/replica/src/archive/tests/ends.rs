//! Logs that end anywhere, as a lost replica has them: each is applied to its end, and operations
//! over several logs as a whole or not at all.

use std::collections::HashMap;
use std::sync::Mutex;

use cyclone_store::{Applied, ApplyError, CheckpointMeta, Echo, EntryInput, Mode, StateMachine};
use cyclone_test_support::Random;
use cyclone_wire::command::Query;
use cyclone_wire::reply::Reply;

use super::*;

/// Notes for each entry whether it had an effect.
struct Recorder {
    echo: Echo,
    effects: Mutex<HashMap<(u16, u64), bool>>,
}

impl Recorder {
    fn note(&self, log: u16, entry: &EntryInput<'_>) {
        let mut effects = self.effects.lock().expect("lock");
        let before = effects.insert((log, entry.index), !entry.payload.is_empty());
        assert_eq!(before, None, "entry {} of log {log} twice", entry.index);
    }
}

impl StateMachine for Recorder {
    fn apply(
        &self,
        log: u16,
        entries: &[EntryInput<'_>],
        mode: Mode,
    ) -> Result<Applied, ApplyError> {
        entries.iter().for_each(|entry| self.note(log, entry));
        self.echo.apply(log, entries, mode)
    }

    fn apply_gang(
        &self,
        parts: &[(u16, EntryInput<'_>)],
        mode: Mode,
    ) -> Result<Vec<Reply>, ApplyError> {
        // The first one's payload is that of all.
        for (log, entry) in parts {
            let payload = parts[0].1.payload;
            self.note(*log, &EntryInput { payload, ..*entry });
        }
        self.echo.apply_gang(parts, mode)
    }

    fn query(&self, query: &Query<'_>, mode: Mode) -> Result<Reply, ApplyError> {
        self.echo.query(query, mode)
    }

    fn applied(&self, log: u16) -> (u64, u64) {
        self.echo.applied(log)
    }

    fn flushed(&self, log: u16) -> u64 {
        self.echo.flushed(log)
    }

    fn flush(&self) -> Result<(), ApplyError> {
        self.echo.flush()
    }

    fn checkpoint(&self, directory: &Path) -> Result<CheckpointMeta, ApplyError> {
        self.echo.checkpoint(directory)
    }

    fn install(&self, directory: &Path) -> Result<CheckpointMeta, ApplyError> {
        self.echo.install(directory)
    }

    fn digest(&self) -> Result<String, ApplyError> {
        self.echo.digest()
    }
}

struct InMemory(std::vec::IntoIter<Archived>);

impl EntrySource for InMemory {
    fn next_entry(&mut self) -> Result<Option<Archived>, ArchiveError> {
        Ok(self.0.next())
    }
}

#[test]
fn incomplete_gang_has_no_effect_and_what_follows_it_is_applied() {
    const LOGS: u16 = 4;
    let (mut whole, mut broken) = (0, 0);
    for seed in 0..40 {
        let mut random = Random::new(300 + seed);
        // Also more entries than are read ahead.
        let mut all = history(&mut random, LOGS, 100 + 90 * seed as usize, true);
        for log in &mut all {
            let lost = random.below(log.len() as u64) as usize / 4;
            log.truncate(log.len() - lost);
        }
        let source = |entries: &Vec<Entry>| {
            let entries = (1..).zip(entries).map(|(index, entry)| Archived {
                index,
                term: entry.term,
                kind: 0,
                payload: entry.payload.clone(),
                clock_ms: 0,
            });
            let entries: Vec<Archived> = entries.collect();
            Box::new(InMemory(entries.into_iter())) as Box<dyn EntrySource>
        };
        let sources = || all.iter().map(source).collect::<Vec<_>>();
        let from = vec![(0, 0); usize::from(LOGS)];
        let store = Recorder {
            echo: Echo::new(LOGS),
            effects: Mutex::default(),
        };
        let reached = replay_to_end(sources(), &from, Some(&store)).expect("applied");
        let read = replay_to_end(sources(), &from, None).expect("read");
        assert_eq!(
            read, reached,
            "seed {seed}: what is read is what is applied"
        );
        for (log, entries) in all.iter().enumerate() {
            let place = &reached.places[log];
            assert_eq!(
                (place.index, place.held),
                (entries.len() as u64, 0),
                "seed {seed}"
            );
            assert_eq!(store.applied(log as u16).0, place.index, "seed {seed}");
        }
        let effects = store.effects.lock().expect("lock");
        for (log, entries) in (0_u16..).zip(&all) {
            for (index, entry) in (1..).zip(entries) {
                let had = effects[&(log, index)];
                let Ok((head, _)) = Head::decode(&entry.payload) else {
                    assert_eq!(had, !entry.payload.is_empty(), "seed {seed}");
                    continue;
                };
                let is_there = |(log, _): &(u16, u64)| {
                    let mut others = all[usize::from(*log)].iter();
                    others.any(|other| other.number == entry.number)
                };
                let is_whole = head.view.iter().all(is_there);
                assert_eq!(had, is_whole, "seed {seed}, log {log}, entry {index}");
                whole += u64::from(is_whole);
                broken += u64::from(!is_whole);
            }
        }
    }
    assert!(whole > 100 && broken > 100, "{whole} whole, {broken} not");
}

//! The state machine over any ordered map: commands, sessions and applied indexes become one atomic batch per call.

mod meta;
mod scan;

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use cyclone_wire::batch;
use cyclone_wire::command::{Command, Operation, Query};
use cyclone_wire::planted::{self, Bug};
use cyclone_wire::reply::{Failure, Reply};

use crate::books::{self, Books};
use crate::commands::{self, Overlay, Scan, Visit, number};
use crate::deadlines::{self, Records};
use crate::held::{self, HeldViews};
use crate::kv::{Change, Kv, space};
use crate::machine::{Applied, ApplyError, CheckpointMeta, EntryInput, Mode, StateMachine};
use crate::migrate;
use crate::queries::{self, At};
use crate::session::{SessionChanges, Sessions, Verdict};

/// Limits that are part of what commands mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Longest value that a command may produce, in bytes, where its entry does not tell: entries of the first format. All
    /// others bring the limit of the leader that made them, and mean the same to replicas with other settings.
    pub max_value_bytes: usize,
    /// Sessions per log; opening one more forgets the one unused for longest. At least 1.
    pub max_sessions: usize,
}

impl Limits {
    /// The usual number of sessions.
    pub const MAX_SESSIONS: usize = 10_000;
}

struct Log {
    applied: u64,
    term: u64,
    /// The latest stamp among the entries applied: the time by which keys expire.
    clock_ms: u64,
    sessions: Sessions,
    /// What is behind this index is not for an event loop, which found out by trying: it is too much, or the map is behind.
    not_at_once: Option<u64>,
}

/// A [`StateMachine`] over an ordered map.
pub struct KvMachine<K> {
    kv: K,
    limits: Limits,
    logs: Vec<Mutex<Log>>,
    /// Applied index and term per log, for the loop: `logs` is held for as long as a worker's apply or checkpoint takes,
    /// these never are. Lags `logs` only within a call.
    places: Vec<Mutex<(u64, u64)>>,
    flushed: Vec<AtomicU64>,
    /// Held while what is written becomes durable, or is copied, or is replaced: what was flushed or copied is what was read before. Taken
    /// before any of `logs`.
    flushing: Mutex<()>,
    /// Per log the state's clock, for queries.
    clocks: Vec<AtomicU64>,
    /// Per log a time before which no key has a deadline; `u64::MAX`: none has one.
    deadlines: Vec<AtomicU64>,
    books: Books,
    held: HeldViews,
    /// Nobody waits any more for walks over all keys.
    walks_end: AtomicBool,
}

/// One of the logs that an entry is of.
struct Share<'a> {
    log: u16,
    index: u64,
    sessions: &'a mut Sessions,
}

#[allow(private_bounds)]
impl<K: Kv> KvMachine<K> {
    /// Takes the map as it was left: what it holds is what survived.
    ///
    /// # Errors
    /// When the map cannot be read, or holds what this program did not write.
    pub fn open(kv: K, logs: u16, limits: Limits) -> Result<Self, ApplyError> {
        let fresh = |log| {
            Mutex::new(Log {
                applied: 0,
                term: 0,
                clock_ms: 0,
                sessions: Sessions::new(log, limits.max_sessions),
                not_at_once: None,
            })
        };
        let machine = KvMachine {
            kv,
            limits,
            logs: (0..logs).map(fresh).collect(),
            places: (0..logs).map(|_| Mutex::new((0, 0))).collect(),
            flushed: (0..logs).map(|_| AtomicU64::new(0)).collect(),
            flushing: Mutex::new(()),
            clocks: (0..logs).map(|_| AtomicU64::new(0)).collect(),
            deadlines: (0..logs).map(|_| AtomicU64::new(u64::MAX)).collect(),
            books: Books::new(logs),
            held: HeldViews::default(),
            walks_end: AtomicBool::new(false),
        };
        machine.load(!planted::has(Bug::SessionsForgotten))?;
        if planted::has(Bug::AppliedTwice) {
            for log in 0..logs {
                let mut state = machine.log(log)?;
                state.applied = state.applied.saturating_sub(1);
                machine.publish(log, &state);
            }
        }
        for (flushed, log) in machine.flushed.iter().zip(0..) {
            flushed.store(machine.applied(log).0, Ordering::Release);
        }
        Ok(machine)
    }

    fn count(&self) -> u16 {
        self.logs.len() as u16
    }

    fn log(&self, log: u16) -> Result<MutexGuard<'_, Log>, ApplyError> {
        self.log_for(log, Mode::Blocking)
    }

    /// The log for one call: the event loop does not wait for a worker that has it.
    fn log_for(&self, log: u16, mode: Mode) -> Result<MutexGuard<'_, Log>, ApplyError> {
        let log = self
            .logs
            .get(usize::from(log))
            .ok_or_else(|| ApplyError::Fatal(format!("no log {log}")))?;
        mode.lock(log.try_lock(), || log.lock())
    }

    fn publish(&self, log: u16, state: &Log) {
        if let Some(place) = self.places.get(usize::from(log)) {
            *place.lock().unwrap_or_else(PoisonError::into_inner) = (state.applied, state.term);
        }
        if let Some(clock) = self.clocks.get(usize::from(log)) {
            clock.store(state.clock_ms, Ordering::Release);
        }
    }

    /// Notes the deadlines that a call has written and swept.
    fn note_deadlines(&self, log: u16, records: &Records) {
        let Some(noted) = self.deadlines.get(usize::from(log)) else {
            return;
        };
        let written = records.earliest.unwrap_or(u64::MAX);
        let before = match records.swept {
            Some(left) => left.unwrap_or(u64::MAX),
            None => noted.load(Ordering::Acquire),
        };
        noted.store(before.min(written), Ordering::Release);
    }

    fn load(&self, sessions: bool) -> Result<(), ApplyError> {
        migrate::first_format(&self.kv)?;
        self.books.load(&self.kv)?;
        for number in 0..self.logs.len() as u16 {
            let mut log = self.log(number)?;
            log.sessions = Sessions::new(number, self.limits.max_sessions);
            let meta = self.kv.get(&meta::key(number), Mode::Blocking)?;
            let meta = meta.map_or(Ok((0, 0, 0)), |value| meta::read(&value));
            (log.applied, log.term, log.clock_ms) = meta.map_err(|error| {
                ApplyError::Fatal(format!(
                    "the applied index of log {number} is damaged: {error}"
                ))
            })?;
            let deadline = deadlines::first(&self.kv, number)?;
            self.deadlines[usize::from(number)]
                .store(deadline.unwrap_or(u64::MAX), Ordering::Release);
            self.publish(number, &log);
        }
        let mut damaged = None;
        self.kv.scan(&[space::SESSION], &mut |key, value| {
            if key[0] != space::SESSION || !sessions {
                return false;
            }
            let loaded = (key.len() == 19)
                .then(|| self.log(u16::from_be_bytes([key[1], key[2]])).ok())
                .flatten()
                .map(|mut log| log.sessions.load(key, value));
            if !matches!(loaded, Some(Ok(()))) {
                damaged = Some(key.to_vec());
            }
            damaged.is_none()
        })?;
        damaged.map_or(Ok(()), |key| {
            Err(ApplyError::Fatal(format!(
                "the session record {key:?} is damaged"
            )))
        })
    }

    /// Executes an entry's commands. `shares` are the logs it is an entry of, ascending; the lowest keeps the replies.
    /// `clock_ms` is moved to the entry's stamp, never back.
    fn run(
        &self,
        overlay: &mut Overlay<'_>,
        shares: &mut [Share<'_>],
        changes: &mut SessionChanges,
        payload: &[u8],
        clock_ms: &mut u64,
    ) -> Result<Vec<Reply>, ApplyError> {
        // What does not decode was refused by the leader already; here it is only answered, on all replicas alike.
        let Ok(commands) = batch::iter(payload) else {
            return Ok(vec![Reply::Failed(Failure::Unsupported)]);
        };
        *clock_ms = commands.stamp_ms().max(*clock_ms);
        let told = commands.max_value_bytes().map(|bytes| bytes as usize);
        overlay.max_value_bytes = told.unwrap_or(self.limits.max_value_bytes);
        let places: Vec<(u16, u64)> = shares
            .iter()
            .map(|share| (share.log, share.index))
            .collect();
        overlay.enter(&places);
        let mut replies = Vec::with_capacity(commands.len());
        for (position, bytes) in commands.enumerate() {
            let Ok(command) = Command::decode(bytes) else {
                replies.push(Reply::Failed(Failure::Unsupported));
                continue;
            };
            let index = shares[0].index;
            if let Some(tag) = &command.session {
                match shares[0].sessions.admit(tag, index) {
                    Verdict::Answer(reply) => {
                        replies.push(reply);
                        continue;
                    }
                    Verdict::Execute => {}
                }
            }
            let reply = match command.operation {
                Operation::OpenSession => {
                    let session = number(index, position);
                    for share in shares.iter_mut() {
                        share.sessions.open(session, share.index, changes);
                    }
                    Reply::Int(session as i64)
                }
                Operation::CloseSession { session } => {
                    for share in shares.iter_mut() {
                        share.sessions.close(session, changes);
                    }
                    Reply::Ok
                }
                Operation::Members { members } => {
                    let (log, index) = places[0];
                    changes.puts.push(books::members(log, index, members));
                    Reply::Ok
                }
                Operation::Record { after, record } => self.books.replace(changes, after, record),
                ref operation => {
                    overlay.begin(*clock_ms, position);
                    let reply = overlay.execute(operation)?;
                    if overlay.is_too_much() {
                        return Err(ApplyError::WouldBlock);
                    }
                    reply
                }
            };
            if let Some(tag) = &command.session {
                shares[0].sessions.record(tag, &reply);
            }
            replies.push(reply);
        }
        for share in shares.iter_mut() {
            share.sessions.end_entry(share.index, changes);
        }
        Ok(replies)
    }

    /// Writes one call's changes and the applied places of its logs as one batch.
    fn write(
        &self,
        overlay: &Overlay<'_>,
        changes: &SessionChanges,
        places: &[([u8; 3], [u8; 24])],
        mode: Mode,
    ) -> Result<(), ApplyError> {
        let puts = changes
            .puts
            .iter()
            .map(|(key, value)| Change::Put(key, value));
        let deletes = changes.deletes.iter().map(|key| Change::Delete(key));
        let mut first = places;
        if planted::has(Bug::AppliedSeparately) {
            let mut all = places.iter().map(|(key, value)| Change::Put(key, value));
            self.kv.write(&mut all, mode)?;
        }
        if planted::has(Bug::GangHalfApplied) || planted::has(Bug::GangEvidenceLost) {
            first = &places[..1];
        }
        let metas = first.iter().map(|(key, value)| Change::Put(key, value));
        self.kv.write(
            &mut overlay.changes().chain(puts).chain(deletes).chain(metas),
            mode,
        )?;
        if planted::has(Bug::GangHalfApplied) && places.len() > 1 {
            let mut rest = places[1..]
                .iter()
                .map(|(key, value)| Change::Put(key, value));
            self.kv.write(&mut rest, Mode::Blocking)?;
        }
        Ok(())
    }
}

impl<K: Kv> StateMachine for KvMachine<K> {
    fn apply(
        &self,
        log: u16,
        entries: &[EntryInput<'_>],
        mode: Mode,
    ) -> Result<Applied, ApplyError> {
        let mut guard = self.log_for(log, mode)?;
        let state = &mut *guard;
        // A loop that tries again at once would only read it all again.
        if mode == Mode::NonBlocking && state.not_at_once == Some(state.applied) {
            return Err(ApplyError::WouldBlock);
        }
        let mut overlay = Overlay::new(&self.kv, mode, self.limits.max_value_bytes, self.count());
        let noted = self.deadlines.get(usize::from(log));
        overlay.records.lowest = noted.map_or(0, |noted| noted.load(Ordering::Acquire));
        let mut changes = SessionChanges::default();
        let mut answers = Vec::with_capacity(entries.len());
        let (mut applied, mut term, mut clock_ms) = (state.applied, state.term, state.clock_ms);
        let mut attempt = || -> Result<(), ApplyError> {
            for entry in entries {
                if entry.index <= applied {
                    answers.push(Vec::new());
                    continue;
                }
                meta::check_next(log, applied, entry.index)?;
                let mut shares = [Share {
                    log,
                    index: entry.index,
                    sessions: &mut state.sessions,
                }];
                let (shares, payload) = (&mut shares, entry.payload);
                answers.push(self.run(
                    &mut overlay,
                    shares,
                    &mut changes,
                    payload,
                    &mut clock_ms,
                )?);
                (applied, term) = (entry.index, entry.term);
            }
            if applied == state.applied {
                return Ok(());
            }
            let place = (meta::key(log), meta::value(applied, term, clock_ms));
            self.write(&overlay, &changes, &[place], mode)
        };
        match attempt() {
            Ok(()) => {
                state.sessions.commit();
                (state.applied, state.term, state.clock_ms) = (applied, term, clock_ms);
                self.books.note(&changes);
                self.note_deadlines(log, &overlay.records);
                self.publish(log, state);
                Ok(answers)
            }
            Err(error) => {
                state.sessions.roll_back();
                let is_behind = matches!(error, ApplyError::WouldBlock) && self.kv.is_behind();
                if overlay.is_too_much() || is_behind {
                    state.not_at_once = Some(state.applied);
                }
                Err(error)
            }
        }
    }

    //= cyclone §5.1
    fn apply_gang(
        &self,
        parts: &[(u16, EntryInput<'_>)],
        mode: Mode,
    ) -> Result<Vec<Reply>, ApplyError> {
        if parts.is_empty() || !parts.is_sorted_by(|(one, _), (next, _)| one < next) {
            return Err(ApplyError::Fatal("a gang's logs out of order".into()));
        }
        // Ascending, as checkpoints take them.
        let mut guards = Vec::with_capacity(parts.len());
        for (log, _) in parts {
            guards.push(self.log_for(*log, mode)?);
        }
        let passed = |(guard, (_, entry)): &(&MutexGuard<'_, Log>, &(u16, EntryInput<'_>))| {
            entry.index <= guard.applied
        };
        match guards.iter().zip(parts).filter(passed).count() {
            0 => {}
            all if all == parts.len() => return Ok(Vec::new()),
            some => {
                let what = format!("{some} of {} logs are past a gang's entry", parts.len());
                return Err(ApplyError::Fatal(what));
            }
        }
        for (guard, (log, entry)) in guards.iter().zip(parts) {
            meta::check_next(*log, guard.applied, entry.index)?;
        }
        let mut overlay = Overlay::new(&self.kv, mode, self.limits.max_value_bytes, self.count());
        let mut changes = SessionChanges::default();
        // One moment for all of the gang's logs.
        let mut clock_ms = guards.iter().map(|guard| guard.clock_ms).max().unwrap_or(0);
        let mut attempt = || -> Result<Vec<Reply>, ApplyError> {
            let mut shares = Vec::with_capacity(parts.len());
            for (guard, (log, entry)) in guards.iter_mut().zip(parts) {
                shares.push(Share {
                    log: *log,
                    index: entry.index,
                    sessions: &mut guard.sessions,
                });
            }
            let payload = parts[0].1.payload;
            let replies = self.run(
                &mut overlay,
                &mut shares,
                &mut changes,
                payload,
                &mut clock_ms,
            )?;
            let place = |(log, entry): &(u16, EntryInput<'_>)| {
                let value = meta::value(entry.index, entry.term, clock_ms);
                (meta::key(*log), value)
            };
            let places: Vec<_> = parts.iter().map(place).collect();
            self.write(&overlay, &changes, &places, mode)?;
            Ok(replies)
        };
        let result = attempt();
        for (guard, (log, entry)) in guards.iter_mut().zip(parts) {
            if result.is_ok() {
                guard.sessions.commit();
                (guard.applied, guard.term, guard.clock_ms) = (entry.index, entry.term, clock_ms);
                self.note_deadlines(*log, &overlay.records);
                self.publish(*log, guard);
            } else {
                guard.sessions.roll_back();
            }
        }
        result
    }

    fn query(&self, query: &Query<'_>, mode: Mode) -> Result<Reply, ApplyError> {
        self.query_at(query, 0, mode)
    }

    fn query_at(&self, query: &Query<'_>, now_ms: u64, mode: Mode) -> Result<Reply, ApplyError> {
        match *query {
            Query::Scan {
                cursor,
                pattern,
                count,
                held,
            } if held || held::names_a_view(cursor) => self.held_scan(cursor, pattern, count, mode),
            Query::Scan { .. } | Query::Keys { .. } | Query::DbSize => {
                self.walk_all(query, now_ms, mode)
            }
            _ => commands::query(&self.kv, query, &|slot| self.at(slot, now_ms), mode),
        }
    }

    fn belong_to(&self, replica: u64) {
        self.held.belong_to(replica);
    }

    fn keep_time(&self, now_us: u64) {
        self.held.keep_time(now_us);
    }

    fn held_snapshots(&self) -> usize {
        self.held.count()
    }

    fn members(&self, log: u16) -> Option<(u64, Vec<u8>)> {
        self.books.members(log)
    }

    fn record(&self) -> Option<(u64, Vec<u8>)> {
        self.books.record()
    }

    fn keeps_members(&self) -> bool {
        true
    }

    fn clock_ms(&self, log: u16) -> u64 {
        self.clocks
            .get(usize::from(log))
            .map_or(0, |clock| clock.load(Ordering::Acquire))
    }

    fn next_deadline(&self, log: u16) -> Option<u64> {
        let noted = self.deadlines.get(usize::from(log))?;
        Some(noted.load(Ordering::Acquire)).filter(|deadline| *deadline < u64::MAX)
    }

    fn applied(&self, log: u16) -> (u64, u64) {
        let place = self.places.get(usize::from(log));
        place.map_or((0, 0), |place| {
            *place.lock().unwrap_or_else(PoisonError::into_inner)
        })
    }

    fn flushed(&self, log: u16) -> u64 {
        self.flushed
            .get(usize::from(log))
            .map_or(0, |flushed| flushed.load(Ordering::Acquire))
    }

    fn flush(&self) -> Result<(), ApplyError> {
        let _alone = self.flushing.lock().unwrap_or_else(PoisonError::into_inner);
        // Read before the flush begins: at least this much is in it.
        let applied: Vec<u64> = (0..self.logs.len() as u16)
            .map(|log| self.applied(log).0)
            .collect();
        if self.kv.flush()? {
            for (flushed, applied) in self.flushed.iter().zip(applied) {
                flushed.fetch_max(applied, Ordering::AcqRel);
            }
        }
        Ok(())
    }

    fn checkpoint(&self, directory: &Path) -> Result<CheckpointMeta, ApplyError> {
        // Nor is the state replaced between looking at the places and writing the files.
        let _alone = self.flushing.lock().unwrap_or_else(PoisonError::into_inner);
        // All logs are held, so that the files show one moment of every log.
        let logs: Vec<MutexGuard<'_, Log>> = self
            .logs
            .iter()
            .map(|log| log.lock().unwrap_or_else(PoisonError::into_inner))
            .collect();
        self.kv.checkpoint(directory)?;
        Ok(CheckpointMeta {
            applied: logs
                .iter()
                .map(|log| {
                    let ahead = u64::from(planted::has(Bug::CheckpointAhead));
                    (log.applied + ahead, log.term)
                })
                .collect(),
        })
    }

    fn install(&self, directory: &Path) -> Result<CheckpointMeta, ApplyError> {
        let _alone = self.flushing.lock().unwrap_or_else(PoisonError::into_inner);
        self.held.without(|| self.kv.install(directory))?;
        // From here on nothing may be said to be as it was.
        self.load(!planted::has(Bug::SessionsNotInstalled))
            .map_err(|error| ApplyError::Fatal(format!("after an installation: {error}")))?;
        let applied: Vec<(u64, u64)> = (0..self.logs.len() as u16)
            .map(|log| self.applied(log))
            .collect();
        for (flushed, (index, _)) in self.flushed.iter().zip(&applied) {
            flushed.store(*index, Ordering::Release);
        }
        Ok(CheckpointMeta { applied })
    }

    fn digest(&self) -> Result<String, ApplyError> {
        self.hash_all()
    }

    fn end_walks(&self) {
        self.walks_end.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests;

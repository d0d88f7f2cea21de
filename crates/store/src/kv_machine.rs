//! The state machine over any ordered map: commands, sessions and applied indexes become one atomic
//! batch per call.

mod meta;
mod run;
mod scan;

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use cyclone_wire::command::Query;
use cyclone_wire::planted::{self, Bug};
use cyclone_wire::reply::Reply;

use crate::commands::Overlay;
use crate::deadlines::{self, Records};
use crate::held::{self, ScanSnapshots};
use crate::kv::{Change, Kv, space};
use crate::machine::{
    Applied, ApplyError, CheckpointMeta, EntryInput, Mode, StateMachine, WorkDone,
};
use crate::membership::MembershipStore;
use crate::migrate;
use crate::queries::{self, QueryTime, Scan, Visit};
use crate::session::{SessionChanges, Sessions};

use self::run::{Share, UnappliedPart, WorkCounters};

/// Limits that are part of what commands mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Longest value that a command may produce, in bytes, where its entry does not tell: entries
    /// of the first format. All others bring the limit of the leader that made them, and mean the
    /// same to replicas with other settings.
    pub max_value_bytes: usize,
    /// Sessions per log; opening one more forgets the one unused for longest. At least 1.
    pub max_sessions: usize,
}

impl Limits {
    /// The usual number of sessions.
    pub const MAX_SESSIONS: usize = 10_000;
}

struct Log {
    /// What is applied. Its clock is the time by which keys expire: the latest stamp among the
    /// entries applied since it was last set ([`cyclone_wire::command::Operation::SetClock`]).
    place: meta::Place,
    sessions: Sessions,
    /// What is behind this index is not for an event loop, which found out by trying: it is too
    /// much, or the map is behind.
    needs_blocking_from: Option<u64>,
}

/// Where a log's place is stored.
#[cfg(feature = "rocksdb")]
pub(crate) fn place_key(log: u16) -> [u8; 3] {
    meta::key(log)
}

/// Applied index and term of a log's place as stored.
///
/// # Errors
/// As [`KvMachine::open`].
#[cfg(feature = "rocksdb")]
pub(crate) fn read_place(log: u16, stored: Option<&[u8]>) -> Result<(u64, u64), ApplyError> {
    let place = read_meta(log, stored)?;
    Ok((place.applied, place.term))
}

fn read_meta(log: u16, stored: Option<&[u8]>) -> Result<meta::Place, ApplyError> {
    let place = stored.map_or(Ok(meta::Place::default()), meta::read);
    place.map_err(|error| {
        ApplyError::Fatal(format!(
            "the applied index of log {log} is damaged: {error}"
        ))
    })
}

/// A [`StateMachine`] over an ordered map.
pub struct KvMachine<K> {
    kv: K,
    limits: Limits,
    logs: Vec<Mutex<Log>>,
    /// Applied index and term per log, for the loop: `logs` is held for as long as a worker's apply
    /// or checkpoint takes, these never are. Lags `logs` only within a call.
    applied_positions: Vec<Mutex<(u64, u64)>>,
    flushed: Vec<AtomicU64>,
    /// Held while what is written becomes durable, or is copied, or is replaced: what was flushed
    /// or copied is what was read before. Taken before any of `logs`.
    flushing: Mutex<()>,
    /// Per log the state's clock, for queries.
    clocks: Vec<AtomicU64>,
    /// Per log a time before which no key has a deadline; `u64::MAX`: none has one.
    deadlines: Vec<AtomicU64>,
    membership: MembershipStore,
    held: ScanSnapshots,
    work: WorkCounters,
    /// No caller waits any more for scans of all keys.
    are_scans_cancelled: AtomicBool,
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
                place: meta::Place::default(),
                sessions: Sessions::new(log, limits.max_sessions),
                needs_blocking_from: None,
            })
        };
        let machine = KvMachine {
            kv,
            limits,
            logs: (0..logs).map(fresh).collect(),
            applied_positions: (0..logs).map(|_| Mutex::new((0, 0))).collect(),
            flushed: (0..logs).map(|_| AtomicU64::new(0)).collect(),
            flushing: Mutex::new(()),
            clocks: (0..logs).map(|_| AtomicU64::new(0)).collect(),
            deadlines: (0..logs).map(|_| AtomicU64::new(u64::MAX)).collect(),
            membership: MembershipStore::new(logs),
            held: ScanSnapshots::default(),
            work: WorkCounters::default(),
            are_scans_cancelled: AtomicBool::new(false),
        };
        machine.load(!planted::has(Bug::SessionsForgotten))?;
        if planted::has(Bug::AppliedTwice) {
            for log in 0..logs {
                let mut state = machine.log(log)?;
                state.place.applied = state.place.applied.saturating_sub(1);
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
        if let Some(place) = self.applied_positions.get(usize::from(log)) {
            *place.lock().unwrap_or_else(PoisonError::into_inner) =
                (state.place.applied, state.place.term);
        }
        if let Some(clock) = self.clocks.get(usize::from(log)) {
            clock.store(state.place.clock_ms, Ordering::Release);
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
        self.membership.load(&self.kv)?;
        for number in 0..self.logs.len() as u16 {
            let mut log = self.log(number)?;
            log.sessions = Sessions::new(number, self.limits.max_sessions);
            let meta = self.kv.get(&meta::key(number), Mode::Blocking)?;
            log.place = read_meta(number, meta.as_deref())?;
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
            let loaded = matches!(key.len(), 19 | 21)
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

    /// Writes one call's changes and the applied places of its logs as one batch.
    fn write(
        &self,
        overlay: &Overlay<'_>,
        changes: &SessionChanges,
        applied_positions: &[([u8; 3], meta::Value)],
        mode: Mode,
    ) -> Result<(), ApplyError> {
        let puts = changes
            .puts
            .iter()
            .map(|(key, value)| Change::Put(key, value));
        let deletes = changes.deletes.iter().map(|key| Change::Delete(key));
        let mut first = applied_positions;
        if planted::has(Bug::AppliedSeparately) {
            let mut all = applied_positions
                .iter()
                .map(|(key, value)| Change::Put(key, value));
            self.kv.write(&mut all, mode)?;
        }
        if planted::has(Bug::GangHalfApplied) || planted::has(Bug::GangEvidenceLost) {
            first = &applied_positions[..1];
        }
        let metas = first.iter().map(|(key, value)| Change::Put(key, value));
        self.kv.write(
            &mut overlay.changes().chain(puts).chain(deletes).chain(metas),
            mode,
        )?;
        if planted::has(Bug::GangHalfApplied) && applied_positions.len() > 1 {
            let mut rest = applied_positions[1..]
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
        if mode == Mode::NonBlocking && state.needs_blocking_from == Some(state.place.applied) {
            return Err(ApplyError::WouldBlock);
        }
        let mut overlay = Overlay::new(&self.kv, mode, self.limits.max_value_bytes, self.count());
        let noted = self.deadlines.get(usize::from(log));
        overlay.records.lowest = noted.map_or(0, |noted| noted.load(Ordering::Acquire));
        let mut changes = SessionChanges::default();
        let mut done = Applied {
            replies: Vec::with_capacity(entries.len()),
            ..Applied::default()
        };
        let mut place = state.place;
        let mut attempt = || -> Result<(), ApplyError> {
            for entry in entries {
                if entry.index <= place.applied {
                    done.replies.push(Vec::new());
                    continue;
                }
                meta::check_next(log, place.applied, entry.index)?;
                let mut shares = [Share {
                    log,
                    index: entry.index,
                    sessions: &mut state.sessions,
                }];
                let from = place.commands_of(entry.payload);
                if done.replies.is_empty() {
                    done.from = from.into();
                }
                let rest = UnappliedPart {
                    payload: entry.payload,
                    wants_replies: entry.wants_replies,
                    from,
                    is_divisible: true,
                };
                let (shares, clock_ms) = (&mut shares, &mut place.clock_ms);
                let ran = self.run(&mut overlay, shares, &mut changes, rest, clock_ms)?;
                done.replies.push(ran.replies);
                if let Some(commands) = ran.part {
                    (place.commands, place.sum) = (commands, meta::sum(entry.payload));
                    done.is_part = true;
                    break;
                }
                place = meta::Place {
                    applied: entry.index,
                    term: entry.term,
                    clock_ms: place.clock_ms,
                    ..meta::Place::default()
                };
                if ran.ends_call {
                    break;
                }
            }
            if place == state.place {
                return Ok(());
            }
            let stored = (meta::key(log), meta::value(&place));
            self.write(&overlay, &changes, &[stored], mode)
        };
        match attempt() {
            Ok(()) => {
                state.sessions.commit();
                state.place = place;
                self.membership.note(&changes);
                self.note_deadlines(log, &overlay.records);
                self.work.note(&overlay.work);
                self.publish(log, state);
                Ok(done)
            }
            Err(error) => {
                state.sessions.roll_back();
                let is_behind = matches!(error, ApplyError::WouldBlock) && self.kv.is_behind();
                if overlay.is_loop_budget_spent() || is_behind {
                    state.needs_blocking_from = Some(state.place.applied);
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
            entry.index <= guard.place.applied
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
            meta::check_next(*log, guard.place.applied, entry.index)?;
        }
        let mut overlay = Overlay::new(&self.kv, mode, self.limits.max_value_bytes, self.count());
        let mut changes = SessionChanges::default();
        // One moment for all of the gang's logs.
        let clock_ms = guards.iter().map(|guard| guard.place.clock_ms).max();
        let mut clock_ms = clock_ms.unwrap_or(0);
        let mut attempt = || -> Result<Vec<Reply>, ApplyError> {
            let mut shares = Vec::with_capacity(parts.len());
            for (guard, (log, entry)) in guards.iter_mut().zip(parts) {
                shares.push(Share {
                    log: *log,
                    index: entry.index,
                    sessions: &mut guard.sessions,
                });
            }
            let (payload, wants_replies) = (parts[0].1.payload, parts[0].1.wants_replies);
            let rest = UnappliedPart {
                payload,
                wants_replies,
                from: 0,
                is_divisible: false,
            };
            let ran = self.run(&mut overlay, &mut shares, &mut changes, rest, &mut clock_ms)?;
            let place = |(log, entry): &(u16, EntryInput<'_>)| {
                let value = meta::value(&meta::Place {
                    applied: entry.index,
                    term: entry.term,
                    clock_ms,
                    ..meta::Place::default()
                });
                (meta::key(*log), value)
            };
            let applied_positions: Vec<_> = parts.iter().map(place).collect();
            self.write(&overlay, &changes, &applied_positions, mode)?;
            Ok(ran.replies)
        };
        let result = attempt();
        if result.is_ok() {
            self.work.note(&overlay.work);
        }
        for (guard, (log, entry)) in guards.iter_mut().zip(parts) {
            if result.is_ok() {
                guard.sessions.commit();
                guard.place = meta::Place {
                    applied: entry.index,
                    term: entry.term,
                    clock_ms,
                    ..meta::Place::default()
                };
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
            } if held || held::has_snapshot_id(cursor) => {
                self.held_scan(cursor, pattern, count, mode)
            }
            Query::Scan { .. } | Query::Keys { .. } | Query::DbSize => {
                self.walk_all(query, now_ms, mode)
            }
            _ => queries::query(&self.kv, query, &|slot| self.at(slot, now_ms), mode),
        }
    }

    fn set_replica_id(&self, replica: u64) {
        self.held.set_replica_id(replica);
    }

    fn tick(&self, now_us: u64) {
        self.held.tick(now_us);
    }

    fn held_snapshots(&self) -> usize {
        self.held.count()
    }

    fn members(&self, log: u16) -> Option<(u64, Vec<u8>)> {
        self.membership.members(log)
    }

    fn record(&self) -> Option<(u64, Vec<u8>)> {
        self.membership.record()
    }

    fn keeps_members(&self) -> bool {
        true
    }

    fn clock_ms(&self, log: u16) -> u64 {
        self.clocks
            .get(usize::from(log))
            .map_or(0, |clock| clock.load(Ordering::Acquire))
    }

    fn work_done(&self) -> WorkDone {
        WorkDone {
            largest_call: self.work.largest_call.load(Ordering::Relaxed),
            largest_command: self.work.largest_command.load(Ordering::Relaxed),
            reply_bytes: self.work.reply_bytes.load(Ordering::Relaxed),
            unwanted_reply_bytes: self.work.unwanted_reply_bytes.load(Ordering::Relaxed),
        }
    }

    fn next_deadline(&self, log: u16) -> Option<u64> {
        let noted = self.deadlines.get(usize::from(log))?;
        Some(noted.load(Ordering::Acquire)).filter(|deadline| *deadline < u64::MAX)
    }

    fn applied(&self, log: u16) -> (u64, u64) {
        let place = self.applied_positions.get(usize::from(log));
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
        // Nor is the state replaced between reading the applied positions and writing the files.
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
                    (log.place.applied + ahead, log.place.term)
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

    fn cancel_scans(&self) {
        self.are_scans_cancelled.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests;

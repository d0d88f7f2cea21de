//! The second level below a group's ring: draining into it, feeding followers and a replay from it,
//! and, where it is the only durable level, holding back what must not leave before it is durable
//! there. //= cyclone §3

use std::cell::RefCell;
use std::collections::VecDeque;

use cyclone_wal::flash::{
    FetchError, FetchId, FlashLog, FlashMode, FlashState, FlashStats, StoredEntry,
};
use cyclone_wal::ring::{Persisted, Ring};
use cyclone_wire::planted::{self, Bug};
use cyclone_wire::raftmsg::SnapshotMeta;
use cyclone_wire::ring::HardState;
use raft::eraftpb::Entry;
use raft::{GetEntriesContext, Ready as RaftReady};

use crate::error::ConsensusError;
use crate::group::Group;
use crate::group::Part;
use crate::message::OutMessage;
use crate::outbox::{Committed, Outbox};

/// Ranges of entries kept for messages to followers.
const RANGES: usize = 8;
/// Requests of raft-rs that may wait for one range: one per peer.
const ASKERS: usize = 9;
/// Ranges that may be asked for at once.
const WANTED: usize = 9;
/// Payload bytes read at once for a replay.
const REPLAY_BYTES: u64 = 1 << 20;
/// Failures of the device at one entry before it counts as unreadable: a read may fail temporarily.
const FAILURES: usize = 3;
/// The same at whatever entries, none of which was read since.
const FAILURES_IN_ALL: usize = 16;

/// raft-rs has asked for entries that are not in the ring.
struct Wanted {
    low: u64,
    high: u64,
    contexts: Vec<GetEntriesContext>,
    fetch: Option<FetchId>,
}

/// A step whose entries and hard state are on their way to flash.
struct FlashFlushPoint {
    /// raft-rs's number of the step.
    number: u64,
    last: u64,
    /// Number of the hard state's change.
    version: u64,
    /// Page below which all of it stands.
    position: Option<u64>,
    messages: Vec<OutMessage>,
    snapshot: Option<u64>,
}

/// What a step that is being persisted means for flash, where that is the only durable level.
pub(crate) struct PendingFlashStep {
    /// It says something new.
    changes: bool,
    new_term: bool,
}

/// A part of the replay is handed out while the next one is read.
#[derive(Default)]
struct Replay {
    fetch: Option<FetchId>,
    entries: Vec<StoredEntry>,
    next: Vec<StoredEntry>,
}

/// What a group keeps about its flash log.
pub(crate) struct FlashTier {
    pub(crate) log: FlashLog,
    marks: VecDeque<FlashFlushPoint>,
    /// The step, by raft-rs's number, that made a new term known and is not durable yet.
    new_term: Option<u64>,
    wanted: RefCell<Vec<Wanted>>,
    ranges: VecDeque<Vec<StoredEntry>>,
    replay: Replay,
    /// What is read once more for an archive.
    pub(crate) archive: Part,
    /// Something on flash did not read back: followers that need it get a checkpoint.
    pub(crate) unreadable: Option<FetchError>,
    /// It has not been reported yet.
    unreported: bool,
    /// Entries at which the device failed and that have not been read since, each as often as it
    /// did.
    failed: Vec<u64>,
    now_us: u64,
}

impl FlashTier {
    pub(crate) fn new(log: FlashLog) -> FlashTier {
        FlashTier {
            log,
            marks: VecDeque::new(),
            new_term: None,
            wanted: RefCell::default(),
            ranges: VecDeque::new(),
            replay: Replay::default(),
            archive: Part::default(),
            unreadable: None,
            unreported: false,
            failed: Vec::new(),
            now_us: 0,
        }
    }

    pub(crate) fn is_only(&self) -> bool {
        self.log.mode() == FlashMode::Only
    }

    /// An entry that was fetched for a follower.
    pub(crate) fn fetched(&self, index: u64, term: u64) -> Option<&StoredEntry> {
        let found = self.ranges.iter().find_map(|range| in_range(range, index));
        found.filter(|entry| entry.term == term)
    }

    /// An entry of the part of a replay that was handed out last.
    pub(crate) fn replayed(&self, index: u64) -> Option<&StoredEntry> {
        in_range(&self.replay.entries, index)
    }

    /// Notes that raft-rs wants entries that have to be read first.
    pub(crate) fn want(&self, low: u64, high: u64, asker: GetEntriesContext) {
        let mut wanted = self.wanted.borrow_mut();
        let room = wanted.len() < WANTED;
        match wanted.iter_mut().find(|wanted| wanted.low == low) {
            Some(known) if known.contexts.len() < ASKERS => known.contexts.push(asker),
            None if room => wanted.push(Wanted {
                low,
                high,
                contexts: vec![asker],
                fetch: None,
            }),
            // raft-rs asks again with the follower's next answer.
            _ => {}
        }
    }

    fn begin_fetches(&mut self, ring_first: u64, max_bytes: u64) {
        for wanted in self.wanted.borrow_mut().iter_mut() {
            if wanted.fetch.is_none() {
                let to = (wanted.high - 1)
                    .min(ring_first.saturating_sub(1))
                    .max(wanted.low);
                // Refused ones are dropped below: no reader waits without end.
                wanted.fetch = self.log.fetch(wanted.low, to, max_bytes).ok();
            }
        }
        self.wanted
            .borrow_mut()
            .retain(|wanted| wanted.fetch.is_some());
    }

    /// Takes what has been read; answers the requests that can go on.
    fn take_fetched(&mut self) -> Vec<GetEntriesContext> {
        let mut go_on = Vec::new();
        while let Some(fetched) = self.log.take_fetched() {
            self.note_outcome(&fetched.result);
            let result = fetched.result.map_err(drop);
            if self.replay.fetch == Some(fetched.id) {
                self.replay.fetch = None;
                self.replay.next = result.unwrap_or_default();
                continue;
            }
            let result = match self.archive.take(fetched.id, result) {
                Ok(()) => continue,
                Err(result) => result,
            };
            let mut wanted = self.wanted.borrow_mut();
            let place = wanted
                .iter()
                .position(|wanted| wanted.fetch == Some(fetched.id));
            let Some(place) = place else { continue };
            let wanted = wanted.swap_remove(place);
            if let Ok(entries) = result {
                if self.ranges.len() >= RANGES {
                    self.ranges.pop_front();
                }
                self.ranges.push_back(entries);
                go_on.extend(wanted.contexts);
            } else if self.unreadable.is_some() {
                // They learn that there is nothing to be had, and ask for a checkpoint.
                go_on.extend(wanted.contexts);
            }
        }
        go_on
    }

    /// What a fetch says about flash.
    fn note_outcome(&mut self, result: &Result<Vec<StoredEntry>, FetchError>) {
        let error = match result {
            Ok(entries) => {
                self.failed
                    .retain(|index| in_range(entries, *index).is_none());
                return;
            }
            Err(error) => *error,
        };
        let given_up = match error {
            FetchError::Corrupt { .. } => true,
            FetchError::Device { index, .. } => {
                self.failed.push(index);
                let here = self.failed.iter().filter(|failed| **failed == index);
                here.count() >= FAILURES || self.failed.len() >= FAILURES_IN_ALL
            }
            FetchError::Missing { .. } | FetchError::Busy(_) => false,
        };
        if given_up && self.unreadable.is_none() {
            (self.unreadable, self.unreported) = (Some(error), true);
        }
    }

    /// What did not read back is gone.
    fn is_mended(&mut self) {
        (self.unreadable, self.unreported) = (None, false);
        self.failed.clear();
    }

    /// Moves entries on to flash: committed ones, or as the only level all.
    fn pump(&mut self, ring: &Ring, committed: u64) -> bool {
        let upto = match self.log.mode() {
            FlashMode::Second => committed.min(ring.last_index()),
            FlashMode::Only => ring.last_index(),
        };
        let moved = self.log.pump(ring, upto, self.now_us);
        for mark in &mut self.marks {
            if mark.position.is_none() && self.log.has(mark.last, mark.version) {
                mark.position = Some(self.log.position());
            }
        }
        moved
    }
}

fn in_range(range: &[StoredEntry], index: u64) -> Option<&StoredEntry> {
    let first = range.first()?.index;
    let place = usize::try_from(index.checked_sub(first)?).ok()?;
    range.get(place)
}

/// The second level at one moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FlashStatus {
    /// How it is doing.
    pub state: FlashState,
    /// Whether it is the only durable level.
    pub only: bool,
    /// First entry on flash.
    pub first: u64,
    /// Every entry up to this one is durable there.
    pub durable: u64,
    /// Share of the budget in use, 0 to 1.
    pub fill: f64,
    /// Bytes in use, and bytes of the budget.
    pub used_bytes: (u64, u64),
    /// Something did not read back.
    pub unreadable: bool,
    /// Counters.
    pub stats: FlashStats,
}

impl Group {
    fn level(&self) -> Option<&FlashTier> {
        self.raw.store().flash.as_ref()
    }

    /// An entry of the part of a replay that was handed out last.
    pub(crate) fn replayed(&self, index: u64) -> Option<&StoredEntry> {
        self.level()?.replayed(index)
    }

    pub(crate) fn level_mut(&mut self) -> Option<&mut FlashTier> {
        self.raw.mut_store().flash.as_mut()
    }

    /// Whether flash is the only durable level.
    pub(crate) fn is_behind_flash(&self) -> bool {
        self.level().is_some_and(FlashTier::is_only)
    }

    /// The second level at `now_us`, if there is one.
    pub fn flash_status(&self, now_us: u64) -> Option<FlashStatus> {
        self.level().map(|level| FlashStatus {
            state: level.log.state(now_us),
            only: level.is_only(),
            first: level.log.first_index(),
            durable: level.log.durable_index(),
            fill: level.log.fill(),
            used_bytes: level.log.used_bytes(),
            unreadable: level.unreadable.is_some(),
            stats: level.log.stats(),
        })
    }

    /// The flash log, for inspection.
    pub fn flash(&self) -> Option<&FlashLog> {
        self.level().map(|level| &level.log)
    }

    /// When [`Group::poll_flash`] wants to be called without an event, in microseconds of the clock
    /// that it is given.
    pub fn flash_deadline_us(&self) -> u64 {
        self.level()
            .map_or(u64::MAX, |level| level.log.deadline_us())
    }

    /// What may go to flash: what is about to be replaced still stands in the ring, and may lie
    /// below the commit index.
    fn committed_in_ring(&self) -> u64 {
        let log = &self.raw.raft.raft_log;
        match log.unstable_snapshot() {
            Some(_) => 0,
            None => log.committed.min(log.persisted),
        }
    }

    /// Hands the second level what has been committed since, if NVM is the first. Call it at the
    /// end of every step, when all that others wait for is on its way. Returns whether anything
    /// moved.
    //= cyclone §3
    pub fn drain_flash(&mut self, now_us: u64) -> bool {
        let committed = self.committed_in_ring();
        let view = self.raw.mut_store();
        let level = view.flash.as_mut().filter(|level| !level.is_only());
        level.is_some_and(|level| {
            level.now_us = now_us;
            level.pump(&view.ring, committed)
        })
    }

    /// Moves the second level on: takes back what the device has done, as the only durable level
    /// hands it more, and tells raft-rs what has become durable or readable. Call it in every step,
    /// before and after [`Group::take_ready`]. Answers how much was done, and what may leave now.
    ///
    /// # Errors
    /// The group is of no further use.
    pub fn poll_flash(&mut self, now_us: u64) -> Result<(usize, Outbox), ConsensusError> {
        let committed = self.committed_in_ring();
        let view = self.raw.mut_store();
        let Some(level) = view.flash.as_mut() else {
            return Ok((0, Outbox::default()));
        };
        level.now_us = now_us;
        level.begin_fetches(view.ring.first_index(), view.max_append_bytes);
        let mut work = level.log.poll(now_us);
        if level.is_only() {
            work += usize::from(level.pump(&view.ring, committed));
        }
        let go_on = level.take_fetched();
        for asker in go_on {
            self.raw.on_entries_fetched(asker);
        }
        let outbox = self.release_marks()?;
        Ok((work, outbox))
    }

    /// Releases the messages of all steps that are durable on flash by now, and notifies raft-rs.
    fn release_marks(&mut self) -> Result<Outbox, ConsensusError> {
        let mut outbox = Outbox::default();
        while let Some(level) = self.level_mut() {
            let done = level.marks.front().and_then(|mark| mark.position);
            let Some(durable) = done.and_then(|position| level.log.witness(position)) else {
                break;
            };
            let Some(mark) = level.marks.pop_front() else {
                break;
            };
            level.new_term = level.new_term.filter(|number| *number != mark.number);
            outbox.release(&durable, mark.messages);
            self.raw.on_persist_ready(mark.number);
            if let Some(index) = mark.snapshot {
                self.raw.advance_apply_to(index);
            }
        }
        Ok(outbox)
    }

    /// Where flash is the only durable level, before a step is written to the ring: what it means
    /// for flash.
    pub(crate) fn stage_flash_step(
        &mut self,
        entries: &[Entry],
        hard_state: Option<&HardState>,
        is_reset: bool,
    ) -> PendingFlashStep {
        let term = self.raw.store().ring.hard_state().term;
        let replaced = entries.first().map(|entry| entry.index);
        let replaced = replaced.filter(|index| *index <= self.raw.store().ring.last_index());
        if let (Some(index), Some(level)) = (replaced, self.level_mut()) {
            level.log.rewind(index);
        }
        PendingFlashStep {
            changes: hard_state.is_some() || !entries.is_empty() || is_reset,
            new_term: hard_state.is_some_and(|state| state.term > term),
        }
    }

    /// The counterpart of `finish_step` where flash is the only durable level: the ring has it,
    /// flash gets it; a leader's appends may leave at once, everything else waits. The step itself
    /// counts when it is durable.
    pub(crate) fn finish_flash_step(
        &mut self,
        mut ready: RaftReady,
        snapshot: Option<&SnapshotMeta>,
        behind: PendingFlashStep,
        durable: Persisted,
    ) -> Result<Outbox, ConsensusError> {
        let PendingFlashStep { changes, new_term } = behind;
        let last = durable.last();
        let (mut early, mut held) = (ready.take_messages(), ready.take_persisted_messages());
        let committed = ready.take_committed_entries();
        let reads = ready.take_read_states();
        let role_changed = ready.ss().is_some();
        let number = ready.number();
        self.raw.advance_append_async(ready);
        if let Some(level) = self.level_mut() {
            level.new_term = if new_term {
                Some(number)
            } else {
                level.new_term
            };
            if level.new_term.is_some() {
                // Who needs no vote but its own leads before that is durable. What it sent then, it
                // might send otherwise in the same term after a crash.
                early.append(&mut held);
                held = std::mem::take(&mut early);
            }
        }
        if let Some(meta) = snapshot {
            self.delivered = self.delivered.max(meta.index);
        }
        let mut outbox = Outbox::open(durable);
        self.update_uncommitted_bytes(role_changed);
        self.collect_committed(&mut outbox, early, committed)?;
        let mut later = Outbox::default();
        self.collect_committed(&mut later, held, Vec::new())?;
        self.complete(&mut outbox, reads, role_changed);
        let view = self.raw.mut_store();
        let state = view.ring.hard_state().clone();
        let Some(level) = view.flash.as_mut() else {
            return Err(ConsensusError::Internal("there is no flash log"));
        };
        for mark in level.marks.iter_mut() {
            mark.last = mark.last.min(last);
        }
        let version = level.log.set_hard_state(state);
        if !changes && level.marks.is_empty() && level.log.has(last, version) {
            // Nothing that it says waits for flash.
            outbox.messages.append(&mut later.messages);
            self.raw.on_persist_ready(number);
            return Ok(outbox);
        }
        level.marks.push_back(FlashFlushPoint {
            number,
            last,
            version,
            position: None,
            messages: later.messages,
            snapshot: snapshot.map(|meta| meta.index),
        });
        Ok(outbox)
    }

    /// The log begins anew behind an index: flash, too.
    pub(crate) fn reset_flash(&mut self, index: u64, term: u64) {
        if let Some(level) = self.level_mut() {
            level.log.reset(index, term);
            level.ranges.clear();
            level.is_mended();
        }
    }

    /// What has not read back, once.
    pub fn take_unreadable(&mut self) -> Option<FetchError> {
        let level = self.level_mut().filter(|level| level.unreported)?;
        level.unreported = false;
        level.unreadable
    }

    /// Leaves behind on flash what did not read back, once the store survives without it: `flushed`
    /// is the last entry that it would still have after a crash. Until nothing depends on it any
    /// more, the ring is not to be released beyond `flushed` where it has what flash lacks. Returns
    /// whether it would help if the store flushed.
    pub fn discard_unreadable(&mut self, flushed: u64) -> bool {
        let applied = self.raw.raft.raft_log.applied;
        let view = self.raw.mut_store();
        let Some(level) = view.flash.as_mut() else {
            return false;
        };
        let Some(page) = level.unreadable.as_ref().and_then(FetchError::page) else {
            return false;
        };
        let (log, through) = (&mut level.log, flushed.min(applied));
        if log.has_left(page) {
            level.is_mended();
            return false;
        }
        match log.mode() {
            FlashMode::Second => {
                let before = view.ring.first_index() - 1;
                if through >= before {
                    // The ring has everything behind that, and is drained once more.
                    log.leave(page, before, view.ring.term(before).unwrap_or(0));
                }
                through < before
            }
            FlashMode::Only => {
                // What was reported is durable nowhere else: it cannot be written anew, only be
                // outlived.
                log.trim(through);
                !log.trim_leaves(page, through) && log.trim_leaves(page, applied)
            }
        }
    }

    /// Lets the ring drop entries up to `through` that are applied and durable on flash. Without a
    /// second level nothing happens.
    ///
    /// # Errors
    /// The ring failed; the group is of no further use.
    pub fn release(&mut self, through: u64) -> Result<(), ConsensusError> {
        let applied = self.raw.raft.raft_log.applied;
        let view = self.raw.mut_store();
        let Some(level) = &view.flash else {
            return Ok(());
        };
        let on_flash = match planted::has(Bug::FlashFreedEarly) {
            true => level.log.last_index(),
            false => level.log.durable_index(),
        };
        let mut through = through.min(applied).min(on_flash);
        if level.is_only() {
            // After the loss of memory the ring is filled again from there on, and must have room
            // for it.
            through = through.min(level.log.durable_commit());
        }
        if through >= view.ring.first_index() {
            let trimmed = view.ring.trim(through);
            self.failed |= trimmed.is_err();
            trimmed?;
        }
        Ok(())
    }

    /// Drops entries up to `through` from flash; what may go is the caller's to know.
    pub(crate) fn trim_flash(&mut self, through: u64) -> Option<u64> {
        let level = self.level_mut()?;
        level.log.trim(through);
        Some(self.raw.store().first())
    }

    /// The next entries of a replay: those from `from` up to `to` that are on flash and not in the
    /// ring, in order, a part at a time. Their payloads are had by [`Group::copy_payload`] until
    /// the next part. Empty: ask again later.
    ///
    /// # Errors
    /// Flash does not read back what the store lacks.
    pub fn replay(&mut self, from: u64, to: u64) -> Result<Vec<Committed>, ConsensusError> {
        let Some(level) = self.level_mut() else {
            return Ok(Vec::new());
        };
        if let Some(error) = level.unreadable {
            return Err(ConsensusError::Flash(error));
        }
        let replay = &mut level.replay;
        let (mut begin, mut committed) = (from, Vec::new());
        if replay.next.first().is_some_and(|next| next.index == from) {
            replay.entries = std::mem::take(&mut replay.next);
            committed.extend(replay.entries.iter().map(|entry| Committed {
                index: entry.index,
                term: entry.term,
                kind: entry.kind,
                len: entry.payload.len() as u32,
            }));
            begin += committed.len() as u64;
        }
        if replay.fetch.is_none() && begin <= to {
            match level.log.fetch(begin, to, REPLAY_BYTES) {
                Ok(id) => replay.fetch = Some(id),
                Err(FetchError::Busy(_)) => {}
                // Told when it is asked for.
                Err(_) if begin > from => {}
                Err(error) => return Err(ConsensusError::Flash(error)),
            }
        }
        Ok(committed)
    }

    /// Last entry that has to be replayed from flash, because the ring begins behind it.
    pub fn replay_through(&self) -> u64 {
        self.raw.store().ring.first_index() - 1
    }
}

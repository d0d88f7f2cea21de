//! From a snapshot to a later moment: the archived entries of all logs, applied as a replica
//! applies them, up to a cut.
//!
//! The cut is consistent by the rule that replicas follow anyway: a log stands still at a gang's
//! entry until all participants' logs have told enough. A gang whose shares are not all before the
//! cut is undecided there, so no log passes it, and none what comes after it. //= cyclone §5.1

use std::collections::VecDeque;

use cyclone_consensus::{Decision, GangTable};
use cyclone_store::{ApplyError, EntryInput, Mode, StateMachine};
use cyclone_wire::archive::stamp_ms;
use cyclone_wire::gang::{FIXED_BYTES, Head};

use super::behind::{self, STEP_BACK_MS};
use super::reader::{ArchiveDir, ArchiveError, Archived, LogReader};

/// One log's entries in order, to be applied.
pub trait EntrySource {
    /// The next entry; `None` at the end.
    ///
    /// # Errors
    /// What is damaged or missing.
    fn next_entry(&mut self) -> Result<Option<Archived>, ArchiveError>;

    /// The latest stamp before the first entry; 0: none is known.
    fn before_ms(&self) -> u64 {
        0
    }

    /// The same where there is no entry.
    fn stamp_before_end(&self) -> u64 {
        0
    }
}

impl EntrySource for LogReader<'_> {
    fn next_entry(&mut self) -> Result<Option<Archived>, ArchiveError> {
        LogReader::next_entry(self)
    }

    fn before_ms(&self) -> u64 {
        LogReader::before_ms(self)
    }

    fn stamp_before_end(&self) -> u64 {
        LogReader::stamp_before_end(self)
    }
}

/// Entries of a log read before they are applied.
const AHEAD: usize = 256;
/// Payload bytes of them.
const AHEAD_BYTES: usize = 4 << 20;
/// Entries applied in one call.
const APPLY_ENTRIES: usize = 64;

/// How far to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// As far as the archive goes.
    End,
    /// Everything stamped up to this moment, in milliseconds since 1970.
    Time(u64),
    /// Up to this entry of a log; the others as far as its stamp, or further where its gangs need
    /// it. Where clocks had been ahead and were put right before it, the others go as far as their
    /// last entry with a stamp up to its own.
    Index(u16, u64),
}

/// The first entry of a log that a replay has left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FirstExcluded {
    /// Its index.
    pub index: u64,
    /// Its own stamp, in milliseconds since 1970, if it carries one.
    pub stamp_ms: Option<u64>,
}

/// Where one log has got to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The last entry applied.
    pub index: u64,
    /// Its term.
    pub term: u64,
    /// The latest stamp up to it, in milliseconds since 1970; 0: none is known.
    pub clock_ms: u64,
    /// The archive ended before the cut was seen: later entries, if there were any, are not in it.
    pub at_end: bool,
    /// Entries before the cut that could not be applied: a gang among them is not whole there.
    pub held: u64,
    /// What comes next in the archive.
    pub left_out: Option<FirstExcluded>,
    /// Entries behind the cut whose stamps were to be checked, but are damaged or missing. Nothing
    /// of them is needed.
    pub unseen: u64,
}

/// Where a replay has got to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplayEnd {
    /// By log.
    pub places: Vec<Place>,
    /// Entries applied.
    pub entries: u64,
    /// Operations over several logs that were given up by [`replay_to_end`].
    pub given_up: u64,
}

/// Why a replay did not come to its end.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The archive cannot be used.
    #[error(transparent)]
    Archive(#[from] ArchiveError),
    /// The store failed.
    #[error("store: {0}")]
    Store(#[from] ApplyError),
    /// The snapshot holds more than was asked for.
    #[error("the snapshot holds log {log} up to entry {index}{}, which is later than that moment: begin with an earlier snapshot", stamped(*.clock_ms))]
    SnapshotLater {
        /// The log.
        log: u16,
        /// The snapshot's applied index.
        index: u64,
        /// The stamp, if that is what is too late.
        clock_ms: u64,
    },
    /// The stamps do not say where the moment is.
    #[error(
        "log {log} is cut before entry {cut} (stamp {cut_ms} ms since 1970), but entry {index} behind it has stamp {stamp_ms}, which is not later than that moment: a leader's clock was ahead then, or behind afterwards"
    )]
    ClockBack {
        /// The log.
        log: u16,
        /// The first entry beyond the moment.
        cut: u64,
        /// Its stamp.
        cut_ms: u64,
        /// The first entry behind it that is stamped before the moment, by a clock that had gone
        /// back by seconds.
        index: u64,
        /// Its stamp.
        stamp_ms: u64,
        /// The last entry that is stamped before the moment.
        last: u64,
    },
    /// The entry asked for is not to be had.
    #[error("entry {index} of log {log} cannot be reached: {what}")]
    NotReached {
        /// The log.
        log: u16,
        /// The entry.
        index: u64,
        /// Why.
        what: String,
    },
}

fn stamped(clock_ms: u64) -> String {
    match clock_ms {
        0 => String::new(),
        ms => format!(" (stamp {ms} ms since 1970)"),
    }
}

struct Waiting {
    entry: Archived,
    /// A gang's entry, and how long the head is.
    gang: Option<(Head, usize)>,
    skip: bool,
}

struct LogCursor<'a> {
    source: Box<dyn EntrySource + 'a>,
    /// Read and not yet known to be before the cut.
    next: Option<Archived>,
    queue: VecDeque<Waiting>,
    bytes: usize,
    /// The last index, or the latest stamp, before the cut.
    last_index: u64,
    last_ms: u64,
    /// The clock was set to a time before the cut by this entry: what is before it was written
    /// before the cut.
    last_set: u64,
    /// As the latest stamp, but by index.
    last_stamped: u64,
    /// Entries to be taken although they are behind the cut: another log's gang needs them.
    extra: u64,
    cut_seen: bool,
    place: Place,
}

impl LogCursor<'_> {
    /// Takes the next entry if it is before the cut.
    fn pull(&mut self) -> Result<Option<Archived>, ArchiveError> {
        if self.next.is_none() {
            self.next = self.source.next_entry()?;
            self.place.at_end = self.next.is_none();
        }
        let beyond = |entry: &Archived| {
            let late = (entry.clock_ms > self.last_ms && entry.index > self.last_set)
                || entry.index > self.last_stamped;
            entry.index > self.last_index || (late && self.extra == 0)
        };
        self.cut_seen = self.next.as_ref().is_some_and(beyond);
        if self.cut_seen {
            return Ok(None);
        }
        self.extra = self.extra.saturating_sub(1);
        Ok(self.next.take())
    }

    fn has_room(&self, ahead: usize) -> bool {
        let is_short = self.queue.len() < AHEAD * ahead && self.bytes < AHEAD_BYTES * ahead;
        self.queue.is_empty() || is_short
    }

    fn pop(&mut self) -> Option<Waiting> {
        let done = self.queue.pop_front()?;
        self.bytes -= done.entry.payload.len();
        let entry = &done.entry;
        (self.place.index, self.place.term) = (entry.index, entry.term);
        self.place.clock_ms = entry.clock_ms;
        Some(done)
    }

    /// The last entry known to be before the cut, and the latest stamp up to it.
    fn read_to(&self) -> (u64, u64) {
        let last = self.queue.back().map(|last| &last.entry);
        last.map_or((self.place.index, self.place.clock_ms), |last| {
            (last.index, last.clock_ms)
        })
    }

    fn left_out(&self) -> Option<FirstExcluded> {
        let held = self.queue.front().map(|next| &next.entry);
        held.or(self.next.as_ref()).map(|entry| FirstExcluded {
            index: entry.index,
            stamp_ms: stamp_ms(&entry.payload),
        })
    }
}

fn gang_of(payload: &[u8]) -> Option<(Head, usize)> {
    Head::length(payload.first_chunk::<FIXED_BYTES>()?)?;
    Head::decode(payload).ok()
}

/// Applies the entries behind `from` (per log, index and term) up to the cut. Without a store it
/// only finds out where that is, and reads on to see whether the stamps behind a cut by time agree
/// with it.
///
/// # Errors
/// See [`ReplayError`]. The store has then a state between the two, and is of no use.
pub fn replay(
    archive_dir: &ArchiveDir,
    from: &[(u64, u64)],
    until: Until,
    store: Option<&dyn StateMachine>,
) -> Result<ReplayEnd, ReplayError> {
    let mut run = Run::new(archive_dir, from, until)?;
    run.store = store;
    run.check_store()?;
    loop {
        run.fill()?;
        if run.advance()? || run.extend()? {
            continue;
        }
        return run.end();
    }
}

/// Applies everything that the sources have behind `from` (per log, index and term), where nothing
/// will ever follow them. An operation over several logs that is not whole in them is given up, as
/// a new leader's first entry in each log would decide. The entries behind it are applied. Without
/// a store nothing is applied.
///
/// # Errors
/// See [`ReplayError`]. The store has then a state between the two, and is of no use.
pub fn replay_to_end<'a>(
    sources: Vec<Box<dyn EntrySource + 'a>>,
    from: &[(u64, u64)],
    store: Option<&'a dyn StateMachine>,
) -> Result<ReplayEnd, ReplayError> {
    let lanes = sources.into_iter().zip(from);
    let lanes = lanes.map(|(source, &(index, term))| LogCursor::new(source, index, term));
    let mut run = Run {
        archive_dir: None,
        lanes: lanes.collect(),
        gang_table: GangTable::new(&from.iter().map(|(_, term)| *term).collect::<Vec<_>>()),
        store,
        until: Until::End,
        entries: 0,
        ahead: 1,
        is_final: false,
        given_up: 0,
    };
    loop {
        run.fill()?;
        if run.advance()? {
            continue;
        }
        if run.is_final {
            return run.end();
        }
        // Logs can wait for each other's entries further behind.
        if run.lanes.iter().any(|lane| !lane.place.at_end) {
            run.ahead *= 2;
        } else {
            run.close();
        }
    }
}

struct Run<'a> {
    /// Where stamps behind a cut are looked up.
    archive_dir: Option<&'a ArchiveDir>,
    lanes: Vec<LogCursor<'a>>,
    gang_table: GangTable,
    store: Option<&'a dyn StateMachine>,
    until: Until,
    entries: u64,
    /// How many times [`AHEAD`] is read ahead.
    ahead: usize,
    /// The gang table was notified that nothing follows.
    is_final: bool,
    given_up: u64,
}

impl<'a> LogCursor<'a> {
    /// A lane without a cut.
    fn new(source: Box<dyn EntrySource + 'a>, index: u64, term: u64) -> LogCursor<'a> {
        LogCursor {
            source,
            next: None,
            queue: VecDeque::new(),
            bytes: 0,
            last_index: u64::MAX,
            last_ms: u64::MAX,
            last_set: 0,
            last_stamped: u64::MAX,
            extra: 0,
            cut_seen: false,
            place: Place {
                index,
                term,
                clock_ms: 0,
                at_end: false,
                held: 0,
                left_out: None,
                unseen: 0,
            },
        }
    }
}

impl<'a> Run<'a> {
    fn new(
        archive_dir: &'a ArchiveDir,
        from: &[(u64, u64)],
        until: Until,
    ) -> Result<Run<'a>, ReplayError> {
        // The second, if it is another: the own stamp of the entry asked for.
        let (latest, own) = match until {
            Until::End => (u64::MAX, None),
            Until::Time(ms) => (ms, None),
            Until::Index(log, index) => {
                let (latest, own) = stamp_at(archive_dir, from, log, index)?;
                let is_back = latest.saturating_sub(own) > STEP_BACK_MS;
                (latest, is_back.then_some(own))
            }
        };
        let mut lanes = Vec::new();
        for (log, &(index, term)) in (0_u16..).zip(from) {
            let named = matches!(until, Until::Index(named, _) if named == log);
            let mut lane =
                LogCursor::new(Box::new(archive_dir.read(log, index, term)), index, term);
            if let (Until::Index(_, index), true) = (until, named) {
                lane.last_index = index;
            }
            if own.is_none() && !named {
                lane.last_ms = latest;
            }
            if let Until::Time(ms) = until {
                lane.last_set = archive_dir.last_set(log, index, ms);
            }
            if let (Some(own), false) = (own, named) {
                lane.last_stamped = behind::last_stamped(archive_dir, log, index, own);
            }
            lanes.push(lane);
        }
        let terms: Vec<u64> = from.iter().map(|(_, term)| *term).collect();
        let mut run = Run {
            archive_dir: Some(archive_dir),
            lanes,
            gang_table: GangTable::new(&terms),
            store: None,
            until,
            entries: 0,
            ahead: 1,
            is_final: false,
            given_up: 0,
        };
        run.check_begin(latest)?;
        Ok(run)
    }

    /// What the snapshot holds must be before the cut.
    fn check_begin(&mut self, latest: u64) -> Result<(), ReplayError> {
        for (log, lane) in (0_u16..).zip(&mut self.lanes) {
            // The first entry behind the snapshot tells the stamps of those before it.
            lane.next = lane.source.next_entry()?;
            let before = match &lane.next {
                Some(_) => lane.source.before_ms(),
                None => lane.source.stamp_before_end(),
            };
            lane.place.clock_ms = before;
            let index = lane.place.index;
            let was_set = lane.last_set > index;
            let late = matches!(self.until, Until::Time(_)) && before > latest && !was_set;
            if late || index > lane.last_index {
                return Err(ReplayError::SnapshotLater {
                    log,
                    index,
                    clock_ms: if late { before } else { 0 },
                });
            }
        }
        Ok(())
    }

    /// The store itself knows the latest stamp in it, whatever the archive has.
    fn check_store(&self) -> Result<(), ReplayError> {
        let (Some(store), Until::Time(latest)) = (self.store, self.until) else {
            return Ok(());
        };
        for (log, lane) in (0_u16..).zip(&self.lanes) {
            let clock_ms = store.clock_ms(log);
            if clock_ms > latest && lane.last_set <= lane.place.index {
                return Err(ReplayError::SnapshotLater {
                    log,
                    index: lane.place.index,
                    clock_ms,
                });
            }
        }
        Ok(())
    }

    /// Reads ahead, and tells the book.
    fn fill(&mut self) -> Result<(), ReplayError> {
        for (log, lane) in self.lanes.iter_mut().enumerate() {
            while lane.has_room(self.ahead)
                && let Some(entry) = lane.pull()?
            {
                let gang = gang_of(&entry.payload);
                let head = gang.as_ref().map(|(head, _)| head.clone());
                self.gang_table
                    .committed(log, entry.index, entry.term, head);
                lane.bytes += entry.payload.len();
                lane.queue.push_back(Waiting {
                    entry,
                    gang,
                    skip: false,
                });
            }
        }
        Ok(())
    }

    /// Applies what can be; returns whether anything moved.
    fn advance(&mut self) -> Result<bool, ReplayError> {
        let mut moved = false;
        for log in 0..self.lanes.len() {
            let stop = self.gang_table.stop(log);
            moved |= self.apply(log, stop)?;
            let front = self.lanes[log].queue.front().map(|next| next.entry.index);
            if stop.is_none() || front != stop {
                continue;
            }
            match self.gang_table.decide(log) {
                Decision::Wait => {}
                Decision::Skip => {
                    if let Some(front) = self.lanes[log].queue.front_mut() {
                        front.skip = true;
                        self.gang_table.passed(log, front.entry.index);
                        self.given_up += u64::from(self.is_final);
                        moved = true;
                    }
                }
                Decision::Together { apply, entries } => moved |= self.together(apply, &entries)?,
            }
        }
        Ok(moved)
    }

    fn apply(&mut self, log: usize, stop: Option<u64>) -> Result<bool, ReplayError> {
        let lane = &mut self.lanes[log];
        let before = self.entries;
        loop {
            let inputs: Vec<EntryInput<'_>> = lane
                .queue
                .iter()
                .take(APPLY_ENTRIES)
                .take_while(|next| stop.is_none_or(|stop| next.entry.index < stop))
                .map(|next| EntryInput {
                    index: next.entry.index,
                    term: next.entry.term,
                    payload: if next.skip { &[] } else { &next.entry.payload },
                    wants_replies: false,
                })
                .collect();
            let mut count = inputs.len();
            if count == 0 {
                return Ok(self.entries > before);
            }
            if let Some(store) = self.store {
                count = store.apply(log as u16, &inputs, Mode::Blocking)?.whole();
            }
            drop(inputs);
            (0..count).for_each(|_| drop(lane.pop()));
            self.entries += count as u64;
        }
    }

    fn together(&mut self, apply: bool, entries: &[(u16, u64)]) -> Result<bool, ReplayError> {
        let front = |lane: &LogCursor<'_>| lane.queue.front().map(|next| next.entry.index);
        let there =
            |(log, index): &(u16, u64)| front(&self.lanes[usize::from(*log)]) == Some(*index);
        if !entries.iter().all(there) {
            return Ok(false);
        }
        let mut parts = Vec::with_capacity(entries.len());
        for &(log, index) in entries {
            if let Some(next) = self.lanes[usize::from(log)].queue.front() {
                let at = next.gang.as_ref().map_or(0, |(_, at)| *at);
                let payload: &[u8] = match apply {
                    true => &next.entry.payload[at.min(next.entry.payload.len())..],
                    false => &[],
                };
                let term = next.entry.term;
                let input = EntryInput {
                    index,
                    term,
                    payload,
                    wants_replies: false,
                };
                parts.push((log, input));
            }
        }
        if let Some(store) = self.store {
            store.apply_gang(&parts, Mode::Blocking)?;
        }
        drop(parts);
        for &(log, index) in entries {
            self.lanes[usize::from(log)].pop();
            self.gang_table.passed(usize::from(log), index);
            self.entries += 1;
        }
        Ok(true)
    }

    /// Tells the book of an entry of a later term in each log: what is not whole by then never will
    /// be.
    fn close(&mut self) {
        self.is_final = true;
        let last = |lane: &LogCursor<'_>| {
            let last = lane
                .queue
                .back()
                .map(|last| (last.entry.index, last.entry.term));
            last.unwrap_or((lane.place.index, lane.place.term))
        };
        let ends: Vec<(u64, u64)> = self.lanes.iter().map(last).collect();
        let term = ends.iter().map(|(_, term)| *term).max().unwrap_or(0) + 1;
        for (log, (index, _)) in ends.into_iter().enumerate() {
            self.gang_table.committed(log, index + 1, term, None);
        }
    }

    /// Nothing moves any more. If an entry was asked for and is not reached, the logs whose share
    /// of the gangs in the way is missing go on beyond the stamp.
    fn extend(&mut self) -> Result<bool, ReplayError> {
        let Until::Index(log, index) = self.until else {
            return Ok(false);
        };
        if self.lanes[usize::from(log)].place.index >= index {
            return Ok(false);
        }
        let fronts = self.lanes.iter().filter_map(|lane| lane.queue.front());
        let heads: Vec<Head> = fronts
            .filter_map(|next| next.gang.as_ref().map(|(head, _)| head.clone()))
            .collect();
        let mut more = false;
        for head in heads {
            for &(member, _) in &head.view {
                let Some(lane) = self.lanes.get_mut(usize::from(member)) else {
                    continue;
                };
                let has = |next: &Waiting| {
                    let gang = next.gang.as_ref();
                    gang.is_some_and(|(other, _)| other.nonce == head.nonce)
                };
                if !lane.queue.iter().any(has) && lane.next.is_some() && lane.extra == 0 {
                    lane.extra = 1;
                    more |= lane
                        .next
                        .as_ref()
                        .is_some_and(|next| next.index <= lane.last_index);
                }
            }
        }
        Ok(more)
    }

    fn end(self) -> Result<ReplayEnd, ReplayError> {
        if let Until::Index(log, index) = self.until {
            let place = &self.lanes[usize::from(log)].place;
            if place.index < index {
                return Err(ReplayError::NotReached {
                    log,
                    index,
                    what: format!(
                        "behind entry {} stands an operation over several logs whose other shares are not in the archive",
                        place.index
                    ),
                });
            }
        }
        let mut places = Vec::with_capacity(self.lanes.len());
        for (log, lane) in (0_u16..).zip(&self.lanes) {
            let unseen = match (self.until, self.store, self.archive_dir) {
                (Until::Time(ms), None, Some(archive_dir)) => {
                    behind::check(archive_dir, log, lane.read_to(), ms)?
                }
                _ => 0,
            };
            places.push(Place {
                held: lane.queue.len() as u64,
                at_end: lane.place.at_end && !lane.cut_seen && lane.place.index < lane.last_index,
                left_out: lane.left_out(),
                unseen,
                ..lane.place
            });
        }
        Ok(ReplayEnd {
            places,
            entries: self.entries,
            given_up: self.given_up,
        })
    }
}

/// The stamp by which the other logs are cut when an entry of one is asked for: the latest up to
/// it, and its own, or of the last before it that has one.
fn stamp_at(
    archive_dir: &ArchiveDir,
    from: &[(u64, u64)],
    log: u16,
    index: u64,
) -> Result<(u64, u64), ReplayError> {
    let fail = |what: String| ReplayError::NotReached { log, index, what };
    let &(applied, term) = from
        .get(usize::from(log))
        .ok_or_else(|| fail("there is no such log".into()))?;
    if index < applied {
        return Err(ReplayError::SnapshotLater {
            log,
            index: applied,
            clock_ms: 0,
        });
    }
    let mut reader = archive_dir.read(log, applied, term);
    let (mut last, mut own, mut latest) = (applied, None, 0);
    // The first entry behind the snapshot is read even where it is not wanted: it tells the stamps
    // before it.
    while last < index {
        match reader.next_entry()? {
            Some(entry) => {
                last = entry.index;
                // The clock may have been set back in between.
                latest = entry.clock_ms.max(latest);
                own = stamp_ms(&entry.payload).or(own);
            }
            None => return Err(fail(format!("the archive ends with entry {last}"))),
        }
    }
    if index == applied {
        // Nothing of this log is replayed; the others stay where the snapshot has them, too.
        return Ok((0, 0));
    }
    let latest = reader.before_ms().max(latest);
    Ok((latest, own.unwrap_or(latest)))
}

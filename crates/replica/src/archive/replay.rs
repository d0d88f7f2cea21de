//! From a snapshot to a later moment: the archived entries of all logs, applied as a replica applies them, up to a cut.
//!
//! The cut is consistent by the rule that replicas follow anyway: a log stands still at a gang's entry until all participants'
//! logs have told enough. A gang whose shares are not all before the cut is undecided there, so no log passes it, and none
//! what comes after it. //= cyclone §5.1

use std::collections::VecDeque;

use cyclone_consensus::{Decision, GangBook};
use cyclone_store::{ApplyError, EntryInput, Mode, StateMachine};
use cyclone_wire::archive::stamp_ms;
use cyclone_wire::gang::{FIXED_BYTES, Head};

use super::behind::{self, STEP_BACK_MS};
use super::reader::{ArchiveError, Archived, LogReader, Shelf};

/// Entries of a log looked at before they are applied.
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
    /// Up to this entry of a log; the others as far as its stamp, or further where its gangs need it. Where clocks had been ahead
    /// and were put right before it, the others go as far as their last entry with a stamp up to its own.
    Index(u16, u64),
}

/// The first entry of a log that a replay has left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeftOut {
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
    pub left_out: Option<LeftOut>,
    /// Entries behind the cut whose stamps were to be looked at, but are damaged or missing. Nothing of them is needed.
    pub unseen: u64,
}

/// Where a replay has got to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reached {
    /// By log.
    pub places: Vec<Place>,
    /// Entries applied.
    pub entries: u64,
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
        /// The first entry behind it that is stamped before the moment, by a clock that had gone back by seconds.
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

struct Lane<'a> {
    reader: LogReader<'a>,
    /// Read and not yet known to be before the cut.
    next: Option<Archived>,
    queue: VecDeque<Waiting>,
    bytes: usize,
    /// The last index, or the latest stamp, before the cut.
    last_index: u64,
    last_ms: u64,
    /// As the latest stamp, but by index.
    last_stamped: u64,
    /// Entries to be taken although they are behind the cut: another log's gang needs them.
    extra: u64,
    cut_seen: bool,
    place: Place,
}

impl Lane<'_> {
    /// Takes the next entry if it is before the cut.
    fn pull(&mut self) -> Result<Option<Archived>, ArchiveError> {
        if self.next.is_none() {
            self.next = self.reader.next_entry()?;
            self.place.at_end = self.next.is_none();
        }
        let beyond = |entry: &Archived| {
            let late = entry.clock_ms > self.last_ms || entry.index > self.last_stamped;
            entry.index > self.last_index || (late && self.extra == 0)
        };
        self.cut_seen = self.next.as_ref().is_some_and(beyond);
        if self.cut_seen {
            return Ok(None);
        }
        self.extra = self.extra.saturating_sub(1);
        Ok(self.next.take())
    }

    fn has_room(&self) -> bool {
        self.queue.is_empty() || (self.queue.len() < AHEAD && self.bytes < AHEAD_BYTES)
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

    fn left_out(&self) -> Option<LeftOut> {
        let held = self.queue.front().map(|next| &next.entry);
        held.or(self.next.as_ref()).map(|entry| LeftOut {
            index: entry.index,
            stamp_ms: stamp_ms(&entry.payload),
        })
    }
}

fn gang_of(payload: &[u8]) -> Option<(Head, usize)> {
    Head::length(payload.first_chunk::<FIXED_BYTES>()?)?;
    Head::decode(payload).ok()
}

/// Applies the entries behind `from` (per log, index and term) up to the cut. Without a store it only finds out where that is, and
/// reads on to see whether the stamps behind a cut by time agree with it.
///
/// # Errors
/// See [`ReplayError`]. The store has then a state between the two, and is of no use.
pub fn replay(
    shelf: &Shelf,
    from: &[(u64, u64)],
    until: Until,
    store: Option<&dyn StateMachine>,
) -> Result<Reached, ReplayError> {
    let mut run = Run::new(shelf, from, until)?;
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

struct Run<'a> {
    shelf: &'a Shelf,
    lanes: Vec<Lane<'a>>,
    book: GangBook,
    store: Option<&'a dyn StateMachine>,
    until: Until,
    entries: u64,
}

impl<'a> Run<'a> {
    fn new(shelf: &'a Shelf, from: &[(u64, u64)], until: Until) -> Result<Run<'a>, ReplayError> {
        // The second, if it is another: the own stamp of the entry asked for.
        let (latest, own) = match until {
            Until::End => (u64::MAX, None),
            Until::Time(ms) => (ms, None),
            Until::Index(log, index) => {
                let (latest, own) = stamp_at(shelf, from, log, index)?;
                let is_back = latest.saturating_sub(own) > STEP_BACK_MS;
                (latest, is_back.then_some(own))
            }
        };
        let mut lanes = Vec::new();
        for (log, &(index, term)) in (0_u16..).zip(from) {
            let named = matches!(until, Until::Index(named, _) if named == log);
            lanes.push(Lane {
                reader: shelf.read(log, index, term),
                next: None,
                queue: VecDeque::new(),
                bytes: 0,
                last_index: match until {
                    Until::Index(_, index) if named => index,
                    _ => u64::MAX,
                },
                last_ms: match own {
                    None if !named => latest,
                    _ => u64::MAX,
                },
                last_stamped: match own {
                    Some(own) if !named => behind::last_stamped(shelf, log, index, own),
                    _ => u64::MAX,
                },
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
            });
        }
        let terms: Vec<u64> = from.iter().map(|(_, term)| *term).collect();
        let mut run = Run {
            shelf,
            lanes,
            book: GangBook::new(&terms),
            store: None,
            until,
            entries: 0,
        };
        run.check_begin(latest)?;
        Ok(run)
    }

    /// What the snapshot holds must be before the cut.
    fn check_begin(&mut self, latest: u64) -> Result<(), ReplayError> {
        for (log, lane) in (0_u16..).zip(&mut self.lanes) {
            // The first entry behind the snapshot tells the stamps of those before it.
            lane.next = lane.reader.next_entry()?;
            let before = match &lane.next {
                Some(_) => lane.reader.before_ms(),
                None => lane.reader.stamp_before_end(),
            };
            lane.place.clock_ms = before;
            let late = matches!(self.until, Until::Time(_)) && before > latest;
            let index = lane.place.index;
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
            if clock_ms > latest {
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
            while lane.has_room()
                && let Some(entry) = lane.pull()?
            {
                let gang = gang_of(&entry.payload);
                let head = gang.as_ref().map(|(head, _)| head.clone());
                self.book.committed(log, entry.index, entry.term, head);
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

    /// Applies what can be; answers whether anything moved.
    fn advance(&mut self) -> Result<bool, ReplayError> {
        let mut moved = false;
        for log in 0..self.lanes.len() {
            let stop = self.book.stop(log);
            moved |= self.apply(log, stop)?;
            let front = self.lanes[log].queue.front().map(|next| next.entry.index);
            if stop.is_none() || front != stop {
                continue;
            }
            match self.book.decide(log) {
                Decision::Wait => {}
                Decision::Skip => {
                    if let Some(front) = self.lanes[log].queue.front_mut() {
                        front.skip = true;
                        self.book.passed(log, front.entry.index);
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
                })
                .collect();
            let count = inputs.len();
            if count == 0 {
                return Ok(self.entries > before);
            }
            if let Some(store) = self.store {
                store.apply(log as u16, &inputs, Mode::Blocking)?;
            }
            drop(inputs);
            (0..count).for_each(|_| drop(lane.pop()));
            self.entries += count as u64;
        }
    }

    fn together(&mut self, apply: bool, entries: &[(u16, u64)]) -> Result<bool, ReplayError> {
        let front = |lane: &Lane<'_>| lane.queue.front().map(|next| next.entry.index);
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
            self.book.passed(usize::from(log), index);
            self.entries += 1;
        }
        Ok(true)
    }

    /// Nothing moves any more. If an entry was asked for and is not reached, the logs whose share of the gangs in the way is
    /// missing go on beyond the stamp.
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

    fn end(self) -> Result<Reached, ReplayError> {
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
            let unseen = match (self.until, self.store) {
                (Until::Time(ms), None) => behind::check(self.shelf, log, lane.read_to(), ms)?,
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
        Ok(Reached {
            places,
            entries: self.entries,
        })
    }
}

/// The stamp by which the other logs are cut when an entry of one is asked for: the latest up to it, and its own, or of the last
/// before it that has one.
fn stamp_at(
    shelf: &Shelf,
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
    let mut reader = shelf.read(log, applied, term);
    let (mut last, mut own) = (applied, None);
    // The first entry behind the snapshot is read even where it is not wanted: it tells the stamps before it.
    while last < index {
        match reader.next_entry()? {
            Some(entry) => {
                last = entry.index;
                own = stamp_ms(&entry.payload).or(own);
            }
            None => return Err(fail(format!("the archive ends with entry {last}"))),
        }
    }
    if index == applied {
        // Nothing of this log is replayed; the others stay where the snapshot has them, too.
        return Ok((0, 0));
    }
    let latest = reader.clock_ms();
    Ok((latest, own.unwrap_or(latest)))
}

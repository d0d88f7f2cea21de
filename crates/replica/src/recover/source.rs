//! The entries of one log that a replica still has: those of the ring, and where the ring has none,
//! those on flash.

use std::collections::VecDeque;

use cyclone_wal::flash::{FlashLog, FlashMode, StoredEntry};
use cyclone_wal::{Ring, RingError};
use cyclone_wire::archive::stamp_ms;

use crate::archive::{ArchiveError, Archived, EntrySource};

/// Entries read from flash at once.
const CHUNK: u64 = 64;

/// One log of a lost replica.
pub(super) struct Survivor {
    ring: Option<Ring>,
    damage: Option<RingError>,
    flash: Option<FlashLog>,
    /// Why flash cannot be read, or where it could not be read any more.
    unreadable: Option<String>,
    chunk: VecDeque<StoredEntry>,
    next: u64,
    term: u64,
    clock_ms: u64,
    /// Whether the store that is left can take the entries.
    pub(super) may_be_used: bool,
}

impl Survivor {
    /// `held`: index and term of the last entry that the store holds.
    pub(super) fn new(
        held: (u64, u64),
        ring: Option<Ring>,
        damage: Option<RingError>,
        flash: Option<FlashLog>,
        unreadable: Option<String>,
    ) -> Survivor {
        Survivor {
            ring,
            damage,
            flash,
            unreadable,
            chunk: VecDeque::new(),
            next: held.0 + 1,
            term: held.1,
            clock_ms: 0,
            may_be_used: true,
        }
    }

    /// The highest index known to be committed.
    pub(super) fn commit(&self) -> Option<u64> {
        let ring = self.ring.as_ref().map(|ring| ring.hard_state());
        // No replica has a log without a term.
        let ring = ring
            .filter(|state| state.term > 0)
            .map(|state| state.commit);
        let only = self
            .flash
            .as_ref()
            .filter(|flash| flash.mode() == FlashMode::Only);
        ring.max(only.map(|flash| flash.hard_state().commit))
    }

    /// What keeps the log from being whole, and which of its entries are of no use for that reason.
    pub(super) fn problems(&self, reached: u64) -> Vec<String> {
        let mut problems = Vec::new();
        problems.extend(
            self.damage
                .as_ref()
                .map(|error| format!("log region: {error}")),
        );
        problems.extend(self.unreadable.clone());
        if !self.may_be_used {
            problems.push(format!(
                "entries behind {reached} are of no use: records of sessions in the store are damaged, so which of the entries were \
                 executed is not known"
            ));
            return problems;
        }
        let ring = self
            .ring
            .as_ref()
            .filter(|ring| ring.last_index() > reached);
        if let Some(ring) = ring {
            let (first, last) = (ring.first_index().max(reached + 1), ring.last_index());
            problems.push(match first > reached + 1 {
                true => format!(
                    "entries {} to {} are missing: entries {first} to {last} of the log region are of no use without \
                     them. If this replica had its log on flash, say --flash DIR",
                    reached + 1,
                    first - 1
                ),
                false => format!(
                    "entries {first} to {last} of the log region do not follow entry {reached} of the store"
                ),
            });
        }
        problems
    }

    fn read_ring(&self) -> Option<Archived> {
        let ring = self.ring.as_ref()?;
        let entry = ring.entry(self.next)?;
        // Another history would be mixed into this one.
        if ring
            .term(self.next - 1)
            .is_some_and(|term| term != self.term)
        {
            return None;
        }
        Some(Archived {
            index: entry.index,
            term: entry.term,
            kind: entry.kind,
            payload: entry.segments().flatten().copied().collect(),
            clock_ms: 0,
        })
    }

    /// Whether flash counts for the next entry: it may be older than a whole ring, and not newer.
    fn is_on_flash(&self) -> bool {
        let ends = |ring: &Ring| {
            let is_second = self
                .flash
                .as_ref()
                .is_some_and(|flash| flash.mode() == FlashMode::Second);
            self.damage.is_none() && is_second && self.next > ring.last_index()
        };
        !self.ring.as_ref().is_some_and(ends)
    }

    fn read_flash(&mut self) -> Option<Archived> {
        if !self.is_on_flash() {
            return None;
        }
        let next = self.next;
        if self.chunk.front().is_none_or(|entry| entry.index != next) {
            self.chunk.clear();
            let flash = self.flash.as_mut()?;
            if !(flash.first_index()..=flash.last_index()).contains(&next) {
                return None;
            }
            let to = flash.last_index().min(next + CHUNK - 1);
            let chunk = &mut self.chunk;
            let read = flash.read_all(next, to, |entry| {
                chunk.push_back(entry);
                true
            });
            if let Err(error) = read {
                self.unreadable = Some(format!("flash: {error}"));
            }
        }
        let entry = self.chunk.pop_front()?;
        (entry.index == next && entry.prev_term == self.term).then_some(Archived {
            index: entry.index,
            term: entry.term,
            kind: entry.kind,
            payload: entry.payload,
            clock_ms: 0,
        })
    }
}

impl EntrySource for &mut Survivor {
    fn next_entry(&mut self) -> Result<Option<Archived>, ArchiveError> {
        if !self.may_be_used {
            return Ok(None);
        }
        let entry = match self.read_ring() {
            Some(entry) => Some(entry),
            None => self.read_flash(),
        };
        Ok(entry.map(|mut entry| {
            (self.next, self.term) = (entry.index + 1, entry.term);
            self.clock_ms = self.clock_ms.max(stamp_ms(&entry.payload).unwrap_or(0));
            entry.clock_ms = self.clock_ms;
            entry
        }))
    }
}

//! Addresses from a fetch-add on the backup's tail, then a write (rowan §3.2.1): two round trips
//! per record.
//!
//! All senders of a backup write one current segment. The first sender to find it full says so; the
//! backup then gives everybody the next one. Every sender gives the old one back once it has
//! nothing in flight there.

use std::collections::{HashMap, VecDeque};

use cyclone_fabric::{Access, ConnectionId, FabricError, MemoryKey};

use crate::build::SenderConfig;
use crate::control::{Grant, ToBackup, ToSender};
use crate::frame::{Origin, block_bytes, encode_block};
use crate::links::{Link, Log};
use crate::memory::{Content, Owner, SegmentState};
use crate::protocol::{BackupId, ReplicationError};
use crate::rwrite::{count_blocks, cut_for};
use crate::sessions::{BackupProtocol, Identity, Sessions};
use crate::stuck::PendingRevocations;

/// Set in a tail that gives no more addresses; larger than any offset.
const CLOSED: u64 = 1 << 63;

/// A block without a place.
struct Waiting {
    item: u64,
    origin: Origin,
    /// Count and number.
    cut: (u16, u16),
    payload: Vec<u8>,
}

/// A sender's view of a backup's log.
pub(crate) struct FaaLog {
    current: Option<Grant>,
    /// The epoch of the segment that was reported to the backup as full.
    told: u64,
    /// Blocks whose fetch-add is in flight, and in which segment; their places are the tickets.
    adding: Vec<Option<(Waiting, Grant)>>,
    free: Vec<u64>,
    waiting: VecDeque<Waiting>,
}

impl FaaLog {
    fn reserve_waiting(&mut self, link: &mut Link) {
        let Some(grant) = self.current else {
            return;
        };
        // A grant without a tail is no grant of this protocol; nothing is placed in it.
        let Some(tail) = grant.tail else {
            return;
        };
        if self.told == grant.epoch {
            return;
        }
        for block in self.waiting.drain(..) {
            let len = block_bytes(block.payload.len()) as u64;
            let ticket = self.free.pop().unwrap_or(self.adding.len() as u64);
            link.add(&grant, tail, len, ticket);
            let in_flight = Some((block, grant));
            match self.adding.get_mut(ticket as usize) {
                Some(place) => *place = in_flight,
                None => self.adding.push(in_flight),
            }
        }
    }
}

impl Log for FaaLog {
    const IN_ORDER: bool = false;

    fn new(_config: &SenderConfig, _backup: BackupId) -> FaaLog {
        FaaLog {
            current: None,
            told: 0,
            adding: Vec::new(),
            free: Vec::new(),
            waiting: VecDeque::new(),
        }
    }

    fn opened(&mut self, link: &mut Link) {
        link.send(&ToBackup::Want { count: 1, after: 0 });
    }

    fn granted(&mut self, link: &mut Link, grant: Grant) {
        link.hold_segment(grant);
        // Grants overtake each other where the fabric keeps no order.
        let newer = self.current.is_none_or(|now| now.epoch < grant.epoch);
        let old = if newer {
            self.current.replace(grant)
        } else {
            Some(grant)
        };
        if let Some(old) = old {
            link.leave_segment(old.epoch);
        }
        self.reserve_waiting(link);
    }

    fn room(&mut self, _link: &mut Link, len: usize) -> Result<bool, ReplicationError> {
        match self.current.and_then(|grant| cut_for(grant.key.len)) {
            Some(cut) => count_blocks(&cut, len).map(|_| self.waiting.is_empty()),
            None => Ok(false),
        }
    }

    fn append(&mut self, link: &mut Link, item: u64, record: &[u8]) {
        let origin = link.next_origin();
        let Some(cut) = self.current.and_then(|grant| cut_for(grant.key.len)) else {
            return;
        };
        let count = cut.count(record.len()) as u16;
        for (payload, number) in cut.parts(record).zip(0u16..) {
            let mut kept = link.buffer();
            kept.extend_from_slice(payload);
            self.waiting.push_back(Waiting {
                item,
                origin,
                cut: (count, number),
                payload: kept,
            });
        }
        self.reserve_waiting(link);
    }

    //= rowan §3.2.1
    fn added(&mut self, link: &mut Link, ticket: u64, before: u64) {
        let place = self.adding.get_mut(ticket as usize);
        let Some((block, grant)) = place.and_then(Option::take) else {
            return;
        };
        self.free.push(ticket);
        let len = block_bytes(block.payload.len()) as u64;
        let end = before.checked_add(len);
        if end.is_some_and(|end| end <= grant.key.len) {
            let mut bytes = link.buffer();
            encode_block(
                grant.seed,
                &block.origin,
                block.cut,
                &block.payload,
                &mut bytes,
            );
            link.write(&grant, before, bytes, (block.item, block.item));
            // Each block's write holds the item; the log's own hold goes with the last block that
            // is placed.
            let of_item = |other: &Waiting| other.item == block.item;
            let more = || {
                self.waiting.iter().any(of_item)
                    || self
                        .adding
                        .iter()
                        .flatten()
                        .any(|(other, _)| of_item(other))
            };
            if block.cut.0 == 1 || !more() {
                link.release(block.item);
            }
            link.recycle(block.payload);
        } else {
            self.waiting.push_back(block);
            let is_current = self.current.is_some_and(|now| now.epoch == grant.epoch);
            if is_current && self.told != grant.epoch {
                self.told = grant.epoch;
                let after = grant.epoch;
                link.send(&ToBackup::Want { count: 1, after });
            }
            self.reserve_waiting(link);
        }
        link.unuse_segment(grant.epoch);
    }
}

/// What one sender may do with one segment; a key goes when it is revoked.
struct Keys {
    bytes: Option<MemoryKey>,
    tail: Option<MemoryKey>,
    who: Identity,
}

/// The backup's side: one current segment, shared by all.
#[derive(Default)]
pub(crate) struct FaaKeeper {
    current: Option<u32>,
    /// Who may still write which segment.
    holders: HashMap<(ConnectionId, u32), Keys>,
    stuck: PendingRevocations<(ConnectionId, u32)>,
    /// Who has asked for a segment while there was none.
    waiting: Vec<ConnectionId>,
}

impl FaaKeeper {
    /// Lets a session write the current segment, if there is one; it waits otherwise.
    fn grant(&mut self, sessions: &mut Sessions, connection: ConnectionId) {
        let Some(who) = sessions.identity(connection) else {
            return;
        };
        let Some(segment) = self.current.or_else(|| self.open_segment(sessions)) else {
            if !self.waiting.contains(&connection) {
                self.waiting.push(connection);
            }
            return;
        };
        if self.holders.contains_key(&(connection, segment)) {
            return;
        }
        let keys = sessions
            .register(segment, Access::WRITE)
            .and_then(|bytes| Ok((bytes, sessions.register_word(segment)?)));
        let Ok((bytes, tail)) = keys else {
            sessions.refuse(connection, "no registration left for another sender");
            return;
        };
        let keys = Keys {
            bytes: Some(bytes),
            tail: Some(tail),
            who,
        };
        self.holders.insert((connection, segment), keys);
        let grant = sessions.grant(segment, bytes, Some(tail));
        sessions.answer(connection, &ToSender::Segment(grant));
    }

    /// Lets those who wait write the current segment, once there is one.
    fn serve(&mut self, sessions: &mut Sessions) {
        if self.waiting.is_empty()
            || self.current.is_none() && self.open_segment(sessions).is_none()
        {
            return;
        }
        for connection in std::mem::take(&mut self.waiting) {
            self.grant(sessions, connection);
        }
    }

    fn open_segment(&mut self, sessions: &mut Sessions) -> Option<u32> {
        let term = sessions.memory.min_term();
        let segment = sessions
            .memory
            .allocate(Owner::BackupLog, term, 0, Content::Stale)?;
        sessions.stats.segments_posted += 1;
        self.current = Some(segment);
        Some(segment)
    }

    /// The current segment is full: closes it and gives everybody the next.
    fn close_current(&mut self, sessions: &mut Sessions, segment: u32) {
        let word = sessions.memory.word_offset(segment);
        sessions.memory.area().fetch_add(word, CLOSED);
        self.current = None;
        let holders = self.holders.keys().filter(|(_, of)| *of == segment);
        let mut connections: Vec<ConnectionId> =
            holders.map(|(connection, _)| *connection).collect();
        connections.sort_unstable();
        for connection in connections {
            self.grant(sessions, connection);
        }
        self.finish(sessions, segment);
    }

    /// A segment is used when it is not the current one and no sender may write it.
    fn finish(&mut self, sessions: &mut Sessions, segment: u32) {
        let held = self.holders.keys().any(|(_, of)| *of == segment);
        if self.current != Some(segment) && !held {
            sessions.segment_used(segment);
        }
    }

    /// Takes a segment back for the first time.
    fn end(&mut self, sessions: &mut Sessions, connection: ConnectionId, segment: u32) {
        if !self.stuck.contains((connection, segment)) {
            // Tried again by `tick`.
            let _ = self.revoke(sessions, (connection, segment));
        }
    }

    /// Held until nothing can come any more: only then may the segment be used.
    fn revoke(
        &mut self,
        sessions: &mut Sessions,
        holder: (ConnectionId, u32),
    ) -> Result<(), FabricError> {
        let Some(keys) = self.holders.get_mut(&holder) else {
            return Ok(());
        };
        let mut revoke = |place: &mut Option<MemoryKey>| {
            if let Some(key) = place {
                sessions.revoke(key)?;
                *place = None;
            }
            Ok(())
        };
        // Both are tried: what is refused does not keep the other open.
        let (bytes, tail) = (revoke(&mut keys.bytes), revoke(&mut keys.tail));
        if let Err(error) = bytes.and(tail) {
            self.stuck.insert(holder);
            return Err(error);
        }
        self.stuck.remove(holder);
        self.holders.remove(&holder);
        self.finish(sessions, holder.1);
        Ok(())
    }
}

impl BackupProtocol for FaaKeeper {
    fn want(&mut self, sessions: &mut Sessions, connection: ConnectionId, _: u8, after: u64) {
        let full = self.current.filter(|&segment| {
            after != 0
                && sessions
                    .memory
                    .entry(segment)
                    .is_some_and(|e| e.epoch == after)
        });
        // Only who may write a segment may call it full.
        match full {
            Some(segment) if self.holders.contains_key(&(connection, segment)) => {
                self.close_current(sessions, segment);
            }
            _ => self.grant(sessions, connection),
        }
    }

    fn done(
        &mut self,
        sessions: &mut Sessions,
        connection: ConnectionId,
        segment: u32,
        epoch: u64,
    ) {
        let entry = sessions.memory.entry(segment);
        let this =
            entry.is_some_and(|entry| entry.epoch == epoch && entry.state == SegmentState::Using);
        if this {
            self.end(sessions, connection, segment);
        }
    }

    fn gone(&mut self, sessions: &mut Sessions, connection: ConnectionId, _: Identity) {
        self.waiting.retain(|waiting| *waiting != connection);
        let held = self.holders.keys().filter(|(of, _)| *of == connection);
        let mut segments: Vec<u32> = held.map(|(_, segment)| *segment).collect();
        segments.sort_unstable();
        for segment in segments {
            self.end(sessions, connection, segment);
        }
    }

    fn shut_out(
        &mut self,
        sessions: &mut Sessions,
        out: &dyn Fn(&Identity) -> bool,
    ) -> Result<(), FabricError> {
        let holders = self.holders.iter().filter(|(_, keys)| out(&keys.who));
        let mut holders: Vec<(ConnectionId, u32)> = holders.map(|(holder, _)| *holder).collect();
        holders.sort_unstable();
        let revoked = holders
            .into_iter()
            .map(|holder| self.revoke(sessions, holder));
        revoked.fold(Ok(()), Result::and)
    }

    fn tick(&mut self, sessions: &mut Sessions, now_us: u64) {
        // The server's own segments become free without a word.
        self.serve(sessions);
        if let Some(holder) = self.stuck.due(now_us) {
            // It stays with the others.
            let _ = self.revoke(sessions, holder);
        }
    }

    fn released(&mut self, sessions: &mut Sessions) {
        self.serve(sessions);
    }
}

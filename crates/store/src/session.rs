//! Client sessions: which commands of which client have been executed, and what they were answered.
//!
//! A session keeps the replies above what its client has acknowledged, so that a retried command is
//! answered again and not executed again. Everything here is a function of the log: the same
//! entries give the same table on every replica, however they are grouped into calls.
//!
//! On the store: one record per (session, entry) with that entry's replies and what was
//! acknowledged by then; a record goes when all its replies are acknowledged and it is not the
//! session's newest. So a session costs one put and about one delete per entry, not per command. An
//! entry that is applied in several parts (docs/adr/0073) has a record for each.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use cyclone_wire::codec::{DecodeError, Reader, Write};
use cyclone_wire::command::SessionTag;
use cyclone_wire::planted::{self, Bug};
use cyclone_wire::reply::{Failure, Reply};

use foldhash::fast::RandomState;

use crate::kv::space;

/// Replies kept per session; beyond, the oldest count as acknowledged.
pub(crate) const MAX_REPLIES: usize = 4096;
/// Bytes of replies kept per session, the newest excepted.
const MAX_REPLY_BYTES: usize = 4 << 20;
/// Bytes of replies kept by all sessions of a log. Beyond, those unused for longest are forgotten,
/// until a quarter of it is free.
const MAX_KEPT_BYTES: usize = 256 << 20;

/// Replies by seq. Clients count upwards, so that one comes last nearly always, and the first go.
#[derive(Clone, Debug, Default)]
struct Replies(VecDeque<(u64, Reply)>);

impl Replies {
    fn place(&self, seq: u64) -> Result<usize, usize> {
        match self.0.back() {
            Some((last, _)) if *last >= seq => self.0.binary_search_by_key(&seq, |(seq, _)| *seq),
            _ => Err(self.0.len()),
        }
    }

    fn get(&self, seq: u64) -> Option<&Reply> {
        self.place(seq).ok().map(|at| &self.0[at].1)
    }

    fn insert(&mut self, seq: u64, reply: Reply) {
        match self.place(seq) {
            Ok(at) => self.0[at].1 = reply,
            Err(at) => self.0.insert(at, (seq, reply)),
        }
    }

    fn remove(&mut self, seq: u64) -> Option<Reply> {
        let at = self.place(seq).ok()?;
        self.0.remove(at).map(|(_, reply)| reply)
    }

    fn first(&self) -> Option<u64> {
        self.0.front().map(|(seq, _)| *seq)
    }

    fn take_first(&mut self) -> Option<(u64, Reply)> {
        if self.0.capacity() > 64 && self.0.len() < self.0.capacity() / 8 {
            self.0.shrink_to(self.0.capacity() / 4);
        }
        self.0.pop_front()
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}

/// An entry's index, and how many of its commands came before the part.
type Place = (u64, u16);

#[derive(Clone, Debug, Default)]
struct Session {
    acked_below: u64,
    /// Index of the entry that last named it.
    used: u64,
    replies: Replies,
    size: Size,
    /// Stored records: entry and part → its highest seq; `None` if it holds no reply.
    records: BTreeMap<Place, Option<u64>>,
}

/// What a call has changed so far, for the store.
#[derive(Default)]
pub(crate) struct SessionChanges {
    pub(crate) puts: Vec<(Vec<u8>, Vec<u8>)>,
    pub(crate) deletes: Vec<Vec<u8>>,
}

/// One step of a call, reversed.
enum Undo {
    Opened(u64),
    Closed(u64, Session),
    Used(u64, u64),
    Acked(u64, u64),
    Kept(u64, u64),
    Forgot(u64, u64, Reply),
    Stored(u64, Place),
    Dropped(u64, Place, Option<u64>),
}

/// The sessions of one log.
#[derive(Default)]
pub(crate) struct Sessions {
    log: u16,
    limit: usize,
    /// What the replies of all sessions may take.
    most_bytes: usize,
    /// What they take at most.
    kept: Size,
    /// Whether the entry being applied counts memory.
    counts_memory: bool,
    table: HashMap<u64, Session, RandomState>,
    /// How to take back what the current call has done, newest last.
    undo: Vec<Undo>,
    /// Replies of the entry being applied, by session.
    entry_replies: BTreeMap<u64, Vec<(u64, Reply)>>,
    touched: BTreeSet<u64>,
    /// Commands of the entry being applied that came in earlier parts.
    from: u16,
}

/// What replies take. Entries that tell no limit of work were applied by programs that counted
/// contents alone; the others count memory. Both are functions of the replies, so that the replicas
/// agree whenever they started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Size {
    /// Contents, and a little for each reply.
    contents: usize,
    /// Memory: places in queues and arrays, and blocks.
    memory: usize,
}

impl Size {
    /// A reply's place in its session's queue, which may be half empty, and its share of a stored
    /// record.
    const PLACE_BYTES: usize = 96;
    /// A reply's place in an array.
    const ITEM_BYTES: usize = 32;
    /// What an allocator adds to a block.
    const BLOCK_BYTES: usize = 16;

    fn of(reply: &Reply) -> Size {
        fn contents(reply: &Reply) -> usize {
            match reply {
                Reply::Bytes(bytes) => bytes.len() + 16,
                Reply::Array(items) => items.iter().map(contents).sum::<usize>() + 16,
                _ => 16,
            }
        }
        fn blocks(reply: &Reply) -> usize {
            match reply {
                Reply::Bytes(bytes) => bytes.len() + Size::BLOCK_BYTES,
                Reply::Array(items) => {
                    let applied_positions = items.len() * Size::ITEM_BYTES + Size::BLOCK_BYTES;
                    applied_positions + items.iter().map(blocks).sum::<usize>()
                }
                _ => 0,
            }
        }
        Size {
            contents: contents(reply),
            memory: Size::PLACE_BYTES + blocks(reply),
        }
    }

    fn add(&mut self, other: Size) {
        self.contents += other.contents;
        self.memory += other.memory;
    }

    fn subtract(&mut self, other: Size) {
        self.contents -= other.contents;
        self.memory -= other.memory;
    }

    /// As an entry counts it.
    fn counted(self, counts_memory: bool) -> usize {
        match counts_memory {
            true => self.memory,
            false => self.contents,
        }
    }
}

/// What to do with a tagged command.
pub(crate) enum Verdict {
    Execute,
    Answer(Reply),
}

impl Sessions {
    /// `limit`: opening one more forgets the one unused for longest.
    pub(crate) fn new(log: u16, limit: usize) -> Sessions {
        Sessions {
            log,
            limit,
            most_bytes: MAX_KEPT_BYTES,
            ..Sessions::default()
        }
    }

    fn key(log: u16, session: u64, (index, from): Place) -> Vec<u8> {
        let mut key = Vec::with_capacity(21);
        key.push(space::SESSION);
        key.extend_from_slice(&log.to_be_bytes());
        key.extend_from_slice(&session.to_be_bytes());
        key.extend_from_slice(&index.to_be_bytes());
        if from > 0 {
            key.extend_from_slice(&from.to_be_bytes());
        }
        key
    }

    /// Takes in a stored record.
    pub(crate) fn load(&mut self, key: &[u8], value: &[u8]) -> Result<(), DecodeError> {
        let mut place = Reader::new(&key[3..]);
        let session = u64::from_be_bytes(place.array()?);
        let index = u64::from_be_bytes(place.array()?);
        let from = match place.left() {
            0 => 0,
            _ => u16::from_be_bytes(place.array()?),
        };
        place.finish()?;
        let mut reader = Reader::new(value);
        let acked_below = reader.u64()?;
        let count = reader.count(12)?;
        let entry = self.table.entry(session).or_default();
        let mut highest = None;
        for _ in 0..count {
            let seq = reader.u64()?;
            let reply = Reply::decode(reader.bytes()?)?;
            highest = highest.max(Some(seq));
            entry.size.add(Size::of(&reply));
            self.kept.add(Size::of(&reply));
            entry.replies.insert(seq, reply);
        }
        reader.finish()?;
        entry.acked_below = entry.acked_below.max(acked_below);
        entry.used = entry.used.max(index);
        entry.records.insert((index, from), highest);
        let below = entry.acked_below;
        entry.forget_below(session, below, &mut self.undo);
        self.undo.clear();
        Ok(())
    }

    /// Opens a session.
    pub(crate) fn open(&mut self, session: u64, index: u64, changes: &mut SessionChanges) {
        if self.table.len() >= self.limit
            && let Some(oldest) = self
                .table
                .iter()
                .map(|(id, session)| (session.used, *id))
                .min()
        {
            self.close(oldest.1, changes);
        }
        self.table.insert(
            session,
            Session {
                used: index,
                ..Session::default()
            },
        );
        self.undo.push(Undo::Opened(session));
        self.entry_replies.entry(session).or_default();
        self.touched.insert(session);
    }

    /// Forgets a session.
    pub(crate) fn close(&mut self, session: u64, changes: &mut SessionChanges) {
        self.entry_replies.remove(&session);
        self.touched.remove(&session);
        if let Some(closed) = self.table.remove(&session) {
            changes.deletes.extend(
                closed
                    .records
                    .keys()
                    .map(|&place| Self::key(self.log, session, place)),
            );
            self.undo.push(Undo::Closed(session, closed));
        }
    }

    /// Whether a tagged command is to be executed.
    pub(crate) fn admit(&mut self, tag: &SessionTag, index: u64) -> Verdict {
        let Some(session) = self.table.get_mut(&tag.session) else {
            return match planted::has(Bug::ExpiredExecuted) {
                true => Verdict::Execute,
                false => Verdict::Answer(Reply::Failed(Failure::SessionExpired)),
            };
        };
        if session.used != index || self.from > 0 {
            self.undo.push(Undo::Used(tag.session, session.used));
            session.used = index;
            self.touched.insert(tag.session);
        }
        session.forget_below(tag.session, tag.acked_below.min(tag.seq), &mut self.undo);
        if tag.seq < session.acked_below {
            return Verdict::Answer(Reply::Failed(Failure::StaleSequence));
        }
        match session.replies.get(tag.seq) {
            Some(_) if planted::has(Bug::DuplicatesExecuted) => Verdict::Execute,
            Some(reply) => Verdict::Answer(reply.clone()),
            None => Verdict::Execute,
        }
    }

    /// Keeps the answer to a command that was executed.
    pub(crate) fn record(&mut self, tag: &SessionTag, reply: &Reply) {
        let Some(session) = self.table.get_mut(&tag.session) else {
            return;
        };
        session.size.add(Size::of(reply));
        self.kept.add(Size::of(reply));
        session.replies.insert(tag.seq, reply.clone());
        self.undo.push(Undo::Kept(tag.session, tag.seq));
        self.entry_replies
            .entry(tag.session)
            .or_default()
            .push((tag.seq, reply.clone()));
    }

    /// A part of an entry is next: so many of its commands came in earlier ones. `counts_memory`:
    /// whether bounds count the memory that replies take.
    pub(crate) fn begin_part(&mut self, from: u16, counts_memory: bool) {
        self.from = from;
        self.counts_memory = counts_memory;
    }

    /// An entry, or a part of one, has been applied: bounds are kept and records written.
    pub(crate) fn end_part(&mut self, index: u64, changes: &mut SessionChanges) {
        let place = (index, self.from);
        let counts_memory = self.counts_memory;
        for id in std::mem::take(&mut self.touched) {
            let Some(session) = self.table.get_mut(&id) else {
                continue;
            };
            while session.replies.len() > MAX_REPLIES
                || (session.size.counted(counts_memory) > MAX_REPLY_BYTES
                    && session.replies.len() > 1)
            {
                let Some(oldest) = session.replies.first() else {
                    break;
                };
                session.forget_below(id, oldest + 1, &mut self.undo);
            }
            let entry_replies = self.entry_replies.remove(&id).unwrap_or_default();
            let mut value = Vec::with_capacity(16 + entry_replies.len() * 20);
            value.put_u64(session.acked_below);
            value.put_u32(entry_replies.len() as u32);
            for (seq, reply) in &entry_replies {
                value.put_u64(*seq);
                value.put_sized(|out| reply.encode(out));
            }
            changes.puts.push((Self::key(self.log, id, place), value));
            // A record without replies says no more than the one that follows it.
            if let Some((&last, None)) = session.records.last_key_value() {
                session.records.remove(&last);
                self.undo.push(Undo::Dropped(id, last, None));
                changes.deletes.push(Self::key(self.log, id, last));
            }
            session
                .records
                .insert(place, entry_replies.iter().map(|(seq, _)| *seq).max());
            self.undo.push(Undo::Stored(id, place));
            while session.records.len() > 1 {
                let Some((&oldest, &highest)) = session.records.first_key_value() else {
                    break;
                };
                if highest >= Some(session.acked_below) {
                    break;
                }
                session.records.remove(&oldest);
                self.undo.push(Undo::Dropped(id, oldest, highest));
                changes.deletes.push(Self::key(self.log, id, oldest));
            }
        }
        self.entry_replies.clear();
        self.forget_idle(index, changes);
    }

    /// Keeps the bound of all replies together.
    fn forget_idle(&mut self, index: u64, changes: &mut SessionChanges) {
        let counts_memory = self.counts_memory;
        if self.kept.counted(counts_memory) <= self.most_bytes {
            return;
        }
        self.kept = Size::default();
        for session in self.table.values() {
            self.kept.add(session.size);
        }
        if self.kept.counted(counts_memory) <= self.most_bytes {
            return;
        }
        let all = self.table.iter();
        let idle = all.filter(|(_, session)| session.used < index && session.size.contents > 0);
        let mut idle: Vec<_> = idle
            .map(|(id, session)| (session.used, *id, session.size))
            .collect();
        idle.sort_unstable_by_key(|(used, id, _)| (*used, *id));
        for (_, id, size) in idle {
            if self.kept.counted(counts_memory) <= self.most_bytes / 4 * 3 {
                break;
            }
            self.kept.subtract(size);
            self.close(id, changes);
        }
    }

    /// The call's changes stand.
    pub(crate) fn commit(&mut self) {
        self.undo.clear();
    }

    /// The call did nothing after all.
    pub(crate) fn roll_back(&mut self) {
        while let Some(step) = self.undo.pop() {
            match step {
                Undo::Opened(id) => {
                    self.table.remove(&id);
                }
                Undo::Closed(id, session) => {
                    self.kept.add(session.size);
                    self.table.insert(id, session);
                }
                Undo::Used(id, used) => self.with(id, |session| session.used = used),
                Undo::Acked(id, acked_below) => {
                    self.with(id, |session| session.acked_below = acked_below)
                }
                Undo::Kept(id, seq) => self.with(id, |session| {
                    if let Some(reply) = session.replies.remove(seq) {
                        session.size.subtract(Size::of(&reply));
                    }
                }),
                Undo::Forgot(id, seq, reply) => {
                    self.kept.add(Size::of(&reply));
                    self.with(id, |session| {
                        session.size.add(Size::of(&reply));
                        session.replies.insert(seq, reply);
                    })
                }
                Undo::Stored(id, place) => self.with(id, |session| {
                    session.records.remove(&place);
                }),
                Undo::Dropped(id, place, highest) => self.with(id, |session| {
                    session.records.insert(place, highest);
                }),
            }
        }
        self.entry_replies.clear();
        self.touched.clear();
    }

    fn with(&mut self, id: u64, change: impl FnOnce(&mut Session)) {
        if let Some(session) = self.table.get_mut(&id) {
            change(session);
        }
    }
}

impl Session {
    fn forget_below(&mut self, id: u64, seq: u64, undo: &mut Vec<Undo>) {
        while self.replies.first().is_some_and(|oldest| oldest < seq)
            && let Some((oldest, reply)) = self.replies.take_first()
        {
            self.size.subtract(Size::of(&reply));
            undo.push(Undo::Forgot(id, oldest, reply));
        }
        if seq > self.acked_below {
            undo.push(Undo::Acked(id, self.acked_below));
            self.acked_below = seq;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST_BYTES: usize = 10 * 1016;

    fn sessions() -> Sessions {
        Sessions {
            most_bytes: MOST_BYTES,
            ..Sessions::new(0, 100)
        }
    }

    /// A command of a session that is new, or acknowledges nothing, with a reply of 1016 bytes as
    /// they are counted.
    fn entry(
        sessions: &mut Sessions,
        index: u64,
        session: u64,
        seq: u64,
        stored: &mut BTreeMap<Vec<u8>, Vec<u8>>,
    ) {
        let mut changes = SessionChanges::default();
        if !sessions.table.contains_key(&session) {
            sessions.open(session, index, &mut changes);
        }
        let tag = SessionTag {
            session,
            seq,
            acked_below: 0,
        };
        assert!(matches!(sessions.admit(&tag, index), Verdict::Execute));
        sessions.record(&tag, &Reply::Bytes(vec![7; 1000]));
        sessions.begin_part(0, false);
        sessions.end_part(index, &mut changes);
        stored.extend(changes.puts);
        for key in changes.deletes {
            stored.remove(&key);
        }
    }

    fn known(sessions: &Sessions) -> BTreeSet<u64> {
        sessions.table.keys().copied().collect()
    }

    #[test]
    fn replies_of_idle_sessions_make_room_alike_before_and_after_a_restart() {
        let (mut sessions, mut stored) = (sessions(), BTreeMap::new());
        for index in 1..=10 {
            entry(&mut sessions, index, index, 1, &mut stored);
        }
        // Its first reply is old, but it is in use.
        entry(&mut sessions, 11, 1, 2, &mut stored);
        sessions.commit();
        assert_eq!(known(&sessions), BTreeSet::from([1, 6, 7, 8, 9, 10]));

        // A replica that starts now goes on with the same.
        let mut reloaded = self::sessions();
        stored
            .iter()
            .for_each(|(key, value)| reloaded.load(key, value).unwrap());
        let mut stored_there = stored.clone();
        for index in 12..40 {
            let session = 100 + index / 2;
            entry(&mut sessions, index, session, index, &mut stored);
            entry(&mut reloaded, index, session, index, &mut stored_there);
            assert_eq!(known(&sessions), known(&reloaded), "{index}");
            let kept: usize = sessions
                .table
                .values()
                .map(|session| session.size.contents)
                .sum();
            assert!(kept <= MOST_BYTES);
        }
        assert_eq!(stored, stored_there);
    }

    #[test]
    fn what_is_rolled_back_makes_no_room() {
        let (mut sessions, mut stored) = (sessions(), BTreeMap::new());
        for index in 1..=10 {
            entry(&mut sessions, index, index, 1, &mut stored);
        }
        sessions.commit();
        for _ in 0..3 {
            entry(&mut sessions, 11, 11, 1, &mut BTreeMap::new());
            assert!(!known(&sessions).contains(&1));
            sessions.roll_back();
            assert_eq!(known(&sessions), (1..=10).collect());
        }
    }

    /// A session with so many replies without contents, as an entry of the first or the later kind
    /// leaves it.
    fn small_replies(count: u64, counts_memory: bool) -> Sessions {
        let mut sessions = Sessions::new(0, 100);
        let mut changes = SessionChanges::default();
        sessions.open(1, 1, &mut changes);
        sessions.open(2, 1, &mut changes);
        for seq in 1..=count {
            let tag = SessionTag {
                session: 1 + seq % 2,
                seq,
                acked_below: 0,
            };
            assert!(matches!(sessions.admit(&tag, seq), Verdict::Execute));
            sessions.record(&tag, &Reply::Int(7));
            sessions.begin_part(0, counts_memory);
            sessions.end_part(seq, &mut changes);
        }
        sessions.commit();
        sessions
    }

    #[test]
    fn memory_of_small_replies_is_at_most_what_is_counted() {
        let sessions = small_replies(4_000, true);
        let place = size_of::<(u64, Reply)>();
        for session in sessions.table.values() {
            let taken = session.replies.0.capacity() * place;
            assert!(taken <= session.size.memory, "{taken} {:?}", session.size);
            assert!(session.size.memory <= 4 * taken);
        }
    }

    /// What was applied before memory was counted has the same outcome when it is applied again.
    #[test]
    fn entries_without_a_limit_of_work_count_contents() {
        let most_bytes = 4_000 * 40;
        for (counts_memory, forgets) in [(false, false), (true, true)] {
            let mut sessions = small_replies(4_000, counts_memory);
            sessions.most_bytes = most_bytes;
            let mut changes = SessionChanges::default();
            sessions.begin_part(0, counts_memory);
            sessions.end_part(5_000, &mut changes);
            assert_eq!(known(&sessions).len() < 2, forgets, "{counts_memory}");
        }
    }
}

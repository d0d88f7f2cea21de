//! Client sessions: which commands of which client have been executed, and what they were answered.
//!
//! A session keeps the replies above what its client has acknowledged, so that a retried command is answered again and
//! not executed again. Everything here is a function of the log: the same entries give the same table on every replica, however
//! they are grouped into calls.
//!
//! On the store: one record per (session, entry) with that entry's replies and what was acknowledged by then; a record goes when all its
//! replies are acknowledged and it is not the session's newest. So a session costs one put and about one delete per entry, not per command.

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
/// Bytes of replies kept by all sessions of a log. Beyond, those unused for longest are forgotten, until a quarter of it is free.
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

#[derive(Clone, Debug, Default)]
struct Session {
    acked_below: u64,
    /// Index of the entry that last named it.
    used: u64,
    replies: Replies,
    reply_bytes: usize,
    /// Stored records: entry index → its highest seq; `None` if it holds no reply.
    records: BTreeMap<u64, Option<u64>>,
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
    Stored(u64, u64),
    Dropped(u64, u64, Option<u64>),
}

/// The sessions of one log.
#[derive(Default)]
pub(crate) struct Sessions {
    log: u16,
    limit: usize,
    /// What the replies of all sessions may take.
    most_bytes: usize,
    /// What they take at most.
    kept_bytes: usize,
    table: HashMap<u64, Session, RandomState>,
    /// How to take back what the current call has done, newest last.
    undo: Vec<Undo>,
    /// Replies of the entry being applied, by session.
    fresh: BTreeMap<u64, Vec<(u64, Reply)>>,
    touched: BTreeSet<u64>,
}

fn reply_bytes(reply: &Reply) -> usize {
    match reply {
        Reply::Bytes(bytes) => bytes.len() + 16,
        Reply::Array(items) => items.iter().map(reply_bytes).sum::<usize>() + 16,
        _ => 16,
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

    pub(crate) fn key(log: u16, session: u64, index: u64) -> Vec<u8> {
        let mut key = Vec::with_capacity(19);
        key.push(space::SESSION);
        key.extend_from_slice(&log.to_be_bytes());
        key.extend_from_slice(&session.to_be_bytes());
        key.extend_from_slice(&index.to_be_bytes());
        key
    }

    /// Takes in a stored record.
    pub(crate) fn load(&mut self, key: &[u8], value: &[u8]) -> Result<(), DecodeError> {
        let mut place = Reader::new(&key[3..]);
        let session = u64::from_be_bytes(place.array()?);
        let index = u64::from_be_bytes(place.array()?);
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
            entry.reply_bytes += reply_bytes(&reply);
            self.kept_bytes += reply_bytes(&reply);
            entry.replies.insert(seq, reply);
        }
        reader.finish()?;
        entry.acked_below = entry.acked_below.max(acked_below);
        entry.used = entry.used.max(index);
        entry.records.insert(index, highest);
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
        self.fresh.entry(session).or_default();
        self.touched.insert(session);
    }

    /// Forgets a session.
    pub(crate) fn close(&mut self, session: u64, changes: &mut SessionChanges) {
        self.fresh.remove(&session);
        self.touched.remove(&session);
        if let Some(closed) = self.table.remove(&session) {
            changes.deletes.extend(
                closed
                    .records
                    .keys()
                    .map(|&index| Self::key(self.log, session, index)),
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
        if session.used != index {
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
        session.reply_bytes += reply_bytes(reply);
        self.kept_bytes += reply_bytes(reply);
        session.replies.insert(tag.seq, reply.clone());
        self.undo.push(Undo::Kept(tag.session, tag.seq));
        self.fresh
            .entry(tag.session)
            .or_default()
            .push((tag.seq, reply.clone()));
    }

    /// An entry has been applied: bounds are kept and records written.
    pub(crate) fn end_entry(&mut self, index: u64, changes: &mut SessionChanges) {
        for id in std::mem::take(&mut self.touched) {
            let Some(session) = self.table.get_mut(&id) else {
                continue;
            };
            while session.replies.len() > MAX_REPLIES
                || (session.reply_bytes > MAX_REPLY_BYTES && session.replies.len() > 1)
            {
                let Some(oldest) = session.replies.first() else {
                    break;
                };
                session.forget_below(id, oldest + 1, &mut self.undo);
            }
            let fresh = self.fresh.remove(&id).unwrap_or_default();
            let mut value = Vec::with_capacity(16 + fresh.len() * 20);
            value.put_u64(session.acked_below);
            value.put_u32(fresh.len() as u32);
            for (seq, reply) in &fresh {
                value.put_u64(*seq);
                value.put_sized(|out| reply.encode(out));
            }
            changes.puts.push((Self::key(self.log, id, index), value));
            // A record without replies says no more than the one that follows it.
            if let Some((&last, None)) = session.records.last_key_value() {
                session.records.remove(&last);
                self.undo.push(Undo::Dropped(id, last, None));
                changes.deletes.push(Self::key(self.log, id, last));
            }
            session
                .records
                .insert(index, fresh.iter().map(|(seq, _)| *seq).max());
            self.undo.push(Undo::Stored(id, index));
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
        self.fresh.clear();
        self.forget_idle(index, changes);
    }

    /// Keeps the bound of all replies together.
    fn forget_idle(&mut self, index: u64, changes: &mut SessionChanges) {
        if self.kept_bytes <= self.most_bytes {
            return;
        }
        self.kept_bytes = self.table.values().map(|session| session.reply_bytes).sum();
        if self.kept_bytes <= self.most_bytes {
            return;
        }
        let all = self.table.iter();
        let idle = all.filter(|(_, session)| session.used < index && session.reply_bytes > 0);
        let mut idle: Vec<_> = idle
            .map(|(id, session)| (session.used, *id, session.reply_bytes))
            .collect();
        idle.sort_unstable();
        for (_, id, bytes) in idle {
            if self.kept_bytes <= self.most_bytes / 4 * 3 {
                break;
            }
            self.kept_bytes -= bytes;
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
                    self.kept_bytes += session.reply_bytes;
                    self.table.insert(id, session);
                }
                Undo::Used(id, used) => self.with(id, |session| session.used = used),
                Undo::Acked(id, acked_below) => {
                    self.with(id, |session| session.acked_below = acked_below)
                }
                Undo::Kept(id, seq) => self.with(id, |session| {
                    if let Some(reply) = session.replies.remove(seq) {
                        session.reply_bytes -= reply_bytes(&reply);
                    }
                }),
                Undo::Forgot(id, seq, reply) => {
                    self.kept_bytes += reply_bytes(&reply);
                    self.with(id, |session| {
                        session.reply_bytes += reply_bytes(&reply);
                        session.replies.insert(seq, reply);
                    })
                }
                Undo::Stored(id, index) => self.with(id, |session| {
                    session.records.remove(&index);
                }),
                Undo::Dropped(id, index, highest) => self.with(id, |session| {
                    session.records.insert(index, highest);
                }),
            }
        }
        self.fresh.clear();
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
            self.reply_bytes -= reply_bytes(&reply);
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

    /// A command of a session that is new, or acknowledges nothing, with a reply of 1016 bytes as they are counted.
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
        sessions.end_entry(index, &mut changes);
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
                .map(|session| session.reply_bytes)
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
}

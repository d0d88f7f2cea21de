//! Answers to queries: from the values of the keys they name, or from a walk over the key space.

use std::borrow::Cow;

use cyclone_wire::command::Query;
use cyclone_wire::glob::Pattern;
use cyclone_wire::reply::{Failure, Reply};
use cyclone_wire::slot;

use crate::kv::{DATA_PREFIX, Kv, data_key, place_key, read_item, space, stored_place};
use crate::machine::{ApplyError, Mode};
use crate::reply_budget::{LOOP_BYTES, LOOP_KEYS, PAGE_BYTES, REPLY_BYTES, ReplyBudget};
use crate::value::Item;

/// The time at which a query is answered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueryTime {
    /// The state's own clock.
    pub(crate) clock_ms: u64,
    /// The asker's, if later; a key whose deadline lies between the two is neither there nor gone.
    pub(crate) now_ms: u64,
}

impl QueryTime {
    pub(crate) fn clock(clock_ms: u64) -> QueryTime {
        QueryTime {
            clock_ms,
            now_ms: clock_ms,
        }
    }

    /// For an asker whose clock says `now_ms`.
    pub(crate) fn for_asker_clock(clock_ms: u64, now_ms: u64) -> QueryTime {
        QueryTime {
            now_ms: now_ms.max(clock_ms),
            ..QueryTime::clock(clock_ms)
        }
    }

    /// Whether the item is visible.
    ///
    /// # Errors
    /// [`ApplyError::ClockBehind`]
    pub(crate) fn is_visible(self, item: &Item<'_>) -> Result<bool, ApplyError> {
        if item.is_expired(self.clock_ms) {
            return Ok(false);
        }
        if item.is_expired(self.now_ms) {
            return Err(ApplyError::ClockBehind);
        }
        Ok(true)
    }
}

/// Whether a query is answered from the keys it names.
pub fn is_point_query(query: &Query<'_>) -> bool {
    !matches!(
        query,
        Query::DbSize | Query::Scan { .. } | Query::Keys { .. }
    )
}

/// The answer to a query that names its keys, while their values are read one after the other: what
/// is not answered is not kept.
pub(crate) struct Answer<'q> {
    query: &'q Query<'q>,
    now_ms: u64,
    parts: Vec<Reply>,
    found: i64,
}

impl<'q> Answer<'q> {
    pub(crate) fn new(query: &'q Query<'q>, now_ms: u64) -> Answer<'q> {
        Answer {
            query,
            now_ms,
            parts: Vec::new(),
            found: 0,
        }
    }

    /// Bytes that the reply takes for this value.
    pub(crate) fn length(&self, item: Option<&Item<'_>>) -> usize {
        match *self.query {
            Query::Get { .. } | Query::GetRange { .. } | Query::MultiGet { .. } => {
                item.map_or(0, |item| item.value().len())
            }
            _ => 0,
        }
    }

    /// Takes in the next key's value, if it has one that is visible. `false`: the reply has no room
    /// for it.
    pub(crate) fn add(&mut self, item: Option<Item<'_>>, room: &mut ReplyBudget) -> bool {
        if !room.try_reserve(self.length(item.as_ref())) {
            return false;
        }
        self.found += i64::from(item.is_some());
        let part = match *self.query {
            Query::Exists { .. } => return true,
            Query::MultiGet { .. } => bytes(item),
            Query::Versions { .. } => Reply::Int(item.map_or(0, |item| item.version) as i64),
            _ => of_one(self.query, item, self.now_ms),
        };
        self.parts.push(part);
        true
    }

    pub(crate) fn reply(mut self) -> Reply {
        match *self.query {
            Query::Exists { .. } => Reply::Int(self.found),
            Query::MultiGet { .. } | Query::Versions { .. } => Reply::Array(self.parts),
            // They name one key.
            _ => self.parts.pop().unwrap_or(Reply::Nil),
        }
    }
}

/// Bytes of values in a reply.
pub(crate) fn reply_bytes(reply: &Reply) -> u64 {
    match reply {
        Reply::Bytes(bytes) => bytes.len() as u64,
        Reply::Array(parts) => parts.iter().map(reply_bytes).sum(),
        _ => 0,
    }
}

fn bytes(item: Option<Item<'_>>) -> Reply {
    item.map_or(Reply::Nil, |item| Reply::Bytes(item.into_value()))
}

/// Answers a query about one key.
fn of_one(query: &Query<'_>, item: Option<Item<'_>>, now_ms: u64) -> Reply {
    match *query {
        Query::Get { .. } => bytes(item),
        Query::StrLen { .. } => Reply::Int(item.map_or(0, |item| item.value().len() as i64)),
        Query::GetRange { start, end, .. } => {
            let value = item.map_or_else(Vec::new, Item::into_value);
            Reply::Bytes(range(&value, start, end).to_vec())
        }
        Query::Ttl {
            millis, absolute, ..
        } => Reply::Int(match item.map(|item| item.deadline) {
            None => -2,
            Some(None) => -1,
            Some(Some(deadline)) => {
                let from = if absolute { 0 } else { now_ms };
                let left = deadline.saturating_sub(from);
                let shown = if millis {
                    left
                } else {
                    left.saturating_add(500) / 1000
                };
                i64::try_from(shown).unwrap_or(i64::MAX)
            }
        }),
        // Type is left; the others name several keys or walk the key space.
        _ => Reply::Bytes(match item {
            Some(_) => b"string".to_vec(),
            None => b"none".to_vec(),
        }),
    }
}

/// Redis's GETRANGE: negative indexes count from the end, everything is clamped.
fn range(value: &[u8], start: i64, end: i64) -> &[u8] {
    let len = value.len() as i64;
    if start < 0 && end < 0 && start > end {
        return &[];
    }
    let from_end = |index: i64| {
        if index < 0 {
            index.saturating_add(len).max(0)
        } else {
            index
        }
    };
    let (start, end) = (from_end(start), from_end(end).min(len - 1));
    if len == 0 || start > end {
        &[]
    } else {
        &value[start as usize..=end as usize]
    }
}

/// Visits stored data keys and their visible state in order, from one on, until told to stop.
pub(crate) type Walk<'w> =
    dyn FnMut(&[u8], &mut dyn FnMut(&[u8]) -> bool) -> Result<(), ApplyError> + 'w;

/// Answers a query over the key space; `walk` visits the visible keys as they are stored.
pub(crate) fn answer_scan(query: &Query<'_>, walk: &mut Walk<'_>) -> Result<Reply, ApplyError> {
    match *query {
        Query::Scan {
            cursor,
            pattern,
            count,
            ..
        } => Ok(match page(walk, cursor, pattern, count)? {
            Some((next, keys)) => Reply::Array(vec![
                Reply::Bytes(next.to_string().into_bytes()),
                Reply::Array(keys),
            ]),
            None => Reply::Failed(Failure::ReplyTooLong),
        }),
        Query::Keys { pattern } => {
            let pattern = Pattern::new(pattern);
            let (mut keys, mut room, mut fits) = (Vec::new(), ReplyBudget::new(REPLY_BYTES), true);
            walk(&[space::DATA], &mut |stored| {
                let key = &stored[DATA_PREFIX..];
                if pattern.matches(key) {
                    fits = room.try_reserve(key.len());
                    if fits {
                        keys.push(Reply::Bytes(key.to_vec()));
                    }
                }
                fits
            })?;
            Ok(match fits {
                true => Reply::Array(keys),
                false => Reply::Failed(Failure::ReplyTooLong),
            })
        }
        _ => {
            let mut count = 0;
            walk(&[space::DATA], &mut |_| {
                count += 1;
                true
            })?;
            Ok(Reply::Int(count))
        }
    }
}

/// A page's keys, and the place of the next page, 0 at the end.
pub(crate) type Page = (u64, Vec<Reply>);

/// One page of whole places, so that the cursor that names the next one neither skips nor repeats a
/// key. `None`: the keys of one place alone are more than a reply may hold; any client can make so
/// many.
pub(crate) fn page(
    walk: &mut Walk<'_>,
    from: u64,
    pattern: Option<&[u8]>,
    count: u32,
) -> Result<Option<Page>, ApplyError> {
    let pattern = pattern.map(Pattern::new);
    // A page of nothing would answer its own cursor, and a client would ask without end.
    let count = count.max(1);
    let mut keys = Vec::new();
    let (mut seen, mut place, mut next) = (0u32, None, 0);
    let (mut bytes, mut room, mut fits) = (0, ReplyBudget::new(REPLY_BYTES), true);
    // Keys of the places before the one that is being read.
    let mut before = 0;
    walk(&place_key(from), &mut |stored| {
        let here = stored_place(stored);
        // Long keys make a page short.
        let is_full = seen >= count || bytes >= PAGE_BYTES;
        if is_full && place != Some(here) {
            next = here;
            return false;
        }
        if place != Some(here) {
            (place, before) = (Some(here), keys.len());
        }
        seen += 1;
        let key = &stored[DATA_PREFIX..];
        if pattern.as_ref().is_none_or(|it| it.matches(key)) {
            fits = room.try_reserve(key.len());
            if fits {
                bytes += key.len();
                keys.push(Reply::Bytes(key.to_vec()));
            } else if before > 0 {
                // It may fit alone.
                next = here;
                keys.truncate(before);
            }
        }
        fits
    })?;
    Ok((fits || before > 0).then_some((next, keys)))
}

/// What a scan shows each stored key and value to.
pub(crate) type Visit<'v> = dyn FnMut(&[u8], &[u8]) -> bool + 'v;
/// A scan of the map, or of a view of it.
pub(crate) type Scan<'s> = dyn Fn(&[u8], &mut Visit<'_>) -> Result<(), ApplyError> + 's;

/// Visits the visible data keys of a map in order, from one on, until told to stop.
pub(crate) fn walk(
    scan: &Scan<'_>,
    at: &dyn Fn(u16) -> QueryTime,
    from: &[u8],
    visit: &mut dyn FnMut(&[u8]) -> bool,
) -> Result<(), ApplyError> {
    let mut failed = None;
    scan(from, &mut |stored, value| {
        if stored[0] != space::DATA {
            return false;
        }
        let slot = u16::from_be_bytes([stored[1], stored[2]]);
        match read_item(Cow::Borrowed(value)).and_then(|item| at(slot).is_visible(&item)) {
            Ok(true) => visit(stored),
            Ok(false) => true,
            Err(error) => {
                failed = Some(error);
                false
            }
        }
    })?;
    failed.map_or(Ok(()), Err)
}

/// Answers a query that names its keys outside the log. `at` gives the time for a slot.
pub(crate) fn query(
    kv: &dyn Kv,
    query: &Query<'_>,
    at: &dyn Fn(u16) -> QueryTime,
    mode: Mode,
) -> Result<Reply, ApplyError> {
    let keys = query.keys();
    let is_loop = mode == Mode::NonBlocking;
    if is_loop && keys.len() > LOOP_KEYS {
        return Err(ApplyError::WouldBlock);
    }
    // The clock before the values: what is seen then is at least as new as the time it is judged
    // by.
    let times: Vec<QueryTime> = keys.iter().map(|key| at(slot::slot(key))).collect();
    let stored: Vec<Vec<u8>> = keys.iter().map(|key| data_key(key)).collect();
    let mut answer = Answer::new(query, times.first().map_or(0, |at| at.now_ms));
    let mut room = ReplyBudget::new(if is_loop { LOOP_BYTES } else { REPLY_BYTES });
    let mut ended = Ok(true);
    let mut times = times.iter();
    let mut add = |found: Option<Cow<'_, [u8]>>| {
        let at = times.next();
        let item = found.map(read_item).transpose();
        ended = item.and_then(|item| {
            let item = match (item, at) {
                (Some(item), Some(at)) if at.is_visible(&item)? => Some(item),
                _ => None,
            };
            Ok(answer.add(item, &mut room))
        });
        matches!(ended, Ok(true))
    };
    match &stored[..] {
        [one] => {
            add(kv.get(one, mode)?.map(Cow::Owned));
        }
        _ => kv.get_many(&stored, mode, &mut add)?,
    }
    match ended? {
        true => Ok(answer.reply()),
        false if is_loop => Err(ApplyError::WouldBlock),
        false => Ok(Reply::Failed(Failure::ReplyTooLong)),
    }
}

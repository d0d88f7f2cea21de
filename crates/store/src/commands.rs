//! The commands over a key-value map, with Redis's semantics. Nothing here knows which map it is.

use std::borrow::Cow;
use std::collections::HashMap;

use cyclone_wire::command::{Condition, Operation, Query};
use cyclone_wire::glob;
use cyclone_wire::reply::{Failure, Reply};
use cyclone_wire::resp::parse_i64;

use crate::decimal;
use crate::kv::{Change, DATA_PREFIX, Kv, data_key, place_key, space, stored_place};
use crate::machine::{ApplyError, Mode};

/// The changes of one call, seen by the commands that follow in it.
pub(crate) struct Overlay<'a> {
    kv: &'a dyn Kv,
    mode: Mode,
    max_value_bytes: usize,
    /// FLUSHALL happened: what is below counts for nothing.
    cleared: bool,
    values: HashMap<Vec<u8>, Option<Cow<'a, [u8]>>>,
}

impl<'a> Overlay<'a> {
    pub(crate) fn new(kv: &'a dyn Kv, mode: Mode, max_value_bytes: usize) -> Self {
        Overlay {
            kv,
            mode,
            max_value_bytes,
            cleared: false,
            values: HashMap::new(),
        }
    }

    fn get(&self, key: &[u8]) -> Result<Option<Cow<'_, [u8]>>, ApplyError> {
        let stored = data_key(key);
        if let Some(value) = self.values.get(&stored) {
            return Ok(value.as_deref().map(Cow::Borrowed));
        }
        if self.cleared {
            return Ok(None);
        }
        Ok(self.kv.get(&stored, self.mode)?.map(Cow::Owned))
    }

    fn owned(&self, key: &[u8]) -> Result<Option<Vec<u8>>, ApplyError> {
        Ok(self.get(key)?.map(Cow::into_owned))
    }

    fn put(&mut self, key: &[u8], value: Cow<'a, [u8]>) {
        self.values.insert(data_key(key), Some(value));
    }

    fn remove(&mut self, key: &[u8]) {
        self.values.insert(data_key(key), None);
    }

    /// What the call changes, in an order that gives the same result.
    pub(crate) fn changes(&self) -> impl Iterator<Item = Change<'_>> {
        let clear = self
            .cleared
            .then_some(Change::DeleteRange(&[space::DATA], &[space::DATA_END]));
        clear
            .into_iter()
            .chain(self.values.iter().map(|(key, value)| match value {
                Some(value) => Change::Put(key, value),
                None => Change::Delete(key),
            }))
    }

    /// Executes one operation. Sessions are the caller's business.
    pub(crate) fn execute(&mut self, operation: &Operation<'a>) -> Result<Reply, ApplyError> {
        let reply = match *operation {
            Operation::Noop | Operation::OpenSession | Operation::CloseSession { .. } => Reply::Ok,
            Operation::Set {
                key,
                value,
                condition,
                get,
            } => return self.set(key, value, condition, get),
            Operation::GetDel { key } => match self.owned(key)? {
                Some(value) => {
                    self.remove(key);
                    Reply::Bytes(value)
                }
                None => Reply::Nil,
            },
            Operation::Del { ref keys } => {
                let mut removed = 0;
                for key in keys {
                    if self.get(key)?.is_some() {
                        self.remove(key);
                        removed += 1;
                    }
                }
                Reply::Int(removed)
            }
            Operation::Append { key, value } => {
                let mut whole = self.owned(key)?.unwrap_or_default();
                if whole.len() + value.len() > self.max_value_bytes {
                    return Ok(Reply::Failed(Failure::TooLong));
                }
                whole.extend_from_slice(value);
                let len = whole.len() as i64;
                self.put(key, Cow::Owned(whole));
                Reply::Int(len)
            }
            Operation::SetRange { key, offset, value } => {
                return self.set_range(key, offset, value);
            }
            Operation::IncrBy { key, delta } => {
                let old = match self.get(key)? {
                    None => 0,
                    Some(text) => match parse_i64(&text) {
                        Some(number) => number,
                        None => return Ok(Reply::Failed(Failure::NotInteger)),
                    },
                };
                let Some(new) = old.checked_add(delta) else {
                    return Ok(Reply::Failed(Failure::Overflow));
                };
                self.put(key, Cow::Owned(new.to_string().into_bytes()));
                Reply::Int(new)
            }
            Operation::IncrByFloat { key, delta } => {
                let text = self.owned(key)?.unwrap_or_else(|| b"0".to_vec());
                let Some(number) = decimal::parse(&text) else {
                    return Ok(Reply::Failed(Failure::NotFloat));
                };
                let Some(sum) = decimal::add(&text, number, delta) else {
                    return Ok(Reply::Failed(Failure::NotFinite));
                };
                self.put(key, Cow::Owned(sum.clone().into_bytes()));
                Reply::Bytes(sum.into_bytes())
            }
            Operation::FlushAll => {
                self.values.clear();
                self.cleared = true;
                Reply::Ok
            }
            Operation::Read(ref query) => return self.read(query),
        };
        Ok(reply)
    }

    fn set(
        &mut self,
        key: &'a [u8],
        value: &'a [u8],
        condition: Condition,
        get: bool,
    ) -> Result<Reply, ApplyError> {
        // A blind SET must not read: it is what the log is fast at.
        let old = match (condition, get) {
            (Condition::Always, false) => None,
            (_, true) => self.owned(key)?,
            _ => self.get(key)?.map(|_| Vec::new()),
        };
        let met = match condition {
            Condition::Always => true,
            Condition::Absent => old.is_none(),
            Condition::Present => old.is_some(),
        };
        if met && value.len() > self.max_value_bytes {
            return Ok(Reply::Failed(Failure::TooLong));
        }
        if met {
            self.put(key, Cow::Borrowed(value));
        }
        Ok(match (get, met) {
            (true, _) => old.map_or(Reply::Nil, Reply::Bytes),
            (false, true) => Reply::Ok,
            (false, false) => Reply::Nil,
        })
    }

    fn set_range(&mut self, key: &[u8], offset: u64, value: &[u8]) -> Result<Reply, ApplyError> {
        let old = self.owned(key)?;
        if value.is_empty() {
            return Ok(Reply::Int(old.map_or(0, |old| old.len() as i64)));
        }
        let end = usize::try_from(offset)
            .ok()
            .and_then(|offset| offset.checked_add(value.len()));
        let Some(end) = end.filter(|&end| end <= self.max_value_bytes) else {
            return Ok(Reply::Failed(Failure::TooLong));
        };
        let mut whole = old.unwrap_or_default();
        whole.resize(whole.len().max(end), 0);
        whole[end - value.len()..end].copy_from_slice(value);
        let len = whole.len() as i64;
        self.put(key, Cow::Owned(whole));
        Ok(Reply::Int(len))
    }

    /// A read within the log: point reads see the call's earlier commands. Walks over the key space are not offered here.
    fn read(&self, query: &Query<'_>) -> Result<Reply, ApplyError> {
        point_read(query, |key| self.owned(key)).unwrap_or(Ok(Reply::Failed(Failure::Unsupported)))
    }
}

/// Answers queries that look at named keys; `None` for those that walk the key space.
pub(crate) fn point_read(
    query: &Query<'_>,
    get: impl Fn(&[u8]) -> Result<Option<Vec<u8>>, ApplyError>,
) -> Option<Result<Reply, ApplyError>> {
    let answer = || -> Result<Option<Reply>, ApplyError> {
        Ok(Some(match *query {
            Query::Get { key } => get(key)?.map_or(Reply::Nil, Reply::Bytes),
            Query::MultiGet { ref keys } => {
                let values = keys
                    .iter()
                    .map(|key| Ok(get(key)?.map_or(Reply::Nil, Reply::Bytes)));
                Reply::Array(values.collect::<Result<_, ApplyError>>()?)
            }
            Query::Exists { ref keys } => {
                let mut count = 0;
                for key in keys {
                    count += i64::from(get(key)?.is_some());
                }
                Reply::Int(count)
            }
            Query::StrLen { key } => Reply::Int(get(key)?.map_or(0, |value| value.len() as i64)),
            Query::GetRange { key, start, end } => {
                let value = get(key)?.unwrap_or_default();
                Reply::Bytes(range(&value, start, end).to_vec())
            }
            Query::Type { key } => Reply::Bytes(if get(key)?.is_some() {
                b"string".to_vec()
            } else {
                b"none".to_vec()
            }),
            Query::DbSize | Query::Scan { .. } | Query::Keys { .. } => return Ok(None),
        }))
    };
    answer().transpose()
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

/// Answers a query outside the log.
pub(crate) fn query(kv: &dyn Kv, query: &Query<'_>, mode: Mode) -> Result<Reply, ApplyError> {
    if let Some(answer) = point_read(query, |key| kv.get(&data_key(key), mode)) {
        return answer;
    }
    if mode == Mode::NonBlocking && !kv.scans_without_blocking() {
        return Err(ApplyError::WouldBlock);
    }
    match *query {
        Query::Scan {
            cursor,
            pattern,
            count,
        } => scan(kv, cursor, pattern, count),
        Query::Keys { pattern } => {
            let mut keys = Vec::new();
            walk(kv, |key| {
                if glob::matches(pattern, key) {
                    keys.push(Reply::Bytes(key.to_vec()));
                }
            })?;
            Ok(Reply::Array(keys))
        }
        _ => {
            let mut count = 0;
            walk(kv, |_| count += 1)?;
            Ok(Reply::Int(count))
        }
    }
}

fn walk(kv: &dyn Kv, mut visit: impl FnMut(&[u8])) -> Result<(), ApplyError> {
    kv.scan(&[space::DATA], &mut |stored, _| {
        let is_data = stored[0] == space::DATA;
        if is_data {
            visit(&stored[DATA_PREFIX..]);
        }
        is_data
    })
}

/// One page: whole places, so that the cursor that names the next one neither skips nor repeats a key.
fn scan(kv: &dyn Kv, cursor: u64, pattern: Option<&[u8]>, count: u32) -> Result<Reply, ApplyError> {
    // A page of nothing would answer its own cursor, and a client would ask for ever.
    let count = count.max(1);
    let mut keys = Vec::new();
    let (mut seen, mut place, mut next) = (0u32, None, 0);
    if cursor < 1 << 48 {
        kv.scan(&place_key(cursor), &mut |stored, _| {
            if stored[0] != space::DATA {
                return false;
            }
            let here = stored_place(stored);
            if seen >= count && place != Some(here) {
                next = here;
                return false;
            }
            place = Some(here);
            seen += 1;
            let key = &stored[DATA_PREFIX..];
            if pattern.is_none_or(|pattern| glob::matches(pattern, key)) {
                keys.push(Reply::Bytes(key.to_vec()));
            }
            true
        })?;
    }
    Ok(Reply::Array(vec![
        Reply::Bytes(next.to_string().into_bytes()),
        Reply::Array(keys),
    ]))
}

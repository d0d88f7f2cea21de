//! The commands over a key-value map, with Redis's semantics. Nothing here knows which map it is.

use std::borrow::Cow;
use std::cell::Cell;
use std::collections::HashMap;

use cyclone_wire::command::{Condition, Expectation, Expected, ExpireIf, Expiry, Operation, Query};
use cyclone_wire::planted::{self, Bug};
use cyclone_wire::reply::{Failure, Reply};
use cyclone_wire::resp::parse_i64;
use foldhash::fast::RandomState;

use crate::deadlines::Records;
use crate::decimal;
use crate::kv::{Change, Kv, data_key, read_item, space, stored_place};
use crate::machine::{ApplyError, Mode};
use crate::queries::{self, Answer, At};
use crate::room::{LOGGED_REPLY_BYTES, LOOP_APPLY_BYTES, LOOP_BYTES, LOOP_KEYS, REPLY_BYTES, Room};
use crate::value::{Item, encode};

/// Deadlines that one sweep looks at, at most, whatever it asks for.
const MAX_SWEEP: u32 = 1024;

/// A number that no other command of the same log has: for sessions and versions.
pub(crate) fn number(index: u64, position: usize) -> u64 {
    (index << 12) | position as u64
}

/// What it costs an event loop to look up a key, and to note a change, in bytes of values read.
const LOOKUP_BYTES: usize = 512;
const CHANGE_BYTES: usize = 64;

/// The changes of one call, seen by the commands that follow in it.
pub(crate) struct Overlay<'a> {
    kv: &'a dyn Kv,
    mode: Mode,
    /// The longest value that a command may produce.
    pub(crate) max_value_bytes: usize,
    /// FLUSHALL happened: what is below counts for nothing.
    cleared: bool,
    /// What is to be stored, by stored key; `None`: removed.
    values: HashMap<Vec<u8>, Option<Vec<u8>>, RandomState>,
    pub(crate) records: Records,
    /// Physical logs in all.
    count: u16,
    /// The logs of the entry being executed, ascending, each with the entry's index there.
    places: Vec<(u16, u64)>,
    clock_ms: u64,
    position: usize,
    /// What the current command's reply may still hold.
    room: Room,
    /// Bytes of values that the call may still look at on an event loop.
    left: Cell<usize>,
}

impl<'a> Overlay<'a> {
    pub(crate) fn new(kv: &'a dyn Kv, mode: Mode, max_value_bytes: usize, count: u16) -> Self {
        Overlay {
            kv,
            mode,
            max_value_bytes,
            cleared: false,
            values: HashMap::default(),
            records: Records::default(),
            count,
            places: Vec::new(),
            clock_ms: 0,
            position: 0,
            room: Room::new(LOGGED_REPLY_BYTES),
            left: Cell::new(match mode {
                Mode::NonBlocking => LOOP_APPLY_BYTES,
                Mode::Blocking => usize::MAX,
            }),
        }
    }

    fn spend(&self, bytes: usize) {
        self.left.set(self.left.get().saturating_sub(bytes));
    }

    /// Whether the call is to be given up because it is too much for an event loop.
    pub(crate) fn is_too_much(&self) -> bool {
        self.left.get() == 0
    }

    /// The next entry: which logs it is of, ascending, and its index in each.
    pub(crate) fn enter(&mut self, places: &[(u16, u64)]) {
        self.places.clear();
        self.places.extend_from_slice(places);
    }

    /// The next command of the entry: the state's time, and its place.
    pub(crate) fn begin(&mut self, clock_ms: u64, position: usize) {
        (self.clock_ms, self.position) = (clock_ms, position);
        // By the command, not by the call: entries are grouped into calls differently on every replica.
        self.room = Room::new(LOGGED_REPLY_BYTES);
    }

    /// The log that a stored key lives in, and the version that the current command gives it. A key's versions must never
    /// repeat, so they come from that log.
    fn home(&self, stored: &[u8]) -> (u16, u64) {
        let slot = (stored_place(stored) >> 32) as u16;
        let place = match &self.places[..] {
            [only] => only,
            several => several
                .iter()
                .find(|(log, _)| *log == slot % self.count.max(1))
                .unwrap_or(&(0, 0)),
        };
        (place.0, number(place.1, self.position))
    }

    fn get(&self, key: &[u8]) -> Result<Option<Item<'_>>, ApplyError> {
        let stored = data_key(key);
        let found = match self.values.get(&stored) {
            Some(value) => value.as_deref().map(Cow::Borrowed),
            None if self.cleared => None,
            None => self.kv.get(&stored, self.mode)?.map(Cow::Owned),
        };
        if self.mode == Mode::NonBlocking {
            let length = found.as_ref().map_or(0, |found| found.len());
            self.spend(LOOKUP_BYTES + length);
            if self.is_too_much() {
                return Err(ApplyError::WouldBlock);
            }
        }
        let item = found.map(read_item).transpose()?;
        Ok(item.filter(|item| !item.is_expired(self.clock_ms)))
    }

    /// Stores a value in place of one with the deadline `old`, as far as that is known. A deadline that has passed removes the key.
    fn put(&mut self, key: &[u8], parts: &[&[u8]], old: Option<u64>, deadline: Option<u64>) {
        if deadline.is_some_and(|deadline| deadline <= self.clock_ms) {
            return self.remove(key, old);
        }
        self.spend(CHANGE_BYTES);
        let stored = data_key(key);
        let (log, version) = self.home(&stored);
        if old != deadline {
            if let Some(old) = old {
                self.records.remove(log, old, &stored);
            }
            if let Some(deadline) = deadline {
                self.records.write(log, deadline, &stored);
            }
        }
        self.values
            .insert(stored, Some(encode(version, deadline, parts)));
    }

    /// Removes a key that has the deadline `old`.
    fn remove(&mut self, key: &[u8], old: Option<u64>) {
        self.spend(CHANGE_BYTES);
        let stored = data_key(key);
        if let Some(old) = old {
            self.records.remove(self.home(&stored).0, old, &stored);
        }
        self.values.insert(stored, None);
    }

    /// What the call changes, in an order that gives the same result.
    pub(crate) fn changes(&self) -> impl Iterator<Item = Change<'_>> {
        let clear = [
            Change::DeleteRange(&[space::DATA], &[space::DATA_END]),
            Change::DeleteRange(&[space::DEADLINE], &[space::DEADLINE_END]),
        ];
        let clear = clear.into_iter().filter(|_| self.cleared);
        let records = self.records.changes.iter();
        clear
            .chain(self.values.iter().map(|(key, value)| match value {
                Some(value) => Change::Put(key, value),
                None => Change::Delete(key),
            }))
            .chain(records.map(|(key, written)| match written {
                true => Change::Put(key, &[]),
                false => Change::Delete(key),
            }))
    }

    fn deadline(&self, expiry: Expiry, old: Option<u64>) -> Option<u64> {
        match expiry {
            Expiry::Keep => old,
            Expiry::At(ms) => Some(ms),
            Expiry::After(ms) => Some(self.clock_ms.saturating_add(ms)),
            Expiry::Never => None,
        }
    }

    /// Executes one operation. Sessions are the caller's business.
    pub(crate) fn execute(&mut self, operation: &Operation<'_>) -> Result<Reply, ApplyError> {
        let reply = match *operation {
            Operation::Noop | Operation::OpenSession | Operation::CloseSession { .. } => Reply::Ok,
            Operation::Set {
                key,
                value,
                condition,
                get,
            } => return self.set(key, value, condition, get, Expiry::Never),
            Operation::SetExpiring {
                key,
                value,
                condition,
                get,
                expiry,
            } => return self.set(key, value, condition, get, expiry),
            Operation::GetDel { key } => return self.get_del(key),
            Operation::Del { ref keys } => {
                let mut removed = 0;
                for key in keys {
                    if let Some(old) = self.get(key)?.map(|old| old.deadline) {
                        self.remove(key, old);
                        removed += 1;
                    }
                }
                Reply::Int(removed)
            }
            Operation::Append { key, value } => return self.append(key, value),
            Operation::SetRange { key, offset, value } => {
                return self.set_range(key, offset, value);
            }
            Operation::IncrBy { key, delta } => return self.add(key, delta),
            Operation::IncrByFloat { key, delta } => return self.add_float(key, delta),
            Operation::FlushAll => {
                self.values.clear();
                self.records.clear();
                self.cleared = true;
                Reply::Ok
            }
            Operation::Read(ref query) => return self.read(query),
            Operation::Expire {
                key,
                expiry,
                condition,
            } => return self.expire(key, expiry, condition),
            Operation::GetExpire { key, expiry } => return self.get_expire(key, expiry),
            Operation::Batch {
                ref expectations,
                ref operations,
            } => return self.batch(expectations, operations),
            Operation::Sweep { limit } => return self.sweep(limit.min(MAX_SWEEP) as usize),
            // Handled by the machine: they concern its books, not its keys.
            Operation::Members { .. } | Operation::Record { .. } => {
                Reply::Failed(Failure::Unsupported)
            }
        };
        Ok(reply)
    }

    fn set(
        &mut self,
        key: &[u8],
        value: &[u8],
        condition: Condition,
        get: bool,
        expiry: Expiry,
    ) -> Result<Reply, ApplyError> {
        // A blind SET must not read: it is what the log is fast at. With a deadline it is often repeated, and would leave a record each time.
        let blind = condition == Condition::Always && !get && expiry == Expiry::Never;
        let old = if blind { None } else { self.get(key)? };
        let (existed, old_deadline) = (old.is_some(), old.as_ref().and_then(|old| old.deadline));
        let old = old.filter(|_| get).map(Item::into_value);
        if let Some(old) = &old
            && !self.room.takes(old.len())
        {
            return Ok(Reply::Failed(Failure::ReplyTooLong));
        }
        let met = match condition {
            Condition::Always => true,
            Condition::Absent => !existed,
            Condition::Present => existed,
        };
        if met && value.len() > self.max_value_bytes {
            return Ok(Reply::Failed(Failure::TooLong));
        }
        if met {
            let deadline = self.deadline(expiry, old_deadline);
            self.put(key, &[value], old_deadline, deadline);
        }
        Ok(match (get, met) {
            (true, _) => old.map_or(Reply::Nil, Reply::Bytes),
            (false, true) => Reply::Ok,
            (false, false) => Reply::Nil,
        })
    }

    fn get_del(&mut self, key: &[u8]) -> Result<Reply, ApplyError> {
        let Some(item) = self.get(key)? else {
            return Ok(Reply::Nil);
        };
        let (deadline, value) = (item.deadline, item.into_value());
        // What cannot be told is not to be lost.
        if !self.room.takes(value.len()) {
            return Ok(Reply::Failed(Failure::ReplyTooLong));
        }
        self.remove(key, deadline);
        Ok(Reply::Bytes(value))
    }

    fn append(&mut self, key: &[u8], value: &[u8]) -> Result<Reply, ApplyError> {
        let old = self.get(key)?;
        let deadline = old.as_ref().and_then(|old| old.deadline);
        let whole = old.map_or_else(Vec::new, Item::into_value);
        if whole.len() + value.len() > self.max_value_bytes {
            return Ok(Reply::Failed(Failure::TooLong));
        }
        self.put(key, &[&whole, value], deadline, deadline);
        Ok(Reply::Int((whole.len() + value.len()) as i64))
    }

    fn set_range(&mut self, key: &[u8], offset: u64, value: &[u8]) -> Result<Reply, ApplyError> {
        let old = self.get(key)?;
        let deadline = old.as_ref().and_then(|old| old.deadline);
        if value.is_empty() {
            return Ok(Reply::Int(old.map_or(0, |old| old.value().len() as i64)));
        }
        let end = usize::try_from(offset)
            .ok()
            .and_then(|offset| offset.checked_add(value.len()));
        let Some(end) = end.filter(|&end| end <= self.max_value_bytes) else {
            return Ok(Reply::Failed(Failure::TooLong));
        };
        let mut whole = old.map_or_else(Vec::new, Item::into_value);
        whole.resize(whole.len().max(end), 0);
        whole[end - value.len()..end].copy_from_slice(value);
        self.put(key, &[&whole], deadline, deadline);
        Ok(Reply::Int(whole.len() as i64))
    }

    fn add(&mut self, key: &[u8], delta: i64) -> Result<Reply, ApplyError> {
        let (old, deadline) = match self.get(key)? {
            None => (0, None),
            Some(item) => match parse_i64(item.value()) {
                Some(number) => (number, item.deadline),
                None => return Ok(Reply::Failed(Failure::NotInteger)),
            },
        };
        let Some(new) = old.checked_add(delta) else {
            return Ok(Reply::Failed(Failure::Overflow));
        };
        self.put(key, &[new.to_string().as_bytes()], deadline, deadline);
        Ok(Reply::Int(new))
    }

    fn add_float(&mut self, key: &[u8], delta: f64) -> Result<Reply, ApplyError> {
        let old = self.get(key)?;
        let deadline = old.as_ref().and_then(|old| old.deadline);
        let text = old.map_or_else(|| b"0".to_vec(), Item::into_value);
        let Some(number) = decimal::parse(&text) else {
            return Ok(Reply::Failed(Failure::NotFloat));
        };
        let Some(sum) = decimal::add(&text, number, delta) else {
            return Ok(Reply::Failed(Failure::NotFinite));
        };
        self.put(key, &[sum.as_bytes()], deadline, deadline);
        Ok(Reply::Bytes(sum.into_bytes()))
    }

    fn expire(
        &mut self,
        key: &[u8],
        expiry: Expiry,
        condition: ExpireIf,
    ) -> Result<Reply, ApplyError> {
        let Some(item) = self.get(key)? else {
            return Ok(Reply::Int(0));
        };
        let (old, new) = (item.deadline, self.deadline(expiry, item.deadline));
        let met = match (expiry, condition) {
            (Expiry::Keep, _) => false,
            (Expiry::Never, _) => old.is_some(),
            (_, ExpireIf::Always) => true,
            (_, ExpireIf::None) => old.is_none(),
            (_, ExpireIf::Some) => old.is_some(),
            (_, ExpireIf::Later) => old.is_some() && new > old,
            (_, ExpireIf::Earlier) => old.is_none() || new < old,
            (_, ExpireIf::EarlierThanSome) => old.is_some() && new < old,
        };
        if met {
            let value = item.into_value();
            self.put(key, &[&value], old, new);
        }
        Ok(Reply::Int(i64::from(met)))
    }

    fn get_expire(&mut self, key: &[u8], expiry: Expiry) -> Result<Reply, ApplyError> {
        let Some(item) = self.get(key)? else {
            return Ok(Reply::Nil);
        };
        let (old, new) = (item.deadline, self.deadline(expiry, item.deadline));
        let value = item.into_value();
        if !self.room.takes(value.len()) {
            return Ok(Reply::Failed(Failure::ReplyTooLong));
        }
        // A deadline that is set again counts as a change, one that was not there and is taken away does not.
        if new.is_some() && expiry != Expiry::Keep || old != new {
            self.put(key, &[&value], old, new);
        }
        Ok(Reply::Bytes(value))
    }

    /// All or nothing; see [`Operation::Batch`].
    fn batch(
        &mut self,
        expectations: &[Expectation<'_>],
        operations: &[Operation<'_>],
    ) -> Result<Reply, ApplyError> {
        for expectation in expectations {
            let item = self.get(expectation.key)?;
            let holds = match expectation.state {
                Expected::Present => item.is_some(),
                Expected::Absent => item.is_none(),
                Expected::Value(value) => item.is_some_and(|item| item.value() == value),
                Expected::Version(version) => item.map_or(0, |item| item.version) == version,
            };
            if !holds {
                return Ok(Reply::Failed(Failure::ConditionFailed));
            }
        }
        let replies = operations.iter().map(|operation| self.execute(operation));
        Ok(Reply::Array(replies.collect::<Result<_, _>>()?))
    }

    /// Removes keys that have expired. Nobody can tell, but the store gets its room back.
    fn sweep(&mut self, limit: usize) -> Result<Reply, ApplyError> {
        let early_ms = if planted::has(Bug::SweptEarly) {
            1_000
        } else {
            0
        };
        let clock_ms = self.clock_ms + early_ms;
        let log = self.places.first().map_or(0, |(log, _)| *log);
        let due = self
            .records
            .take_due(self.kv, self.mode, log, clock_ms, limit)?;
        let mut removed = 0;
        for (deadline, key) in due {
            let stored = data_key(&key);
            let found = match self.values.get(&stored) {
                Some(value) => value.as_deref().map(Cow::Borrowed),
                None if self.cleared => None,
                None => self.kv.get(&stored, self.mode)?.map(Cow::Owned),
            };
            let item = found.map(read_item).transpose()?;
            if item.is_some_and(|item| item.deadline == Some(deadline)) {
                self.values.insert(stored, None);
                removed += 1;
            }
        }
        Ok(Reply::Int(removed))
    }

    /// A read within the log: reads of named keys see the call's earlier commands. Walks over the key space are not offered
    /// here: they would hold up the log on every replica.
    fn read(&mut self, query: &Query<'_>) -> Result<Reply, ApplyError> {
        if !queries::names_its_keys(query) {
            return Ok(Reply::Failed(Failure::Unsupported));
        }
        let (mut answer, mut room) = (Answer::new(query, self.clock_ms), self.room);
        for key in query.keys().iter() {
            if !answer.add(self.get(key)?, &mut room) {
                return Ok(Reply::Failed(Failure::ReplyTooLong));
            }
        }
        self.room = room;
        Ok(answer.reply())
    }
}

/// What a scan shows each stored key and value to.
pub(crate) type Visit<'v> = dyn FnMut(&[u8], &[u8]) -> bool + 'v;
/// A scan of the map, or of a view of it.
pub(crate) type Scan<'s> = dyn Fn(&[u8], &mut Visit<'_>) -> Result<(), ApplyError> + 's;

/// Visits the visible data keys of a map in order, from one on, until told to stop.
pub(crate) fn walk(
    scan: &Scan<'_>,
    at: &dyn Fn(u16) -> At,
    from: &[u8],
    visit: &mut dyn FnMut(&[u8]) -> bool,
) -> Result<(), ApplyError> {
    let mut failed = None;
    scan(from, &mut |stored, value| {
        if stored[0] != space::DATA {
            return false;
        }
        let slot = u16::from_be_bytes([stored[1], stored[2]]);
        match read_item(Cow::Borrowed(value)).and_then(|item| at(slot).sees(&item)) {
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
    at: &dyn Fn(u16) -> At,
    mode: Mode,
) -> Result<Reply, ApplyError> {
    let keys = query.keys();
    let is_loop = mode == Mode::NonBlocking;
    if is_loop && keys.len() > LOOP_KEYS {
        return Err(ApplyError::WouldBlock);
    }
    // The clock before the values: what is seen then is at least as new as the time it is judged by.
    let times: Vec<At> = keys
        .iter()
        .map(|key| at(cyclone_wire::slot::slot(key)))
        .collect();
    let stored: Vec<Vec<u8>> = keys.iter().map(|key| data_key(key)).collect();
    let mut answer = Answer::new(query, times.first().map_or(0, |at| at.now_ms));
    let mut room = Room::new(if is_loop { LOOP_BYTES } else { REPLY_BYTES });
    let mut ended = Ok(true);
    let mut times = times.iter();
    let mut add = |found: Option<Cow<'_, [u8]>>| {
        let at = times.next();
        let item = found.map(read_item).transpose();
        ended = item.and_then(|item| {
            let item = match (item, at) {
                (Some(item), Some(at)) if at.sees(&item)? => Some(item),
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

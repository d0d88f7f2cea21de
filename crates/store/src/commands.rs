//! The commands over a key-value map, with Redis's semantics. Nothing here knows which map it is.

use std::borrow::Cow;
use std::cell::Cell;

use cyclone_wire::command::{Condition, Expectation, Expected, ExpireIf, Expiry, Operation, Query};
use cyclone_wire::long_double::LongDouble;
use cyclone_wire::planted::{self, Bug};
use cyclone_wire::reply::{Failure, Reply};
use cyclone_wire::resp::parse_i64;
use cyclone_wire::work;

use crate::deadlines::Records;
use crate::decimal;
use crate::kv::{Change, Kv, data_key, read_item, space, stored_place};
use crate::machine::{ApplyError, Mode};
use crate::queries::{self, Answer};
use crate::reply_budget::{LOGGED_REPLY_BYTES, LOOP_APPLY_BYTES, ReplyBudget};
use crate::value::{Item, encode};
use crate::work::{Stop, Undo, Values, Work};

/// Deadlines that one sweep checks, at most, whatever it asks for.
const MAX_SWEEP: u32 = 1024;

/// A number that no other command of the same log has: for sessions and versions.
pub(crate) fn number(index: u64, position: usize) -> u64 {
    (index << 12) | position as u64
}

/// What it costs an event loop to look up a key, and to note a change, in bytes of values read.
const LOOKUP_BYTES: usize = 512;
const CHANGE_BYTES: usize = 64;
/// What a digit of a sum of floats costs an event loop: large ones have 5,000, whose conversion
/// takes about 0.3 ms.
const FLOAT_BYTE_COST: usize = 32;

/// The changes of one call, seen by the commands that follow in it.
pub(crate) struct Overlay<'a> {
    kv: &'a dyn Kv,
    mode: Mode,
    /// The longest value that a command may produce.
    pub(crate) max_value_bytes: usize,
    /// FLUSHALL happened: what is below counts for nothing.
    cleared: bool,
    /// What is to be stored, by stored key; `None`: removed.
    values: Values,
    pub(crate) records: Records,
    /// Physical logs in all.
    count: u16,
    /// The logs of the entry being executed, ascending, each with the entry's index there.
    applied_positions: Vec<(u16, u64)>,
    clock_ms: u64,
    position: usize,
    /// What the current command's reply may still hold.
    room: ReplyBudget,
    /// Bytes of values that the call may still read on an event loop.
    loop_bytes_left: Cell<usize>,
    /// How much the current command, and the call, have done.
    pub(crate) work: Work,
    /// Whether somebody gets the current command's reply.
    wants_reply: bool,
    /// How to take back what the current command has changed, newest last; `None`: it changes
    /// nothing before it is certain that it may.
    undo: Option<Vec<Undo>>,
}

impl<'a> Overlay<'a> {
    pub(crate) fn new(kv: &'a dyn Kv, mode: Mode, max_value_bytes: usize, count: u16) -> Self {
        Overlay {
            kv,
            mode,
            max_value_bytes,
            cleared: false,
            values: Values::default(),
            records: Records::default(),
            count,
            applied_positions: Vec::new(),
            clock_ms: 0,
            position: 0,
            room: ReplyBudget::new(LOGGED_REPLY_BYTES),
            loop_bytes_left: Cell::new(match mode {
                Mode::NonBlocking => LOOP_APPLY_BYTES,
                Mode::Blocking => usize::MAX,
            }),
            work: Work::default(),
            wants_reply: true,
            undo: None,
        }
    }

    fn charge_loop_bytes(&self, bytes: usize) {
        self.loop_bytes_left
            .set(self.loop_bytes_left.get().saturating_sub(bytes));
    }

    /// Whether the call is to be given up because it is too much for an event loop.
    pub(crate) fn is_loop_budget_spent(&self) -> bool {
        self.loop_bytes_left.get() == 0
    }

    /// The next entry: which logs it is of, ascending, and its index in each.
    pub(crate) fn begin_entry(&mut self, applied_positions: &[(u16, u64)]) {
        self.applied_positions.clear();
        self.applied_positions.extend_from_slice(applied_positions);
    }

    /// The next command of the entry: the state's time, its place, and whether its reply is wanted.
    pub(crate) fn begin(&mut self, clock_ms: u64, position: usize, wants_reply: bool) {
        (self.clock_ms, self.position) = (clock_ms, position);
        self.wants_reply = wants_reply;
        // By the command, not by the call: entries are grouped into calls differently on every
        // replica.
        self.room = ReplyBudget::new(LOGGED_REPLY_BYTES);
    }

    /// The log that a stored key lives in, and the version that the current command gives it. A
    /// key's versions must never repeat, so they come from that log.
    fn log_and_version(&self, stored: &[u8]) -> (u16, u64) {
        let slot = (stored_place(stored) >> 32) as u16;
        let place = match &self.applied_positions[..] {
            [only] => only,
            several => several
                .iter()
                .find(|(log, _)| *log == slot % self.count.max(1))
                .unwrap_or(&(0, 0)),
        };
        (place.0, number(place.1, self.position))
    }

    /// Notes a part of the reply with so many bytes of values.
    fn charge_reply(&self, bytes: usize) -> Result<(), Stop> {
        self.work.charge(work::REPLY_BYTES + bytes as u64)
    }

    /// Whether the current command's reply is to be made.
    fn needs_reply(&self) -> bool {
        self.wants_reply || planted::has(Bug::RepliesEverywhere)
    }

    /// A value as a reply, where somebody gets it.
    fn value_reply(&mut self, value: Vec<u8>) -> Reply {
        if !self.needs_reply() {
            return Reply::Nil;
        }
        self.work.reply_bytes += value.len() as u64;
        Reply::Bytes(value)
    }

    fn get(&self, key: &[u8]) -> Result<Option<Item<'_>>, Stop> {
        let stored = data_key(key);
        let found = match self.values.get(&stored) {
            Some(value) => value.as_deref().map(Cow::Borrowed),
            None if self.cleared => None,
            None => self.kv.get(&stored, self.mode)?.map(Cow::Owned),
        };
        let length = found.as_ref().map_or(0, |found| found.len());
        if self.mode == Mode::NonBlocking {
            self.charge_loop_bytes(LOOKUP_BYTES + length);
            if self.is_loop_budget_spent() {
                return Err(ApplyError::WouldBlock.into());
            }
        }
        self.work.charge(work::LOOKUP_BYTES + length as u64)?;
        let item = found.map(read_item).transpose()?;
        Ok(item.filter(|item| !item.is_expired(self.clock_ms)))
    }

    /// Stores a value in place of one with the deadline `old`, as far as that is known. A deadline
    /// that has passed removes the key.
    fn put(
        &mut self,
        key: &[u8],
        parts: &[&[u8]],
        old: Option<u64>,
        deadline: Option<u64>,
    ) -> Result<(), Stop> {
        if deadline.is_some_and(|deadline| deadline <= self.clock_ms) {
            return self.remove(key, old);
        }
        let length: usize = key.len() + parts.iter().map(|part| part.len()).sum::<usize>();
        self.work.charge(work::STORE_BYTES + length as u64)?;
        self.charge_loop_bytes(CHANGE_BYTES);
        let stored = data_key(key);
        let (log, version) = self.log_and_version(&stored);
        if old != deadline {
            if let Some(old) = old {
                self.records.remove(log, old, &stored);
            }
            if let Some(deadline) = deadline {
                self.records.write(log, deadline, &stored);
            }
        }
        self.change(stored, Some(encode(version, deadline, parts)));
        Ok(())
    }

    /// Removes a key that has the deadline `old`.
    fn remove(&mut self, key: &[u8], old: Option<u64>) -> Result<(), Stop> {
        self.work.charge(work::STORE_BYTES + key.len() as u64)?;
        self.charge_loop_bytes(CHANGE_BYTES);
        let stored = data_key(key);
        if let Some(old) = old {
            self.records
                .remove(self.log_and_version(&stored).0, old, &stored);
        }
        self.change(stored, None);
        Ok(())
    }

    fn change(&mut self, stored: Vec<u8>, value: Option<Vec<u8>>) {
        let Some(undo) = &mut self.undo else {
            self.values.insert(stored, value);
            return;
        };
        let key = stored.clone();
        undo.push(Undo::Value(key, self.values.insert(stored, value)));
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

    /// Executes one command, which changes nothing if it does more work than it may. Sessions are
    /// the caller's business.
    pub(crate) fn execute(&mut self, operation: &Operation<'_>) -> Result<Reply, ApplyError> {
        let is_of_many = operation.is_of_many();
        self.work.begin_command(is_of_many);
        if is_of_many && !is_read_or_blind(operation) {
            self.undo = Some(Vec::new());
            self.records.begin_undo();
        }
        let least = match is_of_many {
            true => operation.least_work(self.max_value_bytes as u64),
            false => 0,
        };
        // What it needs whatever is stored is not begun with.
        let result = match self.work.check_allowed(least) {
            Ok(()) => self.execute_operation(operation),
            Err(stop) => Err(stop),
        };
        let excess = match &result {
            Err(Stop::TooMuch(excess)) => Some(*excess),
            _ => None,
        };
        if let Some(undo) = self.undo.take() {
            self.records.end_undo(excess.is_some());
            if excess.is_some() && !planted::has(Bug::ExcessKept) {
                self.revert(undo);
            }
        }
        self.work.end_command();
        match (result, excess) {
            (_, Some(excess)) => Ok(Reply::Failed(excess)),
            (Err(Stop::Error(error)), _) => Err(error),
            (Err(Stop::TooMuch(failure)), None) => Ok(Reply::Failed(failure)),
            (Ok(reply), None) => Ok(reply),
        }
    }

    fn revert(&mut self, undo: Vec<Undo>) {
        for step in undo.into_iter().rev() {
            match step {
                Undo::Value(key, Some(before)) => {
                    self.values.insert(key, before);
                }
                Undo::Value(key, None) => {
                    self.values.remove(&key);
                }
                Undo::Cleared(values, cleared) => {
                    (self.values, self.cleared) = (values, cleared);
                }
            }
        }
    }

    fn execute_operation(&mut self, operation: &Operation<'_>) -> Result<Reply, Stop> {
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
                        self.remove(key, old)?;
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
            Operation::IncrByLongDouble { key, delta } => {
                return self.add_long_double(key, delta);
            }
            Operation::FlushAll => {
                let values = std::mem::take(&mut self.values);
                if let Some(undo) = &mut self.undo {
                    undo.push(Undo::Cleared(values, self.cleared));
                }
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
            Operation::Members { .. } | Operation::Record { .. } | Operation::SetClock { .. } => {
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
    ) -> Result<Reply, Stop> {
        // A blind SET must not read: it is what the log is fast at. With a deadline it is often
        // repeated, and would leave a record each time.
        let blind = condition == Condition::Always && !get && expiry == Expiry::Never;
        let old = if blind { None } else { self.get(key)? };
        let (existed, old_deadline) = (old.is_some(), old.as_ref().and_then(|old| old.deadline));
        let old = old.filter(|_| get).map(Item::into_value);
        if let Some(old) = &old {
            if !self.room.try_reserve(old.len()) {
                return Ok(Reply::Failed(Failure::ReplyTooLong));
            }
            self.charge_reply(old.len())?;
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
            self.put(key, &[value], old_deadline, deadline)?;
        }
        Ok(match (get, met) {
            (true, _) => old.map_or(Reply::Nil, |old| self.value_reply(old)),
            (false, true) => Reply::Ok,
            (false, false) => Reply::Nil,
        })
    }

    fn get_del(&mut self, key: &[u8]) -> Result<Reply, Stop> {
        let Some(item) = self.get(key)? else {
            return Ok(Reply::Nil);
        };
        let (deadline, value) = (item.deadline, item.into_value());
        // A value that cannot be returned must not be lost.
        if !self.room.try_reserve(value.len()) {
            return Ok(Reply::Failed(Failure::ReplyTooLong));
        }
        self.charge_reply(value.len())?;
        self.remove(key, deadline)?;
        Ok(self.value_reply(value))
    }

    fn append(&mut self, key: &[u8], value: &[u8]) -> Result<Reply, Stop> {
        let old = self.get(key)?;
        let deadline = old.as_ref().and_then(|old| old.deadline);
        let whole = old.map_or_else(Vec::new, Item::into_value);
        if whole.len() + value.len() > self.max_value_bytes {
            return Ok(Reply::Failed(Failure::TooLong));
        }
        self.put(key, &[&whole, value], deadline, deadline)?;
        Ok(Reply::Int((whole.len() + value.len()) as i64))
    }

    fn set_range(&mut self, key: &[u8], offset: u64, value: &[u8]) -> Result<Reply, Stop> {
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
        self.work.check_allowed(whole.len().max(end) as u64)?;
        if self.mode == Mode::NonBlocking {
            // What is read has been counted, what is made of nothing has not.
            self.charge_loop_bytes(end);
            if self.is_loop_budget_spent() {
                return Err(ApplyError::WouldBlock.into());
            }
        }
        whole.resize(whole.len().max(end), 0);
        whole[end - value.len()..end].copy_from_slice(value);
        self.put(key, &[&whole], deadline, deadline)?;
        Ok(Reply::Int(whole.len() as i64))
    }

    fn add(&mut self, key: &[u8], delta: i64) -> Result<Reply, Stop> {
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
        self.put(key, &[new.to_string().as_bytes()], deadline, deadline)?;
        Ok(Reply::Int(new))
    }

    fn add_float(&mut self, key: &[u8], delta: f64) -> Result<Reply, Stop> {
        let old = self.get(key)?;
        let deadline = old.as_ref().and_then(|old| old.deadline);
        let text = old.map_or_else(|| b"0".to_vec(), Item::into_value);
        let Some(number) = decimal::parse(&text) else {
            return Ok(Reply::Failed(Failure::NotFloat));
        };
        let Some(sum) = decimal::add(&text, number, delta) else {
            return Ok(Reply::Failed(Failure::NotFinite));
        };
        self.put(key, &[sum.as_bytes()], deadline, deadline)?;
        Ok(self.value_reply(sum.into_bytes()))
    }

    fn add_long_double(&mut self, key: &[u8], delta: LongDouble) -> Result<Reply, Stop> {
        let (old, deadline) = match self.get(key)? {
            None => (Some(LongDouble::ZERO), None),
            Some(item) => (LongDouble::parse(item.value()), item.deadline),
        };
        let Some(old) = old else {
            return Ok(Reply::Failed(Failure::NotFloat));
        };
        let Some(sum) = old.plus(delta).and_then(LongDouble::to_text) else {
            return Ok(Reply::Failed(Failure::NotFinite));
        };
        self.charge_loop_bytes(sum.len() * FLOAT_BYTE_COST);
        if sum.len() > self.max_value_bytes {
            return Ok(Reply::Failed(Failure::TooLong));
        }
        if !self.room.try_reserve(sum.len()) {
            return Ok(Reply::Failed(Failure::ReplyTooLong));
        }
        self.charge_reply(sum.len())?;
        self.put(key, &[sum.as_bytes()], deadline, deadline)?;
        Ok(self.value_reply(sum.into_bytes()))
    }

    fn expire(&mut self, key: &[u8], expiry: Expiry, condition: ExpireIf) -> Result<Reply, Stop> {
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
            self.put(key, &[&value], old, new)?;
        }
        Ok(Reply::Int(i64::from(met)))
    }

    fn get_expire(&mut self, key: &[u8], expiry: Expiry) -> Result<Reply, Stop> {
        let Some(item) = self.get(key)? else {
            return Ok(Reply::Nil);
        };
        let (old, new) = (item.deadline, self.deadline(expiry, item.deadline));
        let value = item.into_value();
        if !self.room.try_reserve(value.len()) {
            return Ok(Reply::Failed(Failure::ReplyTooLong));
        }
        self.charge_reply(value.len())?;
        // A deadline that is set again counts as a change, one that was not there and is taken away
        // does not.
        if new.is_some() && expiry != Expiry::Keep || old != new {
            self.put(key, &[&value], old, new)?;
        }
        Ok(self.value_reply(value))
    }

    /// All or nothing; see [`Operation::Batch`].
    fn batch(
        &mut self,
        expectations: &[Expectation<'_>],
        operations: &[Operation<'_>],
    ) -> Result<Reply, Stop> {
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
        if self.undo.is_none() {
            // Nothing is taken back, so all of it must be allowed.
            let blind = operations.iter().filter_map(Operation::blind_work);
            self.work.check_allowed(blind.sum())?;
        }
        let mut replies = Vec::new();
        for operation in operations {
            let reply = self.execute_operation(operation)?;
            if self.needs_reply() {
                replies.push(reply);
            }
        }
        Ok(Reply::Array(replies))
    }

    /// Removes keys that have expired. No client can notice, but the store gets its room back.
    fn sweep(&mut self, limit: usize) -> Result<Reply, Stop> {
        let early_ms = if planted::has(Bug::SweptEarly) {
            1_000
        } else {
            0
        };
        let clock_ms = self.clock_ms + early_ms;
        let log = self.applied_positions.first().map_or(0, |(log, _)| *log);
        let due = self
            .records
            .take_due(self.kv, self.mode, log, clock_ms, limit)?;
        let mut removed = 0;
        for (at, item) in due.iter().enumerate() {
            // Their values are long: the rest is for the next sweep.
            if self.work.exceeds_portion() {
                self.records.put_back(log, &due[at..]);
                break;
            }
            let (deadline, stored) = (item.deadline, data_key(&item.key));
            let found = match self.values.get(&stored) {
                Some(value) => value.as_deref().map(Cow::Borrowed),
                None if self.cleared => None,
                None => self.kv.get(&stored, self.mode)?.map(Cow::Owned),
            };
            let length = found.as_ref().map_or(0, |found| found.len());
            self.work.charge(work::LOOKUP_BYTES + length as u64)?;
            let item = found.map(read_item).transpose()?;
            if item.is_some_and(|item| item.deadline == Some(deadline)) {
                self.values.insert(stored, None);
                removed += 1;
            }
        }
        Ok(Reply::Int(removed))
    }

    /// A read within the log: reads of named keys see the call's earlier commands. Walks over the
    /// key space are not offered here: they would hold up the log on every replica.
    fn read(&mut self, query: &Query<'_>) -> Result<Reply, Stop> {
        if !queries::is_point_query(query) {
            return Ok(Reply::Failed(Failure::Unsupported));
        }
        let (mut answer, mut room) = (Answer::new(query, self.clock_ms), self.room);
        for key in query.keys().iter() {
            let item = self.get(key)?;
            let length = answer.length(item.as_ref());
            // A command without a reply needs only to know whether it fits.
            let fits = match self.needs_reply() {
                true => answer.add(item, &mut room),
                false => room.try_reserve(length),
            };
            if !fits {
                return Ok(Reply::Failed(Failure::ReplyTooLong));
            }
            self.charge_reply(length)?;
        }
        self.room = room;
        let reply = answer.reply();
        self.work.reply_bytes += queries::reply_bytes(&reply);
        Ok(reply)
    }
}

/// Whether it changes nothing before it is certain that it does no more work than it may.
fn is_read_or_blind(operation: &Operation<'_>) -> bool {
    match operation {
        Operation::Read(_) => true,
        Operation::Batch { operations, .. } => {
            operations.iter().all(|it| it.blind_work().is_some())
        }
        _ => false,
    }
}

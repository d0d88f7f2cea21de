//! What requests do: whom they wait for, what they read, what they append.

use std::sync::{Arc, OnceLock};

use cyclone_store::point;
use cyclone_wire::command::{Command, Condition, Expected, Operation, Query};
use cyclone_wire::reply::{Failure, Reply};

use super::keys::KeySet;
use super::{Answer, Op, Purpose, Role, Worker};
use crate::configuration::{KeyHash, ShardId};
use crate::entry::{self, Kind, MAX_VERSION, Member, Stamp};

/// A request that waits, in its encoded form.
pub(super) struct Parked {
    pub(super) ticket: u64,
    pub(super) operations: Vec<Vec<u8>>,
    keys: Vec<u64>,
    /// Whether it may join writes in flight.
    is_blind: bool,
    since_us: u64,
}

impl Parked {
    /// A request that waits for no key's writes.
    pub fn new(ticket: u64, operations: &[Operation<'_>]) -> Parked {
        let encode = |operation: &Operation<'_>| {
            let mut bytes = Vec::new();
            let operation = operation.clone();
            Command {
                session: None,
                operation,
            }
            .encode(&mut bytes);
            bytes
        };
        Parked {
            ticket,
            operations: operations.iter().map(encode).collect(),
            keys: Vec::new(),
            is_blind: false,
            since_us: 0,
        }
    }
}

/// What a request does to its keys.
fn is_blind(operations: &[Operation<'_>]) -> bool {
    operations.iter().all(|operation| {
        matches!(
            operation,
            Operation::Set {
                condition: Condition::Always,
                get: false,
                ..
            }
        )
    })
}

/// Whether this engine has it: no deadlines, no versions of values, no sessions, nothing that
/// writes everywhere.
fn is_offered(operation: &Operation<'_>) -> bool {
    match operation {
        Operation::Noop
        | Operation::Set { .. }
        | Operation::GetDel { .. }
        | Operation::Del { .. }
        | Operation::Append { .. }
        | Operation::SetRange { .. }
        | Operation::IncrBy { .. }
        | Operation::IncrByFloat { .. }
        | Operation::IncrByLongDouble { .. } => true,
        Operation::Read(query) => matches!(
            query,
            Query::Get { .. }
                | Query::MultiGet { .. }
                | Query::Exists { .. }
                | Query::StrLen { .. }
                | Query::GetRange { .. }
                | Query::Type { .. }
        ),
        Operation::Batch {
            expectations,
            operations,
        } => {
            let is_version = |expected: &Expected<'_>| matches!(expected, Expected::Version(_));
            !expectations.iter().any(|it| is_version(&it.state))
                && operations.iter().all(is_offered)
        }
        _ => false,
    }
}

fn is_read(operations: &[Operation<'_>]) -> bool {
    operations.iter().all(|it| matches!(it, Operation::Read(_)))
}

impl Worker {
    /// Takes a request; its answer comes from [`Worker::take_answers`]. Several operations are
    /// executed as one: all their keys must be of one shard, and a crash leaves all of what they
    /// write, or nothing.
    pub fn submit(&mut self, ticket: u64, operations: &[Operation<'_>]) {
        if self.in_flight() >= self.config.max_in_flight {
            self.stats.refused_busy += 1;
            self.answers.push((ticket, Answer::Busy));
            return;
        }
        self.route(ticket, operations);
    }

    pub(super) fn route(&mut self, ticket: u64, operations: &[Operation<'_>]) {
        if let [Operation::Read(query)] = operations
            && query.keys().is_empty()
        {
            return match self.roomless.is_queue() {
                true => self.wait_for_room(ticket, operations),
                false => self.submit_walk(ticket, query),
            };
        }
        self.begin(ticket, operations);
    }

    /// A request is executed, or waits for its keys.
    fn begin(&mut self, ticket: u64, operations: &[Operation<'_>]) {
        let (shard, keys) = match self.place(operations) {
            Ok(found) => found,
            Err(answer) => return self.answers.push((ticket, answer)),
        };
        let is_blind = is_blind(operations);
        let free = if is_blind {
            self.keys.have_no_queue(&keys)
        } else {
            self.keys.are_clear(&keys)
        };
        if free {
            return self.execute(ticket, operations, shard, keys);
        }
        let request = self.park(ticket, operations, keys.to_vec(), is_blind);
        self.keys.park(request, &keys);
    }

    fn park(
        &mut self,
        ticket: u64,
        operations: &[Operation<'_>],
        keys: Vec<u64>,
        is_blind: bool,
    ) -> u64 {
        self.next_context += 1;
        self.parked.insert(
            self.next_context,
            Parked {
                keys,
                is_blind,
                since_us: self.now_us,
                ..Parked::new(ticket, operations)
            },
        );
        self.next_context
    }

    /// The shard of all keys, and their hashes; or why the request is refused.
    fn place(&self, operations: &[Operation<'_>]) -> Result<(ShardId, KeySet), Answer> {
        if let [Operation::Read(Query::Get { key })] = operations
            && key.len() <= self.config.max_key_bytes
        {
            let KeyHash { slot, hash } = KeyHash::of(key);
            let shard = self.store.shard_of(slot);
            return match self.role(shard) {
                Role::Serving => Ok((shard, KeySet::One([hash]))),
                _ => Err(Answer::NotServed),
            };
        }
        let mut shard = None;
        let mut hashes = Vec::new();
        let (allowed, mut bytes) = (self.config.allowed(), 0u64);
        for operation in operations {
            if !is_offered(operation) {
                let refused = Reply::Failed(Failure::Unsupported);
                return Err(Answer::Done(vec![refused; operations.len()]));
            }
            let limit = u64::from(allowed.work_bytes);
            bytes = bytes.saturating_add(operation.least_work(allowed.value_bytes.into()));
            if bytes > limit && (operation.is_of_many() || operations.len() > 1) {
                let excess = Reply::Failed(Failure::TooMuchWork { bytes, limit });
                return Err(Answer::Done(vec![excess; operations.len()]));
            }
            if operation.longest_value() > self.config.max_value_bytes {
                return Err(Answer::TooLarge);
            }
            for key in operation.keys().iter() {
                if key.len() > self.config.max_key_bytes {
                    return Err(Answer::TooLarge);
                }
                let KeyHash { slot, hash } = KeyHash::of(key);
                let here = self.store.shard_of(slot);
                if *shard.get_or_insert(here) != here {
                    return Err(Answer::CrossShard);
                }
                hashes.push(hash);
            }
        }
        let Some(shard) = shard else {
            let reply = |it: &Operation<'_>| match it {
                Operation::Batch { operations, .. } => {
                    Reply::Array(vec![Reply::Ok; operations.len()])
                }
                _ => Reply::Ok,
            };
            return Err(Answer::Read(operations.iter().map(reply).collect()));
        };
        if self.role(shard) != Role::Serving {
            return Err(Answer::NotServed);
        }
        let keys = match hashes[..] {
            [one] => KeySet::One([one]),
            _ => KeySet::many(hashes),
        };
        Ok((shard, keys))
    }

    /// Executes a request that waits for no other.
    fn execute(&mut self, ticket: u64, operations: &[Operation<'_>], shard: ShardId, keys: KeySet) {
        if self.role(shard) != Role::Serving {
            return self.answers.push((ticket, Answer::NotServed));
        }
        if self.roomless.is_queue() {
            return self.wait_for_room(ticket, operations);
        }
        let mine = &mut self.shards[usize::from(shard)];
        mine.requests = mine.requests.saturating_add(1);
        if let [Operation::Set { key, value, .. }] = operations
            && is_blind(operations)
        {
            let members = [(*key, Some(*value))];
            if !self.write(ticket, shard, keys, &members, vec![Reply::Ok]) {
                self.wait_for_room(ticket, operations);
            }
            return;
        }
        if let [Operation::Read(Query::Get { key })] = operations
            && mine.lacking.is_none()
            && let [hash] = keys[..]
        {
            let value = self.store.value(shard, hash, key);
            self.stats.reads += 1;
            let answer = match value {
                Ok(value) => Answer::Read(vec![value.map_or(Reply::Nil, Reply::Bytes)]),
                Err(damaged) => Answer::damaged(key, damaged),
            };
            return self.answers.push((ticket, answer));
        }
        let lacks = self.lacks(shard, operations);
        if !lacks.is_empty() {
            return self.fetch(ticket, operations, shard, lacks);
        }
        let (store, met) = (&self.store, OnceLock::new());
        let get = |key: &[u8]| {
            let value = store.value(shard, KeyHash::of(key).hash, key);
            value.unwrap_or_else(|damaged| {
                met.get_or_init(|| Answer::damaged(key, damaged));
                None
            })
        };
        let executed = point::execute(operations, &get, self.config.allowed());
        // What follows from a value that cannot be read is neither written nor answered.
        if let Some(answer) = met.into_inner() {
            return self.answers.push((ticket, answer));
        }
        match executed {
            Ok((replies, written)) if written.is_empty() => {
                self.stats.reads += u64::from(is_read(operations));
                self.answers.push((ticket, Answer::Read(replies)));
            }
            Ok((replies, written)) => {
                let members: Vec<Member<'_>> = written
                    .iter()
                    .map(|(key, value)| (&key[..], value.as_deref()))
                    .collect();
                if !self.write(ticket, shard, keys, &members, replies) {
                    self.wait_for_room(ticket, operations);
                }
            }
            // Looking up fails at no key.
            Err(_) => self.answers.push((ticket, Answer::Unknown)),
        }
    }

    /// Appends what a request writes to the t-log, and stages it for the backups. `false` if the
    /// log has no room for it now: nothing was done.
    //= rowan §4.1
    fn write(
        &mut self,
        ticket: u64,
        shard: ShardId,
        keys: KeySet,
        members: &[Member<'_>],
        replies: Vec<Reply>,
    ) -> bool {
        let len = match members {
            [(key, value)] => entry::HEADER_BYTES + key.len() + value.map_or(0, <[u8]>::len),
            _ => entry::batch_bytes(members),
        };
        let refusal = self.refusal(shard, members, len);
        let (Some(it), None) = (self.store.shard(shard), &refusal) else {
            let answer = refusal.unwrap_or(Answer::NotServed);
            self.stats.refused_full += u64::from(answer == Answer::Full);
            self.answers.push((ticket, answer));
            return true;
        };
        if !self.log.has_room(len) {
            return false;
        }
        let first = Stamp {
            version: it.newest() + 1,
            shard,
        };
        let last = it.newest() + members.len() as u64;
        if last > MAX_VERSION {
            self.answers.push((ticket, Answer::Full));
            return true;
        }
        let mut record = Vec::with_capacity(len);
        match members {
            [(key, value)] => {
                let kind = value.map_or(Kind::Delete, |_| Kind::Put);
                entry::encode(kind, first, 0, key, value.unwrap_or_default(), &mut record);
            }
            _ => {
                entry::encode_batch(first, members, &mut record);
            }
        }
        let Some(address) = self.log.append(first.bits(), &record) else {
            return false;
        };
        it.saw(last);
        let mine = &mut self.shards[usize::from(shard)];
        mine.writes = mine.writes.saturating_add(1);
        mine.versions.begin(last);
        let backups = Arc::clone(&mine.backups);
        self.keys.enter(&keys);
        let since_us = self.now_us;
        self.stage(Op {
            shard,
            backups,
            record,
            address,
            purpose: Purpose::Write {
                ticket: Some(ticket),
                replies,
                keys,
                last,
                since_us,
            },
        });
        true
    }

    /// Why a write is refused: full memory refuses all but deletions.
    fn refusal(&self, shard: ShardId, members: &[Member<'_>], len: usize) -> Option<Answer> {
        if len > self.config.max_entry_bytes {
            return Some(Answer::EntryTooLarge {
                bytes: len,
                limit: self.config.max_entry_bytes,
            });
        }
        let backups = &self.shards[usize::from(shard)].backups;
        let full = self.store.space().is_full()
            || backups.iter().any(|id| self.full_servers.contains(&id.0));
        let puts = members.iter().any(|(_, value)| value.is_some());
        (full && puts).then_some(Answer::Full)
    }

    /// A write has ended: who waits for its keys may go.
    pub(super) fn leave(&mut self, keys: &[u64]) {
        if self.keys.leave(keys) {
            self.wake(keys.to_vec());
        }
    }

    /// Ends requests that have waited for their keys for too long.
    pub(super) fn end_late_parked(&mut self) {
        let (now_us, patience_us) = (self.now_us, self.config.give_up_us);
        let is_late = |it: &Parked| now_us.saturating_sub(it.since_us) > patience_us;
        let late = self.parked.iter().filter(|(_, it)| is_late(it));
        let late: Vec<u64> = late.map(|(&request, _)| request).collect();
        let mut look = Vec::new();
        for request in late {
            let Some(parked) = self.parked.remove(&request) else {
                continue;
            };
            self.keys.unpark(request, &parked.keys);
            self.stats.refused_busy += 1;
            self.answers.push((parked.ticket, Answer::Busy));
            look.extend(parked.keys);
        }
        // Blind writes behind them may join what is in flight.
        self.wake(look);
    }

    /// Lets those go who waited for these keys and need not any more.
    fn wake(&mut self, mut look: Vec<u64>) {
        while let Some(key) = look.pop() {
            while let Some(request) = self.keys.first(key) {
                let parked = self.parked.get(&request);
                let may_go =
                    parked.is_some_and(|it| self.keys.may_go(request, &it.keys, it.is_blind));
                if !may_go {
                    break;
                }
                let Some(parked) = self.parked.remove(&request) else {
                    break;
                };
                self.keys.unpark(request, &parked.keys);
                look.extend(parked.keys.iter().filter(|&&other| other != key));
                self.run(parked);
            }
        }
    }

    fn run(&mut self, parked: Parked) {
        let decoded: Result<Vec<Command<'_>>, _> = parked
            .operations
            .iter()
            .map(|it| Command::decode(it))
            .collect();
        // Encoded by `park`.
        let Ok(commands) = decoded else {
            return self.answers.push((parked.ticket, Answer::Busy));
        };
        let operations: Vec<Operation<'_>> = commands
            .into_iter()
            .map(|command| command.operation)
            .collect();
        match self.place(&operations) {
            Ok((shard, keys)) => self.execute(parked.ticket, &operations, shard, keys),
            Err(answer) => self.answers.push((parked.ticket, answer)),
        }
    }
}

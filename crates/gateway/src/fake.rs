//! A backend in memory, for tests: no log, no replicas, and everything a test wants to go wrong.

mod versions;

use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};

use cyclone_wire::command::{Condition, Expiry, Operation, Query};
use cyclone_wire::glob::Pattern;
use cyclone_wire::long_double::LongDouble;
use cyclone_wire::reply::{Failure, Reply};

use crate::backend::{
    Backend, InfoSection, MemberRequest, Outcome, OwnKeys, Route, Topology, TopologyNode,
};

/// Keys and values in memory. Commands take effect when they are submitted; outcomes come when
/// `hold` is off.
#[derive(Debug)]
pub struct MemoryBackend {
    /// The data.
    pub data: BTreeMap<Vec<u8>, Vec<u8>>,
    /// When keys expire.
    pub deadlines: BTreeMap<Vec<u8>, u64>,
    /// The time by which they do, in milliseconds since 1970.
    pub now_ms: u64,
    /// Whether outcomes are kept back.
    pub hold: bool,
    /// Whether outcomes come in the reverse of the order of submission.
    pub reverse: bool,
    /// Whether it says that it takes little more.
    pub pressed: bool,
    /// Instead of executing, answers this.
    pub fail: Option<Outcome>,
    /// Who serves all slots.
    pub route: Route,
    /// Whether each slot has its own owner.
    pub many_owners: bool,
    /// What WAIT sees.
    pub acked: usize,
    /// How often it was asked for that.
    pub acked_asked: Cell<u64>,
    /// What CLUSTER shows.
    pub topology: Topology,
    /// Tickets submitted, in order, with `true` for writes.
    pub submitted: Vec<(u64, bool)>,
    /// Whether to note them.
    pub record: bool,
    /// Tickets of reads that no client waits for any more.
    pub forgotten: Vec<u64>,
    /// Who answers what concerns all keys, if not who serves all slots.
    pub route_of_all: Option<Route>,
    /// Whether it shows all of its keys though another one answers what concerns them.
    pub own_keys: OwnKeys,
    /// Whether all keys can be removed at once.
    pub flushes: bool,
    outcomes: VecDeque<(u64, Outcome)>,
    /// Which write changed a key last.
    versions: BTreeMap<Vec<u8>, u64>,
    writes: u64,
}

impl Default for MemoryBackend {
    fn default() -> MemoryBackend {
        let node = |number: u16| TopologyNode {
            id: format!("{number:040x}"),
            host: "127.0.0.1".to_owned(),
            port: 7000 + number,
            is_leader: number == 1,
            alive: true,
            myself: number == 1,
        };
        MemoryBackend {
            data: BTreeMap::new(),
            deadlines: BTreeMap::new(),
            now_ms: 1_700_000_000_000,
            hold: false,
            reverse: false,
            pressed: false,
            fail: None,
            route: Route::Local,
            many_owners: false,
            acked: 2,
            acked_asked: Cell::new(0),
            topology: Topology {
                nodes: vec![node(1), node(2), node(3)],
                epoch: 7,
                ranges: Vec::new(),
            },
            submitted: Vec::new(),
            record: false,
            forgotten: Vec::new(),
            route_of_all: None,
            own_keys: OwnKeys::Hidden,
            flushes: true,
            outcomes: VecDeque::new(),
            versions: BTreeMap::new(),
            writes: 0,
        }
    }
}

fn integer(bytes: &[u8]) -> Option<i64> {
    cyclone_wire::resp::parse_i64(bytes)
}

impl MemoryBackend {
    /// Takes the outcomes that have come to be.
    pub fn take_outcomes(&mut self) -> Vec<(u64, Outcome)> {
        if self.hold {
            return Vec::new();
        }
        let mut outcomes: Vec<_> = self.outcomes.drain(..).collect();
        if self.reverse {
            outcomes.reverse();
        }
        outcomes
    }

    fn optional(&self, key: &[u8]) -> Reply {
        self.data
            .get(key)
            .map_or(Reply::Nil, |value| Reply::Bytes(value.clone()))
    }

    fn write(&mut self, operation: &Operation<'_>) -> Reply {
        match operation {
            Operation::Set {
                key,
                value,
                condition,
                get,
            } => {
                let old = self.optional(key);
                let blocked = match condition {
                    Condition::Always => false,
                    Condition::Absent => old != Reply::Nil,
                    Condition::Present => old == Reply::Nil,
                };
                if !blocked {
                    self.data.insert(key.to_vec(), value.to_vec());
                    self.deadlines.remove(*key);
                }
                match (get, blocked) {
                    (true, _) => old,
                    (false, true) => Reply::Nil,
                    (false, false) => Reply::Ok,
                }
            }
            Operation::GetDel { key } => self.data.remove(*key).map_or(Reply::Nil, Reply::Bytes),
            Operation::Del { keys } => Reply::Int(
                keys.iter()
                    .filter(|key| self.data.remove(**key).is_some())
                    .count() as i64,
            ),
            Operation::Append { key, value } => {
                let stored = self.data.entry(key.to_vec()).or_default();
                stored.extend_from_slice(value);
                Reply::Int(stored.len() as i64)
            }
            Operation::SetRange { key, offset, value } => {
                if value.is_empty() {
                    return Reply::Int(self.data.get(*key).map_or(0, Vec::len) as i64);
                }
                let stored = self.data.entry(key.to_vec()).or_default();
                let start = *offset as usize;
                stored.resize(stored.len().max(start + value.len()), 0);
                stored[start..start + value.len()].copy_from_slice(value);
                Reply::Int(stored.len() as i64)
            }
            Operation::IncrBy { key, delta } => {
                let old = self.data.get(*key).map_or(Some(0), |value| integer(value));
                match old.map(|old| old.checked_add(*delta)) {
                    None => Reply::Failed(Failure::NotInteger),
                    Some(None) => Reply::Failed(Failure::Overflow),
                    Some(Some(sum)) => {
                        self.data.insert(key.to_vec(), sum.to_string().into_bytes());
                        Reply::Int(sum)
                    }
                }
            }
            Operation::IncrByFloat { .. } => Reply::Failed(Failure::Unsupported),
            Operation::IncrByLongDouble { key, delta } => {
                let old = self.data.get(*key).map_or(&b"0"[..], Vec::as_slice);
                let Some(old) = LongDouble::parse(old) else {
                    return Reply::Failed(Failure::NotFloat);
                };
                let Some(sum) = old.plus(*delta).and_then(LongDouble::to_text) else {
                    return Reply::Failed(Failure::NotFinite);
                };
                self.data.insert(key.to_vec(), sum.clone().into_bytes());
                Reply::Bytes(sum.into_bytes())
            }
            Operation::FlushAll => {
                self.data.clear();
                Reply::Ok
            }
            Operation::Read(query) => self.read(query),
            Operation::Noop
            | Operation::OpenSession
            | Operation::CloseSession { .. }
            | Operation::Sweep { .. }
            | Operation::Members { .. }
            | Operation::Record { .. }
            | Operation::SetClock { .. } => Reply::Ok,
            Operation::SetExpiring {
                key,
                value,
                condition,
                get,
                expiry,
            } => {
                let old = self.deadlines.get(*key).copied();
                let set = Operation::Set {
                    key,
                    value,
                    condition: *condition,
                    get: *get,
                };
                let had = self.data.contains_key(*key);
                let reply = self.write(&set);
                let met = match condition {
                    Condition::Always => true,
                    Condition::Absent => !had,
                    Condition::Present => had,
                };
                if met {
                    match (expiry, old) {
                        (Expiry::Keep, Some(old)) => self.set_deadline(key, Expiry::At(old)),
                        (expiry, _) => self.set_deadline(key, *expiry),
                    }
                }
                reply
            }
            Operation::Expire {
                key,
                expiry,
                condition,
            } => self.expire(key, *expiry, *condition),
            Operation::GetExpire { key, expiry } => {
                let value = self.optional(key);
                if value != Reply::Nil {
                    self.set_deadline(key, *expiry);
                }
                value
            }
            Operation::Batch { .. } => self.batch(operation),
        }
    }

    fn read(&self, query: &Query<'_>) -> Reply {
        match query {
            Query::Get { key } => self.optional(key),
            Query::MultiGet { keys } => {
                Reply::Array(keys.iter().map(|key| self.optional(key)).collect())
            }
            Query::Exists { keys } => Reply::Int(
                keys.iter()
                    .filter(|key| self.data.contains_key(**key))
                    .count() as i64,
            ),
            Query::StrLen { key } => Reply::Int(self.data.get(*key).map_or(0, Vec::len) as i64),
            Query::GetRange { key, start, end } => {
                let value = self.data.get(*key).map_or(&[][..], Vec::as_slice);
                let len = value.len() as i64;
                let place = |index: i64| {
                    if index < 0 {
                        (len + index).max(0)
                    } else {
                        index
                    }
                };
                let (start, end) = (place(*start), place(*end).min(len - 1));
                let range = if start > end || len == 0 {
                    &[][..]
                } else {
                    &value[start as usize..=end as usize]
                };
                Reply::Bytes(range.to_vec())
            }
            Query::Type { key } => {
                let kind: &[u8] = if self.data.contains_key(*key) {
                    b"string"
                } else {
                    b"none"
                };
                Reply::Bytes(kind.to_vec())
            }
            Query::DbSize => Reply::Int(self.data.len() as i64),
            Query::Scan {
                cursor,
                pattern,
                count,
                ..
            } => {
                let (from, count) = (*cursor as usize, *count as usize);
                let page = self.data.keys().skip(from).take(count);
                let pattern = pattern.map(Pattern::new);
                let keys = page.filter(|key| pattern.as_ref().is_none_or(|it| it.matches(key)));
                let keys = keys.map(|key| Reply::Bytes(key.clone())).collect();
                let next = if from + count >= self.data.len() {
                    0
                } else {
                    from + count
                };
                Reply::Array(vec![
                    Reply::Bytes(next.to_string().into_bytes()),
                    Reply::Array(keys),
                ])
            }
            Query::Keys { pattern } => {
                let pattern = Pattern::new(pattern);
                let keys = self.data.keys().filter(|key| pattern.matches(key));
                Reply::Array(keys.map(|key| Reply::Bytes(key.clone())).collect())
            }
            Query::Ttl {
                key,
                millis,
                absolute,
            } => self.ttl(key, *millis, *absolute),
            Query::Versions { keys } => {
                let version = |key: &&[u8]| self.versions.get(*key).copied().unwrap_or(0);
                let versions = keys.iter().map(|key| Reply::Int(version(key) as i64));
                Reply::Array(versions.collect())
            }
        }
    }

    fn submit(&mut self, ticket: u64, is_write: bool, run: impl FnOnce(&mut Self) -> Reply) {
        if self.record {
            self.submitted.push((ticket, is_write));
        }
        let outcome = match &self.fail {
            Some(outcome) => outcome.clone(),
            None => Outcome::Done(run(self)),
        };
        self.outcomes.push_back((ticket, outcome));
    }
}

impl Backend for MemoryBackend {
    fn submit_write(&mut self, ticket: u64, operation: &Operation<'_>) {
        self.submit(ticket, true, |backend| backend.write_noting(operation));
    }

    fn is_backpressured(&self) -> bool {
        self.pressed
    }

    fn submit_member(&mut self, ticket: u64, _request: MemberRequest) -> bool {
        self.submit(ticket, true, |_| Reply::Ok);
        true
    }

    fn submit_clock_reset(&mut self, ticket: u64) -> bool {
        self.submit(ticket, true, |_| Reply::Ok);
        true
    }

    fn submit_digest(&mut self, ticket: u64) {
        self.submit_read(ticket, &Query::DbSize);
    }

    fn submit_read(&mut self, ticket: u64, query: &Query<'_>) {
        self.submit(ticket, false, |backend| {
            backend.forget_expired();
            backend.read(query)
        });
    }

    fn drain(&mut self, done: &mut dyn FnMut(u64, Outcome)) {
        for (ticket, outcome) in self.take_outcomes() {
            done(ticket, outcome);
        }
    }

    fn route(&self, _slot: u16) -> Route {
        self.route.clone()
    }

    fn route_of_all(&self) -> Route {
        let of_all = self.route_of_all.as_ref();
        of_all.unwrap_or(&self.route).clone()
    }

    fn own_keys(&self) -> OwnKeys {
        self.own_keys
    }

    fn flushes(&self) -> bool {
        self.flushes
    }

    fn forget_reads(&mut self, tickets: &[u64]) {
        self.forgotten.extend_from_slice(tickets);
    }

    fn same_owner(&self, a: u16, b: u16) -> bool {
        !self.many_owners || a == b
    }

    fn topology(&self) -> Topology {
        self.topology.clone()
    }

    fn info(&self) -> Vec<InfoSection> {
        vec![
            (
                "Replication".to_owned(),
                vec![("role".to_owned(), "master".to_owned())],
            ),
            (
                "Keyspace".to_owned(),
                vec![(
                    "db0".to_owned(),
                    format!("keys={},expires=0", self.data.len()),
                )],
            ),
        ]
    }

    fn frames(&self) -> Option<Vec<(&'static str, u64)>> {
        Some(vec![("all", 7), ("free", 3)])
    }

    fn write_mark(&self) -> u64 {
        1
    }

    fn replicas_acked(&self, _mark: u64) -> usize {
        self.acked_asked.set(self.acked_asked.get() + 1);
        self.acked
    }
}

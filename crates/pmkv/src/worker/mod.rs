//! A worker: executes requests of its shards, appends to its t-log, replicates, publishes, answers
//! (rowan §4.1, §5.1).
//!
//! ```text
//!   submit ─▶ (wait for the key's writes) ─▶ t-log ─ fence ─▶ every backup's log ─▶ index ─▶ answer
//!             keys.rs                         step            links.rs               durable everywhere
//! ```
//!
//! A step function: time is passed in, nothing waits. A shard's requests all go to one worker, so
//! that versions of a shard and read-modify-writes of a key need no lock. Writes in flight survive
//! a change of configuration: they are sent again to the new backups.

mod fetch;
mod held;
mod keys;
mod links;
mod reconfigure;
mod requests;
mod room;
#[cfg(test)]
mod tests;
mod versions;
mod walk;

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use cyclone_replication::{BackupId, Owner};
use cyclone_wire::batch::Allowed;
use cyclone_wire::reply::Reply;

use crate::configuration::{ServerId, ShardId};
use crate::digest::{AHEAD, key_of};
use crate::entry::{self, Kind, Stamp};
use crate::log::Log;
use crate::store::{Damaged, Store};
use crate::words::WordMap;

use fetch::{Fetching, MissingEntries};
use held::Held;
use keys::{KeySet, Keys};
use links::{Links, Sent};
use requests::Parked;
use room::WaitingForSegment;
use versions::Versions;
use walk::Walks;

/// What a worker is made of, and its limits.
#[derive(Clone, Copy, Debug)]
pub struct WorkerConfig {
    /// Its server.
    pub server: ServerId,
    /// Its number on it.
    pub worker: u32,
    /// Requests in flight or waiting at once; `Busy` beyond.
    pub max_in_flight: usize,
    /// The longest key in bytes.
    pub max_key_bytes: usize,
    /// The longest value in bytes.
    pub max_value_bytes: usize,
    /// The most work of a request on several keys, in bytes ([`cyclone_wire::work`]); 0: 64 MiB, or
    /// as much as the longest value calls for.
    pub max_work_bytes: u32,
    /// The largest entry, headers included: what the replication protocol takes as one record.
    pub max_entry_bytes: usize,
    /// How often CommitVers are sent, in microseconds.
    pub commit_us: u64,
    /// The time after which a client gets the error that its write's outcome is unknown, in
    /// microseconds.
    pub give_up_us: u64,
}

impl WorkerConfig {
    /// The defaults.
    //= rowan §4.4
    pub fn new(server: ServerId, worker: u32) -> WorkerConfig {
        WorkerConfig {
            server,
            worker,
            max_in_flight: 8192,
            max_key_bytes: 16 << 10,
            max_value_bytes: 32 << 10,
            max_work_bytes: 0,
            max_entry_bytes: 60 << 10,
            commit_us: 15_000,
            give_up_us: 5_000_000,
        }
    }

    /// What requests may do.
    pub(crate) fn allowed(&self) -> Allowed {
        Allowed {
            value_bytes: u32::try_from(self.max_value_bytes).unwrap_or(u32::MAX),
            work_bytes: match self.max_work_bytes {
                0 => cyclone_wire::work::limit(self.max_value_bytes as u64),
                told => told,
            },
        }
    }
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// Executed; a write is durable on every replica. One reply per operation.
    Done(Vec<Reply>),
    /// Executed, and nothing was written: right only if this server still holds its lease when the
    /// result is read.
    Read(Vec<Reply>),
    /// This server does not serve the shard, or not yet; nothing was done.
    NotServed,
    /// Too many requests are in flight; nothing was done.
    Busy,
    /// Memory is full, here or at a backup; nothing was done. Deletions are taken still.
    Full,
    /// The keys are of several shards; nothing was done.
    CrossShard,
    /// It may or may not have been executed.
    Unknown,
    /// Beyond the limits; nothing was done.
    TooLarge,
    /// What the request writes, together, is longer than one entry may be; nothing was done.
    EntryTooLarge {
        /// What the entry would take.
        bytes: usize,
        /// What it may take.
        limit: usize,
    },
    /// An entry that may be this key's is damaged here; nothing was done.
    Damaged {
        /// The key.
        key: Vec<u8>,
        /// Which entry.
        entry: Damaged,
    },
}

impl Answer {
    fn damaged(key: &[u8], entry: Damaged) -> Answer {
        let key = key.to_vec();
        Answer::Damaged { key, entry }
    }
}

/// Whether a worker serves a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Another server does, or none.
    Elsewhere,
    /// This one will, once all replicas have the same entries.
    Preparing,
    /// This one does.
    Serving,
}

struct OwnedShard {
    role: Role,
    backups: Arc<[BackupId]>,
    versions: Versions,
    /// The CommitVer that was sent last, and the one that was written down here last.
    told: u64,
    noted: u64,
    /// Entries that all replicas shall have before the shard is served.
    scattering: usize,
    /// What is not here yet, while the shard moves here.
    lacking: Option<MissingEntries>,
    /// Requests executed, and entries written, since they were last taken.
    requests: u32,
    writes: u32,
}

enum Purpose {
    Write {
        ticket: Option<u64>,
        replies: Vec<Reply>,
        keys: KeySet,
        last: u64,
        since_us: u64,
    },
    Scatter,
    Notice,
}

struct Op {
    shard: ShardId,
    backups: Arc<[BackupId]>,
    record: Vec<u8>,
    /// Where it lies in this server's memory.
    address: u64,
    purpose: Purpose,
}

/// Plain counters of a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerStats {
    /// Entries made durable on every replica.
    pub writes: u64,
    /// Reads answered.
    pub reads: u64,
    /// Requests refused because memory was full.
    pub refused_full: u64,
    /// Requests refused because too many were in flight.
    pub refused_busy: u64,
    /// Records sent again.
    pub resent: u64,
    /// Chains of indexes that requests which scan everything have visited.
    pub walked_chains: u64,
    /// Keys that came from the server that a shard moves away from, before the rest of the shard.
    pub fetched: u64,
}

/// A worker. One thread owns it.
pub struct Worker {
    config: WorkerConfig,
    store: Arc<Store>,
    log: Log,
    links: Option<Links>,
    shards: Vec<OwnedShard>,
    ops: WordMap<u64, Op>,
    next_context: u64,
    /// Ops to be sent, in order.
    staged: VecDeque<u64>,
    ended: VecDeque<(u64, bool)>,
    keys: Keys,
    parked: BTreeMap<u64, Parked>,
    fetching: Fetching,
    roomless: WaitingForSegment,
    /// Shards that move here.
    moving: usize,
    walks: Walks,
    full_servers: HashSet<ServerId>,
    held: Held,
    scattered: Vec<ShardId>,
    answers: Vec<(u64, Answer)>,
    now_us: u64,
    commits_due_us: u64,
    looked_us: u64,
    stats: WorkerStats,
}

impl Worker {
    /// A worker that serves nothing yet.
    pub fn new(config: WorkerConfig, store: Arc<Store>) -> Worker {
        let log = Log::new(
            Arc::clone(&store),
            Owner::Worker(config.worker),
            config.server,
        );
        let mine = |_| OwnedShard {
            role: Role::Elsewhere,
            backups: Arc::new([]),
            versions: Versions::default(),
            told: 0,
            noted: 0,
            scattering: 0,
            lacking: None,
            requests: 0,
            writes: 0,
        };
        Worker {
            config,
            log,
            links: None,
            shards: (0..store.shards()).map(mine).collect(),
            store,
            ops: WordMap::default(),
            next_context: 0,
            staged: VecDeque::new(),
            ended: VecDeque::new(),
            keys: Keys::default(),
            parked: BTreeMap::new(),
            fetching: Fetching::default(),
            roomless: WaitingForSegment::default(),
            moving: 0,
            walks: Walks::default(),
            full_servers: HashSet::new(),
            held: Held::default(),
            scattered: Vec::new(),
            answers: Vec::new(),
            now_us: 0,
            commits_due_us: 0,
            looked_us: 0,
            stats: WorkerStats::default(),
        }
    }

    /// What all threads share.
    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// What it has done so far.
    pub fn stats(&self) -> WorkerStats {
        self.stats
    }

    /// Requests and writes by shard since the last call, for the shards served here. Both are 0 for
    /// an idle one.
    pub fn take_loads(&mut self, loads: &mut Vec<(ShardId, u32, u32)>) {
        for (mine, shard) in self.shards.iter_mut().zip(0u16..) {
            let (requests, writes) = (
                std::mem::take(&mut mine.requests),
                std::mem::take(&mut mine.writes),
            );
            if mine.role == Role::Serving {
                loads.push((shard, requests, writes));
            }
        }
    }

    /// Changes what this worker does for a shard.
    pub fn set_role(&mut self, shard: ShardId, role: Role) {
        if let Some(mine) = self.shards.get_mut(usize::from(shard)) {
            mine.role = role;
        }
    }

    /// What this worker does for a shard.
    pub fn role(&self, shard: ShardId) -> Role {
        let mine = self.shards.get(usize::from(shard));
        mine.map_or(Role::Elsewhere, |mine| mine.role)
    }

    /// Another server's memory is full, or is not any more.
    pub fn set_full(&mut self, server: ServerId, is_full: bool) {
        if is_full {
            self.full_servers.insert(server);
        } else {
            self.full_servers.remove(&server);
        }
    }

    /// Sends records of a shard to all its replicas; [`Worker::take_scattered`] tells when they are
    /// there.
    pub fn scatter(&mut self, shard: ShardId, records: Vec<Vec<u8>>) {
        let Some(mine) = self.shards.get_mut(usize::from(shard)) else {
            return;
        };
        let backups = Arc::clone(&mine.backups);
        mine.scattering += records.len();
        if mine.scattering == 0 {
            self.scattered.push(shard);
        }
        for record in records {
            self.stage(Op {
                shard,
                backups: Arc::clone(&backups),
                record,
                address: 0,
                purpose: Purpose::Scatter,
            });
        }
    }

    /// Shards whose scattered entries are on every replica.
    pub fn take_scattered(&mut self) -> Vec<ShardId> {
        std::mem::take(&mut self.scattered)
    }

    fn stage(&mut self, op: Op) {
        self.next_context += 1;
        self.staged.push_back(self.next_context);
        self.ops.insert(self.next_context, op);
    }

    /// Makes progress; returns whether there was anything to do. Never waits.
    pub fn step(&mut self, now_us: u64) -> bool {
        self.now_us = now_us;
        let mut busy = false;
        if let Some(links) = &mut self.links {
            links.poll(now_us, &mut self.ended);
        }
        while !self.ended.is_empty() {
            busy = true;
            let part = self.ended.iter().take(AHEAD);
            let ops = part.filter_map(|(context, _)| self.ops.get(context));
            self.store.bring(ops.filter_map(|op| key_of(&op.record)));
            for _ in 0..AHEAD {
                match self.ended.pop_front() {
                    Some((context, true)) => self.finish(context),
                    Some((context, false)) => self.send_again(context),
                    None => break,
                }
            }
        }
        self.use_room();
        self.tell_commits();
        self.release_held();
        busy |= !self.staged.is_empty();
        self.send_staged();
        self.look_for_late();
        self.walks.begin();
        busy |= self.walk_on();
        busy
    }

    /// Sleeps until there may be something to do, at most `timeout`.
    pub fn wait(&mut self, timeout: Duration) {
        if let Some(links) = &mut self.links {
            links.wait(timeout);
        }
    }

    /// What has ended since.
    pub fn take_answers(&mut self, answers: &mut Vec<(u64, Answer)>) {
        answers.append(&mut self.answers);
    }

    /// Requests and internal records in flight.
    pub fn in_flight(&self) -> usize {
        let waiting = self.parked.len() + self.fetching.len() + self.roomless.len();
        self.ops.len() + waiting + self.walks.len()
    }

    /// Servers whose logs are not open to this worker.
    pub fn closed_links(&self) -> Vec<ServerId> {
        self.links.as_ref().map_or(Vec::new(), Links::closed)
    }

    /// Sends what is staged, after one fence for all of it: the t-log holds everything that a
    /// backup may hold.
    fn send_staged(&mut self) {
        if self.staged.is_empty() {
            return;
        }
        self.log.fence();
        let mut left = VecDeque::new();
        let mut unsendable = Vec::new();
        let mut passes_values = false;
        while let Some(context) = self.staged.pop_front() {
            let Some(op) = self.ops.get(&context) else {
                continue;
            };
            if op.backups.is_empty() {
                self.ended.push_back((context, true));
                continue;
            }
            if passes_values && self.is_value_for_full(op) {
                left.push_back(context);
                continue;
            }
            let Some(links) = &mut self.links else {
                left.push_back(context);
                continue;
            };
            match links.send(&op.backups, &op.record, context) {
                Sent::Yes => {}
                Sent::NotOpen => left.push_back(context),
                Sent::Busy => {
                    let for_full = self.is_value_for_full(op);
                    left.push_back(context);
                    if !for_full {
                        break;
                    }
                    passes_values = true;
                }
                Sent::Never => unsendable.push(context),
            }
        }
        if let Some(links) = &mut self.links {
            links.post();
        }
        left.append(&mut self.staged);
        self.staged = left;
        // The limits leave nothing that cannot be sent; if they are wrong, the client must not get
        // a success.
        for context in unsendable {
            if let Some(op) = self.ops.get_mut(&context)
                && let Purpose::Write { ticket, .. } = &mut op.purpose
                && let Some(ticket) = ticket.take()
            {
                self.answers.push((ticket, Answer::Unknown));
            }
        }
    }

    /// An op is durable on every replica.
    fn finish(&mut self, context: u64) {
        let Some(op) = self.ops.remove(&context) else {
            return;
        };
        self.held_got_on(context);
        let shard = usize::from(op.shard);
        match op.purpose {
            Purpose::Notice => {}
            Purpose::Scatter => {
                let mine = &mut self.shards[shard];
                mine.scattering = mine.scattering.saturating_sub(1);
                if mine.scattering == 0 {
                    self.scattered.push(op.shard);
                }
            }
            Purpose::Write {
                ticket,
                replies,
                keys,
                last,
                ..
            } => {
                self.store.publish_record(op.address, &op.record);
                self.log.settle(op.address);
                self.stats.writes += 1;
                if let Some(commit) = self.shards[shard].versions.done(last)
                    && let Some(it) = self.store.shard(op.shard)
                {
                    it.committed(commit);
                }
                let answer = Answer::Done(replies);
                self.answers.extend(ticket.map(|it| (it, answer)));
                self.leave(&keys);
            }
        }
    }

    /// Tells each backup the CommitVers of the shards it keeps, and writes them down here.
    //= rowan §4.4
    fn tell_commits(&mut self) {
        if self.now_us < self.commits_due_us || self.links.is_none() {
            return;
        }
        self.commits_due_us = self.now_us + self.config.commit_us;
        let mut news: BTreeMap<BackupId, Vec<Stamp>> = BTreeMap::new();
        let mut own = Vec::new();
        for (mine, shard) in self.shards.iter_mut().zip(0u16..) {
            let version = self.store.shard(shard).map_or(0, |it| it.commit());
            if mine.role != Role::Serving {
                continue;
            }
            let word = Stamp { version, shard };
            if version > mine.noted {
                own.push(word);
            }
            if version > mine.told {
                mine.told = version;
                for &backup in mine.backups.iter() {
                    news.entry(backup).or_default().push(word);
                }
            }
        }
        let most = (self.config.max_entry_bytes - entry::HEADER_BYTES) / 8;
        for words in own.chunks(most.max(1)) {
            self.note_commits(words);
        }
        for (backup, words) in news {
            for words in words.chunks(most.max(1)) {
                self.stage(Op {
                    shard: 0,
                    backups: Arc::new([backup]),
                    record: commit_record(words),
                    address: 0,
                    purpose: Purpose::Notice,
                });
            }
        }
    }

    /// Writes CommitVers down here; without room they are tried again with the next ones.
    fn note_commits(&mut self, words: &[Stamp]) {
        let record = commit_record(words);
        if self.log.has_room(record.len())
            && let Some(address) = self.log.append(0, &record)
        {
            self.log.settle(address);
            for word in words {
                self.shards[usize::from(word.shard)].noted = word.version;
            }
        }
    }

    /// Clients wait for so long only; the write goes on. What waits for it was not begun.
    fn look_for_late(&mut self) {
        if self.now_us.saturating_sub(self.looked_us) < self.config.give_up_us / 8 {
            return;
        }
        self.looked_us = self.now_us;
        self.end_late_parked();
        for op in self.ops.values_mut() {
            if let Purpose::Write {
                ticket, since_us, ..
            } = &mut op.purpose
                && self.now_us.saturating_sub(*since_us) > self.config.give_up_us
                && let Some(ticket) = ticket.take()
            {
                self.answers.push((ticket, Answer::Unknown));
            }
        }
    }
}

/// The record that tells CommitVers.
fn commit_record(words: &[Stamp]) -> Vec<u8> {
    let none = Stamp {
        version: 0,
        shard: 0,
    };
    let words: Vec<u8> = words
        .iter()
        .flat_map(|it| it.bits().to_le_bytes())
        .collect();
    let mut record = Vec::new();
    entry::encode(Kind::Commit, none, 0, &[], &words, &mut record);
    record
}

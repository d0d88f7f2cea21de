//! Requests that scan everything that is served here: a step of them visits a bounded number of
//! chains, and what else is to be done goes on in between. Each key is shown as it is when the walk
//! comes by.

use std::collections::VecDeque;

use cyclone_wire::command::Query;
use cyclone_wire::glob::Pattern;
use cyclone_wire::reply::{Failure, Reply};

use super::{Answer, Op, Purpose, Role, Worker};
use crate::configuration::{KeyHash, ShardId};
use crate::walk::Bounds;

/// Chains of indexes that one step visits, at most: some 1500 keys.
pub const WALK_CHAINS: usize = 256;

/// Bytes of keys with which a page of SCAN ends.
const PAGE_BYTES: usize = 1 << 20;

/// The bounds of a step. Bytes are those of keys, or of entries where values are wanted.
const STEP: Bounds = Bounds {
    keys: usize::MAX,
    bytes: 1 << 20,
    chains: WALK_CHAINS,
};

/// The longest reply, and what each part of it counts besides its bytes.
const REPLY_BYTES: usize = 16 << 20;
const PART_BYTES: usize = 64;

enum What {
    /// DBSIZE.
    Count,
    Keys,
    /// SCAN, with how many keys and chains it still visits.
    Scan {
        count: usize,
        chains: usize,
    },
    Digest {
        sum: u64,
    },
    Refused,
}

impl What {
    fn of(query: &Query<'_>) -> What {
        match *query {
            Query::DbSize => What::Count,
            Query::Keys { .. } => What::Keys,
            Query::Scan {
                count, held: false, ..
            } => What::Scan {
                count: (count as usize).max(1),
                chains: (count as usize).max(WALK_CHAINS),
            },
            _ => What::Refused,
        }
    }
}

/// Which keys are wanted.
enum Sought {
    All,
    /// Those that match what is not parsed before it is the walk's turn: it takes more room then.
    Like(Vec<u8>),
    Matching(Pattern),
}

impl Sought {
    fn of(query: &Query<'_>) -> Sought {
        match *query {
            Query::Keys { pattern }
            | Query::Scan {
                pattern: Some(pattern),
                ..
            } => Sought::Like(pattern.to_vec()),
            _ => Sought::All,
        }
    }

    /// It is the walk's turn.
    fn parse(&mut self) {
        if let Sought::Like(pattern) = self {
            *self = Sought::Matching(Pattern::new(pattern));
        }
    }

    fn takes(&self, key: &[u8]) -> bool {
        match self {
            Sought::All => true,
            Sought::Like(pattern) => Pattern::new(pattern).matches(key),
            Sought::Matching(pattern) => pattern.matches(key),
        }
    }
}

struct Walk {
    ticket: u64,
    what: What,
    sought: Sought,
    /// What was submitted before it.
    behind: u64,
    /// Where it goes on, and whether it has seen the beginning of that shard.
    shard: ShardId,
    hash: u64,
    is_within: bool,
    /// There is no shard to go on with.
    is_over: bool,
    found: Vec<Reply>,
    bytes: usize,
}

impl Walk {
    /// Goes on at a hash, or with the next shard.
    fn go_on(&mut self, next: Option<u64>) {
        self.is_within = next.is_some();
        (self.shard, self.hash) = match next {
            Some(hash) => (self.shard, hash),
            None => (self.shard.saturating_add(1), 0),
        };
    }

    fn end(&mut self) -> Answer {
        let found = Reply::Array(std::mem::take(&mut self.found));
        match self.what {
            What::Scan { .. } => {
                let next = match self.is_over {
                    true => 0,
                    false => u64::from(self.shard) << 50 | self.hash >> 14,
                };
                let next = next.to_string().into_bytes();
                read(Reply::Array(vec![Reply::Bytes(next), found]))
            }
            // What is compared with others need not be of one moment.
            What::Digest { sum } => {
                let text = format!("{sum:040x}").into_bytes();
                Answer::Done(vec![Reply::Bytes(text)])
            }
            _ => read(found),
        }
    }
}

fn read(reply: Reply) -> Answer {
    Answer::Read(vec![reply])
}

/// Requests that scan everything, in order. The first is in progress once all that was submitted
/// before it has ended.
pub(super) struct Walks {
    waiting: VecDeque<Walk>,
    current: Option<Walk>,
    /// What may still be visited in this step.
    left: Bounds,
}

impl Default for Walks {
    fn default() -> Walks {
        Walks {
            waiting: VecDeque::new(),
            current: None,
            left: STEP,
        }
    }
}

impl Walks {
    fn take(&mut self, chains: usize, bytes: usize) {
        self.left.chains = self.left.chains.saturating_sub(chains.max(1));
        self.left.bytes = self.left.bytes.saturating_sub(bytes);
    }

    fn is_used_up(&self) -> bool {
        self.left.chains == 0 || self.left.bytes == 0
    }

    /// A step begins.
    pub fn begin(&mut self) {
        self.left = STEP;
    }

    pub fn len(&self) -> usize {
        self.waiting.len() + usize::from(self.current.is_some())
    }
}

/// The place of a cursor: its upper bits are the shard, not the slot: one pass over a shard's index
/// finds all its slots. Below is what 50 bits can say of a hash: it means the same after a
/// failover, at another size of the index, and on another server.
fn place(cursor: u64) -> (ShardId, u64) {
    ((cursor >> 50) as u16, cursor << 14)
}

impl Worker {
    pub(super) fn submit_walk(&mut self, ticket: u64, query: &Query<'_>) {
        let (shard, hash) = match *query {
            Query::Scan { cursor, .. } => place(cursor),
            _ => (0, 0),
        };
        let sought = Sought::of(query);
        self.submit_what(ticket, What::of(query), sought, (shard, hash));
    }

    /// Asks for a hash of everything that is served here: the same for the same keys and values,
    /// whatever their order.
    pub fn submit_digest(&mut self, ticket: u64) {
        self.submit_what(ticket, What::Digest { sum: 0 }, Sought::All, (0, 0));
    }

    fn submit_what(
        &mut self,
        ticket: u64,
        what: What,
        sought: Sought,
        (shard, hash): (ShardId, u64),
    ) {
        self.walks.waiting.push_back(Walk {
            ticket,
            what,
            sought,
            behind: self.next_context,
            shard,
            hash,
            is_within: false,
            is_over: false,
            found: Vec::new(),
            bytes: 0,
        });
        self.walk_on();
    }

    /// Continues requests that scan everything, as far as this step may; returns whether one is in
    /// progress.
    pub(super) fn walk_on(&mut self) -> bool {
        while !self.walks.is_used_up() {
            let Some(mut walk) = self.walks.current.take().or_else(|| self.next_walk()) else {
                return false;
            };
            match self.advance(&mut walk) {
                Some(answer) => {
                    self.stats.reads += 1;
                    self.answers.push((walk.ticket, answer));
                }
                None => self.walks.current = Some(walk),
            }
        }
        self.walks.len() > 0
    }

    /// The next one, if all that was submitted before it has ended.
    fn next_walk(&mut self) -> Option<Walk> {
        let behind = self.walks.waiting.front()?.behind;
        let is_awaited = |(context, op): (&u64, &Op)| {
            let answers = matches!(
                op.purpose,
                Purpose::Write {
                    ticket: Some(_),
                    ..
                }
            );
            *context <= behind && answers
        };
        let waits = self.parked.range(..=behind).next().is_some();
        if waits || self.ops.iter().any(is_awaited) {
            return None;
        }
        let mut walk = self.walks.waiting.pop_front()?;
        walk.sought.parse();
        Some(walk)
    }

    fn served(&self) -> impl Iterator<Item = ShardId> + '_ {
        let shards = 0..self.store.shards();
        shards.filter(|&shard| self.role(shard) == Role::Serving)
    }

    /// Goes on with a walk; answers its answer once it is at its end.
    fn advance(&mut self, walk: &mut Walk) -> Option<Answer> {
        while !self.walks.is_used_up() {
            match walk.what {
                What::Count => {
                    self.walks.take(1, 0);
                    let objects = self.served().filter_map(|id| self.store.shard(id));
                    let sum: u64 = objects.map(|it| it.objects()).sum();
                    return Some(read(Reply::Int(sum as i64)));
                }
                What::Refused => return Some(read(Reply::Failed(Failure::Unsupported))),
                _ => {}
            }
            let Some(shard) = self.served().find(|&it| it >= walk.shard) else {
                walk.is_over = true;
                return Some(walk.end());
            };
            if shard != walk.shard {
                if walk.is_within {
                    // Half of a shard is no answer.
                    return Some(Answer::NotServed);
                }
                (walk.shard, walk.hash) = (shard, 0);
            }
            let answer = match walk.what {
                What::Digest { .. } => self.digest_on(walk),
                _ => self.keys_on(walk),
            };
            if answer.is_some() {
                return answer;
            }
        }
        None
    }

    /// Reads the next keys.
    fn keys_on(&mut self, walk: &mut Walk) -> Option<Answer> {
        let mut bounds = self.walks.left;
        if let What::Scan { count, chains, .. } = walk.what {
            bounds.keys = count;
            bounds.chains = bounds.chains.min(chains);
            bounds.bytes = bounds.bytes.min(PAGE_BYTES.saturating_sub(walk.bytes));
        }
        let page = self.store.page(walk.shard, walk.hash, bounds);
        self.stats.walked_chains += page.chains as u64;
        self.walks.take(page.chains, page.bytes);
        walk.go_on(page.next);
        walk.is_over = walk.shard >= self.store.shards();
        let is_full = match &mut walk.what {
            What::Scan { count, chains, .. } => {
                *count = count.saturating_sub(page.keys.len());
                *chains = chains.saturating_sub(page.chains);
                *count == 0 || *chains == 0
            }
            _ => false,
        };
        let (most, part) = match &walk.what {
            What::Keys => (REPLY_BYTES, PART_BYTES),
            What::Scan { .. } => (PAGE_BYTES, 0),
            _ => return None,
        };
        for key in page.keys {
            if walk.sought.takes(&key) {
                walk.bytes += key.len() + part;
                walk.found.push(Reply::Bytes(key));
            }
        }
        if walk.bytes < most {
            return is_full.then(|| walk.end());
        }
        Some(match walk.what {
            What::Scan { .. } => walk.end(),
            _ => read(Reply::Failed(Failure::ReplyTooLong)),
        })
    }

    /// Reads the next values.
    fn digest_on(&mut self, walk: &mut Walk) -> Option<Answer> {
        let mut sum = 0u64;
        let visited = self
            .store
            .visit(walk.shard, walk.hash, self.walks.left, |object| {
                let mut both = (object.key().len() as u64).to_le_bytes().to_vec();
                both.extend_from_slice(object.key());
                both.extend_from_slice(object.value());
                sum = sum.wrapping_add(KeyHash::of(&both).hash);
            });
        match visited {
            Ok(visited) => {
                self.stats.walked_chains += visited.chains as u64;
                self.walks.take(visited.chains, visited.bytes);
                walk.go_on(visited.next);
            }
            Err(damaged) => return Some(Answer::damaged(&[], damaged)),
        }
        if let What::Digest { sum: all } = &mut walk.what {
            *all = all.wrapping_add(sum);
        }
        None
    }
}

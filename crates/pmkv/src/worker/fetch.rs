//! Requests for a shard that moves here (rowan §4.6): what is not here yet is fetched from the
//! server that served it before, key by key, while the shard's content follows as a whole. What is
//! found here is newest: writes since the move came here, and the other's copy has not changed but
//! by them.

use std::collections::{BTreeMap, HashMap, HashSet};

use cyclone_wire::command::{Command, Operation};

use super::requests::Parked;
use super::{Answer, Worker};
use crate::configuration::{KeyHash, ShardId};

/// After how long a key is asked for again, in microseconds.
const ASK_AGAIN_US: u64 = 20_000;

/// Keys known to be absent, at most; beyond, they are asked for again.
const MAX_ABSENT: usize = 1 << 16;

/// What is known of a shard that is not all here.
#[derive(Default)]
pub(super) struct MissingEntries {
    /// Keys that were never written before the move.
    absent: HashSet<Vec<u8>>,
    /// Keys asked for: when last, since when, and who waits.
    asked: HashMap<Vec<u8>, Asked>,
}

#[derive(Default)]
struct Asked {
    at_us: Option<u64>,
    since_us: Option<u64>,
    waiting: Vec<u64>,
}

/// Requests that wait for keys, and for how many.
#[derive(Default)]
pub(super) struct Fetching {
    requests: BTreeMap<u64, (Parked, usize)>,
}

impl Fetching {
    pub fn len(&self) -> usize {
        self.requests.len()
    }
}

impl Worker {
    /// A shard has moved here, and its content has not, or now has.
    pub fn set_lacking(&mut self, shard: ShardId, lacks: bool) {
        let Some(mine) = self.shards.get_mut(usize::from(shard)) else {
            return;
        };
        let had = match (lacks, mine.lacking.is_some()) {
            (true, false) => {
                self.moving += 1;
                mine.lacking.replace(MissingEntries::default())
            }
            (false, true) => {
                self.moving -= 1;
                mine.lacking.take()
            }
            _ => return,
        };
        self.run_waiting(had);
    }

    fn run_waiting(&mut self, had: Option<MissingEntries>) {
        let waiting = had.into_iter().flat_map(|it| it.asked.into_values());
        let requests: HashSet<u64> = waiting.flat_map(|asked| asked.waiting).collect();
        for request in requests {
            if let Some((parked, _)) = self.fetching.requests.remove(&request) {
                self.arrive(parked);
            }
        }
    }

    /// A new configuration: requests that wait for a key arrive anew.
    pub(super) fn fetch_anew(&mut self) {
        for (_, (parked, _)) in std::mem::take(&mut self.fetching.requests) {
            self.arrive(parked);
        }
        for mine in &mut self.shards {
            if let Some(lacking) = &mut mine.lacking {
                lacking.asked.retain(|_, asked| !asked.waiting.is_empty());
            }
        }
    }

    /// Keys of a request that are not here and may be elsewhere.
    pub(super) fn lacks(&self, shard: ShardId, operations: &[Operation<'_>]) -> Vec<Vec<u8>> {
        let mine = &self.shards[usize::from(shard)];
        let Some(lacking) = &mine.lacking else {
            return Vec::new();
        };
        let mut keys: Vec<Vec<u8>> = Vec::new();
        for key in operations.iter().flat_map(|it| it.keys().to_vec()) {
            let KeyHash { hash, .. } = KeyHash::of(key);
            let known = lacking.absent.contains(key)
                || !matches!(self.store.look(shard, hash, key), Ok(None))
                || keys.iter().any(|it| it == key);
            if !known {
                keys.push(key.to_vec());
            }
        }
        keys
    }

    /// Lets a request wait for keys.
    pub(super) fn fetch(
        &mut self,
        ticket: u64,
        operations: &[Operation<'_>],
        shard: ShardId,
        keys: Vec<Vec<u8>>,
    ) {
        let request = self.next_context + 1;
        self.next_context = request;
        let parked = Parked::new(ticket, operations);
        let count = keys.len();
        self.fetching.requests.insert(request, (parked, count));
        if let Some(lacking) = &mut self.shards[usize::from(shard)].lacking {
            for key in keys {
                lacking.asked.entry(key).or_default().waiting.push(request);
            }
        }
    }

    /// Keys to be asked for now.
    pub fn take_fetches(&mut self, fetches: &mut Vec<(ShardId, Vec<u8>)>) {
        if self.moving == 0 {
            return;
        }
        let now_us = self.now_us;
        let mut late: Vec<u64> = Vec::new();
        for (mine, shard) in self.shards.iter_mut().zip(0u16..) {
            let Some(lacking) = &mut mine.lacking else {
                continue;
            };
            // The other server may be unable to read it.
            lacking.asked.retain(|_, asked| {
                let since_us = *asked.since_us.get_or_insert(now_us);
                let is_late = now_us.saturating_sub(since_us) > self.config.give_up_us;
                if is_late {
                    late.append(&mut asked.waiting);
                }
                !is_late
            });
            for (key, asked) in &mut lacking.asked {
                let rests = |at_us| now_us.saturating_sub(at_us) < ASK_AGAIN_US;
                if !asked.at_us.is_some_and(rests) {
                    asked.at_us = Some(now_us);
                    fetches.push((shard, key.clone()));
                }
            }
        }
        for request in late {
            if let Some((parked, _)) = self.fetching.requests.remove(&request) {
                self.stats.refused_busy += 1;
                self.answers.push((parked.ticket, Answer::Busy));
            }
        }
    }

    /// A key's entry has been written down here, or there is none.
    pub fn fetched(&mut self, shard: ShardId, key: &[u8]) {
        let mine = self.shards.get_mut(usize::from(shard));
        let Some(lacking) = mine.and_then(|it| it.lacking.as_mut()) else {
            return;
        };
        let Some(asked) = lacking.asked.remove(key) else {
            return;
        };
        self.stats.fetched += 1;
        if lacking.absent.len() >= MAX_ABSENT {
            lacking.absent.clear();
        }
        lacking.absent.insert(key.to_vec());
        for request in asked.waiting {
            let Some((_, missing)) = self.fetching.requests.get_mut(&request) else {
                continue;
            };
            *missing = missing.saturating_sub(1);
            if *missing == 0
                && let Some((parked, _)) = self.fetching.requests.remove(&request)
            {
                self.arrive(parked);
            }
        }
    }

    /// A request arrives, perhaps not for the first time.
    pub(super) fn arrive(&mut self, parked: Parked) {
        let decoded: Result<Vec<Command<'_>>, _> = parked
            .operations
            .iter()
            .map(|it| Command::decode(it))
            .collect();
        let ticket = parked.ticket;
        // Encoded by `Parked::new`.
        let Ok(commands) = decoded else {
            self.stats.refused_busy += 1;
            return self.answers.push((ticket, Answer::Busy));
        };
        let operations: Vec<Operation<'_>> = commands.into_iter().map(|it| it.operation).collect();
        self.route(ticket, &operations);
    }
}

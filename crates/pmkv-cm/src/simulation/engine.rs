//! A server: the holder, and the smallest engine that can lose a write. Shards are sets of numbered
//! writes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::Clock;
use crate::config::{Configuration, CopyTask, ServerId, ShardId};
use crate::holder::Holder;
use crate::message::Hello;
use crate::rules::Timing;

/// What a server's memory holds of a shard.
#[derive(Clone, Debug, Default)]
pub(crate) struct Data {
    pub since: u64,
    pub writes: BTreeSet<u64>,
}

/// A write that its primary waits for.
#[derive(Clone, Debug)]
pub(crate) struct InFlight {
    pub shard: ShardId,
    pub write: u64,
    pub waits: BTreeSet<ServerId>,
    pub resend_us: u64,
}

/// A process.
pub(crate) struct Process {
    pub holder: Holder,
    pub session: u64,
    /// [`crate::Member::since`] in the configuration adopted: names the keys to others' memory.
    pub membership: u64,
    /// Who may reach this server's memory, by membership.
    pub allowed: BTreeSet<(ServerId, u64)>,
    /// The configuration adopted, and the one whose commitment was reported to it.
    pub adopted: Option<Arc<Configuration>>,
    pub committed: Option<Arc<Configuration>>,
    pub adopting: Option<(Arc<Configuration>, Vec<ShardId>)>,
    /// Shards served and reconciled; those still to be.
    pub promoted: BTreeMap<ShardId, u64>,
    pub promoting: BTreeMap<ShardId, u64>,
    pub in_flight: Vec<InFlight>,
    pub copying: Vec<(CopyTask, u64)>,
    pub requests: BTreeMap<ShardId, u32>,
    pub next_loads_us: u64,
    pub left: bool,
}

pub(crate) struct Server {
    pub id: ServerId,
    pub incarnation: u64,
    pub clock: Clock,
    pub data: BTreeMap<ShardId, Data>,
    pub process: Option<Process>,
    pub sessions: u64,
    pub paused_until_us: u64,
    pub down_until_us: u64,
    /// Highest term seen, over all processes of this run.
    pub highest: u64,
}

impl Server {
    pub fn start(&mut self, rules: &Timing, now_us: u64) {
        self.sessions += 1;
        let hello = Hello {
            server: self.id,
            incarnation: self.incarnation,
            session: self.sessions,
            client: format!("127.0.0.1:{}", 7000 + self.id.0),
            peer: format!("sim:{}", self.id.0),
        };
        self.process = Some(Process {
            holder: Holder::new(hello, rules.clone(), self.clock.read(now_us)).unwrap(),
            session: self.sessions,
            membership: 0,
            allowed: BTreeSet::new(),
            adopted: None,
            committed: None,
            adopting: None,
            promoted: BTreeMap::new(),
            promoting: BTreeMap::new(),
            in_flight: Vec::new(),
            copying: Vec::new(),
            requests: BTreeMap::new(),
            next_loads_us: now_us,
            left: false,
        });
    }

    /// Memory that belongs to the copies of a configuration: what is from before is void.
    pub fn lay_out(&mut self, config: &Configuration) {
        for (number, shard) in config.numbered() {
            let Some(copy) = shard.copies().find(|copy| copy.server == self.id) else {
                continue;
            };
            let data = self.data.entry(number).or_default();
            if data.since != copy.since {
                *data = Data {
                    since: copy.since,
                    writes: BTreeSet::new(),
                };
            }
        }
    }
}

impl Process {
    /// Whom a write of this shard must reach: full copies of the newest configuration adopted, and
    /// joining ones that are committed.
    pub fn targets(&self, me: ServerId, shard: ShardId) -> BTreeSet<ServerId> {
        let of = |config: &Option<Arc<Configuration>>| {
            config
                .as_ref()
                .and_then(|c| c.shards.get(usize::from(shard)).cloned())
        };
        let (Some(adopted), committed) = (of(&self.adopted), of(&self.committed)) else {
            return BTreeSet::new();
        };
        let told = |server: &ServerId| committed.as_ref().is_some_and(|shard| shard.has(*server));
        let full = adopted.full.iter().map(|copy| copy.server);
        let joining = adopted.joining.iter().map(|copy| copy.server).filter(told);
        full.chain(joining).filter(|id| *id != me).collect()
    }
}

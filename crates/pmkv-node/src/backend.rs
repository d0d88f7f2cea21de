//! The node behind the Redis port.

use std::collections::BTreeMap;

use cyclone_gateway::{Backend, InfoSection, Outcome, Route, Topology, TopologyNode};
use cyclone_pmkv::{Answer, Node, Placement, Role, ServerId, ShardId};
use cyclone_wire::command::{Operation, Query};
use cyclone_wire::reply::{Failure, Reply};

/// Of a key in an error.
const SHOWN_KEY_BYTES: usize = 100;

/// What the Redis port knows without asking the node.
pub(super) struct Listening {
    pub own: ServerId,
    pub names: BTreeMap<ServerId, TopologyNode>,
    pub copies: usize,
    pub replication: String,
    pub survives: String,
    pub region: String,
}

/// The node for the length of a step.
pub(super) struct NodeBackend<'a> {
    pub node: &'a mut Node,
    pub listening: &'a Listening,
    /// Whether this server may serve at this moment.
    pub holds_lease: bool,
}

/// How an answer leaves. A write is right because every replica has it; what was only read counts
/// if the lease held.
//= rowan §4.5
pub(super) fn outcome(answer: Answer, holds_lease: bool) -> Outcome {
    match answer {
        Answer::Read(_) if !holds_lease => Outcome::NotLeader,
        Answer::Done(mut replies) | Answer::Read(mut replies) => {
            // One operation, one reply.
            let reply = replies.pop();
            Outcome::Done(reply.unwrap_or(Reply::Failed(Failure::Unsupported)))
        }
        Answer::NotServed => Outcome::NotLeader,
        Answer::Busy | Answer::CrossShard => Outcome::Busy,
        Answer::Full => Outcome::Full,
        Answer::Unknown => Outcome::Unknown,
        Answer::TooLarge => Outcome::TooLarge,
        Answer::EntryTooLarge { bytes, limit } => Outcome::Refused(format!(
            "what the command writes takes {bytes} bytes, and an entry holds {limit}: write less at a time"
        )),
        Answer::Damaged { key, entry } if key.is_empty() => Outcome::Refused(entry.to_string()),
        Answer::Damaged { key, entry } => {
            let key = key[..key.len().min(SHOWN_KEY_BYTES)].escape_ascii();
            Outcome::Refused(format!("{entry}: the value of \"{key}\" cannot be read"))
        }
    }
}

impl NodeBackend<'_> {
    fn shard_of(&self, slot: u16) -> ShardId {
        self.node.store().shard_of(slot)
    }

    fn submit(&mut self, ticket: u64, operation: Operation<'_>) {
        if let Some(worker) = self.node.worker(0) {
            worker.submit(ticket, &[operation]);
        }
    }
}

impl Backend for NodeBackend<'_> {
    fn submit_write(&mut self, ticket: u64, operation: &Operation<'_>) {
        self.submit(ticket, operation.clone());
    }

    fn submit_read(&mut self, ticket: u64, query: &Query<'_>) {
        self.submit(ticket, Operation::Read(query.clone()));
    }

    fn submit_digest(&mut self, ticket: u64) {
        if let Some(worker) = self.node.worker(0) {
            worker.submit_digest(ticket);
        }
    }

    fn route(&self, slot: u16) -> Route {
        let shard = self.shard_of(slot);
        let configuration = self.node.configuration();
        let primary = configuration.map(|it| it.shards[usize::from(shard)].primary);
        match primary {
            Some(id) if id == self.listening.own => match self.node.role(shard) {
                Role::Serving if self.holds_lease => Route::Local,
                Role::Serving => Route::NoLeader,
                Role::Preparing | Role::Elsewhere => Route::NoLeader,
            },
            Some(id) => match self.listening.names.get(&id) {
                Some(name) => Route::Moved {
                    addr: format!("{}:{}", name.host, name.port),
                },
                None => Route::NoLeader,
            },
            None => Route::NoLeader,
        }
    }

    /// Each server shows what it serves, even if that is nothing.
    fn route_of_all(&self) -> Route {
        match self.holds_lease && self.node.configuration().is_some() {
            true => Route::Local,
            false => Route::NoLeader,
        }
    }

    fn flushes(&self) -> bool {
        false
    }

    fn same_owner(&self, a: u16, b: u16) -> bool {
        self.shard_of(a) == self.shard_of(b)
    }

    fn topology(&self) -> Topology {
        let Some(configuration) = self.node.configuration() else {
            return Topology::default();
        };
        let serves = |id: ServerId| configuration.shards.iter().any(|it| it.primary == id);
        let nodes: Vec<TopologyNode> = self
            .listening
            .names
            .iter()
            .map(|(&id, name)| TopologyNode {
                is_leader: serves(id),
                alive: configuration.server(id).is_some(),
                ..name.clone()
            })
            .collect();
        let place = |id: ServerId| self.listening.names.keys().position(|&it| it == id);
        let mut ranges: Vec<(u16, u16, usize)> = Vec::new();
        for slot in 0..cyclone_wire::slot::SLOTS {
            let primary = configuration.shards[usize::from(self.shard_of(slot))].primary;
            let Some(at) = place(primary) else { continue };
            match ranges.last_mut() {
                Some((_, last, of)) if *of == at && *last + 1 == slot => *last = slot,
                _ => ranges.push((slot, slot, at)),
            }
        }
        Topology {
            nodes,
            epoch: u64::from(configuration.term),
            ranges,
        }
    }

    fn info(&self) -> Vec<InfoSection> {
        let store = self.node.store();
        let roles: Vec<Role> = (0..store.shards()).map(|it| self.node.role(it)).collect();
        let count = |role: Role| roles.iter().filter(|&&it| it == role).count() as u64;
        let members = self.node.configuration().map_or(0, |it| it.servers.len());
        let term = self.node.configuration().map_or(0, |it| it.term);
        let control = self.node.control();
        let table = control.table();
        let mut states: BTreeMap<&str, u64> = BTreeMap::new();
        for (_, entry) in table.entries() {
            *states.entry(entry.state.name()).or_default() += 1;
        }
        let stats = control.stats();
        let mut lines: Vec<(String, String)> = vec![
            (
                "pmkv_replication".into(),
                self.listening.replication.clone(),
            ),
            ("cyclone_survives".into(), self.listening.survives.clone()),
            ("cyclone_region".into(), self.listening.region.clone()),
        ];
        let mut add =
            |name: &str, value: u64| lines.push((format!("pmkv_{name}"), value.to_string()));
        add("server", u64::from(self.listening.own));
        add("term", u64::from(term));
        add("shards_serving", count(Role::Serving));
        add("shards_preparing", count(Role::Preparing));
        let placed = self.node.configuration().map(|it| &it.shards[..]);
        let placed = placed.unwrap_or_default();
        let is_whole = |it: &&Placement| {
            it.source.is_none()
                && it.joining.is_empty()
                && 1 + it.backups.len() >= self.listening.copies
        };
        let holds = |it: &&Placement| it.holds(self.listening.own) && it.source.is_none();
        add("members", members as u64);
        add("lease", u64::from(self.holds_lease));
        add(
            "shards_whole",
            placed.iter().filter(is_whole).count() as u64,
        );
        add("shards_held", placed.iter().filter(holds).count() as u64);
        add("segments", u64::from(table.segments()));
        add("full", u64::from(store.space().is_full()));
        for (state, number) in states {
            add(&format!("segments_{state}"), number);
        }
        add("digested", stats.digested);
        add("committed", stats.committed);
        add("cleaned", stats.cleaned);
        add("cleaned_bytes", stats.copied_bytes);
        add("tombstones_dropped", stats.tombstones_dropped);
        add("table_refusals", stats.refused);
        add("kept_segments", stats.kept);
        add("damaged_reads", store.damaged());
        add("failed_gifts", self.node.failed_gifts());
        drop(control);
        let role = if count(Role::Serving) > 0 {
            "master"
        } else {
            "slave"
        };
        let replication = vec![
            ("role".to_owned(), role.to_owned()),
            (
                "connected_slaves".to_owned(),
                members.saturating_sub(1).to_string(),
            ),
        ];
        vec![
            ("Replication".to_owned(), replication),
            ("Pmkv".to_owned(), lines),
        ]
    }

    fn write_mark(&self) -> u64 {
        0
    }

    /// A write is answered when every replica has it: there is nothing to wait for.
    fn replicas_acked(&self, _mark: u64) -> usize {
        let shards = self.node.configuration().map(|it| &it.shards);
        let fewest = shards.and_then(|it| it.iter().map(|it| it.backups.len()).min());
        fewest.unwrap_or(0)
    }
}

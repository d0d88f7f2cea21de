//! `cyclone serve`: a replica and its Redis port in one event loop.

mod checks;
mod cpus;
pub(crate) mod engine;
pub(crate) mod lock;
mod port;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result};
use cyclone_gateway::{
    Backend, Gateway, GatewayConfig, InfoSection, MemberRequest, Outcome, OwnKeys, Route,
    SnapshotRequest, Topology, TopologyNode,
};
use cyclone_replica::{
    BackupReply, BackupRequest, COMPANION, Config, EventSource, KeysShown, LogStatus, Member,
    MemberError, Node, Now, Reactor, recover,
};
use cyclone_wire::client::ReadMode;
use cyclone_wire::command::{Operation, Query};
use cyclone_wire::format_version::FormatVersion;
use cyclone_wire::reply::Reply;
use mio::event::Event;

use crate::backup::shelf;
use crate::config::File;
use crate::metrics::{self, MetricsExchange, MetricsSnapshot, figures};
use crate::reload::Renewals;
use crate::trim::Trimmer;
pub use checks::warn_of_few_files;
pub use checks::{Checked, check};
use cpus::{allowed_cpus, cpus_behind, pin};

/// How often a new cluster's format version is tried to be recorded: by its leader, for as long as
/// a founder does not answer; and by a node that does not lead yet.
const RAISE_US: u64 = 10_000_000;
const LEADERLESS_US: u64 = 100_000;

/// The gateway as the loop's companion.
struct Redis {
    gateway: Gateway,
    trimmer: Trimmer,
}

/// Says which clients were closed because all together held too much memory.
pub fn report_evictions(gateway: &mut Gateway) {
    while let Some(eviction) = gateway.next_eviction() {
        tracing::warn!("{eviction}");
    }
}

/// The node as the gateway's backend, for the length of a step.
struct NodeBackend<'a> {
    node: &'a mut Node,
}

/// A member as CLUSTER commands present it, if it has a Redis port.
fn name_of(config: &Config, member: &Member) -> Option<TopologyNode> {
    let redis = member.redis?;
    Some(TopologyNode {
        id: node_name(config.cluster_id, member.id),
        host: redis.ip().to_string(),
        port: redis.port(),
        is_leader: false,
        alive: true,
        myself: member.id == config.id,
    })
}

/// 40 hexadecimal digits that name a node for Redis cluster clients.
fn node_name(cluster: u128, id: u64) -> String {
    format!("{:024x}{id:016x}", cluster >> 32)
}

impl Backend for NodeBackend<'_> {
    fn submit_write(&mut self, ticket: u64, operation: &Operation<'_>) {
        self.node.write(ticket, operation);
    }

    fn submit_read(&mut self, ticket: u64, query: &Query<'_>) {
        self.node.read(ticket, query);
    }

    fn submit_read_as(&mut self, ticket: u64, query: &Query<'_>, mode: ReadMode) {
        self.node.read_as(ticket, query, mode);
    }

    fn submit_stale_read(&mut self, ticket: u64, query: &Query<'_>) {
        self.node.read_stale(ticket, query);
    }

    fn forget_reads(&mut self, tickets: &[u64]) {
        self.node.forget_reads(tickets);
    }

    fn is_backpressured(&self) -> bool {
        self.node.is_backpressured()
    }

    fn reads_stale(&self, _slot: u16) -> bool {
        self.node.is_fresh_enough()
    }

    fn own_keys(&self) -> OwnKeys {
        match self.node.own_keys() {
            KeysShown::Yes => OwnKeys::Shown,
            KeysShown::TooOld => OwnKeys::TooOld,
            KeysShown::Installing => OwnKeys::Loading,
        }
    }

    fn submit_own_read(&mut self, ticket: u64, query: &Query<'_>) {
        self.node.read_own(ticket, query);
    }

    fn submit_digest(&mut self, ticket: u64) {
        self.node.digest(ticket);
    }

    fn submit_snapshot(&mut self, ticket: u64, client: u64, request: SnapshotRequest) -> bool {
        self.node.backup(
            ticket,
            client,
            match request {
                SnapshotRequest::Begin => BackupRequest::Begin,
                SnapshotRequest::Read {
                    id,
                    file,
                    offset,
                    length,
                } => BackupRequest::Read {
                    id,
                    file,
                    offset,
                    length,
                },
                SnapshotRequest::End { id } => BackupRequest::End { id },
            },
        );
        true
    }

    fn release_snapshots(&mut self, client: u64) {
        self.node.release_backups(client);
    }

    fn submit_member(&mut self, ticket: u64, request: MemberRequest) -> bool {
        use cyclone_replica::MemberRequest as Asked;
        let asked = match request {
            MemberRequest::Add { id, packet, redis } => Asked::Add { id, packet, redis },
            MemberRequest::Move {
                id,
                packet,
                redis,
                force,
            } => Asked::Move {
                id,
                packet,
                redis,
                force,
            },
            MemberRequest::Promote { id } => Asked::Promote { id },
            MemberRequest::Remove { id } => Asked::Remove { id },
            MemberRequest::Replace {
                old,
                id,
                packet,
                redis,
            } => Asked::Replace {
                old,
                id,
                packet,
                redis,
            },
        };
        self.node.change_members(ticket, &asked);
        true
    }

    fn submit_clock_reset(&mut self, ticket: u64) -> bool {
        self.node.reset_clock(ticket);
        true
    }

    fn submit_finalize_upgrade(&mut self, ticket: u64) -> bool {
        self.node.finalize_upgrade(ticket);
        true
    }

    fn route(&self, slot: u16) -> Route {
        let own = self.node.config().id;
        let redis_of = |id: u64| {
            let mut members = self.node.members().iter();
            members.find(|member| member.id == id)?.redis
        };
        match self.node.leader_of(slot) {
            Some(leader) if leader == own => Route::Local,
            Some(leader) => redis_of(leader).map_or(Route::NoLeader, |redis| Route::Moved {
                addr: format!("{}:{}", redis.ip(), redis.port()),
            }),
            None => Route::NoLeader,
        }
    }

    fn makes_progress(&self) -> bool {
        !self.node.is_stalled()
    }

    fn topology(&self) -> Topology {
        let status = self.node.status();
        let log = &status.logs[0];
        let nodes = self.node.members().iter().filter_map(|member| {
            Some(TopologyNode {
                is_leader: log.leader == Some(member.id),
                alive: self.node.is_alive(member.id),
                ..name_of(self.node.config(), member)?
            })
        });
        Topology {
            nodes: nodes.collect(),
            epoch: log.term,
            ranges: Vec::new(),
        }
    }

    fn info(&self) -> Vec<InfoSection> {
        let status = self.node.status();
        let leads = self.node.leads();
        let mut replication = vec![(
            "role".to_owned(),
            if leads { "master" } else { "slave" }.to_owned(),
        )];
        let alive = status.logs[0].peers.iter().filter(|peer| peer.2).count();
        replication.push((
            "connected_slaves".to_owned(),
            if leads { alive } else { 0 }.to_string(),
        ));
        let mut ours = vec![
            ("cyclone_id".to_owned(), status.id.to_string()),
            (
                "cyclone_cluster".to_owned(),
                format!("{:032x}", status.cluster_id),
            ),
            (
                "cyclone_role".to_owned(),
                if leads { "leader" } else { status.role() }.to_owned(),
            ),
            (
                "cyclone_durability".to_owned(),
                status.durability.to_owned(),
            ),
            ("cyclone_survives".to_owned(), status.survives.clone()),
            ("cyclone_region".to_owned(), status.region.clone()),
        ];
        ours.push((
            "cyclone_store_state".to_owned(),
            status.store.name().to_owned(),
        ));
        if let Some(error) = &status.store_error {
            let line = error.replace(['\r', '\n'], " ");
            ours.push(("cyclone_store_error".to_owned(), line));
        }
        for (name, waits_us) in [
            ("store", status.store_waits_us),
            ("flash", status.flash_waits_us),
        ] {
            ours.push((
                format!("cyclone_{name}_waits_ms"),
                (waits_us / 1000).to_string(),
            ));
        }
        ours.push(("cyclone_logs".to_owned(), status.logs.len().to_string()));
        for (name, value) in [
            (
                "members_changing",
                u64::from(self.node.is_changing_members()),
            ),
            ("members_highest_id", self.node.highest_member()),
            ("removed", u64::from(self.node.is_removed())),
        ] {
            ours.push((format!("cyclone_{name}"), value.to_string()));
        }
        for (name, version) in [
            ("recorded", status.format_version),
            ("supported", FormatVersion::CURRENT),
        ] {
            ours.push((
                format!("cyclone_format_version_{name}"),
                version.to_string(),
            ));
        }
        if let Some(offset_ms) = status.clock_offset_ms {
            ours.push(("cyclone_clock_offset_ms".to_owned(), offset_ms.to_string()));
        }
        for log in &status.logs {
            let name = format!("cyclone_log{}_clock_offset_ms", log.log);
            ours.push((name, log.clock_offset_ms.to_string()));
            ours.push((format!("cyclone_log{}_role", log.log), log.role.to_owned()));
            let mut add = |name: &str, value: u64| {
                ours.push((format!("cyclone_log{}_{name}", log.log), value.to_string()))
            };
            add("term", log.term);
            add("leader", log.leader.unwrap_or(0));
            add("first", log.first);
            add("last", log.last);
            add("commit", log.commit);
            add("applied", log.applied);
            add("flushed", log.flushed);
            add("used_bytes", log.used_bytes);
            add("capacity_bytes", log.capacity_bytes);
            if let Some(flash) = &log.flash {
                add("flash_first", flash.first);
                add("flash_durable", flash.durable);
                add("flash_used_bytes", flash.used_bytes.0);
                add("flash_capacity_bytes", flash.used_bytes.1);
                add("flash_writes", flash.stats.writes);
                add("flash_written_bytes", flash.stats.pages * 4096);
                add("flash_write_errors", flash.stats.write_errors);
                let state = match flash.unreadable {
                    true => "unreadable",
                    false => flash.state.name(),
                };
                let name = format!("cyclone_log{}_flash_state", log.log);
                ours.push((name, state.to_owned()));
            }
            of_archive(&mut ours, log);
            let members = self.node.group(usize::from(log.log)).members();
            for (list, ids) in [
                ("voters", &members.voters),
                ("voters_outgoing", &members.voters_outgoing),
                ("learners", &members.learners),
            ] {
                let ids: Vec<String> = ids.iter().map(u64::to_string).collect();
                ours.push((format!("cyclone_log{}_{list}", log.log), ids.join(",")));
            }
        }
        for log in &status.logs {
            for (id, matched, alive) in &log.peers {
                // One log's peers keep their short names.
                let name = match log.log {
                    0 => format!("cyclone_peer{id}"),
                    other => format!("cyclone_log{other}_peer{id}"),
                };
                let (alive, behind) = (u8::from(*alive), log.behind(*matched));
                ours.push((
                    name,
                    format!("matched={matched},alive={alive},behind={behind}"),
                ));
            }
        }
        let c = &status.counters;
        for (name, value) in [
            ("writes", c.writes),
            ("reads", c.reads),
            ("refused_busy", c.refused_busy),
            ("refused_work", c.refused_work),
            ("outcome_unknown", c.outcome_unknown),
            ("refused_damaged", c.refused_damaged),
            ("refused_not_leader", c.refused_not_leader),
            ("discarded", c.discarded),
            ("gangs", c.gangs),
            ("gangs_aborted", c.gangs_aborted),
            ("malformed_packets", c.malformed),
            ("dropped_full", c.dropped_full),
            ("store_stalls", c.store_stalls),
            ("store_timeouts", c.store_timeouts),
            ("flash_timeouts", c.flash_timeouts),
            ("store_no_space", c.store_no_space),
            ("store_damaged", c.store_damaged),
            ("handovers", c.handovers),
            ("slow_reads", c.slow_reads),
            ("snapshots_made", c.snapshots_made),
            ("snapshots_installed", c.snapshots_installed),
            ("longest_gap_us", c.longest_gap_us),
            ("loop_helped", c.helped),
            ("scan_snapshots", status.held_snapshots),
            ("save_snapshots", status.held_backups),
            ("apply_largest_call_bytes", status.work_done.largest_call),
            (
                "apply_largest_command_bytes",
                status.work_done.largest_command,
            ),
        ] {
            ours.push((format!("cyclone_{name}"), value.to_string()));
        }
        let packets = self
            .node
            .packet_stats()
            .into_iter()
            .map(|(name, value)| (format!("packet_{name}"), value.to_string()));
        vec![
            ("Replication".to_owned(), replication),
            ("Cyclone".to_owned(), ours),
            ("Packets".to_owned(), packets.collect()),
        ]
    }

    fn frames(&self) -> Option<Vec<(&'static str, u64)>> {
        let frames = self.node.frames();
        Some(vec![
            ("all", frames.all),
            ("free", frames.free),
            ("logs", frames.logs),
            ("drivers", frames.drivers),
            ("partials", frames.partials),
        ])
    }

    fn write_mark(&self) -> u64 {
        self.node.write_mark()
    }

    fn replicas_acked(&self, mark: u64) -> usize {
        self.node.replicas_holding(mark)
    }

    fn acked_marks(&self) -> Vec<u64> {
        self.node.replica_marks()
    }
}

/// What INFO says of a log's archive.
fn of_archive(lines: &mut Vec<(String, String)>, log: &LogStatus) {
    let Some(archive) = &log.archive else {
        return;
    };
    let state = match &archive.failing {
        None => "ready".to_owned(),
        Some(what) => format!("failing: {what}"),
    };
    for (name, value) in [
        ("sealed", archive.sealed.to_string()),
        ("behind", archive.behind.to_string()),
        ("gaps", archive.gaps.to_string()),
        ("lost", archive.lost.to_string()),
        ("state", state),
    ] {
        lines.push((format!("cyclone_log{}_archive_{name}", log.log), value));
    }
}

/// An answer about a snapshot, as `ctl snapshot save` reads it.
fn described(config: &Config, reply: BackupReply) -> Reply {
    // Indexes, terms and lengths are far below 2^63.
    let pair = |a: Reply, b: u64| Reply::Array(vec![a, Reply::Int(b as i64)]);
    match reply {
        BackupReply::Ended => Reply::Ok,
        BackupReply::Piece(bytes) => Reply::Array(vec![
            Reply::Int(i64::from(cyclone_wire::ring::crc32c_of(&bytes))),
            Reply::Bytes(bytes),
        ]),
        BackupReply::Begun { id, applied, files } => Reply::Array(vec![
            Reply::Int(id as i64),
            Reply::Bytes(format!("{:032x}", config.cluster_id).into_bytes()),
            Reply::Bytes(crate::config::engine_name(config.engine).into()),
            Reply::Array(
                applied
                    .into_iter()
                    .map(|(index, term)| pair(Reply::Int(index as i64), term))
                    .collect(),
            ),
            Reply::Array(
                files
                    .into_iter()
                    .map(|(name, length)| pair(Reply::Bytes(name.into_bytes()), length))
                    .collect(),
            ),
        ]),
    }
}

impl Redis {
    fn deliver(&mut self, now: Now, node: &mut Node) -> usize {
        let mut work = 0;
        for (ticket, outcome) in node.take_completions() {
            work += 1;
            let outcome = match outcome {
                cyclone_replica::Outcome::Done(reply) => Outcome::Done(reply),
                cyclone_replica::Outcome::NotLeader(_) => Outcome::NotLeader,
                cyclone_replica::Outcome::Busy => Outcome::Busy,
                cyclone_replica::Outcome::Lost => Outcome::Lost,
                cyclone_replica::Outcome::Unknown => Outcome::Unknown,
                cyclone_replica::Outcome::TooLarge => Outcome::TooLarge,
                cyclone_replica::Outcome::Damaged => Outcome::Damaged,
            };
            self.gateway.complete(ticket, outcome);
        }
        for (ticket, error) in node.take_member_refusals() {
            work += 1;
            let outcome = match error {
                error if error.is_temporary() => Outcome::Busy,
                MemberError::NoMajority { .. } => Outcome::RefusedWithCode {
                    code: "NOQUORUM",
                    reason: error.to_string(),
                },
                error => Outcome::Refused(error.to_string()),
            };
            self.gateway.complete(ticket, outcome);
        }
        for (ticket, error) in node.take_upgrade_refusals() {
            work += 1;
            let outcome = Outcome::RefusedWithCode {
                code: error.code(),
                reason: error.to_string(),
            };
            self.gateway.complete(ticket, outcome);
        }
        for (ticket, answer) in node.take_backups() {
            work += 1;
            let outcome = match answer {
                Ok(reply) => Outcome::Done(described(node.config(), reply)),
                Err(error) => Outcome::Refused(error.to_string()),
            };
            self.gateway.complete(ticket, outcome);
        }
        if work > 0 {
            self.gateway.flush(now.steady_us, &NodeBackend { node });
        }
        work
    }
}

impl EventSource for Redis {
    fn ready(&mut self, event: &Event) {
        self.gateway.handle(event);
    }

    fn step(&mut self, now: Now, node: &mut Node) -> usize {
        let mut behind = NodeBackend { node };
        let work = self.gateway.step(now.steady_us, &mut behind);
        report_evictions(&mut self.gateway);
        let held = self.gateway.held();
        self.trimmer.note(held.input_bytes + held.output_bytes);
        if work > 0 {
            behind.node.note_work();
        }
        work + self.deliver(now, node)
    }

    fn deadline_us(&mut self, now: Now) -> u64 {
        if self.gateway.has_work() {
            return 0;
        }
        let timeout_us = self.gateway.next_timeout_us(now.steady_us);
        timeout_us.map_or(u64::MAX, |us| now.steady_us.saturating_add(us))
    }
}

/// What shares the loop with the node: the Redis port, if there is one, and the readers of metrics.
struct LoopServices {
    redis: Option<Redis>,
    figures: Option<Arc<MetricsExchange>>,
    /// What was read again for the Redis port.
    renewals: Arc<Renewals>,
    /// The format version that the file `ENGINE` names.
    noted_version: FormatVersion,
    /// A new cluster's version is not raised before.
    next_raise_us: u64,
}

impl LoopServices {
    /// Names a format version in the data directory once it is recorded, so that older programs are
    /// refused there. Of a new cluster the directory names it first: the leader then records it.
    fn follow_format_version(&mut self, now: Now, node: &mut Node) {
        let recorded = node.format_version();
        if recorded > self.noted_version {
            let config = node.config();
            self.noted_version = engine::note(&config.data, config.engine, recorded);
        } else if recorded < self.noted_version && now.steady_us >= self.next_raise_us {
            let pause_us = match node.raise_format_version() {
                true => RAISE_US,
                false => LEADERLESS_US,
            };
            self.next_raise_us = now.steady_us + pause_us;
        }
    }

    /// Answers who asks for figures.
    fn tell(&self, node: &Node) {
        let Some(desk) = self.figures.as_ref().filter(|desk| desk.is_asked()) else {
            return;
        };
        let mut sheet = MetricsSnapshot::default();
        figures::of_node(&mut sheet, node);
        if let Some(redis) = &self.redis {
            figures::of_gateway(&mut sheet, &redis.gateway);
        }
        desk.answer(sheet);
    }
}

impl EventSource for LoopServices {
    fn ready(&mut self, event: &Event) {
        if let Some(redis) = &mut self.redis {
            redis.ready(event);
        }
    }

    fn step(&mut self, now: Now, node: &mut Node) -> usize {
        self.tell(node);
        self.follow_format_version(now, node);
        match &mut self.redis {
            Some(redis) => {
                self.renewals.apply(&mut redis.gateway);
                redis.step(now, node)
            }
            // Nothing is submitted in this process.
            None => node.take_completions().count(),
        }
    }

    fn deadline_us(&mut self, now: Now) -> u64 {
        self.redis
            .as_mut()
            .map_or(u64::MAX, |redis| redis.deadline_us(now))
    }

    fn is_fed(&self) -> bool {
        let gateway = self.redis.as_ref().map(|redis| &redis.gateway);
        gateway.is_some_and(|gateway| gateway.connections() > 0 || gateway.has_work())
    }
}

/// What can be done for the Redis port before there is a node behind it: it is taken, and there are
/// open files enough, also for the store.
fn prepare_redis(settings: &GatewayConfig) -> Result<OwnedFd> {
    let listen = settings.listen;
    checks::warn_of_few_files(settings, "limits.max_clients");
    port::reserve(listen)
}

fn open_redis(settings: GatewayConfig, registry: &mio::Registry) -> Result<Redis> {
    let listen = settings.listen;
    let gateway = Gateway::new(settings, registry, COMPANION)
        .with_context(|| format!("cannot open the Redis port {listen}"))?;
    let trimmer = Trimmer::start().context("cannot start the thread that gives memory back")?;
    Ok(Redis { gateway, trimmer })
}

/// What a node may take an empty directory and region for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beginning {
    /// A loss: it was started before.
    None,
    /// A new replica of a new cluster.
    Bootstrap,
    /// A new replica of a cluster that exists.
    Join,
}

/// Runs a node until `stop`. `renewals`: what is read again for its Redis port meanwhile.
pub fn run(
    file: &File,
    beginning: Beginning,
    stop: &AtomicBool,
    renewals: Arc<Renewals>,
) -> Result<()> {
    let Checked { mut config, redis } = check(file, beginning)?;
    let _locked = lock::make_and_take(&config.data)?;
    let is_recovered = recover::prepare(&config)?;
    // The first member of a recovered cluster begins it; no other may.
    config.bootstrap |= is_recovered;
    shelf::check(&config.data, file.cluster.restored_from()?)?;
    engine::check(&config.data, config.engine)?;
    if let Some(cpu) = config.pin_cpu {
        // What there is can be seen only before.
        config.log_cpus = cpus_behind(cpu, &allowed_cpus()?, usize::from(config.log_threads));
        pin(cpu)?;
    }
    let mut reactor = Reactor::new().context("epoll")?;
    let reserved = redis.as_ref().map(prepare_redis).transpose()?;
    let figures = match file.metrics.listen {
        None => None,
        Some(listen) => {
            let desk = Arc::new(MetricsExchange::new(reactor.waker()));
            let address = metrics::serve(listen, Arc::clone(&desk))
                .with_context(|| format!("cannot serve metrics at {listen}"))?;
            tracing::info!(%address, "metrics");
            Some(desk)
        }
    };
    let (data, engine) = (config.data.clone(), config.engine);
    let first_version = engine::first_version(&config)?;
    let mut node = Node::start(config, reactor.waker())?;
    let version = first_version.max(node.format_version());
    let noted_version = engine::note(&data, engine, version);
    if is_recovered {
        recover::forget(&data);
    }
    // Who comes before the node has recovered is refused: a client that waits knows of no other.
    let redis = match redis {
        None => None,
        Some(settings) => Some(open_redis(settings, reactor.registry())?),
    };
    drop(reserved);
    let mut doors = LoopServices {
        redis,
        figures,
        renewals,
        noted_version,
        next_raise_us: 0,
    };
    reactor.run(&mut node, &mut doors, stop)?;
    tracing::info!("this node has ended in order");
    Ok(())
}

//! `cyclone ctl status`: what every node of a cluster says of itself.

use std::collections::HashMap;
use std::io::{BufRead as _, Read as _};
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::Serialize;

use crate::error_text::error_text;
use crate::resp::{self, Access};

/// A state's clock that is further ahead of a node's wall clock is shown.
const CLOCK_AHEAD_MS: i64 = 5_000;

/// One node's line.
#[derive(Serialize)]
struct NodeStatus {
    address: String,
    reachable: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    id: u64,
    role: String,
    #[serde(flatten)]
    reached: Reached,
    log_used_bytes: u64,
    log_capacity_bytes: u64,
    /// The format version that the cluster has recorded; 0: the node does not say.
    format_version_recorded: u64,
    /// The highest that the node's program supports; 0: it does not say.
    format_version_supported: u64,
    durability: String,
    survives: String,
    region: String,
    /// `ok`, `stalled`, `no-space` or `damaged`.
    #[serde(skip_serializing_if = "String::is_empty")]
    store_state: String,
    /// What the store said, where its disk is full or it is damaged.
    #[serde(skip_serializing_if = "String::is_empty")]
    store_error: String,
    /// The node's wall clock less the time that a majority of the voters' clocks agree on, where
    /// that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    wall_clock_offset_ms: Option<i64>,
    /// Every log separately; what stands above is log 0's.
    logs: Vec<LogStatus>,
    /// What a server of engine pmkv says of itself; it has no logs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pmkv: Option<PmkvStatus>,
}

/// A server of engine pmkv.
#[derive(Clone, Default, Serialize)]
struct PmkvStatus {
    server: u64,
    term: u64,
    members: u64,
    lease: bool,
    replication: String,
    shards_serving: u64,
    shards_preparing: u64,
    shards_held: u64,
    shards_whole: u64,
    segments: u64,
    segments_free: u64,
    full: bool,
}

/// What only servers of engine pmkv say in INFO.
const OF_PMKV: &str = "pmkv_server";

/// Refuses to ask a cluster of engine pmkv for what only the others have. Where no node answers,
/// nothing is refused.
///
/// # Errors
/// The cluster is one of engine pmkv.
pub fn refuse_pmkv(connect: SocketAddr, access: &Access, what: &str) -> Result<()> {
    let info = resp::connect_with(connect, access, Duration::from_secs(2))
        .and_then(|mut open| resp::info_of(&mut open));
    if info.is_ok_and(|info| info.contains_key(OF_PMKV)) {
        bail!(
            "{connect} is a server of engine pmkv, and {what} is for the engines rocksdb and memory; for pmkv there are \
             `ctl members`, `shards`, `drain` and others, with --config and the cluster's file (docs/pmkv.md)"
        );
    }
    Ok(())
}

impl PmkvStatus {
    fn of(info: &HashMap<String, String>) -> Option<PmkvStatus> {
        let text = |name: &str| info.get(&format!("pmkv_{name}")).cloned();
        let number = |name: &str| text(name).and_then(|it| it.parse().ok()).unwrap_or(0);
        info.contains_key(OF_PMKV).then(|| PmkvStatus {
            server: number("server"),
            term: number("term"),
            members: number("members"),
            lease: number("lease") == 1,
            replication: text("replication").unwrap_or_default(),
            shards_serving: number("shards_serving"),
            shards_preparing: number("shards_preparing"),
            shards_held: number("shards_held"),
            shards_whole: number("shards_whole"),
            segments: number("segments"),
            segments_free: number("segments_free"),
            full: number("full") == 1,
        })
    }

    fn heading() {
        println!(
            "{:<22} {:>6} {:>6} {:>7} {:<5} {:>7} {:>9} {:>6} {:>6} {:>16}  replication, survives",
            "address",
            "server",
            "term",
            "members",
            "lease",
            "serving",
            "preparing",
            "held",
            "whole",
            "segments free"
        );
    }

    fn print(&self, address: &str, survives: &str) {
        println!(
            "{address:<22} {:>6} {:>6} {:>7} {:<5} {:>7} {:>9} {:>6} {:>6} {:>16}  {}, {survives}{}",
            self.server,
            self.term,
            self.members,
            if self.lease { "yes" } else { "no" },
            self.shards_serving,
            self.shards_preparing,
            self.shards_held,
            self.shards_whole,
            format!("{} of {}", self.segments_free, self.segments),
            self.replication,
            if self.full { ", FULL" } else { "" }
        );
    }
}

/// How far a log is, and its second level: what a node reports for each log, and of log 0 once more
/// as its own.
#[derive(Clone, Default, Serialize)]
struct Reached {
    term: u64,
    leader: u64,
    first: u64,
    last: u64,
    commit: u64,
    applied: u64,
    flushed: u64,
    /// The state's clock less the node's wall clock.
    clock_offset_ms: i64,
    #[serde(skip_serializing_if = "String::is_empty")]
    flash_state: String,
    flash_used_bytes: u64,
    flash_capacity_bytes: u64,
}

/// One physical log of a node.
#[derive(Clone, Serialize)]
struct LogStatus {
    log: u64,
    role: String,
    #[serde(flatten)]
    reached: Reached,
    used_bytes: u64,
    capacity_bytes: u64,
    #[serde(skip_serializing_if = "String::is_empty")]
    archive_state: String,
    archive_sealed: u64,
    archive_behind: u64,
    archive_gaps: u64,
}

impl LogStatus {
    fn of(info: &HashMap<String, String>, log: u64) -> LogStatus {
        let text = |name: &str| {
            let found = info.get(&format!("cyclone_log{log}_{name}"));
            found.cloned().unwrap_or_default()
        };
        let number = |name: &str| text(name).parse().unwrap_or(0);
        LogStatus {
            log,
            role: text("role"),
            reached: Reached {
                term: number("term"),
                leader: number("leader"),
                first: number("first"),
                last: number("last"),
                commit: number("commit"),
                applied: number("applied"),
                flushed: number("flushed"),
                clock_offset_ms: text("clock_offset_ms").parse().unwrap_or(0),
                flash_state: text("flash_state"),
                flash_used_bytes: number("flash_used_bytes"),
                flash_capacity_bytes: number("flash_capacity_bytes"),
            },
            used_bytes: number("used_bytes"),
            capacity_bytes: number("capacity_bytes"),
            archive_state: text("archive_state"),
            archive_sealed: number("archive_sealed"),
            archive_behind: number("archive_behind"),
            archive_gaps: number("archive_gaps"),
        }
    }

    /// A line, in the columns of its node's.
    fn print(&self, survives: &str) {
        let share = |used: u64, of: u64| 100.0 * used as f64 / of.max(1) as f64;
        let reached = &self.reached;
        let flash = match reached.flash_state.as_str() {
            "" => String::new(),
            state => format!(
                "flash {state}, {:.1}% used",
                share(reached.flash_used_bytes, reached.flash_capacity_bytes)
            ),
        };
        let archive = match (self.archive_state.as_str(), self.archive_gaps) {
            ("", _) => String::new(),
            (state, 0) => format!("archive {state}, {} behind", self.archive_behind),
            (state, gaps) => format!(
                "archive {state}, {} behind, {gaps} GAPS",
                self.archive_behind
            ),
        };
        // Where nothing is written the state's clock stands still: only one that is ahead says
        // something.
        let clock = match reached.clock_offset_ms {
            ..=CLOCK_AHEAD_MS => String::new(),
            ahead_ms => format!("STATE'S CLOCK {} s AHEAD", ahead_ms / 1_000),
        };
        let parts = [survives, &flash, &archive, &clock];
        let parts: Vec<&str> = parts.into_iter().filter(|part| !part.is_empty()).collect();
        println!(
            "{:<13} {:>6} {:>10} {:>10} {:>10} {:>6.1}%  {}",
            self.role,
            reached.term,
            reached.last,
            reached.commit,
            reached.applied,
            share(self.used_bytes, self.capacity_bytes),
            parts.join(", ")
        );
    }
}

fn status_of(address: SocketAddr, access: &Access) -> NodeStatus {
    let patience = Duration::from_secs(2);
    let info =
        resp::connect_with(address, access, patience).and_then(|mut open| resp::info_of(&mut open));
    let (info, error) = match info {
        Ok(info) => (info, None),
        Err(error) => (HashMap::new(), Some(error_text(&error))),
    };
    let text = |name: &str| info.get(name).cloned().unwrap_or_default();
    let number = |name: &str| text(name).parse().unwrap_or(0);
    let logs: Vec<LogStatus> = (0..number("cyclone_logs"))
        .map(|log| LogStatus::of(&info, log))
        .collect();
    let first = logs.first();
    NodeStatus {
        address: address.to_string(),
        reachable: error.is_none(),
        error,
        id: number("cyclone_id"),
        role: text("cyclone_role"),
        reached: first.map(|log| log.reached.clone()).unwrap_or_default(),
        log_used_bytes: first.map_or(0, |log| log.used_bytes),
        log_capacity_bytes: first.map_or(0, |log| log.capacity_bytes),
        format_version_recorded: number("cyclone_format_version_recorded"),
        format_version_supported: number("cyclone_format_version_supported"),
        durability: text("cyclone_durability"),
        survives: text("cyclone_survives"),
        region: text("cyclone_region"),
        store_state: text("cyclone_store_state"),
        store_error: text("cyclone_store_error"),
        wall_clock_offset_ms: text("cyclone_clock_offset_ms").parse().ok(),
        logs,
        pmkv: PmkvStatus::of(&info),
    }
}

/// The Redis ports of all nodes, as one of them knows them.
pub fn addresses(connect: SocketAddr, access: &Access) -> Result<Vec<SocketAddr>> {
    let mut connection = resp::connect_with(connect, access, Duration::from_secs(2))?;
    let mut asking = redis::cmd("CLUSTER");
    asking.arg("NODES");
    let nodes: String = resp::first(&asking, &mut connection).context("CLUSTER NODES")?;
    let mut found: Vec<SocketAddr> = nodes.lines().filter_map(address_of).collect();
    if found.is_empty() {
        found.push(connect);
    }
    found.sort();
    Ok(found)
}

/// The Redis port in a line of CLUSTER NODES. As in Redis, an IPv6 address has no brackets there.
fn address_of(line: &str) -> Option<SocketAddr> {
    let place = line.split(' ').nth(1)?.split(['@', ',']).next()?;
    let (ip, port) = place.rsplit_once(':')?;
    Some(SocketAddr::new(ip.parse().ok()?, port.parse().ok()?))
}

/// `cyclone ctl hash-password`: reads a password from standard input, up to the first line's end,
/// and prints its hash.
///
/// # Errors
/// An empty or overlong password.
pub fn hash_password(user: Option<&str>) -> Result<()> {
    let mut line = String::new();
    std::io::stdin()
        .lock()
        .take(4096)
        .read_line(&mut line)
        .context("standard input")?;
    let password = line.trim_end_matches(['\r', '\n']);
    if password.is_empty() {
        bail!("no password on standard input");
    }
    let hash = cyclone_gateway::hash_password(password.as_bytes())?;
    match user {
        Some(user) if user.is_empty() || user.contains([':', '\n']) => {
            bail!("user {user:?}: a name is not empty and has no colon")
        }
        Some(user) => println!("{user}:{hash}"),
        None => println!("{hash}"),
    }
    Ok(())
}

/// The servers of a cluster of engine pmkv.
fn print_pmkv(nodes: &[NodeStatus]) {
    PmkvStatus::heading();
    for node in nodes {
        match (&node.pmkv, &node.error) {
            (Some(server), _) => server.print(&node.address, &node.survives),
            (None, Some(error)) => println!("{:<22} unreachable: {error}", node.address),
            (None, None) => println!("{:<22} says nothing of itself", node.address),
        }
    }
}

/// Prints the status of all nodes.
pub fn status(connect: SocketAddr, access: &Access, json: bool) -> Result<()> {
    let nodes: Vec<NodeStatus> = addresses(connect, access)?
        .into_iter()
        .map(|address| status_of(address, access))
        .collect();
    if json {
        println!("{}", serde_json::json!({ "nodes": nodes }));
        return Ok(());
    }
    if nodes.iter().any(|node| node.pmkv.is_some()) {
        print_pmkv(&nodes);
        return Ok(());
    }
    println!(
        "{:<22} {:>3} {:<13} {:>6} {:>10} {:>10} {:>10} {:>7}  survives",
        "address", "id", "role", "term", "last", "commit", "applied", "log use"
    );
    for node in &nodes {
        if let Some(error) = &node.error {
            println!("{:<22}   - unreachable: {error}", node.address);
            continue;
        }
        print!("{:<22} {:>3} ", node.address, node.id);
        match node.logs.as_slice() {
            [only] => LogStatus {
                role: node.role.clone(),
                ..only.clone()
            }
            .print(&node.survives),
            logs => {
                println!(
                    "{:<13} {} logs; survives {}",
                    node.role,
                    logs.len(),
                    node.survives
                );
                for log in logs {
                    print!("{:<22} {:>3} ", format!("  log {}", log.log), "");
                    log.print("");
                }
            }
        }
    }
    for node in nodes.iter().filter(|node| node.reachable) {
        if !matches!(node.store_state.as_str(), "" | "ok") {
            println!("{}", warning_of_store(node));
        }
    }
    for node in &nodes {
        if let Some(offset_ms) = node.wall_clock_offset_ms
            && offset_ms.unsigned_abs() > CLOCK_AHEAD_MS.unsigned_abs()
        {
            println!(
                "warning: the wall clock of node {} differs by {offset_ms} ms from the time that a majority agrees on",
                node.id
            );
        }
    }
    print_format_versions(&nodes);
    let is_ahead = |log: &LogStatus| log.reached.clock_offset_ms > CLOCK_AHEAD_MS;
    if nodes.iter().any(|node| node.logs.iter().any(is_ahead)) {
        println!(
            "warning: the state's clock is ahead, so keys expire late; where the nodes' wall clocks are right: ctl clock reset"
        );
    }
    if nodes
        .iter()
        .any(|node| node.reachable && node.survives != "power-loss")
    {
        println!(
            "warning: log regions that survive only process crashes lose their log when the machine loses power"
        );
    }
    Ok(())
}

/// The recorded format version, and each node's where its program supports another one. Programs of
/// version 1 do not say.
fn print_format_versions(nodes: &[NodeStatus]) {
    let reached = || nodes.iter().filter(|node| node.reachable);
    let supported = |node: &NodeStatus| node.format_version_supported.max(1);
    let recorded = reached().map(|node| node.format_version_recorded.max(1));
    let Some(recorded) = recorded.max() else {
        return;
    };
    println!("format version {recorded}");
    for node in reached().filter(|node| supported(node) != recorded) {
        println!(
            "node {} supports format version {}",
            node.id,
            supported(node)
        );
    }
    let has_all = nodes
        .iter()
        .all(|node| node.reachable && supported(node) > recorded);
    if has_all {
        println!("after the upgrade of all members: ctl finalize-upgrade");
    }
}

/// What is wrong with a node's store, and what helps.
fn warning_of_store(node: &NodeStatus) -> String {
    let remedy = match node.store_state.as_str() {
        "damaged" => "replace the node with `cyclone ctl member replace`",
        "no-space" => "it goes on when its disk has room",
        _ => "it takes nothing at present; check its disk",
    };
    let (id, state, error) = (node.id, &node.store_state, &node.store_error);
    let error = match error.is_empty() {
        true => String::new(),
        false => format!(" ({error})"),
    };
    format!("warning: the store of node {id} is {state}{error}: {remedy}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_both_families_are_found() {
        let of = |place: &str| {
            let line = format!("07c3 {place} myself,master - 0 0 1 connected 0-16383");
            address_of(&line).map(|address| address.to_string())
        };
        for (place, address) in [
            ("127.0.0.1:7101@0", "127.0.0.1:7101"),
            ("127.0.0.1:7101@17101,host", "127.0.0.1:7101"),
            ("::1:7101@0", "[::1]:7101"),
            ("fd00::a:2:6379@0,", "[fd00::a:2]:6379"),
        ] {
            assert_eq!(of(place).as_deref(), Some(address), "{place}");
        }
        for place in [":0@0", "::1@0", "host:7101@0", "127.0.0.1@0", ""] {
            assert_eq!(of(place), None, "{place}");
        }
        assert_eq!(address_of(""), None);
    }
}

//! `cyclone ctl status`: what every node of a cluster says of itself.

use std::collections::HashMap;
use std::io::{BufRead as _, Read as _};
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::Serialize;

use crate::resp::{self, Access};
use crate::told::told;

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
    durability: String,
    survives: String,
    region: String,
    /// Every log by itself; what stands above is log 0's.
    logs: Vec<LogStatus>,
}

/// How far a log is, and its second level: what a node tells of each log, and of log 0 once more as its own.
#[derive(Clone, Default, Serialize)]
struct Reached {
    term: u64,
    leader: u64,
    first: u64,
    last: u64,
    commit: u64,
    applied: u64,
    flushed: u64,
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
        let parts = [survives, &flash, &archive];
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
        Err(error) => (HashMap::new(), Some(told(&error))),
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
        durability: text("cyclone_durability"),
        survives: text("cyclone_survives"),
        region: text("cyclone_region"),
        logs,
    }
}

/// The Redis ports of all nodes, as one of them knows them.
pub(crate) fn addresses(connect: SocketAddr, access: &Access) -> Result<Vec<SocketAddr>> {
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

/// `cyclone ctl hash-password`: reads a password from standard input, up to the first line's end, and prints its hash.
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

//! `cyclone ctl member list`: who takes part in which log, as the nodes themselves say.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Result;
use serde::Serialize;

use crate::ctl;
use crate::error_text::error_text;
use crate::resp::{self, Access};

/// How long each node is given.
const PATIENCE: Duration = Duration::from_secs(2);

/// A member's part in a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Part {
    /// Votes, and counts for a majority.
    Voter,
    /// Votes only until a change is over.
    Outgoing,
    /// Is sent the log, and does not vote.
    Learner,
}

/// A member in one log.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct InLog {
    log: u16,
    part: Part,
    /// What the member says it is; empty if it was not reached.
    role: String,
    /// Up to which index the log's leader knows it to hold the log.
    #[serde(skip_serializing_if = "Option::is_none")]
    matched: Option<u64>,
    /// Whether the log's leader has heard from it lately.
    #[serde(skip_serializing_if = "Option::is_none")]
    alive: Option<bool>,
    /// Where the log ends at its leader.
    #[serde(skip_serializing_if = "Option::is_none")]
    last: Option<u64>,
}

/// A member.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Member {
    id: u64,
    /// Its Redis port, if it was reached.
    #[serde(skip_serializing_if = "Option::is_none")]
    address: Option<SocketAddr>,
    logs: Vec<InLog>,
}

type Info = HashMap<String, String>;

fn number(info: &Info, name: &str) -> Option<u64> {
    info.get(name)?.parse().ok()
}

/// The ids in a list of members.
fn ids(info: &Info, log: u16, list: &str) -> BTreeSet<u64> {
    let text = info.get(&format!("cyclone_log{log}_{list}"));
    text.into_iter()
        .flat_map(|text| text.split(','))
        .filter_map(|id| id.parse().ok())
        .collect()
}

/// What the log's leader says of a member: matched index, heard from.
fn progress(leader: &Info, log: u16, id: u64) -> Option<(u64, bool)> {
    let name = match log {
        0 => format!("cyclone_peer{id}"),
        other => format!("cyclone_log{other}_peer{id}"),
    };
    let mut fields = leader.get(&name)?.split(',');
    Some((
        fields.next()?.strip_prefix("matched=")?.parse().ok()?,
        fields.next()? == "alive=1",
    ))
}

/// Puts together what the nodes say. For each log its leader's report counts; without a leader, the
/// reports of all.
fn gather(nodes: &[(SocketAddr, Info)]) -> Vec<Member> {
    let own = |info: &Info| number(info, "cyclone_id");
    let logs = nodes
        .iter()
        .filter_map(|(_, info)| number(info, "cyclone_logs"));
    let logs = logs.max().unwrap_or(0) as u16;
    let mut members: BTreeMap<u64, Member> = BTreeMap::new();
    for log in 0..logs {
        let role = format!("cyclone_log{log}_role");
        let leads = |info: &Info| info.get(&role).is_some_and(|role| role == "leader");
        // One that was deposed may not know it yet: the latest term counts.
        let term = |info: &Info| number(info, &format!("cyclone_log{log}_term"));
        let leader = nodes
            .iter()
            .map(|(_, info)| info)
            .filter(|info| leads(info))
            .max_by_key(|info| term(info));
        let witnesses: Vec<&Info> = match leader {
            Some(leader) => vec![leader],
            None => nodes.iter().map(|(_, info)| info).collect(),
        };
        let mut parts = BTreeMap::new();
        for (list, part) in [
            ("learners", Part::Learner),
            ("voters_outgoing", Part::Outgoing),
            ("voters", Part::Voter),
        ] {
            for id in witnesses.iter().flat_map(|info| ids(info, log, list)) {
                parts.insert(id, part);
            }
        }
        for (id, part) in parts {
            let node = nodes.iter().find(|(_, info)| own(info) == Some(id));
            let last = leader.and_then(|info| number(info, &format!("cyclone_log{log}_last")));
            let told = match leader {
                Some(info) if own(info) == Some(id) => last.map(|last| (last, true)),
                Some(info) => progress(info, log, id),
                None => None,
            };
            let member = members.entry(id).or_insert_with(|| Member {
                id,
                address: node.map(|(address, _)| *address),
                logs: Vec::new(),
            });
            member.logs.push(InLog {
                log,
                part,
                role: node
                    .and_then(|(_, info)| info.get(&role).cloned())
                    .unwrap_or_default(),
                matched: told.map(|(matched, _)| matched),
                alive: told.map(|(_, alive)| alive),
                last,
            });
        }
    }
    members.into_values().collect()
}

/// The members in all logs, as the logs' leaders say.
pub(crate) struct Standing {
    members: Vec<Member>,
    logs: usize,
    /// A change is in progress.
    pub(crate) changing: bool,
}

impl Standing {
    /// Asks the nodes. `None` unless one of them leads all logs.
    pub(crate) fn read(nodes: &[SocketAddr], access: &Access) -> Option<Standing> {
        let info = |address: &SocketAddr| {
            let mut open = resp::connect_with(*address, access, PATIENCE).ok()?;
            Some((*address, resp::info_of(&mut open).ok()?))
        };
        let nodes: Vec<(SocketAddr, Info)> = nodes.iter().filter_map(info).collect();
        let leads = |info: &&Info| {
            info.get("cyclone_role")
                .is_some_and(|role| role == "leader")
        };
        // One that was deposed may not know it yet: the latest term counts.
        let leader = nodes.iter().map(|(_, info)| info).filter(leads);
        let leader = leader.max_by_key(|info| number(info, "cyclone_log0_term"))?;
        Some(Standing {
            logs: number(leader, "cyclone_logs")? as usize,
            changing: number(leader, "cyclone_members_changing")? != 0,
            members: gather(&nodes),
        })
    }

    /// Whether this member has such a part in every log.
    pub(crate) fn everywhere(&self, id: u64, is: fn(Part) -> bool) -> bool {
        let member = self.members.iter().find(|member| member.id == id);
        member.is_some_and(|member| {
            member.logs.len() == self.logs && member.logs.iter().all(|log| is(log.part))
        })
    }

    /// Whether it has no part in any log.
    pub(crate) fn nowhere(&self, id: u64) -> bool {
        self.members.iter().all(|member| member.id != id)
    }
}

/// Prints every member's part in every log.
///
/// # Errors
/// When not even the named node answers.
pub fn list(connect: SocketAddr, access: &Access, json: bool) -> Result<()> {
    ctl::refuse_pmkv(connect, access, "`ctl member`")?;
    let mut nodes = Vec::new();
    let mut unreached = Vec::new();
    for address in ctl::addresses(connect, access)? {
        let info = resp::connect_with(address, access, PATIENCE)
            .and_then(|mut open| resp::info_of(&mut open));
        match info {
            Ok(info) => nodes.push((address, info)),
            Err(error) => unreached.push((address, error_text(&error))),
        }
    }
    let members = gather(&nodes);
    if json {
        let unreached: Vec<_> = unreached
            .iter()
            .map(|(address, error)| serde_json::json!({ "address": address, "error": error }))
            .collect();
        println!(
            "{}",
            serde_json::json!({ "members": members, "unreached": unreached })
        );
        return Ok(());
    }
    println!(
        "{:>5}  {:<22} {:>3}  {:<9} {:<13} {:>12} {:>10}  heard from",
        "id", "address", "log", "part", "role", "holds up to", "behind"
    );
    let shown = |value: Option<u64>| value.map_or("-".to_owned(), |value| value.to_string());
    for member in &members {
        let address = member
            .address
            .map_or("not reached".to_owned(), |address| address.to_string());
        for log in &member.logs {
            let behind = log
                .last
                .zip(log.matched)
                .map(|(last, matched)| last.saturating_sub(matched));
            let part = match log.part {
                Part::Voter => "voter",
                Part::Outgoing => "outgoing",
                Part::Learner => "learner",
            };
            let alive = match log.alive {
                Some(true) => "yes",
                Some(false) => "no",
                None => "-",
            };
            println!(
                "{:>5}  {:<22} {:>3}  {:<9} {:<13} {:>12} {:>10}  {alive}",
                member.id,
                address,
                log.log,
                part,
                if log.role.is_empty() { "-" } else { &log.role },
                shown(log.matched),
                shown(behind),
            );
        }
    }
    for (address, error) in unreached {
        println!("{address} does not answer: {error}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(lines: &[(&str, &str)]) -> Info {
        let own = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        lines.iter().map(own).collect()
    }

    /// The leader of the latest term is believed; one that was deposed and one that is gone are
    /// shown as what they are.
    #[test]
    fn the_latest_leader_is_believed() {
        let address = |port: u16| SocketAddr::from(([127, 0, 0, 1], port));
        let deposed = info(&[
            ("cyclone_id", "1"),
            ("cyclone_logs", "1"),
            ("cyclone_log0_role", "leader"),
            ("cyclone_log0_term", "4"),
            ("cyclone_log0_last", "90"),
            ("cyclone_log0_voters", "1,2,3"),
            ("cyclone_peer2", "matched=80,alive=1"),
        ]);
        let leader = info(&[
            ("cyclone_id", "2"),
            ("cyclone_logs", "1"),
            ("cyclone_log0_role", "leader"),
            ("cyclone_log0_term", "5"),
            ("cyclone_log0_last", "100"),
            ("cyclone_log0_voters", "1,2,4"),
            ("cyclone_log0_voters_outgoing", "1,2,3"),
            ("cyclone_log0_learners", "9"),
            ("cyclone_peer1", "matched=70,alive=0,behind=30"),
            ("cyclone_peer4", "matched=100,alive=1,behind=0"),
        ]);
        let members = gather(&[(address(1), deposed.clone()), (address(2), leader)]);
        let shown: Vec<_> = members
            .iter()
            .map(|member| {
                let log = &member.logs[0];
                (member.id, log.part, log.matched, log.alive)
            })
            .collect();
        assert_eq!(
            shown,
            [
                (1, Part::Voter, Some(70), Some(false)),
                (2, Part::Voter, Some(100), Some(true)),
                (3, Part::Outgoing, None, None),
                (4, Part::Voter, Some(100), Some(true)),
                (9, Part::Learner, None, None),
            ]
        );
        assert_eq!(members[0].logs[0].last, Some(100));
        assert_eq!(members[2].address, None);
        // Without a leader everybody's word counts.
        let mut follower = deposed;
        follower.insert("cyclone_log0_role".into(), "follower".into());
        let members = gather(&[(address(1), follower)]);
        assert_eq!(members.len(), 3);
        assert_eq!(members[0].logs[0].role, "follower");
        assert_eq!(members[0].logs[0].matched, None);
        assert!(gather(&[]).is_empty());
    }
}

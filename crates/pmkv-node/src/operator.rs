//! What an operator asks a manager, and hears: JSON over the managers' sockets.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use cyclone_pmkv_cm::{Configuration, MigrationKind, Standing};
use serde::{Deserialize, Serialize};

use super::file::ClusterFile;
use super::manager::OPERATOR;
use super::post::Post;

/// A question.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum OperatorRequest {
    /// How things stand.
    Look,
    /// Move everything away from a server.
    Drain(u64),
    /// Take that back.
    Undrain(u64),
    /// Give up what only this failed server holds.
    Forget(u64),
    /// Move a shard's primary.
    Move { shard: u16, target: u64 },
}

/// The answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum OperatorResponse {
    /// Another manager is.
    NotInOffice,
    /// Nothing was done.
    Refused(String),
    /// How things stand.
    Cluster(Cluster),
}

/// The cluster, as the manager in office knows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cluster {
    /// Which manager is in office.
    pub manager: u64,
    /// The newest term, and the last one that is committed.
    pub term: u64,
    /// See `term`.
    pub committed: u64,
    /// Copies wanted of each shard.
    pub copies: u8,
    /// By ascending id.
    pub members: Vec<MemberLine>,
    /// By number.
    pub shards: Vec<ShardLine>,
    /// What is on the move.
    pub migrations: Vec<MigrationLine>,
}

/// A member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberLine {
    /// Its id.
    pub id: u64,
    /// live, draining or down.
    pub standing: String,
    /// Term in which it became a member.
    pub since: u64,
    /// Its Redis port.
    pub client: String,
    /// Shards that it serves, and copies that it holds.
    pub serves: usize,
    /// See `serves`.
    pub holds: usize,
}

/// A shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardLine {
    /// Who serves it.
    pub primary: u64,
    /// Term in which that was decided.
    pub since: u64,
    /// Who has all of it.
    pub full: Vec<u64>,
    /// Who shall.
    pub joining: Vec<u64>,
}

/// A copy on the move.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigrationLine {
    /// Of which shard.
    pub shard: u16,
    /// primary or backup.
    pub kind: String,
    /// From where.
    pub source: u64,
    /// To where.
    pub target: u64,
}

pub(super) fn cluster(config: &Configuration, committed: u64, manager: u64) -> Cluster {
    let ids = |copies: &[cyclone_pmkv_cm::Copy]| copies.iter().map(|it| it.server.0).collect();
    let member = |member: &cyclone_pmkv_cm::Member| MemberLine {
        id: member.id.0,
        standing: match member.standing {
            Standing::Live => "live".into(),
            Standing::Draining => "draining".into(),
            Standing::Down => "down".into(),
        },
        since: member.since,
        client: member.client.clone(),
        serves: config
            .shards
            .iter()
            .filter(|it| it.primary == member.id)
            .count(),
        holds: config.shards.iter().filter(|it| it.has(member.id)).count(),
    };
    Cluster {
        manager,
        term: config.term,
        committed,
        copies: config.replication,
        members: config.members.iter().map(member).collect(),
        shards: config
            .shards
            .iter()
            .map(|shard| ShardLine {
                primary: shard.primary.0,
                since: shard.since,
                full: ids(&shard.full),
                joining: ids(&shard.joining),
            })
            .collect(),
        migrations: config
            .migrations
            .iter()
            .map(|it| MigrationLine {
                shard: it.shard,
                kind: match it.kind {
                    MigrationKind::Primary => "primary".into(),
                    MigrationKind::Backup => "backup".into(),
                },
                source: it.source.0,
                target: it.target.0,
            })
            .collect(),
    }
}

pub(super) fn encode(told: &OperatorResponse) -> Vec<u8> {
    // Plain structs of numbers and text: nothing in them fails to become JSON.
    serde_json::to_vec(told).unwrap_or_default()
}

/// Asks whichever manager is in office.
///
/// # Errors
/// None is within the time given, or it refuses.
pub(super) fn ask(
    file: &ClusterFile,
    question: &OperatorRequest,
    patience: Duration,
) -> Result<Cluster> {
    let mut bytes = vec![OPERATOR];
    bytes.extend_from_slice(&serde_json::to_vec(question)?);
    let number = super::clock::now_us();
    let socket: PathBuf = file
        .sockets()
        .join(format!("operator-{}-{number}.sock", std::process::id()));
    let mut post =
        Post::open(&socket).with_context(|| format!("cannot open {}", socket.display()))?;
    let until = Instant::now() + patience;
    while Instant::now() < until {
        for manager in 1..=file.managers() {
            post.send(&file.manager_socket(manager), &bytes);
        }
        let round = Instant::now() + Duration::from_millis(50);
        while Instant::now() < round.min(until) {
            let Some((_, bytes)) = post.receive(Duration::from_millis(10)) else {
                continue;
            };
            match serde_json::from_slice(&bytes) {
                Ok(OperatorResponse::Cluster(cluster)) => return Ok(cluster),
                Ok(OperatorResponse::Refused(why)) => bail!("refused: {why}"),
                Ok(OperatorResponse::NotInOffice) | Err(_) => {}
            }
        }
    }
    bail!("no manager in office answered within {patience:?}")
}
